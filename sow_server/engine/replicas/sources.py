"""Sources: the applied position of each, and the progress of the seeds of its topics.

[1]  The state of a source is checked before it is stored: with what is in force after a commit the writer must not
     fail.
[2]  A stored state that cannot be used disables its source. Nothing of this source is taken, all other work goes on,
     and the row stays until an operator has it removed. Then the source counts as one that was removed (rule R14).
[3]  Numbers of sources and of origins are never used again, and all sources share two bytes of them. So each source can
     take a part only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

import structlog

from sow_peering import InstanceIdentity, MergeCounts, TopicAnswer, TopicKind
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import (
    NEXT_SOURCE_KEY,
    SEED_UPTO,
    SOURCE_KEY,
    Taken,
    decode_taken,
    encode_taken,
    seed_key,
    seeds_prefix,
    source_key,
    taken_key,
)
from sow_server.engine.disk.rocks import META
from sow_server.engine.pending import Pending
from sow_server.engine.replicas.announced import AnnouncedTopics
from sow_server.engine.replicas.model import (
    SOURCES_MAX,
    SeedState,
    Source,
    decode_source,
    encode_complete,
    encode_source,
)
from sow_server.engine.replicas.sharing import ALL_TOPICS, SharedTopics, compiled, covering
from sow_server.engine.stored import u32
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import INSTANCE_NAME
from sow_server.engine.values.patterns import PatternError

log = structlog.get_logger(__name__)

TAKEN_MAX: Final = 4_096
"""Numbers of sources, or of origins, that one source can take ([3]): how often it begins anew with other data or
another pattern, and how many instances it brings records of. Removing the peer gives it as many again."""
FAULT_CHARACTERS: Final = 300
REMOVED: Final = "removed"
"""In the place of the id and the epoch of a source whose row could not be read."""


class DisabledSource(NamedTuple):
    """A row that cannot be used."""

    key: bytes
    fault: str


def read_source(name: str, row: bytes) -> Source:
    """The source of a row. Raises ValueError."""
    source = decode_source(row)
    if source.identity.name != name:
        raise ValueError(f"it names {source.identity.name[:100]!r}")
    compiled(source.topics)
    return source


class Sources:
    """Owns the states of sources. Rows change on the writer's thread, in commits; other threads read them."""

    def __init__(self, core: Core, shared: SharedTopics, sent: Callable[[], Iterable[str]]) -> None:
        """`sent`: the patterns of the topics that are sent to peers."""
        self._rocks = core.rocks
        self._sent = sent
        self._commits = core.commits
        self._topics = core.topics
        self._shared = shared
        self.by_name: dict[str, Source] = {}
        self.disabled: dict[str, DisabledSource] = {}
        """Keyed by name. Replaced, never changed."""
        rows = core.rocks.cursor(META)
        try:
            for key, row in rows.rows(SOURCE_KEY, SOURCE_KEY + b"\xff"):
                self._read(key, row)
        finally:
            rows.close()
        self.announced: Final = AnnouncedTopics(core.topics)
        self._all_seeded: set[str] = set()
        """Sources whose topics have all been seeded, so that `missing_is_deleted` ends for them. Stored with their next
        cursor."""
        self._passed_over: dict[str, list[bytes]] = {}
        """The rows of seeds that become invalid once the cursor of a source moves, keyed by source."""
        self._lacking: set[bytes] = set()
        """Rows of seeds under way, of topics of which a row or change was refused since they began."""
        self._seeds_version = 0
        """Rises whenever a topic is seeded, or is to be, or a source announces others. Under the cut lock."""
        self.cover()

    def _read(self, key: bytes, row: bytes) -> None:
        name = key[len(SOURCE_KEY) :].decode(errors="backslashreplace")
        try:
            self.by_name[name] = read_source(name, row)
        except ValueError as error:  # PatternError among others ([2])
            self.disabled[name] = DisabledSource(key, str(error)[:FAULT_CHARACTERS])
            log.error("source_disabled", peer=name, cause=str(error)[:FAULT_CHARACTERS])

    @property
    def version(self) -> int:
        """Rises whenever the topics, or the answers about them, may have changed. Cheap to read: there may be thousands
        of topics."""
        return self._topics.version + self._seeds_version

    def cover(self) -> None:
        """Sets the patterns of all links."""
        known = [covering(source.topics) for source in self.by_name.values()]
        # Which topics a disabled source has sent is not known.
        self._shared.cover([*self._sent(), *known, *([ALL_TOPICS] if self.disabled else [])])

    # -- their topics -----------------------------------------------------------------------------------------------

    def get(self, name: str) -> Source | None:
        """The stored state of a source; None: it has never begun, or is disabled."""
        return self.by_name.get(name)

    def answers(self, name: str, kinds: Sequence[TopicKind]) -> list[TopicAnswer]:
        """The answers about a source's topics, which are all that it sends. From here on changes of other topics are
        skipped, so the progress of their seeds is forgotten."""
        if self.announced.announce(name, kinds):
            with self._commits.cut_lock:  # the writer's thread counts, too
                self._seeds_changed()
        found = [self.answer(name, kind) for kind in kinds]
        source = self.by_name.get(name)
        if source is not None and source.missing_is_deleted and not any(answer.wanted for answer in found):
            self._all_seeded.add(name)
        taken = {
            seed_key(name, self._topics.by_name[kind.name].id)
            for kind, answer in zip(kinds, found, strict=True)
            if not answer.reason
        }
        prefix = seeds_prefix(name)
        rows = self._rocks.cursor(META)
        try:
            # Rows of topics that have been deleted here are gone already.
            self._passed_over[name] = [row for row in rows.keys(prefix, prefix + b"\xff" * 5) if row not in taken]
        finally:
            rows.close()
        return found

    def answer(self, name: str, kind: TopicKind) -> TopicAnswer:
        """The answer about one of a source's topics."""
        answer = self.announced.check(kind)
        if answer.reason:
            return answer
        row = self._rocks.get(META, seed_key(name, self._topics.by_name[kind.name].id))
        if not row:
            return TopicAnswer(kind.name, wanted=True)
        wanted = row[0] != SeedState.COMPLETE
        return TopicAnswer(kind.name, wanted, row[SEED_UPTO] if wanted else b"")

    def is_whole(self, source: str, topic: Topic) -> bool:
        """True if a topic has everything of a source's up to its cursor: all rows, completely seeded."""
        if self.by_name[source].filter:
            return False
        row = self._rocks.get(META, seed_key(source, topic.id))
        return row is not None and row[0] == SeedState.COMPLETE

    def has_all(self, source: str, topic: Topic) -> bool:
        """As `is_whole`, and no row of them was refused (rule R13)."""
        row = self._rocks.get(META, seed_key(source, topic.id))
        return self.is_whole(source, topic) and row == encode_complete(lacking=False)

    # -- changing: the writer's thread ------------------------------------------------------------------------------

    def begin(
        self,
        identity: InstanceIdentity,
        *,
        topics: str,
        filter_text: str,
        cursor: int,
        missing_is_deleted: bool,
    ) -> Pending[MergeCounts]:
        """Starts anew with a source: its changes continue after `cursor`, and its topics have to be seeded. Raises
        StoreError INVALID_ARGUMENT ([1])."""
        try:
            compiled(topics)
            covering(topics)
        except PatternError as error:
            cause = str(error)[:FAULT_CHARACTERS]
            raise StoreError(Reason.INVALID_ARGUMENT, f"topics_pattern: is not an RE2 expression ({cause})") from None
        # The number is given when the step is staged.
        source = Source(identity, 0, topics, filter_text, cursor, missing_is_deleted=missing_is_deleted)
        return self._commits.run(BeginSource(self, source), caller=caller_of(identity.name))

    def wait_for(self, name: str, sequence: int) -> Pending[MergeCounts]:
        """Refuses the changes of a source until it has acknowledged a sequence of ours (replicas [4])."""
        return self._commits.run(WaitForSource(self, name, sequence), caller=caller_of(name))

    def remove_disabled(self, name: str) -> Pending[None]:
        """Removes the state of a source that is disabled ([2])."""
        return self._commits.run(_RemoveDisabled(self, name))

    def stage_enabled(self, draft: Draft, name: str) -> None:
        """A disabled source counts as removed. Under a name that no instance can have, its row just goes."""
        draft.batch.deletes[META].append(self.disabled[name].key)
        draft.on_commit.append(partial(self._enabled, name))
        if INSTANCE_NAME.match(name):
            identity = InstanceIdentity(name, REMOVED, REMOVED)
            unknown = Source(identity, self.stage_number(draft), ALL_TOPICS, "", 0)
            self._stage_left(draft, name, unknown)

    def _enabled(self, name: str) -> None:
        self.disabled = {other: row for other, row in self.disabled.items() if other != name}

    def begun(self, name: str) -> None:
        """Other topics may be shared from now on, after the commit in which a source has begun."""
        self._all_seeded.discard(name)
        self.cover()
        for topic in self._topics.by_id.values():
            topic.replicated = self._shared.covers(topic.name)

    def ready(self, name: str) -> Source:
        """A source whose changes are accepted now. Raises StoreError RESEED_PENDING (replicas [4])."""
        source = self.by_name[name]
        if source.wait_for:
            raise StoreError(
                Reason.RESEED_PENDING,
                f"{name} was away for too long: it first has to take the changes here up to {source.wait_for}",
            )
        return source

    def counts_missing_as_deleted(self, name: str, source: Source) -> bool:
        """True if `Source.missing_is_deleted` still holds, or all topics have been seeded since it was stored."""
        return source.missing_is_deleted and name not in self._all_seeded

    def stage(self, draft: Draft, name: str, source: Source) -> None:
        """Puts the state of a source."""
        draft.batch.puts[META][source_key(name)] = encode_source(source)
        draft.on_commit.append(partial(self.by_name.__setitem__, name, source))

    def stage_cursor(self, draft: Draft, name: str, source: Source, cursor: int) -> None:
        """Moves the cursor of a source (replicas [2])."""
        if passed_over := self._passed_over.get(name):
            draft.batch.deletes[META] += passed_over
            self.stage_seeds_change(draft)
        missing_is_deleted = self.counts_missing_as_deleted(name, source)
        self.stage(draft, name, source._replace(cursor=cursor, missing_is_deleted=missing_is_deleted))

    def stage_waits(self, draft: Draft, names: Collection[str]) -> None:
        """Refuses the changes of these sources until they have acknowledged everything up to this commit."""
        for name in names:
            source = self.by_name.get(name)
            if source is not None:
                self.stage(draft, name, source._replace(wait_for=draft.next_sequence - 1))

    def stage_removed(self, draft: Draft, name: str, peer: InstanceIdentity | None, sent: str | None) -> None:
        """An instance sends here no longer, and was sent the topics `sent`, if any, as `peer`. If it comes back, it
        first takes everything up to this commit: tombstones are not kept for it (replicas [4]). Its topics stay shared:
        without tombstones there would be no purge marks either, which tell it then what was deleted."""
        source = self.by_name.get(name)
        if source is None and peer is not None and sent is not None:
            source = Source(peer, self.stage_number(draft), sent, "", 0)
        if source is None:
            return
        topics = source.topics if sent in (None, source.topics) else ALL_TOPICS
        self._stage_left(draft, name, source._replace(topics=topics))

    def _stage_left(self, draft: Draft, name: str, source: Source) -> None:
        prefix = seeds_prefix(name)
        draft.batch.ranges.append((META, prefix, prefix + b"\xff" * 5))
        draft.batch.deletes[META].append(taken_key(name))
        self.stage_seeds_change(draft)
        self.stage(draft, name, source._replace(wait_for=draft.next_sequence - 1, missing_is_deleted=False))
        draft.on_commit.append(partial(self._forget, name))

    def _forget(self, name: str) -> None:
        self.announced.forget(name)
        self._passed_over.pop(name, None)
        self._all_seeded.discard(name)

    def stage_number(self, draft: Draft) -> int:
        """A number for a source that begins anew. Raises StoreError."""
        number = int.from_bytes(self._rocks.get(META, NEXT_SOURCE_KEY) or u32(1), "big")
        if number > SOURCES_MAX:
            raise StoreError(
                Reason.INTERNAL, f"{SOURCES_MAX} sources have begun here, and the journal has room for no more"
            )
        draft.batch.puts[META][NEXT_SOURCE_KEY] = u32(number + 1)
        return number

    def stage_taken(self, draft: Draft, name: str, *, numbers: int = 0, origins: int = 0) -> None:
        """A source takes numbers that all sources share ([3]). Raises StoreError LIMIT_EXCEEDED."""
        key = taken_key(name)
        before = decode_taken(draft.batch.puts[META].get(key) or self._rocks.get(META, key))
        taken = Taken(before.begun + numbers, before.named + origins)
        if max(taken) > TAKEN_MAX:
            begun = taken.begun > TAKEN_MAX
            what = f"begun anew {TAKEN_MAX} times" if begun else f"brought records of {TAKEN_MAX} instances"
            raise StoreError(Reason.LIMIT_EXCEEDED, f"{name} has {what}, the most that one source may")
        draft.batch.puts[META][key] = encode_taken(taken)

    def stage_refused(self, draft: Draft, source: str, topic: Topic) -> None:
        """A row or change of a topic is refused, so that this instance does not have all of the source's."""
        key = seed_key(source, topic.id)
        row = self._rocks.get(META, key)
        if row is not None and row[0] == SeedState.COMPLETE:
            draft.batch.puts[META][key] = encode_complete(lacking=True)
        else:
            self._lacking.add(key)

    def stage_complete(self, draft: Draft, source: str, topic: Topic) -> None:
        """A topic has been seeded completely."""
        key = seed_key(source, topic.id)
        draft.batch.puts[META][key] = encode_complete(lacking=key in self._lacking)
        draft.on_commit.append(partial(self._lacking.discard, key))
        self.stage_seeds_change(draft)

    def stage_unseeded(self, draft: Draft, source: str, name: str) -> None:
        """Changes of a topic are skipped: once it is accepted, it has to be seeded."""
        topic = self._topics.by_name.get(name)
        if topic is not None:
            draft.batch.deletes[META].append(seed_key(source, topic.id))
            self.stage_seeds_change(draft)

    def stage_seeds_change(self, draft: Draft) -> None:
        """The version rises with the commit."""
        draft.on_commit.append(self._seeds_changed)

    def _seeds_changed(self) -> None:
        self._seeds_version += 1


class BeginSource:
    """The step that starts anew with a source."""

    def __init__(self, sources: Sources, source: Source) -> None:
        self._sources = sources
        self._source = source

    def stage(self, draft: Draft) -> None:
        """Puts the source under a new number, and removes the progress of its seeds."""
        name = self._source.identity.name
        self._sources.stage_taken(draft, name, numbers=1)
        number = self._sources.stage_number(draft)
        prefix = seeds_prefix(name)
        draft.batch.ranges.append((META, prefix, prefix + b"\xff" * 5))
        self._sources.stage_seeds_change(draft)
        self._sources.stage(draft, name, self._source._replace(number=number))

    def committed(self) -> MergeCounts:
        """Its topics are shared from now on."""
        self._sources.begun(self._source.identity.name)
        return MergeCounts()


class WaitForSource:
    """The step that makes a source acknowledge a sequence first."""

    def __init__(self, sources: Sources, name: str, sequence: int) -> None:
        self._sources = sources
        self._name = name
        self._sequence = sequence

    def stage(self, draft: Draft) -> None:
        """Puts the source."""
        source = self._sources.by_name[self._name]
        self._sources.stage(draft, self._name, source._replace(wait_for=max(source.wait_for, self._sequence)))

    def committed(self) -> MergeCounts:
        """Has no effects."""
        return MergeCounts()


def caller_of(source: str) -> str:
    """The caller for whom the changes of a source are written (rule N7). Whichever task hands them over, they keep
    their order."""
    return f"peer {source}"


class _RemoveDisabled:
    """The step that removes the state of a disabled source."""

    def __init__(self, sources: Sources, name: str) -> None:
        self._sources = sources
        self._name = name

    def stage(self, draft: Draft) -> None:
        """Removes the row."""
        if self._name in self._sources.disabled:  # else another call has done it
            self._sources.stage_enabled(draft, self._name)

    def committed(self) -> None:
        """Other topics may be shared from now on."""
        self._sources.begun(self._name)
