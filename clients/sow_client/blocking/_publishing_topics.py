# Generated from aio/_publishing_topics.py by clients/generate_blocking.py. Change that file, then run `make client`.
"""One publisher of many topics (rule C22)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sow.v1 import sow_pb2
from sow_client import _lifetimes, _writes
from sow_client._cells import Place
from sow_client._lines import Home
from sow_client._payloads import PayloadForm
from sow_client._publish_core import Ack, PublisherOptions, StreamDefaults
from sow_client._publisher import StreamCall
from sow_client._records import DurabilityName, ExpireAt, Ttl
from sow_client.blocking._publishing import Publishing
from sow_client.errors import Refusal

if TYPE_CHECKING:
    from sow_client._topics_core import CellCore, TopicCore
    from sow_client._topics_publisher import TopicsPublisher


class TopicsPublishing(Publishing):
    """The call for a publisher of many topics."""

    def topics_publisher(
        self,
        *,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        keep_ttl: bool = False,
        extend_ttl: bool = False,
        durability: DurabilityName | None = None,
        batch_records: int = 1_000,
        max_in_flight: int = 16,
        linger: float = 0.02,
        retry_for: float = 30.0,
        on_ack: Callable[[str, Ack], object] | None = None,
        on_refusal: Callable[[str, Refusal], object] | None = None,
        delta: bool = False,
        unset: Iterable[str] | None = None,
    ) -> TopicsPublisher:
        """One publisher of many topics, with one stream for each cell; see `TopicsPublisher`.

        It costs much less than a publisher for each topic. The records of a topic keep their order, and those of two
        topics have none. The arguments are those of `publisher`, for all topics. `batch_records` counts for each topic,
        `max_in_flight` for each cell. Both callbacks get the topic first. It has no id, epoch or unit of the program's.

        Rules: C22, P6.
        """
        from sow_client._topics_publisher import TopicsPublisher  # lazily: few programs need it

        defaults = StreamDefaults(
            "",
            _lifetimes.lifetime_message(ttl, expire_at),
            _writes.ttl_mode(keep_ttl, extend_ttl),
            _writes.durability_value(durability),
            delta,
            _writes.unset_paths(delta, unset) or (),
        )
        pace = batch_records, max_in_flight, linger, retry_for, self._connect_timeout
        doors = _Doors(self, defaults, PublisherOptions(*pace))
        return TopicsPublisher(doors, on_ack, on_refusal)


class _Doors:
    """A client, as its publisher of many topics uses it."""

    def __init__(self, client: Publishing, defaults: StreamDefaults, options: PublisherOptions) -> None:
        self._client = client
        self._defaults = defaults
        self._options = options
        self._homes: dict[str, Home] = {}

    def core(self, topic: str) -> TopicCore:
        """The core of another topic."""
        from sow_client._topics_core import TopicCore  # lazily, too

        return TopicCore(replace(self._defaults, topic=topic), self._options, self._client._cells.way(topic))

    def cell(self, place: Place[Any]) -> CellCore:
        """The core of another cell."""
        from sow_client._topics_core import CellCore  # lazily, too

        options = replace(self._options, failover=self._client._failover_in(place))
        return CellCore(place.cell or "the home of the client", options)

    def stream(
        self, core: CellCore, place: Place[Any], requests: Iterator[sow_pb2.PublishStreamRequest], /
    ) -> StreamCall:
        """Opens a stream to a cell."""
        home = self._homes.setdefault(place.key, Home("the publisher of many topics"))
        return self._client._open_stream(core, self._client._cells.at(place), home, None, requests)

    def form(self, topic: str, anew: bool, /) -> PayloadForm:
        """The form of the payloads of a topic."""
        return self._client._form(topic, anew, at_most=self._client._connect_timeout)
