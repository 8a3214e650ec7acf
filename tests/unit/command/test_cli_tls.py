"""`sow tls init` without a server: what is made, and what is refused (sow_cli/tls [1], [2])."""

from __future__ import annotations

import importlib.util
import os
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from sow_cli.command import sow

NAMES = ["ca.key", "ca.pem", "client.key", "client.pem", "server.key", "server.pem"]


def _init(*arguments: str) -> Result:
    return CliRunner().invoke(sow, ["tls", "init", *arguments])


def _read(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def test_it_makes_an_authority_a_server_and_a_client_and_its_keys_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        done = _init(str(tmp_path / "certs"))
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output
    found = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "certs").iterdir()}
    assert sorted(found) == NAMES
    assert {mode for name, mode in found.items() if name.endswith(".key")} == {0o600}
    assert (tmp_path / "certs").stat().st_mode & 0o777 == 0o700
    ca, server, client = (_read(tmp_path / "certs" / f"{name}.pem") for name in ("ca", "server", "client"))
    for issued in (server, client):
        issued.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("127.0.0.1"), ip_address("::1")]
    assert list(client.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ], "a client cannot pass itself off as a server"
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    assert client.subject.rfc4514_string() == "CN=client"
    left = server.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=90) - timedelta(minutes=5) < left <= timedelta(days=90)
    context = ssl.create_default_context(cafile=str(tmp_path / "certs" / "ca.pem"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    context.load_cert_chain(tmp_path / "certs" / "client.pem", tmp_path / "certs" / "client.key")


def test_hosts_clients_and_the_validity_are_chosen(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    done = _init(
        str(folder), "--host", "sow.example.com", "--host", "10.0.0.7", "--host", "localhost",
        "--client", "desk", "--client", "ops", "--client", "desk", "--valid", "12h",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert sorted(file.stem for file in folder.glob("*.pem")) == ["ca", "desk", "ops", "server"]
    server = _read(folder / "server.pem")
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "sow.example.com"]
    assert ip_address("10.0.0.7") in names.get_values_for_type(x509.IPAddress)
    assert server.not_valid_after_utc < datetime.now(UTC) + timedelta(hours=13)
    assert "SOW_SERVER_LISTEN=0.0.0.0:7450 SOW_SERVER_TLS_CERTIFICATE='" in done.stdout
    assert "sow --server sow.example.com:7450 --tls-ca '" in done.stdout
    assert "/desk.pem' --tls-key '" in done.stdout


def test_a_server_at_an_address_of_ipv6_listens_there(tmp_path: Path) -> None:
    """Story: it was to listen at 0.0.0.0, where no such address leads. A zone of an address is any text."""
    for host in ("2001:db8::1", "fe80::1%$(reboot)"):
        done = _init(str(tmp_path / host[0]), "--host", host)
        assert "SOW_SERVER_LISTEN='[::]:7450' " in done.stdout
        assert f"sow --server '[{host}]:7450' --tls-ca " in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_no_file_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    done = _init(str(tmp_path))
    assert done.exit_code == 2
    assert f"{tmp_path / name}: File exists; nothing is overwritten" in done.output
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_what_was_written_before_a_fault_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: an authority without its server would be in the way of the next try."""
    opened = os.open

    def full(path: Path, flags: int, mode: int = 0o777) -> int:
        if path.name == "server.key":
            raise OSError(28, "No space left on device")
        return opened(path, flags, mode)

    monkeypatch.setattr("sow_cli.tls.os.open", full)
    done = _init(str(tmp_path))
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "server.key: No space left on device" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "a:7450"), "'a:7450' is neither a host name nor an address; it has no port"),
        (("--host", "10.0.0"), "'10.0.0' is neither a host name nor an address"),
        (("--host", ""), "'' is neither a host name nor an address"),
        (("--client", "../ops"), "'../ops': expected 1 to 64 of letters, digits and ._@-"),
        (("--client", "CA"), "'CA': expected 1 to 64 of letters, digits and ._@-, and neither ca nor server"),
        (("--valid", "30"), "duration '30' misses a unit"),
        (("--valid", "59s"), "59s is not between 1m and 3650d"),
        (("--valid", "3651d"), "3651d is not between 1m and 3650d"),
    ],
)
def test_wrong_arguments_are_refused_and_make_nothing(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = _init(str(tmp_path / "certs"), *arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "certs").exists()


def test_without_cryptography_the_message_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    done = _init(str(tmp_path / "certs"))
    assert done.exit_code == 1
    assert done.output == "Error: `sow tls init` needs cryptography; install it: pip install 'sow[server]'\n"
    assert not (tmp_path / "certs").exists()
