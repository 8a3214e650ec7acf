"""Client certificates that are revoked (rule N3)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sow_server import revocations
from sow_server.certificates import CHECK_SECONDS, CertificateFault
from sow_server.config import load, warnings
from sow_server.revocations import Revocations
from tests.support.servers.certificates import DAY, Authority, replace
from tests.support.servers.configs import Write, refusal, write

__all__ = ["write"]  # a fixture


class World:
    """An authority with three clients, the first of which is revoked, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "ca")
        self.first, self.second, self.third = map(self.authority.issue, ("first", "second", "third"))
        self.file = folder / "crl.pem"
        replace(self.file, self.authority.revocations([self.first]))
        self.seconds = 100.0

    def revocations(self) -> Revocations:
        return Revocations(self.file, self.authority.file, monotonic=lambda: self.seconds)

    def refusal(self, content: bytes) -> str:
        """The message with which a file is refused at the start."""
        replace(self.file, content)
        with pytest.raises(CertificateFault) as caught:
            self.revocations()
        assert caught.value.key == "revoked"
        return str(caught.value)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_listed_certificates_alone_are_revoked(world: World) -> None:
    found = world.revocations()
    assert [found.is_revoked(one.pem) for one in (world.first, world.second, world.third)] == [True, False, False]


def test_a_list_that_openssl_wrote_is_read(world: World, tmp_path: Path) -> None:
    (tmp_path / "ca.cnf").write_text(
        "[ca]\ndefault_ca = d\n[d]\ndatabase = index.txt\ndefault_md = sha256\ncrlnumber = number\n"
        "default_crl_days = 30\ncrl_extensions = e\n[e]\nauthorityKeyIdentifier = keyid:always\n"
    )
    (tmp_path / "index.txt").touch()
    (tmp_path / "number").write_text("01\n")
    curve = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    for command in (
        f"req -x509 {curve} -subj /CN=ossl -days 2 -keyout ossl.key -out ossl.pem",
        f"req {curve} -subj /CN=client -keyout client.key -out client.csr",
        "x509 -req -in client.csr -CA ossl.pem -CAkey ossl.key -CAcreateserial -days 2 -out client.pem",
        "ca -config ca.cnf -keyfile ossl.key -cert ossl.pem -revoke client.pem",
        "ca -config ca.cnf -keyfile ossl.key -cert ossl.pem -gencrl -out ossl-crl.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    found = Revocations(tmp_path / "ossl-crl.pem", tmp_path / "ossl.pem")
    assert found.is_revoked((tmp_path / "client.pem").read_bytes())
    assert not found.is_revoked(world.first.pem)


def test_a_serial_number_counts_for_its_own_authority_alone(world: World, tmp_path: Path) -> None:
    """Two authorities may give out the same number."""
    other = Authority(tmp_path, "other")
    both = tmp_path / "both.pem"
    both.write_bytes(world.authority.file.read_bytes() + other.file.read_bytes())
    replace(world.file, other.revocations([world.first]) + world.authority.revocations([world.second]))
    found = Revocations(world.file, both)
    assert not found.is_revoked(world.first.pem)
    assert found.is_revoked(world.second.pem)


def test_bytes_that_are_no_certificate_count_as_revoked(world: World) -> None:
    assert world.revocations().is_revoked(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert world.revocations().is_revoked(b"")


def test_a_list_needs_the_signature_of_an_authority_of_client_ca(world: World, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    assert "the list is of CN=stranger, which is no authority of client_ca" in world.refusal(stranger.revocations([]))
    (tmp_path / "elsewhere").mkdir()
    namesake = Authority(tmp_path / "elsewhere", "ca")
    assert "the signature of the list of CN=ca is not that authority's" in world.refusal(namesake.revocations([]))
    # One good list does not vouch for another.
    good = world.authority.revocations([world.first])
    assert "signature" in world.refusal(good + namesake.revocations([]))


def test_files_without_a_usable_list_are_refused(world: World) -> None:
    assert "holds no revocation list in PEM" in world.refusal(world.first.pem)
    broken = b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n"
    assert "holds a list that cannot be read" in world.refusal(broken)
    # A list of changes alone would let those pass that the list before it revokes.
    assert "has a critical extension" in world.refusal(world.authority.revocations([world.first], delta=True))
    world.file.unlink()
    with pytest.raises(CertificateFault, match="cannot be read"):
        world.revocations()


def test_a_replaced_list_counts_within_a_second_also_for_certificates_seen_before(world: World) -> None:
    found = world.revocations()
    assert not found.is_revoked(world.second.pem)
    replace(world.file, world.authority.revocations([world.second]))
    world.seconds += CHECK_SECONDS / 2
    assert not found.is_revoked(world.second.pem)
    world.seconds += CHECK_SECONDS / 2
    assert found.is_revoked(world.second.pem)
    assert not found.is_revoked(world.first.pem)


def test_an_unusable_replacement_keeps_the_last_list(world: World, tmp_path: Path) -> None:
    found = world.revocations()
    with capture_logs() as logs:
        replace(world.file, Authority(tmp_path, "stranger").revocations([]))
        world.seconds += CHECK_SECONDS
        assert found.is_revoked(world.first.pem)
        world.file.unlink()
        world.seconds += CHECK_SECONDS
        assert found.is_revoked(world.first.pem)
    assert [line["event"] for line in logs] == ["revocations_unusable"] * 2
    assert "CN=stranger" in logs[0]["fault"]


def test_an_overdue_list_stays_in_force_and_is_told(world: World, write: Write) -> None:
    replace(world.file, world.authority.revocations([world.first], due=-DAY))
    with capture_logs() as logs:
        assert world.revocations().is_revoked(world.first.pem)
    assert "revocations_overdue" in [line["event"] for line in logs]
    server = world.authority.issue("server")
    config = load(
        write(
            f"[server.tls]\ncertificate = '{server.certificate}'\nkey = '{server.key}'\n"
            f"client_ca = '{world.authority.file}'\nrevoked = '{world.file}'\n"
        )
    )
    (warning,) = warnings(config)
    assert warning.startswith(f"[server.tls] revoked: {world.file} is overdue")


def test_a_certificate_is_parsed_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call asks, so the answer is kept for each certificate, and the number of kept ones is bounded."""
    found = world.revocations()
    parsed: list[bytes] = []
    listed = Revocations._listed

    def counting(self: Revocations, pem: bytes) -> bool:
        parsed.append(pem)
        return listed(self, pem)

    monkeypatch.setattr(Revocations, "_listed", counting)
    monkeypatch.setattr(revocations, "CACHED_MAX", 2)
    for _ in range(3):
        assert found.is_revoked(world.first.pem)
        assert not found.is_revoked(world.second.pem)
    assert parsed == [world.first.pem, world.second.pem]
    assert not found.is_revoked(world.third.pem)
    assert found.is_revoked(world.first.pem)
    assert len(parsed) == 4


def test_the_configuration_refuses_an_unusable_list(world: World, write: Write, tmp_path: Path) -> None:
    server = world.authority.issue("server")
    tls = f"certificate = '{server.certificate}'\nkey = '{server.key}'\n"
    replace(world.file, Authority(tmp_path, "stranger").revocations([]))
    said = refusal(write(f"[server.tls]\n{tls}client_ca = '{world.authority.file}'\nrevoked = '{world.file}'\n"))
    assert "[server.tls] revoked: crl.pem: the list is of CN=stranger" in said
    assert "[server.tls] revoked: also needs client_ca" in refusal(write(f"[server.tls]\n{tls}revoked = 'crl.pem'\n"))
