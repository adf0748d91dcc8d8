import torch
from lightllm.server.router.model_infer.infer_batch import InferReqUpdatePack
from lightllm.server.router.model_infer.mode_backend.generic_post_process import sample


class ModeBackend:
    def init_model(self, kvargs):
        self.args = kvargs["args"]

    def _get_next_token_ranks(self, logits, next_token_ids):
        if not self.args.enable_rl:
            return torch.full(next_token_ids.shape, -1, dtype=torch.int32)
        chosen = logits.gather(1, next_token_ids.long()[:, None])
        return (logits > chosen).sum(-1, dtype=torch.int32) + 1

    def _async_copy_next_token_infos_to_pin_mem(self, next_token_ids, next_token_logprobs, next_token_ranks):
        return next_token_ids.clone(), next_token_logprobs.clone(), next_token_ranks.clone()

    def _sample_and_scatter_token(
        self, logits, b_req_idx, b_mtp_index, run_reqs, is_prefill, b_prefill_has_output_cpu=None, mask_func=None
    ):
        ids, logprobs = sample(logits, run_reqs, self.eos_id)
        table = self.model.req_manager.req_sampling_params_manager.req_to_next_token_ids
        table[b_req_idx.long(), b_mtp_index.long()] = ids
        return ids, *self._async_copy_next_token_infos_to_pin_mem(
            ids, logprobs, self._get_next_token_ranks(logits, ids)
        )

    def _pre_post_handle(self, run_reqs, is_chuncked_mode):
        packs = []
        for req in run_reqs:
            req.cur_kv_len = req.get_cur_total_len()
            req.cur_output_len += 1
            packs.append(InferReqUpdatePack(req, req.cur_output_len))
        return packs

    def _post_handle(
        self,
        run_reqs,
        next_token_ids,
        next_token_logprobs,
        next_token_ranks,
        run_reqs_update_packs,
        extra_post_req_handle_func=None,
    ):
        values = next_token_ids.tolist(), next_token_logprobs.tolist(), next_token_ranks.tolist()
        for token, logprob, rank, pack in zip(*values, run_reqs_update_packs, strict=True):
            pack.handle(token, logprob, rank, self.eos_id, self.is_master_in_dp)
