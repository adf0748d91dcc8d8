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

MANY = 256  # steps that are kept at most before they are counted
TOTALS = (
    "blocks",
    "drafts_verified",
    "strict_accepted",
    "relaxed",
    "regret_charged",
    "budget_exhausted",
    "committed_tokens",
)


@dataclass
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

    def to_json(self) -> dict[str, Any]:
        """With accepted and the histogram of step_lengths."""
        lengths = self.step_lengths
        histogram = [lengths.count(n) for n in range(max(lengths, default=-1) + 1)]
        return vars(self) | {"accepted": sum(lengths), "histogram": histogram}


@dataclass
class Marks:
    """What the adapter keeps on an engine request (InferReq), which lives as long as the request owns its slot.

    temperature: of a greedy request; None: sampled. tag: the seed its client sent, None: none. drafts: columns that
    hold its current proposal, 0: junk. entered: its slot of the ledger was reset for it. is_open: it has a budget now.
    """

    temperature: float | None
    tag: int | None = None
    drafts: int = 0
    entered: bool = False
    is_open: bool = False
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
    stop: Sequence[int] = ()


def step_of(run_reqs: Sequence[Any]) -> Step:
    """run_reqs: the request of every verified row; the rows of one request are contiguous."""
    requests: list[Any] = []
    rows: list[int] = []
    last = None
    for req in run_reqs:
        if req is last:
            rows[-1] += 1
        else:
            requests.append(req)
            rows.append(1)
            last = req
    return Step(requests, rows, [min(n - 1, marks_of(req).drafts) for req, n in zip(requests, rows, strict=True)])


@dataclass(slots=True)
class Reported:
    """What one post-processing call reported of a verify call, to be counted later.

    run_reqs, packs: the engine's accepted rows and their update packs. going: by request of the step, whether it had
    not ended before the call; else its rows are past the end.
    """

    step: Step
    run_reqs: Sequence[Any]
    packs: Sequence[Any]
    going: list[bool]


@dataclass
class Account:
    """Adds finished steps to the telemetry. Two threads post-process steps in turn.

    A step is only kept when it comes; the steps that are kept are counted once a request ends (its answer is on its way
    then), when somebody asks, or when there are MANY: counting them one by one would cost every step a part of what all
    of them cost now.

    finished: called once per request that ended and carries a tag, with a JSON object. ended: once per request that
    ended in a verify step, with its steps and the tokens kept of the last.
    """

    telemetry: Telemetry
    policy: Policy
    finished: Callable[[dict[str, Any]], None] | None = None
    ended: Callable[[Any, int, int], None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    kept: list[Reported] = field(default_factory=list)
    steps: int = 0  # added so far: whoever polls sees whether the engine is busy

    def __post_init__(self) -> None:
        self.key = self.policy.key  # spelt once

    def add(self, step: Step, run_reqs: Sequence[Any], packs: Sequence[Any], going: list[bool]) -> None:
        """A verify call that was post-processed. going: by request of the step, whether it had not ended before."""
        with self.lock:
            self.kept.append(Reported(step, run_reqs, packs, going))
            self.steps += 1
            over = [
                req for req, was in zip(step.requests, going, strict=True) if was and req.finish_status.is_finished()
            ]
            if over or len(self.kept) >= MANY:
                self._settle(over)

    def end(self, requests: Sequence[Any]) -> None:
        """Requests that ended in a post-processing call without a verify call: a prefill's only id."""
        with self.lock:
            self._settle(requests, verified=False)

    def settle(self) -> None:
        """Count what is kept: before somebody reads the telemetry, under the lock."""
        self._settle(())

    def _settle(self, over: Sequence[Any], verified: bool = True) -> None:
        """Count every step that is kept. over: the requests that ended, in the last of them where verified."""
        kept, self.kept = self.kept, []
        sums: dict[str, Detail] = {}
        for place, reported in enumerate(kept):
            accepted: dict[int, int] = {}
            for req in reported.run_reqs:
                accepted[id(req)] = accepted.get(id(req), 0) + 1
            step, first = reported.step, 0
            last = over if verified and place == len(kept) - 1 else ()
            for n, req in enumerate(step.requests):
                rows = accepted.get(id(req), 0)
                if rows and reported.going[n]:
                    marks = marks_of(req)
                    key = self._key(marks)
                    if key not in sums:
                        sums[key] = Detail()
                    past = _past(req, reported) if last and any(each is req for each in last) else 0
                    _block(step, n, first, rows, past, marks, sums[key])
                first += step.rows[n]
        for key, total in sums.items():
            counters = self.telemetry.of(key)
            for name in TOTALS:
                setattr(counters, name, getattr(counters, name) + getattr(total, name))
        for req in over:
            if self.ended is not None and verified:
                self.ended(req, marks_of(req).detail.blocks, _last(req, kept[-1]))
            self._request(req)

    def _key(self, marks: Marks) -> str:
        """Of the rule that served the request: sampled ones got the engine's own comparison of ids."""
        return "strict" if marks.temperature is None else self.key

    def _request(self, req: Any) -> None:
        counters, marks = self.telemetry.of(self.key), marks_of(req)
        counters.requests += 1
        if serving_rule(self.policy, marks.temperature is None)[1] == SAMPLED_REQUEST:
            counters.fall_back(SAMPLED_REQUEST)
        if self.finished is not None and marks.tag is not None:
            self.finished({"tag": marks.tag, "policy": self._key(marks)} | marks.detail.to_json())


def _positions(req: Any, reported: Reported) -> list[int]:
    """Output positions of a request's accepted rows, from 1."""
    return [pack.output_len for each, pack in zip(reported.run_reqs, reported.packs, strict=True) if each is req]


def _past(req: Any, reported: Reported) -> int:
    """Accepted rows past the end of a request that ended in this step."""
    end = req.shm_req.finish_token_index - req.shm_req.input_len + 1
    return sum(position > end for position in _positions(req, reported))


def _last(req: Any, reported: Reported) -> int:
    """Tokens kept of the step in which a request ended."""
    return len(_positions(req, reported)) - _past(req, reported)


def _block(step: Step, n: int, first: int, accepted: int, past: int, marks: Marks, total: Detail) -> None:
    """One request in one step. accepted: rows, with the bonus; past: of them past the end."""
    live, outputs, detail = step.live[n], accepted - past, marks.detail
    whole = min(accepted - 1, live)
    strict = min(outputs, whole)
    if step.regret:
        regret = [r for r in step.regret[first : first + strict] if r >= 0]
        nats = sum(regret) * (marks.temperature or 1.0)
        exhausted = step.stop[n] == BUDGET and live > 0 and not past and marks.temperature is not None
        strict -= len(regret)
        for each in (total, detail):
            each.relaxed += len(regret)
            each.regret_charged += nats
            each.budget_exhausted += exhausted
    for each in (total, detail):
        each.blocks += 1
        each.drafts_verified += live
        each.strict_accepted += strict
        each.committed_tokens += outputs
    detail.step_lengths.append(whole)
