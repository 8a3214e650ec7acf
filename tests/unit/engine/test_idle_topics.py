"""Topics that nobody uses (rule T1; rows R12 and R13): uses of a topic, and its deletion."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.store import StoreOptions
from sow_server.engine.stored import StoredStatistics
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Delete, Expiration, Publish, TopicSettings
from sow_server.engine.values.policies import declared_of
from sow_server.engine.values.turns import SERVER
from sow_server.engine.values.views import ViewDefinition
from sow_server.query.view_plans import view_plan
from sow_server.retention import idle as idle_module
from sow_server.retention.idle import Cause, IdleTopics
from tests.support.stores.stores import HOUR, MINUTE, SECOND, FaultyRocks, Rig
from tests.support.stores.subscribers import Subscribers

JSON = TopicSettings(expiration=Expiration.ENABLED)
TTL = 10 * MINUTE


class Keeper:
    """A rig, and the deletion of its unused topics, a tick at a time."""

    def __init__(self, path: Path, options: StoreOptions | None = None) -> None:
        self.rig = Rig(path, options=options)
        self.idle = IdleTopics(self.rig.store.reads, self.rig.store.writes)

    def create(self, name: str, **settings: object) -> None:
        self.rig.create_topic(name, JSON, settings)
        self.tick()

    def tick(self, micros: int = 0) -> None:
        """Lets time pass, and looks."""
        self.rig.time.tick(micros)
        self.idle.tick()
        self.rig.store.writer.step()

    def there(self, name: str) -> bool:
        return name in self.rig.store.topics.by_name


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    return Keeper(tmp_path)


def test_an_unused_topic_goes_when_its_time_has_passed_and_not_before(keeper: Keeper) -> None:
    """Row RabbitMQ 12."""
    keeper.create("idle", idle_ttl_micros=TTL)
    keeper.create("other")
    keeper.tick(TTL - 1)
    assert keeper.there("idle")
    keeper.tick(1)
    assert not keeper.there("idle")
    keeper.tick(HOUR)
    assert keeper.there("other")
    assert keeper.idle.deleted_total == {Cause.IDLE: 1, Cause.LEFT: 0}


@pytest.mark.parametrize("how", ["get", "query", "declare", "subscribe"])
def test_a_use_begins_its_time_anew(keeper: Keeper, how: str) -> None:
    """Row RabbitMQ 12: consumer, redeclare, get."""
    keeper.create("t", idle_ttl_micros=TTL)
    rig = keeper.rig
    uses: dict[str, Callable[[], object]] = {
        "get": lambda: rig.get("t", "k"),
        "query": lambda: rig.live("t"),
        "declare": lambda: _declare_again(rig),
        "subscribe": lambda: Subscribers(rig).subscribe("t").close(),
    }
    for _ in range(3):
        keeper.tick(TTL - 1)
        uses[how]()
    keeper.tick(TTL - 1)
    assert keeper.there("t")
    keeper.tick(1)
    assert not keeper.there("t")


def _declare_again(rig: Rig) -> None:
    with pytest.raises(StoreError) as refused:
        rig.create_topic("t", JSON)
    assert refused.value.reason is Reason.TOPIC_EXISTS


@pytest.mark.parametrize("is_use", [False, True])
def test_a_publish_is_a_use_only_where_the_topic_says_so(keeper: Keeper, is_use: bool) -> None:
    keeper.create("t", idle_ttl_micros=TTL, publish_is_use=is_use)
    keeper.tick(TTL - 1)
    keeper.rig.put("t", "k", b"{}")
    keeper.tick(1)
    assert keeper.there("t") is is_use
    if is_use:
        keeper.tick(TTL - 2)
        assert keeper.there("t")
        keeper.tick(1)
        assert not keeper.there("t")


def test_a_delete_of_records_is_no_use(keeper: Keeper) -> None:
    keeper.create("t", idle_ttl_micros=TTL, publish_is_use=True)
    keeper.rig.put("t", "k", b"{}")
    keeper.tick(TTL - 1)
    assert keeper.rig.run(Delete("t", ["k"])).applied == 1
    keeper.tick(1)
    assert not keeper.there("t")


@pytest.mark.parametrize("pattern", [False, True])
def test_an_attached_subscriber_uses_the_topic_until_it_leaves(keeper: Keeper, pattern: bool) -> None:
    keeper.create("t", idle_ttl_micros=TTL)
    subscribers = Subscribers(keeper.rig)
    follower = subscribers.subscribe(pattern="t.*") if pattern else subscribers.subscribe("t")
    for _ in range(5):
        keeper.tick(TTL)
    assert keeper.there("t")
    follower.close()
    keeper.tick(TTL - 1)
    assert keeper.there("t")
    keeper.tick(1)
    assert not keeper.there("t")


def test_a_topic_that_is_to_be_empty_stays_while_it_holds_live_records(keeper: Keeper) -> None:
    keeper.create("t", idle_ttl_micros=TTL, only_if_empty=True)
    keeper.rig.put("t", "k", b"{}", ttl=2 * TTL)
    keeper.tick(TTL)
    keeper.tick(TTL - 1)
    assert keeper.there("t")
    keeper.rig.time.tick(1)
    keeper.rig.store.sweep()  # its last record is gone
    keeper.tick()
    assert not keeper.there("t"), "at once"


def test_content_that_comes_before_the_writers_turn_saves_a_topic(keeper: Keeper) -> None:
    """idle [2]: the decision is the writer's."""
    keeper.create("full", idle_ttl_micros=TTL, only_if_empty=True)
    keeper.create("used", idle_ttl_micros=TTL)
    keeper.rig.time.tick(TTL)
    keeper.idle.tick()  # both are asked for
    keeper.rig.store.cuts.get(keeper.rig.topic("used"), [b"k"])
    topic = keeper.rig.topic("full")
    # In the writer's queue the publish comes after, so it is brought before by hand.
    writer = keeper.rig.store.writer
    writer.queue.take(0)
    keeper.rig.store.commits.submit(Publish("full", [b"{}"], ["k"]))
    writer.queue.take(0)
    writer.queue._turns._waiting[SERVER].rotate(1)
    writer.step()
    assert keeper.there("full")
    assert keeper.there("used")
    assert keeper.rig.topic("full") is topic
    assert sum(keeper.idle.deleted_total.values()) == 0


def test_a_start_is_a_use(keeper: Keeper, tmp_path: Path) -> None:
    keeper.create("t", idle_ttl_micros=TTL)
    keeper.rig.kill()
    keeper.rig.time.tick(TTL)
    keeper.rig.open()
    keeper.idle = IdleTopics(keeper.rig.store.reads, keeper.rig.store.writes)
    keeper.tick()
    keeper.tick(TTL - 1)
    assert keeper.there("t")
    keeper.tick(1)
    assert not keeper.there("t")


def test_a_new_idle_ttl_counts_from_its_setting(keeper: Keeper) -> None:
    keeper.create("t")
    keeper.tick(HOUR)
    keeper.rig.alter_topic("t", idle_ttl_micros=TTL)
    keeper.tick()
    keeper.tick(TTL - 1)
    assert keeper.there("t")
    keeper.tick(1)
    assert not keeper.there("t")


def test_an_idle_ttl_that_is_taken_back_deletes_nothing(keeper: Keeper) -> None:
    keeper.create("t", idle_ttl_micros=TTL)
    keeper.rig.alter_topic("t", idle_ttl_micros=None)
    keeper.tick(HOUR)
    assert keeper.there("t")


def test_a_topic_with_auto_delete_goes_with_its_last_subscriber(keeper: Keeper) -> None:
    """Row RabbitMQ 13."""
    keeper.create("t", auto_delete=True)
    keeper.tick(HOUR)
    assert keeper.there("t"), "nobody has come yet"
    subscribers = Subscribers(keeper.rig)
    first, second = subscribers.subscribe("t"), subscribers.subscribe("t")
    first.close()
    keeper.tick()
    assert keeper.there("t")
    second.close()
    keeper.tick()
    assert not keeper.there("t")
    assert keeper.idle.deleted_total == {Cause.IDLE: 0, Cause.LEFT: 1}


def test_a_topic_with_auto_delete_stays_for_a_durable_subscriber_that_is_away(keeper: Keeper) -> None:
    """T1: a consumer that returns finds its unacknowledged changes."""
    keeper.create("t", auto_delete=True)
    subscribers = Subscribers(keeper.rig)
    subscribers.attach("t", "d").close()
    subscribers.subscribe("t").close()
    subscribers.settle()
    keeper.tick()
    assert keeper.there("t")


def test_auto_delete_and_idle_ttl_are_combined_whichever_comes_first(keeper: Keeper) -> None:
    """Row RabbitMQ 13."""
    for name in ("left", "idle"):
        keeper.create(name, auto_delete=True, idle_ttl_micros=TTL)
    Subscribers(keeper.rig).subscribe("left").close()
    keeper.tick()
    assert (keeper.there("left"), keeper.there("idle")) == (False, True)
    keeper.tick(TTL)
    assert not keeper.there("idle")


def test_auto_delete_leaves_content_where_the_topic_says_so(keeper: Keeper) -> None:
    keeper.create("t", auto_delete=True, only_if_empty=True)
    keeper.rig.put("t", "k", b"{}")
    Subscribers(keeper.rig).subscribe("t").close()
    keeper.rig.store.writer.step()
    faulty = FaultyRocks(keeper.rig)
    for _ in range(3):
        keeper.tick(SECOND)
    assert keeper.there("t")
    assert not faulty.attempts, "a topic that waits to be empty costs no commit every second"
    keeper.rig.delete("t", "k")
    keeper.tick()
    assert not keeper.there("t")


def test_subscribers_that_a_stopping_server_sends_away_have_not_left(keeper: Keeper) -> None:
    keeper.create("t", auto_delete=True)
    Subscribers(keeper.rig).subscribe("t").close()
    keeper.idle.stop()
    keeper.tick()
    assert keeper.there("t")


def test_nothing_is_deleted_while_the_clock_is_in_doubt(keeper: Keeper) -> None:
    """Rule L15: a bad time step must not erase anything."""
    keeper.create("t", idle_ttl_micros=TTL)
    keeper.rig.time.step_wall(HOUR)
    keeper.tick()
    keeper.tick(TTL)
    assert keeper.rig.clock.paused
    assert keeper.there("t")


def test_a_topic_of_the_configuration_file_stays(keeper: Keeper) -> None:
    topic = keeper.rig.create_topic("t", JSON, in_config=True)
    topic.apply(topic.settings._replace(idle_ttl_micros=TTL, auto_delete=True), topic.indexes)  # as a policy might
    Subscribers(keeper.rig).subscribe("t").close()
    keeper.tick()
    keeper.tick(HOUR)
    assert keeper.there("t")


def test_a_topic_of_the_same_name_is_another_topic(keeper: Keeper) -> None:
    keeper.create("t", idle_ttl_micros=TTL)
    keeper.rig.time.tick(TTL)
    keeper.idle.tick()  # asked for, and before it the topic is deleted and made again
    writer = keeper.rig.store.writer
    writer.queue.take(0)
    keeper.rig.store.administration.delete_topic("t")
    keeper.rig.store.administration.create_topic("t", declared_of(JSON))
    writer.queue.take(0)
    writer.queue._turns._waiting[SERVER].rotate(2)
    writer.step()
    assert keeper.there("t")
    assert sum(keeper.idle.deleted_total.values()) == 0


def test_the_subscribers_of_a_deleted_topic_get_an_error_and_its_name_is_free(keeper: Keeper) -> None:
    """Rule T5: a topic that goes while somebody is about to come."""
    keeper.create("t", idle_ttl_micros=TTL)
    subscribers = Subscribers(keeper.rig)
    keeper.rig.time.tick(TTL)
    answers: list[bool | StoreError] = []
    keeper.rig.store.administration.delete_unused(keeper.rig.topic("t"), lambda topic, now: True).then(answers.append)
    follower = subscribers.subscribe("t", settled=False)
    subscribers.settle()
    follower.pump()
    assert answers == [True]
    assert follower.error is not None
    assert follower.error.reason is Reason.TOPIC_DELETED
    keeper.create("t")
    assert keeper.there("t")


def test_many_topics_go_a_bounded_number_at_a_time(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_module, "DELETIONS_MAX", 3)
    for number in range(7):
        keeper.rig.create_topic(f"t{number}", JSON, idle_ttl_micros=TTL)
    keeper.tick()
    left = []
    for micros in (TTL, SECOND, SECOND):
        keeper.tick(micros)
        left.append(len(keeper.rig.store.topics.by_name))
    assert left == [4, 1, 0]


@pytest.mark.slow
def test_ten_thousand_idle_topics_cost_next_to_nothing(keeper: Keeper) -> None:
    """idle [3], in the work done and not only in time: no topic is looked at before it is due."""
    topics = keeper.rig.store.topics
    settings = JSON._replace(idle_ttl_micros=HOUR)
    now = keeper.rig.clock.now_micros()
    many = {
        f"t{number}": Topic(number, f"t{number}", settings, create_time_micros=now, statistics=StoredStatistics())
        for number in range(1, 10_001)
    }
    topics._replace(many)
    for topic in many.values():
        topics.settled(topic)
    keeper.tick()
    spent = []
    for _ in range(60):
        keeper.rig.time.tick(SECOND)
        begin = time.thread_time()
        keeper.idle.tick()
        spent.append(time.thread_time() - begin)
    print(
        f"a minute of ticks over 10,000 topics: {sum(spent) * 1000:.1f} ms, the most in one {max(spent) * 1000:.2f} ms"
    )
    assert sum(spent) < 0.6, "1 % of a core"
    assert sorted(spent)[len(spent) // 2] < 0.000_2, "most ticks look at nothing"
    assert not keeper.idle._asked


def test_a_view_is_a_use_of_its_source(tmp_path: Path) -> None:
    """Rule V7; its time begins anew when the view goes."""
    keeper = Keeper(tmp_path, StoreOptions(plan_of=view_plan))
    keeper.create("source", idle_ttl_micros=TTL)
    administration = keeper.rig.store.administration
    keeper.rig.store.finish(
        administration.create_topic("view", {}, view=ViewDefinition("source", (), (("n", "COUNT(*)"),)))
    )
    for _ in range(3):
        keeper.tick(TTL)
        assert keeper.there("source")
    keeper.rig.store.finish(administration.delete_topic("view"))
    keeper.tick(TTL - 1)
    assert keeper.there("source")
    keeper.tick(1)
    assert not keeper.there("source")
