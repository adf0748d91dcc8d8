"""How fast replay decides. One run; the numbers are of this machine, now."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapters.capture import Blocks, Recorder, Settings
from adapters.policy import Policy
from harness.replay import reader, rules
from harness.replay.table import NO_CUT, Table, select

K, VOCABULARY = 7, 64
POLICIES = (
    Policy("strict"),
    Policy("asd", 2.0625, 2.0625, 1, "normalized"),
    Policy("asd", 8.0, 0.25, 2),
    Policy("relaxed-topk", top_n=10, delta=0.6),
    Policy("relaxed-ratio", top_n=3, ratio=0.5),
    Policy("typical", epsilon=0.09, alpha=0.3),
    Policy("thresholds", threshold_single=0.2, threshold_acc=0.5),
    Policy("chain"),
    Policy("block"),
    Policy("entropy", alpha=0.4, tau=0.95),
)
NEED_Q = ("chain", "block", "entropy")


def made_up(positions: int, blocks_per_request: int = 500, seed: int = 0) -> Table:
    """Blocks with plausible scalars: two of three drafts match, regrets are exponential."""
    rng = np.random.default_rng(seed)
    n = max(positions // K, 1)
    first = np.arange(0, n, blocks_per_request)
    matched = rng.random((n, K), np.float32) < 0.67
    regret = np.where(matched, 0, rng.exponential(2.0, (n, K))).astype(np.float32)
    z_max = rng.normal(20, 2, (n, K + 1)).astype(np.float32)
    lse = z_max + rng.exponential(0.5, (n, K + 1)).astype(np.float32)
    entropy = rng.exponential(0.7, (n, K + 1)).astype(np.float32)
    z_x = z_max[:, :-1] - regret
    log_p = z_x - lse[:, :-1]
    argmax = rng.integers(0, VOCABULARY, (n, K + 1), dtype=np.int32)
    columns: dict[str, Any] = {
        "request": np.repeat(np.arange(len(first), dtype=np.int32), blocks_per_request)[:n],
        "live": np.full(n, K, np.int32),
        "flags": np.full(n, 3, np.int32),
        "temperature": np.ones(n, np.float32),
        "length": np.zeros(n, np.int32),
        "draft": np.where(matched, argmax[:, :-1], VOCABULARY).astype(np.int32),
        "argmax": argmax,
        "rank": np.where(matched, 0, rng.integers(1, 40, (n, K))).astype(np.int32),
        "z_x": z_x,
        "z_max": z_max,
        "lse": lse,
        "entropy": entropy,
        "entropy_raw": entropy,
        "log_p": log_p,
        "log_q": np.minimum(log_p + rng.normal(0, 0.3, (n, K)), 0).astype(np.float32),
        "excess": rng.random((n, K), np.float32),
    }
    count = np.diff(np.r_[first, n])
    return Table(columns, [[]] * len(first), first, count, np.full(n, NO_CUT), [""] * len(first))


def rates(positions: int) -> None:
    """Prints seconds and positions per minute: of every policy, and of reading shards."""
    torch.set_num_threads(1)
    table = made_up(positions)
    verified = table.positions
    print(f"{verified:,} positions in {len(table):,} blocks of {len(table.first):,} requests, one thread")
    print(f"{'policy':44s} {'seconds':>8s} {'million positions/min':>22s}")
    total = 0.0
    for policy in POLICIES:
        for cached in ("verified", "matched", "regret", "drawn"):
            table.__dict__.pop(cached, None)
        started = time.perf_counter()
        rules.tokens(rules.survival(policy, table), table)
        seconds = time.perf_counter() - started
        total += seconds if policy.rule not in NEED_Q else 0.0
        print(f"{policy.key:44s} {seconds:8.2f} {verified / seconds * 60 / 1e6:22.0f}")
    count = sum(policy.rule not in NEED_Q for policy in POLICIES)
    print(f"{f'the {count} that need only the target':44s} {total:8.2f} {verified / total * 60 / 1e6:22.0f}")
    _reading()


def _reading(blocks: int = 32_768, rows: int = 64) -> None:
    with tempfile.TemporaryDirectory() as folder:
        about = {"engine": {"name": "made up"}, "target": {"name": "-"}, "draft": {"name": "-"}, "tokenizer": {}}
        about |= {"policy": None, "logits": "raw", "temperature_applied": False}  # type: ignore[dict-item]
        recorder = Recorder(Settings(Path(folder), queue_mb=4096), "made-up", K, VOCABULARY, about)
        numbers = [recorder.enter(str(n), "strict") for n in range(rows)]
        logits = torch.randn(rows, K + 1, VOCABULARY, generator=torch.Generator().manual_seed(0))
        top = logits.argmax(-1)
        for step in range(blocks // rows):
            recorder.add(
                Blocks(
                    numbers, [step] * rows, [0] * rows, [0] * rows, [1.0] * rows, top[:, 0], top[:, :K], logits, top,
                    length=[K] * rows, bonus=top[:, K].tolist(),
                )
            )  # fmt: skip
        recorder.close()
        started = time.perf_counter()
        table, _ = select(reader.read(Path(folder)), "strict")
        seconds = time.perf_counter() - started
    rate = table.positions / seconds * 60 / 1e6
    print(f"{'reading shards, SHA-256 checked':44s} {seconds:8.2f} {rate:22.0f}   ({table.positions:,} positions)")
