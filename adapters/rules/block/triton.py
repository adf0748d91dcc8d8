"""Block verification and token rejection as Triton kernels, from probabilities or straight from logits.

Four small launches, no [B, K, V] tensor of probabilities:
1. `stats` (logits only): maximum and exponential sum of every chunk of every row, one pass over the logits.
2. `prepare`: p and q at the drafts by gathers, every w_i, and which positions the coins leave open. h_i <= w_i, and
   the drafted token and the masses of whole chunks bound S_i, so most coins are settled here.
3. `mass`: S_i by chunks, only for open positions.
4. `finish`: h_i, the stop position, and the bonus: a race among the chunks by their mass, then inside the winning one.

Chunks have a fixed size whatever the batch, so a request's answer does not depend on who shares its step. Noise is
counter-based (noise.py): replicas that see the same logits agree, and a replayed CUDA graph moves on because `finish`
adds one to the step of each slot. Nothing waits for the host and nothing is allocated here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapters.rules.block.noise import CHUNK, ETA, PIECE, TOKEN
from adapters.rules.common import COUNTERS, MAX_DRAFTS, Accepted, RuleError
from adapters.rules.sampling import fault

_COUNTERS = tl.constexpr(len(COUNTERS))
_ETA, _PIECE, _TOKEN = tl.constexpr(ETA), tl.constexpr(PIECE), tl.constexpr(TOKEN)
# How far a float32 sum over the vocabulary may stray from the exact S_i: a bound closer to its coin settles nothing.
_SLACK = tl.constexpr(2e-5)
_INF = tl.constexpr(float("inf"))


@triton.jit
def _words(seed, step, kind, row, token):
    """Four times 32 random bits for (seed, step, kind, row, token); token a tensor."""
    c1 = token * 0 + (kind + 4 * row)
    c2 = token * 0 + (step & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    c3 = token * 0 + ((step >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    return tl.philox(seed, token, c1, c2, c3)


@triton.jit
def _exponential(bits):
    """Exp(1) from 32 bits, fine near 0 where a race is won: -log(1 - u), u = bits / 2^32."""
    u = (bits.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(u < 0.01, u * (1.0 + u * (0.5 + u * 0.3333333333)), -tl.log(1.0 - u))


@triton.jit(do_not_specialize=["chunks", "per"])
def _stats_kernel(
    Draft, stride_d, Target, target_b, target_r, DraftZ, draft_b, draft_r, V, chunks, per,
    Slots, Live, TempT, TempD, Peak, Sum,
    K: tl.constexpr, CHUNK: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_LIVE: tl.constexpr, ONE_HOT: tl.constexpr,
):  # fmt: skip
    """Program (piece, row, request): peak z and sum of exp((z - peak) / T) of `per` chunks. Rows K+1.. are the draft's.

    One-hot: a verified row leaves its drafted token out, so that 1 - p(x) is a sum and not a difference.
    """
    piece, row, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = b
    if HAS_SLOTS:
        slot = tl.load(Slots + b).to(tl.int64)
    live = K
    if HAS_LIVE:
        live = tl.minimum(tl.maximum(tl.load(Live + b).to(tl.int32), 0), K)
    exists = row <= live
    base = Target + b * target_b + row.to(tl.int64) * target_r
    temp = TempT
    if not ONE_HOT:
        drafts = row > K
        exists = (exists & (row <= K)) | (drafts & (row - (K + 1) < live))
        base = tl.where(drafts, DraftZ + b * draft_b + (row - (K + 1)).to(tl.int64) * draft_r, base)
        temp = tl.where(drafts, TempD, TempT)
    if exists & (slot >= 0):
        scale = 1.4426950408889634 / tl.load(temp + slot)
        skip = tl.full([], -1, tl.int64)
        if ONE_HOT:
            skip = tl.load(Draft + b * stride_d + row, mask=row < live, other=-1).to(tl.int64)
        lane = tl.arange(0, CHUNK)
        out = (b * (2 * K + 1) + row) * chunks
        for c in range(piece * per, tl.minimum(piece * per + per, chunks)):
            v = c * CHUNK + lane
            z = tl.load(base + v, mask=v < V, other=float("-inf")).to(tl.float32)
            if ONE_HOT:
                z = tl.where(v == skip, float("-inf"), z)
            peak = tl.max(z, axis=0)
            ground = tl.where(peak == float("-inf"), 0.0, peak)
            tl.store(Peak + out + c, peak)
            tl.store(Sum + out + c, tl.sum(tl.exp2((z - ground) * scale), axis=0))


@triton.jit
def _rows_by_chunk(Peak, Sum, rows, here, chunks, scale, CP: tl.constexpr):
    """Of whole rows [R]: peak, exponential sum, and that sum chunk by chunk [R, CP], all relative to the peak."""
    c = tl.arange(0, CP)
    at = rows[:, None] * chunks + c[None, :]
    mask = here[:, None] & (c < chunks)[None, :]
    peaks = tl.load(Peak + at, mask=mask, other=float("-inf"))
    sums = tl.load(Sum + at, mask=mask, other=0.0)
    peak = tl.max(peaks, axis=1)
    ground = tl.where(peak == float("-inf"), 0.0, peak)
    sums = sums * tl.exp2((peaks - ground[:, None]) * scale)
    return peak, tl.sum(sums, axis=1), sums


@triton.jit(do_not_specialize=["chunks"])
def _prepare_kernel(
    Draft, stride_d, Target, target_b, target_r, DraftZ, draft_b, draft_r, V, chunks,
    Slots, Live, TempT, TempD, Peak, Sum, Seeds, Steps, EtaIn, stride_e,
    RowPeak, RowSum, W, Open, Eta, Fault,
    K: tl.constexpr, KP: tl.constexpr, CP: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_LIVE: tl.constexpr,
    ONE_HOT: tl.constexpr, LOGITS: tl.constexpr, CHAIN: tl.constexpr, INJECT: tl.constexpr,
):  # fmt: skip
    """Program per request. Lane i is position i: w_i, its coin eta_i, and 0 shut, 1 open or 2 open and surely good."""
    b = tl.program_id(0).to(tl.int64)
    slot = b
    if HAS_SLOTS:
        slot = tl.load(Slots + b).to(tl.int64)
    lane = tl.arange(0, KP)
    if slot < 0:
        tl.store(Open + b * KP + lane, lane * 0)
    else:
        live = K
        if HAS_LIVE:
            live = tl.minimum(tl.maximum(tl.load(Live + b).to(tl.int32), 0), K)
        drafted = lane < live
        x = tl.load(Draft + b * stride_d + lane, mask=drafted, other=-1).to(tl.int64)
        known = drafted & (x >= 0) & (x < V)
        p = tl.load(Target + b * target_b + lane.to(tl.int64) * target_r + x, mask=known, other=0.0).to(tl.float32)
        if LOGITS:
            scale = 1.4426950408889634 / tl.load(TempT + slot)
            rows = b * (2 * K + 1) + lane
            peak, total, parts = _rows_by_chunk(Peak, Sum, rows, lane <= live, chunks, scale, CP)
            if ONE_HOT:
                z = tl.where(known, p, float("-inf"))
                top = tl.where(z > peak, z, peak)
                total = total * tl.exp2((peak - top) * scale) + tl.where(known, tl.exp2((z - top) * scale), 0.0)
                peak = top
            tl.store(RowPeak + rows, peak, mask=lane <= live)
            tl.store(RowSum + rows, total, mask=lane <= live)
            p = tl.where(known, tl.math.div_rn(tl.exp2((p - peak) * scale), total), 0.0)
        if ONE_HOT:
            q = known.to(tl.float32)
            ratio = p
        else:
            q = tl.load(DraftZ + b * draft_b + lane.to(tl.int64) * draft_r + x, mask=known, other=0.0).to(tl.float32)
            if LOGITS:
                scale_d = 1.4426950408889634 / tl.load(TempD + slot)
                rows_d = b * (2 * K + 1) + K + 1 + lane
                peak_d, total_d, parts_d = _rows_by_chunk(Peak, Sum, rows_d, drafted, chunks, scale_d, CP)
                tl.store(RowPeak + rows_d, peak_d, mask=drafted)
                tl.store(RowSum + rows_d, total_d, mask=drafted)
                q = tl.where(known, tl.math.div_rn(tl.exp2((q - peak_d) * scale_d), total_d), 0.0)
            wrong = drafted & ((q > 0.0) == 0)
            tl.store(Fault, 1, mask=tl.max(wrong.to(tl.int32), axis=0) > 0)
            ratio = tl.math.div_rn(p, tl.where(q > 0.0, q, 1.0))
            ratio = tl.where(q > 0.0, ratio, 0.0)
        ratio = tl.where(ratio >= 0.0, ratio, 0.0)
        coin = lane if CHAIN else lane - 1
        coined = (coin >= 0) & (coin < live)
        if INJECT:
            eta = tl.load(EtaIn + b * stride_e + coin, mask=coined, other=2.0).to(tl.float32)
        else:
            seed, step = tl.load(Seeds + slot), tl.load(Steps + slot)
            word, _, _, _ = _words(seed, step, _ETA, 0, coin)
            eta = (word.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * 5.9604644775390625e-08
            eta = tl.where(coined, eta, 2.0)
        if CHAIN:
            h = tl.minimum(ratio, 1.0)
            ok = drafted & (eta <= h) & (h > 0.0)
            stop = tl.min(tl.where(ok, KP, lane), axis=0)
            w = tl.where(lane == stop, 1.0, 0.0)
            state = tl.where(lane == stop, 2, 0)
        else:
            w = tl.where(lane == 0, 1.0, 0.0)
            running = tl.sum(w, axis=0)
            for i in tl.static_range(1, K + 1):
                step_ratio = tl.sum(tl.where(lane == i - 1, ratio, 0.0), axis=0)
                running = tl.where(i <= live, tl.minimum(running * step_ratio, 1.0), 0.0)
                running = tl.where(running >= 0.0, running, 0.0)
                w = tl.where(lane == i, running, w)
            wp = w * p
            low = tl.maximum(wp - q, 0.0)
            if LOGITS and not ONE_HOT:  # S_i is at least what is left when whole chunks are compared
                excess = parts * (w / total)[:, None] - parts_d / total_d[:, None]
                low = tl.maximum(low, tl.sum(tl.where(excess > 0.0, excess, 0.0), axis=1))
            low -= _SLACK
            high = tl.maximum(w - tl.minimum(wp, q), 0.0) + _SLACK
            inner = (lane > 0) & drafted & (w > 0.0)
            sure = inner & (low > 0.0) & (eta <= tl.math.div_rn(low, low + 1.0 - w))
            sure = sure | ((lane > 0) & (lane == live) & (eta <= w) & (w > 0.0))
            may = inner & (eta <= w + _SLACK) & (eta * (high + 1.0 - w) <= high + _SLACK)
            base = tl.max(tl.where(sure, lane, 0), axis=0)
            state = tl.where(may & (lane > base), 1, 0)
            state = tl.where(lane == base, 2, state)
        tl.store(W + b * KP + lane, w)
        tl.store(Eta + b * KP + lane, eta)
        tl.store(Open + b * KP + lane, state)


@triton.jit
def _law(
    Target, target, DraftZ, draft, v, here, x, w, full,
    peak, total, scale, peak_d, total_d, scale_d,
    ONE_HOT: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """max(w p - q, 0) at tokens v of one row, or p where `full`; a NaN is no mass."""
    p = tl.load(Target + target + v, mask=here, other=0.0).to(tl.float32)
    if LOGITS:
        p = tl.exp2((p - peak) * scale) / total
    if ONE_HOT:
        left = tl.where((v == x) & (full == 0), 0.0, tl.where(full, p, w * p))
    else:
        q = tl.load(DraftZ + draft + v, mask=here & (full == 0), other=0.0).to(tl.float32)
        if LOGITS:
            q = tl.exp2((q - peak_d) * scale_d) / total_d
        left = tl.where(full, p, w * p - q)
    return tl.where(here & (left > 0.0), left, 0.0)


@triton.jit
def _law_of_row(
    b, i, live, slot, RowPeak, RowSum, TempT, TempD, Draft, stride_d,
    K: tl.constexpr, ONE_HOT: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Scalars `_law` needs for position i: peak, total, scale of target and draft, and the drafted id."""
    peak, total, scale, peak_d, total_d, scale_d = 0.0, 1.0, 1.0, 0.0, 1.0, 1.0
    if LOGITS:
        row = b * (2 * K + 1) + i
        peak, total = tl.load(RowPeak + row), tl.load(RowSum + row)
        scale = 1.4426950408889634 / tl.load(TempT + slot)
        if not ONE_HOT:
            inside = i < live
            peak_d = tl.load(RowPeak + row + K + 1, mask=inside, other=0.0)
            total_d = tl.load(RowSum + row + K + 1, mask=inside, other=1.0)
            scale_d = 1.4426950408889634 / tl.load(TempD + slot)
    x = tl.load(Draft + b * stride_d + i, mask=i < live, other=-1).to(tl.int64)
    return peak, total, scale, peak_d, total_d, scale_d, x


@triton.jit(do_not_specialize=["chunks", "per"])
def _mass_kernel(
    Draft, stride_d, Target, target_b, target_r, DraftZ, draft_b, draft_r, V, chunks, per,
    Slots, Live, TempT, TempD, RowPeak, RowSum, W, Open, Mass,
    K: tl.constexpr, KP: tl.constexpr, CHUNK: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_LIVE: tl.constexpr,
    ONE_HOT: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Program (piece, position, request): mass of `per` chunks of an open position; p itself at position live."""
    piece, i, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    state = tl.load(Open + b * KP + i)
    if LOGITS and HAS_LIVE:  # `stats` has the masses of p
        state = tl.where(i < tl.load(Live + b).to(tl.int32), state, 0)
    if state > 0:
        slot = b
        if HAS_SLOTS:
            slot = tl.load(Slots + b).to(tl.int64)
        live = K
        if HAS_LIVE:
            live = tl.minimum(tl.maximum(tl.load(Live + b).to(tl.int32), 0), K)
        w = tl.load(W + b * KP + i)
        peak, total, scale, peak_d, total_d, scale_d, x = _law_of_row(
            b, i, live, slot, RowPeak, RowSum, TempT, TempD, Draft, stride_d, K, ONE_HOT, LOGITS
        )
        target, draft = b * target_b + i.to(tl.int64) * target_r, b * draft_b + i.to(tl.int64) * draft_r
        lane = tl.arange(0, CHUNK)
        for c in range(piece * per, tl.minimum(piece * per + per, chunks)):
            v = c * CHUNK + lane
            left = _law(
                Target, target, DraftZ, draft, v, v < V, x, w, i == live,
                peak, total, scale, peak_d, total_d, scale_d, ONE_HOT, LOGITS,
            )  # fmt: skip
            tl.store(Mass + (b * (K + 1) + i) * chunks + c, tl.sum(left, axis=0))


@triton.jit(do_not_specialize=["chunks"])
def _finish_kernel(
    Draft, stride_d, Target, target_b, target_r, DraftZ, draft_b, draft_r, V, chunks,
    Slots, Live, TempT, TempD, Peak, Sum, Seeds, Steps, NoiseIn, stride_n,
    RowPeak, RowSum, W, Open, Eta, Mass, Length, Bonus, Ids, Counts,
    K: tl.constexpr, KP: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, HAS_SLOTS: tl.constexpr,
    HAS_LIVE: tl.constexpr, ONE_HOT: tl.constexpr, LOGITS: tl.constexpr, CHAIN: tl.constexpr, INJECT: tl.constexpr,
    IDS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Program per request: the stop position and the bonus."""
    b = tl.program_id(0).to(tl.int64)
    slot = b
    if HAS_SLOTS:
        slot = tl.load(Slots + b).to(tl.int64)
    if slot < 0:
        tl.store(Length + b, 0)
        tl.store(Bonus + b, 0)
    else:
        live = K
        if HAS_LIVE:
            live = tl.minimum(tl.maximum(tl.load(Live + b).to(tl.int32), 0), K)
        seed, step = slot * 0, slot * 0
        if not INJECT:
            seed, step = tl.load(Seeds + slot), tl.load(Steps + slot)
        lane = tl.arange(0, KP)
        c = tl.arange(0, CP)
        in_row = (c < chunks)[None, :]
        state = tl.load(Open + b * KP + lane)
        w = tl.load(W + b * KP + lane)
        eta = tl.load(Eta + b * KP + lane)
        x = tl.load(Draft + b * stride_d + lane, mask=lane < live, other=-1).to(tl.int64)
        one = tl.full([KP], 1.0, tl.float32)
        peak, total, scale, peak_d, total_d, scale_d = lane * 0.0, one, 1.0, lane * 0.0, one, 1.0
        rows = b * (2 * K + 1) + lane
        if LOGITS:
            scale = 1.4426950408889634 / tl.load(TempT + slot)
            peak = tl.load(RowPeak + rows, mask=lane <= live, other=0.0)
            total = tl.load(RowSum + rows, mask=lane <= live, other=1.0)
            if not ONE_HOT:
                scale_d = 1.4426950408889634 / tl.load(TempD + slot)
                peak_d = tl.load(RowPeak + rows + K + 1, mask=lane < live, other=0.0)
                total_d = tl.load(RowSum + rows + K + 1, mask=lane < live, other=1.0)
        # Masses of the chunks of every position; those of shut positions are whatever memory held, and unused.
        if LOGITS and ONE_HOT:
            at = rows[:, None] * chunks + c[None, :]
            mask = (lane <= live)[:, None] & in_row
            peaks = tl.load(Peak + at, mask=mask, other=float("-inf"))
            sums = tl.load(Sum + at, mask=mask, other=0.0)
            masses = sums * tl.exp2((peaks - peak[:, None]) * scale) * (tl.where(lane == live, 1.0, w) / total)[:, None]
        else:
            at = (b * (K + 1) + lane)[:, None] * chunks + c[None, :]
            masses = tl.load(Mass + at, mask=(lane <= live)[:, None] & in_row, other=0.0)
            if LOGITS:
                last = b * (2 * K + 1) + live
                peak_p, total_p = tl.load(RowPeak + last), tl.load(RowSum + last)
                peaks = tl.load(Peak + last * chunks + c, mask=c < chunks, other=float("-inf"))
                sums = tl.load(Sum + last * chunks + c, mask=c < chunks, other=0.0)
                p_masses = sums * tl.exp2((peaks - peak_p) * scale) / total_p
                masses = tl.where((lane == live)[:, None], p_masses[None, :], masses)
        masses = tl.where((state > 0)[:, None] & (masses > 0.0), masses, 0.0)
        if CHAIN:
            tau = tl.max(tl.where(state > 0, lane, 0), axis=0)
        else:
            S = tl.sum(masses, axis=1)
            h = tl.where(S > 0.0, S / (S + 1.0 - w), 0.0)
            good = (state > 0) & (lane < live) & (lane > 0) & (eta <= h) & (h > 0.0)
            tau = tl.max(tl.where(good | (state == 2), lane, 0), axis=0)
        full = tau == live
        here = lane == tau
        mass = tl.sum(tl.where(here[:, None], masses, 0.0), axis=0)
        empty = (tl.sum(mass, axis=0) > 0.0) == 0
        begin, end = 0, V
        if not INJECT:
            word, _, _, _ = _words(seed, step, _PIECE, tau, c)
            race = tl.where(mass > 0.0, mass / _exponential(word), -1.0)
            chosen = tl.min(tl.where(race == tl.max(race, axis=0), c, CP), axis=0)
            begin = tl.where(empty, 0, chosen * CHUNK)
            end = tl.where(empty, V, tl.minimum(chosen * CHUNK + CHUNK, V))
        w_tau = tl.sum(tl.where(here, w, 0.0), axis=0)
        x_tau = tl.sum(tl.where(here, x, 0), axis=0)
        peak_t, total_t = tl.sum(tl.where(here, peak, 0.0), axis=0), tl.sum(tl.where(here, total, 0.0), axis=0)
        peak_q, total_q = tl.sum(tl.where(here, peak_d, 0.0), axis=0), tl.sum(tl.where(here, total_d, 0.0), axis=0)
        target = b * target_b + tau.to(tl.int64) * target_r
        draft = b * draft_b + tau.to(tl.int64) * draft_r
        QUARTER: tl.constexpr = CHUNK // 4
        tokens = tl.arange(0, QUARTER)
        ahead = tl.full([QUARTER], -2.0, tl.float32)
        who = tl.zeros([QUARTER], tl.int32)
        for v0 in range(begin, end, CHUNK):
            if not INJECT:
                word0, word1, word2, word3 = _words(seed, step, _TOKEN, tau, v0 // 4 + tokens)
            for j in tl.static_range(4):
                v = v0 + j * QUARTER + tokens
                left = _law(
                    Target, target, DraftZ, draft, v, v < end, x_tau, w_tau, full | empty,
                    peak_t, total_t, scale, peak_q, total_q, scale_d, ONE_HOT, LOGITS,
                )  # fmt: skip
                if INJECT:
                    noise = tl.load(NoiseIn + b * stride_n + v, mask=v < end, other=1.0).to(tl.float32)
                elif j == 0:
                    noise = _exponential(word0)
                elif j == 1:
                    noise = _exponential(word1)
                elif j == 2:
                    noise = _exponential(word2)
                else:
                    noise = _exponential(word3)
                score = tl.where(left > 0.0, tl.math.div_rn(left, noise), tl.where(v < end, -1.0, -2.0))
                take = score > ahead
                ahead = tl.where(take, score, ahead)
                who = tl.where(take, v, who)
        winner = tl.max(ahead, axis=0)
        bonus = tl.min(tl.where(ahead == winner, who, 0x7FFFFFFF), axis=0).to(tl.int64)
        tl.store(Length + b, tau)
        tl.store(Bonus + b, bonus)
        if IDS:
            tl.store(Ids + b * (K + 1) + lane, tl.where(lane < tau, x, bonus), mask=lane <= live)
        if COUNT:
            row = Counts + slot * _COUNTERS
            tl.store(row, tl.load(row) + 1)
            tl.store(row + 1, tl.load(row + 1) + live)
            tl.store(row + 2, tl.load(row + 2) + tau)
        if not INJECT:
            tl.store(Steps + slot, step + 1)


@dataclass
class Workspace:
    """Buffers of up to `rows` requests of K drafts over V tokens, reused by every launch: under 0.1 % of the logits."""

    rows: int
    K: int
    V: int
    device: torch.device
    chunk: int = CHUNK
    buffers: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.K <= MAX_DRAFTS:
            raise RuleError(f"K: expected 1..{MAX_DRAFTS} drafts, found {self.K}")
        B, K, C, KP = self.rows, self.K, self.chunks, self.lanes
        self.buffers = {
            "peak": torch.empty(B, 2 * K + 1, C, device=self.device),
            "sum": torch.empty(B, 2 * K + 1, C, device=self.device),
            "row_peak": torch.empty(B, 2 * K + 1, device=self.device),
            "row_sum": torch.empty(B, 2 * K + 1, device=self.device),
            "w": torch.empty(B, KP, device=self.device),
            "eta": torch.empty(B, KP, device=self.device),
            "open": torch.empty(B, KP, dtype=torch.int32, device=self.device),
            "mass": torch.empty(B, K + 1, C, device=self.device),
        }

    @property
    def chunks(self) -> int:
        return -(-self.V // self.chunk)

    @property
    def lanes(self) -> int:
        return triton.next_power_of_2(self.K + 1)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.buffers.values())


@dataclass
class Launch:
    """One verification. Tensors the caller owns; the last dimension of target and draft is contiguous."""

    draft_ids: Tensor  # [B, K] int
    target: Tensor  # [B, K+1, V] probabilities, or logits
    draft: Tensor | None  # [B, K, V] likewise; None: one-hot at draft_ids
    length: Tensor  # [B] int32, out
    bonus: Tensor  # [B] int64, out
    logits: bool = False
    chain: bool = False
    temperature: Tensor | None = None  # [slots] float32, of target logits
    draft_temperature: Tensor | None = None  # [slots] float32, of draft logits
    slots: Tensor | None = None  # [B] int; < 0 padded
    live: Tensor | None = None  # [B] int
    eta: Tensor | None = None  # [B, K], injected with noise [B, V]
    noise: Tensor | None = None
    seeds: Tensor | None = None  # [slots] int64, counter-based noise with steps [slots] int64, in and out
    steps: Tensor | None = None
    ids: Tensor | None = None  # [B, K+1] int64, out: drafts up to length, then the bonus
    counts: Tensor | None = None  # [slots, len(COUNTERS)] int64


@dataclass(frozen=True)
class Tuning:
    """Warps of the two passes, and how many programs each should have at least (it has one per chunk at most)."""

    warps: int = 4
    programs: int = 16384


TUNING = Tuning()
STAGES = 4  # the benchmark leaves later launches out to see where the time goes


def _per_program(rows: int, chunks: int) -> int:
    """Chunks a program takes so that about TUNING.programs exist."""
    return max(1, min(chunks, rows * chunks // TUNING.programs))


def verify(launch: Launch, space: Workspace, tuning: Tuning = Tuning()) -> None:
    """Launch the four kernels on the current stream."""
    n = launch
    B, K = n.draft_ids.shape
    if B == 0:
        return
    V, C, KP, w = n.target.shape[-1], space.chunks, space.lanes, space.buffers
    if space.rows < B or (K, V) != (space.K, space.V):
        raise RuleError(f"workspace: expected rows >= {B}, K = {K}, V = {V}, found {space.rows}, {space.K}, {space.V}")
    some = n.length  # stands for a pointer no path reads
    one_hot, inject = n.draft is None, n.eta is not None
    q = n.target if n.draft is None else n.draft
    slots = some if n.slots is None else n.slots
    live = some if n.live is None else n.live
    temp = some if n.temperature is None else n.temperature
    temp_d = temp if n.draft_temperature is None else n.draft_temperature
    data = (
        n.draft_ids, n.draft_ids.stride(0), n.target, n.target.stride(0), n.target.stride(1),
        q, q.stride(0), q.stride(1), V, C,
    )  # fmt: skip
    who = (slots, live, temp, temp_d)
    flags = {"K": K, "HAS_SLOTS": n.slots is not None, "HAS_LIVE": n.live is not None, "ONE_HOT": one_hot}
    CP = triton.next_power_of_2(C)
    if n.logits:
        rows = K + 1 if one_hot else 2 * K + 1
        per = _per_program(B * rows, C)
        _stats_kernel[(triton.cdiv(C, per), rows, B)](
            *data, per, *who, w["peak"], w["sum"], CHUNK=space.chunk, **flags, num_warps=TUNING.warps
        )
    eta, eta_stride = (some, 0) if n.eta is None else (n.eta, n.eta.stride(0))
    noise, noise_stride = (some, 0) if n.noise is None else (n.noise, n.noise.stride(0))
    noise_key = (some if n.seeds is None else n.seeds, some if n.steps is None else n.steps)
    flags |= {"LOGITS": n.logits}
    if STAGES < 2:
        return
    _prepare_kernel[(B,)](
        *data, *who, w["peak"], w["sum"], *noise_key, eta, eta_stride,
        w["row_peak"], w["row_sum"], w["w"], w["open"], w["eta"], fault(n.target.device),
        KP=KP, CP=CP, CHAIN=n.chain, INJECT=inject, **flags, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if STAGES >= 3 and not (n.logits and one_hot):
        rows = K if n.logits else K + 1
        per = _per_program(B * rows, C)
        _mass_kernel[(triton.cdiv(C, per), rows, B)](
            *data, per, *who, w["row_peak"], w["row_sum"], w["w"], w["open"], w["mass"],
            KP=KP, CHUNK=space.chunk, **flags, num_warps=TUNING.warps, enable_fp_fusion=False,
        )  # fmt: skip
    if STAGES < 4:
        return
    _finish_kernel[(B,)](
        *data, *who, w["peak"], w["sum"], *noise_key, noise, noise_stride,
        w["row_peak"], w["row_sum"], w["w"], w["open"], w["eta"], w["mass"],
        n.length, n.bonus, some if n.ids is None else n.ids, some if n.counts is None else n.counts,
        KP=KP, CP=CP, CHUNK=space.chunk, CHAIN=n.chain, INJECT=inject, IDS=n.ids is not None,
        COUNT=n.counts is not None, **flags, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def accept(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    eta: Tensor,
    noise: Tensor,
    live: Tensor,
    chain: bool = False,
) -> Accepted:
    """naive.accept through the kernels, injected coins. float64 inputs are read as float32."""
    B, K = draft_ids.shape
    V, device = target_probs.shape[2], draft_ids.device
    out = Accepted(torch.empty(B, dtype=torch.int32, device=device), torch.empty(B, dtype=torch.int64, device=device))
    p, eta, noise, draft_ids = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (target_probs, eta, noise, draft_ids)
    )
    q = draft_probs if draft_probs is None or draft_probs.stride(-1) == 1 else draft_probs.contiguous()
    space = Workspace(B, K, V, device, min(CHUNK, max(16, triton.next_power_of_2(V))))
    verify(Launch(draft_ids, p, q, out.length, out.bonus, chain=chain, live=live, eta=eta, noise=noise), space)
    return out
