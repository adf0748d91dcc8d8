"""What a sweep was asked to measure: results/sweeps/<id>.json, one per sweep, never changed.

Points and records meet by plan (Identity.plan as it was asked for), so a record that was there before the sweep counts
for its point, and a point without one is seen to be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.records.read import Loaded
from harness.records.run import write_atomically
from harness.records.schema import digest

SWEEPS = "sweeps"


class Point(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """point: the swept names and this job's values. plan: digest of all that was asked."""

    point: dict[str, Any]
    plan: str


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """base: overrides that all points share, without places on a disk. axes: the swept names, with their values.

    id: digest of the rest, so other code, data or points make another sweep.
    """

    id: str
    task: str
    base: list[str]
    axes: dict[str, list[Any]]
    points: list[Point]

    def digest(self) -> str:
        return digest(msgspec.to_builtins(self) | {"id": ""})[:12]

    def of(self, plan: str, point: dict[str, Any]) -> dict[str, Any]:
        """What a record of one point says of its sweep (Record.workload)."""
        return {"id": self.id, "plan": plan, "point": point, "points": len(self.points)}


def manifest(task: str, base: Sequence[str], axes: dict[str, list[Any]], points: Sequence[Point]) -> Manifest:
    made = Manifest("", task, list(base), axes, list(points))
    made.id = made.digest()
    return made


def write(results: Path, wanted: Manifest) -> Path:
    path = results / SWEEPS / f"{wanted.id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_atomically(path, msgspec.json.format(msgspec.json.encode(wanted), indent=1) + b"\n")
    return path


def read_sweeps(results: Path) -> list[Manifest]:
    """Every sweep below results. Raises ValueError, in one line, for one that was edited."""
    found = []
    for path in sorted((results / SWEEPS).glob("[!.]*.json")):
        try:
            wanted = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise ValueError(f"{SWEEPS}/{path.name}: {str(error).splitlines()[0]}") from None
        if wanted.id != wanted.digest() or path.stem != wanted.id:
            raise ValueError(f"{SWEEPS}/{path.name}: id: expected {wanted.digest()}, found {wanted.id}")
        found.append(wanted)
    return found


def joined(wanted: Manifest, runs: Sequence[Loaded]) -> list[tuple[Point, Loaded | None]]:
    """Each point with its latest complete run, else its latest run of any end, else None."""
    by_plan: dict[str, Loaded] = {}
    for run in runs:
        if run.record is None:
            continue
        plan = run.record.asked or run.record.identity.plan
        if run.complete or plan not in by_plan or not by_plan[plan].complete:
            by_plan[plan] = run
    return [(point, by_plan.get(point.plan)) for point in wanted.points]
