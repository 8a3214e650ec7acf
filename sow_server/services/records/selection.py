"""Finds the records that a filter selects for a change, batch by batch on a reader thread (rules D2, L13).

The writer decides: it changes a record only if it still matches then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from typing import Final, NamedTuple

from sow_server.access.caller import Granted
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.soundness import Fault, RowLimits, row_fault
from sow_server.engine.reading import Cuts
from sow_server.engine.stored import SEQUENCE, i64
from sow_server.engine.values.model import RecordMatcher
from sow_server.filters.parameters import NO_VALUES, Values
from sow_server.query.filtering import record_filter
from sow_server.query.scan import Query, RecordBatch, Scan
from sow_server.services.records.answering import close_after, opened

CHECK_ROWS: Final = 500
"""Rows that one step of a check decodes: some milliseconds."""
CHANGE_RECORDS: Final = 1000
"""Records that one commit of a change by filter takes; up to this many it is atomic (rule D2)."""
BUSY_RECORDS: Final = 250
"""The same of the later commits of a delete, while somebody publishes, who has to wait for them."""


class Selected(NamedTuple):
    """Records to change, and the test that they must still pass then."""

    keys: list[bytes]
    matches: RecordMatcher
    absent_fields: Sequence[str] = ()
    """In the last one: the fields of the filter that no record has (rule Q10)."""


class Counted(NamedTuple):
    """The number of records that match, and the fields of the filter that no record has (rule Q10)."""

    matched: int
    absent_fields: Sequence[str]


async def selected(
    cuts: Cuts,
    readers: Executor,
    granted: Granted,
    text: str,
    *,
    given: Values = NO_VALUES,
    unreadable: bool = False,
    busy: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[Selected, None]:
    """The records that match the filter `text` now, of those that are granted, `CHANGE_RECORDS` at a time; the last
    batch may have fewer, or none. "" only where rows are granted. `given`: the values of its parameters. `unreadable`:
    also records whose key does not fit into a message (rule R13). While `busy`, all but the first batch are of
    `BUSY_RECORDS`.

    One cut and one `now` for all of them, also for NOW_MICROS() in `matches`. Close it, as it holds the cut. Raises
    StoreError.
    """
    loop = asyncio.get_running_loop()
    # Parsing a long filter takes a while, which must not block the event loop.
    topic, restriction = granted
    wanted = await loop.run_in_executor(
        readers, lambda: record_filter(topic, text, 0, restriction=restriction, given=given)
    )
    query = Query(topic, filter=wanted, keys_only=True, batch_size=CHANGE_RECORDS, unreadable=unreadable)
    scan = await opened(loop.run_in_executor(readers, Scan, cuts, query))
    reading: asyncio.Future[RecordBatch | None] | None = None
    try:
        matches = _unless_unchanged(wanted.at(scan.cut.now_micros).matches, scan.cut.sequence)
        found: list[bytes] = []
        size = CHANGE_RECORDS
        reading = loop.run_in_executor(readers, scan.step)
        while (batch := await asyncio.shield(reading)) is not None:
            reading = loop.run_in_executor(readers, scan.step)  # while the caller changes these
            found += batch.keys
            while len(found) >= size:
                yield Selected(found[:size], matches)
                del found[:size]
                size = BUSY_RECORDS if busy() else CHANGE_RECORDS
        yield Selected(found, matches, scan.absent_fields)
    finally:
        scan.give_up()
        close_after(scan, reading)


def _unless_unchanged(matches: RecordMatcher, sequence: int) -> RecordMatcher:
    """Evaluates the filter again only for records that have changed since they were found. It may take long, and it
    runs in the writer, for which everybody waits."""
    bound = i64(sequence)  # compared as bytes: a fraction of the cost of reading the header
    return lambda key, value: value[SEQUENCE] <= bound or matches(key, value)


async def count_selected(
    cuts: Cuts, readers: Executor, granted: Granted, text: str, *, given: Values = NO_VALUES, unreadable: bool = False
) -> Counted:
    """The number of granted records that match the filter `text` now."""
    topic, restriction = granted
    wanted = await asyncio.get_running_loop().run_in_executor(
        readers, lambda: record_filter(topic, text, 0, restriction=restriction, given=given)
    )
    return await count(cuts, readers, Query(topic, filter=wanted, count_only=True, unreadable=unreadable))


async def count(cuts: Cuts, readers: Executor, query: Query) -> Counted:
    """The number of records that match a query that only counts. Raises StoreError."""
    loop = asyncio.get_running_loop()
    scan = await opened(loop.run_in_executor(readers, Scan, cuts, query))  # planning 10,000 keys takes milliseconds
    reading: asyncio.Future[RecordBatch | None] | None = None
    try:
        while True:
            reading = loop.run_in_executor(readers, scan.step)
            if await asyncio.shield(reading) is None:
                return Counted(scan.footer().matched, scan.absent_fields)
    finally:
        scan.give_up()
        close_after(scan, reading)


class Checked(NamedTuple):
    """A step of a check."""

    rows: int
    """The rows that were checked."""
    unsound: list[tuple[bytes, bytes, Fault]]
    """The rows among them that no publish could have made: key, stored value, fault."""


async def checked(cuts: Cuts, readers: Executor, topic: Topic, limits: RowLimits) -> AsyncGenerator[Checked, None]:
    """Checks all live rows of a topic, as they are now, `CHECK_ROWS` at a time (rule R13). Close it, as it holds the
    cut."""
    loop = asyncio.get_running_loop()
    cut = cuts.records(topic, unreadable=True)
    reading: asyncio.Future[tuple[bytes | None, Checked]] | None = None

    def check(start: bytes) -> tuple[bytes | None, Checked]:
        keys: list[bytes] = []
        values: list[bytes] = []
        following, _ = cut.fill(start, CHECK_ROWS, keys, values)
        found = [
            (key, value, fault)
            for key, value in zip(keys, values, strict=True)
            if (fault := row_fault(topic, key, value, limits, cut.now_micros)) is not None
        ]
        return following, Checked(len(keys), found)

    try:
        following: bytes | None = topic.prefix
        while following is not None:
            reading = loop.run_in_executor(readers, check, following)
            following, step = await asyncio.shield(reading)
            yield step
    finally:
        close_after(cut, reading)
