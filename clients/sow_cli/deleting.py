"""`sow delete`: records by their keys, by a filter, or all."""

from __future__ import annotations

import re
from io import BufferedReader
from typing import Final

import click

from sow_cli import arguments, display
from sow_cli.exits import SERVER_SAID_NO
from sow_cli.filter_parameters import Values, param_option
from sow_cli.ignored import remark_on_fields
from sow_cli.output import Fact, Output, note, output_option, telling
from sow_cli.session import Session
from sow_client import Deleted


@click.command(short_help="Delete records.")
@click.argument("topic")
@click.argument("given", nargs=-1, type=arguments.key, metavar="[KEY]...")
@click.option("--key", "keys", multiple=True, type=arguments.key, metavar="KEY", help="The same as KEY (repeatable).")
@arguments.parts_option
@click.option(
    "--filter",
    "filter_text",
    metavar="FILTER",
    help="Delete the records that match, each only if it still matches then.",
)
@param_option
@click.option(
    "--data",
    type=click.File("rb"),
    metavar="FILE",
    help="Delete the record that has the key of the document in FILE (-: standard input).",
)
@click.option("--all", "everything", is_flag=True, help="Delete every record; asks first, see --force.")
@arguments.if_version_option("Once for each KEY: delete the record only if it has this version.")
@click.option("--dry-run", is_flag=True, help="Only count what would be deleted.")
@click.option("-f", "--force", is_flag=True, help="Do not ask before --all.")
@output_option
@click.pass_obj
def delete(
    session: Session,
    *,
    topic: str,
    given: tuple[str, ...],
    keys: tuple[str, ...],
    parts: bool,
    filter_text: str | None,
    parameters: Values | None,
    data: BufferedReader | None,
    everything: bool,
    versions: tuple[int, ...],
    dry_run: bool,
    force: bool,
    output: Output,
) -> None:
    """Delete records of TOPIC, chosen by exactly one of KEYs, --filter, --data and --all.

    A key without a record is no error: look at the count. With --if-version the exit code is 1 if a record stays or
    was not there. With --all the command asks first on a terminal; without a terminal it needs --force. A KEY that
    looks like a filter is refused: give it as --filter, or as --key if it is one.

    \b
    Examples:
      sow delete orders 1 2
      sow delete orders 1 --if-version 1905432180000123
      sow delete flights LH 400 --parts
      sow delete orders --filter "/state = 'done'"
      sow delete orders --data order.json
      sow delete orders --all --dry-run
    """
    _refuse_filters(given)
    keys = arguments.whole_keys(given + keys, parts=parts)
    if bool(keys) + (filter_text is not None) + (data is not None) + everything != 1:
        raise click.UsageError("give exactly one of KEYs, --filter, --data and --all")
    if parameters and filter_text is None:
        raise click.UsageError("--param is for the parameters of --filter")
    arguments.refuse_together(("--if-version", bool(versions)), ("--dry-run", dry_run))
    arguments.check_versions(versions, keys)
    if everything and not dry_run:
        from sow_cli.topics import confirm  # rare, and a delete starts without that module

        confirm(f"Delete every record of topic {topic}?", force=force)
    document = None if data is None else data.read()
    with session.client() as client, telling("counting" if dry_run else "deleting") as tell:

        def show(so_far: Deleted) -> None:
            tell(display.records(so_far.matched if dry_run else so_far.deleted))

        done = client.sow_delete(
            topic,
            keys=list(keys) or None,
            only_if_versions=versions or None,
            filter=filter_text,
            parameters=parameters,
            data=document,
            all=everything,
            dry_run=dry_run,
            on_progress=show,
        )
    output.one(_deleted_facts(topic, done, dry_run=dry_run))
    remark_on_fields(done.absent_fields)
    if versions and done.deleted < len(set(keys)):
        note("sow: CONDITION_FAILED: no live record of that version")
        click.get_current_context().exit(SERVER_SAID_NO)


_FILTER: Final = re.compile(
    r"\s*(?:NOT\s|\()?\s*[/@]\S+\s*(?:[=<>!]|\s(?:IN|IS|NOT|LIKE|BETWEEN|BEGINS|ENDS|CONTAINS)\b)", re.IGNORECASE
)


def _refuse_filters(keys: tuple[str, ...]) -> None:
    """`query` and `count` take a filter at the place of the keys. As a key it would delete nothing, and say so only in
    a count."""
    for key in keys:
        if _FILTER.match(key):
            raise click.UsageError(f"{key!r} is a filter: give it as --filter; if it is a key, as --key")


def _deleted_facts(topic: str, done: Deleted, *, dry_run: bool) -> list[Fact]:
    facts = [
        Fact("topic", topic, topic),
        Fact("matched", done.matched, display.records(done.matched)),
        Fact("deleted", done.deleted, f"{done.deleted:,}" + (" (dry run)" if dry_run else "")),
    ]
    if done.sequence:
        facts.append(Fact("sequence", done.sequence, str(done.sequence)))
    return facts
