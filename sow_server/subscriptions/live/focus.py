"""The message that a subscriber gets for a change, if any (rules S2, S3, J12). Pure.

                matches now                 does not match now
matched before  put (or its delta)          oof `match`; change readers get a put. One that may not be seen any more:
                                            oof `not_permitted`; change readers get a delete, both without payload (A4)
did not         put, whole                  nothing
was not there   put, whole                  nothing
removed         if the removed record matched: oof `deleted`, `expired`; change readers get delete, expire

For a subscriber that has come from another instance, every record counts as having matched before (matching [3]). It
gets no deltas, because it may have another version to apply them to.

With conflation a put is whole, and names the version that it replaces: `Conflation` makes the delta (rule S15).
"""

from __future__ import annotations

from sow_server.engine.formats.payloads import Format
from sow_server.engine.stored import BURY, TOUCH
from sow_server.engine.values.model import NEVER
from sow_server.subscriptions.changes import Change, Version
from sow_server.subscriptions.frames import ChangeOp, ChangeReason, Row, Told
from sow_server.subscriptions.live.matching import VersionMatcher
from sow_server.subscriptions.request import Wants


def row_of(change: Change, wants: Wants, matcher: VersionMatcher, now_micros: int) -> Row | None:
    """The row that a subscriber gets for a change."""
    if change.removes:
        return gone(change, wants) if wants.leaving and matcher.held(change) else None
    if matcher.holds(change):
        return here(change, wants, matcher, now_micros)
    return left(change, wants, matcher) if wants.leaving and matcher.held_before(change) else None


def gone(change: Change, wants: Wants) -> Row:
    """The row of a removed record that matched."""
    row = change.removed_row(oof=wants.oof)
    return row if change.kind == BURY else _shown(row, change, wants)


def left(change: Change, wants: Wants, matcher: VersionMatcher) -> Row:
    """The row of a record that matched and does not match any more. It is sent even if it is due: the subscriber has
    the record."""
    if not matcher.permits(change):
        return change.forbidden_row(oof=wants.oof)
    return _shown(change.match_row if wants.oof else change.put_row, change, wants)


def here(change: Change, wants: Wants, matcher: VersionMatcher, now_micros: int) -> Row | None:
    """The row of a record that matches."""
    if not (wants.changes or wants.conflated or wants.with_due) and change.due(now_micros):
        return None
    if not wants.conflated:
        if wants.delta and not matcher.elsewhere:
            before = change.before
            if isinstance(before, Version) and _has(before, matcher, now_micros):
                return _difference(change, before, wants)
        return _shown(change.put_row, change, wants)
    row = _shown(change.put_row, change, wants)
    if not matcher.held_before(change):
        return row._replace(enters=wants.oof)
    return row._replace(told=_told(change, wants, matcher)) if wants.delta else row


def _told(change: Change, wants: Wants, matcher: VersionMatcher) -> Told | None:
    """The replaced version, which matched; None if it is not known, or the subscriber may have another one."""
    before = change.before
    if matcher.elsewhere or not isinstance(before, Version):
        return None
    topic, payload = change.topic, before.payload
    if wants.projection is not None:  # of hidden fields alone, as for a delta
        payload = topic.format.project(payload, wants.projection)
    return Told(topic.format, topic.key_paths, payload, before.expire_time if topic.acts else NEVER)


def _has(before: Version, matcher: VersionMatcher, now_micros: int) -> bool:
    """True if a subscriber has this version. A version that is due by now may have been left out, though it was live
    when it was replaced (rule J12)."""
    return not (before.expire_time <= now_micros and before.topic.acts) and matcher.holds(before)


def _difference(change: Change, before: Version, wants: Wants) -> Row | None:
    format_: Format = change.topic.format
    old, new = before.payload, change.payload
    if wants.projection is not None:  # of hidden fields alone: a delta cannot be combined with a select
        old, new = format_.project(old, wants.projection), format_.project(new, wants.projection)
    payload, unset_paths, changed = format_.difference(old, new, change.topic.key_paths)
    if not changed and not wants.empty_deltas:
        return None
    return Row(
        ChangeOp.PUT,
        ChangeReason.TOUCHED if change.kind == TOUCH else ChangeReason.NONE,
        change.key,
        payload,
        change.version,
        change.publish_time,
        change.expire_time,
        change.origin,
        change.sequence,
        True,
        tuple(unset_paths),
    )


def _shown(row: Row, change: Change, wants: Wants) -> Row:
    if wants.projection is None:
        return row
    return row._replace(payload=change.topic.format.project(row.payload, wants.projection))
