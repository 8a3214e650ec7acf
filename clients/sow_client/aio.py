"""The asynchronous client: the same as `client.Client`, with `await` and `async for`, on the running event loop.

Guarantees B1 to B3 of `client` hold, with tasks in the place of threads.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, Unpack, cast, overload

import grpc
import grpc.aio

from sow.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    load_pb2,
    load_pb2_grpc,
    snapshot_pb2,
    snapshot_pb2_grpc,
    sow_pb2,
    sow_pb2_grpc,
)
from sow_client import _changes, _channel, _core, _exports, _loads, _publisher, _replication, _retention
from sow_client._changes import ChangesPlan, Pin
from sow_client._channel import Tls
from sow_client._documents import Document, encode
from sow_client._durable import Acknowledgements, AsyncDurableSubscription, DurableCore
from sow_client._exports import Export
from sow_client._loads import (
    AioStageCall,
    AsyncLoadStager,
    CommitRetry,
    Load,
    LoadInfo,
    LoadPart,
    LoadProgress,
    StageCore,
)
from sow_client._packed import PackedColumn, PackedRecords
from sow_client._publisher import (
    Ack,
    AioStreamCall,
    AsyncPublisher,
    OpenedPublisher,
    PublishCore,
    PublisherOptions,
    StreamDefaults,
)
from sow_client._records import (
    NEVER,
    BackupMade,
    Browsed,
    ClockAccepted,
    Compacted,
    Deleted,
    DurabilityName,
    Durable,
    DurableSettingsArguments,
    ExpireAt,
    Gap,
    Page,
    Policy,
    Published,
    QueryFooter,
    QueryHeader,
    QueryPlan,
    Record,
    RecordBatch,
    Repaired,
    ReplicationStatus,
    Restamped,
    RestampMode,
    Rewound,
    Start,
    Status,
    Topic,
    TopicChecked,
    TopicSettings,
    TopicSettingsArguments,
    Ttl,
    Verified,
    invalid,
)
from sow_client._subscription import RETRY_SECONDS, AioSubscribeCall, AsyncSubscription, SubscriptionCore
from sow_client.client import DEFAULT_SERVER, QUERY_ATTEMPTS_MAX, QUERY_RETRY_SECONDS
from sow_client.errors import Refusal, SowError, Unavailable

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AsyncQueryResult:
    """The answer to a query, read once with `async for`; see `client.QueryResult`.

    A loop that is left early ends the call when the result is closed: use `async with`, or `await close()`.
    """

    def __init__(self, progress: _core.QueryProgress, batches: AsyncGenerator[RecordBatch, None]) -> None:
        self._progress = progress
        self._batches = batches

    async def __aiter__(self) -> AsyncIterator[Record]:
        async for batch in self._batches:
            for record in batch:
                yield record

    def batches(self) -> AsyncIterator[RecordBatch]:
        """The same answer as batches of columns, which is the fast way to read it; use one way or the other."""
        return self._batches

    @property
    def header(self) -> QueryHeader | None:
        """Bookmark and instant of the answer; None before the first record."""
        return self._progress.header

    @property
    def footer(self) -> QueryFooter | None:
        """Counts of the answer; None before its end."""
        return self._progress.footer

    async def close(self) -> None:
        """Ends the call."""
        await self._batches.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncClient:
    """A connection to a sow server; it connects at the first call and reconnects by itself."""

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        tls: Tls | None = None,
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        """`server` is HOST or HOST:PORT.

        `timeout` bounds each call that has one answer, `connect_timeout` the wait for a connection; both in seconds.
        A `channel` that is given is used as it is, and stays open. Make the client where its event loop runs.
        """
        self._server = _channel.target(server)
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._owns_channel = channel is None
        self._channel = _channel.open_aio_channel(self._server, tls) if channel is None else channel
        self._connection = (
            _channel.AioConnection(self._channel, self._server, connect_timeout) if channel is None else None
        )
        calls = cast(grpc.aio.Channel, _channel.Calls(self._channel, measured=channel is None))
        self._sow = sow_pb2_grpc.SowServiceStub(calls)
        self._admin = admin_pb2_grpc.AdminServiceStub(calls)
        self._snapshots = snapshot_pb2_grpc.SnapshotServiceStub(calls)
        self._load = load_pb2_grpc.LoadServiceStub(calls)
        self._sequencer = _core.Sequencer()
        self._closed = False

    async def close(self) -> None:
        """Closes the connection; calls that are under way end."""
        self._closed = True
        if self._owns_channel:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- publish ----

    async def publish(
        self,
        topic: str,
        data: Document,
        *,
        key: str | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        keep_ttl: bool = False,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        only_if_version: int | None = None,
        durability: DurabilityName | None = None,
    ) -> Published:
        """Publishes one record (rule P1).

        `key` is for topics without key fields (K3). `ttl` or `expire_at`: its lifetime (L2); `keep_ttl`: a live record
        keeps its own (L6). At most one condition (P3). `durability`: when to acknowledge (P5), else the server's
        default. Raises what stands for the refusal, such as InvalidArgument or ConditionFailed.
        """
        request = _core.publish_request(
            topic,
            [sow_pb2.PublishRecord(key=key, payload=encode(data))],
            ttl=ttl,
            expire_at=expire_at,
            keep_ttl=keep_ttl,
            condition=_core.condition(
                only_if_absent=only_if_absent, only_if_present=only_if_present, only_if_version=only_if_version
            ),
            durability=durability,
        )
        return _core.only(await self._publish(request))

    async def delta_publish(
        self,
        topic: str,
        data: Document,
        *,
        unset: Iterable[str] | None = None,
        key: str | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        keep_ttl: bool = False,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        only_if_version: int | None = None,
        durability: DurabilityName | None = None,
    ) -> Published:
        """Merges fields into the live record of a key; without one it is a publish (rule P2).

        Scalars and arrays replace, objects merge, a missing or null field is unchanged; `unset` names fields to remove,
        as paths such as "/a/b". All else is as for `publish`.
        """
        request = _core.publish_request(
            topic,
            [sow_pb2.PublishRecord(key=key, payload=encode(data))],
            ttl=ttl,
            expire_at=expire_at,
            keep_ttl=keep_ttl,
            condition=_core.condition(
                only_if_absent=only_if_absent, only_if_present=only_if_present, only_if_version=only_if_version
            ),
            durability=durability,
            delta=True,
            unset=unset,
        )
        return _core.only(await self._publish(request))

    async def publish_many(
        self,
        topic: str,
        documents: Iterable[Document],
        *,
        keys: Iterable[str] | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        keep_ttl: bool = False,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        atomic: bool = False,
        durability: DurabilityName | None = None,
        delta: bool = False,
        unset: Iterable[str] | None = None,
    ) -> list[Published | Refusal]:
        """Publishes documents in order and says for each what became of it (rule P4); `keys` go with them in parallel.

        With `atomic` all or none are applied (at most 1,000). Without it, many documents take several requests; when a
        record is refused for a reason that may pass, those after it are not applied either, and say STREAM_BROKEN.
        With `delta` each is merged, less the fields `unset`, as by `delta_publish` (P2).
        For a long stream a `publisher` is several times faster.
        """
        unset = _core.texts(unset, "unset")
        results: list[Published | Refusal] = []
        condition = _core.condition(only_if_absent=only_if_absent, only_if_present=only_if_present)
        for batch in _core.publish_batches(documents, keys, atomic=atomic):
            if _core.ended_by_passing(results):
                results.extend(_core.not_sent(len(results)) for _ in batch.records)
                continue
            request = _core.publish_request(
                topic,
                batch.records,
                ttl=ttl,
                expire_at=expire_at,
                keep_ttl=keep_ttl,
                condition=condition,
                durability=durability,
                atomic=atomic,
                delta=delta,
                unset=unset,
            )
            response = await self._publish(request)
            results += _core.outcomes(
                response, expected=len(batch.records), first_index=batch.first_index, atomic=atomic
            )
        return results

    def publisher(
        self,
        topic: str,
        *,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        keep_ttl: bool = False,
        durability: DurabilityName | None = None,
        batch_records: int = 1_000,
        max_in_flight: int = 16,
        linger: float = 0.02,
        retry_for: float = 30.0,
        publisher_id: str | None = None,
        on_ack: Callable[[Ack], object] | None = None,
        on_refusal: Callable[[Refusal], object] | None = None,
        delta: bool = False,
        unset: Iterable[str] | None = None,
        epoch: int | None = None,
        unit: int = 0,
    ) -> AsyncPublisher:
        """A buffered, pipelined, ordered stream of publishes; see `AsyncPublisher`.

        Records go out in batches of `batch_records`, at most `max_in_flight` of them unacknowledged, and no later than
        `linger` seconds after they were handed over. Broken connections are made again for `retry_for` seconds.
        A `publisher_id` of your own fences every older publisher of that id (rule P6): it begins a new epoch, unless it
        is given the `epoch` of `open_publisher`. All records belong to the `unit` of work with that number, if there is
        one, which `finish_unit` ends; it needs a `publisher_id`. With `delta` each record is merged, less the fields
        `unset`, as by `delta_publish` (P2).
        """
        defaults = StreamDefaults(
            topic,
            _core.lifetime_message(ttl, expire_at),
            _core.ttl_mode(keep_ttl),
            _core.durability_value(durability),
            delta,
            _core.unset_paths(delta, unset) or (),
            _publisher.checked_unit(publisher_id, epoch, unit),
        )
        options = PublisherOptions(batch_records, max_in_flight, linger, retry_for, self._connect_timeout)
        core = PublishCore(
            defaults, options, publisher_id=publisher_id or _core.random_publisher_id(), publisher_epoch=epoch or 1
        )
        return AsyncPublisher(
            core,
            self._open_stream,
            next_epoch=None
            if publisher_id is None or epoch is not None
            else partial(self._new_epoch, publisher_id, unit),
            on_ack=on_ack,
            on_refusal=on_refusal,
        )

    async def open_publisher(self, publisher_id: str, *, unit: int = 0) -> OpenedPublisher:
        """Begins a new epoch of a publisher, above all before it, and on disk: whoever still publishes under an older
        one is refused with PUBLISHER_FENCED (rule P6). Two calls never get the same epoch.

        With the number of a `unit` of work that is finished no epoch begins, and `unit_done` says so. The server
        forgets a publisher, its units included, when it is idle for `publisher_ttl` (7 days).
        """
        request = sow_pb2.OpenPublisherRequest(publisher_id=publisher_id, unit=unit)
        response = await self._call(self._sow.OpenPublisher, request)
        return OpenedPublisher(response.publisher_epoch, response.unit_done, response.unit_records)

    @overload
    async def touch(
        self,
        topic: str,
        key: str,
        *,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        only_if_version: int | None = None,
        durability: DurabilityName | None = None,
    ) -> Published: ...

    @overload
    async def touch(
        self,
        topic: str,
        key: list[str] | tuple[str, ...],
        *,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        only_if_version: int | None = None,
        durability: DurabilityName | None = None,
    ) -> list[Published | Refusal]: ...

    async def touch(
        self,
        topic: str,
        key: str | list[str] | tuple[str, ...],
        *,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        only_if_version: int | None = None,
        durability: DurabilityName | None = None,
    ) -> Published | list[Published | Refusal]:
        """Gives live records a new lifetime; without one, what the topic says for "absent" (rule P8).

        For one key the new version, or an exception such as NotFound; for a list, what became of each.
        """
        keys = [key] if isinstance(key, str) else list(key)
        results: list[Published | Refusal] = []
        for chunk in _core.key_chunks(keys):
            request = _core.touch_request(
                topic,
                chunk,
                ttl=ttl,
                expire_at=expire_at,
                only_if_version=only_if_version,
                durability=durability,
            )
            response = await self._call(self._sow.Touch, request, once=True)
            if isinstance(key, str):
                return _core.only(response)
            results += _core.outcomes(response, expected=len(chunk), first_index=len(results))
        return results

    async def persist(self, topic: str, key: str, *, durability: DurabilityName | None = None) -> Published:
        """Removes the lifetime of a live record (rule P8)."""
        return await self.touch(topic, key, ttl=NEVER, durability=durability)

    # ---- read ----

    async def get(self, topic: str, key: str) -> Record | None:
        """The live record of a key, or None."""
        found = await self.get_many(topic, [key])
        return found[0] if found else None

    async def get_many(
        self,
        topic: str,
        keys: Iterable[str],
        *,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
    ) -> list[Record]:
        """The live records of the keys, in their order; keys without one are left out.

        `select` or `exclude`: payload fields to return, as paths such as "/a/b". Records of one instant, up to 10,000
        keys; more take several requests.
        """
        select, exclude = _core.texts(select, "select"), _core.texts(exclude, "exclude")
        found: list[Record] = []
        for chunk in _core.key_chunks(keys):
            response = await self._call(self._sow.Get, _core.get_request(topic, chunk, select, exclude))
            found += _core.records(topic, response)
        return found

    def query(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the word for it
        *,
        order_by: str | Iterable[str] | None = None,
        keys: Iterable[str] | None = None,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        keys_only: bool = False,
        batch_size: int = 1_000,
        skip_n: int = 0,
        top_n: int | None = None,
    ) -> AsyncQueryResult:
        """The live records of a topic that match `filter`, from one instant (rules Q1, Q2).

        `order_by`: one or more of "/price", "/price DESC", "@expire_time" …, else they come in key order. `keys`: only
        these. `select` or `exclude`: payload fields to return, as paths; `keys_only`: no payloads; `skip_n`, `top_n`: a
        part of the result. The call is made when the first record is asked for, and repeated if it breaks before that.
        """
        request = _core.query_request(
            topic,
            filter,
            order_by=order_by,
            keys=keys,
            select=select,
            exclude=exclude,
            keys_only=keys_only,
            batch_size=batch_size,
            skip_n=skip_n,
            top_n=top_n,
        )
        return self._query(request)

    async def page(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the word for it
        *,
        page_size: int,
        page_token: str = "",
        keys_only: bool = False,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
    ) -> Page:
        """One page of the records that match `filter`, in key order, stable under concurrent change (rule Q4).

        Begin without a token and go on with `next_page_token`, all else being equal, until it is empty.
        """
        if page_size < 1:
            raise invalid("page_size", f"{page_size} is less than 1")
        request = _core.query_request(
            topic,
            filter,
            keys_only=keys_only,
            select=select,
            exclude=exclude,
            page_size=page_size,
            page_token=page_token,
        )
        progress = _core.QueryProgress(topic)
        records: list[Record] = []
        async with aclosing(self._batches(request, progress)) as batches:
            async for batch in batches:
                records.extend(batch)
        return progress.page(records)

    async def count(self, topic: str, filter: str | None = None) -> int:  # noqa: A002 - the word for it
        """The number of live records of a topic, of those that match `filter` if there is one."""
        progress = _core.QueryProgress(topic)
        async with aclosing(self._batches(_core.query_request(topic, filter, count_only=True), progress)) as batches:
            async for _ in batches:
                raise _core.malformed("records to a question for their number")
        return progress.matched

    async def explain(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the word for it
        *,
        order_by: str | Iterable[str] | None = None,
        keys: Iterable[str] | None = None,
        skip_n: int = 0,
        top_n: int | None = None,
    ) -> QueryPlan:
        """How a query finds its records, and what it reads to find them (rule Q3). It is run, but sends nothing."""
        request = _core.query_request(
            topic, filter, order_by=order_by, explain=True, keys=keys, skip_n=skip_n, top_n=top_n
        )
        progress = _core.QueryProgress(topic)
        async with aclosing(self._batches(request, progress)) as batches:
            async for _ in batches:
                raise _core.malformed("records to a question for the plan")
        return progress.explained()

    # ---- exports (rule Q6) ----

    async def open_export(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the word for it
        *,
        parts: int = 0,
        lease: Ttl | None = None,
    ) -> Export:
        """Opens a consistent export of the live records of a topic that match `filter`, to be read in parts.

        `parts`: about how many; 0: as many as the server finds apt. It ends when nobody has read or renewed it for
        `lease` (1 s to 24 h, by default 10 min). A call that breaks is not repeated: what it may have opened ends by
        itself.
        """
        request = _exports.open_request(topic, filter, parts=parts, lease=lease)
        response = await self._call(self._snapshots.OpenExport, request, once=True, at_least=_exports.OPEN_SECONDS)
        return _exports.export(response.export_id, response)

    def read_export(
        self,
        export_id: str,
        part: int,
        *,
        columns: Iterable[PackedColumn] = ("payload",),
        lines: bool = False,
        batch_size: int = 0,
    ) -> AsyncIterator[PackedRecords]:
        """The records of one part, in packed columns; parts may be read at the same time, and again.

        With `lines` each payload is followed by a line feed. When the connection breaks, it is made again, and reading
        goes on after the last batch. It ends only when the part has ended; otherwise it raises, such as NotFound
        (EXPORT_NOT_FOUND) when the export has ended or the server was restarted.
        """
        request = _exports.read_request(export_id, part, columns=columns, lines=lines, batch_size=batch_size)
        return self._read_export(_exports.PartCore(request, connect_timeout=self._connect_timeout))

    async def _read_export(self, core: _exports.PartCore) -> AsyncGenerator[PackedRecords, None]:
        while True:
            call = None
            try:
                await self._await_ready(_channel.RECONNECT_SECONDS)
                with _channel.unless_closed():
                    call = self._snapshots.ReadExport(core.request(now=time.monotonic()))
                    async for response in call:
                        records = core.feed(response)
                        if records is not None:
                            yield records
                core.finished()
            except (grpc.RpcError, SowError) as error:
                translated = _core.stream_error(error, core.what)
                if translated is not error:
                    translated.__cause__ = error
                delay = core.failed(translated, now=time.monotonic(), jitter=random.random())
            else:
                return
            finally:
                if call is not None:
                    call.cancel()
            await asyncio.sleep(delay)

    async def renew_export(self, export_id: str) -> Export:
        """Begins the lease of an export anew, and returns it. Raises NotFound (EXPORT_NOT_FOUND) when it has ended."""
        request = snapshot_pb2.RenewExportRequest(export_id=export_id)
        response = await self._call(self._snapshots.RenewExport, request)
        return _exports.export(export_id, response)

    async def close_export(self, export_id: str) -> None:
        """Lets go of an export, and of what it holds back on the server. One that has ended already is fine."""
        await self._call(self._snapshots.CloseExport, snapshot_pb2.CloseExportRequest(export_id=export_id))

    # ---- follow ----

    def subscribe(
        self,
        topic: str | None = None,
        filter: str | None = None,  # noqa: A002 - the word for it
        *,
        topic_pattern: str | None = None,
        oof: bool = False,
        delta: bool = False,
        changes: bool = False,
        start: Start | None = None,
        conflation: Ttl | None = None,
        progress: Ttl | None = None,
        empty_deltas: bool = False,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        batch_size: int = 1_000,
        retry_for: float = RETRY_SECONDS,
        on_interruption: Callable[[SowError | None], object] | None = None,
    ) -> AsyncSubscription:
        """The changes of the records of a topic that match `filter`, as they happen (rules S1, S2).

        `topic_pattern` instead of `topic`: every topic whose whole name matches this regular expression (RE2), also
        those made later. `oof`: tell also when a record goes out of focus. `delta`: of updates only the changed fields
        (S3), and nothing of those that change none unless `empty_deltas`. `changes`: puts, deletes and expiries
        wherever the new or the previous record matches, for pipelines. `start`: a bookmark, a datetime or EARLIEST,
        else now (S4). `conflation`: the newest value of each key, at most once in this time. `progress`: how long it
        may be quiet until the server says how far it is, which moves `bookmark`; 5 s unless given. `select` or
        `exclude`: payload fields to send, as paths. `batch_size`: the most records in one frame.

        A broken connection is made again for `retry_for` seconds, then Unavailable is raised; `math.inf`: for ever.
        `on_interruption` is told why, once when that begins, and None when the subscription goes on.
        Raises ResyncRequired, with the bookmark reached, when the journal does not lead on from there: take a snapshot.
        """
        request = _core.subscribe_request(
            topic,
            filter,
            topic_pattern=topic_pattern,
            sow=False,
            oof=oof,
            delta=delta,
            changes=changes,
            start=start,
            conflation=conflation,
            progress=progress,
            empty_deltas=empty_deltas,
            select=select,
            exclude=exclude,
            batch_size=batch_size,
        )
        return self._follow(request, retry_for, on_interruption)

    def sow_and_subscribe(
        self,
        topic: str | None = None,
        filter: str | None = None,  # noqa: A002 - the word for it
        *,
        topic_pattern: str | None = None,
        oof: bool = False,
        delta: bool = False,
        changes: bool = False,
        conflation: Ttl | None = None,
        progress: Ttl | None = None,
        empty_deltas: bool = False,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        batch_size: int = 1_000,
        retry_for: float = RETRY_SECONDS,
        on_interruption: Callable[[SowError | None], object] | None = None,
    ) -> AsyncSubscription:
        """First the records that match, each as a "sow", then "snapshot_end", then their changes: nothing is missing
        and nothing comes twice (rule S1). A `View` keeps the state that they tell.

        Arguments are those of `subscribe`. Where that raises ResyncRequired, and where the connection breaks inside the
        snapshot, this gives a "resync", which says to forget all records, and a new snapshot.
        """
        request = _core.subscribe_request(
            topic,
            filter,
            topic_pattern=topic_pattern,
            sow=True,
            oof=oof,
            delta=delta,
            changes=changes,
            start=None,
            conflation=conflation,
            progress=progress,
            empty_deltas=empty_deltas,
            select=select,
            exclude=exclude,
            batch_size=batch_size,
        )
        return self._follow(request, retry_for, on_interruption)

    def durable(
        self,
        topic: str,
        name: str,
        filter: str | None = None,  # noqa: A002 - the word for it
        *,
        start: Start | None = None,
        force: bool = False,
        oof: bool = False,
        changes: bool = False,
        progress: Ttl | None = None,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        batch_size: int = 1_000,
        retry_for: float = RETRY_SECONDS,
        on_interruption: Callable[[SowError | None], object] | None = None,
        on_gap: Callable[[Gap], object] | None = None,
        **settings: Unpack[DurableSettingsArguments],
    ) -> AsyncDurableSubscription:
        """Consumes a durable subscription: the server keeps its position, and who comes back goes on there (rule J2).

        It is created if need be, at now or at `start`: a bookmark, a datetime or EARLIEST. Each change is acknowledged
        once it is done with; what was not acknowledged comes again to the next consumer, so nothing is lost. One
        consumer at a time: while there is another, FailedPrecondition (DURABLE_IN_USE); `force` takes over from it.
        Another `filter`, or other settings, under the same name are refused (DURABLE_DIFFERS).

        `retain_time`, `retain_bytes`, `backlog_ttl`, `idle_ttl`: see `DurableSettings`. `on_gap` is told of what could
        not be handed over, in its place: after what came before, and before what comes after it. After a gap
        "conflated" the matching records come, each as a "sow", then "snapshot_end". All else is as for `subscribe`.
        """
        request = _retention.durable_request(
            topic,
            name,
            filter,
            start=start,
            force=force,
            oof=oof,
            changes=changes,
            settings=settings,
            progress=progress,
            select=select,
            exclude=exclude,
            batch_size=batch_size,
        )
        acknowledgements = Acknowledgements(topic, name, retry_for=retry_for)
        core = DurableCore(
            request,
            acknowledgements,
            retry_for=retry_for,
            connect_timeout=self._connect_timeout,
            on_interruption=on_interruption,
            on_gap=on_gap,
        )
        return AsyncDurableSubscription(core, self._open_subscription, acknowledgements, self._acknowledge)

    # ---- ranges of changes ----

    async def plan_changes(
        self,
        topic: str,
        *,
        start: Start,
        end: str | None = None,
        max_entries: int = 0,
        max_bytes: int = 0,
        parts: int = 0,
    ) -> ChangesPlan:
        """Where a range of a topic's changes begins and ends, and how to split it into about `parts` parts.

        `start`: after a bookmark (refused as by `subscribe` where the journal does not reach back to it), with the
        first change at or after a time, "earliest" or "latest". It ends at `end`, else with the last change that is on
        disk, or sooner: with the last commit up to which it holds no more than `max_entries` and `max_bytes` of the
        journal, 0 for any number; a first commit that has more is taken whole. Costs a few look-ups, whatever it holds.
        """
        request = _changes.plan_request(topic, start, end, max_entries, max_bytes, parts)
        return _changes.plan(await self._call(self._snapshots.PlanChanges, request))

    def read_changes(
        self,
        topic: str,
        start: str,
        end: str,
        *,
        filter: str | None = None,  # noqa: A002 - the word for it
        columns: Iterable[str] = ("payload",),
        lines: bool = False,
        batch_size: int = 0,
        history: str | None = None,
        share: tuple[int, int] | None = None,
    ) -> AsyncGenerator[PackedRecords, None]:
        """The changes after `start`, up to `end`, whose new or previous record matches `filter`, in order (rule S2).

        `columns`: any of payload, key, version, publish_time, expire_time, origin, sequence (of the change), op (which
        brings reasons, too); of a delete and an expiry the record is the one that went. `lines`: a line feed after each
        payload. `batch_size`: the most changes at once, 0 for 10,000.
        Any range may be read again, with the same result for as long as the journal reaches back to it; with a filter
        give `history`, the bookmark after which the range as a whole begins or an earlier one, to be sure of that: what
        records were before it is not looked up, and they count as having matched (rule J1).
        `share=(i, n)`: only the changes of those keys which are the i-th of n shares, so that n readers of a range have
        all of it, and the changes of one key come to one of them, in order.
        It ends behind the last change, or raises; a broken connection is made again, and nothing comes twice. Raises
        ResyncRequired (BOOKMARK_TOO_OLD) where the journal does not reach back to the range any more.
        """
        request = _changes.read_request(
            topic, start, end, filter, columns=columns, lines=lines, batch_size=batch_size, history=history, share=share
        )
        return self._read_changes(_changes.ReadChangesCore(request))

    async def _read_changes(self, core: _changes.ReadChangesCore) -> AsyncGenerator[PackedRecords, None]:
        while not core.done:
            failure: BaseException | None = None
            try:
                async with aclosing(self._changes_of_call(core)) as batches:
                    async for batch in batches:
                        yield batch
            except (grpc.RpcError, SowError) as error:
                failure = error
            if not core.done:
                await asyncio.sleep(core.ended(failure, now=time.monotonic(), jitter=random.random()))

    async def _changes_of_call(self, core: _changes.ReadChangesCore) -> AsyncGenerator[PackedRecords, None]:
        request = core.request(now=time.monotonic())
        await self._await_ready()
        with _channel.unless_closed():
            call = self._snapshots.ReadChanges(request)
        try:
            with _channel.unless_closed():
                async for response in call:
                    batch = core.batch(response)
                    if batch is not None:
                        yield batch
        finally:
            call.cancel()

    async def pin_journal(self, topic: str, name: str, bookmark: str, *, idle_ttl: Ttl | None = None) -> Pin:
        """Keeps the changes of a topic after a bookmark, whatever its retention, for as long as it is called again.

        It is a durable subscription of that name which nobody consumes: made by the first call, moved forward to the
        bookmark by later ones, never back; it goes when none comes for `idle_ttl` (of the first call; an hour unless
        given), or by `delete_durable`. Hard limits and quotas of the topic count all the same. Raises
        FailedPrecondition where the name is a durable's with a filter or a consumer, ResyncRequired for a bookmark that
        the journal does not reach back to.
        """
        request = _changes.pin_request(topic, name, bookmark, idle_ttl)
        response = await self._call(self._snapshots.PinJournal, request)
        return Pin(response.bookmark, response.created)

    # ---- delete ----

    async def sow_delete(
        self,
        topic: str,
        *,
        keys: Iterable[str] | None = None,
        filter: str | None = None,  # noqa: A002 - the word for it
        data: Document | None = None,
        all: bool = False,  # noqa: A002 - the word for it
        dry_run: bool = False,
        durability: DurabilityName | None = None,
        publisher_id: str | None = None,
        epoch: int | None = None,
        unit: int = 0,
        on_progress: Callable[[Deleted], object] | None = None,
    ) -> Deleted:
        """Deletes records by exactly one of `keys`, `filter`, `data` (its key is derived as for a publish), `all` (D1).

        `dry_run` only counts. Many records are deleted in steps, each record only if it still matches then;
        `on_progress` gets the figures after each step. When the connection breaks, steps that were done stay done.
        With `publisher_id`, by keys or data only, it is a part of what that publisher does: PUBLISHER_FENCED where an
        epoch later than `epoch` has begun, UNIT_DONE where `unit` is finished (P6).
        """
        request = _core.delete_request(
            topic, keys=keys, filter_text=filter, data=data, everything=all, dry_run=dry_run, durability=durability
        )
        _core.act_for(request, publisher_id, epoch, unit)
        await self._await_ready()
        try:
            with _channel.unless_closed():
                async for response in self._sow.SowDelete(request):
                    deleted = _core.deleted(response)
                    if on_progress is not None:
                        on_progress(deleted)
                    if response.done:
                        return deleted
        except grpc.RpcError as error:
            raise _core.error_of_status(error) from error
        raise _core.cut("the answer to the delete")

    # ---- administration ----

    async def topics(self, with_statistics: bool = False) -> list[Topic]:
        """All topics, by name."""
        response = await self._call(
            self._admin.ListTopics, admin_pb2.ListTopicsRequest(with_statistics=with_statistics)
        )
        return [_core.topic(topic) for topic in response.topics]

    async def create_topic(
        self, name: str, settings: TopicSettings | None = None, **named: Unpack[TopicSettingsArguments]
    ) -> Topic:
        """Creates a topic (rule K1), from a TopicSettings or from its fields as keyword arguments."""
        response = await self._call(self._admin.CreateTopic, _core.create_request(name, settings, named), once=True)
        return _core.topic(response.topic, response.warnings)

    async def alter_topic(self, name: str, **named: Unpack[TopicSettingsArguments]) -> Topic:
        """Changes the settings that are named, None: not set, so that policies or defaults count (rule T2); stamps
        never change (rule L12)."""
        response = await self._call(self._admin.AlterTopic, _core.alter_request(name, named), once=True)
        return _core.topic(response.topic, response.warnings)

    async def describe_topic(self, name: str) -> Topic:
        """One topic: settings, also those in force and where they come from (rule T2), and statistics."""
        response = await self._call(self._admin.DescribeTopic, admin_pb2.DescribeTopicRequest(name=name))
        return _core.topic(response.topic)

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
        request = _core.restamp_request(topic, mode, filter, ttl=ttl, expire_at=expire_at, dry_run=dry_run)
        await self._await_ready()
        try:
            with _channel.unless_closed():
                async for response in self._admin.Restamp(request):
                    restamped = _core.restamped(response)
                    if on_progress is not None:
                        on_progress(restamped)
                    if response.done:
                        return restamped
        except grpc.RpcError as error:
            raise _core.error_of_status(error) from error
        raise _core.cut("the answer to the restamp")

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
        await self._await_ready()
        found = _replication.NOTHING_CHECKED
        try:
            with _channel.unless_closed():
                async for response in self._admin.CheckTopic(request):
                    found = _replication.topic_checked(found, response)
                    if on_progress is not None:
                        on_progress(found)
                    if response.done:
                        return found
        except grpc.RpcError as error:
            raise _core.error_of_status(error) from error
        raise _core.cut("the answer to the check")

    async def status(self) -> Status:
        """How the server is."""
        return _core.status(await self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest()))

    async def accept_clock(self) -> ClockAccepted:
        """Confirms that the wall clock is right after a jump (rule L15)."""
        return _core.clock_accepted(
            await self._call(self._admin.AcceptClock, admin_pb2.AcceptClockRequest(), once=True)
        )

    async def compact(self) -> Compacted:
        """Compacts the data files now (rule L17). Takes its time: there is no deadline."""
        return _core.compacted(
            await self._call(self._admin.Compact, admin_pb2.CompactRequest(), once=True, unbounded=True)
        )

    # ---- durable subscriptions and policies ----

    async def durables(self, topic: str | None = None, *, with_figures: bool = False) -> list[Durable]:
        """The durable subscriptions of a topic, or of all topics; their figures, before filtering, if asked for."""
        request = admin_pb2.ListDurablesRequest(topic=topic or "", with_figures=with_figures)
        return [_retention.durable(one) for one in (await self._call(self._admin.ListDurables, request)).durables]

    async def describe_durable(self, topic: str, name: str, *, exact: bool = False) -> Durable:
        """One durable subscription with its figures (rule J7); with `exact` the entries are read, and only those that
        match its filter are counted."""
        request = _retention.describe_request(topic, name, exact=exact)
        return _retention.durable((await self._call(self._admin.DescribeDurable, request, unbounded=exact)).durable)

    async def durable_browse(
        self, topic: str, name: str, *, entries_max: int = 100, after: str | None = None
    ) -> Browsed:
        """Shows what a durable subscription has not acknowledged, also while a consumer is attached, and consumes
        nothing (rule J16): at most `entries_max` entries, those that come after the bookmark `after`."""
        request, browsing = (
            _retention.browse_request(topic, name, entries_max=entries_max, after=after),
            _retention.Browsing(),
        )
        await self._await_ready()
        try:
            with _channel.unless_closed():
                async for response in self._sow.BrowseDurable(request):
                    if (browsed := browsing.feed(response)) is not None:
                        return browsed
        except grpc.RpcError as error:
            raise _core.error_of_status(error) from error
        raise _core.cut("the answer to the browse")

    async def rewind(self, topic: str, name: str, to: Start, *, force: bool = False) -> Rewound:
        """Moves a durable subscription back to EARLIEST, a bookmark, or a datetime, to hand over again what is retained
        (rule J6). Not while a consumer is attached, unless `force`, which ends its stream (DURABLE_DETACHED)."""
        request = _retention.rewind_request(topic, name, to, force=force)
        return _retention.rewound(await self._call(self._sow.Rewind, request, once=True))

    async def delete_durable(self, topic: str, name: str, *, force: bool = False) -> None:
        """Deletes a durable subscription and its position; `force`: also while a consumer is attached."""
        request = _retention.delete_request(topic, name, force=force)
        await self._call(self._admin.DeleteDurable, request, once=True)

    async def clear_backlog(self, topic: str, name: str | None = None) -> int:
        """Marks everything acknowledged of a durable subscription, or of all of the topic (rule J13); returns how many
        entries were not, before filtering."""
        request = _retention.clear_request(topic, name)
        return (await self._call(self._admin.ClearBacklog, request, once=True)).acknowledged_entries

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
        return _retention.policy((await self._call(self._admin.GetPolicy, request)).policy)

    async def policies(self) -> list[Policy]:
        """All policies: operator policies first, then by priority, the highest first."""
        request = admin_pb2.ListPoliciesRequest()
        return [_retention.policy(one) for one in (await self._call(self._admin.ListPolicies, request)).policies]

    async def delete_policy(self, name: str, *, operator: bool = False) -> None:
        """Deletes a policy, or operator policy; what it set takes its next source."""
        request = admin_pb2.DeletePolicyRequest(name=name, operator=operator)
        await self._call(self._admin.DeletePolicy, request, once=True)

    # ---- other instances, backups ----

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
        await self._await_ready()
        try:
            with _channel.unless_closed():
                async for response in self._admin.VerifyReplication(request):
                    done.append(_replication.verified(response))
                    if on_topic is not None:
                        on_topic(done[-1])
        except grpc.RpcError as error:
            raise _core.error_of_status(error) from error
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
        await self._await_ready()
        try:
            with _channel.unless_closed():
                async for response in self._admin.RepairReplication(request):
                    done.append(_replication.repaired(response))
                    if on_topic is not None:
                        on_topic(done[-1])
        except grpc.RpcError as error:
            raise _core.error_of_status(error) from error
        return done

    async def backup(self, directory: str) -> BackupMade:
        """Makes a backup in a directory of the server's machine, an absolute path that is not there yet (rule J14).
        Takes its time: there is no deadline."""
        request = admin_pb2.BackupRequest(directory=directory)
        return _replication.backup_made(await self._call(self._admin.Backup, request, once=True, unbounded=True))

    # ---- loads ----

    async def open_load(self, topic: str, *, lease: timedelta | None = None) -> Load:
        """As `Client.open_load`."""
        request = _loads.open_request(topic, lease)
        return _loads.opened(await self._call(self._load.OpenLoad, request, once=True))

    def stage_load(self, load_id: str, part: int, attempt: int, *, retry_for: float = 30.0) -> AsyncLoadStager:
        """As `Client.stage_load`."""
        return AsyncLoadStager(StageCore(load_id, part, attempt, retry_for=retry_for), self._open_staging)

    async def commit_load(
        self, load_id: str, parts: Iterable[LoadPart], *, retry_for: float = 60.0
    ) -> AsyncIterator[LoadProgress]:
        """As `Client.commit_load`: committed when it returns, and then `async for` tells how far it is."""
        told = self._commit_load(_loads.commit_request(load_id, parts), CommitRetry(retry_for))
        first = await anext(told)

        async def all_told() -> AsyncIterator[LoadProgress]:
            async with aclosing(told):
                yield first
                async for progress in told:
                    yield progress

        return all_told()

    async def _commit_load(
        self, request: load_pb2.CommitLoadRequest, retry: CommitRetry
    ) -> AsyncGenerator[LoadProgress, None]:
        while True:
            call = None
            try:
                await self._await_ready()
                with _channel.unless_closed():
                    call = self._load.CommitLoad(request)
                    async for response in call:
                        progress = _loads.progress(response)
                        retry.heard()
                        yield progress
                        if progress.phase == "done":
                            return
                raise _core.cut("the progress of a load")
            except grpc.RpcError as error:
                translated = _core.stream_error(error, "the progress of a load")
                delay = retry.delay(translated)
            except SowError as error:
                delay = retry.delay(error)
            finally:
                if call is not None:
                    call.cancel()
            await asyncio.sleep(delay)

    async def get_load(self, load_id: str) -> LoadInfo:
        """As `Client.get_load`."""
        return _loads.info(await self._call(self._load.GetLoad, load_pb2.GetLoadRequest(load_id=load_id)))

    async def loads(self, topic: str | None = None) -> list[LoadInfo]:
        """As `Client.loads`."""
        response = await self._call(self._load.ListLoads, load_pb2.ListLoadsRequest(topic=topic or ""))
        return [_loads.info(one) for one in response.loads]

    async def renew_load(self, load_id: str) -> timedelta:
        """As `Client.renew_load`."""
        response = await self._call(self._load.RenewLoad, load_pb2.RenewLoadRequest(load_id=load_id))
        return timedelta(microseconds=response.lease_micros)

    async def abort_load(self, load_id: str) -> None:
        """As `Client.abort_load`."""
        await self._call(self._load.AbortLoad, load_pb2.AbortLoadRequest(load_id=load_id))

    # ---- calls ----

    async def _open_staging(self, requests: AsyncIterator[load_pb2.StageLoadRequest]) -> AioStageCall:
        await self._await_ready(_channel.RECONNECT_SECONDS)
        with _channel.unless_closed():
            return self._load.StageLoad(requests)

    async def _await_ready(self, seconds: float | None = None) -> None:
        if self._closed:
            raise _core.closed("client")
        if self._connection is not None:
            await self._connection.await_ready(seconds)

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        *,
        once: bool = False,
        unbounded: bool = False,
        at_least: float = 0.0,
    ) -> _Response:
        """Makes a call; one that may be made twice (not `once`) gets a second chance after the connection broke.
        `at_least`: seconds that it may take, if `timeout` is less."""
        again = not once and self._connection is not None
        while True:
            await self._await_ready()
            try:
                with _channel.unless_closed():
                    return await method(request, timeout=None if unbounded else max(self._timeout, at_least))
            except grpc.RpcError as error:
                translated = _core.call_error(error, client_closed=self._closed)
                if not again or translated.reason != "UNREACHABLE":
                    raise translated from error
                again = False

    async def _publish(self, request: sow_pb2.PublishRequest) -> sow_pb2.PublishResponse:
        position = self._sequencer.take()
        try:
            request.publisher.CopyFrom(position)
            return await self._call(self._sow.Publish, request)
        finally:
            self._sequencer.give_back(position, len(request.records))

    async def _open_stream(self, requests: AsyncIterator[sow_pb2.PublishStreamRequest]) -> AioStreamCall:
        await self._await_ready(_channel.RECONNECT_SECONDS)
        with _channel.unless_closed():
            return self._sow.PublishStream(requests)

    async def _new_epoch(self, publisher_id: str, unit: int) -> int:
        return _publisher.new_epoch(await self.open_publisher(publisher_id, unit=unit), publisher_id, unit)

    def _follow(
        self,
        request: sow_pb2.SubscribeRequest,
        retry_for: float,
        on_interruption: Callable[[SowError | None], object] | None,
    ) -> AsyncSubscription:
        core = SubscriptionCore(
            request, retry_for=retry_for, connect_timeout=self._connect_timeout, on_interruption=on_interruption
        )
        return AsyncSubscription(core, self._open_subscription)

    async def _open_subscription(
        self, request: sow_pb2.SubscribeRequest, *, connect_seconds: float | None = None
    ) -> AioSubscribeCall:
        await self._await_ready(connect_seconds)
        with _channel.unless_closed():
            return self._sow.Subscribe(request)

    async def _acknowledge(self, request: sow_pb2.AcknowledgeRequest) -> sow_pb2.AcknowledgeResponse:
        return await self._call(self._sow.Acknowledge, request)

    def _query(self, request: sow_pb2.QueryRequest) -> AsyncQueryResult:
        progress = _core.QueryProgress(request.topic)
        return AsyncQueryResult(progress, self._batches(request, progress))

    async def _batches(
        self, request: sow_pb2.QueryRequest, progress: _core.QueryProgress
    ) -> AsyncGenerator[RecordBatch, None]:
        for attempt in range(1, QUERY_ATTEMPTS_MAX + 1):
            await self._await_ready()
            with _channel.unless_closed():
                call = self._sow.Query(request)
            try:
                with _channel.unless_closed():
                    async for response in call:
                        batch = progress.batch(response)
                        if batch is not None:
                            yield batch
                progress.finished()
                return
            except (grpc.RpcError, SowError) as error:
                translated = progress.broken(error)
                again = isinstance(translated, Unavailable) and not progress.yielded and attempt < QUERY_ATTEMPTS_MAX
                if not again:
                    raise translated from (None if translated is error else error)
                progress.restart()
                await asyncio.sleep(QUERY_RETRY_SECONDS * attempt)
            finally:
                call.cancel()
