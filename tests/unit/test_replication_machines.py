"""A sender and a receiver by hand: the window, damaged and misplaced batches, silence, and the gate of REPLICATED."""

from __future__ import annotations

import random

from sow.v1 import replication_pb2, types_pb2
from sow_replication.node import Node
from sow_replication.options import SECOND, Mode, NodeOptions, PeerOptions
from sow_replication.ports import Refused
from sow_replication.receiver import Receiver
from sow_replication.sender import Sender
from tests.support.replica_world import ModelStore


class Pair:
    """An instance a that sends to b, and what went over the line."""

    def __init__(self, *, mode: Mode = Mode.ASYNC, messages_max: int = 32, read_bytes_max: int = 1) -> None:
        self.now = 1_700_000_000 * SECOND
        self.a = ModelStore("a", lambda: self.now, ["b"])
        self.b = ModelStore("b", lambda: self.now)
        for store in (self.a, self.b):
            store.create("T")
            store.step()
        options = NodeOptions(
            peers=(PeerOptions("b", "b", mode=mode),), flight_messages_max=messages_max, read_bytes_max=read_bytes_max
        )
        self.sending = Node(self.a, options, random.Random(1))
        self.receiving = Node(self.b, NodeOptions(accept=("a",)), random.Random(1))

    def connect(self) -> tuple[Sender, Receiver]:
        [out] = self.sending.due()
        sender, receiver = self.sending.dialled(out), self.receiving.accept()
        self.exchange(sender, receiver)
        return sender, receiver

    def sent(self, sender: Sender) -> list[replication_pb2.ReplicateRequest]:
        """All that the sender has to send without another acknowledgement."""
        requests = []
        while True:
            request = sender.next_message()
            read = sender.next_read()
            if read is not None:
                sender.took(read.run())
            if request is not None:
                requests.append(request)
            elif read is None:
                return requests

    def exchange(self, sender: Sender, receiver: Receiver) -> None:
        quiet = False
        while not quiet:
            requests = self.sent(sender)
            for request in requests:
                receiver.received(request)
            self.b.step()
            quiet = not requests
            while (response := receiver.next_message()) is not None:
                sender.received(response)
                quiet = False

    def publish(self, count: int) -> None:
        for number in range(count):
            self.a.publish("T", f"k{number}", "v")
        self.a.step()


def over(machine: Sender | Receiver) -> bool:
    return machine.failure is not None


def is_downgraded(pair: Pair) -> bool:
    return pair.sending.outgoing["b"].downgraded


def test_what_is_sent_and_not_acknowledged_is_bounded_and_goes_on_with_the_acknowledgement() -> None:
    pair = Pair(messages_max=3)
    sender, receiver = pair.connect()
    pair.publish(10)
    first = pair.sent(sender)
    assert [request.changes.upto for request in first] == [1, 2, 3]
    assert sender.next_read() is None, "one more is ready, and that is all"
    for request in first:
        receiver.received(request)
    pair.b.step()
    pair.exchange(sender, receiver)
    assert len(pair.b.records("T")) == 10
    assert sender.settled == pair.a.head() == 10
    assert sender.flight_bytes == 0


def test_several_batches_are_under_way_in_the_store_and_are_acknowledged_at_once() -> None:
    pair = Pair()
    sender, receiver = pair.connect()
    pair.publish(5)
    for request in pair.sent(sender):
        receiver.received(request)
    assert receiver.bytes_under_way > 0
    assert receiver.next_message() is None
    pair.b.step()
    response = receiver.next_message()
    assert response is not None
    assert response.acknowledged.sequence == 5
    assert receiver.next_message() is None


def test_a_damaged_batch_ends_the_link_and_the_next_one_sends_it_again() -> None:
    pair = Pair()
    sender, receiver = pair.connect()
    pair.publish(1)
    [request] = pair.sent(sender)
    request.changes.crc32 ^= 1
    receiver.received(request)
    assert receiver.failure is not None
    assert receiver.failure.reason == types_pb2.ERROR_REASON_BATCH_DAMAGED
    sender.fail(receiver.failure)
    pair.sending.closed(sender)
    assert pair.sending.due() == []
    pair.now += SECOND
    pair.connect()
    assert list(pair.b.records("T")) == ["k0"]


def test_changes_behind_the_cursor_are_not_applied_and_end_the_link() -> None:
    pair = Pair()
    sender, receiver = pair.connect()
    pair.publish(2)
    _, second = pair.sent(sender)
    receiver.received(second)
    assert receiver.failure is not None
    assert receiver.failure.reason == types_pb2.ERROR_REASON_BATCH_DAMAGED
    assert pair.b.records("T") == {}


def test_changes_that_were_applied_are_acknowledged_and_not_given_to_the_store() -> None:
    pair = Pair()
    sender, receiver = pair.connect()
    pair.publish(1)
    [request] = pair.sent(sender)
    receiver.received(request)
    pair.b.step()
    while receiver.next_message() is not None:
        pass
    receiver.received(request)
    assert not pair.b.busy()
    response = receiver.next_message()
    assert response is not None
    assert response.acknowledged.sequence == 1


def test_an_acknowledgement_of_what_was_not_sent_breaks_the_protocol() -> None:
    pair = Pair()
    sender, _ = pair.connect()
    sender.received(
        replication_pb2.ReplicateResponse(acknowledged=replication_pb2.Acknowledged(sequence=sender.settled + 1))
    )
    assert sender.failure is not None
    assert sender.failure.reason == types_pb2.ERROR_REASON_PROTOCOL_MISMATCH


def test_a_link_on_which_nothing_is_heard_is_closed_at_both_ends() -> None:
    pair = Pair()
    sender, receiver = pair.connect()
    pair.now += 10 * SECOND - 1
    sender.tick()
    receiver.tick()
    assert not over(sender)
    assert not over(receiver)
    pair.now += 1
    sender.tick()
    receiver.tick()
    assert over(sender)
    assert over(receiver)


def test_a_new_link_of_a_sender_takes_the_place_of_the_old_one() -> None:
    pair = Pair()
    sender, old = pair.connect()
    sender.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "gone"))
    pair.sending.closed(sender)
    pair.now += SECOND
    _, new = pair.connect()
    assert old.failure is not None
    assert new.streaming
    assert pair.receiving.incoming["a"].live is new


def test_replicated_waits_for_the_sync_peer_and_is_refused_once_it_was_away_for_too_long() -> None:
    pair = Pair(mode=Mode.SYNC)
    sender, receiver = pair.connect()
    pair.publish(1)
    answers: list[Refused | None] = []
    pair.sending.replicated("T", 1, answers.append)
    assert answers == []
    pair.exchange(sender, receiver)
    assert answers == [None]

    sender.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "gone"))
    pair.sending.closed(sender)
    pair.publish(1)
    pair.sending.replicated("T", 2, answers.append)
    pair.now += 5 * SECOND - 1
    pair.sending.tick()
    assert answers == [None]
    pair.now += 1
    pair.sending.tick()
    assert isinstance(answers[1], Refused)
    assert answers[1].reason == types_pb2.ERROR_REASON_REPLICATION_UNAVAILABLE
    assert is_downgraded(pair)
    pair.connect()
    assert not is_downgraded(pair)
    pair.sending.replicated("T", 2, answers.append)
    assert answers[2] is None


def test_replicated_does_not_count_a_peer_that_refuses_the_topic() -> None:
    pair = Pair(mode=Mode.SYNC)
    pair.b.drop_topic("T")
    pair.b.step()
    pair.connect()
    answers: list[Refused | None] = []
    pair.publish(1)
    pair.sending.replicated("T", 1, answers.append)
    assert isinstance(answers[0], Refused)
