"""Several verdicts at once: Holm's step-down by intervals gives what Holm's adjusted p values give."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import stdtr
from statsmodels.stats.multitest import multipletests

from harness import stats

SAMPLES = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.floats(-1.5, 1.5), st.integers(3, 9)), min_size=1, max_size=6
)


@given(SAMPLES, st.floats(0.001, 0.3))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_decided_claims_are_the_rejected_hypotheses(samples, alpha):
    """Of t intervals against 0: the whole interval above or below it is a two-sided t test rejected."""
    values = [np.random.default_rng(seed).normal(shift, 1, n) for seed, shift, n in samples]
    claims = [(lambda level, x=x: stats.mean(x, level), 0.0, math.inf) for x in values]
    found = [outcome for outcome, _ in stats.step_down(claims, alpha)]
    p = [2 * stdtr(len(x) - 1, -abs(x.mean() / x.std(ddof=1) * math.sqrt(len(x)))) for x in values]
    rejected = multipletests(p, alpha, method="holm")[0]
    assert [outcome != "inconclusive" for outcome in found] == list(rejected)
    for outcome, x in zip(found, values, strict=True):
        assert outcome == "inconclusive" or outcome == ("pass" if x.mean() > 0 else "fail")


def test_more_claims_make_wider_intervals():
    values = np.array([0.2, 0.5, 0.3, 0.9, 0.6])

    def claim(x):
        return (lambda level: stats.mean(x, level)), 0.0, math.inf

    (alone,) = stats.step_down([claim(values)])
    among = stats.step_down([claim(values), claim(values - 0.55), claim(values - 0.5)])
    assert alone[0] == among[0][0] == "pass"
    assert among[0][1].low < alone[1].low
    assert stats.step_down([]) == []


def test_nothing_measured_is_inconclusive():
    ((outcome, _),) = stats.step_down([(lambda level: stats.mean([], level), 0.0, math.inf)])
    assert outcome == "inconclusive"
