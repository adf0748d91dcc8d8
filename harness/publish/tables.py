"""results/README.md and its plots: pure functions of the records, published.yaml and the recipes.

`render` returns every derived file as bytes; `write` puts them there, tables-check compares. The newest sound run of a
key is shown, one that passed before one that did not; an incomplete or failed run is listed, and replaces nothing. One
that did not pass and is newer than the run shown is told beside it: an old pass alone would say too much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.config import ROOT, ConfigError, choices
from harness.launch.capability import pair, unsupported
from harness.publish.cells import NOT_RUN, bench_table, footnote
from harness.publish.labels import (
    asked,
    changes,
    code,
    is_recipe,
    is_reported,
    key,
    link,
    machine,
    model,
    models,
    title,
    traffic,
    unusual,
    workload,
)
from harness.records import Record
from harness.records.read import Loaded, read_all
from harness.records.run import write_atomically

README = "README.md"
PLOTS = "plots"
PUBLISHED = "published.yaml"
GATE_COLUMNS = ("model", "engine", "traffic", "compared", "tokens", "differ", "rate at most (95 %)", "control", "run")
CALIBRATION_COLUMNS = ("model", "engine", "traffic", "items", "first rejections", "quantile", "value, nats", "run")
OTHER_COLUMNS = ("run", "task", "model", "engine", "traffic", "status", "why")
PUBLISHED_COLUMNS = (
    "model",
    "setting",
    "policy",
    "TPS",
    "change",
    "tokens per step",
    "accuracy",
    "change ",
    "source",
    "note",
)


class Published(msgspec.Struct, forbid_unknown_fields=True):
    """One figure someone else states. Every cell is text, and none is empty except note."""

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

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name != "note" and not getattr(self, name).strip():
                raise ValueError(f"{PUBLISHED}: {name}: expected a value or why there is none, found nothing")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table; an empty cell is a mistake of the caller."""
    lines = [[column.strip() for column in columns], ["---"] * len(columns)]
    for row in rows:
        cells = [" ".join(str(cell).replace("|", "\\|").split()) for cell in row]
        if len(cells) != len(columns) or not all(cells):
            raise ValueError(f"table: expected {len(columns)} filled cells, found {cells}")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def published(results: Path) -> list[Published]:
    """Figures of others beside the records, else those of this checkout."""
    path = results / PUBLISHED
    path = path if path.exists() else ROOT / "results" / PUBLISHED
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=list[Published])
    except ValueError as error:  # msgspec's errors are ValueErrors, and so is text that is not UTF-8
        raise ConfigError(f"{PUBLISHED}: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True)
class Shown:
    """The run shown for a key, how many sound others it has, and newer runs of it that did not pass."""

    record: Record
    others: int
    newer: tuple[Record, ...]


def choose(runs: Sequence[Loaded]) -> dict[tuple[str, ...], Shown]:
    """The newest complete pass of each key, else its newest complete run; most items first."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for run in runs:
        if run.record is not None and run.complete:
            groups.setdefault(key(run.record), []).append(run.record)
    failed = [run.record for run in runs if run.record and run.record.status == "failed" and not run.problems]
    shown = {name: _shown(name, group, failed) for name, group in groups.items()}
    order = sorted(shown, key=lambda name: (name[:4], -len(shown[name].record.workload["items"]), name))
    return {name: shown[name] for name in order}


def _shown(name: tuple[str, ...], group: Sequence[Record], failed: Sequence[Record]) -> Shown:
    """group: complete runs of the key. failed: of any key; one without an engine has none, but was asked the same."""
    best = ([record for record in group if _passed(record)] or group)[-1]
    died = [record for record in failed if asked(record) == name[: len(asked(record))]]
    newer = [record for record in (*group, *died) if record.id > best.id and not _passed(record)]
    return Shown(best, len(group) - 1, tuple(sorted(newer, key=lambda record: record.id)))


def _passed(record: Record) -> bool:
    return record.verdict is not None and record.verdict.outcome == "pass"


def render(results: Path, runs: Sequence[Loaded] | None = None) -> dict[str, bytes]:
    """Every derived file, by path below `results`."""
    runs = read_all(results) if runs is None else runs
    shown = choose(runs).values()
    tasks = {task: [each for each in shown if each.record.task == task] for task in ("bench", "gate", "calibrate")}
    files = {f"{PLOTS}/{each.record.id}.svg": _plot(each.record) for each in tasks["bench"]}
    environment = Environment(
        loader=PackageLoader("harness", "publish"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    by_kind = published(results)
    text = environment.get_template("README.md.j2").render(
        table=markdown,
        benches=[_bench(each) for each in tasks["bench"]],
        gate_columns=GATE_COLUMNS,
        gates=[_gate(each) for each in tasks["gate"]],
        gate_warnings=[line for each in tasks["gate"] for line in _warnings(each)],
        calibration_columns=CALIBRATION_COLUMNS,
        calibrations=[_calibration(each) for each in tasks["calibrate"]],
        calibration_warnings=[line for each in tasks["calibrate"] for line in _warnings(each)],
        coverage_columns=("model", *choices("engine")),
        coverage=_coverage([each.record for each in tasks["bench"]]),
        published_columns=PUBLISHED_COLUMNS,
        published=[
            (kind.capitalize(), [_stated(figure) for figure in by_kind if figure.kind == kind])
            for kind in dict.fromkeys(figure.kind for figure in by_kind)
        ],
        other_columns=OTHER_COLUMNS,
        others=[_other(run) for run in runs if run.record not in [each.record for each in shown]],
    )
    return {README: _tidy(text).encode(), **files}


def write(results: Path) -> None:
    """Derived files, again. Plots of runs that are no longer shown go."""
    files = render(results)
    (results / PLOTS).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(results / name, content)
    for stale in sorted((results / PLOTS).glob("*.svg")):
        if f"{PLOTS}/{stale.name}" not in files:
            stale.unlink()


def _plot(record: Record) -> bytes:
    from harness.publish.plots import throughput

    return throughput(record)


def _tidy(text: str) -> str:
    """At most one empty line in a row."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip() or (lines and lines[-1]):
            lines.append(line.rstrip())
    return "\n".join(lines).rstrip() + "\n"


def _bench(shown: Shown) -> dict[str, Any]:
    record = shown.record
    assert record.verdict is not None
    assert record.identity.digest is not None
    engine = record.identity.engine or {}
    policies = "; ".join(f"{name} = {arm.policy_key} ({arm.policy_source})" for name, arm in record.arms.items())
    columns, rows = bench_table(record)
    return {
        "title": title(record),
        "columns": columns,
        "rows": rows,
        "footnote": footnote(rows),
        "facts": [
            f"Policies: {policies}.",
            f"Model: {models(record)}.",
            f"Asked: {workload(record)}.",
            f"Machine: {machine(record)}. Engine: {engine.get('name')} {engine.get('version')}.",
            f"Run {link(record)}, {record.created}, {code(record)}, identity {record.identity.digest[:12]}, "
            f"verdict {record.verdict.outcome}{_beside(shown)}.",
        ],
        "warnings": _warnings(shown),
        "outcome": record.verdict.outcome,
        "reasons": record.verdict.reasons,
        "plot": f"{PLOTS}/{record.id}.svg",
    }


def _beside(shown: Shown) -> str:
    """Nobody should take the best of many for the only one."""
    return f"; {shown.others} other complete of the same question, listed below" if shown.others else ""


def _warnings(shown: Shown) -> list[str]:
    return [f"{title(record)}: newer run {link(record)}: {_why(record)}" for record in shown.newer]


def _why(record: Record) -> str:
    if record.verdict is None:
        return f"{record.status}: {record.error or 'no reason'}"
    return f"verdict {record.verdict.outcome}" + "".join(f"; {reason}" for reason in record.verdict.reasons)


def _gate(shown: Shown) -> list[str]:
    record = shown.record
    found, control, config = record.gates["identity"], record.gates["control"], record.identity.config
    return [
        model(record),
        config["engine"]["name"],
        ", ".join([config["traffic"]["name"], *unusual(record), *changes(record)]),
        f"{found['compared']}/{found['expected']}",
        f"{found['tokens']:,}",
        str(found["mismatches"]),
        f"{100 * found['bound']:.2g} %",
        f"{control['policy']}: {control['relaxed']} relaxed, {control['outputs_changed']}/{control['items']} changed",
        f"{record.verdict.outcome if record.verdict else 'none'}, {link(record)}, {code(record)}{_beside(shown)}",
    ]


def _calibration(shown: Shown) -> list[str]:
    record = shown.record
    found, config = record.summary["calibration"], record.identity.config
    return [
        model(record),
        config["engine"]["name"],
        ", ".join([config["traffic"]["name"], *unusual(record), *changes(record)]),
        str(len(record.workload["items"])),
        f"{found['rejections']}, {found['ratios']} positive",
        f"{found['quantile']:g}",
        "none: no positive ratio" if found["value"] is None else f"{found['value']:.4f}",
        f"{link(record)}, {code(record)}{_beside(shown)}",
    ]


def _coverage(benches: Sequence[Record]) -> list[list[str]]:
    newest = {}
    for record in sorted(benches, key=lambda record: record.created):
        if is_recipe(record):
            config = record.identity.config
            newest[config["model"]["name"], config["engine"]["name"]] = record
    rows = []
    for name in choices("model"):
        row = [name]
        for engine in choices("engine"):
            run = newest.get((name, engine))
            reason = unsupported(pair(name, engine))
            row.append(_ran(run) if run else f"unsupported ({reason})" if reason else NOT_RUN)
        rows.append(row)
    return rows


def _ran(record: Record) -> str:
    """A run that did not pass is no sign that a pair works."""
    reported = " (as the server reports)" if is_reported(record) else ""
    return link(record) + reported + ("" if _passed(record) else f", {_why(record).partition(';')[0]}")


def _stated(figure: Published) -> list[str]:
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
    ]


def _other(run: Loaded) -> list[str]:
    record = run.record
    if record is None or run.problems:
        known = record.task if record else "unknown"
        return [run.folder.name, known, "unknown", "unknown", "unknown", "unsound", "; ".join(run.problems)]
    config = record.identity.config
    why = record.error or f"{_why(record)}; another run of the same question is shown"
    return [link(record), record.task, model(record), config["engine"]["name"], traffic(record), record.status, why]
