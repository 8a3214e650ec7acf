"""JWTs, checked by PyJWT with the keys of a JWKS file (rule A1). Needs the extra `sow[jwt]`.

[1]  The algorithms are those of the configuration. `none` and symmetric algorithms cannot be configured.
[2]  A token without `exp`, `aud`, `iss` or the claim that names the caller is refused.
[3]  A claim remembers the key that its token was signed with, and is withdrawn once the file has another key of that
     name, or none.
[4]  A file that can be read replaces the keys before, also if it has none: the issuer trusts no key any more.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import jwt
import structlog
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sow_server.access.credentials import (
    FINGERPRINT_DIGITS,
    REMEMBERED,
    TOKEN_BYTES_MAX,
    Asked,
    Claim,
    Shown,
    unauthenticated,
)
from sow_server.config import JwtConfig
from sow_server.regular_files import read_regular

log = structlog.get_logger(__name__)

MICROS: Final = 1_000_000
EXPIRE_SECONDS_MAX: Final = (2**63 - 1) // MICROS
"""Answers have the time in 64 bits, in microseconds."""
_ALGORITHMS: Final = {
    "EC": ("ES256", "ES384", "ES512"),
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "OKP": ("EdDSA",),
}
"""The algorithms of each type of key. Symmetric keys have none."""
_FAULTS: Final = (
    jwt.PyJWTError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Faults of a token or a key file. For odd ones the library raises errors of Python: for a number in the place of an
object, for arrays nested by the thousand, for a time that is infinite."""


_WHY: Final[dict[type[Exception], str]] = {
    jwt.ExpiredSignatureError: "it has expired",
    jwt.ImmatureSignatureError: "it is not valid yet",
    jwt.InvalidAlgorithmError: "its algorithm is not configured, or does not fit its key",
    jwt.InvalidAudienceError: "its audience is another one",
    jwt.InvalidIssuerError: "its issuer is another one",
    jwt.InvalidSignatureError: "its signature is not that of the key",
}


class KeysUnusable(Exception):
    """The JWKS file cannot be used; the message says why."""


class _Keys(NamedTuple):
    """The keys of a file, and the tokens that were checked with them."""

    by_id: Mapping[str, jwt.PyJWK]
    prints: Mapping[str, bytes]
    """The SHA-256 of each public key."""
    known: OrderedDict[bytes, Claim]


class Jwts:
    """Checks JWTs. The keys are read anew when the file has changed."""

    asks = Asked.TOKEN

    def __init__(self, config: JwtConfig) -> None:
        """Raises KeysUnusable."""
        self._config = config
        self._stamp: tuple[int, int, int] | None = None
        self._keys = _Keys({}, {}, OrderedDict())
        """Replaced as a whole: `refresh` runs on another thread than `prove`."""
        self.refresh()
        if not self._keys.by_id:
            raise KeysUnusable(f"{config.jwks} holds no public key")

    def refresh(self) -> None:
        """Reads the keys again if the file has changed. Raises KeysUnusable; the keys before stay."""
        path: Path = self._config.jwks
        try:
            state = path.stat()
            stamp = (state.st_mtime_ns, state.st_ino, state.st_size)
            if stamp == self._stamp:
                return
            found = _keys_in(read_regular(path).decode())
            keys = {key.key_id or "": key for key in found if key.key_type in _ALGORITHMS}
            prints = {name: _print(key) for name, key in keys.items()}
        except (OSError, *_FAULTS) as error:
            raise KeysUnusable(f"{path} holds no JSON web keys ({error})") from error
        self._keys = _Keys(keys, prints, OrderedDict())
        self._stamp = stamp
        log.info("keys_read", file=str(path), keys=len(keys))

    def prove(self, shown: Shown) -> Claim:
        """The claim of a token. Raises StoreError UNAUTHENTICATED."""
        token = shown.token
        if not token:
            raise unauthenticated("the call has no bearer token")
        data = token.encode()
        if len(data) > TOKEN_BYTES_MAX:
            raise unauthenticated("the bearer token is too long")
        digest = hashlib.sha256(data)
        keys = self._keys
        known = keys.known
        found = known.get(digest.digest())
        if found is None:
            found = known[digest.digest()] = self._checked(keys, token, digest.hexdigest()[:FINGERPRINT_DIGITS])
            if len(known) > REMEMBERED:
                known.popitem(last=False)
        return found

    def _checked(self, keys: _Keys, token: str, fingerprint: str) -> Claim:
        config = self._config
        try:
            key_id = jwt.get_unverified_header(token).get("kid", "")
            key = keys.by_id.get(key_id)
            if key is None:
                raise unauthenticated("the JWT names a key that is not in the key file")
            fitting = _ALGORITHMS[str(key.key_type)]
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[name for name in config.algorithms if name in fitting],
                audience=config.audience,
                issuer=config.issuer,
                leeway=0,
                options={"require": ["exp", "aud", "iss", config.claim]},
            )
            expire_seconds = min(int(claims["exp"]), EXPIRE_SECONDS_MAX)
        except _FAULTS as error:
            raise unauthenticated(f"the JWT is refused: {_why(error)}") from error
        name = claims[config.claim]
        if not isinstance(name, str) or not name:
            raise unauthenticated(f"the JWT's claim {config.claim} is no text")
        withdrawn = partial(self._withdrawn, key_id, keys.prints[key_id])
        return Claim("jwt", (name,), fingerprint, expire_seconds * MICROS, withdrawn)

    def _withdrawn(self, key_id: str, key_print: bytes) -> str:
        """The reason why a claim no longer counts, because its key has gone ([3]). Empty if it counts."""
        return "" if self._keys.prints.get(key_id) == key_print else "was signed with a key that has gone"


def _keys_in(text: str) -> list[jwt.PyJWK]:
    data = json.loads(text)
    if isinstance(data, dict) and data.get("keys") == []:
        return []
    return jwt.PyJWKSet.from_dict(data).keys


def _print(key: jwt.PyJWK) -> bytes:
    public = key.key.public_key() if hasattr(key.key, "public_key") else key.key
    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def _why(error: Exception) -> str:
    """The fault of a token, without any part of it: the audit log has it."""
    if isinstance(error, jwt.MissingRequiredClaimError):
        return f"it has no {error.claim}"
    return _WHY.get(type(error), "it is malformed")
