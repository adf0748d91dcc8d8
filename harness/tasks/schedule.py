"""Which arm answers which items when, where requests share steps: short blocks, the baseline on both sides of each arm.

Items fall into chunks. Of a chunk every arm answers all items: baseline, candidate, baseline, next candidate, baseline.
The candidates rotate from chunk to chunk. A chunk must keep the requests in flight, and its end, where they run dry,
must be short beside it: four times the concurrency unless the task says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.tasks.arms import Plan

TIMES = 4  # items of a chunk, times the concurrency


@dataclass(frozen=True)
class Block:
    """number: place in the schedule. jobs: (order, item) of its chunk."""

    number: int
    arm: Plan
    jobs: list[tuple[int, Any]]


def chunks(items: Sequence[Any], size: int) -> list[list[tuple[int, Any]]]:
    """(order, item) in chunks of at least `size`, as equal as they get; fewer items make one chunk."""
    count = max(1, len(items) // size)
    edges = [len(items) * place // count for place in range(count + 1)]
    jobs = list(enumerate(items))
    return [jobs[low:high] for low, high in pairwise(edges)]


def blocks(arms: Sequence[Plan], items: Sequence[Any], size: int) -> list[Block]:
    """The whole schedule; the first arm is the baseline."""
    baseline, *candidates = arms
    found: list[Block] = []
    for turn, jobs in enumerate(chunks(items, size)):
        first = turn % len(candidates)
        order = [baseline]
        for candidate in (*candidates[first:], *candidates[:first]):
            order += [candidate, baseline]
        found += [Block(len(found) + place, arm, jobs) for place, arm in enumerate(order)]
    return found


def answers(arms: Sequence[Plan], items: int) -> dict[str, int]:
    """How many answers each arm gives in that schedule."""
    return {arm.name: items * (len(arms) if place == 0 else 1) for place, arm in enumerate(arms)}
