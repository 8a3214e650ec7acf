"""The engine `python` of a state on Spark: keys and rules run in Python, each key with some calls between its worker
and the JVM. For tests, small streams, and where there is no jar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.taskcontext import TaskContext

from sow_spark.state_fold import (
    KEY_BYTES_MAX,
    Change,
    Given,
    Held,
    Key,
    Refused,
    Settings,
    check,
    in_order,
    is_due,
    value_at,
)

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import ValueState

KEYLESS: Final = ""
"""The group of rows whose key cannot be told. No key is empty (rule K5)."""
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)
HELD: Final = (
    "payload BINARY, version BIGINT, publish_time BIGINT, expire_time BIGINT, ord ARRAY<BIGINT>, timer BIGINT, "
    "more BINARY"
)
"""The last column is for later releases: Spark adds none to a state that has begun."""


class Processor(StatefulProcessor):
    """Keeps one record for each key."""

    def __init__(self, settings: Settings, paths: Sequence[Sequence[str]]) -> None:
        self._settings = settings
        self._paths = paths

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._state: ValueState = handle.getValueState("record", HELD)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:  # noqa: N802, N803  # Spark's names
        now = timerValues.getCurrentProcessingTimeInMs() * 1_000
        if key[0] == KEYLESS:
            for row in rows:
                yield _row(None, refused_keyless(row, self._paths), now)
            return
        held, timer = self._held()
        one = Key(self._settings, held, now)
        given = [_given(row) for row in rows]
        given.sort(key=in_order)
        changes = list(one.apply(given))
        self._keep(one.held, timer)
        for change in changes:
            yield _row(key[0], change, now)

    def handleExpiredTimer(  # noqa: N802  # Spark's name
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: N803  # Spark calls by keywords
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803  # as above
    ) -> Iterator[Row]:
        now = timerValues.getCurrentProcessingTimeInMs() * 1_000
        held, _ = self._held()
        one = Key(self._settings, held, now)
        changes = list(one.expire())
        self._keep(one.held, None)  # the timer has just gone off
        for change in changes:
            yield _row(key[0], change, now)

    def _held(self) -> tuple[Held | None, int | None]:
        found = self._state.get()
        if found is None:
            return None, None
        payload, version, publish_time, expire_time, order, timer, _ = found
        payload = None if payload is None else bytes(payload)
        return Held(payload, version, publish_time, expire_time, tuple(order or ())), timer

    def _keep(self, held: Held | None, timer: int | None) -> None:
        """Writes what a key has now. A timer moves only where its record may fall due before it."""
        due = None
        if (
            held is not None
            and held.expire_time_micros is not None
            and is_due(self._settings, held, held.expire_time_micros)
        ):
            due = -(-held.expire_time_micros // 1_000)
        if timer is not None and (due is None or due < timer):
            self._handle.deleteTimer(timer)
            timer = None
        if timer is None and due is not None:
            self._handle.registerTimer(due)
            timer = due
        if held is None:
            self._state.clear()
        else:
            self._state.update((*held[:4], list(held.order), timer, None))


def _given(row: Row) -> Given:
    payload = row.payload
    return Given(
        row.op,
        None if payload is None else bytes(payload),
        row.ttl,
        row.expire_time,
        row.ttl_mode,
        row.only_if,
        row.only_if_version,
        tuple(-(1 << 63) if number is None else number for number in row.ord or ()),
    )


def _row(key: str | None, change: Change, now_micros: int) -> Row:
    context = TaskContext.get()
    batch = None if context is None else context.getLocalProperty("streaming.sql.batchId")
    return Row(
        _op=change.op,
        _key=key,
        payload=change.payload,
        _version=change.version,
        _publish_time=change.publish_time_micros,
        _expire_time=change.expire_time_micros,
        _reason=change.reason or None,
        _message=change.message or None,
        _batch=None if batch is None else int(batch),
        _now=now_micros,
    )


def key_or_none(payload: bytes | None, key: str | None, paths: Sequence[Sequence[str]]) -> str:
    """The group of a row."""
    try:
        return key_of(None if payload is None else bytes(payload), key, paths)
    except Refused:
        return KEYLESS


def refused_keyless(row: Row, paths: Sequence[Sequence[str]]) -> Change:
    """Why a row has no key."""
    try:
        key_of(None if row.payload is None else bytes(row.payload), row.key, paths)
    except Refused as refused:
        return Change("refused", row.payload, 0, None, None, refused.reason, refused.message)
    raise AssertionError("it has one")


def key_of(payload: bytes | None, key: str | None, paths: Sequence[Sequence[str]]) -> str:
    """The key of a row (rules K3 to K5, K8). Raises Refused."""
    if payload is not None:
        check(payload)
    if payload is not None and paths:
        values = [value_at(payload, path) for path in paths]
        texts = [_canonical(value, path) for value, path in zip(values, paths, strict=True)]
        key = "|".join([text.replace("\\", "\\\\").replace("|", "\\|") for text in texts])
        if not key:
            raise Refused("KEY_REQUIRED", f"key field /{'/'.join(paths[0])} is the empty text, which is no key")
    elif not key:
        needed = "a row without a document needs one" if payload is None else "there is none"
        raise Refused("KEY_REQUIRED", f"_key: {needed}")
    elif paths and (parts := _ESCAPED.sub("", key).count("|") + 1) != len(paths):
        raise Refused("INVALID_ARGUMENT", f"_key: {key!r:.50} has {parts} parts, and a key here has {len(paths)}")
    size = len(key.encode("utf-8", "replace"))
    if size > KEY_BYTES_MAX:
        raise Refused("KEY_TOO_LARGE", f"key: {size} bytes, at most {KEY_BYTES_MAX} are taken")
    return key


def _canonical(value: object, path: Sequence[str]) -> str:
    field = f"key field /{'/'.join(path)}"
    if value is None:
        raise Refused("KEY_FIELD_MISSING", f"{field} is missing or null")
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return str(int(Decimal(repr(value)))) if value.is_integer() else repr(value)
    raise Refused("KEY_FIELD_NOT_SCALAR", f"{field} is not a text, a number or a boolean")
