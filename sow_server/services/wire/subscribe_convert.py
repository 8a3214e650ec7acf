"""Converts between the messages of `Subscribe` and the values of the subscriptions.

A frame of changes is encoded once for all subscribers that get it, so the messages are bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from sow.v1 import sow_pb2
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads
from sow_server.engine.stored import HeaderColumns
from sow_server.engine.values.bookmarks import HELD_MAX, parse
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import TopicSettings
from sow_server.filters.restriction import Restriction
from sow_server.query.scan import RecordBatch
from sow_server.services.wire import convert, settings_convert
from sow_server.services.wire.filter_values import filter_values
from sow_server.services.wire.topic_filters import AskedView, TopicFilters
from sow_server.subscriptions.durable.consumer import Attachment
from sow_server.subscriptions.frames import (
    ChangeFrame,
    DurableBegin,
    Frame,
    GapNotice,
    Progress,
    Row,
    RowColumns,
    SnapshotBatch,
    SnapshotBegin,
    SnapshotEnd,
)
from sow_server.subscriptions.journal.history import PastChange
from sow_server.subscriptions.live.held import HeldSnapshot, held
from sow_server.subscriptions.request import FROM_NOW, PROGRESS_MICROS, Request, Snapshot, Start, StartKind, check

_OP, _REASON = (
    bytes((sow_pb2.ChangeBatch.DESCRIPTOR.fields_by_name[name].number << 3 | 2,)) for name in ("op", "reason")
)
"""The tags of these columns on the wire."""


def request(
    message: sow_pb2.SubscribeRequest,
    reading: Reads,
    part_of: Callable[[Topic], Restriction | None],
    *,
    rights: str = "",
) -> Request:
    """The requested subscription. `part_of`: the part of a topic that the caller may see; None: nothing of it. `rights`
    names all that it may see. Raises StoreError if options contradict each other. Takes milliseconds for a request with
    many held ranges."""
    if message.snapshot_max and not (message.sow and message.topic and not message.HasField("held")):
        raise convert.invalid("snapshot_max", "only with sow and topic, and without held")
    filters = TopicFilters(
        reading.cuts,
        AskedView(message.filter, filter_values(message.parameters), message.select.include, message.select.exclude),
        message.batch_size or 1000,
        part_of,
        known=message.view,
        held=_held(message, reading),
        snapshot_max=message.snapshot_max,
    )
    asked = Request(
        filters.view,
        filters.snapshot,
        topic=message.topic,
        pattern=message.topic_pattern,
        sow=message.sow,
        oof=message.oof,
        delta=message.delta,
        changes=message.changes,
        empty_deltas=message.empty_deltas,
        start=_start(message),
        conflation_micros=message.conflation_micros,
        progress_micros=message.progress_micros or PROGRESS_MICROS,
        batch_size=message.batch_size or 1000,
        permits=filters.permits,
        name=filters.name_of_all(rights) if message.topic_pattern else b"",
    )
    check(asked, selects=bool(message.select.include or message.select.exclude))
    return asked


def attachment(message: sow_pb2.SubscribeRequest) -> Attachment | None:
    """The durable to consume, if any. Raises StoreError if it contradicts other options."""
    if not message.HasField("durable"):
        return None
    durable = message.durable
    for given, field in (
        (message.topic_pattern, "topic_pattern"),
        (message.sow, "sow"),
        (message.delta, "delta"),
        (message.conflation_micros, "conflation_micros"),
    ):
        if given:
            raise convert.invalid("durable", f"cannot be combined with {field}")
    declared = (
        settings_convert.durable_settings(durable.settings, "durable.settings")
        if durable.HasField("settings")
        else None
    )
    if len(durable.told) > HELD_MAX:
        raise convert.invalid("durable.told", f"has more than {HELD_MAX} positions")
    return Attachment(
        durable.name,
        force=durable.force,
        expected=durable.expected,
        declared=declared or None,
        told=tuple([parse(text, "durable.told").at for text in durable.told]),
    )


def _held(message: sow_pb2.SubscribeRequest, reading: Reads) -> Callable[[Snapshot, str], Snapshot] | None:
    """Leaves the held records out of a snapshot; None: none are held."""
    if not message.HasField("held"):
        return None
    for given, field in ((message.sow, "sow"), (message.topic, "topic"), (message.view, "view")):
        if not given:
            raise convert.invalid("held", f"only with {field}")
    ranges = held(message.held.upto_key, message.held.checksum, message.held.records)
    batch_size = message.batch_size or 1000

    def without_held(whole: Snapshot, topic: str) -> Snapshot:
        return HeldSnapshot(whole, ranges, lambda: reading.origins.names, topic=topic, batch_size=batch_size)

    return without_held


def _start(message: sow_pb2.SubscribeRequest) -> Start:
    match message.WhichOneof("start"):
        case None:
            return FROM_NOW
        case "bookmark":
            return Start(StartKind.BOOKMARK, bookmark=message.bookmark)
        case "start_time_micros":
            return Start(StartKind.TIME, time_micros=message.start_time_micros)
        case "earliest":
            if not message.earliest:
                raise convert.invalid("earliest", "false has no meaning; leave the start unset")
            return Start(StartKind.EARLIEST)


def left(error: StoreError) -> bytes | None:
    """The last frame of a stream that has sent all changes of topics that have left the cell; None: it has ended with
    another error. Rule: C21."""
    if error.details.get("complete") != "true":
        return None
    version = int(error.details["placement_version"])
    return sow_pb2.SubscribeResponse(topics_left=sow_pb2.TopicsLeft(placement_version=version)).SerializeToString()


def response(frame: Frame, reading: Reads, *, figures: bool = True) -> bytes:
    """The bytes of a frame on the wire. Not `figures`: the caller must not know how many entries there are (rule
    A4)."""
    message = sow_pb2.SubscribeResponse()
    match frame:
        case ChangeFrame():
            if frame.encoded is None:
                fill_changes(message.changes, frame, reading)
                frame.encoded = message.SerializeToString()
            return frame.encoded
        case SnapshotBatch(topic, keys, payloads, headers, replaced, results):
            message.snapshot.topic = topic
            message.snapshot.after_key.extend([after.decode() for after, _ in replaced])
            message.snapshot.upto_key.extend([upto.decode() for _, upto in replaced])
            if keys:
                batch = RecordBatch(list(keys), list(payloads), headers)
                settings = convert.RESULTS if results else reading.settings(topic)
                convert.fill_columns(message.snapshot.records, reading.origins.names, batch, settings)
        case SnapshotBegin(sequence, now_micros, view, expires, is_held):
            message.snapshot_begin.bookmark = reading.instance.bookmark(sequence)
            message.snapshot_begin.as_of_micros = now_micros
            message.snapshot_begin.view = view
            message.snapshot_begin.expires = expires
            message.snapshot_begin.held = is_held
        case SnapshotEnd(sequence, marks, truncated, absent_fields):
            message.snapshot_end.bookmark = reading.instance.bookmark(sequence) + marks
            message.snapshot_end.truncated = truncated
            message.snapshot_end.absent_fields.extend(absent_fields)
        case Progress(sequence, now_micros, marks, covers, behind, sources):
            message.progress.bookmark = reading.instance.bookmark(sequence) + marks
            message.progress.now_micros = now_micros
            message.progress.covers = covers
            message.progress.behind = behind
            message.progress.sources = sources
        case DurableBegin(sequence, created, reset, session, replicated):
            message.durable_begin.bookmark = reading.instance.bookmark(sequence)
            message.durable_begin.created = created
            message.durable_begin.reset = reset
            message.durable_begin.session = session
            message.durable_begin.replicated = replicated
        case GapNotice(reason, after, upto, entries):
            message.gap.reason = sow_pb2.GapReason.ValueType(reason.value)
            message.gap.after_bookmark = reading.instance.bookmark(after)
            message.gap.upto_bookmark = reading.instance.bookmark(upto)
            message.gap.entries = entries if figures else 0
    return message.SerializeToString()


def fill_history(message: sow_pb2.ReadHistoryResponse, topic: str, found: Sequence[PastChange], reading: Reads) -> None:
    """Fills a message with changes of a history."""
    message.changes.topic = topic
    _fill_rows(message.changes, [past.row for past in found], reading)
    names = reading.origins.names
    message.commit_time_micros.extend([past.commit_time_micros for past in found])
    message.instance.extend(["" if past.made_by is None else names[past.made_by] for past in found])


def fill_changes(message: sow_pb2.ChangeBatch, frame: ChangeFrame, reading: Reads) -> None:
    """Fills a message with a frame of changes."""
    message.topic = frame.topic
    message.bookmark = "" if frame.more else reading.instance.bookmark(frame.bookmark)
    message.more = frame.more
    message.atomic = frame.atomic
    if not frame.rows:
        return
    rows = frame.rows
    message.delivery_count.extend(frame.delivered)
    message.position.extend(frame.positions)
    if isinstance(rows, RowColumns):
        # On the wire, a packed column of small numbers is their bytes.
        message.MergeFromString(convert.packed(_OP, rows.ops))
        if rows.reasons.strip(b"\0"):
            message.MergeFromString(convert.packed(_REASON, rows.reasons))
        batch = RecordBatch(rows.keys, rows.payloads, rows.headers)
        convert.fill_columns(message.records, reading.origins.names, batch, reading.settings(message.topic))
        return
    _fill_rows(message, rows, reading, convert.RESULTS if frame.results else None)


def _fill_rows(
    message: sow_pb2.ChangeBatch, rows: Sequence[Row], reading: Reads, settings: TopicSettings | None = None
) -> None:
    """`settings`: those of the rows; None: of the topic."""
    # In columns at once: most frames have one row, and a comprehension for each column was most of their cost.
    ops, why, keys, payloads, version, published, expire_time, origin, sequence, delta, unset, *_ = zip(
        *rows, strict=True
    )
    message.op.extend(ops)
    if any(why):
        message.reason.extend(why)
    if any(delta):
        message.is_delta.extend(delta)
    if any(unset):
        for paths in unset:
            message.unset_paths.add(paths=paths)
    headers = HeaderColumns(
        array("q", version), array("q", published), array("q", expire_time), array("q", sequence), array("H", origin)
    )
    batch = RecordBatch(list(keys), list(payloads), headers)
    convert.fill_columns(message.records, reading.origins.names, batch, settings or reading.settings(message.topic))
