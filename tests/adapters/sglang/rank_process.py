"""One rank of test_sglang_ranks.py: rank_process.py STORE RANK. Prints one JSON object, what it saw of each case."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

# isort: split
from conftest import arm_plugin  # which stands in for torchvision, before the engine is imported

# isort: split
from toy_engine import ToyWorker, blocks, decode, prefilled, request, server_args

from adapters.policy import Policy

K, V, ROWS = 5, 12, 16
POLICIES = {"asd": Policy("asd", 4.0, 1.5, 2), "block": Policy("block")}
CASES = {"asd": ("asd", 2048, 0.0), "asd apart": ("asd", 256, 1.0), "block": ("block", 64, 0.0)}


def group(rank: int) -> SimpleNamespace:
    """The face of the engine's group over gloo: device tensors are CPU tensors here."""
    return SimpleNamespace(
        world_size=2,
        rank_in_group=rank,
        ranks=[0, 1],
        cpu_group=dist.group.WORLD,
        device_group=dist.group.WORLD,
        broadcast=lambda tensor, src=0: dist.broadcast(tensor, src),
    )


def main(store: str, rank: int) -> dict[str, dict]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    adapter = arm_plugin(Path(store).parent / f"site-{rank}")
    ranks = group(rank)
    import sglang.srt.distributed

    sglang.srt.distributed.get_tp_group = lambda: ranks
    # The walk in torch: through Triton's interpreter, which the engine's sampling kernels need here, it takes minutes.
    sys.modules["adapters.sglang.ledger"].use_kernel = lambda tensor: False
    return {name: drive(adapter, ranks, *case) for name, case in CASES.items()}


def drive(adapter, ranks: SimpleNamespace, rule: str, count: int, noise: float) -> dict:
    """count blocks of a rule, rank 1's logits off by up to `noise`."""
    adapter.worker = adapter.ledger = adapter.step = adapter.differences = None
    worker = ToyWorker(K)
    worker._verify_executor._tp_sync = tp_sync(ranks)
    adapter.arm(worker, server_args(tp_size=2))
    temperature = float(rule == "block")
    reqs = [
        request(f"r{i}", temperature=temperature, policy=POLICIES[rule], max_new_tokens=100000) for i in range(ROWS)
    ]
    prefilled(worker, reqs, range(1, ROWS + 1))
    own: list[int] = []
    align = type(adapter)._align

    def watched(out, step):
        own.extend(out[0].tolist())
        align(adapter, out, step)

    adapter._align = watched
    lengths, tokens = [], []
    for turn in range(count // ROWS):
        drafts, logits = blocks(turn, ROWS, K, V)
        if noise and ranks.rank_in_group:
            logits = logits + noise * torch.rand(logits.shape, generator=torch.Generator().manual_seed(turn))
        torch.manual_seed(turn)  # the engine's coins: equal on all ranks, as its own seed is
        draft_logits = logits[:, :K] if temperature else None
        outs = worker.forward_batch_generation(
            decode(reqs, range(1, ROWS + 1), drafts, logits, draft_logits=draft_logits)
        ).outs
        lengths += outs.correct_len.tolist()
        rows = zip(outs.out_tokens.tolist(), outs.correct_len.tolist(), strict=True)
        tokens.append([row[: n + 1] for row, n in rows])
    return {
        "own_lengths": own,
        "lengths": lengths,
        "out_tokens": tokens,
        "spent": [] if adapter.ledger is None else adapter.ledger.spent.tolist(),
        "ranks": worker.dump_info_records()["specaccept"]["ranks"],
    }


def tp_sync(ranks: SimpleNamespace) -> object:
    """The engine's own, where this release has one."""
    try:
        from sglang.srt.speculative.spec_tp_sync import SpecTpSync
    except ImportError:
        return SimpleNamespace(sync=lambda site, values: values)
    return SpecTpSync(ranks)


if __name__ == "__main__":
    store, rank = sys.argv[1:]
    status = 1
    try:
        print(json.dumps(main(store, int(rank))), flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # the engine's import leaves threads behind
