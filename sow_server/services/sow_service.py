"""`sow.v1.SowService` without its subscriptions: publish, read, delete, touch, and what durables are told."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from sow.v1 import sow_pb2, types_pb2
from sow_server.access.caller import Call, Granted
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.requests import payload_key
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.durables import RewindTo
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Delete, Durability, PublishChannel
from sow_server.filters.parameters import NO_VALUES, Values
from sow_server.query.filtering import callers_filter, record_filter, rows_filter
from sow_server.query.scan import Query, RecordBatch, Scan, point_keys
from sow_server.services.door.received import readable
from sow_server.services.followers import Subscribing
from sow_server.services.ownership import OwnedDurables
from sow_server.services.records.answering import close_after
from sow_server.services.records.getting import Getting, LongGets
from sow_server.services.records.positions import Positions, on_disk
from sow_server.services.records.queries import Queries
from sow_server.services.records.selection import BUSY_RECORDS, CHANGE_RECORDS, count, count_selected, selected
from sow_server.services.records.submissions import Submissions, Submitted
from sow_server.services.records.writing import (
    check_lifetime,
    explain_refusals,
    only_versions,
    permit_delete,
    permit_publish,
    permit_touch,
    refuse_in_stream,
)
from sow_server.services.wire import convert, subscribe_convert
from sow_server.services.wire.filter_values import values_read
from sow_server.subscriptions.journal.history import History

log = structlog.get_logger(__name__)

T = TypeVar("T")

STREAM_REQUESTS_MAX: Final = 16
"""Requests of one publish stream that may be under way; the next is read when the first is answered."""
BROWSE_ENTRIES: Final = 100
BROWSE_ENTRIES_MAX: Final = 10_000
HISTORY_ENTRIES: Final = 100
HISTORY_ENTRIES_MAX: Final = 10_000
GET_KEYS_MAX: Final = 10_000
RENEWED_KEYS_MAX: Final = 1000
"""Keys of a get that touches: as many records are changed in one commit (rule L20)."""


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """The options for publishes."""

    durability: Durability
    """The durability of a publish that asks for none."""
    dynamic_topics: bool = False
    """A publish creates a topic that does not exist."""


class SowService:
    """Validates, calls the store, translates; owns nothing."""

    def __init__(
        self,
        reading: Reads,
        writes: Writes,
        subscribing: Subscribing,
        changes: Submissions,
        readers: Executor,
        queries: Queries,
        positions: Positions,
        options: PublishOptions,
    ) -> None:
        self._reading = reading
        self._commits = writes.commits
        self._hub = subscribing.hub
        self._consumers = subscribing.consumers
        self._changes = changes
        self._readers = readers
        self._durability = options.durability
        self._dynamic_topics = options.dynamic_topics
        self._owned = OwnedDurables(reading.durables)
        self._queries = queries
        self._positions = positions
        self._long_gets = LongGets()

    # -- publishing -------------------------------------------------------------------------------------------------

    async def Publish(self, request: sow_pb2.PublishRequest, call: Call) -> sow_pb2.PublishResponse:
        publish = convert.publish(request, self._durability)
        permit_publish(call, publish, dynamic=self._dynamic_topics)
        outcome = await self._changes.admitted(publish, call.seconds_left())
        call.notes.update(topic=publish.topic, records=outcome.applied, sequence=outcome.last_sequence)
        if outcome.removed:
            call.has_removed(outcome.removed)
        if call.trace is not None:
            call.trace.answered(outcome.last_sequence)
        return sow_pb2.PublishResponse(
            results=convert.results(outcome),
            durability=types_pb2.Durability.ValueType(outcome.durability),
            journal_epoch=self._reading.instance.epoch,
        )

    async def PublishStream(
        self, requests: AsyncIterator[sow_pb2.PublishStreamRequest], call: Call
    ) -> AsyncGenerator[sow_pb2.PublishStreamResponse, None]:
        """Reads ahead of its answers by at most `STREAM_REQUESTS_MAX` requests."""
        under_way: asyncio.Queue[Submitted | None] = asyncio.Queue()
        room = asyncio.Semaphore(STREAM_REQUESTS_MAX)
        reading = asyncio.create_task(self._read_stream(requests, under_way, room, call))
        try:
            while (submitted := await under_way.get()) is not None:
                outcome = await submitted
                room.release()
                if outcome.refused is not None:
                    explain_refusals(call, outcome, outcome.refused)
                if outcome.removed:
                    call.has_removed(outcome.removed)
                if call.trace is not None:
                    call.trace.answered(outcome.last_sequence)
                yield convert.stream_response(outcome, self._reading.instance.epoch)
            await reading  # raises the error that ended the reading
        finally:
            reading.cancel()
            while not under_way.empty():
                left = under_way.get_nowait()
                if isinstance(left, asyncio.Task) and not left.cancel() and not left.cancelled():
                    # Their answers can no longer be sent; the error before has been told.
                    left.exception()

    async def _read_stream(
        self,
        requests: AsyncIterator[sow_pb2.PublishStreamRequest],
        under_way: asyncio.Queue[Submitted | None],
        room: asyncio.Semaphore,
        call: Call,
    ) -> None:
        channel = PublishChannel()
        topic = ""
        try:
            async for request in requests:
                readable(request)
                await room.acquire()
                topic = request.topic or topic
                publish = convert.publish_stream(request, topic, self._durability, channel)
                try:
                    permit_publish(call, publish, dynamic=self._dynamic_topics)
                except StoreError as error:
                    refuse_in_stream(call, publish, error)
                under_way.put_nowait(await self._changes.admitted_patiently(publish, call.seconds_left()))
        finally:
            under_way.put_nowait(None)

    async def Touch(self, request: sow_pb2.TouchRequest, call: Call) -> sow_pb2.TouchResponse:
        touch = convert.touch(request, self._durability)
        permit_touch(call, touch)
        outcome = await self._changes.admitted(touch, call.seconds_left())
        if call.trace is not None:
            call.trace.answered(outcome.last_sequence)
        return sow_pb2.TouchResponse(
            results=convert.results(outcome),
            durability=types_pb2.Durability.ValueType(outcome.durability),
            journal_epoch=self._reading.instance.epoch,
        )

    async def GetPublisher(self, request: sow_pb2.GetPublisherRequest, call: Call) -> sow_pb2.GetPublisherResponse:
        publisher_id = call.own_name(convert.publisher_id(request.publisher_id, "publisher_id"))
        read = self._reading.cuts.publisher_position  # peers may have passed something on of many topics
        epoch, sequence = await asyncio.get_running_loop().run_in_executor(self._readers, read, publisher_id)
        return sow_pb2.GetPublisherResponse(publisher_epoch=epoch, highest_sequence=sequence)

    async def OpenPublisher(self, request: sow_pb2.OpenPublisherRequest, call: Call) -> sow_pb2.OpenPublisherResponse:
        given = convert.publisher_id(request.publisher_id, "publisher_id")
        call.creates("publishers", given)
        publisher_id = call.own_name(given)
        unit = convert.publisher_unit(request.unit, "unit")
        opened = await self._commits.open_publisher(publisher_id, unit, token=int(secrets.token_hex(8), 16) >> 1 or 1)
        return sow_pb2.OpenPublisherResponse(
            publisher_epoch=opened.epoch,
            unit_done=opened.unit_done,
            unit_records=opened.unit_records,
            publisher_token=opened.token,
        )

    # -- reading ----------------------------------------------------------------------------------------------------

    async def Get(self, request: sow_pb2.GetRequest, call: Call) -> sow_pb2.GetResponse | bytes:
        granted = call.topic(request.topic)
        if not request.keys:
            raise convert.invalid("keys", "at least one key is needed")
        if len(request.keys) > GET_KEYS_MAX:
            raise StoreError(
                Reason.REQUEST_TOO_LARGE,
                f"keys: {len(request.keys)} keys are more than the limit of {GET_KEYS_MAX} per request",
                field="keys",
            )
        convert.check_key_parts(granted.topic.settings.key, request.keys)
        if request.min_position:
            granted = await self._reached(call, granted, request)
        renewal = convert.renewal(request, self._durability)
        if renewal is None:
            return (await self._read(granted, request, 0))[1]
        if len(request.keys) > RENEWED_KEYS_MAX:
            raise StoreError(
                Reason.ATOMIC_TOO_LARGE,
                f"keys: {len(request.keys)} keys are more than the limit of {RENEWED_KEYS_MAX} of a get that touches",
                field="keys",
            )
        permit_touch(call, renewal)
        assert renewal.below_micros is not None, "it is a renewal"
        getting, answer = await self._read(granted, request, renewal.below_micros)
        renewal.keys = getting.ending
        check_lifetime(granted.topic, renewal.lifetime, getting.as_of_micros)
        if not renewal.keys:
            return answer
        outcome = await self._changes.admitted(renewal, call.seconds_left())
        call.notes.update(topic=renewal.topic, records=outcome.applied, sequence=outcome.last_sequence)
        # Refused are records that have gone or were renewed since, and those that the caller may only read.
        return (await self._read(call.topic(request.topic), request, 0))[1]

    async def _reached(
        self, call: Call, granted: Granted, request: sow_pb2.GetRequest | sow_pb2.QueryRequest
    ) -> Granted:
        """The topic of a read, once this instance has the position that the read has to show (rule F10). Raises
        StoreError."""
        while await self._positions.reach(granted.topic, request.min_position):
            before, granted = granted, call.topic(request.topic)  # it may have been deleted meanwhile, and made again
            if granted.topic is before.topic:
                break
        return granted

    async def _read(
        self, granted: Granted, request: sow_pb2.GetRequest, below_micros: int
    ) -> tuple[Getting, sow_pb2.GetResponse | bytes]:
        """The get, and its answer: as a message, or on the wire where a thread has made it."""
        getting = Getting(self._reading, granted, request, below_micros)
        if getting.here():
            return getting, getting.response
        return getting, await self._long_gets.whole(getting, self._readers)

    async def Query(self, request: sow_pb2.QueryRequest, call: Call) -> AsyncGenerator[bytes, None]:
        """Messages as bytes on the wire, made where the records are read."""
        granted = await self._reached(call, call.topic(request.topic), request)
        async with aclosing(self._queries.answer(granted, request)) as messages:
            async for message in messages:
                yield message

    async def BrowseDurable(
        self, request: sow_pb2.BrowseDurableRequest, call: Call
    ) -> AsyncGenerator[sow_pb2.BrowseDurableResponse, None]:
        if request.max_entries > BROWSE_ENTRIES_MAX:
            raise convert.invalid("max_entries", f"{request.max_entries} is above {BROWSE_ENTRIES_MAX}")
        granted = call.topic(request.topic)
        after = self._hub.position(request.after_bookmark) if request.after_bookmark else 0
        durable = self._owned.name(call, request.topic, request.durable)
        entries = request.max_entries or BROWSE_ENTRIES
        browse = self._consumers.browse(granted.topic, durable, after, entries, restriction=granted.restriction)
        loop = asyncio.get_running_loop()
        while not browse.done:
            for frame in await loop.run_in_executor(self._readers, browse.read):
                response = sow_pb2.BrowseDurableResponse()
                subscribe_convert.fill_changes(response.changes, frame, self._reading)
                yield response
        yield sow_pb2.BrowseDurableResponse(
            bookmark=self._reading.instance.bookmark(browse.position), complete=browse.complete
        )

    async def ReadHistory(
        self, request: sow_pb2.ReadHistoryRequest, call: Call
    ) -> AsyncGenerator[sow_pb2.ReadHistoryResponse, None]:
        if request.max_entries > HISTORY_ENTRIES_MAX:
            raise convert.invalid("max_entries", f"{request.max_entries} is above {HISTORY_ENTRIES_MAX}")
        if not request.key:
            raise convert.invalid("key", "is needed")
        topic, restriction = call.topic(request.topic)
        convert.check_key_parts(topic.settings.key, [request.key], "key")
        reading = self._reading
        upto = self._hub.position(request.upto_bookmark) if request.upto_bookmark else self._commits.last_sequence
        await on_disk(self._commits, upto)
        history = History(
            reading.cuts,
            topic,
            request.key.encode(),
            upto=upto,
            entries_max=request.max_entries or HISTORY_ENTRIES,
            rows=callers_filter(topic, "", restriction, allow_now=False),
            projection=Projection(hidden=restriction.hidden) if restriction.hidden else None,
        )
        loop = asyncio.get_running_loop()
        while not history.done:
            if found := await loop.run_in_executor(self._readers, history.read):
                response = sow_pb2.ReadHistoryResponse()
                subscribe_convert.fill_history(response, topic.name, found, reading)
                yield response
        end = sow_pb2.HistoryEnd(discarded=history.discarded)
        if history.next_position:
            end.next_bookmark = reading.instance.bookmark(history.next_position)
        yield sow_pb2.ReadHistoryResponse(end=end)

    async def Acknowledge(self, request: sow_pb2.AcknowledgeRequest, call: Call) -> sow_pb2.AcknowledgeResponse:
        topic = call.topic(request.topic).topic
        name = self._owned.name(call, request.topic, request.durable)
        if request.detach and not request.bookmark:
            durable = self._consumers.leave(topic, name, request.session)
            return sow_pb2.AcknowledgeResponse(bookmark=self._reading.instance.bookmark(durable.position))
        position = self._hub.position(request.bookmark)
        durable = await self._consumers.acknowledge(topic, name, request.session, position)
        if request.detach:
            self._consumers.leave(topic, name, request.session)
        return sow_pb2.AcknowledgeResponse(bookmark=self._reading.instance.bookmark(durable.position))

    async def Rewind(self, request: sow_pb2.RewindRequest, call: Call) -> sow_pb2.RewindResponse:
        topic, restriction = call.topic(request.topic)
        match request.WhichOneof("to"):
            case "bookmark":
                to = RewindTo(position=self._hub.position(request.bookmark))
            case "time_micros":
                self._hub.check_time(request.time_micros, "time_micros")
                to = RewindTo(time_micros=request.time_micros)
            case "earliest" if request.earliest:
                to = RewindTo()
            case _:
                raise convert.invalid("to", "one of earliest, bookmark or time_micros is needed")
        name = self._owned.name(call, request.topic, request.durable)
        durable, entries = await self._consumers.rewind(topic, name, to, force=request.force)
        log.info("durable_rewound", topic=topic.name, durable=durable.name, position=durable.position)
        return sow_pb2.RewindResponse(
            bookmark=self._reading.instance.bookmark(durable.position),
            # Before any filter, so they count records that the caller may not see.
            unacknowledged_entries=entries if restriction.rows is None else 0,
        )

    # -- deleting ---------------------------------------------------------------------------------------------------

    async def SowDelete(
        self, request: sow_pb2.SowDeleteRequest, call: Call
    ) -> AsyncGenerator[sow_pb2.SowDeleteResponse, None]:
        granted = call.topic(request.topic)
        topic = granted.topic
        durability = convert.durability(request.durability, self._durability)
        selection = request.WhichOneof("selection")
        if selection is None:
            raise convert.invalid("selection", "one of by_keys, by_payload, by_filter or all is needed")
        if request.parameters and selection != "by_filter":
            raise convert.invalid("parameters", "belong to by_filter")
        if request.HasField("publisher") and selection in ("all", "by_filter"):
            raise convert.invalid("publisher", "is for deletes by key and by document")
        if selection == "all":
            if not request.all:
                raise convert.invalid("all", "false has no meaning; select by key, by payload or by filter")
            # With rows, the topic is not emptied: the records that the caller may delete are found as by a filter.
            whole = granted.restriction.rows is None
            responses = (
                self._delete_all(topic, durability, dry_run=request.dry_run)
                if whole
                else self._delete_matching(granted, "", durability, dry_run=request.dry_run)
            )
        elif selection == "by_filter":
            if not request.by_filter:
                record_filter(topic, "", 0)  # raises: an empty filter selects nothing, and not everything
            given = await values_read(self._readers, request.parameters)
            responses = self._delete_matching(
                granted, request.by_filter, durability, given=given, dry_run=request.dry_run
            )
        else:
            delete = Delete(topic.name, durability=durability)
            if request.HasField("publisher"):
                delete.publisher = convert.acting(request.publisher)
            if selection == "by_keys":
                convert.check_key_parts(topic.settings.key, request.by_keys.keys, "by_keys.keys")
                delete.keys = list(request.by_keys.keys)
            else:
                delete.payload = request.by_payload
            permit_delete(call, delete, granted)
            versions = convert.versions(request.by_keys.versions, request.by_keys.keys, "by_keys.versions")
            if versions is not None:
                if request.dry_run:
                    raise convert.invalid("by_keys.versions", "are for deletes; a dry run counts records by their keys")
                only_versions(delete, versions)
            responses = self._delete_some(delete, granted, dry_run=request.dry_run)
        async with aclosing(responses):
            async for response in responses:
                call.notes.update(topic=topic.name, records=response.deleted, sequence=response.last_sequence)
                if call.trace is not None:
                    call.trace.answered(response.last_sequence)
                yield response

    async def _delete_some(
        self, delete: Delete, granted: Granted, *, dry_run: bool
    ) -> AsyncGenerator[sow_pb2.SowDeleteResponse, None]:
        if dry_run:
            topic, restriction = granted
            rows = rows_filter(topic, restriction)
            query = Query(topic, keys=self._keys_of(delete, topic), count_only=True, filter=rows)
            matched, _ = await count(self._reading.cuts, self._readers, query)
            yield sow_pb2.SowDeleteResponse(matched=matched, done=True)
            return
        outcome = await self._changes.submit(delete)
        yield sow_pb2.SowDeleteResponse(
            matched=outcome.applied, deleted=outcome.applied, done=True, last_sequence=outcome.last_sequence
        )

    def _keys_of(self, delete: Delete, topic: Topic) -> tuple[bytes, ...]:
        """The keys that a delete selects, at least one."""
        if delete.payload is not None:
            return (payload_key(topic, delete.payload),)
        if not delete.keys:
            raise convert.invalid("by_keys.keys", "at least one key is needed")
        return point_keys(delete.keys)

    async def _delete_matching(
        self, granted: Granted, text: str, durability: Durability, *, given: Values = NO_VALUES, dry_run: bool
    ) -> AsyncGenerator[sow_pb2.SowDeleteResponse, None]:
        """Deletes the records that match now, in batches, each record if it still matches then. `given`: the values of
        the filter's parameters. Each answer tells the progress."""
        topic = granted.topic
        if dry_run:
            matched, absent_fields = await count_selected(
                self._reading.cuts, self._readers, granted, text, given=given, unreadable=True
            )
            yield sow_pb2.SowDeleteResponse(matched=matched, done=True, absent_fields=absent_fields)
            return
        self._changes.check(topic.name, durability)
        progress = sow_pb2.SowDeleteResponse()
        found = selected(
            self._reading.cuts,
            self._readers,
            granted,
            text,
            given=given,
            unreadable=True,
            busy=lambda: self._commits.busy,
        )
        async with aclosing(found) as batches:
            async for keys, matches, absent_fields in batches:
                progress.absent_fields[:] = absent_fields
                if not keys:
                    continue
                submitted = await self._changes.submit_patiently(
                    Delete(topic.name, keys, durability=_here(durability), topic_id=topic.id, matches=matches)
                )
                outcome = await submitted
                progress.matched += len(keys)
                progress.deleted += outcome.applied
                progress.last_sequence = outcome.last_sequence or progress.last_sequence
                yield progress
        await self._replicated(topic, durability, progress)
        progress.done = True
        yield progress

    async def _replicated(self, topic: Topic, durability: Durability, done: sow_pb2.SowDeleteResponse) -> None:
        """Waits for the peers once, after all batches: a peer with the last one has them all."""
        if durability is Durability.REPLICATED:
            await self._changes.reach(topic.name, done.last_sequence, applied=done.deleted)

    async def _delete_all(
        self, topic: Topic, durability: Durability, *, dry_run: bool
    ) -> AsyncGenerator[sow_pb2.SowDeleteResponse, None]:
        """Deletes the keys that exist now, in batches. Each answer tells the progress."""
        loop = asyncio.get_running_loop()
        if dry_run:
            matched = await loop.run_in_executor(self._readers, self._reading.cuts.count, topic)
            yield sow_pb2.SowDeleteResponse(matched=matched, done=True)
            return
        self._changes.check(topic.name, durability)
        scan = Scan(self._reading.cuts, Query(topic, batch_size=CHANGE_RECORDS, keys_only=True, unreadable=True))
        progress = sow_pb2.SowDeleteResponse()
        reading: asyncio.Future[RecordBatch | None] | None = None
        size = CHANGE_RECORDS
        try:
            reading = loop.run_in_executor(self._readers, scan.next_batch)
            while (batch := await asyncio.shield(reading)) is not None:
                reading = loop.run_in_executor(self._readers, scan.next_batch)  # while these are deleted
                for first in range(0, len(batch.keys), size):
                    keys = batch.keys[first : first + size]
                    submitted = await self._changes.submit_patiently(
                        Delete(topic.name, keys, durability=_here(durability), topic_id=topic.id)
                    )
                    outcome = await submitted
                    progress.matched += len(keys)
                    progress.deleted += outcome.applied
                    progress.last_sequence = outcome.last_sequence or progress.last_sequence
                    yield progress
                size = BUSY_RECORDS if self._commits.busy else CHANGE_RECORDS
            await self._replicated(topic, durability, progress)
            progress.done = True
            yield progress
        finally:
            scan.give_up()
            close_after(scan, reading)


def _here(durability: Durability) -> Durability:
    """The part of a durability that this instance provides."""
    return Durability.FSYNC if durability is Durability.REPLICATED else durability
