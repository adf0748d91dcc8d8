"""Speculative decoding with continuous batching: admit, draft a block, verify it, accept, commit.

A step works on slots 0..n-1, one per running request. What is known of a request lies on the host, in `Request`; the
device holds the two KV caches, and a roll-back is a shorter length. One host copy per step brings back what acceptance
needs. Requests are admitted in order of arrival, so the same list runs through the same batches every time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adapters.policy import GREEDY_RULES, SAMPLED_RULES, Policy
from adapters.rules import asd
from adapters.rules.asd import scalar
from adapters.telemetry import Counters, Telemetry
from harness.engines.reference import judges
from harness.engines.reference.capture import Capture
from harness.engines.reference.model import Target, argmax
from harness.engines.reference.proposer import Proposer
from harness.engines.reference.sampling import Sampling, draw, target_probs

STRICT, CHAIN = Policy("strict"), Policy("chain")
PREFILL_TOKENS = 4096  # prompts of one prefill pass; a longer one goes alone


@dataclass(eq=False)
class Request:
    """One request and all that is known of it. `on_change` is called from the engine's thread after every step that
    gave it tokens or ended it."""

    rid: str
    prompt: list[int]
    params: Sampling
    on_change: Callable[[Request], None] | None = None
    policy: Policy = STRICT  # the rule that decides, after fallbacks
    asked: str = ""  # the key of the policy asked for
    fallback: str | None = None  # why it is not the one that decides
    config: asd.AsdConfig | None = None
    judged: bool = False  # by a rule that is decided on tensors (judges.py)
    thinking: bool = False  # inside the span of the policy's think_start and think_end
    counters: Counters = field(default_factory=Counters)  # of the rule that decides
    generator: torch.Generator | None = None
    stops: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    aborted: bool = False
    steps: int = 0
    histogram: list[int] = field(default_factory=list)
    step_lengths: list[int] = field(default_factory=list)
    relaxed: int = 0
    spent: float = 0.0  # the ledger: a float32 value
    exhausted: int = 0
    rejections: list[tuple[float, int, int]] = field(default_factory=list)
    captured: int = -1  # its number in the capture
    arrived: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def length(self) -> int:
        """Tokens in the KV cache: all but the last one, the anchor of the next block."""
        return len(self.prompt) + len(self.output) - 1

    def meta(self, drafts: int) -> dict[str, Any]:
        """SGLang's meta_info. Drafts that an EOS or the length limit cut count as correct drafts, as they do there."""
        correct = sum(i * count for i, count in enumerate(self.histogram))
        speculation: dict[str, Any] = {}
        if self.steps:
            speculation["spec_accept_length"] = len(self.output) / self.steps
            speculation["spec_accept_rate"] = correct / (self.steps * drafts)
        policy: dict[str, Any] = {"policy": self.policy.key, "asked": self.asked, "relaxed": self.relaxed}
        policy |= {"regret": self.spent, "spent": self.spent, "budget_exhausted": self.exhausted}
        policy["step_lengths"] = self.step_lengths
        if self.params.first_rejections:
            policy["first_rejections"] = self.rejections
        return {
            "id": self.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.output),
            "cached_tokens": 0,
            "spec_verify_ct": self.steps,
            "spec_num_correct_drafts": correct,
            "spec_num_proposed_drafts": self.steps * drafts,
            "spec_correct_drafts_histogram": self.histogram,
            **speculation,
            "specaccept": policy,
            "e2e_latency": self.seconds,
        }


class Engine:
    """target, proposer: allocated for the same slots and positions. limit: longest prompt + output of a request."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        telemetry: Telemetry,
        slots: int,
        limit: int,
        eos: Iterable[int],
        seed: int = 0,
    ) -> None:
        self.target, self.proposer, self.telemetry = target, proposer, telemetry
        self.slots, self.limit, self.eos, self.seed = slots, limit, frozenset(eos), seed
        self.drafts = proposer.block_size
        self.device = target.stack.device
        self.offsets = torch.arange(self.drafts + 1, device=self.device)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # index = slot
        self.admitted = 0
        self.steps = 0
        self.failure: str | None = None
        self.capture: Capture | None = None
        self._wake = threading.Condition()
        self._stopping = False

    # ---- from other threads

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests in order, as one unit: no other request comes between them."""
        for request in requests:
            self._prepare(request)
        with self._wake:
            if self.failure is not None or self._stopping:
                for request in requests:
                    self._end(request, {"type": "abort", "message": self.failure or "the server is stopping"})
                return
            self.waiting.extend(requests)
            self._wake.notify()

    def abort(self, requests: Iterable[Request]) -> None:
        for request in requests:
            request.aborted = True

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        """Serve until `stop`. An exception ends every request with its message, and the engine for good."""
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._stopping or self.waiting or self.running)
                    if self._stopping:
                        break
                self.step()
        except Exception as error:
            self.failure = f"engine: {type(error).__name__}: {error}"
            raise
        finally:
            with self._wake:
                message = self.failure or "the server is stopping"
                self._stopping = True
                rest = [*self.running, *self.waiting]
                self.running.clear()
                self.waiting.clear()
            for request in rest:
                self._end(request, {"type": "abort", "message": message})
            if self.capture is not None:
                self.capture.close()

    def generate(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Run requests to their end in this thread."""
        self.submit(requests)
        while self.waiting or self.running:
            self.step()
        return requests

    # ---- a request's way in and out

    def _prepare(self, request: Request) -> None:
        params = request.params
        default = self.telemetry.default_policy
        asked = params.policy or default or (STRICT if params.greedy else CHAIN)
        fits = asked.rule in (GREEDY_RULES if params.greedy else SAMPLED_RULES)
        request.policy = asked if fits else STRICT if params.greedy else CHAIN
        request.asked = asked.key
        request.counters = self.telemetry.of(request.policy)
        self.telemetry.of(asked)  # here, not at the end: a snapshot may be read meanwhile
        request.fallback = None if fits else "greedy request" if params.greedy else "sampled request"
        if request.policy.rule == "asd":
            request.config = asd.AsdConfig.from_policy(request.policy)
        request.judged = not params.greedy or request.policy.rule in judges.GREEDY
        self._think(request, request.prompt)
        if not params.greedy:
            seed = self.seed + self.admitted if params.seed is None else params.seed
            request.generator = torch.Generator(self.device).manual_seed(seed)
        self.admitted += 1
        request.stops = frozenset() if params.ignore_eos else self.eos | frozenset(params.stop_token_ids)
        request.histogram = [0] * (self.drafts + 1)

    def _end(self, request: Request, finish: dict[str, Any]) -> None:
        request.finish = finish
        if finish["type"] != "abort":
            asked = self.telemetry.of(request.asked)
            asked.requests += 1
            if request.fallback is not None:
                asked.fall_back(request.fallback)
        request.seconds = time.monotonic() - request.arrived
        if request.on_change is not None:
            request.on_change(request)

    def _append(self, request: Request, tokens: list[int]) -> int:
        """Commit tokens up to the first that ends the request. Returns how many were kept."""
        room = request.params.max_new_tokens - len(request.output)
        kept = tokens[:room]
        for i, token in enumerate(kept):
            if token in request.stops:
                kept = kept[: i + 1]
                request.finish = {"type": "stop", "matched": token}
                break
        else:
            if len(kept) == room:
                request.finish = {"type": "length", "length": request.params.max_new_tokens}
        request.output += kept
        self._think(request, kept)
        request.counters.committed_tokens += len(kept)
        return len(kept)

    def _think(self, request: Request, tokens: Sequence[int]) -> None:
        """Whether the policy's thinking span is open behind these tokens."""
        marks = (request.policy.think_start, request.policy.think_end)
        if marks != (None, None):
            last = next((token for token in reversed(tokens) if token in marks), None)
            request.thinking = request.thinking if last is None else last == marks[0]

    def _sweep(self, changed: Iterable[Request]) -> None:
        """Tell about `changed`, then free the slots of ended requests; the last slot moves into each hole."""
        for request in changed:
            if request.finish is not None:
                self._end(request, request.finish)
            elif request.on_change is not None:
                request.on_change(request)
        for slot in reversed(range(len(self.running))):
            if self.running[slot].finish is None:
                continue
            last = self.running.pop()
            if slot < len(self.running):
                self.running[slot] = last
                for stack in (self.target.stack, self.proposer.stack):
                    stack.move(len(self.running), slot, last.length)

    # ---- one step

    @torch.inference_mode()
    def step(self) -> None:
        gone = [request for request in self.running if request.aborted]
        for request in gone:
            request.finish = {"type": "abort", "message": "aborted"}
        self._sweep(gone)
        self._admit()
        if self.running:
            self._decode()

    def _admit(self) -> None:
        new: list[Request] = []
        tokens = 0
        while self.waiting and len(self.running) + len(new) < self.slots:
            request = self.waiting[0]
            if new and tokens + len(request.prompt) > PREFILL_TOKENS:
                break
            self.waiting.popleft()
            if request.aborted:
                self._end(request, {"type": "abort", "message": "aborted"})
                continue
            new.append(request)
            tokens += len(request.prompt)
        if not new:
            return
        slots = range(len(self.running), len(self.running) + len(new))
        prompts = [request.prompt for request in new]
        logits, context = self.target.prefill(prompts, slots)
        self.proposer.commit_prompts(context, slots, [len(prompt) for prompt in prompts])
        first = argmax(logits)
        sampled = [i for i, request in enumerate(new) if request.generator is not None]
        if sampled:
            noise = torch.stack([self._noise(new[i], logits.shape[-1]) for i in sampled])
            first[sampled] = draw(target_probs(logits[sampled], [new[i].params for i in sampled]), noise)
        self.running += new
        for request, token in zip(new, first.tolist(), strict=True):
            self._append(request, [token])
        if self.capture is not None:
            self.capture.enter(new)
        self._sweep(new)

    def _decode(self) -> None:
        running, k = self.running, self.drafts
        state = torch.tensor([[request.output[-1], request.length] for request in running], device=self.device)
        anchors, lengths = state.unbind(1)
        positions = lengths[:, None] + self.offsets
        width = max(request.length for request in running) + k
        sampled = [i for i, request in enumerate(running) if request.generator is not None]
        pick = Draws(self, sampled) if sampled else lambda _, logits: argmax(logits)
        drafts = self.proposer.propose(anchors, positions[:, :k], width, pick)
        logits, context = self.target.verify(torch.cat([anchors[:, None], drafts], 1), positions, width + 1)
        self.proposer.commit_block(context, positions)
        top = argmax(logits)
        matched = drafts == top[:, :k]
        columns = [drafts, matched, top]
        if any(request.judged for request in running):
            columns.append(self._judge(drafts, logits, pick if isinstance(pick, Draws) else None))
        host = torch.cat(columns, 1).tolist()
        regrets: list[list[float]] = []
        if any(request.config is not None or request.params.first_rejections for request in running):
            z = logits[:, :k]
            regrets = (z.gather(2, top[:, :k, None]) - z.gather(2, drafts[..., None])).squeeze(2).tolist()
        self.steps += 1
        committed = [
            self._commit(request, row, regrets[slot] if regrets else None)
            for slot, (request, row) in enumerate(zip(running, host, strict=True))
        ]
        if self.capture is not None:
            draws = pick if isinstance(pick, Draws) else None
            self.capture.step(running, committed, anchors, drafts, logits, top, draws)
        self._sweep(list(running))

    def _judge(self, drafts: Tensor, logits: Tensor, draws: Draws | None) -> Tensor:
        """-> [n, 3], the verdicts of judges.py, zeros in the rows of other requests."""
        found = [] if draws is None else [(draws.rows, draws.accept(drafts, logits))]
        at = [i for i, request in enumerate(self.running) if request.judged and request.generator is None]
        if at:
            requests = [self.running[i] for i in at]
            policies, thinking = [r.policy for r in requests], [r.thinking for r in requests]
            x, z = judges.take(at, drafts, logits)
            found.append((at, judges.greedy(policies, x, z, thinking)))
        return judges.spread(found, drafts)

    def _commit(self, request: Request, row: list[int], regrets: list[float] | None) -> tuple[int, int, int]:
        """row: drafts [k], matched [k], argmax [k + 1] and, with judged requests in the batch, a verdict [3].
        -> drafts accepted, the bonus token, how many of these tokens were kept."""
        k, counters = self.drafts, request.counters
        drafts, matched = row[:k], row[k : 2 * k]
        charge: list[float] = []
        bits = 0
        strict = matched.index(0) if 0 in matched and request.generator is None else k
        if request.judged:
            length, bonus, bits = row[-judges.WIDTH :]
        else:
            length = strict
            if request.config is not None and regrets is not None:
                walked = scalar.walk(matched, regrets, request.spent, request.config, k)
                length, charge = walked.length, walked.charge
                if walked.stop == asd.BUDGET:
                    request.exhausted += 1
                    counters.budget_exhausted += 1
            bonus = row[2 * k + length]
        appended = self._append(request, [*drafts[:length], bonus])
        if regrets is not None and request.params.first_rejections and strict < min(k, appended):
            request.rejections.append((regrets[strict], strict, k))  # one behind the end was never at stake
        kept = min(length, appended)  # an EOS or the length limit may have cut drafts: those are not charged
        relaxed = kept - sum(matched[:kept]) if charge else (bits & ((1 << kept) - 1)).bit_count()
        if charge:
            spent = scalar.settle(request.spent, charge[:kept])
            counters.regret_charged += sum(charge[:kept])
            request.spent = spent
        request.relaxed += relaxed
        request.steps += 1
        request.histogram[length] += 1
        request.step_lengths.append(length)
        counters.blocks += 1
        counters.drafts_verified += k
        counters.relaxed += relaxed
        counters.strict_accepted += kept - relaxed
        return length, bonus, appended

    def _noise(self, request: Request, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device).exponential_(generator=request.generator)


class Draws:
    """The coins and draft distributions of the sampled rows of one step.

    Every request draws the same numbers from its own generator in every step, whatever else is in the batch. Drafts are
    drawn from q = softmax(logits / temperature): q, then, is the distribution the rule has to know.
    """

    def __init__(self, engine: Engine, rows: list[int]) -> None:
        self.rows, self.requests = rows, [engine.running[i] for i in rows]
        size = engine.target.vocabulary
        k = engine.drafts
        self.noise = torch.stack([engine._noise(r, k + 1, size) for r in self.requests])
        eta = [torch.rand(k, device=engine.device, generator=r.generator) for r in self.requests]
        self.eta = torch.stack(eta)
        self.temperature = torch.tensor([r.params.temperature for r in self.requests], device=engine.device)[:, None]
        self.q: list[Tensor] = []
        self.p = self.q_rows = self.temperature  # of the step, once `accept` has them

    def __call__(self, i: int, logits: Tensor) -> Tensor:
        ids = argmax(logits)
        self.q.append(torch.softmax(logits[self.rows] / self.temperature, -1))
        ids[self.rows] = draw(self.q[-1], self.noise[:, i])
        return ids

    def accept(self, drafts: Tensor, logits: Tensor) -> Tensor:
        """-> verdicts of the sampled rows, [rows, 3]."""
        own, x = judges.take(self.rows, logits, drafts)
        self.p = target_probs(own, [r.params for r in self.requests])
        self.q_rows = torch.stack(self.q, 1)
        policies, temperature = [r.policy for r in self.requests], self.temperature[:, 0]
        return judges.sampled(policies, x, self.p, self.q_rows, own, temperature, self.eta, self.noise[:, -1])
