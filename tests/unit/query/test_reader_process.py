"""A reader process from the inside: its runs, and its end (reader_processes/process)."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sow.v1 import sow_pb2
from sow_server.engine.following import Moment, TopicImage
from sow_server.engine.values.database import Failed
from sow_server.engine.values.errors import StoreError
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.query.export_parts import Export, PartFigures
from sow_server.reader_processes import process
from sow_server.reader_processes.messages import (
    ExportFigures,
    ExportOf,
    Kind,
    Message,
    OpenExport,
    OpenQuery,
    Start,
    decode_cut,
    described,
    encode_moment,
    encode_names,
    receive,
    send,
)
from sow_server.reader_processes.process import ReaderProcess
from sow_server.services.records.answering import QueryAnswer
from tests.support.stores.stores import Rig


class Server:
    """The server's end of a reader process that runs in this one."""

    def __init__(self, rig: Rig, logs: Path) -> None:
        self.rig = rig
        self._logs = logs

    async def begin(self) -> None:
        ours, theirs = socket.socketpair()
        self.reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        self.rig.store.beats.begin()
        self.process = ReaderProcess(Start(str(self.rig.path), str(self._logs), 2**20, 2**20, 1), writer)
        self.serving = asyncio.ensure_future(self.process.serve(reader))

    async def end(self) -> None:
        self._writer.close()
        with pytest.raises(EOFError):
            await self.serving
        self.process._follower.close()

    def query(self, caller: str = "") -> bytes:
        topic = self.rig.topic("t")
        request = sow_pb2.QueryRequest(topic="t", keys_only=True).SerializeToString()
        return pickle.dumps(OpenQuery(caller, request, TopicImage.of(topic), topic.statistics, UNRESTRICTED))

    def say(self, kind: Kind, run: int = 0, content: bytes = b"") -> None:
        send(self._writer, kind, run, content)

    async def hear(self, kind: Kind) -> Message:
        """The next message, which is of this kind."""
        message = await asyncio.wait_for(receive(self.reader), 20)
        assert message.kind is kind, message
        return message

    async def beat(self) -> None:
        """Answers a request for a moment."""
        await self.hear(Kind.BEAT)
        moments: list[Moment | StoreError] = []
        self.rig.store.beats.make().then(moments.append)
        self.say(Kind.MOMENT, 0, encode_moment(self.rig.answer(moments)))

    async def answer(self, run: int) -> list[str]:
        """The keys of all records, by a query from its opening to its end."""
        self.say(Kind.QUERY, run, self.query())
        await self.beat()
        assert decode_cut((await self.hear(Kind.OPENED)).content)[0]
        self.say(Kind.GO, run, encode_names(["one"]))
        found: list[str] = []
        while True:
            self.say(Kind.NEXT, run)
            message = await asyncio.wait_for(receive(self.reader), 20)
            if message.kind is Kind.END:
                return found
            assert (message.kind, message.run) == (Kind.PIECE, run)
            found += sow_pb2.QueryResponse.FromString(message.content).batch.key


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    logs = tmp_path / "logs"
    logs.mkdir()
    rig = Rig(tmp_path / "store")
    rig.create_topic("t")
    for key in "abc":
        rig.put("t", key)
    yield Server(rig, logs)
    rig.close()


def played(server: Server, play: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await server.begin()
        try:
            await play()
        finally:
            await server.end()

    asyncio.run(main())


def test_a_run_that_is_given_up_at_once_leaves_nothing(server: Server) -> None:
    """CLOSE comes with the request, before the run has begun: it stayed open for ever."""

    async def play() -> None:
        server.say(Kind.QUERY, 1, server.query())
        server.say(Kind.CLOSE, 1)
        assert len(await server.answer(2)) == 3
        assert not server.process._runs

    played(server, play)


def test_the_cut_of_an_export_is_told_before_its_parts_are_found(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits for the cut so long and no longer, and finding the parts of a large topic takes its time."""
    prepared: list[Export] = []
    prepare = Export.prepare

    def noted(export: Export) -> bool:
        prepared.append(export)
        return prepare(export)

    monkeypatch.setattr(Export, "prepare", noted)

    async def play() -> None:
        topic = server.rig.topic("t")
        share = ExportOf(TopicImage.of(topic), topic.statistics.records, UNRESTRICTED, "", 1)
        asked = OpenExport("desk", "desk", (share,))
        server.say(Kind.EXPORT, 1, pickle.dumps(asked))
        await server.beat()
        await server.hear(Kind.OPENED)
        assert not prepared
        server.say(Kind.GO, 1, encode_names([]))
        server.say(Kind.NEXT, 1)
        assert ExportFigures.decode((await server.hear(Kind.PIECE)).content).parts == (PartFigures(3, 0),)
        server.say(Kind.CLOSE, 1)
        assert len(await server.answer(2)) == 3
        assert not server.process._exports

    played(server, play)


@pytest.mark.parametrize("at", ["opening", "opened", "going"])
def test_a_run_that_is_given_up_later_closes_its_cut(server: Server, at: str) -> None:
    async def play() -> None:
        server.say(Kind.QUERY, 1, server.query())
        await server.hear(Kind.BEAT)
        if at == "opening":
            server.say(Kind.CLOSE, 1)
        moments: list[Moment | StoreError] = []
        server.rig.store.beats.make().then(moments.append)
        server.say(Kind.MOMENT, 0, encode_moment(server.rig.answer(moments)))
        if at != "opening":
            await server.hear(Kind.OPENED)
        if at == "going":
            server.say(Kind.GO, 1, encode_names([]))
            server.say(Kind.NEXT, 1)
        server.say(Kind.CLOSE, 1)
        if at == "going":
            while server.process._runs:  # noqa: ASYNC110  # the tested code has no event for it
                await asyncio.sleep(0)
            return
        assert len(await server.answer(2)) == 3
        assert not server.process._runs
        assert not any(cursor._iterator for cursor in server.process._follower._database._cursors)

    played(server, play)


def test_a_query_is_opened_before_many_busy_runs_have_all_worked_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """process [1]. Story: every run worked between any two steps of an opening. With many slow queries
    a cut came later than the server waits for it, so its own process answered."""
    busy = 24
    worked = 0

    def endless(answer: QueryAnswer, origins: Sequence[str]) -> bytes:
        nonlocal worked
        worked += 1
        return b""

    monkeypatch.setattr(QueryAnswer, "step", endless)

    async def play() -> None:
        for run in range(1, busy + 1):
            server.say(Kind.QUERY, run, server.query())
            await server.beat()
            await server.hear(Kind.OPENED)
        for run in range(1, busy + 1):
            server.say(Kind.GO, run, encode_names([]))
        while worked < 2 * busy:  # noqa: ASYNC110  # the tested code has no event for it
            await asyncio.sleep(0)
        before = worked
        server.say(Kind.QUERY, busy + 1, server.query())
        await server.beat()
        await server.hear(Kind.OPENED)
        assert 0 < worked - before < busy

    played(server, play)


def test_a_caller_with_many_runs_gives_the_others_their_turns(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """N7: by caller, not by run."""
    busy = 30
    worked: list[QueryAnswer] = []

    def endless(answer: QueryAnswer, origins: Sequence[str]) -> bytes:
        worked.append(answer)
        return b""

    monkeypatch.setattr(QueryAnswer, "step", endless)

    async def play() -> None:
        for run in range(1, busy + 2):
            server.say(Kind.QUERY, run, server.query("much" if run <= busy else "little"))
            await server.beat()
            await server.hear(Kind.OPENED)
        for run in range(1, busy + 2):
            server.say(Kind.GO, run, encode_names([]))
        while len(worked) < 40 * busy:  # noqa: ASYNC110  # the tested code has no event for it
            await asyncio.sleep(0)
        times = Counter(id(answer) for answer in worked[5 * busy :])
        assert max(times.values()) > 5 * min(times.values()), times

    played(server, play)


def test_a_process_that_cannot_move_on_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody heard of it: the process went on, and held the removed files of its last state."""

    def move() -> None:
        raise Failed("the logs are removed faster than they can be read")

    monkeypatch.setattr(process, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(process, "MOVE_LOOKS", 1)

    async def play() -> None:
        monkeypatch.setattr(server.process._follower, "move", move)
        with pytest.raises(EOFError):
            await asyncio.wait_for(receive(server.reader), 20)

    played(server, play)


def test_a_process_that_cannot_move_on_ends_after_its_last_run(server: Server) -> None:
    async def play() -> None:
        server.process._stale = True
        server.say(Kind.QUERY, 1, server.query())
        error = described((await server.hear(Kind.FAILED)).content)
        assert "ends after its last run" in str(error), "it asks for no beats any more"
        with pytest.raises(EOFError):
            await asyncio.wait_for(receive(server.reader), 20)

    played(server, play)
