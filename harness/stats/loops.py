"""Repetition loops: the output that makes a lenient policy look fast.

A model stuck in a loop is easy to draft for, so its tokens per step rise while its answer is worthless. The detector
reads token ids and looks for one thing, a stretch that repeats itself back to back; a text that merely reuses words,
counts up or tabulates does not do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.stats.accuracy import wilson
from harness.stats.estimate import CONFIDENCE, Estimate

MIN_TOKENS = 32
MIN_REPEATS = 4
MAX_PERIOD = 128


@dataclass(frozen=True)
class Loop:
    """ids[start : start + length] repeats its first `period` ids."""

    period: int
    start: int
    length: int


def find_loop(
    ids: Sequence[int], *, min_tokens: int = MIN_TOKENS, min_repeats: int = MIN_REPEATS, max_period: int = MAX_PERIOD
) -> Loop | None:
    """The longest loop of at least min_tokens ids and min_repeats full periods, at its shortest period; else None."""
    array = np.asarray(ids, dtype=np.int64)
    best: Loop | None = None
    for period in range(1, min(max_period, len(array) // min_repeats) + 1):
        equal = array[period:] == array[:-period]
        least = max(min_tokens, min_repeats * period)
        if np.count_nonzero(equal) < least - period:  # nearly always: not even all of them make a run
            continue
        start, length = _longest_run(equal)
        length += period
        if length >= least and (best is None or length > best.length + period):
            best = Loop(period, start, length)
    return best


def _longest_run(flags: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    if len(edges) == 0:
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


def loop_share(outputs: Sequence[Sequence[int]], confidence: float = CONFIDENCE) -> Estimate:
    """Share of outputs (token ids) that contain a loop."""
    return wilson(sum(find_loop(ids) is not None for ids in outputs), len(outputs), confidence)
