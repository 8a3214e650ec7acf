"""Reading in parts, for programs with several readers: exports, and ranges of changes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing

import grpc
import grpc.aio

from sow.v1 import snapshot_pb2
from sow_client import _changes, _exports, _statuses, _transport
from sow_client._changes import ChangesPlan, Pin
from sow_client._exports import Export
from sow_client._packed import PackedColumn, PackedRecords
from sow_client._records import Start, Ttl
from sow_client.aio._calls import AsyncCalls
from sow_client.errors import SowError


class AsyncSnapshots(AsyncCalls):
    """The calls that read a topic, or its changes, in parts."""

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
                await self._transport.await_ready(_transport.RECONNECT_SECONDS)
                with _transport.unless_closed():
                    call = self._snapshots.ReadExport(core.request(now=time.monotonic()))
                    async for response in call:
                        records = core.feed(response)
                        if records is not None:
                            yield records
                core.finished()
            except (grpc.RpcError, SowError) as error:
                translated = _statuses.stream_error(error, core.what)
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
        await self._transport.await_ready()
        with _transport.unless_closed():
            call = self._snapshots.ReadChanges(request)
        try:
            with _transport.unless_closed():
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
