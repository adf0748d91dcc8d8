"""The engine's overlapped loop against the real wheel: step n+1 is launched before step n's result is looked at.

Requests of every kind come, are stopped, aborted, retracted and prefilled anew, and slots change hands, at random; what
the adapter says is compared with a ledger and counters kept in plain Python beside it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from toy_engine import accumulator, blocks, decode, extend, request

from adapters.policy import Policy
from adapters.sglang.adapter import float32
from adapters.telemetry import Counters

K, V = 5, 24
STRICT, B0 = Policy("strict"), Policy("asd", budget=0.0)
POLICIES = [None, STRICT, B0, Policy("asd", budget=0.75, gate=0.5, max_mismatches=2), Policy("asd", budget=40.0)]
SLOTS = 6


def ignore(*_args, **_kwargs):
    """Stands for the engine's own part of a step, which a toy has none of."""


class Grammar:
    """Ends with id 9, and has no id 11."""

    finished = ended = False

    def accept_token(self, token: int) -> None:
        if token == 11:
            raise ValueError("no such token here")
        self.ended = token == 9

    def is_terminated(self) -> bool:
        return self.ended


@dataclasses.dataclass(eq=False)
class Told:
    """What is known of a request without the adapter. rows: of each of its processed steps."""

    req: object
    policy: Policy | None
    slot: int = -1
    ledger: float = 0.0  # on the device
    rows: list = dataclasses.field(default_factory=list)
    answer: dict | None = None

    @property
    def rejections(self) -> list:
        """[regret, position, live] of each first failed draft that the output reached."""
        rows = zip(kept(self), self.rows, strict=True)
        return [
            (regret[length], length, live)
            for (_, _, regret, committed, _), (*_, live, (length, _)) in rows
            if committed == length < live
        ]


def walk(told: Told, drafts, top, regret, live: int) -> tuple[int, bool]:
    """adapters/rules/asd/README.md, draft by draft; charges the ledger. Length, and whether the budget ended it."""
    policy = told.policy or STRICT
    misses, most = 0, K if policy.max_mismatches is None else policy.max_mismatches
    for i in range(live):
        if drafts[i] == top[i]:
            continue
        r = regret[i]
        if policy.rule != "asd" or not (told.ledger < policy.budget and float32(told.ledger + r) <= policy.budget):
            return i, policy.rule == "asd"
        if r > float32(policy.gate * (live - i)) or misses == most:
            return i, False
        told.ledger, misses = float32(told.ledger + r), misses + 1
    return live, False


class Loop:
    def __init__(self, worker, seed: int, capped: bool) -> None:
        self.worker, self.capped = worker, capped
        self.random, self.steps, self.made = random.Random(seed), 0, 0
        self.free, self.waiting, self.running, self.told = list(range(1, SLOTS + 1)), [], [], []
        self.queue = []  # results not looked at
        self.processor = SimpleNamespace(
            model_worker=SimpleNamespace(on_verify_complete_cpu=ignore),
            metrics_reporter=SimpleNamespace(snapshot_spec_decode_metrics=ignore),
            advance_grammar_fsm=self.grammar,
            _accept_grammar_tokens=self.retained,
        )

    def retained(self, req, tokens) -> list[int]:
        return SchedulerBatchResultProcessor._accept_grammar_tokens(self.processor, req, tokens)

    def grammar(self, result, batch) -> None:
        """As the engine's own: newer releases bring the grammar on before they look at the tokens."""
        ids, lens = result.next_token_ids.view(-1, K + 1).tolist(), result.accept_lens.tolist()
        going = [r.grammar is not None and not (r.finished() or r.is_retracted) for r in batch.reqs]
        result.grammar_retained_tokens = [
            self.retained(req, ids[i][: lens[i]]) if going[i] else None for i, req in enumerate(batch.reqs)
        ]

    def arrive(self) -> None:
        policy = self.random.choice(POLICIES)
        stop = self.random.choice([None, [0], [3, 5]])
        req = request(f"r{self.made}", policy=policy, max_new_tokens=self.random.randint(1, 40), stop=stop)
        if policy is not None and self.random.random() < 0.3:
            req.sampling_params.custom_params["specaccept_first_rejections"] = True
        req.stream = self.random.random() < 0.3
        req.grammar = Grammar() if self.random.random() < 0.2 else None
        req.kv = SimpleNamespace(kv_committed_len=0)
        req.kv_committed_len = 0
        self.made += 1
        told = Told(req, policy)
        self.told.append(told)
        self.waiting.append(told)

    def prefill(self) -> tuple:
        batch = [self.waiting.pop(0) for _ in range(min(len(self.free), len(self.waiting)))]
        for told in batch:
            told.slot, told.req.is_retracted = self.free.pop(self.random.randrange(len(self.free))), False
            told.ledger = spent_of(told)  # of tokens that stayed: what was in flight at a retraction is not charged
        for _ in range(self.random.choice([1, 1, 3])):  # in chunks
            result = self.worker.forward_batch_generation(extend([t.req for t in batch], [t.slot for t in batch]))
        self.running += batch
        return "prefill", batch, result, None

    def verify(self) -> tuple:
        batch = list(self.running)
        drafts, logits = blocks(self.random.randrange(2**31), len(batch), K, V)
        top = logits.argmax(-1)
        regret = logits.amax(-1)[:, :K] - logits[:, :K].gather(2, drafts[..., None])[..., 0]
        capped = self.capped and self.random.random() < 0.7
        lives = [self.random.randint(0, K) if capped else K for _ in batch]
        table = [batch, drafts.tolist(), top.tolist(), regret.tolist(), lives]
        seen = [walk(*row) for row in zip(*table, strict=True)]
        lens = torch.tensor(lives) + 1 if capped else None
        run = decode([t.req for t in batch], [t.slot for t in batch], drafts, logits, lens)
        result = self.worker.forward_batch_generation(run)
        assert result.outs.correct_len.tolist() == [length for length, _ in seen]
        rows = list(zip(*table[1:], seen, strict=True))
        return "decode", batch, result, rows

    def look(self, kind: str, batch: list[Told], result, rows) -> None:
        """What the engine's result processor does, with its own `_resolve_spec_v2_tokens` and `update_finish_state`."""
        if kind == "prefill":
            for told in batch:
                if not told.req.is_retracted:
                    told.req.output_ids.append(7)
                    told.req.update_finish_state()
        else:
            reqs = [t.req for t in batch]
            result.accept_lens, result.num_correct_drafts_per_req_cpu = result.outs.commit_lens, None
            result.speculative_num_draft_tokens, result.num_non_draft_tokens_per_req = K + 1, 1
            result.block_accept_lens, result.speculative_output_stride = None, K + 1
            ids = SchedulerBatchResultProcessor._resolve_spec_v2_tokens(
                self.processor, result, SimpleNamespace(reqs=reqs)
            )
            for told, new, row in zip(batch, ids, rows, strict=True):
                if told.req.finished() or told.req.is_retracted:
                    continue  # launched before its end was seen
                told.rows.append((len(told.req.output_ids), *row))
                told.req.output_ids.extend(new)
                told.req.update_finish_state(len(new))
        acc = accumulator()
        for told in batch:
            if not (told.req.finished() and told.req.finished_output):
                acc.accept(req=told.req)
        acc.to_payload(dp_rank=0, is_idle_batch=False)
        for row, (rid, reason) in enumerate(zip(acc.rids, acc.finished_reasons, strict=True)):
            said = acc.customized_info.get("specaccept", [[]] * len(acc.rids))[row]
            told = self.told[int(rid[1:])]
            assert bool(said) == (reason is not None and told.policy is not None)
            if said:
                assert told.answer is None
                told.answer = said[0]
        for told in [t for t in self.running if t.req.finished()]:
            self.leave(told)

    def leave(self, told: Told) -> None:
        self.running.remove(told)
        self.free.append(told.slot)

    def turn(self, arrivals: bool) -> None:
        if arrivals and self.random.random() < 0.4:
            self.arrive()
        if self.running and self.random.random() < 0.1:
            self.random.choice(self.running).req.to_finish = FINISH_ABORT()
        launched = None
        if self.waiting and self.free:
            launched = self.prefill()
        else:
            if self.running and self.random.random() < 0.1:  # not enough room
                told = self.random.choice(self.running)
                told.req.is_retracted = True
                self.leave(told)
                self.waiting.append(told)
            if self.running:
                launched = self.verify()
        if launched is not None:
            self.queue.append(launched)
        if len(self.queue) > 1 or (launched is None and self.queue):
            self.look(*self.queue.pop(0))
        self.steps += 1


def spent_of(told: Told) -> float:
    spent = 0.0
    for drafts, top, regret, committed, _ in kept(told):
        for i in range(committed):
            if drafts[i] != top[i]:
                spent = float32(spent + regret[i])
    return spent


def kept(told: Told):
    """Per step: drafts, argmax, regrets, drafts and ids of it that the output has."""
    end = len(told.req.output_ids_through_stop)
    for before, drafts, top, regret, _, (length, _) in told.rows:
        ids = min(length + 1, end - before)
        yield drafts, top, regret, min(length, ids), ids


def expected(told: list[Told]) -> dict[str, Counters]:
    found: dict[str, Counters] = defaultdict(Counters)
    for t in told:
        if t.policy is None:
            continue
        c = found[t.policy.key]
        c.requests += t.answer is not None
        for (drafts, top, _, committed, ids), (*_, live, (length, drained)) in zip(kept(t), t.rows, strict=True):
            misses = [i for i in range(committed) if drafts[i] != top[i]]
            c.blocks, c.drafts_verified = c.blocks + 1, c.drafts_verified + live
            c.strict_accepted, c.relaxed = c.strict_accepted + committed - len(misses), c.relaxed + len(misses)
            c.committed_tokens += ids
            c.budget_exhausted += drained and committed == length
        c.regret_charged += spent_of(t)
    return found


@pytest.mark.parametrize("capped", [False, True], ids=["static", "cap-accept"])
@pytest.mark.parametrize("seed", range(3))
def test_an_overlapped_loop_says_what_its_requests_really_did(adapter, worker, seed, capped):
    loop = Loop(worker, seed, capped)
    base: dict[str, Counters] = {}

    def compare() -> None:
        counters = DSparkWorkerV2.dump_info_records(worker)["specaccept"]["counters"]
        wanted = {key: dataclasses.asdict(c) for key, c in expected(loop.told).items()}
        for key, now in wanted.items():
            was = dataclasses.asdict(base.get(key, Counters()))
            since = {name: now[name] - was[name] for name in now if name != "fallbacks"}
            said = counters.get(key, dataclasses.asdict(Counters()))
            assert said["regret_charged"] == pytest.approx(since.pop("regret_charged"), abs=1e-6)
            assert {name: said[name] for name in since} == since, key

    while loop.steps < 400 or loop.waiting or loop.running or loop.queue:
        loop.turn(arrivals=loop.steps < 400)
        if loop.random.random() < 0.1:
            compare()
        if loop.random.random() < 0.02:
            DSparkWorkerV2.clear_info_records(worker)
            base = expected(loop.told)
    compare()
    assert (adapter.open, adapter.served) == ({}, set())
    for told in loop.told:
        if told.policy is not None:
            assert told.answer["spent"] == spent_of(told)
            assert told.answer["step_lengths"] == [length for *_, (length, _) in told.rows]
            assert told.answer["drafts_verified"] == sum(live for *_, live, _ in told.rows)
            assert told.answer.get("first_rejections", told.rejections) == told.rejections
    total = expected(loop.told)
    assert all(total[p.key].blocks > 20 for p in POLICIES[1:])
    walked = total[POLICIES[3].key]
    assert min(walked.relaxed, walked.budget_exhausted) > 0
    assert torch.all(adapter.ledger.spent >= 0)
