"""Every call of both clients against a scripted server: requests, results, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2, duration_pb2, timestamp_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import admin_pb2, sow_pb2, types_pb2
from sow_client import (
    EARLIEST,
    NEVER,
    Ack,
    AlreadyExists,
    AsyncClient,
    BackupMade,
    Browsed,
    Cancelled,
    Client,
    ClockAccepted,
    Compacted,
    ConditionFailed,
    Deleted,
    Difference,
    DurableFigures,
    DurableSettings,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    LinkTopic,
    NotFound,
    Policy,
    Published,
    Publisher,
    PublishFailed,
    QueryPlan,
    Refusal,
    Repaired,
    ReplicationUnavailable,
    ResourceExhausted,
    Restamped,
    Rewound,
    Subscription,
    TopicChecked,
    TopicSettings,
    Unavailable,
    UnsoundRow,
    Verified,
)
from tests.support.clients import CLIENT_KINDS, EventLoop, blocking
from tests.support.scripted import SECONDS_MAX, Rpc, ScriptedServer

_Value = TypeVar("_Value")
SOW = sow_pb2.DESCRIPTOR.services_by_name["SowService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


class Server:
    """The test's end of a client's calls."""

    def __init__(self, client: Client, script: ScriptedServer) -> None:
        self.client = client
        self._script = script
        self._threads = ThreadPoolExecutor()

    def begin(self, call: Callable[[], _Value]) -> Future[_Value]:
        """Starts a call of the client."""
        return self._threads.submit(call)

    def answer(self, method: str, response: Message) -> Any:
        """Answers a call with one response; returns its request."""
        request, rpc = self.take(method)
        rpc.send_response(response)
        rpc.terminate((), grpc.StatusCode.OK, "")
        return request

    def refuse(self, method: str, code: grpc.StatusCode, reason: str, text: str = "no", **metadata: str) -> Any:
        """Answers a call with a status; returns its request."""
        request, rpc = self.take(method)
        rpc.terminate(status_details(code, reason, text, **metadata), code, text)
        return request

    def stream(self, method: str, *responses: Message, end: tuple[grpc.StatusCode, str] | None = None) -> Any:
        """Answers a call with a stream; returns its request. `end`: a status and reason instead of OK."""
        request, rpc = self.take(method)
        for response in responses:
            rpc.send_response(response)
        if end is None:
            rpc.terminate((), grpc.StatusCode.OK, "")
        else:
            rpc.terminate(status_details(end[0], end[1], "no") if end[1] else (), end[0], "no")
        return request

    def take(self, method: str) -> tuple[Any, Rpc]:
        """The next call of a method with one request, and that request."""
        rpc = self._script.take(method)
        return rpc.take_request(), rpc

    def publish_stream(self) -> Rpc:
        """The server's side of a publisher's stream."""
        return self._script.take("PublishStream")

    def stop(self) -> None:
        self._threads.shutdown()


def status_details(code: grpc.StatusCode, reason: str, text: str, **metadata: str) -> tuple[tuple[str, bytes], ...]:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="sow", metadata=metadata))
    status = status_pb2.Status(code=code.value[0], message=text, details=[packed])
    return (("grpc-status-details-bin", status.SerializeToString()),)


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    """Where the asynchronous clients run."""
    with EventLoop() as made:
        yield made


@pytest.fixture
def script() -> Iterator[ScriptedServer]:
    """The server that they all call."""
    with ScriptedServer([SOW, ADMIN]) as made:
        yield made


@pytest.fixture(params=CLIENT_KINDS)
def server(request: pytest.FixtureRequest, script: ScriptedServer, loop: EventLoop) -> Iterator[Server]:
    """The server of a client, of each kind."""
    if request.param == "Client":
        with grpc.insecure_channel(script.address) as channel:
            made = Server(Client(channel=channel), script)
            yield made
            made.stop()
        return
    aio = loop.make(lambda: grpc.aio.insecure_channel(script.address))
    made = Server(blocking(loop, loop.make(lambda: AsyncClient(channel=aio))), script)
    yield made
    made.stop()
    loop.run(aio.close)


@pytest.fixture
def blocking_server(script: ScriptedServer) -> Iterator[Server]:
    """The server of a blocking client."""
    with grpc.insecure_channel(script.address) as channel:
        made = Server(Client(channel=channel), script)
        yield made
        made.stop()


RESULT = sow_pb2.PublishResult(key="1", version=7, expire_time_micros=5_000_000, sequence=3)
PUBLISHED = Published("1", 7, 5_000_000, 3, ttl_ignored=False, duplicate=False)


def refused(reason: str, *, index: int = 0, current_version: int = 0) -> types_pb2.Refusal:
    value = types_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")
    return types_pb2.Refusal(index=index, reason=value, message="no", current_version=current_version)


# ---- publish ----


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
    )


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


def test_publish_many_returns_the_outcome_of_each_record(server: Server) -> None:
    call = server.begin(lambda: server.client.publish_many("orders", ["{}", "{"], keys=["1", "2"], atomic=True))
    bad = sow_pb2.PublishResult(refusal=refused("PAYLOAD_MALFORMED", index=1))
    request = server.answer("Publish", sow_pb2.PublishResponse(results=[RESULT, bad]))
    assert call.result(SECONDS_MAX) == [PUBLISHED, Refusal(1, "PAYLOAD_MALFORMED", "no")]
    assert request.atomic
    assert [record.key for record in request.records] == ["1", "2"]


@pytest.mark.parametrize("reason", ["OVERLOADED", "BACKLOG_QUOTA_EXCEEDED"])
def test_publish_many_holds_back_records_after_a_temporary_refusal(server: Server, reason: str) -> None:
    call = server.begin(lambda: server.client.publish_many("orders", ["{}"] * 10_001))
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


# ---- read ----

RECORD = types_pb2.Record(topic="orders", key="1", payload=b'{"id":1}', version=7, origin="nyc", sequence=3)


def test_get(server: Server) -> None:
    call = server.begin(lambda: server.client.get("orders", "1"))
    request = server.answer("Get", sow_pb2.GetResponse(records=[RECORD], as_of_micros=1))
    record = call.result(SECONDS_MAX)
    assert record is not None
    assert (record.key, record.data, record.version, record.origin) == ("1", {"id": 1}, 7, "nyc")
    assert request == sow_pb2.GetRequest(topic="orders", keys=["1"])


def test_get_of_nothing_is_none(server: Server) -> None:
    call = server.begin(lambda: server.client.get("orders", "1"))
    server.answer("Get", sow_pb2.GetResponse())
    assert call.result(SECONDS_MAX) is None


def test_get_many(server: Server) -> None:
    call = server.begin(lambda: server.client.get_many("orders", ["1", "2"], select=["/id"]))
    request = server.answer("Get", sow_pb2.GetResponse(records=[RECORD]))
    assert [record.key for record in call.result(SECONDS_MAX)] == ["1"]
    assert request.select.include == ["/id"]


def test_get_of_an_unknown_topic(server: Server) -> None:
    call = server.begin(lambda: server.client.get("nowhere", "1"))
    server.refuse("Get", grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND")
    with pytest.raises(NotFound) as caught:
        call.result(SECONDS_MAX)
    assert caught.value.reason == "TOPIC_NOT_FOUND"


def header() -> sow_pb2.QueryResponse:
    return sow_pb2.QueryResponse(header=sow_pb2.QueryHeader(bookmark="e:9", as_of_micros=1_000_000))


def batch(*keys: str) -> sow_pb2.QueryResponse:
    numbers = [1] * len(keys)
    return sow_pb2.QueryResponse(
        batch=types_pb2.RecordColumns(
            key=keys,
            payload=[b"{}" for _ in keys],
            version=numbers,
            publish_time_micros=numbers,
            expire_time_micros=numbers,
            sequence=numbers,
            origins=["nyc"],
        )
    )


def footer(matched: int = 0, token: str = "") -> sow_pb2.QueryResponse:
    return sow_pb2.QueryResponse(
        footer=sow_pb2.QueryFooter(matched=matched, returned=matched, scanned=matched, next_page_token=token)
    )


def test_query(server: Server) -> None:
    result = server.client.query("orders", exclude=["/note"], batch_size=2, skip_n=1, top_n=3)
    assert (result.header, result.footer) == (None, None)
    call = server.begin(lambda: [record.key for record in result])
    request = server.stream("Query", header(), batch("1", "2"), batch("3"), footer(3))
    assert call.result(SECONDS_MAX) == ["1", "2", "3"]
    assert result.header is not None
    assert result.header.bookmark == "e:9"
    assert result.header.as_of == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert result.footer is not None
    assert result.footer.matched == 3
    assert request == sow_pb2.QueryRequest(
        topic="orders", select=sow_pb2.Projection(exclude=["/note"]), batch_size=2, skip_n=1, top_n=3
    )


def test_query_with_a_filter_and_an_order(server: Server) -> None:
    for order_by in ("/price DESC, /symbol", ["/price DESC", "/symbol"]):
        result = server.client.query("orders", "/price > 9", order_by=order_by)
        call = server.begin(lambda: list(result))  # noqa: B023 - it has run before the next one is made
        request = server.stream("Query", header(), footer(0))
        call.result(SECONDS_MAX)
        assert request == sow_pb2.QueryRequest(
            topic="orders", filter="/price > 9", order_by="/price DESC, /symbol", batch_size=1_000
        )


def test_explain(server: Server) -> None:
    call = server.begin(lambda: server.client.explain("orders", "/symbol = 'IBM'", order_by="/price", top_n=3))
    plan = sow_pb2.QueryPlan(
        access=sow_pb2.QueryPlan.ACCESS_INDEX,
        index_path="/symbol",
        probes=1,
        filter="/symbol = 'IBM'",
        order_by="/price ASC",
        index_entries=12,
    )
    last = sow_pb2.QueryResponse(footer=sow_pb2.QueryFooter(matched=10, returned=3, scanned=11, plan=plan))
    request = server.stream("Query", header(), last)
    assert call.result(SECONDS_MAX) == QueryPlan(
        access="index",
        index_path="/symbol",
        probes=1,
        index_entries=12,
        scanned=11,
        matched=10,
        returned=3,
        filter="/symbol = 'IBM'",
        order_by="/price ASC",
    )
    assert request == sow_pb2.QueryRequest(
        topic="orders", filter="/symbol = 'IBM'", order_by="/price", top_n=3, explain=True
    )


def test_an_answer_without_the_plan_that_was_asked_for_is_not_believed(server: Server) -> None:
    call = server.begin(lambda: server.client.explain("orders"))
    server.stream("Query", header(), footer(1))
    with pytest.raises(InternalError):
        call.result(SECONDS_MAX)


def test_a_plan_of_a_newer_server_is_unknown(server: Server) -> None:
    call = server.begin(lambda: server.client.explain("orders"))
    plan = sow_pb2.QueryPlan.FromString(bytes([8, 99]))  # access 99
    server.stream("Query", header(), sow_pb2.QueryResponse(footer=sow_pb2.QueryFooter(plan=plan)))
    assert call.result(SECONDS_MAX).access == "unknown"


def test_query_by_batches_and_keys_only(server: Server) -> None:
    result = server.client.query("orders", keys=["1"], keys_only=True)
    call = server.begin(lambda: [part.keys for part in result.batches()])
    request = server.stream("Query", header(), batch("1"), footer(1))
    assert call.result(SECONDS_MAX) == [["1"]]
    assert request.keys_only
    assert request.keys == ["1"]


def test_a_query_of_an_unknown_topic(server: Server) -> None:
    call = server.begin(lambda: list(server.client.query("nowhere")))
    server.stream("Query", end=(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"))
    with pytest.raises(NotFound):
        call.result(SECONDS_MAX)


def test_a_query_that_ends_without_its_footer_was_cut(server: Server) -> None:
    keys: list[str] = []
    call = server.begin(lambda: keys.extend(record.key for record in server.client.query("orders")))
    server.stream("Query", header(), batch("1"))
    with pytest.raises(Unavailable) as caught:
        call.result(SECONDS_MAX)
    assert caught.value.reason == "STREAM_CUT"
    assert keys == ["1"]


def test_a_query_that_breaks_after_records_is_not_mixed_with_another_instant(server: Server) -> None:
    result = server.client.query("orders")
    first = server.begin(lambda: next(result).key)
    _, rpc = server.take("Query")
    rpc.send_response(header())
    rpc.send_response(batch("1"))
    assert first.result(SECONDS_MAX) == "1"
    second = server.begin(lambda: next(result))
    rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "reset")
    with pytest.raises(Unavailable) as caught:
        second.result(SECONDS_MAX)
    assert caught.value.reason == "STREAM_CUT"


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_a_query_that_breaks_before_its_first_record_is_asked_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode
) -> None:
    for package in ("blocking", "aio"):
        monkeypatch.setattr(f"sow_client.{package}._reading.QUERY_RETRY_SECONDS", 0.0)
    call = server.begin(lambda: [record.key for record in server.client.query("orders")])
    server.stream("Query", header(), end=(code, ""))
    server.stream("Query", header(), batch("1"), footer(1))
    assert call.result(SECONDS_MAX) == ["1"]


def test_leaving_the_loop_ends_the_call(blocking_server: Server) -> None:
    server = blocking_server  # of the asynchronous client only closing the result ends it

    def first_key() -> str:
        for record in server.client.query("orders"):
            return record.key
        raise AssertionError("no record")

    call = server.begin(first_key)
    _, rpc = server.take("Query")
    rpc.send_response(header())
    rpc.send_response(batch("1"))
    assert call.result(SECONDS_MAX) == "1"
    rpc.cancelled()  # returns once the client has cancelled


def test_closing_a_result_ends_the_call(server: Server) -> None:
    result = server.client.query("orders")
    call = server.begin(lambda: next(result).key)
    _, rpc = server.take("Query")
    rpc.send_response(header())
    rpc.send_response(batch("1", "2"))
    call.result(SECONDS_MAX)
    with result:
        pass
    rpc.cancelled()


def test_page(server: Server) -> None:
    call = server.begin(lambda: server.client.page("orders", "/a = 1", page_size=2, page_token="t1"))
    request = server.stream("Query", header(), batch("1", "2"), footer(2, "t2"))
    page = call.result(SECONDS_MAX)
    assert [record.key for record in page.records] == ["1", "2"]
    assert (page.next_page_token, page.header.bookmark) == ("t2", "e:9")
    assert request == sow_pb2.QueryRequest(topic="orders", filter="/a = 1", page_size=2, page_token="t1")
    with pytest.raises(InvalidArgument):
        server.client.page("orders", page_size=0)


def test_count(server: Server) -> None:
    call = server.begin(lambda: server.client.count("orders"))
    request = server.stream("Query", header(), footer(42))
    assert call.result(SECONDS_MAX) == 42
    assert request == sow_pb2.QueryRequest(topic="orders", count_only=True)
    filtered = server.begin(lambda: server.client.count("orders", "/price > 9"))
    assert server.stream("Query", header(), footer(7)).filter == "/price > 9"
    assert filtered.result(SECONDS_MAX) == 7


# ---- delete ----


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


# ---- administration ----

TOPIC = admin_pb2.Topic(
    name="orders",
    settings=admin_pb2.TopicSettings(
        key=["/id"], message_type=admin_pb2.MESSAGE_TYPE_JSON, expiration=admin_pb2.EXPIRATION_ENABLED, journal=True
    ),
    create_time=timestamp_pb2.Timestamp(seconds=1),
    statistics=admin_pb2.TopicStatistics(live_records=4, overdue_records=1),
)


def test_topics(server: Server) -> None:
    call = server.begin(lambda: server.client.topics(with_statistics=True))
    request = server.answer("ListTopics", admin_pb2.ListTopicsResponse(topics=[TOPIC]))
    (topic,) = call.result(SECONDS_MAX)
    assert (topic.name, topic.settings) == ("orders", TopicSettings(key=("/id",), expiration="enabled"))
    assert topic.create_time == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert topic.statistics is not None
    assert (topic.statistics.live_records, topic.statistics.overdue_records) == (4, 1)
    assert request.with_statistics


def test_create_topic_from_settings_or_from_keywords(server: Server) -> None:
    for create in (
        lambda: server.client.create_topic("orders", TopicSettings(key=["/id"], expiration="30s")),
        lambda: server.client.create_topic("orders", key=["/id"], expiration="30s"),
    ):
        call = server.begin(create)
        request = server.answer("CreateTopic", admin_pb2.CreateTopicResponse(topic=TOPIC))
        assert call.result(SECONDS_MAX).name == "orders"
        assert request.name == "orders"
        assert request.settings.key == ["/id"]
        assert request.settings.default_ttl.seconds == 30
    with pytest.raises(InvalidArgument):
        server.client.create_topic("orders", TopicSettings(), key=["/id"])


def test_create_topic_that_exists(server: Server) -> None:
    call = server.begin(lambda: server.client.create_topic("orders"))
    server.refuse("CreateTopic", grpc.StatusCode.ALREADY_EXISTS, "TOPIC_EXISTS")
    with pytest.raises(AlreadyExists):
        call.result(SECONDS_MAX)


def test_alter_topic(server: Server) -> None:
    call = server.begin(lambda: server.client.alter_topic("orders", max_ttl="1h"))
    request = server.answer("AlterTopic", admin_pb2.AlterTopicResponse(topic=TOPIC))
    assert call.result(SECONDS_MAX).name == "orders"
    assert request.update_paths == ["max_ttl"]
    assert request.settings.max_ttl.seconds == 3600


def test_alter_topic_that_the_config_owns(server: Server) -> None:
    call = server.begin(lambda: server.client.alter_topic("orders", max_ttl="1h"))
    server.refuse("AlterTopic", grpc.StatusCode.FAILED_PRECONDITION, "SET_IN_CONFIG")
    with pytest.raises(FailedPrecondition) as caught:
        call.result(SECONDS_MAX)
    assert caught.value.reason == "SET_IN_CONFIG"


def test_describe_topic(server: Server) -> None:
    call = server.begin(lambda: server.client.describe_topic("orders"))
    request = server.answer("DescribeTopic", admin_pb2.DescribeTopicResponse(topic=TOPIC))
    assert call.result(SECONDS_MAX).statistics is not None
    assert request.name == "orders"


def test_delete_topic(server: Server) -> None:
    call = server.begin(lambda: server.client.delete_topic("orders"))
    request = server.answer("DeleteTopic", admin_pb2.DeleteTopicResponse(deleted_records=4))
    assert call.result(SECONDS_MAX) == 4
    assert request.name == "orders"


def test_restamp(server: Server) -> None:
    """Rule L13."""
    steps: list[Restamped] = []
    call = server.begin(
        lambda: server.client.restamp("orders", "cap", ttl="1h", filter="/a = 1", on_progress=steps.append)
    )
    request = server.stream(
        "Restamp",
        admin_pb2.RestampResponse(matched=1000, restamped=900, last_sequence=5),
        admin_pb2.RestampResponse(matched=1200, restamped=950, last_sequence=9, done=True),
    )
    assert call.result(SECONDS_MAX) == Restamped(1200, 950, 9) == steps[-1]
    assert len(steps) == 2
    assert request == admin_pb2.RestampRequest(
        topic="orders",
        filter="/a = 1",
        mode=admin_pb2.RESTAMP_MODE_CAP,
        lifetime=types_pb2.Lifetime(ttl_micros=3_600_000_000),
    )


def test_check_topic(server: Server) -> None:
    """R13."""
    steps: list[TopicChecked] = []
    call = server.begin(lambda: server.client.check_topic("orders", repair=True, rows_max=7, on_progress=steps.append))
    row = admin_pb2.UnsoundRow(
        key=b"\xff", reason=types_pb2.ERROR_REASON_KEY_NOT_UTF8, message="m", version=-1, origin="b", payload_bytes=3
    )
    request = server.stream(
        "CheckTopic",
        admin_pb2.CheckTopicResponse(checked=500, unsound=1, rows=[row]),
        admin_pb2.CheckTopicResponse(checked=600, unsound=1, removed=1, done=True),
    )
    listed = (UnsoundRow(b"\xff", "KEY_NOT_UTF8", "m", -1, "b", 3),)
    assert call.result(SECONDS_MAX) == TopicChecked(600, 1, 1, listed) == steps[-1]
    assert request == admin_pb2.CheckTopicRequest(name="orders", repair=True, rows_max=7)
    with pytest.raises(InvalidArgument):
        server.client.check_topic("orders", rows_max=-1)


def test_a_restamp_that_is_cut_or_refused(server: Server) -> None:
    cut = server.begin(lambda: server.client.restamp("orders", "clear", dry_run=True))
    request = server.stream("Restamp", admin_pb2.RestampResponse(matched=1))
    with pytest.raises(Unavailable) as caught:
        cut.result(SECONDS_MAX)
    assert caught.value.reason == "STREAM_CUT"
    assert request == admin_pb2.RestampRequest(topic="orders", mode=admin_pb2.RESTAMP_MODE_CLEAR, dry_run=True)
    no = server.begin(lambda: server.client.restamp("orders", "set", ttl=NEVER))
    server.stream("Restamp", end=(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"))
    with pytest.raises(NotFound):
        no.result(SECONDS_MAX)


# ---- follow; the rest is in test_client_following ----


def follow(server: Server, call: Callable[[], Subscription], first: sow_pb2.SubscribeResponse) -> Any:
    """Has a subscription made; returns its request."""
    made = server.begin(call)
    request, rpc = server.take("Subscribe")
    rpc.send_response(first)
    subscription = made.result(SECONDS_MAX)
    assert subscription.bookmark in ("e.4", None)
    subscription.close()
    rpc.cancelled()  # returns once the client has cancelled
    return request


PROGRESS = sow_pb2.SubscribeResponse(progress=sow_pb2.Progress(bookmark="e.4"))
SNAPSHOT_BEGIN = sow_pb2.SubscribeResponse(snapshot_begin=sow_pb2.SnapshotBegin(bookmark="e.4"))


def test_subscribe(server: Server) -> None:
    request = follow(
        server,
        lambda: server.client.subscribe(
            "orders", "/price > 9", oof=True, start="e.3", conflation="500ms", progress=1, select=["/id"], batch_size=7
        ),
        PROGRESS,
    )
    assert request == sow_pb2.SubscribeRequest(
        topic="orders",
        filter="/price > 9",
        oof=True,
        bookmark="e.3",
        conflation_micros=500_000,
        progress_micros=1_000_000,
        select=sow_pb2.Projection(include=["/id"]),
        batch_size=7,
    )


def test_subscribe_to_topics_of_a_pattern_from_a_time(server: Server) -> None:
    moment = datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC)
    request = follow(
        server, lambda: server.client.subscribe(topic_pattern="orders.*", changes=True, start=moment), PROGRESS
    )
    assert request == sow_pb2.SubscribeRequest(
        topic_pattern="orders.*", changes=True, start_time_micros=5_000_000, batch_size=1_000
    )


def test_sow_and_subscribe(server: Server) -> None:
    request = follow(
        server,
        lambda: server.client.sow_and_subscribe("orders", delta=True, empty_deltas=True, exclude=["/note"]),
        SNAPSHOT_BEGIN,
    )
    assert request == sow_pb2.SubscribeRequest(
        topic="orders",
        sow=True,
        delta=True,
        empty_deltas=True,
        select=sow_pb2.Projection(exclude=["/note"]),
        batch_size=1_000,
    )


# ---- durable subscriptions and policies; consuming is in test_client_durable ----


def test_durable_is_attached_when_it_is_returned_and_acknowledges_with_its_session(server: Server) -> None:
    made = server.begin(lambda: server.client.durable("orders", "billing", "/price > 9", oof=True, idle_ttl="1d"))
    request, rpc = server.take("Subscribe")
    begin = sow_pb2.DurableBegin(bookmark="e.4", created=True, session="s1")
    rpc.send_response(sow_pb2.SubscribeResponse(durable_begin=begin))
    durable = made.result(SECONDS_MAX)
    assert request.durable.name == "billing"
    assert (request.topic, request.filter, request.oof) == ("orders", "/price > 9", True)
    assert request.durable.settings.idle_ttl.seconds == 86_400
    assert (durable.bookmark, durable.created) == ("e.4", True)

    rpc.send_response(sow_pb2.SubscribeResponse(changes=one_change(bookmark="e.7")))
    durable.acknowledge(next(durable))
    acknowledged = server.answer("Acknowledge", sow_pb2.AcknowledgeResponse(bookmark="e.7"))
    durable.flush()
    assert acknowledged == sow_pb2.AcknowledgeRequest(topic="orders", durable="billing", bookmark="e.7", session="s1")
    durable.close()
    rpc.cancelled()  # returns once the client has cancelled


def one_change(*, bookmark: str) -> sow_pb2.ChangeBatch:
    record = types_pb2.RecordColumns(
        key=["1"],
        payload=[b"{}"],
        version=[1],
        publish_time_micros=[1],
        expire_time_micros=[1],
        sequence=[7],
        origins=["a"],
    )
    return sow_pb2.ChangeBatch(topic="orders", op=[sow_pb2.CHANGE_OP_PUT], records=record, bookmark=bookmark)


DURABLE = admin_pb2.Durable(
    topic="orders",
    name="billing",
    filter="/price > 9",
    acknowledged="e.4",
    earliest="e.1",
    attached=True,
    create_time=timestamp_pb2.Timestamp(seconds=1),
    last_use_time=timestamp_pb2.Timestamp(seconds=2),
    settings=types_pb2.DurableSettings(retain_bytes=0),
)


def test_durables(server: Server) -> None:
    for topic in ("orders", None):
        call = server.begin(partial(server.client.durables, topic))
        request = server.answer("ListDurables", admin_pb2.ListDurablesResponse(durables=[DURABLE]))
        (durable,) = call.result(SECONDS_MAX)
        assert request.topic == (topic or "")
        assert (durable.topic, durable.name, durable.filter) == ("orders", "billing", "/price > 9")
        assert (durable.acknowledged, durable.earliest, durable.attached) == ("e.4", "e.1", True)
        assert (durable.create_time.second, durable.last_use_time.second) == (1, 2)
        assert (durable.settings, durable.figures) == (DurableSettings(retain_bytes=0), None)


def test_describe_durable(server: Server) -> None:
    call = server.begin(lambda: server.client.describe_durable("orders", "billing", exact=True))
    described = admin_pb2.Durable(
        figures=admin_pb2.DurableFigures(
            total_entries=9,
            total_bytes=90,
            unacknowledged_entries=2,
            unacknowledged_bytes=20,
            oldest_unacknowledged_age=duration_pb2.Duration(seconds=90),
            exact=True,
        )
    )
    request = server.answer("DescribeDurable", admin_pb2.DescribeDurableResponse(durable=described))
    assert call.result(SECONDS_MAX).figures == DurableFigures(9, 90, 2, 20, timedelta(seconds=90), exact=True)
    assert request == admin_pb2.DescribeDurableRequest(topic="orders", name="billing", exact=True)
    nothing = server.begin(lambda: server.client.describe_durable("orders", "billing"))
    figures = admin_pb2.Durable(figures=admin_pb2.DurableFigures())
    server.answer("DescribeDurable", admin_pb2.DescribeDurableResponse(durable=figures))
    assert nothing.result(SECONDS_MAX).figures == DurableFigures(0, 0, 0, 0, None, exact=False)


def test_rewind(server: Server) -> None:
    call = server.begin(lambda: server.client.rewind("orders", "billing", EARLIEST, force=True))
    request = server.answer("Rewind", sow_pb2.RewindResponse(bookmark="e.1", unacknowledged_entries=8))
    assert call.result(SECONDS_MAX) == Rewound("e.1", 8)
    assert request == sow_pb2.RewindRequest(topic="orders", durable="billing", earliest=True, force=True)
    refused_ = server.begin(lambda: server.client.rewind("orders", "billing", EARLIEST))
    server.refuse("Rewind", grpc.StatusCode.FAILED_PRECONDITION, "DURABLE_IN_USE")
    with pytest.raises(FailedPrecondition):
        refused_.result(SECONDS_MAX)


def test_browsing_a_durable(server: Server) -> None:
    call = server.begin(lambda: server.client.durable_browse("orders", "billing", entries_max=7, after="e.1"))
    last = sow_pb2.BrowseDurableResponse(bookmark="e.2", complete=True)
    request = server.stream("BrowseDurable", sow_pb2.BrowseDurableResponse(), last)
    assert call.result(SECONDS_MAX) == Browsed((), "e.2", complete=True)
    assert request == sow_pb2.BrowseDurableRequest(
        topic="orders", durable="billing", max_entries=7, after_bookmark="e.1"
    )
    cut = server.begin(lambda: server.client.durable_browse("orders", "billing"))
    server.stream("BrowseDurable", sow_pb2.BrowseDurableResponse())
    with pytest.raises(Unavailable, match="the answer to the browse"):
        cut.result(SECONDS_MAX)


def test_delete_durable(server: Server) -> None:
    call = server.begin(lambda: server.client.delete_durable("orders", "billing", force=True))
    request = server.answer("DeleteDurable", admin_pb2.DeleteDurableResponse())
    call.result(SECONDS_MAX)
    assert request == admin_pb2.DeleteDurableRequest(topic="orders", name="billing", force=True)


def test_clear_backlog(server: Server) -> None:
    for name in ("billing", None):
        call = server.begin(partial(server.client.clear_backlog, "orders", name))
        request = server.answer("ClearBacklog", admin_pb2.ClearBacklogResponse(acknowledged_entries=7))
        assert call.result(SECONDS_MAX) == 7
        assert request == admin_pb2.ClearBacklogRequest(topic="orders", name=name or "")


POLICY = admin_pb2.Policy(
    name="short",
    pattern="tmp.*",
    priority=3,
    applies_to=admin_pb2.POLICY_TARGET_TOPICS,
    topic=admin_pb2.TopicSettings(max_bytes=7),
    matches=2,
)
TOLD = Policy("short", "tmp.*", 3, "topics", operator=False, settings={"max_bytes": 7}, matches=2)


def test_set_policy(server: Server) -> None:
    call = server.begin(lambda: server.client.set_policy("short", "tmp.*", topics={"max_bytes": 7}, priority=3))
    request = server.answer("SetPolicy", admin_pb2.SetPolicyResponse(policy=POLICY))
    assert call.result(SECONDS_MAX) == TOLD
    sent = admin_pb2.Policy()
    sent.CopyFrom(POLICY)
    sent.ClearField("matches")
    assert request.policy == sent


def test_get_list_and_delete_policies(server: Server) -> None:
    got = server.begin(lambda: server.client.get_policy("short", operator=True))
    request = server.answer("GetPolicy", admin_pb2.GetPolicyResponse(policy=POLICY))
    assert got.result(SECONDS_MAX) == TOLD
    assert (request.name, request.operator) == ("short", True)
    listed = server.begin(server.client.policies)
    server.answer("ListPolicies", admin_pb2.ListPoliciesResponse(policies=[POLICY]))
    assert listed.result(SECONDS_MAX) == [TOLD]
    deleted = server.begin(lambda: server.client.delete_policy("short"))
    server.refuse("DeletePolicy", grpc.StatusCode.NOT_FOUND, "POLICY_NOT_FOUND")
    with pytest.raises(NotFound):
        deleted.result(SECONDS_MAX)


def test_status(server: Server) -> None:
    call = server.begin(server.client.status)
    response = admin_pb2.GetStatusResponse(
        instance="nyc", state="failed", failure="disk", clock_time=timestamp_pb2.Timestamp(seconds=2), last_sequence=9
    )
    server.answer("GetStatus", response)
    status = call.result(SECONDS_MAX)
    assert (status.instance, status.state, status.failure, status.last_sequence) == ("nyc", "failed", "disk", 9)
    assert status.clock_time == datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)


def test_accept_clock(server: Server) -> None:
    call = server.begin(server.client.accept_clock)
    before, after = timestamp_pb2.Timestamp(seconds=1), timestamp_pb2.Timestamp(seconds=2)
    server.answer("AcceptClock", admin_pb2.AcceptClockResponse(before=before, after=after))
    moments = [datetime(1970, 1, 1, 0, 0, second, tzinfo=UTC) for second in (1, 2)]
    assert call.result(SECONDS_MAX) == ClockAccepted(*moments)


def test_compact(server: Server) -> None:
    call = server.begin(server.client.compact)
    server.answer("Compact", admin_pb2.CompactResponse(bytes_before=10, bytes_after=4))
    assert call.result(SECONDS_MAX) == Compacted(10, 4)


# ---- other instances ----


def test_replication_status(server: Server) -> None:
    call = server.begin(server.client.replication_status)
    seconds = timestamp_pb2.Timestamp
    response = admin_pb2.GetReplicationStatusResponse(
        instance="nyc-1",
        last_sequence=9,
        outgoing=[
            admin_pb2.OutgoingLink(
                peer="ldn-1",
                address="ldn:1",
                state="refused",
                mode="sync",
                topics_pattern=".*",
                acknowledged_sequence=4,
                lag_sequences=5,
                lag_micros=1_500_000,
                skew_micros=-2,
                last_error="no",
                last_error_reason=types_pb2.ERROR_REASON_PEER_NOT_ACCEPTED,
                last_error_time=seconds(seconds=2),
                since=seconds(seconds=1),
                topics=[admin_pb2.LinkTopic(topic="orders", state="seeding")],
            )
        ],
        incoming=[admin_pb2.IncomingLink(peer="ldn-1", state="away", cursor=1, head_sequence=2, applied=3)],
    )
    server.answer("GetReplicationStatus", response)
    status = call.result(SECONDS_MAX)
    assert (status.instance, status.last_sequence) == ("nyc-1", 9)
    (out,), (into,) = status.outgoing, status.incoming
    assert (out.peer, out.state, out.mode, out.lag_sequences) == ("ldn-1", "refused", "sync", 5)
    assert (out.lag, out.skew) == (timedelta(seconds=1.5), timedelta(microseconds=-2))
    assert (out.last_error_reason, out.topics) == ("PEER_NOT_ACCEPTED", (LinkTopic("orders", "seeding", ""),))
    assert out.since == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert out.last_error_time == datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)
    assert (into.peer, into.cursor, into.applied) == ("ldn-1", 1, 3)
    assert (into.last_error_reason, into.last_error_time) == ("", None)


def test_a_reason_of_a_newer_server_is_its_number(server: Server) -> None:
    call = server.begin(server.client.replication_status)
    link = admin_pb2.IncomingLink.FromString(admin_pb2.IncomingLink(peer="p").SerializeToString() + b"\x60\xe7\x07")
    server.answer("GetReplicationStatus", admin_pb2.GetReplicationStatusResponse(incoming=[link]))
    assert call.result(SECONDS_MAX).incoming[0].last_error_reason == "999"


def test_verify_and_repair_tell_topic_by_topic(server: Server) -> None:
    told: list[Verified | Repaired] = []
    call = server.begin(lambda: server.client.verify_replication("ldn-1", ["orders"], keys_max=0, on_topic=told.append))
    request = server.stream(
        "VerifyReplication",
        admin_pb2.VerifyReplicationResponse(
            topic="orders",
            records=9,
            differing=1,
            differences=[admin_pb2.Difference(key="a", version_here=1, version_there=2)],
        ),
        admin_pb2.VerifyReplicationResponse(topic="ticks", left_out="no"),
    )
    assert request == admin_pb2.VerifyReplicationRequest(peer="ldn-1", topics=["orders"], keys_max=0)
    assert request.HasField("keys_max")
    verified = call.result(SECONDS_MAX)
    assert verified == [Verified("orders", 9, 1, (Difference("a", 1, 2),), ""), Verified("ticks", 0, 0, (), "no")]

    repairing = server.begin(lambda: server.client.repair_replication("ldn-1", on_topic=told.append))
    response = admin_pb2.RepairReplicationResponse(topic="orders", differing=3, sent=2, received=1)
    assert server.stream("RepairReplication", response) == admin_pb2.RepairReplicationRequest(peer="ldn-1")
    repaired = repairing.result(SECONDS_MAX)
    assert repaired == [Repaired("orders", 3, 2, 1, "")]
    assert told == [*verified, *repaired]


@pytest.mark.parametrize(
    ("peer", "topics", "keys_max", "field"),
    [("", None, 1, "peer"), ("p", [], 1, "topics"), ("p", "orders", 1, "topics"), ("p", None, -1, "keys_max")],
)
def test_a_comparison_that_makes_no_sense_is_refused_here(
    server: Server, peer: str, topics: list[str] | None, keys_max: int, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        server.client.verify_replication(peer, topics, keys_max=keys_max)
    assert caught.value.details["field"] == field


def test_a_backup(server: Server) -> None:
    call = server.begin(lambda: server.client.backup("/b"))
    response = admin_pb2.BackupResponse(directory="/b", sequence=7, bytes=8)
    assert server.answer("Backup", response) == admin_pb2.BackupRequest(directory="/b")
    assert call.result(SECONDS_MAX) == BackupMade("/b", 7, 8)


def test_deleting_a_topic_can_be_forced(server: Server) -> None:
    """Rule T5."""
    for force in (False, True):
        call = server.begin(partial(server.client.delete_topic, "orders", force=force))
        request = server.answer("DeleteTopic", admin_pb2.DeleteTopicResponse(deleted_records=2))
        assert request == admin_pb2.DeleteTopicRequest(name="orders", force=force)
        assert call.result(SECONDS_MAX) == 2


def test_replicated_is_sent_and_a_refusal_has_the_number_of_stored_records(server: Server) -> None:
    """Rule P5: it is no failure of the write, so nobody writes it again by itself."""
    call = server.begin(lambda: server.client.publish("orders", {"id": 1}, durability="replicated"))
    request = server.refuse(
        "Publish", grpc.StatusCode.UNAVAILABLE, "REPLICATION_UNAVAILABLE", "it stands here", applied="1"
    )
    assert request.durability == types_pb2.DURABILITY_REPLICATED
    with pytest.raises(ReplicationUnavailable, match="it stands here") as caught:
        call.result(SECONDS_MAX)
    assert isinstance(caught.value, Unavailable)
    assert caught.value.applied == 1


# ---- the publisher ----


def acknowledged(applied: int, *refusals: types_pb2.Refusal, duplicates: int = 0) -> sow_pb2.PublishStreamResponse:
    return sow_pb2.PublishStreamResponse(
        applied=applied, duplicates=duplicates, refusals=refusals, durability=types_pb2.DURABILITY_FSYNC
    )


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
    publisher = server.client.publisher("orders", batch_records=2)

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


# ---- all of them ----


def test_every_rpc_of_the_contract_is_called_by_a_test_here() -> None:
    with open(__file__, encoding="utf-8") as source:
        text = source.read()
    for service in (SOW, ADMIN):
        for method in service.methods:
            if method.name != "GetPublisher":  # for clients that go on in an epoch; ours begin one
                assert f'"{method.name}"' in text, method.name
