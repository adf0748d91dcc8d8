"""Code answers in containers: right ones pass, hostile ones are wrong and reach nothing."""

from __future__ import annotations

import base64
import socket
import threading
from pathlib import Path

import container_base as base
import pytest
from docker_rig import owned

from harness.score.code import Limits, SandboxError
from harness.score.container import OUTPUT_BYTES, runner

SHORT = Limits(seconds=2)
TESTS = ["assert f(1) == 2"]


@pytest.fixture(scope="module")
def answers(client):
    with runner(base.name("python")) as run:
        yield run


def score(run, source: str, limits: Limits = SHORT):
    return run(source, TESTS, entry_point="f", limits=limits)


def test_right_and_wrong(answers, nothing_left):
    right = score(answers, "def f(x):\n    return x + 1\n")
    assert right.passed
    assert right.layers[:5] == ("container", "no network", "nobody", "read-only", "limits")
    wrong = score(answers, "def f(x):\n    return x\n")
    assert (wrong.passed, wrong.detail) == (False, "AssertionError: ")


HOSTILE = {
    "fork bomb": "import os\ndef f(x):\n    while True:\n        os.fork()\n",
    "fork bomb at import": "import os\nwhile True:\n    os.fork()\n",
    "file": "def f(x):\n    open('/etc/motd', 'w').write('x')\n    return x + 1\n",
    "socket": "import socket\ndef f(x):\n    socket.create_connection(('{address}', {port}), 1)\n    return x + 1\n",
    "endless loop": "def f(x):\n    while True:\n        pass\n",
    "huge answer": "def f(x):\n    return 'x' * (1 << 29)\n",
    "huge output": "def f(x):\n    while True:\n        print('x' * 65536)\n",
    "memory": "def f(x):\n    kept = [bytearray(1 << 26) for _ in range(1000)]\n    return x + 1\n",
    "disk": "def f(x):\n    open('big', 'wb').write(bytes(1 << 28))\n    return x + 1\n",
    "exit": "import os\ndef f(x):\n    os._exit(0)\n",
    "recursion": "def f(x):\n    return f(x)\n",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_answer_is_wrong_and_leaves_nothing(answers, client, nothing_left, kind):
    source = HOSTILE[kind]
    with Listener() as listener:
        source = source.replace("{address}", listener.address).replace("{port}", str(listener.port))
        result = score(answers, source)
        assert not result.passed
        assert result.detail
        assert listener.calls == 0
    assert owned(client) == []


# The same again without the sandbox's own refusals: what the container alone holds back.
BARE = {
    "fork bomb": """
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        n += 1
except OSError:
    print('held', n < 16, flush=True)
""",
    "file": """
try:
    open('/etc/motd', 'w')
except OSError as error:
    print('held', error.errno == errno.EROFS)
""",
    "network": """
try:
    socket.create_connection(('{address}', {port}), 1)
except OSError:
    print('held', [name for _, name in socket.if_nameindex()] == ['lo'])
""",
    "user": """
try:
    os.setuid(0)
except OSError:
    print('held', os.getuid() == 65534)
""",
    "disk": """
try:
    open('/tmp/big', 'wb').write(bytes(1 << 27))
except OSError as error:
    print('held', error.errno == errno.ENOSPC)
""",
    "memory": """
child = os.fork()
if child == 0:
    kept = [bytearray(1 << 26) for _ in range(64)]
    os._exit(0)
print('held', os.waitpid(child, 0)[1] == 9)
""",
    "mount": """
import ctypes
print('held', ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == -1)
""",
}


@pytest.mark.parametrize("kind", BARE)
def test_the_container_alone_holds_back(answers, client, nothing_left, kind):
    with Listener() as listener:
        source = BARE[kind].replace("{address}", listener.address).replace("{port}", str(listener.port))
        code = f"import base64, errno, os, socket, time; exec(base64.b64decode({base64.b64encode(source.encode())!r}))"
        output, _ = answers.converse(["python3", "-S", "-c", code], b"", Limits(seconds=15, memory_bytes=1 << 28))
        assert output == b"held True\n"
        assert listener.calls == 0
    assert owned(client) == []


def test_output_without_end_is_cut(answers, nothing_left):
    code = "import sys\nwhile True:\n    sys.stdout.write('x' * 65536)"
    output, _ = answers.converse(["python3", "-S", "-c", code], b"", SHORT)
    assert output is not None
    assert OUTPUT_BYTES < len(output) < 64 * OUTPUT_BYTES


def test_a_broken_sandbox_is_no_outcome(client, nothing_left):
    with runner("specaccept-test/none:1") as run, pytest.raises(SandboxError, match="image missing"):
        score(run, "def f(x):\n    return x + 1\n")


def test_the_machine_is_as_it_was(answers, nothing_left):
    """No process of nobody, no file in the places an answer could aim at."""
    before = {path.name for path in Path("/tmp").iterdir()}
    score(answers, "import os\nopen('/tmp/left', 'w').write('x')\ndef f(x):\n    return x + 1\n")
    assert "left" not in {path.name for path in Path("/tmp").iterdir()} - before
    for process in Path("/proc").glob("[0-9]*/status"):
        try:
            status = process.read_text()
        except OSError:
            continue
        if "\nUid:\t65534\t" in status and "\nName:\tpython3" in status:
            raise AssertionError(f"process {process.parent.name} of an answer still lives")


class Listener:
    """A service of this machine that an answer may try to reach, on the address containers see it at."""

    def __enter__(self) -> Listener:
        self.calls = 0
        self.address = "127.0.0.1"
        self._server = socket.create_server((self.address, 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def _serve(self) -> None:
        while True:
            try:
                self._server.accept()[0].close()
            except OSError:
                return
            self.calls += 1

    def __exit__(self, *_) -> None:
        self._server.close()
