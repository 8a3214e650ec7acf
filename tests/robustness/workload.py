"""Clients of a cluster: writers, publishers that retry, followers that move on, consumers of durables (one of them goes
from instance to instance), and readers. All write down what they did and saw; nobody judges.

    [1]  A key of its own only one writer writes; shared keys all writers of all instances write.
    [2]  A client waits for no more than `CALL_SECONDS`, so that faults do not stop the work at instances that are well.
"""

from __future__ import annotations

import faulthandler
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from sow.durations import parse_micros
from sow_client import (
    EARLIEST,
    NEVER,
    Ack,
    Change,
    Client,
    DurabilityName,
    Record,
    Refusal,
    ReplicationUnavailable,
    ResyncRequired,
    SowError,
    Subscription,
)
from tests.robustness import history as told
from tests.robustness.history import Covered, History, Op, Read, Row, Seen
from tests.support.servers.cluster import Instance

CALL_SECONDS: Final = 1.5
ACTING: Final = "orders"
TOPICS: Final = (ACTING, "kept")
PATTERN: Final = "orders|kept"
END_SECONDS: Final = 30.0
OWN_KEYS: Final = 6
SHARED_KEYS: Final = 8
RECORDS_MAX: Final = 5
"""Of one go of a publisher."""
TTLS: Final = ("100ms", "400ms", "1s", "3s", "1m", "1h", NEVER)
CERTAIN: Final = frozenset({"CONDITION_FAILED", "RECORD_NOT_FOUND"})
"""Reasons that say that nothing was applied, also by an attempt before the one that got this answer."""
MICROS: Final = {ttl: parse_micros(ttl) for ttl in TTLS if isinstance(ttl, str)}


def now() -> int:
    """Microseconds of the monotonic clock."""
    return time.monotonic_ns() // 1000


class Lives(Protocol):
    """The round's knowledge of its instances."""

    def life(self, name: str) -> int:
        """How often its data have been lost so far."""


def row_of(record: Record) -> Row:
    """A record as the checker has it."""
    document = json.loads(record.payload)
    expire = record.expire_time_micros
    return Row(
        record.topic,
        record.key,
        record.version,
        record.origin,
        told.NEVER if expire is None else expire,
        document.get("n", ""),
        document.get("d", ""),
    )


class Server(Protocol):
    """Where a worker finds its client."""

    def client(self, *, timeout: float) -> Client: ...


class Workplace(Protocol):
    """The instance, or the cell, that a worker works at."""

    @property
    def name(self) -> str: ...

    @property
    def server(self) -> Server: ...


class Worker(threading.Thread):
    """One client in a thread. Its error fails the round."""

    topics: tuple[str, ...] = TOPICS
    """The topics that it works on."""

    def __init__(self, name: str, instance: Workplace, history: History, lives: Lives, draw: random.Random) -> None:
        super().__init__(name=name, daemon=True)
        self.instance: Final = instance
        self.history: Final = history
        self.lives: Final = lives
        self.draw: Final = draw
        self.ending: Final = threading.Event()
        self.failure: BaseException | None = None
        self.client: Client | None = None

    def run(self) -> None:
        try:
            with self.instance.server.client(timeout=CALL_SECONDS) as client:
                self.client = client
                self.work(client)
        except BaseException as failure:
            self.failure = failure
            raise

    def work(self, client: Client) -> None:
        """Until `ending`."""
        raise NotImplementedError

    def stop(self) -> None:
        """Has it end; see `join`."""
        self.ending.set()

    def end(self) -> None:
        """Returns once it has ended."""
        self.stop()
        self.join(END_SECONDS)
        if self.is_alive():
            faulthandler.dump_traceback()
            raise AssertionError(f"{self.name} does not end")
        if self.failure is not None:
            raise AssertionError(f"{self.name} has failed") from self.failure


class Writer(Worker):
    """Puts, deltas, touches and deletes, with conditions and without, of its own keys and of shared ones."""

    def __init__(
        self,
        number: int,
        instance: Workplace,
        history: History,
        lives: Lives,
        draw: random.Random,
        *,
        rest_seconds: float,
        replicated: bool,
    ) -> None:
        super().__init__(f"writer {instance.name}{number}", instance, history, lives, draw)
        self._prefix = f"{instance.name}{number}"
        self._rest = rest_seconds
        self._replicated = replicated
        self._count = 0
        self._versions: dict[tuple[str, str], int] = {}

    def work(self, client: Client) -> None:
        while not self.ending.wait(self.draw.random() * 2 * self._rest):
            self._write(client)

    def _write(self, client: Client) -> None:
        draw = self.draw
        topic = draw.choice(self.topics)
        key = (
            f"{self._prefix}-{draw.randrange(OWN_KEYS)}" if draw.random() < 0.6 else f"s-{draw.randrange(SHARED_KEYS)}"
        )
        kind: told.Kind = draw.choices(("put", "delta", "touch", "delete"), (10, 3, 3, 4))[0]
        self._count += 1
        tag = f"{self._prefix}.{self._count}" if kind in ("put", "delta") else ""
        lifetime = draw.choice(TTLS) if draw.random() < 0.6 else None
        durability: DurabilityName = draw.choice(("fsync", "fsync", "buffered"))
        if self._replicated and draw.random() < 0.5:
            durability = "replicated"
        op = Op(self.instance.name, self.lives.life(self.instance.name), self.name, topic, key, kind, tag, now())
        op.ttl = MICROS[lifetime] if isinstance(lifetime, str) and kind != "delete" else None
        self.history.ops.append(op)
        try:
            self._act(client, op, lifetime, durability)
            op.outcome, op.replicated = "ok", durability == "replicated"
        except ReplicationUnavailable as error:
            op.reason = error.reason
            # It stands here, though not there. With 0 nothing was written, or an attempt before has written it: gRPC
            # may have repeated the call (rule P6).
            op.outcome = "ok" if error.applied else "unknown"
        except SowError as error:
            op.reason = error.reason or type(error).__name__
            op.outcome = "refused" if error.reason in CERTAIN else "unknown"
        finally:
            op.end = now()
            op.once = self.lives.life(self.instance.name) == op.life
            if not op.once and op.outcome == "refused":
                op.outcome = "unknown"  # by a life that knew nothing of the attempts in the one before
        if op.version:
            self._versions[topic, key] = op.version

    def _act(self, client: Client, op: Op, lifetime: object, durability: DurabilityName) -> None:
        draw = self.draw
        document: dict[str, object] = {"id": op.key}
        if op.kind == "delete":
            op.effective = client.sow_delete(op.topic, keys=[op.key], durability=durability).deleted > 0
            return
        if op.kind == "touch":
            published = client.touch(op.topic, op.key, ttl=lifetime, durability=durability)  # type: ignore[call-overload]  # one of TTLS
        elif op.kind == "delta":
            document["d"] = op.tag
            published = client.delta_publish(op.topic, document, ttl=lifetime, durability=durability)  # type: ignore[arg-type]  # a str of the literals
        else:
            document |= {"n": op.tag, "pad": "x" * draw.randrange(200)}
            conditions: dict[str, object] = {}
            match draw.randrange(8):
                case 0:
                    conditions["only_if_absent"] = True
                case 1:
                    conditions["only_if_present"] = True
                case 2 if (op.topic, op.key) in self._versions:
                    conditions["only_if_version"] = self._versions[op.topic, op.key]
            published = client.publish(op.topic, document, ttl=lifetime, durability=durability, **conditions)  # type: ignore[arg-type]  # keywords of several types
        op.version, op.expire_known = published.version, published.expire_time_known
        op.expire = told.NEVER if published.expire_time_micros is None else published.expire_time_micros


class Retrier(Worker):
    """A publisher with an id: what breaks is sent again, and applied once (P6). Keys of its own, and only publishes."""

    def __init__(
        self, instance: Workplace, history: History, lives: Lives, draw: random.Random, *, rest_seconds: float
    ) -> None:
        super().__init__(f"publisher {instance.name}", instance, history, lives, draw)
        self._rest = rest_seconds
        self._count = 0

    def work(self, client: Client) -> None:
        while not self.ending.wait(self.draw.random() * 4 * self._rest):
            with suppress(SowError):
                self._publish(client, self.draw.choice(self.topics))

    def _publish(self, client: Client, topic: str) -> None:
        name, draw = self.instance.name, self.draw
        acks: list[Ack] = []
        refusals: list[Refusal] = []
        ops: list[Op] = []
        try:
            with client.publisher(
                topic,
                publisher_id=f"publisher-{name}",
                linger=0.001,
                retry_for=3.0,
                on_ack=acks.append,
                on_refusal=refusals.append,
            ) as publisher:
                for _ in range(draw.randint(1, RECORDS_MAX)):
                    self._count += 1
                    key, tag = f"{name}p-{draw.randrange(OWN_KEYS)}", f"{name}p.{self._count}"
                    op = Op(name, self.lives.life(name), self.name, topic, key, "put", tag, now())
                    ops.append(op)
                    self.history.ops.append(op)
                    publisher.publish({"id": key, "n": tag})
                    if draw.random() < 0.3:
                        publisher.flush()
            for op in ops:
                op.outcome = "ok" if not refusals else "unknown"
            if len(ops) == len(acks) and not refusals:
                for op, ack in zip(ops, acks, strict=True):
                    op.version = ack.last_version or ack.last_duplicate_version
        finally:
            for op in ops:
                op.end = now()
                op.once = self.lives.life(name) == op.life


class Reader(Worker):
    """Queries whole topics."""

    def __init__(self, instance: Workplace, history: History, lives: Lives, draw: random.Random) -> None:
        super().__init__(f"reader {instance.name}", instance, history, lives, draw)

    def stop(self) -> None:
        super().stop()
        if self.client is not None:
            self.client.close()  # a query has no deadline

    def work(self, client: Client) -> None:
        while not self.ending.wait(self.draw.random() * 0.4):
            with suppress(SowError):
                read_topic(client, self.instance.name, self.draw.choice(self.topics), self.history.reads, self.lives)


def read_topic(client: Client, name: str, topic: str, reads: list[Read], lives: Lives) -> Read:
    """Queries a whole topic; the answer counts if the data were not lost meanwhile."""
    life, begin = lives.life(name), now()
    result = client.query(topic)
    rows = [row_of(record) for record in result]
    assert result.header is not None, "an answer has one"
    read = Read(name, life, topic, begin, now(), result.header.as_of_micros, rows)
    if lives.life(name) == life:
        reads.append(read)
    return read


class Follower(Worker):
    """Follows both topics as a change reader. It comes back where it was when its instance does; and now and then it
    closes and goes on by its bookmark. After a resync it begins anew."""

    def __init__(self, number: int, instance: Workplace, history: History, lives: Lives, draw: random.Random) -> None:
        super().__init__(f"follower {instance.name}{number}", instance, history, lives, draw)
        self.bookmark: str | None = None
        self._streams = 0
        self._following: Subscription | None = None
        self._covered: Covered | None = None
        self._lock = threading.Lock()

    def work(self, client: Client) -> None:
        while not self.ending.is_set():
            try:
                self._follow(client)
            except ResyncRequired:
                self.bookmark = self._covered = None
            except SowError:
                self.ending.wait(0.05)

    def _follow(self, client: Client) -> None:
        until = now() + self.draw.choice((300_000, 1_000_000, 60_000_000))
        following = self._open(client)
        with self._lock:
            self._following = following
            if self.ending.is_set():
                following.close()
        try:
            for change in following:
                self._took(change, following.bookmark)
                self.done(following, change)
                if now() > until:
                    break
        finally:
            self._moved(following.bookmark)
            following.close()

    def _open(self, client: Client) -> Subscription:
        return client.subscribe(
            topic_pattern=PATTERN, changes=True, start=self.bookmark or EARLIEST, progress="200ms", retry_for=1.0
        )

    def done(self, following: Subscription, change: Change) -> None:
        """A change was written down."""

    def _took(self, change: Change, bookmark: str | None) -> None:
        assert change.bookmark is not None or change.op == "put", "no atomic requests are made"
        record = change.record or change.previous
        assert record is not None, "a change is about a record"
        epoch = epoch_of(change.bookmark or bookmark or "")
        assert change.op in ("put", "delete", "expire"), "it is a change reader"
        self._moved(change.bookmark, before=record.sequence)
        assert self._covered is not None, "it has moved"
        self.history.seen.append(
            Seen(
                self.instance.name,
                epoch,
                self._covered.stream,
                change.op,
                record.sequence,
                row_of(record),
                now(),
                isinstance(self, Consumer),
            )
        )

    def _moved(self, bookmark: str | None, *, before: int = 0) -> None:
        if bookmark is None:
            return
        epoch, sequence = position_of(bookmark)
        covered = self._covered
        if covered is None or covered.epoch != epoch:
            self._streams += 1
            # It may have come too late for anything before its first change.
            self._covered = covered = Covered(
                self.instance.name,
                epoch,
                f"{self.name}.{self._streams}",
                self.topics,
                before - 1 if before else sequence,
                sequence,
            )
            self.history.covered.append(covered)
        covered.upto = max(covered.upto, sequence)
        self.bookmark = bookmark

    def reached(self, sequence: int, epoch: str) -> bool:
        """Whether it has been told everything up to a sequence."""
        with self._lock:
            following = self._following
        bookmark = following.bookmark if following is not None else None
        if bookmark is None or epoch_of(bookmark) != epoch:
            return False
        return position_of(bookmark)[1] >= sequence

    def stop(self) -> None:
        super().stop()
        with self._lock:
            if self._following is not None:
                close_faulted(self._following)


class Consumer(Follower):
    """A durable subscription: entries that it has not acknowledged come again."""

    topics = (ACTING,)

    def __init__(self, number: int, instance: Workplace, history: History, lives: Lives, draw: random.Random) -> None:
        super().__init__(number, instance, history, lives, draw)
        self.name = f"durable {instance.name}{number}"

    def _open(self, client: Client) -> Subscription:
        return client.durable(
            self.topics[0],
            f"d-{self.name[-1]}",
            changes=True,
            start=EARLIEST,
            force=True,
            progress="200ms",
            retry_for=1.0,
        )

    def done(self, following: Subscription, change: Change) -> None:
        if self.draw.random() < 0.7:
            following.acknowledge(change)  # type: ignore[attr-defined]  # it is a durable one


class Roamer(Worker):
    """The consumer of a replicated durable: it goes from instance to instance, and acknowledges a part of what it is
    handed. Where a queue of its client has more than it took, those come again."""

    def __init__(self, instances: Sequence[Instance], history: History, lives: Lives, draw: random.Random) -> None:
        super().__init__("roamer", instances[0], history, lives, draw)
        self._instances = instances
        self._following: Subscription | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            while not self.ending.is_set():
                addresses = [instance.server.address for instance in self._instances]
                self.draw.shuffle(addresses)
                with suppress(SowError), Client(",".join(addresses), timeout=CALL_SECONDS) as client:
                    self.work(client)
                self.ending.wait(0.05)
        except BaseException as failure:
            self.failure = failure
            raise

    def work(self, client: Client) -> None:
        until = now() + self.draw.choice((200_000, 500_000, 2_000_000))
        with client.durable(
            ACTING, "roaming", changes=True, start=EARLIEST, replicated=True, progress="200ms", retry_for=1.0
        ) as following:
            with self._lock:
                self._following = following
                if self.ending.is_set():
                    return
            for change in following:
                if change.op == "put" and change.record is not None:
                    self.history.handed.append(row_of(change.record))
                if self.draw.random() < 0.7:
                    following.acknowledge(change)
                if now() > until:
                    return

    def has_all(self, rows: Sequence[Row]) -> bool:
        """Whether it was handed all of these records."""
        handed = {(row.topic, row.key, row.rank) for row in list(self.history.handed)}
        return all((row.topic, row.key, row.rank) in handed for row in rows)

    def stop(self) -> None:
        super().stop()
        with self._lock:
            if self._following is not None:
                close_faulted(self._following)


def epoch_of(bookmark: str) -> str:
    """The journal that a bookmark is of."""
    return position_of(bookmark)[0]


def position_of(bookmark: str) -> tuple[str, int]:
    """Its journal and its sequence there; the marks of other journals follow behind a semicolon."""
    epoch, _, sequence = bookmark.partition(";")[0].rpartition(".")
    return epoch, int(sequence)


def close_faulted(following: Subscription) -> None:
    """Closes it. A durable one tells then of an acknowledgement that met a fault earlier: its entries come again."""
    with suppress(SowError):
        following.close()


def end_all(workers: Sequence[Worker], then: Callable[[], None] = lambda: None) -> None:
    """Has them end, all at once."""
    for worker in workers:
        worker.stop()
    then()
    for worker in workers:
        worker.end()
