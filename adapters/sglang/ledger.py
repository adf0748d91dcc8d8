"""What ASD keeps on the device: regret spent and policy parameters, one row per request slot of the engine.

The engine's request pool owns the slot numbers. Rows are written when a request is (re)prefilled, on the stream its
decode steps run on, so a slot that changes hands never shows its old owner's row to the new one, whatever step of
the old owner is still in flight. Everything here is asynchronous: nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self, draft_ids: Tensor, logits: Tensor, top: Tensor, slots: Tensor, live: Tensor | None, report: Report
    ) -> Accepted:
        """Walk a verified block on top of the engine's own argmax, and charge.

        draft_ids [B, K] int64, rows may be strided; logits [B, K+1, V]; top [B, K+1] int64; slots [B] int64;
        live [B] int or None: K; report filled in place.
        """
        B, K = draft_ids.shape
        if use_kernel(draft_ids):
            from adapters.rules.asd.triton import Launch, walk

            length = torch.empty(B, dtype=torch.int32, device=self.device)
            bonus = torch.empty(B, dtype=torch.int64, device=self.device)
            launch = Launch(
                draft_ids, logits, length, bonus, self.spent, self.params, slots=slots, live=live, report=report
            )
            walk(launch, top)
            return Accepted(length, bonus)
        spent = pick_rows(self.spent, slots)
        params = Params(*(pick_rows(table, slots) for table in self.params))
        live = torch.full((B,), K, dtype=torch.int32) if live is None else live.to(torch.int32)
        out = naive.walk(draft_ids, top, naive.regrets(draft_ids, logits, top), spent, params, live, report)
        self.spent.index_copy_(0, slots, spent)
        return out


def pick_rows(table: Tensor, slots: Tensor) -> Tensor:
    return table.index_select(0, slots)
