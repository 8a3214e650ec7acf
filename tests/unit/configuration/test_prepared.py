"""A placement that waits until topics have moved (rule C16): what it holds back, its file, and when it counts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from sow_cli.placement_text import moved_text
from sow_server.cell_watch import CellWatch
from sow_server.cells import Answer, Cells, trouble_of
from sow_server.config import ConfigError, PlacementConfig
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.placement import Places, load_placement, placement_of
from sow_server.prepared import FILE, Prepared, PreparedFile
from tests.support.servers.cells import placement
from tests.support.stores.parts import NoCalls, NoStore

CELLS: Final[Mapping[str, list[str]]] = {"a": ["h:1", "h:2"], "b": ["h:3"]}
BEFORE: Final = placement(1, cells=CELLS)
AFTER: Final = placement(2, ("orders", "b"), cells=CELLS)


class Links:
    """Links that count their probes."""

    def __init__(self) -> None:
        self.probes = 0

    def probe_sources(self) -> int:
        self.probes += 1
        return self.probes


class Server:
    """A server of the cell b, to which orders are to come."""

    def __init__(self, folder: Path, settled: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)) -> None:
        self.file = folder / "placement.toml"
        if not self.file.exists():
            self.file.write_text(BEFORE)
        self.prepared_file = PreparedFile(folder, self.file)
        self.places = Places("b", self.file, load_placement(self.file))
        self.prepared_file.hold(self.places)
        prepared = self.prepared_file.load()
        self.cells = Cells(
            self.places, ThreadPoolExecutor(1), NoCalls(), NoStore(settled), self.prepared_file, prepared
        )
        self.lacking = ""
        self.asked: list[int] = []
        self.cells.lacks = self._lacks
        self.watch = CellWatch(PlacementConfig("b", self.file), self.cells, lambda: 1)
        self.links = Links()

    def _lacks(self, probe: int, _: Prepared) -> str:
        self.asked.append(probe)
        return self.lacking

    async def prepare(self, text: str = AFTER) -> None:
        await self.cells.prepare(text, ["orders"], ["a-1", "a-2"], 1)

    async def look(self, probe: int = 0) -> int:
        assert self.cells.prepared is not None
        return await self.watch._look_at_prepared(self.cells.prepared, self.links, probe)

    @property
    def serves(self) -> bool:
        return self.places.elsewhere("orders") is None


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer | str]:
    """What the servers of the cell a say; at first that they have the placement of before."""
    before = Answer("a", 1, placement_of(Path("x"), BEFORE).digest)
    found: dict[str, Answer | str] = {"h:1": before, "h:2": before}

    async def ask(self: CellWatch, address: str) -> Answer | str:
        return found[address]

    monkeypatch.setattr(CellWatch, "_ask", ask)
    return found


SWITCHED: Final = Answer("a", 2, placement_of(Path("x"), AFTER).digest)


def test_a_topic_counts_here_once_all_that_it_leaves_have_switched_and_all_of_it_is_here(
    server: Server, answers: dict[str, Answer | str]
) -> None:
    async def run() -> None:
        await server.prepare()
        server.asked.clear()
        assert await server.look() == 0
        answers["h:1"] = SWITCHED
        assert await server.look() == 0, "the other server may still take it"
        answers["h:2"] = "UNAVAILABLE"
        assert await server.look() == 0, "it may have records that nobody else has"
        assert not server.links.probes
        answers["h:2"] = SWITCHED
        server.lacking = "changes of a-1 are under way"
        probe = await server.look()
        assert probe == 1
        assert not server.serves
        assert server.cells.waits_for == server.lacking
        await server.look(probe)
        server.lacking = ""
        await server.look(probe)
        assert set(server.asked) == {1}, "the first probe after the switch counts"

    asyncio.run(run())
    assert server.serves
    assert server.cells.prepared is None
    assert load_placement(server.file).version == 2
    assert server.prepared_file.load() is None


def test_a_server_that_starts_goes_on_waiting_also_with_the_new_file(tmp_path: Path, server: Server) -> None:
    """The file may be that of the cell that the topics leave, which has switched (--cells)."""
    asyncio.run(server.prepare())
    server.file.write_text(AFTER)
    again = Server(tmp_path)
    assert again.places.placement.version == 2
    assert not again.serves
    refusal = again.places.refusal("orders")
    assert refusal is not None
    assert (refusal.details["cell"], refusal.details["servers"]) == ("a", "h:1,h:2")
    asyncio.run(again.cells.reload())
    assert not again.serves


def test_a_topic_does_not_arrive_once_it_was_placed_back(server: Server, answers: dict[str, Answer | str]) -> None:
    async def run() -> None:
        await server.prepare()
        answers.update({"h:1": SWITCHED, "h:2": SWITCHED})
        server.lacking = "changes of a-1 are under way"
        probe = await server.look()
        assert probe == 1
        server.lacking = ""
        answers["h:2"] = Answer("a", 3, "another")
        assert await server.look(probe) == 0, "then a probe counts that was sent after it"
        assert not server.serves
        answers.update({"h:1": "UNAVAILABLE", "h:2": SWITCHED})
        await server.look(probe)

    asyncio.run(run())
    assert server.serves


def test_a_cell_that_has_left_the_placement_has_to_give_the_topics_away(
    server: Server, answers: dict[str, Answer | str]
) -> None:
    async def run() -> None:
        await server.prepare()
        await server.cells.reload(placement(3, default="b", cells={"b": ["h:3"]}))
        assert await server.look() == 0
        assert not server.serves
        answers.update({"h:1": SWITCHED, "h:2": SWITCHED})
        await server.look()

    asyncio.run(run())
    assert server.serves


@pytest.mark.parametrize("ends", ["arrives", "is dropped"])
@pytest.mark.parametrize("fault", ["keep", "forget"])
def test_a_step_that_fails_is_made_again(
    server: Server, answers: dict[str, Answer | str], monkeypatch: pytest.MonkeyPatch, ends: str, fault: str
) -> None:
    """Story: the disk was full for a moment."""

    async def full(_: object) -> None:
        raise StoreError(Reason.WRITE_STALLED, "the disk cannot keep up")

    def unremovable(_: object) -> None:
        raise OSError("read-only")

    async def end() -> None:
        if ends == "arrives":
            await server.look()
        else:
            await server.cells.drop_prepared()

    async def run() -> None:
        await server.prepare()
        answers.update({"h:1": SWITCHED, "h:2": SWITCHED})
        with monkeypatch.context() as patch:
            if fault == "keep":
                patch.setattr(NoStore, "keep", lambda _, placement: full(placement))
            else:
                patch.setattr(PreparedFile, "remove", unremovable)
            with pytest.raises(StoreError):
                await end()
        assert not server.serves
        assert server.cells.prepared is not None
        await end()

    asyncio.run(run())
    assert server.serves == (ends == "arrives")
    assert server.cells.prepared is None
    assert not server.places.held
    assert server.prepared_file.load() is None


def test_a_fault_after_the_switch_is_mended_by_the_next_run(tmp_path: Path, answers: dict[str, Answer | str]) -> None:
    faults = [StoreError(Reason.OVERLOADED, "there is much to do")]

    async def settled() -> None:
        if faults:
            raise faults.pop()

    server = Server(tmp_path, settled)

    async def run() -> None:
        await server.prepare()
        answers.update({"h:1": SWITCHED, "h:2": SWITCHED})
        with pytest.raises(StoreError):
            await server.look()
        assert server.cells.told.version == 1
        await server.prepare()
        assert server.cells.told.version == 2

    asyncio.run(run())
    assert server.serves


def test_a_start_forgets_what_a_higher_version_has_ended(tmp_path: Path, server: Server) -> None:
    """The server ended after the reload had written the file, and before it forgot what waited."""
    asyncio.run(server.prepare())
    server.file.write_text(placement(3, cells=CELLS))
    again = Server(tmp_path)
    asyncio.run(again.look())
    assert again.cells.prepared is None
    assert again.prepared_file.load() is None


def test_a_higher_version_ends_the_wait_unless_it_places_the_topic_here(server: Server) -> None:
    async def run() -> None:
        await server.prepare()
        await server.cells.reload(placement(3, ("orders|trades", "b"), cells=CELLS))
        assert not server.serves, "it has not arrived"
        assert server.places.elsewhere("trades") is None
        await server.cells.reload(placement(4, cells=CELLS))
        assert server.cells.prepared is None

    asyncio.run(run())


def test_what_was_prepared_can_be_forgotten(server: Server) -> None:
    async def run() -> None:
        await server.prepare()
        await server.prepare()  # the same again
        with pytest.raises(StoreError, match="waits here already"):
            await server.prepare(placement(2, ("orders", "b"), ("more", "b"), cells=CELLS))
        await server.cells.drop_prepared()
        assert server.cells.prepared is None
        assert not server.cells.has_prepared.is_set()
        await server.cells.drop_prepared()

    asyncio.run(run())
    assert server.prepared_file.load() is None


@pytest.mark.parametrize(
    ("text", "topics", "told"),
    [
        (AFTER, ["trades"], "'trades' stays in the cell a"),
        (placement(1, ("orders", "b"), cells=CELLS), ["orders"], "1 is not above 1"),
        (AFTER.replace("'h:1'", "'h:9'"), ["orders"], "a: has other addresses now"),
        ("version = 2", ["orders"], "cells: expected the table"),
    ],
)
def test_a_placement_that_cannot_count_is_not_prepared(server: Server, text: str, topics: list[str], told: str) -> None:
    with pytest.raises(StoreError, match=told) as refused:
        asyncio.run(server.cells.prepare(text, topics, ["a-1"], 1))
    assert refused.value.reason is Reason.INVALID_ARGUMENT
    assert server.cells.prepared is None
    assert server.prepared_file.load() is None


def test_a_name_that_no_topic_has_is_not_prepared(server: Server) -> None:
    with pytest.raises(StoreError) as refused:
        asyncio.run(server.cells.prepare(placement(2, default="b", cells=CELLS), ["or\nders"], ["a-1"], 1))
    assert refused.value.reason is Reason.TOPIC_NAME_INVALID
    assert server.prepared_file.load() is None


def test_a_topic_that_has_not_come_is_not_prepared(server: Server) -> None:
    server.lacking = "no link from a-1 is up"
    with pytest.raises(StoreError, match="no link from a-1 is up") as refused:
        asyncio.run(server.prepare())
    assert refused.value.reason is Reason.BEHIND
    assert server.prepared_file.load() is None


def test_a_topic_whose_cell_does_not_answer_here_is_not_prepared(
    server: Server, answers: dict[str, Answer | str]
) -> None:
    """As where [placement] has no certificate for mutual TLS: the switch was made, and the topic was in no cell."""
    server.cells.unanswered = server.watch.unanswered
    answers["h:2"] = "UNAVAILABLE: Socket closed"
    with pytest.raises(StoreError, match="the cell a has to answer at h:2: UNAVAILABLE: Socket closed") as refused:
        asyncio.run(server.prepare())
    assert refused.value.reason is Reason.BEHIND
    assert server.prepared_file.load() is None
    answers["h:2"] = SWITCHED
    asyncio.run(server.prepare())
    assert server.cells.prepared is not None


def test_others_hear_of_a_placement_once_what_was_let_in_is_on_disk(tmp_path: Path) -> None:
    settled = asyncio.Event()
    server = Server(tmp_path, settled.wait)

    async def run() -> None:
        reload = asyncio.create_task(server.cells.reload(AFTER))
        await _until(lambda: server.places.placement.version == 2)
        assert server.cells.told.version == 1
        reload.cancel()  # its caller has gone
        settled.set()
        await _until(lambda: server.cells.told.version == 2)

    asyncio.run(run())
    assert load_placement(server.file).version == 2


def test_a_load_that_goes_on_is_awaited(server: Server, answers: dict[str, Answer | str]) -> None:
    assert server.cells.told.digest == server.places.digest
    server.cells.applies = lambda: True
    assert server.cells.told == (1, "")
    assert trouble_of(server.places, "a", {"h:1": Answer("a", 1, "")}) is None

    async def run() -> None:
        await server.prepare()
        answers.update({"h:1": SWITCHED, "h:2": SWITCHED._replace(digest="")})
        assert await server.look() == 0

    asyncio.run(run())
    assert "still applies changes" in server.cells.waits_for


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - of another task
            await asyncio.sleep(0)


def test_a_damaged_file_is_told_with_a_remedy(server: Server) -> None:
    file = server.file.with_name(FILE)
    for content in ("", "{}", '{"placement": "", "leaves": {}, "sources": [], "since_micros": 1}'):
        file.write_text(content)
        with pytest.raises(ConfigError, match="remove the file"):
            server.prepared_file.load()


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    server = Server(folder)
    server.file.with_name(f"{server.file.name}.{os.getpid()}.new").mkdir()  # so it cannot be made
    with pytest.raises(StoreError, match="cannot be written"):
        asyncio.run(server.cells.reload(AFTER))
    assert server.places.placement.version == 1


# ---- the next file ----


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            (
                '# ours\nversion = 3  # raise it\ndefault = "a"\n[cells]\na = ["h:1"]\nb = ["h:2"]\n# 1\n[[topics]]\n'
                'pattern = "x.*"\ncell = "b"\n'
            ),
            (
                '# ours\nversion = 4  # raise it\ndefault = "a"\n[cells]\na = ["h:1"]\nb = ["h:2"]\n# 1\n[[topics]]\n'
                'pattern = \'o\\.k|t\'\ncell = "b"\n[[topics]]\npattern = "x.*"\ncell = "b"\n'
            ),
        ),
        (
            'version = 3\ndefault = "a"\n[cells]\na = ["h:1"]\nb = ["h:2"]',
            (
                'version = 4\ndefault = "a"\n[cells]\na = ["h:1"]\nb = ["h:2"]\n[[topics]]\npattern = \'o\\.k|t\'\n'
                'cell = "b"\n'
            ),
        ),
        (  # an earlier move of the same topics
            (
                'version = 3\ndefault = "a"\n[cells]\na = ["h:1"]\nb = ["h:2"]\n[[topics]]\npattern = \'o\\.k|t\'\n'
                'cell = "a"\n'
            ),
            (
                'version = 4\ndefault = "a"\n[cells]\na = ["h:1"]\nb = ["h:2"]\n[[topics]]\npattern = \'o\\.k|t\'\n'
                'cell = "b"\n'
            ),
        ),
        (  # a form that cannot be edited is written anew
            'topics = [{pattern = "x", cell = "b"}]\nversion = 3\ndefault = "a"\ncells = {a = ["h:1"], b = ["h:2"]}\n',
            (
                'version = 4\ndefault = "a"\n[cells]\n"a" = ["h:1"]\n"b" = ["h:2"]\n[[topics]]\n'
                'pattern = "o\\\\.k|t"\ncell = "b"\n[[topics]]\npattern = "x"\ncell = "b"\n'
            ),
        ),
    ],
)
def test_the_next_file_has_the_next_version_and_the_topics_in_front(text: str, wanted: str) -> None:
    assert moved_text(text, ["t", "o.k"], "b") == wanted
    placed = placement_of(Path("x"), wanted)
    assert (placed.version, placed.cell_of("o.k"), placed.cell_of("t"), placed.cell_of("oxk")) == (4, "b", "b", "a")
