"""Receiving: changes and rows of other instances are merged into this one (replicas [1], [2])."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from sow_peering import NOTHING_PURGED, MergeCounts, PublisherMark, Purged, SeedRange
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.commits import Commits
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.soundness import Fault, RowLimits, bad_names, faults
from sow_server.engine.commit.steps import Staged
from sow_server.engine.commit.told import OUTCOMES_KEPT, UNKNOWN_TOPIC, PassedOn, Told
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import SEED_STATE, SEED_UPTO, seed_key
from sow_server.engine.disk.rocks import META, RECORDS
from sow_server.engine.pending import Pending
from sow_server.engine.replicas.dropped import DroppedFiles
from sow_server.engine.replicas.merging import Dead, Merge, Tally, decoded, earlier_numbers
from sow_server.engine.replicas.model import ReplicaOptions, SeedState, Source
from sow_server.engine.replicas.sources import Sources, caller_of
from sow_server.engine.replicas.tombstone_purge import Tombstones
from sow_server.engine.stored import HEADER, PAYLOAD, RECORD_KEY, Changes, PublisherNote, read_header
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS

log = structlog.get_logger(__name__)

PUBLISHER_ID_CHARACTERS_MAX: Final = 1000
"""The bound of a publisher's id as it is stored, with its owner."""
SEQUENCE_MAX: Final = 2**62 + 2**20
"""The highest sequence of a publisher: the first of a request is at most 2^62."""
DROP_MAX: Final = 1000
"""Records that one commit looks at for dropping."""
PLACES_MAX: Final = 2**14
"""The topics and refusals of the marks that one commit learns, and one a mark: each takes the writer up to 10 µs.
A message of a peer may have many more; publishers here have their turn between the commits (rule R15)."""


class PeerChanges:
    """Has the writer merge changes and rows of other instances."""

    def __init__(
        self, core: Core, path: Path, options: ReplicaOptions, sources: Sources, tombstones: Tombstones
    ) -> None:
        self.rocks: Final = core.rocks
        self.topics: Final = core.topics
        self.origins: Final = core.origins
        self.sources: Final = sources
        self.tombstones: Final = tombstones
        self.dropped: Final = DroppedFiles(path)
        self._options = options
        self._commits = core.commits
        self._syncs = SharedSyncs(core.commits)
        self._unsound = core.unsound
        limits = core.limits
        self.limits: Final = RowLimits(limits.key_bytes_max, limits.payload_bytes_max, options.max_clock_skew_micros)
        """Limits that a row of a peer must keep to, as a publish here must."""

    def apply(
        self,
        name: str,
        *,
        after: int,
        upto: int,
        chunks: Sequence[tuple[str, bytes]],
        origins: Sequence[str],
        publishers: Sequence[PublisherMark] = (),
    ) -> Pending[MergeCounts]:
        """Applies changes of a source, moves its cursor, and remembers their publishers. Raises StoreError
        BATCH_DAMAGED at once. The answer is CLOCK_SKEW, or another refusal, where nothing is applied."""
        changes_of = [(topic, decoded(topic, chunk)) for topic, chunk in chunks]
        step = ApplyChanges(self, name, after, upto, changes_of, origins, publishers)
        return self._commits.run_in_rounds(step, caller=caller_of(name))

    def merge(
        self, name: str, part: SeedRange, *, chunk: bytes, origins: Sequence[str], purged: Purged
    ) -> Pending[MergeCounts]:
        """Merges a part of a topic's snapshot, and remembers how far it is. Records in that range that only this
        instance has are dropped if they are at or below the purge mark `purged` of the source (rule R4). Refused as
        `apply`."""
        changes = decoded(part.topic, chunk) if chunk else None
        step = MergeSeed(self, name, part, changes, origins, purged)  # each round drops some of the records
        durable: Pending[MergeCounts] = Pending()

        def merged(result: MergeCounts | StoreError) -> None:
            if isinstance(result, StoreError):
                durable.settle(result)
            else:
                self._syncs.next().then(lambda synced: durable.settle(synced or result))

        self._commits.run_in_rounds(step, sweep_first=False, sync=False, caller=caller_of(name)).then(merged)
        return durable

    def merge_rows(self, topic: Topic, chunk: bytes, origins: Sequence[str], *, source: str) -> Pending[MergeCounts]:
        """Merges rows by version, for a repair with a peer; they go on to every peer.

        A row that is missing here, and not above the purge mark, is left out: it may have been deleted (rule R4). If
        this instance has lost it instead, the row stays alive at the peer. Raises StoreError BATCH_DAMAGED at once.
        """
        step = MergeRows(self, topic, decoded(topic.name, chunk), origins, source)
        return self._commits.run(step, caller=caller_of(source))

    # -- for the steps: the writer's thread -------------------------------------------------------------------------

    def stage_origins(self, draft: Draft, source: str, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """The numbers here of a peer's origins, and the peer's numbers of origins without a valid name of an instance,
        which are not stored. Raises StoreError."""
        bad = bad_names(names)
        wrong = set(bad)
        sound = [name for number, name in enumerate(names) if number not in wrong] if bad else names
        if unknown := self.origins.unknown_in(draft, sound):
            self.sources.stage_taken(draft, source, origins=unknown)
        good = self.origins.stage(draft, sound)
        if not bad:
            return good, bad
        numbers = iter(good)
        return [0 if number in wrong else next(numbers) for number in range(len(names))], bad

    def find_faults(
        self, draft: Draft, source: str, topic: Topic, changes: Changes, bad_origins: Sequence[int]
    ) -> Mapping[int, Fault]:
        """The changes that are left out because no publish could have made them (soundness [1])."""
        found = faults(topic, changes, bad_origins, self.limits, draft.now)
        if found:
            draft.on_commit.append(lambda: self._unsound.refuse(source, topic, changes, found, draft.now))
        return found

    def learn(self, draft: Draft, mark: PublisherMark, topics: Sequence[Topic], source: Source) -> None:
        """Stages what a source has told of a publisher, and notes it for other peers."""
        used_micros = min(mark.used_micros, draft.now) if mark.used_micros else draft.now
        name, ids, refused = mark.publisher_id, tuple([topic.id for topic in topics]), mark.refused[-OUTCOMES_KEPT:]
        told = Told(source.identity.name, mark.epoch, mark.token, ids, mark.whole, refused=refused)
        publishers = self._commits.publishers
        known = draft.publishers.get(name) or publishers.find(name)
        if told.passed_on:
            rows = publishers.passed_on

            def known_of(topic_ids: Sequence[int]) -> Mapping[int, PassedOn]:
                staged = draft.passed_on.get(name, {})
                others = [topic_id for topic_id in topic_ids if topic_id not in staged]
                read = rows.of_topics(name, others) if known.has_passed_on else dict.fromkeys(others, ())
                return {topic_id: staged.get(topic_id) or read.get(topic_id, ()) for topic_id in topic_ids}

            changed = known.learn_passed_on(told, mark.first, mark.last, known=known_of)
            if not changed:
                return
            draft.publishers[name] = known.used(used_micros)._replace(has_passed_on=True)
            draft.passed_on.setdefault(name, {}).update(changed)
            draft.on_commit.append(partial(rows.changed, name, changed))
        else:
            sends = partial(self._sends, source.identity.name)
            learned = known.learn(told, mark.first, mark.last, used_micros, sends=sends)
            if learned is known:
                return
            draft.publishers[name] = learned
            # One set of topics: an instance that is told keeps the sequences of each set apart (publishers [7]).
            ids = learned.told[-1].topics if UNKNOWN_TOPIC not in learned.told[-1].topics else ids
        draft.notes.append(
            PublisherNote(
                name, mark.epoch, mark.token, mark.first, mark.last, ids, refused, source.number, mark.used_micros
            )
        )

    def _sends(self, source: str, topic_id: int) -> bool | None:
        """True if a topic is one of a source's; None: it has been deleted."""
        topic = self.topics.by_id.get(topic_id)
        return None if topic is None else self.sources.announced.takeable(source, topic.name) is not None

    def check_skew(self, draft: Draft, batches: Iterable[Changes], purged: Purged = NOTHING_PURGED) -> None:
        """Raises StoreError CLOCK_SKEW for versions that are too far in the future (rule K7), also that of a purge
        mark: all records here are below a mark of some other age."""
        highest = max([purged.version, *[max(changes.version, default=0) for changes in batches]])
        ahead = highest - draft.now
        if ahead > self._options.max_clock_skew_micros:
            raise StoreError(
                Reason.CLOCK_SKEW,
                f"a version is {ahead / MICROS:.1f} s in the future, more than max_clock_skew = "
                f"{self._options.max_clock_skew_micros / MICROS:.1f} s: a clock is wrong, here or there",
                details={"ahead_micros": str(ahead)},
            )


class SharedSyncs:
    """The durability of commits that were not synced. One sync covers all commits before it, so the parts of a seed
    that come while a sync is awaited share the next one. Used by the thread of the writer's answers."""

    def __init__(self, commits: Commits) -> None:
        self._commits = commits
        self._waiting: list[Pending[None]] = []
        self._asked = False

    def next(self) -> Pending[None]:
        """Answered once all commits so far are durable."""
        synced: Pending[None] = Pending()
        self._waiting.append(synced)
        if not self._asked:
            self._ask()
        return synced

    def _ask(self) -> None:
        covered, self._waiting = self._waiting, []

        def answered(result: StoreError | None) -> None:
            self._asked = False
            for synced in covered:
                try:
                    synced.settle(result)
                except Exception:
                    log.exception("answer_failed")  # a fault of this callback; the others still have to be called
            if self._waiting and not self._asked:
                self._ask()

        self._asked = True
        try:
            self._commits.barrier().then(answered)
        except StoreError as error:  # the store is stopping, or has failed
            answered(error)


class ApplyChanges:
    """The step, in rounds, that applies changes of a source, and moves its cursor. The first round does all of it, but
    for publishers beyond `PLACES_MAX`. If the store ends before these are learned, their records may be applied twice:
    they are here, and the source tells of their publishers again once it is back."""

    def __init__(
        self,
        owner: PeerChanges,
        name: str,
        after: int,
        upto: int,
        changes_of: Sequence[tuple[str, Changes]],
        origins: Sequence[str],
        publishers: Sequence[PublisherMark],
    ) -> None:
        self._owner = owner
        self._name = name
        self._after = after
        self._upto = upto
        self._changes_of = changes_of
        self._origins = origins
        self._publishers = publishers
        self._learned: int | None = None
        """How many of the publishers are learned, as of the last commit; None: the changes are not applied yet."""
        self._tally = Tally()

    def stage(self, draft: Draft) -> Staged:
        """Merges the changes of topics that this instance can take. The others have to be seeded later."""
        source = self._owner.sources.ready(self._name)
        learned = self._learned
        if learned is None:
            learned = 0 if self._apply(draft, source) else len(self._publishers)
        learned = self._learn(draft, source, learned)
        draft.on_commit.append(partial(setattr, self, "_learned", learned))  # not before (steps [3])
        return Staged.AGAIN if learned < len(self._publishers) else Staged.DONE

    def _apply(self, draft: Draft, source: Source) -> bool:
        """Returns True if the publishers of the changes are to be learned."""
        owner, name = self._owner, self._name
        sources = owner.sources
        if self._after > source.cursor:
            raise StoreError(
                Reason.BATCH_DAMAGED,
                f"changes after {self._after} came, but this instance has changes only up to {source.cursor}",
            )
        self._tally = tally = Tally()
        if self._upto <= source.cursor:
            return not self._changes_of
        owner.check_skew(draft, [changes for _, changes in self._changes_of])
        own, bad_origins = owner.stage_origins(draft, name, self._origins)
        draft.journal.source = source.number
        taken = True
        for topic_name, changes in self._changes_of:
            topic = sources.announced.takeable(name, topic_name)
            if topic is None:
                sources.stage_unseeded(draft, name, topic_name)
                taken = False
                continue
            draft.journal.atomic = changes.atomic
            found = owner.find_faults(draft, name, topic, changes, bad_origins)
            if found:
                sources.stage_refused(draft, name, topic)
                taken = False
            Merge(draft, topic, owner.origins.names_in(draft), tally).apply(changes, own, found)
            draft.end_request()
        sources.stage_cursor(draft, name, source, self._upto)
        return taken  # a change that was left out may be of any of the publishers: then none of them is remembered

    def _learn(self, draft: Draft, source: Source, learned: int) -> int:
        """Remembers the publishers whose records are here now (rule F11), as many as one commit may learn. Returns how
        many are learned then."""
        owner, sources = self._owner, self._owner.sources
        before, places = learned, 0
        for mark in self._publishers[learned:]:
            places += 1 + len(mark.topics) + len(mark.refused)
            if places > PLACES_MAX and learned > before:
                break
            learned += 1
            topics = [sources.announced.takeable(self._name, topic) for topic in mark.topics]
            found = [topic for topic in topics if topic is not None]
            # It counts for its topics alone (publishers [7]): all of them are this source's, and there is one.
            if not found or len(found) < len(topics) or not _is_sound(mark):
                continue
            if mark.whole and not all(sources.has_all(self._name, topic) for topic in found):
                continue
            owner.learn(draft, mark, found, source)
        return learned

    def committed(self) -> MergeCounts:
        """The outcomes of the changes."""
        return self._tally.counts()


def _is_sound(mark: PublisherMark) -> bool:
    named = 0 < len(mark.publisher_id) <= PUBLISHER_ID_CHARACTERS_MAX
    return named and mark.epoch >= 0 and mark.token > 0 and 0 < mark.first <= mark.last <= SEQUENCE_MAX


class MergeSeed:
    """The step, in rounds, that merges a part of a topic's snapshot. Each round but the last only drops records."""

    def __init__(
        self,
        owner: PeerChanges,
        name: str,
        part: SeedRange,
        changes: Changes | None,
        origins: Sequence[str],
        purged: Purged,
    ) -> None:
        self._owner = owner
        self._name = name
        self._part = part
        self._changes = changes
        self._origins = origins
        self._purged = purged
        self._tally = Tally()
        self._counts = MergeCounts()
        self._position = part.after_key + b"\0" if part.after_key else b""
        """The key from which the next round looks for records to drop."""

    def stage(self, draft: Draft) -> Staged:
        """Drops records, or merges the rows and puts the progress of the seed."""
        owner, name, part, changes = self._owner, self._name, self._part, self._changes
        sources = owner.sources
        topic = sources.announced.takeable(name, part.topic)
        if topic is None:
            return Staged.DONE
        source, before = sources.ready(name), owner.rocks.get(META, seed_key(name, topic.id))
        if part.first:
            first_time = before is None or before[0] == SeedState.UNDER_WAY
            before = bytes((SeedState.UNDER_WAY if first_time else SeedState.AGAIN,))
        elif before is None or before[0] == SeedState.COMPLETE or before[SEED_UPTO] < part.after_key:
            raise StoreError(
                Reason.BATCH_DAMAGED,
                f"a seed of {part.topic} continues at a position that this instance has not reached",
            )
        owner.check_skew(draft, [] if changes is None else [changes], self._purged)
        if self._purged.version and bad_names([self._purged.origin]):
            raise StoreError(
                Reason.INVALID_ARGUMENT, f"purged_origin: {self._purged.origin[:100]!r} is not the name of an instance"
            )
        own, bad_origins = owner.stage_origins(draft, name, self._origins)
        names = owner.origins.names_in(draft)
        if self._purged.version:
            following = self._drop(draft, topic)
            if following is not None:
                self._position = following
                return Staged.AGAIN
            # A record that is deleted there is deleted here: this instance forwards the delete to others.
            self._raise_purge_mark(draft, topic)
        draft.journal.source = source.number
        if changes is not None:
            missing_is_deleted = sources.counts_missing_as_deleted(name, source) and before[0] == SeedState.UNDER_WAY
            guard = owner.tombstones.purged(topic) if missing_is_deleted else NOTHING_PURGED
            merge = Merge(draft, topic, names, self._tally, guard=guard, snapshot=True)
            found = owner.find_faults(draft, name, topic, changes, bad_origins)
            if found:
                sources.stage_refused(draft, name, topic)
            merge.apply(changes, own, found)
            owner.dropped.write(topic.name, name, merge.not_taken)
        if part.last:
            sources.stage_complete(draft, name, topic)
        else:
            reached = before[SEED_STATE] + max(part.upto_key, before[SEED_UPTO])
            draft.batch.puts[META][seed_key(name, topic.id)] = reached
            if part.first:
                sources.stage_seeds_change(draft)
        self._counts = self._tally.counts()
        return Staged.DONE

    def committed(self) -> MergeCounts:
        """The outcomes of the rows; empty if the topic is refused."""
        return self._counts

    def _raise_purge_mark(self, draft: Draft, topic: Topic) -> None:
        purged = self._purged
        if purged > self._owner.tombstones.purged(topic):
            ((origin,), _) = self._owner.stage_origins(draft, self._name, [purged.origin])
            figures = draft.figures(topic)
            draft.statistics[topic.id] = figures._replace(purged_version=purged.version, purged_origin=origin)

    def _drop(self, draft: Draft, topic: Topic) -> bytes | None:
        """Drops records in the range of the part that only this instance has, if they are at or below the source's
        purge mark. Returns the key to continue from, with another commit; None at the end."""
        owner, part, changes = self._owner, self._part, self._changes
        theirs = set(changes.keys) if changes is not None else set()
        stop = topic.stop if part.last else topic.prefix + part.upto_key + b"\0"
        keys: list[bytes] = []
        values: list[bytes] = []
        cursor = owner.rocks.cursor(RECORDS, fill_cache=False)
        try:
            following = cursor.fill(topic.prefix + self._position, stop, DROP_MAX, keys, values)
        finally:
            cursor.close()
        names = owner.origins.names_in(draft)
        # A delete right above each: the record ends with it wherever else it lives, and no newer one does. The delete
        # does not count as a write of this instance, which would outrank its earlier ones.
        draft.journal.source = 0
        by = min(earlier_numbers(names, draft.origin), default=draft.origin)
        dead: list[Dead] = []
        for store_key, value in zip(keys, values, strict=True):
            head = read_header(value)
            # A record past its stamp is here because this instance does not act on expiration: it keeps the record
            # (rule R2).
            if (
                store_key[RECORD_KEY] not in theirs
                and head.expire_time_micros > draft.now
                and (head.version, names[head.origin]) <= self._purged
            ):
                dead.append(
                    Dead(
                        store_key[RECORD_KEY],
                        head.version,
                        head.publish_time_micros,
                        head.expire_time_micros,
                        names[head.origin],
                        value[PAYLOAD],
                    )
                )
                draft.heads[store_key] = value[HEADER]
                draft.delete(
                    topic, store_key[RECORD_KEY], store_key, value[HEADER], version=head.version + 1, origin=by
                )
        owner.dropped.write(topic.name, self._name, dead)
        self._tally.dropped += len(dead)
        return None if following is None else following[RECORD_KEY]


class MergeRows:
    """The step that merges rows for a repair."""

    def __init__(self, owner: PeerChanges, topic: Topic, changes: Changes, origins: Sequence[str], source: str) -> None:
        self._owner = owner
        self._topic = topic
        self._changes = changes
        self._origins = origins
        self._source = source
        self._tally = Tally()

    def stage(self, draft: Draft) -> None:
        """Merges the rows."""
        owner, topic, changes = self._owner, self._topic, self._changes
        if owner.topics.by_id.get(topic.id) is not topic:
            raise StoreError(Reason.TOPIC_NOT_FOUND, f"topic: {topic.name} was deleted meanwhile", field="topic")
        self._tally = Tally()
        owner.check_skew(draft, [changes])
        own, bad_origins = owner.stage_origins(draft, self._source, self._origins)
        found = owner.find_faults(draft, self._source, topic, changes, bad_origins)
        guard = owner.tombstones.purged(topic)
        names = owner.origins.names_in(draft)
        Merge(draft, topic, names, self._tally, guard=guard, buries=False, snapshot=True).apply(changes, own, found)

    def committed(self) -> MergeCounts:
        """The outcomes of the rows."""
        return self._tally.counts()
