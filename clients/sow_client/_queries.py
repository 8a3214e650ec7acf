"""The answer to a query as the program iterates over it, in a loop of threads and one of tasks. The rest of the results
is in `aio/_reading.py`.

Both are written by hand: an iterator of records in C (`chain`) reads several times faster than a generator.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

from sow_client._reads import QueryProgress
from sow_client._records import QueryFooter, QueryHeader, QueryPlan, Record, RecordBatch, html_table

if TYPE_CHECKING:
    from sow_client._arrow_stream import ArrowStream

QUERY_ATTEMPTS_MAX: Final = 3
"""A query that breaks before its first record is sent at most this often."""
QUERY_RETRY_SECONDS: Final = 0.2
"""The pause before the second attempt; it grows by this much with each attempt."""


class _Progress:
    """The header and the footer, which both results show."""

    def __init__(self, progress: QueryProgress) -> None:
        self._progress = progress

    def __repr__(self) -> str:
        progress = self._progress
        state = "not begun" if progress.header is None else "begun"
        if progress.footer is not None:
            state = f"{progress.footer.returned} records of {progress.footer.matched} that match"
        return f"{type(self).__name__}({progress.topic!r}, {state})"

    @property
    def header(self) -> QueryHeader | None:
        """Bookmark and instant of the answer; None before the first record."""
        return self._progress.header

    @property
    def footer(self) -> QueryFooter | None:
        """Counts of the answer; None before its end."""
        return self._progress.footer

    @property
    def plan(self) -> QueryPlan | None:
        """The way in which the records were found; None before the end, and without `with_plan`."""
        return self._progress.plan


class Answer(_Progress):
    """The iteration of `QueryResult`."""

    # It owns the iterators, and they do not refer to it. In a reference cycle, a loop that is left early would not end
    # the call until the garbage collector runs.

    def __init__(self, progress: QueryProgress, batches: Generator[RecordBatch, None, None]) -> None:
        super().__init__(progress)
        self._call = batches
        self._batches: Iterator[RecordBatch] = batches
        self._records: Iterator[Record] = chain.from_iterable(batches)
        self._begun = False  # its user reads
        self._stream: ArrowStream | None = None

    def __iter__(self) -> Iterator[Record]:
        self._begun = True
        return self._records

    def __next__(self) -> Record:
        self._begun = True
        return next(self._records)

    def batches(self) -> Iterator[RecordBatch]:
        """The same answer as batches of columns, which is the fast way to read it; read records or batches."""
        self._begun = True
        return self._batches

    def _repr_html_(self) -> str:
        """The first records, for a notebook, which makes the call; they are read again afterwards. Where the program
        has begun to read it shows no records."""
        first: RecordBatch | None = None
        if not self._begun:
            first = next(self._batches, None)
            self._batches = self._call if first is None else chain([first], self._call)
            self._records = chain.from_iterable(self._batches)
        return html_table(first or (), repr(self))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The answer for a library that reads Arrow's streams: `polars.DataFrame(result)`, DuckDB's `FROM
        result`, `pyarrow.RecordBatchReader.from_stream(result)`. The columns are those of `to_arrow()`.

        One batch is held at a time. So the first 10,000 records choose the types, and a later record that does not fit
        them ends the stream with an error that names the field. Needs `sow[arrow]`.
        """
        if self._stream is None:
            from sow_client._arrow_stream import ArrowStream

            self._stream = ArrowStream(iter(self.batches()), ("key",))
        return self._stream.reader().__arrow_c_stream__(requested_schema)


class AioAnswer(_Progress):
    """The iteration of `AsyncQueryResult`."""

    def __init__(self, progress: QueryProgress, batches: AsyncGenerator[RecordBatch, None]) -> None:
        super().__init__(progress)
        self._call = batches

    async def __aiter__(self) -> AsyncIterator[Record]:
        async for batch in self._call:
            for record in batch:
                yield record

    def batches(self) -> AsyncIterator[RecordBatch]:
        """The same answer as batches of columns, which is the fast way to read it; read records or batches."""
        return self._call
