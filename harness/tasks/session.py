"""What every measuring task does around its measurement: data, record, engine, proof of identity, an end in order.

Whatever happens in between, the engine is stopped and the record says how far it got.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

from harness.config import UNARMED, Config
from harness.engines.base import EngineError, Generation, Request
from harness.engines.checkpoint import CheckpointError, tokenizer
from harness.engines.tokenizer import Tokenizer, TokenizerError
from harness.interrupt import Interrupted
from harness.launch import RunningEngine, preflight
from harness.launch.shards import merge
from harness.publish.console import report
from harness.publish.tables import write
from harness.records import Row, Run
from harness.records.provenance import environment, identity
from harness.records.run import CannotContinue, summed
from harness.tasks import STATUS
from harness.tasks.arms import Plan
from harness.tasks.errors import TaskError
from harness.tasks.serving import Counters, Serving, moves, serve, total
from harness.tasks.summary import judge, summarize
from harness.traffic import Item, Traffic, load
from harness.traffic.chat import render

MAX_FAILURES = 5  # in a row: the engine is gone or broken, and every further item would say so again
PAUSE_S = 0.1  # after a connection that broke: an engine that goes down is seen to be down by the fifth


@dataclass
class Session:
    """An open run: its record, items and tokenizer, and the engines while `serving`.

    prompts: input ids by item id, rendered and encoded once. answers: (arm, item) that a continued run had before.
    Requests may be asked from several threads.
    """

    config: Config
    traffic: Traffic
    tokenizer: Tokenizer
    run: Run
    _serving: Serving | None = None
    prompts: dict[str, list[int]] = field(default_factory=dict)
    answers: set[tuple[str, str]] = field(default_factory=set)
    failures: int = 0
    ended: bool = False
    measuring_s: float | None = None
    origin_s: float = field(default_factory=time.monotonic)
    _asked: Iterator[int] = field(default_factory=itertools.count)
    _before: dict[str, Counters] = field(default_factory=dict)
    _blocks: list[dict[str, Any]] = field(default_factory=list)
    _lock: RLock = field(default_factory=RLock)

    @property
    def servers(self) -> Serving:
        assert self._serving is not None, "engines are up inside serving() only"
        return self._serving

    @property
    def engine(self) -> RunningEngine:
        """The first."""
        return self.servers.engine()

    @contextmanager
    def serving(self, *groups: Sequence[Plan]) -> Iterator[None]:
        """A server per group of arms, side by side: up, proven and recorded; down again before anything is scored."""
        with serve(self.config, self.run, groups) as self._serving:
            try:
                yield
            except BaseException:
                self.end()  # an answer that is broken off because its engine goes down is no error of the engine
                raise
        self._serving = None

    @contextmanager
    def counted(self, arms: Sequence[Plan]) -> Iterator[None]:
        """The timed window of these arms: the counters before and after it go into the record."""
        self._before = self.servers.counters([arm.name for arm in arms])
        yield
        self._checkpoint()

    def unit(self) -> None:
        """A unit of work is whole, and nothing is in flight: what there is by now need never be asked again.

        Not where the last request failed: an engine that is gone has no counters, and the next one says so.
        """
        if not self.failures:
            self._checkpoint()

    def _checkpoint(self) -> None:
        before, after = self._before, self.servers.counters(list(self._before))
        keys = {name: self.run.record.arms[name].policy_key for name in before}
        self.run.checkpoint(
            {name: (total(before[name], key), total(after[name], key)) for name, key in keys.items()},
            {name: moves(before[name], after[name], key) for name, key in keys.items() if len(before[name]) > 1},
            self._blocks,
        )

    def todo(self, arms: Sequence[Plan], items: Sequence[Item]) -> bool:
        """Whether any of these was not answered before this start: a run that is continued has answers."""
        return any((arm.name, item.id) not in self.answers for arm in arms for item in items)

    @contextmanager
    def block(self, arm: Plan, number: int) -> Iterator[None]:
        """One block of a schedule: how far this arm's counters went in it, and which others went too."""
        before = self.servers.counters([arm.name])[arm.name]
        yield
        after = self.servers.counters([arm.name])[arm.name]
        went = {key: merge(moves(before, after, key)) for key in merge(after)}
        told = {"block": number, "arm": arm.name, "moved": went.pop(arm.key, None)}
        told["others"] = sorted(key for key, moved in went.items() if any(moved.values()))
        self._blocks.append(told)

    def keep(self, row: Row) -> bool:
        """Into the journal, from whichever thread; not once the run has ended without it."""
        with self._lock:
            if self.ended:
                return False
            self.run.append(row)
            return True

    def end(self) -> None:
        with self._lock:
            self.ended = True

    def stopped(self) -> bool:
        """Whether task.seconds of measuring are over: said in the record, and no verdict is a pass then."""
        limit = self.config.task.seconds
        if limit is None:
            return False
        self.measuring_s = time.monotonic() if self.measuring_s is None else self.measuring_s
        if over := time.monotonic() - self.measuring_s >= limit:
            self.run.record.workload["stopped"] = f"after task.seconds={limit:g}"
        return over

    @property
    def warmup(self) -> list[Item]:
        return warmup(self.config, self.traffic)

    def prompt(self, item: Item) -> list[int]:
        if item.id not in self.prompts:
            self.prompts[item.id] = render(self.tokenizer, item)
        return self.prompts[item.id]

    def request(self, arm: Plan, item: Item, **more: Any) -> Request:
        cap, fixed = self.config.traffic.max_new_tokens, self.config.task.fixed_tokens
        return Request(
            rid=f"{arm.name}-{item.id}-{next(self._asked)}",
            input_ids=self.prompt(item),
            max_new_tokens=fixed or (min(item.max_new_tokens, cap) if cap else item.max_new_tokens),
            ignore_eos=fixed is not None,
            policy=arm.policy,
            temperature=arm.temperature,
            seed=None if arm.greedy else sampling_seed(self.config.seed, item.id),
            deadline_s=self.config.engine.request_timeout_s,
            **more,
        )

    def ask(self, arm: Plan, item: Item, order: int, replica: int = 0, block: int | None = None) -> Row:
        """One request to one replica; an error becomes a row of its own, several in a row end the run."""
        started = time.monotonic()
        request = self.request(arm, item)
        try:
            answer = self.known(self.servers.lanes(arm.name)[replica].generate(request))
        except EngineError as error:
            row = self.blank(arm, item, order, request, started, replica, block)
            return self._failed([row], error, started, arm)[0]
        self.failures = 0
        return self.answered(self.blank(arm, item, order, request, answer.started_s, replica, block), answer)

    def ask_many(self, arm: Plan, items: Sequence[Item], first: int, block: int | None = None) -> list[Row]:
        """One list request. wall_s of each row is that of the list: rows of a list have no time of their own."""
        started = time.monotonic()
        requests = [self.request(arm, item) for item in items]
        pairs = enumerate(zip(items, requests, strict=True), first)
        count = len(self.servers.lanes(arm.name))
        rows = [
            self.blank(arm, item, order, request, started, (order - first) % count, block)
            for order, (item, request) in pairs
        ]
        try:
            answers = [self.known(answer) for answer in self.servers.engine(arm.name).client.generate_many(requests)]
        except EngineError as error:
            return self._failed(rows, error, started, arm)
        self.failures = 0
        return [self.answered(row, answer) for row, answer in zip(rows, answers, strict=True)]

    def blank(
        self,
        arm: Plan,
        item: Item,
        order: int,
        request: Request,
        started: float,
        replica: int = 0,
        block: int | None = None,
    ) -> Row:
        ids = ",".join(map(str, request.input_ids)).encode()
        return Row(
            arm=arm.name,
            policy_key=arm.key,
            order=order,
            item=item.id,
            task=item.task,
            prompt_sha256=hashlib.sha256(ids).hexdigest(),
            prompt_tokens=len(request.input_ids),
            seed=request.seed,
            started_s=started - self.origin_s,
            replica=replica,
            block=block,
        )

    def known(self, answer: Generation) -> Generation:
        """Every id is one of this vocabulary: others have no text, and are no answer of this model."""
        if (largest := max(answer.output_ids)) >= self.tokenizer.vocabulary:
            limit = self.tokenizer.vocabulary - 1
            raise EngineError("garbled", f"output_ids: expected ids up to {limit} (vocabulary), found {largest}")
        return answer

    def answered(self, row: Row, answer: Generation) -> Row:
        ids = answer.output_ids
        shown = ids[:-1] if answer.finish == "stop" and ids[-1] in self.tokenizer.stop_ids else ids
        row.policy_key = answer.policy_key or UNARMED
        row.output_ids, row.text = ids, self.tokenizer.decode(shown, skip_special_tokens=False)
        row.finish, row.wall_s, row.server_s = answer.finish, answer.wall_s, answer.server_s
        row.cached_tokens, row.steps = answer.cached_tokens, answer.steps
        row.proposed, row.accepted, row.histogram = answer.proposed, answer.accepted, answer.histogram
        row.relaxed, row.regret, row.spent, row.exhausted = (
            answer.relaxed,
            answer.regret,
            answer.spent,
            answer.exhausted,
        )
        row.step_lengths = answer.step_lengths
        return row

    def _failed(self, rows: list[Row], error: EngineError, started: float, arm: Plan) -> list[Row]:
        """The rows of one failed request, marked. A broken engine ends the run with them kept."""
        wall = time.monotonic() - started
        for row in rows:
            row.error, row.detail, row.wall_s = error.kind, str(error), wall
        self.failures += 1
        if error.kind == "connection":
            time.sleep(PAUSE_S)
        if self.failures >= MAX_FAILURES:
            for row in rows:
                self.keep(row)
            self.servers.engine(arm.name).check_alive()
            raise TaskError(f"{self.failures} requests failed in a row, the last one with {error}")
        return rows


def sampling_seed(seed: int, item: str) -> int:
    """Of one item, equal in every arm; 31 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{item}".encode()).digest()[:4], "big") >> 1


def warmup(config: Config, traffic: Traffic) -> list[Item]:
    """Items that warm the engine up; as many as are in flight later, where the traffic has them."""
    count = max(config.task.warmup, config.task.concurrency or 1) if config.task.warmup else 0
    return traffic.warmup[:count]


def measured(traffic: Traffic) -> Sequence[Item]:
    return traffic.items


@contextmanager
def session(
    config: Config,
    arms: Sequence[Plan],
    workload: dict[str, Any],
    choose: Callable[[Traffic], Sequence[Item]] = measured,
) -> Iterator[Session]:
    """A run with its items ready and its record open, new or continued. Left without `run.finish`: the record says why.

    choose: the items of this task.
    """
    preflight(config, len(workload.get("servers") or [1]) if config.launch.together else 1)
    try:
        words = tokenizer(config.model.target, config.model.revision)
        traffic = load(config.traffic.options())
    except (CheckpointError, TokenizerError, ValueError, OSError) as error:
        raise TaskError(str(error).splitlines()[0]) from None
    replicas, count = config.launch.replicas or 1, len(choose(traffic))
    if config.launch.name == "process" and replicas > max(count, 1):
        raise TaskError(f"launch.replicas: expected {count} or fewer, an item each, found {replicas}")
    items = {
        "traffic": traffic.name,
        "items": [item.id for item in choose(traffic)],
        "warmup": [item.id for item in warmup(config, traffic)],
        "think_end": words.encode("</think>"),  # where thinking ends in the ids
    }
    run = _opened(config, traffic, items | workload | ({"sweep": config.sweep} if config.sweep else {}))
    run.record.arms = {arm.name: arm.record(len(choose(traffic))) for arm in arms}
    summed(run.record)
    this = Session(config, traffic, words, run, answers={(row.arm, row.item) for row in run.rows})
    try:
        yield this
        assert run.closed, "a task finishes its run"
    except BaseException as error:
        this.end()
        if not run.closed:
            stopped = isinstance(error, Interrupted)
            text = f"interrupted by {error}" if stopped else f"{type(error).__name__}: {error}"
            nothing = run.continued is not None and all(row.segment < run.segment for row in run.rows)
            run.finish("incomplete" if stopped or nothing else "failed", None, text)
        if isinstance(error, CannotContinue):
            raise TaskError(str(error)) from None
        raise


def conclude(this: Session) -> int:
    """The end of a bench or gate whose rows are all there: record, terminal, tables. Its exit status."""
    record, config = this.run.record, this.config
    record.summary = summarize(record, this.run.rows)
    record.gates, verdict = judge(record, this.run.rows)
    this.run.finish("complete", verdict)
    report(record, this.run.folder)
    if config.sweep is None:  # a sweep writes the tables once
        write(config.results)
    return STATUS[verdict.outcome]


def _opened(config: Config, traffic: Traffic, workload: dict[str, Any]) -> Run:
    """The unfinished run of the same plan where there is one that may be continued, and says so; else a new one."""
    parts = (config.results, config.task.name, identity(config, traffic.provenance), environment(), workload)
    if config.resume == "never":
        return Run.create(*parts)
    try:
        run, left = Run.open(*parts, failed=config.resume == "failed")
    except CannotContinue as error:
        raise TaskError(str(error)) from None
    for text in left:
        print(f"specaccept: {text}", file=sys.stderr)
    if run.continued is not None:
        run.record.workload.pop("stopped", None)
        print(f"specaccept: {run.record.id} is continued: {run.continued}", file=sys.stderr)
    return run
