"""Finds the identity of a call by its credential: a certificate, a token, or a JWT (rule A1).

[1]  The kind of credential is the listener's, never the caller's choice.
[2]  A secret is compared by its SHA-256, so the time of a comparison tells nothing about the secret.
[3]  The algorithms of a JWT are those of the configuration, never those that the token names.
"""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from sow_server.access.model import ANONYMOUS, AccessFile, Credential, Identity, Peer
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS

Holder = TypeVar("Holder", Identity, Peer)
Key = TypeVar("Key")

FINGERPRINT_DIGITS: Final = 16
NAMES_SHOWN_MAX: Final = 8
NAME_SHOWN_MAX: Final = 200
"""The most names of a credential that a refusal tells, and the most characters of each."""
REMEMBERED: Final = 10_000
"""Credentials whose claim is remembered: the check of a certificate or a JWT costs a fraction of a millisecond."""
TOKEN_BYTES_MAX: Final = 16 * 2**10


_SAN_TYPES: Final[dict[type[x509.GeneralName], str]] = {
    x509.UniformResourceIdentifier: "URI",
    x509.DNSName: "DNS",
    x509.RFC822Name: "EMAIL",
    x509.IPAddress: "IP",
}


_UNREADABLE: Final = (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)
"""The errors of a certificate that its authority should not have made; the library has no common ancestor of them."""


class Shown(NamedTuple):
    """The credentials that a call shows."""

    token: str = ""
    """The bearer token; "": none."""
    certificate: bytes = b""
    """The caller's certificate, as PEM; empty: none."""
    chain: bytes = b""
    """It and the certificates that were sent with it."""


def _never() -> str:
    return ""


class Claim(NamedTuple):
    """The names that a credential proves."""

    kind: str
    """"certificate", "token", "jwt" or "none"."""
    names: tuple[str, ...]
    """The names of a certificate with their types, the SHA-256 of a token, or the claim of a JWT."""
    fingerprint: str
    expire_micros: int | None = None
    withdrawn: Callable[[], str] = _never
    """Says why the credential is no longer good since it was checked, such as "is revoked"; "": it is good. It knows
    the anchor of trust that the credential was checked by: a key, an authority (rule A6)."""


NO_CLAIM: Final = Claim("none", (), "")


class Asked(enum.Enum):
    """The part of a call that a prover looks at."""

    NOTHING = enum.auto()
    TOKEN = enum.auto()
    CERTIFICATE = enum.auto()
    BOTH = enum.auto()


class Prover(Protocol):
    """Checks one kind of credential."""

    asks: Asked
    """The rest of `Shown` may be empty."""

    def prove(self, shown: Shown) -> Claim:
        """The names that the credential proves. Raises StoreError UNAUTHENTICATED."""


def unauthenticated(message: str) -> StoreError:
    """The refusal of a caller that has not proved its name."""
    return StoreError(Reason.UNAUTHENTICATED, message)


def unknown(claim: Claim) -> StoreError:
    """The refusal of a caller without an identity. It tells the proved names, to compare them with the access
    file."""
    if claim.kind == "none":
        return unauthenticated(
            'this address asks for no credential (auth = "none"), and the access file has no identity anonymous'
        )
    if claim.kind == "token":
        shown = f"the token whose SHA-256 begins with {claim.fingerprint}"
    elif claim.kind == "jwt":
        shown = f"the JWT of {claim.names[0][:NAME_SHOWN_MAX]!r}"
    else:
        names = ", ".join(name[:NAME_SHOWN_MAX] for name in claim.names[:NAMES_SHOWN_MAX])
        shown = f"the certificate for {names or 'no name'}"
    return unauthenticated(f"{shown} belongs to no identity that this server knows")


Fault: TypeAlias = Callable[[bytes, bytes], str]
"""Says why a certificate with its chain is no longer good, such as "is revoked"; "": it is good."""


class Certificates:
    """Client certificates; the TLS handshake has checked their chain and dates."""

    asks = Asked.CERTIFICATE

    def __init__(self, fault: Fault = lambda pem, chain: "") -> None:
        self._fault = fault
        self._known: OrderedDict[tuple[bytes, bytes], Claim] = OrderedDict()

    def prove(self, shown: Shown) -> Claim:
        _, pem, chain = shown
        if not pem:
            raise unauthenticated("the connection has no client certificate")
        if fault := self._fault(pem, chain):
            raise unauthenticated(f"the client certificate {fault}")
        found = self._known.get((pem, chain))
        if found is None:
            found = _certificate_claim(pem)._replace(withdrawn=partial(self._fault, pem, chain))
            _remember(self._known, (pem, chain), found)
        return found


class BehindCertificates:
    """Another credential, on a connection whose client certificate must be good, too."""

    asks = Asked.BOTH

    def __init__(self, prover: Prover, certificates: Certificates) -> None:
        self._prover = prover
        self._certificates = certificates
        self._known: OrderedDict[tuple[Claim, Claim], Claim] = OrderedDict()

    def prove(self, shown: Shown) -> Claim:
        pair = self._certificates.prove(shown), self._prover.prove(shown)
        found = self._known.get(pair)
        if found is None:
            connection, claim = pair
            found = claim._replace(withdrawn=lambda: connection.withdrawn() or claim.withdrawn())
            _remember(self._known, pair, found)
        return found


def _certificate_claim(pem: bytes) -> Claim:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = _certificate_names(certificate)
    except _UNREADABLE as error:
        raise unauthenticated(f"the client certificate cannot be read: {error}") from error
    digest = hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
    expire_micros = int(certificate.not_valid_after_utc.timestamp()) * 1_000_000
    return Claim("certificate", names, digest[:FINGERPRINT_DIGITS], expire_micros)


def _certificate_names(certificate: x509.Certificate) -> tuple[str, ...]:
    names: list[str] = []
    try:
        given = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        for name in given:
            prefix = _SAN_TYPES.get(type(name))
            if prefix is not None:
                names.append(f"{prefix}:{name.value}")
    except x509.ExtensionNotFound:
        pass
    names += [f"CN:{name.value!s}" for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return tuple(names)


class Tokens:
    """Bearer tokens of 256 random bits, of which the access file has the SHA-256."""

    asks = Asked.TOKEN

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Claim] = OrderedDict()
        """Keyed by SHA-256 [2]."""

    def prove(self, shown: Shown) -> Claim:
        digest = hashlib.sha256(_token(shown)).digest()
        found = self._known.get(digest)
        if found is None:
            found = Claim("token", (digest.hex(),), digest.hex()[:FINGERPRINT_DIGITS])
            _remember(self._known, digest, found)
        return found


def _token(shown: Shown) -> bytes:
    if not shown.token:
        raise unauthenticated("the call has no bearer token")
    token = shown.token.encode()
    if len(token) > TOKEN_BYTES_MAX:
        raise unauthenticated("the bearer token is too long")
    return token


class Anonymous:
    """Callers without a credential: they have no name."""

    asks = Asked.NOTHING

    def prove(self, shown: Shown) -> Claim:
        return NO_CLAIM


def _remember(known: OrderedDict[Key, Claim], key: Key, claim: Claim) -> None:
    known[key] = claim
    if len(known) > REMEMBERED:
        known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Directory:
    """Identities and peers of one access file, by their credentials."""

    identities: Mapping[tuple[str, str], Identity]
    peers: Mapping[tuple[str, str], Peer]
    anonymous: Identity | None
    """The identity of callers without a credential, if the file has it."""

    @classmethod
    def of(cls, file: AccessFile) -> Directory:
        """The directory of an access file."""
        return cls(_by_proof(file.identities.values()), _by_proof(file.peers.values()), file.identities.get(ANONYMOUS))

    def identity(self, claim: Claim) -> Identity | None:
        """The identity that a claim proves."""
        if claim.kind == "none":
            return self.anonymous
        return _first(self.identities, claim)

    def peer(self, claim: Claim) -> Peer | None:
        """The peer that a claim proves."""
        return _first(self.peers, claim)


def _by_proof(holders: Iterable[Holder]) -> dict[tuple[str, str], Holder]:
    found: dict[tuple[str, str], Holder] = {}
    for holder in holders:
        credential = holder.credential
        for kind, name in (
            ("certificate", credential.certificate),
            ("token", credential.token_sha256),
            ("jwt", credential.jwt),
        ):
            if name:
                found[kind, name] = holder
    return found


def _first(holders: Mapping[tuple[str, str], Holder], claim: Claim) -> Holder | None:
    for name in claim.names:
        holder = holders.get((claim.kind, name))
        if holder is not None:
            return holder
    return None


def check_expiry(claim: Claim, credential: Credential, now_micros: int) -> int | None:
    """The time when the credential expires; None: never. Raises StoreError UNAUTHENTICATED if it has."""
    if claim.expire_micros is None and credential.expire_micros is None:
        return None
    times = [time for time in (claim.expire_micros, credential.expire_micros) if time is not None]
    first = min(times)
    if first <= now_micros:
        moment = datetime.fromtimestamp(max(0, first) / MICROS, UTC)  # a zone may lead to before the year 1
        raise unauthenticated(f"the {claim.kind} has expired, at {moment:%Y-%m-%d %H:%M:%S} UTC")
    return first
