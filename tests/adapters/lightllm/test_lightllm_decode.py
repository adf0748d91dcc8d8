"""Whole requests through the engine's own decode step, armed, against the rule written out by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import types

import lightllm_rig as rig
import numpy as np
import pytest
import torch
from lightllm_rig import Item, Server, Totals, Toy, by_hand

from adapters.lightllm import account, exchange
from adapters.policy import Policy
from adapters.rules.common import interpreted

STRICT, B0 = Policy("strict"), Policy("asd", 0.0)
M0 = Policy("asd", 4.0, max_mismatches=0)
HUGE = Policy("asd", 1e6)
ASD = Policy("asd", 2.0625, 2.0625, 1, "normalized")
STABLE = Policy("asd", 8.0, 0.25, 2)
TREES = [tree for tree in rig.TREES if rig.seams.layout_of(tree) == "lightspec"]
pytestmark = pytest.mark.parametrize("tree", TREES, ids=rig.name_of)


@pytest.fixture
def serve(tree, monkeypatch):
    """serve(policy, toy, items, **server) -> (outcomes, counters by key, server)."""
    torch.set_num_threads(1)

    def run(policy, toy, items, check_proposals=True, finished=None, **options):
        with rig.armed(tree, policy, monkeypatch) as modules, monkeypatch.context() as patched:
            rig.on_cpu(modules, patched)
            server = Server(modules, toy, **options)
            if policy is None:
                return server.run(items), {}, server
            engine = modules.patch.engine()
            engine.check_proposals, engine.account.finished = check_proposals, finished
            outcomes = server.run(items)
            assert not engine.lost
            return outcomes, engine.telemetry.snapshot()["counters"], server

    return run


def items_of(seed: int, count: int = 8, **changes) -> list[Item]:
    rng = np.random.default_rng(seed)
    items = []
    for n in range(count):
        prompt = rng.integers(2, rig.V, size=rng.integers(1, 5)).tolist()
        items.append(Item(prompt, int(rng.integers(1, 30)), prefill=bool(n % 3), resume_at=[-1, -1, 2, 3][n % 4]))
    return [dataclasses.replace(item, **changes) for item in items]


def expected(toy, items, policy, step=4, **named):
    pairs = [by_hand(toy, item, policy, step, **named) for item in items]
    total = Totals(*(sum(column) for column in zip(*(dataclasses.astuple(t) for _, t in pairs), strict=True)))
    return [outcome for outcome, _ in pairs], total


def compare(outcomes, counters, want, totals, policy, ranks=False):
    assert [o.ids for o in outcomes] == [o.ids for o in want]
    for got, hand in zip(outcomes, want, strict=True):
        np.testing.assert_allclose(got.logprobs, hand.logprobs, atol=2e-5)
        if ranks:
            assert got.ranks == hand.ranks
    got = counters[policy.key]
    assert got.pop("fallbacks") == {}
    hand = dataclasses.asdict(totals)
    assert got.pop("regret_charged") == pytest.approx(hand.pop("regret_charged"), rel=1e-5)
    assert got == hand


@pytest.mark.parametrize("policy", [STRICT, B0, M0], ids=lambda p: p.key)
def test_strict_policies_change_nothing(serve, policy):
    toy, items = Toy(0), items_of(0)
    unarmed, _, plain = serve(None, toy, items)
    outcomes, counters, server = serve(policy, toy, items)
    assert outcomes == unarmed
    assert server.counted == plain.counted
    want, totals = expected(toy, items, STRICT)
    totals = dataclasses.replace(totals, budget_exhausted=0)  # the engine's kernel decides: no budget is asked
    compare(outcomes, counters, want, totals, policy)
    assert counters[policy.key]["drafts_verified"] > 0


@pytest.mark.parametrize("policy", [STRICT, B0, M0, ASD], ids=lambda p: p.key)
def test_the_step_of_a_strict_server_is_the_engine_s_own(tree, policy, monkeypatch):
    """Nothing between two ids is wrapped where nothing can be relaxed; what is seen is seen behind the answer."""
    with rig.armed(tree, policy, monkeypatch) as modules:
        backend = modules.backend.ModeBackend
        step = [modules.normal.sample, modules.parallel.sample]
        step += [
            getattr(sys.modules[rig.seams.SPECULATIVE], name) for name in ("mtp_verify", "scatter_mtp_next_tokens")
        ]
        step += [getattr(backend, name) for name in ("_sample_and_scatter_token", "_get_next_token_ranks")]
        step.append(backend._async_copy_next_token_infos_to_pin_mem)
        ours = [function.__code__.co_filename == modules.patch.__file__ for function in step]
        assert ours == [policy is ASD] * len(step)
        assert backend._post_handle.__code__.co_filename == modules.patch.__file__


@pytest.mark.parametrize("policy", [ASD, STABLE, HUGE], ids=lambda p: p.key)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_asd_commits_what_the_rule_says_everywhere(serve, policy, seed):
    toy, items = Toy(seed), items_of(seed)
    unarmed, _, _ = serve(None, toy, items)
    outcomes, counters, _server = serve(policy, toy, items, ranks=True)
    want, totals = expected(toy, items, policy)
    compare(outcomes, counters, want, totals, policy, ranks=True)
    assert totals.relaxed > 0
    assert [o.ids for o in outcomes] != [o.ids for o in unarmed]


def test_the_penalty_counter_sees_committed_ids(serve):
    toy, item = Toy(4), Item([5, 9], 20, prefill=False)
    (outcome,), counters, server = serve(HUGE, toy, [item])
    assert counters[HUGE.key]["relaxed"] > 0
    assert [token for _, token in server.counted][: len(outcome.ids)] == outcome.ids


def test_the_overlap_site_reports_committed_ids(serve):
    toy, items = Toy(5), items_of(5, resume_at=-1)
    outcomes, counters, _ = serve(HUGE, toy, items, overlap=True, ranks=True)
    want, totals = expected(toy, items, HUGE)
    compare(outcomes, counters, want, totals, HUGE, ranks=True)
    assert totals.relaxed > 0


def test_greedy_requests_with_a_temperature_are_judged_on_raw_logits(serve):
    toy = Toy(6)
    items = items_of(6, temperature=0.5)
    outcomes, counters, _ = serve(ASD, toy, items)
    want, totals = expected(toy, items, ASD)
    compare(outcomes, counters, want, totals, ASD)
    assert totals.relaxed > 0


def test_dynamic_widths_compose(serve):
    toy = Toy(7)
    rng = np.random.default_rng(7)
    items = [dataclasses.replace(item, widths=rng.integers(1, 6, size=40).tolist()) for item in items_of(7)]
    outcomes, counters, _ = serve(STABLE, toy, items)
    want, totals = expected(toy, items, STABLE)
    compare(outcomes, counters, want, totals, STABLE)
    assert totals.relaxed > 0


def test_sampled_requests_take_the_engine_s_own_path(serve):
    toy = Toy(8, ties=False)
    greedy, sampled = items_of(8, 6), items_of(9, 6, top_k=rig.V, temperature=1.0)
    mixed = [item for pair in zip(greedy, sampled, strict=True) for item in pair]
    outcomes, counters, _ = serve(ASD, toy, mixed)
    want, totals = expected(toy, greedy, ASD)
    assert [o.ids for o in outcomes[::2]] == [o.ids for o in want]
    own = counters[ASD.key]
    assert own["fallbacks"] == {"sampled request": len(sampled)}
    assert own["requests"] == len(mixed)
    assert own["relaxed"] == totals.relaxed > 0
    assert own["blocks"] == totals.blocks
    assert counters["strict"]["relaxed"] == 0
    assert counters["strict"]["blocks"] > 0


def test_junk_columns_are_never_relaxed(serve):
    """Also with the flags off: then the first blocks commit junk, so this test can fail."""
    toy, items = Toy(10), items_of(10)
    outcomes, _, _ = serve(HUGE, toy, items)
    clean, _ = expected(toy, items, HUGE)
    assert [o.ids for o in outcomes] == [o.ids for o in clean]
    broken, _, _ = serve(HUGE, toy, items, check_proposals=False)
    assert [o.ids for o in broken] != [o.ids for o in clean]
    first = Item([7], 12, prefill=False)
    (honest,), (junk,) = serve(HUGE, toy, [first])[0], serve(HUGE, toy, [first], check_proposals=False)[0]
    assert honest.ids == by_hand(toy, first, HUGE, 4)[0].ids
    assert junk.ids[:4] == toy.junk(7)[:4] != honest.ids[:4]


def test_tagged_requests_leave_a_record_of_their_own(serve):
    toy = Toy(12)
    items = [dataclasses.replace(item, tag=1000 + n) for n, item in enumerate(items_of(12))]
    items[3].tag = -1
    records = []
    _, counters, _ = serve(ASD, toy, items, finished=records.append)
    assert sorted(r["tag"] for r in records) == [1000 + n for n in range(len(items)) if n != 3]
    for record in records:
        totals = by_hand(toy, items[record.pop("tag") - 1000], ASD, 4)[1]
        assert record.pop("policy") == ASD.key
        steps, accepted = record.pop("histogram"), record.pop("accepted")
        assert sum(steps) == record["blocks"]
        assert sum(n * count for n, count in enumerate(steps)) == accepted
        lengths = record.pop("step_lengths")
        assert sorted(lengths) == [n for n, count in enumerate(steps) for _ in range(count)]
        assert record["strict_accepted"] + record["relaxed"] <= accepted <= record["drafts_verified"]
        hand = dataclasses.asdict(totals)
        del hand["requests"]
        assert record.pop("regret_charged") == pytest.approx(hand.pop("regret_charged"))
        assert record == hand
    assert counters[ASD.key]["requests"] == len(items)


def test_a_slot_forgets_its_last_owner(serve):
    """One slot, many owners: each has the whole budget, and none less."""
    toy, items = Toy(11), items_of(11, 10)
    outcomes, counters, _ = serve(ASD, toy, items, slots=1)
    want, totals = expected(toy, items, ASD)
    compare(outcomes, counters, want, totals, ASD)
    assert totals.budget_exhausted > 0


def test_a_served_engine_answers_through_the_folder(tree, monkeypatch, tmp_path):
    """What the harness does: every seam in place, counters by file, one record per tagged request."""
    monkeypatch.setenv(exchange.FOLDER, str(tmp_path))
    monkeypatch.setenv("SPECACCEPT_NONCE", "this launch")
    toy, items = Toy(1), [dataclasses.replace(item, tag=n) for n, item in enumerate(items_of(1))]
    with rig.armed(tree, ASD, monkeypatch) as modules, monkeypatch.context() as patched:
        rig.on_cpu(modules, patched)
        modules.patch.engine().serve(0, 1)
        Server(modules, toy).run(items)
        found = exchange.ask(tmp_path, 10)
        follower = exchange.Follower(tmp_path)
        records = [follower.take(n, 10) for n in range(len(items))]
    assert (found["armed"], found["nonce"], found["ranks"]) == (True, "this launch", 1)
    assert found["engine"]["version"].startswith("lightspec+seams.")
    assert "adapters/lightllm/patch.py" in found["files"]
    counters = found["counters"][ASD.key]
    assert counters["requests"] == len(items)
    for name in ("blocks", "drafts_verified", "relaxed", "committed_tokens"):
        assert counters[name] == sum(record[name] for record in records) > 0


def test_a_missing_seam_does_not_serve(tree, monkeypatch):
    with rig.armed(tree, ASD, monkeypatch) as modules:
        engine = modules.patch.engine()
        engine.installed.discard(rig.seams.NORMAL)
        with pytest.raises(rig.seams.Refused, match=r"not armed at .*chunked_prefill\.impl"):
            engine.serve(0, 1)
        assert not engine.telemetry.armed


def test_a_folder_that_cannot_be_written_does_not_serve(tree, monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv(exchange.FOLDER, str(tmp_path / "taken"))
    with (
        rig.armed(tree, ASD, monkeypatch) as modules,
        pytest.raises(
            rig.seams.Refused, match=r"SPECACCEPT_TELEMETRY_DIR: expected a folder to write to, found .*taken"
        ),
    ):
        modules.patch.engine().serve(0, 1)


def test_two_threads_keep_their_steps_apart(tree, monkeypatch):
    """Thread A samples, then B samples; each verification finds its own logits.

    Under Triton's interpreter they verify one after the other: for the time of a launch it replaces functions of
    triton.language in the whole process, and of two launches at once one loses them, whatever the kernel ("`_semantic`
    argument must be provided outside of JIT functions").
    """
    turn = threading.Lock() if interpreted() else contextlib.nullcontext()
    with rig.armed(tree, HUGE, monkeypatch) as modules:
        engine = modules.patch.engine()
        toy, table = Toy(2), torch.zeros(3, rig.W, dtype=torch.int64)
        barrier, results = threading.Barrier(2, timeout=30), {}

        def step(slot):
            req = types.SimpleNamespace(req_idx=slot)
            param = types.SimpleNamespace(top_k=1, temperature=1.0, seed=-1)
            req.sampling_param = types.SimpleNamespace(shm_param=param)
            account.marks_of(req).drafts = 4
            token = 10 + slot
            table[slot, 0], table[slot, 1:] = token, torch.tensor(toy.junk(token))
            z = toy.logits[table[slot, :5]].clone()
            ids = z.argmax(-1)
            barrier.wait()
            engine.sampled(z, [req] * 5, ids, torch.zeros(5))
            barrier.wait()
            starts, slots = torch.tensor([0], dtype=torch.int32), torch.full((5,), slot, dtype=torch.int32)
            with turn:
                engine.verify(modules.kernels.mtp_verify, table, starts, ids, slots)
            results[slot] = ids.tolist()

        threads = [threading.Thread(target=step, args=(slot,)) for slot in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not engine.lost
        for slot in (0, 1):
            assert results[slot][:4] == toy.junk(10 + slot)[:4]


def test_a_verify_call_without_its_logits_is_strict_and_disarms(tree, monkeypatch, capsys):
    with rig.armed(tree, HUGE, monkeypatch) as modules:
        engine = modules.patch.engine()
        engine.telemetry.armed = True
        starts, slots = torch.tensor([0], dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
        table = torch.arange(rig.W).repeat(2, 1)
        ids = torch.tensor([1, 2, 9, 4, 5])
        module = modules.backend if engine.layout == "earlier" else sys.modules[rig.seams.SPECULATIVE]
        lengths, accepted = module.mtp_verify(
            req_to_next_token_ids=table, b_req_mtp_start_loc=starts, new_next_token_ids=ids, b_req_idx=slots
        )
        assert (lengths.tolist(), accepted.tolist()) == ([3], [1, 1, 1, 0, 0])
        snapshot = engine.telemetry.snapshot()
        assert not snapshot["armed"]
        assert snapshot["counters"][HUGE.key]["fallbacks"] == {"logits not found": 1}
    assert "not armed" in capsys.readouterr().err
