"""Full disks and damaged files: a clear refusal, reads that go on, and nothing acknowledged lost."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from sow_client import Client, DataLoss, ResourceExhausted, SowError
from sow_server.engine.disk.private import tighten
from sow_server.engine.store import Store, StoreOptions
from sow_server.engine.stored import PAYLOAD
from sow_server.engine.values.database import RocksOptions
from sow_server.engine.values.errors import OpenError
from sow_server.engine.values.model import Durability, Publish
from tests.support.servers.metrics_endpoint import page
from tests.support.servers.server import DidNotStart, ServerProcess, health, reason_of, until

CONFIG: Final = """
[server]
instance = "sow"
[metrics]
listen = "127.0.0.1:0"
[topics.kept]
"""
SMALL: Final = CONFIG + '[storage]\nmemtable = "1MiB"\nother_memtable = "1MiB"\n'
DOCUMENT: Final = {"pad": "x" * 20_000}


# --- a full disk -----------------------------------------------------------------------------------------------------


def fill(client: Client, *, durability: str) -> tuple[int, SowError]:
    """Publishes until the server says no; returns the number of acknowledged records, and the message."""
    for number in range(100_000):
        try:
            client.publish("kept", DOCUMENT | {"n": number}, key=str(number), durability=durability)  # type: ignore[arg-type]  # a str of the literals
        except SowError as error:
            return number, error
    raise AssertionError("the disk never was full")


def assert_all_there(client: Client, acknowledged: int) -> None:
    """Everything acknowledged is there; refused records may be there as well, except the last one."""
    numbers = {record.data["n"] for record in client.query("kept")}
    assert numbers >= set(range(acknowledged))
    assert len(numbers) <= acknowledged + 1


def assert_reads_go_on(server: ServerProcess, client: Client, acknowledged: int) -> None:
    assert reason_of(lambda: client.publish("kept", {"n": -1}, key="0")) == "DISK_FULL"
    assert reason_of(lambda: client.sow_delete("kept", keys=["0"])) == "DISK_FULL"
    assert reason_of(lambda: client.touch("kept", "0", ttl="1s")) == "DISK_FULL"
    assert reason_of(lambda: client.create_topic("more")) == "DISK_FULL"
    record = client.get("kept", "0")
    assert record is not None
    assert record.data == DOCUMENT | {"n": 0}
    assert_all_there(client, acknowledged)
    assert client.count("kept") >= acknowledged
    assert not client.describe_instance().serving
    status = client.status()
    assert status.state == "failed"
    assert status.failure.startswith("DISK_FULL")
    until(lambda: health(server.address) == "NOT_SERVING", 5, "health to say so")
    assert health(server.address, "sow.v1.SowService") == "NOT_SERVING"
    (served,) = server.events("metrics_served")
    endpoint = ("127.0.0.1", int(str(served["address"]).rpartition(":")[2]))
    assert page(endpoint, "/readyz") == (503, b"the store has failed: DISK_FULL\n")
    assert page(endpoint, "/healthz") == (200, b"ok\n")
    (event,) = server.events("writes_stopped")
    assert event["reason"] == "DISK_FULL"


@pytest.mark.parametrize("durability", ["fsync", "buffered"])
def test_when_a_file_may_not_grow_writes_are_refused_and_reads_go_on(tmp_path: Path, durability: str) -> None:
    with ServerProcess(tmp_path, CONFIG) as server:
        with server.client() as client:
            client.publish("kept", DOCUMENT | {"n": 0}, key="0")
            largest = max(path.stat().st_size for path in server.data.rglob("*") if path.is_file())
            _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (largest + 4_500_000, hard))
            acknowledged, error = fill(client, durability=durability)
            assert acknowledged > 100
            assert isinstance(error, ResourceExhausted)
            assert error.reason == "DISK_FULL"
            assert_reads_go_on(server, client, acknowledged)
        assert server.terminate() == 0
        server.start()  # without the limit
        with server.client() as client:
            assert_all_there(client, acknowledged)
            client.publish("kept", {"n": 1}, key="1")
            assert health(server.address) == "SERVING"
        assert not server.faults()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)],
            check=True,
            capture_output=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"mounting a tmpfs is not allowed here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def test_when_the_disk_is_full_writes_are_refused_and_reads_go_on(tmp_path: Path, small_disk: Path) -> None:
    with ServerProcess(tmp_path, SMALL, start=False) as server:
        server.data = small_disk / "data"
        server.start()
        with server.client() as client:
            acknowledged, error = fill(client, durability="buffered")
            assert acknowledged > 100
            assert error.reason == "DISK_FULL"
            assert_reads_go_on(server, client, acknowledged)
        server.kill9()
        # Somebody makes room: the same data on a larger disk.
        shutil.copytree(server.data, tmp_path / "roomy")
        server.data = tmp_path / "roomy"
        server.start()
        with server.client() as client:
            assert_all_there(client, acknowledged)
            client.publish("kept", {"n": 1}, key="1")


def test_a_full_disk_at_the_start_is_one_message(tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(24 * 2**20 - 8192))
    with ServerProcess(tmp_path, SMALL, start=False) as server:
        server.data = small_disk / "data"
        assert_refused(server, "cannot be opened")


# --- damaged files ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with records in tables and in the log: 3,000 and 300, in commits of 50 and of one."""
    folder = tmp_path_factory.mktemp("filled") / "data"
    store = Store.open(folder, options=StoreOptions())
    store.administration.create_topic("kept", {})
    store.writer.step()

    def publish(first: int, stop: int, step: int) -> None:
        for start in range(first, stop, step):
            numbers = range(start, start + step)
            documents = [b'{"n":%d,"pad":"%s"}' % (number, f"{number:05d}".encode() * 60) for number in numbers]
            store.run(Publish("kept", documents, list(map(str, numbers)), durability=Durability.BUFFERED))

    publish(0, 3_000, 50)
    store._rocks.flush()
    publish(3_000, 3_300, 1)
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("LOCK"))  # as a killed process leaves it
    store.close()
    return copy


@pytest.fixture
def data(tmp_path: Path, filled: Path) -> Path:
    """A copy of `filled`."""
    copy = tmp_path / "data"
    shutil.copytree(filled, copy)
    return copy


def files(data: Path, pattern: str) -> list[Path]:
    """Files of the database, the largest first."""
    return sorted((data / "db").glob(pattern), key=lambda path: -path.stat().st_size)


def damage(path: Path, *, at: float) -> None:
    """Turns 64 bytes over, at a part of the file's length."""
    content = bytearray(path.read_bytes())
    begin = int(len(content) * at)
    for index in range(begin, min(begin + 64, len(content))):
        content[index] ^= 0xFF
    path.write_bytes(content)


def table_of_records(data: Path) -> Path:
    """The table file that holds most of the records."""
    store = Store.open(data, options=fresh_cache())
    try:
        # Records are one row each; the other families have far fewer rows.
        largest = max(store._rocks._open().live_files(), key=lambda table: int(table["num_entries"]))
    finally:
        store._rocks.close()
    return data / "db" / str(largest["name"]).lstrip("/")


_cache_bytes = itertools.count(8 * 2**20)


def fresh_cache() -> StoreOptions:
    """Options with a block cache of their own. Stores of one process share the cache of a size, and blocks are cached
    by the identity of a table, which its copies share: a damaged copy would be served from cached blocks."""
    return StoreOptions(rocks=RocksOptions(block_cache_bytes=next(_cache_bytes)))


def refusal(data: Path) -> str:
    """The one message with which the data is refused; it begins with the place and is one line."""
    with pytest.raises(OpenError) as refused:
        Store.open(data, options=fresh_cache()).close()
    message = str(refused.value)
    assert message.startswith(f"{data}: ")
    assert "\n" not in message
    return message


def assert_refused(server: ServerProcess, message: str) -> None:
    """The start is refused with a message that contains `message`, on one line, and exit code 2."""
    with pytest.raises(DidNotStart) as refused:
        server.start()
    assert refused.value.code == 2
    line, *before = refused.value.said.splitlines()[::-1]
    assert line.startswith("sow-server: ")
    assert message in line
    assert all("metrics_served" in event for event in before), "the metrics are served before the data are opened"


def numbers_in(data: Path) -> list[int]:
    """The contents of the records of a store."""
    store = Store.open(data, options=fresh_cache())
    try:
        cut = store.cuts.records(store.topics.find("kept"))
        values: list[bytes] = []
        following: bytes | None = cut.topic.prefix
        while following is not None:
            following, _ = cut.fill(following, 1000, [], values)
        cut.close()
    finally:
        store.close()
    return sorted(json.loads(value[PAYLOAD])["n"] for value in values)


def test_undamaged_it_opens(data: Path) -> None:
    assert numbers_in(data) == list(range(3_300))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: damage(files(data, "*.log")[0], at=0.02), id="log-begin"),
        pytest.param(lambda data: damage(files(data, "*.log")[0], at=0.5), id="log-middle"),
        pytest.param(lambda data: damage(table_of_records(data), at=0.0), id="table-begin"),
        pytest.param(lambda data: damage(table_of_records(data), at=0.5), id="table-middle"),
        pytest.param(lambda data: damage(table_of_records(data), at=0.999), id="table-end"),
        pytest.param(lambda data: damage(files(data, "MANIFEST-*")[0], at=0.0), id="manifest-begin"),
        pytest.param(lambda data: damage(files(data, "MANIFEST-*")[0], at=0.5), id="manifest-middle"),
        pytest.param(lambda data: (data / "db" / "CURRENT").unlink(), id="current-missing"),
        pytest.param(lambda data: (data / "db" / "CURRENT").write_text("nonsense\n"), id="current-nonsense"),
        pytest.param(lambda data: table_of_records(data).unlink(), id="table-missing"),
        pytest.param(lambda data: os.truncate(table_of_records(data), 10_000), id="table-short"),
    ],
)
def test_damage_is_reported_when_opening(data: Path, spoil: Callable[[Path], None]) -> None:
    spoil(data)
    message = refusal(data)
    assert "damaged" in message
    assert "restore it from a backup" in message


def test_a_missing_manifest_is_reported_when_opening(data: Path) -> None:
    files(data, "MANIFEST-*")[0].unlink()
    assert "MANIFEST-" in refusal(data)


def test_data_without_their_marker_do_not_count_as_an_empty_directory(data: Path) -> None:
    (data / "SOW").unlink()
    assert "the file SOW is missing" in refusal(data)


@pytest.mark.parametrize("torn_bytes", [1, 7, 100, 300])
def test_a_log_with_a_torn_end_opens_as_after_a_power_cut(data: Path, torn_bytes: int) -> None:
    log = files(data, "*.log")[0]
    os.truncate(log, log.stat().st_size - torn_bytes)
    assert numbers_in(data) == list(range(3_299))


def test_the_server_tells_of_damage_in_one_message(tmp_path: Path, data: Path) -> None:
    damage(files(data, "*.log")[0], at=0.5)
    tighten(data)  # else the server tells of that, too
    with ServerProcess(tmp_path, CONFIG, start=False) as server:
        assert_refused(server, f"{data}: the data is damaged")


def test_damage_that_shows_later_is_an_error_and_never_a_gap(tmp_path: Path, data: Path) -> None:
    """Data too large to be read at the start is scrubbed afterwards; whoever meets the damage first is told.

    Story: reads used to answer INTERNAL, as only the writer translated what RocksDB says.
    """
    damage(table_of_records(data), at=0.5)
    with ServerProcess(tmp_path, CONFIG + '[storage]\nverify_at_start = "0B"\n') as server:
        with server.client() as client:
            got, lost = 0, 0
            reasons: set[str] = set()
            for number in range(0, 3_300, 4):
                try:
                    record = client.get("kept", str(number))
                    assert record is not None, f"{number} is silently missing"
                    got += 1
                except DataLoss as error:
                    reasons.add(error.reason)
                    lost += 1
            assert reasons == {"DATA_DAMAGED"}
            assert got > 750
            assert 0 < lost < 75
            with pytest.raises(DataLoss) as met:
                list(client.query("kept"))
            assert met.value.reason == "DATA_DAMAGED"
            until(lambda: client.status().state == "failed", 10, "the scrub to find the damage")
            assert reason_of(lambda: client.publish("kept", {"n": 0}, key="0")) == "DATA_DAMAGED"
            until(lambda: health(server.address) == "NOT_SERVING", 5, "health to say so")
        assert server.terminate() == 0
        assert not server.faults()
