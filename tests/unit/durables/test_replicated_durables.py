"""Replicated durables at one instance: what it takes over from marks of others (rules F14, F16), and its row."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from sow_peering import NO_STAMP, DurableMark, Stamp
from sow_server.engine.durables import Durable, Merged, RemovedDurable, RewindTo
from sow_server.engine.durables.model import REWINDS_MAX, DurableGap, GapReason, rewinds_of, without_gaps
from sow_server.engine.durables.rows import decode_durable, encode_durable, encode_removed
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.policies import NOTHING
from tests.support.stores.durables import crash, delete, durable, floor, put, rewind, rig
from tests.support.stores.stores import MINUTE, SECOND, Rig
from tests.support.stores.subscribers import EARLIEST, Subscribers, subscribers

__all__ = ["rig", "subscribers"]  # fixtures

REPLICATED = MappingProxyType({"replicated": True})
LATE = Stamp(2**62, "other")


def merge(rig: Rig, mark: DurableMark, position: int | None = None) -> Merged:
    answers: list[Merged | StoreError] = []
    topic = rig.topic("orders")
    rig.store.durable_commits.change(lambda durables: durables.merge(topic, mark, position)).then(answers.append)
    rig.store.writer.step()
    (answer,) = answers
    assert isinstance(answer, Merged), answer
    return answer


def mark_of(found: Durable, **changes: object) -> DurableMark:
    """The mark of a durable as another instance would tell it that has the same."""
    mark = DurableMark(
        "orders",
        found.name,
        found.filter,
        REPLICATED,
        found.born,
        found.buried,
        rewinds=found.rewinds,
    )
    return mark._replace(**changes)  # type: ignore[arg-type]  # the tests name fields


@pytest.fixture
def consumed(rig: Rig, subscribers: Subscribers) -> Durable:
    """A replicated durable that has acknowledged the first of four entries."""
    put(rig, "a", "b", "c", "d")
    follower = crash(subscribers, declared=REPLICATED, start=EARLIEST)
    first = follower.got()[0]
    crash(subscribers, acknowledged=first)
    return durable(rig)


def test_a_durable_is_replicated_by_its_own_settings_by_a_policy_and_by_its_topic(
    rig: Rig, subscribers: Subscribers
) -> None:
    """F14: also one that exists."""
    crash(subscribers, name="own", declared=REPLICATED)
    crash(subscribers, name="plain")
    crash(subscribers, name="not", declared={"replicated": False})
    assert durable(rig, "own").replicated
    assert not durable(rig, "plain").replicated
    rig.alter_topic("orders", replicate_durables=True)
    subscribers.upkeep()
    subscribers.settle()
    assert durable(rig, "plain").replicated
    assert durable(rig, "plain").born.instance == rig.store.instance.id
    assert not durable(rig, "not").replicated
    rig.alter_topic("orders", replicate_durables=False)
    crash(subscribers, name="plain")
    assert durable(rig, "plain").replicated, "it stays so"


def test_a_position_moves_on_and_never_back(rig: Rig, consumed: Durable) -> None:
    """Elsewhere 2. F14."""
    third = consumed.position + 2
    assert merge(rig, mark_of(consumed), third) is Merged.MOVED
    assert durable(rig).position == third
    assert durable(rig).entries == consumed.entries + 2
    assert merge(rig, mark_of(consumed), third - 1) is Merged.NOTHING
    assert merge(rig, mark_of(consumed), None) is Merged.NOTHING
    assert durable(rig).position == third


def test_positions_of_generations_are_not_compared(rig: Rig, subscribers: Subscribers, consumed: Durable) -> None:
    """F14: a rewind counts everywhere, also where the position was further on, and an old position counts nowhere."""
    put(rig, "e")
    position = durable(rig).position
    assert merge(rig, mark_of(consumed), position + 3) is Merged.MOVED
    assert merge(rig, mark_of(consumed, rewinds=(LATE,)), position) is Merged.RESTARTED
    assert (durable(rig).position, durable(rig).rewinds) == (position, (LATE,))
    assert merge(rig, mark_of(consumed), position + 3) is Merged.NOTHING
    assert durable(rig).position == position
    rewind(subscribers)
    here = Stamp(durable(rig).rewinds[0].number, rig.store.instance.id)
    assert sorted(durable(rig).rewinds) == sorted([here, LATE])
    assert merge(rig, mark_of(consumed, rewinds=(LATE,)), position + 3) is Merged.NOTHING, "it has not heard of ours"


def test_the_next_rewind_counts_although_the_clock_is_behind_the_last_one(
    rig: Rig, subscribers: Subscribers, consumed: Durable
) -> None:
    """F14."""
    ahead = Stamp(LATE.number, rig.store.instance.id)
    assert merge(rig, mark_of(consumed, rewinds=(ahead,))) is Merged.RESTARTED
    rewind(subscribers)
    assert durable(rig).rewinds == (ahead._replace(number=ahead.number + 1),)


@pytest.mark.parametrize("far", [False, True])
def test_of_two_rewinds_that_have_not_heard_of_each_other_the_lower_position_counts(
    rig: Rig, subscribers: Subscribers, consumed: Durable, *, far: bool
) -> None:
    """F14. Story: only the one of the clock that was ahead counted, at the position that came with it: the consumer of
    the other one was not handed again what it had asked for."""
    crash(subscribers, acknowledged=durable(rig).position + 2)
    rewind(subscribers, RewindTo(position=consumed.position))
    ours = durable(rig).rewinds
    theirs = consumed.position + (1 if far else -1)
    assert merge(rig, mark_of(consumed, rewinds=(LATE,)), theirs) is Merged.RESTARTED
    assert durable(rig).position == min(theirs, consumed.position)
    assert sorted(durable(rig).rewinds) == sorted([*ours, LATE])
    assert merge(rig, mark_of(consumed, rewinds=(LATE,)), theirs + 1) is Merged.NOTHING
    assert merge(rig, mark_of(durable(rig)), theirs + 1) is Merged.MOVED, "acknowledged since"


def test_a_rewind_of_unknown_position_beside_another_one_begins_as_early_as_possible(
    rig: Rig, subscribers: Subscribers, consumed: Durable
) -> None:
    """F14."""
    rewind(subscribers, RewindTo(position=consumed.position))
    assert merge(rig, mark_of(consumed, rewinds=(LATE,))) is Merged.RESTARTED
    assert durable(rig).position == rig.topic("orders").statistics.created_sequence


def test_a_rewind_here_counts_also_for_the_durable_that_takes_the_place_of_its_own(
    rig: Rig, subscribers: Subscribers, consumed: Durable
) -> None:
    """F14: of two that were created apart the one born first counts, and may have acknowledged more."""
    rewind(subscribers)
    found = durable(rig)
    assert merge(rig, mark_of(consumed, born=Stamp(1, "x")), consumed.position + 2) is Merged.RESTARTED
    assert (durable(rig).position, durable(rig).rewinds) == (found.position, found.rewinds)


def test_the_rewinds_of_a_bounded_number_of_instances_are_known() -> None:
    many = [Stamp(number, f"{number % 7}.{number}") for number in range(1, REWINDS_MAX + 10)]
    known = rewinds_of(many)
    assert len(known) == REWINDS_MAX
    assert min(known) == Stamp(10, "3.10"), "the oldest ones are forgotten"
    assert rewinds_of(known, many[:3], known) == known
    assert rewinds_of([Stamp(1, "x")], [Stamp(3, "x"), Stamp(2, "x")]) == (Stamp(3, "x"),)


def test_a_new_generation_without_a_position_begins_as_early_as_possible(rig: Rig, consumed: Durable) -> None:
    """F14: earlier, never later."""
    assert merge(rig, mark_of(consumed, rewinds=(LATE,))) is Merged.RESTARTED
    assert durable(rig).position == rig.topic("orders").statistics.created_sequence
    assert durable(rig).gaps == ()


def test_a_durable_of_another_instance_is_created_with_its_settings(rig: Rig) -> None:
    """Elsewhere 4."""
    put(rig, "a", "b")
    mark = DurableMark("orders", "d", "", {"replicated": True, "delivery_limit": 3}, Stamp(7, "x"), idle_micros=5)
    last = rig.store.commits.last_sequence
    assert merge(rig, mark, last - 1) is Merged.CREATED
    found = durable(rig)
    assert (found.position, found.born, found.attached) == (last - 1, Stamp(7, "x"), False)
    assert dict(found.declared) == {"replicated": True, "delivery_limit": 3}
    assert found.last_use_micros == rig.clock.now_micros() - 5


def test_a_durable_keeps_its_owner_and_a_name_that_nobody_could_have_given_is_left_out(rig: Rig) -> None:
    """A7, F14: at each instance it belongs to the identity of that name."""
    assert merge(rig, DurableMark("orders", "desk/d", born=Stamp(7, "x"))) is Merged.CREATED
    assert rig.store.durables.count_owned("desk") == 1
    assert merge(rig, DurableMark("orders", "a b", born=Stamp(7, "x"))) is Merged.NOTHING


def test_entries_that_are_gone_here_are_told_by_a_gap(rig: Rig, subscribers: Subscribers) -> None:
    """F14, J5."""
    rig.alter_topic("orders", max_entries=2)
    put(rig, "a", "b", "c", "d", "e")
    rig.prune()
    assert floor(rig) > 0
    mark = DurableMark("orders", "d", "", REPLICATED, Stamp(7, "x"))
    assert merge(rig, mark, floor(rig) - 1) is Merged.CREATED
    follower = subscribers.attach("orders", "d")
    assert follower.gaps() == [("DISCARDED", floor(rig) - 1, floor(rig), 0)]
    assert [row.key for row in follower.changes()] == [b"d", b"e"]


def test_entries_that_a_limit_has_let_go_are_not_told_as_acknowledged(
    rig: Rig, subscribers: Subscribers, consumed: Durable
) -> None:
    """F14: elsewhere they are still there. `consumed` is the position in front of the gap, until it was told."""
    rig.alter_topic("orders", max_entries=1)
    rig.prune()
    found = durable(rig)
    assert found.position > consumed.position
    assert found.consumed == consumed.position
    # Another instance has handed a part of them over.
    assert merge(rig, mark_of(found), consumed.position + 1) is Merged.MOVED
    assert durable(rig).consumed == consumed.position + 1
    assert durable(rig).position == found.position
    follower = subscribers.attach("orders", "d")
    follower.acknowledge()
    assert durable(rig).consumed == durable(rig).position


def test_of_two_durables_of_one_name_the_one_born_first_counts(rig: Rig, consumed: Durable) -> None:
    """F14: it may have a backlog that the other one never had."""
    late = mark_of(consumed, born=consumed.born._replace(number=consumed.born.number + 1))
    assert merge(rig, late, consumed.position + 2) is Merged.NOTHING
    assert durable(rig) == consumed
    early = mark_of(consumed, born=Stamp(1, "x"), rewinds=(Stamp(2, "x"),))
    assert merge(rig, early, None) is Merged.RESTARTED
    assert (durable(rig).born, durable(rig).rewinds) == (Stamp(1, "x"), (Stamp(2, "x"),))
    assert durable(rig).position < consumed.position


def test_the_one_born_first_counts_with_its_settings(rig: Rig, subscribers: Subscribers, consumed: Durable) -> None:
    """F14: each instance kept those of its own, so a consumer that moved was refused (DURABLE_DIFFERS), for good."""
    declared = {"replicated": True, "delivery_limit": 3}
    later = consumed.born._replace(number=consumed.born.number + 1)
    assert merge(rig, mark_of(consumed, born=later, declared=declared)) is Merged.NOTHING
    assert dict(durable(rig).declared) == REPLICATED
    assert merge(rig, mark_of(consumed, rewinds=(LATE,), declared=declared)) is Merged.RESTARTED
    assert dict(durable(rig).declared) == REPLICATED, "a rewind changes no settings"
    assert merge(rig, mark_of(consumed, born=Stamp(1, "x"), declared=declared)) is Merged.RESTARTED
    assert dict(durable(rig).declared) == declared
    subscribers.attach("orders", "d", declared=declared)


def test_another_filter_or_one_that_is_not_replicated_is_left_alone(
    rig: Rig, subscribers: Subscribers, consumed: Durable
) -> None:
    crash(subscribers, name="plain")
    before = durable(rig, "plain")
    assert merge(rig, DurableMark("orders", "plain", born=Stamp(1, "x")), 5) is Merged.DIFFERS
    assert merge(rig, DurableMark("orders", "plain", buried=LATE, removed=True)) is Merged.NOTHING
    assert durable(rig, "plain") == before
    assert merge(rig, mark_of(consumed, filter="/px = 1"), consumed.position + 1) is Merged.DIFFERS
    assert durable(rig) == consumed


def test_a_deletion_travels_and_the_deleted_one_does_not_come_back(
    rig: Rig, subscribers: Subscribers, consumed: Durable
) -> None:
    """F16."""
    delete(subscribers)
    assert rig.store.durables.buried(rig.topic("orders").id, "d") == consumed.born
    assert merge(rig, mark_of(consumed), consumed.position) is Merged.NOTHING
    assert rig.store.durables.get(rig.topic("orders").id, "d") is None
    rig.time.tick(SECOND)
    again = crash(subscribers, declared=REPLICATED)
    assert again.begun.reset
    assert durable(rig).buried == consumed.born
    assert durable(rig).born > consumed.born
    # And from elsewhere.
    assert merge(rig, DurableMark("orders", "d", buried=durable(rig).born, removed=True)) is Merged.REMOVED
    assert rig.store.durables.get(rig.topic("orders").id, "d") is None


def test_one_that_is_made_again_elsewhere_takes_the_place_of_the_deleted_one(rig: Rig, consumed: Durable) -> None:
    """F16: in one mark."""
    mark = mark_of(consumed, buried=consumed.born, born=LATE)
    assert merge(rig, mark, consumed.position + 1) is Merged.CREATED
    assert (durable(rig).born, durable(rig).position) == (LATE, consumed.position + 1)


def test_an_idle_one_is_removed_here_only_and_comes_back_once_it_is_used(
    rig: Rig, subscribers: Subscribers, consumed: Durable
) -> None:
    """F16, J10: where it is in use elsewhere, it is not idle."""
    rig.alter_topic("orders", durable_idle_ttl_micros=MINUTE)
    rig.time.tick(2 * MINUTE)
    subscribers.upkeep()
    assert rig.store.durables.get(rig.topic("orders").id, "d") is None
    assert rig.store.durables.buried(rig.topic("orders").id, "d") is None
    rig.time.tick(SECOND)
    assert merge(rig, mark_of(consumed, idle_micros=2 * MINUTE)) is Merged.NOTHING
    assert merge(rig, mark_of(consumed, idle_micros=0)) is Merged.CREATED


def test_a_deletion_elsewhere_counts_for_one_that_was_removed_here_because_it_was_idle(
    rig: Rig, subscribers: Subscribers, consumed: Durable
) -> None:
    """F16: in a line, the one in the middle passed the deletion over. It never arrived at the other end, and from there
    the durable came back."""
    rig.alter_topic("orders", durable_idle_ttl_micros=MINUTE)
    rig.time.tick(2 * MINUTE)
    subscribers.upkeep()
    rig.time.tick(SECOND)
    deleted = DurableMark("orders", "d", buried=consumed.born, removed=True)
    assert merge(rig, deleted) is Merged.REMOVED
    assert rig.store.durables.buried(rig.topic("orders").id, "d") == consumed.born, "others are told"
    assert merge(rig, mark_of(consumed, idle_micros=0)) is Merged.NOTHING
    assert merge(rig, deleted) is Merged.NOTHING
    assert merge(rig, deleted._replace(name="never here")) is Merged.NOTHING
    assert rig.store.durables.buried(rig.topic("orders").id, "never here") is None, "or it would never be forgotten"


def test_a_use_elsewhere_is_a_use(rig: Rig, subscribers: Subscribers, consumed: Durable) -> None:
    """F16."""
    rig.alter_topic("orders", durable_idle_ttl_micros=MINUTE)
    rig.time.tick(50 * SECOND)
    assert merge(rig, mark_of(consumed, idle_micros=SECOND)) is Merged.NOTHING
    rig.time.tick(20 * SECOND)
    subscribers.upkeep()
    assert durable(rig).name == "d"


def test_the_row_of_a_durable_that_is_not_replicated_is_as_it_was() -> None:
    """An earlier version reads it."""
    plain = Durable(1, "d", "", 5, 2, 20, 3, 4)
    assert b"born" not in encode_durable(plain)
    assert decode_durable(1, "d", encode_durable(plain)) == plain
    full = plain._replace(born=Stamp(1, "x"), buried=Stamp(2, "y"), rewinds=(Stamp(3, "z"),), declared=REPLICATED)
    assert decode_durable(1, "d", encode_durable(full)) == full
    for removed in (RemovedDurable(7), RemovedDurable(7, Stamp(2, "y"), Stamp(3, "z"))):
        assert decode_durable(1, "d", encode_removed(removed)) == removed
    assert (plain.born, plain.declared) == (NO_STAMP, NOTHING)


def test_gaps_up_to_a_position_are_no_gaps_any_more() -> None:
    gaps = (DurableGap(GapReason.EVICTED, 2, 5, 3), DurableGap(GapReason.DISCARDED, 7, 9, 2))
    assert without_gaps(gaps, 1) == gaps
    assert without_gaps(gaps, 4) == (DurableGap(GapReason.EVICTED, 4, 5, 0), gaps[1])
    assert without_gaps(gaps, 7) == (gaps[1],)
    assert without_gaps(gaps, 9) == ()
