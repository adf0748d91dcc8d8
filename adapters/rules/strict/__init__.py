"""Strict: accept while the draft is the target's argmax. README.md has the formula."""

from __future__ import annotations

from torch import Tensor

from adapters.rules.common import Accepted, check_block, check_live, use_kernel
from adapters.rules.strict import naive


def accept(draft_ids: Tensor, target_logits: Tensor, live: Tensor | None = None) -> Accepted:
    """draft_ids [B, K] int64, target_logits [B, K+1, V] float, live [B] int (default K) -> Accepted.

    The argmax is torch.argmax: first index on ties, a NaN is the largest value. Raises RuleError naming the field.
    """
    check_block(draft_ids, "target_logits", target_logits)
    live = check_live(live, draft_ids)
    if use_kernel(draft_ids):
        import adapters.rules.strict.triton as kernel  # Triton only where it is used

        return kernel.accept(draft_ids, target_logits, live)
    return naive.accept(draft_ids, target_logits, live)
