"""From tokens per step to tokens per second: a step-time curve measured in bench runs, and what live runs say to it.

wall = fixed + prompt_token * prompt tokens + step * verify steps, of one request, by non-negative least squares over
the rows of a run's baseline arm. Of a policy the number of steps is predicted: (output tokens - 1) / tokens per step,
the output being the baseline's own. A policy that makes answers longer or shorter is not seen by it.

A step of a policy may cost more than the baseline's: its rule decides on tensors, reads more, draws coins. That is
measured too, as a ratio of step times of arms that took turns, and never in rows that the prediction is checked
against: in other runs, or by halves of the prompts, each half with the ratio of the other. Both predictions are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from harness.records import Record, Row
from harness.records.read import read
from harness.replay.estimate import Outcome
from harness.replay.table import Array, Table, prompt_sha256
from harness.tasks.errors import TaskError

SHARED = 0.9  # of the prompts of whichever has fewer, so that a run and a capture are of one traffic
GREEDY = frozenset([0.0])
FEWEST = 8  # answers of an arm that a step time is fitted to


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
class Asked:
    """What a run must share with the capture to be set beside it. facts: engine, its version, target, draft, K.
    temperatures: of the requests replayed, 0 for greedy ones. filters: top_k and top_p that some of them had, in words;
    a harness sends none. prompts: SHA-256 of each, as records have them."""

    facts: Mapping[str, Any]
    temperatures: frozenset[float]
    filters: str | None
    prompts: frozenset[str]


def asked(manifest: Mapping[str, Any], requests: Mapping[int, Mapping[str, Any]], table: Table) -> Asked:
    """Of the requests of a table. requests: of the capture, by number."""
    infos = [requests[int(number)] for number in table.request[table.first]]
    vocabulary = manifest["vocabulary"]
    filters = {
        f"top_k={info.get('top_k')}, top_p={info.get('top_p')}"
        for info in infos
        if table.sampled and ((info.get("top_p") or 1) < 1 or 0 < (info.get("top_k") or 0) < vocabulary)
    }
    return Asked(
        facts={
            "engine": manifest["engine"].get("name"),
            "engine version": manifest["engine"].get("version"),
            "target": Path(manifest["target"]["name"]).name,
            "draft": Path(manifest["draft"]["name"]).name,
            "K": manifest["K"],
        },
        temperatures=frozenset(round(t, 6) for t in np.unique(table.temperature).tolist()) if table.sampled else GREEDY,
        filters="; ".join(sorted(filters)) or None,
        prompts=frozenset(prompt_sha256(prompt) for prompt in table.prompts if prompt),
    )


@dataclass(frozen=True)
class Bench:
    """A complete bench run. facts: as Asked has them."""

    record: Record
    rows: list[Row]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        return next(iter(self.record.arms))

    @property
    def batch(self) -> int:
        return int(self.record.workload.get("concurrency") or 1)

    def answered(self, arm: str) -> list[Row]:
        return [row for row in self.rows if row.arm == arm and row.error is None and row.steps > 0]


def load(folder: str, field: str = "replay.times") -> Bench:
    """A sound, complete bench record, measured without a capture. field: that names it, for the error."""
    found = read(Path(folder).expanduser())
    if not found.complete or found.record is None or found.record.task != "bench":
        why = found.problems[0] if found.problems else "not a complete bench run"
        told = why.removeprefix(f"{Path(folder).name}: ")
        raise TaskError(f"{field}: {folder}: {told}")
    record = found.record
    if record.verdict is None or record.verdict.outcome == "fail":
        reasons = "; ".join(record.verdict.reasons) if record.verdict else "no verdict"
        raise TaskError(f"{field}: {record.id}: expected a run that did not fail, found {reasons}")
    if ((record.server or {}).get("adapter") or {}).get("capture"):
        raise TaskError(f"{field}: {record.id}: measured while it was being captured: its times are not the engine's")
    engine, identity = record.identity.engine or {}, record.identity
    facts = {
        "engine": engine.get("name"),
        "engine version": engine.get("version"),
        "target": Path(str(identity.target.get("path", ""))).name,
        "draft": Path(str(identity.draft.get("path", ""))).name,
        "K": identity.config.get("model", {}).get("block_size"),
    }
    return Bench(record, found.rows, facts)


def prompts_of(benches: Sequence[Bench]) -> frozenset[str]:
    """SHA-256 of the prompts that every run asked."""
    return frozenset.intersection(*(frozenset(row.prompt_sha256 for row in bench.rows) for bench in benches))


def differs(bench: Bench, asked: Asked) -> list[str]:
    """What of a run is not the capture's."""
    return [
        f"{name}: expected the capture's {wanted!r}, found {bench.facts.get(name)!r}"
        for name, wanted in asked.facts.items()
        if bench.facts.get(name) != wanted
    ]


def arm_differs(bench: Bench, arm: str, asked: Asked) -> list[str]:
    """What of an arm's requests is not as the capture's were."""
    temperature, rows = bench.record.arms[arm].temperature, bench.answered(arm)
    why = []
    if asked.temperatures != frozenset([round(temperature, 6)]):
        wanted = " and ".join(f"{each:g}" for each in sorted(asked.temperatures))
        why.append(f"temperature: expected the capture's {wanted}, found {temperature:g}")
    if asked.filters is not None:
        why.append(f"top_k, top_p: expected the capture's {asked.filters}, found none")
    own = {row.prompt_sha256 for row in rows}
    shared, fewer = len(own & asked.prompts), min(len(own), len(asked.prompts))
    if shared < SHARED * fewer or not fewer:
        why.append(f"traffic: {shared} of its {len(own)} prompts are among the capture's {len(asked.prompts)}")
    return why


def usable(benches: Sequence[Bench], asked: Asked, name: str) -> None:
    """Refuse runs that are to be measured in, where their engine, model or baseline's temperature is another."""
    for bench in benches:
        why = differs(bench, asked)
        temperature = bench.record.arms[bench.baseline].temperature
        if asked.temperatures != frozenset([round(temperature, 6)]):
            why.append(f"temperature of {bench.baseline}: expected {sorted(asked.temperatures)}, found {temperature:g}")
        if why:
            raise TaskError(f"{name}: {bench.record.id}: {why[0]}")


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


def walls(rows: Sequence[Row], times: tuple[float, float, float], tokens_per_step: float) -> Array:
    """Seconds of each of the baseline's answers `rows`, had every block given so many tokens."""
    fixed, prompt, step = times
    output = np.array([len(row.output_ids) for row in rows])
    return fixed + prompt * np.array([row.prompt_tokens for row in rows]) + step * (output - 1) / tokens_per_step


def tokens_per_second(
    rows: Sequence[Row], times: tuple[float, float, float], tokens_per_step: float, batch: int
) -> float:
    output = sum(len(row.output_ids) for row in rows)
    return float(batch * output / walls(rows, times, tokens_per_step).sum())


# -- what a step of each rule costs, against the baseline's


def own_steps(bench: Bench, without: frozenset[str] = frozenset(), half: int | None = None) -> dict[str, float]:
    """By policy key: time of its step over that of the baseline's, of arms that took turns. One fixed time and one per
    prompt token for all arms. without: prompts left out. half: 0 or 1, of the prompts."""
    arms = {
        arm: [row for row in bench.answered(arm) if row.prompt_sha256 not in without and half in (None, half_of(row))]
        for arm in bench.record.arms
        if not arm.endswith("-again")
    }
    arms = {arm: rows for arm, rows in arms.items() if len(rows) >= FEWEST}
    if bench.baseline not in arms:
        return {}
    order = list(arms)
    terms = np.array(
        [
            [1.0, row.prompt_tokens, *(row.steps if each == arm else 0.0 for each in order)]
            for arm, rows in arms.items()
            for row in rows
        ]
    )
    wall = np.array([row.wall_s for rows in arms.values() for row in rows])
    scale = np.maximum(terms.mean(0), 1e-12)
    solved, _ = nnls(terms / scale, wall)
    steps = dict(zip(order, (solved / scale)[2:], strict=True))
    base = steps[bench.baseline]
    return {bench.record.arms[arm].policy_key: float(step / base) for arm, step in steps.items()} if base > 0 else {}


def half_of(row: Row) -> int:
    """Of two halves of the prompts, by what they are and not by their place: kinds of items alternate in a run."""
    return int(row.prompt_sha256[:8] or "0", 16) % 2


def _own(bench: Bench, key: str, costs: Sequence[Bench]) -> tuple[list[tuple[int | None, float]], str] | None:
    """[(half of the prompts, or None: all; ratio for it)], and where it was measured."""
    if costs:
        mine = frozenset(row.prompt_sha256 for row in bench.rows)
        for each in costs:
            if each.batch == bench.batch and key in (found := own_steps(each, without=mine)):
                return [(None, found[key])], each.record.id
        return None
    found_by_half = [own_steps(bench, half=1 - half) for half in (0, 1)]
    if all(key in found for found in found_by_half):
        return [(half, found_by_half[half][key]) for half in (0, 1)], "the prompts' other half"
    return None


def _own_tps(
    bench: Bench, times: tuple[float, float, float], value: float, ratios: Sequence[tuple[int | None, float]]
) -> float:
    base, seconds = bench.answered(bench.baseline), 0.0
    for half, ratio in ratios:
        rows = [row for row in base if half in (None, half_of(row))]
        seconds += float(walls(rows, (times[0], times[1], times[2] * ratio), value).sum()) if rows else 0.0
    return bench.batch * sum(len(row.output_ids) for row in base) / seconds


def _same(rows: Sequence[Row], base: Sequence[Row]) -> bool:
    """An arm with the baseline's very answers in its very steps (B = 0)."""
    told = {row.item: (row.output_ids, row.steps) for row in base}
    return all(told.get(row.item) == (row.output_ids, row.steps) for row in rows)


def live_tokens_per_step(rows: Sequence[Row]) -> float:
    """As a replay counts: the prompt's own token is no part of any step."""
    return (sum(len(row.output_ids) for row in rows) - len(rows)) / sum(row.steps for row in rows)


def predict(
    outcomes: Sequence[Outcome],
    times: Sequence[Bench],
    live: Sequence[Bench],
    asked: Asked,
    costs: Sequence[Bench] = (),
) -> dict[str, Any]:
    """The curve, a predicted TPS for every policy at the load of the first run, and the check against live arms.

    An arm that is not as the capture's requests were is listed under `refused`, with the reason. costs: runs that a
    rule's own step is measured in; none: halves of the live run.
    """
    usable(times, asked, "replay.times")
    usable(costs, asked, "replay.costs")
    curve = [fit(bench) for bench in times]
    first = times[0]
    known = {outcome.policy.key: outcome for outcome in outcomes if (outcome.tokens_per_step or {}).get("all")}
    predicted, refused, checks = {}, [], []
    for outcome in known.values():
        value = (outcome.tokens_per_step["all"] or {})["value"]
        found = at(curve, first.batch)
        assert found is not None
        predicted[outcome.name] = tokens_per_second(first.answered(first.baseline), found, value, first.batch)
    for bench in live:
        unlike = differs(bench, asked)
        for arm, about in bench.record.arms.items():
            outcome_ = known.get(about.policy_key)
            if outcome_ is None or not bench.answered(arm) or arm.endswith("-again"):
                continue
            if why := [*unlike, *arm_differs(bench, arm, asked)]:
                refused.append({"name": outcome_.name, "run": bench.record.id, "arm": arm, "why": why})
            else:
                checks.append(_check(bench, arm, outcome_, curve, costs))
    compared = [each for each in checks if not each["fitted"]]
    return {
        "curve": [asdict(point) for point in curve],
        "predicted_tps": predicted,
        "rows": checks,
        "refused": refused,
        "mean_abs_error": _mean_abs(compared, "error"),
        "mean_abs_error_own": _mean_abs(compared, "error_own"),
        "notes": [note for bench in _once([*times, *live, *costs]) if (note := _inconclusive(bench.record))],
    }


def _check(bench: Bench, arm: str, outcome: Outcome, curve: Sequence[Point], costs: Sequence[Bench]) -> dict[str, Any]:
    """One arm beside what was predicted of it, with the baseline's step time and with its own."""
    rows, base, found = bench.answered(arm), bench.answered(bench.baseline), at(curve, bench.batch)
    tps = (bench.record.summary.get("arms") or {}).get(arm, {}).get("tps")
    value, seen = (outcome.tokens_per_step["all"] or {})["value"], (tps or {}).get("value")
    told = None if found is None else tokens_per_second(base, found, value, bench.batch)
    # The curve was fitted on these rows, or on their like. A sampled baseline answers an item twice, not alike.
    alike = arm == bench.baseline or _same(rows, base)
    fitted = alike and any(point.run == bench.record.id for point in curve)
    own = None if found is None or fitted else _own(bench, outcome.policy.key, costs)
    told_own = None if own is None or found is None else _own_tps(bench, found, value, own[0])
    return {
        "name": outcome.name,
        "key": outcome.policy.key,
        "run": bench.record.id,
        "batch": bench.batch,
        "fitted": fitted,
        "predicted_tps": told,
        "live_tps": tps,
        "error": None if told is None or not seen else told / seen - 1,
        "own_step": None if own is None else float(np.mean([ratio for _, ratio in own[0]])),
        "own_from": None if own is None else own[1],
        "predicted_own_tps": told_own,
        "error_own": None if told_own is None or not seen else told_own / seen - 1,
        "predicted_tokens_per_step": value,
        "live_tokens_per_step": live_tokens_per_step(rows),
    }


def _mean_abs(checks: Sequence[Mapping[str, Any]], name: str) -> float | None:
    errors = [abs(each[name]) for each in checks if each[name] is not None]
    return float(np.mean(errors)) if errors else None


def _once(benches: Sequence[Bench]) -> list[Bench]:
    return list({bench.record.id: bench for bench in benches}.values())


def _inconclusive(record: Record) -> str | None:
    """What a run's own verdict says against its times."""
    if record.verdict is None or record.verdict.outcome == "pass":
        return None
    return f"{record.id}: {record.verdict.outcome}: {'; '.join(record.verdict.reasons)}"
