"""Each kind of file of a data directory damaged, emptied, swapped and deleted: told, or harmless (rule X4).

Story: a log that was emptied or removed between two starts was taken for the torn end that a power cut leaves, and
records that had been acknowledged as on disk were gone without a word.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest import mock

import pytest

from sow_client import EARLIEST, ResyncRequired
from sow_server.engine.disk.mark import MARK, Bounds, load
from sow_server.engine.disk.rocks import Batch
from sow_server.engine.losses import settle
from sow_server.engine.store import Store, StoreOptions
from sow_server.engine.values.database import Failed, RocksOptions
from sow_server.engine.values.errors import OpenError
from sow_server.engine.values.model import Delete, Durability, Expiration, Publish
from tests.fault.audit import Audit
from tests.support.servers.server import DidNotStart, ServerProcess, until
from tests.support.stores.replicas import instance

PAGE: Final = Path(__file__).parents[2] / "docs" / "durability.md"
HARMLESS: Final = "harmless"
DAMAGED: Final = "damaged"
MISSING: Final = "end missing"
ABSENT: Final = "cannot be opened"
SAID: Final = {
    DAMAGED: "the data is damaged",
    MISSING: "the end of the log is missing",
    ABSENT: "cannot be opened",
    "SOW missing": "the file SOW is missing, but there is data",
}
ACTS: Final = ("damaged", "emptied", "swapped", "deleted")
OUTCOMES: Final[dict[str, tuple[str, str, str, str]]] = {
    "SOW": (HARMLESS, HARMLESS, HARMLESS, "SOW missing"),
    "MARK": (HARMLESS, HARMLESS, DAMAGED, HARMLESS),
    "db/CURRENT": (DAMAGED, DAMAGED, HARMLESS, DAMAGED),
    "db/MANIFEST-*": (DAMAGED, DAMAGED, DAMAGED, ABSENT),
    "db/*.log": (DAMAGED, MISSING, DAMAGED, MISSING),
    "db/*.sst": (DAMAGED, DAMAGED, DAMAGED, DAMAGED),
    "db/OPTIONS-*": (HARMLESS,) * 4,
    "db/IDENTITY": (HARMLESS,) * 4,
    "db/LOG": (HARMLESS,) * 4,
    "db/LOCK": (HARMLESS,) * 4,
    "db/rocksdict-config.json": (HARMLESS,) * 4,
}
"""The outcome of a start for each damage to a file, in the order of `ACTS`; as in `docs/durability.md`."""
CELLS: Final = [
    pytest.param(name, act, outcome, id=f"{name}-{act}")
    for name, outcomes in OUTCOMES.items()
    for act, outcome in zip(ACTS, outcomes, strict=True)
]
RECORDS: Final = 120
_cache_bytes = itertools.count(2**24)


def options() -> StoreOptions:
    """With a block cache of its own, as copies of a table share their cached blocks."""
    return StoreOptions(
        rocks=RocksOptions(
            block_cache_bytes=next(_cache_bytes), records_memtable_bytes=2**16, other_memtable_bytes=2**20
        )
    )


def write(store: Store, keys: range) -> None:
    for key in keys:
        payload = b'{"n":%d,"pad":"%s"}' % (key, bytes([97 + key % 26]) * 1000)
        store.run(Publish("kept", [payload], [str(key)], durability=Durability.BUFFERED))


def busy(store: Store) -> bool:
    """Whether RocksDB is writing tables, so that its files change."""
    database = store._rocks._open()
    return any(
        database.property_int_value(f"rocksdb.{name}")
        for name in ("mem-table-flush-pending", "num-running-flushes", "compaction-pending", "num-running-compactions")
    )


def killed(path: Path, keys: range) -> Path:
    """The files of a process that was killed a moment after its mark: records in tables and in several logs."""
    store = Store.open(path, options=options())
    store.administration.create_topic("kept", {"expiration": Expiration.ENABLED, "index": ("/n",)})
    store.writer.step()
    store._rocks.flush()
    write(store, keys)
    store.sync()
    copy = path.with_name(path.name + "-killed")

    def copied() -> bool:
        """RocksDB may begin to write a table at any moment: only a copy of exactly what is marked is one to damage."""
        store.upkeep.keep_mark()
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        mark = load(copy)
        assert mark is not None
        return not busy(store) and (copy / "db" / mark.manifest).stat().st_size == mark.manifest_bytes

    until(lambda: not busy(store) and copied(), 20, "RocksDB to have done its work")
    store.close()
    return copy


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed(tmp_path_factory.mktemp("left") / "data", range(RECORDS))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed(tmp_path_factory.mktemp("other") / "data", range(1000, 1000 + RECORDS))


@pytest.fixture
def data(tmp_path: Path, left: Path) -> Path:
    copy = tmp_path / "data"
    shutil.copytree(left, copy)
    return copy


def logs(data: Path) -> list[Path]:
    """The logs that hold something, in their order."""
    return sorted(path for path in (data / "db").glob("*.log") if path.stat().st_size)


def tables(data: Path) -> list[Path]:
    return sorted((data / "db").glob("*.sst"))


def newest(data: Path, name: str) -> Path:
    return logs(data)[-1] if name == "db/*.log" else max(data.glob(name))


def opened(data: Path, *, accept_loss: bool = False) -> Store:
    return Store.open(data, options=options(), accept_loss=accept_loss)


def refusal(data: Path) -> str:
    with pytest.raises(OpenError) as refused:
        opened(data).close()
    message = str(refused.value)
    assert message.startswith(f"{data}: ")
    assert "\n" not in message
    return message


def keys_of(store: Store) -> set[str]:
    cut = store.cuts.records(store.topics.find("kept"))
    keys: list[bytes] = []
    following: bytes | None = cut.topic.prefix
    while following is not None:
        following, _ = cut.fill(following, 1000, keys, [])
    cut.close()
    return {key.decode() for key in keys}


def kept(data: Path) -> set[str]:
    """The keys of a store that opens, and whose parts agree."""
    store = opened(data)
    try:
        Audit().check(store)
        return keys_of(store)
    finally:
        store.close()


def all_of(count: int = RECORDS) -> set[str]:
    return set(map(str, range(count)))


def test_the_files_of_a_killed_process_open(data: Path) -> None:
    assert len(logs(data)) > 1
    assert tables(data)
    assert kept(data) == all_of()
    assert kept(data) == all_of()


@pytest.mark.parametrize(("name", "act", "outcome"), CELLS)
def test_damage_to_a_file_is_reported_or_harmless(data: Path, other: Path, name: str, act: str, outcome: str) -> None:
    found = newest(data, name)
    if act == "damaged":
        content = bytearray(found.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 64] = bytes(byte ^ 0xFF for byte in content[middle : middle + 64])
        found.write_bytes(content)
    elif act == "emptied":
        os.truncate(found, 0)
    elif act == "swapped":
        shutil.copyfile(newest(other, name), found)
    else:
        found.unlink()
    if outcome == HARMLESS:
        assert kept(data) == all_of()
    else:
        assert SAID[outcome] in refusal(data)


def test_the_page_has_what_the_tests_show() -> None:
    lines = PAGE.read_text().splitlines()
    for name, outcomes in OUTCOMES.items():
        (line,) = [line for line in lines if line.startswith(f"| `{name}` |") and line.count("|") == 7]
        assert [cell.strip() for cell in line.split("|")[3:-1]] == list(outcomes), name


def swap(one: Path, another: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(another.read_bytes())
    another.write_bytes(content)


def delete(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def cut_short(path: Path, *, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(lambda data: logs(data)[0].unlink(), MISSING, id="oldest-log-deleted"),
        pytest.param(lambda data: logs(data)[len(logs(data)) // 2].unlink(), MISSING, id="middle-log-deleted"),
        pytest.param(lambda data: delete(*logs(data)), MISSING, id="all-logs-deleted"),
        pytest.param(lambda data: cut_short(logs(data)[0], by=1), MISSING, id="oldest-log-cut"),
        pytest.param(lambda data: cut_short(logs(data)[-1], by=1), MISSING, id="newest-log-cut"),
        pytest.param(lambda data: swap(logs(data)[0], logs(data)[-1]), DAMAGED, id="two-logs-swapped"),
        pytest.param(lambda data: tables(data)[0].unlink(), DAMAGED, id="oldest-table-deleted"),
        pytest.param(lambda data: swap(tables(data)[0], tables(data)[-1]), DAMAGED, id="two-tables-swapped"),
        pytest.param(lambda data: cut_short(next((data / "db").glob("MANIFEST-*")), by=10), DAMAGED, id="manifest-cut"),
        pytest.param(lambda data: shutil.rmtree(data / "db"), DAMAGED, id="database-deleted"),
    ],
)
def test_other_damage_to_files_is_reported(data: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(data)
    assert SAID[said] in refusal(data)
    assert SAID[said] in refusal(data), "and again, as the refusal has changed nothing"


def test_the_database_of_an_empty_store_in_place_of_the_own_is_reported(data: Path, tmp_path: Path) -> None:
    """RocksDB opens it, finds no table in it, and removes ours as needless."""
    opened(tmp_path / "empty").close()
    for pattern in ("MANIFEST-*", "CURRENT"):
        for path in (data / "db").glob(pattern):
            path.unlink()
        for path in (tmp_path / "empty" / "db").glob(pattern):
            shutil.copy(path, data / "db")
    assert "not of the database" in refusal(data)
    assert tables(data)


def test_the_refusal_names_the_missing_part_and_a_remedy(data: Path) -> None:
    store = opened(data)
    before = store.writer.last_sequence
    store.upkeep.keep_mark()
    write(store, range(RECORDS, RECORDS + 5))
    last = store.writer.last_sequence
    store.sync()
    store.upkeep.keep_mark()
    copy = data.with_name("copy")
    shutil.copytree(data, copy)
    store.close()
    log = logs(copy)[-1]
    log.unlink()
    message = refusal(copy)
    assert f"{log.name} is missing" in message
    assert f"all up to {last} were on disk" in message
    assert f"changes after sequence {before} are missing" in message
    assert "--accept-loss" in message


def test_after_an_orderly_stop_the_mark_is_exact(data: Path) -> None:
    store = opened(data)
    write(store, range(RECORDS, RECORDS + 5))
    copy, rocks = data.with_name("copy"), store._rocks
    store._rocks = mock.Mock(wraps=rocks)  # its flushes fail, so that the records are in the log alone
    store._rocks.flush.side_effect = Failed("no space")
    store._rocks.close.side_effect = lambda: shutil.copytree(data, copy)
    store.close()
    rocks.close()
    assert logs(copy)
    cut_short(logs(copy)[-1], by=1)
    assert SAID[MISSING] in refusal(copy)


def test_losing_writes_after_the_last_mark_passes_for_a_torn_end(data: Path) -> None:
    """Else a power cut would be refused."""
    store = opened(data)
    write(store, range(RECORDS, RECORDS + 5))
    store.sync()
    copy = data.with_name("copy")
    shutil.copytree(data, copy)
    store.close()
    os.truncate(logs(copy)[-1], 0)
    assert kept(copy) == all_of()


def test_data_without_a_mark_opens_and_gets_one(data: Path) -> None:
    """Those of a version before there were marks, and backups."""
    (data / MARK).unlink()
    assert kept(data) == all_of()
    assert (data / MARK).exists()


def test_a_torn_write_of_the_mark_leaves_the_one_before(data: Path) -> None:
    content = bytearray((data / MARK).read_bytes())
    half = len(content) // 2
    for start in (0, half):
        torn = bytes(content[:start]) + b"\xff" * 100 + bytes(content[start + 100 :])
        (data / MARK).write_bytes(torn)
        copy = data.with_name(f"copy-{start}")
        shutil.copytree(data, copy)
        assert kept(copy) == all_of()


# --- a loss that is accepted -----------------------------------------------------------------------------------------


@pytest.fixture(params=["oldest", "newest", "cut", "all"])
def short(data: Path, request: pytest.FixtureRequest) -> Path:
    """Data of which a part of the log is missing."""
    found = logs(data)
    match request.param:
        case "oldest":
            found[0].unlink()
        case "newest":
            found[-1].unlink()
        case "cut":
            cut_short(found[-1], by=found[-1].stat().st_size // 2)
        case _:
            delete(*found)
    return data


def test_an_accepted_loss_leaves_a_store_whose_parts_agree(short: Path) -> None:
    """The column families go to table files one by one: without more than the log's loss, an index or the journal would
    tell of records that are gone, and the other way round."""
    before = opened_elsewhere(short)
    store = opened(short, accept_loss=True)
    assert store.instance.epoch != before
    Audit().check(store)
    found = keys_of(store)
    assert found <= all_of()
    write(store, range(5))
    Audit().check(store)
    store.close()
    assert kept(short) == found | all_of(5)


def opened_elsewhere(short: Path) -> str:
    """The epoch of the data before."""
    (original,) = [path for path in short.parent.glob("data") if path == short]
    copy = original.with_name("before")
    shutil.copytree(original, copy)
    (copy / MARK).unlink()
    store = opened(copy)
    epoch = store.instance.epoch
    store.close()
    return epoch


def test_after_an_accepted_loss_versions_and_sequences_are_not_given_out_again(short: Path, left: Path) -> None:
    copy = short.with_name("whole")
    shutil.copytree(left, copy)
    whole = opened(copy)
    version, sequence = whole.writer.bounds
    whole.close()
    store = opened(short, accept_loss=True)
    outcome = store.run(Publish("kept", [b"{}"], ["new"]))
    store.close()
    assert outcome.last_sequence > sequence
    assert outcome.last_version > version


def test_a_start_that_is_killed_while_it_settles_a_loss_is_done_again(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logs are gone by then, so that nothing would be missing any more."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sow_server.engine.opening.settle", killed)
        with pytest.raises(KeyboardInterrupt):
            opened(short, accept_loss=True)
    store = opened(short)
    Audit().check(store)
    store.close()


def test_data_that_a_server_has_open_are_refused_before_anything_of_them_is_judged(data: Path) -> None:
    """The mark was held against the logs before RocksDB's lock was taken: a second start with --accept-loss could have
    written down a loss for data that another server was using."""
    store = opened(data)
    write(store, range(5))
    store.sync()
    store.upkeep.keep_mark()
    mark = (data / MARK).read_bytes()
    logs(data)[-1].unlink()
    with pytest.raises(OpenError, match="another sow-server is using this data directory"):
        opened(data, accept_loss=True)
    assert (data / MARK).read_bytes() == mark
    store.close()


def test_after_an_accepted_loss_a_delete_that_was_not_lost_holds(tmp_path: Path) -> None:
    """The table of tombstones had the delete of a record, and that of records was older; and a number of tombstones
    that was too small kept the store from looking for them when a peer sent the record again."""
    rig = instance(tmp_path, "a", peers=["b"])
    rig.create_topic("t")
    rig.put("t", "1")
    key = rig.topic("t").prefix + b"1"
    value = rig.store._rocks.get("records", key)
    assert value is not None
    rig.delete("t", "1")
    rig.topic("t").statistics = rig.topic("t").statistics._replace(tombstones=0)
    batch = Batch()
    batch.puts["records"][key] = value
    rig.store._rocks.write(batch)
    settle(rig.store._rocks, Bounds(), {"id": "other", "epoch": "other", "origin": None})
    rig.abandon()
    rig.open()
    assert rig.get("t", "1") is None
    assert rig.topic("t").statistics.tombstones == 1
    assert rig.topic("t").statistics.records == 0
    rig.close()


def test_accepting_a_loss_where_there_is_none_changes_nothing(data: Path) -> None:
    store = opened(data, accept_loss=True)
    epoch = store.instance.epoch
    assert keys_of(store) == all_of()
    store.close()
    store = opened(data)
    assert store.instance.epoch == epoch
    store.close()


def test_a_deleted_record_stays_deleted_when_nothing_is_missing(data: Path) -> None:
    store = opened(data)
    store.run(Delete("kept", ["3"]))
    store.close()
    assert kept(data) == all_of() - {"3"}


def test_a_server_refuses_to_start_without_its_log_and_goes_on_when_the_loss_is_accepted(tmp_path: Path) -> None:
    config = '[server]\ninstance = "sow"\n[topics.orders]\nkey = ["/id"]\n'
    with ServerProcess(tmp_path, config) as server:
        with server.client() as client:
            client.publish("orders", {"id": 0})
            with client.durable("orders", "billing", start=EARLIEST) as durable:
                first = next(iter(durable))
                durable.acknowledge(first)
            last = client.publish("orders", {"id": 1})
            assert first.bookmark is not None
            size = sum(log.stat().st_size for log in logs(server.data))

            def marked() -> bool:
                mark = load(server.data)
                return mark is not None and sum(log.bytes for log in mark.logs) >= size

            until(marked, 20, "the mark")
        server.kill9()
        delete(*logs(server.data))
        with pytest.raises(DidNotStart) as refused:
            server.start()
        assert refused.value.code == 2
        (line,) = refused.value.said.splitlines()
        assert SAID[MISSING] in line
        assert "--accept-loss" in line
        server.start("--accept-loss")
        assert server.events("loss_accepted")
        with server.client() as client:
            assert client.count("orders") == 0
            assert client.publish("orders", {"id": 1}).version > last.version
            with pytest.raises(ResyncRequired) as other_epoch:
                next(iter(client.subscribe("orders", start=first.bookmark)))
            assert other_epoch.value.reason == "BOOKMARK_OTHER_EPOCH"
        server.restart()
        assert not server.faults()
