"""A database of DuckDB for one text of SQL, in memory that has a bound.

[1]  The text cannot leave it: no files, no extensions, no settings, no variables of Python.
[2]  It and its files, in a temporary folder of its owner alone, are gone when the result is closed.
[3]  No value changes on its way: a column has the type that holds all its values exactly, else the JSON of each (as
     `to_arrow`). So the records of a topic are read twice.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self, TypeAlias

from sow_client._exports import Export
from sow_client._frames import PAYLOAD, library, to_pandas, to_polars
from sow_client._packed import PackedColumn, PackedRecords
from sow_client._payloads import PayloadForm
from sow_client._records import NEVER_MICROS, invalid
from sow_client._shapes import Shape
from sow_client._sql import METADATA, Statement, Wanted, of_duckdb

DEFAULT_MEMORY: Final = "1GB"
BATCH_RECORDS: Final = 20_000
_ROWS: Final = 10_000
_FIELDS_MAX: Final = 100
"""The server leaves out fields for a reader of no more than these (rule Q6)."""
_ANSWER: Final = '"sow answer"'
Filtered: TypeAlias = tuple[str | None, Mapping[str, object]]
"""A filter, and the values of its names."""


@dataclass(frozen=True, slots=True)
class SqlTopic:
    """A topic that a text of SQL has read."""

    topic: str
    as_of: datetime
    """The instant: its records are those that lived then."""
    bookmark: str | None
    """The position in its changes; None: the topic has no journal."""
    records: int
    """The records that were read."""
    columns: tuple[str, ...]
    filter: str | None
    """The condition that the server judged, with names for values; None: all records were read."""
    parameters: Mapping[str, object]


class SqlResult:
    """The answer of a SELECT. Its rows lie in DuckDB, on disk where they are many, until it is closed: use `with`."""

    def __init__(self, database: Database, topics: Sequence[SqlTopic]) -> None:
        self._database = database
        self.topics = {one.topic: one for one in topics}
        """The topics that it has read, each as it was at one instant."""
        self.columns = database.columns()
        """The names of its columns."""

    def batches(self) -> Iterator[Any]:
        """The rows as `pyarrow.RecordBatch`, piece by piece."""
        yield from self._database.rows()

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` of the rows."""
        return self._database.rows().schema

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows as tuples. A DECIMAL is a `Decimal`, a TIMESTAMP a `datetime`, a struct a `dict`."""
        for batch in self.batches():
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def to_arrow(self) -> Any:
        """The rows as a `pyarrow.Table`."""
        reader = self._database.rows()
        return library("pyarrow", "sql").Table.from_batches(reader, reader.schema)

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`, as `QueryResult.to_pandas` makes it. Needs `sow[pandas]`."""
        return to_pandas(self.to_arrow())

    def to_polars(self) -> Any:
        """The rows as a `polars.DataFrame`. Needs `sow[polars]`."""
        return to_polars(self.to_arrow())

    def close(self) -> None:
        """Removes the rows, and the files of DuckDB."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class Database:
    """DuckDB for one text ([1], [2])."""

    def __init__(self, statement: Statement, memory: str) -> None:
        duckdb = library("duckdb", "sql")
        library("pyarrow", "sql")
        self._duckdb = duckdb
        self._statement = statement
        folder = tempfile.mkdtemp(prefix="sow-sql-")
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._memory = memory
        config = {"temp_directory": folder, "memory_limit": memory, "autoinstall_known_extensions": "false"}
        config |= {"autoload_known_extensions": "false", "python_enable_replacements": "false"}
        try:
            self._connection = duckdb.connect(":memory:", config=config)
            self._connection.execute("SET TimeZone = 'UTC'")
            self._connection.execute("SET enable_external_access = false")
            self._connection.execute("SET lock_configuration = true")
            read = self._connection.extract_statements(statement.text)
        except duckdb.Error as error:
            self._remove()
            raise invalid("memory", f"{memory!r} is no size such as 500MB or 2GB: {error}") from error
        if len(read) != 1 or read[0].type != duckdb.StatementType.SELECT:
            self.close()
            raise invalid("sql", "only one SELECT reads topics")

    def reading(
        self, wanted: Wanted, form: PayloadForm, export: Export, filtered: Filtered, *, reduced: bool
    ) -> TableReading:
        """The reading of one topic. `reduced`: the server may leave out fields of other names than the text has."""
        return TableReading(self, self._statement, wanted, form, export, filtered, reduced=reduced)

    def create(self, wanted: Wanted, schema: Any) -> None:
        """An empty table, in place of one that is there."""
        if wanted.schema:
            self._connection.execute(f"CREATE SCHEMA IF NOT EXISTS {_quoted(wanted.schema)}")
        self._filled(wanted, "CREATE OR REPLACE TABLE {} AS", schema.empty_table())

    def insert(self, wanted: Wanted, batch: Any) -> None:
        """Some more records."""
        self._filled(wanted, "INSERT INTO {}", batch)

    def _filled(self, wanted: Wanted, words: str, table: Any) -> None:
        name = _quoted(wanted.table) if not wanted.schema else f"{_quoted(wanted.schema)}.{_quoted(wanted.table)}"
        self._connection.register("sow batch", table)
        try:
            self._connection.execute(words.format(name) + ' SELECT * FROM "sow batch"')
        except self._duckdb.Error as error:
            raise self._told(error) from error
        finally:
            with suppress(self._duckdb.Error):  # it has no memory for this either
                self._connection.unregister("sow batch")

    def run(self) -> None:
        """Runs the text. Raises InvalidArgument with DuckDB's error at its place."""
        statement = self._statement
        used = dict(statement.parameters)
        text = statement.text.rstrip().rstrip(";")
        try:
            # In a thread: a call of DuckDB in the main one would hold Ctrl-C back until it ends.
            with ThreadPoolExecutor(1, "sow-sql") as threads:
                running = threads.submit(
                    self._connection.execute, f"CREATE OR REPLACE TABLE {_ANSWER} AS\n{text}", used or None
                )
                try:
                    running.result()
                except BaseException:
                    self._connection.interrupt()
                    raise
        except self._duckdb.Error as error:
            raise self._told(error) from error

    def _told(self, error: Exception) -> Exception:
        if isinstance(error, self._duckdb.OutOfMemoryException):
            return invalid("memory", f"{self._memory} is too little for this text: allow more, or select less")
        shifted = _lines_up(str(error))
        return of_duckdb(self._statement.text, type(error)(shifted))

    def columns(self) -> tuple[str, ...]:
        """The columns of the answer."""
        return tuple(one[0] for one in self._connection.execute(f"SELECT * FROM {_ANSWER} LIMIT 0").description)

    def rows(self) -> Any:
        """The answer as a `pyarrow.RecordBatchReader`."""
        return self._connection.sql(f"SELECT * FROM {_ANSWER}").to_arrow_reader(_ROWS)

    def close(self) -> None:
        """Ends what runs, and removes everything ([2])."""
        with suppress(self._duckdb.Error):
            self._connection.interrupt()
        self._connection.close()
        self._remove()


class TableReading:
    """Makes a table of the records of an export, which are read twice ([3])."""

    def __init__(
        self,
        database: Database,
        statement: Statement,
        wanted: Wanted,
        form: PayloadForm,
        export: Export,
        filtered: Filtered,
        *,
        reduced: bool,
    ) -> None:
        self.export = export
        self.wanted = wanted
        self._database = database
        self._statement = statement
        self._form = form
        self._filtered = filtered
        self._names = statement.columns
        self._shapes: dict[str, Shape] = {}
        self._columns: dict[str, str] = {}
        self._schema: Any = None
        self._records = 0
        is_whole = form.message_type == "binary" and (self._names is None or PAYLOAD in self._names)
        self._whole = [PAYLOAD] if is_whole else []
        self.fields: tuple[str, ...] = ()
        """The top-level fields that the server may confine itself to; (): all."""
        if reduced and form.message_type == "json" and self._names and len(self._names) <= _FIELDS_MAX:
            self.fields = tuple(sorted(self._names))

    @property
    def found(self) -> frozenset[str]:
        """The names of its columns."""
        return frozenset([*self._shapes, *self._whole, *METADATA])

    @property
    def is_narrowed(self) -> bool:
        """True if the server leaves out records or fields."""
        return self._filtered[0] is not None or bool(self.fields)

    @property
    def told(self) -> SqlTopic:
        """The topic, as it was read."""
        text, values = self._filtered
        columns = (*self._columns, *self._whole, *self._metadata)
        return SqlTopic(
            self.wanted.topic, self.export.as_of, self.export.bookmark, self._records, columns, text, values
        )

    @property
    def metadata(self) -> tuple[PackedColumn, ...]:
        """The columns of metadata to ask for."""
        return tuple(name[1:] for name in self._metadata)  # type: ignore[misc]  # METADATA has their names

    @property
    def _metadata(self) -> list[str]:
        names = None if self._names is None else {name.lower() for name in self._names}
        return [name for name in METADATA if names is None or name in names]

    @property
    def looks(self) -> bool:
        """True if the text needs fields."""
        return self._form.message_type != "binary"

    def look(self, records: PackedRecords) -> None:
        """Learns the columns of some records."""
        columns: dict[str, list[object]] = {}
        for document in self._documents(records):
            for name, value in document.items():
                columns.setdefault(name, []).append(value)
        for name, values in columns.items():
            self._shapes.setdefault(name, Shape()).add(values)

    def begin(self) -> None:
        """All records were looked at: makes the table."""
        pa = library("pyarrow", "sql")
        taken = {name.lower() for name in (*METADATA, *self._whole)}
        for name in sorted(self._shapes, key=lambda one: (one != self._statement.spelled(one), one)):
            shown, number = name, 0
            while shown.lower() in taken:
                number += 1
                shown = f"{name}_{number}"
            taken.add(shown.lower())
            self._columns[shown] = name
        order = {name: place for place, name in enumerate(self._shapes)}
        self._columns = dict(sorted(self._columns.items(), key=lambda one: order[one[1]]))
        kinds = [(shown, self._shapes[name].kind(pa) or pa.string()) for shown, name in self._columns.items()]
        moment = pa.timestamp("us", tz="UTC")
        known = {"_key": pa.string(), "_origin": pa.string(), "_publish_time": moment, "_expire_time": moment}
        kinds += [(name, pa.binary()) for name in self._whole]
        kinds += [(name, known.get(name, pa.int64())) for name in self._metadata]
        self._schema = pa.schema(kinds or [("sow record", pa.null())])
        self._database.create(self.wanted, self._schema)

    def insert(self, records: PackedRecords) -> None:
        """Puts some records into the table."""
        pa, count = library("pyarrow", "sql"), records.count
        documents = self._documents(records) if self._columns else []
        arrays: list[Any] = []
        for shown, name in self._columns.items():
            values = [document.get(name) for document in documents]
            kind = self._schema.field(shown).type
            is_text = pa.types.is_string(kind)
            arrays.append(pa.array([PayloadForm.text(one) for one in values] if is_text else values, kind))
        arrays += [pa.array(_payloads(pa, records), pa.binary()) for _ in self._whole]
        arrays += [_METADATA[name](pa, records) for name in self._metadata]
        self._database.insert(self.wanted, pa.table(arrays or [pa.nulls(count)], schema=self._schema))
        self._records += count

    def _documents(self, records: PackedRecords) -> list[Mapping[str, object]]:
        pa, form, names = library("pyarrow", "sql"), self._form, self._names
        is_json = form.message_type == "json"
        lower = None if names is None else {name.lower() for name in names}
        documents: list[Mapping[str, object]] = []
        for payload in _payloads(pa, records):
            found: Any = form.document(payload) if is_json else form.fields(payload)
            if not isinstance(found, Mapping):
                documents.append({})
                continue
            kept = found if lower is None else {name: one for name, one in found.items() if str(name).lower() in lower}
            documents.append(kept if is_json else PayloadForm.in_columns(kept))  # type: ignore[arg-type]
        return documents


def _payloads(pa: Any, records: PackedRecords) -> list[bytes]:
    buffers = [None, pa.py_buffer(records.payload_offsets), pa.py_buffer(records.payloads)]
    return pa.Array.from_buffers(pa.binary(), records.count, buffers).to_pylist()  # type: ignore[no-any-return]


def _keys(pa: Any, records: PackedRecords) -> Any:
    buffers = [None, pa.py_buffer(records.key_offsets), pa.py_buffer(records.keys)]
    return pa.Array.from_buffers(pa.string(), records.count, buffers)


def _numbers(pa: Any, records: PackedRecords, data: bytes) -> Any:
    return pa.Array.from_buffers(pa.int64(), records.count, [None, pa.py_buffer(data)])


def _times(pa: Any, records: PackedRecords, data: bytes) -> Any:
    pc, micros = library("pyarrow.compute", "sql"), _numbers(pa, records, data)
    never = pa.scalar(None, pa.int64())
    return pc.if_else(pc.equal(micros, NEVER_MICROS), never, micros).cast(pa.timestamp("us", tz="UTC"))


def _origins(pa: Any, records: PackedRecords) -> Any:
    names = pa.array(records.origin_names, pa.string())
    if not records.origins:
        return pa.repeat(names[0], records.count) if records.count else pa.array([], pa.string())
    return names.take(pa.Array.from_buffers(pa.uint16(), records.count, [None, pa.py_buffer(records.origins)]))


_METADATA: Final[dict[str, Any]] = {
    "_key": _keys,
    "_version": lambda pa, records: _numbers(pa, records, records.versions),
    "_publish_time": lambda pa, records: _times(pa, records, records.publish_times),
    "_expire_time": lambda pa, records: _times(pa, records, records.expire_times),
    "_origin": _origins,
    "_sequence": lambda pa, records: _numbers(pa, records, records.sequences),
}


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _lines_up(told: str) -> str:
    """DuckDB's error about the text, which it saw one line further down."""
    before, line, rest = told.partition("\nLINE ")
    number, colon, rest = rest.partition(":")
    return f"{before}{line}{int(number) - 1}{colon}{rest}" if number.isdigit() else told
