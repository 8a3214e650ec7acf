"""Publishing, touching and deleting by both clients, against a scripted server: requests, results, errors."""

from __future__ import annotations

from datetime import UTC, datetime

import grpc
import grpc.aio
import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import (
    NEVER,
    ConditionFailed,
    Deleted,
    InvalidArgument,
    NotFound,
    PublishFailed,
    Refusal,
    Unavailable,
    _writes,
)
from tests.support.fakes.called_server import (
    PUBLISHED,
    RESULT,
    Server,
    loop,
    refused,
    script,
    server,
)
from tests.support.fakes.scripted import SECONDS_MAX

__all__ = ["loop", "script", "server"]  # fixtures


def test_publish(server: Server) -> None:
    call = server.begin(
        lambda: server.client.publish(
            "orders", {"id": 1}, ttl="30s", keep_ttl=True, only_if_version=6, durability="buffered"
        )
    )
    request = server.answer("Publish", sow_pb2.PublishResponse(results=[RESULT]))
    done = call.result(SECONDS_MAX)
    assert done == PUBLISHED
    assert done.expire_time == datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC)
    assert request.publisher.first_sequence == 1
    request.ClearField("publisher")
    assert request == sow_pb2.PublishRequest(
        topic="orders",
        records=[sow_pb2.PublishRecord(payload=b'{"id":1}', condition=types_pb2.Condition(only_if_version=6))],
        lifetime=types_pb2.Lifetime(ttl_micros=30_000_000),
        ttl_mode=types_pb2.TTL_MODE_KEEP,
        durability=types_pb2.DURABILITY_BUFFERED,
        encoded_as="json",
    )


def test_publish_raises_the_refusal_of_its_record(server: Server) -> None:
    call = server.begin(lambda: server.client.publish("orders", "{}", key="a", only_if_absent=True))
    result = sow_pb2.PublishResult(refusal=refused("CONDITION_FAILED", current_version=9))
    request = server.answer("Publish", sow_pb2.PublishResponse(results=[result]))
    with pytest.raises(ConditionFailed) as caught:
        call.result(SECONDS_MAX)
    assert caught.value.current_version == 9
    assert request.records[0].key == "a"


def test_publish_raises_the_status_with_its_details(server: Server) -> None:
    call = server.begin(lambda: server.client.publish("orders", "{}"))
    server.refuse("Publish", grpc.StatusCode.INVALID_ARGUMENT, "LIFETIME_NEGATIVE", field="lifetime")
    with pytest.raises(InvalidArgument) as caught:
        call.result(SECONDS_MAX)
    assert (caught.value.reason, caught.value.details) == ("LIFETIME_NEGATIVE", {"field": "lifetime"})
    assert isinstance(caught.value.__cause__, grpc.RpcError)


def test_delta_publish(server: Server) -> None:
    """Rule P2."""
    call = server.begin(
        lambda: server.client.delta_publish(
            "orders", {"id": 1, "price": 2}, unset=["/note", "/a/b"], only_if_present=True
        )
    )
    request = server.answer("Publish", sow_pb2.PublishResponse(results=[RESULT]))
    assert call.result(SECONDS_MAX) == PUBLISHED
    request.ClearField("publisher")
    assert request == sow_pb2.PublishRequest(
        topic="orders",
        records=[
            sow_pb2.PublishRecord(payload=b'{"id":1,"price":2}', condition=types_pb2.Condition(only_if_present=True))
        ],
        delta=True,
        unset_paths=["/note", "/a/b"],
        encoded_as="json",
    )


@pytest.mark.slow
def test_publish_many_of_deltas_sends_the_unset_paths_with_each_request(server: Server) -> None:
    unset = iter(["/note"])  # read once, sent with both requests
    call = server.begin(lambda: server.client.publish_many("orders", ["{}"] * 10_001, delta=True, unset=unset))
    for count in (10_000, 1):
        request = server.answer("Publish", sow_pb2.PublishResponse(results=[RESULT] * count))
        assert (request.delta, list(request.unset_paths)) == (True, ["/note"])
    call.result(SECONDS_MAX)


def test_fields_are_unset_by_deltas_only(server: Server) -> None:
    for call in (
        lambda: server.client.publish_many("orders", ["{}"], unset=["/a"]),
        lambda: server.client.publisher("orders", unset=["/a"]),
        lambda: server.client.delta_publish("orders", {}, unset="/a"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.details["field"] == "unset"


def test_publishes_of_one_client_follow_each_other_under_one_id(server: Server) -> None:
    requests = []
    for _ in range(2):
        call = server.begin(lambda: server.client.publish("orders", b"{}"))
        requests.append(server.answer("Publish", sow_pb2.PublishResponse(results=[RESULT])))
        call.result(SECONDS_MAX)
    first, second = (request.publisher for request in requests)
    assert first.publisher_id == second.publisher_id
    assert (first.first_sequence, second.first_sequence) == (1, 2)


@pytest.mark.parametrize("last", [None, "OVERLOADED", "STREAM_BROKEN"])
def test_sequences_that_may_not_have_been_decided_leave_no_gap(last: str | None) -> None:
    """F11. Behind the gap of one refused or broken call no retry of the client was a duplicate elsewhere any more."""
    sequencer = _writes.Sequencer()
    position = sequencer.take()
    publisher_id, epoch, token, response = (
        position.publisher_id,
        position.publisher_epoch,
        position.publisher_token,
        None,
    )
    if last is not None:
        refusal = types_pb2.Refusal(reason=types_pb2.ErrorReason.Value(f"ERROR_REASON_{last}"))
        response = sow_pb2.PublishResponse(results=[sow_pb2.PublishResult(), sow_pb2.PublishResult(refusal=refusal)])
    sequencer.give_back(position, response)
    following = sequencer.take()
    assert (following.publisher_id, following.publisher_epoch, following.first_sequence) == (publisher_id, epoch + 1, 1)
    assert following.publisher_token not in (0, token)


def test_sequences_that_were_refused_for_good_are_decided() -> None:
    sequencer = _writes.Sequencer()
    position = sequencer.take()
    refused = sow_pb2.PublishResult(refusal=types_pb2.Refusal(reason=types_pb2.ERROR_REASON_CONDITION_FAILED))
    sequencer.give_back(position, sow_pb2.PublishResponse(results=[refused]))
    assert (position.publisher_epoch, position.first_sequence) == (1, 2)


def test_publish_many_returns_the_outcome_of_each_record(server: Server) -> None:
    call = server.begin(
        lambda: server.client.publish_many("orders", ["{}", "{"], keys=["1", "2"], atomic=True, refusals="return")
    )
    bad = sow_pb2.PublishResult(refusal=refused("PAYLOAD_MALFORMED", index=1))
    request = server.answer("Publish", sow_pb2.PublishResponse(results=[RESULT, bad]))
    assert call.result(SECONDS_MAX) == [PUBLISHED, Refusal(1, "PAYLOAD_MALFORMED", "no")]
    assert request.atomic
    assert [record.key for record in request.records] == ["1", "2"]


def test_publish_many_raises_the_refusals_unless_they_are_to_be_returned(server: Server) -> None:
    """Story: a program that did not look at the result lost records without a word."""
    call = server.begin(lambda: server.client.publish_many("orders", ["{}", "{", "{}"]))
    bad = sow_pb2.PublishResult(refusal=refused("PAYLOAD_MALFORMED", index=1))
    server.answer("Publish", sow_pb2.PublishResponse(results=[RESULT, bad, RESULT]))
    with pytest.raises(PublishFailed, match="1 record was refused; the first is number 1: no") as caught:
        call.result(SECONDS_MAX)
    assert caught.value.refusals == (Refusal(1, "PAYLOAD_MALFORMED", "no"),)
    assert caught.value.reason == "PAYLOAD_MALFORMED"
    assert isinstance(caught.value.__cause__, InvalidArgument)


def test_an_atomic_request_that_is_refused_names_the_record_that_is_at_fault(server: Server) -> None:
    call = server.begin(lambda: server.client.publish_many("orders", ["{}", "{"], atomic=True))
    results = [
        sow_pb2.PublishResult(refusal=refused("ATOMIC_ABORTED")),
        sow_pb2.PublishResult(refusal=refused("PAYLOAD_MALFORMED", index=1)),
    ]
    server.answer("Publish", sow_pb2.PublishResponse(results=results))
    with pytest.raises(PublishFailed, match="2 records were refused; the cause is number 1: no") as caught:
        call.result(SECONDS_MAX)
    assert (caught.value.reason, caught.value.refused) == ("PAYLOAD_MALFORMED", 2)


def test_another_way_to_treat_refusals_is_refused_before_anything_is_sent(server: Server) -> None:
    with pytest.raises(InvalidArgument, match="refusals"):
        server.client.publish_many("orders", [], refusals="ignore")  # type: ignore[call-overload]  # a mistake


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["OVERLOADED", "BACKLOG_QUOTA_EXCEEDED"])
def test_publish_many_holds_back_records_after_a_temporary_refusal(server: Server, reason: str) -> None:
    call = server.begin(lambda: server.client.publish_many("orders", ["{}"] * 10_001, refusals="return"))
    results = [RESULT] * 9_999 + [sow_pb2.PublishResult(refusal=refused(reason, index=9_999))]
    server.answer("Publish", sow_pb2.PublishResponse(results=results))
    outcomes = call.result(SECONDS_MAX)
    assert [outcome.reason for outcome in outcomes if isinstance(outcome, Refusal)] == [reason, "STREAM_BROKEN"]
    assert len(outcomes) == 10_001


def test_touch_of_one_key(server: Server) -> None:
    call = server.begin(lambda: server.client.touch("orders", "1", ttl="1m", only_if_version=3))
    request = server.answer("Touch", sow_pb2.TouchResponse(results=[RESULT]))
    assert call.result(SECONDS_MAX) == PUBLISHED
    assert request == sow_pb2.TouchRequest(
        topic="orders",
        keys=["1"],
        lifetime=types_pb2.Lifetime(ttl_micros=60_000_000),
        condition=types_pb2.Condition(only_if_version=3),
    )


def test_touch_of_a_dead_record_is_not_found_and_of_a_list_says_so_for_each(server: Server) -> None:
    gone = sow_pb2.PublishResult(refusal=refused("RECORD_NOT_FOUND"))
    one = server.begin(lambda: server.client.touch("orders", "1"))
    request = server.answer("Touch", sow_pb2.TouchResponse(results=[gone]))
    with pytest.raises(NotFound):
        one.result(SECONDS_MAX)
    assert not request.HasField("lifetime")
    many = server.begin(lambda: server.client.touch("orders", ["1", "2"], ttl=NEVER))
    server.answer("Touch", sow_pb2.TouchResponse(results=[RESULT, gone]))
    assert many.result(SECONDS_MAX) == [PUBLISHED, Refusal(1, "RECORD_NOT_FOUND", "no")]


def test_persist(server: Server) -> None:
    call = server.begin(lambda: server.client.persist("orders", "1"))
    request = server.answer("Touch", sow_pb2.TouchResponse(results=[sow_pb2.PublishResult(key="1", version=8)]))
    assert call.result(SECONDS_MAX).expire_time is None
    assert request.lifetime.never


def test_sow_delete(server: Server) -> None:
    steps: list[Deleted] = []
    call = server.begin(
        lambda: server.client.sow_delete("orders", all=True, durability="fsync", on_progress=steps.append)
    )
    request = server.stream(
        "SowDelete",
        sow_pb2.SowDeleteResponse(matched=1000, deleted=1000, last_sequence=5),
        sow_pb2.SowDeleteResponse(matched=1200, deleted=1200, last_sequence=9, done=True),
    )
    assert call.result(SECONDS_MAX) == Deleted(1200, 1200, 9) == steps[-1]
    assert len(steps) == 2
    assert request == sow_pb2.SowDeleteRequest(topic="orders", all=True, durability=types_pb2.DURABILITY_FSYNC)


def test_sow_delete_by_filter(server: Server) -> None:
    call = server.begin(lambda: server.client.sow_delete("orders", filter="/price > 100"))
    request = server.stream("SowDelete", sow_pb2.SowDeleteResponse(matched=2, deleted=2, last_sequence=9, done=True))
    assert call.result(SECONDS_MAX) == Deleted(2, 2, 9)
    assert request == sow_pb2.SowDeleteRequest(topic="orders", by_filter="/price > 100")


def test_sow_delete_by_keys_that_is_cut_or_refused(server: Server) -> None:
    cut = server.begin(lambda: server.client.sow_delete("orders", keys=["1"], dry_run=True))
    request = server.stream("SowDelete", sow_pb2.SowDeleteResponse(matched=1))
    with pytest.raises(Unavailable) as caught:
        cut.result(SECONDS_MAX)
    assert caught.value.reason == "STREAM_CUT"
    assert request.by_keys.keys == ["1"]
    assert request.dry_run
    no = server.begin(lambda: server.client.sow_delete("orders", data={"x": 1}))
    server.stream("SowDelete", end=(grpc.StatusCode.INVALID_ARGUMENT, "KEY_FIELD_MISSING"))
    with pytest.raises(InvalidArgument) as refusal:
        no.result(SECONDS_MAX)
    assert refusal.value.reason == "KEY_FIELD_MISSING"
