"""`python -m benchmarks.against CHECKOUT [--rounds N] [--records N]`: this checkout's server against another one's.

For changes that should cost nothing. Both servers run at the same time. Each round does the same work on both, in
turns, through the client of this checkout. The figure is the CPU time that a server spends on a record, compaction
included, because it hardly depends on other users of the machine.

[1]  The ratio of a case is the median of the ratios of its rounds; both servers take turns in going first.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from benchmarks.documents import documents
from benchmarks.processes import TOPIC, SowServer
from benchmarks.publishing import BATCH_RECORDS, publish
from sow_client import Client

OURS: Final = "this"
OTHERS: Final = "other"
EXPIRED_METRIC: Final = "sow_records_expired_total"
TTL_SECONDS: Final = 1.0
POLL_SECONDS: Final = 0.2
EXPIRING_FROM: Final = 1_000_000_000
"""The number of the first document that expires; below are those that stay."""
SEED: Final = 7

Side = tuple[SowServer, Client]
Case = Callable[[Side, int], None]
"""Does the work of one round, whose number it gets, on one server."""


def cases(records: int) -> Iterator[tuple[str, Case]]:
    """The names of the cases, and each case's work on `records` records."""

    def new_keys(side: Side, number: int) -> None:
        publish(side[1], documents(range(number * records, (number + 1) * records)), "buffered")

    def updates(side: Side, number: int) -> None:
        numbers = random.Random(SEED + number).choices(range(records), k=records)
        publish(side[1], documents(numbers, revision=number + 1), "buffered")

    def query(side: Side, number: int) -> None:
        found = sum(len(batch.keys) for batch in side[1].query(TOPIC).batches())
        assert found == (number + 1) * records, f"{found:,} records in round {number}"

    def expiry(side: Side, number: int) -> None:
        server, client = side
        before = _expired(server)
        first = EXPIRING_FROM + number * records
        payloads = documents(range(first, first + records))
        with client.publisher(TOPIC, ttl=TTL_SECONDS, durability="buffered", batch_records=BATCH_RECORDS) as publisher:
            for payload in payloads:
                publisher.publish(payload)
        while _expired(server) - before < records:
            time.sleep(POLL_SECONDS)

    yield "publish-new", new_keys
    yield "publish-updates", updates
    yield "query", query
    yield "mass-expiry", expiry


def measured(sides: Mapping[str, Side], case: Case, number: int) -> dict[str, float]:
    """CPU seconds that each server spends on one round of a case."""
    names = list(sides) if number % 2 else list(sides)[::-1]
    spent: dict[str, float] = {}
    for name in names:
        before = sides[name][0].cpu_seconds()
        case(sides[name], number)
        spent[name] = sides[name][0].cpu_seconds() - before
    return spent


def _expired(server: SowServer) -> float:
    return server.metrics().total(EXPIRED_METRIC)


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=7, show_default=True, help="How often each case is run on both servers.")
@click.option("--records", default=100_000, show_default=True, help="Records that one round of a case is about.")
def main(checkout: Path, rounds: int, records: int) -> None:
    """Compares the CPU time a record of this checkout's server with that of CHECKOUT, which has a .venv of its own."""
    # Not resolved: the interpreter of a virtual environment is a link, and the link is what tells the environment.
    programs = {OURS: Path(sys.executable), OTHERS: checkout / ".venv" / "bin" / "python"}
    if not programs[OTHERS].exists():
        raise click.BadParameter(f"{checkout} has no .venv: run `make .venv/.installed` there", param_hint="CHECKOUT")
    with tempfile.TemporaryDirectory(prefix="sow-against-") as home, ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, program in programs.items():
            server = stack.enter_context(SowServer(Path(home, name), program=program))
            sides[name] = server, stack.enter_context(Client(server.address))
        spent: dict[str, list[dict[str, float]]] = {}
        for number, (name, case) in itertools.product(range(rounds), list(cases(records))):
            spent.setdefault(name, []).append(measured(sides, case, number))
            click.echo(".", nl=False, err=True)
        click.echo(err=True)
    click.echo("| case | this, µs CPU a record | the other | ratio | of single rounds |\n|---|---|---|---|---|")
    for name, of_rounds in spent.items():
        ratios = [one[OURS] / one[OTHERS] for one in of_rounds]
        of_query = [(number + 1) * records if name == "query" else records for number in range(rounds)]
        ours, others = (
            statistics.median(one[side] / count * 1e6 for one, count in zip(of_rounds, of_query, strict=True))
            for side in (OURS, OTHERS)
        )
        click.echo(
            f"| {name} | {ours:.2f} | {others:.2f} | {statistics.median(ratios):.3f} × "
            f"| {min(ratios):.3f} to {max(ratios):.3f} |"
        )


if __name__ == "__main__":
    main()
