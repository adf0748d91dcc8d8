"""Code answers: which code of a text is the answer, and whether it passes its tests."""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.score.outcome import Score, is_cut_off, visible

PARSER_VERSION = "code-2"
SANDBOX = Path(__file__).with_name("sandbox.py")
_FENCE = re.compile(r"[ ]{0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`\n]*")
_PYTHON = ("", "py", "python", "python3")


class SandboxError(RuntimeError):
    """The sandbox failed, which says nothing about the answer."""


@dataclass(frozen=True)
class Limits:
    """seconds: wall and CPU time of one answer, all its tests. memory_bytes: address space. file_bytes: of one file."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


@dataclass(frozen=True)
class Run:
    """passed: every test ran and held. detail: what went wrong, in a few words. layers: the isolation in force."""

    passed: bool
    detail: str
    layers: tuple[str, ...]


class Runner(Protocol):
    """Runs one answer against its tests. A container can take the place of `run_code`."""

    def __call__(
        self, source: str, tests: Sequence[str], *, entry_point: str, prelude: str = "", limits: Limits = ...
    ) -> Run: ...


def score_code(
    item: Any,
    text: str,
    finish_reason: str | Mapping[str, Any],
    *,
    runner: Runner | None = None,
    limits: Limits | None = None,
) -> Score:
    """Score a code answer: item.reference holds entry_point, prelude and tests.

    SandboxError: the infrastructure failed; ValueError: the finish reason is no outcome of the model. Scoring competes
    with nothing: call it after the timed arms, since its time limit is one of wall time.
    """
    cut_off = is_cut_off(finish_reason)
    answer = visible(text)
    if answer is None:
        return Score("truncated", None, "unclosed think")
    source = extract(answer)
    if source is None:
        return Score("truncated" if cut_off else "unparsed", None, "no complete code fence")
    reference = item.reference
    run = (runner or run_code)(
        source,
        reference["tests"],
        entry_point=reference["entry_point"],
        prelude=reference.get("prelude", ""),
        limits=limits or Limits(),
    )
    return Score("correct" if run.passed else "wrong", source, run.detail or "passed")


def extract(answer: str) -> str | None:
    """The code of the last complete Python fence of an answer (without its thinking); None where there is none.

    A fence with a language always opens one, so a stray closing fence before it does no harm; one after it opens a
    fence that never completes, or an empty one, which is no code. Other languages (shell, output) do not count.
    """
    found = None
    opened: tuple[str, str] | None = None
    lines: list[str] = []
    for line in answer.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        if fence and opened and not fence[2] and fence[1][0] == opened[0][0] and len(fence[1]) >= len(opened[0]):
            if opened[1] in _PYTHON and any(text.strip() for text in lines):
                found = "\n".join(lines) + "\n"
            opened = None
        elif fence and (opened is None or (fence[2] and not opened[1])):
            opened, lines = (fence[1], fence[2].lower()), []
        elif opened:
            lines.append(line)
    return found


def run_code(
    source: str,
    tests: Sequence[str],
    *,
    entry_point: str,
    prelude: str = "",
    limits: Limits = Limits(),
) -> Run:
    """Run an answer against its tests in processes of their own (see sandbox.py), and leave nothing behind.

    tests: sources that call `entry_point` and raise where it is wrong. prelude: code that answer and tests share.
    A pass is proven by a token that only the judging process holds and hands out after the last test.
    """
    token = secrets.token_hex(16)
    job = {"source": source, "prelude": prelude, "entry_point": entry_point, "seconds": limits.seconds}
    job |= {"memory_bytes": limits.memory_bytes, "file_bytes": limits.file_bytes}
    frames = frame(job) + frame({"tests": list(tests), "token": token})
    with tempfile.TemporaryDirectory(prefix="specaccept-") as folder:
        os.chmod(folder, 0o777 if os.geteuid() == 0 else 0o700)
        output = _converse(folder, frames, limits.seconds + 5)
    if output is None:
        return Run(False, "timeout", ())
    return read_result(output, token)


def read_result(output: bytes, token: str, around: tuple[str, ...] = ()) -> Run:
    """The judge's answer. around: isolation that it does not know of."""
    try:
        size = int.from_bytes(output[:8], "big")
        result = json.loads(output[8 : 8 + size])
    except ValueError:
        raise SandboxError(f"code sandbox: expected a result, found {output[-200:]!r}") from None
    if "error" in result:
        raise SandboxError(f"code sandbox: {result['error']}")
    passed = secrets.compare_digest(str(result["token"]), token)
    return Run(passed, "" if passed else result["detail"] or "failed", (*around, *result["layers"]))


def frame(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return len(data).to_bytes(8, "big") + data


def _converse(folder: str, frames: bytes, seconds: float) -> bytes | None:
    """Feed the judge, read its one answer (at most 64 KiB), end its process group. None: it took too long."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-s", "-S", "-B", str(SANDBOX)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    output = b""
    try:
        with selectors.DefaultSelector() as ready:
            os.set_blocking(process.stdin.fileno(), False)
            ready.register(process.stdin, selectors.EVENT_WRITE)
            ready.register(process.stdout, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                for key, _ in ready.select(left):
                    if key.fileobj is process.stdin:
                        try:
                            frames = frames[os.write(key.fd, frames[:65536]) :]
                        except BrokenPipeError:
                            frames = b""
                        if not frames:
                            ready.unregister(process.stdin)
                            process.stdin.close()
                    else:
                        part = os.read(key.fd, 65536)
                        output += part
                        if not part or len(output) > 65536:
                            return output
    finally:
        # The leader is not yet reaped, so the group's id is still ours.
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        if not process.stdin.closed:
            process.stdin.close()
        process.wait()
