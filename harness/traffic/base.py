"""Items, traffic, seeded selection and content hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

SEED = 980406  # item order of the published protocol: random.Random(seed).shuffle over the row indices
SUFFIX = "Please reason step by step, and put your final answer within \\boxed{}."


class TrafficError(ValueError):
    """Traffic that cannot be had as asked, in one line."""


@dataclass(frozen=True)
class Item:
    """One prompt.

    task: "math" or "code". messages: what the chat template renders.
    reference: math: the number, as text. code: {"entry_point", "prelude", "tests"}: the function's name, code that both
    the answer and the tests may use, and test sources, each of which raises where the function is wrong.
    max_new_tokens: the cap this item asks for. thinking: whether the template opens thinking.
    """

    id: str
    task: str
    messages: tuple[dict[str, str], ...]
    reference: Any
    max_new_tokens: int
    thinking: bool


@dataclass(frozen=True)
class Traffic:
    """items: measured, in order. warmup, calibration: never among them. provenance: plain JSON for the record."""

    name: str
    items: list[Item]
    warmup: list[Item]
    calibration: list[Item]
    provenance: dict[str, Any]

    def __post_init__(self) -> None:
        ids = {item.id for item in self.items}
        if len(ids) != len(self.items):
            raise TrafficError(
                f"traffic {self.name}: expected every item once, found {len(self.items) - len(ids)} twice"
            )
        prompts = {json.dumps(item.messages) for item in self.items}
        for name in ("warmup", "calibration"):
            for item in getattr(self, name):
                if item.id in ids or json.dumps(item.messages) in prompts:
                    raise TrafficError(f"traffic {self.name}: {name} item {item.id} is also measured")


def shuffled(count: int, seed: int) -> list[int]:
    """0..count-1 in the order of the published protocol: the same for every Python version."""
    order = list(range(count))
    Random(seed).shuffle(order)
    return order


def take(name: str, available: int, limit: int | None) -> int:
    """How many items a run measures."""
    if limit is None:
        return available
    if not 1 <= limit <= available:
        raise TrafficError(f"traffic.limit: expected 1 to {available} for {name}, found {limit}")
    return limit


def content_sha256(rows: Iterable[Mapping[str, Any]], fields: tuple[str, ...]) -> str:
    """SHA-256 over one canonical JSON line per row: keys sorted, no spaces, UTF-8, only `fields`.

    It depends on the rows and their order, not on the file they came in (JSON lines, Parquet, compressed).
    """
    digest = hashlib.sha256()
    for row in rows:
        kept = {field: row.get(field) for field in fields}
        line = json.dumps(kept, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()
