"""The loads of an assault: clients at work on a server that is ended meanwhile, and what each knows afterwards."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Final, Protocol

from sow_client import EARLIEST, NEVER, Ack, Client, DurabilityName, QueryHeader, Record, SowError
from tests.support.servers.server import until

KEYS: Final = 100
PAUSE_EVERY: Final = 40
"""Records after which a stream rests a little: the point is to be killed, not to fill the disk."""
LOST_SECONDS_MAX: Final = 1.0
"""How old an acknowledgement may be that a power cut takes back: 50 ms, and the delay of a busy machine."""
LOADED_ROWS: Final = 40
LEVELS: Final[tuple[DurabilityName, ...]] = ("fsync", "buffered")


class Load(Protocol):
    """One client at work in a thread of its own, and its knowledge afterwards."""

    @property
    def worked(self) -> bool:
        """Whether it has come to something since the server was started."""

    def run(self, client: Client) -> None:
        """Works until the server is gone, with the error that this is to a client."""

    def check(self, client: Client) -> None:
        """Compares the stored state with the acknowledgements, and adopts it."""


@dataclass(slots=True)
class Acks:
    """Acknowledgements since the server was started."""

    lossy: bool = False
    """Whether the end takes changes acknowledged as BUFFERED."""
    all: list[tuple[int, int]] = field(default_factory=list)
    """Sequence and version of each."""
    kept: int = 0
    """How many of them have to be there afterwards: up to the last that was more than BUFFERED."""

    def add(self, sequence: int, version: int, durability: str) -> bool:
        """One more; returns whether it stands, and with it all before."""
        self.all.append((sequence, version))
        stands = not self.lossy or durability != "buffered"
        if stands:
            self.kept = len(self.all)
        return stands

    def clear(self) -> None:
        """The server is started anew."""
        self.all, self.kept = [], 0


@dataclass(frozen=True, slots=True)
class Sent:
    """A record of a stream."""

    key: str
    n: int
    expire_time_micros: int | None = None


@dataclass(slots=True)
class StreamLoad:
    """Publishes rising numbers under keys of its own, in one ordered stream.

    Afterwards the store equals a prefix of the stream: all that was acknowledged, and perhaps more.
    """

    name: str
    topic: str
    durability: str
    lives: tuple[int, ...] = ()
    """Lifetimes to draw from, microseconds; none: for ever."""
    draw: random.Random = field(default_factory=random.Random)
    n: int = 0
    base: dict[str, Sent] = field(default_factory=dict)
    """The state when the present stream began."""
    sent: list[Sent] = field(default_factory=list)
    acknowledged: int = 0
    standing: int = 0
    """How many of `sent` no end may take."""
    heard: list[tuple[float, int]] = field(default_factory=list)
    """When so many of `sent` were acknowledged."""
    lost_seconds: float = 0.0
    """How old the oldest acknowledgement was that was taken back, at most."""
    acks: Acks = field(default_factory=Acks)

    @property
    def worked(self) -> bool:
        return bool(self.acks.all)

    def run(self, client: Client) -> None:
        self.sent, self.acknowledged, self.standing, self.heard = [], 0, 0, []

        def heard(ack: Ack) -> None:
            assert not ack.refusals
            assert ack.duplicates == 0
            self.acknowledged += ack.applied
            self.heard.append((time.monotonic(), self.acknowledged))
            if self.acks.add(ack.last_sequence, ack.last_version, ack.durability):
                self.standing = self.acknowledged

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
        finally:
            publisher.abort()

    def check(self, client: Client) -> None:
        header, seen = query_all(client, self.topic)
        as_of_micros = header.as_of_micros
        mine = {key: record for key, record in seen.items() if key.startswith(self.name + "-")}
        numbers = {key: record.data["n"] for key, record in mine.items()}
        # The longest prefix is told by the newest record that is there; what expired says nothing.
        index_of = {sent.n: index for index, sent in enumerate(self.sent)}
        applied = max([self.standing, *(index_of[n] + 1 for n in numbers.values() if n in index_of)])
        if not self.lives and self.heard:
            lost = [at for at, count in self.heard if count > applied]
            self.lost_seconds = max([self.lost_seconds, *(self.heard[-1][0] - at for at in lost)])
            assert self.lost_seconds < LOST_SECONDS_MAX, "an acknowledged write is on disk within moments"
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
    """The expected state of a record: its number, None for a deleted one, and its stamp."""

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
    loose: list[tuple[str, Kept]] = field(default_factory=list)
    """Keys of the last calls, which an end may undo, with their values before."""
    acks: Acks = field(default_factory=Acks)

    @property
    def worked(self) -> bool:
        return bool(self.acks.all)

    def run(self, client: Client) -> None:
        self.doubt, self.loose = None, []
        while True:
            key = f"{self.name}-{self.draw.randrange(KEYS)}"
            before = self.kept.get(key, Kept(None))
            what = self.draw.choice(("publish", "publish", "touch", "persist", "delete"))
            ttl = self.draw.choice((0.03, 0.3, 3600.0, NEVER))
            durability = self.draw.choice(LEVELS)
            self.doubt = (key, before.n)
            try:
                if what == "delete":
                    self.doubt = (key, None)
                    client.sow_delete(self.topic, keys=[key], durability=durability)
                    self.kept[key] = Kept(None)
                    stands = not self.acks.lossy or durability == "fsync"
                else:
                    if what == "publish":
                        self.n += 1
                        self.doubt = (key, self.n)
                        done = client.publish(
                            self.topic,
                            {"n": self.n},
                            key=key,
                            ttl=ttl,
                            durability=durability,
                        )
                        n: int | None = self.n
                    else:
                        n = before.n
                        done = client.touch(
                            self.topic,
                            key,
                            ttl=NEVER if what == "persist" else ttl,
                            durability=durability,
                        )
                    self.kept[key] = Kept(n, done.expire_time_micros)
                    stands = self.acks.add(done.sequence, done.version, durability)
                self.loose = [] if stands else [*self.loose, (key, before)]
                self.doubt = None
            except SowError as error:
                if error.reason != "RECORD_NOT_FOUND":
                    raise
                # A record that is not there was deleted, or has expired.
                assert before.at(time.time_ns() // 1000 + 1_000_000) is None
                self.doubt = None

    def check(self, client: Client) -> None:
        header, seen = query_all(client, self.topic)
        numbers = {key: record.data["n"] for key, record in seen.items()}
        wrong = self._differing(numbers, header.as_of_micros, self.kept, in_doubt=self.doubt is not None)
        told = wrong
        kept = dict(self.kept)
        # The call in doubt came after all others: with any of these it is lost.
        for key, before in reversed(self.loose):
            if not wrong:
                break
            kept[key] = before
            wrong = self._differing(numbers, header.as_of_micros, kept, in_doubt=False)
        assert not wrong, f"as of {header.as_of_micros}: {told}"
        known = self.kept.keys() | ({self.doubt[0]} if self.doubt else set())
        assert numbers.keys() <= known
        self.kept = {key: Kept(numbers[key], record.expire_time_micros) for key, record in seen.items()}

    def _differing(
        self, numbers: dict[str, int], as_of_micros: int, keeps: dict[str, Kept], *, in_doubt: bool
    ) -> list[str]:
        """The keys of which something else is there than there may be."""
        wrong: list[str] = []
        for key, kept in keeps.items():
            allowed = {kept.at(as_of_micros)}
            if in_doubt and self.doubt is not None and self.doubt[0] == key:
                allowed |= {self.doubt[1], None}  # a touch may have given it a short life
                if kept.n is not None and self.doubt[1] == kept.n:
                    allowed.add(kept.n)
            if numbers.get(key) not in allowed:
                wrong.append(f"{key}: found {numbers.get(key)}, allowed {allowed}")
        return wrong


@dataclass(slots=True)
class LetterLoad:
    """Publishes records that expire soon, whose dead letters go to another topic, and says how many arrive there."""

    draw: random.Random
    n: int = 0
    sent: set[str] = field(default_factory=set)
    """Keys that were sent and for which no letter has been seen."""
    standing: set[str] = field(default_factory=set)
    """Those of them that were acknowledged."""
    acks: Acks = field(default_factory=Acks)

    @property
    def worked(self) -> bool:
        return bool(self.acks.all)

    def run(self, client: Client) -> None:
        while True:
            self.n += 1
            key = str(self.n)
            self.sent.add(key)
            done = client.publish(
                "lettered", {"n": self.n}, key=key, ttl=self.draw.choice((0.01, 0.1, 0.5)), durability="fsync"
            )
            self.acks.add(done.sequence, done.version, "fsync")
            self.standing.add(key)

    def check(self, client: Client) -> None:
        # In this order, as a record becomes a letter in one commit.
        left = query_all(client, "lettered")[1].keys()
        letters = query_all(client, "letters")[1].keys()
        until(lambda: client.count("lettered", "true") == 0, 20, "all records to expire")
        wanted, allowed = self.standing, self.sent

        def arrived() -> bool:
            nonlocal letters
            letters = query_all(client, "letters")[1].keys()
            return wanted <= letters

        until(arrived, 20, f"the letters of {len(wanted)} acknowledged records; {len(left)} were alive at first")
        assert letters <= allowed, "no letter comes twice, and none comes that was never sent"
        client.sow_delete("letters", all=True)
        self.sent, self.standing = set(), set()


@dataclass(slots=True)
class DurableLoad:
    """Consumes a topic through a durable subscription, and acknowledges."""

    name: str
    topic: str
    confirmed: int = 0
    """The sequence up to which it has been told that its acknowledgements are on disk."""
    begun: bool = False

    @property
    def worked(self) -> bool:
        return self.begun

    def run(self, client: Client) -> None:
        self.begun = False
        with client.durable(self.topic, self.name, start=EARLIEST, retry_for=0.0) as durable:
            last = self.confirmed
            for count, change in enumerate(durable):
                if change.bookmark is None:
                    continue
                sequence = sequence_of(change.bookmark)
                assert sequence > last, "it is handed nothing twice, and nothing from before its confirmed position"
                last = sequence
                durable.acknowledge(change)
                if count % 50 == 0:
                    durable.flush()
                    self.confirmed = sequence
                    self.begun = True

    def check(self, client: Client) -> None:
        acknowledged = sequence_of(client.describe_durable(self.topic, self.name).acknowledged)
        assert acknowledged >= self.confirmed, "its place is before the one that it had confirmed"
        self.confirmed = acknowledged


@dataclass(slots=True)
class ReplacingLoad:
    """Replaces the content of a topic by loads, one after the other."""

    n: int = 0
    finished: int = 0
    """The last one that was done."""

    @property
    def worked(self) -> bool:
        return self.finished > 0

    def run(self, client: Client) -> None:
        for load in client.loads("loaded"):
            if load.phase == "staging":
                client.abort_load(load.id)
        while True:
            number = self.n + 1
            load_id = client.open_load("loaded").id
            with client.stage_load(load_id, 0, 1, retry_for=0.0) as stager:
                stager.stage([b'{"id":%d,"n":%d}' % (row, number) for row in range(LOADED_ROWS)])
            self.n = number
            for _ in client.commit_load(load_id, [stager.part()], retry_for=0.0):
                pass
            self.finished = number

    def check(self, client: Client) -> None:
        def settled() -> bool:
            return all(load.phase not in ("applying", "deleting") for load in client.loads("loaded"))

        until(settled, 20, "the load to be finished")
        found = [record.data["n"] for record in query_all(client, "loaded")[1].values()]
        if self.finished or found:
            assert len(found) == LOADED_ROWS
            assert len(set(found)) == 1, "of one load all rows"
            assert self.finished <= found[0] <= self.n
            self.finished = found[0]


def sequence_of(bookmark: str) -> int:
    """The sequence in a bookmark (rule J14)."""
    return int(bookmark.rpartition(".")[2])


@dataclass(slots=True)
class Reading:
    """Reads while others write: nothing expired is ever seen (rule L8)."""

    wrong: list[str] = field(default_factory=list)
    queries: int = 0

    def run(self, client: Client) -> None:
        while True:
            for topic in ("brief", "mixed"):
                header, seen = query_all(client, topic)
                for record in seen.values():
                    stamp = record.expire_time_micros
                    if stamp is not None and stamp <= header.as_of_micros:
                        self.wrong.append(f"{topic}/{record.key}: {stamp} as of {header.as_of_micros}")
            self.queries += 1


def query_all(client: Client, topic: str) -> tuple[QueryHeader, dict[str, Record]]:
    """All records of a topic, by key."""
    result = client.query(topic, batch_size=100)
    seen = {record.key: record for record in result}
    assert result.header is not None
    assert result.footer is not None
    assert result.footer.returned == len(seen)
    return result.header, seen
