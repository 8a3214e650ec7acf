"""Json documents into Arrow columns: a fast way over a whole batch, and the careful way of `converting`.

[1]  The fast way is Arrow's reader of JSON. The result never depends on which way was taken: the fast way is given up
     wherever it refuses a document, or could give a different result.
[2]  A document that does not fit raises `Misfit` (FAILFAST), has null for the value that does not fit (PERMISSIVE), or
     is left out (DROPMALFORMED). PERMISSIVE raises, too, where nothing around the value may be null.
[3]  A field that the schema lacks is left out, or kept in a column of its own (`rescue`), or its document does not fit
     (`fail`), also with PERMISSIVE. The fast way refuses such fields where they matter.
[4]  A removal that tells its key alone has no document (rules A4, F18). Its fields are null in every mode, unless one
     of them must not be.
"""

from __future__ import annotations

import inspect
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    FloatType,
    MapType,
    StructType,
    TimestampNTZType,
    VariantType,
)

from sow_client import PackedRecords
from sow_spark.converting import NOTHING, SHOWN_MAX, Misfit, NoFit, beyond, binary, compact, converter, parsed
from sow_spark.options import NewFields, ParseMode

RUN: Final = 500
"""If the fast way refuses a batch, it tries runs of this many documents, so that one odd document does not make the
whole batch slow."""


class Documents:
    """Decodes json documents into the fields of a schema."""

    def __init__(self, fields: StructType, mode: ParseMode, new_fields: NewFields = "ignore") -> None:
        self._mode = mode
        self._new_fields = new_fields
        self._fields = fields
        self._types: list[DataType] = [field.dataType for field in fields.fields]
        self._names = fields.names
        self._targets: list[pa.DataType] = [field.type for field in arrow_schema(fields)]
        self._required = [not field.nullable for field in fields.fields]
        self._converters = [
            converter(field.dataType, field.nullable, f"/{field.name}", mode == "PERMISSIVE") for field in fields.fields
        ]
        # A schema with a map, or another type that Arrow's reader does not make, has no fast way.
        self._fast = (
            pa.schema([(field.name, _readable(field.dataType)) for field in fields.fields])
            if fields.fields and all(_is_readable(field.dataType) for field in fields.fields)
            else None
        )

    def decode(self, packed: PackedRecords) -> tuple[list[pa.Array], list[int]]:
        """A column for each field without the dropped rows, and the dropped rows. With `rescue` the last column has the
        other fields. Raises Misfit."""
        if packed.count == 0:
            extra = [pa.array([], pa.string())] if self._new_fields == "rescue" else []
            return [*(pa.array([], kind) for kind in self._targets), *extra], []
        if (fast := self._read(packed.payloads, packed.count)) is not None:
            return fast, []
        if self._fast is None or packed.count <= RUN:
            return self._carefully(packed, 0, packed.count)
        pieces: list[list[pa.Array]] = []
        dropped: list[int] = []
        offsets = memoryview(packed.payload_offsets).cast("i")
        view = pa.py_buffer(packed.payloads)
        for start in range(0, packed.count, RUN):
            end = min(start + RUN, packed.count)
            run = view.slice(offsets[start], offsets[end] - offsets[start])
            piece = self._read(run, end - start)
            if piece is None:
                piece, gone = self._carefully(packed, start, end)
                dropped += gone
            pieces.append(piece)
        return [pa.concat_arrays(column) for column in zip(*pieces, strict=True)], dropped

    def _read(self, documents: bytes | pa.Buffer, count: int) -> list[pa.Array] | None:
        """The fast way. None if it must not be taken.

        Arrow reads only objects, and json topics hold only objects (rule K2).
        """
        if self._fast is None:
            return None
        source = documents if isinstance(documents, pa.Buffer) else pa.py_buffer(documents)
        behaviour = "ignore" if self._new_fields == "ignore" else "error"
        try:
            table = pa_json.read_json(
                pa.BufferReader(source),
                # One block, so that a line feed inside a document is ordinary white space.
                read_options=pa_json.ReadOptions(use_threads=False, block_size=source.size + 1),
                parse_options=pa_json.ParseOptions(explicit_schema=self._fast, unexpected_field_behavior=behaviour),
            )
            if table.num_rows != count:
                return None
            columns = []
            for index, column in enumerate(table.columns):
                array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
                if self._required[index] and array.null_count:
                    return None
                columns.append(_converted(array, self._types[index], self._targets[index]))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, _Differs):
            return None
        if self._new_fields == "rescue":
            columns.append(pa.nulls(count, pa.string()))
        return columns

    def _carefully(self, packed: PackedRecords, start: int, end: int) -> tuple[list[pa.Array], list[int]]:
        offsets = memoryview(packed.payload_offsets).cast("i")
        columns: list[list[object]] = [[] for _ in self._names]
        rescued: list[str | None] = []
        dropped: list[int] = []
        plan = list(zip(self._names, self._converters, columns, strict=True))
        for row in range(start, end):
            try:
                payload = packed.payloads[offsets[row] : offsets[row + 1]]
                # A document is never empty, and Arrow's reader passes over an empty line, so all of these come here.
                document = {} if payload in (b"", b"\n") else parsed(payload)
                values = [convert(document.get(name)) for name, convert, _ in plan]
                other = self._other(document)
            except Misfit as misfit:
                if self._mode == "DROPMALFORMED":
                    dropped.append(row)
                    continue
                if self._mode == "FAILFAST" or misfit.path or any(self._required):
                    misfit.row = row
                    raise
                values = [None] * len(plan)  # not a document at all
                other = None
            for (_, _, column), value in zip(plan, values, strict=True):
                column.append(value)
            rescued.append(other)
        found = [pa.array(column, kind) for column, kind in zip(columns, self._targets, strict=True)]
        if self._new_fields == "rescue":
            found.append(pa.array(rescued, pa.string()))
        return found, dropped

    def _other(self, document: dict[str, object]) -> str | None:
        """The fields that the schema lacks, as JSON [3]. None: there are none, or they do not matter. Raises Misfit."""
        if self._new_fields == "ignore":
            return None
        other = beyond(document, self._fields)
        if other is NOTHING:
            return None
        text = compact(other)
        if self._new_fields == "fail":
            shown = text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
            raise Misfit("/", shown, "only fields that the schema has")
        return text


# ---- the fast way: types for Arrow's reader, and the conversion of its result ----


class _Differs(Exception):
    """The fast way might give another result than the careful one."""


def _is_readable(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return all(_is_readable(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return _is_readable(kind.elementType)
    return not isinstance(kind, (MapType, VariantType))


def _readable(kind: DataType) -> pa.DataType:
    """The type for Arrow's reader. Everything is nullable. Types that the reader parses differently from `converting`
    are read as text: bytes, dates, times without a zone."""
    if isinstance(kind, StructType):
        return pa.struct([(field.name, _readable(field.dataType)) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return pa.list_(pa.field("element", _readable(kind.elementType)))
    if isinstance(kind, (BinaryType, DateType, TimestampNTZType)):
        return pa.string()
    target: pa.DataType = arrow_schema(StructType().add("x", kind)).field(0).type
    return target


def _converted(array: pa.Array, kind: DataType, target: pa.DataType) -> pa.Array:
    """An array that was read as `_readable(kind)`, as `target`. Raises _Differs, also for a null that is not
    allowed."""
    if isinstance(kind, StructType):
        children = []
        for index, field in enumerate(kind.fields):
            child = array.field(index)
            if not field.nullable and child.null_count:
                # Children of a null struct are null, too, which is allowed.
                if array.flatten()[index].filter(array.is_valid()).null_count:
                    raise _Differs
            children.append(_converted(child, field.dataType, target.field(index).type))
        return pa.Array.from_buffers(target, len(array), array.buffers()[:1], array.null_count, array.offset, children)
    if isinstance(kind, ArrayType):
        if array.offset:
            raise _Differs  # never seen: the reader makes new arrays
        values = array.values
        if not kind.containsNull and values.null_count:
            raise _Differs
        element = _converted(values, kind.elementType, target.value_type)
        return pa.Array.from_buffers(target, len(array), array.buffers()[:2], array.null_count, 0, [element])
    if isinstance(kind, DateType):
        return _cast_if(array, r"^\d{4}-\d{2}-\d{2}$", target)
    if isinstance(kind, TimestampNTZType):
        return _cast_if(array, r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d{1,6})?$", target)
    if isinstance(kind, BinaryType):
        try:
            return pa.array([None if text is None else binary(text) for text in array.to_pylist()], target)
        except NoFit:
            raise _Differs from None
    if isinstance(kind, DecimalType):
        array.validate(full=True)  # the reader does not check the number of digits before the point
    if isinstance(kind, FloatType) and pc.any(pc.is_inf(array)).as_py():
        raise _Differs  # the reader does not refuse a number that is too large
    return array


def _cast_if(texts: pa.Array, pattern: str, target: pa.DataType) -> pa.Array:
    if pc.all(pc.match_substring_regex(texts, pattern)).as_py() is False:
        raise _Differs
    return texts.cast(target)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark expects, with times in UTC. PySpark 4.1 has no argument for that and always uses
    UTC."""
    told = inspect.signature(to_arrow_schema).parameters
    return to_arrow_schema(schema, timezone="UTC") if "timezone" in told else to_arrow_schema(schema)
