"""The live table of `sow subscribe --sow`: the current state of a topic on a terminal.

`LiveTable` makes the table, without a terminal or a thread; `LiveDisplay` keeps it on a terminal while messages come.

    [1]  The table shows the view of the messages so far: the first records in the order that was asked for, as many as
         fit, and the number of the others. Numbers are sorted as numbers, texts behind them, missing values last.
    [2]  A message costs time in proportion to the rows that fit, not to all records: a window of the first records is
         kept, and all records are searched again only when removals have used it up.
    [3]  No line is longer than the terminal is wide, and all lines fit its height.
    [4]  An interruption is shown in the table, for as long as it lasts. Nothing of it stays on the terminal.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import total_ordering
from heapq import nsmallest
from typing import Final, NamedTuple, TypeAlias

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sow_cli import display
from sow_cli.colours import are_shown
from sow_cli.columns import Columns, GrowingColumns, below, is_number, steps, text
from sow_cli.messages import MARKS, TopicForms, tell_left_out
from sow_cli.rows import shown_payload, shown_text
from sow_cli.tables import KEY_WIDTH_MAX, fit, number_columns, text_width
from sow_client import Change, Record, SowError, View

REFRESHES_PER_SECOND: Final = 4
HIGHLIGHT_SECONDS: Final = 2.0
RATE_SECONDS: Final = 5
_WINDOW_MAX: Final = 1_000
SURROUNDINGS: Final = 4
"""Lines without a record: the summary, the headings, the number of other records, and the cursor's line."""

_Name: TypeAlias = tuple[str, str]
"""Topic and key."""


class Term(NamedTuple):
    """One part of an order."""

    path: str
    """A field such as `/price`, or `@key`, `@version`, `@publish_time`, `@expire_time`, `@sequence`, `@origin`."""
    descending: bool = False


class _Ranked(NamedTuple):
    """A record's place in the order; comparable."""

    rank: tuple[object, ...]
    topic: str
    key: str


@total_ordering
class _Reversed:
    """A text that is sorted the other way round."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reversed) and self.text == other.text

    def __lt__(self, other: _Reversed) -> bool:
        return other.text < self.text

    def __hash__(self) -> int:
        return hash(self.text)


def _place(value: str | int | None, *, descending: bool = False) -> tuple[object, ...]:
    """A value's place ([1])."""
    if value is None:
        return (1,)
    if isinstance(value, str) and not is_number(value):
        return (0, 0, _Reversed(value)) if descending else (0, 1, value)
    number = value if isinstance(value, int) else int(value) if value.lstrip("-").isdecimal() else float(value)
    return (0, 1, -number) if descending else (0, 0, number)


def _key_place(key: str) -> tuple[object, ...]:
    """The place of a key; a composite one is compared part by part."""
    return tuple([_place(part) for part in key.split("|")])


class LiveTable:
    """Owns the views of the topics and the window of records that can be shown. Not thread-safe."""

    def __init__(
        self,
        forms: TopicForms,
        *,
        several_topics: bool,
        order: Sequence[Term] = (),
        top: int | None = None,
        select: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        now_micros: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        """`order`: before the order of topics and keys. `top`: at most so many rows. `select`: the paths of the fields
        to show; empty: those that come. `clock`: monotonic seconds, for rate and highlight; `now_micros`: since the
        epoch, for "expires in"."""
        self._forms = forms
        self._several_topics = several_topics
        self._order = [(path, None if path[0] == "@" else steps(path), down) for path, down in order]
        self._unseen = {path for path, _ in order if path[0] != "@"}
        self._top = top
        self._growing = GrowingColumns(select)
        self._lost: tuple[int, str] | None = None  # since when it is interrupted, and why
        self._clock = clock
        self._now_micros = now_micros
        self._views: dict[str, View] = {}
        self._window: list[_Ranked] = []  # the first len(_window) of all
        self._total = 0
        self._complete = False
        self._changes = 0
        self._bookmark = ""
        self._changed_at: dict[_Name, float] = {}  # the oldest first
        self._since = clock()
        self._per_second: deque[tuple[int, int]] = deque(maxlen=RATE_SECONDS + 1)  # a second, and its changes
        self._widths: list[int] = []
        self._listed: Callable[[], Sequence[Record]] | None = None
        self._laid_out_for = 0

    # ---- messages ----

    def apply(self, change: Change) -> None:
        """Takes in the next message."""
        if not change.cell:  # else it is of one cell alone
            self._bookmark = change.bookmark or self._bookmark
        if change.op in MARKS:
            self._mark(change)
            return
        view = self._views.get(change.topic)
        if view is None:
            view = self._views[change.topic] = View(fix_separator=self._forms.fix_separator(change.topic))
        before = view.get(change.key)
        view.apply(change)
        after = view.get(change.key)
        old = None if before is None else self._ranked(change.topic, before)
        new = None if after is None else self._ranked(change.topic, after)
        if old != new:
            if old is not None:
                self._remove(old)
            if new is not None:
                self._add(new)
        if change.op != "sow":
            self._count((change.topic, change.key), is_there=after is not None)

    def interrupted(self, why: SowError | None) -> None:
        """The connection is lost; None: it is there again ([4])."""
        self._lost = None if why is None else (self._now_micros(), why.reason)

    @property
    def absent_fields(self) -> list[str]:
        """Fields of the order in which no record has had a value (rule Q10); none where there was no record."""
        return sorted(self._unseen) if self._views else []

    @property
    def left_out(self) -> list[str]:
        """Names of fields that have no column."""
        return self._growing.left_out

    def _ranked(self, topic: str, record: Record) -> _Ranked:
        rank: list[object] = []
        if self._order:
            fields = self._forms.of_message(topic).payloads.fields(record.payload) or {}
            for name, path, descending in self._order:
                value = _metadata(record, name[1:]) if path is None else text(below(fields.get(path[0]), path[1:]))
                if self._unseen and value is not None:
                    self._unseen.discard(name)
                rank.append(_place(value, descending=descending))
        return _Ranked((*rank, topic, _key_place(record.key)), topic, record.key)

    def _mark(self, change: Change) -> None:
        self._complete = change.op == "snapshot_end"
        if self._complete:
            return
        for topic in [change.topic] if change.topic else [*self._views]:  # of a topic of one cell, or of all (C21)
            self._views.pop(topic, None)
        self._changed_at = {name: at for name, at in self._changed_at.items() if name[0] in self._views}
        self._total = sum(map(len, self._views.values()))
        self._refill()

    def _add(self, ranked: _Ranked) -> None:
        window = self._window
        if len(window) == self._total or ranked < window[-1]:
            insort(window, ranked)
            del window[_WINDOW_MAX:]
        self._total += 1

    def _remove(self, ranked: _Ranked) -> None:
        place = bisect_left(self._window, ranked)
        if place < len(self._window) and self._window[place] == ranked:
            del self._window[place]
        self._total -= 1
        if not self._window and self._total:  # so that `_add` has a last one to compare with
            self._refill()

    def _refill(self) -> None:
        ranked = (self._ranked(topic, record) for topic, view in self._views.items() for record in view.values())
        self._window = nsmallest(_WINDOW_MAX, ranked)

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
        room = min(max(1, height - SURROUNDINGS), _WINDOW_MAX, self._top or _WINDOW_MAX)
        if len(self._window) < min(room, self._total):
            self._refill()
        self._forget_highlights(self._clock())
        shown = self._window[:room] if self._listed is None else self._as_listed(self._listed(), room)
        columns = self._columns(shown)
        headings = self._headings(columns)
        rows = [self._row(ranked, columns) for ranked in shown]
        widths = self._layout(headings, rows, width)
        style = "bold" if self._lost is None else "bold red"
        lines = [Text(fit(self._summary(), width).rstrip(), style=style)]
        if rows:
            numbers = number_columns(rows)
            lines.append(Text(_line(headings, widths, width, numbers), style="bold underline"))
            for ranked, row in zip(shown, rows, strict=True):
                fresh = (ranked.topic, ranked.key) in self._changed_at
                lines.append(Text(_line(row, widths, width, numbers), style="bold green" if fresh else ""))
        if self._total > len(rows):
            lines.append(Text(fit(f"… and {self._total - len(rows):,} more", width).rstrip(), style="dim"))
        text = Text("\n").join(lines[: max(1, height - 1)])
        text.no_wrap, text.overflow = True, "crop"
        return text

    def follow(self, listed: Callable[[], Sequence[Record]]) -> None:
        """From now on the rows come in the order of this list, which the server keeps. It has sorted them, so no field
        of the order has to be looked for here."""
        self._listed, self._unseen = listed, set()

    def _as_listed(self, listed: Sequence[Record], room: int) -> list[_Ranked]:
        """The rows of a list. One that was not told yet is left out."""
        told = self._views
        there = [one for one in listed if one.topic in told and one.key in told[one.topic]]
        return [_Ranked((), one.topic, one.key) for one in there[:room]]

    def _columns(self, shown: Sequence[_Ranked]) -> Columns | None:
        """The columns of the fields; None: the payloads are shown as they are."""
        if not shown or (self._several_topics and not self._growing.is_chosen):
            return None
        fields = self._forms.of_message(shown[0].topic).payloads
        return self._growing.of(fields, [self._views[one.topic][one.key].payload for one in shown])

    def _headings(self, columns: Columns | None) -> list[str]:
        of_fields = ["published", "payload"] if columns is None else map(display.safe, columns.headings)
        return [*(["topic"] if self._several_topics else []), "key", "expires", *of_fields]

    def _row(self, ranked: _Ranked, columns: Columns | None) -> list[str]:
        topic, key = ranked.topic, ranked.key
        record: Record = self._views[topic][key]
        now_micros = self._now_micros()
        form = self._forms.of_message(topic)
        cells = [display.safe(key), display.expires(record.expire_time_micros, now_micros, acts=form.acts)]
        if columns is None:
            cells += [
                display.short_instant(record.publish_time_micros, now_micros),
                shown_payload(record.payload, form),
            ]
        else:
            cells += ["" if one is None else shown_text(one) for one in columns.texts(record.payload)]
        return [display.safe(topic), *cells] if self._several_topics else cells

    def _layout(self, headings: list[str], rows: Iterable[list[str]], width: int) -> list[int]:
        """Widths of all columns except the last. They grow and never shrink, so that nothing jumps, until the size of
        the terminal changes."""
        if width != self._laid_out_for:
            self._widths, self._laid_out_for = [], width
        columns = zip(headings, *rows, strict=True)
        needed = [min(max(text_width(cell) for cell in column), KEY_WIDTH_MAX) for column in columns]
        before = [*self._widths, *([0] * (len(needed) - len(self._widths)))]
        self._widths = [max(pair) for pair in zip(needed, before, strict=False)]
        return self._widths

    def _summary(self) -> str:
        if self._lost is not None:
            since, why = self._lost
            then = f"{display.instant(since)[11:19]}Z"
            return f"disconnected since {then} ({display.safe(why)}) · {display.records(self._total)} as of then"
        if not self._complete:
            return f"reading the snapshot: {display.records(self._total)}"
        changes = display.counted(self._changes, "change")
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


def _metadata(record: Record, name: str) -> str | int | None:
    match name:
        case "key":
            return record.key
        case "version":
            return record.version
        case "publish_time":
            return record.publish_time_micros
        case "expire_time":
            return record.expire_time_micros
        case "origin":
            return record.origin
        case _:
            return record.sequence


def _line(cells: list[str], widths: list[int], width: int, numbers: frozenset[int]) -> str:
    """A line of at most `width`: columns of the given widths, numbers at the right, and the rest for the last one."""
    parts = [fit(cell, wide) for cell, wide in zip(cells[:-1], widths, strict=False)]
    last = fit(cells[-1], widths[-1]) if len(cells) - 1 in numbers else cells[-1]
    parts.append(last)
    for number in numbers:
        parts[number] = parts[number].rstrip().rjust(widths[number])
    return fit("  ".join(parts), width).rstrip()


class LiveDisplay:
    """Keeps a table on the terminal until the messages end; it stays there afterwards."""

    def __init__(self, table: LiveTable, forms: TopicForms) -> None:
        self._table = table
        self._forms = forms
        self._lock = threading.Lock()  # of the table: rich refreshes in a thread of its own
        self._console = Console(highlight=False, markup=False, emoji=False, no_color=not are_shown())

    @property
    def absent_fields(self) -> list[str]:
        """As the table has them."""
        with self._lock:
            return self._table.absent_fields

    def follow(self, listed: Callable[[], Sequence[Record]]) -> None:
        """As the table does."""
        with self._lock:
            self._table.follow(listed)

    def tell(self, interruption: SowError | None) -> None:
        """Shows that the connection is lost; None: that it is there again ([4])."""
        with self._lock:
            self._table.interrupted(interruption)

    def show(self, changes: Iterable[Change]) -> None:
        """Shows the view of the messages."""
        try:
            with (
                silent_keys(),
                Live(
                    get_renderable=self._render,
                    console=self._console,
                    refresh_per_second=REFRESHES_PER_SECOND,
                    redirect_stderr=sys.stderr.isatty(),  # remarks to the terminal go above the table
                ),
            ):
                for change in changes:
                    if change.topic:
                        self._forms.of_message(change.topic)  # may ask the server, so it runs without the lock
                    with self._lock:
                        self._table.apply(change)
        finally:
            tell_left_out(self._table.left_out)

    def _render(self) -> Text:
        with self._lock:
            return self._table.render(self._console.size.width, self._console.size.height)


@contextmanager
def silent_keys() -> Iterator[None]:
    """The terminal does not show what is typed meanwhile, `^C` above all: it would stay in the middle of the table."""
    try:
        import termios
    except ImportError:
        yield
        return
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
