"""Payloads of every message type as Python values, as JSON and as texts."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from decimal import Decimal
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow_client import InvalidArgument, PayloadForm
from sow_client._payloads import packed_value
from sow_server.engine.formats.topic_formats import format_of
from sow_server.engine.values.model import MessageType, TopicSettings

MSGPACK, FIX, NVFIX = PayloadForm("msgpack"), PayloadForm("fix", "|"), PayloadForm("nvfix", "|")
Ext = msgspec.msgpack.Ext
NANOS = b"\xc7\x0c\xff" + (5).to_bytes(4, "big") + (1_700_000_000).to_bytes(8, "big")
NANOS_SHORT = b"\xd7\xff" + ((5 << 34) | 1_700_000_000).to_bytes(8, "big")

ODD = {
    "bytes": b"\x00\xff",
    "ext": Ext(5, b"\x01"),
    "nan": float("nan"),
    "below": [float("inf"), {"x": float("-inf"), "y": Ext(-9, b"")}],
    "time": datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    "first": datetime(1, 1, 1, tzinfo=UTC),
    "map": {1: "a", b"b": None},
    "large": 2**64 - 1,
}


def test_every_value_of_messagepack_has_a_form_in_json() -> None:
    payload = msgspec.msgpack.encode(ODD)
    assert format_of(TopicSettings(message_type=MessageType.MSGPACK)).check(payload) is None, "a server takes it"
    assert msgspec.json.decode(MSGPACK.json(payload) or b"") == {
        "bytes": "AP8=",
        "ext": {"ext": 5, "data": "AQ=="},
        "nan": "nan",
        "below": ["inf", {"x": "-inf", "y": {"ext": -9, "data": ""}}],
        "time": "9999-12-31T23:59:59.999999Z",
        "first": "0001-01-01T00:00:00Z",
        "map": {"1": "a", "Yg==": None},
        "large": 2**64 - 1,
    }


@pytest.mark.parametrize("time", [NANOS, NANOS_SHORT])
def test_a_time_keeps_its_nanoseconds(time: bytes) -> None:
    payload = b"\x82\xa1t" + time + b"\xa1l\x91" + time
    document = MSGPACK.document(payload)
    assert isinstance(document, dict)
    assert isinstance(document["t"], Ext), "a datetime would round it"
    assert msgspec.msgpack.encode(document) == payload
    shown = "2023-11-14T22:13:20.000000005Z"
    assert msgspec.json.decode(MSGPACK.json(payload) or b"") == {"t": shown, "l": [shown]}


@pytest.mark.parametrize(
    "content",
    [
        b"\xd7\xff" + (10**9 << 34).to_bytes(8, "big"),
        b"\xc7\x0c\xff" + (5).to_bytes(4, "big") + (2**62).to_bytes(8, "big"),
        b"\xc7\x03\xff" + b"abc",
    ],
    ids=["too many nanoseconds", "beyond all years", "no time at all"],
)
def test_what_says_that_it_is_a_time_and_is_none_stays_bytes_or_an_extension(content: bytes) -> None:
    payload = b"\x82\xa1t" + content + b"\xa1u" + NANOS
    assert MSGPACK.document(payload) == payload
    with pytest.raises(ValueError, match="it is no value of MessagePack"):
        packed_value(content)
    if content[1:2] == b"\x0c":
        extension = Ext(-1, content[3:])
        assert PayloadForm.in_columns({"t": extension}) == {"t": {"ext": -1, "data": content[3:]}}


def test_names_of_a_map_that_have_one_text_are_all_told() -> None:
    payload = msgspec.msgpack.encode({"m": {1: "a", "1": "b"}})
    assert MSGPACK.json(payload) == b'{"m":[[1,"a"],["1","b"]]}'


def test_fix_is_read_as_the_server_reads_it() -> None:
    payload = b"95=6|96=a|55=Z|055=ACME|55=B|58=\xff|"
    expected = {"95": "6", "96": "a|55=Z", "55": "ACME", "58": "\\xff"}
    assert FIX.document(payload) == expected
    assert NVFIX.document(payload) == {"95": "6", "96": "a", "55": "Z", "055": "ACME", "58": "\\xff"}


@given(st.lists(st.sampled_from([b"95=3", b"96=", b"|", b"a", b"055=", b"55=", b"=", b"3"]), max_size=20).map(b"".join))
def test_client_and_server_see_the_same_fields(payload: bytes) -> None:
    for form, kind in ((FIX, MessageType.FIX), (NVFIX, MessageType.NVFIX)):
        server = format_of(TopicSettings(message_type=kind, separator=b"|"))
        assert (form.fields(payload) or {}) == server.decode(payload)


@pytest.mark.parametrize("form", [PayloadForm("json"), MSGPACK, FIX, NVFIX, PayloadForm("binary"), PayloadForm("")])
def test_a_payload_of_another_type_stays_bytes(form: PayloadForm) -> None:
    for payload in (b"", b"\xff\xfe", b"|"):
        assert form.document(payload) == payload


def test_documents_of_an_older_server_are_those_that_look_like_json() -> None:
    assert PayloadForm("").document(b' {"a":1}') == {"a": 1}
    assert PayloadForm("").document(b"{55=1") == b"{55=1"


@dataclasses.dataclass
class Order:
    id: int
    price: Decimal


def test_a_document_is_encoded_for_its_topic() -> None:
    assert MSGPACK.encode(ODD) == msgspec.msgpack.encode(ODD)
    assert msgspec.msgpack.decode(MSGPACK.encode(Order(1, Decimal("2.5")))) == {"id": 1, "price": 2.5}
    assert NVFIX.encode(Order(1, Decimal("2.50"))) == b"id=1|price=2.50|"

    assert FIX.encode({"8": "FIX", "055": "é", "44": 1.5, "38": 100}) == b"8=FIX|55=\xc3\xa9|44=1.5|38=100|"
    assert FIX.encode({"55": "A", "96": b"a|55=Z"}) == b"55=A|95=6|96=a|55=Z|"
    assert FIX.encode({"95": 6, "96": b"a|55=Z"}) == b"95=6|96=a|55=Z|"
    for form in (MSGPACK, FIX, NVFIX, PayloadForm("binary")):
        assert form.encode(b"as it is") == form.encode("as it is") == b"as it is"


def test_a_decimal_beyond_the_numbers_of_messagepack_is_refused() -> None:
    """msgspec makes it an infinity."""
    beyond = {"a": [1.5, {"b": Decimal("-1e400")}], "c": float("-inf"), "d": "Infinity"}
    with pytest.raises(InvalidArgument, match="a Decimal is beyond the numbers of MessagePack"):
        MSGPACK.encode(beyond)
    fine = {"a": Decimal("-Infinity"), "b": float("inf"), "c": Decimal("1e300"), "d": "Infinity"}
    assert msgspec.msgpack.decode(MSGPACK.encode(fine)) == {"a": -inf, "b": inf, "c": 1e300, "d": "Infinity"}


@pytest.mark.parametrize(
    ("form", "document", "message"),
    [
        (MSGPACK, {"a": 2**64}, "cannot be encoded as MessagePack"),
        (MSGPACK, {"a": object()}, "cannot be encoded as MessagePack"),
        (FIX, {"55": "a|b"}, "the field '55' holds the separator"),
        (FIX, {"95": 1, "96": "a|b"}, "the field '96' holds the separator"),
        (NVFIX, {"96": "a|b"}, "the field '96' holds the separator"),
        (FIX, {"symbol": "A"}, "the field 'symbol' is no tag"),
        (FIX, {"55": "A", "055": "B"}, "the field '055' is there twice"),
        (NVFIX, {"a=b": "A"}, "the field 'a=b' is no name of a field"),
        (NVFIX, {"a": None}, "the field 'a' is a NoneType"),
        (NVFIX, {"a": True}, "the field 'a' is a bool"),
        (NVFIX, {"a": {"b": 1}}, "the field 'a' is a dict"),
        (NVFIX, {"a": float("nan")}, "the field 'a' is a float"),
        (PayloadForm("binary"), {"a": 1}, "the topic is binary: give bytes"),
        (NVFIX, object(), "cannot be encoded: "),
        (NVFIX, [1, 2], "is no mapping of names to values"),
    ],
)
def test_a_document_that_the_type_cannot_express_is_refused(form: PayloadForm, document: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match="data: ") as caught:
        form.encode(document)  # type: ignore[arg-type]  # names of other types, too
    assert message in caught.value.message
    assert caught.value.reason == "PAYLOAD_MALFORMED"
