"""A run's numbers as a pure function of its rows: computed after the run, and again when tables are checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from adapters.policy import Policy
from harness import stats
from harness.records.schema import Record, Row, Verdict
from harness.tasks.arms import Problem, prove, prove_replicas
from harness.tasks.limits import contradictions

OUTCOMES = ("correct", "wrong", "unparsed", "truncated")
MORE_LOOPS = 0.02  # share of items that may loop beyond the baseline's before a row is not publishable


def plain(value: Any) -> Any:
    """JSON values: dataclasses as objects, what is not finite as null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def by_arm(record: Record, rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if row.arm == name] for name in record.arms}


def summarize(record: Record, rows: Sequence[Row]) -> dict[str, Any]:
    """Per arm: its own numbers, and its change against the first arm over the items both answered.

    Only a bench has times: a gate may ask in lists, whose items have no wall of their own.
    """
    timed = record.task == "bench"
    arms = by_arm(record, rows)
    baseline = next(iter(arms), None)
    gpus = gpus_per_server(record)
    summary = {name: _arm(arm_rows, timed, gpus) for name, arm_rows in arms.items()}
    for name, arm_rows in arms.items():
        if baseline is not None and name != baseline:
            summary[name]["change"] = _change(arms[baseline], arm_rows, timed)
    return plain({"baseline": baseline, "arms": summary})


def gpus_per_server(record: Record) -> int:
    """GPUs that one request at a time keeps busy; 0: a CPU engine. Of an attached server: what its model asks for."""
    launched = record.launch or {}
    if "gpus" in launched:
        return launched["gpus"] // launched["replicas"]
    return record.identity.config["model"]["gpus"]


def _arm(rows: Sequence[Row], timed: bool, gpus: int) -> dict[str, Any]:
    answered = [row for row in rows if row.error is None]
    tokens, walls = [len(row.output_ids) for row in answered], [row.wall_s for row in answered]
    outcomes = Counter(row.outcome for row in answered if row.outcome in OUTCOMES)
    scored = sum(outcomes.values())
    return {
        "items": len(rows),
        "answered": len(answered),
        "errors": dict(sorted(Counter(row.error for row in rows if row.error).items())),
        "tokens": sum(tokens),
        "wall_s": math.fsum(walls) if timed else None,
        "tps": stats.ratio(tokens, walls) if timed else None,
        "tps_per_gpu": stats.ratio(tokens, [wall * gpus for wall in walls]) if timed and gpus else None,
        "wall_per_item": stats.ratio(walls, [1] * len(walls)) if timed else None,
        "tokens_per_item": stats.ratio(tokens, [1] * len(tokens)),
        "tokens_per_step": stats.tokens_per_step(tokens, [row.steps for row in answered]),
        "steps": sum(row.steps for row in answered),
        "drafts_verified": sum(row.proposed for row in answered),
        "drafts_accepted": sum(row.accepted for row in answered),
        "histogram": _histogram(answered),
        "relaxed": sum(row.relaxed for row in answered),
        "regret": math.fsum(row.regret for row in answered),
        "exhausted": sum(row.exhausted for row in answered),
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
        "not_scored": len(answered) - scored,
        "accuracy": stats.wilson(outcomes["correct"], scored),
        "loops": stats.loop_share([row.output_ids for row in answered]),
    }


def _histogram(rows: Sequence[Row]) -> list[int]:
    """steps by number of accepted drafts, over all rows."""
    width = max((len(row.histogram) for row in rows), default=0)
    return [sum(row.histogram[n] for row in rows if n < len(row.histogram)) for n in range(width)]


def _change(base: Sequence[Row], candidate: Sequence[Row], timed: bool) -> dict[str, Any]:
    left, right = _answered(base), _answered(candidate)
    pairs = [(left[item], right[item]) for item in left if item in right]
    tokens, walls = _columns(pairs)
    accuracy = stats.paired_accuracy(
        {row.item: row.outcome for row in base if row.outcome is not None or row.error},
        {row.item: row.outcome for row in candidate if row.outcome is not None or row.error},
    )
    loops = [
        sum(stats.find_loop(row.output_ids) is not None for row in side) for side in (left.values(), right.values())
    ]
    return {
        "items": len(pairs),
        "tps": stats.throughput_change(tokens[0], walls[0], tokens[1], walls[1]) if timed else None,
        "wall_per_item": stats.change(walls[0], walls[1]) if timed else None,
        "tokens_per_item": stats.change(tokens[0], tokens[1]),
        "accuracy": accuracy,
        "outputs_changed": sum(a.output_ids != b.output_ids for a, b in pairs),
        "degenerate": loops[1] - loops[0] > max(1, MORE_LOOPS * len(pairs)),
    }


def _answered(rows: Sequence[Row]) -> dict[str, Row]:
    return {row.item: row for row in rows if row.error is None}


def _columns(pairs: Sequence[tuple[Row, Row]]) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and walls of both sides."""
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    return [[len(row.output_ids) for row in side] for side in sides], [[row.wall_s for row in side] for side in sides]


def identity(base: Sequence[Row], candidate: Sequence[Row], expected: int) -> dict[str, Any]:
    """Complete id lists compared, item by item. first: the first divergence, for whoever has to find out why."""
    left = {row.item: row.output_ids for row in base if row.error is None}
    right = {row.item: row.output_ids for row in candidate if row.error is None}
    compared = [item for item in left if item in right]
    different = [item for item in compared if left[item] != right[item]]
    return plain(
        {
            "expected": expected,
            "compared": len(compared),
            "tokens": sum(len(left[item]) for item in compared),
            "mismatches": len(different),
            "bound": stats.mismatch_bound(len(different), len(compared)),
            "first": _divergence(different[0], left[different[0]], right[different[0]]) if different else None,
        }
    )


def _divergence(item: str, left: list[int], right: list[int], context: int = 4) -> dict[str, Any]:
    shared = zip(left, right, strict=False)
    position = next((i for i, (a, b) in enumerate(shared) if a != b), min(len(left), len(right)))
    span = slice(max(0, position - context), position + context + 1)
    return {"item": item, "position": position, "base": left[span], "candidate": right[span]}


def identity_problems(name: str, gate: Mapping[str, Any]) -> list[Problem]:
    """Passes only if everything expected was compared, there was something, and nothing differed."""
    if gate["mismatches"]:
        first = gate["first"]
        return [
            Problem(
                "fail",
                f"{name}: {gate['mismatches']} of {gate['compared']} outputs differ from strict, "
                f"first {first['item']} at token {first['position']}",
            )
        ]
    if gate["compared"] != gate["expected"] or not gate["compared"]:
        return [Problem("inconclusive", f"{name}: compared: expected {gate['expected']} > 0, found {gate['compared']}")]
    return []


def judge(record: Record, rows: Sequence[Row]) -> tuple[dict[str, Any], Verdict]:
    """Gates and verdict of a bench or gate, from the rows and the counters."""
    arms = by_arm(record, rows)
    size = record.identity.config["model"].get("block_size")
    problems = [problem for name, arm in record.arms.items() for problem in prove(name, arm, arms[name], size)]
    problems += _contradictions(record, arms)
    for name, shares in ((record.launch or {}).get("shards") or {}).items():
        problems += prove_replicas(name, shares, arms[name])
    gates: dict[str, Any] = {"armed": not problems}
    if {"strict", "asd-b0"} <= set(arms):
        gates["identity"] = identity(arms["strict"], arms["asd-b0"], record.arms["strict"].expected)
        problems += identity_problems("asd-b0", gates["identity"])
    if "control" in arms:
        gates["control"] = _control(record, arms)
        problems += _control_problems(gates["control"])
    if record.task == "bench":
        problems += _unbounded(arms)
    return gates, decide(problems)


def _contradictions(record: Record, arms: Mapping[str, list[Row]]) -> list[Problem]:
    """Of every arm with a budget. Only one request at a time is the same arithmetic as long as nothing is relaxed."""
    if "strict" not in arms:
        return []
    problems = []
    for name, arm in record.arms.items():
        policy = Policy.from_json(arm.policy)
        if policy.rule == "asd" and not policy.is_strict:
            texts = contradictions(name, arms["strict"], arms[name], alone=record.workload.get("concurrency") == 1)
            problems += [Problem("fail", text) for text in texts]
    return problems


def _unbounded(arms: Mapping[str, list[Row]]) -> list[Problem]:
    """A change without an interval is a number that says nothing: of one item, or of times that are none."""
    names = list(arms)
    problems = []
    for name in names[1:]:
        left, right = _answered(arms[names[0]]), _answered(arms[name])
        pairs = [(left[item], right[item]) for item in left if item in right]
        tokens, walls = _columns(pairs)
        tps = stats.throughput_change(tokens[0], walls[0], tokens[1], walls[1])
        if len(pairs) < 2 or not (math.isfinite(tps.low) and math.isfinite(tps.high)):
            text = f"{name}: tokens/s: expected an interval around the change, found none on {len(pairs)} items"
            problems.append(Problem("inconclusive", text))
    return problems


def _control(record: Record, arms: Mapping[str, list[Row]]) -> dict[str, Any]:
    """Whether a policy with a budget does change something: else equal ids would say nothing."""
    strict = {row.item: row.output_ids for row in arms["strict"] if row.error is None}
    rows = [row for row in arms["control"] if row.error is None and row.item in strict]
    return {
        "policy": record.arms["control"].policy_key,
        "items": len(rows),
        "outputs_changed": sum(row.output_ids != strict[row.item] for row in rows),
        "relaxed": sum(row.relaxed for row in rows),
    }


def _control_problems(control: Mapping[str, Any]) -> list[Problem]:
    if control["outputs_changed"]:
        return []
    text = f"control: {control['policy']} changed nothing on {control['items']} items: equal ids prove nothing"
    return [Problem("inconclusive", text)]


def decide(problems: Sequence[Problem]) -> Verdict:
    """One failure fails; one open question is inconclusive."""
    outcomes = {problem.outcome for problem in problems}
    outcome = "fail" if "fail" in outcomes else "inconclusive" if outcomes else "pass"
    return Verdict(outcome, list(dict.fromkeys(problem.text for problem in problems)))  # type: ignore[arg-type]
