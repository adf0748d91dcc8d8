"""What no honest answer can be: limits of arithmetic and of the policy, row by row and against the counters.

Counters that agree with the answers say little where one program wrote both; these limits hold whoever wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from adapters.policy import Policy
from harness.records.schema import Row

SUM_TOLERANCE = 1e-5  # of nats added up in another order, relative and in nats
CLOCK_S, CLOCK_SHARE = 0.005, 0.01  # two clocks of one request, and the share by which they may run apart
ROUNDING_SHARE = 0.01  # answers that other batch shapes may round to another argmax; of few answers: none
EPSILON = 2.0**-24  # half a unit in the last place of float32, the ledger's arithmetic


def impossible(
    name: str, policy: Policy, rows: Sequence[Row], block_size: int | None, running: bool = False
) -> list[str]:
    """A line for each kind of limit that some answer breaks, with the first item that does.

    block_size: K, where it is known. running: steps and drafts are totals read while the engine adds to them.
    """
    checks: list[Callable[[Row], str | None]] = [
        _verified,
        _histogram,
        lambda row: _running(row, block_size) if running else _drafted(row, block_size),
        _clock,
        lambda row: _spent(row, policy),
        lambda row: _relaxed(row, policy),
    ]
    found = []
    for check in checks:
        told = [(row.item, text) for row in rows if (text := check(row)) is not None]
        if told:
            more = f" ({len(told)} answers)" if len(told) > 1 else ""
            found.append(f"{name}: {told[0][0]}: {told[0][1]}{more}")
    return found


def _verified(row: Row) -> str | None:
    """An id comes from the prefill, an accepted draft or the bonus of a step."""
    most = 1 + row.accepted + row.steps
    if len(row.output_ids) > most:
        return (
            f"output ids: expected at most 1 + {row.accepted} drafts + {row.steps} steps, found {len(row.output_ids)}"
        )
    if len(row.output_ids) > 1 and not row.steps:
        return f"steps: expected at least 1 for {len(row.output_ids)} output ids, found 0"
    return None


def _histogram(row: Row) -> str | None:
    if not row.histogram:
        return None
    steps, accepted = sum(row.histogram), sum(n * count for n, count in enumerate(row.histogram))
    if min(row.histogram) < 0 or (steps, accepted) != (row.steps, row.accepted):
        return f"histogram: expected {row.steps} steps and {row.accepted} accepted drafts, found {steps} and {accepted}"
    return None


def _drafted(row: Row, block_size: int | None) -> str | None:
    if not 0 <= row.accepted <= row.proposed:
        return f"accepted drafts: expected 0 to {row.proposed} (proposed), found {row.accepted}"
    if block_size is None:
        return None
    if row.proposed > block_size * row.steps:
        return f"drafts verified: expected at most {block_size} in each of {row.steps} steps, found {row.proposed}"
    if any(row.histogram[block_size + 1 :]):
        return f"histogram: expected at most {block_size} accepted drafts in a step, found {len(row.histogram) - 1}"
    return None


def _running(row: Row, block_size: int | None) -> str | None:
    """Of totals that another process reads one by one, as they lie in its memory, when it takes the last id.

    LightLLM adds a step to three of them in this order, before the step's ids are there: accepted drafts, verified
    rows, steps; they are read in that order, too. The last id is of some step f, and one more may be in flight by then:
    which steps are finished is known before the one after it starts. So each total is of f or f + 1 steps:

    - rows of f + 1 and steps of f: proposed (the difference) has K + 1 more than K per step; never more;
    - accepted of f + 1, rows of f, steps of f + 1: accepted exceeds proposed by the K of a step and the 1 of the other;
    - f + 1 whole steps: beyond the ids lie up to K of step f, cut at the end, and K + 1 of the step in flight.
    """
    if min(row.accepted, row.proposed) < 0:
        return f"accepted drafts, drafts verified: expected 0 or more, found {row.accepted}, {row.proposed}"
    if block_size is None:
        return None
    one = block_size + 1
    if row.accepted > min(row.proposed + one, block_size * (row.steps + 1)):
        most = f"{row.proposed} (proposed) + {one}, and at most {block_size} in each of {row.steps} + 1 steps"
        return f"accepted drafts: expected at most {most}, found {row.accepted}"
    if row.proposed > block_size * row.steps + one:
        most = f"{block_size} in each of {row.steps} steps + {one} of one in flight"
        return f"drafts verified: expected at most {most}, found {row.proposed}"
    if row.accepted + row.steps > len(row.output_ids) + block_size + one:
        most = f"{len(row.output_ids)} ids + {block_size} cut + {one} of one in flight"
        return f"accepted drafts + steps: expected at most {most}, found {row.accepted} + {row.steps}"
    return None


def _clock(row: Row) -> str | None:
    """The client waits for all of the time that the server says it took."""
    if row.server_s is None or row.server_s <= row.wall_s * (1 + CLOCK_SHARE) + CLOCK_S:
        return None
    return f"server time: expected at most the {row.wall_s:.4f} s that the client waited, found {row.server_s:.4f} s"


def _spent(row: Row, policy: Policy) -> str | None:
    """Exact but for the rounding of the ledger: of the budget to float32, and of each sum of nats."""
    budget = 0.0 if policy.is_strict or policy.rule != "asd" else policy.budget * (1 + EPSILON * (1 + row.relaxed))
    if not 0 <= row.spent <= budget:
        return f"spent: expected 0 to {budget:.7g} nats, found {row.spent:.7g}"
    if not row.regret >= 0 or not _close(row.regret, row.spent):
        return f"regret: expected the {row.spent:.7g} nats spent, found {row.regret:.7g}"
    if row.regret and not row.relaxed:
        return f"regret: expected 0 without a relaxed draft, found {row.regret:.7g}"
    return None


def _relaxed(row: Row, policy: Policy) -> str | None:
    most = 0 if policy.is_lossless else row.accepted
    if most and policy.max_mismatches is not None:
        most = min(most, policy.max_mismatches * row.steps)
    if not 0 <= row.relaxed <= most:
        return f"relaxed: expected 0 to {most}, found {row.relaxed}"
    return None


def totals(name: str, rows: Sequence[Row], committed: float, accepted: float, regret: float, exact: bool) -> list[str]:
    """What the answers say against counters that not every engine fills alike.

    committed: of committed_tokens, which may or may not hold the id of each prefill. accepted: of drafts committed,
    without those an end has cut. regret: charged. exact: no request failed, so nothing else was counted.
    """
    found = []
    ids, drafts, nats = sum(len(row.output_ids) for row in rows), sum(row.accepted for row in rows), _nats(rows)
    if committed < ids - len(rows) or (exact and committed > ids):
        found.append(f"committed_tokens: the answers have {ids} ids, the counter moved by {committed:g}")
    if exact and accepted > drafts:
        found.append(f"strict_accepted + relaxed: {drafts} drafts were accepted, the counters moved by {accepted:g}")
    if not (_close(regret, nats) or (regret > nats and not exact)):
        found.append(f"regret_charged: the answers say {nats:.7g}, the counter moved by {regret:.7g}")
    return [f"{name}: {text}" for text in found]


def _nats(rows: Sequence[Row]) -> float:
    return math.fsum(row.regret for row in rows)


def _close(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=SUM_TOLERANCE, abs_tol=SUM_TOLERANCE)


def contradictions(name: str, base: Sequence[Row], candidate: Sequence[Row], alone: bool) -> list[str]:
    """A relaxed draft that was committed is not strict's token there, so ids differ exactly where something relaxed.

    base: strict's rows. alone: one request at a time: else an answer's rounding depends on its neighbours', and one
    that relaxed nothing may differ too.
    """
    left = {row.item: row.output_ids for row in base if row.error is None}
    pairs = [(row, row.output_ids != left[row.item]) for row in candidate if row.error is None and row.item in left]
    allowed = int(ROUNDING_SHARE * len(pairs))
    silent = [row.item for row, changed in pairs if row.relaxed and not changed]
    unasked = [row.item for row, changed in pairs if changed and not row.relaxed]
    found = []
    if len(silent) > allowed or (silent and not any(changed for _, changed in pairs)):
        found.append((silent, "relaxed drafts and equal strict's"))
    if alone and len(unasked) > allowed:
        found.append((unasked, "differ from strict's and relaxed nothing"))
    return [f"{name}: {len(items)} of {len(pairs)} answers {text}, first {items[0]}" for items, text in found]
