"""Checks between settings of different keys or tables: each value is valid by itself, but not with the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from sow_server.config.kinds import is_loopback, quoted, split_address
from sow_server.config.knobs import knobs
from sow_server.config.options import token_in
from sow_server.config.secret_files import check_private_file
from sow_server.config.sections import (
    LISTENERS_TABLE,
    PEERS_TABLE,
    Config,
    ConfigError,
    LinkMode,
    ListenerAuth,
    ListenerConfig,
    PeerConfig,
)
from sow_server.engine.values.model import Durability

Complain: TypeAlias = Callable[[str, str, str], ConfigError]
"""Makes the error for a table, a key and a message."""


def check_relations(complain: Complain, config: Config) -> None:
    """Raises ConfigError for the first contradiction."""
    _check_server(complain, config)
    _check_metrics(complain, config)
    _check_order(complain, config)
    _check_backup(complain, config)
    _check_replication(complain, config)
    for peer in config.peers:
        _check_peer(complain, config, peer)
    _check_sync_peers(complain, config)
    _check_token(complain, config)
    _check_access(complain, config)
    _check_placement(complain, config)


def _check_server(complain: Complain, config: Config) -> None:
    server = config.server
    for listener in config.listeners:
        _check_listener(complain, config, listener)
    addresses = [listener.listen for listener in config.listeners if split_address(listener.listen)[1]]
    for address in addresses:
        if addresses.count(address) > 1:
            raise complain(LISTENERS_TABLE, "listen", f"{address} is the address of two listeners")
    if server.data_dir.exists() and not server.data_dir.is_dir():
        raise complain("server", "data_dir", f"{server.data_dir} is not a directory")


def _check_listener(complain: Complain, config: Config, listener: ListenerConfig) -> None:
    table = LISTENERS_TABLE if config.listener_tables else "server"
    which = f' (listener "{listener.listen}")' if config.listener_tables else ""
    files = "of its own" if config.listener_tables else "in [server.tls]"
    auth = listener.auth
    if auth is ListenerAuth.CERTIFICATE and listener.client_ca is None:
        raise complain(table, "auth", f'"certificate" needs client_ca {files}: the authorities of the clients{which}')
    if auth is ListenerAuth.NONE and listener.client_ca is not None:
        raise complain(table, "auth", f'"none" contradicts client_ca; write "certificate", or leave auth out{which}')
    if config.server.insecure or is_loopback(listener.listen):
        return
    if auth is ListenerAuth.NONE:
        raise complain(
            table,
            "listen",
            f"{listener.listen} is reachable from other machines: let clients prove who they are, by auth and TLS, or "
            f"serve everybody with --insecure (insecure = true){which}",
        )
    if listener.files is None:
        raise complain(
            table,
            "auth",
            f'"{auth.value}" needs TLS where other machines reach {listener.listen}, or anybody in between can read '
            f"the token: set certificate and key {files}, or allow plain text with --insecure (insecure = true){which}",
        )


def _check_metrics(complain: Complain, config: Config) -> None:
    server, metrics = config.server, config.metrics
    if metrics.token_file is not None:
        _check_token_file(complain, "metrics", metrics.token_file)
    if not metrics.listen:
        return
    if split_address(metrics.listen)[1] and metrics.listen in [listener.listen for listener in config.listeners]:
        raise complain("metrics", "listen", f"{metrics.listen} is the server's own address, see [server] listen")
    is_protected = metrics.token_file is not None or metrics.certificate is not None
    if not is_protected and not server.insecure and not is_loopback(metrics.listen):
        raise complain(
            "metrics",
            "listen",
            f"{metrics.listen} is reachable from other machines: set token_file, or certificate and key, or allow "
            "everybody to read the metrics with --insecure (insecure = true)",
        )


def _check_order(complain: Complain, config: Config) -> None:
    limits, storage, clock = config.limits, config.storage, config.clock
    ordered = (
        ("limits", "payload_bytes_max", limits.payload_bytes_max, "request_bytes_max", limits.request_bytes_max),
        ("limits", "key_bytes_max", limits.key_bytes_max, "request_bytes_max", limits.request_bytes_max),
        ("limits", "request_bytes_max", limits.request_bytes_max, "queue_bytes_max", limits.queue_bytes_max),
        ("limits", "atomic_records_max", limits.atomic_records_max, "request_records_max", limits.request_records_max),
        ("storage", "memtable", storage.memtable_bytes, "wal_bytes_max", storage.wal_bytes_max),
        ("storage", "other_memtable", storage.other_memtable_bytes, "wal_bytes_max", storage.wal_bytes_max),
        ("clock", "max_jump", clock.max_jump_micros, "max_ahead", clock.max_ahead_micros),
    )
    for table, low_key, low, high_key, high in ordered:
        if low > high:
            kind = next(knob.kind for knob in knobs() if (knob.table, knob.key) == (table, low_key))
            low_text, high_text = kind.show(low).strip('"'), kind.show(high).strip('"')
            raise complain(table, low_key, f"{low_text} is above {high_key}, {high_text}")


def _check_backup(complain: Complain, config: Config) -> None:
    root, data_dir = config.backup.root, config.server.data_dir
    if root is None:
        return
    if root.exists() and not root.is_dir():
        raise complain("backup", "root", f"{root} is not a directory")
    if root.resolve().is_relative_to(data_dir.resolve()):
        raise complain("backup", "root", f"{root} is in the data directory {data_dir}, see [server] data_dir")


def _check_replication(complain: Complain, config: Config) -> None:
    server, replication = config.server, config.replication
    if server.instance in replication.accept:
        raise complain("replication", "accept", f"{quoted(server.instance)} is this instance itself")
    if not any(listener.links for listener in config.listeners):
        for key in ("accept", "serve_links"):
            if getattr(replication, key):
                raise complain("replication", key, f"no [[{LISTENERS_TABLE}]] has links = true, so none could send")


def _check_peer(complain: Complain, config: Config, peer: PeerConfig) -> None:
    server = config.server
    named = f"(peer {quoted(peer.name)})"
    if peer.name == server.instance:
        raise complain(PEERS_TABLE, "name", f"{quoted(peer.name)} is this instance itself, see [server] instance")
    if [other.name for other in config.peers].count(peer.name) > 1:
        raise complain(PEERS_TABLE, "name", f"{quoted(peer.name)} names two peers")
    if [other.address for other in config.peers].count(peer.address) > 1:
        raise complain(PEERS_TABLE, "address", f"{peer.address} is the address of two peers")
    if peer.address in [listener.listen for listener in config.listeners]:
        raise complain(PEERS_TABLE, "address", f"{peer.address} is the server's own, see [server] listen {named}")
    if peer.ca is None and not server.insecure and not is_loopback(peer.address):
        raise complain(
            PEERS_TABLE,
            "address",
            f"{peer.address} is on another machine: set ca for TLS, or allow plain text with --insecure "
            f"(insecure = true) {named}",
        )


def _check_sync_peers(complain: Complain, config: Config) -> None:
    if config.replication.serve_links:
        return  # more may come by command; until then REPLICATED is refused
    wanted = config.replication.min_sync_peers
    sync_peers = sum(peer.mode is LinkMode.SYNC for peer in config.peers)
    if wanted > max(1, sync_peers):
        message = f'{wanted} is above the number of peers with mode = "sync", {sync_peers}'
        raise complain("replication", "min_sync_peers", message)
    if config.server.durability is Durability.REPLICATED and not sync_peers:
        message = '"replicated" needs a peer with mode = "sync" in [[replication.peers]]'
        raise complain("server", "durability", message)


def _check_token(complain: Complain, config: Config) -> None:
    replication = config.replication
    if replication.token and replication.token_file is not None:
        raise complain("replication", "token_file", "contradicts token; leave one of the two out")
    if replication.token_file is not None:
        _check_token_file(complain, "replication", replication.token_file)
    for peer in config.peers:
        if peer.token_file is not None:
            _check_token_file(complain, PEERS_TABLE, peer.token_file)
    if not config.replicates or config.access.file is not None:
        return
    for listener in config.listeners:
        if listener.links and not is_loopback(listener.listen):
            raise complain(
                "access",
                "file",
                f"is needed, because other machines reach {listener.listen}, and credentials in it prove which peer "
                "calls; or serve no links there (links = false)",
            )


def _check_token_file(complain: Complain, table: str, file: Path) -> None:
    try:
        check_private_file(file)
        token = token_in(file)
    except OSError as error:
        raise complain(table, "token_file", f"{file} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise complain(table, "token_file", str(error)) from None
    if not re.fullmatch(r"[\x21-\x7e]{1,1000}", token):
        message = f"{file} does not hold one line of 1 to 1000 visible ASCII characters"
        raise complain(table, "token_file", message)


def _check_access(complain: Complain, config: Config) -> None:
    kinds = {listener.auth for listener in config.listeners}
    for kind in (ListenerAuth.TOKEN, ListenerAuth.JWT):
        if kind in kinds and config.access.file is None:
            raise complain("access", "file", f'is needed where a listener has auth = "{kind.value}"')
    if ListenerAuth.JWT in kinds and config.jwt is None:
        raise complain("access.jwt", "", 'is needed where a listener has auth = "jwt"')


def _check_placement(complain: Complain, config: Config) -> None:
    placement = config.placement
    if placement.file is None:
        for key in ("cell", "ca"):
            if getattr(placement, key):
                raise complain("placement", key, "also needs file: which topics live in which cell")
    elif not placement.cell:
        raise complain("placement", "file", "also needs cell: the name of this server's own cell")
