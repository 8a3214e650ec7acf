"""`python -m benchmarks.against CHECKOUT [--starts N] [--rounds N] …`: this checkout's server against another one's.

For changes that should cost nothing. Both servers run at the same time. Each round does the same work on both, in
turns (`turns`), through the client of this checkout. The figure is the CPU time that a server spends on a record or a
call, compaction included. The servers are started anew several times, because two equal ones differ by some percent as
long as they run, most of all in single calls.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from benchmarks.processes import SowServer
from benchmarks.turns import Cases, Ratio, Side, Spent, against_cases, measured
from sow_client import Client

OURS: Final = "this"
OTHERS: Final = "other"


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--starts", default=3, show_default=True, help="How often both servers are started.")
@click.option("--rounds", default=7, show_default=True, help="How often each case is run at each start.")
@click.option("--records", default=100_000, show_default=True, help="Records that one round of a case is about.")
@click.option("--calls", default=1_000, show_default=True, help="Single calls of a round.")
def main(checkout: Path, starts: int, rounds: int, records: int, calls: int) -> None:
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
                server = stack.enter_context(SowServer(Path(home, name), program=program))
                sides[name] = Side(server, stack.enter_context(Client(server.address)))
            cases = list(against_cases(Cases(records, calls)))
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


if __name__ == "__main__":
    main()
