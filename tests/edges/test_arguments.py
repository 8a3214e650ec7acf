"""Odd values in every argument of every public method of both clients: an error that names the argument, or it is fine.

The methods and their arguments come from the signatures, so a new one is tested at once.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow
import pytest

from sow_client import AsyncClient, AsyncQueryResult, Client, InvalidArgument, QueryResult, SowError
from tests.support.servers.server import ServerProcess

ODD: Final[dict[str, Any]] = {
    "2**63": 2**63,
    "2**64": 2**64,
    "minus": -1,
    "minus 2**63": -(2**63) - 1,
    "nan": math.nan,
    "inf": math.inf,
    "surrogate": "\ud800",
    "nul": "\x00",
    "huge": "x" * 100_000,
    "text": "5",
    "bytes": b"\xff",
    "list": ["\ud800"],
    "numbers": [2**64],
}
GIVEN: Final[dict[str, Any]] = {
    "topic": "orders", "key": "k", "keys": ["k"], "name": "orders", "data": {"id": "k"}, "documents": [{"id": "k"}],
    "id": "x", "publisher_id": "p", "load_id": "l", "export_id": "e", "path": "/id", "peer": "b", "address": "h:1",
    "to": "4f9d2c01aa37.1", "interval": "1s", "page_size": 10,
    "frame": pyarrow.table({"id": ["k"]}), "method": "Get", "identity": "x", "parts": [],
    "holder": "h", "start": "4f9d2c01aa37.1", "target": "topic", "pattern": "x.*", "priority": 1,
}  # fmt: skip
PARTS: Final = 5
"""The default run has each argument with every fifth odd value; the others are marked `long`."""
BOUNDS: Final = {"timeout", "connect_timeout", "retry_for", "wait", "timeout_seconds"}
"""Times that the client itself waits."""
STATEFUL: Final = {"close", "await_ready", "compact", "delete_topic", "go_back"}
CONFIG: Final = """
[server]
dynamic_topics = true
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.comp]
key = ["/a", "/b"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("arguments"), CONFIG) as server:
        yield server


def methods(client: type) -> list[str]:
    return [
        name
        for name, value in inspect.getmembers(client)
        if inspect.isfunction(value) and not name.startswith("_") and name not in STATEFUL
    ]


def cases(client: type, part: int) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Method, argument, name of the value, and the arguments of the call: one in `PARTS` of all."""
    number = 0
    for name in methods(client):
        signature = inspect.signature(getattr(client, name))
        fields = [one for one in signature.parameters.values() if one.name != "self"]
        needed = {
            one.name: GIVEN.get(one.name, "x")
            for one in fields
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        }
        for one in fields:
            if one.name in BOUNDS or one.name.startswith("on_") or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                continue
            number += 1  # so that other arguments have other values
            for label, value in list(ODD.items())[(part + number) % PARTS :: PARTS]:
                yield name, one.name, label, {**needed, one.name: value}


in_parts = pytest.mark.parametrize(
    "part", [0, *[pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS)]]
)


def judged(name: str, argument: str, label: str, error: Exception) -> str | None:
    """What is wrong with an error; None: it is one of the client's, or names the argument."""
    if isinstance(error, SowError):
        return None
    if isinstance(error, TypeError) and argument in str(error):
        return None
    return f"{name}({argument}={label}): {type(error).__name__}: {str(error)[:150]}"


def first_of(answer: object) -> None:
    """Takes what a lazy answer has to say. A stream that would wait for changes is only closed."""
    if inspect.isgenerator(answer) or isinstance(answer, QueryResult):
        next(answer, None)
    if callable(close := getattr(answer, "close", None)):
        close()


async def first_of_async(answer: object) -> None:
    if inspect.iscoroutine(answer):
        answer = await answer
    if isinstance(answer, AsyncQueryResult):
        answer = aiter(answer)
    if inspect.isasyncgen(answer):
        await anext(answer, None)
    close = getattr(answer, "close", None) or getattr(answer, "aclose", None)
    if callable(close) and inspect.isawaitable(closed := close()):
        await closed


@in_parts
def test_every_argument_of_the_blocking_client_is_refused_by_its_name(server: ServerProcess, part: int) -> None:
    wrong: list[str] = []
    with Client(server.address, timeout=5, environment={}) as client:
        for name, argument, label, arguments in cases(Client, part):
            try:
                first_of(getattr(client, name)(**arguments))
            except Exception as error:
                if found := judged(name, argument, label, error):
                    wrong.append(found)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_every_argument_of_a_new_client_is_refused_by_its_name(client: type) -> None:
    async def each() -> list[str]:
        wrong: list[str] = []
        for argument in (
            "server",
            "tls",
            "token",
            "channel",
            "prefer",
            "failover_publish",
            "on_failover",
            "environment",
        ):
            for label, value in ODD.items():
                try:
                    client(**{"environment": {}, argument: value})
                except Exception as error:
                    if found := judged(client.__name__, argument, label, error):
                        wrong.append(found)
        return wrong

    wrong = asyncio.run(each())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_correct_calls_are_what_they_were(client: type) -> None:
    """The methods keep their kinds, signatures and docstrings."""
    for name in methods(client):
        function = getattr(client, name)
        inner = inspect.unwrap(function)
        for kind in (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction):
            assert kind(function) == kind(inner), name
        assert inspect.signature(function) == inspect.signature(inner), name
        assert function.__doc__ == inner.__doc__


def test_an_error_of_the_program_itself_passes_as_it_is(server: ServerProcess) -> None:
    def documents() -> Iterator[dict[str, Any]]:
        yield {"id": 1}
        raise ValueError("of the program")

    with Client(server.address, environment={}) as client, pytest.raises(ValueError, match=r"^of the program$"):
        client.publish_many("orders", documents())


def test_a_key_with_another_number_of_parts_is_refused(server: ServerProcess) -> None:
    """It passed for a key without a record."""
    with Client(server.address, environment={}) as client:
        client.publish("comp", {"a": "x|1", "b": "y"})
        assert client.get("comp", ("x|1", "y")) is not None
        assert client.get("comp", ("x", "y")) is None
        planned = client.plan_changes("comp", start="earliest")
        changed = planned.start, planned.end
        wrong: list[Callable[[], object]] = [
            lambda: client.get("comp", ("x", "y", "z")),
            lambda: client.get("comp", "x"),
            lambda: client.get_many("comp", [("x", "y"), ("x",)]),
            lambda: list(client.query("comp", keys=["x"])),
            lambda: client.touch("comp", "x", ttl=5),
            lambda: client.sow_delete("comp", keys=["x|y|z"]),
            lambda: client.history("comp", "x"),
            lambda: client.get("orders", "a|b"),
            lambda: list(client.changes("comp", *changed, keys=["x"])),
            lambda: list(client.read_changes("comp", *changed, keys=[("x|1", "y"), ("x",)])),
        ]
        for call in wrong:
            with pytest.raises(InvalidArgument, match="and a key here has"):
                call()


@in_parts
def test_every_argument_of_the_asyncio_client_is_refused_by_its_name(server: ServerProcess, part: int) -> None:
    async def each() -> list[str]:
        wrong: list[str] = []
        async with AsyncClient(server.address, timeout=5, environment={}) as client:
            for name, argument, label, arguments in cases(AsyncClient, part):
                try:
                    await first_of_async(getattr(client, name)(**arguments))
                except Exception as error:
                    if found := judged(name, argument, label, error):
                        wrong.append(found)
        return wrong

    wrong = asyncio.run(each())
    assert not wrong, "\n".join(wrong)
