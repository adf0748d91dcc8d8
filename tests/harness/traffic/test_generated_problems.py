"""Generated problems: right by construction, reproducible, many wordings, splits that share nothing."""

import re
from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest

from harness.traffic.generated import SPLITS, code, math, phrase, split, split_of

TEST = SPLITS["test"].start


def figure(expression: str) -> Fraction:
    """Value of a written expression: whole numbers, + - * / %, `of`. Left to right, * and / before + and -."""
    terms, sign, product, operator = Fraction(0), 1, None, "*"
    for token in re.findall(r"\d+|%|of|[-+*/]", expression):
        if token in "+-":
            terms, sign, product, operator = terms + sign * (product or 0), 1 if token == "+" else -1, None, "*"
        elif token == "%":
            product = (product or 0) / 100
        elif token in ("*", "of"):
            operator = "*"
        elif token == "/":
            operator = "/"
        else:
            number = Fraction(token)
            product = number if product is None else product * number if operator == "*" else product / number
    return terms + sign * (product or 0)


def test_written_expressions_are_read_as_meant() -> None:
    assert figure("3 + 4 * 5") == 23
    assert figure("20% of 50") == 10
    assert figure("2/3 of 12 - 1") == 7
    assert figure("84 / 4") == 21


@pytest.mark.parametrize("seed", [0, TEST])
def test_every_stated_step_of_a_math_solution_holds(seed: int) -> None:
    for at in range(seed, seed + 400):
        made = math.problem(at)
        assert math.MIN_STEPS <= len(made.steps) <= math.MAX_STEPS
        for step in made.steps:
            assert all(figure(form) == step.value for form in step.forms), step
        text = made.solution(Random(at))
        stated = re.findall(r"([\d/%*+\- of]*\d) = (\d+)", text)
        assert len(stated) == len(made.steps)
        for left, right in stated:
            expression = re.search(r"\d+(?:%| / 100|/\d+)?(?:(?: of | [-+*/] )\d+)+$", left)
            assert expression is not None, left
            assert figure(expression.group()) == int(right), text
        boxed = re.findall(r"\\boxed\{(.*?)\}", text)
        assert boxed == [made.answer] == [str(made.steps[-1].value)]


@pytest.mark.parametrize("seed", [0, TEST])
def test_every_code_solution_passes_its_tests_whatever_its_wording(seed: int) -> None:
    for at in range(seed, seed + 300):
        made = code.problem(at)
        mix = code.MIXES["test" if seed == TEST else "train"]
        assert mix.shortest <= len(made.steps) <= mix.longest
        for wording in range(3):
            text = made.solution(Random(wording))
            thinking, _, answer = text.removeprefix("<think>\n").partition("\n</think>\n\n")
            assert text.startswith("<think>\n")
            assert thinking
            function = re.search(r"```python\n(.*)\n```$", answer, re.S)
            assert function is not None
            scope: dict[str, object] = {}
            exec(function.group(1), scope)
            assert callable(scope[made.entry_point])
            for line in made.tests:
                exec(line, scope)


def test_a_wrong_function_fails_the_tests() -> None:
    made = code.problem(TEST)
    scope: dict[str, object] = {made.entry_point: lambda value: "nothing of the kind"}
    with pytest.raises(AssertionError):
        exec("\n".join(made.tests), scope)


def test_worded_parameters_give_the_parameter() -> None:
    worded = [step for seed in range(400) for step in code.problem(seed).steps if step.sum]
    assert len(worded) > 100
    assert all(figure(step.sum) == step.parameter for step in worded)


@pytest.mark.parametrize("module", [math, code])
def test_a_seed_is_a_problem(module) -> None:
    assert module.problem(17) == module.problem(17)
    assert module.problem(17).solution(Random(1)) == module.problem(17).solution(Random(1))
    assert module.problem(17).prompt != module.problem(18).prompt


@pytest.mark.parametrize("module", [math, code])
def test_splits_share_no_problem(module) -> None:
    counts = {"train": 3000, "calibration": 150, "warmup": 150, "test": 300}
    texts: dict[str, str] = {}
    novelties: dict[str, set[str]] = {}
    for name, count in counts.items():
        first = split(name).start
        for seed in range(first, first + count):
            assert split_of(seed) == name
            made = module.problem(seed)
            novelties.setdefault(name, set()).add(made.novelty)
            if texts.setdefault(made.prompt, name) != name:
                pytest.fail(f"{made.prompt!r} is in {name} and in {texts[made.prompt]}")
    names = list(counts)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not novelties[one] & novelties[other]


def test_split_ranges_are_disjoint_and_named() -> None:
    ranges = sorted(SPLITS.values(), key=lambda r: r.start)
    assert all(a.stop <= b.start for a, b in pairwise(ranges))
    with pytest.raises(ValueError, match="split: expected one of train"):
        split("dev")
    with pytest.raises(ValueError, match="seed: expected"):
        math.problem(-1)


@pytest.mark.parametrize("module", [math, code])
def test_one_problem_has_many_right_tellings(module) -> None:
    for seed in range(20):
        made = module.problem(seed)
        assert len({made.solution(Random(i)) for i in range(40)}) > 30


def test_templates() -> None:
    rng = Random(0)
    seen = {phrase("[a|b[c|]] {n}|z", rng, {"n": 3}) for _ in range(200)}
    assert seen == {"a 3", "bc 3", "b 3", "z"}
    with pytest.raises(ValueError, match="unbalanced"):
        phrase("[a|b", rng, {})
