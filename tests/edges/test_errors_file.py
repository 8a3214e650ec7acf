"""The file of `--errors`: each refused record is there as a whole, to be mended and published again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sow_cli.command import sow
from sow_client import Client
from tests.support.servers.server import ServerProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = (
        "[topics.orders]\nkey = ['/id']\nmax_ttl = '1h'\n[topics.free]\n[topics.raw]\nmessage_type = 'binary'\n"
        "[topics.nameless]\nmessage_type = 'binary'\n"
        "[topics.brief]\nkey = ['/id']\nexpiration = 'enabled'\ndefault_ttl = '1h'\n"
    )
    with ServerProcess(tmp_path_factory.mktemp("errors"), config) as made:
        yield made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        yield made


def run(server: ServerProcess, *arguments: str) -> Result:
    return CliRunner().invoke(sow, ["--server", server.address, *arguments])


def told(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_refused_record_is_kept_mended_and_published_again(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.ndjson"
    lines = ['{"id": 1}', '{"id": 2, "price": 9,,5}', '{"name": "no key"}', '{"id": 4}', '{"id": 5, "größe": ]}']
    (tmp_path / "orders.ndjson").write_text("\n".join(lines))

    done = run(server, "publish", "orders", str(tmp_path / "orders.ndjson"), "--errors", str(bad))

    assert done.exit_code == 1
    found = told(bad)
    assert [one["line"] for one in found] == [2, 3, 5]
    assert [one.get("text", one.get("payload")) for one in found] == [lines[1], json.loads(lines[2]), lines[4]]
    assert [one.get("column") for one in found] == [22, None, 20]
    shown = done.stderr.splitlines()
    at = next(number for number, line in enumerate(shown) if lines[1] in line)
    assert shown[at + 1] == f"  {' ' * 21}^"

    found[0]["text"] = '{"id": 2, "price": 9.5}'
    found[1]["payload"] = {"name": "no key", "id": 3}
    found[2]["text"] = '{"id": 5, "größe": []}'
    bad.write_text("".join(json.dumps(one) + "\n" for one in found))
    again = run(server, "publish", "orders", "--records", str(bad))

    assert again.exit_code == 0, again.output
    assert sorted(record.key for record in client.query("orders")) == ["1", "2", "3", "4", "5"]
    assert client.get("orders", "5").data == {"id": 5, "größe": []}  # type: ignore[union-attr]  # it is there


def test_keys_and_lifetimes_are_kept_with_the_record(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    bad = tmp_path / "bad.ndjson"
    expires = time.time_ns() // 1_000 + 1_000_000_000
    line = {"key": "a", "expire_time_micros": expires, "payload": {"n": 1}}
    client.publish("free", {"n": 0}, key="a")
    (tmp_path / "in.ndjson").write_text(json.dumps(line) + "\n")

    done = run(server, "publish", "free", "--records", str(tmp_path / "in.ndjson"), "--if-absent", "--errors", str(bad))

    assert done.exit_code == 1
    assert {name: told(bad)[0][name] for name in line} == line
    again = run(server, "publish", "free", "--records", str(bad))
    assert again.exit_code == 0, again.output
    record = client.get("free", "a")
    assert record is not None
    assert (record.data, record.expire_time_micros) == ({"n": 1}, expires)


def test_each_of_many_refused_records_is_the_right_one(server: ServerProcess, tmp_path: Path) -> None:
    """Refusals come back later, from another thread, while further records are sent."""
    bad = tmp_path / "bad.ndjson"
    rows = [{"id": n, "n": n} if n % 7 else {"no": n} for n in range(1, 20_001)]
    (tmp_path / "many.ndjson").write_text("".join(json.dumps(row) + "\n" for row in rows))

    done = run(server, "publish", "orders", str(tmp_path / "many.ndjson"), "--batch", "100", "--errors", str(bad))

    assert done.exit_code == 1
    assert [(one["line"], one["payload"]) for one in told(bad)] == [(n, {"no": n}) for n in range(7, 20_001, 7)]


def test_a_strict_run_keeps_the_record_that_stopped_it(server: ServerProcess, tmp_path: Path) -> None:
    bad = tmp_path / "bad.ndjson"
    (tmp_path / "in.ndjson").write_text('{"id": 1}\n{"x": 1}\n{"id": 2}\n')
    run(server, "publish", "orders", str(tmp_path / "in.ndjson"), "--strict", "--errors", str(bad))
    assert [(one["line"], one["payload"]) for one in told(bad)] == [(2, {"x": 1})]


def test_lines_that_are_no_text_are_kept_in_base64(server: ServerProcess, tmp_path: Path) -> None:
    bad = tmp_path / "bad.ndjson"
    (tmp_path / "in.ndjson").write_bytes(b'{"id": "\xff"}\n')
    done = run(server, "publish", "orders", str(tmp_path / "in.ndjson"), "--errors", str(bad))
    assert done.exit_code == 1
    assert told(bad)[0]["base64"] == "eyJpZCI6ICL/In0="


def test_lines_of_records_are_mended_as_records(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    """A mended line of a record was published with the whole record as its document, and without its key."""
    bad = tmp_path / "bad.ndjson"
    (tmp_path / "in.ndjson").write_text(
        '{"key":"m1","payload":{"n":1},"expire_time_micros":"x"}\n{"key":"m2","payload":{]}\n'
    )

    done = run(server, "publish", "free", "--records", str(tmp_path / "in.ndjson"), "--errors", str(bad))

    assert done.exit_code == 1
    found = told(bad)
    assert found[0]["whole"] == {"key": "m1", "payload": {"n": 1}, "expire_time_micros": "x"}
    assert (found[1]["whole"], found[1]["column"]) == ('{"key":"m2","payload":{]}', 24)
    del found[0]["whole"]["expire_time_micros"]
    found[1]["whole"] = '{"key":"m2","payload":{"n":2}}'
    bad.write_text("".join(json.dumps(one) + "\n" for one in found))
    again = run(server, "publish", "free", "--records", str(bad))
    assert again.exit_code == 0, again.output
    records = [client.get("free", key) for key in ("m1", "m2")]
    assert [record and (record.data, record.expire_time_micros) for record in records] == [
        ({"n": 1}, None),
        ({"n": 2}, None),
    ]


def test_lines_of_base64_are_mended_as_base64(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    """The mended text of base64 was published as the payload itself."""
    bad = tmp_path / "bad.ndjson"
    (tmp_path / "in.txt").write_text("AAE!\n12345\n")
    assert run(server, "publish", "nameless", str(tmp_path / "in.txt"), "--errors", str(bad)).exit_code == 1
    found = told(bad)
    assert [one["payload"] for one in found] == ["AAE!", "12345"]
    found[0] |= {"payload": "AAE=", "key": "a"}
    bad.write_text(json.dumps(found[0]) + "\n")
    again = run(server, "publish", "raw", "--records", str(bad))
    assert again.exit_code == 0, again.output
    assert client.get("raw", "a").payload == b"\x00\x01"  # type: ignore[union-attr]  # it is there


def test_a_mended_document_gets_the_lifetime_of_its_topic(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """It never expired, as if it were a record of an export."""
    bad = tmp_path / "bad.ndjson"
    (tmp_path / "in.ndjson").write_text('{"no": 1}\n')
    run(server, "publish", "brief", str(tmp_path / "in.ndjson"), "--errors", str(bad))
    bad.write_text(bad.read_text().replace('"no"', '"id"'))
    assert run(server, "publish", "brief", "--records", str(bad)).exit_code == 0
    record = client.get("brief", "1")
    assert record is not None
    assert record.expire_time_micros is not None


def test_a_load_keeps_payloads_of_other_types_in_base64(server: ServerProcess, tmp_path: Path) -> None:
    bad = tmp_path / "bad.ndjson"
    (tmp_path / "in.ndjson").write_text("AAE!\n")
    assert run(server, "load", "raw", str(tmp_path / "in.ndjson"), "--errors", str(bad), "--force").exit_code == 1
    assert told(bad)[0]["payload"] == "AAE!"


def test_an_expire_time_that_cannot_be_is_told_of_its_record(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """It ended the run, and no other record was published."""
    bad = tmp_path / "bad.ndjson"
    stamps = (-5, 0, 1_000_000, time.time_ns() // 1_000 + 10**9)
    lines = [{"key": f"s{n}", "payload": {"n": n}, "expire_time_micros": stamp} for n, stamp in enumerate(stamps)]
    (tmp_path / "in.ndjson").write_text("".join(json.dumps(one) + "\n" for one in lines))

    done = run(server, "publish", "free", "--records", str(tmp_path / "in.ndjson"), "--errors", str(bad))

    assert done.exit_code == 1, done.output
    assert [(one["line"], one["expire_time_micros"]) for one in told(bad)] == list(enumerate(stamps[:3], 1))
    assert client.get("free", "s3") is not None
