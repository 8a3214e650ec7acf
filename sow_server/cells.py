"""The cell of this server: the placement in force, its reload, the one that is prepared, and what is known of other
cells (rules C1 to C7, C15, C16).

[1]  A reload that fails changes nothing; the log and the caller hear why (rule C4).
[2]  A reload has taken effect once it is answered: changes that were let in before it are committed or refused. Other
     servers are told of a placement only then.
[3]  A reload that has begun goes to its end, also if its caller has gone.
[4]  A prepared placement is taken into use in four steps: its file is written, it is remembered as the one in force,
     what was prepared is forgotten, and then topics are served. After a fault, or a start, it goes on.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import structlog

from sow_server.access.audit import Value
from sow_server.config import ConfigError
from sow_server.engine.catalog.topics import Topics, check_name
from sow_server.engine.loads.model import LoadPhase
from sow_server.engine.loads.registry import LoadRegistry
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.placement import Placement, Places, load_placement, placement_of, replace_file
from sow_server.prepared import Prepared, PreparedFile

T = TypeVar("T")

log = structlog.get_logger(__name__)

SIGNAL: Final = "SIGHUP"
NO_PLACEMENT: Final = "this server has no placement, see [placement] file"


class Reloaded(NamedTuple):
    """The outcome of a reload."""

    version: int
    digest: str
    changed: bool
    ended_calls: int = 0
    prepared: bool = False
    """True: another one waits."""


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


class Told(NamedTuple):
    """A placement, as other servers hear of it."""

    version: int
    digest: str


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


def _may_pass(kind: Trouble, places: Places, cell: str, answers: Mapping[str, Answer | str]) -> bool:
    """True for trouble that each move of a topic makes for a moment: an old copy, or another version of the placement
    where a cell has one at all."""
    if kind is not Trouble.DIFFERS:
        return kind is Trouble.STRAYS
    version, known = places.placement.version, ("", places.digest)
    told = [answer for answer in answers.values() if not isinstance(answer, str)]
    return all(one.cell == cell and (one.digest in known or one.version != version) for one in told)


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
        if answer.digest and answer.digest != places.digest:
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
    """Reloads the placement of this server, and prepares another one. Event loop only."""

    def __init__(
        self,
        places: Places,
        readers: Executor,
        calls: Calls,
        store: CellStore,
        prepared_file: PreparedFile,
        prepared: Prepared | None = None,
    ) -> None:
        """`prepared`: that of the file; `places` holds its topics back."""
        self.places: Final = places
        self._told = Told(places.placement.version, places.digest)
        self.applies: Callable[[], bool] = lambda: False
        """True while a load that was committed before goes on with a topic that has gone."""
        self.prepared = prepared
        """The placement that waits; None: none does."""
        self.waits_for = ""
        """The reason why it waits, for people."""
        self.unanswered: Callable[[Prepared], Coroutine[Any, Any, str]] | None = None
        """Tells why a cell that the topics leave gives no answer here: the topics would be in no cell."""
        self.has_prepared: Final = asyncio.Event()
        self._prepared_file = prepared_file
        if prepared is not None:
            self.has_prepared.set()
        self.problems: dict[str, Problem] = {}
        """Those that last, by cell."""
        self.suspected: dict[str, tuple[int, Trouble]] = {}
        """Those that may pass, by cell, with their begin: told if the next look sees trouble with the cell, too."""
        self._readers = readers
        self._calls = calls
        self._store = store
        self.look: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Asks the other cells at once, as the reload of a placement is when they are most likely to differ."""
        self._looking: asyncio.Task[None] | None = None
        self._one_reload = asyncio.Lock()
        self._reloading: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[Any]] = set()
        self.lacks: Callable[[int, Prepared], str] = lambda probe, prepared: "this server has no links"
        """The reason why not everything that the sources of a placement had, when they heard a probe, is here; "":
        everything is. With the probe 0: the reason why they do not send it."""

    @property
    def told(self) -> Told:
        """The placement as other servers hear of it ([2]). The digest is "" while changes of topics that have gone are
        still being applied."""
        return self._told._replace(digest="") if self.applies() else self._told

    def heard(self, cell: str, answers: Mapping[str, Answer | str], now_micros: int) -> None:
        """Takes in what the addresses of a cell have answered (rule C7)."""
        before = self.problems.get(cell)
        found = trouble_of(self.places, cell, answers)
        suspected = self.suspected.pop(cell, None)
        if found is None:
            if self.problems.pop(cell, None) is not None:
                log.info("cell_is_well", cell=cell)
            return
        kind, message = found
        if before is None and suspected is None and _may_pass(kind, self.places, cell, answers):
            self.suspected[cell] = now_micros, kind
            return
        if before is None or before.kind is not kind:
            log.warning("cell_in_trouble", cell=cell, trouble=kind.name, cause=message)
            since = now_micros if suspected is None else suspected[0]
        else:
            since = before.since_micros
        self.problems[cell] = Problem(cell, kind, since, message)

    def forget_others(self) -> None:
        """Forgets the problems of cells that the placement no longer has."""
        for cell in (self.problems.keys() | self.suspected.keys()) - self.places.placement.cells.keys():
            self.problems.pop(cell, None)
            self.suspected.pop(cell, None)

    async def reload(self, text: str = "") -> Reloaded:
        """Reads the placement file again, or writes a text there first ([1], [2], [3]). Raises StoreError."""
        return await self._to_its_end(self._reload(text))

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def _reload(self, text: str) -> Reloaded:
        async with self._one_reload:
            places = self.places
            with self._faults():
                placement = await self._read(text)
                self.look_soon()
                before, changed = places.placement.version, placement.digest != places.digest
                if changed:
                    self._check_newer(placement)
                    places.check(placement)
                if text:
                    await self._write(text)
                if not changed and self._told.digest == places.digest:
                    return Reloaded(before, places.digest, changed=False)
                ended = await self._use(placement)
        log.info("placement_reloaded", version=placement.version, before=before, ended_calls=ended)
        return Reloaded(placement.version, places.digest, changed=changed, ended_calls=ended)

    async def _read(self, text: str) -> Placement:
        """The placement of a text; of the file, if there is none."""
        file = self.places.file
        return await self._run(lambda: placement_of(file, text) if text else load_placement(file))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def _check_newer(self, placement: Placement) -> None:
        """Raises ConfigError if it may not follow the one in force (rule C4)."""
        in_force = self.places.placement.version
        if placement.version <= in_force:
            raise ConfigError(
                f"{self.places.file}: version: {placement.version} is not above {in_force}, the version in force, and "
                "the content is another; raise it at each change"
            )

    async def _write(self, text: str) -> None:
        """Writes the placement file, on disk. Raises StoreError."""
        file = self.places.file
        try:
            await self._run(lambda: replace_file(file, text))
        except OSError as error:
            raise _not_writable(f"{file}: cannot be written ({error.strerror or error})") from error

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Tells the caller and the log of a fault ([1])."""
        try:
            yield
        except (ConfigError, ValueError) as error:
            message = str(error) if isinstance(error, ConfigError) else f"{self.places.file}: {error}"
            log.error("placement_reload_failed", cause=message)
            raise StoreError(
                Reason.INVALID_ARGUMENT, f"the placement has a fault, and nothing was changed: {message}"
            ) from error

    async def _use(self, placement: Placement, *, arrived: bool = False) -> int:
        """Takes a placement into use ([2]); returns the number of calls that ended. `arrived`: nothing is held back any
        more. Raises StoreError: called again, it goes on."""
        places, prepared, held = self.places, self.prepared, None
        await self._store.keep(placement)
        if prepared is not None and (arrived or prepared.is_over(placement, places.cell)):
            await self._forget_prepared()
            held = _NOTHING_HELD
        places.use(placement, held)
        ended = self._calls.placement_changed()
        await self._store.declare()
        await self._store.settled()
        self._told = Told(placement.version, places.digest)
        return ended

    def look_soon(self) -> None:
        """Asks the other cells now."""
        if self.look is not None:
            self._looking = asyncio.get_running_loop().create_task(self.look())

    # ---- a placement that waits (rule C16) ----

    async def prepare(self, text: str, topics: Sequence[str], sources: Sequence[str], now_micros: int) -> Reloaded:
        """Keeps a placement until the cells that the topics leave have it, and all of these topics is here ([3]). If it
        is in force already, nothing is to be prepared. Raises StoreError."""
        return await self._to_its_end(self._prepare(text, topics, sources, now_micros))

    async def _prepare(self, text: str, topics: Sequence[str], sources: Sequence[str], now_micros: int) -> Reloaded:
        async with self._one_reload:
            places, waiting = self.places, self.prepared
            with self._faults():
                placement = await self._read(text)
                in_force = Reloaded(places.placement.version, places.digest, changed=False)
                if waiting is not None and waiting.placement.digest == placement.digest:
                    return in_force._replace(prepared=True)
                if placement.digest == places.digest:
                    if self._told.digest != places.digest:
                        await self._use(placement)  # the attempt before came to no end
                    return in_force
                self._check_newer(placement)
                places.check(placement)
                if waiting is not None:
                    raise ConfigError(
                        f"version {waiting.placement.version} of the placement waits here already, with the topics "
                        f"{', '.join(waiting.leaves)}: end that move first, or forget it (sow cells move --abort)"
                    )
                leaves = await self._run(lambda: self._leaves(placement, topics))  # long with many patterns
                prepared = Prepared(placement, leaves, tuple(sources), now_micros)
            held = prepared.held(places.cell)
            if held and not sources:
                raise _invalid("prepare.sources", "is needed in the cell that the topics come to")
            lacking = self.lacks(0, prepared) if held else ""
            if held and not lacking and self.unanswered is not None:
                lacking = await self.unanswered(prepared)
            if lacking:
                raise StoreError(Reason.BEHIND, f"prepare.sources: {lacking}", field="prepare.sources")
            if not await self._run(lambda: os.access(places.file.resolve().parent, os.W_OK)):
                raise _not_writable(f"{places.file}: this server may not write in its directory")
            await self._run(lambda: self._prepared_file.save(prepared))
            places.use(places.placement, held)
            self.prepared, self.waits_for = prepared, ""
            self.has_prepared.set()
        log.info("placement_prepared", version=placement.version, topics=list(prepared.leaves))
        return in_force._replace(prepared=True)

    def _leaves(self, placement: Placement, topics: Sequence[str]) -> Mapping[str, str]:
        """The cells that topics leave. Raises StoreError."""
        in_force, leaves = self.places.placement, {}
        for topic in topics:
            check_name(topic)
            cell = in_force.cell_of(topic)
            if cell == placement.cell_of(topic):
                raise _invalid("prepare.topics", f"{topic!r} stays in the cell {cell} with this placement")
            if placement.cells.get(cell) != in_force.cells[cell]:
                raise _invalid("placement", f"[cells] {cell}: has other addresses now, while {topic!r} leaves it")
            leaves[topic] = cell
        return MappingProxyType(leaves)

    async def drop_prepared(self) -> Reloaded:
        """Forgets the placement that waits ([3]). A topic that it holds back is served, if the placement in force has
        it here. Raises StoreError."""
        return await self._to_its_end(self._drop_prepared())

    async def _drop_prepared(self) -> Reloaded:
        async with self._one_reload:
            places, prepared, ended = self.places, self.prepared, 0
            if prepared is not None:
                ended = await self._use(places.placement, arrived=True)
                log.warning("placement_dropped", version=prepared.placement.version, topics=list(prepared.leaves))
        return Reloaded(places.placement.version, places.digest, changed=False, ended_calls=ended)

    async def _forget_prepared(self) -> None:
        """Forgets what was prepared, on disk. Raises StoreError."""
        try:
            await self._run(self._prepared_file.remove)
        except OSError as error:
            raise StoreError(
                Reason.INTERNAL, f"what was prepared cannot be removed ({error.strerror or error})"
            ) from error
        self.prepared, self.waits_for = None, ""
        self.has_prepared.clear()

    async def arrived(self, prepared: Prepared) -> None:
        """Takes a placement that waits into use ([3], [4]): all cells that its topics leave have it, and everything of
        them is here. Raises StoreError."""
        await self._to_its_end(self._arrived(prepared))

    async def _arrived(self, prepared: Prepared) -> None:
        async with self._one_reload:
            if self.prepared is not prepared:
                return
            places = self.places
            placement = prepared.wanted(places)
            with self._faults():
                if await self._run(lambda: load_placement(places.file).version) < placement.version:
                    await self._write(placement.text)
            ended = await self._use(placement, arrived=True)
        log.info("placement_arrived", version=placement.version, topics=list(prepared.leaves), ended_calls=ended)

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


class Links(Protocol):
    """The links on which others send here."""

    def lacks(self, probe: int, sources: Sequence[str], topics: Sequence[str]) -> str:
        """The reason why not everything of some topics is here that the sources had when they heard a probe."""


def arriving(topics: Topics, links: Links, cell: str) -> Callable[[int, Prepared], str]:
    """Tells why the topics of a placement have not arrived in this cell, for `Cells.lacks`. Views are not sent: each
    instance has its own."""

    def lacks(probe: int, prepared: Prepared) -> str:
        sent = []
        for name in prepared.held(cell):
            topic = topics.by_name.get(name)
            if topic is None:
                return f"there is no topic {name} here"
            if topic.view is None:
                sent.append(name)
            elif not topic.view_status.complete:
                return f"the view {name} is being built"
        return links.lacks(probe, prepared.sources, sent)

    return lacks


def applying(loads: LoadRegistry, places: Places) -> Callable[[], bool]:
    """Tells whether a committed load goes on with a topic that has gone, for `Cells.applies`."""
    phases = LoadPhase.APPLYING, LoadPhase.DELETING
    return lambda: any(load.row.phase in phases and places.elsewhere(load.row.topic) for load in loads.all())


_NOTHING_HELD: Final[Mapping[str, str]] = MappingProxyType({})


def _invalid(field: str, message: str) -> StoreError:
    return StoreError(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=field)


def _not_writable(message: str) -> StoreError:
    return StoreError(
        Reason.INVALID_ARGUMENT,
        f"placement: {message}; nothing was changed. Change the file where it comes from, and reload it "
        "(docs/cells.md)",
        field="placement",
    )
