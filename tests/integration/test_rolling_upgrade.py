"""Three instances are stopped and started one after the other, while clients publish and follow."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest

from sow_client import Client, Record, SowError
from tests.support.servers.server import ServerProcess, free_port, until

SECONDS = 60.0
NAMES = ("a", "b", "c")
TOPICS = '[topics.orders]\nkey = ["/id"]\nexpiration = "enabled"\nretain_time = "1h"\n'


State = dict[str, int]
"""The last number of each key."""


class Publisher:
    """Publishes REPLICATED records at whichever instance serves, and knows which were acknowledged."""

    def __init__(self, servers: str, prefix: str) -> None:
        self.client = Client(servers, failover_publish="again")
        self.acknowledged: dict[str, int] = {}
        self.refused = 0
        self.pause = 0.0
        self._prefix = prefix
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.client.close()

    def _run(self) -> None:
        number, last = 0, time.monotonic()
        while not self._stop.is_set():
            number += 1
            try:
                key = f"{self._prefix}{number % 300}"
                self.client.publish("orders", {"id": key, "n": number}, durability="replicated")
            except SowError:  # it may stand, or not: the next number says more
                self.refused += 1
                continue
            self.acknowledged[key] = number
            now = time.monotonic()
            self.pause, last = max(self.pause, now - last), now


class Follower:
    """Follows all changes, wherever they come from, and keeps the greatest number of each key."""

    def __init__(self, servers: str) -> None:
        self.client = Client(servers)
        self.seen: dict[str, int] = {}
        self.failure: BaseException | None = None
        self._changes = self.client.sow_and_subscribe("orders")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._changes.close()
        self._thread.join()
        self.client.close()

    def _run(self) -> None:
        try:
            for change in self._changes:
                if change.record is not None:
                    row = json.loads(change.record.payload)
                    self.seen[row["id"]] = max(self.seen.get(row["id"], 0), row["n"])
        except BaseException as error:  # the test looks at it
            self.failure = error


@pytest.mark.long
def test_instances_are_upgraded_one_after_the_other_and_nothing_is_lost_or_missed(tmp_path: Path) -> None:
    """P5, R14, F1."""
    rolled(tmp_path)


def rolled(
    folder: Path, *, begins: Callable[[str], object] = lambda servers: None, ends: Callable[[State], object] = len
) -> None:
    """Stops and starts each instance. The other two are told first, by a pause of the link, so no write waits for the
    one that stops. `begins` gets the addresses before the first publish, `ends` the records in the end."""
    ports = {name: free_port() for name in NAMES}
    with ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for name in NAMES:
            text = f'[server]\ninstance = "{name}"\n[replication]\ntoken = "secret"\n{TOPICS}'
            for other, port in ports.items():
                if other != name:
                    text += f'[[replication.peers]]\nname = "{other}"\nmode = "sync"\naddress = "127.0.0.1:{port}"\n'
            servers[name] = ServerProcess(folder / name, text, port=ports[name], start=False)
            stack.enter_context(servers[name])
            servers[name].start()
        clients = {name: stack.enter_context(server.client()) for name, server in servers.items()}
        until(lambda: all(caught_up(client) for client in clients.values()), SECONDS, "the links")
        everywhere = ",".join(server.address for server in servers.values())
        begins(everywhere)
        publishers = [Publisher(everywhere, prefix) for prefix in ("x", "y")]
        followers = [Follower(everywhere) for _ in range(3)]
        view = stack.enter_context(stack.enter_context(Client(everywhere)).live_view("orders"))
        for follower in followers:
            stack.callback(follower.stop)
        for publisher in publishers:
            stack.callback(publisher.stop)
        for name, server in servers.items():
            go_on(publishers)
            others = [client for other, client in clients.items() if other != name]
            for client in others:
                client.pause_peer(name)
            server.terminate()
            go_on(publishers)
            server.start()
            for client in others:
                client.resume_peer(name)
            until(lambda: all(caught_up(client) for client in clients.values()), SECONDS, f"{name} to catch up")
        go_on(publishers)
        for publisher in publishers:
            publisher.stop()
        until(lambda: all(settled(client) for client in clients.values()), SECONDS, "quiet")
        acknowledged = {key: number for one in publishers for key, number in one.acknowledged.items()}
        for client in clients.values():
            state = numbers(client.query("orders"))
            assert all(state[key] >= number for key, number in acknowledged.items()), "an acknowledged write is lost"
        state = numbers(clients["a"].query("orders"))
        until(lambda: all(one.failure or one.seen == state for one in followers), SECONDS, "all followers")
        assert [one.failure for one in followers] == [None, None, None]
        until(lambda: numbers(view.values()) == state, SECONDS, "the view")
        ends(state)
        greatest = max(publisher.pause for publisher in publishers)
        refused = sum(publisher.refused for publisher in publishers)
        print(f"{len(acknowledged)} keys; greatest pause of a publisher {greatest:.2f} s; {refused} calls to repeat")


def numbers(records: Iterable[Record]) -> dict[str, int]:
    return {record.key: json.loads(record.payload)["n"] for record in records}


def go_on(publishers: list[Publisher]) -> None:
    """Awaits more acknowledged records of each."""
    reached = [max(publisher.acknowledged.values(), default=0) for publisher in publishers]

    def further() -> bool:
        now = [max(publisher.acknowledged.values(), default=0) for publisher in publishers]
        return all(after >= before + 50 for before, after in zip(reached, now, strict=True))

    until(further, SECONDS, "publishes")


def caught_up(client: Client) -> bool:
    """Whether all links stream, and the sync peers count."""
    links = safely(lambda: [(link.state, link.mode) for link in client.replication_status().outgoing])
    return links == [("streaming", "sync")] * 2


def settled(client: Client) -> bool:
    return safely(lambda: [link.lag_sequences for link in client.replication_status().outgoing]) == [0, 0]


def safely(look: Callable[[], object]) -> object:
    try:
        return look()
    except SowError:
        return None  # on its way up or down
