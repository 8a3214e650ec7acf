"""`make console`: pages in the browser about the data that the demo has left.

It starts the server of `sow-demo.toml`, unless one answers there already (`make serve`), and the console, which shows
an address to open. Ctrl-C ends both. Exit codes: that of `sow console`; 2 if there is nothing to look at.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from examples.server_process import CONFIG_NAME, ServerProcess, ServerTrouble

PROJECT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both; returns the exit code. Arguments that it does not know are those of `sow console`."""
    parser = argparse.ArgumentParser(prog="python -m examples.console", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=PROJECT, metavar="DIR", help="the folder of the demo's data")
    given, others = parser.parse_known_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the server is stopped, too
    try:
        config = tomllib.loads((given.folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        print(f"console: {CONFIG_NAME} is missing: make demo writes it", file=sys.stderr)
        return 2
    address = config["server"]["listen"]
    with ExitStack() as running:
        try:
            if not answers(address):
                running.enter_context(ServerProcess(given.folder)).start()
            command = [sys.executable, "-m", "sow_cli", "--server", address, "console", *others]
            return subprocess.run(command, check=False).returncode
        except ServerTrouble as error:
            print(f"console: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130


def answers(address: str) -> bool:
    """True if something listens there."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


if __name__ == "__main__":
    sys.exit(main())
