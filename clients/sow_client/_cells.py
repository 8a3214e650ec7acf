"""The cells of a client: where the calls of a topic go, and which cells there are (rules C10 to C14, C19). Pure: no
I/O, no clock.

The cell of the addresses that the program has given is the client's home. It names the cell and the addresses of a
topic that lives elsewhere, in the error TOPIC_ELSEWHERE of a call of which nothing was applied.

    [1]  For a topic nothing is asked, made or remembered before the first such error: a client of one server pays one
         look-up in an empty dictionary for a call.
    [2]  Only home's word about addresses counts, so credentials go to addresses of the program and of its home alone.
         Another cell's word is a doubt: what is remembered of the topic is forgotten, and home is asked again.
    [3]  A call asks home at most `ASKED_MAX` times. If home names a cell again that has denied it in the same call, the
         call begins again after each of `PAUSES`. Then it ends, and its error has the words of both.
    [4]  The cells of a client differ in their channels, and in the positions of their publishes (rule P6). All else,
         such as TLS, the token and the timeouts, is the client's.
    [5]  Calls over all cells ask home for its placement, beside home's own answer: a client of one server waits for no
         more than that. "There is no placement" holds for the connection that has told it, as only a server that starts
         can get one. A placement may change at any time, so it is asked for with each such call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from sow.v1 import admin_pb2
from sow_client import _process
from sow_client._addresses import parsed
from sow_client._channel import ADDRESS
from sow_client._failover import LOSSES
from sow_client._lines import KEPT_MAX, Home
from sow_client._statuses import closed, error_like
from sow_client._writes import Sequencer
from sow_client.errors import InvalidArgument, SowError

ELSEWHERE: Final = "TOPIC_ELSEWHERE"
PAUSES: Final = (0.02, 0.05, 0.1, *[0.2] * 10)
"""Seconds after which a call is made again that two cells have denied, each in favour of the other: so it is while a
topic moves from one to the other (rule C17)."""
ASKED_MAX: Final = 2
"""How often one call is told by home that its topic lives elsewhere."""

_SCHEMES: Final = frozenset({"unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6", "xds"})
"""Hosts that gRPC takes for a scheme: `unix:7450` is a file, to which a token may go in plain text."""

_Transport = TypeVar("_Transport")


class Place(Generic[_Transport]):
    """A cell as a client uses it ([4])."""

    __slots__ = ("cell", "key", "sequencer", "transport")

    def __init__(self, cell: str, key: str, transport: _Transport) -> None:
        """`cell`: its name, as home has told it. `key` tells the places of a client apart. Both are "" of home."""
        self.cell = cell
        self.key = key
        self.transport = transport
        self.sequencer = Sequencer()

    def begins(self, home: Home | None) -> None:
        """Something that keeps to one instance is in this cell from now on."""
        if home is not None and home.cell != self.key:
            home.cell, home.line = self.key, None


class Cells(Generic[_Transport]):
    """Owns what a client knows of cells, and the transports to those that are not its home. From any thread."""

    def __init__(self, home: _Transport, opened: Callable[[str], _Transport] | None) -> None:
        """`opened` makes the transport to addresses, and raises InvalidArgument where the token may not go there; None:
        the client cannot reach other addresses, as its channel is the program's."""
        self.home: Final = Place("", "", home)
        self._opened = opened
        self._places: dict[str, Place[_Transport]] = {}
        self._of: dict[str, Place[_Transport]] = {}
        """The place of each topic that is not at home."""
        self._all: Mapping[str, Place[_Transport]] = {"": self.home}
        """All cells by their names, as far as home has told them."""
        self.refused: Mapping[str, InvalidArgument] = {}
        """Cells to which the client does not go (rule C11), and why."""
        self._single: object = None
        """The connection on which home has said that it has no placement."""
        self._lock = threading.Lock()
        self._is_closed = False
        _process.tell(self)

    def _forked(self) -> None:
        self._lock = threading.Lock()  # each transport makes itself anew

    @property
    def others(self) -> list[Place[_Transport]]:
        """The places that are not home, in the order in which they became known."""
        with self._lock:
            return list(self._places.values())

    def way(self, topic: str, home: Home | None = None) -> Way[_Transport]:
        """The way of a call. `topic`: "" for one that has none, which stays at home. `home`: it stays in that cell,
        once it has begun there."""
        if home is not None and (home.line is not None or home.cell):
            return Way(self, topic, self._places.get(home.cell, self.home))
        return Way(self, topic, self._of.get(topic, self.home))

    def together(self, topics: Iterable[str]) -> list[list[str]]:
        """Topics by the cell in which they live, as far as calls have found it."""
        groups: dict[str, list[str]] = {}
        for topic in topics:
            groups.setdefault(self._of.get(topic, self.home).key, []).append(topic)
        return list(groups.values())

    def learn(self, topic: str, error: SowError) -> Place[_Transport] | None:
        """Remembers where home says that a topic lives; None: its answer names no address that a client may use. Raises
        InvalidArgument as `opened`, and Cancelled (CLOSED)."""
        with self._lock:  # else two calls could open two transports, or one that nobody closes
            place = self._place(error.details.get("cell", ""), error.details.get("servers", ""))
            if place is not None:
                self._of[topic] = place
                if len(self._of) > KEPT_MAX:
                    del self._of[next(iter(self._of))]
        return place

    def _place(self, cell: str, servers: str) -> Place[_Transport] | None:
        """The place of a cell, as home names it. Whoever calls it holds the lock."""
        if self._opened is None or not cell or not all(map(is_address, servers.split(","))):
            return None
        if self._is_closed:
            raise closed("client")
        key = f"{cell} {','.join(parsed(servers))}"
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = Place(cell, key, self._opened(servers))
        return place

    # ---- all cells ----

    @property
    def all(self) -> Mapping[str, Place[_Transport]]:
        """All cells to which the client goes, by their names, as home has told them last. Before that, and without a
        placement, {"": home}."""
        return self._all

    def name_of(self, place: Place[_Transport]) -> str:
        """The name of a place among several cells, as a list of all of them has it; "" where there is one."""
        if place is not self.home:
            return place.cell
        return next((cell for cell, one in self._all.items() if one is place), "") if len(self._all) > 1 else ""

    def is_to_ask(self, connection: object) -> bool:
        """True: a call over all cells asks home for its placement ([5]). `connection`: the present one to home."""
        return self._opened is not None and (self._single is None or self._single != connection)

    def placed(self, told: admin_pb2.GetPlacementResponse | None, connection: object) -> None:
        """Takes home's placement in. None: home is too old to have one. Raises Cancelled (CLOSED)."""
        if told is None or not told.cell or not told.cells:  # without cells: the caller has no identity (rule C8)
            cell = "" if told is None else told.cell
            self._all, self.refused, self._single = {cell: self.home}, {}, None if cell else connection
            return
        found: dict[str, Place[_Transport]] = {}
        refused: dict[str, InvalidArgument] = {}
        with self._lock:
            for one in told.cells:
                place: Place[_Transport] | None = self.home
                servers = ",".join(one.servers)
                cause = f"{servers!r} is no list of HOST:PORT"
                if one.name != told.cell:
                    try:
                        place = self._place(one.name, servers)
                    except InvalidArgument as error:
                        place, cause = None, error.message
                if place is None:
                    refused[one.name] = _not_there(one.name, cause)
                else:
                    found[one.name] = place
            self._all, self.refused, self._single = found, refused, None

    def at(self, place: Place[_Transport]) -> Way[_Transport]:
        """The way of a call that has no topic, in a certain cell."""
        return Way(self, "", place)

    def forget(self, topic: str, place: Place[_Transport]) -> None:
        """The cell has denied the topic, or was not reached: the next call asks home."""
        with self._lock:
            if self._of.get(topic) is place:
                del self._of[topic]

    def close(self) -> Iterable[_Transport]:
        """No transport is opened from now on. Returns those to close, home's last."""
        with self._lock:
            self._is_closed = True
            return [*(place.transport for place in self._places.values()), self.home.transport]


def is_address(text: str) -> bool:
    """True for HOST or HOST:PORT: to nothing else does a client go because a server says so. Rule: C11."""
    match = ADDRESS.fullmatch(text)
    return match is not None and match["host"].lower() not in _SCHEMES


def in_cell(cell: str, id: str) -> str:  # noqa: A002 - the name that sessions() and subscriptions() show
    """The id of something at a server, as a list over several cells shows it."""
    return f"{cell}/{id}" if cell else id


def _not_there(cell: str, cause: str) -> InvalidArgument:
    message = f"the cell {cell}: this client does not go there: {cause}"
    return InvalidArgument(message, reason="INVALID_ARGUMENT", details={"cell": cell})


class Led(Protocol):
    """A `Way`, as the machines of streams see it."""

    def leads(self, error: SowError) -> bool: ...

    def told(self, error: SowError) -> SowError: ...

    @property
    def differs(self) -> bool: ...

    def arrived(self) -> None: ...

    def begin_again(self) -> None: ...


class Way(Generic[_Transport]):
    """The way of one call to the cell of its topic, or of one stream that is made again and again."""

    __slots__ = ("_asked", "_cells", "_denied", "_home", "_missing", "_paused", "_refused", "_topic", "place")

    def __init__(self, cells: Cells[_Transport], topic: str, place: Place[_Transport]) -> None:
        self.place = place
        """Where the next call is made."""
        self._cells = cells
        self._topic = topic
        self._paused = 0  # how often the call has begun again
        self._begin()

    def _begin(self) -> None:
        self._asked = 0  # how often home has named another cell
        self._home = ""  # the name of home, as it has said
        self._denied: tuple[Place[_Transport], str] | None = None  # a cell, and the other one that it names
        self._missing: tuple[Place[_Transport], SowError] | None = None  # a cell that has no such topic
        self._refused = ""  # why the client does not go where home says

    def leads(self, error: SowError) -> bool:
        """True: nothing of the call was applied, and it is to be made again at once, at `place`."""
        place, home = self.place, self._cells.home
        if not self._topic or self._is_of_another(error):
            return False
        if place is home:
            return error.reason == ELSEWHERE and self._leads_from_home(error)
        if error.reason not in _DOUBTS:
            return False
        self._cells.forget(self._topic, place)
        if error.reason == ELSEWHERE and self._asked < ASKED_MAX:
            self._denied = place, error.details.get("cell", "")
        elif error.reason == "TOPIC_NOT_FOUND" and not self._asked:
            self._missing = place, error
        else:
            return False
        self.place = home
        return True

    def _leads_from_home(self, error: SowError) -> bool:
        self._asked += 1
        self._home = error.details.get("from_cell", "")
        try:
            found = self._cells.learn(self._topic, error)
        except InvalidArgument as refused:
            self._refused = refused.message
            return False
        if found is None:
            return False
        if self._missing is not None and self._missing[0] is found:
            self.place = found
            return False
        if self._denied is not None and (self._denied[0] is found or self._asked > ASKED_MAX):
            self._cells.forget(self._topic, found)
            return False
        self.place, self._missing = found, None
        return True

    def follow(self, error: SowError) -> float:
        """Seconds after which the call is to be made again, at `place`. Raises the error, as `told`, if it is not."""
        if self.leads(error):
            return 0.0
        pause = self.pause(error)
        if pause is None:
            raise self.told(error) from error.__cause__
        return pause

    def pause(self, error: SowError) -> float | None:
        """Seconds after which the call is to be made again, as two cells contradict each other: home is asked then.
        None: it has ended."""
        if error.reason != ELSEWHERE or not self.differs or self._paused == len(PAUSES):
            return None
        self._paused += 1
        self.begin_again()
        return PAUSES[self._paused - 1]

    def _is_of_another(self, error: SowError) -> bool:
        """True: it is about another topic of a call that has several. The cell of the first one decides."""
        return error.details.get("topic", self._topic) != self._topic

    def told(self, error: SowError) -> SowError:
        """The error as the program gets it: with the cells, where they matter."""
        if not self._topic:  # a call over all cells
            cell = self.place.cell
            return error if not cell else error_like(error, f"the cell {cell}: {error.message}", cell=cell)
        if error.reason == ELSEWHERE and self._missing is not None:
            error = self._missing[1]
        if (error.reason in LOSSES or error.reason == "TOPIC_NOT_FOUND") and self.place is not self._cells.home:
            cell = self.place.cell
            if error.details.get("cell") == cell:
                return error  # it was told already, where a stream was to be opened
            return error_like(error, f"the cell {cell}, where {self._topic} lives: {error.message}", cell=cell)
        if error.reason != ELSEWHERE:
            return error
        if self._is_of_another(error):
            return error_like(error, f"{error.message}; the topics of one call must live in one cell")
        if self._refused:
            return error_like(error, f"{error.message}; this client does not go there: {self._refused}")
        if self._denied is not None:
            place, named = self._denied
            return error_like(
                error,
                f"{self._topic}: the cell {self._home} says that it lives in the cell {place.cell}, and the cell "
                f"{place.cell} says that it lives in the cell {named}: their placements differ",
                denied_by=place.cell,
            )
        return error

    @property
    def differs(self) -> bool:
        """True: the placements of two cells differ, as they do while a new one is being loaded."""
        return self._denied is not None

    def arrived(self) -> None:
        """A call has got on at `place`: the way there is over."""
        if self._asked or self._denied is not None:
            self._begin()

    def begin_again(self) -> None:
        """After a while the call is made once more: home is asked."""
        self._begin()
        self.place = self._cells.home


_DOUBTS: Final = frozenset({ELSEWHERE, "TOPIC_NOT_FOUND", "UNREACHABLE"})
"""Answers of a cell after which home is asked; if it was not reached, with the next call: it may have moved."""
_BY_NAME: Final = frozenset(
    {
        admin_pb2.CreateTopicRequest,
        admin_pb2.AlterTopicRequest,
        admin_pb2.DescribeTopicRequest,
        admin_pb2.DeleteTopicRequest,
    }
)


def topic_of(request: object) -> str:
    """The topic of a request; "": it has none, or may have several."""
    kind = type(request)
    field = _FIELDS.get(kind)
    if field is None:
        field = _FIELDS[kind] = "name" if kind in _BY_NAME else _topic_field(kind)
    return str(getattr(request, field)) if field else ""


_FIELDS: Final[dict[type, str]] = {}
"""The field of the topic, for each message that was a request; "": it has none."""


def _topic_field(kind: type) -> str:
    if kind is admin_pb2.GetPlacementRequest:
        return ""  # every cell answers for itself
    field = kind.DESCRIPTOR.fields_by_name.get("topic") if issubclass(kind, Message) else None
    return "" if field is None or field.is_repeated else "topic"
