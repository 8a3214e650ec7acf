"""A sender and a receiver by hand: the window, damaged and misplaced batches, silence, and the gate of REPLICATED."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest

from sow.v1 import replication_pb2, types_pb2
from sow_peering import PublisherPart, TopicAnswer, TopicKind
from sow_replication.node import Node
from sow_replication.options import SECOND, Mode, NodeOptions, PeerOptions
from sow_replication.ports import Counted, Refused
from sow_replication.receiver import Receiver
from sow_replication.sender import Sender
from tests.support.simulation.replica_local import given
from tests.support.simulation.replica_model import ModelStore


class Pair:
    """An instance a that sends to b, and the messages between them."""

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


def is_full(receiver: Receiver) -> bool:
    return receiver.full


def is_downgraded(pair: Pair) -> bool:
    return pair.sending.outgoing["b"].downgraded


def test_unacknowledged_messages_are_bounded_and_sending_continues_with_the_acknowledgement() -> None:
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
    pair.publish(3)
    assert len(pair.sent(sender)) == 3, "all of the flight is free again"


def test_several_batches_are_under_way_in_the_store_and_are_acknowledged_at_once() -> None:
    pair = Pair()
    sender, receiver = pair.connect()
    pair.publish(5)
    for request in pair.sent(sender):
        receiver.received(request)
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


def test_an_acknowledgement_of_unsent_changes_breaks_the_protocol() -> None:
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
    pair.sending.gates.replicated("T", 1).then(answers.append)
    assert answers == []
    pair.exchange(sender, receiver)
    assert answers == [None]

    sender.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "gone"))
    pair.sending.closed(sender)
    pair.publish(1)
    pair.sending.gates.replicated("T", 2).then(answers.append)
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
    pair.sending.gates.replicated("T", 2).then(answers.append)
    assert answers[2] is None


def test_replicated_does_not_count_a_peer_that_refuses_the_topic() -> None:
    pair = Pair(mode=Mode.SYNC)
    pair.b.drop_topic("T")
    pair.b.step()
    pair.connect()
    answers: list[Refused | None] = []
    pair.publish(1)
    pair.sending.gates.replicated("T", 1).then(answers.append)
    assert isinstance(answers[0], Refused)


def lose(pair: Pair, sender: Sender, receiver: Receiver) -> None:
    """Cuts a link, and waits until the next one is due."""
    why = Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "gone")
    receiver.fail(why)
    sender.fail(why)
    pair.sending.closed(sender)
    pair.now += SECOND


def test_a_sync_peer_that_keeps_up_is_waited_for_again_though_there_is_always_something_under_way() -> None:
    pair = Pair(mode=Mode.SYNC)
    sender, receiver = pair.connect()
    lose(pair, sender, receiver)
    pair.publish(1)
    pair.now += 5 * SECOND
    pair.sending.tick()
    assert is_downgraded(pair)
    [out] = pair.sending.due()
    sender, receiver = pair.sending.dialled(out), pair.receiving.accept()
    for _ in range(20):
        pair.now += SECOND // 100
        requests = pair.sent(sender)
        pair.publish(1)  # while they are on their way
        for request in requests:
            receiver.received(request)
        pair.b.step()
        while (response := receiver.next_message()) is not None:
            sender.received(response)
        assert sender.settled < pair.a.head(), "otherwise the test shows nothing"
    assert not is_downgraded(pair)


def test_a_sync_peer_that_is_too_late_to_be_waited_for_stays_downgraded() -> None:
    pair = Pair(mode=Mode.SYNC)
    sender, receiver = pair.connect()
    lose(pair, sender, receiver)
    pair.publish(1)
    pair.now += 5 * SECOND
    pair.sending.tick()
    [out] = pair.sending.due()
    sender, receiver = pair.sending.dialled(out), pair.receiving.accept()
    for _ in range(20):
        requests = pair.sent(sender)
        pair.publish(1)
        pair.now += 2 * SECOND
        for request in requests:
            receiver.received(request)
        pair.b.step()
        while (response := receiver.next_message()) is not None:
            sender.received(response)
    assert sender.streaming
    assert is_downgraded(pair)


def test_a_topic_that_is_deleted_while_it_is_seeded_is_seeded_when_it_comes_back() -> None:
    pair = Pair()
    pair.publish(1)
    [out] = pair.sending.due()
    sender, receiver = pair.sending.dialled(out), pair.receiving.accept()
    for request in pair.sent(sender):
        receiver.received(request)
    pair.b.step()
    welcome = receiver.next_message()
    assert welcome is not None
    sender.received(welcome)
    read = sender.next_read()
    assert read is not None
    pair.a.drop_topic("T")
    pair.a.step()
    try:
        sender.took(read.run())
    except Refused as refused:
        sender.took(refused)
    pair.a.create("T")
    pair.publish(1)
    for _ in range(3):
        pair.now += SECOND
        pair.sending.tick()
        pair.receiving.tick()
        pair.exchange(sender, receiver)
    assert list(pair.b.records("T")) == ["k0"]
    assert not sender.link_topics.seeding
    assert sender.settled == pair.a.head()


def answers_of(pair: Pair, sequence: int, topic: str = "T") -> list[Refused | None]:
    answers: list[Refused | None] = []
    pair.sending.gates.replicated(topic, sequence).then(answers.append)
    return answers


def test_acknowledgements_without_the_topic_do_not_answer_replicated_of_a_retry() -> None:
    pair = Pair(mode=Mode.SYNC)
    pair.b.drop_topic("T")
    pair.a.create("U")
    pair.b.create("U")
    pair.a.step()
    pair.b.step()
    sender, receiver = pair.connect()
    pair.publish(1)
    pair.a.publish("U", "k", "v")
    pair.a.step()
    pair.exchange(sender, receiver)
    assert sender.settled == pair.a.head(), "it lacks none of the topics that it takes"
    pair.sending.tick()
    lose(pair, sender, receiver)
    assert answers_of(pair, pair.a.head()) == [], "or refused, once it is known that it is for good"
    pair.b.create("T")
    pair.b.step()
    [out] = pair.sending.due()
    sender, receiver = pair.sending.dialled(out), pair.receiving.accept()
    for request in pair.sent(sender):
        receiver.received(request)
    pair.b.step()
    while (response := receiver.next_message()) is not None:
        sender.received(response)
    assert sender.link_topics.seeding
    waiting = answers_of(pair, pair.a.head())
    assert waiting == []
    pair.exchange(sender, receiver)
    assert waiting == [None]
    assert list(pair.b.records("T")) == ["k0"]


def test_replicated_after_a_restart_waits_for_the_link_as_the_peer_may_not_take_the_topic() -> None:
    pair = Pair(mode=Mode.SYNC)
    sender, receiver = pair.connect()
    pair.publish(1)
    pair.exchange(sender, receiver)
    pair.sending.tick()
    lose(pair, sender, receiver)
    pair.sending = Node(pair.a, pair.sending.options, random.Random(1))
    waiting = answers_of(pair, 1)
    assert waiting == []
    pair.connect()
    assert waiting == [None]


def test_replicated_is_answered_by_a_peer_that_went_away_after_it_had_the_write() -> None:
    pair = Pair(mode=Mode.SYNC)
    sender, receiver = pair.connect()
    pair.publish(1)
    pair.exchange(sender, receiver)
    pair.sending.tick()
    lose(pair, sender, receiver)
    assert answers_of(pair, 1) == [None]


def test_acknowledgements_of_a_link_with_another_pattern_do_not_count() -> None:
    pair = Pair(mode=Mode.SYNC)
    sender, receiver = pair.connect()
    pair.publish(1)
    pair.exchange(sender, receiver)
    pair.sending.tick()
    assert pair.a.peer("b").acknowledged == 1
    lose(pair, sender, receiver)
    peer = PeerOptions("b", "b", topics="T", mode=Mode.SYNC)
    pair.sending = Node(pair.a, NodeOptions(peers=(peer,)), random.Random(1))
    [out] = pair.sending.due()
    sender, receiver = pair.sending.dialled(out), pair.receiving.accept()
    for request in pair.sent(sender):
        receiver.received(request)
    pair.b.step()
    while (response := receiver.next_message()) is not None:
        sender.received(response)
    assert sender.link_topics.seeding
    assert pair.a.peer("b").acknowledged == 0
    pair.exchange(sender, receiver)
    pair.sending.tick()
    assert pair.a.peer("b").acknowledged == 1


def test_replicated_is_answered_at_once_when_nothing_of_the_write_is_for_the_peer() -> None:
    pair = Pair(mode=Mode.SYNC)
    sender, receiver = pair.connect()
    pair.publish(1)
    pair.exchange(sender, receiver)
    pair.a.publish("T", "k", "v", ttl_micros=1)
    pair.a.step()
    pair.exchange(sender, receiver)
    pair.now += SECOND
    pair.a.sweep()
    pair.a.step()
    waiting = answers_of(pair, 3)
    assert waiting == []
    assert not any(request.HasField("changes") for request in pair.sent(sender)), "expiries are not sent"
    assert waiting == [None]


def test_a_link_that_ends_each_time_before_anything_was_acknowledged_is_dialled_less_and_less() -> None:
    pair = Pair()
    waits = []
    pair.publish(1)
    for _ in range(12):
        [out] = pair.sending.due()
        sender, receiver = pair.sending.dialled(out), pair.receiving.accept()
        for request in pair.sent(sender):
            receiver.received(request)
        pair.b.step()
        while (response := receiver.next_message()) is not None:
            sender.received(response)
        assert sender.streaming
        sender.fail(Refused(types_pb2.ERROR_REASON_CLOCK_SKEW, "one of the clocks is wrong"))
        receiver.fail(Refused(types_pb2.ERROR_REASON_CLOCK_SKEW, "one of the clocks is wrong"))
        pair.sending.closed(sender)
        waits.append(out.next_at_micros - pair.now)
        pair.now = out.next_at_micros
    assert waits[-1] >= pair.sending.options.backoff_max_micros // 2
    sender, receiver = pair.connect()
    pair.publish(1)
    pair.exchange(sender, receiver)
    sender.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "gone"))
    pair.sending.closed(sender)
    [out] = pair.sending.outgoing.values()
    assert out.next_at_micros - pair.now <= pair.sending.options.backoff_min_micros


def test_a_receiver_that_does_not_read_as_its_store_is_slow_does_not_take_that_for_silence() -> None:
    pair = Pair()
    pair.receiving = Node(pair.b, NodeOptions(accept=("a",), flight_bytes_max=1), random.Random(1))
    sender, receiver = pair.connect()
    pair.publish(3)
    for request in pair.sent(sender):
        receiver.received(request)
    assert is_full(receiver)
    for _ in range(30):
        pair.now += SECOND
        pair.receiving.tick()
    assert not over(receiver)
    pair.b.step()
    assert not is_full(receiver)
    pair.now += 9 * SECOND
    pair.receiving.tick()
    assert not over(receiver)
    pair.now += SECOND
    pair.receiving.tick()
    assert over(receiver)


def test_a_stream_without_a_hello_is_closed() -> None:
    pair = Pair()
    receiver = pair.receiving.accept()
    pair.now += 10 * SECOND
    pair.receiving.tick()
    assert over(receiver)


def test_a_link_that_fails_at_a_tick_ends_and_the_others_are_looked_at() -> None:
    pair = Pair()
    _, receiver = pair.connect()
    other = pair.receiving.accept()

    def breaks() -> None:
        raise OSError("the disk")

    receiver.tick = breaks  # type: ignore[method-assign]  # whatever it meets
    pair.now += 10 * SECOND
    pair.receiving.tick()
    assert receiver.failure is not None
    assert receiver.failure.reason == types_pb2.ERROR_REASON_INTERNAL
    assert over(other)


def test_an_acknowledgement_costs_only_the_waiting_writes_that_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(mode=Mode.SYNC)
    sender, receiver = pair.connect()
    answers: list[Refused | None] = []
    for sequence in range(1, 1001):
        pair.sending.gates.replicated("T", sequence).then(answers.append)
    pair.sending.gates.replicated("T", 2)  # the caller of this one has gone
    looks: list[str] = []
    shares = pair.a.shares

    def counted(pattern: str, topic: str) -> bool:
        looks.append(topic)
        return shares(pattern, topic)

    monkeypatch.setattr(pair.a, "shares", counted)
    pair.publish(4)
    pair.exchange(sender, receiver)
    assert answers == [None] * 4
    assert len(looks) < 50


def test_the_end_of_a_seed_looks_at_one_topic_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    for store in (pair.a, pair.b):
        for number in range(30):
            store.create(f"T{number}")
        store.step()
    looks: list[int] = []
    answers = pair.b.answers

    def answered(name: str, topics: Sequence[TopicKind]) -> list[TopicAnswer]:
        looks.append(len(topics))
        return answers(name, topics)

    monkeypatch.setattr(pair.b, "answers", answered)
    sender, _ = pair.connect()
    assert not sender.link_topics.seeding
    assert looks == [31], "at Hello"


def test_a_purge_that_fails_each_time_is_logged_once() -> None:
    pair = Pair()
    told: list[str] = []
    pair.sending.observe = lambda event, fields: told.append(event)

    def refuses(*_: object, **__: object) -> Counted:
        return given(Refused(types_pb2.ERROR_REASON_STORE_FAILED, "the disk"))

    pair.a.purge = refuses  # type: ignore[method-assign]  # the store has failed
    for _ in range(100):
        pair.now += SECOND
        pair.sending.tick()
    assert told.count("purge_failed") == 1


def test_publishers_are_not_told_again_because_the_receiver_lacks_a_new_topic() -> None:
    """F11. Each topic that was created at the sender alone, as a first publish does, had all publishers told again."""
    pair = Pair()
    told: list[frozenset[str]] = []
    publishers = pair.a.publishers

    def noted(topics: Collection[str], after_id: str) -> PublisherPart:
        told.append(frozenset(topics))
        return publishers(topics, after_id)

    pair.a.publishers = noted  # type: ignore[method-assign]  # a spy
    sender, receiver = pair.connect()
    assert told == [{"T"}]
    pair.a.create("U")
    pair.a.step()
    sender.tick()
    pair.exchange(sender, receiver)
    assert sender.link_topics.refusals() == ["U"]
    assert told == [{"T"}]
    pair.b.create("U")
    pair.b.step()
    receiver.tick()
    pair.exchange(sender, receiver)
    assert told == [{"T"}, {"T", "U"}]
    pair.b.drop_topic("T")
    pair.b.step()
    receiver.tick()
    pair.exchange(sender, receiver)
    assert told[2:] == [{"U"}], "changes may have been left out, and with them publishers of other topics"


@pytest.mark.slow
def test_a_sender_whose_messages_have_no_changes_fills_the_link_too() -> None:
    """A peer sent positions with thousands of marks and no chunk. Chunks alone were counted, so the driver read on and
    on, and all of it waited for the writer."""
    pair = Pair()
    _, receiver = pair.connect()
    marks = [
        replication_pb2.PublisherMark(publisher_id=f"p{number}" * 50, epoch=1, token=1, first=1, last=1)
        for number in range(10_000)
    ]
    sent = 0
    while not receiver.full and receiver.failure is None:
        sent += 1
        assert sent <= 10, "each has some 3 MB, and the bound is at 16 MiB"
        changes = replication_pb2.Changes(after=receiver.cursor, upto=receiver.cursor + sent, publishers=marks)
        receiver.received(replication_pb2.ReplicateRequest(changes=changes))
    assert is_full(receiver)
    assert receiver.failure is None
    pair.b.step()
    assert not is_full(receiver)


def test_a_sender_that_does_not_read_its_answers_fills_the_link() -> None:
    pair = Pair()
    _, receiver = pair.connect()
    names = iter(range(100_000))
    for _ in range(3):
        topics = [
            replication_pb2.ReplicatedTopic(name=f"t{next(names)}", key=["/id"], message_type="json")
            for _ in range(500)
        ]
        assert not is_full(receiver)
        receiver.received(replication_pb2.ReplicateRequest(topics=replication_pb2.Topics(topics=topics)))
    assert is_full(receiver)
    while receiver.next_message() is not None:
        pass
    assert not is_full(receiver)
