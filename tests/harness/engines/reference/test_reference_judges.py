"""The engine under the rules that judge every draft by itself: what it commits, counts and refuses."""

from __future__ import annotations

import math

import pytest
import torch
from reference_pair import make_target
from test_reference_engine import ask, make_engine, outputs, prompts, run

from adapters.policy import Policy
from harness.engines.reference.engine import Request
from harness.engines.reference.loading import LoadError
from harness.engines.reference.sampling import RequestError, Sampling

K = 7
TOPK = Policy("relaxed-topk", top_n=10, delta=0.6)
RATIO = Policy("relaxed-ratio", top_n=3, ratio=0.2)
TYPICAL = Policy("typical", epsilon=0.09, alpha=0.3)
THRESHOLDS = Policy("thresholds", threshold_single=0.3, threshold_acc=0.5)
ENTROPY = Policy("entropy", alpha=0.4, tau=0.95)
GREEDY, SAMPLED = (TOPK, RATIO), (TYPICAL, THRESHOLDS, ENTROPY)
START, END = 96, 95


def arguments(policy: Policy, seed: int = 0) -> dict:
    return {"temperature": 0.0} if policy in GREEDY or policy.rule == "strict" else {"temperature": 1.0, "seed": seed}


def committed(request: Request) -> list[list[int]]:
    """Output positions of the drafts that each step committed; the token behind them is the step's bonus."""
    at, steps = 1, []
    for length in request.step_lengths:
        steps.append([i for i in range(at, at + length) if i < len(request.output)])
        at += length + 1
    return steps


def rows(target, request: Request) -> torch.Tensor:
    """transformers' own logits of every output token, float64."""
    with torch.no_grad():
        logits = target(torch.tensor([request.prompt + request.output])).logits
    return logits[0, len(request.prompt) - 1 : -1].double()


def passes(policy: Policy, z: torch.Tensor, x: int, slack: float = 1e-3) -> bool:
    """Whether a draft may pass, up to rounding."""
    p = z.softmax(-1)
    rank, best = int((z > z[x] + slack).sum()), float(p.max())
    if policy.rule == "relaxed-topk":
        return rank < policy.top_n and p[x] >= best - policy.delta - slack
    if policy.rule == "relaxed-ratio":
        return rank < policy.top_n and p[x] >= policy.ratio * best - slack
    entropy = -float((p * p.log()).sum())
    return p[x] > min(policy.epsilon, policy.alpha * math.exp(-entropy)) - slack


@pytest.mark.parametrize("policy", [*GREEDY, TYPICAL], ids=lambda p: p.key)
def test_every_committed_draft_passes_and_every_bonus_is_the_argmax(target, policy):
    requests = run(make_engine(target), prompts(5, seed=21), 60, policy, **arguments(policy))
    for request in requests:
        z, drafts = rows(target, request), committed(request)
        differing = 0
        for i in (i for step in drafts for i in step):
            assert passes(policy, z[i], request.output[i])
            differing += request.output[i] != int(z[i].argmax())
        assert request.relaxed == differing
        ends = {1 + sum(n + 1 for n in request.step_lengths[: s + 1]) - 1 for s in range(request.steps)}
        for i in ends & set(range(len(request.output))):
            assert z[i].max() - z[i, request.output[i]] <= 1e-3
    assert sum(r.relaxed for r in requests) > 0
    assert all(r.spent == 0 and r.exhausted == 0 for r in requests)


@pytest.mark.parametrize("policy", GREEDY, ids=lambda p: p.key)
def test_a_relaxed_rule_takes_fewer_steps_than_strict_and_other_ids(target, policy):
    engine, ids = make_engine(target), prompts(6, seed=22)
    strict, loose = run(engine, ids, 60), run(engine, ids, 60, policy)
    assert sum(r.steps for r in loose) < sum(r.steps for r in strict)
    for a, b in zip(strict, loose, strict=True):
        assert (a.output != b.output) == (b.relaxed > 0)


def test_a_top_of_one_is_strict(target):
    ids = prompts(6, seed=23)
    strict = run(make_engine(target), ids, 40)
    for policy in (Policy("relaxed-topk", top_n=1, delta=1), Policy("relaxed-ratio", top_n=1, ratio=0.01)):
        same = run(make_engine(target), ids, 40, policy)
        assert outputs(same) == outputs(strict)
        assert [r.step_lengths for r in same] == [r.step_lengths for r in strict]
        assert all(r.relaxed == 0 for r in same)


def test_entropy_without_its_bar_is_chain(target):
    engine, ids = make_engine(target, slots=8), prompts(8, seed=24)
    off = Policy("entropy", alpha=0, tau=1)
    pairs = [engine.generate([ask(p, 40, policy, temperature=1.0, seed=i) for i, p in enumerate(ids)])
             for policy in (Policy("chain"), off)]  # fmt: skip
    assert outputs(pairs[0]) == outputs(pairs[1])
    assert all(r.relaxed == 0 for r in pairs[1])


EXACT = Policy("thresholds", threshold_single=1, threshold_acc=1)


@pytest.mark.parametrize(
    ("policy", "lossless"), [(TYPICAL, Policy("chain")), (ENTROPY, Policy("chain")), (THRESHOLDS, EXACT)], ids=str
)
def test_a_loose_sampled_rule_accepts_more_than_its_lossless_form(target, policy, lossless):
    engine, ids = make_engine(target, slots=8), prompts(8, seed=25)
    exact, loose = ([ask(p, 60, each, temperature=1.0, seed=i) for i, p in enumerate(ids)]
                    for each in (lossless, policy))  # fmt: skip
    engine.generate(exact), engine.generate(loose)
    assert sum(r.steps for r in loose) < sum(r.steps for r in exact)
    assert sum(r.relaxed for r in loose) > 0
    assert sum(r.relaxed for r in exact) == 0


def test_thresholds_of_one_keep_the_targets_law_though_the_drafts_are_sampled():
    """First two tokens of a vocabulary of 5: every frequency within five standard deviations of the exact law."""
    target, prompt, count = make_target(seed=3, vocab=5), [3, 4, 3], 2000
    engine = make_engine(target, slots=64)
    requests = [ask(prompt, 3, EXACT, temperature=1.0, seed=seed) for seed in range(count)]
    engine.generate(requests)
    with torch.no_grad():
        p = target(torch.tensor([[*prompt, a] for a in range(5)])).logits[:, 2:].softmax(-1)
    for a in range(5):
        for b in range(5):
            law = float(p[a, 0, a] * p[a, 1, b])
            seen = sum(tuple(r.output[:2]) == (a, b) for r in requests) / count
            assert abs(seen - law) <= 5 * math.sqrt(max(law * (1 - law), 1e-6) / count) + 1e-9, (a, b)
    assert sum(sum(r.histogram[1:]) for r in requests) > 0


@pytest.mark.parametrize("policy", SAMPLED, ids=lambda p: p.key)
def test_a_seed_fixes_a_request_in_any_company(target, policy):
    ids = prompts(4, seed=26)
    alone = [run(make_engine(target, slots=1), [p], 20, policy, **arguments(policy, i))[0] for i, p in enumerate(ids)]
    company = [ask(p, 20, policy, **arguments(policy, i)) for i, p in enumerate(ids)]
    make_engine(target, slots=3).generate([ask(prompts(1)[0], 9), ask(prompts(1)[0], 15, TOPK), *company])
    assert outputs(company) == outputs(alone)


def test_requests_of_all_rules_share_a_batch_and_nothing_else(target):
    asd = Policy("asd", budget=6.0, gate=4.0, max_mismatches=2)
    policies = [Policy("strict"), TOPK, TYPICAL, asd, RATIO, THRESHOLDS, ENTROPY, Policy("block")]
    ids = prompts(len(policies), seed=27)

    def requests() -> list[Request]:
        jobs = zip(ids, policies, strict=True)
        return [ask(p, 30, each, **(arguments(each) if each != asd else {})) for p, each in jobs]

    alone = [make_engine(target, slots=1).generate([request])[0] for request in requests()]
    engine = make_engine(target, slots=len(policies))
    mixed = engine.generate(requests())
    assert outputs(mixed) == outputs(alone)
    assert [r.relaxed for r in mixed] == [r.relaxed for r in alone]
    assert [r.step_lengths for r in mixed] == [r.step_lengths for r in alone]


@pytest.mark.parametrize("n", [1, 2, 5, 7, 8, 25])
@pytest.mark.parametrize("policy", [*GREEDY, *SAMPLED], ids=lambda p: p.key)
def test_counters_add_up_and_what_an_end_cuts_is_not_counted(target, policy, n):
    engine = make_engine(target, slots=3)
    requests = run(engine, prompts(4, seed=28), n, policy, **arguments(policy))
    c = engine.telemetry.counters[policy.key]
    assert (c.requests, c.fallbacks) == (4, {})
    assert c.blocks == sum(r.steps for r in requests)
    assert c.drafts_verified == K * c.blocks
    assert c.committed_tokens == sum(len(r.output) for r in requests) == 4 * n
    assert c.relaxed == sum(r.relaxed for r in requests)
    assert c.strict_accepted + c.relaxed == sum(len(step) for r in requests for step in committed(r))
    assert (c.regret_charged, c.budget_exhausted) == (0, 0)


# ---- thinking


def thinking(policy: Policy, start: int = START, end: int = END) -> Policy:
    fields = {name: getattr(policy, name) for name in ("rule", "top_n", "delta", "ratio")}
    return Policy(**fields, think_start=start, think_end=end)


@pytest.mark.parametrize("policy", GREEDY, ids=lambda p: p.key)
def test_the_span_is_that_of_prompt_and_output(target, policy):
    """Not opened: strict. Opened in the prompt: the rule everywhere. Opened and closed there: strict again."""
    own, bare = thinking(policy), [[x for x in p if x not in (START, END)] for p in prompts(3, seed=29)]
    for marks, same in (([], None), ([START], policy), ([START, END], None), ([END, START], policy)):
        ids = [[*p, *marks, 5] for p in bare]
        spanned = run(make_engine(target), ids, 30, own)
        wanted = run(make_engine(target), ids, 30, same)
        told = [r for r in spanned if not {START, END} & set(r.output)]
        assert told
        for a, b in zip(spanned, wanted, strict=True):
            if a in told:
                assert (a.output, a.relaxed) == (b.output, b.relaxed)


def test_a_span_that_ends_in_the_output_ends_the_relaxation(target):
    """Every id that the loose rule commits is tried as the end of thinking."""
    (prompt,) = prompts(1, seed=30)
    prompt = [*(x for x in prompt if x != START), START, 5]
    loose = run(make_engine(target), [prompt], 40, TOPK)[0]
    assert loose.relaxed > 0
    ended = 0
    for end in set(loose.output) - {START}:
        request = run(make_engine(target), [prompt], 40, thinking(TOPK, end=end))[0]
        closes = request.output.index(end)
        assert request.output[: closes + 1] == loose.output[: closes + 1]
        if START in request.output:
            continue
        z = rows(target, request)
        for i in (i for step in committed(request) for i in step if i > closes):
            assert z[i].max() - z[i, request.output[i]] <= 1e-3
        ended += request.output != loose.output
    assert ended > 0


# ---- refusals


def test_a_rule_for_the_other_kind_of_request_falls_back_and_is_counted(target):
    engine = make_engine(target)
    greedy = run(engine, prompts(1), 10, TYPICAL)[0]
    drawn = run(engine, prompts(1), 10, TOPK, temperature=1.0, seed=1)[0]
    assert (greedy.policy.key, drawn.policy.key) == ("strict", "chain")
    assert engine.telemetry.counters[TYPICAL.key].fallbacks == {"greedy request": 1}
    assert engine.telemetry.counters[TOPK.key].fallbacks == {"sampled request": 1}


def body(policy: Policy) -> dict:
    return {"custom_params": {"specaccept": policy.to_json()}}


def test_thinking_ids_are_tokens(target):
    assert Sampling.from_json(body(thinking(TOPK)), 97).policy == thinking(TOPK)
    with pytest.raises(RequestError, match=r"policy\.think_end: expected an id below 96, found 96"):
        Sampling.from_json(body(thinking(TOPK, 5, 96)), 96)
    with pytest.raises(LoadError, match=r"SPECACCEPT_POLICY: policy\.think_start: expected an id below 97, found 97"):
        make_engine(target, default=thinking(TOPK, 97, 5))


@pytest.mark.parametrize("policy", [*GREEDY, *SAMPLED], ids=lambda p: p.key)
def test_a_servers_default_may_be_any_rule(target, policy):
    engine = make_engine(target, default=policy)
    request = run(engine, prompts(1, seed=31), 20, None, **arguments(policy))[0]
    assert request.meta(K)["specaccept"]["policy"] == policy.key
    assert engine.telemetry.snapshot()["default_policy"] == policy.to_json()
