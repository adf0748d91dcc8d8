"""ASD and strict as Triton kernels, bit for bit the answers of naive.py.

Two ways in, one walk:
- `walk`: the engine has its argmax. One small launch, a lane per request: gather z(t_i) and z(x_i), walk, charge.
- `fused`: one pass over the logits. A program reduces one piece of one row to a 64-bit key (value above, position
  below, so that max is torch.argmax: first index on ties, NaN above all); the last program of a request walks it.

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

MAX_PIECES = 32  # programs per row at most
_PIECES = tl.constexpr(MAX_PIECES)
_NOTHING = tl.constexpr(-(2**63))  # below every key
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


@triton.jit
def _walk(
    b, here, slot, live, first, zoff, stride_z,
    Draft, draft_row, stride_d, Top, Keys, pieces, Logits, V,
    Spent, Budget, Gate, Cap, Norm,
    Length, Bonus, Ids, Accept, Charge, Relaxed, Stop, Before, Bits, Counts, Regret,
    K: tl.constexpr, KP: tl.constexpr, FROM_KEYS: tl.constexpr, IDS: tl.constexpr, ACCEPT: tl.constexpr,
    REPORT: tl.constexpr, CUT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The rule for a vector of requests b [R]. first: row index of position 0; zoff: its offset in Logits.

    Everything it reads is read at once, as [R, KP] tiles; the walk then goes through registers.
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
    if FROM_KEYS:
        piece = tl.arange(0, _PIECES)[None, None, :]
        at = (first[:, None] + i)[:, :, None] * pieces + piece
        key = tl.load(Keys + at, mask=exists[:, :, None] & (piece < pieces), other=_NOTHING)
        key = tl.max(key, axis=2)
        top = 0x7FFFFFFF - (key & 0x7FFFFFFF)
        z_top = key_value((key >> 31).to(tl.int32))
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
        counts = Counts + slot * _COUNTERS
        was = tl.load(counts, mask=real, other=0), tl.load(counts + 1, mask=real, other=0)
        strict, loose = tl.load(counts + 2, mask=real, other=0), tl.load(counts + 3, mask=real, other=0)
        drained, total = tl.load(counts + 4, mask=real, other=0), tl.load(Regret + slot, mask=real, other=0.0)
        tl.store(counts, was[0] + 1, mask=real)
        tl.store(counts + 1, was[1] + live, mask=real)
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
        K, KP, False, IDS, ACCEPT, REPORT, CUT, COUNT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "rows", "blocks", "per", "pieces"])  # a new batch size must not compile anew
def _fused_kernel(
    Draft, stride_d, Logits, stride_b, stride_z, V, blocks, per, pieces,
    Keys, Done,
    Slots, Starts, Live, requests, rows,
    Spent, Budget, Gate, Cap, Norm,
    Length, Bonus, Ids, Accept, Charge, Relaxed, Stop, Before, Bits, Counts, Regret,
    K: tl.constexpr, KP: tl.constexpr, DEEP: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SLOTS: tl.constexpr, RAGGED: tl.constexpr,
    HAS_LIVE: tl.constexpr, TABLE: tl.constexpr, IDS: tl.constexpr, ACCEPT: tl.constexpr, REPORT: tl.constexpr,
    CUT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Program (piece, position, request): the key of one piece of one row; the last one of a request walks."""
    piece, i, b0 = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot0 = b0.to(tl.int64)
    if HAS_SLOTS:
        slot0 = tl.load(Slots + b0).to(tl.int64)
    first0, live0 = _extent(b0, b0 >= 0, Starts, Live, rows, requests, K, RAGGED, HAS_LIVE)
    b = b0 + tl.arange(0, 1)
    if slot0 < 0:
        if (piece == 0) & (i == 0):
            tl.store(Length + b0, 0)
            tl.store(Bonus + b0, 0)
            if REPORT:
                tl.store(Relaxed + b0, 0)
                tl.store(Stop + b0, 0)
                for j in tl.static_range(K):
                    tl.store(Charge + b0 * K + j, 0.0)
            if CUT:
                tl.store(Before + b0, 0.0)
                tl.store(Bits + b0, 0)
    elif i <= live0:
        zoff = first0 * stride_z if RAGGED else b0.to(tl.int64) * stride_b
        base = Logits + zoff + i.to(tl.int64) * stride_z
        # A thread keeps the best of DEEP logits at a time and its block, and looks up which of them it was at the end.
        wide: tl.constexpr = BLOCK // DEEP
        lane = tl.arange(0, wide)
        deep = tl.arange(0, DEEP)[:, None] * wide + lane[None, :]
        best = tl.full([wide], -0x80000000, tl.int32)
        where = tl.zeros([wide], tl.int32)
        for c in range(piece * per, tl.minimum(piece * per + per, blocks)):
            v = c * BLOCK + deep
            z = tl.load(base + v, mask=v < V, other=float("-inf")).to(tl.float32)
            key = tl.max(order_key(z), axis=0)
            take = key > best
            best = tl.where(take, key, best)
            where = tl.where(take, c, where)
        highest = tl.max(best, axis=0)
        v = where[None, :] * BLOCK + deep
        again = (best == highest)[None, :] & (v < V)
        z = tl.load(base + v, mask=again, other=0.0).to(tl.float32)
        found = tl.where(again & (order_key(z) == highest), v, 0x7FFFFFFF)
        index = tl.min(tl.min(found, axis=0), axis=0)
        packed = (highest.to(tl.int64) << 31) | (0x7FFFFFFF - index).to(tl.int64)
        tl.store(Keys + (first0 + i) * pieces + piece, packed)
        done = tl.atomic_add(Done + b0, 1, sem="acq_rel")
        if done == (live0 + 1) * pieces - 1:
            tl.store(Done + b0, 0)
            slot, first, live = b * 0 + slot0, b * 0 + first0, b * 0 + live0
            draft_row = slot if TABLE else b.to(tl.int64)
            _walk(
                b, b >= 0, slot, live, first, b * 0 + zoff, stride_z,
                Draft, draft_row, stride_d, Keys, Keys, pieces, Logits, V,
                Spent, Budget, Gate, Cap, Norm,
                Length, Bonus, Ids, Accept, Charge, Relaxed, Stop, Before, Bits, Counts, Regret,
                K, KP, True, IDS, ACCEPT, REPORT, CUT, COUNT,
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


TUNING: tuple[int, int, int] | None = None  # the benchmark's sweep sets it, instead of `plan`


def plan(requests: int, K: int, V: int) -> tuple[int, int, int]:
    """(pieces of a row, BLOCK, num_warps): about 1,024 programs, eight for each of 132 processors (results/kernels)."""
    block, pieces = 2048 if V > 8192 else 1024, 1
    while pieces < MAX_PIECES and requests * (K + 1) * 2 * pieces <= 1024 and 2 * pieces * block < V:
        pieces *= 2
    return pieces, block, 4


def fused(launch: Launch, keys: Tensor, done: Tensor) -> None:
    """Form (b): one pass over float32, bfloat16 or float16 logits.

    keys int64 [>= rows * MAX_PIECES]; done int32 [>= B], zero before the first launch and left zero by each.
    """
    B, K, V = launch.length.shape[0], launch.draft_ids.shape[1], launch.logits.shape[-1]
    if B == 0:
        return
    pieces, block, warps = TUNING or plan(B, K, V)
    blocks = triton.cdiv(V, block)
    vector = 16 // launch.logits.element_size()  # 16-byte loads; one thread owns DEEP of them in a block
    deep = max(1, block // (warps * 32 * vector))
    tensors, flags = launch.arguments()
    _fused_kernel[(pieces, K + 1, B)](
        launch.draft_ids, launch.draft_ids.stride(0), launch.logits, *launch.strides, V,
        blocks, triton.cdiv(blocks, pieces), pieces, keys, done, *tensors,
        DEEP=deep, BLOCK=block, **flags, num_warps=warps,
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
        keys = torch.empty(B * (K + 1) * MAX_PIECES, dtype=torch.int64, device=device)
        fused(launch, keys, torch.zeros(B, dtype=torch.int32, device=device))
    for view, dense in zip((spent, *wanted), (ledger, report.charge, report.relaxed, report.stop), strict=False):
        if dense is not view:
            view.copy_(dense)
    return out
