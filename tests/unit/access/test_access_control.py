"""Access as the server runs it: refused starts, and reloads that are whole or nothing (rule A2)."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from structlog.testing import capture_logs

from sow_server import access_control
from sow_server.access.credentials import Anonymous, Certificates, Shown, Tokens
from sow_server.access.file import load_access
from sow_server.access.needs import NEEDS
from sow_server.access_control import AccessControl, AccessControlError, check, read_access
from sow_server.config import Config, load
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.values.errors import Reason, StoreError
from tests.support.oracles.access import grant, identity, peer, write_private
from tests.support.oracles.access_parts import HERE, Counted

DESK = identity("desk", "desk") + grant("desk", "orders", "read")
OTHER = identity("other", "desk") + grant("desk", "orders", "read")
TOKENS = '[server]\nauth = "token"\n[access]\nfile = "auth.toml"\n'
JWTS = (
    TOKENS.replace('"token"', '"jwt"')
    + '[access.jwt]\njwks = "keys.json"\nissuer = "https://id.bank"\naudience = "sow"\n'
)


@pytest.fixture
def readers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def config(folder: Path, text: str = TOKENS, access: str | None = DESK) -> Config:
    (folder / "sow.toml").write_text(text)
    if access is not None:
        write_private(folder / "auth.toml", access)
    return load(folder / "sow.toml")


def write_keys(folder: Path) -> None:
    key = ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()).public_key(), as_dict=True)
    (folder / "keys.json").write_text(json.dumps({"keys": [{**key, "kid": "one"}]}))


def may_call(control: AccessControl, token: str) -> bool:
    path = "/sow.v1.SowService/Get"
    try:
        call, session = control.authorizer.admit(Tokens(), path, NEEDS[path], Shown(token), HERE, lambda: None)
    except StoreError:
        return False
    control.authorizer.finished(call, session, "OK")
    return True


# --- the start -------------------------------------------------------------------------------------------------------


def test_a_fault_of_the_access_file_refuses_the_start(tmp_path: Path, readers: ThreadPoolExecutor) -> None:
    faulty = config(tmp_path, access="[[identities]]\nname = 1\n")
    for act in (lambda: check(faulty), lambda: AccessControl(faulty, Topics(), Counted(), readers)):
        with pytest.raises(AccessControlError, match=r"auth\.toml:1: \[identities\[0\]\] name: expected"):
            act()
    (tmp_path / "auth.toml").unlink()
    with pytest.raises(AccessControlError, match="cannot be read"):
        check(faulty)


def test_peers_that_are_accepted_must_be_in_the_access_file(tmp_path: Path) -> None:
    text = TOKENS + '[replication]\naccept = ["ldn", "nyc"]\n'
    with pytest.raises(AccessControlError, match=r"\[\[peers\]\] has no nyc"):
        read_access(config(tmp_path, text, DESK + peer("ldn")))
    file = read_access(config(tmp_path, text, DESK + peer("ldn") + peer("nyc")))
    assert file is not None
    assert set(file.peers) == {"ldn", "nyc"}


def test_an_audit_log_that_cannot_be_opened_refuses_the_start(tmp_path: Path, readers: ThreadPoolExecutor) -> None:
    text = TOKENS + 'audit = "absent/audit.jsonl"\n'
    with pytest.raises(AccessControlError, match=r"\[access\] audit: .*No such file"):
        AccessControl(config(tmp_path, text), Topics(), Counted(), readers)


def test_keys_that_cannot_be_read_refuse_the_start(tmp_path: Path) -> None:
    configured = config(tmp_path, JWTS)
    with pytest.raises(AccessControlError, match=r"\[access\.jwt\] jwks: .*keys\.json"):
        check(configured)
    write_keys(tmp_path)
    check(configured)


def test_each_listener_has_the_prover_of_its_kind(tmp_path: Path, readers: ThreadPoolExecutor) -> None:
    write_keys(tmp_path)
    kinds = {}
    for auth in ("none", "token", "jwt"):
        made = config(tmp_path, JWTS.replace('"jwt"', f'"{auth}"', 1))
        control = AccessControl(made, Topics(), Counted(), readers)
        kinds[auth] = type(control.listener(made.listeners[0]).prover).__name__
        control.stop()
    assert kinds == {"none": Anonymous.__name__, "token": Tokens.__name__, "jwt": "Jwts"}
    assert Certificates.__name__ not in kinds.values()


def test_without_an_access_file_everybody_may_do_everything(tmp_path: Path, readers: ThreadPoolExecutor) -> None:
    control = AccessControl(config(tmp_path, "", None), Topics(), Counted(), readers)
    assert not control.authorizer.enforces
    with pytest.raises(StoreError, match="no access file"):
        asyncio.run(control.reload())
    assert not (tmp_path / "sow-audit.jsonl").exists()


# --- reloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        "[[identities]]\nname = 1\n",
        OTHER + "x",
        "roles = " + "[" * 100_000,
        DESK + DESK,
        "\x00",
    ],
)
def test_a_reload_with_a_fault_changes_nothing(tmp_path: Path, readers: ThreadPoolExecutor, fault: str) -> None:
    control = AccessControl(config(tmp_path), Topics(), Counted(), readers)
    write_private(tmp_path / "auth.toml", fault)
    with capture_logs() as logs, pytest.raises(StoreError) as caught:
        asyncio.run(control.reload())
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert "nothing was changed" in caught.value.message
    assert [line["event"] for line in logs] == ["access_reload_failed"]
    assert may_call(control, "desk")
    assert not may_call(control, "other")


def test_a_reload_that_others_could_read_changes_nothing(tmp_path: Path, readers: ThreadPoolExecutor) -> None:
    control = AccessControl(config(tmp_path), Topics(), Counted(), readers)
    write_private(tmp_path / "auth.toml", OTHER)
    (tmp_path / "auth.toml").chmod(0o644)
    with pytest.raises(StoreError, match="holds a secret"):
        asyncio.run(control.reload())
    assert may_call(control, "desk")


def test_a_good_reload_takes_the_whole_file(tmp_path: Path, readers: ThreadPoolExecutor) -> None:
    control = AccessControl(config(tmp_path), Topics(), Counted(), readers)
    write_private(tmp_path / "auth.toml", identity("other", "r") + grant("r", "x", "read") + peer("ldn"))
    assert asyncio.run(control.reload()) == (1, 0)
    assert not may_call(control, "desk")
    assert may_call(control, "other")
    assert control.authorizer.peer("ldn") is not None


def test_of_two_reloads_at_a_time_the_later_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: they read on two threads, and the first one could be the last to take its file into use."""
    first_has_read = asyncio.Event()

    async def main(control: AccessControl) -> None:
        loop = asyncio.get_running_loop()
        let_first_go = asyncio.Event()
        executor = loop.run_in_executor

        async def slow_first(*given: object) -> object:
            found = load_access(tmp_path / "auth.toml")
            if not first_has_read.is_set():
                first_has_read.set()
                await let_first_go.wait()
            return found

        monkeypatch.setattr(loop, "run_in_executor", slow_first, raising=True)
        first = asyncio.create_task(control.reload())
        await first_has_read.wait()
        write_private(tmp_path / "auth.toml", OTHER)
        second = asyncio.create_task(control.reload())
        for _ in range(3):
            await asyncio.sleep(0)
        let_first_go.set()
        await asyncio.gather(first, second)
        monkeypatch.setattr(loop, "run_in_executor", executor)

    with ThreadPoolExecutor(2) as readers:
        control = AccessControl(config(tmp_path), Topics(), Counted(), readers)
        asyncio.run(main(control))
    assert may_call(control, "other")
    assert not may_call(control, "desk")


def test_a_key_file_that_breaks_is_logged_once(
    tmp_path: Path, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_keys(tmp_path)
    made = config(tmp_path, JWTS)
    control = AccessControl(made, Topics(), Counted(), readers)
    control.listener(made.listeners[0])
    (tmp_path / "keys.json").write_text("{")
    monkeypatch.setattr(access_control, "LOOK_SECONDS", 0)

    async def main() -> None:
        looked = asyncio.Event()
        loop, (refresh,), looks = asyncio.get_running_loop(), control._refreshed, itertools.count(1)

        def look() -> None:
            if next(looks) == 5:
                loop.call_soon_threadsafe(looked.set)
            refresh()

        control._refreshed[:] = [look]
        control.start()
        await looked.wait()
        control.stop()

    with capture_logs() as logs:
        asyncio.run(main())
    assert [line["event"] for line in logs] == ["keys_unusable"]
