"""A power cut for a real server process: whatever it has not synced is dropped after `kill -9`.

    power = Power(ServerProcess(tmp_path, start=False))
    power.server.start()
    ...
    power.cut(draw)  # kills it, and drops all that was not synced
    power.server.start()

The server runs with notes around each call that syncs (`tests/support/servers/powered_server.py`). A note has all that
is there *before* the call, is written down *after* it has returned, outside of the data directory, and survives the
kill. The model:

    [1]  A write-ahead log keeps its content up to the last `flush_wal(sync=True)` that returned. A draw decides on the
         later bytes: nothing is kept, or some bytes of it. The logs are one stream: where one is cut, later ones
         are empty or gone.
    [2]  A log that RocksDB has closed is kept whole once there is a table file that was begun after it: RocksDB syncs
         closed logs before it flushes their content.
    [3]  Any other file of the data directory has the content of its last `fsync`, and a directory the names that it had
         at its own last `fsync`; a draw decides whether later content is there as well.

Not modelled: table files, MANIFEST, CURRENT, OPTIONS and IDENTITY stay as they are. RocksDB syncs them and their names
itself before it counts on them, so a mistake of RocksDB's there is not found. Neither are disks that lie about a sync,
sectors that tear, a log that arrives while a part of an earlier one does not, and a log whose length arrives before its
blocks, which then read as zeros: a start refuses those as damaged. A backup that is under way when the power is cut is
left alone.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sow_server.engine.disk import backups
from tests.support.servers.powered_server import LEFT_ALONE, LOGS, begin_notes
from tests.support.servers.server import ServerProcess

TABLES: Final = ".sst"
Names = dict[str, int]
"""The inodes of files and folders by name."""


class Power:
    """Owns the notes of one server, and cuts its power. The server is one of a `Cluster`, or stands alone."""

    def __init__(self, server: ServerProcess, *, plant: str = "") -> None:
        """From its next start on the server runs with notes. `plant`: the `module:function` of a mistake to plant,
        which is called in the server's process before the server is."""
        self.server: Final = server
        self._side = server.config.parent / "power"
        self._side.mkdir(exist_ok=True)
        server.module = "tests.support.servers.powered_server"
        server.first_arguments = [str(server.data.resolve()), str(self._side), plant]

    def cut(self, draw: random.Random) -> int:
        """Kills the server and drops the writes that were not synced; returns how many bytes of logs are gone."""
        self.server.kill9()
        return self.drop(draw)

    def drop(self, draw: random.Random) -> int:
        """Drops all that the killed server had not synced; returns the number of lost bytes of logs."""
        data = self.server.data.resolve()
        noted = _read_notes(self._side)
        if noted is None or not data.exists():
            return 0
        dropped = _cut_logs(data / backups.DATABASE, noted.logs, draw)
        if data in noted.names:
            _revert(data, noted, draw)
        begin_notes(self._side, data)  # the present content has survived
        return dropped


# -- after the kill -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Noted:
    """The durable state."""

    logs: dict[str, int] = field(default_factory=dict)
    """Bytes of each log."""
    content: dict[int, bytes] = field(default_factory=dict)
    """By inode."""
    names: dict[Path, Names] = field(default_factory=dict)
    """By folder."""


def _read_notes(side: Path) -> Noted | None:
    if not (side / "notes").exists():
        return None
    noted = Noted()
    for line in (side / "notes").read_text().split("\n")[:-1]:
        match json.loads(line):
            case {"logs": sizes}:
                for name, size in sizes.items():  # of two threads that sync, the one that began later may be done first
                    noted.logs[name] = max(size, noted.logs.get(name, 0))
            case {"log": name, "size": size}:
                noted.logs[name] = max(size, noted.logs.get(name, 0))
            case {"inode": inode, "content": content}:
                noted.content[inode] = base64.b64decode(content)
            case {"folder": folder, "names": names}:
                noted.names[Path(folder)] = names
    return noted


def _cut_logs(database: Path, synced: dict[str, int], draw: random.Random) -> int:
    if not database.exists():
        return 0
    logs = sorted((path for path in database.iterdir() if path.suffix == LOGS), key=_number)
    last_table = max((_number(path) for path in database.iterdir() if path.suffix == TABLES), default=0)
    nothing = draw.random() < 0.6
    dropped, cut = 0, False
    for log, following in zip(logs, [*logs[1:], None], strict=True):
        size = log.stat().st_size
        if following is not None and last_table > _number(following):
            continue  # [2]
        kept = synced.get(log.name, 0)
        assert kept <= size, f"{log.name} has {size} bytes, {kept} were synced"
        assert not (cut and kept), f"{log.name} was synced, and an earlier log was not"
        if not cut and not nothing:
            kept = draw.randint(kept, size)
        if kept == size:
            continue
        cut = True
        dropped += size - kept
        if not kept and draw.random() < 0.5:
            log.unlink()
            continue
        os.truncate(log, kept)
    return dropped


def _number(path: Path) -> int:
    return int(path.stem)


def _revert(folder: Path, noted: Noted, draw: random.Random) -> None:
    """Leaves the durable part of a folder; a draw decides about each name and content that is not durable."""
    durable = noted.names[folder]
    for name in sorted(durable.keys() | {path.name for path in folder.iterdir()}):
        path = folder / name
        if name in LEFT_ALONE:
            continue
        found = path.stat().st_ino if path.exists() else None
        wanted = durable.get(name)
        if found != wanted and draw.random() < 0.5:
            wanted = found  # the change of the folder has reached the disk all the same
        if wanted is None:
            _remove(path)
        elif Path(folder, name) in noted.names or path.is_dir():
            noted.names.setdefault(path, {})
            path.mkdir(exist_ok=True)
            _revert(path, noted, draw)
        elif found != wanted or draw.random() < 0.5:
            content = noted.content.get(wanted, b"")
            if found == wanted and path.read_bytes() == content:
                continue
            _remove(path)
            path.write_bytes(content)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
