"""What a replay leaves: results/replays/<UTC>-<digest>/replay.json, written once, sealed, and its plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from harness.records.run import now, write_atomically
from harness.records.schema import Verdict, digest

VERSION = 1
FILE, PLOT = "replay.json", "replay.svg"


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One policy. tokens_per_step, change: by phase (all, think, answer), an estimate or null. change: a fraction
    against the baseline. acceptance[i]: share of blocks that accept more than i drafts. grid: a point of the ASD grid.
    """

    name: str
    key: str
    rule: str
    kind: str
    why: str | None
    tokens_per_step: dict[str, dict[str, Any] | None]
    change: dict[str, dict[str, Any] | None]
    acceptance: list[float]
    grid: bool = False


class Replay(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One replay. capture: what was read, and what of it counts. reproduced: the policy that ran, decided again from
    the capture, against what the engine accepted. pictures: the numbers behind the plot. limits: to be printed under
    any table made of this."""

    schema_version: int = VERSION
    id: str
    created: str
    code: dict[str, Any]
    capture: dict[str, Any]
    baseline: str
    policies: list[Entry]
    reproduced: dict[str, Any]
    pictures: dict[str, Any]
    prediction: dict[str, Any] | None
    limits: list[str]
    notes: list[str]
    verdict: Verdict
    seal: str | None = None


class ReplayError(ValueError):
    """A replay record that does not hold together."""


def seal(record: Replay) -> str:
    """Of the record as it is read back."""
    record = msgspec.json.decode(msgspec.json.encode(record), type=Replay)
    return digest(msgspec.to_builtins(record) | {"seal": None})


def new_folder(results: Path, capture_sha256: str) -> tuple[Path, str]:
    """A folder results/replays/<UTC>-<digest of the capture> that did not exist before, and when it was made."""
    created = now()
    stem = f"{created.replace('-', '').replace(':', '')}-{capture_sha256[:8]}"
    parent = results / "replays"
    parent.mkdir(parents=True, exist_ok=True)
    for turn in range(1000):
        folder = parent / (stem if turn == 0 else f"{stem}-{turn + 1}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder, created
    raise FileExistsError(f"replays: no free directory name for {stem} in {parent}")


def write(folder: Path, record: Replay, plot: bytes) -> None:
    record.seal = seal(record)
    write_atomically(folder / PLOT, plot)
    write_atomically(folder / FILE, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read(folder: Path) -> Replay:
    """Raises ReplayError naming the folder."""
    try:
        record = msgspec.json.decode((folder / FILE).read_bytes(), type=Replay)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise ReplayError(f"{folder.name}: {FILE}: {str(error).splitlines()[0]}") from None
    if record.schema_version != VERSION:
        raise ReplayError(f"{folder.name}: schema_version: expected {VERSION}, found {record.schema_version}")
    for name, expected, found in (("id", folder.name, record.id), ("seal", seal(record), record.seal)):
        if expected != found:
            raise ReplayError(f"{folder.name}: {name}: expected {expected!r}, found {found!r} ({FILE} was edited)")
    return record


def read_all(results: Path) -> list[Replay]:
    """Every replay below results/replays, oldest first."""
    replays = results / "replays"
    return [read(folder) for folder in sorted(replays.iterdir()) if folder.is_dir()] if replays.is_dir() else []
