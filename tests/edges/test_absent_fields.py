"""A mistyped field in a filter is told, without a scan for it and without a word about hidden rows (rule Q10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

from sow_cli.command import sow
from sow_client import Deleted
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.server import ServerProcess
from tests.support.simulation.clients import Connect, connect

__all__ = ["connect"]  # a fixture

CONFIG: Final = """
[server]
reader_processes = 1
[topics.orders]
key = ["/id"]
index = ["/symbol"]
[topics.large]
key = ["/id"]
[topics.gone]
key = ["/id"]
[topics.sparse]
key = ["/id"]
"""
LARGE: Final = 12_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("absent"), CONFIG) as made:
        with made.client() as client:
            orders = [{"id": n, "symbol": "IBM", "legs": [{"px": n}], "a": {"b": n}, "tags": []} for n in range(20)]
            client.publish_many("orders", [*orders, {"id": 20, "rare": 1, "symbol": "RARE"}])
            with client.publisher("large") as publisher:
                for number in range(LARGE):
                    publisher.publish({"id": f"{number:06}", **({"late": 1} if number == LARGE - 1 else {})})
        yield made


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("/symbol = 'IBM'", ()),
        ("/symbl = 'IBM'", ("/symbl",)),
        ("NOT /symbl = 'IBM' OR /idd > 5 OR /id > 5", ("/symbl", "/idd")),
        ("/rare = 1", ()),
        ("/legs/px > 3 AND /legs/pz > 3 AND /a/b > 1 AND /a/c > 1", ("/legs/pz", "/a/c")),
        ("/symbl IS NULL AND COALESCE(/nothing, 1) = 1", ()),
        ("LOWER(/symbl) IN ('a', 'b') OR /[odd name] LIKE 'x'", ("/symbl", "/[odd name]")),
        ("/symbol = 'MSFT' AND /idd = 1", ()),  # an index has shown that nothing is to be read
        ("/symbol = 'IBM' AND /rare = 2", ("/rare",)),  # of the records that were read
        ("@key = '1'", ()),
        ("true", ()),
    ],
)
def test_fields_that_no_record_has_are_told(
    server: ServerProcess, connect: Connect, text: str, absent: tuple[str, ...]
) -> None:
    with connect(server.address) as client:
        with client.query("orders", text) as result:
            list(result)
        assert result.footer is not None
        assert result.footer.absent_fields == absent
        assert client.explain("orders", text).absent_fields == absent
        assert client.explain("orders", text, run=False).absent_fields == ()
        assert client.page("orders", text, page_size=100).footer.absent_fields == absent


def test_no_more_than_the_first_records_are_looked_at(server: ServerProcess) -> None:
    """Also in a reader process, which answers long queries."""
    with server.client() as client:
        assert client.explain("large", "/late = 1").absent_fields == ("/late",)
        assert client.explain("large", "/late = 1", order_by="/id DESC").absent_fields == ("/late",)
        assert client.explain("large", "/late = 1 AND @key >= '011000'").absent_fields == ()


def test_the_command_says_it_on_stderr(server: ServerProcess) -> None:
    for arguments in (["/symbl = 'IBM'"], ["/symbl = 'IBM'", "--explain"], ["/symbl = 'IBM'", "--page", "5"]):
        found = CliRunner().invoke(sow, ["--server", server.address, "query", "orders", *arguments])
        assert found.exit_code == 0
        assert "no record that was read has a value in /symbl: is the name right?" in found.stderr
    found = CliRunner().invoke(sow, ["--server", server.address, "query", "orders", "/symbol = 'IBM'"])
    assert "is the name right" not in found.stderr


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ({"select": ["/symbol", "/symbl"]}, ("/symbl",)),
        ({"exclude": ["/symbl"]}, ("/symbl",)),
        ({"order_by": "/symbl DESC, @key, /id"}, ("/symbl",)),
        ({"order_by": "/symbl", "select": ["/symbl", "/idd"], "top_n": 1}, ("/symbl", "/idd")),
        ({"order_by": "/symbol", "select": ["/a/b", "/legs", "/tags"]}, ()),  # /tags is an empty array in all
        ({"select": ["/rare"], "top_n": 3}, ("/rare",)),  # of the records that were read
        ({"select": ["/rare"], "skip_n": 20}, ()),
        ({"keys": ["20"], "select": ["/rare", "/a"]}, ("/a",)),
    ],
)
@pytest.mark.parametrize("text", [None, "/id >= 0", "@key != 'x'", "/prcie IS NULL"])
def test_fields_of_the_order_and_the_selection_are_told(
    server: ServerProcess, text: str | None, options: dict[str, Any], absent: tuple[str, ...]
) -> None:
    if text is not None and options.get("top_n") == 3:
        absent = ()  # a filter reads more records at once
    with server.client() as client, client.query("orders", text, **options) as result:
        list(result)
        assert result.footer is not None
        assert result.footer.absent_fields == absent


def test_counts_and_changes_by_filter_tell_them(server: ServerProcess, connect: Connect) -> None:
    told: list[tuple[str, ...]] = []
    with connect(server.address) as client:
        assert client.count("orders", "/symbl = 'IBM'", on_absent_fields=told.append) == 0
        assert client.count("orders", "/symbol = 'IBM'", on_absent_fields=told.append) == 20
        assert client.count("orders", on_absent_fields=told.append) == 21
        assert told == [("/symbl",)]
        for dry_run in (True, False):
            steps: list[Deleted] = []
            done = client.sow_delete("orders", filter="/symbl = 'IBM'", dry_run=dry_run, on_progress=steps.append)
            assert (done.matched, done.absent_fields, steps[-1]) == (0, ("/symbl",), done)
            restamped = client.restamp("orders", "clear", filter="/symbl = 'IBM'", dry_run=dry_run)
            assert (restamped.matched, restamped.absent_fields) == (0, ("/symbl",))
        client.publish_many("gone", [{"id": number} for number in range(2_500)])
        done = client.sow_delete("gone", filter="/id < 2000 OR /idd = 1")
        assert (done.deleted, done.absent_fields) == (2_000, ("/idd",))
        assert client.sow_delete("gone", filter="/id < 2400").absent_fields == ()
        assert client.sow_delete("gone", all=True).absent_fields == ()


def test_a_snapshot_tells_them_at_its_end(server: ServerProcess, connect: Connect) -> None:
    def end(*about: Any, **options: Any) -> tuple[str, ...]:
        with client.sow_and_subscribe(*about, **options) as subscription:
            return next(change for change in subscription if change.op == "snapshot_end").absent_fields

    with connect(server.address) as client:
        assert end("orders", "/symbl = 'IBM'") == ("/symbl",)
        assert end("orders", "/symbl = 'IBM'", snapshot_max=5) == ("/symbl",)
        assert end("orders", select=["/id", "/symbl"]) == ("/symbl",)
        assert end("orders", "/symbol = 'IBM'") == ()
        assert end(None, "/symbl = 'IBM'", topic_pattern="orders") == ()  # of topics with other fields
        with client.live_view("orders", "/symbl = 'IBM'") as view:
            assert view.absent_fields == ("/symbl",)
        with client.live_view("orders") as view:
            assert view.absent_fields == ()


def test_the_parts_of_an_export_tell_them_together(server: ServerProcess, connect: Connect) -> None:
    """Fields of the last record are none that the first parts have; the last part has read all."""
    with connect(server.address) as client:
        client.publish_many("sparse", [{"id": f"{n:03}", "last" if n == 499 else "first": n} for n in range(500)])
        opened = client.open_export("sparse", "/first > 490 OR /last = 499 OR /frist = 1", parts=4)
        assert len(opened.parts) == 4
        told: list[tuple[str, ...]] = []
        for part in range(4):
            list(client.read_export(opened.id, part, on_absent_fields=told.append))
        assert told == [("/last", "/frist")] * 3 + [("/frist",)]
        client.close_export(opened.id)


COMMANDS: Final = [
    ["count", "orders", "/{} = 'x'"],
    ["query", "orders", "/{} = 'x'", "--count"],
    ["query", "orders", "/{} = 'x'", "--count", "--skip", "1"],
    ["query", "orders", "--select", "/id,/{}"],
    ["query", "orders", "--order-by", "/{} DESC"],
    ["delete", "orders", "--filter", "/{} = 'x'"],
    ["delete", "orders", "--filter", "/{} = 'x'", "--dry-run"],
    ["topic", "restamp", "orders", "--clear", "--filter", "/{} = 'x'"],
    ["export", "orders", "FILE", "--filter", "/{} = 'x'"],
    ["export", "orders", "FILE", "--select", "/id,/{}"],
    ["subscribe", "orders", "/{} = 'x'", "--sow", "--for", "300ms"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_each_command_says_it_once(server: ServerProcess, tmp_path: Path, words: list[str]) -> None:
    for name in ("symbl", "symbol"):
        given = [word.format(name) if word != "FILE" else str(tmp_path / "orders.csv") for word in words]
        found = CliRunner().invoke(sow, ["--server", server.address, *given])
        assert found.exit_code == 0, found.stderr
        said = found.stderr.count("no record that was read has a value in /symbl: is the name right?")
        assert (said, found.stderr.count("is the name right")) == ((1, 1) if name == "symbl" else (0, 0))


FILE: Final = (
    identity("desk", "desk")
    + grant("desk", ".*", "read", "rows = \"/desk = 'eu'\"\n")
    + identity("half", "half")
    + grant("half", ".*", "read", 'hide = ["/secret"]\n')
)


def test_a_caller_that_sees_only_some_rows_learns_nothing_of_the_others(tmp_path: Path) -> None:
    write_access(tmp_path, FILE)
    told = {}
    with ServerProcess(tmp_path, f'{GUARDED}[topics.orders]\nkey = ["/id"]\n') as server:
        with client_of(server, "root") as root:
            root.publish_many("orders", [{"id": 1, "desk": "eu"}, {"id": 2, "desk": "us", "secret": 1}])
        for name in ("root", "desk", "half"):
            with client_of(server, name) as client:
                plans = [client.explain("orders", text) for text in ("/secret = 1", "/x = 1")]
                plans += [client.explain("orders", order_by=text) for text in ("/secret", "/x")]
                pages = [client.page("orders", page_size=5, select=[path]) for path in ("/secret", "/x")]
            told[name] = (
                *[plan.absent_fields for plan in plans],
                *[page.footer.absent_fields for page in pages],
            )
    assert told == {"root": ((), ("/x",)) * 3, "desk": ((), ()) * 3, "half": ((), ("/x",)) * 3}
