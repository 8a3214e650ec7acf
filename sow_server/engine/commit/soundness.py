"""Checks whether a publish could have made a row, and whether a stored row can be read (rule R13).

A publish is checked before it becomes a row. A row from another instance has been checked by that instance, or not at
all: because of an older release, a defect, damage in its memory, or because the program is no instance. One row that
breaks a rule must break neither the link nor the topic.

    [1]  A row of a peer that no publish could have made is left out. The rest of its batch is applied; the cursor moves
         on.
    [2]  Reads skip and report a stored row whose key cannot be put into a message. Deletes reach it.
    [3]  Sound rows cost a few comparisons of whole columns, not a line of Python each, except for the check of
         payloads.

The server itself makes rows that no publisher could: copies of expired records, whose keys and payloads have added
parts (rule T3). They are sound.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import structlog

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit import letter_copies
from sow_server.engine.formats.payloads import BadRecord, key_of
from sow_server.engine.stored import PAYLOAD, PUT, TOUCH, Changes, read_header
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.fields import value_at
from sow_server.engine.values.keys import INSTANCE_NAME
from sow_server.engine.values.model import MICROS, NEVER, TTL_MAX_MICROS

log = structlog.get_logger(__name__)

LOG_INTERVAL_MICROS: Final = 10 * MICROS
"""The time between two log lines about unsound rows of one topic."""
SHOWN_BYTES: Final = 60
"""The most bytes of a key that the log and messages show."""
_PUTS: Final = frozenset((PUT, TOUCH))


class RowLimits(NamedTuple):
    """The upper bounds of a key, a payload and the times of a row."""

    key_bytes_max: int
    payload_bytes_max: int
    clock_skew_micros: int


class Fault(NamedTuple):
    """The faults of a row."""

    reason: Reason
    message: str


NO_FAULTS: Final[Mapping[int, Fault]] = MappingProxyType({})
KEY_FAULTS: Final = frozenset((Reason.KEY_REQUIRED, Reason.KEY_NOT_UTF8, Reason.KEY_TOO_LARGE))


def shown(key: bytes) -> str:
    """A key of any bytes, escaped and cut, for the log and for messages."""
    text = key[:SHOWN_BYTES].decode("utf-8", "backslashreplace").encode("unicode_escape").decode("ascii")
    return text if len(key) <= SHOWN_BYTES else f"{text}… ({len(key)} bytes)"


# --- rows that another instance sends --------------------------------------------------------------------------------


def faults(
    topic: Topic, changes: Changes, bad_origins: Sequence[int], limits: RowLimits, now_micros: int
) -> dict[int, Fault]:
    """The unsound ones among the changes that a peer has sent for a topic, with their faults; nearly always empty.

    `bad_origins`: the sender's numbers of the origins that have no valid name of an instance.
    """
    keys, payloads, kinds = changes.keys, changes.payloads, changes.change
    if not keys:
        return {}
    latest = now_micros + limits.clock_skew_micros
    furthest = latest + TTL_MAX_MICROS
    versions, published = changes.version.tolist(), changes.publish_time_micros.tolist()
    stamps = changes.expire_time_micros.tolist()
    suspects: set[int] = set()
    if (
        max(map(len, keys)) > limits.key_bytes_max
        or b"" in keys
        or not _is_text(keys)
        or min(versions) <= 0
        or min(published) < 0
        or max(published) > latest
        or min(stamps) < 0
        or (max(stamps) > furthest and any(furthest < stamp != NEVER for stamp in stamps))
        or max(map(len, payloads)) > limits.payload_bytes_max
    ):
        suspects.update(range(len(keys)))
    if bad_origins:
        wrong = set(bad_origins)
        suspects.update(index for index, origin in enumerate(changes.origin) if origin in wrong)
    suspects.update(_unlike_their_keys(topic, kinds, keys, payloads))
    found: dict[int, Fault] = {}
    for index in sorted(suspects):
        fault = (
            _number_fault(versions[index], published[index], stamps[index], latest)
            or key_fault(topic, keys[index], limits)
            or (payload_fault(topic, keys[index], payloads[index], limits) if kinds[index] in _PUTS else None)
        )
        if fault is None and changes.origin[index] in bad_origins:
            fault = Fault(Reason.INVALID_ARGUMENT, "origin: is not the name of an instance")
        if fault is not None:
            found[index] = fault
    return found


def _is_text(keys: Sequence[bytes]) -> bool:
    joined = b"\n".join(keys)
    # The separator prevents that the end of one key and the beginning of the next form a character.
    return joined.isascii() or is_utf8(joined)


def is_utf8(text: bytes) -> bool:
    """True if these bytes are well-formed UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _unlike_their_keys(topic: Topic, kinds: bytes, keys: Sequence[bytes], payloads: Sequence[bytes]) -> list[int]:
    """The puts whose payload is no document of the topic's type, or gives another key."""
    puts: Sequence[int] = range(len(kinds))
    if set(kinds) - _PUTS:
        puts = [index for index, kind in enumerate(kinds) if kind in _PUTS]
        keys, payloads = [keys[index] for index in puts], [payloads[index] for index in puts]
    if topic.derive_keys is not None:
        derived = topic.derive_keys(payloads)
        if derived == keys:
            return []
        return [
            index
            for index, key, own, payload in zip(puts, keys, derived, payloads, strict=True)
            if key != own and not _had_key(topic, key, payload)
        ]
    check = topic.format.check
    return [index for index, payload in zip(puts, payloads, strict=True) if check(payload) is not None]


def _had_key(topic: Topic, key: bytes, payload: bytes) -> bool:
    """True if a publish gave this key before a large float had its shortest digits in it (keys [3]). The key then had
    all digits of the integer that the float is."""
    document = topic.format.decode(payload)
    values = [value_at(document, path) for path in topic.key_paths]
    whole = [int(value) if type(value) is float and value.is_integer() else value for value in values]
    return key_of(whole, topic.key_paths) == key


def bad_names(names: Sequence[str]) -> list[int]:
    """The numbers of the origins that have no valid name of an instance."""
    return [number for number, name in enumerate(names) if not INSTANCE_NAME.match(name)]


# --- one row ---------------------------------------------------------------------------------------------------------


def row_fault(topic: Topic, key: bytes, value: bytes, limits: RowLimits, now_micros: int) -> Fault | None:
    """The fault of a stored row; None: it is sound."""
    head = read_header(value)
    latest = now_micros + limits.clock_skew_micros
    return (
        key_fault(topic, key, limits)
        or _number_fault(head.version, head.publish_time_micros, head.expire_time_micros, latest)
        or payload_fault(topic, key, value[PAYLOAD], limits)
    )


def key_fault(topic: Topic, key: bytes, limits: RowLimits) -> Fault | None:
    """The fault of a key (rules K4, K8)."""
    if not key:
        return Fault(Reason.KEY_REQUIRED, "key: is empty")
    if not is_utf8(key):
        return Fault(Reason.KEY_NOT_UTF8, "key: is not well-formed UTF-8")
    if len(key) > limits.key_bytes_max and not letter_copies.may_be_copy(topic, key):
        return Fault(Reason.KEY_TOO_LARGE, f"key: {len(key)} bytes are more than the limit of {limits.key_bytes_max}")
    return None


def payload_fault(topic: Topic, key: bytes, payload: bytes, limits: RowLimits) -> Fault | None:
    """The fault of a payload whose key is sound (rules K2, K4, K8)."""
    bad = topic.format.check(payload)
    if bad is not None:
        return Fault(bad.reason, bad.message)
    size = len(payload)
    if size > limits.payload_bytes_max:
        size = letter_copies.original_bytes(topic.settings, payload)
    if size > limits.payload_bytes_max:
        return Fault(
            Reason.PAYLOAD_TOO_LARGE, f"payload: {size} bytes are more than the limit of {limits.payload_bytes_max}"
        )
    if topic.derive_keys is not None:
        (own,) = topic.derive_keys([payload])
        if isinstance(own, BadRecord):
            return Fault(own.reason, own.message)
        if own != key and not _had_key(topic, key, payload):
            return Fault(Reason.KEY_NOT_ALLOWED, f"key: the key fields of the payload give another key, {shown(own)}")
    return None


def _number_fault(version: int, published: int, stamp: int, latest: int) -> Fault | None:
    if version <= 0:
        return Fault(Reason.INVALID_ARGUMENT, f"version: {version} is not positive")
    if not 0 <= published <= latest:
        return Fault(Reason.INVALID_ARGUMENT, f"publish_time: {published} µs is negative, or in the future")
    if stamp < 0:
        return Fault(Reason.LIFETIME_NEGATIVE, f"expire_time: {stamp} µs is negative")
    if latest + TTL_MAX_MICROS < stamp != NEVER:
        return Fault(Reason.LIFETIME_TOO_LONG, f"expire_time: {stamp} µs is more than ten years ahead")
    return None


# --- rows that are stored already ------------------------------------------------------------------------------------


def readable(keys: Sequence[bytes]) -> list[bool] | None:
    """For each of these keys, in their order, whether it can be put into a message; None: all of them can, nearly
    always."""
    if not keys or (keys[0] and _is_text(keys)):  # the empty key is the first of its topic
        return None
    return [bool(key) and is_utf8(key) for key in keys]


def all_told(keys: Sequence[bytes]) -> bool:
    """As `readable`, of keys in any order: whether all of them can be."""
    return b"" not in keys and _is_text(keys)


class SoundnessReports:
    """Counts unsound rows, and writes a line of the log about them now and then. From any thread.

    `refused`: rows of peers that were left out. `skipped`: stored rows that reads have skipped, counted once per read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.refused: Counter[tuple[str, str]] = Counter()
        """The numbers of refused rows, by the names of topic and reason."""
        self.skipped: Counter[str] = Counter()
        """The numbers of skipped rows, by the name of the topic."""
        self._logged: dict[tuple[str, str], tuple[int, int]] = {}
        """The time of the last line, and the number of rows since then, by event and topic."""

    def refuse(self, source: str, topic: Topic, changes: Changes, found: Mapping[int, Fault], now_micros: int) -> None:
        """Counts rows of a peer that were left out."""
        index, fault = next(iter(found.items()))
        with self._lock:
            for each in found.values():
                self.refused[topic.name, each.reason.name] += 1
        self._log(
            "peer_rows_refused",
            topic,
            len(found),
            now_micros,
            {
                "source": source,
                "key": shown(changes.keys[index]),
                "reason": fault.reason.name,
                "message": fault.message,
            },
        )

    def skip(self, topic: Topic, keys: Sequence[bytes], now_micros: int) -> None:
        """Counts rows that a read has skipped."""
        with self._lock:
            self.skipped[topic.name] += len(keys)
        self._log("rows_unreadable", topic, len(keys), now_micros, {"key": shown(keys[0])})

    def _log(self, event: str, topic: Topic, rows: int, now_micros: int, fields: dict[str, str]) -> None:
        with self._lock:
            at, held = self._logged.get((event, topic.name), (-LOG_INTERVAL_MICROS, 0))
            rows += held
            if now_micros - at < LOG_INTERVAL_MICROS:
                self._logged[event, topic.name] = at, rows
                return
            self._logged[event, topic.name] = now_micros, 0
        log.warning(event, topic=topic.name, rows=rows, **fields)

    def forget(self, topic: str) -> None:
        """Forgets a topic that was removed."""
        with self._lock:
            self.skipped.pop(topic, None)
            for key in [key for key in self.refused if key[0] == topic]:
                del self.refused[key]
            for logged in [logged for logged in self._logged if logged[1] == topic]:
                del self._logged[logged]
