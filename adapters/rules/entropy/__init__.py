"""Entropy verification: the coin is lowered where the target is uncertain. README.md has the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.policy import Policy
from adapters.rules.block.naive import check_drafted
from adapters.rules.common import FLOATS, Accepted, check
from adapters.rules.entropy import naive
from adapters.rules.predicate import block_stats, by_residual, check_relaxed, drafted, numbers
from adapters.rules.sampling import fault, prepare


def accept(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    policy: Policy,
    eta: Tensor | None = None,
    noise: Tensor | None = None,
    live: Tensor | None = None,
    generator: torch.Generator | None = None,
    relaxed: Tensor | None = None,
) -> Accepted:
    """draft_ids [B, K] int64; target_probs [B, K+1, V] after temperature, top-k, top-p; draft_probs [B, K, V] or None,
    one-hot; target_logits [B, K+1, V] raw, of which the entropy is; policy of rule entropy.

    eta [B, K] uniforms and noise [B, V] Exp(1) are drawn from `generator` where not given; live [B] int; relaxed [B, K]
    bool, filled in place. RuleError names a field that does not fit.
    """
    eta, noise, live = prepare(draft_ids, target_probs, draft_probs, eta, noise, live, generator)
    check("target_logits", target_logits, tuple(target_probs.shape), FLOATS, draft_ids)
    alpha, tau = numbers(policy, "entropy")
    check_relaxed(relaxed, draft_ids)
    p = drafted(target_probs, draft_ids)
    q = torch.ones_like(p) if draft_probs is None else drafted(draft_probs, draft_ids).to(p.dtype)
    if q.is_cuda:
        undrafted = ~(q > 0) & (torch.arange(q.shape[1], device=q.device) < live[:, None])
        fault(q.device).bitwise_or_(undrafted.any().int())
    else:
        check_drafted(q, live)
    ratio = naive.ratios(p, q)
    H = block_stats(draft_ids, target_logits).entropy[:, : p.shape[1]]
    passes = naive.passes(ratio, eta, H, alpha, tau)
    lossless = (eta <= ratio) & (ratio > 0)
    return by_residual(passes, lossless, draft_ids, target_probs, draft_probs, noise, live, relaxed)
