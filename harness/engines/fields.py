"""JSON fields of an engine's answers, typed: a value of another type is a ValueError that names the field.

A careless reader takes true for 1, 1.5 for a count and "12" for 12; a measurement made of those is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LARGEST_ID = 2**31 - 1  # vocabularies are int32 everywhere; a larger id is no token
LARGEST_COUNT = 2**53  # the largest exact integer of JSON, and well inside a record's int64


def count(value: Any, name: str, limit: int = LARGEST_COUNT) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise ValueError(f"{name}: expected an integer from 0 to {limit}, found {_shown(value)}")
    return value


def number(value: Any, name: str) -> float:
    """Finite and not negative: seconds, nats."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name}: expected a finite number >= 0, found {_shown(value)}")
    return float(value)


def text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected text, found {_shown(value)}")
    return value


def mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected an object, found {_shown(value)}")
    return value


def counts(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list of integers, found {_shown(value)}")
    return [count(each, f"{name}[{i}]") for i, each in enumerate(value)]


def ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list of token ids, found {_shown(value)}")
    return [count(each, f"{name}[{i}]", LARGEST_ID) for i, each in enumerate(value)]


def rejections(value: Any, name: str) -> list[tuple[float, int, int]]:
    """[regret, position, live] of each first rejection. A regret may be infinite or none: such a draft was no token."""
    if not isinstance(value, list) or any(not isinstance(each, list) or len(each) != 3 for each in value):
        raise ValueError(f"{name}: expected a list of [regret, position, live], found {_shown(value)}")
    return [(float(r), count(i, f"{name}.position"), count(live, f"{name}.live")) for r, i, live in value]


def snapshot(raw: Mapping[str, Any], name: str = "specaccept") -> None:
    """Raises ValueError unless the adapter's snapshot has the types of adapters/telemetry.py."""
    for path, digest in mapping(raw.get("files"), f"{name}.files").items():
        text(digest, f"{name}.files.{path}")
    for field, value in mapping(raw.get("engine"), f"{name}.engine").items():
        text(value, f"{name}.engine.{field}")
    for key, counters in mapping(raw.get("counters"), f"{name}.counters").items():
        for field, value in mapping(counters, f"{name}.counters.{key}").items():
            _counter(value, field, f"{name}.counters.{key}.{field}")


def _counter(value: Any, field: str, name: str) -> None:
    if field == "fallbacks":
        for reason, times in mapping(value, name).items():
            count(times, f"{name}.{reason}")
    elif field == "regret_charged":
        number(value, name)
    else:
        count(value, name)


def _shown(value: Any) -> str:
    found = repr(value)
    return found if len(found) <= 60 else f"{found[:57]}..."
