"""The mark: how much of the database is on disk for certain, recorded outside of it, so that a start notices lost data.

RocksDB takes a write-ahead log that ends early for the torn end of a power cut, a missing log for one that it has
removed itself, and the MANIFEST of another database for its own. The file MARK tells these cases apart (rule X4).

    [1]  A mark claims only bytes that were synced before the mark was written.
    [2]  It has two slots, written in turn, each with a checksum: a torn write leaves the other one.
    [3]  After an orderly stop it is exact. After a crash it is about a second old: a loss of later writes passes for a
         torn end.
    [4]  A loss that an operator has accepted stays in the mark until it is settled, so a crash in between changes
         nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from sow_server.engine.disk import backups

MARK: Final = "MARK"
SLOT_BYTES: Final = 16 * 2**10
LOGS_MAX: Final = 150
"""Logs that a mark has room for; the newest, if there are more."""
HEAD_BYTES: Final = 64
"""The first bytes of a log, which identify it: they contain the number of its first write."""
_DATABASE_ID: Final = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class LogMark(NamedTuple):
    """A write-ahead log, with the number of its bytes on disk."""

    name: str
    bytes: int
    head: int
    """Checksum of its first bytes; 0: it is too short."""
    after: int
    """Its changes have sequences above this one."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Versions and sequences below these may have been given out (rule K7)."""

    version: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """The contents of the database that are on disk for certain."""

    number: int = 0
    database: str = ""
    """The id of the database, as the MANIFEST has it."""
    manifest: str = ""
    manifest_bytes: int = 0
    manifest_checksum: int = 0
    logs: tuple[LogMark, ...] = ()
    sequence: int = 0
    """The last sequence that is on disk."""
    bounds: Bounds = field(default_factory=Bounds)
    accepted_after: int | None = None
    """An operator has accepted the loss of the changes after this sequence, and the loss is not settled yet."""


class Differs(Exception):
    """The database is not the marked one; one sentence names the difference."""


class LogsMissing(Exception):
    """The end of the write-ahead log is missing: one sentence names the missing part, which came after `after`."""

    def __init__(self, text: str, after: int) -> None:
        super().__init__(text)
        self.after = after


class Marker:
    """Owns the file MARK of an open store. From any thread."""

    def __init__(self, data: Path, mark: Mark | None) -> None:
        """`mark`: the last one, of this database or of its past."""
        self._data = data
        self._database = data / backups.DATABASE
        self._lock = threading.Lock()
        self._last = mark or Mark()
        self._known: dict[str, LogMark] = {}

    def log_sizes(self) -> dict[str, int]:
        """The logs and their bytes; while nothing is being written."""
        sizes: dict[str, int] = {}
        for path in sorted(self._database.glob("*.log")):
            with contextlib.suppress(FileNotFoundError):  # RocksDB has no more use for it
                sizes[path.name] = path.stat().st_size
        return sizes

    def write(self, sizes: dict[str, int], sequence: int, bounds: Bounds, holds: Callable[[], bool]) -> None:
        """Marks the logs up to `sizes`; they contain everything up to `sequence`. `holds` is called once all is synced;
        if it returns False, nothing is marked. Raises OSError."""
        with self._lock:
            logs = self._sync_logs(sizes, self._last.sequence, sequence)
            mark = replace(
                self._sync_manifest(),
                number=self._last.number + 1,
                logs=tuple(logs.values())[-LOGS_MAX:],
                sequence=sequence,
                bounds=bounds,
                accepted_after=None,
            )
            if replace(mark, number=self._last.number) == self._last or not holds():
                return
            save(self._data, mark)
            self._last, self._known = mark, logs

    def _sync_logs(self, sizes: dict[str, int], before: int, now: int) -> dict[str, LogMark]:
        """Syncs the logs. `before`, `now`: the last sequences at the mark before this one, and at this one."""
        if sizes.keys() - self._known.keys():
            backups.sync_directory(self._database)
        found: dict[str, LogMark] = {}
        for name, size in sizes.items():
            known = self._known.get(name)
            if known is not None and known.bytes == size:
                found[name] = known
                continue
            try:
                file = os.open(self._database / name, os.O_RDONLY)
            except FileNotFoundError:  # RocksDB has no more use for it
                continue
            try:
                os.fsync(file)
                head = _head(file)
            finally:
                os.close(file)
            # The changes in a new log came after the previous mark; an empty log has none yet.
            after = known.after if known is not None else before if size else now
            found[name] = LogMark(name, size, head, after)
        return found

    def _sync_manifest(self) -> Mark:
        name = _current(self._database)
        path = self._database / name
        size, last = path.stat().st_size, self._last
        if last.manifest == name and last.manifest_bytes == size:
            return last
        checked, checksum = (last.manifest_bytes, last.manifest_checksum) if last.manifest == name else (0, 0)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            database = _database_id(file.read(4096))
            file.seek(checked)
            checksum = zlib.crc32(file.read(size - checked), checksum)
        return replace(last, database=database, manifest=name, manifest_bytes=size, manifest_checksum=checksum)


def load(data: Path) -> Mark | None:
    """The mark of a data directory; None: it is missing or cannot be read."""
    try:
        content = (data / MARK).read_bytes()
    except FileNotFoundError:
        return None
    marks = [mark for at in (0, SLOT_BYTES) if (mark := _decode(content[at : at + SLOT_BYTES])) is not None]
    return max(marks, key=lambda mark: mark.number, default=None)


def save(data: Path, mark: Mark) -> None:
    """Writes a mark, on disk. Raises OSError."""
    path = data / MARK
    text = json.dumps(asdict(mark)).encode()
    slot = (b"%08x " % zlib.crc32(text) + text).ljust(SLOT_BYTES)
    assert len(slot) == SLOT_BYTES, "LOGS_MAX bounds it"
    created = not path.exists()
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(file, slot, SLOT_BYTES * (mark.number % 2))
        os.fsync(file)
    finally:
        os.close(file)
    if created:
        backups.sync_directory(data)


def check(data: Path, mark: Mark, needed_from: Callable[[], int]) -> None:
    """Compares a database, which is not open yet, with its mark. `needed_from` gives the number of the first log that
    the database needs; it is called only if necessary. Raises Differs, LogsMissing."""
    database = data / backups.DATABASE
    if not _check_manifest(database, mark):
        return
    wrong = [(log, what) for log in mark.logs if log.bytes and (what := _wrong_with(database, log))]
    if wrong:
        # A log that the database has ceased to need since the mark was removed for that reason.
        needed = needed_from()
        wrong = [(log, what) for log, what in wrong if int(log.name.partition(".")[0]) >= needed]
    if wrong:
        after = min(log.after for log, _ in wrong)
        text = "; ".join(f"{log.name} {what}" for log, what in wrong)
        raise LogsMissing(
            f"{text}: changes after sequence {after} are missing, and all up to {mark.sequence} were on disk", after
        )


def _check_manifest(database: Path, mark: Mark) -> bool:
    """Raises Differs. False: there is no MANIFEST, which RocksDB reports itself."""
    try:
        name = _current(database)
        with (database / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            beginning = file.read(mark.manifest_bytes if name == mark.manifest else 4096)
    except (OSError, ValueError):
        return False
    if mark.database and _database_id(beginning[:4096]) != mark.database:
        raise Differs(f"{name} is not of the database that the file {MARK} is of")
    if name < mark.manifest and len(name) <= len(mark.manifest):
        raise Differs(f"CURRENT names {name}, and {mark.manifest} was the last one")
    if name == mark.manifest and size < mark.manifest_bytes:
        raise Differs(f"{name} ends at byte {size}, and {mark.manifest_bytes} bytes were on disk")
    if name == mark.manifest and zlib.crc32(beginning) != mark.manifest_checksum:
        raise Differs(f"{name} has been changed")
    return True


def _wrong_with(database: Path, log: LogMark) -> str:
    """The missing part of a log; empty: none. Raises Differs if it is another log: its writes must not be taken for
    those of this database, and no loss may be accepted with it."""
    try:
        file = os.open(database / log.name, os.O_RDONLY)
    except FileNotFoundError:
        return "is missing"
    try:
        size = os.fstat(file).st_size
        if log.head and size >= HEAD_BYTES and _head(file) != log.head:
            raise Differs(f"{log.name} is not the log that was written here")
        return f"ends at byte {size} of {log.bytes}" if size < log.bytes else ""
    finally:
        os.close(file)


def _head(file: int) -> int:
    head = os.pread(file, HEAD_BYTES, 0)
    return zlib.crc32(head) if len(head) == HEAD_BYTES else 0


def _current(database: Path) -> str:
    """The name of the MANIFEST in use. Raises OSError, ValueError."""
    name = (database / "CURRENT").read_text().strip()
    if not re.fullmatch(r"MANIFEST-\d+", name):
        raise ValueError(f"CURRENT is not the name of a MANIFEST: {name[:40]!r}")
    return name


def _database_id(head: bytes) -> str:
    found = _DATABASE_ID.search(head)
    return "" if found is None else found.group().decode()


def _decode(slot: bytes) -> Mark | None:
    checksum, _, text = slot.rstrip(b" ").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    fields = json.loads(text)
    return Mark(
        **fields | {"logs": tuple(LogMark(*log) for log in fields["logs"]), "bounds": Bounds(**fields["bounds"])}
    )
