"""Settings as people give them on a page, and the command that sets them."""

from __future__ import annotations

from datetime import timedelta

import click
import pytest

from sow_cli.command import sow
from sow_client import InvalidArgument, TopicSettings
from sow_console import consequences, texts
from sow_console.comparing import matching


@pytest.mark.parametrize(
    ("setting", "text", "value", "words"),
    [
        ("max_ttl", "90m", "1h30m", ["--max-ttl", "1h30m"]),
        ("max_ttl", "none", None, ["--max-ttl", "none"]),
        ("default_ttl", "20m", "20m", ["--default-ttl", "20m"]),
        ("expiration", "disabled", "disabled", ["--expiration", "disabled"]),
        ("journal", "no", False, ["--no-journal"]),
        ("auto_delete", "yes", True, ["--auto-delete"]),
        ("index", "/a /b", ("/a", "/b"), ["--index", "/a", "--index", "/b"]),
        ("index", "none", (), ["--index", "none"]),
        ("max_entries", "1000", 1_000, ["--max-entries", "1000"]),
        ("max_records", "1000", 1_000, ["--max-records", "1000"]),
        ("max_records", "none", None, ["--max-records", "none"]),
        ("max_stored_bytes", "1GiB", 1 << 30, ["--max-stored-bytes", "1073741824B"]),
        ("retain_bytes", "unlimited", -1, ["--retain-bytes", "unlimited"]),
        ("retain_bytes", "64MiB", 64 << 20, ["--retain-bytes", "67108864B"]),
        ("dead_letter", "none", "", ["--dead-letter", "none"]),
        ("on_missing", "drop", "drop", ["--on-missing", "drop"]),
    ],
)
def test_a_value_is_parsed_and_has_its_command(setting: str, text: str, value: object, words: list[str]) -> None:
    found = consequences.parsed(setting, text)
    assert found == value
    command = consequences.words("orders", setting, found)
    assert command == ["topic", "alter", "orders", *words]
    topic = sow.get_command(click.Context(sow), "topic")
    assert isinstance(topic, click.Group)
    alter = topic.get_command(click.Context(topic), "alter")
    assert alter is not None
    alter.make_context("alter", command[2:])


@pytest.mark.parametrize(("setting", "text"), [("max_ttl", "soon"), ("journal", "maybe"), ("max_bytes", "much")])
def test_a_value_that_is_none_is_refused(setting: str, text: str) -> None:
    with pytest.raises(InvalidArgument):
        consequences.parsed(setting, text)


def test_every_setting_has_a_hint() -> None:
    for name in TopicSettings.__dataclass_fields__:
        assert consequences.hint(name)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("1h30m", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("1.5s", timedelta(seconds=1.5)),
        ("20ms", timedelta(milliseconds=20)),
        ("never", None),
        ("", None),
        ("20", None),
    ],
)
def test_lengths_of_time_are_read(text: str, length: timedelta | None) -> None:
    assert texts.length(text) == length


def test_topics_of_a_link_are_counted_by_its_pattern() -> None:
    assert matching(["orders", "orders.dead", "_undelivered"], "orders.*") == 2
    assert matching(["orders"], "") == 1
    assert matching(["orders"], "(") is None
