"""SQL over topics: DuckDB runs a SELECT over their records, as they were at one instant in each cell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from sow_client._exports import Export, ExportOf
from sow_client._packed import PackedRecords
from sow_client._payloads import PayloadForm
from sow_client.aio._administration import AsyncAdministration
from sow_client.aio._snapshots import AsyncSnapshots
from sow_client.errors import InvalidArgument, SowError

if TYPE_CHECKING:  # few programs need them
    from sow_client._sql import SqlParameters
    from sow_client._sql_database import Database, SqlTopic, Table


class AsyncSqlResult:
    """The answer of a SELECT. Its rows lie in DuckDB, on disk where they are many, until it is closed: use `with`.

    In asyncio the rows are read, and tables made of them, in another thread.
    """

    def __init__(self, database: Database, topics: Sequence[SqlTopic], schema: Any) -> None:
        self._database = database
        self.topics = {one.topic: one for one in topics}
        """The topics that it has read; those of one cell as they were at one instant."""
        self.schema = schema
        """The `pyarrow.Schema` of the rows."""
        self.columns: tuple[str, ...] = tuple(schema.names)
        """The names of its columns."""

    async def batches(self) -> AsyncGenerator[Any, None]:
        """The rows as `pyarrow.RecordBatch`, piece by piece."""
        batches = await asyncio.to_thread(self._database.rows)
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            yield batch

    async def rows(self) -> AsyncGenerator[tuple[Any, ...], None]:
        """The rows as tuples. A DECIMAL is a `Decimal`, a TIMESTAMP a `datetime`, a struct a `dict`."""
        from sow_client import _sql_database

        async for batch in self.batches():
            for row in _sql_database.tuples(batch):
                yield row

    def __aiter__(self) -> AsyncGenerator[tuple[Any, ...], None]:
        """As `rows`."""
        return self.rows()

    async def to_arrow(self) -> Any:
        """The rows as a `pyarrow.Table`."""
        from sow_client import _frames

        batches = [batch async for batch in self.batches()]
        return _frames.library("pyarrow", "sql").Table.from_batches(batches, self.schema)

    async def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`, as `QueryResult.to_pandas` makes it. Needs `sow[pandas]`."""
        from sow_client import _frames

        return await asyncio.to_thread(_frames.to_pandas, await self.to_arrow())

    async def to_polars(self) -> Any:
        """The rows as a `polars.DataFrame`. Needs `sow[polars]`."""
        from sow_client import _frames

        return await asyncio.to_thread(_frames.to_polars, await self.to_arrow())

    async def close(self) -> None:
        """Removes the rows, and the files of DuckDB."""
        await asyncio.to_thread(self._database.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class AsyncSql(AsyncAdministration, AsyncSnapshots):
    """Answers SQL."""

    async def sql(
        self,
        text: str,
        parameters: SqlParameters | None = None,
        *,
        memory: str = "1GB",
        push: bool = True,
    ) -> AsyncSqlResult:
        """Answers one SELECT of DuckDB over topics. `parameters` are the values of `$name` in the text.

        Tables are topics, columns the top-level fields of their records and the metadata `_key`, `_version`,
        `_publish_time`, `_expire_time` (null: never), `_origin` and `_sequence`. All topics of a cell are read as
        they were at one instant, which `result.topics` tells. The server judges conditions that it can, and DuckDB all
        of them. `push=False` reads all records, for the same answer. `memory` bounds DuckDB; beyond it lie temporary
        files.

        Raises InvalidArgument for a text that is no SELECT over topics, or needs more memory. Needs `sow[sql]`.

        In asyncio DuckDB works in another thread.

        Rules: Q6, Q8.
        """
        from sow_client import _sql, _sql_database

        statement = _sql.parsed(text, parameters)
        database = await asyncio.to_thread(_sql_database.Database, statement, memory)
        try:
            tables, schema = await self._tables(database, push=push, whole=False), None
            if tables is not None:
                try:
                    schema = await asyncio.to_thread(database.run)
                except InvalidArgument as error:
                    if error.details.get("field") != "sql" or not any(table.is_narrowed for table in tables):
                        raise
            if tables is None or schema is None:
                # All records may have other columns, or columns of other types (_sql [3]).
                tables = await self._tables(database, push=False, whole=True) or []
                schema = await asyncio.to_thread(database.run)
            return AsyncSqlResult(database, [table.told for table in tables], schema)
        except BaseException:
            await asyncio.to_thread(database.close)
            raise

    async def _tables(self, database: Database, *, push: bool, whole: bool) -> list[Table] | None:
        """Reads the topics; None: the text needs all their records."""
        from sow_client import _sql_database

        statement = database.statement
        settings = {name: (await self.describe_topic(name)).settings for name in statement.topics}
        forms = {name: PayloadForm(one.message_type, one.fix_separator) for name, one in settings.items()}
        choices = {name: None if whole else statement.choice(name, form.message_type) for name, form in forms.items()}
        filters = {
            name: choice.filtered if choice is not None and push else (None, {}) for name, choice in choices.items()
        }
        exports: dict[str, Export] = {}  # by topic
        try:
            for together in self._cells.together(filters):
                export = await self.open_export([ExportOf(name, *filters[name]) for name in together])
                exports.update(dict.fromkeys(together, export))
            tables = [
                _sql_database.Table(
                    database,
                    name,
                    form,
                    choices[name],
                    exports[name] if settings[name].journal else replace(exports[name], bookmark=None),
                    filters[name],
                    whole=whole,
                )
                for name, form in forms.items()
            ]
            for table in tables:
                if table.has_fields:
                    await self._read_table(table, table.look)
            lacks = statement.lacks({table.topic: table.found for table in tables})
            if any(table.is_doubtful or (lacks and table.is_narrowed) for table in tables):
                return None
            for table in tables:
                await asyncio.to_thread(table.begin)
                await self._read_table(table, table.insert)
        finally:
            for identifier in {export.id for export in exports.values()}:
                with suppress(SowError):  # it ends by itself
                    await self.close_export(identifier)
        return tables

    async def _read_table(self, table: Table, work: Callable[[PackedRecords], None]) -> None:
        from sow_client._sql_database import BATCH_RECORDS

        export, columns = table.export, table.packed
        for part in export.parts_of(table.topic):
            async for records in self.read_export(
                export.id, part, columns=columns, batch_size=BATCH_RECORDS, fields=table.fields
            ):
                await asyncio.to_thread(work, records)
