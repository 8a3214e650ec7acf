"""Topics, policies, durables and status in both clients, against a scripted server; and subscribing. Following is in
tests/integration/test_client_following, consuming in test_client_durable beside it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2, timestamp_pb2

from sow.v1 import admin_pb2, sow_pb2, types_pb2
from sow_client import (
    EARLIEST,
    NEVER,
    AlreadyExists,
    Browsed,
    ClockAccepted,
    Compacted,
    DurableFigures,
    DurableSettings,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Policy,
    Restamped,
    Rewound,
    Subscription,
    TopicChecked,
    TopicSettings,
    Unavailable,
    UnsoundRow,
)
from tests.support.fakes.called_server import (
    Server,
    loop,
    script,
    server,
)
from tests.support.fakes.scripted import SECONDS_MAX, ScriptedServer

__all__ = ["loop", "script", "server"]  # fixtures


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


def test_create_topic_that_may_exist_returns_it_as_it_is(server: Server) -> None:
    server.answers_descriptions()
    call = server.begin(lambda: server.client.create_topic("orders", key=["/other"], exist_ok=True))
    server.refuse("CreateTopic", grpc.StatusCode.ALREADY_EXISTS, "TOPIC_EXISTS")
    request = server.answer("DescribeTopic", admin_pb2.DescribeTopicResponse(topic=TOPIC))
    assert request.name == "orders"
    assert call.result(SECONDS_MAX).settings.key == ("/id",)


def test_create_topic_that_may_exist_is_refused_for_another_reason(server: Server) -> None:
    call = server.begin(lambda: server.client.create_topic("a b", exist_ok=True))
    server.refuse("CreateTopic", grpc.StatusCode.INVALID_ARGUMENT, "TOPIC_NAME_INVALID")
    with pytest.raises(InvalidArgument):
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
    server.answers_descriptions()
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
    closed = server.begin(durable.close)
    left = server.answer("Acknowledge", sow_pb2.AcknowledgeResponse(bookmark="e.7"))
    assert left == sow_pb2.AcknowledgeRequest(topic="orders", durable="billing", session="s1", detach=True)
    closed.result(SECONDS_MAX)
    rpc.cancelled()  # returns once the client has cancelled
    durable.close()  # makes no call


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
    replicated=True,
    consumer_at="ldn",
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
        assert (durable.replicated, durable.consumer_at) == (True, "ldn")


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


def test_the_history_of_a_key(server: Server) -> None:
    call = server.begin(lambda: server.client.history("orders", "7", entries_max=2, upto="e.9"))
    records = types_pb2.RecordColumns(
        key=["7", "7"],
        payload=[b"{}", b"{}"],
        version=[3, 2],
        publish_time_micros=[5, 5],
        expire_time_micros=[2**63 - 1] * 2,
        sequence=[9, 8],
        origins=["nyc-1"],
    )
    changes = sow_pb2.ChangeBatch(topic="orders", op=[sow_pb2.CHANGE_OP_DELETE, sow_pb2.CHANGE_OP_PUT], records=records)
    answer = sow_pb2.ReadHistoryResponse(changes=changes, commit_time_micros=[7, 5], instance=["ldn-1", "nyc-1"])
    end = sow_pb2.ReadHistoryResponse(end=sow_pb2.HistoryEnd(next_bookmark="e.4"))
    request = server.stream("ReadHistory", answer, end)
    found = call.result(SECONDS_MAX)
    assert (found.bookmark, found.discarded) == ("e.4", False)
    assert [(one.op, one.record.sequence, one.instance) for one in found.entries] == [
        ("delete", 9, "ldn-1"),
        ("put", 8, "nyc-1"),
    ]
    assert (found.entries[0].time - found.entries[1].time).microseconds == 2
    assert request == sow_pb2.ReadHistoryRequest(topic="orders", key="7", max_entries=2, upto_bookmark="e.9")
    cut = server.begin(lambda: server.client.history("orders", "7"))
    server.stream("ReadHistory", sow_pb2.ReadHistoryResponse())
    with pytest.raises(Unavailable, match="the history"):
        cut.result(SECONDS_MAX)
    with pytest.raises(InvalidArgument):
        server.client.history("orders", "7", entries_max=0)


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


def test_describe_instance(server: Server, script: ScriptedServer) -> None:
    script.describes_itself = False
    call = server.begin(server.client.describe_instance)
    response = admin_pb2.DescribeInstanceResponse(
        name="nyc", id="i", journal_epoch="e", cluster="blue", serving=True, server_version="9", contract=7
    )
    assert server.stream("DescribeInstance", response) == admin_pb2.DescribeInstanceRequest()
    found = call.result(SECONDS_MAX)
    assert (found.name, found.id, found.journal_epoch, found.cluster) == ("nyc", "i", "e", "blue")
    assert (found.serving, found.server_version, found.contract) == (True, "9", 7)


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
