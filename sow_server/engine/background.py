"""Work on all stored records of a topic, done some records at a time in commits between those of others.

[1]  The progress of a work is a row in `meta`, which moves in the commit that does a part. So a stop or a crash loses
     nothing: the next start resumes.
[2]  The row is put in the commit that makes the work necessary, and removed with the last part, or with its topic or
     index. Work without a row has nothing to do.
[3]  Background work never blocks requests: a part is bounded, and is not queued while the store is stopping or has
     failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import structlog

from sow_server.engine.catalog.indexes import Index, entry_keys
from sow_server.engine.catalog.topics import UNDELIVERED_ID, Topic
from sow_server.engine.commit import letter_copies, letter_posting
from sow_server.engine.commit.draft import Draft
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import DELIVER_KEY, INDEX_KEY, REARM_KEY
from sow_server.engine.disk.rocks import INDEXES, META, RECORDS, Rocks
from sow_server.engine.reading import is_rearming
from sow_server.engine.stored import EXPIRE_TIME, PAYLOAD, RECORD_KEY, unpack_i64
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import NEVER

log = structlog.get_logger(__name__)

REARM_CHUNK: Final = 1000
"""Records that one commit visits, as the next two."""
INDEX_CHUNK: Final = 1000
LETTERS_CHUNK: Final = 250


class Background:
    """Runs the work that takes several commits, and resumes it at a start."""

    def __init__(self, core: Core) -> None:
        self._rocks = core.rocks
        self._commits = core.commits
        self._topics = core.topics
        self._begun = False

    def begin(self) -> None:
        """Resumes the work that the last process did not finish, and begins the work that the configuration has asked
        for since. A start does not wait for either."""
        self._begun = True
        self.rearm([topic for topic in self._topics.by_id.values() if is_rearming(self._rocks, topic)])
        for topic in self._topics.by_id.values():
            if self._rocks.get(META, DELIVER_KEY + topic.prefix) is not None:
                self.deliver(topic)
            for index in topic.indexes.all:
                if not index.complete:
                    self.build(topic, index)

    # -- expiry entries ---------------------------------------------------------------------------------------------

    def stage_rearm(self, draft: Draft, topic: Topic) -> None:
        """Notes that the expiry entries of a topic have to be put, as its expiration is being enabled."""
        draft.batch.puts[META][REARM_KEY + topic.prefix] = topic.prefix

    def rearm(self, topics: Iterable[Topic]) -> None:
        """Puts the expiry entries of topics whose expiration has been enabled, one topic after the other: a policy may
        enable thousands, which the writer's queue would not take at once. L8 holds meanwhile: reads judge by the
        stamp, not by the index."""
        self._rearm_next(iter(topics))

    def _rearm_next(self, topics: Iterator[Topic]) -> None:
        topic = next(topics, None)
        if topic is not None:
            self.run(Rearming(self._rocks, topic), then=lambda: self._rearm_next(topics))

    # -- indexes ----------------------------------------------------------------------------------------------------

    def build(self, topic: Topic, index: Index) -> None:
        """Puts the entries of the records that are older than the index."""
        self.run(IndexBuild(self._rocks, topic, index))

    # -- dead letters -----------------------------------------------------------------------------------------------

    def stage_delivery(self, draft: Draft, topic: Topic) -> bool:
        """Stages the delivery to a topic that is new, or accepts other payloads now. True if dead letters may have
        waited for it, so that `deliver` has to be called after the commit."""
        box = letter_posting.existing_undelivered(draft)
        if box is None or not draft.statistics.get(box.id, box.statistics).records:
            return False
        draft.batch.puts[META][DELIVER_KEY + topic.prefix] = box.prefix + letter_copies.undelivered_prefix(topic.name)
        return True

    def deliver(self, topic: Topic) -> None:
        """Moves the dead letters that have waited for a topic, and that it can take, out of `_undelivered`."""
        self.run(LetterDelivery(self._rocks, self._topics.by_id[UNDELIVERED_ID], topic))

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self, work: ChunkedWork, *, then: Callable[[], None] = lambda: None) -> None:
        """Runs a work to its end, and then a function, even if the work cannot be done."""
        if not self._begun:
            return  # the row is there, and `begin` finds it

        def chunk_done(more: bool | StoreError) -> None:
            if more is True or (isinstance(more, StoreError) and more.reason is Reason.WRITE_STALLED):
                self._commits.run_quietly(work).then(chunk_done)
            elif isinstance(more, StoreError) and more.reason is not Reason.STOPPING:
                # The next start resumes it.
                log.warning("work_interrupted", topic=work.topic_name, row=work.row.hex(), reason=more.reason.name)
                then()
            elif more is False:
                then()

        self._commits.run_quietly(work).then(chunk_done)


class ChunkedWork(ABC):
    """A work on the stored records of a topic, as a step: each commit does the next chunk. The answer says whether
    there may be more."""

    def __init__(self, rocks: Rocks, topic: Topic, row: bytes, *, records_max: int, stop: bytes | None = None) -> None:
        """`row`: the key in `meta` of the position. `stop`: the store key to end before; None: the end of the topic."""
        self.row: Final = row
        self._rocks = rocks
        self._topic = topic
        self._records_max = records_max
        self._stop = stop or topic.stop
        self._more = False
        self._ends = False

    @property
    def topic_name(self) -> str:
        """The topic that the work is for."""
        return self._topic.name

    def stage(self, draft: Draft) -> None:
        """Stages the next chunk, and the position after it."""
        self._more = self._ends = False
        start = self._rocks.get(META, self.row)
        if start is None:
            return
        keys: list[bytes] = []
        values: list[bytes] = []
        cursor = self._rocks.cursor(RECORDS, fill_cache=False)
        try:
            following = cursor.fill(start, self._stop, self._records_max, keys, values)
        finally:
            cursor.close()
        self.stage_records(draft, keys, values)
        if following is None:
            draft.batch.deletes[META].append(self.row)
            self._ends = True
        else:
            draft.batch.puts[META][self.row] = following
            self._more = True

    def committed(self) -> bool:
        """True if there may be more."""
        if self._ends:
            self.finished()
        return self._more

    @abstractmethod
    def stage_records(self, draft: Draft, keys: list[bytes], values: list[bytes]) -> None:
        """Stages the work on some records, given by store keys and stored values."""

    def finished(self) -> None:
        """Follows from the last commit, as `committed` does."""
        return


class Rearming(ChunkedWork):
    """Puts the expiry entries of a topic whose expiration has been enabled."""

    def __init__(self, rocks: Rocks, topic: Topic) -> None:
        super().__init__(rocks, topic, REARM_KEY + topic.prefix, records_max=REARM_CHUNK)

    def stage_records(self, draft: Draft, keys: list[bytes], values: list[bytes]) -> None:
        """Puts their entries."""
        for key, value in zip(keys, values, strict=True):
            expire_time = unpack_i64(value[EXPIRE_TIME])
            if expire_time != NEVER:
                draft.arm(expire_time, key)


class IndexBuild(ChunkedWork):
    """Puts the entries of the records that are older than an index. A change meanwhile puts its own entries, so that
    after the last chunk the index is complete."""

    def __init__(self, rocks: Rocks, topic: Topic, index: Index) -> None:
        super().__init__(rocks, topic, INDEX_KEY + index.prefix, records_max=INDEX_CHUNK)
        self._index = index

    def stage_records(self, draft: Draft, keys: list[bytes], values: list[bytes]) -> None:
        """Puts their entries."""
        decode, entries = self._topic.decode_indexed, draft.batch.puts[INDEXES]
        for key, value in zip(keys, values, strict=True):
            entries.update(dict.fromkeys(entry_keys(self._index, decode(value[PAYLOAD]), key[RECORD_KEY]), b""))

    def finished(self) -> None:
        """From now on queries use the index."""
        topic, built = self._topic, self._index
        indexes = [index._replace(complete=True) if index.id == built.id else index for index in topic.indexes.all]
        topic.indexes = topic.indexes._replace(all=tuple(indexes))
        log.info("index_built", topic=topic.name, path=built.path)


class LetterDelivery(ChunkedWork):
    """Moves the dead letters that have waited for a topic out of `_undelivered`."""

    def __init__(self, rocks: Rocks, box: Topic, target: Topic) -> None:
        stop = box.prefix + letter_copies.undelivered_stop(target.name)
        super().__init__(rocks, box, DELIVER_KEY + target.prefix, records_max=LETTERS_CHUNK, stop=stop)
        self._target = target

    @property
    def topic_name(self) -> str:
        """The topic that the letters go to."""
        return self._target.name

    def stage_records(self, draft: Draft, keys: list[bytes], values: list[bytes]) -> None:
        """Moves the letters that the target can take."""
        letter_posting.deliver_waiting(draft, self._topic, self._target, keys, values)
