"""Reading a whole topic against Redis: sow's query stream, whose client yields records, and SCAN with MGET."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Final

from benchmarks.bare_rocks import BareRocks
from benchmarks.bare_server import BareServer
from benchmarks.documents import DOCUMENT_BYTES, documents, keys
from benchmarks.processes import TOPIC, CpuMeter, NotInstalled, SowServer
from benchmarks.publishing import publish
from benchmarks.redis_peer import RedisServer
from benchmarks.rows import PER_SECOND, TIMES, Figure, Limit, Row, Target, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow_client import Client

TARGET: Final = Target(1.2, f"{TIMES} Redis", ambition=2.5)
COLUMNS_TARGET: Final = Target(0.35, f"{TIMES} the bare gRPC stream", ambition=0.6)
LOAD_CHUNK: Final = 100_000


def whole_topic(setting: Setting) -> Iterator[Row]:
    """Row 3. Both sides use the keys and payloads of every record."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(5, quick=3)
    skipped = ""
    redis: RedisServer | None = None
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        bare_client = stack.enter_context(Client(stack.enter_context(BareServer()).address))
        bare_rocks = stack.enter_context(closing(BareRocks(setting.directory / "rocks")))
        try:
            redis = stack.enter_context(RedisServer(setting.directory / "redis"))
        except NotInstalled as missing:
            skipped = str(missing)
        setting.say(f"loading {records:,} records into each")
        for first in range(0, records, LOAD_CHUNK):
            numbers = range(first, min(first + LOAD_CHUNK, records))
            payloads, names = documents(numbers), keys(numbers)
            publish(client, payloads, "buffered")
            bare_rocks.put_rate(names, payloads, new=True, sync=False)
            if redis is not None:
                redis.load(names, payloads)

        our_cpu = CpuMeter(server)
        peer_cpu: CpuMeter | None = None
        contestants: dict[str, Callable[[], float]] = {
            "sow": lambda: our_cpu.measured(records, lambda: query_rate(client, records))
        }
        if redis is not None:
            peer, meter = redis, CpuMeter(redis)
            peer_cpu = meter
            contestants["redis"] = lambda: meter.measured(records, lambda: _scan_rate(peer, records))
        contestants["sow batches"] = lambda: _batch_rate(client, records)
        contestants["bare stream"] = lambda: query_rate(bare_client, records)
        contestants["bare scan"] = bare_rocks.scan_rate
        setting.say(f"{rounds} rounds")
        rates = take_turns(rounds, contestants)
        note = str(our_cpu)
        if redis is not None:
            note = f"{ratio_range(rates['sow'], rates['redis'])}; {note}; Redis: {peer_cpu}; {redis.described}"

    yield from _judged(rates, f"{rounds} rounds of {records:,} records", note=note, skipped=skipped)


def _judged(rates: Mapping[str, Sequence[float]], case: str, *, note: str, skipped: str) -> Iterator[Row]:
    """The rows of the rates of all contestants. Without Redis its row says why it is `skipped`."""

    def limits(of: str) -> tuple[Limit, ...]:
        ours = statistics.median(rates[of])
        return tuple(
            Limit(name, Figure(limit := statistics.median(rates[contestant]), PER_SECOND), ours / limit)
            for name, contestant in (
                ("the bare rocksdict cursor", "bare scan"),
                ("the bare gRPC stream", "bare stream"),
            )
        )

    ours = Figure(statistics.median(rates["sow"]), PER_SECOND)
    if "redis" not in rates:
        yield Row(f"records: {case}", ours, target=TARGET, limits=limits("sow"), note=note, skipped=skipped)
    else:
        yield Row(
            f"records: {case}",
            ours,
            peer=Figure(statistics.median(rates["redis"]), PER_SECOND),
            judged=ratio(rates["sow"], rates["redis"]),
            target=TARGET,
            limits=limits("sow"),
            note=note,
        )
    yield Row(
        f"batches of columns: {case}",
        Figure(statistics.median(rates["sow batches"]), PER_SECOND),
        peer=Figure(statistics.median(rates["bare stream"]), PER_SECOND),
        judged=ratio(rates["sow batches"], rates["bare stream"]),
        target=COLUMNS_TARGET,
        limits=limits("sow batches"),
        note="a reader that uses columns directly; peer: the bare gRPC stream",
    )


def query_rate(client: Client, records: int) -> float:
    """Reads the whole topic, record by record; records per second."""
    begin = time.perf_counter()
    count = size = 0
    for record in client.query(TOPIC, top_n=records):
        count += 1
        size += len(record.payload) + (not record.key)
    seconds = time.perf_counter() - begin
    assert (count, size) == (records, records * DOCUMENT_BYTES), f"{count} records of {size} bytes came"
    return count / seconds


def _batch_rate(client: Client, records: int) -> float:
    begin = time.perf_counter()
    count = 0
    for batch in client.query(TOPIC).batches():
        count += len(batch.keys)
        assert len(batch.payloads) == len(batch.keys), "columns of one length"
    seconds = time.perf_counter() - begin
    assert count == records, f"{count} records came"
    return count / seconds


def _scan_rate(redis: RedisServer, records: int) -> float:
    begin = time.perf_counter()
    count = size = 0
    for key, payload in redis.scan():
        count += 1
        size += len(payload) + (not key)
    seconds = time.perf_counter() - begin
    # SCAN may give a key twice while the table is resized. Resizing is finished by now, so this check is exact.
    assert (count, size) == (records, records * DOCUMENT_BYTES), f"{count} records of {size} bytes came"
    return count / seconds
