"""The limits of one identity: a rate, and amounts that are always given back (rule A7)."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sow_server.access.caller import Call, Caller
from sow_server.access.limits import Usage
from sow_server.access.model import Limits
from sow_server.access.needs import NEEDS
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from tests.support.oracles.access_parts import Clocks
from tests.support.oracles.examples import examples
from tests.support.stores.parts import NoAccessFile

AT_A_TIME = ("rpcs", "subscriptions", "exports", "loads", "durables")


def usage_of(clocks: Clocks, **limits: int | None) -> Usage:
    return Usage(Limits(**limits), clocks.elapsed)


def call_with(usage: Usage) -> Call:
    path = "/sow.v1.SowService/Get"
    return Call(path, NEEDS[path], NoAccessFile(Topics()), Caller(usage=usage))


def wait_micros(usage: Usage) -> int:
    """0: the request is allowed."""
    try:
        usage.request()
    except StoreError as error:
        if error.details.get("limit") != "requests_per_second":
            raise
        return error.retry_after_micros
    return 0


# --- the rate --------------------------------------------------------------------------------------------------------


def test_a_seconds_worth_may_come_at_once_and_then_one_after_the_other() -> None:
    clocks = Clocks()
    usage = usage_of(clocks, requests_per_second=10)
    assert [wait_micros(usage) for _ in range(10)] == [0] * 10
    assert wait_micros(usage) == MICROS // 10
    clocks.seconds += 0.05
    assert wait_micros(usage) == MICROS // 20
    clocks.seconds += 0.05
    assert wait_micros(usage) == 0
    clocks.seconds += 3600
    assert [wait_micros(usage) for _ in range(11)] == [0] * 10 + [MICROS // 10], "an hour saves up no more"


def test_a_rate_of_nothing_allows_nothing_and_asks_for_no_retry() -> None:
    clocks = Clocks()
    usage = usage_of(clocks, requests_per_second=0)
    clocks.seconds += 100
    with pytest.raises(StoreError) as caught:
        usage.request()
    assert caught.value.retry_after_micros == 0


def test_a_rate_that_a_reload_changes_holds_at_once() -> None:
    clocks = Clocks()
    usage = usage_of(clocks, requests_per_second=None)
    for _ in range(1_000):
        usage.request()
    usage.limits = Limits(requests_per_second=2)
    assert [wait_micros(usage) > 0 for _ in range(3)] == [False, False, True]
    usage.limits = Limits(requests_per_second=4)
    assert [wait_micros(usage) > 0 for _ in range(3)] == [False, False, True]
    usage.limits = Limits(requests_per_second=None)
    assert wait_micros(usage) == 0


def test_a_rate_that_a_reload_lowers_makes_nobody_wait_for_what_was_allowed_before() -> None:
    """Story: a thousand calls at a rate of 5,000, which is the default, and a caller waited for 500 s at one of 2."""
    usage = usage_of(Clocks())
    for _ in range(1_000):
        usage.request()
    usage.limits = Limits(requests_per_second=2)
    assert 0 < wait_micros(usage) <= MICROS


@given(st.integers(1, 50), st.lists(st.floats(0, 2), max_size=60))
def test_no_second_has_more_than_twice_the_rate_and_a_patient_caller_is_served(rate: int, pauses: list[float]) -> None:
    clocks = Clocks()
    usage = usage_of(clocks, requests_per_second=rate)
    served: list[float] = []
    for pause in pauses:
        clocks.seconds += pause
        wait = wait_micros(usage)
        if wait:
            clocks.seconds += wait / MICROS + 1e-6  # the clock of a float
            assert wait_micros(usage) == 0, "who waits as told is served"
        served.append(clocks.seconds)
    for begin in served:
        assert sum(begin <= at < begin + 1 for at in served) <= 2 * rate


# --- amounts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", AT_A_TIME)
def test_each_limit_is_held_until_the_end_of_its_block(limit: str) -> None:
    usage = usage_of(Clocks(), **{limit: 2})
    call = call_with(usage)
    with call.holding(limit), call.holding(limit):
        with pytest.raises(StoreError) as caught, call.holding(limit):
            pass
        assert caught.value.details == {"limit": limit, "value": "2"}
        assert usage.held(limit) == 2
    assert usage.held(limit) == 0


@pytest.mark.parametrize("failure", [StoreError(Reason.INTERNAL, "x"), KeyboardInterrupt(), GeneratorExit()])
def test_limits_are_given_back_when_a_call_fails(failure: BaseException) -> None:
    usage = usage_of(Clocks(), exports=1, bytes_in_flight=10)
    call = call_with(usage)
    for _ in range(3):
        with pytest.raises(type(failure)):
            fail_within(call, failure)
    assert (usage.held("exports"), usage.held("bytes_in_flight")) == (0, 0)


def fail_within(call: Call, failure: BaseException) -> None:
    with call.holding("exports"), call.holding_bytes(7):
        raise failure


def test_the_byte_limit_lets_one_larger_request_pass_alone() -> None:
    call = call_with(usage_of(Clocks(), bytes_in_flight=10))
    with call.holding_bytes(1_000):
        with pytest.raises(StoreError, match="bytes_in_flight"), call.holding_bytes(2):
            pass
    with call.holding_bytes(6), call.holding_bytes(4), call.holding_bytes(0):
        with pytest.raises(StoreError, match="bytes_in_flight"), call.holding_bytes(1):
            pass


def test_a_limit_of_nothing_allows_nothing() -> None:
    call = call_with(usage_of(Clocks(), exports=0))
    with pytest.raises(StoreError), call.holding("exports"):
        pass


def test_names_are_counted_once_and_kinds_apart() -> None:
    call = call_with(usage_of(Clocks(), topics=2, publishers=1))
    for name in ("a", "b", "a", "b"):
        call.creates("topics", name)
    with pytest.raises(StoreError, match="topics"):
        call.creates("topics", "c")
    call.creates("topics", "a")
    call.creates("publishers", "a")
    with pytest.raises(StoreError, match="publishers"):
        call.creates("publishers", "b")


def test_names_of_an_hour_ago_count_no_more() -> None:
    """Story: each start of a program takes a new publisher id. A busy identity reached its limit, until a restart."""
    clocks = Clocks()
    call = call_with(usage_of(clocks, publishers=2))
    call.creates("publishers", "a")
    clocks.seconds += 600
    call.creates("publishers", "b")
    with pytest.raises(StoreError) as caught:
        call.creates("publishers", "c")
    assert caught.value.retry_after_micros == 3000 * 1_000_000
    clocks.seconds += 3000
    call.creates("publishers", "c")
    call.creates("publishers", "b")
    with pytest.raises(StoreError):
        call.creates("publishers", "a")


def test_what_is_held_already_counts_against_a_limit() -> None:
    call = call_with(usage_of(Clocks(), durables=3))
    with call.making("durables", 2), pytest.raises(StoreError, match="durables"), call.making("durables", 2):
        pass  # the one that is being made counts, too
    with pytest.raises(StoreError, match="durables"), call.making("durables", 3):
        pass
    with call.making("durables", 2):
        pass


def test_a_caller_without_limits_holds_nothing() -> None:
    path = "/sow.v1.SowService/Get"
    call = Call(path, NEEDS[path], NoAccessFile(Topics()))
    with call.holding("exports"), call.holding_bytes(10):
        call.creates("topics", "a")
        with call.making("durables", 10**9):
            pass
    call.leave()


class Holders(RuleBasedStateMachine):
    """Takes and gives back in any order, while reloads change the limits."""

    def __init__(self) -> None:
        super().__init__()
        self.usage = usage_of(Clocks(), exports=2, bytes_in_flight=100)
        self.call = call_with(self.usage)
        self.held: list[tuple[str, int, ExitStack]] = []

    def total(self, name: str) -> int:
        return sum(amount for held, amount, _ in self.held if held == name)

    @rule(name=st.sampled_from(["exports", "rpcs"]))
    def take(self, name: str) -> None:
        self._enter(name, 1)

    @rule(size=st.integers(0, 150))
    def take_bytes(self, size: int) -> None:
        if self.usage.limits.bytes_in_flight is not None:
            self._enter("bytes_in_flight", size)

    def _enter(self, name: str, amount: int) -> None:
        limit = self.usage.limits.named().get(name)
        stack = ExitStack()
        try:
            stack.enter_context(
                self.call.holding_bytes(amount) if name == "bytes_in_flight" else self.call.holding(name)
            )
        except StoreError:
            assert limit is not None
            assert self.total(name) + amount > limit
            return
        assert limit is None or self.total(name) + amount <= limit or not self.total(name)
        self.held.append((name, amount, stack))

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.held:
            _, _, stack = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            stack.close()

    @rule(exports=st.none() | st.integers(0, 3), size=st.none() | st.integers(1, 200))
    def reload(self, exports: int | None, size: int | None) -> None:
        self.usage.limits = Limits(exports=exports, bytes_in_flight=size)

    @invariant()
    def counts_are_exact(self) -> None:
        for name in ("exports", "rpcs", "bytes_in_flight"):
            assert self.usage.held(name) == self.total(name) >= 0

    def teardown(self) -> None:
        for _, _, stack in self.held:
            stack.close()
        assert [self.usage.held(name) for name in ("exports", "rpcs", "bytes_in_flight")] == [0, 0, 0]


Holders.TestCase.settings = settings(max_examples=examples(100))
test_held_amounts_are_exact = Holders.TestCase
