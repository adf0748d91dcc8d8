"""Scoring of answers, after the timed arms. Outcomes: correct, wrong, unparsed, truncated; a failed request: none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.score import code, math
from harness.score.code import Limits, Run, Runner, SandboxError, run_code, score_code
from harness.score.outcome import Outcome, Score

PARSER_VERSION = {"math": math.PARSER_VERSION, "code": code.PARSER_VERSION}

__all__ = [
    "PARSER_VERSION",
    "Limits",
    "Outcome",
    "Run",
    "Runner",
    "SandboxError",
    "Score",
    "run_code",
    "score",
    "score_code",
]


def score(item: Any, text: str, finish_reason: str | Mapping[str, Any], *, runner: Runner | None = None) -> Score:
    """Score one answer by its item's task.

    text: the decoded output ids. finish_reason: "stop" or "length", or the engine's object with that as "type". Raises
    ValueError for another reason (the request failed) or a broken item, SandboxError where code could not be run; never
    on a text. runner: where code answers run; None: run_code.
    """
    if item.task == "math":
        return math.score(item, text, finish_reason)
    if item.task == "code":
        return score_code(item, text, finish_reason, runner=runner)
    raise ValueError(f"task of {item.id}: expected math or code, found {item.task!r}")
