"""The next step after a mistake: a mistyped topic, a part of a key, a wrong option, a column without a name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result

from sow_cli.command import sow
from sow_cli.session import NEAR_NAMES_MAX, near_names
from sow_client import AsyncClient, Client, InvalidArgument, NotFound, PublishFailed, SowError
from sow_server.access.caller import RESEMBLING_MAX, resembling
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.server import ServerProcess

ROOT = Path(__file__).parents[2]
CONFIG = """
[server]
dynamic_topics = true
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.flights]
key = ["/carrier", "/number"]
expiration = "enabled"
"""
MEANT = "there is no topic 'ordres'; did you mean 'orders'?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("hints"), CONFIG) as server:
        with server.client() as client:
            client.publish("flights", {"carrier": "LH", "number": 400})
        yield server


def run(server: ServerProcess, *words: str, text: str = "") -> Result:
    return CliRunner().invoke(sow, ["--server", server.address, *words], input=text)


def told(call: Callable[[], object]) -> SowError:
    with pytest.raises(SowError) as caught:
        call()
    return caught.value


# ---- topics ----


@pytest.mark.parametrize(
    "words",
    [
        ["publish", "ordres", "--data", '{"id":1}'],
        ["publish", "ordres", "--data", '{"id":1}', "--delta"],
        ["publish", "ordres"],
        ["lease", "ordres", "--", "true"],
        ["query", "ordres"],
        ["load", "ordres"],
        ["topic", "describe", "ordres"],
    ],
    ids=" ".join,
)
def test_every_command_tells_which_topic_may_be_meant(server: ServerProcess, words: list[str]) -> None:
    """Story: a publish without a key told that the topic, which was not there, has no key fields."""
    result = run(server, *words, text='{"id":1}\n')
    assert (result.exit_code, MEANT in result.stderr) == (1, True), result.stderr
    assert "has no key fields" not in result.stderr
    with server.client() as client:
        assert "ordres" not in [topic.name for topic in client.topics()]


def test_a_lease_tells_that_it_has_created_its_topic(server: ServerProcess) -> None:
    """Holders that name the topic in two ways would both hold it."""
    first = run(server, "lease", "loks", "--key", "nightly", "--", "true")
    assert (first.exit_code, "there was no topic loks" in first.stderr) == (0, True)
    assert "there was no topic" not in run(server, "lease", "loks", "--key", "nightly", "--", "true").stderr
    with server.client() as client:
        client.delete_topic("loks")


def test_every_publish_of_the_clients_tells_which_topic_may_be_meant(server: ServerProcess) -> None:
    document = {"id": 1}
    with server.client() as client:
        calls: list[Callable[[], object]] = [
            lambda: client.publish("ordres", document),
            lambda: client.delta_publish("ordres", document),
            lambda: client.publish_many("ordres", [document]),
            lambda: list(client.query("ordres")),
        ]
        for call in calls:
            error = told(call)
            assert isinstance(error, NotFound), error
            assert (error.reason, error.details["topic"]) == ("TOPIC_NOT_FOUND", "ordres")
            assert MEANT in error.message
        streams: list[Callable[[], object]] = [
            lambda: client.publish_frame("ordres", pd.DataFrame([document])),
            lambda: _publish_buffered(client),
        ]
        for call in streams:
            failed = told(call)
            assert isinstance(failed, PublishFailed), failed
            assert [(one.index, one.reason) for one in failed.refusals] == [(0, "TOPIC_NOT_FOUND")]
            assert MEANT in failed.refusals[0].message

    async def publish() -> None:
        async with AsyncClient(server.address) as client:
            for call in (client.publish, client.delta_publish):
                with pytest.raises(NotFound, match="did you mean 'orders'"):
                    await call("ordres", document)

    asyncio.run(publish())


def _publish_buffered(client: Client) -> None:
    with client.publisher("ordres") as publisher:
        publisher.publish({"id": 1})


def test_without_a_topic_of_such_a_name_the_way_to_create_it_is_told(server: ServerProcess) -> None:
    with server.client() as client:
        error = told(lambda: client.publish("zebras", {"id": 1}))
        assert "there is no topic 'zebras' (a publish without keys creates none" in error.message
        assert "did you mean" not in error.message
        assert client.publish("zebras", {"id": 1}, key="1").key == "1", "with a key it is created, as before"
        client.delete_topic("zebras")


def test_only_topics_that_the_caller_may_see_are_told(tmp_path: Path) -> None:
    """A guess that is nearly right must not tell the name of a hidden topic."""
    write_access(tmp_path, identity("desk", "desk") + grant("desk", "orders", "read publish"))
    config = GUARDED + "[topics.orders]\nkey = ['/id']\n[topics.ordres1]\nkey = ['/id']\n"
    with ServerProcess(tmp_path, config) as server, client_of(server, "desk") as client:
        assert told(lambda: list(client.query("ordres"))).message == f"topic: {MEANT}"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ordres", ["orders"]),
        ("oders", ["orders"]),
        ("Orders", ["orders"]),
        ("orders2", ["orders"]),
        ("fx_rates", ["fx-rates"]),
        ("orders", []),
        ("o", []),
        ("", []),
        ("nothing", []),
    ],
)
def test_names_resemble_each_other(name: str, meant: list[str]) -> None:
    assert resembling(name, ["orders", "fx-rates", "b", "o2"]) == meant


def test_among_very_many_names_nothing_is_guessed() -> None:
    names = [f"topic{number:05}" for number in range(RESEMBLING_MAX + 1)]
    assert resembling("topic0000x", names) == []
    assert resembling("topic0000x", names[:-1])
    endless = (f"topic{number:05}" for number in count())
    assert resembling("topic0000x", endless) == [], "and no more of them are looked at"


def test_the_command_guesses_among_names_of_about_the_length_and_not_among_very_many() -> None:
    """Story: a publish that made a topic beside 100,000 others took four seconds more."""
    names = [f"topic{number:05}" for number in range(NEAR_NAMES_MAX)]
    assert near_names("topic00007x", names)[0] == "topic00007"
    assert near_names("topic00007x", [*names, "topic"]), "it is too short to be meant"
    assert near_names("topic00007x", [*names, "one_more"]) == []
    assert near_names("oders", [*names, "orders"]) == ["orders"]
    assert near_names("abcdefgh", ["abcdexyz", "abcdefxx"]) == ["abcdefxx"]


# ---- spans ----


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (["2h", "5m"], "'5m' behind '2h'"),
        (["5m", "5m"], "'5m' behind '5m'"),
        (["0s"], "'0s' is no time from now"),
        (["20000d"], "'20000d' is longer than the longest lifetime"),
    ],
)
def test_spans_that_cannot_be_are_told_by_their_option(server: ServerProcess, spans: list[str], words: str) -> None:
    result = run(server, "due", *[word for span in spans for word in ("--within", span)])
    assert result.exit_code == 2
    assert "--within" in result.stderr
    assert words in result.stderr
    assert "edge" not in result.stderr
    with server.client() as client:
        error = told(lambda: client.expiry_horizon("orders", spans))
        assert (error.details["field"], words in error.message) == ("spans", True)
        assert "1001 ends are more than" in told(lambda: client.expiry_horizon("orders", range(1, 1_002))).message


# ---- keys ----


def test_delete_takes_its_keys_as_get_does(server: ServerProcess) -> None:
    with server.client() as client:
        client.publish_many("orders", [{"id": number} for number in range(4)])
        client.publish("flights", {"carrier": "AF", "number": 1})
        assert run(server, "delete", "orders", "0", "1").exit_code == 0
        assert run(server, "delete", "orders", "2", "--key", "3").exit_code == 0
        assert client.count("orders") == 0
        assert run(server, "delete", "flights", "AF", "1", "--parts").exit_code == 0
        assert client.get("flights", ("AF", 1)) is None


@pytest.mark.parametrize("text", ["/id > 1", "/id=1", "NOT /a", "(/a = 1)", "/a IS NULL", "@key = 'x'"])
def test_delete_takes_no_filter_for_a_key(server: ServerProcess, text: str) -> None:
    result = run(server, "delete", "orders", text)
    wrong = "is a filter: give it as --filter" in result.stderr
    assert (result.exit_code, wrong) == ((2, True) if text != "NOT /a" else (0, False))


def test_a_key_that_looks_like_a_path_is_a_key(server: ServerProcess) -> None:
    with server.client() as client:
        client.publish("orders", {"id": "/var/log"})
        assert run(server, "delete", "orders", "/var/log").exit_code == 0
        assert client.count("orders") == 0


@pytest.mark.parametrize(
    "words", [["get"], ["history"], ["delete"], ["touch", "--ttl", "1h"], ["persist"]], ids=lambda words: words[0]
)
def test_a_part_of_a_key_is_told_with_all_fields_and_the_way_to_give_them(
    server: ServerProcess, words: list[str]
) -> None:
    result = run(server, words[0], "flights", "LH", *words[1:])
    assert result.exit_code == 1
    assert "'LH' has 1 part, and a key here has 2, for /carrier, /number, joined by |" in result.stderr
    assert "--parts" in result.stderr
    assert run(server, words[0], "flights", "LH", "401", "--parts", *words[1:]).exit_code in (0, 1)


def test_too_many_parts_are_told(server: ServerProcess) -> None:
    result = run(server, "get", "orders", "1", "2", "--parts")
    assert "a key here has 1, for /id" in result.stderr
    assert "a key of this topic has the values of /id" in result.stderr


def test_a_list_in_place_of_a_key_hints_at_the_tuple(server: ServerProcess) -> None:
    given: Any = ["LH", 400]
    with server.client() as client:
        for field, call in (
            ("key", lambda: client.get("flights", given)),
            ("keys", lambda: client.get_many("flights", [given])),
            ("key", lambda: client.history("flights", given)),
            ("keys", lambda: client.sow_delete("flights", keys=[given])),
            ("key", lambda: client.publish("flights", {}, key=given)),
        ):
            error = told(call)
            assert isinstance(error, InvalidArgument)
            assert error.message.startswith(f"{field}: ['LH', 400] is a list; the key of several fields is a tuple")
        record = client.get("flights", ("LH", 400))
        assert record is not None


# ---- times ----


@pytest.mark.parametrize(
    ("moment", "wrong"),
    [
        (int(time.time()) + 3600, "a number counts microseconds since 1970, and {} seems to count seconds"),
        (int(time.time() * 1e3), "a number counts microseconds since 1970, and {} seems to count milliseconds"),
        (time.time(), "{} is a float, and no point in time"),
        ("tomorrow", "'tomorrow' is no time"),
    ],
    ids=["seconds", "milliseconds", "float", "text"],
)
def test_a_wrong_time_is_told_with_what_was_got_and_what_to_give(
    server: ServerProcess, moment: Any, wrong: str
) -> None:
    with server.client() as client:
        message = told(lambda: client.publish("orders", {"id": 1}, expire_at=moment)).message
    assert message.startswith(f"expire_at: {wrong.format(moment)}")
    assert message.endswith(
        "give a datetime with a time zone, or a text such as '2030-01-31T12:00:00Z'; "
        "a time from now is ttl, as in ttl='1h'"
    )


def test_the_lines_of_the_documentation_about_expire_at_run(server: ServerProcess) -> None:
    section = (ROOT / "docs" / "client.md").read_text().partition("\n## Lifetimes\n")[2]
    lines = [section.partition("```python\n")[2].partition("```")[0]]
    begin = (ROOT / "docs" / "client.md").read_text().partition("\n## ")[0]
    lines += [line.strip() for line in begin.splitlines() if "expire_at=" in line]
    assert all("expire_at=" in line for line in lines)
    assert len(lines) == 2
    with server.client() as client:
        for line in lines:
            exec(line, {"client": client})
        for topic, key in (("sessions", "carol"), ("orders", 1)):
            record = client.get(topic, key)
            assert record is not None
            assert record.expire_time == datetime(2030, 1, 31, 12, tzinfo=UTC)
            client.sow_delete(topic, keys=[key])


# ---- columns ----


def test_a_column_without_a_name_is_told_by_its_place(server: ServerProcess) -> None:
    result = run(server, "publish", "orders", "--as", "csv", text="id,,x\n1,2,3\n")
    assert "column 2 of 3 has no name" in result.stderr
    with server.client() as client:
        nameless = pd.DataFrame({"id": [1], None: [2]})
        assert "column 2 of 2 has no name" in told(lambda: client.publish_frame("orders", nameless)).message
        numbered = pd.DataFrame([[1, 2]])
        assert (
            "column 1 of 2 has the name 0, which is no text"
            in told(lambda: client.publish_frame("orders", numbered)).message
        )
        assert client.count("orders") == 0
