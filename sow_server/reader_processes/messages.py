"""The messages between the server and a reader process, on a pair of sockets: size, kind, number of the run, content.

A run is one query, one export, or one reading of a part of an export. The server opens it. The reader process tells the
cut. The server says go, and then asks for piece after piece. Both ends are of one program, started together, so their
messages need no versions. Contents of the server's requests are pickled; the answers are not.
"""

from __future__ import annotations

import asyncio
import enum
import json
import socket
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, NamedTuple

from sow_server.engine.following import Moment, TopicImage
from sow_server.engine.stored import StoredStatistics
from sow_server.engine.values.database import Damaged, RocksError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.filters.parameters import NO_VALUES, Values
from sow_server.filters.restriction import Restriction
from sow_server.query.export_parts import PartFigures
from sow_server.services.exporting import ReadPart

SOCKET_BYTES: Final = 2**20
"""The room of a socket. A piece fits, so sending it takes one call, and wakes the other end once."""
BUFFER_BYTES: Final = 2**20
"""The buffer of the server's end. A larger one is given back after its message."""
_HEAD: Final = Struct(">IBI")
_CUT: Final = Struct(">qq")
_RECORDS: Final = Struct(">I")
_MOMENT: Final = Struct(">qqqqq")


class Kind(enum.IntEnum):
    """Kinds of messages."""

    START = 1
    """The first message to a reader process: `Start`."""
    READY = 2
    """It has opened the database."""
    BEAT = 14
    """Asks the server for a moment to move on to; the number is that of the request."""
    MOMENT = 15
    """A moment, or nothing if the store makes none."""
    QUERY = 3
    """Opens a query: `OpenQuery`."""
    OPENED = 4
    """The cut is open: its sequence and its `now`."""
    GO = 5
    """The cut counts; the names of the origins in it, as JSON."""
    NEXT = 6
    """Asks for one piece."""
    PIECE = 7
    END = 8
    """There are no more pieces."""
    FAILED = 9
    """The run has failed: `describe`."""
    CLOSE = 10
    """Nobody waits for the run any more."""
    EXPORT = 12
    """Opens an export: `OpenExport`. Its one piece is `ExportFigures`; then it stays open until CLOSE."""
    READ = 13
    """Opens a reading of a part: `OpenPart`. It is told no cut, and needs no GO."""
    SKIPPED = 11
    """Records that cannot be put into a message (rule R13): `Skipped`."""


class Start(NamedTuple):
    """The settings of a reader process."""

    data_dir: str
    log_folder: str
    block_cache_bytes: int
    sort_bytes_max: int
    sorts_waiting_max: int


class OpenQuery(NamedTuple):
    """A query to open. `request` is a `QueryRequest`; `statistics` are the topic's, as of now; `caller` has the
    turn."""

    caller: str
    request: bytes
    topic: TopicImage
    statistics: StoredStatistics
    restriction: Restriction


class ExportOf(NamedTuple):
    """A topic of an export, and the number of its stored records. `text` is its filter, `given` has the values of its
    parameters."""

    topic: TopicImage
    records: int
    restriction: Restriction
    text: str
    parts: int
    given: Values = NO_VALUES


class OpenExport(NamedTuple):
    """An export to open, and the caller that has the turn."""

    caller: str
    owner: str
    topics: tuple[ExportOf, ...]


class OpenPart(NamedTuple):
    """A part of an export to read. `export` is the run of the export; `caller` has the turn."""

    caller: str
    export: int
    part: ReadPart


class Message(NamedTuple):
    """A message as it arrived. `run` is 0 where the message belongs to none."""

    kind: Kind
    run: int
    content: bytes


async def receive(reader: asyncio.StreamReader) -> Message:
    """The next message. Raises EOFError once the other end is gone."""
    try:
        size, kind, run = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        return Message(Kind(kind), run, await reader.readexactly(size) if size else b"")
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the other end is gone") from error


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)  # of a local pair, it alone counts
        end.setblocking(False)
    return ends


class Connection(asyncio.BufferedProtocol):
    """The server's end hears messages. A stream would copy each three times; this copies it once."""

    def __init__(self, take: Callable[[Message], None]) -> None:
        """`take` is called with each message. If it raises, the connection ends."""
        self.ended: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        """Done once the connection has ended, with the error that `take` has raised."""
        self._take = take
        self._head = bytearray(_HEAD.size)
        self._content = bytearray()
        self._size: int | None = None
        """The size of the content; None until the head is there."""
        self._filled = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer for the next bytes."""
        if self._size is None:
            return memoryview(self._head)[self._filled :]
        return memoryview(self._content)[self._filled : self._size]

    def buffer_updated(self, nbytes: int) -> None:
        """Some bytes have come."""
        self._filled += nbytes
        if self._filled < (_HEAD.size if self._size is None else self._size):
            return
        size, kind, run = _HEAD.unpack(self._head)
        self._filled = 0
        if self._size is None and size:
            self._size = size
            if len(self._content) < size:
                self._content = bytearray(size)
            return
        self._size = None
        content = bytes(memoryview(self._content)[:size])
        if size > BUFFER_BYTES:
            self._content = bytearray()
        self._take(Message(Kind(kind), run, content))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        if self.ended.done():
            return  # given up by the one who waited
        if isinstance(exc, OSError) or exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)


def send(writer: asyncio.StreamWriter | asyncio.WriteTransport, kind: Kind, run: int = 0, content: bytes = b"") -> None:
    """Sends a message, or nothing once the connection is closing."""
    if not writer.is_closing():
        writer.write(_HEAD.pack(len(content), kind, run))
        if content:
            writer.write(content)


# --- contents --------------------------------------------------------------------------------------------------------


def encode_cut(sequence: int, now_micros: int) -> bytes:
    """The content of OPENED."""
    return _CUT.pack(sequence, now_micros)


def decode_cut(content: bytes) -> tuple[int, int]:
    """(sequence, now) of a cut."""
    sequence, now_micros = _CUT.unpack(content)
    return sequence, now_micros


def encode_moment(moment: Moment) -> bytes:
    """The content of MOMENT."""
    return _MOMENT.pack(*moment)


def decode_moment(content: bytes) -> Moment:
    """The moment of a message."""
    return Moment(*_MOMENT.unpack(content))


class Skipped(NamedTuple):
    """Keys of records of a topic that a cut has skipped, and the time."""

    topic_id: int
    now_micros: int
    keys: tuple[bytes, ...]

    def encode(self) -> bytes:
        """The content of SKIPPED."""
        return json.dumps([self.topic_id, self.now_micros, [key.hex() for key in self.keys]]).encode()

    @classmethod
    def decode(cls, content: bytes) -> Skipped:
        """The skipped keys of a message."""
        topic_id, now_micros, keys = json.loads(content)
        return cls(topic_id, now_micros, tuple(bytes.fromhex(key) for key in keys))


class ExportFigures(NamedTuple):
    """The id of an export, and its parts."""

    id: str
    parts: tuple[PartFigures, ...]

    def encode(self) -> bytes:
        """The piece of EXPORT."""
        return json.dumps([self.id, self.parts]).encode()

    @classmethod
    def decode(cls, content: bytes) -> ExportFigures:
        """The figures of a piece."""
        export_id, parts = json.loads(content)
        return cls(export_id, tuple([PartFigures(*part) for part in parts]))


def encode_part(records: int, message: bytes) -> bytes:
    """A piece of READ: the number of records, and their message; 0 records: the footer."""
    return _RECORDS.pack(records) + message


def decode_part(content: bytes) -> tuple[int, bytes]:
    """The number of records, and their message."""
    return _RECORDS.unpack_from(content)[0], content[_RECORDS.size :]


class ReaderFault(Exception):
    """An unexpected fault in a reader process; the text is its traceback."""


def describe(error: BaseException, trace: str) -> bytes:
    """The content of FAILED. `trace`: told of errors that are not the caller's."""
    told: dict[str, object] = {"kind": "fault", "message": trace}
    if isinstance(error, StoreError):
        told = {
            "kind": "refused",
            "reason": error.reason.name,
            "message": error.message,
            "field": error.field,
            "retry_after_micros": error.retry_after_micros,
            "applied": error.applied,
            "details": error.details,
        }
    elif isinstance(error, Damaged | RocksError):
        told = {"kind": "damaged" if isinstance(error, Damaged) else "rocks", "message": str(error)}
    return json.dumps(told).encode()


def described(content: bytes) -> Exception:
    """The error that a FAILED tells."""
    told = json.loads(content)
    match told.pop("kind"):
        case "refused":
            return StoreError(Reason[told.pop("reason")], told.pop("message"), **told)
        case "damaged":
            return Damaged(told["message"])
        case "rocks":
            return RocksError(told["message"])
        case _:
            return ReaderFault(told["message"])


def encode_names(names: Sequence[str]) -> bytes:
    """The content of GO."""
    return json.dumps(list(names)).encode()


def decode_names(content: bytes) -> list[str]:
    """The names of the origins, by number."""
    return [str(name) for name in json.loads(content)]
