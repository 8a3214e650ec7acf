"""The work on payloads is linear: in the bytes of a document, however deep it is, and in its names, however many paths.

Work is counted, in bytes that decoders read and in names that are looked up; no test measures time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from sow_server.engine.formats import json_format, msgpack_format, nested, payloads
from sow_server.engine.formats.deltas import LEVELS_MAX, Documents
from sow_server.engine.formats.field_format import FieldFormat
from sow_server.engine.formats.json_format import JsonFormat
from sow_server.engine.formats.levels import DECODED_LEVELS, FEW_NAMES, PIECE_BYTES, Encoding, Levels
from sow_server.engine.formats.msgpack_format import MsgpackFormat
from sow_server.engine.formats.nested import DECODED_NAMES_MAX
from sow_server.engine.formats.paths import PathTree, Steps, path_tree
from sow_server.engine.formats.payloads import HIDING, SELECTING, SELECTING_DEEP, Projection
from tests.support.stores.first_levels import FirstLevels

KINDS = [json_format.ENCODING, msgpack_format.ENCODING]
READS_MAX = 14
"""How often a byte of a document is read by a decoder, an index or an encoder, at most."""


class CountingLevels(Levels):
    """Counts the bytes that are given to decoders and indexes."""

    def __init__(self, encoding: Encoding) -> None:
        self.read = 0

        def counting(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def counted(value: Any) -> Any:
                self.read += len(bytes(value))
                return work(value)

            return counted

        super().__init__(
            replace(
                encoding,
                decoder=lambda kind: counting(encoding.decoder(kind)),
                index=counting(encoding.index),
            )
        )


def nested_document(encoding: Encoding, depth: int, size: int, *, arrays: bool = False) -> bytes:
    """A document of about `size` bytes, most of them in its innermost level."""
    leaf: object = {"s": 1, "t": [{"i": number} for number in range(size // 16)], "x": "y" * (size // 2)}
    for level in range(depth):
        leaf = [leaf] if arrays and level < depth - 1 else {"a": leaf}
    return encoding.encode(leaf)


def steps_to(depth: int, *, arrays: bool = False) -> Steps:
    return ("a", "s") if arrays else ("a",) * depth + ("s",)


@pytest.mark.parametrize("encoding", KINDS)
@pytest.mark.parametrize("kind", ["include", "exclude", "hidden"])
@pytest.mark.parametrize("depth", [4, 30, 120, 250])
def test_a_projection_reads_each_byte_a_few_times_at_any_depth(encoding: Encoding, kind: str, depth: int) -> None:
    """Story: a record of 1 MB, nested 250 deep, with a hidden field stopped the server for 3.7 s: each level was
    decoded, and encoded again."""
    levels, document = CountingLevels(encoding), nested_document(encoding, depth, 20_000)
    projection = Projection(**{kind: (steps_to(depth),)})
    projected = nested.project(levels, document, projection)
    assert levels.read <= READS_MAX * len(document)
    inner: Any = msgspec.json.decode(projected) if encoding is KINDS[0] else msgspec.msgpack.decode(projected)
    for _ in range(depth):
        inner = inner["a"]
    assert set(inner) == ({"s"} if kind == "include" else {"t", "x"})


@pytest.mark.parametrize("encoding", KINDS)
def test_fields_are_hidden_through_arrays_at_any_depth_in_linear_time(encoding: Encoding) -> None:
    levels, document = CountingLevels(encoding), nested_document(encoding, 250, 20_000, arrays=True)
    nested.project(levels, document, Projection(hidden=(steps_to(250, arrays=True),)))
    assert levels.read <= READS_MAX * len(document)


@pytest.mark.parametrize("encoding", KINDS)
def test_a_merge_reads_each_byte_a_few_times_at_any_depth(encoding: Encoding) -> None:
    depth = LEVELS_MAX - 1
    levels, base = CountingLevels(encoding), nested_document(encoding, depth, 20_000)
    documents = Documents(levels, lambda value: value, encoding.encode, null=encoding.encode(None))
    delta: object = {"s": 2}
    for _ in range(depth):
        delta = {"a": delta}
    unset = path_tree([("a",) * depth + ("x",)])
    merged = documents.merge(base, encoding.encode(delta), unset)
    assert levels.read <= 2 * READS_MAX * len(base)  # once to unset, once to merge
    assert len(merged) < len(base) * 3 // 4, "x was unset"


@pytest.mark.parametrize("encoding", KINDS)
def test_a_difference_reads_each_byte_a_few_times_at_any_depth(encoding: Encoding) -> None:
    depth = LEVELS_MAX - 1
    levels, old = CountingLevels(encoding), nested_document(encoding, depth, 20_000)
    new = nested_document(encoding, depth, 20_016)
    documents = Documents(levels, lambda value: value, encoding.encode, null=encoding.encode(None))
    documents.difference(old, new, [("a",) * depth + ("s",)])
    assert levels.read <= 3 * READS_MAX * len(new)  # each document, and the new one for its key


@pytest.mark.parametrize("format_", [JsonFormat(), MsgpackFormat()])
def test_arrays_of_numbers_are_not_taken_for_place_holders(format_: JsonFormat | MsgpackFormat) -> None:
    """Below the levels that are read as they are, arrays of arrays stand for the parts of a level."""
    encode = msgspec.json.encode if isinstance(format_, JsonFormat) else msgspec.msgpack.encode
    inner: dict[str, object] = {"one": [1], "two": [[2]], "three": {"x": [[[3]]], "y": [1]}, "four": [], "five": {}}
    document: object = inner
    for _ in range(DECODED_LEVELS + 2):
        document = {"a": document}
    payload, steps = encode(document), ("a",) * (DECODED_LEVELS + 2)
    for name, value in inner.items():
        expected: object = {name: value}
        for _ in steps:
            expected = {"a": expected}
        assert format_.project(payload, Projection(include=((*steps, name),))) == encode(expected)
    assert format_.project(payload, Projection(hidden=((*steps, "zz"),))) == payload
    assert format_.project(payload, Projection(exclude=((*steps, "three", "zz"),))) == payload


class CountingTree(PathTree):
    """Counts the names that are looked up."""

    looked_up = 0

    def __contains__(self, name: object) -> bool:
        self.looked_up += 1
        return super().__contains__(name)


def test_names_are_looked_up_once_however_many_paths_there_are() -> None:
    """Story: a record of 100,000 names and a select of 1,000 paths took 4.6 s, as each name was compared with each
    path."""
    levels = Levels(json_format.ENCODING)
    document = msgspec.json.encode({f"n{number}": number for number in range(5000)})
    projection = Projection(include=tuple([(f"n{number * 3}",) for number in range(1000)]))
    tree = CountingTree(projection.include_tree)
    projection.__dict__["include_tree"] = tree
    projected = nested.project(levels, document, projection)
    assert msgspec.json.decode(projected) == {f"n{number * 3}": number * 3 for number in range(1000)}
    assert tree.looked_up <= 5000 + 1000, "those that are found once more, of a large document"


WIDE = b",".join([b'"n%d": %d' % (number, number % 7) for number in range(4000)])
"""Members of an object of many names."""


@pytest.mark.parametrize("front", [b"", b'"v":' + b"[" * 100 + b'"%b"' % (b"x" * 100_000) + b"]" * 100 + b","])
@pytest.mark.parametrize("count", [1, FEW_NAMES + 1, 1000])
@pytest.mark.parametrize("kind", ["include", "exclude", "hidden"])
@pytest.mark.parametrize("depth", [0, DECODED_LEVELS + 2])
def test_no_call_makes_all_names_of_a_large_object(front: bytes, count: int, kind: str, depth: int) -> None:
    """Story: to decode a record of 100,000 names was one call that kept all other threads waiting for 40 ms."""
    most = 0

    def counting(decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(value: Any) -> Any:
            nonlocal most
            decoded = decode(value)
            most = max(most, len(decoded)) if isinstance(decoded, dict) else most
            return decoded

        return counted

    encoding = json_format.ENCODING
    levels = Levels(replace(encoding, decoder=lambda kind: counting(encoding.decoder(kind))))
    repeated = b',"n3":"last", "n3500" : [ ]'
    document = b"{" + front + WIDE + repeated + b"}"
    for _ in range(depth):
        document = b'{"z": [[2]], "a": ' + document + b"}"
    projection = Projection(**{kind: tuple([(("a",) * depth + (f"n{number * 3}",)) for number in range(count)])})
    assert nested.project(levels, document, projection) == FirstLevels(json=True).project(document, projection)
    assert 0 < most <= PIECE_BYTES // 8


def test_paths_are_compiled_once_for_all_records(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[Steps, ...]] = []

    def counting(paths: tuple[Steps, ...]) -> PathTree:
        compiled.append(paths)
        return path_tree(paths)

    monkeypatch.setattr(payloads, "path_tree", counting)
    projection = Projection(include=(("a",), ("b", "c")), hidden=(("b", "d"),))
    flat = FieldFormat(b"|", tags=False)
    for _ in range(10):
        assert JsonFormat().project(b'{"a":1,"b":{"c":2,"d":3},"e":4}', projection) == b'{"a":1,"b":{"c":2}}'
        assert flat.project(b"a=1|b=2|e=4|", projection) == b"a=1|b=2|"
    assert sorted(map(len, compiled)) == [0, 1, 2], "excluded, hidden, included"
    names = projection.include_tree.names
    assert flat.project(b"e=4|a=1", projection) == b"a=1|"
    assert projection.include_tree.names is names


@pytest.mark.slow
def test_a_tree_of_paths() -> None:
    """A path below another one adds nothing, whichever comes first."""
    assert path_tree([("a", "b"), ("a", "c", "d"), ("e",)]) == {"a": {"b": None, "c": {"d": None}}, "e": None}
    assert path_tree([("a", "b"), ("a",)]) == path_tree([("a",), ("a", "b", "c")]) == {"a": None}
    assert path_tree([]) == {}
    assert path_tree([("a", "b", "c"), ("d",)]).height == 3
    assert path_tree([("x",) * 100_000]).height == 100_000, "without recursion"


def test_the_cost_of_a_projection_grows_with_bytes_and_not_with_paths() -> None:
    one, many = Projection(include=(("a",),)), Projection(include=tuple([(f"n{number}",) for number in range(1000)]))
    assert one.cost(1000) == many.cost(1000) == 1000 * SELECTING
    assert one.cost(2000) == 2 * one.cost(1000)
    assert Projection(exclude=(("a",) * (DECODED_LEVELS + 1),)).cost(1000) == 1000 * SELECTING_DEEP
    assert Projection(hidden=(("a",),)).cost(1000) == 1000 * SELECTING + 250 * HIDING
    assert Projection(hidden=(("a",),)).cost(1000, elements=1) == 1000 * SELECTING + HIDING


@pytest.mark.parametrize("format_", [JsonFormat(), MsgpackFormat()])
def test_a_filter_of_many_fields_decodes_documents_whole(format_: JsonFormat | MsgpackFormat) -> None:
    """Story: a filter of 6,000 fields took a second for one record of 1 MB, as msgspec compared each name of the record
    with each field of the filter."""
    few, many = [[f"n{number}" for number in range(count)] for count in (DECODED_NAMES_MAX, DECODED_NAMES_MAX + 1)]
    document = (msgspec.json if isinstance(format_, JsonFormat) else msgspec.msgpack).encode({"n1": 1, "other": 2})
    assert format_.decoder(few)(document) == {"n1": 1}
    assert format_.decoder(many)(document) == {"n1": 1, "other": 2}
    assert format_.decoder(many) == format_.decode
