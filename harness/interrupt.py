"""Ctrl-C, SIGTERM and a closed terminal, as one exception that unwinds everything once.

The first signal raises `Interrupted` in the main thread; later ones are ignored: nothing cuts the clean-up short.
"""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """status: the exit status a shell expects, 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.status = number, 128 + number

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int]]:
        """As it comes back from another process."""
        return Interrupted, (self.number,)


def _raise(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


def install() -> None:
    """A signal that whoever started this ignores (nohup, a background job) stays ignored."""
    for each in SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, _raise)
