"""The client's transport against servers that behave in every way a socket can, and the load bench against its mock."""

import re
import socket
import threading

import pytest

from harness.engines.transport import Transport, TransportError
from harness.load.__main__ import TOKENS, beside, judged, mock, own, tps, truth
from harness.load.mock import service_s

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Script:
    """A server that answers each request, of whatever connection, with the next part of a script.

    A part is bytes to send; None at its end closes the connection then.
    """

    def __init__(self, *parts: tuple[bytes | None, ...]) -> None:
        self.parts = list(parts)
        self.connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.closed = threading.Event()
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                channel, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            with channel:
                self.serve(channel)
            self.closed.set()

    def serve(self, channel: socket.socket) -> None:
        received = b""
        while piece := channel.recv(65536):
            received += piece
            head, found, body = received.partition(b"\r\n\r\n")
            told = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            if not found or len(body) < int(told.group(1) if told else 0):
                continue
            received = b""
            for piece in self.parts.pop(0):
                if piece is None:
                    return
                channel.sendall(piece)


@pytest.fixture
def serve():
    started = []

    def start(*parts):
        script = Script(*parts)
        transport = Transport(script.url)
        started.append((script, transport))
        return script, transport

    yield start
    for script, transport in started:
        transport.close()
        script.listener.close()


def test_a_connection_is_used_again(serve):
    script, transport = serve((OK,), (OK,), (OK,))
    assert [transport.send("GET", "/", None, 5) for _ in range(3)] == [(200, b"ok")] * 3
    assert script.connections == 1


def test_a_connection_that_the_server_closed_is_not(serve):
    script, transport = serve((OK, None), (OK,))
    assert transport.send("GET", "/", None, 5) == (200, b"ok")
    assert script.closed.wait(5)
    assert transport.send("GET", "/", None, 5) == (200, b"ok")
    assert script.connections == 2


def test_nothing_is_sent_twice(serve):
    script, transport = serve((None,), (OK,))
    with pytest.raises(TransportError, match="RemoteDisconnected"):
        transport.send("POST", "/", b"{}", 5)
    assert len(script.parts) == 1
    assert transport.send("POST", "/", b"{}", 5) == (200, b"ok")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", None), "IncompleteRead"),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nok", None), "IncompleteRead"),
        ((b"nonsense\r\n\r\n", None), "BadStatusLine"),
        ((b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000, None), "got more than 100 headers"),
    ],
)
def test_half_an_answer_is_an_error(serve, parts, words):
    _, transport = serve(parts, (OK,))
    with pytest.raises(TransportError, match=words):
        transport.send("POST", "/", b"{}", 5)
    assert transport.send("POST", "/", b"{}", 5) == (200, b"ok")


def test_answers_of_every_framing(serve):
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"
    until_the_end = b"HTTP/1.1 200 OK\r\n\r\nok"
    empty = b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n"
    script, transport = serve((chunked,), (empty,), (until_the_end, None), (OK,))
    answers = [transport.send("POST", "/", b"{}", 5) for _ in range(4)]
    assert answers == [(200, b"ok"), (503, b""), (200, b"ok"), (200, b"ok")]
    assert script.connections == 2


def test_the_deadline_is_that_of_the_whole(serve):
    _, transport = serve((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",))
    with pytest.raises(TimeoutError):
        transport.send("POST", "/", b"{}", 0.05)
    with pytest.raises(TimeoutError):
        transport.send("POST", "/", b"{}", 0)


def test_nobody_there():
    with pytest.raises(TransportError, match="ConnectionRefusedError"):
        Transport("http://127.0.0.1:1").send("GET", "/", None, 5)


def test_the_mock_and_the_client_tell_the_same_work():
    with mock() as url:
        found = own(url, 4, 12)
        assert truth(url) == []  # told once
    assert found.concurrency == 4
    assert found.ideal == pytest.approx(4 / (sum(map(service_s, TOKENS)) / len(TOKENS)))
    assert 0 < found.rate <= found.ideal  # no client is faster than its engine
    assert found.tps_error < 0  # the client's window holds the mock's
    assert found.added_s > 0
    assert found.cpu_token_s > 0


def test_rates_are_those_of_the_account():
    seen = [(10.0, 11.0, 30), (10.5, 14.0, 50)]
    assert tps(seen) == 20.0
    told = {"started": 9.0, "ended": 14.0, "answers": 2, "tokens": 80, "wall_s": 5.5, "cpu_s": 0.8}
    found = judged("x", 2, told, seen)
    assert found.rate == 0.4
    assert found.tps_error == pytest.approx(16 / 20 - 1)
    assert found.added_s == pytest.approx(0.5)
    assert found.cpu_token_s == pytest.approx(0.01)


def test_a_client_that_did_other_work_is_refused():
    told = {"started": 0.0, "ended": 1.0, "answers": 1, "tokens": 30, "cpu_s": 0.1}
    with pytest.raises(ValueError, match="the mock gave 2, the client has 1"):
        judged("x", 1, told, [(0.0, 1.0, 30), (0.0, 1.0, 30)])


def test_a_command_that_fails_is_told():
    with mock() as url, pytest.raises(ValueError, match="false: no output"):
        beside("false", url, 1, 3, "tokenizer")
