"""Calls: the topics that they get, writes within rows, and what belongs to whom (rules A3 to A5, A7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from sow_server.access.caller import Call
from sow_server.access.credentials import Anonymous
from sow_server.access.needs import Action
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Applied,
    Condition,
    ConditionKind,
    Delete,
    Lifetime,
    LifetimeKind,
    MessageType,
    Outcome,
    Publish,
    PublisherPosition,
    Refusal,
    TopicSettings,
    Touch,
)
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.services.ownership import OwnedDurables
from sow_server.services.records.writing import own_publisher, permit_delete, permit_load, permit_publish, permit_touch
from tests.support.oracles.access import grant, identity
from tests.support.oracles.access_parts import Guarded, access_of
from tests.support.stores.stores import BINARY, Rig

JSON = TopicSettings(message_type=MessageType.JSON, key=("/id",))
ROWS = "rows = \"/region = 'eu'\"\n"
FILE = (
    identity("desk", "desk")
    + grant("desk", "orders", "read publish delete consume", ROWS + "hide = ['/client/iban']")
    + grant("desk", "inbox", "publish load create")
    + grant("desk", "new.*", "publish create load")
    + grant("desk", "made.*", "publish create delete")
    + grant("desk", "narrow.*", "publish create load", ROWS)
    + grant("desk", "raw", "read publish", ROWS)
    + grant("desk", "raw-by-key", "read publish", "rows = \"@key LIKE '^eu'\"\n")
    + grant("desk", "keyed", "read publish", "hide = ['/id']")
    + "[roles.desk.limits]\npublishers = 2\ntopics = 2\ndurables = 1\n"
    + identity("other", "other")
    + grant("other", "orders", "read publish consume")
    + identity("admin", "admin")
    + grant("admin", "orders", "read consume publish operator")
)
EU = b'{"id": 1, "region": "eu"}'
US = b'{"id": 1, "region": "us"}'


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    for name in ("orders", "inbox", "secret", "keyed", "narrow"):
        rig.create_topic(name, JSON)
    rig.create_topic("raw", BINARY)
    rig.create_topic("raw-by-key", BINARY)
    yield rig
    rig.close()


@pytest.fixture
def guarded(rig: Rig, tmp_path: Path) -> Guarded:
    return Guarded(access_of(tmp_path, FILE), topics=rig.store.topics)


def call(guarded: Guarded, name: str, method: str = "Publish") -> Call:
    return guarded.admit(method, name)[0]


def reason(act: Callable[[], object]) -> tuple[Reason, str]:
    with pytest.raises(StoreError) as caught:
        act()
    return caught.value.reason, caught.value.message


# --- topics ----------------------------------------------------------------------------------------------------------


def test_a_topic_that_may_not_be_seen_is_one_that_does_not_exist(guarded: Guarded) -> None:
    desk = call(guarded, "desk", "Get")
    hidden, absent = (reason(partial(desk.topic, name)) for name in ("secret", "absent"))
    assert hidden[0] is absent[0] is Reason.TOPIC_NOT_FOUND
    assert hidden[1].replace("secret", "absent") == absent[1]
    assert [topic.name for topic in desk.topics()] == ["inbox", "keyed", "narrow", "orders", "raw", "raw-by-key"]
    assert {line["topic"] for line in guarded.audit.of("denied")} == {"secret", "absent"}


def test_a_topic_with_another_grant_is_denied(guarded: Guarded) -> None:
    desk = call(guarded, "desk", "Get")
    assert reason(lambda: desk.topic("inbox"))[0] is Reason.PERMISSION_DENIED
    assert reason(lambda: desk.topic("new-one"))[0] is Reason.PERMISSION_DENIED, "also before it exists"


def test_what_acts_on_the_whole_needs_it_whole(guarded: Guarded) -> None:
    desk = call(guarded, "desk", "Get")
    assert desk.topic("orders").restriction.hidden == (("client", "iban"),)
    assert reason(lambda: desk.topic("orders", whole=True))[0] is Reason.PERMISSION_DENIED
    assert call(guarded, "other", "Get").topic("orders", whole=True).restriction == UNRESTRICTED


def test_rows_and_hidden_fields_that_cannot_be_applied_allow_nothing(guarded: Guarded) -> None:
    desk = call(guarded, "desk", "Get")
    assert reason(lambda: desk.topic("raw"))[0] is Reason.PERMISSION_DENIED, "a binary payload has no fields"
    assert reason(lambda: desk.topic("keyed"))[0] is Reason.PERMISSION_DENIED, "a key cannot be hidden"
    assert desk.topic("raw-by-key").restriction.rows is not None
    parts = {topic.name: desk.part_of(topic) for topic in desk.topics()}
    assert [name for name, part in parts.items() if part is None] == ["inbox", "keyed", "narrow", "raw"]


def test_without_an_access_file_a_call_may_do_everything(rig: Rig) -> None:
    root, _ = Guarded(None, topics=rig.store.topics).admit("Get", prover=Anonymous())
    assert root.topic("secret", Action.LOAD, whole=True).restriction == UNRESTRICTED
    assert (root.own_name("a"), root.shown_name("desk/a"), root.owns("desk")) == ("a", "desk/a", True)
    publish = Publish("absent", [EU], publisher=PublisherPosition("p", 1, 1))
    permit_publish(root, publish, dynamic=False)
    assert (publish.permits, publish.publisher) == (None, PublisherPosition("p", 1, 1))
    permit_load(root, "absent", dynamic=False)


# --- writes ----------------------------------------------------------------------------------------------------------


def published(rig: Rig, guarded: Guarded, payload: bytes, **more: object) -> Applied | Refusal:
    publish = Publish("orders", [payload], want_results=True, **more)  # type: ignore[arg-type]  # as the test says
    permit_publish(call(guarded, "desk"), publish, dynamic=False)
    return only(rig.run(publish))


def only(outcome: Outcome) -> Applied | Refusal:
    assert outcome.results is not None
    (found,) = outcome.results
    return found


@pytest.mark.parametrize(
    ("stored", "written", "allowed"),
    [(None, EU, True), (None, US, False), (EU, EU, True), (EU, US, False), (US, EU, False), (US, US, False)],
)
def test_a_publish_needs_the_rows_of_the_record_before_and_after(
    rig: Rig, guarded: Guarded, stored: bytes | None, written: bytes, allowed: bool
) -> None:
    if stored is not None:
        rig.run(Publish("orders", [stored]))
    found = published(rig, guarded, written)
    if allowed:
        assert isinstance(found, Applied)
        return
    assert isinstance(found, Refusal)
    assert found.reason is Reason.PERMISSION_DENIED
    fresh = published(rig, guarded, US.replace(b"1", b"77"))
    assert isinstance(fresh, Refusal)
    assert found.message == fresh.message, "whether there is a record before, nobody learns"


def test_a_record_outside_the_rows_is_judged_within_one_request(rig: Rig, guarded: Guarded) -> None:
    """The second of two records of one key meets the first one, which is not stored yet."""
    rig.run(Publish("orders", [US]))
    publish = Publish("orders", [US, EU, EU.replace(b"1", b"2")], want_results=True)
    permit_publish(call(guarded, "desk"), publish, dynamic=False)
    results = rig.run(publish).results
    assert results is not None
    assert [type(result) for result in results] == [Refusal, Refusal, Applied]


@pytest.mark.parametrize("kind", [ConditionKind.IF_PRESENT, ConditionKind.IF_VERSION])
def test_a_condition_finds_no_record_outside_the_rows(rig: Rig, guarded: Guarded, kind: ConditionKind) -> None:
    condition = Condition(kind, 5) if kind is ConditionKind.IF_VERSION else Condition(kind)
    absent = published(rig, guarded, EU, conditions=[condition])
    rig.run(Publish("orders", [US]))
    hidden = published(rig, guarded, EU, conditions=[condition])
    assert isinstance(absent, Refusal)
    assert hidden == absent


def test_a_touch_finds_no_record_outside_the_rows(rig: Rig, guarded: Guarded) -> None:
    lifetime = Lifetime(LifetimeKind.TTL, 10**6)

    def touched() -> Applied | Refusal:
        touch = Touch("orders", ["1"], lifetime)
        permit_touch(call(guarded, "desk", "Touch"), touch)
        return only(rig.run(touch))

    absent = touched()
    rig.run(Publish("orders", [US]))
    assert touched() == absent
    assert isinstance(absent, Refusal)
    assert absent.reason is Reason.RECORD_NOT_FOUND


def test_a_delete_passes_over_records_outside_the_rows(rig: Rig, guarded: Guarded) -> None:
    rig.run(Publish("orders", [US, EU.replace(b"1", b"2")]))
    desk = call(guarded, "desk", "SowDelete")
    delete = Delete("orders", ["1", "2"])
    permit_delete(desk, delete, desk.topic("orders"))
    rig.run(delete)
    assert list(rig.live("orders")) == [b"1"]
    admin = call(guarded, "admin", "SowDelete")
    assert reason(lambda: admin.topic("orders"))[0] is Reason.PERMISSION_DENIED, "operator is no grant to delete"


# --- topics that a publish creates -----------------------------------------------------------------------------------


def test_a_publish_creates_a_topic_where_both_are_granted(guarded: Guarded) -> None:
    desk = call(guarded, "desk")
    permit_publish(desk, Publish("new-1", [EU]), dynamic=True)
    absent = reason(lambda: permit_publish(desk, Publish("new-1", [EU]), dynamic=False))
    assert absent[0] is Reason.TOPIC_NOT_FOUND
    with_rows = reason(lambda: permit_publish(desk, Publish("narrow-1", [EU]), dynamic=True))
    assert with_rows[0] is Reason.TOPIC_NOT_FOUND, "nothing would judge the first records"
    assert reason(lambda: permit_publish(desk, Publish("orders2", [EU]), dynamic=True))[0] is Reason.TOPIC_NOT_FOUND
    permit_publish(desk, Publish("new-1", [EU]), dynamic=True)
    permit_load(desk, "new-2", dynamic=True)
    limited = reason(lambda: permit_publish(desk, Publish("new-3", [EU]), dynamic=True))
    assert limited[0] is Reason.LIMIT_EXCEEDED


def test_a_publish_that_creates_a_topic_and_removes_is_audited_as_a_delete(guarded: Guarded) -> None:
    """A8, P11: it may remove its own puts, and the topic may come from another before its turn."""
    desk = call(guarded, "desk")
    permit_publish(desk, Publish("made", [EU]), dynamic=True)
    assert guarded.audit.of("begin") == []
    permit_publish(desk, Publish("made", [EU, EU], removals=[False, True]), dynamic=True)
    assert desk.deletes
    assert [line["method"] for line in guarded.audit.of("begin")] == ["/sow.v1.SowService/Publish"]


def test_a_load_needs_the_whole_topic(guarded: Guarded) -> None:
    desk = call(guarded, "desk", "OpenLoad")
    permit_load(desk, "inbox", dynamic=False)
    assert reason(lambda: permit_load(desk, "narrow", dynamic=False))[0] is Reason.PERMISSION_DENIED
    assert reason(lambda: permit_load(desk, "orders", dynamic=False))[0] is Reason.PERMISSION_DENIED
    assert reason(lambda: permit_load(desk, "secret", dynamic=True))[0] is Reason.TOPIC_NOT_FOUND
    assert reason(lambda: permit_load(desk, "new-1", dynamic=False))[0] is Reason.TOPIC_NOT_FOUND


# --- publishers ------------------------------------------------------------------------------------------------------


def test_the_same_publisher_id_of_two_callers_is_two(rig: Rig, guarded: Guarded) -> None:
    """Nobody can use up the sequences of another's id, or fence it by a later epoch."""
    position = PublisherPosition("loader", 2**62, 1)
    mine = own_publisher(call(guarded, "desk"), position)
    others = own_publisher(call(guarded, "other"), position)
    assert (mine.publisher_id, others.publisher_id) == ("desk/loader", "other/loader")
    assert mine._replace(publisher_id="loader") == position
    rig.run(Publish("orders", [EU], publisher=mine))
    assert rig.store.cuts.publisher_position("other/loader") == (0, 0)
    assert rig.store.cuts.publisher_position("desk/loader")[0] == 2**62


def test_a_publisher_id_counts_once_and_not_where_the_publish_is_denied(guarded: Guarded) -> None:
    desk = call(guarded, "desk")
    for name in ("a", "b", "c"):
        publish = Publish("secret", [EU], publisher=PublisherPosition(name, 1, 1))
        assert reason(partial(permit_publish, desk, publish, dynamic=True))[0] is Reason.TOPIC_NOT_FOUND
    for name in ("a", "b", "a"):
        permit_publish(desk, Publish("orders", [EU], publisher=PublisherPosition(name, 1, 1)), dynamic=False)
    third = Publish("orders", [EU], publisher=PublisherPosition("c", 1, 1))
    assert reason(lambda: permit_publish(desk, third, dynamic=False))[0] is Reason.LIMIT_EXCEEDED


def test_a_delete_in_the_name_of_a_publisher_is_in_the_name_of_ones_own(guarded: Guarded) -> None:
    desk = call(guarded, "desk", "SowDelete")
    delete = Delete("orders", ["1"], publisher=PublisherPosition("loader", 1, 1))
    permit_delete(desk, delete, desk.topic("orders"))
    assert delete.publisher is not None
    assert delete.publisher.publisher_id == "desk/loader"
    assert delete.matches is not None


# --- owners ----------------------------------------------------------------------------------------------------------


def test_names_are_shown_to_their_owner_and_to_operators(guarded: Guarded) -> None:
    desk, admin = call(guarded, "desk", "Get"), call(guarded, "admin", "Get")
    assert desk.own_name("mine") == "desk/mine"
    assert [desk.shown_name(name) for name in ("desk/mine", "other/mine", "before")] == ["mine", None, "before"]
    assert [admin.shown_name(name) for name in ("desk/mine", "admin/x", "before")] == ["desk/mine", "x", "before"]
    assert [desk.owns(owner) for owner in ("desk", "other", "")] == [True, False, False]
    assert admin.owns("other")


class Known:
    """The durables of a topic, by their stored names."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def get(self, topic: int, name: str) -> object | None:
        return name if name in self._names else None

    def count_owned(self, owner: str) -> int:
        return sum(name.startswith(f"{owner}/") for name in self._names)


@pytest.mark.parametrize(
    ("caller", "given", "stored"),
    [
        ("desk", "mine", "desk/mine"),
        ("other", "mine", "other/mine"),
        ("desk", "before", "before"),
        ("desk", "both", "desk/both"),
        ("other", "both", "both"),
        ("desk", "other/theirs", "desk/other/theirs"),
        ("desk", "desk/mine", "desk/mine"),
        ("admin", "desk/mine", "desk/mine"),
        ("admin", "other/theirs", "other/theirs"),
        ("admin", "mine", "admin/mine"),
        ("desk", "", "desk/"),
        ("desk", "/", "desk//"),
    ],
)
def test_the_stored_name_of_a_durable(guarded: Guarded, caller: str, given: str, stored: str) -> None:
    known = Known("desk/mine", "other/theirs", "before", "both", "desk/both")
    found = OwnedDurables(known).name(call(guarded, caller, "Get"), "orders", given)  # type: ignore[arg-type]  # two methods
    assert found == stored


def made(owned: OwnedDurables, caller: Call, name: str) -> str:
    with owned.making(caller, "orders", name, "durable") as stored:
        return stored


@pytest.mark.parametrize("name", ["other/new", "a b", "", "x" * 201, "é", "/"])
def test_a_new_durable_has_a_name_without_a_slash(guarded: Guarded, name: str) -> None:
    owned = OwnedDurables(Known())  # type: ignore[arg-type]  # two methods of it
    refused = reason(lambda: made(owned, call(guarded, "other", "Get"), name))
    assert refused[0] is Reason.INVALID_ARGUMENT
    assert made(owned, call(guarded, "other", "Get"), "new") == "other/new"


def test_only_ones_own_durables_count(guarded: Guarded) -> None:
    owned = OwnedDurables(Known("other/a", "desk2/b", "before"))  # type: ignore[arg-type]  # two methods of it
    assert made(owned, call(guarded, "desk", "Get"), "new") == "desk/new"
    full = OwnedDurables(Known("desk/a"))  # type: ignore[arg-type]  # as above
    refused = reason(lambda: made(full, call(guarded, "desk", "Get"), "new"))
    assert refused[0] is Reason.LIMIT_EXCEEDED
    assert made(full, call(guarded, "desk", "Get"), "a") == "desk/a", "it exists already"
