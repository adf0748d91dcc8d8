"""The terminal of a replay: 80 columns, each table with what it does not say below it."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from harness.publish.console import table
from harness.replay.record import Entry, Replay


def report(record: Replay) -> None:
    about = record.capture
    print(
        f"{about['target']} on {about['engine']}, blocks of {about['policy']} "
        f"(temperature {about['temperature']:g}, K = {about['K']})"
    )
    print(f"{about['requests']} requests, {about['blocks']:,} blocks, {about['positions']:,} verified drafts")
    named = [entry for entry in record.policies if not entry.grid]
    grid = [entry for entry in record.policies if entry.grid]
    phases = [name for name in ("think", "answer") if any(entry.tokens_per_step.get(name) for entry in named)]
    columns = ["policy", "tokens/step, 95 %", f"vs {record.baseline}, 95 %", *phases]
    table(columns, [_row(entry, record.baseline, phases) for entry in named])
    drafts = range(1, about["K"] + 1)
    rows = [[entry.name, *(f"{100 * share:.0f}" for share in entry.acceptance)] for entry in named if entry.acceptance]
    table(["% of blocks that accept draft", *map(str, drafts)], rows)
    if grid:
        table(columns, [_row(entry, record.baseline, phases) for entry in grid])
    if record.prediction is not None:
        _prediction(record.prediction)
    why = [f"{entry.name}: unsupported: {entry.why}" for entry in record.policies if entry.why]
    for line in (*why, *record.limits, *record.notes):
        print(fill(line, 80, initial_indent="- ", subsequent_indent="  "))


def _row(entry: Entry, baseline: str, phases: Sequence[str]) -> list[str]:
    every = entry.tokens_per_step.get("all")
    if every is None:
        return [entry.name, "unsupported", *[""] * (1 + len(phases))]
    change = entry.change.get("all")
    told = "baseline" if entry.name == baseline else "not run" if change is None else _with_interval(change, 100, 1)
    return [
        entry.name,
        _with_interval(every, 1, 2),
        told,
        *(_value(entry.tokens_per_step.get(name)) for name in phases),
    ]


def _value(found: dict[str, Any] | None) -> str:
    return "no blocks" if found is None else f"{found['value']:.2f}"


def _with_interval(found: dict[str, Any], scale: float, digits: int) -> str:
    """`4.61 [4.50, 4.72]`; a change, scaled to per cent, with its sign."""
    kind = f"+.{digits}f" if scale == 100 else f".{digits}f"
    value, low, high = (
        found[name] if found[name] is None else scale * found[name] for name in ("value", "low", "high")
    )
    unit = " %" if scale == 100 else ""
    return f"{value:{kind}}{unit} " + ("[too few]" if low is None else f"[{low:{kind}}, {high:{kind}}]")


def _prediction(found: dict[str, Any]) -> None:
    for point in found["curve"]:
        print(
            f"step time at {point['batch']} in flight: {1e3 * point['per_step_s']:.3f} ms a step of "
            f"{point['width']:.0f} rows, {1e3 * point['fixed_s']:.2f} ms a request, "
            f"{1e6 * point['per_prompt_token_s']:.0f} us a prompt token ({point['rows']} answers)"
        )
    rows, steps = [], []
    for each in found["rows"]:
        name = each["name"] + (f", {each['batch']} in flight" if each["batch"] > 1 else "")
        live = (each["live_tps"] or {}).get("value")
        outside = "outside the curve" if each["predicted_tps"] is None else None
        own = "fitted" if each["fitted"] else "not measured"
        rows.append(
            [
                name,
                "not run" if live is None else f"{live:.1f}",
                outside or f"{each['predicted_tps']:.1f}",
                "fitted" if each["fitted"] else _error(each["error"]),
                own if each["predicted_own_tps"] is None else f"{each['predicted_own_tps']:.1f}",
                own if each["predicted_own_tps"] is None else _error(each["error_own"]),
            ]
        )
        steps.append(
            [
                name,
                f"{each['predicted_tokens_per_step']:.2f}",
                f"{each['live_tokens_per_step']:.2f}",
                own if each["own_step"] is None else f"{each['own_step']:.3f}",
                each["own_from"] or own,
            ]
        )
    if rows:
        table(["policy", "TPS, live", "baseline's step", "error", "own step", "error"], rows)
        table(["tokens/step", "replayed", "live", "own step : baseline's", "measured in"], steps)
    for key, text in (("mean_abs_error", "the baseline's step time"), ("mean_abs_error_own", "each rule's own")):
        if found[key] is not None:
            print(f"mean absolute error of predicted TPS, with {text}: {100 * found[key]:.1f} %")
    for each in found["refused"]:
        why = f"{each['run']}, arm {each['arm']}: not compared: {'; '.join(each['why'])}"
        print(fill(why, 80, initial_indent="- ", subsequent_indent="  "))
    for note in found["notes"]:
        print(fill(note, 80, initial_indent="- ", subsequent_indent="  "))


def _error(error: float | None) -> str:
    return "not run" if error is None else f"{100 * error:+.1f} %"
