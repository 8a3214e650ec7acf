"""A hidden value occurs in nothing that a caller, a log, a metric or the audit log is told (rules A4, A5, A8).

Every method of the contract is called by callers with rows and hidden fields, with the requests of
`tests/unit/access/test_noninterference.py` and with an empty one; a new method is called, too. The callers never name
the hidden values, so an answer that has one of them tells it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from sow.v1 import access_pb2, admin_pb2, load_pb2, replication_pb2, snapshot_pb2, sow_pb2
from sow_client import SowError
from sow_server.access.audit import Part
from tests.support.oracles.access import GUARDED, audit_file, client_of, grant, identity, write_access
from tests.support.servers.metrics_endpoint import page
from tests.support.servers.server import ServerProcess, free_port
from tests.unit.access.test_noninterference import HIDE, REQUESTS, RIGHTS, ROWS

CANARY: Final = "canary4711"
NUMBER: Final = 918_273_645_546_372
"""Also a canary."""
SERVICES: Final[list[ServiceDescriptor]] = [
    service
    for module in (sow_pb2, admin_pb2, snapshot_pb2, load_pb2, access_pb2, replication_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
FRAMES_MAX: Final = 30


def forms_of_number(number: int) -> list[bytes]:
    """A number as text, and as protobuf and the packed columns write it."""
    varint = bytearray()
    left = number
    while left:
        varint.append(left & 0x7F | (0x80 if left > 0x7F else 0))
        left >>= 7
    return [str(number).encode(), bytes(varint), struct.pack("<q", number)]


FORMS: Final = [CANARY.encode(), CANARY.encode().hex().encode(), *forms_of_number(NUMBER)]


def tells(data: bytes, depth: int = 3) -> bool:
    """Whether a canary is in there, as it is or encoded, as tokens are."""
    if any(form in data for form in FORMS):
        return True
    for found in re.findall(rb"[A-Za-z0-9+/_-]{12,}={0,2}", data) if depth else []:
        for altchars in (b"+/", b"-_"):
            for start in range(4):
                text = found[start:].rstrip(b"=")
                try:
                    decoded = base64.b64decode(text + b"=" * (-len(text) % 4), altchars)
                except binascii.Error:
                    continue
                if tells(decoded, depth - 1):
                    return True
    return False


def test_canaries_are_found_in_tokens() -> None:
    token = base64.urlsafe_b64encode(json.dumps(["x", base64.b64encode(b"key-" + CANARY.encode()).decode()]).encode())
    assert tells(b"page " + token)
    assert tells(b"\x08" + forms_of_number(NUMBER)[1])
    assert not tells(b"nothing to see " * 100)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("canary")
    access = "".join(
        identity(name, name) + grant(name, "orders", f"{RIGHTS} create load topic-admin", restriction)
        for name, restriction in (("rows", ROWS), ("both", f"{ROWS}\n{HIDE}"))
    )
    write_access(folder, access + identity("nobody"))
    metrics = f"audit_reads = true\n[metrics]\nlisten = '127.0.0.1:{free_port()}'\n[log]\nlevel = 'debug'\n"
    with ServerProcess(folder, GUARDED + metrics) as made:
        with client_of(made, "root") as root:
            for topic in ("orders", f"elsewhere-{CANARY}"):
                root.create_topic(topic, key=["/id"], expiration="enabled", index=["/price", "/secret"])
            for number in range(20):
                hidden = {"secret": f"{CANARY}-{number}", "client": {"iban": [NUMBER, CANARY], "name": "n"}}
                keys = [f"a{number:02}", f"a{number:02}-{CANARY}", f"z-{CANARY}-{number}"]
                for key in keys:
                    root.publish("orders", {"id": key, "region": "us", "price": NUMBER, **hidden})
                visible = {"id": f"b{number:02}", "region": "eu", "price": number, "client": {"name": "n"}}
                root.publish("orders", visible)
            root.sow_delete("orders", keys=[f"z-{CANARY}-1"])
        yield made


class Caller:
    """Calls any method, and keeps all the bytes that it is told."""

    def __init__(self, server: ServerProcess, name: str, channel: grpc.Channel) -> None:
        self._server = server
        self._metadata = (("authorization", f"Bearer {name}"),)
        self._channel = channel
        self.know: dict[str, Any] = {"page": "", "export": "none"}
        self.told: list[tuple[str, bytes]] = []

    def call(self, method: MethodDescriptor, request: Any) -> None:
        """Calls, and keeps the responses, the status and the metadata."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        write = type(request).SerializeToString
        call: Any
        if method.client_streaming:
            call = self._channel.stream_stream(path, write)(iter([request]), timeout=20, metadata=self._metadata)
        else:
            make: Any = self._channel.unary_stream(path, write)  # takes the one response of a unary method, too
            call = make(request, timeout=20, metadata=self._metadata)
        try:
            for number, response in enumerate(call):
                self.told.append((path, response))
                self._learn(method, response)
                if method.name == "Subscribe" and (number >= FRAMES_MAX or _is_progress(response, number)):
                    call.cancel()
                    break
        except grpc.RpcError:
            self.told.append((path, (call.details() or "").encode()))
        for name, value in (*(call.initial_metadata() or ()), *(call.trailing_metadata() or ())):
            self.told.append((path, name.encode() + (value if isinstance(value, bytes) else value.encode())))

    def _learn(self, method: MethodDescriptor, response: bytes) -> None:
        match GetMessageClass(method.output_type).FromString(response):
            case snapshot_pb2.OpenExportResponse() as opened:
                self.know["export"] = opened.export_id
            case snapshot_pb2.ReadExportResponse() as read if read.resume_token:
                self.know["resume"] = read.resume_token
            case sow_pb2.QueryResponse() as queried if queried.footer.next_page_token:
                self.know["page"] = queried.footer.next_page_token


def _read_all(caller: Caller, methods: dict[str, MethodDescriptor]) -> None:
    """Reads all records in an export and in pages, one at a time: behind each record comes another key."""
    caller.call(methods["OpenExport"], snapshot_pb2.OpenExportRequest(topic="orders", parts=3))
    for part in range(3):
        request = snapshot_pb2.ReadExportRequest(export_id=caller.know["export"], part=part, batch_size=1)
        caller.call(methods["ReadExport"], request)
    for order in ("", "/secret DESC, /price", "/client/iban", "@key DESC"):
        token = ""
        for _ in range(20):
            request_of_page = sow_pb2.QueryRequest(topic="orders", order_by=order, page_size=1, page_token=token)
            caller.call(methods["Query"], request_of_page)
            token = caller.know["page"]


def _is_progress(response: bytes, number: int) -> bool:
    frame = sow_pb2.SubscribeResponse.FromString(response)
    return number > 0 and frame.HasField("progress")


def world_of(server: ServerProcess, caller: Caller) -> Any:
    """The part of a world that the requests to both use."""
    with client_of(server, "root") as root:
        status = root.status()
        records = {
            record.key.encode(): SimpleNamespace(key=record.key.encode(), version=record.version, origin=record.origin)
            for record in root.query("orders")
        }
    bookmark: Callable[[int], str] = lambda sequence: f"{status.journal_epoch}.{sequence}"  # noqa: E731  # its name there
    wall = int(status.clock_time.timestamp() * 1e6)
    return SimpleNamespace(
        know=caller.know,
        bookmark=bookmark,
        head=bookmark(status.last_sequence),
        rig=SimpleNamespace(
            time=SimpleNamespace(wall_micros=wall),
            live=lambda topic: records,
            store=SimpleNamespace(origins=SimpleNamespace(names={one.origin: one.origin for one in records.values()})),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("rows", marks=pytest.mark.long), "both", "nobody"])
def test_no_answer_of_sql_has_a_hidden_value(server: ServerProcess, name: str) -> None:
    answered = 0
    with client_of(server, name) as client:
        for text in (
            "SELECT * FROM orders",
            "SELECT secret, client, typeof(client) FROM orders",
            "SELECT id, price FROM orders WHERE price > 3 OR region = 'us'",
            "SELECT id FROM orders WHERE _key > 'a' AND price = $n",
            "SELECT max(price), min(id), list(secret) FROM orders",
            "SELECT secre FROM orders",
            "SELECT id FROM orders WHERE price = 'x'",
            "SELECT client.iban FROM orders ORDER BY 1",
            "SELECT price + secret FROM orders",
            "SELECT * FROM elsewhere",
        ):
            for push in (True, False):
                try:
                    with client.sql(text, {"n": 3} if "$n" in text else None, push=push) as result:
                        told = f"{result.schema} {list(result.rows())} {result.topics}"
                        answered += 1
                except SowError as error:
                    told = f"{error} {error.details}"
                assert not tells(told.encode()), (text, push)
    assert answered or name == "nobody"


@pytest.mark.parametrize("name", [pytest.param("rows", marks=pytest.mark.long), "both", "nobody"])
def test_no_answer_has_a_hidden_value(server: ServerProcess, name: str) -> None:
    with grpc.insecure_channel(server.address) as channel:
        caller = Caller(server, name, channel)
        world = world_of(server, caller)
        methods = {method.name: method for service in SERVICES for method in service.methods}
        _read_all(caller, methods)
        for method_name in [*REQUESTS, *methods.keys() - REQUESTS.keys()]:
            method = methods[method_name]
            kind = GetMessageClass(method.input_type)
            for make in (lambda world: {}, *REQUESTS.get(method_name, [])):
                request: Any = kind(**make(world))
                if method_name == "Subscribe":
                    request.progress_micros = 100_000
                caller.call(method, request)
    assert {path for path, data in caller.told if tells(data)} == set()
    assert len({path for path, _ in caller.told}) == len(methods), "every method has told something"
    if name != "nobody":
        assert any(b"b07" in data for _, data in caller.told), "and some of them records"


def test_no_log_metric_or_audit_line_has_a_hidden_value(server: ServerProcess) -> None:
    with client_of(server, "rows") as rows:
        rows.count("orders")
    folder = server.config.parent
    listen = re.search(r"listen = '127\.0\.0\.1:(\d+)'", server.config.read_text())
    assert listen is not None
    status, metrics = page(("127.0.0.1", int(listen[1])), "/metrics")
    assert status == 200
    names = f"elsewhere-{CANARY}".encode()  # operators see the names of topics
    for told in (
        metrics,
        *(audit_file(folder, part).read_bytes() for part in Part),
        (folder / "server.log").read_bytes(),
    ):
        assert len(told) > 100
        for line in told.replace(names, b"elsewhere").splitlines():
            assert not tells(line, depth=0), line
