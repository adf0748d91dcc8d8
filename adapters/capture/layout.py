"""Format v2: the columns of a shard and the fields of a manifest. README.md says what each means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

FORMAT, VERSION = "specaccept-capture", 2
READABLE = (1, 2)  # 1: every block has full rows, or none; requests do not say how long they may become
MANIFEST = "manifest.json"
TOP = 16  # logits kept per row

DRAWN = 1  # flags: the drafts were drawn from q; without it they are argmax drafts, q is one-hot
SAMPLED = 2  # flags: a sampled request, its bonus token drawn; without it a greedy one
FULL = 4  # flags: the block has full rows

INT, FLOAT = torch.int32, torch.float32

# One value per block.
BLOCK = {
    "request": INT,
    "step": INT,
    "position": INT,
    "live": INT,
    "anchor": INT,
    "flags": INT,
    "length": INT,
    "bonus": INT,
    "temperature": FLOAT,
}
# One value per draft, [K].
DRAFT = {
    "draft": INT,
    "rank": INT,
    "z_x": FLOAT,
    "log_p": FLOAT,
    "log_q": FLOAT,
    "excess": FLOAT,
    "coin": FLOAT,
}
# One value per verified row, [K + 1].
ROW = {"argmax": INT, "ties": INT, "z_max": FLOAT, "lse": FLOAT, "entropy": FLOAT, "entropy_raw": FLOAT}
# The largest logits of each row, [K + 1, TOP].
TOPS = {"top_ids": INT, "top_logits": FLOAT}
COLUMNS: dict[str, torch.dtype] = BLOCK | DRAFT | ROW | TOPS
# Full rows of the blocks flagged FULL, in a file of their own: [n, K + 1, V], and of those of them whose drafts were
# drawn [m, K + 1, V], [m, K, V].
ROWS = {"target_logits": FLOAT, "target_probs": FLOAT, "draft_probs": FLOAT}


class CaptureError(ValueError):
    """A capture that cannot be made, or one that cannot be read; names the shard where there is one."""


def shapes(blocks: int, drafts: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The shape of every column of a shard of that many blocks."""
    top = min(TOP, vocabulary)
    return (
        dict.fromkeys(BLOCK, (blocks,))
        | dict.fromkeys(DRAFT, (blocks, drafts))
        | dict.fromkeys(ROW, (blocks, drafts + 1))
        | dict.fromkeys(TOPS, (blocks, drafts + 1, top))
    )


def row_shapes(blocks: int, drawn: int, drafts: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a rows file: blocks with full rows, `drawn` of them with drafts drawn from q."""
    full: dict[str, tuple[int, ...]] = {"target_logits": (blocks, drafts + 1, vocabulary)}
    if drawn:
        full["target_probs"] = (drawn, drafts + 1, vocabulary)
        full["draft_probs"] = (drawn, drafts, vocabulary)
    return full


# What a manifest must say, with the type of each field.
FIELDS: Mapping[str, Any] = {
    "format": str,
    "version": int,
    "created": str,
    "closed": bool,
    "engine": dict,
    "adapter": dict,
    "target": dict,
    "draft": dict,
    "tokenizer": dict,
    "K": int,
    "vocabulary": int,
    "top": int,
    "logits": str,
    "temperature_applied": bool,
    "policy": (dict, type(None)),
    "rate": float,
    "rows": bool,
    "requests": dict,
    "blocks": dict,
    "shards": list,
}
