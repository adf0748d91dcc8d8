"""Arms a LightLLM process while it imports its own modules.

`install` runs at interpreter start (specaccept-lightllm.pth, or site/sitecustomize.py of the launcher) in every process
of the server. It does nothing unless SPECACCEPT_POLICY is set, imports neither torch nor LightLLM, and may run twice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from types import ModuleType

from adapters.policy import ENVIRONMENT

PACKAGE = "lightllm"


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Watch LightLLM's imports when SPECACCEPT_POLICY is set. Idempotent."""
    if not environ.get(ENVIRONMENT, "").strip():
        return
    if any(isinstance(finder, PostImport) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        raise SystemExit(f"specaccept: {ENVIRONMENT} is set but {PACKAGE} was imported before the hook was installed")
    sys.meta_path.insert(0, PostImport())


class PostImport(MetaPathFinder):
    """Hands a watched module to its handler right after its own code ran."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        handler = _handler(fullname)
        if handler is None:
            return None
        for finder in list(sys.meta_path):
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _after(spec.loader, handler)
                return spec
        return None


def _after(loader, handler: Callable[[ModuleType], None]) -> None:
    """The loader belongs to this one spec, so its method can be replaced on the instance."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        handler(module)

    loader.exec_module = exec_module


def _handler(name: str) -> Callable[[ModuleType], None] | None:
    if name == PACKAGE:
        return _check_tree
    if name == f"{PACKAGE}.server.api_start":
        return _check_start
    from adapters.lightllm import seams

    if name in seams.PATCHED_MODULES:
        return _patch
    return None


def _check_tree(module: ModuleType) -> None:
    """First thing in every process: the policy and the seams, by reading the sources. No torch yet."""
    from adapters.lightllm import seams

    seams.require(seams.root_of(module))


def _check_start(module: ModuleType) -> None:
    """The launcher knows the arguments before it starts anything: refuse there."""
    from adapters.lightllm import seams

    start = module.normal_or_p_d_start

    def normal_or_p_d_start(args, *rest, **named):
        seams.require_arguments(args, seams.root_of(sys.modules[PACKAGE]))
        return start(args, *rest, **named)

    module.normal_or_p_d_start = normal_or_p_d_start  # type: ignore[attr-defined]


def _patch(module: ModuleType) -> None:
    from adapters.lightllm import patch

    patch.module_loaded(module)
