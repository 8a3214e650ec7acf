"""The sweep: physical removal of overdue records, through the writer (rules L9 to L11, L14).

The expiry index holds at least one entry at or before the expire time of every record that can expire. The sweep pops
entries from its floor on. For each it reads the record, in the writer's own turn, and acts:

    record gone            → drop the entry
    stamp still ahead      → re-arm: put an entry at the stamp (the record was refreshed; it stays, always)
    stamp due              → expire: remove the record, journal EXPIRE

    [1]  Entries below the floor have been popped; a new stamp below the floor lowers it.
    [2]  The sweep has commits of its own, never a share of a publisher's.
    [3]  Its bound counts the entries visited, not the entries that turn out due.
    [4]  If more is overdue than fits into one commit, a window of the earliest entries is popped in the order of their
         records' keys, in several commits: look-ups and removals in that order cost about three quarters. The floor
         moves when the window is done, and its entries go in one range delete. After a crash they are popped again: an
         entry whose record is gone has no effect.
    [5]  An entry that comes into the range of the window meanwhile is not part of it: the next window begins there.
         Until then each commit deletes the entries that it pops, so the next window meets few of them again.
    [6]  A window is read in one turn, which a publisher may have to wait for. So it is larger than the commit that
         reads it by a factor that is bounded.
    [7]  A commit holds each record about five times, as journal and batch have it, too. So it is bounded in bytes, and
         a window in those of its keys.
"""

from __future__ import annotations

import bisect
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from sow_server.engine.catalog.topics import Topic, Topics
from sow_server.engine.commit.column_changes import expire_all
from sow_server.engine.commit.draft import Draft
from sow_server.engine.disk.layout import SWEEP_FLOOR_KEY
from sow_server.engine.disk.rocks import EXPIRY, META, RECORDS, Cursor, Rocks
from sow_server.engine.stored import DUE, DUE_STORE_KEY, DUE_TOPIC_AT, EXPIRE_TIME, TOPIC, i64, unpack_i64, unpack_u32
from sow_server.engine.values.model import NEVER

READ_MAX: Final = 2000
"""Entries read at a time. A window that reads as many as it may hold would read many that are not yet due."""
RECORDS_AT_ONCE: Final = 64
"""Records read at a time: a commit exceeds its bound in bytes by so many at most. It begins with `RECORDS_AT_FIRST`,
as all may be of the largest size that is allowed."""
RECORDS_AT_FIRST: Final = 4
COMMIT_BYTES: Final = 4 * 2**20
"""The bytes of records that one commit removes ([7]): more than a thousand records usually have."""
WINDOW_BYTES: Final = 8 * 2**20
"""The bytes of the entries of a window ([7])."""
WINDOW_ENTRIES: Final = 20_000
"""The entries of a window ([4]): the more, the nearer to each other are the keys of one commit, and the longer an
overdue record may wait behind others that were due later."""
WINDOW_COMMITS: Final = 20
"""The commits of a window, if each pops as many entries as the one that reads it ([6]). To read and to sort an entry
takes about a seventh of what its removal takes, so the first commit takes about four times as long as the others."""


@dataclass(slots=True)
class Window:
    """The entries that are being popped: the earliest of the index, all overdue."""

    entries: list[bytes]
    end: bytes
    """All entries from the floor up to here were read."""
    next_due: int
    """The time of the next entry, behind the window or come since."""
    at: int = 0
    """So many of them have been popped."""
    came: bytes = b""
    """The earliest time of the entries that came into its range since ([5]); empty: none."""


class Sweep:
    """Owns the floor and the time of the next entry. Used by the writer thread alone."""

    __slots__ = ("_left", "_rocks", "_topics", "_window", "floor", "next_due")

    def __init__(self, rocks: Rocks, topics: Topics) -> None:
        self._rocks = rocks
        self._topics = topics
        self.floor = rocks.get(META, SWEEP_FLOOR_KEY) or b""
        self.next_due = NEVER
        """When the next entry is due. May be too early, never too late; exact after a sweep."""
        self._window: Window | None = None
        self._left = bool(self.floor)
        """After a start there may be popped entries below the floor: earlier versions left some."""
        self.next_due = self._peek()

    def _peek(self) -> int:
        cursor = self._rocks.cursor(EXPIRY)
        try:
            for entry in cursor.keys(self.floor, None, limit=1):
                return unpack_i64(entry[DUE])
        finally:
            cursor.close()
        return NEVER

    def stage(self, draft: Draft, entries_max: int) -> int:
        """Adds the removal of due records to the draft, visiting at most `entries_max` entries. Returns the entries
        visited: 0 if nothing is due."""
        window = self._window
        if window is None:
            window = self._read(draft, entries_max)
        if not window.entries:
            self.next_due = window.next_due
            return 0
        self._window = window
        entries, found = self._take(draft, window, entries_max)
        draft.on_commit.append(partial(self._swept, len(entries)))
        prefixes = {key[TOPIC] for key in found}
        for prefix in prefixes:
            topic = self._topics.by_id.get(unpack_u32(prefix))
            if topic is not None and topic.acts:
                of_topic = (
                    found
                    if len(prefixes) == 1
                    else {key: value for key, value in found.items() if key[TOPIC] == prefix}
                )
                self._decide(draft, topic, of_topic)
        self._clear(draft, window, entries)
        return len(entries)

    def leaves_overdue(self, draft: Draft, visited: int) -> bool:
        """True if records are overdue that the draft does not remove. `visited`: what `stage` has returned for it."""
        window = self._window
        return window is not None and (window.at + visited < len(window.entries) or window.next_due <= draft.now)

    def _take(self, draft: Draft, window: Window, entries_max: int) -> tuple[list[bytes], dict[bytes, bytes]]:
        """The next entries of the window, and the records that they are about, within the bound of a commit ([7])."""
        upto = min(window.at + entries_max, len(window.entries))
        found: dict[bytes, bytes] = {}
        at, size, at_once = window.at, 0, min(RECORDS_AT_FIRST, RECORDS_AT_ONCE)
        while at < upto and size < COMMIT_BYTES:
            keys = [entry[DUE_STORE_KEY] for entry in window.entries[at : min(at + at_once, upto)]]
            records = draft.read(keys)
            found.update(records)
            at += len(keys)
            at_once = min(4 * at_once, RECORDS_AT_ONCE)
            size += sum(map(len, records.values()))
        return window.entries[window.at : at], found

    def _read(self, draft: Draft, entries_max: int) -> Window:
        """The entries that are due now: in the order of their times if one commit pops them all ([4])."""
        # Entries are in the order of their times, so the ones that are not due form the tail.
        entries: list[bytes] = []
        due, size, start, bound = 0, 0, self.floor, entries_max
        cursor = self._rocks.cursor(EXPIRY)
        try:
            while True:
                before, enough = due, due + min(bound - due, READ_MAX)
                cursor.fill_keys(start, enough - due + 1, entries)
                due = bisect.bisect_right(entries, draft.now_bytes, lo=due, hi=min(len(entries), enough), key=_TIME)
                size += sum(map(len, entries[before:due]))
                if size >= WINDOW_BYTES:
                    break
                if due == bound < len(entries) and entries[due][DUE] <= draft.now_bytes:
                    bound = max(bound, min(WINDOW_ENTRIES, WINDOW_COMMITS * entries_max))
                if due < enough or due == bound or due == len(entries):
                    break
                start = entries.pop()  # the entry after the requested ones
        finally:
            cursor.close()
        next_due = unpack_i64(entries[due][DUE]) if due < len(entries) else NEVER
        del entries[due:]
        end = entries[-1] + b"\0" if entries else self.floor
        if due > entries_max:
            entries.sort(key=_STORE_KEY)
        return Window(entries, end, next_due)

    def _clear(self, draft: Draft, window: Window, entries: list[bytes]) -> None:
        """Removes popped entries ([4], [5]). The own entry of an expired record is among them, too; that of a record
        that a dead letter has replaced is not."""
        whole = len(entries) == len(window.entries)
        if window.came or (whole and not self._left):
            draft.batch.deletes[EXPIRY] += entries
        if window.at + len(entries) < len(window.entries):
            return
        floor = window.came or window.end
        draft.batch.puts[META][SWEEP_FLOOR_KEY] = floor
        first = b"" if self._left else self.floor
        if first < floor and (self._left or not whole):
            draft.batch.ranges.append((EXPIRY, first, floor))

    def _decide(self, draft: Draft, topic: Topic, found: dict[bytes, bytes]) -> None:
        """Expires the records that are due, re-arms the others. One topic at a time, in the order of its entries."""
        now = draft.now_bytes
        heads = draft.heads
        if heads and not heads.keys().isdisjoint(found):
            # Dead letters of another topic have replaced the records of these keys in this very commit, after they were
            # read.
            for key in [key for key in found if key in heads]:
                del found[key]
                head = heads[key]
                if head is not None and head[EXPIRE_TIME] != _NEVER_BYTES:
                    draft.arm(unpack_i64(head[EXPIRE_TIME]), key)
        due = found
        if found and max([value[EXPIRE_TIME] for value in found.values()]) > now:
            due = {key: value for key, value in found.items() if value[EXPIRE_TIME] <= now}
        if due:
            expire_all(draft, topic, list(due), list(due.values()))
        if len(due) < len(found):
            for key, value in found.items():
                if now < value[EXPIRE_TIME] < _NEVER_BYTES:
                    draft.arm(unpack_i64(value[EXPIRE_TIME]), key)

    def _swept(self, popped: int) -> None:
        """The commit that pops so many entries of the window has been written; `committed` has been called for it."""
        window = self._window
        assert window is not None, "a sweep has been staged"
        window.at += popped
        if window.at == len(window.entries):
            self._window = None
            self._left = False
            self.floor = window.came or window.end
            self.next_due = window.next_due  # at once: others read it

    def lower(self, draft: Draft) -> None:
        """Before any commit: if the batch puts an entry below the floor, it lowers the floor, too ([1])."""
        # Also when the times are equal: the key of the entry may be below that of the floor.
        if draft.earliest != NEVER and i64(draft.earliest) <= self._floor_after(draft)[DUE]:
            draft.batch.puts[META][SWEEP_FLOOR_KEY] = i64(draft.earliest)

    def _floor_after(self, draft: Draft) -> bytes:
        return draft.batch.puts[META].get(SWEEP_FLOOR_KEY, self.floor)

    def committed(self, draft: Draft) -> None:
        """After any commit: takes its new entries into account."""
        if draft.earliest < self.next_due:
            self.next_due = draft.earliest
        if draft.earliest != NEVER:
            time = i64(draft.earliest)
            if time <= self.floor[DUE]:
                self.floor = time
            if (window := self._window) is not None:
                window.next_due = min(window.next_due, draft.earliest)
                if time <= window.end[DUE]:
                    window.came = min(window.came or time, time)

    def overdue(
        self,
        now_micros: int,
        *,
        prefix: bytes = b"",
        at_most: int,
        entries_max: int | None = None,
        cut: OverdueCut | None = None,
    ) -> dict[int, int]:
        """Counts overdue records that are not yet swept, by topic id, ending once `at_most` are found, or after
        `entries_max` entries, not counting those that a window has popped. From any thread.

        With the `prefix` of a topic it counts for that topic alone. Entries whose record has been refreshed or deleted
        are looked up and left out, as is the second entry of a record. With a `cut`, which it closes, the count is as
        of the cut; without one, records that are swept meanwhile may be missing.
        """
        found: set[bytes] = set()
        pending: list[bytes] = []
        due = i64(now_micros)
        if entries_max is not None and (window := self._window) is not None:
            entries_max += window.at
        cut = cut or self.overdue_cut()
        try:
            for entry in cut.entries.keys(cut.floor, i64(now_micros + 1), limit=entries_max):
                if not entry.startswith(prefix, DUE_TOPIC_AT):
                    continue
                pending.append(entry[DUE_STORE_KEY])
                if len(pending) >= 1000:
                    self._add_overdue(pending, due, found, cut)
                    pending.clear()
                    if len(found) >= at_most:
                        break
            self._add_overdue(pending, due, found, cut)
        finally:
            cut.close()
        counts = Counter(key[TOPIC] for key in found)
        return {unpack_u32(topic): count for topic, count in counts.items()}

    def overdue_cut(self, topics: Iterable[Topic] | None = None) -> OverdueCut:
        """The cut that `overdue` reads, for `topics` (None: all), as of now. It is of one instant if the caller
        prevents commits meanwhile."""
        chosen = self._topics.by_id.values() if topics is None else topics
        return OverdueCut(
            self.floor,
            frozenset([topic.prefix for topic in chosen if topic.acts]),
            self._rocks.cursor(EXPIRY, fill_cache=False),
            self._rocks.cursor(RECORDS, fill_cache=False),
        )

    def _add_overdue(self, store_keys: list[bytes], due: bytes, found: set[bytes], cut: OverdueCut) -> None:
        for key in sorted(store_keys):  # in order, so that a seek lands near the one before
            if key[TOPIC] in cut.acting and (value := cut.records.find(key)) is not None and value[EXPIRE_TIME] <= due:
                found.add(key)


@dataclass(frozen=True, slots=True)
class OverdueCut:
    """The expiry index and the records at one instant."""

    floor: bytes
    acting: frozenset[bytes]
    """The prefixes of the topics that act on expiration: others have no overdue records."""
    entries: Cursor
    records: Cursor

    def close(self) -> None:
        """Closes both."""
        self.entries.close()
        self.records.close()


_NEVER_BYTES: Final = i64(NEVER)
_TIME: Final = operator.itemgetter(DUE)
_STORE_KEY: Final = operator.itemgetter(DUE_STORE_KEY)
