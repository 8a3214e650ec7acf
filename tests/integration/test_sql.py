"""SQL over topics, with a real server: `sow sql`, `client.sql`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow.parquet
import pytest
from click.testing import CliRunner, _NamedTextIOWrapper

from sow_cli.command import sow
from sow_client import AsyncClient, Cancelled, Client, InvalidArgument, NotFound, SowError
from sow_client._sql_database import Database
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.server import ROOT, ServerProcess

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
expiration = 'enabled'
index = ['/a']
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


def test_topics_are_joined_at_one_instant(client: Client) -> None:
    with client.sql("SELECT town, v FROM devices d JOIN sites USING (id) WHERE d.v > 1 ORDER BY town") as result:
        assert list(result) == list(result.rows()) == [("Oslo", 1.5), ("Rome", 2.5)]
        assert result.columns == ("town", "v")
        assert {name: one.records for name, one in result.topics.items()} == {"devices": 5, "sites": 2}
        assert all(one.as_of.tzinfo and one.bookmark for one in result.topics.values())
        assert len({(one.as_of, one.bookmark) for one in result.topics.values()}) == 1, "an instant for all of them"
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
    text = "SELECT current_setting('enable_progress_bar') FROM devices LIMIT 1"
    assert answer(client, text) == [(False,)], "stdout is the program's own"
    assert answer(client, "SELECT count(*) FROM devices UNION ALL SELECT count(*) FROM sites") == [(6,), (2,)]


def test_a_parameter_is_a_value_whatever_is_in_it(client: Client) -> None:
    text = "SELECT id FROM orders WHERE desk = $desk ORDER BY id"
    assert answer(client, text, {"desk": "fx"}) == [("0",), ("3",)]
    assert answer(client, text, {"desk": "' OR true --"}) == []


def test_fix_and_msgpack_have_their_fields_as_columns(client: Client) -> None:
    assert answer(client, """SELECT "11", "44"::DOUBLE FROM ticks WHERE "55" = 'IBM'""") == [("A1", 105.5)]
    assert answer(client, "SELECT id, raw, n FROM packed") == [(1, b"\x00\xff", 3)]
    with client.sql("""SELECT "44" FROM ticks WHERE "55" = 'IBM'""") as result:
        assert (result.topics["ticks"].filter, result.topics["ticks"].records) == ("/55 = :p1", 1)


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


COLUMNS: Final[dict[str, tuple[object, ...]]] = {
    "int": (0, 1, 5, 106, -3, 2**53 + 1),
    "float": (2.5, 106.0, 0.0, 1.0, 1e300),
    "bool": (True, False),
    "text": ("IBM", "true", "105.50", "106", "1e2", "x y", "é", "[5]", "a\\b", "", "1"),
    "list": ([], [5], ["IBM"], [None], [[106]]),
    "object": ({"a": 1}, {"a": None}),
}
"""The values of a column of one type."""
CONDITIONS: Final = (
    "{} = 'IBM'", "{} = '106'", "{} = 'true'", "{} = 106", "{} > 1", "{} <= 5", "{} < 2.5", "{} BETWEEN 0 AND 106",
    "{} IN ('IBM', 'x y')", "{} IN (1, 5)", "{} LIKE 'IB%'", "{} NOT LIKE 'IB%'", "{} IS NULL", "{} = -3", "5 < {}",
    "{} > 'M'", "{} BETWEEN 'A' AND 'a'", "{} = 'a\\b'", "{} = true", "{}", "NOT {}", "{} >= 2.5e0", "{} <> 'IBM'",
    "{} = $text", "{} < $number", "_version > 0", "_key < '5'", "_key IN ('1', '4')", "_expire_time IS NULL",
    "_expire_time > '2030-01-01'", "_publish_time > TIMESTAMP '2020-01-01 00:00:00'", "_publish_time < $time",
)  # fmt: skip
PARAMETERS: Final = {"text": "106", "number": 5, "time": datetime(2020, 1, 1, tzinfo=UTC)}


def random_text(draw: random.Random, topic: str, what: str) -> tuple[str, dict[str, Any]]:
    parts = [draw.choice(CONDITIONS).format(draw.choice(("a", "b", "id"))) for _ in range(draw.randint(1, 4))]
    where = parts[0]
    for part in parts[1:]:
        where = f"({where}) {draw.choice(('AND', 'OR'))} {part}"
    values = {name: value for name, value in PARAMETERS.items() if f"${name}" in where}
    return f"SELECT {what} FROM {topic} WHERE {where} ORDER BY _key", values


def told(client: Client, text: str, values: dict[str, Any], *, push: bool) -> tuple[Any, ...]:
    """All that an answer tells, or the refusal."""
    try:
        with client.sql(text, values, push=push) as result:
            return (result.schema, list(result.rows()), result.topics["mixed"])
    except InvalidArgument as error:
        return (str(error),)


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.slow
def test_an_answer_is_the_same_whether_the_server_judges_conditions_or_not(client: Client, rounds: int) -> None:
    """Columns of several types, among them of lists, objects and nulls; the key is one of them."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    pushed = answered = 0
    for round_ in range(rounds):
        client.sow_delete("mixed", filter="true")
        values: dict[str, list[object]] = {}
        for name in ("a", "b", "id"):
            kinds = list(COLUMNS) if name != "id" else ["int", "text", "float"]
            values[name] = [
                one for kind in draw.sample(kinds, draw.randint(1, 3)) for one in COLUMNS[kind] if one != ""
            ]
        for number in range(10):
            document = {name: draw.choice([*some, None]) for name, some in values.items() if draw.random() < 0.9}
            ttl = timedelta(days=2000) if draw.random() < 0.3 else None
            client.publish("mixed", {**document, "id": document.get("id") or number}, ttl=ttl)
        for _ in range(8):
            what = draw.choice(("*", "_key, typeof(a), typeof(b), a", "_key, b", "b AS a, _version"))
            text, used = random_text(draw, "mixed", what)
            whole, found = (told(client, text, used, push=push) for push in (False, True))
            assert found[:2] == whole[:2], (seed, round_, text)
            if len(found) > 1:
                assert found[2].columns == whole[2].columns, (seed, round_, text)
                answered += bool(found[1])
                pushed += found[2].filter is not None
    print(f"{pushed} pushed, {answered} with rows")
    assert rounds < 10 or min(pushed, answered) > 5, seed


def test_a_column_of_several_types_is_compared_type_by_type(client: Client) -> None:
    """`b = '106'` found the number 106.0, too, where the server judged: the text 106 was not read, or the only one."""

    def publish(*values: object) -> None:
        client.sow_delete("mixed", filter="true")
        for number, value in enumerate(values):
            client.publish("mixed", {"id": number, "b": value, "one": number == 1})

    def found(text: str) -> list[tuple[Any, ...]]:
        first = answer(client, text)
        assert answer(client, text, push=False) == first
        return first

    publish(106.0, "106", True, None, ["106"], 107, "x")
    assert found("SELECT id FROM mixed WHERE b = '106'") == [(1,)]
    assert found("SELECT id, typeof(b) FROM mixed WHERE b > 1 ORDER BY id") == [(0, "DOUBLE"), (5, "DOUBLE")]
    assert found("SELECT id FROM mixed WHERE b") == [(2,)]
    publish(106, 5, None)
    text = "SELECT id FROM mixed WHERE b = '106' OR one ORDER BY id"
    assert found(text) == [(0,), (1,)], "DuckDB makes numbers of texts, where all are numbers"


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.slow
def test_columns_of_one_type_have_the_answers_of_plain_duckdb(client: Client, rounds: int) -> None:
    """The oracle is a table of DuckDB that the test makes of all records."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    types = {"int": "BIGINT", "float": "DOUBLE", "bool": "BOOLEAN", "text": "VARCHAR"}
    pushed = 0
    for round_ in range(rounds):
        client.sow_delete("mixed", filter="true")
        of = {name: draw.choice(list(types)) for name in "ab"} | {"id": draw.choice(("int", "text"))}
        database = duckdb.connect()
        database.execute("SET TimeZone = 'UTC'")
        columns = ", ".join(f"{name} {types[kind]}" for name, kind in of.items())
        more = "_key VARCHAR, _version BIGINT, _publish_time TIMESTAMPTZ, _expire_time TIMESTAMPTZ"
        database.execute(f"CREATE TABLE mixed ({columns}, {more})")
        rows = {}
        for number in range(10):
            row = {name: draw.choice([*COLUMNS[kind], None]) for name, kind in of.items()}
            row["id"] = number if of["id"] == "int" else str(number)
            if number == 0:
                row |= {name: COLUMNS[kind][0] for name, kind in of.items() if name != "id"}
            client.publish("mixed", row)
            rows[str(row["id"])] = (*row.values(), str(row["id"]), 1, datetime.now(UTC), None)
        for row_ in rows.values():
            database.execute("INSERT INTO mixed VALUES (?, ?, ?, ?, ?, ?, ?)", row_)
        for _ in range(8):
            text, used = random_text(draw, "mixed", "_key, a, b")
            try:
                expected = database.execute(text, used or None).fetchall()
            except duckdb.Error:
                with pytest.raises(InvalidArgument):
                    client.sql(text, used)
                continue
            with client.sql(text, used) as result:
                assert list(result.rows()) == expected, (seed, round_, of, text, used)
                pushed += result.topics["mixed"].filter is not None
    print(f"{pushed} pushed")
    assert rounds < 10 or pushed > 5, seed


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("s.town IS NULL", [0, 3, 4, 5]),
        ("s.town = 'Oslo'", [1]),
        ("d.v > 3", [3, 4, 5]),
        ("o._expire_time IS NULL", []),
        ("s._expire_time IS NULL", [0, 1, 2, 3, 4, 5]),
        ("o.desk = 'fx' AND s.town IS NULL", [0, 3]),
    ],
)
def test_a_condition_on_the_outer_side_of_a_join_keeps_its_meaning(
    client: Client, condition: str, found: list[int]
) -> None:
    text = "SELECT d.id FROM devices d LEFT JOIN sites s ON s.id = d.id LEFT JOIN orders o ON o.id = d.id::VARCHAR"
    for push in (True, False):
        assert answer(client, f"{text} WHERE {condition} ORDER BY 1", push=push) == [(one,) for one in found]


def test_a_condition_that_names_a_result_is_for_duckdb(client: Client) -> None:
    text = "SELECT upper(site) AS town FROM devices WHERE town = 'NORTH'"
    assert len(answer(client, text)) == 3, "a result, and no column"


@pytest.fixture(scope="module")
def big(server: ServerProcess) -> None:
    with Client(server.address) as client, client.publisher("big") as publisher:
        for number in range(20_000):
            publisher.publish({"id": number, "text": f"{number:05}-" * 60})


SPILLING: Final = """
import json, os, resource, sys
from sow_client import Client

def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

def spilled():
    found = [os.path.join(folder, name) for folder, _, names in os.walk(os.environ["TMPDIR"]) for name in names]
    return sum(map(os.path.getsize, found)) // 2**20

with Client(sys.argv[1]) as client:
    with client.sql("SELECT count(*), max(text) FROM big", memory="60MB") as result:
        list(result.rows())
    before = megabytes()
    with client.sql(sys.argv[2], memory="60MB") as result:
        disk, sizes = spilled(), [batch.nbytes for batch in result.batches()]
    print(json.dumps([sum(sizes) // 2**20, disk, megabytes() - before, os.listdir(os.environ["TMPDIR"])]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("big")
@pytest.mark.parametrize(
    "text",
    [
        "SELECT id, i, hash(i, id) AS g, hash(id, i) AS h FROM big, range(100) AS r(i) ORDER BY h",
        "SELECT a.id, repeat(b.text, 5) AS t FROM big AS a JOIN big AS b ON a.id % 5000 = b.id % 5000",
    ],
    ids=["sort", "join"],
)
def test_an_answer_larger_than_its_memory_lies_on_disk_until_it_is_closed(
    server: ServerProcess, tmp_path: Path, text: str
) -> None:
    words = [sys.executable, "-c", SPILLING, server.address, text]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    answer, disk, memory, left = json.loads(done.stdout)
    print(f"{answer} MB, {disk} MB of them on disk, {memory} MB more memory")
    assert answer >= 60
    assert disk > 5
    assert memory < 120
    assert left == [], "the folder goes with the result"


@pytest.mark.usefixtures("big")
def test_too_little_memory_is_told_in_one_sentence(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for text, memory, sentence in (
        ("SELECT list(text) FROM big CROSS JOIN range(20)", "30MB", "30MB is too little for this text"),
        ("SELECT count(DISTINCT text) FROM big", "1kb", "1kb is too little for this text"),
        ("SELECT count(*) FROM big", "much", "'much' is no size such as 500MB or 2GB"),
        ("SELECT count(*) FROM big", "-1", "'-1' is no size such as 500MB or 2GB"),
    ):
        with pytest.raises(InvalidArgument, match=f"^memory: {sentence}[^\\n]*$"):
            client.sql(text, memory=memory)
    with client.sql("SELECT count(*) FROM big") as result:
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    assert result.columns == ("count_star()",), "it is closed, and still there"


def test_an_answer_in_asyncio_is_read_off_the_event_loop(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    read = Database.rows

    def rows(database: Database) -> Iterator[Any]:
        for batch in read(database):
            threads.add(threading.get_ident())
            yield batch

    async def asked() -> list[tuple[Any, ...]]:
        async with AsyncClient(server.address) as client:
            async with await client.sql("SELECT id, v FROM devices ORDER BY id LIMIT 2") as result:
                assert result.columns == ("id", "v")
                assert (await result.to_arrow()).num_rows == len(await result.to_pandas()) == 2
                assert (await result.to_polars()).height == 2
                return [row async for row in result]

    monkeypatch.setattr(Database, "rows", rows)
    assert asyncio.run(asked()) == [(0, 0.5), (1, 1.5)]
    assert threads
    assert threading.get_ident() not in threads


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
    assert (told["records"], told["filter"], told["parameters"]) == (3, "/site = :p1", '{"p1":"north"}')
    assert sorted(told["columns"]) == ["site", "v"]
    missed = run(server, "SELECT * FROM device")
    assert missed.exit_code == 1
    assert "did you mean 'devices'?" in missed.stderr
    assert run(server, "SELECT 1").exit_code == 1


SEEN: Final = (
    "SELECT * FROM {} ORDER BY _key",
    "SELECT n, typeof(n), tag, typeof(tag) FROM {} ORDER BY n",
    "SELECT count(*), count(_version) FROM {}",
    "SELECT n FROM {} WHERE n = 1",
    "SELECT n FROM {} WHERE n = 'x'",
    "SELECT n FROM {} WHERE n > 5 OR tag = 'hidden'",
    "SELECT n FROM {} WHERE _key LIKE 'h%'",
    "SELECT n FROM {} WHERE _key IN ('h1', 's1')",
    "SELECT pin FROM {}",
    "SELECT n FROM {} WHERE pin = 'canary1'",
    "SELECT n FROM {} WHERE pin > 7 OR n = 1",
    "SELECT n FROM {} ORDER BY pin",
    "SELECT pim FROM {}",
    "SELECT extra FROM {}",
    "SELECT pos, pos.x FROM {} ORDER BY ALL",
    "SELECT pos.pin FROM {}",
    "SELECT a.n, b.n FROM {} AS a JOIN {} AS b ON a.n = b.n WHERE a.n < 5 ORDER BY ALL",
    "SELECT count(v) FROM {} AS v",
)


OWN: Final = ("_version", "_publish_time", "_sequence")
"""Each record has its own."""


@pytest.mark.slow
def test_hidden_rows_fields_and_topics_make_no_difference(tmp_path: Path) -> None:
    """Two topics that differ in what `half` may not see: rows, whose values have other types and other fields, and
    fields. Answers, columns, their types, plans and errors are equal, also where the server judges no condition."""
    rights = "rows = '/open'\nhide = ['/pin', '/pos/pin']"
    grants = "".join(grant("half", topic, "read", rights) for topic in ("laden", "plain"))
    write_access(tmp_path, identity("half", "half") + grants)
    with ServerProcess(tmp_path, GUARDED) as server:
        with client_of(server, "root") as root:
            for topic in ("laden", "plain", "secret"):
                root.create_topic(topic, key=["/id"], index=["/n", "/pin"])
            for number in range(4):
                shown = {"id": f"s{number}", "open": True, "n": number, "tag": "a", "pos": {"x": number}}
                root.publish("plain", shown)
                hidden = {"pin": f"canary{number}", "pos": {"x": number, "pin": "canary"}}
                root.publish("laden", {**shown, **hidden})
                root.publish(
                    "laden", {"id": f"h{number}", "n": "x", "tag": 7, "extra": "canary", "pin": number, "pos": 1}
                )
        with client_of(server, "half") as half:

            def told(text: str, topic: str, *, push: bool) -> str:
                try:
                    with half.sql(text.replace("{}", topic), push=push) as result:
                        read = result.topics[topic]
                        plan = (read.records, read.columns, read.filter, read.parameters)
                        columns = [name for name in result.columns if name not in OWN]
                        found = [[row[name] for name in columns] for row in result.to_arrow().to_pylist()]
                        return f"{result.schema} {found} {plan}".replace(topic, "TOPIC")
                except SowError as error:
                    return str(error).replace(topic, "TOPIC")

            for text in SEEN:
                for push in (True, False) if "typeof" in text or "n = 'x'" in text else (True,):
                    laden, plain = (told(text, topic, push=push) for topic in ("laden", "plain"))
                    assert laden == plain, text
                    assert "canary" not in laden.replace("canary1", "") or "canary" in text
            assert told("SELECT * FROM {}", "secret", push=True) == told("SELECT * FROM {}", "nothin", push=True)


def test_a_hint_has_the_columns_that_records_have(client: Client) -> None:
    """DuckDB proposes columns; the table of a text that names none of them had a column of our own."""
    with pytest.raises(InvalidArgument, match=r'"vv" not found.*Candidate bindings: .*"v"') as refused:
        client.sql("SELECT vv FROM devices")
    assert "sow" not in str(refused.value)
    with pytest.raises(InvalidArgument, match=r'"deskk" not found.*"desk"'):
        client.sql("SELECT id FROM orders WHERE deskk = 'fx'")


def test_fields_that_differ_in_case_alone_have_their_values(client: Client) -> None:
    """`SELECT a_1` had nulls, as no field has that name; a field `a_1` lost it to the second of `a` and `A`."""
    client.sow_delete("mixed", filter="true")
    client.publish("mixed", {"id": 1, "a": "small", "A": "big", "a_2": "own", "_key": "mine", "b": 1, "B": 2, "b_1": 3})
    assert answer(client, "SELECT a_1, A FROM mixed") == [("small", "big")]
    assert answer(client, "SELECT A_1, a FROM mixed WHERE a = 'small'") == [("big", "small")]
    assert answer(client, "SELECT a_2, _key_1 FROM mixed WHERE _key_1 = 'mine'") == [("own", "mine")]
    for what in ("b_1", "* EXCLUDE (a)"):
        with client.sql(f"SELECT {what} FROM mixed") as result:
            assert result.to_arrow().column("b_1").to_pylist() == [3]


def test_all_columns_are_there_for_a_text_that_names_them_by_their_places(client: Client) -> None:
    columns = {"id", "v", "site"}
    assert columns <= {name for (name,) in answer(client, "SELECT column_name FROM (DESCRIBE devices)")}
    assert answer(client, "SELECT d.p FROM devices AS d(p) ORDER BY 1 LIMIT 2") == [(0,), (1,)]
    assert answer(client, "SELECT #1 FROM devices WHERE id = 3") == [(3,)]
    assert answer(client, "WITH Sites AS (SELECT 5 AS n FROM devices LIMIT 1) SELECT n FROM sites") == [(5,)]


def test_a_time_that_python_has_not_and_a_closed_result_are_told(client: Client) -> None:
    with client.sql("SELECT 'infinity'::TIMESTAMP AS t FROM sites") as result:
        with pytest.raises(InvalidArgument, match="make a text of a time beyond the years 1 to 9999"):
            list(result.rows())
    result.close()
    with pytest.raises(Cancelled, match="the result is closed"):
        list(result.rows())


def test_a_text_that_is_no_unicode_or_too_deep_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgument, match=r"text: .* has half a surrogate pair at character 9"):
        client.sql("SELECT '\ud800' FROM sites")
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        client.sql(f"SELECT {'(' * 400}1{')' * 400} FROM sites")


def test_a_text_that_is_cancelled_ends_and_leaves_nothing(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timeout became an error of DuckDB, whose connection was busy, and the text ran on."""
    endless = "WITH RECURSIVE w AS (SELECT 1 AS n UNION ALL SELECT n FROM w) SELECT count(*) FROM w, sites"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def asked() -> None:
        async with AsyncClient(server.address) as client:
            for seconds in (0.01, 0.2, 1):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.sql(endless), seconds)

    asyncio.run(asyncio.wait_for(asked(), 60))
    assert list(tmp_path.iterdir()) == []
