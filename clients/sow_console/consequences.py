"""The consequences of a change of a topic's setting, as far as a server can count them exactly.

[1]  A number that is told was counted by the server a moment ago. Where it can tell none, no number is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sow_client import AsyncClient, Durable, InvalidArgument, NotFound, PermissionDenied, SowError, Topic, TopicSettings
from sow_console import texts

COUNTED_MAX: Final = 1_000_000
"""In a topic of more records none are counted for a preview."""
FLAGS: Final = frozenset(
    {"journal", "publish_is_use", "only_if_empty", "auto_delete", "dead_letter_by_key", "replicate_durables"}
)
LISTS: Final = frozenset({"key", "index"})
UNCHANGEABLE: Final = frozenset({"key", "message_type", "fix_separator"})
"""These change only while the topic is empty."""
HINTS: Final = {
    "key": "paths such as /id; none: each publish gives the key",
    "message_type": "json, msgpack, fix, nvfix, binary",
    "expiration": "disabled, enabled, reject, or a lifetime such as 20m",
    "index": "paths such as /symbol /account; none",
    "dead_letter": "a topic; none",
    "backlog_action": "hold, reject, evict, conflate; none",
    "on_missing": "retain, drop; none",
}
SETTINGS: Final = frozenset(one.name for one in dataclasses.fields(TopicSettings)) | {"default_ttl"}
_NONE: Final = "none"


def hint(setting: str) -> str:
    """The values that may be given."""
    if setting in HINTS:
        return HINTS[setting]
    if setting in FLAGS:
        return "yes or no"
    if setting.endswith("_bytes"):
        return "a size such as 256MiB; unlimited; none"
    if setting.endswith(("_entries", "_limit")):
        return "a number; unlimited; none"
    return "a duration such as 20m or 7d; none"


def parsed(setting: str, text: str) -> Any:  # of the type that the setting has
    """The value for `alter_topic`; None: the setting is no longer declared. Raises InvalidArgument."""
    if setting not in SETTINGS:
        raise InvalidArgument(
            f"there is no setting {setting!r}", reason="INVALID_ARGUMENT", details={"field": "setting"}
        )
    value: object = text
    if setting in FLAGS:
        if text not in ("yes", "no", "true", "false"):
            raise InvalidArgument("is neither yes nor no", reason="INVALID_ARGUMENT", details={"field": setting})
        return text in ("yes", "true")
    if setting in LISTS:
        return () if text == _NONE else tuple(text.split())
    if text == _NONE:
        return "" if setting == "dead_letter" else None
    if (setting.endswith(("_bytes", "_entries", "_limit", "_records"))) and text.isdecimal():
        value = int(text)
    settings = TopicSettings(**{"expiration" if setting == "default_ttl" else setting: value})  # type: ignore[arg-type]  # one of its fields
    return getattr(settings, "expiration" if setting == "default_ttl" else setting)


def words(topic: str, setting: str, value: object) -> list[str]:
    """The arguments of `sow` that do it."""
    option = "--" + setting.replace("_", "-")
    if isinstance(value, bool):
        return ["topic", "alter", topic, option if value else "--no-" + option[2:]]
    if isinstance(value, tuple):
        return ["topic", "alter", topic, *[part for path in value or (_NONE,) for part in (option, path)]]
    text = _NONE if value in (None, "") else "unlimited" if value == -1 else str(value)
    if setting.endswith("_bytes") and isinstance(value, int) and value >= 0:
        text = f"{value}B"
    return ["topic", "alter", topic, option, text]


async def follows(client: AsyncClient, topic: Topic, setting: str, value: object, now: datetime) -> list[str]:
    """Sentences."""
    told = _Telling(client, topic, now)
    if setting in ("expiration", "default_ttl", "min_ttl", "max_ttl"):
        return await told.lifetimes(setting, value)
    if setting in ("retain_time", "retain_bytes", "max_age", "max_bytes", "max_entries", "journal"):
        return await told.journal(setting, value)
    if setting in ("backlog_ttl", "durable_idle_ttl", "delivery_limit") or setting.startswith("backlog_quota"):
        return await told.durables(setting, value)
    if setting == "index":
        return told.index(value)
    if setting in ("max_records", "max_stored_bytes"):
        return told.caps(setting, value)
    if setting in ("dead_letter", "dead_letter_by_key", "on_missing"):
        return await told.letters(setting, value)
    if setting in ("idle_ttl", "auto_delete"):
        return ["The topic is deleted with its records and journal once the condition holds."] if value else []
    return []


class _Telling:
    """Asks for the numbers."""

    def __init__(self, client: AsyncClient, topic: Topic, now: datetime) -> None:
        self._client = client
        self._topic = topic
        self._now = now
        self._live = topic.statistics.live_records if topic.statistics else 0

    async def lifetimes(self, setting: str, value: object) -> list[str]:
        live, was = f"{self._live:,}", str(self._topic.settings.expiration)
        name = self._topic.name
        if setting == "expiration" and value in ("disabled", "reject"):
            told = [] if was in ("disabled", "reject") else ["Records that are overdue now expire first."]
            number = await self._count("@expire_time IS NOT NULL")
            if number is not None:
                told.append(f"{number:,} records that have a lifetime do not expire any more.")
            if value == "reject":
                told.append("Records that are published with a lifetime are refused from now on.")
            return told
        told = []
        if setting == "expiration" and was in ("disabled", "reject"):
            number = await self._count("@expire_time <= NOW_MICROS()")
            if number is not None:
                told.append(f"{number:,} records whose lifetime is over expire at once.")
        told.append(f"The {live} records that are there keep their expire times (rule L12).")
        length = texts.length(str(value))
        if length is not None and setting in ("max_ttl", "min_ttl"):
            edge = f"NOW_MICROS() + {length // timedelta(microseconds=1)}"
            filter_text = f"@expire_time > {edge}" if setting == "max_ttl" else f"@expire_time < {edge}"
            number = await self._count(filter_text)
            never = await self._count("@expire_time IS NULL") if setting == "max_ttl" else 0
            if number is not None and never is not None:
                more = f", and {never:,} never expire" if never else ""
                told.append(
                    f"{number:,} of them have more left than new ones will get{more}."
                    if setting == "max_ttl"
                    else f"{number:,} of them have less left than new ones will get."
                )
            if setting == "max_ttl":
                told.append(f"To lower those, too: sow topic restamp {name} --cap {value}")
        elif length is not None:
            number = await self._count("@expire_time IS NULL")
            if number is not None:
                told.append(f"{number:,} of them never expire; new records without a lifetime live for {value}.")
        return told

    async def journal(self, setting: str, value: object) -> list[str]:
        figures = self._topic.statistics
        if figures is None:
            return []
        durables = await self._durables()
        told = [f"The journal has {figures.journal_entries:,} changes, {texts.size(figures.journal_bytes)}."]
        if setting == "journal":
            if value is False:
                told.append("Subscriptions cannot resume, and there is no history of a key any more.")
            return told
        if setting == "max_entries" and isinstance(value, int) and value >= 0:
            gone = max(0, figures.journal_entries - value)
            told.append(f"{gone:,} of them are discarded with the next pruning, acknowledged or not.")
        elif setting == "max_bytes" and isinstance(value, int) and value >= 0:
            gone = max(0, figures.journal_bytes - value)
            told.append(f"{texts.size(gone)} of them are discarded with the next pruning, acknowledged or not.")
        elif setting == "max_age" and value is not None:
            told.append(f"Changes older than {value} are discarded, acknowledged or not.")
        else:
            told.append("Changes beyond the retention are discarded once every durable has acknowledged them.")
        if setting.startswith("max_") and durables:
            behind = [one.name for one in durables if one.figures and one.figures.unacknowledged_entries]
            if behind:
                told.append(f"Durables with a backlog may get a gap: {', '.join(behind)}.")
        return told

    async def durables(self, setting: str, value: object) -> list[str]:
        durables = await self._durables()
        if durables is None:
            return []
        if not durables:
            return ["The topic has no durables now."]
        over: list[str] = []
        length = texts.length(str(value))
        if length is not None and setting == "durable_idle_ttl":
            idle = [one.name for one in durables if not one.attached and self._now - one.last_use_time >= length]
            return [
                f"Removed with the next look at idle ones: {', '.join(idle)}." if idle else "None is idle for so long."
            ]
        if length is not None:
            over = [
                one.name for one in durables
                if one.figures and one.figures.oldest_unacknowledged_age
                and one.figures.oldest_unacknowledged_age > length
            ]  # fmt: skip
        elif setting == "backlog_quota_bytes" and isinstance(value, int) and value >= 0:
            over = [one.name for one in durables if one.figures and one.figures.unacknowledged_bytes > value]
        elif setting == "backlog_quota_entries" and isinstance(value, int) and value >= 0:
            over = [one.name for one in durables if one.figures and one.figures.unacknowledged_entries > value]
        else:
            return [f"It counts for {len(durables):,} durables from now on."]
        if not over:
            return [f"None of the {len(durables):,} durables is beyond it now."]
        if setting == "backlog_ttl":
            return [f"Entries older than {value} count as acknowledged at once in: {', '.join(over)}."]
        action = self._topic.settings.backlog_action or "hold"
        effect = {
            "hold": "publishes wait", "reject": "publishes are refused",
            "evict": "the oldest entries are evicted", "conflate": "the backlog is replaced by a snapshot",
        }[action]  # fmt: skip
        return [f"Beyond it now: {', '.join(over)}. So {effect} at once ({action})."]

    def caps(self, setting: str, value: object) -> list[str]:
        figures = self._topic.statistics
        if figures is None:
            return []
        of_records = setting == "max_records"
        stored = figures.live_records + figures.overdue_records if of_records else figures.stored_bytes
        shown = f"{stored:,} records" if of_records else texts.size(stored)
        told = [f"The topic has {shown} now; none is removed."]
        if not isinstance(value, int) or value < 0:
            told.append("Publishes may add any number of them.")
        elif stored > value:
            told.append("That is more than this: publishes that add are refused at once (TOPIC_FULL).")
        else:
            told.append("Publishes that add beyond it are refused (TOPIC_FULL).")
        return told

    def index(self, value: object) -> list[str]:
        wanted = set(value) if isinstance(value, tuple) else set()
        there = {one.path for one in self._topic.indexes}
        told = []
        if built := sorted(wanted - there):
            told.append(f"{', '.join(built)}: built in the background from {self._live:,} records.")
        if gone := sorted(there - wanted):
            told.append(f"{', '.join(gone)}: dropped. Queries by it read every record.")
        return told or ["The indexes stay as they are."]

    async def letters(self, setting: str, value: object) -> list[str]:
        if setting != "dead_letter":
            return ["It counts for records that expire from now on."]
        if not value:
            return ["Records that expire from now on are gone. Letters that are there stay."]
        told = ["Records that expire from now on are copied there."]
        target = None
        try:
            target = await self._client.describe_topic(str(value))
        except (NotFound, PermissionDenied):
            pass
        except SowError as error:
            return [*told, f"It is not known whether {value} can take them: {error.message}"]
        if target is None:
            told.append(f"{value} does not exist, or you may not see it: letters wait in _undelivered until it does.")
        elif target.settings.key:
            told.append(f"{value} has key fields, so it can take no letters: they wait in _undelivered.")
        return told

    async def _count(self, filter_text: str) -> int | None:
        if self._live > COUNTED_MAX:
            return None
        try:
            return await self._client.count(self._topic.name, filter_text)
        except PermissionDenied:
            return None

    async def _durables(self) -> Sequence[Durable] | None:
        try:
            return await self._client.durables(self._topic.name, with_figures=True)
        except SowError:
            return None
