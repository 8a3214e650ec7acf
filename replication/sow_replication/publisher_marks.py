"""The publishers to send on a link (rule F11): read in parts, once all topics are seeded, and again after each seed."""

from __future__ import annotations

from sow_peering import PublisherPart


class PublishersToSend:
    """Owns the place up to which they were read on one link, and the part that waits to be sent."""

    def __init__(self, *, is_filtered: bool) -> None:
        """`is_filtered`: a filter hides some of the records, so no publishers are sent."""
        self._begin = None if is_filtered else ""
        self._after_id = self._begin
        """The id after which the next part begins; None: all have been read."""
        self._waiting: PublisherPart | None = None
        """A part that waits for the changes up to its sequence."""

    @property
    def next_after(self) -> str | None:
        """The id after which the next part is to be read; None: there is none to read now."""
        return self._after_id if self._waiting is None else None

    @property
    def are_sent(self) -> bool:
        """True if all of them were sent, or there are none to send."""
        return self._after_id is None and self._waiting is None

    def answered(self, probe: int, before: int) -> int:
        """The probe that a read of now answers: the last one, or as long as some are to be sent, the one before."""
        return probe if self.are_sent else before

    def begin_again(self) -> None:
        """All of them are to be sent: changes may have been left out until now. There may be very many."""
        self._waiting = None
        self._after_id = self._begin

    def took(self, after_id: str, part: PublisherPart) -> None:
        """A part was read behind an id. It is dropped if they have begun again meanwhile."""
        if after_id == self._after_id:
            self._after_id = part.last_id or None
            self._waiting = part

    def due(self, upto: int) -> PublisherPart | None:
        """The part to send behind the changes up to a sequence, once; None: there is none, or it waits for more."""
        part = self._waiting
        if part is None or part.upto > upto:
            return None
        self._waiting = None
        return part
