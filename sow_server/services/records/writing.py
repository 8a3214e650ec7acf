"""Applies a caller's permissions to its writes (rule A4): before they are queued, and in the writer's thread."""

from __future__ import annotations

from collections.abc import Sequence

from sow_server.access.caller import Call, Granted
from sow_server.access.needs import Action
from sow_server.engine.stored import read_header
from sow_server.engine.values.errors import no_topic
from sow_server.engine.values.model import Delete, Publish, PublisherPosition, RecordMatcher, Touch
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.query.filtering import permitted, rows_filter


def permit_publish(call: Call, publish: Publish, *, dynamic: bool) -> None:
    """Checks that a publish is allowed, and makes the writer judge its records if the caller may write only some.
    `dynamic`: it creates a topic that does not exist. Raises StoreError."""
    if call.unrestricted:
        return
    restriction = call.require(publish.topic, Action.PUBLISH).restriction
    removing = restriction if publish.removals is None else call.require(publish.topic, Action.DELETE).restriction
    if publish.publisher is not None:
        publish.publisher = own_publisher(call, publish.publisher)
    if call.existing(publish.topic) is None:
        if dynamic and restriction.rows is None and removing.rows is None and call.may_create(publish.topic):
            call.creates("topics", publish.topic)
            return
        raise no_topic(publish.topic)
    if restriction is not UNRESTRICTED:
        publish.permits = permitted(*call.topic(publish.topic, Action.PUBLISH))
    if publish.removals is not None and removing is not UNRESTRICTED:
        publish.removal_permits = permitted(*call.topic(publish.topic, Action.DELETE))


def permit_touch(call: Call, touch: Touch) -> None:
    """As `permit_publish`, for a touch."""
    if not call.unrestricted:
        touch.permits = permitted(*call.topic(touch.topic, Action.PUBLISH))


def permit_delete(call: Call, delete: Delete, granted: Granted) -> None:
    """Makes the writer pass over the records that the caller may not delete, as if they did not exist."""
    if delete.publisher is not None:
        delete.publisher = own_publisher(call, delete.publisher)
    delete.matches = permitted_rows(granted)


def only_versions(delete: Delete, versions: Sequence[int]) -> None:
    """Makes the writer pass over records that do not have the version that is given for their key."""
    assert delete.keys is not None, "versions are for deletes by key"
    wanted = dict(zip(map(_encoded, delete.keys), versions, strict=True))
    permitted_too = delete.matches

    def matches(key: bytes, value: bytes) -> bool:
        return read_header(value).version == wanted[key] and (permitted_too is None or permitted_too(key, value))

    delete.matches = matches


def _encoded(key: str | bytes) -> bytes:
    return key if isinstance(key, bytes) else key.encode()


def permitted_rows(granted: Granted) -> RecordMatcher | None:
    """The test for stored records that the caller may see or change; None: it may see or change all."""
    rows = rows_filter(granted.topic, granted.restriction)
    return None if rows is None else rows.matches


def own_publisher(call: Call, position: PublisherPosition) -> PublisherPosition:
    """The publisher under its stored name, so that no caller can take the id or the epoch of another one."""
    call.creates("publishers", position.publisher_id)
    return position._replace(publisher_id=call.own_name(position.publisher_id))


def permit_load(call: Call, topic: str, *, dynamic: bool) -> None:
    """Checks that a load is allowed: it replaces all records of a topic, so a caller with rows may not. Raises
    StoreError."""
    if call.unrestricted:
        return
    call.require(topic, Action.LOAD)
    if call.existing(topic) is None and dynamic and call.may_create(topic):
        call.creates("topics", topic)
        return
    call.topic(topic, Action.LOAD, whole=True)
