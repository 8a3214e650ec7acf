"""A server that notes its syncs, for tests that cut its power:

    python -m tests.support.servers.powered_server DATA SIDE PLANT SERVER_ARGUMENTS…

`tests/support/servers/power.py` uses the notes. PLANT is the `module:function` of a mistake to plant, or empty.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import rocksdict

from sow_server import __main__
from sow_server.engine.disk import backups

LOGS: Final = ".log"
LEFT_ALONE: Final = (backups.DATABASE, "backup.new")
"""Folders of the data directory whose names and files are RocksDB's matter, or nobody's yet."""
Note = dict[str, object]
FlushWal = Callable[[rocksdict.Rdict, bool], None]


class Notes:
    """Owns the file of notes, and what keeps their inodes from being used again."""

    def __init__(self, data: Path, side: Path) -> None:
        self._data = data
        begin_notes(side, data)
        self._notes = os.open(side / "notes", os.O_WRONLY | os.O_APPEND)
        self._held: dict[Path, list[int]] = {}
        for folder in _folders(data):
            self._hold(folder)

    def around_flush(self, flush_wal: FlushWal) -> FlushWal:
        """RocksDB's `flush_wal`, with a note."""

        def noted(database: rocksdict.Rdict, sync: bool) -> None:
            sizes = _log_sizes(self._data)
            flush_wal(database, sync)
            if sync:
                self._write({"logs": sizes})

        return noted

    def around_fsync(self, fsync: Callable[[int], None]) -> Callable[[int], None]:
        """The system's `fsync`, with a note."""

        def noted(number: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            if path.suffix == LOGS and path.parent == self._data / backups.DATABASE:
                size = os.fstat(number).st_size
                fsync(number)
                self._write({"log": path.name, "size": size})
                return
            mine = path.is_relative_to(self._data) and not set(LEFT_ALONE) & set(path.relative_to(self._data).parts)
            note: Note = {}
            if mine:
                # By its descriptor: it may have another name by now.
                is_folder = stat.S_ISDIR(os.fstat(number).st_mode)
                note = _folder_note(path) if is_folder else _file_note(Path(f"/proc/self/fd/{number}"))
            fsync(number)
            if mine:
                self._write(note)
                if "folder" in note:
                    self._hold(path)

        return noted

    def _write(self, note: Note) -> None:
        # One call: the note is there whole or, if the process is killed before, not at all.
        os.write(self._notes, json.dumps(note).encode() + b"\n")

    def _hold(self, folder: Path) -> None:
        """Keeps the files open that a folder is durable with: the inode of one that is removed stays its own."""
        before = self._held.get(folder, [])
        self._held[folder] = [os.open(path, os.O_RDONLY) for path in _files(folder)]
        for number in before:
            os.close(number)


def begin_notes(side: Path, data: Path) -> None:
    """Begins the notes anew: all that is there is durable."""
    notes: list[Note] = [{"logs": _log_sizes(data)}]
    for folder in _folders(data):
        notes += [_file_note(path) for path in _files(folder)]
        notes.append(_folder_note(folder))
    fresh = side / "notes.new"
    fresh.write_text("".join(json.dumps(note) + "\n" for note in notes))
    fresh.rename(side / "notes")


def _log_sizes(data: Path) -> dict[str, int]:
    try:
        with os.scandir(data / backups.DATABASE) as found:
            return {entry.name: entry.stat().st_size for entry in found if entry.name.endswith(LOGS)}
    except FileNotFoundError:
        return {}


def _file_note(path: Path) -> Note:
    return {"inode": path.stat().st_ino, "content": base64.b64encode(path.read_bytes()).decode()}


def _folder_note(folder: Path) -> Note:
    return {"folder": str(folder), "names": {path.name: path.stat().st_ino for path in folder.iterdir()}}


def _folders(data: Path) -> Iterator[Path]:
    if not data.exists():
        return
    yield data
    for path in data.iterdir():
        if path.is_dir() and path.name not in LEFT_ALONE:
            yield from _folders(path)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]


def main(arguments: list[str]) -> int:
    """Runs the server with notes, with the arguments of this module in front of its own; returns its exit code."""
    data, side, plant, *rest = arguments
    notes = Notes(Path(data), Path(side))
    # Below the one module of the server that knows RocksDB, so that a mistake in there counts, too.
    rocksdict.Rdict.flush_wal = notes.around_flush(rocksdict.Rdict.flush_wal)  # type: ignore[method-assign,assignment]  # replaced on purpose, to note each flush
    os.fsync = notes.around_fsync(os.fsync)  # type: ignore[assignment]  # it also takes objects with a descriptor
    if plant:
        module, _, name = plant.partition(":")
        getattr(importlib.import_module(module), name)()
    return __main__.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
