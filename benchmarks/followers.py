"""Subscribers and a steady publisher: tasks on one event loop that call plain grpc.aio stubs.

[1]  A clock offers the load, not the answers: a server that falls behind is behind the schedule, and lags count
     from the schedule.
[2]  A follower keeps sequences, keys and moments of arrival. It decodes nothing while time is taken.
[3]  Every wait has a bound. The error that ended a subscription is raised in the waiting call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar

import grpc.aio

from benchmarks.documents import TTL_SECONDS
from benchmarks.processes import TOPIC
from benchmarks.rows import percentile
from sow.v1 import sow_pb2, sow_pb2_grpc, types_pb2

T = TypeVar("T")
Metadata: TypeAlias = tuple[tuple[str, str], ...]

MICROS: Final = 1_000_000
AT_ONCE_RECORDS: Final = 1_000
"""Records of a request when the load is as fast as the server accepts it."""
MANY: Final = 500
"""Number of followers in the cases with many."""
NOTHING: Final = "/symbol = 'none'"
"""A filter that no document of ours matches."""
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 20 * 2**20),
    ("grpc.max_send_message_length", 20 * 2**20),
    ("grpc.use_local_subchannel_pool", 1),  # a separate connection
)
STREAMS_PER_CHANNEL: Final = 100
"""The number of streams that most HTTP/2 servers and balancers allow on one connection."""
PROGRESS_MICROS: Final = 200_000
"""Interval of progress for a follower without changes. Progress shows the end of a load."""
STAND_SECONDS: Final = 60.0
REACH_SECONDS: Final = 60.0
SAMPLE_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Offered:
    """A published load: its sequences, and the due time of each of its ticks."""

    begun: float
    """`time.perf_counter` of the first tick."""
    seconds: float
    """From the first tick to the last acknowledgement."""
    records: int
    last_sequence: int
    per_tick: int
    tick_seconds: float

    @property
    def first_sequence(self) -> int:
        """Sequence of the first record. There are no other changes meanwhile, so sequences are consecutive."""
        return self.last_sequence - self.records + 1

    @property
    def rate(self) -> float:
        """Records acknowledged per second."""
        return self.records / self.seconds

    def at_a_peer(self, last_sequence: int) -> Offered:
        """The same load in the sequences of the instance that received it, and that has no other changes."""
        return replace(self, last_sequence=last_sequence)

    def due(self, sequence: int) -> float:
        """The due time of the record with that sequence, by `time.perf_counter`."""
        return self.begun + (sequence - self.first_sequence) // self.per_tick * self.tick_seconds


class Follower:
    """One subscription, and its received changes, in order."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[sow_pb2.SubscribeRequest, sow_pb2.SubscribeResponse]) -> None:
        self._call = call
        self._reading: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()
        self._position = 0
        self.sequences: list[int] = []
        self.keys: list[str] = []
        self._arrivals: list[tuple[float, int]] = []
        """A moment, and the number of changes received by then."""

    async def stand(self) -> None:
        """Waits until the subscription is established."""
        async with asyncio.timeout(STAND_SECONDS):
            first = await self._call.read()
        assert isinstance(first, sow_pb2.SubscribeResponse), "a subscription does not end by itself"
        assert first.WhichOneof("frame") == "progress", f"the first frame is {first.WhichOneof('frame')}"

    def read_all(self) -> None:
        """Reads all messages from now on. Within `Followers.run`."""
        self._reading = asyncio.create_task(self._read())

    async def next_change(self) -> float:
        """Reads until a change has come, for a subscription that is not reading. Returns the moment of its arrival."""
        while True:
            frame = await self._call.read()
            moment = time.perf_counter()
            assert isinstance(frame, sow_pb2.SubscribeResponse), "a subscription does not end by itself"
            if frame.WhichOneof("frame") == "changes":
                return moment

    async def _read(self) -> None:
        try:
            while isinstance(frame := await self._call.read(), sow_pb2.SubscribeResponse):
                if frame.WhichOneof("frame") == "changes":
                    records = frame.changes.records
                    self.sequences += records.sequence
                    self.keys += records.key
                    self._arrivals.append((time.perf_counter(), len(self.keys)))
                    self._position = self.sequences[-1]
                else:
                    self._position = sequence_of(frame.progress.bookmark)
                self._heard.set()
        finally:
            self._heard.set()

    async def reach(self, sequence: int) -> None:
        """Waits until everything up to that sequence has been received."""
        await self._until(lambda: self._position >= sequence)

    async def receive(self, count: int) -> None:
        """Waits until this number of changes has come."""
        await self._until(lambda: len(self.keys) >= count)

    async def _until(self, holds: Callable[[], bool]) -> None:
        assert self._reading is not None, "it is not reading"
        async with asyncio.timeout(REACH_SECONDS):
            while not holds():
                if self._reading.done():
                    await self._reading  # raises the error that ended it
                    raise AssertionError("the subscription has ended without an error")
                self._heard.clear()
                await self._heard.wait()

    async def catch_up(self, sequence: int) -> None:
        """Reads until everything up to that sequence has been received."""
        self.read_all()
        await self.reach(sequence)

    def lags_milliseconds(self, offered: Offered) -> list[float]:
        """The delay of each change of that load after its due time."""
        lags: list[float] = []
        at = 0
        for moment, count in self._arrivals:
            lags += [
                (moment - offered.due(sequence)) * 1000
                for sequence in self.sequences[at:count]
                if sequence >= offered.first_sequence
            ]
            at = count
        return lags

    def forget(self) -> None:
        """Drops the changes received so far."""
        self.sequences, self.keys, self._arrivals = [], [], []

    async def close(self) -> None:
        """Ends the subscription."""
        self._call.cancel()
        if self._reading is not None:
            await asyncio.wait([self._reading])


class Followers:
    """Owns an event loop, the connections on it, and the subscriptions over them. Its callers are not asynchronous."""

    def __init__(
        self,
        address: str,
        *,
        publish_to: str = "",
        metadata: Metadata = (),
        publishing: Metadata = (),
        runner: asyncio.Runner | None = None,
    ) -> None:
        """Subscriptions are at the server of `address`. Loads are published there, too, or to `publish_to`.

        `metadata`: of subscriptions, such as a token; `publishing`: of publishes. `runner`: an event
        loop that is another one's.
        """
        self._address = address
        self._publish_to = publish_to or address
        self._metadata = metadata
        self._publishing = publishing
        self._owns_runner = runner is None
        self._runner = runner or asyncio.Runner()
        self._channels: list[grpc.aio.Channel] = []
        self.followers: list[Follower] = []
        """Those that are subscribed."""
        self._publisher: sow_pb2_grpc.SowServiceAsyncStub | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run(self._close())
        finally:
            if self._owns_runner:
                self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the loop until `work` is done."""
        return self._runner.run(work)

    def subscribe(
        self, filters: Sequence[str], *, progress_micros: int = PROGRESS_MICROS, reading: bool = True
    ) -> list[Follower]:
        """One established subscription for each filter. Without `reading` they do not read their messages."""
        return self.run(self._subscribe(filters, progress_micros, reading=reading))

    def unsubscribe(self, followers: Sequence[Follower]) -> None:
        """Ends these subscriptions."""
        self.run(self._unsubscribe(followers))

    def publisher(self) -> sow_pb2_grpc.SowServiceAsyncStub:
        """Calls over a separate connection. Within `run`."""
        if self._publisher is None:
            self._publisher = self._stub(self._publish_to)
        return self._publisher

    def publish(
        self,
        payloads: Sequence[bytes],
        *,
        per_tick: int,
        tick_seconds: float,
        durability: types_pb2.Durability.ValueType = types_pb2.DURABILITY_UNSPECIFIED,
        until: Sequence[Follower] = (),
        meanwhile: Callable[[], object] | None = None,
    ) -> Offered:
        """Publishes `per_tick` documents every tick over one stream, with ticks of 0 s as fast as the server accepts
        them. Then waits until the followers `until` have received everything. Calls `meanwhile` every
        `SAMPLE_SECONDS`."""

        async def work() -> Offered:
            offered = await _offer(self.publisher(), payloads, per_tick, tick_seconds, durability, self._publishing)
            for follower in until:
                await follower.reach(offered.last_sequence)
            return offered

        async def watched() -> Offered:
            working = asyncio.create_task(work())
            while not working.done():
                if meanwhile is not None:
                    meanwhile()
                await asyncio.wait([working], timeout=SAMPLE_SECONDS)
            return await working

        return self.run(watched())

    def _stub(self, address: str) -> sow_pb2_grpc.SowServiceAsyncStub:
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._channels.append(channel)
        return sow_pb2_grpc.SowServiceStub(channel)

    async def _subscribe(self, filters: Sequence[str], progress_micros: int, *, reading: bool) -> list[Follower]:
        followers: list[Follower] = []
        for first in range(0, len(filters), STREAMS_PER_CHANNEL):
            stub = self._stub(self._address)
            for text in filters[first : first + STREAMS_PER_CHANNEL]:
                request = sow_pb2.SubscribeRequest(topic=TOPIC, filter=text, progress_micros=progress_micros)
                followers.append(Follower(stub.Subscribe(request, metadata=self._metadata)))
        self.followers += followers
        await asyncio.gather(*(follower.stand() for follower in followers))
        if reading:
            for follower in followers:
                follower.read_all()
        return followers

    async def _unsubscribe(self, followers: Sequence[Follower]) -> None:
        await asyncio.gather(*(follower.close() for follower in followers))
        self.followers = [follower for follower in self.followers if follower not in followers]

    async def _close(self) -> None:
        await self._unsubscribe(self.followers)
        for channel in self._channels:
            await channel.close()


async def _offer(
    stub: sow_pb2_grpc.SowServiceAsyncStub,
    payloads: Sequence[bytes],
    per_tick: int,
    tick_seconds: float,
    durability: types_pb2.Durability.ValueType,
    metadata: Metadata,
) -> Offered:
    call = stub.PublishStream(metadata=metadata)
    applied = last_sequence = 0
    ended = 0.0

    async def read_answers() -> None:
        nonlocal applied, last_sequence, ended
        while isinstance(answer := await call.read(), sow_pb2.PublishStreamResponse):
            assert not answer.refusals, f"a publish was refused: {answer.refusals[0].message}"
            applied += answer.applied
            last_sequence = answer.last_sequence
            ended = time.perf_counter()

    reading = asyncio.create_task(read_answers())
    begun = time.perf_counter()
    try:
        for tick, first in enumerate(range(0, len(payloads), per_tick)):
            await asyncio.sleep(max(0.0, begun + tick * tick_seconds - time.perf_counter()))
            await call.write(
                sow_pb2.PublishStreamRequest(
                    topic=TOPIC,
                    payload=payloads[first : first + per_tick],
                    lifetime=types_pb2.Lifetime(ttl_micros=TTL_SECONDS * MICROS),
                    durability=durability,
                )
            )
        await call.done_writing()
        await reading
    finally:
        reading.cancel()
    assert applied == len(payloads), f"{applied} of {len(payloads)} were applied"
    return Offered(begun, ended - begun, applied, last_sequence, per_tick, tick_seconds)


def sequence_of(bookmark: str) -> int:
    """The sequence in a bookmark."""
    return int(bookmark.rpartition(".")[2])


def lag_percentiles(lags: Sequence[float]) -> str:
    """For a note."""
    return f"p50 {percentile(lags, 0.5):.1f}, p99 {percentile(lags, 0.99):.1f}, greatest {max(lags):.1f} ms"
