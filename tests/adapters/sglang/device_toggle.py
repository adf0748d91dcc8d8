"""What the armed adapter costs, on one server: its hooks are taken out and put in again between requests.

    python tests/adapters/sglang/device_toggle.py [--arms off asd-b0] [--seconds 70] [--flips 20] [--out FILE]
    ... --blocks 60 --concurrency 16 --block 96        then the first set in blocks, while nothing else is in flight

`off` is the engine's own code (`toggle_plugin.py`), every other arm a policy of the request. Each prompt is asked by
all arms, forth and back (A B B A), so what a server process, its cores or its clocks have for themselves cancels. Ids
must be equal where a policy is exact. Then one long request at a time changes sides every few verify steps: the cost of
a step alone, with the wall of each step taken inside the scheduler. Ratios of tokens per second against the first arm;
intervals by a bootstrap over prompts, blocks or pairs of segments. --out is written again and again. --url: a server
that runs (another engine cannot do `off`: then `none`). Exit status 1 where ids differ or B = 0 is below 0.99.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]
from device_smoke import ARMS, SERVER, call, params, prompts, snapshot, start, stop, wait_ready  # noqa: E402

OFF = "off"
ORDER = (True, False, False, True)  # of a flipped request's segments
POLICIES = {OFF: None} | ARMS | {"asd-m0": ARMS["asd"] | {"max_mismatches": 0}}
EXACT = (OFF, "none", "strict", "asd-b0", "asd-m0")
FLIPPED = ("none", "strict", "asd-b0")  # a walk needs what its step left, and cannot change sides between the two
BAR = 0.99
RESAMPLES = 4000
ENTRY = "[sglang.srt.plugins]\nspecaccept-toggle = toggle_plugin:register\n"


class Asked(dict):
    """One answer: seconds, server (the engine's own latency), ids, steps, accepted."""


class Client:
    """Over the harness's own transport; what is timed is request and answer, not their JSON."""

    def __init__(self, url: str, tokens: int, ignore_eos: bool) -> None:
        from harness.engines.transport import Transport

        self.transport, self.tokens, self.ignore_eos = Transport(url), tokens, ignore_eos
        self.count = 0

    def ask(self, arm: str, ids: list[int], side: str | None = None, tokens: int | None = None) -> Asked:
        self.count += 1
        sampling = params(POLICIES[arm], 0.0, tokens or self.tokens, ignore_eos=self.ignore_eos or tokens is not None)
        rid = f"{side or ('off' if arm == OFF else 'on')}-{self.count}-{os.getpid()}"
        body = json.dumps({"rid": rid, "input_ids": ids, "sampling_params": sampling}).encode()
        begin = time.perf_counter()
        status, answer = self.transport.send("POST", "/generate", body, 300)
        seconds = time.perf_counter() - begin
        if status != 200:
            raise RuntimeError(f"/generate {rid}: expected 200, found {status}: {answer[:300]!r}")
        found = json.loads(answer)
        meta = found["meta_info"]
        served = (meta.get("specaccept") or {}).get("policy")
        if (served is None) != (POLICIES[arm] is None):
            raise RuntimeError(f"/generate {rid}: expected {arm}, found the policy {served}")
        return Asked(
            seconds=seconds,
            server=meta.get("e2e_latency"),
            ids=found["output_ids"],
            steps=meta.get("spec_verify_ct", 0),
            accepted=meta.get("spec_num_correct_drafts", 0),
        )


def interval(rows: list[tuple[float, float, float, float]]) -> dict[str, float | None]:
    """Ratio of (tokens, seconds) against (tokens, seconds) of the base, summed over rows, and its 95 % interval."""
    import numpy

    table = numpy.asarray(rows, dtype=float)
    draws = numpy.random.default_rng(0).integers(0, len(table), (RESAMPLES, len(table)))

    def ratio(sums):
        return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])

    low, high = numpy.quantile(ratio(table[draws].sum(1)), [0.025, 0.975]) if len(table) > 2 else (None, None)
    each = (table[:, 0] / table[:, 1]) / (table[:, 2] / table[:, 3])
    middle = numpy.quantile(numpy.median(each[draws], axis=1), [0.025, 0.975]) if len(table) > 2 else (None, None)
    found = {"ratio": ratio(table.sum(0)), "low": low, "high": high}
    found |= {"median": numpy.median(each), "median_low": middle[0], "median_high": middle[1]}
    return {k: None if v is None else round(float(v), 5) for k, v in found.items()} | {"rows": len(table)}


def summary(seen: list[dict[str, list[Asked]]], arms: list[str]) -> dict:
    """seen: per prompt or block the answers of each arm."""
    base = arms[0]

    def totals(answers: list[Asked], by: str, what: str = "") -> tuple[float, float]:
        return sum(a[what] if what else len(a["ids"]) for a in answers), sum(a[by] for a in answers)

    found: dict = {"tokens_per_second": {}, "ms_per_step": {}, "tokens_per_step": {}, "steps": {}}
    for arm in arms:
        answers = [a for row in seen for a in row[arm]]
        tokens, seconds = totals(answers, "seconds")
        steps = sum(a["steps"] for a in answers)
        found["tokens_per_second"][arm] = round(tokens / seconds, 2)
        found["ms_per_step"][arm] = round(1000 * seconds / steps, 4) if steps else None
        accepted = sum(a["accepted"] for a in answers)
        found["tokens_per_step"][arm] = round(1 + accepted / steps, 4) if steps else None
        found["steps"][arm] = steps
    for arm in arms[1:]:
        rows = [(*totals(row[arm], "seconds"), *totals(row[base], "seconds")) for row in seen]
        found[f"{arm}/{base}"] = interval(rows)
        if all(a["server"] for row in seen for a in (*row[arm], *row[base])):
            server = [(*totals(row[arm], "server"), *totals(row[base], "server")) for row in seen]
            found[f"{arm}/{base}, the engine's own latency"] = interval(server)
        paced = [(*totals(row[arm], "seconds", "steps"), *totals(row[base], "seconds", "steps")) for row in seen]
        if all(row[0] and row[2] for row in paced):
            found[f"{arm}/{base}, steps per second"] = interval(paced)
    exact = [arm for arm in arms if arm in EXACT]
    found["equal_ids"] = sum(len({tuple(a["ids"]) for arm in exact for a in row[arm]}) == 1 for row in seen)
    found["rows"], found["wall_s"] = len(seen), round(sum(a["seconds"] for r in seen for v in r.values() for a in v), 2)
    found["again"] = {}  # an A/A row: an arm on the way forth against itself on the way back
    for arm in arms:
        half = [len(row[arm]) // 2 for row in seen]
        rows = [(row[arm][:n], row[arm][n:]) for row, n in zip(seen, half, strict=True)]
        found["again"][arm] = interval(
            [(*totals(first, "seconds"), *totals(second, "seconds")) for first, second in rows]
        )
    found["raw_ms"] = [{arm: [round(1000 * a["seconds"], 3) for a in row[arm]] for arm in arms} for row in seen]
    return found


def one_by_one(client: Client, inputs: list, arms: list[str], seconds: float, write: Callable[[list], None]) -> None:
    """Forth and back; every second prompt begins at the other end."""
    seen: list[dict[str, list[Asked]]] = []
    began, written = time.monotonic(), time.monotonic()
    for turn in range(10**9):
        if time.monotonic() - began > seconds:
            break
        order = arms if turn % 2 == 0 else arms[::-1]
        row: dict[str, list[Asked]] = {arm: [] for arm in arms}
        for arm in (*order, *order[::-1]):
            row[arm].append(client.ask(arm, inputs[turn % len(inputs)]))
        seen.append(row)
        if time.monotonic() - written > 5:
            write(seen)
            written = time.monotonic()
    write(seen)


def in_blocks(
    client: Client, inputs: list, arms: list[str], seconds: float, block: int, wide: int, write: Callable[[list], None]
) -> None:
    """`block` prompts, `wide` in flight, per arm; forth and back. A block's seconds are its wall, told to one row."""
    seen: list[dict[str, list[Asked]]] = []
    began, at = time.monotonic(), 0
    with concurrent.futures.ThreadPoolExecutor(wide) as pool:
        while time.monotonic() - began < seconds or not seen:
            chosen = [inputs[(at + i) % len(inputs)] for i in range(block)]
            order = arms if len(seen) % 2 == 0 else arms[::-1]
            row: dict[str, list[Asked]] = {arm: [] for arm in arms}
            for arm in (*order, *order[::-1]):
                begin = time.perf_counter()
                answers = list(pool.map(lambda ids, arm=arm: client.ask(arm, ids), chosen))
                wall = time.perf_counter() - begin
                joined = Asked(answers[0], seconds=wall, server=None, ids=[i for a in answers for i in a["ids"]])
                joined |= {key: sum(a[key] for a in answers) for key in ("steps", "accepted")}
                row[arm].append(joined)
            seen.append(row)
            at += block
            write(seen)


def segments(file: Path, rows: int) -> list[tuple[bool, float]]:
    """(hooked, mean milliseconds of a step) per segment, its first step left out, in whole groups of ORDER.

    A group in which not all `rows` requests ran throughout, or whose request ended, is left out.
    """
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        whole: dict[int, list[float]] = {}
        sides: dict[int, bool] = {}
        steps = json.loads(line)
        partial = {segment for *_, segment, wide in steps if wide != rows} | {steps[-1][2]}
        for (at, on, segment, _), (after, _, following, _) in itertools.pairwise(steps):
            if segment == following:
                whole.setdefault(segment, []).append((after - at) / 1e6)
                sides[segment] = on
        for first in range(0, steps[-1][2], len(ORDER)):
            group = range(first, first + len(ORDER))
            if not partial & set(group) and all(len(whole.get(n, ())) > 1 for n in group):
                found += [(sides[n], statistics.fmean(whole[n][1:])) for n in group]
    return found


def flipped(pairs: list[tuple[bool, float]]) -> dict:
    """Steps per second with the hooks against without: groups of four segments, on, off, off, on."""
    groups = [pairs[i : i + 4] for i in range(0, len(pairs) - 3, 4)]
    whole = [g for g in groups if [on for on, _ in g] == list(ORDER)]
    if not whole:
        return {"rows": 0}
    rows = [(2.0, g[0][1] + g[3][1], 2.0, g[1][1] + g[2][1]) for g in whole]
    again = [(1.0, g[0][1], 1.0, g[3][1]) for g in whole]
    flat = [pair for group in whole for pair in group]
    means = {
        name: statistics.fmean(ms for on, ms in flat if on == side) for name, side in (("on", True), ("off", False))
    }
    return {
        "ms_per_step": {k: round(v, 5) for k, v in means.items()},
        "on/off, steps per second": interval(rows),
        "on/on": interval(again),
    }


def flips(
    url: str,
    policy: dict | None,
    inputs: list,
    rows: int,
    seconds: float,
    every: int,
    tokens: int,
    file: Path,
    write: Callable[[dict], None],
) -> dict:
    """`rows` requests at a time change sides on their way; the file holds what the scheduler wrote of them, of each
    group once the next one is there. write: told after every group, so that a run that is ended keeps those before."""
    file.unlink(missing_ok=True)
    began, turn = time.monotonic(), 0
    while not turn or time.monotonic() - began < seconds:
        ids = [inputs[(turn * rows + i) % len(inputs)] for i in range(rows)]
        rids = [f"flip-{every}-{rows}-{turn}-{i}-{os.getpid()}" for i in range(rows)]
        body = {"rid": rids, "input_ids": ids, "sampling_params": [params(policy, 0.0, tokens)] * rows}
        status, answer = call(url, "/generate", body)
        if status != 200:
            raise RuntimeError(f"/generate {rids[0]}: expected 200, found {status}: {answer}")
        turn += 1
        write(flipped(segments(file, rows)))
    last = {"rid": f"on-{rows}-{began}", "input_ids": inputs[0], "sampling_params": params(None, 0.0, 1)}
    call(url, "/generate", last)  # at which the scheduler writes
    return flipped(segments(file, rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", default="")
    parser.add_argument("--target", default=str(HERE.parents[2] / "recipes/checkpoints/tiny-qwen3"))
    parser.add_argument("--draft", default=str(HERE.parents[2] / "recipes/checkpoints/tiny-qwen3-dspark-block7"))
    parser.add_argument("--url", default="", help="of a server that runs")
    parser.add_argument("--port", type=int, default=30019)
    parser.add_argument("--arms", nargs="+", action="append", choices=list(POLICIES), help="a set; may be given again")
    parser.add_argument("--seconds", type=float, nargs="+", default=[70.0], help="of each set of arms")
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--blocks", type=float, default=0.0, help="seconds; 0: none")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--block", type=int, default=96)
    parser.add_argument("--flips", type=float, default=20.0, help="seconds of each number of requests; 0: none")
    parser.add_argument("--flip-rows", type=int, nargs="+", default=[1, 16], help="requests that share their steps")
    parser.add_argument("--every", type=int, default=25, help="verify steps between flips")
    parser.add_argument("--flip-arm", default="asd-b0", choices=FLIPPED)
    parser.add_argument("--flip-tokens", type=int, default=1400)
    parser.add_argument("--ready-limit", type=float, default=400)
    parser.add_argument("--server", default=SERVER)
    parser.add_argument("--cores", default="", help="of the server, taskset's notation; the rest is the client's")
    parser.add_argument("--log", default="toggle-server.log")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    sets = args.arms or [[OFF, "asd-b0"]]
    times = args.seconds if len(args.seconds) == len(sets) else args.seconds[:1] * len(sets)
    report: dict = {"arms": sets, "concurrency": args.concurrency, "server": args.server, "cores": args.cores}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    server, failed = None, True

    def save() -> None:
        if args.out:
            part = Path(f"{args.out}.part")
            part.write_text(json.dumps({"complete": False} | report, indent=1) + "\n")
            part.replace(args.out)

    try:
        folder = Path(tempfile.mkdtemp())
        if not args.url:
            server = launch(args, args.port, Path(args.log), folder, args.cores)
        url = args.url or f"http://127.0.0.1:{args.port}"
        report["ready_s"] = round(wait_ready(url, server, args.ready_limit), 1)
        before = snapshot(url)
        report["snapshot"] = {k: v for k, v in before.items() if k not in ("files", "counters")}
        report["files"] = before["files"]
        inputs = prompts(args)
        random.Random(0).shuffle(inputs)
        client = Client(url, args.tokens, args.ignore_eos)
        for arm in dict.fromkeys(arm for arms in sets for arm in arms):  # compiled, allocated
            for ids in inputs[-3:]:
                client.ask(arm, ids)
        for arms, seconds in zip(sets, times, strict=True):
            name = " ".join(arms)

            def write(seen: list, name: str = name, arms: list[str] = arms) -> None:
                report[name] = summary(seen, arms)
                save()

            one_by_one(client, inputs, arms, seconds, write)
        for rows in args.flip_rows if args.flips and not args.url else ():
            file, policy = folder / "flips.jsonl", POLICIES[args.flip_arm]

            def write_flips(found: dict, rows: int = rows) -> None:
                report.setdefault("flips", {})[str(rows)] = found
                save()

            write_flips(flips(url, policy, inputs, rows, args.flips, args.every, args.flip_tokens, file, write_flips))
        if args.blocks:

            def write_blocks(seen: list) -> None:
                report["blocks"] = summary(seen, sets[0])
                save()

            in_blocks(client, inputs, sets[0], args.blocks, args.block, args.concurrency, write_blocks)
        report["counters"] = snapshot(url)["counters"]
        first = report[" ".join(sets[0])]
        costs = {k: v["ratio"] for k, v in first.items() if k == f"asd-b0/{sets[0][0]}"}
        report["bar"], report["within_bar"] = BAR, {k: v >= BAR for k, v in costs.items()}
        report["complete"] = True
        found = [report[" ".join(arms)] for arms in sets]
        same = all(one["equal_ids"] == one["rows"] for one in found)  # of blocks only seen: requests share steps there
        failed = not same or not all(report["within_bar"].values())
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
        if Path(args.log).exists():
            report["log"] = Path(args.log).read_text(errors="replace")[-4000:]
    finally:
        stop(server)
    save()
    print(json.dumps(report, indent=1))
    return int(failed)


def launch(args, port: int, log: Path, folder: Path, cores: str = ""):
    """The armed server with the measuring plugin beside the adapter; cores: its own, the rest stay the client's."""
    os.environ["SPECACCEPT_TOGGLE_OUT"] = str(folder / "flips.jsonl")
    info = folder / "specaccept_toggle-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: specaccept-toggle\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), str(HERE), os.environ.get("PYTHONPATH")]))
    if not cores:
        return start(args, port, log)
    ends = [part.partition("-") for part in cores.split(",")]
    own = {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, own)  # the server inherits it
    try:
        return start(args, port, log)
    finally:
        os.sched_setaffinity(0, mine - own or mine)


if __name__ == "__main__":
    sys.exit(main())
