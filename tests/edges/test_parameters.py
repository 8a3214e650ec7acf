"""Parameters of filters: whatever a user types is a value, in every call of both clients (rule Q9)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from concurrent import futures
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sow.v1 import sow_pb2, sow_pb2_grpc, types_pb2
from sow_client import EARLIEST, Client, FailedPrecondition, InvalidArgument, SowError
from tests.support.oracles.access import GUARDED, grant, identity, write_access
from tests.support.oracles.access import client_of as access_client
from tests.support.oracles.examples import examples
from tests.support.servers.server import DidNotStart, ServerProcess
from tests.support.simulation.clients import Connect, connect
from tests.support.stores.describing import describing

__all__ = ["connect"]  # a fixture

CONFIG: Final = """
[topics.cars]
key = ["/id"]
expiration = "enabled"
index = ["/Name"]
[topics.large]
key = ["/id"]
[limits]
exports_max = 10
"""
HOSTILE: Final = (
    "O'Brien",
    "' OR true OR /Name = '",
    "x' OR '1'='1",
    '" OR 1 = 1',
    "\\",
    "\\'",
    "a\\",
    "'",
    "''",
    "",
    " ",
    ":name",
    "/Name",
    "null",
    "true",
    "5",
    "5.0",
    "[1, 2]",
    "1e999",
    "\x00",
    "a\nb",
    "\u2028",
    "%s",
    "); DROP",
    "🚗",
    "e\u0301",
    "\u00e9",
    ".*",
)
"""Texts with which a filter in an f-string selects other records, or does not parse."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("parameters"), CONFIG) as made:
        with made.client() as client, client.publisher("cars") as publisher:
            for number, name in enumerate(HOSTILE):
                publisher.publish({"id": number, "Name": name, "n": number, "sold": number % 2 == 0})
        yield made


@pytest.fixture
def client(server: ServerProcess, connect: Connect) -> Iterator[Client]:
    with connect(server.address) as made:
        yield made


def ids(records: Any) -> list[int]:
    return sorted(record.data["id"] for record in records)


# --- a value is a value ----------------------------------------------------------------------------------------------


def test_the_text_of_a_user_selects_exactly_its_records(client: Client) -> None:
    for number, name in enumerate(HOSTILE):
        assert ids(client.query("cars", "/Name = :name", {"name": name})) == [number]


@settings(max_examples=examples(200), deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_selects_the_records_that_pythons_equality_selects(server: ServerProcess, text: str) -> None:
    """Hypothesis finds the quotes, backslashes and line ends by which a text in an f-string becomes a filter."""
    with server.client() as client:
        client.publish("cars", {"id": "drawn", "Name": text})
        expected = sorted([*[number for number, name in enumerate(HOSTILE) if name == text]])
        found = [record.data["id"] for record in client.query("cars", "/Name = :name", {"name": text})]
        assert "drawn" in found
        assert sorted(one for one in found if one != "drawn") == expected
        others = [record.data["id"] for record in client.query("cars", "NOT /Name = :name", {"name": text})]
        assert sorted([*found, *others], key=str) == sorted([*range(len(HOSTILE)), "drawn"], key=str)
        prefix = client.count("cars", "/Name BEGINS WITH :name", {"name": text})
        assert prefix == 1 + sum(name.startswith(text) for name in HOSTILE)


class Colour(str, enum.Enum):  # noqa: UP042 - the str() of such a one is its name, and not its text
    RED = "true"


@pytest.mark.parametrize(
    ("text", "parameters", "found"),
    [
        ("/n = :n", {"n": 3}, [3]),
        ("/n = :n", {"n": 3.0}, [3]),
        ("/n > :low AND /n <= :high", {"low": 3, "high": 5}, [4, 5]),
        ("/n IN :list", {"list": [1, 3, 99]}, [1, 3]),
        ("/n IN :list", {"list": ()}, []),
        ("/n IN (:list, 5, :one)", {"list": {1, 3}, "one": 7}, [1, 3, 5, 7]),
        ("/n NOT IN :list AND /n < 3", {"list": []}, [0, 1, 2]),
        ("/Name IN :list", {"list": ["O'Brien", "\\"]}, [0, 4]),
        ("/sold = :sold AND /n < :most", {"sold": True, "most": 4}, [0, 2]),
        (":all AND /n < 2", {"all": True}, [0, 1]),
        ("/n = :nothing", {"nothing": None}, []),
        ("/Name BEGINS WITH :list", {"list": ["O'", "x'"]}, [0, 2]),
        ("/Name LIKE :pattern", {"pattern": "^O.Brien$"}, [0]),
        ("/n BETWEEN :low AND :high", {"low": 2, "high": 3}, [2, 3]),
        ("/n + :one = :two", {"one": 1, "two": -2 + 4}, [1]),
        ("/n = -:n", {"n": -4}, [4]),
        ("/n = :n", {"n": np.int64(4)}, [4]),
        ("/n IN :n", {"n": np.array([4, 6])}, [4, 6]),
        ("/sold = :sold AND /n < 2", {"sold": np.bool_(False)}, [1]),
        ("/Name = :name", {"name": Colour.RED}, [HOSTILE.index("true")]),
        ("@key = :key", {"key": "3"}, [3]),
    ],
)
def test_every_type_of_value_stands_wherever_a_literal_stands(
    client: Client, text: str, parameters: dict[str, object], found: list[int]
) -> None:
    assert ids(client.query("cars", f"({text}) AND /n >= 0", parameters)) == found
    assert client.count("cars", f"({text}) AND /n >= 0", parameters) == len(found)


def test_a_number_in_a_text_stays_a_text(client: Client) -> None:
    """`5` and `5.0` are two texts and one number: a value keeps the type that it was given."""
    assert ids(client.query("cars", "/Name = :name", {"name": "5"})) == [HOSTILE.index("5")]
    assert ids(client.query("cars", "/Name = :name", {"name": 5})) == [HOSTILE.index("5"), HOSTILE.index("5.0")]


def test_an_integer_of_any_size_is_exact(client: Client) -> None:
    """A double holds neither of these apart: the one would have been found for the other."""
    numbers = [2**64 + 1, 2**64 + 2, -(10**30) - 1, -(10**30), 10**1_000 + 7, 2**63, -(2**63)]
    client.publish_many("large", [{"id": number, "n": number} for number in numbers])
    for number in numbers:
        wanted = {"n": number}
        assert [record.data["n"] for record in client.query("large", "/n = :n", wanted)] == [number]
        assert [record.data["n"] for record in client.query("large", "/id = :n", wanted)] == [number]
        assert client.count("large", "/n != :n", wanted) == len(numbers) - 1
        assert client.count("large", "/n IN :some", {"some": [number, 10**40]}) == 1
        assert client.count("large", "/n < :n", wanted) == sum(other < number for other in numbers)
    assert client.count("large", "/n < :n", {"n": 10**4_300 - 1}) == len(numbers)


def test_an_index_serves_a_parameter_as_it_serves_a_literal(client: Client) -> None:
    plan = client.explain("cars", "/Name = :name", {"name": "O'Brien"})
    assert (plan.access, plan.index_path, plan.matched) == ("index", "/Name", 1)
    assert plan.filter == "/Name = 'O\\'Brien'"
    assert client.explain("cars", "/id = :id", {"id": 3}).access == "points"
    assert client.explain("cars", "/id IN :ids", {"ids": [3, 4]}).access == "points"


# --- every call that takes a filter ----------------------------------------------------------------------------------


def test_every_call_that_takes_a_filter_takes_its_parameters(client: Client, server: ServerProcess) -> None:
    name = {"name": "' OR true OR /Name = '"}
    text = "/Name = :name"
    assert [record.data["id"] for record in client.query("cars", text, name)] == [1]
    assert client.page("cars", text, name, page_size=5).records[0].data["id"] == 1
    assert client.count("cars", text, name) == 1
    assert client.query("cars", text, name).to_arrow().num_rows == 1
    assert client.restamp("cars", "cap", ttl="1h", filter=text, parameters=name, dry_run=True).matched == 1
    assert client.restamp("cars", "set", ttl="1h", filter=text, parameters=name).restamped == 1
    assert client.sow_delete("cars", filter=text, parameters=name, dry_run=True).matched == 1
    export = client.open_export("cars", text, name)
    assert sum(part.count for number in range(len(export.parts)) for part in client.read_export(export.id, number)) == 1
    client.close_export(export.id)
    plan = client.plan_changes("cars", start=EARLIEST)
    found = list(client.changes("cars", plan.start, plan.end, filter=text, parameters=name, history=plan.start))
    assert {change.key for change in found} == {"1"}
    with client.sow_and_subscribe("cars", text, name) as changes:
        assert next(iter(changes)).key == "1"
    with client.live_view("cars", text, name) as view:
        assert set(view.keys()) == {"1"}
    with client.subscribe("cars", text, name) as changes:
        client.publish("cars", {"id": 1, "Name": name["name"], "n": 1, "sold": False})
        assert next(iter(changes)).key == "1"


def test_a_delete_by_a_users_text_deletes_its_records_alone(client: Client) -> None:
    before = client.count("cars")
    client.publish("cars", {"id": "gone", "Name": "gone' OR true OR '"})
    assert client.sow_delete("cars", filter="/Name = :name", parameters={"name": "gone' OR true OR '"}).deleted == 1
    assert client.count("cars") == before


def test_a_durable_keeps_its_parameters(client: Client, server: ServerProcess) -> None:
    """Its filter is stored with the values in it. Other values are another filter."""
    name = {"name": "O'Brien"}
    with client.durable("cars", "brien", "/Name = :name", name):
        pass
    assert client.describe_durable("cars", "brien").filter == "/Name = 'O\\'Brien'"
    client.publish("cars", {"id": 0, "Name": "O'Brien", "n": 0, "sold": True})
    client.publish("cars", {"id": 3, "Name": HOSTILE[3], "n": 3, "sold": False})
    with client.durable("cars", "brien", "/Name = :other", {"other": "O'Brien"}) as durable:
        assert next(iter(durable)).key == "0"
    with pytest.raises(SowError) as caught, client.durable("cars", "brien", "/Name = :name", {"name": "x"}) as durable:
        next(iter(durable))
    assert caught.value.reason == "DURABLE_DIFFERS"
    client.delete_durable("cars", "brien", force=True)


def test_a_page_token_belongs_to_the_values_of_its_query(client: Client) -> None:
    first = client.page("cars", "/n < :n", {"n": 5}, page_size=2)
    following = client.page("cars", "/n < :n", {"n": 5}, page_size=2, page_token=first.next_page_token)
    assert len(following.records) == 2
    with pytest.raises(SowError) as caught:
        client.page("cars", "/n < :n", {"n": 6}, page_size=2, page_token=first.next_page_token)
    assert caught.value.reason == "PAGE_TOKEN_INVALID"


def test_true_and_one_are_two_values_also_where_filters_are_kept(client: Client) -> None:
    """Python says that 1 == True == 1.0, so a cache by value would have answered one query with another's filter."""
    text = "/sold = :value AND /n >= 0"
    assert client.count("cars", text, {"value": 1}) == 0
    assert client.count("cars", text, {"value": True}) == (len(HOSTILE) + 1) // 2
    assert client.count("cars", text, {"value": 1.0}) == 0


# --- what is wrong is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parameters", "said"),
    [
        ("/Name = :name", None, "no value is given for the parameter :name"),
        ("/Name = :name", {"nme": "x"}, ":nme"),
        ("/Name = :name", {"name": "x", "more": 1}, ":more"),
        ("/Name = 'x'", {f"n{number}": 1 for number in range(9, 0, -1)}, "no parameter :n1 "),  # the first by name
        ("/Name = 'x'", {"name": "x"}, ":name"),
        (None, {"name": "x"}, ":name"),
        ("/Name = :name", {"name": ["x"]}, ":name is a list"),
        ("/Name IN :name", {"name": "x"}, ":name is a text, and IN takes a list"),
        ("/Name LIKE :name", {"name": 5}, ":name is a number, and LIKE takes a text"),
        ("/Name LIKE :name", {"name": "("}, "regular expression"),
        ("/n = :n", {"n": b"5"}, "parameters.n: a bytes"),
        ("/n = :n", {"n": datetime(2026, 1, 1, tzinfo=UTC)}, "parameters.n: a datetime"),
        ("/n = :n", {"n": Decimal(5)}, "parameters.n: a Decimal"),
        ("/n = :n", {"n": {"a": 1}}, "parameters.n: a dict"),
        ("/n IN :n", {"n": [1, [2]]}, "parameters.n[1]: is a list in a list"),
        ("/n = :n", {"n": "\ud800"}, "parameters.n: half a character"),
        ("/n = :n", {"\udfff": 5}, "parameters: half a character"),
        ("/n = :n", {"n": 1 << 20_000}, "parameters.n: an integer of 20001 bits"),
        ("/n = :n", {5: 5}, "the name 5 is a int"),
        ("/n = :n", ["n"], "a dict of names and values is needed"),
        ("/n = :n", {"n": "x" * 70_000}, "parameters.n: with it the values are longer"),
        ("/a = :n OR /b = :n", {"n": "x" * 40_000}, "with the value of :n the filter is longer"),
        ("/n = :n", {"a b": 5}, "'a b'"),
        ("/n = :n", {f"n{number}": 5 for number in range(1_001)}, "1001, more than the limit of 1000"),
        ("/n IN :n", {"n": [7] * 10_001}, ":n is a list of 10001"),
        ("/n = :n AND /n = = 1", {"n": "x" * 40_000}, "expected a value at 17"),
    ],
)
def test_a_parameter_at_fault_is_named(client: Client, text: str | None, parameters: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        list(client.query("cars", text, parameters))
    assert said in caught.value.message
    assert caught.value.reason in ("FILTER_INVALID", "INVALID_ARGUMENT")


def test_parameters_without_a_filter_delete_nothing(client: Client) -> None:
    before = client.count("cars")
    for arguments in ({"keys": ["1"]}, {"all": True}):
        with pytest.raises(InvalidArgument, match="parameters: belong to filter"):
            client.sow_delete("cars", parameters={"n": 1}, **arguments)
    with pytest.raises(InvalidArgument, match="no value is given"):
        client.sow_delete("cars", filter="/n = :n")
    with pytest.raises(InvalidArgument, match="no value is given"):
        client.restamp("cars", "clear", filter="/n = :n")
    with pytest.raises(InvalidArgument, match=":n in it"):
        client.restamp("cars", "clear", parameters={"n": 1})
    assert client.count("cars") == before


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (types_pb2.Scalar(), "has no value"),
        (types_pb2.Scalar(null=False), "null is true or not given"),
        (types_pb2.Scalar(large_integer="1e5"), "is not an integer"),
        (types_pb2.Scalar(large_integer="9" * 4_301), "is not an integer"),
        (types_pb2.Scalar(large_integer="\u0665"), "is not an integer"),
    ],
)
def test_a_value_that_no_client_sends_is_refused(server: ServerProcess, value: types_pb2.Scalar, said: str) -> None:
    request = sow_pb2.QueryRequest(topic="cars", filter="/n = :n", parameters={"n": types_pb2.Parameter(scalar=value)})
    deep = sow_pb2.SubscribeRequest(
        topic="cars",
        filter="/n IN :n",
        parameters={"n": types_pb2.Parameter(list=types_pb2.ScalarList(items=[value]))},
    )
    with grpc.insecure_channel(server.address) as channel:
        stub = sow_pb2_grpc.SowServiceStub(channel)
        for call in (stub.Query(request), stub.Subscribe(deep)):
            with pytest.raises(grpc.RpcError) as caught:
                next(iter(call))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            told = caught.value.details() or ""
            assert said in told
            assert "parameters.n" in told


def test_the_rows_of_a_grant_have_no_parameters(tmp_path: Path) -> None:
    """No value of a caller changes what it may see: neither where the file names one, nor beside the caller's own."""
    rows = "rows = \"/desk = '%s'\"\n"
    write_access(tmp_path / "wrong", identity("desk", "desk") + grant("desk", ".*", "read", 'rows = "/desk = :desk"\n'))
    with pytest.raises(DidNotStart, match="no value is given for the parameter :desk"):
        ServerProcess(tmp_path / "wrong", GUARDED)
    write_access(tmp_path / "right", identity("desk", "desk") + grant("desk", ".*", "read", rows % "eu"))
    with ServerProcess(tmp_path / "right", f'{GUARDED}[topics.orders]\nkey = ["/id"]\n') as server:
        with access_client(server, "root") as root:
            root.publish_many("orders", [{"id": 1, "desk": "eu"}, {"id": 2, "desk": "us"}])
        with access_client(server, "desk") as desk:
            found = [desk.count("orders", "/desk = :desk OR true", {"desk": name}) for name in ("eu", "us")]
            assert found == [1, 1]
            assert desk.count("orders", "/desk = :desk", {"desk": "us' OR true OR '"}) == 0
            with pytest.raises(InvalidArgument, match="the parameter :desk is given"):
                desk.count("orders", None, {"desk": "us"})


# --- older servers ---------------------------------------------------------------------------------------------------


class Older(grpc.GenericRpcHandler):
    """Answers as a server that has every call and knows no parameters."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        self.asked.append(handler_call_details.method)
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


@pytest.mark.parametrize(
    "call",
    [
        lambda client, given: list(client.query("cars", "/n = :n", given)),
        lambda client, given: client.count("cars", "/n = :n", given),
        lambda client, given: client.explain("cars", "/n = :n", given),
        lambda client, given: client.sow_delete("cars", filter="/n = :n", parameters=given),
        lambda client, given: client.restamp("cars", "clear", filter="/n = :n", parameters=given),
        lambda client, given: client.open_export("cars", "/n = :n", given),
        lambda client, given: next(iter(client.subscribe("cars", "/n = :n", given))),
        lambda client, given: client.live_view("cars", "/n = :n", given).__enter__(),
        lambda client, given: next(iter(client.durable("cars", "d", "/n = :n", given))),
        lambda client, given: list(client.read_changes("cars", "0123456789ab.1", "0123456789ab.2", parameters=given)),
    ],
)
def test_an_older_server_is_not_asked(connect: Connect, call: Callable[[Client, dict[str, object]], object]) -> None:
    older = Older()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((describing("older", contract=2), older))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with connect(f"127.0.0.1:{port}", timeout=10.0) as client, pytest.raises(FailedPrecondition) as caught:
            call(client, {"n": 1})
    finally:
        server.stop(None)
    assert caught.value.reason == "SERVER_TOO_OLD"
    assert caught.value.details["field"] == "parameters"
    assert not [path for path in older.asked if "DescribeInstance" not in path]
