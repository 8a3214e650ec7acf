"""Client certificates whose authority has gone from `client_ca`.

The TLS handshake checks a certificate's chain once. A connection, and a TLS session that is resumed, outlive an
authority that was taken out of the file or has expired; so each call is checked again here.

    [1]  A certificate is good as long as a chain of signatures leads from it, by the certificates that its client has
         sent, to an authority that is in the file and valid now.
    [2]  A file that was replaced is read again within a second. If it is unusable, the authorities before stay in use,
         and the log has the fault.
    [3]  The authorities behind a certificate are remembered, so a file that keeps them costs no signature again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sow_server.certificates import Authorities, CertificateFault, Watch, read_authorities

log = structlog.get_logger(__name__)

CACHED_MAX: Final = 10_000
"""Certificates whose authorities are remembered."""
CHAIN_MAX: Final = 10
"""Certificates of a chain that are looked at."""
_UNREADABLE: Final = (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)


def _now() -> datetime:
    return datetime.now(UTC)


class Issuers:
    """Answers whether an authority still stands behind a client's certificate. Belongs to one thread."""

    def __init__(
        self,
        client_ca: Path,
        *,
        now: Callable[[], datetime] = _now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the authorities. Raises CertificateFault."""
        self._file = client_ca
        self._now = now
        self._watch = Watch((client_ca,), monotonic)
        self._behind: dict[tuple[bytes, bytes], tuple[int, frozenset[bytes]]] = {}
        """The authorities to which each certificate with its chain leads, by their fingerprints, and the number of the
        set in which they were looked for [3]."""
        self._number = 0
        self._authorities = read_authorities(client_ca, now())
        self._valid = _valid(self._authorities, now())

    def trust(self, pem: bytes, chain: bytes) -> bool:
        """True if a client's certificate is good. `chain`: all that the client has sent, as PEM."""
        self._refresh()
        number, known = self._behind.get((pem, chain), (-1, frozenset()))
        if not known.isdisjoint(self._valid):
            return True
        if number == self._number:
            return False
        found = _authorities_behind(pem, chain, self._valid, self._now())
        if len(self._behind) >= CACHED_MAX:
            self._behind.clear()
        self._behind[pem, chain] = self._number, found
        return bool(found)

    def _refresh(self) -> None:
        if not self._watch.is_due():
            return
        if self._watch.has_changed():
            try:
                self._authorities = read_authorities(self._file, self._now())
                log.info("authorities_replaced", file=str(self._file), authorities=len(self._authorities.certificates))
            except CertificateFault as fault:
                log.error("authorities_unusable", key=fault.key, fault=str(fault))
        valid = _valid(self._authorities, self._now())
        if valid.keys() != self._valid.keys():
            self._valid = valid
            self._number += 1


def _valid(authorities: Authorities, now: datetime) -> dict[bytes, x509.Certificate]:
    """The authorities that are valid now, by their fingerprints."""
    return {
        _fingerprint(one): one
        for one in authorities.certificates
        if one.not_valid_before_utc <= now <= one.not_valid_after_utc
    }


def _fingerprint(authority: x509.Certificate) -> bytes:
    """The SHA-256 of the name and the key: a renewed certificate of an authority is the same authority."""
    key = authority.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(authority.subject.public_bytes() + key).digest()


def _authorities_behind(
    pem: bytes, chain: bytes, authorities: Mapping[bytes, x509.Certificate], now: datetime
) -> frozenset[bytes]:
    """The fingerprints of the authorities to which a chain of signatures leads ([1])."""
    try:
        first = x509.load_pem_x509_certificate(pem)
        sent = x509.load_pem_x509_certificates(chain)[:CHAIN_MAX] if chain else []
        between = [one for one in sent if one != first and _may_issue(one, now)]
    except _UNREADABLE:
        return frozenset()
    found: set[bytes] = set()
    reached, left = [first], between
    while reached:
        one = reached.pop()
        found |= {name for name, top in authorities.items() if one == top or _has_issued(top, one)}
        above = [issuer for issuer in left if _has_issued(issuer, one)]
        left = [issuer for issuer in left if issuer not in above]
        reached += above
    return frozenset(found)


def _may_issue(certificate: x509.Certificate, now: datetime) -> bool:
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        return False
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return True
