"""The byte layouts on disk, pinned: whoever changes one meets these bytes and must raise `DATA_FORMAT`,
and for records and chunks also `FORMAT`.

The golden bytes below belong to format 6. When a layout changes: raise the number, say in the CHANGELOG how old
data gets there, and only then write the new bytes here.
"""

from __future__ import annotations

import ast
import json
from array import array
from pathlib import Path

import pytest

import sow_server.engine
from sow_server.engine.disk.layout import (
    AttemptCounts,
    attempt_key,
    attempts_range,
    decode_attempt,
    decode_named,
    encode_attempt,
    encode_named,
    mark_key,
    marks_range,
    named_key,
    read_attempt_key,
    read_staged,
    read_staged_key,
    settings_from_json,
    settings_to_json,
    staged_keys,
    staged_range,
    staged_value,
)
from sow_server.engine.stored import (
    DELETE,
    EXPIRE,
    FORMAT,
    HEADER_BYTES,
    HEADER_FAST,
    PUT,
    TOUCH,
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
    journal_key,
    payload_bytes_each,
    read_header,
    record,
    sequences,
    u32,
    unpack_i64,
)
from sow_server.engine.values.model import NEVER, BacklogAction, Expiration, MessageType, OnMissing, TopicSettings


def test_these_golden_bytes_belong_to_format_3() -> None:
    assert FORMAT == 3


HEADER = (
    "03" "00" "0203" "00000005"  # format, flags, origin, payload length
    "0000000000000a0b"  # version
    "0000000000000c0d"  # publish time
    "0000000000000e0f"  # expire time
    "0000000000001011"  # sequence
)  # fmt: skip


def test_the_header_of_a_record() -> None:
    packed = header(
        origin=0x0203, payload_bytes=5, version=0x0A0B, publish_time=0x0C0D, expire_time=0x0E0F, sequence=0x1011
    )
    assert packed.hex() == HEADER
    assert len(packed) == HEADER_BYTES == 40
    assert read_header(packed) == (0x0203, 5, 0x0A0B, 0x0C0D, 0x0E0F, 0x1011)


def test_the_header_in_five_pieces_is_the_same_header() -> None:
    times = i64(0x0C0D) + i64(0x0E0F)
    assert HEADER_FAST.pack(header_start(0x0203), 5, 0x0A0B, times, 0x1011).hex() == HEADER


def test_the_offsets_that_other_modules_slice_at() -> None:
    """`[4:8]` payload length, `[24:32]` expire time, `[32:40]` sequence."""
    packed = bytes.fromhex(HEADER)
    assert packed[4:8] == u32(5)
    assert packed[24:32] == i64(0x0E0F)
    assert packed[32:40] == i64(0x1011)


def test_a_record_is_its_header_and_its_payload() -> None:
    found = record(b"key", bytes.fromhex(HEADER) + b"hello")
    assert found == (b"key", b"hello", 0x0A0B, 0x0C0D, 0x0E0F, 0x0203, 0x1011)


def test_stamps_order_as_their_bytes() -> None:
    stamps = [0, 1, 255, 256, 2**32, 2**40 + 1, NEVER - 1, NEVER]
    assert sorted(map(i64, stamps)) == list(map(i64, stamps))
    assert [unpack_i64(i64(stamp)) for stamp in stamps] == stamps


CHANGES = Changes(
    first_sequence=100,
    commit_time_micros=0x55,
    change=bytes([PUT, TOUCH, DELETE, EXPIRE]),
    version=Column([7, 8, 9, 10]),  # counts up
    publish_time_micros=Column([0x21, 0x21, 0x21, 0x21]),  # constant
    expire_time_micros=Column([NEVER, 1, NEVER, 1]),  # as it is
    origin=Column([2, 2, 2, 2]),
    previous=Column([0, 96, 97, 98]),
    removed_version=Column([0, 0, 5, 10]),
    removed_origin=Column([0, 0, 0, 0]),
    keys=[b"a", b"", b"ccc", b"a"],
    payloads=[b"", b"xy", b"z", b""],
    entries_before=0x66,
    bytes_before=0x77,
    source=0x44,
)
JOURNAL_VALUE = (
    "03" "00" "0044" "00000004" "0000000000000055"  # format, flags, source, count, commit time
    "0000000000000066" "0000000000000077"  # entries and bytes before
    "01020304"  # changes
    "01" "0000000000000007"  # version: counting up from 7
    "00" "0000000000000021"  # publish time: constant
    "02" "7fffffffffffffff" "0000000000000001" "7fffffffffffffff" "0000000000000001"  # expire time: as it is
    "00" "0000000000000002"  # origin
    "02" "0000000000000000" "0000000000000060" "0000000000000061" "0000000000000062"  # previous
    "02" "0000000000000000" "0000000000000000" "0000000000000005" "000000000000000a"  # removed version
    "00" "0000000000000000"  # removed origin
    "0001" "0000" "0003" "0001"  # key lengths
    "00000000" "00000002" "00000001" "00000000"  # payload lengths
    "61" "636363" "61"  # keys
    "7879" "7a"  # payloads
)  # fmt: skip


def test_a_journal_value() -> None:
    assert encode_changes(CHANGES).hex() == JOURNAL_VALUE
    assert changes_head(bytes.fromhex(JOURNAL_VALUE)) == (4, 0x55, 0x66, 0x77)


def test_a_journal_value_is_read_back() -> None:
    assert decode_changes(100, bytes.fromhex(JOURNAL_VALUE)) == CHANGES


def test_an_atomic_request_is_marked_in_its_journal_value() -> None:
    atomic = CHANGES._replace(atomic=True)
    assert encode_changes(atomic).hex() == "0301" + JOURNAL_VALUE[4:]
    assert decode_changes(100, encode_changes(atomic)) == atomic


@pytest.mark.parametrize(
    ("numbers", "kind", "size"),
    [
        ([5], 0, 9),
        ([5, 5, 5], 0, 9),
        ([5, 6, 7], 1, 9),
        ([-1, 0, 1], 1, 9),
        ([5, 6, 5], 2, 25),
        ([5, 9, 7], 2, 25),
        ([7, 6, 5], 2, 25),
        ([5, 5, 6], 2, 25),
        ([5, 6, 6], 2, 25),
        ([0, 2**63 - 1, -(2**63)], 2, 25),
    ],
)
def test_a_column_takes_the_smallest_of_its_three_forms(numbers: list[int], kind: int, size: int) -> None:
    column = Column(numbers)
    packed = column.encode()
    assert (packed[0], len(packed)) == (kind, size)
    found, at = Column.decode(b"#" + packed + b"#", 1, len(numbers))
    assert (found.tolist(), at) == (numbers, 1 + size)
    assert (found, len(found), list(found), found[-1]) == (column, len(numbers), numbers, numbers[-1])


def test_a_column_stays_two_numbers_while_its_pieces_go_on_alike() -> None:
    """The writer adds a piece per request; a commit of many requests must not cost eight bytes a record and column."""
    constant = Column()
    constant.constant(5, 2)
    constant.append(5)
    constant.constant(5, 1)
    assert constant.encode() == b"\0" + i64(5)
    counting = Column()
    counting.counting(7, 1)
    counting.counting(8, 2)
    counting.append(10)
    counting.counting(11, 1)
    assert counting.encode() == b"\1" + i64(7)
    zeros = Column()
    zeros.numbers(array("q", [0, 0]))
    zeros.append(0)
    assert zeros.encode() == b"\0" + i64(0)
    origins = Column()
    origins.numbers(array("H", [0, 2]))  # as they stand in headers
    assert origins.tolist() == [0, 2]


def test_keys_of_the_journal_and_of_commits() -> None:
    assert journal_key(0x01020304, 0x05).hex() == "010203040000000000000005"
    commit = Commit(3, 9, 0x55, (Run(1, 3, 4), Run(2, 7, 3)))
    key, value = encode_commit(commit)
    assert key.hex() == "0000000000000003"
    assert value.hex() == (
        "0000000000000009" "0000000000000055"
        "00000001" "0000000000000003" "00000004"
        "00000002" "0000000000000007" "00000003"
    )  # fmt: skip
    assert decode_commit(key, value) == commit
    noted = commit._replace(notes=(PublisherNote("p", 1, 2, 3, 7, (1,), (4,)),))
    key, value = encode_commit(noted)
    assert value.hex() == (
        "0000000000000009" "ffffffffffffffaa" "00000002"
        "00000001" "0000000000000003" "00000004"
        "00000002" "0000000000000007" "00000003"
        "91" "99" "a170" "01" "02" "03" "07" "9101" "9104" "00" "00"
    )  # fmt: skip
    assert decode_commit(key, value) == noted
    of_format_4 = bytes.fromhex(value.hex()[: -len("9199a17001020307910191040000")] + "9198a1700102030701910400")
    assert decode_commit(key, of_format_4) == noted, "a note of one topic"


def test_the_figures_of_a_topic() -> None:
    figures = StoredStatistics(*range(1, 13))
    assert encode_statistics(figures).hex() == "".join(f"{number:016x}" for number in range(1, 13))
    assert decode_statistics(encode_statistics(figures)) == figures


def test_the_headers_of_many_values_in_columns() -> None:
    values = [
        header(origin=65535, payload_bytes=2**32 - 1, version=2**62, publish_time=1, expire_time=NEVER, sequence=9)
        + b"payload",
        header(origin=0, payload_bytes=0, version=2, publish_time=0, expire_time=0, sequence=10),
        header(origin=258, payload_bytes=1, version=3, publish_time=2**50, expire_time=7, sequence=2**40) + b"x",
    ]
    columns = header_columns(values)
    assert list(columns.version) == [2**62, 2, 3]
    assert list(columns.publish_time) == [1, 0, 2**50]
    assert list(columns.expire_time) == [NEVER, 0, 7]
    assert list(columns.sequence) == [9, 10, 2**40]
    assert list(columns.origin) == [65535, 0, 258]
    assert [len(column) for column in header_columns([])] == [0] * 5
    heads = [value[:HEADER_BYTES] for value in values]
    assert list(sequences([heads[0], None, heads[2]])) == [9, 0, 2**40]
    assert sum(payload_bytes_each(heads)) == 2**32


SETTINGS = TopicSettings(
    key=("/55", "/109"),
    message_type=MessageType.FIX,
    expiration=Expiration.ENABLED,
    default_ttl_micros=30_000_000,
    min_ttl_micros=1,
    max_ttl_micros=2,
    journal=False,
    separator=b"\xff",
    retain_time_micros=None,
    retain_bytes=0,
    index=("/44", "/54"),
    max_age_micros=3,
    max_bytes=4,
    max_entries=5,
    backlog_ttl_micros=6,
    backlog_quota_bytes=7,
    backlog_quota_age_micros=8,
    backlog_quota_entries=11,
    backlog_action=BacklogAction.EVICT,
    delivery_limit=12,
    durable_idle_ttl_micros=9,
    idle_ttl_micros=10,
    publish_is_use=True,
    only_if_empty=True,
    auto_delete=True,
    dead_letter="dead",
    dead_letter_by_key=True,
    on_missing=OnMissing.DROP,
    replicate_durables=True,
    max_records=13,
    max_stored_bytes=14,
)


def test_settings_are_stored_under_their_names() -> None:
    stored = json.loads(json.dumps(settings_to_json(SETTINGS)))
    assert stored == {
        "key": ["/55", "/109"],
        "message_type": "fix",
        "expiration": "enabled",
        "default_ttl_micros": 30_000_000,
        "min_ttl_micros": 1,
        "max_ttl_micros": 2,
        "journal": False,
        "separator": "ÿ",
        "retain_time_micros": None,
        "retain_bytes": 0,
        "index": ["/44", "/54"],
        "max_age_micros": 3,
        "max_bytes": 4,
        "max_entries": 5,
        "backlog_ttl_micros": 6,
        "backlog_quota_bytes": 7,
        "backlog_quota_age_micros": 8,
        "backlog_quota_entries": 11,
        "backlog_action": "evict",
        "delivery_limit": 12,
        "durable_idle_ttl_micros": 9,
        "idle_ttl_micros": 10,
        "publish_is_use": True,
        "only_if_empty": True,
        "auto_delete": True,
        "dead_letter": "dead",
        "dead_letter_by_key": True,
        "on_missing": "drop",
        "replicate_durables": True,
        "max_records": 13,
        "max_stored_bytes": 14,
    }
    assert settings_from_json(stored) == SETTINGS


def test_settings_that_are_not_stored_yet_get_their_defaults_and_unknown_ones_are_left() -> None:
    """A server reads what an older or, after a step back, a newer one has stored."""
    stored = settings_to_json(SETTINGS)
    del stored["retain_bytes"], stored["index"]
    stored["of_the_future"] = 1
    assert settings_from_json(stored) == SETTINGS._replace(retain_bytes=TopicSettings().retain_bytes, index=())


def test_the_rows_that_a_load_stages() -> None:
    (key,) = staged_keys(7, [b"ab"], 0x11, 0x22)
    assert key.hex() == "000000077200026162000000110000000000000022"
    assert read_staged_key(key) == (b"ab", 0x11, 0x22)
    value = staged_value(1, 0x33, b"xy")
    assert value.hex() == "0100000000000000337879"
    assert read_staged(value) == (1, 0x33, b"xy")
    counts = attempt_key(7, 0x11, 2**64 - 1)
    assert counts.hex() == "000000076100000011ffffffffffffffff"
    assert read_attempt_key(counts) == (0x11, 2**64 - 1)
    row = encode_attempt(AttemptCounts(3, 2, 100, 2**64 - 1))
    assert row.hex() == "000000000000000300000000000000020000000000000064ffffffffffffffff"
    assert decode_attempt(row) == (3, 2, 100, 2**64 - 1)
    assert mark_key(7, b"ab").hex() == "00000007646162"
    assert named_key(7).hex() == "000000076e"
    assert encode_named([(1, 2)]).hex() == "000000010000000000000002"
    assert decode_named(encode_named([(1, 2), (3, 4)])) == {1: 2, 3: 4}


def test_the_rows_of_a_load_lie_in_ranges_of_their_own_and_those_of_a_key_together() -> None:
    keys = staged_keys(7, [b"a", b"b", b"a\xff", b""], 1, 1) + staged_keys(7, [b"a"], 2**32 - 1, 2**64 - 1)
    start, stop = staged_range(7)
    assert all(start <= key < stop for key in keys)
    assert [read_staged_key(key)[0] for key in sorted(keys)] == [b"", b"a", b"a", b"b", b"a\xff"]
    for key, (low, high) in (
        (attempt_key(7, 2**32 - 1, 2**64 - 1), attempts_range(7)),
        (mark_key(7, b"\xff" * 9), marks_range(7)),
    ):
        assert low <= key < high
        assert not start <= key < stop
    assert all(u32(7) < key < u32(8) for key in (*keys, named_key(7)))


_ROW_NAMES = {
    "key",
    "value",
    "head",
    "row",
    "entry",
    "store_key",
    "new_head",
    "old",
    "before",
    "stamp",
    "floor",
    "bounds",
}


def _raw_slices(source: str) -> list[int]:
    """The lines where a key or a value is cut by numbers, such as `value[24:32]`."""

    def name(node: ast.expr) -> str:
        match node:
            case ast.Name(id=found) | ast.Attribute(attr=found):
                return found
            case ast.Subscript(value=inner):
                return name(inner)
        return ""

    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Slice)
        and name(node.value) in _ROW_NAMES
        and any(isinstance(end, ast.Constant) for end in (node.slice.lower, node.slice.upper))
    ]


@pytest.mark.slow
def test_keys_and_values_are_cut_by_named_slices_outside_of_the_layouts() -> None:
    engine = Path(sow_server.engine.__file__).parent
    found = {
        f"{path.relative_to(engine)}:{line}"
        for path in engine.rglob("*.py")
        if not any(path.is_relative_to(engine / room) for room in ("stored", "disk/layout"))
        for line in _raw_slices(path.read_text())
    }
    assert found == set()
    assert _raw_slices("a = head[24:32]\nb = rows[0].key[4:]\nc = value[PAYLOAD]") == [1, 2]
