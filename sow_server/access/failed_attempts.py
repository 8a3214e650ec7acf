"""Failed attempts to prove a name, by address: which of them the audit log tells, and which wait (rules A1, A8).

Secrets have 256 random bits, so nobody guesses one. A flood of attempts costs processor time and room in the audit log,
and both are bounded here.

    [1]  Only a failed attempt waits. A caller that proves its name is never slowed, whoever fails at its address.
    [2]  Memory is bounded: HOSTS_MAX addresses, HELD_MAX waiting attempts, each with a small request.
    [3]  Each attempt is told, by itself or in a count (`tally`).
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from sow_server.access.tally import WINDOW_SECONDS, Tally, Untold

TOLD_MAX: Final = 10
"""Attempts of one address in a minute that are told one by one; the others are counted."""
HOSTS_MAX: Final = 10_000
PER_MINUTE: Final = 600
"""Failed attempts of one address that are answered at once: a minute's worth may come together."""
WAIT_SECONDS: Final = 1.0
HELD_MAX: Final = 1_000
HELD_OF_HOST_MAX: Final = 100
HELD_BYTES_MAX: Final = 16 * 2**10
"""The bound of the request of an attempt that waits: gRPC keeps the bytes until it is answered."""
_IPV6_BITS: Final = 64
"""One caller has at least a network of so many bits to itself, and may use each address in it."""


@dataclass(slots=True)
class _Host:
    at: float
    """When `allowance` was true."""
    allowance: float = float(PER_MINUTE)
    held: int = 0


class FailedAttempts:
    """Owns the counts. Event loop only."""

    def __init__(self, elapsed: Callable[[], float]) -> None:
        """`elapsed`: seconds of a monotonic clock."""
        self._elapsed: Final = elapsed
        self._tally: Final = Tally(elapsed, TOLD_MAX)
        self._hosts: dict[str, _Host] = {}
        """In the order of their last failures."""
        self._held = 0

    def failed(self, address: str) -> bool:
        """Counts a failed attempt; whether it is told by itself. `address`: as gRPC writes it."""
        now, name = self._elapsed(), host_of(address)
        host = self._hosts.pop(name, None) or _Host(now)
        if len(self._hosts) >= HOSTS_MAX:
            del self._hosts[next(iter(self._hosts))]
        self._hosts[name] = host
        host.allowance = max(_refilled(host, now) - 1, -1.0)
        host.at = now
        return self._tally.told(name)

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
        """As `Tally.due`. Forgets the addresses that have not failed lately."""
        now = self._elapsed()
        rested = itertools.takewhile(lambda item: _refilled(item[1], now) >= PER_MINUTE, list(self._hosts.items()))
        for name, _ in rested:
            del self._hosts[name]
        return self._tally.due(at_the_end=at_the_end)


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
