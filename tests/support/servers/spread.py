"""Tests of one server, run over several cells: `pytest --cells 3` (docs/testing.md).

Each `ServerProcess` then runs the cells of `sow-server --cells 3`, and its address is that of the first one. The topics
of a test are spread over all of them, so its clients have to follow.

    [1]  The first and the last character of a name decide its cell, as a hash would. Topics that the configuration
         says belong together, such as a view and its source, live in one cell (rule C6).
    [2]  A configuration with links, or with a placement of its own, is of one server: see `is_for_one_server`.
    [3]  Tests that hold for one server alone are left out, see `left_out`.
    [4]  The processes count as one: it has ended once all have, and where one fails the others are stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from cryptography import x509

from sow_server.config import Cell, ConfigError, Overrides, load

VARIABLE: Final = "SOW_TEST_CELLS"
"""The number of cells; the option `--cells` of pytest sets it, and the processes of pytest-xdist inherit it."""
CHARACTERS: Final = "".join(map(chr, (*range(48, 58), *range(65, 91), *range(97, 123)))) + "_.:-"
"""Those of the name of a topic."""


LEFT_OUT: Final = Path(__file__).parents[2] / "integration" / "one_server.txt"
"""The tests that hold for one server alone: a line for each, or for a file, below the reason."""


def left_out() -> dict[str, str]:
    """The tests and files that need one server ([3]), each with the reason."""
    found: dict[str, str] = {}
    reason = ""
    for line in LEFT_OUT.read_text().splitlines():
        if line.startswith(" "):
            found[line.strip()] = reason
        elif line and not line.startswith("#"):
            reason = line
    return found


def cells_wanted() -> int:
    """The number of cells of each server; 0: tests are of one server."""
    return int(os.environ.get(VARIABLE, "0"))


def is_for_one_server(config: str) -> bool:
    """True for a configuration that says itself what is where ([2]). A broken one is not."""
    try:
        tables = tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return False
    return "replication" in tables or "placement" in tables


def patterns(of: int) -> Iterator[tuple[str, str]]:
    """Patterns of topics, each with its cell ([1]); the first cell is the default."""
    classes = ["".join(one for one in CHARACTERS if ord(one) % of == number) for number in range(of)]
    for number in range(1, of):
        pairs = [(begin, end) for begin in range(of) for end in range(of) if (begin + end) % of == number]
        yield "|".join(f"[{classes[begin]}].*[{classes[end]}]" for begin, end in pairs), f"cell-{number + 1}"


def cell_of(topic: str, of: int) -> str:
    """The cell of a topic that belongs to no other one."""
    number = (ord(topic[0]) + ord(topic[-1])) % of if len(topic) > 1 else 0
    return f"cell-{number + 1}"


def address_of(topic: str, placement: str) -> str:
    """The address of the cell of a topic, by the text of a placement file."""
    tables = tomllib.loads(placement)
    cells = (rule["cell"] for rule in tables["topics"] if re.fullmatch(rule["pattern"], topic))
    return str(tables["cells"][next(cells, tables["default"])][0])


def together(config: str) -> Mapping[str, str]:
    """The topics that belong to another one, and that one, as a configuration declares them."""
    try:
        tables: dict[str, Any] = tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return {}
    found = {name: view["source"] for name, view in tables.get("views", {}).items() if "source" in view}
    every = tables.get("defaults", {}).get("dead_letter")
    for name, topic in tables.get("topics", {}).items():
        letters = topic.get("dead_letter", every)
        if letters:  # several topics may have one topic of letters
            found[name] = letters
    return found


def environment(config: str, folder: Path) -> Mapping[str, str]:
    """Variables for the cells of a configuration in a folder: where they use TLS, the authority of their
    certificate."""
    try:
        server: dict[str, Any] = tomllib.loads(config).get("server", {})
    except tomllib.TOMLDecodeError:
        return {}
    for table in (server, *server.get("listeners", ())):
        certificate = folder / table.get("tls", {}).get("certificate", "")
        if certificate.is_file() and (found := _authority(certificate)):
            return {"SOW_SERVER_PLACEMENT_CA": str(found)}
    return {}


def _authority(certificate: Path) -> Path | None:
    """The certificate of the authority that issued one, from its folder."""
    issuer = x509.load_pem_x509_certificate(certificate.read_bytes()).issuer
    for file in sorted(certificate.parent.glob("*.pem")):
        with contextlib.suppress(ValueError):
            if x509.load_pem_x509_certificate(file.read_bytes()).subject == issuer:
                return file
    return None


def place(file: Path, config: Path, data: Path, listen: Sequence[str], of: int) -> None:
    """Writes the placement file of the cells of a configuration; another content has a higher version. `listen`: the
    options that say where it listens."""
    file.touch(0o600)
    first, _, before = file.read_text().partition("\n")
    rules = _placement(config, data, listen, of)
    version = int(first.partition(" = ")[2] or 0) + (rules != before)
    file.write_text(f"version = {version}\n{rules}")


def _placement(config: Path, data: Path, listen: Sequence[str], of: int) -> str:
    text = config.read_text()
    addresses = _addresses(config, data, listen, of)
    lines = ['default = "cell-1"', "[cells]"]
    lines += [f'{name} = ["{address}"]' for name, address in addresses.items()]
    belongs = together(text)
    placed: list[tuple[str, str]] = []
    for topic, other in belongs.items():
        while other in belongs:
            other = belongs[other]
        placed += [(name.replace(".", r"\."), cell_of(other, of)) for name in (topic, other)]
    for pattern, cell in [*dict.fromkeys(placed), *patterns(of)]:
        lines += ["[[topics]]", f"pattern = '{pattern}'", f'cell = "{cell}"']
    return "\n".join(lines) + "\n"


def _addresses(config: Path, data: Path, listen: Sequence[str], of: int) -> Mapping[str, str]:
    found = {}
    for number in range(1, of + 1):
        given = Overrides(data_dir=str(data), listen=listen[-1] if listen else None, cell=Cell(number, of, 2))
        try:
            found[f"cell-{number}"] = load(config, given).listeners[0].listen
        except ConfigError:
            found[f"cell-{number}"] = f"127.0.0.1:{number}"  # the server refuses it, and says why
    return found


class Started(Protocol):
    """A process, as `subprocess.Popen` and `Fork` are one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


class Together:
    """Several processes that count as one ([4])."""

    def __init__(self, processes: Sequence[Started]) -> None:
        self.processes: Final = tuple(processes)
        self.pid: Final = self.processes[0].pid
        self._told = False

    def poll(self) -> int | None:
        codes = [process.poll() for process in self.processes]
        failed = [code for code in codes if code]
        if failed and not self._told:
            self._told = True
            self.send_signal(signal.SIGTERM)
        return None if None in codes else max(failed, default=0)  # rather its own code than that of our signal

    def wait(self, timeout: float) -> int:
        give_up = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > give_up:
                raise subprocess.TimeoutExpired("sow-server --cells", timeout)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
