import inspect
import itertools
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import stats
from harness.stats.throughput import RESAMPLES


def estimate(low, high, n=10):
    return stats.Estimate((low + high) / 2, low, high, n, "")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.005, 0.01, "pass"),
        (-0.01, 0.02, "pass"),
        (-0.03, -0.011, "fail"),
        (-0.02, 0.0, "inconclusive"),
        (-0.02, -0.01, "inconclusive"),
    ],
)
def test_verdict_against_one_margin(low, high, expected):
    assert stats.verdict(estimate(low, high), at_least=-0.01) == expected


def test_verdict_against_a_band():
    assert stats.verdict(estimate(-0.01, 0.01), at_least=-0.03, at_most=0.03) == "pass"
    assert stats.verdict(estimate(0.04, 0.05), at_least=-0.03, at_most=0.03) == "fail"
    assert stats.verdict(estimate(-0.04, 0.04), at_least=-0.03, at_most=0.03) == "inconclusive"


def test_nothing_measured_is_inconclusive():
    assert stats.verdict(estimate(0, 0, n=0), at_least=-1) == "inconclusive"


@pytest.mark.parametrize("margins", [{}, {"at_least": 1, "at_most": 0}])
def test_verdict_needs_a_margin(margins):
    with pytest.raises(ValueError, match="verdict"):
        stats.verdict(estimate(0, 1), **margins)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], "inconclusive"),
        (["pass", "pass"], "pass"),
        (["pass", "inconclusive"], "inconclusive"),
        (["inconclusive", "fail", "pass"], "fail"),
    ],
)
def test_combine(verdicts, expected):
    assert stats.combine(verdicts) == expected
    assert stats.EXIT_STATUS[expected] == ("pass", "fail", "inconclusive").index(expected)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_the_closed_bonferroni_test(p_values):
    """A hypothesis falls when every family that holds it falls by Bonferroni: brute force over the families."""
    families = [f for size in range(1, 7) for f in itertools.combinations(range(len(p_values)), size)]
    expected = [
        max(min(1.0, len(f) * min(p_values[j] for j in f)) for f in families if i in f) for i in range(len(p_values))
    ]
    assert stats.holm(p_values) == pytest.approx(expected)


def test_holm_of_nothing_and_of_nonsense():
    assert stats.holm([]) == ()
    with pytest.raises(ValueError, match="probability"):
        stats.holm([0.1, float("nan")])


# Loops. Ids as a crude tokenizer would make them: words, or single characters for the worst case.
def words(text):
    return [hash_id(w) for w in re.findall(r"\w+|\W", text)]


def characters(text):
    return [ord(c) for c in text]


def hash_id(word):
    return int.from_bytes(word.encode()[:6].ljust(6, b"\0"), "big") + len(word)


PROSE = [
    "Janet sells sixteen minus three minus four, which is nine, duck eggs a day. She makes nine times two dollars, "
    "which is eighteen dollars every day at the farmers' market. So the answer is eighteen. "
    + json.dumps(list(range(60))),
    "Step 1: we add 3 and 4. We get 7.\nStep 2: we add 3 and 7. We get 10.\nStep 3: we add 3 and 10. We get 13.\n"
    "Step 4: we add 3 and 13. We get 16.\nStep 5: we add 3 and 16. We get 19.\nStep 6: we add 3 and 19. We get 22.\n",
    "| a | b |\n| --- | --- |\n" + "".join(f"| {i} | {i * i} |\n" for i in range(12)),
    "0.3333333333333333333 of 1,000,000,000,000 is a third; [0, 0, 0, 0, 0, 0, 0, 0] stays; no, no, no, never!",
    "def f(xs):\n    for x in xs:\n        if x > 0:\n            yield x\n        else:\n            yield -x\n",
]


@pytest.mark.parametrize("text", PROSE)
@pytest.mark.parametrize("tokenize", [words, characters])
def test_real_text_is_no_loop(text, tokenize):
    assert stats.find_loop(tokenize(text)) is None


def test_source_code_of_this_project_is_no_loop():
    import harness.stats.accuracy as source

    assert stats.find_loop(words(inspect.getsource(source))) is None


@pytest.mark.parametrize(
    ("unit", "period"),
    [("ha ", 2), ("So the answer is 5. ", 11), ("!", 1), ("\n\nWait, let me check again. 3 + 4 = 7.", None)],
)
def test_loops_are_found_after_a_sane_beginning(unit, period):
    head = words(PROSE[0])
    loop = stats.find_loop(head + words(unit) * 60)
    assert loop is not None
    assert loop.start >= len(head) - len(words(unit))
    assert loop.length >= 60 * len(words(unit))
    assert period is None or loop.period in (period, len(words(unit)))


def test_a_loop_in_the_middle_is_found():
    assert stats.find_loop(words(PROSE[0]) + [7, 8, 9] * 30 + words(PROSE[1])) is not None


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 3), max_size=60))
def test_find_loop_is_the_definition(ids):
    """Brute force over every (period, start, length)."""
    found = stats.find_loop(ids, min_tokens=6, min_repeats=3, max_period=5)
    longest = 0
    for period, start in itertools.product(range(1, 6), range(len(ids))):
        length = period
        while start + length < len(ids) and ids[start + length] == ids[start + length - period]:
            length += 1
        if start + period <= len(ids) and length >= max(6, 3 * period):
            longest = max(longest, length)
    assert (found is None) == (longest == 0)
    if found is not None:
        assert found.length >= longest - found.period
        run = ids[found.start : found.start + found.length]
        assert len(run) == found.length
        assert run[found.period :] == run[: -found.period]


def test_random_tokens_do_not_loop():
    rng = random.Random(5)
    outputs = [[rng.randrange(40) for _ in range(512)] for _ in range(100)]
    assert stats.loop_share(outputs).value == 0.0
    assert stats.loop_share([*outputs, [1, 2] * 100]).value == pytest.approx(1 / 101)


def test_defaults_are_what_the_readme_says():
    assert RESAMPLES == 10_000
    assert stats.MAX_DRIFT == 0.03
    assert stats.CONFIDENCE == 0.95
