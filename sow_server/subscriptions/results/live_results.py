"""All live results of the server, and the sources that they share (rules S10, S12)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from sow_server.engine.doors import Reads
from sow_server.engine.values.clock import boot_micros
from sow_server.subscriptions.hub import Hub
from sow_server.subscriptions.results.aggregates import AggregateSource, AskedAggregates
from sow_server.subscriptions.results.fed import Asked, Drive, Surroundings
from sow_server.subscriptions.results.follower import LiveResult
from sow_server.subscriptions.results.lists import AskedList, ListSource
from sow_server.subscriptions.results.source import Source

RESULT_BYTES_MAX: Final = 16 * 2**20


class LiveResults:
    """Owns the sources. On the event loop."""

    def __init__(
        self,
        hub: Hub,
        reads: Reads,
        drive: Drive,
        *,
        bytes_max: int = RESULT_BYTES_MAX,
        elapsed: Callable[[], int] = boot_micros,
    ) -> None:
        """`bytes_max`: memory of one result. `elapsed`: microseconds of a clock that nobody sets."""
        self._hub = hub
        self._clock = reads.clock
        self._sources: dict[tuple[object, ...], Source] = {}
        self._around = Surroundings(
            hub, drive, reads.clock.now_micros, elapsed, self._sources.__len__, bytes_max, self._has_read
        )
        self._followers: dict[LiveResult, None] = {}
        self.reads_total: Final[Counter[str]] = Counter()
        """How often a result was read, by the reason."""
        self.micros_total: Final[Counter[str]] = Counter()
        """How long that took."""

    def follow(self, asked: Asked, *, progress_micros: int, batch_size: int) -> LiveResult:
        """A follower of a result. Raises StoreError."""
        self._hub.admit(len(self._followers))
        name = asked.name
        source = self._sources.get(name)
        if source is None or source.error is not None:
            source = self._sources[name] = self._made(asked)

        def closed(follower: LiveResult) -> None:
            del self._followers[follower]
            if not source.followers:
                source.close()
                if self._sources.get(name) is source:
                    del self._sources[name]

        made = LiveResult(
            source,
            asked=asked,
            # One that publishes, and then asks for the list, finds its record there. Groups may be late (rule S12).
            least=0 if source.gives_results else self._hub.last_change(asked.topic),
            progress_micros=progress_micros,
            batch_size=batch_size,
            clock=self._clock,
            elapsed=self._around.elapsed,
            closed=closed,
        )
        self._followers[made] = None
        return made

    def _made(self, asked: Asked) -> Source:
        if isinstance(asked, AskedList):
            return ListSource(asked, self._around)
        assert isinstance(asked, AskedAggregates), "there is no third kind"
        return AggregateSource(asked, self._around)

    def _has_read(self, why: str, micros: int) -> None:
        self.reads_total[why] += 1
        self.micros_total[why] += micros

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """The number of followers."""
        return len(self._followers)

    def sources(self) -> Iterator[Source]:
        """All sources at this moment."""
        return iter(list(self._sources.values()))
