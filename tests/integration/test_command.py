"""The `sow` command against a real server: its output, and the exit code of every outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from sow_cli import command
from sow_cli.session import tell_move
from sow_client import Instance
from tests.support.servers.forked_commands import sow as forked_sow
from tests.support.servers.server import ROOT, ServerProcess, free_port

SAID_NO: Final = 1
WRONG_USAGE: Final = 2
NOT_REACHABLE: Final = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(
        tmp_path_factory.mktemp("command"), "[topics.orders]\nkey = ['/id']\nexpiration = '1h'\n"
    ) as made:
        yield made
        assert not made.faults()


class Ran:
    """The result of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def rows(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


def sow(address: str, *arguments: str, given: str = "") -> Ran:
    """Runs a command in this process, which saves the half second that the start of another takes."""
    done = CliRunner().invoke(command.sow, ["--server", address, *arguments], input=given)
    return Ran(done.exit_code, done.stdout, done.stderr)


def sow_process(address: str, *arguments: str, given: str = "") -> Ran:
    """Runs a command as a shell does."""
    done = subprocess.run(
        [sys.executable, "-m", "sow_cli", "--server", address, *arguments],
        input=given,
        check=False,  # the test looks at the exit code
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("proto", "clients"))},
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def test_a_records_way_through_the_commands(server: ServerProcess) -> None:
    address = server.address
    lines = "".join(json.dumps({"id": number, "price": number / 2}) + "\n" for number in range(100))
    assert sow_process(address, "publish", "orders", "-", "--ttl", "30m", given=lines).code == 0
    (count,) = sow(address, "count", "orders", "--format", "ndjson").rows
    assert list(count.values())[-1] == 100
    (record,) = sow(address, "get", "orders", "7").rows
    assert record["payload"] == {"id": 7, "price": 3.5}
    queried = sow(address, "query", "orders", "--top", "3", "--format", "ndjson")
    assert [row["key"] for row in queried.rows] == ["0", "1", "10"]
    assert sow(address, "touch", "orders", "7", "--ttl", "1h").code == 0
    assert sow(address, "persist", "orders", "7").code == 0
    (record,) = sow(address, "get", "orders", "7").rows
    assert "expire_time_micros" not in record
    assert sow(address, "delete", "orders", "--key", "7").code == 0
    assert sow(address, "get", "orders", "7").code == SAID_NO
    assert sow(address, "topics").code == 0
    cells = sow(address, "status", "--format", "ndjson").rows
    assert {status["state"] for status in cells} == {"serving"}


def test_filters_orders_and_deltas(server: ServerProcess) -> None:
    address = server.address
    lines = "".join(json.dumps({"id": f"f{number}", "price": number, "note": "x"}) + "\n" for number in range(10))
    assert sow(address, "publish", "orders", given=lines).code == 0
    of_these = "/id BEGINS WITH 'f' AND /price >= 6"
    found = sow(address, "query", "orders", of_these, "--order-by", "/price DESC", "--top", "2", "--select", "/price")
    assert [row["payload"] for row in found.rows] == [{"price": 9}, {"price": 8}]
    assert sow(address, "count", "orders", of_these).rows == [{"topic": "orders", "count": 4}]
    (plan,) = sow(address, "query", "orders", "/id = 'f1'", "--explain").rows
    assert (plan["access"], plan["scanned"], plan["returned"]) == ("points", 1, 1)
    delta = '{"id":"f6","price":66}\n'
    assert sow(address, "publish", "orders", "--delta", "--unset", "/note", given=delta).code == 0
    (merged,) = sow(address, "get", "orders", "f6").rows
    assert merged["payload"] == {"id": "f6", "price": 66}
    (deleted,) = sow(address, "delete", "orders", "--filter", of_these).rows
    assert (deleted["matched"], deleted["deleted"]) == (4, 4)
    for refused in (("query",), ("count",), ("subscribe",), ("delete", "--filter")):
        wrong = sow(address, refused[0], "orders", *refused[1:], "/price > AND true")
        assert wrong.code == SAID_NO
        assert wrong.err.splitlines()[1:3] == ["  /price > AND true", "           ^"]


def test_a_subscriber_follows_over_a_restart_of_the_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "[topics.orders]\nkey = ['/id']\n") as server:
        with server.client() as client:
            client.publish("orders", {"id": 1})
            arguments = ["subscribe", "orders", "--sow", "--oof", "--count", "3", "--for", "60s"]
            following = subprocess.Popen(
                [forked_sow(), "--server", server.address, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                assert following.stdout is not None
                assert [json.loads(following.stdout.readline())["op"] for _ in range(2)] == ["sow", "snapshot_end"]
                server.kill9()
                server.start()
                client.publish("orders", {"id": 2})
                client.sow_delete("orders", keys=["1"])
                put, gone = (json.loads(line) for line in following.stdout)
                assert (put["op"], put["payload"]) == ("put", {"id": 2})
                assert (gone["op"], gone["reason"], gone["previous"]["payload"]) == ("oof", "deleted", {"id": 1})
                assert following.wait(30) == 0
                assert following.stderr is not None
                lost, found = following.stderr.read().splitlines()
                assert lost.startswith("reconnecting … (")
                assert found == "connected again"
            finally:
                following.kill()
                following.communicate()


def test_a_refusal_of_the_server_gives_exit_code_1(server: ServerProcess) -> None:
    refused = sow(server.address, "query", "nowhere")
    assert refused.code == SAID_NO
    assert "TOPIC_NOT_FOUND" in refused.err
    assert not refused.out
    some = sow_process(server.address, "publish", "orders", "-", given='{"id":1}\n{"no":1}\n{"id":2}\n')
    assert some.code == SAID_NO
    assert "line 2" in some.err
    assert "KEY_FIELD_MISSING" in some.err
    assert "SET_IN_CONFIG" in sow(server.address, "topic", "alter", "orders", "--expiration", "1s").err


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("get", "orders"), ("touch", "orders", "1", "--ttl", "5"), ("publish", "orders", "/no")],
)
def test_exit_code_2_wrong_usage(server: ServerProcess, arguments: tuple[str, ...]) -> None:
    wrong = sow(server.address, *arguments)
    assert wrong.code == WRONG_USAGE
    assert wrong.err


def test_exit_code_2_of_the_process(server: ServerProcess) -> None:
    wrong = sow_process(server.address, "get", "orders")
    assert wrong.code == WRONG_USAGE
    assert "Traceback" not in wrong.err


def test_exit_code_3_not_reachable() -> None:
    unreachable = sow_process(f"127.0.0.1:{free_port()}", "status")
    assert unreachable.code == NOT_REACHABLE
    assert "UNREACHABLE" in unreachable.err


@pytest.mark.smoke
def test_a_record_expires_before_ones_eyes(server: ServerProcess) -> None:
    """Real time, the real server: there, and a second later gone, for the client and for the command."""
    with server.client() as client:
        stamp = client.publish("orders", {"id": "soon"}, ttl="1s").expire_time
        assert stamp is not None
        assert client.get("orders", "soon") is not None
        while client.get("orders", "soon") is not None:
            assert time.time() < stamp.timestamp() + 1, "it outlives its time"
            time.sleep(0.005)
        late = time.time() - stamp.timestamp()
        assert -0.1 < late < 0.5, f"gone {late:.3f} s after its time"
        assert sow(server.address, "get", "orders", "soon").code == SAID_NO
        assert client.status().overdue_records == 0


def test_of_several_instances_the_first_that_serves_is_used_and_shown(server: ServerProcess) -> None:
    addresses = f"127.0.0.1:{free_port()},{server.address}"
    (shown,) = sow(addresses, "instance").rows
    assert (shown["address"], shown["serving"]) == (server.address, True)
    assert sow(addresses, "publish", "orders", given='{"id": "one of several"}').code == 0
    (found,) = sow(server.address, "get", "orders", "one of several").rows
    assert found["key"] == "one of several"
    assert sow("a,,b", "status").code == WRONG_USAGE


def test_a_move_is_told_to_the_person(capsys: pytest.CaptureFixture[str]) -> None:
    left, used = (Instance(f"{name}:1", name, name, "e", "", True, "1") for name in ("ldn", "par\x1b[2J"))
    tell_move(left, used, "UNREACHABLE")
    told = capsys.readouterr().err
    assert "ldn at ldn:1" in told
    assert "UNREACHABLE" in told
    assert "\x1b" not in told
