"""Writes a `Config` as TOML (file [2])."""

from __future__ import annotations

import re
from typing import Final

from sow_server.config.kinds import UnlessWord, quoted
from sow_server.config.knobs import knobs_of
from sow_server.config.sections import (
    DEFINING,
    LISTENERS_TABLE,
    PEERS_TABLE,
    Config,
    DeclaredView,
    DefaultsForm,
    TopicForm,
    ViewForm,
)
from sow_server.engine.values.policies import Declared


def render(config: Config) -> str:
    """The configuration as TOML with every key. A topic has only the settings that the file sets, because the others
    come from policies and defaults. `load` reads the same `Config` back (file [2])."""
    parts = [
        _rendered("server", config.server, without=("listen", "auth") if config.listener_tables else ()),
        *([] if config.tls is None else [_rendered("server.tls", config.tls)]),
        *(_rendered(f"[{LISTENERS_TABLE}]", listener) for listener in config.listener_tables),
        _rendered("storage", config.storage),
        _rendered("clock", config.clock),
        _rendered("sweep", config.sweep),
        _rendered("journal", config.journal),
        _rendered("limits", config.limits),
        _rendered("subscriptions", config.subscriptions),
        _rendered("replication", config.replication),
        *(_rendered(f"[{PEERS_TABLE}]", peer) for peer in config.peers),
        *([_ADDED_PEERS] if config.replicates else []),
        _rendered("backup", config.backup),
        _rendered("metrics", config.metrics),
        _rendered("access", config.access),
        *([] if config.jwt is None else [_rendered("access.jwt", config.jwt)]),
        _rendered("placement", config.placement),
        _rendered("tracing", config.tracing),
        _rendered("log", config.log),
        _rendered_settings("defaults", DefaultsForm, config.defaults),
        *(
            _rendered_settings(f"topics.{toml_key(name)}", TopicForm, declared)
            for name, declared in config.topics.items()
        ),
        *(_rendered_view(f"views.{toml_key(name)}", view) for name, view in config.views.items()),
    ]
    return "\n".join(parts)


_ADDED_PEERS: Final = """\
# Peers that were added by command are in the data, and not here. `sow replication status` shows the origin of each.
"""


def _rendered(table: str, section: object, *, without: tuple[str, ...] = ()) -> str:
    lines = [f"[{table}]"]
    for knob in knobs_of(table, type(section)):
        value: object = getattr(section, knob.field)
        if knob.key in without:
            continue
        if value is not None or isinstance(knob.kind, UnlessWord):
            lines.append(f"{knob.key} = {knob.kind.show(value)}")
    return "\n".join(lines) + "\n"


def _rendered_settings(table: str, section: type, declared: Declared) -> str:
    lines = [f"[{table}]"]
    for knob in knobs_of(table, section):
        field = "separator" if knob.field == "fix_separator" else knob.field  # as the engine has it
        if field in declared:
            value = declared[field]
            if isinstance(value, bytes):
                value = value.decode("latin-1")
            lines.append(f"{knob.key} = {knob.kind.show(value)}")
    return "\n".join(lines) + "\n"


def _rendered_view(table: str, view: DeclaredView) -> str:
    lines = [
        f"{knob.key} = {knob.kind.show(getattr(view.definition, knob.field))}"
        for knob in knobs_of(table, ViewForm)
        if knob.field in DEFINING
    ]
    return _rendered_settings(table, ViewForm, view.settings) + "\n".join(lines) + "\n"


def toml_key(name: str) -> str:
    """A name as a key of TOML: quoted where it has to be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else quoted(name)
