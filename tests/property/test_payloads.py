"""Keys, projections, merges and differences equal naive ones, whatever the document; and nothing makes them fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine.formats.paths import Steps, path_tree
from sow_server.engine.formats.payloads import BadRecord, Projection
from sow_server.engine.formats.topic_formats import format_of, key_paths
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import MessageType, TopicSettings

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
        value = int(Decimal(repr(value)))  # its shortest digits
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


@pytest.mark.slow
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


# --- deltas ----------------------------------------------------------------------------------------------------------

ODD_NAMES = st.sampled_from(["a", "b", "c", "", "x/y", "[z", "]", "\\", "é"])
ODD_VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(ODD_NAMES, inner, max_size=4), max_leaves=8
)
ODD_DOCUMENTS = cast("st.SearchStrategy[dict[str, object]]", st.dictionaries(ODD_NAMES, ODD_VALUES, max_size=5))
ODD_STEPS = st.lists(ODD_NAMES, min_size=1, max_size=3).map(tuple)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, object], dict[str, object]]:
    """Two documents, often alike but for a field or two."""
    one: dict[str, object] = draw(ODD_DOCUMENTS)
    if draw(st.booleans()):
        another: dict[str, object] = draw(ODD_DOCUMENTS)
        return one, another
    other: dict[str, object] = json.loads(json.dumps(one))
    for _ in range(draw(st.integers(0, 2))):
        at = other
        deeper: bool = draw(st.booleans())
        for inner in [value for value in at.values() if isinstance(value, dict) and deeper]:
            at = inner
        removed: bool = draw(st.booleans())
        if at and removed:
            at.pop(draw(st.sampled_from(sorted(at))))
        else:
            at[draw(ODD_NAMES)] = draw(ODD_VALUES)
    return one, other


def naive_merge(base: object, delta: dict[str, object], *, null_means_null: bool) -> dict[str, object]:
    """Rule P2, once more and slowly; with `null_means_null` as a delta subscription has it (rule S3)."""
    result = dict(base) if isinstance(base, dict) else {}
    for name, value in delta.items():
        if isinstance(value, dict):
            result[name] = naive_merge(result.get(name), value, null_means_null=null_means_null)
        elif value is not None or null_means_null:
            result[name] = value
    return result


def naive_unset(document: dict[str, object], paths: Sequence[Steps]) -> dict[str, object]:
    """The document without the fields at `paths`."""
    result: dict[str, object] = json.loads(json.dumps(document))
    for path in paths:
        at: object = result
        for step in path[:-1]:
            at = at.get(step) if isinstance(at, dict) else None
        if isinstance(at, dict):
            at.pop(path[-1], None)
    return result


def content(document: object) -> str:
    """The content of a document: 1, 1.0 and true are three things, the order of fields is none."""
    return json.dumps(document, sort_keys=True)


MESSAGEPACK = format_of(TopicSettings(message_type=MessageType.MSGPACK))


@given(pairs(), st.lists(ODD_STEPS, max_size=3), st.sampled_from([None, 1]))
def test_a_merge_is_the_naive_one(
    documents: tuple[dict[str, object], dict[str, object]], paths: list[Steps], indent: int | None
) -> None:
    base, delta = documents
    expected = naive_merge(naive_unset(base, paths), delta, null_means_null=False)
    payload = json.dumps(base, indent=indent).encode()
    as_json = format_of(TopicSettings()).merge(payload, json.dumps(delta, indent=indent).encode(), path_tree(paths))
    assert isinstance(as_json, bytes)
    assert content(json.loads(as_json)) == content(expected)
    assert list(json.loads(as_json)) == list(expected), "the order of the fields is kept"
    if not paths and content(expected) == content(base):
        assert as_json == payload, "no change, the same bytes"
    packed = MESSAGEPACK.merge(msgspec.msgpack.encode(base), msgspec.msgpack.encode(delta), path_tree(paths))
    assert isinstance(packed, bytes)
    assert content(msgspec.msgpack.decode(packed)) == content(expected)


@given(pairs(), st.just([]) | PATHS)
def test_a_difference_leads_from_the_old_document_to_the_new_one(
    documents: tuple[dict[str, object], dict[str, object]], paths: list[str]
) -> None:
    """deltas [3], and no more than it needs: unchanged fields are not sent, except the key fields."""
    old, new = documents
    key = [parse_path(path) for path in paths]
    found = [
        (json.loads(as_json.payload), as_json)
        for as_json in [format_of(TopicSettings()).difference(json.dumps(old).encode(), json.dumps(new).encode(), key)]
    ] + [
        (msgspec.msgpack.decode(packed.payload), packed)
        for packed in [MESSAGEPACK.difference(msgspec.msgpack.encode(old), msgspec.msgpack.encode(new), key)]
    ]
    for payload, difference in found:
        gone = [parse_path(path) for path in difference.unset_paths]
        applied = naive_merge(naive_unset(old, gone), payload, null_means_null=True)
        assert content(applied) == content(new)
        assert difference.changed == (content(old) != content(new))
        for path in gone:
            assert value_at(old, path) is not MISSING, "a field that is gone was there"
            assert value_at(new, path) is MISSING
        for path in key:
            if not isinstance(value_at(new, path), dict):  # a key field never is
                assert content(value_at(payload, path, None)) == content(value_at(new, path, None))
        for path in leaves(payload):
            if not any(path[: len(top)] == top for top in key):
                assert content(value_at(old, path, "gone")) != content(value_at(new, path, "gone"))


MISSING = object()


def value_at(document: object, path: Steps, missing: object = MISSING) -> object:
    """The value at a path."""
    at = document
    for step in path:
        if not isinstance(at, dict) or step not in at:
            return missing
        at = at[step]
    return at


def leaves(document: dict[str, object], at: Steps = ()) -> list[Steps]:
    """The paths to all values that are not objects with something in them."""
    found: list[Steps] = []
    for name, value in document.items():
        if isinstance(value, dict) and value:
            found += leaves(value, (*at, name))
        else:
            found.append((*at, name))
    return found


FIX_FIELDS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["", "x", "y", "=z"])), min_size=1, max_size=6)


@given(FIX_FIELDS, FIX_FIELDS, st.sets(st.integers(1, 4)), st.booleans(), st.booleans())
def test_a_merge_and_a_difference_of_fix_are_the_naive_ones(
    base: list[tuple[int, str]], delta: list[tuple[int, str]], unset: set[int], ended: bool, doubled: bool
) -> None:
    fix = format_of(TopicSettings(message_type=MessageType.FIX, separator=b"|"))

    def payload(fields: list[tuple[int, str]]) -> bytes:
        return ("||" if doubled else "|").join([f"{tag}={value}" for tag, value in fields]).encode() + b"|" * ended

    paths = [(str(tag),) for tag in unset]
    merged = fix.merge(payload(base), payload(delta), path_tree(paths))
    assert isinstance(merged, bytes)
    kept = {name: value for name, value in fix.decode(payload(base)).items() if int(name) not in unset}
    assert fix.decode(merged) == {**kept, **fix.decode(payload(delta))}
    assert fix.check(merged) is None
    if not (doubled and unset):
        assert merged.endswith(b"|") == ended
    difference = fix.difference(payload(base), merged, [("1",)])
    gone = {parse_path(path)[0] for path in difference.unset_paths}
    before = {name: value for name, value in fix.decode(payload(base)).items() if name not in gone}
    assert {**before, **fix.decode(difference.payload)} == fix.decode(merged)
    assert difference.changed == (fix.decode(payload(base)) != fix.decode(merged))
