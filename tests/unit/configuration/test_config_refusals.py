"""The configuration: faults are refused with the place where they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_server.config import Overrides
from tests.support.servers.configs import Write, refusal, write

__all__ = ["write"]  # a fixture


REFUSED = [
    # Unknown names, with the similar known one.
    ('[topics.orders]\nexpriation = "30s"', "[topics.orders] expriation: unknown key, did you mean expiration?"),
    ("[servre]\nx = 1", "[servre]: unknown table, did you mean [server]?"),
    ("[gadgets]\nx = 1", "[gadgets]: unknown table (known: access, backup, clock, defaults, journal, limits,"),
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
    ("[topics.a]\nkey = [1]", '[topics.a] key: expected key paths such as ["/id"], all of them texts'),
    ("[server]\nlisten = {a = 1}", '[server] listen: expected an address such as "127.0.0.1:7450", found a table'),
    (
        "[replication]\naccept = 'ldn'",
        '[replication] accept: expected an array of names of instances such as ["ldn-1"]',
    ),
    ("[[replication.peers]]\nname = 'a'\naddress = 'a:1'\ntopics = 1", "topics: expected a pattern such as"),
    ("[[replication.peers]]\nname = 'a'\naddress = 'a:1'\nfilter = 1", "filter: expected a filter such as"),
    ("[access.jwt]\nalgorithms = []", "[access.jwt] algorithms: names no algorithm"),
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
    ('[server]\nlisten = "a b:7450"', "[server] listen: \"a b:7450\": 'a b' is not a host name"),
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
    ('[topics.a]\nexpiration = "2h"\nmax_ttl = "1h"', "[topics.a] default_ttl: 2h is above max_ttl, 1h"),
    ('[defaults]\nexpiration = "1s"\nmin_ttl = "1.5s"', "[defaults] default_ttl: 1s is below min_ttl, 1.5s"),
    ('[topics.a]\nmax_ttl = "4000d"', "[topics.a] max_ttl: 4000d is not between 0s and ten years"),
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
        "[defaults] backlog_quota_age: 1h30m is not below retain_time, 1h (rule J9)",
    ),
    ('[defaults]\nidle_ttl = "0s"', "[defaults] idle_ttl: 0s must be above zero"),
    ('[topics.a]\nidle_ttl = "1h"', "[topics.a] idle_ttl: 1h contradicts that the topic is declared in the"),
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
        "[server] listen: 0.0.0.0:7450 is reachable from other machines: let clients prove who they are, by auth",
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
    ('[backup]\nroot = ""', "[backup] root: expected the path of a directory, found the text"),
    ('[backup]\nroot = "sow.toml"', "[backup] root: sow.toml is not a directory"),
    ('[backup]\nroot = "sow-data"', "[backup] root: sow-data is in the data directory sow-data, see [server] data_dir"),
    ('[backup]\nroot = "a/../sow-data/b"', "b is in the data directory"),
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
