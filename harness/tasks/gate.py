"""task=gate: complete token-id lists of B = 0 against strict, and a positive control that shows the gate can fail.

An engine that schedules list requests in order is asked in lists: equal token streams then make equal batches, so equal
policies must give equal ids bit by bit. Any other engine is asked one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.config import Config, member, settle_policy
from harness.publish.console import Bars, report
from harness.publish.tables import write
from harness.tasks import STATUS
from harness.tasks.arms import Plan, plan
from harness.tasks.errors import TaskError
from harness.tasks.session import Session, session
from harness.tasks.summary import judge, summarize
from harness.traffic import Item

CONTROL = "control"


def run(config: Config) -> int:
    compared = plan(config)[:2]
    if not compared[0].greedy:
        raise TaskError(f"gate: compares greedy policies, found policy={config.policy.name} (sampled): use task=bench")
    arms = [*compared, _control(config)]
    groups = [arms] if config.engine.per_request_policy else [[arm] for arm in arms]
    with session(config, arms, _workload(config)) as this:
        record, items = this.run.record, this.traffic.items
        some = items[: config.task.control]
        record.arms[CONTROL].expected = len(some)
        for group in groups:
            with this.serving(group), this.counted(group):
                _ask(this, [arm for arm in group if arm.name != CONTROL], items)
                _ask(this, [arm for arm in group if arm.name == CONTROL], some)
        record.summary = summarize(record, this.run.rows)
        record.gates, verdict = judge(record, this.run.rows)
        this.run.finish("complete", verdict)
    report(record, this.run.folder)
    write(config.results)
    return STATUS[verdict.outcome]


def _workload(config: Config) -> dict[str, object]:
    lists = config.engine.list_requests
    return {
        "concurrency": config.engine.max_running_requests if lists else 1,
        "order": f"lists of {config.task.chunk}" if lists else "one request at a time",
    }


def _control(config: Config) -> Plan:
    """The policy itself where it has a budget, else the model's asd."""
    wanted = plan(config)[-1]
    if wanted.policy.is_strict:
        config = replace(config, policy=member("policy", "asd"))
        settle_policy(config)
        wanted = Plan(CONTROL, config.policy.policy, config.policy_source, 0.0)
    return replace(wanted, name=CONTROL)


def _ask(this: Session, arms: Sequence[Plan], items: Sequence[Item]) -> None:
    """Every item of every arm, in lists where the engine takes them; the arms alternate list by list."""
    if not arms:
        return
    chunk = this.config.task.chunk if this.config.engine.list_requests else 1
    with Bars([arm.name for arm in arms], len(items)) as bars:
        for first in range(0, len(items), chunk):
            part = items[first : first + chunk]
            for arm in arms:
                rows = this.ask_many(arm, part, first) if chunk > 1 else [this.ask(arm, part[0], first)]
                for row in rows:
                    this.run.append(row)
                bars.add_all(rows)
