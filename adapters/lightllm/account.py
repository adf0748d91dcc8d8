"""What a step really committed, counted on the host after the engine's own EOS and length cuts. No torch.

The engine's mtp_* counters of a request run past its end; these do not, so they can be compared with output ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from adapters.arm import SAMPLED_REQUEST, serving_rule
from adapters.policy import Policy
from adapters.rules.asd.report import BUDGET
from adapters.telemetry import Telemetry

MANY = 1024  # requests with steps that the telemetry was not told of, at most


@dataclass(slots=True)
class Detail:
    """One request, as adapters.telemetry.Counters counts it.

    step_lengths: drafts accepted by each block, in order: before the cuts, of live drafts.
    """

    blocks: int = 0
    drafts_verified: int = 0
    strict_accepted: int = 0
    relaxed: int = 0
    regret_charged: float = 0.0
    budget_exhausted: int = 0
    committed_tokens: int = 0
    step_lengths: list[int] = field(default_factory=list)

    def totals(self) -> tuple[float, ...]:
        """All but step_lengths, as TOTALS names them."""
        return (
            self.blocks,
            self.drafts_verified,
            self.strict_accepted,
            self.relaxed,
            self.regret_charged,
            self.budget_exhausted,
            self.committed_tokens,
        )

    def to_json(self) -> dict[str, Any]:
        """With accepted and the histogram of step_lengths."""
        lengths = self.step_lengths
        histogram = [lengths.count(n) for n in range(max(lengths, default=-1) + 1)]
        own = dict(zip(TOTALS, self.totals(), strict=True))
        return own | {"step_lengths": lengths, "accepted": sum(lengths), "histogram": histogram}


TOTALS = tuple(name for name in Detail.__slots__ if name != "step_lengths")


@dataclass(slots=True)
class Marks:
    """What the adapter keeps on an engine request (InferReq), which lives as long as the request owns its slot.

    temperature: of a greedy request; None: sampled. tag: the seed its client sent, None: none. drafts: columns that
    hold its current proposal, 0: junk. entered: its slot of the ledger was reset for it. is_open: it has a budget now.
    over: it has ended; what the step in flight adds is past its end. seen: the engine's own totals at the last look
    (steps, rows, accepted drafts). told: what of detail the telemetry has. listed: it has less than all.
    """

    temperature: float | None
    tag: int | None = None
    drafts: int = 0
    entered: bool = False
    is_open: bool = False
    over: bool = False
    listed: bool = False
    seen: tuple[int, int, int] = (0, 0, 0)
    told: tuple[float, ...] = (0,) * len(TOTALS)
    detail: Detail = field(default_factory=Detail)


ATTRIBUTE = "_specaccept_marks"


def marks_of(req: Any) -> Marks:
    """The marks of a request, made on first sight. Greedy on this engine: top_k = 1, whatever the temperature."""
    marks = getattr(req, ATTRIBUTE, None)
    if marks is None:
        param = req.sampling_param.shm_param
        seed = int(param.seed)
        marks = Marks(float(param.temperature) if param.top_k == 1 else None, None if seed == -1 else seed)
        setattr(req, ATTRIBUTE, marks)
    return marks


@dataclass(slots=True)
class Step:
    """One verify call as the host knows it: requests in row order, rows and live drafts of each.

    regret: per row, the charged regret of a relaxed row, negative elsewhere; stop: per request. Empty where the
    engine's own kernel decided. Filled after the step's copy to the host was waited for.
    """

    requests: list[Any]
    rows: list[int]
    live: list[int]
    regret: Sequence[float] = ()
    stop: Sequence[float] = ()


def groups(rows: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Requests in row order, and how many rows each has; the rows of one request are contiguous."""
    requests: list[Any] = []
    counts: list[int] = []
    last = None
    for req in rows:
        if req is last:
            counts[-1] += 1
        else:
            requests.append(req)
            counts.append(1)
            last = req
    return requests, counts


def step_of(run_reqs: Sequence[Any]) -> Step:
    """run_reqs: the request of every verified row."""
    requests, rows = groups(run_reqs)
    return Step(requests, rows, [min(n - 1, marks_of(req).drafts) for req, n in zip(requests, rows, strict=True)])


class Contradiction(Exception):
    """The engine's own totals of a request do not say what it reported."""


@dataclass
class Account:
    """Counts what steps committed, by request, and tells the telemetry when a request ends or somebody asks.

    Two threads post-process steps in turn. A step costs a few sums per request; nothing is looked at twice.

    finished: called once per request that ended and carries a tag, with a JSON object. ended: once per request that
    ended in a verify step, with its steps and the tokens kept of the last.
    """

    telemetry: Telemetry
    policy: Policy
    finished: Callable[[dict[str, Any]], None] | None = None
    ended: Callable[[Any, int, int], None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    listed: list[Marks] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.key = self.policy.key  # spelt once

    def add(self, step: Step, run_reqs: Sequence[Any], packs: Sequence[Any]) -> None:
        """A verify call that was post-processed. run_reqs, packs: the accepted rows and their update packs."""
        with self.lock:
            accepted: dict[int, int] = {}
            for req in run_reqs:
                accepted[id(req)] = accepted.get(id(req), 0) + 1
            first = 0
            for n, req in enumerate(step.requests):
                marks, rows = marks_of(req), accepted.get(id(req), 0)
                if rows and not marks.over:
                    marks.over = req.finish_status.is_finished()
                    past = _past(req, run_reqs, packs) if marks.over else 0
                    if step.stop:
                        regret = step.regret[first : first + min(rows - 1, step.live[n])]
                        judged = 0 < step.live[n] == step.rows[n] - 1  # otherwise its slot was closed
                        _judged(marks, regret[: rows - past], judged and not past and step.stop[n] == BUDGET)
                    self._block(req, marks, step.live[n], rows, past)
                first += step.rows[n]

    def look(self, run_reqs: Sequence[Any], packs: Sequence[Any]) -> None:
        """A post-processing call of an engine whose own functions decide: its totals say what kind of call it was.

        run_reqs: the accepted rows of a verify call, whose request then counts one step more, or the rows of a prefill,
        one of a request, after which the draft columns hold no proposal. Raises Contradiction where totals and rows
        differ.
        """
        with self.lock:
            for req, rows in zip(*groups(run_reqs), strict=True):
                marks = getattr(req, ATTRIBUTE, None) or marks_of(req)
                if marks.over:
                    continue
                shared, seen = req.shm_req, marks.seen
                steps = shared.mtp_verify_step_num
                if steps == seen[0] and rows == 1:
                    marks.drafts = 0
                    self._prefilled(req, marks)
                    continue
                marks.seen = now = steps, shared.mtp_verify_token_num, shared.mtp_accepted_token_num
                width, more = now[1] - seen[1], now[2] - seen[2]
                if steps != seen[0] + 1 or not 0 <= more < width or rows != more + 1:
                    raise Contradiction(
                        f"request {getattr(req, 'req_id', '?')}: expected {rows} reported tokens of one step, found "
                        f"{steps - seen[0]} steps, {width} rows and {more} accepted drafts in mtp_*"
                    )
                marks.over = req.finish_status.is_finished()
                past = _past(req, run_reqs, packs) if marks.over else 0
                self._block(req, marks, width - 1 if marks.drafts else 0, rows, past)
                marks.drafts = max(1, width - 1)  # what is scattered behind a step is a proposal

    def end(self, requests: Sequence[Any]) -> None:
        """Requests of a post-processing call without a verify call: some may end with a prefill's only id."""
        with self.lock:
            for req in requests:
                self._prefilled(req, marks_of(req))

    def _prefilled(self, req: Any, marks: Marks) -> None:
        if not marks.over and req.finish_status.is_finished():
            marks.over = True
            self._tell(marks)
            self._request(marks)

    def settle(self) -> None:
        """Tell what is not told: before somebody reads the telemetry, under the lock."""
        for marks in self.listed:
            self._tell(marks)
        self.listed.clear()

    def _block(self, req: Any, marks: Marks, live: int, rows: int, past: int) -> None:
        """One request in one step. rows: accepted, with the bonus; past: of them past the end."""
        whole = rows - 1 if rows <= live else live
        outputs = rows - past
        detail = marks.detail
        detail.blocks += 1
        detail.drafts_verified += live
        detail.strict_accepted += outputs if outputs < whole else whole  # of them relaxed: _judged took those away
        detail.committed_tokens += outputs
        detail.step_lengths.append(whole)
        if marks.over:
            self._tell(marks)
            if self.ended is not None:
                self.ended(req, detail.blocks, outputs)
            self._request(marks)
        elif not marks.listed:
            marks.listed = True
            self.listed.append(marks)
            if len(self.listed) >= MANY:
                self.settle()

    def _tell(self, marks: Marks) -> None:
        now = marks.detail.totals()
        if now != marks.told:
            counters = self.telemetry.of(self._key(marks))
            for name, value, told in zip(TOTALS, now, marks.told, strict=True):
                if value != told:
                    setattr(counters, name, getattr(counters, name) + value - told)
            marks.told = now
        marks.listed = False

    def _key(self, marks: Marks) -> str:
        """Of the rule that served the request: sampled ones got the engine's own comparison of ids."""
        return "strict" if marks.temperature is None else self.key

    def _request(self, marks: Marks) -> None:
        counters = self.telemetry.of(self.key)
        counters.requests += 1
        if serving_rule(self.policy, marks.temperature is None)[1] == SAMPLED_REQUEST:
            counters.fall_back(SAMPLED_REQUEST)
        if self.finished is not None and marks.tag is not None:
            self.finished({"tag": marks.tag, "policy": self._key(marks)} | marks.detail.to_json())


def _past(req: Any, run_reqs: Sequence[Any], packs: Sequence[Any]) -> int:
    """Accepted rows past the end of a request that ended in this step; output positions count from 1."""
    end = req.shm_req.finish_token_index - req.shm_req.input_len + 1
    return sum(pack.output_len > end for each, pack in zip(run_reqs, packs, strict=True) if each is req)


def _judged(marks: Marks, regret: Sequence[float], exhausted: bool) -> None:
    """regret: of the committed drafts of one block, negative where the draft is the target's own id."""
    detail = marks.detail
    charged = [r for r in regret if r >= 0]
    if charged:
        detail.relaxed += len(charged)
        detail.strict_accepted -= len(charged)
        detail.regret_charged += sum(charged) * (marks.temperature or 1.0)
    if exhausted and marks.temperature is not None:
        detail.budget_exhausted += 1
