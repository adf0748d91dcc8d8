"""Replay from scalars against the rules on full rows, and expectations against enumeration and coins."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.capture import recorder as writer
from adapters.capture import stats
from adapters.capture.layout import DRAWN, SAMPLED
from adapters.policy import Policy
from adapters.rules import asd, block, chain, entropy, relaxed_ratio, relaxed_topk, strict, thresholds, typical
from harness.replay import rules
from harness.replay.estimate import Named, compare
from harness.replay.table import NO_CUT, Table, concatenated

K, V = 5, 23
START, END = 3, 4
SPAN = {"think_start": START, "think_end": END}


def full(seed: int, n: int, T: float = 1.0, one_hot: bool = False, ties: bool = True):
    """Logits, drafts, p, q, coins, live of n blocks; drafts near the argmax, or drawn from q."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, K + 1, V, generator=g) * 2
    z = (z * 4).round() / 4 if ties else z
    p = torch.softmax(z / T, -1)
    q = torch.softmax(z[:, :K] / T + 0.8 * torch.randn(n, K, V, generator=g), -1)
    if one_hot:
        rank = (torch.rand(n, K, generator=g) ** 3 * 5).long()
        drafts = z[:, :K].argsort(dim=-1, descending=True, stable=True).gather(2, rank[..., None])[..., 0]
    else:
        drafts = torch.multinomial(q.view(-1, V), 1, generator=g).view(n, K)
    coins = torch.rand(n, K, generator=g)
    live = torch.randint(0, K + 1, (n,), generator=g)
    return SimpleNamespace(z=z, p=p, q=None if one_hot else q, drafts=drafts, coins=coins, live=live, T=T)


def table_of(f, requests: list[int] | None = None, prompts=None, length=None) -> Table:
    """The columns a recorder makes of these rows. requests: blocks of each; default: one request per block."""
    n = len(f.drafts)
    counts = np.array(requests or [1] * n)
    inverse = None if f.T == 1 else torch.full((n,), 1 / f.T)
    columns = stats.of_logits(f.z, f.drafts, f.z.argmax(-1), inverse)
    host = {name: [0] * n for name in ("request", "step", "position", "bonus")}
    host |= {"flags": [0 if f.q is None else DRAWN | SAMPLED] * n, "length": [0] * n if length is None else length}
    writer._finish(columns, host, torch.full((n,), f.T), SimpleNamespace(drafts=K))
    columns |= {"live": f.live.int(), "anchor": torch.zeros(n, dtype=torch.int32)}
    if f.q is not None:
        writer._merge(columns, stats.of_probs(f.drafts, f.p, f.q) | {"coin": f.coins}, list(range(n)))
    first = np.r_[0, np.cumsum(counts)[:-1]]
    arrays = {name: tensor.numpy() for name, tensor in columns.items()}
    prompts = prompts or [[]] * len(counts)
    return Table(arrays, prompts, first, counts, np.full(n, NO_CUT), [""] * len(counts))


def lengths(policy: Policy, table: Table, coins=None) -> list[int]:
    return rules.survival(policy, table, coins).sum(1).tolist()


SEEDS = st.integers(0, 2**31)
BRUTE = settings(derandomize=True, deadline=None, max_examples=20)


@BRUTE
@given(SEEDS, st.booleans())
def test_greedy_rules_decide_as_on_full_rows(seed, one_hot):
    f = full(seed, 64, one_hot=one_hot)
    table = table_of(f)
    assert lengths(Policy("strict"), table) == strict.accept(f.drafts, f.z, f.live).length.tolist()
    for n, delta in ((1, 0.0), (3, 0.1), (10, 0.6)):
        policy = Policy("relaxed-topk", top_n=n, delta=delta)
        assert lengths(policy, table) == relaxed_topk.accept(f.drafts, f.z, policy, live=f.live).length.tolist()
    for n, ratio in ((1, 1.0), (3, 0.5), (8, 0.1)):
        policy = Policy("relaxed-ratio", top_n=n, ratio=ratio)
        assert lengths(policy, table) == relaxed_ratio.accept(f.drafts, f.z, policy, live=f.live).length.tolist()


@BRUTE
@given(SEEDS)
def test_thinking_spans_are_those_of_the_rule(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 6, 12).tolist()
    f = full(seed, sum(counts), one_hot=True)
    mark = torch.from_numpy(rng.random((sum(counts), K)) < 0.15)
    f.drafts = torch.where(mark, torch.from_numpy(rng.integers(START, END + 1, (sum(counts), K))), f.drafts)
    prompts = [[[7], [START], [START, 9, END], []][n % 4] for n in range(len(counts))]
    own = strict.accept(f.drafts, f.z, f.live)
    table = table_of(f, counts, prompts, own.length.tolist())
    table.columns["bonus"] = own.bonus.numpy()
    thinking, at = [], 0
    for prompt, count in zip(prompts, counts, strict=True):  # in plain Python, token by token
        state = False
        for token in [*prompt, 0]:
            state = {START: True, END: False}.get(token, state)
        for b in range(at, at + count):
            thinking.append(state)
            for token in [*f.drafts[b, : own.length[b]].tolist(), int(own.bonus[b])]:
                state = {START: True, END: False}.get(token, state)
        at += count
    thinking = torch.tensor(thinking)
    assert table.inside(START, END)[:, 0].tolist() == thinking.tolist()
    for policy, rule in (
        (Policy("relaxed-topk", top_n=10, delta=0.6, **SPAN), relaxed_topk),
        (Policy("relaxed-ratio", top_n=3, ratio=0.3, **SPAN), relaxed_ratio),
    ):
        wanted = rule.accept(f.drafts, f.z, policy, thinking, f.live).length.tolist()
        assert lengths(policy, table) == wanted


@BRUTE
@given(SEEDS, st.sampled_from([0.0, 0.5, 2.0625, 8.0]), st.sampled_from([None, 0, 1, 2]), st.booleans())
def test_asd_walks_every_request_as_the_oracle_does(seed, budget, cap, normalized):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 7, 9).tolist()
    f = full(seed, sum(counts), one_hot=True)
    f.drafts[rng.random(f.drafts.shape) < 0.03] = V  # no token
    suffix = "normalized" if normalized else "suffix"
    policy = Policy("asd", budget, float(rng.choice([0.25, 2.0625, np.inf])), cap, suffix)
    table = table_of(f, counts)
    found, at = lengths(policy, table), 0
    for count in counts:
        spent = torch.zeros(1)
        for b in range(at, at + count):
            one = slice(b, b + 1)
            config = asd.AsdConfig.from_policy(policy)
            accepted = asd.accept(f.drafts[one], f.z[one], spent, config, f.live[one])
            assert found[b] == int(accepted.length)
        at += count


@BRUTE
@given(SEEDS, st.sampled_from([1.0, 0.6, 1.5]), st.booleans())
def test_sampled_rules_decide_as_on_full_rows_with_their_coins(seed, T, one_hot):
    f = full(seed, 64, T, one_hot, ties=False)
    table, coins = table_of(f), f.coins.numpy().astype(np.float64)
    noise = torch.ones(64, V)
    if one_hot:  # the engine's own scalars hold p at T there too
        np.testing.assert_allclose(np.exp(table.log_p), f.p[:, :K].gather(2, f.drafts[..., None])[..., 0], rtol=1e-4)
    for rule in (chain, block):
        name = rule.__name__.rsplit(".", 1)[-1]
        wanted = rule.accept(f.drafts, f.p, f.q, f.coins, noise, f.live).length.tolist()
        assert lengths(Policy(name), table, coins) == wanted
    policy = Policy("typical", epsilon=0.2, alpha=0.4)
    inverse = torch.full((64,), 1 / T)
    assert lengths(policy, table) == typical.accept(f.drafts, f.z, policy, inverse, f.live).length.tolist()
    policy = Policy("thresholds", threshold_single=0.3, threshold_acc=0.6)
    wanted = thresholds.accept(f.drafts, f.p, policy, f.coins, noise, f.live).length.tolist()
    assert lengths(policy, table, coins) == wanted
    policy = Policy("entropy", alpha=0.4, tau=0.95)
    wanted = entropy.accept(f.drafts, f.p, f.q, f.z, policy, f.coins, noise, f.live).length.tolist()
    assert lengths(policy, table, coins) == wanted


@pytest.mark.parametrize(
    "policy",
    [
        Policy("chain"),
        Policy("block"),
        Policy("thresholds", threshold_single=0.4, threshold_acc=0.7),
        Policy("entropy", alpha=0.4, tau=0.95),
    ],
    ids=lambda policy: policy.rule,
)
@pytest.mark.parametrize("one_hot", [False, True], ids=["drawn", "one-hot"])
def test_expectations_are_what_coins_converge_to(policy, one_hot):
    f = full(5, 24, one_hot=one_hot, ties=False)
    table, rng, times = table_of(f), np.random.default_rng(0), 4000
    expected = rules.survival(policy, table)
    counts = sum(rules.survival(policy, table, rng.random((24, K))) for _ in range(times))
    deviation = np.sqrt(np.maximum(expected * (1 - expected), 1e-12) / times)
    assert (np.abs(counts / times - expected) <= 5 * deviation + 1e-6).all()
    assert not expected[~table.verified].any()


@pytest.mark.parametrize(
    ("drafts", "token", "whole"), [(2, "10/9", "11/9"), (3, "38/27", "5/3"), (5, "422/243", "64/27")]
)
def test_the_toy_pair_has_the_papers_expectations(drafts, token, whole):
    """p = (1/3, 2/3), q = (2/3, 1/3): every draft sequence, weighed by its chance under q."""
    p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
    x = torch.tensor(list(product((0, 1), repeat=drafts)))
    n = len(x)
    weight = q[x].prod(1).numpy().astype(np.float64)
    rows = stats.of_probs(x, p.expand(n, drafts + 1, 2), q.expand(n, drafts, 2))
    columns = {name: tensor.numpy() for name, tensor in rows.items()}
    columns |= {"live": np.full(n, drafts), "flags": np.full(n, DRAWN), "draft": x.numpy()}
    one = np.arange(n)
    table = Table(columns, [[]] * n, one, np.ones(n, int), np.full(n, NO_CUT), [""] * n)
    for policy, wanted in ((Policy("chain"), token), (Policy("block"), whole)):
        expected = (weight[:, None] * rules.survival(policy, table)).sum()
        assert expected == pytest.approx(float(Fraction(wanted)), abs=1e-6)


def test_block_is_chain_where_q_is_one_hot():
    table = table_of(full(1, 200, one_hot=True))
    chained, whole = (rules.survival(Policy(rule), table) for rule in ("chain", "block"))
    np.testing.assert_allclose(chained, whole, atol=1e-6)


def test_a_block_that_ended_its_request_counts_what_was_kept():
    f = full(2, 3, one_hot=True)
    f.live[:] = K
    f.drafts = f.z[:, :K].argmax(-1)
    table = table_of(f)
    table.cut[:] = [NO_CUT, K, 1]
    assert rules.tokens(rules.survival(Policy("strict"), table), table).tolist() == [K + 1, K, 1]


def test_what_the_capture_does_not_have_is_unsupported_not_a_number():
    """p at temperature 1 behind one at 0.6, and the entropy of logits that an engine had divided."""
    table = table_of(full(3, 8, T=0.6))
    for T, policy in (
        (0.6, Policy("relaxed-topk", top_n=3, delta=0.6)),
        (1.0, Policy("relaxed-topk", top_n=3, delta=1)),
    ):
        table.columns["temperature"][:] = T
        if T == 1:
            assert rules.survival(policy, table).shape == (8, K)
            continue
        with pytest.raises(rules.Unsupported, match="temperature 1"):
            rules.survival(policy, table)
    policy = Policy("entropy", alpha=0.4, tau=0.95)
    table.columns["entropy_raw"][:] = np.nan
    assert table.live.any()
    with pytest.raises(rules.Unsupported, match="entropy"):
        rules.survival(policy, table)


def test_a_prompt_asked_twice_is_one_unit_of_the_interval():
    """An A/A arm doubles every request: no interval may be narrower for it."""
    f = full(11, 40, one_hot=True)
    prompts = [[n // 4 + 1, 9] for n in range(0, 40, 4)]
    once = table_of(f, [4] * 10, prompts)
    twice = concatenated([once, once])
    policies = [Named("strict", Policy("strict")), Named("typical", Policy("typical", epsilon=0.2, alpha=0.4))]
    first, second = (compare(policies, table, "strict", None)[1] for table in (once, twice))
    for name in ("tokens_per_step", "change"):
        assert getattr(first, name)["all"] == pytest.approx(getattr(second, name)["all"])
        assert getattr(first, name)["all"]["n"] == 10
    unknown = compare(policies, table_of(f, [4] * 10), "strict", None)[1].tokens_per_step["all"]
    assert unknown == first.tokens_per_step["all"]  # requests whose prompt is not known stand for themselves


def test_an_engines_own_kernel_is_unsupported():
    with pytest.raises(rules.Unsupported, match="block-engine"):
        rules.survival(Policy("block-engine"), table_of(full(0, 2)))
