"""The terminal: progress bars with live throughput, and the table a run ends with."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from harness.publish.cells import bench_table, footnote
from harness.publish.labels import title
from harness.records import Record, Row

PART = 3  # arms that fit 80 columns
WIDE = 240  # where the output is no terminal, nothing is folded


class Bars:
    """A bar per arm on stderr: items done, tokens per second so far."""

    def __init__(self, arms: Sequence[str], total: int | Mapping[str, int]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tps]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        width = max(map(len, arms))
        self._tasks: dict[str, TaskID] = {
            arm: self._progress.add_task(
                arm.ljust(width), total=total if isinstance(total, int) else total[arm], tps=""
            )
            for arm in arms
        }
        self._totals = dict.fromkeys(arms, (0, 0.0))

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def add_kept(self, rows: Sequence[Row]) -> None:
        """Answers that a run which is continued had before."""
        for arm in self._tasks:
            self._progress.update(self._tasks[arm], advance=sum(row.arm == arm for row in rows))

    def add(self, row: Row) -> None:
        self._advance(row.arm, 1, len(row.output_ids), row.wall_s)

    def add_all(self, rows: Sequence[Row], wall_s: float | None = None) -> None:
        """Rows of one arm that share their wall time: of a list request, or of a block of `wall_s` seconds."""
        wall = rows[0].wall_s if wall_s is None else wall_s
        self._advance(rows[0].arm, len(rows), sum(len(row.output_ids) for row in rows), wall)

    def _advance(self, arm: str, count: int, tokens: int, wall_s: float) -> None:
        done, wall = self._totals[arm][0] + tokens, self._totals[arm][1] + wall_s
        self._totals[arm] = done, wall
        rate = f"{done / wall:7.1f} tokens/s" if wall else ""
        self._progress.update(self._tasks[arm], advance=count, tps=rate)


def table(columns: Iterable[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """One table on stdout."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDE, color_system=None)
    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")  # a cell that is too wide goes on below: nothing is cut
    for row in rows:
        made.add_row(*row)
    console.print(made)


def print_parts(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    """A table of metrics; on a terminal PART arms at a time, so that a line holds what belongs together."""
    part = PART if sys.stdout.isatty() and Console().width < WIDE / 2 else len(columns)
    for first in range(1, len(columns), part):
        chosen = [0, *range(first, min(first + part, len(columns)))]
        table([columns[i] for i in chosen], [[row[i] for i in chosen] for row in rows], title)


def report(record: Record, folder: Path) -> None:
    """The end of a run: table or gate, verdict with its reasons, where the record lies."""
    if record.task == "gate":
        _gate(record, title(record))
    else:
        columns, rows = bench_table(record)
        print_parts(columns, rows, title(record))
        print(fill(footnote(rows, list(record.arms), record), 80))
    assert record.verdict is not None
    print(f"verdict: {record.verdict.outcome}" + "".join(f"\n  {reason}" for reason in record.verdict.reasons))
    print(f"record:  {os.path.relpath(folder)}")


def _gate(record: Record, title: str) -> None:
    found, control = record.gates["identity"], record.gates["control"]
    print(title if "asd-b0" in record.arms else f"{title}, asd-m0")
    print(
        f"identity: {found['compared']} of {found['expected']} outputs compared ({found['tokens']:,} tokens), "
        f"{found['mismatches']} differ; mismatch rate at most {100 * found['bound']:.2g} % (95 %)"
    )
    print(
        f"control:  {control['policy']} relaxed {control['relaxed']} mismatches and changed "
        f"{control['outputs_changed']} of {control['items']} outputs"
    )
