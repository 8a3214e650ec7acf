"""The figures of the last hour, which the server takes itself: a chart has them though nobody has looked (rule X11).

[1]  A sample is kept as the bytes of its message, with the TOPICS_KEPT topics that changed most. There are SAMPLES_MAX
     at most, so the memory is bounded whatever the number of topics: about a megabyte.
[2]  Topics are kept by their ids. A topic that was deleted is in no answer, also where another one has its name.
[3]  Lengths of time are elapsed time, so a clock that is set makes no false rate, and loses no sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Final, NamedTuple

from sow.v1 import admin_pb2
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.values.model import MICROS
from sow_server.services.figures import Figures, FigureSource, Latencies, OverdueCount
from sow_server.services.followers import Followers
from sow_server.services.replication import Links

SAMPLE_SECONDS: Final = 5
KEPT_MICROS: Final = 3_600 * MICROS
SAMPLES_MAX: Final = KEPT_MICROS // (SAMPLE_SECONDS * MICROS)
TOPICS_KEPT: Final = 10


class _Sample(NamedTuple):
    elapsed_micros: int
    topics: tuple[int, ...]
    """The ids of the topics in the message, in their order."""
    message: bytes


class FigureHistory:
    """Owns the samples. Takes figures for those who watch, too. Event loop only."""

    def __init__(
        self,
        reading: Reads,
        writes: Writes,
        followers: Followers,
        links: Links,
        readers: Executor,
        latencies: Latencies = tuple,
    ) -> None:
        self._clock = reading.clock
        self._topics = reading.topics
        self._commits = writes.commits
        self._followers = followers
        self._links = links
        self._latencies = latencies
        self._overdue = OverdueCount(reading.cuts, readers)
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_MAX)
        self._figures = Figures(TOPICS_KEPT)
        self._figures.begin(self._source(self._all()), self._clock.elapsed_micros())

    async def now(self, figures: Figures, topics: Sequence[Topic]) -> admin_pb2.WatchFiguresResponse:
        """The figures of these topics now, with the rates since those that `figures` has had before."""
        overdue = await self._overdue.at(self._clock.now_micros())
        return figures.taken(self._source(topics), overdue, self._clock.now_micros(), self._clock.elapsed_micros())

    async def sample(self) -> None:
        """Keeps the figures of now. To be called each SAMPLE_SECONDS."""
        topics = self._all()
        found = await self.now(self._figures, topics)
        changed = [one for one in found.topics if one.changes_per_second > 0]
        del found.topics[:]
        found.topics.extend(changed)
        names = {one.topic for one in changed}
        ids = {topic.name: topic.id for topic in topics if topic.name in names}
        its = tuple(ids[one.topic] for one in changed)
        self._samples.append(_Sample(self._clock.elapsed_micros(), its, found.SerializeToString()))

    def since(self, micros: int, topics: Sequence[Topic], topics_max: int) -> Iterator[admin_pb2.WatchFiguresResponse]:
        """The samples of the last so many microseconds, the oldest first, with those of these topics ([2])."""
        begin = self._clock.elapsed_micros() - min(micros, KEPT_MICROS)
        there = {topic.id for topic in topics}
        for sample in [one for one in self._samples if one.elapsed_micros > begin]:
            found = admin_pb2.WatchFiguresResponse.FromString(sample.message)
            kept = [one for one, its in zip(found.topics, sample.topics, strict=True) if its in there]
            del found.topics[:]
            found.topics.extend(kept[:topics_max])
            yield found

    def _all(self) -> list[Topic]:
        return list(self._topics.by_name.values())

    def _source(self, topics: Sequence[Topic]) -> FigureSource:
        return FigureSource(
            self._commits, topics, self._followers.of(""), self._links.status().outgoing, self._latencies()
        )
