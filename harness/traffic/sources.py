"""The named traffics: gsm8k and humaneval from the hub or a folder, and the committed generators."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from harness.traffic.base import SEED, SUFFIX, Item, Traffic, TrafficError, content_sha256, shuffled, take


@dataclass(frozen=True)
class Split:
    """One split of a public data set, pinned to a revision and to its content."""

    repo: str
    config: str
    split: str
    revision: str
    file: str
    fields: tuple[str, ...]
    rows: int
    sha256: str


_GSM8K = ("openai/gsm8k", "main")
_GSM8K_REVISION = "740312add88f781978c0658806c59bc2815b9866"
GSM8K_TEST = Split(
    *_GSM8K, "test", _GSM8K_REVISION, "test.jsonl", ("question", "answer"), 1_319,
    "32c548f08195e19e33408b844dd7be6aa4bcae457d957bc05909ff4bd4a00595",
)  # fmt: skip
GSM8K_TRAIN = Split(
    *_GSM8K, "train", _GSM8K_REVISION, "train.jsonl", ("question", "answer"), 7_473,
    "dca449882e67a1e7716b5da453650a7b16588a1f2d1a0d82394a43d75ea7e9ca",
)  # fmt: skip
HUMANEVAL = Split(
    "openai/openai_humaneval", "openai_humaneval", "test", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
    "HumanEval.jsonl.gz", ("task_id", "prompt", "canonical_solution", "test", "entry_point"), 164,
    "e5ea46f61edfa7e3cbd5a86af0fb11e4a8a1048d9b905f2436be8bcdcf66f6d6",
)  # fmt: skip

_FILES = {GSM8K_TEST.repo: "test.jsonl and train.jsonl", HUMANEVAL.repo: HUMANEVAL.file}

GSM8K_TOKENS = 512
HUMANEVAL_TOKENS = 4096
GENERATED_TOKENS = {"math": 256, "code": 512}  # the tiny pair is taught at most 151 and 270
GENERATED_ITEMS, GENERATED_MOST = 256, 3_000  # of each kind: without a limit, and at most
HUMANEVAL_PROMPT = (
    "Complete the Python function below. Think first, then give the complete function, with its imports, "
    "in one ```python code block.\n\n```python\n{prompt}```"
)


def load(cfg: Any) -> Traffic:
    """The traffic that a configuration names. Raises TrafficError in one line.

    cfg: an object or mapping with `name`, and optionally
      data: folder with the data set's files; None: the hub at the pinned revision (generated traffic needs neither)
      limit: how many items; None: all (generated: 256 of each kind)
      seed: item order, default 980406
      warmup, calibration: sizes of those sets, default 16 and 32
      suffix: what follows a gsm8k question on its own line
      calibration_split: gsm8k only. "train" (default): warm-up and calibration come from the train split. "test": the
        published protocol, the first items of the shuffled test split calibrate, the first of those warm up, and the
        next ones are measured.
    """
    options = _Options(**{field: _get(cfg, field, default) for field, default in _Options.defaults().items()})
    if options.name not in _LOADERS:
        raise TrafficError(f"traffic: expected one of {', '.join(NAMES)}, found {options.name!r}")
    return _LOADERS[options.name](options)


@dataclass(frozen=True)
class _Options:
    name: str = ""
    data: str | None = None
    limit: int | None = None
    seed: int = SEED
    warmup: int = 16
    calibration: int = 32
    suffix: str = SUFFIX
    calibration_split: str = "train"

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {name: field.default for name, field in cls.__dataclass_fields__.items()}

    def __post_init__(self) -> None:
        if self.calibration_split not in ("train", "test"):
            raise TrafficError(f"traffic.calibration_split: expected train or test, found {self.calibration_split!r}")


def _get(cfg: Any, field: str, default: Any) -> Any:
    return cfg.get(field, default) if isinstance(cfg, Mapping) else getattr(cfg, field, default)


def rows_of(split: Split, data: str | None) -> list[dict[str, Any]]:
    """The rows of a split from a folder (data) or the hub; anything but the pinned content is an error."""
    rows = _from_folder(split, Path(data).expanduser()) if data else _from_hub(split)
    where = f"{split.repo} {split.split}"
    if len(rows) != split.rows:
        raise TrafficError(f"traffic.data: expected {split.rows:,} rows of {where}, found {len(rows):,}")
    found = content_sha256(rows, split.fields)
    if found != split.sha256:
        raise TrafficError(f"traffic.data: expected {where} with content {split.sha256[:12]}, found {found[:12]}")
    return rows


def _from_folder(split: Split, folder: Path) -> list[dict[str, Any]]:
    path = folder / split.file
    if not path.is_file():
        raise TrafficError(f"traffic.data: expected {split.file} in {folder}, found none")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        expected = "a complete gzip file" if path.suffix == ".gz" else "a readable file"
        raise TrafficError(f"traffic.data: {path}: expected {expected}, found {type(error).__name__}") from None
    lines = enumerate(raw.split(b"\n"), 1)
    return [_row(line, split.fields, f"{path}: line {number}") for number, line in lines if line.strip()]


def _row(line: bytes, fields: tuple[str, ...], where: str) -> dict[str, Any]:
    """One JSON line. Errors say where and what was expected, never the content: it may be long, or not text."""
    expected = "UTF-8"
    try:
        text = line.decode()
        expected = "JSON"
        row = json.loads(text)
        expected = f"an object with the texts {', '.join(fields)}"
        found = {field: row[field] for field in fields}
        "".join(found.values()).encode()  # JSON can escape half a surrogate pair, which is no text
        return found
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TrafficError(f"traffic.data: {where}: expected {expected}") from None


def _from_hub(split: Split) -> list[dict[str, Any]]:
    try:
        with _no_vain_retries():
            from datasets import load_dataset

            table = load_dataset(split.repo, split.config, split=split.split, revision=split.revision)
            return [{field: row[field] for field in split.fields} for row in table]
    except Exception as error:  # offline, refused, moved, not installed: to the user it is one fact
        raise TrafficError(
            f"traffic.data: {split.repo} at {split.revision[:12]} is neither cached nor reachable "
            f"({type(error).__name__}); expected data=FOLDER holding {_FILES[split.repo]}"
        ) from None


@contextmanager
def _no_vain_retries() -> Iterator[None]:
    """Where the hub's name does not resolve, only its cache is read: its client would retry for half a minute."""
    import datasets.config
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    saved = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    try:
        if not getproxies():
            socket.getaddrinfo(host, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = saved


def _pinned(options: _Options, *splits: Split) -> dict[str, Any]:
    """Provenance of splits whose content has been checked. The folder's name says enough: its content is hashed."""
    return {
        "source": f"folder {Path(options.data).name}" if options.data else "hub",
        "repo": splits[0].repo,
        "config": splits[0].config,
        "revision": splits[0].revision,
        "rows": {split.split: split.rows for split in splits},
        "content_sha256": {split.split: split.sha256 for split in splits},
        "seed": options.seed,
        "limit": options.limit,
    }


def gold(answer: str) -> str:
    """The reference of a GSM8K row: what follows the last ####, without thousands commas."""
    return answer.rpartition("####")[2].strip().replace(",", "")


def _gsm8k(options: _Options) -> Traffic:
    test, train = rows_of(GSM8K_TEST, options.data), []
    splits = [GSM8K_TEST]
    from_train = options.calibration_split == "train"
    if from_train:
        train = rows_of(GSM8K_TRAIN, options.data)
        splits.append(GSM8K_TRAIN)

    def item(split: str, rows: list[dict[str, Any]], index: int) -> Item:
        row = rows[index]
        prompt = f"{row['question']}\n{options.suffix}" if options.suffix else row["question"]
        return Item(
            f"gsm8k/{split}/{index}", "math", ({"role": "user", "content": prompt},), gold(row["answer"]),
            GSM8K_TOKENS, False,
        )  # fmt: skip

    order = shuffled(len(test), options.seed)
    if from_train:
        questions = {row["question"] for row in test}
        fresh = [i for i in shuffled(len(train), options.seed) if train[i]["question"] not in questions]
        aside = [item("train", train, i) for i in fresh[: options.calibration + options.warmup]]
        calibration, warmup = aside[: options.calibration], aside[options.calibration :]
        how = "calibration, then warm-up: the first of the shuffled train split"
    else:
        calibration = [item("test", test, i) for i in order[: options.calibration]]
        warmup, order = calibration[: options.warmup], order[options.calibration :]
        how = "calibration: the first of the shuffled test split; warm-up: the first of those; items: the next"
    count = take("gsm8k", len(order), options.limit)
    return Traffic(
        "gsm8k",
        [item("test", test, i) for i in order[:count]],
        warmup,
        calibration,
        _pinned(options, *splits) | {"selection": how, "suffix": options.suffix, "shots": 0},
    )


def _humaneval(options: _Options) -> Traffic:
    """All 164 tasks are measured: warm-up and calibration come from the generated coding tasks."""
    rows = rows_of(HUMANEVAL, options.data)
    order = shuffled(len(rows), options.seed)
    items = []
    for index in order[: take("humaneval", len(rows), options.limit)]:
        row = rows[index]
        reference = {
            "entry_point": row["entry_point"],
            "prelude": row["prompt"],
            "tests": [f"{row['test']}\ncheck({row['entry_point']})"],
        }
        prompt = HUMANEVAL_PROMPT.format(prompt=row["prompt"])
        messages = ({"role": "user", "content": prompt},)
        items.append(Item(row["task_id"], "code", messages, reference, HUMANEVAL_TOKENS, True))
    return Traffic(
        "humaneval",
        items,
        _generated_items("code", "warmup", options.warmup, options.seed),
        _generated_items("code", "calibration", options.calibration, options.seed),
        _pinned(options, HUMANEVAL) | {"selection": "warm-up and calibration: generated-code"},
    )


def _generated_items(kind: str, split: str, count: int, seed: int) -> list[Item]:
    module = import_module(f"harness.traffic.generated.{kind}")
    seeds = module.split(split)
    # Every seed is a problem of its own, so a window is as good as a shuffle; the run's seed says where it begins.
    start = shuffled(97, seed)[0] * 1_000
    return [_generated_item(kind, module.problem(seeds[start + i])) for i in range(count)]


def _generated_item(kind: str, problem: Any) -> Item:
    reference: Any = problem.answer
    if kind == "code":
        reference = {"entry_point": problem.entry_point, "prelude": "", "tests": list(problem.tests)}
    return Item(
        f"generated-{kind}/{problem.seed}", kind, problem.messages, reference, GENERATED_TOKENS[kind], problem.thinking
    )


def _generated(*kinds: str) -> Callable[[_Options], Traffic]:
    def make(options: _Options) -> Traffic:
        def items(split: str, count: int) -> list[Item]:
            """The kinds alternate, so that every prefix holds them in equal parts."""
            each = -(-count // len(kinds))
            made = [_generated_items(kind, split, each, options.seed) for kind in kinds]
            return [item for together in zip(*made, strict=True) for item in together][:count]

        limit = GENERATED_ITEMS * len(kinds) if options.limit is None else options.limit
        count = take(options.name, GENERATED_MOST * len(kinds), limit)
        measured = items("test", count)
        return Traffic(
            options.name,
            measured,
            items("warmup", options.warmup),
            items("calibration", options.calibration),
            {
                "source": "generator",
                "kinds": list(kinds),
                "seed": options.seed,
                "limit": options.limit,
                "rows": {"test": len(measured)},
                "content_sha256": {"test": _items_sha256(measured)},
            },
        )

    return make


def _items_sha256(items: list[Item]) -> str:
    rows = [{"id": item.id, "messages": item.messages, "reference": item.reference} for item in items]
    return content_sha256(rows, ("id", "messages", "reference"))


_LOADERS: dict[str, Callable[[_Options], Traffic]] = {
    "generated": _generated("math", "code"),
    "generated-code": _generated("code"),
    "generated-math": _generated("math"),
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
}
NAMES = tuple(_LOADERS)
READS_DATA = ("gsm8k", "humaneval")  # what traffic.data means something to
