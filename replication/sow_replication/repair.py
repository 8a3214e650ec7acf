"""Brings both ends of a link to the newer version of every row that differs (rule R10): asking and answering.

[1]  Everything is merged by version, as over a link (rule R3). So nothing newer is lost to something older,
     whatever is written meanwhile, and a repair that stops half-way has done no harm.
[2]  Differences that remain are reported, never passed over: two records of one version that differ, for example,
     which no version can decide between.
[3]  A message has at most `ROWS_MAX` rows and, unless it has only one, at most about `ROWS_BYTES_MAX`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final
from zlib import crc32

from sow.v1 import admin_pb2, replication_pb2, types_pb2
from sow_peering import MergeCounts, TopicKind
from sow_replication.messages import instance_of, kind_of, topic_of
from sow_replication.ports import Refused
from sow_replication.verify import (
    MARGIN_MICROS,
    NOT_OF_THE_LINK,
    ComparingStore,
    Comparison,
    Means,
    PeerCalls,
    Run,
    at,
    check,
    chosen,
    concerns_topic,
    invalid,
    left_out,
    own_topic,
)

ROWS_MAX: Final = 1_000
ROWS_FIRST: Final = 64
"""Rows of the first message, when their size is not yet known."""
ROWS_BYTES_MAX: Final = 4 * 2**20
ORIGINS_MAX: Final = 65_536
"""The number of origins that two bytes can count."""


# --- asking ----------------------------------------------------------------------------------------------------------


async def repair(
    store: ComparingStore,
    peer: PeerCalls,
    kinds: Sequence[TopicKind],
    request: admin_pb2.RepairReplicationRequest,
    *,
    means: Means,
) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
    """Repairs the requested topics among `kinds`, the topics of a link. Answers topic by topic with the rows that were
    sent and received and the differences that remain.

    Raises Refused if it cannot go on at all; rows that were merged stay merged.
    """
    margin = MARGIN_MICROS
    for name, kind in chosen(kinds, request.topics):
        if kind is None or (why := left_out(kind, means)):
            yield admin_pb2.RepairReplicationResponse(topic=name, left_out=NOT_OF_THE_LINK if kind is None else why)
            continue
        exchange = Exchange(store, peer, request.peer, kind, means)
        answer = admin_pb2.RepairReplicationResponse(topic=name)
        comparison = Comparison(store, peer, request.peer, kind, means, margin_micros=margin)
        try:
            differed = False
            async with aclosing(comparison.differing()) as found:
                async for group in found:
                    differed = True
                    await exchange.rows([difference.key for difference in group])
            if differed:
                comparison = Comparison(store, peer, request.peer, kind, means, margin_micros=comparison.margin_micros)
                async with aclosing(comparison.differing()) as remaining:
                    async for group in remaining:
                        answer.differing += len(group)
        except Refused as refused:
            if not concerns_topic(refused):
                raise
            answer.left_out = refused.message  # beside the counts of the finished part
        finally:
            margin = comparison.margin_micros
        answer.sent, answer.received, answer.refused = exchange.sent, exchange.received, exchange.refused
        yield answer


class Exchange:
    """Gives each end of a topic the other end's rows of some keys. Owns the counts of rows that were taken over."""

    def __init__(self, store: ComparingStore, peer: PeerCalls, peer_name: str, kind: TopicKind, means: Means) -> None:
        self._store = store
        self._peer = peer
        self._peer_name = peer_name
        self._kind = kind
        self._means = means
        self._size = ROWS_FIRST
        self.sent = 0
        """Rows that the peer took over."""
        self.received = 0
        """Rows that this instance took over."""
        self.refused = 0
        """Rows that one end refused because no publish could have made them (rule R13)."""

    async def rows(self, keys: Sequence[bytes]) -> None:
        """Exchanges the rows of these keys: records and tombstones. Raises Refused."""
        done = 0
        while done < len(keys):
            part = keys[done : done + self._size]
            largest = await self._part(part)
            if largest is None:
                self._size = max(1, len(part) // 2)
                continue
            done += len(part)
            if 2 * largest <= ROWS_BYTES_MAX:
                self._size = min(2 * self._size, ROWS_MAX)

    async def _part(self, keys: Sequence[bytes]) -> int | None:
        """Returns the size of the larger one of the two messages; None: they are too large, and nothing was done."""
        topic, name = self._kind.name, self._store.identity.name
        wanted = replication_pb2.FetchRowsRequest(
            topic=topic,
            key=[key.decode() for key in keys],
            instance=instance_of(self._store.identity, self._store.cluster),
        )
        try:
            chunk, origins = await at(name, self._means.run(lambda: self._store.rows(topic, keys, ROWS_BYTES_MAX)))
            theirs = await at(self._peer_name, self._peer.fetch_rows(wanted))
        except Refused as refused:
            if refused.reason == types_pb2.ERROR_REASON_RESULT_TOO_LARGE and len(keys) > 1:
                return None
            raise
        if theirs.chunk:
            taken = await at(name, merged(self._store, topic, theirs.chunk, theirs.origins, self._peer_name))
            self.received += taken.applied
            self.refused += taken.refused
        if chunk:
            ours = replication_pb2.MergeRowsRequest(
                instance=instance_of(self._store.identity, self._store.cluster),
                topic=topic_of(self._kind),
                chunk=chunk,
                origins=origins,
                crc32=crc32(chunk),
            )
            done = await at(self._peer_name, self._peer.merge_rows(ours))
            self.sent += done.applied
            self.refused += done.refused
        return max(len(chunk), len(theirs.chunk))


# --- answering -------------------------------------------------------------------------------------------------------


async def fetch_rows(
    store: ComparingStore, request: replication_pb2.FetchRowsRequest, *, run: Run
) -> replication_pb2.FetchRowsResponse:
    """Answers FetchRows. Raises Refused: TOPIC_NOT_FOUND; REQUEST_TOO_LARGE for more than `ROWS_MAX` keys;
    RESULT_TOO_LARGE if the caller has to ask for fewer keys ([3])."""
    keys = [key.encode() for key in request.key]
    if not keys:
        raise invalid("key: the request has no keys")
    if len(keys) > ROWS_MAX:
        raise Refused(
            types_pb2.ERROR_REASON_REQUEST_TOO_LARGE, f"key: {len(keys)} keys are more than the limit of {ROWS_MAX}"
        )
    own_topic(store, request.topic)
    chunk, origins = await run(lambda: store.rows(request.topic, keys, ROWS_BYTES_MAX))
    return replication_pb2.FetchRowsResponse(chunk=chunk, origins=origins)


async def merge_rows(
    store: ComparingStore, request: replication_pb2.MergeRowsRequest
) -> replication_pb2.MergeRowsResponse:
    """Answers MergeRows once the rows are durable. To be called on the thread of all writing calls to the store.

    Raises Refused: BATCH_DAMAGED, the reason why this instance cannot take the topic, INVALID_ARGUMENT, or an error of
    the store.
    """
    if crc32(request.chunk) != request.crc32:
        raise Refused(
            types_pb2.ERROR_REASON_BATCH_DAMAGED, f"chunk: {len(request.chunk)} bytes do not match their CRC-32"
        )
    if len(request.origins) > ORIGINS_MAX:
        raise invalid(f"origins: {len(request.origins)} are more than the limit of {ORIGINS_MAX}")
    kind = kind_of(request.topic)
    own_topic(store, kind.name)
    check(store, kind)
    if not request.chunk:
        return replication_pb2.MergeRowsResponse()
    applied = await merged(store, kind.name, request.chunk, request.origins, request.instance.name)
    return replication_pb2.MergeRowsResponse(
        applied=applied.applied,
        passed_over=applied.superseded + applied.known + applied.dropped,
        refused=applied.refused,
    )


async def merged(store: ComparingStore, topic: str, chunk: bytes, origins: Sequence[str], peer: str) -> MergeCounts:
    """Merges rows; returns the counts once that is durable. Raises Refused."""
    return await store.merge_rows(topic, chunk, tuple(origins), peer=peer)
