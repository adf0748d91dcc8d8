"""Which drafts of a block lie inside a span that one id opens and another closes."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.policy import Policy
from adapters.rules.common import RuleError, check


def inside(draft_ids: Tensor, open_: Tensor, start: int, end: int) -> Tensor:
    """draft_ids [B, K], open_ [B] bool: the span is open before the block -> [B, K] bool, open before draft i.

    The draft that closes the span is still inside, the one that opens it is not.
    """
    K = draft_ids.shape[1]
    position = torch.arange(1, K + 1, device=draft_ids.device)
    marks = (draft_ids == start) | (draft_ids == end)
    last = torch.where(marks, position, 0).cummax(1).values  # 1 + the last mark up to and with draft i; 0: none
    opened = draft_ids.gather(1, (last - 1).clamp(min=0)) == start
    after = torch.where(last > 0, opened, open_[:, None])
    return torch.cat([open_[:, None], after[:, :-1]], 1)


def relaxing(draft_ids: Tensor, policy: Policy, thinking: Tensor | None) -> Tensor | None:
    """[B, K] bool: where the policy relaxes; None: everywhere. thinking [B] bool, needed by a policy with think ids."""
    if policy.think_start is None or policy.think_end is None:
        return None
    if thinking is None:
        raise RuleError("thinking: expected [B] bool for a policy with think_start and think_end, found None")
    check("thinking", thinking, (len(draft_ids),), (torch.bool,), draft_ids)
    return inside(draft_ids, thinking, policy.think_start, policy.think_end)
