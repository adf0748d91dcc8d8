"""The front of speed against accuracy, with the noise of both: what is dominated, and what only looks so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.stats.estimate import Estimate

Standing = Literal["front", "within noise", "dominated"]


@dataclass(frozen=True)
class Point:
    """speed, accuracy: more is better, both with intervals (changes against one baseline, in any unit)."""

    name: str
    speed: Estimate
    accuracy: Estimate

    def __post_init__(self) -> None:
        for axis in ("speed", "accuracy"):
            found: Estimate = getattr(self, axis)
            if not all(map(math.isfinite, (found.low, found.value, found.high))):
                raise ValueError(f"{self.name}: {axis}: expected a finite value and interval, found {found}")


@dataclass(frozen=True)
class Place:
    """Where a point stands.

    front: no other point is at least as good in both estimates and better in one. dominated: one is, and in speed or
    accuracy its interval lies wholly above. within noise: one is, but all their intervals overlap: another run may
    turn it around. by: the clearest of the points that dominate it.
    """

    point: Point
    standing: Standing
    by: str | None


def front(points: Sequence[Point]) -> list[Place]:
    """A place per point, in the order of the points. Equal points do not dominate each other."""
    return [_place(point, points) for point in points]


def _place(point: Point, points: Sequence[Point]) -> Place:
    better = [other for other in points if _dominates(other, point)]
    if not better:
        return Place(point, "front", None)
    beyond = [other for other in better if _beyond(other, point)]
    best = max(beyond or better, key=lambda other: (other.accuracy.value, other.speed.value))
    return Place(point, "dominated" if beyond else "within noise", best.name)


def _dominates(left: Point, right: Point) -> bool:
    a, b = (left.speed.value, left.accuracy.value), (right.speed.value, right.accuracy.value)
    return a != b and a[0] >= b[0] and a[1] >= b[1]


def _beyond(left: Point, right: Point) -> bool:
    return left.speed.low > right.speed.high or left.accuracy.low > right.accuracy.high
