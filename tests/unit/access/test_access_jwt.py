"""JWTs: refusals, keys, remembered checks (rule A1)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import jwt as pyjwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from sow_server.access import jwt
from sow_server.access.credentials import TOKEN_BYTES_MAX, Shown, check_expiry
from sow_server.access.jwt import Jwts, KeysUnusable
from sow_server.access.model import Credential
from sow_server.config import JwtConfig
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS

KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEY = ec.generate_private_key(ec.SECP256R1())
RSA_KEY = rsa.generate_private_key(65537, 2048)
NOW = int(time.time())
END = NOW + 3600
CLAIMS = {"sub": "desk", "exp": END, "aud": "sow", "iss": "https://id.bank"}

Json = Mapping[str, object]


def jwk(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, kid: str | None, **more: object) -> Json:
    """A public key, as a set of keys has it."""
    if isinstance(key, rsa.RSAPrivateKey):
        made = RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    else:
        made = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {**made, **({} if kid is None else {"kid": kid}), **more}


def write_keys(path: Path, *keys: Json) -> None:
    """Replaces the set of keys, with a new inode, as tools do."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"keys": list(keys)}))
    new.replace(path)


def config(path: Path, *algorithms: str, claim: str = "sub") -> JwtConfig:
    return JwtConfig(path, "https://id.bank", "sow", algorithms or ("ES256",), claim)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    write_keys(path, jwk(KEY, "one"), jwk(OTHER_KEY, "two"))
    return path


@pytest.fixture
def jwts(keys: Path) -> Jwts:
    return Jwts(config(keys))


def token(
    claims: Json = CLAIMS,
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | bytes = KEY,
    kid: object = "one",
    algorithm: str = "ES256",
) -> str:
    # Of the bytes: the library refuses to make some of the bad ones from a dictionary.
    return pyjwt.PyJWS().encode(
        json.dumps(dict(claims)).encode(), key, algorithm, headers=None if kid is None else {"kid": kid}
    )


def raw(header: Json, claims: Json = CLAIMS, signature: bytes = b"") -> str:
    """A token whose parts the test chooses."""
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


def refused(jwts: Jwts, text: str) -> str:
    with pytest.raises(StoreError) as caught:
        jwts.prove(Shown(text))
    assert caught.value.reason is Reason.UNAUTHENTICATED
    return caught.value.message


def without(name: str) -> Json:
    return {key: value for key, value in CLAIMS.items() if key != name}


def test_a_good_token_proves_its_claim(jwts: Jwts) -> None:
    text = token()
    claim = jwts.prove(Shown(text))
    assert (claim.kind, claim.names, claim.expire_micros) == ("jwt", ("desk",), END * MICROS)
    assert claim.fingerprint not in text
    assert jwts.prove(Shown(token({**CLAIMS, "aud": ["other", "sow"]}, OTHER_KEY, "two"))).names == ("desk",)


@pytest.mark.parametrize("name", ["exp", "aud", "iss", "sub"])
def test_each_of_the_claims_is_needed(jwts: Jwts, name: str) -> None:
    assert name in refused(jwts, token(without(name)))


@pytest.mark.parametrize(
    "changed",
    [
        {"exp": NOW - 1},
        {"exp": 0},
        {"exp": "never"},
        {"exp": None},
        {"exp": float("inf")},
        {"exp": []},
        {"aud": "sow2"},
        {"aud": ["other"]},
        {"aud": []},
        {"aud": 1},
        {"aud": {"sow": 1}},
        {"iss": "https://id.bank/"},
        {"iss": ""},
        {"iss": ["https://id.bank"]},
        {"nbf": NOW + 3600},
        {"nbf": "soon"},
        {"sub": ""},
        {"sub": 7},
        {"sub": None},
        {"sub": ["desk"]},
    ],
    # The same in every process of a run, whenever it began.
    ids=lambda changed: str(
        {name: "NOW" if isinstance(value, int) and value > 10**9 else value for name, value in changed.items()}
    ),
)
def test_a_claim_of_another_value_is_refused(jwts: Jwts, changed: Json) -> None:
    refused(jwts, token({**CLAIMS, **changed}))


def test_an_expiry_beyond_all_years_is_no_fault(jwts: Jwts) -> None:
    """Story: an `exp` that fits no 64 bits made WhoAmI fail."""
    claim = jwts.prove(Shown(token({**CLAIMS, "exp": 10**30})))
    assert claim.expire_micros is not None
    assert NOW * MICROS < claim.expire_micros < 2**63


def test_another_claim_may_name_the_caller(keys: Path) -> None:
    jwts = Jwts(config(keys, claim="azp"))
    assert jwts.prove(Shown(token({**without("sub"), "azp": "spark"}))).names == ("spark",)
    refused(jwts, token())


# --- forged tokens ---------------------------------------------------------------------------------------------------


def test_the_signature_must_be_that_of_the_named_key(jwts: Jwts) -> None:
    refused(jwts, token(key=OTHER_KEY, kid="one"))
    head, body, signature = token().split(".")
    refused(jwts, f"{head}.{body}.")
    refused(jwts, f"{head}.{body}")
    refused(jwts, f"{head}.{token({**CLAIMS, 'sub': 'root'}).split('.')[1]}.{signature}")


def test_no_algorithm_is_none(jwts: Jwts) -> None:
    for algorithm in ("none", "None", "NONE", ""):
        refused(jwts, raw({"alg": algorithm, "kid": "one"}))
    refused(jwts, raw({"kid": "one"}))


@pytest.mark.parametrize("form", ["pem", "der", "jwk"])
def test_the_public_key_is_no_secret_that_signs(jwts: Jwts, keys: Path, form: str) -> None:
    """The old trick: HS256 with the public key, which everybody has, as the shared secret."""
    public = KEY.public_key()
    secret = {
        "pem": public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "der": public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        "jwk": json.dumps(json.loads(keys.read_text())["keys"][0]).encode(),
    }[form]
    head, body, _ = raw({"alg": "HS256", "kid": "one", "typ": "JWT"}).split(".")
    signature = hmac.new(secret, f"{head}.{body}".encode(), hashlib.sha256).digest()
    refused(jwts, f"{head}.{body}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}")


def test_an_algorithm_that_is_not_configured_is_refused(keys: Path) -> None:
    write_keys(keys, jwk(RSA_KEY, "one"))
    jwts = Jwts(config(keys, "RS256"))
    assert jwts.prove(Shown(token(key=RSA_KEY, algorithm="RS256"))).names == ("desk",)
    for algorithm in ("RS384", "PS256"):
        refused(jwts, token(key=RSA_KEY, algorithm=algorithm))


def test_a_key_of_another_kind_than_the_algorithm_is_refused(keys: Path) -> None:
    """Story: a token with the algorithm of RSA and the key of an elliptic curve raised TypeError, and so INTERNAL."""
    write_keys(keys, jwk(KEY, "ec"), jwk(RSA_KEY, "rsa"))
    jwts = Jwts(config(keys, "ES256", "RS256", "EdDSA"))
    refused(jwts, token(key=RSA_KEY, kid="ec", algorithm="RS256"))
    refused(jwts, token(key=KEY, kid="rsa", algorithm="ES256"))
    refused(jwts, raw({"alg": "EdDSA", "kid": "ec"}, signature=b"x" * 64))
    refused(jwts, raw({"alg": "EdDSA", "kid": "rsa"}, signature=b"x" * 64))


def test_a_shared_secret_among_the_keys_signs_nothing(keys: Path) -> None:
    secret = {"kty": "oct", "k": base64.urlsafe_b64encode(b"s" * 32).decode(), "kid": "one", "alg": "HS256"}
    write_keys(keys, secret, jwk(KEY, "two"))
    jwts = Jwts(config(keys))
    refused(jwts, token(key=b"s" * 32, algorithm="HS256"))
    refused(jwts, token(key=KEY, kid="one"))
    assert jwts.prove(Shown(token(kid="two"))).names == ("desk",)


@pytest.mark.parametrize("kid", ["three", None, "", "ONE"])
def test_a_key_that_is_not_in_the_file_is_refused(jwts: Jwts, kid: str | None) -> None:
    assert "not in the key file" in refused(jwts, token(kid=kid))


@pytest.mark.parametrize("kid", [1, ["one"], {"one": 1}, None])
def test_a_kid_that_is_no_text_is_refused(jwts: Jwts, kid: object) -> None:
    refused(jwts, raw({"alg": "ES256", "kid": kid}))


def test_a_token_may_bring_no_key_of_its_own(jwts: Jwts) -> None:
    text = pyjwt.encode(dict(CLAIMS), OTHER_KEY, "ES256", headers={"kid": "one", "jwk": dict(jwk(OTHER_KEY, "one"))})
    refused(jwts, text)


def test_a_key_without_a_name_is_for_tokens_without_one(keys: Path) -> None:
    write_keys(keys, jwk(KEY, None))
    assert Jwts(config(keys)).prove(Shown(token(kid=None))).names == ("desk",)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        ".",
        "..",
        "a.b.c",
        "é.é.é",
        "\x00",
        token() + "\n",
        " " + token(),
        token().replace(".", ".."),
        "e30.e30.e30",
    ],
)
def test_texts_that_are_no_tokens_are_refused(jwts: Jwts, text: str) -> None:
    refused(jwts, text)


def test_deep_and_large_tokens_are_refused(jwts: Jwts) -> None:
    deep = base64.urlsafe_b64encode(b"[" * 9_000).decode()
    refused(jwts, f"{deep}.e30.")
    head = token().split(".")[0]
    refused(jwts, f"{head}.{deep}.x")
    assert "too long" in refused(jwts, "x" * (TOKEN_BYTES_MAX + 1))
    assert "too long" in refused(jwts, "é" * (TOKEN_BYTES_MAX // 2 + 1))
    assert "no bearer token" in refused(jwts, "")


# --- remembered checks -----------------------------------------------------------------------------------------------


def test_a_remembered_token_expires_all_the_same(jwts: Jwts) -> None:
    shown = Shown(token())
    for now, good in ((NOW, True), (END - 1, True), (END, False)):
        claim = jwts.prove(shown)
        if good:
            assert check_expiry(claim, Credential(jwt="desk"), now * MICROS) == END * MICROS
        else:
            with pytest.raises(StoreError, match="the jwt has expired"):
                check_expiry(claim, Credential(jwt="desk"), now * MICROS)


def test_only_so_many_tokens_are_remembered_and_none_that_was_refused(
    jwts: Jwts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwt, "REMEMBERED", 3)
    for number in range(6):
        jwts.prove(Shown(token({**CLAIMS, "n": number})))
        refused(jwts, token({**CLAIMS, "n": number, "aud": "x"}))
    assert len(jwts._keys.known) == 3


def test_a_check_is_remembered_and_forgotten_with_the_keys(jwts: Jwts, keys: Path) -> None:
    shown = Shown(token())
    first = jwts.prove(shown)
    assert jwts.prove(shown) is first
    jwts.refresh()
    assert jwts.prove(shown) is first, "the file has not changed"
    write_keys(keys, jwk(OTHER_KEY, "two"))
    assert jwts.prove(shown) is first, "it is looked at once a second"
    jwts.refresh()
    assert "not in the key file" in refused(jwts, shown.token)


def test_a_token_that_is_being_checked_while_its_key_goes_is_not_remembered(
    jwts: Jwts, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: the keys are read on another thread. A token that was checked meanwhile stayed good until it expired."""
    decode = pyjwt.decode

    def slow(*given: object, **options: object) -> object:
        found = decode(*given, **options)  # type: ignore[arg-type]  # passed on as they are
        write_keys(keys, jwk(OTHER_KEY, "two"))
        jwts.refresh()
        return found

    text = token()
    monkeypatch.setattr(pyjwt, "decode", slow)
    jwts.prove(Shown(text))
    monkeypatch.undo()
    refused(jwts, text)


# --- the key file ----------------------------------------------------------------------------------------------------

BROKEN = {
    "no JSON": "{",
    "no object": "[]",
    "a number": "1",
    "keys that are no list": '{"keys": 1}',
    "a key that is no object": '{"keys": [1]}',
    "a key of no known kind": '{"keys": [{"kty": "x"}]}',
    "a half key": '{"keys": [{"kty": "EC", "crv": "P-256", "x": "AA"}]}',
    "deep": "[" * 100_000,
    "a null": "null",
    "a kid that is a list": json.dumps({"keys": [{**jwk(KEY, None), "kid": ["x"]}]}),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_keys_that_cannot_be_read_leave_the_old_ones(jwts: Jwts, keys: Path, fault: str) -> None:
    text = token()
    keys.write_text(BROKEN[fault])
    for _ in range(2):
        with pytest.raises(KeysUnusable, match=r"keys\.json"):
            jwts.refresh()
    assert jwts.prove(Shown(text)).names == ("desk",)
    with pytest.raises(KeysUnusable):
        Jwts(config(keys))
    write_keys(keys, jwk(OTHER_KEY, "two"))
    jwts.refresh()
    refused(jwts, text)
    assert jwts.prove(Shown(token(key=OTHER_KEY, kid="two"))).names == ("desk",)


@pytest.mark.parametrize("left", [[], [{"kty": "oct", "k": "c2VjcmV0", "kid": "one"}]], ids=["none", "a secret"])
def test_an_issuer_that_has_taken_back_all_of_its_keys_trusts_none(jwts: Jwts, keys: Path, left: list[Json]) -> None:
    """Story: a file without keys counted as broken, so the last key could not be taken back."""
    text = token()
    claim = jwts.prove(Shown(text))
    write_keys(keys, *left)
    jwts.refresh()
    assert claim.withdrawn() == "was signed with a key that has gone"
    refused(jwts, text)
    with pytest.raises(KeysUnusable, match="holds no public key"):
        Jwts(config(keys))


def test_a_claim_is_withdrawn_with_its_key_and_with_no_other(jwts: Jwts, keys: Path) -> None:
    """Story: who had connected with a key that was taken back kept its streams until the token expired."""
    first, second = jwts.prove(Shown(token())), jwts.prove(Shown(token(key=OTHER_KEY, kid="two")))
    for left, gone in (
        ([jwk(OTHER_KEY, "two"), jwk(RSA_KEY, "three"), jwk(KEY, "one")], []),  # moved, and a key more
        ([jwk(OTHER_KEY, "two")], [first]),
        ([jwk(KEY, "one"), jwk(OTHER_KEY, "two")], []),  # it is back
        ([jwk(OTHER_KEY, "one"), jwk(OTHER_KEY, "two")], [first]),  # another key of its name
        ([jwk(KEY, "one"), jwk(OTHER_KEY, "renamed")], [second]),
        ([jwk(KEY, "one", alg="ES256", use="sig"), jwk(OTHER_KEY, "two")], []),  # the same, described better
    ):
        write_keys(keys, *left)
        jwts.refresh()
        assert [claim for claim in (first, second) if claim.withdrawn()] == gone


def test_a_missing_or_binary_key_file_leaves_the_old_keys(jwts: Jwts, keys: Path) -> None:
    keys.write_bytes(b"\xff\xfe")
    with pytest.raises(KeysUnusable):
        jwts.refresh()
    os.unlink(keys)
    with pytest.raises(KeysUnusable):
        jwts.refresh()
    assert jwts.prove(Shown(token())).names == ("desk",)


@pytest.mark.parametrize(
    "text",
    [
        "CANARY",
        "CANARY.CANARY.CANARY",
        raw({"alg": "CANARY", "kid": "one"}),
        raw({"alg": "ES256", "kid": "CANARY"}),
        raw({"alg": "ES256", "kid": ["CANARY"]}),
        raw({"alg": "ES256", "kid": "one", "crit": ["CANARY"]}),
        *[token({**CLAIMS, name: "CANARY"}) for name in ("aud", "iss", "exp", "nbf", "iat")],
        *[token({**CLAIMS, name: ["CANARY"]}) for name in ("aud", "iss", "sub", "exp")],
    ],
)
def test_no_part_of_a_token_is_in_the_refusal(jwts: Jwts, text: str) -> None:
    """The audit log has the refusal (rule A8)."""
    assert "CANARY" not in refused(jwts, text)
