"""Durables and pins belong to the identity that has created them (rule A7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sow_server.access.caller import Call
from sow_server.engine.durables import Durables
from sow_server.engine.values.keys import TOPIC_NAME
from sow_server.services.convert import invalid


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
    def making(self, call: Call, topic: str, given: str, field: str) -> Iterator[str]:
        """As `name`, for a durable that is made within the block if it does not exist. `field`: the field of the
        request that names it. Raises StoreError: INVALID_ARGUMENT, LIMIT_EXCEEDED."""
        existing = self._existing(call, topic, given)
        if existing is not None:
            yield existing
            return
        if not TOPIC_NAME.match(given):
            raise invalid(field, f"{given[:220]!r} is no name of a durable: 1 to 200 of [A-Za-z0-9_.:-] are allowed")
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
