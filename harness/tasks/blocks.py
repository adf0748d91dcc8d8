"""Times of requests that share steps, as a pure function of rows: those of whole blocks, never of one request.

A block's wall runs from its first request to its last answer. A candidate's block lies between two of the baseline on
the same items: its gain is over the midpoint of the two, and where those differ by too much the machine has moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness import stats
from harness.records.schema import Row


@dataclass(frozen=True)
class Timed:
    """One block. broken: a request in it failed, so its work is not that of its neighbours."""

    number: int
    arm: str
    items: frozenset[str]
    tokens: int
    wall_s: float
    broken: bool

    @property
    def tps(self) -> float:
        return self.tokens / self.wall_s


def in_blocks(rows: Sequence[Row]) -> bool:
    return any(row.block is not None for row in rows)


def timed(rows: Sequence[Row]) -> list[Timed]:
    """Blocks in the order they were run."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        if row.block is not None:
            found.setdefault(row.block, []).append(row)
    return [_timed(number, found[number]) for number in sorted(found)]


def _timed(number: int, rows: Sequence[Row]) -> Timed:
    start, end = min(row.started_s for row in rows), max(row.started_s + row.wall_s for row in rows)
    tokens, items = sum(len(row.output_ids) for row in rows), frozenset(row.item for row in rows)
    broken = len(items) != len(rows) or any(row.error for row in rows) or not tokens or not end > start
    return Timed(number, rows[0].arm, items, tokens, end - start, broken)


def triplets(blocks: Sequence[Timed], baseline: str, arm: str) -> list[tuple[Timed, Timed, Timed]]:
    """The blocks of an arm, each with the baseline's before and after it; left out where one of the three is missing,
    broken, or of other items."""
    found: Mapping[int, Timed] = {block.number: block for block in blocks}
    sides = [(found.get(block.number - 1), block, found.get(block.number + 1)) for block in blocks if block.arm == arm]
    return [
        (pre, block, post)
        for pre, block, post in sides
        if pre is not None
        and post is not None
        and (pre.arm, post.arm) == (baseline, baseline)
        and pre.items == block.items == post.items
        and not (pre.broken or block.broken or post.broken)
    ]


def gain(
    found: Sequence[tuple[Timed, Timed, Timed]], max_drift: float, confidence: float = stats.CONFIDENCE
) -> stats.TripletGain:
    """Of tokens/s."""
    rates = [(pre.tps, block.tps, post.tps) for pre, block, post in found]
    return stats.triplet_gain(rates, max_drift=max_drift, confidence=confidence)


def wall_change(found: Sequence[tuple[Timed, Timed, Timed]], kept: stats.TripletGain) -> stats.Estimate:
    """Of the seconds for the same items, over the triplets that the gain is of."""
    walls = [
        block.wall_s / ((pre.wall_s + post.wall_s) / 2) - 1
        for place, (pre, block, post) in enumerate(found)
        if place not in kept.rejected
    ]
    return stats.mean(walls)


def rate(blocks: Sequence[Timed], arm: str, share: float = 1.0) -> stats.Estimate:
    """Tokens over wall of an arm's blocks; share: what the wall is multiplied by."""
    own = [block for block in blocks if block.arm == arm]
    return stats.ratio([block.tokens for block in own], [block.wall_s * share for block in own])


def wall(blocks: Sequence[Timed], arm: str) -> float:
    return math.fsum(block.wall_s for block in blocks if block.arm == arm)
