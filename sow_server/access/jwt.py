"""JWTs, checked by PyJWT with the keys of a JWKS file (rule A1). Needs the extra `sow[jwt]`.

[1]  The algorithms are those of the configuration. `none` and symmetric algorithms cannot be configured.
[2]  A token without `exp`, `aud`, `iss` or the claim that names the caller is refused.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import jwt

from sow_server.access.credentials import (
    FINGERPRINT_DIGITS,
    REMEMBERED,
    TOKEN_BYTES_MAX,
    Claim,
    Shown,
    unauthenticated,
)
from sow_server.config import JwtConfig

MICROS: Final = 1_000_000


class KeysUnusable(Exception):
    """The JWKS file cannot be used; the message says why."""


class Jwts:
    """Checks JWTs. The keys are read anew when the file has changed."""

    def __init__(self, config: JwtConfig) -> None:
        """Raises KeysUnusable."""
        self._config = config
        self._stamp: tuple[int, int, int] | None = None
        self._keys: dict[str, jwt.PyJWK] = {}
        self._known: OrderedDict[bytes, Claim] = OrderedDict()
        self.refresh()

    def refresh(self) -> None:
        """Reads the keys again if the file has changed. Raises KeysUnusable; the keys before stay."""
        path: Path = self._config.jwks
        try:
            state = path.stat()
            stamp = (state.st_mtime_ns, state.st_ino, state.st_size)
            if stamp == self._stamp:
                return
            keys = jwt.PyJWKSet.from_json(path.read_text(encoding="utf-8")).keys
        except (OSError, ValueError, jwt.PyJWTError) as error:
            raise KeysUnusable(f"{path} holds no JSON web keys ({error})") from error
        self._keys = {key.key_id or "": key for key in keys}
        self._stamp = stamp
        self._known.clear()

    def prove(self, shown: Shown) -> Claim:
        """The claim of a token. Raises StoreError UNAUTHENTICATED."""
        token = shown.token
        if not token:
            raise unauthenticated("the call has no bearer token")
        if len(token) > TOKEN_BYTES_MAX:
            raise unauthenticated("the bearer token is too long")
        digest = hashlib.sha256(token.encode())
        found = self._known.get(digest.digest())
        if found is None:
            found = self._checked(token, digest.hexdigest()[:FINGERPRINT_DIGITS])
            self._known[digest.digest()] = found
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return found

    def _checked(self, token: str, fingerprint: str) -> Claim:
        config = self._config
        try:
            kid = jwt.get_unverified_header(token).get("kid", "")
            key = self._keys.get(kid)
            if key is None:
                raise unauthenticated("the JWT names a key that is not in the key file")
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=list(config.algorithms),
                audience=config.audience,
                issuer=config.issuer,
                leeway=0,
                options={"require": ["exp", "aud", "iss", config.claim]},
            )
        except jwt.PyJWTError as error:
            raise unauthenticated(f"the JWT is refused: {error}") from error
        name = claims[config.claim]
        if not isinstance(name, str) or not name:
            raise unauthenticated(f"the JWT's claim {config.claim} is no text")
        return Claim("jwt", (name,), fingerprint, int(claims["exp"]) * MICROS)
