"""launch=attach: measure a server someone else started. It is never stopped, and it is what it reports to be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapters.policy import Policy
from harness.config import Config
from harness.engines import connect
from harness.engines.base import EngineError
from harness.launch.base import TELEMETRY, LaunchError, RunningEngine
from harness.launch.capability import unsupported
from harness.launch.ready import check_adapter, probe


def preflight(config: Config) -> None:
    """The machine need not be able to run the engine: someone else's does."""
    reason = unsupported(config)
    if reason is None and not config.engine.per_request_policy:
        reason = "a server has one policy, so launch=attach has nothing to compare it with"
    if reason is not None:
        raise LaunchError(f"{config.model.name} on {config.engine.name}: {reason}")


@contextmanager
def launch(config: Config, log: Path, policy: Policy) -> Iterator[RunningEngine]:
    assert config.url is not None  # Config refuses attach without it
    telemetry = os.environ.get(TELEMETRY)
    client = connect(config.engine.api, config.url, Path(telemetry) if telemetry else None)
    try:
        try:
            server = client.server()
            check_adapter(config, server.snapshot)
            if not same_model(config.model.target, server.target):
                raise EngineError("identity", f"model: expected {config.model.target!r}, found {server.target!r}")
            probe(client, config, policy)
        except EngineError as error:
            raise LaunchError(f"{config.url}: {error}") from None
        log.write_text(f"attached to {config.url}: its log is with whoever started it\n")
        yield RunningEngine(
            client=client,
            server=server,
            nonce=None,
            how={"kind": "attach", "url": config.url, "command": None, "image_digest": None},
            check_alive=lambda: None,
        )
    finally:
        client.close()


def same_model(expected: str, found: str) -> bool:
    """Whether a server's path can be the expected model: another machine keeps it elsewhere, under the same name."""
    return Path(expected).name.lower() in found.lower()
