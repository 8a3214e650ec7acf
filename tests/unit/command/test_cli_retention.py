"""`sow durable`, `policy`, `retention` and `quota` against a fake client, and the settings behind them."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from sow_cli import arguments, display
from sow_cli.command import sow
from sow_cli.policies import policy_name
from sow_client import Browsed, Change, DurableFigures, EffectiveSetting, FailedPrecondition, TopicSettings
from tests.support.fakes.fake_client import FakeClient
from tests.support.fakes.fake_results import NOW_MICROS


@pytest.fixture
def client() -> FakeClient:
    client = FakeClient()
    client.add("orders", records=[{"id": 1}])
    return client


def run(client: FakeClient, *arguments: str) -> Result:
    return CliRunner().invoke(sow, arguments, obj=lambda _session: client)


def row(result: Result) -> dict[str, object]:
    """The one line of NDJSON that a command wrote."""
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    found: dict[str, object] = json.loads(line)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("durable", "describe", "orders"),
        ("durable", "rewind", "orders", "billing"),
        ("durable", "rewind", "orders", "billing", "2030-01-31T12:00:00"),
        ("durable", "rewind", "orders", "billing", "yesterday"),
        ("durable", "clear-backlog", "orders", "billing"),  # nobody to ask
        ("durable", "clear-backlog", "orders"),
        ("durable", "delete", "orders", "billing"),
        ("policy", "set", "short", ".*"),
        ("policy", "set", "short", ".*", "--max-ttl", "10"),
        ("policy", "set", "short", ".*", "--durables", "--max-ttl", "1h"),
        ("policy", "set", "short", ".*", "--max-ttl", "1h", "--priority", "high"),
        ("retention", "get"),
        ("retention", "get", "orders", "--pattern", ".*"),
        ("retention", "set", "orders"),
        ("retention", "set", "--time", "1h"),
        ("retention", "set", "orders", "--time", "60"),
        ("retention", "set", "orders", "--max-entries", "-1"),
        ("retention", "set", "--pattern", "x" * 200, "--time", "1h"),
        ("quota", "set", "orders", "--action", "sometimes"),
        ("quota", "set", "orders", "--bytes", "10 parsecs"),
        ("quota", "set", "orders", "--bytes", "1048576"),  # of what?
        ("quota", "remove"),
        ("topic", "create", "orders", "--max-entries", "many"),
        ("topic", "create", "orders", "--idle-ttl", "5"),
        ("topic", "alter", "orders", "--on-missing", "cry"),
    ],
)
def test_wrong_usage_ends_with_2_and_asks_the_server_nothing(client: FakeClient, arguments: tuple[str, ...]) -> None:
    before = len(client.calls)
    result = run(client, *arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert client.calls[before:] == []


# ---- topics ----


def test_every_setting_of_a_topic_has_an_option(client: FakeClient) -> None:
    result = run(
        client, "topic", "create", "fills", "--max-age", "2d", "--max-bytes", "1GiB", "--max-entries", "1000000",
        "--backlog-ttl", "1h", "--backlog-quota-bytes", "64MiB", "--backlog-quota-age", "30m",
        "--backlog-quota-entries", "9000", "--delivery-limit", "5",
        "--backlog-action", "evict", "--durable-idle-ttl", "1w", "--idle-ttl", "1d", "--publish-is-use",
        "--only-if-empty", "--no-auto-delete", "--dead-letter", "dead", "--dead-letter-by-key", "--on-missing", "drop",
        "--replicate-durables",
    )  # fmt: skip

    assert client.arguments_of("create_topic") == {
        "name": "fills",
        "max_age": "2d",
        "max_bytes": 2**30,
        "max_entries": 1_000_000,
        "backlog_ttl": "1h",
        "backlog_quota_bytes": 64 * 2**20,
        "backlog_quota_age": "30m",
        "backlog_quota_entries": 9_000,
        "delivery_limit": 5,
        "backlog_action": "evict",
        "durable_idle_ttl": "1w",
        "idle_ttl": "1d",
        "publish_is_use": True,
        "only_if_empty": True,
        "auto_delete": False,
        "dead_letter": "dead",
        "dead_letter_by_key": True,
        "on_missing": "drop",
        "replicate_durables": True,
    }
    shown = row(result)
    assert (shown["max_age"], shown["max_bytes"], shown["auto_delete"]) == ("2d", 2**30, False)
    assert {"retain_time", "min_ttl"}.isdisjoint(shown), "unset settings are absent"
    options = {option.name for option in sow.commands["topic"].commands["create"].params}  # type: ignore[attr-defined]  # a group, which click types as a command
    assert set(TopicSettings.__dataclass_fields__) <= options


def test_alter_takes_settings_away_with_none(client: FakeClient) -> None:
    names = ("max-age", "max-bytes", "max-entries", "backlog-quota-bytes", "backlog-action", "dead-letter",
             "on-missing", "retain-time", "retain-bytes", "idle-ttl")  # fmt: skip
    run(client, "topic", "alter", "orders", *[part for name in names for part in (f"--{name}", "none")])

    assert client.arguments_of("alter_topic") == {"name": "orders"} | {name.replace("-", "_"): None for name in names}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("topic", "alter", "orders", "--max-ttl"), "none"),
        (("retention", "set", "orders", "--time"), "unlimited or none"),
        (("publish", "orders", "--data", "{}", "--ttl"), "never"),
    ],
)
def test_the_message_of_a_wrong_duration_lists_the_words_for_none(
    client: FakeClient, command: tuple[str, ...], words: str
) -> None:
    """`--max-ttl never` was refused with "misses a number at position 0", which does not lead to `none`."""
    refused = run(client, *command, "forever")

    assert refused.exit_code == 2
    assert f"'forever' is not a duration or {words}: duration 'forever' misses a number" in refused.stderr


def test_the_message_of_a_wrong_number_lists_the_allowed_words(client: FakeClient) -> None:
    """A delivery limit was told that it is no number of entries."""
    refused = run(client, "quota", "set", "orders", "--delivery-limit", "often")

    assert (refused.exit_code, "'often' is not a whole number, unlimited or none" in refused.stderr) == (2, True)


def test_a_negative_number_is_told_what_it_must_be(client: FakeClient) -> None:
    """It was said to be no whole number."""
    refused = run(client, "topic", "create", "orders", "--max-records", "-1")

    assert refused.exit_code == 2
    assert "-1 is negative; it must be 0 or more, unlimited or none" in refused.stderr


def test_settings_without_a_value_are_shown_as_not_set(client: FakeClient) -> None:
    """They were an empty cell in `topic describe`, and the word `none` in `quota get`."""
    client.add("orders")
    client.effective = (
        EffectiveSetting("dead_letter", "", "default"),
        EffectiveSetting("backlog_quota_bytes", "none", "default"),
    )

    described = run(client, "topic", "describe", "orders", "--format", "table").stdout.splitlines()
    quota = run(client, "quota", "get", "orders", "--format", "table").stdout.splitlines()

    assert ["dead_letter", "-", "default"] in [line.split() for line in described]
    assert ["backlog", "quota", "bytes", "-", "(from", "default)"] in [line.split() for line in quota]


def test_describe_shows_the_settings_in_force_and_their_sources(client: FakeClient) -> None:
    """T2: each effective value and its origin; J3: the storage to plan for."""
    client.tables["orders"].settings = TopicSettings(key=["/id"], retain_time="10m", index=["/a"])
    client.effective = (
        EffectiveSetting("retain_time", "10m", "default"),
        EffectiveSetting("max_ttl", "1h", "operator policy cap"),
        EffectiveSetting("index", "/a", "topic"),
    )

    described = row(run(client, "topic", "describe", "orders"))
    table = run(client, "topic", "describe", "orders", "--format", "table").stdout
    (written,) = csv.DictReader(io.StringIO(run(client, "topic", "describe", "orders", "--format", "csv").stdout))

    assert described["effective"] == [
        {"name": "retain_time", "value": "10m", "origin": "default"},
        {"name": "max_ttl", "value": "1h", "origin": "operator policy cap"},
        {"name": "index", "value": "/a", "origin": "topic"},
    ]
    assert described["planned_journal_bytes"] == 300 * 2**20
    assert "300MiB" in table
    assert "/a (complete)" in table, "its type and key stay, beside its settings"
    assert "retain time" not in table, "it is in the other table"
    heading = next(line for line in table.splitlines() if line.startswith("setting"))
    assert heading.split() == ["setting", "value", "from"]
    assert any(line.split() == ["max_ttl", "1h", "operator", "policy", "cap"] for line in table.splitlines())
    assert json.loads(written["effective"]) == described["effective"]


# ---- durable subscriptions ----


FIGURES = DurableFigures(9, 2**20, 2, 1_500, timedelta(minutes=90, microseconds=500_000), exact=True)


def test_durables_are_listed(client: FakeClient) -> None:
    client.keep("orders", "billing", filter="/price > 9", figures=FIGURES)
    client.keep("fills", "audit")

    everything = [json.loads(line) for line in run(client, "durable", "list").stdout.splitlines()]
    one = row(run(client, "durable", "list", "orders"))
    table = run(client, "durable", "list", "--format", "table").stdout

    assert [(each["topic"], each["name"]) for each in everything] == [("orders", "billing"), ("fills", "audit")]
    assert one == {
        "topic": "orders",
        "name": "billing",
        "filter": "/price > 9",
        "acknowledged": "4567.4",
        "earliest": "4567.1",
        "attached": False,
        "replicated": False,
        "pin": False,
        "create_time_micros": NOW_MICROS,
        "last_use_time_micros": NOW_MICROS + 5_000_000,
        "retain_time": "1h30m",
        "retain_bytes": 1_500,
        "total_entries": 9,
        "total_bytes": 2**20,
        "unacknowledged_entries": 2,
        "unacknowledged_bytes": 1_500,
        "oldest_unacknowledged_age_micros": 5_400_500_000,
        "set_aside_entries": 0,
        "exact": True,
    }
    assert "billing" in table
    assert "4567.4" in table
    assert run(client, "durable", "list", "nothing", "--format", "table").stdout == "no durable subscriptions\n"


def test_pins_are_listed_with_their_readers(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """J18."""
    monkeypatch.setenv("COLUMNS", "200")  # in a narrow terminal some columns have no room
    client.keep("orders", "billing")
    client.keep("orders", "spark-1", pin=True, owner="ana", reader="Spark on\x1b[31m etl-3", figures=FIGURES)

    one = row(run(client, "durable", "list", "--pins"))
    table = run(client, "durable", "list", "--pins", "--format", "table").stdout

    assert (one["name"], one["pin"], one["owner"]) == ("spark-1", True, "ana")
    assert "billing" not in table
    for part in ("ana", "etl-3", "1h30m"):
        assert part in table
    assert "\x1b" not in table
    assert run(client, "durable", "list", "nothing", "--pins", "--format", "table").stdout == "no pins\n"


def test_browsing_shows_how_often_each_change_was_handed_over(client: FakeClient) -> None:
    """J16: in every format, and on stderr how to go on."""
    client.keep("orders", "billing")
    entries = (
        Change("put", None, client.record("orders", "a", b"{}"), bookmark="4567.5", topic="orders", delivery_count=2),
        Change(
            "delete",
            None,
            None,
            client.record("orders", "b", b"{}"),
            bookmark="4567.6",
            topic="orders",
            delivery_count=0,
        ),
    )
    client.browsed = Browsed(entries, "4567.6", complete=False)

    result = run(client, "durable", "browse", "orders", "billing", "--max", "2", "--format", "ndjson")

    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(each["op"], each["key"], each["delivery_count"]) for each in rows] == [("put", "a", 2), ("delete", "b", 0)]
    assert "sow durable browse orders billing --max 2 --after 4567.6" in result.stderr
    assert client.arguments_of("durable_browse") == {
        "topic": "orders",
        "name": "billing",
        "entries_max": 2,
        "after": None,
    }
    elsewhere = run(client, "--server", "other:1", "durable", "browse", "orders", "billing", "--format", "ndjson")
    assert "sow --server other:1 durable browse orders billing --max 100 --after 4567.6" in elsewhere.stderr

    client.browsed = Browsed(entries, "4567.6", complete=True)
    table = run(client, "durable", "browse", "orders", "billing", "--after", "4567.4", "--format", "table")
    assert (table.stdout.count("2x"), table.stdout.count("0x"), table.stderr) == (1, 1, "")
    csv = run(client, "durable", "browse", "orders", "billing", "--format", "csv").stdout.splitlines()
    assert csv[0].endswith(",delivery_count")
    assert [line.rsplit(",", 1)[1] for line in csv[1:]] == ["2", "0"]
    client.browsed = Browsed((), "4567.6", complete=True)
    empty = run(client, "durable", "browse", "orders", "billing", "--format", "table")
    assert (empty.stdout, empty.stderr) == ("", "no unacknowledged changes\n")
    assert run(client, "durable", "browse", "orders", "billing", "--format", "ndjson").stderr == ""
    assert run(client, "durable", "browse", "orders", "nothing").exit_code == 1


def test_describe_shows_figures_exactly(client: FakeClient) -> None:
    """J7. Nothing is rounded: 1,500 bytes are not 1.5 KiB."""
    client.keep("orders", "billing", figures=FIGURES)

    described = row(run(client, "durable", "describe", "orders", "billing", "--exact"))
    table = run(client, "durable", "describe", "orders", "billing", "--format", "table").stdout

    assert client.arguments_of("describe_durable")["exact"] is False, "the last one"
    assert described["total_entries"] == 9
    assert (described["unacknowledged_entries"], described["unacknowledged_bytes"]) == (2, 1_500)
    assert (described["oldest_unacknowledged_age_micros"], described["exact"]) == (5_400_500_000, True)
    shown = dict(line.split(maxsplit=1) for line in table.replace(" ", "\x00").replace("\x00\x00", " ").splitlines())
    values = {key.replace("\x00", " "): value.strip(" \x00") for key, value in shown.items()}
    assert values["unacknowledged bytes"] == "1500B"
    assert values["total bytes"] == "1MiB"
    assert values["oldest unacknowledged age"] == "1h30m0.5s"
    assert values["retain time"] == "1h30m"
    assert run(client, "durable", "describe", "orders", "nothing").exit_code == 1


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("earliest", "earliest"),
        ("4567.17", "4567.17"),
        ("17", "4567.17"),
        ("2030-01-31T13:00:00+01:00", datetime(2030, 1, 31, 12, tzinfo=UTC)),
    ],
)
def test_rewind_goes_to_a_bookmark_a_sequence_or_a_time(client: FakeClient, to: str, expected: object) -> None:
    """J6."""
    client.keep("orders", "billing")

    result = run(client, "durable", "rewind", "orders", "billing", to)

    assert row(result) == {
        "topic": "orders",
        "name": "billing",
        "bookmark": "4567.1",
        "unacknowledged_entries": 7,
    }
    asked = client.arguments_of("rewind")
    assert (asked["to"], asked["force"]) == (expected, False)
    run(client, "durable", "rewind", "orders", "billing", to, "--force")
    assert client.arguments_of("rewind")["force"] is True


def test_a_backlog_is_cleared_only_when_forced_without_a_terminal(client: FakeClient) -> None:
    """Pulsar 7, J13."""
    refused = run(client, "durable", "clear-backlog", "orders", "billing")
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    for flag in ("-f", "--force"):
        forced = run(client, "durable", "clear-backlog", "orders", "billing", flag)
        assert row(forced) == {"topic": "orders", "name": "billing", "acknowledged_entries": 7}
    assert row(run(client, "durable", "clear-backlog", "orders", "-f")) == {
        "topic": "orders",
        "acknowledged_entries": 7,
    }
    assert client.arguments_of("clear_backlog")["name"] is None


@pytest.mark.parametrize(("answer", "code", "cleared"), [("y", 0, True), ("n", 1, False), ("", 1, False)])
def test_on_a_terminal_it_asks(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, cleared: bool
) -> None:
    """Pulsar 7, J13."""
    monkeypatch.setattr("sow_cli.topics._can_ask", lambda: True)
    result = CliRunner().invoke(
        sow, ["durable", "clear-backlog", "orders", "billing"], input=answer + "\n", obj=lambda _session: client
    )
    assert "Mark all changes of topic orders acknowledged for durable subscription billing?" in result.stderr
    assert result.exit_code == code
    assert any(name == "clear_backlog" for name, _ in client.calls) == cleared


def test_delete_names_the_deleted_object(client: FakeClient) -> None:
    client.keep("orders", "billing")
    assert row(run(client, "durable", "delete", "orders", "billing", "-f")) == {"topic": "orders", "name": "billing"}
    assert client.kept == {}
    gone = run(client, "durable", "delete", "orders", "billing", "-f")
    assert (gone.exit_code, gone.stderr.split(":")[1]) == (1, " DURABLE_NOT_FOUND")


# ---- policies ----


def test_policies_are_set_got_listed_and_deleted(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = run(
        client, "policy", "set", "short", "tmp.*", "--priority", "3", "--max-ttl", "1h", "--retain-bytes", "1KiB"
    )
    told = {
        "name": "short",
        "pattern": "tmp.*",
        "priority": 3,
        "applies_to": "topics",
        "operator": False,
        "matches": 2,
        "settings": {"max_ttl": "1h", "retain_bytes": 1_024},
    }
    assert row(done) == told
    assert client.arguments_of("set_policy")["durables"] is None
    assert row(run(client, "policy", "get", "short")) == told
    assert row(run(client, "policy", "list")) == told
    table = run(client, "policy", "list", "--format", "table").stdout
    assert "max_ttl = 1h, retain_bytes = 1KiB" in table
    written = list(csv.DictReader(io.StringIO(run(client, "policy", "list", "--format", "csv").stdout)))
    assert json.loads(written[0]["settings"]) == told["settings"]
    assert run(client, "policy", "get", "short", "--operator").exit_code == 1, "those have names of their own"
    assert row(run(client, "policy", "delete", "short")) == {"name": "short", "operator": False}
    assert run(client, "policy", "list", "--format", "table").stdout == "no policies\n"
    assert run(client, "policy", "delete", "short").exit_code == 1


def test_an_operator_policy_and_one_for_durables(client: FakeClient) -> None:
    made = row(run(client, "policy", "set", "cap", ".*", "--operator", "--max-bytes", "10GiB"))
    assert made["operator"] is True
    assert ("cap", True) in client.set_policies
    of_durables = row(run(client, "policy", "set", "idle", "orders/.*", "--durables", "--idle-ttl", "1w"))
    assert (of_durables["applies_to"], of_durables["settings"]) == ("durables", {"idle_ttl": "1w"})
    assert client.arguments_of("set_policy")["topics"] is None


# ---- retention and quotas ----


def test_retention_of_a_topic_is_set_got_and_removed(client: FakeClient) -> None:
    """Pulsar 3. A setting that is not given is no longer set."""
    client.effective = (
        EffectiveSetting("retain_time", "1h", "topic"),
        EffectiveSetting("retain_bytes", "256MiB", "default"),
        EffectiveSetting("max_ttl", "1h", "topic"),
    )
    told = {
        "topic": "orders",
        "retain_time": "1h",
        "retain_bytes": "256MiB",
        "origins": {"retain_time": "topic", "retain_bytes": "default"},
    }
    assert row(run(client, "retention", "set", "orders", "--time", "1h", "--max-entries", "1000")) == told
    assert client.arguments_of("alter_topic") == {
        "name": "orders",
        "retain_time": "1h",
        "retain_bytes": None,
        "max_age": None,
        "max_bytes": None,
        "max_entries": 1_000,
    }
    assert row(run(client, "retention", "get", "orders")) == told
    assert "256MiB  (from default)" in run(client, "retention", "get", "orders", "--format", "table").stdout
    assert row(run(client, "retention", "remove", "orders")) == told
    assert set(client.arguments_of("alter_topic").values()) == {"orders", None}


def test_a_quota_of_a_topic_is_set_got_and_removed(client: FakeClient) -> None:
    """Pulsar 5, Pulsar 8: set, get, remove."""
    client.effective = (EffectiveSetting("backlog_quota_bytes", "64MiB", "topic"),)
    told = {"topic": "orders", "backlog_quota_bytes": "64MiB", "origins": {"backlog_quota_bytes": "topic"}}
    assert row(run(client, "quota", "set", "orders", "--bytes", "64MiB", "--action", "reject", "--ttl", "1h")) == told
    assert client.arguments_of("alter_topic") == {
        "name": "orders",
        "backlog_quota_bytes": 64 * 2**20,
        "backlog_quota_age": None,
        "backlog_quota_entries": None,
        "delivery_limit": None,
        "backlog_action": "reject",
        "backlog_ttl": "1h",
    }
    assert row(run(client, "quota", "get", "orders")) == told
    run(client, "quota", "remove", "orders")
    assert client.arguments_of("alter_topic") == {"name": "orders"} | dict.fromkeys(
        [
            "backlog_quota_bytes",
            "backlog_quota_age",
            "backlog_quota_entries",
            "backlog_action",
            "backlog_ttl",
            "delivery_limit",
        ]
    )


def test_a_pattern_makes_a_policy(client: FakeClient) -> None:
    """Pulsar 3."""
    told = {
        "pattern": "tmp-.*",
        "policy": "retention.tmp-.:2a",
        "priority": 2,
        "matches": 2,
        "retain_time": "0s",
        "retain_bytes": "0B",
    }
    arguments = ("--pattern", "tmp-.*")
    assert row(run(client, "retention", "set", *arguments, "--time", "0s", "--bytes", "0B", "--priority", "2")) == told
    assert row(run(client, "retention", "get", *arguments)) == told
    assert run(client, "quota", "get", *arguments).exit_code == 1, "that is another policy"
    removed = row(run(client, "retention", "remove", *arguments))
    assert removed == {"pattern": "tmp-.*", "policy": "retention.tmp-.:2a"}
    assert client.set_policies == {}


def test_a_refusal_of_the_server_ends_with_1(client: FakeClient) -> None:
    client.fails_with = FailedPrecondition("the file owns it", reason="SET_IN_CONFIG")
    assert run(client, "retention", "set", "orders", "--time", "1h").exit_code == 1


@given(st.text(max_size=15), st.text(max_size=15))
def test_different_patterns_have_different_policies(one: str, other: str) -> None:
    one, other = (text.encode(errors="ignore").decode() for text in (one, other))
    assert (policy_name("quota", one) == policy_name("quota", other)) == (one == other)
    assert set(policy_name("quota", one)) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:-")


@given(st.integers(0, 10**18 - 1))
def test_sizes_and_durations_are_shown_as_options_take_them(number: int) -> None:
    """Nothing is rounded."""
    assert arguments.size(display.exact_size(number)) == number
    assert len(display.exact_size(number)) <= len(str(number)) + 1
    length = timedelta(microseconds=number)
    shown = display.exact_duration(length)
    assert arguments.duration(shown) == shown
