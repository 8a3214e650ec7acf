"""Rows that no publish could have made, as another instance might send them: an older release, or none at all.

bad_rows.send(rig, "t", Bad(key=b"\\xff"))  # what becomes of it
bad_rows.poison(rig, "t", Bad(key=b"\\xff"))  # as if it had come before rows of peers were checked
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from unittest import mock

from sow_peering import NOTHING_PURGED, InstanceIdentity, MergeCounts, SeedRange
from sow_server.engine.replicas import receiving
from sow_server.engine.stored import PUT, Changes, Column, encode_changes
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import NEVER
from tests.support.stores.stores import START, Rig

PEER: Final = InstanceIdentity("peer", "id", "epoch")


class Bad(NamedTuple):
    """A row; values that are not given are correct."""

    key: bytes = b"1"
    payload: bytes = b"{}"
    version: int = START
    publish_time: int = START
    expire_time: int = NEVER
    kind: int = PUT
    origin: int = 0


def packed(rows: Sequence[Bad]) -> bytes:
    """As an instance packs changes for another."""

    def column(of: Callable[[Bad], int]) -> Column:
        return Column([of(row) for row in rows])

    none = Column([0] * len(rows))
    return encode_changes(
        Changes(
            0,
            0,
            bytes([row.kind for row in rows]),
            column(lambda row: row.version),
            column(lambda row: row.publish_time),
            column(lambda row: row.expire_time),
            column(lambda row: row.origin),
            none,
            none,
            none,
            [row.key for row in rows],
            [row.payload for row in rows],
        )
    )


def greet(rig: Rig) -> None:
    """The peer has said Hello; it has all the topics that the instance has."""
    if PEER.name not in rig.store.replicas.sources.by_name:
        answers: list[MergeCounts | StoreError] = []
        rig.store.replicas.sources.begin(PEER, topics=".*", filter_text="", cursor=0, missing_is_deleted=False).then(
            answers.append
        )
        rig.answer(answers)
    rig.store.replicas.sources.answers(PEER.name, rig.store.replicas.shared.matching(".*"))


def send(rig: Rig, topic: str, *rows: Bad, origins: Sequence[str] = (PEER.name,)) -> MergeCounts:
    """The peer sends changes."""
    greet(rig)
    cursor = rig.store.replicas.sources.by_name[PEER.name].cursor
    answers: list[MergeCounts | StoreError] = []
    rig.store.replicas.changes.apply(
        PEER.name,
        after=cursor,
        upto=cursor + len(rows),
        chunks=[(topic, packed(rows))],
        origins=origins,
    ).then(answers.append)
    return rig.answer(answers)


def seed(rig: Rig, topic: str, *rows: Bad) -> MergeCounts:
    """The peer sends a snapshot."""
    greet(rig)
    answers: list[MergeCounts | StoreError] = []
    rig.store.replicas.changes.merge(
        PEER.name,
        SeedRange(topic, True, True, b"", b""),
        chunk=packed(rows),
        origins=[PEER.name],
        purged=NOTHING_PURGED,
    ).then(answers.append)
    return rig.answer(answers)


def mend(rig: Rig, topic: str, *rows: Bad) -> MergeCounts:
    """The peer sends rows for a repair."""
    answers: list[MergeCounts | StoreError] = []
    rig.store.replicas.changes.merge_rows(rig.topic(topic), packed(rows), [PEER.name], source=PEER.name).then(
        answers.append
    )
    return rig.answer(answers)


def poison(rig: Rig, topic: str, *rows: Bad) -> None:
    """The rows are taken whatever they are, as releases before rule R13 did."""
    with mock.patch.object(receiving, "faults", return_value={}):
        assert send(rig, topic, *rows).applied == len(rows)
