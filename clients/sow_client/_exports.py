"""Exports: requests, and reading a part over broken connections (rule Q6).

`PartCore` is the whole machine, without I/O, threads or clock. `Client` and `AsyncClient` make the calls that it asks
for.

    [1]  Each record of a part is handed out once, however often the connection breaks: a repeated call continues after
         the last batch that came.
    [2]  A part ends with a footer whose count is right, or with an exception: an incomplete part is never taken as
         complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sow.v1 import snapshot_pb2
from sow_client import _statuses
from sow_client._packed import PackedRecords, column_values, packed
from sow_client._parameters import Parameters, parameter_values
from sow_client._records import OnAbsentFields, Ttl, datetime_of, invalid, ttl_micros
from sow_client.errors import SowError

OPEN_SECONDS: Final = 600.0
"""The time that opening an export may take: the server may have to read all keys of the topic."""
PASSING_REASONS: Final = _statuses.CUT_REASONS | {"ACCESS_CHANGED"}
"""The part is read on from the position reached. A caller that may not read all of it any more is refused then."""
READ_RETRY_SECONDS: Final = 60.0
"""The time to reconnect. A restarted server has no exports any more, and refuses the part."""
BATCH_SIZE_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class ExportOf:
    """A topic of an export of several, with a filter of its own."""

    topic: str
    filter: str | None = None
    """None: all of its records."""
    parameters: Parameters | None = None
    """The values of the names in the filter."""
    parts: int = 0
    """About how many parts this topic has. 0: the server decides."""


@dataclass(frozen=True, slots=True)
class Export:
    """A consistent export of a topic, or of several at one instant, open on the server until its lease ends."""

    id: str
    topic: str
    """Its topic; of several the first one."""
    bookmark: str | None
    """The position of the export: changes after it are not in the export. None when no topic of it has a journal."""
    as_of: datetime
    """The instant at which expiry was judged."""
    lease: timedelta
    parts: tuple[int, ...]
    """The approximate number of stored records of each part. A part is read by its index here."""
    others: tuple[str, ...] = ()
    """Its other topics."""
    part_topics: tuple[str, ...] = ()
    """Where there are other topics: the topic of each part, by its index."""

    @property
    def topics(self) -> tuple[str, ...]:
        """All of its topics."""
        return (self.topic, *self.others)

    def parts_of(self, topic: str) -> list[int]:
        """The parts of one of its topics, by their indexes."""
        names = self.part_topics if self.others else [self.topic] * len(self.parts)
        return [at for at, name in enumerate(names) if name == topic]


def open_request(
    topic: str | Sequence[str | ExportOf],
    filter_text: str | None,
    parameters: Parameters | None = None,
    *,
    parts: int,
    lease: Ttl | None,
    idle_lease: Ttl | None = None,
    successor_of: str | None = None,
    reader: str | None = None,
) -> snapshot_pb2.OpenExportRequest:
    """The request to open an export."""
    named = [topic] if isinstance(topic, str) else topic
    if not named:
        raise invalid("topic", "names no topic")
    first, *others = [ExportOf(one, filter_text, parameters, parts) if isinstance(one, str) else one for one in named]
    for one in (first, *others):
        if one.parts < 0:
            raise invalid("parts", f"{one.parts} is negative")
    return snapshot_pb2.OpenExportRequest(
        topic=first.topic,
        filter=first.filter or "",
        parameters=parameter_values(first.parameters),
        parts=min(first.parts, 2**32 - 1),
        others=[
            snapshot_pb2.ExportedTopic(
                topic=one.topic,
                filter=one.filter or "",
                parameters=parameter_values(one.parameters),
                parts=min(one.parts, 2**32 - 1),
            )
            for one in others
        ],
        lease_micros=0 if lease is None else ttl_micros(lease, "lease"),
        idle_lease_micros=0 if idle_lease is None else ttl_micros(idle_lease, "idle_lease"),
        successor_of=successor_of or "",
        reader=reader or "",
    )


def export(export_id: str, response: snapshot_pb2.OpenExportResponse | snapshot_pb2.RenewExportResponse) -> Export:
    """An open export."""
    names = (response.topic, *response.others)
    return Export(
        export_id,
        response.topic,
        response.bookmark or None,
        datetime_of(response.as_of_micros),
        timedelta(microseconds=response.lease_micros),
        tuple([part.records for part in response.parts]),
        tuple(response.others),
        tuple([names[part.topic] for part in response.parts]) if response.others else (),
    )


def read_request(
    export_id: str,
    part: int,
    *,
    columns: Iterable[str],
    lines: bool,
    batch_size: int,
    fields: Iterable[str] = (),
    reader: str | None = None,
) -> snapshot_pb2.ReadExportRequest:
    """The request to read a part."""
    if isinstance(fields, str):
        raise invalid("fields", f"is the text {fields!r}, not names of fields")
    if not 0 <= part < 2**32:
        raise invalid("part", f"{part} is no index of a part")
    if not 0 <= batch_size <= BATCH_SIZE_MAX:
        raise invalid("batch_size", f"{batch_size} is not between 0 and {BATCH_SIZE_MAX}")
    return snapshot_pb2.ReadExportRequest(
        export_id=export_id,
        part=part,
        columns=column_values(columns),
        lines=lines,
        batch_size=batch_size,
        fields=fields,
        reader=reader or "",
    )


class PartCore:
    """Owns the progress in a part, and the decision to call again. Not thread-safe."""

    def __init__(
        self,
        request: snapshot_pb2.ReadExportRequest,
        *,
        connect_timeout: float,
        on_absent_fields: OnAbsentFields | None = None,
    ) -> None:
        """`connect_timeout` bounds the seconds to make the first connection. `on_absent_fields` is told what the footer
        says."""
        self._request = request
        self._connect_timeout = connect_timeout
        self._on_absent_fields = on_absent_fields
        self._backoff = _statuses.Backoff()
        self._stood = False
        self._returned = 0  # records of the current call
        self._ended = False  # the footer has come

    @property
    def what(self) -> str:
        """The name of the part, for errors."""
        return f"part {self._request.part} of the export"

    def request(self, *, now: float) -> snapshot_pb2.ReadExportRequest:
        """The request of the next call. `now` as for `failed`."""
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
                if self._on_absent_fields is not None:
                    self._on_absent_fields(tuple(response.footer.absent_fields))
        return None

    def finished(self) -> None:
        """The call has ended with status OK. Raises Unavailable (STREAM_CUT) when the part is incomplete."""
        if not self._ended:
            raise _statuses.cut(self.what)

    def failed(self, error: SowError, *, now: float, jitter: float) -> float:
        """Seconds to wait before the next call, after one that ended with `error`; raises that error if no call is to
        follow. `now` is a monotonic clock in seconds, `jitter` a random number in [0, 1)."""
        if error.reason not in PASSING_REASONS:
            raise error
        limit = READ_RETRY_SECONDS if self._stood else self._connect_timeout
        delay = self._backoff.delay(error, now=now, jitter=jitter, limit=limit)
        if delay is None:
            raise error
        return delay
