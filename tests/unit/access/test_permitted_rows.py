"""A publisher with rows: records decided in columns are decided as they are one by one (rule A4)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sow_server.engine.values.errors import Reason
from sow_server.engine.values.model import Expiration, Lifetime, LifetimeKind, Outcome, Publish, TopicSettings
from sow_server.filters import parse
from sow_server.filters.restriction import Restriction
from sow_server.query.filtering import permitted
from tests.support.stores.stores import HOUR, MINUTE, Rig

SETTINGS = TopicSettings(expiration=Expiration.ENABLED)
EU, US = b'{"region":"eu"}', b'{"region":"us"}'
KEYS = [f"{letter}{number}" for number in range(60) for letter in "ab"]


def _publish(rig: Rig, topic: str, rows: str, records: list[tuple[str, bytes, int]]) -> Outcome:
    found = rig.topic(topic)
    return rig.run(
        Publish(
            topic,
            [payload for _, payload, _ in records],
            [key for key, _, _ in records],
            lifetimes=[Lifetime(LifetimeKind.TTL, ttl) for _, _, ttl in records],
            permits=permitted(found, Restriction(parse(rows))),
        )
    )


@pytest.mark.parametrize("rows", ["/region = 'eu'", "@key LIKE '^a'", "/region = 'eu' AND @key LIKE '^a'", "FALSE"])
@pytest.mark.parametrize(("wrong", "over"), [(0.0, True), (0.03, False), (0.3, True)])
def test_rows_decide_in_columns_as_they_do_one_by_one(tmp_path: Path, rows: str, wrong: float, over: bool) -> None:
    """New records, and those that they replace: some of other rows, some overdue (`over`), keys that come twice."""
    chance = random.Random(7)
    rig = Rig(tmp_path)
    for topic in ("columns", "singles"):
        rig.create_topic(topic, SETTINGS)

    def region() -> bytes:
        return US if chance.random() < wrong else EU

    stored = [(key, region(), MINUTE if over and chance.random() < 0.1 else HOUR) for key in chance.sample(KEYS, 60)]
    records = [
        (chance.choice(KEYS if chance.random() < wrong else KEYS[::2]), region(), 0 if over and number == 7 else HOUR)
        for number in range(80)
    ]
    for topic in ("columns", "singles"):
        rig.run(
            Publish(
                topic,
                [payload for _, payload, _ in stored],
                [key for key, _, _ in stored],
                lifetimes=[Lifetime(LifetimeKind.TTL, ttl) for _, _, ttl in stored],
            )
        )
    rig.time.tick(MINUTE)
    together = _publish(rig, "columns", rows, records)
    alone = [_publish(rig, "singles", rows, [record]) for record in records]
    assert [refusal.index for refusal in together.refusals] == [
        index for index, outcome in enumerate(alone) if outcome.refusals
    ]
    assert {refusal.reason for refusal in together.refusals} <= {Reason.PERMISSION_DENIED}
    assert together.applied == sum(outcome.applied for outcome in alone)
    columns, singles = (
        [(entry.kind, entry.key, entry.payload) for entry in rig.journal(topic)] for topic in ("columns", "singles")
    )
    assert columns == singles
    rig.close()


def test_a_hidden_record_is_kept_though_its_key_comes_twice(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create_topic("orders", SETTINGS)
    rig.run(Publish("orders", [US], ["a1"]))
    records = [(key, EU, HOUR) for key in ["a1", *KEYS[4:40], "a1"]]
    outcome = _publish(rig, "orders", "/region = 'eu'", records)
    assert [refusal.index for refusal in outcome.refusals] == [0, len(records) - 1]
    assert rig.live("orders")[b"a1"].payload == US
    rig.close()
