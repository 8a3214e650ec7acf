"""Delta publishes on a store: the base, the stored record, refusals (rule P2)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.disk.rocks import COMMITS
from sow_server.engine.store import StoreOptions
from sow_server.engine.stored import decode_commit
from sow_server.engine.values.database import Damaged
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    NEVER,
    Applied,
    Condition,
    ConditionKind,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Outcome,
    Publish,
    PublisherPosition,
    Refusal,
    TopicSettings,
    TtlMode,
)
from tests.support.stores.stores import SECOND, Rig

QUOTES = TopicSettings(key=("/id",), expiration=Expiration.ENABLED)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    limits = RequestLimits(payload_bytes_max=200)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(commit_merged_bytes_max=1000, limits=limits)))
    rig.create_topic("quotes", QUOTES)
    rig.create_topic("given", TopicSettings(expiration=Expiration.ENABLED))
    yield rig
    rig.close()


def publish(rig: Rig, *documents: object, ttl: int | None = None) -> Outcome:
    lifetime = Lifetime(LifetimeKind.ABSENT) if ttl is None else Lifetime(LifetimeKind.TTL, ttl)
    return rig.run(Publish("quotes", [json.dumps(document).encode() for document in documents], lifetime=lifetime))


def delta(*documents: object, **more: object) -> Publish:
    request = Publish("quotes", [json.dumps(document).encode() for document in documents], delta=True)
    for name, value in more.items():
        setattr(request, name, value)
    return request


def document(rig: Rig, key: str = "1", topic: str = "quotes") -> object:
    found = rig.get(topic, key)
    return None if found is None else json.loads(found.payload)


def refusals(outcome: Outcome) -> list[tuple[int, Reason]]:
    return [(refusal.index, refusal.reason) for refusal in outcome.refusals]


def test_a_delta_is_merged_into_the_live_record_and_journaled_merged(rig: Rig) -> None:
    publish(rig, {"id": 1, "bid": 9.5, "venue": {"name": "X", "lot": 10}})
    before = rig.get("quotes", "1")
    outcome = rig.run(delta({"id": 1, "bid": 9.6, "ask": None, "venue": {"lot": 20}}, want_results=True))
    merged = b'{"id":1,"bid":9.6,"venue":{"name":"X","lot":20}}'
    found = rig.get("quotes", "1")
    assert found is not None
    assert before is not None
    assert found.payload == merged
    assert found.version > before.version
    assert outcome.results == [Applied("1", found.version, NEVER, found.sequence)]
    assert [(entry.kind, entry.payload) for entry in rig.journal("quotes")][1] == ("put", merged)


def test_without_a_record_a_delta_is_a_plain_publish_of_its_bytes(rig: Rig) -> None:
    rig.run(Publish("quotes", [b'{ "id":1, "a":null }'], delta=True, unset_paths=("/gone",)))
    assert rig.get("quotes", "1").payload == b'{ "id":1, "a":null }'  # type: ignore[union-attr]  # it is there


def test_an_expired_record_is_no_base_and_expires_first(rig: Rig) -> None:
    """P2, L8, L10: also before the sweep."""
    publish(rig, {"id": 1, "old": True}, ttl=SECOND)
    rig.time.tick(SECOND)
    rig.run(delta({"id": 1, "new": True}))
    assert document(rig) == {"id": 1, "new": True}
    assert rig.kinds("quotes") == [("put", "1"), ("expire", "1"), ("put", "1")]


def test_a_key_that_comes_twice_merges_onto_the_first_result(rig: Rig) -> None:
    publish(rig, {"id": 1, "a": 0})
    rig.run(delta({"id": 1, "b": 1}, {"id": 2, "x": 1}, {"id": 1, "c": 2}, {"id": 2, "y": 2}))
    assert document(rig) == {"id": 1, "a": 0, "b": 1, "c": 2}
    assert document(rig, "2") == {"id": 2, "x": 1, "y": 2}


def test_deltas_of_requests_that_share_a_commit_build_on_each_other(rig: Rig) -> None:
    publish(rig, {"id": 1, "a": 0})
    rig.run_together([delta({"id": 1, "b": 1}), Publish("quotes", [b'{"id":1,"z":0}']), delta({"id": 1, "c": 2})])
    assert document(rig) == {"id": 1, "z": 0, "c": 2}


def test_fields_are_unset_by_their_paths(rig: Rig) -> None:
    publish(rig, {"id": 1, "a": 1, "b": {"x": 1, "y": 2}}, {"id": 2, "a": 2})
    rig.run(delta({"id": 1}, {"id": 2, "a": 3}, unset_paths=("/a", "/b/y", "/nowhere")))
    assert document(rig) == {"id": 1, "b": {"x": 1}}
    assert document(rig, "2") == {"id": 2, "a": 3}, "a given key stands"


def test_a_delta_stamps_anew_unless_it_keeps(rig: Rig) -> None:
    """L6."""
    publish(rig, {"id": 1}, {"id": 2}, ttl=10 * SECOND)
    stamp = rig.get("quotes", "1").expire_time_micros  # type: ignore[union-attr]  # it is there
    rig.time.tick(SECOND)
    rig.run(delta({"id": 1, "a": 1}, ttl_mode=TtlMode.KEEP))
    rig.run(delta({"id": 2, "a": 1}))
    assert rig.get("quotes", "1").expire_time_micros == stamp  # type: ignore[union-attr]  # as above
    assert rig.get("quotes", "2").expire_time_micros == NEVER  # type: ignore[union-attr]  # as above


def test_every_delta_renews_the_lifetime(rig: Rig) -> None:
    """AMPS 8, L6: 45 s, updated at 15 s: 45 s more, and so on."""
    rig.alter_topic("quotes", expiration=Expiration.ENABLED, default_ttl_micros=45 * SECOND)
    publish(rig, {"id": 1})
    for _ in range(3):
        rig.time.tick(15 * SECOND)
        rig.run(delta({"id": 1, "a": 1}))
        assert rig.get("quotes", "1").expire_time_micros == rig.clock.now_micros() + 45 * SECOND  # type: ignore[union-attr]  # it is there
    rig.time.tick(45 * SECOND - 1)
    assert document(rig) == {"id": 1, "a": 1}
    rig.time.tick(1)
    assert rig.get("quotes", "1") is None


def test_a_condition_is_checked_before_the_merge(rig: Rig) -> None:
    """P3."""
    publish(rig, {"id": 1, "a": 0})
    outcome = rig.run(delta({"id": 1, "b": "x" * 150}, conditions=[Condition(ConditionKind.IF_ABSENT)]))
    assert refusals(outcome) == [(0, Reason.CONDITION_FAILED)]
    assert document(rig) == {"id": 1, "a": 0}


def test_the_merged_record_keeps_the_limit_of_payloads(rig: Rig) -> None:
    """K8: the refusal names both figures."""
    publish(rig, {"id": 1, "a": "x" * 150})
    outcome = rig.run(delta({"id": 1, "b": "y" * 100}, {"id": 1, "c": 1}))
    assert refusals(outcome) == [(0, Reason.PAYLOAD_TOO_LARGE)]
    assert outcome.refusals[0].message == "payload: merged into the record it has more bytes than the limit of 200"
    assert document(rig) == {"id": 1, "a": "x" * 150, "c": 1}


def test_an_atomic_delta_is_merged_whole_or_not_at_all(rig: Rig) -> None:
    publish(rig, {"id": 1, "a": 0}, {"id": 2, "a": "x" * 150})
    outcome = rig.run(delta({"id": 1, "a": 1}, {"id": 2, "b": "y" * 100}, atomic=True))
    assert refusals(outcome) == [(0, Reason.ATOMIC_ABORTED), (1, Reason.PAYLOAD_TOO_LARGE)]
    assert document(rig) == {"id": 1, "a": 0}
    rig.run(delta({"id": 1, "a": 1}, {"id": 1, "b": 2}, atomic=True))
    assert document(rig) == {"id": 1, "a": 1, "b": 2}


def test_a_retried_delta_is_not_merged_again(rig: Rig) -> None:
    """P6: another's change in between is not undone."""
    publish(rig, {"id": 1, "a": 0})
    retried = delta({"id": 1, "a": 1}, publisher=PublisherPosition("p", 1, 1))
    rig.run(retried)
    rig.run(delta({"id": 1, "a": 2}))
    assert rig.run(retried).duplicates == 1
    assert document(rig) == {"id": 1, "a": 2}


def test_publishers_that_supply_keys_send_deltas_too(rig: Rig) -> None:
    rig.run(Publish("given", [b'{"a":1,"b":1}'], ["k"]))
    rig.run(Publish("given", [b'{"a":2}', b"[]"], ["k", "k"], delta=True, unset_paths=("/b",)))
    assert document(rig, "k", "given") == {"a": 2}


@pytest.mark.parametrize(
    ("message_type", "base", "change", "result"),
    [
        (MessageType.FIX, b"55=IBM|44=9.5|", b"55=IBM|44=9.6|", b"55=IBM|44=9.6|"),
        (MessageType.NVFIX, b"55=IBM|note=x", b"55=IBM|44=1", b"55=IBM|44=1"),
    ],
)
def test_field_payloads_are_merged_under_the_topics_separator(
    rig: Rig, message_type: MessageType, base: bytes, change: bytes, result: bytes
) -> None:
    rig.create_topic("fields", TopicSettings(key=("/55",), message_type=message_type, separator=b"|"))
    rig.run(Publish("fields", [base]))
    unset = ("/note",) if message_type is MessageType.NVFIX else ()
    rig.run(Publish("fields", [change], delta=True, unset_paths=unset))
    assert rig.get("fields", "IBM").payload == result  # type: ignore[union-attr]  # it is there


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "reason", "fault"),
    [
        (("a",), Reason.INVALID_ARGUMENT, "path 'a' must begin with '/', at 0"),
        (("/a", "/b//c"), Reason.INVALID_ARGUMENT, "'/b//c' has an empty step at 3"),
        (("/a" * 33,), Reason.INVALID_ARGUMENT, "has 33 steps, more than the limit of 32"),
        (("/a",) * 1001, Reason.INVALID_ARGUMENT, "1001 paths are more than the limit of 1000"),
        (("/" + "a" * 40_000,) * 2, Reason.INVALID_ARGUMENT, "80002 characters are more than the limit of 65536"),
        (("/x", "/id"), Reason.UNSET_KEY_FIELD, "/id would remove the key field /id"),
    ],
)
def test_paths_that_cannot_be_unset_are_named(rig: Rig, paths: tuple[str, ...], reason: Reason, fault: str) -> None:
    publish(rig, {"id": 1, "a": 1})
    with pytest.raises(StoreError) as caught:
        rig.run(delta({"id": 1}, unset_paths=paths))
    assert (caught.value.reason, caught.value.field) == (reason, "unset_paths")
    assert fault in caught.value.message
    assert document(rig) == {"id": 1, "a": 1}


def test_a_field_that_contains_a_key_field_cannot_be_unset(rig: Rig) -> None:
    rig.create_topic("nested", TopicSettings(key=("/a/b", "/c")))
    for path in ("/a", "/a/b", "/c"):
        with pytest.raises(StoreError) as caught:
            rig.run(Publish("nested", [b'{"a":{"b":1},"c":2}'], delta=True, unset_paths=(path,)))
        assert caught.value.reason is Reason.UNSET_KEY_FIELD
    rig.run(Publish("nested", [b'{"a":{"b":1,"x":1},"c":2}']))
    rig.run(Publish("nested", [b'{"a":{"b":1},"c":2}'], delta=True, unset_paths=("/a/x", "/c/d")))
    assert document(rig, "1|2", "nested") == {"a": {"b": 1}, "c": 2}


def test_a_fix_field_is_unset_by_its_tag(rig: Rig) -> None:
    rig.create_topic("fix", TopicSettings(key=("/55",), message_type=MessageType.FIX))
    for path, fault in (("/44/1", "a fix payload is flat"), ("/price", "a fix field is a tag such as /55")):
        with pytest.raises(StoreError, match=fault) as caught:
            rig.run(Publish("fix", [b"55=IBM"], delta=True, unset_paths=(path,)))
        assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_paths_to_unset_without_a_delta_are_refused(rig: Rig) -> None:
    with pytest.raises(StoreError, match="only with delta") as caught:
        rig.run(Publish("quotes", [b'{"id":1}'], unset_paths=("/a",)))
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, "unset_paths")


def test_binary_topics_take_no_deltas(rig: Rig) -> None:
    """K2."""
    rig.create_topic("binary")
    with pytest.raises(StoreError, match="no fields to merge") as caught:
        rig.run(Publish("binary", [b"x"], ["k"], delta=True))
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED_FOR_MESSAGE_TYPE, "delta")
    assert rig.stored("binary") == {}


def test_a_delta_that_has_no_key_or_is_no_document_is_refused_alone(rig: Rig) -> None:
    publish(rig, {"id": 1, "a": 1})
    outcome = rig.run(
        Publish("quotes", [b'{"a":2}', b"{", b'{"id":1,"b":2}', b'{"id":null}'], delta=True, want_results=True)
    )
    assert refusals(outcome) == [
        (0, Reason.KEY_FIELD_MISSING),
        (1, Reason.PAYLOAD_MALFORMED),
        (3, Reason.KEY_FIELD_MISSING),
    ]
    assert document(rig) == {"id": 1, "a": 1, "b": 2}


# --- bounds of a commit ----------------------------------------------------------------------------------------------


def runs(rig: Rig) -> list[int]:
    """How many changes each commit has."""
    commits = [decode_commit(key, value) for key, value in rig.rows(COMMITS)]
    return [commit.last_sequence - commit.first_sequence + 1 for commit in commits]


def test_small_deltas_to_large_records_are_split_over_commits_in_order(rig: Rig) -> None:
    """Each writes its record whole, so the bound is on the merged records; later requests wait their turn."""
    publish(rig, {"id": 1, "a": "x" * 170}, {"id": 2})
    requests = [
        delta(*[{"id": 1, "n": number} for number in range(12)]),
        Publish("quotes", [b'{"id":1,"n":100}']),
        delta({"id": 1, "m": 1}),
    ]
    answers = rig.run_together(requests)
    assert [answer.applied for answer in answers if isinstance(answer, Outcome)] == [12, 1, 1]
    assert runs(rig) == [2, 5, 5, 4]
    assert document(rig) == {"id": 1, "n": 100, "m": 1}
    assert [json.loads(entry.payload).get("n") for entry in rig.journal("quotes")][2:] == [*range(12), 100, 100]


def test_a_single_delta_is_never_too_large_for_a_commit(tmp_path: Path) -> None:
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(commit_merged_bytes_max=10)))
    rig.create_topic("quotes", QUOTES)
    publish(rig, {"id": 1, "a": "x" * 170}, {"id": 2, "a": "x" * 170})
    rig.run(delta({"id": 1, "b": 1}, {"id": 2, "b": 1}, {"id": 3}))
    assert runs(rig) == [2, 1, 1, 1]
    rig.close()


def test_an_atomic_delta_to_records_of_more_than_a_commit_is_refused(rig: Rig) -> None:
    publish(rig, {"id": 1, "a": "x" * 170})
    with pytest.raises(StoreError, match="more bytes than the limit of 1000") as caught:
        rig.run(delta(*[{"id": 1, "n": number} for number in range(12)], atomic=True))
    assert (caught.value.reason, caught.value.field) == (Reason.ATOMIC_TOO_LARGE, "payload")
    assert document(rig) == {"id": 1, "a": "x" * 170}


@pytest.mark.parametrize(
    ("count", "size", "more", "is_taken"),
    [
        (10, 100, [], True),
        (10, 100, [{"id": 2}], True),  # merged into nothing: it was refused
        (10, 100, [{"id": 2}, {"id": 2, "a": 1}], False),
        (11, 100, [], False),
        (6, 190, [], False),  # beyond by its last record: it was taken
        (6, 190, [{"id": 2, "a": "x" * 300}], False),  # a record of it is refused, too: that was the answer
    ],
)
def test_an_atomic_delta_merges_into_so_many_bytes_and_not_one_more(
    rig: Rig, count: int, size: int, more: list[object], is_taken: bool
) -> None:
    """P2. The deltas are to a record of their own request. Story: one that reached the limit with a record to come was
    refused, and one that went beyond it with its last record was taken."""
    changes = [{"id": 1, "n": number % 10} for number in range(count)]
    request = delta(*changes, *more, atomic=True)
    request.payloads = [b'{"id":1,"a":"","n":0}'.replace(b'""', b'"%s"' % (b"x" * (size - 21))), *request.payloads]
    if is_taken:
        assert rig.run(request).applied == 1 + count + len(more)
    else:
        with pytest.raises(StoreError, match="more bytes than the limit of 1000") as caught:
            rig.run(request)
        assert caught.value.reason is Reason.ATOMIC_TOO_LARGE
        assert rig.count("quotes") == 0


def test_records_are_read_for_a_delta_with_one_look_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [{"id": number, "a": 1} for number in range(20)]
    publish(rig, *documents)
    reads: list[int] = []
    multi_get = rig.store._rocks.multi_get

    def counted(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        reads.append(len(keys))
        return multi_get(family, list(keys))

    monkeypatch.setattr(rig.store._rocks, "multi_get", counted)
    monkeypatch.setattr(rig.store._rocks, "get", lambda family, key: pytest.fail("a single read"))
    outcome = rig.run(delta(*documents, *documents))
    assert not any(isinstance(result, Refusal) for result in outcome.results or ())
    assert reads == [20]


def test_damage_met_after_a_commit_was_cut_to_size_is_answered_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """writer [1], writer [5]. The rest that did not fit had gone back to the queue, and was then committed with the
    others besides: its request was answered twice."""
    publish(rig, {"id": 1, "a": "x" * 170}, {"id": 2, "a": "x" * 170})
    multi_get = rig.store._rocks.multi_get

    def damaged(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        if any(key.endswith(b"2") for key in keys):
            raise Damaged("Corruption: block checksum mismatch")
        return multi_get(family, keys)

    monkeypatch.setattr(rig.store._rocks, "multi_get", damaged)
    bad, good = delta({"id": 2, "n": 1}), delta(*[{"id": 1, "n": number} for number in range(4)])
    answers = rig.run_together([bad, good, delta({"id": 1, "m": 1})])  # each is to be answered once
    assert isinstance(answers[0], StoreError)
    assert answers[0].reason is Reason.DATA_DAMAGED
    assert [answer.applied for answer in answers[1:] if isinstance(answer, Outcome)] == [4, 1]
    assert document(rig) == {"id": 1, "a": "x" * 170, "n": 3, "m": 1}
    assert rig.store.writer.queue.depth == (0, 0)
