"""Whole runs, killed with SIGKILL in the middle and started again: the engine dies too, the measurement goes on."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from harness.records import Row
from harness.records.read import read_all
from harness.tasks.tables_check import recomputed

HERE = Path(__file__).parent
TIMES = ("started_s", "wall_s", "server_s", "segment")


@pytest.fixture
def lives(overrides, tmp_path):
    """Run lives of the harness; (their statuses, the only run, what was written to stderr)."""

    def run(*points: tuple[int, int] | None, more: tuple[str, ...] = (), name: str = "results"):
        environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}", "FAKE_FAULT": "none"}
        argv = [sys.executable, "-m", "harness_rig", json.dumps(points), *overrides, *more, f"out={tmp_path / name}"]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
        statuses = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("life: ")]
        assert len(statuses) == len(points), done.stderr
        (found,) = read_all(tmp_path / name)
        assert found.problems == []
        return statuses, found, done.stderr

    return run


def content(run) -> dict:
    """What does not depend on the clock, the machine's load, or on how often the run was begun."""
    record = run.record
    order = sorted(
        run.rows, key=lambda row: (row.order, row.arm, row.block or 0)
    )  # of several in flight any may be first
    rows = [msgspec.to_builtins(row) | dict.fromkeys(TIMES) for row in order]
    counted = {}
    for name, arm in record.arms.items():
        before, after = arm.counters_before or {}, arm.counters_after or {}
        counted[name] = {key: after[key] - before.get(key, 0) for key in after if key != "fallbacks"}
    gates = {name: value for name, value in record.gates.items() if name in ("armed", "identity", "control")}
    return {"rows": rows, "counted": counted, "gates": gates, "identity": record.identity, "workload": record.workload}


@pytest.mark.parametrize(
    ("task", "kills", "more"),
    [
        ("bench", 2, ()),
        ("bench", 1, ("task.concurrency=2", "task.block=2", "task.aa=true")),
        ("gate", 1, ("task.chunk=2",)),
        ("calibrate", 1, ("task.items=6",)),
    ],
    ids=["bench", "blocks", "gate", "calibrate"],
)
def test_a_killed_run_ends_like_one_that_was_not(lives, task, kills, more):
    more = (f"task={task}", *more)
    (_,), whole, err = lives(None, more=more, name="whole")
    assert whole.record.status == "complete", err
    draw = random.Random("".join(more))
    points = [(draw.randrange(3, 6), draw.randrange(1, 400)) for _ in range(kills)]
    statuses, run, err = lives(*points, None, more=more)
    assert statuses[:-1] == [-signal.SIGKILL] * kills
    assert "is continued: killed after" in err
    assert run.record.status == "complete", err
    assert content(run) == content(whole)
    assert recomputed(run) == []
    segments = run.record.segments
    assert [segment.end for segment in segments] == [*["killed"] * kills, "finished"]
    assert len({nonce for segment in segments for nonce in segment.nonces}) == len(segments)  # an engine each
    assert all(segment.unproven or segment.rows for segment in segments)
    if task == "calibrate":
        assert run.record.summary == whole.record.summary
    answers = {(row.arm, row.item, row.block) for row in run.rows}
    assert len(answers) == len(run.rows)
    aside = run.folder / "unproven.jsonl"
    lines = aside.read_bytes().splitlines() if aside.exists() else []
    unproven = [msgspec.json.decode(line, type=Row) for line in lines]
    assert len(unproven) == sum(segment.unproven for segment in segments)
    assert all((row.arm, row.item, row.block) in answers for row in unproven)


def test_a_run_killed_when_all_is_answered_needs_no_engine_to_end(lives):
    statuses, run, err = lives((0, 5), None)
    assert statuses[0] == -signal.SIGKILL
    assert run.record.status == "complete", err
    assert [(segment.rows, len(segment.nonces)) for segment in run.record.segments] == [(18, 1), (0, 0)]


def test_never_begins_another_run(lives, tmp_path):
    lives((3, 5))
    with pytest.raises(ValueError, match="too many values"):
        lives(None, more=("resume=never",))
    assert sorted(run.record.status for run in read_all(tmp_path / "results")) == ["complete", "incomplete"]


def test_a_run_whose_engine_died_goes_on_when_asked_and_survives_a_start_that_fails(harness, tmp_path):
    status, _, _ = harness(fault="die", after=12)  # the fifth measured answer is the first of the second item
    assert status == 2
    status, _, err = harness("resume=failed", fault="refuse")
    assert status == 2
    (run,) = read_all(tmp_path / "results")
    assert run.record.status == "incomplete"  # nothing was asked: what there is can still be continued
    status, _, err = harness()
    (run,) = read_all(tmp_path / "results")
    assert run.problems == []
    assert run.record.status == "complete", err
    assert [(segment.rows, segment.unproven, len(segment.nonces)) for segment in run.record.segments] == [
        (3, 6, 1),
        (0, 0, 0),
        (15, 0, 1),
    ]
    assert all(row.error is None for row in run.rows)
    assert recomputed(run) == []
