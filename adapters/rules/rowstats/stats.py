"""What `measure` returns, and the checks of its arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adapters.rules.common import FLOATS, INTS, RuleError, check


class RowStats(NamedTuple):
    """Of every row, [...] each. README.md has the definitions.

    peak, z, lse, entropy float32 (float64 from the oracle on float64 logits); top, ties, rank int32.
    """

    peak: Tensor
    top: Tensor
    ties: Tensor
    z: Tensor
    rank: Tensor
    lse: Tensor
    entropy: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device | str) -> RowStats:
        """Buffers of their own for rows of this shape."""
        ints = (1, 2, 4)  # top, ties, rank
        dtypes = [torch.int32 if i in ints else torch.float32 for i in range(len(cls._fields))]
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for dtype in dtypes))

    def flat(self) -> RowStats:
        """The same memory as [rows]."""
        return RowStats(*(field.view(-1) for field in self))


def check_rows(rows: Tensor, ids: Tensor, inverse_temperature: Tensor | None, out: RowStats | None) -> None:
    """Fail unless the arguments of `measure` fit."""
    if not isinstance(rows, Tensor) or rows.ndim < 1 or rows.shape[-1] < 1:
        found = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise RuleError(f"rows: expected shape [..., V], V >= 1, found {found}")
    shape = tuple(rows.shape[:-1])
    check("rows", rows, (*shape, rows.shape[-1]), FLOATS, rows)
    check("ids", ids, shape, INTS, rows)
    if inverse_temperature is not None:
        check("inverse_temperature", inverse_temperature, shape, (torch.float32, torch.float64), rows)
    for name, field in zip(RowStats._fields, out or (), strict=False):
        dtype = torch.int32 if name in ("top", "ties", "rank") else torch.float32
        check(f"out.{name}", field, shape, (dtype,), rows)
        if not field.is_contiguous():
            raise RuleError(f"out.{name}: expected a contiguous tensor, found strides {list(field.stride())}")
