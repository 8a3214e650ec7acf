"""The benchmarks' own arithmetic, registry and behaviour without peers. None of them is run here."""

from __future__ import annotations

import importlib.util
import io
import json
import statistics
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.documents import DOCUMENT_BYTES, document
from benchmarks.duckdb_peer import DuckDb
from benchmarks.etcd_peer import EtcdServer
from benchmarks.followers import Offered, sequence_of
from benchmarks.following import TEN_FILTERS, assert_complete
from benchmarks.processes import Metrics, NotInstalled
from benchmarks.redis_peer import RedisServer
from benchmarks.registry import BENCHMARKS, UnknownBenchmark, chosen
from benchmarks.report import Report, Result, failed, print_report, to_json, to_markdown, verdict
from benchmarks.rows import (
    PER_SECOND,
    TIMES,
    Figure,
    Limit,
    Row,
    Target,
    bucket_percentile,
    percentile,
    ratio,
    take_turns,
)
from benchmarks.setting import Machine
from sow_server.filters import Meta, compile_filter, parse

INFINITE = float("inf")


def test_every_line_of_the_table_of_speed_and_memory_has_its_benchmark() -> None:
    assert [benchmark.name for benchmark in BENCHMARKS] == [
        "publish-new",
        "publish-updates",
        "query",
        "scans",
        "single-publish",
        "expiry-lag",
        "mass-expiry",
        "restart",
        "memory",
        "growth",
        "filtered-scan",
        "index-equality",
        "aggregates",
        "views",
        "delivery",
        "ten-filters",
        "idle-followers",
        "dispatch",
        "stopped-follower",
        "live-view",
        "durable-consumer",
        "detached-durables",
        "pruning",
        "idle",
        "replicated-publish",
        "replication-lag",
        "catching-up",
        "resync",
        "cells",
        "moves",
        "access",
        "hostile",
        "traces",
        "command",
        "console",
        "http",
        "spark-snapshot",
        "spark-write",
        "spark-scale",
        "spark-disturbance",
        "spark-state",
        "spark-sinks",
        "spark-state-scale",
    ]


def test_no_name_chooses_all_and_names_are_taken_in_the_order_of_the_table() -> None:
    assert chosen(()) == BENCHMARKS
    assert [benchmark.name for benchmark in chosen(("memory", "query"))] == ["query", "memory"]


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UnknownBenchmark) as refused:
        chosen(("qwery",))
    assert "'qwery'" in str(refused.value)
    assert "single-publish" in str(refused.value)


def test_a_ratio_is_between_medians() -> None:
    assert ratio([100.0, 220.0, 1_000.0], [110.0, 1.0, 9_000.0]) == Figure(2.0, TIMES)


def test_contestants_take_turns_within_a_round() -> None:
    turns: list[str] = []

    def contestant(name: str) -> float:
        turns.append(name)
        return float(len(turns))

    figures = take_turns(2, {"a": lambda: contestant("a"), "b": lambda: contestant("b")})

    assert turns == ["a", "b", "a", "b"]
    assert figures == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


@pytest.mark.parametrize(
    ("target", "figure", "held"),
    [
        (Target(2.0, f"{TIMES} Redis"), Figure(2.0, TIMES), True),
        (Target(2.0, f"{TIMES} Redis"), Figure(1.99, TIMES), False),
        (Target(10.0, "ms", at_least=False), Figure(10.0, "ms"), True),
        (Target(10.0, "ms", at_least=False), Figure(10.1, "ms"), False),
    ],
)
def test_a_target_counts_its_bound_as_held(target: Target, figure: Figure, held: bool) -> None:
    assert target.held(figure) is held
    assert target.reached(figure) is None


@pytest.mark.parametrize(("value", "held", "reached"), [(0.9, False, False), (1.0, True, False), (2.0, True, True)])
def test_an_ambition_lies_beyond_the_bound(value: float, held: bool, reached: bool) -> None:
    target = Target(1.0, f"{TIMES} Redis", ambition=2.0)
    assert (str(target), target.ambition_said) == ("≥ 1 × Redis", "≥ 2 × Redis")
    assert target.held(Figure(value, TIMES)) is held
    assert target.reached(Figure(value, TIMES)) is reached


def test_percentiles_are_samples() -> None:
    samples = [float(number) for number in range(100, 0, -1)]
    assert percentile(samples, 0.5) == 50.0
    assert percentile(samples, 0.99) == 99.0
    assert percentile(samples, 1.0) == 100.0
    assert percentile([7.0], 0.01) == 7.0
    assert percentile([1.0, 2.0, 3.0], 0.5) == statistics.median([1.0, 2.0, 3.0])


def test_a_percentile_of_buckets_is_interpolated_between_two_readings() -> None:
    before = {0.001: 1_000.0, 0.002: 1_000.0, 0.005: 1_000.0, INFINITE: 1_000.0}
    after = {0.001: 1_050.0, 0.002: 1_090.0, 0.005: 1_100.0, INFINITE: 1_100.0}
    assert bucket_percentile(before, after, 0.50) == pytest.approx(0.001)
    assert bucket_percentile(before, after, 0.70) == pytest.approx(0.0015)
    assert bucket_percentile(before, after, 0.99) == pytest.approx(0.0047)


def test_a_percentile_beyond_the_last_bound_is_reported_as_that_bound() -> None:
    assert bucket_percentile({}, {0.005: 1.0, INFINITE: 100.0}, 0.99) == 0.005


def test_metrics_are_read_by_name_and_summed_over_labels() -> None:
    text = "# TYPE lag histogram\n"
    for topic, fast, all_of_them in (("a", 1, 2), ("b", 3, 4)):
        text += f'lag_bucket{{topic="{topic}",le="0.001"}} {fast}\n'
        text += f'lag_bucket{{topic="{topic}",le="+Inf"}} {all_of_them}\n'
        text += f'lag_count{{topic="{topic}"}} {all_of_them}\nlag_sum{{topic="{topic}"}} 1\n'
    text += '# TYPE expired counter\nexpired_total{topic="a"} 5\nexpired_total{topic="b"} 6\n'
    metrics = Metrics(text)
    assert metrics.buckets("lag") == {0.001: 4.0, INFINITE: 6.0}
    assert metrics.total("expired_total") == 11.0
    with pytest.raises(LookupError, match="absent"):
        metrics.total("absent")


def test_documents_are_json_of_160_bytes_with_their_number_as_id() -> None:
    for number in (0, 7, 123_456, 2_999_999, 2_000_100_000):
        for revision in (0, 1, 12):
            payload = document(number, revision)
            assert len(payload) == DOCUMENT_BYTES
            assert json.loads(payload)["id"] == number
    assert document(7, 0) != document(7, 1)


def test_a_lag_counts_from_the_schedule_of_the_load() -> None:
    offered = Offered(begun=100.0, seconds=0.03, records=500, last_sequence=1_499, per_tick=200, tick_seconds=0.01)
    assert offered.first_sequence == 1_000
    assert offered.due(1_000) == offered.due(1_199) == 100.0
    assert offered.due(1_200) == pytest.approx(100.01)
    assert offered.due(1_499) == pytest.approx(100.02)
    assert sequence_of("0123456789ab.1499") == 1_499


@pytest.mark.slow
def test_each_filter_of_the_ten_followers_agrees_with_python() -> None:
    records = [json.loads(document(number)) for number in range(20_000)]
    for one in TEN_FILTERS:
        predicate = compile_filter(parse(one.text), key_paths=[("id",)], allow_now=False)
        matched = [predicate.matches(record, Meta("", 0, 0, None, "records", 0)) for record in records]
        assert matched == [one.matches(record) for record in records], one.text
        assert 0 < sum(matched) < len(records), one.text


@pytest.mark.parametrize("came", [[], [0], [0, 2, 2], [2, 0], [0, 1, 2]])
def test_a_change_that_is_lost_doubled_out_of_order_or_wrong_ends_the_benchmark(came: list[int]) -> None:
    payloads = [document(number) for number in (200, 201, 300)]
    offered = Offered(begun=0.0, seconds=1.0, records=3, last_sequence=12, per_tick=3, tick_seconds=1.0)
    hundreds = next(one for one in TEN_FILTERS if "% 100" in one.text)
    numbers = {0: "200", 1: "201", 2: "300"}

    assert_complete([10, 12], ["200", "300"], offered, payloads, hundreds)

    with pytest.raises(AssertionError, match="changes came"):
        assert_complete([10 + at for at in came], [numbers[at] for at in came], offered, payloads, hundreds)


def test_a_missing_peer_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotInstalled, match=r"redis-server not installed \(apt-get install redis-server\)"):
        RedisServer(tmp_path / "redis")
    with pytest.raises(NotInstalled, match=r"etcd not installed \(apt-get install etcd-server\)"):
        EtcdServer(tmp_path / "etcd")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match=r"duckdb not installed \(pip install duckdb\)"):
        DuckDb("SELECT 1", {})


def test_a_row_without_its_peer_is_skipped_with_the_reason_and_not_judged() -> None:
    row = Row(
        "case",
        Figure(75_300.0, PER_SECOND),
        target=Target(2.0, f"{TIMES} Redis"),
        skipped="redis-server not installed (apt-get install redis-server)",
    )
    assert row.held is None
    assert row.reached is None
    assert verdict(row) == "skipped: redis-server not installed (apt-get install redis-server)"


def test_the_report_says_the_rates_the_ratio_the_target_and_the_share_of_the_limit() -> None:
    row = Row(
        "1 round",
        Figure(75_300.0, PER_SECOND),
        peer=Figure(25_100.0, PER_SECOND),
        judged=Figure(3.0, TIMES),
        target=Target(2.0, f"{TIMES} Redis", ambition=4.0),
        limits=(Limit("the bare gRPC stream", Figure(301_200.0, PER_SECOND), 0.25),),
    )
    results = (
        Result("publish-new", "stream publish, new keys", (row,), 1.0),
        Result("memory", "resident memory", (), 1.0, "TakesTooLong: not done within 900 s"),
    )
    report = Report(True, "2026-01-01 00:00 UTC", "Python", "ext4", Machine(15.0, 1e6, 0.1), results)
    console = Console(record=True, width=200, file=io.StringIO())

    print_report(console, report)
    markdown = to_markdown(report)
    fields = json.loads(to_json(report))

    for text in (console.export_text(), markdown):
        for part in (
            "75.3 k/s",
            "25.1 k/s",
            "3.00 ×",
            "≥ 2 × Redis",
            "held",
            "≥ 4 × Redis",
            "not reached",
            "25% of the bare gRPC stream (301.2 k/s)",
        ):
            assert part in text
        assert "failed: TakesTooLong" in text
    assert fields["benchmarks"][0]["rows"][0]["judged"] == {"value": 3.0, "unit": TIMES}
    assert fields["benchmarks"][0]["rows"][0]["held"] is True
    assert fields["benchmarks"][0]["rows"][0]["reached"] is False
    assert fields["benchmarks"][1]["failure"] == "TakesTooLong: not done within 900 s"


@pytest.mark.parametrize(
    ("judged", "quick", "fails"), [(1.0, False, True), (1.0, True, False), (2.0, False, False), (4.0, False, False)]
)
def test_only_a_figure_beyond_its_bound_fails_a_full_run(judged: float, quick: bool, fails: bool) -> None:
    row = Row("case", Figure(1.0, TIMES), judged=Figure(judged, TIMES), target=Target(2.0, TIMES, ambition=4.0))
    results = (Result("query", "whole-topic query stream", (row,), 1.0),)
    report = Report(quick, "2026-01-01 00:00 UTC", "Python", "ext4", Machine(15.0, 1e6, 0.1), results)

    assert failed(report) is fails
    assert ("REGRESSION" in to_markdown(report)) is (judged == 1.0)


def test_markdown_has_a_table_of_each_kind() -> None:
    rows = (
        Row("held", Figure(1.0, TIMES), judged=Figure(1.0, TIMES), target=Target(1.0, TIMES)),
        Row("wanted", Figure(1.5, TIMES), judged=Figure(1.5, TIMES), target=Target(1.0, TIMES, ambition=2.0)),
        Row("looked at", Figure(1.0, TIMES)),
    )
    report = Report(
        False, "2026-01-01 00:00 UTC", "Python", "ext4", Machine(15.0, 1e6, 0.1), (Result("a", "A", rows, 1.0),)
    )
    _, held, ambitions, information = to_markdown(report).split("\n## ")

    assert [part.splitlines()[0] for part in (held, ambitions, information)] == ["Held", "Ambitions", "For information"]
    for part, cases in ((held, "held wanted"), (ambitions, "wanted"), (information, "looked at")):
        named = [case for case in ("held", "wanted", "looked at") if f"**A**<br>{case} |" in part]
        assert " ".join(named) == cases
