"""Optional detail of an ASD step, in tensors the caller owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.rules.common import RuleError, check, check_in_place

# Why a row stopped. Where several hold at once the first of INVALID, BUDGET, GATE, CAP is named.
FULL = 0  # every live draft committed
INVALID = 1  # regret not finite: NaN row, infinite logit, draft id outside the vocabulary
BUDGET = 2  # budget spent before it, or it would not fit
GATE = 3  # r_i > g * q_i
CAP = 4  # max_mismatches reached
STOP_NAMES = ("full", "invalid", "budget", "gate", "cap")


@dataclass
class Report:
    """charge [B, K] float32: regret charged at each position, 0 where matched or not committed.

    relaxed [B] int32: mismatches committed. stop [B] int8: FULL, INVALID, BUDGET, GATE or CAP.
    """

    charge: Tensor
    relaxed: Tensor
    stop: Tensor

    @classmethod
    def empty(cls, rows: int, drafts: int, device: torch.device | str = "cpu") -> Report:
        """A report of its own for [rows, drafts] blocks."""
        return cls(
            torch.zeros(rows, drafts, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int8, device=device),
        )

    def check(self, draft_ids: Tensor) -> None:
        """Fail unless the three tensors fit draft_ids [B, K]."""
        B, K = draft_ids.shape
        check("report.charge", self.charge, (B, K), (torch.float32,), draft_ids)
        check("report.relaxed", self.relaxed, (B,), (torch.int32,), draft_ids)
        check("report.stop", self.stop, (B,), (torch.int8,), draft_ids)
        for name in ("charge", "relaxed", "stop"):
            check_in_place(f"report.{name}", getattr(self, name))


def settle(spent_before: Tensor, charge: Tensor, committed: Tensor) -> Tensor:
    """The ledger after only the first `committed` drafts were kept: what an EOS or max_tokens cut needs.

    spent_before [B] float32 (before the block), charge [B, K] float32 (Report.charge), committed [B] int
    -> spent [B] float32, a new tensor. Adds in order, as the rule does: committing everything gives the rule's value.
    """
    if charge.ndim != 2 or charge.dtype != torch.float32:
        raise RuleError(f"charge: expected [B, K] float32, found {list(charge.shape)} {charge.dtype}")
    check("spent_before", spent_before, charge.shape[:1], (torch.float32,), charge)
    check("committed", committed, charge.shape[:1], (torch.int32, torch.int64), charge)
    spent = spent_before.clone()
    for i in range(charge.shape[1]):
        spent = torch.where(i < committed, spent + charge[:, i], spent)
    return spent
