"""The parts of `sow bench` that need no server: its documents, its arithmetic, and the CPU time of a server."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from sow_cli.bench_plan import INDEXES_MAX, SAME_VALUE, Documents, Plan
from sow_cli.server_usage import (
    LocalProcess,
    MetricsPage,
    MetricsUnreadable,
    NoMeter,
    Usage,
    children,
    listening_sockets,
    local_meter,
    usage_of_page,
)
from sow_cli.workload import Measured
from tests.support.fakes.commands import client, run
from tests.support.fakes.fake_client import FakeClient

__all__ = ["client"]  # a fixture


@pytest.mark.parametrize("indexes", range(INDEXES_MAX + 1))
@pytest.mark.parametrize("extra", [0, 1, 100, 100_000])
def test_documents_are_json_of_exactly_the_length_asked_for(indexes: int, extra: int) -> None:
    smallest = Plan("t", records=5_000, payload_bytes=1, indexes=indexes).payload_bytes_min
    plan = Plan("t", records=5_000, payload_bytes=smallest + extra, indexes=indexes)
    for revision in (0, 1, 999):
        for number, document in zip([0, 4_999, 9_999], Documents(plan).make([0, 4_999, 9_999], revision), strict=True):
            assert len(document) == plan.payload_bytes
            fields = json.loads(document)
            assert fields["id"] == number
            assert set(fields) == {"id", "t", *(path[1:] for path in plan.index_paths)}


def test_more_fields_make_a_small_document_longer_and_stay_json() -> None:
    (document,) = Documents(Plan("t", payload_bytes=20)).make([7], more=b',"p":%d,"at":%d' % (3, 2**62))

    assert {name: json.loads(document)[name] for name in ("id", "p", "at")} == {"id": 7, "p": 3, "at": 2**62}


def test_few_records_share_an_indexed_value() -> None:
    plan = Plan("t", records=1_000, payload_bytes=100, indexes=1)
    documents = Documents(plan)
    values = [json.loads(document)["a"] for document in documents.make(range(1_000))]

    assert len(set(values)) == 1_000 // SAME_VALUE
    assert [documents.value(number) for number in range(1_000)] == values


def test_another_revision_changes_text_and_indexed_values() -> None:
    documents = Documents(Plan("t", records=1_000, payload_bytes=100, indexes=2))
    (first,), (second,) = (documents.make([5], revision) for revision in (0, 1))

    assert all(json.loads(first)[name] != json.loads(second)[name] for name in ("a", "b", "t"))


def test_latencies_are_samples_and_cpu_is_of_one_operation() -> None:
    measured = Measured("get", 200, 2.0, [float(number) for number in range(1, 101)], 0.001, 1)

    assert (measured.latency(0.5), measured.latency(0.99)) == (50.0, 99.0)
    assert measured.per_second == 100.0
    assert measured.cpu_micros == pytest.approx(5.0)
    assert Measured("get", 1, 1.0, [3.0], None, None).latency(0.5) == 3.0
    assert Measured("get", 1, 1.0, [3.0], None, None).cpu_micros is None


def test_the_figures_of_a_metrics_page_are_those_of_the_process() -> None:
    page = "# HELP\nprocess_cpu_seconds_total 12.5\nother 1\nprocess_resident_memory_bytes 2.5e+08\n"

    assert usage_of_page(page) == Usage(12.5, 250_000_000)
    with pytest.raises(MetricsUnreadable, match="process_resident_memory_bytes"):
        usage_of_page("process_cpu_seconds_total 12.5\n")


@pytest.mark.parametrize("figure", ["x", "NaN", "+Inf", "1_"])
@pytest.mark.parametrize("name", ["process_cpu_seconds_total", "process_resident_memory_bytes"])
def test_a_figure_of_a_metrics_page_that_is_no_number_is_told(name: str, figure: str) -> None:
    page = "process_cpu_seconds_total 12.5\nprocess_resident_memory_bytes 2.5e+08\n"

    with pytest.raises(MetricsUnreadable, match=name):
        usage_of_page("\n".join(f"{name} {figure}" if line.startswith(name) else line for line in page.split("\n")))


@pytest.mark.parametrize("answer", [b"\0\0\4\0\0\0\0\0\0", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nab"])
def test_an_answer_that_is_no_http_or_is_cut_off_is_an_unreadable_page(answer: bytes) -> None:
    """Story: `sow bench --metrics` with the port of gRPC ended with a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(MetricsUnreadable, match="not HTTP"):
            MetricsPage(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics").read()
        thread.join()


def test_the_process_that_listens_is_found_by_its_port_and_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        meter = local_meter(f"localhost:{port}")
        assert isinstance(meter, LocalProcess)
        usage = meter.read()
        assert usage is not None
        assert usage.cpu_seconds > 0
        assert usage.memory_bytes > 2**20
        assert len(list(listening_sockets(port))) == 1
    assert isinstance(local_meter(f"127.0.0.1:{port}"), NoMeter), "nothing listens there any more"


@pytest.mark.parametrize("server", ["sow.example:7450", "10.0.0.1:7450", "localhost", "[::1]:http", ""])
def test_a_server_elsewhere_or_an_address_without_a_port_has_no_meter(server: str) -> None:
    assert local_meter(server).read() is None


def process(proc: Path, pid: int, parent: int, *sockets: int) -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")
    (folder / "status").write_text("Name: x\nVmRSS:\t  2048 kB\n")
    for number, inode in enumerate(sockets):
        os.symlink(f"socket:[{inode}]", folder / "fd" / str(number))


def test_a_reader_process_that_shares_the_socket_is_a_child_and_not_the_server(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: 0100007F:1D1A 00000000:0000 {} 00000000:00000000 00:00000000 00000000  1000        0 {} 1\n"
    (tmp_path / "net" / "tcp").write_text(header + row.format("0A", 77) + row.format("01", 78))
    process(tmp_path, 100, 1, 77)
    process(tmp_path, 101, 100, 77)
    process(tmp_path, 102, 1, 78)

    assert list(listening_sockets(7450, tmp_path)) == ["77"]
    assert children(100, tmp_path) == [101]
    assert isinstance(local_meter("127.0.0.1:7450", tmp_path), LocalProcess)
    process(tmp_path, 103, 1, 77)
    assert isinstance(local_meter("127.0.0.1:7450", tmp_path), NoMeter), "two servers share the port"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--payload", "10"), "need"),
        (("--payload", "40", "--indexes", "4"), "need"),
        (("--payload", "2MiB"), "within"),
        (("--payload", "big"), "--payload"),
        (("--topics", "201"), "--topics"),
        (("--records", "5", "--topics", "6"), "6 topics cannot share 5 records"),
        (("--work", "publish,fly"), "'fly' is not one of publish"),
        (("--work", "index"), "--indexes"),
        (("--work", "deliver", "--subscribers", "0"), "--subscribers"),
        (("--seconds", "0"), "--seconds"),
        (("--indexes", "5"), "--indexes"),
        (("--durability", "hope"), "--durability"),
        (("--ttl", "30"), "--ttl"),
        (("--metrics", "127.0.0.1:9464"), "http://"),
        (("--metrics-token-file", __file__), "--metrics"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_created(
    client: FakeClient, arguments: tuple[str, ...], told: str
) -> None:
    done = run(client, "bench", *arguments)

    assert done.exit_code == 2
    assert told in done.stderr
    assert client.calls == []
