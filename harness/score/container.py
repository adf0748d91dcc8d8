"""Code answers in containers: the sandbox of sandbox.py, each answer in a container of its own.

No network, nobody's user, a read-only root, no capabilities, bounded processes, memory, files and time; nothing of this
machine is mounted. The judge and its proof are those of `run_code`: only the walls around them are other ones.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from harness.launch.docker_daemon import OWNED, OWNER, connected, explained, owner, reap, remove
from harness.score.code import SANDBOX, Limits, Run, SandboxError, frame, read_result

NOBODY = "65534:65534"
WORK = "/tmp"
OUTPUT_BYTES = 65536
PIDS = 16
DEFAULT = Limits()
LAYERS = ("container", "no network", "nobody", "read-only", "limits")


@contextmanager
def runner(image: str) -> Iterator[ContainerRunner]:
    """image: anything with a Python 3.10 or later as python3. Raises LaunchError where no engine answers."""
    with connected() as client:
        reap(client)
        yield ContainerRunner(client, image)


class ContainerRunner:
    """A `Runner`: one container per answer, gone when it returns."""

    def __init__(self, client: Any, image: str) -> None:
        self._client = client
        self._image = image

    def __call__(
        self, source: str, tests: Sequence[str], *, entry_point: str, prelude: str = "", limits: Limits = DEFAULT
    ) -> Run:
        token = secrets.token_hex(16)
        job = {"source": source, "prelude": prelude, "entry_point": entry_point, "seconds": limits.seconds}
        job |= {"memory_bytes": limits.memory_bytes, "file_bytes": limits.file_bytes}
        frames = frame(job) + frame({"tests": list(tests), "token": token})
        script = SANDBOX.read_text()
        output, status = self.converse(["python3", "-s", "-S", "-B", "-c", script], frames, limits)
        if output is None:
            return Run(False, "timeout", LAYERS)
        if status == 137 or (not output and status):  # the kernel, for its memory
            return Run(False, f"killed (status {status})", LAYERS)
        return read_result(output, token, LAYERS)

    def converse(self, argv: Sequence[str], frames: bytes, limits: Limits) -> tuple[bytes | None, int]:
        """Feed a program, read at most 64 KiB of its output. (None, 0): it took too long. Raises SandboxError."""
        from harness.launch.base import LaunchError

        container = None
        try:
            with explained("code sandbox"):
                container = self._client.containers.create(self._image, list(argv), **confinement(limits))
                link = self._client.api.attach_socket(
                    container.id, params={"stdin": 1, "stdout": 1, "stderr": 0, "stream": 1}
                )
                try:
                    container.start()
                    output = _exchange(_raw(link), frames, limits.seconds + 5)
                finally:
                    _hang_up(link)
                status = self._status(container)
            return output, status
        except LaunchError as error:
            raise SandboxError(str(error)) from None
        finally:
            if container is not None:
                with explained("code sandbox"):
                    remove(container)

    def _status(self, container: Any) -> int:
        """Its exit status where it has ended by itself, else 0."""
        container.reload()
        state = container.attrs["State"]
        return 0 if state["Running"] else int(state["ExitCode"])


def confinement(limits: Limits) -> dict[str, Any]:
    """Arguments of containers.create."""
    memory = limits.memory_bytes + (256 << 20)  # the judge beside the answer
    return {
        "entrypoint": [],
        "stdin_open": True,
        "network_mode": "none",
        "user": NOBODY,
        "read_only": True,
        "tmpfs": {WORK: f"size={16 * limits.file_bytes},mode=1777,noexec,nosuid,nodev"},
        "working_dir": WORK,
        "environment": {"HOME": WORK, "TMPDIR": WORK, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "pids_limit": PIDS,
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": 1_000_000_000,
        "ipc_mode": "none",
        "init": True,
        "log_config": {"type": "none"},
        "labels": {OWNED: "answer", OWNER: owner()},
    }


def _raw(link: Any) -> socket.socket:
    """The socket below docker-py's file object (over TLS there is none: its own methods serve)."""
    return getattr(link, "_sock", link)


def _hang_up(link: Any) -> None:
    """Really: the engine would wait for a reader that keeps its end open, and with it for the end of the container."""
    with suppress(OSError):
        _raw(link).shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        _raw(link).close()
    link.close()


def _exchange(link: socket.socket, frames: bytes, seconds: float) -> bytes | None:
    """Send and receive at once, so that neither side waits for the other. Docker frames each piece of output."""
    deadline = time.monotonic() + seconds
    raw, output = b"", b""
    link.setblocking(False)
    with selectors.DefaultSelector() as ready:
        ready.register(link, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while (left := deadline - time.monotonic()) > 0:
            for _, events in ready.select(left):
                if events & selectors.EVENT_WRITE:
                    try:
                        frames = frames[link.send(frames[:65536]) :]
                    except (BrokenPipeError, ConnectionResetError):
                        frames = b""
                    if not frames:
                        ready.modify(link, selectors.EVENT_READ)
                if events & selectors.EVENT_READ:
                    part = link.recv(65536)
                    raw += part
                    output, raw = _unframed(output, raw)
                    if not part or len(output) > OUTPUT_BYTES:
                        return output
    return None


def _unframed(output: bytes, raw: bytes) -> tuple[bytes, bytes]:
    """Complete pieces of standard output, and what is left. A piece: stream, 3 zeros, length in 4 bytes, content."""
    while len(raw) >= 8:
        (size,) = struct.unpack(">I", raw[4:8])
        if len(raw) < 8 + size:
            break
        if raw[0] == 1:
            output += raw[8 : 8 + size]
        raw = raw[8 + size :]
    return output, raw
