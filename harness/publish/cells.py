"""Table cells. Never blank: a value, or the word that says why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.records.schema import Record

NOT_RUN = "not run"
UNKNOWN = "n/a"
MINUS = "\N{MINUS SIGN}"


def number(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def signed(value: float, digits: int, unit: str) -> str:
    text = f"{abs(value):.{digits}f}"
    sign = "" if float(text) == 0 else "+" if value > 0 else MINUS
    return f"{sign}{text}{unit}"


def change(estimate: Mapping[str, Any] | None, digits: int = 1, unit: str = " %") -> str:
    """`+4.5 % [+4.1, +4.9]`: a fraction in percent with its interval, or n/a."""
    if not estimate or estimate["value"] is None:
        return UNKNOWN
    text = signed(100 * estimate["value"], digits, unit)
    if estimate["low"] is None or estimate["high"] is None:
        return f"{text} [no interval]"
    return f"{text} [{signed(100 * estimate['low'], digits, '')}, {signed(100 * estimate['high'], digits, '')}]"


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


COLUMNS = (
    "arm",
    "TPS",
    "TPS per GPU",
    "change",
    "wall per item, s",
    "change ",
    "tokens per step *",
    "accuracy",
    "change, pp",
    "unparsed",
    "truncated",
    "identity gate",
)
FOOTNOTE = (
    "TPS: ids the engine returned over the wall time of the arm's own requests, one at a time on each replica; "
    "per GPU: over the GPUs of one replica. "
    "* output tokens per verify step, bonus token included. Intervals are 95 %, paired by item."
)


def arm_cells(record: Record, arm: str) -> list[str]:
    """One row of COLUMNS."""
    found = record.summary["arms"][arm]
    base = arm == record.summary["baseline"]
    differ = found.get("change") or {}
    accuracy = differ.get("accuracy") or {}
    scored = sum(found["outcomes"].values())
    flags = [f"{count} {kind}" for kind, count in found["errors"].items()]
    if scored and found["not_scored"]:
        flags.append(f"{found['not_scored']} not scored")
    if differ.get("degenerate"):
        flags.append("degenerate: loops")
    return [
        arm + (f" ({', '.join(flags)})" if flags else ""),
        number(found["tps"]["value"], 1),
        number(found["tps_per_gpu"]["value"], 1) if found["tps_per_gpu"] else "no GPU",
        "baseline" if base else change(differ.get("tps")),
        number(found["wall_per_item"]["value"], 3),
        "baseline" if base else change(differ.get("wall_per_item")),
        number(found["tokens_per_step"]["value"]),
        f"{percent(found['accuracy'])} ({found['outcomes']['correct']}/{scored})" if scored else "not scored",
        "baseline" if base else change(accuracy.get("change"), 2, "") if scored else "not scored",
        str(found["outcomes"]["unparsed"]) if scored else "not scored",
        str(found["outcomes"]["truncated"]) if scored else "not scored",
        identity(record, arm),
    ]
