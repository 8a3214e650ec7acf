"""`sow status`, `sow compact`, `sow accept-clock`: the server as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import click

from sow.version import __version__
from sow_cli import arguments, display, joined, watched
from sow_cli.output import Fact, Output, moment, output_option, progress
from sow_cli.session import Session
from sow_client import Client, SowError, Status

VERSION_SECONDS_MAX: Final = 0.5
"""`sow --version` waits this long for a connection: the version of the command is the main thing."""


def show_versions(session: Session) -> None:
    """Writes the version of this command, then that of the server if it answers."""
    click.echo(f"sow {__version__}")
    try:
        with replace(session, waits=VERSION_SECONDS_MAX).client() as client:
            found = client.describe_instance()
    except SowError as error:
        click.echo(f"sow: no version from {display.safe(session.server)} ({error.reason})", err=True)
        return
    click.echo(f"server {display.safe(found.server_version)} ({display.safe(found.shown)})")


@click.command(short_help="Show the state of the server.")
@click.option(
    "--watch",
    is_flag=False,
    flag_value="1s",
    type=arguments.duration,
    metavar="[DURATION]",
    help="Show figures after each such time, 1s if none is given: rates by topic, queues, lags.",
)
@joined.here_option
@output_option
@click.pass_obj
def status(session: Session, output: Output, watch: str | None, here: bool) -> None:
    """Show the state of the server; of several cells, a line for each.

    With --watch a line comes each second, until Ctrl-C. It has the changes and expiries in a second, the requests that
    wait for the writer, and the subscriptions with those that read the journal. Then come the greatest lag of a peer
    and the busiest topics with a journal. On a terminal small charts of the rates and the queue stay below the lines.
    NDJSON has every topic and link.

    \b
    Examples:
      sow status
      sow status --watch 5s
    """
    with session.client() as client:
        if watch is not None:
            watched.show(client, output, watch, here=here)
        else:
            found = joined.asked(client, lambda one: [*_facts(one.status()), *_cells(one)], here=here)
            if found.several:
                rows = [_in_list(cell, facts) for cell, facts in found.answers.items()]
                whole = max(rows, key=len)  # a cell without a placement, such as an older server, has no facts about it
                output.many(rows, names=[fact.name for fact in whole], nothing="")
            else:
                output.one(next(iter(found.answers.values())))
            found.end()


@click.command(short_help="Show which instance answers.")
@output_option
@click.pass_obj
def instance(session: Session, output: Output) -> None:
    """Show the instance that answers: its name, id and cluster, and whether it serves. Every caller may ask.

    \b
    Example:
      sow --server a:7450,b:7450 instance
    """
    with session.client() as client:
        found = client.describe_instance()
    output.one(
        [
            Fact("name", found.name, found.name),
            Fact("address", found.address, found.address),
            Fact("serving", found.serving, "yes" if found.serving else "no"),
            Fact("cluster", found.cluster, found.cluster),
            Fact("id", found.id, found.id),
            Fact("journal_epoch", found.journal_epoch, found.journal_epoch),
            Fact("server_version", found.server_version, found.server_version),
            Fact("contract", found.contract, str(found.contract)),
        ]
    )


@click.command(short_help="Give unused disk space back now.")
@output_option
@click.pass_obj
def compact(session: Session, output: Output) -> None:
    """Compact the server's data files now and return the space of deleted and expired records to its system. This may
    take minutes; without it the space is returned in time anyway.

    \b
    Example:
      sow compact
    """
    with session.client() as client:
        with progress(measured=False) as bar:
            bar.add_task("compacting", total=None)
            done = client.compact()
    output.one(
        [
            Fact("bytes_before", done.bytes_before, display.size(done.bytes_before), label="before"),
            Fact("bytes_after", done.bytes_after, display.size(done.bytes_after), label="after"),
        ]
    )


@click.command("accept-clock", short_help="Confirm the clock after a jump.")
@output_option
@click.pass_obj
def accept_clock(session: Session, output: Output) -> None:
    """Confirm that the server's wall clock is right after a jump, so that expiry continues.

    After a jump forward the server stops removing expired records: a wrong clock would remove them all. Check
    `sow status` and the clock first.

    \b
    Example:
      sow accept-clock
    """
    with session.client() as client:
        done = client.accept_clock()
    output.one([moment("before", done.before), moment("after", done.after)])


_LISTED: Final = frozenset(
    {"instance", "state", "failure", "sweep_paused", "topics", "live_records", "overdue_records", "disk_bytes"}
    | {"disk_free_bytes", "cell_problems"}
)
"""The facts of a status in a table of several cells."""


def _in_list(cell: str, facts: Sequence[Fact]) -> list[Fact]:
    """A status among those of other cells. The name of its cell comes first."""
    others = [replace(fact, in_lists=fact.name in _LISTED) for fact in facts if fact.name != "cell"]
    return [Fact("cell", cell, cell), *others]


def _cells(client: Client) -> list[Fact]:
    """The cell of the server, and what is wrong with cells; nothing where there are none, or the server knows none."""
    try:
        found = client.placement()
    except SowError as error:
        if error.reason != "UNIMPLEMENTED":
            raise
        return []
    if not found.cell:
        return []
    problems = [f"{problem.cell} {problem.kind.lower()}" for problem in found.problems]
    shown = ", ".join([*problems, *([f"{display.counted(len(found.strays), 'stray')}"] if found.strays else [])])
    waiting = found.prepared
    told = "" if waiting is None else f"{waiting.version}  ({display.safe(', '.join(waiting.topics))})"
    return [
        Fact("cell", found.cell, f"{found.cell}  (placement {found.version})"),
        Fact("cell_problems", problems, shown or "none", label="cells in trouble"),
        Fact("stray_topics", len(found.strays), ""),
        Fact("placement_waiting", None if waiting is None else waiting.version, told, label="placement waiting"),
    ]


def _facts(status: Status) -> list[Fact]:
    up_micros = max(0, round((status.clock_time - status.ready_time).total_seconds() * 1e6))
    return [
        Fact("instance", status.instance, display.safe(status.instance)),
        Fact("state", status.state, status.state),
        Fact("failure", status.failure or None, display.safe(status.failure) or display.NOT_SET),
        Fact("server_version", status.server_version, display.safe(status.server_version), label="version"),
        Fact("instance_id", status.instance_id, status.instance_id),
        Fact("journal_epoch", status.journal_epoch, status.journal_epoch),
        moment("ready_time", status.ready_time, label="ready since", more=f"  ({display.duration(up_micros)} ago)"),
        moment("clock_time", status.clock_time, label="clock"),
        Fact(
            "sweep_paused",
            status.sweep_paused,
            "paused: the clock has jumped, see sow accept-clock" if status.sweep_paused else "running",
            label="expiry",
        ),
        Fact("last_sequence", status.last_sequence, str(status.last_sequence)),
        Fact("topics", status.topics, display.count(status.topics)),
        Fact("live_records", status.live_records, display.count(status.live_records)),
        Fact("overdue_records", status.overdue_records, display.count(status.overdue_records)),
        Fact("disk_bytes", status.disk_bytes, display.size(status.disk_bytes), label="disk"),
        Fact(
            "disk_free_bytes",
            status.disk_free_bytes,
            display.UNKNOWN if status.disk_free_bytes is None else display.size(status.disk_free_bytes),
            label="disk free",
        ),
    ]
