"""Row statistics in torch: what a shard keeps of [n, K + 1, V] target logits and, where drafts were drawn, of p and q.

On the CPU this runs in the writer's thread, many blocks at a time. On a GPU it runs on the engine's stream, where it
must not wait for the device: no branch there depends on a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from adapters.capture.layout import TOP
from adapters.rules import rowstats

CHUNKS = 64  # 18 candidates a row where values lie anywhere: 64 (1/64 + 1/63 + .. + 1/49)


class Scratch:
    """Memory of one thread that measures many batches: fresh memory of that size costs more than the sums."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """The buffer of that name, in this shape; what it held is void. A name has one dtype."""
        size = math.prod(shape)
        if name not in self.kept or self.kept[name].numel() < size:
            self.kept[name] = torch.empty(size, dtype=dtype)
        return self.kept[name][:size].view(*shape)

    def joined(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Float tensors behind one another; a single one as it is."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat(tuple(parts), out=self.take(name, (sum(map(len, parts)), *parts[0].shape[1:])))


def of_logits(
    logits: Tensor, drafts: Tensor, top: Tensor, inverse: Tensor | None, scratch: Scratch | None = None
) -> dict[str, Tensor]:
    """logits [n, K + 1, V] float, drafts [n, K], top [n, K + 1] the engine's argmax, inverse [n] 1/T (None: 1)
    -> draft, rank, z_x, log_p [n, K]; argmax, ties, z_max, lse, entropy, entropy_raw [n, K + 1]; top_ids, top_logits.

    The definitions are those of adapters/rules/rowstats, whose kernel a GPU runs.
    """
    logits, K = logits.float(), drafts.shape[1]
    if logits.is_cuda:
        values, ids = logits.topk(min(TOP, logits.shape[2]), dim=-1)
        columns = _by_kernel(logits, drafts, inverse)
    else:
        scratch = scratch or Scratch()
        values, ids = largest(logits, scratch)
        columns = _by_torch(logits, drafts, top, inverse, values, ids, scratch)
    scaled_x = columns["z_x"] if inverse is None else columns["z_x"] * inverse[:, None]
    return columns | {
        "draft": drafts.int(),
        "argmax": top.int(),
        "log_p": scaled_x - columns["lse"][:, :K],
        "top_ids": ids.int(),
        "top_logits": values,
    }


def largest(logits: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """logits [..., V] float32 on the CPU -> values and ids of the TOP largest of each row, downwards, as torch.topk.

    The row is folded into CHUNKS maxima; the least of their TOP largest has TOP logits above or at it, few of them as
    a rule, and only these are sorted: a third of the time of torch.topk.
    """
    V, shift = logits.shape[-1], (logits.shape[-1] - 1).bit_length()
    z = logits.reshape(-1, V)
    if V % CHUNKS or V <= TOP * CHUNKS or len(z) >= 1 << (31 - shift):
        return logits.topk(min(TOP, V), dim=-1)
    array = z.numpy()
    maxima = np.sort(z.view(len(z), -1, CHUNKS).amax(1).numpy(), -1)  # NaN last
    least = maxima[:, -TOP]
    # NaN, a mask that leaves too few, equals without end: left to torch.topk; what is marked there only fills the row.
    odd = ~((maxima[:, -2 * TOP] < least) & (maxima[:, -1] == maxima[:, -1]))
    marked = scratch.take("marked", z.shape, torch.bool).numpy()
    np.greater_equal(array, least[:, None], out=marked)
    if any_odd := odd.any():
        marked[odd] = np.arange(V) < TOP
    at = np.flatnonzero(marked)
    row = at // V
    # One sort for all rows. Of a float's bits, those of a negative one turned, the order is that of the numbers.
    bits = array.reshape(-1)[at].view(np.int32)
    rising = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)
    key = np.sort((((row << 32) - rising) << shift) + at - row * V)
    first = np.searchsorted(row, np.arange(len(z)))
    ids = torch.from_numpy(key[first[:, None] + np.arange(TOP)] & ((1 << shift) - 1))
    values = z.gather(1, ids)
    if any_odd:
        values[odd], ids[odd] = z[odd].topk(TOP, dim=-1)
    return values.view(*logits.shape[:-1], TOP), ids.view(*logits.shape[:-1], TOP)


def _by_kernel(logits: Tensor, drafts: Tensor, inverse: Tensor | None) -> dict[str, Tensor]:
    """In one pass over the vocabulary; in a second one the raw entropy, where some row has a temperature."""
    K = drafts.shape[1]
    ids = torch.nn.functional.pad(drafts, (0, 1), value=-1)  # the bonus row has no draft
    scale = None if inverse is None else inverse[:, None].expand(-1, K + 1).contiguous()
    found = rowstats.measure(logits, ids, scale)
    raw = found.entropy if inverse is None else rowstats.measure(logits, ids).entropy
    return {
        "rank": found.rank[:, :K],
        "z_x": found.z[:, :K],
        "ties": found.ties,
        "z_max": found.peak,
        "lse": found.lse,
        "entropy": found.entropy,
        "entropy_raw": raw,
    }


def _by_torch(
    logits: Tensor,
    drafts: Tensor,
    top: Tensor,
    inverse: Tensor | None,
    values: Tensor,
    ids: Tensor,
    scratch: Scratch,
) -> dict[str, Tensor]:
    """The same on a CPU, where the largest logits nearly always tell ties and rank without another pass."""
    K, V = drafts.shape[1], logits.shape[2]
    inside = drafts.clamp(0, V - 1)
    z_x = logits[:, :K].gather(2, inside[..., None])[..., 0].masked_fill(inside != drafts, torch.nan)
    z_max = logits.gather(2, top[..., None])[..., 0]
    below, weight = (scratch.take(name, logits.shape) for name in ("below", "weight"))
    raw = _mass(torch.sub(logits, z_max[..., None], out=below), weight)
    lse, entropy = raw
    if inverse is not None:
        scaled = torch.sub(logits, z_max[..., None], out=below).mul_(inverse[:, None, None])
        lse, entropy = _mass(scaled, weight)
    peak = z_max if inverse is None else z_max * inverse[:, None]
    return {
        "rank": _rank(logits[:, :K], drafts, z_x, values[:, :K], ids[:, :K]),
        "z_x": z_x,
        "ties": _ties(logits, z_max, values),
        "z_max": z_max,
        "lse": torch.where(z_max.isinf(), z_max, peak + lse),
        "entropy": entropy,
        "entropy_raw": raw[1],
    }


def _mass(below: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """below [..., V]: (z - max z) / T, weight: memory for as much -> log of the sum of exponentials, entropy. Both are
    written to."""
    total = torch.exp(below, out=weight).sum(-1)
    # Products in place: fresh memory of that size costs more than all else here.
    sums = weight.mul_(below).sum(-1)
    if sums.isnan().any():  # a masked logit, -inf, has no weight and no part in the entropy
        sums = torch.exp(below, out=weight).mul_(below.clamp_(min=-1e4)).sum(-1)
    return total.log(), total.log() - sums / total


def _rank(logits: Tensor, ids: Tensor, z: Tensor, tops: Tensor, at: Tensor) -> Tensor:
    """Tokens in front of each id, by value downwards and then by id; V where it has no logit."""
    rows, own, top = logits.numpy(), z.numpy(), tops.numpy()
    value, id = own[..., None], ids.numpy()
    count = ((top > value) | ((top == value) & (at.numpy() < id[..., None]))).sum(-1, dtype=np.int32)
    for deep in zip(*np.nonzero(~(own > top[..., -1])), strict=True):  # few; one at a time they need no fresh memory
        row = rows[deep]
        count[deep] = np.count_nonzero(row > own[deep]) + np.count_nonzero(row[: id[deep]] == own[deep])
    count[np.isnan(own)] = logits.shape[-1]
    return torch.from_numpy(count)


def _ties(logits: Tensor, z: Tensor, tops: Tensor) -> Tensor:
    """How many logits of a row equal its maximum z; 0 where that is NaN."""
    count = (tops.numpy() == z.numpy()[..., None]).sum(-1, dtype=np.int32)
    for full in zip(*np.nonzero(count == tops.shape[-1]), strict=True):
        count[full] = np.count_nonzero(logits.numpy()[full] == z.numpy()[full])
    return torch.from_numpy(count)


def of_probs(drafts: Tensor, p: Tensor, q: Tensor, scratch: Scratch | None = None) -> dict[str, Tensor]:
    """drafts [m, K] drawn from q [m, K, V]; p [m, K + 1, V] after temperature, top-k and top-p
    -> log_p, log_q, excess [m, K] float32.

    excess[i] = sum_v max(w_i p_i(v) - q_i(v), 0) with w_0 = 1, w_i = min(w_{i-1} p_{i-1}(x)/q_{i-1}(x), 1): all that
    block verification asks of the vocabulary, and a function of the drafts alone, not of any coin.
    """
    K, V = q.shape[1:]
    known = (drafts >= 0) & (drafts < V)
    index = drafts.clamp(0, V - 1)[..., None]
    p_x = p[:, :K].gather(2, index)[..., 0].float().masked_fill(~known, 0.0)
    q_x = q.gather(2, index)[..., 0].float().masked_fill(~known, 0.0)
    ratio = p_x / q_x
    ratio = torch.where(ratio >= 0, ratio, 0.0)
    w, sums = torch.ones_like(p_x[:, 0]), []
    for i in range(K):
        sums.append(_excess(w, p[:, i], q[:, i], scratch))
        w = (w * ratio[:, i]).clamp(max=1.0)
    return {"log_p": p_x.log(), "log_q": q_x.log(), "excess": torch.stack(sums, 1).float()}


def _excess(w: Tensor, p: Tensor, q: Tensor, scratch: Scratch | None) -> Tensor:
    """w [m], p, q [m, V] -> [m]: sum_v max(w p(v) - q(v), 0), where NaN is no excess."""
    if scratch is not None:  # in place: fresh memory costs more than the sums
        mass = torch.mul(p, w[:, None], out=scratch.take("below", p.shape)).sub_(q)
        total = mass.clamp_(min=0).sum(-1)
        if not total.isnan().any():
            return total
    mass = w[:, None] * p - q
    return torch.where(mass > 0, mass, 0.0).sum(-1)
