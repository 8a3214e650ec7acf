"""Clients go on by themselves when the server ends their calls because access has changed (rule A6), or because their
connection is old: nothing is lost, and nothing is repeated where a client promises that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

from sow_client import Client, _channel
from tests.support.oracles.access import GUARDED, client_of, grant, identity, peer, write_access
from tests.support.servers.open_streams import BIG_RECORDS, SLOW_READER, prepare
from tests.support.servers.server import ServerProcess, reason_of, until

ALL: Final = "read consume publish delete create load topic-admin"
FILE: Final = identity("desk", "desk") + grant("desk", ".*", ALL)
CHANGES: Final = 6
EACH: Final = 40
"""Records that are published between two changes of access."""


class Guarded:
    """A server whose access file changes, in a way that matters to nobody's work."""

    def __init__(self, folder: Path, root: Client) -> None:
        self.folder = folder
        self.root = root
        self._number = 0

    def streams(self) -> int:
        """The calls of desk that last."""
        return sum(sum(session.calls.values()) for session in self.root.sessions() if session.identity == "desk")

    def change(self, streams: int, busy: Callable[[], None] = lambda: None) -> None:
        """Changes the rights of desk while it has so many streams, which this ends. `busy` keeps them open: a publisher
        with nothing to send opens none, so a change that has met one as it ended once waited in vain for the next."""

        def open_now() -> bool:
            busy()
            return self.streams() >= streams

        def ended() -> bool:
            # Some of those that are counted may be ending, of the change before.
            until(open_now, 30, f"{streams} calls of desk")
            self._number += 1
            write_access(self.folder, FILE + grant("desk", f"unused-{self._number}", "read"))
            return self.root.reload_access()[1] == streams

        until(ended, 30, f"{streams} streams of desk at a time")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Guarded]]:
    folder = tmp_path_factory.mktemp("clients")
    write_access(folder, FILE)
    with ServerProcess(folder, GUARDED) as server, client_of(server, "root") as root:
        prepare(root)
        yield server, Guarded(folder, root)
        assert not server.faults()


@pytest.fixture
def guarded(made: tuple[ServerProcess, Guarded]) -> Guarded:
    return made[1]


@pytest.fixture
def desk(made: tuple[ServerProcess, Guarded], monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A client that takes no more than the test reads."""
    usual = _channel.options
    monkeypatch.setattr(_channel, "options", lambda server, tls, **named: (*usual(server, tls, **named), *SLOW_READER))
    with client_of(made[0], "desk") as client:
        yield client


class Collector(threading.Thread):
    """Collects numbers up to the last one."""

    def __init__(self, numbers: Iterable[int], last: int) -> None:
        super().__init__(daemon=True)
        self.found: list[int] = []
        self._numbers = numbers
        self._last = last
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for number in self._numbers:
                self.found.append(number)
                if number == self._last:
                    return
        except BaseException as failure:
            self._failure = failure
            raise

    def check(self) -> None:
        """Fails if it has failed."""
        assert self._failure is None, f"after {len(self.found)} numbers: {self._failure!r}"

    def end(self) -> list[int]:
        """Awaits the last number; returns all."""
        self.join(30)
        self.check()
        assert not self.is_alive(), f"{self._last} has not come; {len(self.found)} others have"
        return self.found


def test_publishers_subscribers_and_durables_go_on(guarded: Guarded, desk: Client) -> None:
    guarded.root.create_topic("numbers", key=["/id"])
    last = CHANGES * EACH - 1

    def subscribed() -> Iterator[int]:
        with desk.subscribe("numbers", start="earliest") as changes:
            for change in changes:
                assert change.record is not None
                yield int(change.record.key)

    def consumed() -> Iterator[int]:
        with desk.durable("numbers", "durable", start="earliest") as changes:
            for change in changes:
                assert change.record is not None
                yield int(change.record.key)
                changes.acknowledge(change)

    live, durable = Collector(subscribed(), last), Collector(consumed(), last)
    with desk.publisher("numbers", publisher_id="numbers", batch_records=7) as publisher:
        for number in range(last + 1):
            publisher.publish({"id": number})
            if number % EACH == EACH // 2:
                guarded.change(streams=3, busy=lambda: publisher.remove(data={"id": -1}))
    assert live.end() == list(range(last + 1)), "each once, in order"
    assert list(dict.fromkeys(durable.end())) == list(range(last + 1)), "a durable may repeat unacknowledged entries"
    assert guarded.root.count("numbers") == last + 1
    assert publisher.refused == 0


def test_a_snapshot_is_taken_anew_when_rights_change(guarded: Guarded, desk: Client) -> None:
    """Rows that the subscriber holds may be hidden from now on, and only a new snapshot tells which."""
    with desk.sow_and_subscribe("orders") as changes:
        snapshots = 0
        for change in changes:
            if change.op == "snapshot_end":
                snapshots += 1
                if snapshots == 3:
                    return
                guarded.change(streams=1)


def test_a_reader_of_an_export_goes_on(guarded: Guarded, desk: Client) -> None:
    """Story: ACCESS_CHANGED was an error to it, although errors.md says that the clients call again."""
    export = desk.open_export("big", parts=1)
    keys: list[bytes] = []
    for batch in desk.read_export(export.id, 0, columns=("key", "payload"), batch_size=1):
        keys.append(batch.keys)
        if len(keys) in (1, 5):
            guarded.change(streams=1)
    assert sorted(map(int, keys)) == list(range(BIG_RECORDS))


def test_a_stager_of_a_load_goes_on(guarded: Guarded, desk: Client) -> None:
    load = desk.open_load("loaded")
    with desk.stage_load(load.id, 0, 1) as stager:
        for number in range(CHANGES * EACH):
            stager.stage([b'{"id":%d}' % number])
            if number % EACH == EACH // 2:
                stager.flush()
                guarded.change(streams=1)
    for _ in desk.commit_load(load.id, [stager.part()]):
        pass
    assert sorted(int(record.key) for record in desk.query("loaded")) == list(range(CHANGES * EACH))


def test_a_query_does_not_go_on_at_another_instant(guarded: Guarded, desk: Client) -> None:
    found = iter(desk.query("big", batch_size=1))
    next(found)
    guarded.change(streams=1)
    assert reason_of(lambda: list(found)) == "ACCESS_CHANGED"


def test_connections_that_are_old_are_replaced_under_their_streams(tmp_path: Path) -> None:
    write_access(tmp_path, FILE)
    young = '[server]\nmax_connection_age = "1s"\nmax_connection_age_grace = "200ms"\n'
    with ServerProcess(tmp_path, GUARDED.replace("[server]\n", young)) as server, client_of(server, "desk") as desk:
        with client_of(server, "root") as root:
            root.create_topic("numbers", key=["/id"])
            connections: set[str] = set()

            def look() -> int:
                connections.update(
                    session.id
                    for session in root.sessions()
                    if session.identity == "desk" and "Subscribe" in session.calls
                )
                return len(connections)

            def subscribed() -> Iterator[int]:
                with desk.subscribe("numbers", start="earliest") as changes:
                    for change in changes:
                        assert change.record is not None
                        yield int(change.record.key)

            stop = 100_000
            live = Collector(subscribed(), stop)
            with desk.publisher("numbers", publisher_id="numbers") as publisher:
                number = 0
                while look() < 3:
                    live.check()
                    publisher.publish({"id": number})
                    number += 1
                publisher.publish({"id": stop})
            assert live.end() == [*range(number), stop]
            assert root.count("numbers") == number + 1
        assert not server.faults()


def test_a_link_goes_on_with_the_topics_that_its_peer_may_send_by_now(tmp_path: Path) -> None:
    write_access(tmp_path / "nyc", FILE + peer("ldn", "orders"))
    accepts = GUARDED.replace("[server]", '[server]\ninstance = "nyc"') + '[replication]\naccept = ["ldn"]\n'
    topics = '[topics.orders]\nkey = ["/id"]\n[topics.trades]\nkey = ["/id"]\n'
    with ServerProcess(tmp_path / "nyc", accepts + topics) as nyc, client_of(nyc, "root") as there:
        folder = tmp_path / "ldn"
        folder.mkdir()
        (folder / "token").touch(0o600)
        (folder / "token").write_text("ldn")
        link = f'[[replication.peers]]\nname = "nyc"\naddress = "{nyc.address}"\ntoken_file = "token"\n'
        with ServerProcess(folder, f'[server]\ninstance = "ldn"\n{link}{topics}') as ldn, ldn.client() as here:
            here.publish("orders", {"id": 1})
            here.publish("trades", {"id": 1})
            until(lambda: there.count("orders") == 1, 20, "the record of orders")
            assert there.count("trades") == 0
            write_access(tmp_path / "nyc", FILE + peer("ldn", "orders|trades"))
            assert there.reload_access()[1] == 1
            here.publish("orders", {"id": 2})
            until(lambda: (there.count("orders"), there.count("trades")) == (2, 1), 20, "both topics")
            write_access(tmp_path / "nyc", FILE + peer("ldn", "trades"))
            there.reload_access()
            here.publish("orders", {"id": 3})
            here.publish("trades", {"id": 2})
            until(lambda: there.count("trades") == 2, 20, "the record of trades")
            assert there.count("orders") == 2
