"""The adapter in a real SGLang server on a GPU, one boot: ready, armed, B=0 identical, ASD moves what it must, 400s.

    python tests/adapters/sglang/device_smoke.py --site SITE --target T --draft D [--prompts 32] [--out smoke.json]

SITE: a folder with SGLang's own packages (on PYTHONPATH), or nothing where SGLang is installed. --url: a server that
runs already, of any engine that serves the same API. Prints one JSON object; exit status 0 when every check passed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
B0 = {"rule": "asd", "budget": 0.0}
ARMS = {
    "none": None,
    "strict": {"rule": "strict"},
    "asd-b0": B0,
    "asd": {"rule": "asd", "budget": 2.0625, "gate": 2.0625, "max_mismatches": 1, "suffix_value": "normalized"},
    "asd-stable": {"rule": "asd", "budget": 8.0, "gate": 0.25, "max_mismatches": 2},
}
# What the slim runtime serves: no FA3, no xgrammar; compiled on the first start.
SERVER = (
    "--attention-backend triton --speculative-draft-attention-backend flashinfer --sampling-backend pytorch "
    "--grammar-backend none --mem-fraction-static 0.3 --context-length 2048 --max-running-requests 16 "
    "--cuda-graph-max-bs 16 --disable-prefill-cuda-graph --disable-radix-cache"
)


def call(url: str, path: str, body: dict | None = None, timeout: float = 300) -> tuple[int, dict]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = response.read()
            return response.status, json.loads(text) if text.strip().startswith((b"{", b"[")) else {}
    except urllib.error.HTTPError as error:
        return error.code, {"error": error.read().decode(errors="replace")}


def params(policy: dict | None, temperature: float, tokens: int, **more) -> dict:
    custom = {} if policy is None else {"custom_params": {"specaccept": policy}}
    return {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True, **custom, **more}


def generate(url: str, ids: list, sampling) -> list[dict]:
    status, found = call(url, "/generate", {"input_ids": ids, "sampling_params": sampling})
    if status != 200:
        raise RuntimeError(f"/generate: expected 200, found {status}: {found}")
    return found if isinstance(found, list) else [found]


def snapshot(url: str) -> dict:
    _, info = call(url, "/server_info")
    if "specaccept" in info:
        return info["specaccept"]
    return info["internal_states"][0]["dspark_info_record"]["specaccept"]


def start(args, port: int, log: Path) -> subprocess.Popen:
    """The server with this checkout and its entry point on PYTHONPATH, in a process group of its own."""
    info = Path(tempfile.mkdtemp()) / "specaccept-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: specaccept\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nspecaccept = adapters.sglang.plugin:register\n")
    path = [p for p in (args.site, str(info.parent), str(ROOT), os.environ.get("PYTHONPATH")) if p]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
        "SPECACCEPT_NONCE": "smoke",
    }
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", args.target]
    command += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", args.draft]
    command += ["--host", "127.0.0.1", "--port", str(port), *args.server.split()]
    return subprocess.Popen(command, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)


def stop(server: subprocess.Popen | None) -> None:
    """End the server's own process group."""
    if server is None or server.poll() is not None:
        return
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_ready(url: str, server: subprocess.Popen | None, limit: float) -> float:
    begin = time.monotonic()
    while time.monotonic() - begin < limit:
        if server is not None and server.poll() is not None:
            raise RuntimeError(f"server: expected it to start, found exit status {server.returncode}")
        try:
            if call(url, "/health", timeout=10)[0] == 200:
                return time.monotonic() - begin
        except OSError:
            pass
        time.sleep(1)
    raise RuntimeError(f"server: expected /health 200 within {limit:.0f} s")


def prompts(args) -> list[list[int]]:
    """Questions of the generated traffic as the target's chat template renders them."""
    for path in (args.site, str(ROOT)):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    from harness.engines.tokenizer import Tokenizer
    from harness.traffic.generated import math, split

    tokenizer = Tokenizer.from_folder(Path(args.target))
    found = []
    for seed in split("test")[: args.prompts]:
        problem = math.problem(seed)
        text = tokenizer.apply_chat_template(
            list(problem.messages), add_generation_prompt=True, tokenize=False, enable_thinking=problem.thinking
        )
        found.append(tokenizer.encode(text, add_special_tokens=False))
    return found


def delta(before: dict, after: dict, key: str) -> dict:
    old, new = before["counters"].get(key, {}), after["counters"].get(key, {})
    return {k: new[k] - old.get(k, 0) for k in new if k != "fallbacks"}


def measure(url: str, inputs: list, policy: dict | None, tokens: int, temperature: float = 0.0) -> dict:
    """One arm, one request at a time."""
    before = snapshot(url)
    begin = time.monotonic()
    rows = [generate(url, ids, params(policy, temperature, tokens))[0] for ids in inputs]
    wall = time.monotonic() - begin
    after = snapshot(url)
    meta = [row["meta_info"] for row in rows]
    said = [m.get("specaccept") for m in meta]
    key = said[0]["policy"] if said[0] else ""
    return {
        "ids": [row["output_ids"] for row in rows],
        "tps": sum(len(row["output_ids"]) for row in rows) / wall,
        "tokens_per_step": sum(m["completion_tokens"] for m in meta) / sum(m["spec_verify_ct"] for m in meta),
        "said": said,
        "moved": delta(before, after, key),
        "agree": {
            "requests": len(rows),
            "blocks": sum(m["spec_verify_ct"] for m in meta),
            "drafts_verified": sum(m["spec_num_proposed_drafts"] for m in meta),
            "relaxed": sum(s["relaxed"] for s in said if s),
        },
    }


def checks(url: str, inputs: list[list[int]], tokens: int) -> tuple[dict, dict]:
    seen: dict = {}
    good: dict = {}
    snap = snapshot(url)
    seen["snapshot"] = {k: v for k, v in snap.items() if k != "files"} | {"files": len(snap["files"])}
    good["armed"] = snap["armed"] is True
    generate(url, inputs[0], params(ARMS["asd"], 0.0, 8))  # compiles what a first policy compiles
    arms = {name: measure(url, inputs, policy, tokens) for name, policy in ARMS.items()}
    plain = arms["none"]["ids"]
    same = {n: sum(a == b for a, b in zip(arm["ids"], plain, strict=True)) for n, arm in arms.items()}
    seen["identical_to_none"], seen["of"] = same, len(inputs)
    seen["tps"] = {n: round(arm["tps"], 1) for n, arm in arms.items()}
    seen["tokens_per_step"] = {n: round(arm["tokens_per_step"], 3) for n, arm in arms.items()}
    seen["moved"] = {n: arm["moved"] for n, arm in arms.items()}
    good["strict_identical"] = same["strict"] == len(inputs)
    good["b0_identical"] = same["asd-b0"] == len(inputs)
    if snap["adapter"] == "sglang":  # no policy asked for: nothing said
        good["none_is_silent"] = all(s is None for s in arms["none"]["said"])
    good["asd_changes_ids"] = min(same["asd"], same["asd-stable"]) < len(inputs)
    good["asd_relaxes"] = any(arms[n]["moved"].get("relaxed", 0) > 0 for n in ("asd", "asd-stable"))
    good["b0_relaxes_nothing"] = arms["asd-b0"]["moved"].get("relaxed") == 0 < arms["asd-b0"]["moved"]["blocks"]
    good["counters_agree_with_responses"] = all(
        arm["moved"].get(k) == v for n, arm in arms.items() if n != "none" for k, v in arm["agree"].items()
    )
    good["budget_kept"] = all(s["spent"] <= 2.0625 for s in arms["asd"]["said"])

    sampled = {n: measure(url, inputs[:8], {"rule": n}, tokens, temperature=1.0) for n in ("chain", "block")}
    seen["sampled_tokens_per_step"] = {n: round(arm["tokens_per_step"], 3) for n, arm in sampled.items()}
    good["sampled_counted"] = all(arm["moved"].get("blocks", 0) == arm["agree"]["blocks"] for arm in sampled.values())
    _, more = measure_list(url, inputs[:2], [params({"rule": "block"}, 0.8, tokens, top_p=0.9, top_k=20)] * 2)
    good["block_with_top_p"] = all(m["specaccept"]["policy"] == "block" for m in more)

    mixed = [
        (ARMS["asd"], 0.0),
        ({"rule": "block"}, 1.0),
        (None, 0.0),
        (B0, 0.0),
        ({"rule": "chain"}, 1.0),
        (None, 1.0),
    ]
    inputs6 = [inputs[i % len(inputs)] for i in range(len(mixed))]
    ids, meta = measure_list(url, inputs6, [params(p, t, tokens) for p, t in mixed])
    ran = [m.get("specaccept", {}).get("policy", "").split("(")[0] for m in meta]
    silent = "" if snap["adapter"] == "sglang" else None  # others name the rule of a request without a policy
    wanted = ["asd", "block", silent, "asd", "chain", silent]
    good["mixed_batch"] = all(w is None or w == r for w, r in zip(wanted, ran, strict=True))
    good["mixed_lengths"] = [len(i) for i in ids] == [tokens] * len(mixed)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        many = list(pool.map(lambda ids: generate(url, ids, params(ARMS["asd"], 0.0, tokens))[0], inputs[:16]))
    good["sixteen_at_once"] = all(len(m["output_ids"]) == tokens for m in many)

    seen["fallback"] = measure(url, inputs[:1], ARMS["asd"], 8, temperature=1.0)["said"][0]
    good["fallback_says_so"] = (seen["fallback"]["policy"], seen["fallback"]["asked"][:4]) == ("chain", "asd(")
    wrong = params({"rule": "asd", "budget": -1}, 0.0, 4)
    status, error = call(url, "/generate", {"input_ids": inputs[0], "sampling_params": wrong})
    seen["malformed"] = [status, json.dumps(error)[:300]]
    good["malformed_is_400"] = status == 400 and "policy.budget" in json.dumps(error)
    seen["final"] = snapshot(url)["counters"]
    return seen, good


def measure_list(url: str, inputs: list, sampling: list) -> tuple[list, list]:
    rows = generate(url, inputs, sampling)
    return [row["output_ids"] for row in rows], [row["meta_info"] for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", default="")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--url", default="")
    parser.add_argument("--port", type=int, default=30017)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--ready-limit", type=float, default=400)
    parser.add_argument("--server", default=SERVER, help="flags of the server beside models and address")
    parser.add_argument("--log", default="smoke-server.log")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    url, log = args.url or f"http://127.0.0.1:{args.port}", Path(args.log)
    report: dict = {"ok": False}
    inputs = prompts(args)
    server = None if args.url else start(args, args.port, log)
    try:
        report["ready_s"] = round(wait_ready(url, server, args.ready_limit), 1)
        report["seen"], report["checks"] = checks(url, inputs, args.tokens)
        report["ok"] = all(report["checks"].values())
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
        if server is not None:
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
