"""Invalid and hostile requests: only named errors come back, and the server lives on, without a fault in its log."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from sow.v1 import admin_pb2, replication_pb2, sow_pb2, types_pb2
from sow_client import Client, SowError
from sow_replication.wire import sealed
from tests.support.oracles import methods
from tests.support.servers.server import ServerProcess, reason_of
from tests.support.stores.bad_rows import Bad, packed

CONFIG: Final = """
[server]
instance = "sow"
dynamic_topics = true
[topics.keyed]
key = ["/id", "/a/b"]
expiration = "30s"
[topics.given]
expiration = "enabled"
[topics.opaque]
message_type = "binary"
expiration = "reject"
[topics.fix]
message_type = "fix"
key = ["/55"]
[topics.packed]
message_type = "msgpack"
key = ["/id"]
[replication]
accept = ["peer"]
"""
OURS: Final = "sow.v1."
METHODS: Final[tuple[MethodDescriptor, ...]] = tuple(methods.METHODS.values())
"""All methods of all services: one that is added is fuzzed from then on."""
ENDLESS: Final = {"Subscribe", "Watch", "DescribeInstance", "WatchFigures", "WatchLog"}
"""Streams that go on once they stand."""
QUIET_SECONDS: Final = 0.3
OPTIONS: Final = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
KNOWN: Final = {name.removeprefix("ERROR_REASON_") for name in types_pb2.ErrorReason.keys()} - {"INTERNAL"}  # noqa: SIM118  # no dict


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("fuzz"), CONFIG) as made:
        with made.client() as client:
            client.publish("keyed", {"id": 1, "a": {"b": 2}})
            client.publish("given", {"n": 1}, key="1")
            for name in ("loose-1", "loose-2"):  # whose settings may change
                client.create_topic(name, expiration="1h")
                client.publish(name, {"id": 1}, key="1")
        yield made
        if probes:
            probes.pop().close()
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address, options=OPTIONS) as made:
        yield made


def call(channel: grpc.Channel, method: MethodDescriptor, requests: list[bytes]) -> str | None:
    """Sends raw requests; returns the reason for which they are refused, None when they are not.

    Every answer is a message of the contract or an error with a reason of the contract.
    """
    path = f"/{method.containing_service.full_name}/{method.name}"
    read: Callable[[bytes], Message] = GetMessageClass(method.output_type).FromString
    write: Callable[[bytes], bytes] = bytes
    given_up = threading.Event()
    try:
        if method.client_streaming:
            list(channel.stream_stream(path, write, read)(iter(requests), timeout=30))
        elif method.name in ENDLESS:
            stream = channel.unary_stream(path, write, read)(requests[0], timeout=30)

            def give_up() -> None:
                given_up.set()
                stream.cancel()

            quiet = threading.Timer(QUIET_SECONDS, give_up)
            quiet.start()
            try:
                for frame in stream:
                    if method.name != "Subscribe" or frame.WhichOneof("frame") in ("progress", "snapshot_end"):
                        stream.cancel()  # it stands, and would go on without an end
                        break
            finally:
                quiet.cancel()
        elif method.server_streaming:
            list(channel.unary_stream(path, write, read)(requests[0], timeout=30))
        else:
            channel.unary_unary(path, write, read)(requests[0], timeout=30)
    except grpc.RpcError as raised:
        error = cast(grpc.Call, raised)
        if given_up.is_set():
            return None
        assert error.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), (method.full_name, error)
        if not method.full_name.startswith(OURS) and error.code() is grpc.StatusCode.NOT_FOUND:
            return None  # gRPC's own health service: no such service
        metadata = {name: value for name, value in error.trailing_metadata() or ()}  # noqa: C416  # tuples of gRPC's own
        details = metadata.get("grpc-status-details-bin")
        assert details is not None, f"{method.full_name}: {error.code()} without a reason: {error.details()}"
        status = status_pb2.Status.FromString(details)
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert info.domain == "sow"
        assert info.reason in KNOWN, f"{method.full_name}: {info.reason}: {error.details()}"
        assert status.code == error.code().value[0]
        return str(info.reason)
    return None


probes: Final[list[Client]] = []
"""The client of `assert_alive`, once it has been called."""


def assert_alive(server: ServerProcess) -> None:
    assert server.alive
    if not probes:
        probes.append(server.client())
    (client,) = probes
    assert client.status().state == "serving"
    client.publish("given", {"n": 1}, key="alive")
    assert client.get("given", "alive") is not None


# --- bytes -----------------------------------------------------------------------------------------------------------


def rounds(few: int) -> int:
    """How often something random is tried: a few times, and as often as a property in the long run."""
    assert settings.default is not None
    return max(few, settings.default.max_examples // 10)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_random_bytes_are_refused_by_name(
    server: ServerProcess, channel: grpc.Channel, method: MethodDescriptor, seed: int
) -> None:
    """Story: bytes that are no message used to end in INTERNAL without a reason, and a traceback of gRPC's own."""
    draw = random.Random(seed)
    for _ in range(rounds(5)):
        call(channel, method, [draw.randbytes(draw.choice((0, 1, 2, 7, 50, 1000))) for _ in range(3)])
    assert call(channel, method, [b"\xff" * 9]) == (
        "BATCH_DAMAGED" if method.name == "Replicate" else "INVALID_ARGUMENT"
    )
    assert_alive(server)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_cut_messages_are_refused_by_name_or_answered(
    server: ServerProcess, channel: grpc.Channel, method: MethodDescriptor, seed: int
) -> None:
    """A message that ends anywhere, and one with a byte that is another."""
    draw = random.Random(seed)
    whole = filled(method.input_type, draw).SerializeToString()
    for _ in range(rounds(5)):
        at = draw.randrange(len(whole)) if whole else 0
        damaged = bytes((*whole[:at], draw.randrange(256), *whole[at + 1 :]))
        call(channel, method, [draw.choice((whole[:at], damaged))])
    assert_alive(server)


def filled(kind: Descriptor, draw: random.Random, levels: int = 6) -> Message:
    """A message in which every field is set."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry or levels == 0:
                continue
            value = filled(field.message_type, draw, levels - 1)
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                getattr(message, field.name).CopyFrom(value)
        elif field.type == FieldDescriptor.TYPE_BYTES:
            put(message, field, draw.randbytes(5))
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            put(message, field, "given" if field.name in ("topic", "name") else draw.choice(("1", "peer", "a.*")))
        elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            put(message, field, draw.random() < 0.5)
        else:
            put(message, field, draw.randrange(1, 4))
    return message


def put(message: Message, field: FieldDescriptor, value: object) -> None:
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def test_the_server_has_no_service_that_is_not_fuzzed(channel: grpc.Channel) -> None:
    (method,) = [method for method in METHODS if method.name == "ServerReflectionInfo"]
    request = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
    path = f"/{method.containing_service.full_name}/{method.name}"
    read = reflection_pb2.ServerReflectionResponse.FromString
    (answer,) = channel.stream_stream(path, bytes, read)(iter([request]))
    told = {service.name for service in answer.list_services_response.service}
    assert told == {service.full_name for service in methods.SERVICES}


def test_text_that_is_not_utf8_is_refused_by_name(server: ServerProcess, channel: grpc.Channel) -> None:
    key = b"\x0a\x02\xff\xfe"
    topic = b"\x0a\x05given"
    for method in METHODS:
        if method.name in ("Get", "Touch"):
            assert call(channel, method, [topic + b"\x12\x02\xff\xfe"]) == "INVALID_ARGUMENT"
        if method.name == "Publish":
            assert call(channel, method, [topic + b"\x12\x04" + key]) == "INVALID_ARGUMENT"
        if method.name == "PublishStream":
            assert call(channel, method, [topic + b"\x12\x02\xff\xfe\x1a\x02{}"]) == "INVALID_ARGUMENT"
    assert_alive(server)


# --- messages --------------------------------------------------------------------------------------------------------

NUMBERS: Final = (0, 1, 2, 3, 5, 1000, 10_000, 10_001, 10**6, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)
DOCUMENTS: Final = (
    b"{}",
    b"",
    b"null",
    b'{"id":1,"a":{"b":2}}',
    b'{"id":"\\ud800","a":{"b":2}}',
    b'{"id":"\xff","a":{"b":2}}',
    b'{"id":[],"a":{}}',
    b'{"id":1e999,"a":{"b":-0.0}}',
    b'{"id":' + b"9" * 5000 + b',"a":{"b":1}}',
    b'{"id":1,"a":' + b"[" * 50_000 + b"}",
    b'{"id":1,"a":' + b'{"a":' * 50_000,
    b"\xff\xfe",
    b"55=A\x0110=1\x01",
    b"55=\x0155=B\x01=\x01",
    b"\x81\xa2id\x01",
    b"\x81\xa2id\xc1",
    b"\xdf\xff\xff\xff\xff",
    b"\x91" * 50_000,
)
TEXTS: Final = ("", "1", "a", "\0", "key\nline", "ü" * 600, "x" * 1025, "/id", "/a/b", "//", "/[", "default_ttl", "key")
FILTERS: Final = (
    "true",
    "/id = 1",
    "@key > 'a' AND @version >= 0",
    "/id = :n OR /a IN :a",
    "(" * 60 + "/a" + ")" * 60 + " = 1",
    "NOT " * 60 + "/a = 1",
    " OR ".join(["/a = 1"] * 200),
    "/a = " + "9" * 400,
    "/a LIKE '(a*)*$'",
    "/id IN (" + ",".join(["1"] * 1000) + ")",
    "@expire_time < NOW_MICROS() + 9223372036854775807",
    "/a/b/0 / 0 > -9223372036854775808 % 0",
)
TOPICS: Final = ("keyed", "given", "opaque", "fix", "packed", "loose-1", "loose-2")
NO_TOPICS: Final = ("nobody", "_reserved", "", "ü", "x" * 300, "a b")

integers = st.integers(0, 5) | st.sampled_from(NUMBERS) | st.integers(-(2**63), 2**63 - 1)


def mostly(good: Sequence[object], bad: Sequence[object]) -> st.SearchStrategy[object]:
    """A good value nine times out of ten, so that the rest of the message is looked at as well."""
    return st.integers(0, 9).flatmap(lambda draw: st.sampled_from(bad if draw == 9 else good))


def scalars(field: FieldDescriptor) -> st.SearchStrategy[object]:
    """Wild values of a field, among them such as get past the first check."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return mostly((True,), (False,)) if field.containing_oneof else st.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            return mostly((0, 1, 2, 3), (4, 5, 6, 99, -1, 2**31 - 1))
        case FieldDescriptor.CPPTYPE_UINT32:
            return integers.map(lambda number: number % 2**32)
        case FieldDescriptor.CPPTYPE_UINT64:
            return integers.map(lambda number: number % 2**64)
        case FieldDescriptor.CPPTYPE_INT32:
            return integers.map(lambda number: number % 2**32 - 2**31)
        case FieldDescriptor.CPPTYPE_INT64:
            return integers.map(lambda number: min(number, 2**63 - 1)) | integers.map(lambda number: -(number % 2**63))
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case FieldDescriptor.CPPTYPE_MESSAGE:
            assert field.message_type is not None, "it is of a message type"
            return messages(field.message_type)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.sampled_from(DOCUMENTS) | st.binary(max_size=40)
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    if field.name == "directory":
        return st.sampled_from(("", "relative", "\0", "/dev/null/no", "/proc/no"))
    if field.containing_type == replication_pb2.Instance.DESCRIPTOR and field.name == "name":
        return mostly(("peer",), NO_TOPICS)
    if field.name in ("filter", "order_by"):
        return mostly(FILTERS, TEXTS)
    if field.name == "topic" or field.name == "topics":
        return mostly(TOPICS, NO_TOPICS)
    if field.name == "name":  # of a topic to administer
        return mostly(("loose-1", "loose-2", "new-1", "new-2", "keyed"), NO_TOPICS)
    if field.containing_type is not None and field.containing_type.GetOptions().map_entry:  # of a parameter
        return mostly(("a", "n"), TEXTS)
    if field.name == "publisher_id":
        return mostly(("p", "q:1"), TEXTS)
    if field.name == "update_paths":
        return mostly([field.name for field in admin_pb2.TopicSettings.DESCRIPTOR.fields], TEXTS)
    return st.sampled_from(TEXTS) | text


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor) -> Message:
    """A message of any content; its lists are now and then of one length, as columns should be."""
    message = GetMessageClass(kind)()
    length = draw(st.sampled_from((None, 1, 1, 2, 3)))
    for field in kind.fields:
        likely = field.name in ("topic", "name", "records", "payload", "keys", "settings", "update_paths")
        if draw(st.integers(0, 9)) < (9 if likely else 5 if field.name == "key" else 2):
            if field.is_repeated:
                values: list[Any] = draw(st.lists(scalars(field), min_size=length or 0, max_size=length or 3))
                if field.message_type is not None and field.message_type.GetOptions().map_entry:
                    for entry in values:
                        getattr(message, field.name)[entry.key].CopyFrom(entry.value)
                else:
                    getattr(message, field.name).extend(values)
            elif field.message_type is not None:
                getattr(message, field.name).CopyFrom(draw(messages(field.message_type)))
            else:
                setattr(message, field.name, draw(scalars(field)))
    return message


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_messages_of_any_content_are_answered_or_refused_by_name(
    server: ServerProcess, channel: grpc.Channel, method: MethodDescriptor
) -> None:
    assert settings.default is not None
    heavy = method.name in ENDLESS or method.name == "Compact"
    examples = max(1, settings.default.max_examples // (20 if heavy else 3))

    @settings(max_examples=examples)
    @given(st.lists(messages(method.input_type), min_size=1, max_size=3))
    def send(requests: list[Message]) -> None:
        call(channel, method, [request.SerializeToString() for request in requests])

    send()
    assert_alive(server)
    assert not server.faults()


# --- between instances -----------------------------------------------------------------------------------------------

PEER: Final = replication_pb2.Instance(name="peer", id="id", epoch="epoch")
GIVEN: Final = replication_pb2.ReplicatedTopic(
    name="given", message_type="json", separator=b"\x01", acts_on_expiration=True
)
NUMBERS_OF_ROWS: Final = (-(2**63), -1, 0, 1, 2**40, 2**62, 2**63 - 2, 2**63 - 1)


def link(channel: grpc.Channel, messages: Sequence[Message]) -> str | None:
    """A link that says Hello, and then these."""
    (method,) = [method for method in METHODS if method.name == "Replicate"]
    hello = replication_pb2.Hello(protocol=1, instance=PEER, topics_pattern=".*", topics=[GIVEN])
    greeting = replication_pb2.ReplicateRequest(hello=hello)
    return call(channel, method, [sealed(message).SerializeToString() for message in (greeting, *messages)])


def test_sealed_messages_of_any_content_end_a_link_by_name(server: ServerProcess, channel: grpc.Channel) -> None:
    assert settings.default is not None

    @settings(max_examples=max(5, settings.default.max_examples // 2))
    @given(st.lists(messages(replication_pb2.ReplicateRequest.DESCRIPTOR), min_size=1, max_size=3))
    def send(requests: list[Message]) -> None:
        link(channel, requests)

    send()
    assert_alive(server)
    assert not server.faults()


@pytest.mark.parametrize("name", ["Checksum", "ListVersions", "FetchRows", "MergeRows"])
def test_sealed_requests_of_any_content_are_answered_or_refused_by_name(
    server: ServerProcess, channel: grpc.Channel, name: str
) -> None:
    (method,) = [method for method in METHODS if method.name == name]
    kind = replication_pb2.DESCRIPTOR.message_types_by_name[f"{name}Request"]
    assert settings.default is not None

    @settings(max_examples=max(5, settings.default.max_examples // 4))
    @given(messages(kind), st.booleans())
    def send(request: Message, accepted: bool) -> None:
        if accepted:
            request.instance.CopyFrom(PEER)  # type: ignore[attr-defined]  # every one of them has an instance
        call(channel, method, [sealed(request).SerializeToString()])

    send()
    assert_alive(server)
    assert not server.faults()


def test_chunks_of_any_rows_and_any_bytes_are_taken_or_refused_by_name(
    server: ServerProcess, channel: grpc.Channel, seed: int
) -> None:
    """Rows that no publish could have made, and chunks that are damaged though their checksum fits."""
    draw = random.Random(seed)
    (merge,) = [method for method in METHODS if method.name == "MergeRows"]
    (query,) = [method for method in METHODS if method.name == "Query"]

    def number(usual: int) -> int:
        return draw.choice(NUMBERS_OF_ROWS) if draw.random() < 0.2 else usual

    for _ in range(rounds(30)):
        rows = [
            Bad(
                draw.choice((b"1", b"2", b"\xff", b"", b"x" * 2000)),
                draw.choice(DOCUMENTS),
                number(2**40),
                number(1),
                number(2**63 - 1),
                draw.choice((1, 1, 2, 3, 4, 5, 6)),
                draw.choice((0, 0, 0, 1, 2, -1)),
            )
            for _ in range(draw.randrange(1, 4))
        ]
        chunk = packed(rows)
        if draw.random() < 0.5:
            at = draw.randrange(len(chunk))
            chunk = draw.choice((chunk[:at], chunk[:at] + draw.randbytes(draw.randrange(1, 9)) + chunk[at + 1 :]))
        crc, origins = zlib.crc32(chunk), ["peer", "\x00 no name"]
        request = replication_pb2.MergeRowsRequest(instance=PEER, topic=GIVEN, chunk=chunk, origins=origins, crc32=crc)
        call(channel, merge, [sealed(request).SerializeToString()])
        changes = replication_pb2.Changes(
            upto=draw.choice((1, 10**6)),
            chunks=[replication_pb2.Packed(topic="given", chunk=chunk)],
            origins=origins,
            crc32=crc,
        )
        link(channel, [replication_pb2.ReplicateRequest(changes=changes)])
        assert call(channel, query, [sow_pb2.QueryRequest(topic="given").SerializeToString()]) is None
    assert_alive(server)
    assert not server.faults()


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_an_oversized_request_is_refused_with_its_own_reason(server: ServerProcess) -> None:
    document = {"pad": ""}
    with server.client() as client:
        over = b'{"pad":"' + b"x" * 2**20 + b'"}'
        assert reason_of(lambda: client.publish("given", over, key="1")) == "PAYLOAD_TOO_LARGE"
        assert reason_of(lambda: client.publish("given", document, key="x" * 1025)) == "KEY_TOO_LARGE"
        assert reason_of(lambda: client.publish("keyed", {"id": "x" * 1025, "a": {"b": 1}})) == "KEY_TOO_LARGE"
        assert client.publish("given", document, key="x" * 1024).key == "x" * 1024
        fits = b'{"pad":"' + b"x" * (2**20 - 10) + b'"}'
        assert client.publish("given", fits, key="large").version
        found = client.get("given", "large")
        assert found is not None
        assert found.payload == fits
        with pytest.raises(SowError) as refused:
            client.publish_many("given", [document] * 1001, keys=map(str, range(1001)), atomic=True)
        assert refused.value.reason == "ATOMIC_TOO_LARGE"
        client.sow_delete("given", keys=["large", "x" * 1024])
    assert_alive(server)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (
            sow_pb2.PublishStreamRequest(topic="given", key=["1"] * 10_001, payload=[b"{}"] * 10_001),
            "REQUEST_TOO_LARGE",
        ),
        (sow_pb2.PublishStreamRequest(topic="given", key=["1"] * 17, payload=[bytes(2**20)] * 17), "REQUEST_TOO_LARGE"),
        (sow_pb2.PublishStreamRequest(topic="given", key=["1"] * 2, payload=[b"{}"] * 3), "INVALID_ARGUMENT"),
        (
            sow_pb2.PublishStreamRequest(
                topic="given", key=["1"], payload=[b"{}"], lifetime_kind=[types_pb2.LIFETIME_KIND_TTL]
            ),
            "INVALID_ARGUMENT",
        ),
        (sow_pb2.PublishStreamRequest(topic="given"), "INVALID_ARGUMENT"),
        (sow_pb2.GetRequest(topic="given", keys=["1"] * 10_001), "REQUEST_TOO_LARGE"),
        (sow_pb2.TouchRequest(topic="given", keys=["1"] * 10_001), "REQUEST_TOO_LARGE"),
        (sow_pb2.QueryRequest(topic="given", keys=["1"] * 10_001), "REQUEST_TOO_LARGE"),
        (sow_pb2.QueryRequest(topic="given", batch_size=10_001), "INVALID_ARGUMENT"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else value,
)
def test_too_many_at_once_is_refused(channel: grpc.Channel, request_: Message, reason: str) -> None:
    (method,) = [method for method in METHODS if method.input_type is request_.DESCRIPTOR]
    assert call(channel, method, [request_.SerializeToString()]) == reason


def test_a_message_beyond_the_transports_limit_ends_its_call_and_nothing_else(tmp_path: Path) -> None:
    """At an instance without peers; one that has some takes larger messages, as a commit may go in one."""
    request = sow_pb2.PublishRequest(
        topic="given", records=[sow_pb2.PublishRecord(key="1", payload=bytes(25 * 2**20))]
    ).SerializeToString()
    with ServerProcess(tmp_path) as server, grpc.insecure_channel(server.address, options=OPTIONS) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/sow.v1.SowService/Publish", bytes, bytes)(request, timeout=30)
        assert cast(grpc.Call, refused.value).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # The words of gRPC, by which the clients tell it from other limits.
        assert "message larger than max" in (cast(grpc.Call, refused.value).details() or "")
        with server.client() as client:
            assert client.publish("given", {"n": 1}, key="1").version


def test_a_method_that_does_not_exist_is_unimplemented(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/sow.v1.SowService/Nothing", bytes, bytes)(b"", timeout=30)
    assert cast(grpc.Call, refused.value).code() is grpc.StatusCode.UNIMPLEMENTED
