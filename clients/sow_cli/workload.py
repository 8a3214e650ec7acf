"""The work of `sow bench`: what is asked of the server, and what it took.

[1]  Works only on topics that it has created. A topic that exists is refused by the server, and stays as it is. A
     topic counts as created, too, if there was none before, the answer of creating it was lost, and it has no records.
[2]  Leaving the `with` block deletes these topics, however it is left.
[3]  Latencies are measured at the client: from handing over to the acknowledgement, from the call to its answer,
     from the publish to the delivery, from the expire time to the notice.
[4]  The CPU time is the server's, over all that the work made it do, background compaction included.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Self

import msgspec

from sow_cli.bench_plan import SEED, Documents, Plan, Work
from sow_cli.server_usage import Meter, Usage
from sow_client import (
    Ack,
    AsyncClient,
    AsyncSubscription,
    Client,
    DeadlineExceeded,
    NotFound,
    Published,
    SowError,
    Unavailable,
)

BATCH_RECORDS: Final = 1_000
DELIVERED_TOGETHER: Final = 100
"""Records of one publish while deliveries are measured."""
FOLLOWERS_PER_CONNECTION: Final = 100
EXPIRIES_PER_SECOND: Final = 5_000
NOTICED: Final = 20
"""One record in so many is waited for by a subscriber, when it expires."""
_QUIET_SHARE: Final = 0.05
"""A server that takes less than this share of a core does nothing."""
_LOOK_SECONDS: Final = 0.25
_QUIET_SECONDS_MAX: Final = 15.0
"""Others may keep the server busy."""
_LATE_TRIES: Final = 3
_PATIENCE_SECONDS: Final = 60.0
"""The wait for deliveries and expiries that are late."""
_TTL_KIND: Final = 2  # sow.v1.LifetimeKind: an expire time


class BenchFailed(Exception):
    """The server did not do what was asked of it, without an error of its own."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one work."""

    work: Work
    operations: int
    seconds: float
    latencies: Sequence[float]
    """Seconds, sorted."""
    cpu_seconds: float | None
    memory_bytes: int | None
    disk_bytes: int | None = None
    """The disk space of the whole server. None: the caller may not see it."""

    @property
    def per_second(self) -> float:
        return self.operations / self.seconds

    @property
    def cpu_micros(self) -> float | None:
        """The server's CPU time of one operation."""
        return None if self.cpu_seconds is None else self.cpu_seconds / self.operations * 1e6

    def latency(self, share: float) -> float:
        """The seconds that `share` of the samples do not exceed."""
        return self.latencies[max(0, -(-int(share * 1000) * len(self.latencies) // 1000) - 1)]


class Workload:
    """Owns the topics of a run. Use it in a `with` block [2]."""

    def __init__(
        self,
        client: Client,
        follower: Callable[[], AsyncClient],
        plan: Plan,
        meter: Meter,
        left: Callable[[str, SowError], object],
        runner: asyncio.Runner,
    ) -> None:
        """`follower` makes a connection of subscribers. `left` is told the topics that could not be deleted.

        `runner` has the event loop of the subscribers, one for all workloads of a process: gRPC goes on to use the
        first loop that it has met.
        """
        self._client = client
        self._follower = follower
        self._plan = plan
        self._meter = meter
        self._left = left
        self._runner = runner
        self._documents = Documents(plan)
        self._created: list[str] = []
        self._doubtful: list[str] = []
        """Topics that were not there, and may have been created [1]."""
        self._chance = random.Random(SEED)
        self._revisions = itertools.count(1)
        self._publishes_per_second = 0.0

    def __enter__(self) -> Self:
        try:
            for name in self._plan.names:
                self._create(name)
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._delete()

    def _create(self, name: str) -> None:
        if self._is_missing(name):
            self._doubtful.append(name)
        try:
            self._client.create_topic(name, key=("/id",), expiration="enabled", index=tuple(self._plan.index_paths))
        except SowError as error:
            if not isinstance(error, Unavailable | DeadlineExceeded):
                self._doubtful.clear()  # it was refused
            raise
        self._doubtful.clear()
        self._created.append(name)

    def _is_missing(self, name: str) -> bool:
        """False: there is such a topic, or the caller may not know."""
        try:
            self._client.describe_topic(name)
        except NotFound:
            return True
        except SowError as error:
            if error.reason != "PERMISSION_DENIED":
                raise
        return False

    def _delete(self) -> None:
        while self._doubtful:
            name = self._doubtful.pop()
            try:
                figures = self._client.describe_topic(name).statistics
                if figures is not None and not figures.live_records:
                    self._created.append(name)
            except NotFound:
                pass  # it was not created
            except SowError as error:
                self._left(name, error)
        while self._created:
            name = self._created.pop()
            try:
                self._client.delete_topic(name, force=True)
            except SowError as error:
                self._left(name, error)

    def run(self, work: Work) -> Measured:
        """Does one work. `publish` comes first: the others need its records."""
        does: Mapping[Work, Callable[[], _Done]] = {
            "publish": self._publish,
            "update": self._update,
            "single": self._single,
            "get": self._get,
            "query": self._query,
            "index": self._index,
            "deliver": lambda: self._runner.run(self._deliver()),
            "expire": self._expire,
        }
        before = self._meter.read()
        done = does[work]()
        if work in ("publish", "update") and before is not None and (after := self._settled()) is not None:
            done.used = replace(done.used, cpu_seconds=after.cpu_seconds - before.cpu_seconds)
        if not done.operations:
            raise BenchFailed(f"{work}: nothing was done within {self._plan.seconds:g} s")
        disk_bytes = None
        try:
            disk_bytes = self._client.status().disk_bytes
        except SowError as error:
            if error.reason != "PERMISSION_DENIED":
                raise
        cpu_seconds = done.used.cpu_seconds
        return Measured(
            work,
            done.operations,
            max(done.used.seconds, 1e-9),
            sorted(done.latencies),
            cpu_seconds,
            done.used.memory_bytes,
            disk_bytes,
        )

    def _settled(self) -> Usage | None:
        """The use once the server does nothing any more [4]."""
        before, quiet = self._meter.read(), 0
        give_up = time.perf_counter() + _QUIET_SECONDS_MAX
        while before is not None and quiet < 2 and time.perf_counter() < give_up:
            time.sleep(_LOOK_SECONDS)
            after = self._meter.read()
            if after is None:
                return None
            spent = after.cpu_seconds - before.cpu_seconds
            quiet, before = quiet + 1 if spent < _QUIET_SHARE * _LOOK_SECONDS else 0, after
        return before

    # ---- writing ----

    def _publish(self) -> _Done:
        done = self._stream(self._chunks(range(self._plan.records)))
        self._publishes_per_second = done.operations / done.used.seconds
        return done

    def _update(self) -> _Done:
        """Random records get other values, in every indexed field, too."""
        population = range(self._plan.records)
        end = time.perf_counter() + self._plan.seconds

        def chunks() -> Iterator[tuple[int, list[bytes]]]:
            for number in itertools.count():
                if number and time.perf_counter() > end:
                    return
                of_topic = population[number % self._plan.topics :: self._plan.topics]
                chosen = self._chance.choices(of_topic or population, k=min(BATCH_RECORDS, len(population)))
                yield number % self._plan.topics, self._documents.make(chosen, next(self._revisions))

        return self._stream(chunks())

    def _chunks(self, numbers: range) -> Iterator[tuple[int, list[bytes]]]:
        """The records by topics, in turns: record n is in topic n modulo the number of topics."""
        topics = self._plan.topics
        for first in range(numbers.start, numbers.stop, BATCH_RECORDS * topics):
            for topic in range(topics):
                of_topic = range(first + topic, min(first + BATCH_RECORDS * topics, numbers.stop), topics)
                if of_topic:
                    yield topic, self._documents.make(of_topic)

    def _stream(
        self, chunks: Iterator[tuple[int, list[bytes]]], expire_times: Callable[[int], Sequence[int]] | None = None
    ) -> _Done:
        """Publishes chunks through one publisher for each topic. A latency is that of a chunk, from handing it over to
        the acknowledgement of its last record. `expire_times`: of the next so many records."""
        done = _Done()
        with ExitStack() as stack:
            streams = []
            for name in self._plan.names:
                handed = _Handed(done.latencies)
                publisher = stack.enter_context(
                    self._client.publisher(
                        name,
                        ttl=self._plan.ttl if expire_times is None else None,
                        durability=self._plan.durability,
                        batch_records=BATCH_RECORDS,
                        on_ack=handed.acknowledged,
                    )
                )
                streams.append((publisher, handed))
            with self._used(done):
                for topic, payloads in chunks:
                    publisher, handed = streams[topic]
                    handed.over(len(payloads))
                    if expire_times is None:
                        publisher.publish_columns(payloads)
                    else:
                        publisher.publish_columns(
                            payloads,
                            lifetime_kinds=[_TTL_KIND] * len(payloads),
                            lifetime_micros=expire_times(len(payloads)),
                        )
                    done.operations += len(payloads)
                for publisher, _ in streams:
                    publisher.flush()
        return done

    def _single(self) -> _Done:
        def call(number: int) -> None:
            (payload,) = self._documents.make([number], next(self._revisions))
            self._client.publish(self._topic(number), payload, ttl=self._plan.ttl, durability=self._plan.durability)

        return self._calls(call)

    # ---- reading ----

    def _get(self) -> _Done:
        def call(number: int) -> None:
            if self._client.get(self._topic(number), str(number)) is None:
                raise BenchFailed(f"get: {self._topic(number)} has no record {number}")

        return self._calls(call)

    def _index(self) -> _Done:
        """Equality on an index. Updates may have changed the values, so the number of records is about SAME_VALUE."""

        def call(number: int) -> None:
            condition = f"{self._plan.index_paths[0]} = {self._documents.value(number)}"
            for _ in self._client.query(self._topic(number), condition).batches():
                pass

        return self._calls(call)

    def _query(self) -> _Done:
        """Whole topics, one after the other. A latency is that of a query."""
        done = _Done()
        end = time.perf_counter() + self._plan.seconds
        with self._used(done):
            for name in itertools.cycle(self._plan.names):
                begin = time.perf_counter()
                done.operations += sum(len(batch) for batch in self._client.query(name).batches())
                done.latencies.append(time.perf_counter() - begin)
                if time.perf_counter() > end:
                    return done
        raise AssertionError("a cycle does not end")

    def _calls(self, call: Callable[[int], None]) -> _Done:
        """One call after the other, each about a random record."""
        done = _Done()
        end = time.perf_counter() + self._plan.seconds
        with self._used(done):
            while (begin := time.perf_counter()) < end:
                call(self._chance.randrange(self._plan.records))
                done.latencies.append(time.perf_counter() - begin)
                done.operations += 1
        return done

    def _topic(self, number: int) -> str:
        return self._plan.names[number % self._plan.topics]

    # ---- following ----

    async def _deliver(self) -> _Done:
        """Publishes some records, waits until they have been delivered, and so on. A latency is that of a delivery,
        from the publish; the CPU time is that of publishing and of delivering."""
        plan, done = self._plan, _Done()
        of_topic = [range(topic, plan.subscribers, plan.topics) for topic in range(plan.topics)]
        followers = _Followers(done.latencies)

        async def read(subscription: AsyncSubscription) -> None:
            async for change in subscription:
                if change.record is not None:
                    published = msgspec.json.decode(change.record.payload, type=_Published).at
                    followers.arrived((time.perf_counter_ns() - published) / 1e9)

        async with AsyncExitStack() as stack:
            stack.callback(followers.end)
            publisher = await stack.enter_async_context(self._follower())
            client = publisher
            for number in range(plan.subscribers):
                if number % FOLLOWERS_PER_CONNECTION == 0:
                    client = await stack.enter_async_context(self._follower())
                condition = None if plan.follow_all else f"/p = {number}"
                subscription = client.subscribe(plan.names[number % plan.topics], condition)
                followers.start(read(await stack.enter_async_context(subscription)))
            wanted = 0
            end = time.perf_counter() + plan.seconds
            with self._used(done):
                for turn in itertools.count():
                    if turn and time.perf_counter() > end:
                        break
                    topic = turn % min(plan.topics, plan.subscribers)
                    wanted += DELIVERED_TOGETHER * (len(of_topic[topic]) if plan.follow_all else 1)
                    outcomes = await publisher.publish_many(
                        plan.names[topic],
                        [self._delivered(topic, of_topic[topic], turn) for _ in range(DELIVERED_TOGETHER)],
                        ttl=plan.ttl,
                        durability=plan.durability,
                        refusals="return",
                    )
                    refused = next((one for one in outcomes if not isinstance(one, Published)), None)
                    if refused is not None:
                        raise BenchFailed(f"deliver: {refused}")
                    await followers.until(wanted, _PATIENCE_SECONDS, "deliver: some changes did not arrive")
        done.operations = len(done.latencies)
        return done

    def _delivered(self, topic: int, followers: range, revision: int) -> bytes:
        """A record that tells the time of its publish, for one of the followers."""
        of_topic = range(topic, self._plan.records, self._plan.topics) or range(topic, topic + 1)
        more = b',"p":%d,"at":%d' % (self._chance.choice(followers), time.perf_counter_ns())
        return self._documents.make([self._chance.choice(of_topic)], revision, more=more)[0]

    def _expire(self) -> _Done:
        """Records that fall due at a steady pace. A latency is the time from the expire time to the notice of a
        subscriber; the clock of the server is taken from an answer of it."""
        plan = self._plan
        first, count = plan.records, max(NOTICED, round(EXPIRIES_PER_SECOND * plan.seconds))
        began = time.time()
        stamped = self._client.publish(
            plan.names[0], self._documents.make([0])[0], ttl="1h", durability=plan.durability
        ).expire_time_micros
        ahead = 0.0 if stamped is None else stamped / 1e6 - 3_600 - (began + time.time()) / 2
        spare = 2 + 2 * count / (self._publishes_per_second or EXPIRIES_PER_SECOND)
        for attempt in range(1, _LATE_TRIES + 1):
            if (done := self._runner.run(self._fall_due(first, count, attempt, spare, ahead))) is not None:
                return done
            spare *= 3
        raise BenchFailed("expire: the records were not published before they fell due; is the server busy?")

    async def _fall_due(self, first: int, count: int, attempt: int, spare: float, ahead: float) -> _Done | None:
        """Publishes records that fall due from `spare` seconds on, and waits for their expiry. None: that was too late.
        `ahead`: how far the clock of the server is."""
        plan, done = self._plan, _Done()
        followers = _Followers(done.latencies)
        noted = b',"n":%d' % attempt  # the records of an earlier attempt fall due meanwhile

        def chunks() -> Iterator[tuple[int, list[bytes]]]:
            for start in range(0, count, BATCH_RECORDS):
                numbers = range(first + start, first + min(start + BATCH_RECORDS, count))
                plain = self._documents.make(numbers)
                plain[::NOTICED] = self._documents.make(numbers[::NOTICED], more=noted)
                yield start // BATCH_RECORDS % plan.topics, plain

        async def read(subscription: AsyncSubscription) -> None:
            async for change in subscription:
                gone = change.previous
                if change.op == "expire" and gone is not None and gone.expire_time_micros is not None:
                    followers.arrived(time.time() + ahead - gone.expire_time_micros / 1e6)

        async with AsyncExitStack() as stack:
            stack.callback(followers.end)
            client: AsyncClient | None = None
            # Before the first publish: with many topics, subscribing takes longer than it takes a record to fall due.
            for number, name in enumerate(plan.names):
                if client is None or number % FOLLOWERS_PER_CONNECTION == 0:
                    client = await stack.enter_async_context(self._follower())
                subscription = client.subscribe(name, f"/n = {attempt}", changes=True)
                followers.start(read(await stack.enter_async_context(subscription)))
            due = time.time() + spare
            await asyncio.to_thread(self._stream, chunks(), _stamps(due + ahead))
            if time.time() >= due:
                return None
            await asyncio.sleep(due - time.time())
            wanted = sum(
                len(range(0, min(BATCH_RECORDS, count - start), NOTICED)) for start in range(0, count, BATCH_RECORDS)
            )
            with self._used(done):
                seconds = plan.seconds + _PATIENCE_SECONDS
                await followers.until(wanted, seconds, "expire: some records did not expire")
        done.operations = count
        return done

    @contextmanager
    def _used(self, done: _Done) -> Iterator[None]:
        """Notes what the block takes."""
        before, begin = self._meter.read(), time.perf_counter()
        yield
        seconds, after = time.perf_counter() - begin, self._meter.read()
        done.used = _Used.between(before, after, seconds)


def _stamps(due: float) -> Callable[[int], list[int]]:
    """The expire times of records that fall due one after the other, the first at `due`; asked for piece by piece."""
    stamps = (round((due + number / EXPIRIES_PER_SECOND) * 1e6) for number in itertools.count())
    return lambda records: list(itertools.islice(stamps, records))


@dataclass(frozen=True, slots=True)
class _Used:
    seconds: float
    cpu_seconds: float | None = None
    memory_bytes: int | None = None

    @classmethod
    def between(cls, before: Usage | None, after: Usage | None, seconds: float) -> _Used:
        if before is None or after is None:
            return cls(seconds)
        return cls(seconds, after.cpu_seconds - before.cpu_seconds, after.memory_bytes)


@dataclass(slots=True)
class _Done:
    operations: int = 0
    latencies: list[float] = field(default_factory=list)
    used: _Used = _Used(0.0)


class _Published(msgspec.Struct):
    at: int


class _Handed:
    """The chunks of one publisher that are not acknowledged."""

    def __init__(self, latencies: list[float]) -> None:
        self._latencies = latencies
        self._waiting: deque[tuple[int, float]] = deque()
        self._handed = self._acknowledged = 0

    def over(self, records: int) -> None:
        """Called before the publisher gets them."""
        self._handed += records
        self._waiting.append((self._handed, time.perf_counter()))

    def acknowledged(self, ack: Ack) -> None:
        """Called on the publisher's thread. Acknowledgements come in order."""
        self._acknowledged += ack.records
        while self._waiting and self._waiting[0][0] <= self._acknowledged:
            self._latencies.append(time.perf_counter() - self._waiting.popleft()[1])


class _Followers:
    """The tasks of subscribers, and how much has arrived at them."""

    def __init__(self, latencies: list[float]) -> None:
        self._latencies = latencies
        self._wanted = 0
        self._enough = asyncio.Event()
        self._failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, reading: Coroutine[None, None, None]) -> None:
        """Begins to read a subscription."""
        task = asyncio.create_task(reading)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def arrived(self, latency: float) -> None:
        """Counts one arrival."""
        self._latencies.append(latency)
        if len(self._latencies) >= self._wanted:
            self._enough.set()

    async def until(self, wanted: int, seconds: float, late: str) -> None:
        """Returns once so many have arrived in all. Raises the error of a subscription that has failed, and BenchFailed
        after so many seconds."""
        self._wanted = wanted
        if self._failure is None and len(self._latencies) < wanted:
            self._enough.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._enough.wait()
            except TimeoutError:
                raise BenchFailed(f"{late} within {seconds:g} s") from None
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Ends all tasks."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._failure = self._failure or task.exception() or BenchFailed("a subscription has ended")
            self._enough.set()
