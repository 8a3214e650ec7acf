"""Backups on disk: how one is made, and how a start knows that it was given one (rule J14).

    [1]  A backup is everything up to one sequence, between two commits, and its directory appears whole or not at all.
    [2]  It is marked. A server that starts on it is another instance, with another journal than the original: the two
         must not continue at each other's positions.
    [3]  Its name is no path, and an error tells a caller nothing of other files; the log has the paths.

A backup has the layout of a data directory, so restoring one is copying it, and starting a server on the copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from sow_server.engine.values.database import Damaged, DiskFull, RocksError
from sow_server.engine.values.errors import Reason, StoreError

log = structlog.get_logger(__name__)

DATABASE: Final = "db"
MARKER: Final = "SOW"
"""Says that there is data here: without it an emptied directory would be taken for a new one."""
BACKUP: Final = "BACKUP"
"""Says that it is a backup on which no server has been started yet."""
DROPPED: Final = "dropped"
"""The folder of records that replication has dropped."""
_UNDER_WAY: Final = "backup.new"
"""In the data directory, so that table files are linked and not copied; a start removes the files of a killed
backup."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Made(NamedTuple):
    """A backup that was made."""

    sequence: int
    bytes: int


def make(data: Path, root: Path, name: str, *, instance: str, checkpoint: Callable[[Path], int]) -> Made:
    """Makes the backup `name` of the store in `data`, a directory in `root`, which is made if it is missing.
    `checkpoint` makes the database, and returns the sequence up to which it has everything.

    Raises StoreError: INVALID_ARGUMENT, BACKUP_EXISTS, BACKUP_UNAVAILABLE, DISK_FULL, DATA_DAMAGED ([3]).
    """
    _check_name(name)
    target, draft = root / name, data / _UNDER_WAY
    copied = root / f".{name}@{instance}.new"  # neither name may have this form
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.path.lexists(target):
            raise StoreError(Reason.BACKUP_EXISTS, f"name: there is a backup {name} already", field="name")
        remove_unfinished(data)
        for left in root.glob(f".*@{instance}.new"):
            shutil.rmtree(left, ignore_errors=True)
        draft.mkdir(mode=0o700)
        sequence = checkpoint(draft / DATABASE)
        shutil.copyfile(data / MARKER, draft / MARKER)
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        (draft / BACKUP).write_text(f"backup of {instance} up to sequence {sequence}, made {made}\n")
        _sync_tree(draft)
        size = sum(file.stat().st_size for file in draft.rglob("*") if file.is_file())
        try:
            draft.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            # Another file system: beside its place first, so that an incomplete copy is never taken for a backup.
            _copy_tree(draft, copied)
            _sync_tree(copied)
            copied.rename(target)
        sync_directory(root)
    except (OSError, RocksError) as error:
        log.error("backup_failed", backup=name, root=str(root), cause=str(error))
        raise _failed(name, error) from error
    finally:
        for left in (draft, copied):
            shutil.rmtree(left, ignore_errors=True)
    return Made(sequence, size)


def remove_unfinished(data: Path) -> None:
    """Removes the files of a backup that did not complete."""
    shutil.rmtree(data / _UNDER_WAY, ignore_errors=True)


def is_backup(data: Path) -> bool:
    """True if a directory is a backup on which no server has been started yet."""
    return (data / BACKUP).exists()


def taken(data: Path) -> None:
    """The directory is an instance's data from now on."""
    with contextlib.suppress(FileNotFoundError):
        (data / BACKUP).unlink()
    sync_directory(data)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _sync_tree(path: Path) -> None:
    for folder, _, files in os.walk(path):
        for name in files:
            file = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        sync_directory(Path(folder))


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise StoreError(
            Reason.INVALID_ARGUMENT,
            "name: the name of a backup is 1 to 100 of [A-Za-z0-9_.-], without a '.' at its beginning; it is no path",
            field="name",
        )


def _copy_tree(source: Path, target: Path) -> None:
    """Copies a directory and ends at the first error; `shutil.copytree` would try all other files on a full disk."""
    for folder, _, files in os.walk(source):
        copy = target / Path(folder).relative_to(source)
        copy.mkdir(mode=0o700)
        for name in files:
            shutil.copyfile(Path(folder, name), copy / name)


def _failed(name: str, error: OSError | RocksError) -> StoreError:
    """The answer to a caller. The errors of the system and of RocksDB contain paths ([3])."""
    if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in _FULL):
        return StoreError(Reason.DISK_FULL, f"the backup {name} cannot be made: the disk is full")
    if isinstance(error, Damaged):
        return StoreError(Reason.DATA_DAMAGED, f"the backup {name} cannot be made: stored data is damaged")
    why = error.strerror if isinstance(error, OSError) and error.strerror else "the database cannot be copied"
    return StoreError(
        Reason.BACKUP_UNAVAILABLE, f"the backup {name} cannot be made ({why}); the server's log has the details"
    )
