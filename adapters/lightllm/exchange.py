"""How a harness reads the counters of a LightLLM server, which has no endpoint to put them behind: files in a folder.

SPECACCEPT_TELEMETRY_DIR names the folder. A reader writes a token into the pipe `ask-N` of every rank, and rank N
answers with `rank-N.json`: its snapshot and the tokens of late, replaced atomically. Between two questions the thread
that answers sleeps in the kernel: an engine that nobody asks pays nothing for it. The counters are host numbers, so
answering never touches the device. The token, not a clock, proves that an answer is newer than the question; the tokens
of others beside it let several readers ask at once. Both ends are processes of one kernel; a container's bind mount may
lie between them.

A request that carries a seed (which greedy decoding ignores) leaves one line in `finished-N.jsonl` when it ends, under
that seed as its tag: what the policy did for this request, written behind its answer.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "SPECACCEPT_TELEMETRY_DIR"
POLL_S = 0.01  # of the asker
REPEAT_S = 1.0
LONGEST = 4096  # bytes of one read; shorter writes into a pipe are whole
RECENT = 64  # tokens of an answer
NOBODY = (errno.ENXIO, errno.EAGAIN, errno.ENOENT)  # nobody reads a pipe; it is full; it has just been replaced
_ASKING = threading.Lock()  # one question of a process at a time


class NoAnswer(RuntimeError):
    """No complete answer in time, or ranks that contradict each other."""


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


class Responder:
    """Answers for one rank. snapshot: () -> JSON object. world: how many ranks share the folder."""

    def __init__(self, folder: Path, rank: int, world: int, snapshot: Callable[[], dict[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.pipe, self.file = folder / f"ask-{rank}", folder / f"rank-{rank}.json"
        self.rank, self.world, self.snapshot = rank, world, snapshot
        self.tokens: deque[str] = deque(maxlen=RECENT)
        fresh = folder / f".{self.pipe.name}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        os.mkfifo(fresh)
        fresh.chmod(0o622)  # a harness outside the container may be another user
        self.asked = os.open(fresh, os.O_RDWR)  # its own writer too, so that a read waits instead of ending
        os.replace(fresh, self.pipe)  # what an earlier server left there, or still reads from, is nobody's any more

    def answer(self) -> None:
        """Wait for questions and answer all that came. What cannot be answered is asked again."""
        self.tokens.extend(token.decode(errors="replace") for token in os.read(self.asked, LONGEST).split())
        try:
            record = self.snapshot() | {"rank": self.rank, "world": self.world, "answers": list(self.tokens)}
            _write(self.file, json.dumps(record))
        except Exception as error:  # a full disk is not full for ever: this thread must outlive it
            print(f"specaccept: question not answered: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def start(self) -> threading.Thread:
        """Answer for as long as the process lives."""

        def serve() -> None:
            while True:
                self.answer()

        thread = threading.Thread(target=serve, name="specaccept-telemetry", daemon=True)
        thread.start()
        return thread


class Journal:
    """The lines of one rank, one per tagged request. Raises OSError for a line that is not written, or not whole."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"finished-{rank}.jsonl").open("wb", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        if self.file.write(line) < len(line):  # a disk that is nearly full takes a part without a word
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Follower:
    """Reads the journals of all ranks as they grow. One reader, any number of threads."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.seen: dict[int, deque[dict[str, Any]]] = {}  # a tag may come again: the same request, asked again
        self.read: dict[Path, int] = {}
        self.lock = threading.Lock()

    def take(self, tag: int, timeout_s: float = 5.0) -> dict[str, Any]:
        """The record of a request that ended. Raises NoAnswer."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self.lock:
                if not self.seen.get(tag):
                    self._grow()
                if waiting := self.seen.get(tag):
                    record = waiting.popleft()
                    if not waiting:
                        del self.seen[tag]
                    return record
            if time.monotonic() > deadline:
                raise NoAnswer(f"{self.folder}: expected a record of request {tag} within {timeout_s:g} s, found none")
            time.sleep(0.001)

    def _grow(self) -> None:
        for path in self.folder.glob("finished-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self.read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self.read[path] = self.read.get(path, 0) + len(whole) + 1
                for line in whole.splitlines():
                    record = json.loads(line)
                    self.seen.setdefault(record["tag"], deque()).append(record)


def ask(folder: Path | str, timeout_s: float = 10.0) -> dict[str, Any]:
    """One snapshot of the whole server, taken after this call began: counters summed over ranks. Raises NoAnswer."""
    folder = Path(folder)
    if not folder.is_dir():
        raise NoAnswer(f"{FOLDER}: expected a folder, found none at {folder}")
    with _ASKING:
        try:
            return _ask(folder, timeout_s)
        except OSError as error:  # no permission, say
            raise NoAnswer(str(error)) from None


def _ask(folder: Path, timeout_s: float) -> dict[str, Any]:
    token = uuid.uuid4().hex
    deadline, asked = time.monotonic() + timeout_s, float("-inf")
    while True:
        if time.monotonic() > asked + REPEAT_S:  # a rank may have come up since; another process may have asked over it
            asked = time.monotonic()
            for pipe in folder.glob("ask-*"):
                _question(pipe, token)
        answers = [a for a in map(_answer, sorted(folder.glob("rank-*.json"))) if a and token in a.get("answers", ())]
        if answers and len(answers) == answers[0]["world"]:
            return merge(answers)
        if time.monotonic() > deadline:
            world = answers[0]["world"] if answers else "any number of"
            raise NoAnswer(f"{folder}: expected {world} ranks to answer within {timeout_s:g} s, found {len(answers)}")
        time.sleep(POLL_S)


def _question(pipe: Path, token: str) -> None:
    """Never waits. A rank that is gone, or that reads nothing any more, is told by its missing answer."""
    try:
        end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            if stat.S_ISFIFO(os.fstat(end).st_mode):
                os.write(end, token.encode() + b"\n")
        finally:
            os.close(end)
    except OSError as error:
        if error.errno not in NOBODY:
            raise


def _answer(path: Path) -> dict[str, Any] | None:
    text = _read(path)
    return json.loads(text) if text else None


def merge(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One snapshot of several ranks. All must be armed alike: an unarmed rank would commit other tokens."""
    differ = ("counters", "rank", "answers", "capture")  # a capture is the first rank's alone
    alike = [{key: value for key, value in answer.items() if key not in differ} for answer in answers]
    for answer, rest in zip(answers, alike, strict=True):
        if rest != alike[0]:
            field = next(key for key in alike[0] | rest if rest.get(key) != alike[0].get(key))
            raise NoAnswer(
                f"rank {answer['rank']}: {field}: expected {alike[0].get(field)!r} as rank {answers[0]['rank']}, "
                f"found {rest.get(field)!r}"
            )
    counters: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for key, found in answer["counters"].items():
            counters[key] = _add(counters[key], found) if key in counters else found
    merged = alike[0]
    ranks = merged.pop("world")
    for answer in answers:
        if "capture" in answer:
            merged["capture"] = answer["capture"]
    return merged | {"ranks": ranks, "counters": counters}


def _add(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Counters added field by field, fallbacks by reason."""
    return {
        name: _add(one.get(name, {}), other.get(name, {}))
        if isinstance(one.get(name, other.get(name)), dict)
        else one.get(name, 0) + other.get(name, 0)
        for name in sorted(set(one) | set(other))
    }
