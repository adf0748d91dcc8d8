import torch
from lightllm.common.basemodel.triton_kernel.mtp_utils import gen_b_req_mtp_start_loc
from lightllm.server.router.model_infer.mode_backend.base_backend import ModeBackend
from lightllm.server.router.model_infer.mode_backend.chunked_prefill.impl import finish_step, prepare_decode_inputs
from lightllm.server.router.model_infer.mode_backend.generic_post_process import sample
from lightllm.server.router.model_infer.mtp_speculative import utils as mtp_utils


class DPChunkedPrefillBackend(ModeBackend):
    def decode_overlap_mtp(self, event_pack, decode_reqs):
        """Two microbatches; the host's copy of the ids is queued before verification."""
        half = (len(decode_reqs) + 1) // 2
        input0, reqs0 = prepare_decode_inputs(decode_reqs[:half])
        input1, reqs1 = prepare_decode_inputs(decode_reqs[half:])
        plan = self.decode_draft_engine.plan_decode(model_input0=input0, model_input1=input1, decode_reqs=decode_reqs)
        output0, output1 = self.model.microbatch_overlap_decode(input0, input1)
        run_reqs, logits = reqs0 + reqs1, torch.cat((output0.logits, output1.logits))
        ids, logprobs = sample(logits, run_reqs, self.eos_id)
        ranks = self._get_next_token_ranks(logits, ids)
        host = self._async_copy_next_token_infos_to_pin_mem(ids, logprobs, ranks)
        slots = torch.cat((input0.b_req_idx, input1.b_req_idx))
        starts = gen_b_req_mtp_start_loc(torch.cat((input0.b_mtp_index, input1.b_mtp_index)), len(decode_reqs))
        lengths, accepted = mtp_utils.verify_mtp_tokens(
            backend=self, next_token_ids=ids, b_req_idx=slots, b_req_mtp_start_loc=starts
        )
        proposal = self.decode_draft_engine.propose_next_overlap(
            target_model_input0=input0,
            target_model_output0=output0,
            target_next_token_ids0=ids[: len(reqs0)],
            target_model_input1=input1,
            target_model_output1=output1,
            target_next_token_ids1=ids[len(reqs0) :],
            real_request_num0=half,
            real_request_num1=len(decode_reqs) - half,
            accept_len=lengths,
            draft_step=plan.draft_step,
        )
        mtp_utils.scatter_mtp_next_tokens(
            backend=self,
            proposal=proposal,
            target_next_token_ids=ids,
            b_req_mtp_start_loc=starts,
            b_req_idx=slots,
            mtp_accept_len=lengths,
        )
        finish_step(self, decode_reqs, run_reqs, lengths, accepted, host)
