"""Every call of the contract, through both real clients against a real server."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from itertools import count
from typing import Any, Final, assert_type

import grpc
import pytest

from sow.v1 import sow_pb2, sow_pb2_grpc, types_pb2
from sow_client import (
    NEVER,
    Ack,
    Client,
    ConditionFailed,
    Deleted,
    InvalidArgument,
    LifetimeIgnoredWarning,
    Published,
    PublishFailed,
    Refusal,
)
from tests.support.servers.server import ServerProcess, reason_of, until
from tests.support.simulation.clients import CLIENT_KINDS, client_of

pytestmark = pytest.mark.one_client

CONFIG: Final = """
[server]
instance = "nyc-1"
dynamic_topics = true
[sweep]
busy_window = "0s"
[topics.orders]
key = ["/id"]
expiration = "1h"
max_ttl = "1d"
[topics.plain]
[topics.strict]
expiration = "reject"
"""
HOUR: Final = 3_600_000_000
_numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("rpcs"), CONFIG) as made:
        yield made
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture(scope="module", params=CLIENT_KINDS)
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """Each of the two clients."""
    with client_of(request.param, server.client, server.async_client) as made:
        yield made


@pytest.fixture(scope="module")
def one_client(server: ServerProcess) -> Iterator[Client]:
    """One of them, where the server takes long."""
    with server.client() as made:
        yield made


@pytest.fixture
def topic() -> str:
    """A topic of the test's own, which its first publish creates."""
    return f"own-{next(_numbers)}"


def now() -> int:
    return time.time_ns() // 1000


# --- publish ---------------------------------------------------------------------------------------------------------


def test_a_published_record_is_read_as_it_was_written(client: Client) -> None:
    document = b'{ "id":1, "text":"\xc3\xa4\xe2\x82\xac" , "n":1.50}'
    done = client.publish("orders", document)
    assert done.key == "1"
    assert done.expire_time_micros is not None
    assert abs(done.expire_time_micros - now() - HOUR) < 10_000_000
    record = client.get("orders", "1")
    assert record is not None
    assert record.payload == document
    assert (record.topic, record.key, record.version, record.sequence) == ("orders", "1", done.version, done.sequence)
    assert record.expire_time_micros == done.expire_time_micros
    assert record.origin == "nyc-1"
    assert abs(record.publish_time_micros - now()) < 10_000_000

    again = client.publish("orders", document)
    assert again.version > done.version
    assert again.sequence > done.sequence


def test_a_number_that_is_not_finite_is_refused_by_every_way_of_publishing(client: Client) -> None:
    """A delta with inf was acknowledged, and the old price stayed."""
    client.publish("orders", {"id": "n", "price": 1.5})
    document = {"id": "n", "price": float("inf")}
    text = b'{"id":"n","price":NaN}'

    def publisher() -> None:
        with client.publisher("orders") as publisher:
            publisher.publish(document)

    ways: list[Callable[[], object]] = [
        lambda: client.publish("orders", document),
        lambda: client.delta_publish("orders", document),
        lambda: client.publish_many("orders", [document]),
        publisher,
    ]
    for way in ways:
        with pytest.raises(InvalidArgument) as refused:
            way()
        assert (refused.value.reason, refused.value.details["path"]) == ("PAYLOAD_MALFORMED", "/price")

    def columns() -> None:
        with client.publisher("orders") as publisher:
            publisher.publish_columns([text])

    assert reason_of(lambda: client.publish("orders", text)) == "PAYLOAD_MALFORMED"
    assert reason_of(lambda: client.delta_publish("orders", text.decode())) == "PAYLOAD_MALFORMED"
    assert reason_of(columns) == "PAYLOAD_MALFORMED"
    load = client.open_load("orders")
    refusals: list[Refusal] = []
    with client.stage_load(load.id, 0, 0) as stager:
        stager.stage([text])
    refusals += stager.refusals
    client.abort_load(load.id)
    assert [refusal.reason for refusal in refusals] == ["PAYLOAD_MALFORMED"]
    found = client.get("orders", "n")
    assert found is not None
    assert found.data == {"id": "n", "price": 1.5}


def test_a_publish_has_a_bookmark_to_follow_from(client: Client) -> None:
    done = client.publish("orders", {"id": "b1"})
    touched = client.touch("orders", "b1", ttl="1m")
    many = client.publish_many("orders", [{"id": "b2"}, {"id": "b3"}], atomic=True)
    assert_type(many, list[Published])
    acks: list[Ack] = []
    with client.publisher("orders", on_ack=acks.append) as publisher:
        publisher.publish({"id": "b4"})
    client.publish("orders", {"id": "b5"})
    bookmarks = [done.bookmark, touched.bookmark]
    bookmarks += [one.bookmark for one in many]
    bookmarks += [ack.bookmark for ack in acks]

    def following(bookmark: str | None) -> str:
        with client.subscribe("orders", start=bookmark) as changes:
            return next(iter(changes)).key

    assert [following(bookmark) for bookmark in bookmarks] == ["b1", "b2", "b4", "b4", "b5"]


def test_a_duplicate_gets_the_answer_of_its_first_attempt(server: ServerProcess, client: Client) -> None:
    """Also of a stream; the answers of the first try were lost, and its versions were anybody's guess."""
    request = sow_pb2.PublishRequest(
        topic="orders",
        records=[sow_pb2.PublishRecord(payload=b'{"id":"d1"}'), sow_pb2.PublishRecord(payload=b'{"id":"d2"}')],
        publisher=types_pb2.PublisherPosition(publisher_id="again", publisher_epoch=1, first_sequence=1),
        lifetime=types_pb2.Lifetime(ttl_micros=60_000_000),
    )
    first = client._call(client._sow.Publish, request)
    again = client._call(client._sow.Publish, request)
    for before, after in zip(first.results, again.results, strict=True):
        assert after.duplicate
        assert (after.version, after.sequence) == (before.version, before.sequence)
        assert after.expire_time_micros == before.expire_time_micros
    stream = sow_pb2.PublishStreamRequest(
        topic="orders", payload=[record.payload for record in request.records], publisher=request.publisher
    )
    with grpc.insecure_channel(server.address) as channel:
        (answer,) = sow_pb2_grpc.SowServiceStub(channel).PublishStream(iter([stream]))
    assert (answer.duplicates, answer.last_version) == (2, 0)
    assert answer.last_duplicate_version == first.results[1].version
    assert f"{answer.journal_epoch}.{answer.last_duplicate_sequence}" == (
        f"{first.journal_epoch}.{first.results[1].sequence}"
    )


def test_lifetimes_arrive(client: Client, topic: str) -> None:
    def stamp(**lifetime: object) -> int | None:
        return client.publish(topic, {}, key="k", **lifetime).expire_time_micros  # type: ignore[arg-type]  # keywords of several types

    for ttl in ("90s", timedelta(seconds=90), 90, 90.0):
        assert abs((stamp(ttl=ttl) or 0) - now() - 90_000_000) < 10_000_000
    at = now() + 77_000_000
    assert stamp(expire_at=at) == at
    assert stamp(keep_ttl=True) == at
    assert stamp(ttl=NEVER) is None
    assert stamp() is None
    assert stamp(ttl="0s") is not None
    assert client.get(topic, "k") is None
    assert client.publish("orders", {"id": 2}, ttl=NEVER).expire_time_micros is not None, "max_ttl binds never, too"
    with pytest.warns(LifetimeIgnoredWarning):
        assert client.publish("plain", {}, key="1", ttl="1s").ttl_ignored
    assert reason_of(lambda: client.publish("strict", {}, key="1", ttl="1s")) == "LIFETIME_REJECTED"
    assert reason_of(lambda: client.publish(topic, {}, key="k", ttl="100000h")) == "LIFETIME_TOO_LONG"


def test_a_lifetime_without_effect_warns_wherever_it_is_given(client: Client, topic: str) -> None:
    """L3. The warning names the caller's line, of a publisher the line that made it."""

    def warned(call: Callable[[], object]) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert all(one.category is LifetimeIgnoredWarning for one in caught)
        assert len(caught) <= 1
        assert not any("sow_client" in one.filename for one in caught), "a line of the caller"
        return bool(caught)

    def streamed(name: str, count: int, **lifetime: object) -> int:
        with client.publisher(name, batch_records=10) as publisher:
            for number in range(count):
                publisher.publish({}, key=f"{number}", **lifetime)  # type: ignore[arg-type]  # keywords of several types
        return publisher.ttls_ignored

    assert warned(lambda: client.publish("plain", {}, key="1", ttl="1s"))
    assert warned(lambda: client.delta_publish("plain", {}, key="1", expire_at=now()))
    assert warned(lambda: client.publish_many("plain", [{}, {}], keys=["1", "2"], ttl="1s"))
    assert warned(lambda: client.touch("plain", "1", ttl="1s"))
    assert warned(lambda: client.touch("plain", ["1", "2"], ttl="1s"))
    assert warned(lambda: streamed("plain", 25, ttl="1s") == 25 or pytest.fail("each of them is counted"))
    assert not warned(lambda: client.publish("plain", {}, key="1"))
    assert not warned(lambda: client.publish("plain", {}, key="1", ttl=NEVER)), "that is what it gets"
    assert not warned(lambda: streamed("plain", 25, ttl=NEVER) == 0 or pytest.fail("none is ignored"))
    assert not warned(lambda: client.publish(topic, {}, key="1", ttl="1h"))
    assert not warned(lambda: streamed(topic, 25, ttl="1h") == 0 or pytest.fail("none is ignored"))


def test_conditions_are_checked_with_the_write(client: Client, topic: str) -> None:
    client.create_topic(topic, expiration="enabled")
    assert reason_of(lambda: client.publish(topic, {}, key="1", only_if_present=True)) == "CONDITION_FAILED"
    first = client.publish(topic, {"n": 1}, key="1", only_if_absent=True)
    with pytest.raises(ConditionFailed) as refused:
        client.publish(topic, {"n": 2}, key="1", only_if_absent=True)
    assert refused.value.current_version == first.version
    second = client.publish(topic, {"n": 2}, key="1", only_if_version=first.version)
    with pytest.raises(ConditionFailed) as refused:
        client.publish(topic, {"n": 3}, key="1", only_if_version=first.version)
    assert refused.value.current_version == second.version
    client.publish(topic, {"n": 4}, key="1", only_if_present=True, ttl="0s")
    client.publish(topic, {"n": 5}, key="1", only_if_absent=True)  # an expired record counts as absent


def test_many_are_answered_one_by_one(client: Client) -> None:
    results = client.publish_many("orders", [{"id": 10}, {"no": 1}, b"{", {"id": [1]}, {"id": 11}], refusals="return")
    assert_type(results, list[Published | Refusal])
    assert [result.reason if isinstance(result, Refusal) else result.key for result in results] == [
        "10",
        "KEY_FIELD_MISSING",
        "PAYLOAD_MALFORMED",
        "KEY_FIELD_NOT_SCALAR",
        "11",
    ]


def test_an_atomic_request_is_all_or_nothing(client: Client, topic: str) -> None:
    documents = [{"n": n} for n in range(100)]
    keys = list(map(str, range(100)))
    done = client.publish_many(topic, documents, keys=keys, atomic=True)
    sequences = [result.sequence for result in done]
    assert sequences == list(range(sequences[0], sequences[0] + 100)), "one commit, nothing in between"
    results = client.publish_many(topic, [*documents, b"{"], keys=[*keys, "bad"], atomic=True, refusals="return")
    assert [result.reason for result in results if isinstance(result, Refusal)] == [
        *["ATOMIC_ABORTED"] * 100,
        "PAYLOAD_MALFORMED",
    ]
    assert client.count(topic) == 100
    record = client.get(topic, "0")
    assert record is not None
    assert record.sequence == sequences[0]


@pytest.mark.parametrize("durability", ["fsync", "buffered"])
def test_a_stream_applies_thousands_in_order(client: Client, topic: str, durability: str) -> None:
    acknowledged: list[tuple[int, int]] = []
    with client.publisher(
        topic,
        batch_records=500,
        durability=durability,  # type: ignore[arg-type]  # one of its two names
        on_ack=lambda ack: acknowledged.append((ack.last_sequence, ack.last_version)),
    ) as publisher:
        for number in range(8_000):
            publisher.publish({"n": number}, key=str(number % 2_000))
    assert publisher.applied == 8_000
    assert acknowledged == sorted(acknowledged)
    records = list(client.query(topic))
    assert {int(record.key): record.data["n"] for record in records} == {n: 6_000 + n for n in range(2_000)}
    by_sequence = sorted(records, key=lambda record: record.sequence)
    assert [record.data["n"] for record in by_sequence] == list(range(6_000, 8_000))
    assert [record.version for record in by_sequence] == sorted(record.version for record in records)


def test_a_stream_says_which_records_were_refused(client: Client) -> None:
    publisher = client.publisher("orders", batch_records=10)
    for number in range(100):
        publisher.publish({"id": f"s{number}"} if number % 40 else b"{")
    with pytest.raises(PublishFailed) as failed:
        publisher.close()
    assert [refusal.index for refusal in failed.value.refusals] == [0, 40, 80]
    assert publisher.applied == 97


def test_an_own_publisher_id_survives_and_fences(client: Client, topic: str) -> None:
    with client.publisher(topic, publisher_id=topic) as first:
        first.publish({"n": 1}, key="1")
    with client.publisher(topic, publisher_id=topic) as second:
        second.publish({"n": 2}, key="1")
        second.flush()
        request = sow_pb2.PublishRequest(topic=topic, records=[sow_pb2.PublishRecord(key="1", payload=b"{}")])
        request.publisher.publisher_id, request.publisher.publisher_epoch = topic, 1
        request.publisher.first_sequence = 2
        assert reason_of(lambda: client._call(client._sow.Publish, request)) == "PUBLISHER_FENCED"
    position = client._call(client._sow.GetPublisher, sow_pb2.GetPublisherRequest(publisher_id=topic))
    assert (position.publisher_epoch, position.highest_sequence) == (2, 1)
    record = client.get(topic, "1")
    assert record is not None
    assert record.data == {"n": 2}


# --- touch, delete ---------------------------------------------------------------------------------------------------


def test_touch_renews_and_persist_removes_a_lifetime(client: Client, topic: str) -> None:
    before = client.publish(topic, {"n": 1}, key="1", ttl="1h")
    touched = client.touch(topic, "1", ttl="2h")
    assert touched.version > before.version
    assert touched.expire_time_micros is not None
    assert abs(touched.expire_time_micros - now() - 2 * HOUR) < 10_000_000
    record = client.get(topic, "1")
    assert record is not None
    assert record.payload == b'{"n":1}'
    assert client.persist(topic, "1").expire_time_micros is None
    results = client.touch(topic, ["1", "none"], ttl="1h")
    assert [isinstance(result, Refusal) and result.reason for result in results] == [False, "RECORD_NOT_FOUND"]
    assert reason_of(lambda: client.touch(topic, "none", ttl="1h")) == "RECORD_NOT_FOUND"
    assert reason_of(lambda: client.touch(topic, "1", ttl="1h", only_if_version=1)) == "CONDITION_FAILED"
    client.touch(topic, "1", ttl="0s")
    assert client.get(topic, "1") is None


def test_delete_by_keys_by_document_and_dry(client: Client, topic: str) -> None:
    client.publish_many(topic, [{"n": n} for n in range(5)], keys=map(str, range(5)))
    assert client.sow_delete(topic, keys=["0", "1", "none"], dry_run=True) == Deleted(2, 0, 0)
    assert client.count(topic) == 5
    done = client.sow_delete(topic, keys=["0", "1", "none"])
    assert (done.matched, done.deleted) == (2, 2)
    assert done.sequence > 0
    assert client.get(topic, "0") is None
    assert client.sow_delete(topic, keys=["0"]).deleted == 0

    client.publish("orders", {"id": "doc", "n": 1})
    assert client.sow_delete("orders", data={"id": "doc"}, dry_run=True).matched == 1
    assert client.sow_delete("orders", data={"id": "doc", "n": 2}).deleted == 1
    assert client.get("orders", "doc") is None
    assert reason_of(lambda: client.sow_delete(topic, data={"id": 1})) == "KEY_REQUIRED"


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_delete_takes_each_key_once_and_a_bounded_number(client: Client, topic: str, dry_run: bool) -> None:
    """K8; a dry run took any number of keys, and looked them up on the event loop."""
    client.publish_many(topic, [{}, {}], keys=["a", "b"])
    assert client.sow_delete(topic, keys=["b", "a", "b", "none"], dry_run=dry_run).matched == 2
    many = list(map(str, range(10_001)))
    assert reason_of(lambda: client.sow_delete(topic, keys=many, dry_run=dry_run)) == "REQUEST_TOO_LARGE"


def test_a_get_with_large_keys_is_refused_as_too_large(one_client: Client, topic: str) -> None:
    """K8; only the payloads were counted, and the answer was more than gRPC sends."""
    keys = [f"{number:01000d}" for number in range(8_000)]
    payload = b'{"text":"%s"}' % (b"x" * 1_700)
    for start in range(0, len(keys), 1_000):
        part = keys[start : start + 1_000]
        one_client.publish_many(topic, [payload] * len(part), keys=part)
    assert reason_of(lambda: one_client.get_many(topic, keys)) == "REQUEST_TOO_LARGE"


def test_delete_all_tells_how_far_it_is(client: Client, topic: str) -> None:
    """D2. This server never counts as busy, see `busy_window`. `test_delta_delete_restamp.py` has one that does."""
    with client.publisher(topic) as publisher:
        for number in range(5_500):
            publisher.publish(b"{}", key=f"{number:05d}")
    assert client.sow_delete(topic, all=True, dry_run=True).matched == 5_500
    progress: list[int] = []
    done = client.sow_delete(topic, all=True, on_progress=lambda so_far: progress.append(so_far.deleted))
    assert (done.matched, done.deleted) == (5_500, 5_500)
    assert progress == [1000, 2000, 3000, 4000, 5000, 5500, 5500]
    assert client.count(topic) == 0
    assert client.describe_topic(topic).statistics.live_records == 0  # type: ignore[union-attr]  # asked for


# --- read ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(client: Client, topic: str) -> str:
    """A topic of 5,000 records, `00000` to `04999`."""
    with client.publisher(topic, durability="buffered") as publisher:
        for number in range(5_000):
            publisher.publish({"n": number, "deep": {"er": number}}, key=f"{number:05d}")
    return topic


def test_a_query_is_one_instant_with_a_header_and_a_footer(client: Client, filled: str) -> None:
    before = now()
    result = client.query(filled, batch_size=700)
    first = next(result)
    client.publish(filled, {"late": True}, key="03000")
    client.publish(filled, {"late": True}, key="99999")
    client.sow_delete(filled, keys=["04000"])
    records = [first, *result]
    assert [record.key for record in records] == [f"{n:05d}" for n in range(5_000)], "in key order, as of the cut"
    assert [record.data["n"] for record in records] == list(range(5_000))
    assert result.header is not None
    assert before - 1_000_000 < result.header.as_of_micros < now() + 1_000_000
    assert result.footer is not None
    assert (result.footer.matched, result.footer.returned, result.footer.scanned) == (5_000, 5_000, 5_000)
    epoch, _, sequence = result.header.bookmark.partition(".")
    assert epoch == client.status().journal_epoch
    assert int(sequence) == max(record.sequence for record in records)


def test_a_query_can_leave_out_fields_and_payloads(client: Client, filled: str) -> None:
    by_keys = client.query(filled, keys=["00007", "none", "00003"], select=["/deep/er"])
    assert [(record.key, record.data) for record in by_keys] == [
        ("00003", {"deep": {"er": 3}}),
        ("00007", {"deep": {"er": 7}}),
    ]
    assert [record.data for record in client.query(filled, exclude=["/deep"], top_n=2, skip_n=10)] == [
        {"n": 10},
        {"n": 11},
    ]
    assert {record.payload for record in client.query(filled, keys_only=True)} == {b""}
    assert client.count(filled) == 5_000
    assert [record.key for record in client.get_many(filled, ["00002", "x", "00001"])] == ["00002", "00001"]
    assert reason_of(lambda: list(client.query("nowhere"))) == "TOPIC_NOT_FOUND"
    assert reason_of(lambda: list(client.query(filled, select=["no path"]))) == "INVALID_ARGUMENT"


def test_pages_are_stable_under_concurrent_change(client: Client, filled: str) -> None:
    keys: list[str] = []
    token = ""
    while True:
        page = client.page(filled, page_size=300, page_token=token)
        keys += [record.key for record in page.records]
        token = page.next_page_token
        if not token:
            break
        position = int(keys[-1])
        client.sow_delete(filled, keys=[keys[-1], f"{position + 150:05d}"])  # where the page ended, and ahead of it
        client.publish(filled, {}, key=f"{position - 5:05d}a")  # behind it
        client.publish(filled, {}, key=f"{position + 1:05d}b")  # ahead of it
    assert keys == sorted(set(keys)), "in order, nothing twice"
    assert sum(key.endswith("b") for key in keys) > 10, "a record that comes ahead is seen"
    assert not any(key.endswith("a") for key in keys)
    originals = {key for key in keys if not key.endswith("b")}
    missing = {f"{n:05d}" for n in range(5_000)} - originals
    assert 10 < len(missing) < 40, "only records deleted before their page are missing"
    assert reason_of(lambda: client.page("orders", page_size=3, page_token=page_token(client, filled))) == (
        "PAGE_TOKEN_INVALID"
    )
    assert reason_of(lambda: client.page(filled, page_size=3, page_token="nonsense")) == "PAGE_TOKEN_INVALID"


def page_token(client: Client, topic: str) -> str:
    return client.page(topic, page_size=1).next_page_token


def test_a_query_that_is_left_ends_at_the_server(client: Client, topic: str) -> None:
    """Each has 12 MB of records, of which the server keeps 4 MiB that nobody reads: one that is not left would stay."""
    for first in range(0, 6_000, 1_000):
        records = [{"id": number, "pad": "x" * 2_000} for number in range(first, first + 1_000)]
        client.publish_many(topic, records, keys=[str(record["id"]) for record in records], durability="buffered")
    for _ in range(5):
        with client.query(topic, batch_size=100) as result:
            next(result)
    until(lambda: not _queries(client), 10, "the queries to end")


def _queries(client: Client) -> int:
    """The queries under way."""
    return sum(session.calls.get("Query", 0) for session in client.sessions())


# --- topics, the server ----------------------------------------------------------------------------------------------


def test_topics_are_created_altered_described_listed_and_deleted(client: Client, topic: str) -> None:
    created = client.create_topic(topic, key=["/id"], expiration="1h", max_ttl="2h")
    assert created.name == topic
    assert reason_of(lambda: client.create_topic(topic)) == "TOPIC_EXISTS"
    assert reason_of(lambda: client.create_topic("_mine")) == "TOPIC_NAME_INVALID"
    stamp = client.publish(topic, {"id": 1}).expire_time_micros
    altered = client.alter_topic(topic, expiration="10s", max_ttl=None)
    assert altered.settings.max_ttl is None
    record = client.get(topic, "1")
    assert record is not None
    assert record.expire_time_micros == stamp, "stamps never change (rule L12)"
    assert reason_of(lambda: client.alter_topic(topic, key=["/other"])) == "TOPIC_NOT_EMPTY"
    described = client.describe_topic(topic)
    assert described.statistics is not None
    assert described.statistics.live_records == 1
    assert topic in [entry.name for entry in client.topics()]
    assert client.topics() == sorted(client.topics(), key=lambda entry: entry.name)
    assert client.delete_topic(topic) == 1
    assert reason_of(lambda: client.describe_topic(topic)) == "TOPIC_NOT_FOUND"
    # The name is free again, and nothing of the old topic shines through.
    client.create_topic(topic, key=["/id"])
    assert client.count(topic) == 0
    assert client.get(topic, "1") is None


def test_the_history_of_a_key_is_newest_first_in_pages(client: Client, topic: str) -> None:
    """S9."""
    client.publish(topic, {"n": 1}, key="a")
    client.sow_delete(topic, keys=["a"])
    client.publish(topic, {"n": 2}, key="a", ttl="1h")
    client.touch(topic, ["a"], ttl="2h")

    page = client.history(topic, "a", entries_max=3)
    rest = client.history(topic, "a", upto=page.bookmark)

    told = [(one.op, one.reason, one.record.payload) for one in (*page.entries, *rest.entries)]
    first, second = b'{"n":1}', b'{"n":2}'
    assert told == [("put", "touched", second), ("put", None, second), ("delete", None, first), ("put", None, first)]
    assert {one.instance for one in page.entries} == {"nyc-1"}
    assert sorted(page.entries, key=lambda one: one.time, reverse=True) == list(page.entries)
    assert (rest.bookmark, rest.discarded) == ("", False)
    assert client.history(topic, "none").entries == ()
    assert reason_of(lambda: client.history("no-such-topic", "a")) == "TOPIC_NOT_FOUND"
    assert reason_of(lambda: client.history(topic, "")) == "INVALID_ARGUMENT"


def test_the_expiry_horizon_counts_what_falls_due(client: Client, topic: str) -> None:
    """L22."""
    client.publish_many(topic, [{"n": 1}, {"n": 2}], keys=["a", "b"], ttl="30s")
    client.publish(topic, {"n": 3}, key="c", ttl="5m")
    client.publish(topic, {"n": 4}, key="d", ttl=NEVER)
    for exact in (False, True):
        found = client.expiry_horizon(topic, ["1m", "10m"], exact=exact)
        (one,) = found.topics
        assert (one.topic, one.overdue, one.due, one.incomplete) == (topic, 0, (2, 1), False)
        assert found.spans == (timedelta(minutes=1), timedelta(minutes=10))
        assert found.complete
        assert one.next_time is not None
        assert timedelta() < one.next_time - found.as_of <= timedelta(seconds=30)
    assert topic in [one.topic for one in client.expiry_horizon().topics]
    assert reason_of(lambda: client.expiry_horizon("no-such-topic")) == "TOPIC_NOT_FOUND"
    assert reason_of(lambda: client.expiry_horizon(topic, ["1m", "1m"])) == "INVALID_ARGUMENT"


def test_subscriptions_are_listed_and_ended(client: Client, topic: str) -> None:
    client.create_topic(topic, key=["/id"])
    with (
        client.subscribe(topic, "/n > 1", progress="100ms", retry_for=0) as plain,
        client.durable(topic, "billing") as consumer,
    ):
        until(lambda: len(client.subscriptions(topic)) == 2, 30, "both are listed")
        by_durable = {one.durable: one for one in client.subscriptions(topic)}
        found = by_durable[""]
        assert (found.topic, found.filter, found.behind, found.queued_bytes) == (topic, "/n > 1", False, 0)
        assert "Subscribe" in {one.id: one for one in client.sessions()}[found.session].calls
        assert found.id in [one.id for one in client.subscriptions()]
        kept = client.describe_durable(topic, "billing").consumer
        assert kept is not None
        assert kept.subscription == by_durable["billing"].id
        assert kept.position.partition(".")[0] == (plain.bookmark or "").partition(".")[0]
        assert client.durables(topic)[0].consumer is not None

        client.end_subscription(found.id)

        assert reason_of(lambda: next(iter(plain))) == "ACCESS_CHANGED"
        until(lambda: len(client.subscriptions(topic)) == 1, 30, "one is left")
        assert reason_of(lambda: client.end_subscription(found.id)) == "INVALID_ARGUMENT"
        assert consumer.gap is None
    until(lambda: not client.subscriptions(topic), 30, "none is left")
    with client.subscribe(topic, f"/name = '{'x' * 2_000}'"):
        (long,) = client.subscriptions(topic)
        assert (long.filter[:12], len(long.filter), long.filter[-2:]) == ("/name = 'xxx", 1_000, "x…")
    until(lambda: not client.subscriptions(topic), 30, "none is left")
    assert client.describe_durable(topic, "billing").consumer is None


def test_figures_come_again_and_again_with_rates(one_client: Client, topic: str) -> None:
    one_client.create_topic(topic, key=["/id"])
    with closing(one_client.watch_figures("100ms", topics_max=1)) as watching:
        first = next(watching)
        assert (first.elapsed, first.changes_per_second) == (timedelta(), 0)
        assert len(first.topics) == 1
        assert first.topics_total > 1
        one_client.publish_many(topic, [{"id": number} for number in range(10)])
        found = next(one for one in watching if one.topics[0].topic == topic and one.changes_per_second > 0)
        assert found.last_sequence >= first.last_sequence + 10
        assert found.topics[0].records == 10
        assert found.topics[0].changes_per_second == pytest.approx(10 / found.elapsed.total_seconds())
    assert reason_of(lambda: next(one_client.watch_figures("1ms"))) == "INVALID_ARGUMENT"


def test_the_configuration_is_told_with_origins(client: Client) -> None:
    found = {(one.table, one.key): (one.value, one.origin) for one in client.config()}
    assert found["server", "instance"] == ('"nyc-1"', "file")
    assert found["log", "level"][1] == "default"


def test_a_plan_comes_with_the_records_or_alone(client: Client, topic: str) -> None:
    """Q3."""
    client.create_topic(topic, key=["/id"], index=["/px"])
    client.publish_many(topic, [{"id": number, "px": number % 10} for number in range(100)])
    with client.query(topic, "/px = 3", with_plan=True) as result:
        assert len(list(result)) == 10
        assert result.plan is not None
        assert (result.plan.access, result.plan.index_path, result.plan.matched) == ("index", "/px", 10)
    with client.query(topic, "/px = 3") as result:
        list(result)
        assert result.plan is None
    planned = client.explain(topic, "/px = 3", run=False)
    assert (planned.access, planned.index_path, planned.filter) == ("index", "/px", "/px = 3")
    assert (planned.matched, planned.scanned, planned.returned) == (0, 0, 0)
    assert client.explain(topic, run=False).access == "scan"
    assert client.explain(topic, "/px = 3", order_by="/px", run=False).order_by == "/px"


def test_a_snapshot_may_be_bounded(client: Client, topic: str) -> None:
    """S1."""
    client.create_topic(topic, key=["/id"])
    client.publish_many(topic, [{"id": number} for number in range(5)])

    def snapshot(**options: Any) -> tuple[list[str], str | None]:
        with client.sow_and_subscribe(topic, **options) as following:
            keys: list[str] = []
            for change in following:
                if change.op == "snapshot_end":
                    return keys, change.reason
                keys.append(change.key)
        raise AssertionError("it ends")

    assert snapshot(snapshot_max=3) == (["0", "1", "2"], "truncated")
    assert snapshot(snapshot_max=3, batch_size=2) == (["0", "1", "2"], "truncated")
    assert snapshot(snapshot_max=4, filter="/id > 0") == (["1", "2", "3", "4"], None)
    assert snapshot(snapshot_max=5) == (["0", "1", "2", "3", "4"], None)
    assert snapshot() == (["0", "1", "2", "3", "4"], None)
    with client.sow_and_subscribe(topic, snapshot_max=1) as following:
        messages = iter(following)
        assert [next(messages).op, next(messages).op] == ["sow", "snapshot_end"]
        client.publish(topic, {"id": 4, "n": 1})
        assert next(messages).key == "4", "a change of a record that the snapshot had not"
    assert reason_of(lambda: next(iter(client.sow_and_subscribe(topic_pattern=topic, snapshot_max=1)))) == (
        "INVALID_ARGUMENT"
    )


def test_settings_of_the_file_belong_to_the_file(client: Client) -> None:
    assert client.describe_topic("orders").set_in_config
    assert reason_of(lambda: client.alter_topic("orders", expiration="1s")) == "SET_IN_CONFIG"
    assert reason_of(lambda: client.delete_topic("orders")) == "SET_IN_CONFIG"


def test_status_and_compact(server: ServerProcess, client: Client) -> None:
    before = client.status()
    assert (before.instance, before.state, before.failure) == ("nyc-1", "serving", "")
    assert not before.sweep_paused
    assert before.disk_bytes > 0
    done = client.publish("plain", {}, key="status")
    after = client.status()
    assert after.last_sequence >= done.sequence
    compacted = client.compact()
    assert compacted.bytes_after > 0
    accepted = client.accept_clock()
    assert accepted.after >= accepted.before
