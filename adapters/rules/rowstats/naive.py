"""Row statistics in plain torch: the oracle of the kernel. Works in float32, in float64 where the logits are."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.rules.rowstats.stats import RowStats


def measure(rows: Tensor, ids: Tensor, inverse_temperature: Tensor | None = None) -> RowStats:
    """rows [..., V] float, ids [...] int, inverse_temperature [...] float or None (= 1) -> RowStats of [...].

    One buffer of the rows' size holds what is counted, as 0 and 1, and then d: fresh memory costs more than the work.
    """
    V = rows.shape[-1]
    z = (rows if rows.dtype == torch.float64 else rows.float()).detach()
    top = z.argmax(-1, keepdim=True)
    peak, x = z.gather(-1, top), ids[..., None]
    z_x = z.gather(-1, x.clamp(0, V - 1).long()).masked_fill((x < 0) | (x >= V), torch.nan)
    buffer = torch.empty_like(z)
    ties = torch.eq(z, peak, out=buffer).sum(-1)
    before = torch.gt(z, z_x, out=buffer).sum(-1)
    if bool((torch.eq(z, z_x, out=buffer).sum(-1) > 1).any()):  # equals of x: those of lower ids come before it
        before += buffer.masked_fill_(torch.arange(V, device=z.device) >= x, 0.0).sum(-1)
    rank = torch.where(z_x[..., 0].isnan(), V, before)
    d, base = torch.sub(z, peak, out=buffer), peak[..., 0]
    if inverse_temperature is not None:
        scale = inverse_temperature.to(z.dtype)
        d, base = d.mul_(scale[..., None]), base * scale
    d.clamp_(min=torch.finfo(z.dtype).min)  # -inf has no mass, and 0 times -inf no value
    e = d.exp()
    S, spread = e.sum(-1), torch.linalg.vecdot(e, d)
    peak, log_S = peak[..., 0], S.log()
    infinite = peak.isinf()
    lse = torch.where(infinite, peak, base + log_S)
    entropy = torch.where(infinite, torch.nan, log_S - spread / S)
    return RowStats(peak, top[..., 0].int(), ties.int(), z_x[..., 0], rank.int(), lse, entropy)
