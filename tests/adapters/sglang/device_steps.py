"""What the adapter costs a step at real size: the shapes of Qwen3-14B and its public DSpark draft, dummy weights.

    python tests/adapters/sglang/device_steps.py [--site SITE] [--tp N] [--batches 1 8 32] [--seconds 150] [--out FILE]

Two servers side by side, one without the plugin, asked in turn: unarmed, strict, B = 0, B large; with --one-server a
single one, whose hooks are taken out for `unarmed` (`toggle_plugin.py`), and before that --flips seconds per batch size
in which they come and go every few steps. Each arm sees the same number of verify steps at the same mean context (a
policy that accepts more starts from a shorter prompt), and a step is the difference of two walls over the difference of
their steps, so prefill and transport drop out. The gain is the mean of the logarithm of paired ratios with a 95 % t
interval. --out is written after every batch size of every round, so ending early loses nothing. Prints JSON; exit
status 1 where B = 0 costs over 1 %, by the flips where there are some.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from device_smoke import call, params, snapshot, start, stop, wait_ready
from device_toggle import flips, launch

UNARMED = "unarmed"
ARMS = {
    UNARMED: None,
    "strict": {"rule": "strict"},
    "asd-b0": {"rule": "asd", "budget": 0.0},
    "asd-large": {"rule": "asd", "budget": 1e9},
}
BAR = 1.01
PLACES = 4
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 12: 2.201, 16: 2.131}
# Qwen/Qwen3-14B, and deepseek-ai/dspark_qwen3_14b_block7 as its training configuration in DeepSpec has it.
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "model_type": "qwen3",
    "eos_token_id": 151645,
}
TARGET = SHAPE | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 40}
DRAFT = SHAPE | {
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 5,
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 10, 19, 28, 37],
    "num_target_layers": 40,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
SERVER = (
    "--attention-backend triton --speculative-draft-attention-backend flashinfer --sampling-backend pytorch "
    "--grammar-backend none --mem-fraction-static 0.8 --max-total-tokens 65536 --context-length 4096 "
    "--max-running-requests 32 --disable-prefill-cuda-graph --disable-radix-cache --load-format dummy "
    "--skip-tokenizer-init --dtype bfloat16"
)


def folders(root: Path, layers: int | None = None) -> tuple[str, str]:
    """Configurations alone: dummy weights need no more."""
    target, draft = dict(TARGET), dict(DRAFT)
    if layers is not None:
        target["num_hidden_layers"] = draft["num_target_layers"] = layers
        draft["target_layer_ids"] = sorted({1, layers // 2})
    for name, config in (("target", target), ("draft", draft)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return str(root / "target"), str(root / "draft")


class Asked:
    count = 0


def ask(url: str, batch: int, prompt: int, tokens: int, policy: dict | None, seed: int) -> tuple[float, float, float]:
    """One list request: wall seconds, verify steps (the mean row's), tokens per step."""
    g = random.Random(seed)
    ids = [[g.randrange(1000, 100000) for _ in range(prompt)] for _ in range(batch)]
    Asked.count += 1
    rids = [f"{'off' if policy is None else 'on'}-{Asked.count}-{i}" for i in range(batch)]
    body = {"rid": rids, "input_ids": ids, "sampling_params": [params(policy, 0.0, tokens)] * batch}
    begin = time.perf_counter()
    status, rows = call(url, "/generate", body)
    wall = time.perf_counter() - begin
    if status != 200:
        raise RuntimeError(f"/generate: expected 200, found {status}: {rows}")
    steps = [row["meta_info"]["spec_verify_ct"] for row in rows]
    made = sum(len(row["output_ids"]) - 1 for row in rows)  # the first id is the prefill's
    return wall, max(steps), made / sum(steps)


def step_ms(
    url: str, batch: int, policy: dict | None, pace: float, seed: int, short: int, long: int
) -> tuple[float, float]:
    """Milliseconds of a step, tokens per step. pace: tokens per step this policy has here."""
    mean = (short + long) / 2
    prompt = max(16, round(64 + (7 + 1) * mean - pace * mean))  # the mean context of every arm: 64 + 8 a step
    a = ask(url, batch, prompt, 1 + round(short * pace), policy, seed)
    b = ask(url, batch, prompt, 1 + round(long * pace), policy, seed)
    return 1000 * (b[0] - a[0]) / (b[1] - a[1]), b[2]


def ratio(values: list[float]) -> dict[str, float | None]:
    """Geometric mean of paired ratios and its 95 % interval, which a single one has not."""
    logs = [math.log(value) for value in values]
    mean, n = statistics.fmean(logs), len(logs)
    if n == 1:
        return {"ratio": round(values[0], PLACES), "low": None, "high": None}
    half = T95[max(k for k in T95 if k <= n)] * statistics.stdev(logs) / math.sqrt(n)
    return {k: round(math.exp(v), PLACES) for k, v in (("ratio", mean), ("low", mean - half), ("high", mean + half))}


def calibrate(urls: dict[str, str], batch: int, arms: dict) -> dict[str, float]:
    """Compiles, and says how many tokens a step of each policy makes."""
    pace = {}
    for name, policy in arms.items():
        pace[name] = ask(urls[name], batch, 64, 65, policy, 0)[2]
        ask(urls[name], batch, 64, 1 + round(16 * pace[name]), policy, 0)
    return pace


def measure(urls: dict[str, str], args, arms: dict, write: Callable[[dict], None]) -> dict:
    """Every round visits every batch size and arm, so that whenever time ends all sizes have equally many rounds."""
    began = time.monotonic()
    paces = {batch: calibrate(urls, batch, arms) for batch in args.batches}
    times: dict = {batch: {name: [] for name in arms} for batch in args.batches}
    seen: dict = {batch: {name: [] for name in arms} for batch in args.batches}
    found: dict = {}
    longest = 0.0
    for turn in range(1, args.rounds + 1):
        if time.monotonic() - began + longest > args.seconds:
            break
        start_of_turn = time.monotonic()
        names = [*list(arms)[turn % len(arms) :], *list(arms)[: turn % len(arms)]]
        for batch in args.batches:
            for name in names:
                ms, pace = step_ms(urls[name], batch, arms[name], paces[batch][name], turn, args.short, args.long)
                times[batch][name].append(ms)
                seen[batch][name].append(pace)
            found[str(batch)] = summary(times[batch], seen[batch], args.base)
            write(found)
        longest = max(longest, time.monotonic() - start_of_turn)
    return found


def summary(times: dict[str, list[float]], seen: dict[str, list[float]], base: str) -> dict:
    """Of one batch size."""
    against = {name: [x / b for x, b in zip(t, times[base], strict=True)] for name, t in times.items() if name != base}
    return {
        "rounds": len(times[base]),
        "step_ms": {name: round(statistics.median(t), PLACES) for name, t in times.items()},
        "tokens_per_step": {name: round(statistics.fmean(p), 3) for name, p in seen.items()},
        f"against_{base}": {name: ratio(values) for name, values in against.items()},
        "all_ms": {name: [round(x, PLACES) for x in t] for name, t in times.items()},
    }


def within_bar(report: dict, base: str) -> dict[str, bool]:
    """By batch size, whether a step of B = 0 costs at most BAR: by the flips where there are some, whose neighbouring
    steps tell more than rounds of whole requests."""
    costs = {batch: found[f"against_{base}"]["asd-b0"]["ratio"] for batch, found in report["batches"].items()}
    for batch, found in report.get("flips", {}).items():
        if flipped := found.get("on/off, steps per second"):
            costs[batch] = 1 / flipped["ratio"]
    return {batch: cost <= BAR for batch, cost in costs.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", default="")
    parser.add_argument("--port", type=int, default=30018)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=16, help="at most")
    parser.add_argument("--seconds", type=float, default=150, help="of all rounds: the last is one that still fits")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--short", type=int, default=16, help="verify steps")
    parser.add_argument("--long", type=int, default=112)
    parser.add_argument("--layers", type=int, help="of the target, for a trial on a small machine")
    parser.add_argument(
        "--armed-only", action="store_true", help="one server; strict is what the others are compared with"
    )
    parser.add_argument("--one-server", action="store_true", help="unarmed: the armed server without its hooks")
    parser.add_argument("--flips", type=float, default=0.0, help="seconds per batch size, with --one-server; 0: none")
    parser.add_argument("--flip-steps", type=int, default=160, help="verify steps of such a request, about")
    parser.add_argument("--every", type=int, default=12, help="verify steps between flips")
    parser.add_argument("--cores", default="", help="of the one server, taskset's notation")
    parser.add_argument("--ready-limit", type=float, default=400)
    parser.add_argument("--server", default=SERVER)
    parser.add_argument("--log", default="steps-server.log")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    args.target, args.draft = folders(Path(tempfile.mkdtemp()), args.layers)
    args.server += f" --tp-size {args.tp} --cuda-graph-bs-decode {' '.join(map(str, args.batches))}"
    args.server += " --disable-custom-all-reduce" if args.tp > 1 else ""  # which may want NVLink multicast
    args.base = "strict" if args.armed_only else UNARMED
    arms = {name: ARMS[name] for name in args.arms if not (args.armed_only and name == UNARMED)}
    for name in {args.base, "asd-b0"} - set(arms):
        parser.error(f"--arms: expected {name} among them, found {' '.join(args.arms)}")
    alone = args.armed_only or args.one_server
    boots = {"armed": {}} | ({} if alone else {UNARMED: {"SGLANG_PLUGINS": "none"}})
    folder = Path(tempfile.mkdtemp())
    report: dict = {"shape": "Qwen3-14B target, dspark_qwen3_14b_block7 draft, dummy weights", "tp": args.tp}
    report["command"], report["steps"] = args.server, [args.short, args.long]
    servers, logs, failed = {}, {}, True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too

    def write(batches: dict) -> None:
        report["batches"] = batches
        if args.out:
            Path(args.out).write_text(json.dumps(report | {"complete": False}, indent=1) + "\n")

    plain = dict(os.environ)
    try:
        for index, (name, env) in enumerate(boots.items()):
            os.environ.update(env)
            logs[name] = Path(f"{args.log}.{name}")
            port = args.port + 100 * index
            if args.one_server:
                servers[name] = launch(args, port, logs[name], folder, args.cores)
            else:
                servers[name] = start(args, port, logs[name])
            os.environ.clear()
            os.environ.update(plain)
        urls = {name: f"http://127.0.0.1:{args.port + 100 * index}" for index, name in enumerate(boots)}
        report["ready_s"] = {name: round(wait_ready(urls[name], servers[name], args.ready_limit), 1) for name in boots}
        report["snapshot"] = {k: v for k, v in snapshot(urls["armed"]).items() if k not in ("files", "counters")}
        for batch in args.batches if args.flips and args.one_server else ():
            pace = calibrate({"asd-b0": urls["armed"]}, batch, {"asd-b0": ARMS["asd-b0"]})["asd-b0"]
            g = random.Random(batch)
            ids = [[g.randrange(1000, 100000) for _ in range(64)] for _ in range(4 * batch)]
            tokens = round(args.flip_steps * pace)
            file, arm = folder / "flips.jsonl", ARMS["asd-b0"]

            def write_flips(found: dict, batch: int = batch) -> None:
                report.setdefault("flips", {})[str(batch)] = found
                write({})

            write_flips(flips(urls["armed"], arm, ids, batch, args.flips, args.every, tokens, file, write_flips))
        report["batches"] = measure({name: urls.get(name, urls["armed"]) for name in arms}, args, arms, write)
        report["counters"] = snapshot(urls["armed"])["counters"]
        report["ranks"] = snapshot(urls["armed"]).get("ranks")
        report["bar"] = BAR
        report["b0_within_bar"] = within_bar(report, args.base)
        report["complete"] = True
        failed = not report["b0_within_bar"] or not all(report["b0_within_bar"].values())
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
        report["log"] = {name: log.read_text(errors="replace")[-4000:] for name, log in logs.items() if log.exists()}
    finally:
        for server in servers.values():
            stop(server)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
