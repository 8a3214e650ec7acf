"""Tombstones in a commit: the traces of removed records of a topic that peers share (rule R4).

[1]  A removed record leaves its tombstone in the commit that removes it: with the version of the delete, or of the
     expired record.
[2]  Tombstones of a draft are read from its batch, so a look-up sees the result of this commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft, Removed
from sow_server.engine.disk.layout import Tombstone, decode_tombstone, encode_tombstone, made_key
from sow_server.engine.disk.rocks import TOMBSTONES
from sow_server.engine.stored import BURY, DELETE


def on_removed(draft: Draft, topic: Topic, removed: Removed) -> None:
    """Leaves the tombstones of removed records ([1])."""
    if not topic.replicated and removed.change != BURY:
        return
    kind = DELETE if removed.change == BURY else removed.change
    puts = draft.batch.puts[TOMBSTONES]
    rows = zip(removed.store_keys, removed.versions, removed.sequences, removed.origins, strict=True)
    for store_key, version, sequence, origin in rows:
        puts[store_key] = encode_tombstone(Tombstone(version, sequence, draft.now, origin, kind))
        puts[made_key(sequence, store_key)] = b""
    figures = draft.figures(topic)
    draft.statistics[topic.id] = figures._replace(tombstones=figures.tombstones + len(removed.store_keys))


def tombstone(draft: Draft, store_key: bytes) -> Tombstone | None:
    """The tombstone of a key after the commit ([2])."""
    (value,) = draft.rows(TOMBSTONES, [store_key])
    return None if value is None else decode_tombstone(value)


def may_have_tombstones(draft: Draft, topic: Topic) -> bool:
    """True if a search for tombstones of a topic can find any."""
    return bool(draft.batch.puts[TOMBSTONES]) or draft.figures(topic).tombstones > 0


def with_tombstone(draft: Draft, store_keys: Sequence[bytes]) -> set[bytes]:
    """The keys that have a tombstone."""
    return {key for key, value in zip(store_keys, draft.rows(TOMBSTONES, store_keys), strict=True) if value is not None}
