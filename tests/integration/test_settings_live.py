"""Settings take effect on a running server: deadlines of topics and durables, dead letters, ordered queries that wait
for memory, and the commands that set and show all of it (rules T1 to T4, J6 to J10, J13, Q2)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from sow_cli.command import sow
from sow_client import Client, SowError
from tests.support.servers.server import ServerProcess, until

SECONDS = 30.0
"""For events that come within moments on a machine that has time."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = "[server]\ndynamic_topics = true\n[limits]\nsort_bytes_max = '1MiB'\n"
    with ServerProcess(tmp_path_factory.mktemp("live"), config) as made:
        yield made
        assert not made.faults()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


def there(client: Client, topic: str) -> bool:
    return any(found.name == topic for found in client.topics())


@pytest.mark.parametrize("by", ["alter", "policy"])
def test_an_unused_topic_is_deleted(client: Client, by: str) -> None:
    """T1, T4, RabbitMQ 12: `idle_ttl` on a topic that is there."""
    client.create_topic(f"idle-{by}")
    if by == "alter":
        client.alter_topic(f"idle-{by}", idle_ttl="200ms")
    else:
        client.set_policy("idle", f"idle-{by}", topics={"idle_ttl": "200ms"})
    until(lambda: not there(client, f"idle-{by}"), SECONDS, "the topic to go")
    if by == "policy":
        client.delete_policy("idle")


def test_a_topic_goes_with_its_last_subscriber(client: Client) -> None:
    """T1, RabbitMQ 13."""
    client.create_topic("left", auto_delete=True)
    with client.subscribe("left"):
        assert there(client, "left")
    until(lambda: not there(client, "left"), SECONDS, "the topic to go")


def left(client: Client) -> int:
    figures = client.describe_durable("backlog", "d").figures
    assert figures is not None
    return figures.unacknowledged_entries


def effective(client: Client, topic: str, name: str) -> tuple[str, str]:
    """The value of a setting, and where it comes from."""
    (found,) = [setting for setting in client.describe_topic(topic).effective if setting.name == name]
    return found.value, found.origin


def test_a_backlog_that_is_too_old_counts_as_acknowledged(client: Client) -> None:
    """J8, Pulsar 8."""
    client.create_topic("backlog", retain_time="1h")
    with client.durable("backlog", "d"):
        pass
    client.publish("backlog", {"id": 1}, key="k")
    assert left(client) == 1
    client.alter_topic("backlog", backlog_ttl="100ms")
    until(lambda: left(client) == 0, SECONDS, "its acknowledgement")
    client.alter_topic("backlog", backlog_ttl=None, durable_idle_ttl="100ms")
    until(lambda: not client.durables("backlog"), SECONDS, "the idle durable to go")


def test_an_expired_record_becomes_a_dead_letter(client: Client) -> None:
    """T3, RabbitMQ 9."""
    client.create_topic("dead")
    client.create_topic("letters", expiration="enabled", dead_letter="dead")
    client.publish("letters", {"id": 1}, key="k", ttl="100ms")
    until(lambda: client.count("dead") == 1, SECONDS, "the letter")
    (letter,) = client.query("dead")
    assert letter.key.startswith("letters|k|")
    assert client.get("letters", "k") is None


def test_ordered_queries_wait_for_memory_instead_of_being_refused(server: ServerProcess, client: Client) -> None:
    """Q2. Story: of 64 at once that each fitted alone all but one were RESULT_TOO_LARGE. Here each takes about half of
    the memory. One that is too large alone is refused as before."""
    client.publish_many("sorted", [{"px": -n} for n in range(1000)], keys=[f"{n:04d}" for n in range(1000)])
    wanted = [f"{n:04d}" for n in range(999, -1, -1)]
    answers: list[list[str] | str] = []

    def ask() -> None:
        with server.client() as own:
            try:
                answers.append([record.key for record in own.query("sorted", order_by="/px")])
            except SowError as error:
                answers.append(error.reason)

    asking = [threading.Thread(target=ask) for _ in range(16)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(SECONDS * 2)
    assert answers == [wanted] * 16
    documents = [{"px": n, "pad": "x" * 1000} for n in range(1500)]
    client.publish_many("too-large", documents, keys=[f"{n:04d}" for n in range(1500)])
    with pytest.raises(SowError) as refused:
        list(client.query("too-large", order_by="/px"))
    assert refused.value.reason == "RESULT_TOO_LARGE"


def run(server: ServerProcess, *arguments: str, given: str | None = None, code: int = 0) -> list[dict[str, object]]:
    """The output of a command against this server, row by row."""
    done = CliRunner().invoke(sow, ["--server", server.address, *arguments], input=given)
    assert done.exit_code == code, (arguments, done.output)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_commands_of_retention_and_quotas_against_a_server(server: ServerProcess, client: Client) -> None:
    """Pulsar 3, Pulsar 5: set, get and remove, of a topic and of a pattern; and it is in force."""
    client.create_topic("kept")
    run(server, "retention", "set", "kept", "--time", "1h", "--bytes", "1GiB")
    assert effective(client, "kept", "retain_time") == ("1h", "topic")
    assert "1h" in str(run(server, "retention", "get", "kept"))
    run(server, "retention", "remove", "kept")
    run(server, "retention", "set", "--pattern", "kept.*", "--time", "2h", "--bytes", "1GiB")
    assert effective(client, "kept", "retain_time")[0] == "2h"
    assert "2h" in str(run(server, "retention", "get", "--pattern", "kept.*"))

    run(server, "quota", "set", "kept", "--bytes", "1MiB", "--action", "reject")
    assert effective(client, "kept", "backlog_quota_bytes") == ("1MiB", "topic")
    assert "1MiB" in str(run(server, "quota", "get", "kept"))
    run(server, "quota", "remove", "kept")
    run(server, "quota", "set", "--pattern", "kept.*", "--age", "1h")
    assert effective(client, "kept", "backlog_quota_age")[0] == "1h"
    for command in ("quota", "retention"):
        run(server, command, "remove", "--pattern", "kept.*")
    assert effective(client, "kept", "retain_time") == ("10m", "default")


def test_the_commands_of_durables_and_policies_against_a_server(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pulsar 7, J6, J13, T2: a backlog is cleared when that is confirmed or forced, and not before."""
    run(server, "policy", "set", "short", "consumed", "--max-ttl", "1h", "--priority", "3")
    (policy,) = run(server, "policy", "get", "short")
    assert (policy["pattern"], policy["priority"]) == ("consumed", 3)
    assert [row["name"] for row in run(server, "policy", "list")] == ["short"]

    client.create_topic("consumed", expiration="enabled", retain_time="1h")
    assert effective(client, "consumed", "max_ttl") == ("1h", "policy short")
    with client.durable("consumed", "billing"):
        pass
    client.publish("consumed", {"id": 1}, key="k")

    def unacknowledged() -> object:
        (row,) = run(server, "durable", "describe", "consumed", "billing")
        return row["unacknowledged_entries"]

    assert [row["name"] for row in run(server, "durable", "list", "consumed")] == ["billing"]
    assert [row["key"] for row in run(server, "durable", "browse", "consumed", "billing")] == ["k"]
    run(server, "durable", "clear-backlog", "consumed", "billing", code=2)
    monkeypatch.setattr("sow_cli.topics._can_ask", lambda: True)
    run(server, "durable", "clear-backlog", "consumed", "billing", given="n\n", code=1)
    assert unacknowledged() == 1
    run(server, "durable", "clear-backlog", "consumed", "billing", given="y\n")
    assert unacknowledged() == 0
    run(server, "durable", "rewind", "consumed", "billing", "earliest")
    assert unacknowledged() == 1
    run(server, "durable", "clear-backlog", "consumed", "billing", "--force")
    assert unacknowledged() == 0
    run(server, "durable", "delete", "consumed", "billing", "--force")
    assert run(server, "durable", "list", "consumed") == []
    run(server, "policy", "delete", "short")
    assert run(server, "policy", "list") == []
