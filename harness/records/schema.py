"""What a record holds. SCHEMA_VERSION: its shape. METRIC_VERSION: how the numbers in it are computed.

A field that is added gets a default and stands in SINCE or ROWS_SINCE under the version it came with: older records are
read without it, and their seals hold.

`seal` is the SHA-256 of everything else in record.json, `requests_sha256` that of requests.parquet, `engine_log_sha256`
that of engine.log (None: no log, as of an attached server, or a record from before it was kept): an edited record is
seen, and its summary is computed again from the rows whenever tables are checked.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec
import pyarrow as pa

SCHEMA_VERSION = 2
METRIC_VERSION = 1

SINCE: dict[int, dict[str, tuple[str, ...]]] = {2: {"record": ("asked", "segments"), "arm": ()}}
ROWS_SINCE: dict[int, tuple[str, ...]] = {2: ("segment", "step_lengths", "rejections", "block")}

Status = Literal["incomplete", "complete", "failed"]
Outcome = Literal["pass", "fail", "inconclusive"]


class Verdict(msgspec.Struct, forbid_unknown_fields=True):
    """outcome: exit status 0, 1, 2. reasons: why it is not a pass, a line each."""

    outcome: Outcome
    reasons: list[str]


class Arm(msgspec.Struct, forbid_unknown_fields=True):
    """One policy on one set of items. counters: of the policy's key, before and after the arm's requests; of a run in
    several segments the sums of theirs, whose difference is the sum of the differences."""

    policy: dict[str, Any]
    policy_key: str
    policy_source: str
    temperature: float
    expected: int
    counters_before: dict[str, Any] | None = None
    counters_after: dict[str, Any] | None = None


class Identity(msgspec.Struct, forbid_unknown_fields=True):
    """What the numbers belong to.

    plan: digest of what was asked (configuration, code, revisions): the key of resuming. digest: plan and what was
    observed (adapter files, engine version, image digest). What makes two runs rows of one table: publish/labels.py.
    """

    plan: str
    digest: str | None
    config: dict[str, Any]
    code: dict[str, Any]
    target: dict[str, Any]
    draft: dict[str, Any]
    data: dict[str, Any]
    adapter_files: dict[str, str] | None = None
    engine: dict[str, Any] | None = None
    image_digest: str | None = None


class Segment(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A stretch of a run between a start of the harness and its end: a run that was never stopped has one.

    end: `open`, `finished`, `killed` (seen when the run was continued), or what stopped it. rows: kept of it. unproven:
    answers after its last checkpoint, whose counters died with the engine: set aside in unproven.jsonl, asked again.
    counters: by arm, before and after, of this segment's engine. shards: by arm, how far each replica's counters went.
    blocks: how far the counters went in each block of a schedule. nonces: of the engines. launch: as in the record,
    where it is not the first segment's.
    """

    started: str
    end: str = "open"
    rows: int = 0
    unproven: int = 0
    counters: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {}
    shards: dict[str, list[dict[str, float]]] = {}
    blocks: list[dict[str, Any]] = []
    nonces: list[str | None] = []
    launch: dict[str, Any] | None = None
    boot: str | None = None
    load_average: list[float] = []


class Record(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """asked: identity.plan as it was before an attached server reported its models: what resuming looks for."""

    schema_version: int = SCHEMA_VERSION
    metric_version: int = METRIC_VERSION
    id: str
    task: str
    status: Status
    created: str
    asked: str | None = None
    segments: list[Segment] = []
    finished: str | None = None
    identity: Identity
    environment: dict[str, Any]
    launch: dict[str, Any] | None = None
    server: dict[str, Any] | None = None
    workload: dict[str, Any]
    arms: dict[str, Arm] = {}
    gates: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    verdict: Verdict | None = None
    error: str | None = None
    rows: int = 0
    requests_sha256: str | None = None
    engine_log_sha256: str | None = None
    seal: str | None = None


class Row(msgspec.Struct, kw_only=True):
    """One request of one arm. Times in seconds: started_s since the segment's first request, wall_s on the client.

    error: kind of the infrastructure error, None for an answer. replica: which of the run's servers was asked.
    block: of a schedule of blocks (concurrency > 1), in the order they were run; None: no such schedule.
    outcome, parsed, rule: of scoring, None until scored; outcome `error`: it could not be scored, and rule says why.
    steps: verify steps. proposed: drafts verified. accepted: drafts accepted. histogram[n]: steps with n accepted.
    segment: of the run, 0 the first. rejections: [regret, position, live drafts] of each first rejection, of a
    calibration; None for a regret that is not finite.
    step_lengths: drafts accepted by each verify step, in order; None: the engine does not say, or the record is older.
    """

    arm: str
    policy_key: str
    order: int
    item: str
    task: str
    prompt_sha256: str
    prompt_tokens: int
    seed: int | None = None
    started_s: float = 0.0
    wall_s: float = 0.0
    server_s: float | None = None
    error: str | None = None
    detail: str | None = None
    replica: int = 0
    block: int | None = None
    output_ids: list[int] = []
    text: str = ""
    finish: str | None = None
    cached_tokens: int = 0
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    histogram: list[int] = []
    relaxed: int = 0
    regret: float = 0.0
    spent: float = 0.0
    exhausted: int = 0
    outcome: str | None = None
    parsed: str | None = None
    rule: str | None = None
    segment: int = 0
    step_lengths: list[int] | None = None
    rejections: list[list[float | None]] | None = None


def _arrow(name: str, kind: str) -> pa.Field:
    kinds = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "list[int]": pa.list_(pa.int64())}
    kinds["list[list[float | None]]"] = pa.list_(pa.list_(pa.float64()))
    return pa.field(name, kinds[kind.removesuffix(" | None")], nullable=kind.endswith(" | None"))


ROWS = pa.schema([_arrow(name, kind) for name, kind in Row.__annotations__.items()])


def canonical(value: Any) -> bytes:
    """JSON with sorted keys: equal values have equal bytes."""
    return msgspec.json.encode(msgspec.to_builtins(value), order="deterministic")


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def seal(record: Record) -> str:
    """Of the record as it is read back: 0 written for a float comes back as 0.0."""
    record = msgspec.json.decode(msgspec.json.encode(record), type=Record)
    content = msgspec.to_builtins(record) | {"seal": None}
    if record.engine_log_sha256 is None:
        del content["engine_log_sha256"]  # records from before this field were sealed without it
    for version, added in SINCE.items():
        if record.schema_version < version:
            for owner, names in (
                (content, added["record"]),
                *((arm, added["arm"]) for arm in content["arms"].values()),
            ):
                for name in names:
                    del owner[name]
    return digest(content)
