"""The fake client of the command's tests has the same signatures as the real one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter

import pytest

from sow_client import Client, DurableSubscription, Publisher, QueryResult, Subscription
from tests.support.fakes.fake_client import FakeClient
from tests.support.fakes.fake_publishing import FakePublisher
from tests.support.fakes.fake_results import FakeDurable, FakeResult, FakeSubscription

FOR_TESTS = {"add", "record", "keep", "arguments_of", "waits_seconds", "breaks_at", "breaks_with"}
"""Attributes of fakes that only tests use."""


@pytest.mark.parametrize(
    ("fake", "real"),
    [
        (FakeClient, Client),
        (FakePublisher, Publisher),
        (FakeResult, QueryResult),
        (FakeSubscription, Subscription),
        (FakeDurable, DurableSubscription),
    ],
)
def test_a_call_that_a_fake_takes_is_one_that_the_real_class_takes(fake: type, real: type) -> None:
    """Story: the fake had a keyword that the client had not, and its test passed."""
    names = {name for name in dir(fake) if not name.startswith("_")} - FOR_TESTS
    assert names <= set(dir(real))
    faults = [
        f"{fake.__name__}.{name}: {fault}"
        for name in sorted(names)
        if callable(method := getattr(fake, name))
        for fault in differences(inspect.signature(method), inspect.signature(getattr(real, name)))
    ]
    assert not faults


def test_a_name_that_the_client_does_not_know_is_not_taken_among_others_either() -> None:
    client = FakeClient()
    client.add("orders")
    calls: list[Callable[[], object]] = [
        lambda: client.create_topic("new", colour="red"),
        lambda: client.alter_topic("orders", colour="red"),
        lambda: client.create_view("new", source="orders", colour="red"),
        lambda: client.explain("orders", colour="red"),
        lambda: client.page("orders", page_size=1, colour="red"),
        lambda: client.subscribe("orders", None, colour="red"),
        lambda: client.sow_and_subscribe("orders", None, colour="red"),
        lambda: client.durable("orders", "billing", colour="red"),
    ]
    takers = {name for name in dir(FakeClient) if inspect.isfunction(getattr(FakeClient, name)) and takes_any(name)}
    assert len(calls) == len(takers - FOR_TESTS - {"_called"})
    for call in calls:
        with pytest.raises(TypeError, match="colour"):
            call()


def takes_any(name: str) -> bool:
    parameters = inspect.signature(getattr(FakeClient, name)).parameters.values()
    return any(one.kind is Parameter.VAR_KEYWORD for one in parameters)


def differences(fake: inspect.Signature, real: inspect.Signature) -> list[str]:
    """The calls that the fake takes and the real one refuses, or takes otherwise."""
    faults: list[str] = []
    named = {name: one for name, one in fake.parameters.items() if one.kind is not Parameter.VAR_KEYWORD}
    open_ended = any(one.kind is Parameter.VAR_KEYWORD for one in real.parameters.values())
    for name, one in named.items():
        other = real.parameters.get(name)
        if other is None:
            if not open_ended:
                faults.append(f"{name!r} is not known to the real one")
        elif positional(one) and not positional(other):
            faults.append(f"{name!r} is only taken by name")
        elif one.default is not Parameter.empty and one.default != other.default:
            faults.append(f"{name!r} is {other.default!r} unless given, not {one.default!r}")
    in_order = [name for name, one in named.items() if positional(one)]
    if in_order != [name for name, one in real.parameters.items() if positional(one)][: len(in_order)]:
        faults.append(f"the order {in_order} is another one")
    faults += [
        f"{name!r} is needed by the real one"
        for name, one in real.parameters.items()
        if one.default is Parameter.empty and one.kind is not Parameter.VAR_KEYWORD and name not in named
    ]
    return faults


def positional(one: Parameter) -> bool:
    return one.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def test_each_kind_of_difference_is_found() -> None:
    def real(topic: str, key: str, *, ttl: str | None = None) -> None: ...
    def unknown(topic: str, key: str, *, age: str | None = None) -> None: ...
    def by_place(topic: str, key: str, ttl: str | None = None) -> None: ...
    def otherwise(topic: str, key: str, *, ttl: str | None = "1s") -> None: ...
    def turned(key: str, topic: str) -> None: ...
    def missing(topic: str) -> None: ...

    assert not differences(inspect.signature(real), inspect.signature(real))
    for wrong in (unknown, by_place, otherwise, turned, missing):
        assert differences(inspect.signature(wrong), inspect.signature(real)), wrong.__name__
