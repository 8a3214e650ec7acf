"""Batch reads: the driver opens a consistent export of the topics, and the tasks stream its parts as Arrow batches.

Parts of several topics are put together, so that many small topics make few tasks.

Guarantees:

    [1]  All rows are of one cut, also those of several topics: no record twice, none missing, none expired at the cut's
         `as_of` (rules Q1, Q6).
    [2]  A task yields its parts whole or raises. A repeated task reads the same parts again.
    [3]  The lease of the export is renewed as long as a task reads, however slowly its rows are taken. An export that
         nobody has begun to read, or whose reading Spark has broken off, ends after `IDLE_LEASE`.
    [4]  Pushed filters change the records that are read, but never the result: Spark also gets all filters back (see
         `sow_spark.filters`). Where Spark keeps one plan for a DataFrame, filters are pushed only on request
         (`pushFilters`): if a DataFrame is loaded once and used with several filters, Spark reads it by the last one.
    [5]  Spark plans a DataFrame once, and may run an action of it much later, when the export has ended. The tasks of
         that action then read one other export, the same for all of them, or fail (rule Q8). Each task takes some of
         its parts, because it need not have as many as were planned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from sow_client import ExportOf, SowError
from sow_spark.connection import connect, kept, retried
from sow_spark.converting import Misfit
from sow_spark.decoding import Decoder
from sow_spark.errors import SowSourceError, translated
from sow_spark.gathering import ROWS, gathered
from sow_spark.options import Connecting, PayloadForm, Reading
from sow_spark.schemas import Layout, check_form, form_of, layout, topics_read

if TYPE_CHECKING:
    import pyarrow as pa

    from sow_client import Client, Export, PackedColumn, PackedRecords

RENEWALS_PER_LEASE: Final = 3
IDLE_LEASE: Final = timedelta(minutes=1)
"""Long enough for a task that was lost with its executor to begin again."""
_EXECUTION: Final = "spark.sql.execution.id"
"""The local property with the number of the action that a task belongs to."""


SHARES_MAX: Final = 100
"""Maximum number of topics in one partition: each of them costs a few calls."""
RECORDS_PER_PARTITION: Final = 100_000
"""Approximate number of records in one, where several topics share it. The server cuts a topic by the same number."""


@dataclass(frozen=True, repr=False)
class Share:
    """One part of a topic in an export, or the share of one task in an export that has taken its place [5]."""

    topic: str
    index: int
    """That of the part in the export."""
    part: int
    """Its number among the parts of this topic."""
    parts: int
    """The number of these; 0: there is none, but in a later export there may be some."""
    form: PayloadForm


@dataclass(frozen=True, repr=False)
class ExportPartition(InputPartition):
    """The work of one task."""

    export_id: str
    exported: tuple[ExportOf, ...]
    """All that the export is of."""
    shares: tuple[Share, ...]
    lease_seconds: float
    connecting: Connecting


class SnapshotReader(DataSourceReader):
    """Reads a snapshot of a topic. Spark calls `partitions` in the driver, and `read` in tasks, on a pickled copy that
    was made before. So everything that a task has to know is in its partition."""

    def __init__(self, reading: Reading, schema: StructType) -> None:
        """Raises SowSourceError for a schema that cannot be read."""
        self._reading = reading
        self._layout: Layout = layout(schema, metadata=reading.metadata != "false", new_fields=reading.new_fields)
        self._filters: Sequence[Filter] = ()

    def partitions(self) -> list[InputPartition]:
        """Opens the export."""
        reading = self._reading
        with translated(f"opening a snapshot of {reading.named}"), connect(reading.connecting) as client:
            forms: dict[str, PayloadForm]
            form = reading.payload
            if not reading.several and form is not None and form != "columns":
                check_form(self._layout, form)
                forms = {reading.topic: form}
            else:
                forms = {
                    topic.name: form_of(replace(reading, topic=topic.name), self._layout, topic.settings.message_type)
                    for topic in topics_read(client, reading)
                }
            export, exported = self._export(client, forms)
            shares: list[tuple[Share, int]] = []
            for one in exported:
                indexes = export.parts_of(one.topic)
                for part, index in enumerate(indexes):
                    share = Share(one.topic, index, part, len(indexes), forms[one.topic])
                    shares.append((share, export.parts[index]))
                if not indexes and not reading.is_fixed:
                    # No record matches. A later snapshot may have some, so there is a share for these. Without any
                    # partition Spark makes one of its own, which `read` recognises.
                    shares.append((Share(one.topic, 0, 0, 0, forms[one.topic]), 0))
            connecting = kept(reading.connecting, client, "" if reading.several else reading.topic)
        groups: list[tuple[Share, ...]] = [(share,) for share, _ in shares]
        if reading.several:
            wanted = sum(count for _, count in shares) // reading.partitions if reading.partitions else 0
            groups = packed_together(shares, wanted or RECORDS_PER_PARTITION)
        lease_seconds = export.lease.total_seconds()
        return [ExportPartition(export.id, exported, some, lease_seconds, connecting) for some in groups]

    def _export(self, client: Client, forms: Mapping[str, PayloadForm]) -> tuple[Export, tuple[ExportOf, ...]]:
        """The export, and what it is of: topics that are read in these forms, each with its filter."""
        reading = self._reading
        if (name := reading.export) is not None:
            export = retried(reading.connecting, lambda: client.renew_export(name))
            if not set(forms) <= set(export.topics):
                is_of = f"topics {', '.join(export.topics)}" if export.others else f"topic {export.topic}"
                others = ", ".join(topic for topic in forms if topic not in export.topics)
                raise SowSourceError("OPTION_INVALID", f"option export: {name} is an export of {is_of}, not {others}")
            return export, tuple(map(ExportOf, forms))
        texts = dict.fromkeys(forms, reading.filter)
        if self._filters:
            from sow_spark.filters import combined

            for topic, form in forms.items():
                # A payload as one column has no fields.
                fields = self._layout if form == "columns" else replace(self._layout, fields=StructType())
                texts[topic] = combined(reading.filter, self._filters, fields, reading.mode)
        try:
            return opened(client, reading, texts)
        except SowError as error:
            if error.reason != "FILTER_INVALID" or set(texts.values()) == {reading.filter}:
                raise
        # Try the user's filter alone. If the fault is in it, the error comes again, with the right position. If not,
        # this server does not accept our text of Spark's filters, and the export is opened without them.
        return opened(client, reading, dict.fromkeys(forms, reading.filter))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition."""
        if not isinstance(partition, ExportPartition):
            return
        reader = None if self._reading.is_fixed else _reader()
        with connect(partition.connecting) as client:
            current = None if reader is None else self._current(client, partition, reader)
            export_id = partition.export_id if current is None else current.id
            # One thread for all parts: many small topics would take longer to start one each than to be read.
            with renewed(lambda: client.renew_export(export_id), partition.lease_seconds):
                for share in partition.shares:
                    for part in parts_of(share, current):
                        yield from self._part(client, share, export_id, part, reader)

    def _part(
        self, client: Client, share: Share, export_id: str, part: int, reader: str | None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of one part of an export."""
        reading = self._reading
        decoder = Decoder(self._layout, share.form, reading.mode, share.topic)

        def records(columns: Sequence[PackedColumn], lines: bool) -> Iterator[PackedRecords]:
            return client.read_export(
                export_id,
                part,
                columns=columns,
                lines=lines,
                batch_size=reading.batch_size,
                fields=decoder.fields,
                reader=reader,
            )

        doing = f"reading part {part} of a snapshot of topic {share.topic}"
        with translated(doing):
            yield from batches(decoder, share.topic, records, rows=reading.batch_size)

    def _current(self, client: Client, partition: ExportPartition, reader: str) -> Export:
        """The export that the tasks of `reader` read [5]."""
        with translated(f"opening a snapshot of {self._reading.named}"):
            return retried(
                partition.connecting,
                lambda: client.open_export(
                    partition.exported,
                    lease=_lease(self._reading),
                    idle_lease=IDLE_LEASE,
                    successor_of=partition.export_id,
                    reader=reader,
                ),
                full=True,
            )


def parts_of(share: Share, current: Export | None) -> Sequence[int]:
    """The parts that a share is in the export that is read now; None: that which was planned."""
    if current is None:
        return [share.index] if share.parts else []
    return current.parts_of(share.topic)[share.part :: max(share.parts, 1)]


def packed_together(shares: Iterable[tuple[Share, int]], records: int) -> list[tuple[Share, ...]]:
    """Shares, each with its number of records, as partitions of about `records`, in their order."""
    partitions: list[tuple[Share, ...]] = []
    some: list[Share] = []
    held = 0
    for share, count in shares:
        if some and (held + count > records or len(some) == SHARES_MAX):
            partitions.append(tuple(some))
            some, held = [], 0
        some.append(share)
        held += count
    return [*partitions, tuple(some)] if some else partitions


def _parts_of(client: Client, reading: Reading, topics: Collection[str]) -> Mapping[str, int]:
    """The option `partitions`, which counts for all topics, divided among several by their records."""
    if not (reading.several and reading.partitions):
        return {}
    found = retried(reading.connecting, lambda: client.here.topics(with_statistics=True))
    sizes = {one.name: one.statistics.live_records for one in found if one.name in topics and one.statistics}
    total = max(sum(sizes.values()), 1)
    return {name: max(reading.partitions * size // total, 1) for name, size in sizes.items()}


def opened(client: Client, reading: Reading, texts: Mapping[str, str]) -> tuple[Export, tuple[ExportOf, ...]]:
    """Opens an export of topics for the options, of the records of each that match its text. A topic of a pattern that
    was deleted since they were listed is left out."""
    counts = _parts_of(client, reading, texts)
    left = dict(texts)
    while True:
        exported = tuple(
            [
                ExportOf(topic, text or None, reading.parameters, counts.get(topic, reading.partitions))
                for topic, text in left.items()
            ]
        )
        try:
            export = retried(
                reading.connecting,
                lambda exported=exported: client.open_export(  # type: ignore[misc]  # a lambda's default argument
                    exported, lease=_lease(reading), idle_lease=None if reading.is_fixed else IDLE_LEASE
                ),
                full=True,  # a snapshot that was read in part makes room within a minute
            )
        except SowError as error:
            gone = error.details.get("topic", "") if error.reason == "TOPIC_NOT_FOUND" else ""
            if reading.topic_pattern is None or gone not in left or len(left) == 1:
                raise
            del left[gone]
        else:
            return export, exported


def opened_at_load(reading: Reading) -> Reading:
    """The options with an export that is opened now, which every use of the DataFrame then reads."""
    with translated(f"opening a snapshot of {reading.named}"), connect(reading.connecting) as client:
        names = [topic.name for topic in topics_read(client, reading)]
        export, _ = opened(client, reading, dict.fromkeys(names, reading.filter))
        connecting = kept(reading.connecting, client, "" if reading.several else reading.topic)
        loaded = replace(reading, export=export.id, connecting=connecting)
        if reading.several:  # topics that match the pattern later are not in the export
            loaded = replace(loaded, topics=export.topics, topic_pattern=None)
        return loaded


def closed(loaded: Reading) -> None:
    """Ends the export of `opened_at_load`, if the server can be reached; otherwise it ends with its lease."""
    assert loaded.export is not None, "it was opened"
    with connect(loaded.connecting) as client, suppress(SowError):
        client.close_export(loaded.export)


def _lease(reading: Reading) -> str | None:
    return f"{reading.lease_micros}us" if reading.lease_micros else None


def _reader() -> str | None:
    """A name for the action of Spark that this task belongs to. None: the task belongs to none, because Spark runs it
    for an RDD. Then nothing tells which tasks belong together."""
    task = TaskContext.get()
    execution = None if task is None else task.getLocalProperty(_EXECUTION)
    return None if execution is None else f"execution {execution}"


class FilteringReader(SnapshotReader):
    """Reads a snapshot with Spark's filters pushed into the export. It is a separate class because Spark refuses a
    reader with `pushFilters` while spark.sql.python.filterPushdown.enabled is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """Remembers the filters, and also leaves all of them to Spark [4]."""
        self._filters = tuple(filters)
        return filters


def batches(
    decoder: Decoder,
    topic: str,
    records: Callable[[Sequence[PackedColumn], bool], Iterator[PackedRecords]],
    *,
    rows: int = 0,
) -> Iterator[pa.RecordBatch]:
    """The records of `records(columns, lines)`, as Arrow batches of about `rows` (0: the default).

    Raises SowSourceError (ROW_MALFORMED) for a record that does not fit. It reads again to find the record's key."""
    done = 0
    for packed in gathered(records(decoder.columns, decoder.lines), rows=rows or ROWS):
        try:
            batch = decoder.decode(packed)
        except Misfit as misfit:
            key = _key_at(records(("key",), False), done + misfit.row)
            raise SowSourceError(
                "ROW_MALFORMED",
                f"record {key} of topic {topic}, {misfit}",
                "correct the schema or the record, or read with mode=PERMISSIVE (null) or DROPMALFORMED (left out)",
            ) from None
        done += packed.count
        if batch.num_rows:
            yield batch


def _key_at(records: Iterator[PackedRecords], row: int) -> str:
    """The key of a record by its position. Repeating the call gives the same records."""
    for packed in records:
        if row < packed.count:
            offsets = memoryview(packed.key_offsets).cast("i")
            return repr(packed.keys[offsets[row] : offsets[row + 1]].decode(errors="replace"))
        row -= packed.count
    return "?"


@contextmanager
def renewed(renew: Callable[[], object], lease_seconds: float) -> Iterator[None]:
    """Calls `renew` on a thread, a few times per lease. If a renewal fails, the reading itself raises the error."""
    over = threading.Event()

    def renewing() -> None:
        while not over.wait(lease_seconds / RENEWALS_PER_LEASE):
            try:
                renew()
            except SowError as error:
                if error.reason == "EXPORT_NOT_FOUND":
                    return

    thread = threading.Thread(target=renewing, name="sow-renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()  # not joined: it may wait for an answer, and closing the client ends that
