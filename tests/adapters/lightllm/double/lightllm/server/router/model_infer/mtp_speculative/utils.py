from collections import Counter

from lightllm.common.basemodel.triton_kernel.mtp_utils import mtp_scatter_next_token_ids, mtp_verify


def verify_mtp_tokens(backend, next_token_ids, b_req_idx, b_req_mtp_start_loc, b_mtp_index=None):
    return mtp_verify(
        req_to_next_token_ids=backend.model.req_manager.req_sampling_params_manager.req_to_next_token_ids,
        b_req_mtp_start_loc=b_req_mtp_start_loc,
        new_next_token_ids=next_token_ids,
        b_req_idx=b_req_idx,
    )


def scatter_mtp_next_tokens(backend, proposal, target_next_token_ids, b_req_mtp_start_loc, b_req_idx, mtp_accept_len):
    mtp_scatter_next_token_ids(
        backend.model.req_manager.req_sampling_params_manager.req_to_next_token_ids,
        b_req_mtp_start_loc,
        target_next_token_ids,
        proposal.token_ids,
        b_req_idx,
        mtp_accept_len,
    )


def record_request_mtp_metrics(backend, decode_reqs, accept_lengths_cpu, verify_run_reqs):
    rows = Counter(req.req_idx for req in verify_run_reqs)
    for req, accepted in zip(decode_reqs, accept_lengths_cpu.tolist(), strict=True):
        req.update_mtp_accepted_token_num(accepted - 1)
        req.update_mtp_verify_token_num(rows[req.req_idx])
        req.update_mtp_verify_step_num(1)
