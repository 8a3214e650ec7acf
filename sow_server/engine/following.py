"""The store as another process sees it, read only: the state after one commit, which moves only when it is told to.

[1]  A state is that between two commits, and none of the commits that had ended when it was asked for is missing.
[2]  The `now` of a cut is not before any commit that the cut shows, and not after the clock of the store. So a
     record that a cut finds expired stays so for every later read of the store (rule L8).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sow_server.engine.catalog.indexes import Indexes
from sow_server.engine.catalog.topics import Declaration, Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.core import Core
from sow_server.engine.disk.backups import DATABASE
from sow_server.engine.disk.layout import Reached, decode_reached
from sow_server.engine.disk.rocks import INDEXES, MARK_BYTES, MARK_KEY, META, RECORDS, Cursor, Secondary
from sow_server.engine.pending import Pending
from sow_server.engine.reading import Cut, IndexCursor, Skipped, Wanted
from sow_server.engine.stored import StoredStatistics
from sow_server.engine.values.database import Failed, RocksOptions
from sow_server.engine.values.fields import Steps
from sow_server.engine.values.model import NEVER, TopicSettings
from sow_server.engine.values.turns import SERVER
from sow_server.engine.values.views import ViewDefinition

NO_STATISTICS: Final = StoredStatistics()


class TopicImage(NamedTuple):
    """A topic as it is at one moment, to be sent to another process."""

    id: int
    name: str
    settings: TopicSettings
    indexes: Indexes
    view: ViewDefinition | None = None

    @classmethod
    def of(cls, topic: Topic) -> TopicImage:
        """The topic as it is now. Under the cut lock."""
        return cls(topic.id, topic.name, topic.settings, topic.indexes, topic.view)

    def shows(self, topic: Topic) -> bool:
        """True if the topic is still read in the same way."""
        return self.settings is topic.settings and self.indexes is topic.indexes

    def topic(self, statistics: StoredStatistics = NO_STATISTICS) -> Topic:
        """A topic for reading."""
        return Topic(
            self.id,
            self.name,
            self.settings,
            create_time_micros=0,
            statistics=statistics,
            indexes=self.indexes,
            declaration=Declaration(view=self.view),
        )


class Moment(NamedTuple):
    """A state of the store that a follower must have reached, and the time by the store's clock."""

    write_number: int
    """The number of a beat that was made for this moment (rocks [15])."""
    start_sequence: int
    """The last sequence that may have been used before the store's start."""
    sequence: int
    now_micros: int
    next_due: int = NEVER
    """When the next record is overdue, as far as the sweep knows (rule V5)."""


class Beats:
    """Makes moments for followers of the store. From any thread."""

    def __init__(self, core: Core) -> None:
        self._rocks = core.rocks
        self._commits = core.commits
        self._clock = core.clock

    def begin(self) -> None:
        """From now on the database can be followed. To be called before it is opened for that; it may take a while,
        because the memtables are written out. Raises RocksError."""
        with self._commits.cut_lock:
            self._rocks.marking = True
        self._rocks.flush()

    def make(self) -> Pending[Moment]:
        """Makes a moment with a commit of its own. Raises StoreError."""
        return self._commits.run(_Beat(self._now), sync=False, caller=SERVER)  # one for all who wait

    def _now(self) -> Moment:
        commits = self._commits
        return Moment(
            self._rocks.write_number,
            commits.start_sequence,
            commits.last_sequence,
            self._clock.now_micros(),
            commits.next_due,
        )


class _Beat:
    """The step whose commit a follower has to see."""

    def __init__(self, now: Callable[[], Moment]) -> None:
        self._now = now

    def stage(self, draft: Draft) -> None:
        """Marks the draft."""
        draft.batch.beat = True

    def committed(self) -> Moment:
        """The moment after the commit."""
        return self._now()


class FollowedCuts:
    """Opens cuts of one state. To be used before the follower moves on."""

    def __init__(
        self, database: Secondary, sequence: int, now_micros: int, skipped: Skipped, next_due: int = NEVER
    ) -> None:
        self._database = database
        self._sequence = sequence
        self._now_micros = now_micros
        self._skipped = skipped
        self._next_due = next_due

    def records(
        self,
        topic: Topic,
        index_paths: Collection[Steps] = (),
        *,
        counted: bool = False,
        unreadable: bool = False,
        reads_from: bytes | None = None,
    ) -> Cut:
        """The records of a topic, with its complete indexes on `index_paths`, as `Cuts.records`. Their number is known
        to the store alone, so it cannot be asked for here. `reads_from`: all records from this key on will be read."""
        assert not counted, "the store answers from its own figures"
        return Cut(
            topic,
            self._now_micros if topic.view is None else min(self._now_micros, self._next_due - 1),
            self._sequence,
            topic.acts,
            self._sequential(topic, reads_from) if reads_from is not None else self._database.cursor(RECORDS),
            {
                index.steps: IndexCursor(index.prefix, self._database.cursor(INDEXES))
                for index in topic.indexes.all
                if index.complete and index.steps in index_paths
            },
            None,
            None if unreadable else self._skipped,
        )

    def together(self, wanted: Iterable[Wanted]) -> Sequence[Cut]:
        """The records of several topics, as `Cuts.together`: all cuts are of this state."""
        return [self.records(topic, index_paths) for topic, index_paths in wanted]

    def _sequential(self, topic: Topic, start: bytes) -> Cursor:
        """A topic that does not fit into the cache would find none of its blocks there the next time, and would push
        out all others."""
        fits = topic.statistics.record_bytes <= self._database.cache_bytes
        return self._database.cursor(RECORDS, fill_cache=fits, reads_from=topic.prefix + start)


class Follower:
    """Follows the database of a store. For one thread."""

    def __init__(self, path: Path, options: RocksOptions, *, log_folder: Path) -> None:
        """`path`: the data directory. Raises RocksError."""
        self._database: Final = Secondary(path / DATABASE, options, log_folder=log_folder)

    def at(self, moment: Moment, skipped: Skipped) -> FollowedCuts:
        """Moves on to the state of a moment, or to a later one. The moment begins after the last call of this method,
        or of `move`, has returned. `skipped`: as of `Cut`. Raises Stale, RocksError."""
        self._database.catch_up(moment.write_number)
        reached = self._reached()
        sequence = max(reached.sequence, moment.start_sequence)
        if sequence < moment.sequence:
            raise Failed(f"the followed database shows sequence {sequence}, and {moment.sequence} was committed")
        now = max(reached.commit_time_micros, moment.now_micros)
        return FollowedCuts(self._database, sequence, now, skipped, moment.next_due)

    def move(self) -> None:
        """Moves on, so that the next cut has less to catch up with. Raises RocksError."""
        self._database.move()

    def log_bytes(self) -> int:
        """Bytes of the database's logs, about."""
        return self._database.log_bytes()

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

    def _reached(self) -> Reached:
        cursor = self._database.cursor(META)
        try:
            row = cursor.find(MARK_KEY)
        finally:
            cursor.close()
        assert row is not None, "the state shows a beat"
        return decode_reached(row[MARK_BYTES:])
