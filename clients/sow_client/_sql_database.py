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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count
from types import NoneType
from typing import Any, Final

from sow_client._exports import Export
from sow_client._frames import PAYLOAD, library
from sow_client._packed import PackedColumn, PackedRecords
from sow_client._payloads import PayloadForm
from sow_client._records import NEVER_MICROS, invalid
from sow_client._shapes import Shape
from sow_client._sql import METADATA, Choice, Statement, of_duckdb

BATCH_RECORDS: Final = 20_000
_ROWS: Final = 10_000
_FIELDS_MAX: Final = 100
"""The server leaves out fields for a reader of no more than these (rule Q6)."""
_ANSWER: Final = '"sow answer"'


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


class Database:
    """DuckDB for one text ([1], [2])."""

    def __init__(self, statement: Statement, memory: str) -> None:
        duckdb = library("duckdb", "sql")
        library("pyarrow", "sql")
        self._duckdb = duckdb
        self.statement = statement
        self._memory = memory
        folder = tempfile.mkdtemp(prefix="sow-sql-")
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        config = {"temp_directory": folder, "memory_limit": memory, "autoinstall_known_extensions": "false"}
        config |= {"autoload_known_extensions": "false", "python_enable_replacements": "false"}
        try:
            self._connection = duckdb.connect(":memory:", config=config)
            for setting in ("TimeZone = 'UTC'", "enable_external_access = false", "lock_configuration = true"):
                self._connection.execute(f"SET {setting}")
        except duckdb.Error as error:
            self._remove()
            raise invalid("memory", f"{memory!r} is no size such as 500MB or 2GB: {error}") from error

    def fill(self, topic: str, table: Any, *, is_new: bool) -> None:
        """Puts records into the table of a topic. `is_new`: in place of one that is there."""
        wanted = self.statement.topics[topic]
        name = ".".join(_quoted(part) for part in (wanted.schema, wanted.table) if part)
        words = f"CREATE OR REPLACE TABLE {name} AS" if is_new else f"INSERT INTO {name}"
        try:
            if is_new and wanted.schema:
                self._connection.execute(f"CREATE SCHEMA IF NOT EXISTS {_quoted(wanted.schema)}")
            self._connection.register("sow batch", table)
            self._connection.execute(f'{words} SELECT * FROM "sow batch"')
        except self._duckdb.Error as error:
            raise self._told(error) from error
        finally:
            with suppress(self._duckdb.Error):  # it has no memory for this either
                self._connection.unregister("sow batch")

    def run(self) -> Any:
        """Runs the text. The schema of its answer. Raises InvalidArgument with DuckDB's error at its place."""
        text = f"CREATE OR REPLACE TABLE {_ANSWER} AS\n{self.statement.text.rstrip().rstrip(';')}"
        try:
            # In a thread: a call of DuckDB in the main one would hold Ctrl-C back until it ends.
            with ThreadPoolExecutor(1, "sow-sql") as threads:
                running = threads.submit(self._connection.execute, text, dict(self.statement.parameters) or None)
                try:
                    running.result()
                except BaseException:
                    self._connection.interrupt()
                    raise
            return self._reader().schema
        except self._duckdb.Error as error:
            raise self._told(error) from error

    def _told(self, error: Exception) -> Exception:
        if isinstance(error, self._duckdb.OutOfMemoryException):
            return invalid("memory", f"{self._memory} is too little for this text: allow more, or select less")
        return of_duckdb(self.statement.text, error, lines_before=1)

    def rows(self) -> Iterator[Any]:
        """The answer as batches of Arrow."""
        return iter(self._reader())

    def _reader(self) -> Any:
        return self._connection.cursor().sql(f"SELECT * FROM {_ANSWER}").to_arrow_reader(_ROWS)

    def close(self) -> None:
        """Ends what runs, and removes everything ([2])."""
        with suppress(self._duckdb.Error):
            self._connection.interrupt()
        self._connection.close()
        self._remove()


class Table:
    """Becomes the table of a topic. All records of an export are looked at, and then inserted ([3])."""

    def __init__(
        self,
        database: Database,
        topic: str,
        form: PayloadForm,
        choice: Choice | None,
        export: Export,
        filtered: tuple[str | None, Mapping[str, object]],
        *,
        whole: bool,
    ) -> None:
        """`choice`: chooses the records (_sql [2]). `filtered`: the filter of the export, with its values. `whole`: the
        server leaves out no field."""
        self.topic = topic
        self.export = export
        self._filtered = filtered
        self._database = database
        self._form = form
        self._choice = choice
        names = database.statement.columns
        self._lower = lower = None if names is None else {name.lower() for name in names}
        self._shapes: dict[str, Shape] = {}
        self._others: set[str] = set()
        """The names of fields that the text does not name."""
        self._columns: dict[str, str] = {}
        """The fields by the names of their columns."""
        self._schema: Any = None
        self._records = 0
        self.is_binary = form.message_type == "binary"
        self._metadata = [name for name in METADATA if lower is None or name in lower]
        self._whole = [PAYLOAD] if self.is_binary and (lower is None or PAYLOAD in lower) else []
        is_reduced = not whole and form.message_type == "json" and names and len(names) <= _FIELDS_MAX
        self.fields = tuple(sorted(names)) if is_reduced and names else ()
        """The top-level fields that the server may confine itself to; (): all."""

    @property
    def found(self) -> frozenset[str]:
        """The names of its columns that have values."""
        having = [name for name, shape in self._shapes.items() if shape.kinds != {NoneType}]
        return frozenset([*having, *self._whole, *METADATA])

    @property
    def is_narrowed(self) -> bool:
        """True if records or fields were left out."""
        return self._choice is not None or bool(self.fields)

    @property
    def is_doubtful(self) -> bool:
        """True if all records may be another table for the text (_sql [3])."""
        return self._choice is not None and self._choice.doubts({name: one.kinds for name, one in self._shapes.items()})

    @property
    def told(self) -> SqlTopic:
        """The topic, as it was read."""
        export, columns = self.export, (*self._columns, *self._whole, *self._metadata)
        return SqlTopic(self.topic, export.as_of, export.bookmark, self._records, columns, *self._filtered)

    @property
    def packed(self) -> tuple[PackedColumn, ...]:
        """The columns of the export that it needs."""
        return ("payload", *[name[1:] for name in self._metadata])  # type: ignore[arg-type]  # METADATA has them

    def look(self, records: PackedRecords) -> None:
        """Learns the columns of some records."""
        columns: dict[str, list[object]] = {}
        for document in self._chosen(records)[0]:
            for name, value in document.items():
                columns.setdefault(name, []).append(value)
        for name, values in columns.items():
            self._shapes.setdefault(name, Shape()).add(values)

    def begin(self) -> None:
        """All records were looked at: makes the table."""
        pa, statement = library("pyarrow", "sql"), self._database.statement
        found = {name.lower() for name in self.found}
        if any(
            must and topics == (self.topic,) and name.lower() not in found for name, topics, must in statement.named
        ):
            self._shapes |= {name: Shape() for name in self._others}  # so that DuckDB's error names them
        taken = {name.lower() for name in (*METADATA, *self._whole)}
        names: dict[str, str] = {}
        for name in sorted(self._shapes, key=lambda one: (one != statement.spelled(one), one)):
            spellings = chain([name], (f"{name}_{at}" for at in count(1)))
            names[name] = next(one for one in spellings if one.lower() not in taken)
            taken.add(names[name].lower())
        self._columns = {names[name]: name for name in self._shapes}
        if not (self._columns or self._whole or self._metadata):
            self._metadata = ["_version"]  # DuckDB has no table without columns
        kinds = [(shown, self._shapes[name].kind(pa) or pa.string()) for shown, name in self._columns.items()]
        kinds = [(name, pa.string() if pa.types.is_null(kind) else kind) for name, kind in kinds]
        kinds += [(name, pa.binary()) for name in self._whole]
        known = {str: pa.string(), int: pa.int64(), datetime: pa.timestamp("us", tz="UTC")}
        kinds += [(name, known[METADATA[name]]) for name in self._metadata]
        self._schema = pa.schema(kinds)
        self._database.fill(self.topic, self._schema.empty_table(), is_new=True)

    def insert(self, records: PackedRecords) -> None:
        """Puts some records into the table."""
        pa = library("pyarrow", "sql")
        documents, others = self._chosen(records)
        arrays: list[Any] = []
        for shown, name in self._columns.items():
            values, kind = [document.get(name) for document in documents], self._schema.field(shown).type
            arrays.append(pa.array(map(PayloadForm.text, values) if pa.types.is_string(kind) else values, kind))
        self._database.fill(self.topic, pa.table([*arrays, *others], schema=self._schema), is_new=False)
        self._records += records.count

    def _chosen(self, records: PackedRecords) -> tuple[list[Mapping[str, object]], list[Any]]:
        """The fields of the chosen records, and their columns of other kinds."""
        pa, pc = library("pyarrow", "sql"), library("pyarrow.compute", "sql")
        payloads = _texts(pa, pa.binary(), records, records.payload_offsets, records.payloads)
        others = [payloads for _ in self._whole] + [_METADATA[name](pa, records) for name in self._metadata]
        documents = [{}] * records.count if self.is_binary else [self._fields(one) for one in payloads.to_pylist()]
        if self._choice is not None:
            plain = {
                name: (column.cast(pa.int64()) if METADATA[name] is datetime else column).to_pylist()
                for name, column in zip(self._metadata, others[len(self._whole) :], strict=True)
            }
            rows = [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)] or documents
            holds = self._choice.holds
            mask = [holds({**document, **row}) for document, row in zip(documents, rows, strict=True)]
            documents = [document for document, is_chosen in zip(documents, mask, strict=True) if is_chosen]
            others = [pc.filter(column, pa.array(mask)) for column in others]
        return documents, others

    def _fields(self, payload: bytes) -> Mapping[str, object]:
        """The fields that the text may need."""
        is_json = self._form.message_type == "json"
        found: Any = self._form.document(payload) if is_json else self._form.fields(payload)
        if not isinstance(found, Mapping):
            return {}
        if self._lower is not None:
            self._others.update([name for name in found if name.lower() not in self._lower])
            found = {name: one for name, one in found.items() if name.lower() in self._lower}
        return found if is_json else PayloadForm.in_columns(found)  # type: ignore[return-value]  # a mapping stays one


def _texts(pa: Any, kind: Any, records: PackedRecords, offsets: bytes, data: bytes) -> Any:
    return pa.Array.from_buffers(kind, records.count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


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
    "_key": lambda pa, records: _texts(pa, pa.string(), records, records.key_offsets, records.keys),
    "_version": lambda pa, records: _numbers(pa, records, records.versions),
    "_publish_time": lambda pa, records: _times(pa, records, records.publish_times),
    "_expire_time": lambda pa, records: _times(pa, records, records.expire_times),
    "_origin": _origins,
    "_sequence": lambda pa, records: _numbers(pa, records, records.sequences),
}


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
