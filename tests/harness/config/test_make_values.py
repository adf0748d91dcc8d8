"""Values on make's command line reach the harness as they were written."""

import os
import subprocess

import pytest

from harness.config import ROOT, load


@pytest.fixture
def arguments(tmp_path):
    """What the Python of an installed environment is called with, an argument each."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nfor each; do printf '%s\\0' \"$each\"; done\n")
    python.chmod(0o755)
    (tmp_path / ".installed").touch()  # newer than the lock: nothing is installed

    def run(*words: str) -> list[str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "--no-print-directory", *words, f"VENV={tmp_path}"]
        done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split("\0")[:-1]

    return run


@pytest.mark.parametrize(
    "value", ["/tmp/it's here", '/tmp/a "b"', "/a;b&c|d", "/a,b(c)", "/a`b`", "/$HOME/$(x)", "/é*"]
)
def test_a_value_is_text(arguments, value):
    make = value.replace("$", "$$")  # make's own way of writing a dollar
    asked = arguments("bench", f"DATA={make}", "TRAFFIC=gsm8k", "ARGS=policy.budget=4 limit=3")
    expected = ["-m", "harness", "task=bench", "traffic=gsm8k", f"data={value}", "policy.budget=4", "limit=3"]
    assert asked in (expected, [each.replace("$", "$$") for each in expected])


@pytest.mark.parametrize(
    ("value", "listed"),
    [
        ("strict,asd-b0", "strict,asd-b0"),
        ("[strict,asd-b0]", "strict,asd-b0"),
        ("unarmed, strict, asd", "unarmed, strict, asd"),
    ],
)
def test_arms_are_a_list(arguments, value, listed):
    words = arguments("bench", f"ARMS={value}", "LIMIT=3", "ARGS=task.aa=true")
    assert words == ["-m", "harness", "task=bench", f"arms=[{listed}]", "limit=3", "task.aa=true"]


def test_a_list_that_make_passes_on_is_read_as_one(arguments):
    (override,) = [word for word in arguments("bench", "ARMS=strict, asd-b0, asd") if word.startswith("arms")]
    assert load([override]).arms == ["strict", "asd-b0", "asd"]


def test_an_image_is_one_argument(arguments):
    assert arguments("images", "IMAGE=it's")[-2:] == ["build", "it's"]
