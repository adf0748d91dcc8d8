from types import SimpleNamespace

import torch
from lightllm.common.basemodel.triton_kernel.mtp_utils import gen_b_req_mtp_start_loc
from lightllm.server.router.model_infer.infer_batch import g_infer_context
from lightllm.server.router.model_infer.mode_backend.base_backend import ModeBackend
from lightllm.server.router.model_infer.mode_backend.generic_post_process import sample
from lightllm.server.router.model_infer.mtp_speculative import utils as mtp_utils


def prepare_decode_inputs(req_objs):
    rows = [(req, j) for req in req_objs for j in range(req.mtp_step + 1)]
    index = torch.tensor([req.req_idx for req, _ in rows], dtype=torch.int32)
    position = torch.tensor([j for _, j in rows], dtype=torch.int32)
    return SimpleNamespace(b_req_idx=index, b_mtp_index=position, batch_size=len(rows)), [req for req, _ in rows]


class ChunkedPrefillBackend(ModeBackend):
    def decode_mtp(self, event_pack, decode_reqs):
        model_input, run_reqs = prepare_decode_inputs(decode_reqs)
        plan = self.spec_engine.plan_decode(model_input=model_input, decode_reqs=decode_reqs)
        model_input, mask = self.spec_engine.prepare_decode_model_input(
            model_input=model_input, req_num=len(decode_reqs), plan=plan
        )
        output = self.model.forward(model_input)
        if mask is not None:
            run_reqs = [req for req, kept in zip(run_reqs, mask.tensor.tolist(), strict=True) if kept]
        ids, logprobs = sample(output.logits, run_reqs, self.eos_id)
        ranks = self._get_next_token_ranks(output.logits, ids)
        starts = gen_b_req_mtp_start_loc(model_input.b_mtp_index, num_reqs=len(decode_reqs))
        lengths, accepted = mtp_utils.verify_mtp_tokens(
            backend=self,
            next_token_ids=ids,
            b_req_idx=model_input.b_req_idx,
            b_req_mtp_start_loc=starts,
            b_mtp_index=model_input.b_mtp_index,
        )
        g_infer_context.req_sampling_manager.update_reqs_out_token_counter_gpu(
            b_req_idx=model_input.b_req_idx, next_token_ids=ids, mask=accepted == 1
        )
        proposal = self.spec_engine.propose_next(
            target_model_input=model_input,
            target_model_output=output,
            target_next_token_ids=ids,
            b_req_mtp_start_loc=starts,
            draft_step=plan.draft_step,
            accept_len=lengths,
        )
        mtp_utils.scatter_mtp_next_tokens(
            backend=self,
            proposal=proposal,
            target_next_token_ids=ids,
            b_req_mtp_start_loc=starts,
            b_req_idx=model_input.b_req_idx,
            mtp_accept_len=lengths,
        )
        host = self._async_copy_next_token_infos_to_pin_mem(
            next_token_ids=ids, next_token_logprobs=logprobs, next_token_ranks=ranks
        )
        finish_step(self, decode_reqs, run_reqs, lengths, accepted, host)


def finish_step(backend, decode_reqs, run_reqs, lengths, accepted, host):
    mtp_utils.record_request_mtp_metrics(
        backend=backend, decode_reqs=decode_reqs, accept_lengths_cpu=lengths, verify_run_reqs=run_reqs
    )
    kept = accepted.bool()
    reqs = [req for req, ok in zip(run_reqs, kept.tolist(), strict=True) if ok]
    packs = backend._pre_post_handle(reqs, is_chuncked_mode=False)
    backend._post_handle(
        run_reqs=reqs,
        next_token_ids=host[0][kept],
        next_token_logprobs=host[1][kept],
        next_token_ranks=host[2][kept],
        run_reqs_update_packs=packs,
    )
