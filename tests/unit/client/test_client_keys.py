"""Keys as programs give them: numbers, bools and tuples, in every call that takes a key (rules K3, K4)."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy
import pytest

from sow.v1 import sow_pb2
from sow_client import InvalidArgument
from sow_client._keys import key_text, key_texts, share_of
from sow_client._reads import RECORDS_PER_REQUEST_MAX, texts
from sow_client._writes import publish_batches
from tests.support.fakes.called_server import Server, footer, header, loop, script, server
from tests.support.fakes.scripted import SECONDS_MAX

__all__ = ["loop", "script", "server"]  # fixtures


class Side(enum.StrEnum):
    BUY = "buy"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("a|b", "a|b"),
        (("a|b",), "a\\|b"),
        (("a\\", "b"), "a\\\\|b"),
        (("", ""), "|"),
        (1, "1"),
        (-(10**30), "-1000000000000000000000000000000"),
        (True, "true"),
        (1.0, "1"),
        (-0.0, "0"),
        (0.1, "0.1"),
        (1e22, "10000000000000000000000"),
        (1e-07, "1e-07"),
        (("LH", 400, False), "LH|400|false"),
        (Side.BUY, "buy"),
        ((Side.BUY, Level.HIGH), "buy|3"),
        (numpy.int64(7), "7"),
        (numpy.float64(0.5), "0.5"),
        (numpy.bool_(True), "true"),
        (numpy.str_("x"), "x"),
    ],
)
def test_a_key_has_the_text_that_the_server_makes_of_its_fields(key: Any, text: str) -> None:
    assert key_text(key) == text
    assert type(key_text(key)) is str


@pytest.mark.parametrize("key", [None, b"1", 1j, ["a"], {"id": 1}, ("a", None), (("a",),), numpy.array([1])])
def test_another_type_is_refused_with_what_a_key_is(key: Any) -> None:
    """Story: gRPC said "bad argument type for built-in operation"."""
    with pytest.raises(InvalidArgument, match=r"key: .* is (of type \w+; a key is a text|a list; the key of several)"):
        key_text(key)


@pytest.mark.parametrize("key", [float("nan"), float("inf"), ("a", float("-inf")), ()])
def test_a_value_that_no_key_has_is_refused_by_name(key: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        key_text(key)
    assert caught.value.details["field"] == "key"


@pytest.mark.parametrize("keys", ["abc", 7, b"12", bytearray(b"12"), memoryview(b"12"), {"a": 1}])
def test_one_key_is_not_a_list_of_keys(keys: Any) -> None:
    with pytest.raises(InvalidArgument, match="keys: must be a list of keys; write") as caught:
        key_texts(keys)
    assert caught.value.details["field"] == "keys"


@pytest.mark.parametrize("keys", ["ab", 7, b"ab", bytearray(b"ab"), memoryview(b"ab"), {"a": 1, "b": 2}])
def test_one_key_is_not_the_keys_of_many_documents(server: Server, keys: Any) -> None:
    """Story: `publish_many` published b"ab" under the keys 97 and 98, "ab" under a and b, a mapping under its names."""
    with pytest.raises(InvalidArgument, match="keys: must be a list of keys; write") as caught:
        server.client.publish_many("orders", [b"x", b"y"], keys=keys)
    assert caught.value.details["field"] == "keys"


@pytest.mark.parametrize("fields", ["/id", 7, b"/id", {"/id": 1}])
def test_one_field_is_not_a_list_of_fields(fields: Any) -> None:
    with pytest.raises(InvalidArgument, match="select: must be a list of texts; write") as caught:
        texts(fields, "select")
    assert caught.value.details["field"] == "select"


def test_keys_of_many_documents_are_taken_one_by_one() -> None:
    """A stream of keys may have no end that is known before that of the documents."""
    taken: list[int] = []

    def keys() -> Iterator[int]:
        for key in range(RECORDS_PER_REQUEST_MAX * 2):
            taken.append(key)
            yield key

    first = next(publish_batches((b"{}" for _ in range(RECORDS_PER_REQUEST_MAX * 2)), keys(), atomic=False))
    assert len(first.records) == RECORDS_PER_REQUEST_MAX
    assert len(taken) == RECORDS_PER_REQUEST_MAX + 1


def test_a_time_of_numpy_is_no_number() -> None:
    """Story: `item` makes a number of nanoseconds, so a time was a key."""
    with pytest.raises(InvalidArgument):
        key_text(numpy.datetime64(1, "ns"))  # type: ignore[arg-type]  # wrong on purpose


RESULT = sow_pb2.PublishResult(key="1", version=5, sequence=9)


def test_every_call_takes_such_keys(server: Server) -> None:
    client = server.client
    composite = ("LH", 400)
    call = server.begin(lambda: client.get("orders", 1))
    assert server.answer("Get", sow_pb2.GetResponse()).keys == ["1"]
    assert call.result(SECONDS_MAX) is None
    many = server.begin(lambda: client.get_many("orders", [composite, True, "x"]))
    assert server.answer("Get", sow_pb2.GetResponse()).keys == ["LH|400", "true", "x"]
    many.result(SECONDS_MAX)
    asked = client.query("orders", keys=[composite, 2])
    query = server.begin(lambda: list(asked))
    assert server.stream("Query", header(), footer(0)).keys == ["LH|400", "2"]
    query.result(SECONDS_MAX)
    one = server.begin(lambda: client.publish("orders", {}, key=1.5))
    assert server.answer("Publish", sow_pb2.PublishResponse(results=[RESULT])).records[0].key == "1.5"
    one.result(SECONDS_MAX)
    delta = server.begin(lambda: client.delta_publish("orders", {}, key=composite))
    assert server.answer("Publish", sow_pb2.PublishResponse(results=[RESULT])).records[0].key == "LH|400"
    delta.result(SECONDS_MAX)
    several = server.begin(lambda: client.publish_many("orders", [{}, {}], keys=range(2)))
    request = server.answer("Publish", sow_pb2.PublishResponse(results=[RESULT, RESULT]))
    assert [record.key for record in request.records] == ["0", "1"]
    several.result(SECONDS_MAX)
    touched = server.begin(lambda: client.touch("orders", composite, ttl="1m"))
    assert server.answer("Touch", sow_pb2.TouchResponse(results=[RESULT])).keys == ["LH|400"]
    touched.result(SECONDS_MAX)
    touched_all = server.begin(lambda: client.touch("orders", [1, 2], ttl="1m"))
    assert server.answer("Touch", sow_pb2.TouchResponse(results=[RESULT, RESULT])).keys == ["1", "2"]
    assert len(touched_all.result(SECONDS_MAX)) == 2
    kept = server.begin(lambda: client.persist("orders", 1))
    assert server.answer("Touch", sow_pb2.TouchResponse(results=[RESULT])).keys == ["1"]
    kept.result(SECONDS_MAX)
    gone = server.begin(lambda: client.sow_delete("orders", keys=[1, composite]))
    request = server.stream("SowDelete", sow_pb2.SowDeleteResponse(done=True))
    assert request.by_keys.keys == ["1", "LH|400"]
    gone.result(SECONDS_MAX)


def test_a_key_that_cannot_be_touched_is_refused_by_the_name_of_the_argument(server: Server) -> None:
    for key in (float("nan"), [1, float("nan")]):
        with pytest.raises(InvalidArgument) as caught:
            server.client.touch("orders", key)
        assert caught.value.details["field"] == "key"


def test_a_publisher_takes_such_keys(server: Server) -> None:
    publisher = server.client.publisher("orders", linger=0.0)
    server.begin(lambda: publisher.publish(b"{}", key=("LH", 400)))
    rpc = server.publish_stream()
    request = rpc.take_request()
    assert list(request.key) == ["LH|400"]
    rpc.terminate((), grpc.StatusCode.OK, "")
    publisher.abort()


def test_the_share_of_a_key_is_its_crc_32() -> None:
    """Other languages find a key by the same sum, so it is for ever."""
    assert share_of("123456789", 1 << 32) == 0xCBF43926, "as the sum is defined"
    assert share_of("ü|1", 64) == zlib.crc32("ü|1".encode()) % 64 == share_of(("ü", 1), 64)
    assert share_of(7, 64) == share_of(7.0, 64) == share_of("7", 64)
    with pytest.raises(InvalidArgument, match="shares: 0 is not at least 1"):
        share_of("7", 0)
