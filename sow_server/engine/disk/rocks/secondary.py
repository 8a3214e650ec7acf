"""A handle that follows the database from another process."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import rocksdict

from sow_server.engine.disk.rocks.handle import Handle
from sow_server.engine.disk.rocks.options import FOLLOWED, MARK_BYTES, MARK_KEY, all_family_options, database_options
from sow_server.engine.disk.rocks.rocks_errors import translate
from sow_server.engine.values.database import Damaged, Failed, RocksError, RocksOptions, Stale

TRIES: Final = 1000
"""Attempts to catch up. Nearly always the first succeeds; another is needed only if a log was removed meanwhile."""


class Secondary(Handle):
    """Reads the database of another process, and writes nothing to it. Its state moves in `catch_up` and `move` alone:
    between two calls all column families show one state, and so do cursors that are opened there."""

    def __init__(self, path: Path, options: RocksOptions, *, log_folder: Path) -> None:
        """Opens the database at `path`; call `catch_up` before reading. RocksDB puts its own messages into
        `log_folder`. Raises RocksError."""
        super().__init__(
            lambda: rocksdict.Rdict(
                str(path),
                options=database_options(path, options, create=False),
                column_families=all_family_options(options),
                access_type=rocksdict.AccessType.secondary(str(log_folder)),
            ),
            path,
            on_close=None,
        )
        self.cache_bytes: Final = options.block_cache_bytes

    def catch_up(self, number: int) -> None:
        """Moves to a state between two writes: to that after the write `number`, or to a later one. That write is a
        beat (`Batch.beat`), made after the last call of `catch_up` or `move` has returned (rocks [15]). Cursors that
        are open keep their state. Raises Stale, RocksError."""
        self.move()
        for name in FOLLOWED:
            try:
                row: bytes | None = self._family(name).get(MARK_KEY)
            except Exception as error:
                raise translate(error) from error
            found = 0 if row is None else int.from_bytes(row[:MARK_BYTES], "big")
            if found < number:
                raise Stale(f"the column family {name} shows the write {found}, and {number} was made")

    def move(self) -> None:
        """Moves on, to a state that may not be read: the next `catch_up` then has less to do. Raises RocksError."""
        failed: RocksError = Failed("it cannot be followed")
        for _ in range(TRIES):
            before = self._logs()
            try:
                self._open().try_catch_up_with_primary()
            except Exception as error:
                failed = translate(error)
                if isinstance(failed, Damaged):
                    raise failed from error
                continue  # a file that was listed is removed already; the next list is without it
            if before <= self._logs():  # rocks [14]
                return
            failed = Failed("the logs are removed faster than they can be read")
        raise failed

    def log_bytes(self) -> int:
        """Bytes of the logs, about: one may be removed between two looks at it."""
        size = 0
        for path in self._path.glob("*.log"):
            try:
                size += path.stat().st_size
            except FileNotFoundError:
                continue
        return size

    def _logs(self) -> set[str]:
        return {path.name for path in self._path.glob("*.log")}
