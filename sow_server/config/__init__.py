"""The configuration of the server: a TOML file, the environment and command-line options become one frozen `Config`.

kinds      the kinds of values: durations, sizes, addresses, patterns
sections   one frozen dataclass per table of the file: every knob with its default and bounds
file       reading the file
environment  settings from variables
rendering  writing it
relations  checks between values
cells      the configuration of each cell of `--cells`
private    the one check of files that hold secrets
described  every setting with its origin, without secrets
knobs      every key, for reading, writing and the documentation
toml_places  the lines of a TOML file
options    the options of the store, the clock and the links that follow from a `Config`
"""

from __future__ import annotations

from sow_server.config.cells import Cell, all_cells, reader_processes
from sow_server.config.described import Setting, described, secrets_of
from sow_server.config.environment import variables
from sow_server.config.file import Overrides, check_accepted, load, read_peer, warnings
from sow_server.config.kinds import is_loopback, split_address
from sow_server.config.knobs import Knob, knobs
from sow_server.config.options import (
    clock_options,
    metrics_token,
    peer_tokens,
    replication_token,
    store_options,
    token_in,
)
from sow_server.config.rendering import render
from sow_server.config.sections import (
    AccessConfig,
    BackupConfig,
    ClockConfig,
    Config,
    ConfigError,
    DeclaredView,
    JournalConfig,
    JwtConfig,
    LimitsConfig,
    LinkMode,
    ListenerAuth,
    ListenerConfig,
    LogConfig,
    MetricsConfig,
    PeerConfig,
    PlacementConfig,
    ReplicationConfig,
    ServerConfig,
    StorageConfig,
    SubscriptionsConfig,
    SweepConfig,
    TlsConfig,
    TracingConfig,
    host_name,
)

__all__ = [
    "AccessConfig",
    "BackupConfig",
    "Cell",
    "ClockConfig",
    "Config",
    "ConfigError",
    "DeclaredView",
    "JournalConfig",
    "JwtConfig",
    "Knob",
    "LimitsConfig",
    "LinkMode",
    "ListenerAuth",
    "ListenerConfig",
    "LogConfig",
    "MetricsConfig",
    "Overrides",
    "PeerConfig",
    "PlacementConfig",
    "ReplicationConfig",
    "ServerConfig",
    "Setting",
    "StorageConfig",
    "SubscriptionsConfig",
    "SweepConfig",
    "TlsConfig",
    "TracingConfig",
    "all_cells",
    "check_accepted",
    "clock_options",
    "described",
    "host_name",
    "is_loopback",
    "knobs",
    "load",
    "metrics_token",
    "peer_tokens",
    "read_peer",
    "reader_processes",
    "render",
    "replication_token",
    "secrets_of",
    "split_address",
    "store_options",
    "token_in",
    "variables",
    "warnings",
]
