"""Space of expired records is used again, and given back by compaction (L17; arrebato 6, Pulsar 10, RabbitMQ 11)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.store import Store, StoreOptions
from sow_server.engine.values.database import RocksOptions
from sow_server.engine.values.model import Expiration, Lifetime, LifetimeKind, Outcome, Publish, TopicSettings
from sow_server.engine.values.policies import declared_of
from tests.support.servers.server import until
from tests.support.stores.stores import HOUR, MINUTE, FakeTime, Rig

CYCLES = 10
SETTINGS = TopicSettings(expiration=Expiration.ENABLED, index=("/n",), dead_letter="dead")
DEAD = TopicSettings(expiration=Expiration.ENABLED, default_ttl_micros=MINUTE)
BATCH = 500
WORK = ("rocksdb.compaction-pending", "rocksdb.num-running-compactions", "rocksdb.num-running-flushes")
"""Room for a compaction under way: RocksDB removes the replaced files at its end."""


@dataclass(frozen=True, slots=True)
class Load:
    """The bytes that one cycle writes, and the part that RocksDB keeps in memory."""

    records: int
    record_bytes: int
    rocks: RocksOptions


SMALL = Load(
    2_000,
    512,
    RocksOptions(
        block_cache_bytes=2**22, records_memtable_bytes=2**19, other_memtable_bytes=2**18, log_bytes_max=2**20
    ),
)
LARGE = Load(50_000, 512, RocksOptions())


def reclaim(store: Store) -> None:
    """The work of the timer after enough removals; here, anything."""
    assert store.upkeep.reclaim(1, lambda: True)


def settled_bytes(rig: Rig, enough: float) -> int:
    """The size of the data once RocksDB has removed the files that are of no use. A thread of its own does that, which
    is late on a busy machine; some files it leaves until the next compaction, so the wait is short."""
    give_up = time.monotonic() + 5
    while (size := data_bytes(rig)) > enough > 0 and time.monotonic() < give_up:
        time.sleep(0.1)
    return size


@pytest.mark.parametrize("load", [SMALL, pytest.param(LARGE, marks=pytest.mark.long)], ids=["small", "large"])
@pytest.mark.parametrize(
    "give_back",
    [reclaim, pytest.param(lambda store: store.upkeep.compact(), marks=pytest.mark.long)],
    ids=["by itself", "asked"],
)
def test_cycles_of_loading_and_expiring_keep_the_directory_on_a_plateau(
    tmp_path: Path, load: Load, give_back: Callable[[Store], object]
) -> None:
    """arrebato 6, Pulsar 10, RabbitMQ 11. New keys each time, dead letters that expire in their turn, a secondary index
    and a journal.

    The bound of space that is reclaimed by itself was once twice the size: only RocksDB's own merges gave space
    back.
    """
    rig = Rig(tmp_path, options=StoreOptions(rocks=load.rocks))
    rig.create_topic("dead", DEAD)
    rig.create_topic("t", SETTINGS)
    rig.put("t", "stays", b'{"n":0}')
    sizes: list[int] = []
    for cycle in range(CYCLES):
        for request in requests(load, cycle):
            rig.run(request)
        rig.time.tick(HOUR)
        rig.store.sweep()
        assert rig.count("dead") == load.records
        rig.time.tick(HOUR)
        rig.store.sweep()
        rig.prune()
        give_back(rig.store)
        assert list(rig.stored("t")) == [b"stays"]
        assert not rig.stored("dead")
        # RocksDB removes a log together with the next memtable that it writes out. On a busy machine the last one was
        # often written out too early for that, and a log of up to three times these data stayed.
        rig.put("t", "stays", b'{"n":0}')
        rig.store._rocks.flush()
        sizes.append(settled_bytes(rig, 1.2 * min(sizes, default=0)))
    print("MiB after each cycle:", [round(size / 2**20, 1) for size in sizes])
    first, last = sizes[: CYCLES // 2], sizes[CYCLES // 2 :]
    assert max(last) <= 1.3 * min(last), sizes
    assert max(last) <= 1.3 * max(first), sizes
    rig.store.upkeep.compact()
    assert sizes[-1] <= 1.3 * data_bytes(rig), "a compaction of everything gives no more back"
    assert rig.get("t", "stays") is not None


def data_bytes(rig: Rig) -> int:
    """Bytes of the data directory but for RocksDB's own text log, which is bounded by itself (16 MiB); once RocksDB
    has nothing under way."""
    families = rig.store._rocks._families.values()
    until(lambda: not any(family.property_int_value(name) for family in families for name in WORK), 60, "RocksDB")
    files = [file for file in rig.path.rglob("*") if not file.name.startswith("LOG")]
    return sum(file.stat().st_size for file in files if file.is_file())


def requests(load: Load, cycle: int) -> Iterator[Publish]:
    """The publishes of a cycle: payloads that do not compress, under keys that were never there before."""
    generator = random.Random(cycle)
    for first in range(0, load.records, BATCH):
        numbers = range(first, min(first + BATCH, load.records))
        payloads = [
            b'{"n":%d,"x":"%s"}' % (number, generator.randbytes(load.record_bytes // 2).hex().encode())
            for number in numbers
        ]
        keys = [f"{cycle}/{number}" for number in numbers]
        yield Publish("t", payloads, keys, lifetime=Lifetime(LifetimeKind.TTL, MINUTE))


def test_a_compaction_goes_on_beside_publishing_sweeping_and_reading(tmp_path: Path) -> None:
    time = FakeTime()
    # Patient: on a busy machine, three compactions in a row can stall writes for longer than publishers wait.
    options = StoreOptions(rocks=SMALL.rocks, writer=WriterOptions(stall_patience_micros=MINUTE))
    store = Store.open(tmp_path / "data", clock=time.clock(), options=options)
    store.start(lambda answer: answer())
    compacted = threading.Event()

    def compact() -> None:
        for _ in range(2):
            store.upkeep.compact()
        compacted.set()

    thread = threading.Thread(target=compact)
    try:
        for name, settings in (("dead", DEAD), ("t", SETTINGS)):
            made = threading.Event()
            store.administration.create_topic(name, declared_of(settings)).then(lambda _, made=made: made.set())  # type: ignore[misc]  # bound now
            assert made.wait(30)
        topic = store.topics.find("t")
        thread.start()
        cycle = written = 0
        while not compacted.is_set() or cycle < 2:
            for request in requests(SMALL, cycle):
                heard = threading.Event()
                answers: list[object] = []

                def hear(answer: object, heard: threading.Event = heard, answers: list[object] = answers) -> None:
                    answers.append(answer)
                    heard.set()

                store.commits.submit(request).then(hear)
                assert heard.wait(90)
                assert isinstance(answers[0], Outcome), answers
                written += answers[0].applied
                _, (found,) = store.cuts.get(topic, [f"{cycle}/0".encode()])
                assert found is not None
            cycle += 1
        thread.join(60)
        assert not thread.is_alive()
        assert store.writer.queue.failure is None
        assert store.cuts.count(topic) == written == cycle * SMALL.records
    finally:
        compacted.set()
        thread.join(60)
        store.close()
