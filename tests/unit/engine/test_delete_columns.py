"""A delete of many records column by column has the effect of deleting them one by one (rules D2, D3, L10)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from sow_server.engine.commit.observers import Committed
from sow_server.engine.commit.puts import PLAIN_RECORDS_MIN
from sow_server.engine.disk.rocks import EXPIRY, INDEXES, RECORDS, TOMBSTONES
from sow_server.engine.stored import StoredStatistics
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import (
    PERMANENT,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    Outcome,
    Publish,
    TopicSettings,
)
from tests.support.oracles.examples import examples
from tests.support.stores.stores import HOUR, MINUTE, SECOND, JournalEntry, Rig

RECORDS_STORED = 60
EFFECTS = (RECORDS, EXPIRY, INDEXES, TOMBSTONES)


class Effect(NamedTuple):
    """Everything that a delete changes."""

    answers: list[Outcome | StoreError]
    rows: dict[str, list[tuple[bytes, bytes]]]
    journal: list[JournalEntry]
    figures: StoredStatistics
    replaced: list[bytes | None]
    """The removed and the replaced records, as followers get them."""
    heads: int


def effect(rig: Rig, settings: TopicSettings, *, overdue: bool, guarded: bool, seed: int) -> Effect:
    """A delete that shares its commit with publishes before and after it. It names keys twice, missing keys and a key
    that cannot be; some records never expire."""
    chance = random.Random(seed)
    topic = rig.create_topic("orders", settings)
    replaced: list[bytes | None] = []

    def hear(commits: Sequence[Committed], _: int) -> None:
        for commit in commits:
            for chunk in commit.chunks:
                replaced.extend(chunk.previous_values or [])

    rig.store.commits.follow(hear)
    topic.followers = topic.previous_wanted = 1
    topic.replicated = True
    keys = [str(number) for number in range(RECORDS_STORED)]
    lifetimes = [
        chance.choice([PERMANENT, Lifetime(LifetimeKind.TTL, chance.choice([30 * SECOND, HOUR]))]) for _ in keys
    ]
    rig.run(Publish("orders", [b'{"price":%d}' % (index % 7) for index in range(len(keys))], keys, lifetimes=lifetimes))
    committer = rig.store.writer.committer
    committer._basis = replace(committer._basis, origin=2)  # the records came from another instance
    rig.time.tick(MINUTE if overdue else SECOND)
    wanted = [*chance.sample(keys, 40), *chance.choices(keys, k=5), "missing", "\ud800"]
    chance.shuffle(wanted)
    sooner = Lifetime(LifetimeKind.TTL, 20 * SECOND)
    answers = rig.run_together(
        [
            Publish("orders", [b'{"price":100}'] * 10, chance.sample(keys, 10), lifetime=sooner),
            Delete("orders", wanted, matches=(lambda _, value: not value.endswith(b"3}")) if guarded else None),
            Publish("orders", [b'{"price":200}'] * 5, chance.sample(keys, 5), lifetime=sooner),
        ]
    )
    rig.store.writer.sync_now()
    return Effect(
        answers,
        {family: rig.rows(family) for family in EFFECTS},
        rig.journal("orders"),
        topic.statistics._replace(appended_bytes=0),  # the columns of a chunk may be encoded differently
        replaced,
        len(rig.store.writer.heads),
    )


@pytest.mark.parametrize("expiration", [Expiration.ENABLED, Expiration.DISABLED])
@pytest.mark.parametrize("overdue", [False, True])
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("index", [(), ("/price",)])
def test_a_delete_in_columns_has_the_effect_of_single_deletes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expiration: Expiration,
    overdue: bool,
    guarded: bool,
    index: tuple[str, ...],
) -> None:
    settings = TopicSettings(expiration=expiration, index=index)
    for seed in range(examples(16)):
        effects = []
        for name, smallest in (("columns", PLAIN_RECORDS_MIN), ("singles", 10_000)):
            with monkeypatch.context() as patch:
                patch.setattr("sow_server.engine.commit.mutations.PLAIN_RECORDS_MIN", smallest)
                (tmp_path / f"{name}-{seed}").mkdir()
                rig = Rig(tmp_path / f"{name}-{seed}")
                effects.append(effect(rig, settings, overdue=overdue, guarded=guarded, seed=seed))
                rig.close()
        columns, singles = effects
        assert columns == singles
        assert {entry.kind for entry in columns.journal} >= {"put", "delete"}


def test_a_delete_in_columns_leaves_each_record_its_own_version(tmp_path: Path) -> None:
    """D3: each delete has a new version, in the order of the request."""
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    keys = [str(number) for number in range(20)]
    rig.run(Publish("orders", [b"x"] * 20, keys))
    before = rig.journal("orders")
    outcome = rig.run(Delete("orders", keys[::-1]))
    deletes = rig.journal("orders")[20:]
    assert [entry.key.decode() for entry in deletes] == keys[::-1]
    versions = [entry.version for entry in deletes]
    assert versions == list(range(versions[0], versions[0] + 20))
    assert versions[0] > max(entry.version for entry in before)
    assert (outcome.applied, outcome.last_sequence) == (20, deletes[-1].sequence)
    rig.run(Publish("orders", [b"y"], ["1"]))
    assert rig.journal("orders")[-1].version > versions[-1]
    rig.close()
