"""The walks of rules that judge every draft by itself. README.md has the table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapters.policy import FIELDS, Policy
from adapters.rules import rowstats
from adapters.rules.block.naive import at, correction, race, widen
from adapters.rules.common import Accepted, RuleError, check, check_in_place, pick, prefix_length
from adapters.rules.rowstats import RowStats


def numbers(policy: Policy, rule: str) -> tuple[Any, ...]:
    """The fields of a policy that must be of this rule, in the order of adapters.policy.FIELDS."""
    if not isinstance(policy, Policy) or policy.rule != rule:
        raise RuleError(f"policy: expected a Policy of rule {rule}, found {getattr(policy, 'rule', policy)!r}")
    return tuple(getattr(policy, name) for name in FIELDS[rule])


def check_relaxed(relaxed: Tensor | None, draft_ids: Tensor) -> None:
    """relaxed [B, K] bool is written; None: not wanted."""
    if relaxed is not None:
        check("relaxed", relaxed, tuple(draft_ids.shape), (torch.bool,), draft_ids)
        check_in_place("relaxed", relaxed)


def block_stats(draft_ids: Tensor, logits: Tensor, inverse_temperature: Tensor | None = None) -> RowStats:
    """draft_ids [B, K], logits [B, K+1, V], inverse_temperature [B] -> RowStats of [B, K+1]; the last row has no id."""
    scale = None if inverse_temperature is None else inverse_temperature[:, None].expand(logits.shape[:2])
    return rowstats.measure(logits, F.pad(draft_ids, (0, 1), value=-1), scale)


def length_of(passes: Tensor, live: Tensor) -> Tensor:
    """passes [B, K] bool, live [B] -> [B] int32, the longest passing prefix of the live drafts."""
    return prefix_length(passes & (torch.arange(passes.shape[1], device=passes.device) < live[:, None]))


def mark(relaxed: Tensor | None, length: Tensor, lossless: Tensor) -> None:
    """relaxed [B, K]: committed, and not by the lossless form. lossless [B, K] bool: what that form accepts."""
    if relaxed is not None:
        position = torch.arange(lossless.shape[1], device=lossless.device)
        relaxed.copy_((position < length[:, None]) & ~lossless)


def by_argmax(passes: Tensor, matched: Tensor, top: Tensor, live: Tensor, relaxed: Tensor | None) -> Accepted:
    """passes, matched [B, K] bool (matched: the draft is the argmax); top [B, K+1] int; live [B]; relaxed [B, K]."""
    length = length_of(passes, live)
    mark(relaxed, length, matched)
    return Accepted(length, pick(top, length).long())


def by_residual(
    passes: Tensor,
    lossless: Tensor,
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    noise: Tensor,
    live: Tensor,
    relaxed: Tensor | None,
) -> Accepted:
    """passes, lossless [B, K] bool; target_probs [B, K+1, V]; draft_probs [B, K, V] or None, one-hot; noise [B, V]."""
    K = draft_ids.shape[1]
    live = live.clamp(0, K)  # checked on the CPU already; a check on the GPU would wait for it
    length = length_of(passes, live)
    mark(relaxed, length, lossless)
    p, row = widen(pick(target_probs, length)), length.clamp(max=K - 1)
    if draft_probs is None:
        x = pick(draft_ids, row)
        q = (x[:, None] == torch.arange(p.shape[1], device=p.device)).to(p.dtype)
    else:
        q = widen(pick(draft_probs, row)).to(p.dtype)
    one = torch.ones(len(p), dtype=p.dtype, device=p.device)
    return Accepted(length, race(correction(p, q, one, length == live), noise))


def drafted(probs: Tensor, draft_ids: Tensor) -> Tensor:
    """probs [B, >= K, V] -> [B, K], the drafts' own in float32 or float64, 0 for an id outside V."""
    return widen(at(probs, draft_ids))
