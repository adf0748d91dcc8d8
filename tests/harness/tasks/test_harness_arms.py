"""Whole runs of named arms on the fake engine: A/A, servers side by side, no adapter, blocks, sampled, repeated."""

import pytest

from harness.config import ConfigError, load
from harness.publish import cells, labels
from harness.records.read import read_all
from harness.tasks.tables_check import recomputed

UNARMED = ["engine.unarmed_why=null", "engine.unarmed_env={FAKE_UNARMED: '1'}"]
BESIDE = [*UNARMED, "launch.together=true"]
NOISE = ("tokens/s: expected an interval",)  # what a loaded machine makes of a moment's work: no pass, and no fail


@pytest.fixture
def runs(harness, tmp_path):
    """A run, its record read back: (status, run, stderr). Whatever the machine's noise says, nothing else speaks
    against it."""

    def start(*more, fault="none", after=0):
        status, _, err = harness(*more, fault=fault, after=after)
        run = read_all(tmp_path / "results")[-1]
        assert run.problems == []
        assert recomputed(run) == []
        return status, run, err

    return start


def sound(run):
    assert run.record.status == "complete", run.record.error
    return [reason for reason in run.record.verdict.reasons if not any(word in reason for word in NOISE)] == []


def blocks_of(run):
    rows = sorted(run.rows, key=lambda row: row.block)
    return [next(row.arm for row in rows if row.block == n) for n in range(1 + max(row.block for row in rows))]


def test_named_arms_and_the_baseline_twice(runs):
    _, run, _ = runs("arms=[strict,asd-stable,asd-b0]", "task.aa=true", "limit=4")
    assert sound(run)
    assert list(run.record.arms) == ["strict", "asd-stable", "asd-b0", "strict-again"]
    assert run.record.workload["servers"] == [["strict", "asd-stable", "asd-b0", "strict-again"]]
    once, twice = (run.record.arms[name] for name in ("strict", "strict-again"))
    moved = twice.counters_after["requests"] - (twice.counters_before or {"requests": 0})["requests"]
    assert (once.policy_key, once.counters_after, moved) == ("strict", twice.counters_after, 8)  # one counter, two arms
    assert run.record.gates["identities"]["strict-again"]["mismatches"] == 0
    assert run.record.summary["arms"]["asd-stable"]["change"]["accuracy"]["p_holm"] is not None


def test_shared_counters_are_summed_not_believed(runs):
    status, run, _ = runs("arms=[strict,asd-b0]", "task.aa=true", "limit=2", fault="overcount")
    assert status == 1
    assert any("strict-again: blocks: the answers say" in reason for reason in run.record.verdict.reasons)


def test_servers_side_by_side_and_one_without_the_adapter(runs):
    _, run, err = runs(*BESIDE, "arms=[unarmed,strict,asd-b0,asd]", "limit=4")
    assert sound(run)
    assert "2 servers (unarmed; strict, asd-b0, asd)" in err
    arm = run.record.arms["unarmed"]
    assert (arm.policy, arm.policy_key) == ({"rule": "unarmed"}, "unarmed")
    assert arm.counters_before is arm.counters_after is None
    assert {row.policy_key for row in run.rows if row.arm == "unarmed"} == {"unarmed"}
    assert [row.order for row in run.rows] == [order for order in range(4) for _ in range(4)]  # item by item over both
    assert [server["armed"] for server in run.record.launch["servers"]] == [False, True]
    assert (run.folder / "engine.log").read_text().count("ready on") == 2
    assert not list(run.folder.glob("engine-*.log"))
    assert run.record.gates["identity"]["mismatches"] == run.record.gates["identities"]["strict"]["mismatches"] == 0


def test_two_servers_an_arm_take_the_items_in_turn(runs):
    _, run, err = runs(*BESIDE, "arms=[unarmed,strict,asd]", "task.aa=true", "launch.replicas=2", "limit=6")
    assert sound(run)
    assert "6 servers (unarmed; strict, asd; unarmed-again)" in err
    assert [(row.order, row.replica) for row in run.rows] == [(n, n % 2) for n in range(6) for _ in range(4)]
    assert [share["requests"] for share in run.record.launch["shards"]["strict"]] == [3, 3]
    assert (run.folder / "engine.log").read_text().count("ready on") == 6
    assert not list(run.folder.glob("engine-*.log"))
    found = run.record.summary["arms"]["strict"]["change"]
    assert [each["n"] for each in found["tps_by_server"]] == [3, 3]
    assert found["tps"]["method"].startswith("bootstrap over 2 servers")
    assert found["tokens_per_item"]["method"].startswith("BCa")  # no server changes an answer
    assert "(2 servers an arm)" in labels.title(run.record)
    columns, rows = cells.bench_table(run.record)
    told = {row[0]: row[1:] for row in rows}
    assert told["TPS change, by server"][0] == told["beside A/A"][0] == "baseline"
    assert all(cell.count("%") == 2 for cell in told["TPS change, by server"][1:])
    assert told["beside A/A"][3] == "A/A itself"
    assert "answered by 2 servers in turn" in cells.footnote(rows, columns, run.record)


@pytest.mark.parametrize("fault", ["overcount", "frozen"])
def test_counters_of_each_server_are_held_against_its_own_answers(runs, fault):
    status, run, _ = runs("launch.replicas=2", "arms=[strict,asd]", "limit=2", fault=fault, after=3)
    assert status == 1
    assert any("replica 1" in reason for reason in run.record.verdict.reasons)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["task.concurrency=2"], "launch.replicas: with launch=process expected task.concurrency=1, found 2"),
        (["task=gate"], "launch.replicas: with launch=process of a bench, found task=gate"),
        (["launch=attach", "url=http://127.0.0.1:1"], "launch.replicas: .* found it with launch=attach"),
    ],
)
def test_servers_in_turn_are_of_a_bench_with_one_request_at_a_time(overrides, more, words):
    with pytest.raises(ConfigError, match=words):
        load([*overrides, "launch.replicas=2", *more])


def test_no_server_of_a_run_is_without_an_item(harness, tmp_path):
    status, out, err = harness("launch.replicas=3", "arms=[strict,asd]", "limit=2")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1] == "specaccept: launch.replicas: expected 2 or fewer, an item each, found 3"
    assert read_all(tmp_path / "results") == []


def test_servers_one_after_another_end_with_the_baseline(runs):
    _, run, _ = runs(*UNARMED, "arms=[unarmed,strict,asd]", "limit=3")
    assert sound(run)
    assert run.record.workload["servers"] == [["unarmed"], ["strict", "asd"], ["unarmed-again"]]
    assert list(run.record.arms) == ["unarmed", "strict", "asd", "unarmed-again"]


@pytest.mark.parametrize(
    ("more", "fault", "words"),
    [
        (["engine.unarmed_why=null"], "none", "expected no snapshot of an unarmed engine, found one"),
        (BESIDE, "unarmed", "not armed"),  # the absence is accepted of that one arm alone
        ([*BESIDE, "engine.unarmed_env={FAKE_UNARMED: '1', FAKE_FAULT: refuse}"], "none", "draft: expected a folder"),
    ],
)
def test_a_server_that_is_not_what_its_arm_says_ends_the_run(harness, tmp_path, more, fault, words):
    status, out, err = harness(*more, "arms=[unarmed,strict]", "limit=2", fault=fault)
    assert (status, "verdict" in out) == (2, False)
    assert words in err
    (run,) = read_all(tmp_path / "results")
    assert (run.record.status, run.rows) == ("failed", [])


def test_an_unarmed_arm_is_proven_by_its_answers(runs):
    status, run, _ = runs(*BESIDE, "arms=[unarmed,strict]", "limit=2", fault="drafts")
    assert status == 2
    assert "unarmed: no drafts were verified" in run.record.verdict.reasons


def test_blocks_above_concurrency_one(runs):
    more = ["arms=[strict,asd-b0,asd]", "task.concurrency=3", "task.block=4", "verdict.drift=1e9", "limit=12"]
    status, run, _ = runs(*more, "verdict=armed-cost", "verdict.tps_cost=-0.99")
    assert status in (0, 2)
    one, other = (
        ["strict", *pair] for pair in (("asd-b0", "strict", "asd", "strict"), ("asd", "strict", "asd-b0", "strict"))
    )
    assert blocks_of(run) == [*one, *other, *one]
    assert {name: arm.expected for name, arm in run.record.arms.items()} == {"strict": 36, "asd-b0": 12, "asd": 12}
    found = run.record.summary["arms"]
    assert found["strict"]["items"] == found["asd"]["items"] == 12
    assert found["asd"]["wall_per_item"] is None
    assert found["asd"]["triplets"]["rejected"] == []
    assert found["asd"]["change"]["tps"] == found["asd"]["triplets"]["gain"]
    assert found["asd"]["change"]["tps"]["n"] == 3
    assert len(run.record.launch["blocks"]) == 15
    assert all(block["others"] == [] and block["moved"]["requests"] == 4 for block in run.record.launch["blocks"])
    assert run.record.gates["repeat"]["mismatches"] == 0
    assert set(found["asd-b0"]["verdict"]["criteria"]) == {"tps_cost"}
    assert "verdict" not in found["asd"]


def test_a_block_with_a_failed_request_is_in_no_gain(runs):
    more = ["arms=[strict,asd]", "task.concurrency=2", "task.block=2", "verdict.drift=1e9", "limit=4", "task.warmup=0"]
    status, run, _ = runs(*more, fault="flaky", after=5)  # 2 probes, then the fourth request of the schedule
    assert status == 2
    (failed,) = [row for row in run.rows if row.error]
    assert failed.block in (0, 1, 2)
    assert run.record.summary["arms"]["asd"]["change"]["tps"]["n"] == 1


def test_blocks_need_servers_that_are_up_together(harness, tmp_path):
    status, _, err = harness(*UNARMED, "arms=[unarmed,strict]", "task.concurrency=2", "limit=2")
    assert (status, "launch.together=true" in err) == (2, True)
    assert read_all(tmp_path / "results") == []


def test_measuring_stops_on_time(runs):
    status, run, _ = runs("arms=[strict,asd]", "task.seconds=1e-9", "limit=5")
    assert status == 2
    assert "stopped after task.seconds=1e-09" in run.record.verdict.reasons
    assert len({row.item for row in run.rows}) < 5


def test_a_gate_against_the_engine_without_its_adapter(runs):
    more = [
        "task=gate",
        "task.baseline=unarmed",
        "task.concurrency=3",
        "task.mix_sampled=0.5",
        "limit=8",
        "task.control=4",
    ]
    status, run, _ = runs(*BESIDE, *more)
    assert (status, run.record.verdict.reasons) == (0, [])
    names = ["unarmed", "sampled-unarmed", "asd-b0", "control", "sampled-asd-b0"]
    assert {name: run.record.arms[name].expected for name in names} == dict(zip(names, (8, 4, 8, 4, 4), strict=True))
    assert run.record.arms["sampled-asd-b0"].policy_key == "chain"
    assert (run.record.gates["identity"]["compared"], run.record.gates["identity"]["mismatches"]) == (8, 0)
    assert {row.policy_key for row in run.rows if row.arm == "sampled-unarmed"} == {"unarmed"}


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        (["task.concurrency=2"], 2, "it may be rounding"),
        (["engine.list_requests=false"], 1, "asd-b0: 3 of 3 outputs differ from strict, first"),
    ],
)
def test_ids_that_differ_are_a_failure_where_batches_are_reproducible(runs, more, status, words):
    found, run, _ = runs("task=gate", "limit=3", *more, fault="b0")
    assert found == status
    assert any(words in reason for reason in run.record.verdict.reasons)


@pytest.mark.parametrize(("fault", "status"), [("cached", 0), ("none", 2)])
def test_repeated_prompts_must_come_from_the_prefix_cache(runs, fault, status):
    found, run, _ = runs("task=gate", "limit=3", "task.repeat=true", "task.concurrency=1", fault=fault)
    assert found == status, run.record.verdict.reasons
    assert sorted(row.block for row in run.rows if row.arm == "strict") == [0, 0, 0, 1, 1, 1]
    assert run.record.gates["identity_repeated"]["asd-b0"]["compared"] == 3
    assert any("is the prefix cache on?" in reason for reason in run.record.verdict.reasons) == (status == 2)


def test_a_list_holds_compared_requests_alone(harness):
    status, _, err = harness("task=gate", "task.mix_sampled=0.5")
    assert (status, "expected task.concurrency=N" in err) == (2, True)


def test_fixed_work_is_equal_and_not_scored(runs):
    _, run, _ = runs("arms=[strict,asd]", "task.fixed_tokens=40", "limit=4")
    assert sound(run)
    assert {len(row.output_ids) for row in run.rows} == {40}
    assert {row.outcome for row in run.rows} == {None}
    assert run.record.summary["arms"]["asd"]["change"]["tokens_per_item"]["value"] == 0
