"""Backups on disk: how one is made, and how a start knows that it was given one (rule J14).

    [1]  A backup is everything up to one sequence, between two commits, and its directory appears whole or not at all.
    [2]  It is marked. A server that starts on it is another instance, with another journal than the original: the two
         must not continue at each other's positions.

A backup has the layout of a data directory, so restoring one is copying it, and starting a server on the copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from sow_server.engine.values.errors import Reason, StoreError

DATABASE: Final = "db"
MARKER: Final = "SOW"
"""Says that there is data here: without it an emptied directory would be taken for a new one."""
BACKUP: Final = "BACKUP"
"""Says that it is a backup on which no server has been started yet."""
_UNDER_WAY: Final = "backup.new"
"""In the data directory, so that table files are linked and not copied; a start removes the files of a killed
backup."""


class Made(NamedTuple):
    """A backup that was made."""

    sequence: int
    bytes: int


def make(data: Path, target: Path, *, instance: str, checkpoint: Callable[[Path], int]) -> Made:
    """Makes a backup of the store in `data`; `checkpoint` makes the database, and returns the sequence up to which it
    has everything. Raises StoreError (INVALID_ARGUMENT) if the directory is unsuitable."""
    if target.resolve().is_relative_to(data.resolve()):
        raise _impossible(target, "is in the data directory of this server")
    if os.path.lexists(target):
        raise _impossible(target, "is there already")
    if not target.parent.is_dir():
        raise _impossible(target, f"cannot be made: there is no directory {target.parent}")
    draft, copied = data / _UNDER_WAY, target.with_name(target.name + ".new")
    try:
        remove_unfinished(data)
        draft.mkdir()
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
            shutil.copytree(draft, copied)
            _sync_tree(copied)
            copied.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise _impossible(target, f"cannot be made ({error.strerror or error})") from error
    finally:
        for left in (draft, copied):
            shutil.rmtree(left, ignore_errors=True)
    return Made(sequence, size)


def remove_unfinished(data: Path) -> None:
    """Removes the files of a backup that did not complete."""
    shutil.rmtree(data / _UNDER_WAY, ignore_errors=True)


def is_backup(data: Path) -> bool:
    """Whether a directory is a backup on which no server has been started yet."""
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


def _impossible(target: Path, why: str) -> StoreError:
    return StoreError(Reason.INVALID_ARGUMENT, f"directory: {target} {why}", field="directory")
