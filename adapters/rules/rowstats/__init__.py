"""Max, argmax, ties, a token's logit and rank, logsumexp and entropy of rows of logits. README.md defines them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from adapters.rules.common import use_kernel
from adapters.rules.rowstats import naive
from adapters.rules.rowstats.stats import RowStats, check_rows

if TYPE_CHECKING:
    from adapters.rules.rowstats.triton import Space

__all__ = ["RowStats", "measure"]


def measure(
    rows: Tensor,
    ids: Tensor,
    inverse_temperature: Tensor | None = None,
    out: RowStats | None = None,
    space: Space | None = None,
) -> RowStats:
    """rows [..., V] float (raw logits), ids [...] int, inverse_temperature [...] float, > 0 (None: 1) -> RowStats.

    out: filled in place and returned. space: the kernel's own buffers, `triton.Space`; None: allocated.
    CPU tensors take the oracle, CUDA tensors (all of them under TRITON_INTERPRET=1) the kernel, which reads float64 as
    float32. Raises RuleError naming the field.
    """
    check_rows(rows, ids, inverse_temperature, out)
    if use_kernel(rows):
        import adapters.rules.rowstats.triton as kernel  # Triton only where it is used

        return kernel.measure(rows, ids, inverse_temperature, out, space)
    found = naive.measure(rows, ids, inverse_temperature)
    if out is None:
        return found
    for mine, value in zip(out, found, strict=True):
        mine.copy_(value)
    return out
