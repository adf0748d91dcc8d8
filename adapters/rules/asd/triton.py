"""ASD and strict as Triton kernels, bit for bit the answers of naive.py.

Two ways in, one walk:
- `walk`: the engine has its argmax. One small launch, a lane per request: gather z(t_i) and z(x_i), walk, charge.
- `fused`: one pass over the logits. A program reduces one piece of one row to a 64-bit key (value above, position
  below, so that max is torch.argmax: first index on ties, NaN above all) and publishes it. The last programs of the
  launch, one per request, gather everything else meanwhile, wait for the keys of their rows, and walk.

A key is its own message: one 64-bit word, never NOTHING, written once and put back to NOTHING by the one program that
reads it, so no fence and no counter stands between the last logit and the walk. Programs are dispatched in the order of
their ids, so whoever waits has only running or finished programs to wait for (decoupled look-back relies on the same).

Nothing waits for the host, nothing is allocated: the caller owns every buffer, so a CUDA graph can hold the launch.
Rows past `live` are not read. A slot < 0 marks a padded request: nothing of it is read, charged or counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapters.rules.asd.config import Params
from adapters.rules.asd.report import BUDGET, CAP, FULL, GATE, INVALID, Report
from adapters.rules.common import COUNTERS, Accepted, RuleError, interpreted

_FULL, _INVALID, _BUDGET = tl.constexpr(FULL), tl.constexpr(INVALID), tl.constexpr(BUDGET)
_GATE, _CAP = tl.constexpr(GATE), tl.constexpr(CAP)
_INF = tl.constexpr(float("inf"))
_INTERPRETED = tl.constexpr(interpreted())

MAX_PIECES = 128  # programs per row at most
NOTHING = -(2**63)  # no key: not published yet
_NOTHING, _LEAST = tl.constexpr(NOTHING), tl.constexpr(-(2**62))  # and a key below every real one
_COUNTERS = tl.constexpr(len(COUNTERS))


@triton.jit
def order_key(x):
    """float32 -> int32 of the same order, -0 equal to +0, every NaN above everything."""
    x = x + 0.0  # -0 becomes 0; on the GPU every NaN becomes 0x7FFFFFFF, which numpy does not do
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if _INTERPRETED:
        key = tl.where(x != x, 0x7FFFFFFF, key)
    return key


@triton.jit
def key_value(key):
    """The float32 an order_key came from."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _extent(b, here, Starts, Live, rows, requests, K: tl.constexpr, RAGGED: tl.constexpr, HAS_LIVE: tl.constexpr):
    """First row and live drafts of request b."""
    if RAGGED:
        start = tl.load(Starts + b, mask=here, other=0).to(tl.int64)
        end = tl.load(Starts + b + 1, mask=here & (b + 1 < requests), other=0).to(tl.int64)
        end = tl.where(b + 1 < requests, end, rows)
        live = (end - start - 1).to(tl.int32)
    else:
        start = b.to(tl.int64) * (K + 1)
        live = b * 0 + K
        if HAS_LIVE:
            live = tl.load(Live + b, mask=here, other=0).to(tl.int32)
    return start, tl.minimum(tl.maximum(live, 0), K)


def columns(rows: int, wanted: int, warps: int) -> int:
    """Columns of a tile of messages, powers of two all: with fewer elements than threads several threads would hold
    one, could read it at different times, and would then wait for one another at different barriers."""
    return max(triton.next_power_of_2(wanted), 32 * warps // rows)


@triton.jit
def missing(empty):
    """Above 0 where any of a tile is."""
    return tl.max(tl.ravel(empty.to(tl.int32)), axis=0)


@triton.jit
def published(Words, mask, nothing, EMPTY: tl.constexpr):
    """Words read at once, as soon as none of them (under the mask) is EMPTY. nothing: what unmasked lanes read.

    The tile has at least one element a thread (`columns`).
    """
    word = tl.load(Words, mask=mask, other=nothing, volatile=True)
    while missing(word == EMPTY) > 0:
        word = tl.load(Words, mask=mask, other=nothing, volatile=True)
    return word


@triton.jit
def _walk(
    b, here, slot, live, first, zoff, stride_z,
    Draft, draft_row, stride_d, Top, Keys, pieces, Logits, V,
    Spent, Budget, Gate, Cap, Norm,
    Length, Bonus, Ids, Accept, Charge, Relaxed, Stop, Before, Bits, Counts, Regret,
    K: tl.constexpr, KP: tl.constexpr, PIECES: tl.constexpr, IDS: tl.constexpr, ACCEPT: tl.constexpr,
    REPORT: tl.constexpr, CUT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The rule for a vector of requests b [R]. first: row index of position 0; zoff: its offset in Logits.

    Everything it reads is read at once, as [R, KP] tiles, the keys (PIECES > 0; then R = 1) last; the walk then goes
    through registers.
    """
    real = here & (slot >= 0)
    i = tl.arange(0, KP)[None, :]
    exists = real[:, None] & (i <= live[:, None])
    drafted = real[:, None] & (i < live[:, None])
    x = tl.load(Draft + draft_row[:, None] * stride_d + i, mask=drafted, other=-1).to(tl.int64)
    known = drafted & (x >= 0) & (x < V)
    row = zoff[:, None] + i * stride_z
    z_x = tl.load(Logits + row + x, mask=known, other=float("nan")).to(tl.float32)
    spent0 = tl.load(Spent + slot, mask=real, other=0.0)
    budget = tl.load(Budget + slot, mask=real, other=0.0)
    gate = tl.load(Gate + slot, mask=real, other=0.0)
    cap = tl.load(Cap + slot, mask=real, other=0)
    norm = tl.load(Norm + slot, mask=real, other=0).to(tl.int32) != 0
    if COUNT:
        counts = Counts + slot * _COUNTERS
        blocks, verified = tl.load(counts, mask=real, other=0), tl.load(counts + 1, mask=real, other=0)
        strict, loose = tl.load(counts + 2, mask=real, other=0), tl.load(counts + 3, mask=real, other=0)
        drained, total = tl.load(counts + 4, mask=real, other=0), tl.load(Regret + slot, mask=real, other=0.0)
    if PIECES:
        piece = tl.arange(0, PIECES)[None, None, :]
        at = Keys + (first[:, None] + i)[:, :, None] * pieces + piece
        wanted = exists[:, :, None] & (piece < pieces)
        key = published(at, wanted, _LEAST, _NOTHING)
        tl.store(at, tl.full(key.shape, _NOTHING, tl.int64), mask=wanted)
        high, low = (key >> 31).to(tl.int32), (key & 0x7FFFFFFF).to(tl.int32)
        best = tl.max(high, axis=2)
        first_of = tl.max(tl.where(high == best[:, :, None], low, -1), axis=2)
        top = tl.where(exists, 0x7FFFFFFF - first_of, 0).to(tl.int64)
        z_top = key_value(best)
    else:
        top = tl.load(Top + first[:, None] + i, mask=exists, other=0).to(tl.int64)
        z_top = tl.load(Logits + row + top, mask=drafted & (top >= 0) & (top < V), other=float("nan")).to(tl.float32)
    r = z_top - z_x
    r = tl.where((r >= 0) & (r < _INF), r, float("nan"))
    match = drafted & (x == top)
    left = (live[:, None] - i).to(tl.float32)
    value = tl.where(norm[:, None], tl.math.div_rn(left, tl.maximum(live, 1).to(tl.float32)[:, None]), left)
    passes = tl.sum(tl.where(r <= gate[:, None] * value, 1 << i, 0), axis=1)  # bit i: within the gate
    code = tl.where(match, -1.0, r)

    spent, going = spent0, real
    length, relaxed, bits = b * 0, b * 0, b * 0
    for j in tl.static_range(K):
        r_j = tl.sum(tl.where(i == j, code, 0.0), axis=1)
        inside = going & (j < live)
        same = r_j == -1.0
        fits = (spent < budget) & (spent + r_j <= budget) & (((passes >> j) & 1) != 0) & (relaxed < cap)
        charged = inside & (same == 0) & fits
        spent = tl.where(charged, spent + r_j, spent)
        relaxed += charged.to(tl.int32)
        bits += charged.to(tl.int32) << j
        going = inside & (same | charged)
        length += going.to(tl.int32)

    stops = i == length[:, None]
    bonus = tl.sum(tl.where(stops, top, 0), axis=1)
    kept = i < length[:, None]
    charge = tl.where(kept & (match == 0), r, 0.0)
    stop = b * 0 + _FULL
    r_stop = tl.sum(tl.where(stops, code, 0.0), axis=1)
    cut_short = real & (length < live)
    stop = tl.where(cut_short, stop + _CAP, stop)
    stop = tl.where(cut_short & (((passes >> length) & 1) == 0), _GATE, stop)
    over = ((spent < budget) & (spent + r_stop <= budget)) == 0
    stop = tl.where(cut_short & over, _BUDGET, stop)
    stop = tl.where(cut_short & (r_stop != r_stop), _INVALID, stop)

    tl.store(Length + b, length, mask=here)
    tl.store(Bonus + b, bonus, mask=here)
    tl.store(Spent + slot, spent, mask=real)
    if IDS:
        tl.store(Ids + first[:, None] + i, tl.where(kept, x, top), mask=exists)
    if ACCEPT:
        tl.store(Accept + first[:, None] + i, (i <= length[:, None]).to(tl.int32), mask=exists)
    if REPORT:
        tl.store(Charge + b[:, None] * K + i, charge, mask=here[:, None] & (i < K))
        tl.store(Relaxed + b, relaxed, mask=here)
        tl.store(Stop + b, stop.to(tl.int8), mask=here)
    if CUT:
        tl.store(Before + b, spent0, mask=here)
        tl.store(Bits + b, bits, mask=here)
    if COUNT:
        tl.store(counts, blocks + 1, mask=real)
        tl.store(counts + 1, verified + live, mask=real)
        tl.store(counts + 2, strict + length - relaxed, mask=real)
        tl.store(counts + 3, loose + relaxed, mask=real)
        tl.store(counts + 4, drained + (stop == _BUDGET).to(tl.int64), mask=real)
        tl.store(Regret + slot, total + tl.sum(charge.to(tl.float64), axis=1), mask=real)


@triton.jit(do_not_specialize=["requests", "rows"])
def _walk_kernel(
    Draft, stride_d, Top, Logits, stride_b, stride_z, V,
    Slots, Starts, Live, requests, rows,
    Spent, Budget, Gate, Cap, Norm,
    Length, Bonus, Ids, Accept, Charge, Relaxed, Stop, Before, Bits, Counts, Regret,
    K: tl.constexpr, KP: tl.constexpr, LANES: tl.constexpr,
    HAS_SLOTS: tl.constexpr, RAGGED: tl.constexpr, HAS_LIVE: tl.constexpr,
    TABLE: tl.constexpr, IDS: tl.constexpr, ACCEPT: tl.constexpr, REPORT: tl.constexpr, CUT: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = b < requests
    slot = b.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(Slots + b, mask=here, other=-1).to(tl.int64)
    first, live = _extent(b, here, Starts, Live, rows, requests, K, RAGGED, HAS_LIVE)
    zoff = first * stride_z if RAGGED else b.to(tl.int64) * stride_b
    draft_row = slot if TABLE else b.to(tl.int64)
    _walk(
        b, here, slot, live, first, zoff, stride_z, Draft, draft_row, stride_d, Top, Top, 1, Logits, V,
        Spent, Budget, Gate, Cap, Norm, Length, Bonus, Ids, Accept, Charge, Relaxed, Stop, Before, Bits, Counts, Regret,
        K, KP, 0, IDS, ACCEPT, REPORT, CUT, COUNT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "rows"])  # a new batch size must not compile anew
def _fused_kernel(
    Draft, stride_d, Logits, stride_b, stride_z, V, pieces, Keys,
    Slots, Starts, Live, requests, rows,
    Spent, Budget, Gate, Cap, Norm,
    Length, Bonus, Ids, Accept, Charge, Relaxed, Stop, Before, Bits, Counts, Regret,
    K: tl.constexpr, KP: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SLOTS: tl.constexpr, RAGGED: tl.constexpr, HAS_LIVE: tl.constexpr, TABLE: tl.constexpr,
    IDS: tl.constexpr, ACCEPT: tl.constexpr, REPORT: tl.constexpr, CUT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """One program per piece of BLOCK logits of every row, then one program per request that walks."""
    program = tl.program_id(0)
    walker = program - requests * (K + 1) * pieces
    row = program // pieces
    i = row % (K + 1)
    b0 = tl.where(walker < 0, row // (K + 1), walker)
    slot0 = b0.to(tl.int64)
    if HAS_SLOTS:
        slot0 = tl.load(Slots + b0).to(tl.int64)
    first0, live0 = _extent(b0, b0 >= 0, Starts, Live, rows, requests, K, RAGGED, HAS_LIVE)
    zoff = first0 * stride_z if RAGGED else b0.to(tl.int64) * stride_b
    if walker < 0:
        if (slot0 >= 0) & (i <= live0):
            piece = program % pieces
            v = piece * BLOCK + tl.arange(0, BLOCK)
            z = tl.load(Logits + zoff + i.to(tl.int64) * stride_z + v, mask=v < V, other=float("-inf"))
            key = order_key(z.to(tl.float32))
            highest = tl.max(key, axis=0)
            index = tl.min(tl.where(key == highest, v, 0x7FFFFFFF), axis=0)  # first; what is past V comes after all
            packed = (highest.to(tl.int64) << 31) | (0x7FFFFFFF - index).to(tl.int64)
            tl.store(Keys + (first0 + i) * pieces + piece, packed)
    else:
        b = b0 + tl.arange(0, 1)
        slot, first, live = b * 0 + slot0, b * 0 + first0, b * 0 + live0
        draft_row = slot if TABLE else b.to(tl.int64)
        _walk(
            b, b >= 0, slot, live, first, b * 0 + zoff, stride_z,
            Draft, draft_row, stride_d, Keys, Keys, pieces, Logits, V,
            Spent, Budget, Gate, Cap, Norm,
            Length, Bonus, Ids, Accept, Charge, Relaxed, Stop, Before, Bits, Counts, Regret,
            K, KP, PIECES, IDS, ACCEPT, REPORT, CUT, COUNT,
        )  # fmt: skip


_FLAT = ["length", "bonus", "spent", "slots", "live", "starts", "ids", "accepted", "before", "bits", "counts", "regret"]


@dataclass
class Launch:
    """Where the requests of one launch are: layout, ledger and outputs. Tensors the caller owns.

    Dense (starts None): request b has rows b*(K+1)..b*(K+1)+live[b] of the logits. Ragged: rows starts[b] up to the
    next start, the last one up to `rows`. table: draft_ids is indexed by slot, not by request.
    """

    draft_ids: Tensor  # [B, K] or, table, [slots, K]
    logits: Tensor  # dense [B, K+1, V], ragged [rows, V]; last dimension contiguous
    length: Tensor  # [B] int32, out
    bonus: Tensor  # [B] int64, out
    spent: Tensor  # [slots] float32, in and out
    params: Params  # [slots] each
    slots: Tensor | None = None  # [B] int; < 0 padded; None: slot b
    live: Tensor | None = None  # [B] int, dense only
    starts: Tensor | None = None  # [B] int, ragged only
    table: bool = False
    ids: Tensor | None = None  # [rows] int, out: committed ids, then the target's own
    accepted: Tensor | None = None  # [rows] int32, out: 1 at committed rows
    report: Report | None = None
    before: Tensor | None = None  # [B] float32, out, with bits: the ledger before the block
    bits: Tensor | None = None  # [B] int32, out: bit i set where draft i was relaxed
    counts: Tensor | None = None  # [slots, len(COUNTERS)] int64, in and out
    regret: Tensor | None = None  # [slots] float64, in and out

    def arguments(self) -> tuple[tuple, dict]:
        """Kernel arguments from `Slots` on, and the flags. Raises RuleError for a tensor the kernels would misread."""
        self.check_dense()
        some = self.length  # stands for a pointer no path reads
        r, p = self.report, self.params
        ragged = self.starts is not None
        rows = self.logits.shape[0] if ragged else self.length.shape[0] * (self.draft_ids.shape[1] + 1)
        tensors = (
            some if self.slots is None else self.slots,
            some if self.starts is None else self.starts,
            some if self.live is None else self.live,
            self.length.shape[0],
            rows,
            self.spent,
            p.budget,
            p.gate,
            p.cap,
            p.normalized,
            self.length,
            self.bonus,
            some if self.ids is None else self.ids,
            some if self.accepted is None else self.accepted,
            some if r is None else r.charge,
            some if r is None else r.relaxed,
            some if r is None else r.stop,
            some if self.before is None else self.before,
            some if self.bits is None else self.bits,
            some if self.counts is None else self.counts,
            some if self.regret is None else self.regret,
        )
        flags = {
            "K": self.draft_ids.shape[1],
            "KP": triton.next_power_of_2(self.draft_ids.shape[1] + 1),
            "HAS_SLOTS": self.slots is not None,
            "RAGGED": ragged,
            "HAS_LIVE": self.live is not None,
            "TABLE": self.table,
            "IDS": self.ids is not None,
            "ACCEPT": self.accepted is not None,
            "REPORT": r is not None,
            "CUT": self.before is not None,
            "COUNT": self.counts is not None,
        }
        return tensors, flags

    def check_dense(self) -> None:
        """All but draft_ids and logits are indexed without strides."""
        parts = {name: getattr(self, name) for name in _FLAT}
        parts |= {f"params.{name}": tensor for name, tensor in self.params._asdict().items()}
        if self.report is not None:
            parts |= {f"report.{name}": tensor for name, tensor in vars(self.report).items()}
        for name, tensor in parts.items():
            if tensor is not None and not tensor.is_contiguous():
                raise RuleError(f"{name}: expected a contiguous tensor, found strides {list(tensor.stride())}")

    @property
    def strides(self) -> tuple[int, int]:
        """(between requests, between rows) of the logits."""
        return (0, self.logits.stride(0)) if self.logits.ndim == 2 else (self.logits.stride(0), self.logits.stride(1))


def walk(launch: Launch, top: Tensor, lanes: int = 8) -> None:
    """Form (a): `top` [rows] int, the engine's argmax of every row, contiguous."""
    B = launch.length.shape[0]
    if B == 0:
        return
    tensors, flags = launch.arguments()
    _walk_kernel[(triton.cdiv(B, lanes),)](
        launch.draft_ids, launch.draft_ids.stride(0), top, launch.logits, *launch.strides, launch.logits.shape[-1],
        *tensors, LANES=lanes, **flags, num_warps=1,
    )  # fmt: skip


class Walk:
    """`walk` again and again over one ledger and one report: what stays is looked at once, not in every step.

    launch: the first step's, dense and without ids; later steps have its shapes, with or without live as it has.
    """

    def __init__(self, launch: Launch, lanes: int = 8) -> None:
        if launch.starts is not None or launch.ids is not None or launch.accepted is not None:
            raise RuleError("launch: expected a dense one without ids, found starts, ids or accepted")
        tensors, flags = launch.arguments()
        self._sizes = tensors[3:5]  # requests, rows
        self._width = launch.draft_ids.shape[1] + 1
        self._ledger, self._rest = tensors[5:10], tensors[12:]
        self._none = launch.spent  # stands for a pointer no path reads
        self._flags = flags | {"LANES": lanes, "num_warps": 1}
        self._kernel = _walk_kernel[(triton.cdiv(launch.length.shape[0], lanes),)]

    def __call__(
        self,
        draft_ids: Tensor,
        top: Tensor,
        logits: Tensor,
        slots: Tensor,
        live: Tensor | None,
        length: Tensor,
        bonus: Tensor,
    ) -> None:
        """One launch. logits [B, K+1, V] or [B (K+1), V]; all but draft_ids contiguous, which is not checked again."""
        none = self._none
        row = logits.stride(-2)
        between = logits.stride(0) if logits.ndim == 3 else self._width * row
        self._kernel(
            draft_ids, draft_ids.stride(0), top, logits, between, row, logits.shape[-1],
            slots, none, none if live is None else live, *self._sizes, *self._ledger, length, bonus, *self._rest,
            **self._flags,
        )  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """Launch parameters. block: logits a program reduces, None: `plan`; registers: at most so many a thread."""

    block: int | None = None
    warps: int = 4
    registers: int | None = 64  # eight programs a processor; the walk alone would take more


TUNING = Tuning()  # the benchmark's sweep sets it


def plan(rows: int, V: int) -> int:
    """Logits a program reduces: few enough to fill the device, and so many that MAX_PIECES programs cover a row."""
    block = 1024 if V <= 8192 else 2048 if rows <= 64 else 4096
    return max(block, triton.next_power_of_2(triton.cdiv(V, MAX_PIECES)))


def fused(launch: Launch, keys: Tensor) -> None:
    """Form (b): one pass over float32, bfloat16 or float16 logits.

    keys int64 [>= rows * MAX_PIECES]: NOTHING before the first launch, left so by each.
    """
    B, K, V = launch.length.shape[0], launch.draft_ids.shape[1], launch.logits.shape[-1]
    if B == 0:
        return
    block = TUNING.block or plan(B * (K + 1), V)
    pieces = triton.cdiv(V, block)
    tensors, flags = launch.arguments()
    _fused_kernel[(B * (K + 1) * pieces + B,)](
        launch.draft_ids, launch.draft_ids.stride(0), launch.logits, *launch.strides, V, pieces, keys, *tensors,
        PIECES=columns(flags["KP"], pieces, TUNING.warps), BLOCK=block, **flags,
        num_warps=TUNING.warps, maxnreg=TUNING.registers,
    )  # fmt: skip


def accept(
    draft_ids: Tensor, target_logits: Tensor, spent: Tensor, params: Params, live: Tensor, report: Report | None = None
) -> Accepted:
    """naive.accept through the kernels. float64 logits keep torch.argmax and take form (a)."""
    B, K = draft_ids.shape
    device = draft_ids.device
    z = target_logits if target_logits.stride(2) == 1 else target_logits.contiguous()
    out = Accepted(torch.empty(B, dtype=torch.int32, device=device), torch.empty(B, dtype=torch.int64, device=device))
    draft_ids = draft_ids if draft_ids.stride(1) == 1 else draft_ids.contiguous()
    # The kernels index the small tensors densely: a strided view goes in and out through a copy.
    ledger, params = spent.contiguous(), Params(*(t.contiguous() for t in params))
    wanted = () if report is None else (report.charge, report.relaxed, report.stop)
    report = Report.empty(B, K, device) if report is None else Report(*(t.contiguous() for t in wanted))
    launch = Launch(draft_ids, z, out.length, out.bonus, ledger, params, live=live, report=report)
    if z.dtype == torch.float64:
        walk(launch, z.argmax(-1).contiguous())
    else:
        fused(launch, torch.full((B * (K + 1) * MAX_PIECES,), NOTHING, dtype=torch.int64, device=device))
    for view, dense in zip((spent, *wanted), (ledger, report.charge, report.relaxed, report.stop), strict=False):
        if dense is not view:
            view.copy_(dense)
    return out
