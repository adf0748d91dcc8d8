"""What the sampled rules share: their coins, their argument checks, and the fault flag of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.rules.common import FLOATS, RuleError, check, check_block, check_live

_faults: dict[torch.device, Tensor] = {}


def fault(device: torch.device | str) -> Tensor:
    """[1] int32 on `device`, raised to 1 by a kernel that met a drafted token with q = 0 (or not a number).

    Reading it waits for the device, so read it where you would log, not in the step. The owner of the process
    resets it with `.zero_()`. The oracle raises RuleError instead.
    """
    device = torch.empty(0, device=device).device
    if device not in _faults:
        _faults[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return _faults[device]


def prepare(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    eta: Tensor | None,
    noise: Tensor | None,
    live: Tensor | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments of a sampled rule and draw what was not injected. Returns eta, noise, live."""
    B, K, V = check_block(draft_ids, "target_probs", target_probs)
    live = check_live(live, draft_ids)
    if draft_probs is not None:
        check("draft_probs", draft_probs, (B, K, V), FLOATS, draft_ids)
    if generator is not None and eta is not None and noise is not None:
        raise RuleError("generator: expected None where eta and noise are both given, found a generator")
    if eta is None:
        eta = torch.rand(B, K, device=draft_ids.device, generator=generator)
    if noise is None:
        noise = torch.empty(B, V, device=draft_ids.device).exponential_(generator=generator)
    check("eta", eta, (B, K), (torch.float32, torch.float64), draft_ids)
    check("noise", noise, (B, V), (torch.float32, torch.float64), draft_ids)
    return eta, noise, live
