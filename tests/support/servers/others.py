"""The others: an identity that does what callers do, while another one does its worst, and how long it waits.

python -m tests.support.servers.others ADDRESS TOPIC PAYLOAD   # until a line comes; then its samples as JSON

[1]  `Others.paced` begins calls by a clock, not after answers: a server that stands shows in every call that begins
     meanwhile. `Others.rounds` makes a number of calls of each kind, one after the other.
[2]  Every answer is compared with the right one.
[3]  A wait has an end in time: a call that has no answer by then has waited so long, and failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sow.v1 import sow_pb2, sow_pb2_grpc

OTHERS: Final = "others"
ORDERS: Final = "orders"
"""Small: every call of it is short."""
ORDERS_RECORDS: Final = 1_000
RANKED: Final = "ranked"
"""Large enough for a reader process."""
RANKED_RECORDS: Final = 5_000
METADATA: Final = (("authorization", f"Bearer {OTHERS}"),)
CHANNEL: Final = (("grpc.use_local_subchannel_pool", 1),)
CALL_SECONDS: Final = 30.0
LATE_SECONDS: Final = 0.25
UNDER_WAY_MAX: Final = 50
"""Calls of a kind at a time, when the server does not answer."""
TICKS: Final = {"get": 0.02, "publish": 0.05, "query": 0.1, "top": 0.5, "health": 0.2}
"""The kinds of calls, and the seconds between two of them."""
TOP: Final = 5


def order(number: int) -> dict[str, object]:
    """A record of the small topic."""
    return {"id": f"o{number}", "price": number, "symbol": f"s{number % 10}"}


def ranked(number: int) -> dict[str, object]:
    """A record of the large topic."""
    return {"id": f"r{number}", "rank": number * 7919 % 100_003, "symbol": f"s{number % 10}"}


QUERY_ANSWER: Final = [f"o{number}" for number in range(ORDERS_RECORDS - 1, 0, -10)][:TOP]
TOP_ANSWER: Final = [f"r{n}" for n in sorted(range(1, RANKED_RECORDS), key=lambda n: -(n * 7919 % 100_003))][:TOP]


class WrongAnswer(Exception):
    """An answer that is not the right one."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One call."""

    kind: str
    begun: float
    """`time.monotonic`, which all processes of a machine share."""
    seconds: float
    failure: str
    """Empty: the right answer came."""


class Others:
    """The calls, and their samples."""

    def __init__(self, address: str, channel: grpc.aio.Channel, topic: str, payload: int) -> None:
        """`topic`: the one to publish to. `payload`: bytes that each publish has in addition."""
        self._address = address
        self._topic = topic
        self._stub = sow_pb2_grpc.SowServiceStub(channel)
        self._payload = "x" * payload
        self._published = 0
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "get": self._get,
            "publish": self._publish,
            "query": self._query,
            "top": self._top,
            "health": self._health,
        }
        self.samples: list[Sample] = []
        self._under_way: dict[asyncio.Task[None], tuple[str, float]] = {}

    @classmethod
    @asynccontextmanager
    async def connected(cls, address: str, topic: str, payload: int) -> AsyncGenerator[Others, None]:
        """With a connection, on the running loop."""
        async with grpc.aio.insecure_channel(address, options=CHANNEL) as channel:
            yield cls(address, channel, topic, payload)

    async def rounds(self, count: int) -> None:
        """So many calls of each kind, all kinds at once."""

        async def one(kind: str) -> None:
            for _ in range(count):
                await self._sampled(kind)

        async with asyncio.TaskGroup() as group:
            for kind in self._kinds:
                group.create_task(one(kind))

    async def paced(self) -> None:
        """Calls of all kinds by the clock, for ever ([1])."""
        async with asyncio.TaskGroup() as group:
            for kind, seconds in TICKS.items():
                group.create_task(self._paced(kind, seconds))

    async def _paced(self, kind: str, seconds: float) -> None:
        due = time.monotonic()
        while True:
            if sum(under == kind for under, _ in self._under_way.values()) < UNDER_WAY_MAX:
                task = asyncio.create_task(self._sampled(kind))
                self._under_way[task] = kind, time.monotonic()
                task.add_done_callback(lambda task: self._under_way.pop(task, None))
            due += seconds
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def give_up(self) -> None:
        """Calls without an answer have waited until now. Those that have only begun say nothing."""
        now = time.monotonic()
        for task, (kind, begun) in list(self._under_way.items()):
            task.cancel()
            if now - begun > LATE_SECONDS:
                self.samples.append(Sample(kind, begun, now - begun, "no answer"))

    async def _sampled(self, kind: str) -> None:
        begun, failure = time.monotonic(), ""
        try:
            await self._kinds[kind]()
        except grpc.aio.AioRpcError as error:
            failure = f"{error.code().name} {(error.details() or '')[:120]}"
        except WrongAnswer as error:
            failure = f"wrong: {error}"
        self.samples.append(Sample(kind, begun, time.monotonic() - begun, failure))

    async def _get(self) -> None:
        answer = await self._stub.Get(
            sow_pb2.GetRequest(topic=ORDERS, keys=["o7"]), metadata=METADATA, timeout=CALL_SECONDS
        )
        if [json.loads(record.payload) for record in answer.records] != [order(7)]:
            raise WrongAnswer(str(answer)[:200])

    async def _publish(self) -> None:
        self._published += 1
        document = {"id": "new", "price": -1, "symbol": "none", "number": self._published, "text": self._payload}
        request = sow_pb2.PublishRequest(
            topic=self._topic, records=[sow_pb2.PublishRecord(payload=json.dumps(document).encode())]
        )
        answer = await self._stub.Publish(request, metadata=METADATA, timeout=CALL_SECONDS)
        if [(one.key, one.version > 0, one.duplicate) for one in answer.results] != [("new", True, False)]:
            raise WrongAnswer(str(answer)[:200])

    async def _query(self) -> None:
        await self._ask(ORDERS, "/symbol = 's9' AND /price > 0", "/price DESC", QUERY_ANSWER)

    async def _top(self) -> None:
        await self._ask(RANKED, "/rank > 0", "/rank DESC", TOP_ANSWER)

    async def _ask(self, topic: str, filter_text: str, order_by: str, right: list[str]) -> None:
        request = sow_pb2.QueryRequest(topic=topic, filter=filter_text, order_by=order_by, top_n=TOP)
        keys: list[str] = []
        has_footer = False
        async for answer in self._stub.Query(request, metadata=METADATA, timeout=CALL_SECONDS):
            keys += answer.batch.key
            has_footer = answer.HasField("footer")
        if keys != right or not has_footer:
            raise WrongAnswer(f"{keys} {has_footer}")

    async def _health(self) -> None:
        """As a probe asks, on a new connection."""
        async with grpc.aio.insecure_channel(self._address, options=CHANNEL) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]  # not in its stubs
                health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS
            )
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise WrongAnswer(str(answer))


async def _main(address: str, topic: str, payload: str) -> None:
    async with Others.connected(address, topic, int(payload)) as others:
        await others.rounds(3)
        others.samples.clear()
        print("ready", flush=True)
        pacing = asyncio.create_task(others.paced())
        await asyncio.to_thread(sys.stdin.readline)
        pacing.cancel()
        await asyncio.gather(pacing, return_exceptions=True)
        others.give_up()
        print(json.dumps([asdict(sample) for sample in others.samples]), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
