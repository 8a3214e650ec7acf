"""Payloads of every message type as Python values, as JSON, and as the texts of columns. Pure.

Records, frames, the command's outputs, the console and Spark read payloads here, so they all show the same.

    [1]  Nothing is lost in silence. A value that JSON lacks has a form of its own there
         (docs/reference/documents.md): NaN and infinities are "nan", "inf" and "-inf", as in keys (rule K4); bytes are
         base64; a time is ISO 8601 with as many digits as it has, down to nanoseconds; another extension is
         {"ext": its number, "data": base64}.
    [2]  Of a repeated name of fix or nvfix the first field counts, and of a repeated name of an object the last one, as
         in filters (rule K2).
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from math import isfinite
from typing import Final, Literal, TypeAlias

import msgspec

from sow.flat_fields import DATA_OF, FlatFields
from sow_client._documents import Document, decode, encode, encode_json, is_json_object, simpler
from sow_client.errors import InvalidArgument

MessageTypeName: TypeAlias = Literal["json", "msgpack", "fix", "nvfix", "binary"]
"""Encoding of a topic's payloads. Rule: K2."""

_decode_level: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_map: Final = msgspec.msgpack.Decoder(dict[str, object]).decode
_decode_value: Final = msgspec.msgpack.Decoder().decode
_decode_items: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_members: Final = msgspec.msgpack.Decoder(dict[object, msgspec.Raw]).decode
_MAPS: Final = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
_ARRAYS: Final = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
_TIME: Final = -1
"""The number of the extension that is a time."""
_TIMES: Final = (b"\xd7\xff", b"\xc7\x0c\xff")
"""How times begin that may be finer than a microsecond."""
_SHORT_SECONDS_MAX: Final = 2**34 - 1
"""In a time of 8 bytes."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class PayloadForm:
    """Reads payloads of one message type."""

    message_type: MessageTypeName | Literal[""] = "json"
    """Empty: not known, as an older server answered. Then JSON objects are read, and other payloads stay bytes."""
    separator: str = "\x01"
    """Between the fields of fix and nvfix."""

    @property
    def encoded_as(self) -> str:
        """As requests name it; a topic of another form refuses them. A form that is not known encodes as JSON."""
        kind = self.message_type or "json"
        return kind + self.separator if kind in ("fix", "nvfix") else kind

    def document(self, payload: bytes) -> object:
        """The payload as Python values; its bytes where it is none of this type, such as the empty payload of a query
        for keys.

        Of fix and nvfix all values are text. Of MessagePack a time is a datetime, if that holds it exactly; other
        times, and other extensions, are `msgspec.msgpack.Ext`.
        """
        kind = self.message_type
        if kind == "json" or not kind:  # the usual type takes the short way
            if not is_json_object(payload):
                return payload
            try:
                return decode(payload)
            except ValueError:
                return payload  # bytes that merely begin like JSON
        found = self.fields(payload) if payload else None
        return payload if found is None else found

    def fields(self, payload: bytes) -> Mapping[str, object] | None:
        """The top-level fields; None: the payload has none. Those of JSON are `msgspec.Raw`: exact, and cheap where
        they are not needed."""
        match self.message_type:
            case "json" | "":
                return _json_fields(payload)
            case "msgpack":
                return _msgpack_fields(payload)
            case "fix" | "nvfix":
                return _named_fields(payload, flat_fields(self))
        return None

    def json(self, payload: bytes) -> bytes | None:
        """The payload as a JSON object ([1]); None: it has no fields."""
        found = self.fields(payload)
        if found is None or self.message_type in ("json", ""):
            return None if found is None else payload
        return msgspec.json.encode(_plain(found))

    def encode(self, document: Document) -> bytes:
        """The bytes of a document of this type; text and bytes stay as they are. Raises InvalidArgument
        (PAYLOAD_MALFORMED) for a document that this type cannot express.

        In fix and nvfix each entry of a mapping is a field: a text, bytes, or a number. A data field of fix that holds
        the separator gets its length in front of it.
        """
        match self.message_type:
            case "json" | "":
                return encode(document)
            case _ if isinstance(document, str | bytes | bytearray | memoryview):
                return document.encode() if isinstance(document, str) else bytes(document)
            case "binary":
                raise _unfit("the topic is binary: give bytes")
            case "msgpack":
                return _encode_msgpack(document)
            case _:
                return _encode_fields(document, flat_fields(self))

    @property
    def encoder(self) -> Callable[[Document], bytes]:
        """`encode`, by the shortest way."""
        return encode if self.message_type in ("json", "") else self.encode

    @staticmethod
    def plain(value: object) -> object:
        """A value of `document` in the types that JSON has ([1])."""
        return _plain(value)

    @staticmethod
    def text(value: object) -> str | None:
        """A value of `document` in one cell: a text is itself, anything else its JSON ([1]). None stands for null."""
        found = _plain(value)
        if found is None or isinstance(found, str):
            return found
        return encode_json(found).decode()

    @staticmethod
    def in_columns(value: object) -> object:
        """A value of `document` in the types that tables of Arrow have: as `plain`, with numbers that are not finite,
        times and bytes as they are."""
        return _in_columns(value)


class Encoded(bytes):
    """A document that the command has encoded, with the form. Other bytes are the program's own."""

    encoded_as: str
    """See `PayloadForm`."""


@lru_cache(maxsize=64)
def encoded_in(form: PayloadForm) -> type[Encoded]:
    """The class of documents of one form: that it has the form, and not each of them, saves memory."""
    return type("Encoded", (Encoded,), {"__slots__": (), "encoded_as": form.encoded_as})


class Encoding:
    """Encodes documents in a form, and knows whether it has: bytes and text are the program's own."""

    def __init__(self, form: PayloadForm) -> None:
        self._form = form
        self.encoded_as = ""

    def encode(self, document: Document) -> bytes:
        """As `PayloadForm.encode`."""
        if isinstance(document, Encoded):
            self.encoded_as = document.encoded_as
        elif not isinstance(document, str | bytes | bytearray | memoryview):
            self.encoded_as = self._form.encoded_as
        return self._form.encode(document)


def flat_fields(form: PayloadForm) -> FlatFields:
    """The reader of the fields of a form of fix or nvfix."""
    return _flat(form.separator, form.message_type == "fix")


@lru_cache(maxsize=64)
def _flat(separator: str, tags: bool) -> FlatFields:
    return FlatFields(separator.encode("latin-1"), tags=tags)


def _json_fields(payload: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return _decode_level(payload)
    except (msgspec.MsgspecError, RecursionError):  # no object, or no JSON
        return None


def _msgpack_fields(payload: bytes) -> dict[str, object] | None:
    try:
        if not any(map(payload.__contains__, _TIMES)):
            return _decode_map(payload)
        found = _exact(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _exact(payload: bytes | msgspec.Raw) -> object:
    """A value of MessagePack. msgspec alone would round nanoseconds."""
    data = bytes(payload)
    if data[0] in _MAPS:
        return {name: _exact(value) for name, value in _decode_members(data).items()}
    if data[0] in _ARRAYS:
        return [_exact(value) for value in _decode_items(data)]
    if not data.startswith(_TIMES):
        return _decode_value(data)
    content = data[2:] if data[0] == 0xD7 else data[3:]
    moment, nanos = _time(content)
    return msgspec.msgpack.Ext(_TIME, content) if nanos % 1000 else moment


def packed_value(data: bytes) -> object:
    """A value of MessagePack, as it is in a document. Raises ValueError."""
    found = _msgpack_fields(b"\x81\xa0" + data)
    if found is None:
        raise ValueError("it is no value of MessagePack")
    return found[""]


def packed_time(nanos: int) -> msgspec.msgpack.Ext:
    """The time of MessagePack at so many nanoseconds after 1970."""
    seconds, rest = divmod(nanos, 1_000_000_000)
    if 0 <= seconds <= _SHORT_SECONDS_MAX:
        return msgspec.msgpack.Ext(_TIME, (rest << 34 | seconds).to_bytes(8, "big"))
    return msgspec.msgpack.Ext(_TIME, rest.to_bytes(4, "big") + seconds.to_bytes(8, "big", signed=True))


def _time(content: bytes) -> tuple[datetime, int]:
    """A time of 8 or 12 bytes, cut to microseconds, and its nanoseconds. Raises ValueError for an extension that is
    none."""
    if len(content) == 8:
        both = int.from_bytes(content, "big")
        seconds, nanos = both & _SHORT_SECONDS_MAX, both >> 34
    elif len(content) == 12:
        nanos, seconds = int.from_bytes(content[:4], "big"), int.from_bytes(content[4:], "big", signed=True)
    else:
        raise ValueError(f"a time of {len(content)} bytes")
    try:
        if nanos >= 1_000_000_000:
            raise ValueError(f"a time of {nanos} nanoseconds")
        return _EPOCH + timedelta(seconds=seconds, microseconds=nanos // 1000), nanos
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _named_fields(payload: bytes, flat: FlatFields) -> dict[str, object] | None:
    found: dict[str, object] = {}
    for part in flat.parts(payload):
        name, equals, value = part.partition(b"=")
        if equals and name:
            found.setdefault(name.decode(errors="replace"), value.decode("utf-8", "backslashreplace"))
    return found or None


# ---- documents as payloads ----


def _encode_msgpack(document: Document) -> bytes:
    try:
        payload = _encode_value(document)
        infinities = len(_INFINITY.findall(payload))
        if infinities and infinities > len(_INFINITY.findall(_encode_decimals_as_text(document))):
            raise OverflowError("a Decimal is beyond the numbers of MessagePack")  # msgspec makes it an infinity
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _unfit(f"cannot be encoded as MessagePack: {error}") from error
    return payload


_encode_value: Final = msgspec.msgpack.Encoder(decimal_format="number", enc_hook=simpler).encode
_encode_decimals_as_text: Final = msgspec.msgpack.Encoder(enc_hook=simpler).encode
_INFINITY: Final = re.compile(rb"\xcb[\x7f\xff]\xf0\x00{6}|\xa8Infinity|\xa9-Infinity")
"""As a number of MessagePack, and as the text of a Decimal."""


def _encode_fields(document: Document, flat: FlatFields) -> bytes:
    try:
        found = document if isinstance(document, Mapping) else msgspec.to_builtins(document, enc_hook=simpler)
    except (TypeError, ValueError, RecursionError) as error:
        raise _unfit(f"cannot be encoded: {error}") from error
    if not isinstance(found, Mapping):
        raise _unfit("is no mapping of names to values")
    fields: dict[bytes, bytes] = {}
    for given, value in found.items():
        name = flat.name(str(given).encode()) if isinstance(given, str | int) else b""
        if not name or b"=" in name or flat.separator in name or (flat.tags and not name.isdigit()) or name in fields:
            wrong = "is there twice" if name in fields else "is no tag" if flat.tags else "is no name of a field"
            raise _unfit(f"the field {given!r} {wrong}", path=f"/{given}")
        fields[name] = _field_text(given, value)
    lengths = {data: length for length, data in DATA_OF.items()} if flat.tags else {}
    parts: list[bytes] = []
    for name, text in fields.items():
        length = lengths.get(name)
        if length is not None and length not in fields and flat.separator in text:
            parts.append(b"%s=%d" % (length, len(text)))
        parts.append(name + b"=" + text)
    payload = b"".join([part + flat.separator for part in parts])
    read = {item.name: item.value for item in flat.items(payload)}
    for name, text in fields.items():
        if flat.separator in text and read.get(name) != text:
            raise _unfit(f"the field {name.decode()!r} holds the separator of the fields", path=f"/{name.decode()}")
    return payload


def _field_text(name: object, value: object) -> bytes:
    match value:
        case str():
            return value.encode()
        case bytes():
            return value
        case bool() | None:
            pass
        case int() | Decimal():
            return str(value).encode()
        case float() if isfinite(value):
            return msgspec.json.encode(value)
    raise _unfit(f"the field {name!r} is a {type(value).__name__}; give text, bytes or a number", path=f"/{name}")


def _unfit(message: str, *, path: str | None = None) -> InvalidArgument:
    details = {"field": "data"} if path is None else {"field": "data", "path": path}
    return InvalidArgument(f"data: {message}", reason="PAYLOAD_MALFORMED", details=details)


# ---- values as JSON and as text ----


def _plain(value: object) -> object:
    kind = type(value)
    if kind in _PLAIN_KINDS:
        return value
    if kind is float:
        return value if isfinite(value) else repr(value)  # type: ignore[arg-type]  # as its type says
    if isinstance(value, Mapping):
        names = [name if isinstance(name, str) else PayloadForm.text(name) or "null" for name in value]
        texts = dict(zip(names, map(_plain, value.values()), strict=True))
        # Names of a map of MessagePack are any values. Where two have one text, all are told.
        return texts if len(texts) == len(value) else [[_plain(name), _plain(one)] for name, one in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, msgspec.msgpack.Ext):
        return _extension(value, lambda data: b64encode(data).decode())
    return msgspec.json.encode(value).decode()[1:-1] if isinstance(value, datetime) else value


def _in_columns(value: object) -> object:
    if isinstance(value, Mapping):
        if all(isinstance(name, str) for name in value):
            return {name: _in_columns(one) for name, one in value.items()}
        return _plain(value)
    if isinstance(value, list | tuple):
        return [_in_columns(one) for one in value]
    return _extension(value, bytes) if isinstance(value, msgspec.msgpack.Ext) else value


def _extension(value: msgspec.msgpack.Ext, data: Callable[[bytes], object]) -> object:
    content = bytes(value.data)
    if value.code == _TIME:
        try:
            moment, nanos = _time(content)
            return f"{moment.replace(microsecond=0, tzinfo=None).isoformat()}.{nanos:09}Z"
        except ValueError:
            pass  # no time, though its number says so
    return {"ext": value.code, "data": data(content)}


_PLAIN_KINDS: Final = frozenset({str, int, bool, type(None)})
