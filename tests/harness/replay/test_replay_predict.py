"""Prediction: right values from engines made of arithmetic, and what may not be set beside what."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from adapters.policy import Policy
from harness.records import Row
from harness.records.schema import Verdict
from harness.replay import predict
from harness.replay.estimate import Outcome
from harness.replay.table import NO_CUT, Table
from harness.tasks.errors import TaskError

FACTS = {"engine": "e", "engine version": "1", "target": "t", "draft": "d", "K": 7}
FIXED, PROMPT, STEP = 0.02, 1e-4, 6e-3
ASD = Policy("asd", 2.0625, 2.0625, 1, "normalized")
SLOW = Policy("typical", epsilon=0.09, alpha=0.3)


def hashes(count, first=0):
    return [predict.prompt_sha256([first + n]) for n in range(count)]


def rows_of(arm, key, steps, prompts, outputs, times, names):
    fixed, prompt, step = times
    return [
        Row(arm=arm, policy_key=key, order=n, item=str(n), task="math", prompt_sha256=name, prompt_tokens=p, steps=s,
            proposed=7 * s, output_ids=[1] * t, wall_s=fixed + prompt * p + step * s)
        for n, (s, p, t, name) in enumerate(zip(steps, prompts, outputs, names, strict=True))
    ]  # fmt: skip


def bench(arms, batch=1, temperature=0.0, facts=FACTS, run="run"):
    """arms: name -> (key, rows)."""
    known = {name: {"tps": {"value": tps(rows), "low": None, "high": None}} for name, (_, rows) in arms.items()}
    record = SimpleNamespace(
        id=run,
        verdict=Verdict("pass", []),
        workload={"concurrency": batch},
        arms={name: SimpleNamespace(policy_key=key, temperature=temperature) for name, (key, _) in arms.items()},
        summary={"arms": known},
    )
    return predict.Bench(record, [row for _, rows in arms.values() for row in rows], facts)


def tps(rows):
    return sum(len(row.output_ids) for row in rows) / sum(row.wall_s for row in rows)


def outcome(name, policy, value):
    return Outcome(name, policy, "deterministic", tokens_per_step={"all": {"value": value}})


def asked(names, temperature=0.0, filters=None, facts=FACTS):
    return predict.Asked(facts, frozenset([temperature]), filters, frozenset(names))


def drawn(count=60, seed=0, first=0):
    """Requests whose blocks give 4 tokens, and their walls: (steps, prompts, outputs, hashes)."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(5, 60, count)
    return steps.tolist(), rng.integers(50, 300, count).tolist(), (4 * steps + 1).tolist(), hashes(count, first)


def two_arms(ratio, count=60, seed=0, first=0, run="run", policy=SLOW):
    """strict at 4 tokens a step; a policy with the same answers at 5, whose step takes `ratio` times as long."""
    steps, prompts, outputs, names = drawn(count, seed, first)
    steps = [5 * s for s in steps]
    outputs = [4 * s + 1 for s in steps]
    fewer = [4 * s // 5 for s in steps]
    base = rows_of("strict", "strict", steps, prompts, outputs, (FIXED, PROMPT, STEP), names)
    own = rows_of("own", policy.key, fewer, prompts, outputs, (FIXED, PROMPT, ratio * STEP), names)
    return bench({"strict": ("strict", base), "own": (policy.key, own)}, run=run), names


def test_a_linear_engine_is_predicted_exactly():
    steps, prompts, outputs, names = drawn()
    rows = rows_of("strict", "strict", steps, prompts, outputs, (FIXED, PROMPT, STEP), names)
    made, strict = bench({"strict": ("strict", rows)}), outcome("strict", Policy("strict"), 4.0)
    point = predict.fit(made)
    assert (point.fixed_s, point.per_prompt_token_s, point.per_step_s) == pytest.approx((FIXED, PROMPT, STEP), rel=1e-6)
    assert point.width == 8
    found = predict.predict([strict], [made], [made], asked(names))
    assert found["rows"][0]["error"] == pytest.approx(0, abs=1e-9)
    assert found["rows"][0]["live_tokens_per_step"] == pytest.approx(4.0)
    assert found["rows"][0]["fitted"] is True
    assert (found["mean_abs_error"], found["refused"]) == (None, [])  # nothing but the row that was fitted
    equal = outcome("asd-b0", Policy("asd", budget=0.0), 4.0)
    same = [msgspec.structs.replace(row, arm="asd-b0") for row in rows]
    again = bench({"strict": ("strict", rows), "asd-b0": (equal.policy.key, same)})
    told = predict.predict([strict, equal], [made], [again], asked(names))
    assert [row["fitted"] for row in told["rows"]] == [True, True]  # the same answers in the same steps
    assert told["mean_abs_error"] is None
    faster = outcome("asd", ASD, 8.0)
    wall = sum(row.wall_s for row in rows) - STEP * sum(steps) / 2
    predicted = predict.predict([strict, faster], [made], [made], asked(names))["predicted_tps"]
    assert predicted["asd"] == pytest.approx(sum(outputs) / wall, rel=1e-6)


def test_a_sampled_baseline_that_answers_twice_is_what_was_fitted():
    steps, prompts, outputs, names = drawn(20)
    rows = [
        row
        for shift in (0, 3)  # blocks of the baseline before and after a candidate's: other answers to the same items
        for row in rows_of("chain", "chain", [s + shift for s in steps], prompts, outputs, (0.02, 1e-4, 6e-3), names)
    ]
    made = bench({"chain": ("chain", rows)}, temperature=1.0)
    found = predict.predict([outcome("chain", Policy("chain"), 4.0)], [made], [made], asked(names, 1.0))
    assert [row["fitted"] for row in found["rows"]] == [True]
    assert found["mean_abs_error"] is None


def test_a_load_that_was_not_measured_is_not_predicted():
    steps, prompts, outputs, names = drawn(8)
    rows = rows_of("strict", "strict", steps, prompts, outputs, (FIXED, PROMPT, STEP), names)
    times, live = (bench({"strict": ("strict", rows)}, batch=batch, run=str(batch)) for batch in (1, 8))
    (row,) = predict.predict([outcome("strict", Policy("strict"), 4.0)], [times], [live], asked(names))["rows"]
    assert [row[name] for name in ("predicted_tps", "error", "predicted_own_tps")] == [None] * 3


@pytest.mark.parametrize("ratio", [1.0, 1.15])
def test_a_rule_that_costs_more_per_step_is_predicted_with_its_own(ratio):
    live, names = two_arms(ratio)
    outcomes = [outcome("strict", Policy("strict"), 4.0), outcome("own", SLOW, 5.0)]
    found = predict.predict(outcomes, [live], [live], asked(names))
    row = found["rows"][1]
    assert row["own_step"] == pytest.approx(ratio, rel=1e-6)
    assert row["error_own"] == pytest.approx(0, abs=1e-6)
    assert (row["error"] > 0.05) == (ratio > 1)
    assert found["mean_abs_error"] == pytest.approx(abs(row["error"]))
    assert found["mean_abs_error_own"] == pytest.approx(0, abs=1e-6)
    assert row["own_from"] == "the prompts' other half"


def test_no_half_sees_its_own_rows():
    live, _ = two_arms(1.2)
    whole = predict._own(live, SLOW.key, [])
    for half in (0, 1):
        spoilt = predict.Bench(
            live.record,
            [
                msgspec.structs.replace(row, wall_s=2 * row.wall_s)
                if row.arm == "own" and predict.half_of(row) == half
                else row
                for row in live.rows
            ],
        )
        found = predict._own(spoilt, SLOW.key, [])
        assert found[0][half] == whole[0][half]
        assert found[0][1 - half] != whole[0][1 - half]


def test_costs_of_another_run_leave_out_the_prompts_that_are_checked():
    live, names = two_arms(1.2)
    outcomes = [outcome("strict", Policy("strict"), 4.0), outcome("own", SLOW, 5.0)]
    same, _ = two_arms(1.2, run="same")
    (row,) = predict.predict(outcomes, [live], [live], asked(names), [same])["rows"][1:]
    assert (row["own_step"], row["error_own"]) == (None, None)  # every prompt of it is the live run's
    other, _ = two_arms(1.3, seed=1, first=1000, run="other")
    (row,) = predict.predict(outcomes, [live], [live], asked(names), [same, other])["rows"][1:]
    assert row["own_step"] == pytest.approx(1.3, rel=1e-6)
    assert row["own_from"] == "other"


CASES = [
    ({"facts": FACTS | {"engine version": "2"}}, {}, "engine version: expected the capture's '1', found '2'"),
    ({"facts": FACTS | {"draft": "x"}}, {}, "draft: expected the capture's 'd', found 'x'"),
    ({"facts": FACTS | {"target": "x"}}, {}, "target: expected the capture's 't', found 'x'"),
    ({"facts": FACTS | {"K": 5}}, {}, "K: expected the capture's 7, found 5"),
    ({"temperature": 1.0}, {}, "temperature: expected the capture's 0, found 1"),
    ({}, {"filters": "top_k=-1, top_p=0.9"}, "top_k, top_p: expected the capture's top_k=-1, top_p=0.9, found none"),
    ({}, {"names": hashes(30, 500)}, "traffic: 0 of its 40 prompts are among the capture's 30"),
]


@pytest.mark.parametrize(("run", "capture", "why"), CASES, ids=[why.split(":")[0] for *_, why in CASES])
def test_what_is_unlike_is_listed_with_its_reason_and_never_paired(run, capture, why):
    steps, prompts, outputs, names = drawn(40)
    rows = rows_of("strict", "strict", steps, prompts, outputs, (FIXED, PROMPT, STEP), names)
    live, times = bench({"strict": ("strict", rows)}, **run), bench({"strict": ("strict", rows)}, run="times")
    found = predict.predict(
        [outcome("strict", Policy("strict"), 4.0)], [times], [live], asked(**{"names": names, **capture})
    )
    assert found["rows"] == []
    assert found["refused"] == [{"name": "strict", "run": "run", "arm": "strict", "why": [why]}]
    if run:
        with pytest.raises(TaskError, match=r"replay\.times: run"):
            predict.predict([], [live], [times], asked(names))


def test_a_run_of_some_of_the_captures_prompts_is_of_its_traffic():
    steps, prompts, outputs, names = drawn(40)
    rows = rows_of("strict", "strict", steps, prompts, outputs, (FIXED, PROMPT, STEP), names)
    live = bench({"strict": ("strict", rows)})
    assert predict.arm_differs(live, "strict", asked(hashes(400))) == []
    assert predict.arm_differs(live, "strict", asked(hashes(10))) == []
    (why,) = predict.arm_differs(live, "strict", asked(hashes(40, 20)))
    assert why == "traffic: 20 of its 40 prompts are among the capture's 40"


def test_what_a_capture_asks_for_is_in_its_requests():
    n = 3
    columns = {
        "request": np.arange(n),
        "flags": np.full(n, 3),
        "temperature": np.full(n, 0.8, np.float32),
        "live": np.full(n, 7),
    }
    table = Table(columns, [[1], [2], []], np.arange(n), np.ones(n, int), np.full(n, NO_CUT), ["a", "b", "c"])
    manifest = {"engine": {"name": "e", "version": "1"}, "target": {"name": "x/t"}, "draft": {"name": "d"}, "K": 7}
    infos = {0: {"top_k": 1 << 30, "top_p": 1.0}, 1: {"top_k": -1, "top_p": 1.0}, 2: {}}
    found = predict.asked(manifest | {"vocabulary": 2048}, infos, table)
    assert found == predict.Asked(FACTS, frozenset([0.8]), None, frozenset(hashes(2, 1)))
    infos[1] = {"top_k": 50, "top_p": 0.95}
    assert predict.asked(manifest | {"vocabulary": 2048}, infos, table).filters == "top_k=50, top_p=0.95"
