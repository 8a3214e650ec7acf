"""Reads the access file: TOML becomes an `AccessFile`, or an error that names the table and key (rule A2)."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from sow_server.access.model import ANONYMOUS, AccessFile, Credential, Grant, Identity, Limits, Peer, Role
from sow_server.access.needs import GRANTABLE, SERVER_ACTIONS, Action
from sow_server.config import ConfigError
from sow_server.config.file import TableReader, parse_toml
from sow_server.config.kinds import (
    INSTANCE_KIND,
    Choice,
    Count,
    FilterText,
    MayBeAbsent,
    Pattern,
    Size,
    Text,
    Texts,
    ValueKind,
    noun,
    quoted,
)
from sow_server.config.private import check_private_file
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import MICROS
from sow_server.engine.values.patterns import matcher
from sow_server.filters import parse
from sow_server.filters.restriction import Steps
from sow_server.filters.tree import Call, Filter, Function, Metadata, MetadataName, walk

T = TypeVar("T")

_NAME: Final = Text(r"[A-Za-z0-9_.:@-]{1,200}", "1 to 200 of [A-Za-z0-9_.:@-]")
_CERTIFICATE: Final = Text(r"(URI|DNS|CN|EMAIL|IP):.{1,1000}", 'a name with its type such as "URI:spiffe://bank/desk"')
_SHA256: Final = Text(r"[0-9a-f]{64}", "64 hexadecimal digits, as `sow token new` prints them")
_EVERY_TOPIC: Final = ".*"


@dataclass(frozen=True, slots=True)
class _Moment:
    """A date, which is its begin in UTC, or a date with time and zone; in microseconds."""

    def read(self, value: object, folder: Path) -> int:
        if isinstance(value, datetime.datetime):
            if value.tzinfo is None:
                raise ValueError("the time has no zone; write for example 2027-01-01T00:00:00Z")
            moment = value
        elif isinstance(value, datetime.date):
            moment = datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC)
        else:
            raise ValueError(f"expected a date such as 2027-01-01, found {noun(value)}")
        return int(moment.timestamp()) * MICROS

    def show(self, value: int) -> str:
        return datetime.datetime.fromtimestamp(value / MICROS, datetime.UTC).isoformat()


@dataclass(frozen=True, slots=True)
class _Paths:
    """Paths of fields."""

    def read(self, value: object, folder: Path) -> tuple[Steps, ...]:
        texts = Texts('paths such as ["/client/iban"]').read(value, folder)
        return tuple(parse_path(text) for text in texts)

    def show(self, value: tuple[Steps, ...]) -> str:
        return repr(value)


@dataclass(frozen=True, slots=True)
class _Actions:
    def read(self, value: object, folder: Path) -> frozenset[Action]:
        words = Texts('actions such as ["read", "publish"]').read(value, folder)
        known = Choice(tuple(action.value for action in GRANTABLE))
        return frozenset(Action(known.read(word, folder)) for word in words)

    def show(self, value: frozenset[Action]) -> str:
        return repr(sorted(action.value for action in value))


def _key(kind: ValueKind[T], default: T) -> T:
    found: T = field(default=default, metadata={"kind": kind, "key": ""})
    return found


def _needed(kind: ValueKind[T]) -> T:
    found: T = field(metadata={"kind": kind, "key": ""})
    return found


@dataclass(frozen=True, slots=True)
class _CredentialForm:
    certificate: str = _key(_CERTIFICATE, "")
    token_sha256: str = _key(_SHA256, "")
    jwt: str = _key(Text(r".{1,1000}", "the claim that names the caller"), "")
    expires: int | None = _key(MayBeAbsent(_Moment()), None)


@dataclass(frozen=True, slots=True)
class _IdentityForm(_CredentialForm):
    name: str = _key(_NAME, "")
    roles: tuple[str, ...] = _key(Texts('names of roles such as ["trader-eu"]'), ())


@dataclass(frozen=True, slots=True)
class _PeerForm(_CredentialForm):
    name: str = _key(INSTANCE_KIND, "")
    topics: str = _key(Pattern(), _EVERY_TOPIC)


@dataclass(frozen=True, slots=True)
class _GrantForm:
    topics: str = _key(Pattern(), "")
    allow: frozenset[Action] = _key(_Actions(), frozenset())
    deny: frozenset[Action] = _key(_Actions(), frozenset())
    rows: str = _key(FilterText(), "")
    hide: tuple[Steps, ...] = _key(_Paths(), ())


_MANY: Final = MayBeAbsent(Count(0, 1_000_000))


@dataclass(frozen=True, slots=True)
class _LimitsForm:
    rpcs: int | None = _key(_MANY, None)
    subscriptions: int | None = _key(_MANY, None)
    exports: int | None = _key(_MANY, None)
    loads: int | None = _key(_MANY, None)
    topics: int | None = _key(_MANY, None)
    durables: int | None = _key(_MANY, None)
    publishers: int | None = _key(_MANY, None)
    bytes_in_flight: int | None = field(
        default=None, metadata={"kind": MayBeAbsent(Size(1, 2**40)), "key": "bytes_in_flight"}
    )
    requests_per_second: int | None = _key(_MANY, None)


assert {limit.name for limit in fields(_LimitsForm)} == {limit.name for limit in fields(Limits)}, "one form of each"


def load_access(path: Path) -> AccessFile:
    """The access file at a path. Raises ConfigError naming the table and the key, also if other users may read it."""
    try:
        check_private_file(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ConfigError(str(error)) from None
    reader = TableReader(str(path), path.absolute().parent)
    return _File(reader, _Places(path), parse_toml(path)).read()


class _Places:
    """The lines of the headings of a file: TOML values do not know theirs."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._lines: dict[str, list[int]] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if (heading := re.match(r"\s*\[\[(.+)\]\]", line)) is not None:
                name = re.sub(r"[\s\"']", "", heading[1])
                self._lines.setdefault(name, []).append(number)

    def of(self, name: str, index: int) -> str:
        """The place of the heading `[[name]]` number `index`, from 0."""
        lines = self._lines.get(name, [])
        line = f":{lines[index]}" if index < len(lines) else ""
        return f"{self._name}{line} {name}[{index}]"


class _File:
    def __init__(self, reader: TableReader, places: _Places, tables: dict[str, object]) -> None:
        self._reader = reader
        self._places = places
        self._tables = tables

    def read(self) -> AccessFile:
        for name in self._tables:
            if name not in ("identities", "peers", "roles"):
                raise self._reader.error("", name, "unknown table (known: identities, peers, roles)")
        roles = {name: self._role(name, value) for name, value in self._table("roles", self._tables).items()}
        identities: dict[str, Identity] = {}
        for identity in [self._identity(given, roles) for given in self._entries("identities", self._tables)]:
            if identity.name in identities:
                raise self._reader.error("identities", "name", f"{quoted(identity.name)} names two identities")
            identities[identity.name] = identity
        peers: dict[str, Peer] = {}
        for index, given in enumerate(self._entries("peers", self._tables)):
            peer = self._peer(index, given)
            if peer.name in peers or peer.name in identities:
                what = "two peers" if peer.name in peers else "an identity and a peer"
                raise self._reader.error("peers", "name", f"{quoted(peer.name)} names {what}")
            peers[peer.name] = peer
        self._check_credentials([*identities.values(), *peers.values()])
        return AccessFile(MappingProxyType(identities), MappingProxyType(peers))

    def _table(self, name: str, tables: dict[str, object]) -> dict[str, object]:
        value = tables.get(name.rpartition(".")[2], {})
        if not isinstance(value, dict):
            raise self._reader.error("", name, f"expected the table [{name}], found {noun(value)}")
        return dict(value)

    def _entries(self, name: str, tables: dict[str, object]) -> list[dict[str, object]]:
        value = tables.get(name.rpartition(".")[2], [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self._reader.error("", name, f"expected tables, each under the heading [[{name}]]")
        return [dict(entry) for entry in value]

    def _role(self, name: str, value: object) -> Role:
        table = f"roles.{name}"
        if not isinstance(value, dict):
            raise self._reader.error("", table, f"expected the table [{table}], found {noun(value)}")
        for key in value:
            if key not in ("grants", "limits"):
                raise self._reader.error(table, key, "unknown key (known: grants, limits)")
        grants = [
            self._grant(f"{table}.grants", index, given)
            for index, given in enumerate(self._entries(f"{table}.grants", value))
        ]
        limits = self._reader.section(_LimitsForm, f"{table}.limits", self._table(f"{table}.limits", value))
        given = {limit.name: getattr(limits, limit.name) for limit in fields(limits)}
        return Role(name, tuple(grants), MappingProxyType({key: at for key, at in given.items() if at is not None}))

    def _grant(self, table: str, index: int, given: dict[str, object]) -> Grant:
        place = self._places.of(table, index)
        which = f"{table}[{index}]"
        form = self._reader.section(_GrantForm, which, given)
        if not form.allow and not form.deny:
            raise self._reader.error(which, "allow", "is missing; a grant allows or denies something")
        on_topics = (form.allow | form.deny) - SERVER_ACTIONS
        if on_topics and not form.topics:
            words = ", ".join(sorted(action.value for action in on_topics))
            raise self._reader.error(which, "topics", f"is missing, and {words} needs it")
        if form.deny and (form.rows or form.hide):
            raise self._reader.error(which, "deny", "cannot be combined with rows or hide; deny the whole topic")
        return Grant(
            place,
            form.topics,
            matcher(form.topics) if form.topics else _no_topic,
            form.allow,
            form.deny,
            self._rows(which, form.rows) if form.rows else None,
            form.hide,
        )

    def _rows(self, table: str, text: str) -> Filter:
        tree = parse(text)
        for node in walk(tree):
            if isinstance(node, Metadata) and node.name not in (MetadataName.KEY, MetadataName.TOPIC):
                raise self._reader.error(
                    table, "rows", f"@{node.name.value} changes without a new record; use fields, @key and @topic"
                )
            if isinstance(node, Call) and node.function is Function.NOW_MICROS:
                raise self._reader.error(table, "rows", "NOW_MICROS() changes without a new record")
        return tree

    def _credential(self, table: str, name: str, form: _CredentialForm) -> Credential:
        if not name:
            raise self._reader.error(table, "name", "is missing")
        given = [key for key in ("certificate", "token_sha256", "jwt") if getattr(form, key)]
        if name == ANONYMOUS and not given and isinstance(form, _IdentityForm):
            return Credential()
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise self._reader.error(
                table, "", f"{quoted(name)} needs one of certificate, token_sha256 and jwt, found {found}"
            )
        return Credential(form.certificate, form.token_sha256, form.jwt, form.expires)

    def _identity(self, given: dict[str, object], roles: dict[str, Role]) -> Identity:
        form = self._reader.section(_IdentityForm, "identities", given)
        credential = self._credential("identities", form.name, form)
        for name in form.roles:
            if name not in roles:
                raise self._reader.error("identities", "roles", f"{quoted(form.name)} has the unknown role {name}")
        return Identity(form.name, credential, tuple(roles[name] for name in form.roles))

    def _peer(self, index: int, given: dict[str, object]) -> Peer:
        form = self._reader.section(_PeerForm, "peers", given)
        credential = self._credential("peers", form.name, form)
        return Peer(self._places.of("peers", index), form.name, credential, form.topics, matcher(form.topics))

    def _check_credentials(self, holders: list[Identity | Peer]) -> None:
        """One credential names one caller."""
        names: dict[tuple[str, str], str] = {}
        for holder in holders:
            for kind in ("certificate", "token_sha256", "jwt"):
                value: str = getattr(holder.credential, kind)
                other = names.setdefault((kind, value), holder.name) if value else holder.name
                if other != holder.name:
                    raise ConfigError(
                        str(
                            self._reader.error("", kind, f"{quoted(other)} and {quoted(holder.name)} have the same one")
                        )
                    )


def _no_topic(name: str) -> bool:
    return False
