"""Strict in plain torch: the oracle of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.rules.common import Accepted, pick, prefix_length


def accept(draft_ids: Tensor, target_logits: Tensor, live: Tensor) -> Accepted:
    """draft_ids [B, K], target_logits [B, K+1, V], live [B]."""
    K = draft_ids.shape[1]
    top = target_logits.argmax(-1)  # [B, K+1]
    row = torch.arange(K, device=draft_ids.device)
    length = prefix_length((draft_ids == top[:, :K]) & (row < live[:, None]))
    return Accepted(length, pick(top, length))
