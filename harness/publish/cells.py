"""Table cells. Never blank: a value, or the word that says why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.records.schema import Record

NOT_RUN = "not run"
UNKNOWN = "n/a"
NO_GPU = "no GPU"
PER_GPU = "TPS per GPU"
MINUS = "\N{MINUS SIGN}"


def number(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def signed(value: float, digits: int, unit: str) -> str:
    text = f"{abs(value):.{digits}f}"
    sign = "" if float(text) == 0 else "+" if value > 0 else MINUS
    return f"{sign}{text}{unit}"


def change(estimate: Mapping[str, Any] | None, digits: int = 1, unit: str = " %") -> str:
    """`+4.5 %`: a fraction in percent, or n/a."""
    return UNKNOWN if not estimate or estimate["value"] is None else signed(100 * estimate["value"], digits, unit)


def interval(estimate: Mapping[str, Any] | None, digits: int = 1) -> str:
    """`[+4.1, +4.9]`: of that change, in the same unit."""
    if not estimate or estimate["value"] is None:
        return UNKNOWN
    if estimate["low"] is None or estimate["high"] is None:
        return "no interval"
    return f"[{signed(100 * estimate['low'], digits, '')}, {signed(100 * estimate['high'], digits, '')}]"


def percent(estimate: Mapping[str, Any] | None, digits: int = 1) -> str:
    return UNKNOWN if not estimate or estimate["value"] is None else f"{100 * estimate['value']:.{digits}f} %"


def identity(record: Record, arm: str) -> str:
    """The identity gate of one arm's row."""
    gate = record.gates.get("identity")
    if arm == "asd-b0" and gate:
        if gate["mismatches"]:
            return f"FAIL {gate['mismatches']}/{gate['compared']}"
        return f"{gate['compared']}/{gate['expected']} equal"
    if arm == record.summary.get("baseline"):
        return "baseline"
    if record.arms[arm].temperature > 0:
        return "sampled"
    differ = record.summary["arms"][arm].get("change", {})
    return f"{differ['outputs_changed']}/{differ['items']} differ" if differ else UNKNOWN


FOOTNOTE = (
    "TPS: ids the engine returned over the wall time of the arm's own requests, one at a time on each replica. "
    "* output tokens per verify step, bonus token included. Changes are against the first arm, intervals are 95 %, "
    "both paired by item."
)


def arm_cells(record: Record, arm: str) -> dict[str, str]:
    """Every metric of one arm by its name, in the order of a table."""
    found = record.summary["arms"][arm]
    base = arm == record.summary["baseline"]
    differ = found.get("change") or {}
    accuracy = (differ.get("accuracy") or {}).get("change")
    scored = sum(found["outcomes"].values())

    def changed(estimate: Mapping[str, Any] | None, digits: int = 1, unit: str = " %") -> tuple[str, str]:
        return ("baseline",) * 2 if base else (change(estimate, digits, unit), interval(estimate, digits))

    tps, wall = changed(differ.get("tps")), changed(differ.get("wall_per_item"))
    points = changed(accuracy, 2, " pp") if scored else ("not scored",) * 2
    outcomes = {name: str(count) if scored else "not scored" for name, count in found["outcomes"].items()}
    return {
        "TPS": number(found["tps"]["value"], 1),
        PER_GPU: number(found["tps_per_gpu"]["value"], 1) if found["tps_per_gpu"] else NO_GPU,
        "TPS change": tps[0],
        "TPS change, 95 %": tps[1],
        "wall per item, s": number(found["wall_per_item"]["value"], 3),
        "wall change": wall[0],
        "wall change, 95 %": wall[1],
        "tokens per step *": number(found["tokens_per_step"]["value"]),
        "accuracy": percent(found["accuracy"]) if scored else "not scored",
        "correct": f"{found['outcomes']['correct']}/{scored}" if scored else "not scored",
        "accuracy change": points[0],
        "accuracy change, 95 %": points[1],
        "unparsed": outcomes["unparsed"],
        "truncated": outcomes["truncated"],
        "left out": _left_out(found, scored),
        "loops": "more" if differ.get("degenerate") else "none more" if differ else "baseline" if base else UNKNOWN,
        "identity": identity(record, arm),
    }


def _left_out(found: Mapping[str, Any], scored: int) -> str:
    """Requests without an answer, by kind, and answers without a score: in no number above."""
    flags = [f"{count} {kind}" for kind, count in found["errors"].items()]
    if scored and found["not_scored"]:
        flags.append(f"{found['not_scored']} not scored")
    return ", ".join(flags) or "none"


def bench_table(record: Record) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a metric per row, an arm per column, so that three arms fit 80 characters."""
    arms = {arm: arm_cells(record, arm) for arm in record.arms}
    metrics = next(iter(arms.values()))
    rows = [[metric, *(cells[metric] for cells in arms.values())] for metric in metrics]
    return ["metric", *arms], [row for row in rows if set(row[1:]) != {NO_GPU}]


def footnote(rows: Sequence[Sequence[str]]) -> str:
    """What the metrics of a table are."""
    shared = any(row[0] == PER_GPU for row in rows)
    return FOOTNOTE + (" Per GPU: over the GPUs of one replica." if shared else "")
