"""The schedule of blocks and the gains taken from it, against their definition."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.policy import Policy
from harness.records import Row
from harness.tasks import blocks
from harness.tasks.arms import Plan, prove_blocks
from harness.tasks.schedule import answers, chunks
from harness.tasks.schedule import blocks as schedule


def plans(count):
    return [Plan(f"arm{n}", Policy("strict"), "test", 0.0) for n in range(count)]


@given(st.integers(1, 200), st.integers(1, 50))
@settings(derandomize=True, deadline=None)
def test_chunks_hold_every_item_once_and_are_large_enough(items, size):
    found = chunks([f"i{n}" for n in range(items)], size)
    assert [job for chunk in found for job in chunk] == [(n, f"i{n}") for n in range(items)]
    lengths = {len(chunk) for chunk in found}
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= min(size, items)


@given(st.integers(2, 5), st.integers(1, 40), st.integers(1, 9))
@settings(derandomize=True, deadline=None)
def test_every_candidate_lies_between_two_baselines_on_its_items(arms, items, size):
    found = schedule(plans(arms), list(range(items)), size)
    assert [block.number for block in found] == list(range(len(found)))
    told = dict.fromkeys((f"arm{n}" for n in range(arms)), 0)
    for place, block in enumerate(found):
        told[block.arm.name] += len(block.jobs)
        if block.arm.name != "arm0":
            for beside in (found[place - 1], found[place + 1]):
                assert (beside.arm.name, beside.jobs) == ("arm0", block.jobs)
    assert told == answers(plans(arms), items)


def test_candidates_rotate():
    found = schedule(plans(3), list(range(4)), 2)
    assert [block.arm.name[3:] for block in found] == list("0102002010")


def row(block, arm, item, start, wall, tokens, **more):
    values = {"policy_key": "strict", "order": 0, "task": "math", "prompt_sha256": "p", "prompt_tokens": 1}
    return Row(arm=arm, item=item, block=block, started_s=start, wall_s=wall, output_ids=[1] * tokens, **values | more)


def triplet(first, rates, items=2, tokens=10):
    """Rows of three blocks, two requests at a time, that make `rates` tokens/s."""
    rows, at = [], 100.0 * first
    for place, rate in enumerate(rates):
        wall = items * tokens / rate
        for item in range(items):  # the second starts late and ends the block
            start, end = (at, at + wall / 2) if item == 0 else (at + wall / 4, at + wall)
            rows.append(row(first + place, ("b", "c", "b")[place], f"i{first}-{item}", start, end - start, tokens))
        at += wall + 1
    return rows


def test_a_block_lasts_from_its_first_request_to_its_last_answer():
    found = blocks.timed(triplet(0, (100, 120, 110)))
    assert [(block.number, block.arm, block.tokens) for block in found] == [(0, "b", 20), (1, "c", 20), (2, "b", 20)]
    assert [block.tps for block in found] == pytest.approx([100, 120, 110])
    assert blocks.rate(found, "b").value == pytest.approx(40 / (20 / 100 + 20 / 110))


def test_the_gain_is_over_the_midpoint_and_drift_is_left_out():
    rates = [(100, 120, 102), (100, 110, 100), (100, 200, 150)]
    rows = [each for n, three in enumerate(rates) for each in triplet(3 * n, three)]
    found = blocks.triplets(blocks.timed(rows), "b", "c")
    gain = blocks.gain(found, 0.03)
    assert gain.gains == pytest.approx([120 / 101 - 1, 0.1, 200 / 125 - 1])
    assert gain.rejected == (2,)
    assert gain.gain.value == pytest.approx((120 / 101 - 1 + 0.1) / 2)
    assert gain.gain.n == 2
    walls = [100 / 120 * 2 / (1 + 100 / 102) - 1, 100 / 110 - 1]
    assert blocks.wall_change(found, gain).value == pytest.approx(sum(walls) / 2)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: [replace_row(each, error="http") if each.block == 1 else each for each in rows],
        lambda rows: [each for each in rows if each.block != 2],
        lambda rows: [replace_row(each, item=f"{each.block}") if each.block == 2 else each for each in rows],
        lambda rows: [each for each in rows if not (each.block == 0 and each.item.endswith("-0"))],
        lambda rows: [replace_row(each, output_ids=[]) if each.block == 0 else each for each in rows],
    ],
)
def test_a_triplet_of_unequal_work_is_none(spoil):
    assert blocks.triplets(blocks.timed(spoil(triplet(0, (100, 120, 100)))), "b", "c") == []


def replace_row(old, **new):
    values = {name: getattr(old, name) for name in Row.__struct_fields__}
    return Row(**values | new)


def test_no_triplet_is_no_interval():
    gain = blocks.gain([], 0.03).gain
    assert (gain.n, gain.low, gain.high) == (0, -math.inf, math.inf)


MOVED = {"requests": 2, "blocks": 4, "drafts_verified": 28, "relaxed": 0}


def told(change=None, **more):
    rows = [row(5, "c", f"i{n}", 0, 1, 3, steps=2, proposed=14) for n in range(2)]
    block = {"block": 5, "arm": "c", "moved": MOVED | (change or {}), "others": []} | more
    return [problem.text for problem in prove_blocks([block], rows)]


def test_counters_at_the_borders_prove_a_block():
    assert told() == []
    assert told({"blocks": 5}) == ["block 5 (c): blocks: the answers say 4, the counters moved by 5"]
    assert told(others=["strict"]) == ["block 5 (c): counters of strict moved too"]
    assert told(moved=None) == []  # unarmed: nobody counts
    assert told(arm="b") == ["block 5 (b): answers of c"]
    assert told(block=6, moved=None) == ["block 5: counters: expected a reading on both sides, found none"]


def test_plans_are_repeated_under_another_name():
    first = plans(1)[0]
    assert first.again() == replace(first, name="arm0-again")
