"""The access file as values. Frozen; a reload makes new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Final

from sow_server.access.needs import Action
from sow_server.filters.restriction import Steps
from sow_server.filters.tree import Filter

ANONYMOUS: Final = "anonymous"
"""The identity of callers on a listener that asks for no credential."""
UNLIMITED: Final = "unlimited"
"""A limit of a role that says so leaves the bound to the server."""
DEFAULT_RPCS: Final = 500
DEFAULT_SUBSCRIPTIONS: Final = 250
DEFAULT_BYTES_IN_FLIGHT: Final = 128 * 2**20
DEFAULT_REQUESTS_PER_SECOND: Final = 5_000
DEFAULT_BACKLOG_BYTES: Final = 4 * 2**30
DEFAULT_EXPORTS: Final = 16
DEFAULT_LOADS: Final = 4
DEFAULT_TOPICS: Final = 1_000
DEFAULT_DURABLES: Final = 1_000
DEFAULT_PUBLISHERS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one identity (rule A7): a quarter of what the server has by default, or less. None: unlimited, so
    the bounds of the server alone apply."""

    rpcs: int | None = DEFAULT_RPCS
    """Calls under way."""
    subscriptions: int | None = DEFAULT_SUBSCRIPTIONS
    exports: int | None = DEFAULT_EXPORTS
    loads: int | None = DEFAULT_LOADS
    topics: int | None = DEFAULT_TOPICS
    """Topics that it may create within an hour."""
    durables: int | None = DEFAULT_DURABLES
    """Durable subscriptions and pins that it owns."""
    publishers: int | None = DEFAULT_PUBLISHERS
    """Publisher ids that it may begin to use within an hour."""
    bytes_in_flight: int | None = DEFAULT_BYTES_IN_FLIGHT
    """Bytes of its requests that are not answered."""
    requests_per_second: int | None = DEFAULT_REQUESTS_PER_SECOND
    backlog_bytes: int | None = DEFAULT_BACKLOG_BYTES
    """Bytes of journals that its durables and pins may leave unacknowledged, together (rule J19)."""

    def of(self, name: str) -> int | None:
        """One limit by its name; None: there is none."""
        found: int | None = getattr(self, name)
        return found

    def named(self) -> dict[str, int]:
        """The limits that apply, by name."""
        found = {limit.name: getattr(self, limit.name) for limit in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Grant:
    """One grant of a role."""

    place: str = field(compare=False)
    """Its line in the access file. A grant that only moved in the file is the same grant."""
    topics: str
    matches: Callable[[str], bool] = field(compare=False, repr=False)
    allow: frozenset[Action]
    deny: frozenset[Action]
    rows: Filter | None
    hide: tuple[Steps, ...]


@dataclass(frozen=True, slots=True)
class Role:
    """Grants and limits that identities share."""

    name: str
    grants: tuple[Grant, ...]
    limits: Mapping[str, int | None] = field(compare=False)
    """The ones that the file gives; None: unlimited. They say how much, not what: a change of them ends no stream (rule
    A6)."""


@dataclass(frozen=True, slots=True)
class Credential:
    """Proof of a name. Exactly one of `certificate`, `token_sha256` and `jwt` is given; none for `ANONYMOUS`."""

    certificate: str = ""
    """A name in the certificate with its type: `URI:spiffe://bank/desk-eu`, `DNS:…`, `CN:…`, `EMAIL:…`, `IP:…`."""
    token_sha256: str = ""
    """In hexadecimal digits."""
    jwt: str = ""
    """The claim that names the caller."""
    expire_micros: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller that the access file names."""

    name: str
    credential: Credential
    roles: tuple[Role, ...]

    @property
    def limits(self) -> Limits:
        """The largest of the limits that its roles give; the default where none gives one."""
        given: dict[str, int | None] = {}
        for role in self.roles:
            for name, value in role.limits.items():
                before = given.get(name, 0)
                given[name] = None if value is None or before is None else max(value, before)
        return Limits(**given)


@dataclass(frozen=True, slots=True)
class Peer:
    """An instance that may replicate to this one, under this name and no other."""

    place: str = field(compare=False)
    """Its line in the access file."""
    name: str
    credential: Credential
    topics: str
    matches: Callable[[str], bool] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class AccessFile:
    """All of an access file."""

    identities: Mapping[str, Identity] = field(default_factory=lambda: MappingProxyType({}))
    peers: Mapping[str, Peer] = field(default_factory=lambda: MappingProxyType({}))
