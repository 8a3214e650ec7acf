"""Cells for tests: servers of one placement.

with cell_server(tmp_path, "a", placement(1, default="a")) as server:
    server.rewrite(placement(2, default="b"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.support.servers.server import ServerProcess

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
