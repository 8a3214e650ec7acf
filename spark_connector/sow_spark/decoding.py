"""Packed records into Arrow batches: metadata as it is, json documents by a schema, or payloads as one column.

    [1]  Every batch has exactly the Arrow schema that Spark expects, with nullability.
    [2]  A payload that does not fit is handled by the mode: FAILFAST raises `Misfit`, PERMISSIVE makes it null, and
         DROPMALFORMED leaves its row out. `reading` adds the record's key to the error.

`documents` decodes the fields of json documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from sow_client import PackedColumn, PackedRecords
from sow_spark.converting import Misfit
from sow_spark.documents import Documents, arrow_schema
from sow_spark.gathering import taken
from sow_spark.options import ParseMode, PayloadForm
from sow_spark.schemas import RESCUED, TOPIC_COLUMN, Layout

NEVER_MICROS: Final = 2**63 - 1
"""The expire time of a record that never expires, on the wire."""
FIELDS_MAX: Final = 100
"""The server takes no more names of fields."""
_PUT: Final = b"\x01"
_OPS: Final = ("", "put", "oof", "delete", "expire")
_REASONS: Final = (None, "touched", "deleted", "expired", "match")


class Decoder:
    """Makes Arrow batches of packed records. Each task has one."""

    def __init__(
        self, layout: Layout, form: PayloadForm, mode: ParseMode, topic: str = "", *, changes: bool = False
    ) -> None:
        """`topic` fills the column `_topic`. `changes`: they are changes, and not records of a snapshot. Without a
        column `_op` all of them except puts are left out."""
        self._changes = changes
        self._only_puts = changes and not layout.has_op
        self._topic = topic
        self._layout = layout
        self._form = form
        self._mode = mode
        self.schema: pa.Schema = arrow_schema(layout.schema)
        self._rescues = form == "columns" and layout.new_fields == "rescue"
        self._documents = (
            Documents(layout.fields, mode, layout.new_fields)
            if form == "columns" and (layout.fields.fields or layout.new_fields != "ignore")
            else None
        )

    @property
    def columns(self) -> tuple[PackedColumn, ...]:
        """The packed columns that it needs."""
        needed: list[PackedColumn] = [_SOURCES[name] for name in self._layout.metadata if name != TOPIC_COLUMN]
        if self._layout.fields.fields or self._documents is not None:
            needed.append("payload")
        if self._only_puts:
            needed.append("op")
        if not self._changes:  # a server has no operations of records: each was put
            needed = [name for name in needed if name != "op"]
        # An empty selection would still give the count, but no server guarantees that.
        return tuple(dict.fromkeys(needed)) or ("version",)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of documents that it needs; empty: all, or more than the server takes."""
        narrow = self._documents is not None and self._layout.new_fields == "ignore"
        names = tuple(self._layout.fields.names) if narrow else ()
        return names if len(names) <= FIELDS_MAX else ()

    @property
    def lines(self) -> bool:
        """True if payloads must come as lines."""
        return self._documents is not None

    def decode(self, packed: PackedRecords) -> pa.RecordBatch:
        """The records as a batch. Raises Misfit."""
        if not self._only_puts or not packed.ops.strip(_PUT):
            return self._decoded(packed)
        # Before decoding: a removed record that does not fit the schema does no harm.
        rows = [row for row, op in enumerate(packed.ops) if op == _PUT[0]]
        try:
            return self._decoded(taken(packed, rows))
        except Misfit as misfit:
            misfit.row = rows[misfit.row]
            raise

    def _decoded(self, packed: PackedRecords) -> pa.RecordBatch:
        count = packed.count
        keep: pa.Array | None = None
        found: dict[str, pa.Array] = {}
        if self._documents is not None:
            arrays, dropped = self._documents.decode(packed)
            names = [*self._layout.fields.names, *([RESCUED] if self._rescues else [])]
            found |= zip(names, arrays, strict=True)
            if dropped:
                gone = set(dropped)
                keep = pa.array([row for row in range(count) if row not in gone], pa.int64())
        elif self._layout.fields.fields:
            column, keep = self._whole(packed)
            found[self._layout.fields.names[0]] = column
        for name in self._layout.metadata:
            made = pa.repeat(self._topic, count) if name == TOPIC_COLUMN else _METADATA[name](packed)
            found[name] = made if keep is None else made.take(keep)
        rows = count if keep is None else len(keep)
        arrays = [_of_type(found[field.name], field.type) for field in self.schema]
        if not arrays:  # a schema without columns still counts rows
            return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _whole(self, packed: PackedRecords) -> tuple[pa.Array, pa.Array | None]:
        """Payloads as one column, and the indexes of the kept rows (None: all)."""
        if self._form == "binary":
            return _packed(pa.binary(), packed.count, packed.payload_offsets, packed.payloads), None
        texts = _packed(pa.string(), packed.count, packed.payload_offsets, packed.payloads)
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:
            return self._checked_texts(packed)
        return texts, None

    def _checked_texts(self, packed: PackedRecords) -> tuple[pa.Array, pa.Array | None]:
        texts: list[str | None] = []
        keep: list[int] = []
        nullable = self._layout.fields.fields[0].nullable
        for row, payload in enumerate(_payloads(packed)):
            try:
                texts.append(payload.decode())
            except UnicodeDecodeError as error:
                if self._mode == "DROPMALFORMED":
                    continue
                if self._mode == "FAILFAST" or not nullable:
                    raise Misfit("", f"a byte that is not UTF-8 at {error.start}", "text", row) from None
                texts.append(None)
            keep.append(row)
        return pa.array(texts, pa.string()), pa.array(keep, pa.int64())


# ---- metadata ----


def _packed(kind: pa.DataType, count: int, offsets: bytes, data: bytes) -> pa.Array:
    """Texts or bytes without a copy: the wire has Arrow's layout."""
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _words(kind: pa.DataType, count: int, data: bytes) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])


def _expire_time(packed: PackedRecords) -> pa.Array:
    micros = _words(pa.int64(), packed.count, packed.expire_times)
    return pc.if_else(pc.equal(micros, NEVER_MICROS), pa.scalar(None, pa.int64()), micros).cast(_MOMENT)


def _origin(packed: PackedRecords) -> pa.Array:
    names = pa.array(list(packed.origin_names), pa.string())
    if packed.origins:
        return names.take(_words(pa.uint16(), packed.count, packed.origins))
    return names.take(pa.array([0] * packed.count, pa.int64()))


def _named(names: Sequence[str | None], codes: bytes, count: int, default: int) -> pa.Array:
    indices = _words(pa.uint8(), count, codes) if codes else pa.array([default] * count, pa.uint8())
    return pa.array(names, pa.string()).take(indices)


_MOMENT: Final = pa.timestamp("us", tz="UTC")
_METADATA: Final[dict[str, Callable[[PackedRecords], pa.Array]]] = {
    "_key": lambda packed: _packed(pa.string(), packed.count, packed.key_offsets, packed.keys),
    "_version": lambda packed: _words(pa.int64(), packed.count, packed.versions),
    "_publish_time": lambda packed: _words(_MOMENT, packed.count, packed.publish_times),
    "_expire_time": _expire_time,
    "_origin": _origin,
    # Records of a snapshot have no op and no reason: each was put.
    "_op": lambda packed: _named(_OPS, packed.ops, packed.count, _PUT[0]),
    "_reason": lambda packed: _named(_REASONS, packed.reasons, packed.count, 0),
    "_sequence": lambda packed: _words(pa.int64(), packed.count, packed.sequences),
}
_SOURCES: Final[Mapping[str, PackedColumn]] = {
    "_key": "key",
    "_version": "version",
    "_publish_time": "publish_time",
    "_expire_time": "expire_time",
    "_origin": "origin",
    "_op": "op",
    "_reason": "op",
    "_sequence": "sequence",
}
"""The packed column for each metadata column."""


def _payloads(packed: PackedRecords) -> Iterator[bytes]:
    offsets = memoryview(packed.payload_offsets).cast("i")
    for row in range(packed.count):
        yield packed.payloads[offsets[row] : offsets[row + 1]]


def _of_type(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type != target:
        raise AssertionError(f"made {array.type}, and Spark expects {target}")
    return array
