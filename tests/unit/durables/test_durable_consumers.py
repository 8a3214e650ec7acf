"""Consumers of durables: their start, their acknowledgements, and events meanwhile (J2, J10)."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest

from sow_server.engine.disk.rocks import META
from sow_server.engine.durables import Durable, DurableEditor
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.subscriptions.request import FROM_NOW, Start, StartKind
from tests.support.stores.durables import JSON, TO_EARLIEST, delete, durable, floor, put, refused, rig
from tests.support.stores.stores import HOUR, MINUTE, SECOND, Rig, no_drafts_left
from tests.support.stores.subscribers import EARLIEST, Subscribers, at, subscribers

__all__ = ["rig", "subscribers"]  # fixtures


# --- consuming (J2) --------------------------------------------------------------------------------------------------


def test_a_new_durable_begins_now_and_a_returning_client_continues_after_its_acknowledgements(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J2: cumulative acknowledgement; unacknowledged changes come again."""
    put(rig, "before")
    first = subscribers.attach("orders", "d")
    assert (first.begun.sequence, first.begun.created, first.begun.reset) == (1, True, False)
    put(rig, "a", "b", "c")
    assert [key for _, key, _ in first.news()] == ["a", "b", "c"]
    assert first.acknowledge(3).position == 3
    first.close()
    subscribers.settle()
    put(rig, "d")
    second = subscribers.attach("orders", "d", start=EARLIEST)
    assert (second.begun.sequence, second.begun.created, second.begun.reset) == (3, False, False)
    assert second.got() == [4, 5], "a start counts only when it is created"
    assert second.acknowledge(2).position == 3, "positions below the present one change nothing"


@pytest.mark.parametrize(
    ("start", "expected"), [("now", []), ("earliest", [1, 2, 3]), ("bookmark", [2, 3]), ("time", [3])]
)
def test_it_begins_where_it_was_asked_to(rig: Rig, subscribers: Subscribers, start: str, expected: list[int]) -> None:
    """J2, S4."""
    put(rig, "a", "b")
    rig.time.tick(SECOND)
    put(rig, "c")
    time = Start(StartKind.TIME, time_micros=rig.clock.now_micros())
    starts = {"now": FROM_NOW, "earliest": EARLIEST, "bookmark": at(1, rig), "time": time}
    assert subscribers.attach("orders", "d", start=starts[start]).got() == expected


def test_no_commit_about_a_durable_is_left_to_the_garbage_collector(rig: Rig, subscribers: Subscribers) -> None:
    """See the test of the writer."""
    with no_drafts_left():
        follower = subscribers.attach("orders", "d")
        put(rig, "a", "b")
        follower.news()
        follower.acknowledge(1)
        follower.close()
        subscribers.settle()


def test_positions_survive_a_crash(rig: Rig, subscribers: Subscribers) -> None:
    """J2: the acknowledgement is in a commit of its own, synced before it is answered."""
    follower = subscribers.attach("orders", "d", filter="/px > 0")
    put(rig, "a", "b")
    follower.news()
    follower.acknowledge(1)
    rig.crash()
    assert (durable(rig).position, durable(rig).filter) == (1, "/px > 0")
    again = Subscribers(rig).attach("orders", "d", filter="/px > 0")
    assert again.got() == [2]


def test_one_consumer_at_a_time_and_force_takes_over(rig: Rig, subscribers: Subscribers) -> None:
    """J2: the stream before ends, and its late acknowledgement does not count."""
    first = subscribers.attach("orders", "d")
    put(rig, "a")
    first.news()
    with pytest.raises(StoreError) as error:
        subscribers.attach("orders", "d")
    assert refused(error) is Reason.DURABLE_IN_USE
    second = subscribers.attach("orders", "d", force=True)
    first.pump()
    assert first.error is not None
    assert first.error.reason is Reason.DURABLE_TAKEN_OVER
    assert second.got() == [1]
    with pytest.raises(StoreError) as error:
        first.acknowledge(1)
    assert refused(error) is Reason.DURABLE_TAKEN_OVER
    assert durable(rig).position == 0
    assert second.acknowledge().position == 1


def test_a_consumer_that_leaves_makes_room_while_its_stream_still_ends(rig: Rig, subscribers: Subscribers) -> None:
    """J2: what it was handed can still be acknowledged, until the next consumer is there."""
    first = subscribers.attach("orders", "d")
    put(rig, "a", "b")
    first.news()
    for session in ("another", first.begun.session):
        subscribers.consumers.leave(rig.topic("orders"), "d", session)
    first.acknowledge(1)
    second = subscribers.attach("orders", "d")
    first.pump()
    assert first.error is not None
    assert first.error.reason is Reason.DURABLE_DETACHED
    first.close()
    subscribers.consumers.leave(rig.topic("orders"), "d", first.begun.session)
    assert second.got() == [2]
    assert subscribers.consumers.is_attached(rig.topic("orders"), "d")


def test_another_filter_or_other_settings_under_its_name_are_refused(rig: Rig, subscribers: Subscribers) -> None:
    """J2: and the consumer that is attached stays."""
    first = subscribers.attach("orders", "d", filter="/px > 1", declared={"retain_bytes": 10})
    for other in ({"filter": "/px > 2"}, {"filter": "/px > 1", "declared": {"retain_bytes": 11}}):
        with pytest.raises(StoreError) as error:
            subscribers.attach("orders", "d", force=True, **other)
        assert refused(error) is Reason.DURABLE_DIFFERS
    assert first.pump() == []
    assert first.error is None
    first.close()
    assert not subscribers.attach("orders", "d", filter="( /px > 1 )").begun.created


def test_changes_that_were_not_delivered_cannot_be_acknowledged(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.attach("orders", "d")
    put(rig, "a", "b")
    with pytest.raises(StoreError) as error:
        follower.acknowledge(2)
    assert refused(error) is Reason.BOOKMARK_IN_FUTURE
    follower.news()
    follower.close()
    subscribers.settle()
    assert follower.acknowledge(2).position == 2, "also just after its stream has ended"


def test_a_topic_without_a_journal_has_no_durables_and_a_name_has_its_characters(
    rig: Rig, subscribers: Subscribers
) -> None:
    rig.create_topic("quiet", journal=False)
    with pytest.raises(StoreError) as error:
        subscribers.attach("quiet", "d")
    assert refused(error) is Reason.NO_JOURNAL
    with pytest.raises(StoreError) as error:
        subscribers.attach("orders", "a b")
    assert refused(error) is Reason.INVALID_ARGUMENT
    assert not subscribers.consumers.attached_count


def test_of_a_consumer_that_has_gone_only_what_it_may_acknowledge_stays(rig: Rig, subscribers: Subscribers) -> None:
    """J2: its subscription is not kept, once for each durable."""
    follower = subscribers.attach("orders", "d")
    put(rig, "a", "b")
    follower.news()
    session, gone = follower.begun.session, weakref.ref(follower.consumer)
    follower.close()
    del follower
    subscribers.settle()
    gc.collect()
    assert gone() is None
    answers: list[Durable | StoreError] = []
    subscribers.consumers.acknowledge(rig.topic("orders"), "d", session, 1).then(answers.append)
    assert subscribers.answer(answers).position == 1
    subscribers.consumers.acknowledge(rig.topic("orders"), "d", session, 2).then(answers.append)
    subscribers.settle()
    assert durable(rig).position == 2
    with pytest.raises(StoreError) as error:
        subscribers.consumers.acknowledge(rig.topic("orders"), "d", session, 3).then(answers.append)
    assert error.value.reason is Reason.BOOKMARK_IN_FUTURE


def test_durables_are_counted_by_their_owner(rig: Rig, subscribers: Subscribers) -> None:
    """A7: for the limit of an identity, also after a start and once a topic has gone."""
    rig.create_topic("trades", JSON)
    for topic, name in (("orders", "desk/a"), ("orders", "b"), ("trades", "desk/a"), ("trades", "other/a")):
        subscribers.attach(topic, name).close()
    subscribers.settle()
    owners = ("desk", "other", "b", "")
    assert [rig.store.durables.count_owned(owner) for owner in owners] == [2, 1, 0, 0]
    rig.crash()
    assert [rig.store.durables.count_owned(owner) for owner in owners] == [2, 1, 0, 0]
    rig.delete_topic("trades")
    assert [rig.store.durables.count_owned(owner) for owner in owners] == [1, 0, 0, 0]


def test_deleting_a_topic_ends_its_consumers_and_removes_its_durables(rig: Rig, subscribers: Subscribers) -> None:
    """T5."""
    follower = subscribers.attach("orders", "d")
    rig.delete_topic("orders")
    subscribers.settle()
    follower.pump()
    assert follower.error is not None
    assert follower.error.reason is Reason.TOPIC_DELETED
    subscribers.settle()
    rig.create_topic("orders", JSON)
    assert subscribers.attach("orders", "d").begun.reset is False
    assert subscribers.attach("orders", "e", expected=True).begun.reset, "the client remembers more than the server can"
    rig.crash()
    assert [found.name for found in rig.store.durables.of(rig.topic("orders"))] == ["d", "e"]


# --- changes that a filter leaves out (J2) ---------------------------------------------------------------------------


def test_the_position_advances_over_changes_that_the_filter_leaves_out(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.attach("orders", "d", filter="/px > 1")
    put(rig, "a", "b", px=1)
    put(rig, "c", px=2)
    put(rig, "d", px=1)
    assert [key for _, key, _ in follower.news()] == ["c"]
    rig.time.tick(10 * SECOND)
    follower.news()
    assert durable(rig).position == 0, "c is not acknowledged"
    assert follower.acknowledge(3).position == 4, "nothing that was handed over is left"
    put(rig, "e", px=1)
    follower.news()
    rig.time.tick(10 * SECOND)
    follower.news()
    subscribers.settle()
    assert durable(rig).position == 5


def test_a_rare_filter_does_not_pin_a_topic(rig: Rig, subscribers: Subscribers) -> None:
    """J2: the detached durable that holds the floor is scanned at prune time, up to its first wanted entry."""
    rig.alter_topic("orders", retain_time_micros=MINUTE)
    subscribers.attach("orders", "d", filter="/px > 1").close()
    subscribers.settle()
    put(rig, "a", "b", px=1)
    rig.time.tick(MINUTE)
    rig.prune()
    assert floor(rig) == 0
    subscribers.scan()
    assert (durable(rig).position, floor(rig)) == (2, 2)
    put(rig, "c", px=2)
    put(rig, "d", px=1)
    rig.time.tick(MINUTE)
    subscribers.scan()
    rig.prune()
    assert (durable(rig).position, floor(rig)) == (2, 2), "c is for it"
    assert [key for _, key, _ in subscribers.attach("orders", "d", filter="/px > 1").news()] == ["c"]


def test_a_record_that_leaves_the_filter_is_not_scanned_away(rig: Rig, subscribers: Subscribers) -> None:
    """J2, S2: its consumer may want to hear of it."""
    put(rig, "a", px=2)
    subscribers.attach("orders", "d", filter="/px > 1").close()
    subscribers.settle()
    put(rig, "a", px=1)
    subscribers.scan()
    assert durable(rig).position == 1


# --- idleness (J10; Pulsar 8) ----------------------------------------------------------------------------------------


def test_an_idle_durable_is_removed_and_its_client_gets_a_gap(rig: Rig, subscribers: Subscribers) -> None:
    """arrebato 1, arrebato 4, J10: neither attached nor acknowledging."""
    rig.alter_topic("orders", durable_idle_ttl_micros=MINUTE)
    follower = subscribers.attach("orders", "d")
    rig.time.tick(HOUR)
    subscribers.upkeep()
    follower.close()
    subscribers.settle()
    rig.time.tick(MINUTE - 1)
    subscribers.upkeep()
    assert durable(rig).position == 0
    rig.time.tick(1)
    subscribers.upkeep()
    assert rig.store.durables.of(rig.topic("orders")) == []
    again = subscribers.attach("orders", "d")
    assert (again.begun.created, again.begun.reset) == (True, True)


def test_a_crash_is_no_idleness_and_a_restart_does_not_make_young(rig: Rig, subscribers: Subscribers) -> None:
    """J10: who was attached then is idle from the start on; who was not has been idle all the time."""
    rig.alter_topic("orders", durable_idle_ttl_micros=HOUR)
    subscribers.attach("orders", "away").close()
    subscribers.attach("orders", "here")
    rig.time.tick(HOUR)
    rig.crash()
    after = Subscribers(rig)
    after.settle()
    after.upkeep()
    assert [found.name for found in rig.store.durables.of(rig.topic("orders"))] == ["here"]
    rig.time.tick(HOUR)
    after.upkeep()
    assert rig.store.durables.of(rig.topic("orders")) == []


def test_names_of_removed_durables_are_forgotten_in_the_end(rig: Rig, subscribers: Subscribers) -> None:
    subscribers.attach("orders", "d").close()
    delete(subscribers)
    rig.time.tick(31 * 24 * HOUR)
    rig.clock.accept()
    rig.store.durable_commits.forget_removed()
    rig.store.writer.step()
    assert rig.rows(META, b"durable/", b"durable0") == []
    assert not subscribers.attach("orders", "d").begun.reset


# --- at the same time ------------------------------------------------------------------------------------------------


def test_a_refused_takeover_leaves_no_consumer_attached(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J10. The row still said that somebody was there, so that it was never idle."""
    rig.alter_topic("orders", durable_idle_ttl_micros=MINUTE)
    subscribers.attach("orders", "d")
    with monkeypatch.context() as patch:

        def stalled(*_: object, **__: object) -> None:
            raise StoreError(Reason.WRITE_STALLED, "the disk cannot keep up")

        patch.setattr(DurableEditor, "attach", stalled)
        with pytest.raises(StoreError) as error:
            subscribers.attach("orders", "d", force=True)
    assert refused(error) is Reason.WRITE_STALLED
    subscribers.settle()
    assert not durable(rig).attached
    rig.time.tick(MINUTE)
    subscribers.upkeep()
    assert rig.store.durables.of(rig.topic("orders")) == []


def test_a_consumer_that_returns_while_its_idle_durable_is_removed_can_acknowledge(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J10. The removal took the session of the new one with it."""
    rig.alter_topic("orders", durable_idle_ttl_micros=MINUTE)
    subscribers.attach("orders", "d").close()
    subscribers.settle()
    rig.time.tick(MINUTE)
    subscribers.consumers.upkeep()
    follower = subscribers.attach("orders", "d")
    assert follower.begun.reset
    put(rig, "a")
    follower.news()
    assert follower.acknowledge().position == rig.store.writer.last_sequence


def test_a_consumer_that_returns_while_its_durable_is_deleted_begins_at_its_requested_start(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J2. It was not looked where that is, as the durable was still there; and so it began at now."""
    put(rig, "a", "b")
    subscribers.attach("orders", "d").close()
    subscribers.settle()
    answers: list[Durable | StoreError] = []
    subscribers.consumers.delete(rig.topic("orders"), "d", force=False).then(answers.append)
    follower = subscribers.attach("orders", "d", start=EARLIEST)
    assert (follower.begun.reset, follower.got()) == (True, [1, 2])
    follower.close()
    subscribers.settle()
    subscribers.consumers.delete(rig.topic("orders"), "d", force=False).then(answers.append)
    with pytest.raises(StoreError) as error:
        subscribers.attach("orders", "d", start=at(9, rig))
    assert refused(error) is Reason.BOOKMARK_IN_FUTURE
    assert [answer.name for answer in answers if isinstance(answer, Durable)] == ["d", "d"]
    assert not subscribers.consumers.is_attached(rig.topic("orders"), "d")
    assert rig.store.durables.of(rig.topic("orders")) == []


def test_a_bookmark_beyond_a_hard_limit_is_too_old_even_before_the_prune(rig: Rig, subscribers: Subscribers) -> None:
    """S4, durables [4]. The durable began after the discarded changes, and no gap was reported."""
    rig.alter_topic("orders", max_age_micros=MINUTE)
    put(rig, "a", "b")
    rig.time.tick(MINUTE)
    put(rig, "c")
    with pytest.raises(StoreError) as error:
        subscribers.attach("orders", "d", start=at(1, rig))
    assert refused(error) is Reason.BOOKMARK_TOO_OLD
    assert error.value.details == {"earliest_sequence": "3"}
    assert rig.store.durables.of(rig.topic("orders")) == []
    follower = subscribers.attach("orders", "d", start=at(2, rig))
    assert (follower.got(), follower.gaps()) == ([3], [])


def test_a_changing_row_is_always_present(rig: Rig, subscribers: Subscribers) -> None:
    """durables [1]. It was taken out and put in again: a reader on another thread was told DURABLE_NOT_FOUND."""
    follower = subscribers.attach("orders", "d")
    put(rig, "a")
    follower.news()

    class Watched(dict[str, Durable]):
        taken: ClassVar[list[str]] = []

        def pop(self, key: str, *default: Any) -> Any:  # as dict
            self.taken.append(key)
            return super().pop(key, *default)

    found = rig.store.durables.of_topic(rig.topic("orders").id)
    assert found is not None
    found.rows = Watched(found.rows)
    assert follower.acknowledge().position == 1
    assert Watched.taken == []
    assert [one.position for one in rig.store.durables.of(rig.topic("orders"))] == [1]
    assert found.order == [(1, "d")]


def test_sessions_go_with_their_topic(rig: Rig, subscribers: Subscribers) -> None:
    """They stayed for ever, each with all that its consumer knew."""
    subscribers.attach("orders", "d").close()
    subscribers.settle()
    assert len(subscribers.consumers._sessions) == 1
    rig.delete_topic("orders")
    subscribers.upkeep()
    assert subscribers.consumers._sessions == {}


def test_a_topic_is_deleted_while_its_durable_is_rewound_and_it_is_pruned(rig: Rig, subscribers: Subscribers) -> None:
    """T5: whatever comes behind the deletion finds nothing, and writes nothing of the topic."""
    follower = subscribers.attach("orders", "d")
    rig.alter_topic("orders", max_entries=1)
    put(rig, "a", "b", "c")
    topic = rig.topic("orders")
    deleted: list[int | StoreError] = []
    rewound: list[tuple[Durable, int] | StoreError] = []
    pruned: list[bool | StoreError] = []
    rig.store.administration.delete_topic("orders").then(deleted.append)
    subscribers.consumers.rewind(topic, "d", TO_EARLIEST, force=True).then(rewound.append)
    rig.store.upkeep.prune().then(pruned.append)
    subscribers.settle()
    follower.pump()
    assert (deleted, pruned) == ([3], [False])
    (answer,) = rewound
    assert isinstance(answer, StoreError)
    assert answer.reason is Reason.DURABLE_NOT_FOUND
    for family in (META, "journal"):
        assert [key for key, _ in rig.rows(family) if topic.prefix in key] == []


# --- many ------------------------------------------------------------------------------------------------------------


def test_acknowledgements_share_commits(rig: Rig, subscribers: Subscribers) -> None:
    """batches [1]."""
    followers = [subscribers.attach("orders", f"d{number}") for number in range(5)]
    put(rig, "a")
    answers: list[object] = []
    for follower in followers:
        follower.news()
    written: list[object] = []
    write = rig.store._rocks.write

    def counted(batch: object) -> None:
        written.append(batch)
        write(batch)  # type: ignore[arg-type]  # a batch

    rig.store._rocks.write = counted  # type: ignore[method-assign]  # to see how many there are
    for follower in followers:
        consumer = follower.consumer
        subscribers.consumers.acknowledge(consumer.topic, consumer.name, consumer.session, 1).then(answers.append)
    subscribers.settle()
    assert len(answers) == 5
    assert len(written) == 2, "the first, and all that came meanwhile"


def test_idle_upkeep_reads_nothing(rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a second is in proportion to the entries due in it."""
    rig.alter_topic("orders", durable_idle_ttl_micros=HOUR, backlog_ttl_micros=HOUR)
    for number in range(50):
        subscribers.attach("orders", f"d{number}").close()
    subscribers.upkeep()
    monkeypatch.setattr(rig.store._rocks, "cursor", None)
    monkeypatch.setattr(rig.store.durable_commits, "change", None)
    for _ in range(10):
        rig.time.tick(SECOND)
        subscribers.consumers.upkeep()
