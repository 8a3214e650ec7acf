"""Exports: what is asked, and how a part is read on when its connection breaks (rule Q6).

PartCore is all of it without I/O, threads or clock; `Client` and `AsyncClient` make the calls that it asks for.

E1  Each record of a part is handed out once, however often the connection breaks: a call that is made again goes on
    after the last batch that came.
E2  A part ends with a footer whose count is right, or with an exception: what was cut off is never taken for whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sow.v1 import snapshot_pb2
from sow_client import _statuses
from sow_client._packed import PackedRecords, column_values, packed
from sow_client._records import Ttl, datetime_of, invalid, ttl_micros
from sow_client.errors import SowError

OPEN_SECONDS: Final = 600.0
"""How long the opening of an export may take: the server may have to go through the keys of the topic."""
READ_RETRY_SECONDS: Final = 60.0
"""For how long a broken connection is made again. A server that was restarted has no exports any more, and says so."""
BATCH_SIZE_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class Export:
    """A consistent export of a topic, open on the server until its lease ends."""

    id: str
    topic: str
    bookmark: str | None
    """Changes after it are those after the export; None where the topic has no journal."""
    as_of: datetime
    """The instant at which expiry was judged."""
    lease: timedelta
    parts: tuple[int, ...]
    """About how many stored records each part is made of; part i is read by its index."""


def open_request(
    topic: str, filter_text: str | None, *, parts: int, lease: Ttl | None
) -> snapshot_pb2.OpenExportRequest:
    """An export to open."""
    if parts < 0:
        raise invalid("parts", f"{parts} is negative")
    return snapshot_pb2.OpenExportRequest(
        topic=topic,
        filter=filter_text or "",
        parts=min(parts, 2**32 - 1),
        lease_micros=0 if lease is None else ttl_micros(lease, "lease"),
    )


def export(export_id: str, response: snapshot_pb2.OpenExportResponse | snapshot_pb2.RenewExportResponse) -> Export:
    """An export that is open."""
    return Export(
        export_id,
        response.topic,
        response.bookmark or None,
        datetime_of(response.as_of_micros),
        timedelta(microseconds=response.lease_micros),
        tuple([part.records for part in response.parts]),
    )


def read_request(
    export_id: str, part: int, *, columns: Iterable[str], lines: bool, batch_size: int
) -> snapshot_pb2.ReadExportRequest:
    """A part to read."""
    if not 0 <= part < 2**32:
        raise invalid("part", f"{part} is no index of a part")
    if not 0 <= batch_size <= BATCH_SIZE_MAX:
        raise invalid("batch_size", f"{batch_size} is not between 0 and {BATCH_SIZE_MAX}")
    return snapshot_pb2.ReadExportRequest(
        export_id=export_id, part=part, columns=column_values(columns), lines=lines, batch_size=batch_size
    )


class PartCore:
    """Owns how far a part was read, and the decision to call again. Not thread-safe."""

    def __init__(self, request: snapshot_pb2.ReadExportRequest, *, connect_timeout: float) -> None:
        """`connect_timeout`: seconds to get the first connection."""
        self._request = request
        self._connect_timeout = connect_timeout
        self._backoff = _statuses.Backoff()
        self._stood = False
        self._returned = 0  # records of the present call
        self._ended = False  # the footer has come

    @property
    def what(self) -> str:
        """What is read, for errors."""
        return f"part {self._request.part} of the export"

    def request(self, *, now: float) -> snapshot_pb2.ReadExportRequest:
        """What to ask for in the next call. `now` as for `failed`."""
        if not self._stood:
            self._backoff.begin(now)
        self._returned = 0
        return self._request

    def feed(self, response: snapshot_pb2.ReadExportResponse) -> PackedRecords | None:
        """The records of a message; None: it has none. Raises SowError (MALFORMED_RESPONSE)."""
        match response.WhichOneof("response"):
            case "batch":
                records = packed(response.batch)
                self._returned += records.count
                self._request.resume_token = response.resume_token
                self._stood = True
                self._backoff.reset()
                return records
            case "footer":
                if response.footer.returned != self._returned:
                    raise _statuses.malformed(
                        f"{self._returned} records of {self.what}, and a footer that counts {response.footer.returned}"
                    )
                self._ended = True
        return None

    def finished(self) -> None:
        """The present call has ended in order. Raises Unavailable (STREAM_CUT) when the part has not."""
        if not self._ended:
            raise _statuses.cut(self.what)

    def failed(self, error: SowError, *, now: float, jitter: float) -> float:
        """Seconds to wait before the next call, as the present one ended with `error`; raises it when there is to be
        none. `now` is a monotonic clock in seconds, `jitter` a random number in [0, 1)."""
        if error.reason not in _statuses.CUT_REASONS:
            raise error
        limit = READ_RETRY_SECONDS if self._stood else self._connect_timeout
        delay = self._backoff.delay(error, now=now, jitter=jitter, limit=limit)
        if delay is None:
            raise error
        return delay
