"""The core of the publisher of many topics (rule C22)."""

from __future__ import annotations

import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import PermissionDenied, SowError, Unavailable
from sow_client._cells import Cells
from sow_client._publish_core import PublisherOptions, StreamDefaults
from sow_client._topics_core import CellCore, TopicCore

OPTIONS = PublisherOptions(2, 3, retry_for=10.0)


class Lane:
    """Notes what becomes of a topic."""

    def __init__(self) -> None:
        self.rested = 0
        self.failure: SowError | None = None
        self.left: list[float] = []

    def rests(self) -> None:
        self.rested += 1

    def fails(self, error: SowError) -> None:
        self.failure = error

    def leaves(self, delay: float) -> None:
        self.left.append(delay)


class World:
    """A cell with topics."""

    def __init__(self, *topics: str) -> None:
        self.cells = Cells("a:1", str)
        self.cell = CellCore("a", OPTIONS)
        self.cores = {}
        self.lanes = {}
        for topic in topics:
            core = self.cores[topic] = TopicCore(StreamDefaults(topic), OPTIONS, self.cells.way(topic))
            core.lane = self.lanes[topic] = Lane()
            self.cell.attach(core)

    def put(self, topic: str, *payloads: bytes) -> None:
        self.cores[topic].pending.extend(payloads)
        self.cell.pending.append(self.cores[topic])

    def sent(self) -> list[tuple[str, int, int]]:
        """What the stream sends: topic, first sequence, records."""
        found = []
        while (request := self.cell.next_request()) is not None:
            found.append((request.topic, request.publisher.first_sequence, len(request.payload)))
        return found

    def fail(self, error: SowError, now: float = 0.0) -> float:
        self.cell.rewind()
        return self.cell.retry_delay(error, now=now, jitter=0.0)


def applied(records: int) -> sow_pb2.PublishStreamResponse:
    return sow_pb2.PublishStreamResponse(applied=records)


def elsewhere() -> sow_pb2.PublishStreamResponse:
    details = {"cell": "b", "servers": "b:1", "from_cell": "a"}
    refusal = types_pb2.Refusal(reason=types_pb2.ERROR_REASON_TOPIC_ELSEWHERE, details=details)
    return sow_pb2.PublishStreamResponse(refusals=[refusal])


def test_one_stream_has_the_requests_of_all_topics_and_each_answer_is_of_its_own() -> None:
    world = World("x", "y")
    world.put("x", b"1", b"2", b"3")
    world.put("y", b"1")
    while world.cell.pending:
        world.cell.seal()
    assert world.sent() == [("x", 1, 2), ("y", 1, 1), ("x", 3, 1)]
    for records, topic in ((2, "x"), (1, "y"), (1, "x")):
        world.cell.acknowledge(applied(records))
        assert world.cell.answered is world.cores[topic]
    assert [world.cores[topic].applied for topic in "xy"] == [3, 1]
    assert not world.cell.has_requests
    with pytest.raises(SowError, match="no request"):
        world.cell.acknowledge(applied(1))


def test_what_is_sealed_is_bounded_for_all_topics_together() -> None:
    world = World("x", "y", "z", "w")
    for topic in world.cores:
        world.put(topic, b"1")
    sealed = 0
    while world.cell.pending and world.cell.room:
        world.cell.seal()
        sealed += 1
    assert sealed == OPTIONS.max_in_flight
    assert not any(core.room for core in world.cores.values())
    assert world.cell.sealed_requests == 0, "the one that is left has lingered, and does not begin anew"
    world.sent()
    world.cell.acknowledge(applied(1))
    assert world.cores["w"].room
    world.put("x", b"2")
    world.cell.seal()
    assert world.cell.sealed_requests == 1, "what came meanwhile lingers"
    assert world.cell.pending
    assert [lane.rested for lane in world.lanes.values()] == [1, 1, 1, 1]


def test_a_topic_that_lives_elsewhere_leaves_alone() -> None:
    world = World("x", "y")
    for topic in ("y", "x", "y"):
        world.put(topic, b"1")
        world.cell.seal()
    world.sent()
    world.cell.acknowledge(applied(1))
    _, error = world.cell.acknowledge(elsewhere())
    assert error is not None
    assert world.fail(error) == 0.0
    assert world.lanes["x"].left == [0.0]
    assert world.cores["x"].place.transport == "b:1"
    assert not world.cores["x"].room
    assert world.sent() == [("y", 2, 1)], "at its position: the cell may have it"
    other = CellCore("b", OPTIONS)
    world.cores["x"].pending.append(b"2")
    other.attach(world.cores["x"])
    world.cell = other
    other.seal()
    assert world.sent() == [("x", 1, 1), ("x", 2, 1)]
    assert other.unacknowledged == 2


def test_an_error_of_one_topic_ends_that_alone() -> None:
    """The server ends a stream with the error of the oldest request that it has not answered."""
    world = World("x", "y")
    for topic in "xy":
        world.put(topic, b"1")
        world.cell.seal()
    world.sent()
    denied = PermissionDenied("no", reason="PERMISSION_DENIED")
    assert world.fail(denied) == 0.0
    failure = world.lanes["x"].failure
    assert failure is not None
    assert failure.message.startswith("x: no; 0 records were acknowledged, 1 were not")
    assert failure.details["topic"] == "x"
    assert world.lanes["y"].failure is None
    assert world.sent() == [("y", 1, 1)]


def test_an_outage_ends_the_topics_that_have_waited_too_long() -> None:
    world = World("x", "y", "idle")
    gone = Unavailable("gone", reason="UNREACHABLE")
    world.put("x", b"1")
    world.cell.seal()
    world.put("x", b"2")
    assert 0.0 < world.fail(gone, now=0.0) <= 10.0
    world.put("y", b"1")
    assert world.fail(gone, now=9.0) > 0.0
    world.fail(gone, now=12.0)
    assert [*world.cell.pending] == [world.cores["y"]], "no stream is opened for a topic that has failed"
    failed = {topic: lane.failure is not None for topic, lane in world.lanes.items()}
    assert failed["x"]
    assert not failed["idle"]
    assert world.cell.cores.keys() == {topic for topic, has in failed.items() if not has}
