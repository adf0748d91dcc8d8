"""Which commit code is of where there is no git: a tree unpacked from `git archive`, or a copy of a working tree.

`git archive` fills in .git_archival.txt. Its tree hash is computed again from the files: equal, nothing was changed;
else (an archive of a part, a results folder that grew) it cannot be told, and `dirty` is `unknown`. A copy of a working
tree takes along .code.json, written by `python -m harness.records.archive > .code.json`, whose SHA-256 is of the code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ARCHIVAL, STAMP = ".git_archival.txt", ".code.json"
TEMPLATE = "commit: $Format:%H$\ntree: $Format:%T$\n"
UNKNOWN = "unknown"


def without_git(root: Path, sha256: str) -> dict[str, Any]:
    """commit and dirty of the code below `root`, whose content has that SHA-256; None, None where nothing says it."""
    stamp = _read(root / STAMP)
    if stamp is not None:
        told = json.loads(stamp)
        return {"commit": told["commit"], "dirty": told["dirty"] if told["sha256"] == sha256 else True}
    found = re.fullmatch(r"commit: ([0-9a-f]{40,64})\ntree: ([0-9a-f]{40,64})\n", _read(root / ARCHIVAL) or "")
    if found is None:
        return {"commit": None, "dirty": None}
    return {"commit": found[1], "dirty": False if tree(root).hex() == found[2] else UNKNOWN}


def tree(root: Path) -> bytes:
    """git's SHA-1 of a folder's files, those that .gitignore names left out, .git_archival.txt as it is committed."""
    lines = [line.strip() for line in (_read(root / ".gitignore") or "").splitlines()]
    names = [line.strip("/") for line in lines if line and line[0] not in "#!"]
    kept = [line.rpartition("/")[2] for line in lines if line.startswith("!")]
    return _tree(root, [ARCHIVAL], lambda name: any(fnmatch(name, each) for each in names) and name not in kept)


def _tree(folder: Path, archival: list[str], ignored: Callable[[str], bool]) -> bytes:
    entries = []
    for path in folder.iterdir():
        if path.name == ".git" or ignored(path.name):
            continue
        if path.is_symlink():
            mode, content = b"120000", _object(b"blob", os.fsencode(os.readlink(path)))
        elif path.is_dir():
            if not any(path.iterdir()):
                continue  # git knows no empty folders
            mode, content = b"40000", _tree(path, [], ignored)
        else:
            data = TEMPLATE.encode() if path.name in archival else path.read_bytes()
            mode, content = (b"100755" if os.access(path, os.X_OK) else b"100644"), _object(b"blob", data)
        entries.append((os.fsencode(path.name) + (b"/" if mode == b"40000" else b""), mode, content))
    body = b"".join(mode + b" " + name.rstrip(b"/") + b"\0" + content for name, mode, content in sorted(entries))
    return _object(b"tree", body)


def _object(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content).digest()


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


if __name__ == "__main__":
    from harness.records.provenance import code

    print(json.dumps(code()))
