"""The journal tells every change once, in order, and is trimmed from its oldest end (J1, J3, J4, J14)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine import upkeep
from sow_server.engine.disk.rocks import COMMITS, JOURNAL, Cursor
from sow_server.engine.stored import Column, decode_commit, unpack_i64
from sow_server.engine.values.model import Delete, Expiration, Lifetime, LifetimeKind, MessageType, Publish, Touch
from tests.support.stores.stores import MINUTE, SECOND, Rig, journal_rows


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    yield rig
    rig.close()


def commits(rig: Rig) -> list[tuple[int, int, list[tuple[int, ...]]]]:
    found = [decode_commit(*row) for row in rig.rows(COMMITS)]
    return [(commit.first_sequence, commit.last_sequence, [tuple(run) for run in commit.runs]) for commit in found]


def chunks(rig: Rig, topic: str = "orders") -> list[int]:
    return [unpack_i64(key[4:]) for key, _ in journal_rows(rig.store, rig.topic(topic))]


# --- its contents ----------------------------------------------------------------------------------------------------


def test_every_change_is_journaled_with_the_change_before_it(rig: Rig) -> None:
    """J1: puts carry the sequence of the key's previous change, removals the body."""
    rig.put("orders", "a", b"1", ttl=SECOND)
    rig.put("orders", "a", b"2", ttl=SECOND)
    rig.touch("orders", "a", ttl=MINUTE)
    rig.delete("orders", "a")
    rig.put("orders", "a", b"3", ttl=SECOND)
    rig.time.tick(SECOND)
    rig.store.sweep()
    entries = rig.journal("orders")
    assert [(entry.kind, entry.payload, entry.previous) for entry in entries] == [
        ("put", b"1", 0),
        ("put", b"2", 1),
        ("touch", b"2", 2),
        ("delete", b"2", 3),
        ("put", b"3", 0),
        ("expire", b"3", 5),
    ]
    assert [entry.sequence for entry in entries] == [1, 2, 3, 4, 5, 6]


def test_one_commit_is_one_row_of_the_total_order_with_a_run_per_topic(rig: Rig) -> None:
    """J1: a chunk holds consecutive sequences of one topic (builder [1])."""
    rig.create_topic("quotes")
    rig.run_together(
        [
            Publish("orders", [b"x"] * 2, ["a", "b"]),
            Publish("quotes", [b"x"], ["a"]),
            Publish("orders", [b"x"], ["c"], want_results=True),
            Delete("orders", ["a"]),
        ]
    )
    orders, quotes = rig.topic("orders").id, rig.topic("quotes").id
    assert commits(rig) == [(1, 5, [(orders, 1, 2), (quotes, 3, 1), (orders, 4, 2)])]
    assert (chunks(rig, "orders"), chunks(rig, "quotes")) == ([1, 4], [3])


def test_a_topic_without_a_journal_uses_sequences_and_leaves_no_entries(rig: Rig) -> None:
    """J1: one sequence counter per instance; chunks of others do not run over the gap."""
    rig.create_topic("quiet", journal=False)
    rig.run_together(
        [
            Publish("orders", [b"x"], ["a"]),
            Publish("quiet", [b"x"], ["a"]),
            Publish("orders", [b"x"], ["b"]),
            Touch("quiet", ["a"], Lifetime(LifetimeKind.TTL, 0)),
        ]
    )
    assert rig.journal("quiet") == []
    assert [entry.sequence for entry in rig.journal("orders")] == [1, 3]
    assert chunks(rig) == [1, 3]
    assert rig.store.writer.last_sequence == 5


def test_a_commit_without_journaled_changes_has_no_row(rig: Rig) -> None:
    rig.create_topic("quiet", journal=False)
    rig.put("quiet", "a")
    assert commits(rig) == []


def test_switching_the_journal_off_and_on_leaves_a_gap_that_no_reader_can_skip(rig: Rig) -> None:
    """J1. The entries from before stayed readable and the floor stayed low, so a reader that continued after them
    would have missed, unknowing, all that was published while the journal was off."""
    rig.put("orders", "a", b"1")
    rig.alter_topic("orders", journal=False)
    rig.put("orders", "a", b"2")
    last = rig.store.writer.last_sequence
    rig.alter_topic("orders", journal=True)
    rig.put("orders", "a", b"3")
    (entry,) = rig.journal("orders")
    assert (entry.payload, entry.previous) == (b"3", last)
    figures = rig.store.durable_commits.topic_statistics(rig.topic("orders"))
    assert (figures.journal_entries, figures.floor_sequence) == (1, last)


def test_changes_in_another_message_type_are_no_longer_to_be_read(rig: Rig) -> None:
    """J1. They stayed in the journal when an emptied topic got another message type, and were then decoded in it."""
    rig.put("orders", "a", b"1")
    rig.delete("orders", "a")
    last = rig.store.writer.last_sequence
    rig.alter_topic("orders", message_type=MessageType.NVFIX)
    assert rig.journal("orders") == []
    figures = rig.store.durable_commits.topic_statistics(rig.topic("orders"))
    assert (figures.journal_entries, figures.journal_bytes, figures.floor_sequence) == (0, 0, last)


def test_the_floor_of_a_new_topic_is_the_sequence_of_its_creation(rig: Rig) -> None:
    """J1."""
    rig.put("orders", "a")
    created = rig.create_topic("quotes")
    assert rig.store.durable_commits.topic_statistics(created).floor_sequence == rig.store.writer.last_sequence == 1


# --- trimming --------------------------------------------------------------------------------------------------------


def test_entries_are_kept_for_the_retention_time_and_go_at_the_cut_off(rig: Rig) -> None:
    """J3, J4: an entry exactly at the cut-off is pruned; records stay."""
    rig.alter_topic("orders", retain_time_micros=MINUTE, retain_bytes=None)
    rig.put("orders", "a")
    rig.time.tick(1)
    rig.put("orders", "b")
    rig.time.tick(MINUTE - 2)
    rig.prune()
    assert [entry.key for entry in rig.journal("orders")] == [b"a", b"b"]
    rig.time.tick(1)
    rig.prune()
    assert [entry.key for entry in rig.journal("orders")] == [b"b"]
    assert rig.store.durable_commits.topic_statistics(rig.topic("orders")).floor_sequence == 1
    assert rig.count("orders") == 2


def test_the_oldest_go_first_until_the_size_is_kept(rig: Rig) -> None:
    """J3: whichever of time and size is reached first."""
    rig.put("orders", "a", b"x" * 1000)
    size = rig.store.durable_commits.topic_statistics(rig.topic("orders")).journal_bytes
    for key in "bcd":
        rig.put("orders", key, b"x" * 1000)
    rig.alter_topic("orders", retain_bytes=2 * size, retain_time_micros=MINUTE)
    rig.prune()
    assert [entry.key for entry in rig.journal("orders")] == [b"c", b"d"]
    assert rig.store.durable_commits.topic_statistics(rig.topic("orders")).journal_bytes == 2 * size
    rig.time.tick(MINUTE)
    rig.prune()
    assert rig.journal("orders") == []
    assert rig.store.durable_commits.topic_statistics(rig.topic("orders")).journal_bytes == 0


def test_with_both_limits_zero_nothing_is_kept_and_without_any_everything(rig: Rig) -> None:
    """arrebato 2, Pulsar 1, J3: the records stay in any case."""
    rig.create_topic("all", retain_time_micros=None, retain_bytes=None)
    rig.create_topic("none", retain_time_micros=0, retain_bytes=0)
    for topic in ("all", "none"):
        rig.put(topic, "a")
    rig.time.tick(10_000 * MINUTE)
    rig.clock.accept()
    rig.prune()
    assert (len(rig.journal("all")), len(rig.journal("none"))) == (1, 0)
    assert (rig.count("all"), rig.count("none")) == (1, 1)


@pytest.mark.parametrize(
    ("retain_time", "retain_chunks", "left"),
    [
        (None, None, "abcd"),
        (None, 2, "cd"),
        (2 * MINUTE + 1, None, "cd"),
        (2 * MINUTE + 1, 3, "cd"),
        (3 * MINUTE, 1, "d"),
        (0, 0, ""),
    ],
)
def test_retention_by_time_and_size_follows_the_table(
    rig: Rig, retain_time: int | None, retain_chunks: int | None, left: str
) -> None:
    """Pulsar 2, J3: no limit, size, time, both, nothing; one zero alone is refused with the settings."""
    for key in "abcd":
        rig.put("orders", key)
        rig.time.tick(MINUTE)
    size = rig.store.durable_commits.topic_statistics(rig.topic("orders")).journal_bytes // 4
    retain_bytes = None if retain_chunks is None else retain_chunks * size
    rig.alter_topic("orders", retain_time_micros=retain_time, retain_bytes=retain_bytes)
    rig.prune()
    assert [entry.key.decode() for entry in rig.journal("orders")] == list(left)


def test_pruning_starts_at_the_oldest_entry_and_stops_at_the_first_inside_the_period(rig: Rig) -> None:
    """arrebato 5, J11: it does not look further, though the clock was set back and something older follows."""
    rig.alter_topic("orders", retain_time_micros=MINUTE, retain_bytes=None)
    rig.put("orders", "old")
    rig.time.tick(2 * MINUTE)
    rig.put("orders", "young")
    rig.close()
    rig.time.step_wall(-MINUTE)
    rig.open(accept_clock=True)
    rig.put("orders", "older")
    rig.time.tick(MINUTE + 1)
    rig.prune()
    assert [entry.key for entry in rig.journal("orders")] == [b"young", b"older"]


def test_pruning_goes_in_bounded_steps_and_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J11: publishers get in between."""
    monkeypatch.setattr(upkeep, "PRUNE_READS", 3)
    names = [f"topic-{number}" for number in range(10)]
    for name in names:
        rig.create_topic(name, retain_time_micros=0, retain_bytes=0)
        rig.put(name, "a")
    left = []
    while rig.prune_step():
        left.append(sum(len(rig.journal(name)) for name in names))
    assert left == [7, 4, 1]
    assert all(rig.journal(name) == [] for name in names)


def test_quiet_topics_cost_pruning_no_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J11: in proportion to what there is; it runs between the publishers' commits."""
    for number in range(20):
        rig.create_topic(f"quiet-{number}")
    rig.put("orders", "a")
    opened: list[str] = []
    cursor = rig.store._rocks.cursor

    def counted(family: str, *, fill_cache: bool = True) -> Cursor:
        opened.append(family)
        return cursor(family, fill_cache=fill_cache)

    monkeypatch.setattr(rig.store._rocks, "cursor", counted)
    rig.prune()
    assert opened == [JOURNAL, COMMITS], "the topic with entries, and the commit rows before it"
    del opened[:]
    rig.prune()
    assert opened == [COMMITS], "where nothing has changed not even the topic with entries is read"


def test_commit_rows_go_once_no_topic_retains_a_change_from_before_them(rig: Rig) -> None:
    """J1 (journal/retention [2])."""
    rig.create_topic("keeps", retain_time_micros=None, retain_bytes=None)
    rig.put("orders", "a")
    rig.put("keeps", "a")
    rig.put("orders", "b")
    rig.alter_topic("orders", retain_time_micros=0, retain_bytes=0)
    rig.prune()
    assert [first for first, _, _ in commits(rig)] == [2, 3]
    rig.alter_topic("keeps", retain_time_micros=0, retain_bytes=0)
    rig.prune()
    assert [first for first, _, _ in commits(rig)] == [3], "the last one stays: it knows the time"


def test_pruning_never_lowers_a_floor_and_survives_a_crash(rig: Rig) -> None:
    """J1 (journal/reading [1])."""
    rig.put("orders", "a")
    rig.put("orders", "b")
    rig.alter_topic("orders", retain_time_micros=0, retain_bytes=0)
    rig.prune()
    for _ in range(2):
        assert rig.store.durable_commits.topic_statistics(rig.topic("orders")).floor_sequence == 2
        rig.prune()
        rig.crash()


def test_removals_of_a_pruned_record_still_carry_its_body(rig: Rig) -> None:
    """J1: the body comes from the record, not from the journal."""
    rig.put("orders", "a", b"body", ttl=SECOND)
    rig.alter_topic("orders", retain_time_micros=0, retain_bytes=0)
    rig.prune()
    rig.time.tick(SECOND)
    rig.store.sweep()
    (entry,) = rig.journal("orders")
    assert (entry.kind, entry.payload, entry.previous) == ("expire", b"body", 1)


def test_records_that_expire_by_disabling_equal_the_journaled_expiries(rig: Rig) -> None:
    rig.put("orders", "a", ttl=SECOND)
    rig.time.tick(SECOND)
    rig.alter_topic("orders", expiration=Expiration.DISABLED, journal=False)
    assert rig.journal("orders") == []
    assert rig.store.durable_commits.topic_statistics(rig.topic("orders")).journal_entries == 0


# --- epoch -----------------------------------------------------------------------------------------------------------


def test_a_bookmark_names_the_epoch_which_lives_as_long_as_the_data(rig: Rig, tmp_path: Path) -> None:
    """J14: kept by restarts; new data has a new one, and another instance id."""
    epoch, instance = rig.store.instance.epoch, rig.store.instance.id
    assert rig.store.instance.bookmark(7) == f"{epoch}.7"
    rig.reopen()
    rig.crash()
    assert (rig.store.instance.epoch, rig.store.instance.id) == (epoch, instance)
    other = Rig(tmp_path / "other")
    assert other.store.instance.epoch != epoch
    assert other.store.instance.id != instance
    other.close()


# --- columns ---------------------------------------------------------------------------------------------------------

pieces = st.one_of(
    st.tuples(st.just("append"), st.integers(-2, 5), st.just(1)),
    st.tuples(st.just("constant"), st.integers(-2, 5), st.integers(0, 4)),
    st.tuples(st.just("counting"), st.integers(-2, 5), st.integers(0, 4)),
    st.tuples(st.just("numbers"), st.integers(-2, 5), st.integers(0, 4)),
)


@given(st.lists(pieces, min_size=1, max_size=6))
def test_a_column_equals_its_list(parts: list[tuple[str, int, int]]) -> None:
    """However it is put together, and after having been stored."""
    column, plain = Column(), list[int]()
    for how, number, count in parts:
        match how:
            case "append":
                column.append(number)
                plain.append(number)
            case "constant":
                column.constant(number, count)
                plain += [number] * count
            case "counting":
                column.counting(number, count)
                plain += range(number, number + count)
            case _:
                column.numbers(array("q", range(0, number * count, number) if number else [0] * count))
                plain += [number * index for index in range(count)]
        assert list(column) == plain
        assert len(column) == len(plain)
    if plain:
        stored = column.encode()
        decoded, end = Column.decode(b"before" + stored + b"after", 6, len(plain))
        assert list(decoded) == plain
        assert end == 6 + len(stored)
