"""Replicated durables on a link: which of them to tell the peer, and when (rules F14, F15).

[1]  On each link all are told once, and from then on each that differs from what was told last.
[2]  A position is told about once a second, and at once where a consumer comes or goes, and at the end of a link.
[3]  While nothing happens, only the time up to which expiries were acknowledged moves on. That is told for a while
     longer than clocks may differ: by then it has passed all that the peer has expired, and the rest needs no
     message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Final, NamedTuple

from sow.v1 import replication_pb2
from sow_peering import DurableMark, InstanceIdentity
from sow_replication.messages import durable_message
from sow_replication.options import SECOND
from sow_replication.ports import SendingDurables

DURABLES_MAX: Final = 500
"""Durables of one message."""
QUIET_MICROS: Final = 30 * SECOND
"""See [3]. Changes of a clock that is ahead by more than `max_clock_skew` (10 s) are not taken."""


class _Told(NamedTuple):
    mark: DurableMark
    changed_at: int
    """When anything but times last changed."""


class DurableTeller:
    """Owns what a peer was told of durables on one link."""

    def __init__(self, store: SendingDurables) -> None:
        self._store = store
        self._told: dict[tuple[str, str], _Told] = {}
        self._lively: dict[tuple[str, str], None] = {}
        """Durables that have changed a moment ago, see [3]."""
        self._version = -1
        self._upto = -1
        """The last change that was looked at."""
        self._looked_for: tuple[frozenset[str], int] | None = None
        """The topics, and their version, at the last look."""

    @property
    def hurries(self) -> bool:
        """True if a consumer has come or gone, or a durable begins anew, since the last look ([2])."""
        return self._store.durables_version != self._version

    def messages(
        self, peer: InstanceIdentity, topics: Collection[str], now_micros: int
    ) -> Iterator[replication_pb2.ReplicateRequest]:
        """The messages for the differences. `topics`: those that the peer has from this instance."""
        self._version = self._store.durables_version
        look_for = frozenset(topics), self._store.topics_version
        if look_for != self._looked_for:
            self._looked_for, self._upto = look_for, -1
        is_whole = self._upto < 0
        marks, self._upto = self._store.durables(peer, look_for[0], after=self._upto, also=tuple(self._lively))
        changed = iter([mark for mark in marks if self._is_news(mark, now_micros)])
        if is_whole:
            self._told = {key: told for key in map(_key, marks) if (told := self._told.get(key)) is not None}
            self._lively = {key: None for key in self._lively if key in self._told}
        while part := list(islice(changed, DURABLES_MAX)):
            yield replication_pb2.ReplicateRequest(
                durables=replication_pb2.Durables(durables=map(durable_message, part))
            )

    def _is_news(self, mark: DurableMark, now_micros: int) -> bool:
        key = _key(mark)
        told = self._told.get(key)
        if told is None or _without_times(told.mark) != _without_times(mark):
            self._told[key] = _Told(mark, now_micros)
            self._lively[key] = None
            return True
        if now_micros - told.changed_at > QUIET_MICROS:
            self._lively.pop(key, None)
            return False
        if mark.swept_micros == told.mark.swept_micros:
            return False
        self._told[key] = told._replace(mark=mark)
        return True


def _key(mark: DurableMark) -> tuple[str, str]:
    return mark.topic, mark.name


def _without_times(mark: DurableMark) -> DurableMark:
    return mark._replace(swept_micros=0, idle_micros=0)
