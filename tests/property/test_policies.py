"""The settings in force equal those that a reader of rule T2 would derive, field by field, with a pencil."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import BacklogAction, Expiration, OnMissing, TopicSettings
from sow_server.engine.values.policies import (
    Declared,
    Policies,
    Policy,
    check_limits_and_values,
    check_policy,
    declared_from_json,
    declared_to_json,
    resolve_topic,
)

NAMES: Final = ("a", "ab", "b")
PATTERNS: Final = ("a", "a.*", ".*", "ab|b", "[ab]", "b")
LIMITS: Final = (
    "max_ttl_micros",
    "idle_ttl_micros",
    "max_age_micros",
    "max_bytes",
    "max_entries",
    "backlog_quota_bytes",
    "backlog_quota_age_micros",
    "backlog_ttl_micros",
    "durable_idle_ttl_micros",
)
PLAIN_VALUES: Final = (
    "backlog_action",
    "publish_is_use",
    "only_if_empty",
    "dead_letter_by_key",
    "on_missing",
    "replicate_durables",
)

_limits: Final[Mapping[str, st.SearchStrategy[object]]] = {field: st.integers(1, 5) for field in LIMITS}
_values: Final[Mapping[str, st.SearchStrategy[object]]] = {
    "expiration": st.sampled_from(Expiration),
    "default_ttl_micros": st.integers(0, 6),
    "min_ttl_micros": st.integers(0, 6),
    "retain_time_micros": st.none() | st.integers(0, 6),
    "retain_bytes": st.none() | st.integers(0, 6),
    "backlog_action": st.sampled_from(BacklogAction),
    "publish_is_use": st.booleans(),
    "replicate_durables": st.booleans(),
    "only_if_empty": st.booleans(),
    "auto_delete": st.booleans(),
    "dead_letter": st.sampled_from(NAMES),
    "dead_letter_by_key": st.booleans(),
    "on_missing": st.sampled_from(OnMissing),
}


def legal(declared: Declared) -> bool:
    try:
        check_limits_and_values(declared)
    except StoreError:
        return False
    return True


declared = st.fixed_dictionaries({}, optional={**_limits, **_values}).filter(legal)
limits_only = st.fixed_dictionaries({}, optional=dict(_limits)).filter(legal)


@st.composite
def policies(draw: st.DrawFn) -> list[Policy]:
    found: list[Policy] = []
    for number in range(draw(st.integers(0, 4))):
        operator = draw(st.booleans())
        sets = draw((limits_only if operator else declared).filter(bool))
        policy = Policy(
            f"p{draw(st.integers(0, 9))}{number}",
            draw(st.sampled_from(PATTERNS)),
            sets,
            priority=draw(st.integers(-1, 1)),
            operator=operator,
        )
        check_policy(policy)
        found.append(policy)
    return found


MATCHED: Final = {"a": {"a"}, "a.*": {"a", "ab"}, ".*": set(NAMES), "ab|b": {"ab", "b"}, "[ab]": {"a", "b"}, "b": {"b"}}


def ranked(given: Sequence[Policy], name: str, *, operator: bool) -> list[Policy]:
    found = [policy for policy in given if policy.operator is operator and name in MATCHED[policy.pattern]]
    found.sort(key=lambda policy: policy.name)
    found.sort(key=lambda policy: len(policy.pattern), reverse=True)
    found.sort(key=lambda policy: policy.priority, reverse=True)
    return found


def naive(
    name: str, own: Declared, given: Sequence[Policy], defaults: Declared, *, in_config: bool
) -> dict[str, object]:
    chain: list[Declared] = [own, *[policy.settings for policy in ranked(given, name, operator=False)], defaults]
    built_in = TopicSettings()._asdict()
    found = dict(built_in)
    for field in PLAIN_VALUES:
        found[field] = next((one[field] for one in chain if field in one), built_in[field])
    found["auto_delete"] = not in_config and next((one["auto_delete"] for one in chain if "auto_delete" in one), False)
    found["dead_letter"] = next((one["dead_letter"] for one in chain if one.get("dead_letter", name) != name), "")
    expiring = next((one for one in chain if "expiration" in one), {})
    found["expiration"] = expiring.get("expiration", Expiration.DISABLED)
    for field in LIMITS:
        bounds = [own.get(field), defaults.get(field)]
        for operator in (False, True):
            setting = [policy for policy in ranked(given, name, operator=operator) if field in policy.settings]
            bounds += [policy.settings[field] for policy in setting[:1]]
        found[field] = min((bound for bound in bounds if isinstance(bound, int)), default=None)
    if in_config:
        found["idle_ttl_micros"] = None
    time, size = (
        [one[field] for one in chain if field in one] + [built_in[field]]
        for field in ("retain_time_micros", "retain_bytes")
    )
    if time[0] == 0 and size[0] != 0:
        time = [value for value in time if value != 0]
    elif size[0] == 0 and time[0] != 0:
        size = [value for value in size if value != 0]
    found["retain_time_micros"], found["retain_bytes"] = time[0], size[0]
    low = next((one["min_ttl_micros"] for one in chain if "min_ttl_micros" in one), None)
    default, high = expiring.get("default_ttl_micros"), found["max_ttl_micros"]
    top = high if isinstance(high, int) else 10**9
    found["min_ttl_micros"] = min(low, top) if isinstance(low, int) else None
    if isinstance(default, int):
        default = max(min(default, top), min(low, top) if isinstance(low, int) else 0)
    found["default_ttl_micros"] = default
    return found


@pytest.mark.slow
@given(st.sampled_from(NAMES), declared, policies(), declared, st.booleans())
def test_settings_in_force_follow_the_rule(
    name: str, own: Declared, given: list[Policy], defaults: Declared, in_config: bool
) -> None:
    """T2, Pulsar 3, RabbitMQ 1, RabbitMQ 5."""
    found = resolve_topic(name, own, Policies(given), defaults, in_config=in_config)
    assert found.settings._asdict() == naive(name, own, given, defaults, in_config=in_config)


@given(st.sampled_from(NAMES), declared, policies(), declared)
def test_each_setting_has_the_value_of_its_source_or_a_limit(
    name: str, own: Declared, given: list[Policy], defaults: Declared
) -> None:
    """T2: `describe` tells where each value comes from."""
    found = resolve_topic(name, own, Policies(given), defaults)
    sources = {"topic": own, **{policy.origin: policy.settings for policy in given}}
    built_in = TopicSettings()._asdict()
    for field, value in found.settings._asdict().items():
        origin = found.origins[field]
        says = {**built_in, **defaults} if origin == "default" else sources[origin]
        if field in ("min_ttl_micros", "default_ttl_micros"):
            assert value in (says.get(field), says.get("max_ttl_micros"), says.get("min_ttl_micros"))
        elif origin == "default":
            assert value in (says[field], built_in[field])  # a zero of retention, or itself as dead letter: built in
        else:
            assert value == says[field]


@given(st.sampled_from(NAMES), declared, policies(), declared)
def test_settings_from_several_places_never_contradict_each_other(
    name: str, own: Declared, given: list[Policy], defaults: Declared
) -> None:
    """policies [3]: what would be refused from one place gives way from several; but a quota may exceed a retention."""
    settings = resolve_topic(name, own, Policies(given), defaults).settings._asdict()
    check_limits_and_values({**settings, "backlog_quota_bytes": None, "backlog_quota_age_micros": None})


@given(declared)
def test_stored_declarations_read_back_as_the_same(own: Declared) -> None:
    assert declared_from_json(declared_to_json(own)) == own
