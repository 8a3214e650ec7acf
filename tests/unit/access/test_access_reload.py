"""Which calls a new access file ends, and when credentials end them (rule A6), by a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sow_server.access.audit import NoAudit
from sow_server.access.authorizer import Authorizer
from sow_server.access.caller import Call
from sow_server.access.credentials import Shown, Tokens
from sow_server.access.file import load_access
from sow_server.access.needs import NEEDS
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.values.errors import Reason, StoreError
from tests.support.oracles.access import grant, identity, peer, write_access

SUBSCRIBE = "/sow.v1.SowService/Subscribe"
REPLICATE = "/sow.v1.ReplicationService/Replicate"
FILE = identity("desk", "desk") + grant("desk", "orders", "read", "rows = \"/region = 'eu'\"") + peer("ldn", "orders")
MICROS = 1_000_000
BEGIN = 1_750_000_000 * MICROS


class NoObserver:
    """Counts nothing."""

    def authentication_failed(self) -> None: ...

    def access_denied(self, method: str, action: str) -> None: ...


class Guarded:
    """An authorizer on an access file, and its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_micros = BEGIN
        write_access(folder, FILE)
        self.authorizer = Authorizer(
            Topics(),
            load_access(folder / "auth.toml"),
            NoAudit(),
            NoObserver(),
            now_micros=lambda: self.now_micros,
            elapsed=lambda: self.now_micros / MICROS,
        )

    def call(self, token: str, method: str = SUBSCRIBE) -> Call:
        """A call under way."""
        call, _ = self.authorizer.admit(Tokens(), method, NEEDS[method], Shown(token), "here:1", lambda: None)
        call.runs(asyncio.ensure_future(asyncio.get_running_loop().create_future()))
        return call

    def load(self, text: str) -> int:
        """Loads another access file; returns the number of calls that it has ended."""
        write_access(self.folder, text)
        return self.authorizer.replace(load_access(self.folder / "auth.toml"))


@pytest.fixture
def guarded(tmp_path: Path) -> Guarded:
    return Guarded(tmp_path)


def why(call: Call) -> Reason | None:
    """The reason for which a call was ended; None: it was not."""
    return None if call.ended is None else call.ended.reason


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene()

    asyncio.run(run())


@pytest.mark.parametrize(
    "text",
    [
        identity("another") + "# a comment\n\n" + FILE,
        grant("another", ".*", "read") + peer("par") + FILE,
        FILE + "[roles.desk.limits]\nsubscriptions = 1\n",
        FILE.replace('[[identities]]\nname = "desk"', '[[identities]]\n\n\nname = "desk"'),
    ],
    ids=["another identity in front", "another role and peer in front", "other limits", "moved"],
)
def test_a_file_in_which_a_callers_rights_are_the_same_ends_none_of_its_calls(guarded: Guarded, text: str) -> None:
    """Story: grants were compared with their lines in the file, so one line in front of them ended all streams."""

    async def scene() -> None:
        calls = guarded.call("desk"), guarded.call("ldn", REPLICATE)
        assert guarded.load(text) == 0
        assert list(map(why, calls)) == [None, None]

    run(scene)


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (FILE.replace("/region = 'eu'", "/region = 'us'"), "desk"),
        (FILE.replace('allow = ["read"]', 'allow = ["read", "publish"]'), "desk"),
        (FILE + "[[roles.desk.grants]]\ntopics = 'x'\ndeny = ['read']\n", "desk"),
        (FILE.replace('roles = ["desk"]', "roles = []"), "desk"),
        (FILE.replace('roles = ["desk"]', 'roles = ["desk"]\nexpires = 2100-01-01'), "desk"),
        (FILE.replace(identity("desk", "desk"), ""), "desk"),
        (FILE.replace(peer("ldn", "orders"), peer("ldn", "other")), "ldn"),
        (FILE.replace(peer("ldn", "orders"), peer("par", "orders")), "ldn"),
    ],
    ids=["rows", "action", "deny", "roles", "expiry", "gone", "topics of a peer", "peer gone"],
)
def test_a_file_that_changes_the_rights_of_a_caller_ends_its_calls_alone(
    guarded: Guarded, text: str, ended: str
) -> None:
    async def scene() -> None:
        calls = {"desk": guarded.call("desk"), "ldn": guarded.call("ldn", REPLICATE), "root": guarded.call("root")}
        assert guarded.load(text) == 1
        assert {name: why(call) for name, call in calls.items() if why(call)} == {ended: Reason.ACCESS_CHANGED}

    run(scene)


def test_a_credential_ends_its_calls_at_the_moment_in_which_it_expires(guarded: Guarded) -> None:
    async def scene() -> None:
        guarded.load(FILE.replace('roles = ["desk"]', 'roles = ["desk"]\nexpires = 2025-06-15T15:06:50Z'))
        call, other = guarded.call("desk"), guarded.call("root")
        guarded.now_micros = BEGIN + 10 * MICROS - 1
        guarded.authorizer.look()
        assert why(call) is None
        guarded.now_micros += 1
        guarded.authorizer.look()
        assert [why(call), why(other)] == [Reason.ACCESS_CHANGED, None]
        with pytest.raises(StoreError, match="has expired"):
            guarded.call("desk")

    run(scene)


def test_limits_of_a_new_file_count_from_the_next_call_on(guarded: Guarded) -> None:
    async def scene() -> None:
        calls = [guarded.call("desk") for _ in range(3)]
        guarded.load(FILE + "[roles.desk.limits]\nrpcs = 2\n")
        assert not any(map(why, calls)), "those under way go on"
        with pytest.raises(StoreError) as refused:
            guarded.call("desk")
        assert refused.value.details == {"limit": "rpcs", "value": "2"}
        guarded.load(FILE)
        guarded.call("desk")

    run(scene)
