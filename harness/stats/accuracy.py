"""Rates and paired accuracy.

Two arms answer the same items, so only items whose correctness flips carry information about the change: `lost` (the
baseline right, the candidate wrong) and `gained` (the reverse). Interval: Tango's score interval, which holds its level
at the few flips of a near-identical pair, where a Wald interval collapses. Test: exact McNemar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtr, betaincinv, ndtri, stdtrit

from harness.stats.estimate import CONFIDENCE, Estimate, unknown


def _counts(**named: int) -> None:
    for name, value in named.items():
        if isinstance(value, bool) or int(value) != value or value < 0:
            raise ValueError(f"{name}: expected an integer >= 0, found {value!r}")


def _z(confidence: float) -> float:
    return float(ndtri((1 + confidence) / 2))


def wilson(count: int, n: int, confidence: float = CONFIDENCE) -> Estimate:
    """Share count / n with Wilson's score interval (1927)."""
    _counts(count=count, n=n)
    if count > n:
        raise ValueError(f"count: expected at most n = {n}, found {count}")
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0, "Wilson score interval")
    z2 = _z(confidence) ** 2
    p = count / n
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    low = 0.0 if count == 0 else max(0.0, centre - half)
    high = 1.0 if count == n else min(1.0, centre + half)
    return Estimate(p, low, high, n, "Wilson score interval")


def mismatch_bound(mismatches: int, n: int, confidence: float = CONFIDENCE) -> float:
    """One-sided upper bound on a mismatch rate after `mismatches` of `n` (Clopper and Pearson, 1934).

    Without a mismatch it is 1 - (1 - confidence)^(1/n): what an identity gate that found none can claim. n = 0: 1.
    """
    _counts(mismatches=mismatches, n=n)
    if mismatches > n:
        raise ValueError(f"mismatches: expected at most n = {n}, found {mismatches}")
    return 1.0 if mismatches == n else float(betaincinv(mismatches + 1, n - mismatches, confidence))


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p of `lost` against `gained` flips being a fair coin (McNemar, 1947); 1 without flips."""
    _counts(lost=lost, gained=gained)
    return min(1.0, 2 * float(bdtr(min(lost, gained), lost + gained, 0.5)))


def tango(lost: int, gained: int, n: int, confidence: float = CONFIDENCE) -> Estimate:
    """Change of a paired proportion, (gained - lost) / n, with Tango's score interval (Stat. Med. 17:891, 1998)."""
    _counts(lost=lost, gained=gained, n=n)
    if lost + gained > n:
        raise ValueError(f"lost + gained: expected at most n = {n}, found {lost + gained}")
    method = "Tango score interval"
    if n == 0:
        return Estimate(math.nan, -1.0, 1.0, 0, method)
    z = _z(confidence)
    value = (gained - lost) / n
    # The statistic falls as the hypothesised change grows: each end is where it crosses +z or -z.
    low = -1.0 if value == -1 else _root(lambda d: _score(lost, gained, n, d) - z, -1.0, value)
    high = 1.0 if value == 1 else _root(lambda d: _score(lost, gained, n, d) + z, value, 1.0)
    return Estimate(value, low, high, n, method)


def _score(lost: int, gained: int, n: int, delta: float) -> float:
    """Tango's statistic at the change `delta`, the nuisance rate at its constrained maximum likelihood."""
    a = 2 * n
    b = -lost - gained + (2 * n - gained + lost) * delta
    c = -lost * delta * (1 - delta)
    rate = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = n * (2 * rate + delta * (1 - delta))
    distance = gained - lost - n * delta
    if variance <= 0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Bisection to the last bits of a function that is >= 0 at low and <= 0 at high."""
    for _ in range(100):
        middle = (low + high) / 2
        if falling(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def smallest_detectable_change(n: int, discordant: float, *, power: float = 0.8, alpha: float = 0.05) -> float | None:
    """|change| that a two-sided paired test at level alpha finds with the given power; None where it cannot.

    n items, of which the share `discordant` flips. Solves n = (z_a sqrt(d) + z_b sqrt(d - D^2))^2 / D^2 for D, which
    with D = sqrt(d) sin(t) is a phase-shifted sine. D cannot exceed d: that would need more flips than there are.
    """
    _counts(n=n)
    if not 0 <= discordant <= 1:
        raise ValueError(f"discordant: expected a share in [0, 1], found {discordant}")
    z_alpha, z_beta = float(ndtri(1 - alpha / 2)), float(ndtri(power))
    reach = math.hypot(math.sqrt(n), z_beta)
    if n == 0 or discordant == 0 or z_alpha > reach:
        return None
    angle = math.atan2(z_beta, math.sqrt(n)) + math.asin(z_alpha / reach)
    change = math.sqrt(discordant) * math.sin(angle)
    return change if angle <= math.pi / 2 and change <= discordant else None


def items_for_margin(margin: float, discordant: float, *, power: float = 0.8, alpha: float = 0.05) -> int:
    """Items that a one-sided non-inferiority claim at `margin` needs when the true change is 0."""
    if margin <= 0:
        raise ValueError(f"margin: expected a share > 0, found {margin}")
    return math.ceil(discordant * float(ndtri(1 - alpha) + ndtri(power)) ** 2 / margin**2)


def clustered_difference(
    differences: ArrayLike, clusters: Sequence[Hashable], confidence: float = CONFIDENCE
) -> Estimate:
    """Mean paired difference where an item was answered several times: standard error clustered by item.

    differences: candidate - baseline score of each repeat. clusters: the item of each. (Miller, arXiv 2411.00640.)
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) != len(clusters):
        raise ValueError(f"clusters: expected {len(values)} labels, one per difference, found {len(clusters)}")
    method = "t interval, standard error clustered by item"
    labels = {label: i for i, label in enumerate(dict.fromkeys(clusters))}
    g = len(labels)
    if g < 2:
        return unknown(method, g, float(values.mean()) if g else math.nan)
    value = float(values.mean())
    sums = np.zeros(g)
    np.add.at(sums, [labels[label] for label in clusters], values - value)
    error = math.sqrt(g / (g - 1) * float((sums**2).sum())) / len(values)
    half = float(stdtrit(g - 1, (1 + confidence) / 2)) * error
    return Estimate(value, value - half, value + half, g, method)


@dataclass(frozen=True)
class PairedAccuracy:
    """base, candidate: accuracy of each arm (Wilson). change: candidate - base (Tango), as a fraction.

    lost, gained: flips. p_value: exact McNemar. smallest_detectable: |change| found with 80 % power at the observed
    share of flips, None where no change could be. excluded: items without a model outcome in one arm or the other.
    """

    base: Estimate
    candidate: Estimate
    change: Estimate
    lost: int
    gained: int
    p_value: float
    smallest_detectable: float | None
    excluded: tuple[str, ...]


MODEL_OUTCOMES = ("correct", "wrong", "unparsed", "truncated")


def paired_accuracy(
    base: Mapping[str, str | None], candidate: Mapping[str, str | None], confidence: float = CONFIDENCE
) -> PairedAccuracy:
    """Compare two arms item by item.

    base, candidate: item id -> `correct`, `wrong`, `unparsed` or `truncated`; None or `error` where the infrastructure
    failed: such an item is excluded and named, never counted as wrong.
    """
    pairs, excluded = [], []
    for item in dict.fromkeys([*base, *candidate]):
        outcomes = base.get(item), candidate.get(item)
        for outcome in outcomes:
            if outcome not in (*MODEL_OUTCOMES, None, "error"):
                raise ValueError(f"outcome of {item}: expected one of {', '.join(MODEL_OUTCOMES)}, found {outcome!r}")
        if any(outcome in (None, "error") for outcome in outcomes):
            excluded.append(item)
        else:
            pairs.append((outcomes[0] == "correct", outcomes[1] == "correct"))
    n, lost, gained = len(pairs), pairs.count((True, False)), pairs.count((False, True))
    return PairedAccuracy(
        base=wilson(sum(b for b, _ in pairs), n, confidence),
        candidate=wilson(sum(c for _, c in pairs), n, confidence),
        change=tango(lost, gained, n, confidence),
        lost=lost,
        gained=gained,
        p_value=mcnemar(lost, gained),
        smallest_detectable=smallest_detectable_change(n, (lost + gained) / n) if n else None,
        excluded=tuple(excluded),
    )
