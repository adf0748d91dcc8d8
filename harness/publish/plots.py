"""Plots of records, as SVG whose bytes depend on the record alone."""

from __future__ import annotations

import io
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot

from harness.records import Record

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "specaccept",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
}
# Equal arms lie on one another (asd-b0 on strict): the first is wide, the next leave gaps, so that each is seen.
LINES: tuple[dict[str, Any], ...] = (
    {"color": "#bbbbbb", "linewidth": 4},
    {"color": "#4477aa", "linewidth": 1.5, "linestyle": "--"},
    {"color": "#cc6677", "linewidth": 1.5},
    {"color": "#222222", "linewidth": 1.5, "linestyle": ":"},
)


def throughput(record: Record) -> bytes:
    """Output tokens per second of each arm with its 95 % interval, and accepted drafts per verify step."""
    arms = record.summary["arms"]
    names = list(arms)
    with matplotlib.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 0.6 * len(names) + 1.4), layout="constrained")
        for position, name in enumerate(names):
            tps = arms[name]["tps"]
            value = tps["value"] or 0.0
            low, high = tps["low"], tps["high"]
            whiskers = None if low is None or high is None else [[max(value - low, 0)], [max(high - value, 0)]]
            left.barh(position, value, xerr=whiskers, color="#4477aa", ecolor="#222222", height=0.6, capsize=3)
            steps = arms[name]["histogram"]
            total = sum(steps) or 1
            shares = [count / total for count in steps]
            right.plot(range(len(steps)), shares, marker="o", markersize=3, label=name, **LINES[position % len(LINES)])
        left.set_yticks(range(len(names)), names)
        left.invert_yaxis()
        left.set_xlabel("output tokens per second")
        right.set_ylim(bottom=0)
        right.set_xlabel("drafts accepted in a verify step")
        right.set_ylabel("share of steps")
        right.legend(frameon=False)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return buffer.getvalue()
