"""The part of `sow.v1.SnapshotService` for exports of topics, which are read in parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from typing import Final, TypeVar

import structlog

from sow.v1 import snapshot_pb2
from sow_server.access.caller import Call
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.query.export_parts import PARTS_MAX, Export, not_found
from sow_server.query.export_tokens import read_token
from sow_server.query.exports import (
    LEASE_MICROS,
    LEASE_MICROS_MAX,
    LEASE_MICROS_MIN,
    NEVER_OPENED,
    NOT_PERMITTED,
    Exports,
)
from sow_server.services.exporting import LongExports, OwnExport, PartReading, ReadPart, ServedExport, export_of
from sow_server.services.reader_pieces import ReaderPieces
from sow_server.services.records.answering import opened
from sow_server.services.records.positions import on_disk
from sow_server.services.wire import narrowing, packing
from sow_server.services.wire.convert import invalid
from sow_server.services.wire.filter_values import filter_values, values_read

log = structlog.get_logger(__name__)

T = TypeVar("T")

LONG_RECORDS: Final = 10_000
"""An export of a topic with so many records is read in a reader process, if there is one."""
READER_CHARACTERS_MAX: Final = 200
"""The name of a reader (rule Q8)."""


class SnapshotService:
    """Validates, calls, translates. Makes the readings of an export take turns."""

    def __init__(
        self,
        reading: Reads,
        writes: Writes,
        exports: Exports[ServedExport],
        readers: Executor,
        long: LongExports,
        pieces: ReaderPieces,
    ) -> None:
        self._reading = reading
        self._commits = writes.commits
        self._exports = exports
        self._readers = readers
        self._long = long
        self._pieces = pieces

    async def OpenExport(self, request: snapshot_pb2.OpenExportRequest, call: Call) -> snapshot_pb2.OpenExportResponse:
        if request.parts > PARTS_MAX:
            raise invalid("parts", f"must be between 1 and {PARTS_MAX}, or 0")
        lease = request.lease_micros or LEASE_MICROS
        if not LEASE_MICROS_MIN <= lease <= LEASE_MICROS_MAX:
            raise invalid("lease_micros", "must be between 1 s and 24 h, or 0")
        if request.idle_lease_micros and not LEASE_MICROS_MIN <= request.idle_lease_micros <= LEASE_MICROS_MAX:
            raise invalid("idle_lease_micros", "must be between 1 s and 24 h, or 0")
        _check_reader(request.reader)
        if bool(request.successor_of) != bool(request.reader):
            raise invalid("reader", "and successor_of need each other")
        topic, restriction = call.topic(request.topic)
        if request.successor_of and (present := self._successor(request, call, topic)) is not None:
            return self._answered(*self._exports.renew(present.id))
        with call.making("exports", self._exports.held_by(call.owner)), self._exports.room():
            export: ServedExport | None = None
            if topic.statistics.records >= LONG_RECORDS:
                export = await self._long.open_export(
                    topic,
                    restriction,
                    request.filter,
                    request.parts,
                    owner=call.owner,
                    given=await values_read(self._readers, request.parameters),
                    lost=lambda export_id: self._exports.close(export_id, "the process that read it has ended"),
                )
            if export is None:
                export = await self._open_here(topic, restriction, request, call.owner)
            try:
                await on_disk(self._commits, export.sequence)
                # Another task of the reader may have been faster.
                present = self._successor(request, call, topic) if request.successor_of else None
                if present is None:
                    self._exports.add(
                        export,
                        lease,
                        idle_lease_micros=request.idle_lease_micros,
                        successor_of=request.successor_of,
                        reader=request.reader,
                    )
            except BaseException:
                export.close()
                raise
        if present is not None:
            export.close()
            return self._answered(*self._exports.renew(present.id))
        log.info("export_opened", topic=topic.name, export=export.id, parts=len(export.part_records))
        return self._answered(export, lease)

    def _successor(self, request: snapshot_pb2.OpenExportRequest, call: Call, topic: Topic) -> ServedExport | None:
        found = self._exports.successor(request.successor_of, request.reader, owner=call.owner, topic=topic)
        if found is not None:
            self._check_owner(call, found.id)
        return found

    def _answered(self, export: ServedExport, lease_micros: int) -> snapshot_pb2.OpenExportResponse:
        told = self._described(export, lease_micros)
        return snapshot_pb2.OpenExportResponse(
            export_id=export.id,
            topic=told.topic,
            bookmark=told.bookmark,
            as_of_micros=told.as_of_micros,
            lease_micros=told.lease_micros,
            parts=told.parts,
        )

    async def _open_here(
        self, topic: Topic, restriction: Restriction, request: snapshot_pb2.OpenExportRequest, owner: str
    ) -> OwnExport:
        def made() -> Export:
            splits = self._exports.splits
            return export_of(
                self._reading.cuts,
                topic,
                request.filter,
                restriction,
                request.parts,
                splits,
                owner=owner,
                given=filter_values(request.parameters),
            )

        export = await opened(asyncio.get_running_loop().run_in_executor(self._readers, made))
        turn = asyncio.Lock()
        try:
            while not await asyncio.shield(self._pieces.run(export.prepare, turn)):
                pass
        except BaseException:
            export.close()
            raise
        return OwnExport(export, lambda work: self._pieces.run(work, turn), lambda: self._reading.origins.names)

    def _check_owner(self, call: Call, export_id: str) -> None:
        """An export of another caller does not exist, and neither does one with more than the caller may read by now.
        Raises StoreError."""
        owner = self._exports.owner(export_id)
        if owner is not None and not call.owns(owner):
            raise not_found(export_id, NEVER_OPENED)
        export = self._exports.find(export_id)
        if call.unrestricted:
            call.require(export.topic.name)
            return
        if call.topic(export.topic.name).restriction not in (UNRESTRICTED, export.restriction):
            raise not_found(export_id, NOT_PERMITTED)

    def _described(self, export: ServedExport, lease_micros: int) -> snapshot_pb2.RenewExportResponse:
        topic = export.topic
        told = export.restriction.rows is None  # the figures count records that the caller may not see
        return snapshot_pb2.RenewExportResponse(
            lease_micros=lease_micros,
            topic=topic.name,
            bookmark=self._reading.instance.bookmark(export.sequence) if topic.settings.journal else "",
            as_of_micros=export.now_micros,
            parts=[snapshot_pb2.ExportPart(records=records if told else 0) for records in export.part_records],
        )

    async def ReadExport(self, request: snapshot_pb2.ReadExportRequest, call: Call) -> AsyncGenerator[bytes, None]:
        """Messages as bytes on the wire, made on the reader threads."""
        wanted = packing.columns(request.columns, packing.RECORD_COLUMNS)
        size = packing.batch_size(request.batch_size)
        fields = narrowing.fields(request.fields)
        _check_reader(request.reader)
        self._check_owner(call, request.export_id)
        with self._exports.reader(request.export_id, request.reader) as export:
            if request.part >= len(export.part_records):
                raise invalid("part", f"{request.part} is not below {len(export.part_records)}, the number of parts")
            begin = read_token(export.id, request.part, request.resume_token)
            reading = export.read(ReadPart(request.part, begin, wanted, size, request.lines, fields))
            try:
                while (answered := await self._next(export.id, reading)) is not None:
                    records, response = answered
                    with self._exports.handing_over(export.id, records):
                        yield response
                self._exports.ended(export.id, request.part)
                yield reading.footer()
            finally:
                reading.close()

    async def _next(self, export_id: str, reading: PartReading) -> tuple[int, bytes] | None:
        try:
            answered = await reading.next()
        except StoreError as error:
            if error.reason is Reason.EXPORT_NOT_FOUND:
                self._exports.find(export_id)  # raises the cause
            raise
        self._exports.find(export_id)  # it may have ended meanwhile
        return answered

    async def RenewExport(
        self, request: snapshot_pb2.RenewExportRequest, call: Call
    ) -> snapshot_pb2.RenewExportResponse:
        self._check_owner(call, request.export_id)
        return self._described(*self._exports.renew(request.export_id))

    async def CloseExport(
        self, request: snapshot_pb2.CloseExportRequest, call: Call
    ) -> snapshot_pb2.CloseExportResponse:
        owner = self._exports.owner(request.export_id)
        if owner is not None and call.owns(owner):  # else it is as if it had ended, which is no error
            self._exports.close(request.export_id)
        return snapshot_pb2.CloseExportResponse()


def _check_reader(name: str) -> None:
    if len(name) > READER_CHARACTERS_MAX:
        raise invalid("reader", f"has more than {READER_CHARACTERS_MAX} characters")
