"""`sow filter`: filters as texts. No server takes part."""

from __future__ import annotations

import sys
from typing import Final

import click
from rich.cells import cell_len

from sow_cli import amps_filters, display
from sow_cli.amps_syntax import AmpsError
from sow_cli.exits import Refused
from sow_cli.output import note


@click.group(short_help="Convert filters.")
def filter() -> None:  # noqa: A001 - the name of the command
    """Filters as texts. Needs no server."""


@filter.command("from-amps", short_help="Convert a filter of AMPS.")
@click.argument("text", metavar="TEXT")
def from_amps(text: str) -> None:
    """Print the filter that selects the records which TEXT, a filter of AMPS, selects there. With - it is read from
    standard input.

    In AMPS an empty text is null: a comparison with it becomes one that is true for a missing field, too. Each thing
    that the filter cannot keep is a line on stderr, with its position in TEXT, from 0. What has no counterpart is an
    error, and the exit code is 1.

    \b
    Examples:
      sow filter from-amps "/note = '' AND INSTR(/symbol, 'B') != 0"
      sow query orders "$(sow filter from-amps "$AMPS_FILTER")"
    """
    if text == "-":
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n")
    try:
        converted = amps_filters.from_amps(text)
    except AmpsError as error:
        raise Refused(f"FILTER_INVALID: {display.safe(str(error))}\n{place(text, error.position)}") from error
    for remark in converted.remarks:
        note(f"at {remark.position}: {remark.text}")
    click.echo(converted.filter)


_BEFORE: Final = 50
_BEHIND: Final = 30
"""Characters of a long text that an error shows around its place."""


def place(text: str, position: int) -> str:
    """The text around a position, and a caret below it."""
    before = display.safe(text[max(0, position - _BEFORE) : position])
    return f"  {before}{display.safe(text[position : position + _BEHIND])}\n  {' ' * cell_len(before)}^"
