"""Authorities of tests: they issue certificates with any dates, and revoke them.

Written with `cryptography`, because the command openssl gives no certificate a past or a late begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate, for servers on 127.0.0.1 and for clients, and its key."""

    certificate: Path
    key: Path

    @property
    def pem(self) -> bytes:
        """The certificate."""
        return self.certificate.read_bytes()


class Authority:
    """Owns a key, and the certificate `NAME.pem` in its folder."""

    def __init__(self, folder: Path, name: str, *, begin: timedelta = -DAY, end: timedelta = 400 * DAY) -> None:
        """The times count from now."""
        self.folder = folder
        self.file = folder / f"{name}.pem"
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = self._builder(self._name, self._key, begin, end).add_extension(x509.BasicConstraints(True, None), True)
        self.file.write_bytes(made.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def signs(self, other: Authority, *, may_issue: bool = True) -> Authority:
        """Makes another authority one of this one: its certificate is signed here."""
        made = self._builder(other._name, other._key, -DAY, 90 * DAY)
        made = made.add_extension(x509.BasicConstraints(may_issue, None), True)
        other.file.write_bytes(made.sign(self._key, SHA256()).public_bytes(Encoding.PEM))
        return other

    def issue(self, name: str, *, begin: timedelta = -DAY, end: timedelta = 90 * DAY, file: str = "") -> Issued:
        """A new certificate for CN=`name`, in files of that name or of `file`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        made = (
            self._builder(subject, key, begin, end)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False)
            .add_extension(x509.ExtendedKeyUsage(usages), False)
            .sign(self._key, SHA256())
        )
        issued = Issued(self.folder / f"{file or name}.pem", self.folder / f"{file or name}.key")
        replace(issued.certificate, made.public_bytes(Encoding.PEM))
        replace(issued.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return issued

    def revocations(self, issued: Sequence[Issued], *, due: timedelta = DAY, delta: bool = False) -> bytes:
        """A list that revokes these, in PEM; a newer one is to come after `due`."""
        now = datetime.now(UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        builder = builder.last_update(now - 2 * DAY).next_update(now + due)
        if delta:
            builder = builder.add_extension(x509.DeltaCRLIndicator(1), True)
        for one in issued:
            serial = x509.load_pem_x509_certificate(one.pem).serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - DAY).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, begin: timedelta, end: timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC).replace(microsecond=0)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begin)
            .not_valid_after(now + end)
        )


def replace(file: Path, content: bytes) -> None:
    """Replaces a file in one step, as tools that renew certificates do."""
    new = file.with_suffix(".new")
    new.touch(0o600)
    new.write_bytes(content)
    new.rename(file)
