"""Entry point of the group `sglang.srt.plugins`: registers the hooks in every process the engine starts.

The engine logs what a plugin raises and goes on without it. So where a policy was asked for, a failure here ends the
process instead (SystemExit is not what the engine catches), and whether the hooks were really applied is checked again
when the draft worker starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from adapters.arm import BLOCK_VERIFY, VERIFY_CAP, Arming, request_policy
from adapters.policy import CUSTOM_PARAM, ENVIRONMENT

logger = logging.getLogger(__name__)


def register(environ: Mapping[str, str] = os.environ) -> None:
    """Called by the engine without arguments."""
    try:
        install(Arming.from_environment(environ))
    except Exception as error:
        if any(environ.get(name, "").strip() for name in (ENVIRONMENT, BLOCK_VERIFY, VERIFY_CAP)):
            raise SystemExit(f"specaccept: {error}") from error
        logger.warning("specaccept: not armed, request policies are refused: %s", error)
        refuse_requests(str(error))


def install(arming: Arming) -> None:
    """Check every seam of the installed release, then register one hook on each."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from adapters.sglang import seams
    from adapters.sglang.adapter import HOOKS, Adapter

    paths = seams.check(sglang.__version__)
    adapter = Adapter(sglang.__version__, arming)
    for name, method in HOOKS.items():
        HookRegistry.register(paths[name], getattr(adapter, method), HookType.AROUND)


def refuse_requests(reason: str) -> None:
    """What is left where the seams are unknown: a request that asks for a policy gets a 400, not a silent strict."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def verify(original: Callable, params: Any, *args: Any, **kwargs: Any) -> None:
        original(params, *args, **kwargs)
        if request_policy(params.custom_params) is not None:
            raise ValueError(f"sampling_params.custom_params.{CUSTOM_PARAM}: not armed: {reason}")

    HookRegistry.register("sglang.srt.sampling.sampling_params.SamplingParams.verify", verify, HookType.AROUND)
