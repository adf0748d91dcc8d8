"""The seam table against wheels that are only unpacked, not installed: `python seam_drift.py WHEEL...`.

Reads names and parameter lists with ast, so it needs no GPU and none of the engine's dependencies. Prints one line a
seam that drifted and exits 1; a new release starts here.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from adapters.sglang import seams


def parameters(wheel: zipfile.ZipFile, path: str) -> list[str] | None:
    """Parameter names at a dotted path of the wheel, `cls` left out; None where there is nothing of that name."""
    parts = path.split(".")
    names = set(wheel.namelist())
    for depth in range(len(parts) - 1, 0, -1):
        file = "/".join(parts[:depth]) + ".py"
        if file in names:
            return _inside(ast.parse(wheel.read(file)), parts[depth:], wheel)
    return None


def _inside(tree: ast.AST, parts: list[str], wheel: zipfile.ZipFile) -> list[str] | None:
    node = tree
    for part in parts:
        found = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        if not found:
            return _imported(tree, part, wheel) if len(parts) == 1 else None
        node = found[0]
    if not isinstance(node, ast.FunctionDef):
        return None
    a = node.args
    listed = [x.arg for x in [*a.posonlyargs, *a.args, *a.kwonlyargs]]
    return [name for name in listed if name != "cls"]


def _imported(tree: ast.AST, name: str, wheel: zipfile.ZipFile) -> list[str] | None:
    """A module global that was imported: follow it to where it is defined."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            found = parameters(wheel, f"{node.module}.{name}")
            if found is not None:
                return found
    return None


def main(paths: list[str]) -> int:
    drifted = 0
    for path in paths:
        version = Path(path).name.split("-")[1]
        with zipfile.ZipFile(path) as wheel:
            for name, (target, wanted) in seams.expected(version).items():
                found = parameters(wheel, target)
                if found != list(wanted):
                    drifted += 1
                    print(f"{version} {name}: {target}: expected {list(wanted)}, found {found}")
            print(f"{version}: {len(seams.expected(version))} seams")
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
