"""Opening a data directory: checks that it is complete and sound, and determines its instance.

[1]  A directory that cannot be opened is left unchanged, except that its files become private (rule X5). The error
     names the reason and the remedy.
[2]  A backup becomes a separate instance (rule J14): bookmarks of the original instance are refused, and peers begin
     anew with it. Durables keep their positions, which are in the data.
[3]  Each step is done again when the process was killed in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from sow_server.engine.disk import backups
from sow_server.engine.disk.claim import DirectoryClaim
from sow_server.engine.disk.layout import ACCEPTED_KEY, CLOCK_KEY, FORMAT_KEY, INSTANCE_KEY, PLACEMENT_KEY
from sow_server.engine.disk.mark import MARK, Differs, LogsMissing, Mark, Marker, check
from sow_server.engine.disk.mark import load as load_mark
from sow_server.engine.disk.mark import save as save_mark
from sow_server.engine.disk.private import tighten
from sow_server.engine.disk.rocks import COMMITS, FAMILIES, META, Batch, Rocks, first_log_needed
from sow_server.engine.losses import settle
from sow_server.engine.stored import (
    DATA_FORMAT,
    UPGRADED_FORMATS,
    Commit,
    decode_commit,
    i64,
    u32,
    unpack_i64,
    unpack_u32,
)
from sow_server.engine.values.bookmarks import Instance
from sow_server.engine.values.clock import ClockBehindError, GuardedClock
from sow_server.engine.values.database import Damaged, Locked, RocksError, RocksOptions
from sow_server.engine.values.errors import OpenError

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The exceptions that the operator accepts at this start."""

    clock: bool = False
    """The clock is right, though the data have seen a later time."""
    loss: bool = False
    """The store continues although the end of the log is missing (rule X4)."""
    authoritative: bool = False
    """Peers adopt the data of a restored backup unchanged (rule J14)."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open and checked database, before the store is built on it."""

    path: Path
    rocks: Rocks
    instance: Instance
    origins: tuple[str, ...]
    """Names of the instances that wrote records, by number."""
    origin: int
    """The number of this instance."""
    marker: Marker


def open_database(
    path: Path,
    *,
    name: str,
    rocks_options: RocksOptions,
    verify_at_start_bytes: int,
    clock: GuardedClock,
    accepted: Accepted,
) -> Opened:
    """Opens, or makes, the database in the directory `path` for the instance `name`, and starts the clock. Raises
    OpenError."""
    rocks, create, marked = _claim(path, rocks_options, accepted)
    with closed_if_refused(path, rocks):
        if create:
            _initialise(rocks)
        _check_format(rocks, path)
        marker = path / backups.MARKER
        if not marker.exists():
            _write_marker(marker)
        backups.remove_unfinished(path)
        if rocks.table_bytes() <= verify_at_start_bytes:
            rocks.verify()
        if marked is not None and marked.accepted_after is not None:
            settle(rocks, marked.bounds, _new_identity())
        if backups.is_backup(path):
            _restore(rocks, path, authoritative=accepted.authoritative)
        elif accepted.authoritative and not _instance_row(rocks).get("authoritative", False):
            raise OpenError(
                f"{path}: --authoritative is for the first start on a backup, and this is none; restore it again, "
                "or leave the option out"
            )
        clock.start(_high_water(rocks), accept=accepted.clock)
        if accepted.clock:
            _accept_clock(rocks, clock.now_micros())
        instance, origins, origin = _load_instance(rocks, name)
        return Opened(path, rocks, instance, origins, origin, Marker(path, marked))


def holds_data(path: Path) -> bool:
    """True for a directory in which a store was made, or begun."""
    return any((path / name).exists() for name in (backups.MARKER, MARK, backups.DATABASE))


def claim_directory(path: Path) -> DirectoryClaim:
    """Makes a directory for data, if there is none, and claims it for this process. Raises OpenError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path)
        return DirectoryClaim(path)
    except Locked:
        raise OpenError(f"{path}: another sow-server is using this data directory") from None
    except OSError as error:
        raise OpenError(f"{path}: cannot be opened ({error})") from error


def in_use(path: Path) -> bool:
    """True while a process uses a data directory. Raises OSError."""
    if not path.exists():
        return False
    try:
        DirectoryClaim(path).release()
    except Locked:
        return True
    return False


@contextlib.contextmanager
def closed_if_refused(path: Path, rocks: Rocks) -> Iterator[None]:
    """Closes the database when opening goes wrong. Raises OpenError."""
    try:
        yield
    except BaseException as error:
        rocks.close()
        if isinstance(error, Damaged):
            raise _damaged(path, error) from error
        if isinstance(error, RocksError | OSError):
            raise OpenError(f"{path}: cannot be opened ({error})") from error
        if isinstance(error, ClockBehindError):
            raise OpenError(f"{path}: {error}") from error
        raise


def _claim(path: Path, options: RocksOptions, accepted: Accepted) -> tuple[Rocks, bool, Mark | None]:
    """Claims the directory, compares it with its mark and opens the database; returns whether it is new, and its mark.
    Raises OpenError."""
    database = path / backups.DATABASE
    claim: DirectoryClaim | None = None
    try:
        claim = claim_directory(path)
        _make_private(path)
        create = not (path / backups.MARKER).exists()
        marked = load_mark(path)
        if create and (marked is not None or (database.exists() and any(_tables_and_logs(database)))):
            raise OpenError(f"{path}: the file SOW is missing, but there is data; restore it from a backup")
        if create and (database / "CURRENT").exists():
            create = False  # made, but killed before it was marked
        if marked is not None:
            marked = _held_against_mark(path, marked, accept_loss=accepted.loss)
        elif (path / MARK).exists():
            log.warning("mark_unreadable", data_dir=str(path), effect="unknown whether the data are complete")
        rocks = Rocks(database, options, create=create, on_close=claim.release)
        claim = None
    except Locked:
        raise OpenError(f"{path}: another sow-server is using this data directory") from None
    except Damaged as error:
        raise _damaged(path, error) from error
    except (RocksError, OSError) as error:
        raise OpenError(f"{path}: cannot be opened ({error})") from error
    finally:
        if claim is not None:
            claim.release()
    return rocks, create, marked


def _check_owner(path: Path) -> None:
    """Raises OpenError for a directory of another user: its owner could read and replace everything in it (rule X5)."""
    owner, own = path.stat().st_uid, os.geteuid()
    if owner != own:
        raise OpenError(
            f"{path}: belongs to another user (id {owner}), and sow-server runs as the user with the id {own}; give it "
            "to that user (chown), or take a directory inside it as the data directory"
        )


def _make_private(path: Path) -> None:
    """Takes a data directory and its files from other users (rule X5). Raises OpenError."""
    try:
        changed = tighten(path)
    except OSError as error:
        raise OpenError(
            f"{path}: other users may read or write {error.filename or path}, and its mode cannot be changed "
            f"({error.strerror or error}); give it to the user that sow-server runs as"
        ) from error
    if changed:
        log.warning("modes_tightened", data_dir=str(path), files=changed, effect="other users have no access any more")


def _damaged(path: Path, error: Exception) -> OpenError:
    return OpenError(f"{path}: the data is damaged ({error}); restore it from a backup or a replica")


def _tables_and_logs(database: Path) -> Iterator[Path]:
    """The files of a database that hold data, if it has lost the others."""
    yield from database.glob("*.sst")
    if not (database / "CURRENT").exists():
        yield from (path for path in database.glob("*.log") if path.stat().st_size)


def _held_against_mark(path: Path, marked: Mark, *, accept_loss: bool) -> Mark:
    """Compares a database with its mark; returns the mark, with the accepted loss. Raises OpenError."""
    if marked.accepted_after is not None:
        return marked  # an earlier start was interrupted before it settled the loss
    try:
        check(path, marked, lambda: first_log_needed(path / backups.DATABASE))
    except Differs as error:
        raise _damaged(path, error) from error
    except LogsMissing as error:
        if not accept_loss:
            raise OpenError(
                f"{path}: the end of the log is missing ({error}); restore it from a backup or a replica, or start "
                "once with --accept-loss to go on without"
            ) from error
        marked = replace(marked, number=marked.number + 1, accepted_after=error.after)
        save_mark(path, marked)
        log.warning(
            "loss_accepted", data_dir=str(path), after_sequence=error.after, upto=marked.sequence, what=str(error)
        )
    return marked


def _initialise(rocks: Rocks) -> None:
    batch = Batch()
    batch.puts[META] = {
        FORMAT_KEY: u32(DATA_FORMAT),
        INSTANCE_KEY: json.dumps(_new_identity() | {"origins": []}).encode(),
    }
    rocks.write_waiting(batch)
    rocks.sync()


def _check_format(rocks: Rocks, path: Path) -> None:
    found = rocks.get(META, FORMAT_KEY)
    if found is None:
        # Killed between making the database and its first row: it is still empty.
        if any(_first_key(rocks, family) for family in FAMILIES):
            raise OpenError(f"{path}: this is no sow data, or its format is missing")
        _initialise(rocks)
    elif unpack_u32(found) in UPGRADED_FORMATS:
        # An earlier version would misread what this one writes.
        batch = Batch()
        batch.puts[META][FORMAT_KEY] = u32(DATA_FORMAT)
        rocks.write_waiting(batch)
        rocks.sync()
    elif found != u32(DATA_FORMAT):
        raise OpenError(
            f"{path}: the data has format {unpack_u32(found)}, this version of sow reads format {DATA_FORMAT}"
        )


def _first_key(rocks: Rocks, family: str) -> bytes | None:
    cursor = rocks.cursor(family)
    try:
        return next(cursor.keys(b"", None, limit=1), None)
    finally:
        cursor.close()


def _write_marker(marker: Path) -> None:
    """Writes the file that says that there are data: without it an emptied directory would be taken for a new one."""
    temporary = marker.with_suffix(".new")
    with temporary.open("w") as file:
        file.write(f"sow data, format {DATA_FORMAT}, made {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(marker)
    backups.sync_directory(marker.parent)


def _instance_row(rocks: Rocks) -> dict[str, Any]:
    """The row with the identity of this instance."""
    row = rocks.get(META, INSTANCE_KEY)
    assert row is not None, "_initialise has written it"
    instance: dict[str, Any] = json.loads(row)
    return instance


def _load_instance(rocks: Rocks, name: str) -> tuple[Instance, tuple[str, ...], int]:
    """The instance, the names of the instances that wrote records (a record's `origin` is an index into them), and the
    index of this instance. New or restored data get a new index, and so does an instance with another name: its earlier
    records, under the same name, differ from the records that it writes now (rule K7)."""
    row = _instance_row(rocks)
    origins: list[str] = row["origins"]
    origin = row.get("origin")  # data of a release without such an index have none
    if origin is None or origins[origin] != name:
        origin = len(origins)
        origins.append(name)
        batch = Batch()
        batch.puts[META][INSTANCE_KEY] = json.dumps({**row, "origins": origins, "origin": origin}).encode()
        rocks.write_waiting(batch)
        rocks.sync()
    return Instance(row["id"], name, row["epoch"], row.get("authoritative", False)), tuple(origins), origin


def _restore(rocks: Rocks, path: Path, *, authoritative: bool) -> None:
    """Makes a backup a separate instance ([2])."""
    instance = _instance_row(rocks) | _new_identity() | {"authoritative": authoritative}
    batch = Batch()
    batch.puts[META][INSTANCE_KEY] = json.dumps(instance).encode()
    if not authoritative:
        batch.deletes[META].append(PLACEMENT_KEY)  # it need not be of a cell, to have a look at it
    rocks.write_waiting(batch)
    rocks.sync()
    backups.taken(path)
    log.warning("backup_restored", data_dir=str(path), epoch=instance["epoch"], authoritative=authoritative)


def _new_identity() -> dict[str, str | None]:
    """The identity of the instance from now on. It gets another number for its records, see `_load_instance`."""
    return {"id": uuid.uuid4().hex, "epoch": uuid.uuid4().hex[:12], "origin": None}


def _high_water(rocks: Rocks) -> int:
    """The latest time that the data have seen: the clock's mark, or the last commit's time, unless an operator has
    declared it wrong since."""
    mark = unpack_i64(rocks.get(META, CLOCK_KEY) or bytes(8))
    last = _last_commit(rocks)
    if last is None or last.last_sequence <= unpack_i64(rocks.get(META, ACCEPTED_KEY) or bytes(8)):
        return mark
    return max(mark, last.commit_time_micros)


def _accept_clock(rocks: Rocks, now_micros: int) -> None:
    """Remembers that the clock is right, whatever times the commits so far have: also for the starts that follow."""
    last = _last_commit(rocks)
    batch = Batch()
    batch.puts[META][CLOCK_KEY] = i64(now_micros)
    batch.puts[META][ACCEPTED_KEY] = i64(0 if last is None else last.last_sequence)
    rocks.write_waiting(batch)
    rocks.sync()


def _last_commit(rocks: Rocks) -> Commit | None:
    commits = rocks.cursor(COMMITS)
    try:
        last = commits.last()
    finally:
        commits.close()
    return None if last is None else decode_commit(*last)
