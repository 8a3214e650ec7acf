"""The answer to a query as the program reads it: `QueryResult`, and `AsyncQueryResult` for asyncio.

Both are written by hand: an iterator of records in C (`chain`) reads several times faster than a generator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from sow_client._reads import QueryProgress
from sow_client._records import QueryFooter, QueryHeader, QueryPlan, Record, RecordBatch, html_table

if TYPE_CHECKING:
    from sow_client._arrow_stream import ArrowStream
    from sow_client._frames import MetadataName

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
        """How the records were found; None before the end, and without `with_plan`."""
        return self._progress.plan


class QueryResult(_Progress):
    """The answer to a query, read once: an iterator of records.

    `header` is known from the first record on, `footer` after the last. Leaving the loop early, `close`, or the end of
    a `with` block ends the call and the server's work for it. Raises Unavailable (STREAM_CUT or UNREACHABLE) when the
    answer breaks off. It does not ask again by itself then: a second call would show another instant.

    Rule: Q1.
    """

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

    def to_arrow(self, *, schema: object | None = None, metadata: Iterable[MetadataName] = ("key",)) -> Any:
        """The records as a `pyarrow.Table`, made of columns without an object for each record. It reads the answer to
        its end.

        Each field of the JSON documents is a column: a text stays text, also where it looks like a time; numbers are
        int64 where all are whole, else float64; objects are structs, arrays lists. A field of several types is text,
        of each value its JSON. Payloads that are no JSON objects are one column, `payload`. `schema`, a
        `pyarrow.Schema`, names the fields and their types instead. `metadata` become columns with "_" before their
        names, such as "_key": any of key, version, publish_time, expire_time, origin, sequence. Needs `sow[arrow]`.
        """
        from sow_client import _frames  # lazily, as all of its users: few programs need it

        return _frames.to_arrow(list(self.batches()), schema, metadata)

    def to_pandas(self, *, schema: object | None = None, metadata: Iterable[MetadataName] = ("key",)) -> Any:
        """The records as a `pandas.DataFrame`; the arguments are those of `to_arrow`. Whole numbers and bools of which
        some are missing get the types Int64 and boolean, and are not rounded. Needs `sow[pandas]`."""
        from sow_client import _frames

        return _frames.to_pandas(self.to_arrow(schema=schema, metadata=metadata))

    def to_polars(self, *, schema: object | None = None, metadata: Iterable[MetadataName] = ("key",)) -> Any:
        """The records as a `polars.DataFrame`; the arguments are those of `to_arrow`. Needs `sow[polars]`."""
        from sow_client import _frames

        return _frames.to_polars(self.to_arrow(schema=schema, metadata=metadata))

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

    def close(self) -> None:
        """Ends the call."""
        self._call.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncQueryResult(_Progress):
    """The answer to a query, read once with `async for`; see `QueryResult`.

    A loop that is left early ends the call when the result is closed: use `async with`, or `await close()`.
    """

    def __init__(self, progress: QueryProgress, batches: AsyncGenerator[RecordBatch, None]) -> None:
        super().__init__(progress)
        self._batches = batches

    async def __aiter__(self) -> AsyncIterator[Record]:
        async for batch in self._batches:
            for record in batch:
                yield record

    def batches(self) -> AsyncIterator[RecordBatch]:
        """The same answer as batches of columns, which is the fast way to read it; read records or batches."""
        return self._batches

    async def to_arrow(self, *, schema: object | None = None, metadata: Iterable[MetadataName] = ("key",)) -> Any:
        """As `QueryResult.to_arrow`; the table is made in another thread."""
        from sow_client import _frames

        batches = [batch async for batch in self._batches]
        return await asyncio.to_thread(_frames.to_arrow, batches, schema, metadata)

    async def to_pandas(self, *, schema: object | None = None, metadata: Iterable[MetadataName] = ("key",)) -> Any:
        """As `QueryResult.to_pandas`; the table is made in another thread."""
        from sow_client import _frames

        return await asyncio.to_thread(_frames.to_pandas, await self.to_arrow(schema=schema, metadata=metadata))

    async def to_polars(self, *, schema: object | None = None, metadata: Iterable[MetadataName] = ("key",)) -> Any:
        """As `QueryResult.to_polars`; the table is made in another thread."""
        from sow_client import _frames

        return await asyncio.to_thread(_frames.to_polars, await self.to_arrow(schema=schema, metadata=metadata))

    async def close(self) -> None:
        """Ends the call."""
        await self._batches.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
