"""The course of a server's figures on a terminal, below the lines of `sow status --watch`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sow_cli import plots
from sow_cli.colours import are_shown, styled
from sow_cli.live import silent_keys
from sow_client import Figures

SAMPLES_MAX: Final = 3_600
"""Figures that are kept; a terminal shows as many of the last ones as it is wide."""
FIGURES: Final[dict[str, Callable[[Figures], float]]] = {
    "changes/s": lambda one: one.changes_per_second,
    "expired/s": lambda one: one.expired_per_second,
    "queue": lambda one: one.queued_requests,
}
_NAME_WIDTH: Final = 11
_MOST_WIDTH: Final = 16


class Courses:
    """The course of each of `FIGURES`."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float]] = {name: deque(maxlen=SAMPLES_MAX) for name in FIGURES}

    def add(self, figures: Figures) -> None:
        """Takes the next figures, also those that the server has kept. The first of a stream have no rates: they are
        left out."""
        if figures.elapsed:
            for name, value in FIGURES.items():
                self._values[name].append(value(figures))

    def lines(self, width: int) -> Iterator[str]:
        """A line for each figure: its name, its course, and the greatest value of those that are shown."""
        for name, values in self._values.items():
            shown = list(values)[-max(1, width - _NAME_WIDTH - _MOST_WIDTH) :]
            most = f"  max {max(shown, default=0):,.0f}" if shown else ""
            yield f"{name:<{_NAME_WIDTH}}{styled(plots.sparkline(shown), 'bar')}{most}"


def show(answers: Iterable[tuple[Figures, str]]) -> None:
    """Writes the text of each answer, and keeps the courses up to it below."""
    console = Console(highlight=False, markup=False, emoji=False, no_color=not are_shown())
    courses = Courses()
    with silent_keys(), Live(console=console, auto_refresh=False) as below:
        for figures, text in answers:
            courses.add(figures)
            console.print(text, soft_wrap=True)
            below.update(Text.from_ansi("\n".join(courses.lines(console.size.width))), refresh=True)
