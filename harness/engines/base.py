"""What a task needs of an engine, whichever it is.

Tokens go in as ids and come out as the engine's own ids. A response that does not account for itself is an error, never
a measurement: `EngineError.kind` is one of KINDS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from adapters.policy import Policy

KINDS = ("timeout", "connection", "http", "garbled", "count", "aborted", "identity")


class EngineError(RuntimeError):
    """A request without a usable answer.

    kind: `timeout` (the deadline passed), `connection` (refused or broken off, a truncated body included), `http`
    (status >= 400), `garbled` (a body that is not the agreed JSON), `count` (ids and usage differ), `aborted` (the
    engine gave up), `identity` (another engine, model or adapter than the one expected).
    """

    def __init__(self, kind: str, message: str) -> None:
        assert kind in KINDS, kind
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(frozen=True)
class Request:
    """One prompt. temperature 0: greedy. seed: of a sampled request. deadline_s: seconds of wall, queueing included.

    ignore_eos: max_new_tokens ids, whatever they are.
    """

    rid: str
    input_ids: Sequence[int]
    max_new_tokens: int
    policy: Policy | None
    temperature: float = 0.0
    seed: int | None = None
    deadline_s: float = 120.0
    first_rejections: bool = False
    ignore_eos: bool = False


@dataclass(frozen=True)
class Generation:
    """One answer.

    finish: `stop` or `length`. steps: verify steps. proposed: drafts verified. accepted: drafts accepted, those cut at
    the end included. histogram[n]: steps that accepted n drafts. step_lengths: accepted drafts of each verify step, in
    order (None: the engine does not say). relaxed, regret, spent, exhausted: of the policy.
    wall_s: on the client's monotonic clock, from before the send to after the parse.
    """

    output_ids: list[int]
    finish: str
    prompt_tokens: int
    cached_tokens: int
    steps: int
    proposed: int
    accepted: int
    histogram: list[int]
    policy_key: str | None
    relaxed: int
    regret: float
    spent: float
    exhausted: int
    started_s: float
    wall_s: float
    server_s: float | None = None
    first_rejections: list[tuple[float, int, int]] | None = None
    step_lengths: list[int] | None = None


@dataclass(frozen=True)
class Snapshot:
    """What the adapter publishes (adapters/telemetry.py): `raw` as it came, counters by policy key."""

    raw: dict[str, Any]

    @property
    def nonce(self) -> str | None:
        return self.raw.get("nonce")

    @property
    def armed(self) -> bool:
        return self.raw.get("armed") is True

    @property
    def counters(self) -> dict[str, dict[str, Any]]:
        return self.raw["counters"]

    @property
    def identity(self) -> dict[str, Any]:
        """Everything but the counters: must not change while an arm is measured."""
        return {name: value for name, value in self.raw.items() if name != "counters"}


@dataclass(frozen=True)
class Server:
    """How a server describes itself. snapshot: None: no adapter. nonce: of this launch, or None."""

    version: str
    target: str
    draft: str | None
    max_running_requests: int | None
    snapshot: Snapshot | None
    nonce: str | None = None
    info: dict[str, Any] = field(repr=False, default_factory=dict)


class EngineClient(Protocol):
    """A connection to one engine. Methods raise EngineError."""

    url: str

    def generate(self, request: Request) -> Generation: ...

    def generate_many(self, requests: Sequence[Request]) -> list[Generation]:
        """One list request: scheduled in order, answers in order. Its wall is that of the whole list."""
        ...

    def server(self) -> Server: ...

    def healthy(self) -> bool: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...
