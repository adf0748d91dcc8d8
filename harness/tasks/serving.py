"""The servers of a run while they are up: which arm asks which, who they say they are, what they have counted.

Each must stay the server and the adapter that it was when the run began; an unarmed one has neither nonce nor counters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from adapters.telemetry import file_hashes
from harness.config import Config
from harness.engines.base import EngineClient, EngineError, Server, Snapshot
from harness.launch import LaunchError, RunningEngine, launch_all
from harness.launch.attach import reported
from harness.launch.process import join
from harness.launch.shards import lanes, merge
from harness.publish.labels import model
from harness.records import Run
from harness.records.run import plan_digest
from harness.tasks.arms import COUNTED, Plan, moved

Counters = list[dict[str, dict[str, Any]]]  # of each replica, by policy key


@dataclass
class Serving:
    """engines: in the order of the groups. arms: the engine of each arm, by its place in `engines`."""

    engines: list[RunningEngine]
    arms: dict[str, int]
    _described: list[list[tuple[str, str, str | None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._described = [[_described(each.server)] if each.nonce is None else [] for each in self.engines]

    def engine(self, arm: str | None = None) -> RunningEngine:
        """Of an arm; None: the first."""
        return self.engines[self.arms[arm] if arm is not None else 0]

    def lanes(self, arm: str) -> list[EngineClient]:
        return lanes(self.engine(arm).client)

    def counters(self, arms: Sequence[str]) -> dict[str, Counters]:
        """By arm, each server read once; each must still be the one this run started with."""
        read = {place: self._read(place) for place in dict.fromkeys(self.arms[arm] for arm in arms)}
        return {arm: read[self.arms[arm]] for arm in arms}

    def _read(self, place: int) -> Counters:
        engine = self.engines[place]
        servers = [replica.server() for replica in lanes(engine.client)]
        described = [_described(server) for server in servers]
        self._described[place] = self._described[place] or described
        for expected, found in zip(self._described[place], described, strict=True):
            if expected != found:
                raise EngineError("identity", f"the server changed under the run: expected {expected}, found {found}")
        return [_counters(engine.server.snapshot, server.snapshot) for server in servers]


def _counters(first: Snapshot | None, found: Snapshot | None) -> dict[str, dict[str, Any]]:
    if first is None or found is None:
        if first is not found:
            raise EngineError("identity", "the adapter changed under the run: it came or went")
        return {}
    expected = first.identity
    if found.identity != expected:
        changed = sorted(name for name in expected if found.identity.get(name) != expected[name])
        raise EngineError("identity", f"the adapter changed under the run: {', '.join(changed) or 'other fields'}")
    return found.counters


def moves(before: Counters, after: Counters, key: str) -> list[dict[str, float]]:
    """How far the counters of a policy went, replica by replica."""
    sides = zip(before, after, strict=True)
    return [{name: moved(old.get(key), new.get(key), name) for name in COUNTED} for old, new in sides]


def total(counters: Counters, key: str) -> dict[str, Any] | None:
    """Of a policy, over the replicas; None where no one counted it."""
    return merge(counters).get(key)


@contextmanager
def serve(config: Config, run: Run, groups: Sequence[Sequence[Plan]]) -> Iterator[Serving]:
    """A server per group of arms, all up at once: proven, recorded, and down again whatever happens."""
    named = "; ".join(", ".join(arm.name for arm in group) for group in groups)
    count = len(groups) * (config.launch.replicas or 1)
    several = f"{count} servers ({named})" if count > 1 else named
    print(f"specaccept: {model(run.record)} on {config.engine.name}: starting, {several}", file=sys.stderr)
    logs = [run.log] if len(groups) == 1 else [run.log.with_name(f"engine-{group[0].name}.log") for group in groups]
    try:
        with launch_all(config, [(log, group[0].policy) for log, group in zip(logs, groups, strict=True)]) as engines:
            for engine, group in zip(engines, groups, strict=True):
                observe(config, run, engine, group)
            yield Serving(engines, {arm.name: place for place, group in enumerate(groups) for arm in group})
    finally:
        if len(groups) > 1:
            join(run.log, logs)


def observe(config: Config, run: Run, engine: RunningEngine, group: Sequence[Plan]) -> None:
    """What a started engine turned out to be. The record is of the first armed one; of several servers all are told."""
    record, server, snapshot = run.record, engine.server, engine.server.snapshot
    foreign = _check_files(engine, config.launch.foreign_adapter)
    run.serve(engine.nonce, engine.how)
    if run.continued is not None and record.server is not None:
        _tell(run, engine, group)
        _check_version(record.server, server)
        _check_cores(record.launch or {}, engine, group)
        if snapshot is not None:
            run.observe(snapshot.raw.get("files") or {}, _made_of(snapshot), engine.how["image_digest"])
        return
    first = record.server is None and snapshot is not None
    if first:
        record.launch = engine.how | {"attached": engine.nonce is None} | (record.launch or {})
    _tell(run, engine, group)
    _check_version(record.server, server)
    if not first or snapshot is None or record.launch is None:
        return
    if foreign:
        record.launch["foreign_adapter"] = foreign
        print(f"specaccept: adapter differs from this checkout: {', '.join(foreign)}", file=sys.stderr)
    if engine.nonce is None:
        found = record.identity
        found.target = reported(found.target, config.model.target, server.target, config.url or "")
        found.draft = reported(found.draft, config.model.draft, server.draft or "", config.url or "")
        found.plan = plan_digest(found)
    record.server = {
        "version": server.version,
        "target": server.target,
        "draft": server.draft,
        "max_running_requests": server.max_running_requests,
        "adapter": {name: value for name, value in snapshot.identity.items() if name != "files"},
    }
    run.observe(snapshot.raw.get("files") or {}, _made_of(snapshot), engine.how["image_digest"])


def _tell(run: Run, engine: RunningEngine, group: Sequence[Plan]) -> None:
    """Of a run with several servers, each of them; once, however often the run is continued."""
    record, server, arms = run.record, engine.server, [arm.name for arm in group]
    if len(record.workload.get("servers") or ()) < 2:
        return
    record.launch = record.launch or {}
    told = record.launch.setdefault("servers", [])
    if all(each["arms"] != arms for each in told):
        armed, command = server.snapshot is not None, engine.how["command"]
        cores = {"cores": engine.how["cores"]} if "cores" in engine.how else {}
        told.append({"arms": arms, "armed": armed, "version": server.version, "command": command} | cores)
        run.save()


def _made_of(snapshot: Snapshot) -> dict[str, Any]:
    return {"adapter": snapshot.raw.get("adapter"), **(snapshot.raw.get("engine") or {})}


def _check_version(first: Mapping[str, Any] | None, server: Server) -> None:
    """Servers of one run are one engine; one that does not say its version (empty) is started from the same files."""
    if first is not None and server.version and server.version != first["version"]:
        raise LaunchError(f"engine: version: expected {first['version']}, found {server.version}")


def _check_cores(began: Mapping[str, Any], engine: RunningEngine, group: Sequence[Plan]) -> None:
    """A run that is continued has its servers on the cores it was begun on."""
    arms = [arm.name for arm in group]
    first = next((each for each in began.get("servers", []) if each["arms"] == arms), began)
    if (expected := first.get("cores")) != (found := engine.how.get("cores")):
        raise LaunchError(f"launch.cores: this run was begun on {expected}, found {found}: resume=never starts another")


def _described(server: Server) -> tuple[str, str, str | None]:
    return server.version, server.target, server.draft


def _foreign(snapshot: Snapshot) -> list[str]:
    """The engine's adapter files that differ from this checkout's."""
    own, theirs = file_hashes(), snapshot.raw.get("files") or {}
    return sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))


def _check_files(engine: RunningEngine, allowed: bool) -> list[str]:
    """Of a server that this run started they cannot differ; of another's only where that was asked for."""
    foreign = [] if engine.server.snapshot is None else _foreign(engine.server.snapshot)
    if foreign and not (allowed and engine.nonce is None):
        allow = "" if engine.nonce is not None else " (launch.foreign_adapter=true measures it, marked)"
        raise LaunchError(f"engine: identity: adapter file {foreign[0]} differs from this checkout's{allow}")
    return foreign
