"""Reading in parts, for programs with several readers: exports, and ranges of changes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing

import grpc
import grpc.aio

from sow.v1 import snapshot_pb2
from sow_client import _changes, _exports, _lines, _statuses, _transport
from sow_client._cells import Way
from sow_client._changes import ChangesPlan, Pin
from sow_client._contract import needed
from sow_client._exports import Export, ExportOf
from sow_client._keys import Key
from sow_client._lines import Home
from sow_client._packed import PackedColumn, PackedRecords
from sow_client._parameters import Parameters
from sow_client._records import Change, OnAbsentFields, Start, Ttl
from sow_client.aio._calls import AsyncCalls
from sow_client.aio._moving import AsyncTransport
from sow_client.errors import SowError


class AsyncSnapshots(AsyncCalls):
    """The calls that read a topic, or its changes, in parts."""

    async def open_export(
        self,
        topic: str | Sequence[str | ExportOf],
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        *,
        parts: int = 0,
        lease: Ttl | None = None,
        idle_lease: Ttl | None = None,
        successor_of: str | None = None,
        reader: str | None = None,
    ) -> Export:
        """Opens a consistent export of the live records of a topic that match `filter`, to be read in parts.

        With several topics it shows all of them at one instant, so a commit that changes two is in both or in none. A
        topic that is given as `ExportOf` has a filter of its own. `Export.parts_of` tells which parts a topic has. The
        export ends with each of its topics.

        `parameters`: the values of the names in the filter. `parts`: their approximate number; 0: the server decides.
        The export ends when it was not read or renewed for `lease` (1 s to 24 h, by default 10 min). `idle_lease`
        counts instead, where it is shorter, before the first reading and after a reading that was broken off. A call
        that breaks is not repeated: an export that it may have opened ends by itself.

        `successor_of`: the id of an export that has ended. All who ask for its successor with one `reader`, a name for
        the work that they share, get the same export, whoever asks first. NotFound (EXPORT_NOT_FOUND) says that this
        reader has read an export that has ended, so that another one would mix two instants.

        Rules: Q6, Q8.
        """
        request = _exports.open_request(
            topic,
            filter,
            parameters,
            parts=parts,
            lease=lease,
            idle_lease=idle_lease,
            successor_of=successor_of,
            reader=reader,
        )
        home = Home("the export")
        response = await self._call(
            self._snapshots.OpenExport, request, once=True, at_least=_exports.OPEN_SECONDS, home=home
        )
        self._homes.keep(response.export_id, home)
        return _exports.export(response.export_id, response)

    def read_export(
        self,
        export_id: str,
        part: int,
        *,
        columns: Iterable[PackedColumn] = ("payload",),
        lines: bool = False,
        batch_size: int = 0,
        fields: Iterable[str] = (),
        reader: str | None = None,
        on_absent_fields: OnAbsentFields | None = None,
    ) -> AsyncIterator[PackedRecords]:
        """The records of one part, in packed columns. Parts may be read at the same time, and again.

        With `lines` a line feed follows each payload. `fields`: the top-level fields that the caller needs of json
        documents, at most 100; the server may leave out the others, where that costs less than to send them. Empty:
        all. `reader`: the work that reads, as for `open_export`; from now on it gets no successor of this export.
        `on_absent_fields` gets, at the end of the part, the fields of the filter in which none of the records has a
        value that were read of the whole export so far; none: ().
        After a break it reconnects and continues after the last batch.
        It ends only at the end of the part. Otherwise it raises, for example NotFound (EXPORT_NOT_FOUND) when the
        export has ended or the server was restarted.

        Rule: Q10.
        """
        request = _exports.read_request(
            export_id, part, columns=columns, lines=lines, batch_size=batch_size, fields=fields, reader=reader
        )
        home = self._homes.of(export_id) or Home("the export")
        core = _exports.PartCore(request, connect_timeout=self._connect_timeout, on_absent_fields=on_absent_fields)
        return self._read_export(core, home)

    async def _read_export(self, core: _exports.PartCore, home: Home) -> AsyncGenerator[PackedRecords, None]:
        way = self._cells.way("", home)
        while True:
            call = None
            try:
                line = await self._ready(way, _transport.RECONNECT_SECONDS, home)
                with _transport.unless_closed():
                    call = _lines.at(line, self._snapshots.ReadExport)(core.request(now=time.monotonic()))
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
        """Restarts the lease of an export, and returns the export. Raises NotFound (EXPORT_NOT_FOUND) if it has
        ended."""
        request = snapshot_pb2.RenewExportRequest(export_id=export_id)
        response = await self._call(self._snapshots.RenewExport, request, home=self._homes.of(export_id))
        return _exports.export(export_id, response)

    async def close_export(self, export_id: str) -> None:
        """Closes an export and frees its resources on the server. An export that has ended already is no error."""
        request = snapshot_pb2.CloseExportRequest(export_id=export_id)
        await self._call(self._snapshots.CloseExport, request, home=self._homes.of(export_id))

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
        """The begin and end of a range of a topic's changes, and how to split it into about `parts` parts.

        The range starts after a bookmark (refused as by `subscribe` if the journal does not reach back to it), with the
        first change at or after a time, at "earliest" or at "latest". It ends at `end`, else with the last change on
        disk. Both may be bookmarks of another instance, with marks. It ends sooner, after a commit, where it would
        exceed `max_entries` or `max_bytes` of the journal (0: no limit); a first commit that exceeds them is taken
        whole. The call costs a few look-ups, whatever the range.
        """
        request = _changes.plan_request(topic, start, end, max_entries, max_bytes, parts)
        return _changes.plan(await self._call(self._snapshots.PlanChanges, request))

    def read_changes(
        self,
        topic: str,
        start: str,
        end: str,
        *,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        columns: Iterable[str] = ("payload",),
        lines: bool = False,
        batch_size: int = 0,
        history: str | None = None,
        share: tuple[int, int] | None = None,
        keys: Iterable[Key] | None = None,
        elsewhere: bool = False,
    ) -> AsyncGenerator[PackedRecords, None]:
        """The changes after `start`, up to `end`, whose new or previous record matches `filter`, in order.

        `parameters`: the values of the names in the filter. `columns`: any of payload, key, version, publish_time,
        expire_time, origin, sequence (of the change), op (which includes the reasons). The record of a delete or an
        expiry is the removed one. `lines`: a line feed after each payload. `batch_size`: the most changes at once, 0
        for 10,000. A range may be read again, with the same result as long as the journal reaches back to it. With a
        filter this needs `history`: the bookmark at which the whole range begins, or an earlier one. The state of
        records before it is not looked up; they count as having matched. `keys`: only the changes of these, for which
        nothing is looked up; not with `share`. `share=(i, n)`: only the changes of the keys in the i-th of n shares. So
        n readers together read the whole range, and one of them gets all changes of a key, in order. `elsewhere`: the
        reader was told changes by another instance that this one may lack. It ends after the last change, or raises.
        After a break it reconnects, and nothing comes twice. Raises ResyncRequired (BOOKMARK_TOO_OLD) when the journal
        no longer reaches back to the range.

        Rules: S2, J1, F18.
        """
        request = _changes.read_request(
            topic,
            start,
            end,
            filter,
            parameters,
            columns=columns,
            lines=lines,
            batch_size=batch_size,
            history=history,
            share=share,
            keys=keys,
            elsewhere=elsewhere,
        )
        way = self._cells.way(topic)
        core = _changes.ReadChangesCore(request, way)
        return self._read_changes(core, way, Home(f"the reading of changes of {topic}"))

    async def changes(
        self,
        topic: str,
        start: str,
        end: str,
        *,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        history: str | None = None,
        keys: Iterable[Key] | None = None,
    ) -> AsyncGenerator[Change, None]:
        """The changes of a range one by one, as a subscription with `changes=True` gives them, without bookmarks of
        their own: the range is continued at its end. The arguments and errors are those of `read_changes`, which takes
        a sixth of the time.

        Rules: S2, J1.
        """
        batches = self.read_changes(
            topic,
            start,
            end,
            filter=filter,
            parameters=parameters,
            columns=_changes.ALL_COLUMNS,
            history=history,
            keys=keys,
        )
        async with aclosing(batches):
            async for batch in batches:
                for change in _changes.unpacked(topic, batch):
                    yield change

    async def _read_changes(
        self, core: _changes.ReadChangesCore, way: Way[AsyncTransport], home: Home
    ) -> AsyncGenerator[PackedRecords, None]:
        while not core.done:
            failure: BaseException | None = None
            try:
                async with aclosing(self._changes_of_call(core, way, home)) as batches:
                    async for batch in batches:
                        yield batch
            except (grpc.RpcError, SowError) as error:
                failure = error
            if not core.done:
                await asyncio.sleep(core.ended(failure, now=time.monotonic(), jitter=random.random()))

    async def _changes_of_call(
        self, core: _changes.ReadChangesCore, way: Way[AsyncTransport], home: Home
    ) -> AsyncGenerator[PackedRecords, None]:
        request = core.request(now=time.monotonic())
        line = await self._ready(way, None, home, needed(request))
        with _transport.unless_closed():
            call = _lines.at(line, self._snapshots.ReadChanges)(request)
        try:
            with _transport.unless_closed():
                async for response in call:
                    batch = core.batch(response)
                    if batch is not None:
                        yield batch
        finally:
            call.cancel()

    async def pin_journal(
        self, topic: str, name: str, bookmark: str, *, idle_ttl: Ttl | None = None, reader: str = ""
    ) -> Pin:
        """Keeps the changes of a topic after a bookmark, whatever its retention, as long as the call is repeated.

        The pin is a durable subscription of that name without a consumer. The first call makes it; later calls move it
        forward to their bookmark, never back. It is removed when no call comes for `idle_ttl` (of the first call; by
        default an hour, at most what the server allows), or by `delete_durable`. `reader` tells people who reads, in up
        to 200 characters: `durables()` and `sow durable list --pins` show it. Hard limits and quotas of the topic still
        apply. Raises FailedPrecondition if a durable of that name has a filter or a consumer, and ResyncRequired if the
        journal does not reach back to the bookmark.

        Rule: J18.
        """
        request = _changes.pin_request(topic, name, bookmark, idle_ttl, reader)
        response = await self._call(self._snapshots.PinJournal, request)
        return Pin(response.bookmark, response.created)
