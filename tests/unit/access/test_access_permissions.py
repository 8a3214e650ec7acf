"""Permissions against a naive oracle: deny beats allow, rows add up, hidden fields add up (rules A3 to A5)."""

from __future__ import annotations

import re
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sow_server.access import permissions
from sow_server.access.model import Credential, Grant, Identity, Role
from sow_server.access.needs import GRANTABLE, NEEDS, SERVER_ACTIONS, Action, MissingNeed, Scope, need_of
from sow_server.access.permissions import DENIED, Decision, Permissions
from sow_server.engine.values.patterns import matcher
from sow_server.filters import Filter, Meta, parse
from sow_server.filters.restriction import UNRESTRICTED
from tests.support.oracles.examples import examples
from tests.support.oracles.naive_filter import NaiveFilter

PATTERNS = [".*", "orders", "o.*", "orders|trades", "trade", "", "orders.eu", "(?i)ORDERS", "[a-z]+"]
TOPICS = ["orders", "trades", "xorders", "ordersx", "orders.eu", "ordersxeu", "ORDERS", "orders\n"]
ROWS = [None, None, "/a = 1", "/a = 2", "/b = 1 OR /b = 2", "/a = 1 AND /b = 1", "/a = 1 OR /b = 2"]
HIDE = [("x",), ("y",), ("x", "z")]
RECORDS = [{"a": a, "b": b} for a in (1, 2, 3) for b in (1, 2, 3)]
META = Meta("k", 1, 1, None, "t", 1)

actions = st.frozensets(st.sampled_from(GRANTABLE), max_size=4)


@st.composite
def grants(draw: st.DrawFn) -> Grant:
    topics = draw(st.sampled_from(PATTERNS))
    rows = draw(st.sampled_from(ROWS))
    return Grant(
        f"auth.toml:{draw(st.integers(1, 10**6))}",
        topics,
        matcher(topics),
        draw(actions),
        draw(st.one_of(st.just(frozenset[Action]()), st.just(frozenset[Action]()), actions)),
        None if rows is None else parse(rows),
        draw(st.lists(st.sampled_from(HIDE), max_size=2).map(tuple)),
    )


identities = st.lists(st.lists(grants(), max_size=4), max_size=3).map(
    lambda roles: Identity(
        "desk", Credential(), tuple(Role(f"r{n}", tuple(given), MappingProxyType({})) for n, given in enumerate(roles))
    )
)


def matches(rows: Filter | None, record: dict[str, int]) -> bool:
    return rows is None or NaiveFilter(record, META, []).matches(rows)


class Oracle:
    """The permissions as the rules tell them, without a cache, and record by record."""

    def __init__(self, identity: Identity, action: Action, topic: str) -> None:
        grants = [grant for role in identity.roles for grant in role.grants]
        on_server = action in (Action.OBSERVE, Action.OPERATOR)
        here = [grant for grant in grants if on_server or re.fullmatch(grant.topics, topic)]
        self.denying = [grant for grant in here if action in grant.deny]
        self.allowing = [] if self.denying else [grant for grant in here if action in grant.allow]
        self.allowed = bool(self.allowing)
        self.hidden = set() if on_server else {steps for grant in here for steps in grant.hide}
        self.on_server = on_server

    def permits(self, record: dict[str, int]) -> bool:
        return any(self.on_server or matches(grant.rows, record) for grant in self.allowing)

    @property
    def place(self) -> str:
        if self.denying:
            return self.denying[0].place
        whole = [grant for grant in self.allowing if self.on_server or grant.rows is None]
        return (whole or self.allowing)[0].place if self.allowing else ""


@pytest.mark.slow
@given(identities, st.lists(st.tuples(st.sampled_from(GRANTABLE), st.sampled_from(TOPICS)), min_size=10, max_size=30))
@settings(max_examples=examples(200))
def test_a_decision_is_the_oracles(identity: Identity, questions: list[tuple[Action, str]]) -> None:
    found = Permissions(identity)
    for action, topic in questions:
        oracle = Oracle(identity, action, topic)
        decision = found.decide(action, topic)
        assert (decision.allowed, bool(decision), decision.place) == (oracle.allowed, oracle.allowed, oracle.place)
        if not oracle.allowed:
            assert decision.restriction == UNRESTRICTED
            continue
        assert set(decision.restriction.hidden) == oracle.hidden
        assert list(decision.restriction.hidden) == sorted(decision.restriction.hidden), "equal grants share frames"
        for record in RECORDS:
            assert matches(decision.restriction.rows, record) is oracle.permits(record)
        if decision.restriction.rows is None:
            assert all(map(oracle.permits, RECORDS))


@given(identities)
@settings(max_examples=examples(100))
def test_a_topic_exists_for_whoever_may_do_anything_with_it(identity: Identity) -> None:
    found = Permissions(identity)
    for topic in TOPICS:
        may = [
            action for action in GRANTABLE if action not in SERVER_ACTIONS and Oracle(identity, action, topic).allowed
        ]
        assert found.sees(topic) is bool(may)


@given(identities, st.sampled_from(GRANTABLE), st.sampled_from(TOPICS), st.sampled_from(RECORDS))
@settings(max_examples=examples(200))
def test_the_line_that_decides_about_a_record(
    identity: Identity, action: Action, topic: str, record: dict[str, int]
) -> None:
    """As `sow auth check --record` asks: each of `rows` has its line, and one of them decides."""
    if action in SERVER_ACTIONS:
        return
    found, oracle = Permissions(identity), Oracle(identity, action, topic)
    if not oracle.allowed:
        return
    rows = found.rows(action, topic)
    if found.decide(action, topic).restriction.rows is None:
        assert rows == []
        return
    deciding = [found.place_of(action, topic, one) for one in rows if matches(one, record)]
    assert bool(deciding) is oracle.permits(record)
    assert set(deciding) <= {grant.place for grant in oracle.allowing}


@given(identities)
@settings(max_examples=examples(60))
def test_the_cache_changes_no_answer(identity: Identity) -> None:
    kept = permissions.DECISIONS_KEPT
    permissions.DECISIONS_KEPT = 7  # type: ignore[misc]  # a small one is full soon
    try:
        found = Permissions(identity)
        for _ in range(2):
            for topic in TOPICS:
                for action in GRANTABLE:
                    assert found.decide(action, topic) == Permissions(identity).decide(action, topic)
                    assert found.decide(action, topic) == found.decide(action, topic)
                    assert len(found._decisions) <= 7
    finally:
        permissions.DECISIONS_KEPT = kept  # type: ignore[misc]  # as above


def test_a_caller_that_asks_for_many_topics_fills_no_memory() -> None:
    found = Permissions(Identity("desk", Credential(), ()))
    for number in range(permissions.DECISIONS_KEPT + 10):
        assert found.decide(Action.READ, f"t{number}") == DENIED
    assert len(found._decisions) <= permissions.DECISIONS_KEPT


def test_a_list_of_topics_forgets_no_decision() -> None:
    """A look at a hidden topic took a decision for each action."""
    found = Permissions(Identity("desk", Credential(), ()))
    found.decide(Action.READ, "orders")
    assert not any(found.sees(f"t{number}") for number in range(permissions.DECISIONS_KEPT))
    assert list(found._decisions) == [(Action.READ, "orders")]


def test_a_deny_of_one_role_beats_the_allow_of_another() -> None:
    def role(topics: str, *, allow: frozenset[Action], deny: frozenset[Action]) -> Role:
        return Role(topics, (Grant(topics, topics, matcher(topics), allow, deny, None, ()),), MappingProxyType({}))

    read, nothing = frozenset({Action.READ}), frozenset[Action]()
    allows, denies = role(".*", allow=read, deny=nothing), role("hr.*", allow=nothing, deny=read)
    for roles in ((allows, denies), (denies, allows)):
        found = Permissions(Identity("desk", Credential(), roles))
        assert found.decide(Action.READ, "orders") == Decision(allowed=True, place=".*")
        assert found.decide(Action.READ, "hr.pay") == Decision(allowed=False, place="hr.*")


def test_without_a_role_nothing_is_allowed() -> None:
    found = Permissions(Identity("desk", Credential(), ()))
    assert {found.decide(action, "orders") for action in Action} == {Decision(allowed=False)}


def test_nobody_is_granted_to_be_a_peer() -> None:
    everything = Grant("x", ".*", matcher(".*"), frozenset(GRANTABLE), frozenset(), None, ())
    found = Permissions(Identity("root", Credential(), (Role("root", (everything,), MappingProxyType({})),)))
    assert not found.decide(Action.REPLICATE, "orders")
    assert all(found.decide(action, "orders") for action in GRANTABLE)


# --- the table of needs ----------------------------------------------------------------------------------------------


def test_a_method_without_a_need_is_not_served() -> None:
    with pytest.raises(MissingNeed, match=r"/sow\.v1\.SowService/New is served"):
        need_of("/sow.v1.SowService/New")


def test_the_table_is_consistent() -> None:
    for path, need in NEEDS.items():
        assert need_of(path) is need
        if need.scope in (Scope.OPEN, Scope.TIERED, Scope.KNOWN):
            assert need.action is None, path
        else:
            assert need.action is not None, path
            on_server = need.action in SERVER_ACTIONS or need.action is Action.REPLICATE
            assert (need.scope is Scope.SERVER) is on_server, path
