"""The answer to a get: on the event loop while that takes microseconds, otherwise in pieces on reader threads.

[1]  The bytes that were really read decide, not an estimate: the loop reads one record after the other, and judges and
     projects them only once it knows that all of them are few bytes.
[2]  Equal keys are read, judged and projected once.
[3]  A piece on a thread is bounded by time. Between two pieces other callers have their turns, and a caller that has
     gone has no more pieces.
[4]  Of one caller, at most `LONG_GETS` gets that are under way hold records.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from sow.v1 import sow_pb2, types_pb2
from sow_server.access.caller import Granted
from sow_server.engine.doors import Reads
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.stored import PAYLOAD, read_header
from sow_server.engine.values import lifetimes
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import PermittedRows
from sow_server.engine.values.turns import CALLER
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.query.filtering import permitted
from sow_server.query.projection import projection
from sow_server.query.scan import point_keys
from sow_server.services.wire import convert

GET_BYTES_MAX: Final = 16 * 2**20
"""Payloads and keys of one answer: together with the other fields they stay below the largest gRPC message."""
HERE_KEYS: Final = 256
HERE_KEYS_DECODED: Final = 64
HERE_PATHS: Final = 16
HERE_BYTES: Final = 256 * 2**10
"""Keys, keys of records that are decoded, paths of a `select`, and bytes of records that a get on the event loop has at
most: together less than a millisecond. A key costs 3 µs, and a change of threads fifty."""
DECODED: Final = 16
"""A byte that is decoded counts as so many that are only copied."""
READ_KEYS: Final = 32
READ_BYTES: Final = 256 * 2**10
"""Keys that are read at a time on a thread, and about how many bytes: 10,000 records could be gigabytes, and most of it
is refused."""
GROUP_BYTES: Final = 64 * 2**10
PIECE_SECONDS: Final = 0.005
LONG_GETS: Final = 2
"""More than the reader threads that one caller has by default (fair_readers [2]), so a thread always finds work."""


class Getting:
    """One get. Its steps run on one thread at a time."""

    def __init__(
        self,
        reading: Reads,
        granted: Granted,
        request: sow_pb2.GetRequest,
        below_micros: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`below_micros`: `ending` has the records with less than this left. `clock`: in seconds."""
        self._reading = reading
        self._topic, self._restriction = granted
        self._request = request
        self._below_micros = below_micros
        self._clock = clock
        self._paths = len(request.select.include) + len(request.select.exclude)
        self._decodes = self._paths > 0 or self._restriction != UNRESTRICTED
        self._prepared = False
        self._keys: tuple[bytes, ...] = ()
        self._unread: deque[bytes] = deque()
        """Each key once [2]."""
        self._times: Counter[bytes] | None = None
        """How often each key is asked for, where some are asked for more than once."""
        self._projection: Projection | None = None
        self._rows: PermittedRows | None = None
        self._pending: deque[tuple[bytes, bytes]] = deque()
        """Records that were read and are not answered, with their stored values."""
        self._found: dict[bytes, types_pb2.Record] = {}
        """The answers, where keys repeat."""
        self._size = 0
        figures = self._topic.statistics
        self._usual_bytes = figures.record_bytes // (figures.records or 1)
        self._at_once = min(READ_KEYS, max(1, READ_BYTES // (self._usual_bytes or 1)))
        self._response = sow_pb2.GetResponse()
        self._ending: dict[str, None] = {}

    @property
    def as_of_micros(self) -> int:
        """The time of the answer."""
        return self._response.as_of_micros

    @property
    def ending(self) -> list[str]:
        """The keys of the records that have less left than asked for."""
        return list(self._ending)

    @property
    def response(self) -> sow_pb2.GetResponse:
        """The answer, once `here` has made it."""
        return self._response

    def here(self) -> bool:
        """Answers on the event loop, if that takes microseconds. Returns whether it did; if not, `step` goes on. Raises
        StoreError."""
        if self._is_large():
            return False
        self._prepare()
        now, values = self._reading.cuts.each(self._topic, self._unread)
        self._response.as_of_micros = now
        room = HERE_BYTES
        decoded = DECODED if self._decodes else 1
        found: list[tuple[bytes, bytes]] = []
        for value in values:
            key = self._unread.popleft()
            if value is None:
                continue
            found.append((key, value))
            room -= len(value) * (decoded if self._times is None else decoded + self._times[key])
            if room < 0:  # [1]
                break
        if room < 0:
            self._pending.extend(found)
            return False
        for key, value in self._permitted(found):
            self._answer(key, value)
        self._repeat()
        return True

    def step(self) -> bytes | None:
        """Does a piece of work on a reader thread. Returns the whole answer, on the wire; None: there is more to do.
        Raises StoreError."""
        ends = self._clock() + PIECE_SECONDS
        self._prepare()
        while self._pending or self._unread:
            if not self._pending:
                self._read()
            for key, value in self._permitted(self._group()):
                self._answer(key, value)
            if self._clock() >= ends and (self._pending or self._unread):
                return None
        self._repeat()
        return self._response.SerializeToString()

    def _is_large(self) -> bool:
        keys = len(self._request.keys)
        if keys > (HERE_KEYS_DECODED if self._decodes else HERE_KEYS) or self._paths > HERE_PATHS:
            return True
        return keys > 1 and keys * self._usual_bytes > HERE_BYTES

    def _prepare(self) -> None:
        if self._prepared:
            return
        request, topic, restriction = self._request, self._topic, self._restriction
        self._projection = projection(topic, request.select.include, request.select.exclude, restriction.hidden)
        self._rows = permitted(topic, restriction)
        self._keys = point_keys(request.keys)
        unique = dict.fromkeys(self._keys)
        self._unread.extend(unique)
        if len(unique) < len(self._keys):
            self._times = Counter(self._keys)
        self._prepared = True

    def _read(self) -> None:
        keys = [self._unread.popleft() for _ in range(min(self._at_once, len(self._unread)))]
        now, values = self._reading.cuts.get(self._topic, keys)
        self._response.as_of_micros = self._response.as_of_micros or now
        found = [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
        size = sum([len(value) for _, value in found])
        self._at_once = min(READ_KEYS, 2 * len(keys)) if size < READ_BYTES else max(1, len(keys) // 2)
        self._pending.extend(found)

    def _group(self) -> list[tuple[bytes, bytes]]:
        """Some of the records that were read, judged and projected without a look at the clock."""
        group: list[tuple[bytes, bytes]] = []
        size = 0
        while self._pending and size < GROUP_BYTES:
            group.append(self._pending.popleft())
            size += len(group[-1][1])
        return group

    def _permitted(self, found: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The records that the caller may see."""
        if self._rows is None or not found:
            return found
        allowed = self._rows.judge([key for key, _ in found], [value[PAYLOAD] for _, value in found])
        return [record for record, wanted in zip(found, allowed, strict=True) if wanted]

    def _answer(self, key: bytes, value: bytes) -> None:
        topic, projected = self._topic, self._projection
        payload = value[PAYLOAD] if projected is None else topic.format.project(value[PAYLOAD], projected)
        # Filled in its place: a message that is put into another one is copied.
        found = self._response.records.add() if self._times is None else types_pb2.Record()
        convert.fill_record(found, self._reading.origins.names, topic, key, value, payload)
        self._size += (len(found.payload) + len(key)) * (1 if self._times is None else self._times[key])
        if self._size > GET_BYTES_MAX:
            raise StoreError(
                Reason.REQUEST_TOO_LARGE,
                f"keys: the records are more than {GET_BYTES_MAX} bytes; ask for fewer, or query",
                field="keys",
            )
        if self._times is not None:
            self._found[key] = found
        if self._below_micros:
            left = lifetimes.left(read_header(value).expire_time_micros, self._response.as_of_micros)
            if left < self._below_micros:
                self._ending[found.key] = None

    def _repeat(self) -> None:
        """Puts the records of repeated keys into the answer, in the order of the keys."""
        if self._times is not None:
            self._response.records.extend([self._found[key] for key in self._keys if key in self._found])
            self._found.clear()


class LongGets:
    """Lets the long gets of each caller go on a few at a time [4]. On the event loop."""

    def __init__(self) -> None:
        self._places: dict[str, _Places] = {}

    async def whole(self, getting: Getting, readers: Executor) -> bytes:
        """The answer of a get that takes pieces [3], on the wire. Raises StoreError."""
        caller = CALLER.get()
        places = self._places.setdefault(caller, _Places())
        places.users += 1
        try:
            async with places.room:
                loop = asyncio.get_running_loop()
                while (answer := await loop.run_in_executor(readers, getting.step)) is None:
                    pass
                return answer
        finally:
            places.users -= 1
            if not places.users:
                del self._places[caller]


class _Places:
    """Those of one caller."""

    def __init__(self) -> None:
        self.users = 0
        self.room = asyncio.Semaphore(LONG_GETS)
