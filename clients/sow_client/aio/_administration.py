"""Administration: topics, policies, the server, its peers and backups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Unpack

import grpc
import grpc.aio

from sow.v1 import admin_pb2
from sow_client import _admin, _replication, _retention, _statuses, _transport, _writes
from sow_client._records import ExpireAt, Restamped, RestampMode, Ttl
from sow_client._reports import (
    BackupMade,
    ClockAccepted,
    Compacted,
    Policy,
    Repaired,
    ReplicationStatus,
    Status,
    Topic,
    TopicChecked,
    Verified,
)
from sow_client._setting_values import DurableSettingsArguments, TopicSettings, TopicSettingsArguments
from sow_client.aio._calls import AsyncCalls


class AsyncAdministration(AsyncCalls):
    """The calls of operators."""

    async def topics(self, with_statistics: bool = False) -> list[Topic]:
        """All topics, by name."""
        response = await self._call(
            self._admin.ListTopics, admin_pb2.ListTopicsRequest(with_statistics=with_statistics)
        )
        return [_admin.topic(topic) for topic in response.topics]

    async def create_topic(
        self, name: str, settings: TopicSettings | None = None, **named: Unpack[TopicSettingsArguments]
    ) -> Topic:
        """Creates a topic (rule K1), from a TopicSettings or from its fields as keyword arguments."""
        response = await self._call(self._admin.CreateTopic, _admin.create_request(name, settings, named), once=True)
        return _admin.topic(response.topic, response.warnings)

    async def alter_topic(self, name: str, **named: Unpack[TopicSettingsArguments]) -> Topic:
        """Changes the settings that are named, None: not set, so that policies or defaults count (rule T2); stamps
        never change (rule L12)."""
        response = await self._call(self._admin.AlterTopic, _admin.alter_request(name, named), once=True)
        return _admin.topic(response.topic, response.warnings)

    async def describe_topic(self, name: str) -> Topic:
        """One topic: settings, also those in force and where they come from (rule T2), and statistics."""
        response = await self._call(self._admin.DescribeTopic, admin_pb2.DescribeTopicRequest(name=name))
        return _admin.topic(response.topic)

    async def delete_topic(self, name: str, *, force: bool = False) -> int:
        """Deletes a topic with its records and journal; returns the number of live records that went with it. `force`:
        also while a peer has not received all of its changes, which it then never will (rule T5)."""
        response = await self._call(
            self._admin.DeleteTopic, admin_pb2.DeleteTopicRequest(name=name, force=force), once=True
        )
        return response.deleted_records

    async def restamp(
        self,
        topic: str,
        mode: RestampMode,
        *,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        filter: str | None = None,  # noqa: A002 - the word for it
        dry_run: bool = False,
        on_progress: Callable[[Restamped], object] | None = None,
    ) -> Restamped:
        """Applies a lifetime to existing records, to those that match `filter` if there is one (rule L13).

        "set": `ttl` or `expire_at` replaces the lifetime that a record has; "cap": longer ones, and never, are lowered
        to it; "clear": they never expire, as far as the topic's max_ttl allows. `dry_run` only counts. Many records are
        done in steps, each record only if it still matches then; `on_progress` gets the figures after each step. When
        the connection breaks, steps that were done stay done.
        """
        request = _writes.restamp_request(topic, mode, filter, ttl=ttl, expire_at=expire_at, dry_run=dry_run)
        await self._transport.await_ready()
        try:
            with _transport.unless_closed():
                async for response in self._admin.Restamp(request):
                    restamped = _writes.restamped(response)
                    if on_progress is not None:
                        on_progress(restamped)
                    if response.done:
                        return restamped
        except grpc.RpcError as error:
            raise _statuses.error_of_status(error) from error
        raise _statuses.cut("the answer to the restamp")

    async def check_topic(
        self,
        topic: str,
        *,
        repair: bool = False,
        rows_max: int = 100,
        on_progress: Callable[[TopicChecked], object] | None = None,
    ) -> TopicChecked:
        """Looks at all rows of a topic for such as no publish could have made (rule R13), and lists up to `rows_max` of
        them; with `repair` they are removed, here and at the peers. `on_progress` gets the figures after each step.
        When the connection breaks, what was removed stays removed."""
        request = _replication.check_request(topic, repair=repair, rows_max=rows_max)
        await self._transport.await_ready()
        found = _replication.NOTHING_CHECKED
        try:
            with _transport.unless_closed():
                async for response in self._admin.CheckTopic(request):
                    found = _replication.topic_checked(found, response)
                    if on_progress is not None:
                        on_progress(found)
                    if response.done:
                        return found
        except grpc.RpcError as error:
            raise _statuses.error_of_status(error) from error
        raise _statuses.cut("the answer to the check")

    async def status(self) -> Status:
        """How the server is."""
        return _admin.status(await self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest()))

    async def accept_clock(self) -> ClockAccepted:
        """Confirms that the wall clock is right after a jump (rule L15)."""
        return _admin.clock_accepted(
            await self._call(self._admin.AcceptClock, admin_pb2.AcceptClockRequest(), once=True)
        )

    async def compact(self) -> Compacted:
        """Compacts the data files now (rule L17). Takes its time: there is no deadline."""
        return _admin.compacted(
            await self._call(self._admin.Compact, admin_pb2.CompactRequest(), once=True, unbounded=True)
        )

    async def set_policy(
        self,
        name: str,
        pattern: str,
        *,
        topics: TopicSettingsArguments | None = None,
        durables: DurableSettingsArguments | None = None,
        priority: int = 0,
        operator: bool = False,
    ) -> Policy:
        """Sets a policy: settings for `topics`, or for `durables`, whose names match the pattern (RE2, the whole name;
        of durables `topic/name`) (rule T2). It replaces the one of that name.

        Of several the highest `priority` counts. `operator`: limits that nobody can go beyond.
        """
        request = _retention.set_policy_request(
            name, pattern, topics=topics, durables=durables, priority=priority, operator=operator
        )
        response = await self._call(self._admin.SetPolicy, request, once=True)
        return _retention.policy(response.policy, response.warnings)

    async def get_policy(self, name: str, *, operator: bool = False) -> Policy:
        """One policy, or operator policy."""
        request = admin_pb2.GetPolicyRequest(name=name, operator=operator)
        response = await self._call(self._admin.GetPolicy, request)
        return _retention.policy(response.policy)

    async def policies(self) -> list[Policy]:
        """All policies: operator policies first, then by priority, the highest first."""
        request = admin_pb2.ListPoliciesRequest()
        response = await self._call(self._admin.ListPolicies, request)
        return [_retention.policy(one) for one in response.policies]

    async def delete_policy(self, name: str, *, operator: bool = False) -> None:
        """Deletes a policy, or operator policy; what it set takes its next source."""
        request = admin_pb2.DeletePolicyRequest(name=name, operator=operator)
        await self._call(self._admin.DeletePolicy, request, once=True)

    async def replication_status(self) -> ReplicationStatus:
        """How the links with other instances are."""
        request = admin_pb2.GetReplicationStatusRequest()
        return _replication.status(await self._call(self._admin.GetReplicationStatus, request))

    async def verify_replication(
        self,
        peer: str,
        topics: Iterable[str] | None = None,
        *,
        keys_max: int = 100,
        on_topic: Callable[[Verified], object] | None = None,
    ) -> list[Verified]:
        """Compares with a peer, all topics of the link or those named (rule R10), and lists up to `keys_max` differing
        keys of each. `on_topic` gets each topic as it is done. What is changed meanwhile may differ for a moment."""
        request = _replication.verify_request(peer, topics, keys_max)
        done: list[Verified] = []
        await self._transport.await_ready()
        try:
            with _transport.unless_closed():
                async for response in self._admin.VerifyReplication(request):
                    done.append(_replication.verified(response))
                    if on_topic is not None:
                        on_topic(done[-1])
        except grpc.RpcError as error:
            raise _statuses.error_of_status(error) from error
        return done

    async def repair_replication(
        self,
        peer: str,
        topics: Iterable[str] | None = None,
        *,
        on_topic: Callable[[Repaired], object] | None = None,
    ) -> list[Repaired]:
        """Has this instance and a peer send each other what differs (rule R10): of each key both then have the greatest
        version. When the connection breaks, what was done stays done."""
        request = _replication.repair_request(peer, topics)
        done: list[Repaired] = []
        await self._transport.await_ready()
        try:
            with _transport.unless_closed():
                async for response in self._admin.RepairReplication(request):
                    done.append(_replication.repaired(response))
                    if on_topic is not None:
                        on_topic(done[-1])
        except grpc.RpcError as error:
            raise _statuses.error_of_status(error) from error
        return done

    async def backup(self, directory: str) -> BackupMade:
        """Makes a backup in a directory of the server's machine, an absolute path that is not there yet (rule J14).
        Takes its time: there is no deadline."""
        request = admin_pb2.BackupRequest(directory=directory)
        return _replication.backup_made(await self._call(self._admin.Backup, request, once=True, unbounded=True))
