"""The predicate of relaxed acceptance by top-N and probability ratio."""

from __future__ import annotations

import math

from torch import Tensor

from adapters.rules.rowstats import RowStats


def passes(stats: RowStats, top_n: int, ratio: float) -> Tensor:
    """stats of any shape -> bool of that shape: near enough to the argmax, which itself is not asked."""
    return (stats.rank < top_n) & (stats.peak - stats.z <= -math.log(ratio))
