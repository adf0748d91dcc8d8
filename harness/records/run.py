"""Writing one run: rows go to a journal as they come, and become requests.parquet when the run ends.

A run that is killed at any instruction leaves a record that says `incomplete` and a journal with every finished row.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from harness.records.schema import ROWS, Identity, Record, Row, Verdict, digest, seal

RECORD = "record.json"
REQUESTS = "requests.parquet"
JOURNAL = "requests.jsonl"
LOG = "engine.log"


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Run:
    """An open run. `record` is changed in place and written by `save` and `finish`."""

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder = folder
        self.record = record
        self.rows: list[Row] = []
        self._journal = (folder / JOURNAL).open("xb")

    @classmethod
    def create(
        cls, results: Path, task: str, identity: Identity, environment: dict[str, Any], workload: dict[str, Any]
    ) -> Run:
        """A directory results/runs/<UTC time>-<plan> that did not exist before."""
        created = now()
        stem = f"{created.replace('-', '').replace(':', '')}-{identity.plan[:8]}"
        runs = results / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        for turn in range(1000):
            name = stem if turn == 0 else f"{stem}-{turn + 1}"
            try:
                (runs / name).mkdir()
            except FileExistsError:
                continue
            break
        else:
            raise FileExistsError(f"runs: no free directory name for {stem} in {runs}")
        record = Record(
            id=name,
            task=task,
            status="incomplete",
            created=created,
            identity=identity,
            environment=environment,
            workload=workload,
        )
        run = cls(runs / name, record)
        run.save()
        return run

    @property
    def closed(self) -> bool:
        return self._journal.closed

    @property
    def log(self) -> Path:
        return self.folder / LOG

    def append(self, row: Row) -> None:
        self.rows.append(row)
        self._journal.write(msgspec.json.encode(row) + b"\n")
        self._journal.flush()

    def observe(self, adapter_files: dict[str, str], engine: dict[str, Any], image_digest: str | None) -> None:
        """What the started engine turned out to be: completes the identity."""
        identity = self.record.identity
        identity.adapter_files, identity.engine, identity.image_digest = adapter_files, engine, image_digest
        identity.digest = identity_digest(identity)
        self.save()

    def save(self) -> None:
        """record.json as it stands, replaced in one step."""
        self.record.seal = seal(self.record)
        text = msgspec.json.format(msgspec.json.encode(self.record), indent=1)
        write_atomically(self.folder / RECORD, text + b"\n")

    def finish(self, status: str, verdict: Verdict | None, error: str | None = None) -> None:
        """Rows into requests.parquet, log and record sealed, the journal gone: once, when the engine is down."""
        self._journal.close()
        path = self.folder / REQUESTS
        write_rows(path, self.rows)
        record = self.record
        record.status, record.verdict, record.error = status, verdict, error  # type: ignore[assignment]
        record.finished = now()
        record.rows, record.requests_sha256 = len(self.rows), sha256(path)
        record.engine_log_sha256 = sha256(self.log) if self.log.exists() else None
        self.save()
        (self.folder / JOURNAL).unlink()


def identity_digest(identity: Identity) -> str:
    return digest(msgspec.to_builtins(identity) | {"digest": None})


def plan_digest(identity: Identity) -> str:
    own = ("config", "code", "target", "draft", "data")
    return digest({name: getattr(identity, name) for name in own})


def write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    table = pa.Table.from_pylist([msgspec.to_builtins(row) for row in rows], schema=ROWS)
    temporary = path.with_name(f".{path.name}.part")
    pq.write_table(table, temporary, compression="zstd")
    os.replace(temporary, path)


def read_rows(path: Path) -> list[Row]:
    return msgspec.convert(pq.read_table(path, schema=ROWS).to_pylist(), list[Row])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
