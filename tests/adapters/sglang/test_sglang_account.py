"""Host side against the real wheel: what the engine commits of a step, counters, responses, the snapshot."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from toy_engine import accumulator, blocks, decode, prefilled, request

from adapters.arm import GREEDY_REQUEST, SAMPLED_REQUEST
from adapters.policy import Policy
from adapters.sglang.adapter import OPEN, float32
from adapters.telemetry import Counters

K, V = 5, 24
WIDE = Policy("asd", budget=40.0, gate=1.0)
B0, STRICT, BLOCK = Policy("asd", budget=0.0), Policy("strict"), Policy("block")


def ignore(*_args, **_kwargs):
    """Stands for the engine's own part of a step, which frees caches that a toy has none of."""


def noted(adapter, req, result, row) -> None:
    """The step's lengths are on the host: row `row` of it is this request, the others are nobody's."""
    adapter.resolve(ignore, None, result, SimpleNamespace(reqs=[SimpleNamespace()] * row + [req]))


def commit(adapter, req, result, row) -> list[int]:
    """What SchedulerBatchResultProcessor does with one row: append, find the stop, hand over."""
    width = K + 1
    noted(adapter, req, result, row)
    ids = result.next_token_ids[row * width :][: result.num_correct_drafts_per_req_cpu[row] + 1].tolist()
    req.output_ids.extend(ids)
    req.update_finish_state(len(ids))
    adapter.result(ignore, None, req, None, result, row, None)
    if req.finished() and (state := getattr(req, "_specaccept", None)) is not None:
        adapter.settle(state, len(req.output_ids_through_stop))  # as with its last payload: twice is once
    return ids


def run(adapter, worker, reqs, steps=40, greedy=True):
    """Decode until every request has finished; returns per request its steps as (drafts, argmax, regrets, kept)."""
    slots = list(range(1, len(reqs) + 1))
    prefilled(worker, reqs, slots)
    seen = [[] for _ in reqs]
    for seed in range(steps):
        alive = [i for i, r in enumerate(reqs) if not r.finished()]
        if not alive:
            return seen
        drafts, logits = blocks(1000 + seed, len(alive), K, V)
        top = logits.argmax(-1)
        regret = logits.amax(-1)[:, :K] - logits[:, :K].gather(2, drafts[..., None])[..., 0]
        batch = decode([reqs[i] for i in alive], [slots[i] for i in alive], drafts, logits)
        result = worker.forward_batch_generation(batch)
        for row, i in enumerate(alive):
            before = len(reqs[i].output_ids)
            commit(adapter, reqs[i], result, row)
            kept = len(reqs[i].output_ids_through_stop) - before
            seen[i].append((drafts[row], top[row], regret[row], min(kept, int(result.outs.correct_len[row])), kept))
    return seen


@pytest.mark.parametrize("limit", [4, 17, 29])
@pytest.mark.parametrize("stop", [None, [0, 1]], ids=["length", "stop-id"])
def test_only_what_the_output_keeps_is_charged_and_counted(adapter, worker, limit, stop):
    policies = [WIDE] * 9 + [B0, STRICT]
    reqs = [request(f"r{i}", policy=p, max_new_tokens=limit, stop=stop) for i, p in enumerate(policies)]
    seen = run(adapter, worker, reqs)
    expected: dict[str, Counters] = {}
    for req, steps in zip(reqs, seen, strict=True):
        state = req._specaccept
        c = expected.setdefault(state.policy.key, Counters())
        spent, relaxed = 0.0, 0
        for drafts, top, regret, committed, kept in steps:
            misses = [j for j in range(committed) if drafts[j] != top[j]]
            relaxed += len(misses)
            for j in misses:
                spent = float32(spent + float(regret[j]))
            c.blocks, c.drafts_verified = c.blocks + 1, c.drafts_verified + K
            c.strict_accepted += committed - len(misses)
            c.committed_tokens += kept
        c.relaxed += relaxed
        c.regret_charged += spent
        assert (state.spent, state.relaxed) == (spent, relaxed)
        assert req.finished()
        assert sum(kept for *_, kept in steps) + 1 == len(req.output_ids_through_stop)
    for key, wanted in expected.items():
        found = dataclasses.asdict(adapter.telemetry.counters[key])
        for name in ("blocks", "drafts_verified", "strict_accepted", "relaxed", "committed_tokens"):
            assert found[name] == getattr(wanted, name), (key, name)
        assert found["regret_charged"] == pytest.approx(wanted.regret_charged, abs=1e-9)
    assert expected[WIDE.key].relaxed > 0
    assert expected[B0.key].relaxed == expected[STRICT.key].relaxed == 0


def test_a_zero_regret_tie_beyond_the_stop_is_not_counted(adapter, worker):
    req = request("r", policy=WIDE, max_new_tokens=2)  # one id from the prefill, one from the block
    prefilled(worker, [req], [1])
    drafts, logits = torch.ones(1, K, dtype=torch.int64), torch.zeros(1, K + 1, V)  # every draft ties with id 0
    result = worker.forward_batch_generation(decode([req], [1], drafts, logits))
    assert result.outs.correct_len.tolist() == [K]
    commit(adapter, req, result, 0)
    counters = adapter.telemetry.counters[WIDE.key]
    assert (counters.relaxed, counters.strict_accepted, counters.committed_tokens) == (1, 0, 1)
    assert req._specaccept.relaxed == 1


@pytest.mark.parametrize("policy", [Policy("asd", budget=1.0), B0], ids=["walked", "B=0"])
def test_budget_stops_are_counted_where_the_block_reached_them(adapter, worker, policy):
    drafts, logits = torch.zeros(1, K, dtype=torch.int64), torch.zeros(1, K + 1, V)
    drafts[0, 3], logits[0, :, 0], logits[0, :, 1] = 1, 4.0, 1.0
    for limit, stops in ((64, 1), (3, 0)):  # cut behind the second draft: the block never got to its fourth
        adapter.telemetry.reset()
        req = request(f"r{limit}", policy=policy, max_new_tokens=limit)
        prefilled(worker, [req], [1])
        result = worker.forward_batch_generation(decode([req], [1], drafts, logits))
        commit(adapter, req, result, 0)
        adapter.book()
        assert adapter.telemetry.counters[policy.key].budget_exhausted == stops
        assert req._specaccept.exhausted == stops


@pytest.mark.parametrize("policy", [STRICT, Policy("asd", budget=1.0, gate=0.1)], ids=["strict", "asd"])
def test_first_rejections_are_kept_where_a_request_asks_for_them(adapter, worker, policy):
    req = request("r", policy=policy, max_new_tokens=60)
    req.sampling_params.custom_params["specaccept_first_rejections"] = True
    [steps] = run(adapter, worker, [req])
    wanted = [
        (float(regret[kept]), kept, K)
        for _, _, regret, kept, new in steps
        if kept < K and new == kept + 1  # the block was not cut, and stopped at a draft
    ]
    assert len(wanted) > 5
    assert req._specaccept.summary()["first_rejections"] == wanted


@pytest.mark.parametrize("policy", [STRICT, B0, WIDE], ids=["strict", "B=0", "walked"])
def test_who_reads_the_counters_in_between_changes_nothing(adapter, worker, policy):
    found = []
    for readers in (False, True):
        adapter.telemetry.reset()
        reqs = [request(f"r{i}{readers}", policy=policy, max_new_tokens=20 + i, stop=[0]) for i in range(3)]
        for req in reqs:
            req.sampling_params.custom_params["specaccept_first_rejections"] = True
        slots = [1, 2, 3]
        prefilled(worker, reqs, slots)
        blocks_seen = 0
        for seed in range(12):
            alive = [i for i, r in enumerate(reqs) if not r.finished()]
            drafts, logits = blocks(seed, 3, K, V)
            rows = torch.tensor(alive, dtype=torch.long)
            batch = decode([reqs[i] for i in alive], [slots[i] for i in alive], drafts[rows], logits[rows])
            result = worker.forward_batch_generation(batch)
            for row, i in enumerate(alive):
                commit(adapter, reqs[i], result, row)
            blocks_seen += len(alive)
            if readers:
                snapshot = DSparkWorkerV2.dump_info_records(worker)["specaccept"]
                assert snapshot["counters"][policy.key]["blocks"] == blocks_seen
            if all(r.finished() for r in reqs):
                break
        assert all(r.finished() for r in reqs)
        states = [{k: v for k, v in vars(r._specaccept).items() if k != "policy"} for r in reqs]
        found.append((dataclasses.asdict(adapter.telemetry.counters[policy.key]), states))
    (late, first), (early, second) = found
    assert late["regret_charged"] == pytest.approx(early["regret_charged"], abs=1e-9)
    assert late | {"regret_charged": 0} == early | {"regret_charged": 0}
    assert first == second
    assert policy == WIDE or any(state["rejections"] for state in first)


def test_the_engines_own_look_at_a_step_is_where_lengths_are_noted(adapter, worker):
    reqs = [request(f"r{i}", policy=p, max_new_tokens=9) for i, p in enumerate((STRICT, None, WIDE, B0, STRICT))]
    prefilled(worker, reqs, [1, 2, 3, 4, 5])
    for req in reqs:
        req.kv = SimpleNamespace(kv_committed_len=0)
    reqs[3].is_retracted, reqs[4].finished_reason = True, "stop"  # steps in flight that the engine drops
    drafts, logits = blocks(5, 5, K, V)
    result = worker.forward_batch_generation(decode(reqs, [1, 2, 3, 4, 5], drafts, logits))
    result.accept_lens, result.num_correct_drafts_per_req_cpu = result.outs.commit_lens, None
    result.speculative_num_draft_tokens, result.num_non_draft_tokens_per_req = K + 1, 1
    result.block_accept_lens, result.speculative_output_stride = None, K + 1
    own = SimpleNamespace(
        model_worker=SimpleNamespace(on_verify_complete_cpu=ignore),
        metrics_reporter=SimpleNamespace(snapshot_spec_decode_metrics=ignore),
        advance_grammar_fsm=ignore,
    )
    tokens = SchedulerBatchResultProcessor._resolve_spec_v2_tokens(own, result, SimpleNamespace(reqs=reqs))
    accepted = result.outs.correct_len.tolist()
    assert [len(ids) - 1 for ids in tokens] == accepted
    assert [reqs[i]._specaccept.lengths for i in (0, 2, 3, 4)] == [[accepted[0]], [accepted[2]], [], []]
    assert [r.spec_verify_ct for r in reqs] == [1, 1, 1, 0, 0]  # as the engine itself counts


def test_steps_of_a_request_that_vanished_are_counted_and_the_request_forgotten(adapter, worker):
    policies = [STRICT, WIDE]
    reqs = [request(f"r{i}", policy=p) for i, p in enumerate(policies)]
    prefilled(worker, reqs, [1, 2])
    drafts, logits = blocks(3, 2, K, V)
    result = worker.forward_batch_generation(decode(reqs, [1, 2], drafts, logits))
    for row, req in enumerate(reqs):
        commit(adapter, req, result, row)
    assert len(adapter.open) == 2
    adapter.open_limit = 2  # retracted, then aborted in the queue: no hook sees its end, the collector does not matter
    del reqs, req, result
    late = request("late", policy=B0)
    prefilled(worker, [late], [3])
    assert list(adapter.open) == ["late"]
    assert adapter.telemetry.counters["strict"].blocks == adapter.telemetry.counters[WIDE.key].blocks == 1
    assert adapter.open_limit == OPEN


@pytest.mark.parametrize("collected", [True, False])
def test_an_id_used_again_is_another_request(adapter, worker, collected):
    """A client that gave up in the middle of a chunked prefill: the engine drops the request without a payload."""
    first = request("id", policy=WIDE)
    prefilled(worker, [first], [1])
    if collected:
        del first
    second = request("id", max_new_tokens=1)  # the same id, no policy
    prefilled(worker, [second], [2])
    assert (adapter.open, adapter.served) == ({}, set())
    second.update_finish_state()
    acc = accumulator()
    acc.accept(req=second)
    acc.to_payload(dp_rank=0, is_idle_batch=False)
    assert respond(adapter, acc, 0) == {}
    assert WIDE.key not in adapter.telemetry.counters  # it never verified a block, nor finished


def test_an_id_used_again_by_a_request_that_never_began(adapter, worker):
    req = request("id", policy=WIDE)
    prefilled(worker, [req], [1])
    del req
    second = request("id", policy=WIDE)
    second.finished_reason = FINISH_ABORT("the queue is full")
    acc = accumulator()
    acc.accept(req=second)
    acc.to_payload(dp_rank=0, is_idle_batch=False)
    assert respond(adapter, acc, 0) == {}
    assert (adapter.open, adapter.served) == ({}, set())


# -- responses -----------------------------------------------------------------------------------------------------


def respond(adapter, acc, row) -> dict:
    """The tokenizer process with one row of a payload: the engine extends its list, then asks for the spec metrics."""
    state = SimpleNamespace(customized_info_accumulated={}, customized_info_reported_keys=set())
    meta = {}
    for key, values in acc.customized_info.items():
        state.customized_info_accumulated[key] = list(values[row])
        state.customized_info_reported_keys.add(key)
        meta[key] = state.customized_info_accumulated[key]
    manager = SimpleNamespace(rid_to_state={acc.rids[row]: state})
    adapter.meta(ignore, manager, meta, SimpleNamespace(rids=acc.rids), row)
    assert "specaccept" not in state.customized_info_accumulated  # or a stream would slice and re-report it
    return meta


def test_a_finished_request_reports_its_policy_and_what_it_did(adapter, worker):
    reqs = [request("plain", max_new_tokens=9), request("wide", policy=WIDE, max_new_tokens=9)]
    reqs += [request("strict", policy=STRICT, max_new_tokens=9), request("going", policy=WIDE, max_new_tokens=500)]
    reqs[0].customized_info = {"other": list(range(99))}  # another plugin's values, one per token
    run(adapter, worker, reqs, steps=9)
    acc = accumulator()
    for req in reqs:
        req.stream = req.rid == "going"
        acc.accept(req=req)
    acc.to_payload(dp_rank=0, is_idle_batch=False)
    assert acc.rids == ["plain", "wide", "strict", "going"]
    assert [len(v) for v in acc.customized_info.values()] == [4, 4]
    assert respond(adapter, acc, 0) == {"other": list(range(9))}
    wide = respond(adapter, acc, 1)["specaccept"]
    state = reqs[1]._specaccept
    assert wide == {
        "policy": WIDE.key,
        "asked": WIDE.key,
        "relaxed": state.relaxed,
        "regret": state.spent,
        "spent": state.spent,
        "budget_exhausted": 0,
        "drafts_verified": 5 * len(state.lengths),
        "step_lengths": state.lengths,
    }
    assert len(state.lengths) > 1
    assert 1 + sum(state.lengths) + len(state.lengths) >= 9  # the prefill's id, drafts and bonus ids make the nine
    assert respond(adapter, acc, 2)["specaccept"]["policy"] == "strict"
    assert "specaccept" not in respond(adapter, acc, 3)
    counters = adapter.telemetry.counters
    assert (counters[WIDE.key].requests, counters["strict"].requests) == (1, 1)  # finished ones


def test_a_request_that_ends_at_its_first_id_is_counted_too(adapter, worker):
    req = request("r", policy=WIDE, max_new_tokens=1)
    prefilled(worker, [req], [1])
    req.update_finish_state()
    acc = accumulator()
    acc.accept(req=req)
    acc.to_payload(dp_rank=0, is_idle_batch=False)
    assert respond(adapter, acc, 0)["specaccept"]["relaxed"] == 0
    assert adapter.telemetry.counters[WIDE.key].requests == 1


def test_a_rule_for_the_other_kind_of_request_falls_back_and_says_so(adapter, worker):
    sampled, greedy = request("s", 0.8, WIDE, max_new_tokens=1), request("g", 0.0, BLOCK, max_new_tokens=1)
    prefilled(worker, [sampled, greedy], [1, 2])
    assert (sampled._specaccept.rule, greedy._specaccept.rule) == ("chain", "strict")
    acc = accumulator()
    for req in (sampled, greedy):
        req.update_finish_state()
        acc.accept(req=req)
    acc.to_payload(dp_rank=0, is_idle_batch=False)
    answers = [respond(adapter, acc, row)["specaccept"] for row in (0, 1)]
    assert [(a["policy"], a["asked"]) for a in answers] == [("chain", WIDE.key), ("strict", "block")]
    assert adapter.telemetry.counters[WIDE.key].fallbacks == {SAMPLED_REQUEST: 1}
    assert adapter.telemetry.counters["block"].fallbacks == {GREEDY_REQUEST: 1}
    assert [adapter.telemetry.counters[key].requests for key in ("block", WIDE.key)] == [1, 1]


def test_the_servers_own_health_probes_are_served_natively(adapter, worker):
    from adapters.arm import Arming

    adapter.arming = Arming(default=WIDE)
    probe, real = request("HEALTH_CHECK_1"), request("r")
    prefilled(worker, [probe, real], [1, 2])
    assert (probe._specaccept, real._specaccept.rule) == (None, "asd")


def test_the_snapshot_is_in_the_engines_own_records_and_cleared_with_them(adapter, worker):
    reqs = [request("w", policy=WIDE, max_new_tokens=9)]
    run(adapter, worker, reqs)
    snapshot = DSparkWorkerV2.dump_info_records(worker)["specaccept"]
    assert (snapshot["schema"], snapshot["adapter"], snapshot["armed"]) == (1, "sglang", True)
    assert snapshot["engine"] == {"name": "sglang", "version": adapter.version}
    assert snapshot["counters"][WIDE.key]["blocks"] > 0
    assert "adapters/sglang/adapter.py" in snapshot["files"]
    worker._observers.dump_info_records = lambda: {"steps": 3}
    assert DSparkWorkerV2.dump_info_records(worker)["steps"] == 3
    DSparkWorkerV2.clear_info_records(worker)
    assert DSparkWorkerV2.dump_info_records(worker)["specaccept"]["counters"] == {}
