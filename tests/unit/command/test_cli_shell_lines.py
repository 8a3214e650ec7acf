"""Lines of the interactive shell: how each is read, completed and run, without a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import click
import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from sow_cli import completion, shell
from sow_cli.command import sow
from sow_cli.connection import given_words
from sow_cli.interrupts import INTERRUPTED, TERMINATED, Terminated
from sow_cli.session import Session
from sow_cli.shell_lines import ShellCommand, commands, goes_on
from sow_client import Instance, Unavailable
from tests.support.fakes.fake_client import FakeClient

SERVER = ["--server", "here:1"]


class Fake(FakeClient):
    """A client that knows its instance."""

    def describe_instance(self) -> Instance:
        return Instance("here:1", "a", "1", "1", "", serving=True, server_version="0.1.0")


class Connected:
    """Connects to a client with two topics."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []

    def __call__(self, session: Session) -> FakeClient:
        self.sessions.append(session)
        client = Fake()
        client.add("orders", records=[{"id": 1, "price": {"bid": 1}}])
        client.add("my topic")
        return client


@pytest.fixture
def connect() -> Connected:
    return Connected()


@pytest.fixture
def clients(connect: Connected) -> Iterator[shell.Clients]:
    with shell.Clients(connect) as clients:  # type: ignore[arg-type]  # fakes
        yield clients


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hurries: a fake answers at once, but its thread may start late."""
    monkeypatch.setattr(shell, "GREETING_SECONDS_MAX", 60.0)
    monkeypatch.setattr(completion, "NAMES_SECONDS_MAX", 60.0)


# ---- running ----


@pytest.mark.parametrize(
    ("line", "code", "out"),
    [
        ("", 0, ""),
        ("sow", 0, ""),
        ("count orders", 0, '{"topic":"orders","count":1}\n'),
        ("sow count orders", 0, '{"topic":"orders","count":1}\n'),
        ("help count", 0, "Usage: sow count"),
        ("? count", 0, "Usage: sow count"),
        ("count orders \\G", 0, "topic: orders\ncount: 1"),
        ("get orders 2", 1, ""),
        ("get orders 2; count orders", 0, '{"topic":"orders","count":1}\n'),
        ("count orders; get orders 2;", 1, '{"topic":"orders","count":1}\n'),
        ("count orders\\\n --format csv", 0, "topic,count\norders,1\n"),
        ("count orders | tr a-z A-Z | tail -n 1", 0, '{"TOPIC":"ORDERS","COUNT":1}\n'),
        ("count orders \\G | grep count", 0, "count: 1\n"),
    ],
)
def test_a_line_is_run_as_a_command(
    clients: shell.Clients, capfd: pytest.CaptureFixture[str], line: str, code: int, out: str
) -> None:
    assert shell.Shell(sow, SERVER, clients).execute(line) == code
    assert out in capfd.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("get 'x", "sow: No closing quotation at 4\n  get 'x\n      ^\n"),
        ("count \\", "sow: No escaped character at 6"),
        ('publish orders --data {"id": 1', "sow: No closing bracket at 22"),
        ("count orders >", "no file behind > at 14"),
        ("count orders |", "no program behind | at 14"),
        ("| head", "no command in front of | at 0"),
        ("count orders > a b", "one file stands behind >, at the end of the command at 17"),
        ("count orders > a | b", "one file stands behind >"),
        ("count orders || b", "|| is no operator here: quote it at 13"),
        ("query orders /price < 9", "< is no operator here: quote it at 20"),
        (
            "query orders /price > 9",
            "a filter stands in quotation marks; a file of this name is meant by > ./NAME at 20",
        ),
        ("query orders /price >= bid", "a filter stands in quotation marks"),
        ("query orders price > 9", "a filter stands in quotation marks"),
        ("query orders --filter /price > ask", "a filter stands in quotation marks"),
        ("query orders --keys-only (/a + 1) > b", "a filter stands in quotation marks"),
        ("count orders > /nowhere/out", "sow: cannot write to /nowhere/out: No such file or directory"),
        ("count", "Missing argument 'TOPIC'"),
        ("nonsense", "No such command 'nonsense'"),
        ("--server", "Option '--server' requires an argument"),
    ],
)
def test_a_line_that_is_wrong_usage_is_told_and_the_shell_goes_on(
    clients: shell.Clients, capfd: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    opened = shell.Shell(sow, SERVER, clients)
    assert opened.execute(line) == (1 if "cannot write" in message else 2)
    assert message in capfd.readouterr().err
    assert opened.execute("count orders") == 0


def test_a_result_goes_to_a_file_anew_or_behind_what_it_has(
    clients: shell.Clients, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    opened = shell.Shell(sow, SERVER, clients)
    one = '{"topic":"orders","count":1}\n'
    for line, name, found in (
        ("count orders > out", "out", one),
        ("count orders >> out", "out", one * 2),
        ("count orders>'a file'; count orders >> ~/out", "a file", one),
        ("count orders '/id > 0' > out", "out", one),
        ("query orders --keys-only --select /id > ./9", "9", None),
        ("query orders --select /id > new", "new", None),
    ):
        monkeypatch.setenv("HOME", str(tmp_path))
        opened.execute(line)
        assert found is None or (tmp_path / name).read_text() == found, line
        assert (tmp_path / name).exists(), line
    assert capfd.readouterr().out == ""


def test_a_program_that_ends_early_ends_its_command_quietly(
    clients: shell.Clients, capfd: pytest.CaptureFixture[str]
) -> None:
    opened = shell.Shell(sow, SERVER, clients)
    assert opened.execute("query orders | true; count orders") == 0
    found = capfd.readouterr()
    assert (found.out, found.err) == ('{"topic":"orders","count":1}\n', "")


def test_ctrl_c_leaves_the_rest_of_the_line(clients: shell.Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Sequence[str]] = []

    def ended(_root: object, words: Sequence[str], _connect: object) -> int:
        ran.append(words[-1:])
        return INTERRUPTED

    monkeypatch.setattr(shell, "_ended", ended)
    assert shell.Shell(sow, [], clients).execute("query a; query b") == INTERRUPTED
    assert ran == [["a"]]


def test_a_line_with_a_point_keeps_its_text() -> None:
    """The SQL behind `.sql` has operators and quotation marks of its own."""
    assert commands(" .sql SELECT 'a;b' FROM t WHERE x > 9 ") == [
        ShellCommand((".sql", "SELECT 'a;b' FROM t WHERE x > 9"))
    ]
    assert goes_on(".sql SELECT 'a")
    assert not goes_on(".sql SELECT {a: 1 > 2")


def test_a_question_that_nobody_answers_aborts_its_command_only(
    clients: shell.Clients, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def abort(*_args: object, **_keywords: object) -> None:
        raise click.Abort

    monkeypatch.setattr(sow.commands["count"], "callback", abort)
    assert shell.Shell(sow, SERVER, clients).execute("count orders") == 1
    assert capfd.readouterr().err == "Aborted!\n"


def test_commands_have_the_options_that_the_shell_was_started_with(connect: Connected, clients: shell.Clients) -> None:
    opened = shell.Shell(sow, SERVER, clients)
    assert opened._prompt() == "here:1> "
    opened.execute("count orders")
    opened.execute("--server there:2 count orders")
    assert [session.server for session in connect.sessions] == ["here:1", "there:2"]


def test_a_prompt_without_settings_leaves_the_error_to_the_next_command(
    clients: shell.Clients, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert shell.Shell(sow, ["--context", "missing"], clients)._prompt() == "sow> "


# ---- the loop ----


class Typed:
    """In place of the terminal: what a person does, one after the other."""

    def __init__(self, *done: str | type[BaseException]) -> None:
        self._done = list(done)

    def __call__(self, **_options: object) -> Self:
        return self

    def prompt(self, _text: str) -> str:
        done = self._done.pop(0)
        if isinstance(done, str):
            return done
        raise done


def run(clients: shell.Clients, monkeypatch: pytest.MonkeyPatch, path: Path, *done: Any) -> int:
    """The exit code of a shell; all that was typed must be read."""
    typed = Typed(*done)
    monkeypatch.setattr(shell, "PromptSession", typed)
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    code = shell.Shell(sow, SERVER, clients).run()
    assert not typed._done
    return code


@pytest.mark.parametrize("leave", [EOFError, "exit", " quit ", "\\q"])
def test_a_shell_goes_on_after_errors_and_an_emptied_line_until_it_is_left(
    clients: shell.Clients,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    leave: Any,
) -> None:
    assert run(clients, monkeypatch, tmp_path, "nonsense", KeyboardInterrupt, "count orders", leave) == 0
    shown = capfd.readouterr().out
    assert "server 0.1.0, a at here:1" in shown
    assert "help lists the commands" in shown
    assert shown.endswith('{"topic":"orders","count":1}\n')


def test_sigterm_ends_a_shell_that_waits_for_a_line(
    clients: shell.Clients, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(Terminated):
        run(clients, monkeypatch, tmp_path, Terminated)


@pytest.mark.parametrize(
    ("ended", "then", "code"), [(INTERRUPTED, ["exit"], 0), (TERMINATED, [], TERMINATED)], ids=["Ctrl-C", "SIGTERM"]
)
def test_ctrl_c_ends_a_command_and_sigterm_the_shell_too(
    clients: shell.Clients, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: int, then: Sequence[str], code: int
) -> None:
    monkeypatch.setattr(shell, "_ended", lambda *_: ended)
    assert run(clients, monkeypatch, tmp_path, "count orders", *then) == code


def test_a_server_that_is_not_there_is_said_in_the_greeting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Gone(FakeClient):
        def describe_instance(self) -> Instance:
            raise Unavailable("nobody there", reason="UNREACHABLE")

    with shell.Clients(lambda _: Gone()) as clients:  # type: ignore[arg-type,return-value]  # fakes
        assert run(clients, monkeypatch, tmp_path, EOFError) == 0
    assert "no server yet: nobody there" in capfd.readouterr().out


# ---- completion ----


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("exi", [("exit", -3, "exit")]),
        (
            "sow subs",
            [
                ("subscribe", -4, "subscribe"),
            ],
        ),
        ("get ", [("'my topic'", 0, "my topic"), ("orders", 0, "orders")]),
        ("get 'm", [("'my topic", -2, "my topic")]),
        ("query orders /price/", [('"/price/bid', -7, "/price/bid")]),
        ("query orders '/price > 1 AN", [("'/price > 1 AND", -14, "AND")]),
        ("count nowhere /", []),
    ],
)
def test_a_tab_completes_the_word_under_the_cursor(
    clients: shell.Clients, line: str, found: list[tuple[str, int, str]]
) -> None:
    shell.Shell(sow, SERVER, clients)  # prepares the commands
    completer = shell.LineCompleter(sow, clients, ["--server", "here:1"])
    offered = completer.get_completions(Document(line), CompleteEvent())
    assert [(one.text, one.start_position, one.display_text) for one in offered] == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("load orders ", ["'a b.csv'", "folder/", "x.csv"]),
        ("load orders .", [".hidden"]),
        ("load orders folder/", ["folder/in"]),
        ("load orders 'a", ["'a b.csv"]),
        ("load orders nowhere/", []),
    ],
)
def test_a_tab_completes_files(
    clients: shell.Clients, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, found: list[str]
) -> None:
    for name in ("x.csv", "a b.csv", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "in").touch()
    monkeypatch.chdir(tmp_path)
    completer = shell.LineCompleter(sow, clients, [])
    assert [one.text for one in completer.get_completions(Document(line), CompleteEvent())] == found


def test_options_that_the_shell_began_with_count_for_its_commands() -> None:
    arguments = ["--server", "here:1", "--color", "never", "--no-pager"]
    with sow.make_context("sow", list(arguments), obj=FakeClient) as ctx:
        assert given_words(ctx) == arguments
