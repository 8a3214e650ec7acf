"""A peer that sends what no instance sends: any value in any field of any message (rules R14, R15).

The peer ldn may send the topic `shared`. Whatever it says, publishes to `private` are taken, before and after a
restart. No list and no status has what cannot be shown, and the log has no fault of the server's own.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from click.testing import CliRunner, Result
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import replication_pb2, replication_pb2_grpc
from sow_cli.command import sow
from sow_client import Client, SowError
from sow_server.engine.disk.layout import source_key
from sow_server.engine.disk.rocks import META, Batch, Rocks
from tests.support.oracles.access import GUARDED, client_of, peer, write_access, write_private
from tests.support.oracles.odd_fields import TOO_LARGE_PATTERN, Odd, odd_fields, with_odd
from tests.support.servers.server import ServerProcess, until

SECONDS: Final = 20.0
CONFIG: Final = GUARDED.replace("[server]", '[server]\ninstance = "nyc"') + '[replication]\naccept = ["ldn", "par"]\n'
SAMPLED: Final = 1
"""Odd values of each field in the default suite; the long run has them all."""
HEAD: Final = 10
REQUESTS: Final[dict[str, type[Message]]] = {
    "Checksum": replication_pb2.ChecksumRequest,
    "ListVersions": replication_pb2.ListVersionsRequest,
    "FetchRows": replication_pb2.FetchRowsRequest,
    "MergeRows": replication_pb2.MergeRowsRequest,
}
KINDS: Final = ("hello", "topics", "changes", "seed", "heartbeat", "durables")
_epochs: Final = itertools.count()
_records: Final = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with hostile_server(tmp_path_factory.mktemp("nyc")) as made:
        yield made


def hostile_server(folder: Path) -> ServerProcess:
    write_access(folder, peer("ldn", "shared") + peer("par"))
    made = ServerProcess(folder, CONFIG)
    with client_of(made, "root") as root:
        for topic in ("shared", "private"):
            root.create_topic(topic, key=["/id"], expiration="enabled")
        root.publish("shared", {"id": "1"})
        root.publish("private", {"id": "1"})
    return made


class Peer:
    """The peer ldn, or another one, by hand: messages as they are, and how each call ends."""

    def __init__(self, server: ServerProcess, name: str = "ldn") -> None:
        self._channel = grpc.insecure_channel(server.address)
        self._stub: Any = replication_pb2_grpc.ReplicationServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {name}"),)
        self.name = name
        answer = replication_pb2.Sealed()
        answer.CopyFrom(self._stub.FetchRows(sealed(self.requests()["FetchRows"]), metadata=self._metadata))
        self.rows = replication_pb2.FetchRowsResponse.FromString(answer.message)
        """A row of `shared`."""

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def instance(self) -> replication_pb2.Instance:
        """Its identity, with data that the server has not met."""
        return replication_pb2.Instance(name=self.name, id="0123456789ab", epoch=f"epoch-{next(_epochs)}")

    def hello(self) -> replication_pb2.ReplicateRequest:
        return replication_pb2.ReplicateRequest(
            hello=replication_pb2.Hello(
                protocol=1,
                instance=self.instance(),
                topics_pattern="shared",
                topics=[shared()],
                head_sequence=HEAD,
                now_micros=time.time_ns() // 1_000,
            )
        )

    def messages(self) -> dict[str, replication_pb2.ReplicateRequest]:
        """A sound message of each kind, to follow the greeting."""
        now, rows, crc = time.time_ns() // 1_000, self.rows, zlib.crc32(self.rows.chunk)
        changes = replication_pb2.Changes(
            after=HEAD,
            upto=HEAD + 1,
            chunks=[replication_pb2.Packed(topic="shared", chunk=rows.chunk)],
            origins=rows.origins,
            crc32=crc,
            head_sequence=HEAD + 1,
            now_micros=now,
            publishers=[
                replication_pb2.PublisherMark(publisher_id="p", epoch=1, token=1, first=1, last=2, topics=["shared"])
            ],
        )
        seed = replication_pb2.Seed(
            topic="shared", first=True, last=True, chunk=rows.chunk, origins=rows.origins, crc32=crc
        )
        durable = replication_pb2.ReplicatedDurable(
            topic="shared",
            name=f"d{next(_epochs)}",
            born=replication_pb2.Stamp(number=now, instance="0123456789ab"),
            rewinds=[replication_pb2.Stamp(number=now, instance="0123456789ab")],
        )
        return {
            "hello": self.hello(),
            "topics": replication_pb2.ReplicateRequest(topics=replication_pb2.Topics(topics=[shared()])),
            "changes": replication_pb2.ReplicateRequest(changes=changes),
            "seed": replication_pb2.ReplicateRequest(seed=seed),
            "heartbeat": replication_pb2.ReplicateRequest(
                heartbeat=replication_pb2.Heartbeat(head_sequence=HEAD, upto=HEAD, now_micros=now)
            ),
            "durables": replication_pb2.ReplicateRequest(durables=replication_pb2.Durables(durables=[durable])),
        }

    def requests(self) -> dict[str, Message]:
        """A sound request of each method."""
        now, instance = time.time_ns() // 1_000 + 2_000_000, self.instance()
        rows = getattr(self, "rows", replication_pb2.FetchRowsResponse())
        return {
            "Checksum": replication_pb2.ChecksumRequest(instance=instance, topic=shared(), buckets=1, now_micros=now),
            "ListVersions": replication_pb2.ListVersionsRequest(
                instance=instance, topic="shared", buckets=1, bucket=[0], now_micros=now
            ),
            "FetchRows": replication_pb2.FetchRowsRequest(instance=instance, topic="shared", key=["1"]),
            "MergeRows": replication_pb2.MergeRowsRequest(
                instance=instance,
                topic=shared(),
                chunk=rows.chunk,
                origins=rows.origins,
                crc32=zlib.crc32(rows.chunk),
            ),
        }

    def link(self, *messages: replication_pb2.ReplicateRequest, leaves_open: bool = False) -> tuple[str, str]:
        """Sends messages over one link, those behind the first one once that is answered, and ends it. Returns the
        reason of its end, and the message. `leaves_open`: the server has to end it."""
        answered = threading.Event()

        def sent() -> Iterator[replication_pb2.Sealed]:
            for number, message in enumerate(messages, 1):
                yield sealed(message, number)
                answered.wait(SECONDS)
            if leaves_open:
                ended.wait(SECONDS)

        ended = threading.Event()

        def called() -> None:
            try:
                for _ in self._stub.Replicate(sent(), timeout=SECONDS, metadata=self._metadata):
                    answered.set()
            finally:
                answered.set()
                ended.set()

        return self._end(called)

    def ask(self, method: str, request: Message) -> tuple[str, str]:
        """Makes a call. As `link`."""
        call = getattr(self._stub, method)

        def made() -> None:
            answer = call(sealed(request), timeout=SECONDS, metadata=self._metadata)
            if method == "ListVersions":
                list(answer)

        return self._end(made)

    def _end(self, call: Callable[[], object]) -> tuple[str, str]:
        try:
            call()
        except grpc.RpcError as error:
            return reason_of(error)
        return "OK", ""


def reason_of(error: Any) -> tuple[str, str]:
    """The reason of a refusal and its message; the name of the status where it has no reason."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            info = error_details_pb2.ErrorInfo()
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    return info.reason, error.details() or ""
    return error.code().name, error.details() or ""


def sealed(message: Message, number: int = 0) -> replication_pb2.Sealed:
    data = message.SerializeToString()
    return replication_pb2.Sealed(message=data, crc32=zlib.crc32(data, number), number=number)


def shared() -> replication_pb2.ReplicatedTopic:
    return replication_pb2.ReplicatedTopic(
        name="shared", key=["/id"], message_type="json", separator=b"\x01", acts_on_expiration=True
    )


def chosen(fields: Iterator[list[Odd]], count: int | None) -> list[list[Odd]]:
    """Of each field some values, so that all kinds of values have their turn; None: all."""
    if count is None:
        return list(fields)
    return [
        [odds[(number + step) % len(odds)] for step in range(min(count, len(odds)))]
        for number, odds in enumerate(fields)
    ]


def assert_others_go_on(root: Client) -> None:
    """Publishes to a topic that the peer may not send, and whatever shows what is stored."""
    key = str(next(_records))
    root.publish("private", {"id": key})
    assert root.get("private", key) is not None


def assert_all_is_shown(root: Client) -> None:
    assert root.status().state == "serving"
    root.replication_status()
    root.durables(with_figures=True)
    root.topics(with_statistics=True)
    assert root.get("private", "1") is not None


ALLOWED: Final = {
    "",
    "UNSPECIFIED",
    "INVALID_ARGUMENT",
    "BATCH_DAMAGED",
    "PROTOCOL_MISMATCH",
    "CLOCK_SKEW",
    "RESEED_PENDING",
    "PEER_NOT_ACCEPTED",
    "PERMISSION_DENIED",
    "TOPIC_NOT_FOUND",
    "TOPIC_DIFFERS",
    "REQUEST_TOO_LARGE",
    "RESULT_TOO_LARGE",
    "PEER_OTHER_CLUSTER",
    "UNAVAILABLE",
    "OK",
}
"""How a link or a call may end: never INTERNAL, STORE_FAILED or a deadline."""


def assault(server: ServerProcess, kind: str, count: int | None, *, restart_each: bool) -> None:
    """Sends every odd message of a kind."""
    if kind in REQUESTS:
        fields = chosen(odd_fields(REQUESTS[kind]), count)
    else:
        request = replication_pb2.ReplicateRequest
        others = [name for name in request.DESCRIPTOR.fields_by_name if name != kind]
        fields = chosen(odd_fields(request, skip=others), count)
    for odds in fields:
        with Peer(server) as ldn, client_of(server, "root") as root:
            for odd in odds:
                if kind in REQUESTS:
                    reason, message = ldn.ask(kind, with_odd(ldn.requests()[kind], odd))
                else:
                    messages = ldn.messages()
                    first = [] if kind == "hello" else [messages["hello"]]
                    seeded = [messages["seed"]] if kind in ("changes", "durables") else []
                    reason, message = ldn.link(*first, *seeded, with_odd(messages[kind], odd))
                assert reason in ALLOWED, f"{odd.name}: {reason}: {message}"
                assert_others_go_on(root)
        if restart_each:
            server.restart()
    server.restart()
    with client_of(server, "root") as root:
        assert_others_go_on(root)
        assert_all_is_shown(root)
    assert server.faults() == []


@pytest.mark.parametrize("kind", [*KINDS, *REQUESTS])
def test_no_field_of_a_message_stops_others(server: ServerProcess, kind: str) -> None:
    assault(server, kind, SAMPLED, restart_each=False)


@pytest.mark.long
@pytest.mark.parametrize("kind", [*KINDS, *REQUESTS])
def test_no_value_of_any_field_stops_others(tmp_path: Path, kind: str) -> None:
    """All odd values, and a restart after those of each field."""
    with hostile_server(tmp_path) as server:
        assault(server, kind, None, restart_each=True)


def test_sound_messages_are_taken(server: ServerProcess) -> None:
    """So what the other tests send is refused for its odd field."""
    with Peer(server) as ldn:
        for kind, message in ldn.messages().items():
            messages = [ldn.hello(), *([] if kind == "hello" else [message])]
            assert ldn.link(*messages) == ("UNSPECIFIED", "the sender has ended the link"), kind
        for method, request in ldn.requests().items():
            assert ldn.ask(method, request) == ("OK", ""), method


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("topics_pattern", "(", "hello.topics_pattern"),
        ("topics_pattern", TOO_LARGE_PATTERN, "hello.topics_pattern"),
        ("topics_pattern", "x" * 100_000, "hello.topics_pattern"),
        ("filter", "/a =", "hello.filter"),
        ("filter", "x" * 100_000, "hello.filter"),
        ("instance.id", "", "hello.instance.id"),
        ("instance.id", "\0", "hello.instance.id"),
        ("instance.epoch", "", "hello.instance.epoch"),
        ("instance.epoch", "\0", "hello.instance.epoch"),
        ("instance.epoch", "x" * 100_000, "hello.instance.epoch"),
        ("head_sequence", -1, "hello.head_sequence"),
        ("head_sequence", 2**63 - 1, "hello.head_sequence"),
        ("now_micros", -(2**63), "hello.now_micros"),
        ("topics.key", "x" * 100_000, "hello.topics[0].key[0]"),
    ],
)
def test_a_greeting_with_a_bad_field_is_refused_by_its_name_and_leaves_nothing(
    server: ServerProcess, path: str, value: object, named: str
) -> None:
    with Peer(server, "par") as par, client_of(server, "root") as root:
        before = [link.cursor for link in root.replication_status().incoming if link.peer == "par"]
        odd = Odd(("hello", *path.split(".")), value)
        reason, message = par.link(with_odd(par.hello(), odd))
        assert reason == "INVALID_ARGUMENT"
        assert message.startswith(f"{named}: "), message
        after = root.replication_status().incoming
        assert [link.cursor for link in after if link.peer == "par"] in (before, [0])
        assert all(link.state == "away" for link in after if link.peer == "par")
        assert_others_go_on(root)


def test_a_purge_mark_of_the_future_drops_nothing(server: ServerProcess) -> None:
    """K7. All records of the topic were below it."""
    with Peer(server) as ldn, client_of(server, "root") as root:
        root.publish("shared", {"id": "kept"})
        seed = ldn.messages()["seed"]
        seed.seed.purged_version, seed.seed.purged_origin = 2**62, "ldn"
        assert ldn.link(ldn.hello(), seed, leaves_open=True)[0] == "CLOCK_SKEW"
        seed.seed.purged_version, seed.seed.purged_origin = 1, ""
        reason, message = ldn.link(ldn.hello(), seed)
        assert (reason, message.partition(":")[0]) == ("INVALID_ARGUMENT", "seed.purged_origin")
        assert root.get("shared", "kept") is not None


def test_a_probe_that_was_never_sent_ends_the_link(server: ServerProcess) -> None:
    """R4: tombstones would go before this instance has read what the peer had."""
    with Peer(server) as ldn:
        beat = ldn.messages()["heartbeat"]
        beat.heartbeat.probe = 2**52
        assert ldn.link(ldn.hello(), beat)[0] == "PROTOCOL_MISMATCH"


# --- rows that are stored already ------------------------------------------------------------------------------------

GOOD_ROW: Final[dict[str, object]] = {
    "identity": ["", "0123456789ab", "e"],
    "number": 1,
    "topics": "shared",
    "filter": "",
    "cursor": 10,
    "wait_for": 0,
    "guarded": False,
}


def bad_rows() -> Iterator[tuple[str, bytes]]:
    """Rows of sources, each under the name of its fault."""
    changes: dict[str, dict[str, object]] = {
        "pattern": {"topics": "("},
        "large-pattern": {"topics": TOO_LARGE_PATTERN},
        "epoch": {"identity": ["epoch", "a", "x" * 100_000]},
        "other-name": {"identity": ["par", "a", "e"]},
        "cursor": {"cursor": 2**63},
        "number": {"number": 2**16},
        "kind": {"wait_for": "7"},
    }
    for name, change in changes.items():
        row = {**GOOD_ROW, "identity": [name, "0123456789ab", "e"], **change}
        yield name, json.dumps(row).encode()
    yield "cut-off", json.dumps(GOOD_ROW).encode()[:30]
    yield "empty", b""
    yield "no-text", b"\xff\x00"
    yield "list", b'["ldn"]'


BAD_ROWS: Final = dict(bad_rows())


def plant(server: ServerProcess, rows: Mapping[str, bytes]) -> None:
    """Puts rows of sources into the data of a server that is stopped."""
    rocks = Rocks(server.data / "db", create=False)
    batch = Batch()
    for name, row in rows.items():
        batch.puts[META][source_key(name)] = row
    rocks.write(batch)
    rocks.close()


def command(server: ServerProcess, *arguments: str) -> Result:
    """Runs a command as root."""
    token = server.config.parent / "root.token"
    write_private(token, "root")
    given = ["--server", server.address, "--token-file", str(token), *arguments, "--format", "ndjson"]
    return CliRunner().invoke(sow, given)


def test_a_stored_row_that_cannot_be_used_disables_its_source_alone(tmp_path: Path) -> None:
    """R14. The start failed, for good: an earlier release stored what a peer said, and read it at the start."""
    write_access(tmp_path, peer("par") + "".join([peer(name, "shared") for name in BAD_ROWS]))
    accepted = ", ".join([f'"{name}"' for name in ("par", *BAD_ROWS)])
    config = CONFIG.replace('accept = ["ldn", "par"]', f"accept = [{accepted}]")
    with ServerProcess(tmp_path, config) as server:
        with client_of(server, "root") as root:
            for topic in ("shared", "private"):
                root.create_topic(topic, key=["/id"], expiration="enabled")
        assert server.terminate() == 0
        plant(server, BAD_ROWS)
        server.start()
        assert {event["peer"] for event in server.events("source_disabled")} == set(BAD_ROWS)
        with client_of(server, "root") as root, Peer(server, "par") as par:
            assert_others_go_on(root)
            assert par.link(par.hello())[0] == "UNSPECIFIED", "the other sources go on"
            links = {link.peer: (link.state, link.last_error_reason) for link in root.replication_status().incoming}
            assert links == {"par": ("away", ""), **dict.fromkeys(BAD_ROWS, ("disabled", "DATA_DAMAGED"))}
            told = command(server, "doctor")
            assert told.exit_code == 1
            for name in BAD_ROWS:
                assert f"{name} is disabled" in told.stdout
                assert f"sow replication remove-peer {name}" in told.stdout
                with Peer(server, name) as bad:
                    reason, message = bad.link(bad.hello())
                    assert reason == "DATA_DAMAGED"
                    assert f"remove-peer {name}" in message
                    assert command(server, "replication", "remove-peer", name).exit_code == 0
                    assert bad.link(bad.hello())[0] == "UNSPECIFIED", "it is accepted again"
                with pytest.raises(SowError) as again:
                    root.remove_peer(name)
                assert again.value.reason == "SET_IN_CONFIG"
            assert "is disabled" not in command(server, "doctor").stdout
        server.restart()
        assert server.events("source_disabled") == []
        assert server.faults() == []


def names(of: Sequence[list[Odd]]) -> set[tuple[str, ...]]:
    return {odds[0].path for odds in of}


def test_every_field_of_the_contract_has_its_odd_values() -> None:
    """A new field is in the assault as soon as it is in the contract."""
    fields = names(list(odd_fields(replication_pb2.ReplicateRequest)))
    assert ("hello", "instance", "epoch") in fields
    assert {path[0] for path in fields} == set(KINDS)
    service = replication_pb2.DESCRIPTOR.services_by_name["ReplicationService"]
    assert set(service.methods_by_name) == {"Replicate", *REQUESTS}


# --- a peer that answers ---------------------------------------------------------------------------------------------


class Answering:
    """An instance that this server sends to: it answers each link with what it was told to, and ends it."""

    def __init__(self) -> None:
        self.answers: list[Message] = []
        self.links = 0

    def replicate(
        self, requests: Iterator[replication_pb2.Sealed], context: object
    ) -> Iterator[replication_pb2.Sealed]:
        """Answers a link, once it is greeted."""
        next(requests)
        try:
            yield from [sealed(answer, number) for number, answer in enumerate(self.answers, 1)]
        finally:  # also where the other end has had enough
            self.links += 1


def welcome(count: int) -> replication_pb2.ReplicateResponse:
    """Of data that the server has not met: each one of another epoch."""
    instance = replication_pb2.Instance(name="evil", id="0123456789ab", epoch=f"e{count}")
    answer = replication_pb2.TopicAnswer(topic="shared", state=replication_pb2.TOPIC_STATE_WANTED)
    return replication_pb2.ReplicateResponse(
        welcome=replication_pb2.Welcome(instance=instance, topics=[answer], now_micros=time.time_ns() // 1_000)
    )


def answered_oddly(folder: Path, count: int | None) -> None:
    """Lets a server send to a peer whose answers are odd, restarts it, and looks at what it shows."""
    write_access(folder, peer("evil", "shared"))
    config = CONFIG.replace('accept = ["ldn", "par"]', "serve_links = true")
    evil, pool = Answering(), grpc.server(ThreadPoolExecutor(4))
    replicate = grpc.stream_stream_rpc_method_handler(
        evil.replicate,
        request_deserializer=replication_pb2.Sealed.FromString,
        response_serializer=replication_pb2.Sealed.SerializeToString,
    )
    pool.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("sow.v1.ReplicationService", {"Replicate": replicate}),)
    )
    address = f"127.0.0.1:{pool.add_insecure_port('127.0.0.1:0')}"
    pool.start()
    try:
        with ServerProcess(folder, config) as server:
            with client_of(server, "root") as root:
                for topic in ("shared", "private"):
                    root.create_topic(topic, key=["/id"], expiration="enabled")
                root.publish("shared", {"id": "1"})
                root.publish("private", {"id": "1"})
                root.add_peer("evil", address)
                kind = replication_pb2.ReplicateResponse
                for number, odd in enumerate(itertools.chain(*chosen(odd_fields(kind), count)), 1):
                    first = welcome(number)
                    is_first = odd.path[0] == "welcome"
                    evil.answers = [with_odd(first, odd)] if is_first else [first, with_odd(kind(), odd)]
                    evil.links = 0
                    root.add_peer("evil", address, replace=True)  # it is dialled at once
                    until(lambda: evil.links, SECONDS, f"the answer {odd.name}")
                    assert_others_go_on(root)
                    assert_all_is_shown(root)
            server.restart()
            with client_of(server, "root") as root:
                assert_others_go_on(root)
                assert_all_is_shown(root)
            assert server.faults() == []
    finally:
        pool.stop(None)


def test_no_answer_of_a_peer_stops_others(tmp_path: Path) -> None:
    answered_oddly(tmp_path, 1)


@pytest.mark.long
def test_no_value_of_any_field_of_an_answer_stops_others(tmp_path: Path) -> None:
    answered_oddly(tmp_path, None)
