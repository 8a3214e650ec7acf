"""A server that is killed under load, again and again: nothing acknowledged is lost, nothing expired is seen."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import pytest

from sow_client import NEVER, Ack, Client, QueryHeader, Record, SowError
from sow_server.engine.store import Store
from tests.fault.audit import Audit
from tests.support.server import ServerProcess, until

CONFIG: Final = """
[server]
instance = "sow"
[storage]
memtable = "1MiB"        # so that flushes and compactions run while it is killed
other_memtable = "1MiB"
wal_bytes_max = "4MiB"
[journal]
prune_interval = "200ms"
[topics.kept]
retain_time = "unlimited"
retain_bytes = "unlimited"
[topics.mixed]
expiration = "enabled"
retain_time = "unlimited"
retain_bytes = "unlimited"
[topics.brief]
expiration = "enabled"
retain_time = "1s"
retain_bytes = "256KiB"
"""
INDEXES: Final[tuple[list[str], ...]] = ([], ["/n"], ["/pad", "/n"], ["/pad"])
"""What the topics have indexes on, changing from start to start: builds are killed, too."""
KEYS: Final = 100
PAUSE_EVERY: Final = 40
"""Records after which a stream rests a little: the point is to be killed, not to fill the disk."""


class Load(Protocol):
    """One client at work in a thread of its own, and what it knows afterwards."""

    acks: list[tuple[int, int]]
    """Sequence and version of each acknowledgement since the server was started."""

    def run(self, client: Client) -> None:
        """Works until the server is gone."""

    def check(self, seen: dict[str, Record], as_of_micros: int) -> None:
        """Holds what a query of its topic returns against what was acknowledged, and takes over what is there."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A record of a stream."""

    key: str
    n: int
    expire_time_micros: int | None = None


@dataclass(slots=True)
class StreamLoad:
    """Publishes rising numbers under keys of its own, in one ordered stream.

    Afterwards the store shows what a prefix of the stream makes of it: all that was acknowledged, and perhaps more.
    """

    name: str
    topic: str
    durability: str
    lives: tuple[int, ...] = ()
    """Lifetimes to draw from, microseconds; none: for ever."""
    draw: random.Random = field(default_factory=random.Random)
    n: int = 0
    base: dict[str, Sent] = field(default_factory=dict)
    """What was there when the present stream began."""
    sent: list[Sent] = field(default_factory=list)
    acknowledged: int = 0
    acks: list[tuple[int, int]] = field(default_factory=list)

    def run(self, client: Client) -> None:
        self.sent, self.acknowledged = [], 0

        def heard(ack: Ack) -> None:
            assert not ack.refusals
            assert ack.duplicates == 0
            self.acknowledged += ack.applied
            self.acks.append((ack.last_sequence, ack.last_version))

        publisher = client.publisher(
            self.topic,
            durability="fsync" if self.durability == "fsync" else "buffered",
            batch_records=20,
            max_in_flight=4,
            retry_for=0.0,
            on_ack=heard,
        )
        try:
            while True:
                self.n += 1
                expire_time = None
                if self.lives:
                    expire_time = time.time_ns() // 1000 + self.draw.choice(self.lives)
                key = f"{self.name}-{self.draw.randrange(KEYS)}"
                # Before it goes out: a record that is stored must be known here.
                self.sent.append(Sent(key, self.n, expire_time))
                publisher.publish({"n": self.n, "pad": "x" * 100}, key=key, expire_at=expire_time)
                if self.n % PAUSE_EVERY == 0:
                    time.sleep(0.005)
        except SowError:
            pass
        finally:
            publisher.abort()

    def check(self, seen: dict[str, Record], as_of_micros: int) -> None:
        mine = {key: record for key, record in seen.items() if key.startswith(self.name + "-")}
        numbers = {key: record.data["n"] for key, record in mine.items()}  # type: ignore[index]  # a JSON object
        # The longest prefix is told by the newest record that is there; what expired says nothing.
        index_of = {sent.n: index for index, sent in enumerate(self.sent)}
        applied = max([self.acknowledged, *(index_of[n] + 1 for n in numbers.values() if n in index_of)])
        expected = dict(self.base)
        uncertain: set[str] = set()
        for sent in self.sent[:applied]:
            expected[sent.key] = sent
        for sent in self.sent[applied:]:
            uncertain.add(sent.key)  # may have been superseded by a record that has expired since
        alive = {key: sent for key, sent in expected.items() if (sent.expire_time_micros or 2**62) > as_of_micros}
        for key, sent in alive.items():
            if key in numbers:
                assert numbers[key] == sent.n, f"{key}: {numbers[key]} is there, {sent.n} was acknowledged"
                assert mine[key].expire_time_micros == sent.expire_time_micros
            else:
                assert self.lives, f"{key} was acknowledged, and is gone"
                assert key in uncertain, f"{key} was acknowledged, and is gone before its time"
        assert not numbers.keys() - alive.keys(), "something expired is seen, or something that was never sent"
        self.base = {key: sent for key, sent in alive.items() if key in numbers}


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a record: its number, None for a deleted one, and its stamp."""

    n: int | None
    expire_time_micros: int | None = None

    def at(self, now_micros: int) -> int | None:
        """The number that a reader sees."""
        gone = self.expire_time_micros is not None and self.expire_time_micros <= now_micros
        return None if gone else self.n


@dataclass(slots=True)
class MixedLoad:
    """Publishes, touches, persists and deletes one record at a time, so that at most one call is in doubt."""

    name: str
    topic: str
    draw: random.Random = field(default_factory=random.Random)
    n: int = 0
    kept: dict[str, Kept] = field(default_factory=dict)
    doubt: tuple[str, int | None] | None = None
    """Key and number of the call that was not answered."""
    acks: list[tuple[int, int]] = field(default_factory=list)

    def run(self, client: Client) -> None:
        self.doubt = None
        while True:
            key = f"{self.name}-{self.draw.randrange(KEYS)}"
            before = self.kept.get(key, Kept(None))
            what = self.draw.choice(("publish", "publish", "touch", "persist", "delete"))
            ttl = self.draw.choice((0.03, 0.3, 3600.0, NEVER))
            durability = self.draw.choice(("fsync", "buffered"))
            self.doubt = (key, before.n)
            try:
                if what == "delete":
                    self.doubt = (key, None)
                    client.sow_delete(self.topic, keys=[key], durability=durability)  # type: ignore[arg-type]  # a name
                    self.kept[key] = Kept(None)
                else:
                    if what == "publish":
                        self.n += 1
                        self.doubt = (key, self.n)
                        done = client.publish(
                            self.topic,
                            {"n": self.n},
                            key=key,
                            ttl=ttl,
                            durability=durability,  # type: ignore[arg-type]
                        )
                        n: int | None = self.n
                    else:
                        n = before.n
                        done = client.touch(self.topic, key, ttl=NEVER if what == "persist" else ttl)
                    self.kept[key] = Kept(n, done.expire_time_micros)
                    self.acks.append((done.sequence, done.version))
                self.doubt = None
            except SowError as error:
                if error.reason != "RECORD_NOT_FOUND":
                    return
                # What is not there has been deleted, or has expired.
                assert before.at(time.time_ns() // 1000 + 1_000_000) is None
                self.doubt = None

    def check(self, seen: dict[str, Record], as_of_micros: int) -> None:
        numbers = {key: record.data["n"] for key, record in seen.items()}  # type: ignore[index]  # a JSON object
        for key, kept in self.kept.items():
            allowed = {kept.at(as_of_micros)}
            if self.doubt is not None and self.doubt[0] == key:
                allowed |= {self.doubt[1], None}  # a touch may have given it a short life
                if kept.n is not None and self.doubt[1] == kept.n:
                    allowed.add(kept.n)
            assert numbers.get(key) in allowed, (
                f"{key}: found {numbers.get(key)}, allowed {allowed}, as of {as_of_micros}"
            )
        known = self.kept.keys() | ({self.doubt[0]} if self.doubt else set())
        assert numbers.keys() <= known
        self.kept = {key: Kept(numbers[key], record.expire_time_micros) for key, record in seen.items()}


@dataclass(slots=True)
class Reading:
    """Reads while others write: nothing expired is ever seen (rule L8)."""

    wrong: list[str] = field(default_factory=list)
    queries: int = 0

    def run(self, client: Client) -> None:
        try:
            while True:
                for topic in ("brief", "mixed"):
                    header, seen = _all(client, topic)
                    for record in seen.values():
                        stamp = record.expire_time_micros
                        if stamp is not None and stamp <= header.as_of_micros:
                            self.wrong.append(f"{topic}/{record.key}: {stamp} as of {header.as_of_micros}")
                self.queries += 1
        except SowError:
            pass


def _all(client: Client, topic: str) -> tuple[QueryHeader, dict[str, Record]]:
    result = client.query(topic, batch_size=100)
    seen = {record.key: record for record in result}
    assert result.header is not None
    assert result.footer is not None
    assert result.footer.returned == len(seen)
    return result.header, seen


class Assault:
    """Rounds of load, kill and check on one server."""

    def __init__(self, folder: Path, seed: str) -> None:
        self.draw = random.Random(seed)
        self.server = ServerProcess(folder, CONFIG, start=False)
        self.audit = Audit()
        short = (5_000, 30_000, 100_000, 400_000, 2_000_000, 60_000_000)
        self.streams = [
            StreamLoad("fsync", "kept", "fsync", draw=self._draw()),
            StreamLoad("buffered", "kept", "buffered", draw=self._draw()),
            StreamLoad("brief", "brief", "buffered", short, draw=self._draw()),
        ]
        self.mixed = MixedLoad("mixed", "mixed", draw=self._draw())
        self.loads: list[Load] = [*self.streams, self.mixed]
        self.highest = (0, 0)
        self._configure()

    def _configure(self) -> None:
        """Draws the indexes of each topic."""
        text = CONFIG
        for topic in ("kept", "mixed", "brief"):
            text = text.replace(f"[topics.{topic}]", f"[topics.{topic}]\nindex = {self.draw.choice(INDEXES)}")
        self.server.configure(text)

    def _draw(self) -> random.Random:
        return random.Random(self.draw.randrange(2**32))

    def rounds(self, count: int) -> None:
        """Kills the server `count` times."""
        self.server.start()
        for number in range(1, count + 1):
            print(f"round {number}")
            self._load_until_killed()
            if number % 2 == 0:
                self._configure()
            if number % 5 == 0:
                self._check_store()
            if number % 7 == 0:
                self._kill_while_starting()
            self.server.start()
            self._check_server()
        assert self.server.terminate() == 0
        self._check_store()
        assert not self.server.faults()

    def _load_until_killed(self) -> None:
        reading = Reading()
        workers = [*(load.run for load in self.loads), reading.run]
        for load in self.loads:
            load.acks = []
        failures: list[BaseException] = []
        clients = [self.server.client(timeout=10) for _ in workers]

        def work(run: Callable[[Client], None], client: Client) -> None:
            try:
                run(client)
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=(run, client), daemon=True)
            for run, client in zip(workers, clients, strict=True)
        ]
        for thread in threads:
            thread.start()
        until(lambda: failures or all(load.acks for load in self.loads), 20, "acknowledgements")
        time.sleep(self.draw.uniform(0.02, 0.35))
        self.server.kill9()
        for client in clients:
            client.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not failures, failures
        assert not reading.wrong
        self._check_acks()

    def _check_acks(self) -> None:
        """No version and no sequence is acknowledged twice, or out of order, over all rounds."""
        acks = [ack for load in self.loads for ack in load.acks]
        assert len(set(acks)) == len(acks)
        for load in self.loads:
            assert load.acks == sorted(load.acks)
        sequences, versions = [ack[0] for ack in acks], [ack[1] for ack in acks]
        assert min(sequences) > self.highest[0], "a sequence from before the kill was given out again"
        assert min(versions) > self.highest[1], "a version from before the kill was given out again"
        self.highest = (max(sequences), max(versions))

    def _kill_while_starting(self) -> None:
        self.server.launch()
        time.sleep(self.draw.uniform(0.3, 1.2))
        self.server.kill9()

    def _check_store(self) -> None:
        store = Store.open(self.server.data)
        try:
            self.audit.check(store)
        finally:
            store.close()
        for load in (self.streams[0], self.streams[1], self.mixed):
            for sequence, version in load.acks:
                assert self.audit.version_of.get(sequence) == version, "what was acknowledged is in the journal"

    def _check_server(self) -> None:
        with self.server.client() as client:
            for topic, loads in (("kept", self.streams[:2]), ("brief", self.streams[2:])):
                header, seen = _all(client, topic)
                for load in loads:
                    load.check(seen, header.as_of_micros)
            header, seen = _all(client, "mixed")
            self.mixed.check(seen, header.as_of_micros)


@pytest.fixture
def assault(tmp_path: Path, seed: int, request: pytest.FixtureRequest) -> Iterator[Assault]:
    made = Assault(tmp_path, f"{seed} {request.node.name}")
    with made.server:
        yield made


@pytest.mark.parametrize("half", [1, 2])  # thirty rounds; two halves, as two processes run the tests
def test_nothing_acknowledged_is_lost_and_nothing_expired_is_seen_when_the_server_is_killed(
    assault: Assault, half: int
) -> None:
    assault.rounds(15)


@pytest.mark.long
def test_the_same_for_five_hundred_rounds(assault: Assault) -> None:
    assault.rounds(500)
