"""`sow cells`: the cells that topics live in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, Generic, NamedTuple, TypeVar

import click

from sow.durations import parse_micros
from sow_cli import arguments, display
from sow_cli.exits import NOT_REACHABLE, SERVER_SAID_NO, Refused, is_unanswered
from sow_cli.output import Fact, Output, moment, note, output_option
from sow_cli.session import Session
from sow_client import CellProblem, Client, InvalidArgument, Placement, PlacementReloaded, Policy, SowError
from sow_client._cells import is_address

T = TypeVar("T")

_WAITS_SECONDS: Final = 3.0
"""How long the other servers of a placement may take to be reached."""
_ASKED_AT_A_TIME: Final = 16
_NAMES = ("cell", "servers", "state", "since", "topics", "default", "message")
NO_CELLS = "this server has no placement: all topics live here"


@click.group(short_help="Show in which cells topics live.")
def cells() -> None:
    """The cells of a name space: servers that share its topics."""


@cells.command(name="list", short_help="Show the cells, and which topics live there.")
@output_option
@click.pass_obj
def list_cells(session: Session, output: Output) -> None:
    """Show the cells of a name space: their addresses, their state, and the patterns of their topics.

    State and patterns need the action observe. `differs` is a cell with another placement, or with none; `unreachable`
    one of which no address answers; `strays` one that has topics of this one. The server asks every 10 s, and sooner
    while there is trouble. In JSON and CSV `default` marks the cell of all topics that no pattern names.

    \b
    Example:
      sow cells list
    """
    with session.client() as client:
        found = client.placement()
    if not found.cell:
        note(NO_CELLS)
    output.many(list(_rows(found)), names=_NAMES, nothing="")
    if found.prepared is not None:
        waiting = found.prepared
        told = f": {waiting.message}" if waiting.message else ""
        note(f"version {waiting.version} of the placement waits here, for {', '.join(waiting.topics)}{told}")
    if output.is_table and found.cell:
        note(f"this server is of the cell {found.cell}; the placement has version {found.version}")
        if found.strays:
            live = "lives" if len(found.strays) == 1 else "live"
            note(f"{display.counted(len(found.strays), 'topic')} here {live} elsewhere: sow doctor")


def _rows(found: Placement) -> Iterator[Sequence[Fact]]:
    problems = {problem.cell: problem for problem in found.problems}
    for cell, servers in found.cells.items():
        problem = problems.get(cell)
        topics = [placed.pattern for placed in found.topics if placed.cell == cell]
        shown = [*topics, *(["all others"] if found.default == cell else [])]
        yield [
            Fact("cell", cell, cell),
            Fact("servers", list(servers), ", ".join(servers)),
            *_state(problem, asked=bool(found.default)),
            Fact("topics", topics, display.safe(", ".join(shown))),
            Fact("default", found.default == cell if found.default else None, "", in_lists=False),
            Fact("message", None if problem is None else problem.message, _message(problem)),
        ]


def _state(problem: CellProblem | None, *, asked: bool) -> list[Fact]:
    """The state and its begin; without `asked` the caller may not know them."""
    if problem is None:
        return [Fact("state", "ok" if asked else None, "ok" if asked else ""), Fact("since", None, "")]
    state = problem.kind.lower()
    return [Fact("state", state, state), moment("since", problem.since)]


def _message(problem: CellProblem | None) -> str:
    return "" if problem is None else display.safe(problem.message)


@cells.command(short_help="Tell in which cell a topic lives.")
@click.argument("topic")
@output_option
@click.pass_context
def where(context: click.Context, output: Output, topic: str) -> None:
    """Tell in which cell TOPIC lives, whether or not it exists. The exit code is 1 if the caller may not know it.

    \b
    Example:
      sow cells where orders
    """
    session: Session = context.obj
    with session.client() as client:
        found = client.placement(topic)
    if not found.cell:
        note(NO_CELLS)
    servers = list(found.cells.get(found.topic_cell, ()))
    output.one(
        [
            Fact("topic", topic, display.safe(topic)),
            Fact("cell", found.topic_cell or None, found.topic_cell),
            Fact("servers", servers, ", ".join(servers)),
            Fact("here", found.topic_cell == found.cell, "yes" if found.topic_cell == found.cell else "no"),
        ]
    )
    if found.cell and not found.topic_cell:
        context.exit(1)


@cells.command(short_help="Read the placement file again.")
@click.option("--all", "everywhere", is_flag=True, help="At every server of every cell, and at this one first.")
@output_option
@click.pass_context
def reload(context: click.Context, output: Output, everywhere: bool) -> None:
    """Make the server read its placement file again; of several addresses, only the one in use does. Nothing changes if
    the file has a fault, or another content without a higher version. Streams on topics that have gone end.

    Servers that have another placement then are named. With --all each server that the placement of this one names
    reads its own file, the servers of this cell first: so ask the cell that topics leave. Servers with other policies
    are named: a cell that is new has none. The exit code is 1 if one of
    them refuses or has another placement then, and 3 if one only does not answer.

    \b
    Examples:
      sow cells reload
      sow --server 10.0.0.1:7450 cells reload --all
    """
    session: Session = context.obj
    with session.client() as client:
        done = client.reload_placement()
        found = client.placement()
        used = client.describe_instance().address if everywhere else ""
        policies = _policies(client) if everywhere else None
    if not everywhere:
        output.one(
            [
                Fact("version", done.version, str(done.version)),
                Fact("changed", done.changed, "yes" if done.changed else "no"),
                Fact("ended_calls", done.ended_calls, display.count(done.ended_calls)),
                Fact("digest", done.digest, done.digest),
            ]
        )
        _tell_others(session, found)
        return
    here = [(found.cell, server) for server in found.cells[found.cell] if server != used]
    others = [(cell, server) for cell, servers in found.cells.items() if cell != found.cell for server in servers]
    read = [_Answer(found.cell, used, done)] if used in found.cells[found.cell] else []
    read += _at_each(session, here, Client.reload_placement)
    read += _at_each(session, others, Client.reload_placement)
    output.many([_reloaded(one, done) for one in read], names=_RELOADED, nothing="")
    if policies is not None:
        _tell_policies(session, policies, [one for one in read if not isinstance(one.answer, SowError)])
    answers = [one.answer for one in read]
    if any(isinstance(answer, PlacementReloaded) and answer.digest != done.digest for answer in answers):
        context.exit(SERVER_SAID_NO)
    faults = [answer for answer in answers if isinstance(answer, SowError)]
    if faults:
        context.exit(NOT_REACHABLE if all(map(is_unanswered, faults)) else SERVER_SAID_NO)


_RELOADED = ("cell", "server", "version", "changed", "ended_calls", "message")


class _Answer(NamedTuple, Generic[T]):
    cell: str
    server: str
    answer: T | SowError


def _at_each(session: Session, servers: Sequence[tuple[str, str]], ask: Callable[[Client], T]) -> list[_Answer[T]]:
    """The answers of servers that the placement names, in order. Each gets the credentials of the caller (rule C11)."""

    def one(place: tuple[str, str]) -> _Answer[T]:
        cell, server = place
        if not is_address(server):
            return _Answer(cell, server, InvalidArgument(f"{server!r} is not HOST:PORT", reason="INVALID_ARGUMENT"))
        try:
            with replace(session, server=server, waits=_WAITS_SECONDS).client() as client:
                return _Answer(cell, server, ask(client))
        except SowError as error:
            return _Answer(cell, server, error)
        except click.UsageError as error:  # such as a token that may not go there in plain text
            return _Answer(cell, server, InvalidArgument(error.message, reason="INVALID_ARGUMENT"))

    from concurrent.futures import ThreadPoolExecutor  # the other commands need none

    with ThreadPoolExecutor(_ASKED_AT_A_TIME) as threads:
        return list(threads.map(one, servers))


def _tell_others(session: Session, found: Placement) -> None:
    """Tells which servers have another placement than the one that was reloaded."""
    servers = [(cell, server) for cell, servers in found.cells.items() for server in servers]
    others = [
        f"{one.cell} at {one.server} {told}"
        for one in _at_each(session, servers, Client.placement)
        if (told := _difference(one.answer, found))
    ]
    if others:
        note("only one server has read its file: " + "; ".join(map(display.safe, others)))
        note(f"to reload them all: {session.command} cells reload --all")


def _policies(client: Client) -> list[Policy] | None:
    """The policies of one server; None: the caller may not list them."""
    try:
        return client.here.policies()
    except SowError:
        return None


def _tell_policies(session: Session, wanted: Sequence[Policy], answered: Sequence[_Answer[PlacementReloaded]]) -> None:
    """Tells which servers have other policies (rule C19): one whose cell is new has none."""
    from sow_cli.policies import policies_that_differ  # the other commands need it not

    for one in _at_each(session, [(one.cell, one.server) for one in answered], _policies):
        if isinstance(one.answer, list) and (names := policies_that_differ(wanted, one.answer)):
            shown = ", ".join(map(display.safe, names))
            note(f"{one.cell} at {one.server} has other policies than this server, or lacks them: {shown}")
            note("a policy counts in a cell that has it: set each again, which reaches all cells (sow policy set)")


def _difference(answer: Placement | PlacementReloaded | SowError, wanted: Placement | PlacementReloaded) -> str:
    """The difference between the placement of a server and the one that it ought to have; "": there is none."""
    if isinstance(answer, SowError):
        return f"does not say ({answer.reason}: {answer.message})"
    if answer.digest == wanted.digest:
        return ""
    if not answer.digest:
        return "has no placement"
    if answer.version == wanted.version:
        return f"has another content of version {answer.version}"
    return f"has version {answer.version}"


def _reloaded(one: _Answer[PlacementReloaded], wanted: PlacementReloaded) -> list[Fact]:
    done = None if isinstance(one.answer, SowError) else one.answer
    difference = _difference(one.answer, wanted)
    return [
        Fact("cell", one.cell, one.cell),
        Fact("server", one.server, one.server),
        Fact("version", None if done is None else done.version, "" if done is None else str(done.version)),
        Fact(
            "changed", None if done is None else done.changed, "" if done is None else "yes" if done.changed else "no"
        ),
        Fact(
            "ended_calls",
            None if done is None else done.ended_calls,
            "" if done is None else display.count(done.ended_calls),
        ),
        Fact("message", difference or None, display.safe(difference)),
    ]


@cells.command(short_help="Move topics with their records to another cell.")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--to", "cell", required=True, metavar="CELL", help="The cell to which they go.")
@click.option("--keep", is_flag=True, help="Leave the copies where the topics have been.")
@click.option(
    "--links-before",
    type=arguments.duration,
    default="1s",
    show_default=True,
    metavar="DURATION",
    help="How long the links are complete before the switch: what readers get in this time lets them go on.",
)
@click.option(
    "--links-for",
    type=arguments.duration,
    default="5s",
    show_default=True,
    metavar="DURATION",
    help="How long the links stay after the switch, for readers that come from the other cell with a bookmark.",
)
@click.option("--link-ca", default="", metavar="PATH", help="Authorities of the other cell's certificate: TLS.")
@click.option("--link-certificate", default="", metavar="PATH", help="The certificate that a server shows the other.")
@click.option("--link-key", default="", metavar="PATH", help="The key of that certificate.")
@click.option("--link-token-file", default="", metavar="PATH", help="A file with the token of the links.")
@click.option(
    "--link-back-token-file",
    default="",
    metavar="PATH",
    help="The one of the links from the new cell, where they have another token.",
)
@click.option("--abort", is_flag=True, help="Undo a move that has not switched yet.")
@click.option("--accept-loss", is_flag=True, help="With --abort: also where the other cell is lost for good.")
@output_option
@click.pass_obj
def move(
    session: Session,
    output: Output,
    topics: tuple[str, ...],
    cell: str,
    *,
    keep: bool,
    links_before: str,
    links_for: str,
    link_ca: str,
    link_certificate: str,
    link_key: str,
    link_token_file: str,
    link_back_token_file: str,
    abort: bool,
    accept_loss: bool,
) -> None:
    """Move topics with their records to another cell, while programs use them.

    The topics are replicated to the other cell, and the placement is switched once it has everything. For a moment no
    cell takes them, and programs wait. Views move with their source, and dead letters with their topic. Ended at any
    point, the same command goes on. It needs the permission operator in all cells, and servers with [replication]
    `serve_links = true`. The paths are on the machines of the servers.

    \b
    Examples:
      sow cells move orders --to b
      sow cells move orders --to b --abort
    """
    from sow_cli.moving import LinkFiles, Mover  # only this command needs it

    if accept_loss and not abort:
        raise click.UsageError("--accept-loss goes with --abort")
    files = LinkFiles(link_ca, link_certificate, link_key, link_token_file)
    back = files._replace(token_file=link_back_token_file or link_token_file)
    before, after = (parse_micros(text) / 1_000_000 for text in (links_before, links_for))
    steps: list[str] = []

    def tell(step: str) -> None:
        steps.append(step)
        note(step)

    try:
        with Mover(session, tuple(dict.fromkeys(topics)), cell, tell, files, keep, before, after, back) as mover:
            done = mover.abort(accept_loss=accept_loss) if abort else mover.move()
    except (SowError, Refused, KeyboardInterrupt):
        if steps:  # else nothing has changed
            undo = "" if abort else "; until the switch, --abort undoes it"
            note(f"ended in the middle: run the same command again{undo}")
        raise
    if abort and not steps:
        note(f"nothing to undo: no move of {', '.join(done.topics)} to the cell {cell} is under way")
    if done.kept and not keep:
        note("copies are left: sow doctor says which ones are newer")
    output.one(
        [
            Fact("topics", list(done.topics), display.safe(", ".join(done.topics))),
            Fact("from", done.left or None, done.left),
            Fact("to", done.cell, done.cell),
            Fact("version", done.version, str(done.version)),
            Fact("pause_micros", *_pause(done.pause_seconds), label="pause"),
            Fact("kept", list(done.kept), ", ".join(done.kept) or "none", label="copies left"),
        ]
    )


def _pause(seconds: float | None) -> tuple[int | None, str]:
    return (None, "none") if seconds is None else (round(seconds * 1e6), f"{seconds * 1e3:.0f} ms")
