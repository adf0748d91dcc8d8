"""results/site/index.html: one page without a server or an outside request, a pure function of what it is given."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.config import AGAIN
from harness.launch.cores import spelled
from harness.publish import cells, charts, labels, parts, sections
from harness.publish.parts import Cell, Link
from harness.publish.sections import Published
from harness.publish.selection import (
    SMALL,
    Selection,
    Shown,
    Sweep,
    candidate,
    changes_of,
    is_candidate,
    is_small,
    passed,
)
from harness.records import Record
from harness.records.read import Loaded
from harness.records.schema import digest
from harness.replay.record import Replay
from harness.stats import Estimate

SITE = "site/index.html"
FINDINGS = 6  # at the top of the page; all are in the table
UNRECORDED = "not recorded"
KERNEL_BATCHES = (1, 4, 16, 64, 256)
COLUMNS = (
    "policy",
    "tokens/s",
    "change",
    "wall per item",
    "length",
    "tokens/step",
    "accuracy",
    "change ",
    "flips",
    "no answer",
    "identity",
    "verdict",
)
# Colours are the arm's in every plot and both colour schemes; an arm without one of its own takes `other`.
SERIES = {"strict": "base", "chain": "base", "unarmed": "base", "asd-b0": "same", "asd": "asd", "block": "block"}


def page(results: Path, selection: Selection, figures: Sequence[Published], replays: Sequence[Replay] = ()) -> bytes:
    """The whole page. results: where the kernels' CSV files are."""
    environment = Environment(
        loader=PackageLoader("harness", "publish"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters["cell"] = parts.html
    environment.filters["series"] = series
    shown = [each for each in selection.benches if passed(each.record)]
    large, small = ([each for each in shown if is_small(each.record) == side] for side in (False, True))
    records = [
        *(each.record for each in shown),
        *(point.record for sweep in selection.sweeps for point in sweep.points),
    ]
    rest = [
        *(
            [each.record.id, *sections.other(_loaded(each), "no run of this question passed")][1:]
            for each in unsettled(selection)
        ),
        *(sections.other(run) for run in selection.others),
        *(row for sweep in selection.sweeps for row in sections.without_pass(sweep)),
        *sections.replays_apart(replays),
    ]
    text = environment.get_template("site.html.j2").render(
        findings=[found for each in large or small for found in findings(each)][:FINDINGS],
        columns=COLUMNS,
        groups=groups(large),
        small=groups(small),
        most=SMALL,
        apart=groups([each for each in selection.benches if not passed(each.record)]),
        filters=filters(shown),
        panels=[panel(sweep) for sweep in selection.sweeps if sweep.points]
        or [own for each in shown if (own := arms_panel(each))],
        swept=bool(selection.sweeps),
        sweeps=[
            {
                "title": sections.sweep_title(sweep),
                "columns": (*(name.rpartition(".")[2] for name in sections.varied(sweep)), *sections.POINTS[:-1]),
                "rows": [
                    (
                        sections.point_row(point, sections.varied(sweep))[:-1],  # the drawer has the run
                        drawer(point.record, point.arm),
                        point.record.id,
                    )
                    for point in sweep.points
                ],
            }
            for sweep in selection.sweeps
        ],
        histograms=[histogram(each.record) for each in shown],
        phase_columns=sections.PHASES,
        phases=[row for each in shown for row in sections.phase_rows(each)],
        replay_columns=sections.REPLAYED,
        replays=[
            (sections.replay_title(each), sections.replay_rows(each), sections.replay_facts(each))
            for each in sections.replayed(replays)
        ],
        stated=[
            (kind.capitalize(), [stated(figure, shown) for figure in figures if figure.kind == kind])
            for kind in dict.fromkeys(figure.kind for figure in figures)
        ],
        gate_columns=sections.GATES,
        gates=[sections.gate(each) for each in selection.gates if passed(each.record)],
        calibration_columns=sections.CALIBRATIONS,
        calibrations=[sections.calibration(each) for each in selection.calibrations],
        warnings=[line for each in (*selection.gates, *selection.calibrations) for line in sections.warnings(each)],
        coverage=[
            (("model", *names), sections.coverage([each.record for each in selection.benches], names))
            for names in (sections.engines(), sections.engines(variants=True))
            if names
        ],
        rule_columns=("rule", *sections.engines()),
        rules=sections.rules([each.record for each in shown], sections.engines()),
        kernels=kernels(results),
        adapters=adapters(records),
        other_columns=sections.OTHERS,
        others=rest,
    )
    return text.encode()


def unsettled(selection: Selection) -> list[Shown]:
    """Questions of which no run passed, their newest."""
    return [each for each in (*selection.benches, *selection.gates) if not passed(each.record)]


def _loaded(shown: Shown) -> Loaded:
    return Loaded(Path(shown.record.id), shown.record, [], [])


def stated(figure: Published, shown: Sequence[Shown]) -> list[tuple[Cell, str]]:
    """Cells with their small print; the figure itself stays as its source writes it."""
    return [
        (figure.model, figure.setting),
        (figure.policy, ""),
        (figure.tps_change, "" if figure.tps == figure.tps_change else _unit(figure.tps, "tokens/s")),
        (figure.tokens_per_step, ""),
        (figure.accuracy_change, "" if figure.accuracy == figure.accuracy_change else figure.accuracy),
        (sections.ours(figure.ours, shown), ""),
        (figure.source, figure.note),
    ]


def _unit(text: str, unit: str) -> str:
    return f"{text} {unit}".strip() if text[:1].isdigit() else text


def series(arm: str) -> str:
    return SERIES.get(arm.removesuffix(AGAIN), "other")


def _estimate(found: Mapping[str, Any] | None) -> Estimate | None:
    """None without both ends."""
    return Estimate(**found) if found and None not in (found["value"], found["low"], found["high"]) else None


def _change(record: Record, arm: str) -> tuple[Estimate | None, Estimate | None]:
    """Of throughput and of accuracy."""
    found = record.summary["arms"][arm].get("change") or {}
    return _estimate(found.get("tps")), _estimate((found.get("accuracy") or {}).get("change"))


def findings(shown: Shown) -> list[dict[str, str]]:
    """What one bench says of each of its candidates, the policy it is about first."""
    record = shown.record
    baseline, first = record.summary["baseline"], candidate(record)
    arms = [arm for arm in record.arms if is_candidate(arm) and arm != baseline]
    return [_finding(record, arm, baseline) for arm in sorted(arms, key=lambda arm: arm != first)]


def _finding(record: Record, arm: str, baseline: str) -> dict[str, str]:
    values, pair = cells.arm_cells(record, arm), _change(record, arm)
    words = ["" if each is None or not each.low <= 0 <= each.high else ", no change shown" for each in pair]
    return {
        "arm": arm,
        "baseline": baseline,
        "speed": values["TPS change"],
        "speed_range": values["TPS change, 95 %"],
        "speed_word": words[0],
        "accuracy": values["accuracy change"] if pair[1] else cells.NOT_SCORED,
        "accuracy_range": values["accuracy change, 95 %"],
        "accuracy_word": words[1],
        "where": labels.title(record),
        "machine": labels.machine(record),
        "href": f"#{record.id}",
    }


def filters(shown: Iterable[Shown]) -> dict[str, list[str]]:
    records = [each.record for each in shown]
    return {
        "engine": sorted({record.identity.config["engine"]["name"] for record in records}),
        "model": sorted({labels.model(record) for record in records}),
        "policy": sorted({arm for record in records for arm in record.arms}),
    }


def groups(shown: Sequence[Shown]) -> list[dict[str, Any]]:
    """A group per run, a row per arm. All intervals of a column have one scale."""
    pairs = [_change(each.record, arm) for each in shown for arm in each.record.arms]
    scales = [charts.reach([estimate for pair in pairs if (estimate := pair[side])]) for side in (0, 1)]
    return [
        {
            "id": each.record.id,
            "title": labels.title(each.record),
            "engine": each.record.identity.config["engine"]["name"],
            "model": labels.model(each.record),
            "facts": "; ".join(filter(None, _facts(each.record))),
            "warnings": sections.warnings(each),
            "rows": [row(each.record, arm, scales) for arm in each.record.arms],
        }
        for each in shown
    ]


def _facts(record: Record) -> tuple[str, ...]:
    return labels.machine(record), labels.workload(record), cells.servers(record)


def row(record: Record, arm: str, scales: Sequence[float]) -> dict[str, Any]:
    """Cells of one arm: (text, lines of small print, mark or nothing)."""
    values = cells.arm_cells(record, arm)
    found = record.summary["arms"][arm]
    marks = [
        charts.interval(estimate, scale) if estimate else None
        for estimate, scale in zip(_change(record, arm), scales, strict=True)
    ]
    paired = (found.get("change") or {}).get("accuracy")
    unusual = {name: values[name] for name in ("unparsed", "truncated") if values[name] not in ("0", "not scored")}
    bad = [f"{count} {name}" for name, count in unusual.items()]
    bad += [values["left out"]] if values["left out"] != "none" else []
    bad += ["more loops"] if values["loops"] == "more" else []
    return {
        "arm": arm,
        "key": "A/A: the baseline again" if arm.endswith(AGAIN) else record.arms[arm].policy_key,
        "cells": [
            (values["TPS"], [cells.spread(found["tps"], 1)], None),
            _pair(
                values,
                "TPS change",
                marks[0],
                [
                    *(
                        f"{kept.replace(' within', ' triplets within')}"
                        for kept in [values[cells.TRIPLETS]]
                        if kept[0].isdigit()
                    ),
                    *(f"by server: {own}" for own in [values[cells.BY_SERVER]] if ";" in own),
                    *(f"{word} A/A" for word in [values[cells.BESIDE]] if word in ("within", "beyond")),
                ],
            ),
            _pair(values, "wall change"),
            _pair(values, "length change"),
            (values["tokens per step *"], [cells.spread(found["tokens_per_step"], 2)], None),
            (values["accuracy"], [values["correct"]] if values["correct"] != values["accuracy"] else [], None),
            _pair(values, "accuracy change", marks[1]),
            (
                values["flips"],
                [f"detectable: {values['detectable']}"] if paired and values["flips"] != values["detectable"] else [],
                None,
            ),
            ("; ".join(bad) or "none", [], None),
            (values["identity"], [], None),
            (values["verdict"], [] if found.get("verdict") or passed(record) else ["of the run"], None),
        ],
        "drawer": drawer(record, arm),
    }


def _pair(
    values: Mapping[str, str], name: str, mark: charts.Interval | None = None, more: Sequence[str] = ()
) -> tuple[Any, ...]:
    """A change with its interval; a word that is both is said once."""
    text, spread = values[name], values[f"{name}, 95 %"]
    return text, [*([spread] if spread != text else []), *more], mark


def drawer(record: Record, arm: str) -> dict[str, Any]:
    """Where a row comes from: every part of its provenance, none left out."""
    identity, environment, kept = record.identity, record.environment, record.arms[arm]
    files = identity.adapter_files or {}
    dirty = identity.code.get("dirty")
    launched, engine = record.launch or {}, identity.engine or {}
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in environment.get("gpus", [])) or "none"
    foreign = launched.get("foreign_adapter")
    segments = len(record.segments)
    facts: dict[str, list[tuple[str, Cell]]] = {
        "Run": [
            ("record", labels.link(record)),
            ("measured", f"{record.created} to {record.finished}"),
            ("continued", f"{segments - 1} times" if segments > 1 else "no"),
            ("identity", _known(identity.digest)),
            ("plan", identity.plan),
            ("seal", _known(record.seal)),
            ("requests", _known(record.requests_sha256)),
            ("engine log", record.engine_log_sha256 or "none kept"),
        ],
        "Code": [
            ("commit", _known(identity.code.get("commit"))),
            ("dirty", UNRECORDED if dirty is None else "yes" if dirty is True else dirty or "no"),
            ("content", _known(identity.code.get("sha256"))),
            ("adapter", Link(f"{len(files)} files, {digest(files)[:12]}", f"{SITE}#adapter-{digest(files)[:12]}")),
            ("foreign files", ", ".join(foreign) if foreign else "none"),
        ],
        "Engine": [
            ("name", _known(engine.get("name"))),
            ("version", _known(engine.get("version"))),
            ("started", _known(launched.get("kind"))),
            ("command", launched.get("command") or "attached, not started here"),
            *((f"for {', '.join(each['arms'])}", _server(each)) for each in launched.get("servers") or []),
            ("image", identity.image_digest or "no container"),
        ],
        "Models and data": [
            *((side, _content(found)) for side, found in (("target", identity.target), ("draft", identity.draft))),
            ("data", _data(identity.data)),
        ],
        "Machine": [
            ("cpu", f"{_known(environment.get('cpu'))}, {_known(environment.get('cores'))} cores"),
            *([("cores", _cores(launched))] if launched.get("cores") else []),
            ("memory", f"{_known(environment.get('memory_gib'))} GiB"),
            ("gpus", gpus),
            ("driver", environment.get("driver") or "none"),
            ("system", _known(environment.get("system"))),
            ("python", _known(environment.get("python"))),
            ("packages", ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items())),
        ],
        "Policy": [
            ("key", kept.policy_key),
            ("from", kept.policy_source),
            ("temperature", f"{kept.temperature:g}"),
            ("counters", _moved(record, arm)),
            ("verdict", _reasons(record, arm)),
            ("thresholds", labels.thresholds(record)),
        ],
    }
    config = json.dumps(identity.config, indent=1, sort_keys=True, ensure_ascii=False)
    summary = f"{labels.code(record)}, identity {(identity.digest or UNRECORDED)[:12]}"
    return {"facts": facts, "config": config, "summary": summary}


def _server(found: Mapping[str, Any]) -> str:
    """One of several servers of a run that were up side by side."""
    armed = "with" if found.get("armed") else "without"
    pinned = f", on cores {_each(found['cores'])}" if found.get("cores") else ""
    return f"{armed} the adapter, version {_known(found.get('version'))}{pinned}: {_known(found.get('command'))}"


def _cores(launched: Mapping[str, Any]) -> str:
    """Of a run whose servers had cores of their own: whose are whose, server by server."""
    servers = [each["cores"] for each in launched.get("servers") or [launched]]
    return f"servers {'; '.join(map(_each, servers))}; client {spelled(launched['client_cores'])}"


def _each(replicas: Sequence[Sequence[int]]) -> str:
    return " and ".join(map(spelled, replicas))


def _known(value: Any) -> str:
    return UNRECORDED if value in (None, "") else str(value)


def _content(found: Mapping[str, Any]) -> str:
    parts_ = [
        found.get("path"),
        *(f"{name} {found[name]}" for name in ("revision", "sha256", "reported") if found.get(name)),
    ]
    return ", ".join(str(part) for part in parts_ if part) or UNRECORDED


def _data(found: Mapping[str, Any]) -> str:
    hashes = ", ".join(f"{split} {value}" for split, value in (found.get("content_sha256") or {}).items())
    source = ", ".join(str(found[name]) for name in ("source", "revision") if found.get(name))
    return f"{source or UNRECORDED}; SHA-256 {hashes or UNRECORDED}"


def _moved(record: Record, arm: str) -> str:
    """What the adapter's counters of this policy moved by, over all segments of the run."""
    kept = record.arms[arm]
    windows = [segment.counters[arm] for segment in record.segments if arm in segment.counters]
    moved: dict[str, float] = {}
    for before, after in windows or [(kept.counters_before, kept.counters_after)]:
        for name, value in (after or {}).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                moved[name] = moved.get(name, 0) + value - (before or {}).get(name, 0)
    told = (f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:,.3f}" for name, value in moved.items())
    return ", ".join(told) or "none kept"


def _reasons(record: Record, arm: str) -> str:
    """The arm's verdict with its reasons, else the run's."""
    own = record.summary["arms"][arm].get("verdict")
    outcome, reasons = (own["outcome"], own["reasons"]) if own else ("", [])
    if record.verdict is not None and not own:
        outcome, reasons = record.verdict.outcome, record.verdict.reasons
    judged = [f"{name} {each['outcome']}" for name, each in own.get("criteria", {}).items()] if own else []
    return "; ".join([f"{outcome or 'none'}{'' if own else ', of the whole run'}", *judged, *reasons])


def adapters(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Every set of adapter files that was measured, once."""
    sets = {digest(files)[:12]: files for record in records if (files := record.identity.adapter_files or {})}
    return [{"id": name, "files": sorted(sets[name].items())} for name in sorted(sets)]


def panel(sweep: Sweep) -> dict[str, Any]:
    """Every point of a sweep; those of the front say what they are."""
    names = sections.varied(sweep)
    dots = []
    for point in sweep.points:
        label = sections.settings(point.varied, names)
        dots.append(_dot(point.record, point.arm, point.standing, label if point.standing == "front" else "", label))
    return {
        "title": sections.sweep_title(sweep),
        "plot": charts.scatter(dots),
        "note": ", ".join(f"{sections.letter(name)} is {name}" for name in names),
    }


def arms_panel(shown: Shown) -> dict[str, Any] | None:
    """The arms of one bench against its first; None where nothing was scored or nothing but the baseline is left."""
    record = shown.record
    arms = [arm for arm in record.arms if arm != record.summary["baseline"] and None not in _change(record, arm)]
    if not arms or changes_of(record) is None:
        return None
    dots = [_dot(record, arm, "arm", arm, arm) for arm in arms]
    return {
        "title": labels.title(record),
        "plot": charts.scatter(dots),
        "note": f"against {record.summary['baseline']}",
    }


def _dot(record: Record, arm: str, kind: str, label: str, name: str) -> charts.Dot:
    speed, accuracy = _change(record, arm)
    assert speed is not None
    assert accuracy is not None
    values = cells.arm_cells(record, arm)
    words = (
        f"{name}: {values['TPS change']} {values['TPS change, 95 %']} tokens/s, "
        f"{values['accuracy change']} {values['accuracy change, 95 %']} accuracy"
    )
    return charts.Dot(speed, accuracy, kind, label, f"#{record.id}", words)


def histogram(record: Record) -> dict[str, Any]:
    """A small plot per arm, on one scale, the baseline's share marked on each bar."""
    arms = record.summary["arms"]
    width = max((len(found["histogram"]) for found in arms.values()), default=0)
    baseline = record.summary["baseline"]
    top = 1.15 * max(
        (max(charts.share(found["histogram"], width), default=0.0) for found in arms.values()), default=0.0
    )
    columns, rows = sections.histogram(record)
    return {
        "title": labels.title(record),
        "columns": columns,
        "rows": rows,
        "baseline": baseline,
        "plots": [
            {
                "arm": arm,
                "steps": f"{sum(found['histogram']):,} steps",
                "mean": cells.number(found["tokens_per_step"]["value"]),
                "bars": charts.bars(
                    found["histogram"], arms[baseline]["histogram"] if arm != baseline else None, top or 1.0, width
                ),
            }
            for arm, found in arms.items()
            if sum(found["histogram"])
        ],
    }


def kernels(results: Path) -> list[dict[str, Any]]:
    """Of each GPU the largest vocabulary and draft length, in float32; everything else is on the kernels' own page."""
    newest: dict[tuple[str, ...], dict[str, str]] = {}
    for path in sorted((results / "kernels").glob("*.csv")):
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                name = tuple(line[part] for part in ("gpu", "kernel", "provider", "V", "K", "B"))
                wanted = line["metric"] == "latency" and line["dtype"] == "float32" and line["provider"] != "floor"
                if wanted and (name not in newest or newest[name]["timestamp"] <= line["timestamp"]):
                    newest[name] = line
    lines = list(newest.values())
    return [table for gpu in dict.fromkeys(line["gpu"] for line in lines) for table in _kernels(gpu, lines)]


def _kernels(gpu: str, lines: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """A table per kernel of one GPU: providers in the order they were measured, sizes of the step across."""
    sizes = [(int(line["V"]), int(line["K"])) for line in lines if line["gpu"] == gpu]
    V, K = max(sizes)
    own = [line for line in lines if (line["gpu"], line["V"], line["K"]) == (gpu, str(V), str(K))]
    batches = [B for B in KERNEL_BATCHES if str(B) in {line["B"] for line in own}]
    tables = []
    for kernel in dict.fromkeys(line["kernel"] for line in own):
        times = {(line["provider"], int(line["B"])): line for line in own if line["kernel"] == kernel}
        commits = dict.fromkeys(
            f"torch {line['torch']}, triton {line['triton']}, commit {line['commit'][:12]}" for line in times.values()
        )
        tables.append(
            {
                "title": f"{kernel.capitalize()} on {gpu}, float32, V = {V:,}, K = {K}",
                "note": "; ".join(commits),
                "columns": ["microseconds, median", *(f"{B} requests" if B > 1 else "1 request" for B in batches)],
                "rows": [
                    [provider, *(_time(times.get((provider, B))) for B in batches)]
                    for provider in dict.fromkeys(name for name, _ in times)
                ],
            }
        )
    return tables


def _time(line: Mapping[str, str] | None) -> str:
    """Three digits, or why there is none."""
    if line is None:
        return cells.NOT_RUN
    return f"{float(line['p50']):.3g}" if line["p50"] else line["note"] or cells.NOT_RUN
