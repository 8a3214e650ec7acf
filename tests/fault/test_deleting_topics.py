"""A topic is deleted while it is pruned, swept, written to, subscribed to and rewound (rule T5): in many orders, and by
threads. It leaves nothing behind, and does not affect other topics."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sow_server.engine.disk.rocks import FAMILIES, META
from sow_server.engine.durables import RewindTo
from sow_server.engine.pending import Pending
from sow_server.engine.store import Store
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Applied,
    Expiration,
    Lifetime,
    LifetimeKind,
    Outcome,
    Publish,
    TopicSettings,
)
from sow_server.engine.values.policies import declared_of
from tests.support.oracles.examples import examples
from tests.support.stores.stores import SECOND, Rig
from tests.support.stores.subscribers import Follower, Subscribers

SETTINGS = TopicSettings(expiration=Expiration.ENABLED, index=("/n",), dead_letter="dead", retain_time_micros=SECOND)
PLAIN = TopicSettings(expiration=Expiration.ENABLED)
STEPS = ("delete", "prune", "sweep", "publish", "subscribe", "rewind")
TTL = 10 * SECOND
ROUNDS = examples(80)
ORDERS_STEP = 7
"""Of the 720 orders every n-th: each step comes before and after each other."""


def publish(topic: str, *, ttl: int, keys: int = 3, atomic: bool = False, results: bool = False) -> Publish:
    payloads = [b'{"n":%d}' % number for number in range(keys)]
    names = [str(number) for number in range(keys)]
    lifetime = Lifetime(LifetimeKind.TTL, ttl)
    return Publish(topic, payloads, names, lifetime=lifetime, atomic=atomic, want_results=results)


def rows_of(rig: Rig, topic_id: int) -> list[tuple[str, bytes]]:
    """The rows of a topic that are still stored; entries of the expiry index are the sweep's to drop."""
    prefix = topic_id.to_bytes(4, "big")
    left = [
        (family, key)
        for family in FAMILIES
        if family not in (META, "expiry", "commits")
        for key, _ in rig.rows(family, prefix, (topic_id + 1).to_bytes(4, "big"))
    ]
    return left + [(META, key) for key, _ in rig.rows(META) if key.partition(b"/")[2].startswith(prefix)]


def test_in_many_orders(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create_topic("dead", PLAIN)
    rig.create_topic("neighbour", PLAIN)
    rig.put("neighbour", "k", b"{}")
    subscribers = Subscribers(rig)
    orders = itertools.islice(itertools.permutations(STEPS), None, None, ORDERS_STEP)
    copies = sum(delete_amid(rig, subscribers, order) for order in orders)
    assert rig.get("neighbour", "k") is not None
    assert len(rig.live("dead")) == copies, "each expired record has left one dead letter"
    rig.crash()
    assert len(rig.live("dead")) == copies
    assert set(rig.store.topics.by_name) == {"_undelivered", "dead", "neighbour"}


def delete_amid(rig: Rig, subscribers: Subscribers, order: Sequence[str]) -> int:
    """Makes a topic and does the steps to it; returns how many of its records have expired and were nobody's: one that
    is due at once and was for a subscriber is no dead letter (rule L7)."""
    store, topic = rig.store, rig.create_topic("t", SETTINGS)
    answers: list[object] = []
    followers: list[Follower] = []
    store.durable_commits.change(
        lambda staged: staged.attach(topic, "d", filter_text="", start=None, declared=None, expected=False),
    ).then(answers.append)
    rig.run(publish("t", ttl=TTL))
    rig.time.tick(TTL)  # all of it is overdue, and to be pruned
    steps: dict[str, Callable[[], object]] = {
        "delete": lambda: store.administration.delete_topic("t").then(answers.append),
        "prune": lambda: store.upkeep.prune().then(answers.append),
        "sweep": store.writer.sweep_now,
        "publish": lambda: store.commits.submit(publish("t", ttl=0, atomic=True, results=True)).then(answers.append),
        "subscribe": lambda: subscribe(subscribers, followers),
        "rewind": lambda: store.durable_commits.change(lambda staged: staged.rewind(topic, "d", RewindTo())).then(
            answers.append
        ),
    }
    for number, step in enumerate(order):
        steps[step]()
        if number % 2 and store.writer.queue.depth[0]:
            rig.turn()  # some of the requests are done in between, some later
    store.writer.step()
    assert store.writer.queue.failure is None, order
    assert "t" not in store.topics.by_name, order
    subscribers.settle()
    for follower in followers:
        follower.pump()
        assert follower.error is not None, order
        assert follower.error.reason is Reason.TOPIC_DELETED, order
    written = order.index("publish") < order.index("delete")
    refused = [answer.reason for answer in answers if isinstance(answer, StoreError)]
    assert set(refused) <= {Reason.TOPIC_NOT_FOUND, Reason.DURABLE_NOT_FOUND}, order
    assert (Reason.TOPIC_NOT_FOUND in refused) or written, order
    store.sweep()
    assert rows_of(rig, topic.id) == [], order
    results = [result for answer in answers if isinstance(answer, Outcome) for result in answer.results or ()]
    assert len(results) == (3 if written else 0), order
    return 3 + sum(isinstance(result, Applied) and not result.delivered for result in results)


def subscribe(subscribers: Subscribers, into: list[Follower]) -> None:
    """Subscribes, unless the topic is gone."""
    if "t" in subscribers.rig.store.topics.by_name:
        into.append(subscribers.subscribe("t", oof=True, settled=False))


def test_by_threads(tmp_path: Path) -> None:
    """With the writer's thread, its own sweeps, and no order at all."""
    store = Store.open(tmp_path / "data", clock=GuardedClock())
    store.start(lambda answer: answer())
    unexpected: list[object] = []
    done = threading.Event()
    try:
        wait(lambda: store.administration.create_topic("neighbour", declared_of(PLAIN)))
        wait(lambda: store.administration.create_topic("dead", declared_of(PLAIN)))
        threads = [
            threading.Thread(target=run, args=(step, done, unexpected))
            for step in (
                lambda: wait(lambda: store.commits.submit(publish("t", ttl=1))),
                lambda: wait(lambda: store.commits.submit(publish("t", ttl=0, atomic=True))),
                lambda: wait(lambda: store.commits.submit(publish("neighbour", ttl=60 * SECOND))),
                lambda: wait(store.upkeep.prune),
                lambda: read(store),
            )
        ]
        for thread in threads:
            thread.start()
        for _ in range(ROUNDS):
            created = wait(lambda: store.administration.create_topic("t", declared_of(SETTINGS)))
            assert not isinstance(created, StoreError), created
            for _ in range(3):
                wait(lambda: store.commits.submit(publish("t", ttl=2000)))
            deleted = wait(lambda: store.administration.delete_topic("t"))
            assert isinstance(deleted, int), deleted
        done.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert unexpected == []
        assert store.writer.queue.failure is None
        assert store.cuts.count(store.topics.find("neighbour")) == 3
        assert store.cuts.count(store.topics.find("dead")) > ROUNDS
    finally:
        done.set()
        store.close()
    reopened = Store.open(tmp_path / "data", clock=GuardedClock())
    try:
        assert set(reopened.topics.by_name) == {"_undelivered", "dead", "neighbour"}
    finally:
        reopened.close()


def wait(start: Callable[[], Pending[Any]]) -> object:
    """Starts something and waits for its answer, which may be a refusal."""
    heard, answers = threading.Event(), []

    def hear(answer: object) -> None:
        answers.append(answer)
        heard.set()

    try:
        start().then(hear)
    except StoreError as error:
        return error
    assert heard.wait(30), "every request is answered"
    return answers[0]


def run(step: Callable[[], object], done: threading.Event, unexpected: list[object]) -> None:
    """Does a step again and again; keeps unexpected errors."""
    while not done.is_set():
        try:
            result = step()
        except Exception as error:
            result = error
        known = (Reason.TOPIC_NOT_FOUND, Reason.OVERLOADED)
        if isinstance(result, Exception) and not (isinstance(result, StoreError) and result.reason in known):
            unexpected.append(result)


def read(store: Store) -> None:
    """A query and a count of whatever is there."""
    topic = store.topics.find("t")
    cut = store.cuts.records(topic, counted=True)
    try:
        cut.fill(topic.prefix, 100, [], [])
        assert cut.total is not None
    finally:
        cut.close()
    store.cuts.count(topic)


@pytest.mark.parametrize("prefix", [b"topic/", b"stats/", b"rearm/", b"deliver/"])
def test_the_search_of_these_tests_finds_rows_of_topics(tmp_path: Path, prefix: bytes) -> None:
    """So that `rows_of` cannot look past them."""
    rig = Rig(tmp_path)
    topic = rig.create_topic("t", PLAIN)
    found = {key for family, key in rows_of(rig, topic.id) if family == META}
    assert (prefix + topic.prefix in found) == (prefix in (b"topic/", b"stats/"))
