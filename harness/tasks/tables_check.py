"""task=tables-check: 0 when records are sound and give the tables, 1 when not, 2 with nothing to check.

Tables without a record are not nothing: every number in them is unfounded.

Sound: seals and digests hold, provenance is there, and summary and verdict, computed again from the rows, are those
of the record.
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness.config import Config, ConfigError
from harness.publish.sections import replays_of, sweeps_of
from harness.publish.tables import PLOTS, README, render
from harness.records.read import Loaded, read_all
from harness.records.schema import canonical
from harness.tasks import FAIL, INCONCLUSIVE, PASS
from harness.tasks.summary import judge, summarize

MEASURING = ("bench", "gate")


def run(config: Config) -> int:
    runs = read_all(config.results)
    if not runs and not (config.results / README).exists():
        print(f"specaccept: tables-check: no run below {config.results.name}/runs: nothing to check", file=sys.stderr)
        return INCONCLUSIVE
    problems = [problem for each in runs for problem in (*each.problems, *recomputed(each))]
    unsound = broken(config.results)
    problems += unsound or stale(config.results, runs)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"tables-check: {len(runs)} runs, {len(problems)} problems")
    return FAIL if problems else PASS


def recomputed(run: Loaded) -> list[str]:
    """Where a record's numbers are not those of its rows."""
    record = run.record
    if record is None or not run.complete or record.task not in MEASURING:
        return []
    gates, verdict = judge(record, run.rows)
    pairs = {
        "summary": (summarize(record, run.rows), record.summary),
        "gates": (gates, record.gates),
        "verdict": (verdict, record.verdict),
    }
    return [
        f"{run.folder.name}: {name}: differs from what its rows give"
        for name, (computed, recorded) in pairs.items()
        if canonical(computed) != canonical(recorded)
    ]


def broken(results: Path) -> list[str]:
    """Manifests of sweeps and replays that were edited or do not hold together: nothing can be made of them."""
    problems = []
    for read in (sweeps_of, replays_of):
        try:
            read(results)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def stale(results: Path, runs: list[Loaded]) -> list[str]:
    """Derived files that are missing, edited, older than their records, or left over."""
    files = render(results, runs)
    problems = []
    for name, content in files.items():
        path = results / name
        if not path.exists():
            problems.append(f"{name}: expected a table, found none: run make tables")
        elif path.read_bytes() != content:
            problems.append(f"{name}: {_difference(path.read_bytes(), content)}")
    for path in sorted((results / PLOTS).glob("*")):
        if f"{PLOTS}/{path.name}" not in files:
            problems.append(f"{PLOTS}/{path.name}: no record gives it: run make tables")
    return problems


def _difference(found: bytes, expected: bytes) -> str:
    """The first line that differs."""
    ours, theirs = expected.decode(errors="replace").splitlines(), found.decode(errors="replace").splitlines()
    for number, (left, right) in enumerate(zip(ours, theirs, strict=False), 1):
        if left != right:
            return f"line {number}: the records give {left[:100]!r}, found {right[:100]!r}"
    return f"the records give {len(ours)} lines, found {len(theirs)}"
