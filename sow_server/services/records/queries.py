"""Queries: short ones are answered in this process, long ones in a reader process, if there is one.

[1]  A query shows one cut from beginning to end, wherever it is answered.
[2]  A reader process that is lost before the first message of an answer costs nothing: this process answers.
     After it, the call ends with READER_LOST.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Final, Protocol

from sow.v1 import sow_pb2
from sow_server.access.caller import Granted
from sow_server.engine.doors import Reads
from sow_server.engine.values.turns import CALLER
from sow_server.query.scan import Scan
from sow_server.query.sort_memory import SortMemory
from sow_server.services.records.answering import QueryAnswer, opened, query_of
from sow_server.services.records.getting import HERE_KEYS, HERE_PATHS

SHORT_RECORDS: Final = 3000
"""A query that reads at most about so many stored records is short. A reader process first has to catch up with the
database, which takes as long as reading a few thousand records."""
SHORT_BYTES: Final = 2**20
"""A query with so many bytes of messages is not short either: until it is known whether it is, they are kept, and a
record may have a megabyte."""


class LongAnswer(Protocol):
    """An answer by a reader process."""

    @property
    def sequence(self) -> int:
        """The last commit that its cut shows."""

    @property
    def now_micros(self) -> int:
        """The `now` of its cut."""

    def messages(self) -> AsyncGenerator[bytes, None]:
        """The messages with records, and the footer. Raises StoreError, also READER_LOST."""

    def close(self) -> None:
        """Nobody waits for the answer any more."""


class LongQueries(Protocol):
    """Answers queries in reader processes."""

    @property
    def running(self) -> int:
        """The number of processes that are ready."""

    async def ask(self, granted: Granted, request: sow_pb2.QueryRequest) -> LongAnswer | None:
        """Asks a reader process; returns when the first message is there. None: no reader process can answer it now, or
        the one that was asked is lost. Raises StoreError."""


class Queries:
    """Answers queries."""

    def __init__(self, reading: Reads, readers: Executor, sort_memory: SortMemory, long: LongQueries) -> None:
        self._reading = reading
        self._readers = readers
        self._sort_memory = sort_memory
        self._long = long

    async def answer(
        self, granted: Granted, request: sow_pb2.QueryRequest, *, asks: bool = True
    ) -> AsyncGenerator[bytes, None]:
        """The messages of an answer, as bytes. `asks`: a reader process, where it is long. Raises StoreError."""
        scan = await self._opened(granted, request)
        own = QueryAnswer(scan, restricted=granted.restriction.rows is not None)
        long: LongAnswer | None = None
        # It reads all of its records before it answers, in memory that such queries share.
        gathers = bool(request.order_by or request.group_by or request.aggregate)
        # The memory is given back before a reader process gathers anew: others wait for it here.
        gives_back = asks and gathers and self._long.running > 0
        async with aclosing(own.messages(self._readers, lambda: self._reading.origins.names)) as messages:
            begun: list[bytes] = []
            size = 0
            async for message in messages:
                if message:
                    begun.append(message)
                size += len(message)
                if scan.scanned >= SHORT_RECORDS or size >= SHORT_BYTES:
                    if asks and not gives_back:
                        long = await self._long.ask(granted, request)
                    break
            else:
                gives_back = False
            if not gives_back and long is None:
                if gathers:
                    # It holds memory that others wait for: it goes on to its end, whether its client reads or not.
                    async for message in messages:
                        if message:
                            begun.append(message)
                            break
                yield self._header(scan.cut.sequence, scan.cut.now_micros)
                while begun:
                    yield begun.pop(0)
                async for message in messages:
                    if message:
                        yield message
                return
        begun.clear()  # a client may take its time, and each piece is up to a megabyte
        del scan, own, message
        if long is None:
            long = await self._long.ask(granted, request)
        if long is None:
            async with aclosing(self.answer(granted, request, asks=False)) as messages:
                async for message in messages:
                    yield message
            return
        try:
            yield self._header(long.sequence, long.now_micros)
            async with aclosing(long.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            long.close()

    async def _opened(self, granted: Granted, request: sow_pb2.QueryRequest) -> Scan:
        paths = len(request.select.include) + len(request.select.exclude)
        parses = bool(request.filter or request.parameters or request.order_by) or granted.restriction.rows is not None
        parses = parses or bool(request.group_by or request.aggregate or request.having)
        if not parses and len(request.keys) <= HERE_KEYS and paths <= HERE_PATHS:
            return self._scan(granted, request, CALLER.get())
        # Parsing, compiling and planning may take milliseconds.
        run = asyncio.get_running_loop().run_in_executor
        return await opened(run(self._readers, self._scan, granted, request, CALLER.get()))

    def _scan(self, granted: Granted, request: sow_pb2.QueryRequest, caller: str) -> Scan:
        topic, restriction = granted
        return Scan(self._reading.cuts, query_of(topic, request, restriction), self._sort_memory, caller)

    def _header(self, sequence: int, now_micros: int) -> bytes:
        return sow_pb2.QueryResponse(
            header=sow_pb2.QueryHeader(bookmark=self._reading.instance.bookmark(sequence), as_of_micros=now_micros)
        ).SerializeToString()
