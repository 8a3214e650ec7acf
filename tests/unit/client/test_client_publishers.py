"""The publishers of both clients, against a scripted server."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import (
    Ack,
    Cancelled,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    PermissionDenied,
    Publisher,
    PublishFailed,
    Refusal,
    ResourceExhausted,
)
from tests.support.fakes.called_server import (
    Server,
    loop,
    refused,
    script,
    server,
    status_details,
)
from tests.support.fakes.scripted import SECONDS_MAX

__all__ = ["loop", "script", "server"]  # fixtures


def acknowledged(applied: int, *refusals: types_pb2.Refusal, duplicates: int = 0) -> sow_pb2.PublishStreamResponse:
    return sow_pb2.PublishStreamResponse(
        applied=applied, duplicates=duplicates, refusals=refusals, durability=types_pb2.DURABILITY_FSYNC
    )


def test_a_publisher_sends_the_epoch_that_it_is_given_zero_too(server: Server) -> None:
    """The blocking client once sent 1 for 0, and so wrote in the epoch of another publisher."""

    def publish() -> None:
        with server.client.publisher("orders", publisher_id="loader", epoch=0) as publisher:
            publisher.publish({"id": 1})

    call = server.begin(publish)
    rpc = server.publish_stream()
    request = rpc.take_request()
    rpc.send_response(acknowledged(1))
    rpc.requests_closed()
    rpc.terminate((), grpc.StatusCode.OK, "")
    call.result(SECONDS_MAX)
    assert (request.publisher.publisher_id, request.publisher.publisher_epoch) == ("loader", 0)


def test_publisher_sends_batches_and_closes_the_stream(server: Server) -> None:
    acks: list[Ack] = []

    def publish() -> Publisher:
        with server.client.publisher("orders", ttl="30s", batch_records=2, on_ack=acks.append) as publisher:
            for number in range(3):
                publisher.publish({"id": number})
        return publisher

    call = server.begin(publish)
    rpc = server.publish_stream()
    first = rpc.take_request()
    rpc.send_response(acknowledged(2))
    second = rpc.take_request()
    rpc.send_response(acknowledged(1))
    rpc.requests_closed()
    rpc.terminate((), grpc.StatusCode.OK, "")
    publisher = call.result(SECONDS_MAX)
    assert list(first.payload) == [b'{"id":0}', b'{"id":1}']
    assert list(second.payload) == [b'{"id":2}']
    assert first.lifetime.ttl_micros == 30_000_000
    assert [request.publisher.first_sequence for request in (first, second)] == [1, 3]
    assert (publisher.applied, publisher.acknowledged, publisher.unacknowledged) == (3, 3, 0)
    assert [ack.applied for ack in acks] == [2, 1]
    with pytest.raises(Cancelled):
        publisher.publish(b"late")
    publisher.close()


def test_publisher_of_deltas(server: Server) -> None:
    publisher = server.client.publisher("orders", delta=True, unset=["/note"])
    publisher.publish({"id": 1})
    rpc = server.publish_stream()
    request = rpc.take_request()
    assert (request.delta, list(request.unset_paths)) == (True, ["/note"])
    rpc.send_response(acknowledged(1))
    publisher.flush()
    rpc.terminate((), grpc.StatusCode.OK, "")
    publisher.close()


def test_publisher_sends_lingering_records_by_itself(server: Server) -> None:
    publisher = server.client.publisher("orders", linger=0.0)
    publisher.publish(b"{}")
    rpc = server.publish_stream()
    assert list(rpc.take_request().payload) == [b"{}"]
    rpc.send_response(acknowledged(1))
    publisher.flush()
    publisher.publish(b"[]")
    assert list(rpc.take_request().payload) == [b"[]"]
    rpc.send_response(acknowledged(1))
    publisher.flush()
    rpc.terminate((), grpc.StatusCode.OK, "")
    publisher.close()


def test_publisher_raises_refusals_on_flush_with_their_place_in_the_stream(server: Server) -> None:
    publisher = server.client.publisher("orders", batch_records=2, linger=60)

    def publish() -> None:
        for key in ("a", "b", "c"):
            publisher.publish(b"{}", key=key, ttl="1s")
        publisher.flush()

    call = server.begin(publish)
    rpc = server.publish_stream()
    assert list(rpc.take_request().lifetime_micros) == [1_000_000, 1_000_000]
    rpc.send_response(acknowledged(2))
    assert list(rpc.take_request().key) == ["c"]
    rpc.send_response(acknowledged(0, refused("LIFETIME_REJECTED")))
    with pytest.raises(PublishFailed) as caught:
        call.result(SECONDS_MAX)
    assert caught.value.refusals == (Refusal(2, "LIFETIME_REJECTED", "no"),)
    rpc.terminate((), grpc.StatusCode.OK, "")
    publisher.close()  # reported once


def test_a_publisher_of_many_topics_has_one_stream_and_a_topic_fails_alone(server: Server) -> None:
    """A status ends the stream: it is about the oldest request, and what is left goes on another stream."""
    acks: list[tuple[str, int]] = []

    def settled(topic: str, ack: Ack) -> None:
        acks.append((topic, ack.applied))

    publisher = server.client.topics_publisher(linger=60, on_ack=settled)
    for topic in ("orders", "secret", "trades"):
        publisher.publish(topic, b"{}")
    call = server.begin(publisher.flush)
    rpc = server.publish_stream()
    requests = [rpc.take_request() for _ in range(3)]
    assert [request.topic for request in requests] == ["orders", "secret", "trades"]
    assert len({request.publisher.publisher_id for request in requests}) == 3
    rpc.send_response(acknowledged(1))
    denied = status_details(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED", "no")
    rpc.terminate(denied, grpc.StatusCode.PERMISSION_DENIED, "no")
    rpc = server.publish_stream()
    assert rpc.take_request().topic == "trades"
    rpc.send_response(acknowledged(1))
    with pytest.raises(PermissionDenied, match=r"^secret: no; 0 records were acknowledged, 1 were not") as caught:
        call.result(SECONDS_MAX)
    assert caught.value.details["topic"] == "secret"
    assert acks == [("orders", 1), ("trades", 1)]
    with pytest.raises(PermissionDenied):
        publisher.publish("secret", b"{}")
    publisher.publish("orders", b"{}")
    publisher.abort()
    assert (publisher.applied, publisher.unacknowledged) == (2, 2)


def test_a_callback_that_raises_ends_a_publisher_of_many_topics(server: Server) -> None:
    def raises(topic: str, ack: Ack) -> None:
        raise LookupError(topic)

    publisher = server.client.topics_publisher(on_ack=raises)
    publisher.publish("orders", b"{}")
    call = server.begin(publisher.flush)
    rpc = server.publish_stream()
    rpc.take_request()
    rpc.send_response(acknowledged(1))
    with pytest.raises(LookupError, match="orders"):
        call.result(SECONDS_MAX)
    with pytest.raises(LookupError):
        publisher.publish("trades", b"{}")
    publisher.abort()


def test_publisher_passes_refusals_to_its_callback(server: Server) -> None:
    refusals: list[Refusal] = []

    def publish() -> int:
        with server.client.publisher("orders", on_refusal=refusals.append) as publisher:
            publisher.publish(b"{")
        return publisher.refused

    call = server.begin(publish)
    rpc = server.publish_stream()
    rpc.take_request()
    rpc.send_response(acknowledged(0, refused("PAYLOAD_MALFORMED")))
    rpc.requests_closed()
    rpc.terminate((), grpc.StatusCode.OK, "")
    assert call.result(SECONDS_MAX) == 1
    assert refusals == [Refusal(0, "PAYLOAD_MALFORMED", "no")]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishers reconnect without waiting."""
    monkeypatch.setattr("sow_client._statuses.BACKOFF_SECONDS_FIRST", 0.0)


@pytest.mark.usefixtures("at_once")
def test_publisher_opens_a_cut_stream_again_and_resends_unacknowledged_records(server: Server) -> None:
    def publish() -> Publisher:
        with server.client.publisher("orders", batch_records=1, retry_for=SECONDS_MAX) as publisher:
            for number in range(3):
                publisher.publish(str(number))
        return publisher

    call = server.begin(publish)
    rpc = server.publish_stream()
    for _ in range(3):
        rpc.take_request()
    rpc.send_response(acknowledged(1))
    rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "Socket closed")
    again = server.publish_stream()
    sequences: list[int] = []
    while 3 not in sequences:
        sequences.append(again.take_request().publisher.first_sequence)
    for _ in sequences:
        again.send_response(acknowledged(0, duplicates=1))
    again.requests_closed()
    again.terminate((), grpc.StatusCode.OK, "")
    publisher = call.result(SECONDS_MAX)
    # The answer to the first may be lost with the connection: then it is sent again, too.
    assert sequences in ([2, 3], [1, 2, 3])
    assert publisher.acknowledged == 3
    assert publisher.applied + publisher.duplicates == 3


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("reason", ["OVERLOADED", "BACKLOG_QUOTA_EXCEEDED"])
def test_publisher_tries_again_when_the_server_is_at_a_limit_that_passes(server: Server, reason: str) -> None:
    def publish() -> int:
        with server.client.publisher("orders", retry_for=SECONDS_MAX) as publisher:
            publisher.publish("1")
            publisher.publish("2")
        return publisher.applied

    call = server.begin(publish)
    rpc = server.publish_stream()
    rpc.take_request()
    rpc.send_response(acknowledged(1, refused(reason, index=1)))
    again = server.publish_stream()
    request = again.take_request()
    assert (request.publisher.first_sequence, list(request.payload)) == (2, [b"2"])
    again.send_response(acknowledged(1))
    again.requests_closed()
    again.terminate((), grpc.StatusCode.OK, "")
    assert call.result(SECONDS_MAX) == 2


def test_publisher_raises_a_full_disk_at_once_and_says_how_far_it_came(server: Server) -> None:
    publisher = server.client.publisher("orders", batch_records=1)

    def publish() -> None:
        publisher.publish("1")
        publisher.publish("2")
        publisher.flush()

    call = server.begin(publish)
    rpc = server.publish_stream()
    rpc.take_request()
    rpc.send_response(acknowledged(1))
    rpc.take_request()
    rpc.send_response(acknowledged(0, refused("DISK_FULL")))
    with pytest.raises(ResourceExhausted) as caught:
        call.result(SECONDS_MAX)
    assert caught.value.reason == "DISK_FULL"
    assert caught.value.details["acknowledged"] == "1"
    assert caught.value.details["unacknowledged"] == "1"
    with pytest.raises(ResourceExhausted):  # _publish_core [5]
        publisher.publish("3")
    with pytest.raises(ResourceExhausted):
        publisher.close()


def test_publisher_that_is_fenced_stops(server: Server) -> None:
    def publish() -> Publisher:
        publisher = server.client.publisher("orders", publisher_id="loader")
        publisher.publish("1")
        return publisher

    call = server.begin(publish)
    request = server.answer("OpenPublisher", sow_pb2.OpenPublisherResponse(publisher_epoch=5))
    publisher = call.result(SECONDS_MAX)
    assert request.publisher_id == "loader"
    rpc = server.publish_stream()
    position = rpc.take_request().publisher
    assert (position.publisher_id, position.publisher_epoch, position.first_sequence) == ("loader", 5, 1)
    code = grpc.StatusCode.FAILED_PRECONDITION
    rpc.terminate(status_details(code, "PUBLISHER_FENCED", "a newer one"), code, "a newer one")
    with pytest.raises(FailedPrecondition) as caught:
        publisher.flush()
    assert caught.value.reason == "PUBLISHER_FENCED"
    publisher.abort()


def test_publisher_raises_the_error_of_a_callback(server: Server) -> None:
    def fail(ack: Ack) -> None:
        raise RuntimeError("the callback's own mistake")

    publisher = server.client.publisher("orders", on_ack=fail)
    publisher.publish("1")
    rpc = server.publish_stream()
    rpc.take_request()
    rpc.send_response(acknowledged(1))
    with pytest.raises(RuntimeError, match="own mistake"):
        publisher.flush()
    publisher.abort()


def test_publisher_that_was_aborted_does_not_wait_for_answers(server: Server) -> None:
    publisher = server.client.publisher("orders")
    publisher.publish("1")
    publisher.abort()
    with pytest.raises(Cancelled):
        publisher.flush()


def test_publisher_refuses_a_document_that_fits_in_no_request(server: Server) -> None:
    publisher = server.client.publisher("orders")
    with pytest.raises(InvalidArgument) as caught:
        publisher.publish(bytes(16 * 1024 * 1024 + 1))
    assert caught.value.reason == "PAYLOAD_TOO_LARGE"
    publisher.close()


def test_an_answer_that_does_not_add_up_stops_the_publisher(server: Server) -> None:
    publisher = server.client.publisher("orders")
    publisher.publish("1")
    rpc = server.publish_stream()
    rpc.take_request()
    rpc.send_response(acknowledged(2))
    with pytest.raises(InternalError):
        publisher.flush()
    publisher.abort()


def test_an_error_inside_the_block_is_raised_and_published_records_are_sent(server: Server) -> None:
    def publish() -> None:
        with server.client.publisher("orders") as publisher:
            publisher.publish("1")
            raise KeyError("the user's own")

    call = server.begin(publish)
    rpc = server.publish_stream()
    assert list(rpc.take_request().payload) == [b"1"]
    rpc.send_response(acknowledged(0, refused("PAYLOAD_MALFORMED")))
    rpc.requests_closed()
    rpc.terminate((), grpc.StatusCode.OK, "")
    with pytest.raises(KeyError) as caught:
        call.result(SECONDS_MAX)
    assert "1 record was refused" in caught.value.__notes__[0]
