"""ASD for one block on the host, in float32 to the bit: for an engine whose step is too short for tensor calls.

The same rule as naive.py, which is its oracle. A sum of two float32 numbers rounded to float32 is exact through float64
(53 >= 2 * 24 + 2 bits), so Python floats that are float32 values stand for the ledger.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from adapters.rules.asd.config import NO_CAP, AsdConfig
from adapters.rules.asd.report import BUDGET, CAP, FULL, GATE, INVALID

_FLOAT = struct.Struct("f")


def float32(x: float) -> float:
    """The float32 nearest to x, as a Python float; infinity where x is out of range."""
    try:
        return _FLOAT.unpack(_FLOAT.pack(x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


class Walked(NamedTuple):
    """length: drafts committed. charge: regret charged at each of them, 0 where matched. stop: see Report."""

    length: int
    relaxed: int
    charge: list[float]
    stop: int


@lru_cache(maxsize=1024)
def limits(config: AsdConfig, live: int) -> tuple[float, int, tuple[float, ...]]:
    """budget, cap and g * q_i of every position, each as the float32 the oracle compares with."""
    gate = float32(config.gate)
    values = [float32(live - i) for i in range(live)]
    if config.suffix_value == "normalized":
        values = [float32(value / live) for value in values]
    cap = NO_CAP if config.max_mismatches is None else config.max_mismatches
    return float32(config.budget), cap, tuple(float32(gate * value) for value in values)


def walk(matched: Sequence[int | bool], regrets: Sequence[float], spent: float, config: AsdConfig, live: int) -> Walked:
    """matched[i]: draft i is the target's argmax. regrets[i]: a float32 value, NaN where undefined. spent: before."""
    budget, cap, gates = limits(config, live)
    relaxed, charge = 0, []
    for i in range(live):
        if matched[i]:
            charge.append(0.0)
            continue
        r = regrets[i]
        after = float32(spent + r)
        if not 0 <= r < math.inf:
            return Walked(i, relaxed, charge, INVALID)
        if not (spent < budget and after <= budget):
            return Walked(i, relaxed, charge, BUDGET)
        if not r <= gates[i]:
            return Walked(i, relaxed, charge, GATE)
        if relaxed + 1 > cap:
            return Walked(i, relaxed, charge, CAP)
        spent, relaxed = after, relaxed + 1
        charge.append(r)
    return Walked(live, relaxed, charge, FULL)


def settle(spent: float, charge: Sequence[float]) -> float:
    """The ledger after these charges, added in order."""
    for r in charge:
        spent = float32(spent + r)
    return spent
