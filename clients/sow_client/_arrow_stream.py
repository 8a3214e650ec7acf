"""Answers as streams of Arrow, a batch at a time: what polars, DuckDB and pyarrow read by themselves.

[1]  The columns and their types are those of the first `SCHEMA_RECORDS` records, which `to_arrow` would give. No
     more than those and one batch are held.
[2]  A later record with another field, or with a value of another type, ends the stream with an error that names
     the field. Nothing is left out, cut or rounded.
[3]  A stream has all records of the answer, or ends with an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from sow_client import _frames
from sow_client._frames import MetadataName
from sow_client._payloads import PayloadForm
from sow_client._records import RecordBatch, invalid

SCHEMA_RECORDS: Final = 10_000
_HINT: Final = "to_arrow() reads all records before it chooses the types, and to_arrow(schema=...) takes yours"


class ArrowStream:
    """An answer that is read once. A library may ask for the stream more than once, as DuckDB does to learn the columns
    first: all of these begin with the first record, and the one that is read ends the others ([3])."""

    def __init__(self, batches: Iterator[RecordBatch], metadata: Iterable[MetadataName]) -> None:
        self._pa = _frames.library("pyarrow", "arrow")
        self._metadata = tuple(metadata)
        first: list[RecordBatch] = []
        records = 0
        while records < SCHEMA_RECORDS and (batch := next(batches, None)) is not None:
            first.append(batch)
            records += len(batch)
        self._head: Any = _frames.to_arrow(first, None, self._metadata)
        self._schema = self._head.schema
        self._rest = batches

    def reader(self) -> Any:
        """A `pyarrow.RecordBatchReader` of the whole answer."""
        return self._pa.RecordBatchReader.from_batches(self._schema, self._read())

    def _read(self) -> Iterator[Any]:
        head, self._head = self._head, None
        if head is None:
            raise invalid(
                "result", "was read already: an answer is read once, and a second query shows another instant"
            )
        yield from head.to_batches()
        del head
        for batch in self._rest:
            yield from _alike(self._pa, batch, self._schema, self._metadata).to_batches()


def _alike(pa: Any, batch: RecordBatch, schema: Any, metadata: tuple[MetadataName, ...]) -> Any:
    """A later batch with the columns of the first ones ([2])."""
    found = _frames.to_arrow([batch], None, metadata)
    if found.schema.equals(schema):
        return found
    for field in found.schema:
        if schema.get_field_index(field.name) < 0:
            raise invalid("schema", f"the field {field.name!r} came after the first {SCHEMA_RECORDS} records; {_HINT}")
    documents: list[Any] | None = None
    columns = []
    for field in schema:
        at = found.schema.get_field_index(field.name)
        if at < 0:
            columns.append(pa.nulls(len(batch), field.type))
        elif found.schema.field(at).type == field.type:
            columns.append(found.column(at))
        elif pa.types.is_string(field.type) and not pa.types.is_binary(
            found.schema.field(at).type
        ):  # of several types, each value as its JSON
            documents = documents or _frames.documents(batch)
            columns.append(pa.array([PayloadForm.text(one.get(field.name)) for one in documents], pa.string()))
        elif _fits(pa, found.schema.field(at).type, field.type):
            documents = documents or _frames.documents(batch)
            columns.append(_read(pa, [one.get(field.name) for one in documents], field))
        else:
            raise _other(field, found.schema.field(at).type)
    return pa.table(columns, schema=schema)


def _read(pa: Any, values: list[Any], field: Any) -> Any:
    try:
        return pa.array(values, field.type)  # refuses a whole number that a float would round
    except (pa.ArrowException, OverflowError) as error:
        raise invalid("schema", f"the field {field.name!r} has values that are not {field.type}: {error}") from error


def _fits(pa: Any, kind: Any, wanted: Any) -> bool:
    """Every value of a type is one of the other, too: it has no more fields, and its numbers are as wide."""
    types = pa.types
    if kind == wanted or types.is_null(kind):
        return True
    if types.is_struct(kind) and types.is_struct(wanted):
        indexes = [(below, wanted.get_field_index(below.name)) for below in kind]
        return all(at >= 0 and _fits(pa, below.type, wanted.field(at).type) for below, at in indexes)
    if types.is_list(kind) and types.is_list(wanted):
        return _fits(pa, kind.value_type, wanted.value_type)
    return bool(types.is_integer(kind) and (types.is_floating(wanted) or wanted == pa.uint64()))


def _other(field: Any, kind: Any) -> Exception:
    return invalid(
        "schema",
        f"the field {field.name!r} is {kind} after the first {SCHEMA_RECORDS} records, and {field.type} in them; "
        f"{_HINT}",
    )
