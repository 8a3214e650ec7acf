"""Each trap of rocksdict that `engine/disk/rocks` names (rocks [1] to [11]) is shown here to be guarded against.

A crash is simulated by copying the files of an open database; the copy has had no orderly close.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import rocksdict

from sow_server.engine.disk import rocks as rocks_package
from sow_server.engine.disk.rocks import EXPIRY, FAMILIES, META, RECORDS, Batch, Cursor, Rocks, disk_bytes
from sow_server.engine.disk.rocks.rocks_errors import translate
from sow_server.engine.values.database import Damaged, DiskFull, Failed, Locked, RocksError, Stalled

Rows = list[tuple[bytes, bytes]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "db"


@pytest.fixture
def rocks(path: Path) -> Iterator[Rocks]:
    rocks = Rocks(path, create=True)
    yield rocks
    rocks.close()


def put(rocks: Rocks, rows: dict[bytes, bytes], *, family: str = RECORDS) -> None:
    batch = Batch()
    batch.puts[family] = rows
    rocks.write(batch)


def number(index: int) -> bytes:
    return b"%08d" % index


def all_rows(rocks: Rocks, family: str = RECORDS) -> Rows:
    cursor = rocks.cursor(family)
    try:
        return list(cursor.rows(b"", None))
    finally:
        cursor.close()


def rows_after_reopening(path: Path) -> Rows:
    rocks = Rocks(path, create=False)
    try:
        return all_rows(rocks)
    finally:
        rocks.close()


def run_python(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program in a separate process with the same import path."""
    return subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- rocks [1]: cursors -----------------------------------------------------------------------------------------------


def test_a_cursor_sees_the_state_as_of_its_creation(rocks: Rocks) -> None:
    """rocks [1]."""
    put(rocks, {b"a": b"1", b"b": b"1"})
    cursor = rocks.cursor(RECORDS)
    batch = Batch()
    batch.puts[RECORDS] = {b"a": b"2", b"c": b"2"}
    batch.deletes[RECORDS] = [b"b"]
    rocks.write(batch)
    rocks.flush()
    assert list(cursor.rows(b"", None)) == [(b"a", b"1"), (b"b", b"1")]
    assert (cursor.find(b"a"), cursor.find(b"c")) == (b"1", None)
    assert all_rows(rocks) == [(b"a", b"2"), (b"c", b"2")]


def test_cursors_opened_between_two_commits_are_one_cut_over_families(rocks: Rocks) -> None:
    """rocks [1]."""

    def commit(value: bytes) -> None:
        batch = Batch()
        batch.puts[RECORDS] = {b"r": value}
        batch.puts[META] = {b"m": value}
        rocks.write(batch)

    commit(b"1")
    cut = rocks.cursor(RECORDS), rocks.cursor(META)
    commit(b"2")
    assert [row for cursor in cut for row in cursor.rows(b"", None)] == [(b"r", b"1"), (b"m", b"1")]


# --- rocks [2], rocks [3]: bounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop", "limit", "found"),
    [
        (b"", None, None, b"bdf"),
        (b"b", None, None, b"bdf"),
        (b"c", None, None, b"df"),
        (b"", b"d", None, b"b"),
        (b"b", b"e", None, b"bd"),
        (b"d", b"d", None, b""),
        (b"e", b"c", None, b""),
        (b"g", None, None, b""),
        (b"", None, 0, b""),
        (b"", None, 2, b"bd"),
        (b"", b"d", 5, b"b"),
    ],
)
def test_rows_run_from_start_to_before_stop(
    rocks: Rocks, start: bytes, stop: bytes | None, limit: int | None, found: bytes
) -> None:
    """rocks [2]: RocksDB's lower bound, as rocksdict sets it, would cut the rows off above."""
    put(rocks, {bytes([letter]): b"value" for letter in b"fdb"})
    keys = [bytes([letter]) for letter in found]
    cursor = rocks.cursor(RECORDS)
    assert list(cursor.rows(start, stop, limit=limit)) == [(key, b"value") for key in keys]
    assert list(cursor.keys(start, stop, limit=limit)) == keys


def test_no_iterator_bounds_are_ever_set() -> None:
    """rocks [2], rocks [3]: one sets the wrong bound, both dangle with their options. Wrong rows come without an error,
    and only at times, so no behaviour can be relied on to show it."""
    sources = [path.read_text(encoding="utf-8") for path in Path(rocks_package.__path__[0]).glob("*.py")]
    assert len(sources) > 3
    code = "".join(sources).replace(rocks_package.__doc__ or "", "")
    assert "iterate_lower_bound" not in code
    assert "iterate_upper_bound" not in code
    assert "iterate_range" not in code


def test_a_cursor_keeps_its_read_options_alive(rocks: Rocks) -> None:
    """rocks [3]."""
    cursor = rocks.cursor(RECORDS)
    held = [getattr(cursor, name) for name in Cursor.__slots__ if not name.startswith("__")]
    assert any(isinstance(value, rocksdict.ReadOptions) for value in held)


sequential = pytest.mark.parametrize("sequential", [False, True])
"""With True the cursor is told where its `fill` begins, and reads on from there."""


@sequential
def test_fill_leaves_out_rows_beyond_the_stop_up_to_the_end_of_the_family(rocks: Rocks, sequential: bool) -> None:
    """The stop is looked for once a call; a fill that met the end of the family before had passed it unseen."""
    batch = Batch()
    batch.puts[RECORDS] = {b"a": b"1", b"b": b"2", b"c": b"3"}
    rocks.write(batch)
    keys, values = [b"before"], [b"0"]
    cursor = rocks.cursor(RECORDS, reads_from=b"a" if sequential else None)
    assert cursor.fill(b"a", b"c", 100, keys, values) is None
    assert (keys, values) == ([b"before", b"a", b"b"], [b"0", b"1", b"2"])


@sequential
def test_fill_stops_at_its_limits_and_tells_where_to_go_on(rocks: Rocks, sequential: bool) -> None:
    put(rocks, {number(index): b"v" * 10 for index in range(10)})
    cursor = rocks.cursor(RECORDS, reads_from=b"" if sequential else None)
    keys: list[bytes] = []
    values: list[bytes] = []
    assert cursor.fill(b"", number(8), 3, keys, values) == number(3)
    assert cursor.fill(number(3), number(8), 100, keys, values, bytes_max=20) == number(5)
    assert cursor.fill(number(5), number(8), 3, keys, values) is None  # the next row is the stop
    assert keys == [number(index) for index in range(8)]
    assert values == [b"v" * 10] * 8
    assert cursor.fill(number(9), b"\xff", 1, keys, values) is None  # and here there is no next row
    assert cursor.fill(b"\xff", b"\xff\xff", 1, keys, values) is None
    assert len(keys) == len(values) == 9


@sequential
@pytest.mark.parametrize("bytes_max", [1, 150, 1_000, 2**20])
def test_fill_ends_with_the_row_that_reaches_the_bytes(rocks: Rocks, bytes_max: int, sequential: bool) -> None:
    """Rows that grow."""
    rows = {number(index): b"v" * (index * index // 20) for index in range(400)}
    put(rocks, rows)
    cursor = rocks.cursor(RECORDS, reads_from=number(3) if sequential else None)
    following: bytes | None = number(3)
    expected = iter(list(rows.items())[3:390])
    while following is not None:
        keys, values = [b"before"], [b"before"]
        following = cursor.fill(following, number(390), 300, keys, values, bytes_max=bytes_max)
        got = list(zip(keys[1:], values[1:], strict=True))
        assert got == list(itertools.islice(expected, len(got)))
        sizes = [len(value) for _, value in got]
        assert sum(sizes[:-1]) < bytes_max
        assert following is None or len(got) == 300 or sum(sizes) >= bytes_max
    assert not list(expected)


def test_a_sequential_read_shows_the_state_as_of_its_creation(rocks: Rocks) -> None:
    """rocks [1]. A `fill` elsewhere in between reads by the cursor itself, and both show one state."""
    put(rocks, {number(index): b"old" for index in range(100)})
    cursor = rocks.cursor(RECORDS, reads_from=b"")
    put(rocks, {number(index): b"new" for index in range(50, 150)})
    rocks.flush()
    keys: list[bytes] = []
    values: list[bytes] = []
    assert cursor.fill(b"", b"\xff", 30, keys, values) == number(30)
    assert cursor.fill(number(90), b"\xff", 100, [], values) is None
    assert cursor.fill(number(30), b"\xff", 100, keys, values) is None
    assert keys == [number(index) for index in range(100)]
    assert values == [b"old"] * 110


def test_filling_keys_before_a_stop_tells_where_to_go_on(rocks: Rocks) -> None:
    put(rocks, {number(index): b"v" for index in range(10)})
    cursor = rocks.cursor(RECORDS)
    keys: list[bytes] = [b"before"]
    assert cursor.fill_keys_before(b"", number(8), 3, keys) == number(3)
    assert cursor.fill_keys_before(number(3), number(8), 4, keys) == number(7)
    assert cursor.fill_keys_before(number(7), number(8), 1, keys) is None  # the next key is the stop
    assert keys == [b"before", *[number(index) for index in range(8)]]
    assert cursor.fill_keys_before(number(8), b"\xff", 2, keys) is None  # and here there is no next key
    assert cursor.fill_keys_before(number(5), number(2), 9, keys) is None
    assert keys[9:] == [number(8), number(9)]


def test_a_cursor_finds_single_rows(rocks: Rocks) -> None:
    cursor = rocks.cursor(RECORDS)
    assert (cursor.last(), cursor.last_before(b"x"), cursor.find(b"x")) == (None, None, None)
    put(rocks, {b"b": b"2", b"d": b"4"})
    cursor = rocks.cursor(RECORDS)
    assert cursor.last() == (b"d", b"4")
    assert cursor.last_before(b"a") is None
    assert cursor.last_before(b"b") == (b"b", b"2")
    assert cursor.last_before(b"c") == (b"b", b"2")
    assert cursor.find(b"b") == b"2"
    assert cursor.find(b"c") is None


# --- rocks [4]: damage in a table file --------------------------------------------------------------------------------


@pytest.fixture
def damaged(path: Path) -> Iterator[Rocks]:
    """2,000 rows in one table file with a damaged block in its middle."""
    rocks = Rocks(path, create=True)
    content = random.Random(4)  # does not compress, so that the middle of the file is a data block
    put(rocks, {number(index): content.randbytes(200) for index in range(2000)})
    rocks.flush()
    rocks.close()
    table = max(path.glob("*.sst"), key=lambda file: file.stat().st_size)
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 0xFF
    table.write_bytes(data)
    rocks = Rocks(path, create=False)
    yield rocks
    rocks.close()


def _fill_all(cursor: Cursor) -> None:
    keys: list[bytes] = []
    following: bytes | None = b""
    while following is not None:
        following = cursor.fill(following, b"\xff", 100, keys, [])


@pytest.mark.parametrize(
    "scan",
    [
        pytest.param(lambda cursor: list(cursor.rows(b"", None)), id="rows"),
        pytest.param(lambda cursor: list(cursor.rows(b"", b"\xff", limit=2000)), id="rows with limit and stop"),
        pytest.param(lambda cursor: list(cursor.keys(b"", None)), id="keys"),
        pytest.param(_fill_all, id="fill"),
        pytest.param(lambda cursor: cursor.fill_keys_before(b"", b"\xff", 10**9, []), id="fill_keys_before"),
        pytest.param(lambda cursor: [cursor.find(number(index)) for index in range(2000)], id="find"),
        pytest.param(lambda cursor: [cursor.last_before(number(index)) for index in range(2000)], id="last_before"),
    ],
)
def test_a_scan_that_meets_a_damaged_block_raises(damaged: Rocks, scan: Callable[[Cursor], object]) -> None:
    """rocks [4]: left alone, the iteration just ends there, as if that were all."""
    with pytest.raises(Damaged):
        scan(damaged.cursor(RECORDS))


def test_a_sequential_read_that_meets_a_damaged_block_raises(damaged: Rocks) -> None:
    """rocks [4]: rocksdict's own iterator of rows tells no error at all."""
    with pytest.raises(Damaged):
        _fill_all(damaged.cursor(RECORDS, reads_from=b""))


def test_reads_by_key_and_the_verification_find_damage(damaged: Rocks) -> None:
    """rocks [4]."""
    keys = [number(index) for index in range(2000)]
    with pytest.raises(Damaged):
        damaged.multi_get(RECORDS, keys)
    with pytest.raises(Damaged):
        [damaged.get(RECORDS, key) for key in keys]
    with pytest.raises(Damaged):
        damaged.verify()


def test_verifying_counts_the_rows_of_all_families(rocks: Rocks) -> None:
    for index, family in enumerate(FAMILIES):
        put(rocks, {number(row): b"" for row in range(index + 1)}, family=family)
    rocks.flush()
    assert rocks.verify() == sum(range(1, len(FAMILIES) + 1))


# --- rocks [5], rocks [6]: writing ------------------------------------------------------------------------------------


class _Spy:
    """A wrapper of the database that notes the calls of a write and a sync."""

    def __init__(self, db: rocksdict.Rdict) -> None:
        self._db = db
        self.calls: list[str] = []

    def write(self, batch: rocksdict.WriteBatch, options: rocksdict.WriteOptions) -> None:
        self.calls.append(f"write sync={options.sync} no_slowdown={options.no_slowdown}")
        self._db.write(batch, options)

    def flush_wal(self, sync: bool) -> None:
        self.calls.append(f"flush_wal sync={sync}")
        self._db.flush_wal(sync)


def test_a_write_does_not_sync_and_a_sync_syncs_the_log(rocks: Rocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """rocks [5]: a syncing write would hold the GIL for as long as the disk takes."""
    spy = _Spy(rocks._open())
    with monkeypatch.context() as patch:
        patch.setattr(rocks, "_db", spy)
        put(rocks, {b"a": b"1"})
        rocks.sync()
    assert spy.calls == ["write sync=False no_slowdown=True", "flush_wal sync=True"]


def test_many_keys_are_read_in_one_call_that_frees_the_gil(rocks: Rocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """rocks [5]: only the get of a list lets other threads run."""
    put(rocks, {b"a": b"1", b"c": b"3"})
    asked: list[object] = []

    class Family:
        def get(self, keys: list[bytes]) -> object:
            asked.append(keys)
            return family.get([*keys])

    family = rocks._family(RECORDS)
    with monkeypatch.context() as patch:
        patch.setitem(rocks._families, RECORDS, cast(rocksdict.Rdict, Family()))
        assert rocks.multi_get(RECORDS, (b"c", b"b", b"a", b"c")) == [b"3", None, b"1", b"3"]
        assert rocks.multi_get(RECORDS, []) == []
    assert asked == [[b"c", b"b", b"a", b"c"]]


def _slow_down(rocks: Rocks) -> None:
    """Brings the records to where RocksDB slows writes down to 16 MB/s: as many level-0 files as it tolerates."""
    rocks._family(RECORDS).set_options(
        {"level0_file_num_compaction_trigger": "100", "level0_slowdown_writes_trigger": "2"}
    )
    for index in range(2):
        put(rocks, {number(index): b""})
        rocks.flush()
    assert rocks.write_stalled()


def _write_until_stalled(rocks: Rocks) -> Batch:
    for index in range(10, 30):
        batch = Batch()
        batch.puts[RECORDS] = {number(index): bytes(2**20)}
        batch.deletes[RECORDS] = [number(index - 1)]
        batch.ranges = [(RECORDS, number(0), number(1))]
        try:
            rocks.write(batch)
        except Stalled:
            return batch
    raise AssertionError("twenty megabytes were written although RocksDB wants to slow down")


def test_a_write_that_would_have_to_wait_raises_instead(rocks: Rocks) -> None:
    """rocks [6]: waiting inside `write` freezes every thread of the process."""
    assert not rocks.write_stalled()
    _slow_down(rocks)
    batch = _write_until_stalled(rocks)
    (key,) = batch.puts[RECORDS]
    assert rocks.get(RECORDS, key) is None  # nothing of it was written


def test_the_batch_of_a_stalled_write_can_be_written_later(rocks: Rocks) -> None:
    """rocks [6]: RocksDB's own batch is used up by the failed write."""
    _slow_down(rocks)
    batch = _write_until_stalled(rocks)
    rocks._family(RECORDS).set_options({"level0_slowdown_writes_trigger": "200"})
    assert not rocks.write_stalled()
    rocks.write(batch)
    (key,) = batch.puts[RECORDS]
    # All of it: the put, the delete of the key before, and the range.
    assert [found for found, _ in all_rows(rocks)] == [number(1), key]


def test_a_batch_removes_ranges_then_keys_and_then_puts(rocks: Rocks) -> None:
    put(rocks, {number(index): b"old" for index in range(6)})
    batch = Batch()
    batch.puts[RECORDS] = {number(1): b"new", number(4): b"new"}
    batch.deletes[RECORDS] = [number(4), number(5)]
    batch.ranges = [(RECORDS, number(0), number(3))]
    batch.puts[EXPIRY] = {b"e": b""}
    rocks.write(batch)
    assert all_rows(rocks) == [(number(1), b"new"), (number(3), b"old"), (number(4), b"new")]
    assert all_rows(rocks, EXPIRY) == [(b"e", b"")]


# --- rocks [7]: a full disk -------------------------------------------------------------------------------------------

FULL_DISK = """
import resource, sys
from pathlib import Path
from sow_server.engine.disk.rocks import RECORDS, Batch, Rocks
from sow_server.engine.values.database import DiskFull

rocks = Rocks(Path(sys.argv[1]), create=True)
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
written = 0
try:
    while True:
        batch = Batch()
        batch.puts[RECORDS] = {b"%08d" % written: bytes(10_000)}
        rocks.write(batch)
        rocks.sync()
        written += 1
except DiskFull:
    print("full", written)
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
try:
    rocks.write(batch)
except DiskFull:
    print("broken")
print("readable", sum(1 for _ in rocks.cursor(RECORDS).keys(b"", None)))
rocks.close()
rocks = Rocks(Path(sys.argv[1]), create=False)
print("reopened", sum(1 for _ in rocks.cursor(RECORDS).keys(b"", None)))
rocks.write(batch)
rocks.close()
"""


@pytest.mark.fault
def test_after_a_failed_write_the_handle_is_broken_and_reopening_has_all_synced_writes(path: Path) -> None:
    """rocks [7]: also when there is space again; closing such a handle works, and frees the lock (rocks [9])."""
    done = run_python(FULL_DISK, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["full 9", "broken", "readable 9", "reopened 9"]
    assert len(rows_after_reopening(path)) == 10


# --- rocks [8]: damage in the log -------------------------------------------------------------------------------------


@pytest.fixture
def crashed(tmp_path: Path, rocks: Rocks, path: Path) -> Path:
    """A database that lost power after 1,000 synced writes."""
    for index in range(1000):
        put(rocks, {number(index): bytes(100)})
    rocks.sync()
    return Path(shutil.copytree(path, tmp_path / "crashed"))


def _log(path: Path) -> Path:
    return max(path.glob("*.log"), key=lambda file: file.stat().st_size)


def test_after_a_crash_all_synced_writes_are_there(crashed: Path) -> None:
    assert [key for key, _ in rows_after_reopening(crashed)] == [number(index) for index in range(1000)]


@pytest.mark.parametrize("torn_bytes", [1, 50, 129, 5000])
def test_a_log_with_a_torn_tail_opens_with_the_writes_before_it(crashed: Path, torn_bytes: int) -> None:
    """rocks [8]."""
    log = _log(crashed)
    data = log.read_bytes()
    log.write_bytes(data[:-torn_bytes])
    found = [key for key, _ in rows_after_reopening(crashed)]
    assert found == [number(index) for index in range(len(found))]
    assert 1000 - torn_bytes // 100 - 1 <= len(found) < 1000


def test_a_log_that_is_damaged_in_its_middle_refuses_to_open(crashed: Path) -> None:
    """rocks [8]: by default RocksDB opens it and silently drops every acknowledged write from there on."""
    log = _log(crashed)
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 0xFF
    log.write_bytes(data)
    with pytest.raises(Damaged):
        Rocks(crashed, create=False)


# --- rocks [9]: closing -----------------------------------------------------------------------------------------------


def test_a_second_opening_is_refused_until_the_first_is_closed(rocks: Rocks, path: Path) -> None:
    with pytest.raises(Locked):
        Rocks(path, create=False)
    rocks.close()
    Rocks(path, create=False).close()


def test_another_process_has_the_database_locked(rocks: Rocks, path: Path) -> None:
    program = "import sys; from pathlib import Path; from sow_server.engine.disk.rocks import Rocks\n"
    program += "from sow_server.engine.values.database import Locked\n"
    program += "try: Rocks(Path(sys.argv[1]), create=False)\nexcept Locked: print('locked')"
    done = run_python(program, path)
    assert done.stdout == "locked\n", done.stderr


def test_closing_frees_the_lock_although_cursors_are_open(rocks: Rocks, path: Path) -> None:
    """rocks [9]."""
    put(rocks, {number(index): b"" for index in range(10)})
    untouched = rocks.cursor(RECORDS)
    begun = rocks.cursor(META)
    list(begun.rows(b"", None))
    rocks.close()
    Rocks(path, create=False).close()
    for cursor in (untouched, begun):
        with pytest.raises(Failed):
            next(cursor.rows(b"", None))


@pytest.mark.parametrize("read", [Cursor.rows, Cursor.keys])
def test_closing_frees_the_lock_although_a_reading_stopped_half_way(
    rocks: Rocks, path: Path, read: Callable[[Cursor, bytes, None], Iterator[object]]
) -> None:
    """rocks [9]: the frame of a suspended generator holds the iterator; the first version of `Cursor.close` forgot
    it."""
    put(rocks, {number(index): b"" for index in range(10)})
    reading = read(rocks.cursor(RECORDS), b"", None)
    next(reading)
    cursor = rocks.cursor(RECORDS)
    suspended = read(cursor, b"", None)
    next(suspended)
    rocks.close()
    Rocks(path, create=False).close()
    assert list(suspended) == []


def test_a_closed_database_says_so(rocks: Rocks) -> None:
    rocks.close()
    rocks.close()  # twice is once
    for call in (
        lambda: put(rocks, {b"a": b""}),
        rocks.sync,
        lambda: rocks.get(RECORDS, b"a"),
        lambda: rocks.multi_get(RECORDS, [b"a"]),
        lambda: rocks.cursor(RECORDS),
        rocks.flush,
        rocks.verify,
    ):
        with pytest.raises(Failed) as caught:
            call()
        assert "closed" in str(caught.value)


# --- rocks [10]: bytes, and errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [b"", b"\x00", b"\xff" * 300, b"\x80\x04K\x01.", bytes(range(256))])
def test_keys_and_values_come_back_byte_for_byte(rocks: Rocks, row: bytes) -> None:
    """rocks [10]."""
    put(rocks, {b"k" + row: row})
    rocks.flush()
    assert rocks.get(RECORDS, b"k" + row) == row
    assert all_rows(rocks) == [(b"k" + row, row)]


@pytest.mark.parametrize("other", ["text", 1, 1.5, True, bytearray(b"a")])
def test_only_bytes_are_accepted(rocks: Rocks, other: object) -> None:
    """rocks [10]: without its raw mode rocksdict would encode text, numbers and pickles in a form of its own."""
    with pytest.raises(Exception):  # noqa: B017  # a fault of the caller; whatever rocksdict says of it
        put(rocks, {b"key": cast(bytes, other)})
    with pytest.raises(Exception):  # noqa: B017  # as above
        rocks.get(RECORDS, cast(bytes, other))
    assert all_rows(rocks) == []


def test_a_key_that_is_not_there_is_none(rocks: Rocks) -> None:
    """rocks [10]."""
    assert rocks.get(RECORDS, b"nobody") is None
    assert rocks.multi_get(RECORDS, [b"nobody"]) == [None]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Result incomplete: Write stall", Stalled),
        ("IO error: lock hold by current process, acquire time 1: /d/LOCK: No locks available", Locked),
        ("IO error: While lock file: /d/LOCK: Resource temporarily unavailable", Locked),
        ("Corruption: block checksum mismatch: stored = 1, computed = 2", Damaged),
        ("IO error: No space left on device: While appending to file: /d/000004.log", DiskFull),
        ("IO error: While appending to file: /d/000004.log: File too large", DiskFull),
        ("IO error: While fsync: /d/000004.log: Input/output error", Failed),
        ("Invalid argument: what nobody expected", Failed),
    ],
)
def test_errors_are_classified_by_their_text(text: str, kind: type[RocksError]) -> None:
    """rocks [10]: rocksdict raises bare exceptions."""
    assert type(translate(Exception(text))) is kind
    assert str(translate(Exception(text))) == text


def test_an_error_that_is_translated_already_stays_the_same() -> None:
    error = Locked("x")
    assert translate(error) is error


# --- rocks [11]: existing and missing databases ----------------------------------------------------------------------


def test_a_database_without_its_current_file_is_not_made_anew(rocks: Rocks, path: Path) -> None:
    """rocks [11]: RocksDB would make an empty one in its place."""
    put(rocks, {b"a": b"1"})
    rocks.close()
    (path / "CURRENT").unlink()
    with pytest.raises(Damaged) as caught:
        Rocks(path, create=False)
    assert "CURRENT is missing" in str(caught.value)
    assert not (path / "CURRENT").exists()


def test_a_new_database_is_not_made_over_an_old_one(rocks: Rocks, path: Path) -> None:
    """rocks [11]."""
    put(rocks, {b"a": b"1"})
    rocks.close()
    with pytest.raises(Damaged):
        Rocks(path, create=True)
    assert rows_after_reopening(path) == [(b"a", b"1")]


# --- the whole -------------------------------------------------------------------------------------------------------


def test_an_orderly_close_keeps_all_writes(path: Path) -> None:
    rocks = Rocks(path, create=True)
    put(rocks, {b"a": b"1"})
    rocks.close()
    assert rows_after_reopening(path) == [(b"a", b"1")]


def test_compacting_gives_space_back(rocks: Rocks, path: Path) -> None:
    content = random.Random(1)
    put(rocks, {number(index): content.randbytes(1000) for index in range(1000)})
    rocks.flush()
    full = rocks.table_bytes()
    assert full > 900_000
    assert disk_bytes(path) > full
    batch = Batch()
    batch.ranges = [(RECORDS, number(0), number(990))]
    rocks.write(batch)
    rocks.flush()
    rocks.compact(RECORDS)
    assert rocks.table_bytes() < full // 20
    assert len(all_rows(rocks)) == 10


def test_indexes_and_filters_of_tables_are_cached_in_small_blocks(rocks: Rocks, path: Path) -> None:
    """Story: each was one block of about 1 MiB for a file. With 10 M records these pushed each other out of the cache,
    and a look-up of many keys cost 7 times as much as with 100,000 records."""
    (options,) = path.glob("OPTIONS-*")
    tables = options.read_text().split("[TableOptions/BlockBasedTable ")[1:]

    assert len(tables) > len(FAMILIES)  # RocksDB's default family is there, too, and stays empty
    for table in tables:
        if not table.startswith('"default"'):
            settings = dict(line.strip().split("=", 1) for line in table.splitlines() if "=" in line)
            assert settings["cache_index_and_filter_blocks"] == "true", "their memory is bounded"
            assert settings["index_type"] == "kTwoLevelIndexSearch"
            assert settings["partition_filters"] == "true"
            assert settings["metadata_block_size"] == "4096"
