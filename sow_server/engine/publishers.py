"""What is remembered of publishers, so that a retry is never applied twice (rule P6).

A publisher's row holds its epoch, its highest sequence, and the refusals among its last 1,000 sequences. The row is
written in the same batch as the records that it covers. Pure, but for the bounded cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from sow_server.engine.errors import Reason, StoreError
from sow_server.engine.model import PublisherPosition, Refusal

OUTCOMES_KEPT: Final = 1000
"""Refusals are kept for this many of a publisher's last sequences."""
_CACHED_MAX: Final = 10_000


class Publisher(NamedTuple):
    """One publisher, as stored; a refusal's index is its publisher sequence here."""

    epoch: int = 0
    highest_sequence: int = 0
    last_use_micros: int = 0
    refusals: tuple[Refusal, ...] = ()

    def admit(self, position: PublisherPosition) -> Publisher:
        """The publisher as a request at `position` finds it. Raises StoreError PUBLISHER_FENCED."""
        if position.epoch < self.epoch:
            raise StoreError(
                Reason.PUBLISHER_FENCED,
                f"publisher: epoch {position.epoch} of {position.publisher_id!r} is fenced by epoch {self.epoch}",
                field="publisher.publisher_epoch",
            )
        if position.epoch > self.epoch:
            return Publisher(epoch=position.epoch)
        return self

    def advance(self, to_sequence: int, refusals: list[Refusal], now_micros: int) -> Publisher:
        """The publisher after its sequences up to `to_sequence` have been decided; `refusals` are the new ones."""
        kept = self.refusals
        if kept or refusals:
            oldest = to_sequence - OUTCOMES_KEPT
            kept = tuple(refusal for refusal in (*kept, *refusals) if refusal.index > oldest)
        return Publisher(self.epoch, max(self.highest_sequence, to_sequence), now_micros, kept)

    def refusal_of(self, sequence: int, *, conditional: bool) -> Refusal | None:
        """How a sequence that was seen before was refused; None when it was applied."""
        for refusal in self.refusals:
            if refusal.index == sequence:
                return refusal
        if conditional and sequence <= self.highest_sequence - OUTCOMES_KEPT:
            return Refusal(
                sequence, Reason.OUTCOME_UNKNOWN, f"publisher: the outcome of sequence {sequence} is no longer known"
            )
        return None


def encode(publisher: Publisher) -> bytes:
    """The stored row."""
    refusals = [
        (refusal.index, int(refusal.reason), refusal.message[:300], refusal.current_version)
        for refusal in publisher.refusals
    ]
    return msgspec.msgpack.encode((publisher.epoch, publisher.highest_sequence, publisher.last_use_micros, refusals))


_Row = tuple[int, int, int, list[tuple[int, int, str, int]]]
_decoder: Final[msgspec.msgpack.Decoder[_Row]] = msgspec.msgpack.Decoder(_Row)


def decode(row: bytes) -> Publisher:
    """The publisher of a stored row."""
    epoch, highest, last_use, refusals = _decoder.decode(row)
    return Publisher(
        epoch, highest, last_use, tuple(Refusal(index, Reason(why), text, at) for index, why, text, at in refusals)
    )


class PublisherCache:
    """The publishers used last; the others are read from the store. Owned by the writer thread."""

    def __init__(self, read: Callable[[str], bytes | None]) -> None:
        self._read = read
        self._known: OrderedDict[str, Publisher] = OrderedDict()

    def find(self, publisher_id: str) -> Publisher:
        """The publisher, or a new one."""
        publisher = self._known.get(publisher_id)
        if publisher is None:
            row = self._read(publisher_id)
            return Publisher() if row is None else decode(row)
        self._known.move_to_end(publisher_id)
        return publisher

    def keep(self, publisher_id: str, publisher: Publisher) -> None:
        """Remembers a publisher that has been committed."""
        self._known[publisher_id] = publisher
        self._known.move_to_end(publisher_id)
        if len(self._known) > _CACHED_MAX:
            self._known.popitem(last=False)

    def forget(self, publisher_id: str) -> None:
        """Forgets a publisher whose row has been removed."""
        self._known.pop(publisher_id, None)
