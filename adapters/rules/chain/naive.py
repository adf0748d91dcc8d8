"""Token rejection in plain torch: the oracle of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.rules.block.naive import at, check_drafted, correction, one_hot, race, ratios, widen
from adapters.rules.common import Accepted, pick, prefix_length


def accept(
    draft_ids: Tensor, target_probs: Tensor, draft_probs: Tensor | None, eta: Tensor, noise: Tensor, live: Tensor
) -> Accepted:
    """draft_ids [B, K], target_probs [B, K+1, V], draft_probs [B, K, V] or None, eta [B, K], noise [B, V], live [B]."""
    K, V = draft_ids.shape[1], target_probs.shape[2]
    p = widen(target_probs)
    if draft_probs is None:
        q = one_hot(draft_ids, V, p.dtype)
        p_over_q = at(p, draft_ids)
    else:
        q = widen(draft_probs).to(p.dtype)
        check_drafted(at(q, draft_ids), live)
        p_over_q = ratios(at(p, draft_ids), at(q, draft_ids))
    h = p_over_q.clamp(max=1.0)
    row = torch.arange(K, device=h.device)
    length = prefix_length((eta <= h) & (h > 0) & (row < live[:, None]))
    one = torch.ones(len(h), dtype=p.dtype, device=p.device)
    left = correction(pick(p, length), pick(q, length.clamp(max=K - 1)), one, length == live)
    return Accepted(length, race(left, noise))
