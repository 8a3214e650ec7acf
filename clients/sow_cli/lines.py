"""Lines of input to records: reads without buffering all input, and reports exactly which line is wrong and why.

[1]  Memory is bounded: one chunk and one line of at most `LINE_BYTES_MAX`, whatever the size of the file.
[2]  A refusal names its line, although empty and bad lines have no position in the publisher's stream.
[3]  The content of a pipe is read at once, so `tail -f … | sow publish …` does not wait for a full buffer.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from math import isfinite
from typing import Final, NamedTuple, TypeAlias

import msgspec

from sow_cli.columns import Path, path_of
from sow_client import InvalidArgument, PayloadForm
from sow_client._keys import key_text
from sow_client._payloads import encoded_in

LINE_BYTES_MAX: Final = 48 * 2**20  # the largest payload in base64, or with all of its quotation marks doubled
PAYLOAD_BYTES_MAX: Final = 16 * 2**20  # a request holds no more (rule K8)
NEVER_MICROS: Final = 2**63 - 1
"""The lifetime of an item that never expires, whatever the topic's own lifetime is."""
_CHUNK_BYTES: Final = 256 * 1024
_JSON: Final = PayloadForm()


class Item(NamedTuple):
    """The record of one line. It is a tuple because there is one per record."""

    data: bytes
    key: str | None = None
    expire_time_micros: int | None = None
    """`NEVER_MICROS`: never. None: the lifetime that the command gives."""
    removes: bool = False
    """True: the record of the key is removed. Without a key it is that of the document."""


class BadLine(Exception):
    """A line that is not a record. The reason is one of the server's, so that scripts need only one vocabulary."""

    def __init__(self, reason: str, message: str, text: bytes = b"") -> None:
        """`text`: the line."""
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.text = text
        self.of_record = False
        """True: the line was read as a record, with its metadata."""
        self.kept: Mapping[str, object] = {}
        """The row that is no record, as the file of --errors keeps it."""


Parse: TypeAlias = Callable[[bytes], Item]


def chunks(stream: BufferedReader, end: bytes = b"\n") -> Iterator[list[bytes | None]]:
    """Yields the lines of `stream` in lists, without their line ends; None stands for one that is too long ([1])."""
    rest = b""
    skipping = False
    while data := stream.read1(_CHUNK_BYTES):
        *whole, rest = (rest + data).split(end)
        parts: list[bytes | None] = [line if len(line) <= LINE_BYTES_MAX else None for line in whole]
        if skipping and parts:
            parts[0], skipping = None, False
        if len(rest) > LINE_BYTES_MAX or skipping:
            rest, skipping = b"", True
        yield parts
    if skipping:
        yield [None]
    elif rest:
        yield [rest]


class SentItems:
    """The records that are under way, so that one that the server refuses can be shown. One thread adds, and another
    one learns of answers."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._first = 0
        self._settled = 0

    def add(self, item: Item) -> None:
        """Notes the next record."""
        self._items.append(item)

    def settled(self, count: int) -> None:
        """So many more records are settled; the refusals among them follow. Earlier ones are forgotten."""
        self.forget(self._settled - self._first)
        self._settled += count

    def forget(self, count: int) -> None:
        """Forgets so many of the earliest records."""
        for _ in range(count):
            self._items.popleft()
        self._first += count

    def item(self, position: int) -> Item:
        """The record at a position, from 0."""
        return self._items[position - self._first]


class LineNumbers:
    """Finds the line of the n-th published record ([2]).

    It costs nothing per record: only lines without a record are noted, as the offset from there on.
    """

    __slots__ = ("_offsets", "_positions")

    def __init__(self) -> None:
        self._positions = [0]
        self._offsets = [1]

    def skip(self, next_position: int) -> None:
        """The line before the record `next_position` (from 0) has no record."""
        if self._positions[-1] == next_position:
            self._offsets[-1] += 1
        else:
            # The offset comes first: another thread that looks up an earlier refusal finds a complete pair or none.
            self._offsets.append(self._offsets[-1] + 1)
            self._positions.append(next_position)

    def line(self, position: int) -> int:
        """The line, from 1, of the record `position`, from 0."""
        return position + self._offsets[bisect_right(self._positions, position) - 1]


def document(line: bytes) -> Item:
    """A line as it is: a JSON document, or raw bytes."""
    return Item(line)


def base64_payload(line: bytes) -> Item:
    """A line with the base64 text of a payload: for message types whose bytes may hold line ends."""
    try:
        return Item(base64.b64decode(line, validate=True))
    except (binascii.Error, ValueError) as error:
        raise BadLine("PAYLOAD_MALFORMED", f"not base64: {error} (for payloads as they are: --raw)") from error


def keyed_by(field: str, form: PayloadForm = _JSON) -> Parse:
    """Payloads of a form whose `field`, a name or a path such as `/a/b`, is the record key, as canonical text (rule
    K4). Raises ValueError."""
    if not field:
        raise ValueError("the name of a field is empty")
    path = path_of(field)
    if form.message_type != "json":
        return _keyed_by_path(field, path, form)
    # msgspec skips fields that the struct does not name: about 0.2 µs a line instead of 2 µs for the whole document.
    wanted: type = object
    for step in reversed(path):
        kind = wanted if wanted is object else wanted | msgspec.UnsetType
        wanted = msgspec.defstruct("Wanted", [("value", kind, msgspec.UNSET)], rename={"value": step})
    decode: Callable[[bytes], object] = msgspec.json.Decoder(wanted).decode

    def keyed(line: bytes) -> Item:
        try:
            value: object = decode(line)
            for _ in path:
                value = getattr(value, "value", msgspec.UNSET)
        except msgspec.ValidationError as error:
            raise BadLine("KEY_FIELD_MISSING", f"no field {field}: {error}") from error
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BadLine("PAYLOAD_MALFORMED", str(error)) from error
        return Item(line, canonical_text(value, field))

    return keyed


def _keyed_by_path(field: str, path: Path, form: PayloadForm) -> Parse:
    def keyed(payload: bytes) -> Item:
        value: object = form.fields(payload)
        if value is None:
            raise BadLine("PAYLOAD_MALFORMED", f"the payload has no fields of {form.message_type}")
        for name in path:
            value = value.get(name, msgspec.UNSET) if isinstance(value, Mapping) else msgspec.UNSET
        return Item(payload, canonical_text(value, field))

    return keyed


def canonical_text(value: object, field: str) -> str:
    """The record key of a document whose key field has this value (rule K4). Raises BadLine."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return key_text(value) if isfinite(value) else repr(value)
    if value is None or value is msgspec.UNSET:
        raise BadLine("KEY_FIELD_MISSING", f"field {field} is {'null' if value is None else 'missing'}")
    raise BadLine("KEY_FIELD_NOT_SCALAR", f"field {field} is no text, number or boolean")


class _RecordLine(msgspec.Struct):
    payload: msgspec.Raw = msgspec.Raw()
    payload_base64: str | None = None
    text: str | None = None
    """In the file of --errors: a document that could not be read, to be mended."""
    whole: msgspec.Raw = msgspec.Raw()
    """There, too: the line of a record that could not be read, an object or a text."""
    row: msgspec.Raw = msgspec.Raw()
    """There, too: a row of a table."""
    reason: str | None = None
    """There, too. Without an expire time of its own, such a record gets that of the command."""
    op: str | None = None
    """There, too, "delete": a removal."""
    key: str | None = None
    expire_time_micros: int | None = None


class _ToldLine(_RecordLine, forbid_unknown_fields=True):
    """A line with what the file of --errors tells, too."""

    file: str | None = None
    line: int | None = None
    record: int | None = None
    message: str | None = None
    column: int | None = None
    base64: str | None = None
    columns: list[str] | None = None
    types: dict[str, str] | None = None
    nulls: list[str] | None = None
    delimiter: str | None = None


class _OwnLine(_ToldLine):
    """A line among lines of an export: a document with a field `payload` is none."""

    topic: str | None = None
    version: int | None = None
    publish_time_micros: int | None = None
    origin: str | None = None
    sequence: int | None = None


class _WholeRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A line as `sow export` and `sow query` write it, and nothing else."""

    topic: str
    key: str
    version: int
    publish_time_micros: int
    origin: str
    sequence: int
    payload: msgspec.Raw
    payload_base64: str | msgspec.UnsetType = msgspec.UNSET
    expire_time_micros: int | msgspec.UnsetType = msgspec.UNSET


_decode_whole: Final = msgspec.json.Decoder(_WholeRecord).decode
_decode_told: Final = msgspec.json.Decoder(_ToldLine).decode


def is_record(line: bytes) -> bool:
    """True if a line is a whole record, with all of its metadata, and no document."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        _decode_whole(line)
    except (msgspec.MsgspecError, ValueError):
        return False
    return True


def is_refused(line: bytes) -> bool:
    """True if a line is one of the file of --errors, and no document."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        told = _decode_told(line)
    except (msgspec.MsgspecError, ValueError):
        return False
    return None not in (told.reason, told.message) and (told.line is None) is not (told.record is None)


def no_record(line: bytes) -> Item:
    """A document among documents. Raises BadLine for a whole record, whose document is inside of it."""
    if line.startswith(b'{"topic":') and is_record(line):
        raise BadLine(
            "PAYLOAD_MALFORMED", "a record among documents; take them apart, or say --records or --no-records"
        )
    return Item(line)


def record_form(
    form: PayloadForm,
    *,
    with_key: bool,
    stamps: bool,
    absent: int | None,
    is_told: bool = False,
    keyed: Parse | None = None,
    row: Parse | None = None,
    removes: Callable[[bytes], bool] | None = None,
) -> Parse:
    """Lines as `sow query --format ndjson` and --errors write them, of payloads of a form. `with_key`: the topic needs
    a key, and gets the line's, or the one that `keyed` takes from the document. `stamps`: records keep their expire
    times, and `absent` stands for one that has none. `is_told`: the user says that lines are records; else the first
    one is, and others may be documents. `row` makes a record of a line that has one. `removes`: whether a line is a
    removal, by its key."""
    decode: Callable[[bytes], _RecordLine] = msgspec.json.Decoder(_RecordLine if is_told else _OwnLine).decode
    decode_text = msgspec.json.Decoder(str).decode

    def payload_of(record: _RecordLine) -> bytes:
        if record.text is not None:
            return record.text.encode()
        if form.message_type == "json" and record.payload:
            return bytes(record.payload)
        if record.payload_base64 is not None:
            return base64_payload(record.payload_base64.encode()).data
        if not record.payload:
            raise BadLine("PAYLOAD_MALFORMED", "not a record: it has no payload")
        if bytes(record.payload)[:1] == b"{":
            return encoded_in(form)(form.encode(msgspec.json.decode(record.payload)))
        return base64_payload(decode_text(record.payload).encode()).data

    def read(line: bytes) -> Item:
        try:
            record = decode(line)
            if record.whole:
                inner = bytes(record.whole)
                return read(decode_text(inner).encode() if inner[:1] == b'"' else inner)
            if record.row and row is not None:
                return row(line)
            if record.op == "delete" and record.reason is not None:
                return Item(b"" if record.key else payload_of(record), record.key, removes=True)
            if removes is not None and removes(line):
                if record.key is None:
                    raise BadLine("KEY_REQUIRED", "the line has no key, which a removal needs")
                return Item(b"", record.key, removes=True)
            data = payload_of(record)
        except (msgspec.DecodeError, UnicodeError) as error:
            hint = "" if is_told else ", as the first line is; see --records and --no-records"
            raise BadLine("PAYLOAD_MALFORMED", f"not a record{hint}: {error}") from error
        except InvalidArgument as error:
            raise BadLine(error.reason, error.message) from error
        key = record.key
        if with_key and key is None:
            if keyed is None:
                raise BadLine("KEY_REQUIRED", "the record has no key, which the topic needs")
            key = keyed(data).key
        stamp = record.expire_time_micros
        if stamp is None and record.reason is None:
            stamp = absent
        return Item(data, key if with_key else None, stamp if stamps else None)

    def parsed(line: bytes) -> Item:
        try:
            return read(line)
        except BadLine as bad:
            bad.of_record = True
            raise

    return parsed
