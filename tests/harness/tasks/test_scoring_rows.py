"""Scoring rows: outcomes, errors apart from them, equal answers once."""

from harness.records import Row
from harness.score import SandboxError
from harness.tasks import scoring
from harness.traffic import Item, Traffic


def row(text: str, **more) -> Row:
    values = {"arm": "a", "policy_key": "strict", "order": 0, "item": "i", "task": "math", "prompt_sha256": "p"}
    return Row(**values | {"prompt_tokens": 1, "text": text, "finish": "stop"} | more)


ITEM = Item("i", "math", ({"role": "user", "content": "?"},), "7", 16, False)
TRAFFIC = Traffic("t", [ITEM], [], [], {})


def test_outcomes():
    rows = [row("\\boxed{7}"), row("\\boxed{8}"), row("none"), row("so far", finish="length"), row("", error="http")]
    scoring.score_rows(TRAFFIC, rows)
    assert [each.outcome for each in rows] == ["correct", "wrong", "unparsed", "truncated", None]
    assert rows[0].rule == "boxed"


def test_a_scorer_that_fails_is_no_outcome(monkeypatch):
    def broken(item, text, finish, *, runner):
        raise SandboxError("no memory for a sandbox")

    monkeypatch.setattr(scoring, "score", broken)
    rows = [row("x")]
    scoring.score_rows(TRAFFIC, rows)
    assert (rows[0].outcome, rows[0].error, rows[0].rule) == ("error", None, "no memory for a sandbox")


def test_equal_answers_are_scored_once(monkeypatch):
    asked = []
    real = scoring.score
    monkeypatch.setattr(scoring, "score", lambda *args, **more: asked.append(args) or real(*args, **more))
    scoring.score_rows(TRAFFIC, [row("\\boxed{7}"), row("\\boxed{7}"), row("\\boxed{7}", finish="length")])
    assert len(asked) == 2
