"""Records as rows: lines of JSON, of CSV and of a table, batch by batch.

[1]  Lines of JSON hold a payload as it was published, without decoding it. In CSV and tables its fields are columns
     (columns [1]); a payload without fields is one column, `payload`.
[2]  The fields of the first batch are the columns, unless the user named them.
"""

from __future__ import annotations

import re
import sys
from array import array
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from typing import Final, TypeAlias

import msgspec

from sow_cli import display
from sow_cli.cells import InQuotes
from sow_cli.columns import METADATA, Columns, metadata_heading, one_line
from sow_client import MessageTypeName, PackedRecords, PayloadForm, Record, RecordBatch, SowError, TopicSettings

Batch: TypeAlias = RecordBatch | Sequence[Record]
_SHOWN_MAX: Final = 400
"""Characters of a value in a table."""
NEVER_MICROS: Final = 2**63 - 1  # in a column of expire times
_QUOTABLE: Final = re.compile('[",\r\n]')
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet takes a cell that begins like this for a formula."""


class RecordLine(msgspec.Struct, gc=False):
    """A record in JSON (docs/reference/output.md). Field order is the order on the line."""

    topic: str
    key: str
    version: int
    publish_time_micros: int
    expire_time_micros: int | msgspec.UnsetType
    origin: str
    sequence: int
    # msgspec writes Raw as it is and bytes as base64.
    payload: msgspec.Raw | bytes | msgspec.UnsetType
    payload_base64: bytes | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class RecordForm:
    """The form of the records of one answer."""

    topic: str
    message_type: MessageTypeName
    keys_only: bool = False
    fix_separator: str = "\x01"
    select: tuple[str, ...] = ()
    """The columns that the user named: paths of fields, and metadata such as `@key`. Empty: all."""
    acts: bool = True
    """False: the topic has expiration disabled, so expire times have no effect (rule L3)."""

    @classmethod
    def of(
        cls, topic: str, settings: TopicSettings, *, keys_only: bool = False, select: Sequence[str] = ()
    ) -> RecordForm:
        """The form of the records of a topic with these settings."""
        acts = settings.expiration != "disabled"
        return cls(topic, settings.message_type, keys_only, settings.fix_separator, tuple(select), acts)

    @property
    def payload_is_json(self) -> bool:
        """True: a payload is a document."""
        return self.message_type == "json"

    @property
    def payloads(self) -> PayloadForm:
        """The reader of the payloads."""
        return PayloadForm(self.message_type, self.fix_separator)

    def columns(self, payloads: Iterable[bytes]) -> Columns | None:
        """The columns of the payloads' fields; None: there are none."""
        paths = [name for name in self.select if not name.startswith("@")]
        if self.keys_only or (self.select and not paths):
            return None
        return Columns.of(self.payloads, payloads, paths)


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """The records of a batch, column by column: half the time of asking each record for its values."""

    keys: Sequence[str]
    versions: Sequence[int]
    publish_times_micros: Sequence[int]
    expire_times_micros: Sequence[int]
    """`NEVER_MICROS` for never."""
    origins: Sequence[str]
    sequences: Sequence[int]
    payloads: Sequence[bytes]

    @classmethod
    def of(cls, batch: Batch) -> BatchColumns:
        """The columns of a batch."""
        if isinstance(batch, RecordBatch):
            keys, versions, published = batch.keys, batch.versions, batch.publish_times_micros
            expire, origins, sequences = batch.expire_times_micros, batch.origins, batch.sequences
            payloads = batch.payloads
        else:
            keys, versions = [one.key for one in batch], [one.version for one in batch]
            published, payloads = [one.publish_time_micros for one in batch], [one.payload for one in batch]
            sequences, origins = [one.sequence for one in batch], [one.origin for one in batch]
            expire = [NEVER_MICROS if one.expire_time_micros is None else one.expire_time_micros for one in batch]
        return cls(keys, versions, published, expire, origins, sequences, payloads)

    @classmethod
    def of_packed(cls, packed: PackedRecords) -> BatchColumns:
        """All columns of a piece of an export."""
        payloads, keys = packed.payloads, packed.keys
        of_payloads, of_keys = _numbers(packed.payload_offsets, "i"), _numbers(packed.key_offsets, "i")
        names = packed.origin_names
        origins = [names[one] for one in _numbers(packed.origins, "H")] or list(names[:1]) * packed.count
        return cls(
            [keys[start:end].decode() for start, end in pairwise(of_keys)],
            _numbers(packed.versions, "q"),
            _numbers(packed.publish_times, "q"),
            _numbers(packed.expire_times, "q"),
            origins,
            _numbers(packed.sequences, "q"),
            [payloads[start:end] for start, end in pairwise(of_payloads)],
        )

    def on_lines(self, form: RecordForm) -> BatchColumns:
        """The same with each JSON document on one line."""
        if not form.payload_is_json:
            return self
        # Line ends are rare: the whole batch is searched first, and each document only when there are any.
        together = b"".join(self.payloads)
        if b"\n" in together or b"\r" in together:
            return replace(self, payloads=[one_line(document) for document in self.payloads])
        return self


def _numbers(data: bytes, code: str) -> Sequence[int]:
    """Little-endian numbers of a packed column."""
    values: array[int] = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def record_lines(columns: BatchColumns, form: RecordForm) -> list[RecordLine]:
    """The lines of some records, to be encoded."""
    columns = columns.on_lines(form)
    unset = msgspec.UNSET
    expire = [unset if micros == NEVER_MICROS else micros for micros in columns.expire_times_micros]
    payloads: Iterable[msgspec.Raw | bytes | msgspec.UnsetType]
    exact: Iterable[bytes | msgspec.UnsetType] = repeat(unset)
    if form.keys_only:
        payloads = repeat(unset)
    elif form.payload_is_json:
        payloads = map(msgspec.Raw, columns.payloads)
    else:
        told = [json_payload(payload, form) for payload in columns.payloads]
        payloads, exact = [one for one, _ in told], [one for _, one in told]
    return list(
        map(
            RecordLine,
            repeat(form.topic),
            columns.keys,
            columns.versions,
            columns.publish_times_micros,
            expire,
            columns.origins,
            columns.sequences,
            payloads,
            exact,
        )
    )


def json_payload(payload: bytes, form: RecordForm) -> tuple[msgspec.Raw | bytes, bytes | msgspec.UnsetType]:
    """A payload in JSON, and its bytes where the program that reads the JSON could not make them again."""
    if form.payload_is_json:
        return msgspec.Raw(one_line(payload)), msgspec.UNSET
    document = form.payloads.json(payload)
    if document is None:
        return payload, msgspec.UNSET
    try:
        is_exact = form.payloads.encode(msgspec.json.decode(document)) == payload
    except (SowError, msgspec.MsgspecError):
        is_exact = False
    return msgspec.Raw(document), msgspec.UNSET if is_exact else payload


def quoted_cell(text: str) -> str:
    """A cell of a CSV. An empty text is quoted, as an empty cell stands for no value."""
    if '"' in text or not text:
        return '"' + text.replace('"', '""') + '"'
    return f'"{text}"' if "," in text or "\n" in text or "\r" in text else text


def quoted_safely(text: str) -> str:
    """The same for spreadsheets."""
    return quoted_cell(harmless_text(text))


def harmless_text(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


class CsvRows:
    """Records as lines of CSV: the key, the fields, the other metadata; or the columns that the user named."""

    def __init__(
        self,
        form: RecordForm,
        columns: Columns | None,
        quoted: Callable[[str], str] = quoted_cell,
        keeps: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`columns`: of the fields; None: the payloads have none. `quoted` makes cells of texts. `keeps`: whether the
        columns keep a payload; one that they do not keep stands whole in one more, `_payload`."""
        self._form = form
        self._quoted = quoted
        self._keeps = keeps
        self.columns = columns
        fields: tuple[str, ...] = () if form.keys_only else ("_payload" if form.payload_is_json else "payload",)
        if self.columns:
            fields = self.columns.headings
            if fields == ("payload",) and not form.payload_is_json and not form.select:
                fields = ("/payload",)  # a column `payload` alone stands for whole payloads
            fields = fields if keeps is None else (*fields, "_payload")
        if form.select:
            left = iter(fields)
            self.headings = [metadata_heading(name[1:]) if name[0] == "@" else next(left) for name in form.select]
        else:
            self.headings = ["_key", *fields, *map(metadata_heading, METADATA[1:])]

    @property
    def first_line(self) -> bytes:
        """The names of the columns."""
        return (",".join([self._quoted(name) for name in self.headings]) + "\n").encode()

    def lines(self, columns: BatchColumns) -> bytes:
        """Quoting of our own: the csv module looks at every character, and takes ten times as long."""
        columns = columns.on_lines(self._form)
        quoted = self._quoted
        expire = ["" if micros == NEVER_MICROS else str(micros) for micros in columns.expire_times_micros]
        metadata: dict[str, Iterable[str]] = {
            "key": map(quoted, columns.keys),
            "version": map(str, columns.versions),
            "publish_time": map(str, columns.publish_times_micros),
            "expire_time": expire,
            "origin": map(quoted, columns.origins),
            "sequence": map(str, columns.sequences),
        }
        fields = self._fields(columns.payloads)
        if self._form.select:
            order = [metadata[name[1:]] if name[0] == "@" else next(fields) for name in self._form.select]
        else:
            order = [metadata.pop("key"), *fields, *metadata.values()]
        if len(order) == 1:  # a line without a character would be no row
            return "".join([(cell or '""') + "\n" for cell in order[0]]).encode()
        return "".join([",".join(row) + "\n" for row in zip(*order, strict=True)]).encode()

    def _fields(self, payloads: Sequence[bytes]) -> Iterator[Iterable[str]]:
        """The cells of the fields, column by column."""
        quoted = self._quoted
        if self.columns:
            # Column by column: most columns have nothing to quote, and one search in all of their cells shows it.
            made = self.columns.cells if quoted is quoted_cell else self.columns.texts
            for column in zip(*map(made, payloads), strict=True):
                together = "".join([cell or '"' for cell in column])
                if quoted is quoted_cell and not _QUOTABLE.search(together):
                    yield column
                else:
                    yield ["" if cell is None else cell if type(cell) is InQuotes else quoted(cell) for cell in column]
            if self._keeps is not None:
                form, keeps = self._form, self._keeps
                yield ["" if keeps(payload) else quoted(payload_text(payload, form)) for payload in payloads]
        elif not self._form.keys_only:
            yield [quoted(payload_text(payload, self._form)) for payload in payloads]


def payload_text(payload: bytes, form: RecordForm) -> str:
    """A payload without fields, in one cell: JSON, or base64."""
    if form.payload_is_json:
        return payload.decode("utf-8", "backslashreplace")
    return b2a_base64(payload, newline=False).decode()


class TableRows:
    """Records as rows for people: the key, the time left and the fields; or the key and the columns that the user
    named."""

    def __init__(self, form: RecordForm, first: Batch) -> None:
        """The fields of the records `first` are the columns."""
        self._form = form
        self.columns = form.columns([record.payload for record in first])
        if form.select:
            paths = iter(self.columns.headings if self.columns else ())
            named = [name[1:] if name[0] == "@" else next(paths) for name in form.select]
            self.headings: tuple[str, ...] = ("key", *(display.safe(name) for name in named))
        elif self.columns:
            self.headings = ("key", "expires", *map(display.safe, self.columns.headings))
        else:
            self.headings = ("key", "expires", "published", "sequence" if form.keys_only else "payload")

    def cells(self, record: Record, now_micros: int) -> list[str]:
        """The texts of a record."""
        key = display.safe(record.key)
        texts = self.columns.texts(record.payload) if self.columns else ()
        fields = ["" if one is None else shown_text(one) for one in texts]
        if named := self._form.select:
            left = iter(fields)
            shown = [_shown(record, one[1:], now_micros, self._form) if one[0] == "@" else next(left) for one in named]
            return [key, *shown]
        expires = _shown(record, "expire_time", now_micros, self._form)
        if self.columns:
            return [key, expires, *fields]
        last = str(record.sequence) if self._form.keys_only else shown_payload(record.payload, self._form)
        return [key, expires, _shown(record, "publish_time", now_micros, self._form), last]


def _shown(record: Record, name: str, now_micros: int, form: RecordForm) -> str:
    """Metadata for people."""
    match name:
        case "key":
            return display.safe(record.key)
        case "version":
            return str(record.version)
        case "publish_time":
            return display.short_instant(record.publish_time_micros, now_micros)
        case "expire_time":
            return display.expires(record.expire_time_micros, now_micros, acts=form.acts)
        case "origin":
            return display.safe(record.origin)
        case _:
            return str(record.sequence)


def shown_text(text: str) -> str:
    """The beginning of a field's text, for one line of a table."""
    return display.safe(text) if len(text) <= _SHOWN_MAX else display.safe(text[:_SHOWN_MAX]) + "…"


def shown_payload(payload: bytes, form: RecordForm) -> str:
    """The beginning of a payload, for one line of a table."""
    return display.safe_bytes(one_line(payload) if form.payload_is_json else payload, _SHOWN_MAX)
