"""A get that renews what it returns, as a service answers it (rule L20)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sow.v1 import types_pb2
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import PERMANENT, Expiration
from tests.support.fakes.guarded import GuardedParts
from tests.support.oracles.access import grant, identity
from tests.support.stores.stores import BINARY, MINUTE, SECOND, Rig

EU = "rows = \"@key BEGINS WITH 'eu'\"\n"
FILE = (
    identity("desk", "desk")
    + grant("desk", "sessions", "read publish")
    + grant("desk", "closed", "read publish")
    + identity("reader", "reader")
    + grant("reader", "sessions", "read")
    + identity("half", "half")
    + grant("half", "sessions", "read")
    + grant("half", "sessions", "publish", EU)
)
IN_A_MINUTE = types_pb2.Lifetime(ttl_micros=MINUTE)


class Sessions:
    """A topic of sessions, and gets of it."""

    def __init__(self, rig: Rig, parts: GuardedParts) -> None:
        self.rig = rig
        self.parts = parts

    def get(self, *keys: str, caller: str = "desk", topic: str = "sessions", **fields: Any) -> dict[str, int | None]:
        """The keys of the answer, with the rest of their lifetimes."""
        (answer,) = self.parts.answers(caller, "Get", topic=topic, keys=keys, **fields)
        now = self.rig.clock.now_micros()
        return {
            record.key: record.expire_time_micros - now if record.HasField("expire_time_micros") else None
            for record in answer.records
        }

    def refusal(self, *keys: str, caller: str = "desk", topic: str = "sessions", **fields: Any) -> Any:
        """The status of a get that is refused."""
        (status,) = self.parts.ask(caller, "Get", topic=topic, keys=keys, **fields)
        return status

    @property
    def last_sequence(self) -> int:
        return self.rig.store.commits.last_sequence


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    rig = Rig(tmp_path)
    rig.create_topic("sessions", BINARY, {})
    rig.create_topic("closed", BINARY, {}, expiration=Expiration.REJECT)
    with GuardedParts(rig, FILE) as parts:
        yield Sessions(rig, parts)
    rig.close()


def test_a_get_returns_the_records_that_it_has_renewed(sessions: Sessions) -> None:
    """Lifetime 2: Redis's GETEX and HGETEX."""
    sessions.rig.put("sessions", "soon", ttl=SECOND)
    sessions.rig.put("sessions", "later", ttl=30 * SECOND)

    found = sessions.get("later", "none", "soon", "soon", touch=IN_A_MINUTE, touch_below_micros=10 * SECOND)

    assert found == {"later": 30 * SECOND, "soon": MINUTE}
    assert [entry.kind for entry in sessions.rig.journal("sessions")] == ["put", "put", "touch"]


def test_a_get_without_a_bound_renews_every_record(sessions: Sessions) -> None:
    sessions.rig.put("sessions", "later", ttl=60 * MINUTE)
    sessions.rig.put("sessions", "never", lifetime=PERMANENT)
    assert sessions.get("later", "never", touch=IN_A_MINUTE) == {"later": MINUTE, "never": MINUTE}


def test_a_get_that_finds_nothing_to_renew_does_not_need_the_writer(sessions: Sessions) -> None:
    """Lifetime 3. Reads go on after writes have failed; so do these, until one has something to write."""
    sessions.rig.put("sessions", "later", ttl=30 * SECOND)
    sessions.rig.put("sessions", "never", lifetime=PERMANENT)
    before = sessions.last_sequence
    sessions.rig.store.writer.fail(StoreError(Reason.STORE_FAILED, "the disk is gone"))

    found = sessions.get("later", "never", "none", touch=IN_A_MINUTE, touch_below_micros=30 * SECOND)

    assert found == {"later": 30 * SECOND, "never": None}
    assert sessions.last_sequence == before
    refused = sessions.refusal("later", touch=IN_A_MINUTE, touch_below_micros=30 * SECOND + 1)
    assert "STORE_FAILED" in str(refused)


def test_a_record_whose_life_ends_by_the_touch_is_not_returned(sessions: Sessions) -> None:
    """L8: an expired record is never returned."""
    sessions.rig.put("sessions", "once", ttl=MINUTE)
    assert sessions.get("once", touch=types_pb2.Lifetime(ttl_micros=0)) == {}
    assert sessions.get("once") == {}


def test_a_get_renews_with_the_permissions_of_a_touch(sessions: Sessions) -> None:
    for key in ("eu1", "us1"):
        sessions.rig.put("sessions", key, ttl=SECOND)
    assert "PERMISSION_DENIED" in str(sessions.refusal("eu1", caller="reader", touch=IN_A_MINUTE))
    assert sessions.get("eu1", caller="reader") == {"eu1": SECOND}
    # One that may write a part of what it may read renews that part.
    assert sessions.get("eu1", "us1", caller="half", touch=IN_A_MINUTE) == {"eu1": MINUTE, "us1": SECOND}


def test_a_lifetime_that_is_refused_refuses_the_get(sessions: Sessions) -> None:
    """Whether or not there is a record that would get it."""
    for lifetime, topic, reason in (
        (types_pb2.Lifetime(ttl_micros=-1), "sessions", "LIFETIME_NEGATIVE"),
        (IN_A_MINUTE, "closed", "LIFETIME_REJECTED"),
    ):
        assert reason in str(sessions.refusal("none", topic=topic, touch=lifetime, touch_below_micros=SECOND))


def test_wrong_gets_are_refused(sessions: Sessions) -> None:
    keys = [str(number) for number in range(1_001)]
    assert "ATOMIC_TOO_LARGE" in str(sessions.refusal(*keys, touch=IN_A_MINUTE))
    assert sessions.get(*keys[:1_000], touch=IN_A_MINUTE) == {}
    assert "touch_below_micros" in str(sessions.refusal("a", touch_below_micros=SECOND))
    assert "touch_below_micros" in str(sessions.refusal("a", touch=IN_A_MINUTE, touch_below_micros=-1))
