"""A database of DuckDB for one text of SQL, in memory that has a bound.

[1]  The text cannot leave it: no files, no extensions, no settings, no variables of Python.
[2]  It and its files, in a temporary folder of its owner alone, are gone when the result is closed.
[3]  No value changes on its way: a column has the type that holds all its values exactly, else the JSON of each (as
     `to_arrow`). So the records of a topic are read twice.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import compress, count
from time import sleep
from types import NoneType
from typing import Any, Final

from sow_client._exports import Export
from sow_client._frames import PAYLOAD, library
from sow_client._packed import PackedColumn, PackedRecords
from sow_client._payloads import PayloadForm
from sow_client._records import NEVER_MICROS, invalid
from sow_client._shapes import Shape
from sow_client._sql import METADATA, Choice, Statement, of_duckdb
from sow_client._statuses import closed

BATCH_RECORDS: Final = 20_000
_ROWS: Final = 10_000
_FIELDS_MAX: Final = 100
"""The server leaves out fields for a reader of no more than these (rule Q6)."""
_MOMENT_SECONDS: Final = 0.01
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
        if memory.lstrip().startswith("-"):  # DuckDB takes it for no bound
            raise invalid("memory", f"{memory!r} is no size such as 500MB or 2GB")
        self._duckdb = duckdb
        self.statement = statement
        self._memory = memory
        folder = tempfile.mkdtemp(prefix="sow-sql-")
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        config = {"temp_directory": folder, "memory_limit": memory, "autoinstall_known_extensions": "false"}
        config |= {"autoload_known_extensions": "false", "python_enable_replacements": "false"}
        try:
            self._connection = duckdb.connect(":memory:", config=config)
            for setting in (
                "TimeZone = 'UTC'", "enable_progress_bar = false", "enable_external_access = false",
                "lock_configuration = true",
            ):  # fmt: skip
                self._connection.execute(f"SET {setting}")
        except duckdb.Error as error:
            self._remove()
            raise invalid("memory", f"{memory!r} is no size such as 500MB or 2GB: {error}") from error

    def fill(self, topic: str, table: Any, *, is_new: bool) -> None:
        """Puts records into the table of a topic. `is_new`: in place of one that is there."""
        parts = list(map(_quoted, self.statement.topics[topic].parts))
        name = ".".join(parts)
        words = f"CREATE OR REPLACE TABLE {name} AS" if is_new else f"INSERT INTO {name}"
        try:
            if is_new and len(parts) > 1:
                self._connection.execute(f"CREATE SCHEMA IF NOT EXISTS {parts[0]}")
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
                    while not running.done():  # one that has not begun yet is not interrupted
                        self._connection.interrupt()
                        sleep(_MOMENT_SECONDS)
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
        if not self._remove.alive:
            raise closed("result")
        return iter(self._reader())

    def _reader(self) -> Any:
        return self._connection.cursor().sql(f"SELECT * FROM {_ANSWER}").to_arrow_reader(_ROWS)

    def close(self) -> None:
        """Ends what runs, also in another thread, and removes everything ([2])."""
        while self._remove.alive:
            with suppress(self._duckdb.Error):
                self._connection.interrupt()
            try:
                self._connection.close()
            except self._duckdb.Error:  # the call of another thread has not ended yet
                sleep(_MOMENT_SECONDS)
            else:
                self._remove()


def tuples(batch: Any) -> Iterator[tuple[Any, ...]]:
    """The rows of a batch. Raises InvalidArgument for a time that Python has not."""
    try:
        return zip(*(column.to_pylist() for column in batch.columns), strict=True)
    except (OverflowError, ValueError) as error:
        raise invalid("sql", f"make a text of a time beyond the years 1 to 9999, with ::VARCHAR: {error}") from error


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
        self.has_fields = form.message_type != "binary"
        self._database = database
        self._form = form
        self._choice = choice
        self._filtered = filtered
        names = database.statement.columns
        lower = None if names is None else {name.lower() for name in names}
        # The field of a column `a_1` may be `a` or `A`.
        self._names = None if lower is None else lower | {re.sub(r"_\d+$", "", name) for name in lower}
        """The names that the text may mean, in lower case; None: any."""
        self._shapes: dict[str, Shape] = {}
        self._others: set[str] = set()
        """The fields that it does not name."""
        self._columns: dict[str, str] = {}
        """The fields by the names of their columns."""
        self._more = [name for name in METADATA if lower is None or name in lower]
        """The columns that are no fields."""
        if not self.has_fields and (lower is None or PAYLOAD in lower):
            self._more.insert(0, PAYLOAD)
        self._schema: Any = None
        self._records = 0
        is_reduced = not whole and form.message_type == "json" and names and len(names) <= _FIELDS_MAX
        self.fields = tuple(sorted(names)) if is_reduced and names else ()
        """The top-level fields that the server may confine itself to; (): all."""

    @property
    def found(self) -> frozenset[str]:
        """The names of its columns that have values."""
        having = [name for name, shape in self._shapes.items() if shape.kinds != {NoneType}]
        return frozenset([*having, *METADATA, *self._more])

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
        columns = (*self._columns, *self._more)
        return SqlTopic(self.topic, self.export.as_of, self.export.bookmark, self._records, columns, *self._filtered)

    @property
    def packed(self) -> tuple[PackedColumn, ...]:
        """The columns of the export that it needs."""
        return ("payload", *[name[1:] for name in self._more if name != PAYLOAD])  # type: ignore[arg-type]  # METADATA

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
        seen = {*METADATA, *self._more}
        taken = seen | {name.lower() for name in self._shapes}
        names: dict[str, str] = {}
        for name in sorted(self._shapes, key=lambda one: (one != statement.spelled(one), one)):
            others = (other for at in count(1) if (other := f"{name}_{at}").lower() not in taken)
            names[name] = next(others) if name.lower() in seen else name
            seen.add(name.lower())
            taken.add(names[name].lower())
        self._columns = {names[name]: name for name in self._shapes}
        if not self._columns and not self._more:
            self._more = ["_version"]  # DuckDB has no table without columns
        kinds = {shown: self._shapes[name].kind(pa) or pa.string() for shown, name in self._columns.items()}
        known = {str: pa.string(), int: pa.int64(), datetime: pa.timestamp("us", tz="UTC"), bytes: pa.binary()}
        kinds |= {name: known[METADATA.get(name, bytes)] for name in self._more}
        self._schema = pa.schema(
            [(name, pa.string() if pa.types.is_null(kind) else kind) for name, kind in kinds.items()]
        )
        self._database.fill(self.topic, self._schema.empty_table(), is_new=True)

    def insert(self, records: PackedRecords) -> None:
        """Puts some records into the table."""
        pa = library("pyarrow", "sql")
        documents, more = self._chosen(records)
        arrays: list[Any] = []
        for shown, name in self._columns.items():
            values, kind = [document.get(name) for document in documents], self._schema.field(shown).type
            arrays.append(pa.array(map(PayloadForm.text, values) if pa.types.is_string(kind) else values, kind))
        self._database.fill(self.topic, pa.table([*arrays, *more], schema=self._schema), is_new=False)
        self._records += records.count

    def _chosen(self, records: PackedRecords) -> tuple[list[Mapping[str, object]], list[Any]]:
        """The fields of the chosen records, and their other columns."""
        pa, pc = library("pyarrow", "sql"), library("pyarrow.compute", "sql")
        more = [_column(pa, records, name) for name in self._more]
        payloads = _column(pa, records, PAYLOAD).to_pylist() if self.has_fields else []
        documents = list(map(self._fields, payloads)) if self.has_fields else [{}] * records.count
        if self._choice is None:
            return documents, more
        plain = {
            name: (column.cast(pa.int64()) if METADATA.get(name) is datetime else column).to_pylist()
            for name, column in zip(self._more, more, strict=True)
        }
        rows = [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)] or documents
        mask = [self._choice.holds({**one, **row}) for one, row in zip(documents, rows, strict=True)]
        return list(compress(documents, mask)), [pc.filter(column, pa.array(mask)) for column in more]

    def _fields(self, payload: bytes) -> Mapping[str, object]:
        """The fields that the text may need."""
        is_json = self._form.message_type == "json"
        found: Any = self._form.document(payload) if is_json else self._form.fields(payload)
        if not isinstance(found, Mapping):
            return {}
        if self._names is not None:
            self._others.update([name for name in found if name.lower() not in self._names])
            found = {name: one for name, one in found.items() if name.lower() in self._names}
        return found if is_json else PayloadForm.in_columns(found)  # type: ignore[return-value]  # a mapping stays one


def _column(pa: Any, records: PackedRecords, name: str) -> Any:
    def array(kind: Any, *buffers: bytes) -> Any:
        return pa.Array.from_buffers(kind, records.count, [None, *map(pa.py_buffer, buffers)])

    if name == PAYLOAD:
        return array(pa.binary(), records.payload_offsets, records.payloads)
    if name == "_key":
        return array(pa.string(), records.key_offsets, records.keys)
    if name == "_origin":
        places = records.origins or bytes(2 * records.count)
        return pa.array(records.origin_names, pa.string()).take(array(pa.uint16(), places))
    numbers = array(pa.int64(), getattr(records, f"{name[1:]}s"))
    if METADATA[name] is int:
        return numbers
    pc = library("pyarrow.compute", "sql")
    never = pa.scalar(None, pa.int64())
    return pc.if_else(pc.equal(numbers, NEVER_MICROS), never, numbers).cast(pa.timestamp("us", tz="UTC"))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
