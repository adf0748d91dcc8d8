"""Table cells. Never blank: a value, or the word that says why there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.config import AGAIN
from harness.records.schema import Record
from harness.stats import Estimate

NOT_RUN = "not run"
UNKNOWN = "n/a"
NO_GPU = "no GPU"
NOT_SCORED = "not scored"
PER_GPU = "TPS per GPU"
SHARED = "shared steps"
WIDTH = "unsupported (verified width follows the load)"
ACCURACY = ("accuracy", "correct", "accuracy change", "accuracy change, 95 %", "flips", "McNemar p", "detectable")
TRIPLETS = "triplets kept"  # of a run in blocks: baseline, candidate, baseline
BY_SERVER = "TPS change, by server"  # of a run whose arms have several
BESIDE = "beside A/A"  # of a run with an arm that repeats the baseline's policy
MINUS = "\N{MINUS SIGN}"


def number(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def signed(value: float, digits: int, unit: str) -> str:
    text = f"{abs(value):.{digits}f}"
    sign = "" if float(text) == 0 else "+" if value > 0 else MINUS
    return f"{sign}{text}{unit}"


def change(estimate: Mapping[str, Any] | None, digits: int = 1, unit: str = " %") -> str:
    """`+4.5 %`: a fraction in percent, or n/a."""
    return UNKNOWN if not estimate or estimate["value"] is None else signed(100 * estimate["value"], digits, unit)


def interval(estimate: Mapping[str, Any] | None, digits: int = 1) -> str:
    """`[+4.1, +4.9]`: of that change, in the same unit."""
    if not estimate or estimate["value"] is None:
        return UNKNOWN
    if estimate["low"] is None or estimate["high"] is None:
        return "no interval"
    return f"[{signed(100 * estimate['low'], digits, '')}, {signed(100 * estimate['high'], digits, '')}]"


def percent(estimate: Mapping[str, Any] | None, digits: int = 1) -> str:
    return UNKNOWN if not estimate or estimate["value"] is None else f"{100 * estimate['value']:.{digits}f} %"


def identity(record: Record, arm: str) -> str:
    """The identity gate of one arm's row."""
    if follows_load(record):
        return WIDTH
    if gate := _gate(record, arm):
        if gate["mismatches"]:
            text = f"{arm}: {gate['mismatches']} of {gate['compared']} outputs differ"  # as the verdict would say it
            blamed = record.verdict is None or any(reason.startswith(text) for reason in record.verdict.reasons)
            return f"{'FAIL' if blamed else 'differ'} {gate['mismatches']}/{gate['compared']}"
        return f"{gate['compared']}/{gate['expected']} equal"
    if arm == record.summary.get("baseline"):
        return "baseline"
    if record.arms[arm].temperature > 0:
        return "sampled"
    differ = record.summary["arms"][arm].get("change", {})
    return f"{differ['outputs_changed']}/{differ['items']} differ" if differ else UNKNOWN


def _gate(record: Record, arm: str) -> Mapping[str, Any] | None:
    """Of an arm that promises the ids of another."""
    return record.gates.get("identity") if arm == "asd-b0" else record.gates.get("identities", {}).get(arm)


ALONE = "TPS: ids the engine returned over the wall time of the arm's own requests, one at a time on each replica. "
BLOCKS = (
    "TPS: ids the engine returned over the wall time of the arm's own blocks, several requests at a time. A change is "
    "the mean over blocks, each against the midpoint of the baseline's before and after it; a request in shared steps "
    "has no wall of its own. "
)
FOOTNOTE = (
    "* output tokens per verify step, bonus token included. Changes are against the first arm, intervals are 95 %, "
    "both paired by item. Detectable: the accuracy change that so many flips among so many items show with 80 % power; "
    "none: with so few flips, no change could be."
)
WITHIN = (
    " Beside A/A: within: the change lies inside the 95 % interval of the baseline's policy against itself, so no "
    "policy need have made it."
)
UNARMED = (
    " Unarmed: the engine without its adapter, steps as it counts them itself; one that counts the step in flight at "
    "the end of a request gives at least the tokens per step shown."
)


def arm_cells(record: Record, arm: str) -> dict[str, str]:
    """Every metric of one arm by its name, in the order of a table."""
    found = record.summary["arms"][arm]
    base = arm == record.summary["baseline"]
    differ = found.get("change") or {}
    paired = differ.get("accuracy")
    scored = sum(found["outcomes"].values())
    shared = found.get("wall_per_item") is None  # requests in common steps have no wall of their own

    def changed(estimate: Mapping[str, Any] | None, digits: int = 1, unit: str = " %") -> tuple[str, str]:
        return ("baseline",) * 2 if base else (change(estimate, digits, unit), interval(estimate, digits))

    tps, length = changed(differ.get("tps")), changed(differ.get("tokens_per_item"))
    wall = changed(differ.get("block_wall") if shared else differ.get("wall_per_item"))
    points = changed((paired or {}).get("change"), 2, " pp") if scored else (NOT_SCORED,) * 2
    outcomes = {name: str(count) if scored else NOT_SCORED for name, count in found["outcomes"].items()}
    values = {
        "TPS": number(found["tps"]["value"], 1),
        PER_GPU: number(found["tps_per_gpu"]["value"], 1) if found["tps_per_gpu"] else NO_GPU,
        "TPS change": tps[0],
        "TPS change, 95 %": tps[1],
        BY_SERVER: by_server(differ.get("tps_by_server"), base),
        BESIDE: beside(record, arm),
        TRIPLETS: triplets(found.get("triplets"), base),
        "wall per item, s": SHARED if shared else number(found["wall_per_item"]["value"], 3),
        "wall change": wall[0],
        "wall change, 95 %": wall[1],
        "length change": length[0],
        "length change, 95 %": length[1],
        "tokens per step *": number(found["tokens_per_step"]["value"]),
        "accuracy": percent(found["accuracy"]) if scored else NOT_SCORED,
        "correct": f"{found['outcomes']['correct']}/{scored}" if scored else NOT_SCORED,
        "accuracy change": points[0],
        "accuracy change, 95 %": points[1],
        "flips": flips(paired, base) if scored else NOT_SCORED,
        "McNemar p": p_value(paired, base) if scored else NOT_SCORED,
        "detectable": detectable(paired, base) if scored else NOT_SCORED,
        "unparsed": outcomes["unparsed"],
        "truncated": outcomes["truncated"],
        "left out": _left_out(found, scored),
        "loops": "more" if differ.get("degenerate") else "none more" if differ else "baseline" if base else UNKNOWN,
        "identity": identity(record, arm),
        "verdict": verdict(record, arm),
    }
    return values | (dict.fromkeys(ACCURACY, WIDTH) if follows_load(record) else {})


def by_server(found: Sequence[Mapping[str, Any]] | None, base: bool = False) -> str:
    """`-0.4 %; -1.6 %`: of each server's own items."""
    return "; ".join(map(change, found)) if found else "baseline" if base else NOT_RUN


def beside(record: Record, arm: str) -> str:
    """Whether a change of speed lies inside the interval that the baseline's policy shows against itself."""
    if arm == record.summary["baseline"]:
        return "baseline"
    arms = record.summary["arms"]
    repeat = next((name for name in arms if name.endswith(AGAIN)), None)
    if repeat is None:
        return NOT_RUN
    own, same = ((arms[name].get("change") or {}).get("tps") for name in (arm, repeat))
    if arm == repeat:
        return "A/A itself"
    if not own or not same or None in (own["value"], same["low"], same["high"]):
        return UNKNOWN
    return "within" if same["low"] <= own["value"] <= same["high"] else "beyond"


def triplets(found: Mapping[str, Any] | None, base: bool) -> str:
    """`5/6 within 3 %`: the changes are means over those whose two baselines agree."""
    if found is None:
        return "baseline" if base else NOT_RUN
    kept = len(found["gains"]) - len(found["rejected"])
    return f"{kept}/{len(found['gains'])} within {100 * found['max_drift']:g} %"


def verdict(record: Record, arm: str) -> str:
    """The arm's own where the record has one, else the run's."""
    own = record.summary["arms"][arm].get("verdict")
    return own["outcome"] if own else record.verdict.outcome if record.verdict else "none"


def spread(estimate: Mapping[str, Any] | None, digits: int) -> str:
    """`[332.1, 341.0]`: a value's interval in its own unit."""
    if not estimate or estimate["low"] is None or estimate["high"] is None:
        return "no interval"
    return f"[{estimate['low']:,.{digits}f}, {estimate['high']:,.{digits}f}]"


def flips(paired: Mapping[str, Any] | None, base: bool = False) -> str:
    """`11 lost, 6 won`: items that the baseline alone had right, and that the candidate alone had."""
    return f"{paired['lost']} lost, {paired['gained']} won" if paired else "baseline" if base else UNKNOWN


def p_value(paired: Mapping[str, Any] | None, base: bool = False) -> str:
    """Exact, two-sided; Holm's where several arms are compared and the record has it."""
    if not paired:
        return "baseline" if base else UNKNOWN
    holm = paired.get("p_holm")
    return f"{paired['p_value']:.3f}" if holm is None else f"{holm:.3f} (Holm)"


def detectable(paired: Mapping[str, Any] | None, base: bool = False) -> str:
    """`1.25 pp`: the change of accuracy that so many items with so many flips show with 80 % power."""
    if not paired:
        return "baseline" if base else UNKNOWN
    found = paired["smallest_detectable"]
    return "none" if found is None else f"{100 * found:.2f} pp"


def follows_load(record: Record) -> bool:
    """Such an engine verifies more or fewer drafts as its load says, so no two answers need agree."""
    return record.identity.config["engine"].get("fixed_width") is False


def _left_out(found: Mapping[str, Any], scored: int) -> str:
    """Requests without an answer, by kind, and answers without a score: in no number above."""
    flags = [f"{count} {kind}" for kind, count in found["errors"].items()]
    if scored and found["not_scored"]:
        flags.append(f"{found['not_scored']} not scored")
    return ", ".join(flags) or "none"


def bench_table(record: Record) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a metric per row, an arm per column, so that three arms fit 80 characters."""
    arms = {arm: arm_cells(record, arm) for arm in record.arms}
    metrics = next(iter(arms.values()))
    rows = [[metric, *(cells[metric] for cells in arms.values())] for metric in metrics]
    absent = {PER_GPU: {NO_GPU}, **{name: {NOT_RUN, "baseline"} for name in (TRIPLETS, BY_SERVER, BESIDE)}}
    return ["metric", *arms], [row for row in rows if not set(row[1:]) <= absent.get(row[0], set())]


def footnote(rows: Sequence[Sequence[str]], arms: Sequence[str] = (), record: Record | None = None) -> str:
    """What the metrics of a table are; record: and what its servers make of them."""
    names = {row[0] for row in rows}
    return (
        (BLOCKS if TRIPLETS in names else ALONE)
        + FOOTNOTE
        + (" Per GPU: over the GPUs of one replica." if PER_GPU in names else "")
        + (WITHIN if BESIDE in names else "")
        + (UNARMED if "unarmed" in arms else "")
        + (f" {note}" if record is not None and (note := servers(record)) else "")
    )


def servers(record: Record) -> str:
    """What a reader must know of the servers behind the intervals of speed; empty where one answers all arms."""
    groups, count = record.workload.get("servers") or [], record.workload.get("replicas", 1)
    if count > 1:
        return (
            f"Each arm is answered by {count} servers in turn, item by item. Intervals of speed resample servers, then "
            "their items; of so few servers they are rough, so each one's own change stands beside."
        )
    if len(groups) < 2:
        return ""
    baseline = record.summary["baseline"]
    first = next(group for group in groups if baseline in group)
    other = sorted(name for group in groups for name in group if name.endswith(AGAIN) and name not in first)
    seen = f"{other[0]}, a second server of the baseline, shows once what that makes" if other else "no A/A shows it"
    return (
        "Arms on servers of their own: the interval over items does not hold what one server process differs from the "
        f"next; {seen}."
    )


def per_step(estimate: Estimate) -> str:
    """`3.62 [3.50, 3.74]`"""
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return f"{estimate.value:.2f}, no interval"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def with_interval(estimate: Mapping[str, Any] | None, digits: int) -> str:
    """`3.62 [3.50, 3.74]` of a record's estimate."""
    if not estimate or estimate["value"] is None:
        return "no blocks"
    return f"{estimate['value']:.{digits}f} {spread(estimate, digits)}"


def setting(value: Any) -> str:
    """What a sweep set; null is no limit."""
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
