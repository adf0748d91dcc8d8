"""The proof from counters, case by case."""

import pytest

from adapters.policy import Policy
from harness.records import Row
from harness.records.schema import Arm
from harness.tasks.arms import prove
from harness.tasks.limits import contradictions
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


def told(policy, rows, block_size=7, before=None, **after) -> str:
    """The failures, as one text."""
    counters = MOVED | {"requests": len(rows), "blocks": 2 * len(rows), "drafts_verified": 14 * len(rows)} | after
    problems = prove("a", arm(policy, len(rows), before, **counters), rows, block_size)
    return " | ".join(problem.text for problem in problems if problem.outcome == "fail")


SOUND = {"output_ids": [7, 8, 9, 10], "histogram": [1, 0, 0, 1], "wall_s": 0.2, "server_s": 0.1}
SPENT = SOUND | {"relaxed": 2, "regret": 2.0, "spent": 2.0}
CHARGED = {"relaxed": 2, "regret_charged": 2.0, "committed_tokens": 4, "strict_accepted": 1}


def test_sound_rows_break_no_limit():
    assert told(STRICT, [row(0, STRICT, **SOUND)], committed_tokens=4, strict_accepted=3) == ""
    assert told(STRICT, [row(0, STRICT, **SOUND)], committed_tokens=3, strict_accepted=2) == ""  # no prefill id, a cut
    assert told(ASD, [row(0, ASD, **SPENT)], **CHARGED) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output_ids": list(range(7))}, "at most 1 + 3 drafts + 2 steps, found 7"),
        ({"histogram": [0, 1, 1]}, None),
        ({"histogram": [1, 0, 0, 1, 0, 0, 0, 0]}, None),
        ({"histogram": [0, 0, 0, 1]}, "expected 2 steps and 3 accepted drafts, found 1 and 3"),
        ({"histogram": [1, 0, 1]}, "expected 2 steps and 3 accepted drafts, found 2 and 2"),
        ({"histogram": [2, -1, -1, 2]}, "histogram: expected"),
        ({"accepted": 8, "histogram": [1, 0, 0, 0, 0, 0, 0, 0, 1]}, "at most 7 accepted drafts in a step"),
        ({"server_s": 0.3}, "at most the 0.2000 s that the client waited, found 0.3000 s"),
        ({"server_s": 0.2004}, None),
        ({"relaxed": 1}, "relaxed: expected 0 to 0, found 1"),
        ({"spent": 0.5, "regret": 0.5}, "spent: expected 0 to 0 nats, found 0.5"),
    ],
)
def test_what_no_answer_of_strict_can_be(change, words):
    rows = [row(0, STRICT, **SOUND | change)]
    found = told(STRICT, rows, committed_tokens=len(rows[0].output_ids), relaxed=rows[0].relaxed)
    assert words in found if words else found == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spent": 2.001, "regret": 2.001}, "spent: expected 0 to 2"),
        ({"spent": float("nan"), "regret": float("nan")}, "spent: expected 0 to 2"),
        ({"regret": -1.0}, "regret: expected the 2 nats spent, found -1"),
        ({"regret": 1.0}, "regret: expected the 2 nats spent, found 1"),
        ({"relaxed": 3}, "relaxed: expected 0 to 2, found 3"),  # m = 1, two steps
        ({"relaxed": 0}, "regret: expected 0 without a relaxed draft"),
    ],
)
def test_what_no_answer_under_a_budget_can_be(change, words):
    assert words in told(ASD, [row(0, ASD, **SPENT | change)], **CHARGED)


def test_the_ledger_is_float32():
    budget = Policy("asd", 1.7, 1.7, 1)
    rounded = 1.7000000476837158  # float32(1.7)
    rows = [row(0, budget, **SPENT | {"spent": rounded, "regret": rounded})]
    assert told(budget, rows, **CHARGED | {"regret_charged": rounded}) == ""


def test_ids_without_a_step():
    rows = [row(0, STRICT, output_ids=[1, 2], steps=0, proposed=0, accepted=1), row(1, STRICT)]
    assert "steps: expected at least 1 for 2 output ids" in told(STRICT, rows, blocks=2, drafts_verified=14)


def test_more_drafts_than_the_steps_have_columns():
    rows = [row(0, STRICT, **SOUND | {"proposed": 15})]
    assert "at most 7 in each of 2 steps, found 15" in told(STRICT, rows, drafts_verified=15, committed_tokens=4)
    assert told(STRICT, rows, block_size=None, drafts_verified=15, committed_tokens=4) == ""


@pytest.mark.parametrize(
    ("counters", "words"),
    [
        ({"regret_charged": 0.0}, "regret_charged: the answers say 2, the counter moved by 0"),
        ({"regret_charged": 2.5}, "regret_charged: the answers say 2, the counter moved by 2.5"),
        ({"committed_tokens": 2}, "committed_tokens: the answers have 4 ids, the counter moved by 2"),
        ({"committed_tokens": 5}, "committed_tokens: the answers have 4 ids, the counter moved by 5"),
        ({"strict_accepted": 2}, "strict_accepted + relaxed: 3 drafts were accepted, the counters moved by 4"),
    ],
)
def test_counters_that_no_answer_explains(counters, words):
    assert words in told(ASD, [row(0, ASD, **SPENT)], **CHARGED | counters)


def test_a_failed_request_may_have_committed_more_but_never_less():
    rows = [row(0, ASD, **SPENT), row(1, ASD, error="timeout")]
    more = CHARGED | {"relaxed": 3, "regret_charged": 3.0, "committed_tokens": 9, "strict_accepted": 4}
    assert told(ASD, rows, **more) == ""
    assert "regret_charged" in told(ASD, rows, **more | {"regret_charged": 1.0})
    assert "committed_tokens" in told(ASD, rows, **more | {"committed_tokens": 2})


def test_ids_differ_exactly_where_something_was_relaxed():
    base = [row(n, STRICT, output_ids=[n, 1]) for n in range(3)]
    honest = [row(0, ASD, output_ids=[0, 2], relaxed=1), *(row(n, ASD, output_ids=[n, 1]) for n in (1, 2))]
    silent = [row(n, ASD, output_ids=[n, 1], relaxed=int(n == 0)) for n in range(3)]
    unasked = [row(n, ASD, output_ids=[n, 2]) for n in range(3)]
    assert contradictions("a", base, honest, alone=True) == []
    assert contradictions("a", base, silent, alone=True) == [
        "a: 1 of 3 answers relaxed drafts and equal strict's, first i0"
    ]
    assert contradictions("a", base, unasked, alone=True) == [
        "a: 3 of 3 answers differ from strict's and relaxed nothing, first i0"
    ]
    assert contradictions("a", base, unasked, alone=False) == []  # rounding depends on the neighbours


def test_of_many_answers_a_few_may_round_to_another_argmax():
    base = [row(n, STRICT, output_ids=[n, 1]) for n in range(200)]
    some = [row(n, ASD, output_ids=[n, 1 + (n >= 2)], relaxed=1) for n in range(200)]
    assert contradictions("a", base, some, alone=True) == []
    some[2].output_ids = [2, 1]
    assert contradictions("a", base, some, alone=True) != []
    silent = [row(n, ASD, output_ids=[n, 1], relaxed=int(n == 0)) for n in range(200)]
    assert contradictions("a", base, silent, alone=True) != []  # nothing changed at all
