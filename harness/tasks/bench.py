"""task=bench: arms against each other on the same items, in turn; scored once the engines are down.

One request at a time, arms alternate item by item, and their order rotates with the item, so that no arm always follows
the same one and a machine that slows down slows all of them. Requests that share steps cannot be told apart in time:
above concurrency 1 arms alternate in short blocks (schedule.py). Arms with servers of their own alternate all the same
where those are up together; only one is asked at a time. Else the servers run one after another. Several servers of an
arm (launch.replicas) take its items in turn: containers on GPUs of their own side by side, processes on the same ones
one after another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, zip_longest

from harness.config import Config
from harness.drive import drive
from harness.engines.base import EngineClient
from harness.publish.console import Bars
from harness.records import Row
from harness.score import PARSER_VERSION
from harness.tasks.arms import Plan, plan, rounds
from harness.tasks.errors import TaskError
from harness.tasks.schedule import TIMES, Block, answers, blocks
from harness.tasks.scoring import code_runner, score_rows
from harness.tasks.session import Session, conclude, session
from harness.traffic import Item

WAVE = 8  # items of each replica between two checkpoints, for which all wait


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
            if not this.todo(served, this.traffic.items):
                continue
            with this.serving(*groups):
                warm_up(this, served, count)
                with this.counted(served):
                    measure(this, served) if count == 1 else measure_blocks(this, served, count)
        if config.task.fixed_tokens is None:  # an answer whose end was ignored is no answer
            with code_runner(config, this.traffic) as runner:
                score_rows(this.traffic, this.run.rows, runner)
        status = conclude(this)
    return status


def workload(config: Config, turns: Sequence[Sequence[Sequence[Plan]]], count: int) -> dict[str, object]:
    if count > 1:
        order = f"blocks of {block_size(config, count)}, baseline before and after each arm"
    else:
        order = "arms rotate by item" if len(turns) == 1 else "one server per arm"
    servers = [[arm.name for arm in group] for groups in turns for group in groups]
    fixed = {} if config.task.fixed_tokens is None else {"fixed_tokens": config.task.fixed_tokens}
    replicas = {} if (config.launch.replicas or 1) == 1 else {"replicas": config.launch.replicas}
    return {"concurrency": count, "order": order, "parsers": PARSER_VERSION, "servers": servers} | fixed | replicas


def block_size(config: Config, count: int) -> int:
    return config.task.block or TIMES * count


def warm_up(this: Session, arms: Sequence[Plan], count: int = 1) -> None:
    """Every arm, on every replica, on items that are never measured: an engine must be able to answer these. With
    several in flight twice as many as that, so that the batches to come are not the first of their size."""
    items = this.warmup
    for arm in arms:
        for replica in this.servers.lanes(arm.name):
            jobs = items if count == 1 else list(islice(cycle(items), 2 * count)) if items else []
            drive(partial(_warm, this, arm, replica), jobs, count)


def _warm(this: Session, arm: Plan, replica: EngineClient, item: Item) -> None:
    request = this.request(arm, item)
    replica.generate(replace(request, rid=f"warmup-{request.rid}"))  # a capture can tell it from what is measured


def measure(this: Session, arms: Sequence[Plan]) -> None:
    """Item i on replica i modulo their number, each one request at a time; containers go on side by side.

    A unit of work is an item in all its arms; of several replicas that go on together, some items of each.
    """
    items, count = this.traffic.items, len(this.servers.lanes(arms[0].name))
    beside = 1 if this.config.launch.name == "process" else count
    with Bars([arm.name for arm in arms], len(items)) as bars:

        def serve(orders: range) -> None:
            for order in orders:
                if this.stopped():
                    return
                first = order // count % len(arms)
                for arm in (*arms[first:], *arms[:first]):
                    row = this.ask(arm, items[order], order, order % count)
                    if this.keep(row):
                        bars.add(row)

        bars.add_kept(this.run.rows)
        size = 1 if beside == 1 else WAVE * beside
        for start in range(0, len(items), size):
            end = min(start + size, len(items))
            if this.todo(arms, items[start:end]):
                drive(serve, [range(start + lane, end, beside) for lane in range(beside)], beside)
                this.unit()


def measure_blocks(this: Session, arms: Sequence[Plan], count: int) -> None:
    """Block by block, `count` requests in flight, the counters read at every border."""
    found = blocks(arms, this.traffic.items, block_size(this.config, count))
    totals = answers(arms, len(this.traffic.items))
    done = {row.block for row in this.run.rows}
    with Bars(list(totals), totals) as bars:
        bars.add_kept(this.run.rows)
        for block, following in zip_longest(found, found[1:]):
            if block.number in done:
                continue
            if block.arm is arms[0] and this.stopped():  # a candidate's block is followed by the baseline's
                return
            with this.block(block.arm, block.number):
                started = time.monotonic()
                rows = drive(partial(ask, this, block), block.jobs, count)
                bars.add_all(rows, time.monotonic() - started)
            if following is None or following.jobs is not block.jobs:
                this.unit()  # the whole chunk, in all its arms


def ask(this: Session, block: Block, job: tuple[int, Item]) -> Row:
    order, item = job
    lanes = len(this.servers.lanes(block.arm.name))
    row = this.ask(block.arm, item, order, order % lanes, block.number)
    this.keep(row)
    return row
