"""`View`: the state that the messages of a subscription tell, and deltas merged as the server makes them (rule S3)."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow.flat_fields import FlatFields
from sow.v1 import types_pb2
from sow_client import Change, InvalidArgument, PayloadForm, Record, RecordBatch, View
from sow_client._view import merged
from sow_server.engine.formats.deltas import Difference, difference_fields
from sow_server.engine.formats.topic_formats import format_of
from sow_server.engine.values.model import MessageType, TopicSettings
from tests.support.fakes.subscriptions import columns

NEVER_MICROS = 2**63 - 1


def record(key: str, payload: bytes = b"{}", *, sequence: int = 1, beside: int = 0) -> Record:
    """A record of a frame that holds others, too."""
    rows = [(key, payload, sequence), *((f"other-{number}", b"x" * 1000, sequence) for number in range(beside))]
    return next(iter(RecordBatch("orders", columns(rows))))


def sow(key: str, payload: bytes = b"{}") -> Change:
    return Change("sow", record=record(key, payload), topic="orders")


def put(key: str, payload: bytes = b"{}", *, sequence: int = 2) -> Change:
    return Change("put", record=record(key, payload, sequence=sequence, beside=3), topic="orders")


def delta(key: str, payload: bytes, *unset_paths: str) -> Change:
    return Change(
        "put", record=record(key, payload, sequence=7), topic="orders", is_delta=True, unset_paths=unset_paths
    )


def view_of(*changes: Change) -> View:
    view = View()
    for change in changes:
        view.apply(change)
    return view


def data(view: View) -> dict[str, object]:
    return {key: one.data for key, one in view.items()}


# ---- messages ----


def test_a_view_equals_snapshot_and_changes() -> None:
    view = view_of(sow("a", b'{"n":1}'), sow("b", b'{"n":1}'))
    assert not view.complete
    assert repr(view) == "View(2 records, not complete)"
    for change in (Change("snapshot_end", bookmark="e.1"), put("b", b'{"n":2}'), put("c", b'{"n":3}')):
        view.apply(change)
    assert repr(view) == "View(3 records)"
    assert data(view) == {"a": {"n": 1}, "b": {"n": 2}, "c": {"n": 3}}
    assert "c" in view
    assert len(view) == 3
    assert view["b"].sequence == 2


@pytest.mark.parametrize(
    "change",
    [
        Change("oof", "deleted", None, record("a")),
        Change("oof", "expired", None, record("a")),
        Change("oof", "match", record("a", b'{"n":9}')),
        Change("delete", None, None, record("a")),
        Change("expire", None, None, record("a")),
    ],
)
def test_records_out_of_focus_leave_the_view(change: Change) -> None:
    view = view_of(sow("a"), sow("b"), change)
    assert list(view) == ["b"]
    view.apply(change)  # a client that never had the key ignores it (rule J1)
    assert list(view) == ["b"]


def test_a_resync_forgets_everything_until_the_new_snapshot_is_in() -> None:
    view = view_of(sow("a"), Change("snapshot_end"), Change("resync"))
    assert (len(view), view.complete) == (0, False)
    view.apply(sow("b"))
    view.apply(Change("snapshot_end"))
    assert (list(view), view.complete) == (["b"], True)


def test_a_record_that_is_kept_lets_go_of_the_frame_it_came_in() -> None:
    """_view [3]: a record that never changes again would hold a megabyte of others."""
    frame = RecordBatch(
        "orders",
        types_pb2.RecordColumns(
            key=["a", "b"],
            payload=[b'{"n":1}', b"x" * 1_000_000],
            version=[11, 12],
            publish_time_micros=[21, 22],
            expire_time_micros=[31, NEVER_MICROS],
            sequence=[41, 42],
            origin=[1, 0],
            origins=["nyc", "ldn"],
        ),
    )
    one, other = frame
    view = view_of(Change("put", record=one), Change("put", record=other))
    for kept, given_ in ((view["a"], one), (view["b"], other)):
        assert len(kept._batch) == 1
        for name in ("topic", "key", "payload", "version", "publish_time", "expire_time", "origin", "sequence"):
            assert getattr(kept, name) == getattr(given_, name), name


# ---- deltas ----


@pytest.mark.parametrize(
    ("base", "change", "unset", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 3}, [], {"a": 3, "b": 2}),
        ({"a": 1}, {"b": {"c": 1}}, [], {"a": 1, "b": {"c": 1}}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, [], {"a": {"x": 1, "y": 3}}),
        ({"a": [1, 2]}, {"a": [3]}, [], {"a": [3]}),
        ({"a": 1}, {"a": None}, [], {"a": None}),  # null means null
        ({"a": {"x": 1}}, {"a": {"x": None}}, [], {"a": {"x": None}}),
        ({"a": {"x": 1}}, {"a": 5}, [], {"a": 5}),
        ({"a": 5}, {"a": {"x": 1}}, [], {"a": {"x": 1}}),
        ({"a": 1, "b": 2}, {}, ["/a"], {"b": 2}),
        ({"a": {"x": 1, "y": 2}}, {}, ["/a/x"], {"a": {"y": 2}}),
        ({"a": {"x": 1}}, {"a": {"y": 1}}, ["/a"], {"a": {"y": 1}}),  # unset first: the object is replaced whole
        ({"a": 1}, {}, ["/nothing/there", "/a/b"], {"a": 1}),
        ({"o/d]d": 1, "[": 2, "": 3}, {}, ["/[o/d\\]d]", "/[[]", "/[]"], {}),
    ],
)
@pytest.mark.parametrize("encoding", [msgspec.json, msgspec.msgpack])
def test_a_delta_is_merged_field_by_field(
    base: object, change: object, unset: list[str], expected: object, encoding: object
) -> None:
    encode, decode = encoding.encode, encoding.decode  # type: ignore[attr-defined]  # either module
    assert decode(merged(encode(base), encode(change), unset)) == expected


def test_values_that_a_delta_does_not_touch_keep_their_form() -> None:
    """Numbers of more digits than a float has are not rounded by being looked at."""
    base = b'{"price":1.10,"huge":123456789012345678901234567890,"o":{"p":2.50,"q":1}}'
    assert merged(base, b'{"o":{"q":2}}', []) == (
        b'{"price":1.10,"huge":123456789012345678901234567890,"o":{"p":2.50,"q":2}}'
    )


def test_a_msgpack_map_with_other_keys_than_texts_is_a_value() -> None:
    base = msgspec.msgpack.encode({"a": {1: 2, 3: 4}})
    assert msgspec.msgpack.decode(merged(base, msgspec.msgpack.encode({"a": {1: 5}}), [])) == {"a": {1: 5}}


@pytest.mark.parametrize("separator", [b"\x01", b"|"])
def test_a_delta_of_fix_fields(separator: bytes) -> None:
    def fields(*parts: bytes) -> bytes:
        return b"".join([part + separator for part in parts])

    base = fields(b"55=IBM", b"44=1.5", b"58=note")
    result = merged(
        base, fields(b"55=IBM", b"44=2", b"38=100"), ["/58"], form=PayloadForm("nvfix", separator.decode("latin-1"))
    )
    assert result == fields(b"55=IBM", b"44=2", b"38=100")


def test_a_view_merges_deltas_into_its_records() -> None:
    view = view_of(sow("a", b'{"id":1,"n":1,"x":1}'), delta("a", b'{"id":1,"n":2}', "/x"))
    assert view["a"].data == {"id": 1, "n": 2}
    assert view["a"].sequence == 7
    view.apply(put("a", b'{"id":1}'))  # came into focus again: whole
    assert view["a"].data == {"id": 1}
    view.apply(delta("new", b'{"id":2}'))
    assert view["new"].data == {"id": 2}


def test_a_view_of_fix_needs_to_know_the_separator() -> None:
    view = View(fix_separator="|")
    view.apply(sow("a", b"55=IBM|44=1|"))
    view.apply(delta("a", b"44=2|"))
    assert view["a"].payload == b"55=IBM|44=2|"


@pytest.mark.parametrize("path", ["", "a", "/a]b[", "x/y"])
def test_what_is_no_path_is_refused(path: str) -> None:
    if path.startswith("/"):
        assert merged(b'{"a]b[":1}', b"{}", [path]) == b"{}"
        return
    with pytest.raises(InvalidArgument):
        merged(b"{}", b"{}", [path])


scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "é"]) | st.just(0.5)
names = st.sampled_from(["a", "b", "c", "d/e", "[f]", ""])
values = st.recursive(
    scalars | st.lists(scalars, max_size=2), lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=8
)
documents = st.dictionaries(names, values, max_size=4)


@pytest.mark.slow
@given(documents, documents, st.sampled_from([MessageType.JSON, MessageType.MSGPACK]))
def test_the_servers_delta_turns_the_old_document_into_the_new_one(
    old: dict[str, object], new: dict[str, object], message_type: MessageType
) -> None:
    """The two sides of rule S3 agree: difference there, merge here."""
    encoding = msgspec.json if message_type is MessageType.JSON else msgspec.msgpack
    before, after = encoding.encode(old), encoding.encode(new)
    told: Difference = format_of(TopicSettings(message_type=message_type)).difference(before, after, [])
    assert encoding.decode(merged(before, told.payload, told.unset_paths)) == json.loads(json.dumps(new))


field_values = st.dictionaries(st.sampled_from(["1", "22", "333"]), st.sampled_from(["", "x", "y=z"]), max_size=3)


@given(field_values, field_values)
def test_the_two_sides_agree_on_fix_fields_too(old: dict[str, str], new: dict[str, str]) -> None:
    def encoded(fields: dict[str, str]) -> bytes:
        return "".join([f"{name}={value}|" for name, value in fields.items()]).encode()

    told = difference_fields(encoded(old), encoded(new), [], FlatFields(b"|", tags=True))
    result = merged(encoded(old), told.payload, told.unset_paths, form=PayloadForm("fix", "|"))
    assert dict(part.split("=", 1) for part in result.decode().split("|") if part) == new
