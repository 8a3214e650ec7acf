"""Settings of topics and durable subscriptions, to and from the wire. Pure.

A setting that is absent on the wire is not set: a policy or the server's default applies (rule T2). Zero is a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast, get_args

from google.protobuf import duration_pb2

from sow.durations import format_micros
from sow.v1 import admin_pb2, types_pb2
from sow_client._payloads import MessageTypeName, PayloadForm
from sow_client._records import Ttl, form_of, invalid, ttl_micros
from sow_client._setting_values import (
    BacklogActionName,
    DurableSettings,
    DurableSettingsArguments,
    OnMissingName,
    SettingValue,
    TopicSettings,
    TopicSettingsArguments,
)
from sow_client.errors import InvalidArgument

_Name = TypeVar("_Name", bound=str)
_Number = TypeVar("_Number", bound=int)

_DURATIONS: Final = (
    "min_ttl",
    "max_ttl",
    "max_age",
    "backlog_ttl",
    "backlog_quota_age",
    "durable_idle_ttl",
    "idle_ttl",
)
_NUMBERS: Final = (
    "retain_bytes",
    "max_bytes",
    "max_entries",
    "backlog_quota_bytes",
    "backlog_quota_entries",
    "delivery_limit",
    "max_records",
    "max_stored_bytes",
)
_FLAGS: Final = (
    "journal",
    "publish_is_use",
    "only_if_empty",
    "auto_delete",
    "dead_letter_by_key",
    "replicate_durables",
)
_TEXTS: Final = ("fix_separator", "dead_letter")
_LISTS: Final = ("key", "index")

PATHS: Final[Mapping[str, tuple[str, ...]]] = {name: (name,) for name in TopicSettings.__dataclass_fields__} | {
    # One knob for people, two fields on the wire: "30s" is ENABLED with a default.
    "expiration": ("expiration", "default_ttl"),
    "retain_time": ("retain_time", "retain_time_unlimited"),
}
"""The fields on the wire of each setting."""

NOT_IN_POLICIES: Final = frozenset({"key", "message_type", "journal", "fix_separator", "index"})
"""Settings that define a topic; a policy cannot set them."""

_EXPIRATIONS: Final[Mapping[str, admin_pb2.Expiration.ValueType]] = {
    "disabled": admin_pb2.EXPIRATION_DISABLED,
    "enabled": admin_pb2.EXPIRATION_ENABLED,
    "reject": admin_pb2.EXPIRATION_REJECT,
}
_MESSAGE_TYPES: Final[Mapping[MessageTypeName, admin_pb2.MessageType.ValueType]] = {
    "json": admin_pb2.MESSAGE_TYPE_JSON,
    "msgpack": admin_pb2.MESSAGE_TYPE_MSGPACK,
    "fix": admin_pb2.MESSAGE_TYPE_FIX,
    "nvfix": admin_pb2.MESSAGE_TYPE_NVFIX,
    "binary": admin_pb2.MESSAGE_TYPE_BINARY,
}
_NAMES: Final[Mapping[int, str]] = {number: name for name, number in _MESSAGE_TYPES.items()}
_BACKLOG_ACTIONS: Final[Mapping[BacklogActionName, admin_pb2.BacklogAction.ValueType]] = {
    "hold": admin_pb2.BACKLOG_ACTION_HOLD,
    "reject": admin_pb2.BACKLOG_ACTION_REJECT,
    "evict": admin_pb2.BACKLOG_ACTION_EVICT,
    "conflate": admin_pb2.BACKLOG_ACTION_CONFLATE,
}
_ON_MISSING: Final[Mapping[OnMissingName, admin_pb2.OnMissing.ValueType]] = {
    "retain": admin_pb2.ON_MISSING_RETAIN,
    "drop": admin_pb2.ON_MISSING_DROP,
}


# ---- of topics ----


def form_of_settings(message: admin_pb2.TopicSettings) -> PayloadForm:
    """The form of the payloads of a topic."""
    return form_of(_NAMES.get(message.message_type, ""), message.fix_separator)


def topic_settings(arguments: TopicSettingsArguments) -> TopicSettings:
    """Settings from keyword arguments, where None means "not set"; an unknown name is refused."""
    arguments = one_expiration(arguments)
    unknown = arguments.keys() - PATHS.keys()
    if unknown:
        raise _no_setting("a topic", min(unknown), [*PATHS, "default_ttl"])
    given = {name: value for name, value in arguments.items() if value is not None}
    return TopicSettings(**cast(dict[str, Any], given))


def _no_setting(owner: str, name: str, known: Sequence[str]) -> InvalidArgument:
    """The error of a name that is no setting, with the one that it may mean, or with all."""
    import difflib

    near = ["default_ttl"] if name == "ttl" else difflib.get_close_matches(name, known, n=1)
    meant = [one for one in near if one in known]
    told = f"did you mean {meant[0]}?" if meant else f"they are {', '.join(known)}"
    return invalid(name, f"is not a setting of {owner}; {told}")


def one_expiration(arguments: TopicSettingsArguments) -> TopicSettingsArguments:
    """The settings with `default_ttl`, the configuration file's name, as `expiration`."""
    if "default_ttl" not in arguments:
        return arguments
    rest = arguments.copy()
    ttl = rest.pop("default_ttl")
    if rest.get("expiration", "enabled") not in ("enabled", None):
        raise invalid("default_ttl", f"contradicts expiration {rest.get('expiration')!r}; it needs 'enabled'")
    if ttl is None:
        rest.setdefault("expiration", None)
    else:
        ttl_micros(ttl, "default_ttl")
        rest["expiration"] = ttl
    return rest


def topic_message(values: TopicSettings, named: Iterable[str]) -> admin_pb2.TopicSettings:
    """The settings that are `named`; the others stay unset."""
    paths = frozenset(named)
    result = admin_pb2.TopicSettings()
    for name in paths.intersection(_LISTS):
        getattr(result, name).extend(getattr(values, name))
    for name in paths.intersection(_TEXTS):
        setattr(result, name, getattr(values, name))
    for name in paths.intersection(_DURATIONS):
        _assign(getattr(result, name), getattr(values, name), name)
    for name in paths.intersection(_NUMBERS + _FLAGS):
        value = getattr(values, name)
        if value is not None:
            setattr(result, name, value)
    if "message_type" in paths:
        result.message_type = _named("message_type", values.message_type, _MESSAGE_TYPES)
    if "backlog_action" in paths and values.backlog_action is not None:
        result.backlog_action = _named("backlog_action", values.backlog_action, _BACKLOG_ACTIONS)
    if "on_missing" in paths and values.on_missing is not None:
        result.on_missing = _named("on_missing", values.on_missing, _ON_MISSING)
    if "expiration" in paths:
        word = _EXPIRATIONS.get(values.expiration) if isinstance(values.expiration, str) else None
        result.expiration = admin_pb2.EXPIRATION_ENABLED if word is None else word
        if word is None:
            _assign(result.default_ttl, values.expiration, "expiration")
    if "retain_time" in paths:
        _assign_retain_time(result, values.retain_time)
    return result


def topic_values(message: admin_pb2.TopicSettings) -> dict[str, SettingValue | tuple[str, ...]]:
    """The settings that are set, by name, as `topic_settings` takes them."""
    result: dict[str, SettingValue | tuple[str, ...]] = {}
    for name in _LISTS:
        if paths := tuple(getattr(message, name)):
            result[name] = paths
    for name in _TEXTS:
        if text := getattr(message, name):
            result[name] = text
    for name in _DURATIONS:
        if message.HasField(name):  # type: ignore[arg-type]  # the stubs want a literal
            result[name] = _text(getattr(message, name))
    for name in _NUMBERS + _FLAGS:
        if message.HasField(name):  # type: ignore[arg-type]  # likewise
            result[name] = getattr(message, name)
    _put_word(result, "message_type", message.message_type, _MESSAGE_TYPES)
    _put_word(result, "backlog_action", message.backlog_action, _BACKLOG_ACTIONS)
    _put_word(result, "on_missing", message.on_missing, _ON_MISSING)
    _put_word(result, "expiration", message.expiration, _EXPIRATIONS)
    if message.HasField("default_ttl") and message.expiration == admin_pb2.EXPIRATION_ENABLED:
        result["expiration"] = _text(message.default_ttl)
    _put_retain_time(result, message)
    return result


def settings_of(message: admin_pb2.TopicSettings) -> TopicSettings:
    """The settings of a topic as the server has it."""
    return TopicSettings(**cast(dict[str, Any], topic_values(message)))


# ---- of durables ----


def durable_settings(arguments: DurableSettingsArguments) -> DurableSettings:
    """Settings from keyword arguments; an unknown name is refused."""
    unknown = arguments.keys() - DurableSettings.__dataclass_fields__.keys()
    if unknown:
        raise _no_setting("a durable subscription", min(unknown), list(DurableSettings.__dataclass_fields__))
    return DurableSettings(**arguments)


def durable_message(values: DurableSettings) -> types_pb2.DurableSettings:
    """The settings that are not None."""
    result = types_pb2.DurableSettings(
        # Numbers by now, however they were given.
        retain_bytes=cast(int | None, values.retain_bytes),
        delivery_limit=cast(int | None, values.delivery_limit),
        replicated=values.replicated,
    )
    _assign(result.backlog_ttl, values.backlog_ttl, "backlog_ttl")
    _assign(result.idle_ttl, values.idle_ttl, "idle_ttl")
    _assign_retain_time(result, values.retain_time)
    return result


def durable_values(message: types_pb2.DurableSettings) -> dict[str, SettingValue]:
    """The settings that are set, by name, as `durable_settings` takes them."""
    result: dict[str, SettingValue] = {}
    if message.HasField("retain_bytes"):
        result["retain_bytes"] = message.retain_bytes
    if message.HasField("backlog_ttl"):
        result["backlog_ttl"] = _text(message.backlog_ttl)
    if message.HasField("idle_ttl"):
        result["idle_ttl"] = _text(message.idle_ttl)
    if message.HasField("delivery_limit"):
        result["delivery_limit"] = message.delivery_limit
    if message.HasField("replicated"):
        result["replicated"] = message.replicated
    _put_retain_time(result, message)
    return result


def durable_settings_of(message: types_pb2.DurableSettings) -> DurableSettings:
    """The settings of a durable subscription as the server has it."""
    return DurableSettings(**cast(DurableSettingsArguments, durable_values(message)))


# ---- inside ----


def _assign(target: duration_pb2.Duration, value: Ttl | None, field: str) -> None:
    if value is None:
        return
    try:
        target.FromMicroseconds(ttl_micros(value, field))
    except ValueError as error:  # protobuf's Duration ends at about 10,000 years
        raise invalid(field, f"{value!r} is too long", reason="LIFETIME_TOO_LONG") from error
    target.SetInParent()  # a zero duration is not an unset one


def _assign_retain_time(target: admin_pb2.TopicSettings | types_pb2.DurableSettings, value: Ttl | None) -> None:
    if value == "unlimited":
        target.retain_time_unlimited = True
    else:
        _assign(target.retain_time, value, "retain_time")


def _put_retain_time(
    result: dict[str, SettingValue] | dict[str, SettingValue | tuple[str, ...]],
    message: admin_pb2.TopicSettings | types_pb2.DurableSettings,
) -> None:
    if message.retain_time_unlimited:
        result["retain_time"] = "unlimited"
    elif message.HasField("retain_time"):
        result["retain_time"] = _text(message.retain_time)


def _text(duration: duration_pb2.Duration) -> str:
    return format_micros(duration.ToMicroseconds())


def _named(field: str, name: _Name, numbers: Mapping[_Name, _Number]) -> _Number:
    number = numbers.get(name)
    if number is None:
        raise invalid(field, f"{name!r} is not one of {', '.join(numbers)}")
    return number


def _put_word(
    result: dict[str, SettingValue | tuple[str, ...]], field: str, number: int, numbers: Mapping[_Name, int]
) -> None:
    for name, value in numbers.items():
        if value == number:
            result[field] = str(name)


assert set(PATHS) == {
    *_DURATIONS, *_NUMBERS, *_FLAGS, *_TEXTS, *_LISTS,
    "message_type", "backlog_action", "on_missing", "expiration", "retain_time",
}, "every setting has its way to the wire"  # fmt: skip
assert get_args(MessageTypeName) == tuple(_MESSAGE_TYPES), "every type has its number"
