"""Both clients with several addresses (rules F1 to F3): real instances that are killed, stopped, or full."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from sow.v1 import sow_pb2_grpc
from sow_client import (
    Ack,
    AsyncClient,
    Cancelled,
    Client,
    FailedPrecondition,
    Instance,
    Published,
    ResyncRequired,
    SowError,
    Unavailable,
)
from tests.support.fakes.echo_server import Held, Store, Unreplicated
from tests.support.oracles.access import GUARDED, grant, identity, write_access
from tests.support.servers.server import ServerProcess, free_port, until
from tests.support.simulation.clients import Connect, connect
from tests.support.stores.describing import describing

__all__ = ["connect"]  # a fixture
pytestmark = pytest.mark.one_client
TOPICS: Final = '[topics.orders]\nkey = ["/id"]\n[topics.kept]\n'
WAIT: Final = 20.0


class Move(NamedTuple):
    """A call of `on_failover`."""

    left: str
    used: str
    reason: str


class Moves(list[Move]):
    """Remembers the moves of a client."""

    def __call__(self, left: Instance, used: Instance, reason: str) -> None:
        self.append(Move(left.name, used.name, reason))


def config(name: str, cluster: str = "blue") -> str:
    return f'[server]\ninstance = "{name}"\ncluster = "{cluster}"\nstop_grace = "300ms"\n{TOPICS}'


class Three(NamedTuple):
    """Three instances that do not replicate, so that each shows what was sent to it."""

    a: ServerProcess
    b: ServerProcess
    c: ServerProcess

    @property
    def addresses(self) -> str:
        return ",".join(server.address for server in self)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    with ExitStack() as stack:
        made = [stack.enter_context(ServerProcess(tmp_path / name, config(name))) for name in "abc"]
        yield Three(*made)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with ExitStack() as stack:
        a, b = [stack.enter_context(ServerProcess(tmp_path / name, config(name))) for name in "ab"]
        yield a, b


def keys_at(server: ServerProcess) -> set[str]:
    """The keys of `orders` at one instance."""
    with server.client() as client:
        return {record.key for record in client.query("orders")}


@pytest.mark.both_clients
def test_a_client_goes_on_at_the_next_instance_when_one_is_killed_and_goes_back_when_asked(
    connect: Connect, three: Three
) -> None:
    moves = Moves()
    with connect(three.addresses, on_failover=moves) as client:
        unused = client.instance
        assert unused is None
        client.publish("orders", {"id": "at a"})
        assert client.instance is not None
        assert (client.instance.name, client.instance.cluster) == ("a", "blue")
        three.a.kill9()
        assert client.get("orders", "at a") is None
        assert moves == [("a", "b", "UNREACHABLE")]
        three.b.kill9()
        assert client.count("orders") == 0
        assert [move.used for move in moves] == ["b", "c"]

        three.a.start()
        assert client.get("orders", "at a") is None, "it stays where it is"
        found = client.go_back()
        assert found is not None
        assert found.name == "a"
        assert client.get("orders", "at a") is not None
        assert moves[-1] == ("c", "a", "ASKED")
        assert client.go_back() == client.instance
        assert len(moves) == 3


def test_an_orderly_stop_raises_no_error_in_reads_and_single_writes(connect: Connect, three: Three) -> None:
    moves = Moves()
    with connect(three.addresses, on_failover=moves) as client:
        client.publish("orders", {"id": "1"})
        assert three.a.terminate() == 0
        client.publish("orders", {"id": "2"})
        client.touch("orders", "2", ttl="1h")
        client.create_topic("more")
        assert client.sow_delete("orders", keys=["2"]).deleted == 1
        client.publish("orders", {"id": "3"}, only_if_absent=True)
        assert [move.used for move in moves] == ["b"]
    assert keys_at(three.b) == {"3"}


def test_the_pages_of_a_query_go_on_at_another_instance(connect: Connect, three: Three) -> None:
    for server in three:
        with server.client() as own:
            own.publish_many("orders", [{"id": f"{number}"} for number in range(9)])
    with connect(three.addresses) as client:
        token, keys = "", []
        for number in range(3):
            page = client.page("orders", page_size=3, page_token=token)
            token = page.next_page_token
            keys += [record.key for record in page.records]
            three[number].kill9()
    assert keys == [f"{number}" for number in range(9)]


def test_a_query_that_has_begun_is_cut_off_and_the_next_one_is_answered_elsewhere(
    connect: Connect, three: Three
) -> None:
    for server in three:
        with server.client() as own, own.publisher("kept") as publisher:
            for number in range(20_000):
                publisher.publish(b'{"filler": "' + b"x" * 500 + b'"}', key=f"{number:05}")
    with connect(three.addresses) as client:
        answer = client.query("kept", batch_size=100)
        assert next(answer).key == "00000"
        three.a.kill9()
        with pytest.raises(Unavailable):
            for _ in answer:
                pass
        assert client.count("kept") == 20_000


def test_a_subscription_begins_again_elsewhere(connect: Connect, three: Three) -> None:
    """Where its bookmark is not known, the errors and the resync are those of a restored server."""
    for server in three:
        with server.client() as own:
            own.publish("orders", {"id": "1", "of": server.address})
    moves = Moves()
    with connect(three.addresses, on_failover=moves) as client, ExitStack() as stack:
        following = client.sow_and_subscribe("orders")
        stack.callback(following.close)
        assert [next(following).op for _ in range(2)] == ["sow", "snapshot_end"]
        three.a.kill9()
        changes = [next(following) for _ in range(3)]
        assert [change.op for change in changes] == ["resync", "sow", "snapshot_end"]
        assert changes[1].record is not None
        assert changes[1].record.data == {"id": "1", "of": three.b.address}

        plain = client.subscribe("orders")
        stack.callback(plain.close)
        client.publish("orders", {"id": "2"})
        assert next(plain).op == "put"
        three.b.terminate()
        with pytest.raises(ResyncRequired) as caught:
            next(plain)
        assert caught.value.reason == "BOOKMARK_OTHER_EPOCH"
        assert caught.value.bookmark
    assert [move.used for move in moves] == ["b", "c"]


def test_going_back_takes_subscriptions_along(connect: Connect, three: Three) -> None:
    three.a.kill9()
    with connect(three.addresses) as client:
        following = client.sow_and_subscribe("orders")
        assert next(following).op == "snapshot_end"
        three.a.start()
        assert client.go_back() == client.instance
        assert [next(following).op for _ in range(2)] == ["resync", "snapshot_end"]
        with three.a.client() as own:
            own.publish("orders", {"id": "1"})
        assert next(following).op == "put"
        following.close()


def test_a_full_disk_moves_the_client_and_it_goes_back_after_the_restart(
    connect: Connect, two: tuple[ServerProcess, ServerProcess]
) -> None:
    a, b = two
    moves = Moves()
    with connect(f"{a.address},{b.address}", on_failover=moves, failover_publish="unsent") as client:
        following = client.sow_and_subscribe("orders")
        assert next(following).op == "snapshot_end"
        error = fill(a, client)
        assert error.reason == "DISK_FULL", "it may have been applied: it does not go elsewhere by itself"
        client.publish("orders", {"id": "elsewhere"})
        assert moves == [("a", "b", moves[0].reason)]
        assert next(following).op == "resync", "a subscription there would hear nothing any more"
        while next(following).op != "snapshot_end":
            pass
        following.close()
        assert client.go_back() == client.instance
        assert len(moves) == 1, "it does not serve yet"
        a.restart()
        back = client.go_back()
        assert back is not None
        assert back.name == "a"
    assert keys_at(b) == {"elsewhere"}


def fill(server: ServerProcess, client: Client) -> SowError:
    """Lets no file of an instance grow, and publishes until it says so."""
    largest = max(path.stat().st_size for path in server.data.rglob("*") if path.is_file())
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (largest + 100_000, hard))
    for number in range(10_000):
        try:
            client.publish("kept", {"n": number, "filler": "x" * 1_000}, key=str(number))
        except SowError as error:
            return error
    raise AssertionError("the disk never was full")


def test_while_no_instance_serves_the_reads_of_the_first_that_answers_go_on(
    connect: Connect, two: tuple[ServerProcess, ServerProcess]
) -> None:
    a, b = two
    b.kill9()
    with connect(f"{a.address},{b.address}", connect_timeout=2.0) as client:
        client.publish("orders", {"id": "1"})
        fill(a, client)
        assert client.get("orders", "1") is not None
        with pytest.raises(SowError) as caught:
            client.publish("orders", {"id": "2"})
        assert caught.value.reason == "DISK_FULL"


def test_if_nobody_serves_the_error_tells_what_each_address_answered(connect: Connect, three: Three) -> None:
    for server in three:
        server.kill9()
    with connect(three.addresses, connect_timeout=0.3) as client, pytest.raises(Unavailable) as caught:
        client.get("orders", "1")
    assert caught.value.reason == "UNREACHABLE"
    assert all(server.address in caught.value.message for server in three)
    assert "Connection refused" in caught.value.message


def test_a_first_call_does_not_wait_where_all_addresses_refuse(connect: Connect, three: Three) -> None:
    """It took the whole `connect_timeout`. Publishers and subscriptions do not try again by themselves either."""
    for server in three:
        server.kill9()
    with connect(three.addresses) as client:
        publisher = client.publisher("orders")
        publisher.publish(b'{"id": "1"}')
        typed = lambda: publisher.publish({"id": "1"})  # noqa: E731 - it asks for the type of the topic
        for call in (lambda: client.get("orders", "1"), lambda: client.subscribe("orders"), typed, publisher.flush):
            with pytest.raises(Unavailable) as caught:
                call()
            assert caught.value.reason == "UNREACHABLE"
            assert "within" not in caught.value.message, "nothing was waited for"
        publisher.abort()
        three.b.start()
        assert client.get("orders", "1") is None


@pytest.mark.both_clients
def test_a_client_comes_back_to_a_single_list_whose_instances_were_all_restarted(
    connect: Connect, three: Three
) -> None:
    with connect(three.addresses) as client, futures.ThreadPoolExecutor() as threads:
        client.publish("orders", {"id": "1"})
        for server in three:
            server.kill9()
        waiting = threads.submit(client.get, "orders", "1")
        three.a.start()
        assert waiting.result(WAIT) is not None


# ---- what is no instance of this cluster ----


def test_an_instance_of_another_cluster_is_refused_with_both_names(connect: Connect, tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "a", config("a", "blue")) as a,
        ServerProcess(tmp_path / "b", config("b", "green")) as b,
        ServerProcess(tmp_path / "c", config("c", "")) as c,
    ):
        moves = Moves()
        with connect(f"{a.address},{b.address}", connect_timeout=0.5) as client:
            client.publish("orders", {"id": "1"})
            a.kill9()
            with pytest.raises(Unavailable) as caught:
                client.get("orders", "1")
            assert "b at" in caught.value.message
            assert "green" in caught.value.message
            assert "blue" in caught.value.message
        assert "1" not in keys_at(b)
        a.start()
        with connect(f"{a.address},{b.address},{c.address}", on_failover=moves) as client:
            client.get("orders", "1")
            a.kill9()
            client.get("orders", "1")
            assert [move.used for move in moves] == ["c"], "an instance without a cluster is accepted"


@pytest.fixture
def other_grpc() -> Iterator[str]:
    """The address of a gRPC server without any service of sow."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


class Silent(BaseHTTPRequestHandler):
    """Answers nothing useful, and logs nothing."""

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name of the library
        pass


@pytest.fixture
def no_grpc() -> Iterator[str]:
    """The address of a server that speaks HTTP 1."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_addresses_where_something_else_answers_are_passed_over(
    connect: Connect, three: Three, other_grpc: str, no_grpc: str
) -> None:
    with connect(f"{no_grpc},{other_grpc},{three.a.address}") as client:
        client.publish("orders", {"id": "1"})
        assert client.instance is not None
        assert client.instance.name == "a"


def test_where_no_address_has_a_sow_server_the_error_names_them(
    connect: Connect, other_grpc: str, no_grpc: str
) -> None:
    with connect(f"{other_grpc},{other_grpc.replace('127.0.0.1', 'localhost')}", connect_timeout=0.5) as client:
        with pytest.raises(FailedPrecondition) as wrong:
            client.get("orders", "1")
    assert wrong.value.reason == "NO_SOW_SERVER"
    assert other_grpc in wrong.value.message
    with connect(f"{no_grpc},{other_grpc}", connect_timeout=0.5) as client, pytest.raises(Unavailable) as caught:
        client.get("orders", "1")
    assert no_grpc in caught.value.message
    assert "speak no gRPC" in caught.value.message
    with connect(other_grpc) as client, pytest.raises(SowError) as single:
        client.get("orders", "1")
    assert other_grpc in single.value.message
    assert "no sow server" in single.value.message


def test_an_older_server_that_does_not_describe_itself_is_used(connect: Connect, three: Three) -> None:
    """It is known by the health of sow's service."""
    checks = health.HealthServicer()
    checks.set("sow.v1.SowService", health_pb2.HealthCheckResponse.SERVING)
    old = grpc.server(futures.ThreadPoolExecutor(8))
    sow_pb2_grpc.add_SowServiceServicer_to_server(Store(), old)
    health_pb2_grpc.add_HealthServicer_to_server(checks, old)
    port = old.add_insecure_port("127.0.0.1:0")
    old.start()
    moves = Moves()
    with connect(f"127.0.0.1:{port},{three.a.address}", on_failover=moves) as client:
        assert client.get("orders", "1") is not None
        assert client.instance is not None
        assert (client.instance.name, client.instance.serving) == ("", True)
        old.stop(None).wait()
        assert client.get("orders", "1") is None
        assert [move.used for move in moves] == ["a"]


def test_an_identity_with_a_single_call_at_a_time_uses_a_list(connect: Connect, tmp_path: Path) -> None:
    """A7: the call that watched the instance took the only place, and every other call was refused."""
    limited = identity("desk", "desk") + grant("desk", "orders", "read publish") + "[roles.desk.limits]\nrpcs = 1\n"
    write_access(tmp_path, limited)
    guarded = GUARDED.replace("[server]\n", '[server]\ninstance = "guarded"\n') + TOPICS
    with ServerProcess(tmp_path, guarded) as server:
        with connect(f"{server.address},127.0.0.1:{free_port()}", token="desk") as client:
            for number in range(5):
                client.publish("orders", {"id": f"{number}"})
            assert client.count("orders") == 5
            assert client.instance is not None
            assert client.instance.name == "guarded"
            with connect(f"{server.address},127.0.0.1:{free_port()}", token="desk") as another:
                assert another.get("orders", "1") is not None


# ---- names ----


def fake_instance(host: str, port: int, name: str) -> tuple[grpc.Server, int]:
    """A server of an instance, of which only one address of this machine is known."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    sow_pb2_grpc.add_SowServiceServicer_to_server(Store(), server)
    server.add_generic_rpc_handlers((describing(name),))
    chosen = server.add_insecure_port(f"{host}:{port}")
    server.start()
    return server, chosen


def test_a_name_with_several_addresses_counts_as_several(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    first, port = fake_instance("127.0.0.1", 0, "first")
    second, _ = fake_instance("127.0.0.2", port, "second")
    known = {f"sow.example:{port}": ["127.0.0.2", "127.0.0.1"]}
    monkeypatch.setattr("sow_client._transport._look_up", lambda name, found: found.update({name: known[name]}))
    moves = Moves()
    with connect(f"sow.example:{port}", on_failover=moves) as client:
        assert client.get("orders", "1") is not None
        assert client.instance is not None
        assert (client.instance.address, client.instance.host) == (f"127.0.0.1:{port}", "sow.example")
        first.stop(None).wait()
        assert client.get("orders", "1") is not None
        assert moves == [("first", "second", moves[0].reason)]
    second.stop(None).wait()


def test_a_name_with_one_address_is_left_to_grpc(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs one look-up, and no call to ask who is there."""
    looked_up: list[str] = []

    def look_up(name: str, found: dict[str, list[str]]) -> None:
        looked_up.append(name)
        found[name] = ["127.0.0.1"]

    monkeypatch.setattr("sow_client._transport._look_up", look_up)
    with connect("no.such.name.invalid:1", connect_timeout=0.2) as client:
        with pytest.raises(Unavailable):
            client.get("orders", "1")
        with pytest.raises(Unavailable) as caught:
            client.get("orders", "1")
        assert "cannot connect to no.such.name.invalid:1" in caught.value.message
        assert client.instance is None
    assert looked_up == ["no.such.name.invalid:1"]


# ---- closing ----


def test_closing_a_client_ends_its_search(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.create_server(("127.0.0.1", 0)) as other:
        addresses = ",".join(f"127.0.0.1:{one.getsockname()[1]}" for one in (mute, other))
        client = connect(addresses, connect_timeout=600)
        with futures.ThreadPoolExecutor() as threads:
            call = threads.submit(client.get, "orders", "1")
            connection, _ = mute.accept()  # the search is under way
            client.close()
            error = call.exception(WAIT)
            connection.close()
        assert isinstance(error, Cancelled)
        assert error.reason == "CLOSED"


def test_a_search_takes_no_longer_than_the_connect_timeout_of_those_who_wait(connect: Connect) -> None:
    """All who wait share one search, and each gets the error in its own time."""
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.create_server(("127.0.0.1", 0)) as other:
        addresses = ",".join(f"127.0.0.1:{one.getsockname()[1]}" for one in (mute, other))
        with connect(addresses, connect_timeout=0.3) as client, futures.ThreadPoolExecutor() as threads:
            calls = [threads.submit(client.get, "orders", "1") for _ in range(4)]
            errors = [call.exception(WAIT) for call in calls]
        assert {getattr(error, "reason", None) for error in errors} == {"UNREACHABLE"}


# ---- what keeps to its instance ----


@pytest.mark.both_clients
def test_an_export_a_load_and_a_durable_keep_to_their_instance_while_the_client_is_elsewhere(
    connect: Connect, three: Three
) -> None:
    three.a.kill9()
    with connect(three.addresses, connect_timeout=1.0) as client:
        client.publish("orders", {"id": "at b"})
        export = client.open_export("orders")
        load = client.open_load("kept")
        consumer = client.durable("orders", "billing", start="earliest", retry_for=1.0)
        three.a.start()
        assert client.go_back() == client.instance
        assert client.get("orders", "at b") is None, "the client is at a"

        change = next(consumer)
        assert change.record is not None
        assert change.record.key == "at b"
        consumer.acknowledge(change)
        consumer.flush()
        assert [records.count for records in client.read_export(export.id, 0)] == [1]
        assert client.get_load(load.id).topic == "kept"
        assert client.renew_export(export.id).topic == "orders"

        three.b.kill9()
        for call in (
            lambda: client.renew_export(export.id),
            lambda: client.renew_load(load.id),
            lambda: next(consumer),
        ):
            with pytest.raises(Unavailable) as caught:
                call()
            assert three.b.address in caught.value.message
            assert "keeps to" in caught.value.message
        assert client.get("orders", "at b") is None


# ---- publishers ----


def test_a_publisher_loses_nothing_and_repeats_nothing_when_its_instance_stops_in_order(
    connect: Connect, three: Three
) -> None:
    acks: list[Ack] = []
    with connect(three.addresses) as client:
        with client.publisher("orders", batch_records=10, on_ack=acks.append) as publisher:
            for number in range(50):
                publisher.publish({"id": f"{number}"})
            publisher.flush()
            with three.a.client() as own:
                first = {record.key for record in own.query("orders")}
            assert three.a.terminate() == 0
            for number in range(50, 100):
                publisher.publish({"id": f"{number}"})
        assert sum(ack.applied for ack in acks) == 100
    assert first == {f"{number}" for number in range(50)}
    assert keys_at(three.b) == {f"{number}" for number in range(50, 100)}


def test_unsettled_records_wait_for_the_instance_that_may_have_them(connect: Connect, three: Three) -> None:
    with connect(three.addresses, connect_timeout=1.0, failover_publish="unsent") as client:
        publisher = client.publisher("orders", retry_for=0.3, batch_records=1)
        publisher.publish({"id": "1"})
        publisher.flush()
        three.a.signal(signal.SIGSTOP)  # it takes what is sent, and answers nothing
        publisher.publish({"id": "2"})
        until(lambda: publisher._core._sent, WAIT, "the record to be sent")
        three.a.kill9()
        with pytest.raises(Unavailable) as caught:
            publisher.flush()
        assert three.a.address in caught.value.message
        assert caught.value.details["unacknowledged"] == "1"
        publisher.abort()
        assert isinstance(client.publish("orders", {"id": "3"}), Published)
    assert keys_at(three.b) == {"3"}


def test_unsettled_records_go_elsewhere_by_default(connect: Connect, three: Three) -> None:
    with connect(three.addresses) as client:
        with client.publisher("orders", batch_records=1) as publisher:
            publisher.publish({"id": "1"})
            publisher.flush()
            three.a.signal(signal.SIGSTOP)
            publisher.publish({"id": "2"})
            until(lambda: publisher._core._sent, WAIT, "the record to be sent")
            three.a.kill9()
        assert client.get("orders", "2") is not None
    assert keys_at(three.b) == {"2"}


@pytest.mark.parametrize(
    ("mode", "condition", "goes"), [("unsent", False, False), ("again", True, False), ("again", False, True)]
)
def test_a_publish_of_unknown_outcome_goes_elsewhere_only_if_that_is_allowed_and_never_with_a_condition(
    connect: Connect, two: tuple[ServerProcess, ServerProcess], mode: str, condition: bool, goes: bool
) -> None:
    store = Held()
    held = grpc.server(futures.ThreadPoolExecutor(8))
    sow_pb2_grpc.add_SowServiceServicer_to_server(store, held)
    held.add_generic_rpc_handlers((describing(),))
    port = held.add_insecure_port("127.0.0.1:0")
    held.start()
    addresses = f"127.0.0.1:{port},{two[1].address}"
    with connect(addresses, failover_publish=mode) as client, futures.ThreadPoolExecutor() as threads:
        call = threads.submit(lambda: client.publish("orders", {"id": "1"}, only_if_absent=condition))
        assert store.entered.wait(WAIT)
        held.stop(None)
        if goes:
            assert isinstance(call.result(WAIT), Published)
        else:
            error = call.exception(WAIT)
            assert isinstance(error, Unavailable)
            assert error.reason == "UNREACHABLE"
        store.release.set()
    assert keys_at(two[1]) == ({"1"} if goes else set())


def test_a_publish_that_its_peers_have_not_got_goes_elsewhere_once_its_instance_is_lost(
    connect: Connect, two: tuple[ServerProcess, ServerProcess]
) -> None:
    """F2, F12. Story: an instance lost its links and was killed a moment later. The publish had been made again there,
    and from then on it kept to that instance, so the kill was an error of the caller."""
    store = Unreplicated()
    held = grpc.server(futures.ThreadPoolExecutor(8))
    sow_pb2_grpc.add_SowServiceServicer_to_server(store, held)
    held.add_generic_rpc_handlers((describing(),))
    port = held.add_insecure_port("127.0.0.1:0")
    held.start()
    with (
        connect(f"127.0.0.1:{port},{two[1].address}") as client,
        futures.ThreadPoolExecutor() as threads,
    ):
        call = threads.submit(lambda: client.publish("orders", {"id": "1"}))
        assert store.entered.wait(WAIT), "it was made again here"
        held.stop(None)
        assert isinstance(call.result(WAIT), Published)
        store.release.set()
    assert keys_at(two[1]) == {"1"}


def test_a_get_that_renews_goes_elsewhere_only_if_it_was_certainly_not_applied(
    connect: Connect, two: tuple[ServerProcess, ServerProcess]
) -> None:
    """F2, L20: it was made again elsewhere like any read, so the record was touched there, too."""
    store = Store()
    held = grpc.server(futures.ThreadPoolExecutor(8))
    sow_pb2_grpc.add_SowServiceServicer_to_server(store, held)
    held.add_generic_rpc_handlers((describing(),))
    port = held.add_insecure_port("127.0.0.1:0")
    held.start()
    with two[1].client() as there:
        there.create_topic("slow", expiration="enabled")
        before = there.publish("slow", {}, key="1", ttl="1h")
        with (
            connect(f"127.0.0.1:{port},{two[1].address}") as client,
            futures.ThreadPoolExecutor() as threads,
        ):
            call = threads.submit(lambda: client.get("slow", "1", touch="2h"))
            assert store.entered.wait(WAIT)
            held.stop(None)
            error = call.exception(WAIT)
            assert isinstance(error, Unavailable)
            assert error.reason == "UNREACHABLE"
            store.release.set()
            found = client.get("slow", "1")
            assert found is not None, "the next read is made elsewhere"
            assert found.expire_time_micros == before.expire_time_micros


def test_dropping_the_last_reference_ends_a_client_of_several(two: tuple[ServerProcess, ServerProcess]) -> None:
    """The thread that watches its instance kept it, with its connection and a call at the server, for ever."""
    client = Client(",".join(server.address for server in two))
    client.publish("orders", {"id": "1"})
    transport = weakref.ref(client._transport)
    (watching,) = [thread for thread in threading.enumerate() if thread.name == "sow-watch"]
    del client
    gc.collect()
    assert transport() is None
    watching.join(WAIT)
    assert not watching.is_alive()


def test_dropping_the_last_reference_ends_an_asynchronous_client_of_several(
    two: tuple[ServerProcess, ServerProcess],
) -> None:
    """The task that watches its instance was a method of its transport, so the client lived as long as its loop."""

    async def use() -> None:
        client = AsyncClient(",".join(server.address for server in two))
        await client.publish("orders", {"id": "1"})
        transport = weakref.ref(client._transport)
        (watching,) = [task for task in asyncio.all_tasks() if task.get_name() == "sow-watch"]
        del client
        gc.collect()
        assert transport() is None
        done, _ = await asyncio.wait([watching], timeout=WAIT)
        assert done == {watching}

    asyncio.run(use())
