import json
import os
import random
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.score import PARSER_VERSION, Score, score
from harness.score.math import boxes, extract, parse_number
from harness.stats import find_loop
from harness.traffic.generated import math as generated


def item(reference="18", task="math"):
    return SimpleNamespace(id="test-1", task=task, reference=reference)


# The scoring table of the field, case by case: what other harnesses got wrong, and what it should give.
TABLE = [
    ("thousands", "$1,234.", "1234"),
    ("thousands in a sentence", "She pays $1,234.", "1234"),
    ("decimal form", "29.00", "29"),
    ("decimal lost", "18.50", "18.5"),
    ("sign lost", "-7", "-7"),
    ("sign after a currency", "$-7", "-7"),
    ("sign before a currency", "-$7", "-7"),
    ("typographic minus", "The answer is \N{MINUS SIGN}7.", "-7"),
    ("leading zero", "007", "7"),
    ("boxed", "\\boxed{42}", "42"),
    ("nested box", "\\boxed{\\frac{3}{2}}", "3/2"),
    ("fraction of fractions", "\\boxed{\\frac{\\frac{1}{2}}{\\frac{3}{4}}}", "2/3"),
    ("last of two boxes", "\\boxed{3} and so \\boxed{4}", "4"),
    ("last complete box", "\\boxed{3} and so \\boxed{4", "3"),
    ("box in a box", "\\boxed{\\boxed{5}}", "5"),
    ("unit", "12 apples", "12"),
    ("percent", "50%", "50"),
    ("currency", "$5", "5"),
    ("unit in the box", "\\boxed{12\\text{ apples}}", "12"),
    ("percent in the box", "\\boxed{50\\%}", "50"),
    ("currency in the box", "\\boxed{\\$5}", "5"),
    ("LaTeX thousands", "\\boxed{12{,}345}", "12345"),
    ("thin space", "\\boxed{12\\,345}", "12345"),
    ("dfrac", "\\boxed{\\dfrac{7}{4}}", "7/4"),
    ("frac of digits", "\\boxed{\\frac34}", "3/4"),
    ("mixed", "\\boxed{2\\frac{1}{2}}", "5/2"),
    ("mixed, plain", "2 1/2 cups", "5/2"),
    ("equation in the box", "\\boxed{x = 3 \\times 6 = 18}", "18"),
    ("squared unit", "\\boxed{18\\text{ cm}^2}", "18"),
    ("degrees", "\\boxed{18^\\circ}", "18"),
    ("degrees in braces", "\\boxed{18^{\\circ}\\text{C}}", "18"),
    ("chain of equations", "\\boxed{x = 12 + 6 = 18}", "18"),
    ("math mode", "\\boxed{$18$}", "18"),
    ("about", "\\boxed{\\approx 18}", "18"),
    ("unit that begins with a variable's letter", "\\boxed{18 yards}", "18"),
    ("last statement of one line", "So the answer is 7. Wait, that is wrong: the answer is 5.", "5"),
    ("marker", "9 * 2 = 18\n#### 18", "18"),
    ("marker with commas", "#### 70,000", "70000"),
    ("stated, bold", "So the answer is **18** dollars.", "18"),
    ("stated as an equation", "The final answer is: 3 * 6 = 18", "18"),
    ("run-on", "The answer is 18.\n\nQuestion: Tom has 99 marbles. How many?\nAnswer: 99", "18"),
    ("run-on after a box", "\\boxed{18}\nQuestion: Tom has 99.\n\\boxed{99}", "18"),
    ("run-on on one line", "#### 18 Question: Tom has 99. #### 99", "18"),
    ("run-on after a bare number", "9 * 2 = 18\n\nQuestion: Tom has 99 marbles.", "18"),
    ("a question restated", "Question: how many?\nHe has 3 + 4.\n\\boxed{7}", "7"),
    ("stop word in thinking", "<think>Identify the Question: Tom has 3.</think>\\boxed{18}", "18"),
    ("number only in thinking does not count", "<think>\\boxed{3}</think> It is 18.", "18"),
    ("thinking opened by the prompt", "3 + 4 is 7 \\boxed{7}</think>\\boxed{18}", "18"),
    ("subtraction is no sign", "That leaves 10 - 7", "7"),
    ("subtraction without spaces", "That leaves 10-7", "7"),
    ("special token after the answer", "#### 18<|im_end|>", "18"),
]


@pytest.mark.parametrize(("text", "expected"), [(t, e) for _, t, e in TABLE], ids=[n for n, _, _ in TABLE])
def test_table(text, expected):
    result = score(item(expected), text, "stop")
    assert result.outcome == "correct"
    assert Fraction(result.parsed) == Fraction(expected)
    assert score(item("123456789"), text, "stop").outcome == "wrong"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "$.",
        "no idea",
        "\\boxed{}",
        "\\boxed{x + 1}",
        "\\boxed{x-5}",
        "\\boxed{3, 4}",
        "\\boxed{3 + 4}",
        "\\boxed{x = 5, y = 18}",
        "\\boxed{x = 5 \\text{ and } y = 18}",
        "\\boxed{1,23}",
        "\\boxed{\\frac{1}{0}}",
        "\\boxed{\\frac{x}{2} 5}",
        "\\boxed{12:30}",
        "\\boxed{10^3}",
        "\\boxed{\\sqrt{16}}",
        "\\boxed{√16}",
        "\\boxed{5!}",
        "\\boxed{\\log 5}",
        "\\boxed{\\lfloor 2.5 \\rfloor}",
        "\\boxed{5\\pi}",
        "\\boxed{5x}",
        "\\boxed{5 x}",
        "\\boxed{--7}",
        "\\boxed{18",
        "It is 5. \\boxed{none}",
        "9" * 70,
    ],
)
def test_no_answer_is_unparsed_not_wrong(text):
    result = score(item(), text, "stop")
    assert (result.outcome, result.parsed) == ("unparsed", None)


@pytest.mark.parametrize(
    "text",
    [
        "<think>3 + 4 = 7, so \\boxed{18}",
        "<think>a</think> 18 <think>but wait",
        "The answer is 1",
        "9 * 2 = 18",
        "#### 1",
        "so \\boxed{18",
        "",
    ],
)
def test_cut_off_before_an_answer_is_truncated(text):
    assert score(item(), text, {"type": "length", "length": 512}) == Score(
        "truncated", None, score(item(), text, "length").rule
    )
    assert score(item(), text, "length").outcome == "truncated"


def test_unclosed_think_is_truncated_however_it_ended():
    assert score(item(), "<think> it is 18", "stop").outcome == "truncated"


@pytest.mark.parametrize("text", ["\\boxed{18}. Let me check", "#### 18\nLet me", "<think>5</think>\\boxed{18} and"])
def test_a_complete_answer_before_the_cap_counts(text):
    assert score(item(), text, "length").outcome == "correct"


@pytest.mark.parametrize("reason", ["abort", None, {"type": "abort", "message": "x"}, {}, "error"])
def test_a_failed_request_is_no_outcome(reason):
    with pytest.raises(ValueError, match="finish_reason"):
        score(item(), "\\boxed{18}", reason)


def test_rule_is_recorded():
    rules = [
        score(item(), t, "stop").rule for t in ("\\boxed{18}", "#### 18", "answer: 18", "so 18", "no", "\\boxed{a}")
    ]
    assert rules == ["boxed", "####", "stated", "last number", "no number", "box without a number"]
    assert PARSER_VERSION["math"] == "math-2"


@pytest.mark.parametrize("seed", range(1_000_200_000, 1_000_200_040))
def test_generated_solutions_are_right(seed):
    """The generator and the parser were written apart."""
    problem = generated.problem(seed)
    for draw in range(5):
        text = problem.solution(random.Random(draw))
        assert score(item(problem.answer), text, "stop").outcome == "correct", text
        assert score(item(str(int(problem.answer) + 1)), text, "stop").outcome == "wrong"


DATA = Path(os.environ.get("SPECACCEPT_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))


@pytest.mark.skipif(not (DATA / "gsm8k" / "test.jsonl").exists(), reason="SPECACCEPT_DATA holds no data sets")
def test_every_gsm8k_solution_is_right_however_it_ends():
    for row in map(json.loads, (DATA / "gsm8k" / "test.jsonl").read_text().splitlines()):
        steps, _, gold = row["answer"].rpartition("\n#### ")
        reference = item(gold.replace(",", ""))
        for ending in (f"#### {gold}", f"\\boxed{{{gold}}}", f"\\[\\boxed{{\\${gold}}}\\]", f"The answer is ${gold}."):
            assert score(reference, f"{steps}\n{ending}", "stop").outcome == "correct", (steps, ending)
        assert find_loop([ord(c) for c in row["answer"]]) is None


def test_comparison_is_exact():
    assert score(item("1/3"), "\\boxed{0.33}", "stop").outcome == "wrong"
    assert score(item("0.1"), "\\boxed{\\frac{1}{10}}", "stop").outcome == "correct"
    assert score(item("1,000"), "\\boxed{1000.0}", "stop").outcome == "correct"
    assert score(item(Fraction(3, 2)), "\\boxed{1.5}", "stop").outcome == "correct"
    assert score(item(1234), "\\boxed{1,234}", "stop").outcome == "correct"


def test_bad_reference_is_named():
    with pytest.raises(ValueError, match=r"reference of test-1.*'many'"):
        score(item("many"), "18", "stop")


def test_boxes_nest_and_ignore_escaped_braces():
    assert boxes("\\boxed{a\\}{b}c} {x} \\boxed{d} \\boxed{e") == ["a\\}{b}c", "d"]


@settings(derandomize=True, deadline=None)
@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{} apples", "${}", "{}%", "x = {}", "\\text{{{}}}", "({})"])
)
def test_integers_survive_every_dress(number, dress):
    for digits in (str(number), f"{number:,}", f"{number}.00", f"{number}."):
        assert parse_number(dress.format(digits)) == number
        assert extract(f"First 3, then 4.\nSo \\boxed{{{dress.format(digits)}}}.") == (number, "boxed")


@settings(derandomize=True, deadline=None)
@given(st.fractions(max_denominator=999), st.booleans())
def test_fractions_survive(value, latex):
    sign = "-" if value < 0 else ""
    top, bottom = abs(value.numerator), value.denominator
    text = f"{sign}\\frac{{{top}}}{{{bottom}}}" if latex else f"{sign}{top}/{bottom}"
    assert parse_number(text) == value
    whole, rest = divmod(top, bottom)
    if whole and rest:
        mixed = f"{sign}{whole}\\frac{{{rest}}}{{{bottom}}}" if latex else f"{sign}{whole} {rest}/{bottom}"
        assert parse_number(mixed) == value


PIECES = ["\\boxed{", "}", "{", "\\frac", "####", "Question:", "answer is", "<think>", "</think>"]
PIECES += ["-", "$", "1", ",", ".", "/", " ", "\n", "\u0663", "\x00", "\\"]


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=40).map("".join)),
    st.sampled_from(["stop", "length"]),
)
@example("\\boxed{" * 900 + "1" + "}" * 900, "stop")
@example("\\frac{" * 500, "stop")
@example("1" * 5000, "stop")
@example("\\boxed{" + "1" * 5000 + "}", "stop")
def test_never_raises(text, reason):
    result = score(item(), text, reason)
    assert result.outcome in ("correct", "wrong", "unparsed", "truncated")
    assert (result.parsed is None) == (result.outcome in ("unparsed", "truncated"))
    if result.parsed is not None:
        Fraction(result.parsed)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "unit", [*PIECES, "1,", "1 ", "1/", "\\frac{", "Question ", "\\boxed{1}", "a.", "\\text ", "^2"]
)
def test_a_long_hostile_text_is_scored(unit):
    """A pattern quadratic in the text would not come back from these."""
    assert score(item(), (unit * 100_000)[:100_000], "stop").outcome != "correct"
