"""The acceptance of one step by the rules that are decided on tensors; strict and asd are decided on the host.

A verdict is a row [length, bonus, relaxed]: accepted drafts, the token after them, and bit i set where draft i was
accepted and the strict or lossless form of the rule would not have (adapters/rules/predicate).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.policy import Policy
from adapters.rules import block, chain, entropy, relaxed_ratio, relaxed_topk, thresholds, typical
from adapters.rules.common import Accepted

GREEDY = {"relaxed-topk": relaxed_topk.accept, "relaxed-ratio": relaxed_ratio.accept}
WIDTH = 3  # of a verdict


def groups(policies: Sequence[Policy]) -> dict[Policy, list[int]]:
    """The indices of each policy."""
    found: dict[Policy, list[int]] = {}
    for i, policy in enumerate(policies):
        found.setdefault(policy, []).append(i)
    return found


def verdicts(accepted: Accepted, relaxed: Tensor) -> Tensor:
    """accepted of [n], relaxed [n, k] bool -> [n, 3] int64."""
    bits = (relaxed.long() << torch.arange(relaxed.shape[1], device=relaxed.device)).sum(1)
    return torch.stack([accepted.length.long(), accepted.bonus, bits], 1)


def greedy(policies: Sequence[Policy], drafts: Tensor, logits: Tensor, thinking: Sequence[bool]) -> Tensor:
    """Rows of GREEDY rules: drafts [n, k], logits [n, k+1, V], thinking: the span is open -> [n, 3]."""
    out = torch.zeros(len(drafts), WIDTH, dtype=torch.int64, device=drafts.device)
    for policy, at in groups(policies).items():
        inside = torch.tensor([thinking[i] for i in at], device=drafts.device)
        relaxed = torch.zeros(len(at), drafts.shape[1], dtype=torch.bool, device=drafts.device)
        accepted = GREEDY[policy.rule](drafts[at], logits[at], policy, inside, relaxed=relaxed)
        out[at] = verdicts(accepted, relaxed)
    return out


def sampled(
    policies: Sequence[Policy],
    drafts: Tensor,
    p: Tensor,
    q: Tensor,
    logits: Tensor,
    temperature: Tensor,
    eta: Tensor,
    noise: Tensor,
) -> Tensor:
    """Rows of sampled rules: drafts, eta [n, k], p [n, k+1, V] after top-k and top-p, q [n, k, V], raw logits
    [n, k+1, V], temperature [n], noise [n, V] -> [n, 3].
    """
    out = torch.zeros(len(drafts), WIDTH, dtype=torch.int64, device=drafts.device)
    for policy, at in groups(policies).items():
        x, coin, race = drafts[at], eta[at], noise[at]
        relaxed = torch.zeros(x.shape, dtype=torch.bool, device=drafts.device)
        if policy.rule == "typical":
            accepted = typical.accept(x, logits[at], policy, temperature[at].reciprocal(), relaxed=relaxed)
        elif policy.rule == "thresholds":
            accepted = thresholds.accept(x, p[at], policy, coin, race, relaxed=relaxed)
        elif policy.rule == "entropy":
            accepted = entropy.accept(x, p[at], q[at], logits[at], policy, coin, race, relaxed=relaxed)
        else:
            rule = {"chain": chain, "block": block}[policy.rule]
            accepted = rule.accept(x, p[at], q[at], eta=coin, noise=race)
        out[at] = verdicts(accepted, relaxed)
    return out
