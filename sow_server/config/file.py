"""The configuration file: TOML, the environment and command-line overrides become a `Config`.

`rendering` writes one as TOML again.

    [1]  Unknown tables and keys, wrong types, values out of bounds and values that contradict each other are refused.
         The error names the file, the table and the key, and for a misspelt name the nearest known one.
    [2]  `load` of the text that `render` writes gives the same `Config`.

Paths in the file are relative to its folder; those on the command line and in the environment are relative to the
working directory. In a `Config` they are absolute.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, cast

from sow_server.certificates import CertificateFault, CertificateFiles, read_authorities, read_pair, read_set
from sow_server.config.cells import Cell, of_cell
from sow_server.config.cells import places as places_of_cell
from sow_server.config.described import secrets_of
from sow_server.config.environment import ORIGIN, apply_environment
from sow_server.config.kinds import Address, FilePath, ValueKind, micros, noun, quoted, split_address
from sow_server.config.knobs import knobs, knobs_of
from sow_server.config.relations import check_relations
from sow_server.config.rendering import toml_key
from sow_server.config.secret_files import check_private_file
from sow_server.config.sections import (
    DEFINING,
    LISTENERS_TABLE,
    PEERS_TABLE,
    SECTIONS,
    AccessConfig,
    BackupConfig,
    ClockConfig,
    Config,
    ConfigError,
    DeclaredView,
    DefaultsForm,
    JournalConfig,
    JwtConfig,
    LimitsConfig,
    ListenerConfig,
    LogConfig,
    MetricsConfig,
    PeerConfig,
    Place,
    PlacementConfig,
    ReplicationConfig,
    ServerConfig,
    StorageConfig,
    SubscriptionsConfig,
    SweepConfig,
    TlsConfig,
    TopicForm,
    TracingConfig,
    ViewForm,
)
from sow_server.config.toml_places import DOTS_MAX, end_of, many_dots
from sow_server.engine.catalog.topics import check_name, check_settings
from sow_server.engine.values import policies
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import (
    Expiration,
)
from sow_server.engine.values.policies import Declared, check_limits_and_values, resolve_topic, tidy
from sow_server.engine.values.views import ViewDefinition
from sow_server.regular_files import read_regular
from sow_server.revocations import read_revocations

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Overrides:
    """The options of the command line, as written; None and False: not given."""

    data_dir: str | None = None
    listen: str | None = None
    prune_interval: str | None = None
    accept_clock: bool = False
    accept_loss: bool = False
    insecure: bool = False
    authoritative: bool = False
    cell: Cell | None = None
    """The cell of `--cells` whose configuration it is to be; None: that of a server alone."""

    def places(self) -> Iterator[Place]:
        """The place of each setting that an option sets."""
        if self.data_dir is not None:
            yield "server", 0, "data_dir"
        if self.listen is not None:
            yield "server", 0, "listen"
        if self.insecure:
            yield "server", 0, "insecure"
        if self.prune_interval is not None:
            yield "journal", 0, "prune_interval"


def load(
    path: Path | None,
    overrides: Overrides | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    text: str | None = None,
) -> Config:
    """The configuration of a file, with the variables of the environment and then the overrides applied. Without a
    file: the defaults, with dynamic topics. `text`: that of the file, if it has been read before. Raises
    ConfigError."""
    overrides = overrides or Overrides()
    tables: dict[str, object] = {"server": {"dynamic_topics": True}}
    if path is not None:
        tables = parse_text(path, read_text(path, pipe=True) if text is None else text)
    given = {} if path is None else dict.fromkeys(_places(tables), "file")
    variables = apply_environment(environment, tables)
    source, folder = ("default configuration", Path.cwd()) if path is None else (str(path), path.absolute().parent)
    reader = TableReader(source, folder, variables=variables)
    config = reader.config(tables)
    _check_inline_secrets(reader, config, path, variables)
    config = _override(config, overrides)
    of_all = config
    if overrides.cell is not None:
        config = of_cell(config, overrides.cell, reader.error)
    check_relations(reader.error, config)
    given |= {(table, 0, key): ORIGIN for table, key in variables}
    given |= dict.fromkeys(overrides.places(), "command line")
    if overrides.cell is not None:
        given |= dict.fromkeys(places_of_cell(of_all), "command line")
    return dataclasses.replace(config, given=MappingProxyType(given))


def _check_inline_secrets(
    reader: TableReader, config: Config, path: Path | None, variables: Mapping[tuple[str, str], str]
) -> None:
    """Raises ConfigError if a file holds a secret itself, and other users may access it, or if the environment does
    (rule X5)."""
    for table, key, _ in secrets_of(config):
        if (table, key) in variables:
            raise reader.error(table, key, "has a password in it; write it in the configuration file")
        assert path is not None, "the defaults have no secrets"
        try:
            check_private_file(path)
        except ValueError as error:
            raise reader.error(table, key, str(error)) from None


def _places(tables: Mapping[str, object], above: str = "", number: int = 0) -> Iterator[Place]:
    """The place of each value of a file."""
    for key, value in tables.items():
        table = f"{above}.{key}" if above else key
        if isinstance(value, dict):
            yield from _places(value, table)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for place, one in enumerate(value, 1):
                yield from _places(one, table, place)
        else:
            yield above, number, key


def read_peer(config: Config, given: Mapping[str, object]) -> PeerConfig:
    """A peer that joins those of a configuration, from its settings as in [[replication.peers]]. Raises ConfigError."""
    reader = TableReader("the new peer", Path.cwd())
    peer = reader.peer(dict(given))
    check_relations(reader.error, dataclasses.replace(config, peers=(*config.peers, peer)))
    return peer


def check_accepted(config: Config, name: str) -> None:
    """Checks the name of an instance that may send besides those of a configuration. Raises ConfigError."""
    reader = TableReader("the new source", Path.cwd())
    accept = reader.section(ReplicationConfig, "replication", {"accept": [name]}).accept
    replication = dataclasses.replace(config.replication, accept=(*config.replication.accept, *accept))
    check_relations(reader.error, dataclasses.replace(config, replication=replication))


def parse_toml(path: Path) -> dict[str, object]:
    """The tables of a file. Raises ConfigError."""
    return parse_text(path, read_text(path))


def read_text(path: Path, *, pipe: bool = False) -> str:
    """The text of a file. `pipe`: it may be one, as it is read once. Raises ConfigError."""
    try:
        return (path.read_bytes() if pipe and path.is_fifo() else read_regular(path)).decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 at byte {error.start}") from error


def parse_text(path: Path, text: str) -> dict[str, object]:
    """The tables of a text. `path`: the file that it is of, for the error. Raises ConfigError."""
    if (at := many_dots(text)) is not None:
        line, column = end_of(text[:at])
        raise ConfigError(f"{path}:{line}:{column}: a name here has {DOTS_MAX} dots or more")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        text_of_error = str(error)
        where = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", text_of_error)
        line, column = end_of(text) if where is None or where[1] is None else (int(where[1]), int(where[2]))
        message = text_of_error if where is None else text_of_error[: where.start()]
        raise ConfigError(f"{path}:{line}:{column}: {message[:1].lower()}{message[1:]}") from error
    except RecursionError:
        raise ConfigError(f"{path}: tables or arrays are nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{path}: has an integer of more than 64 bits") from error


class TableReader:
    """Reads the tables of one file; every error begins with the file's name."""

    def __init__(
        self,
        source: str,
        folder: Path,
        *,
        is_configuration: bool = True,
        variables: Mapping[tuple[str, str], str] = MappingProxyType({}),
    ) -> None:
        """`is_configuration`: it has the tables of a `Config`, and a key in the wrong one is told the right one.
        `variables`: the variables of the environment that set values of the tables; errors about these name them."""
        self._source = source
        self._variables = variables
        self._folder = folder
        self._is_configuration = is_configuration

    def error(self, table: str, key: str, message: str) -> ConfigError:
        where = f"[{table}] {key}" if table and key else f"[{table}]" if table else key
        return ConfigError(f"{self._variables.get((table, key), self._source)}: {where}: {message}", key)

    def config(self, tables: dict[str, object]) -> Config:
        own = {name for name, _ in SECTIONS if "." not in name} | {"topics", "views"}
        for name, value in tables.items():
            if name not in own:
                raise self._unknown_table(name, value, sorted(own))
        server_table = self._table("server", tables)
        tls_table = server_table.pop("tls", None)
        tls = None if tls_table is None else self._tls(tls_table)
        listeners = self._listeners(server_table.pop("listeners", []))
        if listeners:
            self._check_one_form(server_table, tls)
        if tls is not None and tls.client_ca is not None:
            server_table.setdefault("auth", "certificate")
        server = self.section(ServerConfig, "server", server_table)
        access_table = self._table("access", tables)
        jwt = access_table.pop("jwt", None)
        jwt_table = None if jwt is None else self._as_table("access.jwt", jwt)
        access = self.section(AccessConfig, "access", access_table)
        replication_table = self._table("replication", tables)
        peers = self._peers(replication_table.pop("peers", []))
        return Config(
            server=dataclasses.replace(server, data_dir=self._folder / server.data_dir),
            storage=self.section(StorageConfig, "storage", self._table("storage", tables)),
            clock=self.section(ClockConfig, "clock", self._table("clock", tables)),
            sweep=self.section(SweepConfig, "sweep", self._table("sweep", tables)),
            journal=self.section(JournalConfig, "journal", self._table("journal", tables)),
            limits=self.section(LimitsConfig, "limits", self._table("limits", tables)),
            subscriptions=self.section(SubscriptionsConfig, "subscriptions", self._table("subscriptions", tables)),
            replication=self.section(ReplicationConfig, "replication", replication_table),
            peers=peers,
            backup=self.section(BackupConfig, "backup", self._table("backup", tables)),
            metrics=self._metrics(self._table("metrics", tables)),
            tls=tls,
            listener_tables=listeners,
            access=dataclasses.replace(access, audit=self._folder / access.audit),
            jwt=None if jwt_table is None else self.section(JwtConfig, "access.jwt", jwt_table),
            placement=self._placement(self._table("placement", tables)),
            tracing=self.section(TracingConfig, "tracing", self._table("tracing", tables)),
            log=self.section(LogConfig, "log", self._table("log", tables)),
            defaults=self._defaults(tables),
            topics=MappingProxyType(
                {name: self._topic(name, value) for name, value in self._table("topics", tables).items()}
            ),
            views=MappingProxyType(
                {name: self._view(name, value, tables) for name, value in self._table("views", tables).items()}
            ),
        )

    def _table(self, name: str, tables: dict[str, object]) -> dict[str, object]:
        return self._as_table(name, tables.get(name, {}))

    def _as_table(self, name: str, value: object) -> dict[str, object]:
        if not isinstance(value, dict):
            raise self.error("", name, f"expected the table [{name}], found {noun(value)}")
        return dict(value)

    def section(self, make: Callable[..., T], table: str, given: dict[str, object]) -> T:
        """Reads a table into the dataclass `make`."""
        values = self._values(make, table, given)
        for entry in dataclasses.fields(cast(type, make)):
            if entry.default is entry.default_factory is dataclasses.MISSING and entry.name not in values:
                raise self.error(table, entry.name, "is missing")
        return make(**values)

    def _values(self, make: Callable[..., object], table: str, given: dict[str, object]) -> dict[str, object]:
        """The values that a table sets, by the fields of the dataclass `make`."""
        known = {knob.key: knob for knob in knobs_of(table, cast(type, make))}
        values: dict[str, object] = {}
        for key, value in given.items():
            knob = known.get(key)
            if knob is None:
                raise self.unknown_key(table, key, value, list(known))
            try:
                values[knob.field] = knob.kind.read(value, self._folder)
            except ValueError as error:
                raise self.error(table, key, str(error)) from None
        return values

    def _tls(self, value: object) -> TlsConfig:
        table = "server.tls"
        tls = self.section(TlsConfig, table, self._as_table(table, value))
        self._check_files(table, CertificateFiles(tls.certificate, tls.key, tls.client_ca), tls.revoked)
        return tls

    def _listeners(self, value: object) -> tuple[ListenerConfig, ...]:
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self.error("server", "listeners", f"expected tables, each under the heading [[{LISTENERS_TABLE}]]")
        return tuple(self._listener(number, dict(entry)) for number, entry in enumerate(value, 1))

    def _metrics(self, given: dict[str, object]) -> MetricsConfig:
        table = "metrics"
        metrics = self.section(MetricsConfig, table, given)
        self._check_together(
            table,
            ("certificate", metrics.certificate, "key", metrics.key),
            ("key", metrics.key, "certificate", metrics.certificate),
        )
        if metrics.certificate is not None and metrics.key is not None:
            self._check_files(table, CertificateFiles(metrics.certificate, metrics.key), None)
        return metrics

    def _placement(self, given: dict[str, object]) -> PlacementConfig:
        table = "placement"
        placement = self.section(PlacementConfig, table, given)
        self._check_link_files(table, placement)
        return placement

    def _check_link_files(self, table: str, files: PeerConfig | PlacementConfig) -> None:
        """The files of TLS by which this server connects to another one."""
        self._check_together(
            table,
            ("certificate", files.certificate, "key", files.key),
            ("key", files.key, "certificate", files.certificate),
            ("certificate", files.certificate, "ca", files.ca),
        )
        with self._certificates_of(table):
            if files.ca is not None:
                read_authorities(files.ca, _now(), key="ca")
            if files.certificate is not None and files.key is not None:
                read_pair(files.certificate, files.key, _now())
        if files.key is not None:
            self._check_private(table, "key", files.key)

    def _listener(self, number: int, given: dict[str, object]) -> ListenerConfig:
        table = LISTENERS_TABLE
        if "client_ca" in given:
            given.setdefault("auth", "certificate")
        try:
            listener = self.section(ListenerConfig, table, given)
            self._check_together(
                table,
                ("certificate", listener.certificate, "key", listener.key),
                ("key", listener.key, "certificate", listener.certificate),
                ("client_ca", listener.client_ca, "certificate", listener.certificate),
            )
            if listener.files is not None:
                self._check_files(table, listener.files, listener.revoked)
            elif listener.revoked is not None:
                raise self.error(table, "revoked", "also needs client_ca")
        except ConfigError as error:
            listen = given.get("listen")
            which = quoted(listen) if isinstance(listen, str) else f"number {number}"
            raise ConfigError(f"{error} (listener {which})") from error.__cause__
        return listener

    def _check_one_form(self, server_table: dict[str, object], tls: TlsConfig | None) -> None:
        for key in ("listen", "auth"):
            if key in server_table:
                raise self.error("server", key, f"contradicts [[{LISTENERS_TABLE}]], where each listener has its own")
        if tls is not None:
            raise self.error(
                "server.tls", "", f"contradicts [[{LISTENERS_TABLE}]], where each listener has its own files"
            )

    def _check_together(self, table: str, *needs: tuple[str, Path | None, str, Path | None]) -> None:
        for key, file, other, needed in needs:
            if file is not None and needed is None:
                raise self.error(table, key, f"also needs {other}")

    def _check_files(self, table: str, files: CertificateFiles, revoked: Path | None) -> None:
        self._check_together(table, ("revoked", revoked, "client_ca", files.client_ca))
        with self._certificates_of(table):
            read_set(files, _now())
        self._check_private(table, "key", files.key)
        with self._certificates_of(table):
            if revoked is not None and files.client_ca is not None:
                read_revocations(revoked, files.client_ca, _now())

    def _check_private(self, table: str, key: str, file: Path) -> None:
        try:
            check_private_file(file)
        except ValueError as error:
            raise self.error(table, key, str(error)) from None

    @contextmanager
    def _certificates_of(self, table: str) -> Iterator[None]:
        try:
            yield
        except CertificateFault as fault:
            raise self.error(table, fault.key, str(fault)) from fault

    def _peers(self, value: object) -> tuple[PeerConfig, ...]:
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self.error("replication", "peers", "expected tables, each under the heading [[replication.peers]]")
        return tuple(self.peer(entry, number) for number, entry in enumerate(value, 1))

    def peer(self, given: dict[str, object], number: int = 1) -> PeerConfig:
        """One of [[replication.peers]], with its files checked."""
        table = PEERS_TABLE
        try:
            peer = self.section(PeerConfig, table, given)
            self._check_link_files(table, peer)
            if not split_address(peer.address)[1]:
                raise self.error(table, "address", f"{peer.address} names no port")
        except ConfigError as error:
            name = given.get("name")
            which = quoted(name) if isinstance(name, str) else f"number {number}"
            raise ConfigError(f"{error} (peer {which})", error.key) from error.__cause__
        return peer

    def _defaults(self, tables: dict[str, object]) -> Declared:
        table = "defaults"
        declared = self._declared(table, self._values(DefaultsForm, table, self._table(table, tables)))
        self._checked(table, lambda: check_limits_and_values(declared))
        return declared

    def _topic(self, name: str, value: object) -> Declared:
        table = f"topics.{toml_key(name)}"
        declared = self._declared(table, self._values(TopicForm, table, self._as_table(table, value)))
        self._checked(table, lambda: check_name(name))
        self._checked(table, lambda: check_settings(declared, topic=name, in_config=True))
        return declared

    def _view(self, name: str, value: object, tables: dict[str, object]) -> DeclaredView:
        table = f"views.{toml_key(name)}"
        written = self._values(ViewForm, table, self._as_table(table, value))
        if "source" not in written:
            raise self.error(table, "source", "is missing")
        if name in self._table("topics", tables):
            raise self.error(table, "", f"there is [topics.{toml_key(name)}] as well; a view is a topic of its own")
        defining = {key: written.pop(key) for key in DEFINING if key in written}
        declared = self._declared(table, written)
        self._checked(table, lambda: check_name(name))
        self._checked(table, lambda: check_settings(declared, topic=name, in_config=True))
        return DeclaredView(ViewDefinition(**defining), declared)  # type: ignore[arg-type]  # as their kinds read them

    def _checked(self, table: str, check: Callable[[], None]) -> None:
        try:
            check()
        except StoreError as error:
            if error.field == "topic":
                raise self.error(table, "", error.message.removeprefix("topic: ")) from None
            key = error.field.removeprefix("settings.")
            message = error.message.removeprefix(f"{key}: ")
            raise self.error(table, key, message) from None

    def _declared(self, table: str, written: dict[str, object]) -> Declared:
        """The settings that a table writes, as the engine has them."""
        declared = dict(written)
        if "fix_separator" in declared:
            declared["separator"] = str(declared.pop("fix_separator")).encode("latin-1")
        if "expiration" in declared:
            text = str(declared["expiration"])
            words = tuple(word.value for word in Expiration)
            if text in words:
                declared["expiration"] = Expiration(text)
                return tidy(declared)
            if not text[:1].isdigit() and text[:1] not in (".", "-"):
                near = difflib.get_close_matches(text, words, n=1)
                hint = f", did you mean {quoted(near[0])}?" if near else ""
                expected = 'expected "disabled", "enabled", "reject", or a duration such as "30s"'
                raise self.error(table, "expiration", f"{expected}, found {noun(text)}{hint}")
            try:
                duration = micros(text)
            except ValueError as error:
                raise self.error(table, "expiration", str(error)) from None
            if "default_ttl_micros" in declared:
                raise self.error(
                    table, "default_ttl", f"expiration = {quoted(text)} sets it already; write one of the two"
                )
            declared |= {"expiration": Expiration.ENABLED, "default_ttl_micros": duration}
        return tidy(declared)

    def _unknown_table(self, name: str, value: object, known: list[str]) -> ConfigError:
        if isinstance(value, dict):
            near = [f"[{table}]" for table in difflib.get_close_matches(name, known, n=1)]
            return self.error(name, "", f"unknown table{_near(near) or _known(known)}")
        return self.unknown_key("", name, value, [])

    def unknown_key(self, table: str, key: str, value: object, known: list[str]) -> ConfigError:
        """The error about a key that is none of the known ones."""
        near = difflib.get_close_matches(key, known, n=1)
        if near:
            return self.error(table, key, f"unknown key{_near(near)}")
        if isinstance(value, dict) and table.startswith("topics."):
            dotted = f"{table.removeprefix('topics.')}.{key}"
            return self.error(
                table, key, f"unknown key; if it is part of a topic's name, write [topics.{quoted(dotted)}]"
            )
        homes = [knob.table for knob in knobs() if self._is_configuration and knob.key == key and knob.table != table]
        if homes:
            home = "topics.NAME" if table == "defaults" and "topics.NAME" in homes else homes[0]
            return self.error(table, key, f"unknown key, it belongs in [{home}]")
        return self.error(table, key, f"unknown key{_known(known)}")


def _now() -> datetime:
    return datetime.now(UTC)


def _near(near: list[str]) -> str:
    return f", did you mean {near[0]}?" if near else ""


def _known(known: list[str]) -> str:
    return f" (known: {', '.join(known)})" if known else ""


def _override(config: Config, overrides: Overrides) -> Config:
    def read(option: str, kind: ValueKind[T], text: str) -> T:
        try:
            return kind.read(text, Path.cwd())
        except ValueError as error:
            raise ConfigError(f"{option}: {error}") from None

    server, journal = config.server, config.journal
    if overrides.listen is not None:
        if config.listener_tables:
            raise ConfigError(f"--listen: contradicts [[{LISTENERS_TABLE}]] of the configuration file")
        server = dataclasses.replace(server, listen=read("--listen", Address(), overrides.listen))
    if overrides.data_dir is not None:
        data_dir = read("--data-dir", FilePath("the path of a directory"), overrides.data_dir)
        server = dataclasses.replace(server, data_dir=data_dir)
    if overrides.insecure:
        server = dataclasses.replace(server, insecure=True)
    if overrides.prune_interval is not None:
        (kind,) = (knob.kind for knob in knobs_of("journal", JournalConfig) if knob.key == "prune_interval")
        interval = read("--prune-interval", cast("ValueKind[int]", kind), overrides.prune_interval)
        journal = dataclasses.replace(journal, prune_interval_micros=interval)
    return dataclasses.replace(
        config,
        server=server,
        journal=journal,
        accept_clock=overrides.accept_clock,
        accept_loss=overrides.accept_loss,
        authoritative=overrides.authoritative,
    )


# --- writing ---------------------------------------------------------------------------------------------------------


def warnings(config: Config) -> list[str]:
    """Doubtful settings of the file's topics, and of topics that declare nothing; and files for TLS that are about to
    become useless. One line each."""
    found = [*_file_warnings(config)]
    found += [
        f"[defaults] {warning}" for warning in policies.warnings(resolve_topic("", {}, defaults=config.defaults)[0])
    ]
    declared = {f"topics.{toml_key(name)}": (name, settings) for name, settings in config.topics.items()}
    declared |= {f"views.{toml_key(name)}": (name, view.settings) for name, view in config.views.items()}
    for table, (name, own) in declared.items():
        settings = resolve_topic(name, own, defaults=config.defaults, in_config=True).settings
        found += [f"[{table}] {warning}" for warning in policies.warnings(settings)]
    return found


def _file_warnings(config: Config) -> Iterator[str]:
    now = _now()
    table = f"[{LISTENERS_TABLE}]" if config.listener_tables else "[server.tls]"
    for listener in config.listeners:
        if listener.files is not None:
            for expiry in read_set(listener.files, now).expiries:
                if warning := expiry.warning(now):
                    yield f"{table} {expiry.key}: {warning}"
        if listener.revoked is not None and listener.client_ca is not None:
            if warning := read_revocations(listener.revoked, listener.client_ca, now).warning(now):
                yield f"{table} revoked: {warning}"
