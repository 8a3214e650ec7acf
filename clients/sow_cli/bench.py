"""`sow bench`: measures a server that is running, with records of its own."""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, get_args

import click

from sow.sizes import SizeError, parse_bytes
from sow.version import __version__
from sow_cli import arguments, display, packing
from sow_cli.arguments import Command
from sow_cli.bench_plan import INDEXES_MAX, WORKS, Plan, Work
from sow_cli.exits import Refused, describe
from sow_cli.grouping import check_plot
from sow_cli.interrupts import through_asyncio
from sow_cli.output import Fact, Format, Output, note, output_option, progress
from sow_cli.server_usage import Meter, MetricsPage, MetricsUnreadable, local_meter
from sow_cli.session import Session
from sow_cli.workload import BenchFailed, Measured, Workload
from sow_client import Client, DurabilityName, SowError

TOPIC: Final = "sow-bench"
PAYLOAD_BYTES_MAX: Final = 1024 * 1024
TOPICS_MAX: Final = 200
"""Each topic has a publisher's stream. A connection takes 256 calls by default, and further ones wait for ever."""
_NAMES: Final = (
    "work",
    "operations",
    "operation",
    "elapsed_micros",
    "per_second",
    "p50_micros",
    "p99_micros",
    "server_cpu_micros",
    "server_memory_bytes",
    "server_disk_bytes",
)


def _payload_bytes(text: str) -> int:
    try:
        found = int(text) if text.isdecimal() else parse_bytes(text)
    except SizeError as error:
        raise click.BadParameter(str(error)) from error
    if not 1 <= found <= PAYLOAD_BYTES_MAX:
        raise click.BadParameter(f"{text!r} is not within 1 B and {display.exact_size(PAYLOAD_BYTES_MAX)}")
    return found


def _works(text: str) -> list[Work]:
    named = arguments.comma_separated(text)
    for name in named:
        if name not in WORKS:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(WORKS)}")
    return [work for work in WORKS if work in named or work == "publish"]


def _figure(
    name: str,
    default: object,
    kind: Callable[[str], object] | click.IntRange | click.FloatRange,
    metavar: str,
    text: str,
) -> Callable[[Command], Command]:
    return click.option(name, default=default, show_default=True, type=kind, metavar=metavar, help=text)


_HELP: Final = """Measure the speed of a running server, on topics that this command creates and deletes again.

A topic of this name that exists is not touched: the command ends (TOPIC_EXISTS). The topics are deleted at the end,
also after an error, Ctrl-C and SIGTERM; one that cannot be deleted is named. The caller needs the actions create,
topic-admin, publish, read and consume on them, and observe for the figure of the disk. Publishes are journaled, and
replicated to peers whose links have these topics.

The rates include this command's own work, which shares the machine if the server is on it. The CPU time of an
operation is the server's alone. Of several addresses the first that serves is used throughout.

\b
Work:
  publish  a stream of new records, in batches of 1,000, 16 of them under way
  update   a stream of random records with other texts and indexed values
  single   calls that publish one record, one after the other
  get      calls that read one record by its key
  query    whole topics, again and again
  index    queries for one value of the first indexed field, ten records each
  deliver  100 records in a publish, the next ones once these have arrived
  expire   5,000 records fall due in each second

\b
Time that p50 and p99 tell:
  publish, update     from handing a batch over to its acknowledgement
  single, get, index  the call
  query               a whole topic
  deliver             from making a record to its arrival at a subscriber
  expire              from the expire time to the notice of a subscriber, who
                      gets one in twenty

\b
Examples:
  sow bench
  sow bench --records 1000000 --payload 1KiB --indexes 2 --format json
  sow bench --work single,get --durability fsync --seconds 30
  sow bench --work deliver --subscribers 1000 --topics 10
  sow bench --report bench.md
  sow bench --work get,single --plot
"""


@click.command(short_help="Measure the speed of the server.", help=_HELP)
@click.option(
    "--work",
    type=_works,
    metavar="WORK,…",
    help="Which work; publish always, as it makes the records.  [default: all; index only with indexes, deliver "
    "only with subscribers]",
)
@_figure("--records", 100_000, click.IntRange(1, 1_000_000_000), "N", "Records in all.")
@_figure(
    "--payload", "160", _payload_bytes, "SIZE", "Bytes of a record, such as 160 or 16KiB; its text does not compress."
)
@_figure(
    "--indexes", 0, click.IntRange(0, INDEXES_MAX), "N", "Indexed fields of a topic; ten records have the same value."
)
@_figure("--subscribers", 1, click.IntRange(0, 100_000), "N", "Subscribers of deliver, shared out over the topics.")
@click.option(
    "--follow",
    default="own",
    show_default=True,
    type=click.Choice(["own", "all"]),
    help="own: each change concerns one subscriber, by its filter. all: each gets every change of its topic.",
)
@_figure("--topics", 1, click.IntRange(1, TOPICS_MAX), "N", "Topics that share the records.")
@click.option(
    "--durability",
    type=click.Choice(get_args(DurabilityName)),
    help="When publishes are acknowledged.  [default: the server's]",
)
@_figure(
    "--ttl",
    "1d",
    arguments.ttl,
    "DURATION|never",
    "Lifetime of the records; so nothing stays if the command is killed.",
)
@_figure("--seconds", 5.0, click.FloatRange(0, 86_400, min_open=True), "N", "Time of each work except publish.")
@click.option("--topic", default=TOPIC, show_default=True, metavar="NAME", help="The topics are NAME-1, NAME-2 ….")
@click.option(
    "--metrics",
    metavar="URL",
    help="The server's metrics, for its CPU time and memory on another machine; --tls-ca counts here, too.",
)
@click.option(
    "--metrics-token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The token of the metrics.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=packing.checked,
    metavar="FILE",
    help="Also write a report in Markdown: the figures, the settings, the versions, the machine. .gz or .zst "
    "compresses it.",
)
@click.option("--plot", is_flag=True, help="Also draw how the times of each work are spread; the figures are a table.")
@output_option
@click.pass_obj
def bench(
    session: Session,
    output: Output,
    *,
    work: list[Work] | None,
    records: int,
    payload: int,
    indexes: int,
    subscribers: int,
    follow: str,
    topics: int,
    durability: DurabilityName | None,
    ttl: str,
    seconds: float,
    topic: str,
    metrics: str | None,
    metrics_token_file: Path | None,
    report: Path | None,
    plot: bool,
) -> None:
    check_plot(output, plot=plot)
    output = Output(Format.TABLE) if plot else output
    plan = Plan(topic, records, payload, indexes, subscribers, follow == "all", topics, durability, ttl, seconds)
    _check(plan, work or ())
    if metrics_token_file is not None and metrics is None:
        raise click.UsageError("--metrics-token-file is for --metrics")
    session = session.of_one()
    meter = _meter(session, metrics, metrics_token_file)

    def left(name: str, error: SowError) -> None:
        later = f"{session.command} topic delete {shlex.quote(name)}"
        note(f"{name} could not be deleted: {describe(error)}; later: {later}")

    done: list[list[Fact]] = []
    ran_with: list[Fact] = []
    spreads: dict[str, Sequence[float]] = {}
    try:
        with session.client() as client:
            ran_with = _circumstances(client, plan)
        if output.is_table:
            note(" · ".join(f"{fact.heading} {fact.shown}" for fact in ran_with if fact.shown))
        with (
            session.client() as client,
            through_asyncio(),
            asyncio.Runner() as runner,
            Workload(client, session.async_client, plan, meter, left, runner) as workload,
        ):
            with progress("{task.fields[operation]}", measured=False) as bar:
                shown = bar.add_task("", total=None, operation="")
                for one in work or [one for one in WORKS if plan.applies(one)]:
                    bar.update(shown, description=one)
                    measured = workload.run(one)
                    facts = _facts(measured)
                    done.append(facts)
                    spreads[f"{one}: samples by time"] = measured.latencies
                    if output.format is Format.NDJSON:
                        output.one(facts)  # at once, for who watches
    except (BenchFailed, MetricsUnreadable) as error:
        raise Refused(str(error)) from error
    finally:
        # Also after Ctrl-C: the works that are done have their figures. The report first, as a reader of the table may
        # leave.
        if done and report is not None:
            packing.write(report, report_of(ran_with, done).encode())
            note(f"the report is in {report}")
        if done and output.format is not Format.NDJSON:
            output.many(done, names=_NAMES, nothing="")
        if spreads and plot:
            _draw(spreads)


def _check(plan: Plan, work: Sequence[Work]) -> None:
    if plan.topics > plan.records:
        raise click.UsageError(f"{plan.topics} topics cannot share {display.records(plan.records)}")
    if plan.payload_bytes < plan.payload_bytes_min:
        needed = f"the key and the indexed fields need {plan.payload_bytes_min} B"
        raise click.UsageError(f"--payload {plan.payload_bytes}: {needed}")
    for one in work:
        if one != "publish" and not plan.applies(one):
            raise click.UsageError(f"--work {one} needs --{'indexes' if one == 'index' else 'subscribers'}")


def _draw(spreads: Mapping[str, Sequence[float]]) -> None:
    from sow_cli import plots  # only here, as it needs rich

    click.echo()
    plots.show({title: plots.spread([seconds * 1e6 for seconds in times]) for title, times in spreads.items()})


def _circumstances(client: Client, plan: Plan) -> list[Fact]:
    """The circumstances of the figures: versions, the server, and the settings of the run."""
    instance = client.describe_instance()
    return [
        Fact("command_version", __version__, __version__, label="command"),
        Fact("server_version", instance.server_version, display.safe(instance.server_version), label="server"),
        Fact("instance", instance.shown, display.safe(instance.shown), label="at"),
        Fact("python", platform.python_version(), platform.python_version()),
        Fact("machine", platform.platform(), platform.platform(), label="on"),
        Fact("cores", os.cpu_count(), str(os.cpu_count())),
        Fact("records", plan.records, display.count(plan.records)),
        Fact("payload_bytes", plan.payload_bytes, display.size(plan.payload_bytes), label="payload"),
        Fact("indexes", plan.indexes, str(plan.indexes)),
        Fact("topics", plan.topics, str(plan.topics)),
        Fact("subscribers", plan.subscribers, str(plan.subscribers)),
        Fact("durability", plan.durability, plan.durability or "the server's"),
        Fact("ttl", plan.ttl, plan.ttl),
    ]


def report_of(ran_with: Sequence[Fact], works: Sequence[Sequence[Fact]]) -> str:
    """The report, in Markdown."""
    lines = ["# sow bench", "", f"{datetime.now(UTC):%Y-%m-%d %H:%M}Z", "", "| setting | value |", "|---|---|"]
    lines += [f"| {fact.heading} | {fact.shown} |" for fact in ran_with if fact.shown]
    shown = [fact for fact in works[0] if fact.in_lists]
    lines += ["", "| " + " | ".join(fact.heading for fact in shown) + " |"]
    lines.append("|" + "|".join("---:" if fact.right else "---" for fact in shown) + "|")
    for facts in works:
        lines.append("| " + " | ".join(fact.shown for fact in facts if fact.in_lists) + " |")
    lines += [
        "",
        "p50 and p99 are measured at the client; rates include its own work. `sow bench --help` explains each work.",
        "",
    ]
    return "\n".join(lines)


def _meter(session: Session, url: str | None, token_file: Path | None) -> Meter:
    if url is None:
        return local_meter(session.server)
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--metrics {url!r} is not a URL such as http://127.0.0.1:9464/metrics")
    token = token_file.read_text().strip() if token_file is not None else ""
    authorities = session.tls.ca if session.tls is not None else None
    context = ssl.create_default_context(cafile=authorities) if url.startswith("https://") else None
    page = MetricsPage(url, token, context)
    try:
        page.read()
    except MetricsUnreadable as error:
        raise click.UsageError(f"--metrics {error}") from error
    return page


def _facts(measured: Measured) -> list[Fact]:
    p50, p99 = (round(measured.latency(share) * 1e6) for share in (0.5, 0.99))
    cpu, memory, disk = measured.cpu_micros, measured.memory_bytes, measured.disk_bytes
    operation = WORKS[measured.work]
    return [
        Fact("work", measured.work, measured.work),
        Fact("operations", measured.operations, display.count(measured.operations), right=True),
        Fact("operation", operation, "", in_lists=False),
        Fact("elapsed_micros", round(measured.seconds * 1e6), f"{measured.seconds:.1f}s", label="time", right=True),
        Fact(
            "per_second",
            round(measured.per_second, 1),
            f"{measured.per_second:,.0f} {operation}s/s".replace("deliverys", "deliveries"),
            label="rate",
            right=True,
        ),
        Fact("p50_micros", p50, display.duration(p50), label="p50", right=True),
        Fact("p99_micros", p99, display.duration(p99), label="p99", right=True),
        Fact(
            "server_cpu_micros",
            None if cpu is None else round(cpu, 3),
            display.NOT_SET if cpu is None else f"{cpu:.1f}µs",
            label="server CPU each",
            right=True,
        ),
        Fact(
            "server_memory_bytes",
            memory,
            display.NOT_SET if memory is None else display.size(memory),
            label="memory",
            right=True,
        ),
        Fact(
            "server_disk_bytes",
            disk,
            display.NOT_SET if disk is None else display.size(disk),
            label="disk",
            right=True,
        ),
    ]
