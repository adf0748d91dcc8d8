"""A plugin for measurements alone: takes the adapter's hooks out of a running server and puts them in again.

Registered beside the adapter (`device_toggle.py`). The request's own id says which code serves it: `off-...` the
engine's functions as they were before any plugin, `on-...` the hooked ones; `flip-N-...` changes sides after every N
verify steps, in the order on, off, off, on, and writes the time of each step to SPECACCEPT_TOGGLE_OUT. Switch only
while nothing else is in flight. What a server does once (constructors, snapshots) stays hooked.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from adapters.sglang.adapter import HOOKS, INNER, SPARE, bindings

OUT = "SPECACCEPT_TOGGLE_OUT"
ONCE = ("worker", "scheduler", "records", "clear")
TAKEN = [name for name in HOOKS if name not in ONCE + INNER + SPARE]  # the adapter itself takes those out
ORDER = (True, False, False, True)
MANAGERS = "sglang.srt.managers"
CONTROLS = {  # what the engine calls once per request, and once per step
    f"{MANAGERS}.tokenizer_manager.TokenizerManager.generate_request": "asked",
    f"{MANAGERS}.scheduler.Scheduler.handle_generate_request": "admitted",
    f"{MANAGERS}.scheduler.Scheduler.run_batch": "step",
}


class Toggle:
    def __init__(self, version: str) -> None:
        self.version, self.on = version, True
        self.places: list[tuple[Any, str, Any, Any]] | None = None
        self.every = 0  # steps between flips; 0: none
        self.flips: list[tuple[int, bool, int, int]] = []  # ns, whether hooked, segment, requests: at a step's start

    def set(self, on: bool) -> None:
        if on == self.on:
            return
        if self.places is None:
            self.places = bindings(self.version, TAKEN)
        for holder, name, hooked, plain in self.places:
            setattr(holder, name, hooked if on else plain)
        self.on = on

    def serve(self, rid: Any) -> None:
        """Take the side that a request's id names."""
        side = str(rid[0] if isinstance(rid, list) else rid).split("-")
        if side[0] in ("on", "off"):
            self.set(side[0] == "on")
        elif side[0] == "flip":
            self.set(True)

    # -- hooks ----------------------------------------------------------------------------------------------------

    def asked(self, original: Callable, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.serve(obj.rid)
        return original(manager, obj, *args, **kwargs)

    def admitted(self, original: Callable, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.write()
        rid = str(request.rid)
        self.serve(rid)
        self.every = int(rid.split("-")[1]) if rid.startswith("flip-") else 0
        return original(scheduler, request, *args, **kwargs)

    def step(self, original: Callable, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.every and batch.forward_mode.is_decode():
            segment = len(self.flips) // self.every
            self.set(ORDER[segment % len(ORDER)])
            self.flips.append((time.perf_counter_ns(), self.on, segment, len(batch.reqs)))
        return original(scheduler, batch, *args, **kwargs)

    def write(self) -> None:
        """The steps of the flipped request that was served last."""
        if self.flips and (out := os.environ.get(OUT)):
            with open(out, "a") as file:
                file.write(json.dumps(self.flips) + "\n")
        self.flips = []


def register() -> None:
    """Called by the engine without arguments, like the adapter's own."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    toggle = Toggle(sglang.__version__)
    for path, method in CONTROLS.items():
        HookRegistry.register(path, getattr(toggle, method), HookType.AROUND)
