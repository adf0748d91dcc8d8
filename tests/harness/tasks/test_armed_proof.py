"""The proof from counters, case by case."""

import pytest

from adapters.policy import Policy
from harness.records import Row
from harness.records.schema import Arm
from harness.tasks.arms import prove
from harness.tasks.summary import identity

STRICT, ASD = Policy("strict"), Policy("asd", 2.0, 2.0, 1)
ZERO = {"requests": 0, "blocks": 0, "drafts_verified": 0, "relaxed": 0, "fallbacks": {}}


def row(n: int, policy: Policy, **more) -> Row:
    values = {"arm": "a", "policy_key": policy.key, "order": n, "item": f"i{n}", "task": "math", "prompt_sha256": "p"}
    values |= {"prompt_tokens": 1, "output_ids": [n], "steps": 2, "proposed": 14, "accepted": 3, "relaxed": 0}
    return Row(**values | more)


def arm(policy: Policy, expected: int, before=None, **after) -> Arm:
    return Arm(
        policy=policy.to_json(),
        policy_key=policy.key,
        policy_source="test",
        temperature=0.0,
        expected=expected,
        counters_before=before,
        counters_after=ZERO | after,
    )


MOVED = {"requests": 2, "blocks": 4, "drafts_verified": 28}


def outcomes(policy, rows, expected=2, before=None, **after):
    return [problem.outcome for problem in prove("a", arm(policy, expected, before, **after), rows)]


def test_exact_counters_prove_an_arm():
    rows = [row(n, STRICT) for n in range(2)]
    assert outcomes(STRICT, rows, **MOVED) == []
    older = ZERO | {"requests": 5, "blocks": 7, "drafts_verified": 9}
    later = {name: MOVED[name] + older[name] for name in MOVED}
    assert outcomes(STRICT, rows, before=older, **later) == []


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_counter_off_by_one_contradicts(name, by):
    rows = [row(n, STRICT) for n in range(2)]
    assert outcomes(STRICT, rows, **MOVED | {name: MOVED[name] + by}) == ["fail"]


def test_counters_of_before_prove_nothing():
    rows = [row(n, STRICT) for n in range(2)]
    assert outcomes(STRICT, rows, before=ZERO | MOVED, **MOVED) == ["inconclusive"]


def test_a_failed_request_may_have_been_counted():
    rows = [row(0, STRICT), row(1, STRICT, error="timeout")]
    assert outcomes(STRICT, rows, requests=2, blocks=5, drafts_verified=35) == ["inconclusive"]  # not complete
    assert "fail" in outcomes(STRICT, rows, requests=0, blocks=1, drafts_verified=7)  # but never fewer


def test_a_budget_that_relaxed_nothing_is_inconclusive():
    rows = [row(n, ASD) for n in range(2)]
    assert outcomes(ASD, rows, **MOVED) == ["inconclusive"]
    rows[0].relaxed = 1
    assert outcomes(ASD, rows, **MOVED, relaxed=1) == []


def test_answers_under_another_policy_contradict():
    rows = [row(0, STRICT), row(1, STRICT, policy_key="chain")]
    assert outcomes(STRICT, rows, **MOVED) == ["fail"]


def test_more_drafts_accepted_than_proposed():
    rows = [row(0, STRICT), row(1, STRICT, accepted=15)]
    assert outcomes(STRICT, rows, **MOVED) == ["fail"]


def test_a_draft_of_another_target_shows_nothing():
    rows = [row(n, STRICT, accepted=0) for n in range(2)]
    assert outcomes(STRICT, rows, **MOVED) == ["inconclusive"]


def test_nothing_answered():
    assert outcomes(STRICT, [row(0, STRICT, error="http")], expected=1) == ["inconclusive"]
    assert outcomes(STRICT, [], expected=1) == ["inconclusive"]


def test_identity_compares_whole_lists():
    base = [row(0, STRICT, output_ids=[1, 2, 3]), row(1, STRICT, output_ids=[4])]
    longer = [row(0, STRICT, output_ids=[1, 2, 3, 9]), row(1, STRICT, output_ids=[4])]
    found = identity(base, longer, 2)
    assert (found["compared"], found["mismatches"]) == (2, 1)
    assert found["first"] == {"item": "i0", "position": 3, "base": [1, 2, 3], "candidate": [1, 2, 3, 9]}
    assert identity(base, base, 2)["mismatches"] == 0
    assert identity(base, [], 2)["compared"] == 0
