"""Two servers or more, which do the same work in turns: the cases, and the CPU time that each server spends on them.

For differences of a few percent. They do not show in rates, because other users of the machine slow one side down and
then the other. CPU time hardly depends on them.

[1]  Within a round every side does the same work, and the sides take turns in going first.
[2]  A ratio is the median of the ratios of the rounds.
[3]  Documents are those of even numbers and revisions, so all of them have the side `buy` (`BUYS`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from benchmarks.documents import TTL_SECONDS, document, documents
from benchmarks.followers import Follower, Followers
from benchmarks.processes import TOPIC, SowServer
from benchmarks.publishing import BATCH_RECORDS, publish
from benchmarks.rows import percentile
from sow_client import UNLIMITED, Client

BUYS: Final = "/side = 'buy'"
"""True for the documents of the cases."""
EXPIRED_METRIC: Final = "sow_records_expired_total"
EXPIRING_SECONDS: Final = 1.0
POLL_SECONDS: Final = 0.2
EXPIRING_FROM: Final = 1_000_000_000
"""The number of the first document that expires; below are those that stay."""
EMPTIED_TOPIC: Final = "emptied"
FOLLOWED_TOPIC: Final = "followed"
CONSUMED_TOPIC: Final = "consumed"
PER_TICK: Final = 50
TICK_SECONDS: Final = 0.01
SEED: Final = 7


@dataclass(frozen=True, slots=True)
class Side:
    """A server, and a caller of it."""

    server: SowServer
    client: Client
    filter: str = ""
    """The caller asks for the records with this filter; "": for all that it may see."""
    followers: Followers | None = None
    """Connections of the same caller for subscriptions."""


class Done(NamedTuple):
    """The work of one round of a case."""

    records: int
    """The records, or the calls, that it was about."""
    milliseconds: Sequence[float] = ()
    """The time of each call, where calls are made one after the other."""
    prepared_seconds: float = 0.0
    """CPU time of the server for preparations, which does not count."""


Case = Callable[[Side, int], Done]
"""Does the work of one round, whose number it gets, on one side."""


class Spent(NamedTuple):
    """The cost of one round of a case on one side."""

    micros: float
    """CPU time of the server for a record or a call."""
    rate: float
    """Records or calls per second."""
    p50_milliseconds: float
    """0.0 where no single calls are made."""


@dataclass(frozen=True, slots=True)
class Cases:
    """The work on one topic."""

    records: int
    """Records that one round of a case is about."""
    calls: int
    """Single calls of a round."""
    delivered: int = 0
    """Records of a round with followers."""
    loaded: int = 0
    """Documents with even numbers that are there before the first round; 0: the updates are of those of the first."""

    def new_keys(self, side: Side, number: int) -> Done:
        """Publishes new records in a stream."""
        publish(side.client, _documents(self._new(number)), "buffered")
        return Done(self.records)

    def updates(self, side: Side, number: int) -> Done:
        """Replaces random records in a stream."""
        numbers = random.Random(SEED + number).choices(range(self.loaded or self.records), k=self.records)
        publish(side.client, _documents(numbers, number + 1), "buffered")
        return Done(self.records)

    def query(self, side: Side, _number: int) -> Done:
        """Reads the whole topic, by batches. The count is of the records found."""
        return Done(sum(len(batch.keys) for batch in side.client.query(TOPIC, side.filter).batches()))

    def expiry(self, side: Side, number: int) -> Done:
        """Publishes records that expire a second later, and waits until they have."""
        before = _expired(side.server)
        first = EXPIRING_FROM + number * self.records
        payloads = _documents(range(first, first + self.records))
        with side.client.publisher(
            TOPIC, ttl=EXPIRING_SECONDS, durability="buffered", batch_records=BATCH_RECORDS
        ) as publisher:
            for payload in payloads:
                publisher.publish(payload)
        while _expired(side.server) - before < self.records:
            time.sleep(POLL_SECONDS)
        return Done(self.records)

    def single_publishes(self, side: Side, number: int) -> Done:
        """Replaces one record after the other, each by a call of its own."""
        return _calls(
            self._some(number),
            lambda one: side.client.publish(
                TOPIC, document(2 * one, 2 * number), ttl=TTL_SECONDS, durability="buffered"
            ),
        )

    def single_gets(self, side: Side, number: int) -> Done:
        """Gets one record after the other."""

        def get(one: int) -> None:
            assert side.client.get(TOPIC, str(2 * one)) is not None, f"there is no record {2 * one}"

        return _calls(self._some(number), get)

    def deliveries(self, side: Side, number: int) -> Done:
        """Publishes updates, and waits until each follower has them. The followers stay."""
        followers = side.followers
        assert followers is not None, "it has followers"
        for follower in followers.followers:
            follower.forget()
        numbers = random.Random(SEED - number).choices(range(self.loaded), k=self.delivered)
        # Paced, because followers that fall behind read the journal, each by itself.
        offered = followers.publish(
            _documents(numbers, number), per_tick=PER_TICK, tick_seconds=TICK_SECONDS, until=followers.followers
        )
        assert _received(followers.followers) == self.delivered * len(followers.followers), "every change, to everybody"
        return Done(offered.records)

    def deletes(self, side: Side, number: int) -> Done:
        """Deletes the new records of the same round by a filter."""
        first = 2 * self._new(number)[0]
        chosen = f"/id >= {first}"
        outcome = side.client.sow_delete(TOPIC, filter=f"{side.filter} AND {chosen}" if side.filter else chosen)
        assert outcome.deleted == self.records, f"{outcome.deleted} of {self.records} were deleted"
        return Done(self.records)

    def emptying(self, side: Side, number: int) -> Done:
        """Deletes all records of a topic by a filter. Publishing them before does not count."""
        if number == 0:
            side.client.create_topic(EMPTIED_TOPIC, key=["/id"], expiration="enabled")
        before = side.server.cpu_seconds()
        publish(side.client, _documents(range(self.records)), "buffered", topic=EMPTIED_TOPIC)
        prepared = side.server.cpu_seconds() - before
        outcome = side.client.sow_delete(EMPTIED_TOPIC, filter=BUYS, durability="buffered")
        assert outcome.deleted == self.records, f"{outcome.deleted} of {self.records} were deleted"
        return Done(self.records, prepared_seconds=prepared)

    def following(self, side: Side, number: int) -> Done:
        """Publishes in a stream to one subscription, as fast as both go, and reads all changes from it."""
        if number == 0:
            side.client.create_topic(FOLLOWED_TOPIC, key=["/id"])
        # A snapshot first, of records that are published only now: so none is missed, whoever comes first.
        changes = side.client.sow_and_subscribe(FOLLOWED_TOPIC, f"/revision = {2 * number}")
        with changes, ThreadPoolExecutor(1) as pool:
            payloads = _documents(range(self.records), number)
            published = pool.submit(publish, side.client, payloads, "buffered", topic=FOLLOWED_TOPIC)
            delivered = (change for change in changes if change.record is not None)
            deque(islice(delivered, self.records), maxlen=0)
            published.result()
        return Done(self.records)

    def consuming(self, side: Side, number: int) -> Done:
        """Reads the journal of the same records in a durable of its own, from its beginning."""
        return self._consume(side, number, "")

    def consuming_matches(self, side: Side, number: int) -> Done:
        """The same records, after `consuming`, through a filter that looks at each and leaves none out."""
        return self._consume(side, number, BUYS)

    def _consume(self, side: Side, number: int, chosen: str) -> Done:
        before = side.server.cpu_seconds()
        if number == 0 and not chosen:
            side.client.create_topic(CONSUMED_TOPIC, key=["/id"], retain_time="unlimited", retain_bytes=UNLIMITED)
            publish(side.client, _documents(range(self.records)), "buffered", topic=CONSUMED_TOPIC)
        prepared = side.server.cpu_seconds() - before
        name = f"{'matching' if chosen else 'all'}-{number}"
        with side.client.durable(CONSUMED_TOPIC, name, chosen, start="earliest") as durable:
            for change in islice(durable, self.records):
                durable.acknowledge(change)
            durable.flush()
        side.client.delete_durable(CONSUMED_TOPIC, name)
        return Done(self.records, prepared_seconds=prepared)

    def _new(self, number: int) -> range:
        first = self.loaded + number * self.records
        return range(first, first + self.records)

    def _some(self, number: int) -> Sequence[int]:
        return random.Random(SEED + number).choices(range(self.loaded or self.records), k=self.calls)


def measured(sides: Mapping[str, Side], case: Case, number: int) -> dict[str, Spent]:
    """The cost of one round of a case for each side [1]."""
    names = list(sides) if number % 2 else list(sides)[::-1]
    spent: dict[str, Spent] = {}
    for name in names:
        server = sides[name].server
        before, begin = server.cpu_seconds(), time.perf_counter()
        done = case(sides[name], number)
        seconds, cpu = time.perf_counter() - begin, server.cpu_seconds() - before - done.prepared_seconds
        p50 = percentile(done.milliseconds, 0.5) if done.milliseconds else 0.0
        spent[name] = Spent(cpu / done.records * 1e6, done.records / seconds, p50)
    return spent


@dataclass(frozen=True, slots=True)
class Ratio:
    """How the figures of two sides compare, in each round ([2])."""

    median: float
    ratios: Sequence[float]
    """In rising order."""

    @classmethod
    def of(cls, figures: Sequence[float], others: Sequence[float]) -> Ratio:
        """The ratio of `figures` to `others`."""
        ratios = sorted(figure / other for figure, other in zip(figures, others, strict=True))
        return cls(statistics.median(ratios), ratios)

    @property
    def spread(self) -> str:
        """The least and the greatest ratio of a round."""
        return f"{self.ratios[0]:.3f} to {self.ratios[-1]:.3f}"

    @property
    def middle(self) -> str:
        """The first and the third quartile."""
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return f"{low:.3f} to {high:.3f}"


def _documents(numbers: Sequence[int], revision: int = 0) -> list[bytes]:
    return documents([2 * number for number in numbers], 2 * revision)


def _calls(numbers: Sequence[int], call: Callable[[int], object]) -> Done:
    milliseconds: list[float] = []
    for number in numbers:
        begin = time.perf_counter()
        call(number)
        milliseconds.append((time.perf_counter() - begin) * 1000)
    return Done(len(numbers), milliseconds)


def _received(followers: Sequence[Follower]) -> int:
    return sum(len(follower.keys) for follower in followers)


def _expired(server: SowServer) -> float:
    return server.metrics().total(EXPIRED_METRIC)


def against_cases(cases: Cases) -> Iterator[tuple[str, Case]]:
    """The cases that need no credentials, by name."""
    yield "publish-new", cases.new_keys
    yield "publish-updates", cases.updates
    yield "query", cases.query
    yield "mass-expiry", cases.expiry
    yield "delete-by-filter", cases.emptying
    yield "delivery", cases.following
    yield "durable", cases.consuming
    yield "durable-filtered", cases.consuming_matches
    yield "single-publish", cases.single_publishes
    yield "single-get", cases.single_gets
