"""The configurations of cells, which follow from one file (config/cells [1] to [3])."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from sow_server.config import Config, ConfigError, Overrides, all_cells, described, knobs, load, reader_processes
from sow_server.config.cells import DIFFER
from tests.support.servers.configs import Write, write

__all__ = ["write"]  # a fixture

SAME: Final = {
    "server": "auth durability dynamic_topics insecure reflection max_concurrent_rpcs max_connections "
    "streams_per_connection_max max_connection_age max_connection_age_grace compression reader_threads stop_grace",
    "server.tls": "certificate key client_ca revoked",
    "server.listeners": "auth certificate key client_ca revoked links max_concurrent_rpcs max_connections",
    "storage": "block_cache memtable other_memtable wal_bytes_max background_jobs head_cache_records verify_at_start "
    "commit_records_max commit_merged_bytes_max commit_work buffered_sync stall_patience reclaim_interval "
    "reclaim_records publisher_ttl",
    "clock": "max_jump max_behind max_ahead mark_interval",
    "sweep": "entries_max busy_time busy_pause pause busy_window",
    "journal": "prune_interval hold_max",
    "limits": "payload_bytes_max key_bytes_max request_records_max request_bytes_max atomic_records_max "
    "queue_requests_max queue_bytes_max in_flight_bytes_max sort_bytes_max sorts_waiting_max exports_max "
    "pin_idle_ttl_max loads_max loads_bytes_max loads_disk_free_min",
    "subscriptions": "queue_bytes_max subscriptions_max result_bytes_max",
    "replication": "serve_links token token_file min_sync_peers sync_timeout tombstone_grace max_clock_skew "
    "peer_max_lag_bytes peer_max_lag_age",
    "replication.peers": "topics mode filter ca certificate key token_file",
    "metrics": "certificate key token_file",
    "placement": "file ca certificate key",
    "access": "file audit_reads audit_bytes_max audit_files",
    "access.jwt": "jwks issuer audience algorithms claim",
    "tracing": "endpoint sample_every",
    "log": "format level",
}
"""The settings that are the same at every cell: no file that is written, no address, no name."""
OF_TOPICS: Final = ("defaults", "topics.NAME", "views.NAME")
"""Tables that are the same as a whole."""
FILE: Final = """
[server]
instance = "nyc"
cluster = "sow"
data_dir = "data"
[[server.listeners]]
listen = "127.0.0.1:7450"
[[server.listeners]]
listen = "[::1]:7451"
[replication]
accept = ["ldn"]
[[replication.peers]]
name = "ldn"
address = "127.0.0.1:7550"
[backup]
root = "backups"
[metrics]
listen = "127.0.0.1:9464"
[access]
audit = "log/audit.jsonl"
"""


def _cells(path: Path, of: int, cores: int = 8) -> list[Config]:
    return [load(path, Overrides(cell=cell)) for cell in all_cells(of, cores)]


def test_each_setting_is_decided_by_cell_or_for_all() -> None:
    """A setting that is new has to be put into one of the two: `DIFFER` with `of_cell`, or `SAME`."""
    known = {(knob.table, knob.key) for knob in knobs() if knob.table not in OF_TOPICS}
    same = {(table, key) for table, keys in SAME.items() for key in keys.split()}
    assert DIFFER | same == known
    assert not DIFFER & same


def test_exactly_these_settings_differ_and_tell_the_command_line_as_their_origin(write: Write) -> None:
    whole = {one[:3]: one for one in described(load(write(FILE)))}
    first, second = ({one[:3]: one for one in described(config)} for config in _cells(write(FILE), 2))
    for cell in (first, second):
        changed = {place for place, one in cell.items() if one.value != whole[place].value}
        ports = {("server.listeners", 1, "listen"), ("server.listeners", 2, "listen"), ("metrics", 0, "listen")}
        ports |= {("replication.peers", 1, "address")}
        also = {("placement", "file"), ("replication", "serve_links")}
        derived = {place for place in cell if (place[0], place[2]) in DIFFER | also}
        assert changed == derived - (ports if cell is first else set())
        assert {place for place, one in cell.items() if one.origin == "command line"} == derived
    apart = {place for place, one in second.items() if one.value != first[place].value}
    assert {(table, key) for table, _, key in apart} == DIFFER - {("server", "listen"), ("server", "reader_processes")}


def test_the_values_of_a_cell(write: Write, tmp_path: Path) -> None:
    third = _cells(write(FILE), 3)[2]
    assert [listener.listen for listener in third.listeners] == ["127.0.0.1:7454", "[::1]:7455"], "two side by side"
    assert third.metrics.listen == "127.0.0.1:9468"
    assert third.server.data_dir == tmp_path / "data" / "cell-3"
    assert (third.server.instance, third.server.cluster) == ("nyc.cell-3", "sow.cell-3")
    assert third.backup.root == tmp_path / "backups" / "cell-3"
    assert third.access.audit == tmp_path / "log" / "audit-cell-3.jsonl"
    assert third.replication.accept == ("ldn.cell-3",)
    assert [(peer.name, peer.address) for peer in third.peers] == [("ldn.cell-3", "127.0.0.1:7554")]
    assert (third.placement.cell, third.placement.file) == ("cell-3", tmp_path / "data" / "placement.toml")


def test_a_placement_file_of_the_configuration_is_that_of_all_cells(write: Write, tmp_path: Path) -> None:
    second = _cells(write('[placement]\nfile = "place.toml"\n'), 2)[1]
    assert (second.placement.cell, second.placement.file) == ("cell-2", tmp_path / "place.toml")
    assert second.given["placement", 0, "file"] == "file"


def test_no_two_cells_share_a_port_whatever_is_side_by_side(write: Write) -> None:
    path = write('[server]\nlisten = "127.0.0.1:7450"\n[metrics]\nlisten = "127.0.0.1:7452"\n')
    for of in (1, 2, 3, 4, 7):
        ports = [
            text.rpartition(":")[2] for one in _cells(path, of) for text in (one.server.listen, one.metrics.listen)
        ]
        assert len(set(ports)) == 2 * of
    assert [one.server.listen for one in _cells(path, 2)] == ["127.0.0.1:7450", "127.0.0.1:7451"], "up by one"


def test_a_name_that_is_empty_stays_so_and_a_root_that_is_none(write: Write) -> None:
    cell = _cells(write('[server]\nlisten = "127.0.0.1:7450"\n'), 2)[1]
    assert (cell.server.cluster, cell.backup.root, cell.metrics.listen) == ("", None, "")


@pytest.mark.parametrize(
    ("text", "of", "said"),
    [
        ('[server]\nlisten = "127.0.0.1:0"\n', 2, "[server] listen: 127.0.0.1:0 names no port, from which those of"),
        ('[server]\nlisten = "127.0.0.1:65534"\n', 3, "[server] listen: the port of cell-3, 65536, is above 65535"),
        ('[metrics]\nlisten = "127.0.0.1:65535"\n', 2, "[metrics] listen: the port of cell-2, 65536, is above 65535"),
        (
            '[placement]\ncell = "a"\nfile = "p.toml"\n',
            2,
            "[placement] cell: contradicts --cells, which names the cells",
        ),
        (f'[server]\ninstance = "{"n" * 95}"\n', 2, "has more than 100 characters"),
    ],
)
def test_a_port_or_name_that_cannot_follow_is_refused(write: Write, text: str, of: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _cells(write(text), of)
    assert said in str(caught.value)


def test_a_peer_that_is_another_cell_of_the_machine_is_refused(write: Write) -> None:
    path = write('[[replication.peers]]\nname = "b"\naddress = "127.0.0.1:7451"\n')
    assert load(path).peers, "good for a server alone"
    with pytest.raises(ConfigError) as caught:
        _cells(path, 2)
    assert "[replication.peers] address: 127.0.0.1:7451 is a cell of this machine" in str(caught.value)


@pytest.mark.parametrize(
    ("cores", "servers", "each"),
    [(1, 1, 0), (2, 1, 1), (4, 1, 3), (16, 1, 4), (16, 4, 3), (8, 4, 1), (4, 4, 1), (2, 4, 1), (1, 4, 0), (64, 4, 4)],
)
def test_reader_processes_are_shared_by_cores(cores: int, servers: int, each: int) -> None:
    assert reader_processes(cores, servers) == each


def test_a_number_of_reader_processes_is_that_of_each_cell(write: Write) -> None:
    path = write("[server]\nreader_processes = 3\n")
    assert [one.server.reader_processes for one in _cells(path, 2, cores=2)] == [3, 3]
