"""The kernels on the device they are for: bit-equality at real sizes, graphs, no syncs, no allocations, and the law."""

import itertools
import math

import pytest
import torch

from adapters.rules import asd, block, chain
from adapters.rules.asd import AsdConfig, Params, Report
from adapters.rules.asd.engine import AsdState
from adapters.rules.block import naive
from adapters.rules.block.engine import SampledState
from adapters.rules.chain import naive as chain_naive

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIGS = [AsdConfig(2.0, 1.0, 1, "normalized"), AsdConfig(4.0), AsdConfig(0.0), AsdConfig(8.0, 0.25, 2)]
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-45, 3.38e38]


def adversarial(B, K, V, dtype, seed):
    """Rows with ties, NaN, infinities, denormals; strided; drafts among the best, wrong, and out of the vocabulary."""
    gen = torch.Generator().manual_seed(seed)
    z = torch.empty(B, K + 1, V + 5)[:, :, :V].to(dtype)
    z = torch.cat([torch.randn(B, K + 1, V, generator=gen).mul(2).round().div(2), torch.zeros(B, K + 1, 5)], 2).to(
        dtype
    )
    z = z[:, :, :V]
    for kind, value in enumerate(SPECIAL):
        rows = torch.rand(B, K + 1, generator=gen) < 0.04
        at = torch.randint(0, V, (B, K + 1), generator=gen)
        picked = z.gather(2, at[..., None])[..., 0]
        z.scatter_(2, at[..., None], torch.where(rows, torch.tensor(value, dtype=dtype), picked)[..., None])
        if kind == 3:
            z[rows & (torch.rand(B, K + 1, generator=gen) < 0.2)] = -math.inf
    ids = z[:, :K].float().nan_to_num().topk(min(4, V)).indices
    choice = torch.randint(0, ids.shape[2], (B, K), generator=gen)
    ids = ids.gather(2, choice[..., None])[..., 0]
    ids = torch.where(torch.rand(B, K, generator=gen) < 0.5, z[:, :K].argmax(-1), ids)
    wild = torch.tensor([-1, V, V + 1, 2**40, -(2**40)])[torch.randint(0, 5, (B, K), generator=gen)]
    ids = torch.where(torch.rand(B, K, generator=gen) < 0.03, wild, ids)
    live = torch.randint(0, K + 1, (B,), generator=gen, dtype=torch.int32)
    live[: B // 2] = K
    return z, ids, live


@pytest.mark.parametrize("K", range(1, 16))
def test_asd_bits_for_every_k(K):
    dtype = [torch.float32, torch.bfloat16, torch.float16][K % 3] if K not in (5, 7) else torch.float32
    for seed, (B, V) in enumerate([(64, 257), (7, 9001), (2, 151_937), (1, 1)]):
        z, ids, live = adversarial(B, K, V, dtype, seed)
        slots = torch.randperm(B)
        want_state, states = AsdState(B, K, B, "cpu"), [AsdState(B, K, B, "cuda") for _ in range(2)]
        for state in (want_state, *states):
            state.assign(range(B), [CONFIGS[b % len(CONFIGS)] for b in range(B)])
        slots[B // 3 : B // 3 + B // 8] = -1
        top = z.argmax(-1)
        assert torch.equal(z.cuda().argmax(-1).cpu(), top), "CUDA and CPU torch.argmax agree on ties and NaN"
        on = z.cuda()
        want = want_state.walk(ids, top, z, slots, live)
        walked = states[0].walk(ids.cuda(), top.cuda(), on, slots.cuda(), live.cuda())
        fused = states[1].fused(ids.cuda(), on, slots.cuda(), live.cuda())
        for state, got in zip(states, (walked, fused), strict=True):
            assert torch.equal(got.length.cpu(), want.length)
            assert torch.equal(got.bonus.cpu(), want.bonus)
            for name in ("charge", "relaxed", "stop"):
                assert torch.equal(getattr(got.report, name).cpu(), getattr(want.report, name)), name
            assert torch.equal(state.spent.cpu(), want_state.spent)
            assert torch.equal(state.counts.cpu(), want_state.counts)
            assert torch.equal(state.before.cpu(), want_state.before)
            assert torch.equal(state.bits.cpu(), want_state.bits)
            assert torch.allclose(state.regret.cpu(), want_state.regret, rtol=1e-12)


def test_asd_at_the_largest_sizes():
    """B = 1024, K = 15, V = 262,144: offsets past 2^31 and past 2^32."""
    B, K, V = 1024, 15, 262_144
    gen = torch.Generator("cuda").manual_seed(0)
    z = torch.empty(B, K + 1, V, dtype=torch.bfloat16, device="cuda")
    for rows in z.split(64):
        rows.copy_(torch.randn(rows.shape, device="cuda", generator=gen, dtype=torch.bfloat16))
    top = torch.cat([rows.argmax(-1) for rows in z.split(64)])
    ids = top[:, :K].clone()
    ids[::3, K // 2] = 5
    states = [AsdState(B, K, B, "cuda") for _ in range(2)]
    for state in states:
        state.assign(range(B), AsdConfig(1e4))
    slots = torch.arange(B, device="cuda")
    walked, fused = states[0].walk(ids, top, z, slots), states[1].fused(ids, z, slots)
    assert torch.equal(walked.length, fused.length)
    assert torch.equal(walked.bonus, fused.bonus)
    assert torch.equal(fused.ids.view(B, K + 1)[:, :K], ids)
    assert torch.equal(states[0].spent, states[1].spent)
    assert int(fused.length.min()) == K


def sampled_case(B, K, V, dtype, seed, near=0.6):
    gen = torch.Generator().manual_seed(seed)
    zq = torch.randn(B, K, V, generator=gen) * 3
    zp = torch.cat([zq + torch.randn(B, K, V, generator=gen) * near, torch.randn(B, 1, V, generator=gen) * 3], 1)
    zp[:, :, V // 2 :: 7] = -math.inf  # masked by the engine
    zp, zq = zp.to(dtype), zq.to(dtype)
    ids = torch.multinomial(zq.float().div(0.8).softmax(-1).view(-1, V), 1, generator=gen).view(B, K)
    return ids, zp, zq


@pytest.mark.parametrize("rule", ["block", "chain"])
@pytest.mark.parametrize("K", [1, 7, 15])
@pytest.mark.parametrize("one_hot", [False, True])
def test_sampled_states_equal_their_oracle(rule, K, one_hot):
    for B, V, dtype, near in [
        (16, 300, torch.float32, 0.6),
        (4, 9001, torch.bfloat16, 0.0),
        (3, 20_000, torch.float32, 1),
    ]:
        ids, zp, zq = sampled_case(B, K, V, dtype, K, near)
        if near == 0:
            zp[:, :K] = zq  # identical p and q
        states = [SampledState(rule, B, K, B, V, device) for device in ("cpu", "cuda")]
        slots = torch.arange(B)
        slots[1] = -1
        live = torch.tensor([K - b % 2 for b in range(B)], dtype=torch.int32)
        for logits in (True, False):
            got = []
            for state in states:
                on = state.seeds.device
                state.assign(range(B), [17 * b + K for b in range(B)], [1.2] * B, [0.8] * B)
                p, q = (zp, zq) if logits else ((zp.float() / 1.2).softmax(-1), (zq.float() / 0.8).softmax(-1))
                call = state.from_logits if logits else state.from_probs
                out = call(ids.to(on), p.to(on), None if one_hot else q.to(on), slots.to(on), live.to(on))
                got.append([out.length.cpu(), out.bonus.cpu(), state.steps.cpu(), state.counts.cpu()])
            for want, mine in zip(*got, strict=True):
                assert torch.equal(want, mine)


@pytest.mark.parametrize("rule", ["block", "chain"])
def test_injected_coins_equal_the_oracle(rule):
    module, oracle = (block, naive) if rule == "block" else (chain, chain_naive)
    for B, K, V, dtype in [(32, 7, 777, torch.float32), (2, 5, 129_280, torch.bfloat16), (1, 1, 1, torch.float32)]:
        ids, zp, zq = sampled_case(B, K, V, torch.float32, 3)
        zp = zp.nan_to_num(neginf=-20.0)
        p, q = zp.softmax(-1).to(dtype), (zq / 0.8).softmax(-1).to(dtype)
        gen = torch.Generator().manual_seed(1)
        eta, noise = torch.rand(B, K, generator=gen), torch.empty(B, V).exponential_(generator=gen)
        eta[0] = 0
        live = torch.full((B,), K, dtype=torch.int32)
        for draft in (q, None):
            want = oracle.accept(ids, p, draft, eta, noise, live)
            on = None if draft is None else draft.cuda()
            got = module.accept(ids.cuda(), p.cuda(), on, eta.cuda(), noise.cuda(), live.cuda())
            assert torch.equal(got.length.cpu(), want.length)
            assert torch.equal(got.bonus.cpu(), want.bonus)


def steps_of(kind, B, K, V, state, ids, zp, zq, slots):
    if kind == "fused":
        return lambda: state.fused(ids, zp, slots)
    if kind == "walk":
        top = zp.argmax(-1)
        return lambda: state.walk(ids, top, zp, slots)
    if kind == "logits":
        return lambda: state.from_logits(ids, zp, zq, slots)
    p, q = zp.softmax(-1), zq.softmax(-1)
    return lambda: state.from_probs(ids, p, q, slots)


@pytest.mark.parametrize("kind", ["fused", "walk", "logits", "probs"])
def test_graph_replays_equal_eager_steps_without_sync_or_allocation(kind):
    B, K, V = 6, 5, 5001
    ids, zp, zq = (t.cuda() for t in sampled_case(B, K, V, torch.float32, 9))
    slots = torch.tensor([5, 0, -1, 3, 2, 1], device="cuda")
    greedy = kind in ("fused", "walk")
    if greedy:
        ids = zp[:, :K].topk(2).indices[..., 1].contiguous()
    states = []
    for _ in range(2):
        state = AsdState(B, K, B, "cuda") if greedy else SampledState("block", B, K, B, V, "cuda")
        if greedy:
            state.assign(range(B), AsdConfig(2.0))
        else:
            state.assign(range(B), range(B))
        states.append(state)
    eager, captured = (steps_of(kind, B, K, V, s, ids, zp, zq, slots) for s in states)
    wanted = []
    torch.cuda.synchronize()
    for turn in range(4):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        out = eager()
        torch.cuda.set_sync_debug_mode("default")
        if turn:
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        wanted.append((out.length.clone(), out.bonus.clone()))
    captured()  # one step outside the graph, as a warm-up is
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured()
    for length, bonus in wanted[1:]:
        graph.replay()
        assert torch.equal(out.length, length)
        assert torch.equal(out.bonus, bonus)
    if greedy:
        assert torch.equal(states[0].spent, states[1].spent)
        assert float(states[0].spent.max()) > 0
    else:
        assert states[1].steps.tolist() == [4, 4, 4, 4, 0, 4]
        assert len({tuple(bonus.tolist()) for _, bonus in wanted}) > 1, "replays must draw anew"


@pytest.mark.parametrize("one_hot", [False, True])
def test_block_at_the_largest_sizes(one_hot):
    """B = 1024, K = 15, V = 262,144: every request answers as it does in a small batch; offsets past 2^32."""
    B, K, V = 1024, 15, 262_144
    gen = torch.Generator("cuda").manual_seed(0)
    zq = torch.empty(B, K, V, dtype=torch.bfloat16, device="cuda")
    zp = torch.empty(B, K + 1, V, dtype=torch.bfloat16, device="cuda")
    for q, p in zip(zq.split(64), zp.split(64), strict=True):
        q.normal_(generator=gen).mul_(4)
        p.normal_(generator=gen)
        p[:, :K].mul_(0.5).add_(q)
    ids = zq.view(B * K, V).argmax(-1).view(B, K)
    some = torch.tensor([0, 511, 700, 1023], device="cuda")
    answers = []
    for rows in (torch.arange(B, device="cuda"), some):
        state = SampledState("block", B, K, len(rows), V, "cuda")
        state.assign(range(B), range(B))
        draft = None if one_hot else zq if len(rows) == B else zq[rows]
        answers.append(state.from_logits(ids[rows], zp if len(rows) == B else zp[rows], draft, rows))
    assert torch.equal(answers[0].length[some], answers[1].length)
    assert torch.equal(answers[0].bonus[some], answers[1].bonus)
    assert int(answers[0].length.max()) > 0


LAWS = {
    "near": ([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], [[0.4, 0.4, 0.2], [0.2, 0.5, 0.3]]),
    "far": ([[0.05, 0.05, 0.9], [0.9, 0.05, 0.05], [0.3, 0.3, 0.4]], [[0.8, 0.15, 0.05], [0.1, 0.1, 0.8]]),
    "columns without q": ([[0.5, 0.25, 0.25], [0.4, 0.2, 0.4], [1.0, 0.0, 0.0]], [[0.0, 0.5, 0.5], [0.7, 0.3, 0.0]]),
    "columns without p": ([[0.0, 0.25, 0.75], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]], [[0.4, 0.3, 0.3], [0.3, 0.4, 0.3]]),
    "same": ([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]),
}


@pytest.mark.parametrize("rule", ["block", "chain"])
@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("logits", [False, True])
def test_law_of_200_000_draws(rule, name, logits):
    """Drafts from q, the rule, then the target for the rest: every sequence within 5 sigma of the target's own law."""
    P, Q = (torch.tensor(rows, device="cuda") for rows in LAWS[name])
    K, V, B, turns = 2, 3, 2000, 100
    gen = torch.Generator("cuda").manual_seed(5)
    state = SampledState(rule, B, K, B, V, "cuda", chunk=16)
    state.assign(range(B), range(1000, 1000 + B))
    slots = torch.arange(B, device="cuda")
    p, q = P.expand(B, K + 1, V).contiguous(), Q.expand(B, K, V).contiguous()
    if logits:
        p, q = p.log(), q.log()
    seen = torch.zeros(V ** (K + 1), dtype=torch.int64, device="cuda")
    lengths = torch.zeros(K + 1, dtype=torch.int64, device="cuda")
    place = torch.tensor([9, 3, 1], device="cuda")
    for _ in range(turns):
        ids = torch.multinomial(Q.expand(B, K, V).reshape(-1, V), 1, generator=gen).view(B, K)
        step = (state.from_logits if logits else state.from_probs)(ids, p, q, slots)
        rest = torch.stack([torch.multinomial(row, B, replacement=True, generator=gen) for row in P], 1)
        out = torch.where(torch.arange(K + 1, device="cuda") <= step.length[:, None], step.ids, rest)
        index = (out * place).sum(1)
        seen.scatter_add_(0, index, torch.ones_like(index))
        lengths.scatter_add_(0, step.length.long(), torch.ones_like(index))
    n = B * turns
    for index, y in enumerate(itertools.product(range(V), repeat=K + 1)):
        want = math.prod(P[i, v].item() for i, v in enumerate(y))
        assert abs(int(seen[index]) - n * want) <= 5 * math.sqrt(n * want * (1 - want)) + 1e-6, y
    if name == "same":
        assert int(lengths[K]) == n


def test_walk_report_is_what_accept_reports():
    """The API's kernel path and the state's agree on the device."""
    z, ids, live = adversarial(16, 4, 1001, torch.float32, 2)
    report, spent = Report.empty(16, 4, "cuda"), torch.zeros(16, device="cuda")
    got = asd.accept(ids.cuda(), z.cuda(), spent, AsdConfig(2.0), live.cuda(), report)
    want_report, want_spent = Report.empty(16, 4), torch.zeros(16)
    want = asd.accept(ids, z, want_spent, AsdConfig(2.0), live, want_report)
    assert torch.equal(got.length.cpu(), want.length)
    assert torch.equal(got.bonus.cpu(), want.bonus)
    assert torch.equal(report.charge.cpu(), want_report.charge)
    assert torch.equal(spent.cpu(), want_spent)
    assert isinstance(asd.as_params(AsdConfig(1.0), 2, spent.device), Params)
