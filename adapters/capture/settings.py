"""What an engine process is asked to capture, read from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.capture.layout import CaptureError

FOLDER = "SPECACCEPT_CAPTURE"
RATE = "SPECACCEPT_CAPTURE_RATE"
ROWS = "SPECACCEPT_CAPTURE_ROWS"
QUEUE = "SPECACCEPT_CAPTURE_QUEUE_MB"
ON, OFF = ("1", "on", "true"), ("", "0", "off", "false")


@dataclass(frozen=True)
class Settings:
    """folder: captures are folders below it. rate: share of requests, whole ones. rows: share of those captured that
    keep full rows of p and q as well.

    queue_mb: MiB of blocks that may wait for the writer; what comes on top is dropped and counted.
    """

    folder: Path
    rate: float = 1.0
    rows: float = 0.0
    queue_mb: int = 256

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings | None:
        """None where SPECACCEPT_CAPTURE is unset or empty. Raises CaptureError naming the variable."""
        folder = environ.get(FOLDER, "").strip()
        if not folder:
            stray = next((name for name in (RATE, ROWS, QUEUE) if environ.get(name, "").strip()), None)
            if stray is not None:
                raise CaptureError(f"{stray}: expected {FOLDER} beside it, found none")
            return None
        rate = _number(environ, RATE, "1", "a number in (0, 1]", lambda x: 0 < x <= 1)
        queue = _number(environ, QUEUE, "256", "a whole number of MiB >= 1", lambda x: x >= 1 and x == int(x))
        said = {ROWS: _switch(environ.get(ROWS, ""))}
        rows = _number(said, ROWS, "0", "0, 1 or a share between them", lambda x: 0 <= x <= 1)
        return cls(Path(folder), rate, rows, int(queue))


def takes(share: float, nth: int) -> bool:
    """Whether the nth of a kind (from 0) is taken: evenly spread, the first one always."""
    return share > 0 and (nth == 0 or int(nth * share) > int((nth - 1) * share))


def _switch(text: str) -> str:
    """on and off as numbers."""
    word = text.strip().lower()
    return "1" if word in ON else "0" if word in OFF else word


def _number(environ: Mapping[str, str], name: str, default: str, expected: str, fits: Any) -> float:
    text = environ.get(name, "").strip() or default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (abs(value) < float("inf") and fits(value)):
        raise CaptureError(f"{name}: expected {expected}, found {text!r}")
    return value
