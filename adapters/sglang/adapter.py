"""The hooks: what happens to a request between admission, prefill, verify steps and its response.

One `Adapter` per process. Device side (`forward`, `accept`, `greedy`, `sampled`): runs on the engine's forward stream
under CUDA graphs and overlap scheduling, so nothing in it may wait for the device. Host side (`resolve`, `payload`,
`meta`): runs when the engine has synchronised a step, and accounts for what the engine committed of it. A request
without a policy, on a server without a default, passes every hook untouched.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from adapters.arm import Arming, Refused, request_policy, serving_rule
from adapters.capture import CaptureError
from adapters.policy import CUSTOM_PARAM, GREEDY_RULES, REFERENCE_ONLY, REFERENCE_RULES, RULES, Policy, PolicyError
from adapters.rules import block, sampling
from adapters.rules.asd import BUDGET, AsdConfig
from adapters.sglang import seams
from adapters.sglang.capture import HEALTH_CHECK, Capture, Pending
from adapters.sglang.ledger import STRICT, Detail, Ledger, to_device, to_host
from adapters.telemetry import Telemetry

logger = logging.getLogger(__name__)

STATE = "_specaccept"  # the attribute of an engine request that holds its State
OWNER = "__req__"  # custom_params: what SGLang adds for custom logit processors, in a copy of its own
NATIVE_BLOCK = "block-engine"
OPEN = 1024  # requests in `Adapter.open` before it looks which of them the engine has dropped
REJECTIONS = f"{CUSTOM_PARAM}_first_rejections"  # custom_params: true keeps [regret, position, live] of each rejection
SAMPLED_OUTPUTS = ("predicts", "accept_index", "accept_token_num")
FAULT = "draft probability 0 at a drafted token"


def float32(value: float) -> float:
    """Round to float32: the ledger's arithmetic on the host (a float64 sum of two float32 rounds to the same)."""
    return struct.unpack("f", struct.pack("f", value))[0]


@lru_cache(maxsize=256)
def asd_config(policy: Policy) -> AsdConfig:
    """Requests share a few policies."""
    return AsdConfig.from_policy(policy)


@lru_cache(maxsize=256)
def policy_key(policy: Policy) -> str:
    return policy.key


@dataclass(eq=False)
class State:
    """One request. spent, relaxed, exhausted: of committed drafts only. outputs: output ids accounted for so far.

    lengths: accepted drafts of each verify step, those cut at the end included. verified: live drafts of all of them.
    What a step leaves here waits for `Adapter.settle`: booked is the number of steps that are in the counters.
    """

    policy: Policy
    rule: str
    fallback: str | None
    outputs: int = 0
    spent: float = 0.0
    relaxed: int = 0
    exhausted: int = 0
    verified: int = 0
    lengths: list[int] = field(default_factory=list)
    booked: int = 0
    lives: list[int] = field(default_factory=list)  # of the steps not booked, where steps differ in live drafts
    relaxations: list[tuple[int, int, list[float]]] = field(default_factory=list)  # step, bits, charges; not booked
    drained: list[int] = field(default_factory=list)  # steps stopped for lack of budget, not booked
    rejected: list[tuple[int, float]] = field(default_factory=list)  # step, regret of its first failed draft
    rejections: list[tuple[float, int, int]] | None = None  # kept where the request asks for them
    native: bool = False  # the engine's own accept gives this request's answer and all that its counters need

    @cached_property
    def walks(self) -> bool:
        """Its blocks need the walk. At budget 0 they are strict's, and every rejection is for lack of budget."""
        return self.rule == "asd" and self.policy.budget != 0

    @cached_property
    def key(self) -> str:
        """Whose counters its blocks move: the policy's, or the rule's that serves instead of it."""
        return policy_key(self.policy) if self.fallback is None else self.rule

    @property
    def config(self) -> AsdConfig:
        return asd_config(self.policy) if self.rule == "asd" else STRICT

    def summary(self) -> dict[str, Any]:
        """`meta_info.specaccept` of the response."""
        found = {
            "policy": self.key,
            "asked": policy_key(self.policy),
            "relaxed": self.relaxed,
            "regret": self.spent,
            "spent": self.spent,
            "budget_exhausted": self.exhausted,
            "drafts_verified": self.verified,
            "step_lengths": self.lengths,
        }
        return found if self.rejections is None else found | {"first_rejections": self.rejections}


@dataclass
class Step:
    """One verify step between the worker's entry and its accept."""

    states: list[State | None]
    slots: Tensor  # [B] int64
    detail: Detail | None = None  # some row is under ASD with a budget
    rejected: Tensor | None = None  # [B] float32: regret of the first draft that failed, where some row keeps them
    keeps: bool = False
    sampled: list[str | None] | None = None  # the rule of each sampled row, where some row's is not the engine's
    due: set[str] = field(default_factory=lambda: {"accept"})  # hooks the engine must still come by
    logits: Tensor | None = None  # set while the engine accepts, and only then
    live: Tensor | None = None
    pending: Pending | None = None  # of the capture


@dataclass
class Worker:
    """What the hooks need of the engine's draft worker."""

    drafts: int  # K
    device: torch.device
    slots: Callable[[], int]
    group: Any = None  # the tensor-parallel group, where it has more than one rank
    broadcasts: bool = False  # the engine leaves it to us that ranks agree on the accepted lengths


class Adapter:
    def __init__(self, version: str, arming: Arming) -> None:
        self.version = version
        self.arming = arming
        self.telemetry = Telemetry("sglang", "sglang", version, arming.default)
        self.worker: Worker | None = None
        self.ledger: Ledger | None = None
        self.step: Step | None = None
        self.capture: Capture | None = None
        self.plain = True  # a batch whose rows are all native needs nothing of ours: so in a server that is not armed
        self.inner: list[tuple[Any, str, Any, Any]] = []  # where the hooks of the accept are: `place`
        self.spare: list[tuple[Any, str, Any, Any]] = []  # where the hook is that only a capture needs
        self.open: dict[str, tuple[weakref.ref, State]] = {}  # requests that have not ended, by id
        self.open_limit = OPEN
        self.served: set[State] = set()  # those of them that the engine's own accept does not serve
        self.policies: dict[str, Policy] = {}  # requests share a few: by the JSON they came as
        self.refused: dict[str, str] = {}  # rule -> why this server cannot serve it
        self.caps: dict[int, SimpleNamespace] = {}
        self.native_sampled = "chain"  # what the engine does with a sampled row
        self.differences: Tensor | None = None  # rows whose length was not rank 0's, where there are several ranks
        self.length_dtype = torch.int32  # of the engine's accept lengths: int64 in older releases

    # -- admission ----------------------------------------------------------------------------------------------

    def params(self, original: Callable, params: Any, vocab_size: int) -> None:
        """Tokenizer process: a malformed policy is the client's error, before the request is queued."""
        original(params, vocab_size)
        self.requested(params.custom_params)  # PolicyError is a ValueError: the engine answers 400

    def admit(self, original: Callable, req: Any, enable_overlap: bool) -> str | None:
        """Scheduler process: the message of a request this server cannot honour, or None."""
        error = original(req, enable_overlap)
        if error is not None:
            return error
        try:
            policy = self.requested(req.sampling_params.custom_params)
        except PolicyError as malformed:
            return str(malformed)
        if policy is not None and policy.rule in self.refused:
            return f"sampling_params.custom_params.{CUSTOM_PARAM}: policy.rule: {self.refused[policy.rule]}"
        return None

    def requested(self, custom_params: Any) -> Policy | None:
        """`request_policy`, remembered: a request is asked three times, and most bring what the last one did."""
        if custom_params is None:
            return None
        if not isinstance(custom_params, dict) or CUSTOM_PARAM not in custom_params:
            return request_policy(custom_params)
        text = repr(custom_params[CUSTOM_PARAM])  # tells 1 from True and 1.0, which a policy does too
        policy = self.policies.get(text)
        if policy is None:
            policy = request_policy(custom_params)
            assert policy is not None
            if len(self.policies) < OPEN and len(text) < OPEN:  # what a client sends bounds neither
                self.policies[text] = policy
        return policy

    def state(self, req: Any) -> State | None:
        """The state of a request, made at its first prefill and kept through chunks and retraction."""
        if STATE not in req.__dict__:
            state = req.__dict__[STATE] = self._new_state(req)
            if req.rid in self.open:  # dropped by the engine, and its id used again
                self.settle(self.leave(req.rid)[1])
            if state is not None:
                if len(self.open) >= self.open_limit:
                    self.book()
                    self.open_limit = max(OPEN, 2 * len(self.open))
                self.open[req.rid] = (weakref.ref(req), state)
                if not state.native:
                    self.served.add(state)
        return req.__dict__[STATE]

    def leave(self, rid: str) -> tuple[Any, State]:
        """Forget an open request. None for one that the engine has dropped."""
        req, state = self.open.pop(rid)
        self.served.discard(state)
        return req(), state

    def _new_state(self, req: Any) -> State | None:
        if req.to_finish is not None or req.rid.startswith(HEALTH_CHECK):
            return None  # refused at admission, or the engine asking itself: nothing to serve
        custom = req.sampling_params.custom_params
        policy = self.requested(custom) or self.arming.default
        if policy is None:
            return None
        if custom is not None and req.custom_logit_processor is None:
            custom.pop(OWNER, None)  # older releases tie a request to itself by it: only the collector would free it
        rule, fallback = serving_rule(policy, is_sampled(req))
        state = State(policy, self.native_sampled if rule == "chain" else rule, fallback)
        if rule in GREEDY_RULES and (custom or {}).get(REJECTIONS) is True:
            state.rejections = []
        exact = rule == "strict" or state.rule == self.native_sampled or (rule == "asd" and not state.walks)
        state.native = exact and state.rejections is None
        return state

    # -- device side --------------------------------------------------------------------------------------------

    def forward(self, original: Callable, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around one step of the draft worker: ledger rows before a prefill, a Step around a verify."""
        mode = batch.forward_mode
        if not mode.is_decode():
            if mode.is_extend() and not mode.is_idle():
                self.prefill(batch.reqs, batch.req_pool_indices)
            return original(worker, batch, *args, **kwargs)
        if self.plain and (not self.served or all(map(is_native, batch.reqs))):
            return original(worker, batch, *args, **kwargs)  # the engine's own accept, no hook of ours on its way
        step = self.step = self.begin(batch.reqs, batch.req_pool_indices)
        self.place(True)
        try:
            result = original(worker, batch, *args, **kwargs)
            if step.due:  # it accepted inside a CUDA graph, say, which knows nothing of the policy
                missed = [seams.expected(self.version)[name][0].rpartition(".")[2] for name in sorted(step.due)]
                raise Refused(f"sglang: {missed[0]}: expected to be called for a policy, found another accept")
            if self.step.detail is not None:
                assert self.ledger is not None
                result.specaccept = self.ledger.copy(self.step.detail)
            if self.step.rejected is not None:
                result.specaccept_rejected = to_host(self.step.rejected)
            return result
        finally:
            self.step = None
            self.place(False)

    def place(self, hooked: bool) -> None:
        """Put the hooks of the accept in, or the engine's own functions: they are needed in a step under policies."""
        put(self.inner, hooked)

    def prefill(self, reqs: Sequence[Any], slots: Tensor) -> None:
        """Write the ledger rows of a prefill batch. A first chunk and a later one, a fresh request and a retracted one
        all get what the host knows: the regret of tokens that were really committed, 0 before the first."""
        states = [self.state(req) for req in reqs]
        for req, state in zip(reqs, states, strict=True):
            if state is not None:
                if len(state.lengths) > state.booked:  # it was retracted: what was committed stays
                    self.settle(state)
                state.outputs = len(req.output_ids) + 1  # the prefill emits one id itself
        if self.ledger is None and any(s is not None and s.walks for s in states):
            assert self.worker is not None
            self.ledger = Ledger(self.worker.slots(), self.worker.device)
        if self.ledger is not None:
            configs = [STRICT if s is None else s.config for s in states]
            self.ledger.assign(slots.long(), configs, [0.0 if s is None else s.spent for s in states])
        if self.capture is not None:
            native = [self.native_sampled if is_sampled(req) else "strict" for req in reqs]
            keys = [own if s is None else s.key for s, own in zip(states, native, strict=True)]
            asked = [own if s is None else s.policy.key for s, own in zip(states, native, strict=True)]
            self.capture.prefill(reqs, keys, asked)

    def begin(self, reqs: Sequence[Any], slots: Tensor) -> Step:
        """The Step of a decode batch."""
        states = [req.__dict__.get(STATE) for req in reqs]
        sampled = [
            (self.native_sampled if s is None else s.rule) if is_sampled(req) else None
            for req, s in zip(reqs, states, strict=True)
        ]
        assert self.worker is not None
        step = Step(states, slots, keeps=any(s is not None and s.rejections is not None for s in states))
        if any(s is not None and s.walks for s in states):
            assert self.ledger is not None
            step.detail = self.ledger.detail(len(states), self.worker.drafts)
        if step.keeps or step.detail is not None:
            step.due.add("greedy")
        if any(rule not in (None, self.native_sampled) for rule in sampled):
            step.sampled = sampled
            step.due.add("sampled")
        if self.capture is not None:
            step.pending = self.capture.begin(reqs, [rule is not None for rule in sampled])
        return step

    def accept(self, original: Callable, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Around accept_draft_tokens: opens the step for `greedy` and `sampled`, closes it behind them."""
        step = self.step
        if step is None:
            return original(**kwargs)
        assert self.worker is not None
        if self.arming.verify_cap is not None:
            kwargs["cutoff_layout"] = self._capped(kwargs.get("cutoff_layout"), len(step.states))
        layout = kwargs.get("cutoff_layout")
        step.logits, step.live = kwargs["target_logits"], None if layout is None else layout.verify_lens - 1
        step.due.discard("accept")
        try:
            out = original(**kwargs)
        finally:
            step.logits = None
        if self.worker.group is not None:
            self._align(out, step)
        if step.pending is not None:
            assert self.capture is not None
            self.capture.add(step.pending, kwargs["candidates"], kwargs["target_logits"], step.live, out[0], out[1])
        return out

    def _align(self, out: Sequence[Tensor], step: Step) -> None:
        """Tensor parallel: rank 0's answer is everyone's, and so is what its ledger was charged for it.

        out: lengths, bonus ids and cut lengths, each [B] of an integer type; where the engine aligns them itself only
        the ledger is set here. One small broadcast.
        """
        assert self.worker is not None
        parts = list(out) if self.worker.broadcasts else [out[0]]
        if step.detail is not None:
            assert self.ledger is not None
            slots = step.slots.long()
            parts.append(self.ledger.spent.index_select(0, slots).view(torch.int32))
        packed = torch.stack([part.long() for part in parts])
        self.worker.group.broadcast(packed, src=0)
        assert self.differences is not None
        self.differences += (packed[0] != out[0]).sum()
        if self.worker.broadcasts:
            for own, first in zip(out, packed, strict=False):
                own.copy_(first)
        if step.detail is not None:
            assert self.ledger is not None
            self.ledger.spent.index_copy_(0, slots, packed[-1].int().view(torch.float32))

    def _capped(self, layout: Any, rows: int) -> SimpleNamespace:
        """The engine's verify lengths (anchor included), at most verify_cap drafts."""
        assert self.worker is not None
        assert self.arming.verify_cap is not None
        most = min(self.arming.verify_cap, self.worker.drafts) + 1
        if layout is not None:
            return SimpleNamespace(verify_lens=layout.verify_lens.clamp(max=most))
        if rows not in self.caps:
            lens = torch.full((rows,), most, dtype=torch.int64, device=self.worker.device)
            self.caps[rows] = SimpleNamespace(verify_lens=lens)
        return self.caps[rows]

    def greedy(self, original: Callable, *, candidates: Tensor, target_predict: Tensor) -> tuple[Tensor, Tensor]:
        """Around the engine's prefix match, which has its argmax: candidates, target_predict [B, K+1] int64.

        Rows that are not under ASD have strict parameters, so a mixed batch needs no mask; where no row has a budget
        the engine's own match is the answer.
        """
        step = self.step
        if step is None or step.logits is None:
            return original(candidates=candidates, target_predict=target_predict)
        step.due.discard("greedy")
        if step.pending is not None:
            step.pending.top = target_predict
        if step.detail is None:
            length, bonus = original(candidates=candidates, target_predict=target_predict)
        else:
            length, bonus = self._walk(original, step, candidates, target_predict)
        if step.keeps:
            step.rejected = rejected(step.logits.view(*candidates.shape, -1), candidates, target_predict, length)
        return length, bonus

    def _walk(
        self, original: Callable, step: Step, candidates: Tensor, target_predict: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert self.ledger is not None
        assert step.logits is not None
        slots = step.slots if step.slots.dtype == torch.int64 else step.slots.long()
        top = target_predict.contiguous()
        length, bonus = self.ledger.accept(candidates[:, 1:], step.logits, top, slots, step.live, self.length_dtype)
        if step.live is None:
            return length, bonus
        # The engine caps what it gets and reports how much it cut: give it the run strict would have gone on with.
        strict, _ = original(candidates=candidates, target_predict=target_predict)
        return torch.where(length == step.live, torch.maximum(strict, length), length), bonus

    def sampled(self, original: Callable, **kwargs: Any) -> None:
        """Around the engine's chain rejection, which gets the filtered target and the drafts' own distributions:
        target_probs [B, K+1, V], draft_probs [B, K, V] float32, uniform_samples [B, K]; fills predicts [B*(K+1)],
        accept_index [B, K+1] and accept_token_num [B]."""
        step = self.step
        if step is not None and step.pending is not None:
            step.pending.p, step.pending.q = kwargs["target_probs"], kwargs["draft_probs"]
            step.pending.coins = kwargs["uniform_samples"]
        if step is None or step.logits is None or step.sampled is None:
            return original(**kwargs)
        step.due.discard("sampled")
        rules = sorted(
            {rule for rule in step.sampled if rule is not None}, key=lambda rule: rule != self.native_sampled
        )
        self._run_sampled(original, kwargs, rules[0], step)
        for rule in rules[1:]:
            own = kwargs | {name: torch.empty_like(kwargs[name]) for name in SAMPLED_OUTPUTS}
            self._run_sampled(original, own, rule, step)
            rows = to_device(torch.tensor([r == rule for r in step.sampled]), kwargs["candidates"].device)
            for name in SAMPLED_OUTPUTS:
                out = kwargs[name].view(len(rows), -1)
                out.copy_(torch.where(rows[:, None], own[name].view(len(rows), -1), out))

    def _run_sampled(self, original: Callable, kwargs: dict[str, Any], rule: str, step: Step) -> None:
        """One rule over every row of the batch, into kwargs' output tensors."""
        if rule == self.native_sampled:
            return original(**kwargs)
        if rule == NATIVE_BLOCK:
            return original(**kwargs | {"block_verification": True})
        candidates = kwargs["candidates"]
        B, W = candidates.shape
        drafts = candidates[:, 1:].contiguous()
        length, bonus = block.accept(
            drafts, kwargs["target_probs"], kwargs["draft_probs"], eta=kwargs["uniform_samples"], live=step.live
        )
        ids = torch.cat([drafts, bonus[:, None]], 1).scatter_(1, length[:, None].long(), bonus[:, None])
        kwargs["predicts"].view(B, W).copy_(ids)
        kwargs["accept_index"].copy_(torch.arange(B * W, device=candidates.device).view(B, W))
        kwargs["accept_token_num"].copy_(length)

    # -- host side ----------------------------------------------------------------------------------------------

    @property
    def drafts(self) -> int:
        """K."""
        assert self.worker is not None
        return self.worker.drafts

    def resolve(self, original: Callable, processor: Any, result: Any, batch: Any) -> Any:
        """Around the engine's own look at a step's lengths, once they are on the host: a note per request, no more.

        `settle` counts it when the request ends or somebody reads the counters. What the engine skips is skipped.
        """
        tokens = original(processor, result, batch)
        if not self.open:
            return tokens
        lengths = result.num_correct_drafts_per_req_cpu
        for i, req in enumerate(batch.reqs):
            state = req.__dict__.get(STATE)
            if state is None or req.is_retracted or req.finished():
                continue
            state.lengths.append(lengths[i])
            if not state.native or result.cap_lens is not None:
                self._note(state, result, i)
        return tokens

    def _note(self, state: State, result: Any, i: int) -> None:
        """What a step says beside its length, of row i."""
        step = len(state.lengths)
        if result.cap_lens is not None:
            state.lives += [self.drafts] * (step - state.booked - 1 - len(state.lives))
            state.lives.append(int(result.cap_lens[i]) - 1)
        if state.walks:
            bits, stop = result.specaccept.rows
            if bits[i]:
                state.relaxations.append((step, bits[i], result.specaccept.charges(i)))
            if stop[i] == BUDGET:
                state.drained.append(step)
        if state.rejections is not None:
            state.rejected.append((step, float(result.specaccept_rejected[i])))

    def result(self, original: Callable, processor: Any, req: Any, *args: Any) -> None:
        """Once per row the engine did not discard, after its stop conditions have cut the output. For a capture."""
        if self.capture is not None:
            self.capture.settle(req, len(req.output_ids_through_stop))
        original(processor, req, *args)

    def settle(self, state: State, outputs: int | None = None) -> None:
        """Book the steps of a request that are not in the counters yet.

        outputs: the ids it ended with, its stop condition included; None: it goes on, so that every step so far is in
        its output whole. Only a last step is cut, and what is cut is neither counted nor charged.
        """
        lengths = state.lengths[state.booked :]
        first, last = state.booked + 1, len(state.lengths)  # steps are numbered from 1
        if not lengths:
            return
        whole = sum(lengths) + len(lengths)
        kept = whole if outputs is None else outputs - state.outputs
        final = min(lengths[-1], lengths[-1] + 1 - (whole - kept))  # drafts of the last step that the output has
        most = self.drafts if self.arming.verify_cap is None else min(self.drafts, self.arming.verify_cap)
        lives = [min(live, most) for live in state.lives]
        lives += [most] * (len(lengths) - len(lives))
        counters = self.telemetry.of(state.key)
        counters.blocks += len(lengths)
        counters.committed_tokens += kept
        counters.drafts_verified += sum(lives)
        state.verified += sum(lives)
        reached = len(lengths) - (final != lengths[-1])  # steps that were not cut before their stop
        relaxed, before = 0, state.spent
        for step, bits, charges in state.relaxations:
            committed = final if step == last else state.lengths[step - 1]
            relaxed += (bits & ((1 << committed) - 1)).bit_count()
            for r in charges[:committed]:
                state.spent = float32(state.spent + r)
        if relaxed:
            counters.regret_charged += state.spent - before
        counters.strict_accepted += sum(lengths) - lengths[-1] + final - relaxed
        counters.relaxed += relaxed
        state.relaxed += relaxed
        exhausted = sum(step < first + reached for step in state.drained)
        if state.rule == "asd" and not state.walks:  # every rejection of B = 0 is for lack of budget
            exhausted = sum(n < live for n, live in zip(lengths[:reached], lives, strict=False))
        counters.budget_exhausted += exhausted
        state.exhausted += exhausted
        if state.rejections is not None:
            for step, regret in state.rejected[:reached]:
                length, live = state.lengths[step - 1], lives[step - first]
                if length < live:
                    state.rejections.append((regret, length, live))
        for pending in (state.lives, state.relaxations, state.drained, state.rejected):
            pending.clear()
        state.outputs += kept
        state.booked = last

    def book(self) -> None:
        """Bring the counters up to the last step of every request that runs; forget those that the engine dropped."""
        for _, state in self.open.values():
            self.settle(state)
        self.open = {rid: (req, state) for rid, (req, state) in self.open.items() if req() is not None}
        self.served &= {state for _, state in self.open.values()}

    def payload(self, original: Callable, accumulator: Any, **kwargs: Any) -> Any:
        """Around what the scheduler sends of a step: beside the rows of finished requests, their statistics."""
        if accumulator.rids and self.open:
            self._answer(accumulator)
        return original(accumulator, **kwargs)

    def _answer(self, accumulator: Any) -> None:
        values: list[list] = [[] for _ in accumulator.rids]
        for row, (rid, reason) in enumerate(zip(accumulator.rids, accumulator.finished_reasons, strict=True)):
            if reason is not None and rid in self.open:
                req, state = self.leave(rid)
                if req is None:  # dropped by the engine; the one that ends here has its id, and never began
                    self.settle(state)
                    continue
                self.settle(state, len(req.output_ids_through_stop))
                counters = self.telemetry.of(state.policy)
                counters.requests += 1
                if state.fallback is not None:
                    counters.fall_back(state.fallback)
                values[row] = [state.summary()]
        if any(values):
            accumulator.customized_info[CUSTOM_PARAM] = values

    def meta(self, original: Callable, manager: Any, meta_info: dict, recv_obj: Any, i: int) -> None:
        """Tokenizer process, a finished request: the list the engine accumulated becomes the one object in it."""
        original(manager, meta_info, recv_obj, i)
        state = manager.rid_to_state.get(recv_obj.rids[i])
        values = None if state is None else state.customized_info_accumulated.pop(CUSTOM_PARAM, None)
        meta_info.pop(CUSTOM_PARAM, None)
        if state is not None and hasattr(state, "customized_info_reported_keys"):
            state.customized_info_reported_keys.discard(CUSTOM_PARAM)
        if values:
            meta_info[CUSTOM_PARAM] = values[-1]

    def records(self, original: Callable, worker: Any) -> dict:
        """GET /server_info: internal_states[].dspark_info_record.specaccept."""
        if self.worker is not None and int(sampling.fault(self.worker.device)):
            self.telemetry.of("block").fall_back(FAULT)
            sampling.fault(self.worker.device).zero_()
        self.book()
        if self.capture is not None:
            self.capture.recorder.sync()  # what is counted is on disk: nothing ends this process in order
        snapshot = self.telemetry.snapshot()
        if self.worker is not None and self.worker.group is not None:
            snapshot["ranks"] = self._ranks(self.worker.group)
        return dict(original(worker) or {}) | {CUSTOM_PARAM: snapshot}

    def _ranks(self, group: Any) -> dict[str, Any]:
        """How far the tensor-parallel ranks agree. Every rank answers the request for it, over the engine's CPU group.

        differences: rows in which a rank's own accepted length was not rank 0's, of the rank with most; ledger_spread:
        largest difference, in nats, of a rank's ledger from rank 0's.
        """
        assert self.differences is not None
        if self.differences.is_cuda:
            torch.cuda.synchronize(self.differences.device)  # a step in flight writes on a stream of its own
        differences = self.differences.cpu()
        own = torch.zeros(1) if self.ledger is None else self.ledger.spent.cpu()
        first = own.clone()
        torch.distributed.broadcast(first, src=group.ranks[0], group=group.cpu_group)
        spread = (own - first).abs().max()
        for value in (differences, spread):
            torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group)
        return {"size": group.world_size, "differences": int(differences), "ledger_spread": float(spread)}

    def clear(self, original: Callable, worker: Any) -> None:
        """POST /set_internal_state {"server_args": {"dspark_clear_info_records": 1}}."""
        original(worker)
        self.book()
        self.telemetry.reset()

    # -- arming -------------------------------------------------------------------------------------------------

    def worker_start(self, original: Callable, worker: Any, *args: Any, **kwargs: Any) -> None:
        """Around the draft worker's constructor: the server is not ready yet, so raising keeps it from serving."""
        original(worker, *args, **kwargs)
        server_args = args[0] if args else kwargs["server_args"]
        try:
            self.arm(worker, server_args)
        except Exception as error:
            if self.arming.required or isinstance(error, CaptureError):
                raise
            logger.warning("specaccept: no request policy will be served: %s", error)
            self.refused = dict.fromkeys(RULES, str(error))

    def arm(self, worker: Any, server_args: Any) -> None:
        """Check the hooks where they must be, what this server can serve, and the accept itself on a toy block."""
        put(self.inner + self.spare, True)
        for name, path in seams.check(self.version).items():
            if name in HOOKS and not is_hooked(path, HOOKS[name]):
                raise Refused(f"sglang {self.version}: {path}: expected the hook {HOOKS[name]}, found it missing")
        self.worker = Worker(
            drafts=int(worker.gamma),
            device=torch.device(worker.device),
            slots=lambda: int(worker.model_runner.req_to_token_pool.req_to_token.shape[0]),
            group=tensor_parallel_group(),
        )
        self.worker.broadcasts = self.worker.group is not None and not seams.since(self.version, seams.TP_SYNC_SINCE)
        if self.worker.group is not None:
            self.differences = torch.zeros((), dtype=torch.int64, device=self.worker.device)
        self.refused = refusals(worker, server_args, self.version)
        if getattr(worker._verify_executor, "_block_verification", False):
            self.native_sampled = NATIVE_BLOCK
            self.refused.setdefault("chain", "the engine runs its own block verification")
        default = self.arming.default
        if default is not None and default.rule in self.refused:
            raise Refused(f"SPECACCEPT_POLICY: policy.rule {default.rule}: {self.refused[default.rule]}")
        if self.arming.verify_cap is not None and "asd" in self.refused:
            raise Refused(f"DSV41_VERIFY_CAP: {self.refused['asd']}")
        if "asd" not in self.refused:
            self.probe()
        if self.worker.group is None or self.worker.group.rank_in_group == 0:
            self.capture = Capture.from_environment(self.version, server_args, self.worker.drafts, default, worker)
        if self.capture is not None:
            self.telemetry.capture = self.capture.recorder.describe()
        self.telemetry.armed = True
        self.plain = self.capture is None and self.arming.verify_cap is None
        self.inner = bindings(self.version, INNER)
        self.spare = bindings(self.version, SPARE) if self.capture is None else []
        put(self.inner + self.spare, False)

    def probe(self) -> None:
        """Drive the engine's own greedy accept: the second draft misses by 1 nat, once with budget 2, once with 0."""
        assert self.worker is not None
        owner, _ = seams.expected(self.version)["accept greedy"]
        accept_greedy = seams.resolve(owner.rpartition(".")[0])
        device, K = self.worker.device, self.worker.drafts
        W, V = K + 1, 8
        logits = torch.zeros(2 * W, V)
        logits[:, 0], logits[:, 1] = 3.0, 2.0
        candidates = torch.zeros(2, W, dtype=torch.int64)
        candidates[:, min(2, K)] = 1
        toy: dict[str, Any] = {
            "candidates": candidates.to(device),
            "target_logits": logits.to(device),
            "verify_num_draft_tokens": W,
        }
        self.length_dtype = accept_greedy.execute(**toy)[0].dtype
        kept, self.ledger = self.ledger, Ledger(2, device)
        configs = [AsdConfig(budget=2.0), AsdConfig(budget=0.0)]
        self.ledger.assign(torch.arange(2, device=device), configs, [0.0, 0.0])
        self.step = Step([None, None], torch.arange(2, device=device), self.ledger.detail(2, K))
        self.step.logits = toy["target_logits"]
        try:
            length, _, _ = accept_greedy.execute(**toy)
            spent = self.ledger.spent.tolist()
        finally:
            self.step, self.ledger = None, kept
        found = (length.tolist(), spent)
        wanted = ([K, min(2, K) - 1], [1.0, 0.0])
        if found != wanted:
            raise Refused(f"sglang {self.version}: accept greedy: expected lengths and spent {wanted}, found {found}")

    def scheduler_start(self, original: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Around the scheduler's constructor: a policy on a server without a DSPARK worker would never run."""
        original(scheduler, *args, **kwargs)
        if self.arming.required and not self.telemetry.armed:
            raise Refused("SPECACCEPT_POLICY: expected a server with --speculative-algorithm DSPARK, found another")


# The seam that each method of Adapter hooks.
HOOKS = {
    "greedy": "greedy",
    "sampled": "sampled",
    "accept": "accept",
    "worker": "worker_start",
    "forward": "forward",
    "records": "records",
    "clear": "clear",
    "resolve": "resolve",
    "result": "result",
    "payload": "payload",
    "admit": "admit",
    "scheduler": "scheduler_start",
    "params": "params",
    "meta": "meta",
}


# Those that only a step under policies needs.
INNER = ("accept", "greedy", "sampled")
# And what only a capture needs.
SPARE = ("result",)


def put(places: Sequence[tuple[Any, str, Any, Any]], hooked: bool) -> None:
    """At each of `bindings`, the hook or the engine's own function."""
    for owner, name, hook, own in places:
        setattr(owner, name, hook if hooked else own)


def bindings(version: str, names: Sequence[str]) -> list[tuple[Any, str, Any, Any]]:
    """(owner, attribute, hook, the engine's own) of every place of a hooked function, `from X import Y` included.

    A function that another plugin wraps as well stays as it is: its wrapper is not ours to take out.
    """
    found = []
    for name in names:
        owner, _, attribute = seams.expected(version)[name][0].rpartition(".")
        holder = seams.resolve(owner)
        hook = vars(holder)[attribute]
        if not _is_ours(hook, HOOKS[name]):
            continue
        modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
        for module in dict.fromkeys([holder, *modules]):
            places = [key for key, value in list(vars(module).items()) if value is hook]
            found += [(module, key, hook, hook.__wrapped__) for key in places]
    return found


def is_native(req: Any) -> bool:
    """Whether the engine's own accept serves the request."""
    state = req.__dict__.get(STATE)
    return state is None or state.native


def is_sampled(req: Any) -> bool:
    """Temperature above 0: the engine stores a greedy request as top_k 1."""
    return req.sampling_params.top_k > 1


def rejected(logits: Tensor, candidates: Tensor, top: Tensor, length: Tensor) -> Tensor:
    """[B] float32: z(argmax) - z(draft) of the draft behind the accepted ones. logits [B, K+1, V], length [B]."""
    index = length.long().clamp(max=candidates.shape[1] - 2)[:, None]
    row = logits.gather(1, index[..., None].expand(-1, 1, logits.shape[2]))[:, 0]
    return (row.gather(1, top.gather(1, index)) - row.gather(1, candidates.gather(1, index + 1)))[:, 0]


def tensor_parallel_group() -> Any:
    """The engine's tensor-parallel group, or None on a single rank."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    return None if group.world_size == 1 else group


def is_hooked(path: str, method: str) -> bool:
    """Whether what stands at `path` now is a wrapper around an Adapter method of this name."""
    function = seams.resolve(path)
    while function is not None:
        if _is_ours(function, method):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _is_ours(function: Any, method: str) -> bool:
    hooks = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return any(isinstance(getattr(h, "__self__", None), Adapter) and h.__name__ == method for h in hooks)


def refusals(worker: Any, server_args: Any, version: str) -> dict[str, str]:
    """rule -> why this server cannot serve it. Rules not in it are served."""
    every, greedy, sampled = [], [], []
    if float(worker._simulate_acc_len) > 0:
        every.append("the accept length is simulated (SGLANG_SIMULATE_ACC_LEN)")
    for name, plain in (("disaggregation_mode", "null"), ("pp_size", 1), ("tokenizer_worker_num", 1)):
        if getattr(server_args, name) != plain:
            every.append(f"{name}: expected {plain}, found {getattr(server_args, name)}")
    if server_args.enable_dp_attention:
        every.append("enable_dp_attention: expected False, found True")
    if os.environ.get("SGLANG_RUST_SERVER", "0").lower() not in ("", "0", "false", "no", "n"):
        every.append("SGLANG_RUST_SERVER: expected unset, found set")
    if int(worker.gamma) > 31:
        greedy.append(f"draft block size: expected at most 31, found {int(worker.gamma)}")
    if server_args.tp_size > 1 and os.environ.get("SGLANG_SPEC_TP_SYNC", "all") != "all":
        every.append("SGLANG_SPEC_TP_SYNC: expected all with tensor parallelism")
    if worker._verify_epilogue is not None:
        greedy.append(
            "greedy drafts are accepted inside the verify CUDA graph (use static or cap-accept ragged verify)"
        )
    if getattr(worker, "_greedy_draft", False):
        sampled.append("drafts are not sampled from their distribution (SGLANG_DSPARK_USE_GREEDY_DRAFT)")
    if getattr(worker, "_sampling_accept_graph", None) is not None:
        sampled.append("sampled drafts are accepted inside a CUDA graph (SGLANG_OPT_DSV41_SAMPLING_ACCEPT_GRAPH)")
    if getattr(worker, "_rejection_noise", None) is not None:
        sampled.append("another sampler is on (SGLANG_OPT_DSV41_BLOCKWISE_REJECTION)")
    engine = [] if seams.since(version, seams.NATIVE_BLOCK_SINCE) else [f"sglang {version} has no such kernel"]
    why = {"strict": every, "chain": every, "asd": every + greedy, "block": every + sampled}
    why[NATIVE_BLOCK] = every + sampled + engine
    why |= {rule: [f"{rule} is {REFERENCE_ONLY}"] for rule in REFERENCE_RULES}
    return {rule: "; ".join(reasons) for rule, reasons in why.items() if reasons}
