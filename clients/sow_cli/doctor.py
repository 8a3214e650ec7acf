"""`sow doctor`: what is wrong between this machine and the server, and on the server, and what to do about it.

[1]  Nothing is changed, and nothing is published.
[2]  A check that the caller may not make, that an older server cannot answer, or for which an address of gRPC such as
     `unix:…` has no host, is `skipped`. It is no fault.
[3]  A fault of the connection ends the command, as no other check has an answer then.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

import click

from sow.durations import parse_micros
from sow.version import __version__
from sow_cli import display, joined
from sow_cli.doctor_cells import judged_cells
from sow_cli.exits import NOT_REACHABLE, SERVER_SAID_NO
from sow_cli.findings import Finding, Level
from sow_cli.output import Fact, Output, note, output_option
from sow_cli.session import Session, host_and_port
from sow_client import (
    Client,
    Durable,
    Identity,
    Instance,
    ReplicationStatus,
    SowError,
    Status,
    Tls,
    Topic,
)

T = TypeVar("T")
_NAMES: Final = ("check", "cell", "level", "found", "advice")
_LEVELS: Final[tuple[Level, ...]] = ("ok", "warning", "fault", "skipped")
_NOT_ANSWERED: Final = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED"})

SKEW_MICROS_WARNED: Final = 1_000_000
SKEW_MICROS_MAX: Final = 60_000_000
"""Beyond it `--expire-at`, `--from TIME` and every relative time that is shown here are of no use."""
CALL_MICROS_WARNED: Final = 100_000
CERTIFICATE_DAYS_WARNED: Final = 30
DISK_FREE_SHARE_MIN: Final = 1.0
"""A compaction may need as much again as there are data."""
OVERDUE_MIN: Final = 10_000
BACKLOG_SHARE_WARNED: Final = 0.8
BACKLOG_AGE_WARNED: Final = timedelta(days=1)
PIN_IDLE_TOLD: Final = timedelta(minutes=5)
"""The connector of Spark renews its pins each minute, others at least as often as their lease needs it."""
LINK_LAG_WARNED: Final = timedelta(minutes=1)
_CALLS: Final = 5
_TLS_SECONDS: Final = 3.0
_CELLS_AT_A_TIME: Final = 64


@click.command(short_help="Find out what is wrong, and what to do.")
@joined.here_option
@output_option
@click.pass_obj
def doctor(session: Session, output: Output, here: bool) -> None:
    """Check the connection, TLS, the clocks, the disk, limits, versions and known mistakes of settings. It changes
    nothing. Where there are several cells, it checks each one, and names it.

    Each check is ok, a warning or a fault, with advice; what the caller may not see is skipped: server, clock and disk
    need the action observe. The exit code is 1 when there is a fault, and 3 when a server cannot be reached.

    \b
    A check is ok unless:
      connection   an address does not answer, or its instance does not serve
      tls          another machine is spoken to without TLS; the certificate does
                   not hold, or ends within 30 days
      speed        a short call takes more than 100 ms
      versions     command and server are of different versions
      identity     others reach a server without access file; the credential ends
                   within 30 days
      server       writes have stopped
      clock        the two clocks are certainly more than a second apart; a minute
                   is a fault
      expiry       a jump of the clock has paused it; more than a tenth of the
                   records are overdue
      disk         less is free than the data take
      topics       expiration is disabled; a journal has no bound in bytes; a
                   dead-letter topic does not exist; a backlog has used 80 % of
                   its quota; an index or a view is being built
      durables     one has not acknowledged for a day; a pin was not renewed for
                   half of its lease, so its reader is dead
      replication  a link is paused, refused, down, or more than a minute behind;
                   a source is away
      cells        a cell has another placement, or does not answer; a topic is
                   left here that lives in another cell

    \b
    Examples:
      sow doctor
      sow --server a:7450,b:7450 doctor --format json
    """
    findings = list(examined(session, here=here))
    several = any(one.cell for one in findings)
    names = [name for name in _NAMES if several or name != "cell"]
    output.many([_facts(one, several=several) for one in findings], names=names, nothing="")
    counts = {level: sum(one.level == level for one in findings) for level in _LEVELS}
    if output.is_table:
        warnings, faults = display.counted(counts["warning"], "warning"), display.counted(counts["fault"], "fault")
        note(f"{counts['ok']} ok, {warnings}, {faults}, {counts['skipped']} skipped")
    if any(one.level == "fault" and one.check == "connection" for one in findings):
        click.get_current_context().exit(NOT_REACHABLE)
    if counts["fault"]:
        click.get_current_context().exit(SERVER_SAID_NO)


def _facts(finding: Finding, *, several: bool) -> list[Fact]:
    return [
        Fact("check", finding.check, finding.check),
        *([Fact("cell", finding.cell or None, finding.cell)] if several else []),
        Fact("level", finding.level, finding.level),
        Fact("found", finding.found, display.safe(finding.found)),
        Fact("advice", finding.advice or None, display.safe(finding.advice), label="what to do"),
    ]


def examined(session: Session, *, here: bool = False) -> Iterator[Finding]:
    """All checks, in order ([3]); those of the other cells come last, unless it is `here` alone."""
    for address in session.server.split(","):
        yield from _connection(replace(session, server=address.strip()))
    yield from tls_of(session)
    with session.client() as client:
        try:
            instance = client.describe_instance()
        except SowError:
            return  # the connections have told why
        yield speed(_call_micros(client))
        yield versions(instance)
        yield from _asked("identity", client.whoami, lambda found: [identity(found, session)])
        cells = client.in_each_cell(lambda one: one)
        own = next((cell for cell, one in cells.items() if one is client.here), "")
        several = len(cells) > 1 and not here
        addresses = {cell: one.servers_of("") for cell, one in cells.items() if not isinstance(one, SowError)}
        for finding in _of_server(client.here, session, addresses):
            yield replace(finding, cell=own) if several else finding
        others = [(cell, one) for cell, one in cells.items() if cell != own] if several else []
        yield from _of_others(others, session, addresses)


def _of_others(
    others: Sequence[tuple[str, Client | SowError]], session: Session, addresses: Mapping[str, str]
) -> Iterator[Finding]:
    """The checks of the other cells, in their order. They are made at the same time, as each may hang."""
    if not others:
        return
    from concurrent.futures import ThreadPoolExecutor  # one server needs none

    def examine(place: tuple[str, Client | SowError]) -> list[Finding]:
        cell, one = place
        return [replace(finding, cell=cell) for finding in _of_other(one, session, addresses)]

    with ThreadPoolExecutor(_CELLS_AT_A_TIME) as threads:
        for findings in threads.map(examine, others):
            yield from findings


def _of_other(client: Client | SowError, session: Session, addresses: Mapping[str, str]) -> Iterator[Finding]:
    """The checks of a cell that the server has named (rule C11): first whether each of its addresses answers."""
    if isinstance(client, SowError):
        yield Finding("connection", "fault", f"{client.reason}: {client.message}")
        return
    there = replace(session, server=client.servers_of(""))
    findings: list[Finding] = []
    for address in there.server.split(","):
        findings += _connection(replace(there, server=address), "start it, or correct its address in the placement")
    yield from findings
    yield from tls_of(there)
    if any(one.level != "fault" for one in findings):
        yield from _of_server(client, there, addresses)


def _of_server(client: Client, session: Session, addresses: Mapping[str, str]) -> Iterator[Finding]:
    """The checks of a server of a cell. `addresses`: those of the cells, as the server that the user has named tells
    them (rule C11)."""
    yield from _asked("server", lambda: _clocked(client), lambda found: judged_status(*found))
    yield from _asked("topics", lambda: client.topics(with_statistics=True), judged_topics)
    yield from _asked("durables", lambda: client.durables(with_figures=True), judged_durables)
    yield from _asked("replication", client.replication_status, judged_links)
    yield from _asked("cells", client.placement, lambda found: judged_cells(found, session, addresses))


def _asked(check: str, ask: Callable[[], T], judge: Callable[[T], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings about an answer ([2])."""
    try:
        answer = ask()
    except SowError as error:
        level: Level = "skipped" if error.reason in _NOT_ANSWERED else "fault"
        yield Finding(check, level, f"{error.reason}: {error.message}")
        return
    yield from judge(answer)


# ---- the connection ----


_NAME_ANOTHER: Final = "start the server, or name another one with --server or SOW_SERVER"


def _connection(session: Session, unreachable: str = _NAME_ANOTHER) -> Iterator[Finding]:
    """`unreachable`: the advice if it does not answer."""
    try:
        with session.client() as client:
            found = client.describe_instance()
    except SowError as error:
        advice = session.hint(error) or (unreachable if error.reason == "UNREACHABLE" else "")
        yield Finding("connection", "fault", f"{session.server}: {error.reason}: {error.message}", advice)
        return
    if not found.serving:
        yield Finding("connection", "warning", f"{found.shown} answers, and does not serve", "see its log")
        return
    yield Finding("connection", "ok", f"{found.shown} serves")


def _is_local(address: str) -> bool:
    return address.strip().startswith(("127.", "localhost", "[::1]", "unix:"))


def tls_of(session: Session) -> Iterator[Finding]:
    """Checks that the connections are encrypted, and how long the certificates last."""
    tls = session.tls
    for address in map(str.strip, session.server.split(",")):
        if tls is None:
            if _is_local(address):
                yield Finding("tls", "ok", f"{address} is on this machine, and is not encrypted")
            else:
                yield Finding(
                    "tls", "warning", f"{address} is not encrypted", "give the server a certificate, and use --tls-ca"
                )
            continue
        place = host_and_port(address)
        if place is None:
            yield Finding("tls", "skipped", f"{address} is an address of gRPC: its certificate is not looked at")
            continue
        try:
            ends = _certificate_end(*place, tls)
        except (OSError, ValueError) as error:
            yield Finding("tls", "fault", f"{address}: {error}", "see --tls-ca, --tls-server-name, --tls-cert")
            continue
        yield certificate(address, ends, datetime.now(UTC))


def _certificate_end(host: str, port: int, tls: Tls) -> datetime:
    """When the server's certificate ends. Raises OSError, also for a certificate that does not hold."""
    context = ssl.create_default_context(cafile=None if tls.ca is None else str(tls.ca))
    context.set_alpn_protocols(["h2"])
    if tls.certificate is not None and tls.key is not None:
        context.load_cert_chain(str(tls.certificate), str(tls.key))
    with (
        socket.create_connection((host, port), _TLS_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=tls.server_name or host) as wrapped,
    ):
        shown = wrapped.getpeercert() or {}
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), UTC)


def certificate(address: str, ends: datetime, now: datetime) -> Finding:
    """Checks how long the server's certificate lasts."""
    days = (ends - now).days
    if days < CERTIFICATE_DAYS_WARNED:
        found = f"the certificate of {address} ends in {display.counted(days, 'day')}"
        return Finding("tls", "warning", found, "renew it; no restart is needed")
    return Finding("tls", "ok", f"the certificate of {address} ends {ends:%Y-%m-%d}")


def _call_micros(client: Client) -> int:
    """The time of a short call: the least of several."""
    least = None
    for _ in range(_CALLS):
        begin = time.perf_counter()
        client.describe_instance()
        took = time.perf_counter() - begin
        least = took if least is None else min(least, took)
    return round((least or 0) * 1e6)


def speed(call_micros: int) -> Finding:
    """Checks how long a short call takes."""
    found = f"a short call takes {display.duration(call_micros)}"
    if call_micros > CALL_MICROS_WARNED:
        return Finding("speed", "warning", found, "use an instance nearby, or publish in batches and streams")
    return Finding("speed", "ok", found)


def versions(instance: Instance) -> Finding:
    """Checks that the command and the server are of one version."""
    theirs = instance.server_version or "an older version"
    if theirs == __version__:
        return Finding("versions", "ok", f"command and server are of version {__version__}")
    return Finding(
        "versions",
        "warning",
        f"the command is {__version__}, the server is {theirs} (contract {instance.contract})",
        "bring both to one version: the older one lacks some options",
    )


def identity(found: Identity, session: Session) -> Finding:
    """Checks who the caller is, how long the credential lasts, and its limits."""
    if not found.name:
        if all(map(_is_local, session.server.split(","))):
            return Finding("identity", "ok", "the server has no access file: everybody may do everything")
        return Finding(
            "identity",
            "warning",
            "the server has no access file: everybody who reaches it may do everything",
            "see docs/security.md, which begins with ten lines that set it up",
        )
    limits = ", ".join(f"{name} {value:,}" for name, value in found.limits.items()) or "none"
    shown = f"{found.name} by {found.credential}; limits: {limits}"
    if found.expires is not None and found.expires - datetime.now(UTC) < timedelta(days=CERTIFICATE_DAYS_WARNED):
        ends = f"{shown}; it ends {found.expires:%Y-%m-%d %H:%M}Z"
        return Finding("identity", "warning", ends, "renew the credential")
    return Finding("identity", "ok", shown)


# ---- the server ----


def _clocked(client: Client) -> tuple[Status, int, int]:
    """The status, how far the server's clock is ahead of this machine's, and by how much that may be wrong."""
    begin = time.time_ns() // 1_000
    status = client.status()
    end = time.time_ns() // 1_000
    theirs = round(status.clock_time.timestamp() * 1e6)
    return status, theirs - (begin + end) // 2, (end - begin) // 2


def judged_status(status: Status, skew_micros: int, exact_to_micros: int) -> Iterator[Finding]:
    """The state of the server: whether it writes, its clock, its disk, and expiry."""
    if status.state != "serving":
        yield Finding(
            "server",
            "fault",
            f"the state is {status.state}: {status.failure}",
            "nothing is written any more: free or mend the disk, then restart the server",
        )
    else:
        there_is = f"{display.records(status.live_records)} in {display.counted(status.topics, 'topic')}"
        yield Finding("server", "ok", f"serving {there_is}")
    yield clock(skew_micros, exact_to_micros)
    if status.sweep_paused:
        yield Finding(
            "expiry",
            "fault",
            "the clock of the server has jumped, so no record is removed",
            "set the clock of the machine right, or confirm it with `sow accept-clock`",
        )
    elif status.overdue_records > max(OVERDUE_MIN, status.live_records // 10):
        yield Finding(
            "expiry",
            "warning",
            f"{display.records(status.overdue_records)} have expired and are still on disk (no read returns them)",
            "wait; if it does not fall, the disk or the processor of the server is too slow",
        )
    else:
        yield Finding("expiry", "ok", f"{display.records(status.overdue_records)} expired and not yet removed")
    yield disk(status.disk_bytes, status.disk_free_bytes)


def clock(skew_micros: int, exact_to_micros: int) -> Finding:
    """Checks how far the two clocks are apart. Lifetimes are the server's alone (rule L5)."""
    ahead = "ahead of" if skew_micros >= 0 else "behind"
    certain = max(0, abs(skew_micros) - exact_to_micros)
    found = f"the server's clock is {display.duration(abs(skew_micros))} {ahead} this machine's"
    if certain > SKEW_MICROS_MAX:
        return Finding("clock", "fault", found, "set both clocks by NTP: expire times of other machines are wrong")
    if certain > SKEW_MICROS_WARNED:
        return Finding("clock", "warning", found, "set both clocks by NTP; lifetimes (--ttl) are right all the same")
    return Finding("clock", "ok", found)


def disk(used_bytes: int, free_bytes: int | None) -> Finding:
    """Checks that the disk has room."""
    if free_bytes is None:
        return Finding(
            "disk", "skipped", f"{display.size(used_bytes)} are used; an older server does not tell the rest"
        )
    found = f"{display.size(used_bytes)} are used, {display.size(free_bytes)} are free"
    if free_bytes < used_bytes * DISK_FREE_SHARE_MIN:
        return Finding(
            "disk", "warning", found, "a compaction may need as much again as the data: add disk, or bound retention"
        )
    return Finding("disk", "ok", found)


# ---- topics, durables, links ----


def judged_topics(topics: Sequence[Topic]) -> Iterator[Finding]:
    """Known mistakes of settings."""
    names = {topic.name for topic in topics}
    found = 0
    for topic in topics:
        for finding in _judged_topic(topic, names):
            found += 1
            yield finding
    if not found:
        yield Finding("topics", "ok", f"no known mistake in the settings of {display.counted(len(topics), 'topic')}")


def _judged_topic(topic: Topic, names: set[str]) -> Iterator[Finding]:
    name, settings, figures = topic.name, topic.settings, topic.statistics
    if settings.expiration == "disabled" and not name.startswith("_") and not topic.is_view:
        yield Finding(
            "topics",
            "warning",
            f"{name} has expiration disabled: a record with a lifetime never expires there",
            f"sow topic alter {name} --expiration enabled"
            if not topic.set_in_config
            else f'expiration = "enabled" in [topics.{name}] of the configuration',
        )
    if settings.journal and settings.retain_bytes == -1 and settings.max_bytes in (None, -1):
        yield Finding(
            "topics",
            "warning",
            f"the journal of {name} has no bound in bytes",
            f"sow retention set {name} --bytes 1GiB, or --max-bytes",
        )
    if settings.dead_letter and settings.dead_letter not in names:
        yield Finding(
            "topics",
            "warning",
            f"{name} has the dead-letter topic {settings.dead_letter}, which does not exist",
            f"sow topic create {settings.dead_letter}; until then copies are "
            + ("dropped" if settings.on_missing == "drop" else "kept in _undelivered"),
        )
    if figures is None:
        return
    if name == "_undelivered" and figures.live_records:
        yield Finding(
            "topics",
            "warning",
            f"{display.records(figures.live_records)} wait in _undelivered for a dead-letter topic",
            "create the topics that their keys begin with, or delete the records",
        )
    quota = settings.backlog_quota_bytes
    if isinstance(quota, int) and quota > 0 and figures.backlog_bytes > quota * BACKLOG_SHARE_WARNED:
        yield Finding(
            "topics",
            "warning",
            f"{name}: {figures.slowest_durable} has used {figures.backlog_bytes * 100 // quota} % of the backlog quota",
            f"start its consumer, or `sow durable clear-backlog {name} {figures.slowest_durable}`",
        )
    if topic.view_status is not None and not topic.view_status.complete:
        yield Finding(
            "topics",
            "warning",
            f"{name}: the view is being built, and is not read before it is complete "
            f"({display.records(topic.view_status.records_read)} of its source read)",
            f"wait for it; `sow view describe {name}` tells how far it is",
        )
    building = [index.path for index in topic.indexes if not index.complete]
    if building:
        yield Finding("topics", "warning", f"{name}: the index on {', '.join(building)} is being built", "wait for it")


def judged_durables(durables: Sequence[Durable], now: datetime | None = None) -> Iterator[Finding]:
    """Consumers that do not keep up, and pins whose readers have stopped. `now`: None for that of this machine."""
    late = 0
    now = now or datetime.now(UTC)
    for one in durables:
        if one.pin and now - one.last_use_time > PIN_IDLE_TOLD:
            late += 1
            yield _idle_pin(one, now)
            continue
        age = None if one.figures is None else one.figures.oldest_unacknowledged_age
        if age is not None and age > BACKLOG_AGE_WARNED:
            late += 1
            since = display.duration(age // timedelta(microseconds=1))
            whose = f"; it is a pin of {one.reader or one.owner or 'a reader of ranges'}" if one.pin else ""
            start = f"start its {'reader' if one.pin else 'consumer'}"
            yield Finding(
                "durables",
                "warning",
                f"{one.topic}/{one.name} has not acknowledged for {since}{whose}",
                f"{start}, or `sow durable delete {one.topic} {one.name}`: it holds the journal",
            )
    if not late:
        yield Finding("durables", "ok", f"{display.counted(len(durables), 'durable subscription')}, none late")


def _idle_pin(pin: Durable, now: datetime) -> Finding:
    """The finding about a pin that nobody renews: whose it is, what it holds back, and until when (rule J18)."""
    idle = now - pin.last_use_time
    held = "what it holds back is not told"
    if (figures := pin.figures) is not None:
        entries, size = figures.unacknowledged_entries, display.size(figures.unacknowledged_bytes)
        noun = "entry" if entries == 1 else "entries"
        held = f"it holds back {entries:,} {noun} ({size})" if entries else "it holds back nothing so far"
    told = (
        f"{pin.topic}/{pin.name} was not renewed for {_shown(idle)}; it is a pin of "
        f"{pin.reader or pin.owner or 'a reader of ranges'}; {held}"
    )
    level: Level = "warning"
    if isinstance(lease := pin.settings.idle_ttl, str):
        whole = timedelta(microseconds=parse_micros(lease))
        level = "warning" if idle > whole / 2 else "ok"
        told += f"; it ends in {_shown(max(whole - idle, timedelta()))}"
    drop = f"`sow durable delete {pin.topic} {pin.name}`"
    advice = f"its reader has stopped or is dead: start it, or {drop}"
    if level == "ok":
        advice = f"if its reader is not to go on: {drop}"
    return Finding("durables", level, told, advice)


def _shown(length: timedelta) -> str:
    return display.duration(length // timedelta(microseconds=1))


def judged_links(status: ReplicationStatus) -> Iterator[Finding]:
    """Links that do not send."""
    for link in status.outgoing:
        error = _told(link.last_error_reason, link.last_error)
        if link.state == "paused":
            yield Finding("replication", "warning", f"{link.peer} is paused", f"sow replication resume {link.peer}")
        elif link.state not in ("streaming", "seeding"):
            yield Finding(
                "replication", "fault", f"{link.peer} is {link.state}{error}", "see docs/replication.md for the reason"
            )
        elif link.lag > LINK_LAG_WARNED:
            lag = display.duration(link.lag // timedelta(microseconds=1))
            yield Finding(
                "replication", "warning", f"{link.peer} is {lag} behind", "look at the peer, or at the network"
            )
        elif link.mode == "downgraded":
            yield Finding(
                "replication", "warning", f"{link.peer} is downgraded", "REPLICATED publishes do not wait for it now"
            )
        else:
            yield Finding("replication", "ok", f"sends to {link.peer}")
    for source in status.incoming:
        error = _told(source.last_error_reason, source.last_error)
        if source.state == "disabled":
            advice = (
                f"sow replication remove-peer {source.peer}, which removes what is stored of it; then it takes the "
                "data here before its own are taken"
            )
            yield Finding("replication", "fault", f"{source.peer} is disabled{error}", advice)
            continue
        level: Level = "warning" if source.state == "away" or source.last_error else "ok"
        advice = "ask it: `sow --server ITS_ADDRESS doctor`" if level == "warning" else ""
        yield Finding("replication", level, f"{source.peer} is {source.state}{error}", advice)
    if not status.outgoing and not status.incoming:
        yield Finding("replication", "ok", "there are no links")


def _told(reason: str, error: str) -> str:
    return "".join([f": {part}" for part in (reason, error) if part])
