"""A decoder of some fields gives for these what decoding the whole document gives, however they are written."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sow_server.engine.formats.topic_formats import format_of
from sow_server.engine.values.model import MessageType, TopicSettings

ODD_NAMES = ["a", "b", "", "é", "😀", 'a"b', "a\\b", "a\nb", "\0", "\ufffd", "a" * 300]
names = st.sampled_from(ODD_NAMES)
asked = st.lists(names | st.just("missing"), min_size=1, max_size=4, unique=True).map(tuple)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)
documents = st.dictionaries(names, values, max_size=6)


def check(message_type: MessageType, payload: bytes, wanted: tuple[str, ...]) -> None:
    payloads = format_of(TopicSettings(message_type=message_type))
    whole, some = payloads.decode(payload), payloads.decoder(wanted)(payload)
    # By repr: 1, 1.0 and True are equal, and NaN is not.
    assert repr({name: some.get(name) for name in wanted}) == repr({name: whole.get(name) for name in wanted})
    assert wanted == () or set(wanted) & whole.keys() <= some.keys()
    columns = payloads.columns(wanted)
    if columns is not None:
        # Beside one that cannot be decoded, and so decodes all of them one by one.
        for odd in ([], [b"\xc1"]):
            assert repr(columns([payload, *odd])) == repr([[whole.get(name), *[None for _ in odd]] for name in wanted])


@given(documents, asked, st.booleans())
def test_json_documents(document: dict[str, object], wanted: tuple[str, ...], ascii_only: bool) -> None:
    """Names with escapes too, as json.dumps writes them. NaN and infinities are no JSON."""
    try:
        text = json.dumps(document, ensure_ascii=ascii_only, allow_nan=False)
    except ValueError:
        text = json.dumps(msgspec.json.decode(msgspec.json.encode(document)), ensure_ascii=ascii_only)
    check(MessageType.JSON, text.encode(), wanted)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":{"b":2},"b":3}',
        '{ "b" : [ 1 , {} ] , "a":"\\u00e9" }',
        '{"\\u0061":1}',
        '{"a":1e999,"b":1}',
        '{"b":1,"c":[-1e999]}',
        '{"a":' + "9" * 30 + ',"b":-' + "9" * 5000 + "}",
        "{}",
    ],
)
@pytest.mark.parametrize("wanted", [("a",), ("b",), ("a", "b"), ("c",)])
def test_unusual_forms_of_json(text: str, wanted: tuple[str, ...]) -> None:
    check(MessageType.JSON, text.encode(), wanted)


def test_a_number_that_no_float_reaches_is_infinite() -> None:
    payload = b'{"a":1e999,"b":[-1e999],"c":-' + b"9" * 5000 + b',"d":1}'
    decoded = {"a": float("inf"), "b": [float("-inf")], "c": float("-inf"), "d": 1}
    assert format_of(TopicSettings()).decode(payload) == decoded


@given(documents, asked)
def test_msgpack_documents(document: dict[str, object], wanted: tuple[str, ...]) -> None:
    check(MessageType.MSGPACK, msgspec.msgpack.encode(document), wanted)


fields = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"b", b"55", b"\xff", "é".encode(), "\ufffd".encode()]),
        st.binary(max_size=4).filter(lambda value: b"\x01" not in value),
    ),
    min_size=1,
    max_size=6,
)


@given(fields, asked, st.booleans())
def test_fix_and_nvfix_documents(found: list[tuple[bytes, bytes]], wanted: tuple[str, ...], doubled: bool) -> None:
    """Repeated names, values with an equals sign, names that are no UTF-8, empty fields."""
    separator = b"\x01\x01" if doubled else b"\x01"
    check(MessageType.NVFIX, separator.join([name + b"=" + value for name, value in found]), wanted)
    tags = [(name, value) for name, value in found if name.isdigit()] or [(b"8", b"x")]
    check(MessageType.FIX, separator.join([name + b"=" + value for name, value in tags]), (*wanted, "55"))


tags = st.sampled_from(["8", "5", "55", "555", "055", "95", "96", "10", "1000"])
of_tags = st.lists(
    st.tuples(tags, st.sampled_from(["", "1", "2", "a=b", "55=x", "1\x01", "ab\x0155=y"])), min_size=1, max_size=8
)


@given(of_tags, st.lists(tags, max_size=8, unique=True).map(tuple), st.booleans())
@example([("95", "7"), ("96", "ab\x0155=y")], ("55",), True)
def test_fix_documents_by_few_names_and_by_many(
    found: list[tuple[str, str]], wanted: tuple[str, ...], closed: bool
) -> None:
    """Few names are searched for, and many are looked up; lengths of data, and zeros in front of tags."""
    payload = "\x01".join([f"{tag}={value}" for tag, value in found]) + "\x01" * closed
    check(MessageType.FIX, payload.encode(), wanted)
    check(MessageType.NVFIX, payload.encode(), wanted)


@given(
    st.lists(
        st.tuples(st.sampled_from([*b"=05|", 1, 0xFF]).map(lambda byte: bytes([byte])), st.binary(max_size=3)),
        max_size=8,
    ),
    st.lists(tags | st.sampled_from(["", "0", "00", "35", "335", "a=b", "5|5"]), max_size=7, unique=True).map(tuple),
    st.sampled_from([b"\x01", b"|", b"0", b"5", b"\xff"]),
)
def test_few_names_and_many_in_any_bytes(
    found: list[tuple[bytes, bytes]], wanted: tuple[str, ...], separator: bytes
) -> None:
    """Also bytes that no publish takes, and separators that stand in names."""
    for spelled in (b"".join(first + rest for first, rest in found), b"5=1".join(first for first, _ in found)):
        for message_type in (MessageType.FIX, MessageType.NVFIX):
            payloads = format_of(TopicSettings(message_type=message_type, separator=separator))
            whole, some = payloads.decode(spelled), payloads.decoder(wanted)(spelled)
            assert {name: some.get(name) for name in wanted} == {name: whole.get(name) for name in wanted}


@pytest.mark.parametrize("message_type", [MessageType.JSON, MessageType.MSGPACK])
def test_common_fields_come_in_columns(message_type: MessageType) -> None:
    """Else the property above would hold without a look at one."""
    columns = format_of(TopicSettings(message_type=message_type)).columns(("a", "b"))
    assert columns is not None
    encode = msgspec.json.encode if message_type is MessageType.JSON else msgspec.msgpack.encode
    assert columns([encode({"a": 1, "c": 2}), encode({"b": [1], "a": None})]) == [[1, None], [None, [1]]]
