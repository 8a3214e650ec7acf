"""The configuration: accepted values, refusals, and that every key is documented."""

from __future__ import annotations

import dataclasses
import inspect
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow.sizes import format_bytes, parse_bytes
from sow_server import config
from sow_server.config import (
    Config,
    ConfigError,
    LinkMode,
    Overrides,
    PeerConfig,
    ReplicationConfig,
    ServerConfig,
    load,
    render,
)
from sow_server.engine.catalog.topics import check_settings
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.clock import ClockOptions
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import (
    MICROS,
    BacklogAction,
    Durability,
    Expiration,
    MessageType,
    OnMissing,
    TopicSettings,
)
from sow_server.engine.values.policies import Declared, declared_of

Write = Callable[[str], Path]
DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a configuration file and returns its path."""

    def written(text: str) -> Path:
        path = tmp_path / "sow.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def test_the_package_offers_exactly_its_public_names() -> None:
    offered = {name for name, value in vars(config).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert offered - {"annotations"} == set(config.__all__)


def refusal(path: Path | None, overrides: Overrides | None = None) -> str:
    """The message with which a configuration is refused, without the folder of the file."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value).replace(f"{path.parent}/" if path else "\0", "")


def test_without_a_file_everything_has_a_default_and_topics_are_dynamic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """arrebato 3, J11: among others the journal is pruned once a minute."""
    monkeypatch.chdir(tmp_path)
    found = load(None)
    assert found.server.listen == "127.0.0.1:7450"
    assert found.server.data_dir == tmp_path / "sow-data"
    assert found.server.durability is Durability.FSYNC
    assert found.server.dynamic_topics
    assert found.journal.prune_interval_micros == 60 * MICROS
    assert found.tls is None
    assert found.metrics.listen == ""
    assert dict(found.topics) == {}
    assert not found.accept_clock
    assert not found.accept_loss


def test_the_defaults_of_the_engine_are_the_defaults_of_the_file() -> None:
    found = Config()
    assert config.store_options(found) == StoreOptions(instance=found.server.instance)
    assert config.clock_options(found) == ClockOptions()


def test_with_a_file_topics_are_declared_unless_it_says_otherwise(write: Write) -> None:
    assert not load(write("")).server.dynamic_topics
    assert load(write("[server]\ndynamic_topics = true")).server.dynamic_topics


def test_the_instance_is_named_after_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "__Büro 7.local")
    assert ServerConfig().instance == "B-ro-7.local"


def test_paths_are_relative_to_the_file_and_on_the_command_line_to_the_working_directory(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write('[server]\ndata_dir = "state"')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load(path).server.data_dir == tmp_path / "state"
    assert load(path, Overrides(data_dir="state")).server.data_dir == elsewhere / "state"


def test_the_command_line_wins_over_the_file(write: Write) -> None:
    path = write('[server]\nlisten = "127.0.0.1:1"\n[journal]\nprune_interval = "5m"')
    found = load(
        path,
        Overrides(
            listen="[::1]:2",
            prune_interval="10s",
            accept_clock=True,
            accept_loss=True,
            insecure=True,
            authoritative=True,
        ),
    )
    assert found.server.listen == "[::1]:2"
    assert found.journal.prune_interval_micros == 10 * MICROS
    assert found.server.insecure
    assert found.accept_clock
    assert found.accept_loss
    assert found.authoritative


def test_a_topic_is_read_with_all_of_its_settings(write: Write) -> None:
    found = load(
        write(
            """
            [topics.orders]
            key = ["/carrier", "/flight"]
            message_type = "nvfix"
            expiration = "enabled"
            default_ttl = "30s"
            min_ttl = "1s"
            max_ttl = "1h"
            journal = false
            fix_separator = "|"
            retain_time = "unlimited"
            retain_bytes = "1MiB"
            max_age = "1d"
            max_bytes = "1GiB"
            max_entries = 1000000
            backlog_ttl = "2h"
            backlog_quota_bytes = "512KiB"
            backlog_quota_age = "1m"
            backlog_action = "evict"
            durable_idle_ttl = "1w"
            publish_is_use = true
            only_if_empty = false
            dead_letter = "orders.expired"
            dead_letter_by_key = true
            on_missing = "drop"

            [topics.plain]
            """
        )
    )
    assert found.topics["orders"] == {
        "key": ("/carrier", "/flight"),
        "message_type": MessageType.NVFIX,
        "expiration": Expiration.ENABLED,
        "default_ttl_micros": 30 * MICROS,
        "min_ttl_micros": MICROS,
        "max_ttl_micros": 3600 * MICROS,
        "journal": False,
        "separator": b"|",
        "retain_time_micros": None,
        "retain_bytes": 2**20,
        "max_age_micros": 86_400 * MICROS,
        "max_bytes": 2**30,
        "max_entries": 10**6,
        "backlog_ttl_micros": 7200 * MICROS,
        "backlog_quota_bytes": 2**19,
        "backlog_quota_age_micros": 60 * MICROS,
        "backlog_action": BacklogAction.EVICT,
        "durable_idle_ttl_micros": 604_800 * MICROS,
        "publish_is_use": True,
        "only_if_empty": False,
        "dead_letter": "orders.expired",
        "dead_letter_by_key": True,
        "on_missing": OnMissing.DROP,
    }
    assert found.topics["plain"] == {}, "a topic declares what the file writes, and no more"


def test_the_servers_defaults_are_read(write: Write) -> None:
    """Pulsar 3: instance defaults."""
    text = '[defaults]\nexpiration = "5m"\nretain_time = "1h"\nmax_entries = 5\nidle_ttl = "1d"\non_missing = "drop"'
    found = load(write(text))
    assert config.store_options(found).defaults == {
        "expiration": Expiration.ENABLED,
        "default_ttl_micros": 300 * MICROS,
        "retain_time_micros": 3600 * MICROS,
        "max_entries": 5,
        "idle_ttl_micros": 86_400 * MICROS,
        "on_missing": OnMissing.DROP,
    }
    assert load(write(render(found))) == found


@pytest.mark.parametrize(
    ("text", "expiration", "default_ttl_micros"),
    [
        ("disabled", Expiration.DISABLED, None),
        ("enabled", Expiration.ENABLED, None),
        ("reject", Expiration.REJECT, None),
        ("1h30m", Expiration.ENABLED, 5400 * MICROS),
        ("0s", Expiration.ENABLED, 0),
    ],
)
def test_expiration_is_a_word_or_a_default_lifetime(
    write: Write, text: str, expiration: Expiration, default_ttl_micros: int | None
) -> None:
    declared = load(write(f'[topics.a]\nexpiration = "{text}"')).topics["a"]
    assert (declared["expiration"], declared.get("default_ttl_micros")) == (expiration, default_ttl_micros)


def test_a_topic_that_retains_nothing_says_so_twice(write: Write) -> None:
    declared = load(write('[topics.a]\nretain_time = "0s"\nretain_bytes = 0')).topics["a"]
    assert declared == {"retain_time_micros": 0, "retain_bytes": 0}


@pytest.mark.parametrize(
    ("text", "size"),
    [('"64MiB"', 64 * 2**20), ('"1.5GiB"', 3 * 2**29), ('"10MB"', 10**7), ('"2048 KiB"', 2**21), ("4194304", 2**22)],
)
def test_sizes_name_their_unit_or_are_bytes(write: Write, text: str, size: int) -> None:
    assert load(write(f"[storage]\nblock_cache = {text}")).storage.block_cache_bytes == size


@given(st.integers(0, 2**62))
def test_a_size_is_read_as_it_was_written(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


REFUSED = [
    # Unknown names, with the similar known one.
    ('[topics.orders]\nexpriation = "30s"', "[topics.orders] expriation: unknown key, did you mean expiration?"),
    ("[servre]\nx = 1", "[servre]: unknown table, did you mean [server]?"),
    ("[gadgets]\nx = 1", "[gadgets]: unknown table (known: clock, defaults, journal, limits,"),
    ('[topics.a]\nindexes = ["/x"]', "[topics.a] indexes: unknown key, did you mean index?"),
    ('[topics.a]\nindex = "/x"', "[topics.a] index: expected paths such as"),
    ('[topics.a]\nindex = ["x"]', "[topics.a] index: path 'x' must begin with '/'"),
    ('[topics.a]\nmessage_type = "binary"\nindex = ["/x"]', "[topics.a] index: a binary topic has no fields"),
    ('[topics.a]\ndead_leter = "b"', "[topics.a] dead_leter: unknown key, did you mean dead_letter?"),
    ("[defaults]\njournal = false", "[defaults] journal: unknown key, it belongs in [topics.NAME]"),
    ('listen = "127.0.0.1:1"', "listen: unknown key, it belongs in [server]"),
    ('[server]\nblock_cache = "2MiB"', "[server] block_cache: unknown key, it belongs in [storage]"),
    (
        '[topics.flights.live]\nexpiration = "1s"',
        """[topics.flights] live: unknown key; if it is part of a topic's name, write [topics."flights.live"]""",
    ),
    # Wrong types.
    (
        "[server]\nlisten = 7450",
        '[server] listen: expected an address such as "127.0.0.1:7450", found the integer 7450',
    ),
    ('[server]\ndynamic_topics = "yes"', '[server] dynamic_topics: expected true or false, found the text "yes"'),
    ("[storage]\nbackground_jobs = true", "[storage] background_jobs: expected an integer, found true"),
    ("[storage]\nblock_cache = 1.5", "[storage] block_cache: expected a size such as"),
    ("[topics.a]\nmax_ttl = 30", "[topics.a] max_ttl: expected a duration such as"),
    ("[topics.a]\nmax_ttl = 2026-01-01", "[topics.a] max_ttl: expected a duration such as"),
    ('[topics.a]\nkey = "/id"', '[topics.a] key: expected key paths such as ["/id"], found the text "/id"'),
    ("[topics.a]\nkey = [1]", '[topics.a] key: expected key paths such as ["/id"], with nothing but texts in it'),
    ("[topics]\na = 1", "topics.a: expected the table [topics.a], found the integer 1"),
    ("server = 1", "server: expected the table [server], found the integer 1"),
    ("[[topics]]\na = 1", "topics: expected the table [topics], found an array"),
    # Values.
    ('[topics.a]\nexpiration = "30"', "[topics.a] expiration: duration '30' misses a unit"),
    ('[topics.a]\nexpiration = "-1s"', "[topics.a] expiration: duration '-1s' is negative"),
    ('[topics.a]\nexpiration = "enabld"', 'found the text "enabld", did you mean "enabled"?'),
    ('[topics.a]\nmessage_type = "xml"', '[topics.a] message_type: expected one of "json", "msgpack", "fix", "nvfix",'),
    ('[server]\ndurability = "fsnyc"', 'found the text "fsnyc", did you mean "fsync"?'),
    ('[server]\ninstance = "_a"', "[server] instance: expected 1 to 100 of"),
    ('[server]\ndata_dir = ""', '[server] data_dir: expected the path of a directory, found the text ""'),
    ('[server]\nlisten = "localhost"', '[server] listen: "localhost" is not host:port'),
    ('[server]\nlisten = "localhost:70000"', '[server] listen: "localhost:70000" has no port between 0 and 65535'),
    ('[server]\nlisten = "::1:7450"', '[server] listen: "::1:7450": an IPv6 address is written in brackets'),
    ('[server]\nlisten = "[::g]:7450"', "is not an IPv6 address"),
    ('[storage]\nblock_cache = "2MiBB"', '[storage] block_cache: size "2MiBB" has the unknown unit'),
    ('[storage]\nblock_cache = "MiB"', '[storage] block_cache: size "MiB" is not a number with a unit'),
    ('[storage]\nblock_cache = "1.0000001MiB"', "is not a whole number of bytes"),
    ("[storage]\nblock_cache = 0", "[storage] block_cache: 0B is below the minimum, 1MiB"),
    ('[storage]\nbuffered_sync = "2s"', "[storage] buffered_sync: 2s is above the maximum, 50ms"),
    ("[limits]\nqueue_requests_max = 0", "[limits] queue_requests_max: 0 is below the minimum, 1"),
    # Contradictions.
    (
        '[topics.a]\nexpiration = "30s"\ndefault_ttl = "1s"',
        '[topics.a] default_ttl: expiration = "30s" sets it already',
    ),
    ('[topics.a]\ndefault_ttl = "1s"', "[topics.a] default_ttl: 1s has no meaning with expiration = 'disabled'"),
    ('[topics.a]\nmin_ttl = "2s"\nmax_ttl = "1s"', "[topics.a] min_ttl: 2s is above max_ttl, 1s"),
    ('[topics.a]\nexpiration = "2h"\nmax_ttl = "1h"', "[topics.a] default_ttl: 2h0m0s is above max_ttl, 1h0m0s"),
    ('[defaults]\nexpiration = "1s"\nmin_ttl = "1.5s"', "[defaults] default_ttl: 1s is below min_ttl, 1.5s"),
    ('[topics.a]\nmax_ttl = "4000d"', "[topics.a] max_ttl: 96000h0m0s is not between 0s and ten years"),
    (
        '[topics.a]\nretain_time = "0s"',
        "[topics.a] retain_time: 0s and retain_bytes 256MiB (default) must both be zero (keep nothing) or neither",
    ),
    (
        '[topics.a]\nretain_bytes = "1MiB"\nbacklog_quota_bytes = "1MiB"',
        "[topics.a] backlog_quota_bytes: 1MiB is not below retain_bytes, 1MiB (rule J9)",
    ),
    (
        '[defaults]\nretain_time = "1h"\nbacklog_quota_age = "90m"',
        "[defaults] backlog_quota_age: 1h30m0s is not below retain_time, 1h0m0s (rule J9)",
    ),
    ('[defaults]\nidle_ttl = "0s"', "[defaults] idle_ttl: 0s must be above zero"),
    ('[topics.a]\nidle_ttl = "1h"', "[topics.a] idle_ttl: 1h0m0s contradicts that the topic is declared in the"),
    ("[topics.a]\nauto_delete = true", "[topics.a] auto_delete: true contradicts that the topic is declared in the"),
    ('[topics.a]\ndead_letter = "a"', "[topics.a] dead_letter: a is the topic itself"),
    ('[topics.a]\ndead_letter = "a b"', "[topics.a] dead_letter: 'a b' is no topic name"),
    ("[topics.a]\nmax_entries = 0", "[topics.a] max_entries: 0 must be above zero"),
    ("[topics.a]\nmax_age = 30", '[topics.a] max_age: expected a duration such as "30s"'),
    ('[topics.a]\nbacklog_action = "drop"', '[topics.a] backlog_action: expected one of "hold", "reject", "evict",'),
    ('[topics.a]\nkey = ["id"]', "[topics.a] key: "),
    ('[topics.a]\nkey = ["/a", "/a"]', "[topics.a] key: /a and /a overlap"),
    ('[topics.a]\nfix_separator = ";"', "[topics.a] fix_separator: \";\" has no meaning with message_type = 'json'"),
    ('[topics.a]\nmessage_type = "fix"\nfix_separator = "€"', "[topics.a] fix_separator: expected one byte as text"),
    ('[topics._a]\nexpiration = "1s"', "[topics._a]: '_a' is no topic name: a leading '_' is reserved"),
    ('[topics."a b"]\nexpiration = "1s"', "[topics.\"a b\"]: 'a b' is no topic name"),
    (
        '[server]\nlisten = "0.0.0.0:7450"',
        "[server] listen: 0.0.0.0:7450 is reachable from other machines: set up [server.tls], or allow plain text",
    ),
    ('[server]\nlisten = "sow.example:7450"', "is reachable from other machines"),
    (
        '[server]\nlisten = "localhost:1"\n[metrics]\nlisten = "localhost:1"',
        "[metrics] listen: localhost:1 is the server's own address",
    ),
    (
        '[limits]\nrequest_bytes_max = "1KiB"',
        "[limits] payload_bytes_max: 1MiB is above request_bytes_max, 1KiB",
    ),
    (
        "[limits]\nrequest_records_max = 10",
        "[limits] atomic_records_max: 1000 is above request_records_max, 10",
    ),
    ('[limits]\nqueue_bytes_max = "8MiB"', "[limits] request_bytes_max: 16MiB is above queue_bytes_max, 8MiB"),
    ('[storage]\nwal_bytes_max = "8MiB"', "[storage] memtable: 32MiB is above wal_bytes_max, 8MiB"),
    ('[clock]\nmax_ahead = "5s"', "[clock] max_jump: 10s is above max_ahead, 5s"),
    # TLS.
    ('[server]\ntls = "on"', "server.tls: expected the table [server.tls], found the text"),
    ('[server.tls]\ncertificate = "c.pem"', "[server.tls] key: is missing"),
    ('[server.tls]\ncertificate = "c.pem"\nkey = "k.pem"', "c.pem cannot be read (No such file or directory)"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_faults_are_refused_with_file_table_and_key(write: Write, text: str, message: str) -> None:
    said = refusal(write(text))
    assert said.startswith("sow.toml: ")
    assert message in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server\n", "sow.toml:1:8: expected ']' at the end of a table declaration"),
        ("[server]\nlisten = \n", "sow.toml:2:10: invalid value"),
        ('[server]\nlisten = "', "sow.toml:2:11: unterminated string"),
        ("[a]\nx = 1\nx = 2\n", "sow.toml:3:6: cannot overwrite a value"),
    ],
)
def test_toml_that_is_broken_is_refused_with_line_and_column(write: Write, text: str, message: str) -> None:
    assert refusal(write(text)) == message


def test_a_file_that_is_not_utf8_is_refused_with_the_line(write: Write) -> None:
    path = write("")
    path.write_bytes(b'[server]\ninstance = "B\xfcro"\n')
    assert refusal(path) == "sow.toml:2: is not UTF-8 at byte 22"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "sow.toml") == "sow.toml: cannot be read (No such file or directory)"


def test_a_data_directory_that_is_a_file_is_refused(write: Write, tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    assert "[server] data_dir: " in refusal(write('[server]\ndata_dir = "state"'))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (Overrides(listen="x"), '--listen: "x" is not host:port'),
        (Overrides(listen="0.0.0.0:0"), "0.0.0.0:0 is reachable from other machines"),
        (Overrides(prune_interval="60"), "--prune-interval: duration '60' misses a unit"),
        (Overrides(prune_interval="0s"), "--prune-interval: 0s is below the minimum, 10ms"),
        (Overrides(data_dir=""), "--data-dir: expected the path of a directory"),
    ],
)
def test_an_option_that_is_wrong_is_refused_by_its_name(overrides: Overrides, message: str) -> None:
    assert message in refusal(None, overrides)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_a_loopback_address_needs_no_tls(listen: str) -> None:
    assert load(None, Overrides(listen=listen)).server.listen == listen


def test_plain_text_to_other_machines_has_to_be_spelled_out() -> None:
    assert load(None, Overrides(listen="0.0.0.0:7450", insecure=True)).server.insecure


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, its key, and the key encrypted."""
    folder = tmp_path_factory.mktemp("pems")
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    for command in (
        f"{new} -keyout key.pem -out certificate.pem",
        f"{new} -keyout other.pem -out other-certificate.pem",
        "openssl ec -in key.pem -out encrypted.pem -aes256 -passout pass:secret",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def test_tls_is_read_and_lets_other_machines_in(write: Write, pems: Path) -> None:
    found = load(
        write(
            '[server]\nlisten = "0.0.0.0:7450"\n'
            f'[server.tls]\ncertificate = "{pems}/certificate.pem"\nkey = "{pems}/key.pem"\n'
            f'client_ca = "{pems}/certificate.pem"\n'
        )
    )
    assert found.tls is not None
    assert found.tls.certificate == pems / "certificate.pem"
    assert found.tls.client_ca == pems / "certificate.pem"
    assert load(write(render(found))) == found


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("certificate.pem", "other.pem", None), "[server.tls] certificate: "),
        (("key.pem", "key.pem", None), "[server.tls] certificate: "),
        (("certificate.pem", "encrypted.pem", None), "are not a certificate and its unencrypted key"),
        (("certificate.pem", "key.pem", "key.pem"), "[server.tls] client_ca: "),
    ],
)
def test_certificates_that_do_not_fit_are_refused(
    write: Write, pems: Path, lines: tuple[str, str, str | None], message: str
) -> None:
    certificate, key, client_ca = lines
    text = f'[server.tls]\ncertificate = "{pems}/{certificate}"\nkey = "{pems}/{key}"\n'
    if client_ca is not None:
        text += f'client_ca = "{pems}/{client_ca}"\n'
    assert message in refusal(write(text))


def test_tls_and_insecure_contradict_each_other(write: Write, pems: Path) -> None:
    path = write(f'[server.tls]\ncertificate = "{pems}/certificate.pem"\nkey = "{pems}/key.pem"')
    assert "[server] insecure: contradicts [server.tls]" in refusal(path, Overrides(insecure=True))


# --- replication -----------------------------------------------------------------------------------------------------

PEER = """
[server]
instance = "nyc-1"
[[replication.peers]]
name = "ldn-1"
address = "127.0.0.1:7451"
"""


def test_peers_are_read_with_all_that_they_say(write: Write, pems: Path) -> None:
    path = write(
        f"""
        [server]
        instance = "nyc-1"
        [replication]
        accept = ["hkg-1", "syd.1"]
        token = "s3cret!"
        min_sync_peers = 1
        sync_timeout = "2s"
        tombstone_grace = "2h"
        max_clock_skew = "1s"
        peer_max_lag_bytes = "2GiB"
        peer_max_lag_age = "3h"
        [[replication.peers]]
        name = "ldn-1"
        address = "ldn.example:7450"
        topics = "orders|flights\\\\..*"
        mode = "sync"
        filter = "/region = 'eu'"
        ca = "{pems}/certificate.pem"
        certificate = "{pems}/certificate.pem"
        key = "{pems}/key.pem"
        [[replication.peers]]
        name = "tyo-1"
        address = "127.0.0.1:7452"
        """
    )
    found = load(path)
    assert found.replicates
    assert found.replication.accept == ("hkg-1", "syd.1")
    assert config.replication_token(found) == "s3cret!"
    assert found.replication.sync_timeout_micros == 2 * MICROS
    assert found.replication.tombstone_grace_micros == 2 * 3600 * MICROS
    assert found.replication.max_clock_skew_micros == MICROS
    assert found.replication.peer_max_lag_bytes == 2 * 2**30
    assert found.replication.peer_max_lag_age_micros == 3 * 3600 * MICROS
    first, second = found.peers
    assert (first.name, first.address, first.mode) == ("ldn-1", "ldn.example:7450", LinkMode.SYNC)
    assert (first.topics, first.filter) == (r"orders|flights\..*", "/region = 'eu'")
    assert (first.ca, first.key) == (pems / "certificate.pem", pems / "key.pem")
    assert (second.topics, second.mode, second.filter, second.ca) == (".*", LinkMode.ASYNC, "", None)
    assert load(write(render(found))) == found


def test_without_peers_there_is_no_replication_and_its_defaults_are_those_of_the_rules() -> None:
    found = Config()
    assert not found.replicates
    assert found.replication == ReplicationConfig(
        min_sync_peers=1,
        sync_timeout_micros=5 * MICROS,
        tombstone_grace_micros=24 * 3600 * MICROS,
        max_clock_skew_micros=10 * MICROS,
        peer_max_lag_bytes=2**30,
        peer_max_lag_age_micros=24 * 3600 * MICROS,
    )


def test_an_instance_that_only_receives_replicates_too(write: Write) -> None:
    assert load(write('[server]\ninstance = "a"\n[replication]\naccept = ["b"]')).replicates


def test_a_token_may_stand_in_a_file_of_its_own(write: Write, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret!\n", encoding="utf-8")
    found = load(write(PEER + '[replication]\ntoken_file = "token"'))
    assert config.replication_token(found) == "s3cret!"
    assert found.replication.token_file == tmp_path / "token"
    assert load(write(render(found))) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PEER + 'mode = "synch"', '[replication.peers] mode: expected one of "async", "sync", found the text "synch"'),
        (PEER + 'topic = "x"', "[replication.peers] topic: unknown key, did you mean topics?"),
        (PEER + 'topics = "a("', '[replication.peers] topics: "a(" is not an RE2 expression'),
        (PEER + 'topics = "(?=a)"', '[replication.peers] topics: "(?=a)" is not an RE2 expression'),
        (PEER + 'filter = "/a >"', "[replication.peers] filter: "),
        (PEER + 'certificate = "c.pem"', "[replication.peers] certificate: also needs key"),
        (PEER + 'key = "k.pem"', "[replication.peers] key: also needs certificate"),
        (PEER + 'certificate = "c.pem"\nkey = "k.pem"', "[replication.peers] certificate: also needs ca"),
        (
            PEER + 'ca = "missing.pem"',
            '[replication.peers] ca: missing.pem cannot be read (No such file or directory) (peer "ldn-1")',
        ),
        (PEER.replace("7451", "0"), "[replication.peers] address: 127.0.0.1:0 names no port"),
        (PEER.replace(":7451", ""), '[replication.peers] address: "127.0.0.1" is not host:port'),
        (PEER.replace("7451", "7450"), "[replication.peers] address: 127.0.0.1:7450 is the server's own"),
        (PEER.replace("127.0.0.1", "10.0.0.1"), "10.0.0.1:7451 is on another machine: set ca for TLS, or allow plain"),
        (PEER.replace("ldn-1", "nyc-1"), '[replication.peers] name: "nyc-1" is this instance itself'),
        (PEER.replace("ldn-1", "_x"), "[replication.peers] name: expected 1 to 100 of"),
        (PEER + '[[replication.peers]]\nname = "ldn-1"\naddress = "127.0.0.1:1"', '"ldn-1" names two peers'),
        (PEER + '[[replication.peers]]\nname = "b"\naddress = "127.0.0.1:7451"', "7451 is the address of two peers"),
        (PEER + '[[replication.peers]]\nname = "b"', '[replication.peers] address: is missing (peer "b")'),
        (PEER + "[[replication.peers]]", "[replication.peers] name: is missing (peer number 2)"),
        (
            "[replication.peers]\nname = 1",
            "[replication] peers: expected tables, each under the heading [[replication.peers]]",
        ),
        (PEER + '[replication]\naccept = ["nyc-1"]', '[replication] accept: "nyc-1" is this instance itself'),
        (PEER + '[replication]\naccept = ["a", "a"]', '[replication] accept: "a" occurs twice'),
        (PEER + '[replication]\naccept = ["_a"]', "[replication] accept: expected 1 to 100 of"),
        (PEER + "[replication]\nmin_sync_peers = 0", "[replication] min_sync_peers: 0 is below the minimum, 1"),
        (
            PEER + "[replication]\nmin_sync_peers = 2",
            'min_sync_peers: 2 is above the number of peers with mode = "sync", 0',
        ),
        (PEER + '[replication]\ntoken = "a b"', "[replication] token: expected up to 1000 visible ASCII characters"),
        (PEER + '[replication]\ntoken = "a"\ntoken_file = "b"', "[replication] token_file: contradicts token"),
        (PEER + '[replication]\ntoken_file = "b"', "[replication] token_file: b cannot be read (No such file"),
        (PEER + '[replication]\ntoken_file = "sow.toml"', "[replication] token_file: sow.toml does not hold one line"),
        (
            PEER + '[replication]\ntombstone_grace = "1s"',
            "[replication] tombstone_grace: 1s is below the minimum, 1m0s",
        ),
        (
            PEER.replace("[server]", '[server]\ndurability = "replicated"'),
            '[server] durability: "replicated" needs a peer',
        ),
    ],
)
def test_links_that_cannot_be_are_refused(write: Write, text: str, message: str) -> None:
    assert message in refusal(write(text))


def test_plain_text_to_a_peer_on_another_machine_has_to_be_spelled_out(write: Write) -> None:
    path = write(PEER.replace("127.0.0.1", "10.0.0.1"))
    assert load(path, Overrides(insecure=True)).peers[0].ca is None


def test_a_server_that_other_machines_reach_needs_a_token_or_client_certificates(write: Write, pems: Path) -> None:
    """Names alone prove nothing (rule R11)."""
    open_to_all = PEER.replace("[server]", '[server]\nlisten = "0.0.0.0:7450"')
    assert "[replication] token: is needed" in refusal(write(open_to_all), Overrides(insecure=True))
    assert load(write(open_to_all + '[replication]\ntoken = "t"'), Overrides(insecure=True)).replicates
    tls = f'[server.tls]\ncertificate = "{pems}/certificate.pem"\nkey = "{pems}/key.pem"\n'
    assert "[replication] token: is needed" in refusal(write(open_to_all + tls))
    assert load(write(open_to_all + tls + f'client_ca = "{pems}/certificate.pem"')).replicates


def test_replicated_may_be_the_default_durability(write: Write) -> None:
    found = load(write(PEER.replace("[server]", '[server]\ndurability = "replicated"') + 'mode = "sync"'))
    assert found.server.durability is Durability.REPLICATED


# --- printing --------------------------------------------------------------------------------------------------------


def test_the_printed_configuration_is_the_configuration(write: Write) -> None:
    found = load(None, Overrides(data_dir='a "quoted" \\ path\x7f', listen="[::1]:9"))
    assert load(write(render(found))) == found


_names = st.from_regex(r"[A-Za-z0-9.:-][A-Za-z0-9_.:-]{0,20}", fullmatch=True)
_ttls = st.none() | st.integers(0, 3653 * 86_400 * MICROS)
_limits = st.none() | st.integers(1, 2**62)
_settings = st.builds(
    TopicSettings,
    key=st.sampled_from([(), ("/55",), ("/55", "/11")]),
    message_type=st.sampled_from(MessageType),
    expiration=st.sampled_from(Expiration),
    default_ttl_micros=_ttls,
    min_ttl_micros=_ttls,
    max_ttl_micros=_ttls,
    journal=st.booleans(),
    separator=st.just(b"\x01") | st.binary(min_size=1, max_size=1),
    retain_time_micros=st.none() | st.integers(0, 2**62),
    retain_bytes=st.none() | st.integers(0, 2**62),
    backlog_quota_entries=_limits,
    delivery_limit=_limits,
    index=st.sampled_from([(), ("/55",), ("/44", "/54")]),
    max_age_micros=_limits,
    max_bytes=_limits,
    max_entries=_limits,
    backlog_ttl_micros=_limits,
    backlog_quota_bytes=_limits,
    backlog_quota_age_micros=_limits,
    backlog_action=st.sampled_from(BacklogAction),
    durable_idle_ttl_micros=_limits,
    idle_ttl_micros=st.none(),
    publish_is_use=st.booleans(),
    only_if_empty=st.booleans(),
    auto_delete=st.just(False),
    dead_letter=st.sampled_from(["", "dlq"]),
    dead_letter_by_key=st.booleans(),
    on_missing=st.sampled_from(OnMissing),
)


def _legal(settings: TopicSettings) -> bool:
    try:
        check_settings(declared_of(settings))
    except StoreError:
        return False
    return True


@given(topics=st.dictionaries(_names, _settings.filter(_legal).map(declared_of), max_size=3))
def test_printed_topics_are_the_topics(tmp_path_factory: pytest.TempPathFactory, topics: dict[str, Declared]) -> None:
    path = tmp_path_factory.getbasetemp() / "printed.toml"
    found = dataclasses.replace(load(None), topics=topics)
    path.write_text(render(found), encoding="utf-8")
    assert load(path) == found


# --- nothing is left out ---------------------------------------------------------------------------------------------

_INTERNAL = {"version_reserve_micros", "sequence_reserve"}  # nothing an operator could judge
_NESTED = {"writer", "rocks", "limits", "replicas"}


def test_every_option_of_the_engine_has_a_knob() -> None:
    """Each knob is moved from its default; then no option of the engine may still have its own."""
    moved = Config()
    for name in ("storage", "limits", "sweep", "clock"):
        section = getattr(moved, name)
        fields = {entry.name: getattr(section, entry.name) + 1 for entry in dataclasses.fields(section)}
        moved = dataclasses.replace(moved, **{name: dataclasses.replace(section, **fields)})
    server = ServerConfig(instance="elsewhere", dynamic_topics=True)
    moved = dataclasses.replace(
        moved,
        server=server,
        defaults={"max_entries": 1},
        peers=(PeerConfig("ldn-1", "127.0.0.1:1"),),
        replication=ReplicationConfig(max_clock_skew_micros=1, peer_max_lag_bytes=1, peer_max_lag_age_micros=1),
    )
    options, default = config.store_options(moved), StoreOptions()
    for found, usual in (
        (options, default),
        (options.writer, default.writer),
        (options.writer.limits, default.writer.limits),
        (options.rocks, default.rocks),
        (options.replicas, default.replicas),
        (config.clock_options(moved), ClockOptions()),
    ):
        for entry in dataclasses.fields(found):
            if entry.name not in _INTERNAL | _NESTED:
                assert getattr(found, entry.name) != getattr(usual, entry.name), entry.name


def _documented() -> dict[tuple[str, str], tuple[str, str]]:
    """(table, key) → (default, bounds), from the document."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    table = ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"## \[{1,2}(.+?)\]{1,2}", line):
            table = heading[1]
        elif line.startswith("## "):
            table = ""
        elif table and (row := re.fullmatch(r"\| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|", line)):
            found[table, row[1]] = (row[2], row[3])
    return found


def test_every_knob_is_documented_with_its_default_and_bounds() -> None:
    expected = {}
    for knob in config.knobs():
        default = f"`{knob.default}`" if knob.default else "the host name" if knob.key == "instance" else "–"
        expected[knob.table, knob.key] = (default, knob.bounds.replace('"', "") or "–")
    assert _documented() == expected


def test_the_example_of_the_document_loads(write: Write) -> None:
    example = re.search(r"```toml\n(.+?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    found = load(write(example[1]))
    assert found.topics["orders"]["max_ttl_micros"] == 3600 * MICROS
    assert found.topics["orders"]["default_ttl_micros"] == 30 * MICROS


def test_the_largest_message_has_room_for_the_largest_request() -> None:
    assert config.LimitsConfig().message_bytes_max == 20 * 2**20
    assert config.LimitsConfig(request_bytes_max=64 * 2**20).message_bytes_max == 68 * 2**20
