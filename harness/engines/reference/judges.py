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
LOSSLESS = {"chain": chain.accept, "block": block.accept}
WIDTH = 3  # of a verdict


def groups(policies: Sequence[Policy]) -> dict[Policy, list[int]]:
    """The indices of each policy."""
    found: dict[Policy, list[int]] = {}
    for i, policy in enumerate(policies):
        found.setdefault(policy, []).append(i)
    return found


def take(at: list[int], *tensors: Tensor) -> list[Tensor]:
    """Rows `at` of each; all of them without a copy."""
    return [tensor if len(at) == len(tensor) else tensor[at] for tensor in tensors]


def verdicts(accepted: Accepted, relaxed: Tensor) -> Tensor:
    """accepted of [n], relaxed [n, k] bool -> [n, 3] int64."""
    bits = (relaxed.long() << torch.arange(relaxed.shape[1], device=relaxed.device)).sum(1)
    return torch.stack([accepted.length.long(), accepted.bonus, bits], 1)


def spread(found: list[tuple[list[int], Tensor]], like: Tensor) -> Tensor:
    """Verdicts of some rows each -> [len(like), 3], zeros elsewhere."""
    if len(found) == 1 and len(found[0][0]) == len(like):
        return found[0][1]
    out = torch.zeros(len(like), WIDTH, dtype=torch.int64, device=like.device)
    for at, verdict in found:
        out[at] = verdict
    return out


def greedy(policies: Sequence[Policy], drafts: Tensor, logits: Tensor, thinking: Sequence[bool]) -> Tensor:
    """Rows of GREEDY rules: drafts [n, k], logits [n, k+1, V], thinking: the span is open -> [n, 3]."""
    found = []
    for policy, at in groups(policies).items():
        x, z = take(at, drafts, logits)
        inside = torch.tensor([thinking[i] for i in at], device=drafts.device)
        relaxed = torch.zeros(x.shape, dtype=torch.bool, device=drafts.device)
        found.append((at, verdicts(GREEDY[policy.rule](x, z, policy, inside, relaxed=relaxed), relaxed)))
    return spread(found, drafts)


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
    found = []
    for policy, at in groups(policies).items():
        x, target, draft, z, coin, race = take(at, drafts, p, q, logits, eta, noise)
        relaxed = torch.zeros(x.shape, dtype=torch.bool, device=drafts.device)
        if policy.rule == "typical":
            accepted = typical.accept(x, z, policy, take(at, temperature)[0].reciprocal(), relaxed=relaxed)
        elif policy.rule == "thresholds":
            accepted = thresholds.accept(x, target, policy, coin, race, relaxed=relaxed)
        elif policy.rule == "entropy":
            accepted = entropy.accept(x, target, draft, z, policy, coin, race, relaxed=relaxed)
        else:
            accepted = LOSSLESS[policy.rule](x, target, draft, coin, race)
        found.append((at, verdicts(accepted, relaxed)))
    return spread(found, drafts)
