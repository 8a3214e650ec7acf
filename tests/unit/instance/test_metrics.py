"""The metrics: each follows its quantity, costs little, and is documented."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from sow.v1 import admin_pb2, types_pb2
from sow_server import metrics as metrics_module
from sow_server.access.audit import Outcome
from sow_server.certificates import Expiry
from sow_server.distributions import Distribution
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.observers import Observer
from sow_server.engine.store import Store, StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Expiration, Lifetime, LifetimeKind, MessageType, Publish, TopicSettings
from sow_server.engine.values.policies import declared_of
from sow_server.engine.values.views import ViewDefinition
from sow_server.metrics import OTHER_TOPICS, Metrics
from sow_server.query.export_parts import Export
from sow_server.query.exports import Exports
from sow_server.query.sort_memory import SortMemory
from sow_server.query.view_plans import view_plan
from sow_server.retention.idle import IdleTopics
from sow_server.services.records.admission import Admission
from sow_server.subscriptions.durable.consumer_registry import Consumers
from sow_server.subscriptions.hub import Hub
from sow_server.subscriptions.request import Request, Snapshot, View
from sow_server.subscriptions.results.live_results import LiveResults
from sow_server.timers import PeriodicJob
from tests.support.stores.parts import cells_of, figures_of, no_reader_processes
from tests.support.stores.stores import SECOND, FakeTime
from tests.support.stores.subscribers import Driven

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
EXPIRING = TopicSettings(message_type=MessageType.BINARY, expiration=Expiration.ENABLED)


async def _nothing() -> None:
    """A job's work."""


class Watched:
    """A store whose writer is observed by metrics; its time stands still unless the test moves it."""

    def __init__(self, path: Path) -> None:
        self.time = FakeTime()
        self.clock = self.time.clock()
        self.metrics = Metrics()
        self.store = Store.open(path, clock=self.clock, observer=self.metrics, options=StoreOptions(plan_of=view_plan))
        self.metrics.watch(figures_of(self.store))
        self.hub = Hub(
            self.store.reads,
            self.store.writes,
            lambda run: run(),
        )
        self.metrics.watch_subscriptions(self.hub)
        self.metrics.watch_results(LiveResults(self.hub, self.store.reads, Driven()))
        self.consumers = Consumers(
            self.store.reads,
            self.store.writes,
            self.hub,
            lambda text, part: lambda topic: View(),
        )
        self.metrics.watch_durables(self.consumers, Admission(self.store.reads, self.store.writes))
        self.metrics.watch_idle(IdleTopics(self.store.reads, self.store.writes))
        self.metrics.watch_sorts(SortMemory())
        self.metrics.watch_jobs([PeriodicJob("prune", _nothing, 60)], cells_of(self.store, path))
        self.exports: Exports[Export] = Exports(self.store.reads)
        self.metrics.watch_exports(self.exports)
        self.metrics.watch_reader_processes(no_reader_processes(self.store, path))

    def create(self, name: str, settings: TopicSettings = EXPIRING) -> None:
        declared = {"expiration": settings.expiration, **declared_of(settings)}
        self.store.administration.create_topic(name, declared)
        self.store.writer.step()

    def put(self, topic: str, keys: list[str], *, ttl_micros: int | None = None) -> None:
        ttls = None if ttl_micros is None else [Lifetime(LifetimeKind.TTL, ttl_micros)] * len(keys)
        self.store.run(Publish(topic, [b"payload"] * len(keys), keys=keys, lifetimes=ttls))

    def value(self, name: str, **labels: str) -> float | None:
        return sample(self.metrics.registry, name, **labels)


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    value: float | None = registry.get_sample_value(name, labels)
    return value


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    rig = Watched(tmp_path)
    yield rig
    rig.metrics.release()
    rig.store.close()


def test_metrics_observe_the_writer() -> None:
    observer: Observer = Metrics()  # mypy compares the signatures
    observer.stalled()


def test_records_and_their_journal_are_counted_per_topic(watched: Watched) -> None:
    watched.create("a")
    watched.create("b", EXPIRING._replace(journal=False))
    watched.put("a", ["1", "2", "3"])
    watched.put("b", ["1"])
    assert watched.value("sow_topics") == 2
    assert watched.value("sow_records_live", topic="a") == 3
    assert watched.value("sow_records_live", topic="b") == 1
    assert watched.value("sow_records_bytes", topic="a") == 3 * len(b"1payload")
    assert watched.value("sow_journal_entries", topic="a") == 3
    assert (watched.value("sow_journal_bytes", topic="a") or 0) > 0
    assert watched.value("sow_journal_entries", topic="b") == 0
    assert watched.value("sow_last_sequence") == watched.store.writer.last_sequence > 0
    assert (watched.value("sow_disk_bytes") or 0) > 0


def test_caps_and_refusals_of_full_topics_are_figures(watched: Watched) -> None:
    """T7: where there is a cap."""
    watched.create("a", EXPIRING._replace(max_records=2))
    watched.create("b", EXPIRING._replace(max_stored_bytes=100))
    watched.create("c")
    watched.put("a", ["1", "2", "3"])
    assert watched.value("sow_records_max", topic="a") == 2
    assert watched.value("sow_topic_full_refusals_total", topic="a") == 1
    assert watched.value("sow_records_bytes_max", topic="a") is None
    assert watched.value("sow_records_bytes_max", topic="b") == 100
    assert watched.value("sow_topic_full_refusals_total", topic="b") == 0
    assert watched.value("sow_topic_full_refusals_total", topic="c") is None


def test_an_expired_record_is_overdue_until_it_is_swept_and_counted_once(watched: Watched) -> None:
    watched.create("a")
    watched.create("b")
    watched.put("a", ["1", "2", "3"], ttl_micros=SECOND)
    watched.put("a", ["4"])
    watched.put("b", ["1"])

    watched.time.tick(SECOND)
    assert watched.value("sow_records_live", topic="a") == 1
    assert watched.value("sow_records_overdue", topic="a") == 3
    assert watched.value("sow_records_overdue", topic="b") == 0
    assert watched.value("sow_records_expired_total") == 0

    watched.store.sweep()
    assert watched.value("sow_records_live", topic="a") == 1
    assert watched.value("sow_records_overdue", topic="a") == 0
    assert watched.value("sow_records_expired_total") == 3


def test_a_topic_that_does_not_act_on_lifetimes_has_nothing_overdue(watched: Watched) -> None:
    watched.create("a", EXPIRING._replace(expiration=Expiration.DISABLED))
    watched.put("a", ["1"], ttl_micros=SECOND)
    watched.time.tick(SECOND)
    assert watched.value("sow_records_overdue", topic="a") == 0
    assert watched.value("sow_records_live", topic="a") == 1


def test_the_lag_is_from_the_expire_time_to_the_removal(watched: Watched) -> None:
    watched.create("a")
    watched.put("a", ["1", "2"], ttl_micros=SECOND)
    watched.time.tick(SECOND + 7_000)
    watched.store.sweep()
    assert watched.value("sow_expiry_lag_seconds_count") == 2
    assert watched.value("sow_expiry_lag_seconds_sum") == pytest.approx(0.014)
    assert watched.value("sow_expiry_lag_seconds_bucket", le="0.005") == 0
    assert watched.value("sow_expiry_lag_seconds_bucket", le="0.01") == 2


def test_commits_are_counted_with_their_records(watched: Watched) -> None:
    watched.create("a")
    watched.put("a", ["1", "2", "3"])
    watched.put("a", ["1"])
    assert watched.value("sow_commit_records_count") == 2
    assert watched.value("sow_commit_records_sum") == 4
    assert watched.value("sow_commit_seconds_count") == 2
    assert (watched.value("sow_commit_seconds_sum") or 0) > 0


def test_requests_waiting_for_the_writer_are_shown(watched: Watched) -> None:
    watched.create("a")
    watched.store.commits.submit(Publish("a", [b"12345", b"67"], keys=["1", "2"]))
    assert watched.value("sow_write_queue_requests") == 1
    assert watched.value("sow_write_queue_bytes") == 7
    watched.store.writer.step()
    assert watched.value("sow_write_queue_requests") == 0
    assert watched.value("sow_write_queue_bytes") == 0


def test_a_jump_of_the_clock_is_an_alarm_until_it_is_back(watched: Watched) -> None:
    assert (watched.value("sow_clock_jumps_total"), watched.value("sow_sweep_paused")) == (0, 0)
    watched.time.step_wall(3600 * SECOND)
    assert watched.value("sow_sweep_paused") == 1
    assert watched.value("sow_clock_jumps_total") == 1
    watched.time.step_wall(-3600 * SECOND)
    assert (watched.value("sow_clock_jumps_total"), watched.value("sow_sweep_paused")) == (1, 0)


def test_a_failed_store_says_why(watched: Watched) -> None:
    assert watched.value("sow_store_failed", reason="DISK_FULL") == 0
    watched.store.writer.fail(StoreError(Reason.DISK_FULL, "the disk is full"))
    assert watched.value("sow_store_failed", reason="DISK_FULL") == 1
    assert watched.value("sow_store_failed", reason="STORE_FAILED") == 0


def test_stalls_are_counted_and_shown_while_they_last(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.metrics.stalled()
    assert watched.value("sow_write_stalls_total") == 1
    assert watched.value("sow_write_stalled") == 0
    monkeypatch.setattr(watched.store.upkeep, "write_stalled", lambda: True)
    assert watched.value("sow_write_stalled") == 1


def test_exports_and_the_records_read_from_them_are_counted(watched: Watched) -> None:
    watched.create("a")
    watched.put("a", ["1", "2", "3"])
    assert (watched.value("sow_exports"), watched.value("sow_export_records_total")) == (0, 0)
    with watched.exports.room():
        export = Export(watched.store.cuts, watched.store.topics.find("a"), None, 1, watched.exports.splits)
        assert export.prepare()
        watched.exports.add(export, SECOND)
    with watched.exports.reader(export.id), watched.exports.handing_over(export.id, 3):
        pass
    assert (watched.value("sow_exports"), watched.value("sow_export_records_total")) == (1, 3)
    watched.exports.close(export.id)
    assert (watched.value("sow_exports"), watched.value("sow_export_records_total")) == (0, 3)


def test_calls_are_counted_by_method_and_code() -> None:
    metrics = Metrics()
    metrics.rpc_finished("Get", "OK", 0.0015)
    metrics.rpc_finished("Get", "OK", 0.0025)
    metrics.rpc_finished("Get", "NOT_FOUND", 0.5)
    metrics.rpc_finished("Query", "OK", 1000.0)
    assert sample(metrics.registry, "sow_rpcs_total", method="Get", code="OK") == 2
    assert sample(metrics.registry, "sow_rpcs_total", method="Get", code="NOT_FOUND") == 1
    assert sample(metrics.registry, "sow_rpc_seconds_count", method="Get") == 3
    assert sample(metrics.registry, "sow_rpc_seconds_bucket", method="Get", le="0.002") == 1
    assert sample(metrics.registry, "sow_rpc_seconds_bucket", method="Query", le="60.0") == 0
    assert sample(metrics.registry, "sow_rpc_seconds_bucket", method="Query", le="+Inf") == 1


def test_topics_beyond_the_bound_are_added_up(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "TOPICS_MAX", 2)
    for name in ("a", "b", "c", "d"):
        watched.create(name)
        watched.put(name, ["1", "2"])
    assert watched.value("sow_records_live", topic="b") == 2
    assert watched.value("sow_records_live", topic="c") is None
    assert watched.value("sow_records_live", topic=OTHER_TOPICS) == 4


def test_after_release_a_scrape_leaves_the_store_alone(watched: Watched) -> None:
    watched.create("a")
    watched.metrics.release()
    assert watched.value("sow_records_live", topic="a") is None
    assert watched.value("sow_write_stalls_total") == 0


def test_release_waits_for_the_scrape_under_way(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the store beside a running read is an error in RocksDB's binding, so a scrape has to end first."""
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> bool:
        inside.set()
        assert go_on.wait(10)
        return False

    monkeypatch.setattr(watched.store.upkeep, "write_stalled", slow)
    scrape = threading.Thread(target=lambda: watched.value("sow_topics"))
    scrape.start()
    assert inside.wait(10)
    release = threading.Thread(target=watched.metrics.release)
    release.start()
    release.join(0.05)
    assert release.is_alive()
    go_on.set()
    release.join(10)
    scrape.join(10)
    assert not release.is_alive()


# --- distributions ---------------------------------------------------------------------------------------------------


def test_many_values_at_once_count_as_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    bounds = (1, 2, 5, 10)
    for _ in range(200):
        values = [draw.randrange(-1, 13) for _ in range(draw.randrange(30))]
        one_by_one, at_once = Distribution(bounds), Distribution(bounds)
        for value in values:
            one_by_one.add(value)
        at_once.add_all(values)
        assert at_once.buckets() == one_by_one.buckets(), values
        assert at_once.total == one_by_one.total == sum(values)


def test_a_value_on_a_bound_counts_below_it() -> None:
    found = Distribution((1000, 2000))
    found.add_all([1000, 1001, 2000, 2001] * 10)
    assert found.buckets(unit=1000) == [("1.0", 10), ("2.0", 30), ("+Inf", 40)]
    found.add(1000)
    assert found.buckets(unit=1000)[0] == ("1.0", 11)


def test_counting_an_expiry_costs_next_to_nothing() -> None:
    """A hundred thousand a second must stay unnoticed: a sweep's lags are counted together. Judged by the ratio to
    adding them one by one, as a library's histogram does at best."""
    lags = list(range(5_000, 3_000, -2))
    one_by_one, at_once = (
        Distribution([10**power for power in range(9)]),
        Distribution([10**power for power in range(9)]),
    )

    def best(run: Callable[[], None]) -> float:
        taken = []
        for _ in range(7):
            started = time.perf_counter()
            for _ in range(10):
                run()
            taken.append(time.perf_counter() - started)
        return min(taken)

    def add_one_by_one() -> None:
        for lag in lags:
            one_by_one.add(lag)

    assert best(lambda: at_once.add_all(lags)) < best(add_one_by_one) / 3


# --- the document ----------------------------------------------------------------------------------------------------


def _documented() -> dict[str, tuple[str, set[str]]]:
    """Name → (type, labels), from the tables of the document."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([\w, ]*)\|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: (kind, set(labels.replace(",", " ").split())) for name, kind, labels in rows}


def test_the_dispatched_changes_of_followed_topics_are_counted(watched: Watched) -> None:
    watched.create("a")
    watched.create("b")
    topic = watched.store.topics.find("a")
    watched.hub.subscribe(Request(view=lambda _: View(), snapshot=_no_snapshot, topic="a"))
    assert watched.value("sow_subscriptions") == 1
    watched.put("a", ["1", "2"])
    watched.put("b", ["3"])
    assert topic.followers == 1
    assert watched.value("sow_changes_dispatched_total") == 2
    assert watched.value("sow_subscription_groups") == 1
    assert (watched.value("sow_subscription_queue_bytes") or 0) > 0
    assert watched.value("sow_dispatch_lag_sequences") == 0


def _no_snapshot(topic: Topic) -> Snapshot:
    raise AssertionError("none was asked for")


def attach_durable(watched: Watched) -> None:
    """A durable of the topic `a`."""
    watched.store.durable_commits.change(
        lambda staged: staged.attach(
            watched.store.topics.find("a"), "d", filter_text="", start=None, declared=None, expected=False
        ),
    )
    watched.store.writer.step()


def pin(watched: Watched, name: str, at: int) -> None:
    """A pin of the topic `a`, made or renewed."""
    topic, declared = watched.store.topics.find("a"), {"idle_ttl_micros": 3_600 * SECOND}
    watched.store.durable_commits.change(lambda staged: staged.pin(topic, name, at, declared, "a query"))
    watched.store.writer.step()


def test_pins_are_figures(watched: Watched) -> None:
    """J18. Of many pins the slowest and the most idle one are named: one series a topic."""
    watched.create("a", EXPIRING)
    attach_durable(watched)
    assert watched.value("sow_pins", topic="a") is None
    watched.put("a", ["one"])
    position = watched.store.writer.last_sequence
    pin(watched, "slow", position)
    watched.put("a", ["two", "three"])
    watched.time.tick(5 * SECOND)
    pin(watched, "fast", watched.store.writer.last_sequence)
    watched.time.tick(SECOND)
    pin(watched, "slow", position)
    watched.time.tick(SECOND)
    assert watched.value("sow_pins", topic="a") == 2
    assert watched.value("sow_pin_behind_entries", topic="a", pin="slow") == 2
    assert watched.value("sow_pin_behind_seconds", topic="a", pin="slow") == 7
    assert watched.value("sow_pin_idle_seconds", topic="a", pin="fast") == 2


def test_a_backlog_and_its_quota_are_figures_before_the_quota_is_reached(watched: Watched) -> None:
    """Pulsar 6, J9. Of many durables the slowest is named: one series a topic."""
    settings = EXPIRING._replace(backlog_quota_bytes=10_000, backlog_quota_age_micros=60 * SECOND)
    watched.create("a", settings._replace(backlog_quota_entries=100))
    attach_durable(watched)
    assert watched.value("sow_backlog_bytes", topic="a") == 0
    watched.put("a", ["one", "two"])
    watched.time.tick(5 * SECOND)
    assert watched.value("sow_backlog_entries", topic="a") == 2
    size = watched.value("sow_backlog_bytes", topic="a")
    assert size is not None
    assert 0 < size < 10_000
    assert watched.value("sow_backlog_age_seconds", topic="a") == 5
    assert watched.value("sow_backlog_quota_bytes", topic="a") == 10_000
    assert watched.value("sow_backlog_quota_seconds", topic="a") == 60
    assert watched.value("sow_slowest_durable_age_seconds", topic="a", durable="d") == 5
    assert watched.value("sow_backlog_quota_entries", topic="a") == 100


LINKS = admin_pb2.GetReplicationStatusResponse(
    outgoing=[
        admin_pb2.OutgoingLink(
            peer="ldn-1",
            state="waiting",
            mode="downgraded",
            lag_sequences=7,
            lag_micros=2_500_000,
            skew_micros=-1_500_000,
            last_error_reason=types_pb2.ERROR_REASON_CLOCK_SKEW,
            topics=[admin_pb2.LinkTopic(topic="a", state="refused"), admin_pb2.LinkTopic(topic="b", state="refused")],
        )
    ],
    incoming=[
        admin_pb2.IncomingLink(
            peer="ldn-1",
            state="connected",
            cursor=8,
            head_sequence=10,
            applied=5,
            superseded=3,
            dropped=1,
            rows_refused=4,
        )
    ],
)


def test_links_show_their_positions_and_errors(watched: Watched) -> None:
    """R8, R10."""
    assert watched.value("sow_replication_lag_sequences", direction="out", peer="ldn-1") is None
    watched.metrics.links_are(LINKS)
    for name, labels, expected in (
        ("link", {"direction": "out", "state": "waiting"}, 1),
        ("link", {"direction": "out", "state": "streaming"}, 0),
        ("link", {"direction": "in", "state": "connected"}, 1),
        ("link", {"direction": "in", "state": "away"}, 0),
        ("link_error", {"direction": "out", "reason": "CLOCK_SKEW"}, 1),
        ("lag_sequences", {"direction": "out"}, 7),
        ("lag_sequences", {"direction": "in"}, 2),
        ("lag_seconds", {}, 2.5),
        ("skew_seconds", {"direction": "out"}, -1.5),
        ("downgraded", {}, 1),
        ("topics", {"direction": "out", "state": "refused"}, 2),
        ("topics", {"direction": "out", "state": "seeding"}, 0),
        ("applied_total", {}, 5),
        ("superseded_total", {}, 3),
        ("dropped_total", {}, 1),
        ("rows_refused_total", {}, 4),
    ):
        assert watched.value(f"sow_replication_{name}", peer="ldn-1", **labels) == expected, (name, labels)


EXPIRY = Expiry("certificate", Path("server.pem"), datetime(2030, 1, 1, tzinfo=UTC))


def test_the_expiry_of_certificates_is_shown_in_seconds(watched: Watched) -> None:
    watched.metrics.watch_certificates(lambda: [("127.0.0.1:7450", EXPIRY)])
    labels = {"listener": "127.0.0.1:7450", "file": "server.pem"}
    assert watched.value("sow_certificate_expiry_timestamp_seconds", **labels) == 1_893_456_000


def test_every_metric_is_documented_and_every_documented_one_exists(watched: Watched) -> None:
    quotas = EXPIRING._replace(backlog_quota_bytes=1000, backlog_quota_age_micros=SECOND)
    watched.create("a", quotas._replace(backlog_quota_entries=10, max_records=9, max_stored_bytes=999))
    watched.put("a", ["1"])
    counting = ViewDefinition("a", (), (("n", "COUNT(*)"),))
    watched.store.administration.create_topic("view", {}, view=counting)
    watched.store.writer.step()
    assert not watched.store.topics.by_name["view"].complete, "it is yet to be built"
    attach_durable(watched)
    pin(watched, "p", 0)
    watched.metrics.rpc_finished("Get", "OK", 0.1)
    watched.metrics.access_denied("Get", "read")
    watched.metrics.audited("begin", Outcome.WRITTEN)
    watched.metrics.links_are(LINKS)
    watched.metrics.watch_certificates(lambda: [("127.0.0.1:7450", EXPIRY)])
    watched.store.unsound.skip(watched.store.topics.by_name["a"], [b"\xff"], 0)
    found = {}
    for metric in watched.metrics.registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = {label for entry in metric.samples for label in entry.labels} - {"le"}
        found[name] = (metric.type, labels)
    assert found == _documented()


def test_the_alerts_of_the_document_name_metrics_that_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    named = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(?:sow|process)_\w+", text)}
    assert named == set(_documented())
