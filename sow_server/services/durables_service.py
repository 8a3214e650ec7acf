"""The part of `sow.v1.AdminService` for durables: their state, and what an operator does with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

import structlog

from sow.v1 import admin_pb2
from sow_server.access.caller import Call
from sow_server.access.needs import Action
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.durables import Durable, DurableFigures
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.services.followers import Followers
from sow_server.services.ownership import OwnedDurables
from sow_server.services.wire import convert, settings_convert
from sow_server.subscriptions.durable.consumer_registry import Consumers

log = structlog.get_logger(__name__)
T = TypeVar("T")


class DurablesService:
    """Validates, calls the store and the consumers, translates. Owns nothing."""

    def __init__(
        self, reading: Reads, writes: Writes, consumers: Consumers, followers: Followers, readers: Executor
    ) -> None:
        self._reading = reading
        self._durables = reading.durables
        self._durable_commits = writes.durables
        self._consumers = consumers
        self._followers = followers
        self._readers = readers
        self._owned = OwnedDurables(reading.durables)

    async def _read(self, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    async def ListDurables(self, request: admin_pb2.ListDurablesRequest, call: Call) -> admin_pb2.ListDurablesResponse:
        chosen = [
            topic
            for topic in ([call.seen(request.topic)] if request.topic else call.topics())
            if call.part_of(topic, Action.CONSUME) is not None
        ]

        def messages() -> list[admin_pb2.Durable]:
            if not request.with_figures:
                return [
                    self._durable(topic, durable, shown, call)
                    for topic in chosen
                    for durable in sorted(self._durables.of(topic), key=lambda durable: durable.name)
                    if (shown := call.shown_name(durable.name)) is not None
                ]
            found: list[admin_pb2.Durable] = []
            for topic in chosen:
                if self._durables.count(topic):
                    durables, now = self._durable_commits.all_figures(topic)
                    told = call.part_of(topic, Action.CONSUME) == UNRESTRICTED
                    found += [
                        self._described(topic, durable, shown, figures, now, call)
                        if told
                        else self._durable(topic, durable, shown, call)
                        for durable, figures in durables
                        if (shown := call.shown_name(durable.name)) is not None
                    ]
            return found

        return admin_pb2.ListDurablesResponse(durables=await self._read(messages))

    async def DescribeDurable(
        self, request: admin_pb2.DescribeDurableRequest, call: Call
    ) -> admin_pb2.DescribeDurableResponse:
        topic, restriction = call.topic(request.topic)
        name = self._owned.name(call, request.topic, request.name)

        def describe() -> admin_pb2.Durable:
            durable, figures, now = self._durable_commits.figures(topic, name)
            if restriction != UNRESTRICTED and not request.exact:
                return self._durable(topic, durable, request.name, call)  # the figures count what it may not see
            if request.exact:
                figures = self._consumers.entries.exact(topic, durable, figures, restriction)
            message = self._described(topic, durable, request.name, figures, now, call)
            message.figures.exact = request.exact
            return message

        return admin_pb2.DescribeDurableResponse(durable=await self._read(describe))

    def _described(
        self, topic: Topic, durable: Durable, name: str, figures: DurableFigures, now_micros: int, call: Call
    ) -> admin_pb2.Durable:
        message = self._durable(topic, durable, name, call)
        message.earliest = self._reading.instance.bookmark(figures.earliest)
        message.figures.total_entries = figures.total_entries
        message.figures.total_bytes = figures.total_bytes
        message.figures.unacknowledged_entries = figures.unacknowledged_entries
        message.figures.unacknowledged_bytes = figures.unacknowledged_bytes
        message.figures.set_aside_entries = durable.set_aside
        if figures.oldest_micros is not None:
            message.figures.oldest_unacknowledged_age.FromMicroseconds(max(0, now_micros - figures.oldest_micros))
        return message

    def _durable(self, topic: Topic, durable: Durable, name: str, call: Call) -> admin_pb2.Durable:
        """`name`: as the caller calls it."""
        settings = self._durables.settings(topic, durable)
        elsewhere = self._consumers.holders.elsewhere((topic.id, durable.name))
        return admin_pb2.Durable(
            topic=topic.name,
            name=name,
            filter=durable.filter,
            acknowledged=self._reading.instance.bookmark(durable.position),
            attached=self._consumers.is_attached(topic, durable.name),
            create_time=convert.timestamp(durable.create_time_micros),
            last_use_time=convert.timestamp(durable.last_use_micros),
            settings=settings_convert.durable_settings_message(settings._asdict()),
            replicated=durable.replicated,
            consumer_at="" if elsewhere is None else elsewhere.instance,
            consumer=self._consumer(topic, durable.name, call),
            pin=durable.pin,
            owner=durable.name.rpartition("/")[0],
            reader=durable.reader,
        )

    def _consumer(self, topic: Topic, name: str, call: Call) -> admin_pb2.DurableConsumer | None:
        """The attached consumer, if the caller may know it. Not its progress if that would tell of hidden changes."""
        found = self._followers.consumer(topic.id, name)
        if found is None or not (call.owns(found.call.owner) or call.may(Action.OBSERVE)):
            return None
        whole = call.may(Action.OBSERVE) or call.part_of(topic, Action.CONSUME) == UNRESTRICTED
        return found.as_consumer(self._reading.instance, progress=whole)

    async def DeleteDurable(
        self, request: admin_pb2.DeleteDurableRequest, call: Call
    ) -> admin_pb2.DeleteDurableResponse:
        topic = call.topic(request.topic).topic
        name = self._owned.name(call, request.topic, request.name)
        deleted = await self._consumers.delete(topic, name, force=request.force)
        log.info("durable_deleted", topic=topic.name, durable=deleted.name)
        return admin_pb2.DeleteDurableResponse()

    async def ClearBacklog(self, request: admin_pb2.ClearBacklogRequest, call: Call) -> admin_pb2.ClearBacklogResponse:
        topic, restriction = call.topic(request.topic)
        if request.name:
            name = self._owned.name(call, request.topic, request.name)
        else:
            call.topic(request.topic, Action.TOPIC_ADMIN, whole=True)
            name = ""
        cleared = await self._consumers.clear(topic, name)
        log.info("backlog_cleared", topic=topic.name, durables=cleared.durables, entries=cleared.entries)
        told = restriction.rows is None  # before any filter, so they count records that the caller may not see
        return admin_pb2.ClearBacklogResponse(acknowledged_entries=cleared.entries if told else 0)
