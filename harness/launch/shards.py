"""Several replicas as one engine: every item goes to exactly one of them, and their counters add up.

An item's replica is its place modulo their number, the same in every arm: arms are compared on the same GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from harness.engines.base import EngineClient, EngineError, Generation, Request, Server, Snapshot


class ShardedClient:
    """lanes: a client per replica, for whoever asks them side by side. A single request goes to the first."""

    def __init__(self, lanes: Sequence[EngineClient]) -> None:
        self.lanes = list(lanes)
        self.url = ", ".join(lane.url for lane in lanes)

    def generate(self, request: Request) -> Generation:
        return self.lanes[0].generate(request)

    def generate_many(self, requests: Sequence[Request]) -> list[Generation]:
        """Request i on replica i modulo their number, the replicas side by side; answers in order."""
        count = len(self.lanes)
        with ThreadPoolExecutor(count) as pool:
            parts = [pool.submit(lane.generate_many, requests[k::count]) for k, lane in enumerate(self.lanes)]
            answers = [part.result() for part in parts]
        return [answers[i % count][i // count] for i in range(len(requests))]

    def server(self) -> Server:
        """Of the first, with the counters of all. Raises EngineError where one is not like the others."""
        servers = [lane.server() for lane in self.lanes]
        snapshots = [server.snapshot for server in servers if server.snapshot is not None]
        if not snapshots:
            return servers[0]
        for index, server in enumerate(servers):
            same = server.snapshot is not None and server.snapshot.identity == snapshots[0].identity
            if not same or server.version != servers[0].version:
                raise EngineError("identity", f"replica {index}: expected the adapter and engine of replica 0")
        counters = merge([snapshot.counters for snapshot in snapshots])
        return replace(servers[0], snapshot=Snapshot(snapshots[0].raw | {"counters": counters}))

    def healthy(self) -> bool:
        return all(lane.healthy() for lane in self.lanes)

    def flush(self) -> None:
        for lane in self.lanes:
            lane.flush()

    def close(self) -> None:
        """The lanes belong to whoever opened them."""


def lanes(client: EngineClient) -> list[EngineClient]:
    """The replicas behind a client: itself where it is one."""
    return list(getattr(client, "lanes", [client]))


def merge(counters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sum, leaf by leaf: counters are numbers in nested objects."""
    total: dict[str, Any] = {}
    for each in counters:
        for name, value in each.items():
            if isinstance(value, dict):
                total[name] = merge([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total
