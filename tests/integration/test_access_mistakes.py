"""The mistakes of a first day with credentials: each ends with one message that names the fault (rules A1 to A3)."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sow_cli.command import sow
from sow_client import AsyncClient, Client, PermissionDenied
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access, write_private
from tests.support.servers.server import DidNotStart, ServerProcess, until

ACCESS = (
    identity("desk", "desk")
    + grant("desk", "orders", "read publish", "rows = \"/region = 'eu'\"")
    + identity("late", "desk", more="expires = 2020-01-01")
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    write_access(folder, ACCESS)
    with ServerProcess(folder, GUARDED + '[topics.orders]\nkey = ["/id"]\n') as made:
        yield made


def called(server: ServerProcess, folder: Path, token: str | None, *arguments: str) -> Result:
    """Runs the command with a token, in a file that only its user may read."""
    options = ["--server", server.address]
    if token is not None:
        path = folder / "a.token"
        write_private(path, token)
        options += ["--token-file", str(path)]
    return CliRunner().invoke(sow, [*options, *arguments])


@pytest.mark.parametrize(
    ("token", "arguments", "code", "told"),
    [
        (None, ("whoami",), 1, "the call has no bearer token\n  hint: no credential was given; see --token-file"),
        ("guessed", ("whoami",), 1, "the token whose SHA-256 begins with 34d8f9557511183a belongs to no identity"),
        ("late", ("whoami",), 1, "UNAUTHENTICATED: the token has expired, at 2020-01-01 00:00:00 UTC"),
        ("two\nlines", ("whoami",), 2, "a.token is no token: expected one line"),
        ("desk", ("status",), 1, "PERMISSION_DENIED: desk lacks the permission observe\n  hint: `sow auth check"),
        ("desk", ("topic", "delete", "orders", "-f"), 1, "desk lacks the permission topic-admin on orders"),
        ("desk", ("count", "secret"), 1, "TOPIC_NOT_FOUND"),
        ("root", ("auth", "check", "desk", "read", "orders.eu"), 1, "match only a part of this name"),
        ("root", ("auth", "check", "desk", "reed", "orders"), 1, "action: 'reed' is none of read, consume"),
        ("root", ("auth", "check", "dusk", "read", "orders"), 1, "the access file has no identity 'dusk'"),
        ("root", ("auth", "check", "desk", "read"), 1, "topic: read needs a topic"),
        ("root", ("sessions", "--end", "s0"), 1, "there is no session 's0'"),
    ],
)
def test_a_mistake_with_the_command(
    server: ServerProcess, tmp_path: Path, token: str | None, arguments: tuple[str, ...], code: int, told: str
) -> None:
    result = called(server, tmp_path, token, *arguments)
    assert result.exit_code == code
    assert told in result.output
    assert "Traceback" not in result.output


def test_a_check_says_whether_a_record_is_among_the_rows(server: ServerProcess, tmp_path: Path) -> None:
    record = tmp_path / "order.json"
    for region, allowed, told in (("eu", True, "this record included"), ("us", False, "no rows have this record")):
        record.write_text(json.dumps({"id": 1, "region": region}))
        result = called(server, tmp_path, "root", "auth", "check", "desk", "publish", "orders", "--record", str(record))
        answer = json.loads(result.stdout)
        assert (answer["allowed"], result.exit_code) == (allowed, 0 if allowed else 1)
        assert told in answer["explanation"]
        assert answer["decided_by"].startswith("auth.toml:")


async def name_of(make: Callable[[], AsyncClient]) -> str:
    """The identity of an asynchronous client, which is closed then."""
    async with make() as client:
        return (await client.whoami()).name


def test_every_form_of_a_token_is_shown_by_both_clients(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "desk.token"
    write_private(path, "desk\n")
    for token in ("desk", path, lambda: "desk"):
        with Client(server.address, token=token) as client:
            assert client.whoami().name == "desk"
        assert asyncio.run(name_of(partial(AsyncClient, server.address, token=token))) == "desk"


def test_both_clients_of_the_environment_show_its_token(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "desk.token"
    write_private(path, "desk\n")
    monkeypatch.setenv("SOW_SERVER", server.address)
    monkeypatch.setenv("SOW_TOKEN_FILE", str(path))
    with Client() as client:
        assert client.whoami().name == "desk"
    assert asyncio.run(name_of(AsyncClient)) == "desk"
    write_private(path, "guessed\n")
    with Client() as client, pytest.raises(PermissionDenied):
        client.whoami()


def test_a_token_is_no_credential_where_none_is_asked_for(tmp_path: Path) -> None:
    """Story: without `auth` the refusal said that the call had no credential, although it had shown one."""
    write_access(tmp_path, "")
    with (
        ServerProcess(tmp_path, GUARDED.replace('auth = "token"', "")) as server,
        client_of(server, "root") as root,
        pytest.raises(PermissionDenied, match=r'auth = "none".*no identity anonymous'),
    ):
        root.whoami()


def test_a_start_without_the_keys_of_jwts_ends_with_one_message(tmp_path: Path) -> None:
    """Story: --check-config had the message; the start itself ended with a traceback."""
    write_access(tmp_path, "")
    config = GUARDED.replace('"token"', '"jwt"') + '[access.jwt]\njwks = "keys.json"\nissuer = "i"\naudience = "a"\n'
    with pytest.raises(DidNotStart) as caught:
        ServerProcess(tmp_path, config)
    assert caught.value.code == 2
    assert "sow-server: [access.jwt] jwks: " in caught.value.said
    assert "Traceback" not in caught.value.said


def test_a_server_without_an_access_file_says_so(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        found = called(server, tmp_path, None, "whoami")
        assert (found.exit_code, json.loads(found.stdout)["identity"]) == (0, "")
        assert "has no access file: everybody who reaches it may do everything" in found.stderr
        for arguments in (("auth", "reload"), ("auth", "check", "desk", "read", "orders")):
            refused = called(server, tmp_path, None, *arguments)
            assert refused.exit_code == 1
            assert "this server has no access file" in refused.stderr
        server.signal(signal.SIGHUP)
        until(lambda: len(server.events("access_reload_refused")) == 2, 30, "the refusals of the command and of SIGHUP")
        assert server.alive
