"""From tokens per step to tokens per second: a step-time curve measured in bench runs, and what live runs say to it.

wall = fixed + prompt_token * prompt tokens + step * verify steps, of one request, by non-negative least squares over
the rows of a run's baseline arm. Of a policy only the number of steps is predicted: (output tokens - 1) / tokens per
step, the output being the baseline's own. A policy that makes answers longer or shorter is not seen by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from harness.records import Record, Row
from harness.records.read import read
from harness.replay.estimate import Outcome
from harness.tasks.errors import TaskError


@dataclass(frozen=True)
class Point:
    """The step time at one load. batch: requests in flight. width: rows verified per request and step. Seconds."""

    run: str
    batch: int
    width: float
    fixed_s: float
    per_prompt_token_s: float
    per_step_s: float
    rows: int
    residual: float  # standard deviation of wall about the fit, as a share of the mean wall


@dataclass(frozen=True)
class Bench:
    """A bench run whose engine and model are the capture's."""

    record: Record
    rows: list[Row]

    @property
    def baseline(self) -> str:
        return next(iter(self.record.arms))

    @property
    def batch(self) -> int:
        return int(self.record.workload.get("concurrency") or 1)

    def answered(self, arm: str) -> list[Row]:
        return [row for row in self.rows if row.arm == arm and row.error is None and row.steps > 0]


def load(folder: str, manifest: dict[str, Any]) -> Bench:
    """A sound, complete bench record of the capture's engine and target, measured without a capture."""
    found = read(Path(folder).expanduser())
    if not found.complete or found.record is None or found.record.task != "bench":
        why = found.problems[0] if found.problems else "not a complete bench run"
        raise TaskError(f"replay.times: {folder}: {why}")
    record = found.record
    engine = (record.identity.engine or {}).get("name")
    target = Path(str(record.identity.target.get("path", ""))).name
    for name, wanted, seen in (
        ("engine", manifest["engine"].get("name"), engine),
        ("target", Path(manifest["target"]["name"]).name, target),
    ):
        if wanted != seen:
            raise TaskError(f"replay.times: {record.id}: {name}: expected the capture's {wanted!r}, found {seen!r}")
    if record.verdict is None or record.verdict.outcome == "fail":
        reasons = "; ".join(record.verdict.reasons) if record.verdict else "no verdict"
        raise TaskError(f"replay.times: {record.id}: expected a run that did not fail, found {reasons}")
    if ((record.server or {}).get("adapter") or {}).get("capture"):
        raise TaskError(
            f"replay.times: {record.id}: measured while it was being captured: its times are not the engine's"
        )
    return Bench(record, found.rows)


def fit(bench: Bench) -> Point:
    """The step time of a run's baseline arm."""
    rows = bench.answered(bench.baseline)
    if len(rows) < 4:
        raise TaskError(
            f"replay.times: {bench.record.id}: expected 4 answers of {bench.baseline} or more, found {len(rows)}"
        )
    wall = np.array([row.wall_s for row in rows])
    terms = np.array([[1.0, row.prompt_tokens, row.steps] for row in rows])
    scale = terms.mean(0)
    solved, _ = nnls(terms / scale, wall)
    times = solved / scale
    return Point(
        run=bench.record.id,
        batch=bench.batch,
        width=1 + sum(row.proposed for row in rows) / sum(row.steps for row in rows),
        fixed_s=float(times[0]),
        per_prompt_token_s=float(times[1]),
        per_step_s=float(times[2]),
        rows=len(rows),
        residual=float((wall - terms @ times).std() / wall.mean()),
    )


def at(curve: Sequence[Point], batch: int) -> tuple[float, float, float] | None:
    """fixed, per prompt token, per step at that many requests in flight, between measured points; None outside."""
    points = sorted(curve, key=lambda point: point.batch)
    batches = [point.batch for point in points]
    if not batches or not batches[0] <= batch <= batches[-1]:
        return None
    fields = ("fixed_s", "per_prompt_token_s", "per_step_s")
    fixed, prompt, step = (float(np.interp(batch, batches, [getattr(p, f) for p in points])) for f in fields)
    return fixed, prompt, step


def tokens_per_second(
    rows: Sequence[Row], times: tuple[float, float, float], tokens_per_step: float, batch: int
) -> float:
    """Of the baseline's answers `rows`, had every block given so many tokens."""
    fixed, prompt, step = times
    output = np.array([len(row.output_ids) for row in rows])
    wall = fixed + prompt * np.array([row.prompt_tokens for row in rows]) + step * (output - 1) / tokens_per_step
    return float(batch * output.sum() / wall.sum())


def _same(rows: Sequence[Row], base: Sequence[Row]) -> bool:
    """The baseline, or an arm with its very answers in its very steps (B = 0): the curve was fitted on those."""
    told = {row.item: (row.output_ids, row.steps) for row in base}
    return all(told.get(row.item) == (row.output_ids, row.steps) for row in rows)


def live_tokens_per_step(rows: Sequence[Row]) -> float:
    """As a replay counts: the prompt's own token is no part of any step."""
    return (sum(len(row.output_ids) for row in rows) - len(rows)) / sum(row.steps for row in rows)


def predict(outcomes: Sequence[Outcome], times: Sequence[Bench], live: Sequence[Bench]) -> dict[str, Any]:
    """The curve, a predicted TPS for every policy at the load of the first run, and the check against live arms."""
    curve = [fit(bench) for bench in times]
    first = times[0]
    known = {outcome.policy.key: outcome for outcome in outcomes if (outcome.tokens_per_step or {}).get("all")}
    predicted = {}
    for outcome in known.values():
        value = (outcome.tokens_per_step["all"] or {})["value"]
        found = at(curve, first.batch)
        assert found is not None
        predicted[outcome.name] = tokens_per_second(first.answered(first.baseline), found, value, first.batch)
    checks = []
    for bench in live:
        for arm, about in bench.record.arms.items():
            outcome_ = known.get(about.policy_key)
            rows, found = bench.answered(arm), at(curve, bench.batch)
            if outcome_ is None or not rows or arm.endswith("-again"):
                continue
            tps = (bench.record.summary.get("arms") or {}).get(arm, {}).get("tps")
            value = (outcome_.tokens_per_step["all"] or {})["value"]
            base = bench.answered(bench.baseline)
            told = None if found is None else tokens_per_second(base, found, value, bench.batch)
            seen = (tps or {}).get("value")
            checks.append(
                {
                    "name": outcome_.name,
                    "key": about.policy_key,
                    "run": bench.record.id,
                    "batch": bench.batch,
                    "fitted": any(point.run == bench.record.id for point in curve) and _same(rows, base),
                    "predicted_tps": told,
                    "live_tps": tps,
                    "error": None if told is None or not seen else told / seen - 1,
                    "predicted_tokens_per_step": value,
                    "live_tokens_per_step": live_tokens_per_step(rows),
                }
            )
    errors = [abs(each["error"]) for each in checks if each["error"] is not None and not each["fitted"]]
    return {
        "curve": [asdict(point) for point in curve],
        "predicted_tps": predicted,
        "rows": checks,
        "mean_abs_error": float(np.mean(errors)) if errors else None,
        "notes": [note for bench in _once([*times, *live]) if (note := _inconclusive(bench.record))],
    }


def _once(benches: Sequence[Bench]) -> list[Bench]:
    return list({bench.record.id: bench for bench in benches}.values())


def _inconclusive(record: Record) -> str | None:
    """What a run's own verdict says against its times."""
    if record.verdict is None or record.verdict.outcome == "pass":
        return None
    return f"{record.id}: {record.verdict.outcome}: {'; '.join(record.verdict.reasons)}"
