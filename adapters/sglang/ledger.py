"""What ASD keeps on the device: regret spent and policy parameters, one row per request slot of the engine.

The engine's request pool owns the slot numbers. Rows are written when a request is (re)prefilled, on the stream its
decode steps run on, so a slot that changes hands never shows its old owner's row to the new one, whatever step of
the old owner is still in flight. Everything here is asynchronous: nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from adapters.policy import Policy
from adapters.rules.asd import AsdConfig, Params, Report, as_params, naive
from adapters.rules.common import Accepted, use_kernel

STRICT = AsdConfig.from_policy(Policy("strict"))


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting: CUDA wants pinned memory for that."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def to_host(tensor: Tensor) -> Tensor:
    """Start a copy that is complete once the stream has passed this point; the engine waits for that event anyway."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Detail:
    """What a step did, per row, in one buffer so that one copy brings it to the host.

    report: charge [B, K], relaxed [B], stop [B]. bits [B] int32: bit i set where draft i was relaxed.
    before [B] float32: the ledger before the block.
    """

    def __init__(self, rows: int, drafts: int, device: torch.device, buffer: Tensor | None = None) -> None:
        self.shape = (rows, drafts)
        sizes = [rows * drafts * 4, rows * 4, rows * 4, rows * 4, rows]
        self.buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device) if buffer is None else buffer
        charge, before, bits, relaxed, stop = self.buffer.split(sizes)
        self.before, self.bits = before.view(torch.float32), bits.view(torch.int32)
        self.report = Report(
            charge.view(torch.float32).view(rows, drafts), relaxed.view(torch.int32), stop.view(torch.int8)
        )

    def to_host(self) -> Detail:
        """Starts the copy; it is complete when the engine's own result copy is."""
        return Detail(*self.shape, torch.device("cpu"), to_host(self.buffer))

    @cached_property
    def rows(self) -> tuple[list[int], list[int]]:
        """bits and stop as lists, read once per step: only of a host copy, and only when it is complete."""
        return self.bits.tolist(), self.report.stop.tolist()


class Ledger:
    """spent [slots] float32 and Params [slots]; a slot nobody wrote is strict."""

    def __init__(self, slots: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.spent = torch.zeros(slots, dtype=torch.float32, device=self.device)
        self.params = as_params(STRICT, slots, self.device)

    def assign(self, slots: Tensor, configs: Sequence[AsdConfig], spent: Sequence[float]) -> None:
        """slots [n] int64 on the device; one config and the regret spent so far (nats) per slot."""
        rows = as_params(configs, len(configs), torch.device("cpu"))
        self.spent.index_copy_(0, slots, to_device(torch.tensor(spent, dtype=torch.float32), self.device))
        for table, row in zip(self.params, rows, strict=True):
            table.index_copy_(0, slots, to_device(row, self.device))

    def accept(
        self, draft_ids: Tensor, logits: Tensor, top: Tensor, slots: Tensor, live: Tensor | None, detail: Detail
    ) -> Accepted:
        """Walk a verified block on top of the engine's own argmax, and charge.

        draft_ids [B, K] int64, rows may be strided; logits [B, K+1, V]; top [B, K+1] int64; slots [B] int64;
        live [B] int or None: K; detail filled in place.
        """
        B, K = draft_ids.shape
        if use_kernel(draft_ids):
            from adapters.rules.asd.triton import Launch, walk

            length = torch.empty(B, dtype=torch.int32, device=self.device)
            bonus = torch.empty(B, dtype=torch.int64, device=self.device)
            launch = Launch(
                draft_ids,
                logits,
                length,
                bonus,
                self.spent,
                self.params,
                slots=slots,
                live=live,
                report=detail.report,
                before=detail.before,
                bits=detail.bits,
            )
            walk(launch, top)
            return Accepted(length, bonus)
        spent = self.spent.index_select(0, slots)
        detail.before.copy_(spent)
        params = Params(*(table.index_select(0, slots) for table in self.params))
        live = torch.full((B,), K, dtype=torch.int32) if live is None else live.to(torch.int32)
        regrets = naive.regrets(draft_ids, logits, top)
        out = naive.walk(draft_ids, top, regrets, spent, params, live, detail.report)
        position = torch.arange(K)
        missed = (draft_ids != top[:, :K]) & (position < out.length[:, None])
        detail.bits.copy_((missed.int() << position).sum(1))
        self.spent.index_copy_(0, slots, spent)
        return out
