"""LightLLM on a Hopper GPU, armed and unarmed, with a real checkpoint pair: one JSON object, exit 1 on a failure.

    python3 tests/adapters/lightllm/device_smoke.py --packs DIR --target T --draft D --out DIR [--prompts 48]

DIR of --packs holds site.part.* (the engine's packages), lightllm-src.tar.xz, stubs-lightllm/ and fa3.tar.xz; or name
folders that are ready with --site and --lightllm. Servers run side by side on one GPU, but are asked one at a time.

Checked: unarmed and B=0 commit the same ids, alone and eight at a time, with prompts repeated (no prefill), slots
reused and sampled requests mixed in; asd commits other ids and its counters move; under an unlimited budget the first
verified id after a prompt is still the target's (its draft columns are junk), and with the proposal check off it is
not; log-probabilities of relaxed ids equal a teacher-forced pass of the target.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from adapters.policy import Policy  # noqa: E402
from harness.engines.base import Request  # noqa: E402
from harness.engines.lightllm import LightLLMClient, body  # noqa: E402

FAILED = re.compile(r"init func \w+ : (?!init ok)|specaccept: refused")
HUGE = Policy("asd", 1e9)
# Proves that the junk trial can fail: the same adapter with its proposal check off.
UNCHECKED = """
from adapters.lightllm import hook
armed = hook._patch
def _patch(module):
    armed(module)
    from adapters.lightllm import patch
    patch.engine().check_proposals = False
hook._patch = _patch
hook.install()
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--site", type=Path)
    parser.add_argument("--lightllm", type=Path, help="the folder that holds lightllm/")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--step", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", default='{"rule":"asd","budget":8.0,"gate":0.25,"max_mismatches":2}')
    parser.add_argument("--arms", default="plain,unarmed,strict,b0,asd,huge,unchecked")
    parser.add_argument("--ready", type=float, default=260.0)
    parser.add_argument("--attention", default="fa3")
    parser.add_argument("--teacher", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def unpack(args, work: Path) -> tuple[Path, Path]:
    site, source = args.site, args.lightllm
    if site is None:
        site = work / "site"
        site.mkdir()
        parts = sorted(args.packs.glob("site.part.*"))
        assert parts, f"no site.part.* in {args.packs}"
        whole = subprocess.Popen(["cat", *map(str, parts)], stdout=subprocess.PIPE)
        subprocess.run(["tar", "xJ", "-C", str(site)], stdin=whole.stdout, check=True)
        shutil.copytree(args.packs / "stubs-lightllm", site, dirs_exist_ok=True)
        subprocess.run(["tar", "xJf", str(args.packs / "fa3.tar.xz"), "-C", str(site / "sgl_kernel")], check=True)
    if source is None:
        source = work / "lightllm-src"
        source.mkdir()
        with tarfile.open(args.packs / "lightllm-src.tar.xz") as archive:
            archive.extractall(source, filter="data")
    return site, source


class Arm:
    """One server."""

    def __init__(self, name: str, policy: Policy | None, port: int, args, work: Path, site: Path, source: Path):
        self.name, self.policy, self.port = name, policy, port
        self.telemetry, self.log = work / f"telemetry-{name}", args.out / f"{name}.log"
        path = [str(site), str(source), str(ROOT)]
        if name == "unchecked":
            (work / "unchecked").mkdir()
            (work / "unchecked" / "sitecustomize.py").write_text(UNCHECKED)
            path.insert(0, str(work / "unchecked"))
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SPECACCEPT")}
        environ |= {"PYTHONPATH": os.pathsep.join(path), "PATH": f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        serve = ["lightllm.server.api_server"]
        if policy is not None:
            environ |= {"SPECACCEPT_POLICY": json.dumps(policy.to_json()), "SPECACCEPT_NONCE": name}
            environ["SPECACCEPT_TELEMETRY_DIR"] = str(self.telemetry)
            serve = serve if name == "unchecked" else ["adapters.lightllm", "serve"]
        flags = f"--tp 1 --host 127.0.0.1 --port {port} --max_total_token_num 40000 --max_req_total_len 2048"
        flags += " --batch_max_tokens 2048 --running_max_req_size 16 --graph_max_batch_size 8 --disable_shm_warning"
        flags += f" --llm_prefill_att_backend {args.attention} --llm_decode_att_backend {args.attention}"
        drafting = f"--mtp_mode dspark --mtp_draft_model_dir {args.draft.resolve()} --mtp_step {args.step}"
        flags += f" {drafting}" if name != "plain" else ""
        command = [sys.executable, "-m", *serve, "--model_dir", str(args.target.resolve()), *flags.split()]
        self.process = subprocess.Popen(
            command, env=environ, cwd=ROOT, stdout=self.log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True
        )
        self.started = time.monotonic()
        self.client = LightLLMClient(f"http://127.0.0.1:{port}", self.telemetry)

    def state(self) -> str:
        if self.client.healthy():
            return "ready"
        if self.process.poll() is not None or FAILED.search(self.log.read_text(errors="replace")):
            return "failed"
        return "starting"

    def tail(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-25:]

    def ids(self, prompt: list[int], tokens: int, tag: int = -1) -> dict:
        """ids and log-probabilities, straight from the engine: also where nothing is armed."""
        request = Request("r", prompt, tokens, None, deadline_s=120)
        answer = self.client._post("/generate", body(request, tag), 120)
        last = answer["tokens"][-1]
        return {
            "ids": [t["id"] for t in answer["tokens"]],
            "logprobs": [t["logprob"] for t in answer["tokens"]],
            "cached": last["prompt_cache_len"],
            "finish": answer["finish_reason"],
        }

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def prompts_of(target: Path, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    from harness.traffic.generated import code, math, split

    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts, seeds = [], split("test")
    for n in range(count):
        problem = (code if n % 4 == 3 else math).problem(seeds[n])
        text = tokenizer.apply_chat_template(
            list(problem.messages), add_generation_prompt=True, tokenize=False, enable_thinking=problem.thinking
        )
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    return prompts


def sampled(arm: Arm, prompt: list[int], seed: int) -> None:
    request = Request("s", prompt, 64, None, temperature=1.0, seed=seed, deadline_s=120)
    arm.client._post("/generate", body(request, seed), 120)


def passes(arm: Arm, prompts, args) -> dict:
    """One by one; again, from the prompt cache; then eight at a time with sampled requests between."""
    arm.ids(prompts[0], 16)
    first = [arm.ids(p, args.tokens) for p in prompts]
    again = [arm.ids(p, args.tokens) for p in prompts]
    with ThreadPoolExecutor(8) as pool:
        jobs = []
        for n, prompt in enumerate(prompts):
            jobs.append(pool.submit(arm.ids, prompt, args.tokens))
            if n % 3 == 0:
                pool.submit(sampled, arm, prompt, 10_000 + n)
        many = [job.result() for job in jobs]
    return {"first": first, "again": again, "many": many}


def differing(a: list[dict], b: list[dict]) -> int:
    return sum(x["ids"] != y["ids"] for x, y in zip(a, b, strict=True))


def junk(arm: list[dict], strict: list[dict], prompts) -> dict:
    """Of prompts without a prefill the first id, else the second, comes from a step whose draft columns are junk."""
    wrong, seen = 0, 0
    for got, want, prompt in zip(arm, strict, prompts, strict=True):
        at = 0 if got["cached"] >= len(prompt) - 1 else 1
        if len(want["ids"]) > at and got["ids"][:at] == want["ids"][:at]:
            seen += 1
            wrong += got["ids"][at] != want["ids"][at]
    return {"judged": seen, "not the target's": wrong}


def teacher(target: Path, prompts, answers: list[dict]) -> dict:
    """Largest difference between the engine's log-probabilities and a teacher-forced pass; ids that are no argmax."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).cuda().eval()
    worst = {"relaxed": 0.0, "matched": 0.0}
    differences: dict[str, list[float]] = {"relaxed": [], "matched": []}
    for prompt, answer in zip(prompts, answers, strict=True):
        row = torch.tensor([prompt + answer["ids"]], device="cuda")
        with torch.no_grad():
            logits = model(row).logits[0, len(prompt) - 1 : -1].float()
        ids = torch.tensor(answer["ids"], device="cuda")
        own = torch.log_softmax(logits, -1).gather(1, ids[:, None]).view(-1)
        gap = (own - torch.tensor(answer["logprobs"], device="cuda")).abs()
        for kind, mask in (("relaxed", logits.argmax(-1) != ids), ("matched", logits.argmax(-1) == ids)):
            differences[kind] += gap[mask].tolist()
    for kind, values in differences.items():
        worst[kind] = max(values, default=0.0)
    mean = {kind: sum(values) / max(len(values), 1) for kind, values in differences.items()}
    return {"ids": {k: len(v) for k, v in differences.items()}, "largest difference": worst, "mean difference": mean}


def speed(arms: dict[str, Arm], prompts, args) -> dict[str, list[float]]:
    """Output ids per second, one request at a time, arms in turn."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(args.rounds):
        for name in list(arms) if turn % 2 == 0 else list(arms)[::-1]:
            began, count = time.monotonic(), 0
            for prompt in prompts:
                count += len(arms[name].ids(prompt, args.tokens)["ids"])
            rates[name].append(round(count / (time.monotonic() - began), 1))
    return rates


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    work = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    site, source = unpack(args, work)
    prompts = prompts_of(args.target, args.prompts)
    policies = {
        "plain": None,
        "unarmed": None,
        "strict": Policy("strict"),
        "b0": Policy("asd", 0.0),
        "asd": Policy.from_json(args.policy),
        "huge": HUGE,
        "unchecked": HUGE,
    }
    arms: dict[str, Arm] = {}
    report: dict = {"failures": [], "ready_s": {}, "prompts": len(prompts)}
    try:
        for n, name in enumerate(args.arms.split(",")):
            arms[name] = Arm(name, policies[name], 8100 + 40 * n, args, work, site, source)
            time.sleep(2)  # each picks free ports of its own
        check(arms, prompts, args, report)
    except Exception as error:  # the report of what was seen so far is the point of a smoke run
        report["failures"].append(f"{type(error).__name__}: {error}")
        report["tails"] = {name: arm.tail() for name, arm in arms.items() if arm.state() != "ready"}
    finally:
        for arm in arms.values():
            arm.stop()
    text = json.dumps(report, indent=1)
    (args.out / "device_smoke.json").write_text(text)
    print(text)
    return 1 if report["failures"] else 0


def check(arms: dict[str, Arm], prompts, args, report: dict) -> None:
    deadline, waiting = time.monotonic() + args.ready, dict(arms)
    while waiting:
        for name, arm in list(waiting.items()):
            state = arm.state()
            if state == "failed":
                raise RuntimeError(f"{name}: did not start")
            if state == "ready":
                report["ready_s"][name] = round(time.monotonic() - arm.started, 1)
                del waiting[name]
        if time.monotonic() > deadline:
            raise RuntimeError(f"not ready: {', '.join(waiting)}")
        time.sleep(0.5)
    results = {}
    for name, arm in arms.items():
        results[name] = passes(arm, prompts, args)
        if arm.policy is not None:
            report.setdefault("snapshots", {})[name] = arm.client.server().snapshot.raw | {"files": "left out"}
    report["ids"] = {n: sum(len(a["ids"]) for a in r["first"]) for n, r in results.items()}
    report["cached"] = {
        n: sum(a["cached"] >= len(p) - 1 for a, p in zip(r["again"], prompts, strict=True)) for n, r in results.items()
    }
    base = results["unarmed"]
    report["differ from unarmed"] = {
        name: {kind: differing(result[kind], base[kind]) for kind in base} for name, result in results.items()
    }
    report["differ from own first pass"] = {
        name: {kind: differing(result["first"], result[kind]) for kind in ("again", "many")}
        for name, result in results.items()
    }
    expect = report["failures"].append
    for name in ("strict", "b0"):
        if name in results and any(report["differ from unarmed"][name].values()):
            expect(f"{name}: ids differ from unarmed")
    for name in ("asd", "huge"):
        if name in results:
            counters = report["snapshots"][name]["counters"][arms[name].policy.key]
            if not counters["relaxed"] or not report["differ from unarmed"][name]["first"]:
                expect(f"{name}: no relaxed draft, or no other ids: {counters}")
    for name in ("huge", "unchecked"):
        if name in results:
            found = {kind: junk(results[name][kind], base[kind], prompts) for kind in base}
            report.setdefault("junk", {})[name] = found
            wrong = sum(part["not the target's"] for part in found.values())
            if (wrong > 0) != (name == "unchecked"):
                expect(f"{name}: {wrong} ids that only a junk column explains")
    if "asd" in results:
        if args.teacher:
            report["teacher"] = {n: teacher(args.target, prompts, results[n]["first"]) for n in ("unarmed", "asd")}
        report["continued"] = continued(arms["asd"], arms["unarmed"], prompts, results["asd"]["first"])
        report["equalities"] = equalities(arms["asd"], prompts, args)
        if not report["equalities"]["hold"]:
            expect("asd: counters and answers disagree")
    timed = {name: arm for name, arm in arms.items() if name in ("plain", "unarmed", "strict", "b0", "asd")}
    report["tokens_per_s"] = speed(timed, prompts[:16], args)


def continued(arm: Arm, plain: Arm, prompts, answers: list[dict]) -> dict:
    """Prompts that run on into an answer with relaxed ids, served from the cache that answer left: is its KV of them?

    The next id is compared with a server that never saw the answer; prefill and decode kernels may round apart.
    """
    cached, other, judged = [], 0, 0
    for prompt, answer in list(zip(prompts, answers, strict=True))[:16]:
        longer = prompt + answer["ids"][: 2 * len(answer["ids"]) // 3]
        got, want = arm.ids(longer, 4), plain.ids(longer, 4)
        cached.append(got["cached"] - len(prompt))
        judged += 1
        other += got["ids"][0] != want["ids"][0]
    return {"judged": judged, "ids of the answer in the cache": cached, "next id differs": other}


def equalities(arm: Arm, prompts, args) -> dict:
    """What a harness checks of a window: counters of the server against the sum over its answers."""
    key = arm.policy.key
    before = arm.client.server().snapshot.counters[key]
    answers = arm.client.generate_many(
        [Request(str(n), p, args.tokens, arm.policy) for n, p in enumerate(prompts[:16])]
    )
    after = arm.client.server().snapshot.counters[key]
    sums = {
        "requests": len(answers),
        "blocks": sum(a.steps for a in answers),
        "drafts_verified": sum(a.proposed for a in answers),
        "relaxed": sum(a.relaxed for a in answers),
    }
    moved = {name: after[name] - before[name] for name in sums}
    return {"answers": sums, "counters": moved, "hold": sums == moved, "one": asdict(answers[0]) | {"output_ids": []}}


if __name__ == "__main__":
    sys.exit(main())
