"""Usage, help, connecting and exit codes of every command of `sow`, against a fake client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import click
import pytest
from click.testing import CliRunner

from sow.version import __version__
from sow_cli import advice
from sow_cli.command import COMMANDS, sow
from sow_cli.connection import ConnectionOption
from sow_cli.session import Session
from sow_client import (
    DeadlineExceeded,
    Instance,
    InternalError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SowError,
    Unavailable,
)
from tests.support.fakes.commands import client, run
from tests.support.fakes.fake_client import FakeClient
from tools import docs_command

__all__ = ["client"]  # a fixture


_WITHOUT_RESULT = (
    ("token", "new"),
    ("tls", "init"),
    ("lease",),
    ("console",),
    ("http",),
    ("context", "use"),
    ("context", "remove"),
    ("completion",),
    ("help",),
    ("filter", "from-amps"),
)
"""They write nothing for a pipe."""


REFERENCE: Final = "\n".join(docs_command.command().values())


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        yield (*path, name)


@pytest.mark.parametrize("path", list(commands(sow)), ids=" ".join)
def test_every_command_explains_itself_with_an_example_and_is_documented(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(sow, [*path, "--help"])

    assert result.exit_code == 0
    if len(path) > 1 or path[0] not in (
        "topic",
        "view",
        "durable",
        "policy",
        "retention",
        "quota",
        "replication",
        "auth",
        "token",
        "tls",
        "context",
        "config",
        "log",
        "filter",
        "cells",
    ):
        assert f"sow {' '.join(path)}" in result.stdout.split("Options:")[0]
        assert "--format" in result.stdout or path in _WITHOUT_RESULT
        assert f" sow {' '.join(path)} {{ #sow-{'-'.join(path)} }}" in REFERENCE


COLUMNS: Final = 80


@pytest.mark.parametrize("path", [(), *commands(sow)], ids=" ".join)
def test_a_help_text_fits_a_terminal_of_80_columns(path: tuple[str, ...]) -> None:
    """Examples and lists keep their lines: a line that is too long would be cut in two."""
    text = CliRunner().invoke(sow, [*path, "--help"], terminal_width=COLUMNS).stdout
    assert [line for line in text.splitlines() if len(line) > COLUMNS] == []


def test_the_pages_of_the_command_have_each_command_and_option_once() -> None:
    """Groups name their commands by hand; options come from the parser."""
    named = [name for group in docs_command.GROUPS.values() for name in group.commands]
    assert sorted(named) == sorted(COMMANDS)
    for path in commands(sow):
        name = " ".join(("sow", *path))
        (section,) = re.findall(rf"^#+ {name} {{[^}}]*}}\n(.*?)(?=^#|\Z)", REFERENCE, re.MULTILINE | re.DOTALL)
        command: click.Command = sow
        for word in path:
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), word)
            assert found is not None
            command = found
        options = [one for one in command.params if isinstance(one, click.Option) and not _is_common(one)]
        for option in options:
            assert re.search(rf"^\| `(?:-\w, )?{option.opts[-1]}\b[^|]*.*\| \S.* \|$", section, re.MULTILINE), (
                option.opts
            )


def _is_common(option: click.Option) -> bool:
    return isinstance(option, ConnectionOption) or option.name in ("output", "csv_safe")


def test_the_list_of_commands_tells_each_one_in_full() -> None:
    """Each has a sentence that fits, so none is cut off."""
    result = CliRunner().invoke(sow, ["--help"])

    assert "..." not in result.stdout.partition("Commands:")[2]


class _Answering(FakeClient):
    """A server that says who it is."""

    def describe_instance(self) -> Instance:
        if self.fails_with is not None:
            raise self.fails_with
        return Instance("127.0.0.1:7450", "nyc-1", "0d4c", "7b2e", "", True, "0.3.0")


def test_version_tells_that_of_the_server_too() -> None:
    seen = []

    def connect(session: Session) -> FakeClient:
        seen.append(session)
        return _Answering()

    result = CliRunner().invoke(sow, ["--version", "--server", "127.0.0.1:7450"], obj=connect)

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"sow {__version__}\nserver 0.3.0 (nyc-1 at 127.0.0.1:7450)\n"
    assert seen[0].server == "127.0.0.1:7450", "also where --server stands behind"
    assert (seen[0].waits or 9) < 1, "the version of the command is the main thing"


def test_version_without_a_server_is_that_of_the_command() -> None:
    client = _Answering()
    client.fails_with = Unavailable("nobody listens", reason="UNREACHABLE")

    result = run(client, "--version")

    assert (result.exit_code, result.stdout) == (0, f"sow {__version__}\n")
    assert result.stderr == "sow: no version from 127.0.0.1:7450 (UNREACHABLE)\n"


def test_no_subcommand_is_wrong_usage() -> None:
    result = run(FakeClient(), "--server", "127.0.0.1:7450")

    assert result.exit_code == 2
    assert "Missing command." in result.stderr


def test_help_needs_no_server() -> None:
    def connect(_session: object) -> FakeClient:
        pytest.fail("--help must not connect")

    assert CliRunner().invoke(sow, ["query", "--help"], obj=connect).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tls-cert", __file__, "topics"),
        ("--tls-ca", "/no/such/file", "topics"),
        ("no-such-command",),
        ("publish",),
        ("publish", "orders", "/no/such/file"),
        ("publish", "orders", "--data", "{}", "--ttl", "30"),
        ("publish", "orders", "--data", "{}", "--ttl", "-1s"),
        ("publish", "orders", "--data", "{}", "--expire-at", "tomorrow"),
        ("publish", "orders", "--data", "{}", "--expire-at", "2030-01-31T12:00:00"),
        ("publish", "orders", "--data", "{}", "--ttl", "1s", "--expire-at", "2030-01-31T12:00:00Z"),
        ("publish", "orders", __file__, "--data", "{}"),
        ("publish", "orders", "--key", "a", "--key-field", "id"),
        ("publish", "orders", "--key-field", "/a//b"),
        ("publish", "orders", "--batch", "0"),
        ("publish", "orders", "--key", "\udcff", "--data", "{}"),
        ("get", "orders"),
        ("query", "orders", "--top", "0"),
        ("query", "orders", "--select", "/a", "--exclude", "/b"),
        ("query", "orders", "--select", "/a", "--keys-only"),
        ("query", "orders", "--keys", "a,,b"),
        ("query", "orders", "--format", "xml"),
        ("changes", "orders", "--format", "parquet"),  # the help had it, and the command wrote NDJSON
        ("query", "orders", "--explain", "--count"),
        ("query", "orders", "--count", "--select", "/a"),  # refused by the server, and only together with --top
        ("query", "orders", "--count", "--exclude", "/a"),
        ("query", "orders", "--count", "--keys-only"),
        ("query", "orders", "--count", "--order-by", "/a"),
        ("publish", "orders", "--unset", "/a", "--data", "{}"),
        ("publish", "orders", "--delta", "--unset", "/a,,/b", "--data", "{}"),
        ("delete", "orders"),
        ("delete", "orders", "--key", "1", "--all"),
        ("delete", "orders", "--key", "1", "--filter", "true"),
        ("delete", "orders", "--key", "1", "--key", "2", "--if-version", "5"),
        ("delete", "orders", "--all", "--if-version", "5"),
        ("delete", "orders", "--all"),  # nobody to ask
        ("topic", "delete", "orders"),
        ("topic", "alter", "orders"),
        ("topic", "create", "orders", "--expiration", "sometimes"),
        ("topic", "create", "orders", "--retain-bytes", "10 parsecs"),
        ("topic", "create", "orders", "--fix-separator", "ab"),
        ("topic", "alter", "orders", "--index", "symbol"),
        ("topic", "alter", "orders", "--index", "none", "--index", "/symbol"),
        ("topic", "restamp", "orders"),
        ("topic", "restamp", "orders", "--set", "1s", "--clear"),
        ("topic", "restamp", "orders", "--cap", "never"),
        ("touch", "orders", "1", "--ttl", "1s", "--expire-at", "2030-01-31T12:00:00Z"),
    ],
)
def test_wrong_usage_ends_with_2_and_asks_the_server_nothing(client: FakeClient, arguments: tuple[str, ...]) -> None:
    result = run(client, *arguments)

    assert result.exit_code == 2, result.output
    assert "Error:" in result.stderr
    assert result.stdout == ""
    assert [name for name, _ in client.calls if name not in ("close", "describe_topic")] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("qeury", "orders"), "No such command 'qeury'. Did you mean 'query'?"),
        (("set", "a", "b"), "No such command 'set'. Did you mean 'publish'?"),
        (("zzz",), "No such command 'zzz'."),
        (("SELECT", "1"), "No such command 'SELECT'. Did you mean 'sql'?"),
        ((".tables",), "No such command '.tables'. Did you mean 'topics'?"),
        (("\\d", "orders"), "Did you mean 'topics'?"),
        (
            ("sql", "SELECT", "1"),
            "in quotation marks; in the shell `.sql SELECT …` needs none",
        ),
        (("help", "qeury"), "There is no help on 'qeury'. Did you mean 'query'?"),
        (("help", "lifetime"), "There is no help on 'lifetime'. Did you mean 'lifetimes'?"),
        (("help", "topic", "crate"), "There is no help on 'crate'. Did you mean 'create' or 'alter'?"),
        (("help", "zzz"), "There is no help on 'zzz'. `sow help` lists commands and topics."),
        (
            ("help", "errors", "nonsense"),
            "errors has no section 'nonsense'; there are: reasons-of-the-client, reasons-of-the-server",
        ),
        (("query", "orders", "--filter", "/a = 1"), "The filter is the argument behind TOPIC, in quotation marks."),
        (("count", "orders", "--where", "/a = 1"), "The filter is the argument behind TOPIC, in quotation marks."),
        (("query", "orders", "--limit", "5"), "No such option '--limit'. Did you mean '--top'?"),
        (("delete", "orders", "--where", "/a = 1"), "No such option '--where'. Did you mean '--filter'?"),
        # --idle-ttl looks most like it, and deletes the topic.
        (("topic", "create", "orders", "--ttl", "10m"), "No such option '--ttl'. Did you mean '--default-ttl'?"),
        (("count", "orders", "/a", "=", "1"), "(= 1)\n  hint: a filter stands in quotation marks"),
        (
            ("export", "orders", "x.csv", "/a = 1"),
            "\n  hint: a filter is given as --filter, in quotation marks",
        ),
        (("publish", "orders", '{"id": 1}'), "\n  hint: a document is given as --data, or in a pipe"),
        (("topics", "create"), "Got unexpected extra argument (create)"),
    ],
)
def test_wrong_usage_tells_the_next_step(client: FakeClient, arguments: tuple[str, ...], told: str) -> None:
    result = run(client, *arguments)

    assert result.exit_code == 2
    assert result.stderr.endswith(f"{told}\n")
    assert client.calls == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("publish", "orders", "/nowhere/\x1b[2J"),
        ("--tls-ca", "/nowhere/\x1b[2J", "topics"),
        ("--\x1b[2J",),
        ("topics", "\x1b[2J"),
        ("query", "orders", "/a", "\x1b[2J"),
    ],
)
def test_errors_escape_the_words_of_the_line(client: FakeClient, arguments: tuple[str, ...]) -> None:
    """X7: names of files, above all, come from others. Story: click's own messages showed them as they are."""
    result = run(client, *arguments)

    assert result.exit_code == 2
    assert "\\x1b[2J" in result.stderr
    assert "\x1b" not in result.output


NO_KEY_FIELDS = InvalidArgument("key: topic orders has no key fields", reason="KEY_REQUIRED")
OWN_KEY = InvalidArgument("key: topic orders derives its keys from /id", reason="KEY_NOT_ALLOWED")
NO_DURABLE = NotFound("durable: topic orders has no durable 'bil'", reason="DURABLE_NOT_FOUND")


@pytest.mark.parametrize(
    ("error", "arguments", "hint"),
    [
        (NO_KEY_FIELDS, ("publish", "orders", "--data", "{}"), "--key-field NAME"),
        (OWN_KEY, ("publish", "orders", "--key", "1", "--data", "{}"), "leave --key or --key-field out"),
        (NO_DURABLE, ("durable", "describe", "orders", "bil"), "`sow durable list`"),
    ],
)
def test_a_refusal_tells_the_next_step(
    client: FakeClient, error: SowError, arguments: tuple[str, ...], hint: str
) -> None:
    client.fails_with = error

    result = run(client, *arguments)

    assert result.exit_code == 1
    assert result.stderr.count("  hint: ") == 1
    assert hint in result.stderr.splitlines()[-1]


def test_a_bad_address_is_wrong_usage() -> None:
    result = CliRunner().invoke(sow, ["--server", "localhost:notaport", "topics"])

    assert result.exit_code == 2
    assert "localhost:notaport" in result.stderr


@pytest.mark.slow
def test_a_server_that_is_not_there_ends_with_3() -> None:
    # Port 1 of the loopback address: refused at once, so the command does not wait.
    result = CliRunner().invoke(sow, ["topics"], env={"SOW_SERVER": "127.0.0.1:1"})

    assert result.exit_code == 3
    assert "UNREACHABLE" in result.stderr
    assert "127.0.0.1:1" in result.stderr
    assert "within" not in result.stderr, "nothing was waited for"
    assert "  hint: start the server there, as `sow-server`, or name another one" in result.stderr


def test_a_cell_that_is_not_there_is_no_reason_to_name_another_server() -> None:
    """No other one has its topics, and those of other cells are served as ever."""
    lost = Unavailable("the cell b, where t lives: refused", reason="UNREACHABLE", details={"cell": "b"})
    assert advice.of_refusal(lost, "query").startswith("start that cell; `sow cells list`")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("cannot connect", reason="UNREACHABLE"), 3),
        (Unavailable("cut", reason="STREAM_CUT"), 3),
        (DeadlineExceeded("too slow", reason="DEADLINE_EXCEEDED"), 3),
        (Unavailable("stopping", reason="STOPPING"), 1),
        (Unavailable("writes have stopped", reason="STORE_FAILED"), 1),
        (PermissionDenied("who are you", reason="PERMISSION_DENIED"), 1),
        (InternalError("a fault", reason="INTERNAL"), 1),
    ],
)
def test_only_a_silent_server_counts_as_unreachable(client: FakeClient, error: SowError, code: int) -> None:
    client.fails_with = error

    result = run(client, "status")

    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(f"sow: {error.reason}: {error.message}")


def test_an_error_shows_reason_message_details_and_when_to_try_again(client: FakeClient) -> None:
    client.fails_with = ResourceExhausted(
        "the queue is full", reason="OVERLOADED", details={"field": "topic", "position": "7"}, retry_after=1.5
    )

    result = run(client, "count", "orders")

    assert result.stderr.splitlines() == [
        "sow: OVERLOADED: the queue is full",
        "  field: topic",
        "  position: 7",
        "  retry after: 1.5 s",
    ]


def test_a_bad_filter_is_shown_with_a_caret_below_the_place_at_fault(client: FakeClient) -> None:
    client.add("orders")

    for command in (("query",), ("count",), ("query", "--explain"), ("delete", "--filter")):
        result = run(client, command[0], "orders", *command[1:], "/price > AND /symbol = 'A'")

        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.splitlines() == [
            "sow: FILTER_INVALID: expected a value at 9",
            "  /price > AND /symbol = 'A'",
            "           ^",
            "  field: filter",
        ]


def test_control_characters_of_a_message_do_not_reach_the_terminal(client: FakeClient) -> None:
    client.fails_with = InternalError("one\x1b[2J\ntwo\r", reason="INTERNAL")

    assert run(client, "status").stderr == "sow: INTERNAL: one\\x1b[2J\ntwo\\r\n"


def test_ctrl_c_ends_with_130(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "status", interrupted)

    result = run(client, "status")

    assert (result.exit_code, result.output) == (130, "")


def test_a_reader_that_goes_away_is_no_failure(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(client, "status", broken)

    result = run(client, "status")

    assert (result.exit_code, result.output) == (0, "")
