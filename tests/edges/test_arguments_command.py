"""Odd values of every option of the command, and what it says of mistyped topics, parts of keys, and times that are
over.

The commands and their options come from the command itself, so a new one is tested at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner, Result

from sow_cli.command import sow
from sow_client import EARLIEST
from tests.support.servers.server import ServerProcess, until

ODD = ["\udcff", "9" * 30, "-1", "nan", "inf", "", "x" * 100_000]
GIVEN = {"topic": "orders", "keys": "k", "key": "k", "name": "orders", "load_id": "l", "to": "earliest"}
ENDLESS = {"shell", "console", "bench", "subscribe", "watch", "top", "lease", "server", "doctor", "log", "usage"}
"""Commands that go on until they are ended, or that work without a server."""
PARTS = 5
"""The default run has one line of an option in so many; the others are marked `long`."""
CONFIG = """
[server]
dynamic_topics = true
[journal]
prune_interval = "200ms"
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.comp]
key = ["/a", "/b"]
expiration = "enabled"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("command"), CONFIG) as server:
        yield server


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if name in ENDLESS or found is None:
            continue
        if isinstance(found, click.Group):
            yield from commands(found, *path, name)
        else:
            yield (*path, name), found


def run(server: ServerProcess, *words: str, text: str = "") -> Result:
    return CliRunner().invoke(sow, ["--server", server.address, *words], input=text)


def lines(command: click.Command) -> Iterator[list[str]]:
    """Lines of a command, each with one odd value."""
    needed: list[str] = []
    places: dict[str, int] = {}
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            places[parameter.name or ""] = len(needed)
            needed.append(GIVEN.get(parameter.name or "", "x"))
    for odd in ODD:
        for place in places.values():
            yield [*needed[:place], odd, *needed[place + 1 :]]
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.is_flag and "--watch" not in parameter.opts:
                yield [*needed, f"{parameter.opts[0]}={odd}"]


@pytest.mark.parametrize("part", [0, *[pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS)]])
def test_no_option_of_the_command_ends_in_a_traceback(part: int) -> None:
    """Of an option's own check. Values that pass it reach the client, which names them (`test_arguments`)."""
    for number, (path, command) in enumerate(commands(sow)):
        for words in list(lines(command))[(part + number) % PARTS :: PARTS]:
            try:
                command.make_context(path[-1], words).close()
            except click.ClickException:
                continue


def test_a_text_that_is_not_utf_8_is_refused_by_its_name(server: ServerProcess) -> None:
    for words in (["query", "orders", "/id = '\udcff'"], ["topic", "describe", "\udcff"], ["count", "\udcff"]):
        result = run(server, *words)
        assert result.exit_code in (1, 2)
        assert isinstance(result.exception, SystemExit), words


def test_a_mistyped_topic_is_told_with_the_one_that_was_meant(server: ServerProcess) -> None:
    result = run(server, "get", "oders", "1")
    assert result.exit_code == 1
    assert "there is no topic 'oders'" in result.stderr
    assert "did you mean 'orders'?" in result.stderr
    assert "did you mean" not in run(server, "get", "zzz", "1").stderr


def test_a_publish_tells_that_it_has_created_a_topic(server: ServerProcess) -> None:
    first = run(server, "publish", "ordres", "--key", "1", "--data", "{}")
    assert first.exit_code == 0
    assert "there was no topic ordres" in first.stderr
    assert "was orders meant?" in first.stderr
    assert "there was no topic" not in run(server, "publish", "ordres", "--key", "2", "--data", "{}").stderr
    assert "there was no topic" in run(server, "publish", "brandnew", "--key-field", "id", text='{"id":1}\n').stderr


def test_parts_name_one_key(server: ServerProcess) -> None:
    assert run(server, "publish", "comp", "--data", '{"a":"x|1","b":2}').exit_code == 0
    assert run(server, "get", "comp", "x|1", "2", "--parts").exit_code == 0
    assert run(server, "history", "comp", "x|1", "2", "--parts").exit_code == 0
    assert run(server, "touch", "comp", "x|1", "2", "--parts", "--ttl", "1h").exit_code == 0
    assert run(server, "persist", "comp", "x|1", "2", "--parts").exit_code == 0
    wrong = run(server, "get", "comp", "x", "y", "z", "--parts")
    assert wrong.exit_code == 1
    assert "has 3 parts, and a key here has 2" in wrong.stderr
    assert run(server, "delete", "comp", "--key", "x|1", "--key", "2", "--parts").exit_code == 0
    with server.client() as client:
        assert client.count("comp") == 0


def test_an_expire_time_that_is_over_gets_a_remark(server: ServerProcess) -> None:
    over = ["--expire-at", "2024-01-31T12:00:00Z"]
    with server.client() as client:
        client.publish("orders", {"id": "past"})
    assert "is over" in run(server, "publish", "orders", "--data", '{"id":"past"}', *over).stderr
    with server.client() as client:
        client.publish("orders", {"id": "past"})
    assert "is over" in run(server, "touch", "orders", "past", *over).stderr
    assert (
        "is over"
        not in run(server, "publish", "orders", "--data", '{"id":1}', "--expire-at", "2030-01-31T12:00:00Z").stderr
    )


def test_the_history_of_a_young_topic_whose_journal_was_pruned(server: ServerProcess) -> None:
    """The search for the beginning of the journal asked for a time of tomorrow, and ended with TIME_IN_FUTURE."""
    with server.client() as client:
        client.create_topic("young", key=["/id"], max_entries=2)
        for number in range(6):
            client.publish("young", {"id": 1, "n": number})
        until(lambda: client.plan_changes("young", start=EARLIEST).entries < 6, 20, "the journal to be pruned")
    result = run(server, "history", "young", "1")
    assert result.exit_code == 0, result.stderr
