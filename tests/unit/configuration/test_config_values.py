"""The configuration: accepted values and defaults, from the file and from the command line."""

from __future__ import annotations

import inspect
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow.sizes import format_bytes, parse_bytes
from sow_server import config
from sow_server.config import Config, Overrides, ServerConfig, load, render
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.clock import ClockOptions
from sow_server.engine.values.model import MICROS, BacklogAction, Durability, Expiration, MessageType, OnMissing
from tests.support.servers.configs import Write, write

__all__ = ["write"]  # a fixture


def test_the_package_offers_exactly_its_public_names() -> None:
    offered = {name for name, value in vars(config).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert offered - {"annotations"} == set(config.__all__)


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
    assert found.topics["plain"] == {}, "a topic declares the settings of the file, and no more"


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
