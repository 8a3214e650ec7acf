"""Payloads of fix, nvfix and msgpack, from a program's document to every output, at a real server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from sow_cli.command import sow
from sow_client import Client, InvalidArgument, MessageTypeName, PublishFailed, Record, View
from tests.support.servers.server import ServerProcess
from tests.support.simulation.clients import CLIENT_KINDS, client_of

CONFIG = """
[topics.packed]
key = ["/id"]
message_type = "msgpack"

[topics.fix]
key = ["/55"]
message_type = "fix"
fix_separator = "|"
index = ["/44"]

[topics.nvfix]
key = ["/id"]
message_type = "nvfix"
fix_separator = ";"

[topics.plain]
key = ["/id"]
"""
ODD = {
    "id": 1,
    "bytes": b"\x00\xff",
    "ext": msgspec.msgpack.Ext(5, b"\x01"),
    "nan": float("nan"),
    "time": datetime(9999, 12, 31, tzinfo=UTC),
    "mixed": [1, b"a", {"x": float("inf")}],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("formats"), CONFIG) as made:
        yield made


@pytest.fixture(params=CLIENT_KINDS)
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """Each of the two clients, on empty topics."""
    with client_of(request.param, server.client, server.async_client) as made:
        for topic in ("packed", "fix", "nvfix", "plain"):
            made.sow_delete(topic, all=True)
        yield made


def live(client: Client, topic: str, key: str) -> Record:
    found = client.get(topic, key)
    assert found is not None
    return found


def run(server: ServerProcess, *arguments: str, data: bytes | None = None) -> str:
    result = CliRunner().invoke(sow, ["--server", server.address, *arguments], input=data)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_key_is_not_taken_out_of_a_data_field(client: Client) -> None:
    done = client.publish("fix", b"95=6|96=a|55=Z|55=ACME|44=2|")
    assert done.key == "ACME"
    assert live(client, "fix", "ACME").data == {"95": "6", "96": "a|55=Z", "55": "ACME", "44": "2"}
    assert [one.key for one in client.query("fix", "/96 = 'a|55=Z'")] == ["ACME"]
    assert client.count("fix", "/55 = 'Z'") == 0
    assert [one.key for one in client.query("fix", "/44 = 2")] == ["ACME"]
    assert [one.payload for one in client.query("fix", select=["/96"])] == [b"95=6|96=a|55=Z|"]
    client.delta_publish("fix", b"95=3|96=x|y|55=ACME|")
    assert live(client, "fix", "ACME").data["96"] == "x|y"
    assert client.publish("fix", b"055=ACME|44=3|").key == "ACME"
    assert client.count("fix") == 1


def test_a_length_that_is_not_true_is_refused_and_loses_nothing(client: Client) -> None:
    client.publish("fix", b"55=ACME|44=1|")
    for payload, message in (
        (b"95=60|96=a|55=ACME|", "tag 96 at byte 6 has 60 bytes by its length"),
        (b"95=x|96=a|55=ACME|", "'x' is no number of bytes"),
        (b"55=ACME|95=3|", "which does not follow it"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            client.publish("fix", payload)
        assert caught.value.reason == "PAYLOAD_MALFORMED"
        assert message in caught.value.message
    assert live(client, "fix", "ACME").payload == b"55=ACME|44=1|"


def test_a_filter_or_an_order_by_a_tag_with_zeros_says_what_to_write(client: Client) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.count("fix", "/055 = 'A'")
    assert caught.value.reason == "FILTER_INVALID"
    assert "write /55" in caught.value.message
    with pytest.raises(InvalidArgument) as caught:
        list(client.query("fix", order_by="/055"))
    assert caught.value.reason == "ORDER_INVALID"


def test_documents_are_published_in_the_type_of_their_topic(client: Client) -> None:
    client.publish("packed", ODD)
    assert live(client, "packed", "1").payload == msgspec.msgpack.encode(ODD)
    client.publish_many("packed", [{"id": 2}, msgspec.msgpack.encode({"id": 3})])
    with client.publisher("packed") as publisher:
        publisher.publish({"id": 4, "b": b"\x01"})
    client.delta_publish("packed", {"id": 4, "n": 1})
    assert live(client, "packed", "4").data == {"id": 4, "b": b"\x01", "n": 1}
    assert client.publish_frame("packed", pd.DataFrame({"id": [5, 6], "x": ["a", None]})) == 2
    assert live(client, "packed", "6").data == {"id": 6, "x": None}
    assert client.sow_delete("packed", data={"id": 6}).deleted == 1

    client.publish("fix", {"55": "ACME", "96": "a|b", "38": 100})
    assert live(client, "fix", "ACME").payload == b"55=ACME|95=3|96=a|b|38=100|"
    client.publish("nvfix", {"id": "a", "px": 1.5})
    assert client.publish_frame("nvfix", pd.DataFrame({"id": ["b", "c"], "px": ["1", None]})) == 2
    assert [one.payload for one in client.query("nvfix")] == [b"id=a;px=1.5;", b"id=b;px=1;", b"id=c;"]
    client.publish("plain", {"id": 1})
    assert live(client, "plain", "1").payload == b'{"id":1}'

    with pytest.raises(InvalidArgument, match="the field 'px' holds the separator"):
        client.publish("nvfix", {"id": "a", "px": "1;2"})
    with pytest.raises(InvalidArgument, match="cannot be encoded as MessagePack"):
        client.publish("packed", {"id": 2**70})


def test_a_topic_that_gets_another_type_gets_documents_of_that(client: Client) -> None:
    kinds: tuple[MessageTypeName, ...] = ("json", "msgpack")
    for message_type in kinds:
        client.create_topic("turned", key=["/id"], message_type=message_type)
        try:
            client.publish("turned", {"id": 1})
        except InvalidArgument:
            client.publish("turned", {"id": 1})
        assert live(client, "turned", "1").data == {"id": 1}
        client.delete_topic("turned")


def test_records_and_tables_are_decoded_by_the_type_of_the_topic(client: Client) -> None:
    client.publish("packed", ODD)
    found = live(client, "packed", "1").data
    assert {name: found[name] for name in ("bytes", "time")} == {"bytes": b"\x00\xff", "time": ODD["time"]}
    assert isinstance(found["ext"], msgspec.msgpack.Ext)
    table = client.query("packed").to_arrow()
    (row,) = table.to_pylist()
    assert table.schema.field("bytes").type == pa.binary()
    assert row["bytes"] == b"\x00\xff"
    assert row["ext"] == {"ext": 5, "data": b"\x01"}
    assert row["nan"] != row["nan"]
    assert row["mixed"] == '[1,"YQ==",{"x":"inf"}]'
    client.publish("fix", b"95=3|96=a|b|55=A|")
    client.publish("fix", b"55=B|44=1|")
    assert client.query("fix").to_arrow(metadata=()).to_pylist() == [
        {"95": "3", "96": "a|b", "55": "A", "44": None},
        {"95": None, "96": None, "55": "B", "44": "1"},
    ]
    assert list(client.query("fix").to_pandas()["55"]) == ["A", "B"]


def test_a_view_of_fix_knows_the_separator_and_data_fields(client: Client) -> None:
    client.publish("fix", b"95=3|96=a|b|55=A|44=1|")
    view = View()
    with client.sow_and_subscribe("fix", oof=True, delta=True) as changes:
        for change in changes:
            view.apply(change)
            if change.op == "snapshot_end":
                client.publish("fix", b"95=3|96=|c||55=A|44=1|")
            if change.op == "put":
                break
    assert view["A"].data == {"95": "3", "96": "|c|", "55": "A", "44": "1"}


@pytest.mark.parametrize("output", ["csv", "ndjson", "json", "table", "parquet", "arrow"])
def test_every_output_of_the_command_has_every_value(
    server: ServerProcess, client: Client, output: str, tmp_path: Path
) -> None:
    client.publish("packed", ODD)
    document = {
        "id": 1,
        "bytes": "AP8=",
        "ext": {"ext": 5, "data": "AQ=="},
        "nan": "nan",
        "time": "9999-12-31T00:00:00Z",
        "mixed": [1, "YQ==", {"x": "inf"}],
    }
    if output in ("parquet", "arrow"):
        path = tmp_path / f"packed.{output}"
        run(server, "export", "packed", str(path))
        table = pq.read_table(path) if output == "parquet" else pa.ipc.open_file(path).read_all()
        (row,) = table.to_pylist()
        assert row["bytes"] == b"\x00\xff"
        assert row["time"] == ODD["time"]
        return
    shown = run(server, "query", "packed", "--format", output)
    if output in ("ndjson", "json"):
        line = msgspec.json.decode(shown)
        line = line[0] if isinstance(line, list) else line
        assert line["payload"] == document
        assert line["payload_base64"], "these values are not read from JSON again"
    elif output == "csv":
        for cell in ("AP8=", '"{""ext"":5,""data"":""AQ==""}"', "nan", "9999-12-31T00:00:00Z"):
            assert cell in shown
        assert '""AP8=""' not in shown
    else:
        assert "AP8=" in shown
        assert "Ext object" not in shown


@pytest.mark.parametrize("topic", ["packed", "fix", "nvfix"])
def test_lines_of_a_query_are_published_again_as_the_same_bytes(
    server: ServerProcess, client: Client, topic: str
) -> None:
    payloads = {
        "packed": [msgspec.msgpack.encode(ODD), msgspec.msgpack.encode({"id": 2, "a": ["x"]})],
        "fix": [b"55=A|44=1|44=2|", b"95=3|96=a|b|55=B|", b"55=C|58=\xff"],
        "nvfix": [b"id=a;px=1;", b";;id=b"],
    }[topic]
    client.publish_many(topic, payloads)
    lines = run(server, "query", topic, "--format", "ndjson")
    assert all(isinstance(msgspec.json.decode(line)["payload"], dict) for line in lines.splitlines())
    client.sow_delete(topic, all=True)
    run(server, "publish", topic, "--records", data=lines.encode())
    assert sorted(one.payload for one in client.query(topic)) == sorted(payloads)


def test_refused_records_of_a_publisher_are_told(client: Client) -> None:
    with pytest.raises(PublishFailed, match="is no number of bytes"), client.publisher("fix") as publisher:
        publisher.publish(b"95=x|96=a|55=A|")
