"""Reading records back, and refusing those that do not hold together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness.records.judgement import judged, read_judgements
from harness.records.run import JOURNAL, LOG, RECORD, REQUESTS, identity_digest, plan_digest, read_rows, sha256, summed
from harness.records.schema import METRIC_VERSION, SCHEMA_VERSION, Record, Row, seal


@dataclass(frozen=True)
class Loaded:
    """A record, as its newest judgement has it, and its rows. problems: why it cannot be published, a line each; empty
    for a sound record."""

    folder: Path
    record: Record | None
    rows: list[Row]
    problems: list[str]

    @property
    def complete(self) -> bool:
        return self.record is not None and self.record.status == "complete" and not self.problems


def read(folder: Path) -> Loaded:
    try:
        record = msgspec.json.decode((folder / RECORD).read_bytes(), type=Record)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors, and so is text that is not UTF-8
        return Loaded(folder, None, [], [f"{folder.name}: {RECORD}: {str(error).splitlines()[0]}"])
    problems = [f"{folder.name}: {problem}" for problem in _problems(folder, record)]
    rows: list[Row] = []
    if record.requests_sha256 is not None and not problems:
        try:
            rows = read_rows(folder / REQUESTS)
            problems += [f"{folder.name}: {problem}" for problem in _segments(record, rows)]
        except (OSError, ValueError) as error:  # msgspec's and Arrow's errors are ValueErrors
            problems.append(f"{folder.name}: {REQUESTS}: {str(error).splitlines()[0]}")
    if not problems:
        judgements, unsound = read_judgements(folder, record)
        problems += [f"{folder.name}: {problem}" for problem in unsound]
        record = judged(record, judgements)
    return Loaded(folder, record, rows, problems)


def read_all(results: Path) -> list[Loaded]:
    """Every run below results/runs, oldest first."""
    runs = results / "runs"
    return [read(folder) for folder in sorted(runs.glob("[!.]*")) if folder.is_dir()] if runs.is_dir() else []


def _problems(folder: Path, record: Record) -> list[str]:
    problems = []

    def expect(name: str, expected: object, found: object) -> None:
        if expected != found:
            problems.append(f"{name}: expected {expected!r}, found {found!r}")

    expect("id", folder.name, record.id)
    if not 1 <= record.schema_version <= SCHEMA_VERSION:
        problems.append(f"schema_version: expected 1 to {SCHEMA_VERSION}, found {record.schema_version}")
    expect("metric_version", METRIC_VERSION, record.metric_version)
    expect("seal (record.json was edited)", seal(record), record.seal)
    expect("identity.plan", plan_digest(record.identity), record.identity.plan)
    if record.status == "complete":
        problems += [f"{name}: expected a value, found none (provenance)" for name in _absent(record)]
        if record.identity.digest is not None:
            expect("identity.digest", identity_digest(record.identity), record.identity.digest)
    if record.requests_sha256 is not None:
        path = folder / REQUESTS
        expect(REQUESTS, record.requests_sha256, sha256(path) if path.exists() else None)
    if record.engine_log_sha256 is not None:
        path = folder / LOG
        expect(LOG, record.engine_log_sha256, sha256(path) if path.exists() else None)
    if record.requests_sha256 is None and not (folder / JOURNAL).exists():
        problems.append(f"{JOURNAL}: expected the journal of an unfinished run, found none")
    return problems


def _segments(record: Record, rows: list[Row]) -> list[str]:
    """Where the parts of a run do not make the whole: rows in no segment, counters that are not the segments' sums."""
    if record.schema_version < 2 or not record.segments:
        return []
    problems = []
    for number, segment in enumerate(record.segments):
        found = sum(row.segment == number for row in rows)
        if found != segment.rows:
            problems.append(f"segments[{number}].rows: expected {found} (requests.parquet), found {segment.rows}")
    if sum(segment.rows for segment in record.segments) != len(rows):
        problems.append(f"segments: expected the {len(rows)} rows of {REQUESTS}, found rows of no segment")
    again = msgspec.convert(msgspec.to_builtins(record), Record)
    summed(again)
    for name, arm in record.arms.items():
        if again.arms[name] != arm:
            problems.append(f"arms.{name}: counters: expected the sums over the segments, found others")
    return problems


def _absent(record: Record) -> list[str]:
    """Provenance that a complete record must have. code.commit may be absent where the SHA-256 names the content."""
    identity = record.identity
    needed = {
        "identity.digest": identity.digest,
        "identity.config": identity.config,
        "identity.code.sha256": identity.code.get("sha256"),
        "identity.target": _named(identity.target),
        "identity.draft": _named(identity.draft),
        "identity.data": identity.data,
        "identity.adapter_files": identity.adapter_files,
        "identity.engine": identity.engine,
        "environment.cpu": record.environment.get("cpu"),
        "environment.packages": record.environment.get("packages"),
        "launch": record.launch,
        "server": record.server,
        "arms": record.arms,
        "summary": record.summary,
        "verdict": record.verdict,
        "finished": record.finished,
        "requests_sha256": record.requests_sha256,
    }
    return [name for name, value in needed.items() if not value]


def _named(model: dict[str, Any]) -> Any:
    """What names a model's content; of an attached server, whose files are out of reach, what it reports."""
    return model.get("revision") or model.get("sha256") or model.get("reported")
