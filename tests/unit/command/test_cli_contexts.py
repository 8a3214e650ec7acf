"""Contexts of the command `sow`, and where each setting of the connection comes from (rule X9)."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from sow_cli.command import sow
from sow_cli.connection import settings
from sow_cli.context_files import ContextFiles
from sow_cli.session import Session
from tests.support.fakes.fake_client import FakeClient


class User:
    """Runs commands with a folder for configurations of its own, and sees the sessions that they have."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "sow"
        self.variables = {"XDG_CONFIG_HOME": str(home)}
        self.sessions: list[Session] = []

    def __call__(self, *arguments: str, **variables: str) -> Result:
        def connect(session: Session) -> FakeClient:
            self.sessions.append(session)
            client = FakeClient()
            client.add("orders", records=[{"id": 1}])
            return client

        return CliRunner().invoke(sow, arguments, env=self.variables | variables, obj=connect)

    def session(self, *arguments: str, **variables: str) -> Session:
        """The session of a command that connects."""
        result = self(*arguments, "topics", **variables)
        assert result.exit_code == 0, result.output
        return self.sessions[-1]

    def write(self, name: str, text: str) -> Path:
        path = self.folder / "contexts" / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
        return path


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "desk.token"
    path.write_text("secret\n")
    path.chmod(0o600)
    return path


def test_a_context_is_saved_used_shown_listed_and_removed(user: User, token: Path) -> None:
    saved = user("context", "add", "prod", "--server", "127.0.0.1:7999", "--token-file", str(token), "--use")
    assert (saved.exit_code, saved.stderr) == (0, "saved prod; it is in use\n")
    assert user("--server", "localhost:1", "context", "add", "other").exit_code == 0

    session = user.session()
    assert (session.server, session.token_file) == ("127.0.0.1:7999", token)
    rows = [json.loads(line) for line in user("context", "list").stdout.splitlines()]
    assert [(row["name"], row["used"], row["server"]) for row in rows] == [
        ("other", False, "localhost:1"),
        ("prod", True, "127.0.0.1:7999"),
    ]
    shown = [json.loads(line) for line in user("context", "show", "prod").stdout.splitlines()]
    assert {row["setting"]: row["value"] for row in shown} == {"server": "127.0.0.1:7999", "token_file": str(token)}

    assert user("context", "use", "other").exit_code == 0
    assert user.session().server == "localhost:1"
    assert user("context", "use", "--none").exit_code == 0
    assert user.session().server == "127.0.0.1:7450"
    user("context", "use", "prod")
    assert user("context", "remove", "prod").exit_code == 0
    assert user.session().server == "127.0.0.1:7450", "a context that is removed is not in use"
    assert "there are: other" in user("--context", "prod", "topics").stderr


def test_the_files_of_contexts_are_their_owners_alone_and_have_no_token(user: User, token: Path) -> None:
    """X9."""
    user("context", "add", "prod", "--server", "localhost", "--token-file", str(token), "--use")
    for path in user.folder.rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            assert "secret" not in path.read_text()
        else:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


def test_files_are_saved_with_their_whole_path(user: User, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(token.parent)
    assert user("context", "add", "prod", "--server", "localhost", "--token-file", token.name).exit_code == 0
    monkeypatch.chdir("/")
    assert user.session("--context", "prod").token_file == token


def test_options_stand_before_the_subcommand_or_behind_it(user: User, token: Path) -> None:
    for arguments in (
        ("--server", "localhost:1", "--token-file", str(token), "get", "orders", "1"),
        ("--server", "localhost:1", "get", "orders", "1", "--token-file", str(token)),
        ("get", "--server", "localhost:1", "orders", "1", "--token-file", str(token)),
        ("--server", "localhost:2", "get", "orders", "1", "--server", "localhost:1", "--token-file", str(token)),
        ("topic", "describe", "orders", "--server", "localhost:1", "--token-file", str(token)),
    ):
        assert user(*arguments).exit_code == 0, arguments
        assert (user.sessions[-1].server, user.sessions[-1].token_file) == ("localhost:1", token)
    wrong = user("get", "orders", "1", "--tls-cert", __file__)
    assert (wrong.exit_code, "--tls-key belong together" in wrong.stderr) == (2, True)
    half = user("--tls-cert", __file__, "get", "orders", "1", "--tls-key", __file__)
    assert half.exit_code == 0, "one before, one behind"


def test_every_command_takes_the_options_of_the_connection_behind_it() -> None:
    def leaves(group: click.Group) -> Iterator[click.Command]:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            if isinstance(command, click.Group):
                yield from leaves(command)
            else:
                yield command

    wanted = {option for parameter in sow.params for option in parameter.opts} - {"--version", "--format"}
    for command in leaves(sow):
        taken = {option for parameter in command.params for option in parameter.opts}
        assert wanted <= taken, command.name


def test_a_setting_comes_from_its_option_a_named_context_the_environment_or_the_context_in_use(user: User) -> None:
    """X9."""
    user.write("used", 'server = "used:1"\nprefer = "random"\ntls_server_name = "used"\n')
    user.write("named", 'server = "named:1"\n')
    user("context", "use", "used")
    files = ContextFiles(user.variables)

    def found(options: dict[str, str], **variables: str) -> tuple[str, str]:
        server = settings(options, variables, files)["server"]
        return server.value, server.source

    assert found({"server": "given:1", "context": "named"}, SOW_SERVER="set:1") == ("given:1", "--server")
    assert found({"context": "named"}, SOW_SERVER="set:1") == ("named:1", "context named")
    assert found({}, SOW_SERVER="set:1", SOW_CONTEXT="named") == ("set:1", "SOW_SERVER")
    assert found({}, SOW_CONTEXT="named") == ("named:1", "context named")
    assert found({}) == ("used:1", "context used")
    user("context", "use", "--none")
    assert found({}) == ("127.0.0.1:7450", "default")
    assert found({}, SOW_SERVER="") == ("127.0.0.1:7450", "default"), "an empty variable is none"
    mixed = settings({"context": "named"}, {"SOW_PREFER": "random"}, files)
    assert (mixed["server"].source, mixed["prefer"].source) == ("context named", "SOW_PREFER")


def test_show_tells_where_each_setting_comes_from(user: User) -> None:
    user.write("used", 'server = "used:1"\n')
    shown = user("context", "show", "--context", "used", SOW_PREFER="random").stdout
    assert [json.loads(line) for line in shown.splitlines()] == [
        {"setting": "server", "value": "used:1", "source": "context used"},
        {"setting": "prefer", "value": "random", "source": "SOW_PREFER"},
        {"setting": "failover_publish", "value": "again", "source": "default"},
    ]


def test_a_default_format_comes_from_the_environment_or_a_context(user: User) -> None:
    user.write("csv", 'format = "csv"\n')
    assert user("count", "orders").stdout == '{"topic":"orders","count":1}\n'
    assert user("count", "orders", SOW_FORMAT="csv").stdout == "topic,count\norders,1\n"
    assert user("count", "orders", "--context", "csv").stdout == "topic,count\norders,1\n"
    assert user("--context", "csv", "count", "orders", "--format", "ndjson").stdout.startswith("{")
    wrong = user("count", "orders", SOW_FORMAT="xml")
    assert (wrong.exit_code, "xml" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('server = "a"\nserer = "b"\n', 2, "unknown setting 'serer'; did you mean server?"),
        ('\n\nprefer = "last"\n', 3, "prefer is first or random, not 'last'"),
        ('server = "a"\nformat = "xml"\n', 2, "format is table, json, ndjson or csv, not 'xml'"),
        ("server = 7450\n", 1, "server is a text in quotation marks"),
        ('server = "a"\n\n[more]\nx = 1\n', 3, "unknown setting 'more'"),
        ('server = "a\n', 1, ""),
        ('server = "a"\nserver = "b"\n', 2, ""),
    ],
)
def test_a_fault_of_a_context_names_the_file_and_the_line(user: User, text: str, line: int, said: str) -> None:
    """X9."""
    path = user.write("bad", text)
    result = user("--context", "bad", "topics")
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert f"line {line}" in result.stderr
    assert said in result.stderr
    assert user("--context", "bad", "topics", "--help").exit_code == 0, "help reads no file"


def test_a_context_that_others_may_read_or_write_is_refused(user: User) -> None:
    """X9."""
    path = user.write("open", 'server = "a"\n')
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        result = user("--context", "open", "topics")
        assert result.exit_code == 2
        assert f"chmod 600 {path}" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("add", "new"),
        ("add", "../new", "--server", "a"),
        ("add", "old", "--server", "a"),
        ("add", "new", "--server", "a:b"),
        ("add", "new", "--server", "a", "--tls-cert", __file__),
        ("add", "new", "--server", "a", "--context", "old"),
        ("use",),
        ("use", "missing"),
        ("use", "old", "--none"),
        ("show", "missing"),
        ("remove", "missing"),
    ],
)
def test_wrong_usage_of_contexts_changes_nothing(user: User, arguments: tuple[str, ...]) -> None:
    user.write("old", 'server = "a"\n')
    result = user("context", *arguments)
    assert result.exit_code == 2, result.output
    assert [path.name for path in user.folder.rglob("*") if path.is_file()] == ["old.toml"]


def test_replace_replaces_a_context(user: User) -> None:
    user.write("old", 'server = "a"\ntoken_file = "/x"\n')
    assert user("context", "add", "old", "--replace", "--server", "b").exit_code == 0
    assert ContextFiles(user.variables).read("old") == {"server": "b"}


def test_a_list_of_contexts_passes_over_a_bad_one(user: User) -> None:
    user.write("bad", "server\n")
    user.write("good", 'server = "a"\n')
    result = user("context", "list")
    assert result.exit_code == 0
    assert [json.loads(line)["name"] for line in result.stdout.splitlines()] == ["good"]
    assert "bad.toml" in result.stderr


def test_a_text_of_a_context_comes_back_as_it_was(user: User, tmp_path: Path) -> None:
    odd = tmp_path / 'a "quoted" \\ name\x7f.token'
    odd.write_text("secret")
    odd.chmod(0o600)
    assert user("context", "add", "odd", "--server", "localhost", "--token-file", str(odd)).exit_code == 0
    assert ContextFiles(user.variables).read("odd")["token_file"] == str(odd)
