"""Tokens that nobody has issued are refused as unauthenticated, whatever is in them (rule A1)."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from sow_server.access.credentials import Shown
from sow_server.access.jwt import Jwts
from sow_server.config import JwtConfig
from sow_server.engine.values.errors import Reason, StoreError


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


def token(header: object, claims: str = "{}") -> str:
    return f"{encoded(json.dumps(header))}.{encoded(claims)}.{encoded('signature')}"


@pytest.fixture(scope="module")
def prover(tmp_path_factory: pytest.TempPathFactory) -> Jwts:
    """It has keys of two kinds, as after a change of the algorithm."""
    path: Path = tmp_path_factory.mktemp("jwt") / "keys.json"
    of_ec = json.loads(ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()).public_key()))
    of_rsa = json.loads(RSAAlgorithm.to_jwk(rsa.generate_private_key(65_537, 2_048).public_key()))
    path.write_text(json.dumps({"keys": [{**of_ec, "kid": "ec"}, {**of_rsa, "kid": "rsa"}]}))
    return Jwts(JwtConfig(path, "https://id", "sow", algorithms=("ES256", "RS256")))


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param("", id="none"),
        pytest.param("no.jwt", id="two parts"),
        pytest.param("\u2028.\u2028.\u2028", id="no base64"),
        pytest.param(f"{encoded('[' * 10_000)}.{encoded('{}')}.x", id="deep header"),
        pytest.param(token({"alg": "ES256", "kid": "ec"}, "[" * 5_000), id="deep claims"),
        pytest.param(token({"alg": "none", "kid": "ec"}), id="no algorithm"),
        pytest.param(token({"alg": "HS256", "kid": "rsa"}), id="symmetric"),
        pytest.param(token({"alg": "ES256", "kid": "rsa"}), id="key of another algorithm"),
        pytest.param(token({"alg": "RS256", "kid": "ec"}), id="key of another algorithm, the other way"),
        pytest.param(token({"alg": "ES256", "kid": ["ec"]}), id="key that is a list"),
        pytest.param(token({"alg": "ES256", "kid": {"ec": 1}}), id="key that is an object"),
        pytest.param(token({"alg": ["ES256"], "kid": "ec"}), id="algorithm that is a list"),
        pytest.param(token({"alg": "ES256", "kid": "ec", "crit": ["x" * 9_000]}), id="unknown extension"),
        pytest.param(token({"alg": "ES256", "kid": "ec", "b64": False}), id="detached content"),
        pytest.param(token(["ES256"]), id="header that is a list"),
        pytest.param("x" * 20_000, id="too long"),
    ],
)
def test_a_token_that_nobody_has_issued_is_unauthenticated(prover: Jwts, shown: str) -> None:
    """Story: the library raises more than its own exceptions. A token that named the key of another algorithm was a
    TypeError: INTERNAL, with a traceback in the log, and no failed attempt in the audit log. Other refusals cited the
    token at length."""
    with pytest.raises(StoreError) as refused:
        prover.prove(Shown(token=shown))
    assert refused.value.reason is Reason.UNAUTHENTICATED
    assert len(refused.value.message) <= 200
    assert shown not in refused.value.message or not shown
