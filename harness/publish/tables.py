"""results/README.md, its plots and the site: pure functions of the records, published.yaml and the recipes.

`render` returns every derived file as bytes; `write` puts them there, tables-check compares. Which run is shown for
which question: selection.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.publish import parts, sections
from harness.publish.cells import bench_table, footnote
from harness.publish.labels import code, link, machine, models, thresholds, title, workload
from harness.publish.parts import Cell
from harness.publish.selection import SMALL, Shown, Sweep, is_small, passed, select
from harness.publish.site import SITE, page
from harness.records import Record
from harness.records.read import Loaded, read_all
from harness.records.run import write_atomically
from harness.replay import cost

README = "README.md"
PLOTS = "plots"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A pipe table; an empty cell is a mistake of the caller."""
    lines = [[column.strip() for column in columns], ["---"] * len(columns)]
    for row in rows:
        cells = [" ".join(parts.markdown(cell).replace("|", "\\|").split()) for cell in row]
        if len(cells) != len(columns) or not all(cells):
            raise ValueError(f"table: expected {len(columns)} filled cells, found {cells}")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render(results: Path, runs: Sequence[Loaded] | None = None) -> dict[str, bytes]:
    """Every derived file, by path below `results`."""
    runs = read_all(results) if runs is None else runs
    chosen = select(runs, sections.sweeps_of(results))
    measured = [each.record for each in chosen.benches]
    figures, replays = sections.published(results), sections.replays_of(results)
    files = {f"{PLOTS}/{each.record.id}.svg": _plot(each.record) for each in chosen.benches}
    environment = Environment(
        loader=PackageLoader("harness", "publish"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template("README.md.j2").render(
        table=markdown,
        benches=[_bench(each) for each in chosen.benches if passed(each.record) and not is_small(each.record)],
        small=[_bench(each) for each in chosen.benches if passed(each.record) and is_small(each.record)],
        most=SMALL,
        failed=[_bench(each) for each in sections.failed(chosen)],
        sweeps=[_sweep(each) for each in chosen.sweeps],
        phase_columns=sections.PHASES,
        phases=[row for each in chosen.benches if passed(each.record) for row in sections.phase_rows(each)],
        replay_columns=sections.REPLAYED,
        replays=[
            (sections.replay_title(each), sections.replay_rows(each), map(parts.markdown, sections.replay_facts(each)))
            for each in sections.replayed(replays)
        ],
        cost_columns=cost.COLUMNS,
        costs=sections.costs(results),
        gate_columns=sections.GATES,
        gates=[sections.gate(each) for each in chosen.gates],
        gate_warnings=_warnings(chosen.gates),
        calibration_columns=sections.CALIBRATIONS,
        calibrations=[sections.calibration(each) for each in chosen.calibrations],
        calibration_warnings=_warnings(chosen.calibrations),
        coverage=[
            (("model", *names), sections.coverage(measured, names))
            for names in (sections.engines(), sections.engines(variants=True))
            if names
        ],
        rule_columns=("rule", *sections.engines()),
        rules=sections.rules(measured, sections.engines()),
        published_columns=(*sections.STATED, sections.OURS),
        published=[
            (kind.capitalize(), [sections.stated(figure, chosen.benches) for figure in figures if figure.kind == kind])
            for kind in dict.fromkeys(figure.kind for figure in figures)
        ],
        other_columns=sections.OTHERS,
        others=[*(sections.other(run) for run in chosen.others), *sections.replays_apart(replays)],
    )
    return {README: _tidy(text).encode(), **files, SITE: page(results, chosen, figures, replays)}


def write(results: Path, only: str | None = None) -> None:
    """Derived files, again; only: one of them. Plots of runs that are no longer shown go."""
    files = render(results)
    for name, content in files.items():
        if only in (None, name):
            (results / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(results / name, content)
    for stale in sorted((results / PLOTS).glob("*.svg")):
        if only is None and f"{PLOTS}/{stale.name}" not in files:
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
        "histogram": sections.histogram(record),
        "footnote": footnote(rows, list(record.arms), record),
        "facts": [
            f"Policies: {policies}.",
            f"Model: {models(record)}.",
            f"Asked: {workload(record)}.",
            f"Machine: {machine(record)}. Engine: {engine.get('name')} {engine.get('version')}.",
            f"Run {parts.markdown(link(record))}, {record.created}, {code(record)}, identity "
            f"{record.identity.digest[:12]}, verdict {record.verdict.outcome} ({thresholds(record)})"
            f"{sections.beside(shown)}.",
        ],
        "warnings": _warnings([shown]),
        "outcome": record.verdict.outcome,
        "reasons": record.verdict.reasons,
        "plot": f"{PLOTS}/{record.id}.svg",
    }


def _warnings(shown: Iterable[Shown]) -> list[str]:
    return [parts.markdown(line) for each in shown for line in sections.warnings(each)]


def _sweep(sweep: Sweep) -> dict[str, Any]:
    names = sections.varied(sweep)
    return {
        "title": sections.sweep_title(sweep),
        "columns": (*(name.rpartition(".")[2] for name in names), *sections.POINTS),
        "rows": [sections.point_row(point, names) for point in sweep.points],
        "other_columns": sections.OTHERS,
        "others": sections.without_pass(sweep),
    }
