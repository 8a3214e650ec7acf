"""`python -m benchmarks [NAME…] [--quick] [--json FILE] [--markdown FILE]`: runs benchmarks, one after the other."""

from __future__ import annotations

import gc
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from benchmarks.registry import BENCHMARKS, Benchmark, UnknownBenchmark, chosen
from benchmarks.report import Report, Result, failed, print_report, to_json, to_markdown
from benchmarks.rows import Row
from benchmarks.setting import Setting, measure_machine
from tests.support.oracles.attacks import ATTACKS


class TakesTooLong(Exception):
    """A benchmark has exceeded its time."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TakesTooLong in the main thread after `seconds`, so that `with` blocks end the processes they have
    started."""

    def over(_number: int, _frame: FrameType | None) -> None:
        raise TakesTooLong(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_benchmark(benchmark: Benchmark, given: Setting, console: Console) -> Result:
    """Runs one in a temporary directory, below that of the setting. An exception is its result, and the next one
    runs."""
    rows: list[Row] = []
    failure = ""
    begin = time.monotonic()

    def say(text: str) -> None:
        console.print(
            f"[dim]{time.monotonic() - begin:6.1f} s  {benchmark.name}: {text}[/]", highlight=False, soft_wrap=True
        )

    home = Path(tempfile.mkdtemp(prefix=f"sow-bench-{benchmark.name}-", dir=given.directory))
    try:
        with time_limit(benchmark.seconds_max):
            for row in benchmark.run(replace(given, directory=home, say=say)):
                rows.append(row)
                say(f"{row.case}: {row.judged or row.ours}")
    except Exception as error:  # noqa: BLE001  # a benchmark may fail in any way; the others are still wanted
        failure = f"{type(error).__name__}: {error}"
        console.print(traceback.format_exc(), style="red", markup=False, highlight=False)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return Result(benchmark.name, benchmark.title, tuple(rows), time.monotonic() - begin, failure)


def filesystem_of(directory: Path) -> str:
    """The type of the directory's file system. On tmpfs a sync costs nothing, so durable rates mean little."""
    found, length = "unknown", -1
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if directory.is_relative_to(mount) and len(mount) > length:
            found, length = kind, len(mount)
    return found


@click.command(epilog="Benchmarks: " + ", ".join(benchmark.name for benchmark in BENCHMARKS))
@click.argument("names", nargs=-1, metavar="[NAME]…")
@click.option("--quick", is_flag=True, help="Reduced sizes: a look within minutes, not a judgement.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the results as JSON.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Also write them as Markdown.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(tempfile.gettempdir()),
    help="Where the servers keep their data; should be a real disk.",
)
@click.option(
    "--records",
    type=click.IntRange(min=10_000),
    help="Records of restart, memory, growth, spark-scale and spark-state-scale.  [default: 10 or 30 million]",
)
@click.option(
    "--attack",
    "attacks",
    multiple=True,
    type=click.Choice([attack.name for attack in ATTACKS]),
    help="Only this attack of hostile; may be repeated.",
)
@click.option(
    "--server-root",
    "server_roots",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False, exists=True, resolve_path=True),
    help="A checkout with a .venv whose server hostile starts, instead of this one; several take turns.",
)
def main(
    names: tuple[str, ...],
    quick: bool,
    json_file: Path | None,
    markdown_file: Path | None,
    directory: Path,
    records: int | None,
    attacks: tuple[str, ...],
    server_roots: tuple[Path, ...],
) -> None:
    """Measures the server against peers in the same run. Without a NAME it runs all benchmarks, which takes a while."""
    try:
        benchmarks = chosen(names)
    except UnknownBenchmark as error:
        raise click.UsageError(str(error)) from error
    # SIGTERM ends the `with` blocks, and these end the servers.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    # In a file or a pipe a table may be as wide as it needs. soft_wrap keeps progress on one line each.
    console = Console() if sys.stdout.isatty() else Console(width=150)
    directory = directory.resolve()
    filesystem = filesystem_of(directory)
    if filesystem in ("tmpfs", "ramfs"):
        console.print(f"[yellow]{directory} is on {filesystem}: a sync costs nothing there; see --directory[/]")
    started = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    with tempfile.TemporaryDirectory(prefix="sow-bench-", dir=directory) as machine_directory:
        machine = measure_machine(Path(machine_directory))
    console.print(f"machine: {machine}", highlight=False)
    # The documents of a round live long; the garbage collector would traverse them repeatedly, in everybody's time.
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    setting = Setting(quick, directory, machine, lambda _text: None, records, attacks, server_roots)
    results = tuple(run_benchmark(benchmark, setting, console) for benchmark in benchmarks)
    described = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    report = Report(quick, started, described, filesystem, machine, results)
    print_report(console, report)
    if json_file is not None:
        json_file.write_text(to_json(report) + "\n")
    if markdown_file is not None:
        markdown_file.write_text(to_markdown(report))
    if failed(report):
        sys.exit(1)


if __name__ == "__main__":
    main()
