"""The part of `sow.v1.SnapshotService` for changes: ranges of a topic's journal are planned, read, and pinned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import structlog

from sow.durations import format_micros
from sow.v1 import snapshot_pb2
from sow_server.access.caller import Call, Granted
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.values.bookmarks import parse
from sow_server.engine.values.keys import TOPIC_NAME
from sow_server.engine.values.model import MICROS, MessageType
from sow_server.filters.parameters import Values
from sow_server.query.filtering import RecordFilter, callers_filter
from sow_server.services.ownership import OwnedDurables
from sow_server.services.reader_pieces import ReaderPieces
from sow_server.services.records.positions import on_disk
from sow_server.services.wire import convert, packing
from sow_server.services.wire.filter_values import filter_values
from sow_server.subscriptions.durable.consumer_registry import Consumers
from sow_server.subscriptions.hub import Hub
from sow_server.subscriptions.journal.ranges import (
    ChangeColumns,
    KeySet,
    KeyShare,
    RangeBounds,
    RangeLimits,
    RangeReader,
    plan_range,
)
from sow_server.subscriptions.request import Start, StartKind

log = structlog.get_logger(__name__)

SHARES_MAX: Final = 1_000
KEYS_MAX: Final = 10_000
PARTS_MAX: Final = 1_000
"""The largest number of parts of a plan. Finding one takes some twenty seeks; finding all takes a tenth of a second."""
IDLE_TTL_MICROS: Final = 3_600 * MICROS
IDLE_TTL_MICROS_MIN: Final = MICROS
PIN_IDLE_TTL_MAX_MICROS: Final = 7 * 86_400 * MICROS
"""The default of `[limits] pin_idle_ttl_max`."""
READER_CHARACTERS_MAX: Final = 200


class ChangesService:
    """Validates, asks the journal, packs; owns nothing."""

    def __init__(
        self,
        reading: Reads,
        writes: Writes,
        hub: Hub,
        consumers: Consumers,
        pieces: ReaderPieces,
        *,
        pin_idle_max: int = PIN_IDLE_TTL_MAX_MICROS,
    ) -> None:
        self._pin_idle_max = pin_idle_max
        self._owned = OwnedDurables(reading.durables)
        self._reading = reading
        self._commits = writes.commits
        self._hub = hub
        self._consumers = consumers
        self._pieces = pieces

    # -- planning ---------------------------------------------------------------------------------------------------

    async def PlanChanges(
        self, request: snapshot_pb2.PlanChangesRequest, call: Call
    ) -> snapshot_pb2.PlanChangesResponse:
        reading, granted = self._reading, call.topic(request.topic)
        topic, told = granted.topic, granted.restriction.rows is None
        start = _start(request)
        if start.kind is StartKind.TIME:
            self._hub.check_time(start.time_micros, "start_time_micros")
        if request.parts > PARTS_MAX:
            raise convert.invalid("parts", f"must be between 1 and {PARTS_MAX}")
        # With hidden fields the bytes of a range would tell how long those are.
        bytes_max = 0 if granted.restriction.hidden else request.max_bytes
        limits = RangeLimits(request.max_entries, bytes_max, request.parts or 1, by_sequence=not told)
        position = await self._start_of(request.bookmark, told=told) if start.kind is StartKind.BOOKMARK else 0
        end = await self._end_of(request.end_bookmark, position, told=told) if request.end_bookmark else None
        marking = self._hub.marking(topic) if told else None
        found = await asyncio.shield(
            self._pieces.run(lambda: plan_range(reading.cuts, reading.instance, topic, start, position, end, limits))
        )
        response = snapshot_pb2.PlanChangesResponse(
            start_bookmark=reading.instance.bookmark(found.start),
            end_bookmark=reading.instance.bookmark(found.end),
            entries=found.entries,
            bytes=0 if granted.restriction.hidden else found.bytes,
            part_ends=[reading.instance.bookmark(position) for position in found.part_ends],
            head_bookmark=reading.instance.bookmark(found.head),
            entries_left=found.entries_left,
            earliest_bookmark=reading.instance.bookmark(found.earliest),
            marks="" if marking is None else self._hub.marks(marking, found.end),
        )
        if found.left_since_micros is not None:
            response.left_age_micros = self._hub.age_micros(found.left_since_micros)
        return response

    async def _start_of(self, bookmark: str, *, told: bool) -> int:
        """The position of the beginning of a range, also for a bookmark of another instance, if the caller may see the
        whole topic (`told`; rule F18)."""
        if not told:
            return await self._position_on_disk(bookmark)
        position = self._hub.position_here(bookmark)
        await on_disk(self._commits, position)
        return position

    async def _end_of(self, bookmark: str, start: int, *, told: bool) -> int:
        """The position of the end of a range. One of another instance may be from before the beginning."""
        position = await self._start_of(bookmark, told=told)
        return position if parse(bookmark).at.epoch == self._reading.instance.epoch else max(start, position)

    async def _position_on_disk(self, bookmark: str) -> int:
        """The position of a bookmark, once everything up to there is on disk. Raises StoreError with one of three
        reasons."""
        position = self._hub.position(bookmark)
        await on_disk(self._commits, position)
        return position

    # -- reading ----------------------------------------------------------------------------------------------------

    async def ReadChanges(self, request: snapshot_pb2.ReadChangesRequest, call: Call) -> AsyncGenerator[bytes, None]:
        """Messages as bytes on the wire, packed on the reader threads."""
        reading, granted = self._reading, call.topic(request.topic)
        topic, restriction = granted
        columns = packing.columns(request.columns, packing.CHANGE_COLUMNS)
        batch_size = packing.batch_size(request.batch_size)
        json = topic.settings.message_type is MessageType.JSON
        start, end = (
            await self._position_on_disk(request.start_bookmark),
            await self._position_on_disk(request.end_bookmark),
        )
        history = await self._position_on_disk(request.history_bookmark) if request.history_bookmark else None
        if end < start:
            raise convert.invalid("end_bookmark", f"names the sequence {end}, and the range begins after {start}")
        if history is not None and history > start:
            raise convert.invalid(
                "history_bookmark", f"names the sequence {history}, and the range begins after {start}"
            )
        convert.check_key_parts(topic.settings.key, request.keys)
        chosen = _keys(request) or _share(request.share, request.shares)
        text = request.filter
        reader = RangeReader(
            reading,
            topic,
            await asyncio.shield(self._pieces.run(lambda: _filter(granted, text, filter_values(request.parameters))))
            if text or request.parameters or restriction.rows is not None
            else None,
            RangeBounds(start, end, history),
            batch_size=batch_size,
            share=chosen,
            projection=Projection(hidden=restriction.hidden) if restriction.hidden else None,
            elsewhere=request.elsewhere and restriction.rows is None,
        )
        footer = snapshot_pb2.ExportFooter()

        def next_batch() -> bytes:
            """The next changes; b"" if this step found none that match."""
            piece = reader.read()
            count = len(piece.columns.keys)
            footer.scanned += piece.looked_at if restriction.rows is None else count
            footer.returned += count
            if not count:
                return b""
            position = piece.position
            if restriction.rows is not None and not reader.done:
                position = piece.columns.headers.sequence[-1]  # not the end of so many changes, some of them hidden
            response = snapshot_pb2.ReadChangesResponse(bookmark=reading.instance.bookmark(position))
            _fill(response.batch, piece.columns, columns, reading.origins.names, lines=request.lines, json=json)
            return response.SerializeToString()

        # One piece ahead: the next one is read while this one is sent. Each piece releases its cut when it ends.
        ahead = self._pieces.run(next_batch)
        done = False
        while not done:
            encoded = await asyncio.shield(ahead)
            done = reader.done
            if not done:
                ahead = self._pieces.run(next_batch)
            if encoded:
                yield encoded
        yield snapshot_pb2.ReadChangesResponse(footer=footer).SerializeToString()

    # -- pinning ----------------------------------------------------------------------------------------------------

    async def PinJournal(self, request: snapshot_pb2.PinJournalRequest, call: Call) -> snapshot_pb2.PinJournalResponse:
        topic = call.topic(request.topic).topic
        if not TOPIC_NAME.match(request.name):
            raise convert.invalid("name", f"{request.name[:220]!r} is no name: 1 to 200 of [A-Za-z0-9_.:-] are allowed")
        idle_ttl = request.idle_ttl_micros or IDLE_TTL_MICROS
        if idle_ttl < IDLE_TTL_MICROS_MIN:
            raise convert.invalid("idle_ttl_micros", f"must be at least {IDLE_TTL_MICROS_MIN}, or 0 for an hour")
        if idle_ttl > self._pin_idle_max:
            raise convert.invalid(
                "idle_ttl_micros",
                f"is {format_micros(idle_ttl)}, and this server allows {format_micros(self._pin_idle_max)} "
                "([limits] pin_idle_ttl_max): a reader that is gone must not hold the journal for longer",
            )
        if len(request.reader) > READER_CHARACTERS_MAX or not request.reader.isprintable():
            raise convert.invalid("reader", f"is a text of up to {READER_CHARACTERS_MAX} printable characters")
        position = self._hub.position(request.bookmark)
        with self._owned.making(call, request.topic, request.name, "name") as name:
            durable, created = await self._consumers.pin(
                topic, name, position, idle_ttl_micros=idle_ttl, reader=request.reader
            )
        if created:
            log.info(
                "journal_pinned",
                topic=topic.name,
                durable=durable.name,
                position=durable.position,
                reader=durable.reader,
            )
        return snapshot_pb2.PinJournalResponse(
            bookmark=self._reading.instance.bookmark(durable.position), created=created
        )


def _start(request: snapshot_pb2.PlanChangesRequest) -> Start:
    match request.WhichOneof("start"):
        case "bookmark":
            return Start(StartKind.BOOKMARK, bookmark=request.bookmark)
        case "start_time_micros":
            if request.start_time_micros < 0:
                raise convert.invalid("start_time_micros", "must not be negative")
            return Start(StartKind.TIME, time_micros=request.start_time_micros)
        case "earliest":
            if not request.earliest:
                raise convert.invalid("earliest", "false has no meaning; give another start")
            return Start(StartKind.EARLIEST)
        case "latest":
            if not request.latest:
                raise convert.invalid("latest", "false has no meaning; give another start")
            return Start(StartKind.NOW)
        case None:
            raise convert.invalid("start", "one of bookmark, start_time_micros, earliest or latest is needed")


def _keys(request: snapshot_pb2.ReadChangesRequest) -> KeySet | None:
    if not request.keys:
        return None
    if request.shares or request.share:
        raise convert.invalid("keys", "cannot be combined with shares")
    if len(request.keys) > KEYS_MAX:
        raise convert.invalid("keys", f"has {len(request.keys)} keys, and {KEYS_MAX} are allowed")
    return KeySet(frozenset(key.encode() for key in request.keys))


def _share(share: int, shares: int) -> KeyShare | None:
    if shares > SHARES_MAX:
        raise convert.invalid("shares", f"must be at most {SHARES_MAX}")
    if share >= max(1, shares):
        raise convert.invalid(
            "share", f"must be below shares, which is {shares}" if shares else "is given without shares"
        )
    return KeyShare(share, shares) if shares > 1 else None


def _filter(granted: Granted, text: str, given: Values) -> RecordFilter | None:
    # There is no `now` to give, as NOW_MICROS() is refused: a range that is read again must give the same changes.
    return callers_filter(granted.topic, text, granted.restriction, allow_now=False, given=given)


def _fill(
    message: snapshot_pb2.PackedRecords,
    found: ChangeColumns,
    wanted: frozenset[int],
    origins: Sequence[str],
    *,
    lines: bool,
    json: bool,
) -> None:
    """Fills a message with changes. `lines`, `json`: as for `packing.fill_payloads`."""
    message.count = len(found.keys)
    if packing.PAYLOAD in wanted:
        packing.fill_payloads(message, found.payloads, lines=lines, json=json)
    if packing.KEY in wanted:
        packing.fill_keys(message, found.keys)
    packing.fill_headers(message, found.headers, wanted, origins)
    if packing.OP in wanted:
        message.ops = bytes(found.ops)
        message.reasons = bytes(found.reasons)
