"""What an acceptance policy is, and how one is read from JSON.

One schema serves three doors: the environment variable SPECACCEPT_POLICY (the server's default), the per-request field
`sampling_params.custom_params.specaccept`, and the Hydra group recipes/policy. A value outside its domain is a
`PolicyError` that names the field, what was expected and what was found; nothing is clamped or ignored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ENVIRONMENT = "SPECACCEPT_POLICY"
CUSTOM_PARAM = "specaccept"

GREEDY_RULES = ("strict", "asd", "relaxed-topk", "relaxed-ratio")
SAMPLED_RULES = ("chain", "block", "typical", "thresholds", "entropy")
ENGINE_RULES = ("block-engine",)  # sampled too, but the engine's own kernel: only some engines have it
REFERENCE_RULES = ("relaxed-topk", "relaxed-ratio", "typical", "thresholds", "entropy")
REFERENCE_ONLY = "served by the reference engine only"  # why another adapter refuses REFERENCE_RULES
RULES = GREEDY_RULES + SAMPLED_RULES + ENGINE_RULES
SUFFIX_VALUES = ("suffix", "normalized")
FLOAT32_MAX = 3.4028234663852886e38  # the ledger is float32


class PolicyError(ValueError):
    """A policy field outside its domain."""


def _number(field: str, value: Any, limit: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        raise PolicyError(f"policy.{field}: expected a number from 0 to {limit:g}, found {value!r}")
    return float(value) + 0.0  # -0.0 and 0.0 are one policy


def _real(low: float, high: float, above: bool = False) -> tuple[str, Callable[[Any], bool]]:
    """A finite number of an interval, its lower end left out where `above`."""

    def fits(value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (low < value if above else low <= value) and value <= high

    end = f"above {low:g}, at most {high:g}" if above else f"from {low:g} to {high:g}"
    return f"a number {end}", fits


def _whole(low: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer >= {low}", lambda value: type(value) is int and low <= value < 2**31


# Fields of the rules beside asd: what fits, and the letter in the key.
DOMAINS = {
    "epsilon": (*_real(0, 1), "e"),
    "alpha": (*_real(0, FLOAT32_MAX), "a"),
    "tau": (*_real(0, 1, above=True), "t"),
    "top_n": (*_whole(1), "N"),
    "delta": (*_real(0, 1), "d"),
    "ratio": (*_real(0, 1, above=True), "r"),
    "think_start": (*_whole(0), "think"),
    "think_end": (*_whole(0), "end"),
    "threshold_single": (*_real(0, 1), "single"),
    "threshold_acc": (*_real(0, 1), "acc"),
}
ASD_FIELDS = ("budget", "gate", "max_mismatches", "suffix_value")
THINK = ("think_start", "think_end")
FIELDS = {  # of each rule; think_start and think_end may be left out, the others not
    "typical": ("epsilon", "alpha"),
    "relaxed-topk": ("top_n", "delta", *THINK),
    "relaxed-ratio": ("top_n", "ratio", *THINK),
    "thresholds": ("threshold_single", "threshold_acc"),
    "entropy": ("alpha", "tau"),
}


@dataclass(frozen=True)
class Policy:
    """One acceptance policy. adapters/rules/<rule>/README.md has the formulas.

    rule: GREEDY_RULES serve greedy requests, the others sampled ones (temperature > 0).
    asd: budget, gate: natural-log units of raw target logits. gate = inf: no gate. JSON has no infinity: null stands
    for it. max_mismatches: relaxed mismatches per block; None: no cap. suffix_value: q_i of the gate, `suffix`
    (live - i) or `normalized` ((live - i) / live).
    typical: epsilon, alpha. relaxed-topk: top_n, delta. relaxed-ratio: top_n, ratio. Both: think_start, think_end, the
    ids between which they relax; None: everywhere. thresholds: threshold_single, threshold_acc. entropy: alpha, tau.
    """

    rule: str
    budget: float = 0.0
    gate: float = math.inf
    max_mismatches: int | None = None
    suffix_value: str = "suffix"
    epsilon: float | None = None
    alpha: float | None = None
    tau: float | None = None
    top_n: int | None = None
    delta: float | None = None
    ratio: float | None = None
    think_start: int | None = None
    think_end: int | None = None
    threshold_single: float | None = None
    threshold_acc: float | None = None

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
        for name in DOMAINS:
            object.__setattr__(self, name, self._field(name))
        if (self.think_start is None) != (self.think_end is None):
            there, missing = THINK if self.think_end is None else THINK[::-1]
            raise PolicyError(f"policy.{missing}: expected an id beside {there}, found None")
        if self.think_start is not None and self.think_start == self.think_end:
            raise PolicyError(f"policy.think_end: expected another id than think_start, found {self.think_end}")

    def _field(self, name: str) -> Any:
        """A field of DOMAINS, checked; numbers that are not counts as float, -0.0 as 0.0."""
        value, (expected, fits, _) = getattr(self, name), DOMAINS[name]
        if name not in FIELDS.get(self.rule, ()):
            if value is not None:
                owners = " or ".join(rule for rule, names in FIELDS.items() if name in names)
                raise PolicyError(f"policy.{name}: belongs to {owners}, found {value!r} for {self.rule}")
            return None
        if value is None and name in THINK:
            return None
        if not fits(value):
            found = "nothing" if value is None else repr(value)
            raise PolicyError(f"policy.{name}: expected {expected} for {self.rule}, found {found}")
        return value if expected.startswith("an integer") else float(value) + 0.0

    @property
    def is_strict(self) -> bool:
        """No mismatch can pass: token-identical to strict by rule (design section 3)."""
        no_budget = self.rule == "asd" and (self.budget == 0 or self.max_mismatches == 0)
        return self.rule == "strict" or no_budget or self.top_n == 1

    @property
    def is_lossless(self) -> bool:
        """The output has the target's own law by rule: greedy rules that are strict, sampled ones that are exact."""
        off = (self.threshold_single, self.threshold_acc) == (1, 1) or (self.alpha, self.tau) == (0, 1)
        return self.is_strict or self.rule in ("chain", "block", *ENGINE_RULES) or off

    @property
    def key(self) -> str:
        """Stable name of this policy in counters and records."""
        if self.rule == "asd":
            m = "inf" if self.max_mismatches is None else self.max_mismatches
            return f"asd(B={self.budget},g={self.gate},m={m},q={self.suffix_value})"
        given = [(DOMAINS[name][2], getattr(self, name)) for name in FIELDS.get(self.rule, ())]
        values = ",".join(f"{letter}={value}" for letter, value in given if value is not None)
        return f"{self.rule}({values})" if values else self.rule

    def to_json(self) -> dict[str, Any]:
        """The fields that apply to the rule, infinity as null."""
        if self.rule == "asd":
            own = {name: getattr(self, name) for name in ASD_FIELDS}
            return {"rule": self.rule} | own | {"gate": None if math.isinf(self.gate) else self.gate}
        return {"rule": self.rule} | {name: getattr(self, name) for name in FIELDS.get(self.rule, ())}

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
