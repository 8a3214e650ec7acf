"""Calls that last, of every method, while access changes: rights, limits, credentials, sessions (rules A6, A7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import grpc
import pytest

from sow.v1 import snapshot_pb2, sow_pb2
from sow_client import Client
from tests.support.oracles.access import GUARDED, client_of, grant, identity, peer, write_access
from tests.support.oracles.methods import METHODS, OpenCall, opened
from tests.support.servers.certificates import Authority, Issued, replace
from tests.support.servers.clocked_server import FILE as CLOCK
from tests.support.servers.open_streams import LASTING, PEER, Caller, End, Stream, end_of, prepare, reading, watch
from tests.support.servers.server import ServerProcess, reason_of

ALL: Final = "read consume publish delete create load topic-admin"
DESK: Final = grant("desk", ".*", ALL)
LINK: Final = peer(PEER, "orders")
FILE: Final = identity("desk", "desk") + identity("late", "desk", more="expires = 2100-01-01") + DESK + LINK
CHANGED: Final = End(grpc.StatusCode.UNAVAILABLE, "ACCESS_CHANGED")
"""The end of a stream whose caller's access has changed."""
CENTURY: Final = 100 * 366 * 86_400


class Guarded:
    """A server, its access file, and its administrator."""

    def __init__(self, folder: Path, server: ServerProcess, root: Client) -> None:
        self.folder = folder
        self.server = server
        self.root = root

    def load(self, text: str) -> int:
        """Loads another access file; returns the number of calls that it has ended."""
        write_access(self.folder, text)
        return self.root.reload_access()[1]

    def caller(self, token: str = "desk") -> Caller:
        """A connection of its own."""
        return Caller(self.server, self.root, token)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("streams")
    write_access(folder, FILE)
    config = GUARDED.replace("[server]", "[server]\nreflection = true") + f'[replication]\naccept = ["{PEER}"]\n'
    with ServerProcess(folder, config, start=False) as server:
        server.module = "tests.support.servers.clocked_server"
        server.start()
        with client_of(server, "root") as root:
            prepare(root)
            yield Guarded(folder, server, root)
        assert not server.faults()


@pytest.fixture
def guarded(made: Guarded) -> Iterator[Guarded]:
    made.load(FILE)
    yield made
    (made.folder / CLOCK).unlink(missing_ok=True)


@pytest.fixture
def desk(guarded: Guarded) -> Iterator[Caller]:
    caller = guarded.caller()
    yield caller
    caller.close()


lasting = pytest.mark.parametrize("name", LASTING)


@lasting
def test_a_change_of_its_callers_rights_ends_a_stream(guarded: Guarded, desk: Caller, name: str) -> None:
    stream = LASTING[name](desk)
    assert guarded.load(FILE.replace(DESK, DESK + grant("desk", "more", "read")).replace(LINK, peer(PEER, "more"))) == 1
    assert end_of(stream) == CHANGED
    guarded.load(FILE)
    LASTING[name](desk).goes_on()


@lasting
def test_a_change_of_the_rights_of_others_leaves_a_stream(guarded: Guarded, desk: Caller, name: str) -> None:
    stream = LASTING[name](desk)
    others = identity("another", "another") + grant("another", ".*", "read") + peer("par") + "\n\n"
    assert guarded.load(others + FILE) == 0
    stream.goes_on()
    assert guarded.load(FILE) == 0
    stream.goes_on()


@lasting
def test_an_operator_ends_the_streams_of_a_session(guarded: Guarded, desk: Caller, name: str) -> None:
    other = guarded.caller()
    streams = LASTING[name](desk), LASTING["Subscribe"](other)
    owner = PEER if name == "Replicate" else "desk"
    first = next(session for session in guarded.root.sessions() if session.identity == owner)
    assert guarded.root.end_session(first.id) == 1
    assert end_of(streams[0]) == CHANGED
    streams[1].goes_on()
    other.close()


def test_a_stream_that_is_ended_while_its_first_answer_is_written_hears_of_it(guarded: Guarded, desk: Caller) -> None:
    """Story: its headers were sent a second time with the status, which gRPC refuses, so its client waited for ever."""
    request = snapshot_pb2.OpenExportRequest(topic="big", parts=1)
    export = desk.one("sow.v1.SnapshotService.OpenExport", request).export_id
    call = desk.call("sow.v1.SnapshotService.ReadExport", iter([reading(export)]))
    call.initial_metadata()  # the headers are here; the rest of the answer is more than the client takes unread
    assert guarded.load(FILE.replace(DESK, DESK + grant("desk", "more", "read"))) == 1
    assert end_of(Stream(call, lambda: None)) == CHANGED


def test_streams_end_when_their_token_expires(guarded: Guarded, desk: Caller) -> None:
    late = guarded.caller("late")
    streams = {name: make(late) for name, make in LASTING.items() if name != "Replicate"}
    unending = {"no expiry": LASTING["Subscribe"](desk), "health": watch(late)}
    (guarded.folder / CLOCK).write_text(str(CENTURY))
    assert {name: end_of(stream) for name, stream in streams.items()} == dict.fromkeys(streams, CHANGED)
    for stream in unending.values():
        stream.goes_on()
    with client_of(guarded.server, "late") as client:
        assert reason_of(client.whoami) == "UNAUTHENTICATED"
    late.close()


def test_the_watch_of_health_has_no_caller_whose_rights_could_change(guarded: Guarded, desk: Caller) -> None:
    stream = watch(desk)
    assert not [session for session in guarded.root.sessions() if session.identity != "root"]
    assert guarded.load(FILE.replace(DESK, grant("desk", ".*", "read"))) == 0
    stream.goes_on()


def test_what_a_stream_has_acknowledged_before_it_was_ended_stays(guarded: Guarded, desk: Caller) -> None:
    guarded.root.sow_delete("orders", all=True)
    stream: Stream = LASTING["PublishStream"](desk)
    for _ in range(20):
        stream.goes_on()
    guarded.load(FILE.replace(DESK, grant("desk", ".*", "read")))
    assert end_of(stream) == CHANGED
    assert guarded.root.count("orders") == 21
    with client_of(guarded.server, "desk") as client:
        assert reason_of(lambda: client.publish("orders", {"id": "x"})) == "PERMISSION_DENIED"


def test_limits_that_are_loaded_count_from_the_next_call_on(guarded: Guarded, desk: Caller) -> None:
    streams = [LASTING["Subscribe"](desk), LASTING["Subscribe"](desk)]
    assert guarded.load(FILE + "[roles.desk.limits]\nsubscriptions = 2\nrpcs = 2\n") == 0
    with client_of(guarded.server, "desk") as client:
        assert reason_of(client.whoami) == "LIMIT_EXCEEDED"
        guarded.load(FILE + "[roles.desk.limits]\nsubscriptions = 2\n")
        assert client.whoami().limits["subscriptions"] == 2
        third = LASTING["Subscribe"]
        with pytest.raises(grpc.RpcError):
            third(desk)
        guarded.load(FILE)
        streams.append(third(desk))
    for stream in streams:
        stream.goes_on()


def test_streams_end_when_their_certificate_is_revoked(tmp_path: Path) -> None:
    """Story: only new calls were refused, so whoever had a stolen certificate kept the stream that it had opened."""
    authority = Authority(tmp_path, "ca")
    shown, stolen, other = (authority.issue(name) for name in ("server", "stolen", "other"))
    revoked = tmp_path / "revoked.pem"
    revoked.write_bytes(authority.revocations([]))
    config = (
        f'[server.tls]\ncertificate = "{shown.certificate}"\nkey = "{shown.key}"\nclient_ca = "{authority.file}"\n'
        'revoked = "revoked.pem"\n[access]\nfile = "auth.toml"\n[topics.orders]\nkey = ["/id"]\n'
    )
    names = "".join(
        f'[[identities]]\nname = "{name}"\ncertificate = "CN:{name}"\nroles = ["desk"]\n'
        for name in ("stolen", "other")
    )
    write_access(tmp_path, names + DESK)
    with ServerProcess(tmp_path, config) as server, ExitStack() as connections:

        def subscribed(issued: Issued) -> OpenCall:
            credentials = grpc.ssl_channel_credentials(authority.file.read_bytes(), issued.key.read_bytes(), issued.pem)
            channel = connections.enter_context(grpc.secure_channel(server.address, credentials))
            request = sow_pb2.SubscribeRequest(topic="orders", sow=True).SerializeToString()
            call = opened(channel, METHODS["sow.v1.SowService.Subscribe"], iter([request]))
            next(call)
            return call

        ending, staying = subscribed(stolen), subscribed(other)
        replace(revoked, authority.revocations([stolen]))
        assert end_of(Stream(ending, lambda: None)) == CHANGED
        assert staying.is_active()
        assert not server.faults()
