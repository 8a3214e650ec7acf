"""From arguments to requests: the requests of the client's pure core, and its refusals before sending."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from sow.v1 import admin_pb2, sow_pb2, types_pb2
from sow_client import (
    EARLIEST,
    NEVER,
    UNLIMITED,
    Client,
    DurableSettings,
    EffectiveSetting,
    IndexStatus,
    InternalError,
    InvalidArgument,
    Policy,
    Published,
    Refusal,
    TopicSettings,
    _admin,
    _lifetimes,
    _reads,
    _retention,
    _writes,
)
from sow_client._channel import Tls, target
from sow_client._documents import encode
from sow_client._setting_values import TopicSettingsArguments
from sow_client._settings import durable_message, durable_settings_of, topic_message

MICROS = 1_700_000_000_000_000
MOMENT = datetime.fromtimestamp(1_700_000_000, UTC)


@pytest.mark.parametrize(
    ("ttl", "expire_at", "expected"),
    [
        (None, None, None),
        ("30s", None, types_pb2.Lifetime(ttl_micros=30_000_000)),
        ("1h30m", None, types_pb2.Lifetime(ttl_micros=5_400_000_000)),
        ("0s", None, types_pb2.Lifetime(ttl_micros=0)),
        (0, None, types_pb2.Lifetime(ttl_micros=0)),
        (30, None, types_pb2.Lifetime(ttl_micros=30_000_000)),
        (4.35, None, types_pb2.Lifetime(ttl_micros=4_350_000)),
        (timedelta(milliseconds=1.5), None, types_pb2.Lifetime(ttl_micros=1_500)),
        (NEVER, None, types_pb2.Lifetime(never=True)),
        ("never", None, types_pb2.Lifetime(never=True)),
        (None, MICROS, types_pb2.Lifetime(expire_time_micros=MICROS)),
        (None, 10**14, types_pb2.Lifetime(expire_time_micros=10**14)),
        (None, MOMENT, types_pb2.Lifetime(expire_time_micros=MICROS)),
        (None, MOMENT.astimezone(timezone(timedelta(hours=5))), types_pb2.Lifetime(expire_time_micros=MICROS)),
        (None, "2023-11-14T22:13:20Z", types_pb2.Lifetime(expire_time_micros=MICROS)),
        (None, "2023-11-15T00:13:20.000001+02:00", types_pb2.Lifetime(expire_time_micros=MICROS + 1)),
    ],
)
def test_a_lifetime_is_absent_never_a_ttl_or_a_moment(
    ttl: Any, expire_at: Any, expected: types_pb2.Lifetime | None
) -> None:
    """Rule L2: absent is not zero is not never."""
    assert _lifetimes.lifetime_message(ttl, expire_at) == expected


@pytest.mark.parametrize(
    ("ttl", "expire_at", "reason", "field"),
    [
        ("30", None, "INVALID_ARGUMENT", "ttl"),
        ("soon", None, "INVALID_ARGUMENT", "ttl"),
        ("", None, "INVALID_ARGUMENT", "ttl"),
        (-1, None, "LIFETIME_NEGATIVE", "ttl"),
        (timedelta(seconds=-1), None, "LIFETIME_NEGATIVE", "ttl"),
        (True, None, "INVALID_ARGUMENT", "ttl"),
        (float("nan"), None, "INVALID_ARGUMENT", "ttl"),
        (float("inf"), None, "INVALID_ARGUMENT", "ttl"),
        (10**13, None, "LIFETIME_TOO_LONG", "ttl"),
        ([], None, "INVALID_ARGUMENT", "ttl"),
        (None, datetime(2026, 1, 1), "INVALID_ARGUMENT", "expire_at"),  # noqa: DTZ001 - the point of it
        (None, "2026-01-01T00:00:00", "INVALID_ARGUMENT", "expire_at"),
        (None, "tomorrow", "INVALID_ARGUMENT", "expire_at"),
        (None, 1.5, "INVALID_ARGUMENT", "expire_at"),
        (None, True, "INVALID_ARGUMENT", "expire_at"),
        (None, -1, "LIFETIME_NEGATIVE", "expire_at"),
        (None, 0, "INVALID_ARGUMENT", "expire_at"),
        (None, MICROS // 10**6, "INVALID_ARGUMENT", "expire_at"),
        (None, MICROS // 1000, "INVALID_ARGUMENT", "expire_at"),
        (None, 2**63, "LIFETIME_TOO_LONG", "expire_at"),
        ("1s", MICROS, "INVALID_ARGUMENT", "expire_at"),
        (NEVER, MICROS, "INVALID_ARGUMENT", "expire_at"),
    ],
)
def test_a_wrong_lifetime_is_refused_with_the_name_of_its_argument(
    ttl: Any, expire_at: Any, reason: str, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _lifetimes.lifetime(ttl, expire_at)
    assert (caught.value.reason, caught.value.details["field"]) == (reason, field)


def test_documents_are_encoded_once_and_bytes_go_as_they_are() -> None:
    assert encode({"id": 1, "price": 9.5}) == b'{"id":1,"price":9.5}'
    assert encode("é") == "é".encode()
    raw = b"\x00\xff"
    assert encode(raw) is raw
    assert encode(bytearray(raw)) == raw
    assert encode(memoryview(raw)) == raw


@pytest.mark.parametrize("data", [{"f": object()}, {"n": 2**70 * 1j}, "\ud800"])
def test_values_that_cannot_be_encoded_are_refused_as_malformed(data: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        encode(data)
    assert caught.value.reason == "PAYLOAD_MALFORMED"


def test_at_most_one_condition() -> None:
    assert _writes.condition() is None
    assert _writes.condition(only_if_version=0) == types_pb2.Condition(only_if_version=0)
    with pytest.raises(InvalidArgument):
        _writes.condition(only_if_absent=True, only_if_version=3)


def test_durability_has_two_names() -> None:
    assert _writes.durability_value(None) == types_pb2.DURABILITY_UNSPECIFIED
    assert _writes.durability_name(_writes.durability_value("buffered")) == "buffered"
    with pytest.raises(InvalidArgument):
        _writes.durability_value("sure")  # type: ignore[arg-type]  # wrong on purpose


def test_requests_at_the_same_time_never_share_a_publisher_id() -> None:
    """Under one id the request with the lower sequence would be dropped as a retry if it arrived second (rule P6)."""
    sequencer = _writes.Sequencer()
    first, second = sequencer.take(), sequencer.take()
    assert first.publisher_id != second.publisher_id
    sequencer.give_back(first, sow_pb2.PublishResponse(results=[sow_pb2.PublishResult()] * 3))
    third = sequencer.take()
    assert (third.publisher_id, third.first_sequence) == (first.publisher_id, 4)


def test_many_documents_are_cut_into_requests_and_atomic_ones_are_not() -> None:
    documents = [b"x"] * (_reads.RECORDS_PER_REQUEST_MAX + 1)
    batches = list(_writes.publish_batches(documents, None, atomic=False))
    assert [(len(batch.records), batch.first_index) for batch in batches] == [(10_000, 0), (1, 10_000)]
    assert len(list(_writes.publish_batches(documents, None, atomic=True))) == 1
    large = [bytes(_writes.CHUNK_BYTES - 1)] * 3
    assert [len(batch.records) for batch in _writes.publish_batches(large, None, atomic=False)] == [1, 1, 1]


def test_keys_go_with_the_documents_one_by_one() -> None:
    (batch,) = _writes.publish_batches(["a", "b"], ["1", "2"], atomic=False)
    assert [record.key for record in batch.records] == ["1", "2"]
    for keys in (["1"], ["1", "2", "3"]):
        with pytest.raises(InvalidArgument) as caught:
            list(_writes.publish_batches(["a", "b"], keys, atomic=False))
        assert caught.value.details["field"] == "keys"


def test_results_that_do_not_fit_the_request_are_not_believed() -> None:
    with pytest.raises(InternalError):
        _writes.outcomes(sow_pb2.PublishResponse(results=[sow_pb2.PublishResult(key="1")]), expected=2)


def test_results_keep_zero_and_never_apart() -> None:
    results = [
        sow_pb2.PublishResult(key="1", version=5, expire_time_micros=0, sequence=9),
        sow_pb2.PublishResult(key="2", version=6, sequence=10, ttl_ignored=True),
        sow_pb2.PublishResult(
            refusal=types_pb2.Refusal(reason=types_pb2.ERROR_REASON_CONDITION_FAILED, message="no", current_version=3)
        ),
    ]
    response = sow_pb2.PublishResponse(results=results, journal_epoch="e")
    assert _writes.outcomes(response, expected=3, first_index=10) == [
        Published("1", 5, 0, 9, ttl_ignored=False, duplicate=False, bookmark="e.9"),
        Published("2", 6, None, 10, ttl_ignored=True, duplicate=False, bookmark="e.10"),
        Refusal(12, "CONDITION_FAILED", "no", 3),
    ]
    # There is no position inside an atomic request.
    atomic = _writes.outcomes(response, expected=3, atomic=True)
    assert [one.bookmark for one in atomic if isinstance(one, Published)] == ["e.10", "e.10"]


def test_a_forgotten_expire_time_of_a_duplicate_does_not_read_as_never() -> None:
    results = [
        sow_pb2.PublishResult(key="1", version=5, expire_time_micros=7, sequence=9, duplicate=True),
        sow_pb2.PublishResult(key="1", version=5, sequence=9, duplicate=True),
        sow_pb2.PublishResult(key="1", version=5, sequence=9, duplicate=True, expire_time_unknown=True),
        sow_pb2.PublishResult(key="1", duplicate=True),  # as servers before that field answer
    ]
    found = _writes.outcomes(sow_pb2.PublishResponse(results=results), expected=4)
    assert [(one.expire_time_micros, one.expire_time_known) for one in found if isinstance(one, Published)] == [
        (7, True),
        (None, True),
        (None, False),
        (None, False),
    ]
    assert all(isinstance(one, Published) and one.bookmark is None for one in found)  # nor is the epoch told


def test_one_text_is_not_a_list_of_keys() -> None:
    with Client("127.0.0.1:1") as client:
        for call in (
            lambda keys: client.get_many("orders", keys),
            lambda keys: client.sow_delete("orders", keys=keys),
            lambda keys: _reads.query_request("orders", keys=keys),
        ):
            with pytest.raises(InvalidArgument) as caught:
                call("abc")
            assert caught.value.details["field"] == "keys"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"keys": []}, "keys"),
        ({"top_n": 0}, "top_n"),
        ({"skip_n": -1}, "skip_n"),
        ({"batch_size": -1}, "batch_size"),
        ({"select": ["/a"], "exclude": ["/b"]}, "exclude"),
        ({"select": "/a"}, "select"),
    ],
)
def test_a_wrong_option_of_a_query_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _reads.query_request("orders", **arguments)
    assert caught.value.details["field"] == field


def test_a_delete_selects_in_exactly_one_way() -> None:
    """Rule D1."""

    def request(**arguments: Any) -> sow_pb2.SowDeleteRequest:
        values = {
            "keys": None,
            "filter_text": None,
            "payload": None,
            "everything": False,
            "dry_run": False,
            "durability": None,
        }
        chosen: dict[str, Any] = values | arguments
        return _writes.delete_request("orders", **chosen)

    assert request(keys=["1"]).by_keys.keys == ["1"]
    assert request(payload=b'{"id":1}').by_payload == b'{"id":1}'
    assert request(everything=True).all
    assert request(filter_text="/a = 1").by_filter == "/a = 1"
    for wrong in (
        {},
        {"keys": ["1"], "everything": True},
        {"keys": ["1"], "payload": b"{}"},
        {"filter_text": "true", "everything": True},
        {"filter_text": " "},  # every record, by an empty variable
    ):
        with pytest.raises(InvalidArgument):
            request(**wrong)


@pytest.mark.parametrize(
    ("mode", "arguments", "field"),
    [
        ("set", {}, "ttl"),
        ("cap", {}, "ttl"),
        ("clear", {"ttl": "1h"}, "ttl"),
        ("raise", {"ttl": "1h"}, "mode"),
        ("set", {"ttl": "1h", "expire_at": MICROS}, "expire_at"),
        ("set", {"ttl": "1h", "filter_text": ""}, "filter"),
    ],
)
def test_a_restamp_needs_a_lifetime_unless_it_clears(mode: Any, arguments: dict[str, Any], field: str) -> None:
    """Rule L13."""
    chosen = {"filter_text": None, "ttl": None, "expire_at": None, "dry_run": False} | arguments
    with pytest.raises(InvalidArgument) as caught:
        _writes.restamp_request("orders", mode, **chosen)
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (None, {}),
        ("e.17", {"bookmark": "e.17"}),
        (EARLIEST, {"earliest": True}),
        ("earliest", {"earliest": True}),
        (MOMENT, {"start_time_micros": MICROS}),
        (MOMENT.astimezone(timezone(timedelta(hours=5))), {"start_time_micros": MICROS}),
    ],
)
def test_a_subscription_starts_now_or_at_a_bookmark_a_time_or_the_earliest_change(
    start: Any, expected: dict[str, Any]
) -> None:
    """Rule S4."""
    assert subscribe(start=start) == sow_pb2.SubscribeRequest(topic="orders", **expected)


def subscribe(**arguments: Any) -> sow_pb2.SubscribeRequest:
    values: dict[str, Any] = {
        "topic": "orders", "filter_text": None, "topic_pattern": None, "sow": False, "oof": False, "delta": False,
        "changes": False, "start": None, "conflation": None, "progress": None, "empty_deltas": False, "select": None,
        "exclude": None, "batch_size": 0,
    }  # fmt: skip
    return _reads.subscribe_request(**(values | arguments))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"topic": None}, "topic"),
        ({"topic_pattern": "o.*"}, "topic"),
        ({"start": datetime(2026, 1, 1)}, "start"),  # noqa: DTZ001 - the point of it
        ({"start": 5}, "start"),
        ({"conflation": "5"}, "conflation"),
        ({"progress": -1}, "progress"),
        ({"batch_size": -1}, "batch_size"),
        ({"select": ["/a"], "exclude": ["/b"]}, "exclude"),
    ],
)
def test_a_wrong_argument_of_a_subscription_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        subscribe(**arguments)
    assert caught.value.details["field"] == field


def test_a_subscription_to_the_topics_of_a_pattern() -> None:
    assert subscribe(topic=None, topic_pattern="o.*") == sow_pb2.SubscribeRequest(topic_pattern="o.*")


def test_indexes_are_settings_and_have_a_status() -> None:
    altered = _admin.alter_request("orders", {"index": ["/symbol", "/price"]})
    assert (list(altered.update_paths), list(altered.settings.index)) == (["index"], ["/symbol", "/price"])
    assert _admin.alter_request("orders", {"index": []}).update_paths == ["index"]
    status = [admin_pb2.IndexStatus(path="/symbol", complete=True), admin_pb2.IndexStatus(path="/price")]
    topic = _admin.topic(admin_pb2.Topic(name="orders", settings=altered.settings, indexes=status))
    assert topic.settings.index == ("/symbol", "/price")
    assert topic.indexes == (IndexStatus("/symbol", complete=True), IndexStatus("/price", complete=False))


def test_expiration_is_one_setting_for_people_and_two_fields_on_the_wire() -> None:
    altered = _admin.alter_request("orders", {"expiration": "30s", "max_ttl": None})
    assert altered.update_paths == ["expiration", "default_ttl", "max_ttl"]
    assert altered.settings.expiration == admin_pb2.EXPIRATION_ENABLED
    assert altered.settings.default_ttl.ToMicroseconds() == 30_000_000
    assert not altered.settings.HasField("max_ttl")
    plain = _admin.alter_request("orders", {"expiration": "enabled"})
    assert not plain.settings.HasField("default_ttl")


def test_none_is_the_default_of_every_setting() -> None:
    """Story: None turned `expiration` on, instead of back to "disabled", and broke on half of the others. None is "not
    set" on the wire, so that policies and the server's defaults count (T2)."""
    names = TopicSettings.__dataclass_fields__
    altered = _admin.alter_request("orders", dict.fromkeys(names))  # type: ignore[arg-type]  # the values are all None
    assert _admin.topic(admin_pb2.Topic(settings=altered.settings)).settings == TopicSettings()
    assert altered.settings == admin_pb2.TopicSettings()
    assert set(names) <= set(altered.update_paths)


def test_settings_that_are_not_named_are_left_to_the_server() -> None:
    assert _admin.create_request("orders", None, {}).settings == admin_pb2.TopicSettings()
    assert _admin.create_request("orders", TopicSettings(), {}).settings == admin_pb2.TopicSettings()


def test_settings_make_the_way_to_the_server_and_back() -> None:
    values = TopicSettings(
        key=["/carrier", "/flight"],
        message_type="fix",
        expiration="90s",
        min_ttl="1s",
        max_ttl=timedelta(hours=1),
        journal=False,
        fix_separator="|",
        retain_time="0s",
        retain_bytes=0,
        index=["/carrier"],
        max_age="2d",
        max_bytes=-1,
        max_entries=0,
        backlog_ttl=timedelta(hours=2),
        backlog_quota_bytes=2**40,
        backlog_quota_age=90,
        backlog_action="conflate",
        durable_idle_ttl="1w",
        idle_ttl="1h30m",
        publish_is_use=True,
        only_if_empty=False,
        auto_delete=True,
        dead_letter="dead",
        dead_letter_by_key=True,
        on_missing="drop",
        backlog_quota_entries=100,
        delivery_limit=-1,
        replicate_durables=True,
        max_records=1_000,
        max_stored_bytes="1GiB",
    )
    assert values.named() == set(TopicSettings.__dataclass_fields__), "none is left out here"
    assert (values.backlog_quota_age, values.durable_idle_ttl) == ("1m30s", "7d")
    assert (values.expiration, values.max_ttl, values.key) == ("1m30s", "1h", ("/carrier", "/flight"))
    message = _admin.create_request("orders", values, {}).settings
    assert message.HasField("retain_time")  # zero is not unset
    assert _admin.topic(admin_pb2.Topic(name="orders", settings=message)).settings == values
    for expiration in ("disabled", "enabled", "reject"):
        for retain in ("unlimited", None):
            other = TopicSettings(expiration=expiration, retain_time=retain, replicate_durables=False)
            sent = topic_message(other, {"expiration", "retain_time", "replicate_durables"})
            assert _admin.topic(admin_pb2.Topic(settings=sent)).settings == other


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"expiraton": "1s"}, "expiraton"),
        ({"key": "/id"}, "key"),
        ({"index": "/id"}, "index"),
        ({"min_ttl": "1"}, "min_ttl"),
        ({"message_type": "xml"}, "message_type"),
        ({"backlog_action": "wait"}, "backlog_action"),
        ({"on_missing": "cry"}, "on_missing"),
        ({"idle_ttl": "10"}, "idle_ttl"),
        ({"max_age": timedelta(days=-1)}, "max_age"),
        ({}, "settings"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(arguments: TopicSettingsArguments, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _admin.alter_request("orders", arguments)
    assert caught.value.details["field"] == field


def test_a_described_topic_has_the_settings_in_force_and_their_sources() -> None:
    """T2."""
    described = _admin.topic(
        admin_pb2.Topic(
            name="orders",
            statistics=admin_pb2.TopicStatistics(
                durables=2, backlog_bytes=7, backlog_age=Duration(seconds=90), tombstones=4
            ),
            effective=[admin_pb2.EffectiveSetting(name="max_ttl", value="1h", origin="policy short")],
            planned_journal_bytes=-1,
        )
    )
    assert described.effective == (EffectiveSetting("max_ttl", "1h", "policy short"),)
    assert described.planned_journal_bytes == -1
    assert described.statistics is not None
    assert (described.statistics.durables, described.statistics.backlog_bytes) == (2, 7)
    assert described.statistics.backlog_age == timedelta(seconds=90)
    assert described.statistics.tombstones == 4
    listed = _admin.topic(admin_pb2.Topic(name="orders"))
    assert (listed.effective, listed.planned_journal_bytes) == ((), None)


# ---- durables and policies ----


def test_settings_of_a_durable_make_the_way_to_the_server_and_back() -> None:
    for values in (
        DurableSettings(),
        DurableSettings("0s", 0, "1h", "1w"),
        DurableSettings("unlimited", -1),
        DurableSettings(retain_time=90),
    ):
        assert durable_settings_of(durable_message(values)) == values
    assert DurableSettings(retain_time=90).retain_time == "1m30s"


def test_the_consumer_of_a_durable() -> None:
    request = durable(
        filter_text="/price > 9", force=True, changes=True, settings={"idle_ttl": "1w", "retain_bytes": None}
    )
    assert request == sow_pb2.SubscribeRequest(
        topic="orders",
        filter="/price > 9",
        changes=True,
        durable=sow_pb2.DurableAttachment(
            name="billing", force=True, settings=types_pb2.DurableSettings(idle_ttl=Duration(seconds=604_800))
        ),
    )
    assert not durable().durable.HasField("settings"), "none were given: whichever it has are right"
    assert durable(start=EARLIEST).earliest


def durable(**arguments: Any) -> sow_pb2.SubscribeRequest:
    defaults: dict[str, Any] = dict.fromkeys(("filter_text", "start", "progress", "select", "exclude"))
    defaults |= {"topic": "orders", "name": "billing", "force": False, "oof": False, "changes": False}
    return _retention.durable_request(**(defaults | {"settings": {}, "batch_size": 0} | arguments))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"name": ""}, "name"),
        ({"settings": {"idle_ttl": "10"}}, "idle_ttl"),
        ({"settings": {"max_age": "1h"}}, "max_age"),
        ({"start": 7}, "start"),
    ],
)
def test_a_wrong_argument_of_a_durable_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        durable(**arguments)
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (EARLIEST, sow_pb2.RewindRequest(topic="orders", durable="billing", earliest=True)),
        ("earliest", sow_pb2.RewindRequest(topic="orders", durable="billing", earliest=True)),
        ("e.7", sow_pb2.RewindRequest(topic="orders", durable="billing", bookmark="e.7")),
        (
            datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC),
            sow_pb2.RewindRequest(topic="orders", durable="billing", time_micros=5_000_000),
        ),
    ],
)
def test_a_rewind_goes_to_a_bookmark_a_time_or_the_earliest_change(to: Any, expected: sow_pb2.RewindRequest) -> None:
    assert _retention.rewind_request("orders", "billing", to, force=False) == expected


def test_a_rewind_to_something_else_is_refused() -> None:
    for to in (7, datetime(1970, 1, 1)):  # noqa: DTZ001 - the test is about this fault
        with pytest.raises(InvalidArgument) as caught:
            _retention.rewind_request("orders", "billing", to, force=False)  # type: ignore[arg-type]  # wrong on purpose
        assert caught.value.details["field"] == "to"


def test_an_empty_name_does_not_clear_all_backlogs() -> None:
    assert _retention.clear_request("orders", None).name == ""
    with pytest.raises(InvalidArgument):
        _retention.clear_request("orders", "")


def policy(**arguments: Any) -> admin_pb2.Policy:
    defaults = {"name": "p", "pattern": "a.*", "topics": None, "durables": None, "priority": 0, "operator": False}
    return _retention.set_policy_request(**(defaults | arguments)).policy


def test_a_policy_has_only_its_declared_settings() -> None:
    """T2; zero and "disabled" are said, None is not."""
    of_topics = policy(
        topics={"max_ttl": timedelta(hours=1), "retain_bytes": 0, "expiration": "disabled", "max_age": None,
                "auto_delete": False, "retain_time": "unlimited", "dead_letter": "dead"},
        priority=-3, operator=True,
    )  # fmt: skip
    assert not of_topics.topic.HasField("max_age")
    told = _retention.policy(of_topics)
    assert told == Policy(
        "p", "a.*", -3, "topics", True,
        {"max_ttl": "1h", "retain_bytes": 0, "expiration": "disabled", "auto_delete": False,
         "retain_time": "unlimited", "dead_letter": "dead"},
        0,
    )  # fmt: skip
    of_durables = policy(durables={"idle_ttl": "1d", "retain_time": "0s"})
    assert _retention.policy(of_durables).settings == {"idle_ttl": "1d", "retain_time": "0s"}
    assert _retention.policy(of_durables).applies_to == "durables"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "topics"),
        ({"topics": {}, "durables": {}}, "topics"),
        ({"topics": {"key": ["/id"]}}, "key"),
        ({"topics": {"journal": False}}, "journal"),
        ({"topics": {"max_tll": "1h"}}, "max_tll"),
        ({"durables": {"max_ttl": "1h"}}, "max_ttl"),
        ({"topics": {}, "name": ""}, "name"),
        ({"topics": {}, "priority": 2**31}, "priority"),
    ],
)
def test_a_wrong_argument_of_a_policy_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        policy(**arguments)
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("127.0.0.1:7451", "127.0.0.1:7451"),
        ("db.example", "db.example:7450"),
        ("[::1]", "[::1]:7450"),
        ("[::1]:7451", "[::1]:7451"),
        ("unix:/run/sow", "unix:/run/sow"),
    ],
)
def test_an_address_gets_the_default_port(server: str, expected: str) -> None:
    assert target(server) == expected


@pytest.mark.parametrize("server", ["", "host:", "host:0", "host:70000", "::1", "http://host", "a b"])
def test_a_wrong_address_is_refused(server: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        target(server)
    assert caught.value.details["field"] == "server"


def test_tls_files_that_cannot_be_read_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"/nowhere/ca\.pem"):
        Tls(ca="/nowhere/ca.pem").credentials()
    with pytest.raises(InvalidArgument):
        Tls(certificate="only.pem").credentials()


# ---- settings in every form ----


def test_settings_are_taken_in_every_sensible_form() -> None:
    settings = TopicSettings(
        retain_bytes="1GiB", max_bytes="1.5MiB", backlog_quota_bytes="unlimited", max_entries=UNLIMITED, min_ttl=0.5,
        delivery_limit="unlimited", max_age=timedelta(minutes=10), idle_ttl="10m", backlog_ttl=600, key=["/id"],
        index=("/a",),
    )  # fmt: skip
    assert (settings.retain_bytes, settings.max_bytes, settings.backlog_quota_bytes) == (2**30, 3 * 2**19, -1)
    assert (settings.max_entries, settings.delivery_limit) == (-1, -1)
    assert settings.max_age == settings.idle_ttl == settings.backlog_ttl == "10m"
    assert (settings.min_ttl, settings.key, settings.index) == ("500ms", ("/id",), ("/a",))
    for unlimited in (UNLIMITED, "unlimited", NEVER, "never"):
        assert TopicSettings(retain_time=unlimited).retain_time == "unlimited"
        assert DurableSettings(retain_time=unlimited).retain_time == "unlimited"
    assert DurableSettings(retain_bytes="64MiB").retain_bytes == 64 * 2**20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retain_bytes", "1GB of it"),
        ("retain_bytes", "1024"),
        ("retain_bytes", 1.5),
        ("retain_bytes", True),
        ("retain_bytes", -2),
        ("max_bytes", 2**63),
        ("max_entries", "1000"),
        ("max_entries", timedelta(1)),
        ("delivery_limit", [3]),
        ("retain_time", [1]),
        ("max_age", "soon"),
        ("max_age", UNLIMITED),
        ("idle_ttl", NEVER),
        ("expiration", NEVER),
        ("expiration", {}),
        ("min_ttl", b"10m"),
        ("journal", "yes"),
        ("auto_delete", 1),
        ("key", "/id"),
        ("key", 7),
        ("index", ["/a", 7]),
        ("fix_separator", 1),
        ("dead_letter", ["dead"]),
        ("message_type", ["json"]),
        ("backlog_action", 3),
        ("on_missing", True),
        ("default_ttl", "soon"),
        ("default_ttl", [1]),
    ],
)
def test_a_setting_of_a_wrong_kind_is_refused_with_its_name(name: str, value: Any) -> None:
    """It was a bare TypeError of protobuf, without a field."""
    arguments: Any = {name: value}
    calls: list[Callable[[], object]] = [
        lambda: _admin.create_request("orders", None, arguments),
        lambda: _admin.alter_request("orders", arguments),
        lambda: _retention.set_policy_request("p", ".*", topics=arguments, durables=None, priority=0, operator=False),
        lambda: durable_message(DurableSettings(**arguments)),
    ]
    of_topics = name in {"key", "index", "journal", "message_type", "fix_separator"}
    of_durables = name in DurableSettings.__dataclass_fields__
    for call in calls[: 2 if of_topics else 4 if of_durables else 3]:
        with pytest.raises(InvalidArgument) as refused:
            call()
        assert refused.value.details["field"] == name


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ttl": "30s"}, "ttl: is not a setting of a topic; did you mean default_ttl?"),
        ({"retain_times": "30s"}, "retain_times: is not a setting of a topic; did you mean retain_time?"),
        ({"zzz": 1}, "zzz: is not a setting of a topic; they are key, "),
    ],
)
def test_a_name_that_is_no_setting_tells_the_one_that_is_meant(given: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        _admin.create_request("orders", None, given)  # type: ignore[arg-type]  # of a wrong type, on purpose
    assert str(error.value).startswith(told)


def test_default_ttl_is_expiration_with_a_duration() -> None:
    """As in the configuration file."""
    expected = _admin.create_request("orders", None, {"expiration": "30s"})
    assert _admin.create_request("orders", None, {"default_ttl": "30s"}) == expected
    assert _admin.create_request("orders", None, {"expiration": "enabled", "default_ttl": 30}) == expected
    assert _admin.alter_request("orders", {"default_ttl": None}) == _admin.alter_request("orders", {"expiration": None})
    with pytest.raises(InvalidArgument) as refused:
        _admin.create_request("orders", None, {"expiration": "reject", "default_ttl": "30s"})
    assert refused.value.details["field"] == "default_ttl"
