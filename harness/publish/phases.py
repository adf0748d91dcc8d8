"""Tokens per verify step while the model thinks and while it answers, from the accepted drafts of each step.

The first token of an output comes from the prompt's pass; step i then gives a_i + 1 tokens, the bonus included, and the
last one is cut where the output ends. A step belongs to the phase in which it starts; the tag that closes thinking is
thinking. An output without that tag is an answer, unless it opened thinking and never closed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness import stats
from harness.records.schema import Row

THINK_START = "<think>"
PHASES = ("think", "answer")


@dataclass(frozen=True)
class Phase:
    """tokens, steps: by item, in order; items without a step in this phase are left out."""

    tokens: list[int]
    steps: list[int]

    @property
    def per_step(self) -> stats.Estimate:
        return stats.tokens_per_step(self.tokens, self.steps)


def split(lengths: Sequence[int], size: int, border: int) -> list[list[int]] | None:
    """Tokens of every step of one output, by phase; None where the steps do not account for the output.

    lengths: accepted drafts of each step. size: output tokens. border: how many of them are thinking.
    """
    found: list[list[int]] = [[], []]
    start = 1
    for length in lengths:
        if length < 0 or start >= size:
            return None
        found[start >= border].append(min(length + 1, size - start))
        start += length + 1
    return found if start >= size > 0 else None


def border(ids: Sequence[int], think_end: Sequence[int], text: str) -> int:
    """How many ids are thinking: up to the last closing tag, all after an opening one alone, else none."""
    width = len(think_end)
    for end in range(len(ids), width - 1, -1):
        if list(ids[end - width : end]) == list(think_end):
            return end
    return len(ids) if THINK_START in text else 0


def phases(rows: Sequence[Row], think_end: Sequence[int] | None) -> dict[str, Phase] | str:
    """Both phases of one arm, or why they cannot be told apart."""
    answered = [row for row in rows if row.error is None]
    if not answered:
        return "no answer"
    if not think_end:
        return "the record does not say which id ends thinking"
    found: dict[str, Phase] = {name: Phase([], []) for name in PHASES}
    for row in answered:
        lengths = getattr(row, "step_lengths", None)
        if lengths is None:
            return "the engine does not report the length of each step"
        both = split(lengths, len(row.output_ids), border(row.output_ids, think_end, row.text))
        if both is None:
            return "the lengths of the steps do not account for the ids"
        for phase, tokens in zip(found.values(), both, strict=True):
            if tokens:
                phase.tokens.append(sum(tokens))
                phase.steps.append(len(tokens))
    return found
