"""Gates and verdicts of a record, from rows alone: what is held against which arm, and what is excused."""

import numpy as np
import pytest

from adapters.policy import Policy
from harness.records import Row
from harness.records.schema import Arm, Identity, Record
from harness.tasks.arms import prove, prove_sampled
from harness.tasks.summary import judge, summarize

STRICT, B0, ASD = Policy("strict"), Policy("asd"), Policy("asd", 2.0, 2.0, 1)
POLICIES = {"unarmed": None, "strict": STRICT, "strict-again": STRICT, "asd-b0": B0, "asd": ASD}
THRESHOLDS = dict.fromkeys(("tps_gain", "tps_cost", "accuracy_drop", "length_change"))
VERDICT = THRESHOLDS | {"drift": 0.03, "loops": 0.02, "alpha": 0.05}
ENGINE = {"per_request_policy": True, "fixed_width": True, "flags": {}}
ITEMS = 60


def answer(arm, n, speed=1.0, noise=0.0, **more):
    """20 ids; a budget relaxes one and changes it. speed: of 1,000 tokens/s, with noise of its own in each item."""
    policy = POLICIES[arm]
    lossy = policy is not None and not policy.is_strict
    wall = 0.02 / speed * (1 + noise * np.random.default_rng([n, len(arm)]).normal())
    values = {
        "policy_key": "unarmed" if policy is None else policy.key,
        "order": n,
        "item": f"i{n}",
        "task": "math",
        "prompt_sha256": "p",
        "prompt_tokens": 1,
        "started_s": float(n),
        "wall_s": wall,
        "output_ids": [*range(19), 77 if lossy else 19],
        "finish": "stop",
        "steps": 5,
        "proposed": 35,
        "accepted": 15,
        "histogram": [0, 0, 0, 5],
        "relaxed": int(lossy),
        "regret": 0.5 * lossy,
        "spent": 0.5 * lossy,
        "outcome": "correct",
    }
    return Row(arm=arm, **values | more)


def counters(rows):
    total = {name: sum(getattr(row, name) for row in rows) for name in ("steps", "proposed", "relaxed", "accepted")}
    return {
        "requests": len(rows),
        "blocks": total["steps"],
        "drafts_verified": total["proposed"],
        "strict_accepted": total["accepted"] - total["relaxed"],
        "relaxed": total["relaxed"],
        "regret_charged": sum(row.regret for row in rows),
        "committed_tokens": sum(len(row.output_ids) for row in rows),
        "fallbacks": {},
    }


def record(rows, task="bench", verdict=VERDICT, engine=ENGINE, **workload):
    names = list(dict.fromkeys(row.arm for row in rows))
    keys = {name: "unarmed" if POLICIES[name] is None else POLICIES[name].key for name in names}
    arms = {
        name: Arm(
            policy={"rule": "unarmed"} if POLICIES[name] is None else POLICIES[name].to_json(),
            policy_key=keys[name],
            policy_source="test",
            temperature=0.0,
            expected=sum(row.arm == name for row in rows),
            counters_after=None
            if POLICIES[name] is None
            else counters([row for row in rows if keys[row.arm] == keys[name]]),
        )
        for name in names
    }
    config = {"model": {"gpus": 0, "block_size": 7}, "engine": engine, "verdict": verdict}
    identity = Identity(plan="p", digest=None, config=config, code={}, target={}, draft={}, data={})
    work = {"items": sorted({row.item for row in rows}), "concurrency": 1, "servers": [names]} | workload
    return Record(
        id="r", task=task, status="complete", created="c", identity=identity, environment={}, workload=work, arms=arms
    )


def judged(rows, **more):
    """(outcome, reasons, gates, summary of the arms)"""
    made = record(rows, **more)
    gates, verdict = judge(made, rows)
    return verdict.outcome, verdict.reasons, gates, summarize(made, rows)["arms"]


def bench(**speeds):
    """Rows of arms by name (`_` for `-`), each as fast as given."""
    named = {name.replace("_", "-"): speed for name, speed in speeds.items()}
    return [answer(arm, n, speed, noise=0.05) for n in range(ITEMS) for arm, speed in named.items()]


def test_without_thresholds_a_sound_run_passes_however_slow():
    outcome, reasons, _, arms = judged(bench(strict=1, asd_b0=0.9, asd=0.5))
    assert (outcome, reasons) == ("pass", [])
    assert not any("verdict" in arm for arm in arms.values())


def test_the_same_policy_twice_must_not_differ():
    assert judged(bench(strict=1, asd=1.1, strict_again=1))[0] == "pass"
    outcome, reasons, _, _ = judged(bench(strict=1, asd=1.1, strict_again=1.05))
    assert outcome == "inconclusive"
    assert [reason[:56] for reason in reasons] == ["strict-again: tokens/s: expected an interval around 0 fo"]


@pytest.mark.parametrize(
    ("speed", "outcome"), [(1.2, "pass"), (1.0, "fail"), (1.05, "inconclusive")], ids=["faster", "as fast", "near"]
)
def test_a_gain_against_its_threshold(speed, outcome):
    found = judged(bench(strict=1, asd_b0=1, asd=speed), verdict=VERDICT | {"tps_gain": 0.05})
    assert found[0] == outcome
    assert found[3]["asd"]["verdict"]["outcome"] == outcome
    assert found[3]["asd"]["verdict"]["criteria"]["tps_gain"]["outcome"] == outcome
    assert "verdict" not in found[3]["asd-b0"]  # it promises ids, not speed
    if outcome != "pass":
        assert found[1] == [f"asd: {reason}" for reason in found[3]["asd"]["verdict"]["reasons"]]
        assert found[1][0].startswith("asd: tps_gain: expected at least +5 %, found ")


def test_the_cost_of_being_armed_is_of_the_arms_that_change_nothing():
    limits = VERDICT | {"tps_cost": -0.01}
    assert judged(bench(unarmed=1, asd_b0=1.01, asd=0.5), verdict=limits)[0] == "pass"
    outcome, reasons, _, _ = judged(bench(unarmed=1, asd_b0=0.9), verdict=limits)
    assert (outcome, reasons[0][:43]) == ("fail", "asd-b0: tps_cost: expected at least -1 %, f")


def test_accuracy_and_length():
    rows = bench(strict=1, asd=1)
    for row in rows:
        if row.arm == "asd":
            row.output_ids = [*range(19), 77, 5, 6]
            row.outcome = "wrong" if row.order % 2 else "correct"
    limits = VERDICT | {"accuracy_drop": 1.0, "length_change": 0.03}
    outcome, reasons, _, arms = judged(rows, verdict=limits)
    assert outcome == "fail"
    assert "asd: accuracy_drop: expected at least -1 pp, found -50.00 pp" in " ".join(reasons)
    assert "asd: length_change: expected -3 to +3 %, found +10.00 % [+10.00, +10.00]" in reasons
    assert arms["asd"]["change"]["accuracy"]["p_holm"] == arms["asd"]["change"]["accuracy"]["p_value"]


def test_accuracy_tests_are_corrected_for_their_number():
    rows = bench(strict=1, asd_b0=1, asd=1, strict_again=1)
    for row in rows:
        if row.arm == "asd" and row.order < 6:
            row.outcome = "wrong"
    found = judged(rows)[3]
    p = {name: arm["change"]["accuracy"] for name, arm in found.items() if "change" in arm}
    assert p["asd"]["p_holm"] == pytest.approx(2 * p["asd"]["p_value"])  # of asd and asd-b0; A/A is no comparison
    assert "p_holm" not in p["strict-again"]


def test_an_older_record_is_read_as_it_was_written():
    rows = bench(strict=1, asd=1.1, strict_again=1.5)
    made = record(rows)
    del made.identity.config["verdict"]
    del made.workload["servers"]
    made.arms.pop("strict-again")
    rows = [row for row in rows if row.arm != "strict-again"]
    made.arms["strict"].counters_after = counters([row for row in rows if row.arm == "strict"])
    gates, verdict = judge(made, rows)
    assert (verdict.outcome, set(gates)) == ("pass", {"armed"})
    assert "p_holm" not in summarize(made, rows)["arms"]["asd"]["change"]["accuracy"]


def test_arms_that_share_counters_are_proven_by_their_sum():
    rows = bench(strict=1, strict_again=1)
    made = record(rows)
    made.arms["strict"].counters_after["blocks"] += 1
    _, verdict = judge(made, rows)
    assert verdict.outcome == "fail"
    made = record(rows, servers=[["strict"], ["strict-again"]])  # on servers of their own each counts for itself
    assert judge(made, rows)[1].outcome == "fail"


def test_an_engine_of_varying_width_has_no_identity_and_no_accuracy_arm():
    rows = bench(strict=1, asd_b0=1, asd=1)
    rows[1].output_ids = [9] * 20
    assert judged(rows)[0] == "fail"
    limits = VERDICT | {"accuracy_drop": 1.0}
    outcome, _, gates, arms = judged(rows, engine=ENGINE | {"fixed_width": False}, verdict=limits)
    assert (outcome, "identity" in gates, "verdict" in arms["asd"]) == ("pass", False, False)


def blocks(mismatches, repeats):
    """Rows of a schedule of blocks: `mismatches` answers of asd-b0, `repeats` of the second baseline differ."""
    rows = []
    for chunk in range(3):
        for place, arm in enumerate(("strict", "asd-b0", "strict")):
            for n in range(10 * chunk, 10 * chunk + 10):
                changed = n < (0, mismatches, repeats)[place]
                ids = [*range(19), 42] if changed else [*range(20)]
                number = 3 * chunk + place
                rows.append(answer(arm, n, output_ids=ids, block=number, started_s=100.0 * number))
    return rows


@pytest.mark.parametrize(
    ("mismatches", "repeats", "outcome"),
    [(0, 0, "pass"), (1, 0, "pass"), (3, 2, "pass"), (9, 0, "fail"), (30, 2, "fail"), (0, 30, "pass")],
)
def test_a_difference_in_a_batch_is_measured_by_the_baselines_own(mismatches, repeats, outcome):
    rows = blocks(mismatches, repeats)
    made = record(rows, concurrency=4)
    read = {"requests": 10, "blocks": 50, "drafts_verified": 350, "relaxed": 0}
    arms = {row.block: row.arm for row in rows}
    made.launch = {"blocks": [{"block": n, "arm": arm, "moved": read, "others": []} for n, arm in arms.items()]}
    gates, verdict = judge(made, rows)
    assert verdict.outcome == outcome, verdict.reasons
    assert (gates["identity"]["mismatches"], gates["repeat"]["mismatches"]) == (mismatches, repeats)
    made.identity.config["engine"] = ENGINE | {"flags": {"enable-deterministic-inference": True}}
    assert judge(made, rows)[1].outcome == ("fail" if mismatches else "pass")  # told to be exact
    made.launch["blocks"].pop()
    assert judge(made, rows)[1].outcome == "fail"


def sampled(n, key="strict"):
    return answer("asd", n, policy_key=key, output_ids=[*range(20)], relaxed=0, regret=0.0, spent=0.0)


def proof(rows, beside, policy=ASD, **change):
    """Of an arm of a server with one policy, sampled requests between its own."""
    told = counters(rows) | {"requests": len(rows) + len(beside), "fallbacks": {"sampled request": len(beside)}}
    if policy is STRICT:  # strict serves both
        told = counters([*rows, *beside]) | {"fallbacks": told["fallbacks"]}
    arm = Arm(
        policy=policy.to_json(),
        policy_key=policy.key,
        policy_source="test",
        temperature=0.0,
        expected=len(rows),
        counters_after=told | change,
    )
    return [problem.text for problem in prove("a", arm, rows, 7, (), beside)]


@pytest.mark.parametrize(("name", "policy"), [("asd", ASD), ("strict", STRICT)])
def test_sampled_requests_between_are_counted_exactly(name, policy):
    rows, beside = [answer(name, n) for n in range(4)], [sampled(n) for n in range(2)]
    assert proof(rows, beside, policy) == []
    assert "a: requests: the answers say 6" in proof(rows, beside, policy, requests=7)[0]
    text = "a: sampled request: 2 were asked, the counter of fallbacks moved by 1"
    assert proof(rows, beside, policy, fallbacks={"sampled request": 1}) == [text]
    assert proof(rows, beside, policy, fallbacks={"sampled request": 2, "lost": 1}) == [
        "a: served by another rule (lost: 1)"
    ]
    assert proof(rows, [], policy, fallbacks={"sampled request": 2}) != []


def test_a_sampled_answer_relaxes_nothing():
    arm = record([answer("asd", n) for n in range(2)]).arms["asd"]
    assert prove_sampled("s", arm, [sampled(n) for n in range(2)], 7) == []
    (problem,) = prove_sampled("s", arm, [sampled(0), sampled(1, ASD.key)], 7)
    assert problem.text == f"s: answers under policy '{ASD.key}', expected the engine's own"
    assert prove_sampled("s", arm, [sampled(0)], 7)[0].outcome == "inconclusive"


def test_a_run_that_was_stopped_is_no_pass():
    outcome, reasons, _, _ = judged(bench(strict=1, asd=1), stopped="after task.seconds=5")
    assert (outcome, reasons) == ("inconclusive", ["stopped after task.seconds=5"])


def test_fixed_work_is_of_as_many_ids_as_asked():
    rows = bench(strict=1, asd=1)
    assert judged(rows, fixed_tokens=20)[0] == "pass"
    outcome, reasons, _, _ = judged(rows, fixed_tokens=21)
    assert (outcome, reasons[0]) == ("fail", "strict: fixed work: expected 21 ids, found 20 for i0 (60 answers)")
