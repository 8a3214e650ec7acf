"""Records made of rows whose columns have names: the first line of a CSV, the schema of Parquet and Arrow.

[1]  The columns that an export writes are read as the same record: fields have their paths as names, and metadata are
     no fields (columns [3]). A cell or a value that is empty or null is no field.
[2]  A row that is no record is kept as it came, so that it can be mended and read again (`RecordMaker.kept`).
[3]  A document has the values of its row, as far as its message type has them: MessagePack has numbers that are not
     finite, bytes, and times with a zone. JSON has texts for the latter two, and refuses such numbers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from math import isfinite
from types import NoneType
from typing import Final, Literal, NamedTuple, TypeAlias, cast, get_args

import click
import msgspec

from sow_cli.cell_values import NO_UTF8, CellType, ColumnType, bytes_of
from sow_cli.cells import NUMBER, is_json
from sow_cli.columns import METADATA_COLUMNS, Path, below, path_of
from sow_cli.kept import agree, is_plain, named_payload
from sow_cli.lines import NEVER_MICROS, BadLine, Item, Parse, canonical_text
from sow_client import MessageTypeName, PayloadForm
from sow_client._payloads import encoded_in, packed_time, packed_value

Kind: TypeAlias = Literal["ndjson", "json", "csv", "parquet", "arrow"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Outcome: TypeAlias = Item | BadLine | None
"""A record, a bad one, or nothing: an empty line."""

NULL: Final = msgspec.Raw(b"null")
"""A null of the document: a value of None is no field."""
_STAMP_DIGITS_MIN: Final = 10
"""The digits of a whole second of today: an expire time with an exponent and fewer has lost some."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode
_pack: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Target:
    """The parts that a topic's records are made of."""

    message_type: MessageTypeName = "json"
    separator: str = "\x01"
    has_key: bool = False
    """True: the key comes from fields of the payload."""
    rejects: bool = False
    """True: the topic refuses records with a lifetime, also with one that never ends (rule L3)."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The way in which the user wants the input to be read."""

    kind: Kind | None = None
    """None: as the file's name and its first byte tell."""
    types: Mapping[str, ColumnType] = field(default_factory=dict)
    """The types of columns of CSV; under "" that of all others. Without one, the first rows tell."""
    delimiter: str | None = None
    records: bool | None = None
    """True: lines are records; False: they are documents; None: as the first line tells."""
    record: Parse | None = None
    """Makes a record of a line that is one."""
    stamps: bool = False
    """True: records of an export keep their expire times."""
    absent: int | None = NEVER_MICROS
    """The expire time of those that have none."""
    encoding: str | None = None
    """The encoding of a text. None: UTF-8, or the one that a byte order mark in front of the text names."""
    keyed: Parse | None = None
    """Gives a document its key."""
    removes: Callable[[bytes], bool] | None = None
    """True for a document that removes the record of its key. None: there is none."""
    keep_spaces: bool = False
    """True: spaces around a line belong to it."""


class Unread(NamedTuple):
    """A value of a file that Python does not have."""

    text: str
    kind: CellType
    """The type of a text that would be one."""
    reason: str


class FineTime(str):
    """The text of a moment with nanoseconds, which a datetime of Python does not have."""

    __slots__ = ("nanos",)
    nanos: int
    """Since 1970."""

    @classmethod
    def of(cls, text: str, nanos: int) -> FineTime:
        """The moment that a text tells."""
        made = cls(text)
        made.nanos = nanos
        return made


class RecordMaker:
    """Makes records of rows whose columns have names ([1])."""

    def __init__(self, names: Sequence[str], reading: Reading, target: Target) -> None:
        """Raises a usage error for a name that is no field."""
        self.names = names
        self._target = target
        self._keyed = reading.keyed
        self._absent = reading.absent
        self._paths: list[tuple[int, Path]] = []
        self._key = self._expires = self._payload = self._whole = -1
        for number, name in enumerate(names):
            metadata = METADATA_COLUMNS.get(name)
            if metadata is None:
                self._paths.append((number, self._path(name)))
            elif metadata == "key" and not target.has_key:
                self._key = number
            elif metadata == "expire_time" and reading.stamps:
                self._expires = number
            elif metadata == "payload":
                self._whole = number
        if len(set(names)) < len(names):
            twice = next(name for name in names if list(names).count(name) > 1)
            raise click.UsageError(f"the column {twice!r} is there twice")
        paths = {path for _, path in self._paths}
        for number, path in self._paths:
            if any(path[:steps] in paths for steps in range(1, len(path))):
                raise click.UsageError(f"the column {names[number]!r} is inside the field of another column")
        fields = [names[number] for number, _ in self._paths]
        if target.message_type == "binary" or (target.message_type != "json" and fields == ["payload"]):
            self._payload = next((number for number, path in self._paths if path == ("payload",)), -1)
            if self._payload < 0:
                raise click.UsageError("a binary topic needs a column payload, and the input has none")
        self._form = PayloadForm(target.message_type, target.separator)
        self._encoded = encoded_in(self._form)
        self._is_packed = target.message_type == "msgpack"
        self._scalar = _in_msgpack if self._is_packed else _in_json

    def _path(self, name: str) -> Path:
        try:
            path = path_of(name)
        except ValueError as error:
            raise click.UsageError(f"the column {name!r}: {error}") from error
        if not name:
            place = f"column {list(self.names).index('') + 1} of {len(self.names)}"
            raise click.UsageError(f"{place} has no name; if it is the index of pandas: to_csv(…, index=False)")
        return path

    def outcome(self, values: Sequence[object]) -> Outcome:
        """The record of a row, whose values are None where there is none, and an `Unread` where Python has none."""
        try:
            return self.record(values)
        except BadLine as bad:
            bad.kept = self.kept(values, {})
            return bad

    def record(self, values: Sequence[object]) -> Item:
        """The record of a row. Raises BadLine."""
        try:
            data = self._data(values)
            key = None if self._key < 0 else self._key_text(values[self._key])
            if key is None and self._key >= 0 and self._keyed is None:
                raise BadLine("KEY_REQUIRED", f"column {self.names[self._key]} is empty")
            item = Item(data, key, None if self._expires < 0 else self._stamp(values[self._expires]))
            if self._keyed is not None:
                return self._keyed(data)._replace(data=data, expire_time_micros=item.expire_time_micros)
        except UnicodeEncodeError:
            raise BadLine("PAYLOAD_MALFORMED", NO_UTF8) from None
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise BadLine("PAYLOAD_MALFORMED", str(error)) from error
        return item

    def kept(self, values: Sequence[object], types: Mapping[str, CellType]) -> Mapping[str, object]:
        """The row in the file of --errors ([2]): its values by the names of their columns. `types`: of texts that are
        no values of the types of their columns."""
        row: dict[str, object] = {}
        told = dict(types)
        nulls = []
        for number, (name, value) in enumerate(zip(self.names, values, strict=True)):
            if name in METADATA_COLUMNS and number not in (self._key, self._expires, self._whole):
                continue
            has_packed = self._is_packed and name not in METADATA_COLUMNS and number != self._payload
            row[name], kind = (_kept_packed if has_packed else _kept_value)(self._plain(number, value))
            if kind is not None:
                told[name] = kind
            if type(value) is msgspec.Raw and bytes(value) == b"null":
                nulls.append(name)
        return {"row": row} | ({"types": told} if told else {}) | ({"nulls": nulls} if nulls else {})

    def _plain(self, number: int, value: object) -> object:
        """The value, as a text where it is a document in bytes."""
        if isinstance(value, bytes) and number == self._whole and self._target.message_type == "json":
            return value.decode("utf-8", "surrogateescape")
        return value

    def kept_text(self, text: str, kinds: Sequence[CellType], delimiter: str) -> Mapping[str, object]:
        """The text of a row of CSV in the file of --errors ([2])."""
        told = _kept_text(text)
        types = {name: kind for name, kind in zip(self.names, kinds, strict=True) if kind != "text"}
        told |= {"columns": list(self.names), "types": types}
        return told if delimiter == "," else told | {"delimiter": delimiter}

    def _key_text(self, value: object) -> str | None:
        """The key that the server would make of a document with this value."""
        if isinstance(value, str):
            value.encode()  # as the request does, whose error would end the whole run
            return str(value)
        if value is None:
            return None
        name = self.names[self._key]
        return canonical_text(msgspec.json.decode(_encode(self._cleaned(value, name, _in_json))), name)

    def _stamp(self, value: object) -> int | None:
        stamp = _micros(value)
        return self._absent if stamp is None else stamp

    def _data(self, values: Sequence[object]) -> bytes:
        if self._payload >= 0:
            return _bytes_of(values[self._payload])
        if self._whole >= 0 and (whole := values[self._whole]) is not None:
            return self._whole_payload(whole, values)
        document: dict[str, object] = {}
        for number, path in self._paths:
            value = values[number]
            if value is None:
                continue
            inside = document
            for name in path[:-1]:
                inside = cast(dict[str, object], inside.setdefault(name, {}))
            inside[path[-1]] = self._cleaned(value, self.names[number], self._scalar)
        if self._target.message_type in ("fix", "nvfix"):
            return self._encoded(named_payload(document, self._form))
        return self._encoded(self._packed(document, values) if self._is_packed else _encode(document))

    def _cleaned(self, value: object, name: str, scalar: Callable[[object], object]) -> object:
        try:
            return _cleaned(value, scalar)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise BadLine("PAYLOAD_MALFORMED", f"column {name}: {error}") from error
        except RecursionError:  # JSON that was just taken by a reader further up
            raise BadLine("PAYLOAD_MALFORMED", f"column {name}: nested too deeply") from None

    def _packed(self, document: object, values: Sequence[object]) -> bytes:
        try:
            return _pack(document)
        except (OverflowError, TypeError) as error:
            for number, _ in self._paths:
                if fault := _fault_in_msgpack(values[number]):
                    raise BadLine("PAYLOAD_MALFORMED", f"column {self.names[number]}: {fault}") from error
            raise
        except RecursionError:
            raise BadLine("PAYLOAD_MALFORMED", "nested too deeply") from None

    def _whole_payload(self, whole: object, values: Sequence[object]) -> bytes:
        """The payload that stands in a column of its own; it must be the one that the other columns show (kept [2])."""
        is_json_text = self._target.message_type == "json" and not isinstance(whole, bytes)
        data = bytes_of(_text_of(whole)) if is_json_text else _bytes_of(whole)
        found = self._form.fields(data) or {}
        typed = self._target.message_type in ("json", "msgpack")
        for number, path in self._paths:
            if not agree(below(found, path), values[number], typed=typed):
                raise BadLine(
                    "PAYLOAD_MALFORMED",
                    f"column {self.names[number]}: it is another value than in the record of the column _payload; "
                    "empty _payload to publish the columns",
                )
        return data


def _kept_value(value: object) -> tuple[object, CellType | None]:
    """A value in the file of --errors; of one that JSON does not have a text, and the type that it is not of."""
    if value is None or type(value) is msgspec.Raw:
        return value, None
    if isinstance(value, Unread):
        return value.text, value.kind
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return base64.b64encode(bytes_of(value)).decode(), "base64"
        return str(value), None
    try:
        return msgspec.Raw(_encode(_cleaned(value, _in_json))), None
    except (TypeError, ValueError, msgspec.MsgspecError):
        return (str(value), "number") if isinstance(value, (float, Decimal)) else (_shown(value), "json")


def _shown(value: object) -> str:
    """A text that is no JSON."""
    try:
        shown = json.dumps(value, default=str)
    except (TypeError, ValueError):
        shown = str(value)
    return f"({shown})" if is_json(shown.encode("utf-8", "backslashreplace")) else shown


def _kept_text(text: str) -> dict[str, object]:
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"base64": base64.b64encode(bytes_of(text)).decode()}
    return {"row": text}


def _kept_packed(value: object) -> tuple[object, CellType | None]:
    """The same for a field of MessagePack: a value that JSON does not give back is MessagePack in base64."""
    if type(value) not in (str, msgspec.Raw, Unread, NoneType):
        try:
            data = _pack(_cleaned(value, _in_msgpack))
        except (OverflowError, TypeError, ValueError, msgspec.MsgspecError):
            return _kept_value(value)
        if not is_plain(packed_value(data)):
            return base64.b64encode(data).decode(), "msgpack"
    return _kept_value(value)


def _fault_in_msgpack(value: object) -> str:
    """Why MessagePack does not have a value; empty: it does."""
    try:
        _pack(_cleaned(value, _in_msgpack))
    except OverflowError:
        return "MessagePack has no integer of more than 64 bits"
    except TypeError as error:
        return str(error)
    return ""


def _text_of(cell: object) -> str:
    return bytes(cell).decode("utf-8", "surrogateescape") if isinstance(cell, msgspec.Raw) else str(cell)


def _bytes_of(cell: object) -> bytes:
    return cell if isinstance(cell, bytes) else base64.b64decode(_text_of(cell) if cell else "", validate=True)


def _cleaned(value: object, scalar: Callable[[object], object]) -> object:
    """The value without the nulls of objects ([1]), of scalars as `scalar` has them in the document. Raises ValueError,
    TypeError and msgspec.MsgspecError."""
    match value:
        case dict():
            return {
                field if type(field) is str else _name(field): _cleaned(one, scalar)
                for field, one in value.items()
                if one is not None
            }
        case list():
            return [_cleaned(one, scalar) for one in value]
        case Unread():
            raise ValueError(value.reason)
    return scalar(value)


def _name(value: object) -> str:
    """The name of a field that has been in a map, where names are of any type."""
    if isinstance(value, str):
        return str(value)
    data = _encode(PayloadForm.plain(value))
    return str(msgspec.json.decode(data)) if data[:1] == b'"' else data.decode()


def _in_json(value: object) -> object:
    """A scalar for JSON ([3]). JSON has no NaN and no infinity, and a null in their place would be another value."""
    match value:
        case float():
            finite = isfinite(value)
        case Decimal():
            finite = value.is_finite()
        case FineTime():
            return str(value)
        case _:
            return value
    if not finite:
        raise ValueError(f"{value} is no number of JSON")
    return value


def _in_msgpack(value: object) -> object:
    """A scalar for MessagePack ([3])."""
    match value:
        case msgspec.Raw():
            return msgspec.json.decode(value)
        case Decimal():  # as the number that JSON has: msgspec would make floats of whole ones, and of 1E+400 infinity
            return msgspec.json.decode(_encode(value)) if value.is_finite() else float(value)
        case FineTime():
            return packed_time(value.nanos)
    return value


def _micros(value: object) -> int | None:
    """An expire time: microseconds, or a time with a zone; None: never."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, Unread):
        raise ValueError(value.reason)
    moment = value if isinstance(value, datetime) else None
    if moment is None:
        text = bytes(value).decode() if isinstance(value, (bytes, msgspec.Raw)) else str(value)
        if not text:
            return None  # `""`: some programs quote all cells, also empty ones
        if text.isdecimal():
            return int(text)
        if NUMBER.fullmatch(text) and (number := Decimal(text)) == number.to_integral_value():
            if "e" in text.lower() and len(number.as_tuple().digits) < _STAMP_DIGITS_MIN:
                raise ValueError(f"the expire time {text} is rounded, as spreadsheets do; empty or remove its column")
            return int(number)  # pandas has floats for whole numbers beside missing ones
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ValueError(f"the expire time {text!r} is no time: microseconds, or ISO 8601 with a zone") from None
    if moment.tzinfo is None:
        raise ValueError(f"the expire time {moment.isoformat()} has no time zone")
    return (moment - _EPOCH) // timedelta(microseconds=1)
