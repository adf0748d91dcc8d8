"""Two infer threads, requests that come, wait, go and are dropped: what is committed and counted is the rule's."""

from __future__ import annotations

import dataclasses

import lightllm_rig as rig
import numpy as np
import pytest
import torch
from lightllm_rig import Item, Loop, Totals, Toy, by_hand
from test_lightllm_decode import ASD, B0, HUGE, STRICT, TREES

pytestmark = pytest.mark.parametrize("tree", TREES, ids=rig.name_of)


def crowd(seed: int, count: int = 24) -> list[Item]:
    """Cached and new prompts, ends by EOS and by length (the first token's too), pauses of both kinds, clients gone."""
    rng = np.random.default_rng(seed)
    items = []
    for n in range(count):
        prompt = rng.integers(2, rig.V, size=rng.integers(1, 5)).tolist()
        when = int(rng.integers(0, 5))
        kind = ("none", "none", "resume_at", "pause_at", "abort_at")[n % 5]
        changes = {} if kind == "none" else {kind: max(when, kind == "abort_at")}  # a step is launched as it comes
        items.append(
            Item(prompt, int(rng.choice([1, 2, 5, 20, 40])), prefill=bool(rng.integers(2)), tag=100 + n, **changes)
        )
    return items


def stopping(toy: Toy, items: list[Item], policy) -> list[Item]:
    """Every other of them with a stop sequence that its answer does contain."""
    out = []
    for n, item in enumerate(items):
        ids = by_hand(toy, dataclasses.replace(item, abort_at=-1), policy, 4)[0].ids
        at = len(ids) // 2
        out.append(dataclasses.replace(item, stop=ids[at : at + 2]) if n % 2 and len(ids) > 3 else item)
    return out


def run(tree, policy, toy, items, monkeypatch, mixed=False, **options):
    torch.set_num_threads(1)
    with rig.armed(tree, policy, monkeypatch) as modules, monkeypatch.context() as patched:
        rig.on_cpu(modules, patched)
        server = Loop(modules, toy, **options)
        records = []
        if policy is not None:
            modules.patch.engine().account.finished = records.append
        outcomes = server.loop(items, mixed)
        if policy is None:
            return outcomes, server.prefills, {}, []
        engine = modules.patch.engine()
        assert not engine.lost
        return outcomes, server.prefills, engine.snapshot()["counters"], records


def check(outcomes, prefills, counters, records, toy, items, policy):
    want = [by_hand(toy, item, policy, 4, prefills=again) for item, again in zip(items, prefills, strict=True)]
    assert [o.ids for o in outcomes] == [w.ids for w, _ in want]
    for got, (hand, _) in zip(outcomes, want, strict=True):
        np.testing.assert_allclose(got.logprobs, hand.logprobs, atol=2e-5)
    total = dataclasses.asdict(
        Totals(*(sum(column) for column in zip(*(dataclasses.astuple(t) for _, t in want), strict=True)))
    )
    got = dict(counters[policy.key])
    assert got.pop("fallbacks") == {}
    assert got.pop("regret_charged") == pytest.approx(total.pop("regret_charged"), rel=1e-5)
    if policy.is_strict:
        total["budget_exhausted"] = 0
    assert got == total
    ended = [n for n, (_, t) in enumerate(want) if t.requests]
    assert sorted(r["tag"] for r in records) == sorted(items[n].tag for n in ended)
    by_tag = {record["tag"]: record for record in records}
    for n in ended:
        record, hand = by_tag[items[n].tag], want[n][1]
        assert (record["blocks"], record["committed_tokens"]) == (hand.blocks, hand.committed_tokens)
        assert (record["drafts_verified"], record["relaxed"]) == (hand.drafts_verified, hand.relaxed)
        assert record["strict_accepted"] == hand.strict_accepted
    return total


@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed"])
@pytest.mark.parametrize("policy", [STRICT, B0, ASD, HUGE], ids=lambda p: p.key)
def test_a_crowd_on_two_threads(tree, policy, mixed, monkeypatch):
    toy, items = Toy(21), crowd(21)
    found = run(tree, policy, toy, items, monkeypatch, mixed, slots=3)
    total = check(*found, toy, items, policy)
    assert policy.is_strict or total["relaxed"] > 0
    assert total["requests"] < len(items)  # some were dropped
    assert any(sum(again.values()) > 1 for again in found[1]) == mixed


@pytest.mark.parametrize("policy", [B0, ASD], ids=lambda p: p.key)
def test_a_crowd_at_the_overlap_site(tree, policy, monkeypatch):
    toy, items = Toy(22), crowd(22)
    found = run(tree, policy, toy, items, monkeypatch, slots=4, overlap=True)
    check(*found, toy, items, policy)


@pytest.mark.parametrize("policy", [B0, HUGE], ids=lambda p: p.key)
def test_a_crowd_with_stop_sequences(tree, policy, monkeypatch):
    toy = Toy(24)
    items = stopping(toy, crowd(24), policy)
    found = run(tree, policy, toy, items, monkeypatch, slots=3)
    check(*found, toy, items, policy)
    stopped = [o for o, item in zip(found[0], items, strict=True) if item.stop and o.ids[-2:] == item.stop]
    assert len(stopped) > 3


@pytest.mark.parametrize("policy", [B0, ASD], ids=lambda p: p.key)
def test_a_crowd_with_sampled_requests(tree, policy, monkeypatch):
    """Their steps are the engine's, whatever slot they took over; greedy neighbours are as alone."""
    torch.manual_seed(0)
    toy, items = Toy(23, ties=False), crowd(23)
    sampled = [n % 3 == 1 for n in range(len(items))]
    items = [
        dataclasses.replace(item, top_k=rig.V) if drawn else item for item, drawn in zip(items, sampled, strict=True)
    ]
    outcomes, prefills, counters, records = run(tree, policy, toy, items, monkeypatch, slots=3)
    total = Totals()
    for item, drawn, outcome, again in zip(items, sampled, outcomes, prefills, strict=True):
        if not drawn:
            hand, one = by_hand(toy, item, policy, 4, prefills=again)
            assert outcome.ids == hand.ids
            total = Totals(*map(sum, zip(dataclasses.astuple(total), dataclasses.astuple(one), strict=True)))
    own = counters[policy.key]
    assert (own["blocks"], own["committed_tokens"]) == (total.blocks, total.committed_tokens)
    assert own["relaxed"] == total.relaxed
    assert counters["strict"]["relaxed"] == 0
    lengths = {item.tag: len(outcome.ids) for item, outcome in zip(items, outcomes, strict=True)}
    assert all(lengths[r["tag"]] - r["committed_tokens"] >= 0 for r in records)
