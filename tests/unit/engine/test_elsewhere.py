"""The writer refuses what it has been given for a topic that lives in another cell by its turn (rule C4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.loads import Load
from sow_server.engine.pending import Pending
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, Delete, Outcome, Publish, TopicSettings
from tests.support.stores.stores import Rig


@pytest.fixture
def gone() -> set[str]:
    """The topics that live elsewhere."""
    return set()


@pytest.fixture
def rig(tmp_path: Path, gone: set[str]) -> Rig:
    made = Rig(tmp_path)
    for topic in ("moves", "stays"):
        made.create_topic(topic, TopicSettings())

    def refusal(topic: str) -> StoreError | None:
        return StoreError(Reason.TOPIC_ELSEWHERE, "it moved", details={"cell": "b"}) if topic in gone else None

    made.store.commits.refuse_elsewhere(refusal)
    return made


def test_what_waits_for_its_turn_is_refused_once_its_topic_has_gone(rig: Rig, gone: set[str]) -> None:
    answers: dict[str, Outcome | StoreError] = {}

    def submit(name: str, request: Publish | Delete) -> None:
        rig.store.commits.submit(request).then(lambda answer: answers.__setitem__(name, answer))

    submit("before", Publish("moves", [b'{"n":1}'], ["1"]))
    rig.store.writer.step()
    submit("publish", Publish("moves", [b'{"n":2}'], ["2"]))
    submit("delete", Delete("moves", ["1"]))
    submit("other", Publish("stays", [b'{"n":3}'], ["3"]))
    gone.add("moves")
    while len(answers) < 4:
        rig.store.writer.step()

    before, other = answers["before"], answers["other"]
    assert isinstance(before, Outcome)
    assert isinstance(other, Outcome)
    assert (before.applied, other.applied) == (1, 1)
    for name in ("publish", "delete"):
        refused = answers[name]
        assert isinstance(refused, StoreError)
        assert (refused.reason, refused.details) == (Reason.TOPIC_ELSEWHERE, {"cell": "b"})
    assert rig.store.topics.by_name["moves"].statistics.records == 1
    gone.clear()
    submit("again", Publish("moves", [b'{"n":2}'], ["2"]))
    rig.store.writer.step()
    again = answers["again"]
    assert isinstance(again, Outcome)
    assert again.applied == 1


def test_a_change_of_a_topic_that_waits_for_its_turn_is_refused_once_the_topic_has_gone(
    rig: Rig, gone: set[str]
) -> None:
    """Changes of topics, and commits of loads, are steps of the writer. Another caller's, queued before a reload, used
    to run after the reload was answered: it could delete the topic with its records."""
    store = rig.store
    store.run(Publish("moves", [b'{"n":1}'], ["1"]))
    load = store.finish(store.loads.open("moves", MICROS))
    administration = store.administration
    waiting: dict[str, Pending[Topic] | Pending[int] | Pending[Load]] = {
        "delete": administration.delete_topic("moves"),
        "alter": administration.alter_topic("moves", lambda declared: {**declared, "history": 5}),
        "create": administration.create_topic("moves-too", {}),
        "load": store.loads.commit(load.row.id, []),
        "open": store.loads.open("moves", MICROS),
    }
    gone.update(("moves", "moves-too"))
    rig.store.writer.step()

    for name, pending in waiting.items():
        refused = pending.given
        assert isinstance(refused, StoreError), name
        assert (refused.reason, refused.details) == (Reason.TOPIC_ELSEWHERE, {"cell": "b"}), name
    assert store.topics.by_name.keys() >= {"moves", "stays"}
    assert "moves-too" not in store.topics.by_name
    assert store.topics.by_name["moves"].statistics.records == 1
    assert store.finish(administration.delete_topic("moves", stray=True)) == 1
    assert store.finish(administration.delete_topic("stays")) == 0
