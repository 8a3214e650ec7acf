"""Settings from the environment: `SOW_SERVER_STORAGE_MEMTABLE` sets [storage] memtable.

[1]  Each setting that has one value, in a table that the file has once, has a variable. A secret has none; the setting
     that names its file has one.
[2]  Another variable whose name begins with SOW_SERVER_ is refused, with the nearest known one. Those that Kubernetes
     and Docker set for a service whose name begins with sow-server are ignored.
[3]  An error names the variable. An empty variable counts as not set.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sow_server.config.described import SECRETS
from sow_server.config.kinds import (
    Count,
    FilePath,
    Flag,
    InstanceNames,
    JwtAlgorithms,
    MayBeAbsent,
    NamedExpressions,
    Size,
    Texts,
    UnlessWord,
)
from sow_server.config.knobs import Knob, knobs
from sow_server.config.sections import LISTENERS_TABLE, PEERS_TABLE, ConfigError

PREFIX: Final = "SOW_SERVER_"
CONFIG: Final = "SOW_SERVER_CONFIG"
"""The variable of --config."""
ORIGIN: Final = "environment"
_SEVERAL: Final = frozenset({LISTENERS_TABLE, PEERS_TABLE, "topics.NAME", "views.NAME"})
_LISTS: Final = (InstanceNames, JwtAlgorithms, NamedExpressions, Texts)
_OF_SERVICES: Final = re.compile(
    r"SOW_SERVER_(?:[A-Z0-9_]+_)?"
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)"
)


def variables() -> dict[str, Knob]:
    """The setting of each variable, in the order of the documentation ([1])."""
    return {_name(knob): knob for knob in knobs() if _has_one_value(knob) and (knob.table, knob.key) not in SECRETS}


def _has_one_value(knob: Knob) -> bool:
    kind: object = knob.kind
    return knob.table not in _SEVERAL and not isinstance(kind, _LISTS)


def _name(knob: Knob) -> str:
    table = "" if knob.table == "server" else knob.table.removeprefix("server.").replace(".", "_") + "_"
    return f"{PREFIX}{table}{knob.key}".upper()


def apply_environment(environment: Mapping[str, str], tables: dict[str, object]) -> dict[tuple[str, str], str]:
    """Sets in the tables of a file what variables say. Returns the variable of each setting, by table and key. Raises
    ConfigError."""
    known = variables()
    found: dict[tuple[str, str], str] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable == CONFIG or not text:
            continue
        knob = known.get(variable)
        if knob is None:
            if _OF_SERVICES.fullmatch(variable):
                continue
            own = [name.removeprefix(PREFIX) for name in (CONFIG, *known)]
            near = difflib.get_close_matches(variable.removeprefix(PREFIX), own, n=1)
            hint = f", did you mean {PREFIX}{near[0]}?" if near else "; `sow-server --help` lists those that are"
            raise ConfigError(f"{variable}: is not a variable of the server{hint}")
        value = _value(variable, knob, text)
        table = tables
        for name in knob.table.split("."):
            inner = table.setdefault(name, {})
            if not isinstance(inner, dict):  # refused where the file is read
                break
            table = inner
        else:
            table[knob.key] = value
            found[knob.table, knob.key] = variable
    return found


def _value(variable: str, knob: Knob, text: str) -> object:
    """The value as a file would have it."""
    kind: object = knob.kind.kind if isinstance(knob.kind, (MayBeAbsent, UnlessWord)) else knob.kind
    value: object = text
    if isinstance(kind, Flag):
        value = {"true": True, "false": False}.get(text, text)
    elif isinstance(kind, (Count, Size)) and re.fullmatch(r"-?[0-9]{1,19}", text):
        value = int(text)
    try:
        text.encode()
        read = knob.kind.read(value, Path.cwd())
    except UnicodeEncodeError:
        raise ConfigError(f"{variable}: is not UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"{variable}: {error}") from None
    return str(read) if isinstance(kind, FilePath) else value
