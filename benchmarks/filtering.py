"""Filters over many records: a scan that evaluates every record, and an index that finds the few equal ones.

Queries are made with a plain gRPC stub, so they do not include the cost of `sow_client`.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Final

import grpc
import orjson

from benchmarks.bare_rocks import BareRocks
from benchmarks.documents import KEY_PATHS, TTL_SECONDS, documents, keys
from benchmarks.processes import TOPIC, CpuMeter, SowServer
from benchmarks.rows import MILLISECONDS, PER_SECOND, TIMES, Figure, Limit, Row, Target, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow.v1 import admin_pb2, admin_pb2_grpc, sow_pb2, sow_pb2_grpc
from sow_client import Client

SCAN_TARGET: Final = Target(250_000, PER_SECOND)
BARE_TARGET: Final = Target(0.5, f"{TIMES} the bare loop")
INDEX_TARGET: Final = Target(100, f"{TIMES} the scan")
FILTER: Final = "/price > 500 AND /side = 'buy' AND /quantity < 5000"
"""About one record in eight matches."""
LOAD_CHUNK: Final = 100_000
BATCH_RECORDS: Final = 1_000
INDEXED: Final = "indexed"
MATCHES: Final = 10
LOOK_UPS: Final = 100
"""Queries of a round that use the index; one query scans."""
_OPTIONS: Final = (("grpc.max_receive_message_length", 20 * 2**20),)


def filtered_scan(setting: Setting) -> Iterator[Row]:
    """Three predicates over every record, against a loop that reads the same records and decodes them."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(5, quick=3)
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        stub = sow_pb2_grpc.SowServiceStub(stack.enter_context(grpc.insecure_channel(server.address, options=_OPTIONS)))
        bare = stack.enter_context(closing(BareRocks(setting.directory / "rocks")))
        setting.say(f"loading {records:,} records into each")
        expected = 0
        for first in range(0, records, LOAD_CHUNK):
            numbers = range(first, min(first + LOAD_CHUNK, records))
            payloads = documents(numbers)
            expected += sum(map(_matches, payloads))
            _publish(client, TOPIC, payloads)
            bare.put_rate(keys(numbers), payloads, new=True, sync=False)

        def scan_rate(**options: bool) -> float:
            begin = time.perf_counter()
            footer, found = _query(stub, TOPIC, FILTER, **options)
            seconds = time.perf_counter() - begin
            assert (footer.matched, footer.scanned) == (expected, records), f"{footer}, and {expected} match"
            assert found == (0 if options else expected), f"{found} came"
            return records / seconds

        cpu = CpuMeter(server)
        contestants: dict[str, Callable[[], float]] = {
            "sow": lambda: cpu.measured(records, scan_rate),
            "count": lambda: scan_rate(count_only=True),
            "bare": lambda: bare.decode_rate(orjson.loads),
        }
        setting.say(f"{rounds} rounds")
        rates = take_turns(rounds, contestants)
    case = f"{rounds} rounds of {records:,} records, {expected / records:.1%} match"
    ours = Figure(statistics.median(rates["sow"]), PER_SECOND)
    peer = Figure(statistics.median(rates["bare"]), PER_SECOND)
    yield Row(f"records asked, those that match returned: {case}", ours, judged=ours, target=SCAN_TARGET, note=str(cpu))
    yield Row(
        f"the same, against a bare rocksdict cursor + orjson.loads: {case}",
        ours,
        peer=peer,
        judged=ratio(rates["sow"], rates["bare"]),
        target=BARE_TARGET,
        note=ratio_range(rates["sow"], rates["bare"]),
    )
    counted = statistics.median(rates["count"])
    yield Row(
        f"records asked, only counted: {case}",
        Figure(counted, PER_SECOND),
        limits=(Limit("the bare loop", peer, counted / peer.value),),
        note="for information",
    )


def index_equality(setting: Setting) -> Iterator[Row]:
    """The records with one value in a field, by an index on it and by a scan."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(5, quick=3)
    # A field with about one value per ten records.
    field = setting.size(0, quick=1)
    name = ("account", "quantity")[field]
    counts: Counter[object] = Counter()
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        channel = stack.enter_context(grpc.insecure_channel(server.address, options=_OPTIONS))
        stub = sow_pb2_grpc.SowServiceStub(channel)
        settings = admin_pb2.TopicSettings(
            key=orjson.loads(KEY_PATHS), index=[f"/{name}"], expiration=admin_pb2.EXPIRATION_ENABLED
        )
        admin_pb2_grpc.AdminServiceStub(channel).CreateTopic(
            admin_pb2.CreateTopicRequest(name=INDEXED, settings=settings)
        )
        setting.say(f"loading {records:,} records into each of two topics")
        for first in range(0, records, LOAD_CHUNK):
            payloads = documents(range(first, min(first + LOAD_CHUNK, records)))
            counts.update(orjson.loads(payload)[name] for payload in payloads)
            _publish(client, TOPIC, payloads)
            _publish(client, INDEXED, payloads)
        values = [value for value, count in counts.items() if count == MATCHES][:LOOK_UPS]
        filters = [f"/{name} = {value!r}" for value in values]
        plan = _query(stub, INDEXED, filters[0], explain=True)[0].plan
        assert plan.access == sow_pb2.QueryPlan.ACCESS_INDEX, f"the plan is {plan}"

        def seconds(topic: str, asked: Sequence[str]) -> float:
            spent = []
            for text in asked:
                begin = time.perf_counter()
                footer, found = _query(stub, topic, text)
                spent.append(time.perf_counter() - begin)
                assert found == MATCHES, f"{text}: {found} came, {footer}"
            return statistics.median(spent)

        setting.say(f"{rounds} rounds")
        figures = take_turns(
            rounds,
            {"index": lambda: seconds(INDEXED, filters), "scan": lambda: seconds(TOPIC, filters[:1])},
        )
    yield Row(
        f"{MATCHES} matches among {records:,} records, median of {len(filters)} queries, {rounds} rounds",
        Figure(statistics.median(figures["index"]) * 1000, MILLISECONDS),
        peer=Figure(statistics.median(figures["scan"]) * 1000, MILLISECONDS),
        judged=ratio(figures["scan"], figures["index"]),
        target=INDEX_TARGET,
        note=f"{ratio_range(figures['scan'], figures['index'])}; the peer is our own scan of a topic without the index",
    )


def _matches(payload: bytes) -> bool:
    document = orjson.loads(payload)
    return bool(document["price"] > 500 and document["side"] == "buy" and document["quantity"] < 5000)


def _publish(client: Client, topic: str, payloads: Sequence[bytes]) -> None:
    with client.publisher(topic, ttl=TTL_SECONDS, durability="buffered", batch_records=BATCH_RECORDS) as publisher:
        for payload in payloads:
            publisher.publish(payload)


def _query(
    stub: sow_pb2_grpc.SowServiceStub, topic: str, text: str, *, count_only: bool = False, explain: bool = False
) -> tuple[sow_pb2.QueryFooter, int]:
    """The footer, and the number of received records."""
    request = sow_pb2.QueryRequest(topic=topic, filter=text, count_only=count_only, explain=explain)
    found = 0
    for response in stub.Query(request):
        if response.HasField("footer"):
            return response.footer, found
        found += len(response.batch.key)
    raise AssertionError("the answer was cut off")
