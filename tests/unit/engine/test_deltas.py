"""Documents merged and compared, message type by message type, for deltas (rules P2, S3)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from sow_server.engine.formats.deltas import LEVELS_MAX, Difference
from sow_server.engine.formats.paths import PathTree, path_tree
from sow_server.engine.formats.payloads import BadRecord, Format
from sow_server.engine.formats.topic_formats import format_of
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import MessageType, TopicSettings

pack: Callable[[object], bytes] = msgspec.msgpack.encode
JSON: Format = format_of(TopicSettings())
MSGPACK: Format = format_of(TopicSettings(message_type=MessageType.MSGPACK))
FIX: Format = format_of(TopicSettings(message_type=MessageType.FIX, separator=b"|"))
NVFIX: Format = format_of(TopicSettings(message_type=MessageType.NVFIX, separator=b";"))


def merged(format_: Format, base: bytes, delta: bytes, *unset: str) -> bytes:
    result = format_.merge(base, delta, path_tree([parse_path(path) for path in unset]))
    assert isinstance(result, bytes), result
    return result


def difference(format_: Format, old: bytes, new: bytes, *key: str) -> Difference:
    return format_.difference(old, new, [parse_path(path) for path in key])


# --- merging json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "delta", "result"),
    [
        (b'{"a":1}', b'{"b":2}', b'{"a":1,"b":2}'),
        (b'{"a":1,"b":2}', b'{"a":3}', b'{"a":3,"b":2}'),
        (b'{"a":[1,2,3]}', b'{"a":[4]}', b'{"a":[4]}'),
        (b'{"a":{"x":1,"y":2}}', b'{"a":{"y":3,"z":4}}', b'{"a":{"x":1,"y":3,"z":4}}'),
        (b'{"a":{"b":{"c":1,"d":2}},"e":5}', b'{"a":{"b":{"d":3}}}', b'{"a":{"b":{"c":1,"d":3}},"e":5}'),
        (b'{"a":1}', b'{"a":{"x":1}}', b'{"a":{"x":1}}'),
        (b'{"a":[{"x":1}]}', b'{"a":{"x":2}}', b'{"a":{"x":2}}'),
        (b'{"a":{"x":1}}', b'{"a":2}', b'{"a":2}'),
        (b'{"a":{"x":1}}', b'{"a":[]}', b'{"a":[]}'),
        (b'{"a":{"x":1}}', b'{"a":{}}', b'{"a":{"x":1}}'),
        (b"{}", b'{"a":{}}', b'{"a":{}}'),
        (b"{}", b"{}", b"{}"),
    ],
)
def test_scalars_and_arrays_are_replaced_and_objects_merged(base: bytes, delta: bytes, result: bytes) -> None:
    assert merged(JSON, base, delta) == result


@pytest.mark.parametrize(
    ("base", "delta", "result"),
    [
        (b'{"a":1}', b'{"a":null}', b'{"a":1}'),
        (b'{"a":null}', b'{"a":null}', b'{"a":null}'),
        (b'{"a":1}', b'{"b":null}', b'{"a":1}'),
        (b'{"a":{"x":1}}', b'{"a":null,"b":1}', b'{"a":{"x":1},"b":1}'),
        (b'{"a":{"x":1}}', b'{"a":{"x":null,"y":2}}', b'{"a":{"x":1,"y":2}}'),
        (b'{"a":1}', b'{"b":{"x":null,"y":{"z":null,"w":1}}}', b'{"a":1,"b":{"y":{"w":1}}}'),
        (b'{"a":1}', b'{"b":{"x":null}}', b'{"a":1,"b":{}}'),
        (b'{"a":1}', b'{"b":[null,{"x":null}]}', b'{"a":1,"b":[null,{"x":null}]}'),
        (b'{"a":1}', b'{"b":{"x":"null"}}', b'{"a":1,"b":{"x":"null"}}'),
    ],
)
def test_null_leaves_a_field_as_it_is(base: bytes, delta: bytes, result: bytes) -> None:
    """Also below an object that was not there: a missing field stays missing. In an array it is a value."""
    assert merged(JSON, base, delta) == result


@pytest.mark.parametrize(
    ("base", "unset", "result"),
    [
        (b'{"a":1,"b":2}', ["/b"], b'{"a":1}'),
        (b'{"a":1,"b":{"x":1,"y":2}}', ["/b/x"], b'{"a":1,"b":{"y":2}}'),
        (b'{"a":1,"b":{"x":1}}', ["/b/x"], b'{"a":1,"b":{}}'),
        (b'{"a":1,"b":{"x":1}}', ["/b/x", "/b"], b'{"a":1}'),
        (b'{"a":1,"b":{"x":1}}', ["/b/x/y", "/a/z", "/q", "/b/q"], b'{"a":1,"b":{"x":1}}'),
        (b'{"a":1,"x/y":2,"":3}', ["/[x/y]", "/[]"], b'{"a":1}'),
        (b'{"a":[{"x":1}]}', ["/a/x"], b'{"a":[{"x":1}]}'),
    ],
)
def test_unset_fields_go_and_missing_ones_are_no_matter(base: bytes, unset: list[str], result: bytes) -> None:
    assert merged(JSON, base, b"{}", *unset) == result


def test_a_field_that_is_unset_and_given_is_replaced_whole() -> None:
    """deltas [2]."""
    assert merged(JSON, b'{"a":{"x":1}}', b'{"a":{"y":2}}', "/a") == b'{"a":{"y":2}}'
    assert merged(JSON, b'{"a":{"x":1,"y":{"z":1}}}', b'{"a":{"y":{"w":2}}}', "/a/y") == b'{"a":{"x":1,"y":{"w":2}}}'


def test_fields_that_a_delta_does_not_change_keep_their_bytes() -> None:
    """deltas [1]: numbers that no float holds, escapes and spaces inside values, the order of the fields."""
    base = b'{ "big":1E400, "pi": 3.1400, "s":"\\u0041", "in":{ "x" :1.50, "y":[ 1 , 2 ] } }'
    assert merged(JSON, base, b'{"new":1.0}') == (
        b'{"big":1E400,"pi":3.1400,"s":"\\u0041","in":{ "x" :1.50, "y":[ 1 , 2 ] },"new":1.0}'
    )
    assert merged(JSON, base, b'{"in":{"x":2}}') == (
        b'{"big":1E400,"pi":3.1400,"s":"\\u0041","in":{"x":2,"y":[ 1 , 2 ]}}'
    )
    assert merged(JSON, base, b'{"pi":3.1400,"in":{"y":[ 1 , 2 ]},"zz":null}', "/gone") == base


def test_the_last_of_a_repeated_name_counts_in_a_delta_too() -> None:
    assert merged(JSON, b'{"a":1,"a":2}', b'{"b":1,"b":3}') == b'{"a":2,"b":3}'


def nested(levels: int, leaf: str) -> bytes:
    """Objects in objects, the outermost counted."""
    return ('{"a":' * levels + leaf + "}" * levels).encode()


def test_objects_are_merged_down_to_a_bound() -> None:
    deepest = merged(JSON, nested(LEVELS_MAX, '{"x":1}'), nested(LEVELS_MAX - 1, '{"b":2}'))
    assert deepest == nested(LEVELS_MAX - 1, '{"a":{"x":1},"b":2}')
    refused = JSON.merge(nested(LEVELS_MAX, '{"x":1}'), nested(LEVELS_MAX, '{"y":2}'), PathTree())
    assert isinstance(refused, BadRecord)
    assert refused.reason is Reason.PAYLOAD_MALFORMED
    assert "merged down to 32 levels, and this one goes deeper" in refused.message
    # Deeper values are taken as they are, where there is nothing to merge them with.
    assert merged(JSON, b"{}", nested(LEVELS_MAX * 3, "1")) == nested(LEVELS_MAX * 3, "1")


def test_a_document_that_cannot_be_read_to_its_depth_is_no_base() -> None:
    """Stored when the stack was a little less deep: its delta is refused, and the writer goes on."""
    base = pack({"a": 1})[:-1] + b"\x91" * 5000 + b"\x01"
    refused = MSGPACK.merge(base, pack({"b": 1}), PathTree())
    assert isinstance(refused, BadRecord)
    assert refused.reason is Reason.PAYLOAD_MALFORMED
    assert refused.message.startswith("payload: cannot be merged")


# --- merging msgpack -------------------------------------------------------------------------------------------------


def test_messagepack_is_merged_like_json_and_keeps_its_bytes() -> None:
    wide_one = b"\x83\xa1a\xce\x00\x00\x00\x01\xa1b\x82\xa1x\xd0\x01\xa1y\x02\xa1m\x81\x01\x02"
    assert merged(MSGPACK, wide_one, pack({"b": {"y": 3}, "c": [None]})) == (
        b"\x84\xa1a\xce\x00\x00\x00\x01\xa1b\x82\xa1x\xd0\x01\xa1y\x03\xa1m\x81\x01\x02\xa1c\x91\xc0"
    )
    assert merged(MSGPACK, wide_one, pack({"a": None}), "/b/x", "/m") == (
        b"\x82\xa1a\xce\x00\x00\x00\x01\xa1b\x81\xa1y\x02"
    )
    assert merged(MSGPACK, wide_one, pack({"a": None, "b": {}})) == wide_one
    assert msgspec.msgpack.decode(merged(MSGPACK, pack({"a": 1}), pack({"b": {"x": None, "y": 2}}))) == {
        "a": 1,
        "b": {"y": 2},
    }


def test_a_map_with_other_keys_than_texts_is_one_value() -> None:
    assert msgspec.msgpack.decode(merged(MSGPACK, pack({"m": {1: 2}}), pack({"m": {3: 4}})), strict=False) == {
        "m": {3: 4}
    }
    assert msgspec.msgpack.decode(merged(MSGPACK, pack({"m": {1: 2}}), pack({"m": {"a": 1}}))) == {"m": {"a": 1}}


def test_large_maps_are_merged_too() -> None:
    """Their first byte is another one."""
    base = {f"f{number}": number for number in range(70_000)}
    assert msgspec.msgpack.decode(merged(MSGPACK, pack({"in": base}), pack({"in": {"f7": "x"}}))) == {
        "in": {**base, "f7": "x"}
    }


# --- merging fix and nvfix -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "delta", "unset", "result"),
    [
        (b"8=x|55=IBM|54=1|", b"54=2|", [], b"8=x|55=IBM|54=2|"),
        (b"8=x|55=IBM|54=1", b"54=2|", [], b"8=x|55=IBM|54=2"),
        (b"8=x|55=IBM|", b"44=1.5|38=7|", [], b"8=x|55=IBM|44=1.5|38=7|"),
        (b"8=x|55=IBM", b"44=1.5|", [], b"8=x|55=IBM|44=1.5"),
        (b"|8=x||55=IBM||", b"44=1|55=MSFT", [], b"|8=x||55=MSFT||44=1|"),
        (b"1=a|2=b|1=c|", b"1=z|", [], b"1=z|2=b|1=c|"),
        (b"1=a|2=b|", b"3=x|3=y|2=w|2=v|", [], b"1=a|2=w|3=x|"),
        (b"1=a|2=b|1=c|", b"3=x|", ["/1"], b"2=b|3=x|"),
        (b"1=a|2=b|", b"1=n|", ["/1"], b"2=b|1=n|"),
        (b"1=a", b"2=b|", ["/1"], b"2=b"),
        (b"1=a|", b"2=b", ["/1", "/9"], b"2=b|"),
        (b"1=a=b|2=|", b"2=c=d|", [], b"1=a=b|2=c=d|"),
        (b"1=a|", b"1=|", [], b"1=|"),
    ],
)
def test_fix_is_merged_field_by_field(base: bytes, delta: bytes, unset: list[str], result: bytes) -> None:
    """Each in its place, new ones at the end, with separators as the record has them."""
    assert merged(FIX, base, delta, *unset) == result


def test_nvfix_is_merged_under_its_own_separator() -> None:
    assert merged(NVFIX, b"id=1;px=5;note=\xff;", b"px=6;qty=2;", "/note") == b"id=1;px=6;qty=2;"


# --- differences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "payload", "gone"),
    [
        (b'{"k":1,"a":1,"b":2}', b'{"k":1,"a":1,"b":3}', b'{"k":1,"b":3}', ()),
        (b'{"k":1,"a":1}', b'{"k":1}', b'{"k":1}', ("/a",)),
        (b'{"k":1}', b'{"k":1,"a":{"x":null}}', b'{"k":1,"a":{"x":null}}', ()),
        (b'{"k":1,"a":1}', b'{"k":1,"a":null}', b'{"k":1,"a":null}', ()),
        (b'{"a":{"x":1,"y":2},"k":1}', b'{"a":{"x":1,"y":3},"k":1}', b'{"a":{"y":3},"k":1}', ()),
        (b'{"a":{"x":1,"y":2},"k":1}', b'{"a":{"x":1},"k":1}', b'{"k":1}', ("/a/y",)),
        (b'{"a":{"x":1},"k":1}', b'{"a":{},"k":1}', b'{"k":1}', ("/a/x",)),
        (b'{"a":{"x":1},"k":1}', b'{"a":5,"k":1}', b'{"a":5,"k":1}', ()),
        (b'{"a":5,"k":1}', b'{"a":{},"k":1}', b'{"a":{},"k":1}', ()),
        (b'{"a":[1,2],"k":1}', b'{"a":[1,3],"k":1}', b'{"a":[1,3],"k":1}', ()),
        (b'{"a":1,"k":1}', b'{"a":true,"k":1}', b'{"a":true,"k":1}', ()),
        (b'{"a":1,"k":1}', b'{"a":1.0,"k":1}', b'{"a":1.0,"k":1}', ()),
        (b'{"a":1E400,"k":1}', b'{"a":1e400,"k":1}', b'{"a":1e400,"k":1}', ()),
        (
            b'{"a":12345678901234567890.51,"k":1}',
            b'{"a":12345678901234567890.52,"k":1}',
            b'{"a":12345678901234567890.52,"k":1}',
            (),
        ),
        (b'{"a":[0.1],"k":1}', b'{"a":[0.10000000000000001],"k":1}', b'{"a":[0.10000000000000001],"k":1}', ()),
        (
            b'{"a":18446744073709551616,"k":1}',
            b'{"a":18446744073709551617,"k":1}',
            b'{"a":18446744073709551617,"k":1}',
            (),
        ),
        (b'{"k":1}', b'{"k":"1"}', b'{"k":"1"}', ()),
        (b'{"k":1,"x/y":1,"]/":2,"":3}', b'{"k":1}', b'{"k":1}', ("/[x/y]", "/[\\]/]", "/[]")),
    ],
)
def test_a_difference_has_the_changed_fields_and_the_key_fields(
    old: bytes, new: bytes, payload: bytes, gone: tuple[str, ...]
) -> None:
    assert difference(JSON, old, new, "/k") == Difference(payload, gone, True)


@pytest.mark.parametrize(
    "again",
    [
        b'{"k":1,"a":{"x":[1,{"y":2,"z":3}]},"s":"A","n":100.0}',
        b'{ "n":1e2, "a" : {"x": [1, {"z":3, "y":2}]}, "k":1, "s":"\\u0041" }',
    ],
)
def test_spaces_escapes_and_the_order_of_fields_are_no_change(again: bytes) -> None:
    base = b'{"k":1,"a":{"x":[1,{"y":2,"z":3}]},"s":"A","n":100.0}'
    assert difference(JSON, base, again, "/k") == Difference(b'{"k":1}', (), False)
    assert difference(JSON, base, again) == Difference(b"{}", (), False)


def test_nested_key_fields_are_added_to_the_changed_fields() -> None:
    old = b'{"id":{"a":1,"b":2,"c":3},"x":1,"y":1}'
    new = b'{"id":{"a":1,"b":2,"c":4},"x":1,"y":2}'
    assert difference(JSON, old, new, "/id/a", "/id/b").payload == b'{"id":{"c":4,"a":1,"b":2},"y":2}'
    assert difference(JSON, old, old, "/id/b", "/x").payload == b'{"id":{"b":2},"x":1}'


def test_a_difference_deeper_than_the_bound_replaces_the_object_there() -> None:
    old, new = nested(LEVELS_MAX + 1, '{"x":1,"y":1}'), nested(LEVELS_MAX + 1, '{"y":1}')
    found = difference(JSON, old, new)
    assert found.unset_paths == ("/a" * LEVELS_MAX,)
    assert found.payload == nested(LEVELS_MAX + 1, '{"y":1}')
    assert merged(JSON, old, found.payload, *found.unset_paths) == new
    assert not difference(JSON, old, nested(LEVELS_MAX + 1, '{"y":1, "x":1}')).changed


def test_a_document_that_cannot_be_read_counts_as_one_without_fields() -> None:
    """As for filters: it must not end a subscription."""
    unreadable = b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"
    assert difference(JSON, unreadable, b'{"k":1}', "/k") == Difference(b'{"k":1}', (), True)
    assert difference(JSON, b'{"k":1}', unreadable, "/k") == Difference(b"{}", ("/k",), True)


def test_a_difference_of_messagepack_is_messagepack() -> None:
    old = pack({"k": 1, "a": {"x": 1, "y": 2}, "m": {1: 2}, "b": b"1"})
    new = pack({"k": 1, "a": {"x": 1}, "m": {1: 3}, "b": "1"})
    found = difference(MSGPACK, old, new, "/k")
    assert found.unset_paths == ("/a/y",)
    assert msgspec.msgpack.decode(found.payload, strict=False) == {"k": 1, "m": {1: 3}, "b": "1"}
    assert not difference(MSGPACK, b"\x81\xa1a\x01", b"\x81\xa1a\xce\x00\x00\x00\x01").changed


def test_a_difference_of_fix_has_whole_fields() -> None:
    assert difference(FIX, b"55=IBM|54=1|38=7", b"55=IBM|38=7|44=2|54=2|", "/55") == Difference(
        b"55=IBM|44=2|54=2|", (), True
    )
    assert difference(FIX, b"55=IBM|54=1|", b"55=IBM|", "/55") == Difference(b"55=IBM|", ("/54",), True)
    assert difference(FIX, b"55=IBM|54=1|54=2|", b"54=1|55=IBM", "/55") == Difference(b"55=IBM|", (), False)
    assert difference(NVFIX, b"a b=1;x/y=2;\xff=3;", b"a b=2;").unset_paths == ("/[x/y]", "/\ufffd")
