"""PEM files of a TLS endpoint: which are refused, and with which words; how they are replaced."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from structlog.testing import capture_logs

from sow_server.certificates import CertificateFault, CertificateFiles, EndpointCertificates, read_authorities, read_set
from tests.support.servers.certificates import DAY, Authority, Issued, replace
from tests.support.servers.configs import Write, refusal, write

__all__ = ["write"]  # a fixture

NOW = datetime.now(UTC)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


class Clock:
    """The time of a test."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


def files(issued: Issued, client_ca: Path | None = None) -> CertificateFiles:
    return CertificateFiles(issued.certificate, issued.key, client_ca)


def fault(of: CertificateFiles) -> tuple[str, str]:
    """The key and the message with which files are refused."""
    with pytest.raises(CertificateFault) as caught:
        read_set(of, NOW)
    return caught.value.key, str(caught.value)


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_whole_set_is_read_with_the_time_at_which_each_file_expires(authority: Authority) -> None:
    found = read_set(files(authority.issue("server", end=50 * DAY), authority.file), NOW)
    assert found.pair.certificate == (authority.folder / "server.pem").read_bytes()
    assert [(one.key, (one.at - NOW + DAY / 2).days) for one in found.expiries] == [
        ("certificate", 50),
        ("client_ca", 400),
    ]


def test_a_certificate_out_of_date_is_refused_with_the_date(authority: Authority) -> None:
    expired = authority.issue("old", begin=-9 * DAY, end=-2 * DAY)
    end = x509.load_pem_x509_certificate(expired.pem).not_valid_after_utc
    assert fault(files(expired)) == (
        "certificate",
        f"{expired.certificate}: the certificate for CN=old expired on {end:%Y-%m-%d %H:%M:%S} UTC",
    )
    early = authority.issue("early", begin=2 * DAY)
    key, message = fault(files(early))
    assert key == "certificate"
    begin = x509.load_pem_x509_certificate(early.pem).not_valid_before_utc
    assert message.endswith(f"the certificate for CN=early is not valid before {begin:%Y-%m-%d %H:%M:%S} UTC")


def test_the_whole_chain_counts(authority: Authority, tmp_path: Path) -> None:
    server = authority.issue("server")
    old = Authority(tmp_path, "intermediate", begin=-9 * DAY, end=-DAY)
    replace(server.certificate, server.pem + old.file.read_bytes())
    assert "the certificate for CN=intermediate expired on" in fault(files(server))[1]
    soon = Authority(tmp_path, "intermediate", end=3 * DAY)
    replace(server.certificate, authority.issue("server").pem + soon.file.read_bytes())
    (expiry,) = read_set(files(server), NOW).expiries
    assert expiry.at - NOW < 4 * DAY


def test_a_key_that_does_not_fit_is_named_with_the_certificate(authority: Authority) -> None:
    server, other = authority.issue("server"), authority.issue("other")
    assert fault(CertificateFiles(server.certificate, other.key)) == (
        "key",
        f"{other.key} is not the key of {server.certificate}, which is for CN=server",
    )


def test_files_that_cannot_be_read_are_named(authority: Authority, tmp_path: Path) -> None:
    server = authority.issue("server")
    missing, text = tmp_path / "missing", tmp_path / "text"
    text.write_text("no PEM\n")
    assert fault(CertificateFiles(server.certificate, missing)) == (
        "key",
        f"{missing} cannot be read (No such file or directory)",
    )
    assert fault(CertificateFiles(text, server.key))[0] == "certificate"
    assert f"{text} holds no certificate in PEM" in fault(CertificateFiles(text, server.key))[1]
    assert f"{text} holds no private key in PEM" in fault(CertificateFiles(server.certificate, text))[1]
    assert fault(files(server, text))[0] == "client_ca"


def test_a_key_may_follow_the_parameters_of_its_curve(authority: Authority, tmp_path: Path) -> None:
    """`openssl ecparam -genkey` writes both into one file, and TLS libraries read it."""
    made = "openssl ecparam -name prime256v1 -genkey -out key.pem"
    signed = "openssl req -x509 -new -key key.pem -days 2 -subj /CN=own -out own.pem"
    for command in (made, signed):
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    assert read_set(CertificateFiles(tmp_path / "own.pem", tmp_path / "key.pem"), datetime.now(UTC)).pair.key


def test_of_the_authorities_one_has_to_be_valid(tmp_path: Path) -> None:
    """While authorities change over, a file has the old one and the new one."""
    old = Authority(tmp_path, "old", begin=-9 * DAY, end=-DAY)
    new = Authority(tmp_path, "new", end=50 * DAY)
    both = tmp_path / "both.pem"
    both.write_bytes(old.file.read_bytes() + new.file.read_bytes())
    found = read_authorities(both, NOW)
    assert len(found.certificates) == 2
    assert found.expiry.at > NOW
    with pytest.raises(CertificateFault, match="the certificate for CN=old expired on") as caught:
        read_authorities(old.file, NOW, key="ca")
    assert caught.value.key == "ca"


def test_the_configuration_names_table_key_and_date(write: Write, authority: Authority) -> None:
    old = authority.issue("old", begin=-9 * DAY, end=-2 * DAY)
    fine = authority.issue("fine")
    pair = f"certificate = '{old.certificate}'\nkey = '{old.key}'\n"
    end = x509.load_pem_x509_certificate(old.pem).not_valid_after_utc
    expected = f"the certificate for CN=old expired on {end:%Y-%m-%d %H:%M:%S} UTC"
    assert f"[server.tls] certificate: old.pem: {expected}" in refusal(write(f"[server.tls]\n{pair}"))
    listener = f"[[server.listeners]]\nlisten = 'localhost:1'\n{pair}"
    said = refusal(write(listener))
    assert f"[server.listeners] certificate: old.pem: {expected}" in said
    assert '(listener "localhost:1")' in said
    peer = f"[[replication.peers]]\nname = 'b'\naddress = 'b.example:1'\nca = '{authority.file}'\n{pair}"
    said = refusal(write(peer))
    assert f"[replication.peers] certificate: old.pem: {expected}" in said
    assert '(peer "b")' in said
    crossed = f"[server.tls]\ncertificate = '{fine.certificate}'\nkey = '{old.key}'\n"
    assert "[server.tls] key: old.key is not the key of fine.pem" in refusal(write(crossed))


# --- replacing -------------------------------------------------------------------------------------------------------


def test_replaced_files_are_taken_and_unchanged_ones_not_read_again(authority: Authority) -> None:
    kept = EndpointCertificates(files(authority.issue("server")), "here:1", Clock())
    first = kept.current
    assert kept.refresh() is first
    with capture_logs() as logs:
        second_pem = authority.issue("server").pem
        assert kept.refresh().pair.certificate == second_pem != first.pair.certificate
        assert kept.refresh() is kept.current
    assert [line["event"] for line in logs] == ["certificates_replaced"]


def test_a_broken_replacement_keeps_the_old_set_until_it_is_mended(authority: Authority) -> None:
    """A new certificate and its key are replaced one after the other; between the two they do not fit."""
    server = authority.issue("server")
    kept = EndpointCertificates(files(server), "here:1", Clock())
    first = kept.current
    next_one = authority.issue("next")
    with capture_logs() as logs:
        replace(server.certificate, next_one.pem)
        assert kept.refresh() is first
        assert kept.refresh() is first
        replace(server.key, next_one.key.read_bytes())
        assert kept.refresh().pair.certificate == next_one.pem
        server.key.unlink()
        assert kept.refresh().pair.certificate == next_one.pem
    assert [line["event"] for line in logs] == [
        "certificates_unusable",
        "certificates_replaced",
        "certificates_unusable",
    ]
    assert logs[0]["key"] == "key"
    assert "is not the key of" in logs[0]["fault"]


def test_a_certificate_that_expires_within_a_month_is_told_once_a_day(authority: Authority) -> None:
    clock = Clock()
    kept = EndpointCertificates(files(authority.issue("server", end=40 * DAY), authority.file), "here:1", clock)

    def told() -> list[object]:
        with capture_logs() as logs:
            kept.refresh()
        return [line["key"] for line in logs if line["event"] == "certificate_expires"]

    assert told() == []
    clock.now += 11 * DAY
    assert told() == ["certificate"]
    assert told() == []
    clock.now += DAY
    assert told() == ["certificate"]
    authority.issue("server", end=15 * DAY)
    assert told() == ["certificate"]  # the new one, at once
