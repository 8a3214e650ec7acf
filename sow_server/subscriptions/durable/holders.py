"""Where each replicated durable has its consumer: here, or at an instance whose link with this one is up (rule F15).

    [1]  Consumers are ordered by when they came, then by the name of their instance. Of two, the first one stays. One
         that takes over by force counts as earlier than all that its instance knows of. So all agree on who stays,
         whatever their clocks say.
    [2]  What another instance has told counts as long as its link is up. Cut off, two instances may have a consumer
         each.

Pure. On the thread of the consumers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

Key = tuple[int, str]
"""A topic's id and a durable's name."""


class Holder(NamedTuple):
    """A consumer of a replicated durable."""

    since_micros: int
    instance: str
    """The name of its instance."""
    forced: bool = False

    @property
    def rank(self) -> tuple[int, str]:
        """The lowest one stays ([1])."""
        return self.since_micros, self.instance


class Holders:
    """Owns what is known of consumers of replicated durables."""

    def __init__(self, instance: str = "") -> None:
        """`instance`: the name of this one."""
        self.instance: Final = instance
        self.version = 0
        """Rises whenever peers should be told at once."""
        self.wake: Callable[[], None] = lambda: None
        """Called when it has risen."""
        self._here: dict[Key, Holder] = {}
        self._elsewhere: dict[Key, dict[str, Holder]] = {}

    def here(self, key: Key) -> Holder | None:
        """The consumer that is attached here."""
        return self._here.get(key)

    def elsewhere(self, key: Key) -> Holder | None:
        """The first of the consumers at other instances; None: none is known."""
        found = self._elsewhere.get(key)
        return None if found is None else min(found.values(), key=lambda holder: holder.rank)

    def attach(self, key: Key, now_micros: int, *, force: bool) -> None:
        """A consumer attaches here. `force`: it takes over from those at other instances."""
        known = self.elsewhere(key)
        takes = force and known is not None
        since = min(now_micros, known.since_micros - 1) if takes and known is not None else now_micros
        self._here[key] = Holder(max(1, since), self.instance, takes)
        self.changed()

    def detach(self, key: Key) -> None:
        """The consumer here has gone."""
        if self._here.pop(key, None) is not None:
            self.changed()

    def changed(self) -> None:
        """Peers should be told at once."""
        self.version += 1
        self.wake()

    def heard(self, key: Key, holder: Holder | None, instance: str) -> Holder | None:
        """Another instance has told of its consumer; None: it has none. Returns it if the one here must give way."""
        before = self._elsewhere.get(key, {})
        others = {name: one for name, one in before.items() if name != instance}
        if holder is not None:
            others[instance] = holder
        if others:
            self._elsewhere[key] = others
        else:
            self._elsewhere.pop(key, None)
        here = self._here.get(key)
        return holder if holder is not None and here is not None and holder.rank < here.rank else None

    def left(self, instance: str) -> list[Key]:
        """The link with an instance is gone. Returns the durables of which it had the consumer."""
        gone = [key for key, found in self._elsewhere.items() if instance in found]
        for key in gone:
            self.heard(key, None, instance)
        return gone
