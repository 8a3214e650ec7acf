"""Pure: which settings are in force on a topic or a durable, and where each of them comes from (rules T2, L4).

A topic, a policy and the server's defaults each *declare* some settings. The settings in force are resolved from them.

    [1]  A value comes from the topic, else from the best policy that declares it, else from the server's defaults, else
         it is built in. The best policy has the highest priority, then the longest pattern, then the first name.
    [2]  A limit is the strictest of four: the topic's, the best policy's and the best operator policy's (each the best
         that declares it), and the server's default.
    [3]  A contradiction within one declaration is refused when it is declared (`check_settings`). A contradiction
         between two sources is settled here: the maximum lifetime wins over a minimum or default; one zero of retention
         gives way to the next source that is not zero; a topic is never its own dead-letter topic; a topic of the
         configuration file is not deleted when idle.

`expiration` and `default_ttl` are one value (rule L1 writes them as one), and so come from one source.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from sow.durations import format_micros
from sow.sizes import format_bytes
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import TOPIC_NAME
from sow_server.engine.values.model import (
    TTL_MAX_MICROS,
    BacklogAction,
    DurableSettings,
    Expiration,
    MessageType,
    OnMissing,
    TopicSettings,
)
from sow_server.engine.values.patterns import PatternError, matcher

Declared: TypeAlias = Mapping[str, object]
"""Declared settings, by the names and with the values of the fields of `TopicSettings`, or of `DurableSettings`. None
is a value of `retain_*` and `delivery_limit` only: unlimited."""

NOTHING: Final[Declared] = MappingProxyType({})
BUILT_IN: Final = TopicSettings()

LIMITS: Final = frozenset(
    {
        "max_ttl_micros",
        "idle_ttl_micros",
        "max_age_micros",
        "max_bytes",
        "max_entries",
        "backlog_quota_bytes",
        "backlog_quota_age_micros",
        "backlog_quota_entries",
        "backlog_ttl_micros",
        "durable_idle_ttl_micros",
        "max_records",
        "max_stored_bytes",
    }
)
"""Settings of topics for which the strictest declaration counts. Each is a number above zero, or None."""
CAPS: Final = ("max_records", "max_stored_bytes")
"""Those of the content (rule T6)."""
TOPICS_OWN: Final = frozenset({"key", "message_type", "journal", "separator", "index"})
"""Settings that only a topic itself can declare."""
DURABLE_LIMITS: Final = frozenset({"backlog_ttl_micros", "idle_ttl_micros"})
"""As `LIMITS`, of durables."""
UNUSED_DELETES: Final = frozenset({"idle_ttl_micros", "auto_delete"})
"""The setting that deletes an unused topic; never one of the configuration file (rule T1)."""
PATTERN_LENGTH_MAX: Final = 1000
_RETAINED: Final = ("retain_time_micros", "retain_bytes")
_UNLIMITABLE: Final = frozenset({*_RETAINED, "delivery_limit"})
"""Values that may be declared unlimited, against a policy or a default that bounds them."""
_ENUMS: Final[Mapping[str, type[enum.StrEnum]]] = MappingProxyType(
    {
        "message_type": MessageType,
        "expiration": Expiration,
        "backlog_action": BacklogAction,
        "on_missing": OnMissing,
    }
)
_ABSENT: Final = MappingProxyType(
    {
        **dict.fromkeys((*_UNLIMITABLE, "max_age_micros", "max_bytes", "max_entries", *CAPS), "unlimited"),
        **dict.fromkeys(("default_ttl_micros", "backlog_ttl_micros", "durable_idle_ttl_micros"), "never"),
        "idle_ttl_micros": "never",
    }
)
_SHOWN_NAMES: Final = MappingProxyType({"separator": "fix_separator"})


class PolicyTarget(enum.StrEnum):
    """The kind of object to which a policy applies."""

    TOPICS = "topics"
    DURABLES = "durables"


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings for all topics, or for all durables as `topic/name`, whose whole name matches (rule T2)."""

    name: str
    pattern: str
    settings: Declared
    priority: int = 0
    target: PolicyTarget = PolicyTarget.TOPICS
    operator: bool = False

    def __hash__(self) -> int:
        return hash((self.operator, self.name))

    @property
    def origin(self) -> str:
        """The name of the policy in the output of `describe`."""
        return f"operator policy {self.name}" if self.operator else f"policy {self.name}"

    def matches(self, name: str) -> bool:
        """True if the policy applies to the object called `name`."""
        return _matcher(self.pattern)(name)

    @property
    def rank(self) -> tuple[int, int, str]:
        """Orders policies, the best first ([1])."""
        return -self.priority, -len(self.pattern), self.name


class Policies:
    """All policies at one moment; unchanging."""

    __slots__ = ("_all", "_by_target")

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        self._all = {(policy.operator, policy.name): policy for policy in policies}
        ranked = sorted(self._all.values(), key=lambda policy: policy.rank)
        self._by_target = {
            target: (
                tuple([policy for policy in ranked if policy.target is target and not policy.operator]),
                tuple([policy for policy in ranked if policy.target is target and policy.operator]),
            )
            for target in PolicyTarget
        }

    def __iter__(self) -> Iterator[Policy]:
        """Operator policies first, then by rank."""
        return iter(sorted(self._all.values(), key=lambda policy: (not policy.operator, policy.rank)))

    def __len__(self) -> int:
        return len(self._all)

    def find(self, name: str, *, operator: bool) -> Policy:
        """The policy, or operator policy, of that name. Raises StoreError POLICY_NOT_FOUND."""
        found = self._all.get((operator, name))
        if found is None:
            kind = "operator policy" if operator else "policy"
            raise StoreError(Reason.POLICY_NOT_FOUND, f"name: there is no {kind} {name[:220]!r}", field="name")
        return found

    def including(self, policy: Policy) -> Policies:
        """These and `policy`, which replaces the one of its name."""
        return Policies({**self._all, (policy.operator, policy.name): policy}.values())

    def without(self, policy: Policy) -> Policies:
        """All but `policy`."""
        return Policies([other for other in self._all.values() if other is not policy])

    def of(self, target: PolicyTarget) -> list[Policy]:
        """Those that apply to `target`."""
        return [policy for policy in self if policy.target is target]

    def matching(self, target: PolicyTarget, name: str) -> tuple[list[Policy], list[Policy]]:
        """(policies, operator policies) that apply to `name`, the best first."""
        policies, operators = self._by_target[target]
        return [one for one in policies if one.matches(name)], [one for one in operators if one.matches(name)]


NO_POLICIES: Final = Policies()


class Effective(NamedTuple):
    """The settings in force, and by field the source of each: `topic`, `config`, `policy NAME`, `operator policy NAME`
    or `default`."""

    settings: TopicSettings
    origins: Mapping[str, str]


class _Source(NamedTuple):
    origin: str
    declared: Declared


class _Picked(NamedTuple):
    value: object
    origin: str


def resolve_topic(
    name: str,
    declared: Declared,
    policies: Policies = NO_POLICIES,
    defaults: Declared = NOTHING,
    *,
    in_config: bool = False,
    expiring: bool = False,
) -> Effective:
    """The settings in force on the topic `name` that declares `declared`; `defaults` are the server's.

    `expiring`: expiration is enabled unless it is declared otherwise (rule L1).
    """
    users, operators = policies.matching(PolicyTarget.TOPICS, name)
    own = _Source("config" if in_config else "topic", declared)
    last = _Source("default", {"expiration": Expiration.ENABLED, **defaults} if expiring else defaults)
    sources = [own, *[_Source(policy.origin, policy.settings) for policy in users], last]
    bounding = [_Source(policy.origin, policy.settings) for policy in operators]

    picked = dict(_ALL_BUILT_IN)
    mentioned = {field for source in (*sources, *bounding) for field in source.declared}
    for field in mentioned:
        if in_config and field in UNUSED_DELETES:
            continue
        if field in LIMITS:
            picked[field] = _strictest(field, sources, bounding)
        elif field == "dead_letter":
            picked[field] = _first(field, sources, lambda target: target != name)
        elif field != "default_ttl_micros":
            picked[field] = _first(field, [own] if field in TOPICS_OWN else sources)
    if "expiration" in mentioned:
        picked["default_ttl_micros"] = _default_ttl(sources)
    _reconcile_retention(picked, sources)
    _reconcile_ttls(picked)
    settings = TopicSettings(*[one.value for one in picked.values()])  # type: ignore[arg-type]  # in order of its fields
    return Effective(settings, {field: one.origin for field, one in picked.items()})


def resolve_durable(
    topic_settings: TopicSettings, topic_name: str, durable_name: str, own: Declared, policies: Policies = NO_POLICIES
) -> DurableSettings:
    """The settings in force on a durable, see `durable_origins`."""
    return durable_origins(topic_settings, topic_name, durable_name, own, policies)[0]


def durable_origins(
    topic_settings: TopicSettings, topic_name: str, durable_name: str, own: Declared, policies: Policies = NO_POLICIES
) -> tuple[DurableSettings, Mapping[str, str]]:
    """The settings in force on a durable that declares `own`, on a topic with `topic_settings` in force; and the source
    of each, as in `Effective`, except that `durable` is the durable itself and `topic` its topic's settings in force.

    A value is its own, else that of the best policy for durables, else its topic's. A limit is the strictest of these
    and the operator policies'. Patterns are matched with `topic/name`.
    """
    users, operators = policies.matching(PolicyTarget.DURABLES, f"{topic_name}/{durable_name}")
    topics = _Source(
        "topic",
        {
            "retain_time_micros": topic_settings.retain_time_micros,
            "retain_bytes": topic_settings.retain_bytes,
            "backlog_ttl_micros": topic_settings.backlog_ttl_micros,
            "idle_ttl_micros": topic_settings.durable_idle_ttl_micros,
            "delivery_limit": topic_settings.delivery_limit,
            "replicated": topic_settings.replicate_durables,
        },
    )
    sources = [_Source("durable", own), *[_Source(policy.origin, policy.settings) for policy in users], topics]
    bounding = [_Source(policy.origin, policy.settings) for policy in operators]
    picked = {
        field: _strictest(field, sources, bounding) if field in DURABLE_LIMITS else _first(field, sources)
        for field in DurableSettings._fields
    }
    _reconcile_retention(picked, sources)
    settings = DurableSettings(**{field: one.value for field, one in picked.items()})  # type: ignore[arg-type]  # as above
    return settings, {field: one.origin for field, one in picked.items()}


def planned_journal_bytes(settings: TopicSettings) -> int | None:
    """The bytes of journal to plan storage for (rule T2): the retained bytes plus the backlog that durables may leave,
    or the hard limit if that is less. None: there is no bound."""
    if not settings.journal:
        return 0
    retained, backlog = settings.retain_bytes, settings.backlog_quota_bytes
    planned = None if retained is None or backlog is None else retained + backlog
    if settings.max_bytes is None:
        return planned
    return settings.max_bytes if planned is None else min(planned, settings.max_bytes)


def warnings(settings: TopicSettings | DurableSettings) -> list[str]:
    """Warnings about settings that are allowed but probably not intended. The server gives them to the caller who sets
    them, and at its start (rule J17)."""
    if settings.retain_bytes is not None:
        return []
    if isinstance(settings, TopicSettings) and (settings.max_bytes is not None or not settings.journal):
        return []
    time = settings.retain_time_micros
    kept = "everything" if time is None else f"all changes younger than {format_micros(time)}"
    return [f"retain_bytes: is unlimited, so the journal keeps {kept}, however large; set retain_bytes or max_bytes"]


def declared_warnings(policy: Policy) -> list[str]:
    """As `warnings`, of the settings that a policy declares."""
    if policy.target is PolicyTarget.TOPICS:
        return warnings(TopicSettings(**policy.settings))  # type: ignore[arg-type]  # declared are values of its fields
    return warnings(DurableSettings(**policy.settings))  # type: ignore[arg-type]  # likewise


_ALL_BUILT_IN: Final = {field: _Picked(value, "default") for field, value in BUILT_IN._asdict().items()}
"""In the order of the fields of `TopicSettings`."""


def _first(
    field: str, sources: Sequence[_Source], acceptable: Callable[[object], bool] = lambda value: True
) -> _Picked:
    """The value of the first source that declares an acceptable one ([1])."""
    for origin, declared in sources:
        if field in declared and acceptable(declared[field]):
            return _Picked(declared[field], origin)
    return _ALL_BUILT_IN[field]


def _strictest(field: str, sources: Sequence[_Source], bounding: Sequence[_Source]) -> _Picked:
    """The lowest value that the topic, the best policy, the best operator policy or the defaults declare; the first of
    equal ones ([2])."""
    own, *users, last = sources
    candidates: list[tuple[int, str]] = []
    for group in ([own], users, bounding, [last]):
        for origin, declared in group:
            value = declared.get(field)
            if isinstance(value, int):
                candidates.append((value, origin))
                break
    if not candidates:
        return _Picked(None, "default")
    return _Picked(*min(candidates, key=lambda candidate: candidate[0]))


def _default_ttl(sources: Sequence[_Source]) -> _Picked:
    """The default lifetime, by the source of `expiration`."""
    origin, declared = next(source for source in sources if "expiration" in source.declared)
    return _Picked(declared.get("default_ttl_micros"), origin)


def _reconcile_retention(picked: dict[str, _Picked], sources: Sequence[_Source]) -> None:
    """One zero beside a value of another source does not mean to keep nothing: that other source wants to keep
    something."""
    time, size = picked["retain_time_micros"], picked["retain_bytes"]
    if (time.value == 0) != (size.value == 0):
        zero = "retain_time_micros" if time.value == 0 else "retain_bytes"
        picked[zero] = _first(zero, sources, lambda value: value != 0)


def _reconcile_ttls(picked: dict[str, _Picked]) -> None:
    """The maximum is a limit: higher values are lowered to it. Then the default is raised to the minimum (rule L4)."""
    high = picked["max_ttl_micros"]
    for field in ("min_ttl_micros", "default_ttl_micros"):
        value = picked[field].value
        if isinstance(value, int) and isinstance(high.value, int) and value > high.value:
            picked[field] = high
    low, default = picked["min_ttl_micros"], picked["default_ttl_micros"].value
    if isinstance(default, int) and isinstance(low.value, int) and default < low.value:
        picked["default_ttl_micros"] = low


# --- checks of declarations ------------------------------------------------------------------------------------------


def tidy(declared: Declared) -> Declared:
    """The declared settings without the empty ones: None where it is no value, and an empty dead-letter topic."""
    return {
        field: value
        for field, value in declared.items()
        if (value is not None or field in _UNLIMITABLE) and (field, value) != ("dead_letter", "")
    }


def declared_of(settings: TopicSettings) -> Declared:
    """The declaration that leads to `settings`: every value that is not built in."""
    return {field: value for field, value in settings._asdict().items() if value != getattr(BUILT_IN, field)}


def public_name(field: str) -> str:
    """The name of a setting in the contract and in messages: without its unit."""
    return _SHOWN_NAMES.get(field, field.removesuffix("_micros"))


def show(field: str, value: object) -> str:
    """A value of a setting in the form of the command line: a duration, a size, a word."""
    if value is None:
        return _ABSENT.get(field, "none")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if field.endswith("_micros"):
            return format_micros(value)
        return format_bytes(value) if field.endswith("bytes") else str(value)
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bytes):
        return json.dumps(value.decode("latin-1"))
    return str(value)


def check_limits_and_values(declared: Declared, *, where: str = "settings") -> None:
    """Checks the settings that a topic, a policy and the server's defaults may all declare. Raises StoreError
    INVALID_ARGUMENT for settings out of range or in contradiction, with their names and values (rule X2)."""
    for field in ("default_ttl_micros", "min_ttl_micros", "max_ttl_micros"):
        ttl = _number(declared, field)
        if ttl is not None and not 0 <= ttl <= TTL_MAX_MICROS:
            raise refusal(where, field, f"{show(field, ttl)} is not between 0s and ten years")
    for field in (*sorted(LIMITS), *_RETAINED):
        _check_sign(declared, field, where, zero_allowed=field not in LIMITS)
    _check_sign(declared, "delivery_limit", where, zero_allowed=False)
    expiration = declared.get("expiration", BUILT_IN.expiration)
    default = _number(declared, "default_ttl_micros")
    if default is not None and expiration is not Expiration.ENABLED:
        raise refusal(
            where,
            "default_ttl_micros",
            f"{show('default_ttl_micros', default)} has no meaning with expiration = {str(expiration)!r}",
        )
    for low, high in (
        ("min_ttl_micros", "max_ttl_micros"),
        ("default_ttl_micros", "max_ttl_micros"),
        ("min_ttl_micros", "default_ttl_micros"),
    ):
        below, above = _number(declared, low), _number(declared, high)
        if below is not None and above is not None and below > above:
            if high == "default_ttl_micros":  # the default is at fault
                raise refusal(where, high, f"{show(high, above)} is below {public_name(low)}, {show(low, below)}")
            raise refusal(where, low, f"{show(low, below)} is above {public_name(high)}, {show(high, above)}")
    _check_retention(declared, where)
    for quota, retained in (
        ("backlog_quota_bytes", "retain_bytes"),
        ("backlog_quota_age_micros", "retain_time_micros"),
    ):
        most, least = _number(declared, quota), _number(declared, retained)
        if most is not None and least is not None and 0 < least <= most:
            raise refusal(
                where,
                quota,
                f"{show(quota, most)} is not below {public_name(retained)}, {show(retained, least)} (rule J9)",
            )
    target = declared.get("dead_letter", "")
    if target and (not TOPIC_NAME.match(str(target)) or str(target).startswith("_")):
        raise refusal(where, "dead_letter", f"{str(target)[:220]!r} is no topic name")


def check_durable_settings(declared: Declared, *, where: str = "settings") -> None:
    """As `check_limits_and_values`, for settings of durables."""
    for field in (*sorted(DURABLE_LIMITS), *_RETAINED):
        _check_sign(declared, field, where, zero_allowed=field not in DURABLE_LIMITS)
    _check_sign(declared, "delivery_limit", where, zero_allowed=False)
    _check_retention(declared, where)


def check_policy(policy: Policy) -> None:
    """Checks the name, the pattern and the settings of a policy. Raises StoreError INVALID_ARGUMENT."""
    if not TOPIC_NAME.match(policy.name):
        raise StoreError(
            Reason.INVALID_ARGUMENT,
            f"name: {policy.name[:220]!r} is no name of a policy: 1 to 200 of [A-Za-z0-9_.:-] are allowed",
            field="policy.name",
        )
    if not policy.pattern or len(policy.pattern) > PATTERN_LENGTH_MAX:
        message = f"pattern: has {len(policy.pattern)} characters, 1 to {PATTERN_LENGTH_MAX} are allowed"
        raise StoreError(Reason.INVALID_ARGUMENT, message, field="policy.pattern")
    try:
        _matcher(policy.pattern)
    except PatternError as error:
        raise StoreError(
            Reason.INVALID_ARGUMENT, f"pattern: {policy.pattern!r} is not valid: {error}", field="policy.pattern"
        ) from None
    where = "policy.topic" if policy.target is PolicyTarget.TOPICS else "policy.durable"
    limits = LIMITS if policy.target is PolicyTarget.TOPICS else DURABLE_LIMITS
    if not policy.settings:
        raise StoreError(Reason.INVALID_ARGUMENT, "policy: sets nothing", field=where)
    for field, value in policy.settings.items():
        if field in TOPICS_OWN:
            raise refusal(where, field, f"{show(field, value)} cannot be set by a policy, only on a topic")
        if policy.operator and field not in limits:
            known = ", ".join(sorted(map(public_name, limits)))
            raise refusal(
                where, field, f"{show(field, value)} is no limit; an operator policy may set limits only: {known}"
            )
    if policy.target is PolicyTarget.TOPICS:
        check_limits_and_values(policy.settings, where=where)
    else:
        check_durable_settings(policy.settings, where=where)


def refusal(where: str, field: str, message: str) -> StoreError:
    """INVALID_ARGUMENT about a setting, with its name in the contract."""
    name = public_name(field)
    return StoreError(Reason.INVALID_ARGUMENT, f"{name}: {message}", field=f"{where}.{name}")


def _number(declared: Declared, field: str) -> int | None:
    value = declared.get(field)
    return value if isinstance(value, int) else None


def _check_sign(declared: Declared, field: str, where: str, *, zero_allowed: bool) -> None:
    value = _number(declared, field)
    if value is not None and value < 0:
        raise refusal(where, field, f"{show(field, value)} is negative")
    if value == 0 and not zero_allowed:
        raise refusal(where, field, f"{show(field, value)} must be above zero: leave it out where there is no limit")


def _check_retention(declared: Declared, where: str) -> None:
    time, size = (declared.get(field, getattr(BUILT_IN, field)) for field in _RETAINED)
    if (time == 0) != (size == 0):
        shown = " and ".join(
            f"{'' if field == 'retain_time_micros' else 'retain_bytes '}{show(field, value)}"
            f"{'' if field in declared else ' (default)'}"
            for field, value in zip(_RETAINED, (time, size), strict=True)
        )
        raise refusal(where, "retain_time_micros", f"{shown} must both be zero (keep nothing) or neither (rule J3)")


@lru_cache(maxsize=4096)
def _matcher(pattern: str) -> Callable[[str], bool]:
    return matcher(pattern)


# --- stored ----------------------------------------------------------------------------------------------------------


def declared_to_json(declared: Declared) -> dict[str, object]:
    """The declaration as a JSON object, by the names of the fields."""
    return {field: value.decode("latin-1") if isinstance(value, bytes) else value for field, value in declared.items()}


def declared_from_json(fields: Mapping[str, object]) -> Declared:
    """The declaration in a stored JSON object."""
    declared: dict[str, object] = {}
    for field, value in fields.items():
        if field in _ENUMS:
            declared[field] = _ENUMS[field](str(value))
        elif isinstance(value, list):
            declared[field] = tuple(value)
        elif field == "separator":
            declared[field] = str(value).encode("latin-1")
        else:
            declared[field] = value
    return declared


def encode_policy(policy: Policy) -> bytes:
    """A policy's row; its name and kind are in the row's key."""
    return json.dumps(
        {
            "pattern": policy.pattern,
            "priority": policy.priority,
            "target": policy.target,
            "settings": declared_to_json(policy.settings),
        }
    ).encode()


def decode_policy(name: str, row: bytes, *, operator: bool) -> Policy:
    """The policy of a row."""
    fields = json.loads(row)
    return Policy(
        name,
        fields["pattern"],
        declared_from_json(fields["settings"]),
        priority=fields["priority"],
        target=PolicyTarget(fields["target"]),
        operator=operator,
    )
