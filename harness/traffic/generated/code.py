# ruff: noqa: E501 (an operation stays on few lines)
"""Coding tasks with thinking: a function over a list of integers, a text or a number, composed of 2 to 5 operations.

Every operation knows how it is asked for, how it is written in Python and what it computes; the three are kept apart, so
a task's tests come from the operations themselves and check the written code. Compositions are what a split owns: a
tested composition was never trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from random import Random
from typing import Any

from harness.traffic.generated import draw, phrase, sentence, split, split_of

__all__ = ["MIXES", "Mix", "Operation", "Problem", "Step", "problem", "split", "split_of"]

_SIZES = (0, 1, 3, 5, 6, 8, 9)  # of the inputs that tests use


@dataclass(frozen=True)
class Mix:
    """How many operations a task has, and how often a whole-number parameter is given by a sum to work out."""

    shortest: int
    longest: int
    worded: float


# Test tasks are longer and word every number, so that answers are not all right.
MIXES = {"train": Mix(2, 5, 0.6), "test": Mix(4, 5, 1.0)}


@dataclass(frozen=True)
class Operation:
    """source, result: "ints", "words", "str" or "int". `exprs` are equal ways to write it: {x} what it works on, {v} an element,
    {k} its parameter; `keep` and `each` hold the condition or element of a filter or a map, so that it can also be a loop.
    """

    key: str
    source: str
    result: str
    ask: str
    exprs: tuple[str, ...]
    run: Callable[[Any, Any], Any]
    parameters: tuple[Any, ...] = ()
    keep: tuple[str, ...] = ()
    each: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One operation of a task: its parameter, how it is asked for, and the sum that gives the parameter, if one does."""

    operation: Operation
    parameter: Any
    ask: str
    sum: str = ""


def _filter(
    key: str,
    ask: str,
    keep: tuple[str, ...],
    run: Callable[[Any, Any], bool],
    parameters: tuple[Any, ...] = (),
    source: str = "ints",
) -> Operation:
    return Operation(key, source, source, ask, (), lambda x, k: [v for v in x if run(v, k)], parameters, keep=keep)


def _map(
    key: str,
    ask: str,
    each: tuple[str, ...],
    run: Callable[[Any, Any], Any],
    parameters: tuple[Any, ...] = (),
    source: str = "ints",
    result: str = "ints",
) -> Operation:
    return Operation(key, source, result, ask, (), lambda x, k: [run(v, k) for v in x], parameters, each=each)


_SMALL = (2, 3, 4, 5, 6, 7, 8, 9)
_LIMITS = tuple(range(2, 21))
_LETTERS = tuple("aeinorst")
_VOWELS = "aeiou"

_OPERATIONS = (
    # A list of integers stays one.
    _filter("even", "[keep|take] [only |]the even numbers|[drop|remove] [all |]the odd numbers", ("{v} % 2 == 0", "not {v} % 2"), lambda v, k: v % 2 == 0),
    _filter("odd", "[keep|take] [only |]the odd numbers|[drop|remove] [all |]the even numbers", ("{v} % 2 == 1", "{v} % 2 != 0", "{v} % 2"), lambda v, k: v % 2 == 1),
    _filter("above", "[keep|take] [only |]the numbers [greater than|above] {k}", ("{v} > {k}",), lambda v, k: v > k, _LIMITS),
    _filter("below", "[keep|take] [only |]the numbers [less than|below] {k}", ("{v} < {k}",), lambda v, k: v < k, _LIMITS),
    _filter("least", "[keep|take] [only |]the numbers that are at least {k}|[drop|remove] the numbers [less than|below] {k}", ("{v} >= {k}",), lambda v, k: v >= k, _LIMITS),
    _filter("most", "[keep|take] [only |]the numbers that are at most {k}|[drop|remove] the numbers [greater than|above] {k}", ("{v} <= {k}",), lambda v, k: v <= k, _LIMITS),
    _filter("positive", "[keep|take] [only |]the positive numbers", ("{v} > 0",), lambda v, k: v > 0),
    _filter("negative", "[keep|take] [only |]the negative numbers", ("{v} < 0",), lambda v, k: v < 0),
    _filter("multiple", "[keep|take] [only |]the [multiples of {k}|numbers divisible by {k}]", ("{v} % {k} == 0",), lambda v, k: v % k == 0, (3, 4, 5, 6, 7)),
    _filter("indivisible", "[drop|remove] [all |]the [multiples of {k}|numbers divisible by {k}]", ("{v} % {k} != 0", "{v} % {k}"), lambda v, k: v % k != 0, (3, 4, 5, 6, 7)),
    _filter("without", "[drop|remove] every {k}|[leave out|delete] all numbers equal to {k}", ("{v} != {k}",), lambda v, k: v != k, tuple(range(10))),
    _map("square", "square [each|every] number|replace [each|every] number by its square", ("{v} * {v}", "{v} ** 2"), lambda v, k: v * v),
    _map("cube", "cube [each|every] number|replace [each|every] number by its cube", ("{v} ** 3", "{v} * {v} * {v}"), lambda v, k: v**3),
    _map("plus", "add {k} to [each|every] number|increase [each|every] number by {k}", ("{v} + {k}",), lambda v, k: v + k, tuple(range(1, 13))),
    _map("minus", "subtract {k} from [each|every] number|decrease [each|every] number by {k}", ("{v} - {k}",), lambda v, k: v - k, tuple(range(1, 13))),
    _map("times", "multiply [each|every] number by {k}", ("{v} * {k}", "{k} * {v}"), lambda v, k: v * k, _SMALL),
    _map("negate", "negate [each|every] number|flip the sign of [each|every] number", ("-{v}",), lambda v, k: -v),
    _map("abs", "[take|use] the absolute value of [each|every] number|replace [each|every] number by its absolute value", ("abs({v})",), lambda v, k: abs(v)),
    _map("remainder", "replace [each|every] number by its remainder [modulo|when divided by] {k}", ("{v} % {k}",), lambda v, k: v % k, _SMALL),
    _map("floor", "divide [each|every] number by {k}, rounding down", ("{v} // {k}",), lambda v, k: v // k, _SMALL),
    _map("cap", "[cap|limit] [each|every] number at {k}", ("min({v}, {k})", "min({k}, {v})"), lambda v, k: min(v, k), _LIMITS),
    _map("raise", "raise [each|every] number [smaller|less] than {k} to {k}", ("max({v}, {k})", "max({k}, {v})"), lambda v, k: max(v, k), _LIMITS),
    _map("halve", "halve the even numbers[ and leave the odd ones|]", ("{v} // 2 if {v} % 2 == 0 else {v}",), lambda v, k: v // 2 if v % 2 == 0 else v),
    _map("triple", "triple the odd numbers[ and leave the even ones|]", ("{v} * 3 if {v} % 2 else {v}", "3 * {v} if {v} % 2 else {v}"), lambda v, k: v * 3 if v % 2 else v),
    Operation("sort", "ints", "ints", "sort the numbers[ in ascending order| from small to large]", ("sorted({x})",), lambda x, k: sorted(x)),
    Operation("descend", "ints", "ints", "sort the numbers [in descending order|from large to small]", ("sorted({x}, reverse=True)",), lambda x, k: sorted(x)[::-1]),
    Operation("bysize", "ints", "ints", "sort the numbers by [their |]absolute value", ("sorted({x}, key=abs)",), lambda x, k: sorted(x, key=abs)),
    Operation("reverse", "ints", "ints", "reverse the [list|order]", ("{x}[::-1]", "list(reversed({x}))"), lambda x, k: list(reversed(x))),
    Operation("distinct", "ints", "ints", "remove [the |]duplicates[, keeping the first of each|]", ("list(dict.fromkeys({x}))",), lambda x, k: [v for i, v in enumerate(x) if v not in x[:i]]),
    Operation("first", "ints", "ints", "[keep|take] [only |]the first {k}[ numbers| elements]", ("{x}[:{k}]",), lambda x, k: x[:k], (2, 3, 4, 5)),
    Operation("last", "ints", "ints", "[keep|take] [only |]the last {k}[ numbers| elements]", ("{x}[-{k}:]",), lambda x, k: x[max(0, len(x) - k):], (2, 3, 4, 5)),
    Operation("skip", "ints", "ints", "[skip|drop|leave out] the first {k}[ numbers| elements]", ("{x}[{k}:]",), lambda x, k: x[k:], (2, 3)),
    Operation("second", "ints", "ints", "[keep|take] every second number[, starting with the first|]", ("{x}[::2]",), lambda x, k: [v for i, v in enumerate(x) if i % 2 == 0]),
    Operation("running", "ints", "ints", "replace the list by its running totals|[compute|take] the running totals", ("[sum({x}[: i + 1]) for i in range(len({x}))]",), lambda x, k: list(accumulate(x))),
    Operation("steps", "ints", "ints", "[compute|take] the differences between neighbors|replace the list by the differences of neighbors", ("[b - a for a, b in zip({x}, {x}[1:])]",), lambda x, k: [b - a for a, b in pairwise(x)]),
    Operation("weigh", "ints", "ints", "multiply [each|every] number by its index", ("[i * {v} for i, {v} in enumerate({x})]", "[{v} * i for i, {v} in enumerate({x})]"), lambda x, k: [i * v for i, v in enumerate(x)]),
    Operation("rotate", "ints", "ints", "move the first number to the end", ("{x}[1:] + {x}[:1]",), lambda x, k: x[1:] + x[:1]),
    # A list of integers becomes a number or a text.
    Operation("sum", "ints", "int", "[compute|take] the sum|add [up all|up] the numbers", ("sum({x})",), lambda x, k: sum(x)),
    Operation("count", "ints", "int", "count [the numbers|how many there are]", ("len({x})",), lambda x, k: len(x)),
    Operation("max", "ints", "int", "find the [largest|biggest] number[, or 0 if there is none|]", ("max({x}, default=0)",), lambda x, k: max(x) if x else 0),
    Operation("min", "ints", "int", "find the smallest number[, or 0 if there is none|]", ("min({x}, default=0)",), lambda x, k: min(x) if x else 0),
    Operation("product", "ints", "int", "[compute|take] the product|multiply all the numbers", ("math.prod({x})",), lambda x, k: prod(x)),
    Operation("spread", "ints", "int", "[compute|take] the difference between the largest and the smallest number", ("max({x}, default=0) - min({x}, default=0)",), lambda x, k: max(x) - min(x) if x else 0),
    Operation("kinds", "ints", "int", "count the distinct numbers", ("len(set({x}))",), lambda x, k: len(set(x))),
    Operation("evens", "ints", "int", "count the even numbers", ("sum({v} % 2 == 0 for {v} in {x})", "len([{v} for {v} in {x} if {v} % 2 == 0])"), lambda x, k: sum(1 for v in x if v % 2 == 0)),
    Operation("squares", "ints", "int", "[compute|take] the sum of [the |]squares", ("sum({v} * {v} for {v} in {x})", "sum({v} ** 2 for {v} in {x})"), lambda x, k: sum(v * v for v in x)),
    Operation("dashes", "ints", "str", "join the numbers with [dashes|a dash in between]", ('"-".join(str({v}) for {v} in {x})', '"-".join(map(str, {x}))'), lambda x, k: "-".join(str(v) for v in x)),
    Operation("commas", "ints", "str", "join the numbers with commas", ('",".join(str({v}) for {v} in {x})', '",".join(map(str, {x}))'), lambda x, k: ",".join(str(v) for v in x)),
    # A text.
    Operation("lower", "str", "str", "[turn|change|convert] [it|the text] to lower case", ("{x}.lower()",), lambda x, k: x.lower()),
    Operation("upper", "str", "str", "[turn|change|convert] [it|the text] to upper case", ("{x}.upper()",), lambda x, k: x.upper()),
    Operation("swap", "str", "str", "swap [the |]upper and lower case", ("{x}.swapcase()",), lambda x, k: x.swapcase()),
    Operation("mirror", "str", "str", "reverse [it|the text]", ("{x}[::-1]", '"".join(reversed({x}))'), lambda x, k: x[::-1]),
    Operation("consonants", "str", "str", "[remove|drop|delete] [all |]the vowels", ('"".join({v} for {v} in {x} if {v} not in "aeiouAEIOU")', '"".join({v} for {v} in {x} if {v}.lower() not in "aeiou")'), lambda x, k: "".join(c for c in x if c.lower() not in _VOWELS)),
    Operation("vowels", "str", "str", "[keep|take] only the vowels", ('"".join({v} for {v} in {x} if {v} in "aeiouAEIOU")', '"".join({v} for {v} in {x} if {v}.lower() in "aeiou")'), lambda x, k: "".join(c for c in x if c.lower() in _VOWELS)),
    Operation("letters", "str", "str", "[keep|take] only the letters", ('"".join({v} for {v} in {x} if {v}.isalpha())',), lambda x, k: "".join(c for c in x if c.isalpha())),
    Operation("nodigits", "str", "str", "[remove|drop|delete] [all |]the digits", ('"".join({v} for {v} in {x} if not {v}.isdigit())',), lambda x, k: "".join(c for c in x if not c.isdigit())),
    Operation("nospace", "str", "str", "[remove|drop|delete] [all |]the spaces", ('{x}.replace(" ", "")', '"".join({x}.split(" "))'), lambda x, k: "".join(c for c in x if c != " ")),
    Operation("underscore", "str", "str", "replace [each|every] space by an underscore", ('{x}.replace(" ", "_")', '"_".join({x}.split(" "))'), lambda x, k: "".join("_" if c == " " else c for c in x)),
    Operation("delete", "str", "str", '[remove|drop|delete] [each|every] letter "{k}"', ('{x}.replace("{k}", "")', '"".join({v} for {v} in {x} if {v} != "{k}")'), lambda x, k: "".join(c for c in x if c != k), _LETTERS),
    Operation("star", "str", "str", 'replace [each|every] letter "{k}" by a star', ('{x}.replace("{k}", "*")',), lambda x, k: "".join("*" if c == k else c for c in x), _LETTERS),
    Operation("twice", "str", "str", "double [each|every] character|repeat [each|every] character twice", ('"".join({v} * 2 for {v} in {x})', '"".join({v} + {v} for {v} in {x})'), lambda x, k: "".join(c + c for c in x)),
    Operation("head", "str", "str", "[keep|take] [only |]the first {k} characters", ("{x}[:{k}]",), lambda x, k: x[:k], _SMALL),
    Operation("tail", "str", "str", "[keep|take] [only |]the last {k} characters", ("{x}[-{k}:]",), lambda x, k: x[max(0, len(x) - k):], _SMALL),
    Operation("alternate", "str", "str", "[keep|take] every second character[, starting with the first|]", ("{x}[::2]",), lambda x, k: "".join(c for i, c in enumerate(x) if i % 2 == 0)),
    Operation("length", "str", "int", "[count|get] the number of characters", ("len({x})",), lambda x, k: len(x)),
    Operation("countvowels", "str", "int", "count the vowels", ('sum({v} in "aeiouAEIOU" for {v} in {x})', 'sum({v}.lower() in "aeiou" for {v} in {x})', 'sum(1 for {v} in {x} if {v} in "aeiouAEIOU")'), lambda x, k: len([c for c in x if c.lower() in _VOWELS])),
    Operation("countletter", "str", "int", 'count the letter "{k}"|count how often "{k}" occurs', ('{x}.count("{k}")', 'sum({v} == "{k}" for {v} in {x})'), lambda x, k: len([c for c in x if c == k]), _LETTERS),
    Operation("countupper", "str", "int", "count the upper case letters", ("sum({v}.isupper() for {v} in {x})", "sum(1 for {v} in {x} if {v}.isupper())"), lambda x, k: len([c for c in x if c.isupper()])),
    Operation("alphabet", "str", "int", "count the distinct characters", ("len(set({x}))",), lambda x, k: len(set(x))),
    Operation("digitlist", "str", "ints", "[take|get] the list of its digits", ("[int({v}) for {v} in {x} if {v}.isdigit()]",), lambda x, k: [ord(c) - 48 for c in x if c in "0123456789"]),
    Operation("split", "str", "words", "split it into words", ("{x}.split()",), lambda x, k: x.split()),
    # Words.
    _filter("long", "[keep|take] [only |]the words longer than {k} letters", ("len({v}) > {k}",), lambda v, k: len(v) > k, (2, 3, 4, 5), source="words"),
    _filter("short", "[keep|take] [only |]the words shorter than {k} letters", ("len({v}) < {k}",), lambda v, k: len(v) < k, (3, 4, 5, 6), source="words"),
    _filter("contain", '[keep|take] [only |]the words with [a letter |the letter |]"{k}"', ('"{k}" in {v}',), lambda v, k: k in v, _LETTERS, source="words"),
    _map("shout", "[turn|change] [each|every] word to upper case", ("{v}.upper()",), lambda v, k: v.upper(), source="words", result="words"),
    _map("capital", "capitalize [each|every] word", ("{v}.capitalize()",), lambda v, k: v[:1].upper() + v[1:].lower(), source="words", result="words"),
    _map("flip", "reverse [each|every] word", ("{v}[::-1]",), lambda v, k: v[::-1], source="words", result="words"),
    _map("initial", "[keep|take] the first letter of [each|every] word", ("{v}[0]", "{v}[:1]"), lambda v, k: v[:1], source="words", result="words"),
    _map("lengths", "replace [each|every] word by its length", ("len({v})",), lambda v, k: len(v), source="words", result="ints"),
    Operation("sortwords", "words", "words", "sort the words[ alphabetically|]", ("sorted({x})",), lambda x, k: sorted(x)),
    Operation("bylength", "words", "words", "sort the words by length", ("sorted({x}, key=len)",), lambda x, k: sorted(x, key=len)),
    Operation("backwards", "words", "words", "reverse the order of the words", ("{x}[::-1]", "list(reversed({x}))"), lambda x, k: x[::-1]),
    Operation("join", "words", "str", "join the words with [spaces|a space in between]", ('" ".join({x})',), lambda x, k: " ".join(x)),
    Operation("hyphen", "words", "str", "join the words with [dashes|a dash in between]", ('"-".join({x})',), lambda x, k: "-".join(x)),
    Operation("countwords", "words", "int", "count the words", ("len({x})",), lambda x, k: len(x)),
    Operation("longest", "words", "int", "find the length of the longest word[, or 0 if there is none|]", ("max((len({v}) for {v} in {x}), default=0)", "max(map(len, {x}), default=0)"), lambda x, k: max([0, *map(len, x)])),
    # A number.
    Operation("digits", "int", "ints", "[take|get] the list of its digits", ("[int({v}) for {v} in str(abs({x}))]", "list(map(int, str(abs({x}))))"), lambda x, k: [ord(c) - 48 for c in str(abs(x))]),
    Operation("upto", "int", "ints", "[take|list] the numbers from 1 to {n}", ("list(range(1, {x} + 1))", "[i for i in range(1, {x} + 1)]"), lambda x, k: [i + 1 for i in range(x)]),
    Operation("divisors", "int", "ints", "[take|list|find] [all |]the divisors of {n}", ("[d for d in range(1, {x} + 1) if {x} % d == 0]",), lambda x, k: [d for d in range(1, x + 1) if x % d == 0]),
    Operation("addone", "int", "int", "add {k}", ("{x} + {k}",), lambda x, k: x + k, _SMALL),
    Operation("scale", "int", "int", "multiply it by {k}", ("{x} * {k}", "{k} * {x}"), lambda x, k: x * k, _SMALL),
    Operation("less", "int", "int", "subtract {k}", ("{x} - {k}",), lambda x, k: x - k, _SMALL),
    Operation("modulo", "int", "int", "take the remainder modulo {k}", ("{x} % {k}",), lambda x, k: x % k, _LIMITS),
    Operation("backdigits", "int", "int", "reverse its digits", ("int(str(abs({x}))[::-1])",), lambda x, k: int("".join(reversed(str(abs(x)))))),
    Operation("text", "int", "str", "[turn|convert] it into a text", ("str({x})",), lambda x, k: f"{x}"),
)  # fmt: skip
_BY_SOURCE = {kind: [op for op in _OPERATIONS if op.source == kind] for kind in ("ints", "str", "words", "int")}
_COUNTING = {"upto", "divisors"}  # only at the start, on a number that is known to be small and positive

_NAMES = {
    "ints": ("xs", "numbers", "values", "nums", "items"),
    "str": ("s", "text", "line"),
    "words": ("words", "parts"),
    "int": ("n", "number", "total", "result"),
}
_ELEMENTS = {
    "ints": ("x", "v", "value", "num"),
    "str": ("c", "ch", "char"),
    "words": ("w", "word"),
    "int": ("d", "digit"),
}
_ARGUMENT = {"ints": "a list of integers", "str": "a text", "int": "a positive integer"}
_OUTPUT = {"ints": "list", "words": "list of words", "str": "text", "int": "number"}
_VERBS = ("process", "compute", "transform", "solve", "handle", "convert", "evaluate", "reduce", "build", "make")
_NOUNS = ("values", "data", "items", "result", "entries", "sequence", "record", "series", "input", "answer")
_SAMPLE_WORDS = ["Red", "apple", "tree", "green", "river", "stone", "Blue", "house", "seven", "Open", "window", "night", "Rain", "over", "old", "bridge", "summer", "ice", "Moon", "at", "noon", "garden", "Tea", "letter", "an", "orange", "Paris", "train", "start", "sea", "it", "no"]  # fmt: skip


def _sample(kind: str, rng: Random, size: int) -> Any:
    if kind == "ints":
        return [rng.randint(-12, 30) for _ in range(size)]
    if kind == "int":
        return rng.randint(1, 12) if size < 3 else rng.randint(10, 400)
    words = [rng.choice(_SAMPLE_WORDS) if rng.random() < 0.85 else str(rng.randint(1, 99)) for _ in range(size)]
    return " ".join(words)


@dataclass(frozen=True)
class Problem:
    """prompt: what to write; entry_point: the function's name; tests: `assert` lines that a right function passes."""

    seed: int
    prompt: str
    entry_point: str
    argument: str
    source: str
    steps: tuple[Step, ...]
    tests: tuple[str, ...]
    thinking: bool = True

    @property
    def novelty(self) -> str:
        return " ".join((self.source, *(step.operation.key for step in self.steps)))

    @property
    def question(self) -> str:
        return self.prompt

    @property
    def answer(self) -> str:
        return self.entry_point

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        return ({"role": "user", "content": self.prompt},)

    def solution(self, rng: Random) -> str:
        """One right answer: thinking between <think> and </think>, then the function in a fence."""
        lines, notes = _write(self, rng)
        thinking = [
            sentence(
                "the function [takes|gets|receives] {what}, `{arg}`.|[we|I] [have|need] to [write|define] `{name}`, which [takes|gets] {what}.|the input `{arg}` is {what}.|let me [plan|think about] `{name}` step by step.",
                rng,
                {"what": _ARGUMENT[self.source], "arg": self.argument, "name": self.entry_point},
            )
        ]
        for index, (step, note) in enumerate(zip(self.steps, notes, strict=True)):
            lead = "first" if index == 0 else ("finally" if index == len(notes) - 1 else "[then|next|after that]")
            thinking.append(
                sentence(
                    f"[{lead}, |step {index + 1}: |{lead}, I ]{{ask}}{{sum}}[, so I use|: that is|, which is|, written as| with] `{{note}}`.",
                    rng,
                    {"ask": step.ask, "note": note, "sum": step.sum and f" ({step.sum} = {step.parameter})"},
                )
            )
        if rng.random() < 0.35:
            thinking.append(_example(self, rng))
        if rng.random() < 0.3:
            thinking.append(
                phrase(
                    "[That should work.|That is all.|Now I [can |]write it down.|This [handles|covers] every case.]",
                    rng,
                    {},
                )
            )
        between = "\n" if rng.random() < 0.6 else " "
        intro = phrase("[|||Here is the [function|code]:\n\n|The [function|code] [is|looks like this]:\n\n]", rng, {})
        body = "\n".join(lines)
        return f"<think>\n{between.join(thinking)}\n</think>\n\n{intro}```python\n{body}\n```"


def _run(steps: tuple[Step, ...], value: Any) -> list[Any]:
    values = [value]
    for step in steps:
        values.append(step.operation.run(values[-1], step.parameter))
    return values


def _worded(k: int, rng: Random) -> tuple[str, str]:
    """A sum that gives k, in words and in figures."""
    kind = rng.random()
    if kind < 0.25:
        other = rng.randint(34, 780)
        return rng.choice((f"{k + other} minus {other}", f"{k + other} - {other}")), f"{k + other} - {other}"
    if kind < 0.55:
        other = rng.randint(12, 89)
        return rng.choice((f"{k * other} divided by {other}", f"{k * other} / {other}")), f"{k * other} / {other}"
    first, second = rng.randint(4, 19), rng.randint(11, 49)
    rest = first * second - k
    sign, word, size = ("-", "minus", rest) if rest >= 0 else ("+", "plus", -rest)
    written = f"{first} * {second} {sign} {size}"
    return rng.choice((f"{first} times {second} {word} {size}", written)), written


def _example(made: Problem, rng: Random) -> str:
    values = _run(made.steps, _sample(made.source, rng, 3 if made.source != "int" else 2))
    steps = [repr(value) for value in values]
    return phrase(
        "[For example|For instance], {first} [becomes|gives|turns into] {rest}.",
        rng,
        {"first": steps[0], "rest": ", then ".join(steps[1:])},
    )


def _write(made: Problem, rng: Random) -> tuple[list[str], list[str]]:
    """The function's lines, and the expression that stands for each operation."""
    body: list[str] = []
    notes: list[str] = []
    current, kind, last = made.argument, made.source, len(made.steps) - 1
    fresh = rng.random() < 0.5
    element = {kind: rng.choice(names) for kind, names in _ELEMENTS.items()}
    for index, step in enumerate(made.steps):
        op, parameter = step.operation, step.parameter
        v = element[op.source]
        if v == current:
            v = next(name for name in _ELEMENTS[op.source] if name != current)
        values = {"x": current, "v": v, "k": parameter}
        if not fresh and op.result == kind:
            target = current
        else:
            target = rng.choice([name for name in _NAMES[op.result] if name != current])
        keep = rng.choice(op.keep).format(**values) if op.keep else ""
        each = rng.choice(op.each).format(**values) if op.each else ""
        if op.keep or op.each:
            expr = f"[{each or v} for {v} in {current}{f' if {keep}' if keep else ''}]"
            notes.append(keep or each)
        else:
            expr = rng.choice(op.exprs).format(**values)
            notes.append(expr)
        if (op.keep or op.each) and rng.random() < 0.25 and target != current:
            body += [f"{target} = []", f"for {v} in {current}:"]
            body += [f"    if {keep}:", f"        {target}.append({v})"] if keep else [f"    {target}.append({each})"]
            if index == last:
                body.append(f"return {target}")
        elif index == last and rng.random() < 0.75:
            body.append(f"return {expr}")
        else:
            body.append(f"{target} = {expr}")
            if index == last:
                body.append(f"return {target}")
        current, kind = target, op.result
    head = [f"def {made.entry_point}({made.argument}):"]
    if any("math." in line for line in body):
        head = ["import math", "", "", *head]
    return head + [f"    {line}" for line in body], notes


def _chain(source: str, argument: str, mix: Mix, rng: Random) -> tuple[Step, ...]:
    kind = source
    chain: list[Step] = []
    for index in range(rng.randint(mix.shortest, mix.longest)):
        used = {step.operation.key for step in chain}
        op = rng.choice(
            [op for op in _BY_SOURCE[kind] if op.key not in used and (index == 0 or op.key not in _COUNTING)]
        )
        k = rng.choice(op.parameters) if op.parameters else None
        said, figures = _worded(k, rng) if isinstance(k, int) and rng.random() < mix.worded else (str(k), "")
        chain.append(Step(op, k, phrase(op.ask, rng, {"k": said, "n": argument}), figures))
        kind = op.result
    return tuple(chain)


def _make(mix: Mix, rng: Random) -> Problem:
    source = rng.choice(("ints", "ints", "ints", "str", "str", "int"))
    argument = rng.choice(_NAMES[source][:3])
    while True:
        steps = _chain(source, argument, mix, rng)
        inputs = [_sample(source, rng, size) for size in _SIZES]
        results = [_run(steps, value) for value in inputs]
        # A composition that forgets its input, or makes huge numbers, is no task.
        if len({repr(values[-1]) for values in results}) >= 3 and all(len(repr(values[-1])) < 90 for values in results):
            break
    name = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
    asks = [step.ask for step in steps]
    kind = steps[-1].operation.result
    what = {
        "what": _ARGUMENT[source],
        "call": f"{name}({argument})",
        "name": name,
        "arg": argument,
        "out": _OUTPUT[kind],
    }
    if rng.random() < 0.7:
        listed = "".join(
            f", {rng.choice(('then', 'then', 'and then', 'next'))} {ask}" if index else ask
            for index, ask in enumerate(asks)
        )
        prompt = phrase(
            "[Write|Create|Implement] a [Python |]function `{call}` [that takes|for] {what}: {steps}. [Return|It should return|Give back] the [resulting |]{out}.|"
            "Given {what} `{arg}`, {steps}, and return the [resulting |]{out}. [Write|Define] [it|this] as a Python function `{call}`.",
            rng, {**what, "steps": listed},
        )  # fmt: skip
    else:
        listed = "\n".join(f"{index + 1}. {ask}" for index, ask in enumerate(asks))
        prompt = phrase(
            "[Write|Create|Implement] a [Python |]function `{call}` that takes {what} and [does the following|follows these steps|works as follows]:\n{steps}\nReturn the [resulting |]{out}.",
            rng, {**what, "steps": listed},
        )  # fmt: skip
    tests = tuple(f"assert {name}({value!r}) == {values[-1]!r}" for value, values in zip(inputs, results, strict=True))
    return Problem(0, prompt, name, argument, source, steps, tests)


def problem(seed: int) -> Problem:
    """The task of one seed (a pure function of it). Raises ValueError for a seed outside every split."""
    mix = MIXES["test" if split_of(seed) == "test" else "train"]
    return replace(draw(seed, "code", partial(_make, mix)), seed=seed)
