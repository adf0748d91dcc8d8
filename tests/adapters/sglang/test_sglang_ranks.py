"""Tensor parallel for real, as far as CPUs go: two processes of a gloo group, each with the engine's own accept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = 2048  # of B > 0


def run(tmp_path, *arguments: str) -> list[dict]:
    """One process per rank; what each saw."""
    command = [sys.executable, str(Path(__file__).with_name("rank_process.py")), str(tmp_path / "store"), *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    if arguments[0] == "block":
        env["TRITON_INTERPRET"] = "1"  # the engine's sampling kernels
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT, env=env, **pipes) for rank in range(2)]
    found = []
    try:
        for rank in ranks:
            out, error = rank.communicate(timeout=100)
            assert rank.returncode == 0, error[-3000:]
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return found


@pytest.mark.parametrize(("rule", "count"), [("asd", BLOCKS), ("block", BLOCKS // 16)])
def test_ranks_with_equal_logits_agree_by_themselves(tmp_path, rule, count):
    first, second = run(tmp_path, rule, str(count), "0")
    assert first["lengths"] == second["lengths"]
    assert first["out_tokens"] == second["out_tokens"]
    assert first["ranks"] == second["ranks"] == {"size": 2, "differences": 0, "ledger_spread": 0.0}
    assert first["blocks"] >= count
    assert first["spent"] == second["spent"]
    assert (sum(first["spent"]) > 0) == (rule == "asd")


def test_where_ranks_differ_rank_zero_wins_and_its_ledger_is_everyones(tmp_path):
    first, second = run(tmp_path, "asd", str(BLOCKS // 8), "1")
    assert first["own_lengths"] != second["own_lengths"]  # or the rest shows nothing
    assert first["lengths"] == second["lengths"] == first["own_lengths"]
    assert first["out_tokens"] == second["out_tokens"]
    assert first["ranks"] == second["ranks"]
    assert first["ranks"]["differences"] == sum(
        a != b for a, b in zip(first["own_lengths"], second["own_lengths"], strict=True)
    )
    assert first["ranks"]["ledger_spread"] == 0.0
    assert first["spent"] == second["spent"]
