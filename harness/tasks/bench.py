"""task=bench: arms interleaved item by item on one server, one request at a time; scored once the engine is down.

The order of the arms rotates with the item, so that no arm always follows the same one, and a machine that slows down
slows all of them. Counters are read before the first and after the last timed request. An engine with one policy per
server gets a server per arm, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Event, Lock

from harness.config import Config
from harness.launch.shards import lanes
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
    """Every arm, on every replica, on items that are never measured: an engine must be able to answer these."""
    for replica in lanes(this.engine.client):
        for item in this.traffic.warmup[: this.config.task.warmup]:
            for arm in arms:
                replica.generate(this.request(arm, item))


def measure(this: Session, arms: Sequence[Plan]) -> None:
    """Item i on replica i modulo their number, the replicas side by side, each one request at a time."""
    replicas = lanes(this.engine.client)
    lock, stop = Lock(), Event()
    with Bars([arm.name for arm in arms], len(this.traffic.items)) as bars:

        def serve(index: int) -> None:
            for turn, order in enumerate(range(index, len(this.traffic.items), len(replicas))):
                first = turn % len(arms)
                for arm in (*arms[first:], *arms[:first]):
                    row = this.ask(arm, this.traffic.items[order], order, index)
                    with lock:
                        if stop.is_set():
                            return
                        this.run.append(row)
                        bars.add(row)

        if len(replicas) == 1:
            serve(0)
            return
        pool = ThreadPoolExecutor(len(replicas))
        try:
            for done in as_completed([pool.submit(serve, index) for index in range(len(replicas))]):
                done.result()
        finally:
            with lock:
                stop.set()
            pool.shutdown(wait=False, cancel_futures=True)  # requests in flight end with their servers
