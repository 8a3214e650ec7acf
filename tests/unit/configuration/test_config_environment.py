"""The configuration from the environment: names, order, refusals (config/environment [1] to [3])."""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_server.config import ConfigError, Overrides, described, knobs, load, variables
from sow_server.config.environment import apply_environment
from tests.support.servers.configs import Write, write

__all__ = ["write"]  # a fixture


def _refusal(environment: dict[str, str], path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, None, environment)
    return str(caught.value)


def test_every_setting_with_one_value_has_a_variable_of_its_own() -> None:
    names = variables()
    own = {(knob.table, knob.key) for knob in names.values()}
    without = {
        f"{knob.table}.{knob.key}"
        for knob in knobs()
        if (knob.table, knob.key) not in own
        and knob.table not in ("server.listeners", "replication.peers", "topics.NAME", "views.NAME")
    }
    assert without == {"replication.accept", "replication.token", "access.jwt.algorithms"}, "two lists and a secret"
    assert len(own) == len(names), "no two settings share a name"
    assert names["SOW_SERVER_LISTEN"].key == "listen"
    assert names["SOW_SERVER_TLS_KEY"].table == "server.tls"
    assert names["SOW_SERVER_ACCESS_JWT_JWKS"].table == "access.jwt"


def test_an_option_comes_before_a_variable_and_this_before_the_file(write: Write) -> None:
    path = write('[server]\nlisten = "127.0.0.1:1"\n[storage]\nmemtable = "8MiB"\nbackground_jobs = 3\n')
    variables = {
        "SOW_SERVER_LISTEN": "127.0.0.1:2",
        "SOW_SERVER_STORAGE_MEMTABLE": "67108864",
        "SOW_SERVER_MAX_CONNECTIONS": "unlimited",
        "SOW_SERVER_READER_PROCESSES": "0",
        "SOW_SERVER_COMPRESSION": "true",
        "SOW_SERVER_DEFAULTS_MAX_TTL": "1h",
        "SOW_SERVER_LOG_LEVEL": "",
    }
    found = load(path, Overrides(listen="127.0.0.1:3"), variables)
    assert (found.server.listen, found.server.max_connections) == ("127.0.0.1:3", None)
    assert found.server.reader_processes == 0
    assert (found.storage.memtable_bytes, found.storage.background_jobs, found.log.level) == (64 * 2**20, 3, "info")
    assert found.server.compression
    assert found.defaults["max_ttl_micros"] == 3600 * 10**6
    origins = {(one.table, one.key): one.origin for one in described(found) if one.origin != "default"}
    assert origins == {
        ("server", "listen"): "command line",
        ("server", "max_connections"): "environment",
        ("server", "reader_processes"): "environment",
        ("server", "compression"): "environment",
        ("storage", "memtable"): "environment",
        ("storage", "background_jobs"): "file",
        ("defaults", "max_ttl"): "environment",
    }
    assert load(path, None, variables).server.listen == "127.0.0.1:2"


def test_a_path_begins_at_the_working_folder(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at the folder of the file, whose author does not know the variables."""
    path = write("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load(path, None, {"SOW_SERVER_DATA_DIR": "state"}).server.data_dir == elsewhere / "state"


def test_variables_of_services_are_ignored() -> None:
    """Kubernetes sets them in every pod of a namespace with a service `sow-server` or `sow-server-metrics`, and Docker
    for a link of that name."""
    ignored = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_7450_TCP", "PORT_7450_TCP_ADDR"]
    ignored += ["PORT_7450_UDP_PROTO", "METRICS_SERVICE_HOST", "METRICS_PORT_9464_TCP_PORT"]
    environment = {f"SOW_SERVER_{name}": "tcp://10.0.0.1:7450" for name in ignored}
    tables: dict[str, object] = {}
    assert apply_environment(environment, tables) == {}
    assert tables == {}
    load(None, None, environment | {"SOW_SERVER": "sow:7450", "HOME": "/"})


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("SOW_SERVER_LISEN", "x", "is not a variable of the server, did you mean SOW_SERVER_LISTEN?"),
        ("SOW_SERVER_CONFG", "x", "is not a variable of the server, did you mean SOW_SERVER_CONFIG?"),
        ("SOW_SERVER_XYZZY", "1", "is not a variable of the server; `sow-server --help` lists those that are"),
        ("SOW_SERVER_PORT_LISTEN", "1", "is not a variable of the server, did you mean SOW_SERVER_LISTEN?"),
        ("SOW_SERVER_REPLICATION_TOKEN", "s", "did you mean SOW_SERVER_REPLICATION_TOKEN_FILE?"),
        ("SOW_SERVER_INSECURE", "yes", 'expected true or false, found the text "yes"'),
        ("SOW_SERVER_STORAGE_BACKGROUND_JOBS", "two", 'expected an integer, found the text "two"'),
        ("SOW_SERVER_STORAGE_BACKGROUND_JOBS", "-1", "-1 is below the minimum, 1"),
        ("SOW_SERVER_STORAGE_MEMTABLE", "64", "64B is below the minimum, 1MiB"),
        ("SOW_SERVER_JOURNAL_HOLD_MAX", "60", "duration '60' misses a unit"),
        ("SOW_SERVER_DURABILITY", "fsnyc", 'did you mean "fsync"?'),
        ("SOW_SERVER_DATA_DIR", "a\udcff", "is not UTF-8"),
        ("SOW_SERVER_CLOCK_MAX_JUMP", "30d", "max_jump: 30d is above max_ahead, 7d"),
        ("SOW_SERVER_DEFAULTS_EXPIRATION", "30", "duration '30' misses a unit"),
        ("SOW_SERVER_TLS_KEY", "nowhere.key", "certificate: is missing"),
        ("SOW_SERVER_TRACING_ENDPOINT", "http://me:pw@h:1", "has a password in it; write it in the configuration file"),
    ],
)
def test_a_variable_that_is_wrong_is_refused_by_its_name(variable: str, text: str, message: str) -> None:
    found = _refusal({variable: text})
    assert message in found
    assert found.startswith(f"{variable}: ") or "is missing" in message
    assert ":pw@" not in found


def test_a_variable_that_contradicts_the_file_is_refused_by_its_name(write: Write) -> None:
    path = write('[[server.listeners]]\nlisten = "127.0.0.1:1"\n')
    found = _refusal({"SOW_SERVER_LISTEN": "127.0.0.1:2"}, path)
    assert found.startswith("SOW_SERVER_LISTEN: [server] listen: contradicts [[server.listeners]]")
    assert "expected the table [server]" in _refusal({"SOW_SERVER_LISTEN": "127.0.0.1:2"}, write("server = 1"))
