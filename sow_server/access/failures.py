"""Failed attempts to prove a name, by address: which of them the audit log tells, and which wait (rules A1, A8).

Secrets have 256 random bits, so nobody guesses one. A flood of attempts costs processor time and room in the audit log,
and both are bounded here.

    [1]  Only a failed attempt waits. A caller that proves its name is never slowed, whoever fails at its address.
    [2]  Memory is bounded: HOSTS_MAX addresses, HELD_MAX waiting attempts, each with a small request.
    [3]  Each attempt is told, by itself or in a count.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

WINDOW_SECONDS: Final = 60.0
TOLD_MAX: Final = 10
"""Attempts of one address in a window that are told one by one; the others are counted."""
TOLD_IN_ALL_MAX: Final = 1_000
"""The same, of all addresses together: a flood from many must not push the rest out of the audit log."""
HOSTS_MAX: Final = 10_000
COUNTS_TOLD_MAX: Final = 100
"""Addresses whose counts are told at a time; the rest is told as one number."""
PER_MINUTE: Final = 600
"""Failed attempts of one address that are answered at once: a minute's worth may come together."""
WAIT_SECONDS: Final = 1.0
HELD_MAX: Final = 1_000
HELD_OF_HOST_MAX: Final = 100
HELD_BYTES_MAX: Final = 16 * 2**10
"""Of the request of an attempt that waits: gRPC keeps the bytes until it is answered."""
OTHERS: Final = "others"
"""Stands for the addresses that are not told by themselves."""
_IPV6_BITS: Final = 64
"""One caller has at least a network of so many bits to itself, and may use each address in it."""


class Untold(NamedTuple):
    """Attempts of an address that were not told one by one."""

    host: str
    attempts: int


@dataclass(slots=True)
class _Host:
    since: float
    """The begin of its window."""
    at: float
    """When `allowance` was true."""
    allowance: float = float(PER_MINUTE)
    count: int = 0
    untold: int = 0
    held: int = 0


class Failures:
    """Owns the counts. Event loop only."""

    def __init__(self, elapsed: Callable[[], float]) -> None:
        """`elapsed`: seconds of a monotonic clock."""
        self._elapsed: Final = elapsed
        self._hosts: dict[str, _Host] = {}
        """In the order in which their windows began."""
        self._others = 0
        """Attempts of forgotten addresses that were not told."""
        self._told_since = elapsed()
        self._told = 0
        self._held = 0

    def failed(self, address: str) -> bool:
        """Counts a failed attempt; whether it is told by itself. `address`: as gRPC writes it."""
        now = self._elapsed()
        host = self._host(host_of(address), now)
        host.allowance = max(_refilled(host, now) - 1, -1.0)
        host.at = now
        host.count += 1
        if now - self._told_since >= WINDOW_SECONDS:
            self._told_since, self._told = now, 0
        if host.count > TOLD_MAX or self._told >= TOLD_IN_ALL_MAX:
            host.untold += 1
            return False
        self._told += 1
        return True

    @contextmanager
    def held(self, address: str, request_bytes: int) -> Iterator[float]:
        """The seconds that the attempt which has just failed waits for its answer; 0: none. It counts as waiting until
        the end of the block."""
        host = self._hosts.get(host_of(address))
        if (
            host is None
            or host.allowance >= 0
            or host.held >= HELD_OF_HOST_MAX
            or self._held >= HELD_MAX
            or request_bytes > HELD_BYTES_MAX
        ):
            yield 0.0
            return
        host.held += 1
        self._held += 1
        try:
            yield WAIT_SECONDS
        finally:
            host.held -= 1
            self._held -= 1

    def due(self, *, at_the_end: bool = False) -> list[Untold]:
        """The counts of addresses whose window is over, each once. To be called every second or so, and `at_the_end`,
        when the windows count as over."""
        now = self._elapsed()
        over = list(
            itertools.takewhile(
                lambda item: at_the_end or now - item[1].since >= WINDOW_SECONDS,
                self._hosts.items(),
            )
        )
        found: list[Untold] = []
        for name, host in over:
            if host.untold and len(found) < COUNTS_TOLD_MAX:
                found.append(Untold(name, host.untold))
            else:
                self._others += host.untold
            del self._hosts[name]
            if _refilled(host, now) < PER_MINUTE:  # it has failed lately: its next window begins
                host.since, host.count, host.untold = now, 0, 0
                self._hosts[name] = host
        if self._others:
            found.append(Untold(OTHERS, self._others))
            self._others = 0
        return found

    def _host(self, name: str, now: float) -> _Host:
        found = self._hosts.get(name)
        if found is None:
            if len(self._hosts) >= HOSTS_MAX:
                self._others += self._hosts.pop(next(iter(self._hosts))).untold
            found = self._hosts[name] = _Host(now, now)
        return found


def _refilled(host: _Host, now: float) -> float:
    return min(float(PER_MINUTE), host.allowance + (now - host.at) * PER_MINUTE / WINDOW_SECONDS)


@lru_cache(HOSTS_MAX)
def host_of(address: str) -> str:
    """The part of an address that one caller cannot change at will: `ipv4:10.0.0.1:5000` is `ipv4:10.0.0.1`, and an
    IPv6 address is its network of 64 bits."""
    kind, _, rest = address.partition(":")
    host = unquote(rest.rpartition(":")[0]).strip("[]").partition("%")[0]
    if kind != "ipv6":
        return f"{kind}:{host}"
    try:
        found = ipaddress.IPv6Address(host)
    except ValueError:
        return f"{kind}:{host}"
    if found.ipv4_mapped is not None:
        return f"ipv4:{found.ipv4_mapped}"
    return f"{kind}:{ipaddress.IPv6Network((found, _IPV6_BITS), strict=False)}"
