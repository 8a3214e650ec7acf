"""`sow-server`: arguments become a `Config`, and `app.run` does the rest.

Exit codes: 0 after an orderly stop; 1 if `--check-ready` finds a server that is not ready; 2 for wrong usage and for
every error at start-up, with one message on standard error and no traceback.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sow_server import __version__
from sow_server.patient_stream import say

if TYPE_CHECKING:
    from sow_server.config import Cell, Config
    from sow_server.engine.values.clock import TimeSource

EXIT_OK = 0
EXIT_NOT_READY = 1
EXIT_TROUBLE = 2
CELLS_MAX = 64
PRIVATE_UMASK = 0o077
"""Files and directories that this process makes, RocksDB's included, are for its own user alone (rule X5)."""


def main(arguments: Sequence[str] | None = None, *, time_source: TimeSource | None = None) -> int:
    """Runs the server until it is told to stop; returns the exit code. `time_source`: see `app.run`."""
    for name in ("stdin", "stdout", "stderr"):  # closed ones; a file or a socket would get their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    given = _parsed(arguments)
    os.umask(PRIVATE_UMASK)
    try:
        os.getcwd()
    except OSError as error:
        return _trouble(f"the current folder, where relative paths begin, cannot be used: {error.strerror}")
    try:
        return _run(given, time_source)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("sow", "sow_server"):
            raise
        # The base installation is the client's; the server's libraries come with the extra.
        return _trouble(
            f"the Python package {error.name!r} is missing; install the server with: pip install 'sow[server]', "
            "or in a checkout: pip install '.[server]'"
        )
    except KeyboardInterrupt:
        return 130  # during start-up: as shells report SIGINT


def _run(given: argparse.Namespace, time_source: TimeSource | None) -> int:
    # Not at the top: --help and --version should answer at once, also without the server's libraries.
    from sow_server import config

    given.config = given.config or os.environ.get("SOW_SERVER_CONFIG") or None
    cells = config.all_cells(given.cells or 0, len(os.sched_getaffinity(0)))
    try:
        text = _text(given)
        if given.supervised is not None:
            cells = tuple(cell for cell in cells if cell.name == given.cell)
        every = {cell.name: _load(given, cell, text) for cell in cells} or {"": _load(given, None, text)}
    except config.ConfigError as error:
        return _trouble(str(error))
    found = every if given.cell is None else {given.cell: every[given.cell]}
    if given.print_config:
        parts = [f"# {name}\n\n" * (len(found) > 1) + config.render(settings) for name, settings in found.items()]
        return _said("\n".join(parts), EXIT_OK)
    if given.check_ready:
        return _check_ready(found)
    if given.check_config:
        return _check(given, found, every)
    # gRPC's core writes to standard error itself, about a failed bind, for example; but an error at start-up shall be
    # one message.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if given.cells and given.cell is None:
        return _run_cells(given, found, text)
    return _run_one(given, every, time_source)


def _text(given: argparse.Namespace) -> str | None:
    """The text of the configuration file, which is read once for all cells; None: there is none."""
    from sow_server.config.file import read_text
    from sow_server.supervision import supervised

    if given.config is None:
        return None
    if given.config_text is not None:
        return supervised.config_text(given.config_text)
    return read_text(Path(given.config), pipe=True)


def _load(given: argparse.Namespace, cell: Cell | None, text: str | None) -> Config:
    from sow_server import config

    return config.load(
        None if given.config is None else Path(given.config),
        config.Overrides(
            data_dir=given.data_dir,
            listen=given.listen,
            prune_interval=given.prune_interval,
            accept_clock=given.accept_clock,
            accept_loss=given.accept_loss,
            insecure=given.insecure,
            authoritative=given.authoritative,
            cell=cell,
        ),
        os.environ,
        text=text,
    )


def _check(given: argparse.Namespace, found: Mapping[str, Config], every: Mapping[str, Config]) -> int:
    from sow_server import config
    from sow_server.access_control import AccessControlError, check
    from sow_server.placement import configured_places
    from sow_server.supervision import placement_file, summary

    doubtful: dict[str, None] = {}  # each once, as most settings are those of all cells
    try:
        for settings in found.values():
            doubtful |= dict.fromkeys((*config.warnings(settings), *check(settings)))
            if not given.cells:
                configured_places(settings)
        if given.cells:
            placement_file.to_make(every)
    except (AccessControlError, config.ConfigError) as error:
        return _trouble(str(error))
    source = given.config or "default configuration"
    for warning in doubtful:
        say(f"sow-server: warning: {source}: {warning}\n")
    lines = "".join(f"{name}: {summary(settings)}\n" for name, settings in found.items() if name)
    return _said(f"{lines}{source}: ok\n", EXIT_OK)


def _check_ready(found: Mapping[str, Config]) -> int:
    from sow_server.ready import why_not_ready

    for name, settings in found.items():
        if not settings.metrics.listen:
            return _trouble("--check-ready asks the metrics endpoint, and [metrics] listen is not set")
        if reason := why_not_ready(settings.metrics):
            return _said(f"not ready: {f'{name}: ' if name else ''}{reason}\n", EXIT_NOT_READY)
    return _said("ready\n", EXIT_OK)


def _run_one(given: argparse.Namespace, every: Mapping[str, Config], time_source: TimeSource | None) -> int:
    from sow_server import app, config, logs
    from sow_server.declaring import DeclarationError
    from sow_server.engine.values.errors import OpenError
    from sow_server.services.log_tail import LogTail
    from sow_server.supervision import directories, placement_file, supervised

    settings = every[given.cell or ""]
    log = settings.log
    if given.supervised is not None:
        supervised.stop_with(given.supervised)
        log = supervised.log_config(log)
    tail = LogTail([secret.value for secret in config.secrets_of(settings)])
    logs.configure(log, tail=tail)
    try:
        if not given.cells:
            directories.check_alone(settings.server.data_dir)
        elif given.supervised is None:
            directories.check_cells(settings.server.data_dir.parent, given.cells)
            placement_file.prepare(every)
        return app.run(settings, tail, time_source=time_source)
    except (OpenError, app.StartError, DeclarationError, config.ConfigError) as error:
        return _trouble(str(error))


def _run_cells(given: argparse.Namespace, found: Mapping[str, Config], text: str | None) -> int:
    from sow_server.config import ConfigError
    from sow_server.engine.values.errors import OpenError
    from sow_server.supervision import supervisor

    arguments: list[str] = []
    for name in ("config", "data_dir", "listen", "prune_interval"):
        value = getattr(given, name)
        arguments += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    arguments += ["--insecure"] * given.insecure + ["--cells", str(given.cells)]
    once = ["--accept-clock"] * given.accept_clock + ["--accept-loss"] * given.accept_loss
    once += ["--authoritative"] * given.authoritative
    file = None if text is None else supervisor.ConfigFile(Path(given.config), text)
    try:
        return supervisor.run(found, arguments, once, file)
    except (ConfigError, OpenError, supervisor.CannotStart) as error:
        return _trouble(str(error))


def _said(text: str, code: int) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        return _trouble(f"cannot write: {error.strerror}")
    return code


def _trouble(message: str) -> int:
    say(f"sow-server: {message}\n")
    return EXIT_TROUBLE


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        """As argparse's, with the variables of the environment."""
        width = shutil.get_terminal_size().columns - 2
        about = (
            "Each setting with one value can be set in the environment, instead of in the file. An option comes before "
            "its variable. SOW_SERVER_CONFIG is --config FILE; the others, by the table of the file:"
        )
        rows = textwrap.fill(about, width, initial_indent="  ", subsequent_indent="  ")
        parts = [super().format_help(), "environment:", rows]
        try:
            from sow_server.config import variables
        except ModuleNotFoundError:
            parts.append("  they are listed where the server's libraries are installed: pip install 'sow[server]'")
        else:
            tables: dict[str, list[str]] = {}
            for name, knob in variables().items():
                tables.setdefault(f"[{knob.table}]", []).append(name)
            for table, names in tables.items():
                text = f"{table} {' '.join(names)}"
                parts.append(textwrap.fill(text, width, initial_indent="  ", subsequent_indent="    "))
        return "\n".join(parts) + "\n"

    def error(self, message: str) -> NoReturn:
        """As argparse's, without a wait for the reader."""
        say(f"{self.format_usage()}{self.prog}: error: {message}\n")
        sys.exit(EXIT_TROUBLE)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.cell is not None:
        names = [f"cell-{number}" for number in range(1, (given.cells or 0) + 1)]
        if given.cell not in names:
            parser.error(f"argument --cell: {given.cell!r} is none of the cells of --cells{_range(names)}")
    return given


def _range(names: Sequence[str]) -> str:
    return f": {names[0]} to {names[-1]}" if names else ", which is not given"


def _number_of_cells(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]?", text) or int(text) > CELLS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {CELLS_MAX}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sow-server",
        description="A state-of-the-world store: the last value of every key, with lifetimes, durable, over gRPC.",
        epilog="Without --config it listens on 127.0.0.1:7450, keeps its data in ./sow-data, and the first publish "
        "to a topic creates it. SIGTERM and SIGINT stop it orderly.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file, see docs/configuration.md")
    parser.add_argument("--data-dir", metavar="DIR", help="the data directory, instead of [server] data_dir")
    parser.add_argument("--listen", metavar="HOST:PORT", help="the address to serve on, instead of [server] listen")
    parser.add_argument(
        "--prune-interval",
        metavar="DURATION",
        help="how often the journal is pruned, instead of [journal] prune_interval",
    )
    parser.add_argument(
        "--accept-clock",
        action="store_true",
        help="confirm the clock: start although it is far from the last time in the data",
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="start although the end of the log is missing; its changes are lost, all other data stays",
    )
    parser.add_argument(
        "--authoritative",
        action="store_true",
        help="start on a backup whose data count as the truth: peers take them and drop all other records",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="serve other machines without authentication or TLS; anybody may then read and change everything",
    )
    parser.add_argument(
        "--cells",
        metavar="N",
        type=_number_of_cells,
        help="run N servers, cell-1 to cell-N, which serve the topics of one name space on all cores of this machine: "
        "each has its own ports and data, which follow from the configuration",
    )
    parser.add_argument("--cell", metavar="NAME", help="of --cells N that one alone: check, print, ask or run it")
    parser.add_argument("--supervised", metavar="DESCRIPTOR", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--config-text", metavar="DESCRIPTOR", type=int, help=argparse.SUPPRESS)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check-config", action="store_true", help="check the configuration, then exit")
    action.add_argument(
        "--print-config", action="store_true", help="print the effective configuration as TOML, then exit"
    )
    action.add_argument(
        "--check-ready",
        action="store_true",
        help="ask the running server of this configuration, at [metrics] listen, whether it is ready; exit code 1: no",
    )
    action.add_argument("--version", action="version", version=f"sow-server {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
