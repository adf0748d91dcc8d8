"""Engines: what a task asks of one (`base`), its clients (`native`, `lightllm`), the embedded one (`reference`)."""

from __future__ import annotations

from pathlib import Path

from harness.engines.base import EngineClient

APIS = ("lightllm", "native")  # values of engine.api


def connect(api: str, url: str, telemetry: Path | None = None, unarmed: bool = False) -> EngineClient:
    """The client of an engine's API. telemetry: the folder of a server that publishes its snapshot by file.

    unarmed: the engine runs without its adapter, and the client sees to it that it does.
    """
    if api == "lightllm":
        from harness.engines.lightllm import LightLLMClient

        if unarmed:
            return LightLLMClient(url, None)
        if telemetry is None:
            raise ValueError("telemetry: expected the server's SPECACCEPT_TELEMETRY_DIR, found none")
        return LightLLMClient(url, telemetry)
    from harness.engines.native import NativeClient

    return NativeClient(url, unarmed=unarmed)
