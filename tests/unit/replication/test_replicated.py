"""REPLICATED before the peers: refusals, waiting, and answers (rule P5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from sow.v1 import admin_pb2
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Condition,
    ConditionKind,
    Delete,
    Durability,
    Outcome,
    Publish,
    PublisherPosition,
    Request,
    Touch,
)
from sow_server.linking import NoLinks
from sow_server.services.records.submissions import Submissions
from sow_server.services.replication import Links
from tests.support.stores.stores import Rig


class FakeLinks(Links):
    """Peers for every topic but those without; `asked` has the awaited writes. They have everything up to `acked`."""

    def __init__(self, *without: str) -> None:
        self.without = without
        self.asked: list[tuple[str, int]] = []
        self.acked = 2**62
        self.refusal: StoreError | None = None
        self.moved = asyncio.Event()

    def sync_peers(self, topic: str) -> int:
        return 0 if topic in self.without else 1

    async def replicated(self, topic: str, sequence: int) -> None:
        self.asked.append((topic, sequence))
        while self.acked < sequence and self.refusal is None:
            await self.moved.wait()
        if self.refusal is not None:
            raise self.refusal

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        return admin_pb2.GetReplicationStatusResponse()

    async def add_peer(self, request: admin_pb2.AddPeerRequest) -> None:
        raise NotImplementedError

    async def remove_peer(self, name: str) -> None:
        raise NotImplementedError

    async def pause_peer(self, name: str) -> None:
        raise NotImplementedError

    async def resume_peer(self, name: str) -> None:
        raise NotImplementedError

    def verify(
        self, request: admin_pb2.VerifyReplicationRequest
    ) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
        raise NotImplementedError

    def repair(
        self, request: admin_pb2.RepairReplicationRequest
    ) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
        raise NotImplementedError


def unavailable() -> StoreError:
    return StoreError(Reason.REPLICATION_UNAVAILABLE, "the write stands here; 0 of 1 wanted sync peers have it")


def publish(*keys: str, topic: str = "orders", durability: Durability = Durability.REPLICATED) -> Publish:
    return Publish(topic, [b"x" for _ in keys], list(keys), durability=durability)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    rig.create_topic("unlogged", journal=False)
    return rig


def run(rig: Rig, replicas: Links, test: Callable[[Submissions], Awaitable[None]]) -> None:
    """Runs a test beside the writer's thread."""

    async def started() -> None:
        rig.store.start(asyncio.get_running_loop().call_soon_threadsafe)
        try:
            await test(Submissions(rig.store.reads, rig.store.writes, replicas))
        finally:
            await asyncio.get_running_loop().run_in_executor(None, rig.close)

    asyncio.run(started())


async def outcome(changes: Submissions, request: Request) -> Outcome:
    return await changes.submit(request)


def test_an_answer_waits_for_the_peers_and_says_so(rig: Rig) -> None:
    replicas = FakeLinks()
    replicas.acked = 0

    async def test(changes: Submissions) -> None:
        waiting = changes.submit(publish("a", "b"))
        plain = await outcome(changes, publish("c", durability=Durability.FSYNC))
        assert plain.durability is Durability.FSYNC  # nobody else waits with it
        assert isinstance(waiting, asyncio.Task)
        assert not waiting.done()
        replicas.acked = plain.last_sequence
        replicas.moved.set()
        done = await waiting
        assert (done.durability, done.applied) == (Durability.REPLICATED, 2)
        assert replicas.asked == [("orders", done.last_sequence)]

    run(rig, replicas, test)


def test_every_kind_of_change_waits(rig: Rig) -> None:
    replicas = FakeLinks()

    async def test(changes: Submissions) -> None:
        for request in (
            publish("a"),
            Touch("orders", ["a"], durability=Durability.REPLICATED),
            Delete("orders", ["a"], durability=Durability.REPLICATED),
        ):
            done = await outcome(changes, request)
            assert done.durability is Durability.REPLICATED
            assert replicas.asked.pop() == ("orders", done.last_sequence)

    run(rig, replicas, test)


def test_a_request_without_changes_does_not_wait(rig: Rig) -> None:
    replicas = FakeLinks()

    async def test(changes: Submissions) -> None:
        assert (await outcome(changes, Delete("orders", ["z"], durability=Durability.REPLICATED))).applied == 0
        refused = publish("a")
        refused.conditions = [Condition(ConditionKind.IF_PRESENT)]
        assert (await outcome(changes, refused)).applied == 0
        assert replicas.asked == []

    run(rig, replicas, test)


def test_a_retry_waits_for_the_writes_of_its_first_attempt(rig: Rig) -> None:
    """A duplicate that is answered at once would say REPLICATED of a write that no peer may have."""
    replicas = FakeLinks()

    async def test(changes: Submissions) -> None:
        first, again = publish("a"), publish("a")
        first.publisher = again.publisher = PublisherPosition("p", 1, 1)
        done = await outcome(changes, first)
        repeated = await outcome(changes, again)
        assert (repeated.applied, repeated.duplicates) == (0, 1)
        assert repeated.durability is Durability.REPLICATED
        topic, sequence = replicas.asked[-1]
        assert topic == "orders"
        assert sequence >= done.last_sequence

    run(rig, replicas, test)


def test_a_write_that_too_few_peers_have_stays_and_the_answer_counts_it(rig: Rig) -> None:
    replicas = FakeLinks()
    replicas.refusal = unavailable()

    async def test(changes: Submissions) -> None:
        with pytest.raises(StoreError) as caught:
            await outcome(changes, publish("a", "b"))
        assert caught.value.reason is Reason.REPLICATION_UNAVAILABLE
        assert caught.value.applied == 2
        assert rig.store.cuts.count(rig.store.topics.find("orders")) == 2

    run(rig, replicas, test)


@pytest.mark.parametrize(("topic", "why"), [("lonely", "no sync peer"), ("unlogged", "no journal")])
def test_replicated_without_a_peer_for_the_topic_writes_nothing(rig: Rig, topic: str, why: str) -> None:
    rig.create_topic("lonely")

    async def test(changes: Submissions) -> None:
        for submit in (changes.submit_patiently, lambda request: changes.admitted(request, None)):
            with pytest.raises(StoreError, match=f"{why}.*nothing was written") as caught:
                await submit(publish("a", topic=topic))
            assert (caught.value.reason, caught.value.applied) == (Reason.REPLICATION_UNAVAILABLE, 0)
        assert rig.store.cuts.count(rig.store.topics.find(topic)) == 0

    run(rig, FakeLinks("lonely"), test)


def test_an_instance_without_peers_has_an_empty_status_and_no_peer_to_compare_with(rig: Rig) -> None:
    replicas = NoLinks(rig.store.commits, rig.store.replicas.sources, "nyc-1")
    rig.put("orders", "a")
    status = replicas.status()
    assert (status.instance, status.last_sequence) == ("nyc-1", rig.store.writer.last_sequence)
    assert not status.outgoing
    assert not status.incoming
    for call in (
        lambda: replicas.verify(admin_pb2.VerifyReplicationRequest(peer="ldn-1")),
        lambda: replicas.repair(admin_pb2.RepairReplicationRequest(peer="ldn-1")),
    ):
        with pytest.raises(StoreError, match="'ldn-1'") as caught:
            call()
        assert caught.value.reason is Reason.PEER_NOT_FOUND
    rig.close()
