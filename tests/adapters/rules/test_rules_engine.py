"""The objects an engine's step holds: ledger by slot, layouts, padding, cuts, counters, noise."""

import math

import pytest
import torch

from adapters.rules import RuleError, asd
from adapters.rules.asd import AsdConfig, Params, settle
from adapters.rules.asd.engine import AsdState
from adapters.rules.block import naive
from adapters.rules.block.engine import SampledState
from adapters.rules.block.noise import CHUNK, of_tokens, uniform, words
from adapters.rules.common import COUNTERS

CONFIGS = [
    AsdConfig(2.0, 1.0, 1, "normalized"),
    AsdConfig(4.0),
    AsdConfig(0.0),
    AsdConfig(8.0, 0.25, 2),
    AsdConfig(1.0, max_mismatches=0),
]


@pytest.fixture
def on(path, device, monkeypatch):
    """The device of a state that takes this path."""
    if path == "kernel" and device.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return device if path == "kernel" else torch.device("cpu")


def near_misses(gen, B, K, V, dtype=torch.float32):
    """Logits on a grid (ties), drafts mostly among the best two."""
    z = (torch.randn(B, K + 1, V, generator=gen) * 2).round().div(2).to(dtype)
    second = z[:, :K].topk(min(2, V)).indices[..., -1]
    ids = torch.where(torch.rand(B, K, generator=gen) < 0.6, z[:, :K].argmax(-1), second)
    ids[torch.rand(B, K, generator=gen) < 0.05] = -1
    return z, ids


@pytest.mark.parametrize("fused", [False, True])
def test_dense_steps_follow_the_rule_slot_by_slot(fused, path, on):
    gen = torch.Generator().manual_seed(1)
    slots_, K, V, B = 7, 4, 13, 4
    state = AsdState(slots_, K, 6, on)
    state.assign([5, 3, 0, 6, 2], CONFIGS)
    want_spent, want_params = torch.zeros(slots_), Params(*(p.cpu() for p in state.params))
    for step_number in range(2):
        z, ids = near_misses(gen, B, K, V)
        slots = torch.tensor([5, -1, 0, 3] if step_number else [3, 6, -1, 1])
        live = torch.randint(0, K + 1, (B,), generator=gen, dtype=torch.int32)
        top = z.argmax(-1)
        args = (z.to(on), slots.to(on), live.to(on))
        step = state.fused(ids.to(on), *args) if fused else state.walk(ids.to(on), top.to(on), *args)
        for b, slot in enumerate(slots.tolist()):
            if slot < 0:
                assert (int(step.length[b]), int(step.bonus[b])) == (0, 0)
                assert not step.report.charge[b].any()
                assert (int(step.report.stop[b]), int(state.bits[b]), float(state.before[b])) == (0, 0, 0)
                continue
            one = slice(b, b + 1)
            config = Params(*(p[slot : slot + 1] for p in want_params))
            want = asd.naive.accept(ids[one], z[one], want_spent[slot : slot + 1], config, live[one])
            assert (int(step.length[b]), int(step.bonus[b])) == (int(want.length), int(want.bonus))
            n, first = int(want.length), b * (K + 1)
            committed = step.ids[first : first + int(live[b]) + 1].tolist()
            assert committed[: n + 1] == [*ids[b, :n].tolist(), int(want.bonus)]
            assert committed[n + 1 :] == top[b, n + 1 : int(live[b]) + 1].tolist()
            assert step.accepted[first : first + len(committed)].tolist() == [1] * (n + 1) + [0] * (
                len(committed) - n - 1
            )
        assert torch.equal(state.spent.cpu(), want_spent)
    assert state.counters(3)["blocks"] == 2
    assert state.counters(4)["blocks"] == 0
    total = state.counts.sum(0).tolist()
    assert total[COUNTERS.index("relaxed")] > 0
    assert float(state.regret.sum()) == pytest.approx(float(want_spent.double().sum()), rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_ragged_rows_equal_dense_ones(fused, path, on):
    gen = torch.Generator().manual_seed(2)
    K, V, lives, slots = 4, 9, [4, 0, 2, 3], torch.tensor([2, 0, 3, 1])
    z, ids = near_misses(gen, 4, K, V)
    dense, ragged = AsdState(4, K, 4, on), AsdState(4, K, 4, on)
    for state in (dense, ragged):
        state.assign([2, 0, 3, 1], CONFIGS[:4])
    live = torch.tensor(lives, dtype=torch.int32, device=on)
    rows = torch.cat([z[b, : n + 1] for b, n in enumerate(lives)])
    starts = torch.tensor([0, 5, 6, 9], dtype=torch.int32, device=on)
    table = torch.full((4, K + 1), 1)
    table[slots, 1:] = ids  # column 0 is the last committed token
    drafts = table[:, 1:].to(on)
    if fused:
        want = dense.fused(ids.to(on), z.to(on), slots.to(on), live)
        got = ragged.fused(drafts, rows.to(on), slots.to(on), starts=starts, table=True)
    else:
        want = dense.walk(ids.to(on), z.argmax(-1).to(on), z.to(on), slots.to(on), live)
        top = rows.argmax(-1).to(torch.int32).to(on)
        got = ragged.walk(drafts, top, rows.to(on), slots.to(on), starts=starts, table=True)
    assert torch.equal(got.length, want.length)
    assert torch.equal(got.bonus, want.bonus)
    assert torch.equal(got.report.charge, want.report.charge)
    assert torch.equal(ragged.spent, dense.spent)
    assert torch.equal(ragged.counts, dense.counts)
    for name in ("ids", "accepted"):
        per_request = [getattr(want, name)[b * (K + 1) : b * (K + 1) + n + 1] for b, n in enumerate(lives)]
        assert torch.equal(getattr(got, name), torch.cat(per_request))
    assert int(want.report.relaxed.sum()) > 0, "the case must relax something"


def test_a_cut_takes_back_what_was_not_committed(path, on):
    """An EOS after two of four drafts: the ledger and counters are as if the block had been two drafts long."""
    z = torch.zeros(2, 5, 3)
    z[:, :, 0] = 0.5
    ids, slots = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]), torch.tensor([1, -1])
    state = AsdState(2, 4, 2, on)
    state.assign([0, 1], AsdConfig(8.0))
    step = state.walk(ids.to(on), z.argmax(-1).to(on), z.to(on), slots.to(on))
    assert step.length.tolist() == [4, 0]
    assert state.counters(1)["spent"] == 1.5
    state.cut(slots.to(on), torch.tensor([4, 0]).to(on))
    assert state.counters(1)["spent"] == 1.5
    state.cut(slots.to(on), torch.tensor([2, 0]).to(on))
    got = state.counters(1)
    assert (got["spent"], got["regret_charged"], got["relaxed"], got["strict_accepted"]) == (0.5, 0.5, 1, 1)
    assert state.counters(0) == dict.fromkeys((*COUNTERS, "regret_charged", "spent"), 0)
    assert settle(torch.zeros(2, device=on), step.report.charge, torch.tensor([2, 0], device=on)).tolist() == [0.5, 0]


def test_a_reused_slot_starts_with_an_empty_ledger(path, on):
    z = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]).to(on)
    ids, slots = torch.tensor([[1]]).to(on), torch.tensor([0]).to(on)
    state = AsdState(1, 1, 1, on)
    assert state.fused(ids, z, slots).length.tolist() == [0], "never assigned: strict"
    state.assign([0], AsdConfig(1.0))
    assert [int(state.fused(ids, z, slots).length) for _ in range(2)] == [1, 0]
    assert state.counters(0)["budget_exhausted"] == 1
    state.assign([0], AsdConfig(1.0))
    assert [int(state.fused(ids, z, slots).length) for _ in range(2)] == [1, 0]


def test_asd_state_names_the_field(on, path):
    state = AsdState(4, 2, 2, on)
    ids, z = torch.zeros(2, 2, dtype=torch.int64, device=on), torch.zeros(2, 3, 5, device=on)
    slots, top = torch.tensor([0, 1], device=on), torch.zeros(2, 3, dtype=torch.int64, device=on)
    bad = [
        ("draft_ids", (ids[:, :1], top, z, slots)),
        ("top", (ids, top[:, :2], z, slots)),
        ("top", (ids, top.t().contiguous().t(), z, slots)),
        ("logits", (ids, top, z[:, :2], slots)),
        ("slots", (ids.repeat(2, 1), top, z, slots.repeat(2))),
        ("live", (ids, top, z, slots, torch.zeros(1, dtype=torch.int32, device=on))),
    ]
    for field, args in bad:
        with pytest.raises(RuleError, match=rf"^{field}: expected .*found"):
            state.walk(*args)
    with pytest.raises(RuleError, match=r"^logits: expected .*float64"):
        state.fused(ids, z.double(), slots)
    with pytest.raises(RuleError, match=r"^slots: expected 0..3, found 4"):
        state.assign([4], AsdConfig(1.0))
    with pytest.raises(RuleError, match=r"^K: expected 1..15"):
        AsdState(4, 16, 2, on)


# --- sampled -----


def sampled_batch(gen, B, K, V, near):
    zq = torch.randn(B, K, V, generator=gen) * 2
    zp = torch.cat([zq + torch.randn(B, K, V, generator=gen) * near, torch.randn(B, 1, V, generator=gen)], 1)
    ids = torch.multinomial(zq.div(0.7).softmax(-1).view(-1, V), 1, generator=gen).view(B, K)
    return ids, zp, zq


@pytest.mark.parametrize("rule", ["block", "chain"])
@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("one_hot", [False, True])
def test_kernel_state_equals_oracle_state(rule, logits, one_hot, device, monkeypatch):
    """Same coins, same tokens, several chunks, padded and short rows; the step advances by itself."""
    gen = torch.Generator().manual_seed(3)
    B, K, V, chunk = 4, 3, 50, 16
    slots = torch.tensor([4, 0, -1, 2])
    states = []
    for kernel in (False, True):
        if kernel and device.type == "cpu":
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        state = SampledState(rule, 5, K, B, V, device if kernel else "cpu", chunk)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        state.assign([4, 0, 2], [2**63 + 11, 12, -13], [0.7, 1.0, 1.3], [0.7, 0.7, 0.7])
        states.append(state)
    for near in (0.0, 0.4, 1.5):
        ids, zp, zq = sampled_batch(gen, B, K, V, near)
        live = torch.randint(0, K + 1, (B,), generator=gen, dtype=torch.int32)
        outs = []
        for kernel, state in enumerate(states):
            on = device if kernel else torch.device("cpu")
            if kernel and device.type == "cpu":
                monkeypatch.setenv("TRITON_INTERPRET", "1")
            p, q = (zp, zq) if logits else (zp.softmax(-1), zq.div(0.7).softmax(-1))
            call = state.from_logits if logits else state.from_probs
            step = call(ids.to(on), p.to(on), None if one_hot else q.to(on), slots.to(on), live.to(on))
            outs.append([t.cpu().clone() for t in step])
            monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        real = slots >= 0
        assert torch.equal(outs[0][0][real], outs[1][0][real])
        assert torch.equal(outs[0][1][real], outs[1][1][real])
        for b in real.nonzero()[:, 0].tolist():
            n = int(outs[0][0][b]) + 1
            assert torch.equal(outs[0][2][b, :n], outs[1][2][b, :n])
    assert torch.equal(states[0].steps, states[1].steps.cpu())
    assert states[0].steps.tolist() == [3, 0, 3, 0, 3]
    assert torch.equal(states[0].counts, states[1].counts.cpu())


def test_coins_settled_by_bounds_fall_as_the_oracle_lets_them(device, monkeypatch):
    """What is known of S_i before it is summed changes no decision, wherever p and q are alike, peaked or apart."""
    gen = torch.Generator().manual_seed(11)
    B, K, V = 12, 3, 24
    _, zp, zq = sampled_batch(gen, B, K, V, 0.6)
    zp[:2, :K] = zq[:2]
    zp[2:4, :K] = zq[2:4] + 0.05 * torch.randn(2, K, V, generator=gen)
    zp[4:6] = torch.randn(2, K + 1, V, generator=gen) * 4
    zp[6:8], zq[6:8] = zp[6:8] * 6, zq[6:8] * 6
    zp[8:10, :, ::2], zq[8:10, :, 1::2] = -math.inf, -math.inf
    ids = torch.multinomial(zq.softmax(-1).view(-1, V), 1, generator=gen).view(B, K)
    slots, steps = torch.arange(B), []
    for on in (torch.device("cpu"), device):
        if steps and device.type == "cpu":
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        state = SampledState("block", B, K, B, V, on, 16)
        state.assign(range(B), range(50, 50 + B))
        steps.append(state.from_logits(ids.to(on), zp.to(on), zq.to(on), slots.to(on)))
    assert torch.equal(steps[1].length.cpu(), steps[0].length)
    assert torch.equal(steps[1].bonus.cpu(), steps[0].bonus)
    assert steps[0].length[:2].tolist() == [K, K], "identical p and q accept everything"
    assert not steps[0].length[8:10].any(), "nothing in common accepts nothing"


def test_answers_do_not_depend_on_the_batch(path, on):
    """A request alone and the same one among others commit the same tokens."""
    gen = torch.Generator().manual_seed(4)
    ids, zp, zq = (t.to(on) for t in sampled_batch(gen, 3, 3, 40, 0.5))
    alone, among = SampledState("block", 4, 3, 3, 40, on, 16), SampledState("block", 4, 3, 3, 40, on, 16)
    for state in (alone, among):
        state.assign([0, 1, 3], [7, 8, 9])
    one = alone.from_logits(ids[1:2], zp[1:2], zq[1:2], torch.tensor([3], device=on))
    all_ = among.from_logits(ids, zp, zq, torch.tensor([0, 3, 1], device=on))
    assert (int(one.length), int(one.bonus)) == (int(all_.length[1]), int(all_.bonus[1]))


def test_counter_noise_is_philox():
    """Known answers of Philox-4x32-10 (Random123, kat_vectors), and the moments of what is made of it."""
    zero, ones = torch.tensor(0), torch.tensor(-1)
    assert int(words(zero, zero, 0, 0, zero)[0]) == 0x6627E8D5
    assert [int(word) for word in words(zero, zero, 0, 0, zero)][1:] == [0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert int(words(ones, ones, 3, 2**30 - 1, torch.tensor(0xFFFFFFFF))[0]) == 0x408F276D
    n = 20_000
    noise = of_tokens(torch.tensor(5), torch.tensor(2**40), 3, torch.arange(n)).double()
    assert len(noise.unique()) > n - 100, "no token shares another's word"
    assert float(noise.mean()) == pytest.approx(1, abs=5 / n**0.5)
    assert float((noise < 0.01).double().mean()) == pytest.approx(0.00995, abs=5 * (0.01 / n) ** 0.5)
    coins = uniform(torch.tensor(5), torch.tensor(1), torch.arange(n)).double()
    assert float(coins.mean()) == pytest.approx(0.5, abs=5 * (1 / 12 / n) ** 0.5)
    assert ((coins >= 0) & (coins < 1)).all()


@pytest.mark.parametrize("rule", ["block", "chain"])
def test_sampled_law_over_many_steps(rule):
    """The first committed token over replayed steps is distributed as the target's: counter noise, two-stage race."""
    V, n = 40, 300
    gen = torch.Generator().manual_seed(6)
    zp, zq = torch.randn(1, 2, V, generator=gen), torch.randn(1, 1, V, generator=gen)
    state = SampledState(rule, 1, 1, 1, V, "cpu", chunk=16)
    state.assign([0], [99])
    drafts = torch.multinomial(zq[0, 0].softmax(-1), n, replacement=True, generator=gen)
    first = []
    for x in drafts:
        step = state.from_logits(x.view(1, 1), zp, zq, torch.tensor([0]))
        first.append(int(step.ids[0, 0]))
    want = zp[0, 0].softmax(-1).double() * n
    got = torch.bincount(torch.tensor(first), minlength=V)
    assert ((got - want).abs() <= 5 * (want * (1 - want / n)).sqrt()).all()


def test_sampled_state_names_the_field(on, path):
    state = SampledState("block", 4, 2, 2, 5, on)
    ids, p, q = torch.zeros(2, 2, dtype=torch.int64), torch.full((2, 3, 5), 0.2), torch.full((2, 2, 5), 0.2)
    ids, p, q, slots = ids.to(on), p.to(on), q.to(on), torch.tensor([0, 1], device=on)
    for field, args in [
        ("target_probs", (ids, p[:, :2], q, slots)),
        ("draft_probs", (ids, p, p, slots)),
        ("draft_ids", (ids[:, :1], p, q, slots)),
        ("slots", (ids, p, q, slots.float())),
    ]:
        with pytest.raises(RuleError, match=rf"^{field}: expected .*found"):
            state.from_probs(*args)
    with pytest.raises(RuleError, match=r"^temperature: expected a number > 0"):
        state.assign([0], [1], [0.0])
    with pytest.raises(RuleError, match=r"^rule: expected block or chain"):
        SampledState("asd", 4, 2, 2, 5, on)  # type: ignore[arg-type]


def test_engine_rule_is_the_rule(path, on):
    """from_probs against block.accept's oracle with the same coins injected, one chunk so that the race is one race."""
    gen = torch.Generator().manual_seed(8)
    B, K, V = 3, 4, 11
    ids, zp, zq = sampled_batch(gen, B, K, V, 0.6)
    p, q = zp.softmax(-1), zq.softmax(-1)
    state = SampledState("block", B, K, B, V, on)
    state.assign(range(B), [1, 2, 3])
    seeds, zero = torch.tensor([1, 2, 3])[:, None], torch.zeros(B, 1, dtype=torch.int64)
    eta = uniform(seeds, zero, torch.arange(K)[None])
    live = torch.full((B,), K, dtype=torch.int32)
    want = naive.accept(ids, p, q, eta, torch.ones(B, V), live)
    noise = of_tokens(seeds, zero, want.length[:, None].long(), torch.arange(V)[None], CHUNK)
    want = naive.accept(ids, p, q, eta, noise, live)
    got = state.from_probs(ids.to(on), p.to(on), q.to(on), torch.arange(B, device=on))
    assert torch.equal(got.length.cpu(), want.length)
    assert torch.equal(got.bonus.cpu(), want.bonus)
