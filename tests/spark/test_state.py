"""A state of the world on Spark: real queries, with both engines (docs/scale.md)."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from sow_spark import state, state_queries
from sow_spark.errors import SowSourceError
from sow_spark.state import JAR, parse_path, state_of_the_world
from sow_spark.state_python import key_or_none
from sow_spark.state_queries import read_state, repartition_state, start_state, stop_state
from tests.support.servers.server import ROOT, ServerProcess
from tools import state_jar

SCHEMA: Final = "id LONG, name STRING, v DOUBLE, n LONG, _op STRING, _ttl STRING, _ttl_mode STRING, _only_if STRING"


@pytest.fixture(scope="module", params=["jvm", pytest.param("python", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "jvm":
        if shutil.which("javac") is None and not (ROOT / "spark_connector" / "sow_spark" / JAR).is_file():
            pytest.skip("there is no javac to compile the engine with")
        state_jar.main()
    return str(request.param)


class Input:
    """A folder of JSON files, each of which is a micro-batch, and a query on it."""

    def __init__(self, spark: SparkSession, folder: Path, engine: str) -> None:
        self.spark = spark
        self.folder = folder
        self.engine = engine
        self.checkpoint = str(folder / "checkpoint")
        self.rows: list[Row] = []
        self.query: StreamingQuery | None = None
        self._files = 0
        (folder / "in").mkdir()

    def put(self, *rows: dict[str, object]) -> None:
        """Adds a file at once."""
        made = self.folder / "made"
        made.write_text("\n".join(map(json.dumps, rows)))
        self._files += 1
        made.rename(self.folder / "in" / f"{self._files:04}.json")

    def stream(self, schema: str = SCHEMA) -> DataFrame:
        return self.spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(self.folder / "in"))

    def changes(self, **settings: Any) -> DataFrame:
        return state_of_the_world(
            self.stream(), **{"topic": "t", "key": "/id", "order": "n", "engine": self.engine, **settings}
        )

    def start(self, trigger: str = "1s", **settings: Any) -> StreamingQuery:
        def collect(batch: DataFrame, _: int) -> None:
            self.rows.extend(batch.collect())

        self.query = start_state(self.changes(**settings), collect, checkpoint=self.checkpoint, trigger=trigger)
        return self.query

    def until(self, condition: Callable[[], object]) -> None:
        """Waits for the query to bring something about."""
        began = time.monotonic()
        while not condition():
            assert self.query is not None
            assert self.query.exception() is None, self.query.exception()
            assert time.monotonic() - began < 120, self.rows
            time.sleep(0.02)

    def of(self, key: str | None) -> list[str]:
        """What has happened to a key."""
        return [row._op if row._op != "refused" else row._reason for row in self.rows if row._key == key]

    def state(self, **options: Any) -> dict[str, tuple[Any, ...]]:
        return {row._key: (row.name, row.v) for row in read_state(self.spark, self.checkpoint, **options).collect()}


@pytest.fixture
def given(spark: SparkSession, tmp_path: Path, engine: str) -> Iterator[Input]:
    made = Input(spark, tmp_path, engine)
    yield made
    if made.query is not None:
        made.query.stop()


def test_a_state_is_kept_expires_and_goes_on_after_a_stop(given: Input) -> None:
    """L7, L9, L10, L11: also what fell due while no query ran, and without new rows."""
    given.put(
        {"id": 1, "name": "a", "n": 1},
        {"id": 1, "v": 2.5, "_op": "delta", "n": 5},
        {"id": 1, "_op": "put", "name": "z", "_only_if": "absent", "n": 6},
        {"id": 2, "name": "b", "_ttl": "300ms", "n": 2},
        {"name": "without a key", "n": 3},
        {"id": 3, "_ttl": "0s", "n": 4},
    )
    query = given.start()
    given.until(lambda: "expire" in given.of("2"))
    assert given.of("1") == ["put", "put", "CONDITION_FAILED"]
    assert given.of("3") == ["put", "expire"]
    assert given.of(None) == ["KEY_FIELD_MISSING"]
    first, expired = (row for row in given.rows if row._key == "2")
    assert (first.name, expired.name, expired._version) == ("b", "b", first._version)
    assert first._expire_time - first._now == timedelta(milliseconds=300)
    assert expired._now >= expired._expire_time
    assert expired._batch > first._batch
    assert {row._topic for row in given.rows} == {"t"}
    given.put({"id": 4, "name": "d", "_ttl": "3s", "n": 7})
    given.until(lambda: given.of("4"))
    stop_state(query)
    (fourth,) = (row for row in given.rows if (row._key, row._op) == ("4", "put"))
    assert given.state(batch=fourth._batch, at=expired._now)["4"] == ("d", None)
    assert given.state(at=datetime.now(UTC) + timedelta(hours=1)) == {"1": ("a", 2.5)}
    assert given.state(batch=first._batch, at=first._now) == {"1": ("a", 2.5), "2": ("b", None)}
    query = given.start()
    given.until(lambda: given.of("4") == ["put", "expire"])
    given.put({"id": 1, "_op": "delete", "n": 1})
    given.until(lambda: given.of("1")[-1] == "delete")
    stop_state(query)
    assert given.state() == {}
    for wrong in ({"key": "/name"}, {"topic": "u"}, {"late": "drop"}):
        with pytest.raises(SowSourceError, match=f"OPTION_INVALID: option {next(iter(wrong))}: the state in"):
            given.start(**wrong)


def test_a_query_stops_whose_batches_outlast_their_trigger(given: Input) -> None:
    """It had no pause to stop in, and said NOT_STOPPED."""
    given.put({"id": 1, "name": "a", "n": 1})
    query = given.start(trigger="1ms")
    given.until(lambda: given.of("1"))
    last = stop_state(query)
    assert not query.isActive
    assert given.state(batch=last) == {"1": ("a", None)}
    given.put({"id": 1, "v": 1.0, "_op": "delta", "n": 2})
    given.start()
    given.until(lambda: given.of("1") == ["put", "put"])
    assert given.rows[1]._batch > last


def test_rows_that_come_late_are_refused_when_it_is_asked_for(given: Input) -> None:
    given.put({"id": 1, "name": "new", "n": 10})
    given.start(late="drop", tombstones="1h")
    given.until(lambda: given.of("1") == ["put"])
    given.put({"id": 1, "name": "old", "n": 9})
    given.until(lambda: given.of("1") == ["put", "STALE"])
    given.put({"id": 1, "_op": "delete", "n": 11})
    given.until(lambda: given.of("1")[2:] == ["delete"])
    given.put({"id": 1, "name": "old", "n": 10}, {"id": 1, "name": "next", "n": 12})
    given.until(lambda: given.of("1")[3:] == ["STALE", "put"])
    versions = [row._version for row in given.rows if row._op in ("put", "delete")]
    assert versions == sorted(set(versions)), "also over a removal"


@pytest.mark.parametrize("expiration", ["enabled", pytest.param("disabled", marks=pytest.mark.long)])
def test_a_topic_follows_a_state(given: Input, server: ServerProcess, expiration: str) -> None:
    """Each change takes effect once; puts with their expire time, deletes and expiries as deletes."""
    topic = f"state.{given.engine}.{expiration}"
    with server.client() as client:
        client.create_topic(topic, key=["/id"], expiration="1d")  # of which the state knows nothing
        rows: list[dict[str, object]] = [{"id": at, "n": at, "_ttl": "1h" if at % 2 else None} for at in range(20)]
        given.put(*rows)
        sink = {"server": server.address, "topic": topic}
        changes = given.changes(topic="", expiration=expiration)
        given.query = start_state(changes, sink, checkpoint=given.checkpoint, trigger="1s")
        given.until(lambda: client.count(topic) == 20)
        given.put({"id": 3, "_op": "delete", "n": 30}, {"id": 4, "v": 0.5, "_op": "delta", "n": 31})
        given.until(lambda: client.count(topic) == 19)
        stop_state(given.query)
        held = {row._key: row for row in read_state(given.spark, given.checkpoint).collect()}
        found = {record.key: record for record in client.query(topic)}
        assert found.keys() == held.keys()
        for key, row in held.items():
            assert found[key].data == {name: row[name] for name in ("id", "name", "v", "n") if row[name] is not None}
            assert (found[key].expire_time is None) == (row._expire_time is None)


def test_a_payload_stays_as_it_came(given: Input) -> None:
    """Text that is no JSON is refused, and numbers keep their digits."""
    given.put({"payload": '{"id":"x","n":1.50}', "at": 1}, {"payload": "{", "at": 2})
    stream = given.stream("payload STRING, at LONG, _key STRING")
    changes = state_of_the_world(stream, key=(), order="at", engine=given.engine)  # type: ignore[arg-type]  # a fixture's text
    given.put({"payload": '{"n":1.50}', "at": 3, "_key": "k"})
    given.query = start_state(
        changes, lambda batch, _: given.rows.extend(batch.collect()), checkpoint=given.checkpoint, trigger="1s"
    )
    given.until(lambda: len(given.rows) == 3)
    assert sorted((row._key or "", row._op, row._reason or "", row.payload) for row in given.rows) == [
        ("", "refused", "KEY_REQUIRED", '{"id":"x","n":1.50}'),
        ("", "refused", "PAYLOAD_MALFORMED", "{"),
        ("k", "put", "", '{"n":1.50}'),
    ]


def test_columns_come_out_as_they_went_in(given: Input) -> None:
    """Names of any kind, also those of columns of the state, microseconds, and times before 1970."""
    schema = "`i.d` TIMESTAMP, `a``b` STRING, `C` STRUCT<`x.y`: TIMESTAMP_NTZ>, n LONG, at TIMESTAMP"
    schema += ", plain_key STRING, `group` STRING"
    key = "1969-12-31T23:59:58.123456Z"
    row = {"i.d": key, "a`b": "ü", "C": {"x.y": "1970-01-01T00:00:00.000001"}, "n": 1 << 62, "at": key, "_op": None}
    row |= {"plain_key": "p", "group": "g"}
    given.put(row, {**row, "n": 2, "at": None}, {"_op": "touch", "_key": key, "at": "1969-12-31T23:59:58.123457Z"})
    stream = given.stream(f"{schema}, _op STRING, _key STRING")
    changes = state_of_the_world(stream, key="/i.d", order=["at", "n"], engine=given.engine)  # type: ignore[arg-type]  # as above
    given.query = start_state(
        changes, lambda batch, _: given.rows.extend(batch.collect()), checkpoint=given.checkpoint, trigger="1s"
    )
    given.until(lambda: len(given.rows) == 3)
    assert given.of(key) == ["put", "put", "put"]
    assert [row.n for row in given.rows] == [2, 1 << 62, 1 << 62], "null comes first"
    stop_state(given.query, "5m")
    (held,) = read_state(given.spark, given.checkpoint).collect()
    time = datetime(1969, 12, 31, 23, 59, 58, 123456, tzinfo=UTC)
    assert (held["i.d"].astimezone(UTC), held["a`b"], held._key) == (time, "ü", key)
    assert (held.plain_key, held.group) == ("p", "g"), "one of them is what the engine groups by"
    assert held.C["x.y"] == datetime(1970, 1, 1, microsecond=1)  # noqa: DTZ001  # a time without a zone


def test_a_checkpoint_has_settings_once_it_has_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    """A query that failed to start left its note, and no other one could be started."""
    given = Input(spark, tmp_path, "python")
    told = json.loads(given.changes(late="drop").schema["_op"].metadata["sow_state"])
    state_queries._check_note(spark, given.checkpoint, {**told, "engine": "jvm", "key": [["other"]]})
    state_queries._check_note(spark, given.checkpoint, told)
    offsets = Path(given.checkpoint) / "offsets"
    offsets.mkdir()
    (offsets / "0").touch()
    for name, other in (("order", ["id"]), ("expiration", "disabled"), ("late", "apply")):
        with pytest.raises(SowSourceError, match=f"OPTION_INVALID: option {name}: "):
            state_queries._check_note(spark, given.checkpoint, {**told, name: other})
    state_queries._check_note(spark, given.checkpoint, {**told, "expiration": "reject"})


def test_notes_of_another_release_are_told(spark: SparkSession, tmp_path: Path) -> None:
    """given the notes of a form that is not this one / when a state starts or is read there / then a sentence says so

    They were called those of another query, or ended in a KeyError."""
    told = json.loads(Input(spark, tmp_path, "python").changes().schema["_op"].metadata["sow_state"])
    for name, content, why in (
        ("sow-state.json", "{}", ""),
        ("sow-state/part-0.txt", '{"topic": "t", "number": 0}', ", which lack document, "),
        ("sow-state/part-0.txt", '{"topic": "t"}', ""),
    ):
        checkpoint = tmp_path / f"notes{len(content)}"
        (checkpoint / "offsets").mkdir(parents=True)
        (checkpoint / "offsets" / "0").touch()
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text(content + "\n")
        with pytest.raises(SowSourceError, match=f"OPTION_INVALID: option checkpoint: another release of sow .*{why}"):
            state_queries._check_note(spark, str(checkpoint), told)
        with pytest.raises(SowSourceError, match="another release of sow"):
            state_queries.read_state(spark, str(checkpoint))


def test_a_clock_before_the_last_batch_is_told(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """L15: there is no guard, but a start is the moment at which a wrong clock is seen for certain."""
    (tmp_path / "offsets").mkdir()
    for number, ahead, told in ((0, -5, False), (9, 0.5, False), (10, 3_600, True)):  # the last one counts
        moment = int((time.time() + ahead) * 1_000)
        (tmp_path / "offsets" / str(number)).write_text(f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":{moment}}}\n7')
        state_queries._check_clock(spark, str(tmp_path))
        assert (f"3600 s before the last batch of {tmp_path}" in caplog.text) is told


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key": "id"}, "key: 'id' is no path"),
        ({"key": "/a//b"}, "key: '/a//b' is no path"),
        ({"key": "/[a"}, r"key: '/\[a' is no path"),
        ({"key": "/a" * 33}, "has 33 steps, at most 32"),
        ({"key": '/a"b'}, "the name of a key field has no quotes"),
        ({"key": ["/a", "/b", "/a/c"]}, "key: /a holds, or is, another key field"),
        ({"order": "name"}, "order: name is string"),
        ({"order": "gone"}, "order: there is no column 'gone'"),
        ({"order": ()}, "order: give a column"),
        ({"key": ()}, "key: the rows have no column _key"),
        ({"expiration": "5"}, "expiration: duration '5' misses a unit"),
        ({"expiration": "reject", "max_ttl": "1h"}, "max_ttl: without effect with expiration = reject"),
        ({"min_ttl": "2h", "max_ttl": "1h"}, "min_ttl: 2h is more than max_ttl, 1h"),
        ({"max_ttl": "3654d"}, "max_ttl: 3654d is more than the longest lifetime"),
        ({"late": "drop", "tombstones": "15250000w"}, "tombstones: 15250000w is more than the longest lifetime"),
        ({"late": "never"}, "late: 'never' is neither apply nor drop"),
        ({"engine": "c"}, "engine: 'c' is neither jvm nor python"),
        ({"tombstones": "1h"}, "tombstones: without effect with late = apply"),
    ],
)
def test_a_wrong_setting_is_named(spark: SparkSession, tmp_path: Path, settings: Any, message: str) -> None:
    given = Input(spark, tmp_path, "python")
    with pytest.raises(SowSourceError, match=message):
        given.changes(**settings)


def test_keys_that_sql_makes_are_those_of_the_documents(spark: SparkSession) -> None:
    """K4, K5: where it makes none, the document is read."""
    frame = spark.createDataFrame(
        [("a|b\\", -5, True), ("", 0, False), (None, 1, True), ("x" * 1_100, 2, True), ("ü", 1 << 62, None)],
        "name STRING, id LONG, ok BOOLEAN",
    )
    for paths in ([["name"], ["id"], ["ok"]], [["name"]], [["id"]], [["ok"], ["name"]]):
        rows = state._rows(frame, frame.columns, ["id"], paths).collect()
        keys = [key_or_none(bytes(row.payload), None, paths) for row in rows]
        assert [row.plain_key or "" for row in rows] == keys
        assert any(keys)


def test_a_batch_has_no_column_that_its_program_has_dropped(spark: SparkSession) -> None:
    seen: list[list[str]] = []
    for columns in ("_op, _batch, id", "_op, id"):
        batch = spark.sql("SELECT 'put' AS _op, 7 AS _batch, 1 AS id").select(*columns.split(", "))
        state_queries._numbered(lambda frame, _: seen.append([*frame.columns, frame.collect()[0][1]]))(batch, 9)
    assert seen == [["_op", "_batch", "id", 9], ["_op", "id", 1]]


def test_a_path_has_odd_names_in_brackets() -> None:
    assert parse_path("/[odd/name]/b/[]/[x\\]]") == ["odd/name", "b", "", "x]"]


@pytest.mark.parametrize("name", ["_version", "_NOW", "_Op"])
def test_columns_of_the_result_are_none_of_a_document(spark: SparkSession, tmp_path: Path, name: str) -> None:
    stream = Input(spark, tmp_path, "python").stream(f"id LONG, {name} STRING")
    with pytest.raises(SowSourceError, match=f"OPTION_INVALID: option stream: its column {name} has"):
        state_of_the_world(stream, key="/id", order="id")


def test_a_package_without_its_jar_says_so(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "JAR", "gone.jar")
    with pytest.raises(
        SowSourceError, match=r"OPTION_INVALID: option engine: this package was built without gone\.jar"
    ):
        Input(spark, tmp_path, "jvm").changes()


@pytest.mark.long
def test_times_that_a_function_writes_to_parquet_are_microseconds(given: Input) -> None:
    """By default they were nanoseconds in 96 bits: without statistics, and those of 2300 wrapped around elsewhere."""
    given.spark.conf.unset(state_queries.PARQUET_TIMES[0])  # a test of a page may have set it
    given.put({"id": 1, "n": 1, "at": "2300-01-01T00:00:00.000001Z"})
    stream = given.stream("id LONG, n LONG, at TIMESTAMP")
    changes = state_of_the_world(stream, key="/id", order="n", engine=given.engine)  # type: ignore[arg-type]  # as above

    def write(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(f"{given.folder}/out/{number}")
        given.rows.extend(batch.collect())

    given.query = start_state(changes, write, checkpoint=given.checkpoint, trigger="1s")
    given.until(lambda: given.rows)
    assert given.spark.conf.get(state_queries.PARQUET_TIMES[0], None) is None, "the session is as before"
    file, *_ = (path for path in given.folder.rglob("out/*/*.parquet") if pq.read_metadata(path).num_rows)
    columns = pq.read_metadata(file).row_group(0)
    told = {one.path_in_schema: one for one in map(columns.column, range(columns.num_columns))}
    for name in ("at", "_publish_time", "_now"):
        assert (told[name].physical_type, told[name].statistics.has_min_max) == ("INT64", True)
    assert pq.read_table(file)["at"].to_pylist() == [datetime(2300, 1, 1, microsecond=1, tzinfo=UTC)]


def test_a_note_that_was_cut_off_leaves_the_one_before(spark: SparkSession, tmp_path: Path) -> None:
    """A note was one file, which was emptied and then written: a crash between the two lost the settings of a state."""
    given = Input(spark, tmp_path, "python")
    told = json.loads(given.changes().schema["_op"].metadata["sow_state"])
    for settings in (told, {**told, "max_ttl_micros": 5}, {**told, "max_ttl_micros": 6}):
        state_queries._check_note(spark, given.checkpoint, settings)
    notes = Path(given.checkpoint) / state_queries.NOTES
    before = {path: path.read_bytes() for path in notes.glob("part-*")}
    (notes / "_temporary").mkdir()
    (notes / "_temporary" / "part-00000").write_text('{"topic"')
    (notes / "_SUCCESS").unlink()
    assert state_queries._read_note(spark, given.checkpoint) == ({**told, "max_ttl_micros": 6}, 2)
    state_queries._check_note(spark, given.checkpoint, told)
    assert state_queries._read_note(spark, given.checkpoint) == (told, 3)
    assert {path: path.read_bytes() for path in before} == before, "a note is added, and none is touched"


@pytest.mark.parametrize("folder", ["a b", "a%20b", "a#b", "a*b", "ü{b", "a\u00a0b"])
def test_a_checkpoint_is_refused_whose_state_spark_could_not_read(spark: SparkSession, folder: str) -> None:
    """Spark's reader of states escapes its path, and then finds no batch."""
    with pytest.raises(SowSourceError, match="OPTION_INVALID: option checkpoint: "):
        state_queries._check_note(spark, f"/tmp/{folder}", {})


@pytest.mark.long
@pytest.mark.skipif(not hasattr(SparkSession, "_streamingCheckpointManager"), reason="Spark repartitions from 4.2 on")
def test_a_state_is_spread_over_other_numbers_of_partitions(given: Input) -> None:
    """2 → 4 → 2: the same records, and each of them still expires."""
    given.put(*[{"id": at, "name": f"n{at}", "n": at, **({"_ttl": "40s"} if at % 2 else {})} for at in range(40)])
    query = given.start()
    given.until(lambda: len(given.rows) == 40)
    stop_state(query)
    told = given.state(at=given.rows[0]._now)
    assert len(told) == 40
    for partitions in (4, 2):
        repartition_state(given.spark, given.checkpoint, partitions)
        assert given.state(at=given.rows[0]._now) == told
    query = given.start()
    given.until(lambda: len(given.rows) == 60)
    assert {(row._op, row.id % 2) for row in given.rows[40:]} == {("expire", 1)}
    query.stop()
    repartition_refused(given)


def repartition_refused(given: Input) -> None:
    """A checkpoint whose last batch was cut off is refused."""
    offsets = Path(given.checkpoint) / "offsets"
    last = max(int(path.name) for path in offsets.iterdir() if path.name.isdigit())
    shutil.copyfile(offsets / str(last), offsets / str(last + 1))
    with pytest.raises(SowSourceError, match=f"BATCH_OPEN: batch {last + 1} was cut off"):
        repartition_state(given.spark, given.checkpoint, 4)
