"""The placement of the cells of a machine (rule C1): it is checked before they start, and made where the configuration
names none.

[1]  The file that is made has the addresses of the cells, and places every topic in the first one. It is made anew,
     with a higher version, when the cells have other addresses, as long as nobody has changed it. A file that somebody
     has changed, or that the configuration names, is never written. None is made beside data of a second cell: topics
     would seem to be new in the first.
[2]  It is replaced as a whole: a reader sees the old file or the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sow_server.config import Config, ConfigError, split_address
from sow_server.config.cells import PLACEMENT
from sow_server.config.kinds import quoted
from sow_server.placement import Placement, load_placement, replace_file
from sow_server.supervision.directories import numbers

_EVERY_ADDRESS: Final = ("0.0.0.0", "::")
_TEXT: Final = """\
# Made by `sow-server --cells`. To place topics, add [[topics]] with pattern and cell, raise the version and send SIGHUP
# (docs/cells.md). From then on the file is yours, and no start writes it.
version = {version}
default = "{default}"

[cells]
{cells}
"""


def prepare(cells: Mapping[str, Config]) -> None:
    """Checks the placement file of all cells, by their names, and makes it if it is to be made. Raises ConfigError."""
    path, text = _file(cells), to_make(cells)
    if not text:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def to_make(cells: Mapping[str, Config]) -> str:
    """The text of the file, if it is to be made ([1]); "": it is good. Raises ConfigError."""
    path = _file(cells)
    first = next(iter(cells.values()))
    if first.placement.ca is None and all(listener.files is not None for listener in first.listeners):
        raise ConfigError(
            "[placement] ca: is needed, because the cells ask each other over TLS for their placement; it has the "
            "authority of the server's certificate"
        )
    ours = path == first.server.data_dir.parent / PLACEMENT
    if ours and not path.exists():
        if any(number > 1 for number in numbers(path.parent)):
            raise ConfigError(f"{path}: is missing, although cells have data: put back the one that was there")
        return _made(cells, 1)
    placement = load_placement(path)
    if ours and path.read_bytes().decode() == _of(placement):  # as it was made
        return _made(cells, placement.version + 1) if _made(cells, placement.version) != _of(placement) else ""
    if problem := _problem(cells, placement):
        raise ConfigError(f"{path}: {problem}")
    return ""


def _file(cells: Mapping[str, Config]) -> Path:
    path = next(iter(cells.values())).placement.file
    assert path is not None, "each cell has one"
    return path


def _problem(cells: Mapping[str, Config], placement: Placement) -> str:
    """The reason why the cells cannot have this placement; "": they can."""
    for name, config in cells.items():
        servers = placement.cells.get(name)
        ports = {split_address(listener.listen)[1] for listener in config.listeners}
        told = " or ".join(map(str, sorted(ports)))
        if servers is None:
            said = f"[cells] has no {name}, which --cells {len(cells)} starts"
            return f"{said}: add it, with the port {told}, and raise the version"
        if not ports & {split_address(server)[1] for server in servers}:
            return f"[cells] {name}: none of its addresses has the port where {name} listens, {told}"
    return ""


def _made(cells: Mapping[str, Config], version: int) -> str:
    return _text(version, next(iter(cells)), {name: (_address(config),) for name, config in cells.items()})


def _of(placement: Placement) -> str:
    """The text that was made for such a placement, if it was."""
    return _text(placement.version, placement.default, placement.cells)


def _text(version: int, default: str, cells: Mapping[str, tuple[str, ...]]) -> str:
    lines = [f"{name} = [{', '.join(map(quoted, servers))}]" for name, servers in cells.items()]
    return _TEXT.format(version=version, default=default, cells="\n".join(lines))


def _address(config: Config) -> str:
    """The one address at which clients reach a cell. Raises ConfigError."""
    needs = "[placement] file: is needed, to tell clients where each cell is: "
    if len(config.listeners) > 1:
        raise ConfigError(f"{needs}each listens on several addresses")
    (listener,) = config.listeners
    if split_address(listener.listen)[0] in _EVERY_ADDRESS:
        raise ConfigError(f"{needs}{listener.listen} names no host")
    return listener.listen
