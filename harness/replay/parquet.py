"""The scalars of a capture as Parquet, one file per shard and one row per verified draft: for other tools to read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import safe_open

from adapters.capture.layout import BLOCK, DRAFT, ROW
from harness.records.run import write_atomically
from harness.replay.reader import check_file, manifest

INDEX, VERSION = "parquet.json", 1


def export(folder: Path) -> list[Path]:
    """Write positions-NNNNN.parquet beside each shard that has none yet, and their index. Returns the new files.

    A file is made again where the shard it was made of is another. Raises CaptureError for a shard that is not whole.
    """
    found, _ = manifest(folder)
    index = _index(folder)
    names: dict[int, str] = {}
    made: list[Path] = []
    for shard in found["shards"]:
        name = shard["name"].replace("blocks-", "positions-").replace(".safetensors", ".parquet")
        with safe_open(check_file(folder, shard), "numpy") as opened:
            news = json.loads(opened.metadata()["specaccept"])
            names |= {number: info["rid"] for number, info in news["requests"]}
            old = index.get(name, {})
            if old.get("shard_sha256") == shard["sha256"] and (folder / name).is_file():
                continue
            table = _flat({column: opened.get_tensor(column) for column in (*BLOCK, *DRAFT, *ROW)}, names, found["K"])
        pq.write_table(table, folder / f".{name}.part", compression="zstd")
        (folder / f".{name}.part").replace(folder / name)
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        index[name] = {"shard": shard["name"], "shard_sha256": shard["sha256"], "sha256": digest, "rows": len(table)}
        made.append(folder / name)
    if made:
        text = json.dumps({"version": VERSION, "files": index}, indent=1) + "\n"
        write_atomically(folder / INDEX, text.encode())
    return made


def _index(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / INDEX).read_bytes())
        return found["files"] if found["version"] == VERSION else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _flat(columns: dict[str, Any], names: dict[int, str], drafts: int) -> pa.Table:
    """[n] and [n, K] and [n, K + 1] columns -> a row per live draft."""
    kept = np.arange(drafts) < columns["live"][:, None]
    flat: dict[str, Any] = {"rid": [names[number] for number in np.repeat(columns["request"], kept.sum(1)).tolist()]}
    for name in BLOCK:
        flat[name] = np.repeat(columns[name], kept.sum(1))
    flat["draft_index"] = np.broadcast_to(np.arange(drafts, dtype=np.int32), kept.shape)[kept]
    flat |= {name: columns[name][kept] for name in DRAFT}
    flat |= {name: columns[name][:, :drafts][kept] for name in ROW}
    return pa.table(flat)
