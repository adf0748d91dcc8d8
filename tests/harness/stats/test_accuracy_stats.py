import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from harness import stats


# Published: Fagerland, Lydersen and Laake (2014), table V, for Bentur et al. (1, 1, 7, 12); and for Cavo et al.
# (59, 6, 16, 80) as the authors' own software prints it.
@pytest.mark.parametrize(
    ("lost", "gained", "n", "low", "high"), [(7, 1, 21, -0.517, -0.026), (16, 6, 161, -0.1240, -0.0054)]
)
def test_tango_published_values(lost, gained, n, low, high):
    e = stats.tango(lost, gained, n)
    digits = 3 if n == 21 else 4
    assert (round(e.low, digits), round(e.high, digits)) == (low, high)
    assert e.value == (gained - lost) / n


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 60))
def test_tango_ends_are_where_the_constrained_likelihood_says(lost, gained, rest):
    """Independent: the nuisance rate by a numerical maximum of the trinomial likelihood, not by the closed form."""
    n = lost + gained + rest
    e = stats.tango(lost, gained, n)
    assert -1 <= e.low <= e.value <= e.high <= 1
    for delta in (e.low, e.high):
        if abs(delta) > 0.999 or abs(delta) < 1e-9:
            continue

        def slope(p, delta=delta):  # d/dp of lost log p + gained log(p + delta) + rest log(1 - 2p - delta)
            return lost / p + gained / (p + delta) - 2 * rest / (1 - 2 * p - delta)

        low, high = max(0, -delta) + 1e-13, (1 - delta) / 2 - 1e-13
        p = brentq(slope, low, high, xtol=1e-15) if slope(low) > 0 else low
        variance = (2 * p + delta - delta * delta) / n
        assert abs((gained - lost) / n - delta) / math.sqrt(variance) == pytest.approx(1.959964, rel=1e-3)


def test_tango_is_antisymmetric_and_never_collapses():
    a, b = stats.tango(9, 4, 200), stats.tango(4, 9, 200)
    assert (a.low, a.value, a.high) == pytest.approx((-b.high, -b.value, -b.low))
    none = stats.tango(0, 0, 1319)
    assert none.high == -none.low == pytest.approx(1.959964**2 / (1319 + 1.959964**2))
    assert stats.tango(5, 0, 5).low == -1.0
    assert stats.tango(0, 5, 5).high == 1.0
    assert math.isnan(stats.tango(0, 0, 0).value)


# Wald half-widths at n = 1319 in percentage points, flips balanced: a score interval is a little wider.
@pytest.mark.parametrize(("share", "half"), [(0.01, 0.54), (0.02, 0.76), (0.03, 0.93), (0.04, 1.08), (0.06, 1.32)])
def test_tango_half_width_on_gsm8k(share, half):
    flips = round(1319 * share / 2)
    e = stats.tango(flips, flips, 1319)
    assert half - 0.01 <= 100 * (e.high - e.low) / 2 <= half + 0.09


@pytest.mark.parametrize(("lose", "gain"), [(0.02, 0.01), (0.005, 0.005), (0.004, 0.0)])
def test_tango_holds_its_level_where_flips_are_few(lose, gain):
    """Exact coverage at n = 300: the probability of every (lost, gained) whose interval holds the true change."""
    counts = [(b, c) for b in range(30) for c in range(30)]
    chance = scipy.stats.multinomial(300, [lose, gain, 1 - lose - gain])
    weights = [chance.pmf([b, c, 300 - b - c]) for b, c in counts]
    covered = [e.low <= gain - lose <= e.high for e in (stats.tango(b, c, 300) for b, c in counts)]
    assert sum(weights) == pytest.approx(1, abs=1e-6)
    assert 0.93 <= sum(w for w, hit in zip(weights, covered, strict=True) if hit) <= 1


@pytest.mark.parametrize(
    ("lost", "gained", "p"), [(6, 0, 0.031), (5, 0, 0.0625), (7, 1, 0.070), (8, 1, 0.039), (10, 2, 0.039)]
)
def test_mcnemar_known_values(lost, gained, p):
    assert stats.mcnemar(lost, gained) == pytest.approx(p, abs=6e-4)


def test_mcnemar_published_value():
    assert stats.mcnemar(16, 6) == pytest.approx(0.052479, abs=5e-7)


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_test(lost, gained):
    expected = scipy.stats.binomtest(lost, lost + gained, 0.5).pvalue if lost + gained else 1.0
    assert stats.mcnemar(lost, gained) == pytest.approx(expected)


TABLE = {
    164: (None, None, None, None, 5.32, 6.87),
    378: (None, None, 2.49, 2.87, 3.52, 4.54),
    500: (None, 1.77, 2.17, 2.50, 3.06, 3.95),
    1209: (0.80, 1.14, 1.40, 1.61, 1.97, 2.55),
    1319: (0.77, 1.09, 1.33, 1.54, 1.89, 2.44),
}


@pytest.mark.parametrize("n", TABLE)
def test_smallest_detectable_change_table(n):
    for share, expected in zip((0.01, 0.02, 0.03, 0.04, 0.06, 0.10), TABLE[n], strict=True):
        found = stats.smallest_detectable_change(n, share)
        if expected is None:
            assert found is None
        else:
            assert 100 * found == pytest.approx(expected, abs=0.011)  # the table takes 1.96 and .84


@settings(derandomize=True, deadline=None)
@given(st.integers(20, 5000), st.floats(0.001, 1.0))
def test_smallest_detectable_change_solves_its_equation(n, share):
    change = stats.smallest_detectable_change(n, share)
    if change is None:  # not even a change of every flip would do
        needed = (1.959964 * math.sqrt(share) + 0.841621 * math.sqrt(share - share**2)) ** 2 / share**2
        assert needed > n * (1 - 1e-6)
    else:
        needed = (1.959964 * math.sqrt(share) + 0.841621 * math.sqrt(share - change**2)) ** 2 / change**2
        assert needed == pytest.approx(n, rel=1e-4)


def test_smallest_detectable_change_has_the_power_it_claims():
    rng = np.random.default_rng(12)
    change = stats.smallest_detectable_change(1319, 0.06)
    flips = rng.multinomial(1319, [(0.06 + change) / 2, (0.06 - change) / 2, 0.94], size=1000)
    power = np.mean([stats.mcnemar(int(b), int(c)) < 0.05 for b, c, _ in flips])
    assert 0.72 <= power <= 0.84  # the exact test is a little conservative


@pytest.mark.parametrize(("share", "n"), [(0.02, 1237), (0.03, 1855), (0.04, 2473), (0.06, 3710)])
def test_items_for_a_one_point_margin(share, n):
    assert stats.items_for_margin(0.01, share) == pytest.approx(n, abs=1)


@pytest.mark.parametrize(("n", "percent"), [(32, 8.9), (64, 4.6), (200, 1.5), (500, 0.60), (1319, 0.23)])
def test_zero_mismatch_bound_table(n, percent):
    assert 100 * stats.mismatch_bound(0, n) == pytest.approx(percent, abs=0.051 if percent > 1 else 0.0051)
    assert stats.mismatch_bound(0, n) == pytest.approx(1 - 0.05 ** (1 / n))


@pytest.mark.parametrize(("k", "n"), [(1, 32), (5, 100), (99, 100)])
def test_mismatch_bound_inverts_the_binomial(k, n):
    assert scipy.stats.binom.cdf(k, n, stats.mismatch_bound(k, n)) == pytest.approx(0.05)
    assert stats.mismatch_bound(n, n) == stats.mismatch_bound(0, 0) == 1.0


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipy(pair):
    e = stats.wilson(*pair)
    expected = scipy.stats.binomtest(*pair).proportion_ci(method="wilson")
    assert (e.low, e.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= e.low <= e.value <= e.high <= 1


def test_wilson_of_nothing_is_everything():
    e = stats.wilson(0, 0)
    assert (e.low, e.high, e.n) == (0, 1, 0)


def test_clustered_difference_is_the_plain_t_interval_without_repeats():
    rng = np.random.default_rng(13)
    values = rng.normal(0.02, 0.3, 50)
    e = stats.clustered_difference(values, range(50))
    low, high = scipy.stats.t.interval(0.95, 49, values.mean(), scipy.stats.sem(values))
    assert (e.low, e.high, e.n) == pytest.approx((low, high, 50))


def test_clustered_difference_ignores_copies():
    values = [1, 0, 0, -1, 1, 0, 0, 0]
    once = stats.clustered_difference(values, range(8))
    many = stats.clustered_difference(values * 4, list(range(8)) * 4)
    assert (many.low, many.high, many.n) == pytest.approx((once.low, once.high, 8))


def test_paired_accuracy_counts_and_excludes():
    base = {"a": "correct", "b": "correct", "c": "wrong", "d": "unparsed", "e": "correct", "f": None, "g": "correct"}
    candidate = {
        "a": "correct",
        "b": "truncated",
        "c": "correct",
        "d": "wrong",
        "e": "error",
        "f": "correct",
        "h": "wrong",
    }
    result = stats.paired_accuracy(base, candidate)
    assert (result.lost, result.gained, result.change.n) == (1, 1, 4)
    assert result.excluded == ("e", "f", "g", "h")  # an error is a hole, not a wrong answer
    assert (result.base.value, result.candidate.value, result.change.value) == (0.5, 0.5, 0.0)
    assert result.p_value == 1.0


def test_paired_accuracy_of_nothing_is_inconclusive():
    result = stats.paired_accuracy({"a": None}, {"a": "correct"})
    assert result.smallest_detectable is None
    assert stats.verdict(result.change, at_least=-0.01) == "inconclusive"


def test_unknown_outcome_is_named():
    with pytest.raises(ValueError, match=r"outcome of a.*'right'"):
        stats.paired_accuracy({"a": "right"}, {"a": "wrong"})


@pytest.mark.parametrize(
    "call", [lambda: stats.wilson(3, 2), lambda: stats.tango(2, 2, 3), lambda: stats.mcnemar(-1, 0)]
)
def test_impossible_counts_are_refused(call):
    with pytest.raises(ValueError, match="expected"):
        call()
