"""The history of a key (rule S9): newest first, across deletes and expiries, page by page."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_server.engine.stored import decode_change, decode_changes, last_index
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Delete, Expiration, Lifetime, LifetimeKind, Publish, TopicSettings, Touch
from sow_server.filters import parse
from sow_server.filters.restriction import Restriction
from sow_server.query.filtering import callers_filter
from sow_server.subscriptions.frames import ChangeOp, ChangeReason
from sow_server.subscriptions.journal import history
from sow_server.subscriptions.journal.history import History
from sow_server.subscriptions.journal.ranges import RangeBounds, RangeReader
from tests.support.oracles.examples import examples
from tests.support.stores.stores import MINUTE, SECOND, Rig, journal_rows
from tests.support.stores.subscribers import NAMES

JSON = TopicSettings(expiration=Expiration.ENABLED, retain_time_micros=10 * MINUTE, retain_bytes=None)

Told = tuple[str, int, bytes]
"""The operation, the sequence and the payload."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders", JSON)
    rig.create_topic("other", JSON)
    yield rig
    rig.close()


def px(number: int) -> bytes:
    return b'{"px":%d}' % number


def opened(rig: Rig, key: str, *, upto: int | None = None, entries_max: int = 100, rows: str = "") -> History:
    topic = rig.topic("orders")
    return History(
        rig.store.cuts,
        topic,
        key.encode(),
        upto=rig.store.writer.synced_sequence if upto is None else upto,
        entries_max=entries_max,
        rows=callers_filter(topic, "", Restriction(parse(rows)) if rows else Restriction(), allow_now=False),
    )


def told(reading: History) -> list[Told]:
    found: list[Told] = []
    while not reading.done:
        found += [(NAMES[past.row.op, past.row.reason], past.row.sequence, past.row.payload) for past in reading.read()]
    return found


def scanned(rig: Rig, key: str, *, rows: str = "") -> list[Told]:
    """The same by reading the whole journal."""
    topic = rig.topic("orders")
    start = max(topic.statistics.floor_sequence, topic.statistics.created_sequence)
    reader = RangeReader(
        rig.store.reads,
        topic,
        callers_filter(topic, "", Restriction(parse(rows)) if rows else Restriction(), allow_now=False),
        RangeBounds(start, rig.store.writer.synced_sequence),
    )
    found: list[Told] = []
    while not reader.done:
        read = reader.read().columns
        found += [
            (NAMES[ChangeOp(op), ChangeReason(why)], sequence, payload)
            for op, why, of, sequence, payload in zip(
                read.ops, read.reasons, read.keys, read.headers.sequence, read.payloads, strict=True
            )
            if of == key.encode()
        ]
    return found[::-1]


def test_a_history_goes_back_across_deletes_and_expiries(rig: Rig) -> None:
    """S9."""
    rig.put("orders", "a", px(1))
    rig.put("orders", "b", px(1))
    rig.delete("orders", "a")
    rig.put("orders", "a", px(2), ttl=SECOND)
    rig.touch("orders", "a", ttl=2 * SECOND)
    rig.time.tick(3 * SECOND)
    rig.store.sweep()
    rig.put("orders", "a", px(3))
    rig.put("orders", "a", px(4))

    reading = opened(rig, "a")
    found = told(reading)

    assert [(what, payload) for what, _, payload in found] == [
        ("put", px(4)),
        ("put", px(3)),
        ("expire", px(2)),
        ("touched", px(2)),
        ("put", px(2)),
        ("delete", px(1)),
        ("put", px(1)),
    ]
    assert found == scanned(rig, "a")
    assert (reading.next_position, reading.discarded) == (0, False)


def test_each_change_tells_when_it_was_committed_and_by_whom(rig: Rig) -> None:
    rig.put("orders", "a", px(1))
    rig.time.tick(5 * SECOND)
    rig.delete("orders", "a")
    removed, put = opened(rig, "a").read()
    assert removed.commit_time_micros - put.commit_time_micros == 5 * SECOND
    assert removed.row.publish_time == put.row.publish_time, "of the record that went"
    assert put.made_by is not None
    assert rig.store.origins.names[put.made_by] == rig.store.instance.name


def test_a_history_of_a_key_that_was_never_there_is_empty(rig: Rig) -> None:
    rig.put("orders", "ab", px(1))
    reading = opened(rig, "a")
    assert told(reading) == []
    assert reading.next_position == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(examples(24)))
def test_a_history_has_what_a_reader_of_all_changes_sees_of_the_key(
    rig: Rig, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: whole, in pages, and in the smallest pieces of work, whatever the sizes of the chunks."""
    program = random.Random(seed)
    keys = ["a", "aa", "b", "1", "px"]
    for number in range(60):
        some = program.sample(keys, program.randint(1, 4))
        kind = program.randrange(8)
        if kind == 0:
            rig.run(Delete("orders", some))
        elif kind == 1:
            rig.run(Touch("orders", some, Lifetime(LifetimeKind.TTL, program.randint(1, 5) * SECOND)))
        elif kind == 2:
            rig.time.tick(program.randint(1, 4) * SECOND)
            if program.random() < 0.5:
                rig.store.sweep()
        elif kind == 3:
            rig.run(Publish("other", [px(number)] * len(some), some))
        else:
            payloads = [px(number)] * len(some)
            life = Lifetime(LifetimeKind.TTL, program.randint(0, 6) * SECOND)
            rig.run(Publish("orders", payloads, some, lifetime=life, atomic=kind == 4))
    for small in (False, True):
        if small:
            for name in ("PIECE_ENTRIES", "PIECE_CHUNKS", "PIECE_BYTES", "PIECE_READ_BYTES"):
                monkeypatch.setattr(history, name, 1)
        for key, rows in itertools.product(keys, ("", "/px < 30", "/px IN (7, 11, 12, 40, 41, 50)")):
            expected = scanned(rig, key, rows=rows)
            assert told(opened(rig, key, rows=rows)) == expected
            pages: list[Told] = []
            upto: int | None = None
            while upto != 0:
                page = opened(rig, key, upto=upto, entries_max=3, rows=rows)
                pages += told(page)
                upto = page.next_position
            assert pages == expected


def test_a_piece_of_work_reads_a_bounded_part_of_the_journal_whatever_it_finds(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """journal/history [2]. The bounds held for each search, of which a piece made 200: so a key that came and
    went held its thread for a second."""
    for number in range(20):
        rig.put("orders", "a", px(number))
        rig.delete("orders", "a")
        rig.put("orders", "b", px(number))
    for name, most in (("PIECE_CHUNKS", 5), ("PIECE_READ_BYTES", 1)):
        with monkeypatch.context() as patched:
            patched.setattr(history, name, most)
            reading = opened(rig, "a")
            positions = [rig.store.writer.last_sequence]
            found: list[Told] = []
            while not reading.done:
                found += [
                    (NAMES[one.row.op, one.row.reason], one.row.sequence, one.row.payload) for one in reading.read()
                ]
                positions.append(reading.next_position)
        assert found == scanned(rig, "a")
        assert max(before - after for before, after in itertools.pairwise(positions)) <= 5, "each commit has one change"


def test_a_history_ends_where_the_journal_does_and_says_so(rig: Rig) -> None:
    rig.put("orders", "a", px(1))
    rig.time.tick(9 * MINUTE)
    rig.put("orders", "a", px(2))
    rig.time.tick(2 * MINUTE)
    rig.prune()
    reading = opened(rig, "a")
    assert [what[2] for what in told(reading)] == [px(2)]
    assert (reading.next_position, reading.discarded) == (0, True)


def test_a_history_upto_a_position_has_no_later_change(rig: Rig) -> None:
    rig.put("orders", "a", px(1))
    rig.delete("orders", "a")
    position = rig.store.writer.last_sequence
    rig.put("orders", "a", px(2))
    assert [what[0] for what in told(opened(rig, "a", upto=position))] == ["delete", "put"]


def test_rows_hide_the_changes_of_others(rig: Rig) -> None:
    """A4: of a record that leaves the caller's rows, the key alone; the position tells nothing of hidden changes."""
    for number in (1, 7, 8, 2, 9):
        rig.put("orders", "a", px(number))
    found = told(opened(rig, "a", rows="/px < 5"))
    assert [(what, payload) for what, _, payload in found] == [
        ("delete not permitted", b""),
        ("put", px(2)),
        ("delete not permitted", b""),
        ("put", px(1)),
    ]
    page = opened(rig, "a", rows="/px < 5", entries_max=2)
    (_, _), (_, visible) = ((one[0], one[1]) for one in told(page))
    assert page.next_position == visible - 1
    hidden = opened(rig, "a", rows="/px < 5").read()[0]
    assert (hidden.made_by, hidden.row.origin, hidden.row.publish_time) == (None, 0, 0)


def test_refusals(rig: Rig) -> None:
    rig.put("orders", "a", px(1))
    reading = opened(rig, "a")
    rig.alter_topic("orders", journal=False)
    with pytest.raises(StoreError) as refused:
        reading.read()
    assert refused.value.reason is Reason.NO_JOURNAL
    rig.delete_topic("orders")
    with pytest.raises(StoreError) as refused:
        reading.read()
    assert refused.value.reason is Reason.TOPIC_DELETED


def test_one_change_of_a_chunk_is_decoded_as_all_are(rig: Rig) -> None:
    rig.run(Publish("orders", [px(1), px(2), px(3)], ["aa", "a", "b"]))
    (key, value) = list(journal_rows(rig.store, rig.topic("orders")))[-1]
    first = int.from_bytes(key[4:])
    whole = decode_changes(first, value)
    for index in range(3):
        one = decode_change(first, value, index)
        assert one.first_sequence == first + index
        assert (one.keys, one.payloads) == ([whole.keys[index]], [whole.payloads[index]])
        for name in ("version", "publish_time_micros", "expire_time_micros", "origin", "previous"):
            assert getattr(one, name).tolist() == [getattr(whole, name)[index]]
    assert [last_index(value, key, 3) for key in (b"a", b"aa", b"b", b"px", b"c")] == [1, 0, 2, -1, -1]
    assert [last_index(value, b"b", stop) for stop in (2, 3, 99)] == [-1, 2, 2]
