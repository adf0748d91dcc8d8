"""Block verification in plain torch: the oracle of the kernels. Works in the wider of float32 and the inputs' dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.rules.common import Accepted, RuleError, pick


def one_hot(draft_ids: Tensor, V: int, dtype: torch.dtype) -> Tensor:
    """The distribution of a draft that was not sampled: all mass on its id, none at all for an id outside V."""
    return (draft_ids[..., None] == torch.arange(V, device=draft_ids.device)).to(dtype)


def at(probs: Tensor, draft_ids: Tensor) -> Tensor:
    """probs [B, >=K, V], draft_ids [B, K] -> probs[b, i, x_i], 0 for an id outside V."""
    K, V = draft_ids.shape[1], probs.shape[2]
    known = (draft_ids >= 0) & (draft_ids < V)
    return probs[:, :K].gather(2, draft_ids.clamp(0, V - 1)[..., None])[..., 0].masked_fill(~known, 0.0)


def check_drafted(q_x: Tensor, live: Tensor) -> None:
    """A drafted token the draft gives no mass is an error: its p/q would be a free accept."""
    bad = ~(q_x > 0) & (torch.arange(q_x.shape[1], device=q_x.device) < live[:, None])
    if bad.any():
        b, i = bad.nonzero()[0].tolist()
        raise RuleError(
            f"draft_probs: expected q > 0 at the drafted token, found {q_x[b, i].item()} (row {b}, draft {i})"
        )


def ratios(p_x: Tensor, q_x: Tensor) -> Tensor:
    """p/q, and 0 where it is not a number: never a free accept."""
    ratio = p_x / q_x
    return torch.where(ratio >= 0, ratio, 0.0)


def excess(p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """max(w p - q, 0) over the vocabulary, NaN counted as no mass. p, q [B, V], w [B]."""
    mass = w[:, None] * p - q
    return torch.where(mass > 0, mass, 0.0)


def thresholds(draft_ids: Tensor, p: Tensor, q: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """w and h, [B, K+1] each: w_0 = 1; h_i the chance that i is good enough to stop at, h_0 = 1 always is."""
    B, K = draft_ids.shape
    ratio = ratios(at(p, draft_ids), at(q, draft_ids))
    w = torch.ones(B, K + 1, dtype=p.dtype, device=p.device)
    h = torch.ones_like(w)
    for i in range(1, K + 1):
        w[:, i] = torch.where(i <= live, (w[:, i - 1] * ratio[:, i - 1]).clamp(max=1.0), 0.0)
        h[:, i] = torch.where(i <= live, w[:, i], 0.0)  # the last: h = w
        if i < K:
            S = excess(p[:, i], q[:, i], w[:, i]).sum(-1)
            inner = torch.where(S > 0, S / (S + 1 - w[:, i]), 0.0)
            h[:, i] = torch.where(i < live, inner, h[:, i])
    return w, h


def correction(p: Tensor, q: Tensor, w: Tensor, full: Tensor) -> Tensor:
    """Unnormalised law of the bonus. p, q [B, V] at the stop row, w [B], full [B] bool: every draft accepted."""
    left = excess(p, q, w)
    return torch.where((full | (left.sum(-1) <= 0))[:, None], p, left)


def race(mass: Tensor, noise: Tensor) -> Tensor:
    """The winner of an exponential race, argmax mass/noise: a draw from mass normalised. mass, noise [B, V] -> [B]."""
    return torch.where(mass > 0, mass / noise, -1.0).argmax(-1)


def widen(probs: Tensor) -> Tensor:
    """float64 stays, everything else works in float32."""
    return probs if probs.dtype == torch.float64 else probs.float()


def accept(
    draft_ids: Tensor, target_probs: Tensor, draft_probs: Tensor | None, eta: Tensor, noise: Tensor, live: Tensor
) -> Accepted:
    """draft_ids [B, K], target_probs [B, K+1, V], draft_probs [B, K, V] or None, eta [B, K], noise [B, V], live [B]."""
    K, V = draft_ids.shape[1], target_probs.shape[2]
    p = widen(target_probs)
    if draft_probs is None:
        q = one_hot(draft_ids, V, p.dtype)
    else:
        q = widen(draft_probs).to(p.dtype)
        check_drafted(at(q, draft_ids), live)
    w, h = thresholds(draft_ids, p, q, live)
    good = (eta <= h[:, 1:]) & (h[:, 1:] > 0)
    index = torch.arange(1, K + 1, device=good.device)
    tau = (good * index).amax(1).to(torch.int32)
    left = correction(pick(p, tau), pick(q, tau.clamp(max=K - 1)), pick(w, tau), tau == live)
    return Accepted(tau, race(left, noise))
