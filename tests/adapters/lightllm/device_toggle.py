"""What the adapter costs a LightLLM step, on one server: its own functions and the adapter's in turn. One JSON object.

    python3 tests/adapters/lightllm/device_toggle.py --packs DIR --target T --draft D --out DIR [--seconds 100]

Servers differ from each other by a per cent or two, so nothing below that can be seen between two of them. Here one
armed server is told between two requests to put the engine's own functions back, or the adapter's in again, by a
module that only this script puts on its path. Each prompt is asked four times, engine-adapter-adapter-engine, one at a
time and of a fixed length; the ids of all four are compared. Two servers after each other, the other one stopped:

b0    asd with B = 0: what a strict arm costs. The ids must be equal.
walk  asd with a budget that no mismatch fits in: the whole path of a relaxing arm, all but the relaxing itself. Its ids
      are strict's, unless a tie of two logits is broken by the budget.

`decode` is the time from the first id to the last as the client reads them, `wall` that of the whole request. Ratios
are of tokens/s, adapter over engine, with a 95 % interval from a paired bootstrap over prompts; `again` is the second
half of the engine's own answers over the first, in the same way: what the method shows where nothing differs. The file
is written anew after every prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
from device_smoke import FAILED, ROOT, prompts_of, unpack

from adapters.policy import Policy
from harness.engines.base import Request
from harness.engines.lightllm import body

POLICIES = {"b0": Policy("asd", 0.0), "walk": Policy("asd", 1e-30)}
PIPE = "SPECACCEPT_TOGGLE"
FOLLOWED_S = 20.0  # an order is followed within
# The engine's and the adapter's functions in each other's place, while no request is in the engine. Both are set anew
# on every order, so that what the interpreter has to learn again after it is the same for both.
MODULE = """
import os, sys, threading, time
from adapters.lightllm import hook

def follow():
    from adapters.lightllm import patch, seams
    from lightllm.server.router.model_infer.infer_batch import g_infer_context
    pairs = []
    for module in (seams.BACKEND, seams.NORMAL, seams.PARALLEL, seams.SPECULATIVE):
        for holder in (sys.modules[module], getattr(sys.modules[module], "ModeBackend", None)):
            for name, ours in list(vars(holder).items()) if holder else ():
                if name != "init_model" and getattr(ours, "__code__", None) is not None:
                    if ours.__code__.co_filename == patch.__file__ and hasattr(ours, "__wrapped__"):
                        pairs.append((holder, name, ours))
    pipe = os.environ["SPECACCEPT_TOGGLE"]
    orders, done = os.open(pipe, os.O_RDWR), pipe + ".done"
    while True:
        order, number = os.read(orders, 4096).decode().splitlines()[-1].split()
        while g_infer_context.infer_req_ids:
            time.sleep(0.001)
        for holder, name, ours in pairs:
            setattr(holder, name, ours if order == "adapter" else ours.__wrapped__)
        with open(done + ".new", "w") as file:
            file.write(f"{order} {number} {' '.join(sorted({name for _, name, _ in pairs}))}")
        os.replace(done + ".new", done)

armed = hook._patch
def _patch(module):
    armed(module)
    from adapters.lightllm import patch
    if not hasattr(patch.Engine, "follows"):
        serve, patch.Engine.follows = patch.Engine.serve, True
        def then(self, *args, **named):
            serve(self, *args, **named)
            threading.Thread(target=follow, daemon=True).start()
        patch.Engine.serve = then
hook._patch = _patch
hook.install()
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--site", type=Path)
    parser.add_argument("--lightllm", type=Path, help="the folder that holds lightllm/")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--step", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512, help="ids of each answer")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=100.0, help="of questions, of all servers together")
    parser.add_argument("--share", type=float, default=0.7, help="of the seconds, for b0")
    parser.add_argument("--ready", type=float, default=300.0)
    parser.add_argument("--attention", default="fa3")
    parser.add_argument("--mode", default="dspark")
    parser.add_argument("--cores", type=int, default=0, help="of each server, of its own; 0: not pinned")
    return parser.parse_args()


def free_port() -> int:
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        return link.getsockname()[1]


class Armed:
    """One server, and the way to tell it whose functions to run."""

    def __init__(self, name: str, args: argparse.Namespace, work: Path, site: Path, source: Path, cores: list[int]):
        self.name, self.policy, self.port, self.cores = name, POLICIES[name], free_port(), cores
        self.log, self.pipe, self.orders = args.out / f"{name}.log", work / f"orders-{name}", 0
        self.telemetry = work / f"telemetry-{name}"
        os.mkfifo(self.pipe)
        (work / "toggle").mkdir(exist_ok=True)
        (work / "toggle" / "sitecustomize.py").write_text(MODULE)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SPECACCEPT")}
        path = [work / "toggle", site, source, ROOT]
        environ |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "LIGHTLLM_LOG_LEVEL": "warning"}
        environ |= {"PATH": f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}", PIPE: str(self.pipe)}
        environ |= {"SPECACCEPT_POLICY": json.dumps(self.policy.to_json()), "SPECACCEPT_NONCE": name}
        environ["SPECACCEPT_TELEMETRY_DIR"] = str(self.telemetry)
        flags = f"--tp 1 --host 127.0.0.1 --port {self.port} --max_total_token_num 40000 --max_req_total_len 2048"
        flags += " --batch_max_tokens 2048 --running_max_req_size 16 --graph_max_batch_size 8 --disable_shm_warning"
        flags += f" --llm_prefill_att_backend {args.attention} --llm_decode_att_backend {args.attention}"
        flags += f" --mtp_mode {args.mode} --mtp_draft_model_dir {args.draft.resolve()} --mtp_step {args.step}"
        flags += " --schedule_time_interval 0.003 --disable_dynamic_prompt_cache --data_type bfloat16"
        command = [sys.executable, "-m", "lightllm.server.api_server", "--model_dir", str(args.target.resolve())]
        self.process = subprocess.Popen(
            [*command, *flags.split()],
            env=environ, cwd=ROOT, stdout=self.log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )  # fmt: skip
        self.started = time.monotonic()

    def ready(self) -> bool:
        """Raises RuntimeError for one that will never be."""
        if self.process.poll() is not None or FAILED.search(self.log.read_text(errors="replace")):
            raise RuntimeError(f"{self.name}: did not start: {self.log.read_text(errors='replace')[-1500:]}")
        try:
            link = HTTPConnection("127.0.0.1", self.port, timeout=5)
            link.request("GET", "/health")
            return link.getresponse().status == 200
        except OSError:
            return False

    def run(self, whose: str) -> list[str]:
        """From now on the functions of the `engine` or of the `adapter`; the names of those that change place."""
        self.orders += 1
        with self.pipe.open("w") as orders:
            orders.write(f"{whose} {self.orders}\n")
        done, deadline = Path(f"{self.pipe}.done"), time.monotonic() + FOLLOWED_S
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                order, number, *names = done.read_text().split()
                if (order, number) == (whose, str(self.orders)):
                    return names
            time.sleep(0.002)
        raise RuntimeError(f"{self.name}: order {self.orders} ({whose}) was not followed within {FOLLOWED_S:g} s")

    def ask(self, prompt: list[int], tokens: int) -> dict:
        """One request: ids, and seconds to the first and to the last of them."""
        asked = body(Request("r", prompt, tokens, None, ignore_eos=True, deadline_s=120), self.orders)
        link = HTTPConnection("127.0.0.1", self.port, timeout=120)
        ids, began, first, last = [], time.monotonic(), 0.0, 0.0
        link.request("POST", "/generate_stream", json.dumps(asked), {"content-type": "application/json"})
        answer = link.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{self.name}: status {answer.status}: {answer.read()[:300]!r}")
        for line in answer:
            if line.startswith(b"data:"):
                last = time.monotonic()
                first = first or last
                ids.append(json.loads(line[5:])["token"]["id"])
        link.close()
        if len(ids) != tokens:
            raise RuntimeError(f"{self.name}: expected {tokens} ids, found {len(ids)}")
        return {"ids": ids, "wall": last - began, "decode": last - first}

    def signal(self, number: int) -> None:
        """To every process of the server, which has a session of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @contextmanager
    def awake(self):
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)


def measure(server: Armed, prompts: list[list[int]], args: argparse.Namespace, seconds: float, save) -> None:
    """Prompts by ABBA until the time is over. save(rows) after each."""
    rows: list[dict] = []
    names = server.run("adapter")
    for prompt in prompts[:2]:  # compiles, and fills what is allocated once
        server.ask(prompt, args.tokens)
    deadline = time.monotonic() + seconds
    for place, prompt in enumerate(prompts[2:]):
        if time.monotonic() > deadline:
            break
        order = ["engine", "adapter", "adapter", "engine"]
        order = order if place % 2 == 0 else ["adapter", "engine", "engine", "adapter"]
        answers = []
        for whose in order:
            server.run(whose)
            answers.append(server.ask(prompt, args.tokens) | {"whose": whose})
        same = all(answer["ids"] == answers[0]["ids"] for answer in answers)
        rows.append({"same": same} | {key: [(a["whose"], a[key]) for a in answers] for key in ("wall", "decode")})
        save(names, rows)


SIDES = ("engine", "adapter")


def times(rows: list[dict], key: str) -> list[np.ndarray]:
    """Seconds [prompts, 2] of each side, in the order they were asked."""
    return [np.array([[t for w, t in row[key] if w == whose] for row in rows]) for whose in SIDES]


def interval(over: np.ndarray, under: np.ndarray) -> dict[str, float]:
    """sum(over) / sum(under) of seconds per prompt: the ratio of tokens/s, of answers of one length."""
    pick = np.random.default_rng(980406).integers(0, len(over), size=(10_000, len(over)))
    low, high = np.percentile(over[pick].sum(1) / under[pick].sum(1), [2.5, 97.5])
    found = {"ratio": over.sum() / under.sum(), "low": low, "high": high}
    return {name: round(float(value), 5) for name, value in found.items()}


def summary(names: list[str], rows: list[dict], tokens: int) -> dict:
    found: dict = {"exchanged": names, "prompts": len(rows), "tokens": tokens}
    found["ids equal"] = sum(row["same"] for row in rows)
    for key in ("decode", "wall"):
        engine, adapter = times(rows, key)
        rates = {name: round(tokens * t.size / t.sum(), 1) for name, t in zip(SIDES, (engine, adapter), strict=True)}
        found[key] = {
            "tokens_per_s": rates,
            "adapter over engine": interval(engine.sum(1), adapter.sum(1)),
            "again": interval(engine[:, 0], engine[:, 1]),
        }
    return found


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    work = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    site, source = unpack(args, work)
    prompts = prompts_of(args.target, args.prompts)
    mask = sorted(os.sched_getaffinity(0))
    shares = [mask[n * args.cores : (n + 1) * args.cores] for n in range(len(POLICIES))]
    report: dict = {"failures": [], "ready_s": {}, "cores": dict(zip(POLICIES, shares, strict=True))}
    if args.cores:
        if len(mask) <= args.cores * len(POLICIES):
            raise SystemExit(f"--cores: expected more than {args.cores * len(POLICIES)} cores, found {len(mask)}")
        os.sched_setaffinity(0, mask[args.cores * len(POLICIES) :])
    servers: list[Armed] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the file is whole then too, and no server is left

    def write() -> None:
        (args.out / ".new").write_text(json.dumps(report, indent=1))
        os.replace(args.out / ".new", args.out / "device_toggle.json")

    try:
        for name, cores in zip(POLICIES, shares, strict=True):
            servers.append(Armed(name, args, work, site, source, cores))
            time.sleep(2)  # each picks free ports of its own
        wait(servers, args, report)
        for server in servers:
            server.signal(signal.SIGSTOP)
        print(f"ready: {report['ready_s']}; {os.environ.get('TOGGLE_NOTE', 'tokens/s follow')}", flush=True)
        for server, part in zip(servers, (args.share, 1 - args.share), strict=True):

            def save(names, rows, server=server):
                report[server.name] = summary(names, rows, args.tokens) | {"policy": server.policy.key, "rows": rows}
                write()

            with server.awake():
                measure(server, prompts, args, args.seconds * part, save)
            if server.name not in report:
                report["failures"].append(f"{server.name}: no prompt was answered in its time")
            elif server.name == "b0" and report["b0"]["ids equal"] != report["b0"]["prompts"]:
                report["failures"].append("b0: ids of the adapter and of the engine differ")
    except Exception as error:  # what was seen so far is kept
        report["failures"].append(f"{type(error).__name__}: {error}")
    finally:
        for server in servers:
            server.signal(signal.SIGKILL)
            server.process.wait()
        write()
    short = {k: {n: x for n, x in v.items() if n != "rows"} if isinstance(v, dict) else v for k, v in report.items()}
    print(json.dumps(short, indent=1))
    return 1 if report["failures"] else 0


def wait(servers: list[Armed], args: argparse.Namespace, report: dict) -> None:
    waiting, deadline = list(servers), time.monotonic() + args.ready
    while waiting:
        for server in list(waiting):
            if server.ready():
                report["ready_s"][server.name] = round(time.monotonic() - server.started, 1)
                waiting.remove(server)
        if waiting and time.monotonic() > deadline:
            raise RuntimeError(f"not ready: {', '.join(server.name for server in waiting)}")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
