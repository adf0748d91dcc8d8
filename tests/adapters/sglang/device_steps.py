"""What the adapter costs a step at real size: a Qwen3-14B-shaped target and a DSpark draft with dummy weights.

    python tests/adapters/sglang/device_steps.py --site SITE [--batches 1 8 32] [--rounds 5] [--out steps.json]

One boot with the plugin, arms interleaved (no policy, B=0, B large), and with --unarmed a second boot without it. A
step is the difference of two walls over the difference of their verify steps, so prefill drops out. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from device_smoke import call, params, start, stop, wait_ready

ARMS = {"none": None, "asd-b0": {"rule": "asd", "budget": 0.0}, "asd-large": {"rule": "asd", "budget": 1e9}}
VOCABULARY = 151936
SHAPE = {
    "vocab_size": VOCABULARY,
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
    "model_type": "qwen3",
    "eos_token_id": 151645,
}
SERVER = (
    "--attention-backend triton --speculative-draft-attention-backend flashinfer --sampling-backend pytorch "
    "--grammar-backend none --mem-fraction-static 0.7 --context-length 4096 --max-running-requests 32 "
    "--cuda-graph-max-bs 32 --disable-prefill-cuda-graph --disable-radix-cache --load-format dummy "
    "--skip-tokenizer-init"
)


def folders(root: Path, block: int, draft_layers: int) -> tuple[str, str]:
    """Configurations alone: dummy weights need no more."""
    target = SHAPE | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 40, "tie_word_embeddings": False}
    draft = SHAPE | {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": draft_layers,
        "tie_word_embeddings": False,
        "block_size": block,
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "num_target_layers": 40,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
    }
    for name, config in (("target", target), ("draft", draft)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return str(root / "target"), str(root / "draft")


def run(url: str, batch: int, tokens: int, policy: dict | None, seed: int) -> tuple[float, int, float]:
    """Wall seconds, verify steps of the longest row, tokens per step of one list request."""
    g = random.Random(seed)
    ids = [[g.randrange(1000, 100000) for _ in range(64)] for _ in range(batch)]
    begin = time.perf_counter()
    status, rows = call(url, "/generate", {"input_ids": ids, "sampling_params": [params(policy, 0.0, tokens)] * batch})
    wall = time.perf_counter() - begin
    if status != 200:
        raise RuntimeError(f"/generate: expected 200, found {status}: {rows}")
    steps = [row["meta_info"]["spec_verify_ct"] for row in rows]
    return wall, max(steps), sum(row["meta_info"]["completion_tokens"] for row in rows) / sum(steps)


def step_ms(url: str, batch: int, policy: dict | None, seed: int, short: int, long: int) -> tuple[float, float]:
    a, b = run(url, batch, short, policy, seed), run(url, batch, long, policy, seed)
    return 1000 * (b[0] - a[0]) / (b[1] - a[1]), b[2]


def measure(url: str, args, arms: dict) -> dict:
    for policy in arms.values():  # compile
        run(url, max(args.batches), 16, policy, 0)
    found: dict = {}
    for batch in args.batches:
        times: dict[str, list[float]] = {name: [] for name in arms}
        pace = {}
        for seed in range(1, args.rounds + 1):
            names = list(arms) if seed % 2 else list(arms)[::-1]
            for name in names:
                ms, pace[name] = step_ms(url, batch, arms[name], seed, args.short, args.long)
                times[name].append(ms)
        medians = {name: statistics.median(t) for name, t in times.items()}
        found[str(batch)] = {
            "step_ms": {name: round(m, 4) for name, m in medians.items()},
            "all_ms": {name: [round(x, 4) for x in t] for name, t in times.items()},
            "tokens_per_step": {name: round(p, 3) for name, p in pace.items()},
            "against_none": {name: round(m / medians["none"], 4) for name, m in medians.items()},
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", default="")
    parser.add_argument("--port", type=int, default=30018)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", type=int, default=64)
    parser.add_argument("--long", type=int, default=320)
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--draft-layers", type=int, default=5)
    parser.add_argument("--ready-limit", type=float, default=400)
    parser.add_argument("--server", default=SERVER)
    parser.add_argument("--unarmed", action="store_true", help="a second boot without the plugin")
    parser.add_argument("--log", default="steps-server.log")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    args.target, args.draft = folders(Path(tempfile.mkdtemp()), args.block, args.draft_layers)
    url, report = f"http://127.0.0.1:{args.port}", {"shape": "Qwen3-14B, dummy weights", "block": args.block}
    boots = {"armed": (ARMS, {})} | ({"unarmed": ({"none": None}, {"SGLANG_PLUGINS": "none"})} if args.unarmed else {})
    failed = False
    for name, (arms, env) in boots.items():
        os.environ.update(env)
        log = Path(f"{args.log}.{name}")
        server = start(args, args.port, log)
        try:
            ready = wait_ready(url, server, args.ready_limit)
            report[name] = {"ready_s": round(ready, 1)} | measure(url, args, arms)
        except Exception as error:
            failed = True
            report[name] = {"error": f"{type(error).__name__}: {error}", "log": log.read_text(errors="replace")[-6000:]}
        finally:
            stop(server)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
