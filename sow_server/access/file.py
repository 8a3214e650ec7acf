"""Reads the access file: TOML becomes an `AccessFile`, or an error that names the table and key (rule A2)."""

from __future__ import annotations

import datetime
import difflib
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from sow_server.access.model import (
    ANONYMOUS,
    UNLIMITED,
    AccessFile,
    Credential,
    Grant,
    Identity,
    Limits,
    Peer,
    Role,
)
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
from sow_server.config.secret_files import check_private_file
from sow_server.config.toml_places import TomlPlaces
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import MICROS
from sow_server.engine.values.patterns import matcher
from sow_server.filters import FilterError, compile_filter, parse
from sow_server.filters.restriction import Steps
from sow_server.filters.tree import Filter, Function, FunctionCall, Metadata, MetadataName, walk

T = TypeVar("T")

_NAME: Final = Text(r"[A-Za-z0-9_.:@-]{1,200}", "1 to 200 of [A-Za-z0-9_.:@-]")
_CERTIFICATE: Final = Text(r"(URI|DNS|CN|EMAIL|IP):.{1,1000}", 'a name with its type such as "URI:spiffe://bank/desk"')
_SHA256: Final = Text(r"[0-9a-f]{64}", "64 hexadecimal digits, as `sow token new` prints them")
_SUBSCRIPTED: Final = re.compile(r"\[[0-9*]*\]\Z")
_CREDENTIALS: Final = ("certificate", "token_sha256", "jwt")
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
        return tuple(_hidden_path(text) for text in texts)

    def show(self, value: tuple[Steps, ...]) -> str:
        return repr(value)


def _hidden_path(text: str) -> Steps:
    steps = parse_path(text)
    for step in steps:
        # Here it is a part of a name, as in keys, and would hide nothing of an array. In brackets it is meant.
        if _SUBSCRIPTED.search(step) and f"/{step}" in text:
            raise ValueError(f"{quoted(text)} has a subscript; leave it out: a field is hidden in each element")
    return steps


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


_NO_LIMIT: Final = -1
"""The value of a form for "unlimited", where None is a limit that the file does not give."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit, or "unlimited"."""

    kind: ValueKind[int]

    def read(self, value: object, folder: Path) -> int:
        if value == UNLIMITED:
            return _NO_LIMIT
        try:
            return self.kind.read(value, folder)
        except ValueError as error:
            raise ValueError(f"{error}; {quoted(UNLIMITED)} is no limit") from None

    def show(self, value: int) -> str:
        return quoted(UNLIMITED) if value == _NO_LIMIT else self.kind.show(value)


_MANY: Final = MayBeAbsent(_Limit(Count(0, 1_000_000)))
_BYTES: Final = MayBeAbsent(_Limit(Size(1, 2**40)))


@dataclass(frozen=True, slots=True)
class _LimitsForm:
    rpcs: int | None = _key(_MANY, None)
    subscriptions: int | None = _key(_MANY, None)
    exports: int | None = _key(_MANY, None)
    loads: int | None = _key(_MANY, None)
    topics: int | None = _key(_MANY, None)
    durables: int | None = _key(_MANY, None)
    publishers: int | None = _key(_MANY, None)
    bytes_in_flight: int | None = field(default=None, metadata={"kind": _BYTES, "key": "bytes_in_flight"})
    requests_per_second: int | None = _key(_MANY, None)
    backlog_bytes: int | None = field(default=None, metadata={"kind": _BYTES, "key": "backlog_bytes"})


assert {limit.name for limit in fields(_LimitsForm)} == {limit.name for limit in fields(Limits)}, "one form of each"


def load_access(path: Path) -> AccessFile:
    """The access file at a path. Raises ConfigError naming the table and the key, also if other users may read it."""
    tables = parse_toml(path)
    try:
        check_private_file(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return _File(path, TomlPlaces(path), tables).read()


class _Table(NamedTuple):
    """A table of the file: its place and its content."""

    name: str
    reader: TableReader
    """Its errors name the file and the line."""
    place: str
    given: dict[str, object]

    def error(self, key: str, message: str) -> ConfigError:
        return self.reader.error(self.name, key, message)


class _File:
    def __init__(self, path: Path, places: TomlPlaces, tables: dict[str, object]) -> None:
        self._path = path
        self._places = places
        self._tables = tables
        self._reader = self._reader_at(None)

    def read(self) -> AccessFile:
        for name, value in self._tables.items():
            if name not in ("identities", "peers", "roles"):
                raise self._reader.unknown_key("", name, value, ["identities", "peers", "roles"])
        roles = {name: self._role(name, value) for name, value in self._table("roles", self._tables).given.items()}
        holders: dict[str, Identity | Peer] = {}
        proofs: dict[tuple[str, str], str] = {}

        def taken(table: _Table, holder: Identity | Peer) -> None:
            """One name has one caller, and so has one credential."""
            if holder.name in holders:
                raise table.error("name", f"{quoted(holder.name)} names two callers")
            holders[holder.name] = holder
            for kind in _CREDENTIALS:
                value: str = getattr(holder.credential, kind)
                if value and proofs.setdefault((kind, value), holder.name) != holder.name:
                    other = proofs[kind, value]
                    raise table.error(kind, f"{quoted(other)} and {quoted(holder.name)} have the same one")

        identities: dict[str, Identity] = {}
        for table in self._entries("identities", self._tables):
            identity = self._identity(table, roles)
            taken(table, identity)
            identities[identity.name] = identity
        peers: dict[str, Peer] = {}
        for table in self._entries("peers", self._tables):
            peer = self._peer(table)
            taken(table, peer)
            peers[peer.name] = peer
        return AccessFile(MappingProxyType(identities), MappingProxyType(peers))

    def _reader_at(self, line: int | None) -> TableReader:
        source = str(self._path) if line is None else f"{self._path}:{line}"
        return TableReader(source, self._path.absolute().parent, is_configuration=False)

    def _table(self, name: str, tables: dict[str, object]) -> _Table:
        value = tables.get(name.rpartition(".")[2], {})
        reader = self._reader_at(self._places.line(name))
        if not isinstance(value, dict):
            raise reader.error("", name, f"expected the table [{name}], found {noun(value)}")
        return _Table(name, reader, "", dict(value))

    def _entries(self, name: str, tables: dict[str, object]) -> list[_Table]:
        value = tables.get(name.rpartition(".")[2], [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self._reader.error("", name, f"expected tables, each under the heading [[{name}]]")
        return [
            _Table(
                f"{name}[{index}]",
                self._reader_at(self._places.line(name, index)),
                self._places.of(name, index),
                dict(entry),
            )
            for index, entry in enumerate(value)
        ]

    def _role(self, name: str, value: object) -> Role:
        table = f"roles.{name}"
        if not isinstance(value, dict):
            raise self._reader.error("", table, f"expected the table [{table}], found {noun(value)}")
        for key, found in value.items():
            if key not in ("grants", "limits"):
                raise self._reader_at(self._places.line(table)).unknown_key(table, key, found, ["grants", "limits"])
        grants = [self._grant(entry) for entry in self._entries(f"{table}.grants", value)]
        found = self._table(f"{table}.limits", value)
        limits = found.reader.section(_LimitsForm, found.name, found.given)
        given = {limit.name: getattr(limits, limit.name) for limit in fields(limits)}
        return Role(
            name,
            tuple(grants),
            MappingProxyType({key: None if at == _NO_LIMIT else at for key, at in given.items() if at is not None}),
        )

    def _grant(self, table: _Table) -> Grant:
        form = table.reader.section(_GrantForm, table.name, table.given)
        if not form.allow and not form.deny:
            raise table.error("allow", "is missing; a grant allows or denies something")
        on_topics = (form.allow | form.deny) - SERVER_ACTIONS
        if on_topics and not form.topics:
            words = ", ".join(sorted(action.value for action in on_topics))
            raise table.error("topics", f"is missing, and {words} needs it")
        if form.deny and (form.rows or form.hide):
            raise table.error("deny", "cannot be combined with rows or hide; deny the whole topic")
        for key in ("rows", "hide"):
            if not on_topics and getattr(form, key):
                words = ", ".join(sorted(action.value for action in form.allow))
                raise table.error(key, f"restricts actions on topics; {words} is for the whole server")
        return Grant(
            table.place,
            form.topics,
            matcher(form.topics) if form.topics else _no_topic,
            form.allow,
            form.deny,
            self._rows(table, form.rows) if form.rows else None,
            form.hide,
        )

    def _rows(self, table: _Table, text: str) -> Filter:
        tree = parse(text)
        for node in walk(tree):
            if isinstance(node, Metadata) and node.name not in (MetadataName.KEY, MetadataName.TOPIC):
                raise table.error(
                    "rows", f"@{node.name.value} changes without a new record; use fields, @key and @topic"
                )
            if isinstance(node, FunctionCall) and node.function is Function.NOW_MICROS:
                raise table.error("rows", "NOW_MICROS() changes without a new record")
            if isinstance(node, FunctionCall) and node.function is Function.MESSAGE_SIZE:
                raise table.error("rows", "MESSAGE_SIZE() does not say what a record is; use fields, @key and @topic")
        try:
            # Regular expressions are not read before.
            compile_filter(tree, key_paths=[], allow_now=False)
        except FilterError as error:
            raise table.error("rows", error.message) from None
        return tree

    def _credential(self, table: _Table, form: _CredentialForm, name: str) -> Credential:
        if not name:
            raise table.error("name", "is missing")
        given = [key for key in _CREDENTIALS if getattr(form, key)]
        if name == ANONYMOUS and not given and isinstance(form, _IdentityForm):
            return Credential(expire_micros=form.expires)
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise table.error("", f"{quoted(name)} needs one of certificate, token_sha256 and jwt, found {found}")
        return Credential(form.certificate, form.token_sha256, form.jwt, form.expires)

    def _identity(self, table: _Table, roles: dict[str, Role]) -> Identity:
        form = table.reader.section(_IdentityForm, table.name, table.given)
        credential = self._credential(table, form, form.name)
        for name in form.roles:
            if name not in roles:
                near = difflib.get_close_matches(name, roles, n=1)
                hint = f", did you mean {quoted(near[0])}?" if near else ""
                raise table.error("roles", f"{quoted(form.name)} has the unknown role {quoted(name)}{hint}")
        return Identity(form.name, credential, tuple(roles[name] for name in form.roles))

    def _peer(self, table: _Table) -> Peer:
        form = table.reader.section(_PeerForm, table.name, table.given)
        credential = self._credential(table, form, form.name)
        return Peer(table.place, form.name, credential, form.topics, matcher(form.topics))


def _no_topic(name: str) -> bool:
    return False
