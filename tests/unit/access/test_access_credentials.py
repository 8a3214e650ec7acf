"""Certificates and tokens: which names they prove (rule A1)."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from sow_server.access import credentials
from sow_server.access.credentials import (
    NO_CLAIM,
    TOKEN_BYTES_MAX,
    Anonymous,
    Certificates,
    Claim,
    Directory,
    Prover,
    Shown,
    Tokens,
    check_expiry,
)
from sow_server.access.model import Credential
from sow_server.engine.values.errors import Reason, StoreError
from tests.support.oracles.access_parts import access_of, sha256
from tests.support.servers.certificates import Authority

KEY = ec.generate_private_key(ec.SECP256R1())
END = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def certificate(names: Sequence[x509.GeneralName] = (), common: Sequence[str] = ()) -> bytes:
    """A certificate in PEM."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(KEY.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(END - timedelta(days=9))
    builder = builder.not_valid_after(END)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(KEY, SHA256()).public_bytes(Encoding.PEM)


def refused(prover: Prover, shown: Shown) -> str:
    with pytest.raises(StoreError) as caught:
        prover.prove(shown)
    assert caught.value.reason is Reason.UNAUTHENTICATED
    return caught.value.message


# --- certificates ----------------------------------------------------------------------------------------------------


def test_a_certificate_proves_each_of_its_names_with_its_type() -> None:
    pem = certificate(
        [
            x509.UniformResourceIdentifier("spiffe://bank/desk-eu"),
            x509.DNSName("desk.bank"),
            x509.RFC822Name("desk@bank"),
            x509.IPAddress(ip_address("10.0.0.1")),
            x509.IPAddress(ip_address("::1")),
            x509.RegisteredID(x509.ObjectIdentifier("1.2.3")),
            x509.DirectoryName(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "inner")])),
        ],
        ["desk", "URI:spiffe://bank/root"],
    )
    claim = Certificates().prove(Shown(certificate=pem))
    assert claim.names == (
        "URI:spiffe://bank/desk-eu",
        "DNS:desk.bank",
        "EMAIL:desk@bank",
        "IP:10.0.0.1",
        "IP:::1",
        "CN:desk",
        "CN:URI:spiffe://bank/root",
    )
    digest = hashlib.sha256(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)).hexdigest()
    assert (claim.kind, claim.fingerprint) == ("certificate", digest[:16])
    assert claim.expire_micros == int(END.timestamp()) * 1_000_000


def test_a_certificate_without_a_name_proves_none() -> None:
    assert Certificates().prove(Shown(certificate=certificate())).names == ()


def test_a_name_of_another_type_is_another_name(tmp_path: Path) -> None:
    """A certificate for the host `desk` is not the caller CN=desk."""
    file = access_of(tmp_path, '[[identities]]\nname = "desk"\ncertificate = "CN:desk"\n')
    directory = Directory.of(file)
    for pem, known in (
        (certificate(common=["desk"]), True),
        (certificate(common=["other", "desk"]), True),
        (certificate([x509.DNSName("desk")], ["other"]), False),
        (certificate(common=["DESK"]), False),
        (certificate(common=["desk "]), False),
        (certificate(common=["desk2"]), False),
        (certificate(), False),
    ):
        found = directory.identity(Certificates().prove(Shown(certificate=pem)))
        assert (found is not None) is known


def test_bytes_that_are_no_certificate_are_refused() -> None:
    pem = certificate(common=["x"])
    for bad in (
        b"x",
        pem[:100],
        pem.replace(b"\nMI", b"\nXX"),
        b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----",
    ):
        assert "cannot be read" in refused(Certificates(), Shown(certificate=bad))
    assert "no client certificate" in refused(Certificates(), Shown("token"))


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")  # of the damaged ones
def test_a_damaged_certificate_is_read_or_refused() -> None:
    """Story: for some faults, such as a version, the library has errors of its own. They became INTERNAL."""
    der = x509.load_pem_x509_certificate(certificate([x509.DNSName("a")], ["x"])).public_bytes(Encoding.DER)
    outcomes = set()
    for at in range(len(der)):
        for other in (der[at] ^ 0x1F, 0xFF):
            damaged = base64.encodebytes(der[:at] + bytes([other]) + der[at + 1 :])
            try:
                Certificates().prove(
                    Shown(certificate=b"-----BEGIN CERTIFICATE-----\n" + damaged + b"-----END CERTIFICATE-----\n")
                )
                outcomes.add("read")
            except StoreError as error:
                outcomes.add(error.reason.name)
    assert outcomes == {"read", "UNAUTHENTICATED"}


def test_a_revoked_certificate_is_refused_although_it_was_known(tmp_path: Path) -> None:
    pem = Authority(tmp_path, "ca").issue("desk").pem
    revoked: set[bytes] = set()
    prover = Certificates(lambda pem, chain: "is revoked" if pem in revoked else "")
    prover.prove(Shown(certificate=pem))
    revoked.add(pem)
    assert "revoked" in refused(prover, Shown(certificate=pem))


def test_only_so_many_certificates_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert credentials.REMEMBERED <= 100_000
    monkeypatch.setattr(credentials, "REMEMBERED", 3)
    known: OrderedDict[bytes, Claim] = OrderedDict()
    for number in range(10):
        credentials._remember(known, b"%d" % number, NO_CLAIM)
    assert list(known) == [b"7", b"8", b"9"]


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_a_token_proves_its_digest_and_is_not_in_the_claim() -> None:
    token = secrets.token_urlsafe(32)
    claim = Tokens().prove(Shown(token))
    assert claim == Claim("token", (sha256(token),), sha256(token)[:16])
    assert token not in repr(claim)


@pytest.mark.parametrize("token", ["é", "\x00", " ", "\u65e5\u672c", "a b", "ÿ" * 100])
def test_odd_tokens_are_tokens(token: str) -> None:
    assert Tokens().prove(Shown(token)).names == (sha256(token),)


def test_the_length_of_a_token_is_bounded_in_bytes() -> None:
    assert Tokens().prove(Shown("x" * TOKEN_BYTES_MAX)).names
    assert "too long" in refused(Tokens(), Shown("x" * (TOKEN_BYTES_MAX + 1)))
    assert "too long" in refused(Tokens(), Shown("é" * (TOKEN_BYTES_MAX // 2 + 1)))
    assert "no bearer token" in refused(Tokens(), Shown(certificate=b"x"))


def test_a_digest_is_no_token(tmp_path: Path) -> None:
    """A reader of the access file cannot call with its content."""
    directory = Directory.of(access_of(tmp_path, f'[[identities]]\nname = "x"\ntoken_sha256 = "{sha256("t")}"\n'))
    assert directory.identity(Tokens().prove(Shown("t"))) is not None
    assert directory.identity(Tokens().prove(Shown(sha256("t")))) is None


# --- who it is -------------------------------------------------------------------------------------------------------

FILE = f"""[[identities]]
name = "a"
certificate = "CN:both"
[[identities]]
name = "b"
certificate = "DNS:b"
[[identities]]
name = "t"
token_sha256 = "{sha256("t")}"
[[identities]]
name = "j"
jwt = "{sha256("t")}"
[[identities]]
name = "anonymous"
[[peers]]
name = "ldn"
certificate = "CN:ldn"
"""


def test_a_proof_of_one_kind_is_none_of_another(tmp_path: Path) -> None:
    """A JWT whose subject is the digest of a token is not that token."""
    directory = Directory.of(access_of(tmp_path, FILE))

    def name(claim: Claim) -> str | None:
        found = directory.identity(claim)
        return None if found is None else found.name

    digest = sha256("t")
    assert name(Claim("token", (digest,), "")) == "t"
    assert name(Claim("jwt", (digest,), "")) == "j"
    assert name(Claim("certificate", (digest,), "")) is None
    assert name(Claim("token", ("CN:both",), "")) is None
    assert name(NO_CLAIM) == "anonymous"
    assert name(Claim("token", (), "")) is None, "a claim without a name is nobody, and not anonymous"
    assert name(Claim("certificate", ("CN:unknown", "DNS:b"), "")) == "b"
    assert name(Claim("certificate", ("CN:ldn",), "")) is None, "a peer is no identity"
    peer = directory.peer(Claim("certificate", ("DNS:x", "CN:ldn"), ""))
    assert peer is not None
    assert peer.name == "ldn"
    assert directory.peer(Claim("certificate", ("CN:both",), "")) is None
    assert directory.peer(NO_CLAIM) is None


def test_without_anonymous_in_the_file_nobody_is(tmp_path: Path) -> None:
    directory = Directory.of(access_of(tmp_path, '[[identities]]\nname = "a"\njwt = "a"\n'))
    assert directory.identity(Anonymous().prove(Shown("token", b"certificate"))) is None


@pytest.mark.parametrize(
    ("shown", "given", "expires"),
    [(None, None, None), (10, None, 10), (None, 10, 10), (10, 20, 10), (20, 10, 10)],
)
def test_the_earlier_end_holds(shown: int | None, given: int | None, expires: int | None) -> None:
    claim, credential = Claim("jwt", ("x",), "", shown), Credential(jwt="x", expire_micros=given)
    assert check_expiry(claim, credential, 9) == expires
    if expires is not None:
        for now in (10, 11):
            with pytest.raises(StoreError, match="the jwt has expired"):
                check_expiry(claim, credential, now)


def test_an_end_before_all_years_has_passed() -> None:
    """Story: 0001-01-01T00:00:00+14:00 is a date of TOML, and no moment that can be shown: it was INTERNAL."""
    with pytest.raises(StoreError, match="the token has expired"):
        check_expiry(Claim("token", ("x",), ""), Credential(token_sha256="x", expire_micros=-62135647200_000_000), 9)
