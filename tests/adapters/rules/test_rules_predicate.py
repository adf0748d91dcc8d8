"""The rules that judge every draft by itself, against a walk in Python floats, row by row."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from adapters.policy import Policy
from adapters.rules import RuleError, chain, common, entropy, relaxed_ratio, relaxed_topk, strict, thresholds, typical
from adapters.rules.predicate import inside
from adapters.rules.rowstats import naive as rowstats_naive

ORACLE = settings(
    derandomize=True, deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
KERNEL = settings(ORACLE, max_examples=15)
VALUES = [0.0, 0.25, 0.5, 1.0, 2.0, 3.5, -1.0, -2.0, math.inf, -math.inf, math.nan]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
START, END = 0, 1  # think ids of the tests
TYPICAL = Policy("typical", epsilon=0.09, alpha=0.3)
TOPK = Policy("relaxed-topk", top_n=10, delta=0.6)
RATIO = Policy("relaxed-ratio", top_n=3, ratio=0.5)
ENTROPY = Policy("entropy", alpha=0.4, tau=0.95)


@pytest.fixture
def on(path, device, monkeypatch):
    """Where tensors must be so that the path is taken: rowstats asks the tensor and, interpreting, the environment."""
    if path == "oracle":
        return torch.device("cpu")
    if device.type == "cpu":
        monkeypatch.setattr("adapters.rules.rowstats.use_kernel", lambda _: True)
    return device


@st.composite
def blocks(draw, least=0):
    """draft_ids, logits, live."""
    B, K, V = draw(st.integers(least, 3)), draw(st.integers(1, 4)), draw(st.integers(2, 6))
    values = st.sampled_from(VALUES[:8] if draw(st.booleans()) else VALUES)
    count = B * (K + 1) * V
    z = torch.tensor(draw(st.lists(values, min_size=count, max_size=count))).view(B, K + 1, V)
    free = st.integers(-1, V) if draw(st.booleans()) else st.integers(0, V - 1)
    ids = torch.tensor(draw(st.lists(free, min_size=B * K, max_size=B * K)), dtype=torch.int64).view(B, K)
    live = torch.tensor(draw(st.lists(st.integers(0, K), min_size=B, max_size=B)), dtype=torch.int32)
    return ids, z.to(draw(st.sampled_from(DTYPES))), live


def first_largest(row):
    for v, z in enumerate(row):
        if math.isnan(z):
            return v
    return row.index(max(row))


def softmax(row, scale=1.0):
    """None where there is no distribution."""
    peak = max(row, key=lambda z: math.inf if math.isnan(z) else z)
    if not math.isfinite(peak) or any(math.isnan(z) for z in row):
        return None
    mass = [math.exp((z - peak) * scale) for z in row]
    return [each / math.fsum(mass) for each in mass]


def nats(p):
    return -math.fsum(each * math.log(each) for each in p if each > 0)


def clear(a, b):
    """a and b are equal, or further apart than float32 could turn round: else the example says nothing."""
    assume(a == b or abs(a - b) > 1e-5 * max(1.0, abs(a), abs(b)))


def at_least(a, b):
    clear(a, b)
    return a >= b


def in_top(row, x, n):
    return sum(z > row[x] or (z == row[x] and v < x) for v, z in enumerate(row)) < n


def near(policy, row, x):
    """The relaxation of one greedy draft, thinking apart."""
    p = softmax(row)
    if not 0 <= x < len(row) or math.isnan(row[x]):
        return False
    if policy.rule == "relaxed-topk":
        return p is not None and in_top(row, x, policy.top_n) and at_least(p[x], max(p) - policy.delta)
    gap = max(row) - row[x] if p is not None else math.nan
    return in_top(row, x, policy.top_n) and p is not None and at_least(-math.log(policy.ratio), gap)


def thinking_at(ids, i, open_):
    for x in ids[:i]:
        open_ = open_ if x not in (START, END) else x == START
    return open_


def brute_greedy(policy, ids, rows, live, open_=True, scale=1.0):
    """(length, bonus, relaxed positions) of one request."""
    n, relaxed = 0, []
    for i in range(live):
        row, x = rows[i], ids[i]
        match = x == first_largest(row)
        if policy.rule == "typical":
            p = softmax(row, scale)
            passes = p is not None and 0 <= x < len(row)
            if passes:
                bar = min(policy.epsilon, policy.alpha * math.exp(-nats(p)))
                clear(p[x], bar)
                passes = p[x] > bar
        else:
            spanned = policy.think_end is None or thinking_at(ids, i, open_)
            passes = match or (spanned and near(policy, row, x))
        if not passes:
            break
        n += 1
        relaxed += [] if match else [i]
    return n, first_largest(rows[n]), relaxed


def check_greedy(module, policy, block, on, *more, **brute):
    ids, z, live = block
    relaxed = torch.ones(ids.shape, dtype=torch.bool, device=on)
    out = module.accept(ids.to(on), z.to(on), policy, *(m.to(on) for m in more), live=live.to(on), relaxed=relaxed)
    assert (out.length.dtype, out.bonus.dtype) == (torch.int32, torch.int64)
    assert out.length.shape == out.bonus.shape == live.shape
    for b in range(len(ids)):
        own = {name: values[b].item() for name, values in brute.items()}
        want = brute_greedy(policy, ids[b].tolist(), z[b].tolist(), int(live[b]), **own)
        assert (int(out.length[b]), int(out.bonus[b])) == want[:2]
        assert relaxed[b].nonzero().flatten().tolist() == want[2]


topk = st.builds(
    lambda n, d: Policy("relaxed-topk", top_n=n, delta=d), st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.3, 1.0])
)
ratio = st.builds(
    lambda n, r: Policy("relaxed-ratio", top_n=n, ratio=r), st.integers(1, 4), st.sampled_from([1.0, 0.7, 0.5, 0.01])
)
medusa = st.builds(
    lambda e, a: Policy("typical", epsilon=e, alpha=a),
    st.sampled_from([0.0, 0.09, 0.3, 1.0]),
    st.sampled_from([0.0, 0.3, 1.5]),
)


@ORACLE
@given(block=blocks(), policy=st.one_of(topk, ratio), thinks=st.booleans(), data=st.data())
def test_the_relaxed_rules_are_their_formulas(block, policy, thinks, data):
    relaxed_rules(block, policy, thinks, data, torch.device("cpu"))


@KERNEL
@given(block=blocks(), policy=st.one_of(topk, ratio), thinks=st.booleans(), data=st.data())
def test_the_relaxed_rules_through_the_kernel(block, policy, thinks, data, on):
    relaxed_rules(block, policy, thinks, data, on)


def relaxed_rules(block, policy, thinks, data, on):
    module = relaxed_topk if policy.rule == "relaxed-topk" else relaxed_ratio
    if not thinks:
        check_greedy(module, policy, block, on)
        return
    policy = Policy(
        **{n: getattr(policy, n) for n in ("rule", "top_n", "delta", "ratio")}, think_start=START, think_end=END
    )
    B = len(block[0])
    open_ = torch.tensor(data.draw(st.lists(st.booleans(), min_size=B, max_size=B)), dtype=torch.bool)
    check_greedy(module, policy, block, on, open_, open_=open_)


@ORACLE
@given(block=blocks(), policy=medusa, data=st.data())
def test_typical_is_its_formula(block, policy, data):
    typical_rule(block, policy, data, torch.device("cpu"))


@KERNEL
@given(block=blocks(), policy=medusa, data=st.data())
def test_typical_through_the_kernel(block, policy, data, on):
    typical_rule(block, policy, data, on)


def typical_rule(block, policy, data, on):
    B = len(block[0])
    scale = torch.tensor(data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=B, max_size=B)))
    check_greedy(typical, policy, block, on, scale, scale=scale)


# ---- with coins


@st.composite
def sampled_blocks(draw):
    """draft_ids, p, q or None, raw logits, eta, noise, live; p has zeros, as after a top-k."""
    ids, z, live = draw(blocks(least=0))
    (B, K), V = ids.shape, z.shape[2]
    z, ids = z.float().nan_to_num(0.0, 2.0, -2.0), ids.clamp(0, V - 1)
    g = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    p = torch.rand(B, K + 1, V, generator=g) * (torch.rand(B, K + 1, V, generator=g) < 0.7) + 1e-3 * (z == 0)
    p[..., 0] += 1e-2
    q = torch.rand(B, K, V, generator=g) + 0.05
    q = q / q.sum(-1, keepdim=True) if draw(st.booleans()) else None
    eta, noise = torch.rand(B, K, generator=g), torch.empty(B, V).exponential_(generator=g)
    return ids, p / p.sum(-1, keepdim=True), q, z, eta, noise, live


def brute_sampled(policy, ids, p, q, z, eta, noise, live):
    """(length, bonus, drafts that chain with the same coin rejects) of one request; q None: one-hot."""
    n, relaxed = 0, []
    for i in range(live):
        x = ids[i]
        ratio = p[i][x] / (1.0 if q is None or policy.rule == "thresholds" else q[i][x])
        if policy.rule == "thresholds":
            bar, single = ratio / max(policy.threshold_acc, 1e-9), p[i][x] >= policy.threshold_single
            clear(p[i][x], policy.threshold_single)
            clear(eta[i], bar)
            passes = (ratio > 0 and eta[i] <= bar) or single
        else:
            coin = eta[i] * min(math.exp(-policy.alpha * nats(softmax(z[i]))), policy.tau)
            clear(coin, ratio)
            passes = ratio > 0 and coin <= ratio
        if not passes:
            break
        relaxed += [] if ratio > 0 and eta[i] <= ratio else [i]
        n += 1
    left = p[n]
    if n < live:
        other = [float(v == ids[n]) for v in range(len(left))] if q is None or policy.rule == "thresholds" else q[n]
        mass = [max(a - b, 0.0) for a, b in zip(left, other, strict=True)]
        left = mass if any(each > 0 for each in mass) else left
    race = [m / e if m > 0 else -1.0 for m, e in zip(left, noise, strict=True)]
    best = sorted(race)
    assume(len(race) == 1 or best[-1] > best[-2] * (1 + 1e-4))
    return n, race.index(best[-1]), relaxed


def run_sampled(policy, block, on):
    ids, p, q, z, eta, noise, live = (t if t is None else t.to(on) for t in block)
    relaxed = torch.ones(ids.shape, dtype=torch.bool, device=on)
    if policy.rule == "thresholds":
        return thresholds.accept(ids, p, policy, eta, noise, live, relaxed=relaxed), relaxed
    return entropy.accept(ids, p, q, z, policy, eta, noise, live, relaxed=relaxed), relaxed


def check_sampled(policy, block, on):
    out, relaxed = run_sampled(policy, block, on)
    for b in range(len(block[0])):
        rows = [None if t is None else t[b].tolist() for t in block]
        want = brute_sampled(policy, *rows)
        assert (int(out.length[b]), int(out.bonus[b])) == want[:2]
        assert relaxed[b].nonzero().flatten().tolist() == want[2]


pair = st.builds(
    lambda s, a: Policy("thresholds", threshold_single=s, threshold_acc=a),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
ascend = st.builds(
    lambda a, t: Policy("entropy", alpha=a, tau=t), st.sampled_from([0.0, 0.4, 2.0]), st.sampled_from([0.3, 0.95, 1.0])
)


@ORACLE
@given(block=sampled_blocks(), policy=st.one_of(pair, ascend))
def test_the_rules_with_coins_are_their_formulas(block, policy):
    check_sampled(policy, block, torch.device("cpu"))


@KERNEL
@given(block=sampled_blocks(), policy=ascend)
def test_entropy_through_the_kernel(block, policy, on):
    check_sampled(policy, block, on)


# ---- where a rule must reduce to another


def same(got, want):
    assert torch.equal(got.length, want.length)
    assert torch.equal(got.bonus, want.bonus)


@ORACLE
@given(blocks(), st.floats(0, 1))
def test_a_top_of_one_is_strict(block, loose):
    ids, z, live = block
    want = strict.accept(ids, z, live)
    same(relaxed_topk.accept(ids, z, Policy("relaxed-topk", top_n=1, delta=loose), live=live), want)
    if loose > 0:
        same(relaxed_ratio.accept(ids, z, Policy("relaxed-ratio", top_n=1, ratio=loose), live=live), want)


@ORACLE
@given(blocks(), st.booleans())
def test_outside_thinking_the_relaxed_rules_are_strict(block, ratio):
    ids, z, live = block
    ids = ids.clamp(min=START + 2)  # no draft opens the span
    module, own = (relaxed_ratio, {"ratio": 0.01}) if ratio else (relaxed_topk, {"delta": 1.0})
    policy = Policy("relaxed-ratio" if ratio else "relaxed-topk", top_n=9, think_start=START, think_end=END, **own)
    same(module.accept(ids, z, policy, torch.zeros(len(ids), dtype=torch.bool), live), strict.accept(ids, z, live))


@ORACLE
@given(blocks(), st.sampled_from([0.0, 0.09, 0.9]), st.sampled_from([0.0, 0.3, 5.0]))
def test_typical_on_rows_without_doubt_is_strict(block, epsilon, alpha):
    ids, z, live = block
    top = z.float().nan_to_num(0.0, 9.0, -9.0).argmax(-1)
    sure = torch.full(z.shape, -math.inf).scatter(2, top[..., None], 3.0)
    policy = Policy("typical", epsilon=epsilon, alpha=alpha)
    same(typical.accept(ids, sure, policy, live=live), strict.accept(ids, sure, live))


@ORACLE
@given(sampled_blocks())
def test_thresholds_of_one_are_chain_with_one_hot_drafts(block):
    ids, p, _, _, eta, noise, live = block
    out, relaxed = run_sampled(Policy("thresholds", threshold_single=1, threshold_acc=1), block, torch.device("cpu"))
    same(out, chain.accept(ids, p, None, eta, noise, live))
    assert not relaxed.any()


@ORACLE
@given(sampled_blocks())
def test_entropy_without_its_bar_is_chain(block):
    ids, p, q, _, eta, noise, live = block
    out, relaxed = run_sampled(Policy("entropy", alpha=0, tau=1), block, torch.device("cpu"))
    same(out, chain.accept(ids, p, q, eta, noise, live))
    assert not relaxed.any()


@ORACLE
@given(blocks(), st.integers(1, 4), st.sampled_from([0.0, 0.2, 0.5]))
def test_a_looser_policy_accepts_no_less(block, n, delta):
    ids, z, live = block
    tight, loose = (Policy("relaxed-topk", top_n=n + m, delta=delta + m / 4) for m in (0, 1))
    assert (
        relaxed_topk.accept(ids, z, loose, live=live).length >= relaxed_topk.accept(ids, z, tight, live=live).length
    ).all()


def test_a_draft_is_taken_as_often_as_thresholds_say():
    """Every draft pair of a vocabulary of three, over a grid of coins: the share taken is min(p / acc, 1), or all."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    single, acc, steps = 0.55, 0.8, 20
    grid = (torch.arange(steps) + 0.5) / steps
    eta = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1).view(-1, 2)
    policy = Policy("thresholds", threshold_single=single, threshold_acc=acc)
    for x in itertools.product(range(3), repeat=2):
        ids = torch.tensor([x]).expand(len(eta), 2).contiguous()
        out = thresholds.accept(ids, p.expand(len(eta), 3, 3), policy, eta, torch.ones(len(eta), 3))
        taken = [1.0 if p[i, v] >= single else min(p[i, v].item() / acc, 1.0) for i, v in enumerate(x)]
        for i, want in enumerate([taken[0], taken[0] * taken[1]]):
            share = (out.length > i).float().mean().item()
            assert abs(share - want) <= 1 / steps, (x, i)


# ---- published cases


def test_a_ratio_of_one_half_is_a_regret_of_two_thirds_of_a_nat():
    rows = torch.tensor([[[2.0, 2.0 - 0.69, 0.0], [0.0, 0.0, 1.0]], [[2.0, 2.0 - 0.70, 0.0], [0.0, 0.0, 1.0]]])
    out = relaxed_ratio.accept(torch.tensor([[1], [1]]), rows, RATIO)
    assert out.length.tolist() == [1, 0]
    assert out.bonus.tolist() == [2, 0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_without_any_slack_exact_ties_pass_in_the_order_of_their_ids(n, on):
    z, ids = (
        torch.tensor([[[2.0, 5.0, 5.0, 5.0], [9.0, 0.0, 0.0, 0.0]]], device=on),
        torch.tensor([[1], [2], [3]]).to(on),
    )
    for module, policy in (
        (relaxed_topk, Policy("relaxed-topk", top_n=n, delta=0)),
        (relaxed_ratio, Policy("relaxed-ratio", top_n=n, ratio=1)),
    ):
        assert module.accept(ids, z.expand(3, 2, 4), policy).length.tolist() == [int(rank < n) for rank in range(3)]


def test_a_draft_without_probability_is_never_taken_for_a_coin_of_zero():
    p, none = torch.tensor([[[0.0, 1.0]] * 2]), torch.zeros(1, 1)
    ids = torch.tensor([[0]])
    off = Policy("thresholds", threshold_single=0.5, threshold_acc=0.5)
    assert thresholds.accept(ids, p, off, none, torch.ones(1, 2)).length.tolist() == [0]
    assert entropy.accept(ids, p, None, p, ENTROPY, none, torch.ones(1, 2)).length.tolist() == [0]


def test_entropy_verification_takes_a_draft_that_chain_rejects():
    """p/q = 0.8 under a coin of 0.85; the target's 1.08 nats lower it to 0.552."""
    p = torch.tensor([[[0.4, 0.35, 0.25]] * 2])
    q, eta, noise = torch.tensor([[[0.5, 0.3, 0.2]]]), torch.tensor([[0.85]]), torch.ones(1, 3)
    ids = torch.tensor([[0]])
    assert chain.accept(ids, p, q, eta, noise).length.tolist() == [0]
    relaxed = torch.zeros(1, 1, dtype=torch.bool)
    assert entropy.accept(ids, p, q, p.log(), ENTROPY, eta, noise, relaxed=relaxed).length.tolist() == [1]
    assert relaxed.all()


def test_entropy_verification_is_lossy_even_where_the_target_is_sure():
    p = torch.tensor([[[0.96, 0.04]] * 2])
    sure = torch.tensor([[[0.0, -math.inf]] * 2])
    q, eta = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0.98]])
    ids = torch.tensor([[0]])
    assert chain.accept(ids, p, q, eta, torch.ones(1, 2)).length.tolist() == [0]
    assert entropy.accept(ids, p, q, sure, ENTROPY, eta, torch.ones(1, 2)).length.tolist() == [1]


def test_a_flat_target_lets_typical_take_what_a_sharp_one_does_not():
    sharp, flat = torch.tensor([8.0, 2.0, 0.0, 0.0]), torch.tensor([1.0, 0.9, 0.9, 0.9])
    rows = torch.stack([sharp, flat])[:, None].expand(2, 2, 4)
    assert typical.accept(torch.tensor([[1], [1]]), rows, TYPICAL).length.tolist() == [0, 1]


# ---- spans, dead rows, arguments


@ORACLE
@given(st.integers(0, 3), st.integers(1, 5), st.data())
def test_a_span_opens_and_closes_draft_by_draft(B, K, data):
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=B * K, max_size=B * K)), dtype=torch.int64)
    ids = ids.view(B, K)
    open_ = torch.tensor(data.draw(st.lists(st.booleans(), min_size=B, max_size=B)), dtype=torch.bool)
    found = inside(ids, open_, START, END)
    for b, i in itertools.product(range(B), range(K)):
        assert bool(found[b, i]) == thinking_at(ids[b].tolist(), i, bool(open_[b]))


def test_rows_past_live_say_nothing(on):
    z = torch.randn(2, 4, 11, generator=torch.Generator().manual_seed(3)).to(on)
    ids, live = z[:, :3].topk(2, -1).indices[..., 1], torch.tensor([1, 0], device=on)
    poisoned = z.clone()
    poisoned[0, 2:], poisoned[1, 1:] = math.nan, math.inf
    for accept, policy in (
        (typical.accept, TYPICAL),
        (relaxed_topk.accept, TOPK),
        (relaxed_ratio.accept, RATIO),
    ):
        same(accept(ids, poisoned, policy, live=live), accept(ids, z, policy, live=live))


def test_the_kernel_and_the_oracle_agree_on_a_real_vocabulary(device, monkeypatch):
    """Where the rows leave no doubt of rounding; 9001 is more than one piece, and odd."""
    g = torch.Generator().manual_seed(5)
    z = 3 * torch.randn(2, 5, 9001, generator=g)
    ids = z[:, :4].topk(3, -1).indices.gather(2, torch.randint(0, 3, (2, 4, 1), generator=g))[..., 0]
    for module, policy in ((typical, TYPICAL), (relaxed_topk, TOPK), (relaxed_ratio, RATIO)):
        want = module.accept(ids, z, policy)
        with monkeypatch.context() as patch:
            patch.setattr("adapters.rules.rowstats.use_kernel", lambda _: True)
            got = module.accept(ids.to(device), z.to(device), policy)
        same(common.Accepted(got.length.cpu(), got.bonus.cpu()), want)


IDS, Z, P = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 3, 4), torch.full((1, 3, 4), 0.25)
THINK = Policy("relaxed-topk", top_n=2, delta=0.5, think_start=0, think_end=1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: typical.accept(IDS, Z, RATIO), "policy: expected a Policy of rule typical, found 'relaxed-ratio'"),
        (lambda: typical.accept(IDS, Z, "typical"), "policy: expected a Policy of rule typical, found 'typical'"),
        (lambda: typical.accept(IDS, Z, TYPICAL, torch.ones(2)), r"inverse_temperature: expected shape \[1\]"),
        (lambda: relaxed_topk.accept(IDS, Z[:, :2], TOPK), "target_logits: expected shape"),
        (lambda: relaxed_topk.accept(IDS, Z, THINK), r"thinking: expected \[B\] bool"),
        (lambda: relaxed_topk.accept(IDS, Z, THINK, torch.ones(1)), "thinking: expected dtype bool"),
        (lambda: relaxed_ratio.accept(IDS, Z, RATIO, relaxed=torch.ones(1, 3)), r"relaxed: expected shape \[1, 2\]"),
        (lambda: relaxed_ratio.accept(IDS, Z, RATIO, live=torch.tensor([3])), r"live: expected values in 0\.\.2"),
        (lambda: thresholds.accept(IDS, P, ENTROPY), "policy: expected a Policy of rule thresholds"),
        (lambda: entropy.accept(IDS, P, None, Z[..., :3], ENTROPY), "target_logits: expected shape"),
        (lambda: entropy.accept(IDS, P, P[:, :2] * 0, Z, ENTROPY), r"draft_probs: expected q > 0 .* \(row 0, "),
    ],
)  # fmt: skip
def test_an_argument_that_does_not_fit_is_named(call, words):
    with pytest.raises(RuleError, match=words):
        call()


def test_coins_come_from_the_generator():
    first, again, other = (
        thresholds.accept(
            IDS.expand(64, 2),
            P.expand(64, 3, 4),
            Policy("thresholds", threshold_single=1, threshold_acc=0.5),
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (1, 1, 2)
    )
    same(first, again)
    assert not torch.equal(first.length, other.length)


def test_rowstats_are_what_the_predicates_read():
    """The shared statistics of a block: the argmax has rank 0, and the bonus row no draft."""
    z = torch.tensor([[1.0, 3.0, 3.0]])
    found = rowstats_naive.measure(z.expand(4, 3), torch.tensor([0, 1, 2, -1]))
    assert found.rank.tolist() == [2, 0, 1, 3]
    assert found.ties.tolist() == [2] * 4
