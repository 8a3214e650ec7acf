"""Settings and policies between messages and the engine: unset is not declared, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from sow.v1 import admin_pb2, types_pb2
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    BacklogAction,
    DurableSettings,
    Expiration,
    MessageType,
    OnMissing,
    TopicSettings,
)
from sow_server.engine.values.policies import Declared, Policies, Policy, PolicyTarget, resolve_topic
from sow_server.services.wire import settings_convert as convert

_numbers = st.integers(1, 2**50)
_maybe = st.none() | st.integers(0, 2**50)
_declared = st.fixed_dictionaries(
    {},
    optional={
        "key": st.sampled_from([("/a",), ("/a", "/b/c")]),
        "expiration": st.sampled_from(Expiration),
        "journal": st.booleans(),
        "retain_time_micros": _maybe,
        "retain_bytes": _maybe,
        "index": st.sampled_from([("/x",), ("/x", "/y")]),
        "backlog_action": st.sampled_from(BacklogAction),
        "publish_is_use": st.booleans(),
        "replicate_durables": st.booleans(),
        "only_if_empty": st.booleans(),
        "auto_delete": st.booleans(),
        "dead_letter": st.just("dlq"),
        "dead_letter_by_key": st.booleans(),
        "on_missing": st.sampled_from(OnMissing),
        **dict.fromkeys(["default_ttl_micros", "min_ttl_micros"], st.integers(0, 2**50)),
        **dict.fromkeys(
            [
                "max_ttl_micros",
                "max_age_micros",
                "max_bytes",
                "max_entries",
                "backlog_ttl_micros",
                "backlog_quota_bytes",
                "backlog_quota_age_micros",
                "durable_idle_ttl_micros",
                "idle_ttl_micros",
            ],
            _numbers,
        ),
    },
)
_typed: st.SearchStrategy[dict[str, object]] = st.one_of(
    st.just({}),
    st.just({"message_type": MessageType.MSGPACK}),
    st.fixed_dictionaries(
        {"message_type": st.sampled_from([MessageType.FIX, MessageType.NVFIX])},
        optional={"separator": st.binary(min_size=1, max_size=1)},
    ),
)


@given(_declared, _typed)
def test_declarations_survive_a_message(declared: dict[str, object], typed: dict[str, object]) -> None:
    """T2: a field that is unset is not declared."""
    given = {**declared, **typed}
    message = admin_pb2.TopicSettings.FromString(convert.settings_message(given).SerializeToString())
    assert convert.settings(message) == given


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "retain_time_micros": _maybe,
            "retain_bytes": _maybe,
            "backlog_ttl_micros": _numbers,
            "idle_ttl_micros": _numbers,
        },
    )
)
def test_declarations_of_a_durable_survive_a_message(declared: dict[str, object]) -> None:
    message = types_pb2.DurableSettings.FromString(convert.durable_settings_message(declared).SerializeToString())
    assert convert.durable_settings(message) == declared


def test_every_setting_of_the_contract_is_one_of_the_engine() -> None:
    """No setting is silently lost."""
    unlimited = {"retain_time_unlimited"}
    assert {field.name for field in admin_pb2.TopicSettings.DESCRIPTOR.fields} - unlimited == set(convert._FIELDS)
    assert {field.name for field in types_pb2.DurableSettings.DESCRIPTOR.fields} - unlimited == set(
        convert._DURABLE_FIELDS
    )
    assert len(convert._FIELDS) == len(TopicSettings._fields)
    assert len(convert._DURABLE_FIELDS) == len(DurableSettings._fields)


def test_minus_one_is_no_limit_and_for_retention_unlimited() -> None:
    message = admin_pb2.TopicSettings(max_bytes=-1, max_entries=-1, backlog_quota_bytes=-1, retain_bytes=-1)
    assert convert.settings(message) == {"retain_bytes": None}


def test_settings_in_force_are_shown_with_every_default() -> None:
    message = convert.settings_message(TopicSettings()._asdict())
    assert message.retain_time == Duration(seconds=600)
    assert message.retain_bytes == 256 * 2**20
    assert message.message_type == admin_pb2.MESSAGE_TYPE_JSON
    assert message.backlog_action == admin_pb2.BACKLOG_ACTION_HOLD
    assert message.on_missing == admin_pb2.ON_MISSING_RETAIN
    assert not message.HasField("max_age")
    assert message.journal


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (admin_pb2.TopicSettings(message_type=99), "settings.message_type"),  # type: ignore[arg-type]  # the point
        (admin_pb2.TopicSettings(expiration=99), "settings.expiration"),  # type: ignore[arg-type]  # the point
        (admin_pb2.TopicSettings(backlog_action=99), "settings.backlog_action"),  # type: ignore[arg-type]  # the point
        (admin_pb2.TopicSettings(on_missing=99), "settings.on_missing"),  # type: ignore[arg-type]  # the point
        (admin_pb2.TopicSettings(fix_separator="€"), "settings.fix_separator"),
        (
            admin_pb2.TopicSettings(retain_time=Duration(seconds=1), retain_time_unlimited=True),
            "settings.retain_time",
        ),
    ],
)
def test_a_message_that_makes_no_sense_is_refused_by_field(message: admin_pb2.TopicSettings, field: str) -> None:
    """X2."""
    with pytest.raises(StoreError) as caught:
        convert.settings(message)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, field)


def test_an_alteration_sets_fields_with_a_value_and_removes_fields_without() -> None:
    """T2: a field that is named and unset is declared no more."""
    before: Declared = {"max_bytes": 5, "retain_time_micros": None, "retain_bytes": 7, "auto_delete": True}
    given: Declared = {"max_bytes": 6, "dead_letter": "dlq", "max_entries": 3}
    after = convert.altered(before, given, ["max_bytes", "retain_time_unlimited", "dead_letter", "auto_delete"])
    assert after == {"max_bytes": 6, "retain_bytes": 7, "dead_letter": "dlq"}
    assert before["max_bytes"] == 5
    with pytest.raises(StoreError) as caught:
        convert.altered(before, given, ["max_byte"])
    assert "there is no setting 'max_byte'" in caught.value.message
    with pytest.raises(StoreError) as caught:
        convert.altered(before, given, [])
    assert caught.value.field == "update_paths"


@pytest.mark.parametrize(
    "given",
    [
        Policy("p", "a.*", {"max_entries": 5, "retain_bytes": None}, priority=-3),
        Policy("o", "a.*", {"max_age_micros": 5}, operator=True),
        Policy("d", "a/.*", {"idle_ttl_micros": 5}, target=PolicyTarget.DURABLES),
    ],
)
def test_a_policy_comes_through_a_message(given: Policy) -> None:
    message = convert.policy_message(given, 7)
    assert message.matches == 7
    assert convert.policy(admin_pb2.Policy.FromString(message.SerializeToString())) == given


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda policy: setattr(policy, "applies_to", 99), "policy.applies_to"),
        (lambda policy: policy.durable.idle_ttl.FromSeconds(1), "policy.durable"),
        (lambda policy: setattr(policy, "applies_to", admin_pb2.POLICY_TARGET_DURABLES), "policy.topic"),
        (lambda policy: setattr(policy.topic, "on_missing", 99), "policy.topic.on_missing"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_by_field(
    change: Callable[[admin_pb2.Policy], None], field: str
) -> None:
    """X2: a policy for topics has no settings of durables, and the other way round."""
    message = convert.policy_message(Policy("p", ".*", {"max_entries": 1}), 0)
    change(message)
    with pytest.raises(StoreError) as caught:
        convert.policy(message)
    assert caught.value.field == field


def test_every_setting_is_shown_with_its_value_and_its_source() -> None:
    """T2: exactly, in the notation of the command line."""
    policies = Policies([Policy("o", ".*", {"max_age_micros": 259_380_500_000}, operator=True)])
    found = convert.effective(resolve_topic("orders", {"retain_bytes": None, "max_bytes": 1025}, policies))
    told = {one.name: (one.value, one.origin) for one in found}
    assert [one.name for one in found][:3] == ["key", "message_type", "expiration"], "as in the contract"
    assert set(told) == set(convert._FIELDS)
    assert told["max_age"] == ("3d3m0.5s", "operator policy o")
    assert told["retain_bytes"] == ("unlimited", "topic")
    assert told["max_bytes"] == ("1025B", "topic")
    assert told["retain_time"] == ("10m", "default")
    assert told["idle_ttl"] == ("never", "default")
    assert told["fix_separator"] == ('"\\u0001"', "default")
