"""The server's side of the reader processes: starts them, gives them queries, and hears their answers.

The first long query starts a process, so a server without long queries pays for none. Until it is ready, and wherever
it cannot answer, `ask` returns None, and the server's own process answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from sow.v1 import sow_pb2
from sow_server.access.caller import Granted
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.following import Beats, Moment, TopicImage
from sow_server.engine.values.database import RocksError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.engine.values.turns import CALLER
from sow_server.reader_processes.messages import (
    Connection,
    ExportFigures,
    ExportOf,
    Kind,
    Message,
    OpenExport,
    OpenPart,
    OpenQuery,
    ReaderFault,
    Skipped,
    Start,
    decode_cut,
    decode_part,
    described,
    encode_moment,
    encode_names,
    pair,
    send,
)
from sow_server.services.exporting import Asked, ReadPart

log = structlog.get_logger(__name__)

READY_SECONDS: Final = 60.0
OPEN_SECONDS: Final = 30.0
"""How long a process may take to open a cut. Nearly always it takes milliseconds, unless the process stands still."""
AHEAD: Final = 2
"""Pieces that it asks for at a time. With one, the process would stand still while a piece is on its way."""
AHEAD_BYTES: Final = 2**20 + 2**18
"""After a piece of more, which has a record of its own size, it asks for one at a time: nobody may read them."""
STOP_SECONDS: Final = 5.0
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 60.0
"""A lost process is started again after a pause, which grows while processes are lost soon after their start."""
STEADY_SECONDS: Final = 60.0
"""A process that has run for so long was not lost because of its start."""
FOLDER: Final = "readers"
"""The folder of the data directory with RocksDB's messages of the reader processes."""


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """The number of the processes, and the settings of each."""

    processes: int
    data_dir: Path
    block_cache_bytes: int
    sort_bytes_max: int
    sorts_waiting_max: int


class ReaderLost(Exception):
    """The process of a run has ended."""


class Run:
    """A run in a reader process, as the server sees it."""

    def __init__(self, process: _Process, number: int) -> None:
        self._process = process
        self._asked = 0
        """Pieces that have been asked for, and have not been taken."""
        self._ahead = AHEAD
        self._number = number
        self._arrived: asyncio.Queue[Message | None] = asyncio.Queue()
        self._when_lost: Callable[[], None] = lambda: None

    def put(self, message: Message) -> None:
        """A message has come."""
        self._arrived.put_nowait(message)

    def lose(self) -> None:
        """The process is lost."""
        self._arrived.put_nowait(None)
        self._when_lost()

    def when_lost(self, lost: Callable[[], None]) -> None:
        """`lost` is called when the process is lost."""
        self._when_lost = lost

    async def take(self) -> Message:
        """The next message that is no error. Raises ReaderLost, StoreError, RocksError, ReaderFault."""
        message = await self._arrived.get()
        if message is None:
            self._arrived.put_nowait(None)
            raise ReaderLost
        if message.kind is Kind.FAILED:
            raise described(message.content)
        return message

    def say(self, kind: Kind, content: bytes = b"") -> None:
        """Sends a message of this run."""
        self._process.say(kind, self._number, content)

    async def next(self) -> bytes | None:
        """The next piece; None: there are no more. Raises as `take`."""
        while self._asked < self._ahead:
            self.say(Kind.NEXT)
            self._asked += 1
        message = await self.take()
        self._asked -= 1
        self._ahead = AHEAD if len(message.content) <= AHEAD_BYTES else 1
        return message.content if message.kind is Kind.PIECE else None

    def beside(self, kind: Kind, content: Callable[[int], bytes]) -> Run:
        """Opens another run in the same process; `content` gets the number of this one."""
        return self._process.open(kind, content(self._number))

    def close(self) -> None:
        """Nobody waits for it any more."""
        self._process.forget(self._number)


class _Process:
    """One reader process, from its start to its end."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        beat: Callable[[Callable[[bytes], None]], None],
        skipped: Callable[[Skipped], None],
    ) -> None:
        """`beat` makes a moment and hands its message over, empty if the store makes none."""
        self.child: Final = child
        self.ready = False
        self.lost = False
        self._beat = beat
        self._skipped = skipped
        self._transport: asyncio.WriteTransport | None = None
        self._runs: dict[int, Run] = {}
        self._last = 0

    @property
    def load(self) -> int:
        """The number of its runs."""
        return len(self._runs)

    async def talk(self, ours: socket.socket, start: Start) -> None:
        """Takes its messages until it ends. All runs hear of its end."""
        loop = asyncio.get_running_loop()
        self._transport, connection = await loop.create_unix_connection(lambda: Connection(self._took), sock=ours)
        self.say(Kind.START, 0, pickle.dumps(tuple(start)))
        patience = loop.call_later(READY_SECONDS, self._end_unless_ready)
        try:
            await connection.ended
        finally:
            patience.cancel()
            self.ready, self.lost = False, True
            self._transport.close()
            for run in list(self._runs.values()):
                run.lose()

    def _took(self, message: Message) -> None:
        if message.kind is Kind.READY:
            self.ready = True
            log.info("reader_process_ready", pid=self.child.pid)
        elif message.kind is Kind.BEAT:
            self._beat(lambda moment: self.say(Kind.MOMENT, 0, moment))
        elif message.kind is Kind.SKIPPED:
            self._skipped(Skipped.decode(message.content))
        elif (run := self._runs.get(message.run)) is not None:
            run.put(message)

    def _end_unless_ready(self) -> None:
        if not self.ready and self._transport is not None:
            self._transport.abort()

    def say(self, kind: Kind, run: int, content: bytes = b"") -> None:
        """Sends a message; it goes nowhere once the process is lost."""
        if self._transport is not None:
            send(self._transport, kind, run, content)

    def open(self, kind: Kind, content: bytes) -> Run:
        """Opens a run; in a process that is lost, its first `take` tells so."""
        self._last += 1
        run = self._runs[self._last] = Run(self, self._last)
        if self.lost:
            run.lose()
        self.say(kind, self._last, content)
        return run

    def forget(self, number: int) -> None:
        """Ends a run, unless it has ended."""
        if self._runs.pop(number, None) is not None:
            self.say(Kind.CLOSE, number)


class RemoteAnswer:
    """The answer to a query by a reader process (`services.queries.LongAnswer`). Owns the run."""

    def __init__(self, run: Run, cut: bytes, first: bytes) -> None:
        self._run = run
        self.sequence, self.now_micros = decode_cut(cut)
        self._first = first

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """The messages with records, and the footer. Raises StoreError, also READER_LOST."""
        message: bytes | None = self._first
        self._first = b""  # a client may take its time, and a piece is up to a megabyte
        while message is not None:
            yield message
            message = None
            with _loss_told("ask again"):
                message = await self._run.next()

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        self._run.close()


class RemoteExport:
    """An export in a reader process (`services.exporting.ServedExport`). Owns the run, and with it the export there."""

    def __init__(
        self,
        run: Run,
        cut: bytes,
        first: bytes,
        *,
        owner: str,
        asked: Sequence[Asked],
        lost: Callable[[str], None],
    ) -> None:
        self._run = run
        figures = ExportFigures.decode(first)
        self.id: Final = figures.id
        self.parts: Final = figures.parts
        self.sequence, self.now_micros = decode_cut(cut)
        self.owner: Final = owner
        self.topics: Final = [one.topic for one in asked]
        self.restrictions: Final = [one.restriction for one in asked]
        self._lost = lost
        run.when_lost(self._gone)  # also if nobody reads it just then

    def read(self, asked: ReadPart) -> RemoteReading:
        """Reads a part."""
        caller = CALLER.get()
        run = self._run.beside(Kind.READ, lambda export: pickle.dumps(OpenPart(caller, export, asked)))
        return RemoteReading(run, self._gone)

    def _gone(self) -> None:
        self._lost(self.id)

    def close(self) -> None:
        """Releases the cut once nobody uses it. May be called again."""
        self._run.close()


class RemoteReading:
    """A reading of a part in a reader process (`services.exporting.PartReading`). Owns the run."""

    def __init__(self, run: Run, lost: Callable[[], None]) -> None:
        self._run = run
        self._lost = lost
        self._footer = b""

    async def next(self) -> tuple[int, bytes] | None:
        """The next message, and the number of records in it; None: there are no more. Raises StoreError, also
        READER_LOST."""
        try:
            with _loss_told("open the export again"):
                content = await self._run.next()
        except StoreError as error:
            if error.reason is Reason.READER_LOST:
                self._lost()
            raise
        assert content is not None, "the footer is the last"
        records, message = decode_part(content)
        if records:
            return records, message
        self._footer = message
        return None

    def footer(self) -> bytes:
        """The last message, after all others."""
        return self._footer

    def close(self) -> None:
        """Nobody reads on."""
        self._run.close()


@contextlib.contextmanager
def _loss_told(remedy: str) -> Iterator[None]:
    """The loss of a process is READER_LOST to callers."""
    try:
        yield
    except ReaderLost:
        raise StoreError(
            Reason.READER_LOST,
            f"the process that was reading the records has ended; {remedy}",
            retry_after_micros=MICROS // 10,
        ) from None


class ReaderProcesses:
    """Owns the processes. On the event loop."""

    def __init__(
        self,
        options: ReaderOptions,
        reads: Reads,
        writes: Writes,
        beats: Beats,
    ) -> None:
        self._options = options
        self._topics = reads.topics
        self._commits = writes.commits
        self._origins = reads.origins
        self._beats = beats
        self._clock = reads.clock
        self._unsound = reads.unsound
        shutil.rmtree(options.data_dir / FOLDER, ignore_errors=True)  # a killed server has left it
        self._processes: list[_Process | None] = [None] * options.processes
        self._keeping: list[asyncio.Task[None]] = []
        self._stopping = False
        self.starts_total = 0
        self.queries_total = 0
        """Queries that reader processes have answered."""
        self.exports_total = 0
        """Exports that reader processes have opened."""

    @property
    def running(self) -> int:
        """The number of processes that are ready."""
        return sum(process is not None and process.ready for process in self._processes)

    async def ask(self, granted: Granted, request: sow_pb2.QueryRequest) -> RemoteAnswer | None:
        """Answers a query (`services.queries.LongQueries`). Raises StoreError."""
        topic, restriction = granted
        images = self._images([topic])
        asked = OpenQuery(CALLER.get(), request.SerializeToString(), images[0], topic.statistics, restriction)
        found = await self._begun(Kind.QUERY, asked, [topic], images)
        if found is None:
            return None
        self.queries_total += 1
        return RemoteAnswer(*found)

    async def open_export(
        self,
        asked: Sequence[Asked],
        *,
        owner: str,
        lost: Callable[[str], None],
    ) -> RemoteExport | None:
        """Opens an export (`services.exporting.LongExports`). Raises StoreError."""
        topics = [one.topic for one in asked]
        images = self._images(topics)
        shares = tuple(
            [
                ExportOf(image, one.topic.statistics.records, one.restriction, one.text, one.parts, one.given)
                for image, one in zip(images, asked, strict=True)
            ]
        )
        found = await self._begun(Kind.EXPORT, OpenExport(CALLER.get(), owner, shares), topics, images)
        if found is None:
            return None
        self.exports_total += 1
        return RemoteExport(*found, owner=owner, asked=asked, lost=lost)

    def _images(self, topics: Sequence[Topic]) -> list[TopicImage]:
        with self._commits.cut_lock:
            return [TopicImage.of(topic) for topic in topics]

    async def _begun(
        self, kind: Kind, asked: OpenQuery | OpenExport, topics: Sequence[Topic], images: Sequence[TopicImage]
    ) -> tuple[Run, bytes, bytes] | None:
        """Opens a run in the process with the fewest; returns it with its cut and its first piece. None: it cannot be
        done now. Raises StoreError."""
        process = self._chosen()
        if process is None:
            return None
        run = process.open(kind, pickle.dumps(asked))
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                cut = (await run.take()).content
            with self._commits.cut_lock:
                # The store has taken over every commit that the cut shows. So it shows the topics as the cut does, or
                # as they became later.
                unchanged = all(
                    self._topics.by_id.get(topic.id) is topic and image.shows(topic)
                    for topic, image in zip(topics, images, strict=True)
                )
                names = self._origins.names
            if unchanged:
                run.say(Kind.GO, encode_names(names))
                first = await run.next()
                assert first is not None, "there is a footer, or the figures of an export"
                for topic in topics:
                    topic.last_use_micros = self._clock.now_micros()
                return run, cut, first
        except ReaderLost:
            pass
        except TimeoutError:
            log.error("reader_process_failed", topic=topics[0].name, cause=f"no cut after {OPEN_SECONDS:g} s")
        except (RocksError, ReaderFault) as error:
            log.error("reader_process_failed", topic=topics[0].name, cause=str(error))
        except StoreError as error:
            if error.reason is not Reason.RESULT_TOO_LARGE:  # the server's process has more memory to sort in
                run.close()
                raise
        except BaseException:
            run.close()
            raise
        run.close()
        return None

    def _chosen(self) -> _Process | None:
        if not self._keeping and not self._stopping:
            self._keeping = [asyncio.create_task(self._keep(index)) for index in range(self._options.processes)]
        ready = [process for process in self._processes if process is not None and process.ready]
        return min(ready, key=lambda process: process.load, default=None)

    # -- their lives --------------------------------------------------------------------------------------------------

    async def _keep(self, index: int) -> None:
        """Keeps one process running."""
        pause = PAUSE_SECONDS
        while True:
            begun = time.monotonic()
            try:
                await self._live(index)
            except (OSError, RocksError) as error:
                log.error("reader_process_failed", process=index, cause=str(error))
            except Exception:
                # Another process is started all the same, and a stop does not hear of it.
                log.exception("reader_process_failed", process=index)
            pause = PAUSE_SECONDS if time.monotonic() - begun > STEADY_SECONDS else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    async def _live(self, index: int) -> None:
        """One process, from its start to its end. Raises OSError, RocksError if it cannot start."""
        process, ours = await self._started(index)
        self._processes[index] = process
        self.starts_total += 1
        try:
            await process.talk(ours, self._settings(index))
        finally:
            self._processes[index] = None
            code = await asyncio.shield(asyncio.to_thread(_ended, process.child))
        log.warning("reader_process_lost", process=index, pid=process.child.pid, code=code)

    async def _started(self, index: int) -> tuple[_Process, socket.socket]:
        """Starts one process. A stop waits for a start that is under way: its thread uses the database, and the process
        must not outlive the pool. Raises OSError, RocksError."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._start, index))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, RocksError):
                process, ours = await starting
                ours.close()
                await asyncio.to_thread(_ended, process.child)
            raise

    def _settings(self, index: int) -> Start:
        options = self._options
        return Start(
            str(options.data_dir),
            str(self._folder(index)),
            options.block_cache_bytes,
            options.sort_bytes_max,
            options.sorts_waiting_max,
        )

    def _folder(self, index: int) -> Path:
        return self._options.data_dir / FOLDER / str(index)

    def _start(self, index: int) -> tuple[_Process, socket.socket]:
        """On a thread: the first start writes memtables out, and every start takes milliseconds. Raises OSError,
        RocksError."""
        self._beats.begin()
        folder = self._folder(index)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        ours, theirs = pair()
        with theirs:
            # The modules come from where the server's own came from. With -m alone they could come from the working
            # directory, which is not the server's.
            paths = os.pathsep.join(map(os.path.abspath, sys.path))
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "sow_server.reader_processes.process", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return _Process(child, self._make_beat, self._heard_skipped), ours

    def _make_beat(self, hand_over: Callable[[bytes], None]) -> None:
        def made(moment: Moment | StoreError) -> None:
            hand_over(b"" if isinstance(moment, StoreError) else encode_moment(moment))

        try:
            self._beats.make().then(made)
        except StoreError as error:
            made(error)

    def _heard_skipped(self, skipped: Skipped) -> None:
        topic = self._topics.by_id.get(skipped.topic_id)
        if topic is not None:
            self._unsound.skip(topic, skipped.keys, skipped.now_micros)

    async def stop(self) -> None:
        """Ends all processes."""
        self._stopping = True
        keeping, self._keeping = self._keeping, []
        for task in keeping:
            task.cancel()
        for task in keeping:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        shutil.rmtree(self._options.data_dir / FOLDER, ignore_errors=True)


def _ended(child: subprocess.Popen[bytes]) -> int:
    """The exit code of a process whose connection has ended, on a thread."""
    try:
        return child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
