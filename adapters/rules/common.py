"""What the rules share: the result type, argument checks that name the field, and the choice of oracle or kernel."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
from torch import Tensor


class Accepted(NamedTuple):
    """length [B] int32: drafts committed, 0..live, bonus not counted. bonus [B] int64: the token after them."""

    length: Tensor
    bonus: Tensor


# What the engines' states count, one row per slot: drafts_verified = live drafts, strict_accepted = drafts the strict
# (or lossless) rule accepts, relaxed = mismatches committed, budget_exhausted = blocks the budget stopped.
COUNTERS = ("blocks", "drafts_verified", "strict_accepted", "relaxed", "budget_exhausted")
MAX_DRAFTS = 15


class RuleError(ValueError):
    """An argument outside what a rule defines."""


def interpreted() -> bool:
    """TRITON_INTERPRET=1: CPU tensors take the Triton kernels through Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def use_kernel(tensor: Tensor) -> bool:
    """CUDA tensors always take the kernel, CPU tensors the torch oracle unless interpreting."""
    return tensor.is_cuda or (tensor.device.type == "cpu" and interpreted())


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Programmatic dependent launch: a CUDA device of compute capability 9 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def check(field: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor) -> None:
    """Fail unless `tensor` has this shape, one of these dtypes and the device of `like`."""
    if not isinstance(tensor, Tensor):
        raise RuleError(f"{field}: expected a tensor, found {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        raise RuleError(f"{field}: expected shape {list(shape)}, found {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise RuleError(f"{field}: expected dtype {names}, found {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.device != like.device:
        raise RuleError(f"{field}: expected device {like.device} (that of draft_ids), found {tensor.device}")


def check_in_place(field: str, tensor: Tensor) -> None:
    """Fail where two elements of a tensor that is written share memory (an expanded view)."""
    if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise RuleError(f"{field}: expected memory of its own for every element, found strides {list(tensor.stride())}")


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTS = (torch.int32, torch.int64)


def check_block(draft_ids: Tensor, field: str, target: Tensor) -> tuple[int, int, int]:
    """Check draft_ids [B, K] int64 against a [B, K+1, V] float tensor called `field`. Returns B, K, V."""
    if not isinstance(draft_ids, Tensor) or draft_ids.ndim != 2:
        found = list(draft_ids.shape) if isinstance(draft_ids, Tensor) else type(draft_ids).__name__
        raise RuleError(f"draft_ids: expected shape [B, K], found {found}")
    B, K = draft_ids.shape
    if K < 1:
        raise RuleError(f"draft_ids: expected K >= 1 drafts, found shape {list(draft_ids.shape)}")
    check("draft_ids", draft_ids, (B, K), (torch.int64,), draft_ids)
    if not isinstance(target, Tensor) or target.ndim != 3 or target.shape[2] < 1:
        found = list(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise RuleError(f"{field}: expected shape [{B}, {K + 1}, V], V >= 1, found {found}")
    V = target.shape[2]
    check(field, target, (B, K + 1, V), FLOATS, draft_ids)
    return B, K, V


def check_live(live: Tensor | None, draft_ids: Tensor) -> Tensor:
    """live [B] int32, default K. The range 0..K is checked where that needs no device sync (CPU); kernels clamp."""
    B, K = draft_ids.shape
    if live is None:
        return torch.full((B,), K, dtype=torch.int32, device=draft_ids.device)
    check("live", live, (B,), INTS, draft_ids)
    if live.device.type == "cpu" and B and (int(live.min()) < 0 or int(live.max()) > K):
        raise RuleError(f"live: expected values in 0..{K}, found {live.tolist()}")
    return live.to(torch.int32).contiguous()


def prefix_length(ok: Tensor) -> Tensor:
    """ok [B, K] bool -> [B] int32, how many leading entries hold."""
    return ok.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """rows [B, R, ...], index [B] -> rows[b, index[b]]."""
    return rows[torch.arange(len(rows), device=rows.device), index.long()]
