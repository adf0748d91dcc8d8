"""What a capture costs the embedded engine: tokens/s with it over without, item by item in turn in one process.

Least: the engine's thread alone, which measures the blocks as well, 64 at a time and so in every third answer or so.
Most: the CPU time of the writer, which measures what a round leaves and makes the files, added to it as if no core were
free. A pair is one prompt with and without, one right behind the other, so that the load of the machine is in both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from harness.records.run import now, write_atomically
from harness.stats import change

FOLDER = "captures"  # below results
BAR = 0.03  # most of the tokens/s that a compact capture may cost
NEW_TOKENS = 128
COLUMNS = (
    "engine",
    "capture",
    "cost of TPS, writer's work included, 95 %",
    "engine's thread alone",
    "pairs",
    "machine",
)


class CostError(ValueError):
    """A record of costs that cannot be read."""


class Cost(msgspec.Struct, forbid_unknown_fields=True):
    """provenance: code, machine, command. report: estimates and, for every pair, the seconds they are made of."""

    provenance: dict[str, Any]
    report: dict[str, Any]


def measure(prompts: int, rounds: int, rows: float, sampled: bool, command: Sequence[str]) -> Cost:
    """The tiny pair, one request at a time: greedy under strict, or sampled at temperature 1 under chain."""
    import torch

    from adapters.capture import Settings
    from adapters.policy import Policy
    from harness.engines.reference.benchmark import PAIR, prompts_of, read_pair
    from harness.engines.reference.capture import Capture
    from harness.engines.reference.engine import Request
    from harness.engines.reference.loading import Options, build, set_threads
    from harness.engines.reference.sampling import Sampling
    from harness.records.provenance import code, environment

    target, draft_folder = PAIR / "tiny-qwen3", PAIR / "tiny-qwen3-dspark-block7"
    model, draft = read_pair(target, draft_folder, torch.float32, "cpu")
    set_threads(model, None)
    work = prompts_of(target, prompts)
    temperature, policy = (1.0, Policy("chain")) if sampled else (0.0, None)
    params = Sampling(temperature=temperature, max_new_tokens=NEW_TOKENS, seed=0, policy=policy)
    options = Options(str(target), str(draft_folder), slots=1, limit=max(map(len, work)) + NEW_TOKENS)
    engine = build(model, draft, options)
    provenance = {"date": now(), "code": code(), "environment": environment(), "command": " ".join(command)}
    # seconds: without, with, with and the CPU time of the writer, of a round and shared by its prompts; the same of all
    # the process's CPU time.
    seconds, cpu = np.zeros((2, rounds + 1, len(work), 3))
    tokens = np.zeros(len(work), np.int64)
    with tempfile.TemporaryDirectory() as folder:
        capture = Capture(Settings(Path(folder), rows=rows), engine, options.target, options.draft)
        for turn in track(range(rounds + 1), "rounds", console=Console(stderr=True), transient=True):
            for index, prompt in enumerate(work):
                for on in (False, True) if (index + turn) % 2 else (True, False):
                    engine.capture = capture if on else None
                    begin, spent = time.perf_counter(), time.process_time()
                    done = engine.generate([Request("cost", prompt, params)])[0]
                    found, used = time.perf_counter() - begin, time.process_time() - spent
                    tokens[index] = len(done.output)
                    seconds[turn, index, int(on)], cpu[turn, index, int(on)] = found, used
            spent = time.process_time()
            if not capture.recorder.sync(60):
                raise CostError(f"capture: expected its files within 60 s, found {capture.recorder.error}")
            files = (time.process_time() - spent) / len(work)
            seconds[turn, :, 2], cpu[turn, :, 2] = seconds[turn, :, 1] + files, cpu[turn, :, 1] + files
        capture.close()
        recorder = capture.recorder
    if recorder.error is not None:
        raise CostError(f"capture: {recorder.error}")
    # The first time through warmed up.
    return Cost(provenance, report(seconds[1:], cpu[1:], tokens, rows, sampled, recorder.blocks, recorder.dropped))


def report(
    seconds: NDArray[Any],
    cpu: NDArray[Any],
    tokens: NDArray[Any],
    rows: float,
    sampled: bool,
    blocks: int,
    dropped: int,
) -> dict[str, Any]:
    """seconds, cpu [rounds, prompts, 3]: without, with, with and the writer's work. tokens [prompts]."""
    rounds, prompts = seconds.shape[:2]
    units = list(range(prompts)) * rounds  # a prompt asked again is no new one
    off, most_on = seconds[..., 0].ravel(), seconds[..., 2].ravel()

    def tps_change(on: NDArray[Any]) -> dict[str, Any]:
        return asdict(change(on, off, clusters=units))

    return {
        "engine": "specaccept-reference",
        "rows": rows,
        "sampled": sampled,
        "prompts": prompts,
        "rounds": rounds,
        "tokens": int(tokens.sum() * rounds),
        "tps_without": float(tokens.sum() * rounds / off.sum()),
        "tps_with": float(tokens.sum() * rounds / most_on.sum()),
        "most": tps_change(most_on),
        "least": tps_change(seconds[..., 1].ravel()),
        "median_of_pairs": float(np.median(off / most_on) - 1),
        "cpu_most": float(cpu[..., 0].sum() / cpu[..., 2].sum() - 1),
        "blocks": blocks,
        "dropped": dropped,
        "bar": BAR,
        "within_bar": within_bar(tps_change(most_on)),
        "seconds": seconds.round(6).tolist(),
    }


def within_bar(found: dict[str, Any]) -> bool | None:
    """Whether the cost is at most BAR; None: the interval holds both."""
    if found["low"] is None or found["low"] < -BAR <= found["high"]:
        return None
    return bool(found["low"] >= -BAR)


def write(path: Path, cost: Cost) -> None:
    """A new file: nothing measured is overwritten."""
    if path.exists():
        raise CostError(f"{path}: expected no file, found one")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(cost), indent=1) + b"\n")


def read_all(results: Path) -> list[tuple[str, Cost]]:
    """(path below results, record), oldest first. Raises CostError naming the file."""
    found = []
    for path in sorted((results / FOLDER).glob("*.json")):
        try:
            found.append((f"{FOLDER}/{path.name}", msgspec.json.decode(path.read_bytes(), type=Cost)))
        except (OSError, ValueError) as error:
            raise CostError(f"{FOLDER}/{path.name}: {str(error).splitlines()[0]}") from None
    return sorted(found, key=lambda each: str(each[1].provenance["date"]))


def row(cost: Cost) -> list[str]:
    """Cells of COLUMNS."""
    told, machine = cost.report, cost.provenance["environment"]
    rows = "compact" if not told["rows"] else f"full rows of {told['rows']:.0%}"
    return [
        told["engine"],
        f"{rows}, sampled" if told.get("sampled") else rows,
        f"{_percent(told['most'])} ({_verdict(told['within_bar'])})",
        _percent(told["least"]),
        f"{told['prompts']} prompts x {told['rounds']}",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average'][0]:g}",
    ]


def _percent(found: dict[str, Any]) -> str:
    value, low, high = (found[name] for name in ("value", "low", "high"))
    interval = "too few" if low is None else f"{100 * low:+.1f}, {100 * high:+.1f}"
    return f"{100 * value:+.1f} % [{interval}]"


def _verdict(within: bool | None) -> str:
    return {True: "within", False: "beyond", None: "not decided against"}[within] + f" the bar of {BAR:.0%}"


def show(cost: Cost) -> None:
    told = cost.report
    print(f"{told['prompts']} prompts x {told['rounds']}, one at a time; {row(cost)[1]}; {told['tokens']:,} tokens")
    print(f"tokens/s {told['tps_without']:.1f} without, {told['tps_with']:.1f} with the writer's work in the window")
    for name, text in (("most", "writer's work included"), ("least", "engine's thread alone")):
        print(f"change of tokens/s, {text}: {_percent(told[name])}")
    print(f"median of pairs {100 * told['median_of_pairs']:+.1f} %, CPU time {100 * told['cpu_most']:+.1f} %")
    print(f"{told['blocks']:,} blocks captured, {told['dropped']} dropped: {_verdict(told['within_bar'])}")
