"""What an acceptance policy is, and how one is read from JSON.

One schema serves three doors: the environment variable SPECACCEPT_POLICY (the server's default), the per-request field
`sampling_params.custom_params.specaccept`, and the Hydra group recipes/policy. A value outside its domain is a
`PolicyError` that names the field, what was expected and what was found; nothing is clamped or ignored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ENVIRONMENT = "SPECACCEPT_POLICY"
CUSTOM_PARAM = "specaccept"

GREEDY_RULES = ("strict", "asd")
SAMPLED_RULES = ("chain", "block")
ENGINE_RULES = ("block-engine",)  # sampled too, but the engine's own kernel: only some engines have it
RULES = GREEDY_RULES + SAMPLED_RULES + ENGINE_RULES
SUFFIX_VALUES = ("suffix", "normalized")
FLOAT32_MAX = 3.4028234663852886e38  # the ledger is float32


class PolicyError(ValueError):
    """A policy field outside its domain."""


def _number(field: str, value: Any, limit: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        raise PolicyError(f"policy.{field}: expected a number from 0 to {limit:g}, found {value!r}")
    return float(value) + 0.0  # -0.0 and 0.0 are one policy


@dataclass(frozen=True)
class Policy:
    """One acceptance policy.

    rule: `strict` and `asd` serve greedy requests, `chain` and `block` sampled ones (temperature > 0).
    budget, gate: natural-log units of raw target logits. gate = inf: no gate. JSON has no infinity: null stands for it.
    max_mismatches: relaxed mismatches per block; None: no cap.
    suffix_value: q_i of the gate, `suffix` (live - i) or `normalized` ((live - i) / live).
    """

    rule: str
    budget: float = 0.0
    gate: float = math.inf
    max_mismatches: int | None = None
    suffix_value: str = "suffix"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise PolicyError(f"policy.rule: expected one of {', '.join(RULES)}, found {self.rule!r}")
        object.__setattr__(self, "budget", _number("budget", self.budget, FLOAT32_MAX))
        object.__setattr__(self, "gate", _number("gate", self.gate, math.inf))
        m = self.max_mismatches
        if m is not None and (isinstance(m, bool) or not isinstance(m, int) or m < 0):
            raise PolicyError(f"policy.max_mismatches: expected an integer >= 0 or null, found {m!r}")
        if self.suffix_value not in SUFFIX_VALUES:
            raise PolicyError(
                f"policy.suffix_value: expected one of {', '.join(SUFFIX_VALUES)}, found {self.suffix_value!r}"
            )
        if self.rule != "asd" and (self.budget, self.gate, m, self.suffix_value) != (0.0, math.inf, None, "suffix"):
            raise PolicyError(f"policy: budget, gate, max_mismatches, suffix_value belong to asd, found {self.rule!r}")

    @property
    def is_strict(self) -> bool:
        """No mismatch can pass: token-identical to strict by rule (design section 3)."""
        return self.rule == "strict" or (self.rule == "asd" and (self.budget == 0 or self.max_mismatches == 0))

    @property
    def key(self) -> str:
        """Stable name of this policy in counters and records."""
        if self.rule != "asd":
            return self.rule
        m = "inf" if self.max_mismatches is None else self.max_mismatches
        return f"asd(B={self.budget},g={self.gate},m={m},q={self.suffix_value})"

    def to_json(self) -> dict[str, Any]:
        """The fields that apply to the rule, infinity as null."""
        if self.rule != "asd":
            return {"rule": self.rule}
        return asdict(self) | {"gate": None if math.isinf(self.gate) else self.gate}

    @classmethod
    def from_json(cls, value: Any) -> Policy:
        """Read a JSON object (or its text). Unknown fields are an error: a misspelt budget must not run as strict."""
        if isinstance(value, str | bytes):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise PolicyError(f"policy: expected a JSON object, found {value!r} ({error})") from None
        if not isinstance(value, Mapping):
            raise PolicyError(f"policy: expected a JSON object, found {value!r}")
        unknown = sorted(set(value) - set(cls.__dataclass_fields__))
        if unknown:
            raise PolicyError(f"policy: unknown field {unknown[0]!r}, expected {', '.join(cls.__dataclass_fields__)}")
        if "rule" not in value:
            raise PolicyError(f"policy.rule: expected one of {', '.join(RULES)}, found nothing")
        fields = dict(value)
        if fields.get("gate", 0.0) is None:
            fields["gate"] = math.inf
        return cls(**fields)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Policy | None:
        """The policy of SPECACCEPT_POLICY, or None where it is unset or empty: then an adapter changes nothing."""
        text = environ.get(ENVIRONMENT, "").strip()
        return cls.from_json(text) if text else None
