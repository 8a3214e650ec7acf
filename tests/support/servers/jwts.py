"""An issuer of JWTs for tests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from tests.support.servers.certificates import replace

ISSUER: Final = "https://id.test"
AUDIENCE: Final = "sow"


class Issuer:
    """Owns a key, and the file `NAME.json` with its public part."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / f"{name}.json"
        self.config = f"[access.jwt]\njwks = '{self.file}'\nissuer = '{ISSUER}'\naudience = '{AUDIENCE}'\n"
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        public = json.loads(ECAlgorithm.to_jwk(self._key.public_key()))
        replace(self.file, json.dumps({"keys": [public | {"kid": name, "alg": "ES256"}]}).encode())

    def token(self, subject: str, *, seconds: float = 3600, audience: str = AUDIENCE, issuer: str = ISSUER) -> str:
        """A token for a subject; `seconds`: until it expires."""
        claims = {"sub": subject, "aud": audience, "iss": issuer, "exp": int(time.time() + seconds)}
        return jwt.encode(claims, self._key, algorithm="ES256", headers={"kid": self._name})
