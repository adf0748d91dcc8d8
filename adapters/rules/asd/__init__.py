"""ASD: accept mismatches of small regret within a per-request budget. README.md has the rule and its source."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.rules.asd import naive
from adapters.rules.asd.config import AsdConfig, Params, as_params
from adapters.rules.asd.report import BUDGET, CAP, FULL, GATE, INVALID, STOP_NAMES, Report, settle
from adapters.rules.common import Accepted, check, check_block, check_in_place, check_live, use_kernel

__all__ = [
    "BUDGET",
    "CAP",
    "FULL",
    "GATE",
    "INVALID",
    "STOP_NAMES",
    "AsdConfig",
    "Params",
    "Report",
    "accept",
    "as_params",
    "settle",
]


def accept(
    draft_ids: Tensor,
    target_logits: Tensor,
    spent: Tensor,
    config: AsdConfig | Sequence[AsdConfig] | Params,
    live: Tensor | None = None,
    report: Report | None = None,
) -> Accepted:
    """Walk a verified block of greedy requests and charge the ledger for what is committed.

    draft_ids [B, K] int64; target_logits [B, K+1, V] float, penalties and masks applied, temperature not;
    spent [B] float32, updated in place; config one AsdConfig, one per row, or Params; live [B] int, default K;
    report filled in place. Raises RuleError (PolicyError for a config) naming the field.
    """
    B, _, _ = check_block(draft_ids, "target_logits", target_logits)
    live = check_live(live, draft_ids)
    check("spent", spent, (B,), (torch.float32,), draft_ids)
    check_in_place("spent", spent)
    params = config if isinstance(config, Params) else as_params(config, B, draft_ids.device)
    if report is not None:
        report.check(draft_ids)
    if use_kernel(draft_ids):
        import adapters.rules.asd.triton as kernel  # Triton only where it is used

        return kernel.accept(draft_ids, target_logits, spent, params, live, report)
    return naive.accept(draft_ids, target_logits, spent, params, live, report)
