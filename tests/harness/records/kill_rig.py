"""A process that makes a run and is killed at a given line of the harness: `python -m kill_rig (FOLDER LINE)...`.

Each LINE is a life of its own, forked: it makes or continues the run in FOLDER, and SIGKILL ends it when that many
lines of harness/records/run.py have been executed. Prints per life how many lines it lived, and `done` or `killed`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from harness.records import Row, Run
from harness.records import run as module
from harness.records.run import plan_digest
from harness.records.schema import Arm, Identity, Verdict

ARMS, ITEMS = ("strict", "asd"), 4
MACHINE = {"cpu": "x", "packages": {"a": "1"}, "boot": "b", "load_average": [0.5]}


def identity(commit: str = "c") -> Identity:
    found = Identity(
        plan="",
        digest=None,
        config={"model": {"name": "m"}},
        code={"commit": None, "dirty": None, "sha256": commit},
        target={"sha256": "t"},
        draft={"sha256": "d"},
        data={"rows": 1},
    )
    found.plan = plan_digest(found)
    return found


def arm(name: str) -> Arm:
    return Arm(policy={"rule": name}, policy_key=name, policy_source="r", temperature=0.0, expected=ITEMS)


def row(name: str, n: int) -> Row:
    values = {"arm": name, "policy_key": name, "order": n, "item": f"i{n}", "task": "math", "prompt_sha256": "p"}
    return Row(**values, prompt_tokens=3, output_ids=[n, n + 1], wall_s=0.5, steps=n)


def opened(results: Path, **more) -> Run:
    run, _ = Run.open(results, "bench", identity(), MACHINE, {"items": [f"i{n}" for n in range(ITEMS)]}, **more)
    return run


def work(results: Path) -> Run:
    """A small bench: its engine counts a request per answer, from 0 in each life."""
    run = opened(results)
    run.record.arms = run.record.arms or {name: arm(name) for name in ARMS}
    run.serve(f"nonce-{run.segment}")
    run.record.launch = run.record.launch or {"kind": "process"}
    run.record.server = {"version": "1"}
    run.observe({"a.py": "0"}, {"name": "fake"}, None)
    asked = dict.fromkeys(ARMS, 0)
    for n in range(ITEMS):
        if any((name, f"i{n}", None) in run.done for name in ARMS):
            continue
        for name in ARMS:
            asked[name] += 1
            run.append(row(name, n))
        moves = {name: ({"requests": 7}, {"requests": 7 + asked[name]}) for name in ARMS}
        run.checkpoint(moves, {name: [{"requests": asked[name]}] for name in ARMS})
    run.record.summary = {"baseline": "strict"}
    run.finish("complete", Verdict("pass", []))
    return run


def live(results: Path, most: int) -> int:
    """Lines lived; not to return is to be killed."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object):
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            count += 1
            if count == most:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work(results)
    sys.settrace(None)
    return count


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        work(Path(scratch))  # what is imported late is imported once, not in every life
    for results, most in zip(map(Path, sys.argv[1::2]), map(int, sys.argv[2::2]), strict=True):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            lived = live(results, most)
            os.write(write, str(lived).encode())
            os._exit(0)
        os.close(write)
        _, status = os.waitpid(child, 0)
        lived = os.read(read, 100).decode()
        os.close(read)
        print(lived or most, "done" if os.WIFEXITED(status) else "killed", flush=True)


if __name__ == "__main__":
    main()
