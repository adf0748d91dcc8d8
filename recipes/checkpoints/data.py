"""Training text as token arrays, made in worker processes: packed rows for the target, prompts for the draft."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from harness.traffic.generated import code, math  # noqa: E402

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
from tokenizers import Tokenizer  # noqa: E402

MODULES: dict[str, Any] = {"math": math, "code": code}
LENGTH = 512
IN_LOSS = 128  # flag beside the document's number (1..127; 0: padding) in `marks`
_tokenizer: Tokenizer | None = None


def tokenizer() -> Tokenizer:
    global _tokenizer
    if _tokenizer is None:
        _tokenizer = Tokenizer.from_file(str(HERE / "tiny-qwen3" / "tokenizer.json"))
    return _tokenizer


def opening(problem: Any) -> str:
    """The rendered prompt: what the chat template gives with add_generation_prompt (a test compares the two)."""
    text = f"<|im_start|>user\n{problem.prompt}<|im_end|>\n<|im_start|>assistant\n"
    return text if problem.thinking else text + "<think>\n\n</think>\n\n"


def documents(task: str, seeds: range) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids with the closing <|im_end|>) of every seed."""
    problems = [MODULES[task].problem(seed) for seed in seeds]
    prompts = tokenizer().encode_batch_fast([opening(p) for p in problems], add_special_tokens=False)
    answers = tokenizer().encode_batch_fast(
        [p.solution(Random(f"solution:{seed}")) + "<|im_end|>" for p, seed in zip(problems, seeds, strict=True)],
        add_special_tokens=False,
    )
    return [(p.ids, a.ids) for p, a in zip(prompts, answers, strict=True)]


def shard(job: tuple[int, int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Packed rows of problems `start`.. : ids uint16 [R, LENGTH] and marks uint8 [R, LENGTH]. Only whole documents."""
    start, count, math_share = job
    of_math = round(count * math_share)
    found = documents("math", range(start, start + of_math)) + documents("code", range(start, start + count - of_math))
    Random(start).shuffle(found)
    full: list[list[tuple[list[int], list[int]]]] = []
    bins: list[tuple[int, list[tuple[list[int], list[int]]]]] = []
    for document in found:
        size = len(document[0]) + len(document[1])
        if size > LENGTH:
            continue
        fits = [i for i, (room, _) in enumerate(bins) if room >= size]
        if fits:
            best = min(fits, key=lambda i: bins[i][0])
            room, held = bins.pop(best)
        elif len(bins) < 24:
            room, held = LENGTH, []
        else:
            fullest = min(range(len(bins)), key=lambda i: bins[i][0])
            full.append(bins.pop(fullest)[1])
            room, held = LENGTH, []
        held.append(document)
        bins.append((room - size, held))
    full += [held for room, held in bins if room < 96]
    ids, marks = np.zeros((len(full), LENGTH), np.uint16), np.zeros((len(full), LENGTH), np.uint8)
    for row, held in enumerate(full):
        at = 0
        for number, (prompt, answer) in enumerate(held, 1):
            middle, end = at + len(prompt), at + len(prompt) + len(answer)
            ids[row, at:middle], ids[row, middle:end] = prompt, answer
            marks[row, at:middle], marks[row, middle:end] = number, number | IN_LOSS
            at = end
    return ids, marks


def prompts(job: tuple[str, int, int]) -> list[list[int]]:
    """Prompt ids of `count` problems of a task from seed `start`."""
    task, start, count = job
    made = [opening(MODULES[task].problem(seed)) for seed in range(start, start + count)]
    return [e.ids for e in tokenizer().encode_batch_fast(made, add_special_tokens=False)]
