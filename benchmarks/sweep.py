"""`python -m benchmarks.sweep [--quick] [--json FILE]`: the figures and the tables of docs/sizing.md.

Each point is a server of its own, on which the works of `sow bench` run. A second part pins a server and its client to
one core and to two, and compares the rates with those of the model (`sizing.Load`). It takes about half an hour, 25 GiB
of disk at its greatest point, and a machine with two cores.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click

from benchmarks.processes import SowServer
from benchmarks.setting import measure_machine
from benchmarks.sizing import FIGURES, FORMULAS, Kept, Load, Pinned, Point, Sweep, fit, read, to_json
from sow.sizes import format_bytes
from sow_cli.bench_plan import WORKS, Plan, Work
from sow_cli.server_usage import LocalProcess
from sow_cli.workload import Measured, Workload
from sow_client import AsyncClient, Client, SowError

SECONDS: Final = 3.0
PINNED_SECONDS: Final = 2.0
PINNED_RECORDS: Final = 200_000
PINNED_WORKS: Final[Sequence[Work]] = ("publish", "update", "query")
GROWTH_WORKS: Final[Sequence[Work]] = ("publish", "update", "single", "get", "query", "expire")
CALLS_MAX: Final = 300.0
"""Seconds that a compaction may take."""
CONFIG: Final = """\
[journal]
prune_interval = "10s"
[defaults]
retain_time = "0s"
retain_bytes = 0
"""
KEEPING: Final = """\
[journal]
prune_interval = "1s"
[defaults]
retain_time = "1d"
retain_bytes = "100GiB"
"""
KEPT_RECORDS: Final = 50_000
KEPT_PAYLOADS: Final = (64, 160, 512, 1_024, 4_096, 16_384)
_DELIVER: Final[Sequence[Work]] = ("publish", "deliver")


def _plan(
    records: int,
    payload_bytes: int = 160,
    *,
    indexes: int = 0,
    topics: int = 1,
    subscribers: int = 0,
    follow_all: bool = False,
) -> Plan:
    return Plan("sweep", records, payload_bytes, indexes, subscribers, follow_all, topics, "buffered", seconds=SECONDS)


POINTS: Final = (
    *(_plan(records) for records in (100_000, 300_000, 1_000_000, 3_000_000)),
    *(_plan(100_000, payload) for payload in (64, 512, 2_048, 4_096, 16_384)),
    *(_plan(100_000, indexes=indexes) for indexes in (1, 2, 4)),
    *(_plan(100_000, topics=topics) for topics in (10, 100)),
    _plan(100_000, 1_024, indexes=2, topics=10),
    _plan(100_000, 4_096, indexes=1),
    *(_plan(100_000, subscribers=subscribers) for subscribers in (1, 10, 100, 1_000)),
    *(_plan(100_000, subscribers=subscribers, follow_all=True) for subscribers in (1, 10, 100)),
    _plan(100_000, subscribers=1_000, topics=100),
    _plan(100_000, 2_048, subscribers=100, follow_all=True),
    _plan(10_000_000),
    _plan(30_000_000),
)


def works(plan: Plan) -> Sequence[Work]:
    """The works of a point. Those with subscribers measure deliveries alone."""
    return _DELIVER if plan.subscribers else [work for work in WORKS if plan.applies(work)]


@contextmanager
def _bench(
    directory: Path, plan: Plan, runner: asyncio.Runner, more: str = CONFIG
) -> Iterator[tuple[SowServer, Client, Workload]]:
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(directory, more=more))
        client = stack.enter_context(Client(server.address, timeout=CALLS_MAX))

        def left(name: str, error: SowError) -> None:
            click.echo(f"{name} is left: {error}", err=True)  # it goes with the directory

        meter = LocalProcess(server.pid)
        yield (
            server,
            client,
            stack.enter_context(Workload(client, lambda: AsyncClient(server.address), plan, meter, left, runner)),
        )


def measure(directory: Path, plan: Plan, runner: asyncio.Runner) -> Point:
    """One point, on a server of its own."""
    with _bench(directory, plan, runner) as (server, client, workload):
        done: dict[Work, Measured] = {work: workload.run(work) for work in works(plan)}
        memory_bytes = round(server.resident_mebibytes() * 2**20)
        _await_pruned(client, plan)
        client.compact()
        return Point(
            plan.records,
            plan.payload_bytes,
            plan.indexes,
            plan.subscribers,
            plan.topics,
            plan.follow_all,
            {work: round(one.cpu_micros, 3) for work, one in done.items() if one.cpu_micros is not None},
            memory_bytes,
            client.status().disk_bytes,
        )


def measure_kept(directory: Path, payload_bytes: int, records: int, runner: asyncio.Runner) -> Kept:
    """The bytes of records on disk, and of their changes in the journal."""
    plan = _plan(records, payload_bytes)
    with _bench(directory, plan, runner, KEEPING) as (_, client, workload):
        workload.run("publish")
        (name,) = plan.names
        figures = client.describe_topic(name).statistics
        assert figures is not None
        client.alter_topic(name, retain_time="0s", retain_bytes=0)
        _await_pruned(client, plan)
        client.compact()
        return Kept(payload_bytes, records, client.status().disk_bytes, figures.journal_bytes)


def _await_pruned(client: Client, plan: Plan) -> None:
    """The journal would count as disk of the records."""
    give_up = time.monotonic() + CALLS_MAX
    while time.monotonic() < give_up:
        topics = [client.describe_topic(name).statistics for name in plan.names]
        if not any(topic is not None and topic.journal_bytes for topic in topics):
            return
        time.sleep(0.2)
    raise AssertionError("the journal was not pruned")


@dataclass(frozen=True, slots=True)
class _Cpu:
    serial: float
    parallel: float


def _cpu(pid: int) -> _Cpu:
    """CPU seconds of a process by threads: those that run Python, and the others."""
    tick = os.sysconf("SC_CLK_TCK")
    serial = parallel = 0.0
    main = ""
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda entry: int(entry.name)):
        try:
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        seconds = sum(map(int, fields.split()[11:13])) / tick
        main = main or name
        # Threads of Python have the name of the first one; RocksDB and gRPC give theirs names.
        if name == main:
            serial += seconds
        else:
            parallel += seconds
    return _Cpu(serial, parallel)


@contextmanager
def _on_cores(cores: set[int], pid: int) -> Iterator[None]:
    """Pins all threads of the server and of this process."""
    before = os.sched_getaffinity(0)
    try:
        for one in (pid, os.getpid()):
            for task in Path(f"/proc/{one}/task").iterdir():
                os.sched_setaffinity(int(task.name), cores)
        yield
    finally:
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), before)


def measure_pinned(directory: Path, rounds: int, runner: asyncio.Runner) -> list[Pinned]:
    """The greatest rates on one core and on two, in turns, and the CPU times of the turns on two, by threads. The
    greatest, because other users of the machine can only make them smaller."""
    available = sorted(os.sched_getaffinity(0))
    assert len(available) >= 2, "a machine with two cores is needed"
    rates: dict[Work, dict[int, list[float]]] = {work: {1: [], 2: []} for work in PINNED_WORKS}
    spent: dict[Work, list[tuple[int, float, float, float]]] = {work: [] for work in PINNED_WORKS}
    plan = Plan("sweep", PINNED_RECORDS, durability="buffered", seconds=PINNED_SECONDS)
    for number in range(rounds):
        for cores in (1, 2):
            with _bench(directory / f"{number}-{cores}", plan, runner) as (server, _, workload):
                with _on_cores(set(available[:cores]), server.pid):
                    for work in PINNED_WORKS:
                        before, all_before, client = _cpu(server.pid), server.cpu_seconds(), time.process_time()
                        done = workload.run(work)
                        after, all_after = _cpu(server.pid), server.cpu_seconds()
                        rates[work][cores].append(done.per_second)
                        if cores == 2:
                            # The names tell the shares; the clock of the process is finer.
                            serial, parallel = after.serial - before.serial, after.parallel - before.parallel
                            share = serial / max(serial + parallel, 1e-9)
                            total = all_after - all_before
                            readers = max(0.0, (done.cpu_seconds or 0.0) - total)
                            spent[work].append(
                                (
                                    done.operations,
                                    share * total,
                                    (1 - share) * total + readers,
                                    time.process_time() - client,
                                )
                            )
    return [
        Pinned(
            Load(work, *(round(_per_operation(spent[work], column), 3) for column in (1, 2, 3))),
            {cores: round(max(of), 1) for cores, of in rates[work].items()},
        )
        for work in PINNED_WORKS
    ]


def _per_operation(spent: Sequence[tuple[int, float, float, float]], column: int) -> float:
    return sum(one[column] for one in spent) / sum(one[0] for one in spent) * 1e6


def tables(sweep: Sweep) -> Mapping[str, list[str]]:
    """The tables of docs/sizing.md by their headings, whose lines a test compares with the page."""
    formulas = ["| figure | formula | unit | median error | greatest |", "|---|---|---|---|---|"]
    formulas += [str(fit(formula, sweep.points)) for formula in FORMULAS]
    pinned = [
        "| work | server, serial | parallel | client | one core: model | measured | two cores: model | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cores = [
        "| work | 1 core | 2 | 4 | 8 | 16 |",
        "|---|---|---|---|---|---|",
    ]
    for one in sweep.pinned:
        load = one.load
        pinned.append(
            f"| {load.name} | {load.server_serial:.1f} µs | {load.server_parallel:.1f} µs | {load.client:.1f} µs "
            + "".join(f"| {_rate(load.per_second(count))} | {_rate(one.measured[count])} " for count in (1, 2))
            + "|"
        )
        rates = [_rate(load.per_second(count, client_elsewhere=True)) for count in (1, 2, 4, 8, 16)]
        cores.append(f"| {load.name} | {' | '.join(rates)} |")
    growth = ["| records | " + " | ".join(GROWTH_WORKS) + " | memory | disk |", "|---" * (len(GROWTH_WORKS) + 3) + "|"]
    for point in sweep.points:
        if (point.payload_bytes, point.indexes, point.subscribers, point.topics) == (160, 0, 0, 1):
            micros = " | ".join(f"{point.cpu_micros[work]:.3g} µs" for work in GROWTH_WORKS)
            memory, disk = point.memory_bytes / 2**20, point.disk_bytes / 2**20
            growth.append(f"| {point.records:,} | {micros} | {memory:,.0f} MiB | {disk:,.0f} MiB |")
    kept = [
        "| payload | a record on disk | a change in the journal |",
        "|---|---|---|",
        *(
            f"| {format_bytes(one.payload_bytes)} | {one.disk_bytes / one.records:,.0f} B "
            f"| {one.journal_bytes / one.records:,.0f} B |"
            for one in sweep.kept
        ),
    ]
    return {"formulas": formulas, "growth": growth, "pinned": pinned, "cores": cores, "kept": kept}


def _rate(per_second: float) -> str:
    return f"{per_second / 1000:,.0f} k/s" if per_second >= 10_000 else f"{per_second:,.0f}/s"


@click.command()
@click.option("--quick", is_flag=True, help="Few small points: a look at whether it works.")
@click.option("--json", "json_file", default=FIGURES, type=click.Path(path_type=Path), help="The raw figures.")
@click.option("--rounds", default=5, show_default=True, help="Of the part that pins.")
@click.option(
    "--only", type=click.Choice(["points", "pinned", "kept"]), help="Measure one part; the file keeps the others."
)
@click.option("--tables", "only_tables", is_flag=True, help="Measure nothing; print the tables of the file.")
@click.option(
    "--directory", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path(tempfile.gettempdir())
)
def main(quick: bool, json_file: Path, rounds: int, only: str | None, only_tables: bool, directory: Path) -> None:
    """Measures the sweep, writes its figures, and prints the tables of docs/sizing.md."""
    # SIGTERM ends the `with` blocks, and these end the servers.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    sweep = read(json_file.read_text()) if json_file.exists() else Sweep("", [], [])
    if not only_tables:
        plans = [plan for plan in POINTS if plan.records <= 100_000][:4] if quick else POINTS
        home = Path(tempfile.mkdtemp(prefix="sow-sweep-", dir=directory))
        runner = asyncio.Runner()
        try:
            if only != "kept":  # bytes are the same on every machine
                machine = f"{measure_machine(home)}; {os.cpu_count()} cores, Python {platform.python_version()}"
                sweep = replace(sweep, machine=machine)
            if only in (None, "kept"):
                sizes = KEPT_PAYLOADS[:2] if quick else KEPT_PAYLOADS
                kept = [measure_kept(home / f"kept-{one}", one, KEPT_RECORDS, runner) for one in sizes]
                sweep = replace(sweep, kept=kept)
                json_file.write_text(to_json(sweep))
            if only in (None, "pinned"):
                sweep = replace(sweep, pinned=measure_pinned(home / "pinned", 1 if quick else rounds, runner))
                json_file.write_text(to_json(sweep))
            points: list[Point] = []
            for number, plan in enumerate(plans if only in (None, "points") else ()):
                begin = time.monotonic()
                points.append(measure(home / str(number), plan, runner))
                shutil.rmtree(home / str(number))
                click.echo(f"{time.monotonic() - begin:5.0f} s  {points[-1]}", err=True)
                sweep = replace(sweep, points=points)
                json_file.write_text(to_json(sweep))
        finally:
            runner.close()
            shutil.rmtree(home, ignore_errors=True)
    for table in tables(sweep).values():
        click.echo("\n".join(["", *table]))


if __name__ == "__main__":
    sys.exit(main())
