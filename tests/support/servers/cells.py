"""Cells for tests: servers of one placement.

with cell_server(tmp_path, "a", placement(1, default="a")) as server:
    server.rewrite(placement(2, default="b"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import grpc
import pytest

from sow.v1 import admin_pb2, admin_pb2_grpc
from sow_client import Client
from sow_client._lines import Line
from tests.support.servers.server import ServerProcess, free_port

NOBODY: Final = "127.0.0.1:1"
"""An address at which nothing listens."""
ALONE: Final[Mapping[str, Sequence[str]]] = {"a": ["127.0.0.1:2"], "b": [NOBODY]}


def placement(
    version: int,
    *topics: tuple[str, str],
    default: str = "a",
    cells: Mapping[str, Sequence[str]] = ALONE,
) -> str:
    """A placement file; `topics`: patterns, each with its cell."""
    lines = [f"version = {version}", f'default = "{default}"', "[cells]"]
    lines += [f"{name} = {list(servers)}" for name, servers in cells.items()]
    for pattern, cell in topics:
        lines += ["[[topics]]", f"pattern = '{pattern}'", f'cell = "{cell}"']
    return "\n".join(lines) + "\n"


class CellServer(ServerProcess):
    """A server of a cell."""

    def __init__(
        self, folder: Path, cell: str, text: str, *, config: str = "", port: int = 0, start: bool = True
    ) -> None:
        """`text`: its placement file."""
        folder.mkdir(parents=True, exist_ok=True)
        self.placement = folder / "placement.toml"
        self.rewrite(text)
        config = config or f'[server]\ndynamic_topics = true\ninstance = "{cell}-1"\n'
        config += f'[placement]\ncell = "{cell}"\nfile = "placement.toml"\n'
        super().__init__(folder, config, port=port, start=start)

    def rewrite(self, text: str) -> None:
        """Writes another placement file; it counts from a reload on."""
        self.placement.write_text(text)


class TwoCells:
    """Two cells, `a` and `b`, of which b has the topics whose names begin with "b-"."""

    config = ""
    """The configuration of both, with the name of the cell as `%s`; "": the one of `CellServer`."""

    def __init__(self, folder: Path) -> None:
        self.version = 1
        self._numbers = count()
        ports = {"a": free_port(), "b": free_port()}
        self.addresses = {name: [f"127.0.0.1:{port}"] for name, port in ports.items()}
        self.servers = {
            name: CellServer(folder / name, name, self._text(), config=self.config.replace("%s", name), port=port)
            for name, port in ports.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        faults = [server.faults() for server in self.servers.values()]
        for server in self.servers.values():
            server.kill9()
        assert kind is not None or not any(faults), faults

    @property
    def home(self) -> str:
        """The addresses of a."""
        return self.addresses["a"][0]

    def topic(self, cell: str) -> str:
        """The name of another topic that lives in a cell."""
        return f"{cell}-{next(self._numbers)}"

    def _text(self, *topics: tuple[str, str]) -> str:
        return placement(self.version, *topics, ("b-.*", "b"), cells=self.addresses)

    def place(self, *topics: tuple[str, str], at: str = "ab") -> None:
        """Loads another placement: these patterns count before "b-.*"."""
        self.version += 1
        for name in at:
            self.load(name, self._text(*topics))

    def load(self, cell: str, text: str) -> None:
        """Loads a placement in one cell."""
        self.servers[cell].rewrite(text)
        with grpc.insecure_channel(self.addresses[cell][0]) as channel:
            admin_pb2_grpc.AdminServiceStub(channel).ReloadPlacement(admin_pb2.ReloadPlacementRequest(), timeout=30)

    def direct(self, cell: str) -> Client:
        """A client of one cell."""
        return Client(self.addresses[cell][0])

    def keys(self, cell: str, topic: str) -> list[str]:
        with self.direct(cell) as client:
            return [record.key for record in client.query(topic)]


class MovingCells(TwoCells):
    """Two cells between which topics move."""

    config = '[server]\ndynamic_topics = true\ninstance = "%s-1"\n[replication]\nserve_links = true\n'


Calls: TypeAlias = list[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls that clients make from now on: address and method."""
    made: Calls = []
    method = Line.method

    def noted(self: Line[Any], kind: str, path: str, *arguments: Any) -> Callable[..., Any]:
        if "Describe" not in path:
            made.append((self.address.target, path.rpartition("/")[2]))
        return method(self, kind, path, *arguments)

    monkeypatch.setattr(Line, "method", noted)
    return made
