"""What the container tests share."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from harness.config import ROOT
from harness.launch.docker_daemon import OWNED


def owned(client) -> list[str]:
    return [each.name for each in client.containers.list(all=True, filters={"label": OWNED}, ignore_removed=True)]


def context(files: dict[str, str | bytes | Path]) -> io.BytesIO:
    """A build context: path in it -> content, or a file or folder to copy."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in files.items():
            if isinstance(content, Path):
                tar.add(content, name, filter=lambda info: None if "__pycache__" in info.name else info)
                continue
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    stream.seek(0)
    return stream


class Cli:
    """The command line as a process, to be killed in every way."""

    def __init__(self, arguments: list[str], results: Path) -> None:
        self.results = results
        argv = [sys.executable, "-m", "harness", *arguments]
        self.process = subprocess.Popen(
            argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def until_answers(self, count: int = 3, seconds: float = 90) -> Path:
        """The run's folder, once it has that many rows in its journal."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for journal in self.results.glob("runs/*/requests.jsonl"):
                if journal.read_bytes().count(b"\n") >= count:
                    return journal.parent
            if self.process.poll() is not None:
                raise AssertionError(self.process.communicate())
            time.sleep(0.05)  # its only sign of life is the journal
        raise AssertionError("no answers in time")

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Its exit status and stderr, after a signal."""
        if number is not None:
            os.kill(self.process.pid, number)
        _, error = self.process.communicate(timeout=90)
        return self.process.returncode, error


def record(results: Path) -> dict:
    (folder,) = (results / "runs").iterdir()
    return json.loads((folder / "record.json").read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
