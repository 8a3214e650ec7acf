"""Figures of a running server, and the rates between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Final, NamedTuple, TypeAlias

from sow.v1 import admin_pb2
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.commits import Commits
from sow_server.engine.reading import Cuts
from sow_server.engine.values.model import MICROS
from sow_server.services.followers import Follower

OVERDUE_MAX: Final = 100_000
"""The most entries of the expiry index that are looked at to count overdue records: 0.15 s of a reader thread."""


class Counts(NamedTuple):
    """The numbers of times that something took so long, since the start."""

    name: str
    bounds: tuple[float, ...]
    """Seconds; the upper bound of each bucket but the last."""
    counts: tuple[int, ...]
    """One more than bounds."""


Latencies: TypeAlias = Callable[[], Sequence[Counts]]


class FigureSource(NamedTuple):
    """The things that are counted."""

    commits: Commits
    topics: Sequence[Topic]
    followers: Sequence[Follower]
    links: Sequence[admin_pb2.OutgoingLink]
    latencies: Sequence[Counts] = ()


class _Before(NamedTuple):
    """The counts of the last figures."""

    elapsed_micros: int
    sequence: int
    expired: int
    journaled: dict[int, tuple[int, int]]
    """Entries and bytes, by the topic's id."""
    latencies: dict[str, tuple[int, ...]]


class OverdueCount:
    """Counts the overdue records of all topics, for all that ask for it, at most once a second. Event loop only."""

    def __init__(self, cuts: Cuts, readers: Executor) -> None:
        self._cuts = cuts
        self._readers = readers
        self._counting: asyncio.Future[int] | None = None
        self._begun_micros = 0

    async def at(self, now_micros: int) -> int:
        """The count, a second old at most, or for as long as counting takes."""
        found = self._counting
        if found is None or (found.done() and not 0 <= now_micros - self._begun_micros < MICROS):
            loop = asyncio.get_running_loop()
            found = self._counting = loop.run_in_executor(self._readers, self._count)
            self._begun_micros = now_micros
        return await asyncio.shield(found)

    def _count(self) -> int:
        return self._cuts.overdue(at_most=OVERDUE_MAX, entries_max=OVERDUE_MAX)


class Figures:
    """Owns the counts of the last figures."""

    def __init__(self, topics_max: int) -> None:
        self._topics_max = topics_max
        self._before: _Before | None = None

    def taken(
        self, source: FigureSource, overdue: int, now_micros: int, elapsed_micros: int
    ) -> admin_pb2.WatchFiguresResponse:
        """The figures now, with the rates since the last ones. `elapsed_micros`: a clock that nobody sets, so rates are
        right though `now_micros` may step."""
        commits, before = source.commits, self._before
        requests, queued = commits.queue_depth
        found = admin_pb2.WatchFiguresResponse(
            as_of_micros=now_micros,
            last_sequence=commits.last_sequence,
            queued_requests=requests,
            queued_bytes=queued,
            overdue_records=overdue,
            subscriptions=len(source.followers),
            subscriptions_behind=sum(one.source.behind for one in source.followers),
            subscriptions_queued_bytes=sum(one.source.queued_bytes for one in source.followers),
            topics_total=len(source.topics),
            links=[
                admin_pb2.LinkFigures(
                    peer=link.peer, state=link.state, lag_sequences=link.lag_sequences, lag_micros=link.lag_micros
                )
                for link in sorted(source.links, key=lambda link: link.peer)
            ],
        )
        seconds = 0.0
        if before is not None:
            found.elapsed_micros = elapsed_micros - before.elapsed_micros
            seconds = found.elapsed_micros / MICROS
        if before is not None and seconds > 0:
            found.changes_per_second = (commits.last_sequence - before.sequence) / seconds
            found.expired_per_second = (commits.expired_total - before.expired) / seconds
        found.topics.extend(self._topics(source.topics, seconds))
        found.latencies.extend(self._latencies(source.latencies, seconds))
        self.begin(source, elapsed_micros)
        return found

    def begin(self, source: FigureSource, elapsed_micros: int) -> None:
        """The next figures have the rates since now."""
        commits = source.commits
        self._before = _Before(
            elapsed_micros,
            commits.last_sequence,
            commits.expired_total,
            {topic.id: _journaled(topic) for topic in source.topics},
            {one.name: one.counts for one in source.latencies},
        )

    def _latencies(self, latencies: Sequence[Counts], seconds: float) -> Iterator[admin_pb2.LatencyFigures]:
        """Those of which there was one since the last figures."""
        before = None if self._before is None else self._before.latencies
        if before is None or seconds <= 0:
            return
        for one in latencies:
            known = before.get(one.name, (0,) * len(one.counts))
            counts = [now - then for now, then in zip(one.counts, known, strict=True)]
            if number := sum(counts):
                yield admin_pb2.LatencyFigures(
                    name=one.name,
                    per_second=number / seconds,
                    median_micros=round(quantile(0.5, one.bounds, counts) * MICROS),
                    p99_micros=round(quantile(0.99, one.bounds, counts) * MICROS),
                )

    def _topics(self, topics: Sequence[Topic], seconds: float) -> list[admin_pb2.TopicFigures]:
        """The topics with the most changes."""
        known = {} if self._before is None else self._before.journaled
        rates: list[tuple[float, float, Topic]] = []
        for topic in topics:
            entries, size = _journaled(topic)
            # A topic that was created meanwhile had none.
            entries_before, size_before = known.get(topic.id, (0, 0))
            per = 1 / seconds if seconds > 0 else 0.0
            rates.append(((entries - entries_before) * per, (size - size_before) * per, topic))
        rates.sort(key=lambda rate: (-rate[0], rate[2].name))
        return [
            admin_pb2.TopicFigures(
                topic=topic.name,
                records=topic.statistics.records,
                record_bytes=topic.statistics.record_bytes,
                journal_entries=topic.statistics.journal_entries,
                changes_per_second=changes,
                bytes_per_second=size,
                filled=topic.filled,
            )
            for changes, size, topic in rates[: self._topics_max]
        ]


def _journaled(topic: Topic) -> tuple[int, int]:
    return topic.statistics.appended_entries, topic.statistics.appended_bytes


def quantile(share: float, bounds: Sequence[float], counts: Sequence[int]) -> float:
    """The value that this share of the counted ones do not exceed, evenly spread within its bucket, as Prometheus
    reckons it. Values beyond the last bound count as it."""
    wanted, below = share * sum(counts), 0
    for index, count in enumerate(counts[:-1]):
        if below + count >= wanted:
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * ((wanted - below) / count if count else 1.0)
        below += count
    return bounds[-1]
