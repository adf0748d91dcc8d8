"""The predicate of SGLang's thresholds."""

from __future__ import annotations

from torch import Tensor

FLOOR = 1e-9  # of threshold_acc, SGLang's own


def passes(p: Tensor, eta: Tensor, single: float, acc: float) -> Tensor:
    """p [B, K] of the drafts, eta [B, K] uniforms -> [B, K] bool."""
    return ((p > 0) & (eta <= p / max(acc, FLOOR))) | (p >= single)
