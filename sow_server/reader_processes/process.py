"""A reader process: `python -m sow_server.reader_processes.process DESCRIPTOR`, the descriptor of its socket.

It has one thread. The event loop talks to the server, opens cuts and reads them, a piece of work at a time; the runs
take turns, by caller (rule N7). A thread of its own for reading would hand the interpreter's lock over for every piece.

[1]  In one pass of the event loop at most one run works. A message takes some passes to have its effect: if all runs
     worked in each, then with 64 of them a query would not be opened for seconds.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

import uvloop

from sow.v1 import sow_pb2
from sow_server import malloc
from sow_server.engine.catalog.topics import KnownOrigins, Topic
from sow_server.engine.following import Follower, Moment, TopicImage
from sow_server.engine.reading import Cut
from sow_server.engine.stored import StoredStatistics
from sow_server.engine.values.database import Failed, RocksError, RocksOptions, Stale
from sow_server.engine.values.turns import SERVER
from sow_server.query.export_parts import Export, not_found
from sow_server.query.export_splits import SplitCache
from sow_server.query.scan import Scan
from sow_server.query.sort_memory import SortMemory
from sow_server.reader_processes.messages import (
    ExportFigures,
    Kind,
    Message,
    OpenExport,
    OpenPart,
    OpenQuery,
    Skipped,
    Start,
    decode_moment,
    decode_names,
    describe,
    encode_cut,
    encode_part,
    receive,
    send,
)
from sow_server.reader_processes.turn_lock import TurnLock
from sow_server.services.exporting import Asked, PartAnswer, export_of
from sow_server.services.records.answering import QueryAnswer, opened, query_of, until_ready

T = TypeVar("T")

LOOK_SECONDS: Final = 1.0
"""How often it looks whether it should move on while nobody asks."""
BEHIND_BYTES: Final = 8 * 2**20
"""So much more log, and it moves on without being asked: the next query then has less to catch up with."""
MOVE_LOOKS: Final = 60
"""It moves on after so many looks in any case: a state that is kept holds removed files, which take space."""
TOPICS_KEPT: Final = 256
BEATS_MAX: Final = 10
"""Moments that it asks for, for one cut. Nearly always the first will do."""


class _Run:
    """The server's side of a run, as messages come in."""

    def __init__(self, number: int) -> None:
        self.number: Final = number
        self.go: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self.wanted = asyncio.Semaphore(0)
        self.task: asyncio.Task[None] | None = None


class ReaderProcess:
    """Owns the follower and the runs."""

    def __init__(self, start: Start, writer: asyncio.StreamWriter) -> None:
        """Opens the database. Raises RocksError."""
        self._writer = writer
        options = RocksOptions(block_cache_bytes=start.block_cache_bytes)
        self._follower = Follower(Path(start.data_dir), options, log_folder=Path(start.log_folder))
        self._sorts = SortMemory(start.sort_bytes_max, start.sorts_waiting_max)
        self._runs: dict[int, _Run] = {}
        self._stale = False
        """True if the database was found not to move on."""
        self._exports: dict[int, tuple[Export, list[str]]] = {}
        """Open exports by their run, with the names of the origins."""
        self._splits = SplitCache()
        self._turn = TurnLock()
        """Held by the run that works."""
        self._moving = TurnLock()
        """Held while the database moves on, from the request for a moment until the cut is open."""
        self._moment: asyncio.Future[Moment | None] = asyncio.get_running_loop().create_future()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Takes messages until the connection ends. Raises EOFError."""
        moving = asyncio.create_task(self._move_on())
        try:
            while True:
                self._take(await receive(reader))
        finally:
            moving.cancel()

    def _take(self, message: Message) -> None:
        run = self._runs.get(message.run)
        match message.kind:
            case Kind.QUERY:
                self._begin(message.run, self._query, pickle.loads(message.content))
            case Kind.EXPORT:
                self._begin(message.run, self._export, pickle.loads(message.content))
            case Kind.READ:
                self._begin(message.run, self._read, pickle.loads(message.content))
            case Kind.MOMENT:
                self._moment.set_result(decode_moment(message.content) if message.content else None)
            case Kind.GO if run is not None:
                run.go.set_result(decode_names(message.content))
            case Kind.NEXT if run is not None:
                run.wanted.release()
            case Kind.CLOSE if run is not None and run.task is not None:
                run.task.cancel()

    def _begin(self, number: int, work: Callable[[_Run, T], Awaitable[None]], asked: T) -> None:
        run = self._runs[number] = _Run(number)
        run.task = asyncio.create_task(self._guarded(run, work, asked))
        # A task that is cancelled before its first step runs none of its code.
        run.task.add_done_callback(lambda _: self._ended(number))

    async def _guarded(self, run: _Run, work: Callable[[_Run, T], Awaitable[None]], asked: T) -> None:
        number = run.number
        try:
            await work(run, asked)
        except asyncio.CancelledError:
            pass  # CLOSE: nobody waits for an end
        except Exception as error:  # noqa: BLE001  # the last line of defence: the server tells the caller, and logs it
            send(self._writer, Kind.FAILED, number, describe(error, traceback.format_exc()))
            self._stale = self._stale or isinstance(error, Stale)
        else:
            send(self._writer, Kind.END, number)

    def _ended(self, number: int) -> None:
        del self._runs[number]
        self._end_if_stale()

    def _end_if_stale(self) -> None:
        if self._stale and not self._runs:
            self._writer.close()  # and so it ends: the next process opens the database anew

    async def _query(self, run: _Run, asked: OpenQuery) -> None:
        answer = await opened(
            asyncio.create_task(self._at_a_moment(asked.caller, lambda moment: self._open(asked, moment)))
        )
        try:
            names = await self._agreed(run, answer.scan.cut)
            _know(answer.scan.query.topic, names)
            while (message := await self._work(asked.caller, lambda: answer.step(names))) is not None:
                await self._piece(run, message)
                if (share := answer.scan.waits_for) is not None:
                    await until_ready(share)
            await self._piece(run, answer.footer())
        finally:
            answer.close()

    async def _agreed(self, run: _Run, cut: Cut | Export) -> list[str]:
        """Tells the cut; the names of the origins, once the server says that the cut counts."""
        send(self._writer, Kind.OPENED, run.number, encode_cut(cut.sequence, cut.now_micros))
        return await run.go

    def _open(self, asked: OpenQuery, moment: Moment) -> QueryAnswer:
        topic = _topic(asked.topic)
        topic.statistics = asked.statistics  # an estimate, by which a query finds its way
        query = query_of(topic, sow_pb2.QueryRequest.FromString(asked.request), asked.restriction)
        cuts = self._follower.at(moment, self._skipped)
        return QueryAnswer(Scan(cuts, query, self._sorts, asked.caller), restricted=asked.restriction.rows is not None)

    # -- exports ------------------------------------------------------------------------------------------------------

    async def _export(self, run: _Run, asked: OpenExport) -> None:
        export = await opened(
            asyncio.create_task(self._at_a_moment(asked.caller, lambda moment: self._open_export(asked, moment)))
        )
        try:
            names = await self._agreed(run, export)
            for topic in export.topics:
                _know(topic, names)
            while not await self._work(asked.caller, export.prepare):
                pass  # in a large topic it takes longer than the server waits for a cut
            self._exports[run.number] = export, names
            await self._piece(run, ExportFigures(export.id, export.parts).encode())
            await asyncio.Future()  # until CLOSE
        finally:
            self._exports.pop(run.number, None)
            export.close()

    def _open_export(self, asked: OpenExport, moment: Moment) -> Export:
        cuts = self._follower.at(moment, self._skipped)
        topics = [
            Asked(
                one.topic.topic(StoredStatistics(records=one.records)),
                one.restriction,
                one.text,
                one.parts,
                one.given,
            )
            for one in asked.topics
        ]
        return export_of(cuts, topics, self._splits, owner=asked.owner)

    async def _read(self, run: _Run, asked: OpenPart) -> None:
        found = self._exports.get(asked.export)
        if found is None:
            raise not_found(str(asked.export), "it has ended")
        export, names = found
        answer = PartAnswer(export, asked.part)
        while (answered := await self._work(asked.caller, lambda: answer.step(names))) is not None:
            await self._piece(run, encode_part(*answered) if answered[0] else b"")
        await self._piece(run, encode_part(0, answer.footer()))

    async def _work(self, caller: str, work: Callable[[], T]) -> T:
        """Does a piece of work when it is this run's turn [1]."""
        async with self._turn.held(caller):
            done = work()
            await asyncio.sleep(0)
        return done

    # -- messages -----------------------------------------------------------------------------------------------------

    async def _at_a_moment(self, caller: str, open_: Callable[[Moment], T]) -> T:
        """Opens something at a moment that begins after the database has moved on for the last time."""
        stale = Stale("it does not move on any more, and ends after its last run")
        for _ in range(0 if self._stale else BEATS_MAX):
            async with self._moving.held(caller):
                self._moment = asyncio.get_running_loop().create_future()
                send(self._writer, Kind.BEAT)
                moment = await self._moment
                if moment is None:
                    raise Failed("the store makes no commits")
                try:
                    return open_(moment)
                except Stale as error:  # a memtable was written out between the beat and the catching up
                    stale = error
        raise stale

    async def _piece(self, run: _Run, content: bytes) -> None:
        """Sends a piece, if it has any content, once it is asked for."""
        if content:
            await run.wanted.acquire()
            send(self._writer, Kind.PIECE, run.number, content)
            await self._writer.drain()

    def _skipped(self, topic: Topic, keys: Sequence[bytes], now_micros: int) -> None:
        """The server counts and logs them."""
        send(self._writer, Kind.SKIPPED, 0, Skipped(topic.id, now_micros, tuple(keys)).encode())

    async def _move_on(self) -> None:
        """Moves on while nobody asks."""
        seen, looks = self._follower.log_bytes(), 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            size, looks = self._follower.log_bytes(), looks + 1
            if abs(size - seen) >= BEHIND_BYTES or looks >= MOVE_LOOKS:
                seen, looks = size, 0
                try:
                    async with self._moving.held(SERVER):
                        self._follower.move()
                except RocksError:
                    # If it went on, it would hold the removed files of an old state until somebody asks.
                    self._stale = True
                    self._end_if_stale()
                    return


@lru_cache(maxsize=TOPICS_KEPT)
def _topic(image: TopicImage) -> Topic:
    """Each topic is made once, because its format compiles decoders."""
    return image.topic()


def _know(topic: Topic, names: Sequence[str]) -> None:
    """Before its records are judged. Names only become more, and readers share the topic."""
    if len(names) > len(topic.origins.names):
        topic.origins = KnownOrigins(names)


async def run(descriptor: int) -> None:
    """Serves until the connection ends."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor), limit=2**20)
    try:
        first = await receive(reader)
        await asyncio.sleep(0)
        if reader.at_eof():
            raise EOFError("the server has ended while this process started, and its folder may be gone")
        process = ReaderProcess(Start(*pickle.loads(first.content)), writer)
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 50)
        send(writer, Kind.READY)
        await process.serve(reader)
    except EOFError:
        os._exit(0)  # nobody waits for the runs any more


def main() -> None:
    """Runs the reader process."""
    # A terminal and a service manager signal the server's processes all at once. The server stops in its own order: the
    # answers under way have their time to end, and then the connection ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    malloc.tune()
    uvloop.run(run(int(sys.argv[1])))


if __name__ == "__main__":
    main()
