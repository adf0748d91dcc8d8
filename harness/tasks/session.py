"""What every measuring task does around its measurement: data, record, engine, proof of identity, an end in order.

Whatever happens in between, the engine is stopped and the record says how far it got.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from adapters.telemetry import file_hashes
from harness.config import Config
from harness.engines.base import EngineError, Generation, Request, Server, Snapshot
from harness.engines.checkpoint import CheckpointError, tokenizer
from harness.engines.tokenizer import Tokenizer, TokenizerError
from harness.interrupt import Interrupted
from harness.launch import LaunchError, RunningEngine, launch, preflight
from harness.launch.attach import reported
from harness.launch.shards import lanes, merge
from harness.records import Row, Run
from harness.records.provenance import environment, identity
from harness.records.run import plan_digest
from harness.tasks.arms import COUNTED, Plan, moved
from harness.tasks.errors import TaskError
from harness.traffic import Item, Traffic, load
from harness.traffic.chat import render

MAX_FAILURES = 5  # in a row: the engine is gone or broken, and every further item would say so again


@dataclass
class Session:
    """An open run: its record, items and tokenizer, and the engine while `serving`.

    prompts: input ids by item id, rendered and encoded once.
    """

    config: Config
    traffic: Traffic
    tokenizer: Tokenizer
    run: Run
    _engine: RunningEngine | None = None
    prompts: dict[str, list[int]] = field(default_factory=dict)
    failures: int = 0
    _described: list[tuple[str, str, str | None]] = field(default_factory=list)
    origin_s: float = field(default_factory=time.monotonic)

    @property
    def engine(self) -> RunningEngine:
        assert self._engine is not None, "the engine is up inside serving() only"
        return self._engine

    @contextmanager
    def serving(self, arms: Sequence[Plan]) -> Iterator[None]:
        """An engine for these arms: up, proven and recorded; down again before anything is scored."""
        policy = arms[0].policy
        alone = "" if self.config.engine.per_request_policy else f" with {policy.key}"
        print(f"specaccept: {self.config.model.name} on {self.config.engine.name}{alone}: starting", file=sys.stderr)
        with launch(self.config, self.run.log, policy) as engine:
            _observe(self.config, self.run, engine)
            self._engine = engine
            self._described = [_described(engine.server)] if engine.nonce is None else []
            yield
        self._engine = None

    @contextmanager
    def counted(self, arms: Sequence[Plan]) -> Iterator[None]:
        """The timed window of these arms: the counters before and after it go into the record."""
        before = self.counters()
        yield
        after = self.counters()
        all_before, all_after = merge(before), merge(after)
        for arm in arms:
            kept = self.run.record.arms[arm.name]
            key = kept.policy_key
            kept.counters_before, kept.counters_after = all_before.get(key), all_after.get(key)
            if len(before) > 1 and self.run.record.launch is not None:
                sides = zip(before, after, strict=True)
                moves = [{name: moved(old.get(key), new.get(key), name) for name in COUNTED} for old, new in sides]
                self.run.record.launch.setdefault("shards", {})[arm.name] = moves

    def prompt(self, item: Item) -> list[int]:
        if item.id not in self.prompts:
            self.prompts[item.id] = render(self.tokenizer, item)
        return self.prompts[item.id]

    def request(self, arm: Plan, item: Item, **more: Any) -> Request:
        cap = self.config.traffic.max_new_tokens
        return Request(
            rid=f"{arm.name}-{item.id}",
            input_ids=self.prompt(item),
            max_new_tokens=min(item.max_new_tokens, cap) if cap else item.max_new_tokens,
            policy=arm.policy,
            temperature=arm.temperature,
            seed=None if arm.greedy else sampling_seed(self.config.seed, item.id),
            deadline_s=self.config.engine.request_timeout_s,
            **more,
        )

    def ask(self, arm: Plan, item: Item, order: int, replica: int = 0) -> Row:
        """One request to one replica; an error becomes a row of its own, several in a row end the run."""
        started = time.monotonic()
        request = self.request(arm, item)
        try:
            answer = self.known(lanes(self.engine.client)[replica].generate(request))
        except EngineError as error:
            return self._failed([self.blank(arm, item, order, request, started, replica)], error, started)[0]
        self.failures = 0
        return self.answered(self.blank(arm, item, order, request, answer.started_s, replica), answer)

    def ask_many(self, arm: Plan, items: Sequence[Item], first: int) -> list[Row]:
        """One list request. wall_s of each row is that of the list: rows of a list have no time of their own."""
        started = time.monotonic()
        requests = [self.request(arm, item) for item in items]
        pairs = enumerate(zip(items, requests, strict=True), first)
        count = len(lanes(self.engine.client))
        rows = [
            self.blank(arm, item, order, request, started, (order - first) % count) for order, (item, request) in pairs
        ]
        try:
            answers = [self.known(answer) for answer in self.engine.client.generate_many(requests)]
        except EngineError as error:
            return self._failed(rows, error, started)
        self.failures = 0
        return [self.answered(row, answer) for row, answer in zip(rows, answers, strict=True)]

    def blank(self, arm: Plan, item: Item, order: int, request: Request, started: float, replica: int = 0) -> Row:
        ids = ",".join(map(str, request.input_ids)).encode()
        return Row(
            arm=arm.name,
            policy_key=arm.policy.key,
            order=order,
            item=item.id,
            task=item.task,
            prompt_sha256=hashlib.sha256(ids).hexdigest(),
            prompt_tokens=len(request.input_ids),
            seed=request.seed,
            started_s=started - self.origin_s,
            replica=replica,
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
        row.policy_key = answer.policy_key or ""
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

    def _failed(self, rows: list[Row], error: EngineError, started: float) -> list[Row]:
        """The rows of one failed request, marked. A broken engine ends the run with them kept."""
        wall = time.monotonic() - started
        for row in rows:
            row.error, row.detail, row.wall_s = error.kind, str(error), wall
        self.failures += 1
        if self.failures >= MAX_FAILURES:
            for row in rows:
                self.run.append(row)
            self.engine.check_alive()
            raise TaskError(f"{self.failures} requests failed in a row, the last one with {error}")
        return rows

    def counters(self) -> list[dict[str, dict[str, Any]]]:
        """Of each replica, by policy key; each must still be the adapter and the server this run started with."""
        servers = [replica.server() for replica in lanes(self.engine.client)]
        described = [_described(server) for server in servers]
        self._described = self._described or described
        for expected, found in zip(self._described, described, strict=True):
            if expected != found:
                raise EngineError("identity", f"the server changed under the run: expected {expected}, found {found}")
        return [self._snapshot(server.snapshot).counters for server in servers]

    def _snapshot(self, found: Snapshot) -> Snapshot:
        expected = self.engine.server.snapshot.identity
        if found.identity != expected:
            changed = sorted(name for name in expected if found.identity.get(name) != expected[name])
            raise EngineError("identity", f"the adapter changed under the run: {', '.join(changed) or 'other fields'}")
        return found


def sampling_seed(seed: int, item: str) -> int:
    """Of one item, equal in every arm; 31 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{item}".encode()).digest()[:4], "big") >> 1


@contextmanager
def session(config: Config, arms: Sequence[Plan], workload: dict[str, Any]) -> Iterator[Session]:
    """A run with its items ready and its record open. Left without `run.finish`: the record says why."""
    preflight(config)
    try:
        words = tokenizer(config.model.target, config.model.revision)
        traffic = load(config.traffic.options())
    except (CheckpointError, TokenizerError, ValueError, OSError) as error:
        raise TaskError(str(error).splitlines()[0]) from None
    items = {
        "traffic": traffic.name,
        "items": [item.id for item in traffic.items],
        "warmup": [item.id for item in traffic.warmup[: config.task.warmup]],
        "think_end": words.encode("</think>"),  # where thinking ends in the ids
    }
    run = Run.create(
        config.results, config.task.name, identity(config, traffic.provenance), environment(), items | workload
    )
    run.record.arms = {arm.name: arm.record(len(traffic.items)) for arm in arms}
    try:
        yield Session(config, traffic, words, run)
        assert run.closed, "a task finishes its run"
    except BaseException as error:
        if not run.closed:
            stopped = isinstance(error, Interrupted)
            text = f"interrupted by {error}" if stopped else f"{type(error).__name__}: {error}"
            run.finish("incomplete" if stopped else "failed", None, text)
        raise


def _described(server: Server) -> tuple[str, str, str | None]:
    return server.version, server.target, server.draft


def _foreign(engine: RunningEngine) -> list[str]:
    """The engine's adapter files that differ from this checkout's."""
    own, theirs = file_hashes(), engine.server.snapshot.raw.get("files") or {}
    return sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))


def _check_files(engine: RunningEngine, allowed: bool) -> list[str]:
    """Of a server that this run started they cannot differ; of another's only where that was asked for."""
    foreign = _foreign(engine)
    if foreign and not (allowed and engine.nonce is None):
        allow = "" if engine.nonce is not None else " (launch.foreign_adapter=true measures it, marked)"
        raise LaunchError(f"engine: identity: adapter file {foreign[0]} differs from this checkout's{allow}")
    return foreign


def _observe(config: Config, run: Run, engine: RunningEngine) -> None:
    server, snapshot = engine.server, engine.server.snapshot
    foreign = _check_files(engine, config.launch.foreign_adapter)
    if run.record.launch is not None:
        return  # a further server of the same run
    run.record.launch = engine.how | {"attached": engine.nonce is None}
    if foreign:
        run.record.launch["foreign_adapter"] = foreign
        print(f"specaccept: adapter differs from this checkout: {', '.join(foreign)}", file=sys.stderr)
    if engine.nonce is None:
        found = run.record.identity
        found.target = reported(found.target, config.model.target, server.target, config.url or "")
        found.draft = reported(found.draft, config.model.draft, server.draft or "", config.url or "")
        found.plan = plan_digest(found)
    run.record.server = {
        "version": server.version,
        "target": server.target,
        "draft": server.draft,
        "max_running_requests": server.max_running_requests,
        "adapter": {name: value for name, value in snapshot.identity.items() if name != "files"},
    }
    made_of = {"adapter": snapshot.raw.get("adapter"), **(snapshot.raw.get("engine") or {})}
    run.observe(snapshot.raw.get("files") or {}, made_of, engine.how["image_digest"])
