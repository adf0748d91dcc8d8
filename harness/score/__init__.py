"""Scoring of answers, after the timed arms: `score` by the item's task, `score_code` for code alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.score import math
from harness.score.outcome import Outcome, Score

PARSER_VERSION = {"math": math.PARSER_VERSION}

__all__ = ["PARSER_VERSION", "Outcome", "Score", "score"]


def score(item: Any, text: str, finish_reason: str | Mapping[str, Any]) -> Score:
    return math.score(item, text, finish_reason)
