"""What a link does not expect: messages that end it with a reason, and answers about what has left it meanwhile."""

from __future__ import annotations

from sow.v1 import replication_pb2, types_pb2
from sow_replication.options import SECOND
from sow_replication.ports import Refused
from sow_replication.reads import SeedRead
from sow_replication.receiver import Receiver
from sow_replication.sender import Sender
from tests.unit.replication.test_replication_machines import Pair

MISMATCH = types_pb2.ERROR_REASON_PROTOCOL_MISMATCH
FAILED = Refused(types_pb2.ERROR_REASON_STORE_FAILED, "the disk")
Response = replication_pb2.ReplicateResponse


def ended(machine: Sender | Receiver) -> Refused:
    """Why a link has ended."""
    assert machine.failure is not None
    return machine.failure


def greeted(pair: Pair) -> tuple[Sender, Receiver, Response]:
    """A link until the receiver's welcome, which has not arrived."""
    [out] = pair.sending.due()
    sender, receiver = pair.sending.dialled(out), pair.receiving.accept()
    for request in pair.sent(sender):
        receiver.received(request)
    pair.b.step()
    welcome = receiver.next_message()
    assert welcome is not None
    return sender, receiver, welcome


def seeding(pair: Pair) -> tuple[Sender, SeedRead]:
    """A sender that reads the first part of a seed of T."""
    pair.publish(3)
    sender, _, welcome = greeted(pair)
    sender.received(welcome)
    read = sender.next_read()
    assert isinstance(read, SeedRead)
    return sender, read


# ---- messages ----


def test_an_acknowledgement_before_the_welcome_and_a_second_welcome_end_the_link() -> None:
    sender, _, welcome = greeted(Pair())
    sender.received(Response(acknowledged=replication_pb2.Acknowledged(sequence=0)))
    assert (ended(sender).reason, ended(sender).message) == (MISMATCH, "acknowledged was not expected")
    sender.received(welcome)
    assert ended(sender).message == "acknowledged was not expected", "a link that has ended hears nothing"
    other, _, welcome = greeted(Pair())
    other.received(welcome)
    assert other.failure is None
    other.received(welcome)
    assert (ended(other).reason, ended(other).message) == (MISMATCH, "welcome was not expected")


def test_a_cursor_ahead_of_the_journal_ends_the_link() -> None:
    pair = Pair()
    pair.publish(2)
    sender, _, welcome = greeted(pair)
    welcome.welcome.cursor = pair.a.head() + 1
    sender.received(welcome)
    assert ended(sender).reason == MISMATCH
    assert ended(sender).message == "cursor: 3 is ahead of the journal"


def test_messages_that_are_malformed_end_the_link_at_either_end() -> None:
    sender, receiver = Pair().connect()
    sender.received(Response(acknowledged=replication_pb2.Acknowledged(sequence=-1)))
    assert ended(sender).message.startswith("acknowledged.sequence: ")
    receiver.received(
        replication_pb2.ReplicateRequest(seed=replication_pb2.Seed(topic="T", first=True, purged_version=-1))
    )
    assert ended(receiver).message.startswith("seed.purged_version: ")


def test_an_answer_about_a_topic_that_has_left_the_link_changes_nothing() -> None:
    pair = Pair()
    sender, _ = pair.connect()
    gone = replication_pb2.TopicAnswer(topic="gone", state=replication_pb2.TOPIC_STATE_WANTED)
    sender.received(Response(topic=gone))
    assert sender.failure is None
    assert not sender.link_topics.seeding


# ---- reads ----


def test_a_read_that_fails_ends_the_link_with_its_reason() -> None:
    pair = Pair()
    sender, _ = pair.connect()
    pair.publish(1)
    assert sender.next_read() is not None
    sender.took(FAILED)
    assert ended(sender) == FAILED
    seeder, _ = seeding(Pair())
    seeder.took(FAILED)
    assert ended(seeder) == FAILED


def test_a_read_that_ends_after_its_link_changes_nothing() -> None:
    sender, read = seeding(Pair())
    sender.fail(FAILED)
    sender.took(read.run())
    assert ended(sender) == FAILED
    assert sender.next_message() is None


def test_a_part_of_a_seed_of_a_topic_that_has_left_is_not_sent() -> None:
    pair = Pair()
    sender, read = seeding(pair)
    part = read.run()
    pair.a.drop_topic("T")
    pair.a.step()
    pair.now += SECOND
    pair.sending.tick()
    sender.took(part)
    kinds = [request.WhichOneof("message") for request in pair.sent(sender)]
    assert "seed" not in kinds
    assert "topics" in kinds, "the receiver is told the topics that are left"
    assert sender.failure is None
    assert not sender.link_topics.seeding
