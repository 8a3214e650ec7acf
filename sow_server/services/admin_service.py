"""`sow.v1.AdminService`: topics and the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Final, TypeVar

import structlog

from sow.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from sow_server.engine.administration.administration import Administration
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.commits import Commits
from sow_server.engine.commit.soundness import Fault, RowLimits, row_fault
from sow_server.engine.disk.layout import read_header
from sow_server.engine.durables import ClearedBacklogs, Durable, DurableFigures, Durables
from sow_server.engine.durables.commits import DurableCommits
from sow_server.engine.upkeep import Upkeep
from sow_server.engine.values import lifetimes, model
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.policies import Policy, declared_warnings, planned_journal_bytes, warnings
from sow_server.services import convert
from sow_server.services.guard import Context, RpcObserver, streaming, unary
from sow_server.services.reading import StoreReading
from sow_server.services.replication import Links
from sow_server.services.selection import checked, count_selected, selected
from sow_server.services.submissions import Submissions, settle
from sow_server.subscriptions.consumers import Consumers

log = structlog.get_logger(__name__)
T = TypeVar("T")

ROWS_LISTED: Final = 100
ROWS_LISTED_MAX: Final = 100_000
MESSAGE_CHARACTERS_MAX: Final = 500
"""Characters of the fault of a row."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Validates, calls the store, translates. Owns only the time at which the server became ready."""

    def __init__(
        self,
        reading: StoreReading,
        commits: Commits,
        administration: Administration,
        durables: Durables,
        durable_commits: DurableCommits,
        upkeep: Upkeep,
        *,
        clock: GuardedClock,
        consumers: Consumers,
        links: Links,
        readers: Executor,
        row_limits: RowLimits,
        rpcs: RpcObserver,
        instance: str,
        version: str,
    ) -> None:
        """`row_limits`: the limits that `CheckTopic` checks rows against."""
        self._reading = reading
        self._commits = commits
        self._administration = administration
        self._durables = durables
        self._durable_commits = durable_commits
        self._upkeep = upkeep
        self._row_limits = row_limits
        self._consumers = consumers
        self._clock = clock
        self._readers = readers
        self._changes = Submissions(commits, reading.topics, links)
        self._links = links
        self._instance = instance
        self._version = version
        self._ready_micros = clock.now_micros()
        self.rpcs = rpcs

    async def _await(self, start: Callable[[Callable[[T | StoreError], None]], None]) -> T:
        """Starts a change of the store and awaits the result that its `done` gets."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        start(lambda outcome: settle(future, outcome))
        return await future

    async def _read(self, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    @unary
    async def CreateTopic(
        self, request: admin_pb2.CreateTopicRequest, context: Context
    ) -> admin_pb2.CreateTopicResponse:
        declared = convert.settings(request.settings)
        created: Topic = await self._await(lambda done: self._administration.create_topic(request.name, declared, done))
        log.info("topic_created", topic=created.name)
        return admin_pb2.CreateTopicResponse(
            topic=convert.topic(self._durable_commits, created), warnings=warnings(created.settings)
        )

    @unary
    async def AlterTopic(self, request: admin_pb2.AlterTopicRequest, context: Context) -> admin_pb2.AlterTopicResponse:
        given = convert.settings(request.settings)
        paths = list(request.update_paths)
        altered: Topic = await self._await(
            lambda done: self._administration.alter_topic(
                request.name, lambda before: convert.altered(before, given, paths), done
            )
        )
        log.info("topic_altered", topic=altered.name, settings=paths)
        return admin_pb2.AlterTopicResponse(
            topic=convert.topic(self._durable_commits, altered), warnings=warnings(altered.settings)
        )

    @unary
    async def DescribeTopic(
        self, request: admin_pb2.DescribeTopicRequest, context: Context
    ) -> admin_pb2.DescribeTopicResponse:
        found = self._reading.topics.find(request.name)

        def describe() -> admin_pb2.Topic:
            message = convert.topic(self._durable_commits, found, overdue=self._reading.cuts.overdue_by_topic())
            message.effective.extend(convert.effective(self._administration.effective(found)))
            planned = planned_journal_bytes(found.settings)
            message.planned_journal_bytes = -1 if planned is None else planned
            return message

        message = await self._read(describe)
        return admin_pb2.DescribeTopicResponse(topic=message)

    @unary
    async def ListTopics(self, request: admin_pb2.ListTopicsRequest, context: Context) -> admin_pb2.ListTopicsResponse:
        topics = [topic for _, topic in sorted(self._reading.topics.by_name.items())]

        def messages() -> list[admin_pb2.Topic]:
            overdue = self._reading.cuts.overdue_by_topic() if request.with_statistics else None
            return [convert.topic(self._durable_commits, topic, overdue=overdue) for topic in topics]

        return admin_pb2.ListTopicsResponse(topics=await self._read(messages))

    @unary
    async def DeleteTopic(
        self, request: admin_pb2.DeleteTopicRequest, context: Context
    ) -> admin_pb2.DeleteTopicResponse:
        deleted: int = await self._await(
            lambda done: self._administration.delete_topic(request.name, done, force=request.force)
        )
        log.info("topic_deleted", topic=request.name, records=deleted, forced=request.force)
        return admin_pb2.DeleteTopicResponse(deleted_records=deleted)

    @unary
    async def SetPolicy(self, request: admin_pb2.SetPolicyRequest, context: Context) -> admin_pb2.SetPolicyResponse:
        given = convert.policy(request.policy)
        policy: Policy = await self._await(lambda done: self._administration.set_policy(given, done))
        log.info("policy_set", policy=policy.name, operator=policy.operator, pattern=policy.pattern)
        (message,) = await self._read(lambda: self._policies([policy]))
        return admin_pb2.SetPolicyResponse(policy=message, warnings=declared_warnings(policy))

    @unary
    async def GetPolicy(self, request: admin_pb2.GetPolicyRequest, context: Context) -> admin_pb2.GetPolicyResponse:
        policy = self._administration.policies.find(request.name, operator=request.operator)
        (message,) = await self._read(lambda: self._policies([policy]))
        return admin_pb2.GetPolicyResponse(policy=message)

    @unary
    async def ListPolicies(
        self, request: admin_pb2.ListPoliciesRequest, context: Context
    ) -> admin_pb2.ListPoliciesResponse:
        policies = list(self._administration.policies)
        return admin_pb2.ListPoliciesResponse(policies=await self._read(lambda: self._policies(policies)))

    def _policies(self, policies: Sequence[Policy]) -> list[admin_pb2.Policy]:
        matches = self._administration.policy_matches()
        return [convert.policy_message(policy, matches[policy.target, policy.origin]) for policy in policies]

    @unary
    async def DeletePolicy(
        self, request: admin_pb2.DeletePolicyRequest, context: Context
    ) -> admin_pb2.DeletePolicyResponse:
        deleted: Policy = await self._await(
            lambda done: self._administration.delete_policy(request.name, done, operator=request.operator)
        )
        log.info("policy_deleted", policy=deleted.name, operator=deleted.operator)
        return admin_pb2.DeletePolicyResponse()

    # -- durables ---------------------------------------------------------------------------------------------------

    @unary
    async def ListDurables(
        self, request: admin_pb2.ListDurablesRequest, context: Context
    ) -> admin_pb2.ListDurablesResponse:
        topics = self._reading.topics
        chosen = (
            [topics.find(request.topic)] if request.topic else [topic for _, topic in sorted(topics.by_name.items())]
        )

        def messages() -> list[admin_pb2.Durable]:
            if not request.with_figures:
                return [
                    self._durable(topic, durable)
                    for topic in chosen
                    for durable in sorted(self._durables.of(topic), key=lambda durable: durable.name)
                ]
            found: list[admin_pb2.Durable] = []
            for topic in chosen:
                if self._durables.count(topic):
                    durables, now = self._durable_commits.all_figures(topic)
                    found += [self._described(topic, durable, figures, now) for durable, figures in durables]
            return found

        return admin_pb2.ListDurablesResponse(durables=await self._read(messages))

    @unary
    async def DescribeDurable(
        self, request: admin_pb2.DescribeDurableRequest, context: Context
    ) -> admin_pb2.DescribeDurableResponse:
        topic = self._reading.topics.find(request.topic)

        def describe() -> admin_pb2.Durable:
            durable, figures, now = self._durable_commits.figures(topic, request.name)
            if request.exact:
                figures = self._consumers.entries.exact(topic, durable, figures)
            message = self._described(topic, durable, figures, now)
            message.figures.exact = request.exact
            return message

        return admin_pb2.DescribeDurableResponse(durable=await self._read(describe))

    def _described(self, topic: Topic, durable: Durable, figures: DurableFigures, now_micros: int) -> admin_pb2.Durable:
        message = self._durable(topic, durable)
        message.earliest = self._reading.instance.bookmark(figures.earliest)
        message.figures.total_entries = figures.total_entries
        message.figures.total_bytes = figures.total_bytes
        message.figures.unacknowledged_entries = figures.unacknowledged_entries
        message.figures.unacknowledged_bytes = figures.unacknowledged_bytes
        message.figures.set_aside_entries = durable.set_aside
        if figures.oldest_micros is not None:
            message.figures.oldest_unacknowledged_age.FromMicroseconds(max(0, now_micros - figures.oldest_micros))
        return message

    def _durable(self, topic: Topic, durable: Durable) -> admin_pb2.Durable:
        settings = self._durables.settings(topic, durable)
        return admin_pb2.Durable(
            topic=topic.name,
            name=durable.name,
            filter=durable.filter,
            acknowledged=self._reading.instance.bookmark(durable.position),
            attached=self._consumers.is_attached(topic, durable.name),
            create_time=convert.timestamp(durable.create_time_micros),
            last_use_time=convert.timestamp(durable.last_use_micros),
            settings=convert.durable_settings_message(settings._asdict()),
        )

    @unary
    async def DeleteDurable(
        self, request: admin_pb2.DeleteDurableRequest, context: Context
    ) -> admin_pb2.DeleteDurableResponse:
        topic = self._reading.topics.find(request.topic)
        deleted: Durable = await self._await(
            lambda done: self._consumers.delete(topic, request.name, done, force=request.force)
        )
        log.info("durable_deleted", topic=topic.name, durable=deleted.name)
        return admin_pb2.DeleteDurableResponse()

    @unary
    async def ClearBacklog(
        self, request: admin_pb2.ClearBacklogRequest, context: Context
    ) -> admin_pb2.ClearBacklogResponse:
        topic = self._reading.topics.find(request.topic)
        cleared: ClearedBacklogs = await self._await(lambda done: self._consumers.clear(topic, request.name, done))
        log.info("backlog_cleared", topic=topic.name, durables=cleared.durables, entries=cleared.entries)
        return admin_pb2.ClearBacklogResponse(acknowledged_entries=cleared.entries)

    @streaming
    async def CheckTopic(
        self, request: admin_pb2.CheckTopicRequest, context: Context
    ) -> AsyncGenerator[admin_pb2.CheckTopicResponse, None]:
        topic = self._reading.topics.find(request.name)
        left = request.rows_max if request.HasField("rows_max") else ROWS_LISTED
        if left > ROWS_LISTED_MAX:
            raise convert.invalid("rows_max", f"{left} is more than the limit of {ROWS_LISTED_MAX}")

        def is_unsound(key: bytes, value: bytes) -> bool:
            return row_fault(topic, key, value, self._row_limits, self._clock.now_micros()) is not None

        progress = admin_pb2.CheckTopicResponse()
        async with aclosing(checked(self._reading.cuts, self._readers, topic, self._row_limits)) as steps:
            async for step in steps:
                progress.checked += step.rows
                progress.unsound += len(step.unsound)
                del progress.rows[:]
                progress.rows.extend([self._unsound_row(*row) for row in step.unsound[:left]])
                left -= len(progress.rows)
                if request.repair and step.unsound:
                    keys = [key for key, _, _ in step.unsound]
                    submitted = await self._changes.submit_patiently(
                        model.Delete(topic.name, keys, topic_id=topic.id, matches=is_unsound)
                    )
                    progress.removed += (await submitted).applied
                yield progress
        if progress.unsound:
            log.warning("topic_checked", topic=topic.name, unsound=progress.unsound, removed=progress.removed)
        del progress.rows[:]
        progress.done = True
        yield progress

    def _unsound_row(self, key: bytes, value: bytes, fault: Fault) -> admin_pb2.UnsoundRow:
        head = read_header(value)
        return admin_pb2.UnsoundRow(
            key=key,
            reason=types_pb2.ErrorReason.ValueType(fault.reason.value),
            message=fault.message[:MESSAGE_CHARACTERS_MAX],
            version=head.version,
            origin=self._reading.origins.names[head.origin],
            payload_bytes=head.payload_bytes,
        )

    @streaming
    async def Restamp(
        self, request: admin_pb2.RestampRequest, context: Context
    ) -> AsyncGenerator[admin_pb2.RestampResponse, None]:
        topic = self._reading.topics.find(request.topic)
        mode, lifetime = convert.restamp(request)
        try:  # an impossible lifetime is refused even when no record matches
            lifetimes.restamp_time(topic.settings, mode, lifetime, self._clock.now_micros())
        except lifetimes.LifetimeError as error:
            raise StoreError(error.reason, error.message, field="lifetime") from None
        text = request.filter or "true"
        progress = admin_pb2.RestampResponse()
        if request.dry_run:
            progress.matched = await count_selected(self._reading.cuts, self._readers, topic, text)
        else:
            async with aclosing(selected(self._reading.cuts, self._readers, topic, text)) as batches:
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
        reading, failure = self._reading, self._commits.failure
        overdue = reading.cuts.overdue()
        stored = sum(topic.statistics.records for topic in reading.topics.by_id.values())
        return admin_pb2.GetStatusResponse(
            instance=self._instance,
            instance_id=reading.instance.id,
            journal_epoch=reading.instance.epoch,
            server_version=self._version,
            state="serving" if failure is None else "failed",
            failure="" if failure is None else f"{failure.reason.name}: {failure.message}",
            ready_time=convert.timestamp(self._ready_micros),
            clock_time=convert.timestamp(self._clock.now_micros()),
            sweep_paused=self._clock.paused,
            last_sequence=self._commits.last_sequence,
            live_records=max(0, stored - overdue),
            overdue_records=overdue,
            topics=len(reading.topics.by_id),
            disk_bytes=self._upkeep.disk_bytes(),
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
        before = await self._read(self._upkeep.disk_bytes)
        await self._read(self._upkeep.compact)
        after = await self._read(self._upkeep.disk_bytes)
        log.info("compacted", bytes_before=before, bytes_after=after)
        return admin_pb2.CompactResponse(bytes_before=before, bytes_after=after)

    # -- replication, backup ----------------------------------------------------------------------------------------

    @unary
    async def GetReplicationStatus(
        self, request: admin_pb2.GetReplicationStatusRequest, context: Context
    ) -> admin_pb2.GetReplicationStatusResponse:
        return self._links.status()

    @streaming
    async def VerifyReplication(
        self, request: admin_pb2.VerifyReplicationRequest, context: Context
    ) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
        self._peer_named(request.peer)
        differing = 0
        async with aclosing(self._links.verify(request)) as responses:
            async for response in responses:
                differing += response.differing
                yield response
        log.info("replication_verified", peer=request.peer, differing=differing)

    @streaming
    async def RepairReplication(
        self, request: admin_pb2.RepairReplicationRequest, context: Context
    ) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
        self._peer_named(request.peer)
        sent = received = 0
        async with aclosing(self._links.repair(request)) as responses:
            async for response in responses:
                sent += response.sent
                received += response.received
                yield response
        log.info("replication_repaired", peer=request.peer, sent=sent, received=received)

    def _peer_named(self, peer: str) -> None:
        if not peer:
            raise convert.invalid("peer", "the name of a peer is needed")

    @unary
    async def Backup(self, request: admin_pb2.BackupRequest, context: Context) -> admin_pb2.BackupResponse:
        made = await self._read(lambda: self._upkeep.backup(request.name))
        log.info("backup_made", backup=request.name, sequence=made.sequence, bytes=made.bytes)
        return admin_pb2.BackupResponse(name=request.name, sequence=made.sequence, bytes=made.bytes)
