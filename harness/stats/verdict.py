"""pass, fail or inconclusive: an interval against a margin, several comparisons together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from harness.stats.estimate import CONFIDENCE, Estimate

Verdict = Literal["pass", "fail", "inconclusive"]
EXIT_STATUS: dict[Verdict, int] = {"pass": 0, "fail": 1, "inconclusive": 2}


def verdict(estimate: Estimate, *, at_least: float = -math.inf, at_most: float = math.inf) -> Verdict:
    """pass: the whole interval lies in [at_least, at_most]. fail: all of it lies outside. Else, or without a
    measurement, inconclusive. A margin is a claim ("at most 1 pp worse"), so there is no verdict without one."""
    if at_least == -math.inf and at_most == math.inf:
        raise ValueError("verdict: expected at_least or at_most, found neither")
    if at_least > at_most:
        raise ValueError(f"verdict: expected at_least <= at_most, found {at_least} > {at_most}")
    if estimate.n == 0 or math.isnan(estimate.value):
        return "inconclusive"
    if at_least <= estimate.low and estimate.high <= at_most:
        return "pass"
    if estimate.high < at_least or estimate.low > at_most:
        return "fail"
    return "inconclusive"


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """One failure fails; one open question, or nothing at all, is inconclusive."""
    found = set(verdicts)
    if "fail" in found:
        return "fail"
    return "pass" if found == {"pass"} else "inconclusive"


def step_down(
    claims: Sequence[tuple[Callable[[float], Estimate], float, float]], alpha: float = 1 - CONFIDENCE
) -> list[tuple[Verdict, Estimate]]:
    """Verdicts of several comparisons at once, at level alpha together (Holm's step-down, by intervals).

    claims: (interval at a confidence, at_least, at_most). Of k open ones each is looked at with confidence
    1 - alpha / k; those it decides are done, and the rest are looked at again, until none is decided. The same as
    `holm` where the interval is the set of values that a test at that level does not reject.
    """
    found: dict[int, tuple[Verdict, Estimate]] = {}
    while len(found) < len(claims):
        level = 1 - alpha / (len(claims) - len(found))
        looked = {
            place: (verdict(estimate := interval(level), at_least=low, at_most=high), estimate)
            for place, (interval, low, high) in enumerate(claims)
            if place not in found
        }
        done = {place: seen for place, seen in looked.items() if seen[0] != "inconclusive"}
        found |= done or looked
    return [found[place] for place in range(len(claims))]


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Step-down adjusted p values (Holm, 1979), in the order given; all below alpha hold as a family."""
    for p in p_values:
        if not 0 <= p <= 1:
            raise ValueError(f"p: expected a probability, found {p}")
    adjusted = [0.0] * len(p_values)
    worst = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = worst
    return tuple(adjusted)
