"""The addresses of a client: the list as the user writes it, names with several addresses, and their order. Pure.

[1]  An address is in a list once, however often it was given.
[2]  The order of a client stays the same while its names keep their addresses.
"""

from __future__ import annotations

import ipaddress
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from sow_client._channel import ADDRESS, is_local, proxy_variable, target
from sow_client._records import invalid

Prefer: TypeAlias = Literal["first", "random"]
"""Which address of a list a client prefers: the first, or one that it draws when it is made."""
ADDRESSES_MAX: Final = 100
"""Addresses of a list; of more, also of the addresses of names, the first are taken."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one instance."""

    target: str
    """As gRPC takes it: HOST:PORT, or with a gRPC scheme."""
    host: str = ""
    """The name that it is one of several addresses of; empty: it was given itself."""


def parsed(server: str | Iterable[str]) -> tuple[str, ...]:
    """The addresses of a list, as "a:7450,b:7450" or ["a:7450", "b:7450"], each with its port. Raises
    InvalidArgument."""
    if not isinstance(server, str):
        given = list(server)
        if not all(isinstance(one, str) for one in given):
            raise invalid("server", f"{given!r} is not a list of texts HOST:PORT")
        server = ",".join(given)
    parts = [part.strip() for part in server.split(",")]
    if not all(parts):
        raise invalid("server", f"{server!r} has an empty address" if any(parts) else f"{server!r} is not HOST:PORT")
    if len(parts) > ADDRESSES_MAX:
        raise invalid("server", f"{len(parts)} addresses are more than {ADDRESSES_MAX}")
    return tuple(dict.fromkeys(map(target, parts)))


def checked_preference(prefer: str) -> Prefer:
    """Raises InvalidArgument for another text."""
    if prefer not in ("first", "random"):
        raise invalid("prefer", f'{prefer!r} is neither "first" nor "random"')
    return "random" if prefer == "random" else "first"


def is_name(server: str, variables: Mapping[str, str] = os.environ) -> bool:
    """True if an address has a name that may have several addresses. Where gRPC connects through a proxy, the proxy
    looks names up, and this machine may not know them."""
    match = ADDRESS.fullmatch(server)
    if match is None or is_local(server) or proxy_variable(server, variables):
        return False
    try:
        ipaddress.ip_address(match["host"].strip("[]").partition("%")[0])
    except ValueError:
        return True
    return False


def host_and_port(server: str) -> tuple[str, int]:
    """The two parts of the address of a name."""
    host, _, port = server.rpartition(":")
    return host, int(port)


def expanded(servers: Iterable[str], found: Mapping[str, Sequence[str]]) -> tuple[Address, ...]:
    """The addresses of a list. `found`: the IP addresses of its names; a name with fewer than two is left to gRPC."""
    result: dict[Address, None] = {}
    for server in servers:
        ips = tuple(dict.fromkeys(found.get(server, ())))
        if len(ips) < 2:
            result[Address(server)] = None
            continue
        host, port = host_and_port(server)
        for ip in sorted(ips):  # resolvers give them in a changing order
            result[Address(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", host)] = None
    return tuple(result)[:ADDRESSES_MAX]


def ordered(addresses: Sequence[Address], prefer: Prefer, seed: int) -> tuple[Address, ...]:
    """The addresses in the order in which a client tries them; `seed`: the client's own, for "random" ([2])."""
    if prefer == "first":
        return tuple(addresses)
    return tuple(sorted(addresses, key=lambda address: random.Random(f"{seed} {address.target}").random()))
