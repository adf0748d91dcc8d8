import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.policy import CUSTOM_PARAM, ENVIRONMENT, RULES, SUFFIX_VALUES, Policy, PolicyError

asd = st.builds(
    Policy,
    rule=st.just("asd"),
    budget=st.floats(0, 1e6),
    gate=st.one_of(st.just(math.inf), st.floats(0, 1e6)),
    max_mismatches=st.one_of(st.none(), st.integers(0, 15)),
    suffix_value=st.sampled_from(SUFFIX_VALUES),
)
policies = st.one_of(asd, st.sampled_from([r for r in RULES if r != "asd"]).map(lambda rule: Policy(rule=rule)))


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


def test_minus_zero_is_zero():
    assert Policy(rule="asd", budget=-0.0).key == Policy(rule="asd").key


def test_an_unset_or_blank_environment_arms_nothing():
    assert Policy.from_environment({}) is None
    assert Policy.from_environment({ENVIRONMENT: "  "}) is None
    assert Policy.from_environment({ENVIRONMENT: '{"rule": "block"}'}) == Policy(rule="block")
    assert CUSTOM_PARAM == "specaccept"
