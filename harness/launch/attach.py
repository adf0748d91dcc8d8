"""launch=attach: measure a server someone else started. It is never stopped, and it is what it reports to be."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from adapters.policy import Policy
from harness.config import Config, rooted
from harness.engines import connect
from harness.engines.base import EngineError, Server
from harness.engines.checkpoint import is_hub_id
from harness.launch.base import TELEMETRY, LaunchError, RunningEngine
from harness.launch.capability import unsupported
from harness.launch.ready import adapter, check_adapter, probe

CACHED = "models--"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
            check_adapter(config, adapter(server))
            check_model(config, server)
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


def check_model(config: Config, server: Server) -> None:
    """Raises EngineError("identity") unless both halves of the pair are the expected ones, by what the server says."""
    for name, expected, found in (
        ("model", config.model.target, server.target),
        ("draft", config.model.draft, server.draft),
    ):
        if found is None:
            raise EngineError("identity", f"{name}: expected {expected!r}, found none: a policy has nothing to accept")
        if not same_model(expected, found):
            raise EngineError("identity", f"{name}: expected {expected!r}, found {found!r}")


def same_model(expected: str, found: str) -> bool:
    """Whether what a server names is the expected model: the same hub id, or a folder of the same name.

    Another machine keeps a folder elsewhere; the hub's cache spells the id in its folder's name.
    """
    left, right = _plain(expected), _plain(found)
    if left == right:
        return True
    if is_hub_id(expected) and (is_hub_id(found) or CACHED in found.lower()):
        return False  # another owner's model of the same name is another model
    return bool(right) and left.rpartition("/")[2] == right.rpartition("/")[2]


def _plain(name: str) -> str:
    """Case and slashes aside; `.../models--owner--name/snapshots/revision` as owner/name."""
    path = name.lower().rstrip("/")
    for part in path.split("/"):
        if part.startswith(CACHED):
            return part.removeprefix(CACHED).replace("--", "/")
    return path


def reported(model: dict[str, Any], expected: str, found: str, url: str) -> dict[str, Any]:
    """The record's identity of a model: its content is known only where the server's path is this machine's folder."""
    if not is_hub_id(expected) and Path(found).is_absolute() and urlsplit(url).hostname in LOOPBACK:
        with contextlib.suppress(OSError):
            if Path(found).samefile(rooted(expected)):
                return model
    path = Path(found).name if Path(found).is_absolute() else found
    return model | {"path": path, "revision": None, "sha256": None, "reported": found}
