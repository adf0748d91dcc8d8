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


def run(config: Config) -> int:
    arms, control = plan(config), _control(config)
    if not arms[0].greedy:
        raise TaskError(f"gate: compares greedy policies, found policy={config.policy.name} (sampled): use task=bench")
    with session(config, [*arms[:2], control], _workload(config)) as this:
        record, items = this.run.record, this.traffic.items
        checked = items[: config.task.control]
        record.arms["control"].expected = len(checked)
        chunk = config.task.chunk if config.engine.list_requests else 1
        with this.serving():
            before = this.snapshot().counters
            with Bars([arm.name for arm in arms[:2]], len(items)) as bars:
                for first in range(0, len(items), chunk):
                    for arm in arms[:2]:
                        _collect(this, arm, items[first : first + chunk], first, bars)
            with Bars(["control"], len(checked)) as bars:
                for first in range(0, len(checked), chunk):
                    _collect(this, control, checked[first : first + chunk], first, bars)
            after = this.snapshot().counters
        for kept in record.arms.values():
            kept.counters_before, kept.counters_after = before.get(kept.policy_key), after.get(kept.policy_key)
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
        wanted = Plan("control", config.policy.policy, config.policy_source, 0.0)
    return replace(wanted, name="control")


def _collect(this: Session, arm: Plan, items: Sequence[Item], first: int, bars: Bars) -> None:
    if len(items) == 1:
        rows = [this.ask(arm, items[0], first)]
    else:
        rows = this.ask_many(arm, items, first)
    for row in rows:
        this.run.append(row)
    bars.add_all(rows)
