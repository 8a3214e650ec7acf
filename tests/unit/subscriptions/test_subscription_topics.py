"""The topics of a subscription, its options and bounds, and its end (S1 to S7)."""

from __future__ import annotations

from typing import Final

import pytest

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Delete, Durability, MessageType, Publish, TopicSettings
from sow_server.subscriptions.frames import Progress
from sow_server.subscriptions.live.groups import Member
from sow_server.subscriptions.request import Start, StartKind
from tests.support.stores.stores import Rig
from tests.support.stores.subscribers import EARLIEST, JSON, Follower, Subscribers, at, px, refused, rig, subscribers

__all__ = ["rig", "subscribers"]  # fixtures


# --- several topics --------------------------------------------------------------------------------------------------


def test_a_pattern_follows_topics_in_one_order_and_new_ones_too(rig: Rig, subscribers: Subscribers) -> None:
    rig.create_topic("orders.b", JSON)
    rig.create_topic("other", JSON)
    rig.put("orders", "s", px(1))
    rig.put("orders.b", "s", px(2))
    follower = subscribers.subscribe(pattern=r"orders.*", sow=True, oof=True)
    rig.run_together(
        [
            Publish("orders", [px(1)], ["a"]),
            Publish("other", [px(1)], ["a"]),
            Publish("orders.b", [px(2)], ["a"]),
            Publish("orders", [px(3)], ["b"]),
        ]
    )
    rig.create_topic("orders.c", JSON, journal=False)
    rig.put("orders.c", "a", px(4))
    rig.delete("orders.c", "a")
    assert follower.news() == [
        ("put", "a", px(1)),
        ("put", "a", px(2)),
        ("put", "b", px(3)),
        ("put", "a", px(4)),
        ("oof deleted", "a", px(4)),
    ]
    frames = [(frame.topic, len(frame.rows)) for frame in follower.change_frames()]
    assert frames == [("orders", 1), ("orders.b", 1), ("orders", 1), ("orders.c", 1), ("orders.c", 1)]
    assert [row.sequence for row in follower.changes()] == [3, 5, 6, 7, 8]


def test_a_pattern_resumes_in_the_total_order(rig: Rig, subscribers: Subscribers) -> None:
    """J1, and a topic that was created since is told from its beginning."""
    rig.create_topic("orders.b", JSON)
    live = subscribers.subscribe(pattern=r"orders.*", oof=True)
    start = rig.store.writer.last_sequence
    for number in range(5):
        rig.run_together([Publish("orders", [px(number)], ["a"]), Publish("orders.b", [px(number)], ["a"])])
    rig.create_topic("orders.c", JSON)
    rig.run_together([Delete("orders", ["a"]), Publish("orders.c", [px(7)], ["a"])])
    wanted = live.news()
    assert len(wanted) == 12
    replayed = subscribers.subscribe(pattern=r"orders.*", oof=True, start=at(start, rig))
    assert replayed.news() == wanted
    assert [row.sequence for row in replayed.changes()] == [row.sequence for row in live.changes()]
    assert subscribers.subscribe(pattern=r"orders.*", oof=True, start=EARLIEST).news() == wanted


def test_a_pattern_must_match_whole_names_and_something(rig: Rig, subscribers: Subscribers) -> None:
    assert refused(subscribers.subscribe, pattern="order").reason is Reason.PATTERN_MATCHES_NOTHING
    for bad in ("(", "a)|(orders", "x" * 1001):
        error = refused(subscribers.subscribe, pattern=bad)
        assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "topic_pattern")


def test_a_deleted_topic_ends_its_subscription_after_its_earlier_changes(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders")
    rig.create_topic("orders.b", JSON)
    several = subscribers.subscribe(pattern="orders.*")
    rig.put("orders", "a", px(1))
    rig.delete_topic("orders")
    rig.create_topic("orders", JSON)
    rig.put("orders", "b", px(2))
    assert follower.news() == [("put", "a", px(1))]
    assert follower.error is not None
    assert follower.error.reason is Reason.TOPIC_DELETED
    assert several.news() == [("put", "a", px(1)), ("put", "b", px(2))]
    assert several.error is None


def test_deleting_a_topic_during_a_subscribe_call_ends_the_call_with_an_error(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's thread may delete it between the look-up and the registration: of a topic that was not there any
    more nobody was registered, and the subscription stood for ever without a word."""
    dispatcher = subscribers.hub.dispatcher
    register = dispatcher.register

    def too_late(member: Member) -> bool:
        rig.delete_topic("orders")
        return register(member)

    monkeypatch.setattr(dispatcher, "register", too_late)
    assert refused(subscribers.subscribe, "orders").reason is Reason.TOPIC_DELETED
    assert subscribers.hub.count == 0


def test_a_topic_that_is_changed_while_somebody_subscribes_is_looked_at_anew(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise: it failed when its turn to attach came, and with it the dispatching of everything else."""
    dispatcher = subscribers.hub.dispatcher
    register = dispatcher.register

    def too_late(member: Member) -> bool:
        rig.alter_topic("orders", message_type=MessageType.BINARY)
        return register(member)

    monkeypatch.setattr(dispatcher, "register", too_late)
    error = refused(subscribers.subscribe, "orders", filter="/px > 1", start=EARLIEST)
    assert error.reason is Reason.UNSUPPORTED_FOR_MESSAGE_TYPE
    assert subscribers.hub.count == 0


def test_a_topic_of_another_kind_does_not_come_into_a_pattern(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe(pattern="orders.*", filter="/px > 0", sow=True)
    rig.create_topic("orders.blobs", TopicSettings(message_type=MessageType.BINARY))
    rig.put("orders.blobs", "a", b"\0")
    rig.put("orders", "a", px(1))
    assert follower.news() == [("put", "a", px(1))]
    error = refused(subscribers.subscribe, pattern="orders.*", filter="/px > 0")
    assert error.reason is Reason.UNSUPPORTED_FOR_MESSAGE_TYPE


def test_a_topic_that_gets_other_key_fields_has_to_be_subscribed_to_anew(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders", filter="/px > 1")
    rig.alter_topic("orders", key=("/id",))
    follower.news()
    assert follower.error is not None
    assert follower.error.reason is Reason.RESYNC_REQUIRED


def test_switching_the_journal_off_leaves_live_subscribers_alone(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders", oof=True)
    rig.put("orders", "a", px(1))
    rig.alter_topic("orders", journal=False)
    rig.put("orders", "a", px(2))
    rig.alter_topic("orders", journal=True)
    rig.delete("orders", "a")
    assert follower.news() == [("put", "a", px(1)), ("put", "a", px(2)), ("oof deleted", "a", px(2))]


# --- options, bounds, the end ----------------------------------------------------------------------------------------


CONTRADICTIONS: Final[list[tuple[dict[str, object], str, str]]] = [
    ({}, "topic", "topic_pattern"),
    ({"topic": "orders", "pattern": "orders"}, "topic", "topic_pattern"),
    ({"topic": "orders", "sow": True, "start": EARLIEST}, "sow", "earliest"),
    ({"topic": "orders", "sow": True, "start": Start(StartKind.TIME)}, "sow", "start_time_micros"),
    ({"topic": "orders", "sow": True, "start": Start(StartKind.BOOKMARK)}, "sow", "bookmark"),
    ({"topic": "orders", "changes": True, "oof": True}, "changes", "oof"),
    ({"topic": "orders", "changes": True, "delta": True}, "changes", "delta"),
    ({"topic": "orders", "changes": True, "conflation": 5}, "changes", "conflation_micros"),
    ({"topic": "orders", "delta": True, "include": ["/px"]}, "delta", "select"),
    ({"topic": "orders", "empty_deltas": True}, "empty_deltas", "delta"),
    ({"topic": "orders", "conflation": -1}, "conflation_micros", "0"),
    ({"topic": "orders", "progress": 99_999}, "progress_micros", "100000"),
    ({"topic": "orders", "batch_size": 10_001}, "batch_size", "10000"),
    ({"topic": "orders", "start": Start(StartKind.TIME, time_micros=-1)}, "start_time_micros", "negative"),
]
"""Options, the field that is named, and what the message names too."""


def test_options_that_contradict_each_other_are_refused(subscribers: Subscribers) -> None:
    for options, field, other in CONTRADICTIONS:
        error = refused(subscribers.subscribe, **options)
        assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, field), options
        assert other in error.message, options


def test_filters_are_checked(rig: Rig, subscribers: Subscribers) -> None:
    rig.create_topic("blobs")
    assert refused(subscribers.subscribe, "orders", filter="/px >").reason is Reason.FILTER_INVALID
    error = refused(subscribers.subscribe, "orders", filter="@expire_time > NOW_MICROS()")
    assert error.reason is Reason.FILTER_INVALID
    unsupported = Reason.UNSUPPORTED_FOR_MESSAGE_TYPE
    assert refused(subscribers.subscribe, "blobs", filter="/px > 1").reason is unsupported
    assert refused(subscribers.subscribe, "blobs", delta=True).reason is unsupported
    assert refused(subscribers.subscribe, "blobs", include=["/px"]).reason is unsupported
    assert subscribers.subscribe("blobs", filter="@key = 'a'").error is None
    assert refused(subscribers.subscribe, "nothing").reason is Reason.TOPIC_NOT_FOUND
    assert subscribers.hub.count == 1
    assert (rig.topic("orders").followers, rig.topic("blobs").followers) == (0, 1)


def test_subscriptions_are_bounded(rig: Rig) -> None:
    subscribers = Subscribers(rig, subscriptions_max=2)
    first = subscribers.subscribe("orders")
    subscribers.subscribe("orders")
    assert refused(subscribers.subscribe, "orders").reason is Reason.OVERLOADED
    first.close()
    assert subscribers.subscribe("orders").error is None


def test_a_stop_ends_every_stream_with_a_bookmark(rig: Rig, subscribers: Subscribers) -> None:
    followers = [subscribers.subscribe("orders", sow=sow) for sow in (False, True)]
    rig.put("orders", "a", px(1))
    for follower in followers:
        follower.news()
    subscribers.hub.stop()
    for follower in followers:
        follower.pump()
        assert follower.frames[-1] == Progress(1, rig.clock.now_micros())
        assert follower.error is not None
        assert follower.error.reason is Reason.STOPPING
    assert refused(subscribers.subscribe, "orders").reason is Reason.STOPPING


def test_a_subscriber_that_leaves_leaves_no_state_behind(rig: Rig, subscribers: Subscribers) -> None:
    followers: list[Follower] = [
        subscribers.subscribe("orders", filter="/px = 5", oof=True),
        subscribers.subscribe("orders", filter="/px > 5", delta=True),
        subscribers.subscribe(pattern="o.*", sow=True),
        subscribers.subscribe("orders", start=at(0, rig), settled=False),
        subscribers.subscribe("orders", sow=True, settled=False),
    ]
    rig.put("orders", "a", px(5))
    for follower in followers:
        follower.close()
    dispatcher = subscribers.hub.dispatcher
    assert (subscribers.hub.count, dispatcher.group_count, dispatcher._topics, dispatcher._several) == (0, 0, {}, ())
    assert (rig.topic("orders").followers, rig.topic("orders").previous_wanted) == (0, 0)
    rig.create_topic("others", JSON)
    assert rig.topic("others").followers == 0
    subscribers.settle()


def test_a_new_subscription_on_a_failed_store_gets_its_error(rig: Rig, subscribers: Subscribers) -> None:
    """X3: its first changes may never become durable."""
    rig.run(Publish("orders", [px(1)], ["a"], durability=Durability.BUFFERED))
    rig.store.writer.fail(StoreError(Reason.STORE_FAILED, "for the test"))
    follower = subscribers.subscribe("orders", sow=True, settled=False)
    follower.pump()
    assert follower.error is not None
    assert follower.error.reason is Reason.STORE_FAILED


def test_a_fault_while_giving_out_ends_the_subscriptions_and_later_ones_go_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dispatch [5]. An exception between two slices left the backlog where it was until the next commit, and
    those who follow waiting."""
    subscribers = Subscribers(rig)
    follower = subscribers.subscribe("orders")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(subscribers.hub.dispatcher, "_flush", broken)
        rig.put("orders", "a", b'{"px":1}')
        subscribers.settle()
    follower.pump()
    assert follower.error is not None
    assert follower.error.reason is Reason.INTERNAL
    later = subscribers.subscribe("orders")
    rig.put("orders", "b", b'{"px":2}')
    subscribers.settle()
    assert later.news() == [("put", "b", b'{"px":2}')]
