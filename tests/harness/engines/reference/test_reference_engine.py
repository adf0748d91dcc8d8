"""The engine in process: what it generates, what it charges, what it counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_pair import make_draft, make_target

from adapters.policy import Policy
from adapters.rules import asd
from adapters.rules.asd import scalar
from harness.engines.reference.engine import Engine, Request
from harness.engines.reference.loading import LoadError, Options, build, check_rows
from harness.engines.reference.sampling import RequestError, Sampling, draw, target_probs

ASD = Policy("asd", budget=6.0, gate=4.0, max_mismatches=2)
FREE = Policy("asd", budget=1e9)
ZERO = Policy("asd", budget=0.0)


def make_engine(
    target, slots: int = 4, kind: str = "vanilla", default: Policy | None = None, limit: int = 200
) -> Engine:
    draft = make_draft(target, kind=kind)
    options = Options("t", "d", slots=slots, limit=limit)
    return build(target, tuned(draft, target), options, default)


def tuned(draft, target):
    """Random drafts never match; a Markov head that echoes the target's bigrams makes some of them match."""
    with torch.no_grad():
        vocabulary = target.config.vocab_size
        bigrams = target(torch.arange(vocabulary)[:, None]).logits[:, 0]
        u, s, v = torch.linalg.svd(bigrams)
        rank = min(draft.config.markov_rank, vocabulary)
        draft.markov_head.markov_w1.weight[:, :rank] = u[:, :rank] * s[:rank]
        draft.markov_head.markov_w2.weight[:, :rank] = v[:rank].T
        draft.norm.weight.mul_(0.02)  # the Markov bias decides
    return draft


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, 97, (int(torch.randint(2, 30, (1,), generator=g)),), generator=g).tolist()
        for _ in range(count)
    ]


def ask(ids: Sequence[int], n: int = 40, policy: Policy | None = None, **sampling) -> Request:
    sampling = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return Request(f"r{len(ids)}", list(ids), Sampling(max_new_tokens=n, policy=policy, **sampling))


def run(engine: Engine, ids: Sequence[Sequence[int]], *args, **kwargs) -> list[Request]:
    return list(engine.generate([ask(prompt, *args, **kwargs) for prompt in ids]))


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output for request in requests]


def check_greedy(target, request: Request, tolerance: float = 1e-3) -> None:
    """Every id is the argmax of transformers' own forward pass over what came before, up to rounding."""
    with torch.no_grad():
        logits = target(torch.tensor([request.prompt + request.output])).logits[0, len(request.prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(request.output)[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() <= tolerance


# ---- strict


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_strict_equals_transformers_generate(target, kind):
    engine = make_engine(target, kind=kind)
    ids = prompts(5)
    for request in run(engine, ids, 150):
        assert len(request.output) == 150
        check_greedy(target, request)
        theirs = target.generate(
            torch.tensor([request.prompt]), max_new_tokens=150, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(request.prompt) :]
        assert request.output == theirs.tolist()


def test_drafts_are_really_accepted(target):
    request = run(make_engine(target), prompts(1), 100)[0]
    assert sum(request.histogram[1:]) > 0
    assert request.steps < 99


@pytest.mark.parametrize("policy", [None, FREE])
def test_the_lengths_of_the_steps_lead_to_every_output_id(target, policy):
    """The prompt's own pass gives one id, each step its accepted drafts and one more; only the last may be cut."""
    for request in run(make_engine(target), prompts(4, seed=8), 50, policy):
        lengths = request.meta(7)["specaccept"]["step_lengths"]
        assert [lengths.count(n) for n in range(8)] == request.histogram
        reached = [1 + sum(n + 1 for n in lengths[:i]) for i in range(len(lengths) + 1)]
        assert reached[-2] < len(request.output) <= reached[-1]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
def test_max_new_tokens_is_exact_inside_a_block(target, n):
    engine = make_engine(target)
    whole = run(engine, prompts(1), 60, FREE)[0]
    cut = run(engine, prompts(1), n, FREE)[0]
    assert cut.output == whole.output[:n]
    assert cut.finish == {"type": "length", "length": n}


@pytest.mark.parametrize("policy", [None, FREE])
def test_eos_ends_the_output_wherever_it_stands_in_a_block(target, policy):
    engine = make_engine(target)
    whole = run(engine, prompts(1, seed=3), 40, policy)[0].output
    for stop in set(whole):
        request = run(engine, prompts(1, seed=3), 40, policy, ignore_eos=False, stop_token_ids=(stop,))[0]
        ends = [i for i, token in enumerate(whole) if token in (stop, *engine.eos)]
        assert request.output == whole[: ends[0] + 1]
        assert request.finish == {"type": "stop", "matched": whole[ends[0]]}
        ignored = run(engine, prompts(1, seed=3), 40, policy, ignore_eos=True, stop_token_ids=(stop,))[0]
        assert ignored.output == whole


def test_a_request_may_fill_its_slot_to_the_last_position(target):
    engine = make_engine(target, limit=32)
    request = run(engine, [list(range(3, 13))], 22)[0]
    assert len(request.output) == 22
    check_greedy(target, request)


def test_batch_and_single_agree(target):
    ids = prompts(9, seed=1)
    alone = [run(make_engine(target, slots=1), [prompt], 30)[0].output for prompt in ids]
    assert outputs(run(make_engine(target, slots=4), ids, 30)) == alone


def test_slots_are_reused_and_moved_without_a_trace(target):
    """Lengths that end at different steps: holes are filled by the last slot, new requests take freed ones."""
    engine = make_engine(target, slots=3)
    requests = [ask(prompt, n) for prompt, n in zip(prompts(8, seed=2), [5, 40, 11, 3, 29, 1, 17, 60], strict=True)]
    for request in engine.generate(requests):
        assert len(request.output) == request.params.max_new_tokens
        check_greedy(target, request)
    assert engine.running == []


def test_deterministic_arithmetic_does_not_depend_on_company(target):
    """Regrets, bit for bit, alone and in a batch. Prompts of at least eight ids: see the README."""
    ids = [p + list(range(3, 11)) for p in prompts(6, seed=12)]
    try:
        alone, batch = (
            build(target, tuned(make_draft(target), target), Options("t", "d", slots=n, limit=200, deterministic=True))
            for n in (1, 4)
        )
    except LoadError as error:
        pytest.skip(str(error))
    a, b = ([ask(p, 60, ASD, first_rejections=True) for p in ids] for _ in range(2))
    alone.generate(a), batch.generate(b)
    assert [(r.output, r.rejections, r.spent) for r in a] == [(r.output, r.rejections, r.spent) for r in b]


def test_a_cpu_whose_products_depend_on_the_rows_is_refused(monkeypatch):
    plain = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: plain(a, b) + (1e-6 if a.shape[0] >= 24 else 0.0))
    weight = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    check_rows([weight], slots=2, block=8)
    with pytest.raises(LoadError, match=r"deterministic: .* \[24, 16\] x \[16, 5\] .* max-running-requests 2 is"):
        check_rows([weight], slots=4, block=8)


# ---- ASD


def test_budget_zero_equals_strict_to_the_bit(target):
    """Same list, two engines: ids, every verified logit's regret and the number of steps are equal."""
    ids = prompts(11, seed=4)
    strict, zero = make_engine(target), make_engine(target)
    a = [ask(p, 35, None, first_rejections=True) for p in ids]
    b = [ask(p, 35, ZERO, first_rejections=True) for p in ids]
    strict.generate(a), zero.generate(b)
    assert outputs(a) == outputs(b)
    assert [r.rejections for r in a] == [r.rejections for r in b]
    assert [r.histogram for r in a] == [r.histogram for r in b]
    assert strict.steps == zero.steps
    assert all(r.spent == 0 and r.relaxed == 0 and r.exhausted > 0 for r in b)


def test_a_rejection_behind_the_end_of_a_request_is_not_reported(target):
    """Calibration reads these: a draft that the length limit cut off was never at stake."""
    engine, k = make_engine(target), 7
    (prompt,) = prompts(1, seed=4)
    before: list[int] = [0] * (k + 1)
    cut = 0
    for n in range(1, 40):
        (r,) = run(engine, [prompt], n=n, first_rejections=True)
        rejected = sum(r.histogram[:k])
        uncut = 1 + sum((i + 1) * count for i, count in enumerate(r.histogram))
        last = next((i for i in range(k + 1) if r.histogram[i] > before[i]), k)  # accept length of the newest step
        behind = uncut > n and last < k
        assert len(r.rejections) == rejected - behind
        cut += behind
        if uncut == n:  # the next request takes one step more
            before = r.histogram
    assert cut > 0


def test_the_same_list_twice_is_the_same_to_the_bit(target):
    engine = make_engine(target)
    ids = prompts(10, seed=5)
    first, second = ([ask(p, 30, ASD, first_rejections=True) for p in ids] for _ in range(2))
    engine.generate(first), engine.generate(second)
    assert [(r.output, r.rejections, r.spent) for r in first] == [(r.output, r.rejections, r.spent) for r in second]


def test_a_budget_relaxes_and_is_never_overdrawn(target):
    engine = make_engine(target)
    requests = run(engine, prompts(6, seed=6), 60, ASD)
    assert any(r.relaxed for r in requests)
    assert all(r.spent <= 6.0 for r in requests)
    assert sum(r.steps for r in requests) < sum(r.steps for r in run(engine, prompts(6, seed=6), 60))


def replay(target, request: Request, config: asd.AsdConfig) -> tuple[float, int]:
    """Regret and mismatches of the committed output against transformers' logits: every id the target would not have
    chosen was paid for."""
    with torch.no_grad():
        logits = target(torch.tensor([request.prompt + request.output])).logits[0, len(request.prompt) - 1 : -1]
    gap = logits.amax(-1) - logits.gather(1, torch.tensor(request.output)[:, None])[:, 0]
    paid = gap[gap > 1e-3]
    return float(paid.sum()), len(paid)


@pytest.mark.parametrize("n", [1, 5, 6, 7, 8, 9, 30, 60])
def test_the_ledger_pays_for_exactly_what_is_committed(target, n):
    """Also where max_new_tokens cuts a block: what was cut is not charged."""
    engine = make_engine(target)
    for request in run(engine, prompts(4, seed=7), n, FREE):
        regret, mismatches = replay(target, request, asd.AsdConfig.from_policy(FREE))
        assert request.spent == pytest.approx(regret, abs=1e-2)
        assert request.relaxed == mismatches


def test_requests_of_many_policies_share_a_batch_and_nothing_else(target):
    policies = [None, ASD, ZERO, FREE, Policy("asd", 3.0, math.inf, 1, "normalized"), ASD]
    ids = prompts(6, seed=8)
    alone = [run(make_engine(target, slots=1), [p], 30, policy)[0] for p, policy in zip(ids, policies, strict=True)]
    engine = make_engine(target, slots=6)
    mixed = engine.generate([ask(p, 30, policy) for p, policy in zip(ids, policies, strict=True)])
    assert outputs(mixed) == outputs(alone)
    assert [r.relaxed for r in mixed] == [r.relaxed for r in alone]
    assert [r.spent for r in mixed] == pytest.approx([r.spent for r in alone], abs=1e-3)


def test_a_reused_slot_starts_with_a_full_budget(target):
    engine = make_engine(target, slots=1)
    first = run(engine, prompts(1, seed=9), 60, ASD)[0]
    assert first.spent > 0
    again = run(engine, prompts(1, seed=9), 60, ASD)[0]
    assert (again.output, again.spent) == (first.output, first.spent)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data())
def test_scalar_walk_is_the_oracle_to_the_bit(data):
    k = data.draw(st.integers(1, 8))
    v = 5
    values = st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 2.0625, 8.0, math.inf, -math.inf, math.nan])
    logits = torch.tensor(data.draw(st.lists(st.lists(values, min_size=v, max_size=v), min_size=k + 1, max_size=k + 1)))
    drafts = torch.tensor([data.draw(st.lists(st.integers(0, v - 1), min_size=k, max_size=k))])
    config = asd.AsdConfig(
        data.draw(st.sampled_from([0.0, 0.1, 0.3, 0.6, 2.0625, 8.0])),
        data.draw(st.sampled_from([0.0, 0.1, 0.25, 2.0625, math.inf])),
        data.draw(st.sampled_from([None, 0, 1, 2])),
        data.draw(st.sampled_from(["suffix", "normalized"])),
    )
    live = data.draw(st.integers(0, k))
    start = float(torch.tensor(data.draw(st.sampled_from([0.0, 0.1, 0.3])), dtype=torch.float32))
    spent, report = torch.tensor([start]), asd.Report.empty(1, k)
    expected = asd.accept(drafts, logits[None], spent, config, torch.tensor([live]), report)
    top = logits.argmax(-1)
    z = logits[:k]
    regrets = (z.gather(1, top[:k, None]) - z.gather(1, drafts[0, :, None]))[:, 0].tolist()
    walked = scalar.walk((drafts[0] == top[:k]).tolist(), regrets, start, config, live)
    assert walked.length == expected.length.item()
    assert walked.stop == report.stop.item()
    assert walked.relaxed == report.relaxed.item()
    assert walked.charge == report.charge[0, : walked.length].tolist()
    assert scalar.settle(start, walked.charge) == spent.item()
    cut = data.draw(st.integers(0, walked.length))
    settled = asd.settle(torch.tensor([start]), report.charge, torch.tensor([cut]))
    assert scalar.settle(start, walked.charge[:cut]) == settled.item()


# ---- sampled requests


def sampled(ids, seed, policy=None, n=20, **kwargs) -> Request:
    return ask(ids, n, policy and Policy(policy), temperature=1.0, seed=seed, **kwargs)


@pytest.mark.parametrize("policy", ["chain", "block"])
def test_a_seed_fixes_a_sampled_request_in_any_company(target, policy):
    ids = prompts(5, seed=10)
    alone = [make_engine(target, slots=1).generate([sampled(p, i, policy)])[0].output for i, p in enumerate(ids)]
    engine = make_engine(target, slots=3)
    company = [sampled(p, i, policy) for i, p in enumerate(ids)]
    engine.generate([ask(prompts(1)[0], 9), *company])
    assert outputs(company) == alone
    assert len({tuple(engine.generate([sampled(ids[0], s, policy)])[0].output) for s in range(4)}) > 1


@pytest.mark.parametrize("policy", ["chain", "block"])
@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.7}])
def test_sampled_tokens_have_the_targets_distribution(policy, limits):
    """First three tokens of a vocabulary of 5: every frequency within five standard deviations of the exact law."""
    target = make_target(seed=3, vocab=5)
    engine = make_engine(target, slots=64)
    count, prompt = 3000, [3, 4, 3]
    requests = [sampled(prompt, seed, policy, n=3, **limits) for seed in range(count)]
    engine.generate(requests)
    params = requests[0].params
    with torch.no_grad():
        pairs = torch.tensor([[*prompt, a, b] for a in range(5) for b in range(5)])
        probs = target_probs(target(pairs).logits[:, 2:], [params] * 25)  # rows of the three next tokens
    law = {}
    for i, (a, b) in enumerate((a, b) for a in range(5) for b in range(5)):
        for c in range(5):
            law[a, b, c] = float(probs[i, 0, a] * probs[i, 1, b] * probs[i, 2, c])
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    for sequence, p in law.items():
        seen = sum(tuple(r.output) == sequence for r in requests) / count
        assert abs(seen - p) <= 5 * math.sqrt(max(p * (1 - p), 1e-6) / count) + 1e-9, sequence
    assert sum(sum(r.histogram[1:]) for r in requests) > 0


def test_target_probs_by_hand():
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()[None, None]
    at = {"temperature": 1.0}
    for params, expected in (
        (Sampling(**at, top_k=2), [5 / 7, 2 / 7, 0, 0]),
        (Sampling(**at, top_p=0.45), [1, 0, 0, 0]),
        (Sampling(**at, top_p=1e-300), [1, 0, 0, 0]),
        (Sampling(**at, top_p=0.6), [5 / 7, 2 / 7, 0, 0]),
        (Sampling(**at, top_k=3, top_p=0.8), [5 / 9, 2 / 9, 2 / 9, 0]),
        (Sampling(temperature=0.5), [25 / 34, 4 / 34, 4 / 34, 1 / 34]),
    ):
        torch.testing.assert_close(target_probs(logits, [params])[0, 0], torch.tensor(expected, dtype=torch.float32))


def test_draw_never_takes_what_has_no_mass():
    probs = torch.tensor([[0.0, 1.0, 0.0]]).expand(1000, -1)
    noise = torch.empty(1000, 3).exponential_(generator=torch.Generator().manual_seed(0))
    noise[:, 0] = 0.0
    assert draw(probs, noise).unique().tolist() == [1]


# ---- counters, fallbacks


def test_counters_add_up(target):
    engine = make_engine(target, slots=3)
    groups = {
        key: engine.generate([ask(p, 25, policy) for p in prompts(4, seed=i)])
        for i, (key, policy) in enumerate([("strict", None), (ASD.key, ASD), (FREE.key, FREE)])
    }
    groups["block"] = engine.generate([sampled(p, 1, "block") for p in prompts(4)])
    counters = engine.telemetry.counters
    for key, requests in groups.items():
        c = counters[key]
        assert c.requests == len(requests)
        assert c.blocks == sum(r.steps for r in requests)
        assert c.drafts_verified == 7 * c.blocks
        assert c.committed_tokens == sum(len(r.output) for r in requests)
        assert c.relaxed == sum(r.relaxed for r in requests)
        assert c.regret_charged == pytest.approx(sum(r.spent for r in requests))
        assert c.budget_exhausted == sum(r.exhausted for r in requests)
        # Every output token is the prefill's, a draft, or the bonus of a block (none where a draft ended the request).
        bonuses = c.committed_tokens - c.requests - c.strict_accepted - c.relaxed
        assert c.blocks - c.requests <= bonuses <= c.blocks
        correct = sum(sum(i * n for i, n in enumerate(r.histogram)) for r in requests)
        assert c.strict_accepted + c.relaxed <= correct <= c.drafts_verified
        for request in requests:
            meta = request.meta(7)
            assert meta["spec_verify_ct"] == sum(meta["spec_correct_drafts_histogram"])
            assert meta["spec_accept_length"] == meta["completion_tokens"] / meta["spec_verify_ct"]


def test_a_rule_that_does_not_fit_falls_back_and_is_counted(target):
    engine = make_engine(target, default=ASD)
    greedy = engine.generate([ask(prompts(1)[0], 10, Policy("block"))])[0]
    chain = engine.generate([sampled(prompts(1)[0], 0)])[0]
    default = engine.generate([ask(prompts(1)[0], 10)])[0]
    assert (greedy.policy.key, chain.policy.key, default.policy) == ("strict", "chain", ASD)
    counters = engine.telemetry.counters
    assert counters["block"].fallbacks == {"greedy request": 1}
    assert counters[ASD.key].fallbacks == {"sampled request": 1}
    # A request counts under the policy it asked for, its blocks under the rule that served it.
    assert {key: (c.requests, c.blocks) for key, c in counters.items()} == {
        "block": (1, 0),
        "strict": (0, greedy.steps),
        "chain": (0, chain.steps),
        ASD.key: (2, default.steps),
    }


def test_an_aborted_request_leaves_the_others_alone(target):
    engine = make_engine(target, slots=2)
    requests = [ask(p, 30) for p in prompts(3, seed=11)]
    engine.submit(requests)
    engine.step()
    engine.abort([requests[0], requests[2]])
    while engine.waiting or engine.running:
        engine.step()
    assert [r.finish["type"] for r in requests] == ["abort", "length", "abort"]
    check_greedy(target, requests[1])


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop_token_ids": [97]}, "stop_token_ids"),
        ({"sampling_seed": -1}, "sampling_seed"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"custom_params": []}, "custom_params"),
        ({"custom_params": {"specaccept": {"rule": "asd", "budget": -1}}}, "policy.budget"),
        ({"custom_params": {"specaccept": {"rule": "asd", "budgets": 1}}}, "budgets"),
        ({"custom_params": {"specaccept": "strict"}}, "policy"),
        ({"custom_params": {"specaccept_first_rejections": 1}}, "first_rejections"),
        ([], "sampling_params"),
    ],
)
def test_a_bad_parameter_is_an_error_that_names_it(raw, field):
    with pytest.raises(RequestError, match=field):
        Sampling.from_json(raw, 97)
