"""Capture: what the target and the draft said at every verified position, for replay under any acceptance policy.

`Settings.from_environment()` is None where SPECACCEPT_CAPTURE is unset: an engine then has no Recorder, and pays one
comparison with None per step. README.md describes format v1 and what a capture is valid for.
"""

from adapters.capture.layout import FORMAT, VERSION, CaptureError
from adapters.capture.recorder import Blocks, Drawn, Recorder
from adapters.capture.settings import Settings

__all__ = ["FORMAT", "VERSION", "Blocks", "CaptureError", "Drawn", "Recorder", "Settings"]
