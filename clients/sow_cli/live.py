"""The live table of `sow subscribe --sow`: the current state of a topic on a terminal.

`LiveTable` makes the table, without a terminal or a thread; `show` keeps it on a terminal while messages come.

    [1]  The table shows the view of the messages so far: the first records in key order, as many as fit, and the number
         of the others.
    [2]  A message costs time in proportion to the rows that fit, not to all records: a window of the first keys is
         kept, and all records are searched again only when deletions have used it up.
    [3]  No line is longer than the terminal is wide, and all lines fit its height.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from heapq import nsmallest
from typing import Final, TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sow_cli import display
from sow_cli.messages import MARKS, TopicForms
from sow_cli.rows import KEY_WIDTH_MAX, fit, shown_payload
from sow_client import Change, Record, View

REFRESHES_PER_SECOND: Final = 4
HIGHLIGHT_SECONDS: Final = 2.0
RATE_SECONDS: Final = 5
_WINDOW_MAX: Final = 1_000
_SURROUNDINGS: Final = (
    4  # lines without a record: summary, headings, the number of other records, and the cursor's line
)

_Name: TypeAlias = tuple[str, str]
"""Topic and key: the order of the rows."""


class LiveTable:
    """Owns the views of the topics and the window of names that can be shown. Not thread-safe."""

    def __init__(
        self,
        forms: TopicForms,
        *,
        several_topics: bool,
        clock: Callable[[], float] = time.monotonic,
        now_micros: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        """`clock`: monotonic seconds, for rate and highlight; `now_micros`: since the epoch, for "expires in"."""
        self._forms = forms
        self._several_topics = several_topics
        self._clock = clock
        self._now_micros = now_micros
        self._views: dict[str, View] = {}
        self._window: list[_Name] = []  # the first len(_window) names of all
        self._total = 0
        self._complete = False
        self._changes = 0
        self._bookmark = ""
        self._changed_at: dict[_Name, float] = {}  # the oldest first
        self._since = clock()
        self._per_second: deque[tuple[int, int]] = deque(maxlen=RATE_SECONDS + 1)  # a second, and its changes
        self._widths: list[int] = []
        self._laid_out_for = 0

    # ---- messages ----

    def apply(self, change: Change) -> None:
        """Takes in the next message."""
        self._bookmark = change.bookmark or self._bookmark
        if change.op in MARKS:
            self._mark(change)
            return
        view = self._views.get(change.topic)
        if view is None:
            view = self._views[change.topic] = View(fix_separator=self._forms.fix_separator(change.topic))
        name = (change.topic, change.key)
        was_there = change.key in view
        view.apply(change)
        is_there = change.key in view
        if is_there and not was_there:
            self._add(name)
        elif was_there and not is_there:
            self._remove(name)
        if change.op != "sow":
            self._count(name, is_there=is_there)

    def _mark(self, change: Change) -> None:
        self._complete = change.op == "snapshot_end"
        if not self._complete:
            self._views.clear()
            self._window.clear()
            self._changed_at.clear()
            self._total = 0

    def _add(self, name: _Name) -> None:
        window = self._window
        if len(window) == self._total or name < window[-1]:
            insort(window, name)
            del window[_WINDOW_MAX:]
        self._total += 1

    def _remove(self, name: _Name) -> None:
        place = bisect_left(self._window, name)
        if place < len(self._window) and self._window[place] == name:
            del self._window[place]
        self._total -= 1
        if not self._window and self._total:  # so that `_add` has a last name to compare with
            self._refill()

    def _refill(self) -> None:
        names = ((topic, key) for topic, view in self._views.items() for key in view)
        self._window = nsmallest(_WINDOW_MAX, names)

    def _count(self, name: _Name, *, is_there: bool) -> None:
        now = self._clock()
        self._changes += 1
        self._changed_at.pop(name, None)
        if is_there:
            self._changed_at[name] = now
        self._forget_highlights(now)
        second = int(now)
        if self._per_second and self._per_second[-1][0] == second:
            self._per_second[-1] = (second, self._per_second[-1][1] + 1)
        else:
            self._per_second.append((second, 1))

    def _forget_highlights(self, now: float) -> None:
        while self._changed_at:
            oldest = next(iter(self._changed_at))
            if now - self._changed_at[oldest] < HIGHLIGHT_SECONDS:
                return
            del self._changed_at[oldest]

    # ---- the table ----

    def render(self, width: int, height: int) -> Text:
        """The table for a terminal of this size ([3])."""
        room = min(max(1, height - _SURROUNDINGS), _WINDOW_MAX)
        if len(self._window) < min(room, self._total):
            self._refill()
        self._forget_highlights(self._clock())
        names = self._window[:room]
        rows = [self._row(topic, key) for topic, key in names]
        widths = self._layout(rows, width)
        lines = [Text(fit(self._summary(), width).rstrip(), style="bold")]
        if rows:
            lines.append(Text(_line(self._headings(), widths, width), style="bold underline"))
            for name, row in zip(names, rows, strict=True):
                lines.append(Text(_line(row, widths, width), style="bold green" if name in self._changed_at else ""))
        if self._total > len(rows):
            lines.append(Text(fit(f"… and {self._total - len(rows):,} more", width).rstrip(), style="dim"))
        text = Text("\n").join(lines[: max(1, height - 1)])
        text.no_wrap, text.overflow = True, "crop"
        return text

    def _headings(self) -> list[str]:
        headings = ["key", "expires", "published", "payload"]
        return ["topic", *headings] if self._several_topics else headings

    def _row(self, topic: str, key: str) -> list[str]:
        record: Record = self._views[topic][key]
        now_micros = self._now_micros()
        cells = [
            display.safe(key),
            display.expires(record.expire_time_micros, now_micros, acts=self._forms.of_message(topic).acts),
            display.short_instant(record.publish_time_micros, now_micros),
            shown_payload(record.payload, self._forms.of_message(topic)),
        ]
        return [display.safe(topic), *cells] if self._several_topics else cells

    def _layout(self, rows: Iterable[list[str]], width: int) -> list[int]:
        """Widths of all columns except the last. They grow and never shrink, so that nothing jumps, until the size of
        the terminal changes."""
        if width != self._laid_out_for:
            self._widths, self._laid_out_for = [], width
        columns = zip(self._headings(), *rows, strict=True)
        needed = [min(max(cell_len(cell) for cell in column), KEY_WIDTH_MAX) for column in columns][:-1]
        self._widths = [max(pair) for pair in zip(needed, self._widths or needed, strict=True)]
        return self._widths

    def _summary(self) -> str:
        if not self._complete:
            return f"reading the snapshot: {display.records(self._total)}"
        changes = "1 change" if self._changes == 1 else f"{self._changes:,} changes"
        figures = f"{display.records(self._total)} · {changes} · {self._rate():,.1f} changes/s"
        # A line has no room for the marks of other instances, and a bookmark that is cut off is of no use.
        own = self._bookmark.partition(";")[0]
        return f"{figures} · bookmark {display.safe(own)}" if own else figures

    def _rate(self) -> float:
        """Changes per second in the last seconds, or since the start if that is shorter."""
        now = self._clock()
        first = int(now) - RATE_SECONDS + 1
        recent = sum(changes for second, changes in self._per_second if second >= first)
        return recent / max(1.0, now - max(first, self._since))


def _line(cells: list[str], widths: list[int], width: int) -> str:
    """A line of at most `width`: columns of the given widths, and the rest for the last one."""
    parts = [fit(cell, wide) for cell, wide in zip(cells, widths, strict=False)]
    return fit("  ".join([*parts, cells[-1]]), width).rstrip()


def show(changes: Iterable[Change], forms: TopicForms, *, several_topics: bool) -> None:
    """Shows the table on the terminal until the messages end; it stays there afterwards."""
    table = LiveTable(forms, several_topics=several_topics)
    lock = threading.Lock()  # of the table: rich refreshes in a thread of its own
    console = Console(highlight=False, markup=False, emoji=False)

    def render() -> Text:
        with lock:
            return table.render(console.size.width, console.size.height)

    with Live(
        get_renderable=render,
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        redirect_stderr=sys.stderr.isatty(),  # remarks to the terminal go above the table
    ):
        for change in changes:
            if change.topic:
                forms.of_message(change.topic)  # may ask the server, so it runs without the lock
            with lock:
                table.apply(change)
