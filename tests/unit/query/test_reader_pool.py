"""The server's side of reader processes, against a process whose answers the test gives (reader_processes/pool)."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow.v1 import sow_pb2
from sow_server.access.caller import Granted
from sow_server.engine.values.database import RocksError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Expiration
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.query.export_parts import PartFigures
from sow_server.reader_processes import pool
from sow_server.reader_processes.messages import (
    Connection,
    ExportFigures,
    Kind,
    Message,
    OpenExport,
    OpenPart,
    OpenQuery,
    ReaderFault,
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
from sow_server.reader_processes.pool import AHEAD, AHEAD_BYTES, ReaderOptions, ReaderProcesses, RemoteAnswer
from sow_server.services.exporting import Asked, ReadPart
from tests.support.stores.stores import Rig

REQUEST: Final = sow_pb2.QueryRequest(topic="t", filter="@version > 0")
CUT: Final = encode_cut(7, 1_000_000)


async def passes(condition: Callable[[], object]) -> None:
    """Lets the loop run until a condition holds."""
    while not condition():  # noqa: ASYNC110  # the tested code has no event for it
        await asyncio.sleep(0)


class Child:
    """Stands for the process of a scripted reader."""

    pid = 12345

    def wait(self, timeout: float | None = None) -> int:
        return -9


class Scripted:
    """The other end of a reader process."""

    def __init__(self, theirs: socket.socket) -> None:
        self.theirs = theirs
        self.start: Start | None = None

    async def begin(self) -> None:
        """Takes the settings, and is ready."""
        self.reader, self._writer = await asyncio.open_unix_connection(sock=self.theirs)
        self.start = Start(*pickle.loads((await receive(self.reader)).content))
        self.say(Kind.READY)

    async def hear(self, kind: Kind) -> Message:
        """The next message, which is of this kind. Pieces may have been asked for ahead of it."""
        message = await asyncio.wait_for(receive(self.reader), 20)
        while message.kind is Kind.NEXT and kind is not Kind.NEXT:
            message = await asyncio.wait_for(receive(self.reader), 20)
        assert message.kind is kind, message
        return message

    def say(self, kind: Kind, run: int = 0, content: bytes = b"") -> None:
        send(self._writer, kind, run, content)

    def die(self) -> None:
        self._writer.close()


class World:
    """A store with one topic, and the pool of scripted processes."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig = rig
        rig.create_topic("t", expiration=Expiration.ENABLED)
        store = rig.store
        options = ReaderOptions(1, folder, block_cache_bytes=1, sort_bytes_max=1, sorts_waiting_max=1)
        self.pool = ReaderProcesses(options, store.reads, store.writes, store.beats)
        self.scripts: asyncio.Queue[Scripted] = asyncio.Queue()

    def _start(self, index: int) -> tuple[pool._Process, socket.socket]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._loop.call_soon_threadsafe(self.scripts.put_nowait, Scripted(theirs))
        child = cast("subprocess.Popen[bytes]", Child())
        return pool._Process(child, self.pool._make_beat, self.pool._heard_skipped), ours

    async def reader(self) -> Scripted:
        """The next process, once the pool knows that it is ready."""
        self._loop = asyncio.get_running_loop()
        assert await self.ask() is None, "nobody is ready"
        script = await self.scripts.get()
        before = self.pool.running
        await script.begin()
        await passes(lambda: self.pool.running != before)
        return script

    async def ask(self) -> RemoteAnswer | None:
        return await self.pool.ask(Granted(self.rig.topic("t"), UNRESTRICTED), REQUEST)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    rig = Rig(tmp_path)
    made = World(rig, tmp_path / "data")
    monkeypatch.setattr(made.pool, "_start", made._start)
    monkeypatch.setattr(pool, "PAUSE_SECONDS", 0.0)
    yield made
    rig.close()


def played(world: World, play: Callable[[Scripted], Awaitable[None]]) -> None:
    """Plays with the first process, then stops the pool."""

    async def main() -> None:
        try:
            await play(await world.reader())
        finally:
            await world.pool.stop()

    asyncio.run(main())


async def opened(world: World, script: Scripted, *pieces: bytes) -> RemoteAnswer:
    """A query whose first piece has come."""
    asking = asyncio.ensure_future(world.ask())
    run = (await script.hear(Kind.QUERY)).run
    script.say(Kind.OPENED, run, CUT)
    await script.hear(Kind.GO)
    await script.hear(Kind.NEXT)
    script.say(Kind.PIECE, run, pieces[0] if pieces else b"first")
    answer = await asking
    assert answer is not None
    return answer


def test_a_query_is_sent_whole_and_its_pieces_come_when_they_are_asked_for(world: World) -> None:
    async def play(script: Scripted) -> None:
        asking = asyncio.ensure_future(world.ask())
        query = await script.hear(Kind.QUERY)
        asked: OpenQuery = pickle.loads(query.content)
        assert sow_pb2.QueryRequest.FromString(asked.request) == REQUEST
        assert (asked.topic.name, asked.statistics.records, asked.restriction) == ("t", 0, UNRESTRICTED)
        script.say(Kind.OPENED, query.run, CUT)
        assert decode_names((await script.hear(Kind.GO)).content) == list(world.rig.store.origins.names)
        await script.hear(Kind.NEXT)
        script.say(Kind.PIECE, query.run, b"one")
        answer = await asking
        assert answer is not None
        assert (answer.sequence, answer.now_micros) == (7, 1_000_000)
        async with aclosing(answer.messages()) as messages:
            assert await anext(messages) == b"one"
            following = asyncio.ensure_future(anext(messages))
            await script.hear(Kind.NEXT)
            script.say(Kind.PIECE, query.run, b"footer")
            assert await following == b"footer"
            ending = asyncio.ensure_future(anext(messages, None))
            await script.hear(Kind.NEXT)
            script.say(Kind.END, query.run)
            assert await ending is None
        answer.close()
        await script.hear(Kind.CLOSE)
        assert world.pool.queries_total == 1

    played(world, play)


def test_two_pieces_are_asked_for_ahead_and_no_more(world: World) -> None:
    """reader_processes [3]. With one, the process stood still while a piece was on its way."""

    async def play(script: Scripted) -> None:
        async def asked() -> int:
            """How often a piece has been asked for since the last call: a moment comes after all of that."""
            script.say(Kind.BEAT)
            await passes(lambda: world.rig.store.writer.queue.depth[0])
            world.rig.store.writer.step()
            kinds: list[Kind] = []
            while not kinds or kinds[-1] is not Kind.MOMENT:
                kinds.append((await asyncio.wait_for(receive(script.reader), 20)).kind)
            assert set(kinds) <= {Kind.NEXT, Kind.MOMENT}
            return len(kinds) - 1

        answer = await opened(world, script)  # which has heard the first request
        assert await asked() == AHEAD - 1
        script.say(Kind.PIECE, 1, b"second")
        assert await asked() == 0, "the client has not taken the first"
        async with aclosing(answer.messages()) as messages:
            assert [await anext(messages), await anext(messages)] == [b"first", b"second"]
            assert await asked() == 1
            following = asyncio.ensure_future(anext(messages))
            assert await asked() == 1
            large = bytes(AHEAD_BYTES + 1)
            script.say(Kind.PIECE, 1, large)
            assert await following == large
            following = asyncio.ensure_future(anext(messages))
            assert await asked() == 0, "one large piece is on its way, and no second one"
            script.say(Kind.PIECE, 1, b"small")
            assert await following == b"small"
            following = asyncio.ensure_future(anext(messages))
            assert await asked() == AHEAD
            script.say(Kind.PIECE, 1, b"last")
            assert await following == b"last"

    played(world, play)


@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=40)), max_size=8),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_messages_are_heard_however_they_are_cut(said: list[tuple[Kind, int, bytes]], cuts: list[int]) -> None:
    async def main() -> list[Message]:
        heard: list[Message] = []
        connection = Connection(heard.append)
        sizes = itertools.cycle(cuts)
        written = bytearray()
        send(cast("asyncio.WriteTransport", Written(written)), Kind.READY)
        for message in said:
            send(cast("asyncio.WriteTransport", Written(written)), *message)
        while written:
            room = connection.get_buffer(-1)
            count = min(len(room), len(written), next(sizes))
            room[:count] = written[:count]
            del written[:count]
            connection.buffer_updated(count)
        return heard

    assert asyncio.run(main()) == [(Kind.READY, 0, b""), *said]


def test_a_connection_whose_end_nobody_awaits_any_more_ends_quietly() -> None:
    """A stop of the server logged an error for each reader process."""

    async def main() -> None:
        connection = Connection(lambda message: None)
        connection.ended.cancel()
        connection.connection_lost(None)
        assert connection.ended.cancelled()

    asyncio.run(main())


class Written:
    """A transport that keeps what is written."""

    def __init__(self, to: bytearray) -> None:
        self.write = to.extend

    def is_closing(self) -> bool:
        return False


@pytest.mark.parametrize("change", ["alter", "delete", "replace"])
def test_a_cut_does_not_count_if_the_topic_has_changed(world: World, change: str) -> None:
    """reader_processes [2]. Else a query might show a part of a topic that is being deleted."""

    async def play(script: Scripted) -> None:
        asking = asyncio.ensure_future(world.ask())
        run = (await script.hear(Kind.QUERY)).run
        if change == "alter":
            world.rig.alter_topic("t", max_ttl_micros=5_000_000)
        else:
            world.rig.delete_topic("t")
        if change == "replace":
            world.rig.create_topic("t")
        script.say(Kind.OPENED, run, CUT)
        await script.hear(Kind.CLOSE)
        assert await asking is None

    played(world, play)


def test_a_process_that_is_lost_before_the_first_piece_costs_nothing(world: World) -> None:
    async def play(script: Scripted) -> None:
        asking = asyncio.ensure_future(world.ask())
        run = (await script.hear(Kind.QUERY)).run
        script.say(Kind.OPENED, run, CUT)
        await script.hear(Kind.GO)
        script.die()
        assert await asking is None
        again = await world.reader()
        assert again is not script
        assert (await opened(world, again)).sequence == 7

    played(world, play)


def test_a_process_that_is_lost_later_ends_its_answers(world: World) -> None:
    async def play(script: Scripted) -> None:
        answer = await opened(world, script)
        async with aclosing(answer.messages()) as messages:
            assert await anext(messages) == b"first"
            script.die()
            with pytest.raises(StoreError) as caught:
                await anext(messages)
        assert caught.value.reason is Reason.READER_LOST
        assert caught.value.retry_after_micros > 0

    played(world, play)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreError(Reason.FILTER_INVALID, "filter: no", field="filter", details={"position": "3"}), "FILTER_INVALID"),
        (StoreError(Reason.RESULT_TOO_LARGE, "order_by: too many"), None),
        (RocksError("IO error"), None),
        (ReaderFault("a traceback"), None),
        (RuntimeError("unexpected"), None),
    ],
)
def test_an_error_that_is_the_callers_is_told_and_of_any_other_the_server_answers(
    world: World, error: Exception, reason: str | None
) -> None:
    async def play(script: Scripted) -> None:
        asking = asyncio.ensure_future(world.ask())
        run = (await script.hear(Kind.QUERY)).run
        script.say(Kind.FAILED, run, describe(error, "a traceback"))
        if reason is None:
            assert await asking is None
        else:
            with pytest.raises(StoreError) as caught:
                await asking
            assert caught.value.reason is Reason[reason]
            assert isinstance(error, StoreError)
            assert (caught.value.message, caught.value.field) == (error.message, error.field)
            assert caught.value.details == error.details
        await script.hear(Kind.CLOSE)

    played(world, play)


def test_the_server_answers_of_a_process_that_stands_still(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped (SIGSTOP), or hung, held up every long query for ever."""
    monkeypatch.setattr(pool, "OPEN_SECONDS", 0.0)

    async def play(script: Scripted) -> None:
        asking = asyncio.ensure_future(world.ask())
        await script.hear(Kind.QUERY)
        assert await asking is None
        await script.hear(Kind.CLOSE)

    played(world, play)


def test_a_caller_that_goes_gives_its_run_up(world: World) -> None:
    async def play(script: Scripted) -> None:
        asking = asyncio.ensure_future(world.ask())
        await script.hear(Kind.QUERY)
        asking.cancel()
        await script.hear(Kind.CLOSE)

    played(world, play)


def test_a_beat_is_a_commit_that_the_process_has_to_see(world: World) -> None:
    """rocks [15]."""

    async def play(script: Scripted) -> None:
        moments = []
        for _ in range(2):
            script.say(Kind.BEAT)
            await passes(lambda: world.rig.store.writer.queue.depth[0])
            world.rig.store.writer.step()
            moments.append(decode_moment((await script.hear(Kind.MOMENT)).content))
            world.rig.put("t", "1")
        assert moments[0].write_number < moments[1].write_number
        assert moments[0].sequence < moments[1].sequence

    played(world, play)


def test_a_store_that_makes_no_commits_says_so(world: World) -> None:
    async def play(script: Scripted) -> None:
        world.rig.store.writer.stop()
        script.say(Kind.BEAT)
        assert (await script.hear(Kind.MOMENT)).content == b""

    played(world, play)


def test_skipped_records_are_counted_by_the_server(world: World) -> None:
    """rule R13."""

    async def play(script: Scripted) -> None:
        topic = world.rig.topic("t")
        script.say(Kind.SKIPPED, 0, Skipped(topic.id, 1, (b"\xff\xfe",)).encode())
        script.say(Kind.SKIPPED, 0, Skipped(999, 1, (b"\xff",)).encode())
        script.say(Kind.BEAT)
        await passes(lambda: world.rig.store.writer.queue.depth[0])
        assert world.rig.store.unsound.skipped == {"t": 1}

    played(world, play)


def test_a_stop_waits_for_a_start_that_is_under_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start writes memtables out on a thread. Once the stop was through while it did, the database was closed below
    it, and the process that it then started had no owner."""
    begun, may_go_on = threading.Event(), threading.Event()

    def start(index: int) -> tuple[pool._Process, socket.socket]:
        begun.set()
        assert may_go_on.wait(20)
        return world._start(index)

    monkeypatch.setattr(world.pool, "_start", start)

    async def main() -> None:
        world._loop = asyncio.get_running_loop()
        assert await world.ask() is None
        assert await asyncio.to_thread(begun.wait, 20)
        stopping = asyncio.ensure_future(world.pool.stop())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not stopping.done()
        may_go_on.set()
        await stopping
        script = await world.scripts.get()
        assert script.theirs.recv(1) == b"", "its connection has ended, and so does the process"
        assert await world.ask() is None, "no process is started after a stop"
        assert not world.pool._keeping

    asyncio.run(main())


@pytest.mark.slow
def test_an_unexpected_error_costs_one_process_and_not_the_pool(world: World) -> None:
    async def play(script: Scripted) -> None:
        script.say(cast("Kind", 200))
        await passes(lambda: world.pool.running == 0)
        again = await world.scripts.get()
        await again.begin()
        await passes(lambda: world.pool.running)

    played(world, play)


def test_an_export_is_read_by_its_process_and_ends_with_it(world: World) -> None:
    async def play(script: Scripted) -> None:
        topic = world.rig.topic("t")
        lost: list[str] = []
        parts = (PartFigures(10, 0), PartFigures(20, 0))
        opening = asyncio.ensure_future(
            world.pool.open_export([Asked(topic, UNRESTRICTED, "", 2)], owner="desk", lost=lost.append)
        )
        message = await script.hear(Kind.EXPORT)
        asked: OpenExport = pickle.loads(message.content)
        assert [(one.parts, one.topic.name) for one in asked.topics] == [(2, "t")]
        assert asked.owner == "desk"
        script.say(Kind.OPENED, message.run, CUT)
        await script.hear(Kind.GO)
        await script.hear(Kind.NEXT)
        script.say(Kind.PIECE, message.run, ExportFigures("e1", parts).encode())
        export = await opening
        assert export is not None
        assert (export.id, export.owner, export.parts, export.sequence) == ("e1", "desk", parts, 7)

        part = ReadPart(1, b"k", frozenset({1}), 100, lines=True)
        reading = export.read(part)
        message = await script.hear(Kind.READ)
        assert pickle.loads(message.content) == OpenPart("", 1, part)
        for content, expected in ((encode_part(5, b"five"), (5, b"five")), (encode_part(0, b"footer"), None)):
            following = asyncio.ensure_future(reading.next())
            await script.hear(Kind.NEXT)
            script.say(Kind.PIECE, message.run, content)
            assert await following == expected
        assert reading.footer() == b"footer"
        reading.close()
        await script.hear(Kind.CLOSE)

        broken = export.read(part)
        await script.hear(Kind.READ)
        script.die()
        await passes(lambda: lost)  # also if nobody reads it
        with pytest.raises(StoreError) as caught:
            await broken.next()
        assert caught.value.reason is Reason.READER_LOST
        assert set(lost) == {"e1"}

    played(world, play)
