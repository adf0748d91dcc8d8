"""AsdConfig, and its form as one tensor per field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from adapters.policy import Policy
from adapters.rules.common import RuleError

NO_CAP = 2**31 - 1


@dataclass(frozen=True)
class AsdConfig:
    """budget B and gate g in natural-log units of raw target logits; max_mismatches m per block, None: no cap.

    suffix_value: q_i of the gate r_i <= g * q_i, `suffix` live - i, or `normalized` (live - i) / live.
    """

    budget: float
    gate: float = math.inf
    max_mismatches: int | None = None
    suffix_value: Literal["suffix", "normalized"] = "suffix"

    def __post_init__(self) -> None:
        # The same domain as the policy that reaches an engine; PolicyError names the field.
        Policy("asd", self.budget, self.gate, self.max_mismatches, self.suffix_value)

    @classmethod
    def from_policy(cls, policy: Policy) -> AsdConfig:
        """The greedy policies: asd as it stands, strict as budget 0."""
        if policy.rule == "strict":
            return cls(budget=0.0, max_mismatches=0)
        if policy.rule != "asd":
            raise RuleError(f"policy.rule: expected asd or strict, found {policy.rule!r}")
        return cls(policy.budget, policy.gate, policy.max_mismatches, policy.suffix_value)  # type: ignore[arg-type]


class Params(NamedTuple):
    """One entry per row: budget [B] float32, gate [B] float32, cap [B] int32, normalized [B] bool."""

    budget: Tensor
    gate: Tensor
    cap: Tensor
    normalized: Tensor


def as_params(config: AsdConfig | Sequence[AsdConfig], rows: int, device: torch.device) -> Params:
    """One config for all rows, or one per row, as tensors. A float64 budget is rounded to float32 here, once."""
    if not isinstance(config, AsdConfig | Sequence):
        raise RuleError(f"config: expected AsdConfig or one per row, found {type(config).__name__}")
    configs = [config] * rows if isinstance(config, AsdConfig) else list(config)
    if len(configs) != rows:
        raise RuleError(f"config: expected one AsdConfig or one per row ({rows}), found {len(configs)}")
    for c in configs:
        if not isinstance(c, AsdConfig):
            raise RuleError(f"config: expected AsdConfig, found {type(c).__name__}")
    caps = [NO_CAP if c.max_mismatches is None else min(c.max_mismatches, NO_CAP) for c in configs]
    return Params(
        torch.tensor([c.budget for c in configs], dtype=torch.float32, device=device),
        torch.tensor([c.gate for c in configs], dtype=torch.float32, device=device),
        torch.tensor(caps, dtype=torch.int32, device=device),
        torch.tensor([c.suffix_value == "normalized" for c in configs], dtype=torch.bool, device=device),
    )
