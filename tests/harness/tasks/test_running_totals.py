"""Limits of totals that are read while the engine adds to them: every interleaving of writes and reads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.policy import Policy
from harness.records.schema import Row
from harness.tasks.arms import Plan, prove, prove_sampled
from harness.tasks.limits import impossible

K = 7
STRICT = Policy("strict")


def row(ids: int, steps: int, proposed: int, accepted: int) -> Row:
    made = Row(arm="unarmed", policy_key="unarmed", order=0, item="i", task="math", prompt_sha256="p", prompt_tokens=1)
    made.output_ids, made.steps, made.proposed, made.accepted = list(range(ids)), steps, proposed, accepted
    made.wall_s = 1.0
    return made


def told(one: Row, running: bool = True, block_size: int | None = K) -> str:
    return " | ".join(impossible("unarmed", STRICT, [one], block_size, running))


@given(st.lists(st.integers(0, K), min_size=1, max_size=6), st.data())
@settings(derandomize=True, deadline=None)
def test_whatever_the_reader_catches_is_possible(lengths, data):
    """A writer adds (accepted, rows, steps) of each step; the reader may stop it between any two of them."""
    writes = [(field, amount) for length in lengths for field, amount in ((0, length), (1, K + 1), (2, 1))]
    whole = 3 * (len(lengths) - 1) if len(lengths) > 1 else 3  # the last step of several is the one in flight
    first = data.draw(st.integers(whole, len(writes)))
    second = data.draw(st.integers(first, len(writes)))
    third = data.draw(st.integers(second, len(writes)))
    seen = [
        sum(amount for field, amount in writes[:place] if field == wanted)
        for wanted, place in enumerate((first, second, third))
    ]
    finishing = lengths[-2] if len(lengths) > 1 else lengths[0]
    made = data.draw(st.integers(0, 1)) + sum(n + 1 for n in lengths[: max(len(lengths) - 1, 1)])
    ids = made - data.draw(st.integers(0, finishing))  # the end may cut all but one id of its step
    assert told(row(ids, seen[2], seen[1] - seen[2], seen[0])) == ""


def test_a_step_caught_between_its_rows_and_its_count():
    """25 steps counted and the rows of 26: 208 rows less 25. One more draft is of no step."""
    assert told(row(94, 25, 183, 74)) == ""
    assert "at most 7 in each of 25 steps + 8 of one in flight, found 184" in told(row(94, 25, 184, 74))
    assert "at most 7 in each of 25 steps, found 183" in told(row(94, 25, 183, 74), running=False)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (row(20, 3, 21, 22), ""),
        (row(30, 3, 21, 28), ""),
        (row(40, 3, 29, 29), "accepted drafts: expected at most 29 (proposed) + 8, and at most 7 in each of 3 + 1"),
        (row(20, 3, 4, 13), "accepted drafts: expected at most 4 (proposed) + 8"),
        (row(5, 4, 28, 16), ""),
        (row(5, 4, 28, 17), "accepted drafts + steps: expected at most 5 ids + 7 cut + 8 of one in flight, found 17"),
        (row(9, 2, 14, 5), "output ids: expected at most 1 + 5 drafts + 2 steps, found 9"),
        (row(9, 2, -1, 7), "expected 0 or more, found 7, -1"),
    ],
)
def test_what_no_reading_can_be(one, words):
    assert words in told(one) if words else told(one) == ""


def test_without_a_width_nothing_is_said_of_drafts():
    assert told(row(9, 2, 99, 7), block_size=None) == ""
    assert "expected 0 or more" in told(row(9, 2, -1, 7), block_size=None)


def test_only_an_arm_without_the_adapter_is_read_so():
    arm = Plan("unarmed", None, "no adapter", 0.0).record(1)
    caught = [row(94, 25, 183, 74)]
    assert prove("unarmed", arm, caught, K, running=True) == []
    assert prove_sampled("unarmed", arm, caught, K, True) == []
    for problems in (prove("unarmed", arm, caught, K), prove_sampled("unarmed", arm, caught, K)):
        assert [problem.outcome for problem in problems] == ["fail"]
