"""The instance that clients use is killed again and again: they go on elsewhere, and nothing is lost or missed.

Three instances send to each other. A publisher, single publishes, and ten subscribers have the addresses of all; the
killed instance is in turn that of the publisher, and that of most subscribers (rules F1, F2, F5, F7 to F9, F12, P5).
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Protocol

import pytest

from sow_client import EARLIEST, Client
from tests.fault.moving import MARK, TOPIC, Clients, Told, numbers, position_of, told
from tests.support.servers.cluster import WAIT_SECONDS, Cluster
from tests.support.servers.proxy import Proxy
from tests.support.servers.server import until
from tests.support.stores.stores import SECOND

NAMES: Final = ("a", "b", "c")
TOPICS: Final = f'[topics.{TOPIC}]\nkey = ["/id"]\nexpiration = "enabled"\nretain_time = "1d"\n'
SYNC: Final = 'sync_timeout = "1s"\n'
ROUNDS_BETWEEN_CHECKS: Final = 10


class Loss(Protocol):
    """A way to lose an instance."""

    def addresses(self) -> dict[str, str]:
        """Where clients find the instances."""

    def lose(self, name: str) -> None:
        """From now on nobody reaches it."""

    def restore(self, name: str) -> None:
        """It can be reached again."""


class Killed:
    """An instance is killed, and started again."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def addresses(self) -> dict[str, str]:
        return {name: self._cluster[name].server.address for name in NAMES}

    def lose(self, name: str) -> None:
        server = self._cluster[name].server
        server.signal(signal.SIGSTOP)
        for proxy in sending(self._cluster, name):  # what they hold back is lost
            proxy.refuse()
            proxy.mend()
        server.kill9()  # only now, as it waits for the reader processes, too

    def restore(self, name: str) -> None:
        self._cluster.start(name)


class CutOff:
    """An instance runs on, and neither clients nor its peers reach it."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self._cluster = cluster
        self._fronts = {name: stack.enter_context(Proxy(cluster[name].server.address)) for name in NAMES}

    def addresses(self) -> dict[str, str]:
        return {name: front.address for name, front in self._fronts.items()}

    def _proxies(self, name: str) -> list[Proxy]:
        return [self._fronts[name], *(proxy for link, proxy in self._cluster.proxies.items() if name in link)]

    def lose(self, name: str) -> None:
        for proxy in self._proxies(name):
            proxy.refuse()

    def restore(self, name: str) -> None:
        for proxy in self._proxies(name):
            proxy.mend()


def test_clients_go_on_when_the_instance_that_they_use_is_killed(tmp_path: Path, seed: int) -> None:
    with cluster_of_three(tmp_path) as cluster:
        go_on(cluster, Killed(cluster), seed, rounds=2)


@pytest.mark.long
def test_clients_go_on_through_fifty_kills(tmp_path: Path, seed: int) -> None:
    with cluster_of_three(tmp_path) as cluster:
        go_on(cluster, Killed(cluster), seed, rounds=50)


@pytest.mark.long
def test_clients_go_on_through_fifty_cuts(tmp_path: Path, seed: int) -> None:
    with cluster_of_three(tmp_path) as cluster, ExitStack() as stack:
        go_on(cluster, CutOff(cluster, stack), seed, rounds=50)


@contextmanager
def cluster_of_three(folder: Path) -> Iterator[Cluster]:
    with Cluster(folder, *NAMES, topics=TOPICS, mode="sync", more=SYNC, start=False) as cluster:
        for name in NAMES:
            cluster[name].shift(0, backoff_max_micros=SECOND // 2)  # links come back soon, as a test is short
        cluster.start()
        cluster.await_streaming()
        yield cluster
        assert not cluster.faults()


def go_on(cluster: Cluster, loss: Loss, seed: int, rounds: int) -> None:
    """Half of the losses come when the links have caught up with the one before; the others come once they are open.
    Before most of them the links stand still for a moment, so the instance has told and stored what no other has."""
    draw = random.Random(f"losses {seed}")
    with Clients(loss.addresses(), seed) as clients:
        for number in range(1, rounds + 1):
            clients.publisher.await_more(draw.randrange(10, 60))
            settled = number == 1 or draw.random() < 0.5
            await_linked(cluster, synchronous=settled)
            victim = clients.publisher.used if number % 2 else clients.crowded
            downgraded = downgrades(cluster)
            if number % 3:
                for proxy in sending(cluster, victim):
                    proxy.stall()
                clients.timekeeper.await_more(10)
            those = clients.using(victim)
            acknowledged = clients.acknowledged(replicated=True)
            since = time.monotonic()
            loss.lose(victim)
            if settled and downgrades(cluster) == downgraded:
                for name in {*NAMES} - {victim}:
                    assert lost(acknowledged, cluster[name].client) == {}, f"acknowledged, and not at {name}"
            clients.await_moved(those, since)
            clients.publisher.await_more(draw.randrange(10, 40))
            loss.restore(victim)
            if number % ROUNDS_BETWEEN_CHECKS == 0 or number == rounds:
                with at_rest(cluster, clients, number):
                    if number == rounds:
                        judge(cluster, clients)
        print(clients.figures)


def sending(cluster: Cluster, name: str) -> list[Proxy]:
    """The links from an instance."""
    return [proxy for (sender, _), proxy in cluster.proxies.items() if sender == name]


def await_linked(cluster: Cluster, *, synchronous: bool) -> None:
    """Waits until all instances hear from each other; `synchronous`: and until REPLICATED means everywhere."""
    for sender, receiver in cluster.links:
        cluster.await_out(
            sender, receiver, lambda link: link.state == "streaming" and (link.mode == "sync" or not synchronous)
        )


def downgrades(cluster: Cluster) -> int:
    """How often an instance has ceased to wait for another one, in the lives of now."""
    return sum(len(instance.server.events("peer_downgraded")) for instance in cluster.instances.values())


def lost(acknowledged: Mapping[str, int], client: Client) -> dict[str, tuple[int, int | None]]:
    """The acknowledged numbers that an instance does not have, nor later ones of their keys; with those that it has."""
    there = numbers(client.query(TOPIC))
    return {key: (number, there.get(key)) for key, number in acknowledged.items() if there.get(key, 0) < number}


# -- the judgement ----------------------------------------------------------------------------------------------------


@contextmanager
def at_rest(cluster: Cluster, clients: Clients, mark: int) -> Iterator[None]:
    """While nobody writes, every instance has every acknowledged record, and each subscriber what its instance has."""
    with ExitStack() as stack:
        for writer in clients.writers:
            stack.enter_context(writer.gate)
        until(lambda: all(writer.settled for writer in clients.writers), WAIT_SECONDS, "acknowledgements")
        clients.check_alive()
        cluster.await_equal(topics=(TOPIC,))
        for instance in cluster.instances.values():
            acknowledged = clients.acknowledged(replicated=False)
            assert lost(acknowledged, instance.client) == {}, f"acknowledged, and not at {instance.name}"
        cluster["a"].client.publish(TOPIC, {"id": MARK, "n": mark, "pad": "x"}, durability="replicated")
        for one in (*clients.viewers, *clients.keepers):
            there = cluster[one.used].client
            until(lambda one=one, there=there: one.equals(there), WAIT_SECONDS, f"{one.kind} to equal a query")  # type: ignore[misc]  # its defaults
        for reader in clients.followers:
            until(lambda reader=reader: reader.mark == mark, WAIT_SECONDS, f"{reader.kind} to come to the mark")  # type: ignore[misc]  # its default
            until(lambda reader=reader: reader.covered, WAIT_SECONDS, f"{reader.kind} to be covered")  # type: ignore[misc]  # its default
        clients.check_alive()
        yield


def judge(cluster: Cluster, clients: Clients) -> None:
    """Compares what the change readers were told with the journals of all instances."""
    journals: dict[str, list[Told]] = {}
    for name, instance in cluster.instances.items():
        epoch, told_there = journal_of(instance.client)
        assert_in_order(told_there, at=name)
        journals[epoch] = told_there
    records = [{identity(row) for row in rows} for rows in journals.values()]
    values = [{(row.key, row.number) for row in rows} for rows in journals.values()]
    everywhere, all_values = set.intersection(*records), set.intersection(*values)
    assert everywhere, "something was published"
    for follower in clients.followers:
        for epoch, stay in follower.stays:
            if stay:
                inside = [row for row in journals[epoch] if stay[0].sequence <= row.sequence <= stay[-1].sequence]
                assert stay == inside, f"{follower.kind}: not what the instance has told"
        seen = [row for _, stay in follower.stays for row in stay]
        # A record that some instance has never had may have been superseded before it came there.
        assert not everywhere - {identity(row) for row in seen}, f"{follower.kind} has missed records"
        assert_first_in_order(seen, all_values)
    for writer in clients.writers:
        if writer.durability == "replicated":
            # As long as the others had caught up, it is everywhere.
            print(f"{writer.kind}: {len(writer.acknowledged)} acknowledged, {writer.unavailable} not, "
                  f"{len(set(writer.acknowledged) - all_values)} superseded before they were everywhere")  # fmt: skip
    print(f"{len(everywhere)} changes everywhere, {len(set.union(*records) - everywhere)} superseded somewhere")


def journal_of(client: Client) -> tuple[str, list[Told]]:
    """The epoch of an instance's journal, and the changes of lasting records in it up to the last mark."""
    last = client.get(TOPIC, MARK)
    assert last is not None, "the marks are records"
    rows: list[Told] = []
    with client.subscribe(TOPIC, changes=True, start=EARLIEST) as changes:
        for change in changes:
            if (row := told(change)) is not None:
                rows.append(row)
            if change.record is not None and (change.key, change.record.version) == (MARK, last.version):
                break
        assert changes.bookmark is not None
        return position_of(changes.bookmark)[0], rows


def identity(row: Told) -> tuple[str, int, str]:
    return row.key, row.version, row.origin


def assert_in_order(rows: list[Told], at: str) -> None:
    """An instance tells each change once, and those of a key from older to newer.

    What a lost instance had accepted and not sent on is applied anew elsewhere, with newer versions (rule F13). So the
    journal of the lost one, and of those that it had told, has older values of a publisher again: made at another
    instance, never at this one, and followed by the newer ones.
    """
    last: dict[str, Told] = {}
    greatest: dict[str, Told] = {}
    before = 0
    for row in rows:
        assert row.sequence > before, f"{row} after {before}"
        before = row.sequence
        older = last.get(row.key)
        if older is not None:
            assert (older.version, older.origin) < (row.version, row.origin), f"{row} after {older}"
        last[row.key] = row
        newest = greatest.setdefault(row.key, row)
        if row.number < newest.number:
            assert row.origin not in (at, newest.origin), f"at {at}: {row} after {newest}"
        else:
            greatest[row.key] = row
    assert last == greatest, f"at {at}: older values won"


def assert_first_in_order(rows: list[Told], everywhere: set[tuple[str, int]]) -> None:
    """Nothing that was not told before comes after something newer of its key, whatever the number of instances."""
    greatest: dict[str, int] = {}
    known: set[tuple[str, int]] = set()
    for row in rows:
        value = row.key, row.number
        if value not in known and value in everywhere:
            assert row.number >= greatest.get(row.key, 0), f"{row} after {greatest[row.key]}"
        known.add(value)
        greatest[row.key] = max(greatest.get(row.key, 0), row.number)
