"""Marks: how far this instance is with other instances, at positions of its own journal (rules F6, F10).

[1]  A sample is taken between two commits: its sequence, its cursors and its sweep are of one instant.
[2]  The marks of a position come from a sample at or before it. An earlier sample promises less, never more.
[3]  The marks of a topic have a source only if, when the sample was taken, the source sent that topic whole: without a
     filter, completely seeded, and both ends acting on expiration alike. Whether it does is looked up between two
     commits: during one, its rows say so before the version does, and an earlier sample would be taken for a later one.

Commits carry nothing for it: whoever needs marks takes samples, now and then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.expiry import Sweep
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import REARM_KEY
from sow_server.engine.disk.rocks import META
from sow_server.engine.replicas.sources import Sources
from sow_server.engine.values.bookmarks import PARTS_MAX, Marks, Position

SAMPLES_MAX: Final = 1000
SAMPLE_MICROS: Final = 200_000
"""The time between two samples, at least: taking one waits for the commit under way."""


class Sample(NamedTuple):
    """The state between two commits."""

    sequence: int
    swept_micros: int
    cursors: dict[str, Position]
    """Keyed by the name of the source."""
    version: int
    """The version of the topics and their sources."""


class SourceMarks:
    """Owns the samples. All calls come on one thread."""

    def __init__(self, core: Core, sweep: Sweep, sources: Sources) -> None:
        self._rocks = core.rocks
        self._clock = core.clock
        self._commits = core.commits
        self._sweep = sweep
        self._sources = sources
        self._samples: list[Sample] = []
        self._sampled_at = -SAMPLE_MICROS
        self._whole: dict[int, frozenset[str]] = {}
        """The sources that send a topic whole, keyed by topic id, as of `_whole_version`."""
        self._whole_version = -1

    @property
    def active(self) -> bool:
        """True if this instance has a source, so that there can be marks."""
        return bool(self._sources.by_name)

    @property
    def outdated(self) -> bool:
        """True if no sample tells of the present version yet."""
        return not self._samples or self._samples[-1].version != self._sources.version

    def sample(self, elapsed_micros: int, *, at_once: bool = False) -> None:
        """Takes a sample, unless there was one a moment ago. `at_once`: also then."""
        if (elapsed_micros - self._sampled_at < SAMPLE_MICROS and not at_once) or not self.active:
            return
        self._sampled_at = elapsed_micros
        with self._commits.cut_lock:
            if self._rearming():
                return  # records without an entry in the expiry index may be overdue
            found = Sample(
                self._commits.last_sequence,
                # Each record has an entry at or before its expire time, and the next entry is this one.
                min(self._clock.now_micros(), self._sweep.next_due - 1),
                {
                    name: Position(source.identity.epoch, source.cursor)
                    for name, source in self._sources.by_name.items()
                    if not source.filter and not source.wait_for
                },
                self._sources.version,
            )
        samples = self._samples
        if samples and samples[-1].sequence == found.sequence:
            samples.pop()
        samples.append(found)
        if len(samples) > SAMPLES_MAX:
            self._thin()

    def _thin(self) -> None:
        """Drops samples of other versions, which are of no use, and every other one of the older half: a position of
        long ago still has one before it, only further away ([2])."""
        version = self._sources.version
        kept = [sample for sample in self._samples if sample.version == version]
        if len(kept) > SAMPLES_MAX:
            half = len(kept) // 2
            kept = [*kept[:half:2], *kept[half:]]
        self._samples = kept

    def _rearming(self) -> bool:
        cursor = self._rocks.cursor(META)
        try:
            return bool(list(cursor.keys(REARM_KEY, REARM_KEY + b"\xff", limit=1)))
        finally:
            cursor.close()

    @property
    def version(self) -> int:
        """Changes whenever the answer of `whole` may have changed."""
        return self._sources.version

    def whole(self, topics: Iterable[Topic]) -> frozenset[str]:
        """The sources that send all of these topics whole ([3])."""
        names = [name for name, source in list(self._sources.by_name.items()) if not source.filter]
        for topic in topics:
            if not names:
                break
            of_topic = self._whole_of(topic)
            names = [name for name in names if name in of_topic]
        return frozenset(names)

    def _whole_of(self, topic: Topic) -> frozenset[str]:
        sources, version = self._sources, self._sources.version
        if version != self._whole_version:
            self._whole, self._whole_version = {}, version
        found = self._whole.get(topic.id)
        if found is None:
            with self._commits.cut_lock:
                names = [name for name in list(sources.by_name) if sources.is_whole(name, topic)]
                alike = [name for name in names if sources.announced.acts_alike(name, topic)]
                found = self._whole[topic.id] = frozenset(alike)
        return found

    def at(self, position: int, names: Collection[str], version: int) -> Marks | None:
        """The marks of a position, of sources that were whole in a version; None: there are none yet."""
        index = bisect_right(self._samples, position, key=lambda sample: sample.sequence)
        sample = self._samples[index - 1] if index else None
        if sample is None or sample.version != version:
            return None
        found = [sample.cursors[name] for name in sorted(sample.cursors.keys() & set(names))]
        return Marks(sample.swept_micros, tuple(found[:PARTS_MAX]))

    def reached(self, topic: Topic, position: Position, own_epoch: str) -> bool | None:
        """True if a read of a topic shows everything up to a position. None: nothing comes from that instance."""
        if position.epoch == own_epoch:
            return position.sequence <= self._commits.last_sequence
        for name, source in list(self._sources.by_name.items()):
            if source.identity.epoch == position.epoch:
                return position.sequence <= source.cursor and self._sources.is_whole(name, topic)
        return None
