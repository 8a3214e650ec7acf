"""Replicated durables on a link: what is told, and when (durable_marks [1] to [3]); their messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from itertools import count
from types import MappingProxyType

import pytest

from sow.v1 import replication_pb2, types_pb2
from sow_peering import DurableMark, DurablesPart, InstanceIdentity, MergeCounts, Stamp
from sow_replication.durable_marks import DURABLES_MAX, QUIET_MICROS, DurableTeller
from sow_replication.messages import PROTOCOL, durable_message, durable_of
from sow_replication.node import Node
from sow_replication.options import SECOND, NodeOptions
from sow_replication.ports import Counted, PeerCaller, Refused
from sow_replication.receiver import Receiver
from tests.support.simulation.replica_local import given
from tests.support.simulation.replica_model import ModelStore

PEER = InstanceIdentity("b", "id", "epoch")
MARK = DurableMark("orders", "d", born=Stamp(1, "x"), sequence=5, swept_micros=10)
DECLARED = {
    "retain_time_micros": None,
    "retain_bytes": None,
    "backlog_ttl_micros": 5 * SECOND,
    "idle_ttl_micros": 7 * SECOND,
    "delivery_limit": 3,
    "replicated": True,
}


class Kept:
    """The durables of an instance."""

    def __init__(self, *marks: DurableMark) -> None:
        self.marks = list(marks)
        self.changed = list(range(1, len(marks) + 1))
        """The number of the last change of each."""
        self.durables_version = self.topics_version = 0
        self.read = 0

    def change(self, index: int, mark: DurableMark) -> None:
        self.marks[index] = mark
        self.changed[index] = max(self.changed) + 1

    def durables(
        self, peer: InstanceIdentity, topics: Collection[str], *, after: int, also: Collection[tuple[str, str]]
    ) -> DurablesPart:
        assert peer == PEER
        found = [
            mark
            for mark, changed in zip(self.marks, self.changed, strict=True)
            if mark.topic in topics and (changed > after or (mark.topic, mark.name) in also)
        ]
        self.read += len(found)
        return DurablesPart(found, max(self.changed, default=0))


def told(teller: DurableTeller, now: int = 0, topics: Collection[str] = ("orders",)) -> list[DurableMark]:
    return [durable_of(one) for message in teller.messages(PEER, topics, now) for one in message.durables.durables]


def test_all_are_told_once_and_then_the_differences() -> None:
    other = MARK._replace(name="e")
    kept = Kept(MARK, other)
    teller = DurableTeller(kept)
    assert told(teller) == [MARK, other]
    assert told(teller) == []
    moved = other._replace(sequence=6)
    kept.change(1, moved)
    assert told(teller) == [moved]
    assert told(DurableTeller(kept)) == [MARK, moved], "another link begins anew"


def test_a_topic_that_comes_back_is_told_again() -> None:
    teller = DurableTeller(Kept(MARK))
    assert told(teller) == [MARK]
    assert told(teller, topics=()) == []
    assert told(teller) == [MARK]


def test_time_alone_is_told_for_a_while() -> None:
    kept = Kept(MARK)
    teller = DurableTeller(kept)
    sent = 0
    for second in range(100):
        kept.marks[0] = MARK._replace(swept_micros=MARK.swept_micros + second * SECOND, idle_micros=second)
        sent += len(told(teller, second * SECOND))
    assert sent == QUIET_MICROS // SECOND + 1


def test_idleness_alone_is_not_told() -> None:
    kept = Kept(MARK)
    teller = DurableTeller(kept)
    told(teller)
    kept.marks[0] = MARK._replace(idle_micros=SECOND)
    assert told(teller, SECOND) == []


def test_those_that_have_not_changed_for_a_while_are_not_looked_at() -> None:
    """There may be very many."""
    kept = Kept(*[MARK._replace(name=f"{number}") for number in range(50)])
    teller = DurableTeller(kept)
    told(teller)
    told(teller, QUIET_MICROS + 1)
    kept.read = 0
    kept.change(3, MARK._replace(name="3", sequence=9))
    assert len(told(teller, QUIET_MICROS + 2)) == kept.read == 1


def test_all_are_looked_at_when_the_topics_have_changed() -> None:
    """A topic may be whole by now that was not."""
    kept = Kept(MARK)
    teller = DurableTeller(kept)
    told(teller)
    told(teller, QUIET_MICROS + 1)
    kept.read, kept.topics_version = 0, 1
    assert told(teller, QUIET_MICROS + 2) == []
    assert kept.read == 1


def test_it_hurries_when_a_consumer_has_come_or_gone() -> None:
    kept = Kept(MARK)
    teller = DurableTeller(kept)
    assert hurries(teller)
    told(teller)
    assert not hurries(teller)
    kept.durables_version += 1
    assert hurries(teller)


def hurries(teller: DurableTeller) -> bool:
    return teller.hurries


def test_a_message_has_a_bounded_number() -> None:
    names = count()
    kept = Kept(*[MARK._replace(name=f"d{next(names)}") for _ in range(DURABLES_MAX + 1)])
    sizes = [len(message.durables.durables) for message in DurableTeller(kept).messages(PEER, ["orders"], 0)]
    assert sizes == [DURABLES_MAX, 1]


@pytest.mark.parametrize(
    "mark",
    [
        DurableMark("orders", "d"),
        DurableMark("orders", "d", buried=Stamp(3, "y"), removed=True),
        DurableMark(
            "orders",
            "desk/d",
            "/px > 1",
            MappingProxyType(DECLARED),
            Stamp(1, "x"),
            Stamp(2, "y"),
            rewinds=(Stamp(3, "y"), Stamp(2, "z")),
            sequence=0,
            swept_micros=7,
            idle_micros=8,
            consumer_since=9,
            forced=True,
        ),
        DurableMark("o", "d", declared=MappingProxyType({"retain_time_micros": 0, "retain_bytes": 0})),
        DurableMark("o", "d", declared=MappingProxyType({"delivery_limit": None, "replicated": False})),
    ],
)
def test_a_mark_is_the_same_on_the_other_side(mark: DurableMark) -> None:
    message = replication_pb2.ReplicatedDurable.FromString(durable_message(mark).SerializeToString())
    assert durable_of(message)._replace(declared=dict(durable_of(message).declared)) == mark._replace(
        declared=dict(mark.declared)
    )


# -- the receiver's side ----------------------------------------------------------------------------------------------


class Taking(ModelStore):
    """A store that keeps what it is told of durables."""

    def __init__(self) -> None:
        super().__init__("b", lambda: SECOND)
        self.heard: list[str] = []
        self.refusal: Refused | None = None

    def take_durables(self, name: str, marks: Sequence[DurableMark]) -> Counted:
        self.heard += [f"{name} tells of {mark.topic}" for mark in marks]
        return given(self.refusal or MergeCounts())

    def durables_left(self, name: str) -> None:
        self.heard.append(f"{name} left")


def received(store: Taking, *, permits: Callable[[str], bool] = lambda topic: True) -> Receiver:
    """A link from a, which has told of durables of two topics."""
    node = Node(store, NodeOptions(accept=("a",)), random.Random(1))
    receiver = node.accept(PeerCaller("a", permits))
    hello = replication_pb2.Hello(
        protocol=PROTOCOL, instance=replication_pb2.Instance(name="a", id="i", epoch="e"), topics_pattern=".*"
    )
    receiver.received(replication_pb2.ReplicateRequest(hello=hello))
    store.step()
    marks = [durable_message(MARK._replace(topic=topic)) for topic in ("orders", "secret")]
    durables = replication_pb2.Durables(durables=marks)
    receiver.received(replication_pb2.ReplicateRequest(durables=durables))
    return receiver


def test_topics_that_a_peer_announces_again_are_not_answered_again() -> None:
    """R15: each message of 10,000 topics cost some 100 ms of the event loop, however often it was repeated."""
    asked: list[str] = []

    def permits(topic: str) -> bool:
        asked.append(topic)
        return topic == "orders"

    class Still(Taking):
        topics_version = 1

    receiver = received(Still(), permits=permits)
    topics = [replication_pb2.ReplicatedTopic(name=name, message_type="json") for name in ("orders", "secret")]
    announced = replication_pb2.ReplicateRequest(topics=replication_pb2.Topics(topics=topics))
    asked.clear()
    receiver.received(announced)
    assert receiver.failure is None
    assert asked == ["orders", "secret"], "each is looked at once"
    for _ in range(3):
        receiver.received(announced)
    assert asked == ["orders", "secret"]
    receiver.received(replication_pb2.ReplicateRequest(topics=replication_pb2.Topics(topics=topics[:1])))
    assert asked == ["orders", "secret", "orders"]


def test_a_peer_tells_only_of_topics_that_it_may_send() -> None:
    """R11, F14: else it could acknowledge, rewind and delete what is not its business."""
    store = Taking()
    received(store, permits=lambda topic: topic == "orders")
    assert store.heard == ["a left", "a tells of orders"]


def test_the_consumers_of_a_peer_are_forgotten_at_the_end_of_its_link() -> None:
    """F15."""
    store = Taking()
    receiver = received(store)
    receiver.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "cut"))
    assert store.heard == ["a left", "a tells of orders", "a tells of secret", "a left"]


def test_a_store_that_takes_nothing_ends_the_link_so_that_all_is_told_again() -> None:
    store = Taking()
    store.refusal = Refused(types_pb2.ERROR_REASON_OVERLOADED, "full")
    assert received(store).failure is store.refusal
