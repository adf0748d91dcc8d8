"""Arms: which policies are compared, and the proof from live counters that each one ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from adapters.arm import SAMPLED_REQUEST
from adapters.policy import GREEDY_RULES, Policy
from harness.config import AGAIN, UNARMED, Config, PolicyConfig, arm_policy, member
from harness.records.schema import Arm, Record, Row
from harness.tasks.limits import impossible, totals

CACHED_SHARE = 0.5  # of repeated prompts that must be found in the prefix cache: it may drop some
MIN_ACCEPTED = 0.1  # drafts per verify step: below it the draft is not this target's, whatever the counters say
COUNTED = ("requests", "blocks", "drafts_verified", "relaxed")


@dataclass(frozen=True)
class Plan:
    """One arm before it runs. policy: None: the engine without its adapter."""

    name: str
    policy: Policy | None
    source: str
    temperature: float

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def key(self) -> str:
        return UNARMED if self.policy is None else self.policy.key

    def again(self) -> Plan:
        """The same policy as an arm of its own: what its change against this one shows is no policy's doing."""
        return replace(self, name=f"{self.name}{AGAIN}")

    def record(self, expected: int) -> Arm:
        return Arm(
            policy={"rule": UNARMED} if self.policy is None else self.policy.to_json(),
            policy_key=self.key,
            policy_source=self.source,
            temperature=self.temperature,
            expected=expected,
        )


@dataclass(frozen=True)
class Problem:
    """outcome: `fail` where counters contradict the answers, `inconclusive` where nothing was shown."""

    outcome: Literal["fail", "inconclusive"]
    text: str


def policy_of(arm: Arm) -> Policy | None:
    """Of a record's arm; None: the engine without its adapter."""
    return None if arm.policy_key == UNARMED else Policy.from_json(arm.policy)


def plan(config: Config) -> list[Plan]:
    """The arms that were named; else the baseline, the identity arm of a greedy policy, and the policy itself. The
    first is the baseline."""
    if config.arms is not None:
        return named(config, config.arms)
    wanted = config.policy
    if wanted.policy.rule in GREEDY_RULES:
        arms = [_fixed("strict"), _fixed("asd-b0")]
    else:
        arms = [_fixed("chain", wanted.temperature)]
    if all(arm.policy != wanted.policy for arm in arms):
        arms.append(Plan(wanted.name, wanted.policy, config.policy_source, wanted.temperature))
    return arms


def named(config: Config, names: Sequence[str]) -> list[Plan]:
    found = {name: arm_policy(config, name) for name in names if name != UNARMED}
    temperature = next((policy.temperature for policy, _ in found.values()), 0.0)
    return [
        Plan(name, None, "no adapter", temperature)
        if name == UNARMED
        else Plan(name, found[name][0].policy, found[name][1], found[name][0].temperature)
        for name in names
    ]


def by_server(config: Config, arms: Sequence[Plan]) -> list[list[Plan]]:
    """The arms that share a server: all that are asked for per request; an unarmed one, and every arm of an engine with
    one policy per server, has its own."""
    groups: dict[str, list[Plan]] = {}
    for arm in arms:
        alone = arm.policy is None or not config.engine.per_request_policy
        groups.setdefault(arm.name if alone else "", []).append(arm)
    return list(groups.values())


def rounds(config: Config, arms: Sequence[Plan]) -> list[list[list[Plan]]]:
    """Servers that are up at once, round by round: all of them with launch.together, else one after another.

    One after another, the baseline comes again at the end: what of a change the machine's drift alone makes.
    """
    groups = by_server(config, arms)
    if len(groups) == 1 or config.launch.together:
        return [groups]
    first = [arm for arm in arms if not arm.name.endswith(AGAIN)]
    return [[group] for group in (*by_server(config, first), [arms[0].again()])]


def _fixed(name: str, temperature: float | None = None) -> Plan:
    recipe: PolicyConfig = member("policy", name)
    return Plan(name, recipe.policy, "recipe", recipe.temperature if temperature is None else temperature)


def sharing(record: Record) -> dict[str, list[str]]:
    """The other arms of a server that count under the same key as this one."""
    mixed = record.workload.get("mixed", {})
    groups = [[name for name in group if name not in mixed] for group in record.workload.get("servers") or []]
    keys = {name: arm.policy_key for name, arm in record.arms.items()}
    return {
        name: [other for other in group if other != name and keys[other] == keys[name]]
        for group in groups
        for name in group
    }


def moved(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, name: str) -> float:
    """How far one counter of a policy key went; a key that does not exist stands at 0."""
    return (after or {}).get(name, 0) - (before or {}).get(name, 0)


def prove(
    name: str,
    arm: Arm,
    rows: Sequence[Row],
    block_size: int | None = None,
    shared: Sequence[Row] = (),
    sampled: Sequence[Row] = (),
    repeated: bool = False,
    running: bool = False,
) -> list[Problem]:
    """What speaks against this arm; empty when its policy demonstrably ran on exactly these requests.

    block_size: K, where it is known. shared: rows of other arms that moved the same counters. sampled: rows of sampled
    requests to a server whose one policy this is: the engine's own rule serves them, and the adapter says how many.
    repeated: every prompt was asked twice, and found in the prefix cache the second time. running: what the rows say of
    drafts are totals read while the engine added to them.
    """
    answered = [row for row in rows if row.error is None]
    failed = len(rows) - len(answered)
    if not answered:
        return [Problem("inconclusive", f"{name}: nothing was answered ({failed} of {arm.expected} requests failed)")]
    policy = policy_of(arm)
    if arm.policy_key == "strict":
        shared = [*shared, *sampled]  # strict is the rule that serves them
    others = [row for row in shared if row.error is None]
    aside = [row for row in sampled if row.error is None]
    unsure = failed + len(shared) - len(others) + len(sampled) - len(aside)
    only = 0 if arm.policy_key == "strict" else len(aside)
    counted = _drafting(name, _told(answered)) if policy is None else _counts(name, arm, answered, others, unsure, only)
    limits = impossible(name, policy or Policy("strict"), answered, block_size, running)
    if policy is not None:
        limits += _totals(name, arm, [*answered, *others], unsure)
    broken = [Problem("fail", text) for text in limits]
    found = [
        _missing(name, arm, rows, failed),
        *counted,
        *_rule(name, arm, policy, answered, len(aside), repeated),
        *broken,
    ]
    return [problem for problem in found if problem is not None]


def prove_sampled(
    name: str, arm: Arm, rows: Sequence[Row], block_size: int | None, running: bool = False
) -> list[Problem]:
    """Of sampled requests to a server without a policy for them: answered by the engine's own rule, nothing relaxed."""
    answered = [row for row in rows if row.error is None]
    problems = [_missing(name, arm, rows, len(rows) - len(answered)), *_drafting(name, _told(answered))]
    if others := sorted({row.policy_key for row in answered} - {"strict", UNARMED}):
        problems.append(Problem("fail", f"{name}: answers under policy {others[0]!r}, expected the engine's own"))
    limits = impossible(name, Policy("strict"), answered, block_size, running)
    problems += [Problem("fail", text) for text in limits]
    return [problem for problem in problems if problem is not None]


def prove_replicas(name: str, shares: Sequence[Mapping[str, float]], rows: Sequence[Row]) -> list[Problem]:
    """What the counters of each replica say against the rows that moved them: every item once, where it was counted."""
    problems = []
    if len({(row.arm, row.item, row.block) for row in rows}) != len(rows):
        problems.append(Problem("fail", f"{name}: an item was answered more than once"))
    for replica, share in enumerate(shares):
        own = [row for row in rows if row.replica == replica]
        problems += _against(f"{name}: replica {replica}", share, own)
    if stray := sorted({row.replica for row in rows} - set(range(len(shares)))):
        problems.append(Problem("fail", f"{name}: answers of replica {stray[0]}, found counters of {len(shares)}"))
    return problems


def prove_blocks(blocks: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> list[Problem]:
    """What the counters read at the borders of the blocks say: each block's arm counted its rows, and no other did.

    blocks: number, arm, moved (None: unarmed) and others of each.
    """
    by_block: dict[int, list[Row]] = {}
    for row in rows:
        if row.block is not None:
            by_block.setdefault(row.block, []).append(row)
    problems = []
    if unread := sorted(by_block.keys() - {block["block"] for block in blocks}):
        problems.append(Problem("fail", f"block {unread[0]}: counters: expected a reading on both sides, found none"))
    for block in blocks:
        label, own = f"block {block['block']} ({block['arm']})", by_block.get(block["block"], [])
        if strange := sorted({row.arm for row in own} - {block["arm"]}):
            problems.append(Problem("fail", f"{label}: answers of {strange[0]}"))
        if block["moved"] is not None:
            problems += _against(label, block["moved"], own)
        if block["others"]:
            problems.append(Problem("fail", f"{label}: counters of {block['others'][0]} moved too"))
    return problems


def _against(label: str, share: Mapping[str, float], rows: Sequence[Row]) -> list[Problem]:
    """Counters equal what the answers say, or exceed it where a failed request may have been counted too."""
    told, failed = _told([row for row in rows if row.error is None]), any(row.error for row in rows)
    return [
        Problem("fail", f"{label}: {field}: the answers say {told[field]}, the counters moved by {share[field]:g}")
        for field in COUNTED
        if share[field] < told[field] or (share[field] > told[field] and not failed)
    ]


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


def _counts(
    name: str, arm: Arm, rows: Sequence[Row], others: Sequence[Row], failed: int, requests: int
) -> list[Problem]:
    """Counters against answers: equal, or at least as many where a failed request may have been counted too.

    requests: that were counted here, and their steps elsewhere.
    """
    problems: list[Problem] = []
    told = _told([*rows, *others])
    told["requests"] += requests
    found = {field: moved(arm.counters_before, arm.counters_after, field) for field in COUNTED}
    if not any(found.values()):
        return [Problem("inconclusive", f"{name}: no counter of {arm.policy_key} moved: the policy never ran")]
    for field in COUNTED:
        if found[field] < told[field] or (found[field] > told[field] and not failed):
            text = f"the answers say {told[field]}, the counters moved by {found[field]:g}"
            problems.append(Problem("fail", f"{name}: {field}: {text}"))
    return [*problems, *_drafting(name, _told(rows))]


def _drafting(name: str, told: Mapping[str, int]) -> list[Problem]:
    """By the answers alone: without drafts there is nothing to accept."""
    if told["blocks"] and told["drafts_verified"]:
        return []
    return [Problem("inconclusive", f"{name}: no drafts were verified")]


def _totals(name: str, arm: Arm, rows: Sequence[Row], failed: int) -> list[str]:
    def went(counter: str) -> float:
        return moved(arm.counters_before, arm.counters_after, counter)

    if not any(went(counter) for counter in COUNTED):
        return []  # said already: the policy never ran
    drafts = went("strict_accepted") + went("relaxed")
    return totals(name, rows, went("committed_tokens"), drafts, went("regret_charged"), not failed)


def _rule(
    name: str, arm: Arm, policy: Policy | None, rows: Sequence[Row], sampled: int, repeated: bool
) -> list[Problem | None]:
    """What the policy itself promises."""
    problems: list[Problem | None] = []
    relaxed = moved(arm.counters_before, arm.counters_after, "relaxed")
    before, after = ((side or {}).get("fallbacks", {}) for side in (arm.counters_before, arm.counters_after))
    fallen = {reason: count - before.get(reason, 0) for reason, count in after.items() if count > before.get(reason, 0)}
    if sampled and policy is not None and (found := fallen.pop(SAMPLED_REQUEST, 0)) != sampled:
        text = f"{SAMPLED_REQUEST}: {sampled} were asked, the counter of fallbacks moved by {found}"
        problems.append(Problem("fail", f"{name}: {text}"))
    if fallen:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(fallen.items()))
        problems.append(Problem("fail", f"{name}: served by another rule ({reasons})"))
    if others := sorted({row.policy_key for row in rows} - {arm.policy_key}):
        problems.append(Problem("fail", f"{name}: answers under policy {others[0]!r}, expected {arm.policy_key!r}"))
    if policy is not None and policy.is_strict and relaxed:
        problems.append(Problem("fail", f"{name}: relaxed: expected 0, the counter moved by {relaxed:g}"))
    if policy is not None and not policy.is_lossless and not relaxed:
        problems.append(Problem("inconclusive", f"{name}: no mismatch was relaxed: the policy changed nothing"))
    steps, accepted = sum(row.steps for row in rows), sum(row.accepted for row in rows)
    if steps and accepted < MIN_ACCEPTED * steps:
        share = f"{accepted / steps:.2f} drafts accepted per step"
        problems.append(Problem("inconclusive", f"{name}: {share}, below {MIN_ACCEPTED}: is it this target's draft?"))
    if repeated:
        again = [row for row in rows if row.block]
        cached = sum(row.cached_tokens > 0 for row in again)
        if cached < CACHED_SHARE * len(again):
            text = f"expected some in {len(again)} repeated prompts, found them in {cached}: is the prefix cache on?"
            problems.append(Problem("inconclusive", f"{name}: cached prompt tokens: {text}"))
    elif any(row.cached_tokens for row in rows):
        problems.append(Problem("inconclusive", f"{name}: cached prompt tokens: expected 0, the prefix cache is on"))
    return problems
