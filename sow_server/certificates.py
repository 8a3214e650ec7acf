"""The PEM files of a TLS endpoint: reads and checks them, and reads them anew once they have changed.

[1]  A set of files is used only if it was whole when it was read: all of the chain valid at that time, the key
     that of the chain's first certificate, and at least one authority valid.
[2]  A replacement that breaks [1] changes nothing: the last whole set stays in use, and the log has the fault.
[3]  A change is found by the time, inode and size of the files, which a rename changes as well as a rewrite. They
     are noted before the files are read, so a file that is replaced meanwhile counts as changed afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, TypeAlias

import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from sow_server.regular_files import read_regular

log = structlog.get_logger(__name__)

SOON: Final = timedelta(days=30)
"""A certificate that expires within this time is worth a warning."""
REMIND: Final = timedelta(days=1)
"""The warning is repeated after this time."""

CHECK_SECONDS: Final = 1.0
"""The least time between two looks of a `Watch`. Every call asks, so most are answered from memory."""

Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class CertificateFault(Exception):
    """Files that cannot be used. `key` is the key of the configuration that names the file; the message has the file
    and the fault."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The PEM files of an endpoint; with `client_ca` a client must present a certificate of one of its authorities."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        """The files that there are."""
        return tuple(file for file in (self.certificate, self.key, self.client_ca) if file is not None)


@dataclass(frozen=True, slots=True)
class Expiry:
    """The time at which the first certificate of a file expires; of authorities, the first one that is valid yet."""

    key: str
    file: Path
    at: datetime

    def warning(self, now: datetime) -> str:
        """A sentence if the time is near; else ""."""
        return f"{self.file} expires on {_shown(self.at)}" if self.at - now < SOON else ""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its chain, and its key, as PEM."""

    certificate: bytes
    key: bytes
    expiry: Expiry


@dataclass(frozen=True, slots=True)
class Authorities:
    """The certificates of authorities, and their PEM."""

    pem: bytes
    certificates: tuple[x509.Certificate, ...]
    expiry: Expiry


@dataclass(frozen=True, slots=True)
class CertificateSet:
    """All that an endpoint needs to serve TLS ([1])."""

    pair: Pair
    authorities: Authorities | None

    @property
    def expiries(self) -> tuple[Expiry, ...]:
        """The expiry of each file."""
        return (self.pair.expiry,) if self.authorities is None else (self.pair.expiry, self.authorities.expiry)


class EndpointCertificates:
    """Owns the set that new connections see. Any thread may call."""

    def __init__(self, files: CertificateFiles, listener: str, now: Callable[[], datetime]) -> None:
        """Reads the files. `listener`: an address, for the log. Raises CertificateFault."""
        self._files = files
        self._listener = listener
        self._now = now
        self._lock = threading.Lock()
        self._stamp = stamp(files.all)
        self._reminded: datetime | None = None
        self.current = read_set(files, now())

    def refresh(self) -> CertificateSet:
        """Reads the files anew if they have changed; returns the set in use ([2])."""
        with self._lock:
            found = stamp(self._files.all)
            if found != self._stamp:
                self._stamp = found
                self._replace()
            self._remind()
            return self.current

    def _replace(self) -> None:
        try:
            self.current = read_set(self._files, self._now())
        except CertificateFault as fault:
            log.error("certificates_unusable", listener=self._listener, key=fault.key, fault=str(fault))
            return
        self._reminded = None
        log.info("certificates_replaced", listener=self._listener, expires=_shown(self.current.pair.expiry.at))

    def _remind(self) -> None:
        now = self._now()
        if self._reminded is not None and now - self._reminded < REMIND:
            return
        self._reminded = now
        for expiry in self.current.expiries:
            if warning := expiry.warning(now):
                log.warning("certificate_expires", listener=self._listener, key=expiry.key, warning=warning)


class Watch:
    """Looks at files at most once in CHECK_SECONDS, for callers that ask all the time. Belongs to one thread."""

    def __init__(self, files: tuple[Path, ...], monotonic: Callable[[], float]) -> None:
        self._files = files
        self._monotonic = monotonic
        self._looked = monotonic()
        self._stamp = stamp(files)

    def is_due(self) -> bool:
        """True if it is time to look; once in CHECK_SECONDS."""
        now = self._monotonic()
        if now - self._looked < CHECK_SECONDS:
            return False
        self._looked = now
        return True

    def has_changed(self) -> bool:
        """True if the files have been replaced or rewritten since the last look ([3])."""
        before, self._stamp = self._stamp, stamp(self._files)
        return self._stamp != before


def read_set(files: CertificateFiles, now: datetime) -> CertificateSet:
    """The files of an endpoint. Raises CertificateFault."""
    authorities = None if files.client_ca is None else read_authorities(files.client_ca, now)
    return CertificateSet(read_pair(files.certificate, files.key, now), authorities)


def read_pair(certificate: Path, key: Path, now: datetime) -> Pair:
    """A certificate with its chain, and its key, which fit each other. Raises CertificateFault."""
    pem, key_pem = read_file("certificate", certificate), read_file("key", key)
    chain = _certificates("certificate", certificate, pem)
    for one in chain:
        if fault := _untimely(one, now):
            raise CertificateFault("certificate", f"{certificate}: {fault}")
    try:
        # gRPC cannot use an encrypted key.
        private = load_pem_private_key(key_pem, password=None)
        fits = private.public_key() == chain[0].public_key()
    except TypeError as error:
        raise CertificateFault("key", f"{key} is encrypted; it has to be stored without a password") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CertificateFault("key", f"{key} holds no private key in PEM that can be used ({error})") from error
    if not fits:
        raise CertificateFault("key", f"{key} is not the key of {certificate}, which is for {_subject(chain[0])}")
    return Pair(pem, key_pem, Expiry("certificate", certificate, min(one.not_valid_after_utc for one in chain)))


def read_authorities(file: Path, now: datetime, *, key: str = "client_ca") -> Authorities:
    """Certificates of authorities. Those that are out of date are passed over, because while authorities change over, a
    file has the old one and the new one; but one must be valid. Raises CertificateFault."""
    pem = read_file(key, file)
    certificates = _certificates(key, file, pem)
    faults = [_untimely(one, now) for one in certificates]
    if all(faults):
        raise CertificateFault(key, f"{file}: {faults[0]}")
    ends = [one.not_valid_after_utc for one, fault in zip(certificates, faults, strict=True) if not fault]
    return Authorities(pem, certificates, Expiry(key, file, min(ends)))


def read_file(key: str, file: Path) -> bytes:
    """The bytes of a file. Raises CertificateFault."""
    try:
        return read_regular(file)
    except OSError as error:
        raise CertificateFault(key, f"{file} cannot be read ({error.strerror or error})") from error


def stamp(files: Iterable[Path]) -> Stamp:
    """A value that changes when one of the files is replaced or rewritten ([3])."""
    return tuple(map(_stamp_of, files))


def _stamp_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _certificates(key: str, file: Path, pem: bytes) -> tuple[x509.Certificate, ...]:
    try:
        found = tuple(x509.load_pem_x509_certificates(pem))
        for one in found:
            one.public_key()  # a kind of key that cannot be used shows here
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CertificateFault(key, f"{file} holds no certificate in PEM that can be used ({error})") from error
    return found


def _untimely(certificate: x509.Certificate, now: datetime) -> str:
    """The fault of a certificate that is not valid now; "": none."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        return f"the certificate for {_subject(certificate)} expired on {_shown(end)}"
    if now < begin:
        return f"the certificate for {_subject(certificate)} is not valid before {_shown(begin)}"
    return ""


def _subject(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string() or "nobody"


def _shown(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"
