import torch


def mtp_verify(req_to_next_token_ids, b_req_mtp_start_loc, new_next_token_ids, b_req_idx):
    rows = b_req_idx.shape[0]
    starts = b_req_mtp_start_loc.tolist()
    lengths, accepted = [], torch.zeros(rows, dtype=torch.int32)
    for start, end in zip(starts, [*starts[1:], rows], strict=True):
        drafts = req_to_next_token_ids[int(b_req_idx[start]), 1 : end - start]
        same = (drafts == new_next_token_ids[start : end - 1]).int()
        length = int(same.cumprod(0).sum()) + 1
        accepted[start : start + length] = 1
        lengths.append(length)
    return torch.tensor(lengths, dtype=torch.int32), accepted


def mtp_scatter_next_token_ids(
    req_to_next_token_ids, b_req_mtp_start_loc, target_next_token_ids, draft_token_ids, b_req_idx, mtp_accept_len
):
    step = draft_token_ids.shape[1]
    for n, (start, length) in enumerate(zip(b_req_mtp_start_loc.tolist(), mtp_accept_len.tolist(), strict=True)):
        row = req_to_next_token_ids[int(b_req_idx[start])]
        row.fill_(1)
        row[0] = target_next_token_ids[start + length - 1]
        row[1 : 1 + step] = draft_token_ids[n]


def gen_b_req_mtp_start_loc(b_mtp_index, num_reqs):
    starts = torch.nonzero(b_mtp_index == 0).view(-1).int()
    assert len(starts) == num_reqs
    return starts
