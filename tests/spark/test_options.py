"""Options: their reading, and refusals."""

from __future__ import annotations

import pickle
import re
from datetime import UTC, datetime

import pytest
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StringType, StructType

from sow_spark import SowDataSource, source
from sow_spark.errors import SowSourceError
from sow_spark.option_parsing import READ_OPTIONS, WRITE_OPTIONS, parse_reading, parse_writing
from sow_spark.options import Reading
from tests.support.servers.server import ROOT


def test_defaults() -> None:
    reading = parse_reading({"topic": "orders"})
    assert reading == Reading(reading.connecting, "orders")
    assert reading.connecting.server == "127.0.0.1:7450"
    assert reading.mode == "FAILFAST"
    assert reading.metadata == "true"


def test_every_option_of_reading_is_read_whatever_its_case() -> None:
    reading = parse_reading(
        {
            "PATH": "orders",
            "server": "host:1",
            "tlsca": "ca.pem",
            "tokenfile": "desk.token",
            "timeout": "1s",
            "connecttimeout": "2s",
            "retryfor": "0s",
            "filter": "/a = :a",
            "parameters": '{"a": "x", "b": [1, null, 18446744073709551617]}',
            "partitions": "7",
            "columns": "id, _key",
            "jsonschema": "{}",
            "metadata": "False",
            "payload": "Columns",
            "mode": "dropMalformed",
            "batchsize": "100",
            "startingfrom": "2024-01-05T10:00:00",
            "maxrecordspertrigger": "1_000",
            "maxbytespertrigger": "1MiB",
            "failondataloss": "false",
            "pinname": "mine",
            "pinlease": "2h",
        }
    )
    assert reading.topic == "orders"
    assert reading.connecting.tls
    assert reading.connecting.token_file == "desk.token"
    assert (reading.connecting.timeout_micros, reading.connecting.retry_for_micros) == (1_000_000, 0)
    assert (reading.filter, reading.partitions, reading.batch_size) == ("/a = :a", 7, 100)
    assert reading.parameters == {"a": "x", "b": [1, None, 2**64 + 1]}
    assert (reading.columns, reading.json_schema) == (("id", "_key"), "{}")
    assert (reading.metadata, reading.payload, reading.mode) == ("false", "columns", "DROPMALFORMED")
    assert reading.starting_from == datetime(2024, 1, 5, 10, tzinfo=UTC)
    assert (reading.max_records_per_trigger, reading.max_bytes_per_trigger) == (1_000, 2**20)
    assert (reading.fail_on_data_loss, reading.pin_name, reading.pin_lease_micros) == (False, "mine", 7_200_000_000)
    assert pickle.loads(pickle.dumps(reading)) == reading
    reading = parse_reading({"topic": "orders", "SNAPSHOT": "Load", "lease": "1m", "inferrecords": "10"})
    assert (reading.snapshot, reading.lease_micros, reading.infer_records) == ("load", 60_000_000, 10)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name=x", "no JSON object"),
        ("[1]", "no JSON object"),
        ('{"a": 1, "a": 2}', "a is there twice"),
        ('{"a": NaN}', "NaN is no number of JSON"),
        ('{"a": {}}', "parameters.a: a dict is no value"),
        ('{"a": [[1]]}', r"parameters.a\[0\]: is a list in a list"),
    ],
)
def test_parameters_of_a_filter_are_a_json_object(text: str, said: str) -> None:
    with pytest.raises(SowSourceError, match=f"^OPTION_INVALID: option parameters: .*{said}"):
        parse_reading({"topic": "orders", "filter": "/a = :a", "parameters": text})


# ---- the uses of each option ----

BOTH, SNAPSHOT, STREAM = {"snapshot", "stream"}, {"snapshot"}, {"stream"}
READS: dict[str, tuple[str, set[str]]] = {
    "filter": ("/a > 1", BOTH),
    "parameters": ('{"a": 1}', BOTH),
    "pushFilters": ("true", SNAPSHOT),
    "partitions": ("7", BOTH),
    "columns": ("a,b", BOTH),
    "inferRecords": ("10", BOTH),
    "jsonSchema": ("{}", BOTH),
    "newFields": ("fail", BOTH),
    "metadata": ("changes", BOTH),
    "payload": ("string", BOTH),
    "mode": ("PERMISSIVE", BOTH),
    "snapshot": ("load", SNAPSHOT),
    "lease": ("1m", SNAPSHOT),
    "batchSize": ("10", BOTH),
    "export": ("e1", SNAPSHOT),
    "topics": ("a,b", BOTH),
    "topicPattern": ("a.*", BOTH),
    "startingFrom": ("earliest", STREAM),
    "maxRecordsPerTrigger": ("10", STREAM),
    "maxBytesPerTrigger": ("1MiB", STREAM),
    "failOnDataLoss": ("false", STREAM),
    "pinName": ("mine", STREAM),
    "pinLease": ("2h", STREAM),
}
ALL, APPEND, OVERWRITE, ROWS = {"append", "overwrite", "stream"}, {"append", "stream"}, {"overwrite"}, {"stream"}
WRITES: dict[str, tuple[str, set[str]]] = {
    "topicColumn": ("a", APPEND),
    "mode": ("delta", ALL),  # an overwrite refuses this value
    "ttl": ("1h", ALL),
    "ttlColumn": ("a", ALL),
    "expireTimeColumn": ("a", ALL),
    "keyColumn": ("a", ALL),
    "payload": ("string", ALL),
    "nulls": ("write", ALL),
    "onBadRow": ("drop", ALL),
    "onDelete": ("ignore", APPEND),
    "durability": ("fsync", APPEND),
    "batchSize": ("10", APPEND),
    "lease": ("1m", OVERWRITE),
    "writerId": ("w", ROWS),
    "queryName": ("q", ROWS),
    "checkpointLocation": ("/c", ROWS),
}
EVERYWHERE = {
    "server": "h:1",
    "topic": "t",
    "path": "t",
    "tlsCa": "ca.pem",
    "tlsCertificate": "c.pem",
    "tlsKey": "k.pem",
    "tlsServerName": "h",
    "tokenFile": "t.token",
    "timeout": "1s",
    "connectTimeout": "1s",
    "retryFor": "1s",
}
SPARKS_OWN = {"queryName", "checkpointLocation"}
"""Spark heeds these itself."""


def asked(use: str, direction: str, options: dict[str, str]) -> object:
    """The data source, asked as Spark asks it, up to the point at which the server would be called."""
    source = SowDataSource(options | {"server": "127.0.0.1:1", "retryFor": "0s", "connectTimeout": "100ms"})
    schema = StructType().add("a", StringType())
    if direction == "read":
        return source.reader(schema) if use == "snapshot" else source.streamReader(schema)
    if use == "stream":
        return source.streamWriter(schema, overwrite=False)
    return source.writer(schema, overwrite=use == "overwrite")


def test_the_tables_have_every_option() -> None:
    assert {*READS, *EVERYWHERE} == set(READ_OPTIONS)
    assert {*WRITES, *EVERYWHERE} == set(WRITE_OPTIONS)


@pytest.mark.parametrize("use", ["snapshot", "stream"])
@pytest.mark.parametrize("name", [*READS, *EVERYWHERE])
def test_an_option_of_reading_counts_or_is_refused(name: str, use: str) -> None:
    """given each option and each use of reading / then the option makes a difference, or is refused by its name

    A snapshot took `startingFrom`, and a stream `lease`, and did as if they were not there.
    """
    value, uses = READS.get(name, (EVERYWHERE.get(name, ""), BOTH))
    topic = {} if name in ("topics", "topicPattern", "path") else {"topic": "orders"}
    if use in uses:
        bare = parse_reading({"topic": "orders"}, use)  # type: ignore[arg-type]  # one of its words
        assert parse_reading({**topic, name: value}, use) != bare  # type: ignore[arg-type]  # one of its words
        return
    place = "a snapshot (read)" if use == "stream" else "a stream (readStream)"
    for prefix in ("", "read."):
        with pytest.raises(SowSourceError, match=rf"^OPTION_INVALID: option {name}: counts only in") as refused:
            asked(use, "read", {**topic, prefix + name: value})
        assert place in refused.value.message


@pytest.mark.parametrize("use", ["append", "overwrite", "stream"])
@pytest.mark.parametrize("name", [*WRITES, *EVERYWHERE])
def test_an_option_of_writing_counts_or_is_refused(name: str, use: str) -> None:
    """given each option and each use of writing / then the option makes a difference, or is refused by its name"""
    value, uses = WRITES.get(name, (EVERYWHERE.get(name, ""), ALL))
    topic = {} if name in ("topicColumn", "path") else {"topic": "orders"}
    if use not in uses:
        with pytest.raises(SowSourceError, match=rf"^OPTION_INVALID: option {name}: counts only in"):
            asked(use, "write", {**topic, name: value})
    elif name not in SPARKS_OWN:
        bare = parse_writing({"topic": "orders"}, use)  # type: ignore[arg-type]  # one of its words
        assert parse_writing({**topic, name: value}, use) != bare  # type: ignore[arg-type]  # one of its words


def test_a_view_may_have_options_of_appends_and_of_overwrites() -> None:
    """INSERT INTO and INSERT OVERWRITE have the options of one view: with `write.` in front, those of the other one
    are left out. A view is never written by a stream."""
    view = {"topic": "t", "write.lease": "1h", "write.batchSize": "10", "write.durability": "fsync"}
    appending, replacing = parse_writing(view, "append"), parse_writing(view, "overwrite")
    assert (appending.lease_micros, appending.batch_size, appending.durability) == (0, 10, "fsync")
    assert (replacing.lease_micros, replacing.batch_size, replacing.durability) == (3_600_000_000, 0, None)
    for use in ("append", "overwrite"):
        with pytest.raises(SowSourceError, match="option writerId: counts only in a stream"):
            parse_writing({"topic": "t", "write.writerId": "w"}, use)
    with pytest.raises(SowSourceError, match="option lease: counts only in an overwrite, and this is a stream"):
        parse_writing(view, "stream")


def test_options_that_have_no_use_together_are_refused_where_the_use_is_not_known() -> None:
    """given `load()` without a schema, where Spark does not tell whether a snapshot or a stream follows"""
    with pytest.raises(SowSourceError, match=r"pinName: counts only in a stream .*, and snapshot only in a snap"):
        SowDataSource({"topic": "t", "snapshot": "load", "pinName": "p"}).schema()


@pytest.mark.parametrize("use", ["read", "readStream"])
@pytest.mark.parametrize(
    ("name", "value"), [("columns", "a"), ("jsonSchema", "{}"), ("inferRecords", "5"), ("metadata", "changes")]
)
def test_options_about_an_inferred_schema_are_refused_beside_a_given_one(use: str, name: str, value: str) -> None:
    """Only the given schema counted, and nobody was told."""
    with pytest.raises(SowSourceError, match=rf"option {name}: (changes )?and a given schema exclude each other"):
        asked("snapshot" if use == "read" else "stream", "read", {"topic": "t", name: value})


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"payload": "string", "jsonSchema": "{}"}, "jsonSchema"),
        ({"payload": "string", "newFields": "fail"}, "newFields"),
        ({"payload": "binary", "newFields": "rescue"}, "newFields"),
        ({"payload": "binary", "inferRecords": "5"}, "inferRecords"),
        ({"payload": "binary", "mode": "PERMISSIVE"}, "mode"),
        ({"jsonSchema": "{}", "inferRecords": "5"}, "inferRecords"),
        ({"columns": "a", "metadata": "changes"}, "metadata"),
        ({"export": "e", "pushFilters": "true"}, "pushFilters"),
    ],
    ids=str,
)
def test_an_option_that_another_one_makes_void_is_refused(options: dict[str, str], name: str) -> None:
    with pytest.raises(SowSourceError, match=f"^OPTION_INVALID: option {name}: "):
        parse_reading({"topic": "t", **options})


def test_nulls_have_no_place_in_a_payload_that_is_written_unchanged() -> None:
    with pytest.raises(SowSourceError, match="option nulls: has no effect with payload=binary"):
        parse_writing({"topic": "t", "payload": "binary", "nulls": "write"})
    assert parse_reading({"topic": "t", "payload": "string", "mode": "PERMISSIVE"}).mode == "PERMISSIVE"


@pytest.mark.parametrize("start", ["earliest", "latest", "0af3.17"])
def test_a_start_that_is_no_time_is_a_word_or_a_bookmark(start: str) -> None:
    assert parse_reading({"topic": "t", "startingFrom": start}).starting_from == start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "option topic: is missing"),
        ({"topic": "a", "path": "b"}, "option topic: is 'a', and the path is 'b'"),
        ({"topic": " "}, "option topic: is empty"),
        ({"topics": "a,b", "path": "c"}, "option topics: and path exclude each other"),
        ({"topics": "a", "topicPattern": "c"}, "option topics: and topicPattern exclude each other"),
        ({"topics": ","}, "option topics: names no topic"),
        (
            {"topicPattern": "a", "export": "e1"},
            "option topicPattern: and export exclude each other: its topics were named",
        ),
        ({"topicPattern": "("}, "option topicPattern: '(' is no regular expression"),
        ({"topic": "t", "partitoins": "3"}, "option partitoins: is unknown; did you mean partitions?"),
        ({"topic": "t", "ttlcolumn": "x"}, "option ttlColumn: is one of writing, not of reading"),
        ({"topic": "t", "partitions": "0"}, "option partitions: '0' is not a whole number from 1 to 10,000"),
        ({"topic": "t", "export": "e", "filter": "/a > 1"}, "option filter: and export exclude each other"),
        ({"topic": "t", "metadata": "maybe"}, "option metadata: 'maybe' is none of true, false, changes"),
        (
            {"topic": "t", "mode": "delta"},
            "option mode: 'delta' is none of FAILFAST, PERMISSIVE, DROPMALFORMED; p",
        ),
        ({"topic": "t", "lease": "10"}, "option lease: duration '10' misses a unit"),
        ({"topic": "t", "lease": "25h"}, "option lease: '25h' is out of range: at most 1d"),
        ({"topic": "t", "lease": "1ms"}, "option lease: '1ms' is out of range: at least 1s"),
        ({"topic": "t", "pinlease": "1ms"}, "option pinLease: '1ms' is out of range: at least 1s"),
        ({"topic": "t", "pinname": "a b"}, "option pinName: 'a b' is not 1 to 190 characters of"),
        ({"topic": "t", "pinname": "a" * 191}, "option pinName: 'aaa"),
        ({"topic": "t", "maxbytespertrigger": "5"}, "option maxBytesPerTrigger: size"),
        ({"topic": "t", "failondataloss": "no"}, "option failOnDataLoss: 'no' is neither true nor false"),
        ({"topic": "t", "startingfrom": "2024-13-01"}, "option startingFrom: '2024-13-01' is neither earliest"),
        ({"topics": "t", "startingFrom": '{"a"'}, "option startingFrom: '{\"a\"' is no JSON"),
        (
            {"topics": "t", "startingFrom": '{"a": 1}'},
            "option startingFrom: '{\"a\": 1}' is not the bookmark of each cell",
        ),
        ({"topic": "t", "startingFrom": '{"a": "e.1"}'}, "option startingFrom: one topic has one bookmark"),
    ],
    ids=str,
)
def test_the_message_names_the_fault(options: dict[str, str], message: str) -> None:
    with pytest.raises(SowSourceError) as refused:
        parse_reading(options)
    assert refused.value.reason == "OPTION_INVALID"
    assert str(refused.value).startswith(f"OPTION_INVALID: {message}")


def test_an_option_of_reading_is_refused_in_writing() -> None:
    with pytest.raises(SowSourceError, match="option startingFrom: is one of reading, not of writing"):
        parse_writing({"topic": "t", "startingFrom": "earliest"})


def test_errors_survive_pickling() -> None:
    error = SowSourceError("REASON", "what", "hint")
    assert str(pickle.loads(pickle.dumps(error))) == "REASON: what; hint"


@pytest.mark.parametrize("option", READ_OPTIONS)
def test_every_option_of_reading_is_documented(option: str) -> None:
    text = (ROOT / "docs" / "spark.md").read_text()
    assert f"`{option}`" in text


def test_columns_are_a_list_of_different_names_and_leave_no_new_fields() -> None:
    for names in ("a,,b", ",", "a,b,a"):
        with pytest.raises(SowSourceError, match=r"option columns: .* list of different names"):
            parse_reading({"topic": "orders", "columns": names})
    with pytest.raises(SowSourceError, match="option newFields: and columns exclude each other"):
        parse_reading({"topic": "orders", "columns": "a", "newFields": "rescue"})
    assert parse_reading({"topic": "orders", "columns": "a", "newFields": "ignore"}).columns == ("a",)


def test_an_option_with_its_direction_in_front_is_left_out_in_the_other_one() -> None:
    """A view of SQL has the options of both."""
    both = {"topic": "t", "READ.filter": "/a > 1", "write.TTL": "1h", "read.mode": "permissive", "write.mode": "delta"}
    reading, writing = parse_reading(both), parse_writing(both)
    assert (reading.filter, reading.mode) == ("/a > 1", "PERMISSIVE")
    assert (writing.ttl, writing.mode) == ("1h", "delta")
    for options, problem in (
        ({"read.ttl": "1h"}, "option read.ttl: is no option of reading"),
        ({"write.filter": "/a"}, "option write.filter: is no option of writing"),
        ({"read.lease": "1m", "lease": "2m"}, "option read.lease: is there without read, too"),
    ):
        for parse in (parse_reading, parse_writing):
            if parse is parse_writing and "lease" in options:
                continue  # only the lease of reading is given twice
            with pytest.raises(SowSourceError, match=problem):
                parse({"topic": "t", **options})


def test_help_has_every_option() -> None:
    """`help(SowDataSource)` in a notebook."""
    text = SowDataSource.__doc__ or ""
    words = set(re.findall(r"[A-Za-z]+", text))
    assert set(READ_OPTIONS) | set(WRITE_OPTIONS) <= words
    told = re.findall(r"^ {8}([a-z]\w*)(?: =|,|  |$)", text, re.MULTILINE)
    assert len(told) > 30
    assert set(told) <= set(READ_OPTIONS) | set(WRITE_OPTIONS) | {"spark", "rows"}
    defaults = dict(re.findall(r"^ {8}(\w+) = (\S+)", text, re.MULTILINE))
    page = (ROOT / "docs" / "spark.md").read_text()
    for name, default in defaults.items():
        assert re.search(rf"^\| `{name}` \| `{re.escape(default)}`", page, re.MULTILINE), name


def test_filters_are_pushed_by_default_where_each_use_has_its_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """given a Spark that pushes filters / then `auto` heeds whether it plans each use of a DataFrame by itself"""
    monkeypatch.setattr(source, "_filters_are_pushed", lambda: True)

    def pushes(**options: str) -> bool:
        reader = SowDataSource({"topic": "t", **options}).reader(StructType())
        return type(reader).__name__ == "FilteringReader"

    assert not hasattr(DataSourceReader, "pushLimit"), "look at this Spark: does it plan each use by itself?"
    assert [pushes(), pushes(pushFilters="auto"), pushes(pushFilters="true")] == [False, False, True]
    monkeypatch.setattr(DataSourceReader, "pushLimit", lambda self, limit: False, raising=False)
    assert [pushes(), pushes(pushFilters="true"), pushes(pushFilters="FALSE")] == [True, True, False]
    monkeypatch.setattr(source, "_filters_are_pushed", lambda: False)
    assert [pushes(), pushes(pushFilters="true")] == [False, True], "Spark refuses it by its setting's name"
