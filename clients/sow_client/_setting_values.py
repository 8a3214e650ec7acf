"""Settings of topics and durable subscriptions as a program gives them, in one normal form (rule T2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Final, Literal, TypeAlias, TypedDict

from sow.durations import format_micros
from sow.sizes import SizeError, parse_bytes
from sow_client._payloads import MessageTypeName
from sow_client._records import NEVER, Count, Size, Ttl, invalid, ttl_micros

SettingValue: TypeAlias = str | int | bool
"""A setting of a policy: a duration such as "1h", a word, a number, or yes or no."""


BacklogActionName: TypeAlias = Literal["hold", "reject", "evict", "conflate"]
"""The action when a topic's unacknowledged entries exceed its quota. Rule: J9."""

OnMissingName: TypeAlias = Literal["retain", "drop"]
"""The treatment of a dead letter whose target topic does not exist. Rule: T3."""

UNLIMITED: Final = -1
"""No limit, as a number of bytes or entries, or as `retain_time`. The text "unlimited" means the same."""


class TopicSettingsArguments(TypedDict, total=False):
    """The settings of a topic as keyword arguments; see `TopicSettings`. `default_ttl`: `expiration` as a duration."""

    key: tuple[str, ...] | list[str]
    message_type: MessageTypeName
    expiration: Ttl | None
    default_ttl: Ttl | None
    min_ttl: Ttl | None
    max_ttl: Ttl | None
    journal: bool
    fix_separator: str
    retain_time: Ttl | None
    retain_bytes: Size | None
    index: tuple[str, ...] | list[str]
    max_age: Ttl | None
    max_bytes: Size | None
    max_entries: Count | None
    backlog_ttl: Ttl | None
    backlog_quota_bytes: Size | None
    backlog_quota_age: Ttl | None
    backlog_quota_entries: Count | None
    backlog_action: BacklogActionName | None
    delivery_limit: Count | None
    durable_idle_ttl: Ttl | None
    idle_ttl: Ttl | None
    publish_is_use: bool | None
    only_if_empty: bool | None
    auto_delete: bool | None
    dead_letter: str
    dead_letter_by_key: bool | None
    on_missing: OnMissingName | None
    replicate_durables: bool | None
    max_records: Count | None
    max_stored_bytes: Size | None


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """Settings of a topic. However they were given, durations are kept in one notation ("1h30m"), sizes as bytes.

    A setting that is not set (None, unless its line says otherwise) takes its value from a policy that matches the
    topic, else from the server's defaults.

    Rule: T2.
    """

    key: tuple[str, ...] | list[str] = ()
    """Key paths such as "/carrier"; empty: publishers supply the key. Rule: K3."""
    message_type: MessageTypeName = "json"
    """Encoding of the payloads. Rule: K2."""
    expiration: Ttl | None = None
    """ "disabled", "enabled", "reject", or the duration that records without a lifetime get. None: "enabled", unless a
    policy or the server's defaults say otherwise. Rules: L1, L3."""
    min_ttl: Ttl | None = None
    """Shorter lifetimes are raised to it. None: no bound. Rule: L4."""
    max_ttl: Ttl | None = None
    """Longer lifetimes, and never, are lowered to it. None: no bound. Rule: L4."""
    journal: bool = True
    """False: changes are not journaled. Rule: J1."""
    fix_separator: str = "\x01"
    """Field separator of fix and nvfix, one byte as text."""
    retain_time: Ttl | None = None
    """Journal entries are kept at least this long; "unlimited" is legal. Rule: J3."""
    retain_bytes: Size | None = None
    """Bytes of journal to keep at least; with `retain_time`, whichever is reached first. -1: unlimited."""
    index: tuple[str, ...] | list[str] = ()
    """Paths with a secondary index each, such as "/symbol". Rule: Q3."""
    max_age: Ttl | None = None
    """Journal entries of this age are discarded, acknowledged or not. Rule: J3."""
    max_bytes: Size | None = None
    """Journal bytes beyond this are discarded, oldest first. -1: no limit."""
    max_entries: Count | None = None
    """Journal entries beyond this are discarded, oldest first. -1: no limit."""
    backlog_ttl: Ttl | None = None
    """An entry that a durable leaves unacknowledged for this long counts as acknowledged. Rule: J8."""
    backlog_quota_bytes: Size | None = None
    """Bytes that the slowest durable may leave unacknowledged. -1: no quota. Rule: J9."""
    backlog_quota_age: Ttl | None = None
    """Age that the oldest unacknowledged entry may have. Rule: J9."""
    backlog_quota_entries: Count | None = None
    """Entries that the slowest durable may leave unacknowledged. -1: no quota. Rule: J9."""
    backlog_action: BacklogActionName | None = None
    """The action beyond the quota; "hold" by default. Rule: J9."""
    delivery_limit: Count | None = None
    """How often an entry is handed to consumers of a durable before it is set aside. -1: unlimited. Rule: J15."""
    durable_idle_ttl: Ttl | None = None
    """A durable that is neither attached nor acknowledges for this long is removed. Rule: J10."""
    idle_ttl: Ttl | None = None
    """The topic is deleted when it was not used for this long. Rule: T1."""
    publish_is_use: bool | None = None
    """True: a publish is a use of the topic, too. Rule: T1."""
    only_if_empty: bool | None = None
    """True: the topic is deleted for being unused only while it has no live records. Rule: T1."""
    auto_delete: bool | None = None
    """True: the topic is deleted when its last subscriber leaves. Rule: T1."""
    dead_letter: str = ""
    """The topic to which expired records are copied. Empty: none, unless a policy sets one. Rule: T3."""
    dead_letter_by_key: bool | None = None
    """True: a dead letter has the key that the record had, not topic|key|version. Rule: T3."""
    on_missing: OnMissingName | None = None
    """The treatment of dead letters while their target does not exist; "retain" by default. Rule: T3."""
    replicate_durables: bool | None = None
    """True: its durables are known at the peers, too. Rule: F14."""
    max_records: Count | None = None
    """A publish that would add a record beyond this number is refused (TOPIC_FULL). -1: no limit. Rule: T6."""
    max_stored_bytes: Size | None = None
    """The same for bytes of the keys and payloads of the records. -1: no limit. Rule: T6."""

    def __post_init__(self) -> None:
        _normalise(self)

    def named(self) -> frozenset[str]:
        """Names of the settings that differ from the defaults."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != f.default)


_DURATION_WORDS: Mapping[str, frozenset[str]] = {
    "expiration": frozenset({"disabled", "enabled", "reject"}),
    "min_ttl": frozenset(),
    "max_ttl": frozenset(),
    "retain_time": frozenset({"unlimited"}),
    "max_age": frozenset(),
    "backlog_ttl": frozenset(),
    "backlog_quota_age": frozenset(),
    "durable_idle_ttl": frozenset(),
    "idle_ttl": frozenset(),
}


class DurableSettingsArguments(TypedDict, total=False):
    """The settings of a durable subscription as keyword arguments; see `DurableSettings`."""

    retain_time: Ttl | None
    retain_bytes: Size | None
    backlog_ttl: Ttl | None
    idle_ttl: Ttl | None
    delivery_limit: Count | None
    replicated: bool | None


@dataclass(frozen=True, slots=True)
class DurableSettings:
    """Settings of a durable subscription. None: those of its topic, or of a policy. Durations are kept in one notation.

    The names mean the same as in `TopicSettings`, for one durable.
    """

    retain_time: Ttl | None = None
    """The time for which a rewind can reach acknowledged entries; "unlimited": while the topic keeps them. Rule: J3."""
    retain_bytes: Size | None = None
    """Bytes of acknowledged entries that a rewind can reach. -1: unlimited."""
    backlog_ttl: Ttl | None = None
    """An entry that is unacknowledged for this long counts as acknowledged. Rule: J8."""
    idle_ttl: Ttl | None = None
    """Removed when neither attached nor acknowledging for this long. Rule: J10."""
    delivery_limit: Count | None = None
    """How often an entry is handed over before it is set aside. -1: unlimited. Rule: J15."""
    replicated: bool | None = None
    """True: it is known at the peers, too, so that a consumer goes on there. Rule: F14."""

    def __post_init__(self) -> None:
        _normalise(self)


_FLAGS: Final = frozenset(
    {
        "journal",
        "publish_is_use",
        "only_if_empty",
        "auto_delete",
        "dead_letter_by_key",
        "replicate_durables",
        "replicated",
    },
)
_TEXTS: Final = frozenset({"message_type", "fix_separator", "backlog_action", "dead_letter", "on_missing"})


def _normalise(settings: TopicSettings | DurableSettings) -> None:
    """Brings each setting into its normal form. Raises InvalidArgument with the first one of a wrong kind."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is not None:
            object.__setattr__(settings, field.name, _normal(field.name, value))


def _normal(name: str, value: object) -> object:
    if name in ("key", "index"):
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise invalid(name, 'must be a list of paths, such as ["/id"]')
        paths = tuple(value)
        for path in paths:
            if not isinstance(path, str):
                raise invalid(name, f"has a {type(path).__name__} among its paths")
        return paths
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise invalid(name, f"{value!r} is neither True nor False")
        return value
    if name in _TEXTS:
        if not isinstance(value, str):
            raise invalid(name, f"a {type(value).__name__} is not text")
        return value
    if name in _DURATION_WORDS:
        return _normal_duration(name, value)
    return _normal_number(name, value)


def _normal_duration(name: str, value: object) -> str:
    if isinstance(value, str) and value in _DURATION_WORDS[name]:
        return value
    if value is NEVER or value in ("never", "unlimited") or (type(value) is int and value == UNLIMITED):
        if "unlimited" in _DURATION_WORDS[name]:
            return "unlimited"
        raise invalid(name, f"{value!r} is not a duration; None leaves it out")
    if not isinstance(value, str | timedelta | int | float):
        raise invalid(name, f"a {type(value).__name__} is not a duration such as '10m', a timedelta, or seconds")
    return format_micros(ttl_micros(value, name))


def _normal_number(name: str, value: object) -> int:
    is_size = name.endswith("_bytes")
    if isinstance(value, str):
        if value == "unlimited":
            return UNLIMITED
        if is_size:
            try:
                value = parse_bytes(value)
            except SizeError as error:
                raise invalid(name, str(error)) from error
    if isinstance(value, bool) or not isinstance(value, int):
        wanted = "a number of bytes, text such as '64MiB'" if is_size else "a number"
        raise invalid(name, f"{value!r} is not {wanted} or UNLIMITED")
    if not UNLIMITED <= value < 2**63:
        raise invalid(name, f"{value} is out of range; UNLIMITED is {UNLIMITED}")
    return value
