"""launch=attach: measure a server someone else started. It is never stopped, and it is what it reports to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.config import Config
from harness.engines.base import EngineError
from harness.engines.native import NativeClient
from harness.launch.base import LaunchError, RunningEngine
from harness.launch.capability import unsupported
from harness.launch.ready import check_adapter, probe


def preflight(config: Config) -> None:
    """The machine need not be able to run the engine: someone else's does."""
    if reason := unsupported(config):
        raise LaunchError(f"{config.model.name} on {config.engine.name}: {reason}")


@contextmanager
def launch(config: Config, log: Path) -> Iterator[RunningEngine]:
    assert config.url is not None  # Config refuses attach without it
    client = NativeClient(config.url)
    try:
        try:
            server = client.server()
            check_adapter(config, server.snapshot)
            probe(client, config)
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
