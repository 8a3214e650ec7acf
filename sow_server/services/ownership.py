"""Durables and pins belong to the identity that has created them (rules A7, J19)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sow_server.access.authorizer import Authorizer
from sow_server.access.caller import Call
from sow_server.access.model import Limits
from sow_server.access.needs import Action
from sow_server.engine.durables import Durables
from sow_server.engine.values.keys import TOPIC_NAME
from sow_server.engine.values.model import TopicSettings
from sow_server.engine.values.policies import NOTHING, Declared
from sow_server.services.wire.convert import invalid


class DurableOwners:
    """Knows what the owners of durables may hold back (`subscriptions.backlogs.Owners`). An owner that the access file
    no longer has, or that is of another instance, may do no more than a role without limits says."""

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer

    def may_hold(self, owner: str, topic: str) -> bool:
        permissions = self._authorizer.permissions(owner)
        return permissions is not None and permissions.decide(Action.TOPIC_ADMIN, topic).allowed

    def backlog_bytes(self, owner: str) -> int | None:
        identity = self._authorizer.identities.get(owner)
        return (Limits() if identity is None else identity.limits).backlog_bytes


class OwnedDurables:
    """Finds the stored names of the durables that callers name."""

    def __init__(self, durables: Durables) -> None:
        self._durables = durables

    def name(self, call: Call, topic: str, given: str) -> str:
        """The stored name of the durable that the caller calls `given`. It is the caller's own, or one without an
        owner, from before the server had an access file. An operator may give the stored name of any durable.
        If there is none, it is the name of one of the caller's own."""
        return self._existing(call, topic, given) or call.own_name(given)

    @contextmanager
    def making(self, call: Call, topic: str, given: str, field: str, declared: Declared = NOTHING) -> Iterator[str]:
        """As `name`, for a durable that is made within the block if it does not exist. `field`: the field of the
        request that names it. `declared`: settings of its own. Raises StoreError: INVALID_ARGUMENT, LIMIT_EXCEEDED,
        PERMISSION_DENIED."""
        existing = self._existing(call, topic, given)
        if existing is not None:
            yield existing
            return
        if not TOPIC_NAME.match(given):
            raise invalid(field, f"{given[:220]!r} is no name of a durable: 1 to 200 of [A-Za-z0-9_.:-] are allowed")
        found = call.existing(topic)
        if found is not None and _retains_more(declared, found.settings):
            call.require(topic, Action.TOPIC_ADMIN)  # the journal would keep for it what its topic lets go of
        with call.making("durables", self._durables.count_owned(call.owner)):
            yield call.own_name(given)

    def _existing(self, call: Call, topic: str, given: str) -> str | None:
        found = call.existing(topic)
        own = call.own_name(given)
        if found is not None:
            if self._durables.get(found.id, own) is not None:
                return own
            if self._durables.get(found.id, given) is not None and call.shown_name(given) is not None:
                return given
        return None


def _retains_more(declared: Declared, settings: TopicSettings) -> bool:
    """True if a durable declares a longer retention than its topic has."""
    for field in ("retain_time_micros", "retain_bytes"):
        bound, own = getattr(settings, field), declared.get(field, 0)
        if bound is not None and (own is None or (isinstance(own, int) and own > bound)):
            return True
    return False
