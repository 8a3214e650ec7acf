"""The model of a store of dicts: its commits, its clock, and the changes and reads of its users.

Simple and obviously right: a commit is a list of closures that run at once. A crash loses the closures that have not
run; a power cut also loses the writes that were not synced. A commit of replication is synced before its answer; local
changes are synced later, as BUFFERED publishes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sow_peering import InstanceIdentity, MergeCounts, PeerState, TopicKind
from sow_peering.answers import Answer
from sow_replication.ports import Counted, Refused
from tests.support.simulation.replica_rows import Backup, Disk, Entry, Kept, ModelTopic, Row, Written


def given(result: MergeCounts | Refused) -> Counted:
    """An answer that is there at once."""
    counted: Counted = Answer()
    counted.settle(result)
    return counted


class LocalStore:
    """One instance's store, without replication: the commits, the clock, and the changes and reads of its users."""

    def __init__(
        self,
        name: str,
        now: Callable[[], int],
        peers: Sequence[str] = (),
        *,
        written: Callable[[Written], None] = lambda written: None,
    ) -> None:
        self._now = now
        self._peers = list(peers)
        self._written = written
        self._lives = 0
        self._versions = 0
        self._identity = InstanceIdentity(name, f"{name}-id-0", f"{name}-epoch-0")
        self.disk = Disk()
        self._synced = Disk()
        """The state after a power cut."""
        self._dirty = False
        self._sync_asked = False
        """Whether somebody waits for the next commit to be durable."""
        self._unheard: list[Written] = []
        """Changes that were accepted and are not durable."""
        self._peer_memory: dict[str, PeerState] = {}
        self._queue: list[Callable[[], Callable[[], None] | None]] = []
        self._dropped: set[tuple[str, str]] = set()
        self._authoritative = False
        self.down = False

    # -- identity, clock --------------------------------------------------------------------------------------------

    @property
    def identity(self) -> InstanceIdentity:
        return self._identity

    @property
    def cluster(self) -> str:
        return ""

    @property
    def authoritative(self) -> bool:
        return self._authoritative

    @property
    def disabled(self) -> Mapping[str, str]:
        return {}

    def pattern_fault(self, text: str) -> str:
        return ""

    def filter_fault(self, text: str) -> str:
        return ""

    def now_micros(self) -> int:
        return self._now()

    def head(self) -> int:
        return self._synced.head

    @property
    def topics_version(self) -> int:
        self._versions += 1  # always another: it is looked at in any case
        return self._versions

    # -- commits ----------------------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], Callable[[], None] | None], *, sync: bool = False) -> None:
        self._queue.append(job)
        self._sync_asked = self._sync_asked or sync

    def _submit_for(self, job: Callable[[], MergeCounts | Refused]) -> Counted:
        counted: Counted = Answer()

        def run() -> Callable[[], None]:
            result = job()
            return lambda: counted.settle(result)

        self._submit(run, sync=True)
        return counted

    def busy(self) -> bool:
        return bool(self._queue)

    def step(self, *, sync: bool = True) -> bool:
        queue, self._queue = self._queue, []
        asked, self._sync_asked = self._sync_asked, False
        answers = [job() for job in queue]
        self.disk.peers = dict(self._peer_memory)
        if sync or asked:
            self.sync()
        elif queue:
            self._dirty = True
        for answer in answers:
            if answer is not None:
                answer()
        return bool(queue)

    def unsynced(self) -> bool:
        return self._dirty

    def sync(self) -> None:
        self._dirty = False
        self._synced = self.disk.copied()
        heard, self._unheard = self._unheard, []
        for written in heard:
            self._written(written)

    def save(self) -> None:
        """Every step does."""

    def crash(self, *, power: bool = False) -> Sequence[Written]:
        self._queue = []
        lost: Sequence[Written] = ()
        self._sync_asked = False
        if power:
            # Versions and sequences that were used are not used again (rule K7).
            reserved = self.disk
            self.disk = self._synced
            self.disk.head, self.disk.last = reserved.head, reserved.last
            lost, self._unheard = self._unheard, []
        self.sync()
        self._peer_memory = dict(self.disk.peers)
        return lost

    def backup(self) -> Disk:
        return self.disk.copied()

    def restore(self, backup: Backup, *, authoritative: bool = False) -> None:
        assert isinstance(backup, Disk), "one of this kind of store"
        self._lives += 1
        name = self._identity.name
        self._identity = InstanceIdentity(name, f"{name}-id-{self._lives}", f"{name}-epoch-{self._lives}")
        self._authoritative = authoritative
        self._queue = []
        self.disk = backup.copied()
        for topic in self.disk.topics.values():
            topic.rows = {key: kept._replace(own=False) for key, kept in topic.rows.items()}
        self.disk.last = max(self.disk.last, self._now())
        self._unheard = []
        self.sync()
        self._peer_memory = dict(self.disk.peers)

    # -- changes ----------------------------------------------------------------------------------------------------

    def _mint(self) -> int:
        self.disk.last = max(self._now(), self.disk.last + 1)
        return self.disk.last

    def _put(self, topic: str, key: str, row: Row, via: InstanceIdentity | None, *, own: bool = False) -> None:
        disk = self.disk
        disk.head += 1
        disk.journal.append(Entry(disk.head, self._now(), topic, key, row, via))
        disk.topics[topic].rows[key] = Kept(row, disk.head, self._now(), own)
        disk.last = max(disk.last, row.version)

    def _due(self, topic: ModelTopic, row: Row) -> bool:
        return topic.kind.acts and row.payload is not None and 0 < row.stamp <= self._now()

    def _expire(self, topic: str, key: str, row: Row) -> None:
        own = self.disk.topics[topic].rows[key].own
        self._put(topic, key, self._grace_tombstone(row), None, own=own)

    def _grace_tombstone(self, row: Row) -> Row:
        return Row(row.version, row.origin, 0, None, expired=True)

    def _expire_if_due(self, topic: str, key: str) -> None:
        kept = self.disk.topics[topic].rows.get(key)
        if kept is not None and self._due(self.disk.topics[topic], kept.row):
            self._expire(topic, key, kept.row)

    def _write(self, topic: str, key: str, change: Callable[[Row | None], Row | None]) -> None:
        """A local change: `change` is given the live record, and a version of 0 is filled in."""

        def job() -> None:
            if topic not in self.disk.topics:
                return
            self._expire_if_due(topic, key)
            kept = self.disk.topics[topic].rows.get(key)
            live = kept.row if kept is not None and kept.row.payload is not None else None
            row = change(live)
            if row is not None:
                row = row._replace(version=self._mint(), origin=self._identity.name)
                self._put(topic, key, row, None, own=True)
                self._unheard.append(Written(self._identity.name, topic, key, row))

        self._submit(job)

    def _stamp(self, ttl_micros: int | None) -> int:
        return 0 if ttl_micros is None else self._now() + ttl_micros

    def create(self, topic: str, *, acts: bool = True, key: tuple[str, ...] = ()) -> None:
        def job() -> None:
            self.disk.topics.setdefault(
                topic, ModelTopic(TopicKind(topic, key, "json", b"\x01", acts), floor=self.disk.head)
            )

        self._submit(job, sync=True)

    def drop_topic(self, topic: str) -> None:
        def job() -> None:
            self.disk.topics.pop(topic, None)
            self.disk.journal = [entry for entry in self.disk.journal if entry.topic != topic]
            for source in self.disk.sources.values():
                source.seeds.pop(topic, None)

        self._submit(job, sync=True)

    def publish(self, topic: str, key: str, payload: str, ttl_micros: int | None = None) -> None:
        self._write(topic, key, lambda live: Row(0, "", self._stamp(ttl_micros), payload))

    def delta(self, topic: str, key: str, payload: str) -> None:
        def change(live: Row | None) -> Row:
            return Row(0, "", 0, payload) if live is None else live._replace(payload=f"{live.payload}+{payload}"[-40:])

        self._write(topic, key, change)

    def touch(self, topic: str, key: str, ttl_micros: int) -> None:
        self._write(topic, key, lambda live: None if live is None else live._replace(stamp=self._stamp(ttl_micros)))

    def delete(self, topic: str, key: str) -> None:
        self._write(topic, key, lambda live: None if live is None else Row(0, "", 0, None))

    def sweep(self) -> None:
        def job() -> None:
            for name, topic in self.disk.topics.items():
                for key, kept in list(topic.rows.items()):
                    if self._due(topic, kept.row):
                        self._expire(name, key, kept.row)

        self._submit(job)

    def prune(self, upto: int) -> None:
        def job() -> None:
            for entry in self.disk.journal:
                if entry.sequence <= upto:
                    topic = self.disk.topics[entry.topic]
                    topic.floor = max(topic.floor, entry.sequence)
            self.disk.journal = [entry for entry in self.disk.journal if entry.sequence > upto]

        self._submit(job, sync=True)

    # -- content ---------------------------------------------------------------------------------------------------

    def records(self, topic: str) -> dict[str, Row]:
        found = self.disk.topics.get(topic)
        if found is None:
            return {}
        return {
            key: kept.row
            for key, kept in sorted(found.rows.items())
            if kept.row.payload is not None and not self._due(found, kept.row)
        }

    def tombstones(self, topic: str) -> dict[str, Row]:
        found = self.disk.topics.get(topic)
        rows = {} if found is None else found.rows
        return {key: kept.row for key, kept in sorted(rows.items()) if kept.row.payload is None}

    def dropped(self) -> set[tuple[str, str]]:
        return self._dropped
