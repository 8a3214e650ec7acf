"""The bare rocksdict batch: the puts of a publish, without the Python around them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from sow_server.engine.disk.rocks import EXPIRY, JOURNAL, RECORDS, Batch, Rocks
from sow_server.engine.stored import HEADER_BYTES, header, i64, u32

BATCH_RECORDS: Final = 1_000
JOURNAL_BYTES_PER_RECORD: Final = 32
"""Bytes of the journal's columns besides keys and payloads. Most columns are constant or count up."""
TOPIC: Final = u32(1)
_EXPIRE_TIME: Final = 1_900_000_000_000_000


class BareRocks:
    """A separate database; close it with `close`."""

    def __init__(self, directory: Path) -> None:
        """Creates it."""
        self._rocks = Rocks(directory, create=True)
        self._sequence = 0

    def put_rate(self, keys: Sequence[str], payloads: Sequence[bytes], *, new: bool, sync: bool) -> float:
        """Records per second. A batch of 1,000 has their records, one journal value, and for new keys their expiry
        entries, and on request a sync. The batches are made before the time is taken."""
        batches = [
            self._batch(keys[first : first + BATCH_RECORDS], payloads[first : first + BATCH_RECORDS], new=new)
            for first in range(0, len(keys), BATCH_RECORDS)
        ]
        begin = time.perf_counter()
        for batch in batches:
            self._rocks.write(batch)
            if sync:
                self._rocks.sync()
        return len(keys) / (time.perf_counter() - begin)

    def _batch(self, keys: Sequence[str], payloads: Sequence[bytes], *, new: bool) -> Batch:
        batch = Batch()
        records, expiry = batch.puts[RECORDS], batch.puts[EXPIRY]
        first = self._sequence
        for key, payload in zip(keys, payloads, strict=True):
            self._sequence += 1
            store_key = TOPIC + key.encode()
            records[store_key] = (
                header(
                    origin=1,
                    payload_bytes=len(payload),
                    version=_EXPIRE_TIME + self._sequence,
                    publish_time=_EXPIRE_TIME,
                    expire_time=_EXPIRE_TIME,
                    sequence=self._sequence,
                )
                + payload
            )
            if new:
                expiry[i64(_EXPIRE_TIME) + store_key] = b""
        columns = random.randbytes(JOURNAL_BYTES_PER_RECORD * len(keys))
        batch.puts[JOURNAL][TOPIC + i64(first)] = columns + "".join(keys).encode() + b"".join(payloads)
        return batch

    def scan_rate(self) -> float:
        """Records per second that a cursor alone reads."""
        return self._read_rate(lambda values: None)

    def decode_rate(self, decode: Callable[[bytes], object]) -> float:
        """Records per second that a cursor reads and `decode` decodes."""
        return self._read_rate(lambda values: [decode(value[HEADER_BYTES:]) for value in values])

    def _read_rate(self, use: Callable[[list[bytes]], object]) -> float:
        cursor = self._rocks.cursor(RECORDS, fill_cache=False)
        begin = time.perf_counter()
        count = 0
        following: bytes | None = TOPIC
        try:
            while following is not None:
                keys: list[bytes] = []
                values: list[bytes] = []
                following = cursor.fill(following, u32(2), BATCH_RECORDS, keys, values)
                use(values)
                count += len(keys)
        finally:
            cursor.close()
        return count / (time.perf_counter() - begin)

    def close(self) -> None:
        """Closes it."""
        self._rocks.close()


assert HEADER_BYTES == 40, "JOURNAL_BYTES_PER_RECORD was measured with this header"
