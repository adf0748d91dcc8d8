"""Writing one run: rows go to a journal as they come, and become requests.parquet when the run ends.

A run that is killed at any instruction leaves a record that says `incomplete`, a journal with every finished row and
the counters that prove them, and is continued from there by `Run.open`:

- requests.jsonl: rows. The process that makes the run holds a lock on it; the kernel lets go when the process is gone.
- checkpoints.jsonl: after each unit of work (an item in all its arms) the number of rows so far and the counters that
  belong to them. Rows after the last one have no counters: their engine is gone. They are set aside in unproven.jsonl,
  and their unit is asked again as a whole, so that arms which are compared never lie in different segments.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from harness.launch.shards import merge
from harness.records.schema import (
    ROWS,
    ROWS_SINCE,
    SCHEMA_VERSION,
    Identity,
    Record,
    Row,
    Segment,
    Verdict,
    digest,
    seal,
)

RECORD = "record.json"
REQUESTS = "requests.parquet"
JOURNAL = "requests.jsonl"
CHECKPOINTS = "checkpoints.jsonl"
UNPROVEN = "unproven.jsonl"
LOG = "engine.log"
MACHINE = ("cpu", "cores", "memory_gib", "gpus", "driver", "system", "python", "packages")  # what a run stays on

Counters = dict[str, Any] | None


class CannotContinue(RuntimeError):
    """An incomplete run that another start cannot go on with, in one line."""


class Busy(CannotContinue):
    """A run that another process is making."""


class Checkpoint(msgspec.Struct, forbid_unknown_fields=True):
    """rows: of the run so far, all segments. counters, shards, blocks: of this segment, as in Segment."""

    segment: int
    rows: int
    counters: dict[str, tuple[Counters, Counters]]
    shards: dict[str, list[dict[str, float]]] = {}
    blocks: list[dict[str, Any]] = []


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Run:
    """An open run. `record` is changed in place and written by `save` and `finish`.

    continued: in words, why this is not the first segment; None where it is.
    """

    def __init__(self, folder: Path, record: Record, journal: BinaryIO, checkpoints: BinaryIO) -> None:
        self.folder = folder
        self.record = record
        self.rows: list[Row] = []
        self.continued: str | None = None
        self._kept = 0  # rows of earlier segments
        self._journal, self._checkpoints = journal, checkpoints

    @classmethod
    def create(
        cls, results: Path, task: str, identity: Identity, environment: dict[str, Any], workload: dict[str, Any]
    ) -> Run:
        """A directory results/runs/<UTC time>-<plan> that did not exist before, there at once with its record."""
        runs = results / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        with _alone(runs):
            return cls._create(runs, task, identity, environment, workload)

    @classmethod
    def _create(
        cls, runs: Path, task: str, identity: Identity, environment: dict[str, Any], workload: dict[str, Any]
    ) -> Run:
        _sweep_parts(runs)
        created = now()
        stem = f"{created.replace('-', '').replace(':', '')}-{identity.plan[:8]}"
        record = Record(
            id=stem,
            task=task,
            status="incomplete",
            created=created,
            asked=identity.plan,
            segments=[_segment(environment)],
            identity=identity,
            environment=environment,
            workload=workload,
        )
        part = runs / f".{stem}.{os.getpid()}.part"
        part.mkdir()
        run = cls(part, record, _locked(part / JOURNAL, "xb"), (part / CHECKPOINTS).open("xb"))
        for turn in range(1000):
            record.id = stem if turn == 0 else f"{stem}-{turn + 1}"
            run.save()
            try:
                os.rename(part, runs / record.id)
            except OSError as error:
                if not (runs / record.id).exists():
                    raise error
                continue
            run.folder = runs / record.id
            return run
        raise FileExistsError(f"runs: no free directory name for {stem} in {runs}")

    @classmethod
    def open(
        cls,
        results: Path,
        task: str,
        identity: Identity,
        environment: dict[str, Any],
        workload: dict[str, Any],
        failed: bool = False,
    ) -> tuple[Run, list[str]]:
        """The incomplete run of this plan, continued, or a new one; and why others were left alone, a line each.

        failed: go on with one that failed, too. Raises Busy where another process is making it.
        """
        runs = results / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        left: list[str] = []
        with _alone(runs):
            for folder in reversed(unfinished(runs, identity.plan, failed)):
                try:
                    return cls._continue(folder, task, identity, environment, workload), left
                except Busy:
                    raise
                except CannotContinue as error:
                    left.append(f"{folder.name} is not continued: {error}")
            return cls._create(runs, task, identity, environment, workload), left

    @classmethod
    def _continue(
        cls, folder: Path, task: str, identity: Identity, environment: dict[str, Any], workload: dict[str, Any]
    ) -> Run:
        journal = _locked(folder / JOURNAL, "r+b")
        try:
            record = _decode(folder)
            checkpoints = (folder / CHECKPOINTS).open("r+b")
            for name, expected, found in (
                ("task", record.task, task),
                ("items", record.workload.get("items"), workload.get("items")),
                *((name, record.environment.get(name), environment.get(name)) for name in MACHINE),
            ):
                if expected != found:
                    raise CannotContinue(f"{name}: it has {_short(expected)}, found {_short(found)}")
        except OSError as error:
            journal.close()
            raise CannotContinue(f"{CHECKPOINTS}: {error.strerror}") from None
        except CannotContinue:
            journal.close()
            raise
        run = cls(folder, record, journal, checkpoints)
        run._restore(environment)
        return run

    def _restore(self, environment: dict[str, Any]) -> None:
        """The state of the last checkpoint, on disk and here, and a new segment. Killed in here, it starts again."""
        record, last = self.record, self.record.segments[-1]
        checkpoints, whole = _lines(self._checkpoints, Checkpoint)
        covered = checkpoints[-1].rows if checkpoints else 0
        self.rows, kept = _lines(self._journal, Row, covered)
        if len(self.rows) < covered:
            self.close()
            raise CannotContinue(f"{JOURNAL}: expected {covered} rows, found {len(self.rows)}")
        self._journal.seek(kept)
        rest = self._journal.read()
        aside = self._set_aside(rest)
        _cut(self._journal, kept)
        _cut(self._checkpoints, whole)
        for point in checkpoints:
            segment = record.segments[point.segment]
            segment.counters, segment.shards, segment.blocks = point.counters, point.shards, point.blocks
        for number, segment in enumerate(record.segments):
            segment.rows = sum(row.segment == number for row in self.rows)
            segment.unproven = sum(row.segment == number for row in aside)
        last.end = "killed" if last.end == "open" else last.end
        record.segments.append(_segment(environment))
        record.status, record.finished, record.error, record.verdict = "incomplete", None, None, None
        record.rows, record.requests_sha256, record.engine_log_sha256 = 0, None, None
        summed(self.record)
        self.continued = f"{last.end} after {covered} answers"
        self._kept = covered
        self.save()
        with contextlib.suppress(FileNotFoundError):
            (self.folder / REQUESTS).unlink()

    def _set_aside(self, rest: bytes) -> list[Row]:
        """Into unproven.jsonl, once; every row that is in it. The half of a row that a kill cut off was no answer."""
        path = self.folder / UNPROVEN
        rest = rest[: rest.rfind(b"\n") + 1]
        if not rest and not path.exists():
            return []
        with path.open("a+b") as stream:
            kept, whole = _lines(stream, Row)
            stream.seek(0)
            if not stream.read(whole).endswith(rest):
                _cut(stream, whole)
                stream.write(rest)
                stream.flush()
                os.fsync(stream.fileno())
                kept, _ = _lines(stream, Row)
        return kept

    @property
    def closed(self) -> bool:
        return self._journal.closed

    @property
    def log(self) -> Path:
        return self.folder / LOG

    @property
    def segment(self) -> int:
        return len(self.record.segments) - 1

    @property
    def done(self) -> set[tuple[str, str, int | None]]:
        """(arm, item, block) of every row: after `open`, those that need not be asked again."""
        return {(row.arm, row.item, row.block) for row in self.rows}

    def append(self, row: Row) -> None:
        row.segment = self.segment
        self.rows.append(row)
        self._journal.write(msgspec.json.encode(row) + b"\n")
        self._journal.flush()

    def checkpoint(
        self,
        counters: Mapping[str, tuple[Counters, Counters]],
        shards: Mapping[str, list[dict[str, float]]] | None = None,
        blocks: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Every row so far is proven by these counters, by arm, before and after this segment; others stay.

        blocks: all of this segment. Sums of all segments go into the record's arms and launch. Returns when on disk.
        """
        segment = self.record.segments[-1]
        segment.counters = segment.counters | dict(counters)
        segment.shards = segment.shards | dict(shards or {})
        segment.blocks = list(blocks) or segment.blocks
        segment.rows = len(self.rows) - self._kept
        summed(self.record)
        point = Checkpoint(self.segment, len(self.rows), segment.counters, segment.shards, segment.blocks)
        os.fdatasync(self._journal.fileno())
        self._checkpoints.write(msgspec.json.encode(point) + b"\n")
        self._checkpoints.flush()
        os.fdatasync(self._checkpoints.fileno())

    def observe(self, adapter_files: dict[str, str], engine: dict[str, Any], image_digest: str | None) -> None:
        """What the started engine turned out to be: completes the identity. A continued run must find it again."""
        identity = self.record.identity
        found = msgspec.structs.replace(
            identity, adapter_files=adapter_files, engine=engine, image_digest=image_digest, digest=None
        )
        found.digest = identity_digest(found)
        if identity.digest is not None and found.digest != identity.digest:
            changed = next(
                (name for name in ("adapter_files", "engine", "image_digest", "target", "draft")
                 if getattr(found, name) != getattr(identity, name)), "digest")  # fmt: skip
            expected, other = _short(getattr(identity, changed)), _short(getattr(found, changed))
            raise CannotContinue(
                f"{self.record.id}: {changed}: it was begun with {expected}, found {other}: resume=never starts another"
            )
        self.record.identity = found
        self.save()

    def serve(self, nonce: str | None, launch: dict[str, Any] | None = None) -> None:
        """An engine of this segment is up. launch: for the record, of a further segment."""
        segment = self.record.segments[-1]
        segment.nonces = [*segment.nonces, nonce]
        if self.segment and segment.launch is None:
            segment.launch = launch
        self.save()

    def save(self) -> None:
        """record.json as it stands, replaced in one step."""
        self.record.seal = seal(self.record)
        text = msgspec.json.format(msgspec.json.encode(self.record), indent=1)
        write_atomically(self.folder / RECORD, text + b"\n")

    def finish(self, status: str, verdict: Verdict | None, error: str | None = None) -> None:
        """Rows into requests.parquet, log and record sealed: once, when the engine is down.

        The journal goes when there is nothing to continue; the lock on it stays until the record says how it ended.
        """
        path = self.folder / REQUESTS
        write_rows(path, self.rows)
        record = self.record
        record.status, record.verdict, record.error = status, verdict, error  # type: ignore[assignment]
        record.finished = now()
        record.segments[-1].end = "finished" if status == "complete" else error or status
        record.segments[-1].rows = len(self.rows) - self._kept
        record.rows, record.requests_sha256 = len(self.rows), sha256(path)
        record.engine_log_sha256 = sha256(self.log) if self.log.exists() else None
        self.save()
        if status == "complete" or (status == "failed" and not self._checkpoints.tell()):
            for name in (CHECKPOINTS, JOURNAL):
                (self.folder / name).unlink()
        self.close()

    def close(self) -> None:
        self._checkpoints.close()
        self._journal.close()


def unfinished(runs: Path, plan: str, failed: bool = False) -> list[Path]:
    """Folders of the incomplete runs of a plan, oldest first; of the failed ones too, where these are meant."""
    wanted = ("incomplete", "failed") if failed else ("incomplete",)
    return [folder for folder, record in _of(runs, plan) if record.status in wanted]


def complete(runs: Path, plan: str) -> Path | None:
    """The folder of the latest complete run of a plan."""
    found = [folder for folder, record in _of(runs, plan) if record.status == "complete"]
    return found[-1] if found else None


def _of(runs: Path, plan: str) -> list[tuple[Path, Record]]:
    """Runs of a plan whose record is whole. Folders carry the first digits of what was asked."""
    found = []
    for folder in sorted(runs.glob(f"[!.]*-{plan[:8]}*")):
        with contextlib.suppress(CannotContinue):
            record = _decode(folder)
            if plan == (record.asked or record.identity.plan):
                found.append((folder, record))
    return found


def wait(runs: Path, plan: str) -> None:
    """Until no other process is making a run of this plan."""
    for folder in unfinished(runs, plan):
        with contextlib.suppress(CannotContinue):
            _locked(folder / JOURNAL, "r+b", wait=True).close()


def summed(record: Record) -> None:
    """Counters of arms, shards and blocks of the launch as the sums over the segments, where those have any."""
    for name, arm in record.arms.items():
        sides = [segment.counters[name] for segment in record.segments if name in segment.counters]
        if sides:
            arm.counters_before, arm.counters_after = (_total([side[which] for side in sides]) for which in (0, 1))
    shares = [segment.shards for segment in record.segments if segment.shards]
    if shares and record.launch is not None:
        names = dict.fromkeys(name for share in shares for name in share)
        record.launch["shards"] = {
            name: _replicas([share[name] for share in shares if name in share]) for name in names
        }
    blocks = [block for segment in record.segments for block in segment.blocks]
    if blocks and record.launch is not None:
        record.launch["blocks"] = blocks


def _total(sides: Sequence[Counters]) -> Counters:
    present = [side for side in sides if side is not None]
    return merge(present) if present else None


def _replicas(parts: Sequence[list[dict[str, float]]]) -> list[dict[str, float]]:
    return [merge(list(each)) for each in zip(*parts, strict=True)]


def _segment(environment: Mapping[str, Any]) -> Segment:
    return Segment(
        started=now(), boot=environment.get("boot"), load_average=list(environment.get("load_average") or [])
    )


def _decode(folder: Path) -> Record:
    """The record of a run of this schema, sealed."""
    try:
        record = msgspec.json.decode((folder / RECORD).read_bytes(), type=Record)
    except (OSError, ValueError) as error:
        raise CannotContinue(f"{RECORD}: {str(error).splitlines()[0]}") from None
    if record.seal != seal(record):
        raise CannotContinue("seal (record.json was edited)")
    if record.status != "complete" and (record.schema_version != SCHEMA_VERSION or not record.segments):
        raise CannotContinue(f"schema_version: expected {SCHEMA_VERSION}, found {record.schema_version}")
    return record


@contextmanager
def _alone(runs: Path) -> Iterator[None]:
    """One process at a time looks for a run or makes one. A file system without locks on folders is left without."""
    handle = os.open(runs, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _sweep_parts(runs: Path) -> None:
    """Folders of runs that were killed before their first record was written: nothing had been asked."""
    for part in runs.glob(".*.part"):
        try:
            _locked(part / JOURNAL, "r+b").close()
        except Busy:
            continue
        except CannotContinue:
            pass
        shutil.rmtree(part, ignore_errors=True)


def _locked(path: Path, mode: str, wait: bool = False) -> BinaryIO:
    """The journal, locked. Raises Busy, or CannotContinue where its run has ended meanwhile or never had one."""
    try:
        stream = path.open(mode)
    except FileNotFoundError as error:
        raise CannotContinue(f"{path.name}: {error.strerror}") from None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        stream.close()
        raise Busy(f"{path.parent.name} is being made by another process: resume=never starts another run") from None
    except OSError:
        pass  # a file system without locks
    if os.fstat(stream.fileno()).st_nlink == 0:
        stream.close()
        raise CannotContinue("it has ended")
    return stream  # type: ignore[return-value]


def _lines(stream: BinaryIO, kind: type, most: int | None = None) -> tuple[list[Any], int]:
    """The whole lines of a journal, at most some, and where they end: from a line that is none on, it is no journal."""
    stream.seek(0)
    found: list[Any] = []
    end = 0
    for line in stream:
        if len(found) == most or not line.endswith(b"\n"):
            break
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except ValueError:
            break
        end += len(line)
    return found, end


def _cut(stream: BinaryIO, length: int) -> None:
    stream.truncate(length)
    stream.seek(length)
    os.fsync(stream.fileno())


def _short(value: Any) -> str:
    found = repr(value)
    return found if len(found) <= 60 else f"{found[:57]}..."


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
    """Rows of any schema version: columns that an older one lacks have their defaults."""
    added = {name for names in ROWS_SINCE.values() for name in names} - set(pq.read_schema(path).names)
    schema = pa.schema([column for column in ROWS if column.name not in added])
    return msgspec.convert(pq.read_table(path, schema=schema).to_pylist(), list[Row])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
