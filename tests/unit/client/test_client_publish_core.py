"""The publisher's state machine, without I/O (_publish_core [1] to [6])."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import (
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    PublishFailed,
    Refusal,
    ResourceExhausted,
    SowError,
    Unavailable,
    _statuses,
)
from sow_client._lifetimes import Lifetime
from sow_client._publish_columns import BATCH_BYTES, checked_columns
from sow_client._publish_core import (
    IN_FLIGHT_BYTES_MAX,
    REFUSALS_KEPT_MAX,
    OpenedPublisher,
    PublishCore,
    PublisherOptions,
    StreamDefaults,
    checked_unit,
    new_epoch,
)
from sow_client.errors import error_of_reason

TTL = Lifetime(types_pb2.LIFETIME_KIND_TTL, 1_000_000)


def make(batch_records: int = 3, max_in_flight: int = 4, retry_for: float = 30.0) -> PublishCore:
    options = PublisherOptions(batch_records, max_in_flight, retry_for=retry_for)
    return PublishCore(StreamDefaults("orders"), options, publisher_id="p", publisher_epoch=1)


def publish(core: PublishCore, *payloads: bytes) -> None:
    """Hands over records and seals them all."""
    core.pending.extend(payloads)
    while core.pending:
        core.seal()


def send(core: PublishCore) -> list[sow_pb2.PublishStreamRequest]:
    """Sends all that is queued; copies, as a request may be trimmed later."""
    sent = []
    while (request := core.next_request()) is not None:
        copy = sow_pb2.PublishStreamRequest()
        copy.CopyFrom(request)
        sent.append(copy)
    return sent


def answer(
    applied: int = 0, duplicates: int = 0, refusals: Iterable[tuple[int, str]] = ()
) -> sow_pb2.PublishStreamResponse:
    return sow_pb2.PublishStreamResponse(
        applied=applied,
        duplicates=duplicates,
        refusals=[
            types_pb2.Refusal(index=index, reason=types_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}"), message="no")
            for index, reason in refusals
        ],
        durability=types_pb2.DURABILITY_FSYNC,
    )


def positions(requests: list[sow_pb2.PublishStreamRequest]) -> list[tuple[int, list[bytes]]]:
    return [(request.publisher.first_sequence, list(request.payload)) for request in requests]


def test_sequences_rise_without_gaps_over_batches() -> None:
    core = make()
    publish(core, b"1", b"2", b"3", b"4")
    requests = send(core)
    assert positions(requests) == [(1, [b"1", b"2", b"3"]), (4, [b"4"])]
    assert requests[0].publisher == types_pb2.PublisherPosition(publisher_id="p", publisher_epoch=1, first_sequence=1)
    assert requests[0].topic == "orders"


def test_acknowledgements_settle_requests_in_order() -> None:
    core = make()
    publish(core, b"1", b"2", b"3", b"4")
    send(core)
    ack, error = core.acknowledge(answer(applied=2, refusals=[(1, "KEY_FIELD_MISSING")]))
    assert error is None
    assert ack.refusals == (Refusal(1, "KEY_FIELD_MISSING", "no"),)
    assert (ack.records, ack.durability) == (3, "fsync")
    ack, _ = core.acknowledge(answer(refusals=[(0, "KEY_FIELD_MISSING")]))
    assert ack.refusals[0].index == 3  # its place in the whole stream
    assert (core.applied, core.refused, core.acknowledged, core.unacknowledged) == (2, 2, 4, 0)
    assert not core.has_requests


def test_a_cut_stream_sends_again_all_that_is_not_acknowledged_and_nothing_else() -> None:
    core = make(batch_records=1)
    publish(core, b"1", b"2", b"3")
    assert len(send(core)) == 3
    core.acknowledge(answer(applied=1))
    core.rewind()
    publish(core, b"4")
    assert positions(send(core)) == [(2, [b"2"]), (3, [b"3"]), (4, [b"4"])]


def test_records_applied_before_the_cut_count_as_duplicates_and_refusals_keep_their_reason() -> None:
    core = make()
    publish(core, b"1", b"2", b"3")
    send(core)
    core.rewind()
    send(core)
    core.acknowledge(answer(duplicates=2, refusals=[(2, "PAYLOAD_MALFORMED")]))
    assert (core.applied, core.duplicates, core.refused, core.acknowledged) == (0, 2, 1, 3)
    failed = core.take_refusals()
    assert failed is not None
    assert failed.refusals == (Refusal(2, "PAYLOAD_MALFORMED", "no"),)


def test_a_temporary_refusal_settles_earlier_records_and_keeps_the_rest() -> None:
    """_publish_core [4], rule P6: that record and all after it were not applied; nothing may be counted twice or
    lost."""
    core = make(batch_records=4)
    core.plain = False
    core.pending.extend([(b"1", "a", TTL), (b"2", "b", None), (b"3", "c", TTL), (b"4", "d", None)])
    core.seal()
    publish(core, b"5")
    send(core)
    ack, error = core.acknowledge(answer(applied=1, refusals=[(1, "KEY_TOO_LARGE"), (2, "OVERLOADED")]))
    assert isinstance(error, ResourceExhausted)
    assert ack.records == 2
    assert core.acknowledged == 2
    core.rewind()
    first, second = send(core)
    assert positions([first, second]) == [(3, [b"3", b"4"]), (5, [b"5"])]
    assert list(first.key) == ["c", "d"]
    assert list(first.lifetime_micros) == [1_000_000, 0]
    ack, error = core.acknowledge(answer(applied=1, refusals=[(1, "KEY_TOO_LARGE")]))
    assert error is None
    assert ack.refusals[0].index == 3


def test_a_stream_broken_from_its_first_record_settles_nothing() -> None:
    core = make()
    publish(core, b"1")
    send(core)
    ack, error = core.acknowledge(answer(refusals=[(0, "STREAM_BROKEN")]))
    assert ack.records == 0
    assert error is not None
    core.rewind()
    assert positions(send(core)) == [(1, [b"1"])]


@pytest.mark.parametrize(
    "response", [answer(applied=2), answer(applied=4), answer(applied=1, refusals=[(2, "OVERLOADED")])]
)
def test_an_answer_that_does_not_add_up_is_not_believed(response: sow_pb2.PublishStreamResponse) -> None:
    core = make()
    publish(core, b"1", b"2", b"3")
    send(core)
    with pytest.raises(InternalError):
        core.acknowledge(response)


def test_an_answer_to_nothing_is_not_believed() -> None:
    with pytest.raises(InternalError):
        make().acknowledge(answer())


def test_requests_and_bytes_in_flight_are_bounded() -> None:
    core = make(batch_records=1, max_in_flight=2)
    room = []
    for step in (lambda: publish(core, b"1"), lambda: publish(core, b"2"), lambda: send(core)):
        step()
        room.append(core.room)
    core.acknowledge(answer(applied=1))
    assert [*room, core.room] == [True, False, False, True]
    large = make(batch_records=1, max_in_flight=100)
    for _ in range(IN_FLIGHT_BYTES_MAX // BATCH_BYTES):
        assert large.room
        publish(large, bytes(BATCH_BYTES))
    assert not large.room


def test_a_batch_ends_at_its_bytes_and_a_larger_document_goes_alone() -> None:
    core = make(batch_records=100)
    publish(core, bytes(BATCH_BYTES - 1), b"x", b"y", bytes(BATCH_BYTES + 1), b"z")
    assert [len(request.payload) for request in send(core)] == [2, 1, 1, 1]


def test_keys_and_lifetimes_are_columns_of_all_records_or_of_none() -> None:
    core = make(batch_records=100)
    publish(core, b"1", b"2")
    core.plain = False
    core.pending.extend([b"3", (b"4", None, TTL), (b"5", "k", None), (b"6", "l", None), b"7"])
    while core.pending:
        core.seal()
    plain, lifetimes, keyed, last = send(core)
    assert (list(plain.payload), list(plain.lifetime_kind)) == ([b"1", b"2"], [])
    assert list(lifetimes.payload) == [b"3", b"4"]
    assert list(lifetimes.lifetime_kind) == [types_pb2.LIFETIME_KIND_UNSPECIFIED, types_pb2.LIFETIME_KIND_TTL]
    assert list(lifetimes.lifetime_micros) == [0, 1_000_000]
    assert (list(keyed.payload), list(keyed.key), list(keyed.lifetime_kind)) == ([b"5", b"6"], ["k", "l"], [])
    assert (list(last.payload), list(last.key)) == ([b"7"], [])
    assert [request.publisher.first_sequence for request in (plain, lifetimes, keyed, last)] == [1, 3, 5, 7]


def test_retries_end_after_their_time_and_name_the_unacknowledged_records() -> None:
    core = make(retry_for=10.0)
    publish(core, b"1", b"2", b"3", b"4")
    core.pending.append(b"5")
    send(core)
    core.acknowledge(answer(applied=3))
    now, delays = 100.0, []
    with pytest.raises(Unavailable) as caught:  # noqa: PT012 - the loop is what ends
        while True:
            delays.append(core.retry_delay(_statuses.cut("it"), now=now, jitter=1.0))
            now += delays[-1]
    assert delays[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert 8.0 < now - 100.0 <= 10.0
    assert caught.value.details == {"acknowledged": "3", "unacknowledged": "2", "refused": "0"}
    assert "3 records were acknowledged, 2 were not" in caught.value.message


def test_progress_begins_the_time_to_retry_anew() -> None:
    core = make(batch_records=1, retry_for=1.0)
    publish(core, b"1", b"2")
    for now in (0.0, 100.0):
        core.retry_delay(_statuses.cut("it"), now=now, jitter=0.0)
        core.rewind()
        send(core)
        core.acknowledge(answer(applied=1))


def test_a_server_that_was_never_reached_is_given_up_after_the_connect_timeout() -> None:
    core = make(retry_for=30.0)
    publish(core, b"1")
    core.retry_delay(_statuses.unreachable("x", 5), now=0.0, jitter=0.0)
    with pytest.raises(Unavailable) as caught:
        core.retry_delay(_statuses.unreachable("x", 5), now=5.0, jitter=0.0)
    assert caught.value.reason == "UNREACHABLE"


def test_the_server_s_wish_when_to_try_again_is_followed() -> None:
    busy = error_of_reason("OVERLOADED", "busy", retry_after=3.0)
    assert make().retry_delay(busy, now=0.0, jitter=0.0) == 3.0


@pytest.mark.parametrize(
    "reason",
    [
        "DISK_FULL",
        "STORE_FAILED",
        "PUBLISHER_FENCED",
        "TOPIC_NOT_FOUND",
        "INTERNAL",
        "PERMISSION_DENIED",
        "REPLICATION_UNAVAILABLE",  # an unacknowledged record stands there all the same
    ],
)
def test_a_permanent_error_of_a_publisher_is_raised_at_once(reason: str) -> None:
    core = make()
    publish(core, b"1")
    with pytest.raises(SowError) as caught:
        core.retry_delay(error_of_reason(reason, "no", code="PERMISSION_DENIED"), now=0.0, jitter=0.0)
    assert caught.value.reason == reason
    assert caught.value.details["unacknowledged"] == "1"


@pytest.mark.slow
def test_refusals_are_reported_once_and_kept_in_bounds() -> None:
    core = make(batch_records=10_000)
    for _ in range(2):
        publish(core, *[b"x"] * 10_000)
        send(core)
        core.acknowledge(answer(refusals=[(index, "KEY_REQUIRED") for index in range(10_000)]))
    failed = core.take_refusals()
    assert isinstance(failed, PublishFailed)
    assert (len(failed.refusals), failed.refused) == (REFUSALS_KEPT_MAX, 20_000)
    assert core.take_refusals() is None
    publish(core, b"x")
    send(core)
    core.acknowledge(answer(refusals=[(0, "KEY_REQUIRED")]))
    again = core.take_refusals()
    assert again is not None
    assert (again.refused, again.refusals[0].index) == (1, 20_000)


@pytest.mark.parametrize("seed", range(20))
def test_a_model_server_ends_with_every_record_once_whatever_breaks(seed: int) -> None:
    """_publish_core [1], [2], [4] against a server that applies by sequence, loses answers, breaks streams and refuses
    for a while."""
    chance = random.Random(seed)
    print(f"seed {seed}")
    core = make(batch_records=chance.randint(1, 5), max_in_flight=chance.randint(1, 4))
    applied: list[bytes] = []
    refused: list[int] = []
    total = 200
    handed = highest = 0
    answers: list[sow_pb2.PublishStreamResponse] = []
    broken = False
    while core.acknowledged < total:
        while handed < total and len(core.pending) < core.options.batch_records:
            core.pending.append(str(handed).encode())
            handed += 1
        if core.room:
            core.seal()
        for request in send(core):
            fresh = duplicates = 0
            refusals: list[tuple[int, str]] = []
            for index, payload in enumerate(request.payload):
                sequence = request.publisher.first_sequence + index
                if broken or chance.random() < 0.02:
                    refusals.append((index, "STREAM_BROKEN" if broken else "OVERLOADED"))
                    broken = True
                    break
                bad = sequence % 7 == 0
                if sequence <= highest:
                    duplicates += not bad
                else:
                    assert sequence == highest + 1, "a gap"
                    highest = sequence
                    fresh += not bad
                    if not bad:
                        applied.append(payload)
                if bad:
                    refusals.append((index, "PAYLOAD_MALFORMED"))
            answers.append(answer(fresh, duplicates, refusals))
        failed = False
        while answers and not failed:
            ack, error = core.acknowledge(answers.pop(0))
            refused += [refusal.index for refusal in ack.refusals]
            failed = error is not None
        if failed or chance.random() < 0.2:
            answers.clear()
            broken = False
            core.rewind()
    expected = [sequence for sequence in range(1, total + 1) if sequence % 7]
    assert applied == [str(sequence - 1).encode() for sequence in expected]
    assert refused == [sequence - 1 for sequence in range(1, total + 1) if sequence % 7 == 0]
    assert core.applied + core.duplicates == len(expected)


# ---- records in columns ----


def columns(core: PublishCore, *args: object, **kwargs: object) -> None:
    """Hands over columns and seals them all."""
    bulk = checked_columns(*args, **kwargs)  # type: ignore[arg-type]  # the tests give fitting values
    at = 0
    while at < len(bulk.payloads):
        at = core.seal_columns(bulk, at)


def test_columns_go_out_in_requests_as_records_do() -> None:
    """_publish_core [1]: in order with the records published before and after them."""
    core = make()
    publish(core, b"0")
    kinds, micros = [1, 0, 3, 2], [5, 0, 0, 7]
    columns(core, [b"1", b"2", b"3", b"4"], ["a", "b", "c", "d"], kinds, micros)
    core.plain = True
    publish(core, b"5")
    requests = send(core)
    assert positions(requests) == [(1, [b"0"]), (2, [b"1", b"2", b"3"]), (5, [b"4"]), (6, [b"5"])]
    assert [list(request.key) for request in requests] == [[], ["a", "b", "c"], ["d"], []]
    assert list(requests[1].lifetime_kind) == [1, 0, 3]
    assert list(requests[1].lifetime_micros) == [5, 0, 0]
    assert (list(requests[2].lifetime_kind), list(requests[2].lifetime_micros)) == ([2], [7])


def test_a_lifetime_column_that_says_nothing_is_not_sent() -> None:
    core = make()
    columns(core, [b"1", b"2"], None, [0, 0], [0, 0])
    (request,) = send(core)
    assert (list(request.lifetime_kind), list(request.lifetime_micros)) == ([], [])


def test_columns_are_cut_where_their_bytes_end() -> None:
    """10,000 records of a mebibyte fit in no message; none of them is copied to find that out."""
    core = make(batch_records=10_000, max_in_flight=16)
    large = bytes(2**20)
    columns(core, [large] * 10, None, None, None)
    columns(core, [bytes(BATCH_BYTES + 1), b"x"], None, None, None)
    assert [len(request.payload) for request in send(core)] == [4, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"payloads": [b"1", "2"]}, "payloads[1]"),
        ({"payloads": [b"1", bytes(16 * 2**20 + 1)]}, "payloads[1]"),
        ({"keys": ["a"]}, "keys"),
        ({"keys": ["a", b"b"]}, "keys[1]"),
        ({"keys": ["a", "\udc00"]}, "keys[1]"),
        ({"lifetime_kinds": [1, 1]}, "lifetime_micros"),
        ({"lifetime_micros": [1, 1]}, "lifetime_kinds"),
        ({"lifetime_kinds": [1, 9], "lifetime_micros": [1, 1]}, "lifetime_kinds[1]"),
        ({"lifetime_kinds": [1], "lifetime_micros": [1, 1]}, "lifetime_kinds"),
        ({"lifetime_kinds": [1, 1], "lifetime_micros": [1]}, "lifetime_micros"),
        ({"lifetime_kinds": [1, 1], "lifetime_micros": [1, 2.5]}, "lifetime_micros"),
        ({"lifetime_kinds": [1, 1], "lifetime_micros": [1, 2**63]}, "lifetime_micros"),
        ({"lifetime_kinds": [1, 3], "lifetime_micros": [1, 1]}, "lifetime_micros[1]"),
    ],
)
def test_columns_with_a_mistake_are_refused_before_anything_is_sent(change: dict[str, object], field: str) -> None:
    given: dict[str, object] = {"payloads": [b"1", b"2"], "keys": None, "lifetime_kinds": None, "lifetime_micros": None}
    with pytest.raises(InvalidArgument) as caught:
        checked_columns(**{**given, **change})  # type: ignore[arg-type]  # they are wrong on purpose
    assert caught.value.details["field"] == field
    assert field in caught.value.message


# ---- units of work ----


def make_unit(max_in_flight: int = 4) -> PublishCore:
    options = PublisherOptions(3, max_in_flight)
    return PublishCore(StreamDefaults("orders", unit=7), options, publisher_id="p", publisher_epoch=2)


def ends(requests: list[sow_pb2.PublishStreamRequest]) -> list[tuple[list[bytes], bool]]:
    assert {request.publisher.unit for request in requests} <= {7}
    return [(list(request.payload), request.publisher.unit_done) for request in requests]


def test_the_last_request_of_a_unit_is_held_back_and_ends_it() -> None:
    """_publish_core [6]: it is sent when all before it is settled."""
    core = make_unit()
    publish(core, b"1", b"2", b"3", b"4")
    assert ends(send(core)) == [([b"1", b"2", b"3"], False)]
    assert not core.held_alone
    core.acknowledge(answer(applied=3))
    core.end_unit()
    assert ends(send(core)) == [([b"4"], True)]
    core.acknowledge(answer(applied=1))
    assert core.unit_ended() is None
    assert core.unit_finished


def test_a_unit_of_which_nothing_is_left_ends_with_a_request_without_records() -> None:
    core = make_unit()
    publish(core, b"1")
    core.release()  # somebody flushes
    send(core)
    core.acknowledge(answer(applied=1))
    core.hold()
    core.end_unit()
    (request,) = send(core)
    assert ends([request]) == [([], True)]
    assert request.publisher.first_sequence == 2
    core.rewind()  # and its answer is lost
    (request,) = send(core)
    assert ends([request]) == [([], True)]
    core.acknowledge(answer())
    assert core.unit_ended() is None
    assert not core.has_requests


def test_a_cut_in_between_keeps_held_back_records_last() -> None:
    """_publish_core [6], [1]."""
    core = make_unit()
    publish(core, b"1", b"2", b"3", b"4")
    send(core)
    core.rewind()
    assert not core.held_alone
    assert ends(send(core)) == [([b"1", b"2", b"3"], False)]
    core.acknowledge(answer(duplicates=3))
    core.end_unit()
    send(core)
    core.rewind()
    assert ends(send(core)) == [([b"4"], True)]


def test_a_unit_with_a_refused_record_is_published_and_not_ended() -> None:
    """_publish_core [6]: also when its refusal has been raised before."""
    core = make_unit()
    publish(core, b"1", b"2", b"3", b"4")
    send(core)
    core.acknowledge(answer(applied=2, refusals=[(1, "KEY_FIELD_MISSING")]))
    assert core.take_refusals() is not None
    core.end_unit()
    assert ends(send(core)) == [([b"4"], False)]
    core.acknowledge(answer(applied=1))
    failed = core.unit_ended()
    assert failed is not None
    assert failed.refusals == (Refusal(1, "KEY_FIELD_MISSING", "no"),)
    assert not core.unit_finished


def test_a_last_request_that_is_applied_in_part_ends_nothing_if_that_part_had_a_refusal() -> None:
    """_publish_core [4], [6]: the server judges the records that it gets, and the rest would look complete."""
    core = make_unit()
    publish(core, b"1", b"2", b"3")
    core.end_unit()
    send(core)
    _, error = core.acknowledge(answer(refusals=[(0, "KEY_FIELD_MISSING"), (1, "OVERLOADED")]))
    assert error is not None
    core.rewind()
    assert ends(send(core)) == [([b"2", b"3"], False)]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_held_back_records_take_no_room(max_in_flight: int) -> None:
    core = make_unit(max_in_flight)
    publish(core, b"1")
    assert core.room
    publish(core, bytes(IN_FLIGHT_BYTES_MAX))
    assert core.room is (max_in_flight == 2)
    assert len(send(core)) == 1


def test_a_publisher_without_a_unit_has_none_to_finish() -> None:
    with pytest.raises(InvalidArgument):
        make().check_unit()


@pytest.mark.parametrize(("publisher_id", "epoch", "unit"), [(None, None, 1), (None, 1, 0), ("p", -1, 0), ("p", 1, -1)])
def test_an_epoch_and_a_unit_belong_to_a_publisher(publisher_id: str | None, epoch: int | None, unit: int) -> None:
    with pytest.raises(InvalidArgument):
        checked_unit(publisher_id, epoch, unit)


def test_no_epoch_is_taken_for_a_unit_that_is_finished() -> None:
    opened = OpenedPublisher(3, False, 0, token=5)
    assert new_epoch(opened, "p", 7) == opened
    with pytest.raises(FailedPrecondition) as caught:
        new_epoch(OpenedPublisher(3, True, 10), "p", 7)
    assert caught.value.reason == "UNIT_DONE"
