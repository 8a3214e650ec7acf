"""The configuration as it is printed, and that every knob is documented and reaches the engine."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow_server import config
from sow_server.config import (
    AccessConfig,
    BackupConfig,
    Config,
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
from sow_server.engine.values.model import MICROS, BacklogAction, Expiration, MessageType, OnMissing, TopicSettings
from sow_server.engine.values.policies import Declared, declared_of
from tests.support.servers.configs import Write, write

__all__ = ["write"]  # a fixture


DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"


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
    replicate_durables=st.booleans(),
    max_records=_limits,
    max_stored_bytes=_limits,
)


def _legal(settings: TopicSettings) -> bool:
    try:
        check_settings(declared_of(settings))
    except StoreError:
        return False
    return True


@pytest.mark.slow
@given(topics=st.dictionaries(_names, _settings.filter(_legal).map(declared_of), max_size=3))
def test_printed_topics_are_the_topics(tmp_path_factory: pytest.TempPathFactory, topics: dict[str, Declared]) -> None:
    path = tmp_path_factory.getbasetemp() / "printed.toml"
    found = dataclasses.replace(load(None), topics=topics)
    path.write_text(render(found), encoding="utf-8")
    assert load(path) == found


_INTERNAL = {"version_reserve_micros", "sequence_reserve"}  # nothing an operator could judge
_INTERNAL |= {"index_entries_max", "atomic_entries_max"}  # chosen so that one record keeps a commit short (rule K8)
_INTERNAL |= {"plan_of"}  # a part of the server
_NESTED = {"writer", "rocks", "limits", "replicas"}


# --- nothing is left out ---------------------------------------------------------------------------------------------


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
        access=AccessConfig(file=Path("auth.toml")),
        backup=BackupConfig(root=Path("backups")),
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
    """(table, key) → (default, bounds), from the document. A topic has the keys of the defaults, which stand once."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    table = ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"## \[{1,2}(.+?)\]{1,2}", line):
            table = heading[1]
        elif line.startswith("## "):
            table = ""
        elif table and (row := re.fullmatch(r"\| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|", line)):
            found[table, row[1]] = (row[2], row[3])
    shared = {("topics.NAME", key): row for (of, key), row in found.items() if of == "defaults"}
    return shared | found


def test_every_knob_is_documented_with_its_default_and_bounds() -> None:
    expected = {}
    for knob in config.knobs():
        default = f"`{knob.default}`" if knob.default else "the host name" if knob.key == "instance" else "–"
        expected[knob.table, knob.key] = (default, knob.bounds.replace('"', "") or "–")
    found = _documented()
    missing = [
        f"in docs/configuration.md, [{table}] needs the line: | `{key}` | {default} | {bounds} | (its meaning) |"
        for (table, key), (default, bounds) in expected.items()
        if found.get((table, key)) != (default, bounds)
    ]
    gone = [f"docs/configuration.md has [{table}] {key}, which is no knob" for table, key in found.keys() - expected]
    assert missing + gone == []


def test_every_knob_is_read_by_the_server() -> None:
    """A knob that only the configuration knows would be accepted, and change nothing."""
    server = DOCUMENT.parents[1] / "sow_server"
    code = "".join(path.read_text() for path in server.rglob("*.py") if path.name != "sections.py")
    read = set(re.findall(r"\.(\w+)", code))
    unread = [f"[{knob.table}] {knob.key}" for knob in config.knobs() if knob.field not in read]
    assert unread == [], "config/options.py gives a knob to the engine, app.py to the other parts"


def test_the_example_of_the_document_loads(write: Write) -> None:
    example = re.search(r"```toml\n(.+?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    found = load(write(example[1]))
    assert found.topics["orders"]["max_ttl_micros"] == 3600 * MICROS
    assert found.topics["orders"]["default_ttl_micros"] == 30 * MICROS


def test_the_largest_message_has_room_for_the_largest_request() -> None:
    assert config.LimitsConfig().message_bytes_max == 20 * 2**20
    assert config.LimitsConfig(request_bytes_max=64 * 2**20).message_bytes_max == 68 * 2**20
