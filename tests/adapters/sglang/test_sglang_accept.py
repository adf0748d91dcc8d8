"""Device side against the real wheel: accept_and_finalize under policies, the ledger through a request's life."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import sglang
import torch
from toggle_plugin import Toggle
from torch.utils._python_dispatch import TorchDispatchMode
from toy_engine import SLOTS, ToyWorker, blocks, decode, extend, prefilled, request, server_args

from adapters.arm import Arming, Refused
from adapters.policy import Policy
from adapters.rules import asd
from adapters.sglang import seams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
sampling = pytest.mark.skipif(not INTERPRETED, reason="the engine's sampling kernels need TRITON_INTERPRET=1 on a CPU")

B0 = Policy("asd", budget=0.0)
STRICT = Policy("strict")
WIDE = Policy("asd", budget=2.0, gate=0.5, max_mismatches=2)
Q25 = Policy("asd", budget=2.0625, gate=2.0625, max_mismatches=1, suffix_value="normalized")
K, V = 5, 24


def outs_of(result) -> dict[str, list]:
    names = ("correct_len", "bonus", "cap_trim_lens", "commit_lens", "new_seq_lens", "out_tokens")
    return {name: getattr(result.outs, name).tolist() for name in names}


def verify_lens(seed: int, rows: int) -> torch.Tensor:
    return torch.randint(1, K + 2, (rows,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("capped", [False, True], ids=["static", "cap-accept"])
@pytest.mark.parametrize("policy", [B0, Policy("asd", budget=9.0, max_mismatches=0)], ids=["B=0", "m=0"])
def test_a_policy_that_passes_no_mismatch_equals_the_engine(worker, policy, capped):
    rows = 32
    reqs = [request(f"r{i}", policy=policy) for i in range(rows)]
    plain = [request(f"p{i}") for i in range(rows)]
    slots = list(range(1, rows + 1))
    prefilled(worker, reqs, slots)
    prefilled(worker, plain, slots[::-1])
    prefilled(worker, reqs, slots)
    accepted = 0
    for seed in range(32 if INTERPRETED else 128):  # 4,096 blocks
        drafts, logits = blocks(seed, rows, K, V)
        lens = verify_lens(seed, rows) if capped else None
        ours = worker.forward_batch_generation(decode(reqs, slots, drafts, logits, lens))
        native = worker.forward_batch_generation(decode(plain, slots, drafts, logits, lens))
        assert hasattr(ours, "specaccept") == (policy.budget > 0)  # at B = 0 nothing of ours runs on the device
        assert policy.budget == 0 or ours.specaccept.report.relaxed.sum() == 0
        assert not hasattr(native, "specaccept")
        assert outs_of(ours) == outs_of(native)
        assert ours.outs.correct_len.dtype == native.outs.correct_len.dtype
        assert ours.outs.bonus.dtype == native.outs.bonus.dtype
        accepted += sum(ours.outs.correct_len.tolist())
    assert accepted > 0


@pytest.mark.parametrize("capped", [False, True], ids=["static", "cap-accept"])
def test_every_row_follows_its_own_policy(adapter, worker, capped):
    policies = [WIDE, Q25, B0, STRICT, Policy("asd", budget=1e9), Policy("asd", budget=1.0, gate=0.25)] * 4
    reqs = [request(f"r{i}", policy=p) for i, p in enumerate(policies)]
    slots = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(1))[: len(reqs)] + 1
    prefilled(worker, reqs, slots)
    spent = torch.zeros(len(reqs))
    relaxed = 0
    for seed in range(20):
        drafts, logits = blocks(seed, len(reqs), K, V, ties=seed % 2 == 0)
        lens = verify_lens(seed, len(reqs)) if capped else None
        live = None if lens is None else lens - 1
        report = asd.Report.empty(len(reqs), K)
        configs = [asd.AsdConfig.from_policy(p) for p in policies]
        before = spent.clone()
        wanted = asd.naive.accept(
            drafts,
            logits,
            spent,
            asd.as_params(configs, len(reqs), spent.device),
            torch.full((len(reqs),), K, dtype=torch.int32) if live is None else live.int(),
            report,
        )
        result = worker.forward_batch_generation(decode(reqs, slots, drafts, logits, lens))
        assert result.outs.correct_len.tolist() == wanted.length.tolist()
        assert result.outs.bonus.tolist() == wanted.bonus.tolist()
        assert result.outs.commit_lens.tolist() == (wanted.length + 1).tolist()
        for row, n in enumerate(wanted.length.tolist()):  # the stream is the drafts, then the bonus
            assert result.outs.out_tokens[row, : n + 1].tolist() == [*drafts[row, :n].tolist(), int(wanted.bonus[row])]
        assert torch.equal(adapter.ledger.spent[slots], spent)
        assert torch.equal(asd.settle(before, result.specaccept.report.charge, wanted.length), spent)
        relaxed += int(report.relaxed.sum())
    assert relaxed > 50


def test_without_policies_the_engine_runs_untouched(adapter, worker):
    reqs = [request("a"), request("b")]
    prefilled(worker, reqs, [1, 2])
    drafts, logits = blocks(0, 2, K, V)
    result = worker.forward_batch_generation(decode(reqs, [1, 2], drafts, logits))
    assert adapter.ledger is None
    assert not hasattr(result, "specaccept")
    assert adapter.telemetry.counters == {}


class Dispatched(TorchDispatchMode):
    """Operations that reach torch's dispatcher: each is a launch, a copy, an allocation or at least host time."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", [STRICT, B0, Policy("block"), None], ids=["strict", "B=0", "falls back", "none"])
def test_a_batch_without_a_budget_costs_the_device_nothing(adapter, worker, policy):
    rows = 4
    walked = request("walked", policy=WIDE)
    prefilled(worker, [walked], [rows + 1])  # the server has a ledger
    reqs = [request(f"r{i}", policy=policy) for i in range(rows)]
    slots = list(range(1, rows + 1))
    prefilled(worker, reqs, slots)
    drafts, logits = blocks(0, rows, K, V)
    seen, toggle = [], Toggle(adapter.version)
    try:
        for hooked in (True, False):
            toggle.set(hooked)
            batch = decode(reqs, slots, drafts, logits)
            with Dispatched() as mode:
                result = worker.forward_batch_generation(batch)
                if hooked:
                    adapter.resolve(lambda *_a: None, None, result, batch)
            seen.append(mode.seen)
    finally:
        toggle.set(True)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 3


def test_strict_requests_never_reach_the_asd_walk(adapter, worker):
    req = request("a", policy=STRICT)
    prefilled(worker, [req], [1])
    drafts, logits = blocks(0, 1, K, V)
    assert not hasattr(worker.forward_batch_generation(decode([req], [1], drafts, logits)), "specaccept")
    assert adapter.ledger is None


def test_logits_that_are_not_finite_stop_the_block(worker):
    reqs = [request("nan", policy=Policy("asd", budget=1e9)), request("masked", policy=Policy("asd", budget=1e9))]
    prefilled(worker, reqs, [1, 2])
    drafts, logits = torch.ones(2, K, dtype=torch.int64), torch.zeros(2, K + 1, V)
    logits[:, :, 0] = 1.0
    logits[0, 2] = float("nan")  # the engine's argmax of such a row is its first NaN
    logits[1, 1, 1] = float("-inf")  # a grammar or bias mask forbids the draft
    result = worker.forward_batch_generation(decode(reqs, [1, 2], drafts, logits))
    assert result.outs.correct_len.tolist() == [2, 1]
    assert result.specaccept.report.stop.tolist() == [asd.INVALID, asd.INVALID]


# -- the ledger through a request's life ---------------------------------------------------------------------------


def one_relaxed(nats: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A block whose first draft misses by `nats` and whose other drafts match."""
    drafts, logits = torch.zeros(1, K, dtype=torch.int64), torch.zeros(1, K + 1, V)
    drafts[0, 0], logits[0, :, 0] = 1, 4.0
    logits[0, :, 1] = 4.0 - nats
    return drafts, logits


def step(worker, req, slot, nats=1.0) -> int:
    return int(worker.forward_batch_generation(decode([req], [slot], *one_relaxed(nats))).outs.correct_len[0])


def test_a_slot_that_changes_hands_brings_its_new_owner_nothing(adapter, worker):
    first = request("first", policy=Policy("asd", budget=1.5))
    prefilled(worker, [first], [4])
    assert step(worker, first, 4) == K
    assert step(worker, first, 4) == 0  # 0.5 nats left
    second, third = request("second", policy=Policy("asd", budget=1.0)), request("third", policy=B0)
    prefilled(worker, [second], [4])
    assert step(worker, second, 4) == K
    prefilled(worker, [third], [4])
    assert step(worker, third, 4) == 0
    fourth = request("fourth")  # no policy: the row becomes strict, whatever decodes beside it
    prefilled(worker, [fourth], [4])
    ledger = adapter.ledger
    assert (float(ledger.spent[4]), float(ledger.params.budget[4])) == (0.0, 0.0)


def test_later_chunks_of_a_prefill_do_not_refill(worker):
    req = request("long", policy=Policy("asd", budget=1.0))
    for _ in range(3):
        worker.forward_batch_generation(extend([req], [2]))
    req.output_ids.append(7)
    assert step(worker, req, 2) == K
    assert step(worker, req, 2) == 0


def test_a_step_in_flight_behind_a_finished_request_charges_nobody(adapter, worker):
    old, new = request("old", policy=WIDE), request("new", policy=Policy("asd", budget=1.0))
    prefilled(worker, [old], [3])
    step(worker, old, 3)
    step(worker, old, 3)  # overlap: launched before the engine saw that `old` had finished
    prefilled(worker, [new], [3])
    assert float(adapter.ledger.spent[3]) == 0.0
    assert step(worker, new, 3) == K


def test_retraction_keeps_what_committed_tokens_cost_and_drops_what_was_discarded(adapter, worker):
    req = request("r", policy=Policy("asd", budget=2.0))
    prefilled(worker, [req], [1])
    result = worker.forward_batch_generation(decode([req], [1], *one_relaxed(1.0)))
    req.output_ids.extend(result.next_token_ids[: K + 1].tolist())
    adapter.resolve(lambda *a: None, None, result, SimpleNamespace(reqs=[req]))
    step(worker, req, 1)  # in flight while the request is retracted: the engine discards its tokens
    assert float(adapter.ledger.spent[1]) == 2.0
    prefilled(worker, [req], [9])  # prefilled again, in another slot, with its output
    assert float(adapter.ledger.spent[9]) == 1.0
    assert step(worker, req, 9) == K
    assert step(worker, req, 9) == 0


# -- caps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, B0, Policy("asd", budget=1e9)], ids=["none", "B=0", "wide"])
def test_the_verify_cap_alias_bounds_every_request(adapter, worker, policy):
    adapter.arming = Arming(verify_cap=2)
    adapter.arm(worker, server_args())
    req = request("r", policy=policy)
    prefilled(worker, [req], [1])
    drafts, logits = one_relaxed(1.0)
    result = worker.forward_batch_generation(decode([req], [1], drafts, logits))
    assert result.outs.correct_len.tolist() == ([2] if policy and policy.budget else [0])
    drafts[0, 0] = 0
    result = worker.forward_batch_generation(decode([req], [1], drafts, logits))
    assert result.outs.correct_len.tolist() == [2]
    assert result.outs.cap_trim_lens.tolist() == [K - 2]
    lens = torch.tensor([2])  # the engine's own cap is tighter
    assert worker.forward_batch_generation(decode([req], [1], drafts, logits, lens)).outs.correct_len.tolist() == [1]


def test_q_is_counted_from_the_drafts_that_are_live(worker):
    req = request("r", policy=Policy("asd", budget=9.0, gate=0.5))  # q = live - i: 1 nat needs live >= 2
    prefilled(worker, [req], [1])
    drafts, logits = one_relaxed(1.0)
    for lens, length in ((2, 0), (3, 2), (6, 5)):
        result = worker.forward_batch_generation(decode([req], [1], drafts, logits, torch.tensor([lens])))
        assert result.outs.correct_len.tolist() == [length]


def test_an_accept_inside_the_graph_is_refused(worker):
    req = request("r", policy=WIDE)
    prefilled(worker, [req], [1])
    batch = decode([req], [1], *one_relaxed(1.0))
    outs = worker.forward_batch_generation(batch).outs
    worker._verify_executor.verify_epilogue = SimpleNamespace(
        read_accept=lambda *_a: outs, note_static_verify=lambda *_a: None
    )
    batch.toy["folded_accept"] = True
    with pytest.raises(Refused, match="accept_draft_tokens: expected to be called"):
        worker.forward_batch_generation(batch)


def test_an_accept_that_passes_the_prefix_match_by_is_refused(worker, monkeypatch):
    """What the step says of its rows would be whatever the last one of this size left there."""
    req = request("r", policy=WIDE)
    prefilled(worker, [req], [1])
    batch = decode([req], [1], *one_relaxed(1.0))
    worker.forward_batch_generation(batch)
    owner = seams.resolve(seams.expected(sglang.__version__)["accept greedy"][0].rpartition(".")[0])
    zeros = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(owner, "execute", lambda **_: (zeros, zeros.long(), zeros))
    with pytest.raises(Refused, match="compute_dflash_correct_drafts_and_bonus: expected to be called"):
        worker.forward_batch_generation(batch)


def test_a_sampled_accept_that_passes_the_kernel_by_is_refused(worker, monkeypatch):
    req = request("r", temperature=0.8, policy=Policy("block"))
    prefilled(worker, [req], [1])
    drafts, logits = one_relaxed(1.0)
    batch = decode([req], [1], drafts, logits, draft_logits=torch.zeros(1, K, V))
    zeros = torch.zeros(1, dtype=torch.int32)
    accept = seams.resolve(seams.expected(sglang.__version__)["sampling core"][0].rpartition(".")[0])
    monkeypatch.setattr(accept.AcceptSampling, "execute", lambda **_: (zeros, zeros.long(), zeros))
    with pytest.raises(Refused, match="chain_speculative_sampling_triton: expected to be called"):
        worker.forward_batch_generation(batch)


def test_a_step_that_fails_leaves_no_hook_behind(adapter, worker, monkeypatch):
    req = request("r", policy=WIDE)
    prefilled(worker, [req], [1])

    def fail(*_args, **_kwargs):
        raise RuntimeError("out of memory")

    batch = decode([req], [1], *one_relaxed(1.0))
    monkeypatch.setattr(worker, "_forward_decode", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.forward_batch_generation(batch)
    assert adapter.step is None
    assert all(getattr(owner, name) is own for owner, name, _, own in adapter.inner)
    monkeypatch.undo()
    adapter.ledger.assign(torch.tensor([1]), [req._specaccept.config], [0.0])
    assert worker.forward_batch_generation(batch).outs.correct_len.tolist() == [K]


def test_ranks_take_rank_zeros_answer_where_the_engine_does_not_see_to_it(adapter, worker):
    sent = []

    def broadcast(packed, src):
        sent.append(packed.clone())
        packed[:3] = torch.tensor([[1], [7], [0]])  # rank 0's length, bonus and cut
        packed[3] = torch.tensor([0.25]).view(torch.int32)

    adapter.worker.group, adapter.worker.broadcasts = SimpleNamespace(broadcast=broadcast), True
    adapter.differences = torch.zeros((), dtype=torch.int64)
    req = request("r", policy=WIDE)
    prefilled(worker, [req], [1])
    result = worker.forward_batch_generation(decode([req], [1], *one_relaxed(1.0)))
    assert len(sent) == 1
    assert (result.outs.correct_len.tolist(), result.outs.commit_lens.tolist()) == ([1], [2])
    assert result.outs.out_tokens[0, 1] == 7
    assert adapter.ledger.spent[1] == 0.25
    assert adapter.differences == 1


# -- mixed batches -------------------------------------------------------------------------------------------------


@sampling
def test_in_a_mixed_batch_only_greedy_rows_are_relaxed(worker):
    rows = 8
    greedy = [request(f"g{i}", policy=Policy("asd", budget=1e9)) for i in range(rows // 2)]
    sampled = [request(f"s{i}", temperature=0.8, policy=Policy("asd", budget=1e9)) for i in range(rows // 2)]
    reqs = [r for pair in zip(greedy, sampled, strict=True) for r in pair]
    plain = [request(f"p{i}", temperature=r.sampling_params.temperature * (i % 2)) for i, r in enumerate(reqs)]
    slots = list(range(1, rows + 1))
    prefilled(worker, plain, slots)
    prefilled(worker, reqs, slots)
    for seed in range(4):
        drafts, logits = blocks(seed, rows, K, V, ties=False)
        draft_logits = torch.randn(rows, K, V, generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        native = worker.forward_batch_generation(decode(plain, slots, drafts, logits, draft_logits=draft_logits))
        torch.manual_seed(seed)
        ours = worker.forward_batch_generation(decode(reqs, slots, drafts, logits, draft_logits=draft_logits))
        assert ours.outs.correct_len[1::2].tolist() == native.outs.correct_len[1::2].tolist()
        assert ours.outs.bonus[1::2].tolist() == native.outs.bonus[1::2].tolist()
        assert ours.outs.correct_len[::2].tolist() == [K] * (rows // 2)
        assert ours.specaccept.report.charge[1::2].abs().sum() == 0


def test_block_sizes(adapter):
    for drafts in (1, 2, 7, 16):
        made = ToyWorker(drafts)
        adapter.ledger = None
        adapter.arm(made, server_args())
        req = request(f"k{drafts}", policy=Policy("asd", budget=1e9))
        prefilled(made, [req], [1])
        ids, logits = blocks(drafts, 1, drafts, V)
        assert made.forward_batch_generation(decode([req], [1], ids, logits)).outs.correct_len.tolist() == [drafts]
