"""The commands `sow token`, `sow auth`, `sow whoami` and `sow sessions`, and messages to a caller without access."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from sow_cli.command import sow
from sow_cli.session import Session, connect
from sow_client import CallerSession, Identity, PermissionDenied, SowError, Tls
from sow_client._tokens import Bearer
from tests.support.fakes.fake_client import FakeClient

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "cli.md"


def made(path: Path) -> Result:
    return CliRunner().invoke(sow, ["token", "new", "--out", str(path)])


def test_a_new_token_is_the_one_whose_digest_is_printed(tmp_path: Path) -> None:
    """Story: the file ended with a backslash and an n, so no token of this command was ever accepted."""
    path = tmp_path / "desk.token"
    result = made(path)
    assert result.exit_code == 0
    ((_, shown),) = Bearer(path).metadata()
    token = shown.removeprefix("Bearer ")
    assert result.output == f'token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
    assert path.read_text() == token + "\n"
    assert len(token) == 43, "256 bits"
    assert path.stat().st_mode & 0o777 == 0o600
    assert token not in result.output


def test_a_new_token_replaces_no_file(tmp_path: Path) -> None:
    path = tmp_path / "desk.token"
    path.write_text("old")
    result = made(path)
    assert result.exit_code == 2
    assert f"Error: {path}: File exists" in result.stderr
    assert path.read_text() == "old"
    assert made(tmp_path / "missing" / "desk.token").exit_code == 2


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        yield (*path, name)


@pytest.mark.parametrize("path", list(commands(sow)), ids=" ".join)
def test_examples_of_a_help_text_keep_their_lines(path: tuple[str, ...]) -> None:
    """Story: `\\\\b` for `\\b` in a docstring ran the examples of `sow auth check` into one line."""
    text = CliRunner().invoke(sow, [*path, "--help"]).stdout
    assert "\\b" not in text


def test_every_variable_of_the_environment_is_shown_and_documented() -> None:
    text = CliRunner().invoke(sow, ["--help"]).stdout
    client_page = DOCUMENTATION.with_name("client.md").read_text()
    variables = [parameter.envvar for parameter in sow.params if isinstance(parameter, click.Option)]
    named = [name for name in variables if isinstance(name, str)]
    assert len(named) == 10
    for name in named:
        assert name in text
        assert f"`{name}`" in DOCUMENTATION.read_text() or f"`${name}`" in DOCUMENTATION.read_text()
        assert f"`{name}`" in client_page or name in ("SOW_CONTEXT", "SOW_FORMAT"), "of the command"


def test_the_command_of_a_hint_shows_the_same_credentials() -> None:
    """Story: the command that continues `durable browse` was refused, for want of --token-file."""
    assert Session("127.0.0.1:7450", None, connect).command == "sow"
    tls = Tls(ca=Path("my ca.pem"), certificate="desk.pem", key="desk.key", server_name="sow")
    assert Session("host:1", tls, connect, Path("desk.token")).command == (
        "sow --server host:1 --tls-ca 'my ca.pem' --tls-cert desk.pem --tls-key desk.key --tls-server-name sow "
        "--token-file desk.token"
    )
    several = Session("a,b", None, connect, prefer="random", failover_publish="unsent")
    assert several.command == "sow --server a,b --prefer random --failover-publish unsent"


@pytest.mark.parametrize("by", ["option", "variable"])
def test_the_command_takes_the_preference_and_the_mode_of_publishes(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1, F2: only programs could give them."""
    options: list[str] = ["--prefer", "random", "--failover-publish", "unsent"]
    if by == "variable":
        options = []
        monkeypatch.setenv("SOW_PREFER", "random")
        monkeypatch.setenv("SOW_FAILOVER_PUBLISH", "unsent")
    made: list[Session] = []

    def connected(session: Session) -> FakeClient:
        made.append(session)
        return FakeClient()

    result = CliRunner().invoke(sow, ["--server", "a:1,b:2", *options, "topics"], obj=connected)
    assert result.exit_code == 0, result.stderr
    assert [(session.prefer, session.failover_publish) for session in made] == [("random", "unsent")]
    with connect(made[0]) as client:
        assert (client._transport.lines._prefer, client._failover_publish) == ("random", "unsent")
        assert not client._transport._patient, "none is waited for if all refuse"
    with connect(Session("a:1", None, connect)) as client:
        assert not client._transport._patient
    with connect(Session("a:1", None, connect, waits=0.3)) as client:
        assert client._transport._patient


def test_a_preference_that_is_none_is_wrong_usage() -> None:
    for option in ("--prefer", "--failover-publish"):
        result = CliRunner().invoke(sow, [option, "nearest", "topics"])
        assert result.exit_code == 2
        assert "nearest" in result.stderr


class Known:
    """A client that knows who is connected."""

    def __enter__(self) -> Known:
        return self

    def __exit__(self, *_: object) -> None: ...

    def whoami(self) -> Identity:
        return Identity("desk", "jwt", "f", NOW, ("trader",), {})

    def in_each_cell(self, ask: Callable[[Known], list[CallerSession]]) -> dict[str, list[CallerSession]]:
        return {"": ask(self)}

    def sessions(self) -> list[CallerSession]:
        return [CallerSession("s1", "desk", "jwt", "f", "ipv4:127.0.0.1:1", NOW, {"Get": 1})]


NOW = datetime(2030, 3, 17, 17, 46, 40, 123_456, tzinfo=UTC)


@pytest.mark.parametrize("command", ["whoami", "sessions"])
def test_times_of_callers_are_shown_as_all_others(command: str) -> None:
    """They were the raw text with microseconds and an offset, in tables too."""
    shown = CliRunner().invoke(sow, [command, "--format", "table"], obj=lambda _session: Known())
    assert "2030-03-17T17:46:40.123Z" in shown.stdout
    assert "+00:00" not in shown.stdout
    raw = CliRunner().invoke(sow, [command, "--format", "json"], obj=lambda _session: Known())
    assert '_micros": 1900000000123456' in raw.stdout


def refused(error: SowError, *options: str) -> str:
    client = FakeClient()
    client.fails_with = error
    return CliRunner().invoke(sow, [*options, "topics"], obj=lambda _session: client).stderr


def test_a_caller_who_gave_no_credential_is_told_how(tmp_path: Path) -> None:
    error = PermissionDenied("the call has no bearer token", reason="UNAUTHENTICATED")
    assert "hint: no credential was given; see --token-file (SOW_TOKEN_FILE)" in refused(error)
    token = tmp_path / "desk.token"
    made(token)
    assert "hint" not in refused(error, "--token-file", str(token))


def test_a_caller_who_may_not_is_told_who_can_find_out_why() -> None:
    error = PermissionDenied("desk lacks the permission operator", reason="PERMISSION_DENIED")
    assert "sow auth check IDENTITY ACTION TOPIC" in refused(error)
