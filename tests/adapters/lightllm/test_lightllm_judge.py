"""The tensor side: the rule on ragged rows against the engine's own kernel (B=0) and against the rule by hand (B>0)."""

from __future__ import annotations

import contextlib
import importlib
import math

import lightllm_rig as rig
import numpy as np
import pytest
import torch

from adapters.lightllm import accept
from adapters.policy import Policy
from adapters.rules.common import RuleError, interpreted

f32 = np.float32
BATCHES = {"double": 2_000, "real": 20_000}  # ragged batches judged by both
pytestmark = pytest.mark.skipif(
    bool(rig.REAL) and not interpreted(), reason="the real kernels need TRITON_INTERPRET=1 on a CPU"
)


@pytest.fixture(params=rig.TREES, ids=rig.name_of)
def strict(request, monkeypatch):
    """The tree's own mtp_verify, not armed."""
    rig.forget()
    monkeypatch.delenv("SPECACCEPT_POLICY", raising=False)
    monkeypatch.setenv("LIGHTLLM_START_ARGS", "{}")
    monkeypatch.syspath_prepend(str(request.param))
    verify = importlib.import_module(rig.seams.KERNELS).mtp_verify
    verify.batches = BATCHES["double" if request.param == rig.DOUBLE else "real"]
    yield verify
    rig.forget()


def batch(rng, vocabulary=11):
    """A ragged verify call: ties, NaN rows, infinite logits, filler and foreign ids planted; ids as torch.argmax."""
    requests = int(rng.integers(1, 5))
    rows = rng.integers(1, rig.W + 1, size=requests)
    starts = np.concatenate([[0], np.cumsum(rows)[:-1]])
    total = int(rows.sum())
    z = torch.tensor(rng.integers(0, 4, size=(total, vocabulary)) / 2).float()  # few values: many ties
    z[rng.random(total) < 0.05, int(rng.integers(vocabulary))] = math.nan
    z[rng.random(total) < 0.05, int(rng.integers(vocabulary))] = -math.inf
    z[rng.random(total) < 0.02, int(rng.integers(vocabulary))] = math.inf
    ids = z.argmax(-1)
    table = torch.tensor(rng.integers(0, vocabulary, size=(requests + 2, rig.W)))
    slots = rng.permutation(requests + 2)[:requests]
    for n in range(requests):  # drafts that mostly match, so that walks are long
        for j in range(rows[n] - 1):
            kind = rng.random()
            if kind < 0.7:
                table[slots[n], j + 1] = ids[starts[n] + j]
            elif kind < 0.73:
                table[slots[n], j + 1] = int(rng.choice([-1, vocabulary, vocabulary + 5, -(2**40), 2**40]))
    return (
        table,
        torch.tensor(starts, dtype=torch.int32),
        ids if rng.random() < 0.8 else ids.int(),
        torch.tensor(np.repeat(slots, rows), dtype=torch.int32),
        z,
        int(rows.max()) - 1,
    )


def zero_budget(slots: int, device: str = "cpu") -> accept.Ledger:
    ledger = accept.Ledger.empty(Policy("asd", 0.0), slots, torch.device(device))
    for slot in range(slots):
        ledger.enter(slot, 1.0)
        ledger.open(slot, 1.0)
    return ledger


@pytest.mark.timeout(2400)  # the real kernel takes milliseconds a request in the interpreter
def test_zero_budget_is_the_engine_s_kernel(strict):
    """The rule itself at B=0, not the shortcut: equal lengths, masks and ids on every batch, nothing charged.

    Neither verifies a batch across requests, so batches are judged many at a time by the slower of the two.
    """
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    per_call = 50
    ledger = zero_budget(2 * 6 * per_call)
    seen = 0
    while seen < strict.batches:
        parts = [p for p in (batch(rng) for _ in range(per_call)) if p[2].dtype == torch.int64]
        first_slot = np.cumsum([0] + [p[0].shape[0] for p in parts])
        first_row = np.cumsum([0] + [p[2].shape[0] for p in parts])
        table = torch.cat([p[0] for p in parts])
        starts = torch.cat([p[1] + int(r) for p, r in zip(parts, first_row, strict=False)])
        slots = torch.cat([p[3] + int(s) for p, s in zip(parts, first_slot, strict=False)])
        ids, z = torch.cat([p[2] for p in parts]), torch.cat([p[4] for p in parts])
        if seen % 1000 < per_call:
            ids = ids.int()
        lengths, accepted = strict(
            req_to_next_token_ids=table, b_req_mtp_start_loc=starts, new_next_token_ids=ids, b_req_idx=slots
        )
        own, rows, committed, *_ = decide(table, starts, ids, slots, z, ledger, rig.W - 1)
        assert torch.equal(own, lengths)
        assert torch.equal(rows, accepted)
        assert torch.equal(committed, ids)
        seen += len(parts)
    assert not ledger.spent.any()


def test_zero_budget_on_single_batches(strict):
    rng = np.random.default_rng(1)
    for _ in range(300):
        table, starts, ids, slots, z, width = batch(rng)
        lengths, accepted = strict(
            req_to_next_token_ids=table, b_req_mtp_start_loc=starts, new_next_token_ids=ids, b_req_idx=slots
        )
        if width == 0:
            continue
        own, rows, committed, *_ = decide(table, starts, ids, slots, z, zero_budget(table.shape[0]), width)
        assert torch.equal(own, lengths)
        assert torch.equal(rows, accepted)
        assert committed.dtype == ids.dtype
        assert torch.equal(committed, ids)


def decide(table, starts, ids, slots, z, ledger, width):
    """What a verify call of the engine would say, of copies: accept_len, accepted, ids, logprobs, regret [R]."""
    ids, logprobs = ids.clone(), torch.log_softmax(z, -1).gather(1, ids.long()[:, None]).view(-1)
    accept_len, accepted, told = accept.Workspace(ledger).decide(table, starts, ids, slots, z, logprobs, width)
    return accept_len, accepted, ids, logprobs, told[: len(ids)]


def by_hand(policy, table, starts, ids, slots, z, spent, is_open):
    """The rule, row by row."""
    total = len(ids)
    ends = [*starts.tolist()[1:], total]
    lengths, accepted, committed, regret = [], [0] * total, ids.tolist(), [-1.0] * total
    for start, end in zip(starts.tolist(), ends, strict=True):
        slot, live, relaxed, n = int(slots[start]), end - start - 1, 0, 0
        for i in range(live):
            row, x, t = z[start + i].numpy(), int(table[slot, i + 1]), int(ids[start + i])
            if x != t:
                r = f32(row[t] - row[x]) if 0 <= x < len(row) else f32(np.nan)
                q = f32(live - i) if policy.suffix_value == "suffix" else f32(f32(live - i) / f32(live))
                budget = f32(policy.budget) if is_open[slot] else f32(0)
                cap = policy.max_mismatches if policy.max_mismatches is not None else 10**9
                ok = (
                    np.isfinite(r)
                    and spent[slot] < budget
                    and f32(spent[slot] + r) <= budget
                    and r <= f32(f32(policy.gate) * q)
                    and relaxed < cap
                )
                if not ok:
                    break
                spent[slot] = f32(spent[slot] + r)
                relaxed += 1
                regret[start + i], committed[start + i] = float(r), x
            n += 1
        lengths.append(n + 1)
        accepted[start : start + n + 1] = [1] * (n + 1)
    return lengths, accepted, committed, regret


@pytest.mark.parametrize(
    "policy",
    [
        Policy("asd", 3.0),
        Policy("asd", 2.0625, 2.0625, 1, "normalized"),
        Policy("asd", 8.0, 0.25, 2),
        Policy("asd", 4.0, max_mismatches=0),
    ],
    ids=lambda p: p.key,
)
def test_the_rule_on_ragged_rows(policy):
    """Also what the engine's tensors say afterwards: ids, log-probabilities, the regret reported per row."""
    rng = np.random.default_rng(2)
    relaxed = 0
    for _ in range(60 if interpreted() else 300):
        table, starts, ids, slots, z, width = batch(rng)
        if width == 0:
            continue
        count = table.shape[0]
        is_open = rng.random(count) < 0.7
        ledger = accept.Ledger.empty(policy, count, torch.device("cpu"))
        for slot in range(count):
            ledger.enter(slot, 1.0)
            if is_open[slot]:
                ledger.open(slot, 1.0)
        spent = (rng.integers(0, 5, size=count) / 2).astype(f32)
        ledger.spent.copy_(torch.tensor(spent))
        want = by_hand(policy, table, starts, ids, slots, z, spent, is_open)
        own, rows, engine_ids, engine_logprobs, regret = decide(table, starts, ids, slots, z, ledger, width)
        assert own.tolist() == want[0]
        assert rows.tolist() == want[1]
        assert engine_ids.tolist() == want[2]
        assert regret.tolist() == want[3]
        np.testing.assert_array_equal(ledger.spent.numpy(), spent)
        full = torch.log_softmax(z, -1).gather(1, engine_ids.long()[:, None]).view(-1)
        np.testing.assert_allclose(engine_logprobs.numpy(), full.numpy(), atol=1e-5)
        relaxed += sum(r >= 0 for r in want[3])
    assert (relaxed > 20) == (policy.max_mismatches != 0)


@pytest.mark.parametrize("many", [3, accept.MANY])
@pytest.mark.parametrize("policy", [Policy("asd", 3.0), Policy("asd", 8.0, 0.25, 2)], ids=lambda p: p.key)
def test_a_workspace_decides_again_and_again(policy, many, monkeypatch):
    """One ledger through many calls of few shapes: buffers are used again, the engine's two tensors never are.

    Of more shapes than it remembers it forgets some, and the answers stay.
    """
    monkeypatch.setattr(accept, "MANY", many)
    rng = np.random.default_rng(5)
    ledger = accept.Ledger.empty(policy, 6, torch.device("cpu"))
    workspace, spent, kept, relaxed = accept.Workspace(ledger), np.zeros(6, dtype=f32), [], 0
    table = torch.empty(6, rig.W, dtype=torch.int64)
    calls = 0
    while calls < (40 if interpreted() else 200):
        columns, starts, ids, slots, z, width = batch(rng)
        if width == 0:
            continue
        calls += 1
        table[: len(columns)] = columns
        for slot in range(6):
            if rng.random() < 0.2:
                ledger.enter(slot, 1.0)
                ledger.open(slot, 1.0)
                spent[slot] = 0
        is_open = (ledger.params.budget > 0).tolist()
        logprobs = torch.log_softmax(z, -1).gather(1, ids.long()[:, None]).view(-1)
        want = by_hand(policy, table, starts, ids, slots, z, spent, is_open)
        accept_len, accepted, told = workspace.decide(table, starts, ids, slots, z, logprobs, width)
        kept.append((accept_len, want[0], accepted, want[1]))
        assert len(workspace.known) <= many
        assert ids.tolist() == want[2]
        assert told[: len(ids)].tolist() == want[3]
        assert told.shape[0] == len(ids) + len(starts)
        np.testing.assert_array_equal(ledger.spent.numpy(), spent)
        full = torch.log_softmax(z, -1).gather(1, ids.long()[:, None]).view(-1)
        np.testing.assert_allclose(logprobs.numpy(), full.numpy(), atol=1e-5)
        relaxed += sum(r >= 0 for r in want[3])
    for accept_len, lengths, accepted, rows in kept:
        assert (accept_len.tolist(), accepted.tolist()) == (lengths, rows)
    assert relaxed > 20
    with pytest.raises(RuleError, match="expected contiguous rows") if interpreted() else contextlib.nullcontext():
        workspace.decide(table, starts, ids, slots, z, logprobs.repeat(2)[::2], width)


def test_a_temperature_scales_budget_and_gate_not_the_logits():
    """Raw logits at temperature 1 and their halves at temperature 2 are the same decision."""
    rng = np.random.default_rng(3)
    policy = Policy("asd", 2.0, 0.5, 2)
    for _ in range(50):
        table, starts, ids, slots, z, width = batch(rng)
        if width == 0:
            continue
        answers = []
        for temperature in (1.0, 2.0):
            ledger = accept.Ledger.empty(policy, table.shape[0], torch.device("cpu"))
            for slot in range(table.shape[0]):
                ledger.enter(slot, temperature)
                ledger.open(slot, temperature)
            accept_len, *_ = decide(table, starts, ids, slots, z / temperature, ledger, width)
            answers.append((accept_len.tolist(), (ledger.spent * temperature).tolist()))
        assert answers[0] == answers[1]
