"""Secondary indexes: entries change with their records, builds survive changes meanwhile (rule Q3, catalog/indexes
[1] to [4])."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from sow_server.declaring import declare_topics
from sow_server.engine import background, store
from sow_server.engine.catalog.indexes import Indexes, altered, interval
from sow_server.engine.catalog.topics import check_settings
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.disk.layout import INDEX_KEY, TEXT_BYTES_MAX, TOPIC_KEY
from sow_server.engine.disk.rocks import INDEXES, META, RECORDS, Batch
from sow_server.engine.values.database import Stalled
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.fields import Kind, Scalar
from sow_server.engine.values.model import (
    Delete,
    Expiration,
    MessageType,
    Publish,
    TopicSettings,
    Touch,
)
from sow_server.engine.values.policies import declared_of
from tests.support.stores.indexes import check_indexes, entries, put
from tests.support.stores.stores import MINUTE, SECOND, FaultyRocks, Rig, replaced

ORDERS = TopicSettings(key=("/id",), expiration=Expiration.ENABLED, index=("/symbol",))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    if rig._store is not None:
        check_indexes(rig.store)
    rig.close()


def find(
    rig: Rig, kind: Kind, low: Scalar | None, high: Scalar | None, *, path: str = "symbol", limit: int = 100
) -> list[str]:
    """The keys that an index of `orders` has for a range, in its order."""
    steps = tuple(path.split("/"))
    cut = rig.store.cuts.records(rig.topic("orders"), [steps])
    keys: list[bytes] = []
    try:
        at: bytes | None
        at, stop = interval(kind, low, high)
        while at is not None:
            at = cut.indexes[steps].fill(at, stop, limit, keys)
    finally:
        cut.close()
    return [key.decode() for key in keys]


def text(rig: Rig, value: str) -> list[str]:
    """The keys under one text."""
    return find(rig, Kind.TEXT, value, value)


def usable(rig: Rig, path: str = "symbol") -> bool:
    """Whether a cut has the index."""
    cut = rig.store.cuts.records(rig.topic("orders"), [tuple(path.split("/"))])
    cut.close()
    return bool(cut.indexes)


# --- maintaining -----------------------------------------------------------------------------------------------------


def test_records_are_found_by_an_indexed_field(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "IBM"}, {"id": 2, "symbol": "MSFT"}, {"id": 3, "symbol": "IBM"}, {"id": 4})
    assert text(rig, "IBM") == ["1", "3"]
    assert text(rig, "MSFT") == ["2"]
    assert text(rig, "IB") == []


def test_the_hot_path_keeps_the_index_too(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, *[{"id": number, "symbol": f"S{number % 3}"} for number in range(20)])
    put(rig, *[{"id": number, "symbol": f"S{number % 2}"} for number in range(20)])
    check_indexes(rig.store)
    assert len(text(rig, "S0")) == len(text(rig, "S1")) == 10
    assert text(rig, "S2") == []


def test_a_key_that_comes_twice_in_one_hot_request_is_found_under_its_last_value(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    for _ in range(2):  # the second time over records from an earlier commit
        put(rig, *[{"id": number % 4, "symbol": f"S{number}"} for number in range(12)])
        check_indexes(rig.store)
        assert find(rig, Kind.TEXT, None, None) == ["2", "3", "0", "1"], "S10, S11, S8, S9"


def test_an_update_moves_its_entry_and_one_that_leaves_the_field_costs_no_index_write(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "IBM", "price": 1})
    faulty = FaultyRocks(rig)
    put(rig, {"id": 1, "symbol": "IBM", "price": 2})
    assert faulty.attempts[-1].puts[INDEXES] == {}
    assert faulty.attempts[-1].deletes[INDEXES] == []
    put(rig, {"id": 1, "symbol": "MSFT", "price": 2})
    assert (text(rig, "IBM"), text(rig, "MSFT")) == ([], ["1"])


def test_a_touch_writes_nothing_to_the_index(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "IBM"})
    faulty = FaultyRocks(rig)
    rig.touch("orders", "1", ttl=MINUTE)
    assert faulty.attempts[-1].puts[INDEXES] == {}
    assert faulty.attempts[-1].deletes[INDEXES] == []
    assert text(rig, "IBM") == ["1"]


def test_a_deleted_record_leaves_the_index(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "IBM"}, {"id": 2, "symbol": "IBM"})
    rig.delete("orders", "1")
    assert text(rig, "IBM") == ["2"]
    assert entries(rig) == 1


def test_a_swept_record_leaves_the_index(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "IBM"}, ttl=SECOND)
    rig.time.tick(SECOND)
    assert text(rig, "IBM") == ["1"], "an overdue record is stored, and the caller of the index leaves it out (rule L8)"
    rig.store.sweep()
    assert entries(rig) == 0


def test_a_write_that_meets_an_overdue_record_removes_the_entries_of_that_first(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "IBM"}, {"id": 2, "symbol": "SAP"}, ttl=SECOND)
    rig.time.tick(SECOND)
    put(rig, {"id": 1, "symbol": "MSFT"})
    put(rig, {"id": 2, "symbol": "SAP"})
    check_indexes(rig.store)
    assert (text(rig, "IBM"), text(rig, "MSFT"), text(rig, "SAP")) == ([], ["1"], ["2"])


@pytest.mark.parametrize("count", [1, 10])
def test_a_record_that_is_put_and_expires_in_one_commit_leaves_no_entry(rig: Rig, count: int) -> None:
    """L7: ttl 0, also over a record that has the same entry, and one that has another."""
    rig.create_topic("orders", ORDERS)
    put(rig, *[{"id": number, "symbol": "IBM"} for number in range(count)])
    put(rig, *[{"id": number, "symbol": "IBM"} for number in range(count)], ttl=0)
    assert entries(rig) == 0
    put(rig, *[{"id": number, "symbol": "SAP"} for number in range(count)])
    put(rig, *[{"id": number, "symbol": "IBM"} for number in range(count)], ttl=0)
    assert entries(rig) == 0


def test_within_one_commit_the_last_change_of_a_key_decides(rig: Rig) -> None:
    """An entry may go and come again, or come and go again, before anything of it is on disk."""
    rig.create_topic("orders", ORDERS)

    def publish(symbol: str) -> Publish:
        return Publish("orders", [json.dumps({"id": 1, "symbol": symbol}).encode()])

    put(rig, {"id": 1, "symbol": "A"})
    rig.run_together([publish("B"), publish("A")])
    assert (text(rig, "A"), text(rig, "B")) == (["1"], [])
    rig.run_together([publish("B"), Touch("orders", ["1"]), publish("C"), publish("B")])
    check_indexes(rig.store)
    assert (text(rig, "A"), text(rig, "B"), text(rig, "C")) == ([], ["1"], [])


def test_the_entries_of_an_aborted_atomic_request_are_as_before(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "A"})
    rig.run(Publish("orders", [b'{"id":1,"symbol":"B"}', b'{"symbol":"C"}'], atomic=True))
    assert find(rig, Kind.TEXT, None, None) == ["1"]
    assert text(rig, "A") == ["1"]


def test_a_field_holds_texts_numbers_booleans_and_arrays_of_them(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(
        rig,
        {"id": "text", "symbol": "b"},
        {"id": "numeric", "symbol": "7.0"},
        {"id": "number", "symbol": 7},
        {"id": "truth", "symbol": True},
        {"id": "array", "symbol": ["a", 7, 7.0, False, None, ["c", {}]]},
        {"id": "null", "symbol": None},
        {"id": "object", "symbol": {"a": 1}},
        {"id": "empty", "symbol": []},
        {"id": "none"},
    )
    assert find(rig, Kind.NUMBER, 7, 7) == ["array", "number", "numeric"]
    assert find(rig, Kind.BOOLEAN, True, True) == ["truth"]
    assert find(rig, Kind.BOOLEAN, None, None) == ["array", "truth"]
    assert find(rig, Kind.TEXT, None, None) == ["numeric", "array", "text", "array"]
    assert find(rig, Kind.TEXT, "7.0", "7.0") == ["numeric"]
    assert entries(rig) == 9


def test_numbers_are_in_the_order_of_their_values(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS, index=("/px",))
    numbers = [-1e300, -7, -6.5, -0.0, 5e-324, 0.5, 1, 1.5, 10, 2**53, 2**64 + 1, 1e300]
    documents: list[dict[str, object]] = [{"id": index, "px": number} for index, number in enumerate(numbers)]
    put(rig, *reversed(documents))
    wanted = [str(index) for index in range(len(numbers))]
    assert find(rig, Kind.NUMBER, None, None, path="px") == wanted
    assert find(rig, Kind.NUMBER, 0, 1.0, path="px") == wanted[3:7]
    assert find(rig, Kind.NUMBER, 2**53, None, path="px") == wanted[9:]
    assert find(rig, Kind.NUMBER, None, -6.5, path="px") == wanted[:3]
    assert find(rig, Kind.NUMBER, 3, 2, path="px") == []


def test_a_long_text_is_found_by_its_beginning(rig: Rig) -> None:
    """catalog/indexes [4]: who finds it asks the whole filter; so two that begin alike are both found."""
    rig.create_topic("orders", ORDERS)
    long = "x" * TEXT_BYTES_MAX
    put(rig, {"id": 1, "symbol": long + "a"}, {"id": 2, "symbol": long + "b"}, {"id": 3, "symbol": long[:-1]})
    assert text(rig, long + "b") == ["1", "2"]
    assert text(rig, long[:-1]) == ["3"]
    put(rig, {"id": 1, "symbol": long + "c"})
    assert text(rig, long + "a") == ["1", "2"]


def test_a_nested_field_is_reached_through_arrays_of_objects(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS, index=("/legs/px", "/[odd/name]"))
    put(rig, {"id": 1, "legs": [{"px": 1}, {"px": 2}, {}]}, {"id": 2, "legs": {"px": 2}, "odd/name": 5})
    assert find(rig, Kind.NUMBER, 2, 2, path="legs/px") == ["1", "2"]
    cut = rig.store.cuts.records(rig.topic("orders"), [("odd/name",), ("legs", "px"), ("other",)])
    assert set(cut.indexes) == {("odd/name",), ("legs", "px")}
    cut.close()


@pytest.mark.parametrize(
    ("settings", "payloads", "kind", "value"),
    [
        (
            TopicSettings(key=("/55",), message_type=MessageType.FIX, index=("/44",)),
            [b"55=A\x0144=1.5\x01", b"55=B\x0144=2\x01"],
            Kind.NUMBER,
            1.5,
        ),
        (
            TopicSettings(key=("/s",), message_type=MessageType.NVFIX, index=("/side",), separator=b"|"),
            [b"s=A|side=buy|", b"s=B|side=sell|"],
            Kind.TEXT,
            "buy",
        ),
        (
            TopicSettings(key=("/s",), message_type=MessageType.MSGPACK, index=("/a/b",)),
            [msgspec.msgpack.encode({"s": "A", "a": {"b": True}}), msgspec.msgpack.encode({"s": "B", "a": {"b": 1}})],
            Kind.BOOLEAN,
            True,
        ),
    ],
    ids=["fix", "nvfix", "msgpack"],
)
def test_other_message_types_have_indexes(
    rig: Rig, settings: TopicSettings, payloads: list[bytes], kind: Kind, value: Scalar
) -> None:
    rig.create_topic("orders", settings)
    rig.run(Publish("orders", payloads))
    path = settings.index[0].strip("/")
    assert find(rig, kind, value, value, path=path) == ["A"]


def test_numbers_that_no_float_reaches_are_at_the_ends(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS, key=(), index=("/px",))
    rig.put("orders", "large", b'{"px":1e999}')
    rig.put("orders", "long", b'{"px":-' + b"9" * 5000 + b"}")
    rig.put("orders", "text", b'{"px":"1e999"}')
    rig.put("orders", "usual", b'{"px":5,"x":1e999}')
    assert find(rig, Kind.NUMBER, None, None, path="px") == ["long", "usual", "large", "text"]
    assert find(rig, Kind.NUMBER, 2**64 - 1, None, path="px") == ["large", "text"]


def test_a_topic_without_an_index_reads_no_old_records(rig: Rig) -> None:
    """The head cache makes updates cheap; an index needs the bodies."""
    rig.create_topic("orders", ORDERS, index=())
    rig.create_topic("indexed", ORDERS)
    assert not rig.topic("orders").wants_previous
    assert rig.topic("indexed").wants_previous
    put(rig, {"id": 1}, {"id": 2})
    with mock.patch.object(rig.store._rocks, "multi_get", side_effect=lambda _, keys: [None] * len(keys)) as read:
        put(rig, {"id": 1}, {"id": 2})
    assert [call.args[1] for call in read.mock_calls if call.args[1]] == []


def test_old_records_are_read_together(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    documents: list[dict[str, object]] = [{"id": number, "symbol": "A"} for number in range(20)]
    put(rig, *documents)
    rocks = rig.store._rocks
    with mock.patch.object(rocks, "get", wraps=rocks.get) as get:
        put(rig, *documents)
    assert [call for call in get.mock_calls if call.args[0] == RECORDS] == []


def test_an_index_alone_does_not_keep_previous_values_for_followers(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    topic = rig.topic("orders")
    draft = rig.store.writer.committer.new_draft()
    chunk = draft.chunk(topic)
    assert chunk is not None
    assert chunk.previous_values is None


def test_followers_and_an_index_share_the_old_records(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    topic = rig.topic("orders")
    topic.followers = topic.previous_wanted = 1
    heard: list[bytes | None] = []
    rig.store.writer.follow(
        lambda committed, _: heard.extend(
            value for commit in committed for chunk in commit.chunks for value in chunk.previous_values or ()
        )
    )
    for price in range(2):
        put(rig, *[{"id": number, "symbol": f"S{price}", "price": price} for number in range(10)])
    assert [value is None for value in heard] == [True] * 10 + [False] * 10
    assert len(text(rig, "S1")) == 10


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_a_range_is_read_in_pieces(rig: Rig, limit: int) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, *[{"id": number, "symbol": f"S{number % 3}"} for number in range(9)])
    assert find(rig, Kind.TEXT, "S0", "S1", limit=limit) == ["0", "3", "6", "1", "4", "7"]


def test_the_end_of_a_range_comes_with_its_last_piece(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "A"}, {"id": 2, "symbol": "A"}, {"id": 3, "symbol": "B"})
    cut = rig.store.cuts.records(rig.topic("orders"), [("symbol",)])
    keys: list[bytes] = []
    start, stop = interval(Kind.TEXT, "A", "A")
    assert cut.indexes["symbol",].fill(start, stop, 2, keys) is None
    assert keys == [b"1", b"2"]
    cut.close()


def test_a_cut_is_of_one_instant_with_its_indexes(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "A"})
    cut = rig.store.cuts.records(rig.topic("orders"), [("symbol",)])
    put(rig, {"id": 1, "symbol": "B"}, {"id": 2, "symbol": "A"})
    rig.alter_topic("orders", index=())
    keys: list[bytes] = []
    cut.indexes["symbol",].fill(*interval(Kind.TEXT, None, None), 10, keys)
    assert keys == [b"1"]
    assert cut.find(b"2") is None
    cut.close()
    assert not usable(rig)


def test_a_cut_has_only_the_indexes_that_were_asked_for(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS, index=("/symbol", "/px"))
    cut = rig.store.cuts.records(rig.topic("orders"))
    assert cut.indexes == {}
    cut.close()
    cut = rig.store.cuts.records(rig.topic("orders"), [("px",)])
    assert set(cut.indexes) == {("px",)}
    cut.close()


# --- adding and removing ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_chunks() -> Iterator[None]:
    with mock.patch.object(background, "INDEX_CHUNK", 3):
        yield


def start_build(rig: Rig, records: int = 10) -> None:
    """A topic with records to which an index is added; nothing of the build is done yet."""
    rig.create_topic("orders", ORDERS, index=())
    put(rig, *[{"id": number, "symbol": f"S{number % 2}"} for number in range(records)])
    rig.submit_alter("orders", lambda _: None, {"index": ("/symbol",)})
    rig.turn()
    assert not usable(rig)


def test_an_index_of_a_new_topic_is_complete_at_once(rig: Rig) -> None:
    topic = rig.create_topic("orders", ORDERS)
    assert [index.complete for index in topic.indexes.all] == [True]


def test_an_index_that_is_added_is_used_once_it_is_complete(rig: Rig, small_chunks: None) -> None:
    start_build(rig)
    for _ in range(3):
        rig.turn()
        assert not usable(rig)
        check_indexes(rig.store)
    rig.turn()
    assert usable(rig)
    assert text(rig, "S1") == ["1", "3", "5", "7", "9"]


def test_changes_during_a_build_are_in_the_index(rig: Rig, small_chunks: None) -> None:
    """Behind and ahead of the position, and exactly at it."""
    start_build(rig)
    rig.turn()
    for number in range(12):
        if number % 3 == 0:
            rig.store.commits.submit(Publish("orders", [b'{"id":%d,"symbol":"new"}' % number]))
        if number % 4 == 1:
            rig.store.commits.submit(Delete("orders", [str(number)]))
    check_indexes(rig.store)
    rig.store.writer.step()
    check_indexes(rig.store)
    assert text(rig, "new") == ["0", "3", "6"], "9 was deleted again"
    assert text(rig, "S1") == ["7"]


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_build_goes_on_after_a_restart(rig: Rig, small_chunks: None, turns: int, how: str) -> None:
    start_build(rig)
    for _ in range(turns):
        rig.turn()
    topic = rig.topic("orders")
    following = b"%d" % (turns * 3) if turns else b""
    assert rig.rows(META, INDEX_KEY, INDEX_KEY + b"\xff") == [
        (INDEX_KEY + topic.indexes.all[0].prefix, topic.prefix + following)
    ]
    if how == "kill":
        rig.kill()
        with mock.patch.object(background.Background, "begin"):
            rig.open()
        assert not usable(rig), "a restart alone completes nothing"
        check_indexes(rig.store)
        rig.store.background.begin()
        rig.store.writer.step()
    else:
        rig.reopen()
    assert usable(rig)
    check_indexes(rig.store)
    assert text(rig, "S0") == ["0", "2", "4", "6", "8"]


def test_a_build_survives_a_disk_that_cannot_keep_up(rig: Rig, small_chunks: None) -> None:
    """A stall that outlasts the writer's patience refuses the chunk, which is tried again."""
    start_build(rig)
    faulty = FaultyRocks(rig)
    faulty.writes = [Stalled("Write stall")]
    with mock.patch.object(rig.store.writer.committer, "_options", WriterOptions(stall_patience_micros=0)):
        rig.store.writer.step()
    assert usable(rig)
    check_indexes(rig.store)


def test_a_start_does_not_wait_for_an_index_of_the_configuration(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS, index=(), in_config=True)
    put(rig, {"id": 1, "symbol": "A"})
    rig.close()
    opened = store.Store.open(rig.path, clock=rig.clock)
    declare_topics(opened, {"orders": declared_of(ORDERS)})
    assert [index.complete for index in opened.topics.find("orders").indexes.all] == [False]
    opened.close()
    rig.open()  # here it is taken up
    assert text(rig, "A") == ["1"]


def test_an_index_that_is_removed_goes_with_all_its_entries(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS, index=("/symbol", "/px"))
    rig.create_topic("other", ORDERS)
    put(rig, {"id": 1, "symbol": "A", "px": 1}, {"id": 2, "symbol": "B"})
    put(rig, {"id": 1, "symbol": "A"}, topic="other")
    rig.alter_topic("orders", index=("/px",))
    assert not usable(rig)
    check_indexes(rig.store)
    assert find(rig, Kind.NUMBER, None, None, path="px") == ["1"]
    assert entries(rig) == 2


def test_an_index_that_is_removed_and_added_again_is_another_one(rig: Rig) -> None:
    """The old one's entries lack the changes in between."""
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "A"}, {"id": 2, "symbol": "B"})
    rig.alter_topic("orders", index=())
    put(rig, {"id": 1, "symbol": "C"})
    rig.crash()
    rig.alter_topic("orders", index=("/symbol",))
    assert [index.id for index in rig.topic("orders").indexes.all] == [2]
    assert (text(rig, "A"), text(rig, "B"), text(rig, "C")) == ([], ["2"], ["1"])


def test_an_index_that_is_removed_while_it_is_built_leaves_nothing(rig: Rig, small_chunks: None) -> None:
    start_build(rig)
    rig.turn()
    rig.alter_topic("orders", index=())
    assert entries(rig) == 0
    assert rig.rows(META, INDEX_KEY, INDEX_KEY + b"\xff") == []


def test_an_index_that_is_replaced_while_it_is_built_is_built_anew(rig: Rig, small_chunks: None) -> None:
    start_build(rig)
    rig.turn()
    rig.submit_alter("orders", lambda _: None, {"index": ()})
    rig.submit_alter("orders", lambda _: None, {"index": ("/symbol", "/id")})
    rig.store.writer.step()
    check_indexes(rig.store)
    assert usable(rig)
    assert usable(rig, "id")
    assert [index.id for index in rig.topic("orders").indexes.all] == [2, 3]


def test_indexes_that_stay_are_not_built_again(rig: Rig, small_chunks: None) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "A", "px": 1})
    rig.submit_alter("orders", lambda _: None, {"index": ("/px", "/[symbol]")})
    rig.turn()
    assert usable(rig)
    assert not usable(rig, "px")
    rig.store.writer.step()
    assert [(index.id, index.path) for index in rig.topic("orders").indexes.all] == [(2, "/px"), (1, "/[symbol]")]
    rig.reopen()
    assert [(index.id, index.path) for index in rig.topic("orders").indexes.all] == [(2, "/px"), (1, "/[symbol]")]


def test_an_index_of_an_empty_topic_is_complete_at_once(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS, index=())
    put(rig, {"id": 1, "symbol": "A"})
    rig.delete("orders", "1")
    rig.submit_alter("orders", lambda _: None, {"index": ("/symbol",)})
    rig.turn()
    assert usable(rig)


def test_a_topic_is_deleted_with_its_indexes(rig: Rig, small_chunks: None) -> None:
    start_build(rig)
    rig.turn()
    rig.delete_topic("orders")
    assert entries(rig) == 0
    assert rig.rows(META, INDEX_KEY, INDEX_KEY + b"\xff") == []
    rig.create_topic("orders", ORDERS)
    assert usable(rig)
    assert find(rig, Kind.TEXT, None, None) == []


def test_a_build_ends_in_the_commit_that_deletes_its_topic(rig: Rig, small_chunks: None) -> None:
    start_build(rig)
    rig.store.administration.delete_topic("orders")
    rig.turn()
    rig.turn()
    assert rig.rows(META, INDEX_KEY, INDEX_KEY + b"\xff") == []
    check_indexes(rig.store)


def test_a_topic_that_is_deleted_and_made_anew_while_an_index_is_built_is_another_one(
    rig: Rig, small_chunks: None
) -> None:
    start_build(rig)
    rig.store.administration.delete_topic("orders")
    rig.store.administration.create_topic("orders", declared_of(ORDERS))
    rig.store.writer.step()
    check_indexes(rig.store)


def test_overdue_records_leave_the_index_before_a_change_of_message_type(rig: Rig) -> None:
    """The type changes while no record is live; one may be stored all the same, overdue. It goes in the same commit."""
    rig.create_topic("orders", ORDERS, key=(), message_type=MessageType.NVFIX, separator=b"|")
    rig.put("orders", "a", b"symbol=A;side=B|", ttl=1)
    rig.time.tick(1)
    with mock.patch.object(rig.store.writer, "sweep_now", return_value=0):
        rig.alter_topic("orders", separator=b";")
    assert not rig.rows(RECORDS)
    check_indexes(rig.store)
    assert entries(rig) == 0


def test_disabling_expiration_removes_overdue_records_from_the_index_too(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    put(rig, {"id": 1, "symbol": "A"}, ttl=SECOND)
    rig.time.tick(SECOND)
    with mock.patch.object(rig.store.writer, "sweep_now", return_value=0):
        rig.alter_topic("orders", expiration=Expiration.DISABLED, index=("/symbol", "/px"))
    assert entries(rig) == 0
    assert usable(rig, "px"), "nothing is stored any more, so there is nothing to build"


def test_indexes_of_topics_are_kept_apart(rig: Rig) -> None:
    rig.create_topic("orders", ORDERS)
    rig.create_topic("other", ORDERS)
    put(rig, {"id": 1, "symbol": "A"})
    put(rig, {"id": 2, "symbol": "A"}, topic="other")
    assert text(rig, "A") == ["1"]


@pytest.mark.parametrize("restart", ["crash", "reopen"])
def test_indexes_survive_a_restart(rig: Rig, restart: str) -> None:
    rig.create_topic("orders", ORDERS, index=("/symbol", "/px"))
    put(rig, {"id": 1, "symbol": "A", "px": 1})
    getattr(rig, restart)()
    assert text(rig, "A") == ["1"]
    put(rig, {"id": 1, "symbol": "B", "px": 1})
    assert text(rig, "B") == ["1"]


def test_data_from_before_there_were_indexes_opens(rig: Rig) -> None:
    topic = rig.create_topic("orders", ORDERS, index=())
    key = TOPIC_KEY + topic.prefix
    fields = json.loads(dict(rig.rows(META))[key])
    del fields["indexes"], fields["next_index"], fields["settings"]["index"]
    batch = Batch()
    batch.puts[META][key] = json.dumps(fields).encode()
    rig.store._rocks.write(batch)
    rig.reopen()
    assert rig.topic("orders").indexes == Indexes()
    rig.alter_topic("orders", index=("/symbol",))
    assert usable(rig)


def test_the_numbers_of_indexes_are_not_used_again() -> None:
    spent = Indexes((), 0xFFFF)
    last = altered(spent, 1, [("/a", ("a",))], keep=True, complete=False)
    assert last.all[0].id == 0xFFFF
    with pytest.raises(StoreError, match="make a new topic") as caught:
        altered(last, 1, [("/a", ("a",)), ("/b", ("b",))], keep=True, complete=False)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, "settings.index")
    assert altered(last, 1, [("/a", ("a",))], keep=True, complete=False) == last


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": ("symbol",)}, "must begin with '/'"),
        ({"index": ("/a", "/")}, "empty step at 1"),
        ({"index": ("/a", "/b", "/[a]")}, "/a is there twice"),
        ({"index": ("/a[0]",)}, "leave out the subscript"),
        ({"index": ("/legs[2]/px",)}, "leave out the subscript"),
        ({"index": tuple(f"/f{number}" for number in range(17))}, "17 indexes are more than the limit of 16"),
        ({"index": ("/a" * 33,)}, "33 steps, more than the limit of 32"),
        ({"index": ("/a",), "message_type": MessageType.BINARY, "key": ()}, "a binary topic has no fields"),
        ({"index": ("/a",), "message_type": MessageType.FIX, "key": ()}, "a fix field is a tag"),
        ({"index": ("/a/b",), "message_type": MessageType.NVFIX, "key": ()}, "is flat"),
    ],
)
def test_an_index_that_cannot_be_is_refused(rig: Rig, changes: dict[str, object], message: str) -> None:
    with pytest.raises(StoreError) as caught:
        check_settings(declared_of(replaced(ORDERS, changes)))
    assert message in caught.value.message
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, "settings.index")
    rig.create_topic("orders", ORDERS, message_type=changes.get("message_type", MessageType.JSON), key=(), index=())
    with pytest.raises(StoreError, match="index: "):
        rig.alter_topic("orders", index=changes["index"])
    assert rig.topic("orders").indexes == Indexes()


def test_indexes_on_an_object_and_on_a_field_of_it_go_together() -> None:
    paths = ("/a", "/a/b", "/id", *[f"/f{number}" for number in range(13)])
    check_settings(declared_of(replaced(ORDERS, {"index": paths})))


# --- how many entries a record may have (rule K8) --------------------------------------------------------------------
