"""Files of records for the browser: streamed as they are read, from one instant of the server (rule Q6).

[1]  At most one piece of records is in memory for each file; it is made and sent before the next one is read.
[2]  A file that cannot be completed breaks off without its end, so that the browser calls the download failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias, cast

from sow_client import AsyncClient, Export, PackedColumn, PackedRecords, SowError, TopicSettings
from sow_client._parameters import Parameters

Kind: TypeAlias = Literal["ndjson", "csv", "parquet"]
KINDS: Final[Mapping[str, str]] = {
    "ndjson": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}
"""The types of the answers."""
PIECE_RECORDS: Final = 20_000
"""Records of a message, and of a row group of Parquet."""
LEASE: Final = "2m"
"""An export that a lost browser leaves behind ends by itself after this."""
COLUMNS: Final[Sequence[PackedColumn]] = (
    "payload", "key", "version", "publish_time", "expire_time", "origin", "sequence",
)  # fmt: skip


class RecordFile(Protocol):
    """A file that is written piece by piece. Where `looks`, it looks at all records first."""

    looks: bool

    def look(self, packed: PackedRecords, /) -> None:
        """Learns the columns of some payloads."""

    def write(self, packed: PackedRecords, /) -> None:
        """Writes some records to the sink."""

    def close(self) -> None:
        """Writes the end."""


MakeFile: TypeAlias = Callable[[Kind, str, TopicSettings, Sequence[str], io.BytesIO], RecordFile]
"""Makes the file of a topic with these settings: its columns (none: all), and its sink. Raises ValueError where a
column is none."""


@dataclass(frozen=True, slots=True)
class Files:
    """The kinds of files that the console can make."""

    make: MakeFile
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why some kinds are not there."""


async def begun(
    client: AsyncClient,
    make: MakeFile,
    kind: Kind,
    topic: str,
    filter_text: str,
    columns: Sequence[str],
    parameters: Parameters | None = None,
) -> AsyncGenerator[bytes, None]:
    """The file, piece by piece. Raises SowError and ValueError at once where there is none to begin."""
    sink = io.BytesIO()
    settings = (await client.describe_topic(topic)).settings
    file = make(kind, topic, settings, columns, sink)
    opened = await client.open_export(topic, filter_text or None, parameters, lease=LEASE)
    return _pieces(client, opened, file, sink)


async def _pieces(
    client: AsyncClient, opened: Export, file: RecordFile, sink: io.BytesIO
) -> AsyncGenerator[bytes, None]:
    try:
        if file.looks:
            async with contextlib.aclosing(_read(client, opened, ("payload",))) as read:
                async for packed in read:
                    await asyncio.to_thread(file.look, packed)  # other people's pages go on meanwhile
        async with contextlib.aclosing(_read(client, opened, COLUMNS)) as read:
            async for packed in read:
                await asyncio.to_thread(file.write, packed)
                yield _taken(sink)
        await asyncio.to_thread(file.close)
        yield _taken(sink)
    finally:
        with contextlib.suppress(SowError):
            await client.close_export(opened.id)


async def _read(
    client: AsyncClient, opened: Export, columns: Sequence[PackedColumn]
) -> AsyncGenerator[PackedRecords, None]:
    for part in range(len(opened.parts)):
        reading = client.read_export(opened.id, part, columns=columns, batch_size=PIECE_RECORDS)
        async with contextlib.aclosing(cast("AsyncGenerator[PackedRecords, None]", reading)) as pieces:
            async for packed in pieces:
                yield packed


def _taken(sink: io.BytesIO) -> bytes:
    made = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return made
