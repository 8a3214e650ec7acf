"""Bounds on what durables of callers without `topic-admin` hold back (rule J19). Time is the test's."""

from __future__ import annotations

import asyncio

import pytest
import structlog.testing

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, BacklogAction, Publish
from sow_server.services.records.admission import POLL_SECONDS, Admission
from sow_server.subscriptions.durable.backlogs import DISTRUST_HOLDS, HOLD_MICROS, level
from sow_server.subscriptions.durable.quotas import exceeds
from tests.support.fakes.loops import FakeLoop
from tests.support.stores.durables import durable, put, rewind, rig
from tests.support.stores.stores import Rig
from tests.support.stores.subscribers import Subscribers, subscribers

__all__ = ["rig", "subscribers"]  # fixtures

QUOTA = 10


class Owners:
    """`root` has topic-admin; the others have what the test gives them."""

    def __init__(self) -> None:
        self.trusted = {"root"}
        self.bytes: dict[str, int | None] = {}

    def may_hold(self, owner: str, topic: str) -> bool:
        return owner in self.trusted

    def backlog_bytes(self, owner: str) -> int | None:
        return self.bytes.get(owner)


@pytest.fixture
def owners(subscribers: Subscribers) -> Owners:
    made = subscribers.consumers.backlogs.owners = Owners()
    return made


def hold(rig: Rig, subscribers: Subscribers, *names: str, action: BacklogAction = BacklogAction.HOLD) -> None:
    """Durables of these names have used up the quota of the topic."""
    rig.alter_topic("orders", backlog_quota_entries=QUOTA, backlog_action=action, retain_bytes=2**30)
    for name in names:
        subscribers.attach("orders", name).close()
    subscribers.settle()
    put(rig, *[f"{n}" for n in range(QUOTA)])


def held(rig: Rig, subscribers: Subscribers, micros: int = 0) -> None:
    """A publisher is held at this time, and so many microseconds later."""
    backlogs = subscribers.consumers.backlogs
    backlogs.held(rig.topic("orders"))
    subscribers.upkeep()
    for _ in range(10 if micros else 0):
        rig.time.tick(micros // 10)
        backlogs.held(rig.topic("orders"))
        subscribers.upkeep()


def left(rig: Rig, name: str, topic: str = "orders") -> int:
    return rig.topic(topic).statistics.appended_entries - durable(rig, name, topic).entries


@pytest.mark.parametrize("action", [BacklogAction.HOLD, BacklogAction.REJECT])
def test_a_durable_that_holds_publishers_for_long_loses_its_oldest_entries(
    rig: Rig, subscribers: Subscribers, owners: Owners, action: BacklogAction
) -> None:
    """Story: `consume` alone was enough to stop all publishers of a topic, for ever."""
    hold(rig, subscribers, "desk/d", "root/d", action=action)
    held(rig, subscribers, HOLD_MICROS - 10)
    assert left(rig, "desk/d") == QUOTA
    held(rig, subscribers, 100)
    assert left(rig, "desk/d") == 9, "a tenth of the quota is free, as with evict"
    assert left(rig, "root/d") == QUOTA, "its owner may hold"
    assert subscribers.attach("orders", "desk/d").gaps() == [("EVICTED", 0, 1, 1)]


def test_without_an_access_file_a_quota_holds_for_ever(rig: Rig, subscribers: Subscribers) -> None:
    hold(rig, subscribers, "d")
    held(rig, subscribers, 100 * HOLD_MICROS)
    assert left(rig, "d") == QUOTA


def test_a_consumer_that_goes_on_holds_as_long_as_it_takes(rig: Rig, subscribers: Subscribers, owners: Owners) -> None:
    """The quota is there to let publishers wait for a slow consumer."""
    hold(rig, subscribers)
    slow = subscribers.attach("orders", "desk/d")
    subscribers.settle()
    put(rig, *[f"n{n}" for n in range(QUOTA)])
    first = durable(rig, "desk/d").position
    for number in range(1, 6):
        held(rig, subscribers, HOLD_MICROS * 2 // 3)
        subscribers.settle()
        slow.pump()
        slow.acknowledge(first + number)
        subscribers.settle()
        put(rig, f"more{number}")
    held(rig, subscribers)
    assert left(rig, "desk/d") == QUOTA
    assert slow.gaps() == []
    held(rig, subscribers, 2 * HOLD_MICROS)
    assert left(rig, "desk/d") < QUOTA


def test_a_backlog_for_which_nobody_waits_stays(rig: Rig, subscribers: Subscribers, owners: Owners) -> None:
    """Nobody publishes, so nobody is held. A publisher that comes back later is held for the whole time again."""
    hold(rig, subscribers, "desk/d")
    held(rig, subscribers)
    for _ in range(100):
        rig.time.tick(HOLD_MICROS // 2)
        subscribers.upkeep()
    assert left(rig, "desk/d") == QUOTA
    held(rig, subscribers, HOLD_MICROS // 2)
    assert left(rig, "desk/d") == QUOTA


def test_an_owner_cannot_hold_again_by_a_rewind_or_by_another_durable(
    rig: Rig, subscribers: Subscribers, owners: Owners
) -> None:
    """For a time it is not waited for."""
    hold(rig, subscribers, "desk/d", "other/d")
    held(rig, subscribers, HOLD_MICROS + 10)
    assert left(rig, "desk/d") == 9
    rewind(subscribers, name="desk/d")
    put(rig, "more")
    assert left(rig, "desk/d") >= QUOTA
    held(rig, subscribers)
    assert left(rig, "desk/d") < QUOTA, "at once"
    subscribers.attach("orders", "desk/another").close()
    put(rig, *[f"x{n}" for n in range(QUOTA)])
    held(rig, subscribers)
    assert left(rig, "desk/another") < QUOTA
    rig.time.tick((DISTRUST_HOLDS + 1) * HOLD_MICROS)
    subscribers.upkeep()
    put(rig, *[f"y{n}" for n in range(QUOTA)])
    held(rig, subscribers)
    assert left(rig, "desk/d") >= QUOTA, "and after it is"


def test_a_held_publish_is_heard_of_as_long_as_it_waits(rig: Rig, subscribers: Subscribers, owners: Owners) -> None:
    """The publisher that is held gets its place once the time of the durable is over."""
    hold(rig, subscribers, "desk/d")
    backlogs = subscribers.consumers.backlogs
    store = rig.store
    admission = Admission(store.reads, store.writes, backlogs.held)

    async def run() -> None:
        task = asyncio.create_task(admission.admit(Publish("orders", (b"{}",), keys=("k",)), None))
        for _ in range(40):
            await asyncio.sleep(POLL_SECONDS)
            rig.time.tick(HOLD_MICROS // 30)
            subscribers.upkeep()
        assert (await task) is rig.topic("orders")

    with asyncio.Runner(loop_factory=FakeLoop) as runner:
        runner.run(run())
    assert left(rig, "desk/d") == 9


def test_all_publishers_that_wait_go_on_together(rig: Rig, subscribers: Subscribers, owners: Owners) -> None:
    """Story: of 40 that waited at the same time, one went on in each second, for ever."""
    hold(rig, subscribers, "desk/d")
    backlogs, store = subscribers.consumers.backlogs, rig.store
    admission = Admission(store.reads, store.writes, backlogs.held, passed_over=backlogs.passed_over)
    publish = Publish("orders", (b"{}",), keys=("k",))

    async def wait_for_all(tasks: list[asyncio.Task[Topic | None]]) -> None:
        await asyncio.sleep(2 * POLL_SECONDS)
        assert not any(task.done() for task in tasks)
        rig.time.tick(HOLD_MICROS + 1)
        await asyncio.sleep(2 * POLL_SECONDS)
        subscribers.upkeep()  # one look is enough, and none of the requests is written
        await asyncio.sleep(3 * POLL_SECONDS)
        assert all(task.done() for task in tasks)

    async def run() -> None:
        await wait_for_all([asyncio.create_task(admission.admit(publish, None)) for _ in range(4 * QUOTA)])
        put(rig, *[f"x{n}" for n in range(4 * QUOTA)])
        await asyncio.wait_for(admission.admit(publish, None), POLL_SECONDS / 2)
        assert admission.held_total == 4 * QUOTA, "the last one did not wait, although the backlog is beyond the quota"

    with asyncio.Runner(loop_factory=FakeLoop) as runner:
        runner.run(run())
    assert left(rig, "desk/d") >= QUOTA
    subscribers.upkeep()
    assert left(rig, "desk/d") == 9, "what nobody waits for is evicted"


def test_publishers_wait_for_others_while_an_owner_is_not_waited_for(
    rig: Rig, subscribers: Subscribers, owners: Owners
) -> None:
    hold(rig, subscribers, "desk/d", "root/d")
    backlogs, durables, topic = subscribers.consumers.backlogs, rig.store.durables, rig.topic("orders")
    held(rig, subscribers, HOLD_MICROS + 10)
    assert list(backlogs.passed_over(topic)) == ["desk"]
    assert exceeds(durables, topic, 0, passed_over=["desk"])
    assert not exceeds(durables, topic, 0, passed_over=["desk", "root"])
    owners.trusted = {"root", "desk"}
    subscribers.upkeep()
    assert list(backlogs.passed_over(topic)) == [], "it has got topic-admin"


def test_losses_are_logged_once_a_minute_and_counted(rig: Rig, subscribers: Subscribers, owners: Owners) -> None:
    """Story: one line for each eviction, 40 a second."""
    hold(rig, subscribers, "desk/d", "desk/e")
    with structlog.testing.capture_logs() as lines:
        held(rig, subscribers, HOLD_MICROS + 10)
        for second in range(30):
            put(rig, *[f"{second}-{n}" for n in range(QUOTA)])
            rig.time.tick(MICROS)
            subscribers.upkeep()
        rig.time.tick(60 * MICROS)
        subscribers.upkeep()
        rig.time.tick(60 * MICROS)
        subscribers.upkeep()
    told = [line for line in lines if line["event"] == "durable_held_publishers"]
    assert [(line["durable"], line["evictions"]) for line in told] == [("desk/d", 1), ("desk/e", 61)]


def test_a_refused_publish_is_heard_of(rig: Rig, subscribers: Subscribers, owners: Owners) -> None:
    hold(rig, subscribers, "desk/d", action=BacklogAction.REJECT)
    heard: list[str] = []
    store = rig.store
    admission = Admission(store.reads, store.writes, lambda topic: heard.append(topic.name))
    with pytest.raises(StoreError) as refused:
        asyncio.run(admission.admit(Publish("orders", (b"{}",), keys=("k",)), None))
    assert refused.value.reason is Reason.BACKLOG_QUOTA_EXCEEDED
    assert heard == ["orders"]


# --- bytes -----------------------------------------------------------------------------------------------------------


def small_retention(rig: Rig, *topics: str) -> None:
    for topic in topics:
        if topic != "orders":
            rig.create_topic(topic)
        rig.alter_topic(topic, retain_bytes=1, retain_time_micros=MICROS)


def kept(rig: Rig, name: str, topic: str = "orders") -> int:
    return rig.topic(topic).statistics.appended_bytes - durable(rig, name, topic).bytes


def test_the_durables_of_an_owner_keep_at_most_its_backlog_bytes(
    rig: Rig, subscribers: Subscribers, owners: Owners
) -> None:
    """Story: a durable that acknowledged nothing kept the whole journal, under any retention, until the disk was
    full. The one with the largest backlog loses entries."""
    small_retention(rig, "orders", "quotes")
    for topic, name in (("orders", "desk/a"), ("orders", "desk/b"), ("quotes", "desk/a"), ("orders", "root/d")):
        subscribers.attach(topic, name).close()
    subscribers.settle()
    put(rig, *[f"{n}" for n in range(100)])
    put(rig, *[f"{n}" for n in range(10)], topic="quotes")
    rig.time.tick(10 * MICROS)
    whole = kept(rig, "desk/a")
    each = whole // 100
    owners.bytes["desk"] = 60 * each
    subscribers.upkeep()
    assert left(rig, "desk/a", "quotes") == 10, "the small one keeps what it has"
    assert 0 < kept(rig, "desk/a") <= (54 - 10) * each
    assert kept(rig, "desk/b") == kept(rig, "desk/a"), "what one keeps costs nothing more for another one"
    assert kept(rig, "root/d") == whole
    before = kept(rig, "desk/a")
    subscribers.upkeep()
    assert kept(rig, "desk/a") == before
    ((reason, after, _, entries),) = subscribers.attach("orders", "desk/a").gaps()
    assert (reason, after) == ("EVICTED", durable(rig, "root/d").position)
    assert entries >= 56


def test_entries_that_the_topic_retains_anyway_stay(rig: Rig, subscribers: Subscribers, owners: Owners) -> None:
    rig.alter_topic("orders", retain_bytes=2**30, retain_time_micros=HOLD_MICROS)
    subscribers.attach("orders", "desk/d").close()
    put(rig, *[f"{n}" for n in range(100)])
    owners.bytes["desk"] = 1
    subscribers.upkeep()
    assert left(rig, "desk/d") == 100
    rig.time.tick(HOLD_MICROS)
    subscribers.upkeep()
    assert left(rig, "desk/d") < 100


def test_a_durable_without_an_owner_is_bounded_like_others(rig: Rig, subscribers: Subscribers, owners: Owners) -> None:
    """From before the access file: everybody who may consume reaches it."""
    small_retention(rig, "orders")
    subscribers.attach("orders", "old").close()
    put(rig, *[f"{n}" for n in range(100)])
    rig.time.tick(10 * MICROS)
    subscribers.upkeep()
    assert left(rig, "old") == 100, "no limit is given"
    owners.bytes[""] = 1
    subscribers.upkeep()
    assert left(rig, "old") < 100


@pytest.mark.parametrize(
    ("sizes", "bytes_max", "found"),
    [([], 10, 0), ([5], 10, 5), ([50], 10, 10), ([1, 2, 100], 30, 27), ([40, 40, 1], 41, 20), ([3, 3, 3], 9, 3)],
)
def test_the_largest_shrink_to_one_level(sizes: list[int], bytes_max: int, found: int) -> None:
    assert level(sizes, bytes_max) == found
    assert sum(min(size, found) for size in sizes) <= bytes_max
