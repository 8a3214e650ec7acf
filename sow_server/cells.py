"""The cell of this server: the placement in force, its reload, and what is known of other cells (rules C1 to C7).

[1]  A reload that fails changes nothing; the log and the caller hear why (rule C4).
[2]  A reload has taken effect once it is answered: changes that were let in before it are committed or refused.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from sow_server.config import ConfigError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.placement import Places, load_placement

log = structlog.get_logger(__name__)

SIGNAL: Final = "SIGHUP"
NO_PLACEMENT: Final = "this server has no placement, see [placement] file"


class Reloaded(NamedTuple):
    """The outcome of a reload."""

    version: int
    digest: str
    changed: bool
    ended_calls: int = 0


class Trouble(enum.Enum):
    """The kinds of trouble with another cell, by their numbers in the contract."""

    DIFFERS = 1
    UNREACHABLE = 2


class Problem(NamedTuple):
    """Trouble with a cell (rule C7)."""

    cell: str
    kind: Trouble
    since_micros: int
    message: str


class Cells:
    """Reloads the placement of this server. Event loop only."""

    def __init__(
        self,
        places: Places,
        file: Path,
        readers: Executor,
        *,
        changed: Callable[[], int],
        settled: Callable[[], Awaitable[object]],
        tell_signal: Callable[[str, str, Mapping[str, str | int]], None],
    ) -> None:
        """`changed`: ends the calls whose topics have gone, and returns their number. `settled`: returns once what the
        writer has begun is committed. `tell_signal`: tells the audit log of a reload by a signal."""
        self.places: Final = places
        self.problems: dict[str, Problem] = {}
        """By cell."""
        self._file = file
        self._readers = readers
        self._changed = changed
        self._settled = settled
        self._tell_signal = tell_signal
        self._one_reload = asyncio.Lock()
        self._reloading: asyncio.Task[None] | None = None

    async def reload(self) -> Reloaded:
        """Reads the placement file again ([1], [2]). Raises StoreError."""
        async with self._one_reload:
            places, before = self.places, self.places.placement
            try:
                placement = await asyncio.get_running_loop().run_in_executor(self._readers, load_placement, self._file)
                if placement.digest == places.digest:
                    return Reloaded(before.version, places.digest, changed=False)
                if placement.version <= before.version:
                    raise ConfigError(
                        f"{self._file}: version: {placement.version} is not above {before.version}, the version in "
                        "force, and the content is another; raise it at each change"
                    )
                places.use(placement)
            except (ConfigError, ValueError) as error:
                message = str(error) if isinstance(error, ConfigError) else f"{self._file}: {error}"
                log.error("placement_reload_failed", cause=message)
                raise StoreError(
                    Reason.INVALID_ARGUMENT, f"the placement has a fault, and nothing was changed: {message}"
                ) from error
            ended = self._changed()
            await self._settled()
        log.info("placement_reloaded", version=placement.version, before=before.version, ended_calls=ended)
        return Reloaded(placement.version, places.digest, changed=True, ended_calls=ended)

    def reload_soon(self) -> None:
        """Reads the placement file again (SIGHUP)."""
        self._reloading = asyncio.get_running_loop().create_task(self._reload_by_signal())

    async def _reload_by_signal(self) -> None:
        self._tell_signal("begin", SIGNAL, {"decision": "allowed"})
        try:
            reloaded = await self.reload()
        except StoreError as error:  # the log has it
            self._tell_signal("end", SIGNAL, {"code": error.reason.name})
        else:
            self._tell_signal("end", SIGNAL, {"code": "OK", "placement_version": reloaded.version})
