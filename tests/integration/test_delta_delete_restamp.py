"""Delta publishes, deletes and restamps by filter against a real server, message by message (rules P2, D1, D2, L13)."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

import grpc
import pytest

from sow.v1 import admin_pb2, admin_pb2_grpc, sow_pb2, sow_pb2_grpc, types_pb2
from sow_client import SowError
from sow_client._statuses import error_of_status
from tests.support.servers.server import ServerProcess

CONFIG: Final = """
[server]
instance = "nyc-1"
[limits]
payload_bytes_max = "1KiB"
[sweep]
busy_window = "1m"
[topics.strict]
key = ["/id"]
expiration = "reject"
[topics.blobs]
message_type = "binary"
"""
SECOND: Final = 1_000_000
HOUR: Final = 3600 * SECOND
TIMEOUT: Final = 60.0
_numbers = count()


class Stubs(NamedTuple):
    sow: sow_pb2_grpc.SowServiceStub
    admin: admin_pb2_grpc.AdminServiceStub


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("deltas"), CONFIG) as made:
        yield made
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture(scope="module")
def stubs(server: ServerProcess) -> Iterator[Stubs]:
    with grpc.insecure_channel(server.address) as channel:
        yield Stubs(sow_pb2_grpc.SowServiceStub(channel), admin_pb2_grpc.AdminServiceStub(channel))


@pytest.fixture
def topic(stubs: Stubs) -> str:
    """A topic of the test's own: key /id, indexed by /i."""
    return make_topic(stubs, key=["/id"], index=["/i"], expiration=admin_pb2.EXPIRATION_ENABLED)


def make_topic(stubs: Stubs, **settings: object) -> str:
    name = f"own-{next(_numbers)}"
    wanted = admin_pb2.TopicSettings(**settings)  # type: ignore[arg-type]  # the tests name fields of settings
    stubs.admin.CreateTopic(admin_pb2.CreateTopicRequest(name=name, settings=wanted), timeout=TIMEOUT)
    return name


def put(
    stubs: Stubs, topic: str, *documents: object, ttl: int | None = None, **more: object
) -> sow_pb2.PublishResponse:
    lifetime = None if ttl is None else types_pb2.Lifetime(ttl_micros=ttl)
    records = [sow_pb2.PublishRecord(payload=json.dumps(document).encode()) for document in documents]
    request = sow_pb2.PublishRequest(topic=topic, records=records, lifetime=lifetime, **more)  # type: ignore[arg-type]  # keywords of several types
    return stubs.sow.Publish(request, timeout=TIMEOUT)


def stored(stubs: Stubs, topic: str) -> dict[str, types_pb2.Record]:
    """The live records of a topic."""
    found: dict[str, types_pb2.Record] = {}
    for response in stubs.sow.Query(sow_pb2.QueryRequest(topic=topic), timeout=TIMEOUT):
        columns = response.batch
        for index, key in enumerate(columns.key):
            found[key] = types_pb2.Record(
                payload=columns.payload[index],
                version=columns.version[index],
                publish_time_micros=columns.publish_time_micros[index],
                expire_time_micros=columns.expire_time_micros[index],
            )
    return found


def documents(stubs: Stubs, topic: str) -> dict[str, object]:
    return {key: json.loads(record.payload) for key, record in stored(stubs, topic).items()}


def delete(stubs: Stubs, topic: str, text: str, *, dry_run: bool = False) -> list[sow_pb2.SowDeleteResponse]:
    request = sow_pb2.SowDeleteRequest(topic=topic, by_filter=text, dry_run=dry_run)
    return list(stubs.sow.SowDelete(request, timeout=TIMEOUT))


def restamp(
    stubs: Stubs,
    topic: str,
    mode: admin_pb2.RestampMode.ValueType,
    lifetime: types_pb2.Lifetime | None = None,
    *,
    text: str = "",
    dry_run: bool = False,
) -> list[admin_pb2.RestampResponse]:
    request = admin_pb2.RestampRequest(topic=topic, filter=text, mode=mode, lifetime=lifetime, dry_run=dry_run)
    return list(stubs.admin.Restamp(request, timeout=TIMEOUT))


def refused(call: Callable[[], object]) -> SowError:
    """The error with which a call is refused."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return error_of_status(caught.value)


def now() -> int:
    return time.time_ns() // 1000


# --- delta publish ---------------------------------------------------------------------------------------------------


def test_a_delta_merges_and_answers_like_a_publish(stubs: Stubs, topic: str) -> None:
    put(stubs, topic, {"id": 1, "bid": 9.5, "venue": {"name": "X", "lot": 10}, "note": "n"}, ttl=HOUR)
    before = stored(stubs, topic)["1"]
    answer = put(
        stubs,
        topic,
        {"id": 1, "bid": None, "venue": {"lot": 20}},
        {"id": 2, "bid": 1},
        delta=True,
        unset_paths=["/note", "/nowhere"],
        ttl_mode=types_pb2.TTL_MODE_KEEP,
    )
    found = stored(stubs, topic)
    assert found["1"].payload == b'{"id":1,"bid":9.5,"venue":{"name":"X","lot":20}}'
    assert found["1"].expire_time_micros == before.expire_time_micros
    assert json.loads(found["2"].payload) == {"id": 2, "bid": 1}
    assert [result.version for result in answer.results] == [found["1"].version, found["2"].version]


def test_a_stream_of_deltas_is_merged_in_order(stubs: Stubs, topic: str) -> None:
    put(stubs, topic, {"id": 0, "base": True})

    def requests() -> Iterator[sow_pb2.PublishStreamRequest]:
        for number in range(50):
            payloads = [b'{"id":%d,"f%d":%d}' % (index, number % 5, number) for index in range(40)]
            yield sow_pb2.PublishStreamRequest(
                topic=topic if number == 0 else "",
                payload=payloads,
                delta=True,
                unset_paths=["/gone"] if number % 2 else ["/f0"],
            )
        yield sow_pb2.PublishStreamRequest(payload=[b'{"id":1}', b'{"id":1,"big":"%s"}' % (b"x" * 990)], delta=True)

    answers = list(stubs.sow.PublishStream(requests(), timeout=TIMEOUT))
    assert [answer.applied for answer in answers] == [40] * 50 + [1]
    (refusal,) = answers[-1].refusals
    assert (refusal.index, types_pb2.ErrorReason.Name(refusal.reason)) == (1, "ERROR_REASON_PAYLOAD_TOO_LARGE")
    last = {"f1": 46, "f2": 47, "f3": 48, "f4": 49}  # f0 was unset by the last even request, which gave none
    found = documents(stubs, topic)
    assert len(found) == 40
    assert found["0"] == {"id": 0, "base": True, **last}
    assert found["39"] == {"id": 39, **last}


def test_merged_records_survive_a_crash(stubs: Stubs, server: ServerProcess, topic: str) -> None:
    put(stubs, topic, {"id": 1, "a": 1, "b": {"x": 1}})
    put(stubs, topic, {"id": 1, "b": {"y": 2}}, delta=True, unset_paths=["/a"])
    server.kill9()
    server.start()
    stubs.sow.Get(sow_pb2.GetRequest(topic=topic, keys=["1"]), wait_for_ready=True, timeout=TIMEOUT)
    assert documents(stubs, topic) == {"1": {"id": 1, "b": {"x": 1, "y": 2}}}


@pytest.mark.parametrize(
    ("more", "reason", "field"),
    [
        ({"unset_paths": ["/a"]}, "INVALID_ARGUMENT", "unset_paths"),
        ({"delta": True, "unset_paths": ["a"]}, "INVALID_ARGUMENT", "unset_paths"),
        ({"delta": True, "unset_paths": ["/id"]}, "UNSET_KEY_FIELD", "unset_paths"),
    ],
)
def test_deltas_that_cannot_be_are_refused_whole(
    stubs: Stubs, topic: str, more: dict[str, object], reason: str, field: str
) -> None:
    error = refused(lambda: put(stubs, topic, {"id": 1}, **more))  # type: ignore[arg-type]  # fields of the request
    assert (error.reason, error.details["field"]) == (reason, field)
    assert documents(stubs, topic) == {}


def test_a_binary_topic_takes_no_delta(stubs: Stubs) -> None:
    record = sow_pb2.PublishRecord(key="k", payload=b"x")
    request = sow_pb2.PublishRequest(topic="blobs", records=[record], delta=True)
    error = refused(lambda: stubs.sow.Publish(request, timeout=TIMEOUT))
    assert (error.reason, error.details["field"]) == ("UNSUPPORTED_FOR_MESSAGE_TYPE", "delta")


def test_fix_is_merged_by_tag(stubs: Stubs) -> None:
    topic = make_topic(stubs, key=["/55"], message_type=admin_pb2.MESSAGE_TYPE_FIX, fix_separator="|")
    for payload, more in ((b"8=x|55=IBM|44=9.5|54=1|", {}), (b"55=IBM|44=9.6|38=7", {"unset_paths": ["/54"]})):
        request = sow_pb2.PublishRequest(topic=topic, records=[sow_pb2.PublishRecord(payload=payload)], delta=True)
        request.unset_paths.extend(more.get("unset_paths", []))
        stubs.sow.Publish(request, timeout=TIMEOUT)
    assert stored(stubs, topic)["IBM"].payload == b"8=x|55=IBM|44=9.6|38=7|"


# --- delete by filter ------------------------------------------------------------------------------------------------


def fill(stubs: Stubs, topic: str, records: int) -> None:
    numbers = range(records)
    for first in numbers[::5000]:
        some = numbers[first : first + 5000]
        put(stubs, topic, *[{"id": f"{number:06}", "n": number, "i": number % 100} for number in some])


def test_matching_records_are_deleted_and_the_rest_stays(stubs: Stubs, topic: str) -> None:
    fill(stubs, topic, 200)
    progress, done = delete(stubs, topic, "/n >= 50 AND /n < 150")
    assert (progress.matched, progress.deleted, progress.done) == (100, 100, False)
    assert (done.matched, done.deleted, done.done, done.last_sequence) == (100, 100, True, progress.last_sequence)
    assert sorted(json.loads(record.payload)["n"] for record in stored(stubs, topic).values()) == [
        *range(50),
        *range(150, 200),
    ]
    (nothing,) = delete(stubs, topic, "/n >= 50 AND /n < 150")
    assert (nothing.matched, nothing.deleted, nothing.done, nothing.last_sequence) == (0, 0, True, 0)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("true", 0),
        ("1 = 2", 20),
        ("@key IN ('000003', '000004')", 18),
        ("/id = '000003'", 19),
        ("/i BETWEEN 5 AND 9", 15),
        ("@publish_time <= NOW_MICROS()", 0),
        ("@expire_time IS NOT NULL", 20),
    ],
)
def test_a_delete_takes_every_filter(stubs: Stubs, topic: str, text: str, left: int) -> None:
    """Also those that an index or the keys answer."""
    fill(stubs, topic, 20)
    (counted,) = delete(stubs, topic, text, dry_run=True)
    assert (counted.matched, counted.deleted, counted.done) == (20 - left, 0, True)
    assert len(stored(stubs, topic)) == 20
    assert delete(stubs, topic, text)[-1].deleted == 20 - left
    assert len(stored(stubs, topic)) == left


def test_a_thousand_scattered_records_go_in_one_commit_and_more_in_batches(stubs: Stubs, topic: str) -> None:
    """D2. One commit has consecutive sequences, and nothing else happens on this server. Somebody has published within
    `busy_window`, so the batches behind the first are small."""
    fill(stubs, topic, 20_000)
    before = stubs.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT).last_sequence
    progress, done = delete(stubs, topic, "/n % 20 = 7")
    assert (progress.deleted, done.deleted, done.last_sequence) == (1000, 1000, before + 1000)
    responses = delete(stubs, topic, "/n < 3000")
    assert [response.deleted for response in responses] == [*range(1000, 2751, 250), 2850, 2850]
    assert [response.done for response in responses] == [False] * 9 + [True]
    assert len(stored(stubs, topic)) == 16_150
    request = sow_pb2.SowDeleteRequest(topic=topic, all=True)
    deleted = [response.deleted for response in stubs.sow.SowDelete(request, timeout=TIMEOUT)]
    assert deleted == [*range(1000, 16_001, 250), 16_150, 16_150]


def test_records_that_change_while_a_delete_runs_are_kept(stubs: Stubs, topic: str, seed: int) -> None:
    """D2: a record goes only if it still matches when it is its turn. Every update that was acknowledged must stand."""
    draw = random.Random(seed)
    keys = list(range(8000))
    put(stubs, topic, *[{"id": key, "s": "old"} for key in keys])
    updated = draw.sample(keys, 4000)

    def update() -> None:
        for first in range(0, len(updated), 50):
            put(stubs, topic, *[{"id": key, "s": "new"} for key in updated[first : first + 50]])

    updater = threading.Thread(target=update)
    updater.start()
    responses = delete(stubs, topic, "/s = 'old'")
    updater.join(TIMEOUT)
    found = documents(stubs, topic)
    assert found == {str(key): {"id": key, "s": "new"} for key in updated}
    assert responses[-1].matched >= responses[-1].deleted >= len(keys) - len(updated)


def test_a_cancelled_delete_keeps_the_records_that_it_had_not_reached(
    stubs: Stubs, server: ServerProcess, topic: str
) -> None:
    """Q5: cancelling a call ends its work."""
    fill(stubs, topic, 20_000)
    request = sow_pb2.SowDeleteRequest(topic=topic, by_filter="/n >= 0")
    call = stubs.sow.SowDelete(request, timeout=TIMEOUT)
    assert next(call).deleted == 1000
    call.cancel()
    assert 0 < len(stored(stubs, topic)) <= 19_000
    assert delete(stubs, topic, "true")[-1].done
    assert server.alive


@pytest.mark.parametrize(
    ("text", "said", "position"),
    [
        ("/price > AND /id = 1", "expected a value at 9\n  /price > AND /id = 1\n           ^", "9"),
        ("", "expected", "0"),
        ("/a = 1 +", "expected", "8"),
    ],
)
def test_a_filter_that_does_not_parse_is_shown_with_a_caret(
    stubs: Stubs, topic: str, text: str, said: str, position: str
) -> None:
    fill(stubs, topic, 1)
    for dry_run in (False, True):
        error = refused(lambda dry=dry_run: delete(stubs, topic, text, dry_run=dry))  # type: ignore[misc]  # bound now
        assert (error.reason, error.details) == ("FILTER_INVALID", {"field": "filter", "position": position})
        assert said in error.message
    assert len(stored(stubs, topic)) == 1


def test_a_binary_topic_is_deleted_from_by_metadata_alone(stubs: Stubs) -> None:
    for key in ("a", "b"):
        record = sow_pb2.PublishRecord(key=key, payload=b"{}")
        stubs.sow.Publish(sow_pb2.PublishRequest(topic="blobs", records=[record]), timeout=TIMEOUT)
    assert refused(lambda: delete(stubs, "blobs", "/a = 1")).reason == "UNSUPPORTED_FOR_MESSAGE_TYPE"
    assert delete(stubs, "blobs", "@key = 'a'")[-1].deleted == 1
    assert list(stored(stubs, "blobs")) == ["b"]


def test_a_delete_needs_a_selection(stubs: Stubs, topic: str) -> None:
    """D1."""
    error = refused(lambda: list(stubs.sow.SowDelete(sow_pb2.SowDeleteRequest(topic=topic), timeout=TIMEOUT)))
    assert (error.reason, error.details["field"]) == ("INVALID_ARGUMENT", "selection")
    assert "by_filter" in error.message
    assert refused(lambda: delete(stubs, "nowhere", "true")).reason == "TOPIC_NOT_FOUND"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"all": True, "parameters": {"x": types_pb2.Parameter()}}, "parameters"),
        ({"all": False}, "all"),
        ({"all": True, "publisher": types_pb2.PublisherPosition(publisher_id="p")}, "publisher"),
        ({"by_filter": "true", "publisher": types_pb2.PublisherPosition(publisher_id="p")}, "publisher"),
        ({"by_keys": sow_pb2.KeyList(), "dry_run": True}, "by_keys.keys"),
        ({"by_keys": sow_pb2.KeyList(keys=["1"], versions=[1]), "dry_run": True}, "by_keys.versions"),
        ({"by_keys": sow_pb2.KeyList(keys=["1"], versions=[1, 2])}, "by_keys.versions"),
        ({"by_keys": sow_pb2.KeyList(keys=["1"]), "durability": 99}, "durability"),
    ],
)
def test_a_delete_whose_fields_contradict_each_other_deletes_nothing(
    stubs: Stubs, topic: str, fields: dict[str, Any], field: str
) -> None:
    put(stubs, topic, {"id": 1})
    request = sow_pb2.SowDeleteRequest(topic=topic, **fields)
    error = refused(lambda: list(stubs.sow.SowDelete(request, timeout=TIMEOUT)))
    assert (error.reason, error.details["field"]) == ("INVALID_ARGUMENT", field)
    assert list(stored(stubs, topic)) == ["1"]


# --- restamp ---------------------------------------------------------------------------------------------------------

SET, CAP, CLEAR = admin_pb2.RESTAMP_MODE_SET, admin_pb2.RESTAMP_MODE_CAP, admin_pb2.RESTAMP_MODE_CLEAR
NEVER: Final = 2**63 - 1


def ttl(micros: int) -> types_pb2.Lifetime:
    return types_pb2.Lifetime(ttl_micros=micros)


def test_a_restamp_changes_the_lifetimes_of_matching_records(stubs: Stubs, topic: str) -> None:
    put(stubs, topic, {"id": 1, "g": "a"}, {"id": 2, "g": "b"})
    put(stubs, topic, {"id": 3, "g": "a"}, ttl=HOUR)
    before = stored(stubs, topic)
    (counted,) = restamp(stubs, topic, SET, ttl(2 * HOUR), text="/g = 'a'", dry_run=True)
    assert (counted.matched, counted.restamped, counted.done) == (2, 0, True)
    assert stored(stubs, topic) == before
    progress, done = restamp(stubs, topic, SET, ttl(2 * HOUR), text="/g = 'a'")
    assert (progress.matched, progress.restamped, progress.done) == (2, 2, False)
    assert (done.matched, done.restamped, done.done, done.last_sequence) == (2, 2, True, progress.last_sequence)
    after = stored(stubs, topic)
    assert after["2"] == before["2"]
    for key in ("1", "3"):
        assert abs(after[key].expire_time_micros - now() - 2 * HOUR) < 10 * SECOND
        assert after[key].version > before[key].version
        assert (after[key].payload, after[key].publish_time_micros) == (
            before[key].payload,
            before[key].publish_time_micros,
        )


def test_a_cap_lowers_and_a_clear_removes(stubs: Stubs, topic: str) -> None:
    put(stubs, topic, {"id": 1})
    put(stubs, topic, {"id": 2}, ttl=HOUR)
    put(stubs, topic, {"id": 3}, ttl=3 * HOUR)
    at = now() + 2 * HOUR
    assert restamp(stubs, topic, CAP, types_pb2.Lifetime(expire_time_micros=at))[-1].restamped == 2
    stamps = {key: record.expire_time_micros for key, record in stored(stubs, topic).items()}
    assert (stamps["1"], stamps["3"]) == (at, at)
    assert stamps["2"] < at
    assert restamp(stubs, topic, CAP, types_pb2.Lifetime(expire_time_micros=at))[-1].restamped == 0
    cleared = restamp(stubs, topic, CLEAR, text="@expire_time IS NOT NULL")[-1]
    assert (cleared.matched, cleared.restamped) == (3, 3)
    assert {record.expire_time_micros for record in stored(stubs, topic).values()} == {NEVER}


def test_a_cap_of_zero_expires_matching_records_now(stubs: Stubs, topic: str) -> None:
    """L7."""
    put(stubs, topic, {"id": 1, "g": "a"}, {"id": 2, "g": "b"})
    assert restamp(stubs, topic, CAP, ttl(0), text="/g = 'a'")[-1].restamped == 1
    assert list(stored(stubs, topic)) == ["2"]


def test_many_records_are_restamped_in_batches(stubs: Stubs, topic: str) -> None:
    fill(stubs, topic, 2500)
    responses = restamp(stubs, topic, SET, ttl(HOUR))
    assert [response.restamped for response in responses] == [1000, 2000, 2500, 2500]
    assert [response.done for response in responses] == [False, False, False, True]
    assert NEVER not in {record.expire_time_micros for record in stored(stubs, topic).values()}


@pytest.mark.parametrize(
    ("mode", "lifetime", "field"),
    [
        (admin_pb2.RESTAMP_MODE_UNSPECIFIED, ttl(1), "mode"),
        (9, ttl(1), "mode"),
        (SET, None, "lifetime"),
        (CAP, None, "lifetime"),
        (CAP, types_pb2.Lifetime(never=True), "lifetime.never"),
        (SET, types_pb2.Lifetime(never=False), "lifetime.never"),
        (CLEAR, ttl(1), "lifetime"),
        (CLEAR, types_pb2.Lifetime(never=True), "lifetime"),
    ],
)
def test_modes_and_lifetimes_that_contradict_each_other_are_named(
    stubs: Stubs, topic: str, mode: admin_pb2.RestampMode.ValueType, lifetime: types_pb2.Lifetime | None, field: str
) -> None:
    error = refused(lambda: restamp(stubs, topic, mode, lifetime))
    assert (error.reason, error.details["field"]) == ("INVALID_ARGUMENT", field)


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_invalid_restamp_is_refused_even_if_no_record_matches(stubs: Stubs, dry_run: bool) -> None:
    def reason(mode: admin_pb2.RestampMode.ValueType, lifetime: types_pb2.Lifetime | None, text: str = "") -> str:
        return refused(lambda: restamp(stubs, "strict", mode, lifetime, text=text, dry_run=dry_run)).reason

    assert reason(SET, ttl(1)) == "LIFETIME_REJECTED"
    assert reason(CAP, ttl(1)) == "LIFETIME_REJECTED"
    assert reason(CLEAR, None, "/a >") == "FILTER_INVALID"
    assert refused(lambda: restamp(stubs, "nowhere", CLEAR)).reason == "TOPIC_NOT_FOUND"
    assert restamp(stubs, "strict", CLEAR, dry_run=dry_run)[-1].done
    topic = make_topic(stubs)
    for lifetime, wanted in ((ttl(-1), "LIFETIME_NEGATIVE"), (ttl(11 * 366 * 24 * HOUR), "LIFETIME_TOO_LONG")):
        error = refused(lambda given=lifetime: restamp(stubs, topic, CAP, given, dry_run=dry_run))  # type: ignore[misc]  # a lambda's default argument
        assert (error.reason, error.details["field"]) == (wanted, "lifetime")


def test_a_restamp_skips_records_that_have_ceased_to_match(stubs: Stubs, topic: str, seed: int) -> None:
    """L13: while it runs, records go out of the filter; their stamps are those of their last publish."""
    draw = random.Random(seed)
    keys = list(range(6000))
    put(stubs, topic, *[{"id": key, "s": "old"} for key in keys])
    updated = draw.sample(keys, 3000)

    def update(batches: Sequence[Sequence[int]]) -> None:
        for batch in batches:
            put(stubs, topic, *[{"id": key, "s": "new"} for key in batch])

    updater = threading.Thread(target=update, args=([updated[at : at + 50] for at in range(0, len(updated), 50)],))
    updater.start()
    restamp(stubs, topic, SET, ttl(HOUR), text="/s = 'old'")
    updater.join(TIMEOUT)
    for key, record in stored(stubs, topic).items():
        # An update after the restamp stamps anew (L6), so none of these has a stamp either.
        assert (record.expire_time_micros == NEVER) == (int(key) in set(updated)), key
