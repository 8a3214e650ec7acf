"""Documents: Python values as JSON, and JSON as Python values. Pure.

    [1]  A number that JSON cannot express (NaN, an infinity) is refused with its path. It never becomes null: a null in
         a delta leaves the old value (rule P2), so the new one would be lost silently.
    [2]  A document is read completely or not at all: a number beyond a float becomes a Decimal with the digits that
         were published.

docs/reference/documents.md tells how each type is encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from math import isfinite
from typing import Any, ClassVar, Final, Protocol, TypeAlias, TypeVar, cast

import msgspec

from sow_client.errors import InvalidArgument


class Dataclass(Protocol):
    """An instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # as typeshed declares it: dataclasses declare nothing more


class PydanticModel(Protocol):
    """An instance of a model of pydantic, which need not be installed."""

    def model_dump_json(self) -> str: ...


Document: TypeAlias = (
    Mapping[str, object] | Dataclass | msgspec.Struct | PydanticModel | str | bytes | bytearray | memoryview
)
"""A document: a mapping, a dataclass, a msgspec.Struct or a pydantic model becomes JSON, text UTF-8; bytes stay
as they are."""


# ---- to JSON ----


def encode(document: Document) -> bytes:
    """The bytes of a document. Raises InvalidArgument (PAYLOAD_MALFORMED) for a value that JSON cannot express. For a
    number that is not finite, the error's details have the path of its field, such as /a/b[3]."""
    if type(document) is not dict:  # the type of nearly all: it takes the short way
        if isinstance(document, bytes):
            return document
        if isinstance(document, bytearray | memoryview):
            return bytes(document)  # JSON would make base64 of it
    try:
        if isinstance(document, str):
            return document.encode()
        payload = encode_json(document)
        # msgspec writes a float that is not finite as null, and a Decimal as NaN or Infinity. To look for these texts
        # costs a tenth of a microsecond, to walk through every document several times what encoding it costs. A search
        # for one character costs next to nothing, so it comes before the search for a word that few documents have.
        if (
            _find_null(payload)
            or (_CAPITAL_N in payload and _find_nan(payload))
            or (_CAPITAL_I in payload and _find_infinity(payload))
        ):
            _check_finite(document)
        return payload
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        if type(error) is ValueError:  # as msgspec from 0.23 on says it of a Decimal
            _check_finite(document)
        raise InvalidArgument(
            f"data: cannot be encoded: {error}", reason="PAYLOAD_MALFORMED", details={"field": "data"}
        ) from error


def _check_finite(document: Document) -> None:
    path = not_finite(document)
    if path is not None:
        raise InvalidArgument(
            f"data: {path or '/'} is NaN or infinite, which JSON cannot express",
            reason="PAYLOAD_MALFORMED",
            details={"field": "data", "path": path},
        )


def not_finite(value: object) -> str | None:
    """The path of a NaN or infinite number in a value that can be encoded, such as /a/b[3]; None: there is no such
    number. Empty when the value itself is one."""
    kind = type(value)
    if kind is dict:
        assert isinstance(value, dict), "as its type says"
        for member in value.values():  # without the names: nearly always there is nothing to find
            kind = type(member)
            if kind not in _NEVER_NOT_FINITE and not (kind is float and isfinite(member)):
                break
        else:
            return None
        for name, member in value.items():
            kind = type(member)
            if kind in _NEVER_NOT_FINITE or (kind is float and isfinite(member)):
                continue
            below = not_finite(member)
            if below is not None:
                return f"{_step(name)}{below}"
    elif kind in (list, tuple, set, frozenset):
        assert isinstance(value, list | tuple | set | frozenset), "as its type says"
        for index, item in enumerate(value):
            kind = type(item)
            if kind in _NEVER_NOT_FINITE or (kind is float and isfinite(item)):
                continue
            below = not_finite(item)
            if below is not None:
                return f"[{index}]{below}"
    elif isinstance(value, float):
        return None if isfinite(value) else ""
    elif isinstance(value, Decimal):
        return None if value.is_finite() else ""
    elif kind not in _NEVER_NOT_FINITE and not isinstance(value, msgspec.Raw):
        # A dataclass, an enum, a mapping of another kind …: as msgspec sees it, with the names that it writes.
        plain = msgspec.to_builtins(value, builtin_types=(Decimal,), str_keys=True, enc_hook=simpler)
        return not_finite(plain)
    return None


def _step(name: object) -> str:
    """A step of a path as filters and settings take it (rule K3)."""
    text = name if isinstance(name, str) else msgspec.to_builtins({name: 0}, str_keys=True).popitem()[0]
    if text and "/" not in text and not text.startswith("["):
        return f"/{text}"
    escaped = text.replace("\\", "\\\\").replace("]", "\\]")
    return f"/[{escaped}]"


def simpler(value: object) -> object:
    """The replacement for a value of a type that msgspec does not know. Raises TypeError when there is none."""
    match value:
        case Mapping():
            return dict(value)
        case float():  # subclasses, such as numpy.float64
            return float(value)
        case int():
            return int(value)
        case str():
            return str.__str__(value)
        case bytes():
            return bytes(value)
    dump = getattr(value, "model_dump", None)
    if dump is not None and hasattr(type(value), "__pydantic_fields__"):
        # As pydantic writes it, but for NaN and infinities: it would write null, and this leaves them to be refused.
        return dump(mode="json", by_alias=True)
    # A scalar of numpy, which need not be installed. Its times are left out: `item` makes numbers of some of them.
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        item = getattr(value, "item", None)
        kind = getattr(getattr(value, "dtype", None), "kind", "")
        if callable(item) and kind in "biuf":
            return float(item()) if kind == "f" else item()
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} has no form in JSON")


encode_json: Final = msgspec.json.Encoder(decimal_format="number", enc_hook=simpler).encode
"""The JSON of a value. A float that is not finite becomes null; `encode` refuses it."""
_find_null = re.compile(rb"null").search  # half the cost of `in`
_find_nan = re.compile(rb"NaN").search
_find_infinity = re.compile(rb"Infinity").search
_CAPITAL_N: Final = ord("N")
_CAPITAL_I: Final = ord("I")
_NEVER_NOT_FINITE: Final = frozenset({str, int, bool, type(None), bytes})


# ---- from JSON ----

_decode_json = msgspec.json.Decoder().decode


def is_json_object(payload: bytes) -> bool:
    """True if a payload begins like a JSON object."""
    return payload[:1] == b"{" or payload.lstrip(b" \t\r\n")[:1] == b"{"


def decode(payload: bytes) -> object:
    """A JSON document as Python values. A number beyond the range of floats, such as 1e400, or an integer of more
    digits than Python converts, becomes a Decimal. Raises ValueError for invalid JSON."""
    try:
        return _decode_json(payload)
    except msgspec.ValidationError:  # well-formed, except for a number that is out of range
        return json.loads(payload, parse_float=_number, parse_int=_number, parse_constant=_refuse_constant)


_Value = TypeVar("_Value")


def decode_as(payload: bytes, kind: type[_Value]) -> _Value:
    """A JSON document as a value of a type that msgspec or pydantic knows. Raises the ValueError of either."""
    return cast(_Value, _decoder_of(kind)(payload))  # type: ignore[arg-type]  # types are hashable


@lru_cache(maxsize=256)
def _decoder_of(kind: Any) -> Callable[[bytes], object]:
    validate: Callable[[bytes], object] | None = getattr(kind, "model_validate_json", None)
    if validate is not None:
        return validate
    if hasattr(kind, "__pydantic_fields__"):  # one of pydantic's dataclasses, so pydantic is there
        import pydantic  # lazily: it takes longer than the whole client

        return pydantic.TypeAdapter(kind).validate_json
    return msgspec.json.Decoder(kind).decode


def _number(text: str) -> int | float | Decimal:
    if text.lstrip("-").isdecimal():
        try:
            return int(text)
        except ValueError:  # more digits than Python converts
            return Decimal(text)
    value = float(text)
    if isfinite(value):
        return value
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of 19 digits or more
        return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
