"""make bench-load: whether the client keeps up with an engine that answers many requests at once.

    python -m harness.load [--concurrency 1,16,64,256] [--seconds 10] [--beside "PYTHON -m sglang.bench_serving"]

A mock engine (mock.py) answers on this machine after times that are known, and notes when each request came and went.
For each concurrency the client asks it for --seconds; then the client beside it, if one is named, asks the same. One
table comes of one run: requests per second beside those that the mock alone would allow, tokens per second of the timed
window beside the mock's own account of it, seconds added to each answer, CPU per token of the client's process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.engines.transport import Transport
from harness.load.mock import service_s

TOKENS = (32, 48, 64)  # asked for in turn: requests that all end at one instant are no traffic
PROMPT = 200
MOST_ERROR = 0.005


@dataclass(frozen=True)
class Measured:
    """One client at one concurrency. Rates per second; errors as fractions; cpu_token_s: CPU seconds per token."""

    client: str
    concurrency: int
    rate: float
    ideal: float
    tps_error: float
    added_s: float | None
    cpu_token_s: float

    def row(self) -> str:
        added = "not said" if self.added_s is None else f"{1e3 * self.added_s:.2f} ms"
        return (
            f"{self.client:14} {self.concurrency:4} {self.rate:9.1f} {100 * self.rate / self.ideal:6.1f} % "
            f"{100 * self.tps_error:+9.3f} % {added:>10} {1e6 * self.cpu_token_s:9.1f} us"
        )


HEAD = f"{'client':14} {'c':>4} {'req/s':>9} {'of ideal':>8} {'TPS error':>11} {'added':>10} {'CPU/token':>12}"


@contextmanager
def mock() -> Iterator[str]:
    argv = [sys.executable, "-m", "harness.load.mock"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


def truth(url: str) -> list[tuple[float, float, int]]:
    transport = Transport(url)
    try:
        return [
            (arrived, left, tokens)
            for arrived, left, tokens in json.loads(transport.send("GET", "/truth", None, 60)[1])
        ]
    finally:
        transport.close()


def tps(seen: Sequence[tuple[float, float, int]]) -> float:
    """Tokens per second from the first arrival to the last departure, on the mock's clock."""
    first, last = min(arrived for arrived, _, _ in seen), max(left for _, left, _ in seen)
    return sum(tokens for _, _, tokens in seen) / (last - first)


def own(url: str, concurrency: int, requests: int) -> Measured:
    argv = [sys.executable, "-m", "harness.load.client", url, "--requests", str(requests)]
    argv += ["--concurrency", str(concurrency), "--prompt", str(PROMPT), "--tokens", ",".join(map(str, TOKENS))]
    told = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    return judged("specaccept", concurrency, told, truth(url))


def judged(client: str, concurrency: int, told: dict[str, Any], seen: Sequence[tuple[float, float, int]]) -> Measured:
    """What a client told, beside what the mock saw of it. Raises ValueError where they did not do the same work."""
    if len(seen) != told["answers"] or sum(tokens for _, _, tokens in seen) != told["tokens"]:
        raise ValueError(f"{client}: answers: the mock gave {len(seen)}, the client has {told['answers']}")
    window = told["ended"] - told["started"]
    added = (
        (told["wall_s"] - sum(left - arrived for arrived, left, _ in seen)) / len(seen) if "wall_s" in told else None
    )
    return Measured(
        client=client,
        concurrency=concurrency,
        rate=told["answers"] / window,
        ideal=concurrency / fmean(service_s(tokens) for _, _, tokens in seen),
        tps_error=(told["tokens"] / window) / tps(seen) - 1,
        added_s=added,
        cpu_token_s=told["cpu_s"] / told["tokens"],
    )


def beside(
    command: str, url: str, concurrency: int, requests: int, tokenizer: str, start: tuple[float, int] = (0.0, 0)
) -> tuple[Measured, tuple[float, int]]:
    """sglang.bench_serving on the same mock: same number of requests, equal mean length. Also its CPU and tokens.

    start: CPU and tokens of a run of next to no requests: what it spends on starting is no part of its CPU per token.
    """
    length = round(fmean(TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        argv = [*shlex.split(command), "--backend", "sglang", "--base-url", url, "--dataset-name", "random-ids"]
        argv += ["--num-prompts", str(requests), "--max-concurrency", str(concurrency), "--tokenizer", tokenizer]
        argv += ["--random-input-len", str(PROMPT), "--random-output-len", str(length), "--random-range-ratio", "1"]
        argv += ["--model", "mock", "--output-file", str(out), "--warmup-requests", "1", "--tokenize-prompt"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        truth(url)
        done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        if done.returncode or not out.exists():
            raise ValueError(f"{command}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = json.loads(out.read_text().splitlines()[-1])
    seen = truth(url)[1:]  # the first is its warm-up
    cpu, tokens = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, found["total_output_tokens"]
    told = {"started": 0.0, "ended": found["duration"], "answers": found["completed"], "tokens": tokens, "cpu_s": cpu}
    measured = judged("bench_serving", concurrency, told, seen)
    if tokens > start[1]:
        measured = replace(measured, cpu_token_s=(cpu - start[0]) / (tokens - start[1]))
    return measured, (cpu, tokens)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrency", default="1,4,16,64,256", help="requests in flight (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--beside", help="command of sglang.bench_serving, of any environment")
    parser.add_argument("--tokenizer", default="recipes/checkpoints/tiny-qwen3", help="of bench_serving")
    given = parser.parse_args()
    print(HEAD)
    worst = 0.0
    with mock() as url:
        start = (0.0, 0)
        if given.beside:
            try:
                start = beside(given.beside, url, 1, len(TOKENS), given.tokenizer)[1]
            except ValueError as error:
                print(f"bench_serving: not run: {error}")
                given.beside = None
        for concurrency in map(int, given.concurrency.split(",")):
            mean = fmean(map(service_s, TOKENS))
            requests = len(TOKENS) * max(1, round(given.seconds * concurrency / mean / len(TOKENS)))
            found = own(url, concurrency, requests)
            worst = max(worst, abs(found.tps_error))
            print(found.row(), flush=True)
            if given.beside:
                try:
                    other = beside(given.beside, url, concurrency, requests, given.tokenizer, start)[0]
                    print(other.row(), flush=True)
                except ValueError as error:
                    print(f"{'bench_serving':14} {concurrency:4} not run: {error}", flush=True)
    told = "at most" if worst <= MOST_ERROR else "more than"
    print(f"largest TPS error {100 * worst:.3f} %: {told} {100 * MOST_ERROR:g} %")
    print(f"cores {len(os.sched_getaffinity(0))}, load average {os.getloadavg()[0]:.1f}: the mock shares them")
    return 0 if worst <= MOST_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())
