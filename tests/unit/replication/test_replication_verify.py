"""Verify between two stores in memory: it reports the records that differ, and no others (rule R10)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sow_peering import Checksums, TopicKind
from sow_replication import verify as verifying
from tests.support.simulation.verifying import ORDERS, Row, World, differences, refused
from tests.support.stores.stores import SECOND, START

# --- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ends_that_are_equal_are_read_once() -> None:
    world = World()
    world.both({b"%d" % number: Row(number) for number in range(5000)})

    answer = world.verified()

    assert (answer.topic, answer.records, answer.differing, answer.left_out) == ("orders", 5000, 0, "")
    assert world.peer.calls == ["checksum"]
    assert world.slept == []


def test_differences_are_listed_with_both_versions() -> None:
    world = World()
    world.both({b"%d" % number: Row(number) for number in range(100)})
    world.a.orders |= {b"newer": Row(7), b"here": Row(3), b"content": Row(5, payload="x")}
    world.b.orders |= {b"newer": Row(6), b"there": Row(4), b"content": Row(5, payload="y")}

    answer = world.verified()

    assert answer.records == 103
    assert answer.differing == 4
    assert differences(answer) == [("content", 5, 5), ("here", 3, 0), ("newer", 7, 6), ("there", 0, 4)]


def test_tombstones_are_no_records() -> None:
    world = World()
    world.a.orders[b"1"] = Row(7, dead=True)

    assert world.verified().differing == 0


@pytest.mark.parametrize(("keys_max", "listed"), [(None, 100), (3, 3), (0, 0), (1000, 300)])
def test_a_bounded_number_of_keys_is_listed_and_all_are_counted(keys_max: int | None, listed: int) -> None:
    world = World()
    world.a.orders |= {b"%03d" % number: Row(1) for number in range(300)}

    (answer,) = world.verify(keys_max=keys_max)

    assert answer.differing == 300
    assert len(answer.differences) == listed


def test_the_keys_of_an_answer_fit_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "LISTED_BYTES_MAX", 50)
    world = World()
    world.a.orders |= {b"%010d" % number: Row(1) for number in range(300)}

    (answer,) = world.verify(keys_max=1000)

    assert (answer.differing, len(answer.differences)) == (300, 5)


def test_a_large_topic_has_more_buckets_so_that_little_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "BUCKETS_FIRST", 16)
    monkeypatch.setattr(verifying, "BUCKET_RECORDS", 10)
    world = World()
    world.both({b"%06d" % number: Row(1) for number in range(16 * 10 * 32)})
    world.b.orders[b"000007"] = Row(2)

    answer = world.verified()

    assert differences(answer) == [("000007", 1, 2)]
    assert max(world.peer.lists) < 3 * verifying.BUCKET_RECORDS


@pytest.mark.parametrize(("records", "buckets"), [(0, 1024), (65_536, 1024), (65_537, 2048), (10**9, 65_536)])
def test_the_number_of_buckets_follows_the_size_of_the_topic(records: int, buckets: int) -> None:
    assert verifying.buckets_for(records) == buckets


def test_much_that_differs_is_listed_in_groups_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "GROUP_RECORDS", 500)
    monkeypatch.setattr(verifying, "MESSAGE_VERSIONS", 100)
    world = World()
    world.b.orders |= {b"%05d" % number: Row(1) for number in range(3000)}

    (answer,) = world.verify(keys_max=3000)

    assert answer.differing == 3000
    assert [key for key, _, _ in differences(answer)] == [f"{number:05d}" for number in range(3000)]
    assert max(world.peer.lists) == 100
    looks = world.peer.calls.count("list_versions")
    assert looks == 2 * 6 or looks == 2 * 7  # two looks at each group of about 500


def test_long_keys_make_more_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "MESSAGE_KEY_BYTES", 1000)
    world = World()
    world.b.orders |= {b"%0500d" % number: Row(1) for number in range(10)}

    assert world.verified().differing == 10
    assert max(world.peer.lists) == 2


# --- changes under way -----------------------------------------------------------------------------------------------


def test_a_change_that_arrives_between_two_looks_is_no_difference() -> None:
    world = World()
    world.both({b"1": Row(1)})
    world.a.orders[b"1"] = Row(2)

    world.meanwhile = [lambda: world.b.orders.update({b"1": Row(2)})]

    assert world.verified().differing == 0
    assert len(world.slept) == 1


def test_a_key_that_keeps_changing_is_not_reported_and_one_that_differs_is() -> None:
    world = World()
    world.both({b"busy": Row(1), b"other": Row(1)})
    world.a.orders |= {b"busy": Row(2), b"stays": Row(9)}

    def change() -> None:
        version = world.a.orders[b"busy"].version
        world.b.orders[b"busy"] = Row(version)
        world.a.orders[b"busy"] = Row(version + 1)

    world.meanwhile = [change] * 10

    answer = world.verified()

    assert differences(answer) == [("stays", 9, 0)]
    assert answer.differing == 1
    assert tuple(world.slept) == verifying.PAUSES  # and it has an end


def test_while_the_link_lags_nothing_is_called_a_difference_too_soon() -> None:
    """Two looks in a row can both be in front of the same change."""
    world = World()
    world.both({b"1": Row(1)})
    world.a.orders[b"1"] = Row(2)
    lag = [True]

    def arrives() -> None:
        world.b.orders[b"1"] = Row(2)
        lag[0] = False

    world.meanwhile = [lambda: None, lambda: None, arrives]
    world.means = replace(world.means, lagging=lambda: lag[0])

    assert world.verified().differing == 0
    assert len(world.slept) == 3


def test_lag_that_ends_after_a_look_does_not_settle_its_differences() -> None:
    world = World()
    world.both({b"1": Row(1)})
    world.a.orders[b"1"] = Row(2)
    lag = [True]
    looks = [0]

    def before(call: str) -> None:
        if call == "listed":
            looks[0] += 1
            if looks[0] == 2:  # arrives right behind the second look, which had begun with the link behind
                world.b.orders[b"1"] = Row(2)
                lag[0] = False

    world.peer.before = before
    world.means = replace(world.means, lagging=lambda: lag[0])

    assert world.verified().differing == 0


def test_stable_differences_are_reported_in_the_end_on_a_link_that_always_lags() -> None:
    world = World()
    world.a.orders[b"1"] = Row(2)
    world.means = replace(world.means, lagging=lambda: True)

    assert differences(world.verified()) == [("1", 2, 0)]
    assert tuple(world.slept) == verifying.PAUSES


# --- expiration ------------------------------------------------------------------------------------------------------


def test_records_due_soon_are_left_out_at_both_ends() -> None:
    world = World()
    world.both({b"1": Row(1)})
    world.a.orders[b"due"] = Row(2, expire_time=START + verifying.MARGIN_MICROS)

    answer = world.verified()

    assert (answer.records, answer.differing) == (1, 0)


@pytest.mark.parametrize("seconds", [-100, 2, 100, 1800])
def test_clocks_that_differ_make_no_differences(seconds: int) -> None:
    """The end with the clock ahead has expired records that the other one still has."""
    world = World()
    world.both({b"stays": Row(1)})
    world.b.now = START + seconds * SECOND
    expiring = {b"%d" % number: Row(2, expire_time=START + number * SECOND) for number in range(-2999, 3000, 50)}
    for store in (world.a, world.b):
        store.orders.update({key: row for key, row in expiring.items() if row.expire_time > store.now})
    assert world.a.orders != world.b.orders

    answer = world.verified()

    assert (answer.differing, answer.left_out) == (0, "")
    assert answer.records >= 1


def test_the_offset_of_the_clocks_is_learned_once_for_all_topics() -> None:
    other = ORDERS._replace(name="other")
    world = World(ORDERS, other)
    world.b.now = START + 10 * SECOND

    assert [answer.left_out for answer in world.verify()] == ["", ""]

    assert world.peer.calls.count("checksum") == 4  # margins of 1, 4 and 16 seconds; then 16 at once


def test_clocks_far_apart_leave_topics_out_that_act_on_expiration() -> None:
    keeps = ORDERS._replace(name="keeps", acts=False)
    world = World(ORDERS, keeps)
    world.b.now = START + 2 * verifying.MARGIN_MICROS_MAX

    acting, keeping = world.verify()

    assert "at b: " in acting.left_out
    assert keeping.left_out == ""


# --- topics that are left out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (None, "at b: there is no "),
        (ORDERS._replace(key=("/other",)), "at b: the key differs"),
        (ORDERS._replace(message_type="msgpack"), "at b: the key differs"),
        (ORDERS._replace(acts=False), "at b: expiration differs"),
        (ORDERS._replace(journal=False), "at b: it has no journal"),
    ],
)
def test_a_topic_that_cannot_be_compared_is_left_out_and_the_rest_goes_on(there: TopicKind | None, why: str) -> None:
    other = ORDERS._replace(name="other")
    world = World(ORDERS, other)
    world.a.orders[b"1"] = Row(1)
    world.a.rows_of["other"][b"1"] = Row(1)
    if there is None:
        del world.b.kinds["orders"]
    else:
        world.b.kinds["orders"] = there

    verified = world.verify()
    repaired = world.repair()

    for left_out, gone_on in (verified, repaired):
        assert left_out.topic == "orders"
        assert left_out.left_out.startswith(why)
        assert (gone_on.topic, gone_on.left_out) == ("other", "")
    assert world.b.rows_of["orders"] == {}
    assert world.b.rows_of["other"] == {b"1": Row(1)}


def test_only_the_wanted_topics_are_compared_and_unknown_ones_are_named() -> None:
    world = World(ORDERS, ORDERS._replace(name="other"))

    answers = world.verify("other", "nothing", "other")

    assert [(answer.topic, answer.left_out) for answer in answers] == [
        ("other", ""),
        ("nothing", verifying.NOT_OF_THE_LINK),
    ]
    assert [answer.topic for answer in world.repair("nothing")] == ["nothing"]


def test_a_topic_without_a_journal_here_and_a_link_with_a_filter_are_left_out_without_asking() -> None:
    world = World(ORDERS._replace(journal=False))
    assert world.verified().left_out == "it has no journal here"

    world = World()
    world.means = replace(world.means, filter_text="/x = 1")
    assert world.verified().left_out == "the link has a filter: /x = 1"
    assert world.repair()[0].left_out == "the link has a filter: /x = 1"
    assert world.peer.calls == []


def test_a_topic_that_is_deleted_meanwhile_is_left_out() -> None:
    world = World()
    world.a.orders[b"1"] = Row(1)
    world.meanwhile = [world.b.kinds.clear]

    assert world.verified().left_out.startswith("at b: there is no topic")


def test_an_instance_does_not_verify_itself() -> None:
    """It would always be equal."""
    world = World()
    world.peer.store = world.a

    assert refused(world.verify)[0] == "PEER_IS_SELF"


# --- a peer that goes away -------------------------------------------------------------------------------------------


def test_an_answer_that_breaks_the_protocol_is_refused() -> None:
    world = World()
    world.b.checksums = lambda topic, buckets, now_micros: Checksums([0], [0], 0)  # type: ignore[method-assign]  # the peer is at fault

    assert refused(world.verify)[0] == "PROTOCOL_MISMATCH"
