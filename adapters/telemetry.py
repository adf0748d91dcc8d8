"""What an armed engine says about itself: the snapshot a harness reads before and after its timed window.

Counters are host numbers that only grow (`reset` excepted, an explicit request). An engine adds what a step really
committed, after its own EOS and length cuts, so that counters and output ids can be compared. No torch here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from adapters import __version__
from adapters.policy import Policy

SCHEMA = 1
NONCE = "SPECACCEPT_NONCE"


@dataclass
class Counters:
    """Totals of one policy key.

    requests: finished requests that asked for it.     blocks: verify steps it decided.
    drafts_verified: sum of live drafts.               strict_accepted: committed drafts equal to the target's argmax
    (sampled rules: committed drafts).                 relaxed: committed drafts that differ from it.
    Of thresholds and entropy, strict_accepted is what their lossless form would have committed too, relaxed the rest.
    regret_charged: nats, committed drafts only.       budget_exhausted: blocks stopped for lack of budget.
    committed_tokens: drafts and bonus tokens that reached an output.
    fallbacks: those of them that the engine's own rule served instead, by reason; its blocks count under that rule.
    """

    requests: int = 0
    blocks: int = 0
    drafts_verified: int = 0
    strict_accepted: int = 0
    relaxed: int = 0
    regret_charged: float = 0.0
    budget_exhausted: int = 0
    committed_tokens: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)

    def fall_back(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1


@lru_cache(maxsize=1)
def file_hashes() -> dict[str, str]:
    """SHA-256 of every Python file of this package as it lies on disk, by path relative to the package's parent."""
    package = Path(__file__).resolve().parent
    return {
        path.relative_to(package.parent).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(package.rglob("*.py"))
    }


class Telemetry:
    """The counters of one engine process and the snapshot around them.

    adapter: `reference`, `sglang` or `lightllm`. engine_version: as the engine reports it.
    default_policy: what a request without a policy of its own gets; None: the engine's own rules.
    """

    def __init__(
        self, adapter: str, engine_name: str, engine_version: str, default_policy: Policy | None = None
    ) -> None:
        self.adapter = adapter
        self.engine = {"name": engine_name, "version": engine_version}
        self.default_policy = default_policy
        self.armed = False
        self.capture: dict[str, Any] | None = None  # what a capture in force records: constant while it runs
        self.counters: dict[str, Counters] = {}
        self.files = file_hashes()  # hashed now: a file edited under a running server must not change its identity

    def of(self, policy: Policy | str) -> Counters:
        """The counters of a policy, or of a policy key."""
        key = policy if isinstance(policy, str) else policy.key
        if key not in self.counters:  # once per policy, not once per row and step
            self.counters[key] = Counters()
        return self.counters[key]

    def reset(self) -> None:
        self.counters.clear()

    def snapshot(self, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """A JSON object; later changes of the counters do not reach it."""
        return {
            "schema": SCHEMA,
            "adapter": self.adapter,
            "adapter_version": __version__,
            "files": dict(self.files),
            "engine": dict(self.engine),
            "nonce": environ.get(NONCE),
            "armed": self.armed,
            "default_policy": None if self.default_policy is None else self.default_policy.to_json(),
            "counters": {key: asdict(counters) for key, counters in sorted(self.counters.items())},
        } | ({} if self.capture is None else {"capture": self.capture})
