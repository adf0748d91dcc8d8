"""Which run stands for which question.

The newest sound pass of a key is shown; a run that did not pass is listed apart and replaces nothing. One that did not
pass and is newer than the run shown is told beside it: an old pass alone would say too much. Runs of a sweep stand
together under the sweep's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.config import AGAIN
from harness.publish.labels import asked, key
from harness.records import Record, Row
from harness.records.read import Loaded
from harness.records.schema import canonical
from harness.records.sweeps import Manifest
from harness.stats import Estimate, pareto

FIXED = ("strict", "chain", "asd-b0", "unarmed", "control")  # what candidates are compared with
SMALL = 100  # items: with fewer a single flip moves accuracy by more than a per cent


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
    """points: the newest sound pass of each. left_out: points without one, by their newest run; None: never ran.

    planned: how many there are; without the sweep's manifest those that runs tell of.
    """

    id: str
    points: tuple[Point, ...]
    left_out: tuple[tuple[dict[str, Any], Loaded | None], ...]
    planned: int


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
    """The newest complete pass of each key, else its newest complete run; in the order of `weight`."""
    groups: dict[tuple[str, ...], list[Loaded]] = {}
    for run in runs:
        if run.record is not None and run.complete:
            groups.setdefault(key(run.record), []).append(run)
    failed = [run.record for run in runs if run.record and run.record.status == "failed" and not run.problems]
    shown = {name: _shown(name, group, failed) for name, group in groups.items()}
    order = sorted(shown, key=lambda name: (weight(shown[name].record), name))
    return {name: shown[name] for name in order}


def weight(record: Record) -> tuple[bool, bool, int]:
    """Of the evidence, heaviest first: an engine that people serve with before the embedded one, a GPU before a CPU,
    then by items."""
    config = record.identity.config
    embedded = (config["engine"].get("base") or config["engine"]["name"]) == "reference"
    cpu = embedded and not config["model"]["gpus"] and config["engine"].get("device") != "cuda"
    return embedded, cpu, -len(record.workload["items"])


def is_small(record: Record) -> bool:
    """A bench that shows that something runs, and not much more."""
    return record.task == "bench" and len(record.workload["items"]) < SMALL


def _shown(name: tuple[str, ...], group: Sequence[Loaded], failed: Sequence[Record]) -> Shown:
    """group: complete runs of the key. failed: of any key; one without an engine has none, but was asked the same."""
    best = ([run for run in group if run.record and passed(run.record)] or group)[-1]
    assert best.record is not None
    records = [run.record for run in group if run.record is not None]
    died = [record for record in failed if asked(record) == name[: len(asked(record))]]
    newer = [record for record in (*records, *died) if record.id > best.record.id and not passed(record)]
    return Shown(best.record, len(group) - 1, tuple(sorted(newer, key=lambda record: record.id)), best.rows)


def select(runs: Sequence[Loaded], manifests: Sequence[Manifest] = ()) -> Selection:
    plain = [run for run in runs if not sweep_of(run)]
    shown = choose(plain).values()
    tasks = {task: tuple(each for each in shown if each.record.task == task) for task in ("bench", "gate", "calibrate")}
    kept = [each.record for each in shown]
    return Selection(
        benches=tasks["bench"],
        gates=tasks["gate"],
        calibrations=tasks["calibrate"],
        sweeps=tuple(_sweep(name, *each) for name, each in sorted(_asked(runs, manifests).items())),
        others=tuple(run for run in plain if run.record not in kept),
    )


Runs = list[tuple[dict[str, Any], list[Loaded]]]  # by point


def _asked(runs: Sequence[Loaded], manifests: Sequence[Manifest]) -> dict[str, tuple[Runs, int]]:
    """Every sweep's points with all their runs. A manifest finds them by plan, so also those from before the sweep."""
    found: dict[str, tuple[Runs, int]] = {}
    for manifest in manifests:
        own = [(each.point, [run for run in runs if _plan(run) == each.plan]) for each in manifest.points]
        found[manifest.id] = own, len(own)
    for run in runs:
        told = sweep_of(run)
        if told and told["id"] not in {manifest.id for manifest in manifests}:
            points, planned = found.setdefault(told["id"], ([], 0))
            same = [group for point, group in points if canonical(point) == canonical(told["point"])]
            if same:
                same[0].append(run)
            else:
                points.append((told["point"], [run]))
            found[told["id"]] = points, max(planned, told.get("points") or 0, len(points))
    return found


def _plan(run: Loaded) -> str | None:
    return None if run.record is None else run.record.asked or run.record.identity.plan


def _sweep(name: str, asked_for: Runs, planned: int) -> Sweep:
    good: list[tuple[Record, dict[str, Any], tuple[Estimate, Estimate]]] = []
    rest: list[tuple[dict[str, Any], Loaded | None]] = []
    for point, runs in sorted(asked_for, key=lambda pair: [_sortable(value) for value in pair[0].values()]):
        records = [run.record for run in runs if run.complete and run.record and passed(run.record)]
        changes = changes_of(records[-1]) if records else None
        if changes:
            good.append((records[-1], point, changes))
        else:
            rest.append((point, runs[-1] if runs else None))
    itself = Estimate(0.0, 0.0, 0.0, 0, "the baseline itself")
    spots = [pareto.Point(record.id, *changes) for record, _, changes in good]
    places = pareto.front([*spots, pareto.Point("baseline", itself, itself)])[:-1]
    points = [
        Point(record, candidate(record) or "", point, *changes, place.standing, place.by)
        for (record, point, changes), place in zip(good, places, strict=True)
    ]
    return Sweep(name, tuple(points), tuple(rest), planned)


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
