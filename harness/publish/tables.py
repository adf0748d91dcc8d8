"""results/README.md and its plots: pure functions of the records, published.yaml and the recipes.

`render` returns every derived file as bytes; `write` puts them there, tables-check compares. The newest sound run of a
key is shown, one that passed before one that did not; an incomplete or failed run is listed, and replaces nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.config import ROOT, choices
from harness.launch.capability import pair, unsupported
from harness.publish.cells import COLUMNS, FOOTNOTE, NOT_RUN, arm_cells
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
    return msgspec.yaml.decode(path.read_bytes(), type=list[Published])


def key(record: Record) -> tuple[str, ...]:
    """What a row stands for: two runs of one key answer the same question."""
    config = record.identity.config
    policies = sorted({arm.policy_key for arm in record.arms.values()})
    kind = (record.launch or {}).get("kind", config["launch"]["name"])
    return (
        record.task,
        config["model"]["name"],
        config["engine"]["name"],
        str(kind),
        config["traffic"]["name"],
        str(len(record.workload["items"])),
        *policies,
    )


def choose(runs: Sequence[Loaded]) -> dict[tuple[str, ...], Loaded]:
    """The run shown for each key."""
    shown: dict[tuple[str, ...], Loaded] = {}
    for run in runs:
        if not run.complete or run.record is None:
            continue
        held = shown.get(key(run.record))
        if held is None or _passed(run) or not _passed(held):
            shown[key(run.record)] = run
    return dict(sorted(shown.items()))


def _passed(run: Loaded) -> bool:
    return run.record is not None and run.record.verdict is not None and run.record.verdict.outcome == "pass"


def render(results: Path, runs: Sequence[Loaded] | None = None) -> dict[str, bytes]:
    """Every derived file, by path below `results`."""
    runs = read_all(results) if runs is None else runs
    shown = choose(runs)
    records = [run.record for run in shown.values() if run.record is not None]
    benches = [record for record in records if record.task == "bench"]
    files = {f"{PLOTS}/{record.id}.svg": _plot(record) for record in benches}
    environment = Environment(
        loader=PackageLoader("harness", "publish"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    by_kind = published(results)
    text = environment.get_template("README.md.j2").render(
        table=markdown,
        footnote=FOOTNOTE,
        benches=[_bench(record) for record in benches],
        gate_columns=GATE_COLUMNS,
        gates=[_gate(record) for record in records if record.task == "gate"],
        calibration_columns=CALIBRATION_COLUMNS,
        calibrations=[_calibration(record) for record in records if record.task == "calibrate"],
        coverage_columns=("model", *choices("engine")),
        coverage=_coverage(benches),
        published_columns=PUBLISHED_COLUMNS,
        published=[
            (kind.capitalize(), [_stated(figure) for figure in by_kind if figure.kind == kind])
            for kind in dict.fromkeys(figure.kind for figure in by_kind)
        ],
        other_columns=OTHER_COLUMNS,
        others=[_other(run) for run in runs if run not in shown.values()],
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


def link(record: Record) -> str:
    return f"[{record.id}](runs/{record.id}/record.json)"


def title(record: Record) -> str:
    config = record.identity.config
    launched = record.launch or {}
    replicas = f", {launched['replicas']} replicas" if launched.get("replicas", 1) > 1 else ""
    foreign = ", adapter differs from this checkout" if launched.get("foreign_adapter") else ""
    where = f" (attached server{foreign})" if launched.get("attached") else ""
    where = f" (docker{replicas})" if launched.get("kind") == "docker" else where
    items = len(record.workload["items"])
    return f"{config['model']['name']} on {config['engine']['name']}{where}, {config['traffic']['name']}, {items} items"


def machine(record: Record) -> str:
    found = record.environment
    names = [gpu["name"] for gpu in found["gpus"]]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{found['cpu']}, {found['cores']} cores" + (f", {counted}" if counted else ", no GPU")


def code(record: Record) -> str:
    commit, dirty = record.identity.code["commit"], record.identity.code["dirty"]
    text = f"commit {commit[:12]}" if commit else f"content {record.identity.code['sha256'][:12]}"
    return text + (" with changes" if dirty else "")


def _bench(record: Record) -> dict[str, Any]:
    assert record.verdict is not None
    assert record.identity.digest is not None
    engine = record.identity.engine or {}
    policies = "; ".join(f"{name} = {arm.policy_key} ({arm.policy_source})" for name, arm in record.arms.items())
    return {
        "title": title(record),
        "columns": COLUMNS,
        "rows": [arm_cells(record, arm) for arm in record.arms],
        "caption": f"Policies: {policies}. Machine: {machine(record)}. Engine {engine.get('version')}. "
        f"Run {link(record)}, {record.created}, {code(record)}, identity {record.identity.digest[:12]}, "
        f"verdict {record.verdict.outcome}.",
        "outcome": record.verdict.outcome,
        "reasons": record.verdict.reasons,
        "plot": f"{PLOTS}/{record.id}.svg",
    }


def _gate(record: Record) -> list[str]:
    found, control, config = record.gates["identity"], record.gates["control"], record.identity.config
    return [
        config["model"]["name"],
        config["engine"]["name"],
        config["traffic"]["name"],
        f"{found['compared']}/{found['expected']}",
        f"{found['tokens']:,}",
        str(found["mismatches"]),
        f"{100 * found['bound']:.2g} %",
        f"{control['policy']}: {control['relaxed']} relaxed, {control['outputs_changed']}/{control['items']} changed",
        f"{record.verdict.outcome if record.verdict else 'none'}, {link(record)}, {code(record)}",
    ]


def _calibration(record: Record) -> list[str]:
    found, config = record.summary["calibration"], record.identity.config
    return [
        *(config[group]["name"] for group in ("model", "engine", "traffic")),
        str(len(record.workload["items"])),
        f"{found['rejections']}, {found['ratios']} positive",
        f"{found['quantile']:g}",
        "none: no positive ratio" if found["value"] is None else f"{found['value']:.4f}",
        f"{link(record)}, {code(record)}",
    ]


def _coverage(benches: Sequence[Record]) -> list[list[str]]:
    newest = {}
    for record in sorted(benches, key=lambda record: record.created):
        config = record.identity.config
        newest[config["model"]["name"], config["engine"]["name"]] = record
    rows = []
    for model in choices("model"):
        row = [model]
        for engine in choices("engine"):
            run = newest.get((model, engine))
            reason = unsupported(pair(model, engine))
            row.append(link(run) if run else f"unsupported ({reason})" if reason else NOT_RUN)
        rows.append(row)
    return rows


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
    outcome = record.verdict.outcome if record.verdict else "none"
    why = record.error or f"verdict {outcome}, another run of the same kind is shown"
    names = [config[group]["name"] for group in ("model", "engine", "traffic")]
    return [link(record), record.task, *names, record.status, why]
