"""A subscriber whose instance is killed goes on at the other one by its last bookmark (rules F6 to F10)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sow_client import ResyncRequired, Subscription, Unavailable, View
from tests.fault.replicating import loads
from tests.support.servers.cluster import WAIT_SECONDS, Cluster
from tests.support.servers.server import until
from tests.support.stores.stores import SECOND

TOPICS = "[topics.orders]\nkey = ['/id']\nexpiration = 'enabled'\n"


class Reader(threading.Thread):
    """Keeps a view of all records from a subscription, until that ends."""

    def __init__(self, subscription: Subscription, view: View) -> None:
        super().__init__(daemon=True)
        self.subscription = subscription
        self.view = view
        self.changes = 0
        self.start()

    def run(self) -> None:
        for change in self.subscription:
            self.view.apply(change)
            self.changes += 1

    def end(self) -> str:
        """Ends the subscription; returns its last bookmark."""
        self.subscription.close()
        self.join(WAIT_SECONDS)
        assert not self.is_alive()
        assert self.subscription.bookmark is not None
        return self.subscription.bookmark


def await_marks(cluster: Cluster, reader: Reader, of: str) -> None:
    """Waits until the reader's bookmark tells a position of an instance."""
    epoch = cluster[of].client.status().journal_epoch
    until(lambda: f";{epoch}." in (reader.subscription.bookmark or ""), WAIT_SECONDS, f"marks of {of}")


def go_on_again_and_again(folder: Path, seed: int, rounds: int) -> None:
    with Cluster(folder, "a", "b", topics=TOPICS, start=False) as cluster:
        cluster["b"].shift(5 * SECOND)
        cluster.start()
        cluster.await_streaming()
        view = View()
        reader = Reader(cluster["a"].client.sow_and_subscribe("orders", oof=True), view)
        at, other = "a", "b"
        with loads(cluster, seed) as running:
            for _ in range(rounds):
                for load in running:
                    load.await_more(20)
                await_marks(cluster, reader, of=other)
                cluster[at].server.kill9()
                next(load for load in running if load.instance.name == other).await_more(20)
                bookmark = reader.end()
                reader = Reader(cluster[other].client.subscribe("orders", oof=True, start=bookmark), view)
                cluster[at].server.start()
                at, other = other, at
            for load in running:
                load.await_more(20)
        cluster.await_streaming()
        there = cluster[at].client
        until(lambda: reader.subscription.covers, WAIT_SECONDS, "everything has come")
        until(
            lambda: (
                {key: record.version for key, record in view.items()}
                == {record.key: record.version for record in there.query("orders")}
            ),
            WAIT_SECONDS,
            "the view has what its instance has",
        )
        reader.end()


def test_a_subscriber_misses_nothing_when_its_instances_are_killed(tmp_path: Path, seed: int) -> None:
    """F7 to F9: records expire, and the clocks differ by five seconds."""
    go_on_again_and_again(tmp_path, seed, rounds=2)


@pytest.mark.long
def test_a_subscriber_misses_nothing_through_fifty_kills(tmp_path: Path, seed: int) -> None:
    """F7 to F9."""
    go_on_again_and_again(tmp_path, seed, rounds=50)


def test_bookmarks_elsewhere_and_positions_of_reads(tmp_path: Path) -> None:
    """F6, F7, F10: a wiped instance gives no place to go on at, and reads show what was written elsewhere."""
    with Cluster(tmp_path, "a", "b", topics=TOPICS) as cluster:
        a, b = cluster["a"].client, cluster["b"].client
        cluster.await_streaming()
        done = a.publish("orders", {"id": "1"})
        assert b.get("orders", "1", min_position=done.bookmark) is not None
        done = a.publish("orders", {"id": "2"})
        assert [record.key for record in b.query("orders", min_position=done.bookmark)] == ["1", "2"]
        assert b.count("orders", min_position=done.bookmark) == 2
        with pytest.raises(Unavailable) as behind:
            b.get("orders", "1", min_position="0123456789ab.1")
        assert behind.value.reason == "BEHIND"
        reader = Reader(a.sow_and_subscribe("orders", oof=True), View())
        await_marks(cluster, reader, of="b")
        bookmark = reader.end()
        b.subscribe("orders", oof=True, start=bookmark).close()
        cluster["b"].server.kill9()
        cluster["b"].wipe()
        cluster.start("b")
        cluster.await_streaming()
        with pytest.raises(ResyncRequired) as refused:
            b.subscribe("orders", oof=True, start=bookmark)
        assert refused.value.reason == "BOOKMARK_OTHER_EPOCH"
