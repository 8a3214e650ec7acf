"""Files that people have, of other programs and of `sow export`, are read as what they hold, or refused."""

from __future__ import annotations

import base64
import bz2
import csv
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyarrow import ipc, parquet

from sow_cli import command
from sow_client import NEVER, Client, InvalidArgument
from tests.support.servers.server import ServerProcess

FILES = Path(__file__).parent / "files"
STAMP = datetime(2030, 1, 1, tzinfo=UTC)
PAYLOADS: dict[str, list[bytes]] = {
    "json": [
        b'{"id":1,"zip":"01234","n":18446744073709551615,"none":null,"text":"12"}',
        b'{"id":2,"zip":"12345","n":1,"text":"","nested":{"a":null,"b":[1,2.0]}}',
        b'{"id":3,"text":"two\\nlines, \\"quoted\\"","n":-1,"mixed":1}',
        b'{"id":4,"mixed":"x","price":10}',
        b'{"id":5,"mixed":"{}","price":10.0}',
    ],
    "fix": [
        b"35=D\x0155=IBM\x01453=2\x01448=A\x01448=B\x01",  # a tag that is there twice
        b"35=D\x0158=\x0155=IBM\x01",
        b"35=D\x0155=\xe4\xf6\x01",
        b"55=IBM\x0135=D\x01",
    ],
    "nvfix": [b"sym=IBM\x01px=9.50\x01px=9.60\x01", b"sym=\x01", b"sym=\xff\x01"],
    "msgpack": [
        msgspec.msgpack.encode({"a": 2**64 - 1, "b": b"\x00\xff", "c": [1.5, None]}),
        msgspec.msgpack.encode({"a": -1, "b": "text", "d": {"e": None}, "f": float("nan")}),
        msgspec.msgpack.encode({"a": None, "b": "12", "t": datetime(2024, 1, 1, tzinfo=UTC)}),
    ],
    "binary": [b"\x89PNG\r\n\x00", b"", b"null"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("edges")) as made:
        yield made
        assert not made.faults()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        made.create_topic("frames")
        yield made


def run(server: ServerProcess, *arguments: object, given: bytes | None = None) -> Result:
    return CliRunner().invoke(command.sow, ["--server", server.address, *map(str, arguments)], input=given)


def done(server: ServerProcess, *arguments: object, given: bytes | None = None) -> str:
    result = run(server, *arguments, given=given)
    assert result.exit_code == 0, result.output
    return result.stderr


def records(client: Client, topic: str) -> list[tuple[str, bytes, int | None]]:
    return [(one.key, one.payload, one.expire_time_micros) for one in client.query(topic)]


def documents(client: Client, topic: str) -> list[object]:
    return [json.loads(one.payload) for one in client.query(topic)]


# ---- exports ----


def same(message_type: str, payload: bytes) -> object:
    """A payload as it must come back: its values with their types; of fix its bytes."""
    if message_type == "json":
        return repr(sorted(json.loads(payload).items()))
    if message_type != "msgpack":
        return payload
    return repr(sorted(msgspec.msgpack.decode(payload).items()))


@pytest.mark.parametrize(
    ("message_type", "kind"),
    # The types and files that are left out here: test_exports_again.py.
    [
        *[("json", kind) for kind in ("csv", "ndjson", "json", "parquet", "arrow", "csv.gz", "ndjson.zst", "json.gz")],
        *[(message_type, kind) for message_type in PAYLOADS if message_type != "json" for kind in ("csv", "parquet")],
    ],
)
def test_an_export_published_again_is_the_same_content(
    server: ServerProcess, client: Client, tmp_path: Path, message_type: str, kind: str
) -> None:
    """Story: `sow export rt rt.csv` and `sow publish rt rt.csv` made every record permanent, a field of FIX that is
    there twice came back once, an empty text not at all, and `.ndjson` was refused."""
    topic = f"again-{message_type}-{kind}"
    for name in (topic, f"{topic}-loaded"):
        client.create_topic(name, message_type=message_type, expiration="1h")  # type: ignore[arg-type]  # one of its names
    for number, payload in enumerate(PAYLOADS[message_type]):
        lifetime = {"ttl": NEVER} if number % 2 else {"expire_at": STAMP}
        client.publish(topic, payload, key=f"k,{number}", **lifetime)
    before = [(key, same(message_type, payload), stamp) for key, payload, stamp in records(client, topic)]

    done(server, "export", topic, tmp_path / f"rt.{kind}")
    client.sow_delete(topic, filter="@key IS NOT NULL")
    done(server, "publish", topic, tmp_path / f"rt.{kind}")
    done(server, "load", f"{topic}-loaded", tmp_path / f"rt.{kind}", "--force")

    for name in (topic, f"{topic}-loaded"):
        after = [(key, same(message_type, payload), stamp) for key, payload, stamp in records(client, name)]
        assert after == before, name


def test_a_lifetime_on_the_command_line_is_for_every_record(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    client.create_topic("lives", expiration="enabled")
    client.publish("lives", {"a": 1}, key="k", expire_at=STAMP)
    done(server, "export", "lives", tmp_path / "lives.csv")
    done(server, "export", "lives", tmp_path / "lives.ndjson")
    for name in ("lives.csv", "lives.ndjson"):
        done(server, "publish", "lives", tmp_path / name, "--ttl", "never")
        assert records(client, "lives") == [("k", b'{"a":1}', None)]
        done(server, "publish", "lives", tmp_path / name, "--records", "--ttl", "never")
        assert client.query("lives").to_arrow(metadata=["expire_time"])["_expire_time"].to_pylist() == [STAMP]
    result = run(server, "publish", "lives", tmp_path / "lives.ndjson", "--no-records")
    assert (result.exit_code, "KEY_REQUIRED" in result.stderr) == (1, True), "the line is a document without a key"


def test_an_edited_cell_is_never_dropped_for_the_whole_record_beside_it(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """A row that its columns do not keep has its record twice: the column `_payload` must not hide a change."""
    client.publish("edited", {"a": 1, "b": None}, key="k")
    client.publish("edited", {"a": 2}, key="l")
    file = tmp_path / "edited.csv"
    done(server, "export", "edited", file)
    file.write_text(file.read_text().replace("k,1,", "k,7,").replace("l,2,", "l,8,"))
    result = run(server, "publish", "edited", file)
    assert result.exit_code == 1
    assert "record 1: PAYLOAD_MALFORMED: column a: it is another value than in the record" in result.stderr
    assert documents(client, "edited") == [{"a": 1, "b": None}, {"a": 8}]

    done(server, "export", "edited", file, "--lossy")
    assert "_payload" not in file.read_text()
    file.write_text(file.read_text().replace("k,1,", "k,7,"))
    done(server, "publish", "edited", file)
    assert documents(client, "edited") == [{"a": 7}, {"a": 8}]


def test_an_export_that_pandas_wrote_anew_keeps_its_texts_and_stamps(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """pandas writes no quotation marks around a text, and floats for whole numbers beside missing ones."""
    client.create_topic("anew", expiration="enabled")
    client.publish("anew", {"zip": "01234", "n": 1}, key="a", expire_at=STAMP)
    client.publish("anew", {"zip": "12345", "n": 2}, key="b")
    done(server, "export", "anew", tmp_path / "a.csv")
    frame = pd.read_csv(tmp_path / "a.csv", dtype={"zip": str})
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        frame.to_csv(tmp_path / "b.csv", index=False, quoting=quoting)
        done(server, "publish", "anew", tmp_path / "b.csv")
        assert documents(client, "anew") == [{"zip": "01234", "n": 1}, {"zip": "12345", "n": 2}]
        assert records(client, "anew")[0][2] == 1_893_456_000_000_000


# ---- CSV of other programs ----


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_an_empty_text_is_no_missing_field_also_in_a_delta(
    server: ServerProcess, client: Client, tmp_path: Path, suffix: str
) -> None:
    """Story: a delta that empties a field left the old value."""
    topic, tab = f"empty-{suffix}", "," if suffix == "csv" else "\t"
    client.create_topic(topic, key=("/id",))
    client.publish(topic, {"id": 1, "a": "x", "b": "y", "n": 5})
    (tmp_path / f"delta.{suffix}").write_text(tab.join(["id", "a", "b", "n"]) + "\n" + tab.join(["1", '""', "", '""']))
    done(server, "publish", topic, "--delta", tmp_path / f"delta.{suffix}", "--types", "n=number")
    assert documents(client, topic) == [{"id": 1, "a": "", "b": "y", "n": 5}], '`""` is no number'


EXCEL = 'id;name;price\r\n1;"Müller, ""jr"";";9,5\r\n2;"two\nlines";\r\n'
EXPECTED = [{"id": 1, "name": 'Müller, "jr";', "price": "9,5"}, {"id": 2, "name": "two\nlines"}]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (EXCEL.encode("utf-8-sig"), ()),  # "CSV UTF-8" of a Windows with decimal commas
        (EXCEL.encode("cp1252"), ("--encoding", "cp1252")),  # "CSV"
        (("sep=;\r\n" + EXCEL).encode(), ()),
        (EXCEL.replace(";", "\t").replace('"jr""\t"', '"jr"";"').encode("utf-16"), ()),  # "Unicode text"
        (EXCEL.replace("\r\n", "\r").replace("two\nlines", "two lines").encode(), ()),  # of an old Mac
    ],
    ids=["UTF-8", "cp1252", "sep", "UTF-16", "CR"],
)
def test_csv_of_excel_is_read(server: ServerProcess, client: Client, data: bytes, options: tuple[str, ...]) -> None:
    topic = f"excel-{abs(hash(data))}"
    client.create_topic(topic, key=("/id",))
    done(server, "publish", topic, "--as", "csv", *options, given=data)
    assert documents(client, topic) in (EXPECTED, [EXPECTED[0], EXPECTED[1] | {"name": "two lines"}])


def test_bytes_of_another_encoding_are_bad_records_and_name_the_option(server: ServerProcess, client: Client) -> None:
    client.create_topic("latin", key=("/id",))
    result = run(server, "publish", "latin", "--as", "csv", given="id,name\n1,Müller\n2,x\n".encode("latin-1"))
    assert result.exit_code == 1
    assert "record 1: PAYLOAD_MALFORMED: a text is no UTF-8; see --encoding" in result.stderr
    assert documents(client, "latin") == [{"id": 2, "name": "x"}]
    wrong = run(server, "publish", "latin", "--as", "csv", "--encoding", "ascii", given="id\nü\n".encode())
    assert (wrong.exit_code, "is no text in ascii" in wrong.stderr) == (2, True)
    assert run(server, "publish", "latin", "--encoding", "hex", given=b"").exit_code == 2


# ---- JSON of other programs ----


def test_documents_of_jq_over_several_lines_are_read(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    """`jq .` writes one after the other, and no array around them."""
    client.create_topic("jq", key=("/id",))
    some = [{"id": 1, "a": [1, 2]}, {"id": 2, "b": {"c": "}\n{"}}]
    (tmp_path / "jq.json").write_text("\n".join(json.dumps(one, indent=2) for one in some) + "\n")
    done(server, "publish", "jq", tmp_path / "jq.json")
    assert documents(client, "jq") == some


# ---- Parquet and Arrow of other programs ----


def test_parquet_of_duckdb_is_read(server: ServerProcess, client: Client) -> None:
    client.create_topic("duckdb", key=("/id",))
    done(server, "publish", "duckdb", FILES / "duckdb.parquet")
    assert documents(client, "duckdb") == [
        {
            "id": 1,
            "name": 'é,"x',
            "price": 12.5,
            "ref": "5aac7e05-36cb-421b-bb06-00097fdafb21",
            "at": "2024-01-02T03:04:05.678901",
            "zoned": "2024-01-02T03:04:05Z",
            "day": "2024-01-02",
            "counts": {"a": 1, "b": 2},
            "list": [1, 2],
            "st": {"x": 1},
            "en": "b",
            "big": 2**64 - 1,
            "flag": True,
        }
    ]
    table = parquet.read_table(FILES / "duckdb.parquet")
    assert client.publish_frame("duckdb-frame", table, key="name") == 1
    (document,) = documents(client, "duckdb-frame")
    assert isinstance(document, dict)
    assert (document["counts"], document["big"]) == ({"a": 1, "b": 2}, 2**64 - 1)


def test_the_index_of_pandas_that_has_no_name_is_no_field(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    client.create_topic("pandas", key=("/id",))
    pd.DataFrame({"id": [1, 2]}, index=["x", "y"]).to_parquet(tmp_path / "index.parquet")
    done(server, "publish", "pandas", tmp_path / "index.parquet")
    assert documents(client, "pandas") == [{"id": 1}, {"id": 2}]
    pd.DataFrame({"a": [1]}, index=pd.Index([7], name="id")).to_parquet(tmp_path / "named.parquet")
    done(server, "publish", "pandas", tmp_path / "named.parquet")
    assert documents(client, "pandas")[2] == {"a": 1, "id": 7}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_values_that_only_their_writer_knows_are_refused_in_a_sentence(
    server: ServerProcess, tmp_path: Path, kind: str
) -> None:
    """Story: periods were published as ordinals, and the opaque types of DuckDB as bytes in base64."""
    opaque = pa.opaque(pa.binary(), "bit", "DuckDB")
    for name, column in (
        ("period", pa.array(pd.Series(pd.period_range("2024-01", periods=1, freq="M")))),
        ("opaque", pa.ExtensionArray.from_storage(opaque, pa.array([b"\x04\xfa"], pa.binary()))),
    ):
        table = pa.table({"id": [1], name: column})
        file = tmp_path / f"odd.{kind}"
        if kind == "parquet":
            parquet.write_table(table, file)
        else:
            with ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        result = run(server, "publish", "odd", file)
        assert (result.exit_code, f"the column {name} has the type" in result.stderr) == (2, True), result.output


# ---- frames ----


@pytest.mark.parametrize(
    ("frame", "options", "told"),
    [
        (
            pd.DataFrame({"a": ["x", "y"], "t": np.array(["2024-01-01", "0000-01-01"], dtype="datetime64[s]")}),
            {},
            "row 1: /t has no form",
        ),
        (pa.table({"a": ["x", "y"], "ttl": ["1s", "-1s"]}), {"ttl_column": "ttl"}, "row 1: "),
        (pa.table({"a": ["x", "y"], "ttl": ["1s", "soon"]}), {"ttl_column": "ttl"}, "row 1: "),
        (pa.table({"a": ["x", "y"], "k": [[1], [2]]}), {"key": "k"}, "row 0: "),
        (pa.table({"a": ["x", "y" * (16 * 2**20)], "k": ["1", "2"]}), {"key": "k"}, "row 1: data: the payload of"),
        (pa.table({"a": ["x", "y"], "k": ["1", "k" * 600_000]}), {"key": "k"}, "row 1: key: "),
    ],
    ids=["year 0", "negative", "no duration", "key", "payload", "long key"],
)
def test_a_row_that_cannot_be_sent_ends_the_call_before_the_first_one(
    client: Client, frame: object, options: dict[str, Any], told: str
) -> None:
    """Story: of 5,000 rows 4,000 were published when the row of a bad lifetime came."""
    with pytest.raises(InvalidArgument, match=told) as caught:
        client.publish_frame("frames", frame, **({"key": "a"} | options))
    assert caught.value.details["row"] == told[4]
    assert client.count("frames") == 0


# ---- compressed files ----


def test_compressed_files_are_read_by_their_names_and_contents(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    client.create_topic("packed", key=("/id",))
    lines = [f'{{"id":{number}}}\n'.encode() for number in range(4)]
    members = gzip.compress(lines[0] + lines[1]) + gzip.compress(lines[2]) + gzip.compress(lines[3])
    frames = b"".join(pa.compress(line, "zstd", asbytes=True) for line in lines)
    sink = io.BytesIO()
    parquet.write_table(pa.table({"id": [0, 1, 2, 3]}), sink)
    for name, data in (
        ("members.ndjson.gz", members),
        ("frames.NDJSON.ZST", frames),
        ("no-suffix", members),
        ("a.csv.gz", gzip.compress(b"id\n0\n1\n2\n3\n")),
        ("a.parquet.gz", gzip.compress(sink.getvalue())),
        ("array.json.zst", pa.compress(b"[" + b",".join(lines) + b"]", "zstd", asbytes=True)),
    ):
        (tmp_path / name).write_bytes(data)
        done(server, "publish", "packed", tmp_path / name)
        assert documents(client, "packed") == [{"id": number} for number in range(4)], name
        client.sow_delete("packed", filter="/id >= 0")
    done(server, "publish", "packed", given=members)
    assert client.count("packed") == 4


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_a_compressed_file_that_breaks_off_never_counts_as_shorter(
    server: ServerProcess, client: Client, tmp_path: Path, packing: str
) -> None:
    client.create_topic(f"cut-{packing}", key=("/id",))
    lines = b"".join(b'{"id":%d}\n' % number for number in range(1000))
    data = gzip.compress(lines) if packing == "gz" else pa.compress(lines, "zstd", asbytes=True)
    (tmp_path / f"cut.ndjson.{packing}").write_bytes(data[:-6])
    for arguments in (("publish",), ("load", "--force")):
        result = run(server, arguments[0], f"cut-{packing}", tmp_path / f"cut.ndjson.{packing}", *arguments[1:])
        assert (result.exit_code, f"cut.ndjson.{packing} is no complete file of" in result.stderr) == (2, True)


def test_other_files_are_refused_with_what_to_do(server: ServerProcess, tmp_path: Path) -> None:
    archive, workbook = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("orders.csv", "id\n1\n")
    with zipfile.ZipFile(workbook, "w") as made:
        made.writestr("[Content_Types].xml", "<Types/>")
    for name, data, told in (
        ("a.csv.bz2", bz2.compress(b"id\n1\n"), "bunzip2 -c"),
        ("a.ndjson.xz", lzma.compress(b"{}\n"), "xz -dc"),
        ("a.zip", archive.getvalue(), "unzip -p"),
        ("a.csv.gz", b"id\n1\n", "is no complete file of gzip"),
        ("a.xlsx", workbook.getvalue(), "save it as CSV"),
        ("mail.bin", workbook.getvalue(), "save it as CSV"),
        ("a.xls", base64.b16decode("D0CF11E0A1B11AE1") + bytes(8), "save it as CSV"),
        ("data", (FILES / "duckdb.parquet").read_bytes(), "--as parquet"),
    ):
        (tmp_path / name).write_bytes(data)
        result = run(server, "publish", "refused", tmp_path / name)
        assert (result.exit_code, told in result.stderr) == (2, True), (name, result.output)
        assert len(result.stderr.strip().splitlines()) <= 4, "a sentence, and not one for each line"


def test_a_file_is_compressed_by_its_name(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    client.publish("written", {"a": 1}, key="k")
    done(server, "export", "written", tmp_path / "a.csv.gz")
    done(server, "export", "written", tmp_path / "b.csv.gz")
    done(server, "export", "written", tmp_path / "a.csv.zst")
    done(server, "export", "written", tmp_path / "a.csv")
    plain = (tmp_path / "a.csv").read_bytes()
    assert gzip.decompress((tmp_path / "a.csv.gz").read_bytes()) == plain
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes(), "no name and no time in it"
    with pa.CompressedInputStream(str(tmp_path / "a.csv.zst"), "zstd") as stream:
        assert stream.read() == plain
    for name in ("a.parquet.gz", "a.csv.bz2", "a.gz"):
        assert run(server, "export", "written", tmp_path / name).exit_code == 2, name


def test_a_report_is_compressed_by_its_name(server: ServerProcess, tmp_path: Path) -> None:
    report = tmp_path / "bench.md.gz"
    done(server, "bench", "--records", "100", "--work", "publish", "--seconds", "0.1", "--report", report)
    assert gzip.decompress(report.read_bytes()).startswith(b"# ")


def two_records(client: Client, topic: str) -> None:
    """A topic with two records."""
    client.create_topic(topic)
    client.publish(topic, {"n": 1}, key="a")
    client.publish(topic, {"n": 2}, key="b")


def test_a_document_among_records_is_refused(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    """Its field `payload` was published in its place."""
    two_records(client, "among")
    client.create_topic("among.copy", key=["/n"])
    run(server, "export", "among", str(tmp_path / "a.ndjson"))
    first = (tmp_path / "a.ndjson").read_text().splitlines()[0]
    (tmp_path / "b.ndjson").write_text(f'{first}\n{{"n":3,"payload":{{"n":4}}}}\n{{"key":"x","payload":{{"n":5}}}}\n')

    done = run(server, "publish", "among.copy", str(tmp_path / "b.ndjson"))

    assert done.exit_code == 1
    assert "line 2: PAYLOAD_MALFORMED: not a record, as the first line is; see --records" in done.stderr
    assert sorted(record.key for record in client.query("among.copy")) == ["1", "5"]


def test_a_record_among_documents_is_refused(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    """The record with its metadata was published as a document."""
    two_records(client, "behind")
    client.create_topic("behind.copy", key=["/key"])
    run(server, "export", "behind", str(tmp_path / "a.ndjson"))
    (tmp_path / "b.ndjson").write_text('{"key":"x"}\n' + (tmp_path / "a.ndjson").read_text())

    done = run(server, "publish", "behind.copy", str(tmp_path / "b.ndjson"))

    assert done.exit_code == 1
    assert "line 2: PAYLOAD_MALFORMED: a record among documents" in done.stderr
    assert [record.key for record in client.query("behind.copy")] == ["x"]


@pytest.mark.parametrize("options", [[], ["--ttl", "1h"]])
def test_csv_exports_in_one_file_keep_their_types(
    server: ServerProcess, client: Client, tmp_path: Path, options: list[str]
) -> None:
    """The second line of names made texts of all numbers and, with --ttl, a record."""
    topic = f"joined{len(options)}"
    two_records(client, topic)
    run(server, "export", topic, str(tmp_path / "a.csv"))
    once = (tmp_path / "a.csv").read_text()
    (tmp_path / "b.csv").write_text(once + once)
    (tmp_path / "c.csv").write_text(once + once.replace(",n,", ",m,"))

    done = run(server, "publish", topic, str(tmp_path / "b.csv"), *options)

    assert (done.exit_code, json.loads(done.stdout)["published"]) == (0, 4), done.output
    assert sorted((record.key, record.payload) for record in client.query(topic)) == [
        ("a", b'{"n":1}'),
        ("b", b'{"n":2}'),
    ]
    other = run(server, "publish", topic, str(tmp_path / "c.csv"), *options)
    assert other.exit_code == 2
    assert "names of other columns" in other.stderr


@pytest.mark.parametrize("name", ["none.csv.gz", "none.ndjson.zst"])
def test_an_empty_file_is_no_compressed_one(server: ServerProcess, tmp_path: Path, name: str) -> None:
    """A copy that broke off before its first byte counted as a file without records."""
    (tmp_path / name).write_bytes(b"")
    done = run(server, "publish", "none", str(tmp_path / name))
    assert done.exit_code == 2
    assert "is empty" in done.stderr
