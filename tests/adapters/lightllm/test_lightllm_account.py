"""Counters of steps, from hooks and from the engine's own totals, against plain sums of the steps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import lightllm_rig as rig
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.lightllm import account, patch
from adapters.lightllm.account import Account, Step
from adapters.policy import Policy
from adapters.rules.asd.report import BUDGET
from adapters.telemetry import Telemetry

ASD, B0 = Policy("asd", 2.0, 2.0, 1), Policy("asd", 0.0)
INPUT = 10

# By request: seed or none, sampled, and per step (live drafts, accepted of them, relaxed of those, out of budget); how
# many of the last step's tokens the end cuts.
STEP = st.integers(0, 7).flatmap(
    lambda live: st.tuples(
        st.just(live), st.integers(0, live).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.booleans()
    )
)
REQUEST = st.tuples(st.booleans(), st.booleans(), st.lists(STEP, min_size=1, max_size=5), st.integers(0, 7))


def request(tagged: bool, sampled: bool, number: int):
    param = SimpleNamespace(top_k=-1 if sampled else 1, temperature=0.5, seed=number if tagged else -1)
    status = SimpleNamespace(done=False)
    shared = SimpleNamespace(input_len=INPUT, finish_token_index=-1)
    shared.mtp_verify_step_num = shared.mtp_verify_token_num = shared.mtp_accepted_token_num = 0
    return SimpleNamespace(
        sampling_param=SimpleNamespace(shm_param=param),
        finish_status=SimpleNamespace(is_finished=lambda: status.done),
        status=status,
        shm_req=shared,
        length=0,
    )


def batch(reqs, requests, turn):
    """One verify call of every request that still runs: (step, accepted rows, packs, those that end), as the engine's
    totals say it too. A request has one step past its end: it was in flight."""
    step, kept, packs, regret, stop, ending = Step([], [], []), [], [], [], [], []
    for req, (_, sampled, steps, cut) in zip(reqs, requests, strict=True):
        if turn > len(steps):
            continue
        live, (accepted, relaxed), drained = steps[min(turn, len(steps) - 1)]
        step.requests.append(req)
        step.rows.append(live + 1)
        step.live.append(live)
        relaxed = 0 if sampled else relaxed
        regret += [0.25] * relaxed + [-1.0] * (live + 1 - relaxed)
        stop.append(BUDGET if drained else 0)
        kept += [req] * (accepted + 1)
        packs += [SimpleNamespace(output_len=req.length + n + 1) for n in range(accepted + 1)]
        req.length += accepted + 1
        req.shm_req.mtp_verify_step_num += 1
        req.shm_req.mtp_verify_token_num += live + 1
        req.shm_req.mtp_accepted_token_num += accepted
        if turn == len(steps) - 1:
            ending.append((req, req.length - min(cut, accepted)))
    step.regret, step.stop = regret, stop
    for req, length in ending:  # as the engine's post handling leaves it
        req.status.done, req.shm_req.finish_token_index = True, INPUT + length - 1
    return step, kept, packs


def play(requests, how: str, asked: bool, policy=ASD):
    """Every request's steps, side by side in one batch. how: relaxing, strict (the same hooks), own (the engine's
    totals). asked: somebody reads the telemetry after each step. -> counters, records"""
    telemetry, records = Telemetry("lightllm", "lightllm", "v", policy), []
    book = Account(telemetry, policy, lambda record: records.append(dict(record)))
    reqs = [request(tagged, sampled, n) for n, (tagged, sampled, _, _) in enumerate(requests)]
    for turn in range(max(len(steps) for _, _, steps, _ in requests) + 1):
        step, kept, packs = batch(reqs, requests, turn)
        if how == "own":
            book.look(kept, packs)
        else:
            if how == "strict":
                step.regret = step.stop = ()
            book.add(step, kept, packs)
        if asked:
            book.settle()
    book.settle()
    return telemetry.snapshot()["counters"], records


def by_hand(requests, relaxing: bool):
    """Sums over greedy requests: blocks, drafts, relaxed, committed, out of budget."""
    blocks = drafts = relaxed = committed = drained = 0
    for _, sampled, steps, cut in requests:
        for turn, (live, (accepted, loose), dry) in enumerate(steps):
            if sampled:
                continue
            past = min(cut, accepted) if turn == len(steps) - 1 else 0
            outputs = accepted + 1 - past
            blocks, drafts, committed = blocks + 1, drafts + live, committed + outputs
            if relaxing:
                relaxed += min(loose, outputs, accepted)
                drained += dry and live > 0 and not past
    return blocks, drafts, relaxed, committed, drained


@given(st.lists(REQUEST, min_size=1, max_size=4), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_steps_are_counted_as_by_hand_however_often_somebody_asks(requests, relaxing):
    how = "relaxing" if relaxing else "strict"
    counters, records = play(requests, how, False)
    often = play(requests, how, True)
    assert often[1] == records
    assert often[0] == counters
    greedy = any(not sampled for _, sampled, *_ in requests)
    own = counters[ASD.key]
    names = ("blocks", "drafts_verified", "relaxed", "committed_tokens", "budget_exhausted")
    assert tuple(own[name] for name in names) == by_hand(requests, relaxing)
    assert own["strict_accepted"] + own["relaxed"] <= own["drafts_verified"]
    assert own["requests"] == len(requests)
    assert greedy or own["blocks"] == 0
    assert own["regret_charged"] == own["relaxed"] * 0.25 * 0.5  # of raw logits: times the temperature
    assert len(records) == sum(tagged for tagged, *_ in requests)
    for record in records:
        lengths = [accepted for _, (accepted, _), _ in requests[record["tag"]][2]]
        assert record["step_lengths"] == lengths
        assert record["accepted"] == sum(n * count for n, count in enumerate(record["histogram"]))
        assert sum(record["histogram"]) == record["blocks"] == len(lengths)


@given(st.lists(REQUEST, min_size=1, max_size=4), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_the_engine_s_own_totals_say_the_same(requests, asked):
    """Blocks, tokens and requests as the hooks count them; nothing live in the first step of a request, whose columns
    no step before it has drafted."""
    found, told = play(requests, "own", asked, B0)
    want, records = play(requests, "strict", False, B0)
    for key in want:
        for name in ("blocks", "committed_tokens", "requests", "fallbacks", "relaxed", "budget_exhausted"):
            assert found[key][name] == want[key][name]
    assert [record["tag"] for record in told] == [record["tag"] for record in records]
    for record, hooked in zip(told, records, strict=True):
        first, *steps = requests[record["tag"]][2]
        assert record["drafts_verified"] == sum(live for live, *_ in steps) == hooked["drafts_verified"] - first[0]
        assert record["step_lengths"] == [0] + [accepted for _, (accepted, _), _ in steps]
        assert record["committed_tokens"] == hooked["committed_tokens"]
        if steps:
            assert record["strict_accepted"] == hooked["strict_accepted"] - first[1][0]


@pytest.mark.parametrize(
    ("field", "more"), [("mtp_verify_step_num", 1), ("mtp_accepted_token_num", -1), ("mtp_verify_token_num", -3)]
)
def test_totals_that_contradict_the_reported_tokens_disarm(field, more, capsys):
    engine = patch.Engine(B0, rig.DOUBLE)
    engine.telemetry.armed = True
    req = request(True, False, 1)
    engine.look(*one_step(req)[1:])
    assert engine.telemetry.armed
    _, kept, packs = one_step(req)
    setattr(req.shm_req, field, getattr(req.shm_req, field) + more)
    engine.look(kept, packs)
    found = engine.snapshot()
    assert not found["armed"]
    assert found["counters"][B0.key]["fallbacks"] == {"totals and tokens differ": 1}
    assert "expected 2 reported tokens of one step, found" in capsys.readouterr().err


def test_several_tokens_without_a_step_disarm(capsys):
    """A prefill reports one token of a request: more of them are a verify call that nobody counted."""
    engine = patch.Engine(B0, rig.DOUBLE)
    engine.telemetry.armed = True
    req = request(True, False, 1)
    _, kept, packs = one_step(req)
    req.shm_req.mtp_verify_step_num -= 1
    engine.look(kept, packs)
    assert not engine.snapshot()["armed"]
    assert "expected 2 reported tokens of one step, found 0 steps" in capsys.readouterr().err


@pytest.mark.parametrize("policy", [B0, ASD], ids=lambda policy: policy.key)
def test_a_record_that_cannot_be_written_disarms_and_the_engine_goes_on(policy, monkeypatch, capsys):
    """The engine's own thread writes it: an error there would end the server, not its measurement.

    Only the rank that reports writes. The rule stays, or this rank would commit other tokens than its neighbours.
    """
    toy = rig.Toy(2)
    monkeypatch.setenv("SPECACCEPT_POLICY", json.dumps(policy.to_json()))
    with rig.armed(rig.DOUBLE, policy, monkeypatch) as modules, monkeypatch.context() as patched:
        rig.on_cpu(modules, patched)
        engine = modules.patch.engine()
        engine.telemetry.armed = True
        with Path("/dev/full").open("wb", buffering=0) as full:
            engine.account.finished = lambda record: full.write(json.dumps(record).encode())
            items = [rig.Item([3, 5], 12, tag=n, prefill=bool(n % 2)) for n in range(4)] + [rig.Item([3], 1, tag=9)]
            outcomes = rig.Server(modules, toy).run(items)
        assert [o.ids for o in outcomes] == [rig.by_hand(toy, item, policy, 4)[0].ids for item in items]
        found = engine.snapshot()
    assert not found["armed"]
    assert found["counters"][policy.key]["fallbacks"]["record not written"] >= 1
    assert "record not written: [Errno 28]" in capsys.readouterr().err


def test_a_slot_closed_for_want_of_a_whole_proposal_is_not_out_of_budget():
    """More columns verified than drafted: strict decides the block, and its mismatch has not drained a budget."""
    engine = patch.Engine(ASD, rig.DOUBLE)
    req = request(True, False, 1)
    step, kept, packs = batch([req], [(True, False, [(4, (1, 0), True)] * 2, 0)], 0)
    step.live = [2]
    engine.account.add(step, kept, packs)
    found = engine.snapshot()["counters"][ASD.key]
    assert (found["drafts_verified"], found["budget_exhausted"]) == (2, 0)


def one_step(req):
    return batch([req], [(True, False, [(2, (1, 0), False)] * 10_000, 0)], 0)


def test_whoever_asks_sees_every_step():
    """A request that is under way, or was dropped by the engine without an end, is in the snapshot."""
    engine = patch.Engine(ASD, rig.DOUBLE)
    req = request(True, False, 1)
    for _ in range(3):
        engine.account.add(*one_step(req))
    assert engine.telemetry.counters == {}
    found = engine.snapshot()["counters"][ASD.key]
    assert (found["blocks"], found["drafts_verified"], found["committed_tokens"], found["requests"]) == (3, 6, 6, 0)
    assert engine.snapshot()["counters"][ASD.key] == found


def test_no_more_than_so_many_requests_are_remembered():
    engine = patch.Engine(ASD, rig.DOUBLE)
    for n in range(account.MANY + 5):
        engine.account.add(*one_step(request(True, False, n)))
    assert len(engine.account.listed) == 5
    assert engine.telemetry.counters[ASD.key].blocks == account.MANY
    assert engine.snapshot()["counters"][ASD.key]["blocks"] == account.MANY + 5
