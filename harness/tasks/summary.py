"""A run's numbers as a pure function of its rows: computed after the run, and again when tables are checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import fisher_exact

from harness import stats
from harness.config import AGAIN, UNARMED
from harness.records.schema import Record, Row, Verdict
from harness.tasks import blocks, verdicts
from harness.tasks.arms import Problem, policy_of, prove, prove_blocks, prove_replicas, prove_sampled, sharing
from harness.tasks.blocks import Timed
from harness.tasks.limits import contradictions

OUTCOMES = ("correct", "wrong", "unparsed", "truncated")
DETERMINISTIC = ("enable-deterministic-inference", "deterministic")  # flags of SGLang, of the embedded engine
RUNNING_TOTALS = ("lightllm",)  # APIs whose own counters of a request are read while its last steps are added
MORE_MISMATCHES = 0.01  # level at which an arm differs from the baseline more than the baseline from itself
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


def judged(record: Record) -> bool:
    """Whether the record names what is a pass: older ones do not, and are read as they were written."""
    return "verdict" in record.identity.config


def fixed_width(record: Record) -> bool:
    """Whether as many drafts are verified whatever the load: else no arm is an identity or accuracy arm."""
    return record.identity.config["engine"].get("fixed_width", True)


def summarize(record: Record, rows: Sequence[Row]) -> dict[str, Any]:
    """Per arm: its own numbers, and its change against the first arm over the items both answered.

    Only a bench has times: a gate may ask in lists, whose items have no wall of their own.
    """
    arms = by_arm(record, rows)
    clock = Clock.of(record, rows)
    baseline = clock.baseline or None
    summary = {name: _arm(name, arm_rows, clock) for name, arm_rows in arms.items()}
    others = [name for name in list(arms)[1:] if name not in record.workload.get("mixed", {})]
    for name in others:
        summary[name]["change"] = _change(record, arms[clock.baseline], arms[name], name, clock)
        if clock.walls is not None:
            summary[name]["triplets"] = clock.gain(name)
    if judged(record) and record.task == "bench":
        _judge(record, arms, summary, others, clock)
    return plain({"baseline": baseline, "arms": summary})


def _judge(
    record: Record, arms: Mapping[str, list[Row]], summary: dict[str, Any], others: Sequence[str], clock: Clock
) -> None:
    """Verdicts of the arms, and their accuracy tests corrected for how many there are."""
    claims: list[verdicts.Claim] = []
    for name in others:
        base, candidate = arms[clock.baseline], arms[name]
        pairs = _pairs(base, candidate)
        changes: dict[str, verdicts.Interval] = {
            "tps": partial(_tps_change, clock, pairs, name),
            "length": partial(_length_change, pairs),
        }
        if any(summary[name]["outcomes"].values()) and fixed_width(record):
            changes["accuracy"] = partial(_accuracy_change, base, candidate)
        claims += verdicts.claims(record, name, changes)
    for name, verdict in verdicts.decided(claims, record.identity.config["verdict"]["alpha"]).items():
        summary[name]["verdict"] = verdict
    tested = [name for name in others if not name.endswith(AGAIN)]
    found = [summary[name]["change"]["accuracy"] for name in tested]
    for accuracy, p in zip(found, stats.holm([each["p_value"] for each in found]), strict=True):
        accuracy["p_holm"] = p


@dataclass(frozen=True)
class Clock:
    """What a run's times are of. timed: false: of nothing. walls: of blocks; None: of requests, one at a time.

    servers: of each arm, which share its items.
    """

    baseline: str
    timed: bool
    gpus: int
    max_drift: float
    walls: list[Timed] | None
    servers: int = 1

    @classmethod
    def of(cls, record: Record, rows: Sequence[Row]) -> Clock:
        drift = record.identity.config.get("verdict", {}).get("drift", stats.MAX_DRIFT)
        found = blocks.timed(rows) if blocks.in_blocks(rows) else None
        first, servers = next(iter(record.arms), ""), record.workload.get("replicas", 1)
        return cls(first, record.task == "bench", gpus_per_server(record), drift, found, servers)

    def grouped(self, rows: Sequence[Row]) -> dict[str, list[int]]:
        """For an interval: the server of each row, where there are several."""
        return {"servers": [row.replica for row in rows]} if self.servers > 1 else {}

    def triplets(self, arm: str) -> list[tuple[Timed, Timed, Timed]]:
        return blocks.triplets(self.walls or [], self.baseline, arm)

    def gain(self, arm: str, confidence: float = stats.CONFIDENCE) -> stats.TripletGain:
        return blocks.gain(self.triplets(arm), self.max_drift, confidence)


def gpus_per_server(record: Record) -> int:
    """GPUs that one request at a time keeps busy; 0: a CPU engine. Of an attached server: what its model asks for."""
    launched = record.launch or {}
    if "gpus" in launched:
        return launched["gpus"] // launched["replicas"]
    return record.identity.config["model"]["gpus"]


def _arm(name: str, rows: Sequence[Row], clock: Clock) -> dict[str, Any]:
    """tokens, steps, drafts: of every answer. tokens_per_item, accuracy, outcomes: of the first one to each item."""
    answers = [row for row in rows if row.error is None]
    answered = list(_answered(rows).values())
    again = {"clusters": [row.item for row in answers]} if len(answers) > len(answered) else {}
    tokens, lengths = [len(row.output_ids) for row in answers], [len(row.output_ids) for row in answered]
    outcomes = Counter(row.outcome for row in answered if row.outcome in OUTCOMES)
    scored = sum(outcomes.values())
    return {
        "items": len({row.item for row in rows}),
        "answered": len(answered),
        "errors": dict(sorted(Counter(row.error for row in rows if row.error).items())),
        "tokens": sum(tokens),
        **_times(name, answers, tokens, clock),
        "tokens_per_item": stats.ratio(lengths, [1] * len(lengths)),
        "tokens_per_step": stats.tokens_per_step(tokens, [row.steps for row in answers], **again),
        "steps": sum(row.steps for row in answers),
        "drafts_verified": sum(row.proposed for row in answers),
        "drafts_accepted": sum(row.accepted for row in answers),
        "histogram": _histogram(answers),
        "relaxed": sum(row.relaxed for row in answers),
        "regret": math.fsum(row.regret for row in answers),
        "exhausted": sum(row.exhausted for row in answers),
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
        "not_scored": len(answered) - scored,
        "accuracy": stats.wilson(outcomes["correct"], scored),
        "loops": stats.loop_share([row.output_ids for row in answered]),
    }


def _times(name: str, rows: Sequence[Row], tokens: Sequence[int], clock: Clock) -> dict[str, Any]:
    """Of requests that share steps there is no wall per item: how long one waited says little of what it cost."""
    if not clock.timed:
        return dict.fromkeys(("wall_s", "tps", "tps_per_gpu", "wall_per_item"))
    walls = [row.wall_s for row in rows]
    if clock.walls is not None:
        return {
            "wall_s": blocks.wall(clock.walls, name),
            "tps": blocks.rate(clock.walls, name),
            "tps_per_gpu": blocks.rate(clock.walls, name, clock.gpus) if clock.gpus else None,
            "wall_per_item": None,
            "latency_per_item": stats.ratio(walls, [1] * len(walls), clusters=[row.item for row in rows]),
            "blocks": sum(block.arm == name for block in clock.walls),
        }
    own = clock.grouped(rows)
    return {
        "wall_s": math.fsum(walls),
        "tps": stats.ratio(tokens, walls, **own),
        "tps_per_gpu": stats.ratio(tokens, [wall * clock.gpus for wall in walls], **own) if clock.gpus else None,
        "wall_per_item": stats.ratio(walls, [1] * len(walls), **own),
    }


def _histogram(rows: Sequence[Row]) -> list[int]:
    """steps by number of accepted drafts, over all rows."""
    width = max((len(row.histogram) for row in rows), default=0)
    return [sum(row.histogram[n] for row in rows if n < len(row.histogram)) for n in range(width)]


def _change(record: Record, base: Sequence[Row], candidate: Sequence[Row], name: str, clock: Clock) -> dict[str, Any]:
    pairs = _pairs(base, candidate)
    tokens, walls = _columns(pairs)
    accuracy = _accuracy(base, candidate)
    loops = [sum(stats.find_loop(row.output_ids) is not None for row in side) for side in zip(*pairs, strict=True)]
    found: dict[str, Any] = {
        "items": len(pairs),
        "tps": _tps_change(clock, pairs, name) if clock.timed else None,
        "wall_per_item": stats.change(walls[0], walls[1], **clock.grouped([base for base, _ in pairs]))
        if clock.timed and clock.walls is None
        else None,
        "tokens_per_item": stats.change(tokens[0], tokens[1]),
        "accuracy": asdict(accuracy),
        "outputs_changed": sum(a.output_ids != b.output_ids for a, b in pairs),
        "degenerate": bool(loops)
        and "fixed_tokens" not in record.workload
        and loops[1] - loops[0] > max(1, _loops(record) * len(pairs)),
    }
    if clock.timed and clock.walls is not None:
        found["block_wall"] = blocks.wall_change(clock.triplets(name), clock.gain(name))
    if clock.timed and clock.servers > 1:
        by_server = [[pair for pair in pairs if pair[0].replica == server] for server in range(clock.servers)]
        found["tps_by_server"] = [_tps_change(replace(clock, servers=1), own, name) for own in by_server]
    return found


def _loops(record: Record) -> float:
    return record.identity.config.get("verdict", {}).get("loops", MORE_LOOPS)


def _tps_change(
    clock: Clock, pairs: Sequence[tuple[Row, Row]], name: str, confidence: float = stats.CONFIDENCE
) -> stats.Estimate:
    if clock.walls is not None:
        return clock.gain(name, confidence).gain
    tokens, walls = _columns(pairs)
    own = clock.grouped([base for base, _ in pairs])
    return stats.throughput_change(tokens[0], walls[0], tokens[1], walls[1], confidence=confidence, **own)


def _length_change(pairs: Sequence[tuple[Row, Row]], confidence: float) -> stats.Estimate:
    tokens, _ = _columns(pairs)
    return stats.change(tokens[0], tokens[1], confidence=confidence)


def _accuracy_change(base: Sequence[Row], candidate: Sequence[Row], confidence: float) -> stats.Estimate:
    return _accuracy(base, candidate, confidence).change


def _accuracy(
    base: Sequence[Row], candidate: Sequence[Row], confidence: float = stats.CONFIDENCE
) -> stats.PairedAccuracy:
    left, right = (
        {row.item: row.outcome for row in _firsts(side) if row.outcome is not None or row.error}
        for side in (base, candidate)
    )
    return stats.paired_accuracy(left, right, confidence)


def _firsts(rows: Sequence[Row]) -> list[Row]:
    """The first row of each item: the baseline of a schedule of blocks answers an item several times."""
    found: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.block or 0) if blocks.in_blocks(rows) else rows:
        found.setdefault(row.item, row)
    return list(found.values())


def _answered(rows: Sequence[Row]) -> dict[str, Row]:
    return {row.item: row for row in _firsts([row for row in rows if row.error is None])}


def _pairs(base: Sequence[Row], candidate: Sequence[Row]) -> list[tuple[Row, Row]]:
    left, right = _answered(base), _answered(candidate)
    return [(left[item], right[item]) for item in left if item in right]


def _columns(pairs: Sequence[tuple[Row, Row]]) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and walls of both sides."""
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    return [[len(row.output_ids) for row in side] for side in sides], [[row.wall_s for row in side] for side in sides]


def identity(base: Sequence[Row], candidate: Sequence[Row], expected: int) -> dict[str, Any]:
    """Complete id lists compared, item by item. first: the first divergence, for whoever has to find out why."""
    left = {item: row.output_ids for item, row in _answered(base).items()}
    right = {item: row.output_ids for item, row in _answered(candidate).items()}
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


def identity_problems(
    name: str,
    gate: Mapping[str, Any],
    base: str = "strict",
    repeat: Mapping[str, Any] | None = None,
    exact: bool = True,
) -> list[Problem]:
    """Passes only if everything expected was compared, there was something, and nothing differed.

    base: the baseline. exact: false: batches are not reproducible, so a difference may be rounding. repeat: then the
    baseline against itself, where it answered twice: as much as it differs, another arm may.
    """
    if gate["mismatches"]:
        first = gate["first"]
        text = (
            f"{name}: {gate['mismatches']} of {gate['compared']} outputs differ from {base}, "
            f"first {first['item']} at token {first['position']}"
        )
        if not exact and repeat is not None:
            own = f"{base}'s own answers differ in {repeat['mismatches']} of {repeat['compared']}"
            return [Problem("fail", f"{text}; {own}")] if _more(gate, repeat) else []
        if not exact:
            return [Problem("inconclusive", f"{text}; batches are not reproducible here: it may be rounding")]
        return [Problem("fail", text)]
    if gate["compared"] != gate["expected"] or not gate["compared"]:
        return [Problem("inconclusive", f"{name}: compared: expected {gate['expected']} > 0, found {gate['compared']}")]
    return []


def _more(gate: Mapping[str, Any], repeat: Mapping[str, Any]) -> bool:
    """Whether an arm differs from the baseline in more items than the baseline from itself (Fisher, one-sided, 1 %)."""
    table = [[side["mismatches"], side["compared"] - side["mismatches"]] for side in (gate, repeat)]
    return bool(fisher_exact(np.array(table), alternative="greater").pvalue < MORE_MISMATCHES)


def judge(record: Record, rows: Sequence[Row]) -> tuple[dict[str, Any], Verdict]:
    """Gates and verdict of a bench or gate, from the rows and the counters."""
    arms, shared = by_arm(record, rows), sharing(record)
    problems = [problem for name in arms for problem in _proof(record, arms, shared, name)]
    problems += _contradictions(record, arms)
    launched = record.launch or {}
    for name, shares in (launched.get("shards") or {}).items():
        if policy_of(record.arms[name]) is not None:
            own = [*arms[name], *(row for other in shared.get(name, []) for row in arms[other])]
            problems += prove_replicas(name, shares, own)
    if record.task == "bench" and blocks.in_blocks(rows):
        problems += prove_blocks(launched.get("blocks") or [], rows)
    gates: dict[str, Any] = {"armed": not problems}
    problems += _identities(record, arms, gates)
    if "control" in arms:
        gates["control"] = _control(record, arms)
        problems += _control_problems(gates["control"])
    if fixed := record.workload.get("fixed_tokens"):
        problems += _unequal(arms, fixed)
    if record.task == "bench":
        problems += _unbounded(record, arms, rows)
        if judged(record):
            problems += [*_aa(record, arms, rows), *verdicts.problems(summarize(record, rows))]
    if "stopped" in record.workload:
        problems.append(Problem("inconclusive", f"stopped {record.workload['stopped']}"))
    return gates, decide(problems)


def _proof(record: Record, arms: Mapping[str, list[Row]], shared: Mapping[str, list[str]], name: str) -> list[Problem]:
    arm, mixed, config = record.arms[name], record.workload.get("mixed", {}), record.identity.config
    size = config["model"].get("block_size")
    running = policy_of(arm) is None and config["engine"].get("api") in RUNNING_TOTALS
    alone = not config["engine"].get("per_request_policy", True)  # a server has one policy, for whatever is asked
    if name in mixed and (alone or policy_of(arm) is None):
        return prove_sampled(name, arm, arms[name], size, running)
    others = [row for other in shared.get(name, []) for row in arms[other]]
    sampled = [row for other, beside in mixed.items() if alone and beside == name for row in arms[other]]
    return prove(name, arm, arms[name], size, others, sampled, record.workload.get("passes", 1) > 1, running)


def _identities(record: Record, arms: Mapping[str, list[Row]], gates: dict[str, Any]) -> list[Problem]:
    """Every greedy arm that promises the baseline's ids, against it: an engine without its adapter, else strict."""
    base = UNARMED if UNARMED in arms else "strict"
    if base not in arms or record.arms[base].temperature > 0 or not fixed_width(record):
        return []
    greedy = {name: policy_of(arm) for name, arm in record.arms.items() if arm.temperature == 0}
    same = [name for name, policy in greedy.items() if policy is None or policy.is_strict]
    wanted = [name for name in same if name != base and (name == "asd-b0" or judged(record))]
    count = len(record.workload["items"])
    found = {name: identity(arms[base], arms[name], count) for name in wanted}
    repeat, again = None, {}
    if blocks.in_blocks(arms[base]):
        gates["repeat"] = identity(arms[base], _seconds(arms[base]), count)
        if record.task == "bench":
            repeat = gates["repeat"]
        else:  # every arm answered twice, the second time from the prefix cache
            seconds = {name: _seconds(arms[name]) for name in (base, *wanted)}
            again = {name: identity(seconds[base], seconds[name], count) for name in wanted}
            gates["identity_repeated"] = again
    walked = record.task == "gate" and "asd-b0" not in found  # a gate of the budget that no mismatch may use
    candidate = "asd-m0" if walked else "asd-b0"
    if candidate in found:
        gates["identity"] = found[candidate]
    if others := {name: gate for name, gate in found.items() if name != candidate}:
        gates["identities"] = others
    exact = reproducible(record)
    pairs = [*found.items(), *((f"{name}, repeated", gate) for name, gate in again.items())]
    return [problem for name, gate in pairs for problem in identity_problems(name, gate, base, repeat, exact)]


def _seconds(rows: Sequence[Row]) -> list[Row]:
    """The second answer to each item."""
    first = {id(row) for row in _firsts([row for row in rows if row.error is None])}
    return _firsts([row for row in rows if row.error is None and id(row) not in first])


def reproducible(record: Record) -> bool:
    """Whether equal token streams make equal arithmetic: one request at a time, lists that are scheduled in order, or
    an engine told to be deterministic."""
    ordered = str(record.workload.get("order", "")).startswith("lists")
    flags = record.identity.config["engine"].get("flags") or {}
    return record.workload.get("concurrency") == 1 or ordered or any(flags.get(name) is True for name in DETERMINISTIC)


def _contradictions(record: Record, arms: Mapping[str, list[Row]]) -> list[Problem]:
    """Of every arm with a budget. Only one request at a time is the same arithmetic as long as nothing is relaxed."""
    base = "strict" if "strict" in arms else UNARMED
    if base not in arms or not fixed_width(record):
        return []
    problems = []
    strict = list(_answered(arms[base]).values())
    for name, arm in record.arms.items():
        policy = policy_of(arm)
        if policy is not None and arm.temperature == 0 and not policy.is_strict:
            texts = contradictions(name, strict, arms[name], alone=record.workload.get("concurrency") == 1)
            problems += [Problem("fail", text) for text in texts]
    return problems


def _unbounded(record: Record, arms: Mapping[str, list[Row]], rows: Sequence[Row]) -> list[Problem]:
    """A change without an interval is a number that says nothing: of one item, or of times that are none."""
    clock = Clock.of(record, rows)
    problems = []
    for name in list(arms)[1:]:
        pairs = _pairs(arms[clock.baseline], arms[name])
        tps = _tps_change(clock, pairs, name)
        if len(pairs) < 2 or not (math.isfinite(tps.low) and math.isfinite(tps.high)):
            on = f"{len(pairs)} items"
            if clock.walls is not None:
                found = clock.gain(name)
                limit = f"{100 * found.max_drift:g} %"
                on = f"{tps.n} blocks, {len(found.rejected)} left out where the baseline moved by more than {limit}"
            text = f"{name}: tokens/s: expected an interval around the change, found none on {on}"
            problems.append(Problem("inconclusive", text))
    return problems


def _unequal(arms: Mapping[str, list[Row]], tokens: int) -> list[Problem]:
    """Of fixed work every answer has the ids that were asked for."""
    found = []
    for name, rows in arms.items():
        other = [row for row in rows if row.error is None and len(row.output_ids) != tokens]
        if other:
            text = f"{name}: fixed work: expected {tokens} ids, found {len(other[0].output_ids)} for {other[0].item}"
            found.append(Problem("fail", f"{text} ({len(other)} answers)"))
    return found


def _aa(record: Record, arms: Mapping[str, list[Row]], rows: Sequence[Row]) -> list[Problem]:
    """The baseline's policy against itself must not differ: else no other change of this run says what made it."""
    clock = Clock.of(record, rows)
    problems = []
    for name in arms:
        tps = _tps_change(clock, _pairs(arms[clock.baseline], arms[name]), name) if name.endswith(AGAIN) else None
        if tps is not None and not tps.low <= 0 <= tps.high:
            found = f"{100 * tps.value:+.2f} % [{100 * tps.low:+.2f}, {100 * tps.high:+.2f}]"
            text = f"{name}: tokens/s: expected an interval around 0 for the same policy twice, found {found}"
            problems.append(Problem("inconclusive", text))
    return problems


def _control(record: Record, arms: Mapping[str, list[Row]]) -> dict[str, Any]:
    """Whether a policy with a budget does change something: else equal ids would say nothing."""
    base = UNARMED if UNARMED in arms else "strict"
    strict = {item: row.output_ids for item, row in _answered(arms[base]).items()}
    rows = [row for item, row in _answered(arms["control"]).items() if item in strict]
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
