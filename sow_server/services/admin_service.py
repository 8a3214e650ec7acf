"""`sow.v1.AdminService`: topics and the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from typing import TypeVar

import structlog

from sow.v1 import admin_pb2, admin_pb2_grpc
from sow_server.engine import lifetimes, model
from sow_server.engine.clock import GuardedClock
from sow_server.engine.errors import StoreError
from sow_server.engine.store import Store
from sow_server.engine.topics import Topic
from sow_server.services import convert
from sow_server.services.guard import Context, RpcObserver, streaming, unary
from sow_server.services.selection import count_selected, selected
from sow_server.services.sow_service import Changes, settle

log = structlog.get_logger(__name__)
T = TypeVar("T")


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Validates, calls the store, translates; owns nothing but the time at which the server became ready."""

    def __init__(
        self, store: Store, clock: GuardedClock, readers: Executor, rpcs: RpcObserver, *, instance: str, version: str
    ) -> None:
        self._store = store
        self._clock = clock
        self._readers = readers
        self._changes = Changes(store)
        self._instance = instance
        self._version = version
        self._ready_micros = clock.now_micros()
        self.rpcs = rpcs

    async def _await(self, start: Callable[[Callable[[T | StoreError], None]], None]) -> T:
        """Starts a change of the store and awaits what its `done` hears."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        start(lambda outcome: settle(future, outcome))
        return await future

    async def _read(self, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    @unary
    async def CreateTopic(
        self, request: admin_pb2.CreateTopicRequest, context: Context
    ) -> admin_pb2.CreateTopicResponse:
        settings = convert.settings(request.settings)
        created: Topic = await self._await(lambda done: self._store.create_topic(request.name, settings, done))
        log.info("topic_created", topic=created.name)
        return admin_pb2.CreateTopicResponse(topic=convert.topic(self._store, created))

    @unary
    async def AlterTopic(self, request: admin_pb2.AlterTopicRequest, context: Context) -> admin_pb2.AlterTopicResponse:
        given = convert.settings(request.settings)
        paths = list(request.update_paths)
        altered: Topic = await self._await(
            lambda done: self._store.alter_topic(
                request.name, lambda before: convert.altered(before, given, paths), done
            )
        )
        log.info("topic_altered", topic=altered.name, settings=paths)
        return admin_pb2.AlterTopicResponse(topic=convert.topic(self._store, altered))

    @unary
    async def DescribeTopic(
        self, request: admin_pb2.DescribeTopicRequest, context: Context
    ) -> admin_pb2.DescribeTopicResponse:
        found = self._store.topics.find(request.name)
        message = await self._read(lambda: convert.topic(self._store, found, overdue=self._store.overdue_by_topic()))
        return admin_pb2.DescribeTopicResponse(topic=message)

    @unary
    async def ListTopics(self, request: admin_pb2.ListTopicsRequest, context: Context) -> admin_pb2.ListTopicsResponse:
        topics = [topic for _, topic in sorted(self._store.topics.by_name.items())]

        def messages() -> list[admin_pb2.Topic]:
            overdue = self._store.overdue_by_topic() if request.with_statistics else None
            return [convert.topic(self._store, topic, overdue=overdue) for topic in topics]

        return admin_pb2.ListTopicsResponse(topics=await self._read(messages))

    @unary
    async def DeleteTopic(
        self, request: admin_pb2.DeleteTopicRequest, context: Context
    ) -> admin_pb2.DeleteTopicResponse:
        deleted: int = await self._await(lambda done: self._store.delete_topic(request.name, done))
        log.info("topic_deleted", topic=request.name, records=deleted)
        return admin_pb2.DeleteTopicResponse(deleted_records=deleted)

    @streaming
    async def Restamp(
        self, request: admin_pb2.RestampRequest, context: Context
    ) -> AsyncIterator[admin_pb2.RestampResponse]:
        topic = self._store.topics.find(request.topic)
        mode, lifetime = convert.restamp(request)
        try:  # also where nothing is to be changed: what cannot be done is told
            lifetimes.restamp_time(topic.settings, mode, lifetime, self._clock.now_micros())
        except lifetimes.LifetimeError as error:
            raise StoreError(error.reason, error.message, field="lifetime") from None
        text = request.filter or "true"
        progress = admin_pb2.RestampResponse()
        if request.dry_run:
            progress.matched = await count_selected(self._store, self._readers, topic, text)
        else:
            async with aclosing(selected(self._store, self._readers, topic, text)) as batches:
                async for keys, matches in batches:
                    submitted = await self._changes.submit_patiently(
                        model.Restamp(topic.name, keys, mode, lifetime, topic_id=topic.id, matches=matches)
                    )
                    outcome = await submitted
                    progress.matched += len(keys)
                    progress.restamped += outcome.applied
                    progress.last_sequence = outcome.last_sequence or progress.last_sequence
                    yield progress
            log.info("restamped", topic=topic.name, mode=mode.name, records=progress.restamped)
        progress.done = True
        yield progress

    @unary
    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        return await self._read(self._status)

    def _status(self) -> admin_pb2.GetStatusResponse:
        store, failure = self._store, self._store.writer.failure
        overdue = store.overdue()
        stored = sum(topic.statistics.records for topic in store.topics.by_id.values())
        return admin_pb2.GetStatusResponse(
            instance=self._instance,
            instance_id=store.instance_id,
            journal_epoch=store.epoch,
            server_version=self._version,
            state="serving" if failure is None else "failed",
            failure="" if failure is None else f"{failure.reason.name}: {failure.message}",
            ready_time=convert.timestamp(self._ready_micros),
            clock_time=convert.timestamp(self._clock.now_micros()),
            sweep_paused=self._clock.paused,
            last_sequence=store.writer.last_sequence,
            live_records=max(0, stored - overdue),
            overdue_records=overdue,
            topics=len(store.topics.by_id),
            disk_bytes=store.disk_bytes(),
        )

    @unary
    async def AcceptClock(
        self, request: admin_pb2.AcceptClockRequest, context: Context
    ) -> admin_pb2.AcceptClockResponse:
        before, after = self._clock.accept()
        log.warning("clock_accepted", before_micros=before, after_micros=after)
        return admin_pb2.AcceptClockResponse(before=convert.timestamp(before), after=convert.timestamp(after))

    @unary
    async def Compact(self, request: admin_pb2.CompactRequest, context: Context) -> admin_pb2.CompactResponse:
        before = await self._read(self._store.disk_bytes)
        await self._read(self._store.compact)
        after = await self._read(self._store.disk_bytes)
        log.info("compacted", bytes_before=before, bytes_after=after)
        return admin_pb2.CompactResponse(bytes_before=before, bytes_after=after)
