"""Queries through the contract: filters, orders, explanations, and that a query which is left stops (Q1 to Q5)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Final, NamedTuple, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import sow_pb2, sow_pb2_grpc, types_pb2
from tests.support.servers.server import ServerProcess, until

# With `--cells`, the names of these topics decide that they live in one cell, as stubs follow none (`spread`).
CONFIG: Final = """
[topics.flights]
key = ["/carrier", "/flight"]
index = ["/gate", "/delay"]
[topics.lots]
[topics.octets]
message_type = "binary"
"""
LARGE: Final = 40_000
Plan = sow_pb2.QueryPlan


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("queries"), CONFIG) as made:
        with grpc.insecure_channel(made.address_of("flights")) as channel:
            stub = sow_pb2_grpc.SowServiceStub(channel)
            publish(stub, "flights", [flight(number) for number in range(2_000)])
            pad = "x" * 400
            documents: list[dict[str, object]] = [{"n": number, "pad": pad} for number in range(LARGE)]
            for first in range(0, LARGE, 10_000):
                keys = [str(number) for number in range(first, first + 10_000)]
                publish(stub, "lots", documents[first : first + 10_000], keys)
        yield made
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture(scope="module")
def stub(server: ServerProcess) -> Iterator[sow_pb2_grpc.SowServiceStub]:
    with grpc.insecure_channel(server.address_of("flights")) as channel:
        yield sow_pb2_grpc.SowServiceStub(channel)


def flight(number: int) -> dict[str, object]:
    return {
        "carrier": ("LH", "AF", "BA", "KL")[number % 4],
        "flight": number,
        "gate": f"G{number % 200}",
        "delay": number % 500 if number % 3 else None,
        "legs": [{"to": "FRA"}, {"to": "JFK"}] if number % 50 == 0 else [{"to": "CDG"}],
    }


def publish(
    stub: sow_pb2_grpc.SowServiceStub, topic: str, documents: list[dict[str, object]], keys: list[str] | None = None
) -> None:
    request = sow_pb2.PublishStreamRequest(
        topic=topic,
        key=keys,
        payload=[json.dumps(document).encode() for document in documents],
        durability=types_pb2.DURABILITY_BUFFERED,
    )
    (response,) = stub.PublishStream(iter([request]))
    assert response.applied == len(documents)


class Answer(NamedTuple):
    header: sow_pb2.QueryHeader
    keys: list[str]
    payloads: list[bytes]
    footer: sow_pb2.QueryFooter


def ask(stub: sow_pb2_grpc.SowServiceStub, topic: str, text: str = "", **options: object) -> Answer:
    request = sow_pb2.QueryRequest(topic=topic, filter=text, **options)  # type: ignore[arg-type]  # fields by name
    first, *batches, last = stub.Query(request, timeout=60)
    assert first.HasField("header")
    assert last.HasField("footer")
    assert all(part.batch.key for part in batches), "there are no empty batches"
    keys = [key for part in batches for key in part.batch.key]
    payloads = [payload for part in batches for payload in part.batch.payload]
    return Answer(first.header, keys, payloads, last.footer)


def refused(stub: sow_pb2_grpc.SowServiceStub, topic: str, text: str = "", **options: object) -> tuple[str, str, str]:
    """Reason, field, message."""
    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, topic, text, **options)
    trailing = cast("grpc.Call", caught.value).trailing_metadata()
    (details,) = [value for name, value in trailing if name == "grpc-status-details-bin"]
    found = status_pb2.Status.FromString(details)
    info = error_details_pb2.ErrorInfo()
    assert found.details[0].Unpack(info)
    return info.reason, info.metadata["field"], found.message


def expected(wanted: list[int]) -> list[str]:
    """The keys of flights, in their order."""
    return sorted(f"{flight(number)['carrier']}|{number}" for number in wanted)


# --- filters, orders, plans ------------------------------------------------------------------------------------------


def test_a_filter_leaves_out_records_that_do_not_match(stub: sow_pb2_grpc.SowServiceStub) -> None:
    found = ask(stub, "flights", "/delay >= 498 AND NOT /carrier = 'KL'", batch_size=2)
    numbers = [n for n in range(2_000) if n % 3 and n % 500 >= 498 and n % 4 != 3]
    assert found.keys == expected(numbers)
    assert [json.loads(payload) for payload in found.payloads] == [flight(int(key[3:])) for key in found.keys]
    assert (found.footer.matched, found.footer.returned) == (len(numbers), len(numbers))
    assert not found.footer.HasField("plan")
    assert found.header.as_of_micros > 0
    assert found.header.bookmark


def test_an_order_sorts_and_takes_the_first(stub: sow_pb2_grpc.SowServiceStub) -> None:
    found = ask(stub, "flights", order_by="/delay DESC, /flight", top_n=4, skip_n=1, select={"include": ["/delay"]})
    by = sorted((n for n in range(2_000) if n % 3), key=lambda n: (-(n % 500), n))
    assert [int(key[3:]) for key in found.keys] == by[1:5]
    assert [json.loads(payload) for payload in found.payloads] == [{"delay": n % 500} for n in by[1:5]]
    assert (found.footer.matched, found.footer.returned) == (2_000, 4)
    last = ask(stub, "flights", order_by="/delay", keys_only=True)
    assert len(last.keys) == 2_000
    assert last.payloads == []
    assert all(int(key[3:]) % 3 == 0 for key in last.keys[-667:]), "nulls are last"


@pytest.mark.parametrize(
    ("text", "access", "index_path", "probes", "scanned"),
    [
        ("/carrier = 'LH' AND /flight IN (4, 8)", Plan.ACCESS_POINTS, "", 2, 2),
        ("@key = 'LH|4'", Plan.ACCESS_POINTS, "", 1, 1),
        ("/carrier = 'LH' AND /flight BEGINS WITH '19'", Plan.ACCESS_KEY_RANGES, "", 1, 27),
        ("/gate = 'G7'", Plan.ACCESS_INDEX, "/gate", 1, 10),
        ("/delay >= 491 AND /legs/to = 'FRA'", Plan.ACCESS_INDEX, "/delay", 1, 24),
        ("/legs/to = 'JFK'", Plan.ACCESS_SCAN, "", 0, 2_000),
        ("/flight = 4", Plan.ACCESS_SCAN, "", 0, 2_000),
        ("/delay < 3 AND /delay BETWEEN 2 AND 1", Plan.ACCESS_NOTHING, "", 0, 0),
    ],
)
def test_an_explanation_says_how_records_are_found(
    stub: sow_pb2_grpc.SowServiceStub,
    text: str,
    access: sow_pb2.QueryPlan.Access.ValueType,
    index_path: str,
    probes: int,
    scanned: int,
) -> None:
    found = ask(stub, "flights", text, explain=True)
    plan = found.footer.plan
    assert (plan.access, plan.index_path, plan.probes) == (access, index_path, probes)
    assert (found.keys, found.footer.scanned) == ([], scanned)
    assert (plan.index_entries > 0) == (access == Plan.ACCESS_INDEX)
    real = ask(stub, "flights", text)
    assert (real.footer.matched, real.footer.returned, real.footer.scanned) == (
        found.footer.matched,
        found.footer.returned,
        found.footer.scanned,
    )


def test_an_explanation_has_filter_and_order_as_they_were_understood(stub: sow_pb2_grpc.SowServiceStub) -> None:
    plan = ask(stub, "flights", "/gate='G1'&&(/delay>5)", order_by=" /delay desc ,@key asc", explain=True).footer.plan
    assert (plan.filter, plan.order_by) == ("/gate = 'G1' AND /delay > 5", "/delay DESC, @key")
    plan = ask(stub, "flights", explain=True).footer.plan
    assert (plan.filter, plan.order_by, plan.access) == ("", "", Plan.ACCESS_SCAN)


def test_counts_keys_and_pages_take_a_filter(stub: sow_pb2_grpc.SowServiceStub) -> None:
    text = "/legs/to = 'JFK'"
    numbers = [n for n in range(2_000) if n % 50 == 0]
    counted = ask(stub, "flights", text, count_only=True)
    assert (counted.keys, counted.footer.matched) == ([], len(numbers))
    assert ask(stub, "flights", text, keys=["LH|0", "LH|4", "BA|50"]).keys == ["BA|50", "LH|0"]
    keys: list[str] = []
    token = ""
    while token or not keys:
        page = ask(stub, "flights", text, page_size=7, page_token=token)
        keys += page.keys
        token = page.footer.next_page_token
    assert keys == expected(numbers)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_the_message_names_the_fault(stub: sow_pb2_grpc.SowServiceStub) -> None:
    reason, field, message = refused(stub, "flights", "/delay > AND /gate = 'G1'")
    assert (reason, field) == ("FILTER_INVALID", "filter")
    assert message.splitlines()[1:] == ["  /delay > AND /gate = 'G1'", "           ^"]
    reason, field, message = refused(stub, "flights", order_by="/delay DOWN")
    assert (reason, field) == ("ORDER_INVALID", "order_by")
    assert message.splitlines()[1:] == ["  /delay DOWN", "         ^"]
    assert refused(stub, "octets", "/delay > 3")[:2] == ("UNSUPPORTED_FOR_MESSAGE_TYPE", "filter")
    assert refused(stub, "octets", order_by="/delay")[:2] == ("UNSUPPORTED_FOR_MESSAGE_TYPE", "order_by")
    assert refused(stub, "nowhere", "/delay > 3")[0] == "TOPIC_NOT_FOUND"
    assert refused(stub, "flights", order_by="/delay", page_size=3, page_token="x")[0] == "PAGE_TOKEN_INVALID"


def test_metadata_of_a_binary_topic_can_be_asked(stub: sow_pb2_grpc.SowServiceStub) -> None:
    request = sow_pb2.PublishStreamRequest(topic="octets", key=["a", "b", "c"], payload=[b"\xff", b"\xfe", b"\xfd"])
    list(stub.PublishStream(iter([request])))
    assert ask(stub, "octets", "@key >= 'b'", order_by="@version DESC").keys == ["c", "b"]


# --- a query that is left --------------------------------------------------------------------------------------------

SLOW: Final = "/pad LIKE '(x+y|x+z)+$'"
"""Matches nothing, and takes its time over every record."""


def test_a_query_that_is_left_while_it_finds_nothing_stops(
    server: ServerProcess, stub: sow_pb2_grpc.SowServiceStub
) -> None:
    """Nothing is sent that could fail: only the bounded pieces of work let the server notice that nobody waits."""
    before = processor_seconds(server)
    assert ask(stub, "lots", SLOW).keys == []
    one = processor_seconds(server) - before
    calls = [stub.Query(sow_pb2.QueryRequest(topic="lots", filter=SLOW)) for _ in range(40)]
    for call in calls:
        assert next(call).HasField("header")
    before = processor_seconds(server)
    for call in calls:
        call.cancel()
    until(lambda: idle(server), 30, "the server to be idle")
    spent = processor_seconds(server) - before
    assert spent < 10 * one, f"the whole of 40 queries would take {40 * one:.1f} s"


@pytest.mark.long
def test_a_sort_that_is_left_stops(server: ServerProcess, stub: sow_pb2_grpc.SowServiceStub) -> None:
    before = processor_seconds(server)
    assert len(ask(stub, "lots", order_by="/n DESC", keys_only=True).keys) == LARGE
    one = processor_seconds(server) - before
    calls = [stub.Query(sow_pb2.QueryRequest(topic="lots", order_by="/n", keys_only=True)) for _ in range(40)]
    for call in calls:
        next(call)
    before = processor_seconds(server)
    for call in calls:
        call.cancel()
    until(lambda: idle(server), 30, "the server to be idle")
    assert processor_seconds(server) - before < 20 * one
    assert len(ask(stub, "lots", order_by="/n DESC").keys) == LARGE, "their memory is free again"


def processor_seconds(server: ServerProcess) -> float:
    spent = 0
    for pid in server.pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent += int(fields[11]) + int(fields[12])
    return spent / 100


def idle(server: ServerProcess) -> bool:
    before = processor_seconds(server)
    time.sleep(0.3)
    return processor_seconds(server) - before < 0.06


# --- groups ----------------------------------------------------------------------------------------------------------


def named(**expressions: str) -> list[sow_pb2.NamedExpression]:
    return [sow_pb2.NamedExpression(name=name, expression=text) for name, text in expressions.items()]


def test_groups_have_results_in_place_of_records(stub: sow_pb2_grpc.SowServiceStub) -> None:
    answer = ask(
        stub,
        "flights",
        "/delay IS NULL OR /delay < 400",
        group_by=[sow_pb2.NamedExpression(expression="/carrier")],
        aggregate=named(n="COUNT(*)", d="SUM(/delay)", gates="COUNT(DISTINCT /gate)"),
        having="/n > 0",
        order_by="/d DESC",
        top_n=3,
    )
    delays: dict[str, list[int]] = {"LH": [], "AF": [], "BA": [], "KL": []}
    for number in range(2_000):
        delay = number % 500 if number % 3 else 0
        if delay < 400:
            delays[("LH", "AF", "BA", "KL")[number % 4]].append(delay)
    best = sorted(delays, key=lambda carrier: (-sum(delays[carrier]), carrier))[:3]
    results = list(map(json.loads, answer.payloads))
    assert [(each["carrier"], each["d"], each["n"]) for each in results] == [
        (carrier, sum(delays[carrier]), len(delays[carrier])) for carrier in best
    ]
    assert answer.keys == best
    footer = answer.footer
    assert (footer.groups, footer.returned, footer.ungrouped) == (4, 3, 0)
    assert footer.matched == sum(map(len, delays.values()))


def test_groups_of_a_large_topic_are_exact(stub: sow_pb2_grpc.SowServiceStub) -> None:
    """So many records are read in a reader process, where there is one."""
    numbers = named(n="COUNT(*)", s="SUM(/n / 10)", a="AVG(/n)")
    answer = ask(stub, "lots", group_by=named(rest="/n % 7"), aggregate=numbers)
    for rest, payload in enumerate(answer.payloads):
        members = range(rest, LARGE, 7)
        exact = sum(Fraction(number // 10 if number % 10 == 0 else number / 10) for number in members)
        wanted = {"rest": rest, "n": len(members), "s": float(exact), "a": sum(members) / len(members)}
        assert json.loads(payload) == wanted
    assert (len(answer.keys), answer.footer.matched, answer.footer.groups) == (7, LARGE, 7)


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"aggregate": named(s="SUM(/delay) + /gate")}, "EXPRESSION_INVALID", "aggregate[0]"),
        ({"aggregate": named(n="COUNT(*)"), "keys_only": True}, "INVALID_ARGUMENT", "aggregate"),
        ({"aggregate": named(n="COUNT(*)"), "select": {"include": ["/a"]}}, "INVALID_ARGUMENT", "aggregate"),
        ({"aggregate": named(n="COUNT(*)"), "order_by": "/delay"}, "ORDER_INVALID", "order_by"),
        ({"having": "true"}, "EXPRESSION_INVALID", "having"),
        ({"group_by": named(**{f"g{n}": "/a" for n in range(9)})}, "EXPRESSION_INVALID", "group_by"),
    ],
)
def test_bad_aggregates_are_refused(
    stub: sow_pb2_grpc.SowServiceStub, fields: dict[str, object], reason: str, field: str
) -> None:
    assert refused(stub, "flights", "", **fields)[:2] == (reason, field)
