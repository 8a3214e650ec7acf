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
        self._version = -1

    @property
    def hurries(self) -> bool:
        """Whether a consumer has come or gone, or a durable begins anew, since the last look ([2])."""
        return self._store.durables_version != self._version

    def messages(
        self, peer: InstanceIdentity, topics: Collection[str], now_micros: int
    ) -> Iterator[replication_pb2.ReplicateRequest]:
        """The messages for the differences. `topics`: those that the peer has from this instance."""
        self._version = self._store.durables_version
        present = self._store.durables(peer, topics)
        changed = iter([mark for mark in present if self._is_news(mark, now_micros)])
        self._told = {key: told for key in map(_key, present) if (told := self._told.get(key)) is not None}
        while part := list(islice(changed, DURABLES_MAX)):
            yield replication_pb2.ReplicateRequest(
                durables=replication_pb2.Durables(durables=map(durable_message, part))
            )

    def _is_news(self, mark: DurableMark, now_micros: int) -> bool:
        told = self._told.get(_key(mark))
        if told is None or _without_times(told.mark) != _without_times(mark):
            self._told[_key(mark)] = _Told(mark, now_micros)
            return True
        if mark.swept_micros == told.mark.swept_micros or now_micros - told.changed_at > QUIET_MICROS:
            return False
        self._told[_key(mark)] = told._replace(mark=mark)
        return True


def _key(mark: DurableMark) -> tuple[str, str]:
    return mark.topic, mark.name


def _without_times(mark: DurableMark) -> DurableMark:
    return mark._replace(swept_micros=0, idle_micros=0)
