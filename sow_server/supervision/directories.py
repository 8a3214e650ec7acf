"""The data directory of all cells, which has one of each: DIR/cell-1, DIR/cell-2, …

[1]  Nothing starts empty beside data that it does not serve: neither cells beside the data of a server alone, nor such
     a server beside cells, nor fewer cells than have data.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

from sow_server.engine.opening import holds_data
from sow_server.engine.values.errors import OpenError

_NAME: Final = re.compile(r"cell-([1-9][0-9]{0,3})")


def numbers(data_dir: Path) -> list[int]:
    """The numbers of the cells that have data in a directory, in order."""
    try:
        names = [entry.name for entry in data_dir.iterdir()]
    except OSError:
        return []
    found = [int(match[1]) for match in map(_NAME.fullmatch, names) if match]
    return sorted(number for number in found if holds_data(data_dir / f"cell-{number}"))


def check_cells(data_dir: Path, of: int) -> None:
    """Raises OpenError if so many cells would leave data aside ([1])."""
    if holds_data(data_dir):
        here, aside = shlex.quote(str(data_dir)), shlex.quote(f"{data_dir}.single")
        raise OpenError(
            f"{data_dir} has the data of a server without --cells; to make it the first cell, run: mv {here} {aside} "
            f"&& mkdir -m 700 {here} && mv {aside} {here}/cell-1"
        )
    if beyond := [number for number in numbers(data_dir) if number > of]:
        names = ", ".join(f"cell-{number}" for number in beyond)
        raise OpenError(
            f"{data_dir} has the data of {names}, which --cells {of} does not serve; start with --cells {beyond[-1]}, "
            f"and to go without, move its topics to other cells first, then move its directory away"
        )


def check_alone(data_dir: Path) -> None:
    """Raises OpenError if a server alone would leave data of cells aside ([1])."""
    found = numbers(data_dir)
    if found and not holds_data(data_dir):
        raise OpenError(
            f"{data_dir} has the data of cells; start with --cells {found[-1]}, or take another data directory"
        )
