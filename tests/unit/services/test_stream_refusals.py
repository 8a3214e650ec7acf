"""Publishes over the wire whose records are refused or removed one by one (rules P4, P11)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc import status_pb2

from sow.v1 import sow_pb2, types_pb2
from sow_server.engine.disk.rocks import META
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.model import MessageType, Publish, TopicSettings
from tests.support.fakes.guarded import GuardedParts
from tests.support.oracles.access import grant, identity
from tests.support.stores.stores import Rig

EVERYTHING = "read publish delete"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("keyed", TopicSettings(key=("/id",)))
    rig.create_topic("plain", TopicSettings(message_type=MessageType.BINARY))
    rig.create_topic("others", TopicSettings(message_type=MessageType.BINARY))
    yield rig
    rig.close()


def parts_of(rig: Rig, actions: str = EVERYTHING, rows: str = "") -> GuardedParts:
    access = identity("desk", "desk") + grant("desk", "[kpm].*", actions, rows)
    return GuardedParts(rig, access)


def batch(topic: str, *keys: str, sequence: int = 0, **fields: Any) -> sow_pb2.PublishStreamRequest:
    position = types_pb2.PublisherPosition(publisher_id="p", publisher_epoch=1, first_sequence=sequence)
    payloads = fields.pop("payload", [b"x"] * len(keys))
    return sow_pb2.PublishStreamRequest(
        topic=topic, key=keys, payload=payloads, publisher=position if sequence else None, **fields
    )


def outcomes(answers: list[Any]) -> list[tuple[int, list[tuple[int, str]]]]:
    """Of each answer the number of applied records, and the refused ones with their reasons."""
    assert not any(isinstance(one, status_pb2.Status) for one in answers), answers[-1]
    return [(answer.applied, [(one.index, Reason(one.reason).name) for one in answer.refusals]) for answer in answers]


def test_records_without_topic_or_key_are_refused_and_the_stream_goes_on(rig: Rig) -> None:
    """P4. Each of them ended the whole stream, with all that was under way behind it."""
    with parts_of(rig) as parts:
        answers = parts.ask_all(
            "desk",
            "PublishStream",
            [
                batch("plain", "a", sequence=1),
                batch("missing", "a", "b", sequence=2),
                sow_pb2.PublishStreamRequest(topic="plain", payload=[b"x"]),
                batch("keyed", "a", payload=[b'{"id":1}']),
                batch("others", "a", sequence=4),
                batch("plain", "b", "", "c", sequence=5),
            ],
        )
    assert outcomes(answers) == [
        (1, []),
        (0, [(0, "TOPIC_NOT_FOUND"), (1, "TOPIC_NOT_FOUND")]),
        (0, [(0, "KEY_REQUIRED")]),
        (0, [(0, "KEY_NOT_ALLOWED")]),
        (0, [(0, "TOPIC_NOT_FOUND")]),
        (2, [(1, "KEY_REQUIRED")]),
    ]
    assert set(rig.live("plain")) == {b"a", b"b", b"c"}
    assert rig.live("others") == {}, "the caller has no grant on it: for it, there is no such topic"


def test_a_refusal_for_an_unknown_topic_names_the_one_that_was_meant(rig: Rig) -> None:
    with parts_of(rig) as parts:
        (answer,) = parts.answers("desk", "PublishStream", batch("plan", "a"))
    assert "did you mean 'plain'?" in answer.refusals[0].message


def test_a_refused_record_stays_refused_when_its_topic_comes(rig: Rig) -> None:
    """P6: the outcome of a retry is that of the first attempt, and later sequences do not make it an applied one."""
    with parts_of(rig) as parts:
        first, second = batch("missing", "a", "b", sequence=1), batch("plain", "c", sequence=3)
        refused = (0, [(0, "TOPIC_NOT_FOUND"), (1, "TOPIC_NOT_FOUND")])
        assert outcomes(parts.ask_all("desk", "PublishStream", [first, second])) == [refused, (1, [])]
        assert outcomes(parts.ask_all("desk", "PublishStream", [first])) == [refused]
        rig.create_topic("missing", TopicSettings(message_type=MessageType.BINARY))
        answers = parts.answers("desk", "PublishStream", first)
    assert outcomes(answers) == [refused]
    assert rig.live("missing") == {}
    assert rig.store.cuts.publisher_position("desk/p") == (1, 3)


def test_a_retry_has_its_answer_although_the_topic_is_gone_or_takes_other_keys(rig: Rig) -> None:
    """P6. Story: records that had been applied were told to be refused, and a remembered reason was replaced."""
    rig.create_topic("keyless", TopicSettings(message_type=MessageType.BINARY))
    rig.create_topic("passing", TopicSettings())
    first = batch("passing", "a", "b", "c", payload=[b"{}", b"{", b"{}"], sequence=1)
    second, new = batch("keyless", "d", sequence=4), batch("passing", "d", "e", payload=[b"{}"] * 2, sequence=4)
    outcome = (2, [(1, "PAYLOAD_MALFORMED")])
    with parts_of(rig) as parts:
        assert outcomes(parts.ask_all("desk", "PublishStream", [first, second])) == [outcome, (1, [])]
        for topic in ("passing", "keyless"):
            rig.store.administration.delete_topic(topic, force=True)
        rig.create_topic("keyless", TopicSettings(key=("/id",)))
        far = batch("passing", "f", "g", sequence=90)
        answers = parts.ask_all("desk", "PublishStream", [first, second, new, far, far])
    gone = (0, [(0, "TOPIC_NOT_FOUND"), (1, "TOPIC_NOT_FOUND")])
    new_one = (0, [(1, "TOPIC_NOT_FOUND")])
    no_refusals: list[tuple[int, str]] = []
    assert outcomes(answers) == [(0, [(1, "PAYLOAD_MALFORMED")]), (0, no_refusals), new_one, gone, gone]
    assert [answer.duplicates for answer in answers] == [2, 1, 1, 0, 0]  # type: ignore[attr-defined]  # no status
    assert answers[0].last_duplicate_version > 0  # type: ignore[attr-defined]  # as above


def test_a_unit_is_not_finished_by_a_request_that_is_refused(rig: Rig) -> None:
    """P6"""
    ends = types_pb2.PublisherPosition(publisher_id="p", publisher_epoch=1, first_sequence=1, unit=7, unit_done=True)
    request = sow_pb2.PublishStreamRequest(topic="missing", key=["a"], payload=[b"x"], publisher=ends)
    with parts_of(rig) as parts:
        assert outcomes(parts.ask("desk", "PublishStream", request)) == [(0, [(0, "TOPIC_NOT_FOUND")])]
        ends.first_sequence = 2
        empty = sow_pb2.PublishStreamRequest(topic="missing", publisher=ends)
        assert "there is no topic" in parts.status("desk", "PublishStream", publisher=ends, topic="missing").message
        assert not parts.answers("desk", "OpenPublisher", publisher_id="p", unit=7)[0].unit_done
    assert empty.publisher.unit_done


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (batch("plain", "a", condition={"only_if_absent": False}), "false has no meaning"),
        (batch("plain", *["a"] * 1001, atomic=True), "more than the limit of 1000"),
        (batch("plain", "a", remove=[True, False]), "remove: has 2 entries for 1 payloads"),
        (batch("plain", "a", remove=[True], lifetime_kind=[1], lifetime_micros=[1]), "a removal has no lifetime"),
    ],
    ids=["condition", "atomic", "column", "lifetime"],
)
def test_a_request_that_cannot_be_read_still_ends_the_stream(
    rig: Rig, request_: sow_pb2.PublishStreamRequest, reason: str
) -> None:
    """There is nothing to tell of its records."""
    with parts_of(rig) as parts:
        assert reason in parts.ask("desk", "PublishStream", request_)[-1].message  # type: ignore[attr-defined]  # no status


def test_a_publisher_that_was_fenced_is_told_so_whatever_the_topic(rig: Rig) -> None:
    """P6"""
    with parts_of(rig) as parts:
        parts.answers("desk", "PublishStream", batch("plain", "a", sequence=1))
        parts.answers("desk", "OpenPublisher", publisher_id="p")
        last = parts.ask("desk", "PublishStream", batch("missing", "a", sequence=2))[-1]
        assert "is fenced by epoch 2" in last.message  # type: ignore[attr-defined]  # no status


def test_a_caller_that_may_publish_nowhere_gets_no_refusals_and_no_commits(rig: Rig) -> None:
    """A7: it would have the memory of publishers."""
    with parts_of(rig, "read") as parts:
        before = len(rig.rows(META))
        last = parts.ask("desk", "PublishStream", batch("others", "a", sequence=1))[-1]
        assert isinstance(last, status_pb2.Status)
        assert len(rig.rows(META)) == before


def test_a_refused_record_is_remembered_for_its_own_caller(rig: Rig) -> None:
    """A3: the id of a publisher is that of its caller, also where the topic is hidden."""
    with parts_of(rig) as parts:
        parts.answers("desk", "PublishStream", batch("others", "a", sequence=1))
    assert rig.store.cuts.publisher_position("desk/p") == (1, 1)
    assert rig.store.cuts.publisher_position("p") == (0, 0)
    assert rig.store.writer.publishers.find("desk/p").topics == ()


# --- removals over the wire ------------------------------------------------------------------------------------------


def test_removals_in_a_publish_are_answered_and_audited(rig: Rig) -> None:
    """P11, A8: the log has a publish as a delete, from its first removal on."""
    with parts_of(rig) as parts:
        parts.answers("desk", "PublishStream", batch("plain", "a", "b"))
        assert parts.audit.lines == []
        records = [{"key": "a", "remove": True}, {"key": "c", "payload": b"x"}, {"key": "z", "remove": True}]
        (answer,) = parts.answers("desk", "Publish", topic="plain", records=records, atomic=True)
        assert [(one.removed, one.version > 0, one.sequence > 0) for one in answer.results] == [
            (True, True, True),
            (False, True, True),
            (False, False, False),
        ]
        assert [(line["event"], line["method"]) for line in parts.audit.lines] == [
            ("begin", "/sow.v1.SowService/Publish")
        ]
        (answer,) = parts.answers(
            "desk", "PublishStream", batch("plain", "b", "d", "e", payload=[b"", b"x", b""], remove=[True, False, True])
        )
        assert (answer.applied, answer.removed) == (3, 1)
        assert len(parts.audit.lines) == 2
    assert set(rig.live("plain")) == {b"c", b"d"}


def test_a_removal_needs_both_permissions(rig: Rig) -> None:
    """P11"""
    with parts_of(rig, "publish") as parts:
        answers = parts.ask_all(
            "desk", "PublishStream", [batch("plain", "a"), batch("plain", "a", payload=[b""], remove=[True])]
        )
        assert isinstance(answers[-1], status_pb2.Status)
        assert "lacks the permission delete on plain" in answers[-1].message
    assert set(rig.live("plain")) == {b"a"}


def test_a_lifetime_of_a_removal_is_named(rig: Rig) -> None:
    with parts_of(rig) as parts:
        record = {"key": "a", "remove": True, "lifetime": {"ttl_micros": 1}}
        status = parts.status("desk", "Publish", topic="plain", records=[{"key": "b"}, record])
    assert status.message == "records[1].lifetime: a removal has none"


def test_rows_hide_records_from_removals(rig: Rig) -> None:
    """A4, P11"""
    rows = "rows = \"@key LIKE '^1'\""
    rig.run(Publish("plain", [b"x"] * 2, ["1", "2"]))
    with parts_of(rig, rows=rows) as parts:
        (answer,) = parts.answers(
            "desk", "PublishStream", batch("plain", "1", "2", "3", payload=[b""] * 3, remove=[True] * 3)
        )
    assert (answer.applied, answer.removed) == (3, 1)
    assert set(rig.live("plain")) == {b"2"}
