"""Ctrl-C, SIGTERM and SIGKILL in the middle of a run: the engine is gone, what was measured is kept."""

import os
import signal
import subprocess
import sys

import msgspec
import pytest

from harness.records import Row
from harness.records.read import read_all

WARM = 8  # two probes and two warm-up items of three arms


@pytest.fixture
def running(overrides, ticks, tmp_path):
    """A run of 300 items, stopped by `stop` after its 12th measured answer: (status, stderr)."""

    def stop(number: signal.Signals, *more: str, fault: str = "slow", answers: int = WARM + 12) -> tuple[int, str]:
        argv = [sys.executable, "-m", "harness", *overrides, "limit=300", *more]
        here = os.path.dirname(os.path.dirname(__file__))
        environment = os.environ | {"PYTHONPATH": here, "FAKE_FAULT": fault}
        process = subprocess.Popen(
            argv,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background job
        )
        with open(ticks, "rb") as pipe:
            pipe.read(answers)
            os.killpg(process.pid, number)
            _, err = process.communicate()
            pipe.read()  # ends when the engine has ended
        return process.returncode, err

    return stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_stopped_bench_keeps_its_rows(running, tmp_path, number):
    status, err = running(number)
    assert status == 128 + number
    assert f"stopped by {number.name}" in err
    assert "Traceback" not in err
    (run,) = read_all(tmp_path / "results")
    assert run.problems == []
    assert run.record.status == "incomplete"
    assert run.record.error == f"interrupted by {number.name}"
    assert run.record.verdict is None
    assert 11 <= len(run.rows) < 900
    assert all(row.error is None for row in run.rows)
    assert all(arm.expected == 300 for arm in run.record.arms.values())


def test_a_killed_bench_leaves_no_engine_and_a_readable_journal(running, tmp_path):
    status, _ = running(signal.SIGKILL)
    assert status == -signal.SIGKILL
    (run,) = read_all(tmp_path / "results")
    assert run.problems == []
    assert run.record.status == "incomplete"
    lines = (run.folder / "requests.jsonl").read_bytes().splitlines()
    assert len([msgspec.json.decode(line, type=Row) for line in lines]) >= 11


def test_a_stopped_gate_keeps_its_rows(running, tmp_path):
    status, _ = running(signal.SIGINT, "task=gate", "task.chunk=4")
    assert status == 130
    (run,) = read_all(tmp_path / "results")
    assert run.record.status == "incomplete"
    assert run.rows


def test_an_engine_that_is_still_starting_is_stopped(running, tmp_path):
    status, err = running(signal.SIGINT, fault="never-ready", answers=0)
    assert status == 130
    assert "stopped by SIGINT" in err
    (run,) = read_all(tmp_path / "results")
    assert run.record.status == "incomplete"
    assert run.rows == []
