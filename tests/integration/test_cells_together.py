"""Two and three cells of one name space (rules C1 to C7): real servers that ask each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from sow_cli import command
from sow_client import Client, Placement, SowError
from tests.support.servers.cells import CellServer, placement
from tests.support.servers.server import ServerProcess, free_port, until


class Together:
    """Cells a, b and c; c is not started before it is reloaded."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        ports = {cell: free_port() for cell in "abc"}
        self.addresses = {cell: [f"127.0.0.1:{port}"] for cell, port in ports.items()}
        self.servers = {
            cell: stack.enter_context(CellServer(folder / cell, cell, self.text(1), port=port, start=cell != "c"))
            for cell, port in ports.items()
        }
        self.clients = {cell: stack.enter_context(Client(addresses[0])) for cell, addresses in self.addresses.items()}

    def text(self, version: int, *topics: tuple[str, str], default: str = "a") -> str:
        return placement(version, *topics, default=default, cells=self.addresses)

    def reload(self, text: str, cells: Sequence[str]) -> None:
        for cell in cells:
            self.servers[cell].rewrite(text)
            if self.servers[cell].alive:
                self.clients[cell].reload_placement()
            else:
                self.servers[cell].start()

    def settle(self, text: str) -> None:
        """All cells have this placement, and know it of each other."""
        self.reload(text, ["a", "b", "c"])
        for cell, client in self.clients.items():

            def even(cell: str = cell, client: Client = client) -> bool:
                client.reload_placement()  # it looks at the others at once
                return set(self.problems(cell).values()) <= {"STRAYS"}

            until(even, 30, f"{cell} sees that all are even")

    def problems(self, cell: str) -> dict[str, str]:
        return {problem.cell: problem.kind for problem in self.clients[cell].placement().problems}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    with ExitStack() as stack:
        yield Together(tmp_path_factory.mktemp("together"), stack)


def test_a_difference_is_told_at_both_and_a_cell_that_is_away_by_name(together: Together) -> None:
    a, b = "a", "b"
    together.reload(together.text(2), [a])
    until(lambda: together.problems(a) == {"b": "DIFFERS", "c": "UNREACHABLE"}, 30, "a sees that b has version 1")
    together.reload(together.text(3), [b])
    until(lambda: together.problems(b) == {"a": "DIFFERS", "c": "UNREACHABLE"}, 30, "b sees that a has version 2")

    def told_by_b() -> list[str]:
        return [one.message for one in together.clients[b].placement().problems if one.cell == a]

    until(lambda: told_by_b() == [f"{together.addresses[a][0]} has version 2, here it is 3"], 30, "the versions")
    told = [event for event in together.servers[a].events("cell_in_trouble") if event["cell"] == b]
    assert told[-1]["trouble"] == "DIFFERS"

    together.reload(together.text(4), ["c", a, b])
    together.clients[a].reload_placement()
    until(lambda: together.problems(b) == {}, 30, "b sees that all are even")
    assert "c" in {event["cell"] for event in together.servers[b].events("cell_is_well")}


def test_a_topic_moves_with_the_placement_and_its_old_copy_is_told(together: Together) -> None:
    """The runbook by hand: the topic is copied, the old cell is reloaded first, then the new one."""
    old, new = together.clients["a"], together.clients["b"]
    version = old.placement().version
    old.create_topic("moved", key=["/id"])
    old.publish("moved", {"id": 1})
    together.settle(together.text(version + 1, ("moved", "b")))
    with grpc.insecure_channel(together.addresses["a"][0]) as channel, Client(channel=channel) as stays:
        with pytest.raises(SowError) as refused:
            stays.publish("moved", {"id": 2})
    assert (refused.value.reason, refused.value.details["servers"]) == (
        "TOPIC_ELSEWHERE",
        together.addresses["b"][0],
    )
    with pytest.raises(SowError) as refused:
        old.publish("moved", {"id": 2})
    assert refused.value.reason == "TOPIC_NOT_FOUND", "b has no such topic yet"
    assert refused.value.message.startswith("the cell b, where moved lives: ")
    new.create_topic("moved", key=["/id"])
    new.publish("moved", {"id": 1})

    placed = old.placement("moved")
    assert (placed.topic_cell, [stray.topic for stray in placed.strays]) == ("b", ["moved"])
    findings = doctor(together, "a")
    assert len(findings) == 1
    assert "the topic moved lives in the cell b, and 1 record of it is left in a" in findings[0]["found"]
    assert "the copy there is newer" in findings[0]["found"]
    server = together.addresses["a"][0]
    delete = f"if no sow cells move of it is under way: sow --server {server} topic delete moved --here"
    assert findings[0]["advice"] == delete
    until(lambda: together.problems("b") == {"a": "STRAYS"}, 30, "b hears that a has a topic of it")
    (problem,) = new.placement().problems
    assert problem.message == f"{server} has 1 topic that lives in b, the cell of this server"
    assert together.problems("c") == {}, "it is no matter of a third cell"
    (told,) = doctor(together, "a", asked="b")
    assert told["advice"] == delete
    (told,) = doctor(together, "b")
    assert told["advice"] == f"its checks say which copy is newer: sow --server {server} doctor"

    (status,) = sow(together.addresses["a"][0], "status", "--here")
    assert (status["cell"], status["stray_topics"]) == ("a", 1)
    sow(together.addresses["a"][0], "topic", "delete", "moved", "--here", "--force")
    assert not old.placement().strays
    until(lambda: together.problems("b") == {}, 30, "b hears that there is none any more")
    assert [one["level"] for one in doctor(together, "a")] == ["ok"]


def sow(address: str, *arguments: str) -> list[dict[str, object]]:
    """The rows of a command."""
    done = CliRunner().invoke(command.sow, ["--server", address, *arguments, "--format", "ndjson"])
    return [json.loads(line) for line in done.stdout.splitlines()]


def doctor(together: Together, cell: str, *, asked: str = "") -> list[dict[str, str]]:
    """The findings about the placement of a cell; `asked`: another cell, whose server the command is given."""
    rows = sow(together.addresses[asked or cell][0], "doctor")
    found = [{name: str(value) for name, value in row.items()} for row in rows if row["check"] == "cells"]
    return [row for row in found if row["cell"] == cell]


def test_a_newer_copy_at_the_wrong_cell_is_a_fault(together: Together) -> None:
    """A wrong switch: the placement sent a topic away, and was put right by hand at one cell only."""
    a, b = together.clients["a"], together.clients["b"]
    version = a.placement().version
    b_first = together.text(version + 1, ("torn", "b"))
    together.reload(b_first, ["a", "b", "c"])
    b.create_topic("torn", key=["/id"])
    b.publish("torn", {"id": 1})
    together.reload(together.text(version + 2), ["a", "b", "c"])
    a.create_topic("torn", key=["/id"])
    a.publish("torn", {"id": 2})
    together.settle(together.text(version + 3, ("torn", "b")))
    (finding,) = [finding for finding in doctor(together, "a") if "the topic torn" in finding["found"]]
    assert (finding["level"], "the copy here is newer" in finding["found"]) == ("fault", True)


def test_the_command_shows_cells(together: Together) -> None:
    version = together.clients["a"].placement().version + 1
    together.reload(together.text(version, (r"eu\..*", "b"), ("us", "c"), (r"eu", "b")), ["a", "b", "c"])
    address = together.addresses["a"][0]
    listed = sow(address, "cells", "list")
    assert [(one["cell"], one["topics"]) for one in listed] == [("a", []), ("b", [r"eu\..*", "eu"]), ("c", ["us"])]
    assert listed[0]["servers"] == together.addresses["a"]
    assert [one["default"] for one in listed] == [True, False, False]
    (where,) = sow(address, "cells", "where", "eu.x")
    assert (where["cell"], where["here"]) == ("b", False)
    (again,) = sow(address, "cells", "reload")
    assert (again["version"], again["changed"]) == (version, False)


def test_a_reload_of_one_server_names_the_others_and_one_of_all_reaches_them(together: Together) -> None:
    """Story: an operator ran it once, and the other cells went on with the file from before."""
    version = together.clients["a"].placement().version + 2
    address = together.addresses["a"][0]
    together.reload(together.text(version - 1), ["a", "b", "c"])
    for server in together.servers.values():
        server.rewrite(together.text(version))

    def reload(*more: str) -> Result:
        return CliRunner().invoke(command.sow, ["--server", address, "cells", "reload", *more, "--format", "ndjson"])

    one = reload()
    assert (one.exit_code, json.loads(one.stdout)["version"]) == (0, version)
    others = "; ".join(f"{cell} at {together.addresses[cell][0]} has version {version - 1}" for cell in "bc")
    assert one.stderr.splitlines() == [
        f"only one server has read its file: {others}",
        f"to reload them all: sow --server {address} cells reload --all",
    ]
    every = reload("--all")
    rows = [json.loads(line) for line in every.stdout.splitlines()]
    assert [(row["cell"], row["version"], row["changed"], row.get("message")) for row in rows] == [
        ("a", version, False, None),
        ("b", version, True, None),
        ("c", version, True, None),
    ]
    assert (every.exit_code, every.stderr) == (0, "")
    assert reload().stderr == ""

    for cell, text in (("a", together.text(version + 1)), ("c", "version = ")):
        together.servers[cell].rewrite(text)
    part = reload("--all")
    told = [json.loads(line).get("message") for line in part.stdout.splitlines()]
    assert part.exit_code == 1
    assert told[:2] == [None, f"has version {version}"], "nobody has changed the file of b"
    assert told[2].startswith("does not say (INVALID_ARGUMENT: the placement has a fault, and nothing was changed: ")
    assert {client.placement().version for client in together.clients.values()} == {version, version + 1}


def test_a_server_without_placement_has_an_empty_cell(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, server.client() as client:
        assert client.placement("orders") == Placement("")
        with pytest.raises(SowError, match="this server has no placement"):
            client.reload_placement()
        assert sow(server.address, "cells", "list") == []


def test_a_dead_letter_without_a_target_stays_in_its_cell(tmp_path: Path) -> None:
    with CellServer(tmp_path, "a", placement(1, (".*none", "b"))) as server, server.client() as client:
        client.create_topic("orders", key=["/id"], expiration="enabled", dead_letter="letters")
        client.publish("orders", {"id": 1}, ttl="1ms")
        until(lambda: client.count("_undelivered") == 1, 30, "the letter")
        assert {"orders", "_undelivered"} <= {topic.name for topic in client.here.topics()}
        assert client.placement().strays == ()


def test_letters_whose_target_has_gone_stay_here_and_that_is_told(tmp_path: Path) -> None:
    with CellServer(tmp_path, "a", placement(1)) as server, server.client() as client:
        client.create_topic("letters")
        client.create_topic("orders", key=["/id"], expiration="enabled", dead_letter="letters")
        server.rewrite(placement(2, ("letters", "b")))
        client.reload_placement()
        client.publish("orders", {"id": 1}, ttl="1ms")
        until(
            lambda: [stray.records for stray in client.placement().strays] == [1], 30, "the letter, which is not lost"
        )
        (told,) = server.events("topics_separated")
        assert (told["topic"], told["setting"], told["other"], told["cell"]) == (
            "orders",
            "dead_letter",
            "letters",
            "b",
        )
        findings = [str(row["found"]) for row in sow(server.address, "doctor") if row["level"] == "fault"]
        said = "the dead letters of orders go to letters, which lives in the cell b: they stay in a, where nobody can"
        assert f"{said} read them" in findings
        (seen,) = client.placement().separated
        assert (seen.topic, seen.other, seen.cell) == ("orders", "letters", "b")
        server.rewrite(placement(3))
        client.reload_placement()
        assert client.placement().separated == ()
        assert client.count("letters") == 1
