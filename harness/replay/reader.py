"""Reading captures (adapters/capture, format v1 and v2), and refusing those that do not hold together.

What the manifest lists must be there, whole and unchanged: a shard that is missing, truncated or altered refuses the
capture, and is named. What it does not list, a writer that was killed left behind: a capture ends at its last whole
shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from adapters.capture.layout import (
    COLUMNS,
    DRAWN,
    FIELDS,
    FORMAT,
    FULL,
    INT,
    MANIFEST,
    READABLE,
    ROWS,
    TOPS,
    CaptureError,
    row_shapes,
    shapes,
)

Array = NDArray[Any]
SCALARS = tuple(name for name in COLUMNS if name not in TOPS)
# What captures that are read as one must share.
SHARED = (
    "version",
    "engine",
    "adapter",
    "target",
    "draft",
    "tokenizer",
    "K",
    "vocabulary",
    "logits",
    "temperature_applied",
)


@dataclass
class Capture:
    """One capture, or several of one engine and model read as one (then `request` is renumbered).

    columns: arrays over blocks, in the order they were written. requests: what `enter` was told, by number.
    ends: verify steps and tokens of the last one, by number, of requests that ended. notes: what is missing.
    """

    folders: list[Path]
    manifest: dict[str, Any]
    columns: dict[str, Array]
    requests: dict[int, dict[str, Any]]
    ends: dict[int, tuple[int, int]]
    sha256: str
    closed: bool
    dropped: int
    notes: list[str] = field(default_factory=list)

    @property
    def drafts(self) -> int:
        return self.manifest["K"]

    @property
    def blocks(self) -> int:
        return len(self.columns["request"])


def find(path: Path) -> list[Path]:
    """The captures of a folder: itself, or those right below it."""
    if (path / MANIFEST).is_file():
        return [path]
    found = sorted(folder.parent for folder in path.glob(f"*/{MANIFEST}"))
    if not found:
        raise CaptureError(f"capture: expected {MANIFEST} in {path}, or in folders below it, found none")
    return found


def read(path: Path, columns: Sequence[str] = SCALARS) -> Capture:
    """Everything below `path` as one capture. Raises CaptureError naming the shard, or the field that differs."""
    captures = [_read(folder, columns) for folder in _begun(find(path))]
    first = captures[0]
    for other in captures[1:]:
        for name in SHARED:
            if other.manifest[name] != first.manifest[name]:
                where = f"{other.folders[0].name}/{MANIFEST}: {name}"
                raise CaptureError(
                    f"{where}: expected that of {first.folders[0].name}, found another: replay them apart"
                )
    return first if len(captures) == 1 else _joined(captures)


def _begun(folders: list[Path]) -> list[Path]:
    """Without those of servers that were never asked anything, where another one was."""

    def began(folder: Path) -> bool:
        try:
            return bool(json.loads((folder / MANIFEST).read_bytes())["shards"])
        except (OSError, ValueError, LookupError, TypeError):
            return True  # reading it says what is wrong

    return [folder for folder in folders if began(folder)] or folders


def _joined(captures: list[Capture]) -> Capture:
    columns: dict[str, list[Array]] = {name: [] for name in captures[0].columns}
    requests: dict[int, dict[str, Any]] = {}
    ends: dict[int, tuple[int, int]] = {}
    base = 0
    for capture in captures:
        for name, array in capture.columns.items():
            columns[name].append(array + base if name == "request" else array)
        requests |= {base + number: info for number, info in capture.requests.items()}
        ends |= {base + number: end for number, end in capture.ends.items()}
        base += 1 + max(capture.requests, default=0)
    return Capture(
        folders=[folder for capture in captures for folder in capture.folders],
        manifest=captures[0].manifest,
        columns={name: np.concatenate(parts) for name, parts in columns.items()},
        requests=requests,
        ends=ends,
        sha256=hashlib.sha256("".join(capture.sha256 for capture in captures).encode()).hexdigest(),
        closed=all(capture.closed for capture in captures),
        dropped=sum(capture.dropped for capture in captures),
        notes=[note for capture in captures for note in capture.notes],
    )


def manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """The checked manifest of one capture, and its SHA-256."""
    path, where = folder / MANIFEST, f"{folder.name}/{MANIFEST}"
    try:
        content = path.read_bytes()
        found = json.loads(content)
    except (OSError, ValueError) as error:
        raise CaptureError(f"{where}: expected JSON, found {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CaptureError(f"{where}: format: expected {FORMAT}, found {_brief(found)}")
    if found.get("version") not in READABLE:
        wanted = " or ".join(map(str, READABLE))
        raise CaptureError(f"{where}: version: expected {wanted}, found {found.get('version')!r}")
    for name, kind in FIELDS.items():
        if not isinstance(found.get(name), kind) or (kind is int and isinstance(found[name], bool)):
            raise CaptureError(f"{where}: {name}: expected {_kind(kind)}, found {found.get(name)!r}")
    if not (found["K"] >= 1 and found["vocabulary"] >= 1):
        raise CaptureError(f"{where}: K, vocabulary: expected at least 1, found {found['K']}, {found['vocabulary']}")
    for number, shard in enumerate(found["shards"]):
        if not _is_shard(shard, number):
            raise CaptureError(
                f"{where}: shards[{number}]: expected name, bytes, sha256, blocks, rows, found {shard!r}"
            )
    return found, hashlib.sha256(content).hexdigest()


def _kind(kind: Any) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join("null" if each is type(None) else each.__name__ for each in kinds)


def _brief(found: Any) -> str:
    return repr(found.get("format")) if isinstance(found, dict) else type(found).__name__


def _is_shard(shard: Any, number: int) -> bool:
    """Names are made from the number: a manifest cannot point out of its folder."""

    def is_file(entry: Any, kind: str) -> bool:
        return (
            isinstance(entry, dict)
            and entry.get("name") == f"{kind}-{number:05d}.safetensors"
            and isinstance(entry.get("sha256"), str)
            and isinstance(entry.get("bytes"), int)
        )

    if not (is_file(shard, "blocks") and isinstance(shard.get("blocks"), int) and shard["blocks"] >= 0):
        return False
    return shard.get("rows") is None or is_file(shard["rows"], "rows")


def check_file(folder: Path, entry: dict[str, Any]) -> Path:
    """The file of a manifest entry, whole and unchanged."""
    path, where = folder / entry["name"], f"{folder.name}/{entry['name']}"
    if not path.is_file():
        raise CaptureError(f"{where}: expected a shard of {entry['bytes']} bytes, found none")
    if (size := path.stat().st_size) != entry["bytes"]:
        raise CaptureError(f"{where}: expected {entry['bytes']} bytes, found {size} (truncated or overwritten)")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != entry["sha256"]:
        raise CaptureError(f"{where}: SHA-256: expected {entry['sha256']}, found {digest} (altered)")
    return path


def _read(folder: Path, names: Sequence[str]) -> Capture:
    found, sha256 = manifest(folder)
    K, V = found["K"], found["vocabulary"]
    parts: dict[str, list[Array]] = {name: [] for name in names}
    requests: dict[int, dict[str, Any]] = {}
    ends: dict[int, tuple[int, int]] = {}
    for shard in found["shards"]:
        path, where = check_file(folder, shard), f"{folder.name}/{shard['name']}"
        expected = shapes(shard["blocks"], K, V)
        try:
            with safe_open(path, "numpy") as opened:
                news = json.loads((opened.metadata() or {}).get("specaccept", "null"))
                if shard["blocks"]:  # before the first one nobody knew how wide the vocabulary is
                    _check(where, opened, expected)
                if not isinstance(news, dict) or news.get("version") != found["version"]:
                    version = news.get("version") if isinstance(news, dict) else None
                    raise CaptureError(f"{where}: version: expected {found['version']}, found {version!r}")
                if shard["blocks"]:
                    for name in names:
                        parts[name].append(opened.get_tensor(name))
        except (SafetensorError, OSError, ValueError) as error:
            if isinstance(error, CaptureError):
                raise
            raise CaptureError(f"{where}: expected a safetensors shard, found {str(error).splitlines()[0]}") from None
        requests |= dict(news["requests"])
        ends |= {number: (steps, kept) for number, steps, kept in news["ends"]}
        if shard["rows"] is not None:
            check_file(folder, shard["rows"])
    empty = shapes(0, K, V)
    dtypes = {name: np.int32 if COLUMNS[name] == INT else np.float32 for name in names}
    columns = {}
    for name, arrays in parts.items():
        columns[name] = np.concatenate(arrays) if arrays else np.empty(empty[name], dtypes[name])
    capture = Capture([folder], found, columns, requests, ends, sha256, found["closed"], found["blocks"]["dropped"])
    capture.notes = _notes(folder, found)
    unknown = sorted(set(columns["request"].tolist()) - set(requests))
    if unknown:
        raise CaptureError(
            f"{folder.name}: request {unknown[0]}: expected it among the requests of a shard, found none"
        )
    return capture


def _check(where: str, opened: Any, expected: dict[str, tuple[int, ...]]) -> None:
    """Every column, its type and its shape: what a reader of v1 may rely on."""
    there = set(opened.keys())
    for name, shape in expected.items():
        if name not in there:
            raise CaptureError(f"{where}: {name}: expected a column {list(shape)}, found none")
        piece = opened.get_slice(name)
        dtype = "I32" if COLUMNS.get(name, None) == INT else "F32"
        if tuple(piece.get_shape()) != shape or piece.get_dtype() != dtype:
            found = f"{piece.get_dtype()} {piece.get_shape()}"
            raise CaptureError(f"{where}: {name}: expected {dtype} {list(shape)}, found {found}")


def _notes(folder: Path, found: dict[str, Any]) -> list[str]:
    notes = []
    if not found["closed"]:
        notes.append(f"{folder.name}: the engine did not end its capture: read up to its last whole shard")
    if found.get("error"):
        notes.append(f"{folder.name}: the capture stopped by itself: {found['error']}")
    listed = {entry["name"] for shard in found["shards"] for entry in (shard, shard["rows"]) if entry}
    left = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in listed)
    if left:
        notes.append(f"{folder.name}: not in the manifest, not read: {', '.join(left)}")
    if found["blocks"]["dropped"]:
        notes.append(f"{folder.name}: {found['blocks']['dropped']} blocks were dropped (the queue was full)")
    return notes


def read_rows(folder: Path, number: int) -> dict[str, Array]:
    """Full rows of shard `number` of one capture: target_logits [n, K+1, V] of its blocks flagged FULL (v1: of all),
    and target_probs, draft_probs of those of them flagged DRAWN, in order."""
    found, _ = manifest(folder)
    shard = found["shards"][number]
    if shard["rows"] is None:
        raise CaptureError(
            f"{folder.name}/{shard['name']}: expected full rows beside it, found none (capture with rows)"
        )
    path, where = check_file(folder, shard["rows"]), f"{folder.name}/{shard['rows']['name']}"
    with safe_open(folder / shard["name"], "numpy") as opened:
        flags = opened.get_tensor("flags")
    full = flags if found["version"] == 1 else flags[flags & FULL != 0]
    drawn = int((full & DRAWN != 0).sum())
    expected = row_shapes(len(full), drawn, found["K"], found["vocabulary"])
    with safe_open(path, "numpy") as opened:
        _check(where, opened, expected)
        return {name: opened.get_tensor(name) for name in ROWS if name in expected}
