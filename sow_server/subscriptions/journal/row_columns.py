"""The rows that a subscriber gets of a whole chunk of the journal, in columns. Pure.

[1]  They are the rows that `focus.row_of` gives one by one.
[2]  No line of Python runs per record, except to judge and project payloads and to leave out rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.soundness import all_told
from sow_server.engine.stored import BURY, DELETE, EXPIRE, PUT, TOUCH, Changes, HeaderColumns
from sow_server.subscriptions.changes import shown
from sow_server.subscriptions.frames import ChangeOp, ChangeReason, RowColumns
from sow_server.subscriptions.live.matching import VersionMatcher
from sow_server.subscriptions.request import Wants

PUTS: Final = frozenset({PUT, TOUCH})
_KINDS: Final = bytes([PUT, TOUCH, DELETE, EXPIRE])
_IS_PUT: Final = bytes.maketrans(_KINDS, bytes([1, 1, 0, 0]))
_OPS_OF_READERS: Final = bytes.maketrans(_KINDS, bytes([ChangeOp.PUT, ChangeOp.PUT, ChangeOp.DELETE, ChangeOp.EXPIRE]))
_OPS: Final = bytes.maketrans(_KINDS, bytes([ChangeOp.PUT, ChangeOp.PUT, ChangeOp.OOF, ChangeOp.OOF]))
_REASONS_OF_READERS: Final = bytes.maketrans(
    _KINDS, bytes([ChangeReason.NONE, ChangeReason.TOUCHED, ChangeReason.NONE, ChangeReason.NONE])
)
_REASONS: Final = bytes.maketrans(
    _KINDS, bytes([ChangeReason.NONE, ChangeReason.TOUCHED, ChangeReason.DELETED, ChangeReason.EXPIRED])
)


def gets_all(matcher: VersionMatcher, wants: Wants) -> bool:
    """True if a subscriber gets every change, with the whole record."""
    return matcher.constant is True and not (wants.delta or wants.conflated or wants.with_due)


def gets_matches(wants: Wants) -> bool:
    """True if a subscriber with a filter gets the puts that match and nothing else, with the whole record."""
    return not (wants.leaving or wants.delta)


def columns_of(
    topic: Topic,
    changes: Changes,
    start: int,
    stop: int,
    wants: Wants,
    now_micros: int,
    choice: Sequence[bool] | None = None,
) -> RowColumns | None:
    """The rows of a chunk from index `start` up to `stop`, excluded, for a subscriber with `gets_all`, or with
    `gets_matches`: then `choice` tells the puts that match. None: a change among them is for peers alone, or its key
    does not fit into a message (rule R13)."""
    kinds, keys = changes.change[start:stop], list(changes.keys[start:stop])
    if BURY in kinds or not all_told(keys):
        return None
    removes = DELETE in kinds or EXPIRE in kinds
    if removes:
        versions, origins = shown(changes, start, stop)
        version, origin = array("q", versions), array("H", origins)
    else:
        version, origin = changes.version.packed(start, stop), array("H", changes.origin.packed(start, stop))
    payloads = list(changes.payloads[start:stop])
    first = changes.first_sequence
    headers = HeaderColumns(
        version=version,
        publish_time=changes.publish_time_micros.packed(start, stop),
        expire_time=changes.expire_time_micros.packed(start, stop),
        sequence=array("q", range(first + start, first + stop)),
        origin=origin,
    )
    rows = RowColumns(
        kinds.translate(_OPS_OF_READERS if wants.changes else _OPS),
        kinds.translate(_REASONS_OF_READERS if wants.changes else _REASONS),
        keys,
        payloads,
        headers,
        falls_due=topic.acts,
    )
    if choice is not None:
        rows = rows.chosen(choice)
    elif removes and not wants.leaving:
        rows = rows.chosen(kinds.translate(_IS_PUT))
    if not wants.changes:
        rows = rows.live(now_micros)
    if wants.projection is not None:
        project, projection = topic.format.project, wants.projection
        rows.payloads = [project(payload, projection) for payload in rows.payloads]
    return rows
