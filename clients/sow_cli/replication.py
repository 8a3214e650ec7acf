"""`sow replication` and `sow backup`: an instance and the others (rules R, J14)."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

import click

from sow_cli import display
from sow_cli.exits import SERVER_SAID_NO
from sow_cli.output import Fact, Output, moment, note, output_option, progress, telling
from sow_cli.session import Session
from sow_client import (
    BackupMade,
    Client,
    Difference,
    IncomingLink,
    InvalidArgument,
    LinkTopic,
    OutgoingLink,
    PermissionDenied,
    Repaired,
    ReplicationStatus,
    Verified,
)

_LINK_NAMES: Final = (
    "direction",
    "peer",
    "state",
    "mode",
    "lag_sequences",
    "lag_micros",
    "skew_micros",
    "acknowledged_sequence",
    "cursor",
    "head_sequence",
    "applied",
    "superseded",
    "dropped",
    "rows_refused",
    "address",
    "topics_pattern",
    "origin",
    "since_micros",
    "topics",
    "last_error_reason",
    "last_error",
    "last_error_time_micros",
)
_VERIFIED_NAMES: Final = (
    "topic",
    "records",
    "differing",
    "unreadable_here",
    "unreadable_there",
    "left_out",
    "differences",
)
_REPAIRED_NAMES: Final = ("topic", "differing", "sent", "received", "refused", "left_out")
_TOPICS: Final = click.option(
    "--topic", "topics", multiple=True, metavar="TOPIC", help="Only this topic; may be repeated.  [default: all]"
)


@click.group(short_help="Links with other instances: show, compare, repair, change.")
def replication() -> None:
    """Show the links with other instances, compare with one of them, repair differences, and change the links."""


@replication.command(short_help="Show every link.")
@output_option
@click.pass_obj
def status(session: Session, output: Output) -> None:
    """Show every link of the server: `out`, on which it sends, and `in`, on which it receives.

    \b
    Example:
      sow replication status
    """
    with session.client() as client:
        found = client.replication_status()
    links = [*map(_outgoing, found.outgoing), *map(_incoming, found.incoming)]
    output.many(links, names=_LINK_NAMES, nothing="no links with other instances")
    if output.is_table:
        _tell_trouble(found)


@replication.command(short_help="Compare with a peer.")
@click.argument("peer")
@_TOPICS
@click.option(
    "--keys",
    "keys_max",
    type=click.IntRange(0, 1_000_000),
    default=100,
    show_default=True,
    metavar="N",
    help="Differing keys to list of each topic.",
)
@output_option
@click.pass_obj
@click.pass_context
def verify(
    ctx: click.Context, session: Session, output: Output, peer: str, topics: tuple[str, ...], keys_max: int
) -> None:
    """Compare the server with its peer PEER. Exit code 1 when a key differs, or could not be compared.

    A record that changes meanwhile is compared again before it counts. Records that are due are left out. Topics that
    cannot be compared are left out, too, with the reason.

    \b
    Examples:
      sow replication verify ldn-1
      sow replication verify ldn-1 --topic orders --keys 10
    """
    with session.client() as client, telling("comparing") as tell:

        def show(done: Verified) -> None:
            tell(display.safe(done.topic))

        found = client.verify_replication(peer, topics or None, keys_max=keys_max, on_topic=show)
    output.many([_verified(one) for one in found], names=_VERIFIED_NAMES, nothing="no topics to compare")
    if output.is_table:
        differences = [_difference(one, key) for one in found for key in one.differences]
        if differences:
            output.many(differences, names=(), nothing="")
        for one in found:
            _tell_unreadable(one)
    if any(one.differing or one.unreadable_here or one.unreadable_there for one in found):
        ctx.exit(SERVER_SAID_NO)


@replication.command(short_help="Exchange the differences with a peer.")
@click.argument("peer")
@_TOPICS
@output_option
@click.pass_obj
def repair(session: Session, output: Output, peer: str, topics: tuple[str, ...]) -> None:
    """Make the server and its peer PEER send each other the rows that the other lacks. Of each key the newest version
    wins.

    \b
    Example:
      sow replication repair ldn-1 --topic orders
    """
    with session.client() as client, telling("repairing") as tell:

        def show(done: Repaired) -> None:
            tell(display.safe(done.topic))

        done = client.repair_replication(peer, topics or None, on_topic=show)
    output.many([_repaired(one) for one in done], names=_REPAIRED_NAMES, nothing="no topics to repair")


@replication.command("add-peer", short_help="Send to another instance, or accept its links.")
@click.argument("name")
@click.argument("address", default="", metavar="[ADDRESS]")
@click.option("--accept", is_flag=True, help="Without ADDRESS: NAME sends here, and is sent nothing.")
@click.option("--topics", "topics_pattern", default="", metavar="PATTERN", help="Topics to send.  [default: all]")
@click.option(
    "--mode",
    type=click.Choice(["async", "sync"]),
    default="async",
    show_default=True,
    help="sync: REPLICATED waits for it.",
)
@click.option("--filter", "filter_text", default="", metavar="FILTER", help="Send only records that match.")
@click.option("--ca", default="", metavar="PATH", help="Authorities of the peer's certificate: TLS.")
@click.option("--certificate", default="", metavar="PATH", help="The certificate that the server shows.")
@click.option("--key", default="", metavar="PATH", help="The key of that certificate.")
@click.option(
    "--token-file",
    default="",
    metavar="PATH",
    help="A file with the token that the server shows. In front of the command it is the caller's.",
)
@click.option("--replace", is_flag=True, help="Give a peer that was added before new settings; its link continues.")
@output_option
@click.pass_obj
def add_peer(
    session: Session,
    output: Output,
    name: str,
    address: str,
    *,
    accept: bool,
    topics_pattern: str,
    mode: str,
    filter_text: str,
    ca: str,
    certificate: str,
    key: str,
    token_file: str,
    replace: bool,
) -> None:
    """Make the server send to the instance NAME at ADDRESS, and accept its links, from now on and after restarts.

    The other instance has to accept the links of this one: give it the same command with this one's name. Files are on
    the server's machine, with absolute paths. The server needs [replication] in its configuration, at least
    `serve_links = true`.

    \b
    Examples:
      sow replication add-peer ldn-1 ldn:7450 --ca /etc/sow/ca.pem --mode sync
      sow replication add-peer ldn-1 ldn2:7450 --ca /etc/sow/ca.pem --replace
      sow replication add-peer source --accept
    """
    with session.client() as client:
        try:
            client.add_peer(
                name,
                address,
                accept=accept,
                topics_pattern=topics_pattern,
                sync=mode == "sync",
                filter_text=filter_text,
                ca=ca,
                certificate=certificate,
                key=key,
                token_file=token_file,
                replace=replace,
            )
        except InvalidArgument as error:
            raise in_options(error) from error
    output.one([Fact("name", name, display.safe(name), label="added")])


_OPTIONS: Final = {
    "name": "NAME",
    "address": "ADDRESS",
    "topics_pattern": "--topics",
    "filter": "--filter",
    "ca": "--ca",
    "certificate": "--certificate",
    "key": "--key",
    "token_file": "--token-file",
}
_KEY_IN_FRONT: Final = re.compile(r"^(?:the new peer: )?(?:\[replication\.peers\] )?(\w+): ")
_KEY_NAMED: Final = re.compile(r"\b(needs|set|without) (ca|certificate|key|token_file)\b")


def in_options(error: InvalidArgument) -> InvalidArgument:
    """An error about settings of a peer, which the server names as its configuration file does, in the words of the
    command."""
    option = _OPTIONS.get(error.details.get("field", ""))
    if option is None:
        return error
    message = _KEY_IN_FRONT.sub(f"{option}: ", error.message)
    message = _KEY_NAMED.sub(lambda found: f"{found[1]} {_OPTIONS[found[2]]}", message)
    message = re.sub(r' \(peer "[^"]*"\)$', "", message)
    return InvalidArgument(message, reason=error.reason, details=error.details | {"field": option})


@replication.command("remove-peer", short_help="Forget an instance that was added.")
@click.argument("name")
@output_option
@click.pass_obj
def remove_peer(session: Session, output: Output, name: str) -> None:
    """Remove the instance NAME, which was added with add-peer, for good: the server keeps nothing for it any more.

    Where the server cannot use what it has stored of NAME (`disabled` in the status), that is removed, also of an
    instance in the configuration.

    Give the other instance the same command with this one's name. If the instance comes back, it takes the data here
    before its own are taken, and records that it alone has may be dropped; so for a while rather pause it.

    \b
    Example:
      sow replication remove-peer ldn-1
    """
    with session.client() as client:
        client.remove_peer(name)
    output.one([Fact("name", name, display.safe(name), label="removed")])


@replication.command(short_help="Stop sending to a peer for a while.")
@click.argument("name")
@output_option
@click.pass_obj
def pause(session: Session, output: Output, name: str) -> None:
    """Send nothing to the peer NAME until it is resumed, also after a restart. Its changes are kept for it within the
    bounds of [replication]. A sync peer counts as downgraded meanwhile.

    \b
    Example:
      sow replication pause ldn-1
    """
    with session.client() as client:
        client.pause_peer(name)
    output.one([Fact("name", name, display.safe(name), label="paused")])


@replication.command(short_help="Send to a paused peer again.")
@click.argument("name")
@output_option
@click.pass_obj
def resume(session: Session, output: Output, name: str) -> None:
    """Send to the paused peer NAME again: first the changes that it has missed.

    \b
    Example:
      sow replication resume ldn-1
    """
    with session.client() as client:
        was_paused = _is_paused(client, name)
        client.resume_peer(name)
    if was_paused is False:
        note(f"{name} was not paused")
    output.one([Fact("name", name, display.safe(name), label="resumed")])


def _is_paused(client: Client, name: str) -> bool | None:
    """None: there is no such link, or the caller may not see it."""
    try:
        links = client.replication_status().outgoing
    except PermissionDenied:
        return None
    return next((link.state == "paused" for link in links if link.peer == name), None)


@click.command(short_help="Make a backup on the server's machine.")
@click.argument("name")
@output_option
@click.pass_obj
def backup(session: Session, output: Output, name: str) -> None:
    """Make a backup NAME on the server's machine: a directory of that name in [backup] root of its configuration.

    A name is 1 to 100 of [A-Za-z0-9_.-], without a '.' at its beginning, and there must be no backup of that name. The
    server keeps working meanwhile. To restore the backup, copy its directory to the new data directory, and start a
    server on the copy: it becomes a separate instance with new bookmarks.

    \b
    Example:
      sow backup 2030-01-31
    """
    with session.client() as client:
        with progress(measured=False) as bar:
            bar.add_task("making a backup", total=None)
            made = client.backup(name)
    output.one(_backup(made))


def _outgoing(link: OutgoingLink) -> list[Fact]:
    return [
        Fact("direction", "out", "out", label=" "),
        Fact("peer", link.peer, display.safe(link.peer)),
        Fact("state", link.state, display.safe(link.state)),
        Fact("mode", link.mode, display.safe(link.mode)),
        Fact("lag_sequences", link.lag_sequences, display.count(link.lag_sequences), label="behind", right=True),
        Fact("lag_micros", _micros(link.lag), display.duration(_micros(link.lag)), label="lag", right=True),
        _skew(link.skew),
        Fact("acknowledged_sequence", link.acknowledged_sequence, "", in_lists=False),
        Fact("address", link.address, "", in_lists=False),
        Fact("topics_pattern", link.topics_pattern, "", in_lists=False),
        _origin(link),
        moment("since", link.since, in_lists=False),
        *_troubles(link),
    ]


def _incoming(link: IncomingLink) -> list[Fact]:
    behind = max(0, link.head_sequence - link.cursor)
    return [
        Fact("direction", "in", "in", label=" "),
        Fact("peer", link.peer, display.safe(link.peer)),
        Fact("state", link.state, display.safe(link.state)),
        Fact("mode", None, display.NOT_SET),
        Fact("lag_sequences", behind, display.count(behind), label="behind", right=True),
        Fact("lag_micros", None, display.NOT_SET, label="lag", right=True),
        _skew(link.skew),
        Fact("cursor", link.cursor, "", in_lists=False),
        Fact("head_sequence", link.head_sequence, "", in_lists=False),
        Fact("applied", link.applied, "", in_lists=False),
        Fact("superseded", link.superseded, "", in_lists=False),
        Fact("dropped", link.dropped, "", in_lists=False),
        Fact("rows_refused", link.rows_refused, "", in_lists=False),
        _origin(link),
        *_troubles(link),
    ]


def _origin(link: OutgoingLink | IncomingLink) -> Fact:
    return Fact("origin", link.origin or None, display.safe(link.origin) or display.NOT_SET, label="set by")


def _troubles(link: OutgoingLink | IncomingLink) -> list[Fact]:
    topics = [_topic(one) for one in link.topics]
    return [
        Fact("topics", topics or None, "", in_lists=False),
        Fact("last_error_reason", link.last_error_reason or None, _short(link), label="last error"),
        Fact("last_error", link.last_error or None, "", in_lists=False),
        moment("last_error_time", link.last_error_time, in_lists=False),
    ]


def _short(link: OutgoingLink | IncomingLink) -> str:
    return link.last_error_reason or ("see below" if link.last_error else display.NOT_SET)


def _topic(one: LinkTopic) -> dict[str, str]:
    return {"topic": one.topic, "state": one.state} | ({"message": one.message} if one.message else {})


def _tell_trouble(found: ReplicationStatus) -> None:
    """Writes, below the table, the topics that are not up to date, and errors in full."""
    lines: list[str] = []
    for direction, links in (("out", found.outgoing), ("in", found.incoming)):
        for link in links:
            where = f"{direction} {display.safe(link.peer)}"
            for topic in link.topics:
                why = f": {display.safe(topic.message)}" if topic.message else ""
                lines.append(f"{where}: topic {display.safe(topic.topic)} is {display.safe(topic.state)}{why}")
            if link.last_error:
                # No reason: the transport ended it, for example because no server listens.
                reason = f"{link.last_error_reason}: " if link.last_error_reason else ""
                lines.append(f"{where}: {reason}{display.safe(link.last_error)}")
            if isinstance(link, IncomingLink) and link.rows_refused:
                lines.append(
                    f"{where}: {display.counted(link.rows_refused, 'row')} refused; the server's log has the reasons"
                )
    for line in lines:
        click.echo(line)


def _skew(skew: timedelta) -> Fact:
    micros = _micros(skew)
    shown = f"-{display.duration(-micros)}" if micros < 0 else display.duration(micros)
    return Fact("skew_micros", micros, shown, label="skew", right=True)


def _micros(length: timedelta) -> int:
    return length // timedelta(microseconds=1)


def _verified(one: Verified) -> list[Fact]:
    differences: list[dict[str, str | int]] = [
        {"key": key.key, "version_here": key.version_here, "version_there": key.version_there}
        for key in one.differences
    ]
    return [
        Fact("topic", one.topic, display.safe(one.topic)),
        Fact("records", one.records, display.count(one.records), right=True),
        Fact("differing", one.differing, display.count(one.differing), right=True),
        Fact("unreadable_here", one.unreadable_here, display.count(one.unreadable_here), in_lists=False),
        Fact("unreadable_there", one.unreadable_there, display.count(one.unreadable_there), in_lists=False),
        _left_out(one.left_out),
        Fact("differences", differences or None, "", in_lists=False),
    ]


def _tell_unreadable(one: Verified) -> None:
    for where, rows in (("here", one.unreadable_here), ("at the peer", one.unreadable_there)):
        if rows:
            click.echo(
                f"{display.safe(one.topic)}: {display.count(rows)} rows {where} could not be compared, as their key is "
                "empty or not UTF-8; see `sow topic check`"
            )


def _difference(one: Verified, key: Difference) -> list[Fact]:
    return [
        Fact("topic", one.topic, display.safe(one.topic)),
        Fact("key", key.key, display.safe(key.key)),
        Fact("version_here", key.version_here, _version(key.version_here), label="here", right=True),
        Fact("version_there", key.version_there, _version(key.version_there), label="there", right=True),
    ]


def _version(version: int) -> str:
    return str(version) if version else display.NOT_SET


def _repaired(one: Repaired) -> list[Fact]:
    return [
        Fact("topic", one.topic, display.safe(one.topic)),
        Fact("differing", one.differing, display.count(one.differing), right=True),
        Fact("sent", one.sent, display.count(one.sent), right=True),
        Fact("received", one.received, display.count(one.received), right=True),
        Fact("refused", one.refused, display.count(one.refused), right=True),
        _left_out(one.left_out),
    ]


def _left_out(why: str) -> Fact:
    return Fact("left_out", why or None, display.safe(why) or display.NOT_SET)


def _backup(made: BackupMade) -> list[Fact]:
    return [
        Fact("name", made.name, display.safe(made.name)),
        Fact("sequence", made.sequence, str(made.sequence)),
        Fact("bytes", made.bytes, display.size(made.bytes), label="size"),
    ]
