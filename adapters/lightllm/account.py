"""What a step really committed, counted on the host after the engine's own EOS and length cuts. No torch.

The engine's mtp_* counters of a request run past its end; these do not, so they can be compared with output ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from adapters.arm import SAMPLED_REQUEST, serving_rule
from adapters.policy import Policy
from adapters.rules.asd.report import BUDGET
from adapters.telemetry import Telemetry


@dataclass
class Detail:
    """One request, as adapters.telemetry.Counters counts it.

    accepted, histogram, step_lengths (drafts accepted by each block, in order): before the cuts, of live drafts.
    """

    blocks: int = 0
    drafts_verified: int = 0
    accepted: int = 0
    strict_accepted: int = 0
    relaxed: int = 0
    regret_charged: float = 0.0
    budget_exhausted: int = 0
    committed_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    step_lengths: list[int] = field(default_factory=list)


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


@dataclass
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
    step = Step([], [], [])
    for req in run_reqs:
        if step.requests and step.requests[-1] is req:
            step.rows[-1] += 1
        else:
            step.requests.append(req)
            step.rows.append(1)
    step.live = [min(rows - 1, marks_of(req).drafts) for req, rows in zip(step.requests, step.rows, strict=True)]
    return step


@dataclass
class Account:
    """Adds finished steps to the telemetry. Two threads post-process steps in turn.

    finished: called once per request that ended and carries a tag, with a JSON object. ended: once per request that
    ended in a verify step, with its steps and the tokens kept of the last.
    """

    telemetry: Telemetry
    policy: Policy
    finished: Callable[[dict[str, Any]], None] | None = None
    ended: Callable[[Any, int, int], None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.key = self.policy.key  # spelt once: this runs every step

    def add(self, step: Step | None, run_reqs: Sequence[Any], packs: Sequence[Any], ended_before: set[int]) -> None:
        """Count what one post-processing call reported.

        run_reqs, packs: the engine's accepted rows and their update packs. ended_before: id() of requests that had
        ended before this call: their rows are past the end. step: None for a prefill.
        """
        with self.lock:
            outputs: dict[int, list[int]] = {}
            for req, pack in zip(run_reqs, packs, strict=True):
                if id(req) not in ended_before:
                    outputs.setdefault(id(req), []).append(pack.output_len)
            if step is not None:
                first = 0
                for n, req in enumerate(step.requests):
                    if id(req) in outputs:
                        self._block(step, n, first, outputs[id(req)])
                    first += step.rows[n]
            for req in {id(req): req for req in run_reqs if id(req) in outputs}.values():
                if req.finish_status.is_finished():
                    self._request(req)

    def _block(self, step: Step, n: int, first: int, outputs: list[int]) -> None:
        req, accepted = step.requests[n], len(outputs)
        if req.finish_status.is_finished():
            end = req.shm_req.finish_token_index - req.shm_req.input_len + 1
            outputs = [position for position in outputs if position <= end]
        marks, live = marks_of(req), step.live[n]
        kept, whole = min(len(outputs), accepted - 1, live), min(accepted - 1, live)
        regret = [r for r in step.regret[first : first + kept] if r >= 0]
        exhausted = bool(step.stop) and step.stop[n] == BUDGET and live > 0 and len(outputs) == accepted
        nats, exhausted = sum(regret) * (marks.temperature or 1.0), exhausted and marks.temperature is not None
        detail = marks.detail
        for total in (self.telemetry.of(self._key(marks)), detail):
            total.blocks += 1
            total.drafts_verified += live
            total.strict_accepted += kept - len(regret)
            total.relaxed += len(regret)
            total.regret_charged += nats
            total.budget_exhausted += exhausted
            total.committed_tokens += len(outputs)
        detail.accepted += whole
        detail.histogram += [0] * (whole + 1 - len(detail.histogram))
        detail.histogram[whole] += 1
        detail.step_lengths.append(whole)
        if self.ended is not None and req.finish_status.is_finished():
            self.ended(req, detail.blocks, len(outputs))

    def _key(self, marks: Marks) -> str:
        """Of the rule that served the request: sampled ones got the engine's own comparison of ids."""
        return "strict" if marks.temperature is None else self.key

    def _request(self, req: Any) -> None:
        counters, marks = self.telemetry.of(self.key), marks_of(req)
        counters.requests += 1
        if serving_rule(self.policy, marks.temperature is None)[1] == SAMPLED_REQUEST:
            counters.fall_back(SAMPLED_REQUEST)
        if self.finished is not None and marks.tag is not None:
            self.finished({"tag": marks.tag, "policy": self._key(marks)} | asdict(marks.detail))
