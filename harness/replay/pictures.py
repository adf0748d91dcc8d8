"""Pictures of a replay: numbers first, kept in its record, and the SVG that is made of them alone."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")

from matplotlib import pyplot

from harness.publish.plots import STYLE
from harness.replay.record import Entry
from harness.replay.table import Array, Table

BINS = 24
COLORS = {"all": "#222222", "think": "#4477aa", "answer": "#cc6677"}


def first_mismatch(table: Table) -> tuple[Array, Array]:
    """The first draft of each block that is not the argmax: (block, position)."""
    missed = ~table.matched & table.verified
    block = np.flatnonzero(missed.any(1))
    return block, missed[block].argmax(1)


def numbers(table: Table, masks: Mapping[str, Array]) -> dict[str, Any]:
    """regret: blocks by the regret of their first mismatch, at most each edge. entropy: of the positions that follow a
    matched prefix, how many there are and how many match, by the entropy of the target's row."""
    block, position = first_mismatch(table)
    regret = table.regret[block, position]
    whole = np.isfinite(regret)
    edges = np.linspace(0, 8, BINS + 1)
    below = {name: [int((regret[whole & mask[block]] <= edge).sum()) for edge in edges] for name, mask in masks.items()}
    totals = {name: int((whole & mask[block]).sum()) for name, mask in masks.items()}
    reached = np.logical_and.accumulate(np.column_stack([np.ones(len(table), bool), table.matched[:, :-1]]), axis=1)
    seen = reached & table.verified & np.isfinite(table.entropy[:, :-1])
    bins = np.linspace(0, max(0.1, float(table.entropy[:, :-1][seen].max(initial=0.0))), BINS + 1)
    at = np.clip(np.digitize(table.entropy[:, :-1], bins) - 1, 0, BINS - 1)
    entropy = {}
    for name, mask in masks.items():
        here = seen & mask[:, None]
        entropy[name] = {
            "positions": np.bincount(at[here], minlength=BINS).tolist(),
            "matched": np.bincount(at[here & table.matched], minlength=BINS).tolist(),
        }
    return {
        "regret": {"edges": edges.tolist(), "at_most": below, "blocks": totals},
        "entropy": {"edges": [float(edge) for edge in bins], **entropy},
    }


def draw(policies: Sequence[Entry], pictures: Mapping[str, Any]) -> bytes:
    """Tokens per step, acceptance by position, regret of first mismatches, matches by entropy; SVG."""
    shown = [entry for entry in policies if entry.tokens_per_step.get("all") and not entry.grid]
    with matplotlib.rc_context(STYLE):
        size = (9, 3.0 + max(2.2, 0.28 * len(shown)))
        figure, axes = pyplot.subplots(2, 2, figsize=size, layout="constrained")
        _bars(axes[0][0], shown)
        _positions(axes[0][1], shown)
        _regret(axes[1][0], pictures["regret"])
        _entropy(axes[1][1], pictures["entropy"])
        for each in axes.flat:
            each.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return buffer.getvalue()


def _bars(axes: Any, shown: Sequence[Entry]) -> None:
    for place, entry in enumerate(shown):
        found = entry.tokens_per_step["all"] or {}
        value, low, high = (found[name] for name in ("value", "low", "high"))
        whiskers = None if low is None or high is None else [[max(value - low, 0)], [max(high - value, 0)]]
        axes.barh(place, value, xerr=whiskers, color="#4477aa", ecolor="#222222", height=0.6, capsize=2)
    axes.set_yticks(range(len(shown)), [entry.name for entry in shown])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per step, bonus included (95 %, by prompt)")


def _positions(axes: Any, shown: Sequence[Entry]) -> None:
    markers = "os^vD<>ph*"
    for place, entry in enumerate(shown):
        drafts = range(1, len(entry.acceptance) + 1)
        axes.plot(drafts, entry.acceptance, marker=markers[place % len(markers)], markersize=3, label=entry.name, lw=1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft")
    axes.set_ylabel("share of blocks that accept it")
    if shown:
        axes.legend(frameon=False, fontsize=7, ncols=2)


def _regret(axes: Any, found: Mapping[str, Any]) -> None:
    for name, counts in found["at_most"].items():
        if total := found["blocks"][name]:
            axes.plot(found["edges"], [count / total for count in counts], color=COLORS[name], label=name)
    axes.set_ylim(0, 1)
    axes.set_xlabel("regret of the first mismatch, nats")
    axes.set_ylabel("share of blocks, at most")
    _legend(axes)


def _entropy(axes: Any, found: Mapping[str, Any]) -> None:
    edges = found["edges"]
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    for name, counts in found.items():
        if name == "edges":
            continue
        points = [
            (x, hit / n) for x, n, hit in zip(middles, counts["positions"], counts["matched"], strict=True) if n >= 10
        ]
        if points:
            axes.plot(*zip(*points, strict=True), color=COLORS[name], marker="o", markersize=3, label=name)
    axes.set_ylim(0, 1)
    axes.set_xlabel("entropy of the target, nats (bins of 10 positions or more)")
    axes.set_ylabel("share of drafts that match")
    _legend(axes)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
