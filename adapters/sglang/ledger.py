"""What ASD keeps on the device: regret spent and policy parameters, one row per request slot of the engine.

The engine's request pool owns the slot numbers. Rows are written when a request is (re)prefilled, on the stream its
decode steps run on, so a slot that changes hands never shows its old owner's row to the new one, whatever step of
the old owner is still in flight. Everything here is asynchronous: nothing waits for the device.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

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

    def __init__(self, rows: int, drafts: int, device: torch.device, pinned: bool = False) -> None:
        self.shape = (rows, drafts)
        sizes = [rows * drafts * 4, rows * 4, rows * 4, rows * 4, rows]
        self.buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device, pin_memory=pinned)
        charge, before, bits, relaxed, stop = self.buffer.split(sizes)
        self.before, self.bits = before.view(torch.float32), bits.view(torch.int32)
        self._stop, self._charge = stop, charge
        self.report = Report(
            charge.view(torch.float32).view(rows, drafts), relaxed.view(torch.int32), stop.view(torch.int8)
        )

    @cached_property
    def host(self) -> SimpleNamespace:
        """bits, stop and charge of a buffer on the host as arrays of C: a list of them takes no torch operation."""
        rows, drafts = self.shape
        return SimpleNamespace(
            bits=(ctypes.c_int32 * rows).from_address(self.bits.data_ptr()),
            stop=(ctypes.c_int8 * rows).from_address(self._stop.data_ptr()),
            charge=(ctypes.c_float * (rows * drafts)).from_address(self._charge.data_ptr()),
        )


class Copied:
    """A step's Detail on the host, complete when the engine's own result copy is.

    Its memory returns to `spare` once the engine lets go of the step's result: a later copy into it comes behind this
    one in the stream, read or not.
    """

    def __init__(self, source: Detail, spare: list[Detail]) -> None:
        on_device = source.buffer.is_cuda
        self.detail = spare.pop() if spare else Detail(*source.shape, torch.device("cpu"), pinned=on_device)
        self.spare = spare
        self.detail.buffer.copy_(source.buffer, non_blocking=on_device)

    def __del__(self) -> None:
        self.spare.append(self.detail)

    @property
    def report(self) -> Report:
        return self.detail.report

    @cached_property
    def rows(self) -> tuple[list[int], list[int]]:
        """bits and stop as lists, read once per step, and only when the copy is complete."""
        return list(self.detail.host.bits), list(self.detail.host.stop)

    def charges(self, row: int) -> list[float]:
        """report.charge of a row that relaxed a draft."""
        _, K = self.detail.shape
        return self.detail.host.charge[row * K : (row + 1) * K]


class Ledger:
    """spent [slots] float32 and Params [slots], rows of one table; a slot nobody wrote is strict.

    The step buffers of each batch size are made once: a step reads its Detail back in the stream that the next one
    writes it in.
    """

    def __init__(self, slots: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        width = -(-slots // 4) * 4  # every row begins at a multiple of 16 bytes, as the kernel likes its pointers
        self.table = table([STRICT] * width, [0.0] * width).to(self.device)
        self.spent, budget, gate = self.table[:3].view(torch.float32)[:, :slots]
        self.params = Params(budget, gate, self.table[3, :slots], self.table[4, :slots])
        self._details: dict[tuple[int, int], tuple[Detail, list[Detail]]] = {}
        self._walks: dict[tuple[int, int, bool], Any] = {}

    def assign(self, slots: Tensor, configs: Sequence[AsdConfig], spent: Sequence[float]) -> None:
        """slots [n] int64 on the device; one config and the regret spent so far (nats) per slot. One copy."""
        self.table.index_copy_(1, slots, to_device(table(configs, spent), self.device))

    def detail(self, rows: int, drafts: int) -> Detail:
        """Where a step of this size says what it did: overwritten by the next."""
        key = (rows, drafts)
        if key not in self._details:
            self._details[key] = (Detail(rows, drafts, self.device), [])
        return self._details[key][0]

    def copy(self, detail: Detail) -> Copied:
        """Starts the copy of a `detail` of this ledger."""
        return Copied(*self._details[detail.shape])

    def accept(
        self,
        draft_ids: Tensor,
        logits: Tensor,
        top: Tensor,
        slots: Tensor,
        live: Tensor | None,
        dtype: torch.dtype = torch.int32,
    ) -> Accepted:
        """Walk a verified block on top of the engine's own argmax, and charge.

        draft_ids [B, K] int64, rows may be strided; logits [B (K+1), V]; top [B, K+1] int64; slots [B] int64;
        live [B] int or None: K; dtype: of the lengths. The `detail` of this size is filled.
        """
        B, K = draft_ids.shape
        detail = self.detail(B, K)
        if use_kernel(draft_ids):
            length = torch.empty(B, dtype=dtype, device=self.device)
            bonus = torch.empty(B, dtype=torch.int64, device=self.device)
            key = (B, K, live is not None)
            if key not in self._walks:
                from adapters.rules.asd.triton import Launch, Walk

                self._walks[key] = Walk(
                    Launch(
                        draft_ids,
                        logits.view(B, K + 1, -1),
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
                )
            self._walks[key](draft_ids, top, logits, slots, live, length, bonus)
            return Accepted(length, bonus)
        spent = self.spent.index_select(0, slots)
        detail.before.copy_(spent)
        budget, gate, cap, normalized = (row.index_select(0, slots) for row in self.params)
        params = Params(budget, gate, cap, normalized.bool())
        live = torch.full((B,), K, dtype=torch.int32) if live is None else live.to(torch.int32)
        regrets = naive.regrets(draft_ids, logits.view(B, K + 1, -1), top)
        out = naive.walk(draft_ids, top, regrets, spent, params, live, detail.report)
        position = torch.arange(K)
        missed = (draft_ids != top[:, :K]) & (position < out.length[:, None])
        detail.bits.copy_((missed.int() << position).sum(1))
        self.spent.index_copy_(0, slots, spent)
        return Accepted(out.length.to(dtype), out.bonus)


def table(configs: Sequence[AsdConfig], spent: Sequence[float]) -> Tensor:
    """[5, n] int32 on the host: bits of spent, budget and gate, then cap and normalized."""
    first = [struct.unpack("i", struct.pack("f", value))[0] for value in spent]
    return torch.tensor([first, *zip(*map(words, configs), strict=True)], dtype=torch.int32)


@lru_cache(maxsize=256)
def words(config: AsdConfig) -> tuple[int, int, int, int]:
    """A config as a column of the table, below spent."""
    budget, gate, cap, normalized = as_params(config, 1, torch.device("cpu"))
    return int(budget.view(torch.int32)), int(gate.view(torch.int32)), int(cap), int(normalized)
