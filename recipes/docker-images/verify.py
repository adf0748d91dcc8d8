"""verify.py ENGINE [--record]: does the adapter layer of this image still fit the engine in it?

At build (`--record`) and again at start, before a model is loaded: every place of the engine that the adapter holds
is looked up in the engine's sources (no import, no GPU), and the adapter's files must be the ones that were installed.
Exit status 1 and one line for each thing that drifted.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from adapters.telemetry import file_hashes

RECORD = Path(__file__).with_name("adapter.json")
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "starlette", "uvicorn", "huggingface_hub")


def folder(package: str) -> Path:
    """Where a package lies. Raises LookupError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{package}: expected an installed package, found none")
    return Path(next(iter(spec.submodule_search_locations)))


def source(dotted: str) -> Path | None:
    """The file of a module, or None."""
    package, _, rest = dotted.partition(".")
    path = folder(package).joinpath(*rest.split(".")) if rest else folder(package)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def find(dotted: str, hops: int = 4) -> ast.AST:
    """The definition at `module.name` or `module.Class.name`, followed through imports. Raises LookupError."""
    parts = dotted.split(".")
    cut = next((n for n in range(len(parts) - 1, 0, -1) if source(".".join(parts[:n]))), None)
    if cut is None:
        raise LookupError(f"{dotted}: expected a module, found none")
    module = ".".join(parts[:cut])
    body = ast.parse(source(module).read_bytes()).body
    found: ast.AST | None = None
    for place, name in enumerate(parts[cut:], cut):
        found = next((node for node in body if getattr(node, "name", None) == name), None)
        if found is None:
            return imported(dotted, body, name, parts[place + 1 :], hops)
        body = getattr(found, "body", [])
    assert found is not None
    return found


def imported(dotted: str, body: list, name: str, rest: list[str], hops: int) -> ast.AST:
    """The definition behind a name that a module imports; one import may stand for each kind of device."""
    for node in (node for top in body for node in ast.walk(top) if isinstance(node, ast.ImportFrom)):
        for alias in node.names:
            if (alias.asname or alias.name) == name and node.module and not node.level and hops:
                try:
                    return find(".".join([node.module, alias.name, *rest]), hops - 1)
                except LookupError:
                    continue
    raise LookupError(f"{dotted}: expected {name}, found none")


def parameters(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef):
        node = next((item for item in node.body if getattr(item, "name", None) == "__init__"), node)
    arguments = getattr(node, "args", None)
    if arguments is None:
        return []
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def sglang() -> tuple[str, list[str]]:
    from adapters.arm import Refused
    from adapters.sglang import seams

    found = version("sglang")
    problems = []
    try:
        expected = seams.expected(found)
    except Refused as error:
        return found, [str(error)]
    for path, names in expected.values():
        try:
            there = parameters(find(path))
        except LookupError as error:
            problems.append(str(error))
            continue
        if there[:1] in (["cls"], ["self"]) and names[:1] != ("self",):
            there = there[1:]
        if tuple(there) != names:
            problems.append(f"{path}: expected parameters {list(names)}, found {there}")
    return found, problems


def lightllm() -> tuple[str, list[str]]:
    from adapters.lightllm import seams

    root = folder("lightllm").parent
    return seams.engine_version(root), seams.drift(root)


def reference() -> tuple[str, list[str]]:
    problems = []
    for name in NEEDED:
        try:
            folder(name)
        except LookupError as error:
            problems.append(str(error))
    if not problems:
        try:
            find("transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM")
        except LookupError as error:
            problems.append(str(error))
    return version("specaccept"), problems


ENGINES = {"sglang": sglang, "lightllm": lightllm, "reference": reference}


def drift(engine: str, record: bool) -> list[str]:
    try:
        found, problems = ENGINES[engine]()
    except (LookupError, PackageNotFoundError, OSError, SyntaxError) as error:
        return [f"{engine}: {error}"]
    now = {"engine": engine, "version": found, "files": file_hashes()}
    if record:
        if not problems:
            RECORD.write_text(json.dumps(now, indent=1, sort_keys=True))
        return problems
    try:
        built = json.loads(RECORD.read_text())
    except (OSError, ValueError):
        return [*problems, f"{RECORD}: expected what the build recorded, found none"]
    for name in ("engine", "version"):
        if built[name] != now[name]:
            problems.append(f"{name}: built with {built[name]}, found {now[name]}")
    changed = sorted(name for name in built["files"].keys() | now["files"].keys() if differs(name, built, now))
    return [*problems, *(f"{name}: not the file that was installed" for name in changed)]


def differs(name: str, built: dict, now: dict) -> bool:
    return built["files"].get(name) != now["files"].get(name)


def main(arguments: list[str]) -> int:
    if arguments[:1] == [] or arguments[0] not in ENGINES or arguments[1:] not in ([], ["--record"]):
        print(f"usage: verify.py {{{','.join(ENGINES)}}} [--record]", file=sys.stderr)
        return 2
    problems = drift(arguments[0], bool(arguments[1:]))
    for problem in problems:
        print(f"specaccept: refused: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
