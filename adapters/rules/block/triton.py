"""Block verification and token rejection as Triton kernels, from probabilities or straight from logits.

Four small launches, no [B, K, V] tensor of probabilities:
1. `stats` (logits only), one pass over the logits: maximum and exponential sum of every chunk of every row, and the sum
   of sqrt(p q) of the chunks of a position.
2. `prepare`: p and q at the drafts by gathers, every w_i, and which positions the coins leave open. h_i <= w_i, and
   the drafted token and the sum of sqrt(p q) bound S_i from both sides, so most coins are settled here.
3. `mass`: S_i by chunks, only for open positions.
4. `finish`: h_i, the stop position, and the bonus: a race among the chunks by their mass, then inside the winning one.

On Hopper and later a launch starts while the one before it drains (programmatic dependent launch). `prepare` and
`finish` then gather what they can, and take the chunks' results as they come: a result is its own message, one word,
never EMPTY, written once and put back to EMPTY by the one program that reads it.

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

from adapters.rules.asd.triton import columns, missing, published
from adapters.rules.block.noise import CHUNK, ETA, PIECE, TOKEN
from adapters.rules.common import COUNTERS, MAX_DRAFTS, Accepted, RuleError, can_overlap
from adapters.rules.sampling import fault

_COUNTERS = tl.constexpr(len(COUNTERS))
_ETA, _PIECE, _TOKEN = tl.constexpr(ETA), tl.constexpr(PIECE), tl.constexpr(TOKEN)
# How far a float32 sum over the vocabulary may stray from the exact S_i: a bound closer to its coin settles nothing.
_SLACK = tl.constexpr(2e-5)
_NO_STATS = tl.constexpr(-1)  # int64; as two float32, NaNs that `stats` never writes
_NO_MASS = tl.constexpr(-1.0)


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


@triton.jit
def _who(b, Slots, Live, K: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_LIVE: tl.constexpr):
    """Slot and live drafts of request b."""
    slot = b
    if HAS_SLOTS:
        slot = tl.load(Slots + b).to(tl.int64)
    live = tl.full([], K, tl.int32)
    if HAS_LIVE:
        live = tl.minimum(tl.maximum(tl.load(Live + b).to(tl.int32), 0), K)
    return slot, live


@triton.jit
def _message(level, total):
    """Two float32 in one int64; a sum that is not a number becomes the one NaN."""
    low = tl.where(total == total, total, float("nan")).to(tl.uint32, bitcast=True).to(tl.int64)
    return (level.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low


@triton.jit
def _times(a, b):
    return a * b


@triton.jit(do_not_specialize=["chunks", "per"])
def _stats_kernel(
    Draft, stride_d, Target, target_b, target_r, DraftZ, draft_b, draft_r, V, chunks, per,
    Slots, Live, TempT, TempD, Stats, Cross,
    K: tl.constexpr, CHUNK: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_LIVE: tl.constexpr, ONE_HOT: tl.constexpr,
    CHAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (piece, position, request): `per` chunks of a verified row and of the draft's row beside it.

    With y = z log2(e) / T: the largest y, the sum of 2^(y - largest), and of both rows the sum of the roots' products.
    One-hot: a verified row leaves its drafted token out, so that 1 - p(x) is a sum and not a difference.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    piece, row, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot, live = _who(b, Slots, Live, K, HAS_SLOTS, HAS_LIVE)
    if (row <= live) & (slot >= 0):
        base = Target + b * target_b + row.to(tl.int64) * target_r
        half = 0.7213475204444817 / tl.load(TempT + slot)
        out = (b * (2 * K + 1) + row) * chunks
        lane = tl.arange(0, CHUNK)
        if ONE_HOT:
            skip = tl.load(Draft + b * stride_d + row, mask=row < live, other=-1).to(tl.int64)
            for c in range(piece * per, tl.minimum(piece * per + per, chunks)):
                v = c * CHUNK + lane
                z = tl.load(base + v, mask=v < V, other=float("-inf")).to(tl.float32)
                z = tl.where(v == skip, float("-inf"), z)
                level = 2.0 * (tl.max(z, axis=0) * half)
                ground = tl.where(level == float("-inf"), 0.0, level)
                total = tl.sum(tl.exp2(tl.fma(z, 2.0 * half, -ground)), axis=0)
                tl.store(Stats + out + c, _message(level, total))
        else:
            inside = row < live
            side = tl.arange(0, 2)
            rows = tl.where(side == 0, base, DraftZ + b * draft_b + row.to(tl.int64) * draft_r)  # two rows, one tile
            halves = tl.where(side == 0, half, 0.7213475204444817 / tl.load(TempD + slot))
            for c in range(piece * per, tl.minimum(piece * per + per, chunks)):
                v = c * CHUNK + lane
                mask = (v < V)[None, :] & ((side == 0) | inside)[:, None]
                z = tl.load(rows[:, None] + v[None, :], mask=mask, other=float("-inf")).to(tl.float32)
                level = tl.max(z, axis=1) * halves
                ground = tl.where(level == float("-inf"), 0.0, level)
                root = tl.exp2(tl.fma(z, tl.broadcast_to(halves[:, None], z.shape), -ground[:, None]))
                word = _message(2.0 * level, tl.sum(root * root, axis=1))
                tl.store(Stats + out + c + side * ((K + 1) * chunks), word, mask=(side == 0) | inside)
                if not CHAIN:
                    both = tl.sum(tl.reduce(root, 0, _times), axis=0)
                    tl.store(Cross + (b * K + row) * chunks + c, both, mask=inside)


@triton.jit
def _row(word, mask):
    """Messages of whole rows [R, CP]: level, sum, and by chunk that sum, the levels, the sums as they were sent."""
    levels = tl.where(mask, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
    sums = tl.where(mask, word.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    level = tl.max(levels, axis=1)
    ground = tl.where(level == float("-inf"), 0.0, level)
    parts = sums * tl.exp2(levels - ground[:, None])
    return level, tl.sum(parts, axis=1), parts, levels, sums


@triton.jit(do_not_specialize=["chunks"])
def _prepare_kernel(
    Draft, stride_d, Target, target_b, target_r, DraftZ, draft_b, draft_r, V, chunks,
    Slots, Live, TempT, TempD, Stats, Cross, Seeds, Steps, EtaIn, stride_e,
    RowLevel, RowSum, W, Open, Eta, Mass, Fault,
    K: tl.constexpr, KP: tl.constexpr, CP: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_LIVE: tl.constexpr,
    ONE_HOT: tl.constexpr, LOGITS: tl.constexpr, CHAIN: tl.constexpr, INJECT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program per request. Lane i is position i: w_i, its coin eta_i, and 0 shut, 1 open or 2 open and surely good.

    Masses that follow from the stats are written here: p itself at position live, and every position of one-hot drafts.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(0).to(tl.int64)
    slot, live = _who(b, Slots, Live, K, HAS_SLOTS, HAS_LIVE)
    lane = tl.arange(0, KP)
    if slot < 0:
        tl.store(Open + b * KP + lane, lane * 0)
    else:
        drafted = lane < live
        x = tl.load(Draft + b * stride_d + lane, mask=drafted, other=-1).to(tl.int64)
        known = drafted & (x >= 0) & (x < V)
        p = tl.load(Target + b * target_b + lane.to(tl.int64) * target_r + x, mask=known, other=0.0).to(tl.float32)
        if not ONE_HOT:
            q = tl.load(DraftZ + b * draft_b + lane.to(tl.int64) * draft_r + x, mask=known, other=0.0).to(tl.float32)
        coin = lane if CHAIN else lane - 1
        coined = (coin >= 0) & (coin < live)
        if INJECT:
            eta = tl.load(EtaIn + b * stride_e + coin, mask=coined, other=2.0).to(tl.float32)
        else:
            seed, step = tl.load(Seeds + slot), tl.load(Steps + slot)
            word, _, _, _ = _words(seed, step, _ETA, 0, coin)
            eta = (word.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * 5.9604644775390625e-08
            eta = tl.where(coined, eta, 2.0)
        tl.store(Eta + b * KP + lane, eta)
        c = tl.arange(0, CP)
        in_row = (c < chunks)[None, :]
        if LOGITS:
            z = tl.where(known, p * (1.4426950408889634 / tl.load(TempT + slot)), float("-inf"))
            rows = b * (2 * K + 1) + lane
            at = Stats + rows[:, None] * chunks + c[None, :]
            mask = (lane <= live)[:, None] & in_row
            word = tl.load(at, mask=mask, other=0, volatile=True)
            if ONE_HOT:
                while missing(word == _NO_STATS) > 0:
                    word = tl.load(at, mask=mask, other=0, volatile=True)
            else:
                z_d = tl.where(known, q * (1.4426950408889634 / tl.load(TempD + slot)), float("-inf"))
                at_d, mask_d = at + (K + 1) * chunks, drafted[:, None] & in_row
                at_c = Cross + (b * K + lane)[:, None] * chunks + c[None, :]
                mask_c = mask_d & (not CHAIN)
                word_d = tl.load(at_d, mask=mask_d, other=0, volatile=True)
                cross = tl.load(at_c, mask=mask_c, other=0.0, volatile=True)
                while missing((word == _NO_STATS) | (word_d == _NO_STATS) | (cross == _NO_MASS)) > 0:
                    word = tl.load(at, mask=mask, other=0, volatile=True)
                    word_d = tl.load(at_d, mask=mask_d, other=0, volatile=True)
                    cross = tl.load(at_c, mask=mask_c, other=0.0, volatile=True)
                tl.store(at_d, tl.full(word.shape, _NO_STATS, tl.int64), mask=mask_d)
                tl.store(at_c, tl.full(word.shape, _NO_MASS, tl.float32), mask=mask_c)
            tl.store(at, tl.full(word.shape, _NO_STATS, tl.int64), mask=mask)
            level, total, parts, levels, sums = _row(word, mask)
            if ONE_HOT:
                top = tl.where(z > level, z, level)
                total = total * tl.exp2(level - top) + tl.where(known, tl.exp2(z - top), 0.0)
                level = top
            tl.store(RowLevel + rows, level, mask=lane <= live)
            tl.store(RowSum + rows, total, mask=lane <= live)
            p = tl.where(known, tl.math.div_rn(tl.exp2(z - level), total), 0.0)
        if ONE_HOT:
            q = known.to(tl.float32)
            ratio = p
        else:
            if LOGITS:
                level_d, total_d, _, levels_d, _ = _row(word_d, mask_d)
                tl.store(RowLevel + rows + (K + 1), level_d, mask=drafted)
                tl.store(RowSum + rows + (K + 1), total_d, mask=drafted)
                q = tl.where(known, tl.math.div_rn(tl.exp2(z_d - level_d), total_d), 0.0)
                lower = tl.where(mask_c, (levels - level[:, None]) + (levels_d - level_d[:, None]), float("-inf"))
                alike = tl.sum(tl.where(cross > 0.0, cross * tl.exp2(0.5 * lower), 0.0), axis=1)
                alike = alike / tl.sqrt(total * total_d)
            wrong = drafted & ((q > 0.0) == 0)
            tl.store(Fault, 1, mask=tl.max(wrong.to(tl.int32), axis=0) > 0)
            ratio = tl.math.div_rn(p, tl.where(q > 0.0, q, 1.0))
            ratio = tl.where(q > 0.0, ratio, 0.0)
        ratio = tl.where(ratio >= 0.0, ratio, 0.0)
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
            high = tl.maximum(w - tl.minimum(wp, q), 0.0)
            if LOGITS and not ONE_HOT:
                # With m = sum of min(w p, q) = w - S and b = sum of sqrt(w p q): m <= b, and m (w + 1 - m) >= b^2.
                overlap = tl.sqrt(w) * alike
                low = tl.maximum(low, w - overlap * (1.0 + _SLACK))
                least = overlap * (1.0 - _SLACK)
                root = tl.sqrt(tl.maximum((w + 1.0) * (w + 1.0) - 4.0 * least * least, 0.0))
                high = tl.minimum(high, w - 0.5 * (w + 1.0 - root))
            low -= _SLACK
            high = tl.maximum(high, 0.0) + _SLACK
            inner = (lane > 0) & drafted & (w > 0.0)
            sure = inner & (low > 0.0) & (eta <= tl.math.div_rn(low, low + 1.0 - w))
            sure = sure | ((lane > 0) & (lane == live) & (eta <= w) & (w > 0.0))
            may = inner & (eta <= w + _SLACK) & (eta * (high + 1.0 - w) <= high + _SLACK)
            base = tl.max(tl.where(sure, lane, 0), axis=0)
            state = tl.where(may & (lane > base), 1, 0)
            state = tl.where(lane == base, 2, state)
        tl.store(W + b * KP + lane, w)
        tl.store(Open + b * KP + lane, state)
        if LOGITS:
            if ONE_HOT:  # the drafted token may have raised the level
                parts = sums * tl.exp2(levels - level[:, None])
            masses = parts * (tl.where(lane == live, 1.0, w) / total)[:, None]
            mine = (lane <= live) if ONE_HOT else (lane == live)
            at_m = Mass + (b * (K + 1) + lane)[:, None] * chunks + c[None, :]
            tl.store(at_m, masses, mask=mine[:, None] & in_row)
    if PDL:  # whoever waits for this launch waits for the one before it, too
        tl.extra.cuda.gdc_wait()


@triton.jit
def _law(
    Target, target, DraftZ, draft, v, here, x, w, full,
    level, total, scale, level_d, total_d, scale_d,
    ONE_HOT: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """max(w p - q, 0) at tokens v of one row, or p where `full`; a NaN is no mass."""
    p = tl.load(Target + target + v, mask=here, other=0.0).to(tl.float32)
    weight = tl.where(full, 1.0, w)
    if LOGITS:
        p = tl.exp2(tl.fma(p, scale, -level)) * (weight / total)
    else:
        p = weight * p
    if ONE_HOT:
        left = tl.where((v == x) & (full == 0), 0.0, p)
    else:
        q = tl.load(DraftZ + draft + v, mask=here & (full == 0), other=0.0).to(tl.float32)
        if LOGITS:
            q = tl.exp2(tl.fma(q, scale_d, -level_d)) * (1.0 / total_d)
        left = tl.where(full, p, p - q)
    return tl.where(here & (left > 0.0), left, 0.0)


@triton.jit
def _law_of_row(
    b, i, live, slot, RowLevel, RowSum, TempT, TempD, Draft, stride_d,
    K: tl.constexpr, ONE_HOT: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Scalars `_law` needs for position i: level, total, scale of target and draft, and the drafted id."""
    level, total, scale, level_d, total_d, scale_d = 0.0, 1.0, 1.0, 0.0, 1.0, 1.0
    if LOGITS:
        row = b * (2 * K + 1) + i
        level, total = tl.load(RowLevel + row), tl.load(RowSum + row)
        scale = 1.4426950408889634 / tl.load(TempT + slot)
        if not ONE_HOT:
            inside = i < live
            level_d = tl.load(RowLevel + row + K + 1, mask=inside, other=0.0)
            total_d = tl.load(RowSum + row + K + 1, mask=inside, other=1.0)
            scale_d = 1.4426950408889634 / tl.load(TempD + slot)
    x = tl.load(Draft + b * stride_d + i, mask=i < live, other=-1).to(tl.int64)
    return level, total, scale, level_d, total_d, scale_d, x


@triton.jit(do_not_specialize=["chunks", "per", "requests"])
def _mass_kernel(
    Draft, stride_d, Target, target_b, target_r, DraftZ, draft_b, draft_r, V, chunks, per, requests,
    Slots, Live, TempT, TempD, RowLevel, RowSum, W, Open, Mass,
    K: tl.constexpr, KP: tl.constexpr, CHUNK: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_LIVE: tl.constexpr,
    ONE_HOT: tl.constexpr, LOGITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (piece, request): mass of `per` chunks of the open positions; of p itself at position live, unless from
    logits: `prepare` has it. The last request goes first: the L2 still has some of it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    piece = tl.program_id(0)
    b = (requests - 1 - tl.program_id(1)).to(tl.int64)
    lane = tl.arange(0, KP)
    state = tl.load(Open + b * KP + lane)
    slot, live = _who(b, Slots, Live, K, HAS_SLOTS, HAS_LIVE)
    if LOGITS:
        state = tl.where(lane < live, state, 0)
    left = tl.sum(tl.where(state > 0, 1 << lane, 0), axis=0)
    i = tl.full([], 0, tl.int32)
    while left != 0:
        if (left & 1) != 0:
            w = tl.load(W + b * KP + i)
            level, total, scale, level_d, total_d, scale_d, x = _law_of_row(
                b, i, live, slot, RowLevel, RowSum, TempT, TempD, Draft, stride_d, K, ONE_HOT, LOGITS
            )
            target, draft = b * target_b + i.to(tl.int64) * target_r, b * draft_b + i.to(tl.int64) * draft_r
            for c in range(piece * per, tl.minimum(piece * per + per, chunks)):
                v = c * CHUNK + tl.arange(0, CHUNK)
                law = _law(
                    Target, target, DraftZ, draft, v, v < V, x, w, i == live,
                    level, total, scale, level_d, total_d, scale_d, ONE_HOT, LOGITS,
                )  # fmt: skip
                tl.store(Mass + (b * (K + 1) + i) * chunks + c, tl.sum(law, axis=0))
        left = left >> 1
        i += 1


@triton.jit
def _first_largest(score, index):
    """The largest of int32 scores, and the least index that has it."""
    packed = tl.max((score.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64), axis=0)
    return (packed >> 32).to(tl.int32), 0x7FFFFFFF - packed.to(tl.int32)


@triton.jit(do_not_specialize=["chunks"])
def _finish_kernel(
    Draft, stride_d, Target, target_b, target_r, DraftZ, draft_b, draft_r, V, chunks,
    Slots, Live, TempT, TempD, Seeds, Steps, NoiseIn, stride_n,
    RowLevel, RowSum, W, Open, Eta, Mass, Length, Bonus, Ids, Counts,
    K: tl.constexpr, KP: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, HAS_SLOTS: tl.constexpr,
    HAS_LIVE: tl.constexpr, ONE_HOT: tl.constexpr, LOGITS: tl.constexpr, CHAIN: tl.constexpr, INJECT: tl.constexpr,
    IDS: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program per request: the stop position and the bonus.

    EARLY: `mass` may still run, but lets this launch start only once `prepare` is done. Else `prepare` comes before it.
    """
    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    slot, live = _who(b, Slots, Live, K, HAS_SLOTS, HAS_LIVE)
    if slot < 0:
        tl.store(Length + b, 0)
        tl.store(Bonus + b, 0)
    else:
        seed, step = slot * 0, slot * 0
        if not INJECT:
            seed, step = tl.load(Seeds + slot), tl.load(Steps + slot)
        if COUNT:
            counts = Counts + slot * _COUNTERS
            blocks, verified, kept = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)
        lane = tl.arange(0, KP)
        c = tl.arange(0, CP)
        in_row = (c < chunks)[None, :]
        state = tl.load(Open + b * KP + lane)
        w = tl.load(W + b * KP + lane)
        eta = tl.load(Eta + b * KP + lane)
        x = tl.load(Draft + b * stride_d + lane, mask=lane < live, other=-1).to(tl.int64)
        one = tl.full([KP], 1.0, tl.float32)
        level, total, scale, level_d, total_d, scale_d = lane * 0.0, one, 1.0, lane * 0.0, one, 1.0
        rows = b * (2 * K + 1) + lane
        if LOGITS:
            scale = 1.4426950408889634 / tl.load(TempT + slot)
            level = tl.load(RowLevel + rows, mask=lane <= live, other=0.0)
            total = tl.load(RowSum + rows, mask=lane <= live, other=1.0)
            if not ONE_HOT:
                scale_d = 1.4426950408889634 / tl.load(TempD + slot)
                level_d = tl.load(RowLevel + rows + K + 1, mask=lane < live, other=0.0)
                total_d = tl.load(RowSum + rows + K + 1, mask=lane < live, other=1.0)
        # Masses of the chunks of the open positions. What is there of others is older, and put away with the rest.
        at = Mass + (b * (K + 1) + lane)[:, None] * chunks + c[None, :]
        masses = published(at, ((state > 0) & (lane <= live))[:, None] & in_row, 0.0, _NO_MASS)
        tl.store(at, tl.full(masses.shape, _NO_MASS, tl.float32), mask=(lane <= live)[:, None] & in_row)
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
            race = tl.where(mass > 0.0, (mass / _exponential(word)).to(tl.int32, bitcast=True), -1)
            _, chosen = _first_largest(race, c)
            begin = tl.where(empty, 0, chosen * CHUNK)
            end = tl.where(empty, V, tl.minimum(chosen * CHUNK + CHUNK, V))
        w_tau = tl.sum(tl.where(here, w, 0.0), axis=0)
        x_tau = tl.sum(tl.where(here, x, 0), axis=0)
        level_t, total_t = tl.sum(tl.where(here, level, 0.0), axis=0), tl.sum(tl.where(here, total, 0.0), axis=0)
        level_q, total_q = tl.sum(tl.where(here, level_d, 0.0), axis=0), tl.sum(tl.where(here, total_d, 0.0), axis=0)
        target = b * target_b + tau.to(tl.int64) * target_r
        draft = b * draft_b + tau.to(tl.int64) * draft_r
        QUARTER: tl.constexpr = CHUNK // 4
        tokens = tl.arange(0, QUARTER)
        ahead = tl.full([QUARTER], -2, tl.int32)  # scores are no less than 0: their bits are in their order
        who = tl.zeros([QUARTER], tl.int32)
        for v0 in range(begin, end, CHUNK):
            if not INJECT:
                word0, word1, word2, word3 = _words(seed, step, _TOKEN, tau, v0 // 4 + tokens)
            for j in tl.static_range(4):
                v = v0 + j * QUARTER + tokens
                left = _law(
                    Target, target, DraftZ, draft, v, v < end, x_tau, w_tau, full | empty,
                    level_t, total_t, scale, level_q, total_q, scale_d, ONE_HOT, LOGITS,
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
                score = tl.math.div_rn(left, noise).to(tl.int32, bitcast=True)
                score = tl.where(left > 0.0, score, tl.where(v < end, -1, -2))
                take = score > ahead
                ahead = tl.where(take, score, ahead)
                who = tl.where(take, v, who)
        _, bonus = _first_largest(ahead, who)
        bonus = bonus.to(tl.int64)
        tl.store(Length + b, tau)
        tl.store(Bonus + b, bonus)
        if IDS:
            tl.store(Ids + b * (K + 1) + lane, tl.where(lane < tau, x, bonus), mask=lane <= live)
        if COUNT:
            tl.store(counts, blocks + 1)
            tl.store(counts + 1, verified + live)
            tl.store(counts + 2, kept + tau)
        if not INJECT:
            tl.store(Steps + slot, step + 1)

    if PDL and EARLY:
        tl.extra.cuda.gdc_wait()


@dataclass
class Workspace:
    """Buffers of up to `rows` requests of K drafts over V tokens, reused by every launch: under 0.4 % of the logits."""

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
            "stats": torch.full((B, 2 * K + 1, C), _NO_STATS.value, dtype=torch.int64, device=self.device),
            "cross": torch.full((B, K, C), _NO_MASS.value, device=self.device),
            "row_level": torch.empty(B, 2 * K + 1, device=self.device),
            "row_sum": torch.empty(B, 2 * K + 1, device=self.device),
            "w": torch.empty(B, KP, device=self.device),
            "eta": torch.empty(B, KP, device=self.device),
            "open": torch.empty(B, KP, dtype=torch.int32, device=self.device),
            "mass": torch.full((B, K + 1, C), _NO_MASS.value, device=self.device),
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
    """Warps of each launch, and how many programs a pass has at least (one per chunk at most).

    pdl: programmatic dependent launches where the device has them.
    """

    stats: int = 4
    prepare: int = 4
    mass: int = 4
    finish: int = 16
    programs: int = 16384
    pdl: bool = True


TUNING = Tuning()
STAGES = 4  # the benchmark leaves later launches out to see where the time goes


def _per_program(rows: int, chunks: int) -> int:
    """Chunks a program takes so that about TUNING.programs exist."""
    return max(1, min(chunks, rows * chunks // TUNING.programs))


def verify(launch: Launch, space: Workspace) -> None:
    """Launch the kernels on the current stream."""
    n, t = launch, TUNING
    B, K = n.draft_ids.shape
    if B == 0:
        return
    V, C, KP, w = n.target.shape[-1], space.chunks, space.lanes, space.buffers
    if space.rows < B or (K, V) != (space.K, space.V):
        raise RuleError(f"workspace: expected rows >= {B}, K = {K}, V = {V}, found {space.rows}, {space.K}, {space.V}")
    some = n.length  # stands for a pointer no path reads
    one_hot, inject = n.draft is None, n.eta is not None
    q = n.target if n.draft is None else n.draft
    temp = some if n.temperature is None else n.temperature
    data = (
        n.draft_ids, n.draft_ids.stride(0), n.target, n.target.stride(0), n.target.stride(1),
        q, q.stride(0), q.stride(1), V, C,
    )  # fmt: skip
    who = (
        some if n.slots is None else n.slots, some if n.live is None else n.live,
        temp, temp if n.draft_temperature is None else n.draft_temperature,
    )  # fmt: skip
    noise_key = (some if n.seeds is None else n.seeds, some if n.steps is None else n.steps)
    eta, eta_stride = (some, 0) if n.eta is None else (n.eta, n.eta.stride(0))
    noise, noise_stride = (some, 0) if n.noise is None else (n.noise, n.noise.stride(0))
    pdl = t.pdl and can_overlap(n.target.device)
    after = {"launch_pdl": True} if pdl else {}  # not the first: its inputs are the caller's
    flags = {"K": K, "HAS_SLOTS": n.slots is not None, "HAS_LIVE": n.live is not None, "ONE_HOT": one_hot}
    exact = {"enable_fp_fusion": False}
    masses = not (n.logits and one_hot)
    if n.logits:
        per = _per_program(B * (K + 1), C)
        _stats_kernel[(triton.cdiv(C, per), K + 1, B)](
            *data, per, *who, w["stats"], w["cross"], CHUNK=space.chunk, CHAIN=n.chain, PDL=pdl, **flags,
            num_warps=t.stats,
        )  # fmt: skip
    flags |= {"LOGITS": n.logits}
    if STAGES < 2:
        return
    gather = t.prepare * max(1, KP // 8)
    _prepare_kernel[(B,)](
        *data, *who, w["stats"], w["cross"], *noise_key, eta, eta_stride,
        w["row_level"], w["row_sum"], w["w"], w["open"], w["eta"], w["mass"], fault(n.target.device),
        KP=KP, CP=columns(KP, C, gather), CHAIN=n.chain, INJECT=inject, PDL=pdl, **flags,
        num_warps=gather, **exact, **(after if n.logits else {}),
    )  # fmt: skip
    if STAGES >= 3 and masses:
        per = _per_program(B, C)
        _mass_kernel[(triton.cdiv(C, per), B)](
            *data, per, B, *who, w["row_level"], w["row_sum"], w["w"], w["open"], w["mass"],
            KP=KP, CHUNK=space.chunk, PDL=pdl, **flags, num_warps=t.mass, **exact, **after,
        )  # fmt: skip
    if STAGES < 4:
        return
    _finish_kernel[(B,)](
        *data, *who, *noise_key, noise, noise_stride,
        w["row_level"], w["row_sum"], w["w"], w["open"], w["eta"], w["mass"],
        n.length, n.bonus, some if n.ids is None else n.ids, some if n.counts is None else n.counts,
        KP=KP, CP=columns(KP, C, t.finish), CHUNK=space.chunk, CHAIN=n.chain, INJECT=inject, IDS=n.ids is not None,
        COUNT=n.counts is not None, PDL=pdl, EARLY=masses, **flags, num_warps=t.finish, **exact, **after,
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
