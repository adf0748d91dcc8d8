"""The harness against LightLLM's real start command, with an invented model behind it (double/lightllm/server)."""

from __future__ import annotations

import signal

import lightllm_rig as rig
import pytest

from adapters.policy import ENVIRONMENT
from adapters.telemetry import file_hashes
from harness import __main__ as cli
from harness.interrupt import SIGNALS
from harness.records.read import read_all

COMMON = ["experiment=lightllm-tiny", "engine.cuda=false", "launch.stop_timeout_s=1", "engine.ready_timeout_s=60"]
UNARMED = ["task=gate", "task.baseline=unarmed"]
MIXED = ["task.concurrency=4", "task.repeat=true", "engine.flags.disable_dynamic_prompt_cache=false"]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """run(overrides..., fault=) -> (exit status, output, record, rows)."""
    rig.forget()
    monkeypatch.setenv("PYTHONPATH", str(rig.DOUBLE))
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.syspath_prepend(str(rig.DOUBLE))
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def go(*overrides: str, fault: str = "none"):
        monkeypatch.setenv("FAKE_FAULT", fault)
        file_hashes.cache_clear()  # of a process that lives longer than one run
        status = cli.main([*COMMON, f"out={tmp_path}", *overrides])
        (found,) = read_all(tmp_path)
        return status, "".join(capfd.readouterr()), found.record, found.rows

    yield go
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_gate_that_fails(run):
    """Two servers and one for the control; the unarmed one is started without the adapter."""
    status, text, record, _rows = run(*UNARMED, "limit=6", "task.control=3", fault="b0")
    assert status == 1, text
    assert list(record.arms) == ["unarmed", "asd-b0", "control"]
    assert record.gates["identity"]["mismatches"] == record.gates["identity"]["compared"] == 6


def test_prompts_repeated_and_sampled_requests_mixed_in(run):
    status, text, record, rows = run(*UNARMED, *MIXED, "limit=10", "task.control=4", "task.mix_sampled=0.3")
    assert status == 0, text
    assert record.gates["identity"]["mismatches"] == 0
    assert any(row.cached_tokens > 0 for row in rows)
    assert any(row.seed is not None for row in rows)
    unarmed = [row for row in rows if row.arm == "unarmed"]
    assert all(row.steps > 0 and row.proposed > 0 and row.relaxed == 0 for row in unarmed)
    assert record.arms["unarmed"].counters_after is None


def test_a_bench_of_arms_side_by_side(run):
    _status, text, record, rows = run("task=bench", "arms=[unarmed,asd-b0,asd]", "limit=4", "task.warmup=1")
    assert list(record.arms) == ["unarmed", "asd-b0", "asd"], text
    assert {name: sum(row.arm == name for row in rows) for name in record.arms} == dict.fromkeys(record.arms, 4)
    assert not any(row.error for row in rows)
    assert record.gates["identity"]["mismatches"] == 0
