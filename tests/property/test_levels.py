"""Documents that are opened level by level in linear time give the bytes that the first, slow implementation gave.

Documents are made as bytes, as publishers may write them: repeated names, spaces, escapes, numbers beyond all floats,
wide encodings, maps with other keys than texts; and nested below the levels that msgspec reads as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sow_server.engine.formats import levels
from sow_server.engine.formats.levels import DECODED_LEVELS, FEW_NAMES, LARGE_BYTES, PIECE_BYTES
from sow_server.engine.formats.paths import Steps, path_tree
from sow_server.engine.formats.payloads import BadRecord, Format, Projection
from sow_server.engine.formats.topic_formats import format_of
from sow_server.engine.values.model import MessageType, TopicSettings
from tests.support.oracles.examples import examples
from tests.support.stores.first_levels import FirstLevels, project_fields

JSON, MSGPACK = format_of(TopicSettings()), format_of(TopicSettings(message_type=MessageType.MSGPACK))
FIRST = {JSON: FirstLevels(json=True), MSGPACK: FirstLevels(json=False)}

# --- documents as bytes ----------------------------------------------------------------------------------------------

SPACES = st.sampled_from([b"", b"", b" ", b"\n\t"])
JSON_NAMES = st.sampled_from(
    [b'"a"', b'"a"', b'"b"', b'"\\u0061"', '"é"'.encode(), b'"\\"[{"', b'""', b'"\\\\"', b'"v"']
)
JSON_SCALARS = st.sampled_from(
    [b"1", b"1.50", b"1E400", b"-0", b"12345678901234567890123", b"9" * 5000, b"[7]", b"{}", b"[]", b"null", b"true"]
) | st.sampled_from([b'"x"', b'"\\u0041"', b'"]{\\"["', b'"\\\\"', '"é"'.encode()])


@st.composite
def json_objects(draw: st.DrawFn, values: st.SearchStrategy[bytes]) -> bytes:
    members = [
        draw(SPACES) + draw(JSON_NAMES) + draw(SPACES) + b":" + draw(SPACES) + draw(values) + draw(SPACES)
        for _ in range(draw(st.integers(0, 4)))
    ]
    return b"{" + (b",".join(members) or draw(SPACES)) + b"}"


@st.composite
def json_arrays(draw: st.DrawFn, values: st.SearchStrategy[bytes]) -> bytes:
    elements = [draw(SPACES) + draw(values) + draw(SPACES) for _ in range(draw(st.integers(0, 3)))]
    return b"[" + (b",".join(elements) or draw(SPACES)) + b"]"


MSGPACK_NAMES = st.sampled_from([b"\xa1a", b"\xd9\x01a", b"\xa1b", b"\xda\x00\x01b", b"\xa2\xc3\xa9", b"\xa0"])
MSGPACK_KEYS = MSGPACK_NAMES | MSGPACK_NAMES | st.sampled_from([b"\xa1a", b"\x01", b"\x91\x01"])
MSGPACK_SCALARS = (
    st.sampled_from([b"\x01", b"\xff", b"\xce\x00\x00\x00\x01", b"\xd0\x91", b"\xcf" + b"\x91" * 8, b"\xcd\x91\x91"])
    | st.sampled_from([b"\xca\x91\xce\x91\x91", b"\xcb\x3f\xf8" + b"\x00" * 6, b"\xc0", b"\xc2", b"\xc3"])
    | st.sampled_from([b"\xa2\x41\x31", b"\xd9\x01x", b"\xda\x00\x01z", b"\xdb\x00\x00\x00\x01y"])
    | st.sampled_from([b"\xc4\x02\x91\x81", b"\xc5\x00\x01\x80", b"\xc6\x00\x00\x00\x01\x90"])
    | st.sampled_from([b"\xd4\x05\x91", b"\xd5\x05\x91\x91", b"\xd6\xff\x00\x00\x00\x01", b"\xd7\x05" + b"\x91" * 8])
    | st.sampled_from([b"\xd8\x05" + b"\x91" * 16, b"\xc7\x03\x05\x91\x92\x93", b"\xc8\x00\x01\x05\x90"])
    | st.sampled_from([b"\xc9\x00\x00\x00\x02\x05\x90\x91", b"\x80", b"\x90", b"\x91\x07"])
)


@st.composite
def msgpack_objects(
    draw: st.DrawFn, values: st.SearchStrategy[bytes], names: st.SearchStrategy[bytes] = MSGPACK_KEYS
) -> bytes:
    members = [draw(names) + draw(values) for _ in range(draw(st.integers(0, 4)))]
    count = len(members)
    header: bytes = draw(
        st.sampled_from([bytes([0x80 | count]), b"\xde" + count.to_bytes(2, "big"), b"\xdf" + count.to_bytes(4, "big")])
    )
    return header + b"".join(members)


@st.composite
def msgpack_arrays(draw: st.DrawFn, values: st.SearchStrategy[bytes]) -> bytes:
    elements = [draw(values) for _ in range(draw(st.integers(0, 3)))]
    count = len(elements)
    header: bytes = draw(
        st.sampled_from([bytes([0x90 | count]), b"\xdc" + count.to_bytes(2, "big"), b"\xdd" + count.to_bytes(4, "big")])
    )
    return header + b"".join(elements)


JSON_VALUES = st.recursive(JSON_SCALARS, lambda inner: json_objects(inner) | json_arrays(inner), max_leaves=12)
MSGPACK_VALUES = st.recursive(
    MSGPACK_SCALARS, lambda inner: msgpack_objects(inner) | msgpack_arrays(inner), max_leaves=12
)


class Wrapping(NamedTuple):
    """Levels around a document: the name of the field that holds the next one; None: an array holds it."""

    levels: tuple[str | None, ...]

    @property
    def steps(self) -> Steps:
        return tuple([level for level in self.levels if level is not None])

    def json(self, inner: bytes) -> bytes:
        for name in reversed(self.levels):
            inner = b"[1, " + inner + b" ]" if name is None else b'{"z" : [2], "%s": %s}' % (name.encode(), inner)
        return inner

    def msgpack(self, inner: bytes) -> bytes:
        for level in reversed(self.levels):
            inner = b"\x92\x01" + inner if level is None else b"\x82\xa1z\x91\x02\xa1" + level.encode() + inner
        return inner


@st.composite
def wrappings(draw: st.DrawFn) -> Wrapping:
    count = draw(st.sampled_from([0, 1, DECODED_LEVELS - 2, DECODED_LEVELS - 1, DECODED_LEVELS, DECODED_LEVELS + 4]))
    levels: list[str | None] = draw(st.lists(st.sampled_from(["a", "a", "b", None]), min_size=count, max_size=count))
    return Wrapping(tuple(levels and ["a", *levels[1:]]))


class Sample(NamedTuple):
    format: Format
    documents: list[bytes]
    paths: list[Steps]


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Two documents of a type, and paths that may lead somewhere in them."""
    wrapping: Wrapping = draw(wrappings())
    paths: list[Steps] = [
        (*wrapping.steps, *steps) if draw(st.integers(0, 3)) else steps
        for steps in draw(st.lists(STEPS, min_size=1, max_size=4))
    ]
    if draw(st.booleans()):
        documents = [draw(SPACES) + wrapping.json(draw(json_objects(JSON_VALUES))) + draw(SPACES) for _ in range(2)]
        return Sample(JSON, documents, paths)
    tops = msgpack_objects(MSGPACK_VALUES, MSGPACK_KEYS if wrapping.levels else MSGPACK_NAMES)
    return Sample(MSGPACK, [wrapping.msgpack(draw(tops)) for _ in range(2)], paths)


STEPS = st.lists(st.sampled_from(["a", "b", "é", "", "z", '"[{', "\\"]), min_size=1, max_size=3).map(tuple)


class Bounds(NamedTuple):
    """From how many bytes on an object is large; the size of its pieces; how many names are few."""

    large_bytes: int
    piece_bytes: int
    few_names: int

    def applied(self) -> AbstractContextManager[object]:
        return mock.patch.multiple(
            levels, LARGE_BYTES=self.large_bytes, PIECE_BYTES=self.piece_bytes, FEW_NAMES=self.few_names
        )


BOUNDS = st.just(Bounds(LARGE_BYTES, PIECE_BYTES, FEW_NAMES)) | st.builds(
    Bounds, st.sampled_from([0, 0, 30]), st.sampled_from([0, 4, 10, 30]), st.sampled_from([0, 1, FEW_NAMES])
)
"""So that small documents are read as large ones are."""

# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(samples(), st.sampled_from(["include", "exclude", "hidden"]), st.booleans(), st.integers(0, 3), BOUNDS)
@settings(max_examples=examples(600))
def test_a_projection_gives_the_bytes_of_the_first_one(
    sample: Sample, kind: str, both: bool, hidden: int, bounds: Bounds
) -> None:
    paths = tuple(sample.paths)
    projection = Projection(**{kind: paths})
    if both and kind != "hidden":
        projection = Projection(**{kind: paths}, hidden=paths[:hidden])
    for document in sample.documents:
        assert sample.format.check(document) is None, "a legal payload"
        with bounds.applied():
            projected = sample.format.project(document, projection)
        assert projected == FIRST[sample.format].project(document, projection)


@pytest.mark.slow
@given(samples(), st.integers(0, 4))
@settings(max_examples=examples(400))
def test_a_merge_gives_the_bytes_of_the_first_one(sample: Sample, unset: int) -> None:
    base, delta = sample.documents
    paths = sample.paths[:unset]
    merged = sample.format.merge(base, delta, path_tree(paths))
    assert (None if isinstance(merged, BadRecord) else merged) == FIRST[sample.format].merge(base, delta, paths)


@pytest.mark.slow
@given(samples())
@settings(max_examples=examples(400))
def test_a_difference_is_that_of_the_first_one(sample: Sample) -> None:
    old, new = sample.documents
    key = _apart(sample.paths)
    assert sample.format.difference(old, new, key) == FIRST[sample.format].difference(old, new, key)


def _apart(paths: Sequence[Steps]) -> list[Steps]:
    """Those of the paths that are in no other: so are those of a key."""
    found: list[Steps] = []
    for path in paths:
        if not any(path[: len(other)] == other[: len(path)] for other in found):
            found.append(path)
    return found


FIX_STEPS = st.lists(st.sampled_from(["1", "2", "3"]), min_size=1, max_size=2).map(tuple)


@given(
    st.lists(st.tuples(st.sampled_from([b"1", b"2", b"3", b"1\xff"]), st.sampled_from([b"", b"x", b"=y"])), min_size=1),
    st.lists(FIX_STEPS, min_size=1, max_size=3).map(tuple),
    st.sampled_from(["include", "exclude", "hidden"]),
    st.sampled_from([b"|", b"||"]),
)
@settings(max_examples=examples(100))
def test_a_projection_of_fields_gives_the_bytes_of_the_first_one(
    fields: list[tuple[bytes, bytes]], paths: tuple[Steps, ...], kind: str, separator: bytes
) -> None:
    nvfix = format_of(TopicSettings(message_type=MessageType.NVFIX, separator=b"|"))
    payload = separator.join([name + b"=" + value for name, value in fields])
    projection = Projection(**{kind: paths})
    assert nvfix.project(payload, projection) == project_fields(payload, projection, b"|")


@pytest.mark.parametrize("format_", [JSON, MSGPACK])
def test_the_samples_reach_below_the_levels_that_are_decoded(format_: Format) -> None:
    """Otherwise the properties above would say nothing about indexes."""
    wrapping = Wrapping(("a",) * (DECODED_LEVELS + 2))
    inner = b'{"b":[1, 2],"a":1.50}' if format_ is JSON else b"\x82\xa1b\x92\x01\x02\xa1a\xd0\x01"
    document = wrapping.json(inner) if format_ is JSON else wrapping.msgpack(inner)
    projected = format_.project(document, Projection(include=((*wrapping.steps, "a"),)))
    assert projected == FIRST[format_].project(document, Projection(include=((*wrapping.steps, "a"),)))
    assert len(projected) > DECODED_LEVELS * 3
