"""task=gate: complete token-id lists of B = 0 against strict, and a positive control that shows the gate can fail.

The baseline is strict on the same server, or (task.baseline=unarmed) the engine without its adapter on one of its own.
An engine that schedules list requests in order is asked in lists: equal token streams then make equal batches, so equal
policies must give equal ids bit by bit. Any other engine is asked one request at a time, or task.concurrency of them.
Nothing is timed, so servers that are up together are asked side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from adapters.policy import GREEDY_RULES
from harness.config import Config, member, settle_policy
from harness.drive import drive
from harness.publish.console import Bars, report
from harness.publish.tables import write
from harness.tasks import STATUS
from harness.tasks.arms import Plan, by_server, named, plan
from harness.tasks.errors import TaskError
from harness.tasks.session import Session, session
from harness.tasks.summary import judge, summarize
from harness.traffic import Item

CONTROL = "control"


def run(config: Config) -> int:
    if config.policy.policy.rule not in GREEDY_RULES:
        raise TaskError(f"gate: compares greedy policies, found policy={config.policy.name} (sampled): use task=bench")
    if not config.engine.fixed_width:
        raise TaskError(f"gate: {config.engine.name}: the verified width follows the load: it has no identity arm")
    arms = [*named(config, [config.task.baseline, "asd-b0"]), _control(config)]
    groups = by_server(config, arms)
    turns = [groups] if config.launch.together else [[group] for group in groups]
    with session(config, arms, _workload(config, groups)) as this:
        record = this.run.record
        record.arms[CONTROL].expected = len(this.traffic.items[: config.task.control])
        totals = {name: arm.expected for name, arm in record.arms.items()}
        with Bars(list(totals), totals) as bars:
            bars.add_kept(this.run.rows)
            for groups in turns:
                if not any(_todo(this, group, _jobs(this)) for group in groups):
                    continue
                with this.serving(*groups), this.counted([arm for group in groups for arm in group]):
                    for part in _chunks(config, _jobs(this)):
                        asked = [group for group in groups if _todo(this, group, part)]
                        if asked and not this.stopped():
                            drive(partial(_ask, this, bars, part), asked, len(asked))
                            this.unit()
        record.summary = summarize(record, this.run.rows)
        record.gates, verdict = judge(record, this.run.rows)
        this.run.finish("complete", verdict)
    report(record, this.run.folder)
    if config.sweep is None:  # a sweep writes the tables once
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


Jobs = Sequence[tuple[int, Item]]  # order, item


def _jobs(this: Session) -> Jobs:
    return list(enumerate(this.traffic.items))


def _chunks(config: Config, jobs: Jobs) -> Iterator[Jobs]:
    """What is asked of each arm in a row, and in all arms a unit of work."""
    size = config.task.chunk if _in_lists(config) or (config.task.concurrency or 1) > 1 else 1
    for first in range(0, len(jobs), size):
        yield jobs[first : first + size]


def _own(this: Session, arm: Plan, part: Jobs) -> Jobs:
    """The control answers the first items only."""
    return [job for job in part if job[0] < this.run.record.arms[arm.name].expected]


def _todo(this: Session, arms: Sequence[Plan], part: Jobs) -> bool:
    return any(this.todo([arm], [item for _, item in _own(this, arm, part)]) for arm in arms)


def _ask(this: Session, bars: Bars, part: Jobs, arms: Sequence[Plan]) -> None:
    """A chunk of items of every arm of one server, arm by arm."""
    for arm in arms:
        own = _own(this, arm, part)
        if _in_lists(this.config) and len(own) > 1:
            rows = this.ask_many(arm, [item for _, item in own], own[0][0])
            kept = [this.keep(row) for row in rows]
            if all(kept):
                bars.add_all(rows)
        else:
            drive(partial(_one, this, bars, arm), own, this.config.task.concurrency or 1)


def _one(this: Session, bars: Bars, arm: Plan, job: tuple[int, Item]) -> None:
    row = this.ask(arm, job[1], job[0])
    if this.keep(row):
        bars.add(row)
