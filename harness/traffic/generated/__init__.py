"""Problems made from seeds: grade-school word problems (`math`) and coding with thinking (`code`).

`problem(seed)` of either module is a pure function of the seed. Splits own disjoint ranges of seeds, and disjoint
residues of a hash of what makes a problem new (math: its whole text, code: its composition of operations), so that no
training text appears in a test and no tested composition was trained on.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any, Protocol, TypeVar

SPLITS: dict[str, range] = {
    "train": range(1_000_000_000),
    "calibration": range(1_000_000_000, 1_000_100_000),
    "warmup": range(1_000_100_000, 1_000_200_000),
    "test": range(1_000_200_000, 1_000_300_000),
}
_RESIDUES = 16
_OWNER = {13: "calibration", 14: "warmup", 15: "test"}  # every other residue belongs to train


def split(name: str) -> range:
    """The seeds of one split. Raises ValueError for an unknown name."""
    if name not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, found {name!r}")
    return SPLITS[name]


def split_of(seed: int) -> str:
    """The split that owns a seed. Raises ValueError for a seed that none owns."""
    for name, seeds in SPLITS.items():
        if seed in seeds:
            return name
    raise ValueError(f"seed: expected 0 <= seed < {SPLITS['test'].stop}, found {seed}")


class _Novel(Protocol):
    @property
    def novelty(self) -> str: ...


T = TypeVar("T", bound=_Novel)


def draw(seed: int, salt: str, make: Callable[[Random], T]) -> T:
    """The first problem of this seed's stream whose `novelty` hashes to the seed's split."""
    name = split_of(seed)
    rng = Random(f"{salt}:{seed}")
    while True:
        made = make(rng)
        if _OWNER.get(zlib.crc32(made.novelty.encode()) % _RESIDUES, "train") == name:
            return made


# A template's tree: text, ("field", name) or a tuple of alternatives, each a sequence of nodes.
_TOKEN = re.compile(r"\[|\]|\||\{\w+\}|[^\[\]|{}]+")


@cache
def _parse(template: str) -> tuple[Any, ...]:
    stack: list[list[list[Any]]] = [[[]]]
    for token in _TOKEN.findall(template):
        if token == "[":
            stack.append([[]])
        elif token == "|":
            stack[-1].append([])
        elif token == "]":
            options = stack.pop()
            stack[-1][-1].append(("any", tuple(tuple(option) for option in options)))
        elif token[0] == "{":
            stack[-1][-1].append(("field", token[1:-1]))
        else:
            stack[-1][-1].append(token)
    if len(stack) != 1:
        raise ValueError(f"template: unbalanced brackets in {template!r}")
    return (("any", tuple(tuple(option) for option in stack[0])),)


def _expand(nodes: tuple[Any, ...], rng: Random, values: Mapping[str, Any], out: list[str]) -> None:
    for node in nodes:
        if isinstance(node, str):
            out.append(node)
        elif node[0] == "field":
            out.append(str(values[node[1]]))
        else:
            _expand(node[1][int(rng.random() * len(node[1]))], rng, values, out)


def phrase(template: str, rng: Random, values: Mapping[str, Any]) -> str:
    """One expansion of `template`: `[a|b|]` is any of its alternatives (they nest; a bare `|` splits the
    whole template), `{name}` the named value."""
    out: list[str] = []
    _expand(_parse(template), rng, values, out)
    return "".join(out)


def sentence(template: str, rng: Random, values: Mapping[str, Any]) -> str:
    """`phrase`, with its first letter capital."""
    text = phrase(template, rng, values)
    return text[:1].upper() + text[1:]
