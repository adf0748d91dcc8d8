"""The predicate of relaxed acceptance by top-N and probability gap."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.rules.rowstats import RowStats


def passes(stats: RowStats, top_n: int, delta: float) -> Tensor:
    """stats of any shape, at temperature 1 -> bool of that shape: near enough to the argmax (which is not asked)."""
    p, best = torch.exp(stats.z - stats.lse), torch.exp(stats.peak - stats.lse)
    return (stats.rank < top_n) & (p >= best - delta)
