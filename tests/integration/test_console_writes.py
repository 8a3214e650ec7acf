"""What people change from the console: each write as it was seen, with what follows told before."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Iterator, Mapping

import httpx
import pytest

from sow_client import EARLIEST, Client
from tests.integration.test_console import BIG, csrf_of, parsed
from tests.support.servers.console import RunningConsole, running_console
from tests.support.servers.server import ServerProcess, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("writes")) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        yield made


@pytest.fixture(scope="module")
def person(server: ServerProcess) -> Iterator[Person]:
    with running_console(server.address, "--allow-writes") as console:
        yield Person(console, server)


class Person:
    """Somebody at the console."""

    def __init__(self, console: RunningConsole, server: ServerProcess) -> None:
        self._browser = console.opened()
        self._own = {"Origin": console.address}
        self._server = server.address

    def twin(self, page: str, **about: str) -> Mapping[str, object]:
        """The JSON of a page."""
        answer = self._browser.get(f"/{self._server}/{page}.json", params=about)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]  # JSON

    def page(self, page: str, **about: str) -> httpx.Response:
        return self._browser.get(f"/{self._server}/{page}", params=about, follow_redirects=True)

    def asked(self, name: str, **about: str) -> str:
        """The page that asks, without its markup."""
        answer = self.page(f"write/{name}", **about)
        assert answer.status_code == 200, answer.text
        for command in re.findall("<code>(.*?)</code>", answer.text):
            parsed(shlex.split(html.unescape(command)))
        return html.unescape(answer.text)

    def looked(self, name: str, **given: str) -> str:
        """The page that asks, for a form too long for an address."""
        form = given | {"look": "1", "csrf": csrf_of(self.page("overview").text)}
        answer = self._browser.post(f"/{self._server}/write/{name}", data=form, headers=self._own)
        assert answer.headers["content-security-policy"]
        return html.unescape(answer.text)

    def sure(self, asked: str, name: str, **about: str) -> str:
        """The answer to the page, with all that is in its form."""
        rest = asked.split('<form method="post" action="')[1]
        form = dict(re.findall('type="hidden" name="(.*?)" value="(.*?)"', rest))
        action = rest.split('"')[0]
        assert action.partition("?")[0] == f"/{self._server}/write/{name}"
        answer = self._browser.post(action, data=form | about | {"csrf": csrf_of(asked)}, headers=self._own)
        return html.unescape(answer.text)


def letter_of(client: Client, topic: str) -> dict[str, str]:
    """What the page of dead letters links to, once the letter is there."""
    until(lambda: client.count(topic), 30, "the letter")
    record = next(iter(client.query(topic)))
    return {"topic": topic, "key": record.key, "version": str(record.version)}


def test_a_dead_letter_is_published_again_as_it_was_and_is_gone(client: Client, person: Person) -> None:
    client.create_topic("offers.dead")
    client.create_topic("offers", key=["/id"], expiration="enabled", dead_letter="offers.dead")
    client.publish("offers", b'{"id":1,"n":%d,"price":9.50}' % BIG, ttl="1ms")
    about = letter_of(client, "offers.dead") | {"target": "offers"}
    shown = person.twin("dead-letters", topic="offers.dead")
    assert shown["boxes"] == [{"topic": "offers.dead", "sources": ["offers"], "letters": 1}]
    letter = shown["letters"][0]  # type: ignore[index]  # JSON
    assert (letter["topic"], letter["record_key"], letter["reason"]) == ("offers", "1", "expired")
    assert '"price": 9.50' in letter["payload"]

    asked = person.asked("republish", **about)
    assert "never expires" in asked
    asked = person.asked("republish", **about, ttl="9m")
    assert "--if-absent" in asked
    assert "the letter is deleted" in person.sure(asked, "republish")
    record = client.get("offers", 1)
    assert record is not None
    assert record.payload == b'{"id":1,"n":%d,"price":9.50}' % BIG
    assert record.expire_time is not None
    assert client.count("offers.dead") == 0
    assert "NOT_FOUND" in person.sure(asked, "republish"), "it is gone, so it is not published twice"


def test_a_newer_record_is_not_replaced_by_a_letter_unless_it_was_seen(client: Client, person: Person) -> None:
    client.create_topic("bids.dead")
    client.create_topic("bids", key=["/id"], expiration="enabled", dead_letter="bids.dead")
    client.publish("bids", {"id": 1, "price": 1}, ttl="1ms")
    about = letter_of(client, "bids.dead") | {"target": "bids"}
    asked = person.asked("republish", **about)
    newer = client.publish("bids", {"id": 1, "price": 2})
    assert "CONDITION_FAILED" in person.sure(asked, "republish")
    assert client.get("bids", 1).data["price"] == 2  # type: ignore[union-attr]  # it is there
    again = person.asked("republish", **about)
    assert f"version {newer.version}: it is replaced" in again
    person.sure(again, "republish")
    assert client.get("bids", 1).data["price"] == 1  # type: ignore[union-attr]  # it is there


def test_a_change_that_was_set_aside_says_by_which_durable(client: Client, person: Person) -> None:
    client.create_topic("pays.dead")
    client.create_topic("pays", key=["/id"], dead_letter="pays.dead")
    client.publish_many("pays", [{"id": 1}, {"id": 2}])
    for key in ("1", "2"):  # the first consumer ends without an acknowledgement
        with client.durable("pays", "booking", start=EARLIEST, delivery_limit=1) as durable:
            assert next(iter(durable)).key == key
    letter_of(client, "pays.dead")
    letter = person.twin("dead-letters", topic="pays.dead")["letters"][0]  # type: ignore[index]  # JSON
    assert (letter["reason"], letter["durable"]) == ("delivery_limit", "booking")
    assert "set aside by booking" in person.page("dead-letters", topic="pays.dead").text


def test_a_record_that_has_changed_since_it_was_seen_is_not_deleted(client: Client, person: Person) -> None:
    client.create_topic("orders", key=["/id"])
    seen = client.publish("orders", {"id": 1})
    asked = person.asked("delete", topic="orders", key="1", version=str(seen.version))
    client.publish("orders", {"id": 1, "newer": True})
    assert "Nothing was deleted" in person.sure(asked, "delete")
    assert client.count("orders") == 1
    assert "has changed" in person.asked("delete", topic="orders", key="1", version=str(seen.version))


def test_the_story_of_a_key_leads_to_its_dead_letter(client: Client, person: Person) -> None:
    client.create_topic("bets.dead")
    client.create_topic("bets", key=["/id"], expiration="enabled", dead_letter="bets.dead")
    client.publish("bets", {"id": "a|b"}, ttl="1ms")
    letter = letter_of(client, "bets.dead")
    page = person.page("key", topic="bets", key=r"a\|b").text
    assert html.unescape(page).count(letter["key"]) == 1
    assert "dead letter in" in page


def test_what_falls_due_is_counted_for_a_filter_and_the_next_are_listed(client: Client, person: Person) -> None:
    client.create_topic("trips", key=["/id"], expiration="enabled")
    client.publish_many("trips", [{"id": number, "n": number} for number in range(6)], ttl="5m")
    client.publish("trips", {"id": 9, "n": 9}, ttl="1m")
    client.publish("trips", {"id": 10, "n": 10})
    twin = person.twin("due", topic="trips", filter="/n > 3", within="10m")
    assert twin["total"] == 3, "two of the six, and the one of a minute"
    assert [one["key"] for one in twin["upcoming"]] == ["9", "4", "5"]  # type: ignore[attr-defined]  # JSON
    assert person.twin("due", topic="trips", within="10m")["total"] == 7


# ---- settings ----


@pytest.fixture(scope="module")
def cars(client: Client) -> str:
    client.create_topic("cars", key=["/id"], expiration="enabled")
    for number, ttl in enumerate(("1h", "1h", "1d", None)):
        client.publish("cars", {"id": number, "n": number}, ttl=ttl)
    with client.durable("cars", "billing", start=EARLIEST) as durable:
        next(iter(durable))
    return "cars"


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("max_ttl", "2h", "1 of them have more left than new ones will get, and 1 never expire."),
        ("min_ttl", "2h", "2 of them have less left than new ones will get."),
        ("expiration", "20m", "1 of them never expire; new records without a lifetime live for 20m."),
        ("expiration", "disabled", "3 records that have a lifetime do not expire any more."),
        ("max_entries", "1", "3 of them are discarded with the next pruning, acknowledged or not."),
        ("max_entries", "1", "Durables with a backlog may get a gap: billing."),
        ("backlog_quota_entries", "2", "Beyond it now: billing. So publishes wait at once (hold)."),
        ("backlog_quota_entries", "9", "None of the 1 durables is beyond it now."),
        ("durable_idle_ttl", "5d", "None is idle for so long."),
        ("index", "/n", "/n: built in the background from 4 records."),
        ("dead_letter", "cars.dead", "cars.dead does not exist"),
        ("journal", "no", "Subscriptions cannot resume"),
        ("retain_time", "none", "A policy or the server's default applies then."),
        ("idle_ttl", "7d", "The topic is deleted with its records and journal once the condition holds."),
    ],
)
def test_what_follows_from_a_setting_is_told_before(
    cars: str, person: Person, setting: str, value: str, told: str
) -> None:
    asked = person.asked("alter", topic=cars, setting=setting, value=value)
    assert told in asked
    assert 'action="/' in asked.split('<form method="post"')[1]


@pytest.mark.filterwarnings("ignore::sow_client.LifetimeIgnoredWarning")
def test_records_that_are_overdue_are_counted_before_expiration_is_turned_on(client: Client, person: Person) -> None:
    client.create_topic("parked", key=["/id"], expiration="disabled")
    client.publish("parked", {"id": 1}, ttl="1ms")
    client.publish("parked", {"id": 2}, ttl="1d")
    about = {"topic": "parked", "setting": "expiration", "value": "enabled"}
    told = "1 records whose lifetime is over expire at once."
    until(lambda: told in person.asked("alter", **about), 30, "the record to be overdue")
    assert "It is enabled now, from: topic." in person.sure(person.asked("alter", **about), "alter")
    until(lambda: client.count("parked") == 1, 30, "the expiry")


def test_a_setting_is_asked_for_before_it_is_changed(cars: str, client: Client, person: Person) -> None:
    bare = person.asked("alter", topic=cars, setting="max_ttl")
    assert "It is none now, from: default." in bare
    assert "a duration such as 20m" in bare
    assert '<form method="post"' not in bare
    wrong = person.page("write/alter", topic=cars, setting="max_ttl", value="soon")
    assert (wrong.status_code, "soon" in wrong.text) == (400, True)
    done = person.sure(person.asked("alter", topic=cars, setting="max_ttl", value="2d"), "alter")
    assert "It is 2d now, from: topic." in done
    assert client.describe_topic(cars).settings.max_ttl == "2d"
    person.sure(person.asked("alter", topic=cars, setting="max_ttl", value="none"), "alter")
    assert client.describe_topic(cars).settings.max_ttl is None


def test_a_view_is_shown_with_its_definition_and_refuses_writes_with_the_reason(client: Client, person: Person) -> None:
    client.create_topic("desk", key=["/id"])
    client.publish("desk", {"id": 1, "account": "A1", "qty": 5})
    client.create_view("desk.sums", source="desk", where="/qty > 0", group_by="/account", select="SUM(/qty) AS qty")
    until(lambda: client.describe_topic("desk.sums").view_status.complete, 10, "the view")  # type: ignore[union-attr]  # it is a view
    page = html.unescape(person.page("topic", topic="desk.sums").text)
    for shown in ("SUM(/qty) AS qty", "/qty > 0", "/account", "complete", "nothing is written to it"):
        assert shown in page
    described = person.twin("topic", topic="desk.sums")["described"]
    assert isinstance(described, dict)
    assert described["view"]["source"] == "desk"
    assert "nothing is written to it" not in person.page("topic", topic="desk").text
    refused = person.sure(person.asked("touch", topic="desk.sums", key="A1", ttl="1h"), "touch")
    assert "VIEW_READ_ONLY" in refused
    assert "its records follow from its source" in refused


# ---- records and topics ----


def test_a_record_is_edited_at_the_version_that_was_seen_and_keeps_its_numbers_and_its_lifetime(
    client: Client, person: Person
) -> None:
    client.create_topic("deals", key=["/id"])
    before = b'{"id": 1, "n": %d, "price": 9.50, "who": "O\'Brien"}' % BIG
    seen = client.publish("deals", before, ttl="2h")
    about = {"topic": "deals", "key": "1", "version": str(seen.version)}
    assert before.decode() in person.asked("edit", **about), "the form begins with the payload as it was published"
    after = before.decode().replace("9.50", "10.50")
    asked = person.looked("edit", **about, payload=after)
    assert "/price 9.50 → 10.50" in asked
    assert "It expires in" in asked
    assert f"""--data '{{"id": 1, "n": {BIG}, "price": 10.50, "who": "O'\\''Brien"}}' --if-version""" in asked
    assert client.get("deals", 1).payload == before, "it has only asked"  # type: ignore[union-attr]  # it is there
    assert "is replaced, as version" in person.sure(asked, "edit", payload=after)
    record = client.get("deals", 1)
    assert record is not None
    assert (record.payload, record.expire_time) == (after.encode(), seen.expire_time)
    assert "has changed since you saw it" in person.sure(asked, "edit", payload=before.decode())
    assert client.get("deals", 1) == record, "somebody else's version stays"
    other = person.looked("edit", **about | {"version": str(record.version)}, payload=after.replace("1,", "2,", 1))
    assert "/id: a key field differs" in other


def test_a_record_is_added_only_where_there_is_none_and_a_wrong_text_is_not_lost(
    client: Client, person: Person
) -> None:
    client.create_topic("notes")
    about = {"topic": "notes", "key": "a b", "ttl": "never"}
    wrong = person.looked("add", **about, payload='{"text": 1.10')
    assert "is no JSON" in wrong
    assert '{"text": 1.10</textarea>' in wrong
    right = '{"text":\r\n1.10}'
    asked = person.looked("add", **about, payload=right)
    assert "--key 'a b' --if-absent --ttl never" in asked
    assert "The record a b is added" in person.sure(asked, "add", payload=right)
    assert client.get("notes", "a b").payload == b'{"text":\n1.10}'  # type: ignore[union-attr]  # it is there
    again = person.sure(asked, "add", payload="{}")
    assert "CONDITION_FAILED" in again
    assert client.count("notes") == 1


def test_a_topic_is_created_as_was_told_and_an_existing_one_stays(client: Client, person: Person) -> None:
    assert "Give the name" in person.asked("create")
    about = {"topic": "sites", "key": "/id /line", "message_type": "fix", "expiration": "20m"}
    asked = person.asked("create", **about)
    assert "topic create sites --key /id --key /line --message-type fix --expiration 20m" in asked
    assert "INVALID_ARGUMENT" in person.sure(asked, "create"), "fix has tags as key fields, says the server"
    asked = person.asked("create", **about | {"message_type": "msgpack"})
    assert "The topic sites is there." in person.sure(asked, "create")
    settings = client.describe_topic("sites").settings
    assert (settings.key, settings.message_type, settings.expiration) == (("/id", "/line"), "msgpack", "20m")
    assert "TOPIC_EXISTS" in html.unescape(person.page("write/create", **about).text)
    assert "TOPIC_EXISTS" in person.sure(asked, "create")
    payload = '{"id": 1, "line": 2, "n": 3}'
    person.sure(person.looked("add", topic="sites", payload=payload), "add", payload=payload)
    assert client.get("sites", (1, 2)).data == {"id": 1, "line": 2, "n": 3}  # type: ignore[union-attr]  # it is there
