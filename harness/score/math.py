"""Reading a number out of an answer, and comparing it exactly.

An explicit answer beats a bare number: the last complete \\boxed{} that holds a number, else a line `#### n`, else "the
answer is n", else the last number. A model that runs on into a next "Question:" has answered before it, so the first
part that holds an explicit answer counts. An answer cut off at the token cap counts only where it is complete beyond
doubt, boxed or a finished `####` line; otherwise it is truncated. A box without a number is unparsed: the model
committed to something, and guessing another number from its text would be our answer, not its.

Every pattern below is linear in the text, or works on at most LONGEST characters: a hostile text costs no more than a
long one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any

from harness.score.outcome import Score, is_cut_off, visible

PARSER_VERSION = "math-2"
LONGEST = 256  # characters of a box or a line: longer ones hold no number anyone meant
MAX_DIGITS = 60

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]+|\.(?![0-9]))?|\.[0-9]+)"
_NUMBER = (
    r"(?:(?P<whole>[0-9]+) (?P<over>[0-9]+) ?/ ?(?P<under>[0-9]+)"
    rf"|(?P<top>{_UNSIGNED}) ?/ ?(?P<bottom>{_UNSIGNED})"
    rf"|(?P<plain>{_UNSIGNED}))"
)
# In running text a sign touches its number: "10 - 7" holds 10 and 7.
_ANYWHERE = re.compile(rf"(?<![\w.])(?P<sign>[-+](?=\$?[.0-9]))?(?:\$(?P<minus>-)?)?{_NUMBER}")
# Alone: words or a currency before it, a unit after it, neither a second number nor arithmetic.
_ALONE = re.compile(
    r"(?:[^0-9.+\-*/^=<>]|\.(?= ))*?"
    rf"(?P<sign>(?<!\w)[-+](?=[$€£¥]?[.0-9])|^[-+] )?(?:[$€£¥] ?(?P<minus>-)?)? ?{_NUMBER}"
    r"(?:[^0-9+\-*/^=<>]|(?<=[^\W\d_])[-/](?=[^\W\d_]))*"
)
_UNIT_POWER = re.compile(r"(?<=[A-Za-z]) ?\^ ?-?[0-9](?![0-9])|[²³]")
_LIST = re.compile(r",(?![0-9]{3}(?![0-9]))|;| and ")
_RUN_ON = re.compile(r"Question[ \t]{0,3}[0-9]{0,6}[ \t]{0,3}:")
_RUN_ON_LINE = re.compile(r"\n[ \t*#]{0,8}" + _RUN_ON.pattern)
_MARKER = re.compile(r"####([^\n]*)(\n?)")
_STATED = re.compile(r"\banswer(?:\s{1,3}is|\s{0,3}[:=])(?:\s{0,3}:)?(?=([^\n]{0,200}))", re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\.|[{}]", re.DOTALL)
_FRAC = re.compile(
    r"(?P<whole>(?<![0-9.])[0-9]{1,9} ?)?\\[dt]?frac ?(?:\{([^{}\\]{1,64})\} ?\{([^{}\\]{1,64})\}|([0-9]) ?([0-9]))"
)
_THIN = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|~)(?=[0-9]{3}(?![0-9]))")
# What makes a box an expression that has yet to be worked out: a command that is no unit, a factorial, a variable.
_EXPRESSION = re.compile(
    r"\\(?!approx|pounds|euro|degree|textdollar|displaystyle)[A-Za-z]+|[√⌊⌈]|[0-9)]!|[0-9)] ?(?:[xyzn]|π)(?!\w)"
)
_SPACING = re.compile(r"\\[,;: ]|\\q?quad(?![a-z])|~|\s+")
_WORDS = re.compile(r"\\(?:text(?:bf|rm|it)?|math(?:rm|bf)|mbox|boxed|fbox|left|right)(?![a-z])")


def score(item: Any, text: str, finish_reason: str | Mapping[str, Any]) -> Score:
    """Score a math answer against `item.reference` (a number, or its text). Never raises on a text.

    ValueError: the finish reason is no outcome of the model, or the reference is no number.
    """
    cut_off = is_cut_off(finish_reason)
    expected = parse_number(str(item.reference))
    if expected is None:
        raise ValueError(f"reference of {item.id}: expected a number, found {item.reference!r}")
    answer = visible(text)
    if answer is None:
        return Score("truncated", None, "unclosed think")
    number, rule = extract(answer, cut_off)
    if number is None:
        return Score("truncated" if cut_off else "unparsed", None, rule)
    return Score("correct" if number == expected else "wrong", str(number), rule)


def extract(answer: str, cut_off: bool = False) -> tuple[Fraction | None, str]:
    """The number an answer (without its thinking) gives, and the rule that read it."""
    for part in _split(_RUN_ON, answer):
        found = _boxed(part) or _marked(part, cut_off) or (None if cut_off else _stated(part))
        if found is not None:
            return found
    if cut_off:
        return None, "cut off before an answer"
    for part in _split(_RUN_ON_LINE, answer):
        numbers = list(_numbers(part))
        if numbers:
            return numbers[-1], "last number"
    return None, "no number"


def _split(pattern: re.Pattern[str], text: str) -> list[str]:
    cuts = [0, *(match.start() for match in pattern.finditer(text)), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]


def _boxed(part: str) -> tuple[Fraction | None, str] | None:
    for content in reversed(boxes(part)):
        number = parse_number(content)
        if number is not None:
            return number, "boxed"
    return (None, "box without a number") if "\\boxed" in part else None


def _marked(part: str, cut_off: bool) -> tuple[Fraction | None, str] | None:
    for match in _MARKER.finditer(part):
        number = parse_number(match[1]) if match[2] or not cut_off else None
        if number is not None:
            return number, "####"
    return None


def _stated(part: str) -> tuple[Fraction | None, str] | None:
    for match in reversed(list(_STATED.finditer(part))):
        said = match[1].replace("*", " ")
        for number in (*_numbers(said.rpartition("=")[2]), *_numbers(said)):
            return number, "stated"
    return None


def boxes(text: str) -> list[str]:
    """Contents of the complete \\boxed{...} of a text in the order they close; braces inside may nest.

    A content longer than LONGEST comes as an empty text: it is complete, and no number.
    """
    found: list[str] = []
    opened: list[tuple[int, bool]] = []
    for match in _BRACE.finditer(text):
        token = match[0]
        if token[-1] == "{" and token != "\\{":
            opened.append((match.end(), token != "{"))
        elif token == "}" and opened:
            start, boxed = opened.pop()
            if boxed:
                found.append(text[start : match.start()] if match.start() - start <= LONGEST else "")
    return found


def parse_number(text: str) -> Fraction | None:
    """The one number a short text states, exactly. Of an equation, the last side.

    1,234 | 18.50 | -7 | 007 | 3/4 | 2 1/2 | \\frac{3}{2} | $5 | 12 apples | 50% (a percent sign is a unit: 50).
    None where it states none, several, or an expression.
    """
    if len(text) > LONGEST:
        return None
    left, _, plain = _UNIT_POWER.sub("", _plain(text)).rpartition("=")
    if _LIST.search(left) or _EXPRESSION.search(plain):
        return None
    match = _ALONE.fullmatch(plain.strip("*_`()[]:;!? ").rstrip("."))
    return None if match is None or (match["sign"] and match["minus"]) else _value(match)


def _numbers(text: str) -> Iterator[Fraction]:
    for match in _ANYWHERE.finditer(_plain(text)):
        number = _value(match)
        if number is not None:
            yield number


def _value(match: re.Match[str]) -> Fraction | None:
    parts = {
        k: v.replace(",", "").rstrip(".") for k, v in match.groupdict().items() if v and k not in ("sign", "minus")
    }
    if any(len(digits) > MAX_DIGITS for digits in parts.values()):
        return None
    number = {name: Fraction(digits) for name, digits in parts.items()}
    if number.get("bottom") == 0 or number.get("under") == 0:
        return None
    if "plain" in number:
        value = number["plain"]
    elif "top" in number:
        value = number["top"] / number["bottom"]
    else:
        value = number["whole"] + number["over"] / number["under"]
    return -value if "-" in (match["sign"] or "") + (match["minus"] or "") else value


def _plain(text: str) -> str:
    """LaTeX and typography as plain characters: spacing and text commands dropped, fractions written a/b."""
    text = (
        text.replace("^\\circ", "")
        .replace("^{\\circ}", "")
        .replace("\N{MINUS SIGN}", "-")
        .replace("\N{EN DASH}", "-")
        .replace("\\$", "$")
        .replace("\\%", "%")
    )
    text = _THIN.sub("", text.replace("{,}", ",").replace("\\!", ""))
    text = _WORDS.sub(" ", _SPACING.sub(" ", text))
    for _ in range(8):  # fractions may nest: the innermost first
        text, changed = _FRAC.subn(_fraction, text)
        if not changed:
            break
    return " ".join(text.replace("{", " ").replace("}", " ").split())


def _fraction(match: re.Match[str]) -> str:
    top, bottom = parse_number(match[2] or match[4]), parse_number(match[3] or match[5])
    if top is None or not bottom:
        return " <> "  # no number, and nothing around it becomes one
    value = top / bottom + int(match["whole"] or 0)
    apart = " " if match.string[max(0, match.start() - 1) : match.start()].isdigit() else ""
    return f"{apart}{value.numerator}/{value.denominator} "
