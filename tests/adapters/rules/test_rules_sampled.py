"""Chain and block verification against exact rational enumeration, and the kernels against the oracles."""

import itertools
import math
import random
from fractions import Fraction as F

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adapters.rules import RuleError, block, chain
from adapters.rules.block import naive
from adapters.rules.sampling import fault

FAST = settings(derandomize=True, deadline=None, max_examples=40)
RULES = ["block", "chain"]


def law(weights):
    total = sum(weights)
    return [F(w, total) for w in weights]


# --- the two rules in exact rationals, one path at a time; p and q are lists of rows ---------------------------------


def ratio(p, q):
    return p / q if q else F(0)


def exact_block(x, p, q):
    """(w, h) with h[0] = 1, as design and paper index them."""
    K, w, h = len(x), [F(1)], [F(1)]
    for i in range(1, K + 1):
        w.append(min(w[-1] * ratio(p[i - 1][x[i - 1]], q[i - 1][x[i - 1]]), F(1)))
    for i in range(1, K):
        S = sum(max(w[i] * a - b, F(0)) for a, b in zip(p[i], q[i], strict=True))
        h.append(S / (S + 1 - w[i]) if S else F(0))
    return w, [*h, w[K]] if K else h


def exact_lengths(rule, x, p, q):
    """P(accept length = n | drafts x), n = 0..K."""
    K = len(x)
    if rule == "chain":
        out, reach = [], F(1)
        for i in range(K):
            h = min(ratio(p[i][x[i]], q[i][x[i]]), F(1))
            out.append(reach * (1 - h))
            reach *= h
        return [*out, reach]
    _, h = exact_block(x, p, q)
    out, none = [F(0)] * (K + 1), F(1)
    for i in range(K, 0, -1):
        out[i] = none * h[i]
        none *= 1 - h[i]
    out[0] = none
    return out


def exact_bonus(rule, n, x, p, q):
    """The law of the bonus after n drafts of x."""
    if n == len(x):
        return p[n]
    w = exact_block(x, p, q)[0][n] if rule == "block" else F(1)
    left = [max(w * a - b, F(0)) for a, b in zip(p[n], q[n], strict=True)]
    return [v / sum(left) for v in left] if sum(left) else p[n]


# --- a random model: next-token laws that depend on the prefix -----------------------------------------------------


def tree(rng, V, K, zeros=True):
    choices = [0, 1, 2, 3, 7] if zeros else [1, 2, 3, 7]
    rows = {}
    for n in range(K + 1):
        for prefix in itertools.product(range(V), repeat=n):
            weights = [rng.choice(choices) for _ in range(V)]
            rows[prefix] = law(weights if sum(weights) else [1] * V)
    return rows


def path_rows(rows, x, count):
    return [rows[x[:i]] for i in range(count)]


def tensors(P, Q, V, K, dtype=torch.float64):
    """Every draft path at once: ids [N, K], p [N, K+1, V], q [N, K, V], P(draft) per path."""
    xs = list(itertools.product(range(V), repeat=K))
    p = torch.tensor([[[float(a) for a in r] for r in path_rows(P, x, K + 1)] for x in xs], dtype=dtype)
    q = torch.tensor([[[float(a) for a in r] for r in path_rows(Q, x, K)] for x in xs], dtype=dtype)
    drawn = [math.prod((Q[x[:i]][x[i]] for i in range(K)), start=F(1)) for x in xs]
    return xs, torch.tensor(xs).view(len(xs), K), p, q, drawn


def oracle_law(rule, ids, p, q, live):
    """P(length) [N, K+1] and the bonus law after each length [N, K+1, V] that the oracle's own functions imply."""
    N, K = ids.shape
    if rule == "block":
        w, h = naive.thresholds(ids, p, q, live)
        length, none = torch.zeros(N, K + 1, dtype=p.dtype), torch.ones(N, dtype=p.dtype)
        for i in range(K, 0, -1):
            length[:, i] = none * h[:, i]
            none = none * (1 - h[:, i])
        length[:, 0] = none
    else:
        h = naive.ratios(naive.at(p, ids), naive.at(q, ids)).clamp(max=1)
        w, reach = torch.ones(N, K + 1, dtype=p.dtype), torch.ones(N, dtype=p.dtype)
        length = torch.zeros(N, K + 1, dtype=p.dtype)
        for i in range(K):
            here = i < live
            length[:, i] = torch.where(here, reach * (1 - h[:, i]), 0)
            reach = torch.where(here, reach * h[:, i], reach)
        length[torch.arange(N), live.long()] += reach
    bonus = torch.zeros(N, K + 1, p.shape[2], dtype=p.dtype)
    for n in range(K + 1):
        mass = naive.correction(p[:, n], q[:, min(n, K - 1)], w[:, n], live == n)
        bonus[:, n] = mass / mass.sum(-1, keepdim=True)
    return length, bonus


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("V", "K", "seed"), [(2, 1, 0), (2, 4, 1), (3, 2, 2), (3, 3, 3), (5, 2, 4), (2, 5, 5), (4, 1, 6)]
)
def test_oracle_equals_the_rule_and_is_lossless(rule, V, K, seed):
    """Output law by enumeration of every draft: the first K+1 tokens are distributed as the target's own."""
    rng = random.Random(seed)
    P, Q = tree(rng, V, K), tree(rng, V, K)
    xs, ids, p, q, drawn = tensors(P, Q, V, K)
    length, bonus = oracle_law(rule, ids, p, q, torch.full((len(xs),), K))
    output = {}
    for row, x in enumerate(xs):
        if not drawn[row]:
            continue
        want = exact_lengths(rule, x, path_rows(P, x, K + 1), path_rows(Q, x, K))
        assert length[row].tolist() == pytest.approx([float(v) for v in want], abs=1e-12)
        for n in range(K + 1):
            if want[n]:
                exact = exact_bonus(rule, n, x, path_rows(P, x, K + 1), path_rows(Q, x, K))
                assert bonus[row, n].tolist() == pytest.approx([float(v) for v in exact], abs=1e-12)
            for token in range(V):
                key = (*x[:n], token)
                output[key] = output.get(key, 0.0) + float(drawn[row]) * float(length[row, n] * bonus[row, n, token])
    # What was committed is a prefix; the target writes the rest. Mass of every full sequence:
    for y in itertools.product(range(V), repeat=K + 1):
        got = sum(
            output.get(y[:n], 0.0) * float(math.prod((P[y[:i]][y[i]] for i in range(n, K + 1)), start=F(1)))
            for n in range(1, K + 2)
        )
        assert got == pytest.approx(float(math.prod((P[y[:i]][y[i]] for i in range(K + 1)), start=F(1))), abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_fewer_live_drafts_are_a_shorter_block(rule):
    rng = random.Random(11)
    V, K = 3, 3
    _, ids, p, q, _ = tensors(tree(rng, V, K), tree(rng, V, K), V, K)
    for live in range(1, K):
        n = torch.full((len(ids),), live)
        long = oracle_law(rule, ids, p, q, n)
        short = oracle_law(rule, ids[:, :live], p[:, : live + 1], q[:, :live], n)
        assert torch.equal(long[0][:, : live + 1], short[0])
        assert not long[0][:, live + 1 :].any()
        assert torch.equal(long[1][:, live].nan_to_num(), short[1][:, live].nan_to_num())


@pytest.mark.parametrize(
    ("K", "token", "whole"), [(2, F(10, 9), F(11, 9)), (3, F(38, 27), F(5, 3)), (5, F(422, 243), F(64, 27))]
)
def test_values_by_hand(K, token, whole):
    """p = (1/3, 2/3), q = (2/3, 1/3): expected accept lengths."""
    rows = {x: law([1, 2]) for n in range(K + 1) for x in itertools.product(range(2), repeat=n)}
    drafts = {x: law([2, 1]) for x in rows}
    xs, ids, p, q, drawn = tensors(rows, drafts, 2, K)
    for rule, want in [("chain", token), ("block", whole)]:
        exact = sum(
            d
            * sum(
                n * v for n, v in enumerate(exact_lengths(rule, x, path_rows(rows, x, K + 1), path_rows(drafts, x, K)))
            )
            for x, d in zip(xs, drawn, strict=True)
        )
        assert exact == want
        length, _ = oracle_law(rule, ids, p, q, torch.full((len(xs),), K))
        mean = (length * torch.arange(K + 1)).sum(1) @ torch.tensor([float(d) for d in drawn], dtype=torch.float64)
        assert float(mean) == pytest.approx(float(want), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_one_hot_block_equals_one_hot_token_rule(seed):
    rng = random.Random(seed)
    V, K = 3, 3
    _, ids, p, _, _ = tensors(tree(rng, V, K), tree(rng, V, K), V, K)
    q, live = naive.one_hot(ids, V, p.dtype), torch.full((len(ids),), K)
    whole, token = oracle_law("block", ids, p, q, live), oracle_law("chain", ids, p, q, live)
    assert torch.allclose(whole[0], token[0], atol=1e-12)
    reached = whole[0] > 0
    assert torch.allclose(whole[1][reached], token[1][reached], atol=1e-12)


# --- single decisions -------------------------------------------------------------------------------------------------


def verify(rule, path, device, ids, p, q, eta, noise, live):
    module = {"block": block, "chain": chain}[rule].naive
    if path == "kernel":
        from adapters.rules.block import triton as block_kernel
        from adapters.rules.chain import triton as chain_kernel

        module = {"block": block_kernel, "chain": chain_kernel}[rule]
        ids, p, q, eta, noise, live = (None if t is None else t.to(device) for t in (ids, p, q, eta, noise, live))
    out = module.accept(ids, p, q, eta, noise, live)
    assert (out.length.dtype, out.bonus.dtype) == (torch.int32, torch.int64)
    return out.length.tolist(), out.bonus.tolist()


def brute(rule, x, p, q, eta, noise):
    """One request from exact rationals and injected coins. Skips (assume) coins within rounding of a threshold."""
    K = len(x)
    if rule == "chain":
        h = [min(ratio(p[i][x[i]], q[i][x[i]]), F(1)) for i in range(K)]
        coins = list(zip(eta, h, strict=True))
        n = next((i for i, (u, t) in enumerate(coins) if not (u <= t and t > 0)), K)
    else:
        coins = list(zip(eta, exact_block(x, p, q)[1][1:], strict=True))
        n = max((i + 1 for i, (u, t) in enumerate(coins) if u <= t and t > 0), default=0)
    assume(all(abs(u - t) > F(1, 10**5) or t == 0 for u, t in coins))
    mass = exact_bonus(rule, n, x, p, q)
    scores = [float(m) / e for m, e in zip(mass, noise, strict=True)]
    return n, scores.index(max(scores))


@st.composite
def decisions(draw):
    V, K = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    weights = st.lists(st.sampled_from([0, 0, 1, 2, 5, 11]), min_size=V, max_size=V).filter(any)
    p = [law(draw(weights)) for _ in range(K + 1)]
    same = draw(st.booleans())
    q = p[:K] if same else [law(draw(weights)) for _ in range(K)]
    x = [draw(st.sampled_from([v for v in range(V) if row[v]])) for row in q]
    eta = [F(draw(st.integers(0, 127)), 128) for _ in range(K)]
    noise = [draw(st.sampled_from([0.125, 0.375, 1.0, 1.75, 4.25, 1e-6])) + 0.001 * v for v in range(V)]
    return x, p, q, eta, noise


def check_decision(rule, path, device, case):
    x, p, q, eta, noise = case
    want = brute(rule, x, p, q, eta, noise)

    def floats(rows):
        return torch.tensor([[[float(a) for a in row] for row in rows]])

    got = verify(
        rule, path, device, torch.tensor([x]), floats(p), floats(q), torch.tensor([[float(u) for u in eta]]),
        torch.tensor([noise]), torch.tensor([len(x)], dtype=torch.int32),
    )  # fmt: skip
    assert got == ([want[0]], [want[1]])


@settings(FAST, max_examples=200)
@given(case=decisions())
@pytest.mark.parametrize("rule", RULES)
def test_oracle_decides_as_the_rule(rule, case):
    check_decision(rule, "oracle", torch.device("cpu"), case)


@settings(FAST, max_examples=12)
@given(case=decisions())
@pytest.mark.parametrize("rule", RULES)
def test_kernel_decides_as_the_rule(rule, device, case):
    check_decision(rule, "kernel", device, case)


def drafted(seed, B, K, V, sharp=1.0, near=0.5, dtype=torch.float32):
    """A batch of drafts from q with a target that is near it."""
    gen = torch.Generator().manual_seed(seed)
    zq = torch.randn(B, K + 1, V, generator=gen) * sharp
    p = (zq + torch.randn(B, K + 1, V, generator=gen) * near).softmax(-1).to(dtype)
    q = zq[:, :K].softmax(-1).to(dtype)
    ids = torch.multinomial(q.float().view(-1, V), 1, generator=gen).view(B, K)
    live = torch.randint(0, K + 1, (B,), generator=gen, dtype=torch.int32)
    eta = torch.rand(B, K, generator=gen)
    return ids, p, q, eta, torch.empty(B, V).exponential_(generator=gen), live


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(
    ("B", "K", "V", "dtype"),
    [(3, 7, 129, torch.float32), (1, 1, 1, torch.float32), (2, 15, 33, torch.bfloat16), (2, 2, 9001, torch.float32)],
)
def test_kernel_equals_oracle(rule, one_hot, B, K, V, dtype, device):
    for seed, near in enumerate((0.0, 0.3, 2.0)):
        ids, p, q, eta, noise, live = drafted(seed, B, K, V, near=near, dtype=dtype)
        q = None if one_hot else q
        want = verify(rule, "oracle", device, ids, p, q, eta, noise, live)
        assert verify(rule, "kernel", device, ids, p, q, eta, noise, live) == want


@pytest.mark.parametrize("rule", RULES)
def test_a_coin_of_zero_accepts_only_what_has_a_chance(rule, path, device):
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    q = torch.tensor([[[1.0, 0.0]]])
    zero, noise, live = torch.zeros(1, 1), torch.ones(1, 2), torch.tensor([1], dtype=torch.int32)
    ids = torch.tensor([[0]])
    assert verify(rule, path, device, ids, p, q, zero, noise, live) == ([0], [1])
    assert verify(rule, path, device, ids, p, None, zero, noise, live) == ([0], [1])
    p[0, 0] = torch.tensor([0.25, 0.75])
    assert verify(rule, path, device, ids, p, q, zero, noise, live) == ([1], [0])


@pytest.mark.parametrize("rule", RULES)
def test_coin_at_the_threshold_accepts(rule, path, device):
    p, q = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]]), torch.tensor([[[0.5, 0.5]]])
    ids, noise, live = torch.tensor([[0]]), torch.ones(1, 2), torch.tensor([1], dtype=torch.int32)
    assert verify(rule, path, device, ids, p, q, torch.tensor([[0.5]]), noise, live) == ([1], [0])
    assert verify(rule, path, device, ids, p, q, torch.tensor([[0.5000001]]), noise, live) == ([0], [1])


@pytest.mark.parametrize("rule", RULES)
def test_nan_is_never_a_free_accept(rule, path, device):
    q = torch.full((1, 1, 2), 0.5)
    noise, live = torch.ones(1, 2), torch.tensor([1], dtype=torch.int32)
    p = torch.full((1, 2, 2), math.nan)
    length, bonus = verify(rule, path, device, torch.tensor([[1]]), p, q, torch.zeros(1, 1), noise, live)
    assert length == [0]
    assert bonus[0] in (0, 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", ["zero", "nan", "outside"])
def test_drafted_token_without_mass(rule, bad, device):
    """An error of the oracle; the kernel, which does not wait for the device, rejects it and raises the flag."""
    ids, p = torch.tensor([[1, 0]]), torch.full((1, 3, 2), 0.5)
    q = torch.full((1, 2, 2), 0.5)
    if bad == "outside":
        ids[0, 0] = 2
    else:
        q[0, 0, 1] = math.nan if bad == "nan" else 0.0
    eta, noise, live = torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([2], dtype=torch.int32)
    with pytest.raises(RuleError, match=r"draft_probs: expected q > 0 .*row 0, draft 0"):
        verify(rule, "oracle", device, ids, p, q, eta, noise, live)
    verify(rule, "oracle", device, ids, p, q, eta, noise, live * 0)  # not live: no rule sees it
    fault(device).zero_()
    assert verify(rule, "kernel", device, ids, p, q, eta, noise, live * 0)[0] == [0]
    assert fault(device).item() == 0
    assert verify(rule, "kernel", device, ids, p, q, eta, noise, live)[0] == [0]
    assert fault(device).item() == 1
    fault(device).zero_()
    if bad == "outside":  # one-hot drafts: simply not a token the target can have
        assert verify(rule, "oracle", device, ids, p, None, eta, noise, live)[0] == [0]
        assert verify(rule, "kernel", device, ids, p, None, eta, noise, live)[0] == [0]
        assert fault(device).item() == 0


def test_race_draws_from_the_mass():
    gen = torch.Generator().manual_seed(3)
    mass, n = torch.tensor([0.0, 3.0, 1.0, 6.0]), 40_000
    won = naive.race(mass.expand(n, 4), torch.empty(n, 4).exponential_(generator=gen)).bincount(minlength=4)
    want = mass / mass.sum() * n
    assert won[0] == 0
    assert ((won - want).abs() <= 5 * (want * (1 - want / n)).sqrt()).all()


@pytest.mark.parametrize("rule", [block, chain])
def test_generator_makes_it_reproducible(rule):
    ids, p, q, _, _, live = drafted(0, 64, 3, 11)
    runs = [rule.accept(ids, p, q, live=live, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(runs[0].bonus, runs[1].bonus)
    assert torch.equal(runs[0].length, runs[1].length)
    assert not torch.equal(runs[0].bonus, runs[2].bonus)


ids, p, q = torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 4, 5), 0.2), torch.full((2, 3, 5), 0.2)


@pytest.mark.parametrize("rule", [block, chain])
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("draft_ids", {"draft_ids": ids.float()}),
        ("target_probs", {"target_probs": p[:, :3]}),
        ("draft_probs", {"draft_probs": p}),
        ("draft_probs", {"draft_probs": q.long()}),
        ("eta", {"eta": torch.zeros(2, 2)}),
        ("noise", {"noise": torch.zeros(2, 4)}),
        ("live", {"live": torch.tensor([4, 0])}),
        ("generator", {"eta": torch.zeros(2, 3), "noise": torch.ones(2, 5), "generator": torch.Generator()}),
    ],
)
def test_errors_name_the_field(rule, field, change):
    good = {"draft_ids": ids, "target_probs": p, "draft_probs": q}
    rule.accept(**good)
    with pytest.raises(RuleError, match=rf"^{field}: expected .*found"):
        rule.accept(**good | change)
