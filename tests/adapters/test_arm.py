import json

import pytest

from adapters.arm import GREEDY_REQUEST, SAMPLED_REQUEST, Arming, Refused, request_policy, serving_rule
from adapters.policy import Policy, PolicyError

ASD = Policy("asd", budget=2.0, max_mismatches=1)
TEXT = json.dumps(ASD.to_json())


def test_an_empty_environment_asks_for_nothing():
    for environ in ({}, {"SPECACCEPT_POLICY": " "}, {"DSV41_BLOCK_VERIFY": "0", "DSV41_VERIFY_CAP": "off"}):
        found = Arming.from_environment(environ)
        assert found == Arming()
        assert not found.required


def test_the_policy_and_the_aliases():
    assert Arming.from_environment({"SPECACCEPT_POLICY": TEXT}) == Arming(ASD)
    assert Arming.from_environment({"DSV41_BLOCK_VERIFY": "1"}) == Arming(Policy("block"))
    both = {"DSV41_BLOCK_VERIFY": "1", "SPECACCEPT_POLICY": '{"rule": "block"}', "DSV41_VERIFY_CAP": "3"}
    assert Arming.from_environment(both) == Arming(Policy("block"), 3)
    assert Arming(verify_cap=3).required


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"DSV41_BLOCK_VERIFY": "1", "SPECACCEPT_POLICY": TEXT}, "DSV41_BLOCK_VERIFY: expected unset or 0 beside"),
        ({"DSV41_BLOCK_VERIFY": "maybe"}, "DSV41_BLOCK_VERIFY: expected 0 or 1, found 'maybe'"),
        ({"DSV41_VERIFY_CAP": "conf:0.1"}, "cap-accept"),
        ({"DSV41_VERIFY_CAP": "-1"}, "DSV41_VERIFY_CAP: expected a number of drafts, found '-1'"),
    ],
)
def test_switches_that_cannot_be_honoured_are_refused(environ, why):
    with pytest.raises(Refused, match=why):
        Arming.from_environment(environ)


def test_a_malformed_environment_policy_names_the_field():
    with pytest.raises(PolicyError, match=r"policy\.budget"):
        Arming.from_environment({"SPECACCEPT_POLICY": '{"rule": "asd", "budget": "two"}'})


def test_a_request_policy_is_read_from_its_own_key_only():
    assert request_policy(None) is None
    assert request_policy({"thinking_budget": 1}) is None
    assert request_policy({"specaccept": ASD.to_json(), "__req__": object()}) == ASD
    with pytest.raises(PolicyError, match=r"sampling_params\.custom_params\.specaccept: policy\.gate: expected"):
        request_policy({"specaccept": {"rule": "asd", "budget": 1, "gate": -1}})


def test_a_rule_serves_only_the_kind_of_request_it_is_exact_for():
    assert serving_rule(ASD, sampled=False) == ("asd", None)
    assert serving_rule(ASD, sampled=True) == ("chain", SAMPLED_REQUEST)
    assert serving_rule(Policy("block"), sampled=True) == ("block", None)
    assert serving_rule(Policy("block"), sampled=False) == ("strict", GREEDY_REQUEST)
    assert serving_rule(Policy("block-engine"), sampled=True) == ("block-engine", None)
    assert serving_rule(Policy("strict"), sampled=True) == ("chain", SAMPLED_REQUEST)
