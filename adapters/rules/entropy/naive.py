"""The predicate of entropy verification."""

from __future__ import annotations

import torch
from torch import Tensor


def passes(ratio: Tensor, eta: Tensor, entropy: Tensor, alpha: float, tau: float) -> Tensor:
    """ratio p/q, eta uniforms, entropy in nats, [B, K] each -> [B, K] bool."""
    return (ratio > 0) & (eta * torch.exp(-alpha * entropy).clamp(max=tau) <= ratio)


def ratios(p: Tensor, q: Tensor) -> Tensor:
    """p/q of the drafts, 0 where q is 0 or something is no number: never a free accept."""
    return torch.where((q > 0) & (p > 0), p / q, 0.0)
