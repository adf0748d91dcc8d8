"""Whole sweeps: all launchers do the same; a killed one loses nothing and repeats nothing; a failed point is told."""

import importlib.util
import os
import signal
from collections import Counter

import msgspec
import pytest
from msgspec.structs import replace

from harness.config import load
from harness.records.provenance import identity
from harness.records.read import read_all
from harness.records.run import identity_digest, plan_digest
from harness.records.schema import digest, seal
from harness.records.sweeps import Point, joined, manifest, read_sweeps, write
from harness.sweep import difference

START = 2 + 2 * 3  # answers of a run that are not measured: the probe, and two items in three arms
POINT = 2 * 3  # answers of a point: two items in three arms
AXES = ("policy.budget=1,2", "policy.max_mismatches=1,2")
INSTALLED = {
    name: importlib.util.find_spec(f"hydra_plugins.hydra_{name}_launcher") is not None for name in ("joblib", "ray")
}


def finish(process) -> tuple[str, str]:
    out, err = process.communicate(timeout=280)
    assert "Traceback" not in err, err
    return out, err


def check(results, points: int) -> list:
    """Each point has its record, and there is no other."""
    runs = read_all(results)
    assert [problem for run in runs for problem in run.problems] == []
    (wanted,) = read_sweeps(results)
    pairs = joined(wanted, runs)
    assert len(pairs) == points
    assert all(run is not None and run.complete for _, run in pairs)
    assert len(runs) == points
    for point, run in pairs:
        told = run.record.workload["sweep"]
        assert (told["id"], told["point"], told["points"]) == (wanted.id, point.point, points)
        policy = run.record.arms["asd"].policy
        assert (policy["budget"], policy["max_mismatches"]) == (
            point.point["policy.budget"],
            point.point.get("policy.max_mismatches", policy["max_mismatches"]),
        )
        assert len({(row.arm, row.item) for row in run.rows}) == len(run.rows) == POINT
    return runs


@pytest.mark.skipif(not INSTALLED["joblib"], reason="hydra-joblib-launcher is not installed")
def test_a_killed_sweep_loses_nothing_and_repeats_nothing(sweep, engine, tmp_path):
    """Two jobs at a time: killed when two points are done and two are in the middle, or nearly so."""
    killed_at = 3 * (START + POINT) + 11
    results = tmp_path / "results"
    process = sweep(*AXES, "sweep.launcher=joblib", "sweep.jobs=2")

    def seen(number: int) -> None:
        if number == killed_at:
            os.killpg(process.pid, signal.SIGKILL)

    engine.seen = seen
    process.communicate(timeout=280)
    assert process.returncode == -signal.SIGKILL
    before = {run.record.id: run for run in read_all(results)}
    proven = {run.record.asked: (run.folder / "checkpoints.jsonl") for run in before.values() if not run.complete}
    units = sum(len(path.read_bytes().splitlines()) for path in proven.values())
    done = sum(run.complete for run in before.values())
    engine.seen, engine.asked = lambda number: None, 0
    process = sweep(*AXES, "sweep.launcher=joblib", "sweep.jobs=2")
    out, err = finish(process)
    assert f"4 points, {done} already complete" in err
    runs = check(results, 4)
    for run in runs:
        if run.record.id in before and before[run.record.id].complete:
            assert run.record == before[run.record.id].record  # what was there is as it was
    assert Counter(len(run.record.segments) for run in runs)[2] == len(before) - done
    starts = 4 - done
    assert engine.asked <= (4 - done) * POINT - 3 * units + START * starts
    assert engine.asked >= (4 - done) * POINT - 3 * units
    assert out.count("budget=") >= 4
    engine.asked = 0
    out, err = finish(sweep(*AXES, "sweep.launcher=joblib", "sweep.jobs=2"))
    assert "4 points, 4 already complete" in err
    assert engine.asked == 0
    assert os.listdir(tmp_path / "here") == []


def test_a_point_that_fails_is_told_and_the_others_run(sweep, engine, tmp_path, scratch):
    first = START + POINT
    engine.seen = lambda number: 1 / 0 if first < number <= first + 1 else None
    process = sweep("policy.budget=1,2,4")
    out, err = finish(process)
    assert process.returncode == 2
    runs = read_all(tmp_path / "results")
    assert sorted(run.record.status for run in runs) == ["complete", "complete", "failed"]
    lines = [line for line in err.splitlines() if "sweep " in line]
    told = next(place for place, line in enumerate(lines) if "2/3 policy.budget=2: LaunchError: " in line)
    assert told < next(place for place, line in enumerate(lines) if "3/3 policy.budget=4: starting" in line)
    assert "not run (failed: LaunchError: " in out
    assert [name for name in os.listdir(scratch) if name.startswith("specaccept-sweep")] == []
    engine.seen = lambda number: None
    out, err = finish(sweep("policy.budget=1,2,4"))
    assert "3 points, 2 already complete" in err
    assert sum(run.complete for run in read_all(tmp_path / "results")) == 3


def as_of_another_commit(results) -> str:
    """The only sweep below results with its runs, as older code would have left them: its id."""
    code = {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False, "sha256": "0" * 64}
    (told,) = read_sweeps(results)
    for run in read_all(results):
        record = run.record
        record.identity.code, record.asked = code, digest([record.asked])
        record.identity.plan = plan_digest(record.identity)
        record.identity.digest = identity_digest(record.identity)
        record.id = f"20000101T000000Z-{record.asked[:8]}"
        record.seal = seal(record)
        (run.folder / "record.json").write_bytes(msgspec.json.encode(record))
        run.folder.rename(run.folder.with_name(record.id))
    (results / "sweeps" / f"{told.id}.json").unlink()
    points = [Point(point.point, digest([point.plan])) for point in told.points]
    return write(results, manifest(told.task, told.base, told.axes, points)).stem


def test_points_of_an_earlier_sweep_that_are_measured_again_are_named_with_the_reason(sweep, tmp_path):
    results = tmp_path / "results"
    finish(sweep("policy.budget=1,2"))
    first = as_of_another_commit(results)
    assert [run.problems for run in read_all(results)] == [[], []]
    _, err = finish(sweep("policy.budget=2,4"))
    assert "2 points, 0 already complete" in err
    told = f"1 point complete in sweep {first}, measured again: the code is another: commit 0123456789ab"
    assert told in err
    assert "content 000000000000 there" in err
    _, err = finish(sweep("policy.budget=4,2"))  # by plan these are the same points: nothing is measured again
    assert "2 points, 2 already complete" in err
    assert "measured again" not in err


def test_a_difference_names_the_field():
    plans = [
        replace(identity(load([*more]), {}), code={"commit": None}) for more in ([], ["policy.budget=4"], ["seed=1"])
    ]
    assert difference(plans[0], plans[1]) == f"config.policy.budget: {load().policy.budget!r} there, 4.0 now"
    assert difference(plans[0], plans[2]) == "config.traffic.seed: 980406 there, 1 now"
    assert difference(plans[0], plans[0]) == "its plan is another"


@pytest.mark.skipif(not INSTALLED["ray"], reason="hydra-ray-launcher is not installed")
def test_ray_runs_the_points_on_a_local_cluster(sweep, tmp_path):
    finish(sweep("policy.budget=1,2", "sweep.launcher=ray", "sweep.jobs=2"))
    check(tmp_path / "results", 2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "sweep: expected an override with several values"),
        (("policy.budget=1,-1",), "budget"),
        (("policy.budget=1,2", "sweep.launcher=dask"), "sweep.launcher: expected one of serial, joblib, ray, slurm"),
        (("policy.budget=1,2", "sweep.jobs=0"), "sweep.jobs: expected an integer >= 1, found 0"),
        (("policy.budget=1,2", "sweep.jobs=x"), "sweep.jobs: expected an integer >= 1, found 'x'"),
        (("policy.budget=1,2", "sweep.task=tables"), "sweep.task: expected one of bench, gate"),
        (("policy.budget=1,2", "sweep.size=1"), "unknown override sweep.size"),
        (("policy.budjet=1,2",), "budjet"),
        (("policy=asd,no-such",), "policy: expected one of"),
        (
            ("policy.budget=1,2", "out=/proc/nobody/writes/here"),
            "out: expected a folder that can be written, found /proc/",
        ),
        (("policy.budget=1,2,1.0",), "sweep: expected points that differ, found policy.budget=1 and policy.budget=1.0"),
        (("policy.budget=interval(1,2)",), "policy.budget: expected values to try in turn"),
    ],
)
def test_a_sweep_that_cannot_be_is_one_line(harness, tmp_path, more, words):
    status, out, err = harness("task=sweep", *more)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert read_all(tmp_path / "results") == []
