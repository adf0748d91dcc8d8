"""Tokens per step of every policy on one table, with its interval by prompt, by phase, and against the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from adapters.policy import Policy
from harness.replay import rules
from harness.replay.table import Array, Table, by_request
from harness.stats import change, tokens_per_step

PHASES = ("all", "think", "answer")
RESAMPLES = 2000


@dataclass(frozen=True)
class Named:
    """A policy to replay, by the name its row has."""

    name: str
    policy: Policy


@dataclass
class Outcome:
    """One policy on one table. tokens [N]: expected, of each block. acceptance[i]: P(accept length > i).

    kind: `deterministic`, `expected` (coins integrated out) or `unsupported`, and then why. estimates are None in a
    phase without blocks.
    """

    name: str
    policy: Policy
    kind: str
    why: str | None = None
    tokens: Array | None = None
    acceptance: list[float] = field(default_factory=list)
    tokens_per_step: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    change: dict[str, dict[str, Any] | None] = field(default_factory=dict)


def phases(table: Table, think: tuple[int, int] | None) -> dict[str, Array]:
    """Blocks by phase: that of a block's first draft. Without think ids nothing is known but `all`."""
    every = np.ones(len(table), bool)
    if think is None:
        return {"all": every}
    thinking = table.inside(*think)[:, 0]
    return {"all": every, "think": thinking, "answer": ~thinking}


def prompts(table: Table) -> list[Any]:
    """What each request was asked, as a label; a request whose prompt is not known stands for itself."""
    return [tuple(prompt) or place for place, prompt in enumerate(table.prompts)]


def run(named: Named, table: Table) -> Outcome:
    """The policy on every block, without intervals."""
    policy = named.policy
    try:
        survive = rules.survival(policy, table)
    except rules.Unsupported as error:
        return Outcome(named.name, policy, "unsupported", str(error))
    kind = "expected" if policy.rule in rules.WITH_COINS else "deterministic"
    outcome = Outcome(named.name, policy, kind, tokens=rules.tokens(survive, table))
    outcome.acceptance = [float(value) for value in survive.mean(0, dtype=np.float64)] if len(table) else []
    return outcome


def estimate(outcome: Outcome, base: Outcome, table: Table, masks: Mapping[str, Array]) -> None:
    """Fill in intervals: prompts are resampled, all blocks of one together. A prompt that was asked several times (an
    A/A arm, blocks of a schedule) is one unit: its answers are alike."""
    units = prompts(table)
    for name, mask in masks.items():
        steps = by_request(table, mask)
        there = steps > 0
        if outcome.tokens is None or not there.any():
            outcome.tokens_per_step[name] = outcome.change[name] = None
            continue
        own = by_request(table, np.where(mask, outcome.tokens, 0))[there]
        clusters = [units[place] for place in np.flatnonzero(there)]
        options: dict[str, Any] = {"clusters": clusters, "resamples": RESAMPLES}
        outcome.tokens_per_step[name] = asdict(tokens_per_step(own, steps[there], **options))
        outcome.change[name] = None
        if base.tokens is not None and outcome is not base:
            other = by_request(table, np.where(mask, base.tokens, 0))[there]
            outcome.change[name] = asdict(change(other, own, **options))


def compare(named: Sequence[Named], table: Table, baseline: str, think: tuple[int, int] | None) -> list[Outcome]:
    """Every policy, estimated against the one named `baseline`."""
    masks = phases(table, think)
    outcomes = [run(each, table) for each in named]
    base = next(outcome for outcome in outcomes if outcome.name == baseline)
    for outcome in outcomes:
        estimate(outcome, base, table, masks)
    return outcomes


# How near a coin may lie to its threshold, as a share of it, before rounding decides: the engine's thresholds are
# float32 quotients, and for block verification float32 sums over the vocabulary.
ROUNDING = {"block": 2e-5}
ROUNDING_ELSE = 2e-6


def reproduced(policy: Policy, table: Table) -> tuple[int, int, str | None]:
    """(blocks compared, blocks where the replay's accept length is not the engine's, why none could be compared).

    The policy is the one that ran. A rule with coins needs the engine's own: blocks without them are not compared, nor
    those with one that lies within rounding of its threshold.
    """
    known = table.length >= 0
    coins = None
    if policy.rule in rules.WITH_COINS:
        coins = table.coin.astype(np.float64)
        known &= ~np.isnan(np.where(table.verified, coins, 0)).any(1)
        if not known.any():
            return 0, 0, "the capture has no coins"
    try:
        length = rules.survival(policy, table, coins).sum(1)
        if coins is not None:
            near = rules.nearest_coin(policy, table, coins)
            known &= near > ROUNDING.get(policy.rule, ROUNDING_ELSE)
    except rules.Unsupported as error:
        return 0, 0, str(error)
    return int(known.sum()), int((length != table.length)[known].sum()), None
