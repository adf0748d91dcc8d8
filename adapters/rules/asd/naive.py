"""ASD in plain torch: the oracle of the kernels. float32 throughout, the ledger adds in order."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.rules.asd.config import Params
from adapters.rules.asd.report import BUDGET, CAP, FULL, GATE, INVALID, Report
from adapters.rules.common import Accepted, pick


def regrets(draft_ids: Tensor, logits: Tensor, top: Tensor) -> Tensor:
    """r_i = z_i(t_i) - z_i(x_i) [B, K] float32; NaN where the draft is not a token of the vocabulary.

    draft_ids [B, K], logits [B, K+1, V], top [B, K+1] the argmax of each row.
    """
    K, V = draft_ids.shape[1], logits.shape[2]
    known = (draft_ids >= 0) & (draft_ids < V)
    z_top = logits[:, :K].gather(2, top[:, :K, None])[..., 0].float()
    z_draft = logits[:, :K].gather(2, draft_ids.clamp(0, V - 1)[..., None])[..., 0].float()
    return torch.where(known, z_top - z_draft, torch.nan)


def walk(
    draft_ids: Tensor, top: Tensor, regret: Tensor, spent: Tensor, params: Params, live: Tensor, report: Report | None
) -> Accepted:
    """The rule itself. draft_ids, regret [B, K]; top [B, K+1]; spent [B] float32, updated in place; live [B]."""
    B, K = draft_ids.shape
    length = torch.zeros(B, dtype=torch.int32, device=draft_ids.device)
    relaxed, stop, charge = torch.zeros_like(length), torch.zeros_like(length), torch.zeros_like(regret)
    going = torch.ones(B, dtype=torch.bool, device=draft_ids.device)
    for i in range(K):
        left = (live - i).float()
        value = torch.where(params.normalized, left / live.float(), left)  # q_i
        r, after = regret[:, i], spent + regret[:, i]
        match = draft_ids[:, i] == top[:, i]
        why = torch.where(relaxed + 1 <= params.cap, FULL, CAP)
        why = torch.where(r <= params.gate * value, why, GATE)
        why = torch.where((spent < params.budget) & (after <= params.budget), why, BUDGET)
        why = torch.where(torch.isfinite(r) & (r >= 0), why, INVALID)
        here = going & (i < live)
        charged = here & ~match & (why == FULL)
        spent.copy_(torch.where(charged, after, spent))
        charge[:, i] = torch.where(charged, r, 0.0)
        relaxed += charged
        stop = torch.where(here & ~match & ~charged, why, stop)
        going = here & (match | charged)
        length += going
    if report is not None:
        report.charge.copy_(charge)
        report.relaxed.copy_(relaxed)
        report.stop.copy_(stop)
    return Accepted(length, pick(top, length))


def accept(
    draft_ids: Tensor, target_logits: Tensor, spent: Tensor, params: Params, live: Tensor, report: Report | None = None
) -> Accepted:
    """draft_ids [B, K], target_logits [B, K+1, V], spent [B] float32 (in place), live [B]."""
    top = target_logits.argmax(-1)
    return walk(draft_ids, top, regrets(draft_ids, target_logits, top), spent, params, live, report)
