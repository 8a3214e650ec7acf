"""The messages for a caller without access, and for an operator who asks why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import sow_server.access
from sow_server.access.credentials import Claim, check_expiry, unknown
from sow_server.access.file import load_access
from sow_server.access.model import Credential
from sow_server.access.needs import Action
from sow_server.access.permissions import Permissions
from sow_server.access_control import AccessControlError, check, jwt_prover
from sow_server.config import load
from sow_server.engine.values.errors import StoreError
from tests.support.oracles.access import grant, identity, write_private


def permissions(folder: Path, *grants: str) -> Permissions:
    write_private(folder / "auth.toml", identity("desk", "desk") + "".join(grants))
    return Permissions(load_access(folder / "auth.toml").identities["desk"])


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        (Claim("token", ("ab" * 32,), "abababababababab"), "the token whose SHA-256 begins with abababababababab"),
        (Claim("certificate", ("URI:spiffe://bank/x", "CN:x"), "ab"), "the certificate for URI:spiffe://bank/x, CN:x"),
        (Claim("certificate", (), "ab"), "the certificate for no name"),
        (Claim("jwt", ("eve",), "ab"), "the JWT of 'eve'"),
        (Claim("none", (), ""), 'no credential (auth = "none"), and the access file has no identity anonymous'),
    ],
    ids=["token", "certificate", "nameless certificate", "jwt", "none"],
)
def test_an_unknown_caller_is_told_what_its_credential_proves(claim: Claim, told: str) -> None:
    """So it can be compared with the access file: a name that was written differently, an old token."""
    assert told in unknown(claim).message
    assert unknown(claim).reason.name == "UNAUTHENTICATED"


def test_the_names_of_an_unknown_caller_are_bounded() -> None:
    claim = Claim("certificate", tuple(f"DNS:{'x' * 1_000}{number}" for number in range(100)), "ab")
    assert len(unknown(claim).message) < 2_000


def test_an_expired_credential_is_told_when(tmp_path: Path) -> None:
    claim = Claim("token", ("a",), "a")
    with pytest.raises(StoreError, match=r"the token has expired, at 2020-01-01 00:00:00 UTC"):
        check_expiry(claim, Credential(expire_micros=1_577_836_800_000_000), 1_577_836_800_000_000)
    assert check_expiry(claim, Credential(expire_micros=1_577_836_800_000_000), 1_577_836_799_999_999) is not None


def test_a_pattern_that_matches_only_a_part_of_a_name_is_found(tmp_path: Path) -> None:
    """A pattern matches the whole name (rule A3); most people expect a prefix to be enough, once."""
    found = permissions(tmp_path, grant("desk", "orders", "read"), grant("desk", r"quotes\..*", "read"))
    assert found.nearly(Action.READ, "orders.eu").startswith("auth.toml:6 ")
    assert found.nearly(Action.READ, "old.quotes.eu").startswith("auth.toml:10 ")
    assert found.nearly(Action.READ, "orders") == "", "the whole name"
    assert found.nearly(Action.READ, "trades") == ""
    assert found.nearly(Action.PUBLISH, "orders.eu") == "", "the grant is for something else"


def config_of(folder: Path, text: str) -> Path:
    write_private(folder / "auth.toml", identity("desk", "desk") + grant("desk", "orders", "read"))
    (folder / "sow.toml").write_text(text + '\n[access]\nfile = "auth.toml"\n')
    return folder / "sow.toml"


def test_an_access_file_behind_a_listener_that_asks_for_nothing_is_doubtful(tmp_path: Path) -> None:
    """Story: without `auth` every call was refused, and --check-config said ok."""
    (doubt,) = check(load(config_of(tmp_path, "")))
    assert '127.0.0.1:7450 has auth = "none"' in doubt
    assert 'auth.toml has no identity "anonymous"' in doubt
    assert check(load(config_of(tmp_path, '[server]\nauth = "token"'))) == []
    path = config_of(tmp_path, "")
    write_private(tmp_path / "auth.toml", '[[identities]]\nname = "anonymous"\n')
    assert check(load(path)) == [], "anonymous callers may be meant"


JWT = '[server]\nauth = "jwt"\n[access.jwt]\njwks = "keys.json"\nissuer = "i"\naudience = "a"'


def test_a_missing_library_for_jwts_is_told_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sow_server.access, "jwt", raising=False)  # another test may have imported it
    monkeypatch.delitem(sys.modules, "sow_server.access.jwt", raising=False)
    monkeypatch.setitem(sys.modules, "jwt", None)
    config = load(config_of(tmp_path, JWT))
    with pytest.raises(AccessControlError, match=r"pip install 'sow\[jwt\]'"):
        jwt_prover(config)


def test_a_missing_file_of_keys_is_told_by_table_key_and_name(tmp_path: Path) -> None:
    with pytest.raises(AccessControlError, match=r"\[access.jwt\] jwks: .*keys.json"):
        check(load(config_of(tmp_path, JWT)))


def test_an_audit_log_in_a_missing_directory_is_told_before_the_start(tmp_path: Path) -> None:
    path = config_of(tmp_path, '[server]\nauth = "token"')
    path.write_text(path.read_text() + 'audit = "logs/audit.jsonl"\n')
    with pytest.raises(AccessControlError, match=r"\[access\] audit: there is no directory .*logs"):
        check(load(path))
