"""Row statistics as a Triton kernel: one pass over the logits.

A program reduces one piece of one row, PIECE logits; a second launch combines the pieces of each row in order. PIECE
and the order depend on V alone, so a row's numbers are the same in every batch. Nothing waits for the host; with `out`
and `space` nothing is allocated, so a CUDA graph can hold both launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapters.rules.asd.triton import key_value, order_key
from adapters.rules.common import RuleError, check
from adapters.rules.rowstats.stats import RowStats

PIECE = 4096
_NOTHING = tl.constexpr(-(2**63))  # below every key


def piece_of(V: int) -> int:
    return min(PIECE, max(16, triton.next_power_of_2(V)))


class Space:
    """Partial results of up to `rows` rows of V logits, for one `measure` at a time."""

    def __init__(self, rows: int, V: int, device: torch.device | str) -> None:
        self.pieces = triton.cdiv(V, piece_of(V))
        shape = (rows, self.pieces)
        self.keys = torch.empty(shape, dtype=torch.int64, device=device)
        self.counts = torch.empty((*shape, 2), dtype=torch.int32, device=device)  # equal to its max; before x
        self.sums = torch.empty(
            (*shape, 2), dtype=torch.float32, device=device
        )  # S and sum e^d (-d), of the piece's max

    def check(self, rows: int, V: int, like: Tensor) -> None:
        if len(self.keys) < rows:
            raise RuleError(f"space: expected room for {rows} rows, found {len(self.keys)}")
        check("space.keys", self.keys, (len(self.keys), triton.cdiv(V, piece_of(V))), (torch.int64,), like)


@triton.jit
def _token(z_row, Ids, r, V):
    """x of a row and z(x), NaN where x is not a token."""
    x = tl.load(Ids + r).to(tl.int64)
    z_x = tl.load(z_row + x, mask=(x >= 0) & (x < V), other=float("nan")).to(tl.float32)
    return x, z_x


@triton.jit
def _piece_kernel(Rows, stride_r, V, Ids, Scale, Keys, Counts, Sums, pieces, PIECE: tl.constexpr, SCALE: tl.constexpr):
    r, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    z_row = Rows + r * stride_r
    x, z_x = _token(z_row, Ids, r, V)
    v = piece * PIECE + tl.arange(0, PIECE)
    here = v < V
    z = tl.load(z_row + v, mask=here, other=float("-inf")).to(tl.float32)
    key = order_key(z)
    highest = tl.max(tl.where(here, key, -0x80000000), axis=0)
    index = tl.min(tl.where(here & (key == highest), v, 0x7FFFFFFF), axis=0)
    equal = tl.sum((here & (key == highest)).to(tl.int32), axis=0)
    before = tl.sum((here & ((z > z_x) | ((z == z_x) & (v < x)))).to(tl.int32), axis=0)
    peak = key_value(highest)
    scale = tl.load(Scale + r).to(tl.float32) if SCALE else 1.0
    d = (z - peak) * scale
    mass = here & (z > float("-inf"))
    e = tl.where(mass, tl.exp(d), 0.0)
    spread = tl.where(e > 0, e * -d, 0.0)
    at = r * pieces + piece
    tl.store(Keys + at, (highest.to(tl.int64) << 31) | (0x7FFFFFFF - index).to(tl.int64))
    tl.store(Counts + 2 * at, equal)
    tl.store(Counts + 2 * at + 1, before)
    tl.store(Sums + 2 * at, tl.sum(e, axis=0))
    tl.store(Sums + 2 * at + 1, tl.sum(spread, axis=0))


@triton.jit
def _combine_kernel(
    Rows, stride_r, V, Ids, Scale, Keys, Counts, Sums, pieces,
    Peak, Top, Ties, Z, Rank, Lse, Entropy,
    PIECES: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    _, z_x = _token(Rows + r * stride_r, Ids, r, V)
    j = tl.arange(0, PIECES)
    here = j < pieces
    at = r * pieces + j
    packed = tl.load(Keys + at, mask=here, other=_NOTHING)
    best = tl.max(packed, axis=0)
    top_key = (best >> 31).to(tl.int32)
    key = (packed >> 31).to(tl.int32)
    peak = key_value(top_key)
    equal = tl.load(Counts + 2 * at, mask=here, other=0)
    before = tl.load(Counts + 2 * at + 1, mask=here, other=0)
    S_j = tl.load(Sums + 2 * at, mask=here, other=0.0)
    A_j = tl.load(Sums + 2 * at + 1, mask=here, other=0.0)
    scale = tl.load(Scale + r).to(tl.float32) if SCALE else 1.0
    gap = (peak - key_value(key)) * scale
    live = here & (S_j > 0)
    c = tl.where(live, tl.exp(-gap), 0.0)
    S = tl.sum(c * S_j, axis=0)
    A = tl.sum(tl.where(c > 0, c * (A_j + gap * S_j), 0.0), axis=0)
    nan = peak != peak
    infinite = (peak == float("inf")) | (peak == float("-inf"))
    log_S = tl.log(S)
    lse = tl.where(infinite, peak, peak * scale + log_S)
    entropy = tl.where(infinite | nan, float("nan"), log_S + A / S)
    tl.store(Peak + r, peak)
    tl.store(Top + r, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32))
    tl.store(Ties + r, tl.where(nan, 0, tl.sum(tl.where(here & (key == top_key), equal, 0), axis=0)))
    tl.store(Z + r, z_x)
    tl.store(Rank + r, tl.where(z_x != z_x, V, tl.sum(before, axis=0)))
    tl.store(Lse + r, tl.where(nan, float("nan"), lse))
    tl.store(Entropy + r, entropy)


def measure(
    rows: Tensor,
    ids: Tensor,
    inverse_temperature: Tensor | None = None,
    out: RowStats | None = None,
    space: Space | None = None,
) -> RowStats:
    """naive.measure through the kernels. Rows without a contiguous last dimension and one stride are copied."""
    shape, V = tuple(rows.shape[:-1]), rows.shape[-1]
    z = rows.reshape(-1, V)
    z = z if z.stride(1) == 1 else z.contiguous()
    z = z.float() if z.dtype == torch.float64 else z
    flat, scale = ids.reshape(-1), inverse_temperature
    scale = flat if scale is None else scale.reshape(-1)  # stands for a pointer that no path reads
    out = RowStats.empty(shape, rows.device) if out is None else out
    if not len(z):
        return out
    space = Space(len(z), V, rows.device) if space is None else space
    space.check(len(z), V, rows)
    who = (z, z.stride(0), V, flat.contiguous(), scale.contiguous(), space.keys, space.counts, space.sums, space.pieces)
    scaled = inverse_temperature is not None
    _piece_kernel[(len(z), space.pieces)](*who, PIECE=piece_of(V), SCALE=scaled, num_warps=8)
    few = max(2, triton.next_power_of_2(space.pieces))
    _combine_kernel[(len(z),)](*who, *out.flat(), PIECES=few, SCALE=scaled, num_warps=1)
    return out
