"""Applies a caller's permissions to its writes (rule A4): before they are queued, and in the writer's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sow_server.access.caller import Call, Granted
from sow_server.access.needs import Action
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.stored import read_header
from sow_server.engine.values import lifetimes
from sow_server.engine.values.errors import Reason, StoreError, no_topic
from sow_server.engine.values.lifetimes import LifetimeError
from sow_server.engine.values.model import (
    Delete,
    Durability,
    Lifetime,
    Outcome,
    Publish,
    PublisherPosition,
    RecordMatcher,
    Touch,
)
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.query.filtering import permitted, rows_filter

_OF_RECORDS: Final = frozenset({Reason.TOPIC_NOT_FOUND, Reason.TOPIC_ELSEWHERE})
"""Refusals of the records of one request of a stream, which goes on."""


def permit_publish(call: Call, publish: Publish, *, dynamic: bool) -> None:
    """Checks that a publish is allowed, and makes the writer judge its records if the caller may write only some.
    `dynamic`: it creates a topic that does not exist. Raises StoreError."""
    restriction = call.require(publish.topic, Action.PUBLISH).restriction
    if call.unrestricted:
        return
    removing = restriction if publish.removals is None else call.require(publish.topic, Action.DELETE).restriction
    if publish.publisher is not None:
        publish.publisher = own_publisher(call, publish.publisher)
    if call.existing(publish.topic) is None:
        if dynamic and restriction.rows is None and removing.rows is None and call.may_create(publish.topic):
            call.creates("topics", publish.topic)
            if publish.removals is not None:
                call.begin_deleting(publish.topic)  # of its own puts; or the topic comes before its turn
            return
        raise no_topic(publish.topic)
    if restriction is not UNRESTRICTED:
        publish.permits = permitted(*call.topic(publish.topic, Action.PUBLISH))
    if publish.removals is not None:
        call.begin_deleting(publish.topic)
        if removing is not UNRESTRICTED:
            publish.removal_permits = permitted(*call.topic(publish.topic, Action.DELETE))


def refuse_in_stream(call: Call, publish: Publish, error: StoreError) -> None:
    """Makes the writer refuse each record of a request of a stream whose topic does not exist for the caller, or lives
    in another cell: in its place among the others, as the publisher has to remember it (rule P4). Raises any other
    error, and this one for a caller that may publish nowhere: it gets no commits."""
    if error.reason not in _OF_RECORDS or not publish.payloads or not call.may_ever:
        raise error
    position = publish.publisher
    if position is not None and "/" not in position.publisher_id:  # refused before it got its stored name
        publish.publisher = own_publisher(call, position)
    publish.refused, publish.durability = error, Durability.FSYNC


def explain_refusals(call: Call, outcome: Outcome, error: StoreError) -> None:
    """Tells of a topic that does not exist which one may have been meant, as for a call that ends with that error."""
    message = call.explained(error).message
    outcome.refusals = [
        one._replace(message=message) if one.message == error.message else one for one in outcome.refusals
    ]


def check_lifetime(topic: Topic, lifetime: Lifetime, now_micros: int) -> None:
    """Raises StoreError for a lifetime that the topic refuses, whether or not a record would get it."""
    try:
        lifetimes.expire_time(topic.settings, lifetime, now_micros)
    except LifetimeError as error:
        raise StoreError(error.reason, error.message, field="touch") from None


def permit_touch(call: Call, touch: Touch) -> None:
    """As `permit_publish`, for a touch."""
    if call.unrestricted:
        call.require(touch.topic, Action.PUBLISH)
    else:
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
    call.require(topic, Action.LOAD)
    if call.unrestricted:
        return
    if call.existing(topic) is None and dynamic and call.may_create(topic):
        call.creates("topics", topic)
        return
    call.topic(topic, Action.LOAD, whole=True)
