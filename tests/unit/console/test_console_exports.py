"""Files of records: what is in memory, and what is left where one breaks off."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import cast

import pytest

from sow_client import AsyncClient, Export, PackedRecords, TopicSettings, Unavailable
from sow_console import exports


class FakeExports:
    """A client with an export of three pieces."""

    def __init__(self, *, lost_after: int = 99) -> None:
        self.read = 0
        self.closed: list[str] = []
        self._lost_after = lost_after

    async def describe_topic(self, name: str) -> object:
        return SimpleNamespace(settings=TopicSettings())

    async def open_export(self, topic: str, filter: str | None, parameters: object, *, lease: str) -> Export:  # noqa: A002 - as it is
        return Export("x1", topic, None, datetime.now(UTC), timedelta(minutes=2), (2, 1))

    async def read_export(
        self, export_id: str, part: int, *, columns: Sequence[str], batch_size: int
    ) -> AsyncIterator[PackedRecords]:
        for number in range(2 - part):
            if self.read >= self._lost_after:
                raise Unavailable("lost", reason="STREAM_CUT")
            self.read += 1
            yield cast(PackedRecords, f"{part}.{number}{'*' if len(columns) > 1 else ''} ")

    async def close_export(self, export_id: str) -> None:
        self.closed.append(export_id)


class FakeFile:
    """A file whose pieces are texts."""

    def __init__(self, sink: io.BytesIO, *, looks: bool) -> None:
        self.looks = looks
        self.looked: list[str] = []
        self._sink = sink

    def look(self, packed: PackedRecords) -> None:
        self.looked.append(str(packed))

    def write(self, packed: PackedRecords) -> None:
        self._sink.write(str(packed).encode())

    def close(self) -> None:
        self._sink.write(b"end")


async def begun(client: FakeExports, *, looks: bool) -> tuple[FakeFile, AsyncIterator[bytes]]:
    made: list[FakeFile] = []

    def make(
        kind: exports.Kind, topic: str, settings: TopicSettings, columns: Sequence[str], sink: io.BytesIO
    ) -> FakeFile:
        made.append(FakeFile(sink, looks=looks))
        return made[-1]

    pieces = await exports.begun(cast(AsyncClient, client), make, "csv", "orders", "", ())
    return made[0], pieces


def test_a_piece_is_read_once_the_one_before_was_sent() -> None:
    async def run() -> None:
        client = FakeExports()
        _, pieces = await begun(client, looks=False)
        seen = [(piece, client.read) async for piece in pieces]
        assert seen == [(b"0.0* ", 1), (b"0.1* ", 2), (b"1.0* ", 3), (b"end", 3)]
        assert client.closed == ["x1"]

    asyncio.run(run())


def test_columns_are_learned_from_all_payloads_first() -> None:
    async def run() -> None:
        file, pieces = await begun(FakeExports(), looks=True)
        assert b"".join([piece async for piece in pieces]) == b"0.0* 0.1* 1.0* end"
        assert file.looked == ["0.0 ", "0.1 ", "1.0 "]

    asyncio.run(run())


def test_a_file_that_breaks_off_has_no_end_and_its_export_is_closed() -> None:
    async def run() -> None:
        client = FakeExports(lost_after=2)
        _, pieces = await begun(client, looks=False)
        seen = [await anext(pieces), await anext(pieces)]
        with pytest.raises(Unavailable):
            await anext(pieces)
        assert seen == [b"0.0* ", b"0.1* "]
        assert client.closed == ["x1"]

    asyncio.run(run())
