"""What the adapter does on the host in a decode step and a prefill, counted without a GPU.

    TRITON_INTERPRET=0 python tests/adapters/sglang/host_cost.py [--root FOLDER] [--rows 1 16] [--steps 400]

The real adapter around a toy step: the engine's own accept, its result, the booking of every row. Kernel launches of
ours are counted and not run (what Triton's launcher takes is not in the times), and so are copies between host and
device. torch's operations on CPU tensors stand for the device's: their number is what counts, their time is not that
of a GPU. --root: a folder whose `adapters` is measured, for a comparison of two revisions. Prints JSON; microseconds
are medians of a whole toy step, the engine's own match included where it runs: `engine` is the adapter with nothing to
do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=str(Path(__file__).resolve().parents[3]))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    sys.path.insert(0, args.root)
    import torch

    torch.set_num_threads(1)
    print(json.dumps({str(rows): measure(rows, args.steps) for rows in args.rows}, indent=1))
    return 0


POLICIES = {
    "engine": None,
    "strict": {"rule": "strict"},
    "asd-b0": {"rule": "asd", "budget": 0.0},
    "asd": {"rule": "asd", "budget": 2.0625, "gate": 2.0625, "max_mismatches": 1, "suffix_value": "normalized"},
}
K, V, SLOTS = 7, 512, 64


FILLED = {17: 3, 18: 0, 21: 0.5, 23: 3, 25: 1}  # length, bonus, charge, stop, bits: one relaxed draft in a row


class Launches:
    """Stands for the walk's kernel: a launch is counted, its answer filled in (FILLED by place, in time: ~5 us)."""

    count = 0

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        Launches.count += 1
        for where, value in FILLED.items():
            args[where].fill_(value)


@contextmanager
def counted():
    """Operations that reach torch's dispatcher, and those of them that only make a view."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[str, int] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[str(func)] = seen.get(str(func), 0) + 1
            return func(*args, **(kwargs or {}))

    with Count(), torch.inference_mode():
        yield seen


VIEWS = ("view", "slice", "select", "split", "unbind", "alias", "expand", "t.", "empty", "detach", "lift")


def kernels(seen: dict[str, int]) -> int:
    return sum(n for name, n in seen.items() if not any(name.removeprefix("aten.").startswith(v) for v in VIEWS))


def measure(rows: int, steps: int) -> dict:
    return {name: one(policy, rows, steps) for name, policy in POLICIES.items()}


def one(policy: dict | None, rows: int, steps: int) -> dict:
    """What a step and a prefill of `rows` requests of one policy take."""
    import torch

    import adapters.rules.asd.triton as kernel
    import adapters.sglang.ledger as ledger
    from adapters.arm import Arming
    from adapters.policy import Policy
    from adapters.sglang.adapter import Adapter, Worker

    kernel._walk_kernel = Launches()
    ledger.use_kernel = lambda tensor: True
    g = torch.Generator().manual_seed(0)
    drafts, top = torch.zeros(rows, K + 1, dtype=torch.int64), torch.zeros(rows, K + 1, dtype=torch.int64)
    drafts[:, 4] = 1  # three are accepted
    logits = torch.rand(rows * (K + 1), V, generator=g)
    slots = torch.arange(rows)
    adapter = Adapter("0.5.16", Arming())
    adapter.worker = Worker(K, torch.device("cpu"), lambda: SLOTS)
    custom = None if policy is None else {"specaccept": Policy.from_json(policy).to_json()}
    reqs = [request(str(i), custom) for i in range(rows)]
    batch = SimpleNamespace(forward_mode=Mode(True), reqs=reqs, req_pool_indices=slots)

    def match(*, candidates, target_predict):  # the engine's own, as in sglang 0.5.16
        length = (candidates[:, 1:] == target_predict[:, :-1]).to(torch.int32).cumprod(dim=1).sum(dim=1)
        bonus = target_predict[torch.arange(len(candidates)), length]
        return length, bonus

    def accept(**kwargs):
        length, bonus = adapter.greedy(match, candidates=kwargs["candidates"], target_predict=top)
        return length, bonus, length

    def worker(_worker, _batch):
        kwargs = {"candidates": drafts, "target_logits": logits, "cutoff_layout": None}
        out = adapter.accept(accept, **kwargs)
        return SimpleNamespace(outs=out, num_correct_drafts_per_req_cpu=[3] * rows, cap_lens=None)

    def nothing(*args):
        return None

    def step():
        result = adapter.forward(worker, None, batch)
        adapter.resolve(nothing, None, result, batch)

    def prefill():
        adapter.forward(lambda *a: None, None, batch)

    wide = SimpleNamespace(forward_mode=Mode(True), reqs=[request("other", None)], req_pool_indices=slots[:1])
    wide.reqs[0].sampling_params.custom_params = {"specaccept": Policy.from_json(POLICIES["asd"]).to_json()}
    adapter.forward(lambda *a: None, None, wide)  # a ledger is there, as on a server that has served ASD
    prefill()
    with counted() as seen_prefill:
        prefill()
    batch.forward_mode = Mode(False)
    with torch.inference_mode():
        for _ in range(20):
            step()
        Launches.count = 0
        with counted() as seen:
            step()
        launches = Launches.count
        times = []
        for _ in range(steps):
            begin = time.perf_counter_ns()
            step()
            times.append(time.perf_counter_ns() - begin)
        batch.forward_mode = Mode(True)
        prefills = []
        for _ in range(steps // 4):
            begin = time.perf_counter_ns()
            prefill()
            prefills.append(time.perf_counter_ns() - begin)
    return {
        "walk_launches": launches,
        "torch_kernels": kernels(seen) - len(FILLED) * launches,  # without those that fill the toy answer
        "dispatches": sum(seen.values()) - len(FILLED) * launches,
        "step_us": round(statistics.median(times) / 1000, 1),
        "prefill_dispatches": sum(seen_prefill.values()),
        "prefill_us": round(statistics.median(prefills) / 1000, 1),
    }


class Mode(SimpleNamespace):
    def __init__(self, extend: bool) -> None:
        self.extend = extend

    def is_idle(self) -> bool:
        return False

    def is_extend(self) -> bool:
        return self.extend

    def is_decode(self) -> bool:
        return not self.extend


class Request(SimpleNamespace):
    """Weak references reach it, as they reach the engine's."""


def request(rid: str, custom: dict | None) -> SimpleNamespace:
    params = SimpleNamespace(top_k=1, temperature=0.0, custom_params=custom)
    own = {"output_ids": [], "is_retracted": False, "finished": lambda: False, "custom_logit_processor": None}
    return Request(rid=rid, to_finish=None, sampling_params=params, **own)


if __name__ == "__main__":
    sys.exit(main())
