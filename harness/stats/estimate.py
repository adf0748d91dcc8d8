"""What every statistic returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

CONFIDENCE = 0.95
SEED = 980406


@dataclass(frozen=True)
class Estimate:
    """A value with its two-sided interval.

    value, low, high: in the unit the function names; changes are fractions (0.05 = +5 %).
    n: the independent units behind the interval (items, triplets), 0 where nothing was compared.
    method: how the interval was made, in words that go into a table's foot-note.
    Nothing measured is value = nan inside (-inf, inf): such an estimate can neither pass nor fail.
    """

    value: float
    low: float
    high: float
    n: int
    method: str


def unknown(method: str, n: int = 0, value: float = math.nan) -> Estimate:
    """An estimate without an interval: too few units, or a ratio over zero."""
    return Estimate(value, -math.inf, math.inf, n, method)
