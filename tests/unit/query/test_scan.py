"""How a query runs: the way to its records, the work for it, and its refusals (rules Q1 to Q5; scan [1] to [4])."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from sow_server.engine.formats.payloads import Projection
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Publish,
    TopicSettings,
)
from sow_server.query import ordering, pages, scan, sort_memory, sources
from sow_server.query.filtering import record_filter
from sow_server.query.ordering import order
from sow_server.query.planner import Access
from sow_server.query.projection import CHARACTERS_MAX, PATHS_MAX, projection
from sow_server.query.scan import Explanation, Footer, Query, RecordBatch, Scan
from sow_server.query.sort_memory import SortMemory, SortShare
from tests.support.stores.stores import SECOND, Rig

SETTINGS = TopicSettings(expiration=Expiration.ENABLED, key=("/id",), index=("/symbol", "/px"))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("quotes", SETTINGS)
    yield rig
    rig.close()


def put(rig: Rig, *documents: dict[str, object], topic: str = "quotes", ttl: int | None = None) -> None:
    lifetime = ABSENT if ttl is None else Lifetime(LifetimeKind.TTL, ttl)
    payloads = [json.dumps(document).encode() for document in documents]
    for first in range(0, len(payloads), 1000):
        rig.run(Publish(topic, payloads[first : first + 1000], lifetime=lifetime))


def fill(rig: Rig, count: int, *, symbols: int = 100) -> None:
    """Records 00000 and up, the symbols in turns, rising prices."""
    put(rig, *[{"id": f"{n:05d}", "symbol": f"S{n % symbols}", "px": n} for n in range(count)])


class Answer(NamedTuple):
    keys: list[str]
    footer: Footer
    taken: Explanation


def query(rig: Rig, text: str = "", *, by: str = "", topic: str = "quotes", **options: object) -> Query:
    found = rig.topic(topic)
    given = record_filter(found, text, 0) if text else None
    return Query(found, filter=given, order=order(found, by) if by else None, **options)  # type: ignore[arg-type]  # by name


def run(rig: Rig, asked: Query) -> Answer:
    found = Scan(rig.store.cuts, asked)
    try:
        keys: list[str] = []
        while (batch := found.next_batch()) is not None:
            keys += [key.decode() for key in batch.keys]
        return Answer(keys, found.footer(), found.explanation())
    finally:
        found.close()


def ask(rig: Rig, text: str = "", *, by: str = "", topic: str = "quotes", **options: object) -> Answer:
    return run(rig, query(rig, text, by=by, topic=topic, **options))


def steps(found: Scan) -> Iterator[RecordBatch]:
    while (batch := found.step()) is not None:
        yield batch


def refused(rig: Rig, text: str = "", *, by: str = "", topic: str = "quotes", **options: object) -> StoreError:
    with pytest.raises(StoreError) as caught:
        ask(rig, text, by=by, topic=topic, **options)
    return caught.value


# --- the way it takes ------------------------------------------------------------------------------------------------


def test_equality_on_the_key_is_a_look_up_and_never_a_scan(rig: Rig) -> None:
    fill(rig, 50)
    found = ask(rig, "/id IN ('00007', '00003', 'none') AND /px > 3")
    assert (found.keys, found.footer[:3]) == (["00007"], (1, 1, 3))
    assert found.taken == (Access.POINTS, "", 3, 0)


def test_a_beginning_of_the_key_reads_that_range_alone(rig: Rig) -> None:
    fill(rig, 500)
    found = ask(rig, "@key BEGINS WITH ('0000', '0012')")
    assert found.keys == [f"{n:05d}" for n in [*range(10), *range(120, 130)]]
    assert found.footer.scanned == 20
    assert found.taken == (Access.KEY_RANGES, "", 2, 0)


def test_an_index_finds_equal_values_without_reading_the_rest(rig: Rig) -> None:
    fill(rig, 1000)
    found = ask(rig, "/symbol = 'S7'")
    assert found.keys == [f"{n:05d}" for n in range(7, 1000, 100)]
    assert found.footer.scanned == 10
    assert found.taken == (Access.INDEX, "/symbol", 1, 10)


def test_an_index_finds_ranges_in_key_order(rig: Rig) -> None:
    put(rig, *[{"id": f"{n:03d}", "px": 1000 - n} for n in range(300)])
    found = ask(rig, "/px >= 990")
    assert found.keys == [f"{n:03d}" for n in range(11)]
    assert found.taken == (Access.INDEX, "/px", 1, 11)
    assert ask(rig, "/px IN (990, 995) AND /id != '005'").keys == ["010"]


def test_the_index_with_the_fewest_hits_is_taken(rig: Rig) -> None:
    fill(rig, 3000, symbols=2)
    found = ask(rig, "/symbol = 'S1' AND /px BETWEEN 100 AND 110")
    assert found.keys == [f"{n:05d}" for n in range(101, 110, 2)]
    assert (found.taken.access, found.taken.index_path) == (Access.INDEX, "/px")
    assert found.taken.index_entries <= 100 + 11, "the other one was left where it had shown to be longer"


def test_an_index_gives_way_to_a_short_range_of_keys(rig: Rig) -> None:
    fill(rig, 3000, symbols=2)
    found = ask(rig, "/symbol = 'S1' AND @key BEGINS WITH '0001'")
    assert found.keys == [f"{n:05d}" for n in range(11, 20, 2)]
    assert (found.taken.access, found.footer.scanned) == (Access.KEY_RANGES, 10)
    found = ask(rig, "/px = 2500 AND @key >= '00001'")
    assert (found.taken.access, found.footer.scanned) == (Access.INDEX, 1)


def test_an_index_that_would_find_too_much_is_not_used(rig: Rig) -> None:
    """A look-up costs several times what reading on does."""
    fill(rig, 6000, symbols=2)
    found = ask(rig, "/symbol = 'S1'")
    assert (len(found.keys), found.footer.scanned) == (3000, 6000)
    assert found.taken == (Access.SCAN, "", 0, 1500)


def test_the_first_few_come_from_an_index_as_it_is_read(rig: Rig) -> None:
    fill(rig, 6000, symbols=2)
    found = ask(rig, "/symbol = 'S1'", top_n=5, skip_n=2)
    assert found.keys == ["00005", "00007", "00009", "00011", "00013"]
    assert (found.taken.access, found.footer.scanned) == (Access.INDEX, 1000)
    several = ask(rig, "/symbol IN ('S1', 'S0')", page_size=4)
    assert several.keys == ["00000", "00001", "00002", "00003"]
    assert (several.taken.access, several.taken.probes) == (Access.INDEX, 2)


def test_an_index_that_is_being_built_is_not_used(rig: Rig) -> None:
    fill(rig, 2500)
    rig.submit_alter("quotes", lambda result: None, {"index": ("/symbol", "/px", "/id")})
    rig.turn()
    assert not all(index.complete for index in rig.topic("quotes").indexes.all)
    assert ask(rig, "/id BEGINS WITH '0001' OR /px = 3").taken.access is Access.SCAN
    rig.store.writer.step()
    assert ask(rig, "/id BETWEEN '00010' AND '00019'").taken == (Access.INDEX, "/id", 2, 20)


def test_a_contradicting_filter_reads_nothing(rig: Rig) -> None:
    fill(rig, 10)
    for text in ("false", "1 = 2", "/px = null", "/id = 1 AND /id = 2", "/px BETWEEN 3 AND 2"):
        found = ask(rig, text)
        assert (found.keys, found.footer, found.taken) == ([], (0, 0, 0, ""), (Access.NOTHING, "", 0, 0)), text
    assert ask(rig, "true").footer[:3] == (10, 10, 10)


@pytest.mark.parametrize("text", ["/symbol = 'A'", "/px > 5", "@key = '1'", "/other IS NULL", "/id = 1"])
def test_expired_records_are_found_in_no_way(rig: Rig, text: str) -> None:
    put(rig, {"id": 1, "symbol": "A", "px": 9}, ttl=SECOND)
    assert ask(rig, text).keys == ["1"]
    rig.time.tick(SECOND)
    found = ask(rig, text)
    assert (found.keys, found.footer.matched, found.footer.scanned) == ([], 0, 1)


@pytest.mark.parametrize("text", ["/symbol = 'A'", "@key IN ('1', '2', '3')", "/other IS NULL", "@key < '9'"])
def test_changes_after_the_cut_are_not_seen(rig: Rig, text: str) -> None:
    put(rig, {"id": 1, "symbol": "A"}, {"id": 2, "symbol": "A"})
    found = Scan(rig.store.cuts, query(rig, text))
    put(rig, {"id": 1, "symbol": "B"}, {"id": 3, "symbol": "A"})
    rig.delete("quotes", "2")
    batch = found.next_batch()
    assert batch is not None
    assert batch.keys == [b"1", b"2"]
    assert batch.payloads == [b'{"id": 1, "symbol": "A"}', b'{"id": 2, "symbol": "A"}']
    assert found.next_batch() is None
    found.close()


@pytest.mark.parametrize("text", ["", "true", "@version > 0"])
def test_a_count_is_that_of_the_cut_however_it_is_found(rig: Rig, text: str) -> None:
    """Q1, L8. Counts known from the figures were read later, when the header had been sent."""
    put(rig, {"id": 1}, {"id": 2})
    put(rig, {"id": 3}, {"id": 4}, {"id": 5}, ttl=SECOND)
    rig.time.tick(SECOND)
    put(rig, {"id": 6}, ttl=SECOND)
    found, given_up = (Scan(rig.store.cuts, query(rig, text, count_only=True)) for _ in range(2))
    given_up.close()
    put(rig, {"id": 7})
    rig.delete("quotes", "1", "2")
    rig.time.tick(SECOND)
    rig.store.sweep()
    assert found.next_batch() is None
    assert found.footer()[:2] == (3, 3)
    found.close()


def test_now_is_that_of_the_cut(rig: Rig) -> None:
    put(rig, {"id": 1}, ttl=10 * SECOND)
    put(rig, {"id": 2}, ttl=30 * SECOND)
    rig.time.tick(5 * SECOND)
    assert ask(rig, "@expire_time - NOW_MICROS() <= 5000000").keys == ["1"]
    found = Scan(rig.store.cuts, query(rig, "@expire_time - NOW_MICROS() <= 5000000"))
    rig.time.tick(20 * SECOND)
    batch = found.next_batch()
    assert batch is not None
    assert batch.keys == [b"1"]
    found.close()


def test_a_number_that_no_float_reaches_hides_nothing(rig: Rig) -> None:
    """Such a document does not decode at once; the fields beside it must be found all the same, by every plan."""
    for payload in (b'{"id":1,"symbol":"A","px":1e999}', b'{"id":2,"symbol":"A","px":-' + b"9" * 5000 + b"}"):
        rig.run(Publish("quotes", [payload]))
    assert ask(rig, "/symbol = 'A'").keys == ["1", "2"]
    assert ask(rig, "/symbol LIKE 'A'").keys == ["1", "2"]
    assert ask(rig, "/px > 1e300").keys == ["1"]
    assert ask(rig, "/px < 0", by="/px").keys == ["2"]
    assert ask(rig, "/id = 2 AND /px < 0").keys == ["2"]


# --- pieces of work --------------------------------------------------------------------------------------------------


def test_a_piece_of_work_ends_though_nothing_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "SCAN_CHUNK", 2_000)
    fill(rig, 7_000)
    found = Scan(rig.store.cuts, query(rig, "/px < 0 OR /none = 1"))
    scanned = 0
    for batch in steps(found):
        assert batch.keys == []
        read = found.footer().scanned - scanned
        assert read <= sources.SCAN_CHUNK
        scanned += read
    assert scanned == 7_000
    assert found.step() is None
    found.close()


def test_only_as_much_is_read_as_is_wanted(rig: Rig) -> None:
    fill(rig, 5000)
    assert ask(rig, top_n=1).footer[:3] == (1, 1, 1)
    assert ask(rig, top_n=10, skip_n=20).footer[:3] == (30, 10, 30)
    assert ask(rig, "/none IS NULL", top_n=1).footer.scanned == scan.SCAN_CHUNK_FIRST
    assert ask(rig, page_size=7).footer[:3] == (7, 7, 7)


def test_a_batch_is_no_larger_than_asked_and_about_a_mebibyte(rig: Rig) -> None:
    put(rig, *[{"id": n, "pad": "x" * 100_000} for n in range(40)])
    for asked in (query(rig), query(rig, "/id >= 0"), query(rig, by="@key DESC")):
        found = Scan(rig.store.cuts, asked)
        sizes = [sum(map(len, batch.payloads or ())) for batch in steps(found)]
        assert max(sizes) < 2**20 + 200_000
        assert sum(sizes) > 40 * 100_000
        found.close()
    fill(rig, 100)
    found = Scan(rig.store.cuts, query(rig, "/px >= 0 AND /none IS NULL", batch_size=7))
    assert [len(batch.keys) for batch in steps(found) if batch.keys] == [7] * 14 + [2]
    found.close()


def test_many_short_ranges_are_read_without_the_rows_between(rig: Rig) -> None:
    fill(rig, 3000)
    text = " OR ".join([f"@key BETWEEN '{n:05d}' AND '{n + 1:05d}'" for n in range(0, 3000, 30)])
    found = ask(rig, text)
    assert found.keys == [f"{n + more:05d}" for n in range(0, 3000, 30) for more in range(2)]
    assert (found.taken.access, found.taken.probes, found.footer.scanned) == (Access.KEY_RANGES, 100, 200)


# --- counts, explanations, orders ------------------------------------------------------------------------------------


def test_a_count_reads_only_necessary_rows(rig: Rig) -> None:
    fill(rig, 300)
    assert ask(rig, count_only=True).footer == (300, 300, 0, ""), "known from the figures"
    assert ask(rig, "true", count_only=True).footer == (300, 300, 0, "")
    assert ask(rig, "/symbol = 'S3'", count_only=True).footer == (3, 3, 3, "")
    assert ask(rig, "/px >= 100 AND /none IS NULL", count_only=True, skip_n=20, top_n=50).footer.returned == 50
    assert ask(rig, "/px >= 100", count_only=True, skip_n=190).footer[:2] == (200, 10)
    assert ask(rig, count_only=True, keys=(b"00001", b"x")).footer == (1, 1, 2, "")


def test_an_explanation_is_that_of_a_real_run_without_its_records(rig: Rig) -> None:
    fill(rig, 300)
    found = Scan(rig.store.cuts, query(rig, "/symbol = 'S3'", explain=True))
    assert [batch.keys for batch in steps(found) if batch.keys] == []
    assert found.footer() == (3, 3, 3, "")
    assert found.explanation() == (Access.INDEX, "/symbol", 1, 3)
    found.close()
    assert ask(rig, "/px > 5 OR /none = 1", by="/px DESC", top_n=2, explain=True).footer == (294, 2, 300, "")
    assert ask(rig, explain=True).taken == (Access.SCAN, "", 0, 0)
    assert ask(rig, keys=(b"1", b"2"), explain=True).taken == (Access.POINTS, "", 2, 0)


def test_an_order_sorts_the_records_of_every_plan(rig: Rig) -> None:
    fill(rig, 1000)
    assert ask(rig, "/symbol = 'S3'", by="/px DESC", top_n=3).keys == ["00903", "00803", "00703"]
    assert ask(rig, by="/px DESC", top_n=2, skip_n=3).keys == ["00996", "00995"]
    assert ask(rig, by="/symbol, /px DESC", top_n=2).keys == ["00900", "00800"]
    assert ask(rig, "@key < '00005'", by="@key DESC", keys_only=True).keys == [f"{n:05d}" for n in range(4, -1, -1)]
    found = ask(rig, by="/px DESC", top_n=2)
    assert found.footer == (1000, 2, 1000, ""), "with an order all that match are known"


def test_numbers_at_the_end_of_their_range_are_taken(rig: Rig) -> None:
    fill(rig, 10)
    assert ask(rig, skip_n=2**64 - 1).footer[:2] == (10, 0)
    assert ask(rig, by="/px", skip_n=2**64 - 1).footer[:2] == (10, 0)
    assert len(ask(rig, by="/px DESC", skip_n=2, top_n=2**64 - 1).keys) == 8
    assert len(ask(rig, top_n=2**64 - 1, skip_n=1).keys) == 9


def test_a_result_that_cannot_be_sorted_is_refused_and_its_memory_free_again(rig: Rig) -> None:
    put(rig, *[{"id": n, "pad": "x" * 10_000} for n in range(50)])
    memory = SortMemory(bytes_max=200_000)
    found = Scan(rig.store.cuts, query(rig, by="/id"), memory)
    with pytest.raises(StoreError) as caught:
        found.next_batch()
    assert caught.value.reason is Reason.RESULT_TOO_LARGE
    found.close()
    found = Scan(rig.store.cuts, query(rig, by="/id DESC", top_n=5), memory)
    batch = found.next_batch()
    assert batch is not None
    assert len(batch.keys) == 5
    found.close()
    assert SortShare(memory).try_hold(200_000)


@pytest.mark.parametrize("parts", [3, 5, 64])
def test_many_ordered_queries_take_turns_in_little_memory(
    rig: Rig, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: 64 queries of 200,000 records shared 256 MiB, and 63 of them were refused as RESULT_TOO_LARGE, though each
    would have fitted alone. In any order of their turns, all are answered, none waits for ever,
    and together they never hold more than allowed."""
    monkeypatch.setattr(sort_memory, "SMALL_PARTS", parts)
    monkeypatch.setattr(scan, "SCAN_CHUNK_FIRST", 10)
    monkeypatch.setattr(scan, "SCAN_CHUNK", 20)
    put(rig, *[{"id": f"{n:03d}", "px": 200 - n, "pad": "x" * 500} for n in range(200)])
    memory = SortMemory(bytes_max=250_000)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    running: dict[Scan, list[bytes]] = {}
    waited = unsent = answered = 0
    for count in range(60):
        top = dice.choice([0, 0, 0, 10, 150])
        running[Scan(rig.store.cuts, query(rig, by="/px", top_n=top, batch_size=50), memory)] = []
        if count < 40 and dice.random() < 0.7:
            continue  # many at once at first
        for found in dice.sample(list(running), k=len(running)):
            share = found.waits_for
            if share is not None and not share.when_ready(lambda: None):
                waited += 1
                if dice.random() < 0.01:  # its client goes away
                    found.close()
                    del running[found]
                continue
            batch = found.step()
            assert memory.held_bytes <= memory.bytes_max
            if batch is not None:
                running[found] += batch.keys
                continue
            keys, asked = running.pop(found), found.query.top_n or 200
            assert keys == [b"%03d" % n for n in range(199, 199 - asked, -1)]
            assert found.footer().matched == 200
            found.close()
            answered += 1
    rounds = 0
    while running:
        rounds += 1
        assert rounds < 20_000, "they wait for each other"
        for found in dice.sample(list(running), k=len(running)):
            share = found.waits_for
            if share is not None and not share.when_ready(lambda: None):
                waited += 1
                continue
            if found.waits_for is None and running[found] and dice.random() < 0.5:
                unsent += 1  # its client reads slowly
                continue
            batch = found.step()
            assert memory.held_bytes <= memory.bytes_max
            if batch is not None:
                running[found] += batch.keys
                continue
            keys, asked = running.pop(found), found.query.top_n or 200
            assert keys == [b"%03d" % n for n in range(199, 199 - asked, -1)]
            found.close()
            answered += 1
    print(f"{answered} answered, {waited} turns waited, {unsent} slow")
    assert waited
    assert memory.held_bytes == memory.waiting == 0


def test_the_queue_for_memory_is_bounded_and_a_cancelled_sort_leaves_it(rig: Rig) -> None:
    put(rig, *[{"id": n, "pad": "x" * 10_000} for n in range(12)])
    memory = SortMemory(bytes_max=200_000, waiting_max=1)
    first, second, third, fourth = (Scan(rig.store.cuts, query(rig, by="/id"), memory) for _ in range(4))

    def run_until_it_waits_or_is_sorted(found: Scan) -> None:
        while found.waits_for is None and found._sorted is None:
            found.step()

    for found in (first, second, third):
        run_until_it_waits_or_is_sorted(found)
    assert memory.waiting == 2, "one has the turn and waits for room, one is in line"
    with pytest.raises(StoreError) as refused:
        run_until_it_waits_or_is_sorted(fourth)
    assert refused.value.reason is Reason.OVERLOADED
    assert refused.value.retry_after_micros
    fourth.close()
    woken: list[bool] = []
    assert third.waits_for is not None
    assert not third.waits_for.when_ready(lambda: woken.append(True))
    third.close()
    assert memory.waiting == 1
    second.close()
    assert memory.waiting == 0
    first.close()
    assert not woken
    assert memory.held_bytes == 0


def test_memory_is_given_back_while_a_sorted_result_is_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "GIVE_BACK_RECORDS", 10)
    fill(rig, 100)
    memory = SortMemory()
    found = Scan(rig.store.cuts, query(rig, by="/px", batch_size=10), memory)
    held = []
    while found.next_batch() is not None:
        held.append(memory.held_bytes)
    assert held == sorted(held, reverse=True)
    assert held[-1] < held[0] / 5
    found.close()
    assert memory.held_bytes == 0


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "/symbol = 'S3'", "/px >= 30", "/none IS NULL", "@key BEGINS WITH '0'"])
def test_pages_together_are_the_whole(rig: Rig, text: str) -> None:
    fill(rig, 300, symbols=4)
    whole = ask(rig, text).keys
    keys: list[str] = []
    token, pages = "", 0
    while token or not pages:
        page = ask(rig, text, page_size=17, page_token=token)
        keys += page.keys
        token = page.footer.next_page_token
        pages += 1
    assert keys == whole
    assert pages <= len(whole) // 17 + 2


def test_a_token_belongs_to_its_topic_and_filter(rig: Rig) -> None:
    rig.create_topic("others", SETTINGS)
    fill(rig, 20)
    token = ask(rig, "/px>=1", page_size=3).footer.next_page_token
    assert ask(rig, "(/px >= 1)", page_size=3, page_token=token).keys == ["00004", "00005", "00006"], "the same filter"
    for text, topic in (("/px >= 2", "quotes"), ("", "quotes"), ("/px >= 1", "others")):
        error = refused(rig, text, topic=topic, page_size=3, page_token=token)
        assert (error.reason, error.field) == (Reason.PAGE_TOKEN_INVALID, "page_token")
    deep = base64.urlsafe_b64encode(b"[" * 100_000).decode()
    for nonsense in ("x", "bm9uc2Vuc2U=", token[:-4], deep):
        assert refused(rig, "/px >= 1", page_size=3, page_token=nonsense).reason is Reason.PAGE_TOKEN_INVALID


ORDERS = ["/px DESC, /symbol", "/symbol, /none", "/symbol DESC, /px", "@key DESC", "/px, @key DESC", "/none, @version"]


@pytest.mark.parametrize("by", ORDERS)
@pytest.mark.parametrize("batch_size", [3, 1000])
def test_pages_with_an_order_together_are_the_whole(rig: Rig, by: str, batch_size: int) -> None:
    fill(rig, 60, symbols=4)
    put(rig, {"id": "x", "px": True}, {"id": "y", "px": "é"}, {"id": "z", "px": -0.5}, {"id": "zz", "px": 10**25})
    whole = ask(rig, by=by).keys
    keys: list[str] = []
    token = ""
    for _ in range(10):
        page = ask(rig, by=by, page_size=7, page_token=token, batch_size=batch_size, keys_only=True)
        keys += page.keys
        token = page.footer.next_page_token
        assert page.footer.matched == len(whole)
    assert (keys, token) == (whole, "")


def test_a_token_belongs_to_its_order(rig: Rig) -> None:
    fill(rig, 20)
    token = ask(rig, by="/px  DESC", page_size=3).footer.next_page_token
    by_key = ask(rig, page_size=3).footer.next_page_token
    assert ask(rig, by="/px DESC", page_size=3, page_token=token).keys == ["00016", "00015", "00014"]
    for by, given in (("/px", token), ("", token), ("/px DESC", by_key), ("/px DESC, /symbol", token)):
        assert refused(rig, by=by, page_size=3, page_token=given).reason is Reason.PAGE_TOKEN_INVALID


def forged(token: str, sort_keys: object) -> str:
    query, key, _ = json.loads(base64.urlsafe_b64decode(token))
    return base64.urlsafe_b64encode(json.dumps([query, key, sort_keys]).encode()).decode()


MADE_UP: Final[list[object]] = [
    [],
    [["int", "2"]],
    [["int", "2"], ["text", "a"]],
    [["int", "2"], ["float", "nan"]],
    [["int", "3"], ["int", "1"]],
    [["int", "3"], ["key", "YQ=="]],
    [["int", "3"], ["turned", "text", "a"]],
    [["int", "-3"], ["text", "a"]],
    [["text", "3"], ["text", "a"]],
    [["int", "2"], ["turned", "int", "1"]],
    [["int", "2"], ["other", "1"]],
    [["int", "2"], ["int"]],
    [["int", "2"], ["int", 2]],
    [["int", "2"], ["int", "1"], ["int", "2"], ["int", "1"]],
    [["int", "2"], ["float", "0x1p+99999999999"]],
    "text",
    [7, 8],
]
"""Keys of a sort that no token of ours has."""


def test_a_token_that_was_made_up_is_refused(rig: Rig) -> None:
    """It does not break the sort: values of two kinds cannot be compared (query/pages [2])."""
    fill(rig, 20)
    put(rig, {"id": "text", "px": "text"})
    token = ask(rig, by="/px DESC", page_size=3).footer.next_page_token
    assert ask(rig, by="/px DESC", page_size=1, page_token=forged(token, [["int", "2"], ["int", "1"]])).keys == [
        "00000"
    ]
    for sort_keys in MADE_UP:
        error = refused(rig, by="/px DESC", page_size=3, page_token=forged(token, sort_keys))
        assert (error.reason, error.field) == (Reason.PAGE_TOKEN_INVALID, "page_token"), sort_keys


def test_values_too_long_for_a_token_are_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TOKEN_BYTES_MAX", 1000)
    documents: list[dict[str, object]] = [{"id": str(n), "px": "é" * 1000 + str(n)} for n in range(3)]
    put(rig, *documents)
    error = refused(rig, by="/px", page_size=1)
    assert (error.reason, error.field) == (Reason.RESULT_TOO_LARGE, "order_by")
    assert len(ask(rig, by="/px", page_size=3).keys) == 3, "no other page, so no token"


# --- refusals --------------------------------------------------------------------------------------------------------

SELECT = Projection(include=(("a",),))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"projection": SELECT, "keys_only": True}, ["select", "keys_only"]),
        ({"projection": SELECT, "count_only": True}, ["select", "count_only"]),
        ({"keys_only": True, "count_only": True}, ["keys_only", "count_only"]),
        ({"with_plan": True, "count_only": True}, ["with_plan", "count_only"]),
        ({"by": "/a", "count_only": True}, ["order_by", "count_only"]),
        ({"explain": True, "count_only": True}, ["explain", "count_only"]),
        ({"page_size": 5, "top_n": 5}, ["page_size", "top_n"]),
        ({"page_size": 5, "skip_n": 5}, ["page_size", "skip_n"]),
        ({"page_size": 5, "count_only": True}, ["page_size", "count_only"]),
        ({"page_size": 5, "keys": (b"1",)}, ["page_size", "keys"]),
        ({"page_token": "x"}, ["page_size", "page_token"]),
    ],
)
def test_options_that_contradict_each_other_are_both_named(
    rig: Rig, options: dict[str, object], named: Sequence[str]
) -> None:
    error = refused(rig, **options)  # type: ignore[arg-type]  # by name
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, named[0])
    assert all(name in error.message for name in named), error.message


def test_a_select_has_at_most_so_many_paths_and_characters(rig: Rig) -> None:
    """A path of a million steps would take hundreds of bytes a step once it is compiled."""
    topic = rig.topic("quotes")
    largest = [f"/{number:05}{'x' * 59}" for number in range(PATHS_MAX)]
    for paths in (largest, ["/a" * (CHARACTERS_MAX // 2)]):
        assert projection(topic, paths, []) is not None
        assert projection(topic, [], paths) is not None
    for paths in ([*largest, "/y"], ["/a" * (CHARACTERS_MAX // 2) + "b"]):
        for include, exclude in ((paths, []), (list[str](), paths)):
            with pytest.raises(StoreError, match="select: ") as caught:
                projection(topic, include, exclude)
            assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, "select")


def test_options_out_of_their_range_are_refused(rig: Rig) -> None:
    assert refused(rig, batch_size=0).field == "batch_size"
    assert refused(rig, batch_size=10_001).field == "batch_size"
    assert refused(rig, keys=(b"1",) * 10_001).reason is Reason.REQUEST_TOO_LARGE


# --- other message types ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message_type", "payloads", "text"),
    [
        (MessageType.FIX, [b"55=A\x0144=9\x01", b"55=B\x0144=10\x01", b"55=C\x01"], "/44 >= 9.5"),
        (MessageType.NVFIX, [b"sym=A\x01px=9\x01", b"sym=B\x01px=10\x01", b"sym=C\x01"], "/px >= 9.5"),
        (
            MessageType.MSGPACK,
            [b"\x82\xa2px\x09\xa3sym\xa1A", b"\x82\xa2px\x0a\xa3sym\xa1B", b"\x81\xa3sym\xa1C"],
            "/px >= 9.5",
        ),
        (MessageType.BINARY, [b"\xff", b"\xfe", b"\xfd"], "@key = '1'"),
    ],
)
def test_every_message_type_is_asked(rig: Rig, message_type: MessageType, payloads: list[bytes], text: str) -> None:
    rig.create_topic("other", TopicSettings(message_type=message_type))
    rig.run(Publish("other", payloads, [str(number) for number in range(3)]))
    assert ask(rig, text, topic="other").keys == ["1"]
    assert ask(rig, f"NOT ({text}) OR @version > 0", topic="other").keys == ["0", "1", "2"]
