"""task=gate: complete token-id lists of B = 0 against strict, and a positive control that shows the gate can fail.

policy=asd-m0 compares a budget that no mismatch may use in place of B = 0: an engine may answer B = 0 with its own
match, and this one walks every block. A policy with a budget is the control; without one the model's asd is.

The baseline is strict on the same server, or (task.baseline=unarmed) the engine without its adapter on one of its own.
An engine that schedules list requests in order is asked in lists: equal token streams then make equal batches, so equal
policies must give equal ids bit by bit. Any other engine is asked one request at a time, or task.concurrency of them.
Nothing is timed, so servers that are up together are asked side by side.

task.mix_sampled puts sampled requests in between, for the slots they leave behind: they are counted, and compared with
nothing. task.repeat asks every chunk a second time, for the prompts that are in the prefix cache by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from adapters.policy import GREEDY_RULES, Policy
from harness.config import Config, PolicyConfig, member, settle_policy
from harness.drive import drive
from harness.publish.console import Bars
from harness.tasks.arms import Plan, by_server, named, plan
from harness.tasks.errors import TaskError
from harness.tasks.session import Session, conclude, session
from harness.traffic import Item

CONTROL = "control"
MIXED = "sampled"
ALONE = 8  # items of an arm in a row, one request at a time


def run(config: Config) -> int:
    candidate = _candidate(config.policy)
    if not config.engine.fixed_width:
        raise TaskError(f"gate: {config.engine.name}: the verified width follows the load: it has no identity arm")
    if config.task.mix_sampled and _in_lists(config):
        raise TaskError("task.mix_sampled: a list is of compared requests alone: expected task.concurrency=N")
    groups = by_server(config, [*named(config, [config.task.baseline, candidate]), _control(config)])
    mixed = [_mixed(config, group[0]) for group in groups] if config.task.mix_sampled else []
    groups = [[*group, *mixed[place : place + 1]] for place, group in enumerate(groups)]
    turns = [groups] if config.launch.together else [[group] for group in groups]
    with session(config, [arm for group in groups for arm in group], _workload(config, groups)) as this:
        record = this.run.record
        for name, arm in record.arms.items():
            arm.expected = len(_own(this, name, _jobs(this))) * _passes(config, name)
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
        status = conclude(this)
    return status


def _candidate(policy: PolicyConfig) -> str:
    """The arm whose ids must be strict's. Raises TaskError for a policy that is neither one nor a control."""
    if policy.name == "asd-m0" and policy.policy.is_strict:
        return policy.name
    budget = policy.policy.rule == "asd" and not policy.policy.is_strict and policy.name != "asd-m0"
    if not budget and policy.name not in ("strict", "asd-b0"):
        kind = f"{policy.policy.key}, sampled" if policy.policy.rule not in GREEDY_RULES else policy.policy.key
        raise TaskError(
            "gate: expected policy=asd-b0 or asd-m0 (whose ids are strict's), or an asd policy with a budget for the "
            f"control, found policy={policy.name} ({kind}): use task=bench"
        )
    return "asd-b0"


def _in_lists(config: Config) -> bool:
    return config.engine.list_requests and config.task.concurrency is None


def _workload(config: Config, groups: Sequence[Sequence[Plan]]) -> dict[str, object]:
    lists, count = _in_lists(config), config.task.concurrency or 1
    order = f"lists of {config.task.chunk}" if lists else "one request at a time"
    if count > 1:
        order = f"{count} in flight, {config.task.chunk} of an arm in a row"
    found = {
        "concurrency": config.engine.max_running_requests if lists else count,
        "order": order,
        "servers": [[arm.name for arm in group] for group in groups],
    }
    if config.task.mix_sampled:
        found["mixed"] = {group[-1].name: group[0].name for group in groups}
    return found | ({"passes": 2} if config.task.repeat else {})


def _control(config: Config) -> Plan:
    """The policy itself where it has a budget, else the model's asd."""
    wanted = plan(config)[-1]
    if wanted.policy is None or wanted.policy.is_strict:
        config = replace(config, policy=member("policy", "asd"))
        settle_policy(config)
        wanted = Plan(CONTROL, config.policy.policy, config.policy_source, 0.0)
    return replace(wanted, name=CONTROL)


def _mixed(config: Config, beside: Plan) -> Plan:
    """Sampled requests to the server of an arm: under chain, or under whatever policy the server has."""
    policy = Policy("chain") if config.engine.per_request_policy and beside.policy is not None else beside.policy
    return Plan(f"{MIXED}-{beside.name}", policy, f"sampled, between those of {beside.name}", 1.0)


def _passes(config: Config, arm: str) -> int:
    return 2 if config.task.repeat and not arm.startswith(MIXED) else 1


Jobs = Sequence[tuple[int, Item]]  # order, item


def _jobs(this: Session) -> Jobs:
    return list(enumerate(this.traffic.items))


def _chunks(config: Config, jobs: Jobs) -> Iterator[Jobs]:
    """What is asked of each arm in a row, and in all arms a unit of work."""
    size = config.task.chunk if _in_lists(config) or (config.task.concurrency or 1) > 1 else ALONE
    for first in range(0, len(jobs), size):
        yield jobs[first : first + size]


def _own(this: Session, name: str, part: Jobs) -> Jobs:
    """The control answers the first items only; sampled requests are of an even share of their server's items."""
    beside = this.run.record.workload.get("mixed", {}).get(name, name)
    count = this.config.task.control if beside == CONTROL else len(this.traffic.items)
    share = this.config.task.mix_sampled if beside != name else 1.0
    return [job for job in part if job[0] < count and int((job[0] + 1) * share) > int(job[0] * share)]


def _todo(this: Session, arms: Sequence[Plan], part: Jobs) -> bool:
    return any(this.todo([arm], [item for _, item in _own(this, arm.name, part)]) for arm in arms)


def _ask(this: Session, bars: Bars, part: Jobs, arms: Sequence[Plan]) -> None:
    """A chunk of items of every arm of one server, arm by arm; the sampled ones between those of the first."""
    mixed = this.run.record.workload.get("mixed", {})
    sampled = {job[0]: arm for arm in arms if arm.name in mixed for job in _own(this, arm.name, part)}
    for arm in arms:
        if arm.name in mixed:
            continue
        for turn in range(_passes(this.config, arm.name)):
            between = sampled if arm is arms[0] and turn == 0 else {}
            _pass(this, bars, arm, _own(this, arm.name, part), turn, between)


def _pass(this: Session, bars: Bars, arm: Plan, jobs: Jobs, turn: int, sampled: Mapping[int, Plan]) -> None:
    """sampled: by the order of the item that they follow."""
    if _in_lists(this.config) and len(jobs) > 1:
        rows = this.ask_many(arm, [item for _, item in jobs], jobs[0][0], _block(this, turn))
        kept = [this.keep(row) for row in rows]
        if all(kept):
            bars.add_all(rows)
        return
    asked = [(who, job) for job in jobs for who in (arm, sampled.get(job[0])) if who is not None]
    drive(partial(_one, this, bars, turn), asked, this.config.task.concurrency or 1)


def _block(this: Session, turn: int) -> int | None:
    """Rows of a gate that asks twice tell which time it was."""
    return turn if this.config.task.repeat else None


def _one(this: Session, bars: Bars, turn: int, asked: tuple[Plan, tuple[int, Item]]) -> None:
    arm, (order, item) = asked
    row = this.ask(arm, item, order, block=_block(this, turn))
    if this.keep(row):
        bars.add(row)
