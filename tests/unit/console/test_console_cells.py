"""The servers of a session: those named at the start, and those that their placement names (rules C11, C23)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Self, cast

import pytest

from sow_client import (
    AsyncClient,
    CellProblem,
    Instance,
    InvalidArgument,
    PermissionDenied,
    Placement,
    PreparedPlacement,
    SeparatedTopic,
    SowError,
    Status,
    Stray,
)
from sow_console.pages import overview
from sow_console.sessions import SERVERS_MAX, Session

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)
CELLS = {"a": ("10.0.0.1:7450",), "b": ("10.0.0.2:7450", "10.0.0.3:7450")}


class Told:
    """A client of a server that tells a placement."""

    def __init__(self, server: str, placement: Placement) -> None:
        self.server = server
        self.told = placement
        self.error: SowError | None = None
        self.places: dict[str, str] = {}
        self.serving = True

    async def describe_instance(self) -> Instance:
        if self.error is not None:
            raise self.error
        return Instance(self.server, self.server, f"id of {self.server}", "", "", self.serving, "0.1.0")

    async def placement(self, topic: str | None = None) -> Placement:
        if topic is None:
            return self.told
        return Placement(self.told.cell, cells=self.told.cells, topic_cell=self.places.get(topic, ""))

    async def status(self) -> Status:
        raise PermissionDenied("it needs observe", reason="PERMISSION_DENIED")

    @property
    def here(self) -> Self:
        return self


class Net:
    """Servers by their addresses, and the tokens that they were shown."""

    def __init__(self, placements: Mapping[str, Placement], refused: str = "") -> None:
        self.clients = {server: Told(server, placement) for server, placement in placements.items()}
        self.shown: list[str] = []
        self._refused = refused

    def session(self, *named: str) -> Session:
        def connect(server: str, token: str | None) -> AsyncClient:
            if server == self._refused:
                raise InvalidArgument("the token goes over TLS only", reason="INVALID_ARGUMENT")
            self.shown.append(server)
            return cast(AsyncClient, self.clients.setdefault(server, Told(server, Placement(""))))

        return Session({}, "token", connect, 0.0, named)


def servers(session: Session) -> tuple[str, ...]:
    """Those of a session that has looked at all that it knows."""

    async def look() -> tuple[str, ...]:
        for _ in range(2):
            for server in session.servers:
                await session.instance(server).look()
        return session.servers

    return asyncio.run(look())


def test_a_session_knows_the_servers_that_were_named_and_those_of_their_placement() -> None:
    session = Net({"10.0.0.1:7450": Placement("a", cells=CELLS)}).session("10.0.0.1:7450")
    assert session.servers == ("10.0.0.1:7450",), "nobody has told more yet"
    assert servers(session) == ("10.0.0.1:7450", "10.0.0.2:7450", "10.0.0.3:7450")
    assert [session.cell(server) for server in session.servers] == ["a", "b", "b"]
    assert session.servers_of("b", "10.0.0.1:7450") == ["10.0.0.2:7450", "10.0.0.3:7450"]


def test_no_other_server_names_one_and_nothing_but_an_address_is_one() -> None:
    """C11: else whoever holds one cell would be shown the tokens of all people."""
    named = {"a": ("10.0.0.1:7450",), "b": ("10.0.0.2:7450", "unix:/tmp/sow", "dns:///evil:7450", "DNS:7450", "x:0")}
    evil = {"a": ("10.0.0.1:7450",), "b": ("10.0.0.2:7450",), "c": ("evil:7450",)}
    net = Net({"10.0.0.1:7450": Placement("a", cells=named), "10.0.0.2:7450": Placement("b", cells=evil)})
    session = net.session("10.0.0.1:7450")
    assert servers(session) == ("10.0.0.1:7450",), "one wrong address spoils the cell"
    net.clients["10.0.0.1:7450"].told = Placement("a", cells=named | {"b": ("10.0.0.2:7450", "unix:/tmp/sow")})
    session = net.session("10.0.0.1:7450")
    assert servers(session) == ("10.0.0.1:7450", "10.0.0.2:7450")
    assert {*net.shown} == {"10.0.0.1:7450", "10.0.0.2:7450"}


def test_no_server_that_a_placement_names_tells_of_others() -> None:
    """C11, C23. Story: a page at a server of another cell asked that one which cells there are, and went there with the
    person's token."""

    async def cells_of(server: str) -> list[str]:
        session = Session(
            {}, "token", lambda at, token: AsyncClient(at, token=token, environment={}), 0.0, ("[::1]:1",)
        )
        try:
            return [*await session.client(server).cells()]
        finally:
            await session.end()

    assert asyncio.run(cells_of("127.0.0.1:1")) == [""], "it was not even asked"
    with pytest.raises(SowError) as refused:
        asyncio.run(cells_of("[::1]:1"))
    assert refused.value.reason == "UNREACHABLE", "the one that was named at the start is asked"


def test_a_server_is_of_the_cell_that_a_named_one_says() -> None:
    net = Net({"10.0.0.1:7450": Placement("a", cells=CELLS), "10.0.0.2:7450": Placement("a", cells=CELLS)})
    session = net.session("10.0.0.1:7450")
    servers(session)
    assert session.cell("10.0.0.2:7450") == "b", "it says that it is of a"
    assert session.servers_of("a", "10.0.0.1:7450") == ["10.0.0.1:7450"]


def test_the_word_about_cells_is_that_of_a_named_server_that_answers() -> None:
    told = Placement("a", cells={**CELLS, "c": ("10.0.0.4:7450",)})
    net = Net({"10.0.0.1:7450": told, "10.0.0.4:7450": told, "other:7450": Placement("")})
    session = net.session("other:7450", "10.0.0.1:7450", "10.0.0.4:7450")
    servers(session)
    homes = {server: session.home(server) for server in session.servers}
    assert homes.pop("other:7450") == "other:7450"
    assert homes == {
        "10.0.0.1:7450": "10.0.0.1:7450",
        "10.0.0.2:7450": "10.0.0.1:7450",
        "10.0.0.3:7450": "10.0.0.1:7450",
        "10.0.0.4:7450": "10.0.0.4:7450",
    }
    net.clients["10.0.0.1:7450"].error = SowError("refused", reason="UNREACHABLE")

    async def lost() -> str:
        session.instance("10.0.0.1:7450")._placement_again = 0.0
        await session.instance("10.0.0.1:7450").look()
        return session.home("10.0.0.2:7450")

    assert asyncio.run(lost()) == "10.0.0.4:7450"


def test_a_server_to_which_the_token_does_not_go_is_told_and_left_out() -> None:
    net = Net({"10.0.0.1:7450": Placement("a", cells=CELLS)}, refused="10.0.0.2:7450")
    session = net.session("10.0.0.1:7450")
    assert servers(session) == ("10.0.0.1:7450", "10.0.0.3:7450")
    assert session.refused == {"10.0.0.2:7450": "the token goes over TLS only"}


def test_an_instance_with_two_addresses_is_shown_once() -> None:
    net = Net({"sow:7450": Placement("a", cells=CELLS)})
    session = net.session("sow:7450")
    servers(session)
    net.clients["10.0.0.1:7450"].server = "sow:7450"  # the same instance
    assert servers(net.session("sow:7450")) == ("sow:7450", "10.0.0.2:7450", "10.0.0.3:7450")


def test_who_has_lost_the_token_knows_the_named_servers_alone() -> None:
    net = Net({"10.0.0.1:7450": Placement("a", cells=CELLS)})
    session = net.session("10.0.0.1:7450")
    assert len(servers(session)) == 3
    net.clients["10.0.0.1:7450"].error = PermissionDenied("it belongs to no identity", reason="UNAUTHENTICATED")
    assert servers(session) == ("10.0.0.1:7450",)


def test_the_servers_of_a_session_have_a_bound() -> None:
    many = {str(number): (f"10.0.1.{number}:7450",) for number in range(SERVERS_MAX + 10)}
    session = Net({"10.0.1.0:7450": Placement("0", cells=many)}).session("10.0.1.0:7450")
    assert len(servers(session)) == SERVERS_MAX


@pytest.mark.parametrize("server", ["10.0.0.1:7450", "10.0.0.2:7450", "10.0.0.3:7450", "other:7450"])
def test_a_page_about_a_topic_is_at_a_server_of_its_cell_that_serves(server: str) -> None:
    net = Net(
        {"10.0.0.1:7450": Placement("a", cells=CELLS), "10.0.0.2:7450": Placement("b"), "other:7450": Placement("")}
    )
    net.clients["10.0.0.1:7450"].places = {"orders": "b", "trades": "a"}
    net.clients["10.0.0.2:7450"].serving = False
    session = net.session("other:7450", "10.0.0.1:7450")
    servers(session)

    async def places() -> list[str]:
        return [await session.place(topic, server) for topic in ("orders", "trades", "hidden", "")]

    orders = server if server in CELLS["b"] else "10.0.0.3:7450"
    expected = [server] * 4 if server == "other:7450" else [orders, "10.0.0.1:7450", server, server]
    assert asyncio.run(places()) == expected, "and a server of another name space stays"


def test_trouble_with_a_cell_is_told_once_and_each_stray_by_its_server() -> None:
    differs = CellProblem("c", "DIFFERS", NOW, "its digest is another one")
    stray = Stray("orders", "b", 5, None)
    told = {
        "a:1": Placement("a", problems=(differs,), strays=(stray,)),
        "b:1": Placement("b", problems=(differs, CellProblem("d", "UNREACHABLE", NOW, "refused"))),
        "e:1": None,
    }
    assert overview.placement_alarms(told, NOW) == [
        ("a:1", "the cell c has another placement: its digest is another one"),
        ("a:1", "orders lives in the cell b, and a copy of it is here: sow doctor"),
        ("b:1", "the cell d is not reachable: refused"),
    ]


def test_strays_are_told_by_their_own_cell_or_else_by_another() -> None:
    has = CellProblem("a", "STRAYS", NOW, "a:1 has 1 topic that lives in b, the cell of this server")
    told = {"a:1": Placement("a", strays=(Stray("orders", "b", 5, None),)), "b:1": Placement("b", problems=(has,))}
    assert overview.placement_alarms(told, NOW) == [
        ("a:1", "orders lives in the cell b, and a copy of it is here: sow doctor")
    ]
    assert overview.placement_alarms({**told, "a:1": None}, NOW) == [
        ("b:1", f"the cell a has topics of this one: {has.message}")
    ]


def test_a_topic_that_is_separated_from_one_that_it_needs_is_an_alarm() -> None:
    both = SeparatedTopic("s", "dead_letter", "d", "b"), SeparatedTopic("sums", "source", "fills", "b")
    assert overview.placement_alarms({"a:1": Placement("a", separated=both)}, NOW) == [
        ("a:1", "the dead letters of s go to d, which lives in the cell b: they stay here, where nobody can read them"),
        ("a:1", "the view sums has the source fills, which lives in the cell b: nothing new comes into it"),
    ]


def test_a_prepared_placement_that_waits_for_long_is_an_alarm() -> None:
    waits = PreparedPlacement(7, "", NOW, ("orders",), "a-1 does not have it")
    told = {"b:1": Placement("b", prepared=waits)}
    assert overview.placement_alarms(told, NOW + timedelta(seconds=10)) == [], "as while a topic moves"
    assert overview.placement_alarms(told, NOW + timedelta(seconds=61)) == [
        ("b:1", "version 7 of the placement, with orders, waits for 1m01s: a-1 does not have it")
    ]
