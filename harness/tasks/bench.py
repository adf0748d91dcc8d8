"""task=bench: arms against each other on the same items, in turn; scored once the engines are down.

One request at a time, arms alternate item by item, and their order rotates with the item, so that no arm always follows
the same one and a machine that slows down slows all of them. Requests that share steps cannot be told apart in time:
above concurrency 1 arms alternate in short blocks (schedule.py). Arms with servers of their own alternate all the same
where those are up together; only one is asked at a time. Else the servers run one after another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle, islice

from harness.config import Config
from harness.drive import drive
from harness.publish.console import Bars, report
from harness.publish.tables import write
from harness.records import Row
from harness.score import PARSER_VERSION
from harness.tasks import STATUS
from harness.tasks.arms import Plan, plan, rounds
from harness.tasks.errors import TaskError
from harness.tasks.schedule import TIMES, Block, answers, blocks
from harness.tasks.scoring import code_runner, score_rows
from harness.tasks.session import Session, session
from harness.tasks.summary import judge, summarize
from harness.traffic import Item


def run(config: Config) -> int:
    arms = plan(config)
    if config.task.aa:
        arms.append(arms[0].again())
    turns = rounds(config, arms)
    arms = [arm for groups in turns for group in groups for arm in group] if len(turns) > 1 else arms
    count = config.task.concurrency or 1
    if count > 1 and len(turns) > 1:
        raise TaskError("task.concurrency: blocks alternate over servers that are up together: launch.together=true")
    with session(config, arms, workload(config, turns, count)) as this:
        if count > 1:
            for name, expected in answers(arms, len(this.traffic.items)).items():
                this.run.record.arms[name].expected = expected
        for groups in turns:
            served = [arm for arm in arms if any(arm in group for group in groups)]
            with this.serving(*groups):
                warm_up(this, served, count)
                with this.counted(served):
                    measure(this, served) if count == 1 else measure_blocks(this, served, count)
        record = this.run.record
        with code_runner(config, this.traffic) as runner:
            score_rows(this.traffic, this.run.rows, runner)
        record.summary = summarize(record, this.run.rows)
        record.gates, verdict = judge(record, this.run.rows)
        this.run.finish("complete", verdict)
    report(record, this.run.folder)
    write(config.results)
    return STATUS[verdict.outcome]


def workload(config: Config, turns: Sequence[Sequence[Sequence[Plan]]], count: int) -> dict[str, object]:
    if count > 1:
        order = f"blocks of {block_size(config, count)}, baseline before and after each arm"
    else:
        order = "arms rotate by item" if len(turns) == 1 else "one server per arm"
    servers = [[arm.name for arm in group] for groups in turns for group in groups]
    return {"concurrency": count, "order": order, "parsers": PARSER_VERSION, "servers": servers}


def block_size(config: Config, count: int) -> int:
    return config.task.block or TIMES * count


def warm_up(this: Session, arms: Sequence[Plan], count: int = 1) -> None:
    """Every arm, on every replica, on items that are never measured: an engine must be able to answer these. With
    several in flight twice as many as that, so that the batches to come are not the first of their size."""
    items = this.warmup
    for arm in arms:
        for replica in this.servers.lanes(arm.name):
            jobs = items if count == 1 else list(islice(cycle(items), 2 * count)) if items else []
            drive(lambda item, arm=arm, to=replica: to.generate(this.request(arm, item)), jobs, count)


def measure(this: Session, arms: Sequence[Plan]) -> None:
    """Item i on replica i modulo their number, the replicas side by side, each one request at a time."""
    count = len(this.servers.lanes(arms[0].name))
    with Bars([arm.name for arm in arms], len(this.traffic.items)) as bars:

        def serve(index: int) -> None:
            for turn, order in enumerate(range(index, len(this.traffic.items), count)):
                if this.stopped():
                    return
                first = turn % len(arms)
                for arm in (*arms[first:], *arms[:first]):
                    row = this.ask(arm, this.traffic.items[order], order, index)
                    if this.keep(row):
                        bars.add(row)

        drive(serve, range(count), count)


def measure_blocks(this: Session, arms: Sequence[Plan], count: int) -> None:
    """Block by block, `count` requests in flight, the counters read at every border."""
    found = blocks(arms, this.traffic.items, block_size(this.config, count))
    totals = answers(arms, len(this.traffic.items))
    with Bars(list(totals), totals) as bars:
        for block in found:
            if block.arm is arms[0] and this.stopped():  # a candidate's block is followed by the baseline's
                return
            with this.block(block.arm, block.number):
                started = time.monotonic()
                rows = drive(lambda job, block=block: ask(this, block, *job), block.jobs, count)
                bars.add_all(rows, time.monotonic() - started)


def ask(this: Session, block: Block, order: int, item: Item) -> Row:
    lanes = len(this.servers.lanes(block.arm.name))
    row = this.ask(block.arm, item, order, order % lanes, block.number)
    this.keep(row)
    return row
