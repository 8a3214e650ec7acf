"""A snapshot without the ranges of keys in which the subscriber holds the right records already (rule F4).

[1]  After all batches, the subscriber that forgets the replaced ranges and takes the records holds exactly the
     records of the snapshot, whatever it held before. What is left out has the same count and checksum.
[2]  A range is decided once all of its records have been read. Until then at most as many wait as the subscriber
     holds in it, and at most `WAITING_BYTES` and one piece of reading. A range with more is sent without comparing.
[3]  Only records that the subscriber may see are read here, so nothing else makes a difference (rule A4).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from sow.checksums import RANGE_RECORDS_MAX, RANGES_MAX, checksum
from sow_server.engine.stored import HeaderColumns, header_columns
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.subscriptions.frames import SnapshotBatch
from sow_server.subscriptions.request import Snapshot

WAITING_BYTES: Final = 2**20
"""Payloads that wait for the end of their range; beyond that, the range is sent."""


@dataclass(frozen=True, slots=True)
class Held:
    """The ranges of records that a subscriber holds: of each the last key, the checksum and the count. The key b"" of
    the last range stands for the end."""

    upto: Sequence[bytes]
    checksums: Sequence[int]
    records: Sequence[int]


def held(upto: Sequence[str], checksums: Sequence[int], records: Sequence[int]) -> Held:
    """The ranges of a request, checked. Raises StoreError with the field, and with the index of the range."""
    if not len(upto) == len(checksums) == len(records):
        raise _refuse("held", f"columns of {len(upto)}, {len(checksums)} and {len(records)} ranges")
    if not 1 <= len(upto) <= RANGES_MAX:
        raise _refuse("held", f"has {len(upto)} ranges, and may have 1 to {RANGES_MAX}")
    if upto[-1]:
        raise _refuse(f"held.upto_key[{len(upto) - 1}]", "the last range has to go to the end: its key is empty")
    keys = [key.encode() for key in upto]
    for index, (before, key) in enumerate(pairwise([b"", *keys[:-1]])):
        if key <= before:
            raise _refuse(f"held.upto_key[{index}]", "is not above the key before it")
    if max(records) > RANGE_RECORDS_MAX:
        index = next(index for index, count in enumerate(records) if count > RANGE_RECORDS_MAX)
        raise _refuse(f"held.records[{index}]", f"{records[index]} are more than {RANGE_RECORDS_MAX}")
    return Held(keys, checksums, records)


class HeldSnapshot:
    """A `request.Snapshot` that leaves out what the subscriber holds. Owns the whole snapshot that it reads."""

    def __init__(
        self, whole: Snapshot, given: Held, origins: Callable[[], Sequence[str]], *, topic: str, batch_size: int
    ) -> None:
        """`whole`: of this one topic. `origins`: the names of origins as they are now, by their numbers in records."""
        self._whole: Final = whole
        self.begin: Final = replace(whole.begin, held=True)
        self.truncated: Final = False
        self._given: Final = given
        self._origins: Final = origins
        self._batch_size: Final = batch_size
        self._range = 0
        """The first range that is not decided."""
        self._differs = False
        """True if a part of this range was sent."""
        self._waiting = SnapshotBatch(topic, [], [], header_columns(()))
        """The records that were read and not decided."""
        self._ready: deque[SnapshotBatch] = deque()

    @property
    def absent_fields(self) -> Sequence[str]:
        return self._whole.absent_fields

    @property
    def done(self) -> bool:
        return self._range == len(self._given.upto) and not self._ready

    def read(self) -> SnapshotBatch | None:
        """The next batch; None if this step found no difference."""
        if not self._ready:
            found = None if self._whole.done else self._whole.read()
            if found is not None:
                self._waiting = _joined(self._waiting, found) if self._waiting.keys else found
            self._decide()
        return self._ready.popleft() if self._ready else None

    def _decide(self) -> None:
        """Compares the ranges that are complete, and makes batches of those that differ."""
        given, rows = self._given, self._waiting
        keys = rows.keys
        replaced: list[tuple[bytes, bytes]] = []
        parts: list[tuple[int, int]] = []
        at = 0
        while self._range < len(given.upto):
            upto = given.upto[self._range]
            end = bisect_right(keys, upto, at) if upto else len(keys)
            if end == len(keys) and not self._whole.done:  # more of it may follow
                if self._differs or self._is_too_much(rows, at, end):
                    self._replace(replaced)
                    parts.append((at, end))
                    at = end
                break
            if self._differs or not self._is_held(rows, at, end):
                self._replace(replaced)
                parts.append((at, end))
            at = end
            self._range += 1
            self._differs = False
        self._send(_chosen(rows, parts), replaced)
        self._waiting = _chosen(rows, [(at, len(keys))])

    def _replace(self, replaced: list[tuple[bytes, bytes]]) -> None:
        """The range differs. The subscriber is told so once."""
        if self._differs:
            return
        self._differs = True
        after = self._given.upto[self._range - 1] if self._range else b""
        if replaced and replaced[-1][1] == after:
            after = replaced.pop()[0]
        replaced.append((after, self._given.upto[self._range]))

    def _is_held(self, rows: SnapshotBatch, begin: int, end: int) -> bool:
        given, number = self._given, self._range
        if end - begin != given.records[number]:
            return False
        keys, headers = rows.keys[begin:end], rows.headers
        origins = map(self._origins().__getitem__, headers.origin[begin:end])
        found = checksum(map(len, keys), b"".join(keys), headers.version[begin:end], origins)
        return found == given.checksums[number]

    def _is_too_much(self, rows: SnapshotBatch, begin: int, end: int) -> bool:
        held = self._given.records[self._range]
        return end - begin > held or sum(map(len, rows.payloads[begin:end])) > WAITING_BYTES

    def _send(self, rows: SnapshotBatch, replaced: list[tuple[bytes, bytes]]) -> None:
        """Makes batches of these records. The first batch tells all replaced ranges."""
        size = self._batch_size
        for begin in range(0, max(len(rows.keys), bool(replaced)), size):
            batch = _chosen(rows, [(begin, begin + size)])
            self._ready.append(batch if begin else replace(batch, replaced=replaced))

    def close(self) -> None:
        self._whole.close()


def _chosen(rows: SnapshotBatch, parts: Sequence[tuple[int, int]]) -> SnapshotBatch:
    """Some parts of a batch. In time proportional to it, because a hostile subscriber chooses the parts."""
    keys: list[bytes] = []
    payloads: list[bytes] = []
    headers = header_columns(())
    for begin, end in parts:
        keys += rows.keys[begin:end]
        payloads += rows.payloads[begin:end]
        for column, whole in zip(headers, rows.headers, strict=True):
            column.extend(whole[begin:end])
    return SnapshotBatch(rows.topic, keys, payloads, headers)


def _joined(first: SnapshotBatch, second: SnapshotBatch) -> SnapshotBatch:
    headers = HeaderColumns(*[one + other for one, other in zip(first.headers, second.headers, strict=True)])
    return SnapshotBatch(first.topic, first.keys + second.keys, first.payloads + second.payloads, headers)


def _refuse(field: str, message: str) -> StoreError:
    return StoreError(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=field)
