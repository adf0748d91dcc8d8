"""Token rejection through the kernels of block verification: only the accept step differs."""

from __future__ import annotations

from torch import Tensor

from adapters.rules.block import triton as block
from adapters.rules.common import Accepted


def accept(
    draft_ids: Tensor, target_probs: Tensor, draft_probs: Tensor | None, eta: Tensor, noise: Tensor, live: Tensor
) -> Accepted:
    """naive.accept through the kernels, injected coins. float64 inputs are read as float32."""
    return block.accept(draft_ids, target_probs, draft_probs, eta, noise, live, chain=True)
