"""Clients of several instances, which go on elsewhere when theirs is lost. They note what they are told, and the times.

with Clients(addresses, seed) as clients:  # addresses by the names of instances
    those, since = clients.using("a"), time.monotonic()
    cluster["a"].server.kill9()
    clients.await_moved(those, since)

    [1]  Each record has a number. The numbers of a key rise in the order of the publishes, so a number that is missing
         was missed, whatever its version became.
    [2]  A client that uses a lost instance has moved once it uses another one, and does there what it is for: an
         acknowledged write, a subscription that stands, a view that is current.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from itertools import cycle
from math import ceil
from types import TracebackType
from typing import Final, NamedTuple, Self

from sow_client import (
    Ack,
    AsyncClient,
    Change,
    Client,
    DurabilityName,
    Gap,
    Instance,
    LiveView,
    Record,
    ReplicationUnavailable,
    SowError,
    Subscription,
    Unavailable,
    View,
)
from tests.support.servers.cluster import WAIT_SECONDS
from tests.support.servers.server import until
from tests.support.simulation.clients import EventLoop, blocking

TOPIC: Final = "orders"
KEYS: Final = 40
FILTER: Final = "/n > 100 AND /pad = 'x'"
REST_SECONDS: Final = 0.005
"""Between two writes of a writer: the point is to fail in the middle of it, not to keep the machine busy."""
MARK: Final = "mark"
"""The key of a record with a number, by which a reader sees how far it is."""
LASTING: Final = ("p", "s", "f")
"""Keys of records that are only published, and do not expire; by the writers."""


class Told(NamedTuple):
    """A change of a record that lasts."""

    sequence: int
    key: str
    number: int
    version: int
    origin: str


def told(change: Change) -> Told | None:
    """What is to be noted of a change."""
    record = change.record
    if record is None or not record.key.startswith(LASTING):
        return None
    return Told(record.sequence, record.key, json.loads(record.payload)["n"], record.version, record.origin)


def numbers(records: Iterable[Record]) -> dict[str, int]:
    """The number of each key."""
    return {record.key: json.loads(record.payload)["n"] for record in records}


class Moving:
    """A client, and when it has moved."""

    def __init__(self, kind: str, order: Mapping[str, str]) -> None:
        """`order`: the addresses by their names, the preferred one first."""
        self.kind: Final = kind
        self.servers: Final = ",".join(order.values())
        self.moved_at = 0.0
        self.stood_at = 0.0
        """The last time that it began to do at an instance what it is for."""
        self.client: Client

    @property
    def used(self) -> str:
        """The instance that it uses."""
        instance = self.client.instance
        assert instance is not None, "it has several addresses, and has made a call"
        return instance.name

    def moved(self, left: Instance, used: Instance, reason: str) -> None:
        """For `on_failover`."""
        assert left.name != used.name
        self.moved_at = time.monotonic()

    def interrupted(self, error: SowError | None) -> None:
        """For `on_interruption`."""
        if error is None:
            self.stood_at = time.monotonic()

    def is_on(self, since: float) -> bool:
        """Whether it has gone on elsewhere."""
        return since < self.moved_at <= self.stood_at

    def stop(self) -> None:
        """Ends it."""
        self.client.close()


# -- writers ----------------------------------------------------------------------------------------------------------


class Writer(Moving):
    """Publishes in a thread, until it is stopped. Nothing that it is told is in doubt, so no other error may come."""

    def __init__(self, kind: str, order: Mapping[str, str], prefix: str, durability: DurabilityName) -> None:
        super().__init__(kind, order)
        self.client = Client(self.servers, on_failover=self.moved)
        self.durability: Final[DurabilityName] = durability
        self.gate: Final = threading.Lock()
        """Held while it writes, and by who wants quiet."""
        self.acknowledged: list[tuple[str, int]] = []
        self.unavailable = 0
        """Writes that were not acknowledged because too few sync peers were left (rule P5)."""
        self.failure: BaseException | None = None
        self.number = 0
        self._prefix = prefix
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=kind, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                try:
                    self.write()
                except ReplicationUnavailable:
                    self.unavailable += 1
        except BaseException as failure:  # the test looks at it
            self.failure = failure
            raise

    def write(self) -> None:
        """Writes, in its thread, until it is to end or until an error."""
        while self.rested():
            with self.gate:
                key, document = self.next()
                self.client.publish(TOPIC, document, durability=self.durability)
                self.took(key, self.number)

    def rested(self) -> bool:
        """False: it is to end."""
        return not self._ending.wait(REST_SECONDS)

    def next(self) -> tuple[str, dict[str, object]]:
        """A key and a document with the next number."""
        self.number += 1
        key = f"{self._prefix}{self.number % KEYS}"
        return key, {"id": key, "n": self.number, "pad": "x" if self.number % 3 else "y"}

    def took(self, key: str, number: int) -> None:
        """It is acknowledged."""
        self.acknowledged.append((key, number))
        if self.stood_at < self.moved_at:
            self.stood_at = time.monotonic()

    @property
    def settled(self) -> bool:
        """Nothing is under way; while the gate is held."""
        return True

    def await_more(self, count: int) -> None:
        """Waits for so many acknowledgements."""
        goal = len(self.acknowledged) + count
        until(lambda: len(self.acknowledged) >= goal or self.failure, WAIT_SECONDS, f"{self.kind}: {count} writes")
        assert self.failure is None, self.failure

    def stop(self) -> None:
        self._ending.set()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        super().stop()


class Streamer(Writer):
    """Publishes through a publisher."""

    def __init__(self, kind: str, order: Mapping[str, str], prefix: str, durability: DurabilityName) -> None:
        self._sent: deque[tuple[str, int]] = deque()
        super().__init__(kind, order, prefix, durability)

    def write(self) -> None:
        self._sent.clear()
        with self.client.publisher(
            TOPIC, durability=self.durability, batch_records=5, linger=0.01, on_ack=self._took
        ) as publisher:
            while self.rested():
                with self.gate:
                    key, document = self.next()
                    self._sent.append((key, self.number))
                    publisher.publish(document)

    def _took(self, ack: Ack) -> None:
        assert not ack.refusals
        for _ in range(ack.records):
            self.took(*self._sent.popleft())

    @property
    def settled(self) -> bool:
        return not self._sent


class Fleeting(Writer):
    """Short lifetimes and deletes. Whether they were applied is not judged, so calls that break are let go."""

    def write(self) -> None:
        with suppress(SowError):
            while self.rested():
                with self.gate:
                    key, document = self.next()
                    if self.number % 4:
                        self.client.publish(TOPIC, document, ttl="30m" if self.number % 3 else "200ms")
                    else:
                        self.client.sow_delete(TOPIC, keys=[key])
                    self.took(key, self.number)


# -- subscribers ------------------------------------------------------------------------------------------------------


class Viewer(Moving):
    """A live view, and a copy that is kept by what the view tells."""

    def __init__(
        self, kind: str, order: Mapping[str, str], filter_text: str = "", loop: EventLoop | None = None
    ) -> None:
        super().__init__(kind, order)
        self.filter: Final = filter_text
        self.copy: Final[dict[str, Record]] = {}
        self._ending = False
        self._moves = threading.Event()
        if loop is None:
            self.client = Client(self.servers, on_failover=self.moved)
        else:
            made = loop.make(lambda: AsyncClient(self.servers, on_failover=self.moved))
            self.client = blocking(loop, made)
        self.view: Final[LiveView] = self.client.live_view(TOPIC, filter_text or None, on_change=self._take)
        self.view.__enter__()
        self._thread = threading.Thread(target=self._note, name=kind, daemon=True)
        self._thread.start()

    def moved(self, left: Instance, used: Instance, reason: str) -> None:
        super().moved(left, used, reason)
        self._moves.set()

    def _note(self) -> None:
        """Notes when it is current after a move."""
        while self._moves.wait() and not self._ending:
            self._moves.clear()
            if self.view.wait(WAIT_SECONDS):
                self.stood_at = time.monotonic()

    def _take(self, change: Change) -> None:
        if change.op == "put":
            assert change.record is not None, "a put has its record"
            self.copy[change.key] = change.record
        else:
            del self.copy[change.key]

    def equals(self, client: Client) -> bool:
        """Whether it has what a query finds."""
        found = versions(client.query(TOPIC, self.filter or None))
        return found == versions(self.view.copy().values()) == versions(list(self.copy.values()))

    def stop(self) -> None:
        self._ending = True
        self._moves.set()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        self.view.close()
        super().stop()


def versions(records: Iterable[Record]) -> dict[str, tuple[int, str, bytes]]:
    """Version, origin and payload of each key."""
    return {record.key: (record.version, record.origin, record.payload) for record in records}


class Subscriber(Moving):
    """Follows the topic in a thread."""

    def __init__(self, kind: str, order: Mapping[str, str], loop: EventLoop | None = None) -> None:
        super().__init__(kind, order)
        self.failure: BaseException | None = None
        self.bookmark: str | None = None
        self.lock: Final = threading.Lock()
        self._loop = loop
        self._subscription: Subscription | None = None
        self._ending = threading.Event()
        self._connect()
        self._thread = threading.Thread(target=self._run, name=kind, daemon=True)
        self._thread.start()
        until(lambda: self._subscription is not None or self.failure, WAIT_SECONDS, f"{kind} to stand")

    def _connect(self) -> None:
        if self._loop is None:
            self.client = Client(self.servers, on_failover=self.moved)
        else:
            made = self._loop.make(lambda: AsyncClient(self.servers, on_failover=self.moved))
            self.client = blocking(self._loop, made)

    def _run(self) -> None:
        try:
            self.work()
        except BaseException as failure:  # the test looks at it
            self.failure = failure
            raise

    def work(self) -> None:
        """Follows until it is to end."""
        self.follow(self.open())

    def open(self) -> Subscription:
        """The subscription."""
        raise NotImplementedError

    def follow(self, subscription: Subscription) -> None:
        """Takes every change until the subscription ends."""
        self._subscription = subscription
        if self._ending.is_set():
            subscription.close()
        for change in subscription:
            with self.lock:
                self.take(change)
                self.bookmark = change.bookmark or self.bookmark

    def take(self, change: Change) -> None:
        """Notes a change."""
        raise NotImplementedError

    @property
    def covered(self) -> bool:
        """Whether its instance has everything that it was told."""
        return self._subscription is not None and self._subscription.covers

    def stop(self) -> None:
        self._ending.set()
        if self._subscription is not None:
            self._subscription.close()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        super().stop()


class Keeper(Subscriber):
    """Keeps a `View` from a snapshot and its changes. A new snapshot would hide what was missed, so none may come."""

    def __init__(self, kind: str, order: Mapping[str, str], filter_text: str = "") -> None:
        self.filter: Final = filter_text
        self.view: Final = View()
        super().__init__(kind, order)

    def open(self) -> Subscription:
        return self.client.sow_and_subscribe(
            TOPIC, self.filter or None, oof=True, progress="500ms", on_interruption=self.interrupted
        )

    def take(self, change: Change) -> None:
        assert change.op != "resync", "the subscription could not go on"
        self.view.apply(change)

    def equals(self, client: Client) -> bool:
        """Whether it has what a query finds."""
        found = versions(client.query(TOPIC, self.filter or None))
        with self.lock:
            return found == versions(list(self.view.values()))


class Follower(Subscriber):
    """A change reader."""

    def __init__(self, kind: str, order: Mapping[str, str], loop: EventLoop | None = None) -> None:
        self.stays: Final[list[tuple[str, list[Told]]]] = []
        """What it was told at one instance after the other; with the epoch of each."""
        self.mark = 0
        """The last mark that it was told."""
        self.anew = False
        """The next change begins a stay, whatever its epoch."""
        super().__init__(kind, order, loop)

    def open(self) -> Subscription:
        return self.client.subscribe(TOPIC, changes=True, progress="500ms", on_interruption=self.interrupted)

    def take(self, change: Change) -> None:
        record = change.record or change.previous
        assert record is not None, "a change is about a record"
        assert change.bookmark is not None, "no atomic request was made"
        epoch, _ = position_of(change.bookmark)
        if self.anew or not self.stays or self.stays[-1][0] != epoch:
            self.stays.append((epoch, []))
            self.anew = False
        if record.key == MARK:
            self.mark = json.loads(record.payload)["n"]
        if (row := told(change)) is not None:
            self.stays[-1][1].append(row)


class ByHand(Follower):
    """A change reader that keeps its bookmark itself: it has a client of one address, and makes another one."""

    def __init__(self, kind: str, order: Mapping[str, str]) -> None:
        self._order = order
        self._used = ""
        super().__init__(kind, order)

    def _connect(self) -> None:
        pass

    @property
    def used(self) -> str:
        return self._used

    def work(self) -> None:
        for name, address in cycle(self._order.items()):
            if self._ending.is_set():
                return
            with suppress(Unavailable), Client(address, connect_timeout=1.0) as client:
                self.client = client
                subscription = client.subscribe(
                    TOPIC, changes=True, progress="500ms", start=self.bookmark, retry_for=0.0
                )
                self._used = name
                self.moved_at = self.stood_at = time.monotonic()
                try:
                    self.follow(subscription)
                finally:
                    self.bookmark = subscription.bookmark or self.bookmark


class Consumer(Follower):
    """The consumer of a replicated durable. When it has moved, some changes come again."""

    def __init__(self, kind: str, order: Mapping[str, str], name: str) -> None:
        self._name = name
        self._acknowledge: Callable[[Change], object]
        super().__init__(kind, order)

    def open(self) -> Subscription:
        durable = self.client.durable(
            TOPIC,
            self._name,
            changes=True,
            replicated=True,
            progress="500ms",
            on_interruption=self.interrupted,
            on_gap=self._gap,
        )
        self._acknowledge = durable.acknowledge
        return durable

    def interrupted(self, error: SowError | None) -> None:
        super().interrupted(error)
        self.anew = True

    def _gap(self, gap: Gap) -> None:
        raise AssertionError(f"the durable {self._name} has a gap: {gap}")

    def take(self, change: Change) -> None:
        super().take(change)
        if change.record is None or json.loads(change.record.payload)["n"] % 3:
            self._acknowledge(change)


def position_of(bookmark: str) -> tuple[str, int]:
    """Its epoch and its sequence there."""
    epoch, _, sequence = bookmark.partition(";")[0].rpartition(".")
    return epoch, int(sequence)


# -- all of them ------------------------------------------------------------------------------------------------------


class Clients:
    """A publisher, other writers, ten subscribers, and two durables; each with an order of the addresses of its own."""

    def __init__(self, addresses: Mapping[str, str], seed: int) -> None:
        draw = random.Random(f"clients {seed}")
        self.seconds: Final[dict[str, list[tuple[float, float]]]] = defaultdict(list)
        """By kind, how long it took to use another instance, and to go on there."""
        self._stack = ExitStack()

        def order() -> dict[str, str]:
            return {name: addresses[name] for name in draw.sample(sorted(addresses), len(addresses))}

        with ExitStack() as stack:
            loop = stack.enter_context(EventLoop())

            def owned(client: Moving) -> None:
                stack.callback(client.stop)

            self.viewers = [Viewer("live view", order()) for _ in range(2)]
            self.viewers.append(Viewer("live view, filtered", order(), FILTER))
            self.viewers.append(Viewer("live view, asyncio", order(), loop=loop))
            self.keepers = [Keeper("snapshot and changes", order()), Keeper("filtered changes", order(), FILTER)]
            self.followers: list[Follower] = [Follower("change reader", order()) for _ in range(2)]
            self.followers.append(Follower("change reader, asyncio", order(), loop))
            self.followers.append(ByHand("bookmark kept by the program", order()))
            self.followers += [Consumer("durable", order(), name) for name in ("first", "second")]
            self.subscribers: list[Viewer | Subscriber] = [*self.viewers, *self.keepers, *self.followers]
            self.publisher = Streamer("publisher, REPLICATED", order(), "p", "replicated")
            self.timekeeper = Writer("single publishes, FSYNC", order(), "f", "fsync")
            """Waits for no other instance."""
            self.writers: list[Writer] = [
                self.publisher,
                Writer("single publishes, REPLICATED", order(), "s", "replicated"),
                self.timekeeper,
                Fleeting("lifetimes and deletes", order(), "e", "fsync"),
            ]
            for client in (*self.subscribers, *self.writers):
                owned(client)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def crowded(self) -> str:
        """The instance that most subscribers use."""
        return Counter(one.used for one in self.subscribers).most_common(1)[0][0]

    def using(self, name: str) -> list[Moving]:
        """Those that use an instance."""
        return [one for one in (*self.subscribers, *self.writers) if one.used == name]

    def await_moved(self, those: Iterable[Moving], since: float) -> None:
        """Waits until they have moved, and notes how long it took."""
        left = list(those)

        def over() -> bool:
            self.check_alive()
            left[:] = [one for one in left if not one.is_on(since)]
            return not left

        waiting = list(left)
        until(over, WAIT_SECONDS, "clients to move")
        for one in waiting:
            self.seconds[one.kind].append((one.moved_at - since, one.stood_at - since))

    def check_alive(self) -> None:
        """Holds that none has failed."""
        threads: list[Subscriber | Writer] = [*self.keepers, *self.followers, *self.writers]
        for one in threads:
            assert one.failure is None, f"{one.kind} has failed: {one.failure!r} {getattr(one.failure, 'details', '')}"

    def acknowledged(self, *, replicated: bool) -> dict[str, int]:
        """The last acknowledged number of each key."""
        found: dict[str, int] = {}
        for writer in self.writers:
            if isinstance(writer, Fleeting) or (replicated and writer.durability != "replicated"):
                continue
            found |= dict(list(writer.acknowledged))
        return found

    @property
    def figures(self) -> str:
        """The times of the moves, a line for each kind."""
        return "\n".join(
            f"{kind}: {len(seconds)} moves; uses another: {_shown(moved for moved, _ in seconds)}; "
            f"goes on: {_shown(stood for _, stood in seconds)}"
            for kind, seconds in self.seconds.items()
        )


def _shown(seconds: Iterable[float]) -> str:
    ordered = sorted(seconds)
    p99 = ordered[max(0, ceil(0.99 * len(ordered)) - 1)]
    return f"p50 {statistics.median(ordered):.2f} s, p99 {p99:.2f} s, greatest {ordered[-1]:.2f} s"
