"""Scores rows in place, after the timed arms and with the engine down: code answers run, and their limits matter."""

from __future__ import annotations

from collections.abc import Sequence

from harness.records import Row
from harness.score import SandboxError, Score, score
from harness.traffic import Item, Traffic

ERROR = "error"  # of the scorer: neither right nor wrong


def score_rows(traffic: Traffic, rows: Sequence[Row]) -> None:
    """Equal answers to one item are scored once. A row without an answer stays without an outcome."""
    items = {item.id: item for item in traffic.items}
    known: dict[tuple[str, str, str], Score | SandboxError] = {}
    for row in rows:
        if row.error is not None or row.finish is None:
            continue
        key = row.item, row.text, row.finish
        if key not in known:
            known[key] = _score(items[row.item], row.text, row.finish)
        found = known[key]
        if isinstance(found, Score):
            row.outcome, row.parsed, row.rule = found.outcome, found.parsed, found.rule
        else:
            row.outcome, row.rule = ERROR, str(found)


def _score(item: Item, text: str, finish: str) -> Score | SandboxError:
    try:
        return score(item, text, finish)
    except SandboxError as error:
        return error
