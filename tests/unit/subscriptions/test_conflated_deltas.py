"""Deltas together with conflation (S15): what is told, what is sent whole, and what equal subscribers share."""

from __future__ import annotations

import json

import pytest

from sow_server.engine.values.errors import Reason
from sow_server.engine.values.model import Expiration, MessageType
from sow_server.filters.restriction import Restriction
from sow_server.services.wire import subscribe_convert
from sow_server.subscriptions.frames import ChangeFrame, Row
from sow_server.subscriptions.live import conflation
from sow_server.subscriptions.subscription import Read, Send
from tests.support.stores.stores import MINUTE, SECOND, Rig
from tests.support.stores.subscribers import EARLIEST, Follower, Subscribers, at, behind, rig, subscribers

__all__ = ["rig", "subscribers"]  # fixtures

Told = tuple[str, str, dict[str, object], tuple[str, ...]]


def doc(**fields: object) -> bytes:
    """A payload."""
    return json.dumps(fields).encode()


def ended(subscribers: Subscribers, follower: Follower) -> list[Told]:
    """The messages at the end of an interval: what happened, key, fields, removed fields."""
    subscribers.settle()
    subscribers.rig.time.tick(SECOND)
    before = len(follower.changes())
    follower.pump()
    return [_told(row) for row in follower.changes()[before:]]


def _told(row: Row) -> Told:
    name = f"{row.op.name.lower()}{' delta' if row.is_delta else ''}"
    return name, row.key.decode(), json.loads(row.payload or b"{}"), row.unset_paths


def test_a_delta_is_the_difference_to_what_was_told_last(rig: Rig, subscribers: Subscribers) -> None:
    """S15: over an interval, not over the last change."""
    rig.put("orders", "a", doc(px=1, qty=5, note="x"))
    follower = subscribers.subscribe("orders", sow=True, oof=True, delta=True, conflation=SECOND)
    rig.put("orders", "a", doc(px=2, qty=5, note="x"))
    rig.put("orders", "a", doc(px=2, qty=6))
    rig.put("orders", "b", doc(px=1))
    rig.put("orders", "b", doc(px=2))
    assert ended(subscribers, follower) == [
        ("put delta", "a", {"px": 2, "qty": 6}, ("/note",)),
        ("put", "b", {"px": 2}, ()),
    ]
    assert follower.bookmark == 5
    rig.put("orders", "a", doc(px=3, qty=6))
    rig.put("orders", "b", doc(px=3))
    assert ended(subscribers, follower) == [("put delta", "a", {"px": 3}, ()), ("put delta", "b", {"px": 3}, ())]


@pytest.mark.parametrize("empty_deltas", [False, True])
def test_a_document_that_is_as_it_was_is_not_told(rig: Rig, subscribers: Subscribers, empty_deltas: bool) -> None:
    """S15. Its bookmark moves all the same."""
    rig.put("orders", "a", doc(px=1))
    follower = subscribers.subscribe(
        "orders", sow=True, delta=True, empty_deltas=empty_deltas, conflation=SECOND, progress=SECOND
    )
    rig.put("orders", "a", doc(px=2))
    rig.put("orders", "a", doc(px=1))
    assert ended(subscribers, follower) == ([("put delta", "a", {}, ())] if empty_deltas else [])
    assert follower.bookmark == 3


def test_focus_over_an_interval(rig: Rig, subscribers: Subscribers) -> None:
    """S15: entered and left is nothing, left is an oof, left and come back is the whole record."""
    for key in ("leaves", "returns", "again"):
        rig.put("orders", key, doc(px=6, qty=1))
    follower = subscribers.subscribe("orders", filter="/px > 5", sow=True, oof=True, delta=True, conflation=SECOND)
    rig.put("orders", "visits", doc(px=7))
    rig.put("orders", "visits", doc(px=1))
    rig.put("orders", "leaves", doc(px=7, qty=1))
    rig.put("orders", "leaves", doc(px=1, qty=1))
    rig.put("orders", "returns", doc(px=1, qty=1))
    rig.put("orders", "returns", doc(px=8, qty=1))
    rig.put("orders", "again", doc(px=7, qty=1))
    rig.delete("orders", "again")
    rig.put("orders", "again", doc(px=9, qty=1))
    assert ended(subscribers, follower) == [
        ("oof", "leaves", {"px": 1, "qty": 1}, ()),
        ("put", "returns", {"px": 8, "qty": 1}, ()),
        ("put", "again", {"px": 9, "qty": 1}, ()),
    ]


def test_without_oof_a_record_that_comes_back_is_whole(rig: Rig, subscribers: Subscribers) -> None:
    rig.put("orders", "a", doc(px=6, qty=1))
    follower = subscribers.subscribe("orders", filter="/px > 5", sow=True, delta=True, conflation=SECOND)
    rig.put("orders", "a", doc(px=7, qty=1))
    rig.put("orders", "a", doc(px=1, qty=1))
    rig.put("orders", "a", doc(px=8, qty=1))
    assert ended(subscribers, follower) == [("put", "a", {"px": 8, "qty": 1}, ())]
    assert not follower.subscription._conflation._unsent  # type: ignore[union-attr]  # it conflates


def test_a_touch_behind_an_update_does_not_hide_it(rig: Rig, subscribers: Subscribers) -> None:
    rig.put("orders", "a", doc(px=1), ttl=MINUTE)
    follower = subscribers.subscribe("orders", sow=True, delta=True, empty_deltas=True, conflation=SECOND)
    rig.put("orders", "a", doc(px=2), ttl=MINUTE)
    rig.touch("orders", "a", ttl=2 * MINUTE)
    rig.put("orders", "b", doc(px=1), ttl=MINUTE)
    subscribers.settle()
    rig.time.tick(SECOND)
    assert follower.news() == [("put delta", "a", doc(px=2).replace(b" ", b"")), ("put", "b", doc(px=1))]
    rig.touch("orders", "a", ttl=3 * MINUTE)
    subscribers.settle()
    rig.time.tick(SECOND)
    assert follower.news() == [("touched delta", "a", b"{}")]


# --- records that are sent whole --------------------------------------------------------------------------------------


def test_after_a_bookmark_a_record_is_whole_once(rig: Rig, subscribers: Subscribers) -> None:
    """S15: its subscriber may have been sent a part of an emission beyond its bookmark. A difference to the version at
    the bookmark would leave that part standing."""
    rig.put("orders", "a", doc(px=1, qty=1))
    rig.put("orders", "b", doc(px=1, qty=1))
    first = subscribers.subscribe("orders", sow=True, oof=True, delta=True, conflation=SECOND, batch_size=1)
    rig.put("orders", "a", doc(px=2, qty=1))
    rig.put("orders", "b", doc(px=2, qty=1))
    subscribers.settle()
    rig.time.tick(SECOND)
    (part,) = first.pump(frames_max=1)
    assert isinstance(part, ChangeFrame)
    assert part.more
    assert first.bookmark == 2
    first.close()
    rig.put("orders", "a", doc(px=1, qty=9))  # the difference to the version at the bookmark has no px
    second = subscribers.subscribe("orders", start=at(2, rig), oof=True, delta=True, conflation=SECOND)
    assert ended(subscribers, second) == [
        ("put", "b", {"px": 2, "qty": 1}, ()),
        ("put", "a", {"px": 1, "qty": 9}, ()),
    ]
    rig.put("orders", "a", doc(px=1, qty=8))
    assert ended(subscribers, second) == [("put delta", "a", {"qty": 8}, ())]


def test_from_the_earliest_change_records_are_whole(rig: Rig, subscribers: Subscribers) -> None:
    rig.put("orders", "a", doc(px=1, qty=1))
    rig.put("orders", "a", doc(px=2, qty=1))
    follower = subscribers.subscribe("orders", start=EARLIEST, delta=True, conflation=SECOND)
    assert ended(subscribers, follower) == [("put", "a", {"px": 2, "qty": 1}, ())]


def test_a_version_that_was_left_out_is_no_base(rig: Rig, subscribers: Subscribers) -> None:
    """S15, J12: the version of half a second was due at the end of its interval, so the subscriber has an older one. It
    had been replaced in time, which the subscriber hears of later."""
    rig.put("orders", "a", doc(px=1, qty=1), ttl=MINUTE)
    follower = subscribers.subscribe("orders", sow=True, delta=True, conflation=SECOND)
    rig.put("orders", "a", doc(px=2, qty=2), ttl=SECOND)
    subscribers.settle()
    rig.time.tick(SECOND // 2)
    rig.put("orders", "a", doc(px=2, qty=3), ttl=MINUTE)  # not dispatched
    rig.time.tick(SECOND // 2)
    follower.pump()
    assert follower.changes() == []
    assert ended(subscribers, follower) == [("put", "a", {"px": 2, "qty": 3}, ())]


def test_a_record_whose_previous_version_is_gone_is_whole(rig: Rig, subscribers: Subscribers) -> None:
    """J1: the journal has discarded the version that the subscriber has."""
    subscribers = Subscribers(rig, queue_bytes_max=600)
    rig.put("orders", "a", doc(px=1, qty=1))
    follower = subscribers.subscribe("orders", delta=True, conflation=SECOND)
    rig.time.tick(20 * MINUTE)
    rig.prune()
    subscribers.hub.dispatcher.leave(follower.subscription)
    follower.subscription.detached(1)
    rig.put("orders", "a", doc(px=2, qty=1))
    assert ended(subscribers, follower) == []
    assert ended(subscribers, follower) == [("put", "a", {"px": 2, "qty": 1}, ())]
    rig.put("orders", "a", doc(px=3, qty=1))
    assert ended(subscribers, follower) == [("put delta", "a", {"px": 3}, ())]


def test_the_versions_to_compare_with_are_bounded(rig: Rig) -> None:
    """S15: a subscriber that does not read costs bounded memory. Beyond a quarter of its queue records come whole."""
    subscribers = Subscribers(rig, queue_bytes_max=40_000)
    keys = [str(number) for number in range(8)]
    for key in keys:
        rig.put("orders", key, doc(text="x" * 3_000, px=1))
    follower = subscribers.subscribe("orders", sow=True, delta=True, conflation=SECOND)
    for key in keys:
        rig.put("orders", key, doc(text="x" * 3_000, px=2))
        subscribers.settle()
    assert not behind(follower)
    assert follower.subscription.queued_bytes <= 40_000
    told = ended(subscribers, follower)
    assert [name for name, _, _, _ in told] == ["put delta"] * 3 + ["put"] * 5
    assert [key for _, key, _, _ in told] == keys
    assert follower.subscription.queued_bytes == 0
    rig.put("orders", "7", doc(text="x" * 3_000, px=3))
    assert ended(subscribers, follower) == [("put delta", "7", {"px": 3}, ())]


def test_a_hidden_field_makes_no_delta(rig: Rig, subscribers: Subscribers) -> None:
    """A5: who may not see a field is told nothing when it alone has changed."""
    rig.put("orders", "a", doc(px=1, iban="A"))
    hidden = Restriction(hidden=(("iban",),))
    follower = subscribers.subscribe("orders", sow=True, delta=True, conflation=SECOND, restriction=hidden)
    rig.put("orders", "a", doc(px=1, iban="B"))
    assert ended(subscribers, follower) == []
    rig.put("orders", "a", doc(px=2, iban="C"))
    assert ended(subscribers, follower) == [("put delta", "a", {"px": 2}, ())]


def test_a_topic_that_is_of_another_type_meanwhile(rig: Rig, subscribers: Subscribers) -> None:
    """The versions that wait are compared as what they are."""
    rig.put("orders", "a", doc(px=1, qty=1))
    follower = subscribers.subscribe("orders", sow=True, delta=True, conflation=SECOND)
    rig.put("orders", "a", doc(px=2, qty=1))
    rig.delete("orders", "a")
    subscribers.settle()
    rig.alter_topic("orders", message_type=MessageType.MSGPACK)
    rig.put("orders", "a", b"\x81\xa2px\x03")
    assert ended(subscribers, follower) == [("put delta", "a", {"px": 2}, ())]
    assert follower.subscription.error is not None
    assert follower.subscription.error.reason is Reason.RESYNC_REQUIRED


def test_a_version_of_a_topic_without_expiry_is_a_base(rig: Rig, subscribers: Subscribers) -> None:
    """S15: it is never left out, whatever its time."""
    rig.put("orders", "a", doc(px=1, qty=1), ttl=SECOND)
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    rig.time.tick(SECOND)
    follower = subscribers.subscribe("orders", sow=True, delta=True, conflation=SECOND)
    rig.put("orders", "b", doc(px=1))
    assert ended(subscribers, follower) == [("put", "b", {"px": 1}, ())]
    rig.put("orders", "a", doc(px=2, qty=1))
    assert ended(subscribers, follower) == [("put delta", "a", {"px": 2}, ())]


# --- sharing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readers", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_equal_subscribers_share_their_frames(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch, delta: bool, readers: bool
) -> None:
    """S15: 20 of them cost one comparison and one encoding. Some look only when the next interval has begun."""
    if readers:
        monkeypatch.setattr(conflation, "COMPARING_NANOS_MAX", 0)
    rig.put("orders", "a", doc(px=1, qty=1))
    followers = [subscribers.subscribe("orders", oof=True, delta=delta, conflation=SECOND) for _ in range(20)]
    topic = rig.topic("orders")
    compared = 0
    difference = topic.format.difference

    def counted(*arguments: object) -> object:
        nonlocal compared
        compared += 1
        return difference(*arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(topic.format, "difference", counted)
    for number in range(2, 5):
        rig.put("orders", "a", doc(px=number, qty=1))
        rig.put("orders", "a", doc(px=number + 10, qty=1))
        subscribers.settle()
        rig.time.tick(SECOND)
        for follower in followers[:10]:
            follower.pump()
        rig.put("orders", f"next{number}", doc(px=number))
        subscribers.settle()
        for follower in followers[10:]:
            follower.pump()
    frames = [[frame for frame in follower.change_frames() if len(frame.rows)] for follower in followers]
    assert [len(found) for found in frames] == [3] * 20
    for follower in followers[1:]:
        assert all(
            mine is theirs for mine, theirs in zip(follower.change_frames(), followers[0].change_frames(), strict=True)
        )
    assert compared == (3 if delta else 0)
    fills = 0
    fill = subscribe_convert.fill_changes

    def filled(*arguments: object) -> None:
        nonlocal fills
        fills += 1
        fill(*arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(subscribe_convert, "fill_changes", filled)
    for follower in followers:
        for frame in follower.change_frames():
            subscribe_convert.response(frame, rig.store.reads)
    assert fills == 3


def test_subscribers_that_differ_share_nothing(rig: Rig, subscribers: Subscribers) -> None:
    """Another interval, another size, a later beginning: each is told what it was not told before."""
    rig.put("orders", "a", doc(px=1, qty=1))
    rig.put("orders", "b", doc(px=1, qty=1))
    plain = subscribers.subscribe("orders", sow=True, delta=True, conflation=SECOND)
    small = subscribers.subscribe("orders", sow=True, delta=True, conflation=SECOND, batch_size=1)
    long = subscribers.subscribe("orders", sow=True, delta=True, conflation=4 * SECOND)
    rig.put("orders", "a", doc(px=2, qty=1))
    late = subscribers.subscribe("orders", sow=True, delta=True, conflation=SECOND)
    rig.put("orders", "a", doc(px=2, qty=2))
    rig.put("orders", "b", doc(px=1, qty=2))
    both = [("put delta", "a", {"px": 2, "qty": 2}, ()), ("put delta", "b", {"qty": 2}, ())]
    assert ended(subscribers, plain) == both
    for follower in (small, late, long):
        follower.pump()
    assert [_told(row) for row in small.changes()] == both
    assert [len(frame.rows) for frame in small.change_frames()] == [1, 1]
    assert [_told(row) for row in late.changes()] == [("put delta", "a", {"qty": 2}, ()), both[1]]
    assert long.changes() == []
    rig.put("orders", "a", doc(px=3, qty=2))
    assert ended(subscribers, plain) == [("put delta", "a", {"px": 3}, ())]
    rig.time.tick(SECOND)
    assert ended(subscribers, long) == [both[1], ("put delta", "a", {"px": 3, "qty": 2}, ())]


def test_a_large_emission_is_compared_by_a_reader(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on meanwhile, and changes that come then wait for the next interval."""
    monkeypatch.setattr(conflation, "COMPARING_NANOS_MAX", 0)
    rig.put("orders", "a", doc(px=1, qty=1))
    follower = subscribers.subscribe("orders", sow=True, delta=True, conflation=SECOND)
    rig.put("orders", "a", doc(px=2, qty=1))
    subscribers.settle()
    rig.time.tick(SECOND)
    step = follower.subscription.step()
    assert isinstance(step, Read)
    held = follower.subscription.queued_bytes
    assert held > 0
    rig.put("orders", "a", doc(px=2, qty=2))
    subscribers.settle()
    assert follower.subscription.queued_bytes > held
    follower.subscription.took(step.run())
    sent = follower.subscription.step()
    assert isinstance(sent, Send)
    assert isinstance(sent.frame, ChangeFrame)
    assert [_told(row) for row in sent.frame.rows] == [("put delta", "a", {"px": 2}, ())]
    assert ended(subscribers, follower) == [("put delta", "a", {"qty": 2}, ())]


def test_a_slow_reader_is_told_once_an_interval(rig: Rig, subscribers: Subscribers) -> None:
    """S6: what it has not been sent waits as one interval, however many are over."""
    rig.put("orders", "a", doc(px=0, qty=1))
    follower = subscribers.subscribe("orders", sow=True, delta=True, conflation=SECOND)
    for number in range(1, 8):
        rig.put("orders", "a", doc(px=number, qty=1))
        subscribers.settle()
        rig.time.tick(SECOND)
    follower.pump()
    assert [_told(row) for row in follower.changes()] == [("put delta", "a", {"px": 7}, ())]
    assert follower.bookmark == 8
    assert follower.subscription.queued_bytes == 0
