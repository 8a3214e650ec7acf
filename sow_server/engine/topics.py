"""Topics: their settings, what is compiled from them, and their figures.

The registry is changed by the writer thread alone, after the commit that stored the change. Other threads read it:
`by_name` is replaced, never changed, so a reader sees the topics before or after a change, not between.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from sow_server.engine.codec import StoredStatistics, u32
from sow_server.engine.errors import Reason, StoreError
from sow_server.engine.indexes import INDEXES_MAX, NO_INDEXES, Indexes
from sow_server.engine.keys import TOPIC_NAME
from sow_server.engine.model import TTL_MAX_MICROS, Expiration, MessageType, TopicSettings
from sow_server.engine.payloads import Decode, DeriveKeys, Format, format_of, index_paths, key_paths

ONLY_WHILE_EMPTY: Final = ("key", "message_type", "separator")
DYNAMIC_SETTINGS: Final = TopicSettings(expiration=Expiration.ENABLED)
"""A topic that a first publish creates (rule K1)."""


class Topic:
    """One topic. `settings` and `statistics` are replaced by the writer thread after a commit."""

    __slots__ = (
        "acts",
        "create_time_micros",
        "decode_indexed",
        "derive_keys",
        "followers",
        "format",
        "id",
        "in_config",
        "indexes",
        "key_paths",
        "name",
        "prefix",
        "previous_wanted",
        "settings",
        "statistics",
        "stop",
    )

    def __init__(
        self,
        topic_id: int,
        name: str,
        settings: TopicSettings,
        *,
        in_config: bool,
        create_time_micros: int,
        statistics: StoredStatistics,
        indexes: Indexes = NO_INDEXES,
    ) -> None:
        self.id: Final = topic_id
        self.name: Final = name
        self.prefix: Final = u32(topic_id)
        self.stop: Final = u32(topic_id + 1)
        self.in_config = in_config
        self.create_time_micros: Final = create_time_micros
        self.statistics = statistics
        self.followers = 0
        """How many follow the topic's changes as they happen; changed under the writer's cut lock."""
        self.previous_wanted = 0
        """How many of them want the records that were replaced, too; likewise."""
        self.apply(settings, indexes)

    @property
    def wants_previous(self) -> bool:
        """Whether a change needs the record that it replaces: for the entries of indexes, or for those who follow."""
        return bool(self.indexes.all) or self.previous_wanted > 0

    def apply(self, settings: TopicSettings, indexes: Indexes) -> None:
        """Takes new settings into force, and the indexes that go with them."""
        self.settings = settings
        self.indexes = indexes
        """Replaced by the writer thread, under its cut lock: who opens a cut sees what is complete in it."""
        self.acts = settings.acts_on_expiration
        self.format: Format = format_of(settings)
        paths = key_paths(settings)
        self.key_paths: tuple[tuple[str, ...], ...] = tuple(paths)
        self.derive_keys: DeriveKeys | None = self.format.derive_keys(paths) if paths else None
        names = dict.fromkeys([str(index.steps[0]) for index in indexes.all])
        self.decode_indexed: Decode = self.format.decoder(list(names)) if names else self.format.decode
        """A document with at least the fields that the indexes look at."""


class Topics:
    """All topics, by name and by id."""

    def __init__(self) -> None:
        self.by_name: MappingProxyType[str, Topic] = MappingProxyType({})
        self.by_id: MappingProxyType[int, Topic] = MappingProxyType({})

    def find(self, name: str) -> Topic:
        """The topic called `name`. Raises StoreError TOPIC_NOT_FOUND."""
        topic = self.by_name.get(name)
        if topic is None:
            check_name(name)
            raise StoreError(Reason.TOPIC_NOT_FOUND, f"topic: there is no topic {name!r}", field="topic")
        return topic

    def add(self, topic: Topic) -> None:
        """Adds a topic."""
        self._replace({**self.by_name, topic.name: topic})

    def remove(self, topic: Topic) -> None:
        """Removes a topic."""
        self._replace({name: other for name, other in self.by_name.items() if other is not topic})

    def _replace(self, topics: dict[str, Topic]) -> None:
        self.by_name = MappingProxyType(topics)
        self.by_id = MappingProxyType({topic.id: topic for topic in topics.values()})


def check_name(name: str) -> None:
    """Raises StoreError TOPIC_NAME_INVALID for a name that breaks rule K1."""
    if not TOPIC_NAME.match(name) or name.startswith("_"):
        what = "a leading '_' is reserved" if TOPIC_NAME.match(name) else "1 to 200 of [A-Za-z0-9_.:-] are allowed"
        raise StoreError(Reason.TOPIC_NAME_INVALID, f"topic: {name[:220]!r} is no topic name: {what}", field="topic")


def check_settings(settings: TopicSettings) -> None:
    """Raises StoreError INVALID_ARGUMENT naming the setting that is wrong, or the two that contradict each other."""

    def refuse(field: str, message: str) -> StoreError:
        return StoreError(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=f"settings.{field}")

    try:
        key_paths(settings)
    except ValueError as error:
        raise refuse("key", str(error)) from None
    if len(settings.index) > INDEXES_MAX:
        raise refuse("index", f"{len(settings.index)} indexes are more than the limit of {INDEXES_MAX}")
    try:
        index_paths(settings)
    except ValueError as error:
        raise refuse("index", str(error)) from None
    for name in ("default_ttl", "min_ttl", "max_ttl"):
        micros = getattr(settings, f"{name}_micros")
        if micros is not None and not 0 <= micros <= TTL_MAX_MICROS:
            raise refuse(name, "must be between 0s and ten years")
    if settings.default_ttl_micros is not None and settings.expiration is not Expiration.ENABLED:
        raise refuse("default_ttl", f"has no meaning with expiration = {settings.expiration.value!r}")
    low, high = settings.min_ttl_micros, settings.max_ttl_micros
    if low is not None and high is not None and low > high:
        raise refuse("min_ttl", "is above max_ttl")
    if high == 0:
        raise refuse("max_ttl", "must be above 0s: every record would expire at once")
    if len(settings.separator) != 1 or settings.separator == b"=":
        raise refuse("fix_separator", "must be one byte, and not '='")
    if settings.separator != b"\x01" and settings.message_type not in (MessageType.FIX, MessageType.NVFIX):
        raise refuse("fix_separator", f"has no meaning with message_type = {settings.message_type.value!r}")
    time, size = settings.retain_time_micros, settings.retain_bytes
    for field, value in (("retain_time", time), ("retain_bytes", size)):
        if value is not None and value < 0:
            raise refuse(field, "must not be negative")
    if (time == 0) != (size == 0):
        raise refuse("retain_time", "and retain_bytes must both be zero (keep nothing) or neither (rule J3)")
