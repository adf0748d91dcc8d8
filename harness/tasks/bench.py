"""task=bench: arms interleaved item by item on one server, one request at a time; scored once the engine is down.

The order of the arms rotates with the item, so that no arm always follows the same one, and a machine that slows down
slows all of them. Counters are read before the first and after the last timed request. An engine with one policy per
server gets a server per arm, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.config import Config
from harness.publish.console import Bars, report
from harness.publish.tables import write
from harness.score import PARSER_VERSION
from harness.tasks import STATUS
from harness.tasks.arms import Plan, plan, servers
from harness.tasks.scoring import code_runner, score_rows
from harness.tasks.session import Session, session
from harness.tasks.summary import judge, summarize


def run(config: Config) -> int:
    groups = servers(config, plan(config))
    order = "arms rotate by item" if len(groups) == 1 else "one server per arm"
    workload = {"concurrency": 1, "order": order, "parsers": PARSER_VERSION}
    with session(config, [arm for arms in groups for arm in arms], workload) as this:
        for arms in groups:
            with this.serving(arms):
                warm_up(this, arms)
                with this.counted(arms):
                    measure(this, arms)
        record = this.run.record
        with code_runner(config, this.traffic) as runner:
            score_rows(this.traffic, this.run.rows, runner)
        record.summary = summarize(record, this.run.rows)
        record.gates, verdict = judge(record, this.run.rows)
        this.run.finish("complete", verdict)
    report(record, this.run.folder)
    write(config.results)
    return STATUS[verdict.outcome]


def warm_up(this: Session, arms: Sequence[Plan]) -> None:
    """Every arm on items that are never measured. An engine that cannot answer these is not worth measuring."""
    for item in this.traffic.warmup[: this.config.task.warmup]:
        for arm in arms:
            this.engine.client.generate(this.request(arm, item))


def measure(this: Session, arms: Sequence[Plan]) -> None:
    with Bars([arm.name for arm in arms], len(this.traffic.items)) as bars:
        for order, item in enumerate(this.traffic.items):
            turn = order % len(arms)
            for arm in (*arms[turn:], *arms[:turn]):
                row = this.ask(arm, item, order)
                this.run.append(row)
                bars.add(row)
