"""The life of a server process: its start with possible faults, restarts, its orderly end."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sow_client import Ack, SowError
from tests.support.servers.server import DYNAMIC, DidNotStart, ServerProcess, health, reason_of, until

CONFIG: Final = """
[server]
instance = "nyc-1"
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.plain]
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, CONFIG) as made:
        yield made
        assert not made.faults()


def told(server: ServerProcess, *arguments: str) -> str:
    """The one message with which a start is refused; it is one line, and the exit code is 2."""
    server.launch(*arguments)
    with pytest.raises(DidNotStart) as refused:
        server.await_ready()
    assert refused.value.code == 2
    (line,) = refused.value.said.splitlines()
    assert line.startswith("sow-server: ")
    return line


# --- the start -------------------------------------------------------------------------------------------------------


def test_ready_says_where_and_as_whom(server: ServerProcess) -> None:
    (ready,) = server.events("ready")
    assert ready["address"] == server.address
    assert ready["instance"] == "nyc-1"
    assert ready["data_dir"] == str(server.data)
    for line in server.said.splitlines():
        assert {"time", "level", "event", "logger"} <= json.loads(line).keys()


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ServerProcess(tmp_path, port=port, start=False) as server:
            assert f"cannot listen on 127.0.0.1:{port}" in told(server)


def test_a_second_server_on_a_port_is_refused_and_the_first_continues(server: ServerProcess, tmp_path: Path) -> None:
    port = int(server.address.rpartition(":")[2])
    with ServerProcess(tmp_path / "second", CONFIG, port=port, start=False) as second:
        assert "cannot listen" in told(second)
    with server.client() as client:
        assert client.status().state == "serving"


def test_a_second_server_on_a_data_directory_is_refused_and_the_first_continues(
    server: ServerProcess, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "second", CONFIG, start=False) as second:
        second.data = server.data
        message = told(second)
        assert str(server.data) in message
        assert "another sow-server is using this data directory" in message
    with server.client() as client:
        client.publish("plain", {}, key="1")
    # The lock goes with the process, however that ends.
    server.kill9()
    server.start()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[server\n", [":1:"]),
        ("[server]\nlisen = 'x'\n", ["[server]", "lisen", "listen"]),
        ("[topics.orders]\nexpiration = '5'\n", ["[topics.orders]", "expiration"]),
        ("[topics._orders]\n", ["_orders"]),
        ("[topics.orders]\nmax_ttl = '1s'\nmin_ttl = '2s'\n", ["orders", "min_ttl"]),
        ("[topics.orders]\nmessage_type = 'binary'\nkey = ['/id']\n", ["orders", "binary"]),
        ("[server.tls]\ncertificate = 'none.pem'\nkey = 'none.key'\n", ["none.pem"]),
        ("[metrics]\nlisten = 'nowhere'\n", ["[metrics]", "nowhere"]),
    ],
)
def test_a_bad_configuration_is_one_message(tmp_path: Path, config: str, words: list[str]) -> None:
    with ServerProcess(tmp_path, config, start=False) as server:
        message = told(server)
        for word in words:
            assert word in message


def test_a_missing_configuration_and_an_impossible_data_directory_are_reported(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, start=False) as server:
        server.config.unlink()
        assert str(server.config) in told(server)
        server.configure(DYNAMIC)
        (tmp_path / "file").write_text("")
        server.data = tmp_path / "file" / "data"
        assert str(server.data) in told(server)


def test_an_address_that_others_reach_needs_tls_or_the_word(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, start=False) as server:
        assert "--insecure" in told(server, "--listen", "0.0.0.0:0")
        server.launch("--listen", "0.0.0.0:0", "--insecure")
        server.await_ready()
        assert server.terminate() == 0


def test_a_topic_of_the_file_that_contradicts_its_data_is_reported(server: ServerProcess) -> None:
    with server.client() as client:
        client.publish("plain", {}, key="1")
    assert server.terminate() == 0
    server.configure(CONFIG + "key = ['/id']\n")
    message = told(server)
    assert "[topics.plain]" in message
    assert "changes only while the topic is empty" in message
    server.configure(CONFIG)
    server.start()


# --- restarts --------------------------------------------------------------------------------------------------------


def test_a_restart_keeps_everything_and_counts_on(server: ServerProcess) -> None:
    with server.client() as client:
        client.publish("orders", {"id": 1}, ttl="1h")
        before = client.publish("orders", {"id": 2})
        client.create_topic("made", expiration="5s")
        status = client.status()
    server.restart()
    with server.client() as client:
        assert {record.key for record in client.query("orders")} == {"1", "2"}
        after = client.publish("orders", {"id": 3})
        assert after.version > before.version
        assert after.sequence == before.sequence + 1, "an orderly stop gives back the reserved sequences"
        assert client.describe_topic("made").settings.expiration == "5s"
        again = client.status()
        assert (again.instance_id, again.journal_epoch) == (status.instance_id, status.journal_epoch)


@pytest.mark.parametrize("killed", [False, True])
def test_records_that_fall_due_while_the_server_is_down_are_gone_at_the_first_request(
    server: ServerProcess, killed: bool
) -> None:
    with server.client() as client:
        with client.publisher("orders") as publisher:
            for number in range(3_000):
                publisher.publish({"id": number}, ttl=0.6 if number % 2 else 3600)
        due = time.monotonic() + 0.7
    if killed:
        server.kill9()
    else:
        assert server.terminate() == 0
    time.sleep(max(0.0, due - time.monotonic()))
    server.start()
    with server.client() as client:
        assert client.get("orders", "1") is None
        assert client.get("orders", "0") is not None
        assert client.count("orders") == 1_500
        assert {int(record.key) % 2 for record in client.query("orders")} == {0}
        assert client.publish("orders", {"id": 1}, only_if_absent=True).version
        until(lambda: client.status().overdue_records == 0, 5, "the sweep")
        assert client.status().live_records == 1_501


def test_a_topic_that_leaves_the_file_stays_as_an_administrators(server: ServerProcess) -> None:
    with server.client() as client:
        client.publish("orders", {"id": 1})
        assert reason_of(lambda: client.alter_topic("orders", expiration="1h")) == "SET_IN_CONFIG"
    assert server.terminate() == 0
    server.configure("[topics.plain]\n")
    server.start()
    with server.client() as client:
        assert not client.describe_topic("orders").set_in_config
        assert client.count("orders") == 1
        client.alter_topic("orders", expiration="1h")
    assert server.terminate() == 0
    server.configure(CONFIG)  # and back: the file owns it again, and declares it
    server.start()
    with server.client() as client:
        assert client.describe_topic("orders").set_in_config
        assert client.describe_topic("orders").settings.expiration == "enabled"
        assert client.count("orders") == 1


def test_dynamic_topics_only_where_they_are_allowed(server: ServerProcess) -> None:
    with server.client() as client:
        assert reason_of(lambda: client.publish("new", {}, key="1")) == "TOPIC_NOT_FOUND"
    assert server.terminate() == 0
    server.configure(CONFIG.replace("[server]", "[server]\ndynamic_topics = true"))
    server.start()
    with server.client() as client:
        client.publish("new", {}, key="1", ttl="1h")
        topic = client.describe_topic("new")
        assert (topic.set_in_config, topic.settings.expiration, tuple(topic.settings.key)) == (False, "enabled", ())
        assert reason_of(lambda: client.publish("_new", {}, key="1")) == "TOPIC_NAME_INVALID"
        assert reason_of(lambda: client.count("other")) == "TOPIC_NOT_FOUND", "reading creates nothing"
        assert reason_of(lambda: client.sow_delete("other", keys=["1"])) == "TOPIC_NOT_FOUND"


# --- the end ---------------------------------------------------------------------------------------------------------


def test_an_orderly_stop_under_load_loses_nothing_acknowledged(server: ServerProcess) -> None:
    """Story: a prune that was under way at the stop was logged as a failed job, with a traceback."""
    acknowledged: dict[str, int] = {}
    failures: list[BaseException] = []
    going = threading.Barrier(4)

    def publish(name: str) -> None:
        acknowledged[name] = 0

        def heard(ack: Ack) -> None:
            acknowledged[name] += ack.applied

        try:
            with server.client() as client:
                durability = "buffered" if name == "a" else "fsync"
                publisher = client.publisher(
                    "orders",
                    batch_records=50,
                    retry_for=0.0,
                    on_ack=heard,
                    durability=durability,  # type: ignore[arg-type]  # one of its two names
                )
                try:
                    for count in itertools.count():
                        publisher.publish({"id": f"{name}{count}"})
                        if count == 1_000:
                            going.wait(20)
                        if count % 200 == 0:
                            time.sleep(0.005)
                finally:
                    publisher.abort()
        except SowError as error:
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(name,), daemon=True) for name in "abc"]
    for thread in threads:
        thread.start()
    going.wait(20)
    time.sleep(0.1)
    assert server.terminate() == 0
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(failures) == 3
    assert server.events("stopped")
    assert all(count > 0 for count in acknowledged.values())
    server.start()
    with server.client() as client:
        keys = {record.key for record in client.query("orders", keys_only=True)}
        for name, count in acknowledged.items():
            assert keys >= {f"{name}{n}" for n in range(count)}
        assert client.count("orders") == len(keys)


def test_a_publisher_lives_through_a_restart_and_each_record_is_applied_once(server: ServerProcess) -> None:
    with server.client() as client:
        with client.publisher("orders", batch_records=20, retry_for=30) as publisher:
            for number in range(2_000):
                publisher.publish({"id": number})
                if number == 700:
                    publisher.flush()
                    server.restart()
                if number == 1_400:
                    server.kill9()
                    server.start()
        assert publisher.applied + publisher.duplicates == 2_000
        assert client.count("orders") == 2_000


def test_an_interrupt_stops_it_as_well(server: ServerProcess) -> None:
    server.signal(signal.SIGINT)
    assert server.wait() == 0


def test_stopping_twice_is_stopping_once(server: ServerProcess) -> None:
    server.signal(signal.SIGTERM)
    server.signal(signal.SIGTERM)
    server.signal(signal.SIGINT)
    assert server.wait() == 0


def test_calls_that_are_under_way_get_the_grace_and_no_more(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "[server]\ndynamic_topics = true\nstop_grace = '500ms'\n") as server:
        with server.client() as client:
            with client.publisher("big", durability="buffered") as publisher:
                for number in range(8_000):  # of 16 MB the server keeps 4 MiB that nobody reads
                    publisher.publish({"pad": "x" * 2_000}, key=str(number))
            result = client.query("big")
            next(result)  # and it is read no further
            started = time.monotonic()
            server.signal(signal.SIGTERM)
            until(lambda: _not_serving(server), 5, "health to say that it is stopping")
            assert server.wait() == 0
            assert time.monotonic() - started < 8
            with pytest.raises(SowError):
                list(result)
        assert not server.faults()


def _not_serving(server: ServerProcess) -> bool:
    try:
        return health(server.address) == "NOT_SERVING"
    except Exception:  # it no longer takes calls
        return True
