"""`python -m benchmarks.against CHECKOUT [--peer] [--starts N] …`: this checkout's server against another one's.

For changes that should cost nothing. Both servers run at the same time. Each round does the same work on both, in
turns (`turns`), through the client of this checkout. The figure is the CPU time that a server spends on a record or a
call, compaction included. The servers are started anew several times, because two equal ones differ by some percent as
long as they run, most of all in single calls.

With `--peer` each server has a peer of its own version that gets every change. The cases are those that publish, and
the figure is the CPU time of both, until the peer has everything.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from benchmarks.processes import SowServer, free_port
from benchmarks.turns import Cases, Ratio, Side, Spent, against_cases, measured
from sow_client import Client

OURS: Final = "this"
OTHERS: Final = "other"
PUBLISHING: Final = ("publish-new", "publish-updates", "single-publish")
"""The cases with a peer."""
POLL_SECONDS: Final = 0.02


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--starts", default=3, show_default=True, help="How often both servers are started.")
@click.option("--rounds", default=7, show_default=True, help="How often each case is run at each start.")
@click.option("--records", default=100_000, show_default=True, help="Records that one round of a case is about.")
@click.option("--calls", default=1_000, show_default=True, help="Single calls of a round.")
@click.option("--peer", is_flag=True, help="With a peer that gets every change, and counts.")
def main(checkout: Path, starts: int, rounds: int, records: int, calls: int, peer: bool) -> None:
    """Compares the CPU time a record of this checkout's server with that of CHECKOUT, which has a .venv of its own."""
    # Not resolved: the interpreter of a virtual environment is a link, and the link is what tells the environment.
    programs = {OURS: Path(sys.executable), OTHERS: checkout / ".venv" / "bin" / "python"}
    if not programs[OTHERS].exists():
        raise click.BadParameter(f"{checkout} has no .venv: run `make .venv/.installed` there", param_hint="CHECKOUT")
    spent: dict[str, list[dict[str, Spent]]] = {}
    for _ in range(starts):
        with tempfile.TemporaryDirectory(prefix="sow-against-") as home, ExitStack() as stack:
            sides: dict[str, Side] = {}
            for name, program in programs.items():
                server = stack.enter_context((Pair if peer else SowServer)(Path(home, name), program=program))
                sides[name] = Side(server, stack.enter_context(Client(server.address)))
            cases = [case for case in against_cases(Cases(records, calls)) if not peer or case[0] in PUBLISHING]
            for number, (name, case) in itertools.product(range(rounds), cases):
                spent.setdefault(name, []).append(measured(sides, case, number))
                click.echo(".", nl=False, err=True)
    click.echo(err=True)
    click.echo("| case | this, µs CPU a record | the other | ratio | of single rounds |\n|---|---|---|---|---|")
    for name, of_rounds in spent.items():
        ours, others = ([one[side].micros for one in of_rounds] for side in (OURS, OTHERS))
        ratio = Ratio.of(ours, others)
        click.echo(
            f"| {name} | {statistics.median(ours):.2f} | {statistics.median(others):.2f} | {ratio.median:.3f} × "
            f"| {ratio.spread} |"
        )


class Pair(SowServer):
    """A server, and its peer, which gets every change. Their CPU time is that of both, once the peer has everything."""

    def __init__(self, directory: Path, *, program: Path) -> None:
        """Starts both, and waits for the link."""
        port = free_port()
        link = f'[[replication.peers]]\nname = "receiver"\naddress = "127.0.0.1:{port}"\n'
        accept = '[replication]\naccept = ["sender"]\n'
        self._receiver = SowServer(directory / "receiver", instance="receiver", port=port, more=accept, program=program)
        super().__init__(directory / "sender", instance="sender", more=link, program=program)
        self._wait()

    def _wait(self) -> None:
        with Client(self.address) as client:
            while True:
                (link,) = client.replication_status().outgoing
                if link.state == "streaming" and link.lag_sequences == 0:
                    return
                self.check_alive()
                time.sleep(POLL_SECONDS)

    def cpu_seconds(self) -> float:
        """The CPU time of both."""
        self._wait()
        return super().cpu_seconds() + self._receiver.cpu_seconds()

    def stop(self) -> None:
        """Ends both."""
        super().stop()
        self._receiver.stop()


if __name__ == "__main__":
    main()
