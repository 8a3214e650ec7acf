"""Everything that was ever committed to a store, and whether a record matches a filter.

The oracle hears of every change as it is committed, keeps the records itself and evaluates filters with the naive
interpreter.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from sow_server.engine.journal.builder import ChunkBuilder
from sow_server.engine.stored import DELETE, EXPIRE
from sow_server.engine.values.model import NEVER, Expiration, TopicSettings
from sow_server.filters import Meta, parse
from tests.support.oracles.naive_filter import NaiveFilter

KEYED = TopicSettings(key=("/k",), expiration=Expiration.ENABLED, index=("/n",))


class Known(NamedTuple):
    """A record as the oracle knows it."""

    payload: bytes
    version: int
    publish_time: int
    expire_time: int


class Happened(NamedTuple):
    """One change, with the record that was there before (None: there was no live one)."""

    topic_id: int
    topic: str
    sequence: int
    kind: int
    key: bytes
    record: Known
    """The new record, or the one that went."""
    before: Known | None
    before_sequence: int
    atomic: bool
    commit_time: int


class Oracle:
    """Everything that has ever been committed."""

    def __init__(self) -> None:
        self.history: list[Happened] = []
        self.at: dict[int, Happened] = {}
        self.records: dict[tuple[int, bytes], tuple[Known, int]] = {}

    def committed(self, chunks: list[ChunkBuilder], commit_time: int) -> None:
        for chunk in chunks:
            topic = chunk.topic
            changes = chunk.finish(commit_time)
            columns = zip(
                changes.change,
                changes.keys,
                changes.payloads,
                changes.version,
                changes.publish_time_micros,
                changes.expire_time_micros,
                strict=True,
            )
            for sequence, (kind, key, payload, version, publish, expire) in enumerate(columns, chunk.first_sequence):
                before, before_sequence = self.records.pop((topic.id, key), (None, 0))
                if kind in (DELETE, EXPIRE):
                    assert before is not None
                    assert before.payload == payload
                    record = before
                else:
                    record = Known(payload, version, publish, expire)
                    self.records[topic.id, key] = record, sequence
                happened = self.at[sequence] = Happened(
                    topic.id,
                    topic.name,
                    sequence,
                    kind,
                    key,
                    record,
                    before,
                    before_sequence,
                    chunk.atomic,
                    commit_time,
                )
                self.history.append(happened)


def matches(text: str, topic: str, key: bytes, record: Known) -> bool:
    """Whether a record matches a filter, by the naive interpreter."""
    if not text:
        return True
    expire_time = None if record.expire_time == NEVER else record.expire_time
    meta = Meta(key.decode(), record.version, record.publish_time, expire_time, topic, 0)
    key_paths: list[tuple[str, ...]] = [("k",)] if topic == "keyed" else []
    return NaiveFilter(json.loads(record.payload), meta, key_paths).matches(parse(text))
