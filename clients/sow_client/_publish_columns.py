"""The rows of a publisher in columns, as a request has them, each row checked before it is sent. Pure.

[1]  The payloads and keys of a request stay within `BATCH_BYTES`; only a single larger row travels alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add
from typing import Final, NamedTuple, TypeAlias, cast

from sow.v1 import types_pb2
from sow_client import _lifetimes, _writes
from sow_client._keys import Key, optional_key
from sow_client._lifetimes import Lifetime
from sow_client._records import ExpireAt, Ttl, invalid
from sow_client.errors import SowError, error_of_reason

BATCH_BYTES: Final = 4 * 1024 * 1024
"""A request is sealed before its payloads exceed this; a larger document travels alone."""
PAYLOAD_BYTES_MAX: Final = _writes.REQUEST_BYTES_MAX
KEY_CHARACTERS_MAX: Final = 512 * 1024
"""No server takes a longer key (rule K8). It could make a message too large although its payload is not."""


class Removal(NamedTuple):
    """A removal that waits (rule P11): it has a key, or a document."""

    payload: bytes
    key: str | None


Pending: TypeAlias = bytes | tuple[bytes, str | None, Lifetime | None] | Removal
"""A record that waits: its payload; or payload, key and lifetime; or a removal."""


class RequestColumns(NamedTuple):
    """The columns of one request; an empty one is left out."""

    payloads: Sequence[bytes]
    keys: Sequence[str]
    kinds: Sequence[types_pb2.LifetimeKind.ValueType]
    micros: Sequence[int]
    size: int
    """Bytes of the payloads."""
    removals: Sequence[bool] = ()
    """Which rows are removals. Then an empty key stands for none."""


_ABSENT: Final = Lifetime(types_pb2.LIFETIME_KIND_UNSPECIFIED, 0)


def plain_columns(taken: list[Pending]) -> RequestColumns:
    """As `row_columns`, of records without keys and lifetimes of their own."""
    payloads = cast(list[bytes], taken)  # what `plain` promises
    fitting, size = fitting_rows(payloads, None)
    return RequestColumns(payloads[:fitting], (), (), (), size)


def row_columns(taken: list[Pending]) -> RequestColumns:
    """Columns of the longest beginning that may go in one request: all with a key, or all without."""
    if Removal in set(map(type, taken)):
        return _columns_with_removals(taken)
    rows = [item if type(item) is tuple else (item, None, None) for item in taken]
    payloads, keys, lifetimes = zip(*rows, strict=True)
    keyed = keys[0] is not None
    alike = len(keys)
    if keys.count(None) != (0 if keyed else alike):
        alike = next(index for index, key in enumerate(keys) if (key is not None) is not keyed)
    fitting, _ = fitting_rows(payloads[:alike], keys[:alike] if keyed else None)
    payloads, lifetimes = payloads[:fitting], lifetimes[:fitting]
    kinds: Sequence[types_pb2.LifetimeKind.ValueType] = ()
    micros: Sequence[int] = ()
    if lifetimes.count(None) < fitting:
        kinds, micros = zip(*[lifetime or _ABSENT for lifetime in lifetimes], strict=True)
    return RequestColumns(payloads, keys[:fitting] if keyed else (), kinds, micros, sum(map(len, payloads)))


def _columns_with_removals(taken: list[Pending]) -> RequestColumns:
    """As `row_columns`: a removal may have a key where the puts have none."""
    rows = [
        (item.payload, item.key or "", None)
        if isinstance(item, Removal)
        else (item, "", None)
        if isinstance(item, bytes)
        else (item[0], item[1] or "", item[2])
        for item in taken
    ]
    payloads, keys, lifetimes = zip(*rows, strict=True)
    fitting, size = fitting_rows(payloads, keys)
    kinds: Sequence[types_pb2.LifetimeKind.ValueType] = ()
    micros: Sequence[int] = ()
    if lifetimes.count(None) < len(lifetimes):
        kinds, micros = zip(*[lifetime or _ABSENT for lifetime in lifetimes[:fitting]], strict=True)
    return RequestColumns(
        payloads[:fitting],
        keys[:fitting] if any(keys) else (),
        kinds,
        micros,
        size,
        [isinstance(item, Removal) for item in taken[:fitting]],
    )


def fitting_rows(payloads: Sequence[bytes], keys: Sequence[str] | None) -> tuple[int, int]:
    """The number of rows, at least one, that stay within `BATCH_BYTES`, and the bytes of their payloads."""
    size = sum(map(len, payloads))
    # The server refuses a record whose key is too long. Many such keys must not make a message too large.
    key_bytes = 0 if keys is None else _writes.KEY_CHARACTER_BYTES * sum(map(len, keys))
    if size + key_bytes <= BATCH_BYTES:
        return len(payloads), size
    sizes = list(accumulate(map(len, payloads)))
    with_keys = sizes
    if keys is not None:
        with_keys = list(map(add, sizes, accumulate(_writes.KEY_CHARACTER_BYTES * len(key) for key in keys)))
    fitting = max(1, bisect_right(with_keys, BATCH_BYTES))
    return fitting, sizes[fitting - 1]


class CheckedColumns(NamedTuple):
    """Columns from the caller, checked; a column without any information is None."""

    payloads: Sequence[bytes]
    keys: Sequence[str] | None
    kinds: Sequence[types_pb2.LifetimeKind.ValueType] | None
    micros: array[int] | None
    removals: Sequence[bool] | None = None

    def cut(self, start: int, records: int) -> RequestColumns:
        """Columns of the next request: at most `records` rows, and only as many as fit in one request."""
        keys = None if self.keys is None else self.keys[start : start + records]
        fitting, size = fitting_rows(self.payloads[start : start + records], keys)
        stop = start + fitting
        return RequestColumns(
            self.payloads[start:stop],
            () if self.keys is None else self.keys[start:stop],
            () if self.kinds is None else self.kinds[start:stop],
            () if self.micros is None else self.micros[start:stop],
            size,
            () if self.removals is None or True not in (part := self.removals[start:stop]) else part,
        )


def checked_columns(
    payloads: Sequence[bytes],
    keys: Sequence[str] | None,
    lifetime_kinds: Iterable[int] | None,
    lifetime_micros: Iterable[int] | None,
    removals: Sequence[bool] | None = None,
) -> CheckedColumns:
    """Checks all columns before anything is sent. Raises InvalidArgument with column and row, or PAYLOAD_TOO_LARGE.

    It checks column by column, so that C does the work: half a microsecond of Python per record would be most of the
    cost.
    """
    if set(map(type, payloads)) - {bytes}:
        row = next(index for index, payload in enumerate(payloads) if type(payload) is not bytes)
        raise invalid(f"payloads[{row}]", f"is {type(payloads[row]).__name__}, not bytes")
    if keys is not None:
        _check_length("keys", keys, payloads)
        if set(map(type, keys)) - {str}:
            row = next(index for index, key in enumerate(keys) if type(key) is not str)
            raise invalid(f"keys[{row}]", f"is {type(keys[row]).__name__}, not str")
        try:
            "".join(keys).encode()
        except UnicodeEncodeError:
            row = next(index for index, key in enumerate(keys) if not _well_formed(key))
            raise invalid(f"keys[{row}]", "is not well-formed Unicode") from None
    check_sizes(payloads, keys)
    if removals is not None:
        _check_length("removals", removals, payloads)
        kinds_of_removals = list(map(type, removals))
        if kinds_of_removals.count(bool) < len(kinds_of_removals):
            row = next(index for index, kind in enumerate(kinds_of_removals) if kind is not bool)
            raise invalid(f"removals[{row}]", f"is {kinds_of_removals[row].__name__}, not bool")
    if lifetime_kinds is None and lifetime_micros is None:
        return CheckedColumns(payloads, keys, None, None, removals)
    if lifetime_kinds is None or lifetime_micros is None:
        missing = "lifetime_kinds" if lifetime_kinds is None else "lifetime_micros"
        raise invalid(missing, "is missing: a lifetime is a kind and a number of microseconds")
    try:
        kinds = list(lifetime_kinds)
        micros = array("q", lifetime_micros)
    except (TypeError, OverflowError) as error:
        raise invalid("lifetime_micros", f"is no column of whole numbers of 64 bits: {error}") from None
    _check_length("lifetime_kinds", kinds, payloads)
    _check_length("lifetime_micros", micros, payloads)
    found = set(kinds)
    if not found <= _KINDS:
        row = next(index for index, kind in enumerate(kinds) if kind not in _KINDS)
        raise invalid(f"lifetime_kinds[{row}]", f"{kinds[row]!r} is not a kind of lifetime")
    if found & _WITHOUT_MICROS:
        for row, (kind, value) in enumerate(zip(kinds, micros, strict=True)):
            if value and kind in _WITHOUT_MICROS:
                raise invalid(f"lifetime_micros[{row}]", f"is {value}, and must be 0 for this kind of lifetime")
    if found <= {types_pb2.LIFETIME_KIND_UNSPECIFIED}:
        return CheckedColumns(payloads, keys, None, None, removals)
    if removals is not None and (row := next((row for row, one in enumerate(removals) if one and kinds[row]), -1)) >= 0:
        raise invalid(f"lifetime_kinds[{row}]", "is of a removal, which has no lifetime")
    return CheckedColumns(payloads, keys, cast(list[types_pb2.LifetimeKind.ValueType], kinds), micros, removals)


def check_sizes(payloads: Sequence[bytes], keys: Sequence[str] | None) -> None:
    """Raises InvalidArgument (PAYLOAD_TOO_LARGE, KEY_TOO_LARGE) for a row that fits in no request."""
    if payloads and (largest := max(map(len, payloads))) > PAYLOAD_BYTES_MAX:
        row = next(index for index, payload in enumerate(payloads) if len(payload) == largest)
        raise payload_too_large(largest, f"payloads[{row}]")
    if keys and (longest := max(map(len, keys))) > KEY_CHARACTERS_MAX:
        row = next(index for index, key in enumerate(keys) if len(key) == longest)
        raise key_too_large(keys[row], f"keys[{row}]")


def check_row(payload: bytes, key: Key | None, ttl: Ttl | None, expire_at: ExpireAt | None) -> None:
    """Raises what a publisher would raise for this record."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise payload_too_large(len(payload))
    _lifetimes.lifetime(ttl, expire_at)
    text = optional_key(key)
    if text is not None:
        if len(text) > KEY_CHARACTERS_MAX:
            raise key_too_large(text)
        if not _well_formed(text):
            raise invalid("key", "is no well-formed Unicode: it has half of a surrogate pair")


def _check_length(name: str, column: Sequence[object], payloads: Sequence[bytes]) -> None:
    if len(column) != len(payloads):
        raise invalid(name, f"has {len(column)} entries for {len(payloads)} payloads")


def _well_formed(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


_KINDS: Final = frozenset(types_pb2.LifetimeKind.values())
_WITHOUT_MICROS: Final = {types_pb2.LIFETIME_KIND_UNSPECIFIED, types_pb2.LIFETIME_KIND_NEVER}


def payload_too_large(size: int, field: str = "data") -> SowError:
    """The error for a document that fits in no request."""
    return error_of_reason(
        "PAYLOAD_TOO_LARGE",
        f"{field}: the payload of {size} bytes is larger than a request ({PAYLOAD_BYTES_MAX} bytes)",
        details={"field": field},
    )


def key_too_large(key: str, field: str = "key") -> SowError:
    """The error for a key that fits in no request."""
    return error_of_reason(
        "KEY_TOO_LARGE",
        f"{field}: a key of {len(key)} characters is larger than the limit of {KEY_CHARACTERS_MAX} of a request",
        details={"field": field},
    )
