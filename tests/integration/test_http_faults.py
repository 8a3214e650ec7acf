"""Callers of `sow http` that stall, stop, or send too much are told, or lose their connection; no other notices."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from sow_http.events import LOG_BYTES_MAX
from tests.integration.test_http import JSON, LINES, stream
from tests.support.servers.certificates import Authority
from tests.support.servers.http_door import RunningDoor, running_door
from tests.support.servers.server import ServerProcess

LARGE: Final = "x" * 200_000
RECORDS: Final = 60
"""Together much more than the log and the buffers of a connection hold."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("faults")) as made:
        yield made


@pytest.fixture(scope="module")
def door(server: ServerProcess) -> Iterator[RunningDoor]:
    with running_door(server.address) as made:
        yield made


def opened(door: RunningDoor, path: str) -> socket.socket:
    """A stream of events that takes little at once."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    raw.settimeout(30)
    raw.connect(("127.0.0.1", door.port))
    raw.sendall(f"GET /v1/topics/{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return raw


def rest_of(raw: socket.socket) -> str:
    """What the stream still has, to its end, without the sizes of its chunks."""
    with raw, raw.makefile("rb") as file:
        while file.readline().strip():
            pass  # the head
        told = b""
        while size := int(file.readline() or b"0", 16):
            told += file.read(size)
            file.readline()
    return told.decode()


def numbers(told: str) -> list[int]:
    """The numbers in the events of a stream. Each event is whole."""
    assert told.endswith("\n\n")
    return [json.loads(line)["data"]["n"] for line in re.findall(r"^data: (.*\"data\".*)$", told, re.MULTILINE)]


@pytest.mark.slow
def test_a_listener_that_stops_reading_disturbs_nobody_and_goes_on_later(
    server: ServerProcess, door: RunningDoor
) -> None:
    with door.client() as http, server.client() as client:
        client.publish("stops", {"n": -1}, key="0")
        with stream(http, "stops/changes") as take, opened(door, "stops/changes") as stopped:
            assert stopped.recv(10) == b"HTTP/1.1 2"
            assert len(client.subscriptions("stops")) == 1
            for number in range(RECORDS):
                client.publish("stops", {"n": number, "text": LARGE}, key="1")
                assert take(lambda event: True)["data"]["n"] == number
            told = rest_of(stopped)
        seen = numbers(told)
        assert seen == list(range(len(seen)))
        assert len(seen) < RECORDS
        last = json.loads(told.splitlines()[-2].removeprefix("data: "))
        assert (last["reason"], "event: problem" in told) == ("LISTENER_BEHIND", True)
        bookmark = re.findall(r"^id: (.*)$", told, re.MULTILINE)[-1]
        with stream(http, "stops/changes", bookmark) as take:
            for number in range(len(seen), RECORDS):
                assert take(lambda event: True)["data"]["n"] == number


@pytest.mark.slow
def test_a_snapshot_larger_than_the_log_comes_whole_to_a_slow_client(server: ServerProcess, door: RunningDoor) -> None:
    with server.client() as client:
        for number in range(RECORDS):
            client.publish("large", {"n": number, "text": LARGE}, key=f"{number:02}")
    assert RECORDS * len(LARGE) > 10 * LOG_BYTES_MAX
    with opened(door, "large/changes?snapshot=true") as raw, raw.makefile("rb") as file:
        seen = []
        for line in file:
            if line.startswith(b"data: {}"):
                break
            seen += [int(found) for found in re.findall(rb'"n":(\d+)', line[:200])]
    assert seen == list(range(RECORDS)), line[:1000]


def test_a_connection_without_a_whole_head_ends_and_others_are_answered(door: RunningDoor) -> None:
    with socket.create_connection(("127.0.0.1", door.port)) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nX-Long: " + b"x" * 70_000)
        raw.settimeout(30)
        assert raw.recv(1_000).startswith(b"HTTP/1.1 400")
        with door.client() as http:
            assert http.get("/healthz").json() == {"status": "ok"}


def test_a_line_that_is_too_large_is_told_with_its_number_and_the_lines_before_it_stay(door: RunningDoor) -> None:
    body = b'{"id":1}\n\n{"id":2,"x":"' + b"x" * 17_000_000 + b'"}\n{"id":3}\n'
    with door.client() as http:
        answer = http.post("/v1/topics/long/records?key=/id", content=body, headers=LINES)
        told = answer.json()
        assert (answer.status_code, told["reason"], told["applied"]) == (413, "PAYLOAD_TOO_LARGE", 1)
        assert told["detail"].startswith("line 3: it exceeds")
        assert http.get("/v1/topics/long/count").json() == {"count": 1}


def test_https_is_spoken_with_a_certificate(server: ServerProcess, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    issued = authority.issue("door")
    https = ("--https-cert", str(issued.certificate), "--https-key", str(issued.key))
    with running_door(server.address, *https) as door:
        assert door.address.startswith("https://")
        with door.client(verify=authority.file) as http:
            assert http.put("/v1/topics/safe/records/1", content=b'{"x":1}', headers=JSON).status_code == 200
            assert http.get("/v1/topics/safe/records/1").json() == {"x": 1}
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(door.address.replace("https", "http") + "/healthz")
