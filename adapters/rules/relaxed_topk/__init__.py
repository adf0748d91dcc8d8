"""Relaxed acceptance: among the top N and within delta of the likeliest. README.md has the formula."""

from __future__ import annotations

from torch import Tensor

from adapters.policy import Policy
from adapters.rules.common import Accepted, check_block, check_live
from adapters.rules.predicate import block_stats, by_argmax, check_relaxed, numbers, relaxing
from adapters.rules.relaxed_topk import naive


def accept(
    draft_ids: Tensor,
    target_logits: Tensor,
    policy: Policy,
    thinking: Tensor | None = None,
    live: Tensor | None = None,
    relaxed: Tensor | None = None,
) -> Accepted:
    """draft_ids [B, K] int64; target_logits [B, K+1, V] float, raw; policy of rule relaxed-topk; thinking [B] bool:
    the span is open before the block, for a policy with think ids; live [B] int, default K; relaxed [B, K] bool, filled
    in place. RuleError names a field that does not fit.
    """
    _, K, _ = check_block(draft_ids, "target_logits", target_logits)
    live = check_live(live, draft_ids)
    top_n, delta, *_ = numbers(policy, "relaxed-topk")
    check_relaxed(relaxed, draft_ids)
    span = relaxing(draft_ids, policy, thinking)
    stats = block_stats(draft_ids, target_logits)
    near, matched = naive.passes(stats, top_n, delta)[:, :K], draft_ids == stats.top[:, :K]
    return by_argmax(matched | (near if span is None else near & span), matched, stats.top, live, relaxed)
