"""Aggregates in queries: results, refusals and the memory of groups (rules Q11, Q12; aggregating [1] to [4])."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MessageType, Publish, TopicSettings
from sow_server.filters import parse
from sow_server.filters.aggregates import Aggregation
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.query import aggregating as module
from sow_server.query import scan as scan_module
from sow_server.query.aggregating import Aggregating, aggregating
from sow_server.query.filtering import callers_filter
from sow_server.query.scan import Query, Scan
from sow_server.query.sort_memory import SortMemory, SortShare
from tests.support.stores.stores import Rig

SETTINGS = TopicSettings(key=("/id",))
TRADES: Sequence[Mapping[str, object]] = [
    {"id": 1, "account": "A", "px": 10, "qty": 2, "open": True},
    {"id": 2, "account": "A", "px": 0.1, "qty": 3, "open": True},
    {"id": 3, "account": "B", "px": 0.2, "qty": 1, "open": False},
    {"id": 4, "account": 7, "px": "0.3", "qty": 1},
    {"id": 5, "px": 1},
    {"id": 6, "account": ["A"], "px": 1},
]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("trades", SETTINGS)
    yield rig
    rig.close()


def put(rig: Rig, *documents: Mapping[str, object]) -> None:
    rig.run(Publish("trades", [json.dumps(document).encode() for document in documents]))


def asked(
    rig: Rig, *items: str, by: str = "", having: str = "", order: str = "", restriction: Restriction = UNRESTRICTED
) -> Aggregating:
    named = [tuple(item.split(" AS ")[::-1]) for item in items]
    groups = [("", path) for path in by.split(", ") if path]
    return aggregating(rig.topic("trades"), groups, named, having, order, restriction)  # type: ignore[arg-type]  # pairs


class Figures(NamedTuple):
    matched: int
    returned: int
    scanned: int
    groups: int
    ungrouped: int


def run(scan: Scan) -> tuple[list[dict[str, object]], Figures]:
    found: list[dict[str, object]] = []
    while (batch := scan.step()) is not None:
        assert batch.keys == [] or batch.payloads is not None
        found += [json.loads(payload) for payload in batch.payloads or ()]
    footer = scan.footer()
    assert scan.aggregator is not None
    figures = Figures(*footer[:3], scan.aggregator.groups, scan.aggregator.ungrouped)
    scan.close()
    return found, figures


def ask(rig: Rig, *items: str, **options: object) -> list[dict[str, object]]:
    query = Query(rig.topic("trades"), aggregating=asked(rig, *items, **options))  # type: ignore[arg-type]  # any option
    return run(Scan(rig.store.cuts, query))[0]


def test_groups_have_exact_sums_and_the_values_that_name_them(rig: Rig) -> None:
    put(rig, *TRADES)
    query = Query(rig.topic("trades"), aggregating=asked(rig, "COUNT(*) AS n", "SUM(/px) AS px", by="/account"))
    found, footer = run(Scan(rig.store.cuts, query))
    assert found == [
        {"account": 7, "n": 1, "px": 0.3},
        {"account": "A", "n": 2, "px": 10.1},
        {"account": "B", "n": 1, "px": 0.2},
    ]
    assert (footer.matched, footer.returned, footer.scanned, footer.groups, footer.ungrouped) == (6, 3, 6, 3, 2)


def test_without_group_by_all_records_are_one_group(rig: Rig) -> None:
    assert ask(rig, "COUNT(*) AS n", "SUM(/px) AS s", "MAX(@version) AS v") == [{"n": 0, "s": None, "v": None}]
    put(rig, *TRADES)
    assert ask(rig, "COUNT(*) AS n", "SUM(/qty) AS s", "COUNT(/open) AS o") == [{"n": 6, "s": 7, "o": 3}]


def test_a_group_of_a_text_and_of_a_number_of_one_text_is_told_as_text(rig: Rig) -> None:
    """Planted mistake: the value that is shown depends on the record that comes first."""
    put(rig, {"id": 1, "g": 1}, {"id": 2, "g": "1"}, {"id": 3, "g": 1.0}, {"id": 4, "g": True}, {"id": 5, "g": 2.0})
    put(rig, {"id": 6, "g": "1"}, {"id": 7, "g": 2})
    found = ask(rig, "COUNT(*) AS n", by="/g")
    assert found == [{"g": "1", "n": 4}, {"g": 2, "n": 2}, {"g": True, "n": 1}]
    assert [type(each["g"]) for each in found] == [str, int, bool]


def test_having_order_top_and_skip_are_about_results(rig: Rig) -> None:
    put(rig, *[{"id": n, "g": n % 7, "v": n} for n in range(70)])
    some = asked(rig, "COUNT(*) AS n", "SUM(/v) AS s", by="/g", having="/g != 3 AND MAX(/v) > 63", order="/s DESC")
    query = Query(rig.topic("trades"), aggregating=some, skip_n=1, top_n=2)
    found, footer = run(Scan(rig.store.cuts, query))
    assert [each["g"] for each in found] == [5, 4]
    assert (footer.returned, footer.groups) == (2, 7)


def test_results_that_are_equal_in_the_order_come_by_their_keys_in_both_directions(rig: Rig) -> None:
    put(rig, *[{"id": n, "g": f"{n % 5}"} for n in range(20)])
    for order in ("/n", "/n DESC"):
        assert [each["g"] for each in ask(rig, "COUNT(*) AS n", by="/g", order=order)] == ["0", "1", "2", "3", "4"]


def test_hidden_fields_are_null_and_rows_come_first(rig: Rig) -> None:
    """Planted mistake: an aggregate reads a field that is hidden from its caller."""
    put(rig, *TRADES)
    restriction = Restriction(parse("/open"), (("px",),))
    some = asked(
        rig, "SUM(/px) AS s", "COUNT(/px) AS c", "SUM(/qty) AS q", "MAX(MESSAGE_SIZE()) AS m",
        by="/account", restriction=restriction,
    )  # fmt: skip
    given = callers_filter(rig.topic("trades"), "", restriction)
    found, footer = run(Scan(rig.store.cuts, Query(rig.topic("trades"), filter=given, aggregating=some)))
    assert found == [{"account": "A", "s": None, "c": 0, "q": 5, "m": None}]
    assert (footer.matched, footer.groups, footer.ungrouped) == (2, 1, 0)
    grouped = asked(rig, "COUNT(*) AS n", by="/px", restriction=restriction)
    found, footer = run(Scan(rig.store.cuts, Query(rig.topic("trades"), filter=given, aggregating=grouped)))
    assert (found, footer.groups, footer.ungrouped) == ([], 0, 2)


def test_mistyped_fields_are_told(rig: Rig) -> None:
    put(rig, *TRADES)
    scan = Scan(rig.store.cuts, Query(rig.topic("trades"), aggregating=asked(rig, "SUM(/pxx) AS s", by="/account")))
    run(scan)
    assert scan.absent_fields == ("/pxx",)


def test_a_result_is_valid_json_whatever_the_numbers_are(rig: Rig) -> None:
    put(rig, {"id": 1, "v": 1e308}, {"id": 2, "v": 1e308}, {"id": 3, "big": 10**400})
    found = ask(rig, "SUM(/v) AS s", "AVG(/v) AS a", "MAX(/v) * 100 AS inf", "SUM(/big) AS big", "AVG(/big) AS none")
    assert found == [{"s": None, "a": 1e308, "inf": None, "big": 10**400, "none": None}]


@pytest.mark.parametrize(
    ("by", "item", "field", "place", "message"),
    [
        ("/a", "SUM(/b) + /c AS s", "aggregate[0]", "10", "a field of a record stands outside of an aggregate at 10"),
        ("/a", "COUNT(*) + @version AS s", "aggregate[0]", "11", "metadata of a record stands outside"),
        ("/a", "SUM(MAX(/b)) AS s", "aggregate[0]", "4", "an aggregate in an aggregate at 4"),
        ("SUM(/a)", "COUNT(*) AS n", "group_by[0]", "0", "an aggregate does not group at 0"),
        ("/a + 1", "COUNT(*) AS n", "group_by[0]", None, "/a + 1 needs a name"),
        ("/a", "COUNT( AS n", "aggregate[0]", "6", "expected a value or ')' at 6"),
        ("/a", "COUNT(*) AS a", "aggregate[0]", None, "there is another 'a'; each needs a name of its own, as in"),
        ("/a", "MEDIAN(/b) AS m", "aggregate[0]", "0", "no function MEDIAN"),
        ("/a", "SUM(/b, /c) AS m", "aggregate[0]", "0", "SUM takes 1 argument, not 2, at 0"),
        ("/a", "COUNT(*) AS a\x00b", "aggregate[0]", None, r"the name 'a\x00b' has control characters"),
    ],
)
def test_bad_expressions_are_refused_with_their_place(
    rig: Rig, by: str, item: str, field: str, place: str | None, message: str
) -> None:
    with pytest.raises(StoreError) as caught:
        asked(rig, item, by=by)
    error = caught.value
    assert (error.reason, error.field) == (Reason.EXPRESSION_INVALID, field)
    assert (error.details or {}).get("position") == place
    assert str(error).startswith(f"{field}: {message}")
    if place is not None:
        assert str(error).splitlines()[-1].index("^") == int(place) + 2


def test_having_and_the_order_know_the_names_of_the_results(rig: Rig) -> None:
    with pytest.raises(StoreError, match="having: a field of a record stands outside of an aggregate at 5; of a group"):
        asked(rig, "COUNT(*) AS n", by="/a", having="/n > /b")
    with pytest.raises(StoreError, match="order_by: expected a result, such as /a, /n at 4") as caught:
        asked(rig, "COUNT(*) AS n", by="/a", order="/n, /b")
    assert caught.value.reason is Reason.ORDER_INVALID
    with pytest.raises(StoreError, match="having: expected a condition"):
        asked(rig, "COUNT(*) AS n", having="SUM(/a) + 1")
    with pytest.raises(StoreError, match="having: needs group_by or aggregate"):
        asked(rig, having="1 = 1")


@pytest.mark.parametrize("option", ["keys_only", "count_only", "page_size"])
def test_options_about_records_are_refused(rig: Rig, option: str) -> None:
    plan = asked(rig, "COUNT(*) AS n", by="/a")
    query = Query(rig.topic("trades"), aggregating=plan, **{option: True})  # type: ignore[arg-type]  # each is a bool
    with pytest.raises(StoreError, match=f"group_by: cannot be combined with {option}: the answer has groups"):
        Scan(rig.store.cuts, query)


def test_a_filter_says_that_it_has_no_aggregates(rig: Rig) -> None:
    with pytest.raises(StoreError, match="SUM is an aggregate at 0; a filter looks at one record, and has none"):
        callers_filter(rig.topic("trades"), "SUM(/px) > 3", UNRESTRICTED)


def test_too_many_groups_are_refused_before_they_take_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    put(rig, *[{"id": n, "g": n} for n in range(50)])
    memory = SortMemory(bytes_max=20_000)
    query = Query(rig.topic("trades"), aggregating=asked(rig, "COUNT(*) AS n", by="/g"))
    scan = Scan(rig.store.cuts, query, memory)
    with pytest.raises(StoreError, match="aggregate: the result does not fit into") as caught:
        run(scan)
    scan.close()
    assert (caught.value.reason, memory.held_bytes) == (Reason.RESULT_TOO_LARGE, 0)
    monkeypatch.setattr(module, "GROUPS_MAX", 49)
    scan = Scan(rig.store.cuts, query, memory := SortMemory())
    with pytest.raises(StoreError, match="more groups than the limit of 49") as caught:
        run(scan)
    scan.close()
    assert (caught.value.reason, memory.held_bytes) == (Reason.RESULT_TOO_LARGE, 0)


def test_different_values_are_counted_as_memory(rig: Rig) -> None:
    put(rig, *[{"id": n, "g": f"{n:0200}"} for n in range(300)])
    some = asked(rig, "COUNT(DISTINCT /g) AS n")
    scan = Scan(rig.store.cuts, Query(rig.topic("trades"), aggregating=some), memory := SortMemory(bytes_max=50_000))
    with pytest.raises(StoreError, match="aggregate: the result does not fit"):
        run(scan)
    scan.close()
    assert memory.held_bytes == 0
    assert ask(rig, "COUNT(DISTINCT /g) AS n") == [{"n": 300}]


def test_a_query_that_begins_anew_counts_nothing_twice(rig: Rig) -> None:
    put(rig, *[{"id": n, "g": n % 3, "v": 0.1} for n in range(300)])
    memory = SortMemory(bytes_max=60_000)
    holder = SortShare(memory, "other")
    assert holder.try_hold(60_000)
    query = Query(rig.topic("trades"), aggregating=asked(rig, "COUNT(*) AS n", "SUM(/v) AS s", by="/g"))
    scan = Scan(rig.store.cuts, query, memory)
    while scan.waits_for is None:
        assert scan.step() is not None
    assert scan.waits_for.in_line
    holder.close()
    found, footer = run(scan)
    assert [(each["n"], each["s"]) for each in found] == [(100, 10.0)] * 3
    assert (footer.matched, footer.groups, memory.held_bytes) == (300, 3, 0)


def test_memory_that_nobody_reads_is_taken_back(rig: Rig) -> None:
    put(rig, *[{"id": n, "g": n} for n in range(30)])
    now = [0.0]
    memory = SortMemory(bytes_max=60_000, elapsed=lambda: now[0])
    some = asked(rig, "COUNT(*) AS n", by="/g")
    scan = Scan(rig.store.cuts, Query(rig.topic("trades"), aggregating=some, batch_size=10), memory)
    while not scan.step().keys:  # type: ignore[union-attr]  # it is not at its end
        pass
    waiting = SortShare(memory, "other")
    now[0] = 60.0
    waiting.hold(59_000)
    memory.take_back()
    with pytest.raises(StoreError, match="aggregate: other queries needed the memory") as caught:
        scan.step()
    scan.close()
    assert caught.value.reason is Reason.OVERLOADED


def test_a_binary_topic_has_no_fields_to_group_by(rig: Rig) -> None:
    rig.create_topic("blobs", TopicSettings(message_type=MessageType.BINARY))
    topic = rig.topic("blobs")
    with pytest.raises(StoreError, match="group_by: topic blobs is binary") as caught:
        aggregating(topic, [("", "/a")], [], "", "", UNRESTRICTED)
    assert caught.value.reason is Reason.UNSUPPORTED_FOR_MESSAGE_TYPE
    aggregating(topic, [("", "@origin")], [("n", "COUNT(*)")], "", "", UNRESTRICTED)


def test_the_costs_of_all_expressions_are_bounded_together(rig: Rig) -> None:
    likes = " OR ".join([f"/px LIKE 'a{number}'" for number in range(60)])
    lows = "LOWER(" * 40 + "/px" + ")" * 40
    tests = "&&".join(["/a=1"] * 1500)
    for items, what in (
        ([f"COUNT({likes}) AS n", f"COUNT(NOT ({likes})) AS m"], "120 regular expressions together, .* of 100"),
        (
            [f"COUNT(CONCAT({lows}, '{number}')) AS n{number}" for number in range(7)],
            "287 functions together, .* of 250",
        ),
        ([f"COUNT(/px={number}&&{tests}) AS n{number}" for number in range(5)], "functions together, .* of 6000"),
    ):
        with pytest.raises(StoreError, match=what) as refused:
            asked(rig, *items)
        assert (refused.value.reason, refused.value.field) == (Reason.EXPRESSION_INVALID, "aggregate")


def test_the_work_on_results_is_done_in_pieces_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result may be as costly as the largest filter. Without pieces nobody can cancel a thousand of them."""
    put(rig, *[{"id": number, "qty": number} for number in range(100)])
    computed = 0
    results = Aggregation.results

    def count(*arguments: object) -> object:
        nonlocal computed
        computed += 1
        return results(*arguments)  # type: ignore[arg-type]  # those of the call

    monkeypatch.setattr(Aggregation, "results", count)
    query = Query(rig.topic("trades"), aggregating=asked(rig, "COUNT(*) AS n", by="/qty", having="/n > 0"), skip_n=90)
    seconds = itertools.count(step=0.004)
    scan = Scan(rig.store.cuts, query, clock=lambda: next(seconds))
    found = 0
    while (batch := scan.step()) is not None:
        found += len(batch.keys)
        assert computed <= 30
        computed = 0
    scan.close()
    assert found == 10


def test_results_that_are_skipped_are_not_computed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    put(rig, *[{"id": number, "qty": number} for number in range(100)])
    computed: list[str] = []
    results = Aggregation.results

    def note(plan: Aggregation, key: str, *rest: object) -> object:
        computed.append(key)
        return results(plan, key, *rest)  # type: ignore[arg-type]  # those of the call

    monkeypatch.setattr(Aggregation, "results", note)
    query = Query(rig.topic("trades"), aggregating=asked(rig, "COUNT(*) AS n", by="/qty"), skip_n=97, top_n=2)
    assert [each["qty"] for each in run(Scan(rig.store.cuts, query))[0]] == [97, 98]
    assert computed == ["97", "98"]


def test_a_function_that_is_not_there_is_told_with_the_aggregates_that_are(rig: Rig) -> None:
    with pytest.raises(StoreError, match="no function MEDIAN at 0; there are COUNT, SUM, AVG, MIN, MAX, LENGTH"):
        asked(rig, "MEDIAN(/px) AS m")


def test_a_query_that_is_left_at_any_moment_frees_its_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it reads, adds, puts in order, or sends."""
    monkeypatch.setattr(scan_module, "SCAN_CHUNK_FIRST", 20)
    monkeypatch.setattr(scan_module, "SCAN_CHUNK", 20)
    put(rig, *[{"id": n, "g": f"{n % 40:0100}", "v": n} for n in range(120)])
    memory = SortMemory()
    query = Query(
        rig.topic("trades"),
        aggregating=asked(rig, "SUM(/v) AS s", "COUNT(DISTINCT /v) AS d", by="/g", order="/s DESC"),
        batch_size=20,
    )
    held = set()
    for steps in itertools.count():
        seconds = itertools.count(step=0.004)
        scan = Scan(rig.store.cuts, query, memory, clock=lambda seconds=seconds: next(seconds))  # type: ignore[misc]  # a lambda's default
        ended = steps > 0 and [scan.step() for _ in range(steps)][-1] is None
        held.add(memory.held_bytes)
        scan.close()
        assert (memory.held_bytes, memory.waiting) == (0, 0), steps
        if ended:
            break
    assert len(held) > 5, "it was left at many moments"


def test_a_query_that_is_left_while_it_waits_leaves_its_turn_to_the_next(rig: Rig) -> None:
    put(rig, *[{"id": n, "g": n, "v": 1} for n in range(60)])
    memory = SortMemory(bytes_max=60_000)
    holder = SortShare(memory, "other")
    assert holder.try_hold(60_000)
    query = Query(rig.topic("trades"), aggregating=asked(rig, "SUM(/v) AS s", by="/g"))
    first, second = Scan(rig.store.cuts, query, memory, "desk"), Scan(rig.store.cuts, query, memory, "desk")
    for scan in (first, second):
        while scan.waits_for is None:
            assert scan.step() is not None
    assert memory.waiting == 2
    woken: list[bool] = []
    assert second.waits_for is not None
    assert not second.waits_for.when_ready(lambda: woken.append(True))
    first.close()
    assert memory.waiting == 1
    holder.close()
    assert woken == [True]
    found, footer = run(second)
    assert ([each["s"] for each in found], footer.groups) == ([1] * 60, 60)
    assert (memory.held_bytes, memory.waiting) == (0, 0)
