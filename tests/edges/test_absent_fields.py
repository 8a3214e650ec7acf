"""A mistyped field in a filter is told, without a scan for it and without a word about hidden rows (rule Q10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from sow_cli.command import sow
from tests.support.access import GUARDED, client_of, grant, identity, write_access
from tests.support.clients import Connect, connect
from tests.support.server import ServerProcess

__all__ = ["connect"]  # a fixture

CONFIG: Final = """
[server]
reader_processes = 1
[topics.orders]
key = ["/id"]
index = ["/symbol"]
[topics.large]
key = ["/id"]
"""
LARGE: Final = 12_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("absent"), CONFIG) as made:
        with made.client() as client:
            orders = [{"id": n, "symbol": "IBM", "legs": [{"px": n}], "a": {"b": n}} for n in range(20)]
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
            told[name] = tuple([plan.absent_fields for plan in plans])
    assert told == {"root": ((), ("/x",)), "desk": ((), ()), "half": ((), ("/x",))}
