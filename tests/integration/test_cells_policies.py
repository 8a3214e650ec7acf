"""Changes of all cells: policies, and the access files that are read again (rule C19)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from sow_cli import command
from sow_client import Client, SowError
from tests.support.oracles.access import GUARDED, grant, identity, write_access
from tests.support.servers.cells import CellServer, TwoCells, placement
from tests.support.servers.server import free_port, reason_of
from tests.support.simulation.clients import Connect, connect

__all__ = ["connect"]  # a fixture
pytestmark = pytest.mark.one_client


def _cap(client: Client, topic: str) -> tuple[str, str]:
    (found,) = [one for one in client.describe_topic(topic).effective if one.name == "max_ttl"]
    return found.value, found.origin


def test_a_policy_holds_for_the_topics_of_all_cells(connect: Connect, tmp_path: Path) -> None:
    """It was set at home alone, and limited no topic of another cell."""
    with TwoCells(tmp_path) as cells, connect(cells.home, connect_timeout=0.5) as client:
        here, there = cells.topic("a"), cells.topic("b")
        for topic in (here, there):
            client.create_topic(topic)
        done = client.set_policy("cap", ".*", topics={"max_ttl": "20s"})
        assert done.matches == 2
        assert _cap(client, here) == _cap(client, there) == ("20s", "policy cap")
        assert [(one.name, one.matches) for one in client.policies()] == [("cap", 2)]
        client.set_policy("first", "b-.*", topics={"max_ttl": "10s"}, priority=7)
        assert _cap(client, there) == ("10s", "policy first")
        assert [one.name for one in client.policies()] == ["first", "cap"]

        cells.servers["b"].kill9()
        with pytest.raises(SowError, match="the cell b: ") as refused:
            client.set_policy("cap", ".*", topics={"max_ttl": "30s"})
        assert (refused.value.reason, refused.value.details["cell"]) == ("UNREACHABLE", "b")
        cells.servers["b"].start()
        assert [_cap(client, topic)[0] for topic in (here, there)] == ["30s", "10s"]
        assert client.set_policy("cap", ".*", topics={"max_ttl": "30s"}).matches == 1, "b has a better one"

        of_b = client.cells()["b"]
        of_b.delete_policy("first")
        assert [one.name for one in of_b.policies()] == ["cap"]
        assert [one.name for one in client.policies()] == ["first", "cap"]
        client.delete_policy("cap")
        assert of_b.policies() == []
        with pytest.raises(SowError, match="there is no policy 'cap'"):
            client.delete_policy("cap")
        client.delete_policy("first")  # the cell a alone has it
        assert client.policies() == []


@pytest.mark.slow
def test_a_reload_of_all_names_the_servers_with_other_policies(tmp_path: Path) -> None:
    """Story: a cell was added later, and had none of the limits."""
    with TwoCells(tmp_path) as cells, Client(cells.home) as client, cells.direct("b") as of_b:
        client.set_policy("cap", ".*", topics={"max_ttl": "20s"})
        client.set_policy("cap", ".*", topics={"max_ttl": "1h"}, operator=True)
        client.set_policy("idle", ".*", durables={"idle_ttl": "1h"})

        def told() -> list[str]:
            done = CliRunner().invoke(command.sow, ["--server", cells.home, "cells", "reload", "--all"])
            assert done.exit_code == 0, done.output
            return done.stderr.splitlines()

        assert told() == []
        here = of_b.here
        here.delete_policy("idle")
        here.set_policy("cap", ".*", topics={"max_ttl": "30s"})
        first, advice = told()
        assert first == f"b at {cells.addresses['b'][0]} has other policies than this server, or lacks them: cap, idle"
        assert "sow policy set" in advice
        client.set_policy("cap", ".*", topics={"max_ttl": "20s"})
        client.set_policy("idle", ".*", durables={"idle_ttl": "1h"})
        assert told() == []


def test_each_cell_reads_its_access_file_again(connect: Connect, tmp_path: Path) -> None:
    """A token that was taken away was still accepted in other cells."""
    ports = {name: free_port() for name in ("a", "b")}
    text = placement(1, ("b-.*", "b"), cells={name: [f"127.0.0.1:{port}"] for name, port in ports.items()})
    desk_too = identity("desk", "writer") + grant("writer", ".*", "read publish create")
    desk_too += identity("some", "part") + grant("part", ".*", "read", "rows = \"/region = 'eu'\"")
    with ExitStack() as stack:
        for name, port in ports.items():
            write_access(tmp_path / name, desk_too)
            stack.enter_context(CellServer(tmp_path / name, name, text, config=GUARDED, port=port))
        home = f"127.0.0.1:{ports['a']}"
        root, desk = (stack.enter_context(connect(home, token=name)) for name in ("root", "desk"))
        for topic in ("a-1", "b-1"):
            desk.create_topic(topic)
        for topic in ("a-1", "b-1"):  # a record is judged where its topic is; another cell said that there is no topic
            for region, allowed in (("eu", True), ("us", False)):
                record = f'{{"region":"{region}"}}'.encode()
                assert root.check_access("some", "read", topic, record=record, key="1").allowed is allowed

        for name in ports:
            write_access(tmp_path / name, "")
        assert root.reload_access() == (1, 0)
        for topic in ("a-1", "b-1"):
            assert reason_of(lambda topic=topic: desk.count(topic)) == "UNAUTHENTICATED"  # type: ignore[misc]  # of this turn

        write_access(tmp_path / "a", "no table")
        write_access(tmp_path / "b", desk_too)
        assert reason_of(root.reload_access) == "INVALID_ARGUMENT"
        assert desk.count("b-1") == 0, "one fault keeps no other cell from reading its file"
        write_access(tmp_path / "a", desk_too)
        write_access(tmp_path / "b", "no table")
        with pytest.raises(SowError, match="the cell b: ") as refused:
            root.reload_access()
        assert refused.value.reason == "INVALID_ARGUMENT"
        assert desk.count("a-1") == 0
