"""A publisher of single records, one durable call after the other, and the effect of other work on it."""

from __future__ import annotations

import time
from typing import Final

import grpc

from benchmarks.documents import TTL_SECONDS, document
from benchmarks.processes import TOPIC
from sow.v1 import sow_pb2, sow_pb2_grpc, types_pb2

PUBLISH_PAUSE_SECONDS: Final = 0.005
"""The pause between calls: about 150 calls a second, so that the server always counts as busy."""
CALL_SECONDS: Final = 30
MICROS: Final = 1_000_000


class SinglePublisher:
    """One durable publish after the other, with a short pause, under its own keys."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = sow_pb2_grpc.SowServiceStub(channel)
        self._number = 1_000_000_000
        self.sequence = 0
        """Journal sequence of the last publish."""

    def run(self, *, until: float, expired_after: tuple[int, int] | None = None) -> list[float]:
        """Publishes until the time is over. Returns the milliseconds of each call.

        `expired_after`, a sequence and a number of records, ends it once this number has expired since the sequence.
        Every expiry takes a sequence, as every publish does, so the answers show this without cost. Reading the
        metrics would cost time, because they count the overdue records.
        """
        milliseconds: list[float] = []
        while time.time() < until:
            self._number += 1
            request = sow_pb2.PublishRequest(
                topic=TOPIC,
                records=[sow_pb2.PublishRecord(payload=document(self._number))],
                lifetime=types_pb2.Lifetime(ttl_micros=TTL_SECONDS * MICROS),
                durability=types_pb2.DURABILITY_FSYNC,
            )
            begin = time.perf_counter()
            answer = self._stub.Publish(request, timeout=CALL_SECONDS)
            milliseconds.append((time.perf_counter() - begin) * 1000)
            self.sequence = answer.results[0].sequence
            if expired_after is not None and self.sequence - expired_after[0] >= expired_after[1] + len(milliseconds):
                break
            time.sleep(PUBLISH_PAUSE_SECONDS)
        return milliseconds
