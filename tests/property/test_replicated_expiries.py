"""Changes of another instance that come late: each kind of subscriber hears the same of those that are over (L7, J12).

Two stores on one time. Records with short lives are published, updated and touched at one, and shipped to the other
once time has gone on. Nobody there is handed a record that is over, and all that a subscriber has in the end is what it
would have from a query.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from sow_server.engine.values.model import ABSENT, Expiration, Lifetime, Publish, Touch
from sow_server.subscriptions.frames import ChangeOp
from tests.support.oracles.examples import examples
from tests.support.stores.replicas import instance, ship
from tests.support.stores.stores import SECOND, FakeTime, Rig
from tests.support.stores.subscribers import JSON, DurableFollower, Follower, Subscribers, ttl

pytestmark = pytest.mark.simulation

KEYS = ("a", "b", "c")
FILTER = "/n > 1"


def two(folder: Path) -> tuple[Rig, Rig]:
    time = FakeTime()
    rigs = instance(folder, "a", peers=["b"], time=time), instance(folder, "b", peers=["a"], time=time)
    for rig in rigs:
        rig.create_topic("orders", JSON)
        rig.create_topic("dead")
        rig.alter_topic("orders", dead_letter="dead")
    ship(*rigs, topics="orders")
    return rigs


def everybody(subscribers: Subscribers) -> dict[str, Follower]:
    """One subscriber of each kind; change readers are apart, as they hear everything."""
    found: dict[str, Follower] = {}
    for name, text in (("", ""), (" filtered", FILTER), (" of one field", "/n IN (1, 2)")):
        found[f"plain{name}"] = subscribers.subscribe("orders", filter=text)
        found[f"oof{name}"] = subscribers.subscribe("orders", filter=text, oof=True)
        found[f"delta{name}"] = subscribers.subscribe("orders", filter=text, oof=True, delta=True)
        found[f"conflating{name}"] = subscribers.subscribe("orders", filter=text, oof=True, conflation=SECOND)
        found[f"durable{name}"] = subscribers.attach("orders", f"d{len(found)}", filter=text, oof=True)
    found["pattern"] = subscribers.subscribe(pattern="orders|other", oof=True)
    return found


def write(rig: Rig, draw: random.Random) -> None:
    keys = [draw.choice(KEYS) for _ in range(draw.choice([1, 1, 2, 10]))]
    lifetime = draw.choice([ABSENT, ttl(0), ttl(1), ttl(SECOND), ttl(SECOND), ttl(3 * SECOND)])
    match draw.randrange(6):
        case 0:
            rig.run(Touch("orders", keys[:1], lifetime=ttl(0) if lifetime is ABSENT else lifetime))
        case 1:
            rig.delete("orders", keys[0])
        case _:
            documents = [json.dumps({"n": draw.randrange(5), "r": draw.randrange(99)}).encode() for _ in keys]
            rig.run(Publish("orders", documents, keys, lifetime=lifetime, atomic=draw.random() < 0.2))


@pytest.mark.parametrize("seed", range(examples(120)))
def test_no_kind_of_subscriber_is_handed_a_record_of_a_peer_that_is_over(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    a, b = two(tmp_path)
    subscribers = Subscribers(b)
    followers = everybody(subscribers)
    reader = subscribers.subscribe("orders", changes=True)
    states: dict[str, dict[bytes, bytes]] = {name: {} for name in followers}
    try:
        for _ in range(12):
            write(a, draw)
            a.time.tick(draw.choice([0, 1, SECOND, 5 * SECOND]))
            if draw.random() < 0.6:
                ship(a, b, topics="orders")
                for name, follower in followers.items():
                    hear(name, follower, subscribers, states[name])
        ship(a, b, topics="orders")
        for _ in range(2):  # all that expires is over after the first round; the second is an interval of conflation
            b.time.tick(5 * SECOND)
            b.store.sweep()
            for name, follower in followers.items():
                hear(name, follower, subscribers, states[name])
        live = {key: record.payload for key, record in b.live("orders").items()}
        for name, state in states.items():
            if not name.startswith("plain"):  # those do not hear of what goes
                assert state.keys() == {key for key, payload in live.items() if wanted(name, payload)}, name
        journal = [(kind, key) for kind, key in b.kinds("orders") if kind != "bury"]
        reader.news()
        assert len(reader.changes()) == len(journal), "change readers hear of everything (J12)"
    finally:
        a.close()
        b.close()


def wanted(name: str, payload: bytes) -> bool:
    number = json.loads(payload)["n"]
    return number > 1 if name.endswith("filtered") else number in (1, 2) if name.endswith("field") else True


def hear(name: str, follower: Follower, subscribers: Subscribers, state: dict[bytes, bytes]) -> None:
    before = len(follower.changes())
    follower.news()
    now = subscribers.rig.clock.now_micros()
    for row in follower.changes()[before:]:
        if row.op is ChangeOp.PUT:
            assert row.expire_time > now or row.is_delta, f"{name} was handed {row} at {now}"
            state[row.key] = row.payload
        else:
            state.pop(row.key, None)
    if isinstance(follower, DurableFollower):
        assert follower.error is None


@pytest.mark.parametrize("expiration", [Expiration.ENABLED, Expiration.DISABLED])
def test_a_record_that_comes_after_its_end_is_a_dead_letter_and_nothing_else(
    tmp_path: Path, expiration: Expiration
) -> None:
    """It was a put to everybody who did not conflate, and a dead letter, too. A topic that does not act on lifetimes
    takes it as any other."""
    a, b = two(tmp_path)
    b.alter_topic("orders", expiration=expiration)
    subscribers = Subscribers(b)
    followers = everybody(subscribers)
    a.put("orders", "late", b'{"n":2}', ttl=SECOND)
    a.time.tick(8 * SECOND)
    ship(a, b, topics="orders")
    kept = expiration is Expiration.DISABLED
    subscribers.settle()
    b.time.tick(SECOND)  # an interval of conflation is over
    for name, follower in followers.items():
        puts = [kind for kind, _, _ in follower.news() if kind == "put"]
        assert puts == (["put"] if kept else []), name
    assert len(b.live("dead")) == (0 if kept else 1)
    a.close()
    b.close()


def test_a_touch_that_ends_a_life_is_told_as_the_end(tmp_path: Path) -> None:
    """L7: only a publish with a lifetime of 0 is meant for those who are attached."""
    a, b = two(tmp_path)
    subscribers = Subscribers(a)
    follower = subscribers.subscribe("orders", oof=True)
    a.put("orders", "k", b'{"n":2}')
    a.run(Touch("orders", ["k"], lifetime=Lifetime(ttl(0).kind, 0)))
    assert follower.news() == [("put", "k", b'{"n":2}'), ("oof expired", "k", b'{"n":2}')]
    a.put("orders", "k", b'{"n":3}', ttl=0)
    assert follower.news() == [("put", "k", b'{"n":3}'), ("oof expired", "k", b'{"n":3}')]
    a.close()
    b.close()
