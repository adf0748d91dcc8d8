"""The fake engine in a thread of the tests' process: an engine in milliseconds, whose faults change as it runs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import uvicorn
from fake_engine import Fake


class FakeServer:
    """url: to attach to. `become` makes it another engine, whose faults begin after so many answers.

    seen: called with the number of /generate requests so far, before each; what it raises is a status 500.
    """

    def __init__(self, pair: dict[str, str]) -> None:
        self.pair = pair
        self.asked = 0
        self.seen: Callable[[int], None] = lambda number: None
        self.become()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self._serve, log_config=None, lifespan="off", interface="asgi3")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    def become(self, fault: str = "none", after: int = 0) -> None:
        self.fake = Fake(self.pair["target"], self.pair["draft"], fault, after)
        self._app = self.fake.app()

    async def _serve(self, scope, receive, send) -> None:
        if scope["path"] == "/generate":
            self.asked += 1
            self.seen(self.asked)
        await self._app(scope, receive, send)

    def stop(self) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join()
