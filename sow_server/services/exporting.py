"""Exports: their messages, the same in the server's process and in a reader process; and those that this process reads.

[1]  One piece of work is done ahead: while the records of one piece are sent, the next one is read.
[2]  The pieces of all readings of an export take turns, and are never cancelled: they use its cursor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from sow.v1 import snapshot_pb2
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.reading import CutSource
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import MessageType
from sow_server.filters.parameters import NO_VALUES, Values
from sow_server.filters.restriction import Restriction
from sow_server.query.export_parts import Chosen, Export
from sow_server.query.export_splits import SplitCache
from sow_server.query.export_tokens import write_token
from sow_server.query.exports import LeasedExport
from sow_server.query.filtering import callers_filter
from sow_server.services.wire import packing
from sow_server.services.wire.narrowing import narrower

T = TypeVar("T")


class ReadPart(NamedTuple):
    """A request to read a part of an export."""

    part: int
    begin: bytes
    """The record key to read from."""
    columns: frozenset[int]
    batch_size: int
    lines: bool
    """True if each payload is followed by a line feed."""
    fields: tuple[str, ...] = ()
    """The fields that the reader needs of JSON documents; empty: all."""


class PartReading(Protocol):
    """A part of an export as it is read, message by message."""

    async def next(self) -> tuple[int, bytes] | None:
        """The next message, and the number of records in it; None: there are no more. Raises StoreError."""

    def footer(self) -> bytes:
        """The last message, after all others."""

    def close(self) -> None:
        """Nobody reads on."""


class ServedExport(LeasedExport, Protocol):
    """An open export, in this process or in a reader process."""

    @property
    def sequence(self) -> int:
        """The last commit that its cut shows."""

    @property
    def now_micros(self) -> int:
        """The `now` of its cut."""

    @property
    def restrictions(self) -> Sequence[Restriction]:
        """The part of each topic that its owner may see."""

    def read(self, asked: ReadPart) -> PartReading:
        """Reads a part."""


class Asked(NamedTuple):
    """A topic of an export, as it was asked for."""

    topic: Topic
    restriction: Restriction
    """The part of it that the caller may see."""
    text: str
    """The caller's filter."""
    parts: int
    given: Values = NO_VALUES
    """The values of the filter's parameters."""


def export_of(cuts: CutSource, asked: Sequence[Asked], splits: SplitCache, *, owner: str) -> Export:
    """The export of a request; it is to be prepared. Raises StoreError."""
    return Export(cuts, [_chosen(at, one) for at, one in enumerate(asked)], splits, owner=owner)


def _chosen(at: int, asked: Asked) -> Chosen:
    """`at`: the place of the topic in the request."""
    topic, restriction, text, parts, given = asked
    try:
        return Chosen(topic, callers_filter(topic, text, restriction, given=given), parts, restriction)
    except StoreError as error:
        raise error if at == 0 else of_other(at, error, f"topic {topic.name}: ") from None


def of_other(at: int, error: StoreError, told: str = "") -> StoreError:
    """The error of a field of an export's request, as that of the same field of one of the other topics. `told` stands
    before its message."""
    place = f"others[{at - 1}]."
    return StoreError(
        error.reason,
        told + place + error.message,
        field=place + error.field,
        retry_after_micros=error.retry_after_micros,
        details=error.details,
    )


class PartAnswer:
    """The messages of one reading of a part. Its steps run on one thread at a time."""

    def __init__(self, export: Export, asked: ReadPart) -> None:
        self._export_id = export.id
        self._asked = asked
        self._share, _ = export.find_part(asked.part)
        self._json = self._share.topic.settings.message_type is MessageType.JSON
        self._narrow = narrower(asked.fields) if self._json else None
        self._reading = export.reading(asked.part, asked.begin, keys_wanted=packing.KEY in asked.columns)

    def step(self, origins: Sequence[str]) -> tuple[int, bytes] | None:
        """Does a piece of work: the number of records that it found, and their message, which is empty if there are
        none; None: there are no more. Raises StoreError once the export has ended."""
        asked = self._asked
        piece = self._reading.step(asked.batch_size)
        if piece is None:
            return None
        if not piece.values:
            return 0, b""
        token = write_token(self._export_id, asked.part, piece.position)
        response = snapshot_pb2.ReadExportResponse(resume_token=token)
        packing.fill_records(
            response.batch,
            piece.keys,
            piece.values,
            asked.columns,
            origins,
            lines=asked.lines,
            json=self._json,
            project=self._share.project,
            narrow=self._narrow,
        )
        return len(piece.values), response.SerializeToString()

    def footer(self) -> bytes:
        """The last message, after all others."""
        returned = self._reading.returned
        scanned = returned if self._share.granted is not None else self._reading.scanned
        footer = snapshot_pb2.ExportFooter(returned=returned, scanned=scanned, absent_fields=self._share.absent.paths)
        return snapshot_pb2.ReadExportResponse(footer=footer).SerializeToString()


class LongExports(Protocol):
    """Opens exports in reader processes."""

    async def open_export(
        self,
        asked: Sequence[Asked],
        *,
        owner: str,
        lost: Callable[[str], None],
    ) -> ServedExport | None:
        """Opens an export. `lost` is called with its id when its process is lost. None: no
        reader process can open it now. Raises StoreError."""


class RunPiece(Protocol):
    """Runs a piece of work on a reader thread, when it is its turn [2]."""

    def __call__(self, run: Callable[[], T]) -> asyncio.Task[T]: ...


class OwnExport:
    """An export that this process reads."""

    def __init__(self, export: Export, run: RunPiece, origins: Callable[[], Sequence[str]]) -> None:
        """`export`: is prepared. `origins`: the names of the instances that wrote the records, by number."""
        self._export = export
        self._run = run
        self._origins = origins
        self.id: Final = export.id
        self.owner: Final = export.owner
        self.topics: Final = export.topics
        self.sequence: Final = export.sequence
        self.now_micros: Final = export.now_micros
        self.restrictions: Final = export.restrictions
        self.parts: Final = export.parts

    def read(self, asked: ReadPart) -> _OwnReading:
        """Reads a part."""
        answer, origins = PartAnswer(self._export, asked), self._origins
        return _OwnReading(answer, lambda: self._run(lambda: answer.step(origins())))

    def close(self) -> None:
        """Releases the cut once nobody uses it. May be called again."""
        self._export.close()


class _OwnReading:
    """A reading of a part, one piece ahead [1]."""

    def __init__(self, answer: PartAnswer, step: Callable[[], asyncio.Task[tuple[int, bytes] | None]]) -> None:
        self._answer = answer
        self._step = step
        self._ahead = step()

    async def next(self) -> tuple[int, bytes] | None:
        """The next message, and the number of records in it; None: there are no more. Raises StoreError."""
        while True:
            answered = await asyncio.shield(self._ahead)
            if answered is None:
                return None
            self._ahead = self._step()
            if answered[0]:
                return answered

    def footer(self) -> bytes:
        """The last message, after all others."""
        return self._answer.footer()

    def close(self) -> None:
        """The piece under way is finished all the same."""
