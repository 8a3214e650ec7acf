"""The work of a micro-batch on one key of a state on Spark: the rules of records (K, P, L), with the time of the batch
as the clock. Pure. spark_connector/java does the same; tests hold both to a store, with equal programs.

    [1]  Each row first expires an overdue record, and then does its own work (rule L10). So an expiry happens once.
    [2]  A version is `max(now, last version of the key + 1)` (rule K7): unique for a key, not for a topic. A key that
         is gone forgets it, unless late rows are refused.
    [3]  Nothing here raises for a row: what is wrong with it is a change `refused`, with the reason and a sentence.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from sow.durations import DurationError, parse_micros

Expiration: TypeAlias = Literal["disabled", "enabled", "reject"]
TTL_MAX_MICROS: Final = 3_653 * 86_400_000_000
"""The longest lifetime (rule L18)."""
NESTING_MAX: Final = 256
"""Levels of a document (rule K2)."""
PAYLOAD_BYTES_MAX: Final = 1 << 20
KEY_BYTES_MAX: Final = 1 << 10
"""The limits that a server has by default (rule K8)."""
LEVELS_MAX: Final = 32
"""Objects are merged down to this depth (rule P2)."""
OPS: Final = ("put", "delta", "touch", "delete")
MODES: Final = ("RESET", "KEEP", "EXTEND")


class Settings(NamedTuple):
    """The settings of the operator. Times are microseconds."""

    expiration: Expiration = "enabled"
    default_ttl_micros: int | None = None
    min_ttl_micros: int | None = None
    max_ttl_micros: int | None = None
    tombstones_micros: int | None = None
    """Rows that come late are refused, also for this time after their record has gone; None: they are applied."""


class Given(NamedTuple):
    """A row. The names of its columns, but for `_key`, are those of the fields with `_` before them."""

    op: str
    payload: bytes | None = None
    ttl: str | None = None
    """A duration, `never`, or None (rule L2)."""
    expire_time_micros: int | None = None
    ttl_mode: str | None = None
    only_if: str | None = None
    only_if_version: int | None = None
    order: Sequence[int] = ()
    reason: str = ""
    """Not empty: the row is refused for this reason, as its key could not be told (rule K5)."""
    message: str = ""


def in_order(row: Given) -> tuple[object, ...]:
    """Sorts the rows of a batch. Rows of equal order are sorted by their content, so a batch that is repeated gives the
    same changes."""
    told = (row.op, row.ttl, row.expire_time_micros, row.ttl_mode, row.only_if, row.only_if_version)
    return (list(row.order), row.payload or b"", *["" if one is None else str(one) for one in told])


class Held(NamedTuple):
    """The content of the state under a key: a record, or, without a payload, the tombstone of one."""

    payload: bytes | None
    version: int
    publish_time_micros: int
    expire_time_micros: int | None
    """None: never. For a tombstone, when it goes."""
    order: Sequence[int] = ()


class Change(NamedTuple):
    """A row of the output."""

    op: Literal["put", "delete", "expire", "refused"]
    payload: bytes | None
    version: int
    publish_time_micros: int | None
    expire_time_micros: int | None
    reason: str = ""
    message: str = ""


class Refused(Exception):
    """A row is not applied."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Key:
    """Owns what the state has under one key during one micro-batch."""

    def __init__(self, settings: Settings, held: Held | None, now_micros: int) -> None:
        self._settings = settings
        self.held = held
        self._now = now_micros
        self._last = held.version if held is not None else 0

    def expire(self) -> Iterator[Change]:
        """Removes a record, or a tombstone, that is overdue [1]."""
        held = self.held
        if held is None or not is_due(self._settings, held, self._now):
            return
        if held.payload is None:
            self.held = None
            return
        yield Change("expire", held.payload, held.version, held.publish_time_micros, held.expire_time_micros)
        self._bury(held.order)

    def apply(self, rows: Iterable[Given]) -> Iterator[Change]:
        """Applies rows in their order."""
        for row in rows:
            yield from self.expire()
            try:
                yield from self._apply(row)
            except Refused as refused:
                yield Change("refused", row.payload, self._version, None, None, refused.reason, refused.message)

    @property
    def _version(self) -> int:
        return self.held.version if self.held is not None and self.held.payload is not None else 0

    def _apply(self, row: Given) -> Iterator[Change]:
        record = self.held if self.held is not None and self.held.payload is not None else None
        self._check(row)
        stamp = None if row.op == "delete" else stamp_of(self._settings, row, self._now)
        if row.op == "touch" and record is None:
            raise Refused("RECORD_NOT_FOUND", "there is no such record")
        _check_condition(row, record)
        if row.op == "delete":
            if record is not None:
                yield Change(
                    "delete", record.payload, self._next(), record.publish_time_micros, record.expire_time_micros
                )
            if record is not None or self._settings.tombstones_micros is not None:
                self._bury(row.order)
            return
        if record is not None and row.ttl_mode == "KEEP":
            stamp = record.expire_time_micros
        elif record is not None and row.ttl_mode == "EXTEND":
            stamp = later(stamp, record.expire_time_micros)
        if row.op == "touch":
            assert record is not None, "there is one"
            assert record.payload is not None, "it is no tombstone"
            payload, publish_time = record.payload, record.publish_time_micros
        else:
            assert row.payload is not None, "_check has refused it"
            payload, publish_time = row.payload, self._now
            if row.op == "delta" and record is not None and record.payload is not None:
                payload = merged(record.payload, payload)
        self.held = Held(payload, self._next(), publish_time, stamp, row.order)
        yield Change("put", payload, self.held.version, publish_time, stamp)
        yield from self.expire()  # a ttl of 0 (rule L7)

    def _check(self, row: Given) -> None:
        """Raises Refused for a row that is wrong in itself, or late."""
        if row.reason:
            raise Refused(row.reason, row.message)
        if row.op not in OPS:
            raise Refused("INVALID_ARGUMENT", f"_op: {row.op!r:.50} is none of {', '.join(OPS)}")
        if row.ttl_mode is not None and row.ttl_mode not in MODES:
            raise Refused("INVALID_ARGUMENT", f"_ttl_mode: {row.ttl_mode!r:.50} is none of {', '.join(MODES)}")
        if row.payload is None and row.op in ("put", "delta"):
            raise Refused("PAYLOAD_MALFORMED", f"payload: a {row.op} needs one")
        late = self._settings.tombstones_micros is not None and self.held is not None
        if late and self.held is not None and list(row.order) < list(self.held.order):
            raise Refused("STALE", f"order: {list(row.order)} is before {list(self.held.order)}")

    def _next(self) -> int:
        self._last = max(self._now, self._last + 1)
        return self._last

    def _bury(self, order: Sequence[int]) -> None:
        kept = self._settings.tombstones_micros
        self.held = None if kept is None else Held(None, self._last, self._now, self._now + kept, order)


def _check_condition(row: Given, record: Held | None) -> None:
    """Raises Refused for a condition that does not hold (rule P3)."""
    if row.only_if is not None and row.only_if not in ("absent", "present"):
        raise Refused("INVALID_ARGUMENT", f"_only_if: {row.only_if!r:.50} is neither absent nor present")
    if row.only_if is not None and row.only_if_version is not None:
        raise Refused("INVALID_ARGUMENT", "_only_if_version: a row has one condition, and _only_if is given")
    if row.only_if is not None:
        holds = row.only_if == ("absent" if record is None else "present")
    else:
        holds = row.only_if_version is None or (record is not None and record.version == row.only_if_version)
    if not holds:
        found = "there is no record" if record is None else f"the record has version {record.version}"
        raise Refused("CONDITION_FAILED", found)


def is_due(settings: Settings, held: Held, now_micros: int) -> bool:
    """True if a record is expired, where its topic acts on that (rule L7), or a tombstone has gone."""
    acts = settings.expiration != "disabled" or held.payload is None
    return acts and held.expire_time_micros is not None and now_micros >= held.expire_time_micros


def later(one: int | None, other: int | None) -> int | None:
    """The later of two stamps; None, never, is later than every other (rule L6)."""
    return None if one is None or other is None else max(one, other)


def stamp_of(settings: Settings, row: Given, now_micros: int) -> int | None:
    """The expire time that a row gives its record; None: never (rules L3 to L5, L18). Raises Refused."""
    ttl = _given_ttl(settings, row, now_micros)
    if settings.expiration == "enabled":
        if row.ttl is None and row.expire_time_micros is None:
            ttl = settings.default_ttl_micros
        if settings.max_ttl_micros is not None and (ttl is None or ttl > settings.max_ttl_micros):
            ttl = settings.max_ttl_micros
        if ttl is not None and settings.min_ttl_micros is not None:
            ttl = max(ttl, settings.min_ttl_micros)
    return None if ttl is None else now_micros + ttl


def _given_ttl(settings: Settings, row: Given, now_micros: int) -> int | None:
    """The lifetime that a row carries; None for "never" and for none."""
    if row.ttl is None and row.expire_time_micros is None:
        return None
    if row.ttl is not None and row.expire_time_micros is not None:
        raise Refused("INVALID_ARGUMENT", "_expire_time: a row has one lifetime, and _ttl is given")
    try:
        ttl = None if row.ttl in (None, "never") else parse_micros(row.ttl or "")
    except DurationError as error:
        reason = "LIFETIME_NEGATIVE" if (row.ttl or "").startswith("-") else "INVALID_ARGUMENT"
        raise Refused(reason, f"_ttl: {error}") from None
    if settings.expiration == "reject":
        raise Refused("LIFETIME_REJECTED", "_ttl: the topic refuses lifetimes of records (expiration = reject)")
    if row.expire_time_micros is not None:
        ttl = row.expire_time_micros - now_micros
        if row.expire_time_micros < 0:
            raise Refused("LIFETIME_NEGATIVE", f"_expire_time: {row.expire_time_micros} µs is negative")
        if -ttl > TTL_MAX_MICROS:
            raise Refused("INVALID_ARGUMENT", f"_expire_time: {row.expire_time_micros} µs is more than ten years ago")
    if ttl is not None and ttl > TTL_MAX_MICROS:
        raise Refused(
            "LIFETIME_TOO_LONG", f"_ttl: {ttl // 1_000_000} s ahead is more than the longest lifetime of ten years"
        )
    return ttl


# ---- deltas (rule P2) ----

Fields: TypeAlias = dict[str, msgspec.Raw]
_fields: Final = msgspec.json.Decoder(Fields)
_encode: Final = msgspec.json.Encoder().encode
_NULL: Final = msgspec.Raw(b"null")


def merged(base: bytes, delta: bytes) -> bytes:
    """The record that a delta makes: objects are merged field by field, everything else is replaced, and a null leaves
    a field as it is. A delta that changes nothing gives the base itself. Raises Refused."""
    fields = _fields.decode(base)
    made = _encode(fields) if _merge(fields, _fields.decode(delta), 0) else base
    check_size(made)
    return made


def _merge(fields: Fields, delta: Fields, depth: int) -> bool:
    """Changes `fields`; returns True if that made a difference."""
    if depth >= LEVELS_MAX:
        raise Refused(
            "PAYLOAD_MALFORMED",
            f"objects of a delta are merged down to {LEVELS_MAX} levels, and this one goes deeper",
        )
    changed = False
    for name, given in delta.items():
        before = fields.get(name)
        if not is_object(given):
            if given not in (_NULL, before):
                fields[name] = given
                changed = True
            continue
        if before is not None and is_object(before):
            inner = _fields.decode(before)
            if not _merge(inner, _fields.decode(given), depth + 1):
                continue
        elif bytes(_NULL) in bytes(given):  # perhaps; a missing field stays missing
            inner = {}
            _merge(inner, _fields.decode(given), depth + 1)
        else:
            inner = None
        fields[name] = given if inner is None else msgspec.Raw(_encode(inner))
        changed = True
    return changed


def is_object(value: msgspec.Raw) -> bool:
    """True for an object of JSON."""
    return bytes(value).startswith(b"{")


# ---- documents (rule K2) ----

_syntax: Final = msgspec.json.Decoder(msgspec.defstruct("Document", []))
_value: Final = msgspec.json.Decoder(object)
_TEXT: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")


def check(payload: bytes) -> None:
    """Raises Refused for a document that is too large or malformed. Its numbers may be of any size."""
    check_size(payload)
    try:
        _syntax.decode(payload)
        payload.decode()  # msgspec skips texts
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused("PAYLOAD_MALFORMED", f"payload: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    if payload.count(b"{") + payload.count(b"[") > NESTING_MAX:
        brackets = _TEXT.sub(b"", payload).translate(_STEPS, _NOT_BRACKETS)
        if max(accumulate(array("b", brackets))) > NESTING_MAX:
            raise _too_deep()


def check_size(payload: bytes) -> None:
    """Raises Refused for a document that is too large (rule K8)."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise Refused("PAYLOAD_TOO_LARGE", f"payload: {len(payload)} bytes, at most {PAYLOAD_BYTES_MAX} are taken")


def value_at(payload: bytes, path: Sequence[str]) -> object:
    """The value of a field of a document that was checked; None if it is missing. Raises Refused."""
    try:
        value: object = _decoder_of(tuple(path)).decode(payload)
    except (msgspec.MsgspecError, ValueError) as error:  # a number out of range
        raise Refused("PAYLOAD_MALFORMED", f"payload: {error}") from None
    for _ in path:
        value = getattr(value, "value", None)
    return value


@lru_cache(maxsize=64)
def _decoder_of(path: tuple[str, ...]) -> msgspec.json.Decoder[object]:
    """Reads all that is under the names of a path, as a server does: also the first of a repeated name."""
    wanted = _struct(path[-1], object)
    for step in reversed(path[:-1]):
        wanted = _struct(step, wanted | str | int | float | bool | list[object] | None)
    return msgspec.json.Decoder(wanted)


def _struct(name: str, kind: object) -> type[msgspec.Struct]:
    return msgspec.defstruct("Wanted", [("value", kind, None)], rename={"value": name})


def _too_deep() -> Refused:
    return Refused("PAYLOAD_MALFORMED", f"payload: nested deeper than {NESTING_MAX} levels")
