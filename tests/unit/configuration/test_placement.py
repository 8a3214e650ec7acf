"""The placement of topics in cells: its file, its decisions, and what is made of other cells' answers (C1 to C7)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow_server import placement as placing
from sow_server.cell_watch import CellWatch
from sow_server.cells import Answer, Cells, Trouble, trouble_of
from sow_server.config import ConfigError, PlacementConfig, load
from sow_server.engine.catalog.topics import UNDELIVERED
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.placement import DECISIONS_KEPT, Placement, Places, configured_places, load_placement
from sow_server.prepared import PreparedFile
from tests.support.servers.cells import NOBODY, placement
from tests.support.stores.parts import NoCalls, NoStore


def written(folder: Path, text: str) -> Path:
    path = folder / "placement.toml"
    path.write_text(text)
    return path


def places(folder: Path, text: str, cell: str = "a") -> Places:
    path = written(folder, text)
    return Places(cell, path, load_placement(path))


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ": version: is missing"),
        ('version = "1"', ': version: expected an integer, found the text "1"'),
        ("version = 0", ": version: 0 is below the minimum, 1"),
        pytest.param("version = 1\n" + "a." * 2_000 + "a = 1", ":2:2: a name here has 50 dots or more", id="dots"),
        pytest.param(
            "# '''\n#" + " -." * 60 + "\n" + "a." * 60 + "a = 1", ":2:4: a name here has 50", id="dots of no comment"
        ),
        pytest.param("[a" + ' . \'b\'."\\""' * 25 + "]", ":1:4: a name here has 50 dots or more", id="odd dots"),
        ("version = 1", ": cells: expected the table [cells] with the addresses of each cell"),
        ("version = 1\n[cells]", ":2: cells: expected the table [cells] with the addresses of each cell"),
        ('version = 1\n[cells]\na = ["h:1"]', ": default: is missing"),
        ('version = 1\ndefault = "b"\n[cells]\na = ["h:1"]', ': default: "b" is none of [cells]'),
        ('version = 1\ndefault = "a"\n[cells]\na = []', ":3: [cells] a: has no address"),
        ('version = 1\ndefault = "a"\n[cells]\na = "h:1"', ":3: [cells] a: expected addresses such as"),
        ('version = 1\ndefault = "a"\n[cells]\na = ["h"]', ':3: [cells] a: "h" is not host:port'),
        ('version = 1\ndefault = "a"\n[cells]\na = ["h:0"]', ':3: [cells] a: "h:0" names no port'),
        ('version = 1\ndefault = "a"\n[cells]\na = ["h:1", "h:1"]', ':3: [cells] a: "h:1" occurs twice'),
        ('version = 1\ndefault = "a"\n[cells]\na = ["h:1"]\nb = ["H:1"]', ':3: [cells] b: "H:1" occurs in "a", too'),
        ('version = 1\ndefault = "a"\n[cells]\na = ["h:1"]\nb = ["h:01"]', ':3: [cells] b: "h:01" occurs in "a", too'),
        ('version = 1\ndefault = "a"\n[cells]\na = ["h:1", "H:1"]', ':3: [cells] a: "H:1" occurs twice'),
        ('version = 1\ndefault = "a"\n[cells]\na = ["h:1"]\na = ["h:2"]', ":5:12: cannot overwrite a value"),
        ('version = 1\ndefault = "a"\n[cells]\n"_x" = ["h:1"]', ":3: [cells] _x: expected 1 to 100 of"),
        (placement(1, ("orders", "c")), ':6: [topics[0]] cell: "c" is none of [cells]'),
        (placement(1, ("x", "a"), ("(", "b")), ":9: [topics[1]] pattern:"),
        (placement(1) + "[[topics]]\ncell = 'a'\n", ":6: [topics[0]] pattern: is missing"),
        (placement(1) + "[[topics]]\npattern = 'a'\n", ":6: [topics[0]] cell: is missing"),
        (placement(1) + "[[topics]]\npatern = 'a'\n", ":6: [topics[0]] patern: unknown key, did you mean pattern?"),
        ("topics = 3\n" + placement(1), ": topics: expected tables, each under the heading [[topics]]"),
        ("deflaut = 3\n" + placement(1), ": deflaut: unknown key, did you mean default?"),
    ],
)
def test_a_fault_names_the_file_the_line_and_the_key(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_placement(path)
    assert str(refused.value).startswith(f"{path}{told}")


def test_a_line_of_dots_and_dashes_is_a_comment_as_any_other(tmp_path: Path) -> None:
    path = written(tmp_path, f"# {'-.' * 60}\n\t#{' . -' * 60}\n{placement(1)}")
    load_placement(path)
    path.write_text(path.read_text() + "a." * 60 + "a = 1\n")
    with pytest.raises(ConfigError, match=r":8:2: a name here has 50 dots or more"):
        load_placement(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CELLS_MAX", placement(1)),
        ("PATTERNS_MAX", placement(1, ("a", "a"), ("b", "a"))),
        ("SERVERS_CHARACTERS_MAX", placement(1)),
        ("SERVERS_MAX", placement(1, cells={"a": ["h:1", "h:2"]})),
    ],
)
def test_a_placement_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    path = written(tmp_path, text)
    load_placement(path)
    monkeypatch.setattr(placing, name, 1)
    with pytest.raises(ConfigError, match="more than"):
        load_placement(path)


def test_the_configuration_names_the_file_and_an_own_cell(tmp_path: Path) -> None:
    written(tmp_path, placement(1))
    config = tmp_path / "sow.toml"

    def configured(text: str) -> Places | None:
        config.write_text(text)
        return configured_places(load(config))

    assert configured("") is None
    found = configured('[placement]\ncell = "b"\nfile = "placement.toml"\n')
    assert found is not None
    assert (found.cell, found.file) == ("b", tmp_path / "placement.toml")
    with pytest.raises(ConfigError, match=r'placement.toml: \[cells\] has no "c", the name of this cell'):
        configured('[placement]\ncell = "c"\nfile = "placement.toml"\n')
    with pytest.raises(ConfigError, match=r"\[placement\] file: also needs cell"):
        configured('[placement]\nfile = "placement.toml"\n')
    with pytest.raises(ConfigError, match=r"\[placement\] cell: also needs file"):
        configured('[placement]\ncell = "a"\n')
    with pytest.raises(ConfigError, match=r"gone.toml: cannot be read"):
        configured('[placement]\ncell = "a"\nfile = "gone.toml"\n')


def test_a_digest_is_of_the_content_and_not_of_the_text(tmp_path: Path) -> None:
    first = places(tmp_path, placement(1, ("x", "b"))).digest
    shuffled = f'default = "a"  # a word\nversion = 1\n[cells]\nb = ["{NOBODY}"]\na = ["127.0.0.1:2"]\n'
    shuffled += "[[topics]]\ncell = 'b'\npattern = \"x\"\n"
    assert places(tmp_path, shuffled).digest == first
    others = [placement(2, ("x", "b")), placement(1, ("y", "b")), placement(1, ("x", "a")), placement(1)]
    others.append(placement(1, ("x", "b"), default="b"))
    others.append(placement(1, ("x", "b"), cells={"a": ["127.0.0.1:3"], "b": [NOBODY]}))
    assert len({first, *(places(tmp_path, text).digest for text in others)}) == len(others) + 1


# -- decisions ---------------------------------------------------------------------------------------------------------

NAMES = st.text("ab.", min_size=1, max_size=4)
PATTERNS = st.sampled_from(["a", "b.*", ".*", r"a\..*", "a|b", "[ab]+", ".b", r".*\.a"])


@given(
    st.lists(st.tuples(PATTERNS, st.sampled_from("abc")), max_size=6),
    st.sampled_from("abc"),
    st.lists(NAMES, max_size=20),
)
def test_the_first_pattern_of_the_whole_name_counts(
    topics: list[tuple[str, str]], default: str, names: list[str]
) -> None:
    """A model: Python's own expressions, from the top to the bottom; asked twice, as decisions are remembered."""
    text = placement(1, *topics, default=default, cells={cell: [f"h:{port}"] for port, cell in enumerate("abc", 1)})
    path = Path("/dev/shm") / f"placement-{random.getrandbits(64):x}.toml"
    try:
        path.write_text(text)
        found = Places("a", path, load_placement(path))
    finally:
        path.unlink()
    for name in names * 2:
        cell = next((cell for pattern, cell in topics if re.fullmatch(pattern, name)), default)
        assert found.elsewhere(name) == (None if cell == "a" else cell)


def test_decisions_are_bounded_and_go_with_their_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = places(tmp_path, placement(1, ("x.*", "b")))
    asked: list[str] = []
    cell_of = Placement.cell_of

    def counted(self: Placement, name: str) -> str:
        asked.append(name)
        return cell_of(self, name)

    monkeypatch.setattr(Placement, "cell_of", counted)
    for _ in range(3):
        assert found.elsewhere("x1") == "b"
    assert asked == ["x1"]
    for number in range(DECISIONS_KEPT + 1):
        found.elsewhere(f"t{number}")
    _, decided = found._used
    assert len(decided) <= DECISIONS_KEPT
    assert found.elsewhere("x1") == "b"
    found.use(load_placement(written(tmp_path, placement(2))))
    assert found.elsewhere("x1") is None


@pytest.mark.parametrize("name", ["", "a b", "_system", "x" * 201, "ä"])
def test_no_pattern_runs_over_a_name_that_no_topic_can_have(tmp_path: Path, name: str) -> None:
    found = places(tmp_path, placement(1, (".*", "b")))
    with pytest.raises(StoreError) as refused:
        found.refusal(name)
    assert refused.value.reason is Reason.TOPIC_NAME_INVALID
    assert not found._used[1]


def test_each_cell_has_dead_letters_without_a_target_of_its_own(tmp_path: Path) -> None:
    """Story: once a dead letter had no target, lists of topics, metrics and GetPlacement failed for its name."""
    found = places(tmp_path, placement(1, (".*", "b")))
    assert found.elsewhere(UNDELIVERED) is None
    assert found.refusal(UNDELIVERED) is None


def test_the_refusal_of_many_long_addresses_fits_into_trailers(tmp_path: Path) -> None:
    servers = [f"{'h' * 240}.{number}:7450" for number in range(7)]
    found = places(tmp_path, placement(1, (".*", "b"), cells={"a": ["h:1"], "b": servers}))
    error = found.refusal("t" * 200)
    assert error is not None
    assert error.details["servers"].split(",") == servers
    assert len(error.details["servers"]) < 2_100


# -- what others say ---------------------------------------------------------------------------------------------------


def test_the_trouble_of_a_cell_follows_from_its_answers(tmp_path: Path) -> None:
    found = places(tmp_path, placement(3))
    same = Answer("b", 3, found.digest)
    assert trouble_of(found, "b", {"h:1": same, "h:2": "UNAVAILABLE: no"}) is None
    assert trouble_of(found, "b", {"h:1": "no", "h:2": "never"}) == (Trouble.UNREACHABLE, "h:1: no; h:2: never")
    assert trouble_of(found, "b", {"h:1": same, "h:2": Answer("", 0, "")}) == (
        Trouble.DIFFERS,
        "h:2 has no placement",
    )
    assert trouble_of(found, "b", {"h:1": same._replace(cell="c")}) == (
        Trouble.DIFFERS,
        "h:1 says that it is the cell c",
    )
    assert trouble_of(found, "b", {"h:1": Answer("b", 2, "x")}) == (Trouble.DIFFERS, "h:1 has version 2, here it is 3")
    assert trouble_of(found, "a", {"h:1": "no"}) is None, "it is the cell of this server, which runs"
    strays = same._replace(strays=2)
    assert trouble_of(found, "b", {"h:1": same, "h:2": strays}) == (
        Trouble.STRAYS,
        "h:2 has 2 topics that live in a, the cell of this server",
    )
    other = Answer("b", 3, "x")
    assert trouble_of(found, "b", {"h:1": other}) == (Trouble.DIFFERS, "h:1 has another content of version 3")


def test_answers_from_before_a_reload_are_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: a reload during a look at a cell that is down, and the server said that its own cell differs."""
    found = places(tmp_path, placement(1))
    files = PreparedFile(tmp_path, found.file)
    cells = Cells(found, ThreadPoolExecutor(1), NoCalls(), NoStore(), files)
    asked: list[int] = []

    async def ask(self: CellWatch, address: str) -> Answer:
        version = found.placement.version
        answer = Answer("b" if address == NOBODY else "a", version, found.digest)
        asked.append(version)
        if version == 1:
            found.use(load_placement(written(tmp_path, placement(2))))
        return answer

    monkeypatch.setattr(CellWatch, "_ask", ask)
    asyncio.run(CellWatch(PlacementConfig("a", found.file), cells, lambda: 1).look())
    assert not cells.problems
    assert asked.count(2) >= 2


def test_a_cell_in_trouble_is_looked_at_soon_and_then_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: cells that start together look at each other before all of them listen. For the next 10 s each one said
    that others are unreachable."""
    found = places(tmp_path, placement(1))
    cells = Cells(found, ThreadPoolExecutor(1), NoCalls(), NoStore(), PreparedFile(tmp_path, found.file))
    answers: dict[str, Answer | str] = {}
    pauses: list[float] = []

    async def ask(self: CellWatch, address: str) -> Answer | str:
        return answers.get(address, Answer("a", 1, found.digest))

    def later(self: object, seconds: float, look: Callable[[], None]) -> Mock:
        pauses.append(round(seconds, 1))
        assert look == cells.look_soon
        return Mock()

    monkeypatch.setattr(CellWatch, "_ask", ask)
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", later)

    async def look(answer: Answer | str) -> list[float]:
        answers[NOBODY] = answer
        pauses.clear()
        await watch.look()
        return pauses

    watch = CellWatch(PlacementConfig("a", found.file), cells, lambda: 1)
    well = Answer("b", 1, found.digest)

    async def all_looks() -> None:
        assert [await look("no") and pauses[0] for _ in range(6)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
        assert await look("no") == [], "from now on with the looks that come every 10 s"
        assert await look(well) == []
        assert await look("no") == [0.2], "it is another trouble"
        await watch.close()

    asyncio.run(all_looks())


def test_trouble_that_a_move_makes_for_a_moment_is_told_if_the_next_look_sees_trouble_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: each move logged `cell_in_trouble`, and `cell_is_well` a second later."""
    found = places(tmp_path, placement(3))
    cells = Cells(found, ThreadPoolExecutor(1), NoCalls(), NoStore(), PreparedFile(tmp_path, found.file))
    well = Answer("b", 3, found.digest)
    older, strays = well._replace(version=2, digest="x"), well._replace(strays=1)
    now, answers, pauses = [0], {"a": Answer("a", 3, found.digest)}, list[float]()

    async def ask(self: CellWatch, address: str) -> Answer | str:
        return answers["b" if address == NOBODY else "a"]

    def later(self: object, seconds: float, look: Callable[[], None]) -> Mock:
        pauses.append(seconds)
        return Mock()

    monkeypatch.setattr(CellWatch, "_ask", ask)
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", later)
    watch = CellWatch(PlacementConfig("a", found.file), cells, lambda: now[0])

    async def look(answer: Answer) -> list[tuple[Trouble, int]]:
        """The troubles that are told after the look, each with its begin."""
        answers["b"] = answer
        now[0] += 1
        pauses.clear()
        await watch.look()
        return [(problem.kind, problem.since_micros) for problem in cells.problems.values()]

    async def all_looks() -> None:
        assert (await look(older), pauses) == ([], [1.0])
        assert (await look(well), pauses) == ([], [])
        assert (await look(strays), pauses) == ([], []), "the next look comes in 10 s"
        assert await look(strays) == [(Trouble.STRAYS, 3)]
        assert await look(older) == [(Trouble.DIFFERS, 5)], "there is trouble already"
        assert await look(well) == []
        assert await look(older) == []
        assert await look(strays) == [(Trouble.STRAYS, 7)], "trouble that changes its kind is not put off again"
        for number, answer in enumerate((older._replace(version=3), Answer("", 0, ""), well._replace(cell="c"))):
            assert await look(well) == []
            assert await look(answer) == [(Trouble.DIFFERS, 10 + 2 * number)], "no move makes this"
        await watch.close()

    asyncio.run(all_looks())


def test_a_placement_is_kept_before_it_is_in_force(tmp_path: Path) -> None:
    """Else a server that is killed in between comes back, and starts with the file from before (rule C25)."""
    found = places(tmp_path, placement(1))
    in_force: list[int] = []

    class Store(NoStore):
        async def keep(self, placement: Placement) -> None:
            await super().keep(placement)
            in_force.append(found.placement.version)

    store = Store()

    async def reload() -> None:
        cells = Cells(found, ThreadPoolExecutor(1), NoCalls(), store, PreparedFile(tmp_path, found.file))
        for text in (placement(2), placement(2), placement(3, cells={"b": [NOBODY]}, default="b"), placement(1)):
            found.file.write_text(text)
            with contextlib.suppress(StoreError):
                await cells.reload()

    asyncio.run(reload())
    assert ([one.version for one in store.kept], in_force) == ([2], [1])
