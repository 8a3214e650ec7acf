"""Deriving keys fast equals deriving them naively, whatever the document; and nothing makes it fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine.errors import Reason
from sow_server.engine.model import MessageType, TopicSettings
from sow_server.engine.payloads import BadRecord, Projection, Steps, format_of, key_paths

NAMES = st.sampled_from(["a", "b", "c", "é", "f0"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.text(alphabet="|\\a", max_size=3)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=5)
PATHS = st.sampled_from(
    [
        ["/a"],
        ["/a", "/b"],
        ["/c", "/a", "/b"],
        ["/a/b"],
        ["/a/b", "/a/c"],
        ["/b", "/a/b", "/a/c/a"],
        ["/é"],
        ["/f0", "/a"],
        ["/a/a/a"],
    ]
)


def naive_text(value: object) -> str | Reason:
    """Rule K4, once more and slowly."""
    if value is None:
        return Reason.KEY_FIELD_MISSING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return "".join("\\" + character if character in "|\\" else character for character in value)
    return Reason.KEY_FIELD_NOT_SCALAR


def naive_key(document: object, paths: Sequence[str]) -> bytes | Reason:
    """Rules K4 and K5, once more and slowly: the first field at fault decides."""
    texts: list[str] = []
    for path in paths:
        value = document
        for step in path.strip("/").split("/"):
            value = value.get(step) if isinstance(value, dict) else None
        text = naive_text(value)
        if isinstance(text, Reason):
            return text
        texts.append(text)
    return "|".join(texts).encode() or Reason.KEY_REQUIRED


def derived(message_type: MessageType, paths: Sequence[str], payload: bytes) -> bytes | Reason:
    settings = TopicSettings(key=tuple(paths), message_type=message_type)
    (key,) = format_of(settings).derive_keys(key_paths(settings))([payload])
    return key.reason if isinstance(key, BadRecord) else key


@given(DOCUMENTS, PATHS, st.booleans(), st.sampled_from([None, 1]))
def test_a_json_key_is_the_naive_one(
    document: dict[str, object], paths: list[str], ascii_only: bool, indent: int | None
) -> None:
    payload = json.dumps(document, ensure_ascii=ascii_only, indent=indent, allow_nan=False).encode()
    assert derived(MessageType.JSON, paths, payload) == naive_key(document, paths)
    assert format_of(TopicSettings()).check(payload) is None


@given(DOCUMENTS, PATHS)
def test_a_messagepack_key_is_the_naive_one(document: dict[str, object], paths: list[str]) -> None:
    payload = msgspec.msgpack.encode(document)
    assert derived(MessageType.MSGPACK, paths, payload) == naive_key(document, paths)
    assert format_of(TopicSettings(message_type=MessageType.MSGPACK)).check(payload) is None


@st.composite
def broken(draw: st.DrawFn, payloads: st.SearchStrategy[bytes]) -> bytes:
    """A payload with some bytes changed, taken out or put in."""
    payload = bytearray(draw(payloads))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(payload)))
        payload[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(payload)


def strict_json(payload: bytes) -> object:
    """The document of a payload by the standard library; raises for what RFC 8259 does not allow."""

    def refuse(constant: str) -> object:
        raise ValueError(constant)

    text = payload.decode()
    document: object = json.loads(text, parse_constant=refuse)
    json.dumps(document, ensure_ascii=False).encode()  # lone surrogates
    return document


@given(broken(DOCUMENTS.map(lambda document: json.dumps(document, ensure_ascii=False).encode())), PATHS)
def test_broken_json_is_refused_exactly_when_it_is_malformed(payload: bytes, paths: list[str]) -> None:
    try:
        document = strict_json(payload)
        well_formed = isinstance(document, dict)
    except ValueError:
        document, well_formed = None, False
    refused = format_of(TopicSettings()).check(payload)
    assert (refused is None) == well_formed
    assert refused is None or refused.reason is Reason.PAYLOAD_MALFORMED
    key = derived(MessageType.JSON, paths, payload)
    if not well_formed:
        assert key is Reason.PAYLOAD_MALFORMED
    elif "Infinity" not in json.dumps(document):  # 1e999 is well-formed, but no number
        assert key == naive_key(document, paths)


@given(broken(DOCUMENTS.map(msgspec.msgpack.encode)) | st.binary(max_size=40), PATHS)
def test_broken_messagepack_is_a_document_or_malformed(payload: bytes, paths: list[str]) -> None:
    refused = format_of(TopicSettings(message_type=MessageType.MSGPACK)).check(payload)
    key = derived(MessageType.MSGPACK, paths, payload)
    assert (refused is not None) == (key is Reason.PAYLOAD_MALFORMED)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.binary(max_size=4)), min_size=1, max_size=6), st.sampled_from([1, 59, 124])
)
def test_a_fix_key_is_the_first_value_of_its_tag(fields: list[tuple[int, bytes]], separator: int) -> None:
    byte = bytes([separator])
    clean = [(tag, value.replace(byte, b"")) for tag, value in fields]
    payload = byte.join([b"%d=%b" % field for field in clean])
    settings = TopicSettings(key=("/5",), message_type=MessageType.FIX, separator=byte)
    (key,) = format_of(settings).derive_keys(key_paths(settings))([payload])
    values = [value for tag, value in clean if tag == 5]
    expected: bytes | Reason
    if not values:
        expected = Reason.KEY_FIELD_MISSING
    else:
        try:
            expected = cast(str, naive_text(values[0].decode())).encode() or Reason.KEY_REQUIRED
        except UnicodeDecodeError:
            expected = Reason.KEY_NOT_UTF8
    assert (key.reason if isinstance(key, BadRecord) else key) == expected


def naive_projection(document: dict[str, object], projection: Projection) -> object:
    """Rule Q2, once more and slowly, on the decoded document."""

    def under(path: Steps, tops: tuple[Steps, ...]) -> bool:
        return any(path[: len(top)] == top for top in tops)

    def cut(value: dict[str, object], at: Steps) -> dict[str, object]:
        kept: dict[str, object] = {}
        for name, inner in value.items():
            here = (*at, name)
            if projection.include:
                if under(here, projection.include):
                    kept[name] = inner
                elif isinstance(inner, dict) and (below := cut(inner, here)):
                    kept[name] = below
            elif not under(here, projection.exclude):
                kept[name] = cut(inner, here) if isinstance(inner, dict) else inner
        return kept

    return cut(document, ())


STEPS = st.lists(NAMES, min_size=1, max_size=3).map(tuple)


@given(DOCUMENTS, st.lists(STEPS, min_size=1, max_size=3).map(tuple), st.booleans())
def test_a_projection_is_the_naive_one(document: dict[str, object], paths: tuple[Steps, ...], include: bool) -> None:
    projection = Projection(include=paths) if include else Projection(exclude=paths)
    expected = naive_projection(document, projection)
    as_json = format_of(TopicSettings()).project(json.dumps(document).encode(), projection)
    assert json.loads(as_json) == expected
    assert list(json.loads(as_json)) == [name for name in document if name in json.loads(as_json)]
    packed = format_of(TopicSettings(message_type=MessageType.MSGPACK)).project(
        msgspec.msgpack.encode(document), projection
    )
    assert msgspec.msgpack.decode(packed) == expected
