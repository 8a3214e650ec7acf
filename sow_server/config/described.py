"""The configuration as an operator looks at it: every setting with its value and its origin, without secrets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from sow_server.config.kinds import UnlessWord
from sow_server.config.knobs import Knob, knobs_of
from sow_server.config.sections import LISTENERS_TABLE, PEERS_TABLE, Config, DefaultsForm

DEFAULT: Final = "default"
SECRETS: Final = frozenset({("replication", "token")})
"""Settings that hold a secret themselves. Others name a file that does."""


class Setting(NamedTuple):
    """One setting. `value` is TOML; "" where it is not set, or must not be shown."""

    table: str
    number: int
    """The number of a table that may come several times, from 1. 0: the table is there once."""
    key: str
    value: str
    origin: str
    """"default", "file", "environment" or "command line"."""
    hidden: bool
    """True if there is a value that must not be shown."""


def described(config: Config) -> list[Setting]:
    """All settings, in the order of the documentation, without those of [topics] and [views], which DescribeTopic
    tells."""
    return [
        *_section(config, "server", config.server, without=("listen", "auth") if config.listener_tables else ()),
        *([] if config.tls is None else _section(config, "server.tls", config.tls)),
        *_tables(config, LISTENERS_TABLE, config.listener_tables),
        *_section(config, "storage", config.storage),
        *_section(config, "clock", config.clock),
        *_section(config, "sweep", config.sweep),
        *_section(config, "journal", config.journal),
        *_section(config, "limits", config.limits),
        *_section(config, "subscriptions", config.subscriptions),
        *_section(config, "replication", config.replication),
        *_tables(config, PEERS_TABLE, config.peers),
        *_section(config, "backup", config.backup),
        *_section(config, "metrics", config.metrics),
        *_section(config, "access", config.access),
        *([] if config.jwt is None else _section(config, "access.jwt", config.jwt)),
        *_section(config, "placement", config.placement),
        *_section(config, "tracing", config.tracing),
        *_section(config, "log", config.log),
        *_defaults(config),
    ]


class Secret(NamedTuple):
    """A secret that stands in the configuration file itself."""

    table: str
    key: str
    value: str


def secrets_of(config: Config) -> list[Secret]:
    """The values that `described` does not show."""
    password = urlsplit(config.tracing.endpoint or "").password or ""
    found = (Secret("replication", "token", config.replication.token), Secret("tracing", "endpoint", password))
    return [secret for secret in found if secret.value]


def _tables(config: Config, table: str, sections: tuple[object, ...]) -> Iterator[Setting]:
    for number, section in enumerate(sections, 1):
        yield from _section(config, table, section, number=number)


def _section(
    config: Config, table: str, section: object, *, number: int = 0, without: tuple[str, ...] = ()
) -> Iterator[Setting]:
    for knob in knobs_of(table, type(section)):
        if knob.key not in without:
            value: object = getattr(section, knob.field)
            shown = knob.kind.show(value) if value is not None or isinstance(knob.kind, UnlessWord) else ""
            yield _setting(config, knob, shown, number)


def _defaults(config: Config) -> Iterator[Setting]:
    for knob in knobs_of("defaults", DefaultsForm):
        field = "separator" if knob.field == "fix_separator" else knob.field  # as the engine has it
        value = config.defaults.get(field)
        if isinstance(value, bytes):
            value = value.decode("latin-1")
        yield _setting(config, knob, knob.kind.show(value) if field in config.defaults else "", 0)


def _setting(config: Config, knob: Knob, shown: str, number: int) -> Setting:
    origin = config.given.get((knob.table, number, knob.key), DEFAULT)
    hidden = (knob.table, knob.key) in SECRETS and shown != knob.default
    if knob.table == "tracing" and "@" in shown:  # the address of a collector may have a password in it
        hidden = True
    return Setting(knob.table, number, knob.key, "" if hidden else shown, origin, hidden)
