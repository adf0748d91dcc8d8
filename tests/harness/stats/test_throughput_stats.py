import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import stats


def arms(rng, n, gain=0.0):
    tokens = rng.integers(60, 300, n)
    seconds = tokens / 50 * rng.lognormal(0, 0.2, n)
    changed = tokens + rng.integers(-20, 20, n)
    return tokens, seconds, changed, changed / (50 * (1 + gain)) * rng.lognormal(0, 0.2, n)


def test_ratio_of_sums_weighs_tokens_not_items():
    assert stats.ratio([10, 1000], [1, 10]).value == pytest.approx(1010 / 11)


def test_throughput_change_known_answer():
    estimate = stats.throughput_change([100, 100], [2, 2], [120, 100], [2, 2])
    assert estimate.value == pytest.approx(0.10)
    assert estimate.n == 2


def test_a_constant_speedup_has_no_width():
    base = np.arange(1, 40)
    estimate = stats.throughput_change(base, base, base, base / 1.25)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((0.25, 0.25, 0.25))


def test_agrees_with_scipy_bca():
    columns = arms(np.random.default_rng(1), 60, 0.05)
    ours = stats.throughput_change(*columns)

    def change(bt, bs, ct, cs, axis=-1):
        return (ct.sum(axis) / cs.sum(axis)) / (bt.sum(axis) / bs.sum(axis)) - 1

    other = scipy.stats.bootstrap(
        columns, change, paired=True, vectorized=True, n_resamples=9999, method="BCa", rng=np.random.default_rng(2)
    )
    width = ours.high - ours.low
    assert ours.low == pytest.approx(other.confidence_interval.low, abs=0.03 * width)
    assert ours.high == pytest.approx(other.confidence_interval.high, abs=0.03 * width)


def test_seed_decides_the_draws():
    columns = arms(np.random.default_rng(3), 30)
    assert stats.throughput_change(*columns) == stats.throughput_change(*columns)
    assert stats.throughput_change(*columns).low != stats.throughput_change(*columns, seed=1).low


def served(rng, servers, items, spread):
    """Arms whose candidate has a speed of its own on every server, and the label of each item's server."""
    labels = np.arange(servers * items) % servers
    factors = rng.lognormal(0, spread, servers)[labels]
    base, walls, changed, seconds = arms(rng, servers * items)
    return (base, walls, changed, seconds / factors), list(labels)


def test_an_interval_over_items_misses_what_servers_make_and_one_over_servers_does_not():
    rng = np.random.default_rng(6)
    hits = {"items": 0, "servers": 0}
    for _ in range(60):
        columns, labels = served(rng, 5, 40, 0.1)
        for name, more in (("items", {}), ("servers", {"servers": labels})):
            found = stats.throughput_change(*columns, resamples=400, **more)
            hits[name] += found.low <= 0 <= found.high
    assert hits["items"] < 40
    assert hits["servers"] > 48


def test_the_variance_between_servers_is_that_of_their_mean():
    """Equal items, so that only servers differ: that of a mean of five values, by the textbook."""
    gains = np.array([0.99, 1.0, 1.02, 1.03, 0.97])
    labels = list(range(5)) * 30
    rates = gains[labels]
    found = stats.ratio(rates, np.ones(150), servers=labels, resamples=20_000)
    expected = 2 * 1.96 * gains.std(ddof=1) / math.sqrt(5)
    assert found.high - found.low == pytest.approx(expected, rel=0.1)
    assert found.method.startswith("bootstrap over 5 servers and their items")


def test_of_two_servers_the_interval_holds_what_either_shows():
    columns, labels = served(np.random.default_rng(7), 2, 60, 0.05)
    both = stats.throughput_change(*columns, servers=labels)
    for server in (0, 1):
        own = [label == server for label in labels]
        alone = stats.throughput_change(*(column[own] for column in columns))
        assert both.low < alone.value < both.high
    assert both.value == stats.throughput_change(*columns).value


def test_one_server_is_items_alone_and_labels_are_one_per_row():
    columns = arms(np.random.default_rng(8), 30)
    assert stats.throughput_change(*columns, servers=[0] * 30) == stats.throughput_change(*columns)
    with pytest.raises(ValueError, match="servers: expected 30 labels, one per row, found 29"):
        stats.throughput_change(*columns, servers=[0, 1] * 14 + [0])


def test_bootstrap_covers_the_true_gain():
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(200):
        e = stats.throughput_change(*arms(rng, 80, 0.05), resamples=500)
        hits += e.low <= 0.05 <= e.high
    # The expectation of the ratio is 5 % up to O(1/n); 95 % nominal, 3 standard errors of 200 trials below.
    assert 0.90 <= hits / 200 <= 0.99


def test_pairing_narrows_the_interval():
    rng = np.random.default_rng(5)
    seconds = rng.lognormal(0, 1, 100)
    other = seconds * rng.normal(0.9, 0.01, 100)
    paired = stats.change(seconds, other)
    shuffled = stats.change(seconds, rng.permutation(other))
    assert paired.high - paired.low < 0.1 * (shuffled.high - shuffled.low)


def test_repeats_of_an_item_add_no_certainty():
    rng = np.random.default_rng(6)
    columns = arms(rng, 40)
    labels = list(range(40))
    once = stats.throughput_change(*columns, clusters=labels)
    copies = stats.throughput_change(*(np.tile(c, 5) for c in columns), clusters=labels * 5)
    naive = stats.throughput_change(*(np.tile(c, 5) for c in columns))
    assert (copies.low, copies.high, copies.n) == pytest.approx((once.low, once.high, 40))
    assert naive.high - naive.low < 0.6 * (once.high - once.low)


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_items_give_no_interval(n):
    e = stats.ratio([3.0] * n, [2.0] * n)
    assert (e.low, e.high, e.n) == (-math.inf, math.inf, n)
    assert math.isnan(e.value) if n == 0 else e.value == 1.5


def test_zero_denominator_is_unknown_not_infinite():
    e = stats.tokens_per_step([5, 5], [0, 0])
    assert math.isnan(e.value)
    assert stats.verdict(e, at_least=0) == "inconclusive"


@pytest.mark.parametrize(
    ("columns", "named"),
    [(([1, 2], [1]), "denominator"), (([1, math.nan], [1, 1]), "numerator"), (([1, 1], [1, -1]), "denominator")],
)
def test_bad_columns_are_named(columns, named):
    with pytest.raises(ValueError, match=named):
        stats.ratio(*columns)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=12))
def test_any_counts_give_an_ordered_interval_or_none(rows):
    e = stats.tokens_per_step(*zip(*rows, strict=True), resamples=200)
    assert math.isnan(e.value) or (e.low <= e.high and e.n == len(rows))


def test_triplet_gain_known_answer():
    # Gains 5, 4 and 6 %: mean 5 %, SD 1 %, t(2, .975) = 4.3027.
    result = stats.triplet_gain([(100, 105, 100), (99, 104, 101), (100, 106, 100)])
    assert result.gains == pytest.approx((0.05, 0.04, 0.06))
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert (result.gain.low, result.gain.high) == pytest.approx((0.05 - half, 0.05 + half))
    assert result.rejected == ()


# facts: half-widths at SD .5 % in percentage points
@pytest.mark.parametrize(("reps", "half"), [(3, 1.24), (4, 0.80), (5, 0.62), (6, 0.52), (9, 0.38)])
def test_t_half_widths(reps, half):
    values = np.arange(reps, dtype=float)
    values = 0.005 * (values - values.mean()) / values.std(ddof=1)
    e = stats.mean(values)
    assert 100 * (e.high - e.low) / 2 == pytest.approx(half, abs=0.0051)


def test_published_triplet_interval_is_reproduced():
    # +4.53 %, CI [4.13, 4.92] over 9 triplets: their SD is then .51 %.
    values = np.arange(9.0)
    e = stats.mean(0.0453 + 0.0051 * (values - values.mean()) / values.std(ddof=1))
    assert (round(100 * e.low, 2), round(100 * e.high, 2)) == pytest.approx((4.13, 4.92), abs=0.011)


def test_drifting_triplet_is_shown_but_not_averaged():
    result = stats.triplet_gain([(100, 110, 100), (100, 110, 100), (100, 150, 96.9), (100, 110, 97.1)])
    assert result.rejected == (2,)
    assert result.gain.n == 3
    assert len(result.gains) == len(result.drifts) == 4
    assert result.drifts[2] == pytest.approx(-0.031)


def test_all_triplets_rejected_is_no_measurement():
    result = stats.triplet_gain([(100, 110, 90)])
    assert result.gain.n == 0
    assert stats.verdict(result.gain, at_least=0.0) == "inconclusive"


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, math.nan), (math.inf, 1.0)])
def test_drift_refuses_what_is_no_rate(rates):
    with pytest.raises(ValueError, match="drift"):
        stats.drift(*rates)
