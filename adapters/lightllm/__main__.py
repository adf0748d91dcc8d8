"""python -m adapters.lightllm serve [LightLLM's own arguments]     start an armed server from any kind of installation
python -m adapters.lightllm check [FOLDER]                       the seams of a tree (the folder that holds lightllm/)
python -m adapters.lightllm ask FOLDER                           one snapshot from SPECACCEPT_TELEMETRY_DIR
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from adapters.lightllm import exchange, seams

SITE = Path(__file__).resolve().parent / "site"
PACKAGES = SITE.parents[2]  # the folder that holds adapters/


def armed_environment(environ: MutableMapping[str, str]) -> None:
    """PYTHONPATH with the hook first. Spawned ranks and the HTTP process inherit it."""
    old = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    own = [str(SITE), str(PACKAGES)]
    environ["PYTHONPATH"] = os.pathsep.join(own + [entry for entry in old if entry not in own])


def installed_root() -> Path:
    spec = importlib.util.find_spec("lightllm")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:  # no origin: a folder of that name
        raise seams.Refused(["lightllm: expected an importable package, found none (PYTHONPATH?)"])
    return Path(next(iter(spec.submodule_search_locations))).resolve().parent


def main(argv: list[str]) -> int:
    match argv:
        case ["serve", *arguments]:
            policy = seams.require(installed_root())
            armed_environment(os.environ)
            print(f"specaccept: starting lightllm under {policy.key}", file=sys.stderr, flush=True)
            os.execv(sys.executable, [sys.executable, "-m", "lightllm.server.api_server", *arguments])
        case ["check", *folder] if len(folder) < 2:
            root = Path(folder[0]) if folder else installed_root()
            problems = seams.drift(root)
            print("\n".join(problems) or f"{seams.engine_version(root)}: every seam as expected")
            return 1 if problems else 0
        case ["ask", folder_name]:
            print(json.dumps(exchange.ask(folder_name), indent=1, sort_keys=True))
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
