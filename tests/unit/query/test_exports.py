"""Exports: one cut read in parts, and leases (rule Q6; export_parts [1] to [4], exports [1])."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_server.engine.reading import Wanted
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Publish,
    TopicSettings,
)
from sow_server.query import export_lines, export_parts
from sow_server.query import exports as exports_module
from sow_server.query.export_parts import Chosen, Export
from sow_server.query.export_splits import SplitCache
from sow_server.query.export_tokens import read_token, write_token
from sow_server.query.exports import ExportOptions, Exports
from sow_server.query.filtering import record_filter
from tests.support.stores.stores import SECOND, Rig

SETTINGS = TopicSettings(expiration=Expiration.ENABLED, key=("/id",), index=("/symbol",))
LEASE = 60 * SECOND


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("quotes", SETTINGS)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One with 3,000 records that no test changes."""
    rig = Rig(tmp_path_factory.mktemp("filled"))
    rig.create_topic("quotes", SETTINGS)
    put(rig, range(3000))
    yield rig
    rig.close()


def put(rig: Rig, numbers: range, *, ttl: int | None = None, symbols: int = 10) -> None:
    lifetime = ABSENT if ttl is None else Lifetime(LifetimeKind.TTL, ttl)
    documents = [{"id": f"{n:05d}", "symbol": f"S{n % symbols}", "px": n} for n in numbers]
    payloads = [json.dumps(document).encode() for document in documents]
    for first in range(0, len(payloads), 1000):
        rig.run(Publish("quotes", payloads[first : first + 1000], lifetime=lifetime))


def export(
    rig: Rig, text: str = "", *, parts: int = 0, topic: str = "quotes", splits: SplitCache | None = None
) -> Export:
    found = rig.topic(topic)
    given = record_filter(found, text, 0) if text else None
    opened = Export(rig.store.cuts, [Chosen(found, given, parts)], splits or SplitCache())
    while not opened.prepare():
        pass
    return opened


def read(opened: Export, part: int, begin: bytes = b"", *, limit: int = 10_000) -> list[str]:
    reading = opened.reading(part, begin)
    keys: list[str] = []
    while (piece := reading.step(limit)) is not None:
        keys += [key.decode() for key in piece.keys]
    assert reading.returned == len(keys)
    return keys


def whole(opened: Export) -> list[str]:
    return [key for part in range(len(opened.parts)) for key in read(opened, part)]


def names(numbers: range) -> list[str]:
    return [f"{n:05d}" for n in numbers]


def refused(reason: Reason) -> pytest.RaisesExc[StoreError]:
    return pytest.RaisesExc(StoreError, check=lambda error: error.reason is reason)


# --- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 7, 64, 10_000])
def test_the_parts_together_are_the_topic_in_key_order(rig: Rig, parts: int) -> None:
    put(rig, range(5000))
    opened = export(rig, parts=parts)
    assert whole(opened) == names(range(5000))
    assert len(opened.parts) == min(parts, 50)  # none has fewer than a hundred records
    assert sum(part.records for part in opened.parts) == 5000
    opened.close()


@pytest.mark.slow
def test_parts_are_about_equal(rig: Rig) -> None:
    put(rig, range(8_000))
    opened = export(rig, parts=8)
    assert [len(read(opened, part)) for part in range(8)] == [part.records for part in opened.parts]
    assert all(920 < part.records < 1080 for part in opened.parts)
    opened.close()


def test_few_records_are_one_part_and_none_are_no_part(rig: Rig) -> None:
    empty = export(rig, parts=8)
    assert empty.parts == ()
    put(rig, range(3))
    few = export(rig)
    assert (whole(few), len(few.parts)) == (names(range(3)), 1)
    for opened in (empty, few):
        opened.close()


def test_how_many_parts_are_apt_depends_on_the_size(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_parts, "PART_RECORDS_APT", 1000)
    put(rig, range(4500))
    opened = export(rig)
    assert len(opened.parts) == 5
    assert whole(opened) == names(range(4500))
    opened.close()


@pytest.mark.parametrize(
    ("text", "expected", "parts"),
    [
        ("/id IN ('00007', '00003', 'none')", ["00003", "00007"], 1),
        ("/id >= '00100' AND /symbol = 'S1'", [f"{n:05d}" for n in range(100, 3000) if n % 10 == 1], 3),
        ("@key >= '01000' AND @key < '02000'", names(range(1000, 2000)), 4),
        ("@key < '01000' OR @key >= '02500'", names(range(1000)) + names(range(2500, 3000)), 4),
        ("/px < 5", names(range(5)), 4),
        ("1 = 2", [], 0),
        ("/symbol = 'S1' AND /symbol = 'S2'", [], None),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_filters_read_the_records_of_the_plan(
    filled: Rig, text: str, expected: list[str], parts: int | None, known: bool
) -> None:
    splits = SplitCache()
    if known:
        export(filled, parts=4, splits=splits).close()
    opened = export(filled, text, parts=4, splits=splits)
    assert whole(opened) == expected
    assert parts is None or len(opened.parts) == parts
    opened.close()


def test_many_matches_of_an_index_are_read_from_it_as_they_stand(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    put(rig, range(4000), symbols=20)
    monkeypatch.setattr("sow_server.query.race.HITS_MAX", 50)
    monkeypatch.setattr("sow_server.query.race.STREAMED_FROM", 50)
    monkeypatch.setattr("sow_server.query.race.RACE_STEPS", (10,))
    opened = export(rig, "/symbol IN ('S1', 'S2')", parts=4)
    expected = [f"{n:05d}" for n in range(4000) if n % 20 in (1, 2)]
    assert len(opened.parts) == 1
    assert read(opened, 0) == expected
    assert read(opened, 0, b"02000") == [key for key in expected if key >= "02000"]
    opened.close()


@pytest.mark.slow
def test_a_topic_is_not_gone_through_again_while_it_has_changed_little(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_parts, "SAMPLE_CHUNK", 100)
    put(rig, range(4000))
    splits = SplitCache()

    def pieces() -> int:
        found = rig.topic("quotes")
        opened = Export(rig.store.cuts, [Chosen(found, None, 4)], splits)
        count = 1
        while not opened.prepare():
            count += 1
        assert whole(opened) == names(range(rig.count("quotes")))
        opened.close()
        return count

    assert pieces() > 10
    assert pieces() == 1
    put(rig, range(4000, 4500))
    assert pieces() == 1
    put(rig, range(4500, 9000))
    assert pieces() > 10


def test_the_cache_of_a_topic_loses_no_record(rig: Rig) -> None:
    """Parts are made of old samples: they cover all keys nevertheless, below the first of them and above the last."""
    put(rig, range(2000, 4000))
    splits = SplitCache()
    export(rig, parts=4, splits=splits).close()
    put(rig, range(1800, 2000))
    put(rig, range(9000, 9200))
    opened = export(rig, parts=4, splits=splits)
    assert len(opened.parts) == 4
    assert whole(opened) == names(range(1800, 4000)) + names(range(9000, 9200))
    opened.close()


# --- one cut ---------------------------------------------------------------------------------------------------------


def test_topics_that_are_cut_together_are_cut_between_the_same_two_commits(rig: Rig) -> None:
    """Q6. A commit that comes between two of the cuts, if one can, shows in neither."""
    rig.create_topic("trades", SETTINGS)

    def wanted() -> Iterator[Wanted]:
        yield rig.topic("quotes"), ()
        if not rig.store.writes.commits.cut_lock.locked():
            rig.time.tick(SECOND)
            for topic in ("quotes", "trades"):
                rig.run(Publish(topic, [b'{"id": "1"}']))
        yield rig.topic("trades"), ()

    cuts = rig.store.cuts.together(wanted())
    assert {(cut.sequence, cut.now_micros, cut.find(b"1")) for cut in cuts} == {
        (cuts[0].sequence, rig.clock.now_micros(), None)
    }
    for cut in cuts:
        cut.close()


def test_changes_after_the_cut_are_not_seen(rig: Rig) -> None:
    put(rig, range(500), ttl=10 * SECOND)
    put(rig, range(500, 1000))
    opened = export(rig, parts=3)
    first = read(opened, 0)
    rig.time.tick(10 * SECOND)
    rig.store.sweep()
    put(rig, range(900, 1500))
    rig.store.upkeep.compact()
    assert first + read(opened, 1) + read(opened, 2) == names(range(1000))
    assert read(opened, 0) == first
    opened.close()


def test_records_that_go_between_the_cut_and_its_figures_are_exported(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer may work right after the cut: its figures do not describe the cut then."""
    put(rig, range(50))
    cut = rig.store.cuts.together

    def cut_and_lose(*arguments: object, **options: object) -> object:
        found = cut(*arguments, **options)  # type: ignore[arg-type]  # as they came
        rig.run(Delete("quotes", names(range(50))))
        return found

    monkeypatch.setattr(rig.store.cuts, "together", cut_and_lose)
    opened = export(rig, parts=4)
    assert rig.count("quotes") == 0
    assert whole(opened) == names(range(50))
    opened.close()


def test_records_expired_at_the_cut_are_not_exported_though_they_are_stored(rig: Rig) -> None:
    put(rig, range(500), ttl=10 * SECOND)
    put(rig, range(500, 600))
    rig.time.tick(10 * SECOND)
    opened = export(rig, parts=2)
    assert whole(opened) == names(range(500, 600))
    opened.close()


def test_stamps_are_not_acted_on_where_expiration_is_disabled(rig: Rig) -> None:
    rig.create_topic("still", SETTINGS._replace(expiration=Expiration.DISABLED))
    lifetime = Lifetime(LifetimeKind.TTL, SECOND)
    rig.run(Publish("still", [b'{"id":"1"}'], lifetime=lifetime))
    rig.time.tick(2 * SECOND)
    opened = export(rig, topic="still")
    assert whole(opened) == ["1"]
    opened.close()


def test_binary_payloads_are_exported_and_filtered_by_metadata(rig: Rig) -> None:
    rig.create_topic("blobs", TopicSettings(message_type=MessageType.BINARY))
    rig.run(Publish("blobs", [b"\xff\n", b"", b"c"], keys=["a", "b", "c"]))
    opened = export(rig, "@key < 'c'", topic="blobs")
    assert whole(opened) == ["a", "b"]
    with refused(Reason.UNSUPPORTED_FOR_MESSAGE_TYPE):
        export(rig, "/a = 1", topic="blobs")
    opened.close()


def test_a_reading_without_keys_finds_the_same(rig: Rig) -> None:
    put(rig, range(3000), ttl=10 * SECOND)
    put(rig, range(0, 3000, 3))
    rig.time.tick(10 * SECOND)
    for text in ("", "/px < 2000", "@key < '02000'"):
        opened = export(rig, text, parts=3)
        found: list[list[bytes]] = [[], []]
        for part in range(len(opened.parts)):
            readings = opened.reading(part), opened.reading(part, keys_wanted=False)
            for values, reading in zip(found, readings, strict=True):
                while (piece := reading.step(77)) is not None:
                    values += piece.values
            assert readings[0].scanned == readings[1].scanned
        assert found[0] == found[1] != []
        opened.close()


@pytest.mark.slow
def test_large_records_among_small_ones_make_small_pieces(rig: Rig) -> None:
    """How large the next records are is not known before they are read: a message has a limit all the same."""
    rig.create_topic("blobs", TopicSettings(message_type=MessageType.BINARY))
    large = 2**20 - 100
    for first in range(0, 400, 10):
        payloads = [bytes(large if 200 <= n < 230 else 50) for n in range(first, first + 10)]
        rig.run(Publish("blobs", payloads, keys=[f"{n:05d}" for n in range(first, first + 10)]))
    opened = export(rig, topic="blobs", parts=1)
    for keys_wanted in (False, True):
        reading = opened.reading(0, keys_wanted=keys_wanted)
        sizes: list[int] = []
        while (piece := reading.step(100_000)) is not None:
            assert sum(map(len, piece.values)) < 3 * 2**20
            sizes += [len(value) for value in piece.values]
        assert len(sizes) == 400
        assert [index for index, size in enumerate(sizes) if size > large] == list(range(200, 230))
    opened.close()


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "/symbol = 'S3'", "/id IN ('00001', '00005', '00101')", "@key >= '00500'"])
def test_a_part_goes_on_where_a_token_says(rig: Rig, text: str) -> None:
    put(rig, range(1000))
    opened = export(rig, text, parts=2)
    for part in range(len(opened.parts)):
        expected = read(opened, part)
        reading = opened.reading(part)
        came: list[str] = []
        while (piece := reading.step(7)) is not None:
            came += [key.decode() for key in piece.keys]
            token = write_token(opened.id, part, piece.position)
            assert came + read(opened, part, read_token(opened.id, part, token)) == expected
    opened.close()


def test_a_token_of_another_part_or_export_is_refused(rig: Rig) -> None:
    put(rig, range(1000))
    one, other = export(rig, parts=2), export(rig, parts=2)
    token = write_token(one.id, 0, b"00100")
    assert read_token(one.id, 0, token) == b"00100"
    assert read_token(one.id, 0, b"") == b""
    for opened, part, wrong in ((one, 1, token), (other, 0, token), (one, 0, token + b"x"), (one, 0, b"x")):
        with refused(Reason.RESUME_TOKEN_INVALID):
            read_token(opened.id, part, wrong)
    one.close()
    other.close()


# --- leases, limits, ends --------------------------------------------------------------------------------------------


class Held:
    """Exports under a clock of the test's own."""

    def __init__(self, rig: Rig, exports_max: int = 64) -> None:
        self.rig = rig
        self.exports: Exports[Export] = Exports(
            rig.store.reads,
            options=ExportOptions(exports_max),
            elapsed=lambda: rig.time.elapsed_micros,
        )

    def open(self, lease: int = LEASE, *, idle: int = 0, successor_of: str = "", reader: str = "") -> str:
        with self.exports.room():
            opened = export(self.rig, splits=self.exports.splits)
            self.exports.add(opened, lease, idle_lease_micros=idle, successor_of=successor_of, reader=reader)
        return opened.id

    def successor(self, export_id: str, reader: str, *, owner: str = "") -> str:
        """As OpenExport with these two."""
        found = self.exports.successor(export_id, reader, owner=owner, topics=[self.rig.topic("quotes")])
        return self.open(successor_of=export_id, reader=reader) if found is None else found.id

    def reads(self, export_id: str, reader: str) -> None:
        with self.exports.reader(export_id, reader):
            pass


@pytest.fixture
def held(rig: Rig) -> Held:
    put(rig, range(300))
    return Held(rig)


def test_an_export_ends_a_lease_after_its_last_use(rig: Rig, held: Held) -> None:
    opened = held.open()
    rig.time.tick(LEASE - 1)
    assert held.exports.renew(opened)[1] == LEASE
    rig.time.tick(LEASE - 1)
    assert whole(held.exports.find(opened)) == names(range(300))
    rig.time.tick(1)
    with refused(Reason.EXPORT_NOT_FOUND):
        held.exports.find(opened)
    assert held.exports.count == 0


def test_a_tick_ends_exports_without_readers(rig: Rig, held: Held) -> None:
    held.open()
    rig.time.tick(LEASE)
    assert held.exports.count == 1
    held.exports.tick()
    assert held.exports.count == 0


def test_reading_keeps_an_export_and_the_lease_begins_at_the_end(rig: Rig, held: Held) -> None:
    opened = held.open()
    with held.exports.reader(opened):
        rig.time.tick(10 * LEASE)
        held.exports.tick()
        assert held.exports.count == 1
    rig.time.tick(LEASE - 1)
    held.exports.tick()
    assert held.exports.count == 1
    rig.time.tick(1)
    held.exports.tick()
    assert held.exports.count == 0


def test_a_topic_is_in_use_while_an_export_of_it_is_open(rig: Rig, held: Held) -> None:
    opened = held.open()
    topic = rig.topic("quotes")
    rig.time.tick(LEASE - 1)
    held.exports.tick()
    assert topic.last_use_micros == rig.clock.now_micros()
    rig.time.tick(1)
    held.exports.close(opened)
    held.exports.tick()
    assert topic.last_use_micros < rig.clock.now_micros()


def test_a_reader_that_stops_reading_has_a_lease(rig: Rig, held: Held) -> None:
    """Else one that has forgotten a stream would hold the cut, and the disk space behind it, for ever."""
    opened = held.open()
    with held.exports.reader(opened):
        for records in (5, 7):
            with held.exports.handing_over(opened, records):
                rig.time.tick(LEASE - 1)
                held.exports.tick()
            rig.time.tick(10 * LEASE)
            held.exports.tick()
            assert held.exports.count == 1
        assert held.exports.records_total == 12
        with held.exports.handing_over(opened, 1):
            rig.time.tick(LEASE)
            held.exports.tick()
        with pytest.raises(StoreError, match="nobody has read or renewed it"):
            held.exports.find(opened)


def test_an_export_that_nobody_has_read_ends_with_its_idle_lease(rig: Rig, held: Held) -> None:
    """Q6. Such as one that was planned by a program that has ended."""
    opened, other = held.open(idle=SECOND), held.open(SECOND, idle=LEASE)
    rig.time.tick(SECOND - 1)
    held.exports.tick()
    assert held.exports.count == 2
    rig.time.tick(1)
    for one in (opened, other):
        with pytest.raises(StoreError, match="for its lease of 1s"):
            held.exports.find(one)


def test_an_export_whose_reading_was_broken_off_ends_with_its_idle_lease(rig: Rig, held: Held) -> None:
    """Q6. Others may read it at the same time, and one that reads on has the whole lease."""
    opened = held.open(idle=SECOND)
    with held.exports.reader(opened):
        with pytest.raises(GeneratorExit), held.exports.reader(opened):
            raise GeneratorExit
        with held.exports.handing_over(opened, 1):
            rig.time.tick(LEASE - 1)
            held.exports.tick()
    rig.time.tick(SECOND - 1)
    with held.exports.reader(opened):  # to the end of its part
        pass
    rig.time.tick(LEASE - 1)
    held.exports.tick()
    with pytest.raises(GeneratorExit), held.exports.reader(opened):
        raise GeneratorExit
    held.exports.renew(opened)
    rig.time.tick(LEASE - 1)
    held.exports.tick()
    with pytest.raises(GeneratorExit), held.exports.reader(opened):
        raise GeneratorExit
    rig.time.tick(SECOND)
    with pytest.raises(StoreError, match="for its lease of 1s"):
        held.exports.find(opened)


# --- successors ------------------------------------------------------------------------------------------------------


def test_all_tasks_of_a_reader_get_the_same_successor_and_so_do_later_readers(rig: Rig, held: Held) -> None:
    """Q8."""
    first = held.open()
    assert held.successor(first, "a") == first, "it is open still"
    held.exports.close(first)
    second = held.successor(first, "b")
    assert second != first
    assert held.successor(first, "b") == second
    assert held.successor(first, "c") == second
    assert held.successor(second, "d") == second
    held.exports.close(second)
    third = held.successor(first, "e")
    assert third not in (first, second)
    assert held.successor(second, "e") == third


def test_a_reader_whose_export_has_ended_gets_no_other_one(rig: Rig, held: Held) -> None:
    """Q8. Otherwise the tasks of one action would read two instants."""
    first = held.open()
    held.reads(first, "a")
    held.exports.close(first)
    with pytest.raises(StoreError, match="it was closed"):
        held.successor(first, "a")
    second = held.successor(first, "b")
    held.reads(second, "b")
    held.exports.close(second)
    with refused(Reason.EXPORT_NOT_FOUND):
        held.successor(first, "b")
    third = held.successor(first, "c")
    with pytest.raises(StoreError, match="another one in its place"):
        held.reads(third, "b")


def test_of_two_that_open_a_successor_at_once_the_second_takes_that_of_the_first(rig: Rig, held: Held) -> None:
    first = held.open()
    held.exports.close(first)
    topic = rig.topic("quotes")
    assert held.exports.successor(first, "a", owner="", topics=[topic]) is None
    assert held.exports.successor(first, "b", owner="", topics=[topic]) is None
    second = held.open(successor_of=first, reader="a")
    assert held.successor(first, "b") == second


def test_a_line_that_is_not_known_has_no_successor(rig: Rig, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    first = held.open()
    for of, owner in (("never was", ""), (first, "somebody")):
        with pytest.raises(StoreError, match="has not opened it"):
            held.successor(of, "a", owner=owner)
    rig.create_topic("other", SETTINGS)
    with refused(Reason.INVALID_ARGUMENT):
        held.exports.successor(first, "a", owner="", topics=[rig.topic("other")])
    monkeypatch.setattr(export_lines, "READERS_MAX", 2)
    for reader in ("a", "b", "c"):
        held.reads(first, reader)  # with the third the line is forgotten, as nobody knows how many are to come
    held.exports.close(first)
    for reader in ("a", "d"):
        with pytest.raises(StoreError, match="has not opened it"):
            held.successor(first, reader)
    monkeypatch.setattr(export_lines, "EXPORTS_KEPT", 2)
    one, two = held.open(), held.open()
    assert held.successor(one, "a") == one
    held.open()  # two was used longest ago
    assert held.successor(one, "a") == one
    with pytest.raises(StoreError, match="has not opened it"):
        held.successor(two, "a")
    rig.delete_topic("quotes")
    rig.create_topic("quotes", SETTINGS)
    with refused(Reason.TOPIC_DELETED):
        held.successor(one, "b")


def test_an_export_that_was_closed_says_so_and_is_closed_again_for_free(held: Held) -> None:
    opened = held.open()
    found = held.exports.find(opened)
    reading = found.reading(0)
    held.exports.close(opened)
    held.exports.close(opened)
    held.exports.close("never was")
    with pytest.raises(StoreError, match="it was closed"):
        held.exports.find(opened)
    with refused(Reason.EXPORT_NOT_FOUND):
        reading.step(10)


def test_closing_waits_for_the_piece_that_is_under_way(held: Held) -> None:
    """A cursor that is closed under a reader's hands would crash the process."""
    opened = held.exports.find(held.open())
    (share,) = opened.shares
    with share.piece():
        held.exports.close(opened.id)
        assert share.cut.records.find(share.topic.prefix + b"00001") is not None
    with refused(Reason.EXPORT_NOT_FOUND), share.piece():
        pass


def test_at_the_limit_completely_read_exports_make_room(rig: Rig, held: Held) -> None:
    few = Held(rig, exports_max=2)
    one, other = few.open(), few.open()
    with pytest.raises(StoreError) as refusal:
        few.open()
    assert refusal.value.reason is Reason.OVERLOADED
    few.exports.ended(other, 0)
    with few.exports.reader(other), refused(Reason.OVERLOADED):
        few.open()  # it is being read again
    third = few.open()
    few.exports.find(one)
    with pytest.raises(StoreError, match="made room"):
        few.exports.find(other)
    few.exports.ended(third, 0)
    few.exports.ended(one, 0)
    few.open()
    with refused(Reason.EXPORT_NOT_FOUND):
        few.exports.find(one)  # the oldest goes first
    few.exports.find(third)


def test_one_whose_opening_fails_takes_no_room(rig: Rig, held: Held) -> None:
    few = Held(rig, exports_max=1)
    with pytest.raises(ValueError, match="fault"), few.exports.room():
        raise ValueError("fault")
    few.open()


def test_an_export_ends_with_its_topic(rig: Rig, held: Held) -> None:
    opened = held.open()
    rig.delete_topic("quotes")
    for _ in range(2):
        with refused(Reason.TOPIC_DELETED):
            held.exports.find(opened)
    rig.create_topic("quotes", SETTINGS)
    with refused(Reason.TOPIC_DELETED):
        held.exports.find(opened)


def test_a_server_that_stops_ends_all_and_opens_none(held: Held) -> None:
    opened = held.open()
    held.exports.stop()
    with refused(Reason.STOPPING):
        held.exports.find(opened)
    with refused(Reason.STOPPING):
        held.open()
    assert held.exports.count == 0


def test_the_reasons_of_ended_exports_are_kept_for_a_bounded_number(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports_module, "ENDED_KEPT", 2)
    opened = [held.open() for _ in range(3)]
    for one in opened:
        held.exports.close(one)
    with pytest.raises(StoreError, match="since its start"):
        held.exports.find(opened[0])
    with pytest.raises(StoreError, match="it was closed"):
        held.exports.find(opened[1])
