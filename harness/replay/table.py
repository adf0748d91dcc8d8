"""The blocks a replay counts, as arrays: which blocks, in which order, where a request ends, where it thinks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.capture.layout import DRAWN, SAMPLED, CaptureError
from harness.replay.reader import Capture

Array = NDArray[Any]
NO_CUT = 2**31 - 1
NOT_MEASURED = ("probe-", "warmup-")  # request ids of a harness that asks whether an engine is ready, and warms it up
UNNAMED = re.compile(r"[0-9a-f]{32}")  # an engine's own id of a request whose client gave none


@dataclass
class Table:
    """Blocks by request and, within one, by step. N blocks of up to K drafts.

    columns: as captured (adapters/capture). prompts, rids: of each request. first: index of each request's first
    block; count: its blocks. cut [N]: tokens that a block may commit: what was left of max_new_tokens, and no more than
    was kept where its request ended; NO_CUT where neither is known. limits [requests]: max_new_tokens, or 0: not known.
    """

    columns: dict[str, Array]
    prompts: list[list[int]]
    first: Array
    count: Array
    cut: Array
    rids: list[str]
    limits: Array = field(default_factory=lambda: np.empty(0, np.int64))

    def __getattr__(self, name: str) -> Array:
        try:
            return self.__dict__["columns"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __len__(self) -> int:
        return len(self.cut)

    @property
    def drafts(self) -> int:
        return self.columns["draft"].shape[1]

    @property
    def positions(self) -> int:
        return int(self.columns["live"].sum())

    @cached_property
    def verified(self) -> Array:
        """[N, K]: the drafts that were verified; the rule sees no others."""
        return np.arange(self.drafts) < self.columns["live"][:, None]

    @cached_property
    def matched(self) -> Array:
        """[N, K]: the draft is the engine's argmax, by id."""
        return self.columns["draft"] == self.columns["argmax"][:, :-1]

    @cached_property
    def regret(self) -> Array:
        """[N, K] float32 nats: z(argmax) - z(draft), as the engine subtracts them."""
        return self.columns["z_max"][:, :-1] - self.columns["z_x"]

    @cached_property
    def drawn(self) -> Array:
        return self.columns["flags"] & DRAWN != 0

    @property
    def sampled(self) -> bool:
        """Of sampled requests (all of them, or none: a selection has one policy)."""
        return bool((self.columns["flags"] & SAMPLED != 0).any())

    def inside(self, start: int, end: int) -> Array:
        """[N, K + 1] bool: the last of the two ids before draft i is start. Before it: the prompt, what the engine
        committed, the drafts of its own block in front of it."""
        marks = _marks(self.columns["draft"], start, end)
        K = self.drafts
        kept = np.minimum(self.columns["length"], self.cut)
        committed = np.where(np.arange(K) < kept[:, None], marks, 0)
        bonus = np.where(self.columns["length"] < self.cut, _marks(self.columns["bonus"], start, end), 0)
        own = _last(np.column_stack([committed, bonus]))
        anchor = _marks(self.columns["anchor"], start, end)
        before = np.empty(len(self), np.int8)
        before[1:] = own[:-1]
        for prompt, at in zip(self.prompts, self.first, strict=True):
            found = _last(_marks(np.array([prompt], np.int64).reshape(1, -1), start, end))[0] if prompt else 0
            before[at] = anchor[at] or found or -1
        state = _carried(before)
        return np.column_stack([state, *_running(state, marks)]) == 1


def _marks(ids: Array, start: int, end: int) -> Array:
    return (ids == start).astype(np.int8) - (ids == end).astype(np.int8)


def _last(marks: Array) -> Array:
    """[N, n] -> the last mark of each row that is not 0, else 0."""
    last = np.zeros(len(marks), np.int8)
    for column in marks.T:
        last = np.where(column != 0, column, last)
    return last


def _carried(marks: Array) -> Array:
    """[N]: zeros take the mark before them. Requests begin with one that is not 0."""
    index = np.maximum.accumulate(np.where(marks != 0, np.arange(len(marks)), 0))
    return marks[index] if len(marks) else marks


def _running(state: Array, marks: Array) -> list[Array]:
    states = []
    for column in marks.T:
        state = np.where(column != 0, column, state)
        states.append(state)
    return states


def policies(capture: Capture) -> dict[str, int]:
    """Measured requests by the key of the policy that ran."""
    found: dict[str, int] = {}
    for number in _measured(capture):
        policy = capture.requests[number]["policy"]
        found[policy] = found.get(policy, 0) + 1
    return found


def _measured(capture: Capture) -> list[int]:
    """Requests that are no harness's probe or warm-up, nor, where a harness names its requests, an engine's own."""
    rids = {number: str(info["rid"]) for number, info in capture.requests.items()}
    named = any(rid.startswith(NOT_MEASURED) for rid in rids.values())
    return [n for n, rid in rids.items() if not (rid.startswith(NOT_MEASURED) or (named and UNNAMED.fullmatch(rid)))]


def prompt_sha256(ids: Sequence[int]) -> str:
    """As a record's row has it (harness/tasks/session.py)."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def select(capture: Capture, policy: str, wanted: frozenset[str] | None = None) -> tuple[Table, list[str]]:
    """The countable blocks of one policy's requests, and notes on what was left out. wanted: SHA-256 of prompts that
    count (None: all).

    Left out: probes and warm-up; steps an engine ran past the end of a request; what follows a gap (a
    dropped block), because ledger and phase are unknown behind it. Requests that did not end keep all their blocks.
    """
    chosen = [number for number in _measured(capture) if capture.requests[number]["policy"] == policy]
    if not chosen:
        raise CaptureError(
            f"capture: policy {policy}: expected one of {', '.join(policies(capture))}, found no request"
        )
    if wanted is not None:
        asked, of = len(chosen), capture.requests
        chosen = [number for number in chosen if prompt_sha256(of[number].get("prompt") or []) in wanted]
        if not chosen:
            raise CaptureError(f"replay.shared: expected requests with prompts of the runs, found none of {asked}")
    mask = np.isin(capture.columns["request"], chosen)
    columns = {name: array[mask] for name, array in capture.columns.items()}
    order = np.lexsort((columns["step"], columns["request"]))
    columns = {name: array[order] for name, array in columns.items()}
    request, step = columns["request"], columns["step"]
    unknown = (NO_CUT, 0)
    ended = np.array([capture.ends.get(int(number), unknown) for number in request], np.int64).reshape(-1, 2)
    void = step >= ended[:, 0]
    starts = np.flatnonzero(np.r_[True, request[1:] != request[:-1]]) if len(request) else np.empty(0, np.int64)
    rank = np.arange(len(request)) - np.repeat(starts, np.diff(np.r_[starts, len(request)]))
    gap = (step != rank) & ~void
    keep = ~void & ~gap
    notes = [f"{int(gap.sum())} blocks behind a dropped one were left out"] if gap.any() else []
    columns, ended = {name: array[keep] for name, array in columns.items()}, ended[keep]
    request = columns["request"]
    first = np.flatnonzero(np.r_[True, request[1:] != request[:-1]]) if len(request) else np.empty(0, np.int64)
    count = np.diff(np.r_[first, len(request)])
    short = (columns["step"] + 1 == ended[:, 0]) & (ended[:, 1] < columns["length"] + 1)
    cut = np.where(short, ended[:, 1], NO_CUT).astype(np.int64)
    infos = [capture.requests[int(number)] for number in request[first]]
    limits = np.array([info.get("max_new_tokens") or 0 for info in infos], np.int64)
    cut = np.minimum(cut, _room(columns["length"], first, count, limits))
    if len(open_ := [n for n in np.unique(request) if int(n) not in capture.ends]):
        notes.append(f"{len(open_)} requests did not end within the capture")
    if capture.manifest["temperature_applied"]:
        columns = _unscaled(columns)
    prompts, rids = [info.get("prompt") or [] for info in infos], [info["rid"] for info in infos]
    return Table(columns, prompts, first, count, cut, rids, limits), notes


def _room(length: Array, first: Array, count: Array, limits: Array) -> Array:
    """[N]: tokens left of max_new_tokens before each block: the prefill gave one, each block its drafts and a bonus."""
    before = np.cumsum(length.astype(np.int64) + 1) - (length + 1)
    spent = 1 + before - np.repeat(before[first], count)
    limit = np.repeat(limits, count)
    return np.where(limit > 0, np.maximum(limit - spent, 1), NO_CUT)


def _unscaled(columns: dict[str, Array]) -> dict[str, Array]:
    """Logits of an engine that had divided them by the temperature, raw again. lse and entropy are at T in any case."""
    T = columns["temperature"][:, None]
    scaled = {name: columns[name] * T for name in ("z_x", "z_max")}
    raw = np.where(T == 1, columns["entropy"], np.nan).astype(np.float32)
    return columns | scaled | {"entropy_raw": raw}


def by_request(table: Table, values: Array) -> Array:
    """[N] -> sums over each request's blocks, [requests] float64."""
    return np.add.reduceat(values.astype(np.float64), table.first) if len(table) else np.empty(0)


def concatenated(tables: Sequence[Table]) -> Table:
    """Tables one behind the other, their requests apart."""
    offsets = np.cumsum([0, *(len(table) for table in tables)])
    return Table(
        {name: np.concatenate([table.columns[name] for table in tables]) for name in tables[0].columns},
        [prompt for table in tables for prompt in table.prompts],
        np.concatenate([table.first + offset for table, offset in zip(tables, offsets, strict=False)]),
        np.concatenate([table.count for table in tables]),
        np.concatenate([table.cut for table in tables]),
        [rid for table in tables for rid in table.rids],
        np.concatenate([table.limits for table in tables]),
    )
