"""Replicated durables on a link: what is told, and when (sow_replication.durables [1] to [3]); their messages."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from types import MappingProxyType

import pytest

from sow.v1 import replication_pb2
from sow_peering import DurableMark, InstanceIdentity, Stamp
from sow_replication.durables import DURABLES_MAX, QUIET_MICROS, DurableTeller
from sow_replication.messages import durable_message, durable_of
from sow_replication.options import SECOND

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
        self.durables_version = 0

    def durables(self, peer: InstanceIdentity, topics: Collection[str]) -> list[DurableMark]:
        assert peer == PEER
        return [mark for mark in self.marks if mark.topic in topics]


def told(teller: DurableTeller, now: int = 0, topics: Collection[str] = ("orders",)) -> list[DurableMark]:
    return [durable_of(one) for message in teller.messages(PEER, topics, now) for one in message.durables.durables]


def test_all_are_told_once_and_then_the_differences() -> None:
    other = MARK._replace(name="e")
    kept = Kept(MARK, other)
    teller = DurableTeller(kept)
    assert told(teller) == [MARK, other]
    assert told(teller) == []
    kept.marks[1] = moved = other._replace(sequence=6)
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
            generation=Stamp(3, "z"),
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
