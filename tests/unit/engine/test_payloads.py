"""Payloads by message type: validity, keys, projections (rules K2 to K5, Q2)."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import msgspec
import pytest

from sow_server.engine.formats.payloads import BadRecord, Projection
from sow_server.engine.formats.topic_formats import KEY_STEPS_MAX, format_of, key_paths
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.keys import parse_path, path_text
from sow_server.engine.values.model import MessageType, TopicSettings

pack: Callable[[object], bytes] = msgspec.msgpack.encode


def derive(settings: TopicSettings, payload: bytes) -> bytes | BadRecord:
    (key,) = format_of(settings).derive_keys(key_paths(settings))([payload])
    return key


def json_key(paths: str, payload: bytes) -> bytes | BadRecord:
    return derive(TopicSettings(key=tuple(paths.split())), payload)


def msgpack_key(paths: str, payload: bytes) -> bytes | BadRecord:
    return derive(TopicSettings(key=tuple(paths.split()), message_type=MessageType.MSGPACK), payload)


def fix_key(paths: str, payload: bytes, separator: bytes = b"|") -> bytes | BadRecord:
    settings = TopicSettings(key=tuple(paths.split()), message_type=MessageType.FIX, separator=separator)
    return derive(settings, payload)


def check(message_type: MessageType, payload: bytes, separator: bytes = b"\x01") -> BadRecord | None:
    return format_of(TopicSettings(message_type=message_type, separator=separator)).check(payload)


def bad(key: bytes | BadRecord | None) -> BadRecord:
    assert isinstance(key, BadRecord), key
    return key


# --- keys of json and msgpack ----------------------------------------------------------------------------------------

DOCUMENTS: list[tuple[str, object, bytes | Reason]] = [
    ("/a", {"a": "x"}, b"x"),
    ("/a", {"a": 1}, b"1"),
    ("/a", {"a": 1.0}, b"1"),
    ("/a", {"a": "1"}, b"1"),
    ("/a", {"a": -0.0}, b"0"),
    ("/a", {"a": 1e22}, b"10000000000000000000000"),
    ("/a", {"a": 0.5}, b"0.5"),
    ("/a", {"a": True}, b"true"),
    ("/a", {"a": False}, b"false"),
    ("/a", {"a": 2**63 - 1}, b"9223372036854775807"),
    ("/a", {"a": 2**64 - 1}, b"18446744073709551615"),
    ("/a", {"a": "é|\\"}, "é\\|\\\\".encode()),
    ("/a", {"x": [None, {"y": 1}], "a": "k", "z": {}}, b"k"),
    ("/a", {"a": ""}, Reason.KEY_REQUIRED),
    ("/a", {}, Reason.KEY_FIELD_MISSING),
    ("/a", {"b": 1}, Reason.KEY_FIELD_MISSING),
    ("/a", {"a": None}, Reason.KEY_FIELD_MISSING),
    ("/a", {"a": {}}, Reason.KEY_FIELD_NOT_SCALAR),
    ("/a", {"a": {"b": 1}}, Reason.KEY_FIELD_NOT_SCALAR),
    ("/a", {"a": []}, Reason.KEY_FIELD_NOT_SCALAR),
    ("/a", {"a": [1]}, Reason.KEY_FIELD_NOT_SCALAR),
    ("/a /b", {"a": "x", "b": 2}, b"x|2"),
    ("/b /a", {"a": "x", "b": 2}, b"2|x"),
    ("/a /b", {"a": "x|y", "b": "\\"}, b"x\\|y|\\\\"),
    ("/a /b", {"a": "", "b": ""}, b"|"),
    ("/a /b", {"a": "x", "b": 1.5}, b"x|1.5"),
    ("/a /b", {"a": "x"}, Reason.KEY_FIELD_MISSING),
    ("/a /b", {"a": [], "b": 1}, Reason.KEY_FIELD_NOT_SCALAR),
    ("/a/b", {"a": {"b": 7}}, b"7"),
    ("/a/b", {"a": {"b": "x", "c": 1}}, b"x"),
    ("/a/b", {"a": {"b": ""}}, Reason.KEY_REQUIRED),
    ("/a/b", {"a": {}}, Reason.KEY_FIELD_MISSING),
    ("/a/b", {"a": {"b": None}}, Reason.KEY_FIELD_MISSING),
    ("/a/b", {"a": None}, Reason.KEY_FIELD_MISSING),
    ("/a/b", {"a": 1}, Reason.KEY_FIELD_MISSING),
    ("/a/b", {"a": 10**18}, Reason.KEY_FIELD_MISSING),
    ("/a/b", {"a": 1.5}, Reason.KEY_FIELD_MISSING),
    ("/a/b", {"a": "b"}, Reason.KEY_FIELD_MISSING),
    ("/a/b", {"a": True}, Reason.KEY_FIELD_MISSING),
    ("/a/b", {"a": [{"b": 1}]}, Reason.KEY_FIELD_MISSING),
    ("/a/b", {"a": {"b": {}}}, Reason.KEY_FIELD_NOT_SCALAR),
    ("/a/b", {"a": {"b": [1]}}, Reason.KEY_FIELD_NOT_SCALAR),
    ("/a/b /a/c /d", {"a": {"b": 1, "c": 2}, "d": 3}, b"1|2|3"),
    ("/d /a/c /a/b", {"a": {"b": 1, "c": 2}, "d": 3}, b"3|2|1"),
    ("/a/b /c/b", {"a": {"b": 1}, "c": {"b": 2}}, b"1|2"),
    ("/a/b/c/d", {"a": {"b": {"c": {"d": "deep"}}}}, b"deep"),
    ("/[x/y]", {"x/y": "slash"}, b"slash"),
    ("/é", {"é": "accent"}, b"accent"),
    ("/f0 /self", {"f0": 1, "self": 2}, b"1|2"),
]


@pytest.mark.parametrize(("paths", "document", "expected"), DOCUMENTS)
@pytest.mark.parametrize("message_type", [MessageType.JSON, MessageType.MSGPACK])
def test_documents_give_their_key_or_a_reason(
    message_type: MessageType, paths: str, document: object, expected: bytes | Reason
) -> None:
    """Rules K3 to K5; the empty nested field is the one that once became an empty key."""
    settings = TopicSettings(key=tuple(paths.split()), message_type=message_type)
    payload = msgspec.json.encode(document) if message_type is MessageType.JSON else pack(document)
    key = derive(settings, payload)
    assert (key.reason if isinstance(key, BadRecord) else key) == expected


def test_a_refused_key_names_the_field_at_fault() -> None:
    assert bad(json_key("/a /b/[c/d]", b'{"a":1,"b":{}}')).message == "key field /b/[c/d] is missing or null"
    assert bad(json_key("/a /b", b'{"a":1,"b":[]}')).message == "key field /b is not a text, a number or a boolean"
    assert bad(json_key("/a/b", b'{"a":{"b":""}}')).message == "key field /a/b is empty, and a key is never empty"


def test_good_records_and_bad_ones_keep_their_places() -> None:
    """Rule P4: each record stands alone."""
    settings = TopicSettings(key=("/a",))
    keys = format_of(settings).derive_keys(key_paths(settings))([b'{"a":1}', b"{", b'{"a":2}', b"{}", b'{"a":3}'])
    assert [key if isinstance(key, bytes) else key.reason for key in keys] == [
        b"1",
        Reason.PAYLOAD_MALFORMED,
        b"2",
        Reason.KEY_FIELD_MISSING,
        b"3",
    ]


def test_the_last_of_a_repeated_name_counts() -> None:
    assert json_key("/a", b'{"a":1,"a":2}') == b"2"
    assert msgpack_key("/a", b"\x82\xa1a\x01\xa1a\x02") == b"2"
    assert fix_key("/55", b"55=first|55=second") == b"first"  # in FIX it is the first, as repeating groups have it


def test_integers_of_any_size_are_exact() -> None:
    """Rule K4."""
    for number in (b"123456789012345678901234567890", b"-99999999999999999999", b"9" * 4000):
        assert json_key("/a", b'{"a":%b}' % number) == number
    too_long = b'{"a":%b}' % (b"9" * 5000)
    assert bad(json_key("/a", too_long)).reason is Reason.PAYLOAD_MALFORMED


def test_a_number_beyond_all_floats_is_no_key() -> None:
    refused = bad(json_key("/a", b'{"a":1e400}'))
    assert refused == (Reason.PAYLOAD_MALFORMED, "payload: Number out of range - at `$.a`")


@pytest.mark.parametrize(
    "value", [b"bytes", datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), msgspec.msgpack.Ext(5, b"x")]
)
def test_values_that_only_messagepack_has_are_no_keys(value: object) -> None:
    assert bad(msgpack_key("/a", pack({"a": value}))).reason is Reason.KEY_FIELD_NOT_SCALAR
    assert msgpack_key("/b", pack({"a": value, "b": 1})) == b"1"


def test_maps_with_other_than_text_keys_are_allowed_below_the_top() -> None:
    assert msgpack_key("/a", pack({"a": 1, "b": {1: 2}})) == b"1"
    assert bad(msgpack_key("/b/c", pack({"b": {1: 2}}))).reason is Reason.KEY_FIELD_MISSING


# --- malformed payloads ----------------------------------------------------------------------------------------------


def test_documents_of_256_levels_pass_and_deeper_ones_do_not() -> None:
    """At any depth of the stack: a document was once read when it was stored, and not when it was indexed."""
    for levels, passes in ((256, True), (257, False)):
        inner = levels - 1
        lists = b'{"a":1,"x":' + b"[" * inner + b"]" * inner + b"}"
        texts = b'{"a":1,"x":' + b'{"}]\\"":' * inner + b"1" + b"}" * inner + b"}"
        for payload in (lists, texts):
            for paths in ("/a", "/a /b"):
                assert (type(json_key(paths, payload)) is bytes) is (passes and paths == "/a"), payload
            assert (check(MessageType.JSON, payload) is None) is passes
        packed = b"\x82\xa1a\x01\xa1x" + b"\x91" * inner + b"\x01"
        assert (check(MessageType.MSGPACK, packed) is None) is passes
    assert check(MessageType.JSON, b'{"a":"' + b"[" * 1000 + b'","b":[' + b"[]," * 1000 + b"[]]}") is None


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (b"", "truncated (byte 0)"),
        (b"  ", "truncated (byte 2)"),
        (b"{", "truncated (byte 1)"),
        (b'{"a":1', "truncated (byte 6)"),
        (b'{"a":1}x', "trailing characters (byte"),
        (b'{"a":1}{}', "trailing characters (byte"),
        (b'{"a":01}', "(byte 6)"),
        (b'{"a":1,}', "trailing comma in object (byte 7)"),
        (b"{'a':1}", "(byte 1)"),
        (b'{"a":NaN}', "(byte 5); JSON has no NaN"),
        (b'{"b":[-Infinity]}', "(byte 7); JSON has no NaN and no infinities"),
        (b'{"a":Infinity}', "(byte 5); JSON has no NaN and no infinities"),
        (b'{"a":1,"x":"\x01"}', "(byte 12)"),
        (b'{"a":1,"x":"\\q"}', "(byte 13)"),
        (b'{"a":1,"x":"\\u12"}', "(byte 1"),
        (b'{"a":1,"x":"\\ud800"}', "(byte"),
        (b'{"a":1,"x":"\\udc00"}', "(byte"),
        (b'{"a":1,"x":"\\ud800\\u0041"}', "(byte"),
        (b'\xef\xbb\xbf{"a":1}', "(byte 0)"),
        (b"[1]", "not a JSON object: Expected `object`, got `array`"),
        (b"1", "not a JSON object: Expected `object`, got `int`"),
        (b"null", "not a JSON object: Expected `object`, got `null`"),
        (b'"a"', "not a JSON object: Expected `object`, got `str`"),
    ],
)
@pytest.mark.parametrize("paths", [None, "/a", "/a /b", "/a/b"])
def test_malformed_json_is_refused_with_its_place(paths: str | None, payload: bytes, fault: str) -> None:
    """Rule X2: whichever fields are decoded, and also when none is."""
    refused = bad(check(MessageType.JSON, payload) if paths is None else json_key(paths, payload))
    assert refused.reason is Reason.PAYLOAD_MALFORMED
    assert refused.message.startswith("payload: ")
    assert fault in refused.message


@pytest.mark.parametrize(
    ("payload", "position"),
    [
        (b'{"a":"\xff"}', 6),
        (b'{"a":"k","x":"ab\xff"}', 16),
        (b'{"x":{"y":["\xc3\x28"]},"a":1}', 12),
        (b'{"\xff":1,"a":1}', 2),
        (b'{"a":1,"x":"\xed\xa0\x80"}', 12),
        ('{"a":"é","x":"'.encode() + b'\x80"}', 15),
    ],
)
@pytest.mark.parametrize("paths", [None, "/a", "/a /b", "/a/b"])
def test_json_that_is_no_utf8_is_refused_with_its_place(paths: str | None, payload: bytes, position: int) -> None:
    """Also in strings that are skipped, and by its place in the payload, not in the string."""
    refused = bad(check(MessageType.JSON, payload) if paths is None else json_key(paths, payload))
    assert refused == (Reason.PAYLOAD_MALFORMED, f"payload: not well-formed UTF-8 at byte {position}")


def test_text_beyond_ascii_passes() -> None:
    payload = '{"a":"é😀","x":"日本"}'.encode()
    assert check(MessageType.JSON, payload) is None
    assert json_key("/a", payload) == "é😀".encode()
    assert json_key("/a", b'{"a":"\\u00e9\\ud83d\\ude00"}') == "é😀".encode()
    assert json_key("/a", b'{"a":"\\u0000"}') == b"\x00"


@pytest.mark.parametrize(
    "payload",
    [
        b'{"a":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":1,"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
)
def test_json_that_is_nested_too_deeply_is_refused(payload: bytes) -> None:
    for paths in ("/a", "/a /b", "/a/b"):
        assert bad(json_key(paths, payload)) == (Reason.PAYLOAD_MALFORMED, "payload: nested deeper than 256 levels")
    assert bad(check(MessageType.JSON, payload)).message == "payload: nested deeper than 256 levels"


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (b"", "truncated (byte 0)"),
        (b"\x81", "truncated (byte 1)"),
        (b"\x81\xa1a\xdf\xff\xff\xff\xff", "truncated (byte 8)"),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", "truncated (byte 8)"),
        (b"\xc1", "(byte 0)"),
        (b"\x81\xa1a\xc1", "(byte 3)"),
        (b"\x81\xa1a\x01x", "trailing characters (byte 4)"),
        (b"\x81\xa1a\x81\x80\x01", "map keys must be hashable"),
        (b"\x81\xa1a\xa1\xff", "a text is not well-formed UTF-8"),
        (b"\x81\xa1\xff\x01", "a text is not well-formed UTF-8"),
        (b"\x91\x01", "not a MessagePack map with text keys: Expected `object`, got `array`"),
        (b"\x01", "not a MessagePack map with text keys"),
        (b"\x81\x01\x02", "not a MessagePack map with text keys: Expected `str`, got `int`"),
        (b"\x81\xa1a\xc7\x0c\xff" + b"\xff" * 12, "payload: Invalid MessagePack timestamp"),
        (b"\x81\xa1a" + b"\x91" * 100_000 + b"\x01", "nested deeper than 256 levels"),
    ],
)
def test_malformed_messagepack_is_refused(payload: bytes, fault: str) -> None:
    assert msgpack_key("/a", payload) == check(MessageType.MSGPACK, payload)
    refused = bad(check(MessageType.MSGPACK, payload))
    assert refused.reason is Reason.PAYLOAD_MALFORMED
    assert fault in refused.message


# --- fix and nvfix ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "key"),
    [
        (b"55=IBM|109=me|", b"IBM|me"),
        (b"109=me|55=IBM", b"IBM|me"),
        (b"|55=IBM||109=me|", b"IBM|me"),
        (b"8=FIX.4.2|55=1.0|109=a=b|10=000|", b"1.0|a=b"),
        (b"55=a\\b|109=x", b"a\\\\b|x"),
        (b"55=|109=x", b"|x"),
        ("55=é|109=ü".encode(), "é|ü".encode()),
    ],
)
def test_fix_keys_are_the_texts_of_their_tags(payload: bytes, key: bytes) -> None:
    """AMPS 14; a FIX value is text, so 1.0 stays 1.0."""
    assert fix_key("/55 /109", payload) == key


@pytest.mark.parametrize("separator", [b"\x01", b"|", b";", b"\x00", b"\xff"])
def test_the_separator_of_a_topic_is_any_one_byte(separator: bytes) -> None:
    """Rule K2."""
    payload = separator.join([b"8=x", b"55=k", b""])
    assert fix_key("/55", payload, separator) == b"k"
    nvfix = TopicSettings(key=("/name",), message_type=MessageType.NVFIX, separator=separator)
    assert derive(nvfix, separator.join([b"other=1", b"name=Ann", b"x y=2"])) == b"Ann"


@pytest.mark.parametrize(
    ("payload", "refused"),
    [
        (b"", (Reason.PAYLOAD_MALFORMED, "payload: has no fields")),
        (b"||", (Reason.PAYLOAD_MALFORMED, "payload: has no fields")),
        (b"55", (Reason.PAYLOAD_MALFORMED, "payload: field b'55' at byte 0 is not name=value")),
        (b"55=x|=y", (Reason.PAYLOAD_MALFORMED, "payload: field b'=y' at byte 5 is not name=value")),
        (b"||55=x||54", (Reason.PAYLOAD_MALFORMED, "payload: field b'54' at byte 8 is not name=value")),
        (b"54=1||5x=2", (Reason.PAYLOAD_MALFORMED, "payload: tag b'5x' at byte 6 is not a number")),
        (b"54=1", (Reason.KEY_FIELD_MISSING, "key field /55 is missing or null")),
        (b"55=", (Reason.KEY_REQUIRED, "key field /55 is empty, and a key is never empty")),
        (b"55=\xff", (Reason.KEY_NOT_UTF8, "key: a key field is not well-formed UTF-8")),
    ],
)
def test_fix_without_a_key_is_refused_with_its_place(payload: bytes, refused: tuple[Reason, str]) -> None:
    assert fix_key("/55", payload) == refused


def test_names_of_nvfix_are_any_text_and_its_values_any_bytes() -> None:
    assert check(MessageType.NVFIX, b"first name=Ann\x01x=\xff\x01") is None
    assert bad(check(MessageType.FIX, b"first name=Ann\x01")).message == (
        "payload: tag b'first name' at byte 0 is not a number"
    )


# --- binary ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [b"", b"\x00", b"\xff\xfe", b"{"])
def test_any_bytes_are_a_binary_payload(payload: bytes) -> None:
    """Rule K2."""
    assert check(MessageType.BINARY, payload) is None


# --- key paths of a topic --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "message_type", "fault"),
    [
        (("id",), MessageType.JSON, "must begin with '/'"),
        (("/a", "/b/"), MessageType.JSON, "'/b/' has an empty step at 3"),
        (("/a", "/a"), MessageType.JSON, "/a and /a overlap"),
        (("/a", "/b", "/a/b"), MessageType.JSON, "/a and /a/b overlap"),
        (("/a/b/c", "/a/b"), MessageType.MSGPACK, "/a/b/c and /a/b overlap"),
        (('/[a"b]',), MessageType.JSON, "no quotes, backslashes or control characters"),
        (("/a\\b",), MessageType.JSON, "no quotes, backslashes or control characters"),
        (("/a\nb",), MessageType.JSON, "no quotes, backslashes or control characters"),
        (("/a" * (KEY_STEPS_MAX + 1),), MessageType.JSON, "has 33 steps, more than the limit of 32"),
        (("/55/1",), MessageType.FIX, "/55/1: a fix payload is flat"),
        (("/a/b",), MessageType.NVFIX, "/a/b: a nvfix payload is flat"),
        (("/symbol",), MessageType.FIX, "/symbol: a fix field is a tag such as /55"),
        (("/²",), MessageType.FIX, "a fix field is a tag"),
        (("/a",), MessageType.BINARY, "a binary topic has no fields"),
    ],
)
def test_key_paths_that_cannot_work_are_refused(key: tuple[str, ...], message_type: MessageType, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        key_paths(TopicSettings(key=key, message_type=message_type))
    assert fault in str(caught.value)


def test_a_key_field_may_lie_deep() -> None:
    path = "/a" * KEY_STEPS_MAX
    payload = b'{"a":' * KEY_STEPS_MAX + b"1" + b"}" * KEY_STEPS_MAX
    assert json_key(path, payload) == b"1"


@pytest.mark.parametrize("path", ["/a", "/a/b", "/[a/b]/c", "/[[x]", "/[odd name]"])
def test_paths_are_shown_as_they_are_written(path: str) -> None:
    assert parse_path(path_text(parse_path(path))) == parse_path(path)


# --- projection ------------------------------------------------------------------------------------------------------


def only(*paths: str) -> Projection:
    return Projection(include=tuple(parse_path(path) for path in paths))


def without(*paths: str) -> Projection:
    return Projection(exclude=tuple(parse_path(path) for path in paths))


# Numbers and spaces as a publisher may write them: values are handed out as they came in.
DOCUMENT = b'{"a": 1.50, "b":{"c":[1, 2],"d":{"e":null}}, "n":1E400, "s":"\\u0041"}'


@pytest.mark.parametrize(
    ("projection", "expected"),
    [
        (only("/a"), b'{"a":1.50}'),
        (only("/n", "/a"), b'{"a":1.50,"n":1E400}'),
        (only("/s"), b'{"s":"\\u0041"}'),
        (only("/b"), b'{"b":{"c":[1, 2],"d":{"e":null}}}'),
        (only("/b/c"), b'{"b":{"c":[1, 2]}}'),
        (only("/b/d/e"), b'{"b":{"d":{"e":null}}}'),
        (only("/b", "/b/c"), b'{"b":{"c":[1, 2],"d":{"e":null}}}'),
        (only("/b/c", "/b/d"), b'{"b":{"c":[1, 2],"d":{"e":null}}}'),
        (only("/b/c/x"), b"{}"),
        (only("/a/x"), b"{}"),
        (only("/b/zz"), b"{}"),
        (only("/zz"), b"{}"),
        (without("/b", "/n", "/s"), b'{"a":1.50}'),
        (without("/b/c", "/n", "/s", "/a"), b'{"b":{"d":{"e":null}}}'),
        (without("/b/d/e", "/n", "/s", "/a"), b'{"b":{"c":[1, 2],"d":{}}}'),
        (without("/b/c", "/b", "/n", "/s"), b'{"a":1.50}'),
        (without("/a/x", "/b", "/n", "/s"), b'{"a":1.50}'),
        (without("/zz"), b'{"a":1.50,"b":{"c":[1, 2],"d":{"e":null}},"n":1E400,"s":"\\u0041"}'),
    ],
)
def test_a_projection_keeps_the_bytes_of_its_fields(projection: Projection, expected: bytes) -> None:
    """Rule Q2."""
    assert format_of(TopicSettings()).project(DOCUMENT, projection) == expected


def test_a_projection_of_messagepack_keeps_its_encoding() -> None:
    # 1 as a four-byte integer and a map with integer keys: neither survives decoding and encoding.
    payload = b"\x83\xa1a\xce\x00\x00\x00\x01\xa1b\x82\xa1c\xd0\x01\xa1d\x02\xa1m\x81\x01\x02"
    format_ = format_of(TopicSettings(message_type=MessageType.MSGPACK))
    assert format_.project(payload, only("/a")) == b"\x81\xa1a\xce\x00\x00\x00\x01"
    assert format_.project(payload, only("/b/c")) == b"\x81\xa1b\x81\xa1c\xd0\x01"
    assert format_.project(payload, without("/a", "/b/c")) == b"\x82\xa1b\x81\xa1d\x02\xa1m\x81\x01\x02"
    assert format_.project(payload, only("/m/x")) == b"\x80"
    assert format_.project(payload, without("/a", "/b", "/m/x")) == b"\x81\xa1m\x81\x01\x02"


def test_a_projection_of_fix_keeps_whole_fields() -> None:
    fix = format_of(TopicSettings(message_type=MessageType.FIX, separator=b"|"))
    assert fix.project(b"8=x|55=IBM|54=1|55=again|", only("/55", "/8")) == b"8=x|55=IBM|55=again|"
    assert fix.project(b"8=x|55=IBM|54=1", without("/8")) == b"55=IBM|54=1|"
    assert fix.project(b"8=x|", only("/9")) == b""


@pytest.mark.parametrize(
    ("message_type", "payload", "empty"),
    [
        (MessageType.JSON, b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", b"{}"),
        (MessageType.MSGPACK, b"\x81\xa1a" + b"\x91" * 5000 + b"\x01", b"\x80"),
    ],
)
def test_a_document_that_cannot_be_read_to_its_depth_projects_to_an_empty_one(
    message_type: MessageType, payload: bytes, empty: bytes
) -> None:
    """Stored when the stack was a little less deep: it must not end the query that meets it."""
    assert format_of(TopicSettings(message_type=message_type)).project(payload, only("/a")) == empty
