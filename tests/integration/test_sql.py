"""SQL over topics, with a real server: `sow sql`, `client.sql`."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet
import pytest
from click.testing import CliRunner, _NamedTextIOWrapper

from sow_cli.command import sow
from sow_client import AsyncClient, Client, InvalidArgument, NotFound
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.server import ServerProcess

TOPICS: Final = """
[topics.devices]
key = ['/id']
[topics.sites]
key = ['/id']
[topics.orders]
key = ['/id']
expiration = 'enabled'
[topics."md.prices"]
key = ['/id']
[topics.mixed]
key = ['/id']
[topics.empty]
key = ['/id']
[topics.big]
key = ['/id']
[topics.ticks]
message_type = 'fix'
key = ['/11']
[topics.packed]
message_type = 'msgpack'
key = ['/id']
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("sql"), TOPICS) as made:
        with Client(made.address) as client:
            for number in range(6):
                client.publish("devices", {"id": number, "v": number + 0.5, "site": "north" if number % 2 else "south"})
                ttl = timedelta(minutes=30) if number < 4 else timedelta(days=1)
                client.publish("orders", {"id": str(number), "desk": "rates" if number % 3 else "fx", "n": 1}, ttl=ttl)
            client.publish("sites", {"id": 1, "town": "Oslo", "pos": {"x": [1, 2]}})
            client.publish("sites", {"id": 2, "town": "Rome", "pos": {"x": []}})
            client.publish("md.prices", {"id": "a", "px": 2**53 + 1})
            client.publish("ticks", {"11": "A1", "55": "IBM", "44": "105.50"})
            client.publish("ticks", {"11": "A2", "55": "MSFT", "44": "7"})
            client.publish("packed", {"id": 1, "raw": b"\x00\xff", "n": 3})
        yield made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as made:
        yield made


def answer(client: Client, text: str, *arguments: Any, **named: Any) -> list[tuple[Any, ...]]:
    with client.sql(text, *arguments, **named) as result:
        return list(result.rows())


def test_topics_are_joined_and_each_tells_its_instant(client: Client) -> None:
    with client.sql("SELECT town, v FROM devices d JOIN sites USING (id) WHERE d.v > 1 ORDER BY town") as result:
        assert list(result.rows()) == [("Oslo", 1.5), ("Rome", 2.5)]
        assert result.columns == ("town", "v")
        assert {name: one.records for name, one in result.topics.items()} == {"devices": 5, "sites": 2}
        assert all(one.as_of.tzinfo and one.bookmark for one in result.topics.values())
        assert result.to_arrow().to_pylist()[0] == {"town": "Oslo", "v": 1.5}
        assert list(result.to_pandas()["v"]) == [1.5, 2.5]
        assert result.to_polars().height == 2


def test_lifetimes_are_columns(client: Client) -> None:
    text = "SELECT desk, count(*) FROM orders WHERE _expire_time < now() + INTERVAL 1 HOUR GROUP BY desk ORDER BY desk"
    assert answer(client, text) == [("fx", 2), ("rates", 2)]
    assert answer(client, "SELECT _key, _version > 1, _sequence > 0, _origin <> '' FROM orders WHERE _key = '3'") == [
        ("3", True, True, True)
    ]
    assert answer(client, "SELECT count(*) FROM sites WHERE _expire_time IS NULL") == [(2,)]


def test_names_of_topics_and_columns(client: Client) -> None:
    assert answer(client, 'SELECT px FROM "md.prices"') == answer(client, "SELECT px FROM md.prices") == [(2**53 + 1,)]
    assert answer(client, "WITH sites AS (SELECT id FROM devices WHERE id = 3) SELECT * FROM sites") == [(3,)]
    assert answer(client, "SELECT TOWN FROM sites WHERE Town = 'Oslo'") == [("Oslo",)], "in DuckDB letters are alike"
    assert answer(client, "SELECT pos.x[1], pos['x'] FROM sites ORDER BY id") == [(1, [1, 2]), (None, [])]
    assert answer(client, "SELECT count(*) FROM empty") == [(0,)]
    assert answer(client, "SELECT count(*) FROM devices UNION ALL SELECT count(*) FROM sites") == [(6,), (2,)]


def test_a_parameter_is_a_value_whatever_is_in_it(client: Client) -> None:
    text = "SELECT id FROM orders WHERE desk = $desk ORDER BY id"
    assert answer(client, text, {"desk": "fx"}) == [("0",), ("3",)]
    assert answer(client, text, {"desk": "' OR true --"}) == []


def test_fix_and_msgpack_have_their_fields_as_columns(client: Client) -> None:
    assert answer(client, """SELECT "11", "44"::DOUBLE FROM ticks WHERE "55" = 'IBM'""") == [("A1", 105.5)]
    assert answer(client, "SELECT id, raw, n FROM packed") == [(1, b"\x00\xff", 3)]
    with client.sql("""SELECT "44" FROM ticks WHERE "55" = 'IBM'""") as result:
        assert (result.topics["ticks"].filter, result.topics["ticks"].records) == ("(/55 = :p1)", 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("DROP TABLE devices", "only SELECT reads topics"),
        ("SHOW TABLES", "this is SHOW: `sow topics`"),
        ("DESCRIBE devices", r"this is DESCRIBE: `SELECT \*"),
        ("SELECT 1", "names no topic"),
        ("SELECT * FROM devices; SELECT 1", "2 statements"),
        ("SELECT * FROM read_csv('/etc/passwd')", "is no topic"),
        ("COPY devices TO '/tmp/x'", "only SELECT"),
        ("ATTACH '/tmp/x'", "only SELECT"),
        ("INSTALL httpfs", "only SELECT"),
        ("SET memory_limit = '9GB'", "only SELECT"),
        ("WITH a AS (INSERT INTO devices VALUES (1) RETURNING *) SELECT * FROM a", "it has INSERT"),
        ("SELECT id\nFROM devices WHERE\n  id = = 3", r"line 3, column 8\)\n    id = = 3\n         \^"),
        (
            "SELECT id,\n       vv FROM devices",
            r'"vv" not found.*\(line 2, column 8\)\n         vv FROM devices\n         \^',
        ),
        (
            f"SELECT v AS {'a' * 70}, vv FROM devices JOIN sites USING (id) WHERE v > 10 GROUP BY v ORDER BY v",
            r"\n  …a+, vv FROM devices [^\n]+ GROUP BY …\n {63}\^",
        ),
        ("SELECT v + 'x' FROM devices", r"Could not convert string 'x'.*"),
    ],
)
def test_other_texts_are_refused_with_a_sentence_and_their_place(client: Client, text: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        client.sql(text)


def test_a_topic_that_is_missing_and_a_file_are_alike(client: Client) -> None:
    for name, error in (("device", NotFound), ("'/etc/passwd'", InvalidArgument), ("pg_catalog.tables", NotFound)):
        with pytest.raises(error, match="no topic"):
            client.sql(f"SELECT * FROM {name}")


VALUES: Final[tuple[object, ...]] = (
    None,
    True,
    False,
    0,
    1,
    5,
    106,
    -3,
    2.5,
    106.0,
    "",
    "IBM",
    "true",
    "105.50",
    "106",
    "1e2",
    "x y",
    [],
    [5],
)
CONDITIONS: Final = (
    "{} = 'IBM'", "{} = '106'", "{} = 'true'", "{} = 106", "{} > 1", "{} <= 5", "{} < 2.5", "{} BETWEEN 0 AND 106",
    "{} IN ('IBM', 'x y')", "{} IN (1, 5)", "{} LIKE 'IB%'", "{} IS NULL", "{} = -3", "5 < {}",
)  # fmt: skip


def test_no_pushed_condition_loses_a_record(client: Client) -> None:
    """Conditions over columns of several types. A record that meets the condition, by itself or among all others, is
    in the answer of a pushed one."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for round_ in range(12):
        client.sow_delete("mixed", filter="true")
        for number in range(12):
            client.publish(
                "mixed", {"id": number} | {name: draw.choice(VALUES) for name in "ab" if draw.random() < 0.8}
            )
        for _ in range(3):
            parts = [draw.choice(CONDITIONS).format(draw.choice("ab")) for _ in range(draw.randint(1, 3))]
            where = draw.choice((" AND ", " OR ")).join(parts)
            text = f"SELECT id, typeof(a), typeof(b) FROM mixed WHERE {where} ORDER BY id"
            try:
                whole = answer(client, text, push=False)
            except InvalidArgument:
                continue  # DuckDB compares no such values
            found = answer(client, text)
            if {row[1:] for row in found} <= {row[1:] for row in whole}:
                assert found == whole, (seed, round_, text)
            # Else a column has fewer types in the records that were read: its texts have no quotation marks there.
            assert {row[0] for row in found} >= {row[0] for row in whole}, (seed, round_, text)


def test_a_condition_on_the_outer_side_of_a_join_keeps_its_meaning(client: Client) -> None:
    for condition in ("s.town IS NULL", "s.town = 'Oslo'", "d.v > 3"):
        text = f"SELECT d.id FROM devices d LEFT JOIN sites s ON s.id = d.id WHERE {condition} ORDER BY 1"
        assert answer(client, text) == answer(client, text, push=False)
    text = "SELECT upper(site) AS town FROM devices WHERE town = 'NORTH'"
    assert len(answer(client, text)) == 3, "a result, and no column"


def test_little_memory_spills_and_too_little_is_told(client: Client) -> None:
    with client.publisher("big") as publisher:
        for number in range(20_000):
            publisher.publish({"id": number, "text": f"{number:05}-" * 60})
    text = "SELECT count(DISTINCT text), max(length(text)) FROM big"
    assert answer(client, text, memory="60MB") == [(20_000, 360)]
    with pytest.raises(InvalidArgument, match="30MB is too little for this text"):
        client.sql("SELECT list(text) FROM big CROSS JOIN range(20)", memory="30MB")
    with pytest.raises(InvalidArgument, match="1kb is too little for this text"):
        client.sql(text, memory="1kb")
    with pytest.raises(InvalidArgument, match="is no size"):
        client.sql(text, memory="much")


def test_an_answer_in_asyncio(server: ServerProcess) -> None:
    async def asked() -> list[tuple[Any, ...]]:
        async with AsyncClient(server.address) as client:
            with await client.sql("SELECT count(*) FROM devices") as result:
                return list(result.rows())

    assert asyncio.run(asked()) == [(6,)]


def run(server: ServerProcess, *words: str) -> Any:
    return CliRunner().invoke(sow, ["--server", server.address, "sql", *words])


def test_the_command_writes_exact_values(server: ServerProcess, tmp_path: Path) -> None:
    text = "SELECT sum(px) AS s, 0.1::DECIMAL(9, 3) AS d, TIMESTAMP '2030-01-01 00:00:00.000001' AS t, [1, NULL] AS l, "
    text += 'NULL AS no FROM "md.prices"'
    found = run(server, "--format", "ndjson", text)
    assert found.stdout == (
        '{"s":9007199254740993,"d":0.100,"t":"2030-01-01T00:00:00.000001","l":[1,null],"no":null}\n'
    ), found.output
    assert "md.prices: 1 record read, as of 20" in found.stderr
    assert run(server, "--format", "csv", text).stdout.splitlines()[1] == (
        '9007199254740993,0.100,2030-01-01T00:00:00.000001,"[1,null]",'
    )
    file = tmp_path / "a.parquet"
    assert run(server, "-o", str(file), text).exit_code == 0
    assert pyarrow.parquet.read_table(file).to_pylist()[0]["d"] == Decimal("0.100")


@pytest.mark.parametrize("output_format", ["ndjson", "json", "csv", "table"])
def test_a_terminal_gets_no_control_characters_of_the_data(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, output_format: str
) -> None:
    """X7. Rows went around what guards the terminal, and escape sequences of a record acted there."""
    monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda _: True, raising=False)
    text = "SELECT 'a' || chr(27) || '[2J' || chr(155) || '31m' || chr(127) || chr(8238) AS \"b\x1b\""
    arguments = ["--server", server.address, "--color", "never", "sql", f"{text} FROM sites", "--format", output_format]
    done = CliRunner().invoke(sow, arguments)
    assert done.exit_code == 0, done.stderr
    shown = done.stdout_bytes.decode()
    assert "1b[2J" in shown
    assert "9b31m" in shown
    assert re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown) == []
    monkeypatch.undo()
    exact = CliRunner().invoke(sow, arguments).stdout_bytes.decode()
    assert output_format != "csv" or "\x1b[2J\x9b31m" in exact, "a pipe gets exact bytes"


def test_the_command_explains_and_advises(server: ServerProcess) -> None:
    found = run(server, "--explain", "--format", "ndjson", "SELECT v FROM devices WHERE site = 'north'")
    told = json.loads(found.stdout)
    assert (told["records"], told["filter"], told["parameters"]) == (3, "(/site = :p1)", '{"p1":"north"}')
    assert sorted(told["columns"]) == ["site", "v"]
    missed = run(server, "SELECT * FROM device")
    assert missed.exit_code == 1
    assert "did you mean 'devices'?" in missed.stderr
    assert run(server, "SELECT 1").exit_code == 1


def test_hidden_rows_and_fields_are_in_no_answer(tmp_path: Path) -> None:
    write_access(
        tmp_path, identity("half", "half") + grant("half", "secrets", "read", "rows = '/open'\nhide = ['/pin']")
    )
    with ServerProcess(tmp_path, GUARDED) as server:
        with client_of(server, "root") as root:
            root.create_topic("secrets", key=["/id"])
            root.publish("secrets", {"id": 1, "open": True, "pin": "canary"})
            root.publish("secrets", {"id": 2, "open": False, "pin": "canary"})
        with client_of(server, "half") as half:
            with half.sql("SELECT * FROM secrets") as result:
                assert "canary" not in str(list(result.rows())) + str(result.topics)
                assert result.topics["secrets"].records == 1
                assert "pin" not in result.columns
            for text in ("SELECT pin FROM secrets", "SELECT id FROM secrets WHERE pin = 'canary4'"):
                with pytest.raises(InvalidArgument, match="not found") as refused:
                    half.sql(text)
                assert "canary," not in str(refused.value)
