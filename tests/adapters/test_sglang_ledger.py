"""The SGLang adapter's ledger without SGLang: on the CPU, and on a GPU with every device sync an error."""

from __future__ import annotations

import pytest
import torch

from adapters.policy import Policy
from adapters.rules import asd
from adapters.sglang.ledger import STRICT, Ledger

K, V, SLOTS, ROWS = 7, 512, 40, 24
POLICIES = [
    Policy("strict"),
    Policy("asd", budget=0.0),
    Policy("asd", budget=2.0625, gate=2.0625, max_mismatches=1, suffix_value="normalized"),
    Policy("asd", budget=8.0, gate=0.25, max_mismatches=2),
]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def block(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """candidates [B, K+1], logits [B, K+1, V] on a coarse grid (exact ties), live [B]."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 9, (ROWS, K + 1, V), generator=g).float() / 4
    near = logits[:, :K].topk(16, -1).indices.gather(2, torch.randint(0, 16, (ROWS, K, 1), generator=g))[..., 0]
    drafts = torch.where(torch.rand(ROWS, K, generator=g) < 0.6, logits[:, :K].argmax(-1), near)
    live = torch.randint(0, K + 1, (ROWS,), generator=g)
    return torch.cat([torch.zeros(ROWS, 1, dtype=torch.int64), drafts], 1), logits, live


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capped", [False, True])
def test_steps_by_slot_answer_as_the_oracle_and_never_wait(device, capped):
    configs = [asd.AsdConfig.from_policy(POLICIES[i % 4]) for i in range(ROWS)]
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(9))[:ROWS]
    spent = torch.full((ROWS,), 0.25)
    ledger = Ledger(SLOTS, device)
    steps = [block(seed) for seed in range(12)]
    there = [[t.to(device) for t in step] for step in steps]
    on_device = slots.to(device)
    found = []
    if device == "cuda":
        run(ledger, on_device, configs, there[:1], capped)  # compile before syncs are errors
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        ledger.assign(on_device, configs, [0.25] * ROWS)
        found = run(ledger, on_device, configs, there, capped)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    relaxed = 0
    for (candidates, logits, live), (length, bonus, detail) in zip(steps, found, strict=True):
        report, before = asd.Report.empty(ROWS, K), spent.clone()
        limit = live.int() if capped else torch.full((ROWS,), K, dtype=torch.int32)
        params = asd.as_params(configs, ROWS, torch.device("cpu"))
        wanted = asd.naive.accept(candidates[:, 1:], logits, spent, params, limit, report)
        assert length.tolist() == wanted.length.tolist()
        assert bonus.tolist() == wanted.bonus.tolist()
        assert torch.equal(detail.report.charge, report.charge)
        assert torch.equal(detail.detail.before, before)
        bits, stop = detail.rows
        assert stop == report.stop.tolist()
        assert [bin(b).count("1") for b in bits] == report.relaxed.tolist()
        relaxed += int(report.relaxed.sum())
    assert torch.equal(ledger.spent.cpu()[slots], spent)
    untouched = [s for s in range(SLOTS) if s not in set(slots.tolist())]
    assert ledger.spent.cpu()[untouched].abs().sum() == 0
    assert relaxed > 20


def run(ledger, slots, configs, steps, capped):
    found = []
    for candidates, logits, live in steps:
        top = logits.view(-1, V).argmax(-1).view(ROWS, K + 1)
        length, bonus = ledger.accept(candidates[:, 1:], logits, top, slots, live if capped else None)
        found.append((length, bonus, ledger.copy(ledger.detail(ROWS, K))))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_host_copies_of_steps_in_flight_have_memory_of_their_own(device):
    ledger = Ledger(4, device)
    detail = ledger.detail(2, K)
    held = []
    for step in (1, 2):
        detail.bits.fill_(step)
        held.append(ledger.copy(detail))
    detail.bits.fill_(3)
    first = held[0].detail.buffer.data_ptr()
    del held[0]
    held.append(ledger.copy(detail))
    if device == "cuda":
        torch.cuda.synchronize()
    assert [copy.rows[0] for copy in held] == [[2, 2], [3, 3]]
    assert held[1].detail.buffer.data_ptr() == first


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_nobody_wrote_or_that_went_strict_relaxes_nothing(device):
    ledger = Ledger(4, device)
    candidates, logits, _ = (t[:4].to(device) for t in block(3))
    slots = torch.arange(4, device=device)
    top = logits.argmax(-1)
    strict = (candidates[:, 1:] == top[:, :K]).int().cumprod(1).sum(1)
    wide = [asd.AsdConfig(budget=1e9)] * 4
    for configs, wanted in ((None, strict.tolist()), (wide, [K] * 4), ([STRICT] * 4, strict.tolist())):
        if configs is not None:
            ledger.assign(slots, configs, [0.0] * 4)
        length, _ = ledger.accept(candidates[:, 1:], logits, top, slots, None)
        assert length.tolist() == wanted
