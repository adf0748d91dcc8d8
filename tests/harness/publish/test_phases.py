"""Tokens per step by phase against a walk over every token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.publish.phases import border, phases, split
from harness.records.schema import Row

END = [90, 91]  # a closing tag of two ids
lengths_ = st.lists(st.integers(0, 7), max_size=12)


def walk(lengths, size, thinking):
    """Token by token: which step gave it; a step counts where its first token is."""
    owner = [None]  # the prompt's pass gave token 0
    for step, accepted in enumerate(lengths):
        owner += [step] * (accepted + 1)
    found = {}
    for position in range(1, size):
        found.setdefault(owner[position], []).append(position)
    sides = ([], [])
    for positions in found.values():
        sides[positions[0] >= thinking].append(len(positions))
    return [list(side) for side in sides]


@settings(derandomize=True, deadline=None)
@given(lengths_, st.integers(0, 7), st.integers(0, 110))
def test_steps_are_shared_out_as_a_walk_over_tokens_does(lengths, cut, thinking):
    whole = 1 + sum(length + 1 for length in lengths)
    cut = min(cut, lengths[-1]) if lengths else 0  # a last step gives at least one token
    assert split(lengths, whole - cut, thinking) == walk(lengths, whole - cut, thinking)


@pytest.mark.parametrize(
    ("lengths", "size"),
    [([2], 5), ([], 2), ([3, 0], 5), ([1, -1], 3), ([], 0)],
)
def test_steps_that_do_not_account_for_the_output_are_refused(lengths, size):
    assert split(lengths, size, 0) is None


@settings(derandomize=True, deadline=None)
@given(st.lists(st.sampled_from([1, 90, 91]), max_size=12))
def test_the_last_closing_tag_is_the_border(ids):
    ends = [i for i in range(2, len(ids) + 1) if ids[i - 2 : i] == END]
    assert border(ids, END, "") == (ends[-1] if ends else 0)
    assert border(ids, END, "<think> and no end") == (ends[-1] if ends else len(ids))


def row(ids, lengths, **more) -> Row:
    return Row(
        arm="asd",
        policy_key="asd",
        order=0,
        item=str(len(ids)),
        task="code",
        prompt_sha256="",
        prompt_tokens=1,
        output_ids=ids,
        steps=len(lengths or []),
        step_lengths=lengths,
        **more,
    )


def test_phases_of_an_arm():
    rows = [row([1, 2, 3, 90, 91, 5, 6, 7, 8], [1, 1, 1, 1]), row([1, 2, 3], [0, 0]), row([1], [], error="timeout")]
    found = phases(rows, END)
    # 1 | 2 3 | 90 91 || 5 6 | 7 8; the second output is an answer: 1 | 2 | 3
    assert (found["think"].tokens, found["think"].steps) == ([4], [2])
    assert (found["answer"].tokens, found["answer"].steps) == ([4, 2], [2, 2])
    assert found["answer"].per_step.value == 1.5


@pytest.mark.parametrize(
    ("rows", "end", "why"),
    [
        ([row([1, 2], None)], END, "the engine does not report the length of each step"),
        ([row([1, 2], [0])], None, "the record does not say which id ends thinking"),
        ([row([1, 2, 3], [0])], END, "the lengths of the steps do not account for the ids"),
        ([row([1, 2], [0], error="timeout")], END, "no answer"),
    ],
)
def test_phases_that_cannot_be_told_apart_say_why(rows, end, why):
    assert phases(rows, end) == why
