"""Sessions: who has logged in with which token, and their connections to the servers.

[1]  A session's id, its CSRF token and a one-time code are 32 random bytes each. Sessions are in memory only.
[2]  A token is given to the clients of its session, which call the servers named at the start, and those that the
     placement of one of these names (rule C23). No other server's word counts.
[3]  A session ends when its user logs out, IDLE_SECONDS after its last use, and AGE_SECONDS after it began. Its sockets
     and its calls end with it.
[4]  There are at most SESSIONS_MAX sessions. Whoever has most of them makes room, with the one unused for longest.
[5]  Only a log-in that fails waits: its answer comes WAIT_SECONDS late, once its address has failed ATTEMPTS_MAX times
     within ATTEMPTS_SECONDS. A good token is never locked out, as all people behind a proxy have one address.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Final, TypeAlias

from sow_client import AsyncClient, ConfigSetting, FailedPrecondition, Figures, InvalidArgument, LogLine, SowError
from sow_client._addresses import parsed
from sow_client._cells import is_address
from sow_console.comparing import Comparison
from sow_console.figures import Watch, figures_of, hour_of, log_of
from sow_console.instances import Known, Watched

IDLE_SECONDS: Final = 3_600.0
AGE_SECONDS: Final = 12 * 3_600.0
SESSIONS_MAX: Final = 256
SERVERS_MAX: Final = 64
"""Servers of a session, those named at the start among them; of more cells the first ones are shown."""
ATTEMPTS_MAX: Final = 5
ATTEMPTS_SECONDS: Final = 60.0
WAIT_SECONDS: Final = 1.0
HELD_MAX: Final = 100
"""Failed log-ins that wait at the same time; others are answered at once."""
ASKED_MAX: Final = 128
"""Log-ins that the servers are asked about at the same time; others wait for their turn. A server keeps up to 100
failed ones of an address waiting, so some more get through to it meanwhile."""
ADDRESSES_MAX: Final = 1_000
"""Addresses whose failed attempts are remembered."""

Connect: TypeAlias = Callable[[str, str | None], AsyncClient]
"""Makes the client of a server that shows a token, or none; called on the event loop."""


class Session:
    """Owns the clients of one person."""

    def __init__(
        self,
        identities: Mapping[str, str],
        token: str | None,
        connect: Connect,
        now: float,
        named: Sequence[str] = (),
    ) -> None:
        """`identities`: the person's name at each server that knows it. `named`: the servers named at the start."""
        self.id = secrets.token_urlsafe(32)
        self.csrf = secrets.token_urlsafe(32)
        self.identities = dict(identities)
        self.person: Final = tuple(sorted(self.identities.items()))
        """Whose session it is: the person's names at the servers, at its begin."""
        self.refused: dict[str, str] = {}
        """Servers that a placement names, and to which a token does not go, each with the reason."""
        self._named = tuple(named)
        self.began = now
        self.used = now
        self.ended = asyncio.Event()
        self.comparisons: dict[str, Comparison] = {}
        """The last one of each server."""
        self._token = token
        self._connect = connect
        self._clients: dict[str, AsyncClient] = {}
        self._instances: dict[str, Watched] = {}
        self._figures: dict[tuple[str, bool], Watch[Figures]] = {}
        self._logs: dict[str, Watch[LogLine]] = {}
        self._settings: dict[str, list[ConfigSetting]] = {}

    @property
    def has_token(self) -> bool:
        """True if it shows a token to the servers."""
        return self._token is not None

    # ---- the servers ----

    @property
    def servers(self) -> tuple[str, ...]:
        """Those named at the start, then those of all cells, as far as the first ones have told them by now ([2])."""
        named = [self._known(server) for server in self._named]
        ids = {known.instance.id for known in named if known.instance is not None and known.instance.id}
        found = dict.fromkeys(self._named)
        for server in dict.fromkeys(one for known in named for servers in _cells(known).values() for one in servers):
            instance = self._known(server).instance
            is_alias = server not in found and instance is not None and instance.id in ids
            if not is_alias and len(found) < SERVERS_MAX and self._goes_to(server):
                found[server] = None
        return tuple(found)

    def cells(self, server: str) -> Mapping[str, tuple[str, ...]]:
        """The servers of all cells of the name space of this server, by the names of the cells, as a server named at
        the start has told them ([2]). Empty: there are no cells, or they are not known."""
        told = [_cells(self._known(one)) for one in self._named]
        own = [cells for one, cells in zip(self._named, told, strict=True) if one == server]
        containing = [cells for cells in told if any(server in servers for servers in cells.values())]
        return next(filter(None, (*own, *containing)), {})

    def cell(self, server: str) -> str:
        """The cell of a server; "": it has none, or it is not known."""
        placed = next((cell for cell, servers in self.cells(server).items() if server in servers), "")
        placement = self._known(server).placement
        return placed if placed or placement is None else placement.cell

    def servers_of(self, cell: str, server: str) -> list[str]:
        """The servers of a cell in the name space of `server`."""
        cells = self.cells(server)
        return [one for one in self.servers if self.cell(one) == cell and self.cells(one) == cells]

    def home(self, server: str) -> str:
        """The server named at the start that tells the cells of the name space of `server`: itself, or if possible one
        that answers ([2])."""
        cells = self.cells(server)
        telling = [one for one in self._named if one == server or (cells and self.cells(one) == cells)]
        return min(telling, key=lambda one: (one != server, self.is_lost(one)), default=server)

    def is_lost(self, server: str) -> bool:
        """True if it has not answered the last look."""
        return self._known(server).lost

    async def knows(self, server: str) -> bool:
        """True for one of `servers`, after a look at those named at the start where that may tell more."""
        if server not in self.servers or not all(self._known(one).instance for one in self._named):
            await asyncio.gather(*(self.instance(one).look() for one in self._named))
        if server not in self.servers:
            return False
        if self.has_token and server not in (*self._named, *self.identities):
            known = await self.instance(server).look()
            if known.instance is not None and not known.lost:
                self.identities[server] = ""
                with suppress(SowError):
                    self.identities[server] = (await self.client(server).whoami()).name
        return True

    async def place(self, topic: str, server: str) -> str:
        """The server where a page about a topic is to be: `server` itself, or one of the topic's cell, if possible one
        that serves."""
        if not topic or len(self.cells(server)) < 2 or self._known(server).lost:
            return server
        try:
            cell = (await self.client(self.home(server)).placement(topic)).topic_cell
        except SowError:
            return server
        known = {one: self._known(one) for one in self.servers_of(cell, server)}
        serving = [one for one, of in known.items() if of.instance and of.instance.serving and not of.lost]
        return server if server in known else next(iter((*serving, *known)), server)

    def _known(self, server: str) -> Known:
        found = self._instances.get(server)
        return Known() if found is None else found.known

    def _goes_to(self, server: str) -> bool:
        try:
            self.client(server)
        except InvalidArgument as error:  # such as a token that would go to another machine in plain text
            self.refused[server] = error.message
            return False
        return True

    def client(self, server: str) -> AsyncClient:
        """The person's client of this server, one of `servers`. At one that was not named at the start it stays in the
        cell: else that server's word about others would count ([2])."""
        if (found := self._clients.get(server)) is None:
            found = self._clients[server] = self._connect(server, self._token)
        return found if server in self._named else found.here

    def instance(self, server: str) -> Watched:
        """The instance, which is asked without waiting for long."""
        if (found := self._instances.get(server)) is None:
            found = self._instances[server] = Watched(self.client(server))
        return found

    def figures(self, server: str, *, hour: bool = False) -> Watch[Figures]:
        """The server's figures, as the person may see them: each second, or of the last hour."""
        if (found := self._figures.get((server, hour))) is None:
            found = self._figures[server, hour] = (hour_of if hour else figures_of)(self.client(server))
        return found

    def log(self, server: str) -> Watch[LogLine]:
        """The server's log, if the person may see it."""
        if (found := self._logs.get(server)) is None:
            found = self._logs[server] = log_of(self.client(server))
        return found

    async def settings(self, server: str, *, anew: bool) -> list[ConfigSetting]:
        """The server's configuration, asked for `anew` or as it was known: it changes with a restart only, and the
        server audits each call."""
        if anew or server not in self._settings:
            self._settings[server] = await self.client(server).config()
        return self._settings[server]

    def compare(
        self, server: str, peer: str, topics: Sequence[str], *, repairs: bool, topics_total: int | None
    ) -> Comparison:
        """Begins a comparison with a peer, or a repair. Raises FailedPrecondition while one is under way there."""
        before = self.comparisons.get(server)
        if before is not None and before.ended is None:
            raise FailedPrecondition("one is under way already", reason="FAILED_PRECONDITION")
        made = Comparison(
            self.client(server), peer, topics, repairs=repairs, topics_total=topics_total, now=lambda: datetime.now(UTC)
        )
        self.comparisons[server] = made
        return made

    async def end(self) -> None:
        """Ends its sockets and closes its connections."""
        self.ended.set()
        self._token = None
        for comparison in self.comparisons.values():
            await comparison.close()
        for instance in self._instances.values():
            await instance.close()
        for figures in self._figures.values():
            await figures.close()
        for log in self._logs.values():
            await log.close()
        for client in self._clients.values():
            await client.close()


class Sessions:
    """Owns the sessions, the one-time code, and the failed attempts."""

    def __init__(self, servers: Sequence[str], connect: Connect, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self.servers = tuple(servers)
        self._connect = connect
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._code: str | None = None
        self._failed: dict[str, deque[float]] = {}
        self._held = 0
        self.asking = asyncio.Semaphore(ASKED_MAX)

    async def begin(self, identities: Mapping[str, str], token: str | None) -> Session:
        """A new session."""
        await self.sweep()
        while len(self._sessions) >= SESSIONS_MAX:
            held = Counter(one.person for one in self._sessions.values())
            await self.end(min(self._sessions.values(), key=lambda one: (-held[one.person], one.used)))
        session = Session(identities, token, self._connect, self._clock(), self.servers)
        self._sessions[session.id] = session
        return session

    def find(self, session_id: str | None) -> Session | None:
        """The session with this id, which is in use now; None: it has ended, or there was none."""
        if session_id is None or (session := self._sessions.get(session_id)) is None or self._is_over(session):
            return None
        session.used = self._clock()
        return session

    async def end(self, session: Session) -> None:
        """Ends a session."""
        if self._sessions.pop(session.id, None) is not None:
            await session.end()

    async def sweep(self) -> None:
        """Ends the sessions whose time is over."""
        for session in [one for one in self._sessions.values() if self._is_over(one)]:
            await self.end(session)

    async def close(self) -> None:
        """Ends all of them."""
        for session in list(self._sessions.values()):
            await self.end(session)

    def client(self, server: str, token: str) -> AsyncClient:
        """A client for the time of a log-in; the caller closes it."""
        return self._connect(server, token)

    # ---- one-time codes ----

    def new_code(self) -> str:
        """A code that begins one session without a token; an earlier code is void."""
        self._code = secrets.token_urlsafe(32)
        return self._code

    def use_code(self, code: str) -> bool:
        """True if this is the code. The code is void afterwards."""
        if self._code is None or not same(code, self._code):
            return False
        self._code = None
        return True

    # ---- failed attempts ----

    @contextmanager
    def failing(self, address: str) -> Iterator[float]:
        """Counts a failed log-in. The seconds that its answer waits, 0: none; it counts as waiting until the end of the
        block."""
        now = self._clock()
        failed = self._failed.pop(address, None) or deque(maxlen=ATTEMPTS_MAX + 1)
        if len(self._failed) >= ADDRESSES_MAX:
            del self._failed[next(iter(self._failed))]
        self._failed[address] = failed
        failed.append(now)
        while failed[0] <= now - ATTEMPTS_SECONDS:
            failed.popleft()
        if len(failed) <= ATTEMPTS_MAX or self._held >= HELD_MAX:
            yield 0.0
            return
        self._held += 1
        try:
            yield WAIT_SECONDS
        finally:
            self._held -= 1

    def _is_over(self, session: Session) -> bool:
        now = self._clock()
        return now >= min(session.used + IDLE_SECONDS, session.began + AGE_SECONDS)


def _cells(known: Known) -> Mapping[str, tuple[str, ...]]:
    """The servers of all cells, as an instance names them: HOST:PORT, and nothing in gRPC's own notation (C11)."""
    cells = {} if known.placement is None else known.placement.cells
    return {cell: _parsed(servers) for cell, servers in cells.items()}


def _parsed(servers: Sequence[str]) -> tuple[str, ...]:
    try:
        return parsed(list(filter(is_address, servers)))
    except InvalidArgument:
        return ()


def same(given: str, expected: str) -> bool:
    """True if two secrets are equal. The time does not depend on how much of them is equal."""
    return hmac.compare_digest(given.encode(), expected.encode())
