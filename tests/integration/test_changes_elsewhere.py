"""Ranges of changes that go on at another instance, with real servers (rule F18)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sow_client import Client, SowError
from tests.support.servers.cluster import Cluster
from tests.support.servers.server import until

TOPIC = "[topics.orders]\nkey = ['/id']\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("pair"), "a", "b", topics=TOPIC) as cluster:
        cluster.await_streaming()
        yield cluster


def publish(client: Client, *ids: str) -> None:
    for one in ids:
        client.publish("orders", {"id": one})


def marked(client: Client) -> str:
    """The bookmark of the head with marks."""
    found: list[str] = []

    def has_marks() -> bool:
        plan = client.plan_changes("orders", start="latest")
        found[:] = [plan.end + plan.marks]
        return bool(plan.marks)

    until(has_marks, 30, "marks")
    return found[0]


def keys(client: Client, start: str) -> list[str]:
    plan = client.plan_changes("orders", start=start)
    return [
        bytes(batch.keys[begin:end]).decode()
        for batch in client.read_changes("orders", plan.start, plan.end, columns=("key",))
        for begin, end in zip(
            memoryview(batch.key_offsets).cast("i")[:-1], memoryview(batch.key_offsets).cast("i")[1:], strict=True
        )
    ]


def test_a_range_begins_at_a_bookmark_of_another_instance(pair: Cluster) -> None:
    """given a reader that has read up to a position at one instance / when it asks another one for the changes after
    it / then it misses nothing, at whichever of the two the change was made"""
    a, b = pair["a"].client, pair["b"].client
    publish(a, "1")
    publish(b, "2")
    pair.await_streaming()
    bookmark = marked(a)
    publish(a, "3")
    publish(b, "4")
    pair.await_streaming()
    assert {"3", "4"} <= set(keys(b, bookmark))
    assert keys(a, bookmark.partition(";")[0]) == keys(a, bookmark)
    assert b.plan_changes("orders", start=bookmark, end=bookmark).entries == 0


def test_a_bookmark_that_tells_nothing_about_this_instance_is_refused(pair: Cluster) -> None:
    a, b = pair["a"].client, pair["b"].client
    publish(a, "5")
    bare = a.plan_changes("orders", start="latest").end
    for start, end in ((bare, None), (b.plan_changes("orders", start="earliest").start, bare)):
        with pytest.raises(SowError) as refused:
            b.plan_changes("orders", start=start, end=end)
        assert refused.value.reason == "BOOKMARK_OTHER_EPOCH"
