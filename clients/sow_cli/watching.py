"""`sow query --watch`: the answer of a query on a terminal, asked again and again.

[1]  The table stays within the terminal, and stays on it when the command ends.
[2]  A server that is away is waited for: the last answer stays, and the table says since when it is old.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sow_cli import display
from sow_cli.colours import are_shown
from sow_cli.live import SURROUNDINGS, silent_keys
from sow_cli.rows import RecordForm, TableRows
from sow_cli.tables import TableLayout
from sow_client import QueryResult, Record, SowError, Unavailable


class WatchedTable:
    """The last answer as a table. Pure, except for the clock."""

    def __init__(
        self, form: RecordForm, every: str, *, now_micros: Callable[[], int] = lambda: time.time_ns() // 1_000
    ) -> None:
        """`every`: the time between two queries, as the user gave it."""
        self._form = form
        self._every = every
        self._now_micros = now_micros
        self._records: list[Record] = []
        self._more: int | None = 0
        self._as_of = 0
        self._lost: tuple[int, str] | None = None

    def answered(self, records: list[Record], as_of_micros: int, *, more: int | None = 0) -> None:
        """Takes a new answer: the first of the records that match. `more`: how many are not among them; None: some."""
        self._records, self._as_of, self._more = records, as_of_micros, more
        self._lost = None

    def lost(self, error: SowError) -> None:
        """There is no new answer ([2])."""
        if self._lost is None:
            self._lost = (self._now_micros(), error.reason)

    def render(self, width: int, height: int) -> Text:
        """The table for a terminal of this size ([1])."""
        shown = self._records[: max(1, height - SURROUNDINGS)]
        lines = [Text(self._summary(), style="bold" if self._lost is None else "bold red")]
        if shown:
            rows = TableRows(self._form, shown)
            texts = [rows.cells(record, self._as_of) for record in shown]
            layout = TableLayout.of_lines(rows.headings, texts, width, last_grows=rows.columns is None)
            lines.append(Text(layout.line(rows.headings), style="bold underline"))
            lines += [Text(layout.line(row)) for row in texts]
        hidden = len(self._records) - len(shown)
        if self._more is None:
            lines.append(Text("… and more", style="dim"))
        elif self._more + hidden:
            lines.append(Text(f"… and {self._more + hidden:,} more", style="dim"))
        text = Text("\n").join(lines[: max(1, height - 1)])
        text.no_wrap, text.overflow = True, "crop"
        return text

    def _summary(self) -> str:
        if self._lost is not None:
            since, why = self._lost
            old = f"as of {display.instant(self._as_of)[11:19]}Z" if self._as_of else "no answer yet"
            return f"disconnected since {display.instant(since)[11:19]}Z ({display.safe(why)}) · {old}"
        known = display.records(len(self._records) + (self._more or 0))
        count = f"more than {known}" if self._more is None else known
        return f"{count}, as of {display.instant(self._as_of)} · every {self._every}"


def watch(
    table: WatchedTable,
    ask: Callable[[int], QueryResult],
    seconds: float,
    *,
    top: int | None,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Shows the answer until the command is ended. `ask`: makes the query, for so many records at most."""
    console = Console(highlight=False, markup=False, emoji=False, no_color=not are_shown())
    with (
        silent_keys(),
        Live(console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty()) as shown,
    ):
        while True:
            room = max(1, console.size.height - SURROUNDINGS)
            wanted = room if top is None else min(room, top)
            try:
                # One more than is shown: a query that is not ordered does not count the records behind the last one.
                with ask(wanted if wanted == top else wanted + 1) as result:
                    records = [record for batch in result.batches() for record in batch]
                    header, footer = result.header, result.footer
                as_of = time.time_ns() // 1_000 if header is None else header.as_of_micros
                more: int | None = 0
                if len(records) > wanted:
                    matched = 0 if footer is None else footer.matched
                    more = min(matched, top or matched) - wanted if matched > len(records) else None
                table.answered(records[:wanted], as_of, more=more)
            except Unavailable as error:
                table.lost(error)
            shown.update(table.render(console.size.width, console.size.height), refresh=True)
            wait(seconds)
