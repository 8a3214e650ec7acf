"""Client certificates that their authority has revoked.

gRPC for Python cannot give a list of revoked certificates to its TLS library. So a client with a revoked certificate
can still connect. Its calls are refused: the auth context of a call has the certificate (`x509_pem_cert`).

    [1]  A list counts only with the signature of an authority of `client_ca`, which is also the issuer of the
         certificates that it revokes.
    [2]  A list that was replaced is read again within a second. If it is unusable, the last usable one stays in use,
         and the log has the fault. A list that is overdue stays in use, too: it still revokes all that it names.
    [3]  A certificate that cannot be read counts as revoked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from sow_server.certificates import Authorities, CertificateFault, Watch, read_authorities, read_file

log = structlog.get_logger(__name__)

CACHED_MAX: Final = 10_000
"""Certificates whose answer is kept."""
_LIST: Final = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class RevocationLists:
    """The serial numbers that each authority has revoked, and the time by which a newer list was to be expected."""

    file: Path
    serials: Mapping[x509.Name, frozenset[int]]
    overdue_from: datetime | None

    def warning(self, now: datetime) -> str:
        """A sentence if a newer list should be there; else ""."""
        if self.overdue_from is None or now <= self.overdue_from:
            return ""
        return f"{self.file} is overdue: a newer list was to come by {self.overdue_from:%Y-%m-%d %H:%M:%S} UTC"


class Revocations:
    """Answers whether a certificate is revoked. Belongs to one thread."""

    def __init__(
        self,
        file: Path,
        client_ca: Path,
        *,
        now: Callable[[], datetime] = _now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the lists of `file`, signed by authorities of `client_ca`. Raises CertificateFault."""
        self._files = (file, client_ca)
        self._now = now
        self._watch = Watch(self._files, monotonic)
        self._cached: dict[bytes, bool] = {}
        self._use(read_revocations(file, client_ca, now()))

    def is_revoked(self, pem: bytes) -> bool:
        """True if a client's certificate is revoked ([3])."""
        self._refresh()
        known = self._cached.get(pem)
        if known is None:
            if len(self._cached) >= CACHED_MAX:
                self._cached.clear()
            known = self._cached[pem] = self._listed(pem)
        return known

    def _listed(self, pem: bytes) -> bool:
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            return certificate.serial_number in self._lists.serials.get(certificate.issuer, ())
        except ValueError:
            return True

    def _refresh(self) -> None:
        if not self._watch.is_due() or not self._watch.has_changed():
            return
        try:
            self._use(read_revocations(*self._files, self._now()))
        except CertificateFault as fault:
            log.error("revocations_unusable", key=fault.key, fault=str(fault))

    def _use(self, lists: RevocationLists) -> None:
        self._lists = lists
        self._cached.clear()
        count = sum(map(len, lists.serials.values()))
        log.info("revocations_read", file=str(lists.file), certificates=count)
        if warning := lists.warning(self._now()):
            log.warning("revocations_overdue", warning=warning)


def read_revocations(file: Path, client_ca: Path, now: datetime) -> RevocationLists:
    """The lists of a file, one after the other in PEM, as `openssl ca -gencrl` writes them. Raises CertificateFault."""
    authorities = read_authorities(client_ca, now)
    blocks = _LIST.findall(read_file("revoked", file))
    if not blocks:
        raise CertificateFault("revoked", f"{file} holds no revocation list in PEM (BEGIN X509 CRL)")
    serials: dict[x509.Name, frozenset[int]] = {}
    due: list[datetime] = []
    for block in blocks:
        one = _signed(file, block, authorities)
        serials[one.issuer] = serials.get(one.issuer, frozenset()) | {entry.serial_number for entry in one}
        if one.next_update_utc is not None:
            due.append(one.next_update_utc)
    return RevocationLists(file, serials, min(due, default=None))


def _signed(file: Path, block: bytes, authorities: Authorities) -> x509.CertificateRevocationList:
    """A list, once its signature is checked ([1])."""
    try:
        found = x509.load_pem_x509_crl(block)
        # Such an extension changes the meaning of the list: it may hold changes alone, or other issuers' certificates.
        critical = [extension.oid.dotted_string for extension in found.extensions if extension.critical]
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension) as error:
        raise CertificateFault("revoked", f"{file} holds a list that cannot be read ({error})") from error
    issuer = found.issuer.rfc4514_string()
    if critical:
        raise CertificateFault(
            "revoked", f"{file}: the list of {issuer} has a critical extension that is not supported, {critical[0]}"
        )
    named = [one for one in authorities.certificates if one.subject == found.issuer]
    if not named:
        raise CertificateFault("revoked", f"{file}: the list is of {issuer}, which is no authority of client_ca")
    if not any(_signs(one, found) for one in named):
        raise CertificateFault("revoked", f"{file}: the signature of the list of {issuer} is not that authority's")
    return found


def _signs(authority: x509.Certificate, found: x509.CertificateRevocationList) -> bool:
    try:
        return found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]  # kinds that sign nothing: TypeError
    except (TypeError, UnsupportedAlgorithm):
        return False
