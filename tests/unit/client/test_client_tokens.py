"""Tokens and TLS files of the clients: accepted ones, those that are refused before a call, and the messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from sow_client import AsyncClient, Client, InvalidArgument, Tls
from sow_client._channel import bearer, proxy_variable
from sow_client._statuses import unreachable
from sow_client._tokens import Bearer, Token
from tests.support.servers.certificates import Authority

TOKEN = "VKqTkkJ1-BWhZyaWctUbDm2vJm0E0"


def file_with(folder: Path, content: bytes, *, mode: int = 0o600) -> Path:
    path = folder / "desk.token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def shown(token: Token) -> str:
    ((name, value),) = Bearer(token).metadata()
    assert name == "authorization"
    return value.removeprefix("Bearer ")


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b" \n\n"])
def test_the_end_of_a_line_is_no_part_of_a_token(tmp_path: Path, end: bytes) -> None:
    assert shown(file_with(tmp_path, TOKEN.encode() + end)) == TOKEN
    assert shown(TOKEN + end.decode()) == TOKEN
    assert shown(lambda: TOKEN + end.decode()) == TOKEN


def test_a_token_may_be_longer_than_the_name_of_a_file() -> None:
    """A JWT is; whether a file has its name cannot be asked without care."""
    assert shown("e" * 5_000) == "e" * 5_000


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines\n", b"a b", b"\xff\xfe\n", "\u00e4".encode(), b"a\0b"])
def test_a_file_without_one_token_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    """Story: bytes that are no UTF-8 ended `sow` with a traceback, and two lines with INTERNAL: Invalid metadata."""
    path = file_with(tmp_path, content)
    with pytest.raises(InvalidArgument, match=r"desk.token is no token: expected one line") as caught:
        Client(token=path)
    assert caught.value.details["field"] == "token"
    with pytest.raises(InvalidArgument, match=r"desk.token is no token"):
        AsyncClient(token=path)


def test_a_refusal_does_not_show_what_was_given(tmp_path: Path) -> None:
    for token in (file_with(tmp_path, b"CANARY CANARY"), "CANARY CANARY", lambda: "CANARY CANARY"):
        with pytest.raises(InvalidArgument) as caught:
            Bearer(token).metadata()
        assert "CANARY" not in str(caught.value)


def test_a_text_that_names_a_file_is_taken_for_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_with(tmp_path, TOKEN.encode())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=r"'desk.token' is the name of a file, not a token; give it as a Path"):
        Client(token="desk.token")
    assert shown(Path("desk.token")) == TOKEN


@pytest.mark.parametrize("gives", [lambda: None, lambda: b"bytes", lambda: ""])
def test_a_function_without_a_token_is_told_of_at_the_call(gives: Callable[[], str]) -> None:
    made = Bearer(gives)
    with pytest.raises(InvalidArgument, match="the result of the function is no token"):
        made.metadata()


def test_what_is_neither_a_token_nor_tls_is_refused_by_its_type() -> None:
    wrong: Any
    for wrong in (b"bytes", 5):
        with pytest.raises(InvalidArgument, match="token: expected a text, a Path or a function, found"):
            Client(token=wrong)
    for wrong in ("ca.pem", True):
        with pytest.raises(InvalidArgument, match=r"tls: expected Tls\(ca="):
            Client(tls=wrong)
        with pytest.raises(InvalidArgument, match=r"tls: expected Tls\(ca="):
            AsyncClient(tls=wrong)


def test_a_file_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = file_with(tmp_path, TOKEN.encode(), mode=0o644)
    with pytest.raises(InvalidArgument, match=f"run: chmod 600 {path}"):
        Bearer(path)
    with pytest.raises(InvalidArgument, match=r"cannot read .*nothing.token: No such file"):
        Bearer(tmp_path / "nothing.token")


def test_a_new_token_in_the_file_is_shown_from_then_on(tmp_path: Path) -> None:
    path = file_with(tmp_path, b"first")
    made = Bearer(path)
    new = tmp_path / "new"
    new.touch(0o600)
    new.write_text("second\n")
    os.utime(new, ns=(1, 1))
    new.rename(path)
    assert made.metadata() == (("authorization", "Bearer second"),)


def test_a_token_goes_to_another_machine_over_tls_only() -> None:
    for server in ("10.0.0.1:7450", "sow.example:7450", "localhost.example:7450"):
        with pytest.raises(InvalidArgument, match=f"{server}, over TLS only: .*--tls-ca"):
            bearer(TOKEN, server, None)
        assert bearer(TOKEN, server, Tls()) is not None
    for server in ("127.0.0.1:7450", "127.9.9.9:1", "localhost:7450", "[::1]:7450", "unix:/run/sow"):
        assert bearer(TOKEN, server, None) is not None


# --- the environment -------------------------------------------------------------------------------------------------


def test_a_client_of_the_environment_has_its_server_token_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path, "ca")
    files = authority.issue("desk")
    given = {
        "SOW_SERVER": "sow.example:7999",
        "SOW_TOKEN_FILE": str(file_with(tmp_path, TOKEN.encode())),
        "SOW_TLS_CA": str(authority.file),
        "SOW_TLS_CERT": str(files.certificate),
        "SOW_TLS_KEY": str(files.key),
        "SOW_TLS_SERVER_NAME": "other",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with Client(timeout=3) as client:
        assert client._transport.server == "sow.example:7999"
        assert client._timeout == 3
    for name in ("SOW_TOKEN_FILE", "SOW_TLS_CA", "SOW_TLS_CERT", "SOW_TLS_KEY"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "/nowhere/file")
            with pytest.raises(InvalidArgument, match="cannot read /nowhere/file"):
                Client()


def test_an_argument_counts_before_the_environment_and_another_environment_hides_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with the command, each argument counts on its own: another server is reached with the TLS of the
    environment."""
    monkeypatch.setenv("SOW_SERVER", "sow.example:7999")
    monkeypatch.setenv("SOW_TLS_SERVER_NAME", "other")
    with Client("127.0.0.1:1") as client:
        assert client._transport.server == "127.0.0.1:1"
        assert client._transport.lines.tls == Tls(server_name="other")
    with Client(tls=Tls(server_name="mine")) as client:
        assert client._transport.lines.tls == Tls(server_name="mine")
    for environment in ({}, {"SOW_SERVER": "127.0.0.1:2"}):
        with Client(environment=environment) as client:
            assert client._transport.server == environment.get("SOW_SERVER", "127.0.0.1:7450")
            assert client._transport.lines.tls is None


def test_a_channel_of_the_program_is_used_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOW_TOKEN_FILE", "/nowhere/file")
    monkeypatch.setenv("SOW_TLS_CA", "/nowhere/file")
    with grpc.insecure_channel("127.0.0.1:1") as channel, Client(channel=channel) as client:
        assert client._transport.lines.tls is None


def test_an_empty_environment_is_that_of_a_client_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOW_SERVER", "SOW_TOKEN_FILE", "SOW_TLS_CA", "SOW_TLS_CERT", "SOW_TLS_KEY", "SOW_TLS_SERVER_NAME"):
        monkeypatch.setenv(name, "")
    with Client() as client:
        assert client._transport.server == "127.0.0.1:7450"


def test_a_client_of_several_instances_of_the_environment_tells_of_its_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what a client with these addresses takes (rule F1)."""
    monkeypatch.setenv("SOW_SERVER", "ldn:7450,par:7450")
    with pytest.raises(InvalidArgument, match="prefer"):
        Client(prefer="last")  # type: ignore[arg-type]  # a mistake of the caller
    with pytest.raises(InvalidArgument, match="failover_publish"):
        Client(failover_publish="last")  # type: ignore[arg-type]  # a mistake of the caller
    with Client(prefer="random", failover_publish="again", on_failover=print) as client:
        assert client._failover_publish == "again"


def test_the_environment_tells_which_instance_is_preferred_and_what_becomes_of_publishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The arguments come first."""
    for name, value in (("SOW_SERVER", "ldn,par"), ("SOW_PREFER", "random"), ("SOW_FAILOVER_PUBLISH", "unsent")):
        monkeypatch.setenv(name, value)
    with Client() as client:
        assert (client._transport.lines._prefer, client._failover_publish) == ("random", "unsent")
    with Client(prefer="first", failover_publish="again") as client:
        assert (client._transport.lines._prefer, client._failover_publish) == ("first", "again")
    monkeypatch.setenv("SOW_PREFER", "")
    monkeypatch.setenv("SOW_FAILOVER_PUBLISH", "maybe")
    with pytest.raises(InvalidArgument, match="failover_publish"):
        Client()


# --- TLS files -------------------------------------------------------------------------------------------------------


def test_good_files_make_credentials(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    issued = authority.issue("desk")
    Tls(ca=authority.file, certificate=issued.certificate, key=issued.key).credentials()
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes("# Magyarország főtanúsítványa\n".encode() + authority.file.read_bytes() * 2)
    Tls(ca=str(bundle)).credentials()


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    """Story: gRPC's "Failed to create security handshaker" named none of the three files."""
    authority = Authority(tmp_path, "ca")
    issued = authority.issue("desk")
    with pytest.raises(InvalidArgument, match=r"desk.key holds no PEM certificates"):
        Tls(ca=issued.key).credentials()
    with pytest.raises(
        InvalidArgument, match=r"desk.key is no PEM key, without a password, of the certificate .*desk.key"
    ):
        Tls(certificate=issued.key, key=issued.key).credentials()


def test_a_key_that_is_not_that_of_the_certificate_is_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    desk, other = authority.issue("desk"), authority.issue("other")
    with pytest.raises(InvalidArgument, match=r"other.key is no PEM key.*of the certificate .*desk.pem"):
        Tls(certificate=desk.certificate, key=other.key).credentials()


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    issued = Authority(tmp_path, "ca").issue("desk")
    key = load_pem_private_key(issued.key.read_bytes(), None)
    issued.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")))
    with pytest.raises(InvalidArgument, match="without a password"):
        Tls(certificate=issued.certificate, key=issued.key).credentials()


# --- no connection ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "hint"),
    [
        ("SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER: x", "does not speak TLS"),
        (
            "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate: OK",
            "no authority that the client trusts",
        ),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", "has expired"),
        ("Custom verification check failed: Hostname Verification Check failed.", "--tls-server-name"),
        ("ipv4:127.0.0.1:7450: Socket closed", "may speak TLS only, ask for a certificate"),
    ],
)
def test_a_cause_that_takes_knowledge_of_grpc_has_a_hint(cause: str, hint: str) -> None:
    assert hint in unreachable("sow.example:7450", 3, cause).message
    assert "(" not in unreachable("sow.example:7450", 3, "Connection refused").message


@pytest.mark.parametrize(("seconds", "shown"), [(2.99468, "3 s"), (4.99904, "5 s"), (0.5, "0.5 s"), (1200, "1200 s")])
def test_the_time_of_an_attempt_is_told_without_used_milliseconds(seconds: float, shown: str) -> None:
    assert f"within {shown}: refused" in unreachable("sow.example:7450", seconds, "refused").message


def test_a_proxy_that_was_not_meant_is_named() -> None:
    variables = {"https_proxy": "http://proxy:3128", "no_proxy": "corp.example, db.example"}
    assert proxy_variable("sow.example:7450", variables) == "https_proxy"
    for server in ("127.0.0.1:7450", "localhost:7450", "sow.corp.example:7450", "db.example:7450", "unix:/run/sow"):
        assert proxy_variable(server, variables) == ""
    assert proxy_variable("sow.example:7450", {}) == ""
    assert "the proxy of https_proxy" in unreachable("sow.example:7450", 3, "refused", proxy="https_proxy").message
