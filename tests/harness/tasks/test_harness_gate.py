"""The identity gate: what it passes, what it fails, and when it has shown nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.publish import sections
from harness.publish.selection import Shown
from harness.records.read import read_all
from harness.tasks.tables_check import recomputed

HERE = Path(__file__).parents[1]


def test_a_gate_that_passes(harness, tmp_path):
    status, out, err = harness("task=gate", "limit=40", "task.chunk=16", "task.control=8")
    (run,) = read_all(tmp_path / "results")
    assert status == 0, err
    assert run.problems == []
    assert "40 of 40 outputs compared" in out
    assert "0 differ" in out
    assert "rate at most 7.2 % (95 %)" in out  # 1 - 0.05^(1/40)
    assert len(run.rows) == 88
    assert run.record.gates["control"]["relaxed"] > 0
    assert run.record.summary["arms"]["strict"]["tps"] is None  # lists have no time of their own
    assert "40/40" in (tmp_path / "results" / "README.md").read_text()


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("b0", 1, "asd-b0: 6 of 6 outputs differ from strict, first"),
        ("lenient", 1, "strict: relaxed: expected 0"),
        ("overcount", 1, "blocks: the answers say"),
        ("silent", 1, "answers relaxed drafts and equal strict's, first"),
        ("overspent", 1, "nats, found"),
        ("uncharged", 1, "control: regret_charged: the answers say"),
        ("uncommitted", 1, "committed_tokens: the answers have"),
        ("overaccepted", 1, "strict_accepted + relaxed:"),
        ("impossible", 1, "output ids: expected at most 1 +"),
        ("histogram", 1, "histogram: expected"),
        ("inert", 2, "changed nothing on 6 items: equal ids prove nothing"),
        ("frozen", 2, "the policy never ran"),
        ("drafts", 2, "no drafts were verified"),
    ],
)
def test_a_gate_that_does_not_pass(harness, tmp_path, fault, status, words):
    found, out, _ = harness("task=gate", fault=fault)
    assert found == status
    assert words in out
    (run,) = read_all(tmp_path / "results")
    assert run.problems == []


@pytest.mark.parametrize(("fault", "status"), [("none", 0), ("b0", 1), ("drafts", 2)])
def test_the_exit_status_is_the_verdict(overrides, fault, status):
    environment = os.environ | {"PYTHONPATH": str(HERE), "FAKE_FAULT": fault}
    argv = [sys.executable, "-m", "harness", "task=gate", *overrides]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert f"verdict: {['pass', 'fail', 'inconclusive'][status]}" in done.stdout


def test_the_first_divergence_is_recorded(harness, tmp_path):
    harness("task=gate", fault="b0")
    (run,) = read_all(tmp_path / "results")
    first = run.record.gates["identity"]["first"]
    rows = {row.arm: row.output_ids for row in run.rows if row.item == first["item"]}
    at = first["position"]
    assert rows["strict"][:at] == rows["asd-b0"][:at]
    assert rows["strict"][at] != rows["asd-b0"][at]


def test_lists_are_left_out_where_an_engine_does_not_schedule_them(harness, tmp_path):
    status, _, err = harness("task=gate", "engine.list_requests=false")
    assert status == 0, err
    (run,) = read_all(tmp_path / "results")
    assert run.record.workload["concurrency"] == 1


@pytest.mark.parametrize("policy", ["strict", "asd-b0"])
def test_a_policy_without_a_budget_is_controlled_by_one_with(harness, tmp_path, policy):
    status, _, err = harness("task=gate", f"policy={policy}")
    assert status == 0, err
    (run,) = read_all(tmp_path / "results")
    assert run.record.arms["control"].policy["budget"] > 0


@pytest.mark.parametrize(("fault", "status"), [("none", 0), ("b0", 1), ("inert", 2)])
def test_a_budget_that_no_mismatch_may_use_is_held_to_the_same(harness, tmp_path, fault, status):
    found, out, err = harness("task=gate", "policy=asd-m0", fault=fault)
    assert found == status, err
    (run,) = read_all(tmp_path / "results")
    assert run.problems == []
    assert recomputed(run) == []
    arms = run.record.arms
    assert list(arms) == ["strict", "asd-m0", "control"]
    assert (arms["asd-m0"].policy["budget"], arms["asd-m0"].policy["max_mismatches"]) == (2.0625, 0)
    assert arms["asd-m0"].counters_after["blocks"] > 0
    assert arms["control"].policy["budget"] > 0
    assert arms["control"].policy["max_mismatches"] != 0
    assert run.record.gates["identity"]["compared"] == 6
    assert run.record.gates["identity"]["mismatches"] == (6 if fault == "b0" else 0)
    assert ("asd-m0: 6 of 6 outputs differ from strict" in out) == (fault == "b0")
    assert "asd-m0: every block walked" in str(sections.gate(Shown(run.record, 0, ())))


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (["policy=block"], "found policy=block (block, sampled)"),
        (["policy=relaxed-topk"], "found policy=relaxed-topk (relaxed-topk("),
        (["policy=asd-m0", "policy.max_mismatches=1"], "found policy=asd-m0 (asd(B=2.0625"),
        (["policy=asd-stable", "policy.max_mismatches=0"], "found policy=asd-stable (asd(B=8.0,g=0.25,m=0"),
    ],
)
def test_policies_that_are_neither_held_nor_a_control_are_refused(harness, tmp_path, more, found):
    status, _, err = harness("task=gate", *more)
    assert status == 2
    assert "expected policy=asd-b0 or asd-m0" in err
    assert found in err
    assert read_all(tmp_path / "results") == []


def test_a_list_that_fails_is_no_pass(harness, tmp_path):
    status, out, _ = harness("task=gate", fault="usage", after=2)
    assert status == 2
    assert "strict: nothing was answered (6 of 6 requests failed)" in out
    (run,) = read_all(tmp_path / "results")
    assert run.record.gates["identity"]["compared"] == 0
    assert len(run.rows) == 18


def test_lists_that_fail_one_after_another_end_the_run(harness, tmp_path):
    status, _, err = harness("task=gate", "task.chunk=2", fault="usage", after=2)
    assert status == 2
    assert "5 requests failed in a row" in err
    (run,) = read_all(tmp_path / "results")
    assert run.record.status == "failed"
    assert len(run.rows) == 10


def test_one_policy_per_server_means_a_server_per_arm(harness, tmp_path):
    status, _, err = harness("task=gate", "engine.per_request_policy=false")
    assert status == 0, err
    (run,) = read_all(tmp_path / "results")
    assert (run.folder / "engine.log").read_text().count("ready on") == 3
