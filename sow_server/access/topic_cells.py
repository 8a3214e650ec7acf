"""The cells of the topics of one call (rules C2 to C4)."""

from __future__ import annotations

from typing import Final

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.placement import Places


class TopicCells:
    """Owns the topics that a call that lasts has been given: a new placement may take them away."""

    __slots__ = ("_matched", "_named", "_places", "_stay", "hands_over", "remember")

    def __init__(self, places: Places | None) -> None:
        """`places` None: every topic is here."""
        self._places = places
        self._named: set[str] = set()
        self._matched: dict[str, bool] = {}
        """The topics that a pattern has met: True if they were here."""
        self._stay = False
        self.hands_over = False
        """Topics of the call have left this cell, and none has come: what they got before can be handed over. A topic
        that has come would be passed over meanwhile."""
        self.remember = False
        """True for a call that lasts, and ends with its topics."""

    @property
    def digest(self) -> str:
        """The digest of the placement; "": there is none."""
        return "" if self._places is None else self._places.digest

    def check(self, topic: str) -> None:
        """Raises StoreError TOPIC_ELSEWHERE if a topic is placed in another cell (rule C2), and TOPIC_NAME_INVALID. The
        caller has passed the access control: who may not reach a topic does not learn its cell."""
        places = self._places
        if places is None:
            return
        if (refusal := places.refusal(topic)) is not None:
            raise refusal
        if self.remember:
            self._named.add(topic)

    def have(self, topic: str) -> bool:
        """True if a topic that exists is placed here: to patterns and lists, others do not exist (rule C3)."""
        return self._places is None or self._places.elsewhere(topic) is None

    def expect(self, topic: str) -> bool:
        """True if a topic is on its way to this cell (rule C16)."""
        return self._places is not None and topic in self._places.held

    def match(self, topic: str) -> bool:
        """As `have`, for the pattern of the call."""
        if self._stay and (found := self._matched.get(topic)) is not None:
            return found
        found = self.have(topic)  # also meanwhile: one that is made now would be passed over
        if self.remember:
            self._matched.setdefault(topic, found)  # a reader thread may meet it just before `displaced` looks
        return found

    def stay(self) -> None:
        """To the pattern of the call, topics that it has met stay where they were: it hands over what was changed
        before."""
        self._stay = True

    def displaced(self) -> StoreError | None:
        """The error of the call, now that there is a new placement (rule C4); None: it goes on."""
        places = self._places
        if places is None:
            return None
        for topic in self._named:
            if (refusal := places.refusal(topic)) is not None:
                self.hands_over = True
                return refusal
        # A copy: a reader thread may just meet topics for the pattern.
        changed = {was for topic, was in list(self._matched.items()) if was is not self.have(topic)}
        self.hands_over = changed == {True}
        if changed:
            return StoreError(
                Reason.ACCESS_CHANGED,
                "topics of the pattern have come to this cell or left it; call again",
                retry_after_micros=MICROS // 10,
                details={
                    "complete": "false" if len(changed) == 2 else "true",
                    "placement_version": str(places.placement.version),
                },
            )
        return None


EVERY_TOPIC_HERE: Final = TopicCells(None)
"""For all calls of a server without a placement: it costs them nothing."""
