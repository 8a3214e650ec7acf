"""SQL over topics: DuckDB runs a SELECT over the records of each, as they were at one instant."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from sow_client._packed import PackedColumn
from sow_client._payloads import PayloadForm
from sow_client.aio._administration import AsyncAdministration
from sow_client.aio._snapshots import AsyncSnapshots
from sow_client.errors import InvalidArgument, SowError

if TYPE_CHECKING:  # few programs need them
    from sow_client._sql import SqlParameters, Statement
    from sow_client._sql_database import Database, SqlResult, TableReading


class AsyncSql(AsyncAdministration, AsyncSnapshots):
    """Answers SQL."""

    async def sql(
        self,
        text: str,
        parameters: SqlParameters | None = None,
        *,
        memory: str = "1GB",
        push: bool = True,
    ) -> SqlResult:
        """Answers one SELECT of DuckDB over topics. `parameters` are the values of `$name` in the text.

        Tables are topics, columns the top-level fields of their records and the metadata `_key`, `_version`,
        `_publish_time`, `_expire_time` (null: never), `_origin` and `_sequence`. Each topic is read as it was at one
        instant, which `result.topics` tells; two topics have two. The server judges conditions that it can, and DuckDB
        all of them. `push=False` reads all records. `memory` bounds DuckDB; beyond it lie temporary files.

        Raises InvalidArgument for a text that is no SELECT over topics, or needs more memory. Needs `sow[sql]`.

        In asyncio DuckDB works in another thread.

        Rules: Q6, Q8.
        """
        from sow_client import _sql, _sql_database

        statement = _sql.parsed(text, parameters)
        database = await asyncio.to_thread(_sql_database.Database, statement, memory)
        try:
            read = await self._read_topics(statement, database, push=push, reduced=True)
            narrowed = any(one.is_narrowed for one in read.values())
            # A column that was read nowhere may be in other records, or have another spelling.
            again = narrowed and statement.lacking({topic: one.found for topic, one in read.items()})
            if not again:
                try:
                    await asyncio.to_thread(database.run)
                except InvalidArgument:
                    # All records together may give the columns other types.
                    if not narrowed:
                        raise
                    again = True
            if again:
                read = await self._read_topics(statement, database, push=False, reduced=False)
                await asyncio.to_thread(database.run)
            return _sql_database.SqlResult(database, [one.told for one in read.values()])
        except BaseException:
            database.close()
            raise

    async def _read_topics(
        self, statement: Statement, database: Database, *, push: bool, reduced: bool
    ) -> dict[str, TableReading]:
        read: dict[str, TableReading] = {}
        try:
            for name, wanted in statement.topics.items():
                settings = (await self.describe_topic(name)).settings
                form = PayloadForm(settings.message_type, settings.fix_separator)
                filtered = statement.filter(name, form.message_type) if push else (None, {})
                export = await self.open_export(name, *filtered)
                read[name] = database.reading(wanted, form, export, filtered, reduced=reduced)
            for reading in read.values():
                await self._read_topic(reading)
        finally:
            for reading in read.values():
                with suppress(SowError):  # it ends by itself
                    await self.close_export(reading.export.id)
        return read

    async def _read_topic(self, reading: TableReading) -> None:
        from sow_client import _sql_database

        export, most = reading.export, _sql_database.BATCH_RECORDS
        payload: tuple[PackedColumn, ...] = ("payload",)
        for part in range(len(export.parts)) if reading.looks else ():
            looked = self.read_export(export.id, part, columns=payload, batch_size=most, fields=reading.fields)
            async for records in looked:
                await asyncio.to_thread(reading.look, records)
        await asyncio.to_thread(reading.begin)
        columns = (*payload, *reading.metadata)
        for part in range(len(export.parts)):
            async for records in self.read_export(
                export.id, part, columns=columns, batch_size=most, fields=reading.fields
            ):
                await asyncio.to_thread(reading.insert, records)
