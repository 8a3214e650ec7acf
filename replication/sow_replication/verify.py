"""Compares the topics of a link at both ends (rule R10): asking and answering.

    [1]  Expiration never appears as a difference. Both ends leave out the records that are due by one common time,
         which is ahead of both clocks. An end whose clock has passed that time refuses (CLOCK_SKEW) and is asked again
         with a later one.
    [2]  Changes under way never appear as a difference. A key counts if it has the same two versions in two looks, and
         the second look began when the link had nothing under way. On a link that always has changes under way, the
         last two looks of some seconds decide.
    [3]  A difference that stays is found, except for one case in 2^64 per bucket.
    [4]  A topic that cannot be compared is left out, with the reason. Only an error that ends the whole call is raised.

Checksums of buckets are compared first, then the versions in the buckets that differ, a bounded number of records at a
time. Each of these steps reads the whole topic at both ends: a few seconds for a million records.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeVar

from sow.v1 import admin_pb2, replication_pb2, types_pb2
from sow_peering import InstanceIdentity, RecordVersion, TopicKind
from sow_replication.messages import instance_of, kind_of, topic_of
from sow_replication.ports import Clock, Comparing, Refused

BUCKETS_FIRST: Final = 1024
BUCKETS_MAX: Final = 65_536
BUCKET_RECORDS: Final = 64
"""The approximate number of records per bucket from which on a differing topic is divided into more buckets, so that
few versions are listed beyond the differing ones."""
GROUP_RECORDS: Final = 100_000
"""Versions that are listed at a time; a single bucket may have more."""
PAUSES: Final = (0.1, 0.4, 1.0, 1.5, 2.0)
"""Seconds between looks at the differences."""
MARGIN_MICROS: Final = 1_000_000
"""How far the common time is ahead of this clock, at first: the duration of a call while the clocks agree."""
MARGIN_FACTOR: Final = 4
MARGIN_MICROS_MAX: Final = 3_600_000_000
"""Ends whose clocks are further apart than this cannot be compared."""
KEYS_LISTED: Final = 100
"""Differing keys that are listed per topic by default."""
LISTED_BYTES_MAX: Final = 4 * 2**20
"""The most bytes of keys in an answer, for any request: the answer is one message."""
MESSAGE_VERSIONS: Final = 5_000
MESSAGE_KEY_BYTES: Final = 2**20

_LEFT_OUT: Final = frozenset(
    {
        types_pb2.ERROR_REASON_TOPIC_NOT_FOUND,
        types_pb2.ERROR_REASON_TOPIC_NAME_INVALID,
        types_pb2.ERROR_REASON_TOPIC_DELETED,
        types_pb2.ERROR_REASON_TOPIC_DIFFERS,
        types_pb2.ERROR_REASON_NO_JOURNAL,
        types_pb2.ERROR_REASON_CLOCK_SKEW,
        types_pb2.ERROR_REASON_RESULT_TOO_LARGE,
    }
)
"""Reasons that concern a single topic."""

T = TypeVar("T")
Here = TypeVar("Here")
There = TypeVar("There")


class Run(Protocol):
    """Runs blocking work away from the event loop."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Returns or raises the result of `work`."""


class ComparingStore(Comparing, Clock, Protocol):
    """The part of `ports.Store` that is used here."""

    @property
    def identity(self) -> InstanceIdentity:
        """This instance."""

    @property
    def cluster(self) -> str:
        """The cluster of this instance; empty: none."""

    def topics(self, pattern: str) -> list[TopicKind]:
        """The topics whose whole name matches."""


class PeerCalls(Protocol):
    """The calls to the other end. They raise Refused with the other end's reason, or with REPLICATION_UNAVAILABLE if it
    cannot be reached or goes away."""

    async def checksum(self, request: replication_pb2.ChecksumRequest, /) -> replication_pb2.ChecksumResponse:
        """Checksums of a topic."""

    def list_versions(
        self, request: replication_pb2.ListVersionsRequest, /
    ) -> AsyncIterator[replication_pb2.ListVersionsResponse]:
        """Versions of some buckets."""

    async def fetch_rows(self, request: replication_pb2.FetchRowsRequest, /) -> replication_pb2.FetchRowsResponse:
        """Records and tombstones."""

    async def merge_rows(self, request: replication_pb2.MergeRowsRequest, /) -> replication_pb2.MergeRowsResponse:
        """Merges records and tombstones."""


@dataclass(frozen=True, slots=True)
class Means:
    """The means of the asking end."""

    run: Run
    sleep: Callable[[float], Awaitable[None]]
    """Seconds."""
    lagging: Callable[[], bool] = lambda: False
    """True if changes are known to be under way between the two ends, in either direction."""
    filter_text: str = ""
    """The filter of the link. Not empty: the ends differ on purpose, and nothing can be compared."""


# --- asking ----------------------------------------------------------------------------------------------------------


async def verify(
    store: ComparingStore,
    peer: PeerCalls,
    kinds: Sequence[TopicKind],
    request: admin_pb2.VerifyReplicationRequest,
    *,
    means: Means,
) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
    """Compares the requested topics among `kinds`, the topics of a link, and answers topic by topic.

    Raises Refused if it cannot go on at all; earlier answers stay valid.
    """
    keys_max = request.keys_max if request.HasField("keys_max") else KEYS_LISTED
    margin = MARGIN_MICROS
    for name, kind in chosen(kinds, request.topics):
        if kind is None or (why := left_out(kind, means)):
            yield admin_pb2.VerifyReplicationResponse(topic=name, left_out=NOT_OF_THE_LINK if kind is None else why)
            continue
        comparison = Comparison(store, peer, request.peer, kind, means, margin_micros=margin)
        differing, listed, listed_bytes = 0, list[Differing](), 0
        try:
            async with aclosing(comparison.differing()) as found:
                async for group in found:
                    differing += len(group)
                    for difference in group[: max(0, keys_max - len(listed))]:
                        listed_bytes += len(difference.key)
                        if listed_bytes <= LISTED_BYTES_MAX:
                            listed.append(difference)
        except Refused as refused:
            if not concerns_topic(refused):
                raise
            yield admin_pb2.VerifyReplicationResponse(topic=name, left_out=refused.message)
            continue
        finally:
            margin = comparison.margin_micros  # clocks that differ also differ for the next topic
        yield admin_pb2.VerifyReplicationResponse(
            topic=name,
            records=comparison.records,
            differing=differing,
            unreadable_here=comparison.unreadable_here,
            unreadable_there=comparison.unreadable_there,
            differences=[
                admin_pb2.Difference(
                    key=difference.key.decode(),
                    version_here=difference.version_here,
                    version_there=difference.version_there,
                )
                for difference in sorted(listed)
            ],
        )


NOT_OF_THE_LINK: Final = "there is no such topic here, or the link does not carry it"


def chosen(kinds: Sequence[TopicKind], wanted: Sequence[str]) -> Iterator[tuple[str, TopicKind | None]]:
    """The requested topics, or all if none is named; None for those that the link does not have."""
    by_name = {kind.name: kind for kind in kinds}
    for name in dict.fromkeys(wanted or by_name):
        yield name, by_name.get(name)


def left_out(kind: TopicKind, means: Means) -> str:
    """The reason why a topic cannot be compared, as far as this end knows; "": none."""
    if means.filter_text:
        return f"the link has a filter: {means.filter_text}"
    return "" if kind.journal else "it has no journal here"


def concerns_topic(refused: Refused) -> bool:
    """True if the reason concerns only the topic, so that the others can go on."""
    return refused.reason in _LEFT_OUT


async def at(name: str, answer: Awaitable[T]) -> T:
    """The answer of an instance; a refusal names the instance."""
    try:
        return await answer
    except Refused as refused:
        raise Refused(refused.reason, f"at {name}: {refused.message}") from refused


class Differing(NamedTuple):
    """A key that differs, with its versions at both ends; 0: no record."""

    key: bytes
    version_here: int
    version_there: int
    checksum_here: int
    checksum_there: int


class Comparison:
    """Compares one topic, once. Owns the findings: the number of records here, and the difference of the clocks."""

    def __init__(
        self,
        store: ComparingStore,
        peer: PeerCalls,
        peer_name: str,
        kind: TopicKind,
        means: Means,
        *,
        margin_micros: int = MARGIN_MICROS,
    ) -> None:
        self._store = store
        self._peer = peer
        self._peer_name = peer_name
        self._kind = kind
        self._means = means
        self._buckets = BUCKETS_FIRST
        self.records = 0
        """Records that were compared at this end."""
        self.unreadable_here = self.unreadable_there = 0
        """Records that could not be compared, because a message cannot hold their key (rule R13)."""
        self.margin_micros = margin_micros
        """How far the common time is ahead of this clock ([1])."""

    async def differing(self) -> AsyncGenerator[list[Differing], None]:
        """The lasting differences, in groups, each in the order of keys. Raises Refused."""
        buckets, records = await self._differing_buckets()
        if not buckets:
            return
        finer = buckets_for(records)
        if finer > self._buckets:
            self._buckets = finer
            buckets, _ = await self._differing_buckets()
        for group in _groups(buckets):
            if found := await self._settled(group):
                yield found

    async def _settled(self, buckets: Sequence[int]) -> list[Differing]:
        """The differences in some buckets after enough looks that they are stable ([2])."""
        before: dict[bytes, Differing] = {}
        same: list[Differing] = []
        for pause in (*PAUSES, None):
            # Before the look: if nothing is under way now, everything that was under way in the last look has arrived.
            lagging = self._means.lagging()
            look, same = await self._look(buckets, before)
            if len(same) == len(look) and (not look or not lagging):
                break
            if pause is not None:
                before = look
                await self._means.sleep(pause)
        return same

    async def _differing_buckets(self) -> tuple[dict[int, int], int]:
        """The buckets that differ with their numbers of records, and the number of records of the topic; each number is
        that of the end with more."""
        topic, buckets = self._kind.name, self._buckets

        async def there(due: int) -> replication_pb2.ChecksumResponse:
            answer = await self._peer.checksum(
                replication_pb2.ChecksumRequest(
                    instance=instance_of(self._store.identity, self._store.cluster),
                    topic=topic_of(self._kind),
                    buckets=buckets,
                    now_micros=due,
                )
            )
            if answer.instance.id == self._store.identity.id:
                raise Refused(types_pb2.ERROR_REASON_PEER_IS_SELF, "the peer is the asking instance itself")
            if len(answer.checksum) != buckets or len(answer.records) != buckets:
                raise _breach(f"{len(answer.checksum)} checksums for {buckets} buckets")
            return answer

        (sums, records, self.unreadable_here), answer = await self._both(
            lambda due: self._means.run(lambda: self._store.checksums(topic, buckets, due)), there
        )
        self.records = sum(records)
        self.unreadable_there = answer.unreadable
        differing = {
            bucket: max(records[bucket], answer.records[bucket])
            for bucket, (mine, other) in enumerate(zip(sums, answer.checksum, strict=True))
            if mine != other or records[bucket] != answer.records[bucket]
        }
        return differing, max(self.records, sum(answer.records))

    async def _look(
        self, wanted: Sequence[int], before: Mapping[bytes, Differing]
    ) -> tuple[dict[bytes, Differing], list[Differing]]:
        """The differences in some buckets at this moment, and those of them that are unchanged since the last look, by
        key."""
        topic, buckets = self._kind.name, self._buckets

        async def there(due: int) -> dict[bytes, tuple[int, int]]:
            found: dict[bytes, tuple[int, int]] = {}
            request = replication_pb2.ListVersionsRequest(
                topic=topic,
                buckets=buckets,
                bucket=wanted,
                now_micros=due,
                instance=instance_of(self._store.identity, self._store.cluster),
            )
            async for part in self._peer.list_versions(request):
                if not len(part.key) == len(part.version) == len(part.checksum):
                    raise _breach("columns of versions that differ in length")
                keys = [key.encode() for key in part.key]
                found.update(zip(keys, zip(part.version, part.checksum, strict=True), strict=True))
            return found

        listed, others = await self._both(
            lambda due: self._means.run(lambda: self._store.versions(topic, buckets, wanted, due)), there
        )

        def compared() -> tuple[dict[bytes, Differing], list[Differing]]:
            look = _differing(listed, others)
            return look, sorted([difference for key, difference in look.items() if before.get(key) == difference])

        # Also away from the event loop: these may be a hundred thousand.
        return await self._means.run(compared)

    async def _both(
        self, here: Callable[[int], Awaitable[Here]], there: Callable[[int], Awaitable[There]]
    ) -> tuple[Here, There]:
        """The answers of both ends about the records that are not due by one time ahead of both clocks ([1])."""
        name = self._store.identity.name
        while True:
            due = self._store.now_micros() + self.margin_micros
            # Both are awaited, even if one fails: a read that went on in its thread beside a new one would take the
            # threads of others.
            mine, theirs = await asyncio.gather(
                at(name, here(due)), at(self._peer_name, there(due)), return_exceptions=True
            )
            failures = [answer for answer in (mine, theirs) if isinstance(answer, BaseException)]
            others = [failure for failure in failures if not _is_skew(failure)]
            if others or (failures and self.margin_micros >= MARGIN_MICROS_MAX):
                raise (others or failures)[0]
            if not isinstance(mine, BaseException) and not isinstance(theirs, BaseException):
                return mine, theirs
            self.margin_micros = min(self.margin_micros * MARGIN_FACTOR, MARGIN_MICROS_MAX)


def buckets_for(records: int) -> int:
    """The number of buckets for a differing topic with so many records."""
    buckets = BUCKETS_FIRST
    while buckets < BUCKETS_MAX and records > buckets * BUCKET_RECORDS:
        buckets *= 2
    return buckets


def _differing(listed: Sequence[RecordVersion], others: Mapping[bytes, tuple[int, int]]) -> dict[bytes, Differing]:
    """The differences between the versions here and there, by key."""
    look: dict[bytes, Differing] = {}
    only_there = dict(others)
    for key, version, checksum in listed:
        other_version, other_checksum = only_there.pop(key, (0, 0))
        if (version, checksum) != (other_version, other_checksum):
            look[key] = Differing(key, version, other_version, checksum, other_checksum)
    for key, (version, checksum) in only_there.items():
        look[key] = Differing(key, 0, version, 0, checksum)
    return look


def _groups(records: dict[int, int]) -> Iterator[list[int]]:
    """Buckets, as many together as have about `GROUP_RECORDS`."""
    group: list[int] = []
    size = 0
    for bucket, count in records.items():
        if group and size + count > GROUP_RECORDS:
            yield group
            group, size = [], 0
        group.append(bucket)
        size += count
    if group:
        yield group


def _is_skew(failure: BaseException) -> bool:
    return isinstance(failure, Refused) and failure.reason == types_pb2.ERROR_REASON_CLOCK_SKEW


def _breach(fault: str) -> Refused:
    return Refused(types_pb2.ERROR_REASON_PROTOCOL_MISMATCH, f"breaks the protocol: {fault}")


# --- answering -------------------------------------------------------------------------------------------------------


async def checksum(
    store: ComparingStore, request: replication_pb2.ChecksumRequest, *, run: Run
) -> replication_pb2.ChecksumResponse:
    """Answers Checksum. Raises Refused with the reason why this instance cannot compare the topic (TOPIC_DIFFERS also
    if only one of the two acts on expiration), with CLOCK_SKEW ([1]) or INVALID_ARGUMENT."""
    kind, buckets, due = kind_of(request.topic), request.buckets, request.now_micros
    _check(buckets, (), due)
    check(store, kind)
    acts = own_topic(store, kind.name).acts
    if acts != kind.acts:
        raise Refused(
            types_pb2.ERROR_REASON_TOPIC_DIFFERS,
            f"expiration differs: {kind.name!r} is {_acting(acts)} here, and {_acting(kind.acts)} at the asking end",
        )
    sums, records, unreadable = await run(lambda: store.checksums(kind.name, buckets, due))
    return replication_pb2.ChecksumResponse(
        checksum=sums, records=records, instance=instance_of(store.identity), unreadable=unreadable
    )


async def list_versions(
    store: ComparingStore, request: replication_pb2.ListVersionsRequest, *, run: Run
) -> AsyncGenerator[replication_pb2.ListVersionsResponse, None]:
    """Answers ListVersions, in messages of a bounded size. Raises Refused: TOPIC_NOT_FOUND, CLOCK_SKEW ([1]),
    INVALID_ARGUMENT, RESULT_TOO_LARGE."""
    topic, buckets, due = request.topic, request.buckets, request.now_micros
    if len(request.bucket) > BUCKETS_MAX:  # before they are copied out of the message
        raise invalid(f"bucket: {len(request.bucket)} buckets are more than the limit of {BUCKETS_MAX}")
    wanted = frozenset(request.bucket)
    _check(buckets, wanted, due)
    own_topic(store, topic)
    for part in _parts(await run(lambda: store.versions(topic, buckets, wanted, due))):
        yield replication_pb2.ListVersionsResponse(
            key=[version.key.decode() for version in part],
            version=[version.version for version in part],
            checksum=[version.checksum for version in part],
        )


def check(store: ComparingStore, kind: TopicKind) -> None:
    """Raises Refused if this instance cannot take such a topic of another instance (rule R12)."""
    answer = store.check(kind)
    if answer.reason != types_pb2.ERROR_REASON_UNSPECIFIED:
        raise Refused(types_pb2.ErrorReason.ValueType(answer.reason), answer.message)


def own_topic(store: ComparingStore, name: str) -> TopicKind:
    """This instance's topic of that name, unless it is reserved. Raises Refused TOPIC_NOT_FOUND."""
    for kind in store.topics(re.escape(name)):
        if kind.name == name:
            return kind
    raise Refused(types_pb2.ERROR_REASON_TOPIC_NOT_FOUND, f"there is no topic {name[:200]!r}")


def _parts(versions: Sequence[RecordVersion]) -> Iterator[list[RecordVersion]]:
    part: list[RecordVersion] = []
    size = 0
    for version in versions:
        part.append(version)
        size += len(version.key)
        if len(part) >= MESSAGE_VERSIONS or size >= MESSAGE_KEY_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _check(buckets: int, wanted: Collection[int], due: int) -> None:
    if not 1 <= buckets <= BUCKETS_MAX:
        raise invalid(f"buckets: {buckets} is not between 1 and {BUCKETS_MAX}")
    if any(bucket >= buckets for bucket in wanted):
        raise invalid(f"bucket: {max(wanted)} is not one of {buckets}")
    if due <= 0:
        raise invalid(f"now_micros: {due} is not a time")


def _acting(acts: bool) -> str:
    return "acted on" if acts else "not acted on"


def invalid(message: str) -> Refused:
    """INVALID_ARGUMENT."""
    return Refused(types_pb2.ERROR_REASON_INVALID_ARGUMENT, message)
