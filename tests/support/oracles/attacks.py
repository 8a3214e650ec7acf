"""One identity of small rights does its worst: every attack on something that callers share, whole and small.

python -m tests.support.oracles.attacks NAME SIZE ADDRESS      # attacks a server until it is killed

[1]  Each attack has an identity and a topic of its own. Its role allows what the attack needs, on that topic alone, and
     sets no limits.
[2]  Requests are made once and answers are not parsed, so the attacker spends little where the server spends much.
[3]  A refusal is an answer: the attacker goes on.

The benchmark `hostile` runs the whole sizes, and tests/hostile both.
"""

from __future__ import annotations

import asyncio
import json
import re
import string
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from sow.v1 import sow_pb2, types_pb2
from sow_client import Client
from tests.support.oracles.access import grant, identity, write_access
from tests.support.servers.others import ORDERS, ORDERS_RECORDS, OTHERS, RANKED, RANKED_RECORDS, order, ranked

SERVICE: Final = "/sow.v1.SowService"
CHANNEL: Final = (
    ("grpc.max_receive_message_length", 32 * 2**20),
    ("grpc.max_send_message_length", 32 * 2**20),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
    ("grpc.http2.bdp_probe", 0),  # the server may send no more ahead than HTTP/2 asks for
)
CALL_SECONDS: Final = 600.0
REFUSED_PAUSE: Final = 0.01
"""Seconds between a refusal and the next try. Refusals without a pause would measure the guard."""
REFUSED_STREAM_PAUSE: Final = 1.0
"""The same for a stream. Many are opened at a time, so this is as many tries a second as there are streams."""
TELL_SECONDS: Final = 0.5
CHUNK_BYTES: Final = 8 * 2**20
MERGED_LEVELS: Final = 32
"""Levels of a delta that a server merges, at most."""
NAMES: Final = string.digits + string.ascii_letters


class Attacker:
    """Calls of the attacker, and their number."""

    def __init__(self, address: str, attack: Attack) -> None:
        self._address = address
        self._metadata = (("authorization", f"Bearer {attack.name}"),)
        self.topic = attack.topic
        self.answered = 0
        """Calls with an answer."""
        self.refused: Counter[str] = Counter()
        """Refused calls by status and message."""
        self.streams = 0
        """Streams of which a message has come."""

    @property
    def done(self) -> int:
        """All that has come of it."""
        return self.answered + self.refused.total() + self.streams

    @asynccontextmanager
    async def channel(self) -> AsyncGenerator[grpc.aio.Channel, None]:
        """A connection of its own."""
        async with grpc.aio.insecure_channel(self._address, options=CHANNEL) as channel:
            yield channel

    async def repeat(self, method: str, request: Message, callers: int) -> None:
        """Makes the same call again and again, each caller on its own connection. For ever."""
        body = request.SerializeToString()
        await _all(self._repeat(method, body) for _ in range(callers))

    async def _repeat(self, method: str, body: bytes) -> None:
        async with self.channel() as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            while True:
                try:
                    await call(body, metadata=self._metadata, timeout=CALL_SECONDS)
                except grpc.aio.AioRpcError as error:
                    await self._count(error)
                else:
                    self.answered += 1

    async def hold(self, method: str, request: Message, streams: int, *, credential: bool = True) -> None:
        """Opens streams on one connection, reads the first message of each, and never another one. For ever. A stream
        that ends is opened again."""
        body = request.SerializeToString()
        async with self.channel() as channel:
            await _all(self._hold(channel, method, body, credential) for _ in range(streams))

    async def _hold(self, channel: grpc.aio.Channel, method: str, body: bytes, credential: bool) -> None:
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
        while True:
            stream = call(body, metadata=self._metadata if credential else None)
            try:
                if await stream.read() is not grpc.aio.EOF:
                    self.streams += 1
                    await stream.code()  # waits for its end, and reads nothing
                await asyncio.sleep(REFUSED_STREAM_PAUSE)
            except grpc.aio.AioRpcError as error:
                await self._count(error, REFUSED_STREAM_PAUSE)

    async def read(self, method: str, request: Message) -> None:
        """Reads a stream as fast as it comes, for ever. One that ends is opened again."""
        body = request.SerializeToString()
        async with self.channel() as channel:
            call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
            while True:
                try:
                    async for _ in call(body, metadata=self._metadata):
                        self.streams += 1
                except grpc.aio.AioRpcError as error:
                    await self._count(error)

    async def _count(self, error: grpc.aio.AioRpcError, pause: float = REFUSED_PAUSE) -> None:
        self.refused[f"{error.code().name} {(error.details() or '')[:120]}"] += 1
        await asyncio.sleep(pause)


async def _all(tasks: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(task)


# -- documents --------------------------------------------------------------------------------------------------------


def named(count: int) -> dict[str, int]:
    """Fields with the shortest names: 100,000 of them are 0.7 MB of JSON."""
    base = len(NAMES)
    return {
        NAMES[number % base] + NAMES[number // base % base] + NAMES[number // base**2]: 0 for number in range(count)
    }


def nested(depth: int, names: int) -> dict[str, object]:
    """A document of so many levels, whose innermost one has so many names."""
    inside: dict[str, object] = {"in": named(names)}
    for _ in range(depth - 3):
        inside = {"a": inside}
    return inside


def text(document: object) -> bytes:
    """JSON without spaces."""
    return json.dumps(document, separators=(",", ":")).encode()


def publish_all(root: Client, topic: str, documents: Iterable[dict[str, object]]) -> None:
    """Publishes in requests that the server takes."""
    waiting: list[dict[str, object]] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += len(text(document))
        if size > CHUNK_BYTES or len(waiting) == 1_000:
            root.publish_many(topic, waiting, durability="buffered")
            waiting, size = [], 0
    if waiting:
        root.publish_many(topic, waiting, durability="buffered")


def wide(number: int, fields: int) -> dict[str, object]:
    """A flat record."""
    return {"id": f"k{number}"} | {f"f{field}": number for field in range(fields)}


def heavy(number: int, size: int) -> dict[str, object]:
    """A record of so many bytes, most of them in one text. A part of it compresses, which keeps the set-up short."""
    return {"id": f"k{number:06}", "rank": number * 7919 % 100_003, "text": f"{number:08}" * (size // 8)}


def paths(count: int) -> Sequence[str]:
    """Paths of fields, most of which no record has."""
    return [f"/f{number}" for number in range(count)]


# -- attacks ----------------------------------------------------------------------------------------------------------


class Assault(Protocol):
    """One attack at one size."""

    def prepare(self, root: Client, topic: str) -> None:
        """Makes the topic, and what is in it, before the others are measured."""

    async def run(self, attacker: Attacker) -> None:
        """Attacks for ever."""


@dataclass(frozen=True, slots=True)
class Gets:
    """Gets of many keys with a projection of many paths, in so many calls at a time."""

    callers: int
    keys: int
    paths: int
    fields: int = 50
    records: int = 1
    """The keys are spread over so many records."""
    names: int = 0
    """Names of the record that is asked for. 0: it is like the others."""

    def prepare(self, root: Client, topic: str) -> None:
        root.create_topic(topic, key=["/id"])
        publish_all(root, topic, (wide(number, self.fields) for number in range(max(self.records, 300))))
        if self.names:
            publish_all(root, topic, [{"id": "k0"} | dict[str, object](named(self.names))])

    async def run(self, attacker: Attacker) -> None:
        request = sow_pb2.GetRequest(
            topic=attacker.topic, keys=[f"k{number % self.records}" for number in range(self.keys)]
        )
        request.select.include.extend(paths(self.paths))
        await attacker.repeat(f"{SERVICE}/Get", request, self.callers)


@dataclass(frozen=True, slots=True)
class HiddenFields:
    """Gets, a subscription and publishes of a record that is nested deeply, where a field inside is hidden."""

    depth: int
    names: int
    callers: int = 2

    def prepare(self, root: Client, topic: str) -> None:
        root.create_topic(topic, key=["/id"])
        publish_all(root, topic, (wide(number, 10) for number in range(300)))
        root.publish(topic, self._document())

    def _document(self) -> dict[str, object]:
        return {"id": "nested"} | nested(self.depth, self.names)

    async def run(self, attacker: Attacker) -> None:
        get = sow_pb2.GetRequest(topic=attacker.topic, keys=["nested"])
        follow = sow_pb2.SubscribeRequest(topic=attacker.topic, sow=True)
        publish = _publish(attacker.topic, [text(self._document())])
        await _all(
            (
                attacker.repeat(f"{SERVICE}/Get", get, self.callers),
                attacker.read(f"{SERVICE}/Subscribe", follow),
                attacker.repeat(f"{SERVICE}/Publish", publish, 1),
            )
        )


@dataclass(frozen=True, slots=True)
class Deltas:
    """Many deltas of one large record in each request, or of small ones with many paths to remove."""

    count: int
    names: int
    """Of the record. 0: it is small."""
    depth: int = 1
    unset: int = 0
    """Paths, each below a field that is there."""
    callers: int = 2

    def prepare(self, root: Client, topic: str) -> None:
        root.create_topic(topic, key=["/id"], retain_time="0s", retain_bytes=0)
        objects: dict[str, object] = {f"f{number}": {} for number in range(self.unset)}
        publish_all(root, topic, ({"id": f"k{number}"} | objects for number in range(300)))
        if self.names:
            inside: dict[str, object] = {**named(self.names)} if self.depth == 1 else nested(self.depth, self.names)
            root.publish(topic, {"id": "k0"} | inside)

    async def run(self, attacker: Attacker) -> None:
        deltas = []
        for number in range(self.count):
            inside: dict[str, object] = {"x": number}
            for _ in range(min(self.depth, MERGED_LEVELS) - 2):
                inside = {"a": inside}
            deltas.append(text({"id": f"k{0 if self.names else number % 300}"} | inside))
        request = _publish(attacker.topic, deltas, delta=True)
        request.unset_paths.extend(f"{path}/x" for path in paths(self.unset))
        await attacker.repeat(f"{SERVICE}/Publish", request, self.callers)


@dataclass(frozen=True, slots=True)
class UnreadQueries:
    """Queries whose answers nobody reads."""

    streams: int
    records: int
    bytes: int
    """Of a record."""
    ordered: bool = False
    per_connection: int = 25

    def prepare(self, root: Client, topic: str) -> None:
        root.create_topic(topic, key=["/id"], retain_time="0s", retain_bytes=0)
        publish_all(root, topic, (heavy(number, self.bytes) for number in range(self.records)))

    async def run(self, attacker: Attacker) -> None:
        request = sow_pb2.QueryRequest(topic=attacker.topic, order_by="/rank" if self.ordered else "")
        counts = [
            min(self.per_connection, self.streams - first) for first in range(0, self.streams, self.per_connection)
        ]
        await _all(attacker.hold(f"{SERVICE}/Query", request, count) for count in counts)


@dataclass(frozen=True, slots=True)
class HealthWatches:
    """Watches of the health service without a credential, on many connections."""

    connections: int
    watches: int

    def prepare(self, root: Client, topic: str) -> None:
        """Needs nothing."""

    async def run(self, attacker: Attacker) -> None:
        request = health_pb2.HealthCheckRequest()
        method = "/grpc.health.v1.Health/Watch"
        await _all(attacker.hold(method, request, self.watches, credential=False) for _ in range(self.connections))


@dataclass(frozen=True, slots=True)
class UnacknowledgedDurable:
    """A durable subscription to what the others publish. It reads, and acknowledges nothing."""

    def prepare(self, root: Client, topic: str) -> None:
        """The others publish to the topic."""

    async def run(self, attacker: Attacker) -> None:
        request = sow_pb2.SubscribeRequest(
            topic=attacker.topic, durable=sow_pb2.DurableAttachment(name="never"), earliest=True
        )
        await attacker.read(f"{SERVICE}/Subscribe", request)


def _publish(topic: str, payloads: Iterable[bytes], *, delta: bool = False) -> sow_pb2.PublishRequest:
    return sow_pb2.PublishRequest(
        topic=topic,
        records=[sow_pb2.PublishRecord(payload=payload) for payload in payloads],
        durability=types_pb2.DURABILITY_BUFFERED,
        delta=delta,
    )


# -- the table --------------------------------------------------------------------------------------------------------

DEEP: Final = 250
NESTED_NAMES: Final = 100_000
HIDE: Final = f'hide = ["/secret", "{"/a" * (DEEP - 3)}/in/secret"]'


@dataclass(frozen=True, slots=True)
class Attack:
    """A row of the table: what the attacker does, and what it needs for that."""

    name: str
    title: str
    whole: Assault
    small: Assault
    allow: str = "read"
    """The actions of its role."""
    more: str = ""
    """More of its grant."""
    followed: str = ""
    """Where the attacker follows what the others publish: the settings of the topic, as TOML."""
    limits: str = ""
    """Limits of its role, as TOML, where a default is too far. Servers of older checkouts do not know them."""
    bounds: str = ""
    """The same for the table [journal] of the configuration."""
    payload: int = 0
    """Bytes that each publish of the others has in addition."""
    journal: float = float("inf")
    """MiB that the journal of the topic may have in the end."""
    longest: float = 250.0
    """Milliseconds that a call of the others may wait."""
    small_memory: int = 512
    """MiB that the small attack may take."""

    @property
    def topic(self) -> str:
        """The topic of its grant."""
        return f"attacked.{self.name}"

    @property
    def published(self) -> str:
        """The topic that the others publish to."""
        return self.topic if self.followed else ORDERS

    def of(self, size: str) -> Assault:
        """The attack at the size `whole` or `small`."""
        return self.whole if size == "whole" else self.small


ATTACKS: Final = (
    Attack(
        "equal-keys",
        "gets of 256 equal keys, 1,000 paths, four at a time",
        whole=Gets(callers=4, keys=256, paths=1_000),
        small=Gets(callers=4, keys=256, paths=1_000),
    ),
    Attack(
        "wide-record",
        "the same of a record of 100,000 names",
        whole=Gets(callers=4, keys=256, paths=1_000, names=100_000),
        small=Gets(callers=4, keys=4, paths=200, names=100_000),
    ),
    Attack(
        "hidden-fields",
        "a role with `hide`: gets of, and a subscription to, a record of 1 MB nested 250 deep",
        whole=HiddenFields(DEEP, NESTED_NAMES),
        small=HiddenFields(DEEP, NESTED_NAMES, callers=1),
        allow="read publish",
        more=HIDE,
    ),
    Attack(
        "nested-deltas",
        "300 deltas in a request, of a record of 1 MB nested 250 deep",
        whole=Deltas(300, NESTED_NAMES, depth=DEEP),
        small=Deltas(6, NESTED_NAMES, depth=DEEP),
        allow="publish",
    ),
    Attack(
        "flat-deltas",
        "2,000 deltas in a request, of a flat record of 1 MB",
        whole=Deltas(2_000, NESTED_NAMES),
        small=Deltas(6, NESTED_NAMES),
        allow="publish",
    ),
    Attack(
        "unset-paths",
        "10,000 deltas in a request, with 1,000 paths to remove",
        whole=Deltas(10_000, 0, unset=1_000),
        small=Deltas(80, 0, unset=1_000),
        allow="publish",
    ),
    Attack(
        "unread-queries",
        "100 queries that nobody reads, on records of 8 KB",
        whole=UnreadQueries(100, 3_000, 8_000),
        small=UnreadQueries(10, 400, 8_000),
    ),
    Attack(
        "unread-large",
        "three queries that nobody reads, on records of 1 MB",
        whole=UnreadQueries(3, 400, 1_000_000),
        small=UnreadQueries(8, 20, 1_000_000),
        small_memory=128,
    ),
    Attack(
        "large-gets",
        "gets of 10,000 keys, 1,000 paths, four at a time",
        whole=Gets(callers=4, keys=10_000, paths=1_000, records=10_000),
        small=Gets(callers=4, keys=500, paths=1_000, records=500),
    ),
    Attack(
        "unread-orders",
        "twenty ordered queries that nobody reads",
        whole=UnreadQueries(20, 20_000, 2_000, ordered=True, per_connection=20),
        small=UnreadQueries(20, 500, 2_000, ordered=True, per_connection=20),
    ),
    Attack(
        "health-watches",
        "50 connections with four health watches each, without a credential",
        whole=HealthWatches(50, 4),
        small=HealthWatches(50, 4),
    ),
    Attack(
        "durable-retained",
        "a durable that is never acknowledged, with `retain_bytes`",
        whole=UnacknowledgedDurable(),
        small=UnacknowledgedDurable(),
        allow="read consume",
        followed='retain_time = "1m"\nretain_bytes = "1MiB"\n',
        limits='backlog_bytes = "4MiB"\n',
        journal=8,
        payload=100_000,
    ),
    Attack(
        "durable-held",
        "a durable that is never acknowledged, with a quota that holds publishes",
        whole=UnacknowledgedDurable(),
        small=UnacknowledgedDurable(),
        allow="read consume",
        followed="backlog_quota_entries = 10\n",
        bounds='hold_max = "1s"\n',
        longest=2_500.0,  # once; from then on the durable lets go
    ),
)


def attack_of(name: str) -> Attack:
    """The attack of a name."""
    return next(attack for attack in ATTACKS if attack.name == name)


# -- the server of attacks --------------------------------------------------------------------------------------------


def tables(attacks: Sequence[Attack], *, bounds: bool = True) -> str:
    """Tables of the server's configuration: the journal, and the topics that the others publish to. `prepare` makes the
    rest."""
    found = ['[journal]\nprune_interval = "200ms"\n', *(one.bounds for one in attacks if bounds)]
    found += [f'[topics.{ORDERS}]\nkey = ["/id"]\n']
    found += [f'[topics."{one.topic}"]\nkey = ["/id"]\n{one.followed}' for one in attacks if one.followed]
    return "".join(found)


def write_rights(folder: Path, attacks: Iterable[Attack], *, limits: bool = True) -> None:
    """The access file: the attackers, the others, and root."""
    rights = identity(OTHERS, OTHERS) + grant(OTHERS, ".*", "read publish")
    for one in attacks:
        rights += identity(one.name, one.name) + grant(one.name, re.escape(one.topic), one.allow, one.more)
        if one.limits and limits:
            rights += f"[roles.{one.name}.limits]\n{one.limits}"
    write_access(folder, rights)


def prepare_others(root: Client) -> None:
    """What the others read."""
    root.create_topic(RANKED, key=["/id"])
    for first in range(0, RANKED_RECORDS, 1_000):
        root.publish_many(RANKED, [ranked(number) for number in range(first, first + 1_000)], durability="buffered")
    root.publish_many(ORDERS, [order(number) for number in range(ORDERS_RECORDS)])


async def _main(name: str, size: str, address: str) -> None:
    attack = attack_of(name)
    attacker = Attacker(address, attack)

    async def tell() -> None:
        while True:
            told = {"answered": attacker.answered, "streams": attacker.streams, "refused": dict(attacker.refused)}
            print(json.dumps(told), flush=True)
            await asyncio.sleep(TELL_SECONDS)

    async with asyncio.TaskGroup() as group:
        group.create_task(tell())
        group.create_task(attack.of(size).run(attacker))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
