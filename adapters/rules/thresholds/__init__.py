"""SGLang's thresholds: token rejection that a likely enough draft does not need. README.md has the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.policy import Policy
from adapters.rules.common import Accepted
from adapters.rules.predicate import by_residual, check_relaxed, drafted, numbers
from adapters.rules.sampling import prepare
from adapters.rules.thresholds import naive


def accept(
    draft_ids: Tensor,
    target_probs: Tensor,
    policy: Policy,
    eta: Tensor | None = None,
    noise: Tensor | None = None,
    live: Tensor | None = None,
    generator: torch.Generator | None = None,
    relaxed: Tensor | None = None,
) -> Accepted:
    """draft_ids [B, K] int64; target_probs [B, K+1, V] after temperature, top-k, top-p; policy of rule thresholds.

    eta [B, K] uniforms and noise [B, V] Exp(1) are drawn from `generator` where not given; live [B] int; relaxed [B, K]
    bool, filled in place. RuleError names a field that does not fit.
    """
    eta, noise, live = prepare(draft_ids, target_probs, None, eta, noise, live, generator)
    single, acc = numbers(policy, "thresholds")
    check_relaxed(relaxed, draft_ids)
    p = drafted(target_probs, draft_ids)
    passes = naive.passes(p, eta, single, acc)
    return by_residual(passes, naive.passes(p, eta, 1.0, 1.0), draft_ids, target_probs, None, noise, live, relaxed)
