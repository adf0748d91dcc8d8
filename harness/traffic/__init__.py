"""Traffic: the prompts of a run, what each answer must be, and where they came from.

`load` gives the measured items and two disjoint sets beside them: warm-up, excluded from every number, and calibration.
Items come in a seeded order, so the first n of them (`limit`) are a random sample and a prefix of every larger one.
"""

from __future__ import annotations

from harness.traffic.base import SEED, SUFFIX, Item, Traffic, TrafficError
from harness.traffic.sources import NAMES, load

__all__ = ["NAMES", "SEED", "SUFFIX", "Item", "Traffic", "TrafficError", "load"]
