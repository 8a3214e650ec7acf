"""Clusters of processes: killed executors and drivers, tasks that fail, dawdle and die, a server that restarts.

Slow tasks run twice at a time (speculation). Each test runs on Spark's `local-cluster` and on a standalone cluster: a
master and two workers, each a process. A JVM with one core takes ten seconds to start.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql.datasource import DataSourceStreamReader

from sow_client import Client
from tests.spark import cluster_jobs
from tests.support.servers.server import ROOT, ServerProcess, until
from tests.support.servers.spark_cluster import Job, SparkCluster

pytestmark = pytest.mark.long

PROGRAM = Path(cluster_jobs.__file__)
RECORDS = 40_000
MINUTE = 60.0
CONFIG = """
[limits]
exports_max = 2000  # one job reads a thousand topics
[topics.orders]
key = ["/id"]
expiration = "enabled"
retain_time = "1d"  # what the tables are compared with
"""


@pytest.fixture(scope="module", params=["standalone", "local"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("spark"), local=request.param == "local") as made:
        yield made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "server", CONFIG) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def marks(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "marks"
    folder.mkdir()
    yield folder
    (folder / "over").touch()  # nothing waits for ever
    (folder / "go").touch()


def text(at: int) -> str:
    return f"text {at}"


def go(cluster: SparkCluster, marks: Path) -> None:
    """Lets the first task go on. The dawdling one waits for Spark to run another attempt, if Spark does."""
    (marks / "go").touch()
    if not cluster.speculates:
        (marks / "over").touch()


def befallen(marks: Path) -> set[str]:
    """The partitions that came to grief."""
    return {mark.name for mark in marks.iterdir()} - {"go", "over"}


def test_a_read_is_whole_though_tasks_and_an_executor_die(
    cluster: SparkCluster, server: ServerProcess, client: Client, marks: Path, tmp_path: Path
) -> None:
    """given a snapshot whose tasks fail, end, dawdle and lose their executor in the middle / when others publish, too /
    then its count and its sums are those of its instant (Q6)"""
    client.publish_many("orders", [{"id": at, "text": text(at)} for at in range(RECORDS)])
    job = cluster.submit(PROGRAM, "read", str(tmp_path / "answer"), server.address, "orders", str(marks))
    until(lambda: (marks / "0").exists() or not job.runs, 5 * MINUTE, "the first rows")
    client.publish_many("orders", [{"id": at, "text": "later"} for at in range(0, 2 * RECORDS, 2)])
    client.sow_delete("orders", keys=["1", "3"])
    go(cluster, marks)
    job.ends_well()
    assert befallen(marks) >= {"0", "1", "2", "3", "4"}
    sums = sum(zlib.crc32(text(at).encode()) for at in range(RECORDS))
    assert json.loads((tmp_path / "answer").read_text()) == [RECORDS, sum(range(RECORDS)), sums]


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_a_write_is_whole_though_tasks_an_executor_and_the_server_die(
    cluster: SparkCluster, server: ServerProcess, client: Client, marks: Path, tmp_path: Path, mode: str
) -> None:
    """given a write whose tasks fail, end, dawdle and lose their executor in the middle / when the server is killed and
    comes back / then every row is there, and an overwrite has no other (P6, P9)"""
    client.publish("orders", {"id": RECORDS, "text": "before"})
    arguments = (server.address, "orders", str(marks), str(RECORDS), mode)
    job = cluster.submit(PROGRAM, "write", str(tmp_path / "answer"), *arguments)
    until(lambda: (marks / "0").exists() or not job.runs, 5 * MINUTE, "the first rows")
    server.kill9()
    server.start()
    go(cluster, marks)
    job.ends_well()
    assert befallen(marks) >= {"0", "1", "2", "3", "4"}
    found = {record.key: record.data for record in client.query("orders")}
    expected: dict[str, object] = {str(at): {"id": at, "text": text(at)} for at in range(RECORDS)}
    if mode == "append":
        expected[str(RECORDS)] = {"id": RECORDS, "text": "before"}
    assert found == expected


@pytest.mark.skipif(
    not hasattr(DataSourceStreamReader, "getDefaultReadLimit"), reason="with PySpark 4.1 a run takes one micro-batch"
)
@pytest.mark.parametrize("pipeline", ["captured", "versions"])
def test_a_capture_is_exactly_once_through_kills_of_driver_executors_and_server(
    cluster: SparkCluster, server: ServerProcess, client: Client, tmp_path: Path, pipeline: str, seed: int
) -> None:
    """given a topic that changes all the time / when drivers, executors and the server are killed at the worst moments:
    behind a commit, before one, in the middle of reading / then the table has each change of the journal once"""
    draw = random.Random(seed)
    folder, answer = tmp_path / "table", str(tmp_path / "answer")
    client.publish_many("orders", [{"id": at, "text": text(at)} for at in range(1_000)], ttl="1h")
    over = threading.Event()
    publisher = threading.Thread(target=publish, args=(server, over, draw.random()))

    def run() -> Job:
        return cluster.submit(PROGRAM, pipeline, answer, server.address, "orders", str(folder))

    def commits() -> int:
        return len(list(folder.glob("_delta_log/*.json")))

    def files() -> int:
        return len(list(folder.rglob("*.parquet")))

    run().ends_well()  # the snapshot; versions that ended before it would be in the journal alone
    publisher.start()
    try:
        for moment, victim in (
            (commits, "driver"),
            (files, "driver"),
            (commits, "executors"),
            (files, "server"),
            (commits, "driver"),
        ):
            job, before, least = run(), moment(), draw.randrange(1, 3)
            until(lambda: moment() >= before + least or not job.runs, 5 * MINUTE, "a batch")  # noqa: B023 - called now
            if victim == "driver":
                job.kill9()
            elif victim == "executors":
                for pid in cluster.executors():
                    os.kill(pid, signal.SIGKILL)
            else:
                server.kill9()
                server.start()
            if victim != "driver":
                job.ends_well()
    finally:
        over.set()
        publisher.join()
    run().ends_well()

    expected = journal(client)
    bookmarks = [entry["bookmark"] for entry in DeltaTable(folder).history() if "bookmark" in entry]
    sequences = [int(one.rpartition(".")[2]) for one in reversed(bookmarks)]
    assert sequences == sorted(set(sequences)), "each commit goes on where the one before ended"
    assert len(sequences) > 5
    if pipeline == "captured":
        rows = DeltaTable(folder).to_pyarrow_table(columns=["_key", "text", "_version"]).to_pylist()
        served = [(one.key, one.data["text"], one.version) for one in client.query("orders")]
        assert Counter((row["_key"], row["text"], row["_version"]) for row in rows) == Counter(served)
    else:
        rows = DeltaTable(folder).to_pyarrow_table(columns=["_key", "valid_from", "text"]).to_pylist()
        assert Counter((row["_key"], row["valid_from"], row["text"]) for row in rows) == expected


def write_rows(folder: Path, draw: random.Random) -> dict[str, tuple[str | None, int]]:
    """Files of puts, deletes and rows that expire at once; returns the state that they make."""
    (folder / "in").mkdir(parents=True)
    state: dict[str, tuple[str | None, int]] = {}
    for file in range(8):
        rows = []
        for at in range(300):
            row: dict[str, object] = {"id": draw.randrange(100), "text": str(draw.random()), "n": file * 300 + at}
            match draw.randrange(6):
                case 0:
                    row["_op"] = "delete"
                case 1:
                    row["_ttl"] = "0s"
                case 2:
                    row["_ttl"] = "1h"
            if "_op" in row or row.get("_ttl") == "0s":
                state.pop(str(row["id"]), None)
            else:
                state[str(row["id"])] = (str(row["text"]), file * 300 + at)
            rows.append(row)
        draw.shuffle(rows)
        if file == 7:
            rows.append({"id": -1, "n": 9_999})
            state["-1"] = (None, 9_999)
        (folder / "in" / f"{file}.json").write_text("\n".join(map(json.dumps, rows)))
    return state


@pytest.mark.parametrize("seed", [1])
def test_a_state_is_exact_through_kills_of_driver_executors_and_server(
    cluster: SparkCluster, server: ServerProcess, client: Client, tmp_path: Path, seed: int
) -> None:
    """given rows in eight batches / when drivers, executors and the server are killed / then the topic has the state,
    and each change of the state once"""
    draw = random.Random(seed)
    folder, answer = tmp_path / "state", tmp_path / "answer"
    expected = write_rows(folder, draw)

    def run() -> Job:
        return cluster.submit(PROGRAM, "state", str(answer), server.address, "orders", str(folder))

    def batches() -> int:
        return len(list((folder / "checkpoint" / "commits").glob("[0-9]*")))

    def offsets() -> int:
        return len(list((folder / "checkpoint" / "offsets").glob("[0-9]*")))

    for moment, victim in ((offsets, "driver"), (batches, "executors"), (offsets, "server"), (batches, "driver")):
        job, before = run(), moment()
        until(lambda: moment() > before or not job.runs, 5 * MINUTE, "a batch")  # noqa: B023 - called now
        if victim == "executors":
            for pid in cluster.executors():
                os.kill(pid, signal.SIGKILL)
        elif victim == "server":
            server.kill9()
            server.start()
        if victim != "driver":  # it goes on by itself
            before = batches()
            until(lambda: batches() > before or not job.runs, 5 * MINUTE, "a batch")  # noqa: B023 - called now
            assert batches() > before, job.log[-5_000:]
        job.kill9()
    run().ends_well()
    told = {key: (text, n) for key, text, n in json.loads(answer.read_text())}
    assert told == expected
    served = {one.key: (one.data.get("text"), one.data["n"]) for one in client.query("orders")}
    assert served == expected
    puts = [json.loads(payload)["n"] for payload in journaled(client)]
    assert len(puts) == len(set(puts)), "a change took effect twice"


def journaled(client: Client) -> list[bytes]:
    """The documents of the puts in the journal."""
    plan = client.plan_changes("orders", start="earliest")
    found = []
    for packed in client.read_changes("orders", plan.start, plan.end, columns=("payload", "op")):
        texts = memoryview(packed.payload_offsets).cast("i")
        found += [packed.payloads[texts[row] : texts[row + 1]] for row in range(packed.count) if packed.ops[row] == 1]
    return found


def test_a_batch_of_a_state_that_is_repeated_is_the_same(cluster: SparkCluster, tmp_path: Path) -> None:
    """given drivers that die after a batch was written, and before it is committed / when it runs again / then its rows
    have the same versions and stamps"""
    folder, answer = tmp_path / "state", tmp_path / "answer"
    expected = write_rows(folder, random.Random(2))
    for number in (1, 3):
        (folder / f"kill-{number}").touch()
        assert not cluster.submit(PROGRAM, "state", str(answer), "", "noted", str(folder)).succeeds()
    cluster.submit(PROGRAM, "state", str(answer), "", "noted", str(folder)).ends_well()
    assert {key: (text, n) for key, text, n in json.loads(answer.read_text())} == expected
    noted: dict[str, set[str]] = {}
    for file in (folder / "noted").iterdir():
        noted.setdefault(file.name.partition("-")[0], set()).add(file.read_text())
    assert len(list((folder / "noted").glob("1-*"))) == len(list((folder / "noted").glob("3-*"))) == 2
    assert {len(texts) for texts in noted.values()} == {1}


def publish(server: ServerProcess, over: threading.Event, seed: float) -> None:
    """Puts, deletes and lets expire, through restarts of the server, until it is over."""
    draw = random.Random(seed)
    with server.client() as client:
        while not over.is_set():
            documents = [{"id": draw.randrange(3_000), "text": str(draw.random())} for _ in range(draw.randrange(20))]
            for call in (
                lambda: client.publish_many("orders", documents, ttl="1h"),  # noqa: B023 - called at once
                lambda: client.publish("orders", {"id": draw.randrange(3_000), "text": "soon"}, ttl="1us"),
                lambda: client.sow_delete("orders", keys=[str(draw.randrange(3_000))]),
            ):
                insisting(call)
            over.wait(0.2)  # a batch takes a second or two: not more than the jobs can take


def insisting(call: Callable[[], object]) -> None:
    """Calls until the server answers: it may be gone for a moment."""
    from sow_client import SowError

    while True:
        try:
            call()
            return
        except SowError:
            continue


def journal(client: Client) -> Counter[tuple[str, int, str]]:
    """Key, sequence and text of each put in the journal."""
    plan = client.plan_changes("orders", start="earliest")
    found: Counter[tuple[str, int, str]] = Counter()
    for packed in client.read_changes("orders", plan.start, plan.end, columns=("key", "sequence", "payload", "op")):
        keys, texts = memoryview(packed.key_offsets).cast("i"), memoryview(packed.payload_offsets).cast("i")
        sequences = memoryview(packed.sequences).cast("q")
        for row in range(packed.count):
            if packed.ops[row] == 1:
                key = packed.keys[keys[row] : keys[row + 1]].decode()
                found[key, sequences[row], json.loads(packed.payloads[texts[row] : texts[row + 1]])["text"]] += 1
    return found


def test_one_job_reads_a_thousand_topics(
    cluster: SparkCluster, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given 1,000 tiny topics, some of them empty / when one job counts them / then each count is right"""
    for number in range(1_000):
        client.create_topic(f"small.{number}", key=["/id"])
        if number % 10:
            client.publish_many(f"small.{number}", [{"id": at} for at in range(number % 10)])
    cluster.submit(PROGRAM, "many", str(tmp_path / "answer"), server.address, "small[.].+").ends_well()
    found = json.loads((tmp_path / "answer").read_text())
    assert found == {f"small.{number}": number % 10 for number in range(1_000) if number % 10}


def test_the_repository_is_left_as_it_was(cluster: SparkCluster) -> None:
    """A standalone worker has its folder where it is told, and not in the home of Spark or the checkout."""
    assert not (ROOT / "work").exists()
