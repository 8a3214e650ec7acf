"""Stream publishing against Redis: new keys, and random updates over many records.

Both sides get the same 160-byte documents with the same lifetime in batches of 1,000 from a Python client. BUFFERED is
compared with an append-only file synced every second, FSYNC with one that is always synced. Redis' own client in C is a
second peer: it costs Redis' side next to nothing, while our side has its Python client.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final

from benchmarks.bare_rocks import BareRocks
from benchmarks.bare_server import BareServer
from benchmarks.documents import TTL_SECONDS, documents, keys
from benchmarks.processes import TOPIC, CpuMeter, NotInstalled, SowServer
from benchmarks.redis_peer import ANY_KEY, Fsync, RedisServer
from benchmarks.rows import PER_SECOND, TIMES, Figure, Limit, Row, Target, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow_client import Client

BATCH_RECORDS: Final = 1_000
SEED: Final = 7


@dataclass(frozen=True, slots=True)
class _Level:
    """A durability of sow and the closest one of Redis."""

    ours: str
    redis: Fsync
    new_keys: Target
    updates: Target
    c_client: Target

    @property
    def name(self) -> str:
        return f"{self.ours.upper()} ↔ AOF {self.redis}"


_TIMES_REDIS: Final = f"{TIMES} Redis"
_TIMES_C: Final = f"{TIMES} Redis' C client"
# What has no ambition is out of reach: "Ambitions that were given up" in benchmarks/README.md says why.
_LEVELS: Final = (
    _Level(
        "buffered",
        "everysec",
        new_keys=Target(1.2, _TIMES_REDIS, ambition=2.5),
        updates=Target(0.75, _TIMES_REDIS),
        c_client=Target(0.25, _TIMES_C),
    ),
    _Level(
        "fsync",
        "always",
        new_keys=Target(1.5, _TIMES_REDIS, ambition=3.0),
        updates=Target(1.25, _TIMES_REDIS, ambition=2.5),
        c_client=Target(0.25, _TIMES_C, ambition=1.5),
    ),
)


def publish(client: Client, payloads: Sequence[bytes], durability: str, *, topic: str = TOPIC) -> float:
    """Publishes the documents through one publisher; records acknowledged per second."""
    assert durability in ("fsync", "buffered"), durability
    begin = time.perf_counter()
    with client.publisher(
        topic,
        ttl=TTL_SECONDS,
        durability="fsync" if durability == "fsync" else "buffered",
        batch_records=BATCH_RECORDS,
    ) as publisher:
        one = publisher.publish
        for payload in payloads:
            one(payload)
        publisher.flush()
        seconds = time.perf_counter() - begin
    assert publisher.applied == len(payloads), f"{publisher.applied} of {len(payloads)} were applied"
    return len(payloads) / seconds


class _Side:
    """The servers of one run, and the numbers of the records to publish in each of its rounds."""

    def __init__(self, setting: Setting, stack: ExitStack, numbers: Callable[[int], Sequence[int]]) -> None:
        self.skipped = ""
        self.described = ""
        self.redis: RedisServer | None = None
        self._numbers = numbers
        self._revision = 0
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        self.server = server
        self.client = stack.enter_context(Client(server.address))
        self.bare_client = stack.enter_context(Client(stack.enter_context(BareServer()).address))
        self.bare_rocks = stack.enter_context(closing(BareRocks(setting.directory / "rocks")))
        try:
            self.redis = stack.enter_context(RedisServer(setting.directory / "redis"))
            self.described = self.redis.described
        except NotInstalled as missing:
            self.skipped = str(missing)

    def load(self, records: int) -> None:
        """Publishes the same records to all of them."""
        for first in range(0, records, 100_000):
            numbers = range(first, min(first + 100_000, records))
            payloads, names = documents(numbers), keys(numbers)
            publish(self.client, payloads, "buffered")
            self.bare_rocks.put_rate(names, payloads, new=True, sync=False)
            if self.redis is not None:
                self.redis.load(names, payloads)

    def rows(self, level: _Level, rounds: int, case: str, *, among: int) -> Iterator[Row]:
        """The lines of one durability: the rates of sow, Redis and the limits, in turns. `among`: Redis' C client
        chooses among so many keys; ANY_KEY: all are new."""
        new = among == ANY_KEY
        target = level.new_keys if new else level.updates
        names: Sequence[str] = ()
        payloads: Sequence[bytes] = ()
        our_cpu = CpuMeter(self.server)

        def prepare() -> None:
            # The records are made outside the measured time, once a round, and are the same for all.
            nonlocal names, payloads
            numbers = self._numbers(self._revision)
            self._revision += 1
            names, payloads = keys(numbers), documents(numbers, self._revision)

        def ours() -> float:
            return our_cpu.measured(len(names), lambda: publish(self.client, payloads, level.ours))

        def bare_batch() -> float:
            return self.bare_rocks.put_rate(names, payloads, new=new, sync=level.ours == "fsync")

        def bare_stream() -> float:
            return publish(self.bare_client, payloads, level.ours)

        contestants: dict[str, Callable[[], float]] = {"sow": ours}
        redis = self.redis
        peer_cpu = None if redis is None else CpuMeter(redis)
        if redis is not None and peer_cpu is not None:
            peer, meter = redis, peer_cpu
            peer.sync_policy(level.redis)
            contestants["redis"] = lambda: meter.measured(len(names), lambda: _set_rate(peer, names, payloads))
            contestants["C client"] = lambda: peer.set_in_c(len(names), among, BATCH_RECORDS)
        contestants |= {"bare batch": bare_batch, "bare stream": bare_stream}
        rates = take_turns(rounds, contestants, before_round=prepare)

        ours_median = statistics.median(rates["sow"])
        limits = tuple(
            Limit(name, Figure(limit := statistics.median(rates[contestant]), PER_SECOND), ours_median / limit)
            for name, contestant in (
                ("the bare rocksdict batch", "bare batch"),
                ("the bare gRPC stream", "bare stream"),
            )
        )
        case = f"{level.name}: {case}"
        figure = Figure(ours_median, PER_SECOND)
        if "redis" not in rates:
            yield Row(case, figure, target=target, limits=limits, note=str(our_cpu), skipped=self.skipped)
            return
        yield Row(
            case,
            figure,
            peer=Figure(statistics.median(rates["redis"]), PER_SECOND),
            judged=ratio(rates["sow"], rates["redis"]),
            target=target,
            limits=limits,
            note=f"{ratio_range(rates['sow'], rates['redis'])}; {our_cpu}; Redis: {peer_cpu}; {self.described}",
        )
        yield Row(
            f"{case}, to Redis' C client, one connection",
            figure,
            peer=Figure(statistics.median(rates["C client"]), PER_SECOND),
            judged=ratio(rates["sow"], rates["C client"]),
            target=level.c_client,
            note=f"{ratio_range(rates['sow'], rates['C client'])}; peer: redis-benchmark -P {BATCH_RECORDS}, which"
            " sends the same document under random keys",
        )


def _set_rate(redis: RedisServer, names: Sequence[str], payloads: Sequence[bytes]) -> float:
    begin = time.perf_counter()
    redis.set_pipelined(names, payloads, BATCH_RECORDS)
    return len(names) / (time.perf_counter() - begin)


def new_keys(setting: Setting) -> Iterator[Row]:
    """Row 1: every record has a new key."""
    round_records = setting.size(200_000, quick=30_000)
    rounds = setting.size(5, quick=3)

    def numbers(revision: int) -> Sequence[int]:
        return range(revision * round_records, (revision + 1) * round_records)

    with ExitStack() as stack:
        side = _Side(setting, stack, numbers)
        for level in _LEVELS:
            setting.say(f"{level.name}, {rounds} rounds")
            case = f"{rounds} rounds of {round_records:,} new keys"
            yield from side.rows(level, rounds, case, among=ANY_KEY)


def updates(setting: Setting) -> Iterator[Row]:
    """Row 2: random updates of 200,000 keys among many more records."""
    records = setting.size(3_000_000, quick=200_000)
    updated = setting.size(200_000, quick=50_000)
    round_records = setting.size(200_000, quick=30_000)
    rounds = setting.size(5, quick=3)
    chance = random.Random(SEED)
    chosen = chance.sample(range(records), updated)

    def numbers(_revision: int) -> Sequence[int]:
        return chance.choices(chosen, k=round_records)

    with ExitStack() as stack:
        side = _Side(setting, stack, numbers)
        setting.say(f"loading {records:,} records into each")
        side.load(records)
        for level in _LEVELS:
            setting.say(f"{level.name}, {rounds} rounds")
            case = f"{rounds} rounds of {round_records:,} updates of {updated:,} keys over {records:,} records"
            yield from side.rows(level, rounds, case, among=updated)
