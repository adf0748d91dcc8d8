"""launch=process: the engine as a child in a session and process group of its own.

Ready is proven (ready.py) while the exit code is watched. Whatever ends the run, the whole group is stopped: SIGTERM,
then SIGKILL. Should this process itself be killed, the kernel ends the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from adapters.policy import ENVIRONMENT, Policy
from adapters.telemetry import NONCE
from harness.config import ROOT, Config
from harness.engines import connect
from harness.engines.base import EngineClient, EngineError, Server
from harness.launch import cores as pinning
from harness.launch.base import TELEMETRY, LaunchError, RunningEngine
from harness.launch.capability import require
from harness.launch.command import command, printable
from harness.launch.ready import check_server, probe
from harness.launch.shards import ShardedClient

READY_LINE = re.compile(r"ready on (http://\S+)")
POLL_S = 0.1
PR_SET_PDEATHSIG = 1
ARMING = ("SPECACCEPT_", "DSV41_")  # environment that arms an engine


def preflight(config: Config) -> None:
    require(config)


@contextmanager
def launch(config: Config, log: Path, policy: Policy | None) -> Iterator[RunningEngine]:
    with launch_all(config, [(log, policy)]) as (engine,):
        yield engine


@contextmanager
def launch_all(config: Config, servers: Sequence[tuple[Path, Policy | None]]) -> Iterator[list[RunningEngine]]:
    """Several servers side by side, of each launch.replicas: all are started, then each is waited for.

    servers: log and policy of each. Whatever happens, all are stopped.
    """
    count = config.launch.replicas or 1
    own = pinning.shares(config, count * len(servers))
    with ExitStack() as stack:
        stack.enter_context(pinning.client(own))
        starting: list[Starting] = []
        for log, policy in servers:
            nonce, logs = secrets.token_hex(8), [log]
            if count > 1:
                logs = [log.with_name(f"{log.stem}-{replica}{log.suffix}") for replica in range(count)]
                stack.callback(join, log, logs)
            for part in logs:
                cores = own[len(starting)] if own else None
                starting.append(stack.enter_context(start(config, part, policy, nonce, cores)))

        def check_alive() -> None:
            """While one is waited for, none of the others has died."""
            for each in starting:
                each.check_alive()

        try:
            engines = [each.ready(check_alive) for each in starting]
            yield [_as_one(engines[first : first + count]) for first in range(0, len(engines), count)]
        finally:
            for each in starting:  # all at once; each is waited for in its turn
                each.terminate()


def _as_one(replicas: Sequence[RunningEngine]) -> RunningEngine:
    """Replicas of one server."""
    first = replicas[0]
    if len(replicas) == 1:
        return first
    client = ShardedClient([each.client for each in replicas])
    how = first.how | {"replicas": len(replicas)}
    if "cores" in how:
        how["cores"] = [cores for each in replicas for cores in each.how["cores"]]

    def check_alive() -> None:
        for each in replicas:
            each.check_alive()

    try:
        return RunningEngine(client, client.server(), first.nonce, how, check_alive)
    except EngineError as error:
        raise LaunchError(f"engine: {error}") from None


def join(log: Path, parts: Sequence[Path]) -> None:
    """One log of several, part by part."""
    with log.open("ab") as stream:
        for part in parts:
            with contextlib.suppress(FileNotFoundError):
                stream.write(f"== {part.name}\n".encode() + part.read_bytes())
                part.unlink()


@dataclass(frozen=True)
class Starting:
    """A process that is coming up. ready: waits for it, and calls what it is given meanwhile.

    terminate: asks it to end, and does not wait.
    """

    check_alive: Callable[[], None]
    terminate: Callable[[], None]
    ready: Callable[[Callable[[], None]], RunningEngine]


@contextmanager
def start(
    config: Config, log: Path, policy: Policy | None, nonce: str, cores: Sequence[int] | None = None
) -> Iterator[Starting]:
    """The engine's process. Several can be started before one is waited for.

    policy: None: the engine without its adapter. nonce: of this launch, by which it is known. cores: all it may run on
    (None: wherever this process may). A child dies with the thread that started it (PR_SET_PDEATHSIG), so this is
    called where the run lives.
    """
    own_port = config.engine.kind == "reference"
    port = 0 if own_port else _free_port()
    argv = command(config, port, armed=policy is not None, nonce=nonce)
    with ExitStack() as stack:
        telemetry = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specaccept-")))
        environment = _environment(config, policy, nonce, telemetry)
        output = stack.enter_context(log.open("ab"))
        written = _Log(log, output.tell())
        child = stack.enter_context(_child(argv, environment, output, config.launch.stop_timeout_s, cores))
        check_alive = _watch(child, written)
        deadline = time.monotonic() + config.engine.ready_timeout_s

        def ready(watch: Callable[[], None]) -> RunningEngine:
            url = _announced(written, watch, deadline) if own_port else f"http://127.0.0.1:{port}"
            client = connect(config.engine.api, url, telemetry, unarmed=policy is None)
            stack.callback(client.close)
            server = _ready(client, config, nonce, policy, watch, deadline)
            how: dict[str, Any] = {"kind": "process", "url": None, "command": printable(argv), "image_digest": None}
            if cores is not None:
                pinning.check(child.pid, cores)
                how |= {"cores": [list(cores)], "client_cores": pinning.available()}
            return RunningEngine(client, server, nonce, how, check_alive)

        yield Starting(check_alive, partial(_signal_group, child, signal.SIGTERM), ready)


def _environment(config: Config, policy: Policy | None, nonce: str, telemetry: Path) -> dict[str, str]:
    """Of the child. Without a policy nothing is left that an adapter would read."""
    if policy is None:
        left = {name: value for name, value in os.environ.items() if not name.startswith(ARMING)}
        return left | {"PYTHONUNBUFFERED": "1"} | config.engine.unarmed_env
    own = {NONCE: nonce, ENVIRONMENT: json.dumps(policy.to_json()), TELEMETRY: str(telemetry), "PYTHONUNBUFFERED": "1"}
    return os.environ | own


@dataclass(frozen=True)
class _Log:
    """What one engine wrote to a log that may hold those of earlier ones. start: in bytes."""

    path: Path
    start: int

    def read(self) -> str:
        with self.path.open("rb") as stream:
            stream.seek(self.start)
            return stream.read().decode(errors="replace")

    def tail(self, lines: int = 3) -> str:
        """The last lines, as one."""
        text = [line.strip() for line in self.read().splitlines() if line.strip()]
        return " | ".join(text[-lines:]) or "it wrote nothing"


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return probe_socket.getsockname()[1]


def _before_exec(cores: Sequence[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _child(
    argv: list[str],
    environment: dict[str, str],
    output: BinaryIO,
    stop_timeout_s: float,
    cores: Sequence[int] | None = None,
) -> Iterator[subprocess.Popen]:
    try:
        child = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the terminal must reach the harness alone
            preexec_fn=partial(_before_exec, cores),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"engine: cannot start {argv[0]}: {error}") from None
    try:
        yield child
    finally:
        _stop(child, stop_timeout_s)


def _stop(child: subprocess.Popen, timeout_s: float) -> None:
    _signal_group(child, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout_s)
    _signal_group(child, signal.SIGKILL)  # what is left of the group, its leader or not
    child.wait()


def _signal_group(child: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _watch(child: subprocess.Popen, log: _Log) -> Callable[[], None]:
    def check_alive() -> None:
        status = child.poll()
        if status is not None:
            raise LaunchError(f"engine: exited with status {status}: {log.tail()}")

    return check_alive


def _announced(log: _Log, check_alive: Callable[[], None], deadline: float) -> str:
    while True:
        if found := READY_LINE.search(log.read()):
            return found.group(1)
        _wait(check_alive, deadline, log)


def _ready(
    client: EngineClient,
    config: Config,
    nonce: str,
    policy: Policy | None,
    check_alive: Callable[[], None],
    deadline: float,
) -> Server:
    """The server's own description, once it serves and has proven who it is."""
    while not client.healthy():
        _wait(check_alive, deadline, None)
    try:
        server = client.server()
        check_server(config, server, nonce, policy)
        probe(client, config, policy)
    except EngineError as error:
        check_alive()
        raise LaunchError(f"engine: {error}") from None
    if server.target != config.model.target:
        raise LaunchError(f"engine: identity: model_path: expected {config.model.target!r}, found {server.target!r}")
    return server


def _wait(check_alive: Callable[[], None], deadline: float, log: _Log | None) -> None:
    check_alive()
    if time.monotonic() > deadline:
        raise LaunchError("engine: not ready in time (engine.ready_timeout_s)" + (f": {log.tail()}" if log else ""))
    time.sleep(POLL_S)
