"""Absent fields are looked for in documents that are decoded anyway, and no longer than needed (rule Q10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.formats.payloads import Decode
from sow_server.engine.stored import HEADER_BYTES
from sow_server.engine.values.model import MessageType, TopicSettings
from sow_server.query import absence
from sow_server.query.absence import LOOKED_AT_MAX, AbsentFields
from sow_server.query.filtering import record_filter
from sow_server.query.ordering import callers_order
from sow_server.query.projection import projection
from sow_server.query.sieve import sieve
from tests.support.stores.stores import Rig

HEADER = b"\0" * HEADER_BYTES


@pytest.fixture
def topic(tmp_path: Path) -> Iterator[Topic]:
    rig = Rig(tmp_path)
    rig.create_topic("orders", TopicSettings(key=("/id",), message_type=MessageType.JSON))
    yield rig.topic("orders")
    rig.close()


class Decoder:
    """Counts."""

    def __init__(self, topic: Topic) -> None:
        self._decode = topic.format.decode
        self.decoded = 0

    def __call__(self, payload: bytes) -> dict[str, object]:
        self.decoded += 1
        return self._decode(payload)


def test_a_document_is_decoded_once_for_the_filter_and_the_look(topic: Topic) -> None:
    absent = AbsentFields(topic, record_filter(topic, "/a = 1 AND /b = 2", 0))
    decode = Decoder(topic)
    values = [HEADER + b'{"id":%d,"a":1}' % number for number in range(100)]
    assert (absent.looks, absent.paths) == (True, ())
    assert [document["a"] for document in absent.read(decode, values)] == [1] * 100
    assert (decode.decoded, absent.paths, absent.looks) == (100, ("/b",), True)
    absent.read(decode, [HEADER + b'{"b":null}', HEADER + b'{"b":2}'])
    assert (absent.paths, absent.looks) == ((), False)


def test_no_more_than_a_bound_is_looked_at(topic: Topic) -> None:
    absent = AbsentFields(topic, record_filter(topic, "/b = 2", 0))
    absent.read(topic.format.decode, [HEADER + b"{}"] * (LOOKED_AT_MAX - 1) + [HEADER + b"{}", HEADER + b'{"b":2}'])
    assert (absent.paths, absent.looks) == (("/b",), False)


def test_a_sieve_stops_looking_when_all_fields_were_seen(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    given = record_filter(topic, "/a = 1", 0)
    absent = AbsentFields(topic, given)
    judge = sieve(topic, given, 0, absent)
    assert judge is not None
    assert judge([b"1", b"2"], [HEADER + b'{"a":1}', HEADER + b'{"a":2}']) == [True, False]
    monkeypatch.setattr(absence.AbsentFields, "read", None)  # no more calls
    assert judge([b"1", b"2"], [HEADER + b'{"a":1}', HEADER + b"{}"]) == [True, False]


def test_without_a_filter_one_record_is_mostly_enough(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    order, selected = callers_order(topic, "/a, @key", ()), projection(topic, ["/b", "/c/d"], [])
    absent = AbsentFields(topic, None, order, selected)
    read: list[int] = []
    look = AbsentFields.read

    def counted(self: AbsentFields, decode: Decode | None, values: Sequence[bytes]) -> list[dict[str, object]]:
        read.append(len(values))
        return look(self, decode, values)

    monkeypatch.setattr(AbsentFields, "read", counted)
    absent.look([HEADER + b'{"a":1,"b":[],"c":{"d":0}}'] * 1_000)
    assert (read, absent.paths, absent.looks) == ([1], (), False)
    assert not AbsentFields(topic, None).looks


def test_hidden_fields_are_not_looked_for(topic: Topic) -> None:
    absent = AbsentFields(topic, None, None, projection(topic, ["/secret", "/shown"], [], (("secret",),)))
    absent.look([HEADER + b'{"secret":1}'])
    assert absent.paths == ("/shown",)


def test_a_tag_with_zeros_in_front_is_looked_for_as_it_is_selected(tmp_path: Path) -> None:
    """Story: `select=["/055"]` gave the field, with the remark that no record has it."""
    rig = Rig(tmp_path)
    rig.create_topic("fix", TopicSettings(message_type=MessageType.FIX))
    fix = rig.topic("fix")
    for hidden, told in [((), ("/56",)), ((("55",), ("56",)), ())]:
        absent = AbsentFields(fix, None, None, projection(fix, ["/055", "/056"], [], hidden))
        absent.look([HEADER + b"55=ACME\x01"])
        assert absent.paths == told
    rig.close()
