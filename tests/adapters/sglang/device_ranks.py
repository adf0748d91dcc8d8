"""Tensor parallel on GPUs: B = 0 equals the engine's own ids, and every rank accepts alike and has the same ledger.

    python tests/adapters/sglang/device_ranks.py --tp 2 [--site SITE] [--target T --draft D] [--out ranks.json]

One server with the plugin. Prints one JSON object; exit status 0 when every check passed. The snapshot's `ranks` is
asked of all ranks: rows whose accepted length was not rank 0's, and how far apart the ledgers are.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from device_smoke import ARMS, ROOT, SERVER, generate, params, prompts, snapshot, start, stop, wait_ready

BLOCKS = 2000
AT_ONCE = 16


def many(url: str, inputs: list[list[int]], policy: dict | None, temperature: float, tokens: int) -> list[dict]:
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda ids: generate(url, ids, params(policy, temperature, tokens))[0], inputs))


def blocks(url: str, rule: str) -> int:
    """Verify steps a rule has decided, those without a budget apart."""
    counters = {key: c for key, c in snapshot(url)["counters"].items() if not key.startswith("asd(B=0.0,")}
    return sum(c["blocks"] for key, c in counters.items() if key.split("(")[0] == rule)


def until(url: str, rule: str, ask) -> int:
    """Ask until the rule has decided BLOCKS blocks."""
    for _ in range(64):
        ask()
        if (found := blocks(url, rule)) >= BLOCKS:
            return found
    raise RuntimeError(f"{rule}: expected {BLOCKS} blocks, found {blocks(url, rule)}")


def checks(url: str, inputs: list[list[int]], tokens: int, tp: int) -> tuple[dict, dict]:
    seen: dict = {"at_start": snapshot(url).get("ranks")}
    good: dict = {"all_ranks_answer": (seen["at_start"] or {}).get("size") == tp}
    answers = {
        name: [generate(url, ids, params(policy, 0.0, tokens))[0] for ids in inputs]
        for name, policy in (("none", None), ("asd-b0", ARMS["asd-b0"]), ("asd", ARMS["asd"]))
    }
    ids = {name: [answer["output_ids"] for answer in found] for name, found in answers.items()}
    seen["prompts"] = len(inputs)
    seen["identical"] = {n: sum(a == b for a, b in zip(i, ids["none"], strict=True)) for n, i in ids.items()}
    good["b0_identical"] = seen["identical"]["asd-b0"] == len(inputs)
    good["asd_changes_ids"] = seen["identical"]["asd"] < len(inputs)
    for rule, arm, temperature in (("asd", "asd-stable", 0.0), ("block", None, 1.0), ("chain", None, 1.0)):
        policy = ARMS[arm] if arm else {"rule": rule}
        found = until(url, rule, lambda p=policy, t=temperature: many(url, inputs, p, t, tokens))
        seen[rule] = {"blocks": found, "ranks": snapshot(url)["ranks"]}
        if rule == "asd":
            relaxed = sum(c["relaxed"] for c in snapshot(url)["counters"].values())
            seen[rule]["relaxed"] = relaxed
            good["asd_relaxes"] = relaxed > 0
        wanted = {"size": tp, "differences": 0, "ledger_spread": 0.0}
        good[f"{rule}_equal_on_all_ranks"] = seen[rule]["ranks"] == wanted
    seen["final"] = snapshot(url)["counters"]
    return seen, good


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", default="")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--target", default=str(ROOT / "recipes/checkpoints/tiny-qwen3"))
    parser.add_argument("--draft", default=str(ROOT / "recipes/checkpoints/tiny-qwen3-dspark-block7"))
    parser.add_argument("--port", type=int, default=30019)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--ready-limit", type=float, default=400)
    parser.add_argument("--server", default=f"{SERVER} --max-total-tokens 65536 --mem-fraction-static 0.7")
    parser.add_argument("--log", default="ranks-server.log")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    args.server += f" --tp-size {args.tp}" + (" --disable-custom-all-reduce" if args.tp > 1 else "")
    url, log, report = f"http://127.0.0.1:{args.port}", Path(args.log), {"ok": False, "tp": args.tp}
    inputs = prompts(args)
    server = start(args, args.port, log)
    try:
        report["ready_s"] = round(wait_ready(url, server, args.ready_limit), 1)
        report["seen"], report["checks"] = checks(url, inputs, args.tokens, args.tp)
        report["ok"] = all(report["checks"].values())
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
        report["log"] = log.read_text(errors="replace")[-6000:]
    finally:
        stop(server)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
