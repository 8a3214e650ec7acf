"""Peers that come and go by command, while servers run (rule R14)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sow_client import AlreadyExists, Client, FailedPrecondition, InvalidArgument, NotFound, ReplicationUnavailable
from tests.support.oracles.access import GUARDED, client_of, peer, write_access
from tests.support.servers.server import DidNotStart, ServerProcess, free_port, until

SECONDS = 30.0
TOPICS = '[topics.orders]\nkey = ["/id"]\nexpiration = "enabled"\n'
READY = '[replication]\ntoken = "secret"\nserve_links = true\nsync_timeout = "500ms"\n'


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Instance:
    """A server that is ready for peers, and names none in its configuration."""

    def __init__(self, folder: Path, name: str, stack: ExitStack, replication: str = READY) -> None:
        self.name = name
        text = f'[server]\ninstance = "{name}"\n{replication}{TOPICS}'
        self.server = ServerProcess(folder / name, text, port=free_port(), start=False)
        stack.enter_context(self.server)
        self.server.start()
        self.client: Client = stack.enter_context(self.server.client())

    def joins(self, *others: Instance, sync: bool = False) -> None:
        """Links it with others, both ways."""
        for other in others:
            self.client.add_peer(other.name, other.server.address, sync=sync)
            other.client.add_peer(self.name, self.server.address, sync=sync)

    def leaves(self, *others: Instance) -> None:
        for other in others:
            self.client.remove_peer(other.name)
            other.client.remove_peer(self.name)

    def links(self) -> dict[str, str]:
        return {link.peer: link.state for link in self.client.replication_status().outgoing}

    def lag(self) -> int:
        return sum(link.lag_sequences for link in self.client.replication_status().outgoing)

    def state(self) -> dict[str, tuple[int, bytes]]:
        return {record.key: (record.version, record.payload) for record in self.client.query("orders")}


def streaming(*instances: Instance) -> bool:
    return all(set(one.links().values()) == {"streaming"} and one.lag() == 0 for one in instances)


@pytest.mark.long
def test_a_third_instance_joins_and_leaves_while_publishes_run(tmp_path: Path, stack: ExitStack) -> None:
    """R14."""
    a, b = Instance(tmp_path, "a", stack), Instance(tmp_path, "b", stack)
    a.client.publish("orders", {"id": "before"})
    a.joins(b, sync=True)
    until(lambda: streaming(a, b), SECONDS, "the first two")
    going, published = threading.Event(), [0, 0]

    def publish(number: int, instance: Instance) -> None:
        while not going.is_set():
            key = f"{instance.name}{published[number] % 500}"
            instance.client.publish("orders", {"id": key, "n": published[number]}, durability="replicated")
            published[number] += 1

    threads = [threading.Thread(target=publish, args=one) for one in enumerate((a, b))]
    stack.callback(going.set)
    for thread in threads:
        thread.start()
    until(lambda: min(published) > 20, SECONDS, "publishes")
    c = Instance(tmp_path, "c", stack)
    c.joins(a, b)
    until(lambda: set(c.links().values()) == {"streaming"}, SECONDS, "the third")
    until(lambda: "before" in c.state(), SECONDS, "the seed")
    c.leaves(a, b)
    assert c.links() == {}
    assert set(a.links()) == {"b"}
    reached = min(published)
    until(lambda: min(published) > reached + 20, SECONDS, "publishes without the third")
    c.joins(a, b)
    going.set()
    for thread in threads:
        thread.join()
    until(lambda: streaming(a, b, c), SECONDS, "all three")
    until(lambda: a.state() == b.state() == c.state(), SECONDS, "equal records")
    assert len(c.state()) == 1 + sum(min(500, count) for count in published)


def test_what_was_deleted_stays_deleted_when_a_removed_instance_comes_back(tmp_path: Path, stack: ExitStack) -> None:
    """R14, R4."""
    a, b = Instance(tmp_path, "a", stack), Instance(tmp_path, "b", stack)
    a.joins(b)
    a.client.publish("orders", {"id": "dead"})
    a.client.publish("orders", {"id": "alive"})
    until(lambda: len(b.state()) == 2, SECONDS, "both records at b")
    a.leaves(b)
    a.client.sow_delete("orders", keys=["dead"])
    b.joins(a)
    until(lambda: streaming(a, b), SECONDS, "the links")
    until(lambda: set(a.state()) == set(b.state()) == {"alive"}, SECONDS, "the delete")


def test_peers_and_pauses_survive_a_restart(tmp_path: Path, stack: ExitStack) -> None:
    """R14."""
    a, b = Instance(tmp_path, "a", stack), Instance(tmp_path, "b", stack)
    a.joins(b, sync=True)
    until(lambda: streaming(a, b), SECONDS, "the links")
    a.client.pause_peer("b")
    assert a.client.replication_status().outgoing[0].mode == "downgraded"
    with pytest.raises(ReplicationUnavailable):
        a.client.publish("orders", {"id": 1}, durability="replicated")
    a.server.terminate()
    a.server.start()
    (link,) = a.client.replication_status().outgoing
    assert (link.state, link.origin, link.peer, link.mode) == ("paused", "command", "b", "downgraded")
    assert b.state() == {}
    a.client.resume_peer("b")
    until(lambda: set(b.state()) == {"1"}, SECONDS, "the record that was kept")
    until(lambda: a.client.replication_status().outgoing[0].mode == "sync", SECONDS, "b to count again")
    a.client.publish("orders", {"id": 2}, durability="replicated")
    assert set(b.state()) == {"1", "2"}


def test_the_configuration_wins_and_its_peers_are_changed_there(tmp_path: Path, stack: ExitStack) -> None:
    """R14."""
    a, b = Instance(tmp_path, "a", stack), Instance(tmp_path, "b", stack)
    a.joins(b)
    until(lambda: streaming(a, b), SECONDS, "the links")
    a.server.terminate()
    a.server.configure(
        f'[server]\ninstance = "a"\n{READY}[[replication.peers]]\nname = "b"\naddress = "{b.server.address}"\n{TOPICS}'
    )
    a.server.start()
    until(lambda: streaming(a, b), SECONDS, "the link to go on")
    assert a.client.replication_status().outgoing[0].origin == "file"
    changes: list[Callable[[], None]] = [
        lambda: a.client.remove_peer("b"),
        lambda: a.client.add_peer("b", "127.0.0.1:9"),
    ]
    for change in changes:
        with pytest.raises(FailedPrecondition, match="configuration file") as caught:
            change()
        assert caught.value.reason == "SET_IN_CONFIG"
    a.client.pause_peer("b")
    assert a.links() == {"b": "paused"}


def test_refused_commands_say_why_and_change_nothing(tmp_path: Path, stack: ExitStack) -> None:
    """R14."""
    a = Instance(tmp_path, "a", stack)
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    a.client.add_peer("b", "127.0.0.1:9")
    with pytest.raises(AlreadyExists) as caught:
        a.client.add_peer("b", "127.0.0.1:8")
    assert caught.value.reason == "PEER_EXISTS"
    faults: list[Callable[[], None]] = [
        lambda: a.client.add_peer("a", "127.0.0.1:8"),  # itself
        lambda: a.client.add_peer("c", "127.0.0.1:9"),  # the address of another one
        lambda: a.client.add_peer("c", "db.example:9"),  # another machine, without TLS
        lambda: a.client.add_peer("c", "127.0.0.1"),
        lambda: a.client.add_peer("c"),
        lambda: a.client.add_peer("c", accept=True, sync=True),
        lambda: a.client.add_peer("c", "127.0.0.1:8", topics_pattern="("),
        lambda: a.client.add_peer("c", "127.0.0.1:8", filter_text="/a ="),
        lambda: a.client.add_peer("c", "127.0.0.1:8", token_file="token"),  # no absolute path
        lambda: a.client.add_peer("c", "127.0.0.1:8", token_file=str(token)),  # others may read it
        lambda: a.client.add_peer("b", accept=True, replace=True),
    ]
    for wrong in faults:
        with pytest.raises(InvalidArgument):
            wrong()
    for unknown in (a.client.remove_peer, a.client.pause_peer, a.client.resume_peer):
        with pytest.raises(NotFound) as missing:
            unknown("z")
        assert (missing.value.reason, missing.value.details["field"]) == ("PEER_NOT_FOUND", "name")
    with pytest.raises(NotFound):
        a.client.add_peer("z", "127.0.0.1:8", replace=True)
    a.client.add_peer("source", accept=True)
    with pytest.raises(NotFound, match="only sends here"):
        a.client.pause_peer("source")
    assert set(a.links()) == {"b"}
    a.client.add_peer("b", "127.0.0.1:7", replace=True)
    assert a.client.replication_status().outgoing[0].address == "127.0.0.1:7"


def test_an_instance_that_serves_no_links_says_how_to_make_it_ready(tmp_path: Path, stack: ExitStack) -> None:
    """R14."""
    a = Instance(tmp_path, "a", stack, replication="")
    with pytest.raises(FailedPrecondition, match="serve_links = true") as caught:
        a.client.add_peer("b", "127.0.0.1:9")
    assert caught.value.reason == "SET_IN_CONFIG"


def test_a_start_that_would_forget_added_peers_is_refused(tmp_path: Path, stack: ExitStack) -> None:
    """R14. Nobody notices a link that is silently gone."""
    a = Instance(tmp_path, "a", stack)
    a.client.add_peer("b", "127.0.0.1:9")
    a.server.terminate()
    a.server.configure(f'[server]\ninstance = "a"\n{TOPICS}')
    with pytest.raises(DidNotStart, match=r"serve_links: must be true, because peers were added by command \(b\)"):
        a.server.start()
    a.server.configure(f'[server]\ninstance = "a"\n{READY}{TOPICS}')
    a.server.start()
    a.client.remove_peer("b")
    assert a.links() == {}


def test_with_an_access_file_a_peer_has_to_be_in_it_and_every_command_is_audited(
    tmp_path: Path, stack: ExitStack
) -> None:
    """R14, R11, A8."""
    folder = tmp_path / "a"
    write_access(folder, "")
    text = GUARDED.replace("[server]", '[server]\ninstance = "a"') + "[replication]\nserve_links = true\n" + TOPICS
    server = stack.enter_context(ServerProcess(folder, text))
    root = stack.enter_context(client_of(server, "root"))
    with pytest.raises(InvalidArgument, match="access file"):
        root.add_peer("b", "127.0.0.1:9")
    write_access(folder, peer("b"))
    root.reload_access()
    root.add_peer("b", "127.0.0.1:9")
    root.pause_peer("b")
    root.resume_peer("b")
    root.remove_peer("b")
    audited = (folder / "audit.jsonl").read_text(encoding="utf-8")
    for method in ("AddPeer", "PausePeer", "ResumePeer", "RemovePeer"):
        assert f"AdminService/{method}" in audited
