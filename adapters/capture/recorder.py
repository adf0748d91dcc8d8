"""The recorder of one engine process: blocks in from the hot path, shards out from a thread of its own.

The hot path never waits. On a GPU it queues the statistics on the engine's stream, a copy into pinned memory behind
them, and an event that only the writer waits for. On the CPU it keeps the tensors of a step and measures them itself,
some dozens at a time: every operation of another thread would take the interpreter's lock from it, which costs more
than the work. Files are the writer's. A block that finds the queue full is dropped and counted. An engine is often
killed, not ended: what came is on disk after SHARD_SECONDS, WAKE_SECONDS after the last block, or when somebody asks
for it (`sync`).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapters import __version__
from adapters.capture import stats
from adapters.capture.layout import (
    COLUMNS,
    DRAFT,
    DRAWN,
    FORMAT,
    FULL,
    MANIFEST,
    ROW,
    ROWS,
    TOP,
    TOPS,
    VERSION,
    CaptureError,
    shapes,
)
from adapters.capture.settings import Settings, takes
from adapters.telemetry import file_hashes

SHARD_BLOCKS = 4096
SHARD_BYTES = 256 << 20
SHARD_SECONDS = 10.0  # a process that is killed loses no more than this
CLOSE_SECONDS = 20.0
BATCH_BLOCKS, BATCH_BYTES = 64, 12 << 20  # what is measured at a time
# The writer works seldom and then on many blocks. A turn in which nothing came ends the shard.
WAKE_SECONDS, WAKE_STEPS, WAKE_SHARE = 2.0, 256, 8
_LISTS = {  # columns, and where Blocks has them
    "request": "requests",
    "step": "steps",
    "position": "positions",
    "flags": "flags",
    "length": "length",
    "bonus": "bonus",
    "temperature": "temperatures",
}
_DRAWN_COLUMNS = ("log_p", "log_q", "excess", "coin")


@dataclass
class Drawn:
    """Rows of a step whose drafts were drawn. rows[j]: the row of Blocks that p[j] [K+1, V], q[j] [K, V] and coins[j]
    [K] belong to; p after temperature, top-k and top-p, q what the drafts were really drawn from."""

    rows: Sequence[int]
    p: Tensor
    q: Tensor
    coins: Tensor | None = None


@dataclass(slots=True)
class Blocks:
    """The verified blocks of one step, a row per request, as the engine's rule saw them.

    requests: what `enter` returned. steps: verify step of the request, from 0. positions: its tokens in the KV cache.
    flags: DRAWN, SAMPLED. temperatures: 1 for a greedy request. anchors [n], drafts [n, K], logits [n, K + 1, V],
    top [n, K + 1] the engine's argmax, live [n] (None: K). length, bonus: what the engine accepted, lists or tensors
    [n]. Lists and, on the CPU, tensors are kept, not copied: nobody may write to them afterwards. On a GPU whatever is
    queued on the stream later may.
    """

    requests: Sequence[int]
    steps: Sequence[int]
    positions: Sequence[int]
    flags: Sequence[int]
    temperatures: Sequence[float]
    anchors: Tensor
    drafts: Tensor
    logits: Tensor
    top: Tensor
    length: Sequence[int] | Tensor
    bonus: Sequence[int] | Tensor
    live: Tensor | None = None
    drawn: Drawn | None = None


@dataclass(slots=True)
class _Step:
    """A step on its way to the writer. size: bytes that it holds. blocks: of a CPU, as they came; else its captured
    rows: host lists, and tensors packed in pinned memory.

    full: its rows with full rows. drawn: its rows with drafts drawn from q. layout: of the packed columns, and of those
    of the drawn rows: name and width; steps of one layout are unpacked together.
    """

    size: int
    blocks: Blocks | None
    host: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    full: Sequence[int] = ()
    drawn: Sequence[int] = ()
    layout: tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]] = ((), ())
    event: Any = None
    pinned: Sequence[Tensor] = ()

    def __len__(self) -> int:
        return len(self.host["request"]) if self.blocks is None else len(self.blocks.requests)


class Recorder:
    """One capture: a folder of shards and their manifest. about: engine, target, draft, tokenizer, policy, logits
    (`raw` or `processed`), temperature_applied: what the adapter knows of its engine. vocabulary: None: that of the
    first block."""

    def __init__(
        self, settings: Settings, name: str, drafts: int, vocabulary: int | None, about: Mapping[str, Any]
    ) -> None:
        try:
            from safetensors.torch import save  # every engine that loads a checkpoint has it; only a capture needs it
        except ImportError as error:
            raise CaptureError(f"SPECACCEPT_CAPTURE: expected the package safetensors, found none ({error})") from None
        self._save = save
        self.settings, self.drafts, self.vocabulary = settings, drafts, vocabulary or 0
        self.folder = _new_folder(settings.folder, name)
        self.seen = self.captured = self.ended = self.blocks = self.dropped = 0
        self.error: str | None = None
        self.shards: list[dict[str, Any]] = []
        self._about = dict(about)
        self._created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._met: dict[str, int] = {}  # requests seen, by policy
        self._full: set[int] = set()  # captured with full rows
        self._requests: deque[list[Any]] = deque()
        self._ends: deque[list[int]] = deque()
        self._asks: deque[threading.Event] = deque()  # of those who wait
        self._queue: deque[_Step] = deque()
        self._measured: deque[tuple[int, dict[str, Tensor], dict[str, Tensor]]] = deque()  # bytes, columns, full rows
        self._measuring = threading.Lock()  # of the two threads that may; the engine's does not wait for it
        self._kept_up = False  # the engine's thread has measured since the writer's last turn
        self._added = self._taken = 0  # bytes; each is written by one thread alone
        self._room = settings.queue_mb << 20
        self._pool, self._scratch = _Pool(self._room), stats.Scratch()
        self._wake, self._stopping = threading.Event(), False
        self._open: list[dict[str, Tensor]] = []
        self._open_rows: list[dict[str, Tensor]] = []
        self._open_blocks = self._open_bytes = 0
        self._born = time.monotonic()
        self._manifest(closed=False)
        self._thread = threading.Thread(target=self._run, name="specaccept-capture", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def describe(self) -> dict[str, Any]:
        """For the adapter's snapshot: constant, so that it is part of what the engine is."""
        return {"format": VERSION, "folder": self.folder.name, "rate": self.settings.rate, "rows": self.settings.rows}

    # -- hot path

    def enter(self, rid: str, policy: str, **facts: Any) -> int:
        """A request that is about to run: its number in the capture, or -1 where the rate leaves it out.

        policy: key of the rule that decides its blocks. facts: JSON values (temperature, top_k, ...).
        """
        nth, self.seen = self._met.get(policy, 0), self.seen + 1
        self._met[policy] = nth + 1  # arms that take turns are each captured at this rate
        if not takes(self.settings.rate, nth):
            return -1
        number, self.captured = self.captured, self.captured + 1
        if takes(self.settings.rows, int(nth * self.settings.rate)):
            self._full.add(number)
        self._requests.append([number, {"rid": rid, "policy": policy, **facts}])
        return number

    def end(self, request: int, steps: int, kept: int) -> None:
        """A request has ended after `steps` verify steps, the last of which gave it `kept` tokens, bonus included.

        Steps that an engine ran for it beyond that (an overlapped one) are thereby void.
        """
        if request >= 0:
            self._ends.append([request, steps, kept])
            self.ended += 1

    def add(self, blocks: Blocks) -> None:
        """One step's blocks. Copies and returns; with the queue full, counts them as dropped and returns."""
        if max(blocks.requests, default=-1) < 0 or (self._stopping and self.error is None):
            return
        if not self.vocabulary:
            self.vocabulary = blocks.logits.shape[2]
        logits = blocks.logits
        step = None if self.error is not None else self._on_device(blocks) if logits.is_cuda else self._on_cpu(blocks)
        if step is None:
            self.dropped += sum(number >= 0 for number in blocks.requests)
            return
        self._added += step.size
        self._queue.append(step)
        waiting = len(self._queue)
        if step.blocks is not None and (waiting * len(step) >= BATCH_BLOCKS or waiting * step.size >= BATCH_BYTES):
            self.measure()
        if waiting >= WAKE_STEPS or (self._added - self._taken) * WAKE_SHARE >= self._room:
            self._wake.set()

    def _on_cpu(self, blocks: Blocks) -> _Step | None:
        """As it is: between two steps of a model no code of ours is in a cache, so little is run for a single one."""
        size, drawn = blocks.logits.nbytes, blocks.drawn
        if drawn is not None:
            size += drawn.p.nbytes + drawn.q.nbytes
        if self._added - self._taken + size > self._room:
            return None
        for name in ("length", "bonus"):  # an engine's buffers: written again by its next step
            if isinstance(value := getattr(blocks, name), Tensor):
                setattr(blocks, name, value.tolist())
        return _Step(size, blocks)

    def measure(self) -> None:
        """Measure what is queued, unless another thread is at it. The engine serves on whatever happens here."""
        if self._measuring.acquire(blocking=False):
            try:
                self._measure()
                self._kept_up = True
            except Exception as error:
                self._failed(error)
            finally:
                self._measuring.release()

    def _captured(self, blocks: Blocks) -> Blocks:
        """The blocks of requests that are captured; Drawn of those whose drafts were drawn."""
        drawn = () if blocks.drawn is None else blocks.drawn.rows
        if min(blocks.requests) >= 0 and all(blocks.flags[row] & DRAWN for row in drawn):
            return blocks
        return _selected(blocks, [i for i, number in enumerate(blocks.requests) if number >= 0])

    def _kept(self, requests: Sequence[int]) -> list[int]:
        """Which of them keep full rows."""
        return [i for i, number in enumerate(requests) if number in self._full] if self._full else []

    def _on_device(self, blocks: Blocks) -> _Step | None:
        """Statistics behind the engine's own kernels, then copies into pinned memory and an event. Nothing waits."""
        blocks = self._captured(blocks)
        n, drawn, full = len(blocks.requests), blocks.drawn, self._kept(blocks.requests)
        tensors: dict[str, Tensor] = {"anchors": blocks.anchors}
        host = self._host(blocks, tensors, full)
        if blocks.live is not None:
            tensors["live"] = blocks.live
        inverse = None
        if self._scaled(blocks.temperatures):
            inverse = _sent(torch.tensor([1 / t for t in blocks.temperatures]), blocks.logits.device)
        columns = stats.of_logits(blocks.logits, blocks.drafts, blocks.top, inverse)
        columns |= {name: tensor.int() for name, tensor in tensors.items()}
        parts, found = [_pack(columns, n)], {}
        if drawn is not None:
            found = stats.of_probs(_at(blocks.drafts, drawn.rows), drawn.p, drawn.q)
            if drawn.coins is not None:
                found["coin"] = drawn.coins.float()
            parts.append(_pack(found, len(drawn.rows)))
        if full:
            parts.append(_words(_at(blocks.logits, full)))
            if drawn is not None and (chosen := [j for j, row in enumerate(drawn.rows) if row in full]):
                parts += [_words(_at(each, chosen)) for each in (drawn.p, drawn.q)]
        pinned = self._pool.take([part.numel() for part in parts])
        if pinned is None:
            return None
        for part, into in zip(parts, pinned, strict=True):
            into[: part.numel()].copy_(part.reshape(-1), non_blocking=True)
        event = _recorded()
        layout = tuple(tuple((name, t[0].numel()) for name, t in each.items()) for each in (columns, found))
        size = sum(part.numel() * 4 for part in parts)
        rows = () if drawn is None else drawn.rows
        return _Step(size, None, host, full, rows, (layout[0], layout[1]), event, pinned)

    def _scaled(self, temperatures: Sequence[float]) -> bool:
        """Whether logits are still to be divided by a temperature."""
        return not self._about["temperature_applied"] and any(t != 1 for t in temperatures)

    def _host(self, blocks: Blocks, tensors: dict[str, Tensor], full: Sequence[int]) -> dict[str, Sequence[Any]]:
        """The lists of a step; length and bonus stay where the engine has them."""
        flags = blocks.flags
        if full:
            flags = list(flags)
            for i in full:
                flags[i] |= FULL
        host: dict[str, Sequence[Any]] = {
            "request": blocks.requests,
            "step": blocks.steps,
            "position": blocks.positions,
            "flags": flags,
            "temperature": blocks.temperatures,
        }
        for name in ("length", "bonus"):
            value = getattr(blocks, name)
            if not isinstance(value, Tensor):
                host[name] = value
            elif value.is_cuda:
                tensors[name] = value
            else:
                host[name] = value.tolist()
        return host

    # -- writer

    def sync(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything that came so far is in a whole shard, or until the time is over.

        From any thread. False: not done."""
        ask = threading.Event()
        self._asks.append(ask)
        self._wake.set()
        return ask.wait(timeout_s) if self._thread.is_alive() else False

    def close(self) -> None:
        """Write what is queued and mark the manifest closed. Twice does nothing."""
        if self._stopping:
            return
        self._stopping = True
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        atexit.unregister(self.close)

    def close_at_sigterm(self) -> bool:
        """In a process that a SIGTERM would end at once: close first. False where it is handled, or in a thread."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            return False

        asked, closed, main = threading.Event(), threading.Event(), threading.get_ident()

        def end() -> None:
            self.close()
            closed.set()
            # To the main thread, which alone runs handlers, so that it wakes from whatever it waits in.
            signal.pthread_kill(main, signal.SIGTERM)

        def on_sigterm(*_: Any) -> None:
            if closed.is_set():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            elif not asked.is_set():  # who ends a group of processes often asks twice: the second changes nothing
                asked.set()
                # In a thread: what the signal interrupted may hold the locks that closing takes.
                threading.Thread(target=end, name="specaccept-capture-end", daemon=True).start()

        signal.signal(signal.SIGTERM, on_sigterm)
        return True

    def _run(self) -> None:
        asks: list[threading.Event] = []
        seen = 0
        try:
            woken = True
            while self.error is None:
                stopping = self._stopping  # read before the queue is: what came before it is written
                asks = [self._asks.popleft() for _ in range(len(self._asks))]
                came, seen = self._added != seen, self._added
                due = bool(self._open) and time.monotonic() - self._born > SHARD_SECONDS
                kept_up, self._kept_up = self._kept_up, False
                if not kept_up or asks or due or stopping:
                    with self._measuring:
                        self._measure()
                self._collect()
                if stopping:
                    break
                if due or asks or not (came or woken):
                    self._flush()
                for ask in asks:
                    ask.set()
                woken = self._wake.wait(WAKE_SECONDS)
                self._wake.clear()
            if self.error is None:
                self._flush()
                self._manifest(closed=True)
        except Exception as error:
            self._failed(error)
        if self.error is not None:
            self._queue.clear()
            self._measured.clear()
            with contextlib.suppress(OSError):
                self._manifest(closed=False)
        for ask in asks:
            ask.set()

    def _failed(self, error: Exception) -> None:
        """An engine serves on without its capture; the capture says that it is broken."""
        self.error = f"{type(error).__name__}: {error}"
        print(f"specaccept: capture stopped: {self.error}", file=sys.stderr, flush=True)
        self._wake.set()

    @torch.inference_mode()
    def _measure(self) -> None:
        """Everything that is queued, in order. Under `_measuring`."""
        while self._queue:
            steps: list[_Step] = []
            blocks = size = 0
            while self._queue and (not steps or (blocks < BATCH_BLOCKS and size < BATCH_BYTES)):
                if steps and self._queue[0].layout != steps[0].layout:
                    break
                step = self._queue.popleft()
                steps.append(step)
                blocks, size = blocks + len(step), size + step.size
            if steps[0].event is not None:
                columns, rows = _of_pinned(steps, self)
            else:
                raw = [self._captured(step.blocks) for step in steps if step.blocks is not None]
                columns, rows = _of_cpu(raw, self)
            self._measured.append((size, columns, rows))

    def _collect(self) -> None:
        """What was measured, into the open shard; whole ones to disk."""
        while self._measured:
            size, columns, rows = self._measured.popleft()
            self._append((columns, rows))
            self._taken += size
            if self._open_blocks >= SHARD_BLOCKS or self._open_bytes >= SHARD_BYTES:
                self._flush()

    def _append(self, part: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
        columns, rows = part
        if not self._open:
            self._born = time.monotonic()
        self._open.append(columns)
        self._open_blocks += len(columns["request"])
        self._open_bytes += sum(tensor.nbytes for tensor in (*columns.values(), *rows.values()))
        if rows:
            self._open_rows.append(rows)

    def _flush(self) -> None:
        """The open shard to disk, whole, and only then into the manifest."""
        requests = [self._requests.popleft() for _ in range(len(self._requests))]
        ends = [self._ends.popleft() for _ in range(len(self._ends))]
        if not (self._open or requests or ends):
            return
        number = len(self.shards)
        news = {"specaccept": json.dumps({"version": VERSION, "requests": requests, "ends": ends})}
        shape = shapes(0, self.drafts, self.vocabulary)
        empty = {name: torch.empty(shape[name], dtype=dtype) for name, dtype in COLUMNS.items()}
        columns = {name: torch.cat([part[name] for part in self._open]) for name in COLUMNS} if self._open else empty
        shard = {"blocks": self._open_blocks} | self._write(f"blocks-{number:05d}.safetensors", columns, news)
        shard["rows"] = None
        if self._open_rows:
            names = [name for name in ROWS if any(name in part for part in self._open_rows)]
            full = {name: torch.cat([part[name] for part in self._open_rows if name in part]) for name in names}
            shard["rows"] = self._write(f"rows-{number:05d}.safetensors", full, None)
        self.shards.append(shard)
        self.blocks += self._open_blocks
        self._open, self._open_rows, self._open_blocks, self._open_bytes = [], [], 0, 0
        self._manifest(closed=False)

    def _write(self, name: str, tensors: dict[str, Tensor], news: dict[str, str] | None) -> dict[str, Any]:
        content = self._save(tensors, metadata=news)
        _write_whole(self.folder / name, content)
        return {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def _manifest(self, closed: bool) -> None:
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "created": self._created,
            "closed": closed,
            **self._about,
            "adapter": {"version": __version__, "files": file_hashes()},
            "K": self.drafts,
            "vocabulary": self.vocabulary,
            "top": min(TOP, self.vocabulary),
            "rate": self.settings.rate,
            "rows": self.settings.rows > 0,
            "rows_share": self.settings.rows,
            "requests": {"seen": self.seen, "captured": self.captured, "ended": self.ended},
            "blocks": {"captured": self.blocks, "dropped": self.dropped},
            "error": self.error,
            "shards": self.shards,
        }
        _write_whole(self.folder / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")


def _of_cpu(steps: list[Blocks], recorder: Recorder) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Columns and full rows of raw steps, measured together."""

    def joined(name: str) -> Tensor:
        parts = [getattr(step, name) for step in steps]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    host = {name: [value for step in steps for value in getattr(step, of)] for name, of in _LISTS.items()}
    logits, drafts, top = recorder._scratch.joined("logits", [s.logits for s in steps]), joined("drafts"), joined("top")
    temperature = torch.tensor(host["temperature"], dtype=torch.float32)
    inverse = 1 / temperature if recorder._scaled(host["temperature"]) else None
    columns = stats.of_logits(logits, drafts, top, inverse, recorder._scratch)
    columns["anchor"] = joined("anchors").int()
    columns["live"] = torch.full((len(top),), recorder.drafts, dtype=torch.int32)
    _finish(columns, host, temperature, recorder)
    rows, first, at = {}, 0, []
    full = recorder._kept(host["request"])
    if full:
        columns["flags"][full] |= FULL
        rows["target_logits"] = logits[full].float()
    for step in steps:
        if step.live is not None:
            columns["live"][first : first + len(step.live)] = step.live
        if step.drawn is not None:
            at += [first + row for row in step.drawn.rows]
        first += len(step.requests)
    if drawn := [step.drawn for step in steps if step.drawn is not None]:
        p = recorder._scratch.joined("p", [each.p for each in drawn])
        q = recorder._scratch.joined("q", [each.q for each in drawn])
        found = stats.of_probs(drafts[at], p, q, recorder._scratch)
        unknown = torch.full((1, recorder.drafts), torch.nan)
        coins = [unknown.expand(len(each.rows), -1) if each.coins is None else each.coins for each in drawn]
        found["coin"] = torch.cat([coin.float() for coin in coins])
        _merge(columns, found, at)
        if chosen := [j for j, row in enumerate(at) if row in set(full)]:
            rows |= {"target_probs": p[chosen].float(), "draft_probs": q[chosen].float()}
    return columns, rows


def _of_pinned(steps: list[_Step], recorder: Recorder) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Columns and full rows of steps that the device measured. Waits for its copies, then frees the memory."""
    for step in steps:
        step.event.synchronize()
    K, V = recorder.drafts, recorder.vocabulary
    n, rest = sum(len(step) for step in steps), [iter(step.pinned) for step in steps]

    def taken(widths: Sequence[tuple[str, int]], counts: Sequence[int]) -> dict[str, Tensor]:
        words = sum(width for _, width in widths)
        parts = [next(it)[: count * words] for it, count in zip(rest, counts, strict=True) if count]
        return _unpack(torch.cat(parts), widths, sum(counts))  # copies: the memory is used again

    columns = taken(steps[0].layout[0], [len(step) for step in steps])
    columns["anchor"] = columns.pop("anchors")
    columns.setdefault("live", torch.full((n,), K, dtype=torch.int32))
    host = _joined_lists(steps)
    _finish(columns, host, torch.tensor(host["temperature"], dtype=torch.float32), recorder)
    if at := _offset(steps, "drawn"):
        _merge(columns, taken(steps[0].layout[1], [len(step.drawn) for step in steps]), at)
    rows: dict[str, list[Tensor]] = {}
    for step, buffers in zip(steps, rest, strict=True):
        drawn = sum(row in step.full for row in step.drawn)
        shapes_ = (len(step.full), K + 1, V), (drawn, K + 1, V), (drawn, K, V)
        for name, shape in zip(ROWS, shapes_, strict=True):
            if shape[0]:
                whole = next(buffers)[: math.prod(shape)].view(torch.float32).view(shape)
                rows.setdefault(name, []).append(whole)
    full = {name: torch.cat(parts) for name, parts in rows.items()}
    for step in steps:
        recorder._pool.give(step.pinned)
    return columns, full


def _joined_lists(steps: Sequence[_Step]) -> dict[str, list[Any]]:
    return {name: [value for step in steps for value in step.host[name]] for name in steps[0].host}


def _offset(steps: Sequence[_Step], name: str) -> list[int]:
    """The rows that a list of each step names, among the rows of all of them."""
    first, at = 0, []
    for step in steps:
        at += [first + row for row in getattr(step, name)]
        first += len(step)
    return at


def _selected(blocks: Blocks, keep: Sequence[int]) -> Blocks:
    """The blocks at `keep`, in order, and of the drawn ones those whose drafts were drawn."""
    drawn = blocks.drawn
    if drawn is not None:
        place = {row: i for i, row in enumerate(keep)}
        chosen = [j for j, row in enumerate(drawn.rows) if row in place and blocks.flags[row] & DRAWN]
        drawn = _drawn_at(drawn, chosen, [place[drawn.rows[j]] for j in chosen]) if chosen else None
    if len(keep) == len(blocks.requests):
        return replace(blocks, drawn=drawn) if blocks.drawn is not None else blocks
    fields: dict[str, Any] = {"drawn": drawn}
    for name in ("requests", "steps", "positions", "flags", "temperatures", "length", "bonus"):
        value = getattr(blocks, name)
        fields[name] = _at(value, keep) if isinstance(value, Tensor) else [value[i] for i in keep]
    for name in ("anchors", "drafts", "logits", "top"):
        fields[name] = _at(getattr(blocks, name), keep)
    return replace(blocks, live=None if blocks.live is None else _at(blocks.live, keep), **fields)


def _drawn_at(drawn: Drawn, chosen: Sequence[int], rows: Sequence[int]) -> Drawn:
    coins = None if drawn.coins is None else _at(drawn.coins, chosen)
    return Drawn(rows, _at(drawn.p, chosen), _at(drawn.q, chosen), coins)


def _at(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of a tensor, in rising order, without waiting for its device."""
    if len(rows) == len(tensor):
        return tensor
    at = torch.tensor(rows, dtype=torch.int64)
    return tensor.index_select(0, _sent(at, tensor.device) if tensor.is_cuda else at)


def _words(tensor: Tensor) -> Tensor:
    """As int32 words of float32 values."""
    return tensor.float().reshape(-1).view(torch.int32)


def _finish(columns: dict[str, Tensor], host: dict[str, Any], temperature: Tensor, recorder: Recorder) -> None:
    """The columns that come from the host, and what holds where nothing was drawn: q one-hot, no coin."""
    shape = (len(temperature), recorder.drafts)
    names = [name for name in _LISTS if name not in columns and name != "temperature"]
    columns |= zip(names, torch.tensor([host[name] for name in names], dtype=torch.int32), strict=True)
    columns["temperature"] = temperature
    columns["log_q"] = torch.zeros(shape)
    columns["excess"] = torch.full(shape, torch.nan)
    columns["coin"] = torch.full(shape, torch.nan)


def _merge(columns: dict[str, Tensor], found: dict[str, Tensor], at: list[int]) -> None:
    for name in _DRAWN_COLUMNS:
        if name in found:
            columns[name][at] = found[name]


def _pack(columns: Mapping[str, Tensor], n: int) -> Tensor:
    """[n, words] int32: one copy instead of many."""
    parts = [tensor if tensor.dtype == torch.int32 else tensor.view(torch.int32) for tensor in columns.values()]
    return torch.cat([part.reshape(n, -1) for part in parts], 1)


def _unpack(packed: Tensor, widths: Sequence[tuple[str, int]], n: int) -> dict[str, Tensor]:
    """The columns of _pack, with the types and shapes of layout.py."""
    total = sum(width for _, width in widths)
    pieces = packed[: n * total].view(n, total).split([width for _, width in widths], 1)
    found = {}
    for (name, _), piece in zip(widths, pieces, strict=True):
        tensor = piece.contiguous()
        if COLUMNS.get(name) == torch.float32:
            tensor = tensor.view(torch.float32)
        if name in TOPS:
            tensor = tensor.view(n, -1, _top(widths))
        found[name] = tensor if name in DRAFT or name in ROW or name in TOPS else tensor[:, 0]
    return found


def _top(widths: Sequence[tuple[str, int]]) -> int:
    """How many logits are kept per row."""
    sizes = dict(widths)
    return sizes["top_ids"] // sizes["argmax"]


def _pinned(words: int) -> Tensor:
    """int32 memory for copies from a device. Never an inference tensor: another mode may write to it again."""
    with torch.inference_mode(False):
        return torch.empty(words, dtype=torch.int32, pin_memory=True)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device through pinned memory, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True)


def _recorded() -> Any:
    """An event behind everything that is queued on this stream now. Who waits for it sleeps: cores are the engine's."""
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


class _Pool:
    """Pinned memory, int32 words, at most `limit` bytes of it in all. take: the hot path; give: the writer."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self.free: dict[int, deque[Tensor]] = {}

    def take(self, sizes: Sequence[int]) -> list[Tensor] | None:
        """A buffer of at least each size, or None."""
        taken: list[Tensor] = []
        for size in sizes:
            room = _room(size)
            waiting = self.free.setdefault(room, deque())
            if waiting:
                taken.append(waiting.popleft())
            elif self.total + 4 * room <= self.limit:
                taken.append(_pinned(room))
                self.total += 4 * room
            else:
                self.give(taken)
                return None
        return taken

    def give(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            self.free[buffer.numel()].append(buffer)


def _room(size: int) -> int:
    """What is taken for `size` words: few sizes, so that memory is found again, and little of it in vain."""
    step = 1 << max(size.bit_length() - 4, 8)
    return -(-size // step) * step


def describe_model(path: str) -> dict[str, Any]:
    """Name of a model, without the folder it lies in, and the SHA-256 of its config where that is a local file."""
    return {"name": Path(path).name if Path(path).is_dir() else path, "config_sha256": _hash(Path(path, "config.json"))}


def describe_tokenizer(path: str) -> dict[str, Any]:
    return {"sha256": _hash(Path(path, "tokenizer.json"))}


def _hash(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _new_folder(parent: Path, name: str) -> Path:
    """parent/name-N that did not exist before."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for turn in range(100_000):
            try:
                (parent / f"{name}-{turn}").mkdir()
            except FileExistsError:
                continue
            return parent / f"{name}-{turn}"
    except OSError as error:
        raise CaptureError(f"SPECACCEPT_CAPTURE: {parent}: {error.strerror}") from None
    raise CaptureError(f"SPECACCEPT_CAPTURE: {parent}: no free name for {name}")


def _write_whole(path: Path, content: bytes) -> None:
    """The file is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
