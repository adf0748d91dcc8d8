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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapters.policy import ENVIRONMENT, Policy
from adapters.telemetry import NONCE
from harness.config import ROOT, Config
from harness.engines.base import EngineError, Server
from harness.engines.native import NativeClient
from harness.launch.base import LaunchError, RunningEngine
from harness.launch.capability import require
from harness.launch.command import command, printable
from harness.launch.ready import check_adapter, probe

READY_LINE = re.compile(r"ready on (http://\S+)")
POLL_S = 0.1
PR_SET_PDEATHSIG = 1


def preflight(config: Config) -> None:
    require(config)


@contextmanager
def launch(config: Config, log: Path) -> Iterator[RunningEngine]:
    own_port = config.engine.name == "reference"
    port = 0 if own_port else _free_port()
    argv = command(config, port)
    nonce = secrets.token_hex(8)
    default = Policy("chain" if config.policy.temperature > 0 else "strict")
    environment = os.environ | {NONCE: nonce, ENVIRONMENT: _json(default), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output, _child(argv, environment, output, config.launch.stop_timeout_s) as child:
        check_alive = _watch(child, log)
        deadline = time.monotonic() + config.engine.ready_timeout_s
        url = _announced(log, check_alive, deadline) if own_port else f"http://127.0.0.1:{port}"
        client = NativeClient(url)
        try:
            server = _ready(client, config, nonce, check_alive, deadline)
            how = {"kind": "process", "url": None, "command": printable(argv), "image_digest": None}
            yield RunningEngine(client, server, nonce, how, check_alive)
        finally:
            client.close()


def _json(policy: Policy) -> str:
    return json.dumps(policy.to_json())


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return probe_socket.getsockname()[1]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _child(argv: list[str], environment: dict[str, str], output, stop_timeout_s: float) -> Iterator[subprocess.Popen]:
    try:
        child = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the terminal must reach the harness alone
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
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


def _watch(child: subprocess.Popen, log: Path):
    def check_alive() -> None:
        status = child.poll()
        if status is not None:
            raise LaunchError(f"engine: exited with status {status}: {tail(log)}")

    return check_alive


def tail(log: Path, lines: int = 3) -> str:
    """The last lines of a log, as one."""
    text = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(text[-lines:]) or "it wrote nothing"


def _announced(log: Path, check_alive, deadline: float) -> str:
    while True:
        if found := READY_LINE.search(log.read_text(errors="replace")):
            return found.group(1)
        _wait(check_alive, deadline, log)


def _ready(client: NativeClient, config: Config, nonce: str, check_alive, deadline: float) -> Server:
    """The server's own description once it serves. An identity that differs is final, anything else may still come."""
    while not client.healthy():
        _wait(check_alive, deadline, None)
    try:
        server = client.server()
        check_adapter(config, server.snapshot, nonce)
        probe(client, config)
    except EngineError as error:
        check_alive()
        raise LaunchError(f"engine: {error}") from None
    if server.target != config.model.target:
        raise LaunchError(f"engine: identity: model_path: expected {config.model.target!r}, found {server.target!r}")
    return server


def _wait(check_alive, deadline: float, log: Path | None) -> None:
    check_alive()
    if time.monotonic() > deadline:
        raise LaunchError("engine: not ready in time (engine.ready_timeout_s)" + (f": {tail(log)}" if log else ""))
    time.sleep(POLL_S)
