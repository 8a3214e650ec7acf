"""Puts and removals of one topic that are applied together, or not at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypeAlias

from sow.v1 import sow_pb2, types_pb2
from sow_client import _lifetimes, _writes
from sow_client._documents import Document
from sow_client._keys import Key, optional_key
from sow_client._payloads import Encoding
from sow_client._records import DurabilityName, ExpireAt, Published, Ttl, invalid
from sow_client._statuses import closed


class Collected(NamedTuple):
    """A put or a removal that waits for the end of its transaction."""

    data: Document | None
    """None: a removal by key."""
    key: str | None
    lifetime: types_pb2.Lifetime | None
    condition: types_pb2.Condition | None
    removes: bool


Results: TypeAlias = list[Published]


def request_of(
    topic: str, changes: Sequence[Collected], encoding: Encoding, durability: DurabilityName | None
) -> sow_pb2.PublishRequest:
    """The request for all of a transaction, without its position."""
    records = [
        sow_pb2.PublishRecord(
            key=change.key,
            payload=b"" if change.data is None else encoding.encode(change.data),
            lifetime=change.lifetime,
            condition=change.condition,
            remove=change.removes,
        )
        for change in changes
    ]
    return sow_pb2.PublishRequest(
        topic=topic,
        records=records,
        durability=_writes.durability_value(durability),
        atomic=True,
        encoded_as=encoding.encoded_as,
    )


class AsyncTransaction:
    """Collects puts and removals of one topic. The end of the block sends them as one request: all are applied in one
    commit, in their order, or none.

    Made by `AsyncClient.transaction`; used in an `async with` block, in one task. If the block raises, nothing is sent.

    Rules: P4, P11.
    """

    def __init__(self, send: Callable[[Sequence[Collected]], Awaitable[Results]]) -> None:
        self._send = send
        self._changes: list[Collected] = []
        self._ended = False
        self._results: Results = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._changes)} changes{', ended' if self._ended else ''})"

    @property
    def results(self) -> Results:
        """After the block: the outcome of each put and removal, in their order."""
        return list(self._results)

    def publish(
        self,
        data: Document,
        *,
        key: Key | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        only_if_absent: bool = False,
        only_if_present: bool = False,
        only_if_version: int | None = None,
    ) -> None:
        """Adds a record. The arguments are those of the client's `publish`."""
        self._add(
            Collected(
                data,
                optional_key(key),
                _lifetimes.lifetime_message(ttl, expire_at),
                _writes.condition(
                    only_if_absent=only_if_absent, only_if_present=only_if_present, only_if_version=only_if_version
                ),
                removes=False,
            )
        )

    def remove(
        self,
        key: Key | None = None,
        *,
        data: Document | None = None,
        only_if_present: bool = False,
        only_if_version: int | None = None,
    ) -> None:
        """Adds a removal: give the key, or `data`, a document that has the key fields of the topic. Without a live
        record it changes nothing; with `only_if_present` it is refused then, and so is the whole transaction."""
        if (key is None) is (data is None):
            raise invalid("key", "give a key, or data that has the key fields: exactly one of both")
        condition = _writes.condition(only_if_present=only_if_present, only_if_version=only_if_version)
        self._add(Collected(data, optional_key(key), None, condition, removes=True))

    def _add(self, change: Collected) -> None:
        if self._ended:
            raise closed("transaction")
        self._changes.append(change)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if self._ended:
            raise closed("transaction")
        self._ended = True
        if error is None and self._changes:
            self._results = await self._send(self._changes)
        return False
