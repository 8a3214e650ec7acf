"""ARCHITECTURE.md shows the layers that pyproject.toml declares and import-linter holds: they are written once.

A failure shows the lines that belong into the page.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
CONTRACTS: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
    "contracts"
]


def layers(contract: str) -> list[list[str]]:
    """The layers of a contract, from the top; those of one layer do not know each other."""
    (found,) = (one for one in CONTRACTS if one["name"] == contract)
    return [layer.split(" | ") for layer in found["layers"]]


def section(heading: str) -> str:
    return PAGE.partition(f"\n### {heading}\n")[2].partition("\n## ")[0].partition("\n### ")[0]


def test_the_table_of_layers_is_that_of_the_contracts() -> None:
    names = [one["name"] for one in CONTRACTS if one["type"] == "layers"]
    assert len(names) >= 7
    expected = [
        f"| {name.replace('<-', '←').replace(' | ', ', ')} | "
        + " > ".join(", ".join(f"`{room}`" for room in layer) for layer in layers(name))
        + " |"
        for name in names
    ]
    found = [line for line in section("Layers").splitlines() if line.startswith("| ")][1:]
    assert found == expected, "\n".join(expected)


def test_the_list_of_other_contracts_is_that_of_pyproject() -> None:
    expected = [f"- {one['name']}" for one in CONTRACTS if one["type"] != "layers"]
    assert len(expected) >= 15
    found = [line for line in section("Layers").splitlines() if line.startswith("- ")]
    assert found == expected, "\n".join(expected)


def test_the_rooms_of_the_engine_stand_in_the_order_of_their_layers() -> None:
    """Each uses only rooms above it, says the page."""
    depth = {room: number for number, layer in enumerate(reversed(layers("the rooms of the engine"))) for room in layer}
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \|$", PAGE.partition("\n| room of `engine/`")[2].partition("\n\n")[0], re.MULTILINE
    )
    shown = [name.rstrip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)]
    assert set(shown) == set(depth)
    assert [depth[name] for name in shown] == sorted(depth.values())
