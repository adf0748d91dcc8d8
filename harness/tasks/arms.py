"""Arms: which policies are compared, and the proof from live counters that each one ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from adapters.policy import GREEDY_RULES, Policy
from harness.config import Config, PolicyConfig, member
from harness.records.schema import Arm, Row
from harness.tasks.limits import impossible, totals

MIN_ACCEPTED = 0.1  # drafts per verify step: below it the draft is not this target's, whatever the counters say
COUNTED = ("requests", "blocks", "drafts_verified", "relaxed")


@dataclass(frozen=True)
class Plan:
    """One arm before it runs."""

    name: str
    policy: Policy
    source: str
    temperature: float

    @property
    def greedy(self) -> bool:
        return self.policy.rule in GREEDY_RULES

    def record(self, expected: int) -> Arm:
        return Arm(
            policy=self.policy.to_json(),
            policy_key=self.policy.key,
            policy_source=self.source,
            temperature=self.temperature,
            expected=expected,
        )


@dataclass(frozen=True)
class Problem:
    """outcome: `fail` where counters contradict the answers, `inconclusive` where nothing was shown."""

    outcome: Literal["fail", "inconclusive"]
    text: str


def plan(config: Config) -> list[Plan]:
    """The baseline, the identity arm of a greedy policy, and the policy itself; the first is the baseline."""
    wanted = config.policy
    if wanted.policy.rule in GREEDY_RULES:
        arms = [_fixed("strict"), _fixed("asd-b0")]
    else:
        arms = [_fixed("chain", wanted.temperature)]
    if all(arm.policy != wanted.policy for arm in arms):
        arms.append(Plan(wanted.name, wanted.policy, config.policy_source, wanted.temperature))
    return arms


def servers(config: Config, arms: Sequence[Plan]) -> list[list[Plan]]:
    """The arms that share a server. One policy per server: one arm each, and the baseline again at the end, whose
    change against itself is what the machine's drift alone makes of two servers."""
    if config.engine.per_request_policy:
        return [list(arms)]
    return [[arm] for arm in (*arms, replace(arms[0], name=f"{arms[0].name}-again"))]


def _fixed(name: str, temperature: float | None = None) -> Plan:
    recipe: PolicyConfig = member("policy", name)
    return Plan(name, recipe.policy, "recipe", recipe.temperature if temperature is None else temperature)


def moved(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, name: str) -> float:
    """How far one counter of a policy key went; a key that does not exist stands at 0."""
    return (after or {}).get(name, 0) - (before or {}).get(name, 0)


def prove(name: str, arm: Arm, rows: Sequence[Row], block_size: int | None = None) -> list[Problem]:
    """What speaks against this arm; empty when its policy demonstrably ran on exactly these requests.

    block_size: K, where it is known.
    """
    answered = [row for row in rows if row.error is None]
    failed = len(rows) - len(answered)
    if not answered:
        return [Problem("inconclusive", f"{name}: nothing was answered ({failed} of {arm.expected} requests failed)")]
    problems = [_missing(name, arm, rows, failed), *_counts(name, arm, answered, failed), *_rule(name, arm, answered)]
    limits = impossible(name, Policy.from_json(arm.policy), answered, block_size)
    problems += [Problem("fail", text) for text in (*limits, *_totals(name, arm, answered, failed))]
    return [problem for problem in problems if problem is not None]


def prove_replicas(name: str, shares: Sequence[Mapping[str, float]], rows: Sequence[Row]) -> list[Problem]:
    """What the counters of each replica say against this arm's rows: every item once, where it was counted."""
    problems = []
    if len({row.item for row in rows}) != len(rows):
        problems.append(Problem("fail", f"{name}: an item was answered more than once"))
    for replica, share in enumerate(shares):
        own = [row for row in rows if row.replica == replica]
        told, failed = _told([row for row in own if row.error is None]), any(row.error for row in own)
        for field in COUNTED:
            if share[field] < told[field] or (share[field] > told[field] and not failed):
                text = f"the answers say {told[field]}, the counters moved by {share[field]:g}"
                problems.append(Problem("fail", f"{name}: replica {replica}: {field}: {text}"))
    if stray := sorted({row.replica for row in rows} - set(range(len(shares)))):
        problems.append(Problem("fail", f"{name}: answers of replica {stray[0]}, found counters of {len(shares)}"))
    return problems


def _told(rows: Sequence[Row]) -> dict[str, int]:
    """What the answers say the counters should have moved by."""
    return {
        "requests": len(rows),
        "blocks": sum(row.steps for row in rows),
        "drafts_verified": sum(row.proposed for row in rows),
        "relaxed": sum(row.relaxed for row in rows),
    }


def _missing(name: str, arm: Arm, rows: Sequence[Row], failed: int) -> Problem | None:
    if len(rows) == arm.expected and not failed:
        return None
    kinds = sorted({row.error for row in rows if row.error})
    detail = f", {failed} failed ({', '.join(kinds)})" if failed else ""
    return Problem("inconclusive", f"{name}: answers: expected {arm.expected}, found {len(rows) - failed}{detail}")


def _counts(name: str, arm: Arm, rows: Sequence[Row], failed: int) -> list[Problem | None]:
    """Counters against answers: equal, or at least as many where a failed request may have been counted too."""
    problems: list[Problem | None] = []
    told = _told(rows)
    found = {field: moved(arm.counters_before, arm.counters_after, field) for field in COUNTED}
    if not any(found.values()):
        return [Problem("inconclusive", f"{name}: no counter of {arm.policy_key} moved: the policy never ran")]
    for field in COUNTED:
        if found[field] < told[field] or (found[field] > told[field] and not failed):
            problems.append(
                Problem(
                    "fail", f"{name}: {field}: the answers say {told[field]}, the counters moved by {found[field]:g}"
                )
            )
    if not told["blocks"] or not told["drafts_verified"]:
        problems.append(Problem("inconclusive", f"{name}: no drafts were verified"))
    return problems


def _totals(name: str, arm: Arm, rows: Sequence[Row], failed: int) -> list[str]:
    def went(counter: str) -> float:
        return moved(arm.counters_before, arm.counters_after, counter)

    if not any(went(counter) for counter in COUNTED):
        return []  # said already: the policy never ran
    drafts = went("strict_accepted") + went("relaxed")
    return totals(name, rows, went("committed_tokens"), drafts, went("regret_charged"), not failed)


def _rule(name: str, arm: Arm, rows: Sequence[Row]) -> list[Problem | None]:
    """What the policy itself promises."""
    problems: list[Problem | None] = []
    policy = Policy.from_json(arm.policy)
    relaxed = moved(arm.counters_before, arm.counters_after, "relaxed")
    before, after = ((side or {}).get("fallbacks", {}) for side in (arm.counters_before, arm.counters_after))
    fallen = {reason: count - before.get(reason, 0) for reason, count in after.items() if count > before.get(reason, 0)}
    if fallen:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(fallen.items()))
        problems.append(Problem("fail", f"{name}: served by another rule ({reasons})"))
    if others := sorted({row.policy_key for row in rows} - {arm.policy_key}):
        problems.append(Problem("fail", f"{name}: answers under policy {others[0]!r}, expected {arm.policy_key!r}"))
    if policy.is_strict and relaxed:
        problems.append(Problem("fail", f"{name}: relaxed: expected 0, the counter moved by {relaxed:g}"))
    if policy.rule == "asd" and not policy.is_strict and not relaxed:
        problems.append(Problem("inconclusive", f"{name}: no mismatch was relaxed: the policy changed nothing"))
    steps, accepted = sum(row.steps for row in rows), sum(row.accepted for row in rows)
    if steps and accepted < MIN_ACCEPTED * steps:
        share = f"{accepted / steps:.2f} drafts accepted per step"
        problems.append(Problem("inconclusive", f"{name}: {share}, below {MIN_ACCEPTED}: is it this target's draft?"))
    if any(row.cached_tokens for row in rows):
        problems.append(Problem("inconclusive", f"{name}: cached prompt tokens: expected 0, the prefix cache is on"))
    return problems
