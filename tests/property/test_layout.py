"""Values of every layout of `engine/stored` and `engine/disk/layout` are read back as they were written."""

from __future__ import annotations

import json
from array import array

from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.layout import settings_from_json, settings_to_json
from sow_server.engine.journal.builder import ChunkBuilder
from sow_server.engine.stored import (
    EXPIRE,
    HEADER_BYTES,
    HEADER_FAST,
    PUT,
    ChangeRow,
    Changes,
    Column,
    Commit,
    PublisherNote,
    Run,
    StoredStatistics,
    changes_head,
    decode_changes,
    decode_commit,
    decode_statistics,
    encode_changes,
    encode_commit,
    encode_statistics,
    header,
    header_columns,
    header_start,
    i64,
    payload_bytes_each,
    read_header,
    record,
    sequences,
    u32,
    unpack_i64,
)
from sow_server.engine.values.model import Expiration, MessageType, TopicSettings

I64 = st.integers(-(2**63), 2**63 - 1)
WORD = st.integers(0, 2**63 - 1)
U32 = st.integers(0, 2**32 - 1)
U16 = st.integers(0, 2**16 - 1)
ADDED = ("version", "publish_time", "expire_time", "origin", "previous", "removed_version", "removed_origin")
"""The columns of `ChunkBuilder.add`, in the order of `Changes`."""


@given(U16, WORD, WORD, WORD, WORD, st.binary(max_size=50), st.binary(max_size=20))
def test_a_record_is_read_back(
    origin: int, version: int, publish_time: int, expire_time: int, sequence: int, payload: bytes, key: bytes
) -> None:
    head = header(
        origin=origin,
        payload_bytes=len(payload),
        version=version,
        publish_time=publish_time,
        expire_time=expire_time,
        sequence=sequence,
    )
    times = i64(publish_time) + i64(expire_time)
    assert HEADER_FAST.pack(header_start(origin), len(payload), version, times, sequence) == head
    assert read_header(head + payload) == (origin, len(payload), version, publish_time, expire_time, sequence)
    assert record(key, head + payload) == (key, payload, version, publish_time, expire_time, origin, sequence)


@st.composite
def stored_values(draw: st.DrawFn) -> bytes:
    payload = draw(st.binary(max_size=60))
    return (
        header(
            origin=draw(U16),
            payload_bytes=len(payload),
            version=draw(WORD),
            publish_time=draw(WORD),
            expire_time=draw(WORD),
            sequence=draw(WORD),
        )
        + payload
    )


@given(st.lists(stored_values(), max_size=8))
def test_header_columns_equal_the_headers_of_the_records(values: list[bytes]) -> None:
    columns = header_columns(values)
    rows = zip(
        columns.version,
        columns.publish_time,
        columns.expire_time,
        columns.origin,
        columns.sequence,
        strict=True,
    )
    assert list(rows) == [record(b"", value)[2:] for value in values]
    heads = [value[:HEADER_BYTES] for value in values]
    assert list(sequences([*heads, None])) == [*columns.sequence, 0]
    assert sum(payload_bytes_each(heads)) == sum(len(value) - HEADER_BYTES for value in values)


def columns(count: int) -> st.SearchStrategy[list[int]]:
    """Columns of all three forms, and such as are nearly one of them."""
    free = st.lists(I64, min_size=count, max_size=count)
    small = st.lists(st.integers(0, 2), min_size=count, max_size=count)
    constant = I64.map(lambda first: [first] * count)
    counting = st.integers(-(2**62), 2**62).map(lambda first: [*range(first, first + count)])
    return free | small | constant | counting


@st.composite
def changes(draw: st.DrawFn) -> Changes:
    count = draw(st.integers(1, 6))
    version, publish_time, expire_time, origin, previous, removed_version, removed_origin = (
        Column(draw(columns(count))) for _ in range(7)
    )
    return Changes(
        draw(WORD),
        draw(I64),
        bytes(draw(st.lists(st.integers(PUT, EXPIRE), min_size=count, max_size=count))),
        version,
        publish_time,
        expire_time,
        origin,
        previous,
        removed_version,
        removed_origin,
        draw(st.lists(st.binary(max_size=8), min_size=count, max_size=count)),
        draw(st.lists(st.binary(max_size=20), min_size=count, max_size=count)),
    )


Piece = tuple[str, int, int] | tuple[str, list[int]]
FEW = st.integers(0, 3)
PIECES: st.SearchStrategy[Piece] = (
    st.tuples(st.just("append"), FEW, st.just(1))
    | st.tuples(st.just("constant"), FEW, st.integers(1, 3))
    | st.tuples(st.just("counting"), FEW, st.integers(1, 3))
    | st.tuples(st.just("numbers"), st.lists(FEW, min_size=1, max_size=3))
)


@given(st.lists(PIECES, max_size=6))
def test_a_column_is_the_sum_of_its_pieces(pieces: list[Piece]) -> None:
    """Small numbers, so that pieces often go on where the one before ended, in the same form or another."""
    column, expected = Column(), list[int]()
    for piece in pieces:
        match piece:
            case ("append", int(first), _):
                column.append(first)
                expected.append(first)
            case ("constant", int(first), int(count)):
                column.constant(first, count)
                expected += [first] * count
            case ("counting", int(first), int(count)):
                column.counting(first, count)
                expected += range(first, first + count)
            case ("numbers", [*numbers]):
                column.numbers(array("q", numbers))
                expected += numbers
        assert column.tolist() == expected
        assert len(column) == len(expected)
    if expected:
        packed = column.encode()
        assert Column.decode(packed, 0, len(expected)) == (column, len(packed))


@given(changes())
def test_a_journal_value_is_read_back(given_changes: Changes) -> None:
    value = encode_changes(given_changes)
    assert decode_changes(given_changes.first_sequence, value) == given_changes
    given_head = given_changes.commit_time_micros, given_changes.entries_before, given_changes.bytes_before
    assert changes_head(value) == (len(given_changes.keys), *given_head)


NEAR = st.integers(0, 2)
ROWS = st.lists(st.builds(ChangeRow, st.integers(PUT, EXPIRE), *[I64 | NEAR] * 7), min_size=1, max_size=3)
TOPIC = Topic(7, "t", TopicSettings(), create_time_micros=0, statistics=StoredStatistics())


@given(st.lists(st.tuples(ROWS, st.booleans()), min_size=1, max_size=4), st.booleans(), U16, st.data())
def test_a_chunk_has_the_same_bytes_however_its_changes_were_added(
    groups: list[tuple[list[ChangeRow], bool]], atomic: bool, source: int, data: st.DataObject
) -> None:
    """One by one, of which a chunk of one change is packed at once, or in columns: as columns that grow number by
    number."""
    chunk = ChunkBuilder(TOPIC, 5, atomic=atomic, source=source)
    kinds, numbers = bytearray(), [Column() for _ in range(7)]
    for rows, together in groups:
        keys = [data.draw(st.binary(max_size=4)) for _ in rows]
        if together:
            arrays = [array("q", column) for column in list(zip(*rows, strict=True))[1:]]
            version, publish_time, expire_time, origin, previous, removed_version, removed_origin = arrays
            chunk.add_columns(
                rows[0].change,
                keys,
                keys,
                version=version,
                publish_time=publish_time,
                expire_time=expire_time,
                origin=origin,
                previous=previous,
                removed_version=removed_version,
                removed_origin=removed_origin,
            )
            kinds += bytes([rows[0].change]) * len(rows)
            for column, added in zip(numbers, arrays, strict=True):
                column.add(added, len(rows))
        else:
            for key, (kind, *row) in zip(keys, rows, strict=True):
                chunk.add(kind, key, key, **dict(zip(ADDED, row, strict=True)))
                kinds.append(kind)
                for column, number in zip(numbers, row, strict=True):
                    column.append(number)
    fields = (5, 9, bytes(kinds), *numbers, chunk.keys, chunk.payloads, atomic, 3, 4, source)
    expected = Changes._make(fields)
    assert chunk.encode(9, 3, 4) == encode_changes(expected)
    assert chunk.finish(9, 3, 4) == expected
    assert chunk.encode(9, 3, 4) == encode_changes(expected), "also once followers have had it"


@given(st.integers(1, 6).flatmap(columns))
def test_a_column_of_many_numbers_is_that_of_one_after_the_other(numbers: list[int]) -> None:
    assert Column.of(numbers).encode() == Column(numbers).encode()


NOTES = st.builds(
    PublisherNote,
    st.text(min_size=1, max_size=5),
    WORD,
    WORD,
    WORD,
    WORD,
    st.lists(U32, max_size=3).map(tuple),
    st.lists(WORD, max_size=3).map(tuple),
    st.integers(0, 3),
    WORD,
)


@given(
    WORD,
    WORD,
    WORD,
    st.lists(st.builds(Run, U32, WORD, U32), max_size=5).map(tuple),
    st.lists(NOTES, max_size=3).map(tuple),
)
def test_a_commit_is_read_back(
    first: int, last: int, commit_time: int, runs: tuple[Run, ...], notes: tuple[PublisherNote, ...]
) -> None:
    commit = Commit(first, last, commit_time, runs, notes)
    assert decode_commit(*encode_commit(commit)) == commit


@given(st.builds(StoredStatistics, *[I64] * 12))
def test_figures_are_read_back(figures: StoredStatistics) -> None:
    assert decode_statistics(encode_statistics(figures)) == figures


@given(WORD, WORD)
def test_words_order_as_their_numbers(one: int, other: int) -> None:
    assert (i64(one) < i64(other)) == (one < other)
    assert unpack_i64(i64(one)) == one


@given(U32, U32)
def test_topic_prefixes_order_as_their_numbers(one: int, other: int) -> None:
    assert (u32(one) < u32(other)) == (one < other)


OPTIONAL = st.none() | WORD


@given(
    st.builds(
        TopicSettings,
        key=st.lists(st.text(max_size=5), max_size=3).map(tuple),
        message_type=st.sampled_from(MessageType),
        expiration=st.sampled_from(Expiration),
        default_ttl_micros=OPTIONAL,
        min_ttl_micros=OPTIONAL,
        max_ttl_micros=OPTIONAL,
        journal=st.booleans(),
        separator=st.binary(min_size=1, max_size=1),
        retain_time_micros=OPTIONAL,
        retain_bytes=OPTIONAL,
    )
)
def test_settings_are_read_back(settings: TopicSettings) -> None:
    assert settings_from_json(json.loads(json.dumps(settings_to_json(settings)))) == settings
