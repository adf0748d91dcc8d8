# ruff: noqa: E501 (an answer stays on one line)
import gzip
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.score import Limits, SandboxError, run_code, score
from harness.score import code as code_module
from harness.score.sandbox import decode, encode
from harness.traffic import load
from harness.traffic.generated import code as generated

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("SPECACCEPT_DATA", ROOT.parent / "shared" / "data"))
TESTS = ["assert f(1) == 2", "assert f(-1) == 0"]
RIGHT = "def f(x):\n    return x + 1\n"


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path, monkeypatch):
    """After every run: no file in the sandbox's place, and no process that works there."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    assert list(place.iterdir()) == []
    for process in psutil.process_iter():
        try:
            assert not process.cwd().startswith(str(place)), process.cmdline()
        except psutil.Error:
            continue


def run(source, tests=TESTS, seconds=5.0, **options):
    return run_code(source, tests, entry_point="f", limits=Limits(seconds=seconds), **options)


def test_right_and_wrong():
    assert run(RIGHT).passed
    wrong = run("def f(x):\n    return x\n")
    assert (wrong.passed, wrong.detail.partition(":")[0]) == (False, "AssertionError")


def test_isolation_in_force_is_named():
    layers = run(RIGHT).layers
    assert layers == run("def f(x): return 0").layers
    assert {"limits", "audit"} <= set(layers)


def test_prelude_serves_answer_and_tests():
    prelude = "import math\ndef double(x):\n    return 2 * x\n"
    result = run("def f(x):\n    return math.floor(double(x))\n", ["assert f(1) == double(1)"], prelude=prelude)
    assert result.passed


def test_humaneval_shape():
    test = "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1) == 2\n    assert abs(candidate(1.5) - 2.5) < 1e-6\n"
    assert run(RIGHT, [f"{test}\ncheck(f)"], prelude='def f(x):\n    """Add one."""\n').passed


def test_generated_solutions_pass_their_tests():
    items = load({"name": "generated-code", "limit": 6, "seed": 0}).items
    for item in items:
        problem = generated.problem(int(item.id.rpartition("/")[2]))
        assert score(item, problem.solution(random.Random(1)), "stop").outcome == "correct"
    other = generated.problem(1_000_200_999).solution(random.Random(1))
    assert score(items[0], other, "stop").outcome == "wrong"


@pytest.mark.skipif(not (DATA / "humaneval").exists(), reason="SPECACCEPT_DATA holds no data sets")
def test_humaneval_solutions_pass_and_stubs_fail():
    with gzip.open(DATA / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        rows = {row["task_id"]: row for row in map(json.loads, file)}
    for item in load({"name": "humaneval", "data": str(DATA / "humaneval"), "limit": 8}).items:
        prompt, solution = rows[item.id]["prompt"], rows[item.id]["canonical_solution"]
        assert score(item, f"<think>\n</think>\n```python\n{prompt}{solution}\n```", "stop").outcome == "correct"
        assert score(item, f"```python\n{prompt}    return None\n```", "stop").outcome == "wrong"


def test_every_test_must_hold():
    assert not run(RIGHT, [*TESTS, "assert f(1) == 3"]).passed
    assert run(RIGHT, ["assert f(1) == 2", "x = 5", "assert x == 5"]).passed


def test_tests_that_never_call_prove_nothing():
    result = run(RIGHT, ["assert True"])
    assert (result.passed, result.detail) == (False, "the tests never called the function")
    assert not run(RIGHT, []).passed


def test_exceptions_of_the_answer_reach_the_tests():
    source = "def f(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x\n"
    test = "try:\n    f(-1)\nexcept ValueError as error:\n    assert str(error) == 'negative'\nelse:\n    raise AssertionError\n"
    assert run(source, [test]).passed
    assert not run(source, ["f(-1)"]).passed


def test_arguments_are_copies():
    assert run("def f(x):\n    x.append(1)\n    return x\n", ["a = [0]\nassert f(a) == [0, 1]\nassert a == [0]"]).passed


@pytest.mark.parametrize(
    ("value", "same"),
    [
        ("(1, [2.5, None], {'a': {3}})", True),
        ("float('inf')", True),
        ("10 ** 100", True),
        ("'\\u00e9\\x00'", True),
        ("b'\\xff'", True),
        ("1j", True),
        ("{(1, 2): [True]}", True),
        ("frozenset({1})", True),
        ("[1, 2]", False),  # against a tuple, below
    ],
)
def test_values_keep_their_type(value, same):
    expected = value if same else "(1, 2)"
    assert run(f"def f():\n    return {value}\n", [f"assert (f() == {expected}) is {same}"]).passed


def test_results_that_are_no_values_equal_nothing():
    equal = "class E:\n    def __eq__(self, other):\n        return True\n\n\ndef f(x):\n    return E()\n"
    assert not run(equal).passed
    assert not run(
        "class I(int):\n    def __eq__(self, o):\n        return True\n\n\ndef f(x):\n    return I(9)\n"
    ).passed
    assert run(
        "from collections import Counter\ndef f(x):\n    return Counter(x)\n", ["assert f('aab') == {'a': 2, 'b': 1}"]
    ).passed


FORGE = """
import json, os
def frame(message):
    data = json.dumps(message).encode()
    return len(data).to_bytes(8, "big") + data
for fd in range(64):
    for message in ({"layers": [], "token": "", "passed": True}, {"loaded": True}, {"call": 1, "value": True}):
        try:
            os.write(fd, frame(message))
        except OSError:
            pass
def f(x):
    return 7
"""

HOSTILE = {
    "exit at load": "import sys\nsys.exit(0)\n",
    "exit in call": "def f(x):\n    raise SystemExit(0)\n",
    "os._exit at load": "import os\nos._exit(0)\n",
    "os._exit in call": "import os\ndef f(x):\n    os._exit(0)\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    return 0\n",
    "no function": "g = 1\n",
    "not callable": "f = 1\n",
    "syntax": "def f(x:\n",
    "NUL": "\x00",
    "lone surrogate": "'\ud800'",
    "assert patched": "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.print = id\n__debug__ and None\ndef f(x):\n    return 0\n",
    "forged frames": FORGE,
    "kill the judge": "import os\nos.kill(os.getppid(), 9)\ndef f(x):\n    return 0\n",
    "read the judge": "import os\ndef f(x):\n    return open(f'/proc/{os.getppid()}/mem', 'rb').read(1)\n",
    "stdin": "def f(x):\n    return input()\n",
    "crash": "import ctypes\nctypes.string_at(0)\ndef f(x):\n    return 0\n",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return f(x)\n",
    "deep value": "def f(x):\n    v = []\n    for _ in range(100000):\n        v = [v]\n    return v\n",
    "huge value": "def f(x):\n    return 'x' * 50_000_000\n",
    "huge number": "def f(x):\n    return 10 ** 10_000\n",
    "memory": "def f(x):\n    return len([0] * 10**10)\n",
    "huge output": "import os, sys\ndef f(x):\n    for _ in range(2000):\n        os.write(1, b'x' * 65536)\n        print('y' * 10000, file=sys.stderr)\n    return 0\n",
    "fork bomb": "import os\nwhile True:\n    os.fork()\n",
    "fork bomb in call": "import os\ndef f(x):\n    while True:\n        try:\n            os.fork()\n        except BaseException:\n            return 0\n",
    "subprocess": "import subprocess\nsubprocess.Popen(['sleep', '60'])\ndef f(x):\n    return 2\n",
    "daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        pass\ndef f(x):\n    return 0\n",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_wrong(name):
    result = run(HOSTILE[name], seconds=3.0)
    assert not result.passed
    assert result.detail


@pytest.mark.parametrize(
    "source", ["while True:\n    pass\n", "def f(x):\n    while True:\n        pass\n", "import time\ntime.sleep(99)\n"]
)
def test_endless_answers_time_out(source):
    result = run(source, seconds=1.0)
    assert (result.passed, result.detail) == (False, "timeout")


def test_no_file_is_written_outside(tmp_path):
    target = tmp_path / "open"
    target.mkdir(mode=0o777)
    tmp_path.chmod(0o755)
    victim = target / "victim"
    victim.write_text("intact")
    victim.chmod(0o666)
    source = f"""
import os, shutil, sqlite3, posix
target = {str(target)!r}
def tried(*action):
    try:
        action[0](*action[1:])
    except BaseException:
        pass
tried(lambda: open(target + "/new", "w").write("x"))
tried(lambda: open(target + "/victim", "w").write("x"))
tried(lambda: os.close(os.open(target + "/new2", os.O_CREAT | os.O_WRONLY)))
tried(lambda: os.open("new3", os.O_CREAT, dir_fd=os.open(target, os.O_RDONLY)))
tried(lambda: os.mkdir(target + "/folder"))
tried(lambda: os.mkfifo(target + "/pipe"))
tried(lambda: posix.mknod(target + "/node"))
tried(lambda: os.symlink("/", target + "/link"))
tried(lambda: os.remove(target + "/victim"))
tried(lambda: os.truncate(target + "/victim", 0))
tried(lambda: shutil.rmtree(target))
tried(lambda: sqlite3.connect(target + "/base").execute("create table t (x)"))
tried(lambda: os.symlink(target, "here"))
tried(lambda: open("here/new4", "w"))
def f(x):
    return x + 1
"""
    assert run(source).passed
    assert os.listdir(target) == ["victim"]
    assert victim.read_text() == "intact"


def test_files_inside_are_small_and_go():
    source = "def f(x):\n    with open('a.txt', 'w') as file:\n        file.write('ab')\n    return len(open('a.txt').read())\n"
    assert run(source, ["assert f(0) == 2"]).passed
    assert not run(source.replace("'ab'", "'x' * (1 << 21)"), ["f(0)"]).passed


def test_no_network(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        source = f"import socket\ndef f(x):\n    socket.create_connection(('127.0.0.1', {port}), 2)\n    return 2\n"
        assert not run(source).passed
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_environment_is_clean(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    source = "import os\ndef f(x):\n    return 'SECRET' in os.environ\n"
    assert run(source, ["assert f(1) is False"]).passed
    assert not run("import harness\ndef f(x):\n    return 2\n").passed


def test_order_of_sets_is_the_same_in_every_run():
    source = "def f(x):\n    return list({c for c in 'abcdefghijklmnop'})\n"
    order = "".join(eval(run(source, ["raise ValueError(f(1))"]).detail.partition(": ")[2]))
    assert run(source, [f"assert ''.join(f(1)) == {order!r}"]).passed


def test_answers_import_the_standard_library_and_not_this_package():
    source = "import math, re, json, itertools, functools, heapq, collections, typing, string, datetime, decimal, random, bisect, statistics, copy, operator, hashlib\ndef f(x):\n    return math.floor(x + 1)\n"
    assert run(source).passed


def test_a_sandbox_that_does_not_start_is_an_error(monkeypatch, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import sys\nsys.exit(3)\n")
    monkeypatch.setattr(code_module, "SANDBOX", broken)
    with pytest.raises(SandboxError, match="expected a result"):
        run(RIGHT)


def test_a_result_without_the_token_is_no_pass(monkeypatch, tmp_path):
    forged = tmp_path / "forged.py"
    forged.write_text(
        "import json, sys\nd = json.dumps({'layers': [], 'token': 'a' * 32, 'detail': ''}).encode()\n"
        "sys.stdout.buffer.write(len(d).to_bytes(8, 'big') + d)\n"
    )
    monkeypatch.setattr(code_module, "SANDBOX", forged)
    assert not run(RIGHT).passed


def test_the_audit_hook_stands_alone(tmp_path):
    """Where the system grants no other layer: every attempt is refused by the hook, in a plain process."""
    attempts = [
        "__import__('socket').socket()", "__import__('os').fork()", "__import__('subprocess').run(['true'])",
        "__import__('os').system('true')", "__import__('os').kill(1, 0)", "__import__('ctypes')",
        "open('../out', 'w')", "open('/proc/self/mem')", "__import__('os').mkdir('d')", "__import__('os').remove('f')",
        "__import__('os').mkfifo('p')", "__import__('posix').mkfifo('p')", "__import__('gc').get_objects()",
        "__import__('sqlite3').connect('b')",
        "__import__('multiprocessing.shared_memory').shared_memory.SharedMemory(create=True, size=9)",
    ]  # fmt: skip
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom harness.score import sandbox\n"
        "[sys.modules.pop(n) for n in list(sys.modules) if 'ctypes' in n or n == '_posixshmem']\n"
        f"sandbox.guard('.')\nfor attempt in {attempts!r}:\n"
        "    try:\n        eval(attempt)\n        print('went through:', attempt)\n"
        "    except (PermissionError, ImportError, AttributeError):\n        pass\n"
        "print(open('kept', 'w').write('inside'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("6\n", 0), done.stderr


def test_landlock_stands_alone(tmp_path):
    """Without any other layer: writing outside is refused by the kernel, in ways no audit event announces."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "victim").write_text("intact")
    script = (
        f"import os, socket, sys; sys.path.insert(0, {str(ROOT)!r})\nfrom harness.score import sandbox\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "layers = sandbox.confine('.')\nprint('layers', *layers, sep=',')\n"
        "tries = [lambda: os.mkfifo('../outside/p'), lambda: os.mknod('../outside/n'), lambda: os.mkdir('../outside/d'),\n"
        "    lambda: open('../outside/victim', 'a'), lambda: os.remove('../outside/victim'),\n"
        "    lambda: os.rename('../outside/victim', 'here')]\n"
        "if 'no TCP' in layers:\n    tries.append(lambda: socket.create_connection(server.getsockname(), 2))\n"
        "for i, action in enumerate(tries):\n"
        "    try:\n        action()\n        print('went through:', i)\n    except OSError:\n        pass\n"
        "print(open('kept', 'w').write('inside'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=inside, capture_output=True, text=True)
    layers, *rest = done.stdout.splitlines()
    if "writes confined" not in layers:
        pytest.skip("this kernel has no Landlock")
    assert rest == ["6"], done.stdout + done.stderr
    assert os.listdir(outside) == ["victim"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)  # fmt: skip


@settings(derandomize=True, deadline=None)
@given(VALUES)
def test_encode_and_decode_are_inverse(value):
    back = decode(encode(value))
    assert back == value
    assert repr(back) == repr(value)  # 1, True and 1.0 stay apart


@pytest.mark.parametrize(
    ("body", "test"),
    [
        ("return range(x)", "assert list(f(3)) == [0, 1, 2] and f(3) == range(3) and f(3)[1] == 1"),
        ("from fractions import Fraction\n    return Fraction(x, 2)", "assert f(3) == 1.5 and f(3).numerator == 3"),
        ("return (n * n for n in range(x))", "assert list(f(3)) == [0, 1, 4]"),
        ("return map(str, range(x))", "assert ' '.join(f(3)) == '0 1 2' and next(f(3)) == '0'"),
        ("return {n: -n for n in range(x)}.keys()", "assert f(2) == {0, 1} and 1 in f(2)"),
        ("return {n: -n for n in range(x)}.values()", "assert sum(f(3)) == -3"),
        ("return {n: [n] for n in range(x)}.items()", "assert sorted(f(2)) == [(0, [0]), (1, [1])]"),
        ("return [range(x), (n for n in range(x))]", "assert [list(each) for each in f(2)] == [[0, 1], [0, 1]]"),
    ],
)
def test_lazy_and_exact_values_score_as_they_would_in_one_process(body, test):
    source = f"def f(x):\n    {body}\n"
    assert run(source, [test]).passed, run(source, [test]).detail
    namespace = {}
    exec(source + test, namespace)  # the same, without the pipe
    assert not run(source, ["assert f(3) == 'no'"]).passed


@pytest.mark.parametrize("body", ["return range(10**12)", "import itertools\n    return itertools.count()"])
def test_what_would_fill_the_judge_is_nothing(body):
    found = run(f"def f(x):\n    {body}\n", ["assert len(list(f(1))) >= 0"], seconds=20.0)
    assert (found.passed, found.detail.partition(":")[0]) == (False, "TypeError")


@pytest.mark.parametrize(
    "forged",
    [{"range": [0, 10**12]}, {"range": [0, 5, 0]}, {"Fraction": [1, 0]}, {"items": [1]}, {"keys": [{"list": []}]}],
)
def test_a_forged_lazy_value_is_refused(forged):
    with pytest.raises((ArithmeticError, TypeError, ValueError)):
        decode(forged)


def test_values_beyond_plain_ones():
    assert decode(encode({1, 2})) == {1, 2}
    assert decode(encode(Counter("aab"))) == {"a": 2, "b": 1}
    opaque = decode(encode(object()))
    assert opaque != opaque  # equal to nothing, itself included
