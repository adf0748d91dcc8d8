"""Steps that are kept and counted later say what counting each at once says, and what plain sums of the steps say."""

from __future__ import annotations

from types import SimpleNamespace

import lightllm_rig as rig
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.lightllm import account, patch
from adapters.lightllm.account import Account, Step
from adapters.policy import Policy
from adapters.rules.asd.report import BUDGET
from adapters.telemetry import Telemetry

ASD = Policy("asd", 2.0, 2.0, 1)
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
    return SimpleNamespace(
        sampling_param=SimpleNamespace(shm_param=param),
        finish_status=SimpleNamespace(is_finished=lambda: status.done),
        status=status,
        shm_req=SimpleNamespace(input_len=INPUT, finish_token_index=-1),
        length=0,
        told=[],
    )


def play(requests, at_once: bool, relaxing: bool):
    """Every request's steps, side by side in one batch; then one more in flight, past the end. -> telemetry, records"""
    telemetry, records = Telemetry("lightllm", "lightllm", "v", ASD), []
    book = Account(telemetry, ASD, lambda record: records.append(dict(record)))
    reqs = [request(tagged, sampled, n) for n, (tagged, sampled, _, _) in enumerate(requests)]
    for turn in range(max(len(steps) for _, _, steps, _ in requests) + 1):
        step, kept, packs, regret, ending = Step([], [], []), [], [], [], []
        for req, (_, sampled, steps, cut) in zip(reqs, requests, strict=True):
            if turn > len(steps):
                continue
            live, (accepted, relaxed), drained = steps[min(turn, len(steps) - 1)]
            step.requests.append(req)
            step.rows.append(live + 1)
            step.live.append(live)
            relaxed = 0 if sampled else relaxed
            regret += [0.25] * relaxed + [-1.0] * (live + 1 - relaxed)
            step.stop = [*step.stop, BUDGET if drained else 0] if relaxing else ()
            kept += [req] * (accepted + 1)
            packs += [SimpleNamespace(output_len=req.length + n + 1) for n in range(accepted + 1)]
            req.length += accepted + 1
            if turn == len(steps) - 1:
                ending.append((req, req.length - min(cut, accepted)))
        step.regret = regret if relaxing else ()
        going = patch.going_of(step.requests)
        for req, length in ending:  # as the engine's post handling leaves it
            req.status.done, req.shm_req.finish_token_index = True, INPUT + length - 1
        book.add(step, kept, packs, going)
        if at_once:
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
@settings(derandomize=True, deadline=None, max_examples=150)
def test_counted_later_is_counted_the_same(requests, relaxing):
    counters, records = play(requests, False, relaxing)
    assert (counters, records) == play(requests, True, relaxing)
    own = counters[ASD.key]
    names = ("blocks", "drafts_verified", "relaxed", "committed_tokens", "budget_exhausted")
    assert tuple(own[name] for name in names) == by_hand(requests, relaxing)
    assert own["requests"] == len(requests)
    assert own["regret_charged"] == own["relaxed"] * 0.25 * 0.5  # of raw logits: times the temperature
    assert len(records) == sum(tagged for tagged, *_ in requests)
    for record in records:
        lengths = [accepted for _, (accepted, _), _ in requests[record["tag"]][2]]
        assert record["step_lengths"] == lengths
        assert record["accepted"] == sum(n * count for n, count in enumerate(record["histogram"]))
        assert sum(record["histogram"]) == record["blocks"] == len(lengths)


def one_step(req):
    req.length += 2
    packs = [SimpleNamespace(output_len=req.length - 1), SimpleNamespace(output_len=req.length)]
    return Step([req], [3], [2]), [req, req], packs, patch.going_of([req])


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


def test_no_more_than_so_many_are_kept():
    engine = patch.Engine(ASD, rig.DOUBLE)
    req = request(True, False, 1)
    for _ in range(account.MANY + 5):
        engine.account.add(*one_step(req))
    assert len(engine.account.kept) == 5
    assert engine.telemetry.counters[ASD.key].blocks == account.MANY
    assert engine.account.steps == account.MANY + 5
