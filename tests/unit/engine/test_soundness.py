"""Rows of peers that no publish could have made (R13): not taken; and topics that hold some already go on working."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from structlog.testing import capture_logs

from sow_peering import MergeCounts
from sow_server.engine.commit import soundness
from sow_server.engine.commit.letter_copies import post
from sow_server.engine.disk.rocks import RECORDS
from sow_server.engine.durables import DurableEditor
from sow_server.engine.stored import DELETE, TOUCH
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import NEVER, TTL_MAX_MICROS, Delete, Expiration, MessageType
from sow_server.query.filtering import record_filter
from sow_server.query.planner import Access
from sow_server.query.scan import Query, Scan
from tests.support.stores import bad_rows
from tests.support.stores.bad_rows import Bad
from tests.support.stores.replicas import instance, ship
from tests.support.stores.stores import HOUR, START, Rig

LARGE: Final = b'{"pad":"%s"}' % (b"x" * 2**20)
NESTED: Final = b'{"a":' + b"[" * 300 + b"]" * 300 + b"}"
UNSOUND: Final = {
    "key-not-utf8": (Bad(key=b"\xff\xfe"), Reason.KEY_NOT_UTF8),
    "key-empty": (Bad(key=b""), Reason.KEY_REQUIRED),
    "key-too-long": (Bad(key=b"x" * 20_000), Reason.KEY_TOO_LARGE),
    "payload-of-another-type": (Bad(payload=b"\xff"), Reason.PAYLOAD_MALFORMED),
    "payload-too-deep": (Bad(payload=NESTED), Reason.PAYLOAD_MALFORMED),
    "payload-too-large": (Bad(payload=LARGE), Reason.PAYLOAD_TOO_LARGE),
    "version-negative": (Bad(version=-5), Reason.INVALID_ARGUMENT),
    "version-zero": (Bad(version=0), Reason.INVALID_ARGUMENT),
    "stamp-negative": (Bad(expire_time=-1), Reason.LIFETIME_NEGATIVE),
    "stamp-too-far": (Bad(expire_time=START + 2 * TTL_MAX_MICROS), Reason.LIFETIME_TOO_LONG),
    "stamp-just-before-never": (Bad(expire_time=NEVER - 1), Reason.LIFETIME_TOO_LONG),
    "published-before-time": (Bad(publish_time=-1), Reason.INVALID_ARGUMENT),
    "published-in-the-future": (Bad(publish_time=START + HOUR), Reason.INVALID_ARGUMENT),
}
WAYS: Final[dict[str, Callable[..., MergeCounts]]] = {
    "changes": bad_rows.send,
    "seed": bad_rows.seed,
    "repair": bad_rows.mend,
}
POISON: Final = (Bad(key=b""), Bad(key=b"\xff\xfe"), Bad(key=b"x" * 20_000), Bad(key=b"p", payload=b"\xff"))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    made = instance(tmp_path, "a")
    made.create_topic("t", message_type=MessageType.JSON, expiration=Expiration.ENABLED)
    made.create_topic("k", message_type=MessageType.JSON, key=("/id",))
    return made


# --- rows from a peer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_large_float_may_have_the_key_that_earlier_releases_gave_it(rig: Rig, way: str) -> None:
    """Keys [3]: all digits of the integer that it is. A query by the number finds it, under either key."""
    payload = b'{"id":1.2345678901234568e+20}'
    good = Bad(key=b"123456789012345683968", payload=payload), Bad(key=b"123456789012345680000", payload=payload)
    bad = Bad(key=b"123456789012345680001", payload=payload)
    assert WAYS[way](rig, "k", *good, bad) == MergeCounts(applied=2, refused=1)
    topic = rig.topic("k")
    for text in ("/id = 1.2345678901234568e+20", "/id IN (123456789012345680000, 7)", "/id = '123456789012345680000'"):
        scan = Scan(rig.store.cuts, Query(topic, filter=record_filter(topic, text, 0)))
        batch = scan.next_batch()
        assert batch is not None
        assert list(batch.keys) == [b"123456789012345680000", b"123456789012345683968"], text
        assert scan.explanation().access is Access.POINTS
        scan.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", UNSOUND)
def test_a_row_that_no_publish_could_have_made_is_refused_and_the_rest_is_taken(rig: Rig, case: str, way: str) -> None:
    """soundness [1]. Story: it was applied, and then every query, delete and subscription of the topic was INTERNAL for
    ever."""
    bad, reason = UNSOUND[case]
    good = [Bad(key=b"a"), Bad(key="ü".encode())]
    with capture_logs() as logs:
        counts = WAYS[way](rig, "t", good[0], bad, good[1])
    assert counts == MergeCounts(applied=2, refused=1)
    assert set(rig.live("t")) == {b"a", "ü".encode()}
    assert rig.store.unsound.refused == {("t", reason.name): 1}
    (line,) = [line for line in logs if line["event"] == "peer_rows_refused"]
    assert (line["topic"], line["source"], line["reason"]) == ("t", "peer", reason.name)
    assert line["key"] == soundness.shown(bad.key)
    if way == "changes":
        assert rig.store.replicas.sources.by_name["peer"].cursor == 3, "R6: it moves on in the same commit"


def test_a_batch_of_nothing_but_bad_rows_moves_the_cursor(rig: Rig) -> None:
    """The link would bring the same batch for ever."""
    assert bad_rows.send(rig, "t", Bad(key=b"\xff"), Bad(key=b"")) == MergeCounts(refused=2)
    assert rig.store.replicas.sources.by_name["peer"].cursor == 2
    rig.reopen()
    assert rig.store.replicas.sources.by_name["peer"].cursor == 2


def test_halves_of_a_character_in_two_keys_do_not_make_one(rig: Rig) -> None:
    first, second = "ü".encode()[:1], "ü".encode()[1:]
    assert bad_rows.send(rig, "t", Bad(key=first), Bad(key=second)) == MergeCounts(refused=2)


def test_a_payload_with_another_key_than_the_rows_is_refused(rig: Rig) -> None:
    """K3, K4: a publish derives the key."""
    counts = bad_rows.send(
        rig, "k", Bad(b"1", b'{"id":1}'), Bad(b"2", b'{"id":3}'), Bad(b"4", b"{}"), Bad(b"5", b'{"id":5.0}', kind=TOUCH)
    )
    assert counts == MergeCounts(applied=2, refused=2)
    assert set(rig.live("k")) == {b"1", b"5"}


def test_an_origin_that_is_no_name_of_an_instance_is_not_remembered(rig: Rig) -> None:
    names = ["peer", "", "no name", "x" * 101, "fine"]
    rows = [Bad(key=b"%d" % number, origin=number) for number in range(5)]
    assert bad_rows.send(rig, "t", *rows, origins=names) == MergeCounts(applied=2, refused=3)
    assert set(rig.live("t")) == {b"0", b"4"}
    assert {"peer", "fine"} <= set(rig.store.origins.names)
    assert not set(names[1:4]) & set(rig.store.origins.names)


def test_lines_of_the_log_are_bounded_and_escape_the_key(rig: Rig) -> None:
    with capture_logs() as logs:
        for _ in range(5):
            bad_rows.send(rig, "t", Bad(key=b"\xff\x1b[2J\n"))
        rig.time.tick(soundness.LOG_INTERVAL_MICROS)
        bad_rows.send(rig, "t", Bad(key=b"\xff"))
    lines = [line for line in logs if line["event"] == "peer_rows_refused"]
    assert [line["rows"] for line in lines] == [1, 5]
    assert lines[0]["key"] == r"\\xff\x1b[2J\n"


def test_limits_are_those_of_the_instance_that_takes_the_row(tmp_path: Path) -> None:
    """R13: a row that a peer with larger limits has accepted is refused here, and counted."""
    rig = instance(tmp_path, "a")
    rig.create_topic("t", message_type=MessageType.BINARY)
    limits = rig.store.replicas.changes.limits
    fits = Bad(b"k" * limits.key_bytes_max, b"x" * limits.payload_bytes_max)
    beyond = (fits._replace(key=fits.key + b"k"), fits._replace(payload=fits.payload + b"x"))
    assert bad_rows.send(rig, "t", fits, *beyond) == MergeCounts(applied=1, refused=2)


def test_a_copy_of_an_expired_record_may_exceed_the_limits_of_publishers(tmp_path: Path) -> None:
    """T3: the key of a letter names topic and version beside the record's key, and its payload says where it expired.
    Such rows are made here and there alike, and replicate."""
    a, b = instance(tmp_path, "a", peers=["b"]), instance(tmp_path, "b", peers=["a"])
    for rig in (a, b):
        rig.create_topic("letters", message_type=MessageType.JSON)
    a.create_topic("t", message_type=MessageType.JSON, expiration=Expiration.ENABLED, dead_letter="letters")
    a.put("t", "k" * 1024, b'{"pad":"%s"}' % (b"x" * (2**20 - 10)), ttl=1)
    a.time.tick(1)
    a.store.sweep()
    ship(a, b)
    (key,) = b.live("letters")
    assert len(key) > 1024
    assert a.live("letters").keys() == b.live("letters").keys()
    assert not b.store.unsound.refused


def test_a_copy_of_an_entry_that_a_durable_set_aside_may_be_longer_too(tmp_path: Path) -> None:
    """T3, J15. Story: its key also names the durable, so peers refused it, and a repairing check removed it."""
    a, b = instance(tmp_path, "a", peers=["b"]), instance(tmp_path, "b", peers=["a"])
    for rig in (a, b):
        rig.create_topic("letters", message_type=MessageType.JSON)
    a.create_topic("t", message_type=MessageType.JSON, dead_letter="letters")
    a.put("t", "k" * 1024, b"{}")
    set_aside(a, "t", "slow")
    (key,) = a.live("letters")
    assert key.endswith(b"|slow")
    ship(a, b)
    assert b.live("letters").keys() == {key}
    assert unsound(a, "letters") == []


@pytest.mark.parametrize("ends", ["expires", "is set aside"])
def test_a_copy_that_waits_for_its_topic_is_sound_however_long_its_key_is(rig: Rig, ends: str) -> None:
    """letter_copies [4]. Story: a repairing check of `_undelivered` removed the letters of records with long keys."""
    rig.alter_topic("t", dead_letter="missing")
    rig.put("t", "|" * 1024, b"{}", ttl=1)
    if ends == "is set aside":
        set_aside(rig, "t", "slow")
    rig.time.tick(1)
    rig.store.sweep()
    assert rig.live("_undelivered")
    assert unsound(rig, "_undelivered") == []


def set_aside(rig: Rig, topic: str, durable: str) -> None:
    """A durable sets aside the last entry of a topic."""
    sequence = rig.topic(topic).statistics.last_sequence

    def change(durables: DurableEditor) -> bool:
        found = rig.topic(topic)
        attached = durables.attach(
            found, durable, filter_text="", start=sequence - 1, declared={"delivery_limit": 1}, expected=False
        )
        durables.detach(found, durable, sequence)
        durables.attach(found, durable, filter_text="", start=None, declared=None, expected=False)
        return durables.set_aside(found, durable, attached.durable.position, [sequence], sequence)

    answers: list[bool | StoreError] = []
    rig.store.durable_commits.change(change).then(answers.append)
    assert rig.answer(answers)


def unsound(rig: Rig, topic: str) -> list[str]:
    """The report about the rows of a topic that no publish could have made."""
    found, limits = rig.topic(topic), rig.store.replicas.changes.limits
    rows = rig.rows(RECORDS, found.prefix, found.stop)
    faults = [soundness.row_fault(found, key[4:], value, limits, rig.time.wall_micros) for key, value in rows]
    return [fault.message for fault in faults if fault is not None]


def test_a_removal_under_such_a_key_is_taken_where_there_is_a_row_and_is_nothing_elsewhere(rig: Rig) -> None:
    """So a repair at one instance mends all of them."""
    bad_rows.poison(rig, "t", Bad(key=b"\xff"))
    later = Bad(key=b"\xff", kind=DELETE, version=START + 1, payload=b"")
    assert bad_rows.send(rig, "t", later) == MergeCounts(applied=1)
    assert rig.stored("t") == {}
    assert bad_rows.send(rig, "t", Bad(key=b"\xfe", kind=DELETE, payload=b"")) == MergeCounts(known=1)
    assert bad_rows.send(rig, "t", Bad(key=b"fine", kind=DELETE, payload=b"", version=-1)) == MergeCounts(refused=1)


# --- stored rows -----------------------------------------------------------------------------------------------------


def found(rig: Rig, text: str = "") -> set[bytes]:
    given = record_filter(rig.topic("t"), text, 0) if text else None
    scan = Scan(rig.store.cuts, Query(rig.topic("t"), filter=given))
    try:
        keys: set[bytes] = set()
        while (batch := scan.next_batch()) is not None:
            keys.update(batch.keys)
        return keys
    finally:
        scan.close()


def test_reads_skip_and_report_rows_with_unreadable_keys(rig: Rig) -> None:
    """soundness [2]."""
    bad_rows.send(rig, "t", Bad(key=b"a"), Bad(key=b"b"))
    bad_rows.poison(rig, "t", *POISON)
    readable = {b"a", b"b", b"p", b"x" * 20_000}
    with capture_logs() as logs:
        assert found(rig) == readable
        assert found(rig, "@key >= 'a'") == readable
    assert rig.store.unsound.skipped == {"t": 3}, "the empty key is not in the range of the second"
    assert [line["rows"] for line in logs if line["event"] == "rows_unreadable"] == [2]


def test_an_index_that_names_such_a_row_does_not_give_it(rig: Rig) -> None:
    rows = [Bad(b"%d" % number, b'{"s":1}') for number in range(20)]
    bad_rows.send(rig, "t", *rows)
    bad_rows.poison(rig, "t", Bad(b"\xff", b'{"s":2}'), Bad(b"q", b'{"s":2}'))
    rig.alter_topic("t", index=("/s",))
    assert found(rig, "/s = 2") == {b"q"}


def test_deletes_reach_such_rows(rig: Rig) -> None:
    bad_rows.poison(rig, "t", *POISON)
    keys = [row.key for row in POISON]
    assert rig.run(Delete("t", keys=keys)).applied == len(keys)
    assert rig.stored("t") == {}


def test_such_a_row_expires_and_leaves_a_letter(rig: Rig) -> None:
    """The sweep met it again and again, and nothing expired any more."""
    rig.create_topic("letters", message_type=MessageType.JSON)
    rig.alter_topic("t", dead_letter="letters")
    bad_rows.poison(rig, "t", Bad(key=b"\xff", expire_time=START + 1))
    rig.put("t", "fine", b"{}", ttl=1)
    rig.time.tick(1)
    rig.store.sweep()
    assert rig.stored("t") == {}
    assert {key.split(b"|")[1] for key in rig.live("letters")} == {rb"\\xff", b"fine"}
    assert post(rig.store.topics, rig.topic("t"), [], []).keys == []


def test_a_seed_does_not_end_with_an_empty_key(tmp_path: Path) -> None:
    """The last key of a part says where the next begins; an empty one says that there is none."""
    a, b = instance(tmp_path, "a", peers=["b"]), instance(tmp_path, "b", peers=["a"])
    for rig in (a, b):
        rig.create_topic("t", message_type=MessageType.JSON)
    bad_rows.poison(a, "t", Bad(key=b"", payload=LARGE))
    a.put("t", "fine", b"{}")
    ship(a, b)
    assert set(b.live("t")) == {b"fine"}
