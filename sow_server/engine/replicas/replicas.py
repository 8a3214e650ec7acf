"""What other instances mean to a store: their changes applied, its own changes read for them, tombstones, positions.

RE1  A change of a source is merged by version, see `merging.py`.
RE2  How far a source has been applied moves in the commit that applies (rule R6); so does how far a topic is seeded.
RE3  A peer is not sent what came from itself, as it is now (rule R7), nor expiries (rule R2).
RE4  What a topic that peers share has lost leaves a tombstone until nobody can bring it back (rule R4), at most for the
     grace, or until every peer that is to be heard first was heard; who has missed one that went by age is remembered,
     and comes back by another way.
RE5  The journal is kept for peers that are behind, within bounds (rule R9).

An instance that this one sends to is a *peer*, one that it receives from a *source*; mostly each is both. All rows are
in `meta`, JSON but for the seeds':

    "peer/" name      who it is, what it has acknowledged, whether it has missed tombstones
    "source/" name    who it is, its number in the journal, what it sends, how far that is applied, see `Source`
    "seed/" name / topic u32
                      flag u8 | key: how far the topic has been merged; 1 is complete; 2 has been so before
    "next_source"     u32: numbers are never used again, so that a source that begins anew is another one
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from sow_peering import (
    NOTHING_PURGED,
    Identity,
    JournalPart,
    MergeCounts,
    Packed,
    PeerState,
    Purged,
    SeedPart,
    SeedRange,
    TopicAnswer,
    TopicKind,
)
from sow_server.engine.catalog.topics import Topic, Topics
from sow_server.engine.commit.commits import Commits
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.origins import Origins
from sow_server.engine.commit.requests import Limits as RequestLimits
from sow_server.engine.commit.soundness import Fault, Limits, Reports, bad_names, faults
from sow_server.engine.commit.steps import Nothing, StagedBy
from sow_server.engine.disk.backups import sync_directory
from sow_server.engine.disk.layout import (
    HEADER,
    MADE_ORDER,
    MADE_SEQUENCE,
    MADE_STORE_KEY,
    NEXT_SOURCE_KEY,
    PAYLOAD,
    PEER_KEY,
    RECORD_KEY,
    SEED_STATE,
    SEED_UPTO,
    SOURCE_KEY,
    TOPIC,
    Changes,
    StoredStatistics,
    Tombstone,
    changes_source,
    decode_tombstone,
    peer_key,
    read_header,
    seed_key,
    seeds_prefix,
    source_key,
    u32,
    unpack_i64,
    unpack_u32,
)
from sow_server.engine.disk.rocks import META, RECORDS, TOMBSTONES, Rocks
from sow_server.engine.journal.reading import ChunkHeads, JournalCut
from sow_server.engine.journal.retention import JournalBounds, Retention
from sow_server.engine.reading import Cuts
from sow_server.engine.replicas.merging import Dead, Merge, Tally, decoded, earlier_numbers
from sow_server.engine.replicas.shipping import pack_changes, pack_rows
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, RecordMatcher
from sow_server.engine.values.patterns import matcher

log = structlog.get_logger(__name__)

COMMITS_MAX: Final = 5000
"""Commits that one read walks over, so that it comes back where few of them are for the peer."""
SOURCES_MAX: Final = 2**16 - 1
"""The journal has two bytes for the number of one."""
ROWS_MAX: Final = 1000
"""Rows of one part of a seed: a part is one commit at the receiver, which others there wait for."""
DROP_MAX: Final = 1000
PURGE_MAX: Final = 1000
PURGE_VISITS_MAX: Final = 20_000
"""Tombstones that one step of purging looks at, where few of them may go."""
MADE_END: Final = MADE_ORDER + b"\xff" * 8
NAME_SHOWN: Final = 120
"""Characters of a topic's name in that of a file."""
SYNC_PATIENCE_SECONDS: Final = 10.0
SYNC_LOOK_SECONDS: Final = 0.002


class PeerSettings(NamedTuple):
    """An instance that this one sends to."""

    name: str
    topics: str
    """The pattern of what it is sent."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Whom this instance sends to, and the bounds of that; bytes and microseconds."""

    peers: tuple[PeerSettings, ...] = ()
    max_clock_skew_micros: int = 10 * MICROS
    lag_bytes_max: int = 2**30
    lag_age_micros_max: int = 86_400 * MICROS


class Source(NamedTuple):
    """What is remembered of an instance that this one receives from."""

    identity: Identity
    number: int
    """In the journal, of what came from it as it is now."""
    topics: str
    """The pattern of what it sends."""
    filter: str
    """The filter of what it sends."""
    cursor: int
    """What of its journal has been applied."""
    wait_for: int = 0
    """Not 0: nothing of it is taken before it has acknowledged this sequence of ours."""
    missing_is_deleted: bool = False
    """True until every topic is seeded. Until then, a row that this instance lacks and whose version is at or below its
    purge mark counts as deleted (RE4)."""


Done = Callable[[MergeCounts | StoreError], None]
Select = Callable[[Topic], RecordMatcher | None]
"""The filter of a link on a topic; None: everything is for the peer."""


class Replicas:
    """Owns the rows of peers and sources, and what is held for them. Rows change on the writer's thread, in commits;
    other threads read them."""

    def __init__(
        self,
        rocks: Rocks,
        path: Path,
        options: ReplicaOptions,
        *,
        commits: Commits,
        topics: Topics,
        cuts: Cuts,
        origins: Origins,
        unsound: Reports,
        limits: RequestLimits,
    ) -> None:
        self._commits = commits
        self._topics = topics
        self._cuts = cuts
        self._known_origins = origins
        self._unsound = unsound
        self._rocks = rocks
        self._path = path
        self._options = options
        self._matches = {peer.name: matcher(peer.topics) for peer in options.peers}
        self.peers: dict[str, PeerState] = {}
        self.sources: dict[str, Source] = {}
        self._load()
        self._covers: list[Callable[[str], bool]] = []
        self._cover()
        self._kinds: dict[str, dict[str, TopicKind]] = {}
        """By source: its topics, as it has told them."""
        self._all_seeded: set[str] = set()
        """Sources whose topics have all been seeded, so that `missing_is_deleted` ends for them. Stored with their next
        cursor."""
        self._passed_over: dict[str, list[bytes]] = {}
        """By source: rows of seeds that do not hold any more once its cursor moves on."""
        self._marking = threading.Lock()
        """Held while a peer's row is replaced by what it becomes: acknowledgements come on one thread, what a purge has
        it miss on another."""
        self._seeds_version = 0
        """Rises whenever a topic is seeded, or is to be."""
        self._unsaved: set[str] = set()
        """Peers whose rows are behind what is known."""
        self._retention = Retention()
        self._purge_from = MADE_ORDER
        """Where the next step of purging goes on."""
        self.purged_total = 0
        self.limits: Final = Limits(limits.key_bytes_max, limits.payload_bytes_max, options.max_clock_skew_micros)
        """What a row of a peer must keep to, as one that is published here."""

    def _load(self) -> None:
        rows = self._rocks.cursor(META)
        try:
            for key, value in rows.rows(PEER_KEY, PEER_KEY + b"\xff"):
                fields = json.loads(value)
                identity = Identity(*fields["identity"]) if fields["identity"] else None
                self.peers[key[len(PEER_KEY) :].decode()] = PeerState(
                    identity, fields["acknowledged"], fields["missed"]
                )
            for key, value in rows.rows(SOURCE_KEY, SOURCE_KEY + b"\xff"):
                self.sources[key[len(SOURCE_KEY) :].decode()] = _decode_source(value)
        finally:
            rows.close()

    @property
    def version(self) -> int:
        """Rises whenever what is said of topics here, to peers or sources, may be another. To be asked first, and
        often: there may be thousands of them."""
        return self._topics.version + self._seeds_version

    def _seeds_change(self, draft: Draft) -> None:
        def changed() -> None:
            self._seeds_version += 1

        draft.on_commit.append(changed)

    # -- which topics are shared ------------------------------------------------------------------------------------

    def _cover(self) -> None:
        patterns = {peer.topics for peer in self._options.peers} | {source.topics for source in self.sources.values()}
        self._covers = [matcher(pattern) for pattern in sorted(patterns)]

    def covers(self, name: str) -> bool:
        """Whether peers send a topic of this name, or are sent it."""
        return not name.startswith("_") and any(covers(name) for covers in self._covers)

    def peers_of(self, topic: Topic) -> list[str]:
        """The configured peers that a topic is sent to."""
        if topic.reserved or not topic.settings.journal:
            return []
        return [name for name, matches in self._matches.items() if matches(topic.name)]

    def shares(self, pattern: str, name: str) -> bool:
        """Whether a link with this pattern carries a topic of this name, should it not be there yet."""
        topic = self._topics.by_name.get(name)
        return (topic is None or topic.settings.journal) and not name.startswith("_") and _matcher(pattern)(name)

    def topics(self, pattern: str) -> list[TopicKind]:
        """The topics whose whole name matches, by name; the store's own are never among them."""
        matches = matcher(pattern)
        by_name = self._topics.by_name
        return [_kind(by_name[name]) for name in sorted(by_name) if not by_name[name].reserved and matches(name)]

    def kinds(self, names: Collection[str]) -> list[TopicKind]:
        """Those of the topics with these names that there are."""
        by_name = self._topics.by_name
        return [_kind(by_name[name]) for name in sorted(names) if name in by_name]

    # -- peers: what they have, and what is held for them -----------------------------------------------------------

    def peer(self, name: str) -> PeerState:
        """What is remembered of a peer."""
        return self.peers.get(name, PeerState())

    def acknowledged(self, name: str, identity: Identity, sequence: int) -> None:
        """A peer has everything up to there, on its disk. `save_peers` writes it down."""
        with self._marking:
            before = self.peer(name)
            # Another instance under the name, or its data restored: what was purged because the one before had
            # acknowledged it may be alive in this one.
            missed = before.missed or (before.identity is not None and before.identity != identity)
            after = PeerState(identity, sequence, missed)
            if after != before:
                self.peers[name] = after
                self._unsaved.add(name)

    def reseeded(self, name: str) -> None:
        """A peer has had everything anew."""
        with self._marking:
            if self.peer(name).missed:
                self.peers[name] = self.peer(name)._replace(missed=False)
                self._unsaved.add(name)

    def save_peers(self) -> None:
        """Writes down what peers have acknowledged. What is lost of it by a crash they say again."""
        if not self._unsaved:
            return
        names, self._unsaved = self._unsaved, set()

        def stage_peers(draft: Draft) -> Callable[[], None]:
            for name in names:
                draft.batch.puts[META][peer_key(name)] = _encode_peer(self.peer(name))
            return lambda: None

        def saved(result: StoreError | None) -> None:
            if isinstance(result, StoreError):
                self._unsaved |= names

        try:
            self._commits.run(StagedBy(stage_peers), saved)
        except StoreError as error:  # the store is stopping, or has failed
            saved(error)

    def held(self, heads: ChunkHeads, topic: Topic, figures: StoredStatistics, now_micros: int) -> int:
        """The sequence up to which no peer that is behind needs the topic's journal (RE5)."""
        names = self.peers_of(topic) if self._matches else []
        if not names:
            return figures.last_sequence
        held = min(self.peer(name).acknowledged for name in names)
        if held >= figures.last_sequence:
            return held
        bounds = JournalBounds(self._options.lag_age_micros_max, self._options.lag_bytes_max)
        return max(held, self._retention.first(heads, topic, figures, bounds, now_micros) - 1)

    def check_shipped(self, topic: Topic) -> None:
        """Raises StoreError PEER_BEHIND while a peer has not received all changes of a topic (rule T5)."""
        for name in self.peers_of(topic):
            if self.peer(name).acknowledged < topic.statistics.last_sequence and topic.statistics.journal_entries:
                raise StoreError(
                    Reason.PEER_BEHIND,
                    f"topic: {name} has not yet received all changes of {topic.name}; wait for it, or "
                    "delete it all the same (force in the API, --unshipped on the command line)",
                    field="name",
                    details={"peer": name},
                )

    def stage_drop(self, draft: Draft, topic: Topic) -> None:
        """Stages what goes with a topic."""
        draft.batch.ranges.append((TOMBSTONES, topic.prefix, topic.stop))
        draft.batch.deletes[META] += [seed_key(name, topic.id) for name in self.sources]
        draft.on_commit.append(lambda: self._retention.forget(topic.id))

    def stage_refound(self, draft: Draft, topic: Topic) -> None:
        """Stages what a topic leaves behind that is about to take records of another kind: its tombstones, also those
        of this commit, are of other records, whatever their keys. They count until it is their turn to be purged."""
        draft.batch.ranges.append((TOMBSTONES, topic.prefix, topic.stop))
        left = draft.batch.puts[TOMBSTONES]
        for store_key in [key for key in left if key.startswith(topic.prefix)]:
            del left[store_key]
        draft.statistics[topic.id] = draft.figures(topic)._replace(purged_version=0, purged_origin=0)

    # -- reading for peers ------------------------------------------------------------------------------------------

    def read(
        self, peer: Identity, after: int, *, topics: Collection[str], select: Select, bytes_max: int
    ) -> JournalPart:
        """The durable changes of some topics behind a sequence, but for what came from the peer itself (RE3)."""
        upto = self._commits.synced_sequence
        source = self.sources.get(peer.name)
        own = source.number if source is not None and source.identity == peer else None
        # Before the cut: one whose journal is switched on again in between has a floor in it.
        by_name = self._topics.by_name
        unread = {name for name in topics if name in by_name and not by_name[name].settings.journal}
        cut = self._cuts.journal()
        try:
            return self._read(cut, own, after, upto, topics, unread, select, bytes_max)
        finally:
            cut.close()

    def _read(
        self,
        cut: JournalCut,
        own: int | None,
        after: int,
        upto: int,
        names: Collection[str],
        unread: Collection[str],
        select: Select,
        bytes_max: int,
    ) -> JournalPart:
        wanted: dict[int, tuple[Topic, RecordMatcher | None]] = {}
        lost: list[str] = []
        for name in names:
            topic = self._topics.by_name.get(name)
            if topic is None:
                continue
            wanted[topic.id] = topic, select(topic)
            if name in unread or cut.floors.get(topic.id, 0) > after:
                lost.append(name)
        chunks: list[Packed] = []
        size = first = last = 0
        reached, walked = after, 0
        for commit in cut.commits(after, upto):
            if commit.last_sequence > upto or size >= bytes_max or walked == COMMITS_MAX:
                break
            for run in commit.runs:
                if run.topic_id not in wanted:
                    continue
                topic, matches = wanted[run.topic_id]
                value = cut.packed(topic, run.first_sequence)
                if value is None or changes_source(value) == own:
                    continue
                packed = pack_changes(value, run.first_sequence, matches)
                if packed:
                    chunks.append(Packed(topic.name, packed))
                    size += len(packed)
            walked += 1
            reached, last = commit.last_sequence, commit.commit_time_micros
            first = first or last
        else:
            reached = upto  # what lies behind the last commit has no changes
        kinds = self.kinds({chunk.topic for chunk in chunks})
        return JournalPart(
            after, max(after, reached), chunks, self._known_origins.names, first, last, sorted(lost), kinds
        )

    def seed(self, topic: Topic, after_key: bytes, *, select: Select, bytes_max: int) -> SeedPart:
        """The records and tombstones of a topic behind a key, in the order of keys, all of them durable. Not from the
        event loop: it waits for the next sync."""
        with self._commits.cut_lock:
            sequence = self._commits.last_sequence
            records = self._rocks.cursor(RECORDS, fill_cache=False)
            tombstones = self._rocks.cursor(TOMBSTONES, fill_cache=False)
        # A row with an empty key is never sent (rule R13): as the last one of a part it would say that this is the end.
        start = topic.prefix + after_key + b"\0"
        keys: list[bytes] = []
        values: list[bytes] = []
        dead: dict[bytes, Tombstone] = {}
        try:
            following = records.fill(start, topic.stop, ROWS_MAX, keys, values, bytes_max=bytes_max)
            stop = topic.stop if following is None else keys[-1] + b"\0"
            for key, value in tombstones.rows(start, stop, limit=ROWS_MAX):
                dead[key] = decode_tombstone(value)
            if len(dead) == ROWS_MAX:
                # There may be more tombstones before the last record: the part ends with the last of these.
                following = stop = next(reversed(dead)) + b"\0"
                kept = sum(key < stop for key in keys)
                del keys[kept:], values[kept:]
        finally:
            records.close()
            tombstones.close()
        self._wait_for_sync(sequence)
        last = max([*keys[-1:], *list(dead)[-1:]], default=b"")[RECORD_KEY] if following is not None else b""
        chunk = pack_rows(keys, values, dead, select(topic))
        return SeedPart(chunk, self._known_origins.names, last, self.kinds({topic.name}))

    def _wait_for_sync(self, sequence: int) -> None:
        commits = self._commits
        give_up = time.monotonic() + SYNC_PATIENCE_SECONDS
        asked = False
        while commits.synced_sequence < sequence:
            if time.monotonic() > give_up or commits.failure is not None:
                raise StoreError(Reason.STORE_FAILED, "what was written does not become durable")
            time.sleep(SYNC_LOOK_SECONDS)
            if not asked and commits.synced_sequence < sequence:
                # Who publishes BUFFERED syncs now and then: a peer would be seeded by one part each time. A step is
                # synced at once, and with it all that was written before.
                asked = True
                self._commits.run(Nothing(), lambda _: None)

    def rows(self, topic: Topic, record_keys: Sequence[bytes]) -> bytes:
        """Records and tombstones of some keys, packed as in a seed, all of them durable. Not from the event loop."""
        wanted = sorted(topic.prefix + key for key in set(record_keys))
        with self._commits.cut_lock:
            sequence = self._commits.last_sequence
            found = dict(zip(wanted, self._rocks.multi_get(RECORDS, wanted), strict=True))
            dead = list(zip(wanted, self._rocks.multi_get(TOMBSTONES, wanted), strict=True))
        self._wait_for_sync(sequence)
        live = {key: value for key, value in found.items() if value is not None}
        return pack_rows(
            list(live),
            list(live.values()),
            {key: decode_tombstone(value) for key, value in dead if value is not None},
            None,
        )

    def purged(self, topic: Topic) -> Purged:
        """What has been purged of the tombstones of a topic."""
        figures = topic.statistics
        if not figures.purged_version:
            return Purged()
        return Purged(figures.purged_version, self._known_origins.names[figures.purged_origin])

    def source(self, name: str) -> Source | None:
        """The stored state of a source; None: it has never begun."""
        return self.sources.get(name)

    # -- sources: how far they are ----------------------------------------------------------------------------------

    def begin(
        self, identity: Identity, *, topics: str, filter_text: str, cursor: int, missing_is_deleted: bool, done: Done
    ) -> None:
        """From now on a source is this one, its changes come from behind `cursor`, its topics are to be seeded."""
        name = identity.name

        def stage_begin(draft: Draft) -> Callable[[], MergeCounts]:
            number = int.from_bytes(self._rocks.get(META, NEXT_SOURCE_KEY) or u32(1), "big")
            if number > SOURCES_MAX:
                raise StoreError(
                    Reason.INTERNAL, f"{SOURCES_MAX} sources have begun here, and the journal has room for no more"
                )
            source = Source(identity, number, topics, filter_text, cursor, missing_is_deleted=missing_is_deleted)
            prefix = seeds_prefix(name)
            draft.batch.ranges.append((META, prefix, prefix + b"\xff" * 5))
            self._seeds_change(draft)
            draft.batch.puts[META][NEXT_SOURCE_KEY] = u32(number + 1)
            self._put_source(draft, name, source)

            def begun() -> MergeCounts:
                self._all_seeded.discard(name)
                self._cover()
                for topic in self._topics.by_id.values():
                    topic.replicated = self.covers(topic.name)
                return MergeCounts()

            return begun

        self._commits.run(StagedBy(stage_begin), done)

    def wait_for(self, name: str, sequence: int, done: Done) -> None:
        """Nothing of a source is taken before it has acknowledged this sequence of ours (RE4)."""

        def stage_wait(draft: Draft) -> Callable[[], MergeCounts]:
            source = self.sources[name]
            self._put_source(draft, name, source._replace(wait_for=max(source.wait_for, sequence)))
            return MergeCounts

        self._commits.run(StagedBy(stage_wait), done)

    def answers(self, name: str, kinds: Sequence[TopicKind]) -> list[TopicAnswer]:
        """What is wanted of a source's topics, which are all that it sends. What is known of others does not last:
        their changes are passed over from here on."""
        self._kinds[name] = {kind.name: kind for kind in kinds}
        found = [self.answer(name, kind) for kind in kinds]
        source = self.sources.get(name)
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
            # Those of topics that have been deleted here are gone already.
            self._passed_over[name] = [row for row in rows.keys(prefix, prefix + b"\xff" * 5) if row not in taken]
        finally:
            rows.close()
        return found

    def check(self, kind: TopicKind) -> TopicAnswer:
        """Says whether this instance can take a topic of another instance (rule R12)."""
        refusal = self._refusal(kind)
        if refusal is None:
            return TopicAnswer(kind.name)
        return TopicAnswer(kind.name, reason=refusal.reason, message=refusal.message)

    def _refusal(self, kind: TopicKind) -> StoreError | None:
        """Why a topic of another instance cannot be taken (rule R12); None: it can. Both ends show the message."""
        topic = self._topics.by_name.get(kind.name)
        if topic is None or topic.reserved:
            return StoreError(Reason.TOPIC_NOT_FOUND, f"there is no topic {kind.name!r} at the receiving end")
        mine = _kind(topic)
        if not mine.journal or not kind.journal:
            where = "receiving" if kind.journal else "sending"
            return StoreError(Reason.NO_JOURNAL, f"{kind.name} has no journal at the {where} end")
        for field in ("key", "message_type", "separator"):
            here, there = getattr(mine, field), getattr(kind, field)
            if here != there:
                ends = f"{_shown(here)} at the receiving end, {_shown(there)} at the sending one"
                return StoreError(Reason.TOPIC_DIFFERS, f"{kind.name} has {field} = {ends}")
        return None

    def answer(self, name: str, kind: TopicKind) -> TopicAnswer:
        """What is wanted of one of a source's topics."""
        answer = self.check(kind)
        if answer.reason:
            return answer
        row = self._rocks.get(META, seed_key(name, self._topics.by_name[kind.name].id))
        if row is None:
            return TopicAnswer(kind.name, wanted=True)
        wanted = row[0] != _COMPLETE
        return TopicAnswer(kind.name, wanted, row[SEED_UPTO] if wanted else b"")

    def _put_source(self, draft: Draft, name: str, source: Source) -> None:
        draft.batch.puts[META][source_key(name)] = _encode_source(source)
        draft.on_commit.append(lambda: self.sources.__setitem__(name, source))

    # -- applying ---------------------------------------------------------------------------------------------------

    def apply(
        self,
        name: str,
        *,
        after: int,
        upto: int,
        chunks: Sequence[tuple[str, bytes]],
        origins: Sequence[str],
        done: Done,
    ) -> None:
        """Applies changes of a source, and moves its cursor (RE1, RE2). Raises StoreError BATCH_DAMAGED at once;
        CLOCK_SKEW is heard later, as every other refusal, and nothing is applied then."""
        changes_of = [(topic, decoded(topic, chunk)) for topic, chunk in chunks]

        def stage_apply(draft: Draft) -> Callable[[], MergeCounts]:
            source = self._ready(name)
            if after > source.cursor:
                raise StoreError(
                    Reason.BATCH_DAMAGED,
                    f"changes behind {after} came, and this instance has what is up to {source.cursor}",
                )
            tally = Tally()
            if upto > source.cursor:
                self._check_skew(draft, [changes for _, changes in changes_of])
                own, bad_names = self._origins(draft, origins)
                draft.journal.source = source.number
                for topic_name, changes in changes_of:
                    topic = self._takeable(name, topic_name)
                    if topic is None:
                        self._unseed(draft, name, topic_name)
                        continue
                    draft.journal.atomic = changes.atomic
                    found = self._faults(draft, name, topic, changes, bad_names)
                    Merge(draft, topic, self._known_origins.names_in(draft), tally).apply(changes, own, found)
                    draft.end_request()
                if passed_over := self._passed_over.get(name):
                    draft.batch.deletes[META] += passed_over
                    self._seeds_change(draft)
                missing_is_deleted = source.missing_is_deleted and name not in self._all_seeded
                self._put_source(draft, name, source._replace(cursor=upto, missing_is_deleted=missing_is_deleted))
            return tally.counts

        self._commits.run(StagedBy(stage_apply), done)

    def merge(
        self,
        name: str,
        part: SeedRange,
        *,
        chunk: bytes,
        origins: Sequence[str],
        purged: Purged,
        done: Done,
    ) -> None:
        """Merges a part of a topic's snapshot, and remembers how far it is; `purged`: what only this instance has in
        that range, at or below it, goes (rule R4). Refused as `apply`."""
        changes = decoded(part.topic, chunk) if chunk else None
        tally = Tally()
        position = part.after_key + b"\0" if part.after_key else b""

        def stage_merge(draft: Draft) -> Callable[[], MergeCounts | None]:
            nonlocal position
            topic = self._takeable(name, part.topic)
            if topic is None:
                return MergeCounts
            source, before = self._ready(name), self._rocks.get(META, seed_key(name, topic.id))
            if part.first:
                before = bytes((_UNDER_WAY if before is None or before[0] == _UNDER_WAY else _AGAIN,))
            elif before is None or before[0] == _COMPLETE or before[SEED_UPTO] < part.after_key:
                raise StoreError(
                    Reason.BATCH_DAMAGED, f"a seed of {part.topic} goes on where this instance has not come to"
                )
            own, bad_names = self._origins(draft, origins)
            if changes is not None:
                self._check_skew(draft, [changes])
            names = self._known_origins.names_in(draft)
            if purged.version:
                following = self._drop(draft, topic, name, part, position, changes, purged, tally)
                if following is not None:
                    position = following
                    return lambda: None
                # What is dead there is dead here: others hear of it from this instance.
                self._purged_by(draft, topic, purged)
            draft.journal.source = source.number
            if changes is not None:
                missing_is_deleted = (
                    source.missing_is_deleted and name not in self._all_seeded and before[0] == _UNDER_WAY
                )
                guard = self.purged(topic) if missing_is_deleted else NOTHING_PURGED
                merge = Merge(draft, topic, names, tally, guard=guard, snapshot=True)
                merge.apply(changes, own, self._faults(draft, name, topic, changes, bad_names))
                self._write_dropped(topic, name, merge.not_taken)
            reached = bytes((_COMPLETE,)) if part.last else before[SEED_STATE] + max(part.upto_key, before[SEED_UPTO])
            if part.first or part.last:
                self._seeds_change(draft)
            draft.batch.puts[META][seed_key(name, topic.id)] = reached
            return tally.counts

        def merged(result: MergeCounts | StoreError | None) -> None:
            if result is not None:
                done(result)
                return
            try:
                self._commits.run(StagedBy(stage_merge), merged)  # another round of what is dropped
            except StoreError as error:  # the store is stopping, or has failed
                done(error)

        self._commits.run(StagedBy(stage_merge), merged)

    def merge_rows(self, topic: Topic, chunk: bytes, origins: Sequence[str], done: Done, *, source: str) -> None:
        """Merges rows by version, for a repair with a peer; they go on to every peer. What is not here, and not above
        what has been purged, may be dead, so it is not taken (rule R4); or this instance has lost it, so it lives on
        where it is. Raises StoreError BATCH_DAMAGED at once."""
        changes = decoded(topic.name, chunk)

        def stage_rows(draft: Draft) -> Callable[[], MergeCounts]:
            if self._topics.by_id.get(topic.id) is not topic:
                raise StoreError(Reason.TOPIC_NOT_FOUND, f"topic: {topic.name} was deleted meanwhile", field="topic")
            self._check_skew(draft, [changes])
            (own, bad_names), tally = self._origins(draft, origins), Tally()
            found = self._faults(draft, source, topic, changes, bad_names)
            guard = self.purged(topic)
            Merge(
                draft, topic, self._known_origins.names_in(draft), tally, guard=guard, buries=False, snapshot=True
            ).apply(changes, own, found)
            return tally.counts

        self._commits.run(StagedBy(stage_rows), done)

    def _origins(self, draft: Draft, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """The numbers here of a peer's origins, and which of them, by the peer's numbers, have no name of an instance:
        these are not remembered."""
        bad = bad_names(names)
        if not bad:
            return self._known_origins.stage(draft, names), bad
        wrong = set(bad)
        good = self._known_origins.stage(draft, [name for number, name in enumerate(names) if number not in wrong])
        numbers = iter(good)
        return [0 if number in wrong else next(numbers) for number in range(len(names))], bad

    def _faults(
        self, draft: Draft, source: str, topic: Topic, changes: Changes, bad_names: Sequence[int]
    ) -> Mapping[int, Fault]:
        """The changes that are not taken, as no publish could have made them (soundness [1])."""
        found = faults(topic, changes, bad_names, self.limits, draft.now)
        if found:
            draft.on_commit.append(lambda: self._unsound.refuse(source, topic, changes, found, draft.now))
        return found

    def _ready(self, name: str) -> Source:
        """A source of which changes may be taken now. Raises StoreError RESEED_PENDING (RE4)."""
        source = self.sources[name]
        if source.wait_for:
            raise StoreError(
                Reason.RESEED_PENDING,
                f"{name} was away for too long: it has to have what is up to {source.wait_for} here, first",
            )
        return source

    def _purged_by(self, draft: Draft, topic: Topic, purged: Purged) -> None:
        if purged > self.purged(topic):
            (origin,) = self._known_origins.stage(draft, [purged.origin])
            figures = draft.figures(topic)
            draft.statistics[topic.id] = figures._replace(purged_version=purged.version, purged_origin=origin)

    def _takeable(self, source: str, name: str) -> Topic | None:
        """The topic of this instance for a source's; None where it has none, or another one."""
        kind = self._kinds.get(source, {}).get(name)
        if kind is None or self._refusal(kind) is not None:
            return None
        return self._topics.by_name[name]

    def _unseed(self, draft: Draft, source: str, name: str) -> None:
        """Changes of a topic are passed over: once it can be taken, it has to be seeded."""
        topic = self._topics.by_name.get(name)
        if topic is not None:
            draft.batch.deletes[META].append(seed_key(source, topic.id))
            self._seeds_change(draft)

    def _check_skew(self, draft: Draft, batches: Iterable[Changes]) -> None:
        """Raises StoreError CLOCK_SKEW for versions that are too far in the future (rule K7)."""
        highest = max([max(changes.version, default=0) for changes in batches], default=0)
        ahead = highest - draft.now
        if ahead > self._options.max_clock_skew_micros:
            raise StoreError(
                Reason.CLOCK_SKEW,
                f"a version is {ahead / MICROS:.1f} s in the future, more than max_clock_skew = "
                f"{self._options.max_clock_skew_micros / MICROS:.1f} s: a clock is wrong, here or there",
                details={"ahead_micros": str(ahead)},
            )

    def _drop(
        self,
        draft: Draft,
        topic: Topic,
        source: str,
        part: SeedRange,
        position: bytes,
        changes: Changes | None,
        purged: Purged,
        tally: Tally,
    ) -> bytes | None:
        """Drops what only this instance has in the range of a part, as far as it is dead by what the source has purged.
        Returns where to go on, with another commit; None at the end."""
        theirs = set(changes.keys) if changes is not None else set()
        stop = topic.stop if part.last else topic.prefix + part.upto_key + b"\0"
        keys: list[bytes] = []
        values: list[bytes] = []
        cursor = self._rocks.cursor(RECORDS, fill_cache=False)
        try:
            following = cursor.fill(topic.prefix + position, stop, DROP_MAX, keys, values)
        finally:
            cursor.close()
        names = self._known_origins.names_in(draft)
        # A delete right above each: wherever else it lives, it ends there, too, and nothing that is newer does. It does
        # not count as a write of this instance, which would outrank its earlier ones.
        draft.journal.source = 0
        by = min(earlier_numbers(names, draft.origin), default=draft.origin)
        dead: list[Dead] = []
        for store_key, value in zip(keys, values, strict=True):
            head = read_header(value)
            # One that is past its stamp is here because this instance does not act on it: it keeps it (rule R2).
            if (
                store_key[RECORD_KEY] not in theirs
                and head.expire_time_micros > draft.now
                and (head.version, names[head.origin]) <= purged
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
        self._write_dropped(topic, source, dead)
        tally.dropped += len(dead)
        return None if following is None else following[RECORD_KEY]

    def _write_dropped(self, topic: Topic, source: str, dead: Sequence[Dead]) -> None:
        """Writes records down before they are dropped, for an operator to look at."""
        if not dead:
            return
        folder = self._path / "dropped"
        folder.mkdir(exist_ok=True)
        with (folder / _dropped_name(topic.name, source)).open("ab") as file:
            for record in dead:
                fields = {
                    "key": record.key.decode(errors="backslashreplace"),
                    "version": record.version,
                    "publish_time_micros": record.publish_time_micros,
                    "expire_time_micros": record.expire_time_micros,
                    "origin": record.origin,
                    "payload_base64": base64.b64encode(record.payload).decode(),
                }
                file.write(json.dumps(fields).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(folder)
        log.warning("dropped", topic=topic.name, source=source, records=len(dead), file=file.name)

    # -- tombstones -------------------------------------------------------------------------------------------------

    def purge(
        self, upto: int, *, held: Collection[str], made_before_micros: int, unread: Collection[str], done: Done
    ) -> None:
        """Removes a bounded number of the oldest tombstones: up to a sequence, but for the topics `held`, or made
        before a time; for these see RE4. `done` hears how many."""

        def stage_purge(draft: Draft) -> Callable[[], MergeCounts]:
            cursor = self._rocks.cursor(TOMBSTONES, fill_cache=False)
            purge = Purge(draft, self._topics.by_id, self._known_origins.names, upto, held, made_before_micros)
            start: bytes | None = self._purge_from
            visited = 0
            try:
                while start is not None and purge.gone < PURGE_MAX and visited < PURGE_VISITS_MAX:
                    rows: list[bytes] = []
                    start = cursor.fill_keys_before(start, MADE_END, PURGE_MAX, rows)
                    visited += len(rows)
                    dead = self._rocks.multi_get(TOMBSTONES, [row[MADE_STORE_KEY] for row in rows])
                    if not purge.stage_rows(rows, dead):
                        start = None
            finally:
                cursor.close()
            if purge.missed:
                self._stage_missed(draft, purge, unread)

            def purged() -> MergeCounts:
                self._purge_from = start or MADE_ORDER
                self.purged_total += purge.gone
                return MergeCounts(applied=purge.gone)

            return purged

        self._commits.run(StagedBy(stage_purge), done)

    def _stage_missed(self, draft: Draft, purge: Purge, unread: Collection[str]) -> None:
        for name in self._matches:
            peer = self.peer(name)
            if not peer.missed and (purge.by_all or peer.acknowledged < purge.missed):
                missed = peer._replace(missed=True)
                draft.batch.puts[META][peer_key(name)] = _encode_peer(missed)
                draft.on_commit.append(self._miss(name))
        for name in unread:
            source = self.sources.get(name)
            if source is not None:
                self._put_source(draft, name, source._replace(wait_for=draft.next_sequence - 1))

    def _miss(self, name: str) -> Callable[[], None]:
        def miss() -> None:
            with self._marking:
                self.peers[name] = self.peer(name)._replace(missed=True)

        return miss


class Purge:
    """One step of purging: looks at tombstones in the order of making."""

    def __init__(
        self,
        draft: Draft,
        topics: Mapping[int, Topic],
        names: Sequence[str],
        upto: int,
        held: Collection[str],
        made_before_micros: int,
    ) -> None:
        self._draft = draft
        self._topics = topics
        self._names = names
        self._upto = upto
        self._held = held
        self._made_before = made_before_micros
        self.gone = 0
        self.missed = 0
        """The highest sequence of those that go by age alone; 0: none did."""
        self.by_all = False
        """Whether one of a topic that is held is among them: nobody is known to have it."""

    def stage_rows(self, rows: Sequence[bytes], found: Sequence[bytes | None]) -> bool:
        """Looks at some, with what is stored under their keys. False: none of those that follow may go."""
        for row, value in zip(rows, found, strict=True):
            sequence, store_key = unpack_i64(row[MADE_SEQUENCE]), row[MADE_STORE_KEY]
            topic = self._topics.get(unpack_u32(store_key[TOPIC]))
            tombstone = None if value is None else decode_tombstone(value)
            if tombstone is None or tombstone.sequence != sequence:
                self._remove(topic, row, store_key, None)  # it went with its topic, or a later one took its place
                continue
            held = topic is not None and topic.name in self._held
            if sequence > self._upto or held:
                if tombstone.made_micros >= self._made_before:
                    if sequence > self._upto:
                        return False
                    continue
                self.missed, self.by_all = sequence, self.by_all or held
            self._remove(topic, row, store_key, tombstone)
        return True

    def _remove(self, topic: Topic | None, row: bytes, store_key: bytes, tombstone: Tombstone | None) -> None:
        draft = self._draft
        self.gone += 1
        draft.batch.deletes[TOMBSTONES].append(row)
        if topic is None:
            return
        figures = draft.figures(topic)
        figures = figures._replace(tombstones=max(0, figures.tombstones - 1))
        if tombstone is not None:
            draft.batch.deletes[TOMBSTONES].append(store_key)
            before = figures.purged_version, self._names[figures.purged_origin]
            if (tombstone.version, self._names[tombstone.origin]) > before:
                figures = figures._replace(purged_version=tombstone.version, purged_origin=tombstone.origin)
        draft.statistics[topic.id] = figures


_matcher: Final = functools.lru_cache(maxsize=200)(matcher)
"""Asked for each publish that wants to be REPLICATED."""
_UNDER_WAY: Final = 0
_COMPLETE: Final = 1
_AGAIN: Final = 2


def _kind(topic: Topic) -> TopicKind:
    settings = topic.settings
    return TopicKind(
        topic.name,
        settings.key,
        settings.message_type.value,
        settings.separator,
        topic.acts,
        settings.journal,
    )


def _encode_source(source: Source) -> bytes:
    """A source as JSON. On disk the last field has an older name."""
    fields = source._asdict()
    fields["guarded"] = fields.pop("missing_is_deleted")
    return json.dumps(fields).encode()


def _decode_source(value: bytes) -> Source:
    fields = json.loads(value)
    fields["identity"] = Identity(*fields["identity"])
    fields["missing_is_deleted"] = fields.pop("guarded", False)
    return Source(**fields)


def _dropped_name(topic: str, source: str) -> str:
    """Of the file for what is dropped; file systems take 255 bytes."""
    if len(topic) > NAME_SHOWN:
        topic = f"{topic[:NAME_SHOWN]}-{hashlib.sha256(topic.encode()).hexdigest()[:16]}"
    return f"{topic}.from-{source}.ndjson"


def _shown(value: object) -> str:
    return json.dumps(value.decode("latin-1") if isinstance(value, bytes) else value)


def _encode_peer(peer: PeerState) -> bytes:
    return json.dumps(peer._asdict()).encode()
