"""Which settings are in force, and where each comes from (rules T2, L4)."""

from __future__ import annotations

import json
from typing import Final

import pytest

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    BacklogAction,
    DurableSettings,
    Expiration,
    MessageType,
    OnMissing,
    TopicSettings,
)
from sow_server.engine.values.policies import (
    DURABLE_LIMITS,
    LIMITS,
    TOPICS_OWN,
    Declared,
    Policies,
    Policy,
    PolicyTarget,
    check_durable_settings,
    check_limits_and_values,
    check_policy,
    declared_from_json,
    declared_of,
    declared_to_json,
    decode_policy,
    durable_origins,
    encode_policy,
    planned_journal_bytes,
    public_name,
    resolve_durable,
    resolve_topic,
    show,
    tidy,
)

SECOND: Final = 1_000_000
MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE
MIB: Final = 2**20


def policy(name: str, pattern: str = ".*", /, *, priority: int = 0, operator: bool = False, **sets: object) -> Policy:
    return Policy(name, pattern, sets, priority=priority, operator=operator)


def durable_policy(name: str, pattern: str = ".*", /, *, operator: bool = False, **sets: object) -> Policy:
    return Policy(name, pattern, sets, target=PolicyTarget.DURABLES, operator=operator)


def test_a_topic_without_declarations_has_the_built_in_settings() -> None:
    found = resolve_topic("orders", {})
    assert found.settings == TopicSettings()
    assert set(found.origins.values()) == {"default"}
    assert set(found.origins) == set(TopicSettings._fields)


def test_a_value_comes_from_the_topic_then_the_best_policy_then_the_server() -> None:
    """T2, RabbitMQ 1, Pulsar 3: a TTL per topic, per group of topics, and for the whole server."""
    policies = Policies(
        [
            policy("low", expiration=Expiration.ENABLED, default_ttl_micros=HOUR, retain_bytes=MIB),
            policy("high", priority=1, expiration=Expiration.ENABLED, default_ttl_micros=MINUTE),
            policy("other", "quotes", priority=9, retain_bytes=1),
        ]
    )
    defaults: Declared = {"retain_bytes": 2 * MIB, "on_missing": OnMissing.DROP}
    found = resolve_topic("orders", {"dead_letter": "dlq"}, policies, defaults)
    assert (found.settings.default_ttl_micros, found.origins["default_ttl_micros"]) == (MINUTE, "policy high")
    assert (found.settings.retain_bytes, found.origins["retain_bytes"]) == (MIB, "policy low")
    assert (found.settings.on_missing, found.origins["on_missing"]) == (OnMissing.DROP, "default")
    assert (found.settings.dead_letter, found.origins["dead_letter"]) == ("dlq", "topic")
    own: Declared = {"expiration": Expiration.ENABLED, "default_ttl_micros": SECOND}
    found = resolve_topic("orders", own, policies, in_config=True)
    assert (found.settings.default_ttl_micros, found.origins["default_ttl_micros"]) == (SECOND, "config")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (policy("z", ".*", priority=2), policy("a", "orders")),
        (policy("z", "orders"), policy("a", ".*")),
        (policy("a", ".*"), policy("b", ".*")),
    ],
    ids=["priority", "longest pattern", "name"],
)
def test_which_policy_is_the_best(first: Policy, second: Policy) -> None:
    """T2: the highest priority, then the longest pattern, then the name; whatever the order in which they were set."""
    given = [
        Policy(one.name, one.pattern, {"retain_bytes": size}, priority=one.priority)
        for one, size in ((first, 1), (second, 2))
    ]
    for policies in (Policies(given), Policies(reversed(given))):
        assert resolve_topic("orders", {}, policies).settings.retain_bytes == 1


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("orders", "orders", True),
        ("order", "orders", False),
        ("a|orders", "orders", True),
        (r"orders\..*", "orders.eu", True),
        (r"orders\..*", "ordersXeu", False),
        ("a|b", "ab", False),
    ],
)
def test_a_pattern_matches_the_whole_name(pattern: str, name: str, expected: bool) -> None:
    assert policy("p", pattern, retain_bytes=1).matches(name) is expected


@pytest.mark.parametrize(
    ("topic", "user", "operator", "default", "effective", "origin"),
    [
        (5, 6, 7, 8, 5, "topic"),
        (9, 6, 7, 8, 6, "policy u"),
        (9, 8, 7, 8, 7, "operator policy o"),
        (9, 9, 9, 8, 8, "default"),
        (5, 5, 5, 5, 5, "topic"),
        (None, None, 7, None, 7, "operator policy o"),
        (None, None, None, None, None, "default"),
    ],
)
@pytest.mark.parametrize("field", sorted(LIMITS))
def test_the_strictest_limit_counts(
    field: str,
    topic: int | None,
    user: int | None,
    operator: int | None,
    default: int | None,
    effective: int | None,
    origin: str,
) -> None:
    """T2, RabbitMQ 5: the lower wins, and nobody gets past an operator."""

    def sets(value: int | None) -> Declared:
        return {} if value is None else {field: value}

    policies = Policies([Policy("u", ".*", sets(user)), Policy("o", ".*", sets(operator), operator=True)])
    found = resolve_topic("orders", sets(topic), policies, sets(default))
    assert (getattr(found.settings, field), found.origins[field]) == (effective, origin)


def test_a_better_policy_may_be_less_strict_than_a_worse_one() -> None:
    """T2: of policies one counts, the best that sets the limit; so exceptions from a rule for all can be made."""
    policies = Policies([policy("all", max_entries=5), policy("big", "big", max_entries=9)])
    assert resolve_topic("big", {}, policies).settings.max_entries == 9
    assert resolve_topic("small", {}, policies).settings.max_entries == 5


def test_expiration_and_its_default_come_from_one_place() -> None:
    """L1 writes them as one: `enabled` on the topic means no default, whatever a policy says."""
    policies = Policies([policy("p", expiration=Expiration.ENABLED, default_ttl_micros=MINUTE)])
    found = resolve_topic("orders", {"expiration": Expiration.ENABLED}, policies)
    assert (found.settings.default_ttl_micros, found.origins["default_ttl_micros"]) == (None, "topic")


def test_a_topic_that_a_publish_or_an_administrator_has_made_expires_unless_somebody_says_otherwise() -> None:
    """L1, T2."""
    assert resolve_topic("new", {}, expiring=True).settings == TopicSettings(expiration=Expiration.ENABLED)
    policies = Policies([policy("p", expiration=Expiration.ENABLED, default_ttl_micros=MINUTE)])
    assert resolve_topic("new", {}, policies, expiring=True).settings.default_ttl_micros == MINUTE
    defaults: Declared = {"expiration": Expiration.DISABLED}
    assert resolve_topic("new", {}, defaults=defaults, expiring=True).settings.expiration is Expiration.DISABLED


def test_a_maximum_lowers_minimum_and_default_from_elsewhere() -> None:
    """L4, policies [3]: the limit is the limit."""
    own: Declared = {
        "expiration": Expiration.ENABLED,
        "default_ttl_micros": 2 * HOUR,
        "min_ttl_micros": HOUR,
    }
    found = resolve_topic("orders", own, Policies([policy("o", operator=True, max_ttl_micros=MINUTE)]))
    for field in ("max_ttl_micros", "min_ttl_micros", "default_ttl_micros"):
        assert (getattr(found.settings, field), found.origins[field]) == (MINUTE, "operator policy o")


def test_a_minimum_raises_a_default_from_elsewhere() -> None:
    own: Declared = {"expiration": Expiration.ENABLED, "default_ttl_micros": SECOND}
    found = resolve_topic("orders", own, Policies([policy("p", min_ttl_micros=MINUTE)]))
    assert (found.settings.default_ttl_micros, found.origins["default_ttl_micros"]) == (MINUTE, "policy p")


def test_a_topic_that_wants_to_keep_something_does_not_get_one_zero_from_a_policy() -> None:
    """Pulsar 2, policies [3]: retention is never one zero and one not."""
    nothing = Policies([policy("p", retain_time_micros=0, retain_bytes=0)])
    found = resolve_topic("orders", {"retain_bytes": MIB}, nothing)
    assert (found.settings.retain_time_micros, found.settings.retain_bytes) == (600 * SECOND, MIB)
    assert (found.origins["retain_time_micros"], found.origins["retain_bytes"]) == ("default", "topic")
    found = resolve_topic("orders", {}, nothing)
    assert (found.settings.retain_time_micros, found.settings.retain_bytes) == (0, 0)


def test_a_dead_letter_topic_of_a_policy_is_not_its_own() -> None:
    """T3, policies [3]."""
    policies = Policies([policy("all", dead_letter="dlq")])
    assert resolve_topic("orders", {}, policies).settings.dead_letter == "dlq"
    assert resolve_topic("dlq", {}, policies).settings.dead_letter == ""


def test_a_topic_of_the_file_is_not_deleted_for_being_unused() -> None:
    """T1, policies [3]."""
    policies = Policies([policy("p", idle_ttl_micros=HOUR, auto_delete=True)])
    found = resolve_topic("orders", {}, policies, in_config=True).settings
    assert (found.idle_ttl_micros, found.auto_delete) == (None, False)
    found = resolve_topic("orders", {}, policies).settings
    assert (found.idle_ttl_micros, found.auto_delete) == (HOUR, True)


# --- durables --------------------------------------------------------------------------------------------------------


def test_a_durable_takes_the_settings_of_its_topic_by_default() -> None:
    """J3, J8, J10."""
    topic = TopicSettings(
        retain_time_micros=HOUR, retain_bytes=None, backlog_ttl_micros=MINUTE, durable_idle_ttl_micros=2 * HOUR
    )
    assert resolve_durable(topic, "orders", "billing", {}) == DurableSettings(HOUR, None, MINUTE, 2 * HOUR)
    own: Declared = {"retain_time_micros": None, "backlog_ttl_micros": HOUR, "idle_ttl_micros": SECOND}
    assert resolve_durable(topic, "orders", "billing", own) == DurableSettings(None, None, MINUTE, SECOND)


def test_policies_for_durables_go_by_topic_and_name() -> None:
    """FTL 1, RabbitMQ 1, T2."""
    policies = Policies(
        [
            durable_policy("p", "orders/.*", retain_time_micros=HOUR, backlog_ttl_micros=HOUR),
            durable_policy("o", ".*/billing", operator=True, idle_ttl_micros=MINUTE),
            policy("topics", ".*", retain_time_micros=SECOND),
        ]
    )
    found, origins = durable_origins(TopicSettings(), "orders", "billing", {}, policies)
    assert found == DurableSettings(HOUR, 256 * MIB, HOUR, MINUTE)
    assert origins == {
        "retain_time_micros": "policy p",
        "retain_bytes": "topic",
        "backlog_ttl_micros": "policy p",
        "idle_ttl_micros": "operator policy o",
        "delivery_limit": "topic",
        "replicated": "topic",
    }
    assert resolve_durable(TopicSettings(), "quotes", "other", {}, policies) == DurableSettings()


def test_a_durable_that_wants_to_keep_something_does_not_get_one_zero_from_its_topic() -> None:
    """J3."""
    nothing = TopicSettings(retain_time_micros=0, retain_bytes=0)
    found = resolve_durable(nothing, "orders", "billing", {"retain_time_micros": HOUR})
    assert (found.retain_time_micros, found.retain_bytes) == (HOUR, 256 * MIB)


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(declared: Declared) -> StoreError:
    with pytest.raises(StoreError) as caught:
        check_limits_and_values(declared)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    return caught.value


ENABLED: Final[Declared] = {"expiration": Expiration.ENABLED}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"retain_time_micros": 0}, "retain_time: 0s and retain_bytes 256MiB (default) must both be zero"),
        ({"retain_bytes": 0}, "retain_time: 10m (default) and retain_bytes 0B must both be zero"),
        ({"retain_time_micros": 0, "retain_bytes": None}, "retain_time: 0s and retain_bytes unlimited must both be"),
        ({"retain_time_micros": None, "retain_bytes": 0}, "retain_time: unlimited and retain_bytes 0B must both be"),
        ({"retain_time_micros": 0, "retain_bytes": 1025}, "retain_time: 0s and retain_bytes 1025B must both be zero"),
        (
            {"backlog_quota_bytes": 2 * MIB, "retain_bytes": MIB},
            "backlog_quota_bytes: 2MiB is not below retain_bytes, 1MiB",
        ),
        (
            {"backlog_quota_age_micros": HOUR, "retain_time_micros": HOUR},
            "backlog_quota_age: 1h is not below retain_time, 1h",
        ),
        ({"idle_ttl_micros": 0}, "idle_ttl: 0s must be above zero"),
        ({"durable_idle_ttl_micros": 0}, "durable_idle_ttl: 0s must be above zero"),
        ({"max_ttl_micros": 0}, "max_ttl: 0s must be above zero"),
        ({"max_age_micros": 0}, "max_age: 0s must be above zero"),
        ({"max_bytes": 0}, "max_bytes: 0B must be above zero"),
        ({"max_entries": 0}, "max_entries: 0 must be above zero"),
        ({"backlog_ttl_micros": 0}, "backlog_ttl: 0s must be above zero"),
        ({"backlog_quota_bytes": 0}, "backlog_quota_bytes: 0B must be above zero"),
        ({"backlog_quota_age_micros": 0}, "backlog_quota_age: 0s must be above zero"),
        ({"max_bytes": -2}, "max_bytes: -2B is negative"),
        ({"retain_time_micros": -SECOND}, "retain_time: -1s is negative"),
        ({"min_ttl_micros": 2 * SECOND, "max_ttl_micros": 1_500_000}, "min_ttl: 2s is above max_ttl, 1.5s"),
        (
            {**ENABLED, "default_ttl_micros": HOUR + 1, "max_ttl_micros": HOUR},
            "default_ttl: 1h0.000001s is above max_ttl, 1h",
        ),
        ({**ENABLED, "default_ttl_micros": 1, "min_ttl_micros": 2}, "default_ttl: 1µs is below min_ttl, 2µs"),
        ({"default_ttl_micros": SECOND}, "default_ttl: 1s has no meaning with expiration = 'disabled'"),
        ({"dead_letter": "_undelivered"}, "dead_letter: '_undelivered' is no topic name"),
        ({"dead_letter": "a b"}, "dead_letter: 'a b' is no topic name"),
    ],
    ids=str,
)
def test_contradicting_declarations_are_refused_with_both_settings_and_their_values(
    declared: Declared, message: str
) -> None:
    """Pulsar 2, Pulsar 5, RabbitMQ 12, L4, X2: exactly as they are written, Go-style durations and binary sizes."""
    error = refused(declared)
    assert error.message.startswith(message)
    assert error.field == f"settings.{message.partition(':')[0]}"


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"retain_time_micros": 0, "retain_bytes": 0, "backlog_quota_bytes": 1},
        {"retain_time_micros": None, "retain_bytes": None, "backlog_quota_bytes": 1},
        {"retain_time_micros": None, "retain_bytes": MIB},
        {"retain_time_micros": MINUTE, "retain_bytes": None},
        {"backlog_quota_bytes": MIB - 1, "retain_bytes": MIB},
        {"backlog_quota_bytes": 2**40},
        {**ENABLED, "default_ttl_micros": 2, "min_ttl_micros": 2, "max_ttl_micros": 2},
    ],
    ids=str,
)
def test_valid_declarations_pass(declared: Declared) -> None:
    """Pulsar 2, J9: only a retention that is explicit, and that keeps something, bounds a quota."""
    check_limits_and_values(declared)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"idle_ttl_micros": 0}, "idle_ttl: 0s must be above zero"),
        ({"backlog_ttl_micros": -1}, "backlog_ttl: -1µs is negative"),
        ({"retain_bytes": 0, "retain_time_micros": SECOND}, "retain_time: 1s and retain_bytes 0B must both be zero"),
    ],
)
def test_settings_that_a_durable_cannot_declare_are_refused(declared: Declared, message: str) -> None:
    """FTL 1, J3, J10."""
    with pytest.raises(StoreError) as caught:
        check_durable_settings(declared)
    assert caught.value.message.startswith(message)


def test_invalid_policies_are_refused() -> None:
    """T2."""
    for bad, field in (
        (policy("a b", max_bytes=1), "policy.name"),
        (policy("", max_bytes=1), "policy.name"),
        (policy("p", "", max_bytes=1), "policy.pattern"),
        (policy("p", "(", max_bytes=1), "policy.pattern"),
        (policy("p", "a)|(b", max_bytes=1), "policy.pattern"),
        (policy("p", "x" * 1001, max_bytes=1), "policy.pattern"),
        (policy("p"), "policy.topic"),
        (policy("p", idle_ttl_micros=0), "policy.topic.idle_ttl"),
        (durable_policy("p", idle_ttl_micros=0), "policy.durable.idle_ttl"),
        (durable_policy("p", operator=True, retain_bytes=1), "policy.durable.retain_bytes"),
    ):
        with pytest.raises(StoreError) as caught:
            check_policy(bad)
        assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, field)


@pytest.mark.parametrize("field", sorted(TOPICS_OWN))
def test_a_policy_cannot_declare_settings_of_the_topic_itself(field: str) -> None:
    value = getattr(TopicSettings(), field)
    with pytest.raises(StoreError) as caught:
        check_policy(Policy("p", ".*", {field: value}))
    assert caught.value.field == f"policy.topic.{public_name(field)}"
    assert "only on a topic" in caught.value.message


@pytest.mark.parametrize("field", sorted(set(TopicSettings._fields) - TOPICS_OWN))
def test_an_operator_policy_has_limits_only(field: str) -> None:
    """T2, RabbitMQ 1."""
    value = 1 if field in LIMITS else getattr(TopicSettings(), field)
    given = Policy("o", ".*", {field: value}, operator=True)
    if field in LIMITS:
        check_policy(given)
        return
    with pytest.raises(StoreError) as caught:
        check_policy(given)
    assert caught.value.field == f"policy.topic.{public_name(field)}"
    assert "is no limit" in caught.value.message


# --- shown, stored ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("max_ttl_micros", 259_380_500_000, "3d3m0.5s"),
        ("max_ttl_micros", None, "none"),
        ("idle_ttl_micros", None, "never"),
        ("retain_time_micros", None, "unlimited"),
        ("retain_bytes", 256 * MIB, "256MiB"),
        ("retain_bytes", 1025, "1025B"),
        ("max_entries", 1000, "1000"),
        ("max_bytes", None, "unlimited"),
        ("key", ("/a", "/b"), "/a,/b"),
        ("separator", b"\x01", '"\\u0001"'),
        ("journal", True, "true"),
        ("backlog_action", BacklogAction.EVICT, "evict"),
    ],
)
def test_values_are_shown_exactly(field: str, value: object, shown: str) -> None:
    """arrebato 3: Go-style durations, and sizes to the byte."""
    assert show(field, value) == shown


def test_the_storage_to_plan_for() -> None:
    """Pulsar 9: quota and retention, or the hard limit where that is less."""
    settings = TopicSettings(retain_bytes=10, backlog_quota_bytes=5)
    assert planned_journal_bytes(settings) == 15
    assert planned_journal_bytes(settings._replace(max_bytes=12)) == 12
    assert planned_journal_bytes(settings._replace(max_bytes=99)) == 15
    assert planned_journal_bytes(settings._replace(backlog_quota_bytes=None)) is None
    assert planned_journal_bytes(settings._replace(retain_bytes=None)) is None
    assert planned_journal_bytes(settings._replace(retain_bytes=None, max_bytes=12)) == 12
    assert planned_journal_bytes(settings._replace(journal=False)) == 0


def test_a_declaration_reads_back_as_written() -> None:
    declared: Declared = {
        "key": ("/a", "/b"),
        "message_type": MessageType.FIX,
        "separator": b"\xff",
        "expiration": Expiration.REJECT,
        "retain_bytes": None,
        "backlog_action": BacklogAction.CONFLATE,
        "on_missing": OnMissing.DROP,
        "max_entries": 7,
        "auto_delete": True,
    }
    found = declared_from_json(json.loads(json.dumps(declared_to_json(declared))))
    assert found == declared
    assert [type(value) for value in found.values()] == [type(value) for value in declared.values()]


def test_a_policy_is_read_as_it_was_written() -> None:
    given = Policy("p", "a.*", {"idle_ttl_micros": 5}, 3, PolicyTarget.DURABLES, operator=True)
    assert decode_policy("p", encode_policy(given), operator=True) == given


def test_empty_settings_are_not_declared() -> None:
    given: Declared = {"max_bytes": None, "retain_bytes": None, "dead_letter": "", "min_ttl_micros": 0}
    assert tidy(given) == {"retain_bytes": None, "min_ttl_micros": 0}


def test_values_that_are_not_built_in_count_as_declared() -> None:
    settings = TopicSettings(key=("/id",), retain_bytes=None)
    assert declared_of(settings) == {"key": ("/id",), "retain_bytes": None}
    assert resolve_topic("a", declared_of(settings)).settings == settings


def test_every_limit_is_a_setting() -> None:
    assert set(TopicSettings._fields) >= LIMITS | TOPICS_OWN
    assert set(DurableSettings._fields) > DURABLE_LIMITS


def test_policies_are_found_by_name_and_kind() -> None:
    """Policies and operator policies have names of their own each."""
    user, operator = policy("p", max_bytes=1), policy("p", operator=True, max_bytes=2)
    policies = Policies([user, operator])
    assert (policies.find("p", operator=False), policies.find("p", operator=True)) == (user, operator)
    assert list(policies) == [operator, user]
    left = policies.without(user)
    assert list(left) == [operator]
    with pytest.raises(StoreError) as caught:
        left.find("p", operator=False)
    assert caught.value.reason is Reason.POLICY_NOT_FOUND
    changed = policy("p", max_bytes=3)
    assert policies.including(changed).find("p", operator=False) is changed
