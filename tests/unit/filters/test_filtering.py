"""Filters on stored records: the visible parts of a record, and refusals (rules K2, Q5, X2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Expiration, MessageType, Publish, TopicSettings
from sow_server.query.filtering import CACHED_CHARACTERS_MAX, RecordFilter, record_filter
from tests.support.stores.stores import SECOND, START, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("quotes", TopicSettings(key=("/id",), expiration=Expiration.ENABLED))
    yield rig
    rig.close()


def matching(rig: Rig, text: str, topic: str = "quotes") -> list[str]:
    """The keys of the live records that match, now."""
    found = rig.topic(topic)
    wanted = record_filter(found, text, rig.clock.now_micros())
    cut = rig.store.cuts.records(found)
    keys: list[bytes] = []
    values: list[bytes] = []
    try:
        assert cut.fill(found.prefix, 100, keys, values)[0] is None
    finally:
        cut.close()
    return [key.decode() for key, value in zip(keys, values, strict=True) if wanted.matches(key, value)]


def refused(rig: Rig, text: str, topic: str = "quotes", *, allow_now: bool = True) -> StoreError:
    with pytest.raises(StoreError) as caught:
        record_filter(rig.topic(topic), text, 0, allow_now=allow_now)
    assert caught.value.field == "filter"
    return caught.value


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("/price > 5", ["2", "3"]),
        ("/price > 5 AND /symbol = 'IBM'", ["3"]),
        ("/id = 1", ["1"]),
        ("/id IN ('1', 3.0)", ["1", "3"]),
        ("@key = 2", ["2"]),
        ("@key > '1' AND /price < 6", ["2"]),
        ("/nested/x IS NULL", ["1", "2"]),
        ("@topic = 'quotes' AND /price = 7", ["3"]),
        ("@topic = 'others'", []),
        ("true", ["1", "2", "3"]),
        ("1 = 2", []),
    ],
)
def test_a_filter_sees_the_payload_the_key_and_the_topic(rig: Rig, text: str, keys: list[str]) -> None:
    """K4: on the key field its canonical text is compared."""
    rig.run(
        Publish(
            "quotes",
            [b'{"id":"1","price":1}', b'{"id":2,"price":5.5}', b'{"id":3.0,"price":7,"symbol":"IBM","nested":{"x":0}}'],
        )
    )
    assert matching(rig, text) == keys


def test_a_filter_sees_the_stamps_and_the_version(rig: Rig) -> None:
    rig.create_topic("given")
    rig.put("given", "a")
    rig.time.tick(SECOND)
    rig.put("given", "b", ttl=10 * SECOND)
    version = rig.get("given", "b").version  # type: ignore[union-attr]  # it is there
    assert matching(rig, "@expire_time IS NULL", "given") == ["a"]
    assert matching(rig, f"@expire_time = {START + 11 * SECOND}", "given") == ["b"]
    assert matching(rig, f"@publish_time <= {START}", "given") == ["a"]
    assert matching(rig, f"@version = {version}", "given") == ["b"]
    assert matching(rig, "@expire_time < NOW_MICROS() + 10000001", "given") == ["b"]
    assert matching(rig, "@expire_time < NOW_MICROS() + 10000000", "given") == []


def test_now_is_that_of_the_request_and_can_be_moved(rig: Rig) -> None:
    """filtering [2]."""
    rig.run(Publish("quotes", [b'{"id":1,"at":%d}' % (START + 5)]))
    (value,) = rig.store.cuts.get(rig.topic("quotes"), [b"1"])[1]
    assert value is not None
    wanted = record_filter(rig.topic("quotes"), "/at < NOW_MICROS()", START)
    assert not wanted.matches(b"1", value)
    assert wanted.at(START + 6).matches(b"1", value)
    assert not wanted.matches(b"1", value)


@pytest.mark.parametrize(
    ("message_type", "payloads"),
    [
        (MessageType.MSGPACK, [msgspec.msgpack.encode({"55": "IBM", "44": price}) for price in (9, 11)]),
        (MessageType.FIX, [b"55=IBM\x0144=9\x01", b"55=IBM\x0144=11.5\x01"]),
        (MessageType.NVFIX, [b"55=IBM\x0144=9\x01x=\xff", b"55=IBM\x0144=11.5\x01"]),
    ],
)
def test_filters_work_on_every_message_type_with_fields(
    rig: Rig, message_type: MessageType, payloads: list[bytes]
) -> None:
    """K2: fix values are texts, and compare as numbers with numbers."""
    rig.create_topic("fields", TopicSettings(message_type=message_type))
    rig.run(Publish("fields", payloads, ["a", "b"]))
    assert matching(rig, "/44 > 10 AND /55 = 'IBM'", "fields") == ["b"]


def test_a_filter_is_shown_in_its_canonical_form(rig: Rig) -> None:
    wanted = record_filter(rig.topic("quotes"), " /a==1 && not(/b <> 'x')", 0)
    assert wanted.text == "/a = 1 AND NOT /b != 'x'"
    assert wanted.predicate.paths == (("a",), ("b",))


def test_an_error_shows_where_it_is(rig: Rig) -> None:
    error = refused(rig, "/price > AND /id = 1")
    assert error.reason is Reason.FILTER_INVALID
    assert error.message == "filter: expected a value at 9\n  /price > AND /id = 1\n           ^"
    assert error.details == {"position": "9"}
    assert refused(rig, "").reason is Reason.FILTER_INVALID
    too_long = refused(rig, "/a = '" + "x" * 70_000 + "'")
    assert too_long.reason is Reason.FILTER_INVALID
    assert too_long.details == {}


def test_now_may_be_refused(rig: Rig) -> None:
    error = refused(rig, "/a < NOW_MICROS()", allow_now=False)
    assert error.reason is Reason.FILTER_INVALID
    assert isinstance(record_filter(rig.topic("quotes"), "/a < NOW_MICROS()", 0), RecordFilter)


def test_fields_of_a_binary_topic_cannot_be_asked_for(rig: Rig) -> None:
    rig.create_topic("binary")
    rig.put("binary", "k")
    error = refused(rig, "/a = 1 OR @key = 'k'", "binary")
    assert error.reason is Reason.UNSUPPORTED_FOR_MESSAGE_TYPE
    assert "topic binary is binary" in error.message
    assert matching(rig, "@key = 'k'", "binary") == ["k"]
    assert matching(rig, "true", "binary") == ["k"]


@pytest.mark.slow
def test_equal_filters_are_compiled_once_for_topics_of_one_key(rig: Rig) -> None:
    rig.create_topic("alike", TopicSettings(key=("/id",)))
    rig.create_topic("other", TopicSettings(key=("/a",)))
    first = record_filter(rig.topic("quotes"), "/a = 1.0", 0)
    assert record_filter(rig.topic("alike"), "/a = 1.0", 1).predicate is first.predicate
    rig.run(Publish("other", [b'{"a":"1"}', b'{"a":"1.0"}']))
    assert matching(rig, "/a = 1.0", "other") == ["1"]
    long = "/a = 1 OR " * (CACHED_CHARACTERS_MAX // 10 + 1) + "/a = 1"
    assert record_filter(rig.topic("quotes"), long, 0).predicate is not (
        record_filter(rig.topic("quotes"), long, 0).predicate
    )
