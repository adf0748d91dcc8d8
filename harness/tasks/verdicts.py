"""Verdicts of a bench's arms: every judged change against its threshold, as one family of comparisons.

recipes/verdict names the thresholds. A change passes where its whole interval is on the right side, fails where all of
it is on the wrong one, and is inconclusive else. The intervals are Holm's: the more comparisons, the wider.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import stats
from harness.config import AGAIN
from harness.records.schema import Record
from harness.tasks.arms import Problem, policy_of

Interval = Callable[[float], stats.Estimate]  # of a change, by confidence


@dataclass(frozen=True)
class Claim:
    """arm: whose. criterion: field of the policy. change: fraction, with its interval at a confidence."""

    arm: str
    criterion: str
    change: Interval
    at_least: float
    at_most: float


def claims(record: Record, arm: str, changes: Mapping[str, Interval]) -> list[Claim]:
    """What the policy file asks of an arm. changes: `tps`, `accuracy`, `length`; an A/A row is judged elsewhere."""
    policy, asked = policy_of(record.arms[arm]), record.identity.config["verdict"]
    if arm.endswith(AGAIN):
        return []
    same = policy is None or policy.is_strict
    wanted = [("tps", "tps_cost" if same else "tps_gain", lambda limit: (limit, float("inf")))]
    if not same:
        wanted.append(("accuracy", "accuracy_drop", lambda limit: (-limit / 100, float("inf"))))
        wanted.append(("length", "length_change", lambda limit: (-limit, limit)))
    return [
        Claim(arm, name, changes[what], *bounds(asked[name]))
        for what, name, bounds in wanted
        if asked[name] is not None and what in changes
    ]


def decided(found: Sequence[Claim], alpha: float) -> dict[str, dict[str, Any]]:
    """By arm: outcome, reasons and, by criterion, the outcome and the interval it was decided on."""
    results = stats.step_down([(claim.change, claim.at_least, claim.at_most) for claim in found], alpha)
    verdicts: dict[str, dict[str, Any]] = {}
    for claim, (outcome, estimate) in zip(found, results, strict=True):
        own = verdicts.setdefault(claim.arm, {"reasons": [], "criteria": {}})
        own["criteria"][claim.criterion] = {"outcome": outcome, "interval": estimate}
        if outcome != "pass":
            own["reasons"].append(f"{claim.criterion}: {_told(claim, estimate)}")
    for own in verdicts.values():
        own["outcome"] = stats.combine([each["outcome"] for each in own["criteria"].values()])
    return verdicts


def _told(claim: Claim, found: stats.Estimate) -> str:
    unit = "pp" if claim.criterion == "accuracy_drop" else "%"
    low, high = 100 * claim.at_least, 100 * claim.at_most
    wanted = f"{low:+g} to {high:+g} {unit}" if high < float("inf") else f"at least {low:+g} {unit}"
    if found.n == 0:
        return f"expected {wanted}, found nothing measured"
    return f"expected {wanted}, found {100 * found.value:+.2f} {unit} [{100 * found.low:+.2f}, {100 * found.high:+.2f}]"


def problems(summary: Mapping[str, Any]) -> list[Problem]:
    """Of a summary's verdicts: what keeps the run from being a pass."""
    return [
        Problem(criterion["outcome"], f"{name}: {reason}")
        for name, arm in summary["arms"].items()
        for reason in arm.get("verdict", {}).get("reasons", [])
        for criterion in [arm["verdict"]["criteria"][reason.partition(":")[0]]]
    ]
