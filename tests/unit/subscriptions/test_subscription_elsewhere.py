"""Going on at another instance by a bookmark (rules F6 to F9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_peering import NOTHING_PURGED, MergeCounts, SeedRange
from sow_server.engine.replicas.marks import SAMPLE_MICROS
from sow_server.engine.values.bookmarks import CHARACTERS_MAX, HELD_MAX, PARTS_MAX, Marks, Position, parse
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Expiration, TopicSettings
from sow_server.filters.parser import parse as parse_filter
from sow_server.filters.restriction import Restriction
from sow_server.subscriptions.frames import Progress, SnapshotEnd
from sow_server.subscriptions.request import Start, StartKind
from sow_server.subscriptions.subscription import LEAVE_CHECK_MICROS, Wait, leave
from tests.support.stores.replicas import greet, instance, pair, seed, ship, tell
from tests.support.stores.stores import MINUTE, SECOND, FakeTime, Rig
from tests.support.stores.subscribers import Follower, Subscribers, refused

__all__ = ["pair"]  # a fixture

JSON = TopicSettings(expiration=Expiration.ENABLED)


def bookmark(rig: Rig, subscribers: Subscribers, follower: Follower) -> str:
    """The bookmark that a subscriber has a moment later."""
    for _ in range(2):
        rig.time.tick(SECOND)
        subscribers.settle()
        follower.pump()
    told = [frame for frame in follower.frames if isinstance(frame, Progress | SnapshotEnd)][-1]
    assert follower.bookmark is not None
    return rig.store.instance.bookmark(follower.bookmark) + told.marks


def after(text: str) -> Start:
    return Start(StartKind.BOOKMARK, bookmark=text)


def other(rig: Rig, sequence: int, swept: int = 2**62) -> str:
    """A bookmark of an instance that nobody knows, with a position of this one."""
    return f"c0ffee000000.5;t={swept};{rig.store.instance.bookmark(sequence)}"


# -- marks: F6 --------------------------------------------------------------------------------------------------------


def test_progress_and_the_end_of_a_snapshot_tell_the_cursors_of_sources(pair: tuple[Rig, Rig]) -> None:
    """F6."""
    a, b = pair
    a.put("t", "1", ttl=MINUTE)
    ship(a, b)
    at_b = Subscribers(b)
    follower = at_b.subscribe("t", sow=True, oof=True)
    end = next(frame for frame in follower.frames if isinstance(frame, SnapshotEnd))
    now, cursor = b.clock.now_micros(), a.store.commits.last_sequence
    assert end.marks == f";t={now};{a.store.instance.bookmark(cursor)}"
    a.put("t", "2")
    ship(a, b)
    told = parse(bookmark(b, at_b, follower))
    assert told.at == Position(b.store.instance.epoch, b.store.commits.last_sequence)
    assert told.marks is not None
    assert told.marks.sources == (Position(a.store.instance.epoch, a.store.commits.last_sequence),)


def test_marks_come_while_changes_come_without_a_pause(pair: tuple[Rig, Rig]) -> None:
    """F6: at least every second while anything is written, whatever `progress` says."""
    a, b = pair
    ship(a, b)
    at_b = Subscribers(b)
    follower = at_b.subscribe("t", progress=MINUTE)
    for number in range(30):
        b.put("t", f"{number}")
        b.time.tick(SECOND // 10)
        at_b.settle()
        follower.pump()
    assert 3 <= follower.kinds().count("Progress") <= 5
    assert all(frame.marks for frame in follower.frames if isinstance(frame, Progress))


def test_marks_come_a_moment_after_a_start_below_all_samples(pair: tuple[Rig, Rig]) -> None:
    """F6. Story: a subscriber went on at an instance that had just been started, while others published there. Its
    bookmark had no marks for a second; as that instance was lost, too, it could not go on."""
    a, b = pair
    ship(a, b)
    ship(b, a)
    at_a = Subscribers(a)
    mark = bookmark(a, at_a, at_a.subscribe("t", changes=True))
    b.put("t", "1")
    at_b = Subscribers(b)
    follower = at_b.subscribe("t", changes=True, start=after(mark))
    b.put("t", "2")
    b.time.tick(SAMPLE_MICROS)
    at_b.settle()
    follower.pump()
    told = [frame for frame in follower.frames if isinstance(frame, Progress)]
    assert told[0].marks.partition(";h=")[0] == ""
    assert a.store.instance.epoch in told[-1].marks.partition(";h=")[0]


def test_an_instance_without_sources_tells_no_marks(tmp_path: Path) -> None:
    """F6: nor more progress than it was asked for."""
    rig = instance(tmp_path, "a")
    rig.create_topic("t")
    subscribers = Subscribers(rig)
    follower = subscribers.subscribe("t", progress=MINUTE)
    for number in range(30):
        rig.put("t", f"{number}")
        rig.time.tick(SECOND)
        subscribers.settle()
        follower.pump()
    assert follower.kinds().count("Progress") == 1
    assert ";" not in bookmark(rig, subscribers, follower)


def test_a_position_is_told_with_the_cursors_of_its_time_and_never_with_later_ones(pair: tuple[Rig, Rig]) -> None:
    """F6: a subscriber that is behind goes on elsewhere from where it is, not from where its instance is."""
    a, b = pair
    a.put("t", "1")
    ship(a, b)
    marks = b.store.replicas.marks
    marks.sample(10 * SECOND)
    before = b.store.commits.last_sequence, a.store.commits.last_sequence
    a.put("t", "2")
    ship(a, b)
    marks.sample(20 * SECOND)

    def told(position: int) -> list[int]:
        found = marks.at(position, marks.whole([b.topic("t")]), marks.version)
        return [] if found is None else [source.sequence for source in found.sources]

    assert told(before[0] - 1) == []
    assert told(before[0]) == [before[1]]
    assert told(b.store.commits.last_sequence) == [a.store.commits.last_sequence]


def test_the_time_in_the_marks_is_before_every_record_that_has_not_been_swept(pair: tuple[Rig, Rig]) -> None:
    """F6."""
    a, b = pair
    ship(a, b)
    b.put("t", "1", ttl=SECOND)
    stamp = b.clock.now_micros() + SECOND
    b.time.tick(MINUTE)
    marks = b.store.replicas.marks

    def swept() -> int:
        marks.sample(b.time.elapsed_micros)
        found = marks.at(b.store.commits.last_sequence, [], marks.version)
        assert found is not None
        return found.swept_micros

    assert swept() == stamp - 1
    b.store.sweep()
    b.time.tick(SECOND)
    assert swept() == b.clock.now_micros()


def whole(a: Rig, b: Rig) -> bool:
    return a.options.instance in b.store.replicas.marks.whole([b.topic("t")])


def test_only_a_source_that_sends_the_topic_whole_is_told(pair: tuple[Rig, Rig]) -> None:
    """F6: seeded completely, and both ends acting on expiration alike."""
    a, b = pair
    a.put("t", "1")
    greet(a, b)
    tell(a, b)
    assert not whole(a, b)
    answers: list[MergeCounts | StoreError] = []
    part = SeedRange("t", True, False, b"", b"0")
    b.store.replicas.changes.merge("a", part, chunk=b"", origins=["a"], purged=NOTHING_PURGED).then(answers.append)
    b.answer(answers)
    assert not whole(a, b)
    seed(a, b, "t")
    assert whole(a, b)
    a.alter_topic("t", expiration=Expiration.DISABLED)
    tell(a, b)
    assert not whole(a, b)
    b.alter_topic("t", expiration=Expiration.DISABLED)
    assert whole(a, b)
    b.store.replicas.sources.by_name["a"] = b.store.replicas.sources.by_name["a"]._replace(filter="/x = 1")
    assert not whole(a, b)


def test_there_are_no_marks_while_no_source_is_whole_and_they_come_within_a_second(pair: tuple[Rig, Rig]) -> None:
    """F6. Story: a subscriber was told the time alone, and took it for a mark; its bookmark was refused elsewhere."""
    a, b = pair
    greet(a, b)
    tell(a, b)
    at_b = Subscribers(b)
    follower = at_b.subscribe("t", changes=True)
    assert ";" not in bookmark(b, at_b, follower)
    seed(a, b, "t")
    b.put("t", "1")
    b.time.tick(SECOND)
    at_b.settle()
    follower.pump()
    told = [frame for frame in follower.frames if isinstance(frame, Progress)]
    assert told[-1].marks.endswith(f";{a.store.instance.bookmark(a.store.commits.last_sequence)}")


def test_marks_wait_until_the_expiry_entries_of_a_topic_are_there(pair: tuple[Rig, Rig]) -> None:
    """F6: until then, records that are overdue may have no entry that tells."""
    a, b = pair
    ship(a, b)
    marks = b.store.replicas.marks
    b.store.background._begun = False  # as before the start of the writer: the work only has its row
    b.alter_topic("t", expiration=Expiration.DISABLED)
    b.put("t", "1", ttl=SECOND)
    b.alter_topic("t", expiration=Expiration.ENABLED)
    b.time.tick(MINUTE)
    marks.sample(b.time.elapsed_micros)
    assert marks.at(2**62, [], marks.version) is None


# -- the start: F7 ----------------------------------------------------------------------------------------------------


def test_a_subscriber_goes_on_at_another_instance(pair: tuple[Rig, Rig]) -> None:
    """F7: from the position that its own one had."""
    a, b = pair
    a.put("t", "1", b"one")
    a.put("t", "2", b"two")
    ship(a, b)
    at_b = Subscribers(b)
    mark = bookmark(b, at_b, at_b.subscribe("t", sow=True, oof=True))
    a.put("t", "3", b"three")
    a.delete("t", "1")
    at_a = Subscribers(a)
    follower = at_a.subscribe("t", oof=True, start=after(mark))
    assert follower.news() == [("put", "3", b"three"), ("oof deleted", "1", b"one")]


def test_an_expiry_is_not_missed_where_the_clock_is_ahead(tmp_path: Path) -> None:
    """F7: `a` has expired the record, and goes on, before `b` has; `b` has everything up to there, but expiries are not
    sent. So the start is not the cursor alone."""
    times = FakeTime(), FakeTime()
    a = instance(tmp_path, "a", peers=["b"], time=times[0])
    b = instance(tmp_path, "b", peers=["a"], time=times[1])
    times[0].step_wall(5 * SECOND)
    a.clock = a.time.clock()
    a.reopen()
    for rig in (a, b):
        rig.create_topic("t")
    a.put("t", "1", b"one", ttl=10 * SECOND)
    ship(a, b)
    at_b = Subscribers(b)
    follower = at_b.subscribe("t", sow=True, oof=True)
    a.time.tick(10 * SECOND)
    b.time.tick(10 * SECOND)
    a.store.sweep()
    a.put("t", "2", b"two")
    ship(a, b)
    b.store.sweep()
    mark = bookmark(b, at_b, follower)
    assert b.get("t", "1") is not None
    marks = parse(mark).marks
    assert marks is not None
    assert marks.sources[0].sequence == a.store.commits.last_sequence
    follower = Subscribers(a).subscribe("t", oof=True, start=after(mark))
    assert ("oof expired", "1", b"one") in follower.news()


def test_expiries_that_were_told_are_not_told_again(pair: tuple[Rig, Rig]) -> None:
    """F7: the start is not earlier than it has to be."""
    a, b = pair
    a.put("t", "1", ttl=SECOND)
    ship(a, b)
    at_b = Subscribers(b)
    follower = at_b.subscribe("t", sow=True, oof=True)
    a.time.tick(SECOND)
    for rig in pair:
        rig.store.sweep()
    a.put("t", "2")
    ship(a, b)
    mark = bookmark(b, at_b, follower)
    assert Subscribers(a).subscribe("t", oof=True, start=after(mark)).news() == []


def test_a_bookmark_of_elsewhere_that_cannot_be_used_is_refused(pair: tuple[Rig, Rig]) -> None:
    """F7."""
    a, _ = pair
    a.put("t", "1")
    a.create_topic("u")  # its journal begins behind that
    a.put("u", "1")
    at_a = Subscribers(a)
    head = a.store.commits.last_sequence

    def reason(text: str) -> Reason:
        return refused(at_a.subscribe, "u", start=after(text)).reason

    assert reason("c0ffee000000.5") is Reason.BOOKMARK_OTHER_EPOCH
    assert reason("c0ffee000000.5;t=9;c0ffee000001.7") is Reason.BOOKMARK_OTHER_EPOCH
    assert reason(other(a, head + 1)) is Reason.BOOKMARK_IN_FUTURE
    assert reason(other(a, 0)) is Reason.BOOKMARK_TOO_OLD
    assert reason(other(a, head, swept=0)) is Reason.BOOKMARK_TOO_OLD
    at_a.subscribe("u", start=after(other(a, head)))
    held = ",".join([f"{number:012x}.1" for number in range(HELD_MAX)])
    assert reason(f"{other(a, head)};h={held}") is Reason.BOOKMARK_OTHER_EPOCH


def test_a_subscriber_that_may_see_only_some_rows_has_no_marks_and_cannot_go_on(pair: tuple[Rig, Rig]) -> None:
    """F6, F7, A4: a key that is not in its rows must not be told."""
    a, b = pair
    for rig in pair:
        rig.create_topic("j", JSON)
    ship(a, b)
    some = Restriction(parse_filter("/x = 1"), ())
    at_b = Subscribers(b)
    assert ";" not in bookmark(b, at_b, at_b.subscribe("j", sow=True, restriction=some))
    head = b.store.commits.last_sequence
    for text in (other(b, head), f"{b.store.instance.bookmark(head)};h=c0ffee000000.5"):
        error = refused(at_b.subscribe, "j", start=after(text), restriction=some)
        assert error.reason is Reason.BOOKMARK_OTHER_EPOCH


# -- records that are not here: F8, F9 --------------------------------------------------------------------------------


def three(tmp_path: Path) -> tuple[Rig, Rig, Rig, str]:
    """`b` has a record that `c` has deleted and `a` has never had; and the bookmark of a subscriber at `b`."""
    time = FakeTime()
    a, b, c = (instance(tmp_path, name, peers=["a", "b", "c"], time=time) for name in "abc")
    for rig in (a, b, c):
        rig.create_topic("t")
    ship(a, b)
    b.put("t", "k", b"of b")
    at_b = Subscribers(b)
    follower = at_b.subscribe("t", sow=True, oof=True)
    ship(b, c)
    c.delete("t", "k")
    return a, b, c, bookmark(b, at_b, follower)


@pytest.mark.parametrize("live", [False, True])
def test_the_delete_of_a_record_that_was_never_here_is_told_with_the_key_alone(tmp_path: Path, live: bool) -> None:
    """F8: the subscriber has the record from elsewhere."""
    a, _, c, mark = three(tmp_path)
    at_a = Subscribers(a)
    if not live:
        ship(c, a)
    follower = at_a.subscribe("t", oof=True, start=after(mark))
    reader = at_a.subscribe("t", changes=True, start=after(mark))
    plain = at_a.subscribe("t", oof=True)
    if live:
        ship(c, a)
    assert a.kinds("t")[-1] == ("bury", "k")
    assert follower.news() == [("oof deleted", "k", b"")]
    assert reader.news() == [("delete", "k", b"")]
    assert plain.news() == []


def both(a: Rig, b: Rig) -> tuple[Subscribers, Follower, str]:
    """A record of `b` that is not at `a`, of a subscriber that goes on there; and its last bookmark at `b`."""
    for rig in (a, b):
        rig.create_topic("j", JSON)
    ship(a, b)
    b.put("j", "k", b'{"x":1,"y":1}')
    at_b = Subscribers(b)
    mark = bookmark(b, at_b, at_b.subscribe("j", filter="/x = 1", sow=True, oof=True))
    at_a = Subscribers(a)
    follower = at_a.subscribe("j", filter="/x = 1", oof=True, start=after(mark))
    return at_a, follower, mark


def test_a_record_that_does_not_match_is_told_though_none_was_here_before(pair: tuple[Rig, Rig]) -> None:
    """F8: the subscriber has one that matches, of which this instance has not heard."""
    a, b = pair
    at_a, follower, mark = both(a, b)
    a.put("j", "k", b'{"x":2}')
    assert follower.news() == [("oof match", "k", b'{"x":2}')]
    a.delete("j", "k")
    assert follower.news() == [("oof deleted", "k", b'{"x":2}')]
    again = at_a.subscribe("j", filter="/x = 1", oof=True, start=after(mark))
    assert again.news() == [("oof match", "k", b'{"x":2}'), ("oof deleted", "k", b'{"x":2}')]


def test_records_come_whole_where_deltas_are_asked_for(pair: tuple[Rig, Rig]) -> None:
    """F8: the subscriber may have another version to apply a delta to."""
    a, b = pair
    _, _, mark = both(a, b)
    a.put("j", "k", b'{"x":1,"z":1}')
    follower = Subscribers(a).subscribe("j", delta=True, oof=True, start=after(mark))
    a.put("j", "k", b'{"x":1,"z":2}')
    assert [payload for _, _, payload in follower.news()] == [b'{"x":1,"z":1}', b'{"x":1,"z":2}']


def test_records_come_whole_also_once_this_instance_has_everything(pair: tuple[Rig, Rig]) -> None:
    """F8. Story: the other instance, whose clock was ahead, had told an expiry. Then this one had everything of the
    other's journal, and sent a delta for the record, which the subscriber had no more."""
    a, b = pair
    for rig in pair:
        rig.create_topic("j", JSON)
    ship(a, b)
    ship(b, a)
    a.put("j", "k", b'{"x":1,"y":1}')
    ship(a, b)
    at_b = Subscribers(b)
    mark = bookmark(b, at_b, at_b.subscribe("j", sow=True, oof=True, delta=True))
    at_a = Subscribers(a)
    follower = at_a.subscribe("j", delta=True, oof=True, start=after(mark))
    ship(b, a)
    here = bookmark(a, at_a, follower)
    assert [frame.covers for frame in follower.frames if isinstance(frame, Progress)][-1]
    a.put("j", "k", b'{"x":2,"y":1}')
    assert [payload for _, _, payload in follower.news()] == [b'{"x":2,"y":1}']
    again = at_a.subscribe("j", delta=True, oof=True, start=after(here))
    assert [payload for _, _, payload in again.news()] == [b'{"x":2,"y":1}']


def test_all_that_goes_on_when_the_call_is_made_again(pair: tuple[Rig, Rig]) -> None:
    """F8: the second bookmark says where the subscriber has come from."""
    a, b = pair
    at_a, follower, mark = both(a, b)
    here = bookmark(a, at_a, follower)
    assert parse(here).held == (parse(mark).at,)
    follower.close()
    follower = at_a.subscribe("j", filter="/x = 1", oof=True, start=after(here))
    a.put("j", "k", b'{"x":2}')
    assert follower.news() == [("oof match", "k", b'{"x":2}')]


def test_it_ends_once_this_instance_has_everything_that_was_told_elsewhere(pair: tuple[Rig, Rig]) -> None:
    """F8, F9: `covers` says so, and the subscriber is like any other."""
    a, b = pair
    at_a, follower, mark = both(a, b)
    a.put("j", "m", b'{"x":2}')
    assert follower.news() == [("oof match", "m", b'{"x":2}')]
    assert not any(frame.covers for frame in follower.frames if isinstance(frame, Progress))
    ship(b, a)
    assert follower.news() == [("put", "k", b'{"x":1,"y":1}')]
    here = bookmark(a, at_a, follower)
    assert parse(here).held == ()
    assert [frame.covers for frame in follower.frames if isinstance(frame, Progress)][-1]
    a.put("j", "n", b'{"x":2}')
    a.put("j", "k", b'{"x":3}')
    a.put("j", "o", b'{"x":1}')
    assert follower.news() == [("oof match", "k", b'{"x":3}'), ("put", "o", b'{"x":1}')]
    assert parse(mark).at.epoch == b.store.instance.epoch


# -- the text: F6 -----------------------------------------------------------------------------------------------------


def test_a_bookmark_is_parsed_into_its_parts() -> None:
    """F6."""
    text = "4f9d2c01aa37.12;t=9;a81b0c22d9e4.97;000000000001.0;h=c0ffee00aa11.5,c0ffee00aa12.6"
    found = parse(text)
    assert found.at == Position("4f9d2c01aa37", 12)
    assert found.marks == Marks(9, (Position("a81b0c22d9e4", 97), Position("000000000001", 0)))
    assert found.held == (Position("c0ffee00aa11", 5), Position("c0ffee00aa12", 6))
    assert parse("4f9d2c01aa37.12").marks is None


E = "4f9d2c01aa37"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", 0),
        ("nonsense", 0),
        (f"{E}.01", 0),
        (f"{E}.{2**63}", 0),
        (f"{E}.1;", 15),
        (f"{E}.1;{E}.2", 15),
        (f"{E}.1;t=x", 17),
        (f"{E}.1;t=-1", 17),
        (f"{E}.1;t=1;t=2", 19),
        (f"{E}.1;t=1;{E}", 19),
        (f"{E}.1;h={E}.1,", 32),
        (f"{E}.1;h={E}.1;{E}.2", 32),
        (f"{E}.1;t=1" + f";{E}.1" * (PARTS_MAX + 1), 14),
        (f"{E}.1;h=" + ",".join([f"{E}.1"] * (HELD_MAX + 1)), 14),
        (f"{E}.1;" + "x" * CHARACTERS_MAX, CHARACTERS_MAX),
    ],
)
def test_a_malformed_bookmark_is_refused_with_its_place(text: str, place: int) -> None:
    """F6."""
    with pytest.raises(StoreError) as caught:
        parse(text)
    assert caught.value.reason is Reason.BOOKMARK_MALFORMED
    assert caught.value.field == "bookmark"
    assert caught.value.details["position"] == str(place)


def test_the_longest_bookmark_is_within_the_bound() -> None:
    """F6."""
    long = Position("f" * 12, 2**63 - 1)
    text = long.text + Marks(2**63 - 1, (long,) * PARTS_MAX).text + ";h=" + ",".join([long.text] * HELD_MAX)
    assert len(text) <= CHARACTERS_MAX
    assert parse(text).held == (long,) * HELD_MAX


# -- a topic that goes to another cell: C4, C12 ------------------------------------------------------------------------

ELSEWHERE = StoreError(Reason.TOPIC_ELSEWHERE, "t lives in the cell b")


def test_a_quiet_subscriber_is_told_where_it_goes_on_as_its_topic_leaves(pair: tuple[Rig, Rig]) -> None:
    """C12. Story: it got nothing while the links were there, so its bookmark meant nothing in the other cell."""
    a, b = pair
    at_b = Subscribers(b)
    follower = at_b.subscribe("t", progress=MINUTE, conflation=MINUTE)
    follower.pump()
    ship(a, b)
    b.put("t", "1")
    b.time.tick(SAMPLE_MICROS)
    leave(follower.subscription, ELSEWHERE)
    assert follower.news() == [("put", "1", b"x")], "also in the middle of an interval"
    last = follower.frames[-1]
    assert isinstance(last, Progress)
    assert last.sequence == b.store.commits.last_sequence
    assert last.marks.endswith(f";{a.store.instance.bookmark(a.store.commits.last_sequence)}")
    assert follower.error is ELSEWHERE


def test_a_quiet_subscriber_ends_soon_while_other_topics_are_written(pair: tuple[Rig, Rig]) -> None:
    """C4. Story: their last commit woke nobody, so it stayed for the whole of its own interval of progress."""
    _, b = pair
    b.create_topic("u")
    at_b = Subscribers(b)
    follower = at_b.subscribe("t", progress=MINUTE)
    b.put("u", "1")
    leave(follower.subscription, ELSEWHERE)
    at_b.sync()  # and nothing is dispatched yet
    assert follower.subscription.step() == Wait(b.time.elapsed_micros + LEAVE_CHECK_MICROS)
    follower.news()
    assert follower.error is ELSEWHERE


def test_a_slow_subscriber_gets_the_marks_of_the_moment_at_which_its_topic_left(pair: tuple[Rig, Rig]) -> None:
    """C12. Story: the links were gone when it got to the end, or the last sample was from before some topic came, and
    then its bookmark meant nothing in the other cell."""
    a, b = pair
    at_b = Subscribers(b)
    follower = at_b.subscribe("t", progress=MINUTE)
    ship(a, b)
    follower.pump()
    b.time.tick(SAMPLE_MICROS)
    at_b.subscribe("t", sow=True)  # takes a sample
    b.create_topic("u")
    leave(follower.subscription, ELSEWHERE)
    at_b.settle()
    greet(a, b)  # the link begins anew
    b.time.tick(SAMPLE_MICROS)
    follower.news()
    last = follower.frames[-1]
    assert isinstance(last, Progress)
    assert last.marks.endswith(f";{a.store.instance.bookmark(a.store.commits.last_sequence)}")
    assert follower.error is ELSEWHERE


def test_a_slow_subscriber_goes_on_elsewhere_although_the_copy_here_is_deleted(pair: tuple[Rig, Rig]) -> None:
    """C12: its bookmark says whether that loses anything."""
    a, b = pair
    at_b = Subscribers(b, queue_bytes_max=1)
    follower = at_b.subscribe("t")
    follower.pump()
    b.put("t", "1")
    ship(b, a)
    leave(follower.subscription, ELSEWHERE)
    at_b.settle()
    b.delete_topic("t")
    follower.news()
    assert follower.error is ELSEWHERE


def test_a_slow_subscriber_to_a_pattern_is_told_that_a_copy_was_deleted_before_its_end(pair: tuple[Rig, Rig]) -> None:
    """C4: what it had not got of the topic is missing."""
    _, b = pair
    b.create_topic("u")
    error = StoreError(Reason.ACCESS_CHANGED, "topics have left", details={"complete": "true"})
    at_b = Subscribers(b)
    follower = at_b.subscribe(pattern=".*")
    follower.pump()
    leave(follower.subscription, error)
    at_b.settle()
    b.delete_topic("t")
    follower.news()
    assert follower.error is not None
    assert follower.error.details["complete"] == "false"


def test_subscribers_that_leave_together_and_later_ones_are_all_told(pair: tuple[Rig, Rig]) -> None:
    """C4. Story: each of a thousand took a commit of its own, while no cell took the topic."""
    _, b = pair
    at_b = Subscribers(b)
    followers = [at_b.subscribe("t") for _ in range(3)]
    for follower in followers[:2]:
        leave(follower.subscription, ELSEWHERE)
    at_b.settle()
    leave(followers[2].subscription, ELSEWHERE)
    at_b.settle()
    for follower in followers:
        follower.pump()
        assert follower.error is ELSEWHERE
