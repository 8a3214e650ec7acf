"""`sow replication` and `sow backup` against a fake client."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from datetime import timedelta

import pytest
from click.testing import CliRunner, Result

from sow_cli.command import sow
from sow_client import (
    Difference,
    IncomingLink,
    InvalidArgument,
    LinkTopic,
    NotFound,
    OutgoingLink,
    Repaired,
    ReplicationStatus,
    ReplicationUnavailable,
    Verified,
)
from tests.support.fakes.fake_client import FakeClient
from tests.support.fakes.fake_results import NOW, NOW_MICROS

OUT = OutgoingLink(
    peer="ldn-1",
    address="ldn.example:7450",
    state="streaming",
    mode="downgraded",
    topics_pattern="orders.*",
    acknowledged_sequence=1_000,
    lag_sequences=1_234,
    lag=timedelta(seconds=90),
    skew=timedelta(milliseconds=-3),
    since=NOW,
    last_error="it has other key fields",
    last_error_reason="TOPIC_DIFFERS",
    last_error_time=NOW,
    topics=(
        LinkTopic("orders.eu", "refused", "it has \x1b[2J other key fields"),
        LinkTopic("orders.us", "seeding", ""),
    ),
)
IN = IncomingLink(
    peer="ldn-1",
    state="connected",
    cursor=90,
    head_sequence=100,
    applied=9,
    superseded=3,
    dropped=1,
    rows_refused=4,
    skew=timedelta(milliseconds=3),
    last_error="",
    last_error_reason="",
    last_error_time=None,
    topics=(),
)
VERIFIED = [
    Verified("orders", 1_000, 0, (), ""),
    Verified("flights", 10, 2, (Difference("a\x1b", 7, 0), Difference("b", 7, 8)), ""),
    Verified("ticks", 0, 0, (), "expiration differs"),
]


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def run(client: FakeClient, *arguments: str) -> Result:
    return CliRunner().invoke(sow, arguments, obj=lambda _session: client)


def rows(result: Result) -> list[dict[str, object]]:
    assert result.exit_code in (0, 1), result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def arguments_of(client: FakeClient, call: str) -> dict[str, object]:
    (arguments,) = [arguments for name, arguments in client.calls if name == call]
    return arguments


def test_every_link_is_a_line_with_exact_values(client: FakeClient) -> None:
    client.links = ReplicationStatus("nyc-1", 2_234, (OUT,), (IN,))
    out, into = rows(run(client, "replication", "status"))
    assert out == {
        "direction": "out",
        "peer": "ldn-1",
        "state": "streaming",
        "mode": "downgraded",
        "lag_sequences": 1_234,
        "lag_micros": 90_000_000,
        "skew_micros": -3_000,
        "acknowledged_sequence": 1_000,
        "address": "ldn.example:7450",
        "topics_pattern": "orders.*",
        "since_micros": NOW_MICROS,
        "topics": [
            {"topic": "orders.eu", "state": "refused", "message": "it has \x1b[2J other key fields"},
            {"topic": "orders.us", "state": "seeding"},
        ],
        "last_error_reason": "TOPIC_DIFFERS",
        "last_error": "it has other key fields",
        "last_error_time_micros": NOW_MICROS,
    }
    assert into == {
        "direction": "in",
        "peer": "ldn-1",
        "state": "connected",
        "lag_sequences": 10,
        "skew_micros": 3_000,
        "cursor": 90,
        "head_sequence": 100,
        "applied": 9,
        "superseded": 3,
        "dropped": 1,
        "rows_refused": 4,
    }


def test_a_table_shows_errors_below_it_without_control_characters(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # processes of pytest-xdist have 80
    client.links = ReplicationStatus("nyc-1", 2_234, (OUT,), (IN,))
    shown = run(client, "replication", "status", "--format", "table").stdout
    assert "downgraded" in shown
    assert "1m30s" in shown
    assert "-3ms" in shown
    assert "out ldn-1: topic orders.eu is refused: it has \\x1b[2J other key fields" in shown
    assert "out ldn-1: topic orders.us is seeding\n" in shown
    assert "out ldn-1: TOPIC_DIFFERS: it has other key fields" in shown
    assert "in ldn-1: 4 rows refused" in shown
    assert "\x1b[2J" not in shown


def test_an_error_without_a_reason_is_shown_without_an_empty_one(client: FakeClient) -> None:
    """It read "out b: : UNAVAILABLE: failed to connect to all addresses; …"."""
    lost = replace(OUT, topics=(), last_error_reason="", last_error="cannot reach 127.0.0.1:7552: connection refused")
    client.links = ReplicationStatus("nyc-1", 2_234, (lost,), ())
    shown = run(client, "replication", "status", "--format", "table").stdout
    assert "out ldn-1: cannot reach 127.0.0.1:7552: connection refused\n" in shown


def test_a_csv_has_the_same_columns_for_both_directions(client: FakeClient) -> None:
    client.links = ReplicationStatus("nyc-1", 2_234, (replace(OUT, topics=()),), (IN,))
    out, into = csv.DictReader(io.StringIO(run(client, "replication", "status", "--format", "csv").stdout))
    assert (out["mode"], out["cursor"], into["mode"], into["cursor"]) == ("downgraded", "", "", "90")


def test_an_instance_without_links_says_so(client: FakeClient) -> None:
    assert run(client, "replication", "status").stdout == ""
    assert "no links" in run(client, "replication", "status", "--format", "table").stdout


def test_verify_ends_with_1_when_something_differs(client: FakeClient) -> None:
    client.verified = VERIFIED
    result = run(client, "replication", "verify", "ldn-1", "--topic", "orders", "--topic", "flights", "--keys", "7")
    assert result.exit_code == 1
    assert arguments_of(client, "verify_replication") == {
        "peer": "ldn-1",
        "topics": ("orders", "flights"),
        "keys_max": 7,
    }
    same, different, left_out = rows(result)
    none = {"unreadable_here": 0, "unreadable_there": 0}
    assert same == {"topic": "orders", "records": 1_000, "differing": 0} | none
    assert (
        different
        == {
            "topic": "flights",
            "records": 10,
            "differing": 2,
            "differences": [
                {"key": "a\x1b", "version_here": 7, "version_there": 0},
                {"key": "b", "version_here": 7, "version_there": 8},
            ],
        }
        | none
    )
    assert left_out == {"topic": "ticks", "records": 0, "differing": 0, "left_out": "expiration differs"} | none


def test_verify_ends_with_0_when_nothing_differs(client: FakeClient) -> None:
    client.verified = [VERIFIED[0], VERIFIED[2]]
    assert run(client, "replication", "verify", "ldn-1").exit_code == 0
    assert arguments_of(client, "verify_replication") == {"peer": "ldn-1", "topics": None, "keys_max": 100}


def test_rows_that_could_not_be_compared_are_reported_and_end_verify_with_1(client: FakeClient) -> None:
    """R13: such a row may be at one end alone, and nobody could see it."""
    client.verified = [replace(VERIFIED[0], unreadable_there=2)]
    result = run(client, "replication", "verify", "ldn-1", "--format", "table")
    assert result.exit_code == 1
    assert "orders: 2 rows at the peer could not be compared" in result.stdout


def test_a_table_of_differences_lists_the_keys(client: FakeClient) -> None:
    client.verified = VERIFIED
    shown = run(client, "replication", "verify", "ldn-1", "--format", "table").stdout
    assert "expiration differs" in shown
    assert "a\\x1b" in shown
    assert " - " in shown
    assert "\x1b[" not in shown


def test_repair_reports_the_rows_of_each_direction(client: FakeClient) -> None:
    client.repaired = [Repaired("orders", 5, 3, 2, "", 1), Repaired("ticks", 0, 0, 0, "key fields differ")]
    assert rows(run(client, "replication", "repair", "ldn-1", "--topic", "orders")) == [
        {"topic": "orders", "differing": 5, "sent": 3, "received": 2, "refused": 1},
        {"topic": "ticks", "differing": 0, "sent": 0, "received": 0, "refused": 0, "left_out": "key fields differ"},
    ]
    assert arguments_of(client, "repair_replication") == {"peer": "ldn-1", "topics": ("orders",)}


def test_peers_come_and_go(client: FakeClient) -> None:
    """R14."""
    files = ["--ca", "/ca", "--certificate", "/c", "--key", "/k", "--token-file", "/t"]
    given = ["--topics", "o.*", "--mode", "sync", "--filter", "/a=1", *files, "--replace"]
    assert run(client, "replication", "add-peer", "ldn-2", "ldn:7450", *given).exit_code == 0
    assert arguments_of(client, "add_peer") == {
        "name": "ldn-2",
        "address": "ldn:7450",
        "topics_pattern": "o.*",
        "sync": True,
        "filter_text": "/a=1",
        "ca": "/ca",
        "certificate": "/c",
        "key": "/k",
        "token_file": "/t",
        "replace": True,
    }
    for command, called in (("pause", "pause_peer"), ("resume", "resume_peer"), ("remove-peer", "remove_peer")):
        assert rows(run(client, "replication", command, "ldn-2")) == [{"name": "ldn-2"}]
        assert arguments_of(client, called) == {"name": "ldn-2"}


def test_an_error_about_a_peer_names_the_options_of_the_command(client: FakeClient) -> None:
    """The server names keys of its configuration file, which the user of the command has not written."""
    client.fails_with = InvalidArgument(
        'the new peer: [replication.peers] key: also needs certificate (peer "ldn-2")',
        reason="INVALID_ARGUMENT",
        details={"field": "key"},
    )
    result = run(client, "replication", "add-peer", "ldn-2", "ldn:7450", "--key", "/k")
    assert result.exit_code == 1
    assert result.stderr == "sow: INVALID_ARGUMENT: --key: also needs --certificate\n  field: --key\n"


def test_resuming_a_peer_that_was_not_paused_is_remarked_upon(client: FakeClient) -> None:
    streaming, paused = replace(OUT, peer="ldn-2"), replace(OUT, peer="ldn-3", state="paused")
    client.links = replace(client.links, outgoing=(streaming, paused))
    assert run(client, "replication", "resume", "ldn-2").stderr == "ldn-2 was not paused\n"
    assert run(client, "replication", "resume", "ldn-3").stderr == ""


def test_an_instance_may_only_send_here(client: FakeClient) -> None:
    assert run(client, "replication", "add-peer", "source", "--accept").exit_code == 0
    assert arguments_of(client, "add_peer") == {"name": "source", "address": "", "accept": True}


def test_a_backup_tells_its_name_and_how_far_it_reaches(client: FakeClient) -> None:
    assert rows(run(client, "backup", "2030-01-31")) == [{"name": "2030-01-31", "sequence": 17, "bytes": 4_096}]
    assert "4.0 KiB" in run(client, "backup", "2030-01-31", "--format", "table").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("replication", "verify"),
        ("replication", "verify", "ldn-1", "--keys", "-1"),
        ("replication", "verify", "ldn-1", "orders"),
        ("replication", "repair"),
        ("replication", "add-peer"),
        ("replication", "add-peer", "ldn-1", "ldn:7450", "--mode", "half"),
        ("replication", "remove-peer"),
        ("replication", "pause"),
        ("replication", "resume"),
        ("backup",),
    ],
)
def test_wrong_usage_reaches_no_server(client: FakeClient, arguments: tuple[str, ...]) -> None:
    assert run(client, *arguments).exit_code == 2
    assert client.calls == []


def test_a_peer_that_is_not_configured_is_a_no(client: FakeClient) -> None:
    client.fails_with = NotFound("peer: no peer 'x' is configured", reason="PEER_NOT_FOUND")
    result = run(client, "replication", "verify", "x")
    assert result.exit_code == 1
    assert "PEER_NOT_FOUND" in result.stderr


def test_a_write_stored_here_alone_is_a_refusal_and_not_an_unreachable_server(client: FakeClient) -> None:
    """UNAVAILABLE would be exit code 3, which scripts take for a reason to try again."""
    client.add("orders")
    publish = ("publish", "orders", "--data", '{"id": 1}', "--durability", "replicated")
    assert run(client, *publish).exit_code == 0
    assert arguments_of(client, "publish")["durability"] == "replicated"
    client.fails_with = ReplicationUnavailable(
        "the write stands here", reason="REPLICATION_UNAVAILABLE", details={"applied": "1"}
    )
    result = run(client, *publish)
    assert result.exit_code == 1
    assert "REPLICATION_UNAVAILABLE: the write stands here" in result.stderr
