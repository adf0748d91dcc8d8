"""Scores rows in place, after the timed arms and with the engine down: code answers run, and their limits matter."""

from __future__ import annotations

from collections.abc import Sequence

from harness.records import Row
from harness.score import score
from harness.traffic import Traffic


def score_rows(traffic: Traffic, rows: Sequence[Row]) -> None:
    """Equal answers to one item are scored once. A row without an answer stays without an outcome."""
    items = {item.id: item for item in traffic.items}
    known: dict[tuple[str, str, str], tuple[str | None, str | None]] = {}
    for row in rows:
        if row.error is not None or row.finish is None:
            continue
        key = row.item, row.text, row.finish
        if key not in known:
            found = score(items[row.item], row.text, row.finish)
            known[key] = found.outcome, found.parsed
        row.outcome, row.parsed = known[key]
