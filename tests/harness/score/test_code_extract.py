from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.score import Run, SandboxError, score, score_code
from harness.score.code import extract

CODE = "def f(x):\n    return x"
ITEM = SimpleNamespace(
    id="c1", task="code", reference={"entry_point": "f", "prelude": "import math\n", "tests": ["assert f(2) == 2"]}
)


def fenced(code=CODE, language="python", fence="```"):
    return f"{fence}{language}\n{code}\n{fence}"


CASES = [
    ("plain", fenced(), CODE),
    ("no language", fenced(language=""), CODE),
    ("py", fenced(language="Py"), CODE),
    ("text around", f"Here:\n\n{fenced()}\n\nDone.", CODE),
    ("last of two", f"{fenced('a = 1')}\nBetter:\n{fenced()}", CODE),
    ("CRLF", fenced().replace("\n", "\r\n"), CODE),
    ("stray closing fence after", fenced() + "\n```", CODE),
    ("stray closing fence before", "```\n\n" + fenced(), CODE),
    ("a second fence never closed", f"{fenced()}\n```python\ndef g(", CODE),
    ("output shown after", f"{fenced()}\nIt prints:\n{fenced('2', 'text')}", CODE),
    ("empty fence after", f"{fenced()}\n```python\n```", CODE),
    ("tildes", fenced(fence="~~~"), CODE),
    ("longer fence holds a shorter", fenced('s = """\n```\n"""', fence="````"), 's = """\n```\n"""'),
    ("indented by a list", "1. code:\n   ```python\n" + CODE + "\n   ```", CODE),
    ("words after the language", "```python title=f.py\n" + CODE + "\n```", CODE),
    ("backquotes in a line", fenced("x = '```'"), "x = '```'"),
    ("no fence", CODE, None),
    ("opened only", "```python\n" + CODE, None),
    ("closed only", CODE + "\n```", None),
    ("another language", fenced(language="bash"), None),
    ("empty", "```python\n\n```", None),
]


@pytest.mark.parametrize(("text", "expected"), [(t, e) for _, t, e in CASES], ids=[n for n, _, _ in CASES])
def test_extract(text, expected):
    assert extract(text) == (None if expected is None else expected + "\n")


class Recorder:
    def __init__(self, passed=True):
        self.calls, self.passed = [], passed

    def __call__(self, source, tests, *, entry_point, prelude="", limits=None):
        self.calls.append((source, list(tests), entry_point, prelude))
        return Run(self.passed, "" if self.passed else "AssertionError", ())


@pytest.mark.parametrize(
    ("text", "reason", "outcome"),
    [
        (f"<think>\n{fenced('draft = 1')}\n</think>\n{fenced()}", "stop", "correct"),
        (fenced(), {"type": "stop", "matched": 5}, "correct"),
        (fenced() + "\nThis functi", "length", "correct"),
        (f"<think>\n{fenced()}\n</think>\nI cannot.", "stop", "unparsed"),
        (CODE, "stop", "unparsed"),
        ("", "stop", "unparsed"),
        (f"<think>\n{fenced()}", "length", "truncated"),
        (f"<think>\n{fenced()}", "stop", "truncated"),
        ("```python\n" + CODE, "length", "truncated"),
    ],
)
def test_outcome(text, reason, outcome):
    runner = Recorder()
    result = score_code(ITEM, text, reason, runner=runner)
    assert result.outcome == outcome
    assert runner.calls == ([(CODE + "\n", ["assert f(2) == 2"], "f", "import math\n")] if outcome == "correct" else [])
    assert result.parsed == (CODE + "\n" if outcome == "correct" else None)


def test_a_failed_test_is_wrong_and_says_why():
    result = score_code(ITEM, fenced(), "stop", runner=Recorder(passed=False))
    assert (result.outcome, result.rule) == ("wrong", "AssertionError")


def test_a_failed_sandbox_is_no_outcome():
    def runner(*args, **kwargs):
        raise SandboxError("no container")

    with pytest.raises(SandboxError, match="no container"):
        score_code(ITEM, fenced(), "stop", runner=runner)


def test_score_dispatches_by_task():
    assert score(ITEM, "no code", "stop").outcome == "unparsed"
    assert score(SimpleNamespace(id="m", task="math", reference="3"), "\\boxed{3}", "stop").outcome == "correct"
    with pytest.raises(ValueError, match="task of x: expected math or code, found 'chess'"):
        score(SimpleNamespace(id="x", task="chess", reference="3"), "", "stop")
    with pytest.raises(ValueError, match="finish_reason"):
        score(ITEM, fenced(), "abort")


PIECES = ["```", "```python", "~~~", "````", "\n", "\r\n", " ", "x = 1", "<think>", "</think>", "\x00", "\ud800"]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=30).map("".join)),
    st.sampled_from(["stop", "length"]),
)
def test_never_raises(text, reason):
    assert score_code(ITEM, text, reason, runner=Recorder()).outcome in ("correct", "unparsed", "truncated")


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.text(alphabet="abc =()'\"#\\.", max_size=20), min_size=1, max_size=6), st.sampled_from(["\n", "\r\n"])
)
def test_a_fenced_code_comes_back(lines, newline):
    code = "\n".join(["x = 1", *lines])
    assert extract(f"Text\n\n{fenced(code)}\n\nText".replace("\n", newline)) == code + "\n"
