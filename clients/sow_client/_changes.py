"""Ranges of a topic's changes: requests, responses, and the decision to call again. Pure.

[1]  A reading ends with the server's footer, or with an exception. After a cut it continues behind the last
     bookmark, so every change comes once.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final, get_args

from sow.v1 import snapshot_pb2, sow_pb2, types_pb2
from sow_client import _lifetimes, _statuses
from sow_client._cells import Led
from sow_client._change_frames import changes_of
from sow_client._keys import Key, key_texts
from sow_client._packed import PackedColumn, PackedRecords, column_values, packed
from sow_client._parameters import Parameters, parameter_values
from sow_client._records import EARLIEST, Change, Start, Ttl, invalid, ttl_micros
from sow_client._subscription_core import PASSING_REASONS
from sow_client.errors import SowError

ALL_COLUMNS: Final[tuple[str, ...]] = get_args(PackedColumn)
READ_RETRY_SECONDS: Final = 30.0
"""The time to call again after cuts, counted from the last progress."""


@dataclass(frozen=True, slots=True)
class ChangesPlan:
    """A range of changes: those after the bookmark `start`, up to the bookmark `end`.

    `entries` and `bytes` count the journal in between, before any filter. `part_ends` are the ends of its parts, in
    order, the last one being `end`; it is empty when there is no entry. `head` is the last position on disk, with
    `entries_left` entries after `end`. `earliest` is the earliest position after which changes can be read.
    """

    start: str
    end: str
    head: str
    earliest: str
    entries: int
    bytes: int
    entries_left: int
    part_ends: tuple[str, ...]
    marks: str = ""
    """Appended to `end`, or to a later bookmark, they let the changes after it be planned at another instance. Empty:
    none are known. Rules: F6, F18."""
    left_age: timedelta | None = None
    """Age of the first entry between `end` and `head`. None: there is none."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The journal is kept from `bookmark` on; `created`: the pin did not exist before."""

    bookmark: str
    created: bool


def plan_request(
    topic: str, start: Start, end: str | None, max_entries: int, max_bytes: int, parts: int
) -> snapshot_pb2.PlanChangesRequest:
    """The request for a plan."""
    for name, value in (("max_entries", max_entries), ("max_bytes", max_bytes), ("parts", parts)):
        if value < 0:
            raise invalid(name, f"{value} is negative")
    request = snapshot_pb2.PlanChangesRequest(
        topic=topic, end_bookmark=end or "", max_entries=max_entries, max_bytes=max_bytes, parts=parts
    )
    match start:
        case datetime():
            request.start_time_micros = _lifetimes.zoned_micros(start, "start")
        case "earliest":  # no bookmark looks like it
            request.earliest = True
        case "latest":
            request.latest = True
        case str():
            request.bookmark = start
        case _:
            if start is not EARLIEST:
                raise invalid("start", f"a {type(start).__name__} is not a bookmark, earliest, latest or a datetime")
            request.earliest = True
    return request


def plan(response: snapshot_pb2.PlanChangesResponse) -> ChangesPlan:
    """The range."""
    return ChangesPlan(
        response.start_bookmark,
        response.end_bookmark,
        response.head_bookmark,
        response.earliest_bookmark,
        response.entries,
        response.bytes,
        response.entries_left,
        tuple(response.part_ends),
        response.marks,
        timedelta(microseconds=response.left_age_micros) if response.HasField("left_age_micros") else None,
    )


def pin_request(
    topic: str, name: str, bookmark: str, idle_ttl: Ttl | None, reader: str
) -> snapshot_pb2.PinJournalRequest:
    """The request of a pin."""
    return snapshot_pb2.PinJournalRequest(
        topic=topic,
        name=name,
        bookmark=bookmark,
        idle_ttl_micros=0 if idle_ttl is None else ttl_micros(idle_ttl, "idle_ttl"),
        reader=reader,
    )


def read_request(
    topic: str,
    start: str,
    end: str,
    filter_text: str | None,
    parameters: Parameters | None = None,
    *,
    columns: Iterable[str],
    lines: bool,
    batch_size: int,
    history: str | None,
    share: tuple[int, int] | None = None,
    keys: Iterable[Key] | None = None,
    elsewhere: bool = False,
) -> snapshot_pb2.ReadChangesRequest:
    """The request for changes. An empty list of keys is refused: on the wire it would ask for those of every key."""
    number, shares = share or (0, 0)
    if share is not None and not 0 <= number < shares:
        raise invalid("share", f"({number}, {shares}) is not the number of a share and how many there are")
    if batch_size < 0:
        raise invalid("batch_size", f"{batch_size} is negative")
    chosen = None if keys is None else key_texts(keys)
    if chosen == []:
        raise invalid("keys", "is empty; leave it out to read the changes of all keys")
    return snapshot_pb2.ReadChangesRequest(
        topic=topic,
        start_bookmark=start,
        end_bookmark=end,
        filter=filter_text or "",
        parameters=parameter_values(parameters),
        columns=column_values(columns),
        lines=lines,
        batch_size=batch_size,
        history_bookmark=history or "",
        share=number,
        shares=shares,
        keys=chosen,
        elsewhere=elsewhere,
    )


def unpacked(topic: str, batch: PackedRecords) -> list[Change]:
    """The changes of a batch with all columns. Raises InternalError if the columns do not fit together."""
    payloads, keys = batch.payloads, batch.keys
    try:
        columns = types_pb2.RecordColumns(
            key=[keys[start:end].decode() for start, end in pairwise(_numbers(batch.key_offsets, "i"))],
            payload=[payloads[start:end] for start, end in pairwise(_numbers(batch.payload_offsets, "i"))],
            version=_numbers(batch.versions, "q"),
            publish_time_micros=_numbers(batch.publish_times, "q"),
            expire_time_micros=_numbers(batch.expire_times, "q"),
            sequence=_numbers(batch.sequences, "q"),
            origin=_numbers(batch.origins, "H"),
            origins=batch.origin_names,
        )
    except ValueError as error:
        raise _statuses.malformed("columns that do not fit together") from error
    # `more`: a range is continued at its end, not between two of its changes.
    frame = sow_pb2.ChangeBatch(topic=topic, records=columns, op=[*batch.ops], reason=[*batch.reasons], more=True)
    return changes_of(frame, "")


def _numbers(column: bytes, code: str) -> array[int]:
    numbers: array[int] = array(code, column)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class ReadChangesCore:
    """The progress of a reading ([1])."""

    def __init__(self, request: snapshot_pb2.ReadChangesRequest, way: Led | None = None) -> None:
        """`way`: to the cell of the topic, until the first changes have come: the range is of one journal."""
        self._request = request
        self._way = way
        self._begun = False
        self._backoff = _statuses.Backoff()
        self.done = False
        """True once the footer has come."""

    def request(self, *, now: float) -> snapshot_pb2.ReadChangesRequest:
        """The request of the next call, for the changes that have not come yet. `now` as in `ended`."""
        self._backoff.begin(now)
        request = snapshot_pb2.ReadChangesRequest()
        request.CopyFrom(self._request)
        return request

    def batch(self, response: snapshot_pb2.ReadChangesResponse) -> PackedRecords | None:
        """The changes of a response; None for the footer."""
        self._backoff.reset()
        self._begun = True
        match response.WhichOneof("response"):
            case "batch":
                if not response.bookmark:
                    raise _statuses.malformed("changes without a bookmark")
                self._request.start_bookmark = response.bookmark
                return packed(response.batch)
            case "footer":
                self.done = True
                return None
            case None:
                raise _statuses.malformed("an empty response to a reading of changes")

    def ended(self, error: BaseException | None, *, now: float, jitter: float) -> float:
        """Seconds to wait before the next call, after one that ended without a footer. Raises SowError if no call is to
        follow. `now` is a monotonic clock in seconds, `jitter` a random number in [0, 1)."""
        what = f"the reading of changes of {self._request.topic}"
        translated: SowError = _statuses.cut(what) if error is None else _statuses.stream_error(error, what)
        told = translated
        if self._way is not None:
            if not self._begun and self._way.leads(translated):
                return 0.0
            told = self._way.told(translated)
        delay = None
        if translated.reason in PASSING_REASONS:
            delay = self._backoff.delay(translated, now=now, jitter=jitter, limit=READ_RETRY_SECONDS)
        if delay is None:
            raise told from (None if told is error else error)
        return delay
