"""However many subscribers there are, a change is decoded once, and only filters that it may concern are evaluated
(groups [1] to [3])."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine.formats.json_format import JsonFormat
from sow_server.engine.values.fields import Kind
from sow_server.engine.values.model import NEVER, Publish
from sow_server.filters.tree import Metadata, MetadataName
from sow_server.filters.tree import Path as FieldPath
from sow_server.query.filtering import record_filter
from sow_server.subscriptions.changes import Version
from sow_server.subscriptions.live.matching import FieldIndex, VersionMatcher
from tests.support.stores.stores import Rig
from tests.support.stores.subscribers import JSON, Subscribers, rig

__all__ = ["rig"]  # a fixture


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The filters that are asked, in order."""
    texts: list[str] = []
    holds = VersionMatcher.holds

    def observed(self: VersionMatcher, version: Version) -> bool:
        texts.append(self.text)
        return holds(self, version)

    monkeypatch.setattr(VersionMatcher, "holds", observed)
    return texts


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The payloads that are decoded, in order."""
    payloads: list[bytes] = []
    decode = JsonFormat.decode

    def observed(self: JsonFormat, payload: bytes) -> dict[str, object]:
        payloads.append(payload)
        return decode(self, payload)

    monkeypatch.setattr(JsonFormat, "decode", observed)
    return payloads


def test_equal_filters_are_asked_once_and_a_payload_is_decoded_once(
    rig: Rig, asked: list[str], decoded: list[bytes]
) -> None:
    subscribers = Subscribers(rig)
    followers = [
        subscribers.subscribe("orders", filter=text, oof=oof)
        for text in ("/px > 5", "( /px )>5", "/px > 6")
        for oof in (False, True)
        for _ in range(5)
    ]
    rig.put("orders", "a", b'{"px":6}')
    subscribers.settle()
    assert sorted(asked) == ["/px > 5", "/px > 6"]
    assert decoded == [b'{"px":6}']
    assert sum(len(follower.news()) for follower in followers) == 20


def test_a_replaced_record_is_decoded_only_for_a_filter_that_does_not_match(
    rig: Rig, asked: list[str], decoded: list[bytes]
) -> None:
    rig.put("orders", "a", b'{"px":7}')
    subscribers = Subscribers(rig)
    subscribers.subscribe("orders", filter="/px > 5", oof=True)
    rig.put("orders", "a", b'{"px":8}')
    subscribers.settle()
    assert decoded == [b'{"px":8}']
    rig.put("orders", "a", b'{"px":1}')
    subscribers.settle()
    assert decoded[1:] == [b'{"px":1}', b'{"px":8}']
    assert len(asked) == 3


def test_without_filters_nothing_is_decoded(rig: Rig, decoded: list[bytes]) -> None:
    subscribers = Subscribers(rig)
    follower = subscribers.subscribe("orders", oof=True)
    subscribers.subscribe("orders", filter="@key = 'b'")
    rig.put("orders", "a", b'{"px":7}')
    rig.delete("orders", "a")
    assert len(follower.news()) == 2
    assert decoded == []


@pytest.mark.slow
def test_filters_on_the_values_of_a_field_are_found_by_the_value(rig: Rig, asked: list[str]) -> None:
    """groups [2]."""
    subscribers = Subscribers(rig)
    followers = [subscribers.subscribe("orders", filter=f"/account = 'a{number}'") for number in range(100)]
    rig.put("orders", "x", b'{"account":"a7"}')
    rig.put("orders", "x", b'{"account":"b"}')
    rig.put("orders", "x", b'{"px":1}')
    rig.delete("orders", "x")
    subscribers.settle()
    assert asked == ["/account = 'a7'"]
    assert [len(follower.news()) for follower in followers] == [int(number == 7) for number in range(100)]


def test_a_record_that_leaves_the_value_is_found_by_the_value_it_had(rig: Rig, asked: list[str]) -> None:
    """Its new value leads to other filters, or to none."""
    subscribers = Subscribers(rig)
    followers = [subscribers.subscribe("orders", filter=f"/account = 'a{number}'", oof=True) for number in range(100)]
    rig.put("orders", "x", b'{"account":"a7"}')
    rig.put("orders", "x", b'{"account":"a8"}')
    rig.put("orders", "x", b'{"account":"a9"}')
    rig.put("orders", "x", b"{}")
    subscribers.settle()
    assert [len(follower.news()) for follower in followers[6:11]] == [0, 2, 2, 2, 0]
    assert len(asked) < 20


@pytest.mark.parametrize(
    ("text", "field", "points"),
    [
        ("/a = 'x'", FieldPath(("a",)), {(Kind.TEXT, "x")}),
        ("/a = 1 AND /b > 5", FieldPath(("a",)), {(Kind.NUMBER, 1)}),
        ("/a IN ('x', 'y', 'z') AND /b/c = 'w'", FieldPath(("b", "c")), {(Kind.TEXT, "w")}),
        ("@key = 'k'", Metadata(MetadataName.KEY), {(Kind.TEXT, "k")}),
        ("/a = 'x' OR /a = true", FieldPath(("a",)), {(Kind.TEXT, "x"), (Kind.BOOLEAN, True)}),
    ],
)
def test_the_narrowest_field_is_chosen(rig: Rig, text: str, field: object, points: set[object]) -> None:
    found = VersionMatcher(record_filter(rig.topic("orders"), text, 0)).points(())
    assert found is not None
    assert (found[0], set(found[1])) == (field, points)


@pytest.mark.parametrize(
    "text", ["/a > 5", "/a = 1 OR /b = 1", "NOT /a = 1", "/a BEGINS WITH 'x'", "@topic = 'orders'"]
)
def test_other_filters_are_asked_one_by_one(rig: Rig, text: str) -> None:
    assert VersionMatcher(record_filter(rig.topic("orders"), text, 0)).points(()) is None


def test_a_filter_that_nothing_can_match_is_never_asked(rig: Rig, asked: list[str]) -> None:
    subscribers = Subscribers(rig)
    follower = subscribers.subscribe("orders", filter="/a > 5 AND false", oof=True)
    rig.put("orders", "x", b'{"a":6}')
    assert follower.news() == []
    assert asked == []


def test_filters_that_no_value_can_match_come_and_go(rig: Rig) -> None:
    """A field with no points at all: the second of two to go found no table of it, and was never forgotten."""
    subscribers = Subscribers(rig)
    followers = [subscribers.subscribe("orders", filter=text) for text in ("/a IN (NULL)", "/a IN (NULL) AND /b = 1")]
    rig.put("orders", "x", b'{"a":null,"b":1}')
    assert [follower.news() for follower in followers] == [[], []]
    for follower in followers:
        follower.close()
    assert subscribers.hub.count == 0


scalars = st.one_of(st.sampled_from(["x", "1", "1.0", "true", ""]), st.integers(-1, 2), st.booleans(), st.just(1.0))
values = st.one_of(scalars, st.none(), st.lists(scalars, max_size=3))


@pytest.mark.slow
@given(documents=st.lists(st.dictionaries(st.sampled_from(["a", "b"]), values), max_size=8), keyed=st.booleans())
def test_the_index_finds_every_filter_that_matches(
    tmp_path_factory: pytest.TempPathFactory, documents: list[dict[str, object]], keyed: bool
) -> None:
    """matching [2] and groups [2]: also of arrays, numeric texts, and key fields, which compare by their texts."""
    import json

    rig = _rig(tmp_path_factory)
    topic = rig.topic("keyed" if keyed else "orders")
    texts = [
        f"/{field} {test}"
        for field in ("a", "b")
        for test in ("= 'x'", "= 1", "= '1'", "= true", "= 'true'", "IN (1, 'x')", "= ''", "= 2")
    ]
    index: FieldIndex[str] = FieldIndex()
    matchers = {text: VersionMatcher(record_filter(topic, text, 0)) for text in texts}
    for text, matcher in matchers.items():
        found = matcher.points(topic.key_paths)
        assert found is not None
        index.add(*found, text)
    for document in documents:
        version = Version(topic, b"k", json.dumps(document).encode(), 1, 1, NEVER, 0, 1)
        candidates = index.candidates(version)
        assert len(candidates) == len(set(candidates))
        assert {text for text, matcher in matchers.items() if matcher.holds(version)} <= set(candidates)
    for text, matcher in matchers.items():
        found = matcher.points(topic.key_paths)
        assert found is not None
        index.remove(*found, text)
    assert not index


_rigs: list[Rig] = []


def _rig(factory: pytest.TempPathFactory) -> Rig:
    """One for all examples: its topics are only looked at."""
    if not _rigs:
        rig = Rig(factory.mktemp("groups"))
        rig.create_topic("orders", JSON)
        rig.create_topic("keyed", JSON._replace(key=("/a",)))
        _rigs.append(rig)
    return _rigs[0]


def test_slices_let_others_have_their_turn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """dispatch [3]."""
    subscribers = Subscribers(rig)
    follower = subscribers.subscribe("orders")
    monkeypatch.setattr("sow_server.subscriptions.live.slices.SLICE_CHANGES", 100)
    rig.run(Publish("orders", [b"{}"] * 1000, [str(number) for number in range(1000)]))
    subscribers.loop.turn()  # hears of the commit
    turns = 1  # a slice of it at once
    while subscribers.loop.turn():
        turns += 1
        assert len(follower.changes()) <= 100 * turns
        follower.pump()
    assert turns >= 10
    assert [row.sequence for row in follower.changes()] == list(range(1, 1001))


def test_a_fault_while_dispatching_ends_only_the_followers_of_the_topic(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.create_topic("others", JSON)
    subscribers = Subscribers(rig)
    one, other = subscribers.subscribe("orders", filter="/a > 1"), subscribers.subscribe("others", filter="/a > 1")
    holds = VersionMatcher.holds

    def broken(self: VersionMatcher, version: Version) -> bool:
        if version.topic.name == "orders":
            raise ZeroDivisionError
        return holds(self, version)

    monkeypatch.setattr(VersionMatcher, "holds", broken)
    rig.put("orders", "a", b'{"a":2}')
    rig.put("others", "a", b'{"a":2}')
    assert one.news() == []
    assert one.error is not None
    assert one.error.reason.name == "INTERNAL"
    assert len(other.news()) == 1
    assert subscribers.hub.dispatcher.position == 2
