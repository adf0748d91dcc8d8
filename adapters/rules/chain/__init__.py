"""Token rejection (chain): accept draft i with probability min(1, p/q). README.md has the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.rules.chain import naive
from adapters.rules.common import Accepted, use_kernel
from adapters.rules.sampling import prepare


def accept(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    eta: Tensor | None = None,
    noise: Tensor | None = None,
    live: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Accepted:
    """draft_ids [B, K] int64; target_probs [B, K+1, V] after temperature, top-k, top-p; draft_probs [B, K, V], the
    distribution each draft was really drawn from, or None: one-hot at the drafts (not sampled, argmax drafts).

    eta [B, K] uniforms and noise [B, V] Exp(1), float32, are drawn from `generator` where not given; live [B] int.
    A drafted token with q = 0 raises RuleError here on the CPU; the kernel, which must not wait for the device, treats
    it as rejected and raises the flag of `adapters.rules.sampling.fault`. RuleError names a field that does not fit.
    """
    eta, noise, live = prepare(draft_ids, target_probs, draft_probs, eta, noise, live, generator)
    if use_kernel(draft_ids):
        import adapters.rules.chain.triton as kernel  # Triton only where it is used

        return kernel.accept(draft_ids, target_probs, draft_probs, eta, noise, live)
    return naive.accept(draft_ids, target_probs, draft_probs, eta, noise, live)
