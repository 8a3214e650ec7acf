"""Decides what an identity may do with a topic (rules A3 to A5). Pure.

[1]  A deny of any grant beats all allows.
[2]  The rows of an action are those of any grant that allows it; a grant without `rows` allows all.
[3]  A field is hidden if any grant on the topic hides it, whatever that grant allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sow_server.access.model import Grant, Identity
from sow_server.access.needs import SERVER_ACTIONS, Action
from sow_server.engine.values.patterns import searcher
from sow_server.filters import print_filter
from sow_server.filters.restriction import UNRESTRICTED, Restriction, Steps
from sow_server.filters.tree import Filter, Or

DECISIONS_KEPT: Final = 10_000
"""Decisions that are remembered for one identity."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision, and the grant that made it."""

    allowed: bool
    place: str = ""
    """The grant's line in the access file; "": no grant matches."""
    restriction: Restriction = UNRESTRICTED

    def __bool__(self) -> bool:
        return self.allowed


DENIED: Final = Decision(allowed=False)
ALLOWED: Final = Decision(allowed=True)


class Permissions:
    """The permissions of one identity."""

    def __init__(self, identity: Identity) -> None:
        self.identity: Final = identity
        self._grants: tuple[Grant, ...] = tuple(grant for role in identity.roles for grant in role.grants)
        self._decisions: dict[tuple[Action, str], Decision] = {}

    def decide(self, action: Action, topic: str = "") -> Decision:
        """True if the action is allowed on a topic, which need not exist, or on the server."""
        key = (action, topic)
        found = self._decisions.get(key)
        if found is None:
            if len(self._decisions) >= DECISIONS_KEPT:
                self._decisions.clear()
            found = self._decisions[key] = self._decide(action, topic)
        return found

    def holds(self, action: Action) -> bool:
        """True if any grant allows the action, on whatever topic."""
        return any(action in grant.allow for grant in self._grants)

    def sees(self, topic: str) -> bool:
        """True if anything at all is allowed on a topic: otherwise it does not exist for this identity."""
        # Not by `decide` for each action: that takes ten times as long, and lists ask for all topics.
        grants = [grant for grant in self._grants if grant.matches(topic)]
        denied = SERVER_ACTIONS.union(*[grant.deny for grant in grants if grant.deny])
        return any(action not in denied for grant in grants for action in grant.allow)

    def _decide(self, action: Action, topic: str) -> Decision:
        on_server = action in SERVER_ACTIONS
        grants = [grant for grant in self._grants if on_server or grant.matches(topic)]
        for grant in grants:
            if action in grant.deny:
                return Decision(allowed=False, place=grant.place)
        allowing = [grant for grant in grants if action in grant.allow]
        if not allowing:
            return DENIED
        if on_server:
            return Decision(allowed=True, place=allowing[0].place)
        first = next((grant for grant in allowing if grant.rows is None), allowing[0])
        restriction = Restriction(rows_of(allowing), _hidden(grants))
        if restriction == UNRESTRICTED:
            restriction = UNRESTRICTED  # so that it is recognised at the first look
        return Decision(allowed=True, place=first.place, restriction=restriction)

    def place_of(self, action: Action, topic: str, rows: Filter) -> str:
        """The line of the first grant that allows the action with these rows."""
        for grant in self._grants:
            if action in grant.allow and grant.rows == rows and grant.matches(topic):
                return grant.place
        return ""

    def name(self, action: Action) -> str:
        """Names the decisions about an action: all grants that they come from. Two names may differ for the same
        decisions."""
        return repr(
            [
                (
                    grant.topics,
                    action in grant.allow,
                    action in grant.deny,
                    "" if grant.rows is None else print_filter(grant.rows),
                    grant.hide,
                )
                for grant in self._grants
                if action in grant.allow | grant.deny or grant.hide
            ]
        )

    def nearly(self, action: Action, topic: str) -> str:
        """The line of the first grant whose pattern matches only a part of the topic's name: a frequent mistake; "":
        there is none. Slow, for an explanation."""
        for grant in self._grants:
            if action in grant.allow and grant.topics and searcher(grant.topics)(topic) and not grant.matches(topic):
                return grant.place
        return ""

    def rows(self, action: Action, topic: str) -> list[Filter]:
        """The rows of each grant that allows the action on a topic; empty if one of them allows all."""
        allowing = [grant.rows for grant in self._grants if action in grant.allow and grant.matches(topic)]
        return [] if None in allowing else [rows for rows in allowing if rows is not None]


def rows_of(allowing: list[Grant]) -> Filter | None:
    """The rows that any of the grants allows; None: all."""
    given = list(dict.fromkeys(grant.rows for grant in allowing))
    if None in given:
        return None
    rows = [row for row in given if row is not None]
    if len(rows) == 1:
        return rows[0]
    operands = [operand for row in rows for operand in (row.operands if isinstance(row, Or) else (row,))]
    return Or(tuple(operands))


def _hidden(grants: list[Grant]) -> tuple[Steps, ...]:
    return tuple(sorted({steps for grant in grants for steps in grant.hide}))
