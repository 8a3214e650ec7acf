"""Failed attempts to prove a name: told sparsely, slowed by address, in bounded memory (rules A1, A8)."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

from sow_server.access import failed_attempts
from sow_server.access.failed_attempts import (
    HELD_BYTES_MAX,
    HELD_MAX,
    HELD_OF_HOST_MAX,
    HOSTS_MAX,
    PER_MINUTE,
    TOLD_MAX,
    WAIT_SECONDS,
    FailedAttempts,
    host_of,
)
from sow_server.access.tally import Untold
from tests.support.fakes.clocks import Clock

HERE = "ipv4:10.0.0.1:5000"
THERE = "ipv4:10.0.0.2:5000"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def failed(clock: Clock) -> FailedAttempts:
    return FailedAttempts(clock)


def waits(failed: FailedAttempts, address: str, size: int = 0) -> float:
    with failed.held(address, size) as seconds:
        return seconds


# --- reports ---------------------------------------------------------------------------------------------------------


def test_attempts_are_told_by_address_and_then_their_number(failed: FailedAttempts, clock: Clock) -> None:
    told = [failed.failed(f"ipv4:10.0.0.1:{port}") for port in range(25)]
    assert told == [True] * TOLD_MAX + [False] * 15
    clock.now += 60
    assert failed.due() == [Untold("ipv4:10.0.0.1", 15)]


def test_only_so_many_addresses_are_remembered_and_those_that_fail_last(
    failed: FailedAttempts, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HOSTS_MAX <= 100_000
    monkeypatch.setattr(failed_attempts, "HOSTS_MAX", 20)
    for n in range(200):
        failed.failed(f"ipv4:10.0.{n}.1:1")
        for _ in range(PER_MINUTE // 100):
            failed.failed(HERE)
        assert len(failed._hosts) <= 20
    assert waits(failed, HERE) == WAIT_SECONDS
    clock.now += 61
    failed.due()
    assert failed._hosts == {}, "they have not failed lately"


# --- what waits ------------------------------------------------------------------------------------------------------


def test_beyond_a_minutes_worth_failed_attempts_wait(failed: FailedAttempts, clock: Clock) -> None:
    for _ in range(PER_MINUTE):
        failed.failed(HERE)
        assert waits(failed, HERE) == 0
    failed.failed(HERE)
    assert waits(failed, HERE) == WAIT_SECONDS
    failed.failed(THERE)
    assert waits(failed, THERE) == 0, "another address"
    clock.now += 1
    failed.failed(HERE)
    assert waits(failed, HERE) == 0, "ten more after each second"


def test_a_flood_is_not_paid_for_longer_than_it_lasts(failed: FailedAttempts, clock: Clock) -> None:
    for _ in range(10 * PER_MINUTE):
        failed.failed(HERE)
    clock.now += 60
    failed.due()
    for _ in range(PER_MINUTE // 2):
        failed.failed(HERE)
        assert waits(failed, HERE) == 0


def test_the_minute_of_the_log_does_not_end_the_slowing(failed: FailedAttempts, clock: Clock) -> None:
    failed.failed(HERE)
    clock.now += 59.9
    for _ in range(2 * PER_MINUTE):
        failed.failed(HERE)
    clock.now += 0.1
    assert failed.due() != []
    for _ in range(2):  # one for the tenth of a second
        failed.failed(HERE)
    assert waits(failed, HERE) == WAIT_SECONDS


def test_an_address_that_has_never_failed_does_not_wait(failed: FailedAttempts) -> None:
    assert waits(failed, HERE) == 0


def test_a_large_request_does_not_wait_because_its_bytes_would(failed: FailedAttempts) -> None:
    for _ in range(PER_MINUTE + 1):
        failed.failed(HERE)
    assert waits(failed, HERE, HELD_BYTES_MAX) == WAIT_SECONDS
    assert waits(failed, HERE, HELD_BYTES_MAX + 1) == 0


def test_only_so_many_wait_of_one_address_and_in_all(failed: FailedAttempts, clock: Clock) -> None:
    hosts = [f"ipv4:10.0.1.{n}:1" for n in range(HELD_MAX // HELD_OF_HOST_MAX + 1)]
    for host in hosts:
        for _ in range(PER_MINUTE + 1):
            failed.failed(host)
    with ExitStack() as stack:
        for host in hosts[:-1]:
            for _ in range(HELD_OF_HOST_MAX):
                assert stack.enter_context(failed.held(host, 0)) == WAIT_SECONDS
            assert waits(failed, host) == 0
        assert waits(failed, hosts[-1]) == 0, "the room of all is used up"
        clock.now += 1.0
        failed.due(at_the_end=True)  # what waits gives back its room, although its window has ended
        for host in hosts:
            for _ in range(PER_MINUTE):
                failed.failed(host)
    assert [waits(failed, host) for host in hosts] == [WAIT_SECONDS] * len(hosts)


def test_room_is_given_back_when_a_caller_does_not_wait_for_its_answer(failed: FailedAttempts) -> None:
    for _ in range(PER_MINUTE + 1):
        failed.failed(HERE)
    for _ in range(HELD_OF_HOST_MAX + 1):
        with suppress(ConnectionError), failed.held(HERE, 0) as seconds:
            assert seconds == WAIT_SECONDS
            raise ConnectionError


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("ipv4:127.0.0.1:47666", "ipv4:127.0.0.1"),
        ("ipv6:%5B::1%5D:50051", "ipv6:::/64"),
        ("ipv6:[::1]:50051", "ipv6:::/64"),
        ("ipv6:%5B2001:db8:1:2:aaaa::7%5D:1", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2:bbbb::9%5D:2", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "ipv6:fe80::/64"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5", "ipv4:10.0.0.1"),
        ("ipv6:nonsense:1", "ipv6:nonsense"),
        ("unix:", "unix:"),
        ("", ":"),
    ],
)
def test_the_part_of_an_address_that_counts(address: str, host: str) -> None:
    assert host_of(address) == host
