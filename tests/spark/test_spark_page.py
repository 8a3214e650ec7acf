"""docs/spark.md names everything that the connector knows, and its programs run, one after the other.

docs/migrate/spark.md compares the connector with others, and tests show each of its points.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from sow_client import Client
from sow_spark.errors import HINTS
from sow_spark.option_parsing import READ_OPTIONS, WRITE_OPTIONS
from sow_spark.schemas import METADATA_COLUMNS
from tests.support.servers.server import ROOT, ServerProcess

PAGE = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
COMPARED = (ROOT / "docs" / "migrate" / "spark.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
CONFIG = """
# As without a configuration, after `sow topic create orders --key /id`.
[server]
dynamic_topics = true
[topics.orders]
key = ["/id"]
expiration = "enabled"
"""

SHOWN_BY = {
    # Each point of the comparison with other connectors, and the tests that show the cell of sow, without `test_`.
    "Installing and connecting": {
        "installation": "spark_page.the_programs_of_the_page_run",
        "languages": "sql.a_view_is_read_by_sql_and_by_table",
        "versions of Spark": "stream_reading.pyspark_4_1_has_limits_too",
        "TLS, credentials": "access.a_client_certificate_is_an_identity access.a_job_without_access_says_what_to_mend",
        "several addresses": "reading.the_tasks_of_a_job_use_the_instance_of_the_driver",
        "lost server": "reading.a_server_that_is_not_there_is_waited_for stream_moving.a_running_query_moves_by_itself",
    },
    "Batch reads": {
        "rows": "reading.every_record_comes_once_from_any_number_of_partitions",
        "several in one DataFrame": "partitions.many_small_topics_share_a_partition_and_a_large_one_has_several "
        "reading.all_topics_of_a_frame_are_of_one_instant",
        "one instant for all partitions": "reading.no_record_twice_or_missing_while_publishing_goes_on",
        "one instant for several actions": "reading.several_actions_see_one_cut_by_an_export_of_the_programs_own "
        "reading.a_frame_of_one_instant_never_shows_another_one "
        "reading.a_frame_whose_snapshot_has_ended_takes_a_new_one_with_its_next_action",
        "an earlier instant": "pipelines.snapshot_and_changes_are_the_table_at_any_later_bookmark",
        "columns that the query needs": "schemas.only_the_chosen_columns_are_read "
        "reading.fields_of_large_documents_that_the_schema_leaves_out_are_not_sent",
        "`count()`": "reading.a_count_by_metadata_or_without_columns_reads_no_document",
        "filters": "reading.a_frame_that_is_used_with_several_filters_has_all_rows_of_each "
        "filters.records_that_spark_keeps_match_the_pushed_filter",
        "limits, aggregates": "reading.a_snapshot_of_which_spark_has_read_a_part_ends_soon",
        "schema from": "reading.a_schema_is_inferred_and_has_the_metadata schemas.a_schema_is_made_of_a_json_schema",
        "fields that come later": "schemas.fields_that_come_later_follow_the_policy",
        "documents that do not fit": "reading.modes_of_misfits",
        "nested types": "schemas.nested_values_of_all_kinds_are_written_and_read_back",
        "metadata of a row": "decoding.metadata_columns_are_filled_in_any_order",
        "partitions": "partitions.partitions_are_even_where_keys_are_not "
        "partitions.a_topic_of_more_than_100_000_records_has_several_partitions",
    },
    "SQL statements": {
        "`CREATE TEMPORARY VIEW … USING`": "sql.a_view_is_read_by_sql_and_by_table",
        "`INSERT INTO`, `INSERT OVERWRITE`": "sql.rows_are_inserted_into_a_view_with_options_for_both_directions",
        "catalog, DDL": "sql.views_of_all_topics_stand_in_for_a_catalog "
        "sql.a_table_of_the_catalog_gets_its_options_from_each_query",
        "`DELETE`, `UPDATE`, `MERGE`": "sql.rows_are_updated_and_deleted_by_inserts",
    },
    "Batch writes": {
        "a row whose key is there": "writing.rows_are_published_with_their_lifetimes writing.deltas_are_merged",
        "lifetime of a row": "writing.rows_are_published_with_their_lifetimes writing.a_row_keeps_its_own_expire_time",
        "overwrite": "writing.overwrite_replaces_the_content "
        "writing.an_overwrite_that_fails_leaves_the_topic_as_it_was",
        "append": "writing.bad_rows_fail_the_job_and_are_shown",
        "a task that runs twice": "writing.a_newer_attempt_fences_the_older_one",
        "rows that cannot be written": "writing.bad_rows_fail_the_job_and_are_shown writing.bad_rows_can_be_dropped",
        "durability": "writing.a_task_that_fails_half_way_is_retried_whole",
        "target": "writing.invalid_writes_are_refused_before_a_task_runs",
    },
    "Stream reads": {
        "rows": "stream_reading.puts_and_deletes_come_in_order_from_where_the_query_begins "
        "lake.partitions_by_day_are_the_table_for_every_reader",
        "a removed record": "stream_reading.puts_and_deletes_come_in_order_from_where_the_query_begins",
        "start": "stream_reading.puts_and_deletes_come_in_order_from_where_the_query_begins "
        "stream_reading.a_query_starts_at_a_time",
        "a snapshot, then its changes": "pipelines.snapshot_and_changes_are_the_table_at_any_later_bookmark",
        "changes as a batch": "stream_reading.available_now_ends_at_the_head_of_its_beginning",
        "filter": "stream_reading.a_filter_leaves_out_changes_that_match_neither_before_nor_after",
        "limits of a micro-batch": "stream_reading.limits_are_kept_and_the_whole_is_the_same "
        "stream_reading.a_limit_in_bytes_ends_a_micro_batch",
        "`availableNow`": "stream_queries.a_query_goes_on_where_it_stopped",
        "several sources": "stream_reading.a_stream_reads_several_topics_within_one_limit "
        "stream_reading.a_pattern_takes_in_topics_that_come_later",
        "order": "stream_reading.the_changes_of_a_key_are_in_one_partition_in_order",
        "changes that are gone": "stream_reading.lost_changes_fail_the_query_or_are_passed_over_with_a_warning",
        "log kept for a query": "stream_reading.the_pin_follows_the_committed_offset_which_has_its_name",
        "lag": "stream_reading.it_tells_how_far_it_is_behind",
        "latency": "stream_reading.limits_are_kept_and_the_whole_is_the_same",
    },
    "Stream writes": {
        "each micro-batch": "stream_writing.a_failed_batch_publishes_only_its_unfinished_partitions_again "
        "stream_writing.a_batch_that_was_published_but_not_recorded_by_spark_is_not_published_again",
        "output modes": "stream_writing.invalid_options_of_a_stream_are_refused "
        "spark_page.the_programs_of_the_page_run",
    },
}


def table(heading: str) -> set[str]:
    """The names in the first columns of the tables below a heading, up to the next one."""
    below = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return {name for cell in re.findall(r"^\| (.+?) \|", below, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}


def test_every_option_of_reading_has_its_line() -> None:
    there = table("Options for every use") | table("Reading a snapshot") | table("Following the changes")
    assert set(READ_OPTIONS) - {"path"} <= there
    assert "`path`" in PAGE


def test_every_option_of_writing_has_its_line() -> None:
    spark_s_own = {"path", "queryName", "checkpointLocation"}
    assert set(WRITE_OPTIONS) - spark_s_own <= table("Options for every use") | table("Writing")
    for name in spark_s_own:
        assert f"`{name}`" in PAGE


def test_there_is_no_line_for_an_option_that_is_none() -> None:
    listed = table("Options for every use") | table("Writing") | table("Following the changes")
    assert listed <= {*READ_OPTIONS, *WRITE_OPTIONS}


def test_every_metadata_column_has_its_line() -> None:
    assert set(METADATA_COLUMNS) <= table("Reading a snapshot")


def reasons() -> Iterator[str]:
    """The first argument of each exception that the connector raises."""
    for path in (ROOT / "spark_connector" / "sow_spark").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "SowSourceError" and node.args:
                reason = node.args[0]
                if isinstance(reason, ast.Constant):
                    yield str(reason.value)


def test_every_reason_of_the_connector_has_its_line() -> None:
    found = set(reasons())
    assert {"OPTION_INVALID", "DATA_LOST", "ROWS_DIFFER"} <= found
    assert found | set(HINTS) <= table("When something is wrong")


def test_every_point_of_the_comparison_is_shown_by_tests() -> None:
    points = {
        heading: [line.split(" | ")[0].removeprefix("| ") for line in lines.splitlines() if line.startswith("| ")][1:]
        for heading, lines in re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", COMPARED, re.MULTILINE | re.DOTALL)
    }
    assert points == {heading: list(shown) for heading, shown in SHOWN_BY.items()}
    there = {
        f"{path.stem}.{node.name}".replace("test_", "", 1).replace(".test_", ".", 1)
        for path in (ROOT / "tests" / "spark").glob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    named = {name for shown in SHOWN_BY.values() for tests in shown.values() for name in tests.split()}
    assert named - there == set()


def test_links_to_itself_and_to_files_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link


@pytest.mark.long
def test_the_programs_of_the_page_run(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """given a server with the page's topics / when its programs run / then the topics hold the records that it shows"""
    with ServerProcess(tmp_path / "server", CONFIG) as server:
        known: dict[str, object] = {}
        for program in PROGRAMS:
            told = program.replace("127.0.0.1:7450", server.address).replace('"/data/', f'"{tmp_path}/')
            exec(compile(told, "docs/spark.md", "exec"), known)
        with server.client() as client:
            left = set(map(str, range(20, 500)))  # of the overwrite, without those that were deleted
            assert contents(client, "orders") == contents(client, "orders.copy") == left
            assert client.count("orders", "/price = /id") == 69  # updated
            assert client.count("orders.counts") == 1000
        spark.conf.unset("spark.sql.parquet.outputTimestampType")  # the page sets it
        for file in (tmp_path / "log").glob("*.parquet"):
            assert pq.read_schema(file).field("_expire_time").type == pa.timestamp("us", "UTC"), "else nanoseconds"
        log = spark.read.parquet(str(tmp_path / "log")).groupBy("_op").count().collect()
        assert {row["_op"]: row["count"] for row in log} == {"put": 2573, "delete": 520}
    (shown,) = re.findall(r"```text\n(.+?)```", PAGE, re.DOTALL)
    assert shown in capsys.readouterr().out


def contents(client: Client, topic: str) -> set[str]:
    return {record.key for record in client.query(topic)}
