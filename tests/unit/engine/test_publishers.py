"""The memory of publishers (rule P6)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sow_server.engine.commit import publishers
from sow_server.engine.commit.passed_on import PassedOnRows
from sow_server.engine.commit.publishers import EPOCH_MAX, Publisher, PublisherCache, decode, encode
from sow_server.engine.commit.told import OUTCOMES_KEPT, UNKNOWN_TOPIC
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import OpenedPublisher, PublisherPosition, Refusal

NOW = 1_700_000_000_000_000
NO_ROCKS: Any = None
NONE_PASSED_ON = PassedOnRows(NO_ROCKS)
"""These publishers have no such rows."""


def refusal(sequence: int, reason: Reason = Reason.CONDITION_FAILED) -> Refusal:
    return Refusal(sequence, reason, f"refused {sequence}", current_version=sequence + 1)


def test_a_publisher_comes_back_under_its_epoch() -> None:
    known = Publisher(epoch=3, highest_sequence=10, last_use_micros=NOW, refusals=(refusal(4),))
    assert known.admit(PublisherPosition("p", 3, 11), 1) == known


def test_a_higher_epoch_starts_sequences_anew() -> None:
    known = Publisher(epoch=3, highest_sequence=10, last_use_micros=NOW, refusals=(refusal(4),))
    assert known.admit(PublisherPosition("p", 4, 1), 1) == Publisher(epoch=4)


def test_a_lower_epoch_is_fenced() -> None:
    with pytest.raises(StoreError) as caught:
        Publisher(epoch=3).admit(PublisherPosition("p", 2, 1), 1)
    assert caught.value.reason is Reason.PUBLISHER_FENCED
    assert caught.value.field == "publisher.publisher_epoch"
    assert "epoch 2 of 'p' is fenced by epoch 3" in caught.value.message


def test_the_highest_sequence_never_falls() -> None:
    publisher = Publisher(epoch=1).advance(7, [], NOW)
    assert (publisher.highest_sequence, publisher.last_use_micros) == (7, NOW)
    assert publisher.advance(5, [], NOW + 1).highest_sequence == 7


def test_refusals_are_remembered_for_the_last_sequences() -> None:
    publisher = Publisher(epoch=1).advance(10, [refusal(3), refusal(9)], NOW)
    assert publisher.refusal_of(3, conditional=True) == refusal(3)
    assert publisher.refusal_of(4, conditional=True) is None
    later = publisher.advance(3 + OUTCOMES_KEPT, [], NOW)
    assert later.refusal_of(3, conditional=False) is None
    assert later.refusal_of(9, conditional=False) == refusal(9)
    later = later.advance(9 + OUTCOMES_KEPT, [refusal(2000)], NOW)
    assert later.refusals == (refusal(2000),)


def test_an_outcome_that_is_forgotten_is_unknown_only_where_there_was_a_condition() -> None:
    publisher = Publisher(epoch=1).advance(OUTCOMES_KEPT + 5, [], NOW)
    forgotten, kept = 5, 6
    unknown = publisher.refusal_of(forgotten, conditional=True)
    assert unknown is not None
    assert (unknown.index, unknown.reason) == (forgotten, Reason.OUTCOME_UNKNOWN)
    assert publisher.refusal_of(forgotten, conditional=False) is None
    assert publisher.refusal_of(kept, conditional=True) is None


def test_kept_and_unknown_sequences_meet_without_a_gap() -> None:
    """A refusal is either remembered or answered as unknown, never taken for applied."""
    publisher = Publisher(epoch=1)
    for sequence in range(1, OUTCOMES_KEPT + 20):
        publisher = publisher.advance(sequence, [refusal(sequence)], NOW)
    for sequence in range(1, OUTCOMES_KEPT + 20):
        assert publisher.refusal_of(sequence, conditional=True) is not None


def test_a_row_is_read_back() -> None:
    publisher = Publisher(3, 10, NOW, (refusal(4), refusal(5, Reason.KEY_FIELD_MISSING)))
    assert decode(encode(publisher)) == publisher
    assert decode(encode(Publisher())) == Publisher()


def test_the_messages_of_a_row_are_bounded() -> None:
    long = Refusal(1, Reason.PAYLOAD_MALFORMED, "x" * 5000)
    (found,) = decode(encode(Publisher(1, 1, NOW, (long,)))).refusals
    assert found.message == "x" * 300


class _Rows:
    """Stored rows, and how often they were read."""

    def __init__(self, **publishers_by_id: Publisher) -> None:
        self.rows = {name: encode(publisher) for name, publisher in publishers_by_id.items()}
        self.reads: list[str] = []

    def read(self, publisher_id: str) -> bytes | None:
        self.reads.append(publisher_id)
        return self.rows.get(publisher_id)


def test_a_publisher_is_read_from_the_store_until_it_is_kept() -> None:
    rows = _Rows(known=Publisher(2, 7))
    cache = PublisherCache(rows.read, NONE_PASSED_ON)
    assert cache.find("known") == Publisher(2, 7)
    assert cache.find("new") == Publisher()
    cache.keep("known", Publisher(2, 8))
    assert cache.find("known") == Publisher(2, 8)
    assert rows.reads == ["known", "new"]


def test_a_forgotten_publisher_is_read_again() -> None:
    rows = _Rows()
    cache = PublisherCache(rows.read, NONE_PASSED_ON)
    cache.keep("p", Publisher(1, 1))
    cache.forget("p")
    cache.forget("never there")
    assert cache.find("p") == Publisher()


def test_the_cache_keeps_the_publishers_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers, "_CACHED_MAX", 2)
    rows = _Rows()
    cache = PublisherCache(rows.read, NONE_PASSED_ON)
    cache.keep("a", Publisher(1))
    cache.keep("b", Publisher(2))
    cache.find("a")
    cache.keep("c", Publisher(3))
    assert cache.find("a") == Publisher(1)
    assert cache.find("c") == Publisher(3)
    assert rows.reads == []
    assert cache.find("b") == Publisher()
    assert rows.reads == ["b"]


def position(first: int, *, unit: int = 1, done: bool = False, epoch: int = 1) -> PublisherPosition:
    return PublisherPosition("p", epoch, first, unit, done)


def test_a_row_of_before_there_were_units_is_read() -> None:
    row = msgspec.msgpack.encode((3, 10, NOW, [(4, int(Reason.CONDITION_FAILED), "no", 7)]))
    assert decode(row) == Publisher(3, 10, NOW, (Refusal(4, Reason.CONDITION_FAILED, "no", 7),))


def test_a_row_with_a_unit_is_read_back() -> None:
    publisher = Publisher(3, 10, NOW, (refusal(4),), 7, 1_000, 8, 20, 4)
    assert decode(encode(publisher)) == publisher


def test_an_opened_publisher_has_the_next_epoch_unless_its_unit_is_finished() -> None:
    """P6, publishers [3]."""
    known, opened = Publisher().open(0, "p", NOW)
    assert (known.epoch, opened) == (1, OpenedPublisher(1))
    known = known.advance(5, [], NOW, unit=7, applied=5, finishes=True)
    for unit, records in ((7, 5), (6, 0)):
        same, opened = known.open(unit, "p", NOW + 1)
        assert opened == OpenedPublisher(1, True, records)
        assert same == known._replace(last_use_micros=NOW + 1)
    begun, opened = known.open(8, "p", NOW)
    assert opened == OpenedPublisher(2)
    earlier = (UNKNOWN_TOPIC,)
    assert begun == Publisher(epoch=2, last_use_micros=NOW, unit=7, unit_records=5, given=True, earlier=earlier)


def test_there_is_no_epoch_above_the_last() -> None:
    with pytest.raises(StoreError) as caught:
        Publisher(epoch=EPOCH_MAX).open(0, "p", NOW)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, "publisher_id")


def test_the_records_of_a_unit_are_those_of_the_attempt_that_finished_it() -> None:
    first = Publisher(epoch=1).advance(4, [], NOW, unit=1, applied=4)
    again = first.admit(position(1, epoch=2), 3).advance(3, [], NOW, unit=1, applied=3)
    done = again.advance(5, [], NOW, unit=1, applied=2, finishes=True)
    assert (done.unit, done.unit_records) == (1, 5)
    assert done.advance(6, [], NOW, unit=2, applied=1).open_records == 1


@pytest.mark.parametrize(
    ("first", "count", "unit", "passes"),
    [(5, 2, 1, True), (1, 6, 1, True), (7, 0, 1, True), (7, 1, 1, False), (6, 2, 1, False), (7, 0, 2, True)],
)
def test_a_finished_unit_admits_only_requests_decided_before(first: int, count: int, unit: int, passes: bool) -> None:
    """publishers [3]: whoever has not heard that the unit is finished is told so by his retry."""
    done = Publisher(epoch=1).advance(6, [], NOW, unit=1, applied=6, finishes=True)
    if passes:
        assert done.admit(position(first, unit=unit, done=True), count) == done
    else:
        with pytest.raises(StoreError) as caught:
            done.admit(position(first, unit=unit), count)
        assert (caught.value.reason, caught.value.field) == (Reason.UNIT_DONE, "publisher.unit")
    for again in (position(first, epoch=2, unit=1), position(first, epoch=2, unit=1, done=True)):
        with pytest.raises(StoreError, match="published whole"):
            done.admit(again, count)
