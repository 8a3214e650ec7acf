"""The cells of `--cells`: the configuration of each follows from the one file that all of them have.

[1]  Two cells never have the same address, directory, file that is written, or name. `DIFFER` has all these settings;
     each other one is the same at every cell.
[2]  Every port counts up by the same step, which is 1 unless ports of the file are side by side. The first cell has the
     ports of the file.
[3]  A cell's peer is the cell of the same number on the other machine, which runs as many cells of such a file:
     its name and port follow as those of this machine do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sow_server.config.kinds import INSTANCE_KIND, is_loopback, split_address
from sow_server.config.relations import Complain
from sow_server.config.sections import LISTENERS_TABLE, PEERS_TABLE, Config, Place

READER_PROCESSES_MAX: Final = 4
"""Reader processes of a server, unless the configuration says how many."""
PORT_MAX: Final = 65_535
PLACEMENT: Final = "placement.toml"
"""The placement file in the data directory of all cells, unless the configuration names one."""

DIFFER: Final = frozenset(
    {
        ("server", "listen"),
        ("server", "data_dir"),
        ("server", "instance"),
        ("server", "cluster"),
        ("server", "reader_processes"),
        (LISTENERS_TABLE, "listen"),
        ("replication", "accept"),
        (PEERS_TABLE, "name"),
        (PEERS_TABLE, "address"),
        ("backup", "root"),
        ("metrics", "listen"),
        ("access", "audit"),
        ("placement", "cell"),
    }
)
"""The settings that are not the same at all cells, by table and key ([1])."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One of several cells on a machine. `number`: from 1 to `of`. `cores`: those of the machine, for all of them."""

    number: int
    of: int
    cores: int

    @property
    def name(self) -> str:
        return f"cell-{self.number}"


def all_cells(of: int, cores: int) -> tuple[Cell, ...]:
    """So many cells on a machine."""
    return tuple(Cell(number, of, cores) for number in range(1, of + 1))


def reader_processes(cores: int, servers: int = 1) -> int:
    """The reader processes of each of so many servers on a machine, if the configuration does not say: each server
    needs a core for itself, and they share the others. One at least where there is more than one core, because a long
    query then leaves the server's own process free."""
    return min(READER_PROCESSES_MAX, max((cores - servers) // servers, 1 if cores > 1 else 0))


def of_cell(config: Config, cell: Cell, complain: Complain) -> Config:
    """The configuration of one cell. Raises the error of `complain` where a port or name cannot follow."""
    if config.placement.cell:
        raise complain("placement", "cell", f"contradicts --cells, which names the cells; this one is {cell.name}")
    up = _Ports(config, cell, complain)
    server = config.server
    processes = server.reader_processes
    return dataclasses.replace(
        config,
        server=dataclasses.replace(
            server,
            # With tables of listeners this is the default, and nobody listens there.
            listen=server.listen if config.listener_tables else up.address("server", server.listen),
            data_dir=server.data_dir / cell.name,
            instance=_name("server", "instance", server.instance, cell, complain),
            cluster=server.cluster and _name("server", "cluster", server.cluster, cell, complain),
            reader_processes=reader_processes(cell.cores, cell.of) if processes is None else processes,
        ),
        listener_tables=tuple(
            dataclasses.replace(listener, listen=up.address(LISTENERS_TABLE, listener.listen))
            for listener in config.listener_tables
        ),
        replication=dataclasses.replace(
            config.replication,
            accept=tuple(_name("replication", "accept", name, cell, complain) for name in config.replication.accept),
            serve_links=config.replication.serve_links or _may_link(config),
        ),
        peers=tuple(
            dataclasses.replace(
                peer,
                name=_name(PEERS_TABLE, "name", peer.name, cell, complain),
                address=up.peer(peer.address),
            )
            for peer in config.peers
        ),
        backup=dataclasses.replace(config.backup, root=config.backup.root and config.backup.root / cell.name),
        metrics=dataclasses.replace(config.metrics, listen=up.metrics(config.metrics.listen)),
        access=dataclasses.replace(config.access, audit=_own_file(config.access.audit, cell)),
        placement=dataclasses.replace(
            config.placement, cell=cell.name, file=config.placement.file or server.data_dir / PLACEMENT
        ),
    )


def places(config: Config) -> Iterable[Place]:
    """The places of the settings that `of_cell` sets in a configuration, for their origin."""
    if config.placement.file is None:
        yield "placement", 0, "file"
    if _may_link(config):
        yield "replication", 0, "serve_links"
    several = {LISTENERS_TABLE: len(config.listener_tables), PEERS_TABLE: len(config.peers)}
    for table, key in DIFFER:
        for number in range(1, several[table] + 1) if table in several else (0,):
            yield table, number, key


def _may_link(config: Config) -> bool:
    """True if the cells serve links without being told to: topics that move from one to another go over them (rule
    C15). Other machines that reach a cell prove which peer they are, so without an access file there are none."""
    listeners = [listener for listener in config.listeners if listener.links]
    return bool(listeners) and (
        config.access.file is not None or all(is_loopback(listener.listen) for listener in listeners)
    )


class _Ports:
    """Counts ports up for a cell ([2])."""

    def __init__(self, config: Config, cell: Cell, complain: Complain) -> None:
        self._cell = cell
        self._complain = complain
        own = {split_address(listener.listen)[1] for listener in config.listeners}
        if config.metrics.listen:
            own.add(split_address(config.metrics.listen)[1])
        self._step = _step(own - {0}, cell.of)
        self._own = {
            f"{host}:{int(port) + number * self._step}"
            for host, _, port in (listener.listen.rpartition(":") for listener in config.listeners)
            for number in range(cell.of)
        }

    def address(self, table: str, address: str, *, key: str = "listen") -> str:
        host, _, port = address.rpartition(":")
        if not int(port):
            raise self._complain(table, key, f"{address} names no port, from which those of the cells could follow")
        return self._up(table, key, host, int(port))

    def peer(self, address: str) -> str:
        found = self.address(PEERS_TABLE, address, key="address")
        if found in self._own:
            raise self._complain(PEERS_TABLE, "address", f"{found} is a cell of this machine, not a peer of one")
        return found

    def metrics(self, address: str) -> str:
        host, _, port = address.rpartition(":")
        return self._up("metrics", "listen", host, int(port)) if address and int(port) else address

    def _up(self, table: str, key: str, host: str, port: int) -> str:
        found = port + (self._cell.number - 1) * self._step
        if found > PORT_MAX:
            raise self._complain(table, key, f"the port of {self._cell.name}, {found}, is above {PORT_MAX}")
        return f"{host}:{found}"


def _step(ports: set[int], of: int) -> int:
    """The smallest step with which no two cells get the same port."""
    step = 1
    while len({port + number * step for port in ports for number in range(of)}) < len(ports) * of:
        step += 1
    return step


def _name(table: str, key: str, name: str, cell: Cell, complain: Complain) -> str:
    try:
        return INSTANCE_KIND.read(f"{name}.{cell.name}", Path())
    except ValueError:
        raise complain(table, key, f"{name}.{cell.name}, as the cell is called, has more than 100 characters") from None


def _own_file(file: Path, cell: Cell) -> Path:
    return file.with_name(f"{file.stem}-{cell.name}{file.suffix}")
