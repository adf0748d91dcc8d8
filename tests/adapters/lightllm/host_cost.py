"""What the adapter adds to a verify call on the host, counted without a GPU.

    TRITON_INTERPRET=0 python tests/adapters/lightllm/host_cost.py [--root FOLDER] [--requests 1 8] [--steps 2000]

The real wrappers around functions that do nothing, called as LightLLM's decode step calls them: sample, verify,
scatter, copies, post handling of 3 accepted drafts and the bonus. Kernel launches of ours are counted and not run (what
Triton's launcher takes is not in the times). torch's operations on CPU tensors stand for the device's: their number is
what counts, their time is not that of a GPU. --root: a folder whose `adapters` is measured, for a comparison of two
revisions. Prints JSON; microseconds are medians over steps; `unarmed` is the same calls without wrappers, to be
subtracted. end_us: a step in which every request ends, its record written to a folder, as a telemetry folder has it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

K, V, SLOTS, ACCEPTED = 7, 512, 64, 4
LENGTH, IDS, ACCEPT, STOP = 17, 19, 20, 23  # places of the walk kernel's outputs
POLICIES = {
    "unarmed": None,
    "strict": {"rule": "strict"},
    "asd-b0": {"rule": "asd", "budget": 0.0},
    "asd": {"rule": "asd", "budget": 2.0625, "gate": 2.0625, "max_mismatches": 1, "suffix_value": "normalized"},
}
VIEWS = (
    "view",
    "slice",
    "select",
    "split",
    "unbind",
    "alias",
    "expand",
    "unsqueeze",
    "empty",
    "detach",
    "lift",
    "to.",  # of a tensor that has the type already
    "resolve",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=str(Path(__file__).resolve().parents[3]))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    sys.path.insert(0, args.root)
    import torch

    torch.set_num_threads(1)
    found = {}
    for count in args.requests:
        found[str(count)] = {name: measure(policy, count, args.steps) for name, policy in POLICIES.items()}
    print(json.dumps(found, indent=1))
    return 0


class Launches:
    """Stands for every kernel of ours: a launch is counted; of the walk some outputs are filled in, in time."""

    count = fills = 0

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **named):
        Launches.count += 1
        if len(args) > STOP:
            Launches.fills += 4
            args[LENGTH].fill_(ACCEPTED - 1)  # the walk
            args[IDS].fill_(1)
            args[ACCEPT].fill_(1)
            args[STOP].fill_(1)


class Status:
    """As the engine's own: a number and a comparison."""

    status = 0

    def is_finished(self) -> bool:
        return 1 <= self.status <= 4


def request(slot: int) -> SimpleNamespace:
    param = SimpleNamespace(top_k=1, temperature=1.0, seed=7)
    shared = SimpleNamespace(input_len=100, finish_token_index=-1)
    shared.mtp_verify_step_num = shared.mtp_verify_token_num = shared.mtp_accepted_token_num = 0
    return SimpleNamespace(
        req_idx=slot, sampling_param=SimpleNamespace(shm_param=param), finish_status=Status(), shm_req=shared
    )


class Step:
    """One server's decode step of `count` requests: the engine's calls, through what is armed."""

    def __init__(self, policy: dict | None, count: int, folder: str) -> None:
        import torch

        from adapters.policy import Policy

        self.requests = [request(slot) for slot in range(count)]
        rows = count * (K + 1)
        self.rows = [req for req in self.requests for _ in range(K + 1)]
        self.kept = [req for req in self.requests for _ in range(ACCEPTED)]
        self.table = torch.ones(SLOTS, K + 1, dtype=torch.int64)
        self.starts = torch.arange(0, rows, K + 1, dtype=torch.int32)
        self.slots = torch.arange(count, dtype=torch.int32).repeat_interleave(K + 1)
        self.logits = torch.rand(rows, V)
        self.ids, self.logprobs = torch.ones(rows, dtype=torch.int64), torch.zeros(rows)
        self.answer = torch.full((count,), ACCEPTED, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
        self.proposal = SimpleNamespace(token_ids=torch.zeros(count, K, dtype=torch.int64))
        self.engine = SimpleNamespace(
            sample=lambda logits, reqs, eos_id: (self.ids, self.logprobs),
            mtp_verify=self._verify,
            scatter_mtp_next_tokens=lambda **named: None,
            ModeBackend=type("ModeBackend", (), dict.fromkeys(METHODS, _nothing) | {"_post_handle": self._handle}),
        )
        self.finishing = False
        if policy is not None:
            arm(self.engine, Policy.from_json(policy), folder)
        self.backend = self.engine.ModeBackend()
        self.backend.is_master_in_dp, self.backend.args = True, SimpleNamespace(enable_rl=False)
        self.length = 0

    def __call__(self) -> None:
        engine, backend = self.engine, self.backend
        ids, logprobs = engine.sample(self.logits, self.rows, [1])
        ranks = backend._get_next_token_ranks(self.logits, ids)
        accept_len, _ = engine.mtp_verify(
            req_to_next_token_ids=self.table,
            b_req_mtp_start_loc=self.starts,
            new_next_token_ids=ids,
            b_req_idx=self.slots,
        )
        engine.scatter_mtp_next_tokens(
            backend=backend,
            proposal=self.proposal,
            target_next_token_ids=ids,
            b_req_mtp_start_loc=self.starts,
            b_req_idx=self.slots,
            mtp_accept_len=accept_len,
        )
        backend._async_copy_next_token_infos_to_pin_mem(
            next_token_ids=ids, next_token_logprobs=logprobs, next_token_ranks=ranks
        )
        self.length += ACCEPTED
        for req in self.requests:  # the engine's own totals
            req.shm_req.mtp_verify_step_num += 1
            req.shm_req.mtp_verify_token_num += K + 1
            req.shm_req.mtp_accepted_token_num += ACCEPTED - 1
        packs = [SimpleNamespace(output_len=self.length - n) for _ in self.requests for n in range(ACCEPTED)]
        backend._post_handle(
            run_reqs=self.kept,
            next_token_ids=None,
            next_token_logprobs=None,
            next_token_ranks=None,
            run_reqs_update_packs=packs,
            extra_post_req_handle_func=None,
        )

    def end(self) -> None:
        """The last step: the engine's post handling finds that every request is finished."""

        self.finishing = True
        self()

    def _verify(self, req_to_next_token_ids, b_req_mtp_start_loc, new_next_token_ids, b_req_idx):
        return self.answer

    def _handle(self, *args, **named) -> None:
        if self.finishing:
            for req in self.requests:
                req.finish_status.status = 2
                req.shm_req.finish_token_index = 100 + self.length - 1


METHODS = (
    "_get_next_token_ranks",
    "_async_copy_next_token_infos_to_pin_mem",
    "_sample_and_scatter_token",
    "_post_handle",
    "init_model",
)


def _nothing(*args, **named):
    return None


def arm(engine: SimpleNamespace, policy, folder: str) -> None:
    """The adapter's own wrappers on functions that do nothing; their signatures are not the engine's."""
    import adapters.rules.asd.triton as kernel
    from adapters.lightllm import accept, exchange, patch

    kernel._walk_kernel = Launches()
    with contextlib.suppress(ImportError):
        from adapters.lightllm import kernel as own

        own.walk_kernel = own._commit_kernel = Launches()
    accept.use_kernel = lambda tensor: True
    patch._original = lambda holder, name, layout: getattr(holder, name)
    tree = Path(__file__).parent / "double"
    state = patch.Engine(policy, tree)
    state.account.finished = exchange.Journal(Path(folder), 0).write
    patch._arm_backend(engine, state)
    if getattr(state, "engine_decides", False):
        return
    patch._arm_sample(engine, state)
    patch._arm_verify(engine, state)
    patch._arm_scatter(engine, "scatter_mtp_next_tokens", lambda named: named["proposal"].token_ids.shape[1], state)


def measure(policy: dict | None, count: int, steps: int) -> dict:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[str, int] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[str(func)] = seen.get(str(func), 0) + 1
            return func(*args, **(kwargs or {}))

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        step = Step(policy, count, folder)
        for _ in range(50):
            step()
        Launches.count = Launches.fills = 0
        with Count():
            step()
        launches, fills = Launches.count, Launches.fills
        gc.disable()
        times = [_timed(step) for _ in range(steps)]
        ends = []
        for _ in range(50):
            short = Step(policy, count, folder)
            for _ in range(24):
                short()
            ends.append(_timed(short.end))
        gc.enable()
    kernels = sum(n for name, n in seen.items() if not name.removeprefix("aten.").startswith(VIEWS))
    return {
        "our_launches": launches,
        "torch_kernels": kernels - fills,
        "dispatches": sum(seen.values()) - fills,
        "step_us": round(statistics.median(times) / 1000, 1),
        "end_us": round(statistics.median(ends) / 1000, 1),
    }


def _timed(call) -> int:
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


if __name__ == "__main__":
    sys.exit(main())
