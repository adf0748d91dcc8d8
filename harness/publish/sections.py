"""The tables that every page has: columns, and rows of filled cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from adapters.policy import RULES
from harness.config import ROOT, ConfigError, choices, member
from harness.launch.capability import pair, unsupported, unsupported_rule
from harness.publish import cells
from harness.publish.cells import NOT_RUN
from harness.publish.labels import (
    brief,
    code,
    is_recipe,
    is_reported,
    judged_again,
    link,
    model,
    title,
    traffic,
    unusual,
)
from harness.publish.parts import Cell, Link, parts
from harness.publish.phases import phases
from harness.publish.selection import Point, Selection, Shown, Sweep, passed
from harness.records import Record
from harness.records.read import Loaded
from harness.records.sweeps import Manifest, read_sweeps
from harness.replay import cost
from harness.replay.record import Replay, read_all

PUBLISHED = "published.yaml"
GATES = ("model", "engine", "traffic", "compared", "tokens", "differ", "rate at most (95 %)", "control", "run")
CALIBRATIONS = ("model", "engine", "traffic", "items", "first rejections", "quantile", "value, nats", "run")
OTHERS = ("run", "task", "model", "engine", "traffic", "status", "why")
STATED = ("model", "setting", "policy", "TPS", "change", "tokens per step", "accuracy", "change ", "source", "note")
OURS = "measured here"
EMBEDDED = "specaccept-reference"  # harness/engines/reference/loading.py, without its torch
PHASES = ("run", "arm", "tokens per step", "while thinking", "while answering", "tokens that are thinking")
REPLAYED = ("policy", "tokens per step, 95 %", "while thinking", "while answering", "change", "95 %")
POINTS = (
    "TPS",
    "TPS change",
    "95 %",
    "accuracy",
    "change",
    "95 % ",
    "wall per item",
    "tokens per step",
    "standing",
    "run",
)


class Ours(msgspec.Struct, forbid_unknown_fields=True):
    """Which of our rows answers the same question: recipes' names and the name of the arm."""

    model: str
    traffic: str
    arm: str


class Published(msgspec.Struct, forbid_unknown_fields=True):
    """One figure someone else states. Every cell is text, and none is empty except note.

    ours: the same question here; None: no recipe asks it.
    """

    model: str
    kind: str
    setting: str
    policy: str
    tps: str
    tps_change: str
    tokens_per_step: str
    accuracy: str
    accuracy_change: str
    source: str
    note: str
    ours: Ours | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name not in ("note", "ours") and not value.strip():
                raise ValueError(f"{PUBLISHED}: {name}: expected a value or why there is none, found nothing")


def published(results: Path) -> list[Published]:
    """Figures of others beside the records, else those of this checkout."""
    path = results / PUBLISHED
    path = path if path.exists() else ROOT / "results" / PUBLISHED
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=list[Published])
    except ValueError as error:  # msgspec's errors are ValueErrors, and so is text that is not UTF-8
        raise ConfigError(f"{PUBLISHED}: {str(error).splitlines()[0]}") from None


def stated(figure: Published, benches: Sequence[Shown]) -> list[Cell]:
    return [
        figure.model,
        figure.setting,
        figure.policy,
        figure.tps,
        figure.tps_change,
        figure.tokens_per_step,
        figure.accuracy,
        figure.accuracy_change,
        figure.source,
        figure.note or "none",
        ours(figure.ours, benches),
    ]


def ours(asked: Ours | None, benches: Sequence[Shown]) -> Cell:
    """The passes of the same model, traffic and arm, whatever their engine, which each names."""
    if asked is None:
        return "no recipe"
    found: list[str | Link] = []
    for shown in benches:
        record = shown.record
        config = record.identity.config
        names = (config["model"]["name"], config["traffic"]["name"])
        if names == (asked.model, asked.traffic) and asked.arm in record.arms and is_recipe(record) and passed(record):
            values = cells.arm_cells(record, asked.arm)
            text = f"{config['engine']['name']}, {traffic(record)}: {values['TPS']} TPS"
            if values["TPS change"] != "baseline":
                text += f" ({values['TPS change']} {values['TPS change, 95 %']})"
            found += [*(["; "] if found else []), f"{text}, {values['accuracy']} ", link(record)]
    return tuple(found) or NOT_RUN


def beside(shown: Shown) -> str:
    """Nobody should take the best of many for the only one."""
    return f"; {shown.others} other complete of the same question, listed below" if shown.others else ""


def warnings(shown: Shown) -> list[Cell]:
    return [(f"{title(record)}: newer run ", link(record), f": {why(record)}") for record in shown.newer]


def why(record: Record) -> str:
    if record.verdict is None:
        return f"{record.status}: {record.error or 'the run was cut off'}"
    again = f"; {text}" if (text := judged_again(record)) else ""
    return f"verdict {record.verdict.outcome}" + "".join(f"; {reason}" for reason in record.verdict.reasons) + again


def gate(shown: Shown) -> list[Cell]:
    record = shown.record
    gates, config = record.gates, record.identity.config
    found, control = gates.get("identity"), gates.get("control")
    base = next(iter(record.arms))
    walked = ["asd-m0: every block walked"] if "asd-m0" in record.arms else []
    compared: list[Cell] = ["not compared"] * 4
    if found:
        compared = [
            f"{found['compared']}/{found['expected']}",
            f"{found['tokens']:,}",
            str(found["mismatches"]),
            f"{100 * found['bound']:.2g} %",
        ]
    return [
        model(record),
        config["engine"]["name"] + ("" if base == "strict" else f", against {base}"),
        ", ".join([config["traffic"]["name"], *walked, *unusual(record), *brief(record), *_in_flight(record)]),
        *compared,
        f"{control['policy']}: {control['relaxed']} relaxed, {control['outputs_changed']}/{control['items']} changed"
        if control
        else "none",
        (
            f"{record.verdict.outcome if record.verdict else 'none'}, ",
            link(record),
            f", {code(record)}{beside(shown)}",
        ),
    ]


def _in_flight(record: Record) -> list[str]:
    """How far an engine is from equal arithmetic: what is in flight at once, and how often it then repeats itself."""
    count, repeat = record.workload.get("concurrency", 1), record.gates.get("repeat")
    told = [f"{count} in flight"] if count != 1 else []
    for arm, again in record.gates.get("identity_repeated", {}).items():
        told.append(f"asked twice: {arm} {again['compared'] - again['mismatches']}/{again['expected']} equal")
    return told + (
        [f"the baseline differs from itself on {repeat['mismatches']}/{repeat['compared']}"] if repeat else []
    )


def calibration(shown: Shown) -> list[Cell]:
    record = shown.record
    found, config = record.summary["calibration"], record.identity.config
    return [
        model(record),
        config["engine"]["name"],
        ", ".join([config["traffic"]["name"], *unusual(record), *brief(record)]),
        str(len(record.workload["items"])),
        f"{found['rejections']}, {found['ratios']} positive",
        f"{found['quantile']:g}",
        "none: no positive ratio" if found["value"] is None else f"{found['value']:.4f}",
        (link(record), f", {code(record)}{beside(shown)}"),
    ]


def engines(variants: bool = False) -> list[str]:
    """Engines of recipes/, or their variants."""
    return [name for name in choices("engine") if (member("engine", name).base is not None) == variants]


def coverage(benches: Sequence[Record], names: Sequence[str]) -> list[list[Cell]]:
    """A row per model, a column per engine of `names`: the newest complete bench of the pair, or why there is none."""
    newest = {}
    for record in sorted(benches, key=lambda record: record.created):
        if is_recipe(record):
            config = record.identity.config
            newest[config["model"]["name"], config["engine"]["name"]] = record
    rows = []
    for name in choices("model"):
        row: list[Cell] = [name]
        for engine in names:
            run = newest.get((name, engine))
            reason = unsupported(pair(name, engine))
            row.append(_ran(run) if run else f"unsupported ({reason})" if reason else NOT_RUN)
        rows.append(row)
    return rows


def rules(benches: Sequence[Record], names: Sequence[str]) -> list[list[Cell]]:
    """A row per rule, a column per engine: the newest bench that passed with it, or why there is none."""
    newest = {}
    for record in sorted(benches, key=lambda record: record.created):
        for arm in record.arms.values():
            if passed(record):
                newest[arm.policy["rule"], record.identity.config["engine"]["name"]] = record
    rows = []
    for rule in RULES:
        row: list[Cell] = [rule]
        for engine in names:
            run, reason = newest.get((rule, engine)), unsupported_rule(member("engine", engine), rule)
            row.append(link(run) if run else f"unsupported ({reason})" if reason else NOT_RUN)
        rows.append(row)
    return rows


def _ran(record: Record) -> Cell:
    """A run that did not pass is no sign that a pair works."""
    reported = " (as the server reports)" if is_reported(record) else ""
    return (link(record), reported, "" if passed(record) else f", {why(record).partition(';')[0]}")


def other(run: Loaded, reason: str = "another run of the same question is shown") -> list[Cell]:
    record = run.record
    if record is None or run.problems:
        known = record.task if record else "unknown"
        return [run.folder.name, known, "unknown", "unknown", "unknown", "unsound", "; ".join(run.problems)]
    config = record.identity.config
    text = record.error or f"{why(record)}; {reason}"
    return [link(record), record.task, model(record), config["engine"]["name"], traffic(record), record.status, text]


def phase_rows(shown: Shown) -> list[list[Cell]]:
    """A row per arm; where the phases cannot be told apart, one row of arms that share the reason."""
    record = shown.record
    where = (f"{title(record)}, ", link(record))
    rows: list[list[Cell]] = []
    reasons: dict[str, list[str]] = {}
    for arm in record.arms:
        found = phases([row for row in shown.rows if row.arm == arm], record.workload.get("think_end"))
        if isinstance(found, str):
            reasons.setdefault(found, []).append(arm)
            continue
        both: list[Cell] = [
            cells.per_step(phase.per_step) if phase.steps else f"none {name}" for name, phase in found.items()
        ]
        counts = [sum(phase.tokens) for phase in found.values()]
        share = f"{100 * counts[0] / sum(counts):.1f} %" if sum(counts) else "no step"
        rows.append([where, arm, _per_step(record, arm), *both, share])
    for reason, arms in reasons.items():
        overall = ", ".join(_per_step(record, arm) for arm in arms)
        rows.append([where, ", ".join(arms), overall, f"unsupported ({reason})", *["unsupported"] * 2])
    return rows


def _per_step(record: Record, arm: str) -> str:
    return cells.number(record.summary["arms"][arm]["tokens_per_step"]["value"])


def histogram(record: Record) -> tuple[list[str], list[list[Cell]]]:
    """Share of verify steps by accepted drafts, a row per arm."""
    counts = {arm: record.summary["arms"][arm]["histogram"] for arm in record.arms}
    width = max((len(found) for found in counts.values()), default=0)
    rows: list[list[Cell]] = []
    for arm, found in counts.items():
        total = sum(found)
        full = [*found, *[0] * (width - len(found))]
        rows.append([arm, *(f"{100 * n / total:.1f} %" if total else cells.UNKNOWN for n in full)])
    return ["drafts accepted", *map(str, range(width))], rows


def replays_of(results: Path) -> list[Replay]:
    try:
        return read_all(results)
    except ValueError as error:
        raise ConfigError(f"replays: {error}") from None


def costs(results: Path) -> list[list[Cell]]:
    """What captures cost, a row per measurement."""
    try:
        return [[Link(row[0], path), *row[1:]] for path, each in cost.read_all(results) if (row := cost.row(each))]
    except ValueError as error:
        raise ConfigError(str(error)) from None


def sweeps_of(results: Path) -> list[Manifest]:
    try:
        return read_sweeps(results)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def replayed(replays: Sequence[Replay]) -> list[Replay]:
    """The newest that passed of each capture, each policy whose blocks were read from it, each choice of prompts.

    In the order of benches: an engine that people serve with before the embedded one, then by blocks."""
    newest = {
        (each.capture["manifest_sha256"], each.capture["policy"], tuple(each.capture.get("shared", ()))): each
        for each in replays
        if each.verdict.outcome == "pass"
    }
    return sorted(newest.values(), key=lambda each: (each.capture["engine"] == EMBEDDED, -each.capture["blocks"]))


def replays_apart(replays: Sequence[Replay]) -> list[list[Cell]]:
    """Replays that did not pass, and those that a newer one of the same capture replaces."""
    shown = [each.id for each in replayed(replays)]
    rows: list[list[Cell]] = []
    for each in replays:
        if each.id not in shown:
            about, verdict = each.capture, each.verdict
            why_ = "; ".join(
                [f"verdict {verdict.outcome}", *(verdict.reasons or ["a newer one of its capture is shown"])]
            )
            capture = f"capture {about['manifest_sha256'][:12]}"
            link_ = Link(each.id, f"replays/{each.id}/replay.json")
            rows.append([link_, "replay", about["target"], about["engine"], capture, "complete", why_])
    return rows


def replay_title(replay: Replay) -> str:
    about = replay.capture
    return (
        f"{about['target']} on {about['engine']}, {about['requests']:,} requests, {about['blocks']:,} blocks of "
        f"{about['policy']}{', prompts of runs alone' if about.get('shared') else ''}"
    )


def replay_rows(replay: Replay) -> list[list[Cell]]:
    """A row per policy, points of a grid left to the replay's own record."""
    rows: list[list[Cell]] = []
    for entry in replay.policies:
        if entry.grid:
            continue
        found, change = entry.tokens_per_step, entry.change.get("all")
        if found.get("all") is None:
            rows.append([entry.name, f"unsupported ({entry.why or 'no reason'})", *["unsupported"] * 4])
            continue
        base = entry.name == replay.baseline
        rows.append(
            [
                entry.name,
                *(cells.with_interval(found.get(phase), 2) for phase in ("all", "think", "answer")),
                "baseline" if base else cells.change(change),
                "baseline" if base else cells.interval(change),
            ]
        )
    return rows


def replay_facts(replay: Replay) -> list[Cell]:
    """Where it comes from, and what must be read with it."""
    code_, about = replay.code, replay.capture
    commit = f"commit {code_['commit'][:12]}" if code_.get("commit") else f"content {code_['sha256'][:12]}"
    run = Link(replay.id, f"replays/{replay.id}/replay.json")
    return [
        (
            "Replay ",
            run,
            f", {commit}{' with changes' if code_.get('dirty') else ''}, verdict {replay.verdict.outcome}.",
        ),
        f"Capture {about['manifest_sha256'][:12]}, seal {(replay.seal or 'none')[:12]}.",
        *replay.verdict.reasons,
        *_live_checks(replay),
        *replay.limits,
    ]


def _live_checks(replay: Replay) -> list[str]:
    """A sentence per run whose arms were predicted: live TPS, and the error with either step time."""
    found = replay.prediction or {"rows": []}
    told = []
    for run in dict.fromkeys(each["run"] for each in found["rows"]):
        checks = [each for each in found["rows"] if each["run"] == run]
        arms = "; ".join(_live_check(each) for each in checks if not each.get("fitted"))
        if arms:
            told.append(f"Predicted TPS against run {run}, {checks[0]['batch']} in flight: {arms}.")
    return told


def _live_check(check: Mapping[str, Any]) -> str:
    live = (check["live_tps"] or {}).get("value")
    if live is None or check["predicted_tps"] is None:
        return f"{check['name']} not run"
    own = check.get("predicted_own_tps")  # replays of before rules had a step time of their own
    text = f"{check['name']} live {live:,.1f}, with the baseline's step time {_told(check['predicted_tps'], live)}"
    return text + ("" if own is None else f", with its own {_told(own, live)}")


def _told(predicted: float, live: float) -> str:
    error = cells.signed(100 * (predicted / live - 1), 1, " %")
    return f"{predicted:,.1f} ({error})"


def varied(sweep: Sweep) -> list[str]:
    """What the points of a sweep differ in, as the overrides name it."""
    all_points = [*(point.varied for point in sweep.points), *(point for point, _ in sweep.left_out)]
    names = list(dict.fromkeys(name for point in all_points for name in point))
    return [name for name in names if len({str(point.get(name)) for point in all_points}) > 1] or names


def settings(point: Mapping[str, Any], names: Sequence[str]) -> str:
    """`B=4 g=2`, in the papers' letters where they have one."""
    return " ".join(f"{letter(name)}={cells.setting(point.get(name))}" for name in names)


def letter(name: str) -> str:
    letters = {"budget": "B", "gate": "g", "max_mismatches": "m"}
    return letters.get(last := name.rpartition(".")[2], last)


def sweep_title(sweep: Sweep) -> str:
    where = f"{title(sweep.points[0].record)}: " if sweep.points else ""
    return f"{where}{len(sweep.points)} of {sweep.planned} points (sweep {sweep.id})"


def point_row(point: Point, names: Sequence[str]) -> list[Cell]:
    found = cells.arm_cells(point.record, point.arm)
    return [
        *(cells.setting(point.varied.get(name)) for name in names),
        found["TPS"],
        found["TPS change"],
        found["TPS change, 95 %"],
        found["accuracy"],
        found["accuracy change"],
        found["accuracy change, 95 %"],
        found["wall change"],
        found["tokens per step *"],
        point.standing,
        link(point.record),
    ]


def without_pass(sweep: Sweep) -> list[list[Cell]]:
    """Points that no pass stands for, with the reason; the last row counts those that no run tells of."""
    names = varied(sweep)
    rows: list[list[Cell]] = []
    for point, run in sweep.left_out:
        what = f"{settings(point, names)} of sweep {sweep.id}"
        if run is None:
            rows.append([what, "bench", *["as its sweep"] * 3, NOT_RUN, "no record"])
        else:
            first, *rest = other(run, "no point of the front")
            rows.append([(f"{what}, ", *parts(first)), *rest])
    missing = sweep.planned - len(sweep.points) - len(sweep.left_out)
    if missing > 0:
        rows.append([f"{missing} points of sweep {sweep.id}", "bench", *["as its sweep"] * 3, NOT_RUN, "no record"])
    return rows


def failed(selection: Selection) -> list[Shown]:
    """Benches whose question has no pass."""
    return [shown for shown in selection.benches if not passed(shown.record)]
