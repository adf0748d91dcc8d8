"""task=rejudge: gates, summary and verdict of a sealed run again, by today's code, in a file beside its record.

For a verdict that a defect of this code decided. It computes and writes nothing else; tables tell it, with the first
verdict, and tables-check computes it again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config import Config
from harness.records.judgement import NotJudged, judge_again, path_of
from harness.records.provenance import code
from harness.records.read import read
from harness.records.run import now
from harness.records.schema import Record, Row, Verdict
from harness.tasks import STATUS
from harness.tasks.errors import TaskError
from harness.tasks.summary import judge, summarize
from harness.tasks.tables_check import MEASURING


def run(config: Config) -> int:
    folder = _folder(config)
    loaded = read(folder)
    if loaded.problems:
        raise TaskError(f"run: {loaded.problems[0]}")
    record = loaded.record
    if record is None or not loaded.complete or record.task not in MEASURING:
        found = "no record" if record is None else f"{record.task}, {record.status}"
        raise TaskError(f"run: {folder.name}: expected a complete {' or '.join(MEASURING)}, found {found}")
    try:
        made = judge_again(folder, record, loaded.rows, computed, code(), config.why or "", now())
    except NotJudged as error:
        raise TaskError(f"rejudge: {error}") from None
    except OSError as error:
        raise TaskError(f"rejudge: {folder.name}: {error.strerror}") from None
    first = record.verdict.outcome if record.verdict else "none"
    print(f"verdict: {first} -> {made.verdict.outcome}; changed: {', '.join(made.changed)}")
    print("".join(f"  {reason}\n" for reason in made.verdict.reasons), end="")
    print(f"written: {os.path.relpath(path_of(folder, made.number))}: make tables shows it")
    return STATUS[made.verdict.outcome]


def computed(record: Record, rows: Sequence[Row]) -> tuple[dict[str, Any], dict[str, Any], Verdict]:
    """gates, summary, verdict of a bench or gate."""
    gates, verdict = judge(record, rows)
    return gates, summarize(record, rows), verdict


def _folder(config: Config) -> Path:
    """A path, or the id of a run below results/runs."""
    named = Path(config.run or "").expanduser()
    below = config.results / "runs" / named
    return below if len(named.parts) == 1 and below.is_dir() else named.resolve()
