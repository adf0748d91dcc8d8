"""Strict as a kernel: the fused pass of ASD with a budget of 0 for everyone."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.rules.asd import triton as asd
from adapters.rules.asd.config import AsdConfig, as_params
from adapters.rules.common import Accepted

_STRICT = AsdConfig(budget=0.0, max_mismatches=0)


def accept(draft_ids: Tensor, target_logits: Tensor, live: Tensor) -> Accepted:
    """draft_ids [B, K], target_logits [B, K+1, V], live [B]."""
    B = len(draft_ids)
    spent = torch.zeros(B, device=draft_ids.device)
    return asd.accept(draft_ids, target_logits, spent, as_params(_STRICT, B, draft_ids.device), live)
