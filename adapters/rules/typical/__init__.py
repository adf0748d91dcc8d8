"""Typical acceptance: accept what is likely enough for the target's entropy. README.md has the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.policy import Policy
from adapters.rules.common import Accepted, check, check_block, check_live
from adapters.rules.predicate import block_stats, by_argmax, check_relaxed, numbers
from adapters.rules.typical import naive


def accept(
    draft_ids: Tensor,
    target_logits: Tensor,
    policy: Policy,
    inverse_temperature: Tensor | None = None,
    live: Tensor | None = None,
    relaxed: Tensor | None = None,
) -> Accepted:
    """draft_ids [B, K] int64; target_logits [B, K+1, V] float, raw; policy of rule typical; inverse_temperature [B]
    float (None: 1); live [B] int, default K; relaxed [B, K] bool, filled in place. RuleError names a field that does
    not fit.
    """
    B, K, _ = check_block(draft_ids, "target_logits", target_logits)
    live = check_live(live, draft_ids)
    epsilon, alpha = numbers(policy, "typical")
    check_relaxed(relaxed, draft_ids)
    if inverse_temperature is not None:
        check("inverse_temperature", inverse_temperature, (B,), (torch.float32, torch.float64), draft_ids)
    stats = block_stats(draft_ids, target_logits, inverse_temperature)
    passes = naive.passes(stats, inverse_temperature, epsilon, alpha)[:, :K]
    return by_argmax(passes, draft_ids == stats.top[:, :K], stats.top, live, relaxed)
