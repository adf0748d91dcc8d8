"""Tensor parallel for real, as far as CPUs go: two processes of a gloo group, each with the engine's own accept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each rank saw of each case of rank_process.py."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    command = [sys.executable, str(Path(__file__).with_name("rank_process.py")), str(store)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, str(rank)], cwd=ROOT, env=env, **pipes) for rank in range(2)]
    found = []
    try:
        for process in started:
            out, error = process.communicate(timeout=280)
            assert process.returncode == 0, error[-3000:]
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return found


@pytest.mark.parametrize(("case", "blocks"), [("asd", 2000), ("block", 64)])
def test_ranks_with_equal_logits_agree_by_themselves(ranks, case, blocks):
    first, second = (rank[case] for rank in ranks)
    assert len(first["lengths"]) >= blocks
    assert first == second
    assert first["ranks"] == {"size": 2, "differences": 0, "ledger_spread": 0.0}
    assert first["own_lengths"] == first["lengths"]
    assert (sum(first["spent"]) > 0) == (case == "asd")


def test_where_ranks_differ_rank_zero_wins_and_its_ledger_is_everyones(ranks):
    first, second = (rank["asd apart"] for rank in ranks)
    apart = sum(a != b for a, b in zip(first["own_lengths"], second["own_lengths"], strict=True))
    assert apart > 0  # or the rest shows nothing
    assert first["lengths"] == second["lengths"] == first["own_lengths"]
    assert first["out_tokens"] == second["out_tokens"]
    assert first["ranks"] == second["ranks"] == {"size": 2, "differences": apart, "ledger_spread": 0.0}
    assert first["spent"] == second["spent"]
