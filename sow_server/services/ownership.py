"""Durables and pins belong to the identity that has created them (rule A7)."""

from __future__ import annotations

from sow_server.access.caller import Call
from sow_server.engine.durables import Durables
from sow_server.engine.values.keys import TOPIC_NAME
from sow_server.services.convert import invalid


class OwnedDurables:
    """Finds the stored names of the durables that callers name."""

    def __init__(self, durables: Durables) -> None:
        self._durables = durables

    def name(self, call: Call, topic: str, given: str, *, creates: str = "") -> str:
        """The stored name of the durable that the caller calls `given`: its own, or one that nobody owns, as all were
        before the server had an access file. An operator may give the stored name of any.

        `creates`: the field of the request that names a durable to be created if it does not exist. Raises StoreError:
        INVALID_ARGUMENT, LIMIT_EXCEEDED.
        """
        found = call.existing(topic)
        own = call.own_name(given)
        if found is not None:
            if self._durables.get(found.id, own) is not None:
                return own
            if self._durables.get(found.id, given) is not None and call.shown_name(given) is not None:
                return given
        if creates:
            if not TOPIC_NAME.match(given):
                raise invalid(
                    creates, f"{given[:220]!r} is no name of a durable: 1 to 200 of [A-Za-z0-9_.:-] are allowed"
                )
            call.check_limit("durables", self._durables.count_named(call.own_name("")))
        return own
