"""The history of a key (rule S9): the request, and answers into values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sow.v1 import sow_pb2
from sow_client import _statuses
from sow_client._change_frames import changes_of
from sow_client._keys import Key, key_text
from sow_client._records import Change, ChangeOp, ChangeReason, Record, datetime_of, invalid

ENTRIES_MAX: Final = 10_000
"""The most changes of one call; the server's limit."""


@dataclass(frozen=True, slots=True)
class PastChange:
    """One change of a key, as the journal of an instance has it."""

    op: ChangeOp
    """ "put", "delete" or "expire". """
    reason: ChangeReason | None
    """ "touched": only the lifetime was changed; "not_permitted": the caller may not see the record any more."""
    record: Record
    """The record that was put, or the one that was removed. Its `sequence` is that of the change."""
    time: datetime
    """When the change was committed at the instance that answers."""
    instance: str
    """The instance that accepted the change; of a removal the one that removed. Empty: not to be seen."""


@dataclass(frozen=True, slots=True)
class History:
    """The changes of a key, the newest first: all, or some of them."""

    entries: tuple[PastChange, ...]
    bookmark: str
    """For `upto` of the next call, which has older changes. Empty: there are none in the journal."""
    discarded: bool
    """True: there is nothing more to read, and the journal has discarded changes of the topic, perhaps of this key."""


def request(topic: str, key: Key, *, entries_max: int, upto: str | None) -> sow_pb2.ReadHistoryRequest:
    """The request for a history."""
    if not 1 <= entries_max <= ENTRIES_MAX:
        raise invalid("entries_max", f"{entries_max} is not between 1 and {ENTRIES_MAX}")
    return sow_pb2.ReadHistoryRequest(topic=topic, key=key_text(key), max_entries=entries_max, upto_bookmark=upto or "")


class Reading:
    """The answers to one call, as they come."""

    def __init__(self) -> None:
        self._entries: list[PastChange] = []

    def feed(self, response: sow_pb2.ReadHistoryResponse) -> History | None:
        """Takes an answer. Returns the history with the last one, else None."""
        changes = changes_of(response.changes, "") if response.changes.op else []
        if not len(changes) == len(response.commit_time_micros) == len(response.instance):
            raise _statuses.malformed("columns of unequal length")
        self._entries += _past(changes, response.commit_time_micros, response.instance)
        if not response.HasField("end"):
            return None
        return History(tuple(self._entries), response.end.next_bookmark, response.end.discarded)


def _past(changes: Sequence[Change], times: Sequence[int], instances: Sequence[str]) -> list[PastChange]:
    found = []
    for change, time, instance in zip(changes, times, instances, strict=True):
        record = change.record or change.previous
        assert record is not None, "no mark is among them"
        found.append(PastChange(change.op, change.reason, record, datetime_of(time), instance))
    return found
