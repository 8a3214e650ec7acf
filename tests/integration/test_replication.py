"""Instances that send to each other: real servers, real links (rules R1 to R12, P5)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from sow_client import Client, FailedPrecondition, NotFound, ReplicationUnavailable
from tests.support.servers.server import ServerProcess, free_port, until

SECONDS = 20.0
TOPICS = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.unlogged]
key = ["/id"]
journal = false
"""


def config(name: str, peers: dict[str, int], *, mode: str = "async", more: str = "", topics: str = TOPICS) -> str:
    """An instance with a token that all share."""
    text = f'[server]\ninstance = "{name}"\n[backup]\nroot = "../backups"\n[replication]\ntoken = "secret"\n{more}\n'
    for peer, port in peers.items():
        text += f'[[replication.peers]]\nname = "{peer}"\naddress = "127.0.0.1:{port}"\nmode = "{mode}"\n'
    return text + topics


class Pair:
    """Two instances that send to each other."""

    def __init__(self, folder: Path, *, mode: str = "async", more: str = "") -> None:
        ports = (free_port(), free_port())
        self.a = ServerProcess(
            folder / "a", config("a", {"b": ports[1]}, mode=mode, more=more), port=ports[0], start=False
        )
        self.b = ServerProcess(
            folder / "b", config("b", {"a": ports[0]}, mode=mode, more=more), port=ports[1], start=False
        )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(stack: ExitStack, server: ServerProcess) -> Client:
    stack.enter_context(server)
    server.start()
    return stack.enter_context(server.client())


def streaming(client: Client, count: int = 1) -> bool:
    status = client.replication_status()
    return [link.state for link in status.outgoing] == ["streaming"] * count and all(
        link.state == "connected" for link in status.incoming
    )


def settled(*clients: Client) -> bool:
    """Whether nobody has anything to send."""
    return all(link.lag_sequences == 0 for client in clients for link in client.replication_status().outgoing)


def contents(client: Client) -> list[tuple[str, bytes, int, int | None, str]]:
    return [
        (record.key, record.payload, record.version, record.expire_time_micros, record.origin)
        for record in client.query("orders")
    ]


def test_two_instances_have_the_same_records_whichever_took_the_writes(tmp_path: Path, stack: ExitStack) -> None:
    pair = Pair(tmp_path)
    a = started(stack, pair.a)
    a.publish("orders", {"id": "before"})  # seeded
    b = started(stack, pair.b)
    until(lambda: streaming(a) and streaming(b), SECONDS, "both links to stream")
    a.publish("orders", {"id": 1, "at": "a"}, ttl="1h")
    b.publish("orders", {"id": 2, "at": "b"})
    b.publish("orders", {"id": 3})
    until(lambda: len(contents(a)) == len(contents(b)) == 4, SECONDS, "all records at both")
    assert contents(a) == contents(b)
    assert {record.key: record.origin for record in a.query("orders")} == {"before": "a", "1": "a", "2": "b", "3": "b"}
    a.sow_delete("orders", keys=["3"])
    until(lambda: b.get("orders", "3") is None, SECONDS, "the delete at the other")
    b.publish("orders", {"id": 1, "at": "b"}, ttl="200ms")
    until(lambda: a.get("orders", "1") is None and b.get("orders", "1") is None, SECONDS, "the expiry at both")
    assert contents(a) == contents(b)
    (incoming,) = b.replication_status().incoming
    assert (incoming.peer, incoming.state, incoming.last_error) == ("a", "connected", "")
    assert incoming.applied >= 3


def test_a_returning_peer_gets_the_writes_of_its_absence(tmp_path: Path, stack: ExitStack) -> None:
    pair = Pair(tmp_path)
    a, b = started(stack, pair.a), started(stack, pair.b)
    until(lambda: streaming(a) and streaming(b), SECONDS, "both links to stream")
    for number in range(20):
        a.publish("orders", {"id": number})
    until(lambda: len(contents(b)) == 20, SECONDS, "the records at b")
    pair.b.kill9()
    for number in range(10, 30):
        a.publish("orders", {"id": number, "again": True})
    a.sow_delete("orders", keys=["0"])
    pair.b.start()
    until(lambda: streaming(a) and settled(a), SECONDS, "b to catch up")
    assert contents(a) == contents(b)
    assert len(contents(b)) == 29


def test_replicated_is_on_disk_at_the_peer_and_downgraded_when_it_is_down(tmp_path: Path, stack: ExitStack) -> None:
    pair = Pair(tmp_path, mode="sync", more='sync_timeout = "500ms"')
    a, b = started(stack, pair.a), started(stack, pair.b)
    until(lambda: streaming(a) and streaming(b), SECONDS, "both links to stream")
    a.publish("orders", {"id": 1}, durability="replicated")
    pair.b.kill9()
    with pytest.raises(ReplicationUnavailable) as caught:
        a.publish("orders", {"id": 2}, durability="replicated")
    assert caught.value.applied == 1
    assert a.get("orders", "2") is not None
    assert a.replication_status().outgoing[0].mode == "downgraded"
    with pytest.raises(ReplicationUnavailable, match="nothing was written"):
        a.publish("unlogged", {"id": 1}, durability="replicated")
    pair.b.start()
    until(lambda: a.replication_status().outgoing[0].mode == "sync", SECONDS, "b to count again")
    assert [record.key for record in b.query("orders")] == ["1", "2"]
    with a.publisher("orders", durability="replicated", batch_records=10) as publisher:
        for number in range(500):
            publisher.publish({"id": number})
    assert b.count("orders") == 500  # acknowledged there: it need not be waited for


def test_a_server_that_is_stopped_answers_a_write_that_waits_for_a_peer(tmp_path: Path, stack: ExitStack) -> None:
    """P5. A stopping server ended its links first: each write under way waited in vain for the end of its grace, five
    seconds later, and failed."""
    pair = Pair(tmp_path, mode="sync", more='sync_timeout = "60s"')
    a, b = started(stack, pair.a), started(stack, pair.b)
    until(lambda: streaming(a) and streaming(b), SECONDS, "both links to stream")
    pair.b.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as calls:
        waiting = calls.submit(a.publish, "orders", {"id": 1}, durability="replicated")
        with pair.a.client() as other:
            until(lambda: other.get("orders", "1") is not None, SECONDS, "the write to be at a")
            pair.a.signal(signal.SIGTERM)
            until(lambda: bool(pair.a.events("stopping")), SECONDS, "a to stop")
        pair.b.signal(signal.SIGCONT)
        assert waiting.result(SECONDS).version > 0
    assert b.get("orders", "1") is not None
    pair.a.wait()


def test_an_instance_that_is_not_accepted_gets_the_reason(tmp_path: Path, stack: ExitStack) -> None:
    port = free_port()
    a = started(stack, ServerProcess(tmp_path / "a", config("a", {"b": port}), start=False))
    wrong = config("b", {}, more='accept = ["c"]').replace('"secret"', '"other"')
    server = ServerProcess(tmp_path / "b", wrong, port=port, start=False)
    started(stack, server)

    def reason() -> str:
        return a.replication_status().outgoing[0].last_error_reason

    until(lambda: reason() == "PEER_UNAUTHENTICATED", SECONDS, "the token to be refused")
    assert a.replication_status().outgoing[0].state == "refused"


def test_a_name_that_is_not_expected_is_refused(tmp_path: Path, stack: ExitStack) -> None:
    port = free_port()
    a = started(stack, ServerProcess(tmp_path / "a", config("a", {"b": port}), start=False))
    started(stack, ServerProcess(tmp_path / "b", config("b", {}, more='accept = ["c"]'), port=port, start=False))
    link = a.replication_status
    until(lambda: link().outgoing[0].last_error_reason == "PEER_NOT_ACCEPTED", SECONDS, "the name to be refused")


def test_a_topic_that_is_missing_joins_when_it_is_made(tmp_path: Path, stack: ExitStack) -> None:
    port = free_port()
    a = started(stack, ServerProcess(tmp_path / "a", config("a", {"b": port}), start=False))
    b = started(
        stack, ServerProcess(tmp_path / "b", config("b", {}, more='accept = ["a"]', topics=""), port=port, start=False)
    )
    a.publish("orders", {"id": 1})
    until(
        lambda: (
            {topic.topic: topic.state for topic in a.replication_status().outgoing[0].topics}.get("orders") == "refused"
        ),
        SECONDS,
        "the topic to be refused",
    )
    b.create_topic("orders", key=["/id"], expiration="enabled")
    until(lambda: b.count("orders") == 1, SECONDS, "the record")


def test_a_ring_carries_every_change_everywhere(tmp_path: Path, stack: ExitStack) -> None:
    names, ports = ("a", "b", "c"), (free_port(), free_port(), free_port())
    clients = []
    for index, name in enumerate(names):
        following, before = (index + 1) % 3, (index - 1) % 3
        text = config(name, {names[following]: ports[following]}, more=f'accept = ["{names[before]}"]')
        clients.append(started(stack, ServerProcess(tmp_path / name, text, port=ports[index], start=False)))
    until(lambda: all(streaming(client) for client in clients), SECONDS, "the ring to stream")
    for number, client in enumerate(clients):
        client.publish("orders", {"id": number})
    until(lambda: all(client.count("orders") == 3 for client in clients), SECONDS, "all records everywhere")
    assert contents(clients[0]) == contents(clients[1]) == contents(clients[2])
    until(lambda: settled(*clients), SECONDS, "nothing left to send")


def test_a_topic_is_not_deleted_before_peers_have_it(tmp_path: Path, stack: ExitStack) -> None:
    """T5."""
    port = free_port()
    a = started(stack, ServerProcess(tmp_path / "a", config("a", {"b": port}, topics=""), start=False))
    a.create_topic("orders", key=["/id"])
    a.publish("orders", {"id": 1})
    with pytest.raises(FailedPrecondition) as caught:
        a.delete_topic("orders")
    assert caught.value.reason == "PEER_BEHIND"
    assert a.delete_topic("orders", force=True) == 1


def test_a_restored_instance_gets_the_records_of_its_peer(tmp_path: Path, stack: ExitStack) -> None:
    """J14: records deleted since the backup stay deleted."""
    pair = Pair(tmp_path)
    a, b = started(stack, pair.a), started(stack, pair.b)
    until(lambda: streaming(a) and streaming(b), SECONDS, "both links to stream")
    for number in range(10):
        a.publish("orders", {"id": number})
    until(lambda: b.count("orders") == 10, SECONDS, "the records at b")
    b.backup("backup")
    a.sow_delete("orders", keys=["0"])
    a.publish("orders", {"id": 1, "new": True})
    until(lambda: b.get("orders", "0") is None, SECONDS, "the delete at b")
    pair.b.terminate()
    pair.b.data.rename(tmp_path / "away")
    (tmp_path / "backups" / "backup").rename(pair.b.data)
    pair.b.start()
    until(lambda: streaming(a) and streaming(b) and settled(a, b), SECONDS, "b to be back")
    until(lambda: contents(a) == contents(b), SECONDS, "both to have the same")
    assert len(contents(a)) == 9
    assert a.get("orders", "0") is None


def test_a_peer_that_is_not_configured_cannot_be_compared_with(tmp_path: Path, stack: ExitStack) -> None:
    a = started(stack, ServerProcess(tmp_path / "a", config("a", {}, more='accept = ["b"]'), start=False))
    with pytest.raises(NotFound) as caught:
        a.verify_replication("b")
    assert caught.value.reason == "PEER_NOT_FOUND"


def test_differences_are_found_and_repaired_in_both_directions(tmp_path: Path, stack: ExitStack) -> None:
    """R10: b sends nothing by itself, so its writes stay there."""
    port = free_port()
    a = started(stack, ServerProcess(tmp_path / "a", config("a", {"b": port}), start=False))
    b = started(stack, ServerProcess(tmp_path / "b", config("b", {}, more='accept = ["a"]'), port=port, start=False))
    until(lambda: streaming(a), SECONDS, "the link to stream")
    for number in range(100):
        a.publish("orders", {"id": number})
    until(lambda: b.count("orders") == 100 and settled(a), SECONDS, "the records at b")
    orders, unlogged = a.verify_replication("b")
    assert (orders.topic, orders.records, orders.differing, orders.left_out) == ("orders", 100, 0, "")
    assert (unlogged.topic, bool(unlogged.left_out)) == ("unlogged", True)
    b.publish("orders", {"id": 7, "at": "b"})
    b.publish("orders", {"id": "alone"})
    b.sow_delete("orders", keys=["8"])
    (orders,) = a.verify_replication("b", ["orders"], keys_max=2)
    assert (orders.differing, len(orders.differences)) == (3, 2)
    (repaired,) = a.repair_replication("b", ["orders"])
    assert (repaired.topic, repaired.received, repaired.left_out) == ("orders", 3, "")
    assert a.verify_replication("b", ["orders"])[0].differing == 0
    assert contents(a) == contents(b)
    assert a.get("orders", "8") is None


def test_a_leaf_with_a_filter_holds_only_matching_records(tmp_path: Path, stack: ExitStack) -> None:
    """R1, R2: also records from before the link, and records that cease to match."""
    ports = (free_port(), free_port())
    filtered = config("a", {"leaf": ports[1]}).replace('mode = "async"', 'mode = "async"\nfilter = "/region = \'EU\'"')
    a = started(stack, ServerProcess(tmp_path / "a", filtered, port=ports[0], start=False))
    for number, region in enumerate(["EU", "US", "EU"]):
        a.publish("orders", {"id": number, "region": region})
    accepting = config("leaf", {}, more='accept = ["a"]')
    leaf = started(stack, ServerProcess(tmp_path / "leaf", accepting, port=ports[1], start=False))
    until(lambda: streaming(a), SECONDS, "the link to stream")

    def keys() -> list[str]:
        return [record.key for record in leaf.query("orders")]

    until(lambda: keys() == ["0", "2"], SECONDS, "the seeded ones that match")
    a.publish("orders", {"id": 0, "region": "US"})
    a.publish("orders", {"id": 1, "region": "EU"})
    a.publish("orders", {"id": 3, "region": "US"})
    a.publish("orders", {"id": 4, "region": "EU"})
    until(lambda: keys() == ["1", "2", "4"], SECONDS, "what matches now")
    until(lambda: settled(a), SECONDS, "nothing to send")
    (answer,) = a.verify_replication("leaf", topics=["orders"])
    assert "filter" in answer.left_out
