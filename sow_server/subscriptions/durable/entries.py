"""Reads the entries of a durable subscription beside its consumer: to browse them, to count them, to find the first.

Everything here reads the journal through `Replay`, on reader threads, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

import structlog

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.durables import Durable, DurableFigures, GapReason
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.subscriptions.frames import ChangeFrame
from sow_server.subscriptions.journal.replay import Replay, Replayed
from sow_server.subscriptions.live.matching import VersionMatcher
from sow_server.subscriptions.request import Request, View, Wants

log = structlog.get_logger(__name__)

ViewOf = Callable[[str, Restriction], Callable[[Topic], View]]
"""Gives the view of a topic through a filter, by the filter's text, and a restriction."""
SCAN_STEPS: Final = 50
"""Reads of one scan in one round of pruning, at most."""


class FirstEntries(NamedTuple):
    """The first entries that a consumer would be handed: one, or those of an atomic request."""

    sequences: list[int]
    upto: int


class FloorScan(NamedTuple):
    """A detached durable that holds its topic's floor, perhaps only for entries that its filter leaves out."""

    topic: Topic
    durable: Durable
    read: Callable[[], int | None]
    """From any thread: the position before the first entry that matches, as far as a bounded number of reads goes."""


class Browse:
    """Reads the unacknowledged entries of a durable step by step (rule J16). One thread at a time."""

    def __init__(
        self, replay: Replay, position: int, upto: int, entries_max: int, deliveries: Callable[[int], int]
    ) -> None:
        """Use `Consumers.browse`."""
        self._replay = replay
        self._upto = upto
        self._left = entries_max
        self._deliveries = deliveries
        self.position = position
        """Everything up to here has been read."""

    @property
    def complete(self) -> bool:
        """True if there are no more entries."""
        return self.position >= self._upto

    @property
    def done(self) -> bool:
        """True if there are no more entries, or as many were read as asked for."""
        return self.complete or not self._left

    def read(self) -> list[ChangeFrame]:
        """The next entries; none if this step found none that match."""
        found = self._replay.read(self.position, self._upto, {})
        if not isinstance(found, Replayed):
            # Entries were discarded meanwhile; without a journal there are none at all.
            self.position = self._upto if found.earliest is None else found.earliest
            return []
        frames: list[ChangeFrame] = []
        for frame in found.frames:
            rows = frame.rows[: self._left]
            self._left -= len(rows)
            last = rows[-1].sequence
            shown = ChangeFrame(
                frame.topic, rows, after=self.position, bookmark=last, size=frame.size, atomic=frame.atomic
            )
            delivered = [self._deliveries(row.sequence) for row in rows]
            frames.append(shown.counted(delivered) if any(delivered) else shown)
            self.position = last
            if not self._left and (len(rows) < len(frame.rows) or frame is not found.frames[-1]):
                return frames
        self.position = found.position
        return frames


class DurableEntries:
    """Reads the entries of durables. From any thread."""

    def __init__(self, reads: Reads, writes: Writes, view_of: ViewOf) -> None:
        self._reads = reads
        self._topics = reads.topics
        self._durables = reads.durables
        self._commits = writes.commits
        self._cuts = reads.cuts
        self._clock = reads.clock
        self._view_of = view_of

    def delivered_enough(self, topic: Topic, durable: Durable) -> bool:
        """True if the first entry has reached the delivery limit. The filter may leave that entry out, which is not
        checked here."""
        limit = self._durables.settings(topic, durable).delivery_limit
        if limit is None or durable.delivered(durable.position + 1) < limit:
            return False
        # Conflated entries are replaced by a snapshot, which is no entry.
        return not any(gap.reason is GapReason.CONFLATED for gap in durable.gaps)

    def first_entries(self, request: Request, topic: Topic, durable: Durable) -> Callable[[], FirstEntries | None]:
        """Reads the first entries of a consumer that have reached the delivery limit; None: there are none. For a
        reader thread."""
        limit = self._durables.settings(topic, durable).delivery_limit
        view = request.view(topic)
        seen = VersionMatcher(view.filter), request.wants(view)
        replay = Replay(self._reads, lambda _: seen, topic=topic, follows=lambda other: other is topic)
        often = [step.upto for step in durable.deliveries if limit is not None and step.times >= limit]

        def read() -> FirstEntries | None:
            position, upto = durable.position, max(often, default=0)
            while position < upto:
                found = replay.read(position, upto, {})
                if not isinstance(found, Replayed):
                    return None
                now = self._clock.now_micros()
                frames = [frame for whole in found.frames if (frame := whole.at(now)).rows]
                if frames:
                    rows = frames[0].rows
                    if not frames[0].atomic:
                        return FirstEntries([rows[0].sequence], rows[0].sequence)
                    first = [frame for frame in frames if frame.atomic and frame.after == frames[0].after]
                    return FirstEntries([row.sequence for frame in first for row in frame.rows], first[-1].bookmark)
                position = found.position
            return None

        return read

    def scan(self, topic: Topic, durable: Durable, upto: int) -> Callable[[], int | None]:
        def read() -> int | None:
            try:
                reader = self.replay(topic, durable.filter)  # may take a while: parses and compiles
            except StoreError as error:
                # The topic has another message type by now; that must not keep other topics from being pruned.
                log.warning("scan_skipped", topic=topic.name, durable=durable.name, cause=error.message)
                return None
            position = durable.position
            for _ in range(SCAN_STEPS):
                found = reader.read(position, upto, {})
                if not isinstance(found, Replayed):
                    return None
                if found.frames:
                    return found.frames[0].after
                position = found.position
                if position >= upto:
                    break
            return position

        return read

    def exact(
        self, topic: Topic, durable: Durable, figures: DurableFigures, restriction: Restriction = UNRESTRICTED
    ) -> DurableFigures:
        """The figures of a durable, counted exactly: only entries that match its filter, and that the caller may see.
        Reads all of them, so it must not run on the event loop."""
        reader = self.replay(topic, durable.filter, restriction)
        upto = min(self._commits.synced_sequence, topic.statistics.last_sequence)
        total, unacknowledged, position = [0, 0], [0, 0], figures.earliest
        while position < upto:
            found = reader.read(position, upto, {})
            if not isinstance(found, Replayed):
                assert found.earliest is not None, "a durable's topic has a journal"
                position = found.earliest  # discarded meanwhile
                continue
            for row in [row for frame in found.frames for row in frame.rows]:
                size = len(row.key) + len(row.payload)
                total = [total[0] + 1, total[1] + size]
                if row.sequence > durable.position:
                    unacknowledged = [unacknowledged[0] + 1, unacknowledged[1] + size]
            position = found.position
        # The oldest entry, as it was found without a filter, may be one that the caller may not see.
        oldest = figures.oldest_micros if restriction.rows is None else None
        return replace(
            figures,
            oldest_micros=oldest,
            total_entries=total[0],
            total_bytes=total[1],
            unacknowledged_entries=unacknowledged[0],
            unacknowledged_bytes=unacknowledged[1],
        )

    def check_filter(self, topic: Topic, text: str) -> None:
        """Raises StoreError if a durable of a topic cannot have this filter."""
        view = self._view_of(text, UNRESTRICTED)(topic)
        canonical = "" if view.filter is None else view.filter.asked
        if canonical != text:
            raise StoreError(
                Reason.INVALID_ARGUMENT, f"filter: {text[:200]!r} is not in canonical form", field="filter"
            )

    def replay(self, topic: Topic, text: str, restriction: Restriction = UNRESTRICTED) -> Replay:
        """Reads every entry of a topic that matches a filter, whatever else its consumers ask for."""
        view = self._view_of(text, restriction)(topic)
        seen = VersionMatcher(view.filter), Wants(changes=True, projection=view.projection)
        return Replay(self._reads, lambda _: seen, topic=topic, follows=lambda other: other is topic)
