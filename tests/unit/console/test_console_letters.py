"""Dead letters as the console reads them (rule T3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast, get_args

import msgspec
import pytest

from sow.v1 import types_pb2
from sow_client import MessageTypeName, PayloadForm, Record, RecordBatch, Topic, TopicSettings, TopicStatistics
from sow_console import letter_contents
from sow_server.engine.commit import letter_copies
from sow_server.engine.values.model import MessageType
from sow_server.engine.values.model import TopicSettings as ServerSettings

BIG = 2**63 + 1


def record(key: str, payload: bytes, topic: str = "dead", kind: str = "") -> Record:
    columns = types_pb2.RecordColumns(
        key=[key], payload=[payload], version=[7], publish_time_micros=[1], expire_time_micros=[2**63 - 1],
        sequence=[1], origins=["ldn"], message_type=kind,
    )  # fmt: skip
    return next(iter(RecordBatch(topic, columns)))


PAYLOADS = {
    MessageType.JSON: b'{"n":9223372036854775809,"price":9.50}',
    MessageType.MSGPACK: msgspec.msgpack.encode({"n": BIG, "price": 9.5}),
    MessageType.NVFIX: b"n=1\x01price=9.50\x01",
}


@pytest.mark.parametrize("kind", PAYLOADS)
def test_a_letter_is_opened_as_the_server_has_made_it(kind: MessageType) -> None:
    payload = PAYLOADS[kind]
    add = letter_copies._adder(ServerSettings(message_type=kind))
    assert add is not None
    _, once = add(payload, letter_copies.Letter("offers", "a|b", 5, None))
    _, twice = add(once, letter_copies.Letter("dead", "x", 6, 1_000_000, letter_copies.SET_ASIDE, "billing"))
    letter = letter_contents.read(record("key", twice, kind=kind.value))
    assert letter.payload == payload, "and numbers keep their text"
    assert (letter.topic, letter.record_key, letter.reason, letter.durable) == (
        "dead",
        "x",
        "delivery_limit",
        "billing",
    )
    assert letter.hops == 2
    assert letter.was_due is not None
    assert letter.was_due.timestamp() == 1
    first = letter_contents.read(record("key", once, kind=kind.value))
    assert (first.topic, first.record_key, first.reason, first.was_due) == ("offers", "a|b", "expired", None)


BRACED = b"{id=1;n=2;"
"""An nvfix payload that begins as JSON does."""


@pytest.mark.parametrize(
    ("topic", "key", "senders"),
    [
        ("_undelivered", r"gone|nvfix:3b|offers\|a\|5", []),
        ("dead", "offers|a|5", [("offers", "nvfix", ""), ("others", "json", "dead")]),
        ("dead", "a", [("offers", "nvfix", "dead"), ("others", "json", "elsewhere")]),
    ],
)
def test_a_letter_in_a_binary_topic_has_the_type_of_its_origin(
    topic: str, key: str, senders: list[tuple[str, MessageTypeName, str]]
) -> None:
    add = letter_copies._adder(ServerSettings(message_type=MessageType.NVFIX, separator=b";"))
    assert add is not None
    _, payload = add(BRACED, letter_copies.Letter("offers", "a", 5, None))
    topics = [FakeTopic(name, dead_letter, message_type=kind) for name, kind, dead_letter in senders]
    letter = letter_contents.read(record(key, payload, topic, "binary"), cast("list[Topic]", topics))
    assert (letter.topic, letter.record_key, letter.payload) == ("offers", "a", BRACED)
    assert letter.text == '{\n  "{id": "1",\n  "n": "2"\n}'


def test_bytes_that_look_like_a_letter_of_another_type_stay() -> None:
    """An nvfix record whose only value is the JSON text of a letter; its first byte says nothing."""
    payload = b'{"n":"=","dead_letter":[{"topic":"a","key":"b","version":1}]}'
    assert letter_contents.read(record("key", payload, kind="nvfix")).payload == payload
    told = letter_contents.read(
        record("offers|a|5", payload, kind="binary"), cast("list[Topic]", [FakeTopic("offers", "dead")])
    )
    assert told.payload == payload, "of a topic that is nvfix"
    assert letter_contents.read(record("key", payload, kind="binary")).payload == b'{"n":"="}', "nobody knows its topic"


@pytest.mark.parametrize(
    ("topic", "key", "told"),
    [
        ("dead", letter_contents.copy_key("offers", "a|b", 5), ("offers", "a|b", "expired", "")),
        ("dead", letter_contents.copy_key("offers", "a", 5, "billing"), ("offers", "a", "delivery_limit", "billing")),
        ("_undelivered", r"gone|fix|offers\|a\\\|b\|5", ("offers", "a|b", "expired", "")),
        ("dead", "its own key", ("", "its own key", "", "")),
    ],
)  # fmt: skip
def test_a_letter_without_a_list_tells_by_its_key(topic: str, key: str, told: tuple[str, ...]) -> None:
    letter = letter_contents.read(record(key, b"\xff\x00", topic))
    assert (letter.topic, letter.record_key, letter.reason, letter.durable) == told
    assert letter.payload == b"\xff\x00"


def test_the_key_of_a_letter_is_the_one_that_the_server_makes() -> None:
    assert letter_contents.copy_key("a", "b|\\c", 5, "d") == letter_copies._copy_key("a", "b|\\c", 5, "d")


@pytest.mark.parametrize(
    "payload", [b'{"dead_letter":1}', b'{"dead_letter":', b"{}", b"", b"\xde", b"dead_letter=x\x01"]
)
def test_a_field_of_a_publisher_that_is_no_list_stays(payload: bytes) -> None:
    for kind in get_args(MessageTypeName):
        assert letter_contents.opened(payload, PayloadForm(kind)) == (payload, [])


@dataclass
class FakeTopic:
    name: str
    dead_letter: str = ""
    letters: int = 3
    settings: TopicSettings = field(init=False)
    statistics: TopicStatistics | None = None
    message_type: MessageTypeName = "nvfix"

    def __post_init__(self) -> None:
        self.settings = TopicSettings(dead_letter=self.dead_letter, message_type=self.message_type, fix_separator=";")
        self.statistics = TopicStatistics(self.letters, 0, 0, 0, 0, 0)


def test_a_topic_of_letters_that_is_missing_is_listed_with_its_sources() -> None:
    topics = [FakeTopic("a", "dead"), FakeTopic("b", "gone"), FakeTopic("dead"), FakeTopic("_undelivered")]
    found = letter_contents.boxes(cast("list[Topic]", topics))
    assert found == (
        letter_contents.Box("_undelivered", ("b",), 3),
        letter_contents.Box("dead", ("a",), 3),
        letter_contents.Box("gone", ("b",), None),
    )
    assert letter_contents.boxes(cast("list[Topic]", [FakeTopic("a"), FakeTopic("_undelivered", letters=0)])) == ()


@pytest.mark.parametrize("micros", [2**62, -(2**62), 10**18])
def test_a_time_that_there_is_not_does_not_take_the_page_away(micros: int) -> None:
    """Any publisher may write into a topic of dead letters; one record made the whole page an error."""
    payload = b'{"n":1,"dead_letter":[{"topic":"a","key":"b","version":1,"expire_time_micros":%d}]}' % micros
    assert letter_contents.read(record("key", payload)).was_due is None
