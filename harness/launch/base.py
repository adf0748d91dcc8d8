"""What every way of bringing up an engine gives a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.engines.base import EngineClient, Server

TELEMETRY = "SPECACCEPT_TELEMETRY_DIR"  # where an engine without a place for the snapshot in its HTTP API puts it


class LaunchError(RuntimeError):
    """An engine that cannot be started, did not become ready, or is not the one that was started. One line."""


@dataclass(frozen=True)
class RunningEngine:
    """A ready engine.

    server: what it said of itself when ready. nonce: what this run gave it; None for a server someone else started.
    how: for the record (kind, command, image digest as observed, or None). check_alive: LaunchError once it died.
    """

    client: EngineClient
    server: Server
    nonce: str | None
    how: dict[str, Any]
    check_alive: Callable[[], None]
