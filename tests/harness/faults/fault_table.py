"""What the harness does about each way an engine can misbehave: the table that the tests run and the README shows.

`python tests/harness/faults/fault_table.py` writes the README beside this file again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from fake_engine import FAULTS  # noqa: E402

README = HERE / "README.md"
PROBES, WARM = 2, 6  # answers before the first measured one: of the probe, and two items in three arms
MIDDLE = PROBES + WARM + 4  # the fifth measured answer is the first that is wrong


@dataclass(frozen=True)
class Fault:
    """A bench of six items in three arms on an engine with a fault.

    after: answers before it shows. launched: only an engine that this run starts can have it. status: exit status.
    record: status of the record. rows: errors of the rows, by kind. said: words of the
    verdict or of the error, on stdout or stderr. rows of other kinds than these there must be none.
    """

    name: str
    status: int
    record: str
    said: str
    rows: tuple[tuple[str, int], ...] = ()
    after: int = MIDDLE
    launched: bool = False


TABLE = [
    Fault("none", 0, "complete", "verdict: pass"),
    Fault("slow", 0, "complete", "verdict: pass"),
    Fault("chunks", 0, "complete", "verdict: pass"),
    Fault("stubborn", 0, "complete", "verdict: pass", launched=True),
    Fault("flaky", 2, "complete", "asd: answers: expected 6, found 5, 1 failed (http)", rows=(("http", 1),)),
    Fault(
        "http",
        2,
        "failed",
        "5 requests failed in a row, the last one with http: /generate: status 500",
        rows=(("http", 5),),
    ),
    Fault(
        "hang",
        2,
        "failed",
        "5 requests failed in a row, the last one with timeout: /generate: no complete answer within",
        rows=(("timeout", 5),),
    ),
    Fault(
        "drip",
        2,
        "failed",
        "5 requests failed in a row, the last one with timeout: /generate: no complete answer within",
        rows=(("timeout", 5),),
    ),
    Fault("die", 2, "failed", "engine: exited with status -9", rows=(("connection", 5),), launched=True),
    Fault(
        "truncated",
        2,
        "failed",
        "5 requests failed in a row, the last one with connection: /generate: IncompleteRead",
        rows=(("connection", 5),),
    ),
    Fault(
        "cut",
        2,
        "failed",
        "5 requests failed in a row, the last one with connection: /generate: IncompleteRead",
        rows=(("connection", 5),),
    ),
    Fault(
        "garbled",
        2,
        "failed",
        "5 requests failed in a row, the last one with garbled: /generate: expected JSON",
        rows=(("garbled", 5),),
    ),
    Fault(
        "empty",
        2,
        "failed",
        "5 requests failed in a row, the last one with garbled: /generate: expected JSON, found b''",
        rows=(("garbled", 5),),
    ),
    Fault(
        "aborted",
        2,
        "failed",
        "5 requests failed in a row, the last one with aborted: /generate",
        rows=(("aborted", 5),),
    ),
    Fault("usage", 2, "failed", "output ids, completion_tokens says", rows=(("count", 5),)),
    Fault("no-usage", 2, "failed", "KeyError: 'completion_tokens'", rows=(("garbled", 5),)),
    Fault("no-ids", 2, "failed", "0 output ids, completion_tokens says 0", rows=(("count", 5),)),
    Fault("stray-id", 2, "failed", "expected ids up to 257 (vocabulary), found 100000", rows=(("garbled", 5),)),
    Fault("negative-id", 2, "failed", "output_ids[0]: expected an integer from 0 to", rows=(("garbled", 5),)),
    Fault("huge-id", 2, "failed", "output_ids[0]: expected an integer from 0 to", rows=(("garbled", 5),)),
    Fault("real-id", 2, "failed", "expected an integer from 0 to 2147483647, found 7.0", rows=(("garbled", 5),)),
    Fault("nan", 2, "failed", "regret: expected a finite number >= 0, found nan", rows=(("garbled", 5),)),
    Fault("late", 2, "failed", "e2e_latency: expected a finite number >= 0, found 'soon'", rows=(("garbled", 5),)),
    Fault("text-count", 2, "failed", "spec_verify_ct: expected an integer from 0 to", rows=(("garbled", 5),)),
    Fault("text-counter", 2, "failed", ".blocks: expected an integer from 0 to"),
    Fault("nonce", 2, "failed", "specaccept.nonce: expected", after=0, launched=True),
    Fault("unarmed", 2, "failed", "expected a snapshot under specaccept, found none (not armed)", after=0),
    Fault("files", 2, "failed", "adapter file adapters/policy.py differs from this checkout's", after=0),
    Fault("model", 2, "failed", "found 'another'", after=0),
    Fault("no-draft", 2, "failed", "found none: a policy has nothing to accept", after=0),
    Fault("other-draft", 2, "failed", "found 'another'", after=0),
    Fault("never-ready", 2, "failed", "not ready in time (engine.ready_timeout_s)", after=0, launched=True),
    Fault("restart", 2, "failed", "the adapter changed under the run: nonce"),
    Fault("swap", 2, "failed", "the server changed under the run"),
    Fault("swap-draft", 2, "failed", "the server changed under the run"),
    Fault("forgets", 1, "complete", "requests: the answers say 6, the counters moved by 1"),
    Fault("double", 1, "complete", "requests: the answers say 6, the counters moved by 11"),
    Fault("overcount", 1, "complete", "blocks: the answers say"),
    Fault("frozen", 1, "complete", "requests: the answers say 6, the counters moved by 1"),
    Fault("uncommitted", 1, "complete", "committed_tokens: the answers have"),
    Fault("uncharged", 1, "complete", "regret_charged: the answers say"),
    Fault("overaccepted", 1, "complete", "strict_accepted + relaxed: 99 drafts were accepted, the counters moved by"),
    Fault("fallback", 1, "complete", "served by another rule (sampled request:"),
    Fault("b0", 1, "complete", "outputs differ from strict"),
    Fault("restless", 1, "complete", "outputs differ from strict"),
    Fault("lenient", 1, "complete", "strict: relaxed: expected 0, the counter moved by"),
    Fault("silent", 1, "complete", "answers relaxed drafts and equal strict's"),
    Fault("unasked", 1, "complete", "answers differ from strict's and relaxed nothing"),
    Fault("overspent", 1, "complete", "spent: expected 0 to"),
    Fault("greedy", 1, "complete", "relaxed: expected 0 to 7, found"),
    Fault("impossible", 1, "complete", "output ids: expected at most 1 + 3 drafts + 1 steps, found"),
    Fault("histogram", 1, "complete", "histogram: expected 7 steps and 19 accepted drafts, found 8 and 27"),
    Fault("wide", 1, "complete", "histogram: expected at most 7 accepted drafts in a step, found 8"),
    Fault("clock", 1, "complete", "server time: expected at most the"),
    Fault("drafts", 2, "complete", "no drafts were verified", after=0),
    Fault("inert", 2, "complete", "asd: no mismatch was relaxed: the policy changed nothing"),
    Fault("cached", 2, "complete", "cached prompt tokens: expected 0, the prefix cache is on"),
]
STATUS = {0: "pass", 1: "fail", 2: "inconclusive or not run"}
HEAD = """# Faults

What a bench of six items in three arms makes of an engine that misbehaves: `fault_table.py`, which the tests run line
by line. This file is written by `python tests/harness/faults/fault_table.py`, and a test fails when it is not what that
writes. Most faults begin with the fifth measured answer. Whatever happens, the engine is stopped, what was measured is
kept, and a run that is not `complete` gives no row of a table. A `failed` run is continued with `resume=failed`.

| the engine | verdict | record | failed rows | what is said |
| --- | --- | --- | --- | --- |
"""


def markdown() -> str:
    lines = []
    for fault in TABLE:
        rows = ", ".join(f"{count} {kind}" for kind, count in fault.rows) or "none"
        lines.append(f"| {FAULTS[fault.name]} | {STATUS[fault.status]} | {fault.record} | {rows} | `{fault.said}` |\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    README.write_text(markdown())
