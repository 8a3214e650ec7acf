"""The files that the command writes and reads, against a real server: exports, publishes and loads."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyarrow import ipc, parquet
from rich.progress import Progress

from sow_cli import command
from sow_cli.exporting import replaced
from sow_client import Client, PackedRecords
from tests.support.servers.forked_commands import sow
from tests.support.servers.server import ServerProcess
from tests.support.servers.terminals import REAL, SECONDS_MAX, Terminal, plain

TOPICS = """
[topics.orders]
key = ['/id']
expiration = 'enabled'
[topics.images]
message_type = 'binary'
"""
ORDERS = [
    {"id": 1, "price": 9.5, "note": "a,b"},
    {"id": 2, "price": 10, "at": {"bid": 1}},
    {"id": 3, "note": "", "at": {"ask": 2.5}, "odd": 1},
    {"id": 4, "odd": "x", "big": 2**70, "list": [1, 2]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("files"), TOPICS) as made:
        with made.client() as client:
            client.publish_many("orders", ORDERS[:3])
            client.publish("orders", ORDERS[3], expire_at=datetime(2030, 1, 1, tzinfo=UTC))
            client.publish("images", b"\x89PNG\r\n\x00\xff", key="logo")
        yield made
        assert not made.faults()


def run(server: ServerProcess, *arguments: object, given: bytes | None = None) -> Result:
    return CliRunner().invoke(command.sow, ["--server", server.address, *map(str, arguments)], input=given)


def done(server: ServerProcess, *arguments: object, given: bytes | None = None) -> dict[str, object]:
    """The result of a command that must succeed."""
    result = run(server, *arguments, given=given)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(told, dict)
    return told


def test_an_image_comes_back_as_it_went_in(server: ServerProcess) -> None:
    assert run(server, "get", "images", "logo", "--raw").stdout_bytes == b"\x89PNG\r\n\x00\xff"


# ---- exports ----


def test_several_topics_are_written_at_one_instant(server: ServerProcess, tmp_path: Path) -> None:
    """Q6. Each into a file of its own; nothing is left of any where one cannot be written."""
    files = tmp_path / "orders.ndjson", tmp_path / "images.csv"
    asked = ("export", "orders", files[0], "--also", "images", files[1])
    result = run(server, *asked)
    assert result.exit_code == 0, result.output
    one, other = map(json.loads, result.stdout.splitlines())
    assert [(one["topic"], one["records"]), (other["topic"], other["file"])] == [
        ("orders", 4),
        ("images", str(files[1])),
    ]
    assert (one["as_of_micros"], one["bookmark"]) == (other["as_of_micros"], other["bookmark"])
    assert len(files[0].read_text().splitlines()) == 4
    before = [file.read_bytes() for file in files]
    for wrong in ((*asked, "--also", "orders", tmp_path / "b.csv"), (*asked, "--also", "images", files[0])):
        assert run(server, *wrong).exit_code != 0
    assert (sorted(tmp_path.iterdir()), [file.read_bytes() for file in files]) == (sorted(files), before)


def test_no_file_of_several_takes_its_name_before_all_are_on_disk(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full as the last bytes of the first file go there: the other one has not taken its name."""
    files = tmp_path / "orders.ndjson", tmp_path / "images.csv"
    for file in files:
        file.write_text("old")
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if ".orders." in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert run(server, "export", "orders", files[0], "--also", "images", files[1]).exit_code != 0
    assert [(file, file.read_text()) for file in sorted(tmp_path.iterdir())] == [(files[1], "old"), (files[0], "old")]


def test_parquet_has_a_typed_column_for_each_field(server: ServerProcess, tmp_path: Path) -> None:
    told = done(server, "export", "orders", tmp_path / "orders.parquet")

    table = parquet.read_table(tmp_path / "orders.parquet")
    assert (told["records"], told["topic"]) == (4, "orders")
    assert {field.name: str(field.type) for field in table.schema} == {
        "_key": "string",
        "id": "int64",
        "price": "double",
        "note": "string",
        "at": "struct<bid: int64, ask: double>",
        "odd": "string",
        "big": "string",
        "list": "list<element: int64>",
        "_payload": "string",
        "_version": "int64",
        "_publish_time": "timestamp[us, tz=UTC]",
        "_expire_time": "timestamp[us, tz=UTC]",
        "_origin": "string",
        "_sequence": "int64",
    }
    rows = table.to_pylist()
    assert [row["id"] for row in rows] == [1, 2, 3, 4]
    assert [row["price"] for row in rows] == [9.5, 10.0, None, None]
    assert rows[1]["at"] == {"bid": 1, "ask": None}
    assert [row["odd"] for row in rows] == [None, None, "1", "x"]
    assert rows[3]["big"] == str(2**70), "no type holds it exactly, so it is text"
    whole = [row["_payload"] and json.loads(row["_payload"]) for row in rows]
    assert whole == [None, None, ORDERS[2], ORDERS[3]], "the records that their columns do not keep"
    assert [row["_expire_time"] for row in rows] == [None, None, None, datetime(2030, 1, 1, tzinfo=UTC)]


def test_arrow_and_csv_have_the_same_columns(server: ServerProcess, tmp_path: Path) -> None:
    done(server, "export", "orders", tmp_path / "orders.arrow", "--select", "/id,/at/bid,@key")
    with ipc.open_file(tmp_path / "orders.arrow") as file:
        table = file.read_all()
    assert table.to_pydict() == {
        "id": [1, 2, 3, 4],
        "/at/bid": [None, 1, None, None],
        "_key": ["1", "2", "3", "4"],
    }

    done(server, "export", "orders", tmp_path / "orders.csv", "--filter", "/id >= 3")
    with (tmp_path / "orders.csv").open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert list(rows[0])[:6] == ["_key", "id", "note", "at", "odd", "big"]
    assert [row["at"] for row in rows] == ['{"ask":2.5}', ""]
    assert rows[1]["big"] == str(2**70)
    assert rows[1]["_expire_time_micros"] == "1893456000000000"


@pytest.mark.parametrize(
    ("name", "options", "passes", "fields"),
    [
        ("a.parquet", (), 2, []),
        ("a.parquet", ("--select", "/id,/at/bid,@key"), 2, ["at", "id"]),
        ("a.arrow", ("--select", "@key,@version"), 1, []),
        ("a.csv", (), 2, []),
        ("a.csv", ("--select", "/id"), 1, ["id"]),
        ("a.ndjson", (), 1, []),
    ],
)
def test_a_snapshot_is_read_twice_only_where_all_records_tell_the_columns(
    server: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: tuple[str, ...],
    passes: int,
    fields: list[str],
) -> None:
    """Story: with --select, Parquet read whole payloads first, and the progress bar did not know of it."""
    asked: list[tuple[int, list[str]]] = []
    shown: list[tuple[float | None, float]] = []
    read, leave = Client.read_export, Progress.__exit__

    def counted(self: Client, export_id: str, part: int, **options: Any) -> Iterator[PackedRecords]:
        asked.append((part, list(options.get("fields", ()))))
        return read(self, export_id, part, **options)

    def left(self: Progress, *error: Any) -> None:
        shown.extend((task.total, task.completed) for task in self.tasks)
        leave(self, *error)

    monkeypatch.setattr(Client, "read_export", counted)
    monkeypatch.setattr(Progress, "__exit__", left)
    done(server, "export", "orders", tmp_path / name, *options)
    assert asked.count((0, fields)) == passes
    assert all(reduced == fields for _, reduced in asked)
    assert shown == [(4 * passes, 4 * passes)]


def test_an_export_for_spreadsheets_has_no_formulas(server: ServerProcess, tmp_path: Path) -> None:
    """X7."""
    with server.client() as client:
        client.create_topic("formulas")
        client.publish("formulas", {"a": "=1+2"}, key="k")
    done(server, "export", "formulas", tmp_path / "a.csv", "--select", "/a", "--csv-safe")
    assert (tmp_path / "a.csv").read_text() == "a\n'=1+2\n"
    assert run(server, "export", "formulas", tmp_path / "a.ndjson", "--csv-safe").exit_code == 2


def test_ndjson_is_as_a_query_writes_it(server: ServerProcess, tmp_path: Path) -> None:
    done(server, "export", "orders", tmp_path / "orders.ndjson")
    lines = run(server, "query", "orders").stdout_bytes
    assert (tmp_path / "orders.ndjson").read_bytes() == lines

    done(server, "export", "orders", tmp_path / "orders.json")
    array = json.loads((tmp_path / "orders.json").read_bytes())
    assert array == [json.loads(line) for line in lines.splitlines()]
    done(server, "export", "orders", tmp_path / "none.json", "--filter", "/id > 9")
    assert (tmp_path / "none.json").read_bytes() == b"[]\n"


def test_binary_payloads_are_one_column(server: ServerProcess, tmp_path: Path) -> None:
    done(server, "export", "images", tmp_path / "images.parquet")
    (row,) = parquet.read_table(tmp_path / "images.parquet").to_pylist()
    assert (row["_key"], row["payload"]) == ("logo", b"\x89PNG\r\n\x00\xff")


def test_parquet_and_arrow_go_to_a_pipe_as_well(server: ServerProcess) -> None:
    written = run(server, "query", "orders", "--format", "parquet", "--select", "/id,/price").stdout_bytes
    assert parquet.read_table(io.BytesIO(written)).to_pydict()["id"] == [1, 2, 3, 4]
    written = run(server, "get", "orders", "1", "--format", "arrow").stdout_bytes
    with ipc.open_stream(pa.py_buffer(written)) as stream:
        assert stream.read_all().to_pydict()["note"] == ["a,b"]
    written = run(server, "query", "orders", "--top", "1", "/id > 100", "--format", "arrow").stdout_bytes
    with ipc.open_stream(pa.py_buffer(written)) as stream:
        assert stream.read_all().num_rows == 0


def test_an_export_that_fails_leaves_the_older_file(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "orders.ndjson"
    file.write_text("older")

    assert run(server, "export", "nowhere", file).exit_code == 1
    assert run(server, "export", "orders", file, "--filter", "/price >").exit_code == 1

    assert file.read_text() == "older"
    assert [one.name for one in tmp_path.iterdir()] == ["orders.ndjson"]
    done(server, "export", "orders", file)
    assert len(file.read_text().splitlines()) == 4
    assert [one.name for one in tmp_path.iterdir()] == ["orders.ndjson"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left")], ids=["Ctrl-C", "full disk"])
def test_a_file_that_is_not_complete_never_has_the_name(tmp_path: Path, error: BaseException) -> None:
    file, link = tmp_path / "orders.csv", tmp_path / "link.csv"
    link.symlink_to(file)

    def fails() -> None:
        with replaced(link) as sink:
            sink.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fails()
    assert [one.name for one in tmp_path.iterdir()] == ["link.csv"]

    with replaced(link) as sink:
        sink.write(b"whole")
        assert not file.exists()
    assert (file.read_bytes(), link.is_symlink()) == (b"whole", True)


@pytest.mark.parametrize("arguments", [("orders.xlsx",), ("orders",), ("orders.ndjson", "--select", "/id")])
def test_a_file_that_cannot_be_written_is_wrong_usage(
    server: ServerProcess, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    assert run(server, "export", "orders", tmp_path / arguments[0], *arguments[1:]).exit_code == 2
    assert run(server, "export", "orders", tmp_path / "no" / "folder.csv").exit_code != 0
    assert list(tmp_path.iterdir()) == []


# ---- publishes ----


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv", "ndjson", "json"])
def test_an_export_is_published_as_the_same_records(server: ServerProcess, tmp_path: Path, suffix: str) -> None:
    topic = f"copy-{suffix}"
    with server.client() as client:
        client.create_topic(topic, key=("/id",), expiration="enabled")
    done(server, "export", "orders", tmp_path / f"orders.{suffix}")
    told = done(server, "publish", topic, tmp_path / f"orders.{suffix}")
    assert told["published"] == 4

    def records(name: str) -> list[tuple[object, object]]:
        lines = map(json.loads, run(server, "query", name).stdout.splitlines())
        return [(line["payload"], line.get("expire_time_micros")) for line in lines]

    assert records(topic) == records("orders")


def test_conditions_hold_against_what_is_there(server: ServerProcess) -> None:
    """Rule P3."""
    with server.client() as client:
        client.create_topic("locks", key=("/id",))
    told = done(server, "publish", "locks", "--if-absent", given=b'{"id":1}\n{"id":2}\n')
    assert told["published"] == 2
    again = run(server, "publish", "locks", "--if-absent", given=b'{"id":2,"x":1}\n{"id":3}\n')
    assert again.exit_code == 1
    assert "line 1: CONDITION_FAILED: " in again.stderr
    version = json.loads(run(server, "get", "locks", "2").stdout)["version"]
    assert run(server, "publish", "locks", "--data", '{"id":2}', "--if-version", str(version + 1)).exit_code == 1
    done(server, "publish", "locks", "--data", '{"id":2,"y":1}', "--if-version", str(version))
    assert json.loads(run(server, "get", "locks", "2").stdout)["payload"] == {"id": 2, "y": 1}
    assert run(server, "publish", "locks", "--if-present", given=b'{"id":9}\n').exit_code == 1
    assert done(server, "count", "locks")["count"] == 3


# ---- loads ----


def keys(server: ServerProcess, topic: str) -> list[str]:
    return run(server, "query", topic, "--keys-only", "--format", "raw").stdout.split()


@pytest.fixture
def venues(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[str]:
    """A topic with the records 1 and 2."""
    with server.client() as client:
        client.create_topic("venues", key=("/id",), expiration="enabled")
        client.publish_many("venues", [{"id": 1}, {"id": 2}])
        yield "venues"
        client.delete_topic("venues", force=True)


def test_a_load_replaces_the_content(server: ServerProcess, venues: str, tmp_path: Path) -> None:
    """Rule P9."""
    (tmp_path / "a.csv").write_text("id,name\n2,two\n3,three\n3,again\n")
    (tmp_path / "b.ndjson").write_text('{"id":4}\n')
    told = done(server, "load", venues, tmp_path / "a.csv", tmp_path / "b.ndjson", "--ttl", "1h", "--force")
    assert {name: told[name] for name in ("staged", "applied", "repeated", "deleted", "refused")} == {
        "staged": 4, "applied": 3, "repeated": 1, "deleted": 1, "refused": 0,
    }  # fmt: skip
    assert keys(server, venues) == ["2", "3", "4"]
    record = json.loads(run(server, "get", venues, "3").stdout)
    assert record["payload"] == {"id": 3, "name": "again"}
    assert "expire_time_micros" in record


def test_a_bad_record_leaves_everything_as_it_was(server: ServerProcess, venues: str, tmp_path: Path) -> None:
    """Rule P9."""
    bad = b'{"id":7}\nnonsense\n{"no":1}\n{"id":8}\n'
    result = run(server, "load", venues, "--force", "--errors", tmp_path / "bad", given=bad)
    assert result.exit_code == 1
    told = [line.split(":")[0] for line in result.stderr.splitlines()]
    assert told == ["line 2", "  nonsense", "  ^", "line 3", "nothing was changed"]
    assert [json.loads(line)["line"] for line in (tmp_path / "bad").read_bytes().splitlines()] == [2, 3]
    assert keys(server, venues) == ["1", "2"]
    assert run(server, "load", venues, "--force", "--skip-bad", given=bad).exit_code == 1
    assert keys(server, venues) == ["7", "8"]


def test_nothing_is_lost_by_mistake(server: ServerProcess, venues: str) -> None:
    assert run(server, "load", venues, given=b'{"id":9}').exit_code == 2, "nobody can be asked"
    empty = run(server, "load", venues, "--force", given=b"\n")
    assert (empty.exit_code, "the input has no record" in empty.stderr) == (1, True)
    assert run(server, "load", "nowhere", "--force", given=b"{}").exit_code == 1
    assert keys(server, venues) == ["1", "2"]
    with server.client() as client:
        assert [one.phase for one in client.loads(venues) if one.phase == "staging"] == [], "no load is left open"
    assert done(server, "load", venues, "--force", "--allow-empty", given=b"")["deleted"] == 2
    assert keys(server, venues) == []


def test_a_load_of_records_keeps_keys_and_expire_times(server: ServerProcess) -> None:
    with server.client() as client:
        client.create_topic("keyless", expiration="enabled")
        client.create_topic("loaded", expiration="enabled")
        client.publish("keyless", {"page": "/"}, key="alice", expire_at=datetime(2030, 1, 1, tzinfo=UTC))
        client.publish("keyless", {"page": "/b"}, key="bob")
    lines = run(server, "query", "keyless").stdout_bytes
    done(server, "load", "loaded", "--records", "--force", given=lines)
    rows = [json.loads(line) for line in run(server, "query", "loaded").stdout.splitlines()]
    assert [(row["key"], row.get("expire_time_micros")) for row in rows] == [
        ("alice", 1_893_456_000_000_000),
        ("bob", None),
    ]
    text = b"_key,page\nalice,/\n,/none\nbob,/b\n"
    result = run(server, "load", "loaded", "--as", "csv", "--force", "--skip-bad", given=text)
    assert "record 2: KEY_" in result.stderr
    assert keys(server, "loaded") == ["alice", "bob"]


# ---- on a terminal ----


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_a_load_asks_on_a_terminal_and_shows_its_progress(
    server: ServerProcess, venues: str, tmp_path: Path, terminals: list[Terminal]
) -> None:
    file = tmp_path / "venues.csv"
    file.write_text("id,name\n" + "".join(f"{number},name {number}\n" for number in range(3, 20_003)))
    text = ""
    for answer, code in (("n", 1), ("y", 0)):
        terminal = Terminal("--server", server.address, "load", venues, str(file), program=REAL)
        terminals.append(terminal)
        terminal.read_until(f"Replace the content of topic {venues}? [y/N]: ")
        terminal.type(f"{answer}\n")
        text = plain(terminal.read_until(None))
        assert terminal.process.wait(SECONDS_MAX) == code
        assert ("nothing was done" in text) is (code == 1)
    assert "reading" in text
    assert "100%" in text
    assert re.search("applied +20,000", text)
    assert re.search("deleted +2", text)


def test_an_export_shows_its_progress_on_a_terminal(
    server: ServerProcess, tmp_path: Path, terminals: list[Terminal]
) -> None:
    file = tmp_path / "orders.csv"
    terminals.append(Terminal("--server", server.address, "export", "orders", str(file), program=REAL))
    text = plain(terminals[0].read_until(None))
    assert terminals[0].process.wait(SECONDS_MAX) == 0
    assert "exporting" in text
    assert re.search("records +4", text)
    assert re.search(r"as of +20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", text)


def test_the_new_file_has_the_permissions_of_the_older_one(tmp_path: Path) -> None:
    """Story: a file that only its owner could read was readable by all after the next export."""
    file = tmp_path / "orders.csv"
    file.write_bytes(b"old")
    file.chmod(0o600)
    with replaced(file) as sink:
        sink.write(b"new")
        assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}, "also while it is written"
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o600)


def test_no_device_and_no_pipe_is_replaced(server: ServerProcess, tmp_path: Path) -> None:
    """Story: `sow export` by root, through a link to a device, made a regular file of the device."""
    os.mkfifo(tmp_path / "fifo.csv")
    (tmp_path / "link.csv").symlink_to(tmp_path / "fifo.csv")
    for name in ("fifo.csv", "link.csv", "no/orders.csv"):
        assert run(server, "export", "orders", tmp_path / name).exit_code == 2, name
    assert (tmp_path / "fifo.csv").is_fifo()


@pytest.mark.parametrize("form", ["ndjson", "csv", "table", "parquet"])
def test_a_full_disk_is_a_sentence(server: ServerProcess, form: str) -> None:
    """Story: a traceback."""
    with open("/dev/full", "wb") as full:
        made = subprocess.run(
            [sow(), "--server", server.address, "query", "orders", "--format", form],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=SECONDS_MAX,
            check=False,
        )
    assert (made.returncode, made.stderr.splitlines()[0]) == (1, b"sow: cannot write: No space left on device")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_full_disk_is_a_sentence_also_for_help(option: str) -> None:
    """Story: a traceback."""
    with open("/dev/full", "wb") as full:
        command = [sow(), option]
        made = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=SECONDS_MAX, check=False)
    assert (made.returncode, made.stderr.splitlines()[0]) == (1, b"sow: cannot write: No space left on device")


def test_a_closed_output_is_no_fault(server: ServerProcess) -> None:
    """Story: a traceback, as Python has no sys.stdout then."""
    command = 'exec "$0" -m sow_cli --server "$1" count orders <&- >&-'
    made = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, server.address],
        stderr=subprocess.PIPE,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert (made.returncode, made.stderr) == (0, b"")
