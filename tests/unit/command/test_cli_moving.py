"""`sow cells move`: the servers that it calls (rule C11)."""

from __future__ import annotations

from dataclasses import replace
from typing import Self, cast

import pytest

from sow_cli.exits import Refused
from sow_cli.moving import Mover
from sow_cli.session import Session
from sow_client import Client, Instance, Placement
from tests.support.servers.cells import placement

CELLS = {"a": ["a:1"], "b": ["b:1"]}


class Told:
    """A client of a server that tells a placement."""

    def __init__(self, server: str, placement: Placement, cluster: str) -> None:
        self.server = server
        self.cluster = cluster
        self.told = placement

    @property
    def here(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def placement(self) -> Placement:
        return self.told

    def describe_instance(self) -> Instance:
        return Instance(self.server, self.server, "", "", self.cluster, True, "0.1.0")


def move(told: dict[str, Placement], clusters: dict[str, str] | None = None) -> list[str]:
    """The servers that a move from a to b asks, up to its refusal."""
    asked: list[str] = []

    def connect(session: Session) -> Client:
        asked.append(session.server)
        cluster = (clusters or {}).get(session.server, "")
        return cast(Client, Told(session.server, told[session.server], cluster))

    with Mover(Session("a:1", None, connect), ("orders",), "b", print) as mover, pytest.raises(Refused) as refused:
        mover.move()
    return [*asked, refused.value.message]


def test_no_other_server_brings_addresses_of_cells_into_the_placement_of_all() -> None:
    """Story: the newest text of all servers was written to all, so one cell could send the clients of the others to any
    address."""
    servers = {name: tuple(addresses) for name, addresses in CELLS.items()}
    home = Placement("a", 1, "", servers, text=placement(1, cells=CELLS))
    other = replace(home, cell="b", version=9, text=placement(9, cells={**CELLS, "c": ["evil:1"]}))
    *asked, message = move({"a:1": home, "b:1": other})
    assert asked == ["a:1", "a:1", "b:1"]
    assert message.startswith("b:1 (b:1) has other addresses of cells than a:1: ")


def test_an_address_that_is_not_host_and_port_is_not_called() -> None:
    home = Placement("a", 1, "", {"a": ("a:1",), "b": ("unix:/tmp/b",)}, text="-")
    assert move({"a:1": home}) == ["a:1", "a:1", "'unix:/tmp/b', of the cell b, is not HOST:PORT"]


def test_cells_of_two_clusters_are_refused_before_anything_is_changed() -> None:
    """Story: the copy was made, and then the links were refused for good."""
    servers = {name: tuple(addresses) for name, addresses in CELLS.items()}
    told = {
        f"{cell}:1": Placement(cell, 1, "", servers, default="a", text=placement(1, cells=CELLS)) for cell in servers
    }
    *_, message = move(told, {"a:1": "nyc", "b:1": "ldn"})
    assert message.startswith("a:1 (a:1) is of the cluster nyc, b:1 (b:1) of the cluster ldn: they refuse each")
    assert "Take cluster out of [server] at all servers of one of the cells" in message
