"""task=gate: complete token-id lists of B = 0 against strict, and a positive control that shows the gate can fail.

The baseline is strict on the same server, or (task.baseline=unarmed) the engine without its adapter on one of its own.
An engine that schedules list requests in order is asked in lists: equal token streams then make equal batches, so equal
policies must give equal ids bit by bit. Any other engine is asked one request at a time, or task.concurrency of them.
Nothing is timed, so servers that are up together are asked side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adapters.policy import GREEDY_RULES
from harness.config import Config, member, settle_policy
from harness.drive import drive
from harness.publish.console import Bars, report
from harness.publish.tables import write
from harness.records import Row
from harness.tasks import STATUS
from harness.tasks.arms import Plan, by_server, named, plan
from harness.tasks.errors import TaskError
from harness.tasks.session import Session, session
from harness.tasks.summary import judge, summarize

CONTROL = "control"


def run(config: Config) -> int:
    if config.policy.policy.rule not in GREEDY_RULES:
        raise TaskError(f"gate: compares greedy policies, found policy={config.policy.name} (sampled): use task=bench")
    arms = [*named(config, [config.task.baseline, "asd-b0"]), _control(config)]
    groups = by_server(config, arms)
    turns = [groups] if config.launch.together else [[group] for group in groups]
    with session(config, arms, _workload(config, groups)) as this:
        record = this.run.record
        record.arms[CONTROL].expected = len(this.traffic.items[: config.task.control])
        totals = {name: arm.expected for name, arm in record.arms.items()}
        with Bars(list(totals), totals) as bars:
            for groups in turns:
                with this.serving(*groups), this.counted([arm for group in groups for arm in group]):
                    drive(lambda group: _ask(this, group, bars), groups, len(groups))
        record.summary = summarize(record, this.run.rows)
        record.gates, verdict = judge(record, this.run.rows)
        this.run.finish("complete", verdict)
    report(record, this.run.folder)
    write(config.results)
    return STATUS[verdict.outcome]


def _in_lists(config: Config) -> bool:
    return config.engine.list_requests and config.task.concurrency is None


def _workload(config: Config, groups: Sequence[Sequence[Plan]]) -> dict[str, object]:
    lists, count = _in_lists(config), config.task.concurrency or 1
    order = f"lists of {config.task.chunk}" if lists else "one request at a time"
    if count > 1:
        order = f"{count} in flight, {config.task.chunk} of an arm in a row"
    return {
        "concurrency": config.engine.max_running_requests if lists else count,
        "order": order,
        "servers": [[arm.name for arm in group] for group in groups],
    }


def _control(config: Config) -> Plan:
    """The policy itself where it has a budget, else the model's asd."""
    wanted = plan(config)[-1]
    if wanted.policy is None or wanted.policy.is_strict:
        config = replace(config, policy=member("policy", "asd"))
        settle_policy(config)
        wanted = Plan(CONTROL, config.policy.policy, config.policy_source, 0.0)
    return replace(wanted, name=CONTROL)


def _ask(this: Session, arms: Sequence[Plan], bars: Bars) -> None:
    """Every item of every arm of one server; the arms alternate chunk by chunk."""
    config, count = this.config, this.config.task.concurrency or 1
    chunk = config.task.chunk if _in_lists(config) or count > 1 else 1
    jobs = list(enumerate(this.traffic.items))
    for first in range(0, len(jobs), chunk):
        if this.stopped():
            return
        for arm in arms:
            part = jobs[first : min(first + chunk, this.run.record.arms[arm.name].expected)]
            if _in_lists(config) and len(part) > 1:
                for row in this.ask_many(arm, [item for _, item in part], first):
                    _keep(this, row, bars)
            else:
                drive(lambda job, arm=arm: _keep(this, this.ask(arm, job[1], job[0]), bars), part, count)


def _keep(this: Session, row: Row, bars: Bars) -> None:
    if this.keep(row):
        bars.add(row)
