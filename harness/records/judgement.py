"""Judging a sealed run again: by today's code, from the same rows, in a file of its own beside the record.

A record's verdict is what the code of its day found. Where that code was wrong, `judgement-N.json` holds gates, summary
and verdict as later code computes them, who computed them and why. The record is never touched, judgements are added
and never replaced, each names what it follows by its seal, and nothing in one is anybody's opinion: `make tables-check`
computes the newest again, as it does with a record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.records.schema import Record, Row, Verdict, canonical, digest

VERSION = 1
MARKUP = "|<>`[]*\\"  # of the tables that a reason stands in
LONGEST = 300
FIELDS = ("gates", "summary", "verdict")

Judge = Callable[[Record, Sequence[Row]], tuple[dict[str, Any], dict[str, Any], Verdict]]  # gates, summary, verdict


class NotJudged(ValueError):
    """Why a run is not judged again, in one line."""


class Judgement(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """run: id. record, requests: seal of record.json, SHA-256 of the rows. follows: seal of the judgement before this
    one, of the record where there is none. code: commit, dirty, sha256 of what judged. changed: of FIELDS, against what
    it follows."""

    version: int = VERSION
    number: int
    run: str
    record: str
    requests: str
    follows: str
    created: str
    why: str
    code: dict[str, Any]
    changed: list[str]
    gates: dict[str, Any]
    summary: dict[str, Any]
    verdict: Verdict
    seal: str | None = None

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version: expected {VERSION}, found {self.version}")
        if not self.why.strip() or not self.why.isprintable() or len(self.why) > LONGEST:
            raise ValueError(f"why: expected the reason, a line of at most {LONGEST} characters, found {self.why!r}")
        if found := sorted(set(self.why) & set(MARKUP)):
            raise ValueError(f"why: expected plain words, found {''.join(found)!r}")


class Judged(Record, kw_only=True):
    """A record with gates, summary and verdict of its newest judgement. first: the verdict in record.json. Not written
    anywhere: the seal is the record's."""

    judgement: Judgement
    first: Verdict | None


def path_of(folder: Path, number: int) -> Path:
    return folder / f"judgement-{number}.json"


def seal(judgement: Judgement) -> str:
    """Of the judgement as it is read back: 0 written for a float comes back as 0.0."""
    again = msgspec.json.decode(msgspec.json.encode(judgement), type=Judgement)
    return digest(msgspec.to_builtins(again) | {"seal": None})


def read_judgements(folder: Path, record: Record) -> tuple[list[Judgement], list[str]]:
    """Every judgement of a run, oldest first, and what does not hold together."""
    found: list[Judgement] = []
    names = {path.name for path in folder.glob("judgement-*")}
    for number in range(1, len(names) + 1):
        path = path_of(folder, number)
        if path.name not in names:
            return found, [f"{sorted(names)[-1]}: expected {path.name}, found none"]
        try:
            judgement = msgspec.json.decode(path.read_bytes(), type=Judgement)
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors, and so is text that is not UTF-8
            return found, [f"{path.name}: {str(error).splitlines()[0]}"]
        expected = {
            "seal (it was edited)": (seal(judgement), judgement.seal),
            "number": (number, judgement.number),
            "run": (record.id, judgement.run),
            "record": (record.seal, judgement.record),
            "requests": (record.requests_sha256, judgement.requests),
            "follows": (found[-1].seal if found else record.seal, judgement.follows),
        }
        if wrong := [name for name, (wanted, told) in expected.items() if wanted != told]:
            wanted, told = expected[wrong[0]]
            return found, [f"{path.name}: {wrong[0]}: expected {wanted!r}, found {told!r}"]
        found.append(judgement)
    return found, []


def judged(record: Record, judgements: Sequence[Judgement]) -> Record:
    """The record as its newest judgement has it; itself where there is none."""
    if not judgements:
        return record
    newest = judgements[-1]
    own = {name: getattr(newest, name) for name in FIELDS}
    return Judged(**(msgspec.structs.asdict(record) | own), judgement=newest, first=record.verdict)


def judge_again(
    folder: Path, record: Record, rows: Sequence[Row], judge: Judge, code: dict[str, Any], why: str, created: str
) -> Judgement:
    """Write the next judgement of a complete, sound run. record: as read back, with its newest judgement.

    Raises NotJudged: where judge gives what the run has already, or another process was faster.
    """
    last = record.judgement if isinstance(record, Judged) else None
    gates, summary, verdict = judge(record, rows)
    found = {"gates": gates, "summary": summary, "verdict": verdict}
    changed = [name for name in FIELDS if canonical(found[name]) != canonical(getattr(record, name))]
    if not changed:
        raise NotJudged(f"{record.id}: expected another {', '.join(FIELDS[:-1])} or verdict, found the same")
    try:
        made = Judgement(
            number=last.number + 1 if last else 1,
            run=record.id,
            record=str(record.seal),
            requests=str(record.requests_sha256),
            follows=str(last.seal if last else record.seal),
            created=created,
            why=why,
            code=code,
            changed=changed,
            gates=gates,
            summary=summary,
            verdict=verdict,
        )
    except ValueError as error:
        raise NotJudged(str(error)) from None
    made.seal = seal(made)
    _create(path_of(folder, made.number), msgspec.json.format(msgspec.json.encode(made), indent=1))
    return made


def _create(path: Path, content: bytes) -> None:
    """Whole or not at all, and never over another."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(temporary, path)
    except FileExistsError:
        raise NotJudged(f"{path.name}: is there already") from None
    finally:
        temporary.unlink(missing_ok=True)
