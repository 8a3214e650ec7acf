"""`order_by`: its text, its errors, the comparisons, and the memory of a sort (rule Q2; ordering [1] to [5])."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import msgspec
import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.stored import StoredStatistics, header
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import NEVER, MessageType, TopicSettings
from sow_server.filters import FilterError
from sow_server.filters.tree import Metadata, MetadataName, Path
from sow_server.query import ordering
from sow_server.query.ordering import Sorter, Term, order, parse_order, print_order
from sow_server.query.sort_memory import SortMemory, SortRoom, SortShare
from sow_server.services.records import answering


def topic(message_type: MessageType = MessageType.JSON) -> Topic:
    settings = TopicSettings(message_type=message_type)
    return Topic(1, "t", settings, create_time_micros=0, statistics=StoredStatistics())


def stored(payload: bytes, *, version: int = 1, publish_time: int = 1, expire_time: int = NEVER) -> bytes:
    head = header(
        origin=0,
        payload_bytes=len(payload),
        version=version,
        publish_time=publish_time,
        expire_time=expire_time,
        sequence=1,
    )
    return head + payload


def sorter(
    text: str, limit: int | None = None, *, message_type: MessageType = MessageType.JSON, bytes_max: int = 2**20
) -> Sorter:
    return Sorter(order(topic(message_type), text), limit, payloads=True, memory=SortMemory(bytes_max))


def sorted_values(text: str, *values: object) -> list[object]:
    """Values of /a in the order of `text`; a value that is missing stands as `...`."""
    sorting = sorter(text)
    payloads = [b"{}" if value is ... else msgspec.json.encode({"a": value}) for value in values]
    sorting.add([b"%03d" % number for number in range(len(values))], [stored(payload) for payload in payloads])
    return [values[int(key)] for _, key, _ in sorting.rows()]


# --- its text --------------------------------------------------------------------------------------------------------

A = Path(("a",))
PRICE = Path(("price",))


@pytest.mark.parametrize(
    ("text", "terms", "canonical"),
    [
        ("/price", [Term(PRICE, False)], "/price"),
        ("/price DESC, /a", [Term(PRICE, True), Term(A, False)], "/price DESC, /a"),
        ("  /price   desc,/a\tAsc ", [Term(PRICE, True), Term(A, False)], "/price DESC, /a"),
        ("@key, @EXPIRE_TIME Desc", [Term(Metadata(MetadataName.KEY), False),
            Term(Metadata(MetadataName.EXPIRE_TIME), True)], "@key, @expire_time DESC"),
        ("/legs[0]/px", [Term(Path(("legs", 0, "px")), False)], "/legs[0]/px"),
        ("[/odd name/b, c] DESC", [Term(Path(("odd name", "b, c")), True)], "/[odd name]/[b, c] DESC"),
        ("/[a,b],/a", [Term(Path(("a,b",)), False), Term(A, False)], "/[a,b], /a"),
        ("/[a\\]b]", [Term(Path(("a]b",)), False)], "/[a\\]b]"),
        ("/55 DESC", [Term(Path(("55",)), True)], "/55 DESC"),
        ("/asc", [Term(Path(("asc",)), False)], "/asc"),
    ],
)  # fmt: skip
def test_an_order_is_fields_with_directions(text: str, terms: list[Term], canonical: str) -> None:
    assert parse_order(text) == tuple(terms)
    assert print_order(terms) == canonical
    assert parse_order(canonical) == tuple(terms)


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("", 0, "expected a field"),
        ("/price DESC,", 12, "expected a field"),
        (",/price", 0, "expected a field"),
        ("price", 0, "expected a field"),
        ("/price DESCENDING", 7, "expected ASC, DESC, ',' or the end"),
        ("/price DESC /a", 12, "expected ',' or the end"),
        ("/price /a", 7, "expected ASC, DESC, ',' or the end"),
        ("/price DESC ASC", 12, "expected ',' or the end"),
        ("/a, @size", 4, "expected one of @key, @version"),
        ("/a, /b-1", 4, "expected a field"),
        ("/a, /b=1", 4, "expected a field"),
        ("/a, /", 4, "expected a field"),
        ("/a, /b/", 7, "expected a field"),
        ("/a, LOWER(/b)", 4, "expected a field"),
        ("/a[x]", 2, "expected a field"),
        ("/[a", 0, "expected a field"),
        (", ".join(["/a"] * 17), 64, "more fields than the limit of 16"),
    ],
)
def test_an_invalid_order_is_refused_with_its_position(text: str, position: int, expected: str) -> None:
    with pytest.raises(FilterError) as refused:
        parse_order(text)
    assert refused.value.position == position, refused.value.message
    lines = refused.value.message.split("\n")
    assert lines[0].startswith(expected)
    assert lines[0].endswith(f"at {position}")
    assert lines[2].index("^") - 2 == position


def test_an_order_that_is_too_long_is_refused() -> None:
    with pytest.raises(FilterError, match="more than the limit of 65536"):
        parse_order("/" + "a" * ordering.LENGTH_MAX)


def test_a_topic_refuses_orders_that_it_cannot_evaluate() -> None:
    with pytest.raises(StoreError) as refused:
        order(topic(), "/a, price")
    assert (refused.value.reason, refused.value.field) == (Reason.ORDER_INVALID, "order_by")
    assert refused.value.details == {"position": "4"}
    with pytest.raises(StoreError) as refused:
        order(topic(MessageType.BINARY), "@key, /a")
    assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED_FOR_MESSAGE_TYPE, "order_by")
    assert order(topic(MessageType.BINARY), "@version DESC").text == "@version DESC"


# --- comparisons -----------------------------------------------------------------------------------------------------


def test_nulls_are_last_in_both_directions() -> None:
    values = [None, 2, ..., 1, {"x": 1}, [], [None, 1], [{"x": 1}]]
    nulls = [None, ..., {"x": 1}, [], [None, 1], [{"x": 1}]]
    assert sorted_values("/a", *values) == [1, 2, *nulls]
    assert sorted_values("/a DESC", *values) == [2, 1, *nulls]


def test_kinds_stand_in_an_order_of_their_own() -> None:
    values = ["", 0, True, "true", -1.5, False, "10", 10, 2**63, 1e300, "Z", "a", "é", "\U0001f600", "\uffff"]
    ordered = [
        False, True, -1.5, 0, 10, 2**63, 1e300, "", "10", "Z", "a", "true", "é", "\uffff", "\U0001f600",
    ]  # fmt: skip
    assert sorted_values("/a", *values) == ordered
    assert sorted_values("/a DESC", *values) == ordered[::-1]
    # A term that runs against the first one.
    assert sorted_values("@topic, /a DESC", *values) == ordered[::-1]
    assert sorted_values("@topic DESC, /a", *values) == ordered


def test_numbers_are_compared_by_value() -> None:
    assert sorted_values("/a", 2**53 + 1, 2.0**53, 2**53 + 2, -0.5, 1, 0.5) == [
        -0.5, 0.5, 1, 2.0**53, 2**53 + 1, 2**53 + 2,
    ]  # fmt: skip


def test_an_array_counts_as_its_first_element() -> None:
    assert sorted_values("/a", [3, 0], 2, [[1], 9], ["x"], [True]) == [[True], [[1], 9], 2, [3, 0], ["x"]]


def test_equal_ones_are_in_key_order_in_both_directions() -> None:
    values = [[1, "a"], [0], [1, "b"], [1, "c"]]
    assert sorted_values("/a", *values) == [[0], [1, "a"], [1, "b"], [1, "c"]]
    assert sorted_values("/a DESC", *values) == [[1, "a"], [1, "b"], [1, "c"], [0]]


def test_a_path_may_lead_through_objects_and_arrays() -> None:
    values = [{"b": [{"c": 3}]}, {"b": {"c": 2}}, {"b": [{"d": 0}, {"c": 1}]}, 5]
    assert sorted_values("/a/b/c", *values) == [{"b": {"c": 2}}, {"b": [{"c": 3}]}, {"b": [{"d": 0}, {"c": 1}]}, 5]


def test_numeric_texts_are_numbers_where_all_values_are_texts() -> None:
    payloads = [b"44=100\x01", b"44=9.5\x01", b"44=x\x01", b"44=\x01", b"55=1\x01", b"44=-3\x01"]
    sorting = sorter("/44", message_type=MessageType.FIX)
    sorting.add([b"%d" % number for number in range(6)], [stored(payload) for payload in payloads])
    assert [payloads[int(key)] for _, key, _ in sorting.rows()] == [
        b"44=-3\x01", b"44=9.5\x01", b"44=100\x01", b"44=\x01", b"44=x\x01", b"55=1\x01",
    ]  # fmt: skip


def test_metadata_has_an_order() -> None:
    values = [
        stored(b"{}", version=3, publish_time=2, expire_time=NEVER),
        stored(b"{}", version=1, publish_time=2, expire_time=20),
        stored(b"{}", version=2, publish_time=1, expire_time=10),
    ]

    def keys(text: str) -> bytes:
        sorting = sorter(text, message_type=MessageType.BINARY)
        sorting.add([b"a", b"b", b"c"], values)
        return b"".join([key for _, key, _ in sorting.rows()])

    assert keys("@version") == b"bca"
    assert keys("@version DESC") == b"acb"
    assert keys("@key DESC") == b"cba"
    assert keys("@expire_time") == b"cba"
    assert keys("@expire_time DESC") == b"bca", "never is null, and null is last"
    assert keys("@publish_time DESC, @version") == b"bac"
    assert keys("@publish_time, @version DESC") == b"cab"
    assert keys("@publish_time, @expire_time DESC") == b"cba"
    assert keys("@topic DESC") == b"abc"


# --- the memory of a sort --------------------------------------------------------------------------------------------


def test_a_sort_for_the_first_few_holds_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "SPARE_RECORDS", 100)
    memory = SortMemory(bytes_max=200_000)
    sorting = Sorter(order(topic(), "/a DESC"), 10, payloads=True, memory=memory)
    for first in range(0, 20_000, 50):  # rising, so that each one drives out another
        numbers = range(first, first + 50)
        sorting.add([b"%05d" % n for n in numbers], [stored(json.dumps({"a": n}).encode()) for n in numbers])
    assert [key for _, key, _ in sorting.rows()] == [b"%05d" % n for n in range(19_999, 19_989, -1)]
    sorting.close()
    assert SortShare(memory).try_hold(200_000), "all of the memory is free again"


def test_headers_are_enough_where_no_payloads_are_wanted() -> None:
    memory = SortMemory(bytes_max=60_000)
    sorting = Sorter(order(topic(), "/a"), None, payloads=False, memory=memory)
    value = stored(b'{"a":1,"pad":"' + b"x" * 10_000 + b'"}')
    sorting.add([b"%d" % n for n in range(100)], [value] * 100)
    assert {found for _, _, found in sorting.rows()} == {value[:40]}


@pytest.mark.parametrize("limit", [None, 80])
def test_a_result_that_does_not_fit_is_refused(limit: int | None) -> None:
    memory = SortMemory(bytes_max=2**20)
    sorting = Sorter(order(topic(), "/a"), limit, payloads=True, memory=memory)
    value = stored(b'{"a":1,"pad":"' + b"x" * 10_000 + b'"}')

    def add_all() -> None:
        for first in range(0, 200, 10):
            sorting.add([b"%03d" % n for n in range(first, first + 10)], [value] * 10)

    with pytest.raises(StoreError, match=r"1 MiB.*top_n") as refused:
        add_all()
    assert (refused.value.reason, refused.value.field) == (Reason.RESULT_TOO_LARGE, "order_by")
    assert SortShare(memory).try_hold(2**20), "the held memory is free again"


def test_texts_that_are_sorted_by_count_as_memory() -> None:
    memory = SortMemory(bytes_max=100_000)
    for text in ("/a", "@topic, /a DESC"):
        sorting = Sorter(order(topic(), text), None, payloads=False, memory=memory)
        with pytest.raises(StoreError, match="order_by"):
            sorting.add([b"1", b"2"], [stored(b'{"a":"' + b"x" * 60_000 + b'"}')] * 2)


def test_sorts_share_their_memory_and_a_sort_without_room_begins_anew() -> None:
    memory = SortMemory(bytes_max=300_000)
    value = stored(b'{"a":1,"pad":"' + b"x" * 100_000 + b'"}')
    one, other = (Sorter(order(topic(), "/a"), None, payloads=True, memory=memory) for _ in range(2))
    assert one.add([b"1", b"2"], [value] * 2) is SortRoom.GRANTED
    assert other.add([b"1"], [value]) is SortRoom.BEGIN_ANEW
    assert (other.share.held, memory.waiting) == (0, 1)
    woken: list[bool] = []
    assert not other.share.when_ready(lambda: woken.append(True))
    one.close()
    assert woken == [True]
    assert other.share.when_ready(lambda: None)
    assert other.add([b"1", b"2"], [value] * 2) is SortRoom.GRANTED
    assert memory.waiting == 0
    assert [key for _, key, _ in other.rows()] == [b"1", b"2"]


class WatchedShare(SortShare):
    """During each wait for it another query comes, finds no room, and is given up."""

    waits = 0

    def when_ready(self, wake: Callable[[], None]) -> bool:
        self.waits += 1
        assert self.waits < 5, "it waits for as long as others come"
        asyncio.get_running_loop().call_soon(self._come_and_go)
        return super().when_ready(wake)

    def _come_and_go(self) -> None:
        share = SortShare(self.memory)
        assert not share.try_hold(50)
        assert share.hold(50) is SortRoom.BEGIN_ANEW
        share.close()


def test_queries_that_come_and_go_do_not_prolong_the_wait_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Story: a query that got no memory, and one that was given up without any, counted as if memory had moved. So
    while others came, the one with the turn waited for ever for a client that did not read, and all others for it."""
    monkeypatch.setattr(answering, "SORT_PATIENCE_SECONDS", 0.02)
    memory = SortMemory(bytes_max=100)
    unread, waiting = SortShare(memory), WatchedShare(memory)
    assert unread.try_hold(70)
    unread.shrink(70)  # it is being sent
    assert not waiting.try_hold(40)
    assert waiting.hold(40) is SortRoom.WAIT
    with pytest.raises(StoreError) as refused:
        asyncio.run(answering.until_ready(waiting))
    assert (refused.value.reason, refused.value.field) == (Reason.OVERLOADED, "order_by")
