"""`sow history`, `changes`, `doctor`, `touch`, `topic` against a real server, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from sow_cli.command import sow
from sow_client import Client
from tests.support.servers.server import DYNAMIC, ServerProcess

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("verbs"), DYNAMIC) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def run(server: ServerProcess) -> Run:
    def call(*arguments: str, stdin: bytes = b"") -> Result:
        return CliRunner().invoke(sow, ["--server", server.address, *arguments], input=stdin)

    return call


def rows(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


# ---- expiration ----


def test_the_two_ways_to_make_a_topic_agree_on_expiration(run: Run) -> None:
    """K1, L1."""
    run("topic", "create", "made")
    run("publish", "first", "--key", "a", "--data", "{}")
    found = {row["name"]: row["expiration"] for row in rows(run("topic", "list"))}
    assert (found["made"], found["first"]) == ("enabled", "enabled")


def test_a_refused_publish_leaves_no_topic_behind(run: Run) -> None:
    """K1."""
    assert run("publish", "nope", "--data", '{"id":1}').exit_code == 1
    assert run("publish", "nope", stdin=b'{"id":1}\n').exit_code == 1
    assert "nope" not in {row["name"] for row in rows(run("topics"))}


# ---- topics ----


def test_creating_a_topic_twice_can_be_asked_for(run: Run) -> None:
    first = ("topic", "create", "twice", "--key", "/id", "--if-not-exists")
    assert rows(run(*first))[0]["key"] == ["/id"]
    again = run(*first)
    assert "exists already, and stays as it is\n" in again.stderr
    assert rows(again)[0]["key"] == ["/id"]
    other = run("topic", "create", "twice", "--key", "/number", "--max-ttl", "1h", "--if-not-exists")
    assert rows(other)[0]["key"] == ["/id"]
    assert "other settings than these: max_ttl = -, not 1h; key = /id, not /number" in other.stderr
    assert run("topic", "create", "twice").exit_code == 1


# ---- touch ----


def test_a_touch_never_makes_a_record_permanent_by_the_way(run: Run) -> None:
    """`sow touch sessions alice` took the lifetime away where the topic had none to give."""
    run("topic", "create", "plain")
    run("topic", "create", "bounded", "--default-ttl", "1h")
    for topic in ("plain", "bounded"):
        run("publish", topic, "--key", "a", "--data", "{}", "--ttl", "5m")
    refused = run("touch", "plain", "a")
    assert refused.exit_code == 2
    assert "give --ttl DURATION" in refused.stderr
    assert "sow persist plain KEY" in refused.stderr
    told = run("touch", "bounded", "a", "--format", "table")
    assert "(in 59m59s)" in told.stdout or "(in 1h00m)" in told.stdout
    assert "expires   never" in run("persist", "plain", "a", "--format", "table").stdout


# ---- history ----


def test_the_story_of_a_key_from_its_first_publish_to_its_end(
    run: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_topic("stories", key=["/id"])
    client.publish("stories", {"id": "it's", "px": 9.5}, ttl="1h")
    client.publish("stories", {"id": "another", "px": 1})
    client.delta_publish("stories", {"id": "it's", "px": 9.7, "note": "hi"}, ttl="1h")
    client.touch("stories", "it's", ttl="2h")
    client.sow_delete("stories", keys=["it's"])
    client.publish("stories", {"id": "it's", "px": 1}, ttl="0s")

    story = rows(run("history", "stories", "it's"))

    assert [(one["op"], one.get("reason"), one.get("changed")) for one in story] == [
        ("put", None, None),
        ("put", None, ["px", "note"]),
        ("put", "touched", None),
        ("delete", None, None),
        ("put", None, None),
        ("expire", None, None),
    ]
    assert [one["payload"] for one in story][1] == {"id": "it's", "px": 9.7, "note": "hi"}
    times = [int(str(one["time_micros"])) // 1000 for one in story]
    assert times == sorted(times), "also those of commits"
    assert {one["instance"] for one in story} == {one["origin"] for one in story}
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("history", "stories", "it's", "--format", "table")
    assert "px 9.5 → 9.7, note - → hi" in shown.stdout
    assert shown.stderr.startswith("the journal has all changes since the topic was made 20")
    assert "now: there is no record" in shown.stderr
    last = run("history", "stories", "it's", "--last", "1")
    assert [one["op"] for one in rows(last)] == ["expire"]
    assert "the last 1 change, and there are more" in last.stderr
    second, *_ = rows(run("history", "stories", "it's", "--last", "5"))
    assert second["changed"] == ["px", "note"], "compared with the change before it"
    assert rows(run("history", "stories", "nobody")) == []


# ---- pages ----


def test_pages_with_an_order_go_on_behind_the_last_record(run: Run, client: Client) -> None:
    """Also if that record has got other values, or has gone, before the next page."""
    client.create_topic("board", key=["/id"])
    client.publish_many("board", [{"id": str(n), "px": n // 2} for n in range(9)])
    asked = ("query", "board", "--order-by", "/px DESC", "--page", "4", "--keys-only")

    first = run(*asked)
    assert [row["key"] for row in rows(first)] == ["8", "6", "7", "4"]
    after = first.stderr.split()[-1]
    client.sow_delete("board", keys=["4"])
    client.publish("board", {"id": "8", "px": 0})  # it moves behind the place
    second = run(*asked, "--after", after)
    assert [row["key"] for row in rows(second)] == ["5", "2", "3", "0"]
    last = run(*asked, "--after", second.stderr.split()[-1])
    assert [row["key"] for row in rows(last)] == ["1", "8"]
    assert last.stderr == ""
    wrong = run("query", "board", "--order-by", "/px", "--page", "4", "--after", after)
    assert wrong.exit_code == 1
    assert "PAGE_TOKEN_INVALID" in wrong.stderr


# ---- changes ----


def test_the_changes_up_to_now_and_then_the_end(run: Run, client: Client) -> None:
    client.create_topic("moves", key=["/id"])
    client.publish("moves", {"id": "1", "px": 9})
    client.publish("moves", {"id": "2", "px": 1})
    client.sow_delete("moves", keys=["1"])

    everything = run("changes", "moves")
    told = rows(everything)

    assert [(one["op"], one["key"]) for one in told] == [("put", "1"), ("put", "2"), ("delete", "1")]
    assert "delivery_count" not in told[0]
    assert [one["op"] for one in rows(run("changes", "moves", "--key", "1"))] == ["put", "delete"]
    assert [one["key"] for one in rows(run("changes", "moves", "/px < 5"))] == ["2"]
    end = everything.stderr.split()[-1]
    assert rows(again := run("changes", "moves", "--from", end)) == []
    assert again.stderr == f"up to {end}\n"
    client.publish("moves", {"id": "3"})
    assert [one["key"] for one in rows(run("changes", "moves", "--from", end))] == ["3"]
    assert rows(run("changes", "moves", "--to", end)) == told
    assert "px" in run("changes", "moves", "--format", "table").stdout
    assert run("changes", "nowhere").exit_code == 1


# ---- doctor ----


def test_a_healthy_server_gets_a_clean_bill(run: Run) -> None:
    found = {row["check"]: row["level"] for row in rows(run("doctor"))}
    assert {"connection", "tls", "speed", "versions", "identity", "server", "clock", "expiry", "disk"} <= found.keys()
    assert set(found.values()) == {"ok"}


def test_a_mistake_of_settings_is_a_warning_with_the_command_that_mends_it(run: Run) -> None:
    run("topic", "create", "off", "--expiration", "disabled")
    try:
        (found,) = [row for row in rows(run("doctor")) if row["level"] != "ok"]
        assert found["advice"] == "sow topic alter off --expiration enabled"
    finally:
        run("topic", "delete", "off", "--force")


def test_a_server_that_is_not_there_is_a_fault_in_plain_words() -> None:
    result = CliRunner().invoke(sow, ["--server", "127.0.0.1:1,127.0.0.1:2", "doctor"])
    assert result.exit_code == 3
    first, second, *_ = [json.loads(line) for line in result.stdout.splitlines()]
    assert (first["level"], second["level"]) == ("fault", "fault")
    assert "refused" in first["found"]
    assert "ipv4:" not in first["found"]
