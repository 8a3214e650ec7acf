"""The cell of this server: the placement in force, its reload, and what is known of other cells (rules C1 to C7).

[1]  A reload that fails changes nothing; the log and the caller hear why (rule C4).
[2]  A reload has taken effect once it is answered: changes that were let in before it are committed or refused.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, Final, NamedTuple, Protocol

import structlog

from sow_server.access.audit import Value
from sow_server.config import ConfigError
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.placement import Placement, Places, load_placement

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
    STRAYS = 3


class Problem(NamedTuple):
    """Trouble with a cell (rule C7)."""

    cell: str
    kind: Trouble
    since_micros: int
    message: str


class Answer(NamedTuple):
    """The placement of another server, as it tells everybody."""

    cell: str
    """"": it has none."""
    version: int
    digest: str
    strays: int = 0
    """Topics there that are placed in the cell of this server."""


class Strays:
    """Counts the topics here that are placed in other cells (rule C5). Everybody may ask for the count of a cell, so
    it is made anew only once topics or the placement have changed."""

    def __init__(self, topics: Topics, places: Places) -> None:
        self._topics = topics
        self._places = places
        self._state: tuple[int, str] = -1, ""
        self._counts: Counter[str] = Counter()

    def count(self, cell: str) -> int:
        """The topics here that are placed in a cell, which is not this one."""
        state = self._topics.version, self._places.digest
        if state != self._state:
            homes = map(self._places.elsewhere, tuple(self._topics.by_name))
            self._counts = Counter(home for home in homes if home is not None)
            self._state = state
        return self._counts[cell]


def trouble_of(places: Places, cell: str, answers: Mapping[str, Answer | str]) -> tuple[Trouble, str] | None:
    """The trouble with a cell, and a sentence about it; None: there is none. `answers`: by address; a text is the fault
    of an address without an answer."""
    for address, answer in answers.items():
        if isinstance(answer, str):
            continue
        if not answer.cell:
            return Trouble.DIFFERS, f"{address} has no placement"
        if answer.cell != cell:
            return Trouble.DIFFERS, f"{address} says that it is the cell {answer.cell}"
        if answer.digest != places.digest:
            own, version = places.placement.version, answer.version
            versions = f"version {version}, here it is {own}" if version != own else f"another content of version {own}"
            return Trouble.DIFFERS, f"{address} has {versions}"
    if cell == places.cell:
        return None  # it answers: this is one of its servers
    faults = [f"{address}: {answer}" for address, answer in answers.items() if isinstance(answer, str)]
    if len(faults) == len(answers):
        return Trouble.UNREACHABLE, "; ".join(faults)
    for address, answer in answers.items():
        if not isinstance(answer, str) and answer.strays:
            topics = "1 topic that lives" if answer.strays == 1 else f"{answer.strays} topics that live"
            return Trouble.STRAYS, f"{address} has {topics} in {places.cell}, the cell of this server"
    return None


class CellStore(Protocol):
    """The store of this server, as far as its placement goes."""

    async def keep(self, placement: Placement) -> None:
        """Remembers the placement that is about to be in force (rule C25). Raises StoreError."""

    async def settled(self) -> None:
        """Returns once what the writer has begun is committed. Raises StoreError."""

    async def declare(self) -> None:
        """Makes the topics of the configuration that have come to this cell."""


class Calls(Protocol):
    """The calls under way, and the audit log (the authorizer)."""

    def placement_changed(self) -> int:
        """Ends the calls whose topics have gone; returns their number."""

    def tell_signal(self, event: str, signal: str, fields: Mapping[str, Value]) -> None:
        """Tells the begin or the end of a reload by a signal."""


class Cells:
    """Reloads the placement of this server. Event loop only."""

    def __init__(self, places: Places, readers: Executor, calls: Calls, store: CellStore) -> None:
        self.places: Final = places
        self.problems: dict[str, Problem] = {}
        """Those that last, by cell."""
        self._readers = readers
        self._calls = calls
        self._store = store
        self.look: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Asks the other cells at once, as the reload of a placement is when they are most likely to differ."""
        self._looking: asyncio.Task[None] | None = None
        self._one_reload = asyncio.Lock()
        self._reloading: asyncio.Task[None] | None = None

    def heard(self, cell: str, answers: Mapping[str, Answer | str], now_micros: int) -> None:
        """Takes in what the addresses of a cell have answered (rule C7)."""
        before = self.problems.get(cell)
        found = trouble_of(self.places, cell, answers)
        if found is None:
            if self.problems.pop(cell, None) is not None:
                log.info("cell_is_well", cell=cell)
            return
        kind, message = found
        if before is None or before.kind is not kind:
            log.warning("cell_in_trouble", cell=cell, trouble=kind.name, cause=message)
        since = now_micros if before is None or before.kind is not kind else before.since_micros
        self.problems[cell] = Problem(cell, kind, since, message)

    def forget_others(self) -> None:
        """Forgets the problems of cells that the placement no longer has."""
        for cell in self.problems.keys() - self.places.placement.cells.keys():
            del self.problems[cell]

    async def reload(self) -> Reloaded:
        """Reads the placement file again ([1], [2]). Raises StoreError."""
        async with self._one_reload:
            places, before = self.places, self.places.placement
            try:
                placement = await asyncio.get_running_loop().run_in_executor(self._readers, load_placement, places.file)
                self.look_soon()
                if placement.digest == places.digest:
                    return Reloaded(before.version, places.digest, changed=False)
                if placement.version <= before.version:
                    raise ConfigError(
                        f"{places.file}: version: {placement.version} is not above {before.version}, the version in "
                        "force, and the content is another; raise it at each change"
                    )
                places.check(placement)
                await self._store.keep(placement)
                places.use(placement)
            except (ConfigError, ValueError) as error:
                message = str(error) if isinstance(error, ConfigError) else f"{places.file}: {error}"
                log.error("placement_reload_failed", cause=message)
                raise StoreError(
                    Reason.INVALID_ARGUMENT, f"the placement has a fault, and nothing was changed: {message}"
                ) from error
            ended = self._calls.placement_changed()
            await self._store.declare()
            await self._store.settled()
        log.info("placement_reloaded", version=placement.version, before=before.version, ended_calls=ended)
        return Reloaded(placement.version, places.digest, changed=True, ended_calls=ended)

    def look_soon(self) -> None:
        """Asks the other cells now."""
        if self.look is not None:
            self._looking = asyncio.get_running_loop().create_task(self.look())

    def reload_soon(self) -> None:
        """Reads the placement file again (SIGHUP)."""
        self._reloading = asyncio.get_running_loop().create_task(self._reload_by_signal())

    async def _reload_by_signal(self) -> None:
        self._calls.tell_signal("begin", SIGNAL, {"decision": "allowed"})
        try:
            reloaded = await self.reload()
        except StoreError as error:  # the log has it
            self._calls.tell_signal("end", SIGNAL, {"code": error.reason.name})
        else:
            self._calls.tell_signal("end", SIGNAL, {"code": "OK", "placement_version": reloaded.version})
