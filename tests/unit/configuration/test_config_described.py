"""The configuration with origins, without secrets (`GetConfig`), and as a file."""

from __future__ import annotations

from pathlib import Path

from sow_server.config import Overrides, described, knobs, load, render
from sow_server.config.described import SECRETS
from sow_server.config.kinds import MayBeAbsent, Text
from tests.support.oracles.access import write_private

TEXT = """
[server]
listen = "127.0.0.1:7450"
[storage]
background_jobs = 2
[defaults]
max_ttl = "1d"
[replication]
token = "s3cr3t"
[[replication.peers]]
name = "ldn"
address = "127.0.0.1:7451"
[[replication.peers]]
name = "tok"
address = "127.0.0.1:7452"
topics = ".*"
[tracing]
endpoint = "http://me:s3cr3t@127.0.0.1:4317"
"""


def test_every_setting_has_its_value_and_origin(tmp_path: Path) -> None:
    file = tmp_path / "sow.toml"
    write_private(file, TEXT)
    found = described(load(file, Overrides(listen="127.0.0.1:7460")))
    by_key = {(one.table, one.number, one.key): one for one in found}

    assert by_key["server", 0, "listen"][3:] == ('"127.0.0.1:7460"', "command line", False)
    assert by_key["storage", 0, "background_jobs"][3:] == ("2", "file", False), "also where it equals the default"
    assert by_key["storage", 0, "commit_records_max"].origin == "default"
    assert by_key["defaults", 0, "max_ttl"][3:5] == ('"1d"', "file")
    assert by_key["defaults", 0, "min_ttl"][3:5] == ("", "default")
    assert by_key["replication.peers", 1, "name"][3:5] == ('"ldn"', "file")
    origins = [(one.number, one.origin) for one in found if (one.table, one.key) == ("replication.peers", "topics")]
    assert origins == [(1, "default"), (2, "file")], "also where it equals the default"
    told = {one.table for one in found}
    absent = {"server.tls", "server.listeners", "access.jwt", "topics.NAME", "views.NAME"}
    assert {knob.table for knob in knobs()} - told == absent, "tables that the file does not have"


def test_secrets_are_hidden(tmp_path: Path) -> None:
    file = tmp_path / "sow.toml"
    write_private(file, TEXT)
    found = described(load(file))
    assert "s3cr3t" not in repr(found)
    hidden = [(one.table, one.key, one.origin) for one in found if one.hidden]
    assert hidden == [("replication", "token", "file"), ("tracing", "endpoint", "file")]


def test_every_text_that_may_be_a_secret_is_known() -> None:
    """A knob that is added with such a name either names a file, or is hidden."""
    for knob in knobs():
        kind = knob.kind.kind if isinstance(knob.kind, MayBeAbsent) else knob.kind
        if isinstance(kind, Text) and any(word in knob.key for word in ("token", "secret", "password")):
            assert (knob.table, knob.key) in SECRETS


def test_without_a_file_all_are_defaults() -> None:
    assert {one.origin for one in described(load(None))} == {"default"}


def test_every_table_is_in_the_configuration_as_a_file(tmp_path: Path) -> None:
    """Story: --print-config left out [tracing], so a configuration that was made from it had no traces."""
    file = tmp_path / "sow.toml"
    write_private(file, TEXT + '[topics.orders]\nkey = ["/id"]\n')
    found = load(file)
    rendered = render(found)
    write_private(file, rendered)
    assert load(file) == found
    tables = {line.strip("[]") for line in rendered.splitlines() if line.startswith("[")}
    absent = {"server.tls", "server.listeners", "access.jwt", "topics.NAME", "views.NAME"}
    assert tables == {knob.table for knob in knobs()} - absent | {"topics.orders"}
