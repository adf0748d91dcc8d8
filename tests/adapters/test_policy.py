import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.policy import (
    CUSTOM_PARAM,
    ENVIRONMENT,
    FIELDS,
    GREEDY_RULES,
    REFERENCE_RULES,
    RULES,
    SUFFIX_VALUES,
    Policy,
    PolicyError,
)

asd = st.builds(
    Policy,
    rule=st.just("asd"),
    budget=st.floats(0, 1e6),
    gate=st.one_of(st.just(math.inf), st.floats(0, 1e6)),
    max_mismatches=st.one_of(st.none(), st.integers(0, 15)),
    suffix_value=st.sampled_from(SUFFIX_VALUES),
)
plain = [rule for rule in RULES if rule != "asd" and rule not in FIELDS]
think = st.sampled_from([{}, {"think_start": 5, "think_end": 6}, {"think_start": 0, "think_end": 2**31 - 1}])
shares = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 1]), st.floats(0, 1))
above = st.floats(0, 1, exclude_min=True)
top = st.integers(1, 64)
further = st.one_of(
    st.builds(lambda e, a: Policy("typical", epsilon=e, alpha=a), shares, st.floats(0, 1e6)),
    st.builds(lambda n, d, t: Policy("relaxed-topk", top_n=n, delta=d, **t), top, shares, think),
    st.builds(lambda n, r, t: Policy("relaxed-ratio", top_n=n, ratio=r, **t), top, above, think),
    st.builds(lambda s, a: Policy("thresholds", threshold_single=s, threshold_acc=a), shares, shares),
    st.builds(lambda a, t: Policy("entropy", alpha=a, tau=t), st.floats(0, 1e6), above),
)
policies = st.one_of(asd, further, st.sampled_from(plain).map(lambda rule: Policy(rule=rule)))
TYPICAL = {"rule": "typical", "epsilon": 0.09, "alpha": 0.3}
TOPK = {"rule": "relaxed-topk", "top_n": 10, "delta": 0.6}


@given(policies)
@settings(derandomize=True, deadline=None)
def test_json_round_trip_is_exact_and_standard(policy):
    text = json.dumps(policy.to_json(), allow_nan=False)
    assert Policy.from_json(text) == policy
    assert Policy.from_json(json.loads(text)).key == policy.key


@given(policies, policies)
@settings(derandomize=True, deadline=None)
def test_two_policies_share_a_key_only_when_they_are_the_same(one, other):
    assert (one.key == other.key) == (one == other)


@pytest.mark.parametrize(
    ("value", "field", "found"),
    [
        ({"rule": "asd", "budget": -1}, "policy.budget", "-1"),
        ({"rule": "asd", "budget": math.nan}, "policy.budget", "nan"),
        ({"rule": "asd", "budget": "2"}, "policy.budget", "'2'"),
        ({"rule": "asd", "budget": math.inf}, "policy.budget", "inf"),
        ({"rule": "asd", "budget": 10**400}, "policy.budget", "1000"),
        ({"rule": "asd", "gate": math.nan}, "policy.gate", "nan"),
        ({"rule": "asd", "budget": True}, "policy.budget", "True"),
        ({"rule": "asd", "gate": -0.5}, "policy.gate", "-0.5"),
        ({"rule": "asd", "max_mismatches": 1.0}, "policy.max_mismatches", "1.0"),
        ({"rule": "asd", "max_mismatches": -1}, "policy.max_mismatches", "-1"),
        ({"rule": "asd", "suffix_value": "K"}, "policy.suffix_value", "'K'"),
        ({"rule": "asdf"}, "policy.rule", "'asdf'"),
        ({}, "policy.rule", "nothing"),
        ({"rule": "strict", "budget": 1}, "belong to asd", "'strict'"),
        ({"rule": "asd", "buget": 1}, "unknown field", "'buget'"),
        ({"rule": "typical", "epsilon": 0.09}, "policy.alpha: expected a number from 0", "for typical, found nothing"),
        (TYPICAL | {"epsilon": 1.5}, "policy.epsilon: expected a number from 0 to 1", "1.5"),
        (TYPICAL | {"alpha": math.inf}, "policy.alpha", "inf"),
        (TYPICAL | {"alpha": math.nan}, "policy.alpha", "nan"),
        (TYPICAL | {"delta": 0.5}, "policy.delta: belongs to relaxed-topk", "0.5 for typical"),
        ({"rule": "strict", "alpha": 0.3}, "policy.alpha: belongs to typical or entropy", "0.3 for strict"),
        ({"rule": "asd", "budget": 1, "top_n": 3}, "policy.top_n: belongs to relaxed-topk or relaxed-ratio", "3 for"),
        (TYPICAL | {"budget": 1}, "belong to asd", "'typical'"),
        (TOPK | {"top_n": 0}, "policy.top_n: expected an integer >= 1", "found 0"),
        (TOPK | {"top_n": True}, "policy.top_n: expected an integer >= 1", "True"),
        (TOPK | {"top_n": 3.0}, "policy.top_n: expected an integer >= 1", "3.0"),
        (TOPK | {"delta": -0.1}, "policy.delta", "-0.1"),
        (TOPK | {"think_end": 6}, "policy.think_start: expected an id beside think_end", "None"),
        (TOPK | {"think_start": 6}, "policy.think_end: expected an id beside think_start", "None"),
        (TOPK | {"think_start": 6, "think_end": 6}, "policy.think_end: expected another id", "6"),
        (TOPK | {"think_start": -1, "think_end": 6}, "policy.think_start: expected an integer >= 0", "-1"),
        ({"rule": "relaxed-ratio", "top_n": 3, "ratio": 0}, "policy.ratio: expected a number above 0", "found 0"),
        ({"rule": "thresholds", "threshold_single": 1}, "policy.threshold_acc", "nothing"),
        ({"rule": "entropy", "alpha": 0.4, "tau": 0}, "policy.tau: expected a number above 0, at most 1", "found 0"),
        ([], "JSON object", "[]"),
        ("{", "JSON object", "'{'"),
    ],
)
def test_a_bad_value_names_the_field_and_what_was_found(value, field, found):
    with pytest.raises(PolicyError) as error:
        Policy.from_json(value)
    assert field in str(error.value)
    assert found in str(error.value)


@pytest.mark.parametrize("field", ["budget", "max_mismatches"])
def test_no_budget_or_no_mismatch_is_strict_by_rule(field):
    assert Policy(rule="asd", **({"budget": 1.0, "max_mismatches": 1} | {field: 0})).is_strict
    assert not Policy(rule="asd", budget=1.0, max_mismatches=1).is_strict


def test_keys_say_the_numbers():
    assert Policy.from_json(TYPICAL).key == "typical(e=0.09,a=0.3)"
    assert Policy.from_json(TOPK).key == "relaxed-topk(N=10,d=0.6)"
    thinking = Policy("relaxed-ratio", top_n=3, ratio=0.5, think_start=5, think_end=6)
    assert thinking.key == "relaxed-ratio(N=3,r=0.5,think=5,end=6)"
    assert Policy("thresholds", threshold_single=0.5, threshold_acc=1).key == "thresholds(single=0.5,acc=1.0)"
    assert Policy("entropy", alpha=0.4, tau=0.95).key == "entropy(a=0.4,t=0.95)"


@pytest.mark.parametrize(
    ("policy", "strict", "lossless"),
    [
        (Policy("strict"), True, True),
        (Policy("asd", budget=1.0), False, False),
        (Policy("relaxed-topk", top_n=1, delta=1), True, True),
        (Policy("relaxed-topk", top_n=2, delta=0), False, False),  # a tie may pass
        (Policy("relaxed-ratio", top_n=1, ratio=0.1), True, True),
        (Policy("relaxed-ratio", top_n=2, ratio=1), False, False),
        (Policy("chain"), False, True),
        (Policy("block-engine"), False, True),
        (Policy("typical", epsilon=1, alpha=0), False, False),
        (Policy("thresholds", threshold_single=1, threshold_acc=1), False, True),
        (Policy("thresholds", threshold_single=1, threshold_acc=0.9), False, False),
        (Policy("entropy", alpha=0, tau=1), False, True),
        (Policy("entropy", alpha=0, tau=0.95), False, False),
    ],
    ids=lambda value: getattr(value, "key", value),
)
def test_what_a_policy_promises(policy, strict, lossless):
    assert (policy.is_strict, policy.is_lossless) == (strict, lossless)


def test_every_rule_serves_one_kind_of_request():
    assert len(set(RULES)) == len(RULES)
    assert set(REFERENCE_RULES) == set(FIELDS)
    assert {rule for rule in REFERENCE_RULES if rule in GREEDY_RULES} == {"relaxed-topk", "relaxed-ratio"}


def test_minus_zero_is_zero():
    assert Policy(rule="asd", budget=-0.0).key == Policy(rule="asd").key


def test_an_unset_or_blank_environment_arms_nothing():
    assert Policy.from_environment({}) is None
    assert Policy.from_environment({ENVIRONMENT: "  "}) is None
    assert Policy.from_environment({ENVIRONMENT: '{"rule": "block"}'}) == Policy(rule="block")
    assert CUSTOM_PARAM == "specaccept"
