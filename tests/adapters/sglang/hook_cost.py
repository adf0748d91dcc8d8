"""What the armed adapter adds on the host to a verify step and to a request of the installed wheel, on a CPU.

    VENV/bin/python tests/adapters/sglang/hook_cost.py [--root FOLDER] [--rows 1 16] [--steps 400]

The engine's own worker entry, accept and finalize around toy tensors, with the hooks in and out in turn (on, off, off,
on): added is the median difference of neighbours, in microseconds. Dispatches are torch operations of a step. --root: a
folder whose `adapters` is measured. Prints JSON. `host_cost.py` counts the same without a wheel.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
STEPS = 20  # of one side before the other's turn
POLICIES = {
    "none": None,
    "strict": {"rule": "strict"},
    "asd-b0": {"rule": "asd", "budget": 0.0},
    "asd": {"rule": "asd", "budget": 2.0625, "gate": 2.0625, "max_mismatches": 1, "suffix_value": "normalized"},
}
K, V = 7, 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=str(HERE.parents[2]))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "0")
    sys.path[:0] = [str(HERE), args.root]
    conftest = importlib.import_module("conftest")  # whose stubs come before the engine
    import sglang
    import torch

    torch.set_num_threads(1)
    adapter = conftest.arm_plugin(Path(tempfile.mkdtemp()))
    from sglang.srt import distributed
    from toggle_plugin import Toggle
    from toy_engine import ToyWorker, server_args

    distributed.get_tp_group = lambda: SimpleNamespace(world_size=1)
    worker = ToyWorker(K)
    adapter.arm(worker, server_args())
    toggle = Toggle(sglang.__version__)
    found = {
        name: {str(rows): measure(adapter, worker, toggle, policy, rows, args.steps) for rows in args.rows}
        for name, policy in POLICIES.items()
    }
    print(json.dumps({"sglang": sglang.__version__, "added": found}, indent=1))
    return 0


def measure(adapter, worker, toggle, policy, rows: int, steps: int) -> dict:
    from toy_engine import blocks, decode, extend, prefilled, request

    from adapters.policy import Policy

    asked = None if policy is None else Policy.from_json(policy)
    reqs = [request(f"r{i}", policy=asked, max_new_tokens=10**6) for i in range(rows)]
    slots = list(range(1, rows + 1))
    prefilled(worker, [request("wide", policy=Policy("asd", budget=1.0))], [rows + 1])  # the server has a ledger
    type(worker).dump_info_records(worker)  # and has forgotten that request
    prefilled(worker, reqs, slots)
    batch = decode(reqs, slots, *blocks(0, rows, K, V))

    def nothing(*args, **kwargs):
        return None

    def through(method):  # as the registry wraps a hook
        return lambda *args, **kwargs: method(nothing, *args, **kwargs)

    sides = {True: [through(adapter.resolve), through(adapter.payload)], False: [nothing, nothing]}
    sent = SimpleNamespace(rids=[])

    def step(on: bool) -> None:
        result = worker.forward_batch_generation(batch)
        resolve, payload = sides[on]
        resolve(None, result, batch)
        payload(sent, dp_rank=0, is_idle_batch=False)

    added, dispatches = alternate(toggle, step, steps)
    prefill = extend(reqs, slots)
    added_prefill, dispatches_prefill = alternate(toggle, lambda on: worker.forward_batch_generation(prefill), steps)
    added_admission, _ = alternate(toggle, lambda on: admission(asked), steps)
    return {
        "step_us": added,
        "dispatches": dispatches,
        "prefill_us": added_prefill,
        "prefill_dispatches": dispatches_prefill,
        "admission_us": added_admission,
    }


def admission(policy) -> None:
    """One request through the tokenizer's check, the scheduler's, and a State of its own at the end of its life."""
    from sglang.srt.speculative import dflash_utils
    from toy_engine import request

    req = request("r", policy=policy)
    req.sampling_params.verify(1000)
    dflash_utils.validate_dflash_request(req, True)


def alternate(toggle, run, steps: int) -> tuple[float, dict[str, int]]:
    """Median microseconds that the hooks add, and torch operations on both sides."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    def side(on: bool) -> float:
        toggle.set(on)
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter_ns()
            run(on)
            times.append(time.perf_counter_ns() - begin)
        return statistics.median(times) / 1000

    seen = {}
    try:
        for on in (True, False):
            toggle.set(on)
            for _ in range(5):
                run(on)
            with Count() as count:
                run(on)
            seen["on" if on else "off"] = count.seen
        pairs = [(side(True), side(False), side(False), side(True)) for _ in range(max(1, steps // STEPS))]
    finally:
        toggle.set(True)
    return round(statistics.median((a + d - b - c) / 2 for a, b, c, d in pairs), 2), seen


if __name__ == "__main__":
    sys.exit(main())
