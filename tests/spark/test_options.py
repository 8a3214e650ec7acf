"""Options: their reading, and refusals."""

from __future__ import annotations

import pickle
import re
from datetime import UTC, datetime

import pytest
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from sow_spark import SowDataSource, source
from sow_spark.errors import SowSourceError
from sow_spark.options import READ_OPTIONS, WRITE_OPTIONS, Reading, parse_reading, parse_writing
from tests.support.server import ROOT


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
            "filter": "/a = 1",
            "partitions": "7",
            "inferrecords": "10",
            "columns": "id, _key",
            "jsonschema": "{}",
            "snapshot": "load",
            "metadata": "changes",
            "payload": "String",
            "mode": "dropMalformed",
            "lease": "1m",
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
    assert (reading.filter, reading.partitions, reading.infer_records) == ("/a = 1", 7, 10)
    assert (reading.columns, reading.json_schema, reading.snapshot) == (("id", "_key"), "{}", "load")
    assert (reading.metadata, reading.payload, reading.mode) == ("changes", "string", "DROPMALFORMED")
    assert (reading.lease_micros, reading.batch_size) == (60_000_000, 100)
    assert reading.starting_from == datetime(2024, 1, 5, 10, tzinfo=UTC)
    assert (reading.max_records_per_trigger, reading.max_bytes_per_trigger) == (1_000, 2**20)
    assert (reading.fail_on_data_loss, reading.pin_name, reading.pin_lease_micros) == (False, "mine", 7_200_000_000)
    assert pickle.loads(pickle.dumps(reading)) == reading


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
        ({"topic": "t", "lease": "25h"}, "option lease: '25h' is out of range"),
        ({"topic": "t", "maxbytespertrigger": "5"}, "option maxBytesPerTrigger: size"),
        ({"topic": "t", "failondataloss": "no"}, "option failOnDataLoss: 'no' is neither true nor false"),
        ({"topic": "t", "startingfrom": "2024-13-01"}, "option startingFrom: '2024-13-01' is neither earliest"),
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
