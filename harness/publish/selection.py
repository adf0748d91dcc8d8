"""Which run stands for which question.

The newest sound pass of a key is shown; a run that did not pass is listed apart and replaces nothing. One that did not
pass and is newer than the run shown is told beside it: an old pass alone would say too much. Runs of a sweep stand
together under the sweep's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.publish.labels import asked, key
from harness.records import Record, Row
from harness.records.read import Loaded
from harness.stats import Estimate, pareto

FIXED = ("strict", "chain", "asd-b0", "unarmed", "control")  # what candidates are compared with
AGAIN = "-again"  # ends the name of the arm that repeats the baseline's policy


@dataclass(frozen=True)
class Shown:
    """The run shown for a key, how many sound others it has, and newer runs of it that did not pass."""

    record: Record
    others: int
    newer: tuple[Record, ...]
    rows: Sequence[Row] = field(default=(), repr=False)


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its candidate arm, what was varied, how it stands among the others (harness/stats/pareto.py).

    speed, accuracy: changes against the run's own baseline, so that a machine that drifts between runs moves no point.
    """

    record: Record
    arm: str
    varied: dict[str, Any]
    speed: Estimate
    accuracy: Estimate
    standing: str
    by: str | None


@dataclass(frozen=True)
class Sweep:
    """points: sound passes, in the order of what was varied. left_out: every other run. planned: None where unknown."""

    id: str
    points: tuple[Point, ...]
    left_out: tuple[Loaded, ...]
    planned: int | None


@dataclass(frozen=True)
class Selection:
    """What a page is made of."""

    benches: tuple[Shown, ...]
    gates: tuple[Shown, ...]
    calibrations: tuple[Shown, ...]
    sweeps: tuple[Sweep, ...]
    others: tuple[Loaded, ...]


def passed(record: Record) -> bool:
    return record.verdict is not None and record.verdict.outcome == "pass"


def is_candidate(arm: str) -> bool:
    return arm not in FIXED and not arm.endswith(AGAIN)


def candidate(record: Record) -> str | None:
    """The arm a run is about: the policy of its recipe, else the last arm that no other is compared with."""
    named = record.identity.config["policy"]["name"]
    arms = [arm for arm in record.arms if is_candidate(arm)]
    return named if named in arms else arms[-1] if arms else None


def sweep_of(run: Loaded) -> dict[str, Any] | None:
    """id, point and points of the sweep that a run belongs to."""
    return run.record.workload.get("sweep") if run.record is not None else None


def choose(runs: Sequence[Loaded]) -> dict[tuple[str, ...], Shown]:
    """The newest complete pass of each key, else its newest complete run; most items first."""
    groups: dict[tuple[str, ...], list[Loaded]] = {}
    for run in runs:
        if run.record is not None and run.complete:
            groups.setdefault(key(run.record), []).append(run)
    failed = [run.record for run in runs if run.record and run.record.status == "failed" and not run.problems]
    shown = {name: _shown(name, group, failed) for name, group in groups.items()}
    order = sorted(shown, key=lambda name: (name[:4], -len(shown[name].record.workload["items"]), name))
    return {name: shown[name] for name in order}


def _shown(name: tuple[str, ...], group: Sequence[Loaded], failed: Sequence[Record]) -> Shown:
    """group: complete runs of the key. failed: of any key; one without an engine has none, but was asked the same."""
    best = ([run for run in group if run.record and passed(run.record)] or group)[-1]
    assert best.record is not None
    records = [run.record for run in group if run.record is not None]
    died = [record for record in failed if asked(record) == name[: len(asked(record))]]
    newer = [record for record in (*records, *died) if record.id > best.record.id and not passed(record)]
    return Shown(best.record, len(group) - 1, tuple(sorted(newer, key=lambda record: record.id)), best.rows)


def select(runs: Sequence[Loaded]) -> Selection:
    swept = [run for run in runs if sweep_of(run)]
    plain = [run for run in runs if not sweep_of(run)]
    shown = choose(plain).values()
    tasks = {task: tuple(each for each in shown if each.record.task == task) for task in ("bench", "gate", "calibrate")}
    kept = [each.record for each in shown]
    return Selection(
        benches=tasks["bench"],
        gates=tasks["gate"],
        calibrations=tasks["calibrate"],
        sweeps=_sweeps(swept),
        others=tuple(run for run in plain if run.record not in kept),
    )


def _sweeps(runs: Sequence[Loaded]) -> tuple[Sweep, ...]:
    groups: dict[str, list[Loaded]] = {}
    for run in runs:
        groups.setdefault((sweep_of(run) or {})["id"], []).append(run)
    return tuple(_sweep(name, groups[name]) for name in sorted(groups))


def _sweep(name: str, runs: Sequence[Loaded]) -> Sweep:
    newest: dict[tuple[str, ...], Loaded] = {}  # a point that was measured twice counts once
    for run in runs:
        if run.complete and run.record and passed(run.record) and changes_of(run.record):
            newest[key(run.record)] = run
    good = [run.record for run in newest.values() if run.record is not None]
    good.sort(key=lambda record: [_sortable(value) for value in record.workload["sweep"]["point"].values()])
    pairs = [pair for record in good if (pair := changes_of(record))]
    itself = Estimate(0.0, 0.0, 0.0, 0, "the baseline itself")
    places = pareto.front(
        [
            *(pareto.Point(record.id, *pair) for record, pair in zip(good, pairs, strict=True)),
            pareto.Point("baseline", itself, itself),
        ]
    )[:-1]
    points = [
        Point(record, candidate(record) or "", record.workload["sweep"]["point"], *pair, place.standing, place.by)
        for record, pair, place in zip(good, pairs, places, strict=True)
    ]
    kept = [run.folder for run in newest.values()]
    planned = max(((sweep_of(run) or {}).get("points") or 0 for run in runs), default=0)
    return Sweep(name, tuple(points), tuple(run for run in runs if run.folder not in kept), planned or None)


def changes_of(record: Record) -> tuple[Estimate, Estimate] | None:
    """Throughput and accuracy of a run's candidate against its baseline; None where one was not measured."""
    found = (record.summary.get("arms", {}).get(candidate(record)) or {}).get("change") or {}
    pair = [found.get("tps"), (found.get("accuracy") or {}).get("change")]
    estimates = [Estimate(**each) for each in pair if each and None not in each.values()]
    return (estimates[0], estimates[1]) if len(estimates) == 2 else None


def _sortable(value: Any) -> tuple[int, float, str]:
    """Numbers by size, null (no limit) after them, words last."""
    if isinstance(value, bool) or not isinstance(value, int | float | type(None)):
        return (2, 0.0, str(value))
    return (1, 0.0, "") if value is None else (0, float(value), "")
