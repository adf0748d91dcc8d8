"""The predicate of typical acceptance."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.rules.rowstats import RowStats


def passes(stats: RowStats, inverse_temperature: Tensor | None, epsilon: float, alpha: float) -> Tensor:
    """stats [B, R] of z / T; inverse_temperature [B] or None (= 1) -> [B, R] bool."""
    z = stats.z if inverse_temperature is None else stats.z * inverse_temperature[:, None].to(stats.z.dtype)
    p = torch.exp(z - stats.lse)
    return p > (alpha * torch.exp(-stats.entropy)).clamp(max=epsilon)
