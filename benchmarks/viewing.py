"""A live view that comes back after an outage without changes, against a scan of its topic."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import grpc

from benchmarks.documents import documents
from benchmarks.followers import CHANNEL_OPTIONS
from benchmarks.processes import TOPIC, CpuMeter, SowServer
from benchmarks.publishing import publish
from benchmarks.querying import LOAD_CHUNK, query_rate
from benchmarks.rows import PER_SECOND, TIMES, Figure, Row, Target, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow.v1 import sow_pb2, sow_pb2_grpc
from sow_client import Client
from sow_client._live_view import LiveCore
from sow_client.errors import error_of_reason

SPEED: Final = Target(0.8, f"{TIMES} a scan")
BYTES: Final = Target(1.0, "%", at_least=False)
PERCENT: Final = "%"


def live_view(setting: Setting) -> Iterator[Row]:
    """The view is refused its position, as by another instance, and compares what it holds. Nothing has changed."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(7, quick=5)
    with ExitStack() as stack:
        # One process, so that its CPU time is that of either side.
        server = stack.enter_context(SowServer(setting.directory / "sow", server="reader_processes = 0"))
        client = stack.enter_context(Client(server.address))
        channel = stack.enter_context(grpc.insecure_channel(server.address, options=CHANNEL_OPTIONS))
        setting.say(f"loading {records:,} records")
        for first in range(0, records, LOAD_CHUNK):
            publish(client, documents(range(first, min(first + LOAD_CHUNK, records))), "buffered")
        viewer = _Viewer(channel)
        viewer.call()
        assert len(viewer.core.records) == records, "it holds the whole topic"
        whole = viewer.bytes
        meters = {name: CpuMeter(server) for name in ("view", "scan")}

        def come_back() -> float:
            begin = time.perf_counter()
            viewer.call()
            return records / (time.perf_counter() - begin)

        setting.say(f"{rounds} rounds")
        rates = take_turns(
            rounds,
            {
                "view": lambda: meters["view"].measured(records, come_back),
                "scan": lambda: meters["scan"].measured(records, lambda: query_rate(client, records)),
            },
        )
    spent = "; ".join(f"{name}: {meter}" for name, meter in meters.items())
    yield Row(
        f"back after no changes: {rounds} rounds of {records:,} records",
        Figure(statistics.median(rates["view"]), PER_SECOND),
        peer=Figure(statistics.median(rates["scan"]), PER_SECOND),
        judged=ratio(rates["view"], rates["scan"]),
        target=SPEED,
        note=f"{ratio_range(rates['view'], rates['scan'])}; {spent}",
    )
    share = Figure(viewer.bytes / whole * 100, PERCENT)
    yield Row(
        f"bytes in both directions: {viewer.bytes:,} of {whole:,}", share, judged=share, target=BYTES, note="exact"
    )


class _Viewer:
    """Owns a live view, without the threads of a client, and counts the bytes of its calls."""

    def __init__(self, channel: grpc.Channel) -> None:
        request = sow_pb2.SubscribeRequest(topic=TOPIC, sow=True, oof=True)
        self.core = LiveCore(request, retry_for=float("inf"), connect_timeout=5.0, tells=False)
        self.bytes = 0
        """The bytes of the messages of the last call, in both directions."""
        self._stub = sow_pb2_grpc.SowServiceStub(channel)

    def call(self) -> None:
        """A call, until the view is current, whose position then counts as refused."""
        request = self.core.request(now=0.0)
        self.core.hold(request)
        self.bytes = request.ByteSize()
        call = self._stub.Subscribe(request)
        for frame in call:
            self.core.feed(frame)
            self.bytes += frame.ByteSize()
            if self.core.current:
                break
        call.cancel()
        self.core.ended(error_of_reason("BOOKMARK_OTHER_EPOCH", "as of another instance"), now=0.0, jitter=0.0)
