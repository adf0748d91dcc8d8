"""Speed, length and tokens per step: ratios of sums over items, and baseline-candidate-baseline triplets.

A ratio of sums weighs every token alike, which is what tokens per second means; a mean of per-item ratios does not. The
interval resamples items, both arms of an item together, because the items are what a second run would draw anew. What
bootstrapping items cannot see is drift of the machine: that is what triplets are for; and how one server process
differs from the next: that is what several of them are for, resampled before their items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri, stdtrit

from harness.stats.estimate import CONFIDENCE, SEED, Estimate, unknown

RESAMPLES = 10_000
MAX_DRIFT = 0.03
Floats = NDArray[np.float64]


def _columns(clusters: Sequence[Hashable] | None, **named: ArrayLike) -> Floats:
    """[n, k] float64, rows of one cluster summed; every column checked for length, finiteness and sign."""
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in named.items()}
    n = len(next(iter(arrays.values())))
    for name, array in arrays.items():
        if array.ndim != 1 or len(array) != n:
            raise ValueError(f"{name}: expected {n} numbers, one per item, found shape {array.shape}")
        if not (np.isfinite(array).all() and (array >= 0).all()):
            raise ValueError(f"{name}: expected finite numbers >= 0, found {array[~(array >= 0) | np.isinf(array)][0]}")
    table = np.column_stack(list(arrays.values()))
    if clusters is None:
        return table
    if len(clusters) != n:
        raise ValueError(f"clusters: expected {n} labels, one per row, found {len(clusters)}")
    index = {label: i for i, label in enumerate(dict.fromkeys(clusters))}
    summed = np.zeros((len(index), table.shape[1]))
    np.add.at(summed, [index[label] for label in clusters], table)
    return summed


def bootstrap(
    columns: Floats,
    statistic: Callable[[Floats], Floats],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = SEED,
    servers: Sequence[Hashable] | None = None,
) -> Estimate:
    """BCa interval of a function of column sums, rows of `columns` [n, k] resampled with replacement.

    servers: one label per row: a second run would have other servers too. Of R > 1 of them R - 1 are drawn (which makes
    the variance between them unbiased: Rao and Wu, 1988), then the items of each; percentiles of that. With two servers
    the interval holds what either shows. Few servers are few: where they differ much, a 95 % interval of two covered
    80 %, of four 88 %, of five 94 % of simulated runs, and one over items alone 40 to 60 %.

    statistic: sums [..., k] -> [...]. Bias and acceleration as in Efron (1987); the acceleration is the jackknife's,
    which costs one subtraction per row for a function of sums. Fewer than two rows: no interval.
    """
    n = len(columns)
    method = f"BCa bootstrap over items, {resamples} resamples, seed {seed}"
    if n == 0:
        return unknown(method)
    total = columns.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(total))
        if n < 2 or not math.isfinite(value):
            return unknown(method, n, value if math.isfinite(value) else math.nan)
        if len(parts := _by(servers, columns)) > 1:
            draws = statistic(_sums_over_servers(parts, resamples, np.random.default_rng(seed)))
            low, high = np.quantile(draws[np.isfinite(draws)], [(1 - confidence) / 2, (1 + confidence) / 2])
            method = f"bootstrap over {len(parts)} servers and their items, {resamples} resamples, seed {seed}"
            return Estimate(value, float(low), float(high), n, method)
        draws = statistic(_sums(columns, resamples, np.random.default_rng(seed)))
        left_out = statistic(total - columns)
    draws = draws[np.isfinite(draws)]  # a resample of items without a single token or step has no ratio
    below = ((draws < value).sum() + 0.5 * (draws == value).sum()) / len(draws)
    if np.ptp(draws) <= 1e-12 * max(abs(value), 1.0):
        return Estimate(value, value, value, n, method)
    bias = ndtri(np.clip(below, 0.5 / len(draws), 1 - 0.5 / len(draws)))
    pull = left_out[np.isfinite(left_out)]
    pull = pull.mean() - pull
    spread = (pull**2).sum() ** 1.5
    acceleration = (pull**3).sum() / (6 * spread) if spread > 0 else 0.0
    tails = bias + ndtri([(1 - confidence) / 2, (1 + confidence) / 2])
    low, high = np.quantile(draws, ndtr(bias + tails / (1 - acceleration * tails)))
    return Estimate(value, float(low), float(high), n, method)


def _sums(columns: Floats, draws: int, rng: np.random.Generator) -> Floats:
    """[draws, k]: column sums of so many resamples of the rows."""
    n, chunks = len(columns), [np.zeros((0, columns.shape[1]))]
    step = max(1, 1_000_000 // n)  # bounds memory
    for start in range(0, draws, step):
        picks = rng.integers(0, n, size=(min(step, draws - start), n))
        chunks.append(np.stack([column[picks].sum(axis=1) for column in columns.T], axis=-1))
    return np.concatenate(chunks)


def _by(servers: Sequence[Hashable] | None, columns: Floats) -> list[Floats]:
    """Rows of each server, in order of appearance."""
    if servers is None:
        return [columns]
    if len(servers) != len(columns):
        raise ValueError(f"servers: expected {len(columns)} labels, one per row, found {len(servers)}")
    own = np.array([list(dict.fromkeys(servers)).index(label) for label in servers])
    return [columns[own == server] for server in range(own.max(initial=0) + 1)]


def _sums_over_servers(parts: Sequence[Floats], draws: int, rng: np.random.Generator) -> Floats:
    """[draws, k]: of all servers but one, drawn with replacement, and of the items of each, drawn again too."""
    chosen = rng.integers(0, len(parts), size=(draws, len(parts) - 1))
    sums = np.zeros((draws, parts[0].shape[1]))
    for server, part in enumerate(parts):
        times = (chosen == server).sum(axis=1)
        np.add.at(sums, np.repeat(np.arange(draws), times), _sums(part, int(times.sum()), rng))
    return sums


def ratio(
    numerator: ArrayLike, denominator: ArrayLike, *, clusters: Sequence[Hashable] | None = None, **options: Any
) -> Estimate:
    """Sum over sum, per-item pairs resampled: tokens and seconds give tokens/s, items' seconds over ones wall per item.

    clusters: one label per row; rows of one label (repeats of one item) are resampled together.
    options: confidence, resamples, seed, servers of `bootstrap`.
    """
    return bootstrap(
        _columns(clusters, numerator=numerator, denominator=denominator), lambda s: s[..., 0] / s[..., 1], **options
    )


def tokens_per_step(tokens: ArrayLike, steps: ArrayLike, **options: Any) -> Estimate:
    """Output tokens over verify steps, bonus token included: ratio of means, every step weighs alike."""
    return ratio(tokens, steps, **options)


def change(
    base: ArrayLike, candidate: ArrayLike, *, clusters: Sequence[Hashable] | None = None, **options: Any
) -> Estimate:
    """sum(candidate) / sum(base) - 1, paired by item: output length, wall per item."""
    return bootstrap(_columns(clusters, base=base, candidate=candidate), lambda s: s[..., 1] / s[..., 0] - 1, **options)


def throughput_change(
    base_tokens: ArrayLike,
    base_seconds: ArrayLike,
    candidate_tokens: ArrayLike,
    candidate_seconds: ArrayLike,
    *,
    clusters: Sequence[Hashable] | None = None,
    **options: Any,
) -> Estimate:
    """(tokens/s of the candidate) / (tokens/s of the baseline) - 1, paired by item.

    Row i of all four is item i: tokens the engine returned, seconds the client waited (any one unit).
    """
    columns = _columns(
        clusters,
        base_tokens=base_tokens,
        base_seconds=base_seconds,
        candidate_tokens=candidate_tokens,
        candidate_seconds=candidate_seconds,
    )
    return bootstrap(columns, lambda s: (s[..., 2] / s[..., 3]) / (s[..., 0] / s[..., 1]) - 1, **options)


def mean(values: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Arithmetic mean with Student's t interval over independent repetitions."""
    array = np.asarray(values, dtype=np.float64)
    n, method = len(array), "t interval over repetitions"
    if n < 2:
        return unknown(method, n, float(array[0]) if n else math.nan)
    half = float(stdtrit(n - 1, (1 + confidence) / 2) * array.std(ddof=1) / math.sqrt(n))
    value = float(array.mean())
    return Estimate(value, value - half, value + half, n, method)


@dataclass(frozen=True)
class TripletGain:
    """gain: t interval over the triplets kept. gains, drifts: one per triplet, in order. rejected: indices of those
    whose baseline moved by more than max_drift between its two readings."""

    gain: Estimate
    gains: tuple[float, ...]
    drifts: tuple[float, ...]
    rejected: tuple[int, ...]
    max_drift: float


def drift(pre: float, post: float) -> float:
    """post / pre - 1 of two baseline readings in one unit, both > 0."""
    if not (0 < pre < math.inf and 0 < post < math.inf):
        raise ValueError(f"drift: expected two finite rates > 0, found {pre} and {post}")
    return post / pre - 1


def triplet_gain(
    triplets: Sequence[tuple[float, float, float]], *, max_drift: float = MAX_DRIFT, confidence: float = CONFIDENCE
) -> TripletGain:
    """Gain of the candidate over the midpoint of the baseline before and after it, (baseline, candidate, baseline).

    A triplet whose baseline drifted by more than `max_drift` says more about the machine than about the policy: it is
    shown but not averaged. The interval takes triplets as independent; a baseline reading shared by two neighbouring
    triplets makes it slightly too narrow, so measure the baseline twice between candidates where time allows.
    """
    drifts = tuple(drift(pre, post) for pre, _, post in triplets)
    gains = tuple(candidate / ((pre + post) / 2) - 1 for pre, candidate, post in triplets)
    kept = [abs(d) <= max_drift for d in drifts]
    estimate = mean([g for g, k in zip(gains, kept, strict=True) if k], confidence)
    estimate = Estimate(estimate.value, estimate.low, estimate.high, estimate.n, "t interval over B-C-B triplets")
    return TripletGain(estimate, gains, drifts, tuple(i for i, k in enumerate(kept) if not k), max_drift)
