"""Changes of another instance that come after their record's end, at two real instances (rules L7, J12)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from sow_client import Change
from tests.support.servers.cluster import WAIT_SECONDS, Cluster
from tests.support.servers.server import until

LATE = 200
TOPICS = """
[topics.dead]
[topics.orders]
key = ["/id"]
expiration = "enabled"
dead_letter = "dead"
retain_time = "1h"
"""


def test_nobody_is_handed_a_record_of_a_peer_that_came_too_late(tmp_path: Path) -> None:
    """200 records expire before the other instance gets them. All subscribers there but those that conflate were handed
    each of them as a put, and 200 dead letters were made of them besides."""
    with Cluster(tmp_path, "a", "b", topics=TOPICS) as cluster, ExitStack() as stack:
        cluster.await_streaming()
        a, b = cluster["a"].client, cluster["b"].client
        a.pause_peer("b")
        a.publish_many("orders", [{"id": f"late {number}"} for number in range(LATE)], ttl="50ms")
        until(lambda: a.count("orders") == 0, WAIT_SECONDS, "the records to expire at a")
        a.publish("orders", {"id": "last"})
        followers: dict[str, Iterator[Change]] = {
            "plain": stack.enter_context(b.subscribe("orders", oof=True)),
            "filtered": stack.enter_context(b.subscribe("orders", "/id IS NOT NULL")),
            "one key": stack.enter_context(b.subscribe("orders", "/id IN ('late 7', 'last')", oof=True)),
            "pattern": stack.enter_context(b.subscribe(topic_pattern="ord.*", oof=True)),
            "delta": stack.enter_context(b.subscribe("orders", delta=True)),
            "conflating": stack.enter_context(b.subscribe("orders", conflation="20ms")),
            "durable": stack.enter_context(b.durable("orders", "d")),
        }
        reader = stack.enter_context(b.subscribe("orders", changes=True))
        a.resume_peer("b")
        for name, follower in followers.items():
            puts = []
            while "last" not in puts:
                change = next(follower)
                puts += [change.key] if change.op == "put" else []
            assert puts == ["last"], name
        told = [next(reader) for _ in range(2 * LATE + 1)]
        assert sorted(change.op for change in told) == [*["expire"] * LATE, *["put"] * (LATE + 1)]
        assert b.count("dead") == LATE
