"""A store under a clock that the test owns, driven in the test's own thread: nothing happens between two statements.

rig = Rig(tmp_path)
rig.create_topic("orders", expiration=Expiration.ENABLED)
rig.put("orders", "1", ttl=30 * SECOND)
rig.time.tick(30 * SECOND)
assert rig.get("orders", "1") is None
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.disk.rocks import EXPIRY, JOURNAL, MARK_KEY, RECORDS, Batch
from sow_server.engine.store import Store, StoreOptions
from sow_server.engine.stored import BURY, DELETE, EXPIRE, PUT, TOUCH, decode_changes, i64, record, unpack_i64
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import (
    ABSENT,
    Condition,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Outcome,
    Publish,
    Record,
    Request,
    TopicSettings,
    Touch,
    TtlMode,
)
from sow_server.engine.values.policies import Policy, declared_of

SECOND: Final = 1_000_000
MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR
START: Final = 1_700_000_000 * SECOND
"""Where fake wall clocks begin: some day in November 2023."""

BINARY: Final = TopicSettings(message_type=MessageType.BINARY, expiration=Expiration.ENABLED)
"""Settings of most test topics: opaque payloads under given keys, with records that may expire."""

NO_CHANGES: Final[Mapping[str, object]] = MappingProxyType({})

T = TypeVar("T")


def replaced(settings: TopicSettings, changes: Mapping[str, object]) -> TopicSettings:
    """Settings with some fields changed, by their names."""
    return settings._replace(**changes)  # type: ignore[arg-type]  # the tests name fields and give fitting values


class FakeTime:
    """The two time sources of a guarded clock, moved by the test."""

    def __init__(self, wall_micros: int = START) -> None:
        self.wall_micros = wall_micros
        self.elapsed_micros = 0

    def tick(self, micros: int) -> None:
        """Lets time pass."""
        self.wall_micros += micros
        self.elapsed_micros += micros

    def step_wall(self, micros: int) -> None:
        """Somebody sets the wall clock."""
        self.wall_micros += micros

    def clock(self) -> GuardedClock:
        """A clock on these sources."""
        return GuardedClock(wall=lambda: self.wall_micros, elapsed=lambda: self.elapsed_micros)


def journal_rows(store: Store, topic: Topic, after: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """The journal rows of a topic whose chunk begins after `after`."""
    cursor = store._rocks.cursor(JOURNAL)
    try:
        yield from cursor.rows(topic.prefix + i64(after + 1), topic.stop)
    finally:
        cursor.close()


class JournalEntry(NamedTuple):
    """One change as it is journaled; the fields are those of `Changes`."""

    sequence: int
    commit_time_micros: int
    kind: str
    """`put`, `touch`, `delete`, `expire` or `bury`."""
    key: bytes
    payload: bytes
    version: int
    publish_time_micros: int
    expire_time_micros: int
    previous: int
    removed_version: int


KINDS: Final = {PUT: "put", TOUCH: "touch", DELETE: "delete", EXPIRE: "expire", BURY: "bury"}


class Rig:
    """Owns a data directory, a fake time and, while it is open, the store on them."""

    def __init__(
        self,
        path: Path,
        *,
        options: StoreOptions | None = None,
        time: FakeTime | None = None,
        opened: bool = True,
        syncs: bool = True,
    ) -> None:
        """Backups go to `path`. Not `syncs`: a sync just notes what `cut_power` has to leave, and costs nothing."""
        self._parent = path
        self._generation = 0
        self.path = path / "data-0"
        self.options = replace(options or StoreOptions(), backup_root=path)
        self.time = time or FakeTime()
        self.clock: GuardedClock = self.time.clock()
        self._store: Store | None = None
        self._syncs = syncs
        self._logs: dict[str, int] = {}
        """The log files of the database, and how much of each was synced."""
        if opened:
            self.open()

    # -- opening, closing, crashing ---------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The open store."""
        assert self._store is not None, "the rig is closed"
        return self._store

    def open(self, *, accept_clock: bool = False) -> Store:
        """Opens the store, without the sweep and the thread of `Store.start`; re-arming is taken up as there."""
        self.clock = self.time.clock()
        self._store = Store.open(self.path, clock=self.clock, options=self.options, accept_clock=accept_clock)
        self.watch_syncs()
        self._store.begin_work()
        self._store.writer.step()
        return self._store

    def watch_syncs(self) -> None:
        """Notes from now on the syncs of the store."""
        rocks = self.store._rocks
        sync = rocks.sync

        synced = -1

        def watched() -> None:
            nonlocal synced
            if self._syncs:
                sync()
            if rocks.write_number != synced:  # else the logs are as they were
                synced = rocks.write_number
                self._logs = self._log_bytes()

        rocks.sync = watched  # type: ignore[method-assign]  # nothing else tells
        self._logs = self._log_bytes()

    def _log_bytes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with os.scandir(self.path / "db") as entries:  # not a glob: a simulation does this with each sync
            for entry in entries:
                if entry.name.endswith(".log"):
                    with contextlib.suppress(FileNotFoundError):  # RocksDB removes those that it needs no more
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    def close(self) -> None:
        """An orderly stop."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def reopen(self) -> Store:
        """An orderly stop and a start."""
        self.close()
        return self.open()

    def kill(self) -> None:
        """The process is killed: its writes so far stay, and nothing else is done. `path` is then a copy."""
        self._generation += 1
        copied = self._parent / f"data-{self._generation}"
        while not _copied_whole(self.path, copied):
            shutil.rmtree(copied, ignore_errors=True)
        self.abandon()
        shutil.rmtree(self.path)
        self.path = copied

    def abandon(self) -> None:
        """Frees the directory as a dying process does: without the writer's last words."""
        self.store._rocks.close()
        self._store = None

    def crash(self) -> Store:
        """Kills the process, and starts another."""
        self.kill()
        return self.open()

    def cut_power(self) -> Store:
        """The machine loses power, and is started again: all that was not synced is gone. RocksDB syncs its other files
        by itself; the log is synced by the store alone."""
        synced = dict(self._logs)
        self.kill()
        for log in (self.path / "db").glob("*.log"):
            os.truncate(log, min(log.stat().st_size, synced.get(log.name, 0)))
        return self.open()

    # -- changing ---------------------------------------------------------------------------------------------------

    def run(self, request: Request) -> Outcome:
        """Does one request. Raises StoreError."""
        return self.store.run(request)

    def run_together(self, requests: Sequence[Request]) -> list[Outcome | StoreError]:
        """Queues all requests, then lets the writer work: they share commits as far as its bounds allow."""
        answers: list[Outcome | StoreError | None] = [None] * len(requests)

        def hear(index: int) -> Callable[[Outcome | StoreError], None]:
            def heard(answer: Outcome | StoreError) -> None:
                assert answers[index] is None, "a request is answered once"
                answers[index] = answer

            return heard

        for index, request in enumerate(requests):
            try:
                self.store.commits.submit(request).then(hear(index))
            except StoreError as error:
                answers[index] = error
        self.store.writer.step()
        complete = [answer for answer in answers if answer is not None]
        assert len(complete) == len(requests), "every request is answered"
        return complete

    def put(
        self,
        topic: str,
        key: str,
        payload: bytes = b"x",
        *,
        ttl: int | None = None,
        lifetime: Lifetime = ABSENT,
        keep: bool = False,
        condition: Condition | None = None,
        want_results: bool = False,
    ) -> Outcome:
        """Publishes one record under a given key; `ttl` in microseconds."""
        return self.run(
            Publish(
                topic,
                [payload],
                [key],
                lifetime=lifetime if ttl is None else Lifetime(LifetimeKind.TTL, ttl),
                ttl_mode=TtlMode.KEEP if keep else TtlMode.RESET,
                conditions=None if condition is None else [condition],
                want_results=want_results,
            )
        )

    def touch(self, topic: str, key: str, *, ttl: int | None = None, lifetime: Lifetime = ABSENT) -> Outcome:
        """Touches one record; `ttl` in microseconds."""
        return self.run(Touch(topic, [key], lifetime if ttl is None else Lifetime(LifetimeKind.TTL, ttl)))

    def delete(self, topic: str, *keys: str) -> Outcome:
        """Deletes by keys."""
        return self.run(Delete(topic, list(keys)))

    def play(self, topic: str, what: str, key: str, document: object, micros: int | None) -> None:
        """A step of a random program: a put, a touch, a delete, or time that passes. `micros`: its ttl, or how long."""
        match what:
            case "put":
                self.put(topic, key, json.dumps(document).encode(), ttl=micros)
            case "touch":
                self.touch(topic, key, ttl=micros)
            case "delete":
                self.delete(topic, key)
            case _:
                self.time.tick(micros or 0)

    def create_topic(
        self,
        name: str,
        settings: TopicSettings = BINARY,
        changes: Mapping[str, object] = NO_CHANGES,
        /,
        *,
        in_config: bool = False,
        **more: object,
    ) -> Topic:
        """Creates a topic whose declaration gives it `settings`, with the other arguments. Raises StoreError.

        A topic of the configuration that does not declare its expiration has none; of others it is declared.
        """
        answers: list[Topic | StoreError] = []
        declared = {**declared_of(settings), **changes, **more}
        if not in_config:
            declared.setdefault("expiration", settings.expiration)
        self.store.administration.create_topic(name, declared, in_config=in_config).then(answers.append)
        return self.answer(answers)

    def alter_topic(
        self, name: str, changes: Mapping[str, object] = NO_CHANGES, /, *, in_config: bool = False, **more: object
    ) -> Topic:
        """Changes settings. Raises StoreError."""
        answers: list[Topic | StoreError] = []
        self.submit_alter(name, answers.append, {**changes, **more}, in_config=in_config)
        return self.answer(answers)

    def submit_alter(
        self,
        name: str,
        done: Callable[[Topic | StoreError], None],
        changes: Mapping[str, object],
        *,
        in_config: bool = False,
    ) -> None:
        """Queues a change of settings; nothing happens before the writer's next turn."""
        self.store.administration.alter_topic(name, lambda declared: {**declared, **changes}, in_config=in_config).then(
            done
        )

    def delete_topic(self, name: str) -> int:
        """Deletes a topic. Raises StoreError."""
        answers: list[int | StoreError] = []
        self.store.administration.delete_topic(name).then(answers.append)
        return self.answer(answers)

    def release_topic(self, name: str) -> Topic:
        """Takes a topic out of the configuration. Raises StoreError."""
        answers: list[Topic | StoreError] = []
        self.store.administration.release_topic(name).then(answers.append)
        return self.answer(answers)

    def set_policy(
        self,
        name: str,
        pattern: str,
        sets: Mapping[str, object] = NO_CHANGES,
        /,
        *,
        operator: bool = False,
        priority: int = 0,
        **more: object,
    ) -> None:
        """Sets a policy for topics. Raises StoreError."""
        answers: list[Policy | StoreError] = []
        self.store.administration.set_policy(
            Policy(name, pattern, {**sets, **more}, priority=priority, operator=operator)
        ).then(answers.append)
        self.answer(answers)

    def delete_policy(self, name: str, *, operator: bool = False) -> None:
        """Deletes a policy. Raises StoreError."""
        answers: list[Policy | StoreError] = []
        self.store.administration.delete_policy(name, operator=operator).then(answers.append)
        self.answer(answers)

    def prune_step(self) -> bool:
        """One step of pruning; whether there may be more."""
        answers: list[bool | StoreError] = []
        self.store.upkeep.prune().then(answers.append)
        return self.answer(answers)

    def prune(self) -> None:
        """Prunes the journal until there is no more to do."""
        while self.prune_step():
            pass

    def answer(self, answers: list[T | StoreError]) -> T:
        """Does the queued work and everything that follows from it; returns the answer to it, or raises it."""
        self.store.writer.step()
        (answer,) = answers
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def turn(self) -> None:
        """Lets the writer do the first item of its queue, and no more."""
        writer = self.store.writer
        writer.queue.take(0)
        writer._turn()
        writer._answers.flush()

    # -- reading ----------------------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """A topic."""
        return self.store.topics.find(name)

    def get(self, topic: str, key: str) -> Record | None:
        """The live record of a key."""
        _, (value,) = self.store.cuts.get(self.topic(topic), [key.encode()])
        return None if value is None else record(key.encode(), value)

    def live(self, topic: str, *, batch: int = 1000) -> dict[bytes, Record]:
        """All live records, as a cut shows them."""
        cut = self.store.cuts.records(self.topic(topic))
        keys: list[bytes] = []
        values: list[bytes] = []
        try:
            following: bytes | None = cut.topic.prefix
            while following is not None:
                following, _ = cut.fill(following, batch, keys, values)
        finally:
            cut.close()
        return {key: record(key, value) for key, value in zip(keys, values, strict=True)}

    def count(self, topic: str) -> int:
        """Live records."""
        return self.store.cuts.count(self.topic(topic))

    def stored(self, topic: str) -> dict[bytes, Record]:
        """All records on disk, expired or not."""
        found = self.topic(topic)
        rows = self.rows(RECORDS, found.prefix, found.stop)
        return {key[4:]: record(key[4:], value) for key, value in rows}

    def entries(self) -> list[tuple[int, bytes]]:
        """The expiry index: (expire time, store key), those below the floor left out."""
        rows = self.rows(EXPIRY, self.store.writer.sweep.floor)
        return [(unpack_i64(key[:8]), key[8:]) for key, _ in rows]

    def journal(self, topic: str) -> list[JournalEntry]:
        """The retained changes of a topic, in order."""
        return list(self._journal(topic))

    def _journal(self, topic: str) -> Iterator[JournalEntry]:
        for key, value in journal_rows(self.store, self.topic(topic)):
            changes = decode_changes(unpack_i64(key[4:]), value)
            columns = zip(
                changes.change,
                changes.keys,
                changes.payloads,
                changes.version,
                changes.publish_time_micros,
                changes.expire_time_micros,
                changes.previous,
                changes.removed_version,
                strict=True,
            )
            for sequence, (kind, *fields) in enumerate(columns, changes.first_sequence):
                yield JournalEntry(sequence, changes.commit_time_micros, KINDS[kind], *fields)

    def kinds(self, topic: str) -> list[tuple[str, str]]:
        """The retained changes of a topic as (kind, key)."""
        return [(entry.kind, entry.key.decode()) for entry in self._journal(topic)]

    def rows(self, family: str, start: bytes = b"", stop: bytes | None = None) -> list[tuple[bytes, bytes]]:
        """The rows of a column family."""
        cursor = self.store._rocks.cursor(family)
        try:
            return [row for row in cursor.rows(start, stop) if row[0] != MARK_KEY]
        finally:
            cursor.close()


def _copied_whole(path: Path, copied: Path) -> bool:
    """Copies an open data directory; False when a compaction changed it meanwhile."""

    def sizes() -> dict[Path, int]:
        return {file: file.stat().st_size for file in path.rglob("*") if not file.name.startswith("LO")}

    try:
        before = sizes()
        shutil.copytree(path, copied, ignore=shutil.ignore_patterns("LOCK", "LOG*"))
        return sizes() == before
    except (shutil.Error, FileNotFoundError):
        return False


class FaultyRocks:
    """Makes the next writes or syncs of a store raise: `writes` and `syncs` are used up one by one, None passes."""

    def __init__(self, rig: Rig) -> None:
        rocks = rig.store._rocks
        self.writes: list[Exception | None] = []
        self.syncs: list[Exception | None] = []
        self.attempts: list[Batch] = []
        """A copy of every batch that was written, or was to be."""
        self.on_sync: Callable[[], None] = lambda: None
        write, sync = rocks.write, rocks.sync

        def faulty_write(batch: Batch) -> None:
            self.attempts.append(
                replace(
                    batch,
                    puts=defaultdict(dict, {name: dict(rows) for name, rows in batch.puts.items()}),
                    deletes=defaultdict(list, {name: list(keys) for name, keys in batch.deletes.items()}),
                    ranges=list(batch.ranges),
                )
            )
            if self.writes and (error := self.writes.pop(0)) is not None:
                raise error
            write(batch)

        def faulty_sync() -> None:
            self.on_sync()
            if self.syncs and (error := self.syncs.pop(0)) is not None:
                raise error
            sync()

        rocks.write = faulty_write  # type: ignore[method-assign]  # the point of this class
        rocks.sync = faulty_sync  # type: ignore[method-assign]  # as above


@contextlib.contextmanager
def no_drafts_left() -> Iterator[None]:
    """Fails if a draft that is made meanwhile would stay in memory until the garbage collector comes."""

    def drafts() -> int:
        return sum(type(one) is Draft for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = drafts()
        yield
        assert drafts() == before, "a draft holds itself, by what it calls or by one of its parts"
    finally:
        gc.enable()
