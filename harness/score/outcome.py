"""What scoring one answer gives, and what of an output is the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["correct", "wrong", "unparsed", "truncated"]
_TAG = re.compile(r"<(/?)think>")
_SPECIAL = re.compile(r"<\|[^|<>\n]{1,40}\|>")


@dataclass(frozen=True)
class Score:
    """outcome: `unparsed` = finished without a readable answer; `truncated` = cut off before one.

    parsed: the answer in canonical form (math: an exact fraction; code: the extracted source), None without one.
    rule: which rule read it, or why the answer is not correct; part of the record, since rates depend on it.
    """

    outcome: Outcome
    parsed: str | None = None
    rule: str = ""


def is_cut_off(finish_reason: str | Mapping[str, Any]) -> bool:
    """Whether the engine stopped at the token cap. finish_reason: "stop", "length", or an object with that as "type".

    Anything else (abort, none) is a failure of the infrastructure, not an outcome of the model: ValueError.
    """
    kind = finish_reason.get("type") if isinstance(finish_reason, Mapping) else finish_reason
    if kind not in ("stop", "length"):
        raise ValueError(f"finish_reason: expected stop or length, found {kind!r}: an error of the run, not an outcome")
    return kind == "length"


def visible(text: str) -> str | None:
    """The answer after the model's thinking, special tokens removed; None where thinking was opened and never closed.

    A template may open <think> inside the prompt, so a lone </think> closes one too.
    """
    tags = list(_TAG.finditer(text))
    if tags:
        if not tags[-1][1]:
            return None
        text = text[tags[-1].end() :]
    return _SPECIAL.sub("", text)
