"""Topics that move from cell to cell while programs use them (rules C15 to C18)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from sow_cli import command
from sow_client import Client
from tests.support.servers.cells import MovingCells

pytestmark = pytest.mark.one_client


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MovingCells]:
    with MovingCells(tmp_path_factory.mktemp("cells")) as made:
        yield made


def move(cells: MovingCells, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Runs the command; returns what it has written to stdout."""
    line = ["--server", cells.home, "cells", "move", *arguments, "--format", "json"]
    if "--links-for" not in line:
        line += ["--links-for", "0s"]
    result = CliRunner().invoke(command.sow, line)
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout) if code == 0 else {"error": result.stderr}
    return found


class Publishing:
    """A program that publishes documents one by one, and goes on while its topic moves."""

    def __init__(self, server: str, topic: str) -> None:
        self._ended = threading.Event()
        self._server = server
        self._topic = topic
        self.acknowledged = 0
        self.fault: Exception | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with Client(self._server) as client:
                while not self._ended.is_set():
                    client.publish(self._topic, {"id": self.acknowledged})
                    self.acknowledged += 1
        except Exception as fault:  # told by the test
            self.fault = fault

    def __enter__(self) -> Publishing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def test_a_topic_moves_with_its_records_while_a_program_publishes(cells: MovingCells) -> None:
    topic = cells.topic("a")
    with Client(cells.home) as client:
        client.create_topic(topic, key=["/id"])
        with Publishing(cells.home, topic) as publishing:
            done = move(cells, topic, "--to", "b")
        assert publishing.fault is None
        assert done["from"] == "a"
        assert done["kept"] == []
        assert done["pause_micros"] < 1_000_000
        keys = {int(record.key) for record in client.query(topic)}
    assert publishing.acknowledged > 0
    assert keys >= set(range(publishing.acknowledged))
    for cell in "ab":
        with cells.direct(cell) as client:
            placed = client.placement(topic)
            assert placed.topic_cell == "b"
            assert (placed.copy is not None) == (cell == "b")
            assert placed.prepared is None
            assert client.replication_status().outgoing == ()
