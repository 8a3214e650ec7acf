"""Names and settings of topics, and their registry (rules K1, K3, L3, L4, J3)."""

from __future__ import annotations

import pytest

from sow_server.engine.catalog.indexes import NO_INDEXES
from sow_server.engine.catalog.topics import Topic, Topics, check_name, check_settings
from sow_server.engine.stored import StoredStatistics
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, TTL_MAX_MICROS, Expiration, MessageType, TopicSettings
from sow_server.engine.values.policies import declared_of


def topic(topic_id: int, name: str, settings: TopicSettings | None = None) -> Topic:
    return Topic(
        topic_id,
        name,
        settings or TopicSettings(),
        create_time_micros=0,
        statistics=StoredStatistics(),
    )


@pytest.mark.parametrize("name", ["a", "orders.eu-1:live_X", "9", ".", "x" * 200, "a_"])
def test_a_topic_may_be_called(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "1 to 200 of"),
        ("x" * 201, "1 to 200 of"),
        ("a b", "1 to 200 of"),
        ("a/b", "1 to 200 of"),
        ("é", "1 to 200 of"),
        ("a\n", "1 to 200 of"),
        ("_undelivered", "a leading '_' is reserved"),
        ("_", "a leading '_' is reserved"),
    ],
)
def test_other_names_are_refused(name: str, why: str) -> None:
    """Rule K1."""
    with pytest.raises(StoreError) as caught:
        check_name(name)
    assert caught.value.reason is Reason.TOPIC_NAME_INVALID
    assert why in caught.value.message


ENABLED = TopicSettings(expiration=Expiration.ENABLED)


@pytest.mark.parametrize(
    "settings",
    [
        TopicSettings(),
        TopicSettings(key=("/a", "/b/c"), message_type=MessageType.MSGPACK),
        TopicSettings(key=("/55",), message_type=MessageType.FIX, separator=b"|"),
        TopicSettings(message_type=MessageType.BINARY),
        ENABLED._replace(default_ttl_micros=0),
        ENABLED._replace(default_ttl_micros=TTL_MAX_MICROS, min_ttl_micros=0, max_ttl_micros=TTL_MAX_MICROS),
        ENABLED._replace(min_ttl_micros=5, max_ttl_micros=5),
        TopicSettings(min_ttl_micros=5),
        TopicSettings(expiration=Expiration.REJECT),
        TopicSettings(retain_time_micros=0, retain_bytes=0),
        TopicSettings(retain_time_micros=None, retain_bytes=None),
        TopicSettings(retain_time_micros=1, retain_bytes=None),
        TopicSettings(journal=False),
    ],
)
def test_settings_that_make_sense_are_accepted(settings: TopicSettings) -> None:
    check_settings(declared_of(settings))


@pytest.mark.parametrize(
    ("settings", "field", "why"),
    [
        (TopicSettings(key=("a",)), "key", "must begin with '/'"),
        (TopicSettings(key=("/a", "/a/b")), "key", "overlap"),
        (TopicSettings(key=("/a",), message_type=MessageType.BINARY), "key", "publishers supply the key"),
        (TopicSettings(key=("/a",), message_type=MessageType.FIX), "key", "a tag such as /55"),
        (ENABLED._replace(default_ttl_micros=-1), "default_ttl", "between 0s and ten years"),
        (ENABLED._replace(max_ttl_micros=TTL_MAX_MICROS + 1), "max_ttl", "between 0s and ten years"),
        (ENABLED._replace(min_ttl_micros=-MICROS), "min_ttl", "between 0s and ten years"),
        (ENABLED._replace(max_ttl_micros=0), "max_ttl", "0s must be above zero"),
        (ENABLED._replace(min_ttl_micros=6, max_ttl_micros=5), "min_ttl", "6µs is above max_ttl, 5µs"),
        (TopicSettings(default_ttl_micros=1), "default_ttl", "no meaning with expiration = 'disabled'"),
        (
            TopicSettings(expiration=Expiration.REJECT, default_ttl_micros=1),
            "default_ttl",
            "no meaning with expiration = 'reject'",
        ),
        (TopicSettings(message_type=MessageType.FIX, separator=b""), "fix_separator", "one byte"),
        (TopicSettings(message_type=MessageType.FIX, separator=b"||"), "fix_separator", "one byte"),
        (TopicSettings(message_type=MessageType.FIX, separator=b"="), "fix_separator", "other than '='"),
        (
            ENABLED._replace(default_ttl_micros=6, max_ttl_micros=5),
            "default_ttl",
            "6µs is above max_ttl, 5µs",
        ),
        (
            ENABLED._replace(default_ttl_micros=5, min_ttl_micros=6),
            "default_ttl",
            "5µs is below min_ttl, 6µs",
        ),
        (TopicSettings(separator=b"|"), "fix_separator", "no meaning with message_type = 'json'"),
        (TopicSettings(retain_time_micros=-1), "retain_time", "negative"),
        (TopicSettings(retain_bytes=-1), "retain_bytes", "negative"),
        (TopicSettings(retain_time_micros=0), "retain_time", "both be zero"),
        (TopicSettings(retain_bytes=0), "retain_time", "both be zero"),
        (TopicSettings(retain_time_micros=None, retain_bytes=0), "retain_time", "both be zero"),
    ],
)
def test_settings_that_contradict_themselves_are_refused_by_name(settings: TopicSettings, field: str, why: str) -> None:
    """Rule X2."""
    with pytest.raises(StoreError) as caught:
        check_settings(declared_of(settings))
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert caught.value.field == f"settings.{field}"
    assert caught.value.message.startswith(f"{field}: ")
    assert why in caught.value.message


def test_topics_are_found_by_name_and_by_id() -> None:
    topics = Topics()
    one, two = topic(1, "one"), topic(2, "two")
    topics.add(one)
    before = topics.by_name
    topics.add(two)
    assert topics.find("two") is two
    assert topics.by_id[1] is one
    assert list(before) == ["one"]  # a reader's view does not change under it
    topics.remove(one)
    with pytest.raises(StoreError) as caught:
        topics.find("one")
    assert caught.value.reason is Reason.TOPIC_NOT_FOUND
    assert 1 not in topics.by_id


def test_an_impossible_name_and_an_unknown_topic_give_different_errors() -> None:
    with pytest.raises(StoreError) as caught:
        Topics().find("no such/name")
    assert caught.value.reason is Reason.TOPIC_NAME_INVALID


def test_a_topic_compiles_its_settings() -> None:
    orders = topic(7, "orders", TopicSettings(key=("/id",), expiration=Expiration.ENABLED))
    assert (orders.prefix, orders.stop) == (b"\0\0\0\x07", b"\0\0\0\x08")
    assert orders.acts
    derive = orders.derive_keys
    assert derive is not None
    assert derive([b'{"id":1}']) == [b"1"]


def test_new_settings_apply_to_the_compiled_objects() -> None:
    orders = topic(7, "orders", TopicSettings(key=("/id",), expiration=Expiration.ENABLED))
    orders.apply(TopicSettings(), NO_INDEXES)
    assert (orders.acts, orders.derive_keys) == (False, None)


@pytest.mark.parametrize(
    ("expiration", "acts"), [(Expiration.DISABLED, False), (Expiration.ENABLED, True), (Expiration.REJECT, True)]
)
def test_stamps_count_unless_expiration_is_disabled(expiration: Expiration, acts: bool) -> None:
    """Rule L7; a topic that rejects lifetimes still honours the stamps from before."""
    assert TopicSettings(expiration=expiration).acts_on_expiration is acts
