"""Row statistics in plain torch: the oracle of the kernel. Works in float32, in float64 where the logits are."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.rules.rowstats.stats import RowStats


def measure(rows: Tensor, ids: Tensor, inverse_temperature: Tensor | None = None) -> RowStats:
    """rows [..., V] float, ids [...] int, inverse_temperature [...] float or None (= 1) -> RowStats of [...]."""
    V = rows.shape[-1]
    z = rows if rows.dtype == torch.float64 else rows.float()
    top = z.argmax(-1)
    peak = z.gather(-1, top[..., None])[..., 0]
    known = (ids >= 0) & (ids < V)
    z_x = z.gather(-1, ids.clamp(0, V - 1).long()[..., None])[..., 0].masked_fill(~known, torch.nan)
    before = (z > z_x[..., None]) | ((z == z_x[..., None]) & (torch.arange(V, device=z.device) < ids[..., None]))
    rank = torch.where(z_x.isnan(), V, before.sum(-1))
    scale = torch.ones_like(peak) if inverse_temperature is None else inverse_temperature.to(z.dtype)
    d = ((z - peak[..., None]) * scale[..., None]).masked_fill(z == -torch.inf, -torch.inf)
    e = d.exp()
    S = e.sum(-1)
    spread = (e * d).masked_fill(e == 0, 0.0).sum(-1)  # e^d d, 0 where there is no mass
    lse = torch.where(peak.isinf(), peak, peak * scale + S.log())
    entropy = torch.where(peak.isinf(), torch.nan, S.log() - spread / S)
    whole = (top.int(), (z == peak[..., None]).sum(-1, dtype=torch.int32), rank.int())
    return RowStats(peak, whole[0], whole[1], z_x, whole[2], lse, entropy)
