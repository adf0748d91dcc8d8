"""Model folders: where they are, which revision they are, which tokenizer they carry."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from harness.config import rooted
from harness.engines.tokenizer import FILES, Tokenizer

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HASHED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
CHUNK = 1 << 20


class CheckpointError(ValueError):
    """A model that cannot be found."""


def is_hub_id(path: str) -> bool:
    return HUB_ID.fullmatch(path) is not None and not rooted(path).exists()


def is_local(path: str) -> bool:
    """A folder with a config.json, here or in the hub's cache."""
    if is_hub_id(path):
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(path, "config.json"), str)
    return (rooted(path) / "config.json").is_file()


def small_files(path: str, revision: str | None = None) -> Path:
    """The folder with the tokenizer and configuration of a model; from the hub only these are fetched."""
    if not is_hub_id(path):
        folder = rooted(path)
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"model: expected a folder with config.json or a hub id, found {path!r}")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"model: {path} from the hub: {str(error).splitlines()[0]}") from None


def tokenizer(path: str, revision: str | None = None) -> Tokenizer:
    return Tokenizer.from_folder(small_files(path, revision))


def identify(path: str, revision: str | None = None) -> dict[str, Any]:
    """What names a model's content: the commit of a hub id, the SHA-256 over a local folder's files."""
    if is_hub_id(path):
        return {"path": path, "revision": small_files(path, revision).name, "sha256": None}
    folder = rooted(path)
    digest = hashlib.sha256()
    for file in sorted({file for pattern in HASHED for file in folder.glob(pattern)}):
        digest.update(f"{file.name}\0{_hash(file)}\n".encode())
    return {
        "path": path if not Path(path).is_absolute() else folder.name,
        "revision": None,
        "sha256": digest.hexdigest(),
    }


def _hash(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def block_size(path: str) -> int | None:
    """K of a draft folder, None where it does not say."""
    config = json.loads((small_files(path) / "config.json").read_text())
    return config.get("block_size") or (config.get("dspark_config") or {}).get("block_size")
