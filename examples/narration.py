"""The output of the demo, on a terminal or into a pipe: steps, claims, tables, progress.

[1]  A claim that does not hold ends the program, and nothing is printed after it.
[2]  In a pipe there are only plain lines: no colours, and nothing is drawn twice.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

PIPE_WIDTH: Final = 110
PIPE_SECONDS: Final = 2.0
"""In a pipe, progress is printed as separate lines, at most this often."""

Advance = Callable[[int], None]
Show = Callable[[str, Sequence[Sequence[str]]], None]
"""Redraws a table: its title and its rows."""


class ClaimFailed(Exception):
    """A claim of the demo does not hold."""


class Narration:
    """Owns standard output while the demo runs."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # an output without ✓ gets a question mark
        self._console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
        self._steps = 0
        self.claims = 0

    def title(self, text: str) -> None:
        """The first line."""
        self._console.print(f"[bold]{escape(text)}[/]")

    def step(self, text: str, *meaning: str) -> None:
        """The heading of a step, and its claims."""
        self._steps += 1
        self._console.print(f"\n[bold cyan]{self._steps}. {escape(text)}[/]")
        for line in meaning:
            self._console.print(f"   [italic]{escape(line)}[/]")

    def say(self, text: str) -> None:
        """A plain line."""
        self._console.print(f"   {escape(text)}", soft_wrap=True)

    def claim(self, text: str, holds: bool, *, found: object = "") -> None:
        """Prints a claim that holds. Otherwise raises ClaimFailed with the actual result."""
        if not holds:
            raise ClaimFailed(text if found == "" else f"{text} (found: {found})")
        self.claims += 1
        self._console.print(f"   [green]✓[/] {escape(text)}", soft_wrap=True)

    def refute(self, error: ClaimFailed) -> None:
        """Prints the claim that does not hold."""
        self._console.print(f"   [bold red]✗ DOES NOT HOLD:[/] {escape(str(error))}", soft_wrap=True)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """A table; the columns named in `right` hold numbers."""
        self._console.print(_table("", headings, rows, right))

    @contextmanager
    def board(self, headings: Sequence[str], *, right: Sequence[str] = ()) -> Iterator[Show]:
        """A table that is redrawn in its place, below the other output. In a pipe it is not shown [2]."""
        if not self._console.is_terminal:
            yield lambda title, rows: None
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            yield lambda title, rows: live.update(_table(title, headings, rows, right), refresh=True)

    @contextmanager
    def progress(self, text: str, total: int, *, unit: str = "", rate: bool = True) -> Iterator[Advance]:
        """Shows progress; call `Advance` with the number done so far, from any thread."""
        if not self._console.is_terminal:
            with self._lines(text, total, unit, rate=rate) as advance:
                yield advance
            return
        started = time.monotonic()
        columns = [
            TextColumn("   {task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
        ]
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(text, total=total, figures="")

            def advance(done: int) -> None:
                figures = _figures(done, total, unit, time.monotonic() - started if rate else None)
                bar.update(task, completed=done, figures=figures)

            yield advance

    @contextmanager
    def _lines(self, text: str, total: int, unit: str, *, rate: bool) -> Iterator[Advance]:
        started = told = time.monotonic()
        last = 0

        def advance(done: int) -> None:
            nonlocal told, last
            now = time.monotonic()
            if done != last and (now - told >= PIPE_SECONDS or done == total):
                told, last = now, done
                self.say(f"{text} {_figures(done, total, unit, now - started if rate else None)}")

        yield advance

    def flush(self) -> None:
        """Flushes the output."""
        self._console.file.flush()


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> Padding:
    table = Table(
        title=escape(title) or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold"
    )
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return Padding(table, (0, 0, 0, 3), expand=False)


def _figures(done: int, total: int, unit: str, seconds: float | None) -> str:
    figures = f"{done:,} of {total:,}{unit and ' '}{unit}"
    return figures if not seconds else f"{figures}, {done / seconds:,.0f}/s"
